package journal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
)

// Errors of a Log.
var (
	// ErrFailing refuses a reservation: the disk does. Settle and Read go on.
	ErrFailing = errors.New("journal: the disk does not take what is written: see the log and headgate_journal_failing")
	// ErrFull refuses a reservation beyond a bound: too many stand open, or too many accounts.
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
	// SyncEach lets Reserve wait for the disk; those that wait together share one sync.
	SyncEach   bool
	Segment    int64            // bytes; DefaultSegment
	Retention  time.Duration    // segments that are older go; DefaultRetention
	MaxBytes   int64            // the oldest segments go beyond it; DefaultMaxBytes
	Now        func() time.Time // nil: time.Now
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
	if c.FS == nil {
		c.FS = osFS{}
	}
	return nil
}

var errSkeleton = errors.New("journal: under construction")

// Log is the journal of one process. All methods are safe for concurrent use.
type Log struct{ cfg Config }

// Open reads what earlier processes left in the folder, records what they left open as
// Crashed, and begins a segment of its own; all of that is on the disk when it returns. It
// fails with ErrInUse where another process has the folder, and where the Incarnation was
// used before. Close ends it.
func Open(cfg Config) (*Log, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return nil, errSkeleton
}

// Unclosed gives the earlier incarnations that are not Closed, the oldest first: the ledger is to
// be told of them. What it gives does not change but by Closed and Lost.
func (l *Log) Unclosed() []Past { return nil }

// Closed records that the ledger has the last word on an incarnation: it is not in Unclosed
// any more, now and after the next Open. It is on the disk when it returns. For an
// incarnation that is not known it does nothing. For this process's own one it must be the
// last word: it fails while a reservation is open, and Reserve fails afterwards.
func (l *Log) Closed(incarnation uint64) error { return errSkeleton }

// Lost records what the ledger counted as spent by an incarnation of Unclosed beyond its
// Total, so that the books add up. The first amount for an account stands; to say it again
// does nothing, so a node that crashes in between may start over.
func (l *Log) Lost(incarnation uint64, a Account, amount int64) error { return errSkeleton }

// Reserve records a reservation and sets its ID. It does not keep r. On an error (ErrFailing,
// ErrFull, ErrClosed, or a part that is out of bounds) nothing is reserved.
func (l *Log) Reserve(r *Reservation) error { return errSkeleton }

// Settle records how a request ended, and ends its reservation, once: a second time fails
// with ErrUnknown and records nothing. It does not keep u. It never waits for a disk that
// refuses: the record is then kept in memory, written later, and nil is returned; until
// then a crash counts the reservation in full. With an ID of 0 it records a request that
// had no reservation. Names are cut to MaxName, Parts must be within the bounds.
func (l *Log) Settle(u *Usage) error { return errSkeleton }

// Close writes what is kept, syncs, and ends the Log: everything is on the disk if it
// returns nil. Reservations that are open count in full at the next Open. When ctx ends
// first it gives up waiting for a disk that refuses.
func (l *Log) Close(ctx context.Context) error { return errSkeleton }
