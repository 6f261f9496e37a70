package ledger

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	walfs "github.com/hashicorp/raft-wal/fs"
	"github.com/hashicorp/raft-wal/types"
	"go.uber.org/goleak"

	"headgate/cluster/ledger/ledgerpb"
)

// fullDisk is a disk that can run out of space.
type fullDisk struct {
	*walfs.FS
	full atomic.Bool
}

type fullFile struct {
	types.WritableFile
	disk *fullDisk
}

func (d *fullDisk) Create(dir, name string, size uint64) (types.WritableFile, error) {
	if d.full.Load() {
		return nil, &fs.PathError{Op: "create", Path: name, Err: syscall.ENOSPC}
	}
	f, err := d.FS.Create(dir, name, size)
	if err != nil {
		return nil, err
	}
	return fullFile{f, d}, nil
}

func (d *fullDisk) OpenWriter(dir, name string) (types.WritableFile, error) {
	f, err := d.FS.OpenWriter(dir, name)
	if err != nil {
		return nil, err
	}
	return fullFile{f, d}, nil
}

// WriteAt writes half of what it was given before the space ends.
func (f fullFile) WriteAt(p []byte, off int64) (int, error) {
	if !f.disk.full.Load() {
		return f.WritableFile.WriteAt(p, off)
	}
	n, err := f.WritableFile.WriteAt(p[:len(p)/2], off)
	return n, errors.Join(err, syscall.ENOSPC)
}

// onDisk starts a single node in dir and waits for its lead.
func onDisk(t *testing.T, dir string, tune func(*Config)) (*testCluster, *testNode) {
	t.Helper()
	c := newTestCluster(t, func(config *Config) {
		config.Dir, config.Servers = dir, nil
		config.Heartbeat, config.CommitTimeout = 50*time.Millisecond, 5*time.Millisecond
		if tune != nil {
			tune(config)
		}
	})
	n := &testNode{id: testID(1), addr: testAddr(1)}
	c.start(n)
	if !n.ledger.HasState() {
		if err := n.ledger.Bootstrap([]raft.Server{{ID: n.id, Address: n.addr}}); err != nil {
			t.Fatal(err)
		}
	}
	c.leader()
	return c, n
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestRestartFromDisk(t *testing.T) {
	defer goleak.VerifyNone(t)
	dir := t.TempDir()
	c, n := onDisk(t, dir, nil)
	for i := range 20 {
		c.propose(n, set(fmt.Sprintf("t%d", i), "v"))
	}
	before := n.ledger.Facts()
	if err := n.ledger.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	c.propose(n, set("after", "the snapshot"))
	if _, err := Open(Config{Dir: dir, ServerID: "x.a", Transport: n.transport, Logger: quiet()}); !errors.Is(err, ErrInUse) {
		t.Errorf("opening a folder in use: %v", err)
	}
	if _, err := Inspect(dir, quiet()); !errors.Is(err, ErrInUse) {
		t.Errorf("inspecting a folder in use: %v", err)
	}
	c.kill(n)

	report, err := Inspect(dir, quiet())
	if err != nil {
		t.Fatal(err)
	}
	if report.Kills != 21 || report.LastIndex == 0 || len(report.Snapshots) != 1 || len(report.Members) != 1 || report.Hash == before.Hash {
		t.Errorf("report %+v", report)
	}
	c.start(n)
	c.leader()
	after := n.ledger.Facts()
	if get(after, "after") != "the snapshot" || get(after, "t19") != "v" || after.Hash != report.Hash {
		t.Errorf("after a restart: %d kill switches, hash %x, inspected %x", after.Kills.Len(), after.Hash[:4], report.Hash[:4])
	}
	c.closeAll()
}

func TestFullDisk(t *testing.T) {
	disk := &fullDisk{FS: walfs.New()}
	c, n := onDisk(t, t.TempDir(), func(config *Config) { config.files = disk })
	c.propose(n, set("x", "before"))
	disk.full.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := n.ledger.Propose(ctx, set("x", "while full"))
	if !errors.Is(err, ErrUnknownOutcome) || !strings.Contains(err.Error(), "no space left") || !strings.Contains(err.Error(), "free space in") {
		t.Errorf("on a full disk: %v", err)
	}
	if health := n.ledger.Health(); health == nil || !errors.Is(health, syscall.ENOSPC) {
		t.Errorf("health on a full disk: %v", health)
	}
	if n.ledger.Failed() != nil {
		t.Error("a full disk stopped the replica for good")
	}
	if got := get(n.ledger.Facts(), "x"); got != "before" {
		t.Errorf("x reads as %q", got)
	}
	disk.full.Store(false)
	c.leader()
	c.propose(n, set("y", "after"))
	if health := n.ledger.Health(); health != nil {
		t.Errorf("health once there is space: %v", health)
	}
	c.kill(n)
	c.start(n)
	c.leader()
	if f := n.ledger.Facts(); get(f, "x") != "before" || get(f, "y") != "after" {
		t.Errorf("after a restart x is %q and y %q", get(f, "x"), get(f, "y"))
	}
}

func TestHealthIsReadWhileTheDiskFails(t *testing.T) {
	disk := &fullDisk{FS: walfs.New()}
	s := openTestStore(t, t.TempDir(), disk)
	if err := s.StoreLogs(entries(1, 1, 10)); err != nil {
		t.Fatal(err)
	}
	end := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			select {
			case <-end:
				return
			default:
				if err := s.err(); err != nil && !errors.Is(err, syscall.ENOSPC) {
					t.Errorf("health: %v", err)
				}
			}
		}
	})
	for range 3 {
		disk.full.Store(true)
		if err := s.StoreLogs(entries(2, 2, 10)); err == nil {
			t.Error("a full disk took an entry")
		}
		if s.err() == nil {
			t.Error("a full disk is called healthy")
		}
		disk.full.Store(false)
		until(t, "writes once there is space", func() bool { return s.StoreLogs(entries(2, 2, 10)) == nil })
		if err := s.err(); err != nil {
			t.Errorf("with space again: %v", err)
		}
		if err := s.DeleteRange(2, 2); err != nil {
			t.Fatal(err)
		}
	}
	close(end)
	reader.Wait()
}

func TestFullDiskOfALeader(t *testing.T) {
	disks := map[raft.ServerID]*fullDisk{}
	c := newTestCluster(t, func(config *Config) {
		disks[config.ServerID] = &fullDisk{FS: walfs.New()}
		config.files, config.Servers = disks[config.ServerID], nil
	})
	var servers []raft.Server
	for i := 1; i <= 3; i++ {
		c.addWith(testID(i), testAddr(i), Config{Dir: t.TempDir()})
		servers = append(servers, raft.Server{ID: testID(i), Address: testAddr(i)})
	}
	if err := c.nodes[testID(1)].ledger.Bootstrap(servers); err != nil {
		t.Fatal(err)
	}
	c.propose(c.leader(), set("x", "before"))
	c.settled()
	full := c.leader()
	disks[full.id].full.Store(true)
	c.propose(full, set("x", "by another")) // it steps down, and forwards
	if next := c.leader(); next == full {
		t.Error("a node that cannot write leads")
	}
	for i := range 5 {
		c.propose(c.leader(), set("x", fmt.Sprint(i)))
	}
	disks[full.id].full.Store(false)
	c.settled() // it catches up
	if got := get(full.ledger.Facts(), "x"); got != "4" {
		t.Errorf("x is %q, want 4", got)
	}
}

func TestUnreadableEntryStopsTheReaderOnly(t *testing.T) {
	dir := t.TempDir()
	fatal := make(chan error, 1)
	s, err := openStore(dir, nil, quiet(), func(err error) { fatal <- err })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.close() })
	if err := s.StoreLogs(entries(1, 3, 4096)); err != nil {
		t.Fatal(err)
	}
	s.armed.Store(true)
	path := newestSegment(t, dir)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	flip(t, path, int64(bytes.Index(data, bytes.Repeat([]byte{2}, 100))), []byte{9})
	ended := make(chan bool)
	go func() {
		defer close(ended)
		var entry raft.Log
		t.Errorf("read on after damage: %v", s.GetLog(2, &entry))
	}()
	<-ended
	wantDamage(t, <-fatal, dir)
	var entry raft.Log
	if err := s.GetLog(3, &entry); err != nil {
		t.Errorf("an entry that is whole: %v", err)
	}
}

func TestLogThatCannotBeOpenedAnewIsAwaited(t *testing.T) {
	disk := &fullDisk{FS: walfs.New()}
	dir := t.TempDir()
	s := openTestStore(t, dir, disk)
	if err := s.StoreLogs(entries(1, 3, 64)); err != nil {
		t.Fatal(err)
	}
	s.armed.Store(true)
	disk.full.Store(true)
	if err := s.StoreLogs(entries(4, 4, 64)); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("on a full disk: %v", err)
	}
	disk.full.Store(false)
	path := newestSegment(t, dir)
	hidden := path + ".hidden"
	if err := os.Rename(path, hidden); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	until(t, "the log is closed and cannot be opened", func() bool {
		err := s.StoreLogs(entries(4, 4, 64))
		return err != nil && !errors.Is(err, syscall.ENOSPC)
	})
	read := make(chan error, 1)
	go func() {
		var entry raft.Log
		read <- s.GetLog(3, &entry)
	}()
	if err := errors.Join(os.Remove(path), os.Rename(hidden, path)); err != nil {
		t.Fatal(err)
	}
	if err := <-read; err != nil {
		t.Errorf("reading once it can be opened: %v", err)
	}
	until(t, "writing goes on", func() bool { return s.StoreLogs(entries(4, 4, 64)) == nil })
}

func TestTermThatCannotBeWrittenIsAwaited(t *testing.T) {
	s := openTestStore(t, t.TempDir(), nil)
	if err := s.SetUint64([]byte("CurrentTerm"), 7); err != nil {
		t.Fatal(err)
	}
	s.armed.Store(true)
	if err := s.log.WAL.Close(); err != nil { // from here on every write fails
		t.Fatal(err)
	}
	ended := make(chan bool)
	go func() {
		defer close(ended)
		t.Errorf("a term was not written, and raft told so: %v", s.SetUint64([]byte("CurrentTerm"), 8))
	}()
	for s.err() == nil {
		select {
		case <-ended:
			t.Fatal("it gave up")
		case <-time.After(time.Millisecond):
		}
	}
	s.abort()
	<-ended
	if err := s.Set([]byte("LastVoteCand"), []byte("x")); err == nil {
		t.Error("a vote that was not written passed for written")
	}
}

// openTestStore opens a store in dir and closes it with the test.
func openTestStore(t *testing.T, dir string, files types.VFS) *store {
	t.Helper()
	s, err := openStore(dir, files, quiet(), func(err error) { t.Errorf("fatal: %v", err) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.close() })
	return s
}

func entries(from, to uint64, size int) (logs []*raft.Log) {
	for i := from; i <= to; i++ {
		logs = append(logs, &raft.Log{Index: i, Term: 1, Type: raft.LogCommand, Data: bytes.Repeat([]byte{byte(i)}, size), Extensions: []byte("ext")})
	}
	return logs
}

func TestFullDiskAtASegmentsEnd(t *testing.T) {
	disk := &fullDisk{FS: walfs.New()}
	s := openTestStore(t, t.TempDir(), disk)
	const size = 1 << 20
	next := uint64(1)
	for ; next <= 10; next++ {
		if err := s.StoreLogs(entries(next, next, size)); err != nil {
			t.Fatal(err)
		}
	}
	// Appending goes on within the segment; only its end needs space.
	disk.full.Store(true)
	if err := s.StoreLogs(entries(next, next+10, size)); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("over the segment's end: %v", err)
	}
	for range 3 { // the retries say the same, and lose nothing
		if err := s.StoreLogs(entries(next, next, 10)); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("a retry: %v", err)
		}
	}
	var entry raft.Log
	if err := s.GetLog(next-1, &entry); err != nil || len(entry.Data) != size {
		t.Errorf("reading on a full disk: %v", err)
	}
	disk.full.Store(false)
	until(t, "writes once there is space", func() bool { return s.StoreLogs(entries(next, next, 10)) == nil })
	for i := uint64(1); i <= next; i++ {
		if err := s.GetLog(i, &entry); err != nil || entry.Index != i || string(entry.Extensions) != "ext" || entry.Data[0] != byte(i) {
			t.Fatalf("entry %d: %v", i, err)
		}
	}
	if last, _ := s.LastIndex(); last != next {
		t.Errorf("last index %d, want %d", last, next)
	}
}

func newestSegment(t *testing.T, dir string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.wal"))
	if err != nil || len(names) == 0 {
		t.Fatalf("no segment in %s: %v", dir, err)
	}
	slices.Sort(names)
	return names[len(names)-1]
}

func flip(t *testing.T, path string, at int64, with []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(with, at); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// openNode opens a node's ledger in dir and gives the error, which the test wants.
func openNode(t *testing.T, dir string) error {
	t.Helper()
	_, transport := raft.NewInmemTransport("addr1")
	l, err := Open(Config{Dir: dir, ServerID: testID(1), Transport: transport, Logger: quiet()})
	if err == nil {
		_ = l.Close(t.Context())
	}
	return err
}

func wantDamage(t *testing.T, err error, path string) {
	t.Helper()
	var damaged *CorruptError
	if !errors.As(err, &damaged) || !strings.Contains(damaged.Path, path) || !strings.Contains(err.Error(), "remove its data folder") {
		t.Errorf("got %v, want a CorruptError that names %s and the remedy", err, path)
	}
}

// writtenNode makes a node's folder with 30 entries and stops the node.
func writtenNode(t *testing.T, snapshot bool) string {
	t.Helper()
	dir := t.TempDir()
	c, n := onDisk(t, dir, nil)
	for i := range 30 {
		c.propose(n, set(fmt.Sprintf("t%d", i), "a value to be found again"))
	}
	if snapshot {
		if err := n.ledger.raft.Snapshot().Error(); err != nil {
			t.Fatal(err)
		}
	}
	c.kill(n)
	return dir
}

func TestCorruptSegment(t *testing.T) {
	t.Run("a bit of an entry", func(t *testing.T) {
		dir := writtenNode(t, false)
		path := newestSegment(t, filepath.Join(dir, "raft"))
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		at := bytes.Index(data, []byte("to be found again"))
		flip(t, path, int64(at), []byte("T"))
		wantDamage(t, openNode(t, dir), "raft")
		if _, err := Inspect(dir, quiet()); err == nil {
			t.Error("inspecting a damaged log found nothing wrong")
		}
	})
	t.Run("a frame's header", func(t *testing.T) {
		dir := writtenNode(t, false)
		path := newestSegment(t, filepath.Join(dir, "raft"))
		flip(t, path, segmentHeader, []byte{0xff})
		wantDamage(t, openNode(t, dir), filepath.Base(path))
	})
	t.Run("zeros in the middle", func(t *testing.T) {
		dir := writtenNode(t, false)
		path := newestSegment(t, filepath.Join(dir, "raft"))
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		at := bytes.Index(data, []byte("t9")) &^ 7
		flip(t, path, int64(at)-256, make([]byte, 512))
		if err := openNode(t, dir); err == nil {
			t.Error("opened over a hole")
		} else {
			wantDamage(t, err, "raft")
		}
	})
	t.Run("a torn last batch", func(t *testing.T) {
		dir := t.TempDir()
		s := openTestStore(t, dir, nil)
		for i := uint64(1); i <= 5; i++ {
			if err := s.StoreLogs(entries(i, i, 64)); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.close(); err != nil {
			t.Fatal(err)
		}
		path := newestSegment(t, dir)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		end := len(bytes.TrimRight(data, "\x00"))
		flip(t, path, int64(end-20), make([]byte, 20)) // the last commit frame and some before
		again := openTestStore(t, dir, nil)
		if last, _ := again.LastIndex(); last != 4 {
			t.Errorf("after a torn write the log ends at %d, want 4", last)
		}
	})
	t.Run("the list of segments", func(t *testing.T) {
		dir := writtenNode(t, true)
		if err := os.WriteFile(filepath.Join(dir, "raft", "wal-meta.db"), bytes.Repeat([]byte("x"), 8192), 0o600); err != nil {
			t.Fatal(err)
		}
		wantDamage(t, openNode(t, dir), "raft")
	})
}

func TestCorruptSnapshot(t *testing.T) {
	for _, name := range []string{"state.bin", "meta.json"} {
		t.Run(name, func(t *testing.T) {
			dir := writtenNode(t, true)
			// Without the log the snapshot is all there is.
			s := openTestStore(t, filepath.Join(dir, "raft"), nil)
			last, _ := s.LastIndex()
			if err := s.DeleteRange(1, last); err != nil {
				t.Fatal(err)
			}
			if err := s.close(); err != nil {
				t.Fatal(err)
			}
			files, err := filepath.Glob(filepath.Join(dir, "raft", "snapshots", "*", name))
			if err != nil || len(files) != 1 {
				t.Fatalf("%v, %v", files, err)
			}
			flip(t, files[0], 5, []byte{0xff, 0xfe})
			wantDamage(t, openNode(t, dir), "snapshots")
		})
	}
	t.Run("covered by the log", func(t *testing.T) {
		dir := writtenNode(t, true)
		files, err := filepath.Glob(filepath.Join(dir, "raft", "snapshots", "*", "meta.json"))
		if err != nil || len(files) != 1 {
			t.Fatalf("%v, %v", files, err)
		}
		flip(t, files[0], 0, []byte{0xff, 0xfe})
		if err := openNode(t, dir); err != nil {
			t.Errorf("the whole log is there: %v", err)
		}
	})
}

func FuzzLostBatch(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, 100))
	frame := make([]byte, segmentHeader+24)
	frame[segmentHeader] = frameEntry
	binary.LittleEndian.PutUint32(frame[segmentHeader+4:], 1<<31)
	f.Add(frame)
	f.Fuzz(func(t *testing.T, data []byte) {
		at, lost := lostBatch(data)
		if at < segmentHeader || lost && at >= len(data) {
			t.Errorf("stopped at %d of %d, lost %v", at, len(data), lost)
		}
	})
}

func TestBackupAndRestore(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		c.found()
		leader := c.leader()
		c.propose(leader, command(1000, &ledgerpb.SetPolicy{Text: []byte("version: 1\n")}))
		for i := range 30 {
			c.propose(leader, set(fmt.Sprintf("t%d", i), "v"))
		}
		held := Reserve{Bucket: bucketOf("l"), Limit: hourly(100), Owner: 7, Epoch: 1, N: 5, Want: 60}
		if got, err := c.follower().ledger.ReserveBlock(t.Context(), held); err != nil || got.Granted != 60 {
			t.Errorf("a block gives %+v, %v", got, err)
		}
		want := leader.ledger.Facts()
		var backup bytes.Buffer
		if err := leader.ledger.Backup(t.Context(), &backup, false); err != nil {
			t.Fatal(err)
		}
		if err := c.follower().ledger.Backup(t.Context(), new(bytes.Buffer), false); !errors.Is(err, ErrNotLeader) {
			t.Errorf("backup on a follower: %v", err)
		}
		if err := c.follower().ledger.Backup(t.Context(), new(bytes.Buffer), true); err != nil {
			t.Errorf("stale backup on a follower: %v", err)
		}
		path := filepath.Join(t.TempDir(), "backup")
		if err := os.WriteFile(path, backup.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		report, err := InspectFile(path)
		if err != nil || report.Hash != want.Hash || report.Kills != 30 || report.Epoch != 1 {
			t.Errorf("inspected %+v, %v", report, err)
		}
		c.closeAll()

		other := newTestCluster(t, nil)
		other.bootstrap(3)
		fresh := other.leader()
		other.propose(fresh, set("gone", "after the restore"))
		other.propose(fresh, command(1000, &ledgerpb.SetPolicy{Text: []byte("version: 1\n")}))
		other.propose(fresh, command(1001, &ledgerpb.SetPolicy{Text: []byte("version: 1\n")}))
		before := fresh.ledger.Facts()
		torn := backup.Bytes()[:backup.Len()-10]
		if _, err := fresh.ledger.Restore(t.Context(), bytes.NewReader(torn), false); err == nil {
			t.Error("a torn backup was restored")
		}
		if get(fresh.ledger.Facts(), "gone") == "" {
			t.Error("a torn backup changed the ledger")
		}
		facts, err := fresh.ledger.Restore(t.Context(), bytes.NewReader(backup.Bytes()), true)
		if err != nil {
			t.Fatal(err)
		}
		if facts.Hash != want.Hash || get(facts, "gone") != "" || facts.View == nil || facts.View.Epoch != 1+epochSkip {
			t.Errorf("restored %+v, want hash %x and epoch %d", facts, want.Hash[:4], 1+epochSkip)
		}
		if facts.Policy.Number() <= before.Policy.Number() || facts.Revision() >= before.Revision() {
			t.Errorf("restored is the policy %d of number %d, before it was %d of %d", facts.Revision(), facts.Policy.Number(), before.Revision(), before.Policy.Number())
		}
		other.settled()
		held.Epoch, held.N, held.Holding, held.Want = facts.View.Epoch, 6, 60, 100
		if got, err := other.follower().ledger.ReserveBlock(t.Context(), held); err != nil || got.Granted != 40 || facts.Durables != 1 {
			t.Errorf("its block after the restore gives %+v, %v", got, err)
		}
		other.propose(other.follower(), set("x", "after"))
		other.settled()
		other.kill(other.leader())
		other.propose(other.leader(), set("x", "after a fail-over"))
	})
}

func TestASlowBackupHoldsUpNoOther(t *testing.T) {
	c := newTestCluster(t, nil)
	c.bootstrap(1)
	leader := c.leader().ledger
	var backup bytes.Buffer
	if err := leader.Backup(t.Context(), &backup, false); err != nil {
		t.Fatal(err)
	}
	slow, upload := io.Pipe()
	restore := func(r io.Reader) <-chan error {
		ended := make(chan error, 1)
		go func() {
			_, err := leader.Restore(t.Context(), r, true)
			ended <- err
		}()
		return ended
	}
	first := restore(slow)
	if _, err := upload.Write(backup.Bytes()[:1]); err != nil { // it is being read
		t.Fatal(err)
	}
	select {
	case err := <-restore(bytes.NewReader(backup.Bytes())):
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("a restore waits for another's upload")
	}
	if err := upload.CloseWithError(errors.New("gone")); err != nil {
		t.Fatal(err)
	}
	if err := <-first; err == nil {
		t.Error("half a backup was restored")
	}
}

func TestRestoreKeepsTheClustersIDAndEpoch(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(1)
		c.found()
		n := c.leader()
		hash := sha256.Sum256([]byte("a key"))
		result := c.propose(n, &ledgerpb.Command{Version: 1, Actor: "test", Body: &ledgerpb.Command_CreateKeys{CreateKeys: &ledgerpb.CreateKeys{
			Keys: []*ledgerpb.Key{{Id: "k1", Hash: hash[:], Tenant: "acme"}},
		}}})
		if err := RefusalOf(result); err != nil {
			t.Fatal(err)
		}
		var backup bytes.Buffer
		if err := n.ledger.Backup(t.Context(), &backup, false); err != nil {
			t.Fatal(err)
		}
		before := n.ledger.Facts()
		if _, err := n.ledger.Restore(t.Context(), bytes.NewReader(backup.Bytes()), false); !errors.Is(err, ErrNotEmpty) {
			t.Errorf("restoring over keys: %v", err)
		}
		after, err := n.ledger.Restore(t.Context(), bytes.NewReader(backup.Bytes()), true)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(after.ClusterID, before.ClusterID) || after.View.Epoch != before.View.Epoch+epochSkip || after.Hash != before.Hash {
			t.Errorf("forced: %+v, before %+v", after, before)
		}
	})
}

// TestEveryNodeSeesARestore, and takes nothing else for one.
func TestEveryNodeSeesARestore(t *testing.T) {
	var mu sync.Mutex
	shown, back := map[raft.ServerID]*Facts{}, map[raft.ServerID]int{}
	inBubble(t, func(c *Config) {
		id := c.ServerID
		c.Changed = func(f *Facts) {
			mu.Lock()
			defer mu.Unlock()
			if f.PutBack(shown[id]) {
				back[id]++
			}
			shown[id] = f
		}
		c.TrailingLogs, c.SnapshotThreshold = 2, 4
	}, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(3)
		c.found()
		var backup bytes.Buffer
		must(t, c.leader().ledger.Backup(t.Context(), &backup, false))
		away := c.follower()
		c.kill(away)
		for i := range 20 {
			c.propose(c.leader(), set(fmt.Sprintf("t%d", i%9), "v"))
		}
		for _, n := range nodes {
			if n != away {
				must(t, n.ledger.raft.Snapshot().Error())
			}
		}
		c.start(away) // gets a snapshot
		c.settled()
		synctest.Wait() // a replica shows what it then tells
		mu.Lock()
		if n := len(back); n != 0 {
			t.Errorf("put back without a restore: %v", back)
		}
		mu.Unlock()
		_, err := c.leader().ledger.Restore(t.Context(), &backup, true)
		must(t, err)
		c.propose(c.leader(), set("x", "goes on"))
		c.settled()
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		for _, n := range nodes {
			if back[n.id] != 1 {
				t.Errorf("%s was put back %d times", n.id, back[n.id])
			}
		}
	})
}

func TestRecoverOneOfThree(t *testing.T) {
	dirs := []string{t.TempDir(), t.TempDir(), t.TempDir()}
	c := newTestCluster(t, func(config *Config) { config.Servers = nil })
	var servers []raft.Server
	for i := range dirs {
		c.addWith(testID(i+1), testAddr(i+1), Config{Dir: dirs[i]})
		servers = append(servers, raft.Server{ID: testID(i + 1), Address: testAddr(i + 1)})
	}
	if err := c.nodes[testID(1)].ledger.Bootstrap(servers); err != nil {
		t.Fatal(err)
	}
	c.found()
	for i := range 10 {
		c.propose(c.leader(), set(fmt.Sprintf("t%d", i), "v"))
	}
	c.settled()
	before := c.leader().ledger.Facts()
	c.closeAll()

	if _, err := Recover(t.TempDir(), servers[0], quiet()); !errors.Is(err, ErrNoLedger) {
		t.Errorf("recovering nothing: %v", err)
	}
	report, err := Recover(dirs[2], servers[2], quiet())
	if err != nil {
		t.Fatal(err)
	}
	if report.Hash != before.Hash || bytes.Equal(report.ClusterID, before.ClusterID) || report.Epoch != before.View.Epoch+epochSkip ||
		len(report.Members) != 1 || report.Members[0].ID != testID(3) {
		t.Errorf("report %+v", report)
	}
	n := c.nodes[testID(3)]
	c.start(n)
	c.leader()
	if f := n.ledger.Facts(); f.Hash != before.Hash || !bytes.Equal(f.ClusterID, report.ClusterID) || f.View.Epoch != report.Epoch {
		t.Errorf("started with %+v", f)
	}
	c.propose(n, set("x", "goes on"))
	c.kill(n)
	c.start(n)
	c.leader()
	if got := get(n.ledger.Facts(), "x"); got != "goes on" {
		t.Errorf("after a restart x is %q", got)
	}

	// With another voter beside it, the old majority comes back with its data.
	c.addWith(testID(4), testAddr(4), Config{Dir: t.TempDir()})
	if err := n.ledger.raft.AddVoter(testID(4), testAddr(4), 0, 0).Error(); err != nil {
		t.Fatal(err)
	}
	old := c.nodes[testID(1)]
	c.start(old)
	c.start(c.nodes[testID(2)])
	c.until("the old cluster has a leader", func() bool {
		return old.ledger.Barrier(t.Context()) == nil || c.nodes[testID(2)].ledger.Barrier(t.Context()) == nil
	})
	for i := range 10 {
		c.propose(old, set("x", fmt.Sprint("old ", i)))
		c.propose(n, set("x", fmt.Sprint("new ", i)))
	}
	if f := n.ledger.Facts(); get(f, "x") != "new 9" || !bytes.Equal(f.ClusterID, report.ClusterID) {
		t.Errorf("x is %q in cluster %x: the old majority was followed", get(f, "x"), f.ClusterID)
	}
	if refused := n.ledger.forgotten; !refused[testID(1)] || !refused[testID(2)] || len(refused) != 2 {
		t.Errorf("it gave up %v", refused)
	}
}
