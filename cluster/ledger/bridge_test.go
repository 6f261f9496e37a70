package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"go.uber.org/goleak"
)

// A leader may end right after a restore, with entries that nobody else has.
func TestEntriesOfAnEarlierLeaderRightAfterASnapshotGiveWay(t *testing.T) {
	defer goleak.VerifyNone(t)
	c := newTestCluster(t, func(config *Config) {
		config.Heartbeat, config.CommitTimeout = 100*time.Millisecond, 5*time.Millisecond
		config.Servers = nil
	})
	var nodes []*testNode
	var servers []raft.Server
	for i := 1; i <= 3; i++ {
		nodes = append(nodes, c.addWith(testID(i), testAddr(i), Config{Dir: t.TempDir()}))
		servers = append(servers, raft.Server{ID: testID(i), Address: testAddr(i)})
	}
	if err := nodes[0].ledger.Bootstrap(servers); err != nil { // the others hear of it
		t.Fatal(err)
	}
	c.propose(c.leader(), set("before", "v"))
	var backup bytes.Buffer
	led := func(err error) bool { // a busy machine's leader may lose its lead
		if err != nil && !errors.Is(err, ErrNotLeader) {
			t.Fatal(err)
		}
		return err == nil
	}
	c.until("a backup", func() bool {
		backup.Reset()
		return led(c.leader().ledger.Backup(t.Context(), &backup, false))
	})
	c.until("a restore", func() bool {
		_, err := c.leader().ledger.Restore(t.Context(), bytes.NewReader(backup.Bytes()), true)
		return led(err)
	})
	for i := range 3 {
		c.propose(c.leader(), set(fmt.Sprintf("lost%d", i), "v"))
	}
	c.settled()
	for _, n := range nodes {
		c.kill(n)
	}
	for _, n := range nodes[:2] { // they have the snapshot, and nothing that follows it
		s := openTestStore(t, filepath.Join(n.config.Dir, "raft"), nil)
		first, err := s.FirstIndex()
		if err != nil {
			t.Fatal(err)
		}
		last, _ := s.LastIndex()
		if err := s.DeleteRange(first, last); err != nil {
			t.Fatal(err)
		}
		if err := s.close(); err != nil {
			t.Fatal(err)
		}
	}
	c.start(nodes[0])
	c.start(nodes[1])
	c.leader()
	c.start(nodes[2])
	c.propose(c.leader(), set("after", "v"))
	c.settled()
	if f := nodes[2].ledger.Facts(); get(f, "after") != "v" || get(f, "lost0") != "" {
		t.Errorf("the node that came back has after=%q, lost0=%q", get(f, "after"), get(f, "lost0"))
	}
	c.closeAll()
}

// slowToEmpty is a log that a reader of its last entry meets once as it is emptied: after that entry was read.
type slowToEmpty struct {
	raft.LogStore
	armed             atomic.Bool
	last              atomic.Uint64
	begun, read, done chan struct{}
	once              sync.Once
}

func (s *slowToEmpty) IsMonotonic() bool { return true } // as that on a disk, which a restore empties

func (s *slowToEmpty) DeleteRange(first, last uint64) error {
	if s.armed.Swap(false) {
		s.last.Store(last)
		close(s.begun)
		<-s.read
		defer close(s.done)
	}
	return s.LogStore.DeleteRange(first, last)
}

func (s *slowToEmpty) GetLog(index uint64, entry *raft.Log) error {
	err := s.LogStore.GetLog(index, entry)
	select {
	case <-s.begun:
		if index == s.last.Load() {
			s.once.Do(func() { close(s.read) })
			<-s.done
		}
	default:
	}
	return err
}

// TestARestoreReachesAFollowerThatIsServedMeanwhile: while a leader's restore empties its log, raft may have read the
// entry before the snapshot's already, and so goes on to replicate what stands for the snapshot's last one.
func TestARestoreReachesAFollowerThatIsServedMeanwhile(t *testing.T) {
	defer goleak.VerifyNone(t)
	c := newTestCluster(t, func(config *Config) { config.CommitTimeout, config.Servers = 5*time.Millisecond, nil })
	logs := map[raft.ServerID]*slowToEmpty{}
	var servers []raft.Server
	for i := 1; i <= 3; i++ {
		store := raft.NewInmemStore()
		slow := &slowToEmpty{LogStore: store, begun: make(chan struct{}), read: make(chan struct{}), done: make(chan struct{})}
		logs[testID(i)] = slow
		c.addWith(testID(i), testAddr(i), Config{Logs: slow, Stable: store, Snapshots: raft.NewInmemSnapshotStore()})
		servers = append(servers, raft.Server{ID: testID(i), Address: testAddr(i)})
	}
	if err := c.nodes[testID(1)].ledger.Bootstrap(servers); err != nil { // the others hear of it
		t.Fatal(err)
	}
	leader := c.leader()
	c.propose(leader, set("a", "before"))
	var backup bytes.Buffer
	if err := leader.ledger.Backup(t.Context(), &backup, false); err != nil {
		t.Fatal(err)
	}
	c.propose(leader, set("a", "after"))
	c.settled()
	logs[leader.id].armed.Store(true)
	if _, err := leader.ledger.Restore(t.Context(), &backup, true); err != nil {
		t.Fatal(err)
	}
	c.settled()
	for id, n := range c.nodes {
		if got := get(n.ledger.Facts(), "a"); got != "before" {
			t.Errorf("%s has %q after the restore", id, got)
		}
	}
	c.closeAll()
}

// A crash may come after a snapshot was taken over and before the log was emptied.
func TestALogThatEndsBeforeItsSnapshotIsEmptied(t *testing.T) {
	defer goleak.VerifyNone(t)
	dir := writtenNode(t, true)
	snapshots, err := openSnapshots(filepath.Join(dir, "raft"), quiet())
	if err != nil {
		t.Fatal(err)
	}
	list, err := snapshots.List()
	if err != nil || len(list) != 1 {
		t.Fatalf("snapshots %v, %v", list, err)
	}
	meta, content, err := snapshots.Open(list[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	_, transport := raft.NewInmemTransport("other")
	later, err := snapshots.Create(meta.Version, meta.Index+100, meta.Term, meta.Configuration, meta.ConfigurationIndex, transport)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(later, content); err != nil {
		t.Fatal(err)
	}
	if err := later.Close(); err != nil {
		t.Fatal(err)
	}
	if err := content.Close(); err != nil {
		t.Fatal(err)
	}
	c, n := onDisk(t, dir, nil)
	c.propose(n, set("after", "v"))
	c.kill(n)
	c.start(n)
	c.leader()
	if got := get(n.ledger.Facts(), "after"); got != "v" {
		t.Errorf("after a restart the change made since is %q", got)
	}
	c.closeAll()
}
