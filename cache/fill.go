package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
)

// ErrBroken ends a Reader whose leader did not come to an end: what was read is a prefix of an answer.
var ErrBroken = errors.New("cache: the answer broke off")

// errLink is ErrBroken where nothing is known of the leader.
var errLink = fmt.Errorf("%w: the link to the key's owner was lost", ErrBroken)

// Where Config does not say.
const (
	maxEntry  = 16 << 20  // bytes of a body
	maxFlying = 128 << 20 // bytes of streams on their way
)

// Config of an Exact. All but MaxEntry, MaxFlying, Logger and Registerer are required; functions must be safe
// for concurrent use, take no longer than microseconds, and not call the Exact.
type Config struct {
	// Store keeps entries on this node: a *Store. It is its maker's to close, after the Exact.
	Store entries
	// Ring gives the address of a key's owner first, then those of its successors, in an order that
	// all nodes agree on; "" is this node. None: this node alone.
	Ring func(Key) []string
	// Client is the connection to an address.
	Client func(address string) (grpc.ClientConnInterface, error)
	// Valid says whether nothing that the entry depends on was invalidated after its Stamp.
	Valid func(*Entry) bool
	// Stamp is where the ledger is: what is invalidated later has a higher one.
	Stamp func() uint64
	// Now is a clock in nanoseconds that counts suspend and is never put back by more than a moment.
	Now func() int64
	// Rand draws jitter and the numbers of leads; only the Exact may use it.
	Rand *rand.Rand
	// MaxEntry bounds the body of an entry, in bytes: what is larger is not stored, and refused when
	// it comes from another node. 0: 16 MiB.
	MaxEntry int64
	// MaxFlying bounds, in bytes, what this node holds of all streams that are on their way, for those who
	// follow them: one that there is no room for is as one that is too large. 0: 128 MiB.
	MaxFlying int64

	Logger     *slog.Logger          // nil: none
	Registerer prometheus.Registerer // nil: none
}

// validate says what is missing.
func (c *Config) validate() error {
	for _, f := range [...]struct {
		name string
		ok   bool
	}{
		{"Store", c.Store != nil},
		{"Ring", c.Ring != nil},
		{"Client", c.Client != nil},
		{"Valid", c.Valid != nil},
		{"Stamp", c.Stamp != nil},
		{"Now", c.Now != nil},
		{"Rand", c.Rand != nil},
	} {
		if !f.ok {
			return fmt.Errorf("cache: %s must be given", f.name)
		}
	}
	if c.MaxEntry < 0 || c.MaxEntry > maxEntry {
		return fmt.Errorf("cache: MaxEntry %d: from 1 to %d, or 0 for that", c.MaxEntry, maxEntry)
	}
	if c.MaxEntry == 0 {
		c.MaxEntry = maxEntry
	}
	if c.MaxFlying < 0 {
		return fmt.Errorf("cache: MaxFlying %d: must not be negative; 0 for %d", c.MaxFlying, maxFlying)
	}
	if c.MaxFlying == 0 {
		c.MaxFlying = maxFlying
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// entries is what an Exact needs of a Store, which says what its methods do. What was put is found
// from then on.
type entries interface {
	Get(key Key, now int64) (Hit, bool)
	Read(key Key, now int64) (Hit, bool)
	Peek(key Key, now int64) (Hit, bool)
	Stale(key Key, now int64) (Hit, bool)
	Put(e *Entry) bool
	PutCopy(h Hit) bool
	Release(key Key, pause time.Duration)
	Stats() Stats
}

// Exact answers from what is stored, on this node or at the key's owner, and lets one request in
// the cluster ask the model while the others wait for it. Safe for concurrent use.
type Exact struct {
	cfg    Config
	met    *metrics
	ctx    context.Context // of all that runs in the background
	cancel context.CancelFunc
	wg     sync.WaitGroup
	room   room          // of the tapes of this node
	puts   chan struct{} // has a place for each Put that is on its way

	mu       sync.Mutex // over what follows and all that hangs on it; never held across I/O
	closed   bool
	branches map[branchID]*branch
	waiting  int
	referee  referee
	broken   map[string]int64 // addresses that did not answer, and until when they are passed over
}

// NewExact returns an Exact, which has no goroutines until it is used. Close it.
func NewExact(cfg Config) (*Exact, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	e := &Exact{
		cfg: cfg, branches: map[branchID]*branch{}, broken: map[string]int64{}, puts: make(chan struct{}, maxPuts),
	}
	e.room.most = cfg.MaxFlying
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.referee = referee{
		flights: map[Key]*flight{}, passes: map[Key]int64{},
		valid: cfg.Valid, room: &e.room,
		token:  func() uint64 { return cfg.Rand.Uint64() | 1 }, // e.mu is held
		handed: func(reason string) { e.met.handovers.WithLabelValues(reason).Inc() },
	}
	var err error
	if e.met, err = newMetrics(cfg.Registerer, e); err != nil {
		return nil, fmt.Errorf("cache: register metrics: %w", err)
	}
	return e, nil
}

// start runs f in the background, unless the Exact is closed; e.mu is held.
func (e *Exact) start(f func()) bool {
	if e.closed {
		return false
	}
	e.wg.Go(f)
	return true
}

// Run forgets what has expired until ctx ends, then closes.
func (e *Exact) Run(ctx context.Context) error {
	defer e.Close()
	t := time.NewTicker(passFor)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-e.ctx.Done():
			return nil
		case <-t.C:
			e.mu.Lock()
			e.referee.prune(e.cfg.Now())
			e.mu.Unlock()
		}
	}
}

// Close ends all flights: who waits, and whoever joins later, passes; readers get ErrBroken; fills that
// go on do so for their own clients. It waits for all that runs in the background. The gRPC server that
// it was registered with must be stopped, too, or it waits for the other nodes to leave.
func (e *Exact) Close() {
	e.mu.Lock()
	e.closed = true
	e.cancel()
	e.mu.Unlock()
	e.wg.Wait()
}

// Ask is one request's interest in an answer. It must not change while Join runs.
type Ask struct {
	Key Key
	// Tenant and Tags are what the answer is known to depend on before there is one: whoever comes after one of
	// them was invalidated does not follow the stream of one who came before.
	Tenant string
	Tags   []string

	Live bool // another's stream will do: the Turn may be TurnLive
	// Refresh: nothing stored will do. An answer that is on its way will.
	Refresh bool
	// Early is a background refresh of a stored entry, which never waits for others. Where another
	// leads the Turn is TurnBusy; where the owner has a fresh entry that is younger than Age it is
	// TurnHit, and that entry is stored here from now on.
	Early bool
	Age   time.Duration // with Early: of the entry here
	// MaxEntry bounds the body of an entry that is stored, below Config.MaxEntry; 0: that.
	MaxEntry int64
	// LeadFor is how long a leader may go without a byte before the next may try too; 0: 30 s, at most
	// an hour.
	LeadFor time.Duration
}

// TurnKind says what to do.
type TurnKind uint8

// The turns.
const (
	TurnHit    TurnKind = iota + 1 // serve Hit
	TurnLead                       // ask the model, and end Fill
	TurnLive                       // relay Live, and Close it
	TurnFailed                     // the model answered Failed to others, twice
	TurnPass                       // ask the model for yourself alone, store nothing
	TurnBusy                       // of an Early Ask: there is nothing to do
)

// Turn is what a Join came to. Of Hit, Fill, Live and Failed the one of its Kind is set.
type Turn struct {
	Kind   TurnKind
	Hit    Hit
	Fill   *Fill
	Live   *Reader
	Failed Failure
	// Stale may be there with TurnLead, TurnFailed and TurnPass: what may be served where the model fails, here or
	// at the owner.
	Stale *Hit
}

// Failure is an answer of the model that is not 2xx. Body must not be written to.
type Failure struct {
	Status      int
	ContentType string
	Body        []byte
}

// Look finds what is stored on this node. It never waits.
func (e *Exact) Look(k Key) (Hit, bool) { return e.cfg.Store.Get(k, e.cfg.Now()) }

// Join blocks until there is something to do. Its error is that of ctx. Who gets a TurnLead must
// end the Fill, who gets a TurnLive must Close the Reader.
func (e *Exact) Join(ctx context.Context, ask *Ask) (Turn, error) {
	if err := ctx.Err(); err != nil {
		return Turn{}, err
	}
	kind := asUsual
	switch {
	case ask.Early:
		kind = asEarly
	case ask.Refresh:
		kind = asRefresh
	}
	look := func() (Hit, bool) {
		if kind != asUsual {
			return Hit{}, false
		}
		return e.Look(ask.Key)
	}
	h, ok := e.lookThenLock(look, func() bool {
		if kind != asUsual || e.branches[branchID{ask.Key, kind}] != nil {
			return false // others wait here: who answers them answers this one
		}
		_, there := e.cfg.Store.Peek(ask.Key, e.cfg.Now())
		return there
	})
	if ok {
		return Turn{Kind: TurnHit, Hit: h}, nil
	}
	w := &waiter{ask: ask, turn: make(chan Turn, 1)}
	e.enter(w, kind)
	e.mu.Unlock()
	select {
	case t := <-w.turn:
		return e.complete(ask, t), nil
	case <-ctx.Done():
	}
	e.mu.Lock()
	left := w.at != nil
	if left {
		w.b.leave(w)
	}
	e.mu.Unlock()
	if left {
		return Turn{}, ctx.Err()
	}
	return e.complete(ask, <-w.turn), nil // it was answered meanwhile: a lead must not get lost
}

// complete adds what may be served where the model fails.
func (e *Exact) complete(ask *Ask, t Turn) Turn {
	if ask.Early && (t.Kind == TurnPass || t.Kind == TurnFailed) {
		return Turn{Kind: TurnBusy}
	}
	if t.Kind == TurnHit || t.Kind == TurnLive {
		return t
	}
	if t.Stale != nil && !e.cfg.Valid(t.Stale.Entry) {
		t.Stale = nil
	}
	if t.Stale == nil {
		if h, ok := e.cfg.Store.Stale(ask.Key, e.cfg.Now()); ok {
			t.Stale = &h
		}
	}
	return t
}

// maxLooks bounds how often a look that found nothing is repeated, as something is there the next moment.
const maxLooks = 4

// lookThenLock looks, and where it finds nothing e.mu is held when it returns, from a moment on at which nothing
// was there either: what a flight that has ended meanwhile left is found. Looks are made without the
// lock, since bodies are unpacked.
func (e *Exact) lookThenLock(look func() (Hit, bool), there func() bool) (Hit, bool) {
	for range maxLooks {
		if h, ok := look(); ok {
			return h, true
		}
		e.mu.Lock()
		if !there() {
			return Hit{}, false
		}
		e.mu.Unlock()
	}
	e.mu.Lock() // it is there and cannot be had
	return Hit{}, false
}

// Fill is the right to ask the model for all who want the same. Whoever has it must end it by one of
// Store, Share, Unshareable, Failed, Abandon and Broken. The first counts; all methods are safe after
// it, in any order, and by several goroutines.
type Fill struct {
	e        *Exact
	b        *branch
	token    uint64
	stamp    uint64
	about    *Entry // what is known of the answer: its key, tenant, tags and stamp
	since    int64
	maxEntry int64
	ended    atomic.Bool

	// Exact.mu is over these.
	tape    *tape // what was published; nil: Begin was not called
	large   bool  // it was too large to be followed: the flight is over for the others
	gone    bool  // its client has left
	others  bool  // requests of other nodes wait for it
	cancels []context.CancelFunc
}

// Context is for the call to the model: it ends when client has ended and nobody, on any node, waits
// for the answer, and when the CancelFunc is called, which must be. It has the values of client but
// not its deadline.
func (f *Fill) Context(client context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(client))
	e := f.e
	e.mu.Lock()
	f.cancels = append(f.cancels, cancel)
	e.mu.Unlock()
	stop := context.AfterFunc(client, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		f.gone = true
		if f.ended.Load() {
			f.stop()
		}
		f.b.restate()
	})
	return ctx, func() {
		stop()
		cancel()
	}
}

// Begin says that a 2xx stream of events has begun that may be given to others: those who take a live
// stream go on with it. Later ones are void.
func (f *Fill) Begin(contentType string) {
	f.e.mu.Lock()
	defer f.e.mu.Unlock()
	if !f.ended.Load() {
		f.begin(contentType)
	}
}

// Write publishes bytes as they passed. It copies p and never waits. Without Begin it does nothing.
// Beyond 8 MiB, or Config.MaxFlying with all others, the stream ends for the others: readers get ErrBroken, who waits passes, and so does who comes
// within ten seconds; Store still stores.
func (f *Fill) Write(p []byte) {
	if len(p) == 0 {
		return
	}
	first, rest := cut(append([]byte(nil), p...))
	f.e.mu.Lock()
	defer f.e.mu.Unlock()
	if f.ended.Load() {
		return
	}
	f.write(first)
	for _, p := range rest {
		f.write(p)
	}
}

// Store ends the fill: the answer is whole, and may be stored. Key, Stamp, Delta and Age are set here,
// and its life gets its jitter. What is larger than MaxEntry is shared only. What was invalidated meanwhile is for
// those who read it as it passed: they get io.EOF, and the next who waits leads.
func (f *Fill) Store(en *Entry) { f.whole(upStore, en) }

// Share ends the fill: the answer is whole, goes to those who wait now, and is not stored. Of one that
// was found elsewhere (Via) the caller sets what Store sets.
func (f *Fill) Share(en *Entry) { f.whole(upShare, en) }

func (f *Fill) whole(kind upKind, en *Entry) {
	if !f.ended.CompareAndSwap(false, true) {
		return
	}
	e, filled := f.e, *en
	filled.Key = f.b.id.key
	if filled.Via == "" {
		filled.Stamp, filled.Delta, filled.Age = f.stamp, f.delta(), 0
	}
	e.mu.Lock()
	filled.Life = Jitter(filled.Life, e.cfg.Rand)
	e.mu.Unlock()
	switch size := int64(len(filled.Body)); {
	case size > maxEntry:
		f.last(&up{kind: upUnshareable}, ErrBroken)
		return
	case size > f.maxEntry, filled.Via != "":
		kind = upShare
	}
	if kind == upStore && e.cfg.Valid(&filled) { // before the flight ends, so that nobody finds neither
		e.cfg.Store.Put(&filled)
	}
	f.last(&up{kind: kind, entry: &filled}, io.EOF)
}

// last ends the fill.
func (f *Fill) last(u *up, tape error) {
	if u.kind != upStore && f.b.id.kind == asEarly {
		pause := refreshPause
		if u.unasked {
			pause = 0
		}
		f.e.cfg.Store.Release(f.b.id.key, pause)
	}
	f.e.mu.Lock()
	defer f.e.mu.Unlock()
	if u.entry != nil && !f.e.cfg.Valid(u.entry) { // since it was stored: who joined after that must not get it
		u = &up{kind: upAbandon, invalid: true}
	}
	f.conclude(u, tape)
}

func (f *Fill) end(u *up, tape error) {
	if f.ended.CompareAndSwap(false, true) {
		f.last(u, tape)
	}
}

// Unshareable ends the fill: the answer is whole and may not be given to others, who ask for themselves, now
// and for the next ten seconds. Readers, who have had all of it, get io.EOF.
func (f *Fill) Unshareable() { f.end(&up{kind: upUnshareable}, io.EOF) }

// Failed ends the fill: the model answered an error. The next who waits leads; after the second time all get
// TurnFailed. Readers, who saw it pass, get io.EOF. A body beyond 1 MiB is not shared: that is Abandon(true).
func (f *Fill) Failed(x Failure) {
	if len(x.Body) > maxFailure || len(x.ContentType) > maxName || x.Status <= 0 {
		f.end(&up{kind: upAbandon, counts: true}, io.EOF)
		return
	}
	f.end(&up{kind: upFailed, failure: x}, io.EOF)
}

// Abandon ends the fill: there was no answer. The next who waits leads; after two that count all pass, and after
// eight that do not.
func (f *Fill) Abandon(counts bool) { f.end(&up{kind: upAbandon, counts: counts}, ErrBroken) }

// Refused ends the fill: its request was refused before the model was asked. The next who waits leads, and nothing
// is counted, so that any number of them may come before one that is not refused.
func (f *Fill) Refused() { f.end(&up{kind: upAbandon, unasked: true}, ErrBroken) }

// statusBroken is that of a Failure which no model has worded: streams broke off.
const statusBroken = 502

// Broken ends the fill: its stream broke off. Readers get ErrBroken, the next who got no byte leads. After the
// second time all get TurnFailed, without a body.
func (f *Fill) Broken() { f.end(&up{kind: upBroken}, ErrBroken) }

// Reader follows another's stream. Next is for one goroutine at a time.
type Reader struct {
	b      *branch
	tape   *tape
	at     int
	broken bool // it was counted
	closed bool // Exact.mu is over it
}

// ContentType of the stream.
func (r *Reader) ContentType() string { return r.tape.contentType }

// Next waits for bytes, which the caller must not change. Its error is io.EOF where the answer is
// whole, ErrBroken where it broke off, or that of ctx.
func (r *Reader) Next(ctx context.Context) ([]byte, error) {
	for {
		chunk, err, more := r.tape.from(r.at)
		switch {
		case chunk != nil:
			r.at++
			return chunk, nil
		case err != nil:
			r.count(err)
			return nil, err
		}
		select {
		case <-more:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// count counts a stream that broke off, once.
func (r *Reader) count(err error) {
	if r.broken || errors.Is(err, io.EOF) {
		return
	}
	r.broken = true
	reason := "leader"
	if errors.Is(err, errLink) {
		reason = "link"
	}
	r.b.e.met.broken.WithLabelValues(reason).Inc()
}

// Close ends the interest in the stream. More than once is as good as once.
func (r *Reader) Close() {
	r.b.e.mu.Lock()
	defer r.b.e.mu.Unlock()
	if !r.closed {
		r.closed = true
		r.b.readers--
		r.tape.read(-1)
		r.b.restate()
	}
}
