//go:build linux

package main_test

import (
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/proxy/admin"
)

// startModelProcess is a simulated vLLM in a process of its own, which can be stopped.
func startModelProcess(t *testing.T) (url string, signal func(syscall.Signal)) {
	t.Helper()
	var log output
	cmd := exec.Command(headgate(t), "bench", "upstream", "--listen", freeSubnet(t)+".1:8000", "--models", "m", "--ttft", "50ms", "--inter-token", "10ms")
	cmd.Stderr, cmd.Env, cmd.Dir = &log, cleanEnv(), t.TempDir()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	eventually(t, "the model server", func() bool {
		_, after, ok := strings.Cut(log.String(), "simulated vLLM on ")
		url = strings.TrimSpace(after)
		return ok && strings.HasSuffix(after, "\n")
	})
	return url, func(s syscall.Signal) {
		if err := cmd.Process.Signal(s); err != nil {
			t.Error(err)
		}
	}
}

// TestSystemCapacityBadBackends: each of several models has a good backend and one that flaps, slows tenfold,
// answers garbage, closes in the middle, sends its clients away, is stopped as a process, or is drained. No request
// is lost that had not begun to stream, whoever had begun is told in his stream, and no fault is another model's.
func TestSystemCapacityBadBackends(t *testing.T) {
	heavy(t)
	cfg := fakevllm.Config{Slots: 256, TTFT: 50 * time.Millisecond, InterToken: 10 * time.Millisecond}
	good, drained := newModelServer(t, cfg), newModelServer(t, cfg)
	stopped, signal := startModelProcess(t)
	faults := []fakevllm.Fault{fakevllm.Flap, "drag=10", fakevllm.Garbage, "cut=4", "429=2"}
	names := []string{"flap", "drag", "garbage", "cut", "pushback", "stopped", "drained", "none"}
	var servers []*modelServer
	urls := []string{}
	for range faults {
		s := newModelServer(t, cfg)
		servers, urls = append(servers, s), append(urls, s.url)
	}
	urls = append(urls, stopped, drained.url, good.url)
	var backends, models []string
	for i, name := range names {
		backends = append(backends, fmt.Sprintf("{name: %s, url: %q, slots: 16}", name, urls[i]))
		models = append(models, fmt.Sprintf("{name: m-%s, backends: [%s, good], upstream_model: m}", name, name))
	}
	g := newGroup(t, 2, fmt.Sprintf(`version: 1
backends: [%s, {name: good, url: %q, slots: 64}]
models: [%s]
plans: [{name: p, timeout: 20s}]
tenants: [{name: dev, plan: p}]
`, strings.Join(backends, ", "), good.url, strings.Join(models, ", ")))
	g.http.Transport.(*http.Transport).MaxIdleConnsPerHost = 256
	g.up()

	loads := map[string]*clients{}
	for _, name := range names {
		loads[name] = g.gather(4, fmt.Sprintf(`{"model": "m-%s", "max_tokens": 10, "stream": true, "messages": [{"role": "user", "content": "hello"}]}`, name))
	}
	g.lasting(time.Second)
	for i, f := range faults {
		servers[i].set(t, f, 1)
	}
	signal(syscall.SIGSTOP)
	g.drainAndBack(drained)
	g.lasting(3 * time.Second)
	signal(syscall.SIGCONT)
	for _, s := range servers {
		if err := s.Clear(); err != nil {
			t.Fatal(err)
		}
	}
	g.lasting(2 * time.Second)
	var stopping sync.WaitGroup
	for _, c := range loads {
		stopping.Go(c.stop)
	}
	stopping.Wait()
	for _, name := range names {
		whole, cut := 0, 0
		var lost []ending
		for _, e := range loads[name].ends {
			switch {
			case e.whole && e.text == "":
				whole++
			case e.begun && strings.Contains(e.text, `"error"`):
				cut++
			default:
				lost = append(lost, e)
			}
		}
		if len(lost) > 0 {
			t.Errorf("%s: %d requests were lost, such as %+v", name, len(lost), lost[0])
		}
		if mayCut := name == "flap" || name == "cut" || name == "stopped"; whole < 20 || cut > 0 && !mayCut || cut == 0 && name == "cut" {
			t.Errorf("%s: %d whole, %d cut", name, whole, cut)
		}
		t.Logf("%s: %d whole, %d cut in the middle", name, whole, cut)
	}
	g.idle()
}

// drainAndBack takes a backend out of use through one gateway, and back through another: what runs there
// ends, nothing new comes, and then it does.
func (g *group) drainAndBack(s *modelServer) {
	g.t.Helper()
	g.members[0].node.ok("drain", "drained", "--for", "5m", "--reason", "an upgrade")
	for _, m := range g.members {
		eventually(g.t, "the drained backend to be empty at "+m.name, func() bool {
			return slices.ContainsFunc(look[[]admin.BackendState](g, m, "backends"), func(b admin.BackendState) bool { return b.Endpoint == "drained" && b.Drained && b.InFlight == 0 })
		})
	}
	before := s.Stats()
	g.lasting(2 * time.Second)
	if after := s.Stats(); after.OutputTokens != before.OutputTokens || after.InFlight > 0 {
		g.t.Errorf("a drained backend was sent requests: %d, then %d tokens, %d in flight", before.OutputTokens, after.OutputTokens, after.InFlight)
	}
	g.members[1].node.ok("undrain", "drained")
	eventually(g.t, "the backend to be used again", func() bool { return s.Stats().OutputTokens > before.OutputTokens })
}

// TestSystemCapacityRungs: each rung of the ladder is set by command at one gateway, for a time, and acts at
// all of them, which their answers say; those who take no less get all; and it ends by command.
func TestSystemCapacityRungs(t *testing.T) {
	heavy(t)
	up := newModelServer(t, fakevllm.Config{})
	g := newGroup(t, 2, fmt.Sprintf(`version: 1
backends: [{name: b, url: %q, slots: 8}]
models:
  - {name: m, backends: [b], fallback: [small], default_temperature: 0}
  - {name: small, backends: [b], upstream_model: m}
plans: [{name: p}]
tenants: [{name: dev, plan: p}]
surfaces: [{name: faq, share: tenant, exact: {ttl: 1s, stale_if_error: 1h, beta: 0}}]
ladder:
  - {rung: cut_max_tokens, max_tokens: 3}
  - {rung: shed_cost, above_tokens: 1000}
  - {rung: static_answer, text: "We are busy."}
`, up.url))
	g.up()
	const body = `{"model": "m", "messages": [{"role": "user", "content": "hello"}]}`
	dear := strings.Replace(body, "hello", strings.Repeat("hello ", 5000), 1)
	for _, c := range []struct {
		rung, body  string
		header      []string
		code        int
		says        string
		dropped     string
		alsoRefused bool // those who take no less
	}{
		{rung: "shed_best_effort", body: body, header: []string{"X-Headgate-Class", "best_effort"}, code: 429, says: "shed_best_effort", dropped: "shed_class", alsoRefused: true},
		{rung: "stale_cache", body: body, header: []string{"X-Headgate-Surface", "faq"}, code: 200, says: "stale_cache"},
		{rung: "smaller_model", body: body, code: 200, says: "smaller_model, model=small"},
		{rung: "drop_optional", body: body, code: 200, says: "drop_optional"},
		{rung: "cut_max_tokens", body: body, code: 200, says: "cut_max_tokens, max_tokens=3"},
		{rung: "shed_cost", body: dear, code: 429, says: "shed_cost", dropped: "shed_cost", alsoRefused: true},
		{rung: "static_answer", body: body, code: 200, says: "static_answer"},
	} {
		t.Run(c.rung, func(t *testing.T) {
			ask := func(m *member, header ...string) (code int, says, dropped string) {
				code, h := g.knock(m, c.body, append(header, c.header...)...)
				return code, h.Get("X-Headgate-Degraded"), h.Get("X-Headgate-Dropped")
			}
			for _, m := range g.members {
				if code, says, _ := ask(m); code != http.StatusOK || says != "" {
					t.Errorf("before: %d %q", code, says)
				}
			}
			if c.rung == "stale_cache" {
				g.lasting(1100 * time.Millisecond) // what is kept gets old
			}
			g.members[0].node.ok("ladder", "set", c.rung, "on", "--for", "1m", "--reason", "a test")
			for _, m := range g.members {
				var code int
				var says, dropped string
				eventually(t, m.name+" to say "+c.says, func() bool { code, says, dropped = ask(m); return says != "" })
				if code != c.code || says != c.says || dropped != c.dropped {
					t.Errorf("%s: %d %q %q", m.name, code, says, dropped)
				}
				if code, says, _ := ask(m, "X-Headgate-No-Degrade", "true"); (code != http.StatusOK || says != "") != c.alsoRefused {
					t.Errorf("%s, no less: %d %q", m.name, code, says)
				}
			}
			if list := g.members[1].node.ok("ladder", "show"); !strings.Contains(list, "a test") {
				t.Error(list)
			}
			g.members[1].node.ok("ladder", "set", c.rung, "off")
			for _, m := range g.members {
				eventually(t, m.name+" to say nothing", func() bool { code, says, _ := ask(m); return code == http.StatusOK && says == "" })
			}
		})
	}
}

// knock sends one request and returns its status and headers.
func (g *group) knock(m *member, body string, header ...string) (int, http.Header) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.front+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+cliKey)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := g.http.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	_ = res.Body.Close()
	return res.StatusCode, res.Header
}
