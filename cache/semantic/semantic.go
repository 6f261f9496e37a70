// Package semantic keeps answers by what was asked, so that a question in other words can be answered by them. See
// DESIGN.md.
//
// Answers lie in partitions, one for each [cache.Context] less its last user text, at the partition's owner in the
// cluster; nothing is ever compared across them. [Cache.Ask] finds what was asked before that is near, has guards and
// a threshold decide whether its answer may be given, and [Cache.Learn] brings back what the model answered
// instead. Everything that fails is a miss.
package semantic

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"headgate/cache"
	"headgate/cache/guard"
	"headgate/cache/threshold"
)

// Config of a Cache. Ring, Client, Peers, Valid, Now, Rand and MaxBytes are required; functions must be safe for concurrent
// use, take no longer than microseconds, and not call the Cache.
type Config struct {
	// Ring gives the address of a partition's owner first; "" is this node. None: this node alone.
	Ring func(cache.Key) []string
	// Client is the connection to an address.
	Client func(address string) (grpc.ClientConnInterface, error)
	// Peers are the addresses of all other nodes.
	Peers func() []string
	// Valid says whether nothing that the entry depends on was invalidated after its Stamp.
	Valid func(*cache.Entry) bool
	// Now is a clock in nanoseconds that counts suspend and is never put back by more than a moment.
	Now func() int64
	// Rand draws ids and who is audited; only the Cache may use it.
	Rand *rand.Rand
	// MaxBytes bounds the memory of all that is kept, its indices included.
	MaxBytes int64
	// TenantShare is the part of MaxBytes that one tenant may take, in (0, 1]. 0: a quarter.
	TenantShare float64
	// MaxPartitions bounds their number. 0: 65,536.
	MaxPartitions int
	// InsertsPerSecond bounds the new entries of a tenant on this node; ten seconds' worth may come at once. 0: 50.
	InsertsPerSecond float64
	// Crossover is the size from which an index of these dimensions is faster than looking at all. nil: the index's default.
	Crossover func(dim int) int

	Logger     *slog.Logger          // nil: none
	Registerer prometheus.Registerer // nil: none
}

// Question is what is asked. Nothing in it is written to.
type Question struct {
	// Partition is of all but the last user text, the embedder's version included.
	Partition cache.Key
	// Tenant, Surface and Embedder (its version) are what is counted together. A partition has one of each.
	Tenant, Surface, Embedder string
	Text                      string
	Vector                    []float32 // of Text, of unit length
	Policy                    threshold.Policy
	// Least is the least similarity that the client takes; it only tightens. 1 and more: no hit.
	Least float64
	// Tags that an entry must have.
	Tags []string
	// Request is the id for logs.
	Request string
}

// Answer is what became of a Question.
type Answer struct {
	// Action is what to do: Serve Entry; Explore or Audit, which is to ask the model, compare its answer with Entry's and
	// Learn; Miss, which is to ask the model and Learn. Never Serve where Shadow is set.
	Action threshold.Action
	// Shadow is set where the policy serves nothing whatever is found.
	Shadow bool
	// Entry is the candidate's; nil for a Miss. It must not be written to.
	Entry *cache.Entry
	// EntryID names the candidate to clients, and to Wrong; "" where there is none. A Miss can have one.
	EntryID string
	// CachedText is what was asked when the candidate was answered.
	CachedText string
	Similarity float64
	Threshold  float64 // see threshold.Decision
	Tau        float64
	Confidence float64
	// Refused is why guards refused the nearest neighbour that they did refuse. A and B of it are content.
	Refused []guard.Reason
	// Borderline is set for a Serve that a verifier, where there is one, should look at first.
	Borderline bool
	Age        time.Duration // of Entry
	Why        string        // in a few words, constant
	Owner      string        // who decided; "" is this node

	id   uint64
	cell threshold.Cell
}

// Label is what a comparison of the model's answer with the candidate's found.
type Label struct {
	Same  bool
	Known bool   // false: they could not be compared
	By    string // how: exact, embedding, verifier, person
	// AnswerHash is of the model's answer, normalised, so that two entries with one answer are known for it. 0: none.
	AnswerHash uint64
}

// Cache is one node's part of the cluster's semantic cache. Safe for concurrent use.
type Cache struct {
	cfg Config
}

// New makes an empty Cache, without goroutines until Run.
func New(cfg Config) (*Cache, error) { return &Cache{cfg: cfg}, nil }

// Register serves other nodes.
func (c *Cache) Register(s grpc.ServiceRegistrar) {}

// Run does the work of the background until ctx ends or Close is called: labels and answers to their owners, expiry, sketches to
// the other nodes, moves. It is called once.
func (c *Cache) Run(ctx context.Context) {}

// Close ends Run, drops what is under way and forgets all. A closed Cache misses.
func (c *Cache) Close() {}

// Moved says that the ring changed: partitions that are not this node's any more go to their owners in the background.
func (c *Cache) Moved() {}

// Ask looks for an answer, on this node or, within 250 ms, at the partition's owner. Whatever fails is a Miss.
func (c *Cache) Ask(ctx context.Context, q *Question) Answer { return Answer{Why: "no neighbour"} }

// Learn takes the model's answer to q, to which a was what Ask said, and what comparing it with a's found. It is kept (entry,
// unless nil; its Age counts from the fill, its Life.TTL is how long) where it is another answer than the candidate's, or
// there was none. It does not wait; where too much is under way it is dropped. q, a and entry must not be changed
// afterwards.
func (c *Cache) Learn(ctx context.Context, q *Question, a *Answer, l Label, entry *cache.Entry) {}

// Report is what Wrong did.
type Report struct {
	Found           bool // an entry was evicted, or a decision that served it is remembered
	Evicted         int  // nodes that held it
	Unreached       int  // nodes that could not be asked
	Tenant, Surface string
}

// ErrID is an entry id that is none.
var ErrID = errors.New("semantic: an entry id is 16 hexadecimal digits, as X-Headgate-Cache-Entry has them")

// Wrong evicts an entry on every node, and counts against it where it was served. By names who says so. An error wraps ErrID.
func (c *Cache) Wrong(ctx context.Context, entryID, by string) (Report, error) { return Report{}, nil }

// Bins of a histogram of similarities: from 0 to 1 in steps of 0.02; what is below 0 is in the first.
const Bins = 50

// Surface is what Stats tells of one (tenant, surface, embedder) on this node; Budget is of the cluster.
type Surface struct {
	Tenant, Surface, Embedder                  string
	Partitions, Entries                        int
	Bytes                                      int64
	Missed, Explored, Audited, Served          int64
	Same, Different, Unknown, Reported, Probes int64
	Budget                                     threshold.Snapshot
	ServedAt, RefusedAt                        [Bins]int64 // similarities of what was served, and of what guards refused
}

// Stats is of this node, by tenant, surface and embedder.
func (c *Cache) Stats() []Surface { return nil }

// MaxRecent is how many decisions are remembered.
const MaxRecent = 1000

// Decision is one that was taken for a request of this node. It has no content.
type Decision struct {
	At                         int64 // Config.Now
	Request                    string
	Tenant, Surface            string
	Entry                      string
	Action                     string // miss, explore, audit, serve
	Shadow                     bool
	Similarity, Threshold, Tau float64
	Refused                    []string // kinds of guards
	Why                        string
}

// Recent is the last MaxRecent decisions, the newest first.
func (c *Cache) Recent() []Decision { return nil }
