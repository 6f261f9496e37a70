// Package node puts the rooms together into a running node. It is the only package that
// imports all of them; it translates between their words and decides nothing itself.
//
// New checks everything that can be checked, opens the listeners and joins the cluster; Run
// serves until its context ends and then drains: readiness goes first, the streams in flight
// finish within DrainTimeout, every reservation is settled, leases are returned, the node leaves
// its cluster and hands over what it owned; what nobody took is saved (levels.go).
//
// What requests are decided by is compiled from what the cluster has agreed on (follow.go).
// Until the node has a view and a policy the front door answers 503.
package node

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"

	"headgate/cache"
	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/cluster/pki"
	"headgate/lease"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/admin"
	"headgate/proxy/contentlog"
	"headgate/proxy/edge"
	"headgate/proxy/journal"
	"headgate/proxy/upstream"
)

const (
	sweepEvery  = 10 * time.Second
	sweepBudget = 1 << 17          // buckets looked at in one sweep
	cutGrace    = 2 * time.Second  // after the drain, for the errors that end what is left
	settleGrace = 10 * time.Second // after the drain, for handlers on their way out
	moneyGrace  = 2 * time.Second  // after that, to tell the ledger what was spent
	handGrace   = 3 * time.Second  // after that, to hand over what serves questions in other words
	giveGrace   = time.Second      // after that, to return leases
	leaveGrace  = 10 * time.Second // in all, to leave the cluster, to hand over and to write what is kept
)

// Node is a running gateway.
type Node struct {
	cfg       Config
	log       *slog.Logger
	started   time.Time
	registry  *prometheus.Registry
	self      uint64 // this process's incarnation
	time      *cluster.Clock
	limits    *lease.Manager
	pool      *upstream.Pool
	proxy     *proxy.Proxy
	compiler  compiler
	content   *contentlog.Log
	decisions *decisionLog // nil: none
	money     *money
	answers   *cache.Exact
	similar   *similar
	admission admission
	shelf     *cache.Store // of answers

	cacheWatch   *cacheWatch
	cacheNotices cacheNotices

	devKey string

	front, admin       *http.Server
	frontLis, adminLis net.Listener
	draining           atomic.Bool
	retired            atomic.Bool // it grants nothing any more

	cluster    *cluster.Cluster
	joined     atomic.Pointer[cluster.Cluster] // cluster, for those who may come before it is there
	truth      truth                           // of the cluster
	tls        *pki.Bundle                     // nil: the cluster speaks plainly
	seedText   []byte                          // for an empty ledger; nil: none
	seedSource string
	alone      alone
	changed    chan struct{} // what follow goes by may have changed
	shown      *ledger.Facts // what factsChanged was told last

	switching sync.Mutex
	switched  *ledger.Facts // whose kill switches and rungs are set; nil: none came yet

	mu      sync.Mutex
	now     standing
	inForce chan struct{} // closed, and made anew, when a policy was put in force
}

// truth is what the cluster has agreed on, as far as this node knows.
type truth interface {
	Facts() *ledger.Facts
	Keys() *ledger.Keys
}

// New makes a node and opens its listeners. ctx bounds the start only.
func New(ctx context.Context, cfg Config) (*Node, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Out == nil {
		cfg.Out = io.Discard
	}
	bundle, err := cfg.loadTLS()
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
		return nil, &ConfigError{err}
	}
	cfg.NodeID = cfg.name()
	if err := os.MkdirAll(cfg.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the data folder: %w", err)
	}
	n := &Node{cfg: cfg, log: cfg.Logger, tls: bundle, started: time.Now(), self: cluster.NewIncarnation(), time: cluster.NewClock(), registry: prometheus.NewRegistry(), changed: make(chan struct{}, 1), inForce: make(chan struct{})}
	if err := n.open(ctx); err != nil {
		return nil, errors.Join(err, n.discard(ctx))
	}
	return n, nil
}

// open makes what a node needs, in the order in which the parts need each other.
func (n *Node) open(ctx context.Context) error {
	if err := n.devSecrets(); err != nil {
		return err
	}
	if err := n.loadSeed(ctx); err != nil {
		return &ConfigError{err}
	}
	if err := n.build(); err != nil {
		return err
	}
	if err := n.checkSeed(); err != nil {
		return &ConfigError{fmt.Errorf("policy %s:\n%w", n.seedSource, err)}
	}
	if err := n.listen(ctx); err != nil {
		return err
	}
	return n.join(ctx)
}

// discard closes what open made before it failed.
func (n *Node) discard(ctx context.Context) error {
	for _, l := range [...]net.Listener{n.frontLis, n.adminLis} {
		if l != nil {
			_ = l.Close() // nothing was accepted
		}
	}
	if n.pool != nil {
		n.pool.Close()
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveGrace)
	defer cancel()
	n.closeCache()
	var err error
	if n.money != nil {
		err = n.money.journal.Close(end)
	}
	if n.content != nil {
		err = errors.Join(err, n.content.Close(end))
	}
	return err
}

// newLimits makes the leases. They are asked for nothing before the node has joined.
func (n *Node) newLimits() (*lease.Manager, error) {
	return lease.NewManager(lease.ManagerConfig{
		Self: lease.Member{Name: n.cfg.NodeID, Incarnation: n.self}, Clock: n.clock, Rights: rights{n}, MaxBuckets: n.cfg.MaxBuckets,
		Wait: cluster.TakeoverWait, Blocks: blocks{n},
		Client: func(address string) (grpc.ClientConnInterface, error) { return n.cluster.Conn(address) },
		Drop:   func(address string) { n.cluster.Reconnect(address) },
		Newest: n.newestLimit, Peer: n.namesPeers(), Logger: n.log, Registerer: n.registry,
	})
}

// wallTrusted is how far this node's wall clock may be from the voters' median for it to open windows.
const wallTrusted = 500 * time.Millisecond

// clock is that of the leases. A wall clock that can't be trusted is none.
func (n *Node) clock() lease.Instant {
	now, wall := n.time.Read()
	if c := n.joined.Load(); c != nil {
		if off, known := c.WallOff(); known && off.Abs() > wallTrusted {
			wall = 0
		}
	}
	return lease.Instant{Now: now, Wall: wall}
}

// rights are what the fence lets this node grant: nothing before it has joined, nor once it has saved what
// it owned.
type rights struct{ n *Node }

// Left see lease.Rights.
func (r rights) Left(now int64, partition uint32) int64 {
	if c := r.n.joined.Load(); c != nil && !r.n.retired.Load() {
		return c.Fence().Left(now, partition)
	}
	return 0
}

// Lease see lease.Rights.
func (r rights) Lease(now int64, epoch uint64) int64 {
	if c := r.n.joined.Load(); c != nil && !r.n.retired.Load() {
		return c.Fence().Lease(now, epoch)
	}
	return 0
}

// Started see lease.Rights.
func (r rights) Started(now int64, epoch uint64, partition uint32) {
	if c := r.n.joined.Load(); c != nil {
		c.Fence().Started(now, epoch, partition)
	}
}

// join makes this node part of its cluster.
func (n *Node) join(ctx context.Context) error {
	expect := n.cfg.BootstrapExpect
	if expect == 0 && len(n.cfg.Join) == 0 {
		expect = 1 // a cluster of one
	}
	cc := cluster.Config{
		Name: n.cfg.NodeID, Incarnation: n.self, ClusterName: n.cfg.ClusterName, Version: n.cfg.Version, DataDir: n.cfg.DataDir,
		Listen: n.cfg.ClusterListen, Advertise: n.cfg.ClusterAdvertise, Seeds: n.cfg.Join, BootstrapExpect: expect, TLS: n.tls,
		Changed: n.factsChanged, Stepped: n.stepped, LastUsed: n.compiler.allUsed, Recalled: n.recalled, Services: n.services, Owing: n.limits.Owing, Logger: n.log, Registerer: n.registry,
	}
	c, err := cluster.Open(ctx, cc)
	if err != nil {
		return fmt.Errorf("join the cluster: %w", err)
	}
	n.cluster, n.truth = c, c.Ledger()
	n.joined.Store(c)
	return nil
}

// services are what this node does for others.
func (n *Node) services(s *grpc.Server) {
	n.limits.Register(s)
	journal.Register(s, n.money.journal)
	n.answers.Register(s)
	n.similar.cache.Register(s)
	n.admission.dispatch.Register(s)
}

// ConfigError is a mistake of the operator's, not a failure.
type ConfigError struct{ Err error }

func (e *ConfigError) Error() string { return e.Err.Error() }

// Unwrap gives the cause.
func (e *ConfigError) Unwrap() error { return e.Err }

// build makes the rooms.
func (n *Node) build() error {
	var err error
	if n.limits, err = n.newLimits(); err != nil {
		return &ConfigError{err}
	}
	if n.pool, err = upstream.NewPool(upstream.Config{Logger: n.log, Peers: n.size}); err != nil {
		return &ConfigError{err}
	}
	pre, err := edge.NewPrefilter(edge.PrefilterConfig{
		RequestsPerSecond: n.cfg.Prefilter.RequestsPerSecond, RequestBurst: n.cfg.Prefilter.RequestBurst,
		ErrorsPerMinute: n.cfg.Prefilter.ErrorsPerMinute, ErrorBurst: n.cfg.Prefilter.ErrorBurst,
	}, time.Now())
	if err != nil {
		return &ConfigError{err}
	}
	ec, err := n.cfg.edge()
	if err != nil {
		return &ConfigError{err}
	}
	if n.alone.notes, err = openNotes(n.cfg.DataDir, n.log); err != nil {
		return err
	}
	n.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	maxBody := map[string]int64{}
	for route, limit := range n.cfg.MaxBody {
		if route == "default" {
			route = ""
		}
		maxBody[route] = limit
	}
	if n.content, err = contentlog.Open(contentlog.Config{Dir: filepath.Join(n.cfg.DataDir, contentDir), Logger: n.log}); err != nil {
		return err
	}
	n.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "headgate_content_dropped_total", Help: "Requests whose content should have been kept and was not: the queue was full or the disk refused.",
	}, func() float64 { return float64(n.content.Dropped()) }))
	n.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "headgate_buckets", Help: "Buckets held; at max_buckets callers without one are refused.",
	}, func() float64 { return float64(n.limits.Len()) }), backendCollector{n.pool}, ladderCollector{n})
	var limits proxy.Limits = n.limits
	if n.cfg.DecisionLog != "" {
		if n.decisions, err = openDecisions(n.cfg.DecisionLog, n.limits, n.clock, n.log); err != nil {
			return &ConfigError{fmt.Errorf("decision_log: %w", err)}
		}
		limits = n.decisions
	}
	if err := n.openMoney(); err != nil {
		return err
	}
	if err := n.openCache(); err != nil {
		return &ConfigError{err}
	}
	if err := n.openSemantic(); err != nil {
		return &ConfigError{err}
	}
	if err := n.openAdmission(); err != nil {
		return &ConfigError{err}
	}
	kept := answers{n.answers, n.caches}
	n.cacheWatch = newCacheWatch(n.caches, n.ticks, n.registry)
	n.proxy, err = proxy.New(proxy.Config{
		NodeID: n.cfg.NodeID, Limits: limits, Money: n.money, BudgetStatus: n.cfg.BudgetStatus, Pool: n.pool, ClientIP: ec.ClientIP, Prefilter: pre, MaxBody: maxBody,
		Dispatch: n.admission.dispatch, Ladder: n.admission.ladder, CapacityStatus: n.cfg.CapacityStatus, Affinity: n.admission.affinity,
		Cache: kept, Elements: kept, Semantic: n.similar, Hearing: n.hearing, Watch: n.cacheWatch,
		Degraded: n.degraded, Where: n.where, Content: keeper{n.content}, Registerer: n.registry, Logger: n.log,
	})
	return err
}

// degraded says why limits are decided without their owners, "" where they are not.
func (n *Node) degraded() string {
	if c := n.joined.Load(); c == nil || !c.Leased() {
		return "this node is cut off from the cluster"
	}
	return n.limits.Degraded()
}

func (n *Node) where(c *limiter.Charge) proxy.Whereabouts {
	owner, held, away := n.limits.Where(c)
	return proxy.Whereabouts{Owner: owner, Held: held, Away: away}
}

// contentDir is the folder of the content log inside the data folder.
const contentDir = "content"

// keeper hands the proxy's entries to the content log.
type keeper struct{ *contentlog.Log }

// Keep never blocks.
func (k keeper) Keep(e proxy.ContentEntry) { k.Log.Keep(contentlog.Entry(e)) }

// listen opens both listeners and makes their servers.
func (n *Node) listen(ctx context.Context) error {
	ec, err := n.cfg.edge()
	if err != nil {
		return &ConfigError{err}
	}
	if n.frontLis, err = edge.Listen(ctx, ec); err != nil {
		return err
	}
	n.front = edge.NewServer(ec, n.proxy)
	if n.adminLis, err = n.listenAdmin(ctx); err != nil {
		return fmt.Errorf("listen for the admin API: %w", err)
	}
	n.admin = &http.Server{
		Handler: admin.Handler(n.adminConfig()), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: time.Minute, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(n.log.Handler(), slog.LevelWarn),
	}
	return nil
}

// listenAdmin speaks TLS with a certificate of its own, or beyond loopback with the node's.
func (n *Node) listenAdmin(ctx context.Context) (net.Listener, error) {
	l, err := edge.Listen(ctx, edge.Config{Listen: n.cfg.AdminListen, TLSCert: n.cfg.AdminTLSCert, TLSKey: n.cfg.AdminTLSKey, Logger: n.log})
	if err != nil || n.cfg.AdminTLSCert != "" || n.tls == nil || loopback(n.cfg.AdminListen) {
		return l, err
	}
	c := n.tls.ServerTLS()
	c.ClientAuth, c.VerifyConnection = tls.NoClientCert, nil // operators have tokens
	return tls.NewListener(l, c), nil
}

// Addr is where the front door listens.
func (n *Node) Addr() string { return n.frontLis.Addr().String() }

// AdminAddr is where the admin API listens.
func (n *Node) AdminAddr() string { return n.adminLis.Addr().String() }

// DevKey is the key of a development node, "" otherwise.
func (n *Node) DevKey() string { return n.devKey }

// Run serves until ctx ends, then drains. It returns nil after a clean stop.
func (n *Node) Run(ctx context.Context) error {
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	failed := make(chan error, 8) // one for each that is started
	start := func(f func() error) {
		wg.Go(func() {
			if err := f(); err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, context.Canceled) {
				failed <- err
			}
		})
	}
	start(func() error { return n.pool.Run(work) })
	start(func() error { return n.front.Serve(n.frontLis) })
	start(func() error { return n.admin.Serve(n.adminLis) })
	start(func() error { n.sweep(work); return nil })
	start(func() error { return n.cluster.Run(work) })
	start(func() error { n.limits.Run(work); return nil })
	start(func() error { return n.answers.Run(work) })
	start(func() error { n.similar.run(work); return nil })
	start(func() error { n.admission.dispatch.Run(work); return nil })
	start(func() error { n.admission.fleet.Run(work); return nil })
	start(func() error { n.runAdmission(work); return nil })
	start(func() error { n.money.budgets.Run(work); return nil })
	start(func() error { n.money.settlePast(work); return nil })
	start(func() error { n.follow(work); return nil })
	start(func() error { n.seed(work); return nil })
	start(func() error { n.report(work); return nil })
	notices := n.notifier()
	start(func() error { notices.run(work); return nil })
	start(func() error { n.cacheNotifier(notices).run(work); return nil })
	start(func() error { n.watchCaches(work); return nil })
	n.log.Info("serving", "node", n.cfg.NodeID, "listen", n.Addr(), "admin_listen", n.AdminAddr(), "cluster_listen", n.cluster.Address())

	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	err = errors.Join(err, n.drain())
	stop()
	wg.Wait()
	n.pool.Close()
	n.closeCache()
	n.log.Info("stopped")
	return err
}

// drain lets what is in flight finish.
func (n *Node) drain() error {
	n.draining.Store(true)
	n.log.Info("draining", "timeout", time.Duration(n.cfg.DrainTimeout).String())
	cut := time.AfterFunc(time.Duration(n.cfg.DrainTimeout), n.proxy.Cut)
	defer cut.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(n.cfg.DrainTimeout)+cutGrace)
	defer cancel()
	err := n.end(ctx, n.front)
	settle, cancel := context.WithTimeout(context.Background(), settleGrace)
	defer cancel()
	err = errors.Join(err, n.proxy.Wait(settle))
	leave, cancel := context.WithTimeout(context.Background(), leaveGrace)
	defer cancel()
	n.endMoney(leave)
	err = errors.Join(err, n.decisions.close(), n.leave(leave)) // also if some did not settle: what they reserved is spent then
	return errors.Join(err, n.cluster.Close(leave), n.money.journal.Close(leave), n.content.Close(leave), n.end(leave, n.admin))
}

// endMoney gives back what this node has of budgets.
func (n *Node) endMoney(ctx context.Context) {
	give, cancel := context.WithTimeout(ctx, moneyGrace)
	defer cancel()
	n.money.end(give)
}

// leave gives back what this node holds and hands over what it owns; what nobody takes is saved.
func (n *Node) leave(ctx context.Context) error {
	give, cancel := context.WithTimeout(ctx, giveGrace)
	defer cancel()
	if err := n.limits.Drain(give); err != nil {
		n.log.Warn("not all leases were returned: what is left of them counts as spent", "error", err)
	}
	n.cluster.Leave(ctx)
	if err := n.limits.HandOver(ctx); err != nil {
		n.log.Warn("not all buckets were handed over: their next owner starts them empty", "error", err)
	}
	hand, done := context.WithTimeout(ctx, handGrace)
	defer done()
	if left := n.similar.cache.HandOver(hand); left > 0 {
		n.log.Info("not all answers to questions in other words were handed over: their next owners learn them anew", "partitions", left)
	}
	n.retired.Store(true) // what is saved is granted no more
	return n.saveLevels()
}

// end stops a server. What it has still to do when ctx ends is cut, which is no failure.
func (n *Node) end(ctx context.Context, s *http.Server) error {
	err := edge.Drain(ctx, s)
	if errors.Is(err, context.DeadlineExceeded) {
		n.log.Warn("connections were closed at the end of the drain")
		return nil
	}
	return err
}

// sweep forgets full buckets, a bounded number at a time.
func (n *Node) sweep(ctx context.Context) {
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			n.limits.Sweep(sweepBudget)
		}
	}
}
