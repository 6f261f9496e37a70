package contentlog

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/bits"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
)

// Mode says which requests of a tenant are kept.
type Mode string

// The modes. The empty mode is Off.
const (
	Off    Mode = "off"
	Errors Mode = "errors" // those that failed
	Sample Mode = "sample" // a share, by a hash of the request id: the same on every node
	All    Mode = "all"
)

// DefaultRetention is how long entries are kept where a policy names no time.
const DefaultRetention = 30 * 24 * time.Hour

// Policy is what one tenant wants. The zero value keeps nothing.
type Policy struct {
	Mode             Mode
	SampleMillionths int64         // of Sample, 0 to 1,000,000
	Retention        time.Duration // 0: DefaultRetention
	Redact           []string      // "email", "phone", "card", or a regular expression (RE2); at most 32
	Dir              string        // folder; empty: that of the Config
}

// Entry is one request with its content.
type Entry struct {
	RequestID, Tenant, User, Key, Model, Route string
	Time                                       time.Time // when it began
	Status                                     int
	Failed                                     bool
	Request, Answer                            []byte
	Truncated                                  bool // the answer was longer
}

// Bounds and defaults.
const (
	maxRules     = 32       // redaction rules of a tenant
	maxBodyLimit = 4 << 20  // of Config.MaxBody, so that a line stays below maxLine
	maxLine      = 64 << 20 // a line of a file: two bodies of 4 MiB, each byte at worst six
	batchEntries = 64
	batchBytes   = 8 << 20 // raw bytes of a batch, after which it takes no further entry
	sweepEvery   = time.Hour
)

// Config describes a Log. Dir and Logger are required.
type Config struct {
	Dir        string // folder, made if absent (0700)
	Logger     *slog.Logger
	QueueSize  int   // entries that wait, default 1024
	QueueBytes int64 // bytes of bodies that wait, default 64 MiB
	MaxBody    int   // bytes kept of a request and of an answer, default 1 MiB, at most 4 MiB
	MaxFile    int64 // bytes after which a file is followed by another, default 64 MiB
}

// Validate fills in the defaults and reports what cannot be.
func (c *Config) Validate() error {
	if c.Dir == "" || c.Logger == nil {
		return errors.New("contentlog: Dir and Logger are required")
	}
	if c.QueueSize < 0 || c.QueueBytes < 0 || c.MaxBody < 0 || c.MaxFile < 0 || c.MaxBody > maxBodyLimit {
		return errors.New("contentlog: a bound is negative, or MaxBody above 4 MiB")
	}
	if c.QueueSize == 0 {
		c.QueueSize = 1024
	}
	if c.QueueBytes == 0 {
		c.QueueBytes = 64 << 20
	}
	if c.MaxBody == 0 {
		c.MaxBody = 1 << 20
	}
	if c.MaxFile == 0 {
		c.MaxFile = 64 << 20
	}
	return nil
}

// rules is a Policy made ready.
type rules struct {
	Policy
	redact redactor
}

// wants decides on an entry; a request is wholly in or out, on every node alike.
func (r *rules) wants(requestID string, failed bool) bool {
	switch r.Mode {
	case All:
		return true
	case Errors:
		return failed
	case Sample:
		sum := sha256.Sum256([]byte(requestID))
		share, _ := bits.Mul64(binary.BigEndian.Uint64(sum[:]), 1_000_000)
		return int64(share) < r.SampleMillionths
	default:
		return false
	}
}

// kept is an entry with the rules in force when it was kept.
type kept struct {
	Entry
	rules      *rules
	requestCut bool
	weight     int64 // of QueueBytes
}

// Log writes entries to files. All methods are safe for concurrent use.
type Log struct {
	cfg      Config
	policies atomic.Pointer[map[string]*rules]
	queued   atomic.Int64 // bytes
	dropped  atomic.Int64

	mu     sync.RWMutex // closed, and the right to send on queue
	closed bool
	queue  chan kept

	flush chan chan struct{} // asks the writer to write what is queued
	sweep chan struct{}      // asks the janitor for a round
	abort chan struct{}      // closed when Close gives up: what is queued is dropped
	quit  chan struct{}      // closed by Close: ends the janitor
	wrote chan struct{}      // closed when the writer has ended
	clean chan struct{}      // closed when the janitor has ended
}

// Open makes the folder, removes what a crash in an erasure left there, and starts the
// writer and the janitor. Until SetPolicies nothing is kept and nothing deleted.
func Open(cfg Config) (*Log, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Dir = filepath.Clean(cfg.Dir)
	if err := folder(cfg.Dir).prepare(); err != nil {
		return nil, fmt.Errorf("contentlog: open: %w", err)
	}
	l := &Log{
		cfg: cfg, queue: make(chan kept, cfg.QueueSize), flush: make(chan chan struct{}), sweep: make(chan struct{}, 1),
		abort: make(chan struct{}), quit: make(chan struct{}), wrote: make(chan struct{}), clean: make(chan struct{}),
	}
	go l.write()
	go l.keepClean()
	return l, nil
}

// SetPolicies replaces the policies of all tenants at once; a tenant without one is not
// kept. On an error (an unknown mode, a rule that does not compile, a folder that cannot be
// made) the old ones stay. Entries that wait are redacted by the policy they were kept under.
func (l *Log) SetPolicies(policies map[string]Policy) error {
	next := make(map[string]*rules, len(policies))
	for tenant, p := range policies {
		r, err := l.compile(p)
		if err != nil {
			return fmt.Errorf("contentlog: tenant %q: %w", tenant, err)
		}
		next[tenant] = r
	}
	l.policies.Store(&next)
	select {
	case l.sweep <- struct{}{}:
	default: // a round is due already
	}
	return nil
}

func (l *Log) compile(p Policy) (*rules, error) {
	switch p.Mode {
	case "", Off, Errors, Sample, All:
	default:
		return nil, fmt.Errorf("unknown mode %q", p.Mode)
	}
	if p.SampleMillionths < 0 || p.SampleMillionths > 1_000_000 || p.Retention < 0 {
		return nil, errors.New("sample outside 0..1, or a negative retention")
	}
	if p.Retention == 0 {
		p.Retention = DefaultRetention
	}
	if p.Dir == "" {
		p.Dir = l.cfg.Dir
	} else if p.Dir = filepath.Clean(p.Dir); p.Dir != l.cfg.Dir {
		if err := folder(p.Dir).prepare(); err != nil {
			return nil, err
		}
	}
	redact, err := compileRedactor(p.Redact)
	return &rules{Policy: p, redact: redact}, err
}

// Wants says whether Keep would keep an entry, so that its bodies need not be gathered for
// nothing. Of a request that goes on, ask with failed set: it may still fail.
func (l *Log) Wants(tenant, requestID string, failed bool) bool {
	r := l.rulesOf(tenant)
	return r != nil && r.wants(requestID, failed)
}

// rulesOf a tenant in force; nil for one without.
func (l *Log) rulesOf(tenant string) *rules {
	policies := l.policies.Load()
	if policies == nil {
		return nil
	}
	return (*policies)[tenant]
}

// Keep hands an entry over, if its tenant's policy wants it. It does not block and owns the
// entry's slices from now on. Bodies beyond MaxBody are cut.
func (l *Log) Keep(e Entry) {
	r := l.rulesOf(e.Tenant)
	if r == nil || !r.wants(e.RequestID, e.Failed) {
		return
	}
	k := kept{Entry: e, rules: r}
	k.Request, k.requestCut = clip(e.Request, l.cfg.MaxBody)
	answer, cut := clip(e.Answer, l.cfg.MaxBody)
	k.Answer, k.Truncated = answer, e.Truncated || cut
	k.weight = int64(cap(k.Request) + cap(k.Answer))

	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.closed {
		l.dropped.Add(1)
		return
	}
	if l.queued.Add(k.weight) <= l.cfg.QueueBytes {
		select {
		case l.queue <- k:
			return
		default:
		}
	}
	l.queued.Add(-k.weight)
	l.dropped.Add(1)
}

// clip cuts b to limit bytes and lets go of what is beyond.
func clip(b []byte, limit int) ([]byte, bool) {
	if len(b) <= limit {
		return b, false
	}
	return append(make([]byte, 0, limit), b[:limit]...), true
}

// Dropped counts the entries that were to be kept and are not: the queue was full, the disk
// refused, or the Log was closed.
func (l *Log) Dropped() int64 { return l.dropped.Load() }

// Export writes the entries that f picks to w, as the JSON lines that stand in the files of
// the folders in use, after what is queued was written. It returns how many.
func (l *Log) Export(w io.Writer, f Filter) (int, error) {
	l.settle()
	total := 0
	for dir := range l.dirs() {
		n, err := ExportDir(string(dir), w, f)
		total += n
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// Erase removes the entries that f picks from the folders in use, those that wait in the
// queue included. It returns how many.
func (l *Log) Erase(f Filter) (int, error) {
	l.settle()
	total := 0
	for dir := range l.dirs() {
		n, err := EraseDir(string(dir), f)
		total += n
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// dirs is the set of folders in use.
func (l *Log) dirs() map[folder]bool {
	dirs := map[folder]bool{folder(l.cfg.Dir): true}
	if policies := l.policies.Load(); policies != nil {
		for _, r := range *policies {
			dirs[folder(r.Dir)] = true
		}
	}
	return dirs
}

// settle waits until all that is queued has been written or dropped.
func (l *Log) settle() {
	done := make(chan struct{})
	select {
	case l.flush <- done:
		<-done
	case <-l.wrote:
	}
}

// Close writes what is queued and ends the Log; further entries are dropped and counted.
// When ctx ends first, what was not yet written is dropped and counted, and its error
// returned at once. Further calls wait like the first.
func (l *Log) Close(ctx context.Context) error {
	l.mu.Lock()
	first := !l.closed
	if first {
		l.closed = true
		close(l.queue)
		close(l.quit)
	}
	l.mu.Unlock()
	for _, ended := range []chan struct{}{l.wrote, l.clean} {
		select {
		case <-ended:
		case <-ctx.Done():
			if first {
				close(l.abort)
			}
			return fmt.Errorf("contentlog: close: %w", ctx.Err())
		}
	}
	return nil
}

// write is the writer: it takes what is queued in batches.
func (l *Log) write() {
	defer close(l.wrote)
	w := writer{maxFile: l.cfg.MaxFile, last: map[place]int{}}
	for {
		select {
		case k, ok := <-l.queue:
			if !ok {
				return
			}
			l.writeBatch(&w, k)
		case done := <-l.flush:
			for n := len(l.queue); n > 0; {
				n -= l.writeBatch(&w, <-l.queue)
			}
			close(done)
		}
	}
}

// writeBatch writes k and what waits behind it, up to a batch, and returns how many that
// were. It says in the log when the disk begins to refuse.
func (l *Log) writeBatch(w *writer, k kept) int {
	batch, n, size := map[place][]line{}, 0, int64(0)
	for ok := true; ok; {
		n, size = n+1, size+k.weight
		if at, text, ok := l.prepare(&k); ok {
			batch[at] = append(batch[at], text)
		} else {
			l.dropped.Add(1)
		}
		l.queued.Add(-k.weight)
		if n == batchEntries || size >= batchBytes {
			break
		}
		select {
		case k, ok = <-l.queue:
		default:
			ok = false
		}
	}
	lost, err := w.write(batch)
	l.dropped.Add(int64(lost))
	if err != nil && !w.failing {
		l.cfg.Logger.Error("content log cannot write, entries are dropped", "error", err)
	}
	w.failing = err != nil
	return n
}

// prepare redacts and encodes an entry, unless Close has given up or it cannot be a line.
func (l *Log) prepare(k *kept) (place, line, bool) {
	select {
	case <-l.abort:
		return place{}, nil, false
	default:
	}
	text, err := k.line()
	return k.place(), text, err == nil && len(text) <= maxLine
}

// keepClean is the janitor: it deletes what is older than its retention.
func (l *Log) keepClean() {
	defer close(l.clean)
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-l.quit:
			return
		case <-tick.C:
		case <-l.sweep:
		}
		policies := l.policies.Load()
		if policies == nil {
			continue
		}
		retention := make(map[string]time.Duration, len(*policies))
		for tenant, r := range *policies {
			retention[stem(tenant)] = r.Retention
		}
		for dir := range l.dirs() {
			if err := dir.prune(time.Now(), retention, l.quit); err != nil {
				l.cfg.Logger.Error("content log cannot delete old entries", "error", err)
			}
		}
	}
}
