package lease

import (
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"headgate/limiter"
)

// Blocks draws what durable limits lend from where it outlives processes. It is called
// concurrently. An error is an unknown outcome: the same Draw comes again.
type Blocks interface {
	Draw(ctx context.Context, d Draw) (Drawn, error)
}

// ManagerConfig is what a Manager is made from. Self, Clock and Rights are needed, in a cluster
// Client, too; the rest has defaults.
type ManagerConfig struct {
	Self   Member
	Clock  Clock
	Rights Rights
	Sizer  Sizer // nil: the default
	// MaxBuckets bounds the buckets of which this process is the owner, those of which it holds
	// leases, and its private ones, each; 0: DefaultMaxBuckets.
	MaxBuckets int
	// Wait is how long after a view nobody can still act on the one before; 0: as DESIGN.md has it.
	Wait time.Duration
	// Budget is the most that a Take waits for owners, all of them together; 0: 250 ms.
	Budget time.Duration
	// Blocks fills durable limits; nil: they have nothing to lend.
	Blocks Blocks
	// Client is the connection to the process that gossips at an address. Drop has it made anew the
	// next time; nil: it never is.
	Client     func(address string) (grpc.ClientConnInterface, error)
	Drop       func(address string)
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Manager is a process's part in the leases of its cluster: the owner of some buckets, a holder
// of any. It is the shell round Owner and Holder, with the clock, the streams and the waiting. Its
// methods may be called concurrently.
type Manager struct {
	cfg   ManagerConfig
	local *Local
}

// NewManager returns a Manager that decides nothing before its first Step. Call Run for it to
// speak to others.
func NewManager(cfg ManagerConfig) (*Manager, error) {
	local, err := NewLocal(Config{MaxBuckets: cfg.MaxBuckets})
	if err != nil {
		return nil, err
	}
	return &Manager{cfg: cfg, local: local}, nil
}

// NewAlone returns a Manager that owns every bucket and needs no other process, nor Run: for a
// process without a cluster, tests and benchmarks. maxBuckets 0 is DefaultMaxBuckets.
func NewAlone(clock Clock, maxBuckets int) (*Manager, error) {
	return NewManager(ManagerConfig{Self: Member{Name: "alone", Incarnation: 1}, Clock: clock, MaxBuckets: maxBuckets})
}

// Register adds the service that other processes ask, before the server serves.
func (m *Manager) Register(s *grpc.Server) {}

// Run keeps leases alive, answers what time brings, and sends hand-offs, until ctx ends. It returns
// when all that it started has ended.
func (m *Manager) Run(ctx context.Context) { <-ctx.Done() }

// Step goes on to a view, after the Rights have. Views come in their order, one call at a time.
func (m *Manager) Step(v *View) {}

// Take charges all of cs or none. It returns -1 if all was charged; otherwise nothing was, and it
// returns the index of a refusing charge, or TableFull. ds[i] is what decided cs[i], and By says
// who that was. Where leases in hand cover cs it takes no lock and allocates nothing; else it asks
// owners, for no longer than the budget or until ctx ends. What an owner that is out of reach
// would have to decide goes by the charge's Apart. At most limiter.MaxCharges charges; a charge that
// was taken is settled once.
func (m *Manager) Take(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) (refused int) {
	return m.local.Take(m.cfg.Clock().Wall, cs, ds)
}

// Peek decides as Take would, asking the owners, and changes nothing.
func (m *Manager) Peek(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) (refused int) {
	return m.local.Peek(m.cfg.Clock().Wall, cs, ds)
}

// Settle replaces the cost of each charge that Take took by actual[i] ≥ 0, as Local.Settle does, and
// puts what is known of the level into ds[i]. It asks nobody: totals travel with the next message.
func (m *Manager) Settle(cs []limiter.Charge, actual []int64, ds []limiter.Decision) {
	m.local.Settle(m.cfg.Clock().Wall, cs, actual, ds)
}

// Drain is for a process that leaves and has settled all that it took: it takes no more leases,
// returns those it has, and waits until their owners know, or ctx ends.
func (m *Manager) Drain(ctx context.Context) error { return nil }

// HandOver waits, after a Step to a view in which this process owns nothing, until all that it
// owned is handed over and acknowledged, or ctx ends.
func (m *Manager) HandOver(ctx context.Context) error { return nil }

// Save writes what this process owned and did not hand over, for Load in a later process. It is for
// after HandOver.
func (m *Manager) Save(w io.Writer) error { return m.local.Save(m.cfg.Clock().Wall, w) }

// Load takes what Save wrote in an earlier process, before the first Step. It counts only if the
// first view that this process steps to is the one after that of Save. Where the form is
// damaged its error wraps ErrSaved.
func (m *Manager) Load(r io.Reader) (buckets int, err error) {
	return m.local.Load(m.cfg.Clock().Wall, r)
}

// Bucketful is one bucket as an operator sees it.
type Bucketful struct {
	Key   limiter.Key
	Limit limiter.Limit
	Owner string // the node; "": none, or out of reach
	// Level is what the owner has left to lend, negative in debt; Lent the rate lent, in
	// 1/ShareOne; Outstanding what holders may still spend at once, by the owner's count.
	Level, Lent, Outstanding int64
	// Reset is the time until it is full; limiter.Never for a semaphore in use.
	Reset   time.Duration
	Holders []Holding // by node
}

// Holding is a holder's part of a Bucketful.
type Holding struct {
	Node string
	// Outstanding and Lent, in 1/ShareOne of the rate, are by the owner's count; InHand is what the
	// holder says, -1 where it did not answer; InUse slots.
	Outstanding, Lent, InHand, InUse int64
}

// Levels lists a tenant's buckets by limit and subject, from all members' answers; of tenant "",
// those that no tenant owns. Its error says who did not answer; the rest is good all the same.
func (m *Manager) Levels(ctx context.Context, tenant string) ([]Bucketful, error) {
	var out []Bucketful
	for _, l := range m.local.Levels(m.cfg.Clock().Wall, tenant) {
		out = append(out, Bucketful{Key: l.Key, Limit: l.Limit, Owner: m.cfg.Self.Name, Level: l.Level, Reset: l.Reset})
	}
	return out, nil
}

// Sweep looks at up to budget buckets and forgets those that say nothing any more.
func (m *Manager) Sweep(budget int) (forgotten int) {
	return m.local.Sweep(m.cfg.Clock().Wall, budget)
}

// Len is the number of buckets that this process owns.
func (m *Manager) Len() int { return m.local.Len() }

// Degraded says in words which owners are out of reach, so that charges go by their Apart; "": none.
// It does not block.
func (m *Manager) Degraded() string { return "" }

// Where says who owns a charge's bucket, how much of it this process may spend without asking, and, in
// words, why its owner is out of reach; "": it is not. It looks through all that is held of the
// tenant, so it is for people.
func (m *Manager) Where(c *limiter.Charge) (owner string, held int64, away string) {
	return m.cfg.Self.Name, 0, ""
}

// Owing are the incarnations of members that have owed this process a roll for more than 3 s.
func (m *Manager) Owing() []uint64 { return nil }
