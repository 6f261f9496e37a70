//go:build linux

package main_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/proxy/admin"
)

// The system tests run clusters of processes, and kill, stop, cut and grow them. This file has
// what they share: a cluster of members, each with a name, a data folder and addresses that
// outlive its processes, and a load that counts what failed.
//
// Each cluster has a network of its own in 127/8, so that the ports of a member that is down
// are still free when it comes back. The heavier ones run only with HEADGATE_SYSTEM=1.
// HEADGATE_SYSTEM_LOGS names a folder that keeps what the processes logged.

// heavy skips a test that takes long, unless it was asked for.
func heavy(t *testing.T) {
	t.Helper()
	if os.Getenv("HEADGATE_SYSTEM") != "1" {
		t.Skip("takes long: make system, or HEADGATE_SYSTEM=1")
	}
}

// member is a node that can be started again.
type member struct {
	t            *testing.T
	name, dir    string
	host, gossip string   // where it serves, and where it meets the others
	in           []string // the command that its own is run by
	front, admin string   // URLs
	env          []string
	node         *nodeProcess // the last one started

	// serving: requests to it must be answered. What began in another life than it ended in,
	// or ended when it did not serve, may fail.
	serving atomic.Bool
	life    atomic.Int64
}

// group of members that are, or will be, one cluster.
type group struct {
	t       *testing.T
	place   func(i int) (host, gossip string, in []string) // of the member with a number, from 1
	policy  string                                         // file; "": none
	members []*member
	http    *http.Client
}

// systemPolicy has limits that no test reaches, and that refuse nothing while their owner changes.
func systemPolicy(upstream string) string {
	return fmt.Sprintf(`version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b]}]
plans:
  - name: p
    limits:
      - {name: tokens, scope: org, unit: tokens, rate: 1000000000/min, unavailable: allow}
      - {name: requests, scope: key, unit: requests, rate: 1000000000/min, unavailable: allow}
tenants: [{name: dev, plan: p}]
`, upstream)
}

// slowFake is a model server that takes some time over each answer.
func slowFake(t *testing.T) string { return slowFakeAt(t, "127.0.0.1:0") }

func slowFakeAt(t *testing.T, address string) string {
	t.Helper()
	fake, err := fakevllm.New(fakevllm.Config{Seed: 1, Models: []string{"m"}, TTFT: 20 * time.Millisecond, InterToken: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(fake.Handler())
	_ = srv.Listener.Close() // its own
	srv.Listener = l
	srv.Start()
	t.Cleanup(srv.Close)
	return srv.URL
}

// newGroup is a cluster of n members, none of them started, that found it together.
func newGroup(t *testing.T, n int, policy string) *group {
	t.Helper()
	subnet := freeSubnet(t)
	return newGroupAt(t, n, policy, func(i int) (host, gossip string, in []string) {
		host = fmt.Sprintf("%s.%d", subnet, i)
		return host, host + ":7946", nil
	})
}

func newGroupAt(t *testing.T, n int, policy string, place func(int) (string, string, []string)) *group {
	t.Helper()
	g := &group{t: t, place: place, http: &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	t.Cleanup(g.http.CloseIdleConnections)
	if policy != "" {
		g.policy = writeFile(t, "policy.yaml", policy)
	}
	for range n {
		m := g.add()
		m.env = append(m.env, fmt.Sprintf("HEADGATE_BOOTSTRAP_EXPECT=%d", n))
	}
	return g
}

// freeSubnet is a network of this machine alone that nothing listens in.
func freeSubnet(t *testing.T) string {
	t.Helper()
	for range 100 {
		subnet := fmt.Sprintf("127.%d.%d", 16+rand.IntN(200), 1+rand.IntN(250))
		guard, err := net.Listen("tcp", subnet+".254:1024")
		if err != nil {
			continue
		}
		t.Cleanup(func() { _ = guard.Close() })
		return subnet
	}
	t.Skip("this machine's loopback has one address only")
	return ""
}

// add is one more member, which joins the others.
func (g *group) add() *member {
	g.t.Helper()
	i := len(g.members) + 1
	m := &member{t: g.t, name: fmt.Sprintf("n%d", i), dir: filepath.Join(g.t.TempDir(), "data")}
	m.host, m.gossip, m.in = g.place(i)
	m.front, m.admin = "http://"+m.host+":8080", "http://"+m.host+":8081"
	if len(g.members) > 0 {
		var seeds []string
		for _, o := range g.members[:min(3, len(g.members))] {
			seeds = append(seeds, o.gossip)
		}
		m.env = append(m.env, "HEADGATE_JOIN="+strings.Join(seeds, ","))
	}
	if g.policy != "" {
		m.env = append(m.env, "HEADGATE_POLICY="+g.policy)
	}
	g.members = append(g.members, m)
	return m
}

// launch starts a process of the member; more goes over its environment.
func (m *member) launch(more ...string) *nodeProcess {
	m.t.Helper()
	n := &nodeProcess{t: m.t, exited: make(chan struct{}), front: m.front, admin: m.admin}
	command := append(slices.Clone(m.in), headgate(m.t), "serve")
	n.cmd = exec.Command(command[0], command[1:]...)
	n.cmd.Dir = m.t.TempDir()
	n.cmd.Env = cleanEnv(slices.Concat([]string{
		"HEADGATE_DEV=true", "HEADGATE_DEV_KEY=" + cliKey, "HEADGATE_ADMIN_TOKEN=" + cliToken, "HEADGATE_NODE_ID=" + m.name, "HEADGATE_DATA_DIR=" + m.dir,
		"HEADGATE_LISTEN=" + m.host + ":8080", "HEADGATE_ADMIN_LISTEN=" + m.host + ":8081", "HEADGATE_CLUSTER_LISTEN=" + m.gossip,
	}, m.env, more)...)
	n.cmd.Stdout, n.cmd.Stderr = &n.log, &n.log
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // no test may leave one behind
	if err := n.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	go func() { defer close(n.exited); _ = n.cmd.Wait() }() // how it ended is in its state
	m.t.Cleanup(func() {
		_ = n.cmd.Process.Kill() // it may have ended
		<-n.exited
		if dir := os.Getenv("HEADGATE_SYSTEM_LOGS"); dir != "" {
			_ = os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-%s-%d.log", m.t.Name(), m.name, n.cmd.Process.Pid)), []byte(n.log.String()), 0o600) // a convenience
		}
		if m.t.Failed() {
			m.t.Logf("the log of %s (pid %d) without requests ends:\n%s", m.name, n.cmd.Process.Pid, tail(withoutRequests(n.log.String()), 6000))
		}
	})
	m.node = n
	return n
}

// withoutRequests are the lines of a log that tell of the node.
func withoutRequests(log string) string {
	var b strings.Builder
	for line := range strings.Lines(log) {
		if !strings.Contains(line, `"msg":"request"`) {
			b.WriteString(line)
		}
	}
	return b.String()
}

// up starts the member and waits until it is ready.
func (m *member) up() {
	m.t.Helper()
	m.launch()
	m.ready()
}

func (m *member) ready() {
	m.t.Helper()
	m.node.await(m.name+" to be ready", func() bool { return status(m.t, m.admin+"/readyz") == http.StatusOK })
	m.serving.Store(true)
}

// end sends the process a signal and waits for its end.
func (m *member) end(s syscall.Signal) {
	m.t.Helper()
	m.serving.Store(false)
	m.life.Add(1)
	m.node.signal(s)
	<-m.node.exited
}

// up starts all members and waits until they are ready and in one view.
func (g *group) up() {
	g.t.Helper()
	for _, m := range g.members {
		m.launch()
	}
	for _, m := range g.members {
		m.ready()
	}
	g.awaitView(g.members...)
}

// call makes a call of the admin API; out may be nil. It may be used from any goroutine. err
// is that of the connection: the outcome is unknown then.
func (g *group) call(m *member, method, path string, in, out any) (code int, apiErr admin.Code, err error) {
	var body io.Reader
	if in != nil {
		raw, err := json.Marshal(in)
		if err != nil {
			return 0, "", err
		}
		body = bytes.NewReader(raw)
	}
	req, err := http.NewRequest(method, m.admin+"/admin/v1/"+path, body)
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Authorization", "Bearer "+cliToken)
	res, err := g.http.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, "", err
	}
	if res.StatusCode != http.StatusOK {
		var e struct {
			Error struct {
				Code    admin.Code
				Message string
			}
		}
		if err := json.Unmarshal(raw, &e); err != nil {
			return res.StatusCode, "", nil
		}
		return res.StatusCode, e.Error.Code, nil
	}
	if out != nil {
		err = json.Unmarshal(raw, out)
	}
	return res.StatusCode, "", err
}

// look is a GET that must succeed.
func look[T any](g *group, m *member, path string) (v T) {
	g.t.Helper()
	if code, apiErr, err := g.call(m, http.MethodGet, path, nil, &v); code != http.StatusOK {
		g.t.Fatalf("GET %s of %s: status %d %s %v", path, m.name, code, apiErr, err)
	}
	return v
}

// awaitView waits until each of the members goes by a view of just them, and holds a lease.
func (g *group) awaitView(members ...*member) {
	g.t.Helper()
	var want []string
	for _, m := range members {
		want = append(want, m.name)
	}
	slices.Sort(want)
	for _, m := range members {
		m.node.await(fmt.Sprintf("%s to see the view %v", m.name, want), func() bool {
			var s admin.Status
			code, _, _ := g.call(m, http.MethodGet, "status", nil, &s)
			if code != http.StatusOK || s.Cluster == nil {
				return false
			}
			slices.Sort(s.Cluster.Members)
			return slices.Equal(s.Cluster.Members, want) && s.Cluster.ViewLease.Held
		})
	}
}

// awaitSame waits until all have applied the same, and compares the states that it made.
func (g *group) awaitSame(members ...*member) admin.LedgerInfo {
	g.t.Helper()
	var infos []admin.LedgerInfo
	eventually(g.t, "the same index on all", func() bool {
		infos = infos[:0]
		for _, m := range members {
			infos = append(infos, look[admin.LedgerInfo](g, m, "ledger"))
		}
		return !slices.ContainsFunc(infos, func(l admin.LedgerInfo) bool { return l.Index != infos[0].Index })
	})
	for i, l := range infos {
		if l.StateHash != infos[0].StateHash {
			g.t.Errorf("at index %d the state of %s is %s, that of %s is %s", l.Index, members[i].name, l.StateHash, members[0].name, infos[0].StateHash)
		}
	}
	return infos[0]
}

// leader is the member that leads, as all of those given agree.
func (g *group) leader(among ...*member) *member {
	g.t.Helper()
	var lead *member
	eventually(g.t, "one leader", func() bool {
		names := map[string]bool{}
		for _, m := range among {
			var l admin.LedgerInfo
			if code, _, _ := g.call(m, http.MethodGet, "ledger", nil, &l); code != http.StatusOK {
				return false
			}
			names[l.Leader] = true
		}
		i := slices.IndexFunc(g.members, func(m *member) bool { return names[m.name] })
		if len(names) != 1 || i < 0 {
			return false
		}
		lead = g.members[i]
		return true
	})
	return lead
}

// others are the members but one.
func (g *group) others(than ...*member) (out []*member) {
	for _, m := range g.members {
		if !slices.Contains(than, m) {
			out = append(out, m)
		}
	}
	return out
}

// writable waits until a member takes a change, and says how long that took.
func (g *group) writable(m *member) time.Duration {
	g.t.Helper()
	began := time.Now()
	m.node.await(m.name+" to take a change", func() bool {
		code, _, _ := g.call(m, http.MethodPut, "kill/model/no-such-model", map[string]string{"reason": "probe"}, nil)
		return code == http.StatusOK
	})
	return time.Since(began)
}

// load sends chats to every front door that serves, whether or not earlier ones were
// answered, and counts.
type load struct {
	g        *group
	stop     context.CancelFunc
	stopped  sync.WaitGroup
	answered atomic.Int64
	excused  atomic.Int64 // failed, but their node ended meanwhile
	orderly  bool         // nodes end of themselves: what they began to answer, they answer

	mu     sync.Mutex
	failed []string
}

// maxInFlight bounds what the load has open; more would mean that answers stopped coming.
const maxInFlight = 1000

func (g *group) startLoad(every time.Duration) *load {
	ctx, cancel := context.WithCancel(g.t.Context())
	l := &load{g: g, stop: cancel}
	slots := make(chan struct{}, maxInFlight)
	for i := range g.members {
		m := g.members[i]
		l.stopped.Go(func() {
			t := time.NewTicker(every)
			defer t.Stop()
			for n := 0; ; n++ {
				select {
				case <-ctx.Done():
					return
				case <-t.C:
				}
				if !m.serving.Load() {
					continue
				}
				select {
				case slots <- struct{}{}:
					l.stopped.Go(func() { defer func() { <-slots }(); l.one(m, n) })
				default:
					l.fail(m, "%d requests are without an answer", maxInFlight)
					return
				}
			}
		})
	}
	g.t.Cleanup(func() { l.end() })
	return l
}

// one request, every other one streamed.
func (l *load) one(m *member, n int) {
	life := m.life.Load()
	stream := n%2 == 1
	body := fmt.Sprintf(`{"model": "m", "max_tokens": 10, "stream": %t, "messages": [{"role": "user", "content": "hello"}]}`, stream)
	code, text, _, err := l.g.chat(m, cliKey, body)
	switch {
	case code == http.StatusOK && err == nil && (!stream || strings.HasSuffix(strings.TrimSpace(text), "data: [DONE]")):
		l.answered.Add(1)
	case (m.life.Load() != life || !m.serving.Load()) && !(l.orderly && code != 0):
		l.excused.Add(1)
	default:
		l.fail(m, "status %d, error %v: %s", code, err, tail(text, 300))
	}
}

func (l *load) fail(m *member, format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, time.Now().Format("15:04:05.000 ")+m.name+": "+fmt.Sprintf(format, args...))
}

// end stops the load and judges it.
func (l *load) end() {
	l.stop()
	l.stopped.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.failed) > 0 {
		l.g.t.Errorf("%d requests to living nodes failed, %d were answered; the first failed:\n%s", len(l.failed), l.answered.Load(), strings.Join(l.failed[:min(5, len(l.failed))], "\n"))
		l.failed = nil
	}
}

// smallChat is a body of one.
const smallChat = `{"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}]}`

// chat sends one chat; it may be used from any goroutine.
func (g *group) chat(m *member, key, body string) (code int, text string, h http.Header, err error) {
	req, err := http.NewRequest(http.MethodPost, m.front+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return 0, "", nil, err
	}
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Content-Type", "application/json")
	res, err := g.http.Do(req)
	if err != nil {
		return 0, "", nil, err
	}
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(res.Body)
	return res.StatusCode, string(raw), res.Header, err
}

// nothingSent says that a call did not reach its node.
func nothingSent(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// seconds for people.
func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", cmp.Or(d, 0).Seconds()) }
