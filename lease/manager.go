package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"headgate/limiter"
)

// defaultBudget is ManagerConfig.Budget where that is 0.
const defaultBudget = 250 * time.Millisecond

// Blocks draws what durable limits lend from where it outlives processes. It is called
// concurrently. An error is an unknown outcome: the same Draw comes again.
type Blocks interface {
	Draw(ctx context.Context, d Draw) (Drawn, error)
}

// ManagerConfig is what a Manager is made from. Self, Clock, Rights and Wait are needed, in a cluster
// Client, too; the rest has defaults.
type ManagerConfig struct {
	Self   Member
	Clock  Clock
	Rights Rights
	Sizer  Sizer // nil: the default
	// MaxBuckets bounds the buckets of which this process is the owner, those of which it holds
	// leases, and its private ones, each; 0: DefaultMaxBuckets.
	MaxBuckets int
	// Wait is how long after a view nobody can still act on the one before (V4): of a cluster.Fence TakeoverWait.
	Wait time.Duration
	// Budget is the most that a Take waits for owners, all of them together; 0: 250 ms.
	Budget time.Duration
	// Blocks fills durable limits; nil: they have nothing to lend.
	Blocks Blocks
	// Client is the connection to the process that gossips at an address. Drop has it made anew the
	// next time; nil: it never is.
	Client func(address string) (grpc.ClientConnInterface, error)
	Drop   func(address string)
	// Newest is the highest Revision of a limit that this process knows the policy of. It never falls. A limit of a
	// higher one no owner here goes by: who asks under it asks again until this process knows it, too. nil: all are
	// believed.
	Newest func() uint64
	// Peer is the name of the node that a call comes from, as its certificate has it. It has to be that of the
	// process that the call speaks for. nil: everybody is believed.
	Peer       func(ctx context.Context) string
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Validate names the field and the remedy.
func (c *ManagerConfig) Validate() error {
	switch {
	case c.Self.Incarnation == 0:
		return errors.New("lease: Self.Incarnation is 0; give the process's")
	case c.Clock == nil || c.Rights == nil:
		return errors.New("lease: Clock or Rights is nil; give the process's")
	case c.Wait <= 0:
		return fmt.Errorf("lease: Wait is %v; give the rights' wait", c.Wait)
	case c.Budget < 0:
		return fmt.Errorf("lease: Budget %v is negative; use 0 for the default", c.Budget)
	}
	return Config{MaxBuckets: c.MaxBuckets}.Validate()
}

// Manager is a process's part in the leases of its cluster: the owner of some buckets, a holder
// of any. It is the shell round Owner and Holder, with the clock, the streams and the waiting. Its
// methods may be called concurrently.
type Manager struct {
	cfg     ManagerConfig
	log     *slog.Logger
	met     *metrics
	holder  *Holder
	private *privates
	self    *line                    // to the owner in this process
	ended   chan struct{}            // closed when Run returns
	owing   atomic.Pointer[[]uint64] // as of the last tick
	soon    chan struct{}            // to Run: a time that it waits for may have come closer
	keep    chan struct{}            // to Run: there is something to say to the owner in this process
	moved   chan struct{}            // to Run: there may be something to hand over
	heard   chan struct{}            // to Drain: an owner answered

	ownerMu  sync.Mutex // also orders what goes to one stream
	owner    *Owner
	drawAll  func(Instant)    // asks for the blocks that the owner wants
	draws    map[drawKey]bool // under way
	nextTick int64            // when Run will see to the owner

	mu        sync.Mutex
	life      context.Context // of what Run started; nil before
	lines     map[uint64]*line
	served    map[uint64]*served // streams of holders to the owner in this process
	shuts     map[shutKey]*shut
	shutCount atomic.Int64
	view      *View
	names     map[uint64]string // of the processes of this view, and of some before, by incarnation
	changed   chan struct{}     // closed and replaced when a Step, a Started or a hand-off changed whom to ask
	handed    chan struct{}     // closed and replaced when a hand-off ended
	handing   map[handKey]bool
	taking    map[uint32]bool // partitions of which a hand-off is being read
	wg        sync.WaitGroup  // what Run started
	degraded  atomic.Pointer[string]
}

// NewManager returns a Manager that decides nothing before its first Step. Call Run for it to
// speak to others.
func NewManager(cfg ManagerConfig) (*Manager, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Budget = cmp.Or(cfg.Budget, defaultBudget)
	m := &Manager{
		cfg: cfg, log: cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler)),
		ended: make(chan struct{}), soon: make(chan struct{}, 1), keep: make(chan struct{}, 1), moved: make(chan struct{}, 1),
		lines: map[uint64]*line{}, served: map[uint64]*served{}, shuts: map[shutKey]*shut{}, draws: map[drawKey]bool{},
		nextTick: never, changed: make(chan struct{}), handed: make(chan struct{}), heard: make(chan struct{}, 1), handing: map[handKey]bool{}, taking: map[uint32]bool{},
		names: map[uint64]string{},
	}
	var err error
	if m.private, err = newPrivates(cfg.Clock(), cfg.MaxBuckets); err != nil {
		return nil, err
	}
	if m.drawAll = m.drawElsewhere; cfg.Blocks == nil {
		m.drawAll = func(Instant) {}
	}
	m.self = newLine(m, cfg.Self)
	m.owner = NewOwner(OwnerConfig{
		Self: cfg.Self.Incarnation, Rights: cfg.Rights, Sizer: cfg.Sizer, MaxBuckets: cfg.MaxBuckets, Wait: int64(cfg.Wait), Newest: cfg.Newest,
	})
	m.holder = NewHolder(HolderConfig{Self: cfg.Self.Incarnation, Clock: cfg.Clock, MaxBuckets: cfg.MaxBuckets, Wake: m.wake})
	if m.met, err = newMetrics(cfg.Registerer, m); err != nil {
		return nil, fmt.Errorf("lease: %w", err)
	}
	return m, nil
}

// signal says on a channel of one place that there is something to do.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// wake is called from within the holder: it must not call back.
func (m *Manager) wake(owner uint64) {
	if owner == m.cfg.Self.Incarnation {
		m.self.wanted.Store(true)
		signal(m.keep)
		return
	}
	m.mu.Lock()
	l := m.lines[owner]
	m.mu.Unlock()
	if l != nil { // else the next keep-alive makes it
		l.want()
	}
}

// Run keeps leases alive, answers what time brings, and sends hand-offs, until ctx ends. It returns
// when all that it started has ended. It is called once.
func (m *Manager) Run(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	m.mu.Lock()
	m.life = ctx
	m.mu.Unlock()
	defer func() {
		stop()
		m.mu.Lock() // whoever starts something sees the end, or is waited for
		close(m.ended)
		m.mu.Unlock()
		m.wg.Wait()
	}()
	m.wg.Go(func() { m.tick(ctx) })
	m.wg.Go(func() { m.handOffs(ctx) })
	m.speak()
	t := time.NewTicker(KeepEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			m.speak()
			m.checkLines()
		case <-m.keep:
			m.exchange(nil)
		}
	}
}

// run starts f unless the Manager has ended or does not run yet.
func (m *Manager) run(f func(context.Context)) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.life == nil || m.life.Err() != nil {
		return false
	}
	ctx := m.life
	m.wg.Go(func() { f(ctx) })
	return true
}

// speak is the keep-alive to every owner of whom anything is held.
func (m *Manager) speak() {
	for _, o := range m.holder.Owners() {
		if o == m.cfg.Self.Incarnation {
			m.self.wanted.Store(true)
			m.exchange(nil)
		} else if l := m.line(o); l != nil {
			l.keepAlive()
		}
	}
}

// checkLines ends streams that are dead, and tries those owners again that are out of reach: any
// answer mends a line.
func (m *Manager) checkLines() {
	m.mu.Lock()
	lines := slices.Collect(maps.Values(m.lines))
	m.mu.Unlock()
	for _, l := range lines {
		if l.broken.Load() {
			l.keepAlive()
		}
		l.check()
	}
}

// line is the one to an owner of the view; nil: it is no member, or this process.
func (m *Manager) line(owner uint64) *line {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l := m.lines[owner]; l != nil || m.view == nil {
		return l
	}
	for _, to := range m.view.Members {
		if to.Incarnation == owner && owner != m.cfg.Self.Incarnation {
			l := newLine(m, to)
			m.lines[owner] = l
			return l
		}
	}
	return nil
}

// Step goes on to a view, after the Rights have. Views come in their order, one call at a time.
func (m *Manager) Step(v *View) {
	m.ownerMu.Lock()
	m.owner.Step(m.cfg.Clock(), v)
	m.holder.Step(v)
	m.mu.Lock()
	gone := m.prune(v)
	m.view = v
	clear(m.shuts)
	m.shutCount.Store(0)
	m.mu.Unlock()
	m.self.wanted.Store(true)
	m.exchangeLocked(nil)
	m.afterLocked()
	m.ownerMu.Unlock()
	for _, l := range gone {
		l.close()
	}
	m.assess()
	m.announce()
	signal(m.moved)
	signal(m.soon)
	for _, o := range m.holder.Owners() {
		if l := m.line(o); l != nil {
			l.keepAlive()
		}
	}
}

// prune takes the lines and streams of those out who are members no more, and notes who is; m.mu is held.
func (m *Manager) prune(v *View) (gone []*line) {
	in := map[uint64]bool{}
	for i := range v.Members {
		in[v.Members[i].Incarnation] = true
	}
	if len(m.names) >= maxNames {
		clear(m.names)
	}
	for i := range v.Members {
		m.names[v.Members[i].Incarnation] = v.Members[i].Name
	}
	for o, l := range m.lines {
		if !in[o] {
			delete(m.lines, o)
			gone = append(gone, l)
		}
	}
	for h, s := range m.served {
		if was := isMember(m.view, h); was && !in[h] {
			s.cut()
		}
	}
	return gone
}

// announce wakes those who wait for another owner.
func (m *Manager) announce() {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.changed)
	m.changed = make(chan struct{})
}

// Settle replaces the cost of each charge that Take took by actual[i] ≥ 0, as Local.Settle does, and
// puts what is known of the level into ds[i]. It asks nobody: totals travel with the next message.
// To settle a charge again changes nothing.
func (m *Manager) Settle(cs []limiter.Charge, actual []int64, ds []limiter.Decision) {
	if own := m.private.held(cs); own != 0 {
		m.private.settle(m.cfg.Clock(), cs, actual, ds, own)
		m.settleOthers(cs, actual, ds, own)
		return
	}
	m.holder.Settle(cs, actual, ds)
}

// settleOthers settles the charges that are not in own.
func (m *Manager) settleOthers(cs []limiter.Charge, actual []int64, ds []limiter.Decision, own uint32) {
	for i := range cs {
		if own>>i&1 == 0 {
			m.holder.Settle(cs[i:i+1], actual[i:i+1], ds[i:i+1])
		}
	}
}

// Sweep looks at up to budget buckets and forgets those that say nothing any more.
func (m *Manager) Sweep(budget int) (forgotten int) {
	const atOnce = 256 // under the owner's lock
	for left := budget; left > 0; left -= atOnce {
		m.ownerMu.Lock()
		forgotten += m.owner.Sweep(m.cfg.Clock(), min(left, atOnce))
		m.afterLocked() // what is left of idle blocks goes back
		m.ownerMu.Unlock()
	}
	return forgotten + m.private.sweep(m.cfg.Clock(), budget)
}

// Len is the number of buckets that this process owns.
func (m *Manager) Len() int { return m.stats().Buckets }

func (m *Manager) stats() OwnerStats {
	m.ownerMu.Lock()
	defer m.ownerMu.Unlock()
	return m.owner.Stats()
}

// Owing are the incarnations of members that this process has asked in vain for a roll for 3 s. It waits for
// nothing: the request for the view lease says it.
func (m *Manager) Owing() []uint64 {
	if owing := m.owing.Load(); owing != nil {
		return *owing
	}
	return nil
}

// Degraded says in words which owners are out of reach, so that charges go by their Apart; "": none.
// It does not block.
func (m *Manager) Degraded() string {
	if m.cfg.Rights.Lease(m.cfg.Clock().Now, anyEpoch) <= 0 {
		return "this node holds no view lease"
	}
	if s := m.degraded.Load(); s != nil {
		return *s
	}
	return ""
}

// assess brings Degraded up to date.
func (m *Manager) assess() {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]bool{}
	for _, l := range m.lines {
		if l.broken.Load() {
			out[l.to.Name] = true
		}
	}
	for key := range m.shuts {
		out[cmp.Or(m.view.OwnerOf(key.partition).Name, "nobody")] = true
	}
	if len(out) == 0 {
		m.degraded.Store(nil)
		return
	}
	if m.degraded.Load() == nil {
		m.private.begin(m.cfg.Clock())
	}
	s := "owners out of reach: " + strings.Join(slices.Sorted(maps.Keys(out)), ", ")
	m.degraded.Store(&s)
}

// Where says who owns a charge's bucket, how much of it this process may spend without asking, and, in
// words, why its owner is out of reach; "": it is not. It looks through all that is held of the
// tenant, so it is for people.
func (m *Manager) Where(c *limiter.Charge) (owner string, held int64, away string) {
	to, b := m.holder.Owner(c)
	for _, l := range m.holder.Levels(c.Key.Tenant) {
		if l.Key == c.Key && l.Left > 0 {
			held += l.Level
		}
	}
	switch {
	case m.cfg.Rights.Lease(m.cfg.Clock().Now, anyEpoch) <= 0:
		return to.Name, held, "this node holds no view lease"
	case to.Incarnation == 0:
		return "", held, "no node owns it"
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch l := m.lines[to.Incarnation]; {
	case l != nil && l.broken.Load():
		away = "node " + to.Name + " does not answer"
	case m.shuts[shutKey{b.Partition, kindOf(c)}] != nil:
		away = "node " + to.Name + " may not grant yet"
	}
	return to.Name, held, away
}

// isMember says whether a process is a member.
func isMember(v *View, incarnation uint64) bool {
	return v != nil && slices.ContainsFunc(v.Members, func(m Member) bool { return m.Incarnation == incarnation })
}
