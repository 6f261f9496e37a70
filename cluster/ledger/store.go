package ledger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	walfs "github.com/hashicorp/raft-wal/fs"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

const (
	// segmentSize of the log's files. It is allocated ahead, so that a full disk shows when a
	// segment is begun and not in the middle of one.
	segmentSize = 16 << 20
	// repairEvery is how often at most a log that failed to write is opened anew.
	repairEvery = 100 * time.Millisecond
	// retainSnapshots is how many snapshots stay on disk.
	retainSnapshots = 2
	// cachedEntries of the log stay in memory for followers that keep up.
	cachedEntries = 1024

	remedy = "if other nodes have a quorum, stop this node, remove its data folder and start it again: " +
		"it joins anew and gets a copy; else restore a backup, or keep what another node has by `headgate ledger recover`"
)

// ErrInUse means that another process holds the ledger's folder.
var ErrInUse = errors.New("the ledger is in use by a running node: stop it first")

// CorruptError says which file or folder of the ledger cannot be read, and what to do. No
// ledger opens over it: entries that others may count on would be missing.
type CorruptError struct {
	Path string
	Err  error
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("the ledger's data in %s is damaged: %v: %s", e.Path, e.Err, remedy)
}

func (e *CorruptError) Unwrap() error { return e.Err }

// store keeps raft's log, term and vote in a raft-wal, and mends what that leaves open:
//
//   - each entry carries a checksum (raft-wal checks its last batch only);
//   - a log whose tail was cut off can be read after a restart (segments.go);
//   - a log that failed to write (a full disk) is opened anew before the next write, as
//     raft-wal refuses every write after one failed; what was not acknowledged is cut off;
//   - a term that cannot be written holds raft's goroutine until it can be, and an entry that
//     cannot be read ends it, where raft would panic and take the process with it.
//
// It is safe for concurrent use, one writer at a time.
type store struct {
	dir     string
	files   types.VFS
	logger  *slog.Logger
	lock    *os.File
	onFatal func(error) // the log cannot be read: raft must stop

	armed   atomic.Bool   // raft runs: its panics are to be prevented
	closing chan struct{} // closed by abort
	once    sync.Once
	health  atomic.Pointer[error] // of the last write; nil: good

	mu  sync.RWMutex // held for writing only while log is replaced
	log *walLog      // never nil

	writing sync.Mutex
	last    atomic.Uint64 // the last entry acknowledged
	broken  error         // why log takes no more writes
	tried   time.Time     // to repair it
}

var (
	_ raft.LogStore          = (*store)(nil)
	_ raft.StableStore       = (*store)(nil)
	_ raft.MonotonicLogStore = (*store)(nil)
)

// openStore opens the log in dir, which it creates. It refuses a folder in use, and one
// whose newest segment lost batches in its middle.
func openStore(dir string, files types.VFS, logger *slog.Logger, onFatal func(error)) (*store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data folder of the ledger: %w", err)
	}
	lock, err := lockFolder(dir)
	if err != nil {
		return nil, err
	}
	if files == nil {
		files = walfs.New()
	}
	s := &store{
		dir: dir, files: files, logger: logger, lock: lock,
		onFatal: onFatal, closing: make(chan struct{}),
	}
	if err := s.begin(); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return s, nil
}

func (s *store) begin() error {
	if err := errors.Join(checkNewestSegment(s.dir), checkList(filepath.Join(s.dir, metaFile))); err != nil {
		return err
	}
	log, err := s.openLog()
	if err != nil {
		if spaceLack(err) {
			return s.explain(err)
		}
		return &CorruptError{Path: s.dir, Err: err}
	}
	last, err := log.LastIndex()
	if err != nil {
		return errors.Join(err, log.Close())
	}
	s.log = log
	s.last.Store(last)
	return nil
}

// walLog is a raft-wal and the database of its segments, terms and votes, which raft-wal
// v0.4.0 opens and never closes.
type walLog struct {
	*wal.WAL
	meta *metadb.BoltMetaDB
}

// Close ends both. Calling it again does nothing.
func (l *walLog) Close() error { return errors.Join(l.WAL.Close(), l.meta.Close()) }

// openLog opens the raft-wal; what it panics of, bolt does on a broken file, is an error.
func (s *store) openLog() (log *walLog, err error) {
	meta := &metadb.BoltMetaDB{}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("opening the log: %v", r)
		}
		if err != nil {
			log, err = nil, errors.Join(err, meta.Close())
		}
	}()
	if err := s.indexSealed(meta); err != nil {
		return nil, err
	}
	opened, err := wal.Open(s.dir,
		wal.WithSegmentSize(segmentSize),
		wal.WithSegmentFiler(segment.NewFiler(s.dir, s.files)),
		wal.WithMetaStore(meta),
		wal.WithLogger(newHclog(s.logger, "wal")))
	return &walLog{opened, meta}, err
}

// lockFolder takes the folder for this process until the file is closed.
func lockFolder(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of the ledger: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		closed := f.Close()
		return nil, errors.Join(fmt.Errorf("%s: %w", dir, ErrInUse), closed)
	}
	return f, nil
}

// seal returns a copy of entry with its checksum behind its extensions.
func seal(entry *raft.Log) *raft.Log {
	sealed := *entry
	n := len(entry.Extensions)
	sealed.Extensions = binary.LittleEndian.AppendUint32(entry.Extensions[:n:n], entrySum(entry))
	return &sealed
}

// unseal checks entry and takes its checksum off.
func unseal(entry *raft.Log) error {
	n := len(entry.Extensions) - 4
	if n < 0 {
		return errors.New("entry without a checksum")
	}
	want := binary.LittleEndian.Uint32(entry.Extensions[n:])
	entry.Extensions = entry.Extensions[:n:n]
	if n == 0 {
		entry.Extensions = nil
	}
	if entrySum(entry) != want {
		return errors.New("entry does not match its checksum")
	}
	return nil
}

func entrySum(entry *raft.Log) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli)
	var head [17]byte
	binary.LittleEndian.PutUint64(head[:], entry.Index)
	binary.LittleEndian.PutUint64(head[8:], entry.Term)
	head[16] = byte(entry.Type)
	sum := crc32.Update(0, table, head[:])
	sum = crc32.Update(sum, table, entry.Data)
	return crc32.Update(sum, table, entry.Extensions)
}

// IsMonotonic says that the log has no gaps.
func (s *store) IsMonotonic() bool { return true }

// FirstIndex is that of the oldest entry kept; 0: none.
func (s *store) FirstIndex() (uint64, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.log.FirstIndex()
}

// LastIndex is that of the newest entry acknowledged; 0: none.
func (s *store) LastIndex() (uint64, error) { return s.last.Load(), nil }

// GetLog reads one entry. Once armed it does not return from damage, and waits where the
// log could not be opened anew: see store.
func (s *store) GetLog(index uint64, entry *raft.Log) error {
	for {
		err := s.read(index, entry)
		if err == nil || errors.Is(err, raft.ErrLogNotFound) {
			return err
		}
		damaged := &CorruptError{Path: s.dir, Err: fmt.Errorf("entry %d: %w", index, err)}
		switch {
		case !s.armed.Load():
			return damaged
		case !errors.Is(err, wal.ErrClosed):
			s.onFatal(damaged)
			runtime.Goexit()
		}
		select {
		case <-s.closing:
			runtime.Goexit()
		case <-time.After(repairEvery):
			s.mend()
		}
	}
}

// mend repairs a log that no write repairs, as raft's goroutine waits for a read.
func (s *store) mend() {
	s.writing.Lock()
	defer s.writing.Unlock()
	if s.broken != nil {
		_ = s.repair() // kept in health, and tried again
	}
}

func (s *store) read(index uint64, entry *raft.Log) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if index > s.last.Load() {
		return raft.ErrLogNotFound
	}
	if err := s.log.GetLog(index, entry); err != nil {
		return err
	}
	if entry.Index != index {
		return fmt.Errorf("holds entry %d", entry.Index)
	}
	return unseal(entry)
}

// StoreLog appends one entry.
func (s *store) StoreLog(entry *raft.Log) error { return s.StoreLogs([]*raft.Log{entry}) }

// StoreLogs appends entries, durable when it returns nil. After an error none of them was
// acknowledged; the next call tries again.
func (s *store) StoreLogs(entries []*raft.Log) error {
	if len(entries) == 0 {
		return nil
	}
	sealed := make([]*raft.Log, len(entries))
	for i, entry := range entries {
		sealed[i] = seal(entry)
	}
	return s.write(func(log *walLog) error { return log.StoreLogs(sealed) })
}

// DeleteRange cuts the log's head or tail off.
func (s *store) DeleteRange(low, high uint64) error {
	if s.last.Load() == 0 {
		return nil
	}
	return s.write(func(log *walLog) error { return log.DeleteRange(low, high) })
}

// write does one write, after a repair where the last one failed.
func (s *store) write(do func(*walLog) error) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	if s.broken != nil {
		if err := s.repair(); err != nil {
			return err
		}
	}
	err := do(s.log)
	if errors.Is(err, wal.ErrSealed) { // the next segment could not be begun; the repair says why
		s.tried = time.Time{}
		if err := s.repair(); err != nil {
			return err
		}
		err = do(s.log)
	}
	if err == nil {
		var last uint64
		if last, err = s.log.LastIndex(); err == nil {
			s.last.Store(last)
			s.health.Store(nil)
			return nil
		}
	}
	if errors.Is(err, wal.ErrClosed) {
		return err
	}
	return s.ail(err)
}

// ail keeps why the log takes no more writes, and gives it. Callers hold writing.
func (s *store) ail(err error) error {
	err = s.explain(err)
	s.broken = err
	s.health.Store(&err)
	return err
}

// repair opens the log anew and cuts off what was written but never acknowledged. Where the
// disk has no room for a segment it leaves the log open for reading. Callers hold writing.
func (s *store) repair() error {
	if s.broken != nil && time.Since(s.tried) < repairEvery {
		return s.broken
	}
	s.tried = time.Now()
	err := s.probe()
	if err == nil {
		err = s.reopen()
	}
	if err != nil {
		if damaged := (*CorruptError)(nil); errors.As(err, &damaged) {
			s.onFatal(damaged)
		}
		return s.ail(err)
	}
	s.broken = nil
	return nil
}

// probe tells whether a segment would fit on the disk.
func (s *store) probe() error {
	const name = "probe.tmp"
	f, err := s.files.Create(s.dir, name, segmentSize)
	if err != nil {
		return errors.Join(err, removeIfThere(filepath.Join(s.dir, name)))
	}
	return errors.Join(f.Close(), s.files.Delete(s.dir, name))
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (s *store) reopen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.log.Close(); err != nil {
		return err
	}
	log, err := s.openLog()
	if err != nil {
		return err
	}
	s.log = log
	last, err := log.LastIndex()
	if err != nil {
		return err
	}
	switch kept := s.last.Load(); {
	case last < kept:
		return &CorruptError{Path: s.dir, Err: fmt.Errorf("entries %d to %d are gone", last+1, kept)}
	case last > kept:
		return log.DeleteRange(kept+1, last)
	}
	return nil
}

func spaceLack(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

func (s *store) explain(err error) error {
	if spaceLack(err) {
		return fmt.Errorf("no space left for the ledger's log: free space in %s (a segment takes %d MiB): %w", s.dir, segmentSize>>20, err)
	}
	return fmt.Errorf("writing the ledger's log in %s: %w", s.dir, err)
}

// Set writes a value of raft's, such as whom it voted for.
func (s *store) Set(key, value []byte) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.log.Set(key, value)
}

// Get reads a value; none: an error as raft expects it or an empty value.
func (s *store) Get(key []byte) ([]byte, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.log.Get(key)
}

// SetUint64 writes a number. Once armed, raft's term is tried again until it is written.
func (s *store) SetUint64(key []byte, value uint64) error {
	for {
		err := s.setUint64(key, value)
		if err == nil || !s.armed.Load() || !bytes.Equal(key, []byte("CurrentTerm")) {
			return err
		}
		err = s.explain(err)
		s.health.Store(&err)
		select {
		case <-s.closing:
			runtime.Goexit()
		case <-time.After(repairEvery):
		}
	}
}

func (s *store) setUint64(key []byte, value uint64) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.log.SetUint64(key, value)
}

// GetUint64 reads a number; 0 where none was written.
func (s *store) GetUint64(key []byte) (uint64, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.log.GetUint64(key)
}

// err is why the last write failed, nil if it did not.
func (s *store) err() error {
	if err := s.health.Load(); err != nil {
		return *err
	}
	return nil
}

// abort releases what waits for the disk, so that raft can end.
func (s *store) abort() { s.once.Do(func() { close(s.closing) }) }

// close ends it, once raft has ended.
func (s *store) close() error {
	s.abort()
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.log.Close(), s.lock.Close())
}

// timedLog is a log that knows since when an entry is being written. Raft has one writer.
type timedLog struct {
	raft.LogStore
	began atomic.Pointer[time.Time] // nil: nothing is being written
}

// StoreLog see raft.LogStore.
func (t *timedLog) StoreLog(entry *raft.Log) error { return t.StoreLogs([]*raft.Log{entry}) }

// StoreLogs see raft.LogStore.
func (t *timedLog) StoreLogs(entries []*raft.Log) error {
	now := time.Now()
	t.began.Store(&now)
	defer t.began.Store(nil)
	return t.LogStore.StoreLogs(entries)
}

// IsMonotonic see raft.MonotonicLogStore.
func (t *timedLog) IsMonotonic() bool {
	log, ok := t.LogStore.(raft.MonotonicLogStore)
	return ok && log.IsMonotonic()
}

func (t *timedLog) stalled() bool {
	began := t.began.Load()
	return began != nil && time.Since(*began) >= stalledAfter
}

// A segment of raft-wal v0.4.0 is a header of 32 bytes and frames: 8 bytes (type, 3 × 0, length
// or checksum) and for entries and the index a payload, padded to 8.
const (
	segmentHeader = 32
	frameHeader   = 8
	frameEntry    = 1
	frameIndex    = 2
	frameCommit   = 3
)

// checkNewestSegment refuses a log whose newest segment holds a whole batch after the place
// where raft-wal would stop reading: it takes any damage for a write that a crash tore,
// which cuts off what was acknowledged after it. Damage to the last batch cannot be told
// from a torn write; raft fetches it again from the others.
func checkNewestSegment(dir string) error {
	names, err := filepath.Glob(filepath.Join(dir, "*.wal"))
	if err != nil || len(names) == 0 {
		return err
	}
	newest := names[len(names)-1] // Glob sorts, and names begin with the first index, 20 digits
	data, err := os.ReadFile(newest)
	if err != nil {
		return fmt.Errorf("reading the ledger's log: %w", err)
	}
	// It was allocated whole before anything was written into it.
	if len(data) < segmentSize && len(bytes.TrimLeft(data, "\x00")) > 0 {
		return &CorruptError{Path: newest, Err: fmt.Errorf("it has %d bytes of %d: it was cut off, and what was behind is not known", len(data), segmentSize)}
	}
	if at, lost := lostBatch(data); lost {
		return &CorruptError{Path: newest, Err: fmt.Errorf("unreadable from byte %d on, with whole batches after it", at)}
	}
	return nil
}

// metaFile is raft-wal's list of segments, a bbolt database, beside them.
const metaFile = "wal-meta.db"

// checkList refuses a bbolt database that is shorter than it says: bbolt maps it into memory,
// and to read behind the file's end would kill the process.
func checkList(path string) error {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the ledger's list of segments: %w", err)
	}
	// A meta page: a header of 16 bytes; magic, version, page size and flags of four each; root
	// bucket and free list of 24; how many pages there are, the transaction, and a checksum of
	// what is between it and the header, of eight each. bbolt goes by the newer of the two valid.
	const header, magic, pagesAt, txAt, sumAt, end = 16, 0xED0CDAED, 56, 64, 72, 80
	size := os.Getpagesize()
	var pages, newest uint64
	for page := range 2 {
		m := data[min(page*size, len(data)):]
		if len(m) < end || binary.NativeEndian.Uint32(m[header:]) != magic {
			continue // bbolt says so itself, if the other is no better
		}
		sum := fnv.New64a()
		_, _ = sum.Write(m[header:sumAt]) // never fails
		if sum.Sum64() != binary.NativeEndian.Uint64(m[sumAt:]) {
			continue
		}
		size = int(binary.NativeEndian.Uint32(m[header+8:]))
		if tx := binary.NativeEndian.Uint64(m[txAt:]); tx >= newest {
			newest, pages = tx, binary.NativeEndian.Uint64(m[pagesAt:])
		}
	}
	if pages > uint64(len(data)) || pages*uint64(size) > uint64(len(data)) {
		return &CorruptError{Path: path, Err: fmt.Errorf("it has %d bytes, but %d pages of %d: it was cut off", len(data), pages, size)}
	}
	return nil
}

// lostBatch finds where reading stops and whether a whole batch lies behind.
func lostBatch(data []byte) (at int, lost bool) {
	at = segmentHeader
	for at+frameHeader <= len(data) {
		size := binary.LittleEndian.Uint32(data[at+4:])
		switch kind := data[at]; {
		case kind == frameCommit:
			at += frameHeader
			continue
		case kind != frameEntry && kind != frameIndex, uint64(at)+frameHeader+uint64(size) > uint64(len(data)):
		default:
			at += frameHeader + (int(size)+7)&^7
			continue
		}
		break
	}
	if at >= len(data) || len(bytes.TrimLeft(data[at:], "\x00")) == 0 {
		return at, false
	}
	return at, batchAfter(data, at)
}

// batchAfter looks for two commit frames with exactly one batch between them: the second
// carries the checksum of all that lies between.
func batchAfter(data []byte, at int) bool {
	const recent = 16 // commit frames that a payload might only look like
	table := crc32.MakeTable(crc32.Castagnoli)
	var ends []int
	for ; at+frameHeader <= len(data); at += 8 {
		if data[at] != frameCommit || data[at+1]|data[at+2]|data[at+3] != 0 {
			continue
		}
		for _, end := range ends {
			if end < at && crc32.Checksum(data[end:at], table) == binary.LittleEndian.Uint32(data[at+4:]) {
				return true
			}
		}
		if ends = append(ends, at+frameHeader); len(ends) > recent {
			ends = ends[1:]
		}
	}
	return false
}

// verify makes sure, before raft starts, that snapshots and log follow each other without a
// gap and that every entry after the snapshot can be read; raft itself would panic, or
// quietly begin with an older snapshot. dir is only named in errors.
func verify(logs raft.LogStore, snapshots raft.SnapshotStore, dir string) error {
	covered, err := newestSnapshot(snapshots, dir)
	if err != nil {
		return err
	}
	first, err := logs.FirstIndex()
	if err != nil {
		return &CorruptError{Path: dir, Err: err}
	}
	last, err := logs.LastIndex()
	if err != nil {
		return &CorruptError{Path: dir, Err: err}
	}
	if last > covered && first > covered+1 {
		return &CorruptError{Path: dir, Err: fmt.Errorf("the newest readable snapshot ends at entry %d, the log begins at %d", covered, first)}
	}
	if unlisted := newestFolder(dir); unlisted > covered && last < unlisted {
		return &CorruptError{
			Path: filepath.Join(dir, "snapshots"),
			Err:  fmt.Errorf("the snapshot at entry %d cannot be read, and the log ends at %d", unlisted, last),
		}
	}
	for index := max(first, covered+1); index <= last; index++ {
		var entry raft.Log
		if err := logs.GetLog(index, &entry); err != nil {
			if damaged := (*CorruptError)(nil); errors.As(err, &damaged) {
				return err
			}
			return &CorruptError{Path: dir, Err: fmt.Errorf("entry %d: %w", index, err)}
		}
	}
	return nil
}

// newestSnapshot gives the index of the newest that opens, which checks its checksum; 0
// where there is none, an error where none opens.
func newestSnapshot(snapshots raft.SnapshotStore, dir string) (uint64, error) {
	list, err := snapshots.List()
	if err != nil {
		return 0, &CorruptError{Path: filepath.Join(dir, "snapshots"), Err: err}
	}
	var bad error
	for _, meta := range list {
		if err := checkMeta(meta); err != nil { // raft would believe it
			return 0, &CorruptError{Path: filepath.Join(dir, "snapshots", meta.ID), Err: err}
		}
		_, reader, err := snapshots.Open(meta.ID)
		if err == nil {
			return meta.Index, reader.Close()
		}
		if bad == nil {
			bad = &CorruptError{Path: filepath.Join(dir, "snapshots", meta.ID), Err: err}
		}
	}
	return 0, bad
}

// checkMeta compares what a snapshot says of itself, which no checksum covers, with its name.
func checkMeta(meta *raft.SnapshotMeta) error {
	want := fmt.Sprintf("%d-%d-", meta.Term, meta.Index)
	if meta.Version != raft.SnapshotVersionMax || !strings.HasPrefix(meta.ID, want) || len(meta.Configuration.Servers) == 0 {
		return errors.New("its meta.json is not that of this snapshot")
	}
	return nil
}

// newestFolder is the greatest index that the name of a finished snapshot gives; 0: none.
func newestFolder(dir string) (newest uint64) {
	if dir == "" {
		return 0
	}
	entries, err := os.ReadDir(filepath.Join(dir, "snapshots"))
	if err != nil {
		return 0
	}
	for _, entry := range entries {
		parts := strings.Split(entry.Name(), "-") // TERM-INDEX-MILLISECONDS
		if !entry.IsDir() || len(parts) != 3 || strings.HasSuffix(entry.Name(), ".tmp") {
			continue
		}
		if index, err := strconv.ParseUint(parts[1], 10, 64); err == nil {
			newest = max(newest, index)
		}
	}
	return newest
}

// openSnapshots opens the folder of snapshots and removes those that were never finished.
func openSnapshots(dir string, logger *slog.Logger) (raft.SnapshotStore, error) {
	torn, err := filepath.Glob(filepath.Join(dir, "snapshots", "*.tmp"))
	if err != nil {
		return nil, err
	}
	for _, path := range torn {
		if err := os.RemoveAll(path); err != nil {
			return nil, fmt.Errorf("removing an unfinished snapshot: %w", err)
		}
	}
	snapshots, err := raft.NewFileSnapshotStoreWithLogger(dir, retainSnapshots, newHclog(logger, "snapshot"))
	if err != nil {
		return nil, fmt.Errorf("snapshots of the ledger in %s: %w", dir, err)
	}
	return snapshots, nil
}
