package ledger

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"
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
	for _, n := range nodes {
		if err := n.ledger.Bootstrap(servers); err != nil {
			t.Fatal(err)
		}
	}
	c.propose(c.leader(), set("before", "v"))
	var backup bytes.Buffer
	if err := c.leader().ledger.Backup(t.Context(), &backup, false); err != nil {
		t.Fatal(err)
	}
	if _, err := c.leader().ledger.Restore(t.Context(), &backup, true); err != nil {
		t.Fatal(err)
	}
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
