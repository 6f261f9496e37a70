package ledger

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	"headgate/cluster/ledger/ledgerpb"
)

// inBubble runs a test of a cluster in virtual time, and fails it where a goroutine stays.
func inBubble(t *testing.T, tune func(*Config), test func(*testing.T, *testCluster)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, newTestCluster(t, tune)) })
}

func TestProposeFromAnyNode(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(3)
		for i, n := range nodes {
			name := fmt.Sprintf("t%d", i)
			result := c.propose(n, set(name, "v"))
			if result.GetCode() != "" || result.GetIndex() == 0 {
				t.Errorf("result %v", result)
			}
			if got := get(n.ledger.Facts(), name); got != "v" {
				t.Errorf("after its own proposal %s shows %q", n.id, got)
			}
		}
		c.settled()
	})
}

func TestIDIsAppliedOnce(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(3)
		command := set("x", "first")
		command.Id = bytes.Repeat([]byte{1}, 16)
		first := c.propose(nodes[0], command)
		c.propose(nodes[1], set("x", "second"))
		again := c.propose(nodes[2], command)
		if again.GetIndex() != first.GetIndex() {
			t.Errorf("the second time index %d, the first %d", again.GetIndex(), first.GetIndex())
		}
		if got := get(c.leader().ledger.Facts(), "x"); got != "second" {
			t.Errorf("x is %q: the retry was applied again", got)
		}
		if len(command.GetId()) != 16 || command.GetUnixNano() != 0 {
			t.Error("Propose changed the caller's command")
		}
	})
}

func TestRetryAcrossLostLeadership(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		old := c.leader()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		c.isolate(old, true) // it still thinks that it leads: what it takes now is unknown
		type answer struct {
			result *ledgerpb.Result
			err    error
		}
		answers := make(chan answer, 1)
		go func() {
			r, err := old.ledger.Propose(ctx, set("x", "v"))
			answers <- answer{r, err}
		}()
		var others []*testNode
		c.until("another leader", func() bool {
			others = c.others(old)
			return slices.ContainsFunc(others, func(n *testNode) bool { return n.ledger.Barrier(ctx) == nil })
		})
		c.isolate(old, false)
		a := <-answers
		if a.err != nil {
			t.Fatalf("the retry ended in %v", a.err)
		}
		c.settled()
		applied := 0
		for _, e := range c.leader().ledger.Audit(100, AuditFilter{Action: "kill."}) {
			if strings.Contains(e.Object, "x") {
				applied++
			}
		}
		if applied != 1 {
			t.Errorf("applied %d times", applied)
		}
	})
}

func TestNoQuorum(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(3)
		leader := c.leader()
		for _, n := range c.others(leader) {
			c.kill(n)
		}
		_, err := leader.ledger.Propose(t.Context(), set("x", "v"))
		if !errors.Is(err, ErrUnknownOutcome) && !errors.Is(err, ErrNoLeader) {
			t.Errorf("without a majority: %v", err)
		}
		_, err = leader.ledger.Propose(t.Context(), set("x", "v"))
		if !errors.Is(err, ErrNoLeader) || !strings.Contains(err.Error(), "majority") {
			t.Errorf("once it stepped down: %v, want ErrNoLeader and its remedy", err)
		}
		if err := leader.ledger.Barrier(t.Context()); !errors.Is(err, ErrNotLeader) {
			t.Errorf("barrier without a majority: %v", err)
		}
		if leader.ledger.Facts() == nil || len(nodes) != 3 {
			t.Error("reads ended")
		}
	})
}

func TestIsolatedLeaderPassesNoBarrier(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		leader := c.leader()
		c.isolate(leader, true)
		if err := leader.ledger.Barrier(t.Context()); err == nil {
			t.Error("an isolated leader passed a barrier")
		}
	})
}

func TestTooMany(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		n := c.bootstrap(1)[0]
		for range maxProposals {
			n.ledger.proposals <- struct{}{}
		}
		if _, err := n.ledger.Propose(t.Context(), set("x", "v")); !errors.Is(err, ErrBusy) {
			t.Errorf("over the bound: %v", err)
		}
		for range maxProposals {
			<-n.ledger.proposals
		}
		large := set("x", strings.Repeat("v", MaxCommand))
		if _, err := n.ledger.Propose(t.Context(), large); !errors.Is(err, ErrTooLarge) {
			t.Errorf("a command too large: %v", err)
		}
	})
}

func TestTransfer(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		old := c.leader()
		if err := old.ledger.TransferLeadership(t.Context()); err != nil {
			t.Fatal(err)
		}
		next := c.leader()
		if next == old {
			t.Error("the lead was not handed over")
		}
		c.until("the new leader is known", func() bool { id, _ := old.ledger.Leader(); return id == next.id })
	})
}

func TestChangedIsToldOnEveryNode(t *testing.T) {
	told := make(chan uint64, 1000)
	inBubble(t, func(c *Config) {
		c.Changed = func(f *Facts) { told <- f.Changed }
	}, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(3)
		index := c.propose(nodes[0], set("x", "v")).GetIndex()
		c.settled()
		synctest.Wait() // a replica shows what it then tells
		seen := 0
		for len(told) > 0 {
			if <-told == index {
				seen++
			}
		}
		if seen != 3 {
			t.Errorf("%d of 3 nodes were told", seen)
		}
	})
}

func TestEveryViewOfABatchIsTold(t *testing.T) {
	var told []uint64
	f := newFSM(func(facts *Facts) { told = append(told, facts.View.Epoch) }, func(err error) { t.Error(err) })
	var batch []*raft.Log
	add := func(c *ledgerpb.Command) {
		c.Version = 1
		batch = append(batch, &raft.Log{Index: uint64(len(batch) + 1), Type: raft.LogCommand, Data: mustMarshal(t, c)})
	}
	view := func(epoch uint64, names ...string) {
		v := View{Epoch: epoch, Partitions: 7, RingVersion: 1}
		for _, name := range names {
			v.Members = append(v.Members, Member{Name: name, Incarnation: 1})
		}
		add(&ledgerpb.Command{Body: &ledgerpb.Command_SetView{SetView: &ledgerpb.SetView{View: v.Message()}}})
	}
	view(1, "a")
	view(2, "a", "b")
	add(set("x", "1"))
	view(3, "a")
	add(set("x", "2"))
	add(set("x", "3"))
	for _, o := range f.ApplyBatch(batch) {
		if o := o.(*outcome); o.err != nil || o.result.GetCode() != "" {
			t.Fatalf("%+v", o)
		}
	}
	// A view that is skipped costs its members a wait; of all else the last is enough.
	if want := []uint64{1, 2, 3, 3}; !slices.Equal(told, want) {
		t.Errorf("told of epochs %v, want %v", told, want)
	}
}

func TestJoinAsNonvoterAndPromotion(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(1)
		c.add(testID(2), testAddr(2))
		c.until("n2 is a member", func() bool { return len(c.leader().ledger.Members()) == 2 })
		time.Sleep(time.Minute) // virtual: nothing to wait for, that is the point
		if v := c.voters(); !slices.Equal(v, []raft.ServerID{"n1.a"}) {
			t.Errorf("voters %v of two nodes, want the first", v)
		}
		began := time.Now()
		c.add(testID(3), testAddr(3))
		c.until("three voters", func() bool { return len(c.voters()) == 3 })
		if took := time.Since(began); took < 2*time.Second || took > 6*time.Second {
			t.Errorf("promoted after %v, want 2 s and a few rounds", took)
		}
		c.add(testID(4), testAddr(4))
		time.Sleep(time.Minute)
		if v := c.voters(); len(v) != 3 {
			t.Errorf("voters %v of four nodes, want three", v)
		}
		c.add(testID(5), testAddr(5))
		c.until("five voters", func() bool { return len(c.voters()) == 5 })
		c.add(testID(6), testAddr(6))
		c.until("six members", func() bool { return len(c.leader().ledger.Members()) == 6 })
		c.propose(c.follower(), set("x", "v"))
		c.settled()
		time.Sleep(time.Minute)
		if v := c.voters(); len(v) != 5 {
			t.Errorf("voters %v of six nodes, want five", v)
		}
	})
}

func TestFiveToThreeByLeaving(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(5)
		leader := c.leader()
		left := 0
		for _, n := range nodes {
			if n == leader || left == 2 {
				continue
			}
			left++
			c.setStatus(n.id, StatusLeft)
			c.kill(n)
			c.until("it is removed", func() bool { return len(c.voters()) == 5-left })
		}
		c.propose(c.leader(), set("x", "v"))
		c.kill(c.leader())
		c.propose(c.leader(), set("x", "w")) // three voters survive one more
	})
}

func TestSpareVoterIsDemoted(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(5)
		leader := c.leader()
		gone := nodes[slices.IndexFunc(nodes, func(n *testNode) bool { return n != leader })]
		c.setStatus(gone.id, StatusLeft)
		c.kill(gone)
		c.until("three voters of four nodes", func() bool { return len(c.voters()) == 3 })
		if m := c.leader().ledger.Members(); len(m) != 4 {
			t.Errorf("members %v, want four", m)
		}
	})
}

func TestTrioWithOneDeadKeepsItsThree(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		dead := c.follower()
		c.setStatus(dead.id, StatusFailed)
		c.kill(dead)
		time.Sleep(5 * time.Minute)
		if v := c.voters(); len(v) != 3 {
			t.Errorf("voters %v, want all three", v)
		}
		// A fourth takes the dead one's place.
		c.add(testID(4), testAddr(4))
		c.until("the dead one is replaced", func() bool {
			v := c.voters()
			return len(v) == 3 && slices.Contains(v, testID(4)) && !slices.Contains(v, dead.id)
		})
		c.kill(c.leader())
		c.propose(c.leader(), set("x", "v"))
	})
}

func TestWipedNodeReplacesItself(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		dead := c.follower()
		c.kill(dead)
		c.mu.Lock()
		delete(c.gossip, dead.id) // gossip knows names
		c.mu.Unlock()
		fresh := raft.ServerID(nodeName(dead.id) + ".b")
		c.add(fresh, dead.addr)
		c.until("it votes again", func() bool {
			v := c.voters()
			return len(v) == 3 && slices.Contains(v, fresh) && !slices.Contains(v, dead.id)
		})
		c.settled()
	})
}

func TestChangedAddress(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		n := c.follower()
		c.kill(n)
		n.addr = "elsewhere"
		c.start(n)
		c.until("the address is updated", func() bool {
			return slices.ContainsFunc(c.leader().ledger.Voters(), func(s raft.Server) bool { return s.ID == n.id && s.Address == "elsewhere" })
		})
		c.propose(n, set("x", "v"))
		c.settled()
	})
}

func TestRemoveServerKeepsAMajority(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		leader := c.leader()
		for _, n := range c.others(leader) {
			c.setStatus(n.id, StatusFailed)
		}
		if err := leader.ledger.RemoveServer(t.Context(), c.others(leader)[0].id); err == nil || !strings.Contains(err.Error(), "no majority") {
			t.Errorf("removing one of two that seem dead: %v", err)
		}
		if err := c.others(leader)[0].ledger.RemoveServer(t.Context(), leader.id); !errors.Is(err, ErrNotLeader) {
			t.Errorf("removing on a follower: %v", err)
		}
	})
}

func TestLaggingNodeGetsASnapshot(t *testing.T) {
	inBubble(t, func(c *Config) {
		c.SnapshotThreshold, c.TrailingLogs, c.SnapshotInterval = 64, 16, time.Second
	}, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		away := c.follower()
		c.kill(away)
		leader := c.leader()
		for i := range 200 {
			c.propose(leader, set(fmt.Sprintf("t%d", i%50), fmt.Sprint(i)))
		}
		c.until("a snapshot", func() bool { s := leader.ledger.Stats(); return s.Snapshot > 0 && s.FirstIndex > 64 })
		c.start(away)
		c.settled()
		if got := get(away.ledger.Facts(), "t49"); got != "199" {
			t.Errorf("t49 is %q, want 199", got)
		}
	})
}

func TestUnknownCommandStopsTheReplicaOnly(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, c *testCluster) {
		n := c.bootstrap(1)[0]
		c.propose(n, set("x", "v"))
		future := set("x", "w")
		future.Version = StateVersion + 1
		if _, err := n.ledger.Propose(t.Context(), future); !errors.Is(err, ErrUnknownCommand) || n.ledger.Failed() != nil {
			t.Errorf("proposing a command of the future: %v", err)
		}
		// A leader that knows it could commit it; here raft is asked itself.
		if err := n.ledger.raft.Apply(mustMarshal(t, future), 0).Error(); err != nil {
			t.Fatal(err)
		}
		c.until("it says so", func() bool { return errors.Is(n.ledger.Failed(), ErrUnknownCommand) })
		if err := n.ledger.Barrier(t.Context()); !errors.Is(err, ErrUnknownCommand) {
			t.Errorf("barrier of a stopped replica: %v", err)
		}
		if n.ledger.Health() == nil {
			t.Error("a stopped replica is healthy")
		}
		if got := get(n.ledger.Facts(), "x"); got != "v" {
			t.Errorf("x is %q, want what it was", got)
		}
		if err := n.ledger.Backup(t.Context(), new(bytes.Buffer), true); err == nil {
			t.Error("a stopped replica was backed up")
		}
	})
}

func TestPanicOfApplyStopsTheReplicaOnly(t *testing.T) {
	var failures []error
	f := newFSM(func(*Facts) {}, func(err error) { failures = append(failures, err) })
	f.state.keys = nil // the next key panics
	create := &ledgerpb.Command{Version: 1, Body: &ledgerpb.Command_CreateKeys{CreateKeys: &ledgerpb.CreateKeys{
		Keys: []*ledgerpb.Key{{Id: "k1", Hash: make([]byte, 32), Tenant: "acme"}},
	}}}
	for index := uint64(1); index <= 2; index++ {
		o := f.Apply(&raft.Log{Index: index, Type: raft.LogCommand, Data: mustMarshal(t, create)}).(*outcome)
		if o.err == nil || !strings.Contains(o.err.Error(), "entry 1 ") {
			t.Errorf("outcome %+v", o)
		}
	}
	if len(failures) != 1 {
		t.Errorf("told %d times", len(failures))
	}
}

func TestDivergedReplicaIsFound(t *testing.T) {
	inBubble(t, func(c *Config) { c.CheckEvery = time.Second }, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		c.propose(c.leader(), set("x", "v"))
		c.settled()
		victim := c.follower()
		f := victim.ledger.fsm
		f.mu.Lock()
		sum := sha256.Sum256([]byte("a bit flipped"))
		f.state.hash.add(sum)
		f.mu.Unlock()
		c.until("it stops", func() bool { return errors.Is(victim.ledger.Failed(), ErrDiverged) })
		c.propose(c.leader(), set("x", "w"))
		for _, n := range c.others(victim) {
			if err := n.ledger.Failed(); err != nil {
				t.Errorf("%s stopped too: %v", n.id, err)
			}
		}
	})
}

func TestOnlyVoterFollowsNobody(t *testing.T) {
	inBubble(t, func(c *Config) { c.Servers = nil }, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(3)
		c.propose(nodes[0], set("x", "lost"))
		alone := c.add("n9.a", "addr9")
		if err := alone.ledger.Bootstrap([]raft.Server{{ID: "n9.a", Address: "addr9"}}); err != nil {
			t.Fatal(err)
		}
		c.until("it leads itself", func() bool { return alone.ledger.Barrier(t.Context()) == nil })
		if _, err := alone.ledger.Propose(t.Context(), set("x", "kept")); err != nil {
			t.Fatal(err)
		}
		var leader *testNode
		for _, n := range nodes {
			if n.ledger.IsLeader() {
				leader = n
			}
		}
		if err := leader.ledger.raft.AddNonvoter("n9.a", "addr9", 0, 0).Error(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if got := get(alone.ledger.Facts(), "x"); got != "kept" {
			t.Errorf("x is %q: another cluster's leader was followed", got)
		}
	})
}
