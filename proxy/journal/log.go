package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Bounds and defaults.
const (
	DefaultSyncEvery = 50 * time.Millisecond
	DefaultSegment   = 64 << 20 // bytes after which a segment is followed by another
	DefaultRetention = 400 * 24 * time.Hour
	DefaultMaxBytes  = 10 << 30

	// MaxName is how many bytes are kept of a name that a client may choose.
	MaxName = 256
	// MaxParts bounds the accounts of one request, MaxAccountName the bytes of each of an
	// account's three names: beyond them Reserve refuses.
	MaxParts       = 32
	MaxAccountName = 1024

	maxOpen     = 1 << 17 // reservations that stand open at once
	maxKept     = 1 << 16 // settled records that wait for a disk that refuses
	maxAccounts = 1 << 18 // of one incarnation
	maxPast     = 1 << 10 // incarnations that are not Closed
	maxRetry    = 1 << 12 // kept records that are tried at once
	maxRounds   = 8       // batches that one caller writes for others
	maxRetired  = 8       // segments that wait for their last sync
	maxBuffer   = 1 << 20 // bytes of a batch's buffer that are kept for the next

	// An account is forgotten when its period ended that long ago, or, where there are
	// maxAccounts, an hour ago. The ledger keeps it as long; see Past.Forgotten.
	forgetAfter = 35 * 24 * time.Hour
	forgetSoon  = time.Hour

	segmentAge = 24 * time.Hour // after which a segment is followed by another
	keepEvery  = time.Hour      // how often old segments are looked for
)

// Errors of a Log.
var (
	// ErrFailing refuses a reservation: the disk does. Settle and Read go on.
	ErrFailing = errors.New("journal: the disk does not take what is written: see the log and headgate_journal_failing")
	// ErrFull refuses a reservation beyond a bound: too many stand open, or it would bring an account
	// more than there may be.
	ErrFull = errors.New("journal: too many open reservations or accounts")
	// ErrClosed refuses what comes after Close, or after Closed of this incarnation.
	ErrClosed = errors.New("journal: it is closed")
	// ErrUnknown refuses to settle what is not open: it was settled before, or never reserved.
	ErrUnknown = errors.New("journal: no such reservation is open")
)

// Config describes a Log. Dir, Node, Incarnation and Logger are required.
type Config struct {
	Dir         string // its own folder, made if absent (0700)
	Node        string
	Incarnation uint64 // of this process, never one of an earlier
	// BootID tells this run of the machine's kernel from others. Empty: not known, and
	// whatever was not stopped cleanly is Damaged.
	BootID    string
	FS        FS            // nil: the machine's
	SyncEvery time.Duration // how long the disk may be behind; DefaultSyncEvery
	// SyncEach lets Reserve and Settle wait for the disk; those that wait together share one sync. A process
	// whose machine went down is Damaged all the same.
	SyncEach  bool
	Segment   int64            // bytes; DefaultSegment
	Retention time.Duration    // segments that are older go; DefaultRetention
	MaxBytes  int64            // the oldest segments go beyond it; DefaultMaxBytes
	Now       func() time.Time // nil: time.Now
	// Zone finds the time zone that another node's query groups by; nil: time.LoadLocation.
	Zone       func(name string) (*time.Location, error)
	Logger     *slog.Logger
	Registerer prometheus.Registerer // may be nil
}

// Validate fills in the defaults and reports what cannot be.
func (c *Config) Validate() error {
	if c.Dir == "" || c.Node == "" || c.Incarnation == 0 || c.Logger == nil {
		return errors.New("journal: Dir, Node, Incarnation and Logger are required")
	}
	if len(c.Node) > MaxName || len(c.BootID) > MaxName {
		return fmt.Errorf("journal: Node or BootID is longer than %d bytes", MaxName)
	}
	if c.SyncEvery < 0 || c.Segment < 0 || c.Retention < 0 || c.MaxBytes < 0 {
		return errors.New("journal: SyncEvery, Segment, Retention or MaxBytes is negative")
	}
	if c.SyncEvery == 0 {
		c.SyncEvery = DefaultSyncEvery
	}
	if c.Segment == 0 {
		c.Segment = DefaultSegment
	}
	if c.Retention == 0 {
		c.Retention = DefaultRetention
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = DefaultMaxBytes
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Zone == nil {
		c.Zone = time.LoadLocation
	}
	if c.FS == nil {
		c.FS = osFS{}
	}
	return nil
}

// Log is the journal of one process. All methods are safe for concurrent use.
type Log struct {
	cfg     Config
	folder  folder
	lock    io.Closer
	metrics *metrics
	ids     atomic.Uint64
	entries sync.Pool // of *entry
	idle    sync.Pool // of *pending

	// The caller that found writing unset writes for all who queue meanwhile. It alone
	// changes own, books, file and current, and under mu; it may read them without.
	mu        sync.Mutex
	writing   bool
	queue     []*entry
	spare     []*entry // the queue's other buffer
	own       *book
	books     books // own and those of Unclosed
	file      File
	current   segment
	segments  []segment // those before current
	kept      []*entry  // settled records that the disk did not take
	failing   error     // why it does not; nil: it does
	rotate    bool      // the next batch needs a new segment
	trim      bool      // there are too many accounts
	trimmed   time.Time
	retired   []File // segments that want a last sync
	dirty     bool   // file does
	renamed   bool   // the folder does
	closing   bool
	reserving int  // reservations on their way
	told      bool // the ledger of all of this incarnation: it is Closed, or about to be

	buf     []byte        // of the one who writes
	syncing sync.Mutex    // one sync at a time
	losing  sync.Mutex    // one Lost at a time
	wake    chan struct{} // asks the syncer for a round
	quit    chan struct{} // ends it
	synced  chan struct{} // it has ended
	over    chan struct{} // Close has
}

// Open reads what earlier processes left in the folder, records what they left open as
// Crashed, and begins a segment of its own; all of that is on the disk when it returns. It
// fails with ErrInUse where another process has the folder, and where the Incarnation was
// used before. Close ends it.
func Open(cfg Config) (*Log, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	f := folder{fs: cfg.FS, dir: cfg.Dir, log: cfg.Logger}
	if err := f.fs.MkdirAll(f.dir); err != nil {
		return nil, fmt.Errorf("journal: open: %w", err)
	}
	lock, err := f.fs.Lock(f.path(lockName))
	if err != nil {
		return nil, fmt.Errorf("journal: open: %w", err)
	}
	l := &Log{
		cfg: cfg, folder: f, lock: lock, wake: make(chan struct{}, 1),
		quit: make(chan struct{}), synced: make(chan struct{}), over: make(chan struct{}),
	}
	if err := l.start(); err != nil {
		if l.file != nil {
			err = errors.Join(err, l.file.Close())
		}
		l.metrics.unregister()
		return nil, fmt.Errorf("journal: open: %w", errors.Join(err, lock.Close()))
	}
	l.prune()
	go l.syncer()
	return l, nil
}

// start recovers and begins this process's first segment.
func (l *Log) start() error {
	r, err := l.folder.recoverBooks()
	if err != nil {
		return err
	}
	// What the books below rest on must not go away again.
	for i := max(0, len(r.segments)-3); i < len(r.segments); i++ {
		if err := l.folder.sync(&r.segments[i]); err != nil {
			return err
		}
	}
	for _, s := range r.segments {
		if s.incarnation == l.cfg.Incarnation {
			return fmt.Errorf("incarnation %016x was used before, by %s", s.incarnation, s.name())
		}
	}
	for _, b := range r.books {
		if !b.stopped && (b.boot == "" || b.boot != l.cfg.BootID) {
			b.damage("the machine was started again without a clean stop: what was not on its disk is lost")
		}
		if b.damaged != "" {
			l.cfg.Logger.Error("journal of an earlier process may not be whole", "node", b.node, "incarnation", fmt.Sprintf("%016x", b.incarnation), "reason", b.damaged)
		}
		b.stopped = true // from here on: it is on the disk, and in the checkpoint below
	}
	if over := len(r.books) - maxPast; over > 0 {
		l.cfg.Logger.Error("journal forgets the oldest processes that the ledger was not told of, what was granted to them stays spent", "processes", over)
		r.books = slices.Delete(r.books, 0, over)
	}
	if l.metrics, err = newMetrics(l.cfg.Registerer, l); err != nil {
		return err
	}
	l.own = newBook(l.cfg.Incarnation, l.cfg.Node, l.cfg.BootID)
	l.books, l.segments = append(r.books, l.own), r.segments
	if err := l.next(true); err != nil {
		return err
	}
	return l.recordCrashed()
}

// recordCrashed settles in full what earlier processes left open.
func (l *Log) recordCrashed() error {
	var r Reservation
	for _, b := range l.books {
		if b == l.own {
			continue
		}
		for _, id := range slices.Sorted(maps.Keys(b.open)) {
			if err := b.open[id].read(nil, &r); err != nil {
				return err
			}
			e := l.usageEntry(crashed(b.incarnation, &r))
			e.internal, e.keep = true, false
			if err := l.submit(e); err != nil {
				return err
			}
		}
	}
	return l.file.Sync()
}

// crashed is the record of a reservation that was never settled: it stands at the time of
// the reservation, the only one that is known.
func crashed(incarnation uint64, r *Reservation) *Usage {
	u := &Usage{
		ID: r.ID, Incarnation: incarnation, Time: r.Time, Started: r.Time, RequestID: r.RequestID,
		Tenant: r.Tenant, Key: r.Key, User: r.User, Model: r.Model, Asked: r.Model,
		Input: r.InputTokens, Output: r.OutputTokens, Cost: r.Cost, Reserved: r.Cost,
		Outcome: Crashed, Estimated: true, Parts: r.Parts,
	}
	for i := range r.Parts {
		u.Cost = max(u.Cost, r.Parts[i].Amount)
	}
	return u
}

// Unclosed gives the earlier incarnations that are not Closed, the oldest first: the ledger is to
// be told of them. What it gives does not change but by Closed and Lost.
func (l *Log) Unclosed() []Past {
	l.mu.Lock()
	defer l.mu.Unlock()
	var past []Past
	for _, b := range l.books {
		if b != l.own && !b.closed {
			past = append(past, b.past())
		}
	}
	return past
}

// Closed records that the ledger has the last word on an incarnation: it is not in Unclosed
// any more, now and after the next Open. It is on the disk when it returns. For an
// incarnation that is not known it does nothing. For this process's own one it must be the
// last word: it fails while a reservation is open, and Reserve fails afterwards.
func (l *Log) Closed(incarnation uint64) error {
	rec, from := begin(nil, recClosed)
	e := l.entry(recClosed)
	e.payload, e.incarnation, e.sync = end(putFixed(rec, 1, incarnation), from), incarnation, true
	if err := l.submit(e); err != nil {
		return fmt.Errorf("journal: close incarnation %016x: %w", incarnation, err)
	}
	return nil
}

// Lost records what the ledger counted as spent by an incarnation of Unclosed beyond its
// Total, so that the books add up. The first amount for an account stands; to say it again
// does nothing, so a node that crashes in between may start over.
func (l *Log) Lost(incarnation uint64, a Account, amount int64) error {
	u := &Usage{
		Incarnation: incarnation, Time: l.cfg.Now(), Tenant: a.Tenant, Outcome: Lost, Reserved: amount,
		Parts: []Part{{Account: a, Amount: amount}},
	}
	if err := checkParts(u.Parts); err != nil || amount == 0 {
		return err
	}
	if incarnation == l.cfg.Incarnation {
		return errors.New("journal: this process has lost nothing yet")
	}
	l.losing.Lock()
	defer l.losing.Unlock()
	e := l.usageEntry(u)
	e.sync, e.keep = true, false
	if err := l.submit(e); err != nil {
		return fmt.Errorf("journal: record what was lost: %w", err)
	}
	return nil
}

// Reserve records a reservation and sets its ID. It does not keep r. On an error (ErrFailing,
// ErrFull, ErrClosed, or a part that is out of bounds) nothing is reserved.
func (l *Log) Reserve(r *Reservation) error {
	if err := checkParts(r.Parts); err != nil {
		return err
	}
	p, _ := l.idle.Get().(*pending)
	if p == nil {
		p = &pending{}
	}
	r.ID = l.ids.Add(1)
	rec, from := begin(p.payload[:0], recReservation)
	*p = pending{id: r.ID, payload: end(putReservation(rec, r), from)}
	e := l.entry(recReservation)
	e.held, e.payload = p, p.payload
	return l.submit(e)
}

// Settle records how a request ended, and ends its reservation, once: a second time fails
// with ErrUnknown and records nothing. It does not keep u. It never waits for a disk that
// refuses: the record is then kept in memory, written later, and nil is returned; until
// then a crash counts the reservation in full. With an ID of 0 it records a request that
// had no reservation, and charges nothing. Names are cut to MaxName, Parts must be within
// the bounds. With SyncEach it waits for the disk, as Reserve does.
func (l *Log) Settle(u *Usage) error {
	if err := checkParts(u.Parts); err != nil {
		return err
	}
	if u.ID == 0 && len(u.Parts) > 0 {
		return errors.New("journal: a charge needs a reservation: the usage has parts but no id")
	}
	if u.Outcome == Crashed || u.Outcome == Lost {
		return fmt.Errorf("journal: the outcome %q is the journal's own", u.Outcome)
	}
	plain := *u
	plain.Incarnation = 0
	return l.submit(l.usageEntry(&plain))
}

func (l *Log) usageEntry(u *Usage) *entry {
	e := l.entry(recUsage)
	rec, from := begin(e.own[:0], recUsage)
	e.own = end(putUsage(rec, u), from)
	e.payload, e.keep = e.own, true
	e.id, e.incarnation, e.outcome, e.at = u.ID, u.Incarnation, u.Outcome, nanos(u.Time)
	e.parts = append(e.parts[:0], u.Parts...)
	return e
}

// checkParts holds the parts to their bounds.
func checkParts(parts []Part) error {
	if len(parts) > MaxParts {
		return fmt.Errorf("journal: %d budgets on one request, at most %d", len(parts), MaxParts)
	}
	for i := range parts {
		p := &parts[i]
		if p.Amount < 0 {
			return fmt.Errorf("journal: budget %q: a negative amount", p.Budget)
		}
		if max(len(p.Tenant), len(p.Budget), len(p.Subject)) > MaxAccountName {
			return fmt.Errorf("journal: budget %q: a name is longer than %d bytes", clip(p.Budget), MaxAccountName)
		}
	}
	return nil
}

// Close writes what is kept, syncs, and ends the Log: everything is on the disk if it
// returns nil. Reservations that are open count in full at the next Open. When ctx ends
// first it gives up waiting for a disk that refuses. Further calls wait like the first.
func (l *Log) Close(ctx context.Context) error {
	l.mu.Lock()
	first := !l.closing
	l.closing = true
	l.mu.Unlock()
	if !first {
		<-l.over
		return nil
	}
	defer close(l.over)
	close(l.quit)
	<-l.synced
	err := l.drain(ctx)
	err = errors.Join(err, l.syncOnce())
	if err == nil {
		rec, from := begin(nil, recStop)
		e := l.entry(recStop)
		e.payload, e.sync, e.internal = end(rec, from), true, true
		err = l.submit(e)
	}
	l.mu.Lock()
	file := l.file
	l.mu.Unlock()
	if err = errors.Join(err, file.Close(), l.lock.Close()); err != nil {
		return fmt.Errorf("journal: close: %w", err)
	}
	return nil
}

// drain waits until nothing is on its way and the disk has taken what is kept. Nothing new
// is admitted any more.
func (l *Log) drain(ctx context.Context) error {
	for {
		err := l.probe()
		l.mu.Lock()
		failing := l.failing
		l.mu.Unlock()
		switch {
		case err == nil && failing == nil:
			return nil
		case err == nil:
			continue // more is kept than one probe takes
		case ctx.Err() != nil:
			return errors.Join(ctx.Err(), err)
		}
		again := time.NewTimer(l.cfg.SyncEvery)
		select {
		case <-ctx.Done():
		case <-again.C:
		}
		again.Stop()
	}
}
