package ledger

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"github.com/hashicorp/raft-wal/types"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
)

const (
	// maxProposals that wait for their outcome on one node; more are refused with ErrBusy.
	maxProposals = 4096
	// proposeWithin is how long Propose tries where its context has no deadline.
	proposeWithin = 5 * time.Second
	// forwardWithin bounds one try at a leader that may be cut off.
	forwardWithin = time.Second
	// firstBackoff and lastBackoff bound the wait between two tries.
	firstBackoff = 5 * time.Millisecond
	lastBackoff  = 200 * time.Millisecond
	// seenWithin is how long Propose waits for its own replica to show what the leader did.
	seenWithin = time.Second
	// maxBatch is how many commands one write of the log holds at most.
	maxBatch = 512
	// checkTries is how often a comparison is tried that a change came between.
	checkTries = 5
	// stalledAfter is how long a write to the log may take before its disk counts as hung.
	stalledAfter = 2 * time.Second
	// maxWallOff is how far a leader's wall clock may be off for it to grant blocks.
	maxWallOff = time.Minute
	// transferWithin bounds the handing over of leadership before a close.
	transferWithin = 2 * time.Second
)

var (
	// ErrNoLeader says that nothing was done, as no leader was found in time.
	ErrNoLeader = errors.New("the cluster has no leader: a majority of its voters must be up and reach each other (see `headgate members`)")
	// ErrUnknownOutcome says that the command was sent and may or may not be done. The same command,
	// its id included, may be proposed again.
	ErrUnknownOutcome = errors.New("it is not known whether this was done: look, or try again")
	// ErrNotLeader says that this node does not lead; nothing was done.
	ErrNotLeader = errors.New("this node is not the leader")
	// ErrBusy says that too many proposals wait on this node; nothing was done.
	ErrBusy = errors.New("too many changes are waiting on this node: try again later")
	// ErrTooLarge refuses a command above MaxCommand; nothing was done.
	ErrTooLarge = errors.New("the change is too large")
	// ErrWallOff says that the leader grants no blocks of durable limits and budgets; nothing was done.
	ErrWallOff = errors.New("the leader's wall clock is more than a minute off the median of the voters': set it right")
	// ErrStopped says that the ledger was closed, or its replica failed (see Failed).
	ErrStopped = errors.New("the ledger of this node has stopped")

	errStalled = fmt.Errorf("the disk of the ledger's log has not answered for %v: see to the data folder's disk", stalledAfter)
)

// Status is what gossip thinks of a node.
type Status uint8

// What a node may be.
const (
	StatusAlive Status = iota
	StatusFailed
	StatusLeft
)

// Server is a node as gossip knows it.
type Server struct {
	ID      raft.ServerID // NAME.SUFFIX, the suffix of its data folder
	Name    string
	Address raft.ServerAddress // of its raft
	Status  Status
	Since   time.Time // when it came to be so
}

// Peer reaches the ledgers of other nodes.
type Peer interface {
	// Propose hands an encoded command to what should be the leader. notLeader: nothing was
	// done there. unknown: it may or may not have been done. An error with neither is final.
	Propose(ctx context.Context, leader raft.ServerID, addr raft.ServerAddress, command []byte) (result []byte, notLeader, unknown bool, err error)
}

// Config of a Ledger. The zero value of a timing is its default.
type Config struct {
	// Dir is the node's data folder; the ledger lives in Dir/raft. It may be empty where Logs,
	// Stable and Snapshots are given, as tests do.
	Dir       string
	ServerID  raft.ServerID
	Address   raft.ServerAddress
	Transport raft.Transport // the caller's, to be closed after the Ledger
	Logs      raft.LogStore
	Stable    raft.StableStore
	Snapshots raft.SnapshotStore

	Peer Peer // nil: nothing can be proposed but on the leader
	// Servers is what gossip knows now; nil: the members are left as they are.
	Servers func() []Server
	// Stats asks another server how far its log reaches. Needed with Servers.
	Stats func(context.Context, Server) (lastIndex, lastTerm uint64, lastContact time.Duration, err error)
	// WallOff is how far this node's wall clock is ahead of the median of the voters'. A leader that is
	// more than a minute off applies nothing about blocks and budgets, and nothing before it knows; after ten
	// seconds of that it lets another voter lead. nil: it is right.
	WallOff func() (ahead time.Duration, known bool)
	// Changed is told of facts that changed, blocks and what budgets spend apart, but of their alerts and spikes too, in the goroutine that applies entries: it must
	// neither block nor call back. It is called before Open returns where a snapshot is
	// restored. nil: nobody is told.
	Changed func(*Facts)
	// Recalled is told, on every node, that somebody asked for some of a budget's account and did not
	// get it though others hold some: they should give back what they do not need. It is called as
	// Changed is, also for entries of before when the log is read again. nil: nobody is told.
	Recalled   func(BudgetKey)
	Logger     *slog.Logger          // nil: slog.Default
	Registerer prometheus.Registerer // nil: no metrics

	Heartbeat         time.Duration // and election timeout; 200 ms
	LeaderLease       time.Duration // as Heartbeat, which is the most that raft takes: a busy machine loses no leader for 150 ms
	CommitTimeout     time.Duration // how soon followers learn of a commit; 20 ms
	SnapshotInterval  time.Duration // between looks whether one is due; 30 s
	SnapshotThreshold uint64        // entries between two snapshots; 16,384: at 40 a second, every 7 minutes
	TrailingLogs      uint64        // entries kept behind a snapshot for nodes that were away shortly; 10,240
	CheckEvery        time.Duration // between two comparisons of replicas; 60 s
	Autopilot         AutopilotTimes

	files types.VFS // instead of the disk's, for faults in tests
}

func (c *Config) withDefaults() (Config, error) {
	d := *c
	if d.ServerID == "" || d.Transport == nil {
		return d, errors.New("ledger: ServerID and Transport are required")
	}
	given := 0
	for _, is := range []bool{d.Logs != nil, d.Stable != nil, d.Snapshots != nil} {
		if is {
			given++
		}
	}
	if given != 3 && (given != 0 || d.Dir == "") {
		return d, errors.New("ledger: either Dir, or all of Logs, Stable and Snapshots are required")
	}
	if d.Servers != nil && d.Stats == nil {
		return d, errors.New("ledger: Servers needs Stats")
	}
	if d.Address == "" {
		d.Address = d.Transport.LocalAddr()
	}
	if d.Changed == nil {
		d.Changed = func(*Facts) {}
	}
	if d.Recalled == nil {
		d.Recalled = func(BudgetKey) {}
	}
	if d.Logger == nil {
		d.Logger = slog.Default()
	}
	orDefault(&d.Heartbeat, 200*time.Millisecond)
	orDefault(&d.LeaderLease, d.Heartbeat)
	orDefault(&d.CommitTimeout, 20*time.Millisecond)
	orDefault(&d.SnapshotInterval, 30*time.Second)
	orDefault(&d.SnapshotThreshold, 16384)
	orDefault(&d.TrailingLogs, 10240)
	orDefault(&d.CheckEvery, time.Minute)
	d.Autopilot.withDefaults()
	return d, nil
}

func orDefault[T time.Duration | uint64](v *T, value T) {
	if *v == 0 {
		*v = value
	}
}

// Ledger is one node's replica of the cluster's truth and its way to change it. All its
// methods are safe for concurrent use.
type Ledger struct {
	config    Config
	logger    *slog.Logger
	raft      *raft.Raft
	fsm       *fsm
	store     *store // nil where Config gave the stores
	logs      raft.LogStore
	writes    *timedLog // logs, as raft writes them
	stable    raft.StableStore
	snapshots raft.SnapshotStore
	metrics   *metrics
	proposals chan struct{}          // a token for each that waits
	forgotten map[raft.ServerID]bool // given up by a recovery of this folder
	foundedAs []byte                 // the cluster that the log was of at the start

	gate   sync.RWMutex   // over shut; held to read while an entry enters raft's queue
	shut   bool           // nothing enters any more
	queued sync.WaitGroup // entries that raft has not answered

	failed  atomic.Pointer[error]
	ready   chan struct{} // closed when raft is there for fail to stop
	stop    context.CancelFunc
	running sync.WaitGroup
	ending  sync.Once
	ended   raft.Future
	closing sync.Once
	closed  error
	wall    wallWatch // of the duties, one reign after the other

	restoring sync.Mutex // one restore at a time
}

// Open opens the replica, applies what its snapshot holds and starts raft. It refuses data
// that is damaged (*CorruptError) or in use (ErrInUse). The caller closes it.
func Open(config Config) (*Ledger, error) {
	c, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	l := &Ledger{
		config: c, logger: c.Logger, stop: stop,
		logs: c.Logs, stable: c.Stable, snapshots: c.Snapshots,
		proposals: make(chan struct{}, maxProposals), ready: make(chan struct{}),
	}
	l.fsm = newFSM(c.Changed, l.fail)
	l.fsm.recalled = c.Recalled
	leads := make(chan bool, 16)
	if err := l.start(ctx, leads); err != nil {
		stop()
		if l.store != nil {
			err = errors.Join(err, l.store.close())
		}
		return nil, err
	}
	if l.metrics, err = newMetrics(c.Registerer, l); err != nil {
		return nil, errors.Join(err, l.Close(ctx))
	}
	l.running.Go(func() { l.lead(ctx, leads) })
	return l, nil
}

// start opens the stores and raft over them.
func (l *Ledger) start(ctx context.Context, leads chan<- bool) error {
	dir := ""
	if l.logs == nil {
		dir = filepath.Join(l.config.Dir, "raft")
		var err error
		if l.store, err = openStore(dir, l.config.files, l.logger, l.fail); err != nil {
			return err
		}
		if l.snapshots, err = openSnapshots(dir, l.logger); err != nil {
			return err
		}
		if l.forgotten, err = readForgotten(dir); err != nil {
			return err
		}
		l.stable = l.store
		if l.logs, err = raft.NewLogCache(cachedEntries, l.store); err != nil {
			return err
		}
	}
	if err := verify(l.logs, l.snapshots, dir); err != nil {
		return err
	}
	if err := dropCovered(l.logs, l.snapshots); err != nil {
		return err
	}
	var err error
	if l.foundedAs, err = foundedAs(l.logs); err != nil {
		return err
	}
	transport, run := guard(ctx, l.config.Transport, l.onlyVoter, l.forgotten)
	l.writes = &timedLog{LogStore: bridged{l.logs, l.snapshots}}
	r, err := newRaft(l.raftConfig(leads), l.fsm, l.writes, l.stable, l.snapshots, transport)
	if err != nil {
		return &CorruptError{Path: dir, Err: err}
	}
	l.raft = r
	l.running.Go(run)
	if l.store != nil {
		l.store.armed.Store(true)
	}
	close(l.ready)
	return nil
}

// newRaft starts raft; what it panics of is an error.
func newRaft(c *raft.Config, f raft.FSM, logs raft.LogStore, stable raft.StableStore, snapshots raft.SnapshotStore, t raft.Transport) (r *raft.Raft, err error) {
	defer func() {
		if p := recover(); p != nil {
			r, err = nil, fmt.Errorf("starting raft: %v", p)
		}
	}()
	return raft.NewRaft(c, f, logs, stable, snapshots, t)
}

func (l *Ledger) raftConfig(leads chan<- bool) *raft.Config {
	c := raft.DefaultConfig()
	c.LocalID = l.config.ServerID
	c.HeartbeatTimeout, c.ElectionTimeout = l.config.Heartbeat, l.config.Heartbeat
	c.LeaderLeaseTimeout = l.config.LeaderLease
	c.CommitTimeout = l.config.CommitTimeout
	c.MaxAppendEntries, c.BatchApplyCh = maxBatch, true
	c.SnapshotInterval = l.config.SnapshotInterval
	c.SnapshotThreshold = l.config.SnapshotThreshold
	c.TrailingLogs = l.config.TrailingLogs
	c.ShutdownOnRemove = false // one that was removed may be added again
	c.NotifyCh = leads
	c.NoLegacyTelemetry = true
	c.Logger = newHclog(l.logger, "raft")
	return c
}

// fail notes, once, why this replica must stop, and stops raft: the others elect another
// leader, and nothing here answers from a state that may be wrong.
func (l *Ledger) fail(err error) {
	if !l.failed.CompareAndSwap(nil, &err) {
		return
	}
	l.logger.Error("this node's replica of the ledger stopped", "error", err)
	l.running.Go(func() {
		<-l.ready
		l.shutdown()
	})
}

// shutdown stops raft; whoever wants to may wait for the future, more than once.
func (l *Ledger) shutdown() raft.Future {
	l.ending.Do(func() { l.ended = l.raft.Shutdown() })
	return l.ended
}

// Failed is why this replica stopped for good, nil while it runs. Reads go on as they were.
func (l *Ledger) Failed() error {
	if err := l.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Stalled tells whether this node's disk hangs: whether a write to its log has not ended for
// stalledAfter. A leader must not go on as one then: it commits nothing.
func (l *Ledger) Stalled() bool { return l.writes.stalled() }

// Health is Failed, or why the last write to this node's disk failed or that it hangs; nil:
// neither.
func (l *Ledger) Health() error {
	if err := l.Failed(); err != nil {
		return err
	}
	if l.Stalled() {
		return errStalled
	}
	if l.store != nil {
		return l.store.err()
	}
	return nil
}

// ClusterID is that of the cluster whose ledger this is, also before anything of the log is
// applied; nil: of none yet.
func (l *Ledger) ClusterID() []byte {
	if id := l.Facts().ClusterID; len(id) > 0 {
		return id
	}
	return l.foundedAs
}

// HasState tells whether this replica was ever part of a cluster. A term alone says nothing: any call
// of raft's leaves one, also one that was meant for who had this address before.
func (l *Ledger) HasState() bool {
	last, err := l.logs.LastIndex()
	if err != nil || last > 0 {
		return true
	}
	list, err := l.snapshots.List()
	return err != nil || len(list) > 0
}

// Bootstrap makes a new cluster of the servers, this one among them. Either one node does it
// or each does it with the same list. It fails where there is state already.
func (l *Ledger) Bootstrap(servers []raft.Server) error {
	if err := l.raft.BootstrapCluster(raft.Configuration{Servers: servers}).Error(); err != nil {
		return fmt.Errorf("starting the ledger of a new cluster: %w", err)
	}
	return nil
}

// Facts is what this replica holds, keys apart. It never changes.
func (l *Ledger) Facts() *Facts { return l.fsm.state.Facts() }

// Keys is this replica's live table of keys.
func (l *Ledger) Keys() *Keys { return l.fsm.state.Keys() }

// Audit gives this replica's audit log: see State.Audit.
func (l *Ledger) Audit(limit int, filter AuditFilter) []AuditEntry {
	return l.fsm.state.Audit(limit, filter)
}

// IsLeader tells whether this node thinks that it leads. Only Barrier proves it.
func (l *Ledger) IsLeader() bool { return l.raft.State() == raft.Leader }

// Leader is whom this node thinks to lead; empty: nobody.
func (l *Ledger) Leader() (raft.ServerID, raft.ServerAddress) {
	addr, id := l.raft.LeaderWithID()
	return id, addr
}

// Members are the servers of the newest configuration, voters and others.
func (l *Ledger) Members() []raft.Server {
	f := l.raft.GetConfiguration()
	if f.Error() != nil {
		return nil
	}
	return slices.Clone(f.Configuration().Servers)
}

// Voters are the members that vote.
func (l *Ledger) Voters() (voters []raft.Server) {
	for _, s := range l.Members() {
		if s.Suffrage == raft.Voter {
			voters = append(voters, s)
		}
	}
	return voters
}

// onlyVoter tells whether this server alone votes in the newest configuration.
func (l *Ledger) onlyVoter() bool {
	select {
	case <-l.ready:
	default:
		return false
	}
	voters := l.Voters()
	return len(voters) == 1 && voters[0].ID == l.config.ServerID
}

// Stats is where this replica stands.
type Stats struct {
	State        string // Leader, Follower, Candidate, Shutdown
	Term         uint64
	FirstIndex   uint64
	LastIndex    uint64
	LastTerm     uint64
	CommitIndex  uint64
	AppliedIndex uint64
	Snapshot     uint64        // the index of the last one
	LastContact  time.Duration // with the leader; 0 on the leader; -1: never
	Proposals    int           // that wait
}

// Stats gives where this replica stands.
func (l *Ledger) Stats() Stats {
	s := Stats{
		State: l.raft.State().String(), Term: l.raft.CurrentTerm(), LastIndex: l.raft.LastIndex(),
		CommitIndex: l.raft.CommitIndex(), AppliedIndex: l.raft.AppliedIndex(),
		LastContact: -1, Proposals: len(l.proposals),
	}
	s.FirstIndex, _ = l.logs.FirstIndex() // for show; an error leaves 0
	raw := l.raft.Stats()
	s.LastTerm, _ = strconv.ParseUint(raw["last_log_term"], 10, 64)
	s.Snapshot, _ = strconv.ParseUint(raw["last_snapshot_index"], 10, 64)
	if s.State == raft.Leader.String() {
		s.LastContact = 0
	} else if at := l.raft.LastContact(); !at.IsZero() {
		s.LastContact = time.Since(at)
	}
	return s
}

// Propose has the cluster apply the command, from whichever node: here where this node
// leads, else through Config.Peer. It gives the command an id where it has none, and tries
// with that id until it knows the outcome or ctx ends (proposeWithin where that has no
// deadline); an id is applied once. When it returns nil the result is committed, and this
// node's own Facts show it (unless the replica lags by more than seenWithin). A result may
// be a refusal: see RefusalOf.
func (l *Ledger) Propose(ctx context.Context, command *ledgerpb.Command) (*ledgerpb.Result, error) {
	select {
	case l.proposals <- struct{}{}:
		defer func() { <-l.proposals }()
	default:
		return nil, ErrBusy
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, proposeWithin)
		defer cancel()
	}
	command = proto.CloneOf(command)
	if len(command.GetId()) == 0 {
		command.Id = make([]byte, 16)
		if _, err := rand.Read(command.Id); err != nil {
			return nil, fmt.Errorf("making a command's id: %w", err)
		}
	}
	began := time.Now()
	result, err := l.propose(ctx, command)
	l.metrics.proposed(began, result, err)
	if err != nil {
		return nil, err
	}
	if ofBlocks(command) {
		return result, nil // who asks for blocks reads none of it here
	}
	seen, cancel := context.WithTimeout(ctx, seenWithin)
	defer cancel()
	_ = l.fsm.wait(seen, result.GetIndex()) // committed all the same
	return result, nil
}

// attempt is how one try ended. Neither err nor result: nothing was done.
type attempt struct {
	result  *ledgerpb.Result
	unknown bool
	err     error // why it is unknown; final where it is not
}

func (l *Ledger) propose(ctx context.Context, command *ledgerpb.Command) (*ledgerpb.Result, error) {
	unknown, why := false, error(nil)
	for backoff := firstBackoff; ; backoff = min(2*backoff, lastBackoff) {
		a := l.try(ctx, command)
		switch {
		case a.result != nil:
			return a.result, nil
		case a.err != nil && !a.unknown && !unknown:
			return nil, a.err
		case a.err != nil:
			why = a.err
		}
		unknown = unknown || a.unknown
		select {
		case <-ctx.Done():
			if unknown {
				return nil, fmt.Errorf("%w (%w)", ErrUnknownOutcome, cmp.Or(why, context.Cause(ctx)))
			}
			return nil, fmt.Errorf("%w (%w)", ErrNoLeader, context.Cause(ctx))
		case <-time.After(backoff/2 + mathrand.N(backoff)):
		}
	}
}

func (l *Ledger) try(ctx context.Context, command *ledgerpb.Command) attempt {
	if err := l.Failed(); err == nil && l.IsLeader() {
		return l.applyHere(ctx, command)
	}
	id, addr := l.Leader()
	if id == "" || id == l.config.ServerID || l.config.Peer == nil {
		if l.raft.State() == raft.Shutdown {
			return attempt{err: ErrStopped}
		}
		return attempt{}
	}
	data, err := encode(command)
	if err != nil {
		return attempt{err: err}
	}
	ctx, cancel := context.WithTimeout(ctx, forwardWithin)
	defer cancel()
	answer, notLeader, unknown, err := l.config.Peer.Propose(ctx, id, addr, data)
	switch {
	case notLeader:
		return attempt{}
	case err != nil || unknown:
		if err == nil {
			err = errors.New("no answer")
		}
		return attempt{unknown: unknown, err: fmt.Errorf("proposing to %s: %w", id, err)}
	}
	result := new(ledgerpb.Result)
	if err := proto.Unmarshal(answer, result); err != nil {
		return attempt{unknown: true, err: fmt.Errorf("answer of %s: %w", id, err)}
	}
	return attempt{result: result}
}

func encode(command *ledgerpb.Command) ([]byte, error) {
	data, err := proto.Marshal(command)
	if err != nil {
		return nil, fmt.Errorf("encoding a command: %w", err)
	}
	if len(data) > MaxCommand {
		return nil, fmt.Errorf("%w: %d bytes, of %d allowed", ErrTooLarge, len(data), MaxCommand)
	}
	return data, nil
}

// applyHere stamps the command with this node's clock and puts it into the log. What this
// replica could not apply it refuses: committed, it would stop the replica.
func (l *Ledger) applyHere(ctx context.Context, command *ledgerpb.Command) attempt {
	if v := command.GetVersion(); v > StateVersion || command.GetBody() == nil {
		return attempt{err: fmt.Errorf("a change of version %d, of %d known to the leader %s: %w", v, StateVersion, l.config.ServerID, ErrUnknownCommand)}
	}
	if timed(command) && l.config.WallOff != nil {
		switch ahead, known := l.config.WallOff(); {
		case !known:
			return attempt{}
		case ahead.Abs() > maxWallOff:
			return attempt{err: fmt.Errorf("%w: %v ahead", ErrWallOff, ahead)}
		}
	}
	command.UnixNano = time.Now().UnixNano()
	data, err := encode(command)
	if err != nil {
		return attempt{err: err}
	}
	enqueue := forwardWithin
	if at, ok := ctx.Deadline(); ok {
		enqueue = max(time.Millisecond, min(enqueue, time.Until(at)))
	}
	var future raft.ApplyFuture
	switch err := l.submit(ctx, func() raft.Future { future = l.raft.Apply(data, enqueue); return future }); {
	case err == nil:
	case errors.Is(err, ErrStopped):
		return attempt{err: ErrStopped}
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrEnqueueTimeout), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return attempt{}
	default:
		if full := l.Health(); full != nil {
			err = full
		}
		return attempt{unknown: true, err: err}
	}
	o, ok := future.Response().(*outcome)
	if !ok || o.err != nil || o.result == nil {
		return attempt{unknown: true, err: l.Failed()}
	}
	return attempt{result: o.result}
}

// timed says of a command that what it does depends on the proposer's clock being right.
func timed(c *ledgerpb.Command) bool {
	_, adjusts := c.GetBody().(*ledgerpb.Command_AdjustBudget)
	return adjusts || ofBlocks(c)
}

// submit puts an entry into raft's queue and waits for it or for ctx. Raft never answers what
// lies there when it shuts down: so nothing enters once the ledger closes, and Close waits for
// what has.
func (l *Ledger) submit(ctx context.Context, enter func() raft.Future) error {
	l.gate.RLock()
	if l.shut {
		l.gate.RUnlock()
		return ErrStopped
	}
	future := enter()
	l.queued.Add(1)
	l.gate.RUnlock()
	done := make(chan error, 1)
	go func() {
		defer l.queued.Done()
		done <- future.Error()
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// drain lets nothing more into raft's queue, and waits for what is there: not for ever, as a
// disk that hangs answers nothing.
func (l *Ledger) drain() {
	l.gate.Lock()
	l.shut = true
	l.gate.Unlock()
	if l.raft.State() == raft.Shutdown {
		return
	}
	drained := make(chan struct{})
	go func() {
		l.queued.Wait()
		close(drained)
	}()
	t := time.NewTimer(transferWithin)
	defer t.Stop()
	select {
	case <-drained:
	case <-t.C:
	}
}

// ProposeLocal applies an encoded command that another node handed on. ErrNotLeader: nothing
// was done, and leader is who may lead, if known. unknown: it may or may not be done.
func (l *Ledger) ProposeLocal(ctx context.Context, command []byte) (result []byte, leader raft.ServerID, unknown bool, err error) {
	if len(command) > MaxCommand {
		return nil, "", false, ErrTooLarge
	}
	decoded := new(ledgerpb.Command)
	if err := proto.Unmarshal(command, decoded); err != nil {
		return nil, "", false, fmt.Errorf("decoding a command: %w", err)
	}
	if !l.IsLeader() || l.Failed() != nil {
		id, _ := l.Leader()
		return nil, id, false, ErrNotLeader
	}
	select {
	case l.proposals <- struct{}{}:
		defer func() { <-l.proposals }()
	default:
		return nil, "", false, ErrBusy
	}
	a := l.applyHere(ctx, decoded)
	switch {
	case a.result == nil && a.err == nil && !a.unknown:
		id, _ := l.Leader()
		return nil, id, false, ErrNotLeader
	case a.result == nil && a.err == nil:
		return nil, "", true, ErrUnknownOutcome
	case a.result == nil:
		return nil, "", a.unknown, a.err
	}
	data, err := proto.Marshal(a.result)
	if err != nil {
		return nil, "", true, fmt.Errorf("encoding a result: %w", err)
	}
	return data, "", false, nil
}

// Barrier returns nil once all that was committed before the call, by any leader, is applied
// here, which only a leader that a majority still follows can achieve; else ErrNotLeader or
// another error. It writes an entry: batch the callers.
func (l *Ledger) Barrier(ctx context.Context) error {
	if err := l.Failed(); err != nil {
		return err
	}
	if !l.IsLeader() {
		return ErrNotLeader
	}
	err := l.submit(ctx, func() raft.Future { return l.raft.Barrier(forwardWithin) })
	switch {
	case err == nil:
		return l.Failed()
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipLost), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return ErrNotLeader
	default:
		return fmt.Errorf("barrier: %w", err)
	}
}

// TransferLeadership hands the lead to another voter. Nothing happens where this node does
// not lead or there is no other.
func (l *Ledger) TransferLeadership(ctx context.Context) error {
	if !l.IsLeader() || len(l.Voters()) < 2 {
		return nil
	}
	if err := l.submit(ctx, l.raft.LeadershipTransfer); err != nil && l.IsLeader() {
		return fmt.Errorf("handing over the lead of the ledger: %w", err)
	}
	return nil
}

// RemoveServer takes a server out of the configuration, for good where gossip does not know
// it as alive. Leader only; it refuses what would leave no majority that gossip calls alive.
func (l *Ledger) RemoveServer(ctx context.Context, id raft.ServerID) error {
	if !l.IsLeader() {
		return ErrNotLeader
	}
	if err := l.mayRemove(id); err != nil {
		return err
	}
	if err := l.submit(ctx, func() raft.Future { return l.raft.RemoveServer(id, 0, forwardWithin) }); err != nil {
		return fmt.Errorf("removing %s from the ledger: %w", id, err)
	}
	return nil
}

// lead runs what only the leader does, for as long as this node leads.
func (l *Ledger) lead(ctx context.Context, leads <-chan bool) {
	leading := false
	for ctx.Err() == nil {
		if leading {
			leading = l.reign(ctx, leads)
			continue
		}
		select {
		case <-ctx.Done():
		case leading = <-leads:
		}
	}
}

// reign does the leader's duties until the next change, which it returns.
func (l *Ledger) reign(ctx context.Context, leads <-chan bool) bool {
	within, resign := context.WithCancel(ctx)
	var duties sync.WaitGroup
	defer duties.Wait()
	defer resign()
	duties.Go(func() { l.compare(within) })
	if l.config.Servers != nil {
		duties.Go(func() { l.pilot(within) })
	}
	if l.config.WallOff != nil {
		duties.Go(func() { l.watchWall(within) })
	}
	select {
	case <-ctx.Done():
		return false
	case leads := <-leads:
		return leads
	}
}

// compare has all replicas compare their state with the leader's, every CheckEvery.
func (l *Ledger) compare(ctx context.Context) {
	tick := time.NewTicker(l.config.CheckEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for range checkTries {
			if l.Barrier(ctx) != nil || l.check(ctx) {
				break
			}
		}
	}
}

// check proposes one comparison and tells whether no change came between, so that the
// replicas had something to compare.
func (l *Ledger) check(ctx context.Context) bool {
	facts := l.Facts()
	a := l.applyHere(ctx, &ledgerpb.Command{Version: 1, Actor: "node " + string(l.config.ServerID), Body: &ledgerpb.Command_Check{
		Check: &ledgerpb.Check{Index: facts.Changed, Hash: facts.Hash[:]},
	}})
	if a.err != nil && ctx.Err() == nil {
		l.logger.Warn("comparing the replicas of the ledger failed", "error", a.err)
	}
	return a.result == nil || l.Facts().Changed == facts.Changed
}

// Close hands over the lead, within ctx and transferWithin, and stops. The transport is the
// caller's to close, afterwards.
func (l *Ledger) Close(ctx context.Context) error {
	l.closing.Do(func() {
		handOver, cancel := context.WithTimeout(ctx, transferWithin)
		if err := l.TransferLeadership(handOver); err != nil {
			l.logger.Warn("the lead of the ledger was not handed over", "error", err)
		}
		cancel()
		l.drain()
		l.stop()
		if l.store != nil {
			l.store.abort()
		}
		l.closed = l.shutdown().Error()
		l.running.Wait()
		if l.store != nil {
			l.closed = errors.Join(l.closed, l.store.close())
		}
		l.metrics.unregister()
	})
	return l.closed
}
