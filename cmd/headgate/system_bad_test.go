//go:build linux

package main_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"headgate/proxy/admin"
)

// fails waits until a node that was started ends by itself, as it must, and gives its log.
func (m *member) fails(what string) string {
	m.t.Helper()
	eventually(m.t, what+": "+m.name+" to give up", func() bool {
		select {
		case <-m.node.exited:
			return true
		default:
			return false
		}
	})
	if code := m.node.cmd.ProcessState.ExitCode(); code != 1 && code != 2 {
		m.t.Errorf("%s: %s ended with %d", what, m.name, code)
	}
	return m.node.log.String()
}

// TestTwins: of two nodes with one name, one folder or each other's folder the second says so
// and ends; the first does not mind.
func TestTwins(t *testing.T) {
	t.Parallel()
	g := newGroup(t, 1, systemPolicy(startFake(t)))
	first := g.members[0]
	first.up()
	second := g.add()
	second.launch("HEADGATE_NODE_ID=" + first.name)
	contains(t, second.fails("the name of another"), "another live node has this name", first.name)

	second.launch("HEADGATE_NODE_ID="+first.name, "HEADGATE_DATA_DIR="+first.dir)
	contains(t, second.fails("the folder of a running node"), first.dir, "in use")

	third := g.add()
	third.up()
	third.end(syscall.SIGTERM)
	second.launch("HEADGATE_DATA_DIR=" + third.dir)
	contains(t, second.fails("the folder of another name"), third.dir, third.name, "--node-id")
	if s := look[admin.Status](g, first, "status"); !s.Ready || !s.Cluster.ViewLease.Held {
		t.Errorf("the first one minds: %+v", s)
	}
}

// TestStrangers: who has other certificates, gossip keys or another cluster's name is kept
// out, and both logs hold why and what to do.
func TestStrangers(t *testing.T) {
	t.Parallel()
	pki := t.TempDir()
	g := newGroup(t, 1, systemPolicy(startFake(t)))
	first := g.members[0]
	for _, c := range []struct{ out, cluster string }{{"own", "west"}, {"foreign", "west"}, {"other", "east"}} {
		r := runCLI(t, nil, "init", "--cluster", c.cluster, "--node", "n1="+first.host, "--node", "n2", "--node", "n3", "--node", "n4", "--node", "n5", "--out", filepath.Join(pki, c.out))
		if r.code != 0 {
			t.Fatal(r.stderr)
		}
	}
	mix := func(name, certificates, keys string) string {
		dir := filepath.Join(pki, certificates+"-"+keys+"-"+name)
		if err := os.CopyFS(dir, os.DirFS(filepath.Join(pki, certificates, name))); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(pki, keys, name, "gossip.keys"))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "gossip.keys"), text, 0o600)
		}
		if err == nil {
			err = os.Chmod(dir, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
		return dir
	}
	first.env = append(first.env, "HEADGATE_CLUSTER_TLS="+filepath.Join(pki, "own", "n1"))
	first.up()
	for _, c := range []struct {
		what, folder string
		says         string // in one of the logs
	}{
		{"another gossip key", mix("n2", "own", "foreign"), "gossip that the keys of this node do not open was refused"},
		{"another authority", mix("n3", "foreign", "own"), "a gRPC connection was refused"},
		{"another cluster", mix("n4", "other", "own"), "gossip of another cluster was refused"},
	} {
		n := g.add()
		name, before := filepath.Base(c.folder), len(first.node.log.String())
		n.launch("HEADGATE_NODE_ID="+name[strings.LastIndex(name, "-")+1:], "HEADGATE_CLUSTER_TLS="+c.folder)
		n.node.await(c.what+" to be refused", func() bool {
			for line := range strings.Lines(n.node.log.String() + first.node.log.String()[before:]) {
				if strings.Contains(line, c.says) && strings.Contains(line, `"remedy"`) {
					return true
				}
			}
			return false
		})
		if slices.ContainsFunc(look[[]admin.Member](g, first, "members"), func(m admin.Member) bool { return m.Name != first.name && m.InView }) {
			t.Errorf("%s: it is in the view", c.what)
		}
		if status(t, n.admin+"/readyz") == http.StatusOK {
			t.Errorf("%s: it is ready", c.what)
		}
		n.end(syscall.SIGTERM)
	}
	if code, text := readiness(t, first.admin); code != http.StatusOK {
		t.Errorf("the first one is not ready any more: %s", text)
	}
}

// TestJoinNobody: a node whose seeds do not answer says so once, keeps trying, and joins when
// one comes.
func TestJoinNobody(t *testing.T) {
	t.Parallel()
	g := newGroup(t, 1, systemPolicy(startFake(t)))
	early := g.add()
	early.launch()
	const says = "no other node answers; this one keeps trying"
	early.node.await("a word of the seeds", func() bool { return strings.Contains(early.node.log.String(), says) })
	if code, text := readiness(t, early.admin); code != http.StatusServiceUnavailable || !strings.Contains(text, "not joined yet") {
		t.Errorf("it is ready, or does not say why not: %d %s", code, text)
	}
	g.members[0].up()
	early.ready()
	g.awaitView(g.members...)
	if n := strings.Count(early.node.log.String(), says); n != 1 {
		t.Errorf("it said %d times that no seed answers", n)
	}
}

// TestDamaged: a node does not start from data that is not what it wrote. It names the file or
// its folder, and what to do.
func TestDamaged(t *testing.T) {
	t.Parallel()
	g := newGroup(t, 1, systemPolicy(startFake(t)))
	n := g.members[0]
	n.up()
	n.node.ok("keys", "create", "--tenant", "dev", "--id", "before-the-backup")
	backup := filepath.Join(t.TempDir(), "backup")
	n.node.ok("ledger", "backup", "-o", backup)
	n.node.ok("ledger", "restore", backup, "--force") // leaves a snapshot
	n.node.ok("keys", "create", "--tenant", "dev", "--id", "after-the-backup")
	n.node.ok("kill", "tenant", "x", "--reason", "the-last-one")
	n.end(syscall.SIGKILL)

	one := func(pattern string) func(string) string {
		return func(dir string) string {
			found, err := filepath.Glob(filepath.Join(dir, "raft", pattern))
			if err != nil || len(found) == 0 {
				t.Fatalf("no %s in %s: %v", pattern, dir, err)
			}
			return found[len(found)-1]
		}
	}
	for _, c := range []struct {
		what   string
		file   func(dir string) string
		damage func(text []byte) []byte
	}{
		{"a segment of the log is cut off", one("*.wal"), func(text []byte) []byte { return text[:bytes.Index(text, []byte("after-the-backup"))-100] }},
		{"the list of segments is cut off", one("wal-meta.db"), func(text []byte) []byte { return text[:len(text)/3] }},
		{"a bit of an entry has changed", one("*.wal"), func(text []byte) []byte {
			return bytes.Replace(text, []byte("after-the-backup"), []byte("After-the-backup"), 1)
		}},
		{"the snapshot is cut off", one("snapshots/*/state.bin"), func(text []byte) []byte { return text[:len(text)/2] }},
		{"the snapshot's description is cut off", one("snapshots/*/meta.json"), func(text []byte) []byte { return text[:len(text)/2] }},
	} {
		m := newGroup(t, 1, systemPolicy("http://127.0.0.1:1")).members[0]
		if err := os.CopyFS(m.dir, os.DirFS(n.dir)); err != nil {
			t.Fatal(err)
		}
		file := c.file(m.dir)
		text, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(file, c.damage(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		m.launch()
		contains(t, m.fails(c.what), "headgate: ", filepath.Join(m.dir, "raft"), " is damaged: ", "remove its data folder and start it again", "restore a backup")
	}
}

// TestManyKeys: ten thousand keys come with one policy, and are there after a crash.
func TestManyKeys(t *testing.T) {
	t.Parallel()
	fake := startFake(t)
	data := t.TempDir()
	n := startNode(t, nil, "--data-dir", data, "--policy", writeFile(t, "policy.yaml", cliPolicy(fake, 1000, "")))
	var keys strings.Builder
	keys.WriteString("keys:\n")
	for i := range 10_000 {
		fmt.Fprintf(&keys, "  - {id: k%d, tenant: dev, hash: \"sha256:%064x\"}\n", i, i+1)
	}
	r := n.apply(cliPolicy(fake, 1000, keys.String()))
	if r.code != 0 {
		t.Fatal(r.stderr)
	}
	contains(t, r.stdout, "10000 changes applied as revision 2")
	check := func() {
		t.Helper()
		if s := decoded[admin.Status](n, "status"); s.Keys != 10_001 { // with that of --dev
			t.Errorf("%d keys", s.Keys)
		}
	}
	check()
	n.spend()
	n.signal(syscall.SIGKILL)
	<-n.exited
	n = startNode(t, nil, "--data-dir", data)
	check()
}
