// Package semantic keeps answers by what was asked, so that a question in other words can be answered by them. See
// DESIGN.md.
//
// Answers lie in partitions, one for each [cache.Context] less its last user text, at the partition's owner in the
// cluster; nothing is ever compared across them. [Cache.Ask] finds what was asked before that is near, has guards and
// a threshold decide whether its answer may be given, and [Cache.Learn] brings back what the model answered
// instead. Everything that fails is a miss.
package semantic

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
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
	// Crossover is the size from which an index of these dimensions is faster than looking at all. It may take milliseconds
	// the first time. nil: the index's default.
	Crossover func(dim int) int

	Logger     *slog.Logger          // nil: none
	Registerer prometheus.Registerer // nil: none
}

// Where Config does not say.
const (
	tenantShare   = 0.25
	maxPartitions = 1 << 16
	insertRate    = 50
	leastBytes    = 1 << 20
)

// validate says what is missing, and fills in what may be.
func (c *Config) validate() error {
	for _, f := range [...]struct {
		name string
		ok   bool
	}{
		{"Ring", c.Ring != nil},
		{"Client", c.Client != nil},
		{"Peers", c.Peers != nil},
		{"Valid", c.Valid != nil},
		{"Now", c.Now != nil},
		{"Rand", c.Rand != nil},
	} {
		if !f.ok {
			return fmt.Errorf("semantic: %s must be given", f.name)
		}
	}
	if c.MaxBytes < leastBytes {
		return fmt.Errorf("semantic: MaxBytes %d: must be at least %d", c.MaxBytes, leastBytes)
	}
	if !(c.TenantShare >= 0 && c.TenantShare <= 1) {
		return fmt.Errorf("semantic: TenantShare %v: above 0, up to 1; 0 for %v", c.TenantShare, tenantShare)
	}
	if c.MaxPartitions < 0 || !(c.InsertsPerSecond >= 0) {
		return errors.New("semantic: MaxPartitions and InsertsPerSecond must not be negative; 0 for their defaults")
	}
	c.TenantShare = cmp.Or(c.TenantShare, tenantShare)
	c.MaxPartitions = cmp.Or(c.MaxPartitions, maxPartitions)
	c.InsertsPerSecond = cmp.Or(c.InsertsPerSecond, insertRate)
	if c.Crossover == nil {
		c.Crossover = func(int) int { return 0 }
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
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
	// Verify says that there is a verifier for what is borderline: a Serve that is comes back uncounted, for Verified.
	Verify bool
	// Only says that the model cannot be asked: what would be audited by chance is served. What serves nothing (shadow, a
	// budget that is exceeded) serves nothing to it, either.
	Only bool
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
	// Borderline is set for a Serve that a verifier, where there is one, should look at first; see Cache.Verified.
	Borderline bool
	Age        time.Duration // of Entry
	Why        string        // in a few words, constant
	Owner      string        // who decided; "" is this node

	id      uint64
	cell    threshold.Cell
	once    uint64 // names it, so that it is learnt once
	pending bool   // nothing counts or remembers it before Verified

	unaudited bool // see threshold.Decision
}

// Label is what a comparison of the model's answer with the candidate's found.
type Label struct {
	Same  bool
	Known bool   // false: they could not be compared
	By    string // how: exact, embedding, verifier, person
	// AnswerHash is of the model's answer, normalised, so that two entries with one answer are known for it. 0: none.
	AnswerHash uint64
	// AnswerVector is of the model's answer, of unit length, likewise; nil: none. Answers is the similarity from which two such say
	// the same; 0: they are not compared.
	AnswerVector []float32
	Answers      float64
}

// Cache is one node's part of the cluster's semantic cache. Safe for concurrent use.
type Cache struct {
	cfg    Config
	shard  *shard
	met    *metrics
	recent recent
	node   uint64 // this run of this node, to others
	queue  queue
	moves  chan struct{} // has a place for each call that brings entries
	moved  chan struct{}
	ctx    context.Context // of all that runs in the background
	cancel context.CancelFunc

	mu     sync.Mutex // over what follows
	rng    *rand.Rand
	breaks map[string]int64 // addresses that did not answer, and until when they are passed over
	told   map[string]bool  // addresses that have heard of all scopes
	done   chan struct{}    // of Run; nil before
	closed bool
}

// New makes an empty Cache, without goroutines until Run.
func New(cfg Config) (*Cache, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	c := &Cache{
		cfg: cfg, breaks: map[string]int64{}, told: map[string]bool{}, rng: rand.New(rand.NewPCG(cfg.Rand.Uint64(), cfg.Rand.Uint64())), node: cfg.Rand.Uint64() | 1,
		moves: make(chan struct{}, maxMoves), moved: make(chan struct{}, 1), queue: queue{jobs: make(chan *lesson, maxLessons)},
		shard: newShard(shardConfig{
			maxBytes: cfg.MaxBytes, tenantBytes: int64(float64(cfg.MaxBytes) * cfg.TenantShare), maxPartitions: cfg.MaxPartitions,
			inserts: cfg.InsertsPerSecond, crossover: cfg.Crossover, valid: cfg.Valid, rand: rand.New(rand.NewPCG(cfg.Rand.Uint64(), cfg.Rand.Uint64())),
		}),
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	var err error
	if c.met, err = newMetrics(cfg.Registerer, c); err != nil {
		c.cancel()
		return nil, fmt.Errorf("semantic: %w", err)
	}
	return c, nil
}

// draw is a number that is not 0.
func (c *Cache) draw() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rng.Uint64() | 1
}

// Run does the work of the background until ctx ends or Close is called, and returns when all of it has ended: labels and answers
// go to their owners, what is over goes, other nodes are told what was counted, partitions move. It is called once at most.
func (c *Cache) Run(ctx context.Context) {
	c.mu.Lock()
	if c.closed || c.done != nil {
		c.mu.Unlock()
		return
	}
	c.done = make(chan struct{})
	c.mu.Unlock()
	defer close(c.done)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	var wg sync.WaitGroup
	for range learners {
		wg.Go(func() { c.learnAll(ctx) })
	}
	wg.Go(func() { c.tellAll(ctx) })
	wg.Go(func() { c.moveAll(ctx) })
	wg.Go(func() { c.shrinkAll(ctx) })
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			wg.Wait()
			return
		case <-tick.C:
			for c.shard.sweep(c.cfg.Now()) && ctx.Err() == nil { //nolint:revive // each sweep is short, so that requests come between
			}
			c.sayTrips()
		}
	}
}

// sayTrips says which surfaces serve nothing but exact answers from now on, and which serve similar ones again.
func (c *Cache) sayTrips() {
	changed, fallen := c.shard.trips()
	c.met.tripped.Set(float64(fallen))
	for _, t := range changed {
		attrs := []any{
			"tenant", t.tenant, "surface", t.surface, "embedder", t.embedder, "per_request", t.why.PerRequest.Estimate, "per_hit", t.why.PerHit.Estimate,
			"audited", t.why.Audited, "wrong", t.why.Wrong, "reported", t.why.Reported, "unlabelled", t.why.Unlabelled,
		}
		switch {
		case t.fallen && t.why.Blind:
			c.cfg.Logger.Warn("too few answers of a surface can be checked: similar questions are not served any more", attrs...)
		case t.fallen:
			c.cfg.Logger.Warn("a surface exceeds its budget for wrong answers: similar questions are not served any more", attrs...)
		default:
			c.cfg.Logger.Info("a surface keeps its budget for wrong answers again: similar questions are served", attrs...)
		}
	}
}

// shrinkAll gives back what indices do not need, until ctx ends.
func (c *Cache) shrinkAll(ctx context.Context) {
	tick := time.NewTicker(shrinkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.shard.shrink(ctx)
		}
	}
}

// Close ends Run and waits for it, drops what is under way and forgets all. A closed Cache misses. Closing it once more does
// nothing.
func (c *Cache) Close() {
	c.cancel()
	c.mu.Lock()
	c.closed = true
	done := c.done
	c.mu.Unlock()
	if done != nil {
		<-done
	}
	c.shard.close()
}

// Ask looks for an answer, on this node or, within 250 ms, at the partition's owner. Whatever fails is a Miss.
func (c *Cache) Ask(ctx context.Context, q *Question) Answer {
	began := c.cfg.Now()
	a := c.ask(ctx, q)
	a.once = c.draw()
	c.met.seconds.Observe(time.Duration(c.cfg.Now() - began).Seconds())
	if !a.pending {
		c.note(ctx, q, &a)
	}
	return a
}

// Verified says what a verifier found of a borderline Serve that Ask gave to q, a question with Verify: whether the two
// questions ask the same. It turns the Answer into an Explore where they do not, or nobody could say, and counts,
// logs and remembers what has become of it, once; the owner hears of it in the background. Until then nothing does. It is
// called before Learn and waits for nothing; of another Answer it changes nothing. Not to be called for one Answer by two
// at a time.
func (c *Cache) Verified(q *Question, a *Answer, same bool) {
	if a.Action != threshold.Serve || !a.Borderline {
		return
	}
	a.Borderline, a.Why = false, whyVerified
	if !same {
		a.Action, a.Why = threshold.Explore, whyRefuted
	}
	if !a.pending {
		return
	}
	a.pending = false
	c.note(c.ctx, q, a)
	c.queue.push(c, &lesson{
		settles: true, unaudited: a.unaudited, place: q.place(), once: c.draw(), policy: q.Policy, id: a.id, similarity: a.Similarity, action: a.Action, cell: a.cell, came: c.cfg.Now(),
	})
}

func (c *Cache) ask(ctx context.Context, q *Question) Answer {
	if err := q.check(); err != nil {
		return Answer{Why: whyUnfit}
	}
	if c.ctx.Err() != nil {
		return Answer{Why: whyClosed}
	}
	if address := c.owner(q.Partition); address != "" {
		return c.there(ctx, address, q)
	}
	return c.here(q)
}

// here asks this node's own shard.
func (c *Cache) here(q *Question) Answer {
	f := c.shard.find(c.cfg.Now(), q)
	if f.probe {
		c.met.probe(q.Tenant)
	}
	a := Answer{
		Action: f.decision.Action, Shadow: f.shadow, EntryID: formatID(f.id), Similarity: f.similarity, Threshold: f.decision.Threshold, Tau: f.decision.Tau,
		Confidence: f.decision.Confidence, Refused: f.refused, Borderline: f.borderline, Why: f.decision.Why, id: f.id, cell: f.decision.Cell,
		pending: f.pending, unaudited: f.decision.Unaudited,
	}
	if f.answer != nil {
		a.Entry, a.Age, a.CachedText = f.answer, f.age, f.e.text
		a.Entry.Age = f.age
	}
	return a
}

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

// Stats is of this node, in the order of tenant, surface and embedder.
func (c *Cache) Stats() []Surface { return c.shard.surfaces() }

// bySurface orders them.
func bySurface(a, b Surface) int {
	return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Surface, b.Surface), cmp.Compare(a.Embedder, b.Embedder))
}
