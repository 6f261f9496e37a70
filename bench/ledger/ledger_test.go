// Package ledger_test measures the replicated ledger: the two log stores that raft could
// have, the whole way of a change through three nodes with real files and fsync, and how
// long a fail-over keeps writers waiting.
//
//	go test -run=NONE -bench=. ./bench/ledger
package ledger_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	wal "github.com/hashicorp/raft-wal"

	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
)

const entrySize = 256

var writers = []int{1, 16, 64, 256}

// logStore is what raft keeps its log in.
type logStore interface {
	raft.LogStore
	raft.StableStore
	Close() error
}

var stores = []struct {
	name string
	open func(dir string) (logStore, error)
}{
	{"raft-wal", func(dir string) (logStore, error) { return wal.Open(dir, wal.WithLogger(hclog.NewNullLogger())) }},
	{"raft-boltdb", func(dir string) (logStore, error) { return raftboltdb.NewBoltStore(filepath.Join(dir, "raft.db")) }},
}

// report gives the median, the 99th percentile and the rate of what took so long.
func report(b *testing.B, took []time.Duration, whole time.Duration) {
	b.Helper()
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
	b.ReportMetric(float64(len(took))/whole.Seconds(), "per-s")
}

// concurrently has n writers do b.N operations between them.
func concurrently(b *testing.B, n int, do func() error) {
	b.Helper()
	took := make([]time.Duration, b.N)
	var next atomic.Int64
	var all sync.WaitGroup
	b.ResetTimer()
	began := time.Now()
	for range n {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int64(b.N); i = next.Add(1) - 1 {
				start := time.Now()
				if err := do(); err != nil {
					b.Error(err)
					return
				}
				took[i] = time.Since(start)
			}
		})
	}
	all.Wait()
	report(b, took, time.Since(began))
}

// BenchmarkStore is one log store under group commit, as raft's leader does it: whatever
// waits goes into the next write.
func BenchmarkStore(b *testing.B) {
	for _, s := range stores {
		for _, n := range writers {
			b.Run(fmt.Sprintf("%s/writers=%d", s.name, n), func(b *testing.B) {
				store, err := s.open(b.TempDir())
				if err != nil {
					b.Fatal(err)
				}
				defer func() {
					if err := store.Close(); err != nil {
						b.Error(err)
					}
				}()
				queue := make(chan chan error, 512)
				var committer sync.WaitGroup
				committer.Go(func() { commit(store, queue) })
				concurrently(b, n, func() error {
					done := make(chan error, 1)
					queue <- done
					return <-done
				})
				close(queue)
				committer.Wait()
			})
		}
	}
}

func commit(store raft.LogStore, queue <-chan chan error) {
	data := bytes.Repeat([]byte{'x'}, entrySize)
	index := uint64(0)
	for first := range queue {
		waiting := []chan error{first}
		for len(queue) > 0 {
			waiting = append(waiting, <-queue)
		}
		batch := make([]*raft.Log, len(waiting))
		for i := range batch {
			index++
			batch[i] = &raft.Log{Index: index, Term: 1, Data: data}
		}
		err := store.StoreLogs(batch)
		for _, w := range waiting {
			w <- err
		}
	}
}

// cluster is three nodes over TCP on loopback, each with its files.
type cluster struct {
	nodes []*node
}

type node struct {
	id        raft.ServerID
	ledger    *ledger.Ledger
	transport *raft.NetworkTransport
	close     func() error
	dead      atomic.Bool
}

func newCluster(b *testing.B, store string) *cluster {
	b.Helper()
	c := new(cluster)
	var servers []raft.Server
	for i := range 3 {
		n := &node{id: raft.ServerID(fmt.Sprintf("n%d.a", i))}
		var err error
		n.transport, err = raft.NewTCPTransportWithLogger("127.0.0.1:0", nil, 3, time.Second, hclog.NewNullLogger())
		if err != nil {
			b.Fatal(err)
		}
		config := ledger.Config{
			ServerID: n.id, Address: n.transport.LocalAddr(), Transport: n.transport, Peer: c,
			Logger: slog.New(slog.DiscardHandler), Dir: b.TempDir(),
		}
		if store == "raft-boltdb" {
			withBolt(b, n, &config)
		}
		if n.ledger, err = ledger.Open(config); err != nil {
			b.Fatal(err)
		}
		c.nodes = append(c.nodes, n)
		servers = append(servers, raft.Server{ID: n.id, Address: config.Address})
	}
	b.Cleanup(func() {
		for _, n := range c.nodes {
			n.kill(b)
		}
	})
	if err := c.nodes[0].ledger.Bootstrap(servers); err != nil {
		b.Fatal(err)
	}
	c.leader(b)
	return c
}

// withBolt gives the ledger a raft-boltdb instead of the store of its own.
func withBolt(b *testing.B, n *node, config *ledger.Config) {
	b.Helper()
	store, err := raftboltdb.NewBoltStore(filepath.Join(config.Dir, "raft.db"))
	if err != nil {
		b.Fatal(err)
	}
	n.close = store.Close
	cache, err := raft.NewLogCache(1024, store)
	if err != nil {
		b.Fatal(err)
	}
	config.Logs, config.Stable = cache, store
	if config.Snapshots, err = raft.NewFileSnapshotStoreWithLogger(config.Dir, 2, hclog.NewNullLogger()); err != nil {
		b.Fatal(err)
	}
}

// kill ends a node as a crash does: it hands nothing over.
func (n *node) kill(b *testing.B) {
	b.Helper()
	if n.dead.Swap(true) {
		return
	}
	at, cancel := context.WithCancel(context.Background())
	cancel()
	err := errors.Join(n.transport.Close(), n.ledger.Close(at))
	if n.close != nil {
		err = errors.Join(err, n.close())
	}
	if err != nil {
		b.Error(err)
	}
}

// Propose stands for the RPC between nodes, without its network.
func (c *cluster) Propose(ctx context.Context, leader raft.ServerID, _ raft.ServerAddress, command []byte) ([]byte, bool, bool, error) {
	for _, n := range c.nodes {
		if n.id != leader || n.dead.Load() {
			continue
		}
		result, _, unknown, err := n.ledger.ProposeLocal(ctx, command)
		if errors.Is(err, ledger.ErrNotLeader) {
			return nil, true, false, nil
		}
		return result, false, unknown, err
	}
	return nil, true, false, nil
}

func (c *cluster) leader(b *testing.B) *node {
	b.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range 30_000 {
		for _, n := range c.nodes {
			if !n.dead.Load() && n.ledger.Barrier(b.Context()) == nil {
				return n
			}
		}
		<-tick.C
	}
	b.Fatal("no leader")
	return nil
}

// change is a command of about entrySize bytes.
func change() *ledgerpb.Command {
	return &ledgerpb.Command{Version: 1, Actor: "bench", Body: &ledgerpb.Command_SetKill{SetKill: &ledgerpb.SetKill{
		Kind: ledgerpb.KillKind_KILL_KIND_TENANT, Name: "acme", On: true, Reason: string(bytes.Repeat([]byte{'x'}, entrySize-64)),
	}}}
}

// BenchmarkCommit is a change through three nodes, proposed on the leader: two fsyncs of
// different nodes at least, here on one disk.
func BenchmarkCommit(b *testing.B) {
	for _, s := range stores {
		for _, n := range writers {
			b.Run(fmt.Sprintf("%s/writers=%d", s.name, n), func(b *testing.B) {
				leader := newCluster(b, s.name).leader(b)
				concurrently(b, n, func() error {
					_, err := leader.ledger.Propose(b.Context(), change())
					return err
				})
			})
		}
	}
}

// BenchmarkBarrier is what the fence asks some forty times a second.
func BenchmarkBarrier(b *testing.B) {
	leader := newCluster(b, "raft-wal").leader(b)
	concurrently(b, 1, func() error { return leader.ledger.Barrier(b.Context()) })
}

// BenchmarkForward is a change proposed on a follower, until that follower shows it.
func BenchmarkForward(b *testing.B) {
	c := newCluster(b, "raft-wal")
	leader := c.leader(b)
	i := slices.IndexFunc(c.nodes, func(n *node) bool { return n != leader })
	concurrently(b, 1, func() error {
		_, err := c.nodes[i].ledger.Propose(b.Context(), change())
		return err
	})
}

// BenchmarkFailover is the time from the leader's death to the next change accepted on
// another node.
func BenchmarkFailover(b *testing.B) {
	var took []time.Duration
	began := time.Now()
	for range b.N {
		b.StopTimer()
		c := newCluster(b, "raft-wal")
		leader := c.leader(b)
		i := slices.IndexFunc(c.nodes, func(n *node) bool { return n != leader })
		survivor := c.nodes[i]
		if _, err := survivor.ledger.Propose(b.Context(), change()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		died := time.Now()
		leader.kill(b)
		if _, err := survivor.ledger.Propose(b.Context(), change()); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(died))
		b.StopTimer()
		for _, n := range c.nodes {
			n.kill(b)
		}
		b.StartTimer()
	}
	report(b, took, time.Since(began))
}
