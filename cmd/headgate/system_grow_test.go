//go:build linux

package main_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/proxy/admin"
)

// voters are the members that vote, by what headgate members says at one of them.
func (g *group) voters(m *member) (n int) {
	g.t.Helper()
	r := m.node.cli("members", "--json")
	if r.code != 0 {
		return -1 // it is asked again
	}
	for _, o := range decoded[[]admin.Member](m.node, "members") {
		if o.Raft == "leader" || o.Raft == "voter" {
			n++
		}
	}
	return n
}

// TestGrowAndShrink: from three nodes to five and back by starting and stopping them, and no
// other step; a backup made on the way is the whole of an empty cluster afterwards.
func TestGrowAndShrink(t *testing.T) {
	heavy(t)
	g := newGroup(t, 3, systemPolicy(slowFake(t)))
	g.up()
	w := g.startWriters(2)
	first := g.members[0]

	began := time.Now()
	for range 2 {
		m := g.add()
		m.launch()
	}
	for _, m := range g.members[3:] {
		m.ready()
	}
	g.awaitView(g.members...)
	first.node.await("five voters", func() bool { return g.voters(first) == 5 })
	grown := time.Since(began)

	backup := filepath.Join(t.TempDir(), "headgate.backup")
	w.end()
	g.awaitSame(g.members...)
	first.node.ok("ledger", "backup", "-o", backup)
	kept := decoded[map[string]any](first.node, "ledger", "inspect", "--file", backup)
	if info := look[admin.LedgerInfo](g, first, "ledger"); info.StateHash != kept["state_hash"] {
		t.Errorf("the backup's state is %v, the cluster's %s", kept["state_hash"], info.StateHash)
	}

	began = time.Now()
	for _, m := range g.members[3:] {
		m.end(syscall.SIGTERM)
		if code := m.node.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("%s ended with %d", m.name, code)
		}
	}
	g.members = g.members[:3]
	g.awaitView(g.members...)
	first.node.await("three voters", func() bool { return g.voters(first) == 3 })
	shrunk := time.Since(began)
	g.awaitSame(g.members...)
	for _, m := range g.members {
		w.read(m)
	}
	w.judge(t)

	// An empty ledger needs no force.
	fresh := newGroup(t, 1, "").members[0]
	fresh.launch()
	fresh.node.await("the ledger of a new cluster", func() bool {
		_, text := readiness(t, fresh.admin)
		return strings.Contains(text, "there is no policy yet")
	})
	restored := decoded[admin.Restored](fresh.node, "ledger", "restore", backup)
	if restored.StateHash != kept["state_hash"] {
		t.Errorf("restored: state %s, the backup's is %v", restored.StateHash, kept["state_hash"])
	}
	fresh.ready()
	fresh.node.spend()
	t.Logf("five voters %s after two more nodes were started, three %s after they were stopped; %s", seconds(grown), seconds(shrunk), w)
}

// TestRollingRestart: each node is stopped and started in turn, under load. Nothing that was
// begun is cut, and all stays as it was.
func TestRollingRestart(t *testing.T) {
	heavy(t)
	slow, err := fakevllm.New(fakevllm.Config{Seed: 1, Models: []string{"slow"}, InterToken: 40 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(slow.Handler())
	t.Cleanup(srv.Close)
	policy := strings.NewReplacer("\nbackends: [", fmt.Sprintf("\nbackends: [{name: c, url: %q}, ", srv.URL), "\nmodels: [", "\nmodels: [{name: slow, backends: [c]}, ").Replace(systemPolicy(slowFake(t)))
	g := newGroup(t, 3, policy)
	g.up()
	g.members[0].node.ok("keys", "create", "--tenant", "dev", "--id", "kept")
	g.members[1].node.ok("keys", "create", "--tenant", "dev", "--id", "gone")
	g.members[1].node.ok("keys", "revoke", "gone")
	g.members[2].node.ok("kill", "tenant", "nobody", "--reason", "to be kept")
	info := g.awaitSame(g.members...)
	before := g.agreed(g.members[0])

	traffic := g.startLoad(40 * time.Millisecond)
	traffic.orderly = true
	for _, m := range g.members {
		ends := g.slowStreams(m, 5)
		began := time.Now()
		m.end(syscall.SIGTERM)
		stopped := time.Since(began)
		for err := range ends {
			if err != nil {
				t.Errorf("a stream through %s, which was stopped: %v", m.name, err)
			}
		}
		if code := m.node.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("%s ended with %d", m.name, code)
		}
		g.awaitView(g.others(m)...)
		began = time.Now()
		m.up()
		g.awaitView(g.members...)
		t.Logf("%s: stopped in %s with streams of 1.2 s under way, back in the view %s after its start", m.name, seconds(stopped), seconds(time.Since(began)))
		for _, o := range g.members {
			if after := g.agreed(o); after != before {
				t.Errorf("%s was restarted, and on %s\n%s became\n%s", m.name, o.name, before, after)
			}
		}
	}
	traffic.end()
	if after := g.awaitSame(g.members...); after.ClusterID != info.ClusterID || after.PolicyRevision != info.PolicyRevision {
		t.Errorf("%+v became %+v", info, after)
	}
	t.Logf("%d requests answered, %d not taken by a node that was stopping", traffic.answered.Load(), traffic.excused.Load())
}

// agreed is what a node has of what was agreed on, as text.
func (g *group) agreed(m *member) string {
	g.t.Helper()
	keys := look[[]admin.Key](g, m, "keys")
	for i := range keys {
		keys[i].LastUsed = ""
	}
	policy := m.node.ok("policy", "show")
	return fmt.Sprintf("keys %+v\nkills %+v\npolicy %s", keys, look[[]admin.Kill](g, m, "kill"), policy)
}

// slowStreams opens streams through a node and returns once each has begun. How each ends comes
// over the channel, which is then closed.
func (g *group) slowStreams(m *member, n int) <-chan error {
	g.t.Helper()
	begun, ended := make(chan struct{}, n), make(chan error, n)
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			err := g.slowStream(m, begun)
			if err != nil {
				begun <- struct{}{} // or who waits for it would wait for ever
			}
			ended <- err
		})
	}
	go func() { all.Wait(); close(ended) }()
	for range n {
		<-begun
	}
	return ended
}

func (g *group) slowStream(m *member, begun chan<- struct{}) error {
	req, err := http.NewRequest(http.MethodPost, m.front+"/v1/chat/completions", strings.NewReader(`{"model": "slow", "stream": true, "max_tokens": 30, "messages": [{"role": "user", "content": "hello"}]}`))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+cliKey)
	res, err := g.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if _, err := res.Body.Read(make([]byte, 1)); err != nil {
		return err
	}
	begun <- struct{}{}
	rest, err := io.ReadAll(res.Body)
	if err == nil && !strings.HasSuffix(strings.TrimSpace(string(rest)), "data: [DONE]") {
		err = fmt.Errorf("it was cut after %q", tail(string(rest), 100))
	}
	return err
}
