package cache

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
)

// ErrBroken ends a Reader whose leader did not come to an end: what was read is a prefix of an answer.
var ErrBroken = errors.New("cache: the answer broke off")

// ErrClosed is returned by Join after Close.
var ErrClosed = errors.New("cache: closed")

// Config of an Exact. Ring, Client, Valid, Stamp, Current, Now and Rand are required; all functions must be
// safe for concurrent use, fast, and must not call back.
type Config struct {
	// Store keeps entries on this node.
	Store entries
	// Ring gives addresses of a key's owner first, then of its successors, in an order that all
	// nodes agree on; "" is this node. None: this node.
	Ring func(Key) []string
	// Client is the connection to an address.
	Client func(address string) (grpc.ClientConnInterface, error)
	// Valid says whether nothing that the entry depends on was invalidated after its Stamp.
	Valid func(*Entry) bool
	// Stamp is where the ledger is: what is invalidated later has a higher one.
	Stamp func() uint64
	// Current says whether this node hears of invalidations now. Where it does not, nothing stored
	// here is served.
	Current func() bool
	// Now is a monotone clock in nanoseconds that counts suspend.
	Now func() int64
	// Rand draws the jitter of lives; guarded by the Exact.
	Rand *rand.Rand
	// MaxEntry bounds the body of an entry in bytes; larger ones of other nodes are refused. 16 MiB where 0.
	MaxEntry int64

	Logger     *slog.Logger          // may be nil
	Registerer prometheus.Registerer // may be nil
}

// entries is what an Exact needs of a store. Get says Refresh once for each time that an entry
// should be refreshed; Stale is what may be served where the model fails. What was Put is found at
// once. Entries that Config.Valid refuses are not found.
type entries interface {
	Get(key Key, now int64) (Hit, bool)
	Stale(key Key, now int64) (Hit, bool)
	Put(e Entry)
	Clear()
}

// Exact answers from what is stored, on this node or at the key's owner, and lets one request in
// the cluster ask the model while the others wait for it. Safe for concurrent use.
type Exact struct {
	cfg Config
}

// NewExact returns an Exact. Close it.
func NewExact(cfg Config) (*Exact, error) { return &Exact{cfg: cfg}, nil }

// Register serves other nodes.
func (e *Exact) Register(s grpc.ServiceRegistrar) {}

// Run forgets what has expired until ctx ends, then closes.
func (e *Exact) Run(ctx context.Context) error {
	<-ctx.Done()
	e.Close()
	return nil
}

// Close ends all flights: who waits is told to ask the model itself, readers get ErrBroken. It waits
// for everything that runs in the background.
func (e *Exact) Close() {}

// Clear drops all that is stored here; what is being filled is not stored either.
func (e *Exact) Clear() {}

// Ask is one request's interest in an answer.
type Ask struct {
	Key  Key
	Live bool // another's stream will do: Turn may be TurnLive
	// Refresh: nothing stored will do. An answer that is on its way will.
	Refresh bool
	// Early is a background refresh of a stored entry: it never waits for others. Where another
	// leads the Turn is TurnBusy; where the owner has a younger entry than Age it is a TurnHit and the entry is here.
	Early bool
	Age   time.Duration // with Early: of the entry here
	// MaxEntry bounds the body of an entry that will do; 0: Config.MaxEntry.
	MaxEntry int64
	// LeadFor is how long a leader may go without a byte before the next may try too; 0: 30 s.
	LeadFor time.Duration
}

// TurnKind says what to do.
type TurnKind uint8

// The turns.
const (
	TurnHit    TurnKind = iota + 1 // serve Hit
	TurnLead                       // ask the model and end Fill
	TurnLive                       // relay Live, and Close it
	TurnFailed                     // the model answered Failed to others, twice
	TurnPass                       // ask the model for yourself alone, store nothing
	TurnBusy                       // of an Early ask: there is nothing to do
)

// Turn is what a Join came to. Of Hit, Fill, Live and Failed the one of its Kind is set.
type Turn struct {
	Kind   TurnKind
	Hit    Hit
	Fill   *Fill
	Live   *Reader
	Failed Failure
	// Stale may be there with TurnLead, TurnFailed and TurnPass: what may be served where the model fails.
	Stale *Hit
}

// Failure is an answer of the model that is not 2xx.
type Failure struct {
	Status      int
	ContentType string
	Body        []byte
}

// Look finds what is stored on this node. It never waits.
func (e *Exact) Look(k Key) (Hit, bool) { return Hit{}, false }

// Join blocks until there is something to do. Its errors are those of ctx, and ErrClosed.
func (e *Exact) Join(ctx context.Context, ask *Ask) (Turn, error) {
	return Turn{Kind: TurnLead, Fill: &Fill{}}, nil
}

// Fill is the right to ask the model for all who want the same. Whoever has it must end it by one of Store,
// Share, Unshareable, Failed, Abandon and Broken; the first counts, all are safe after it, in any order,
// by several goroutines.
type Fill struct{}

// Context is for the call to the model: it ends when client has ended and nobody, on any node, waits for
// the answer, and when the CancelFunc is called. It has the values of client.
func (f *Fill) Context(client context.Context) (context.Context, context.CancelFunc) {
	return context.WithCancel(client)
}

// Begin says that a 2xx stream of events has begun that may be given to others: those who take a live
// stream go on with it. Later ones are void.
func (f *Fill) Begin(contentType string) {}

// Write publishes bytes as they passed. It copies p and never blocks. Without Begin it does nothing.
func (f *Fill) Write(p []byte) {}

// Store ends the fill: the answer is whole and may be stored. Key, Stamp, Delta and Age are set here, the lives
// get their jitter. Where e was invalidated meanwhile it is given to nobody.
func (f *Fill) Store(e *Entry) {}

// Share ends the fill: the answer is whole, goes to those who wait now, and is not stored.
func (f *Fill) Share(e *Entry) {}

// Unshareable ends the fill: the answer is whole and may not be given to others, who ask for themselves now and
// for the next ten seconds. Readers of what Begin published get ErrBroken.
func (f *Fill) Unshareable() {}

// Failed ends the fill: the model answered an error. The next who waits leads; after the second time
// all get TurnFailed.
func (f *Fill) Failed(x Failure) {}

// Abandon ends the fill: there was no answer. The next who waits leads; after two that count all pass.
func (f *Fill) Abandon(counts bool) {}

// Broken ends the fill: the stream broke off. Readers get ErrBroken; the next who got no byte leads. It counts
// like Abandon(true).
func (f *Fill) Broken() {}

// Reader follows another's stream. It is for one goroutine.
type Reader struct{}

// ContentType of the stream.
func (r *Reader) ContentType() string { return "" }

// Next waits for bytes, which the caller must not change. io.EOF: the answer is whole; ErrBroken: it broke off; or
// ctx's error.
func (r *Reader) Next(ctx context.Context) ([]byte, error) { return nil, ErrBroken }

// Entry is the answer as it was stored or shared, after io.EOF; nil where it is not known.
func (r *Reader) Entry() *Entry { return nil }

// Close ends the interest in the stream. It may be called more than once.
func (r *Reader) Close() {}

// GetMany finds many entries, on this node and at their owners, each of whom is asked once, for 300 ms at
// most. The result has the length of keys, nil where nothing was found.
func (e *Exact) GetMany(ctx context.Context, keys []Key) []*Entry { return make([]*Entry, len(keys)) }

// PutMany stores entries here and, in the background, at their owners. The caller sets Key and Stamp, as read from
// Config.Stamp before the model was asked.
func (e *Exact) PutMany(many []Entry) {}
