//go:build linux

package main_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"headgate/bench/fakevllm"
)

// modelServer is a simulated vLLM at an address of its own.
type modelServer struct {
	*fakevllm.Server
	url string
}

func newModelServer(t *testing.T, cfg fakevllm.Config) *modelServer {
	t.Helper()
	cfg.Models, cfg.LogSize = []string{"m"}, 1<<17
	s, err := fakevllm.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(s.Handler())
	_ = srv.Listener.Close() // its own
	srv.Listener = l
	srv.Start()
	t.Cleanup(func() { _ = s.Clear(); srv.CloseClientConnections(); srv.Close() })
	return &modelServer{s, "http://" + l.Addr().(*net.TCPAddr).String()}
}

// set lets something go wrong there; 0 ends it.
func (s *modelServer) set(t *testing.T, f fakevllm.Fault, share float64) {
	t.Helper()
	if err := s.Set(f, share); err != nil {
		t.Fatal(err)
	}
}

// boundedPolicy has these backends of so many slots, and one tenant without limits that bind.
func boundedPolicy(slots int, more string, servers ...*modelServer) string {
	var backends, names []string
	for i, s := range servers {
		names = append(names, fmt.Sprintf("b%d", i))
		backends = append(backends, fmt.Sprintf("{name: b%d, url: %q, slots: %d}", i, s.url, slots))
	}
	return fmt.Sprintf(`version: 1
backends: [%s]
models: [{name: m, backends: [%s], price_per_million: {input: "1.00", output: "1.00"}}]
plans: [{name: p, timeout: 20s}]
tenants: [{name: dev, plan: p}]
%s`, strings.Join(backends, ", "), strings.Join(names, ", "), more)
}

// ending is how a request ended, as its client saw it.
type ending struct {
	code    int
	begun   bool // a token came
	whole   bool
	tokens  int64 // as reported
	dropped string
	text    string // of what went wrong
}

// clients each send a request, wait for its end, and send the next.
type clients struct {
	g    *group
	stop func()

	mu   sync.Mutex
	ends []ending
}

// gather starts n clients, each at one member.
func (g *group) gather(n int, body string, header ...string) *clients {
	ctx, cancel := context.WithCancel(g.t.Context())
	c := &clients{g: g}
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			m := g.members[i%len(g.members)]
			own := strings.Replace(body, "hello", fmt.Sprintf("hello from %d", i), 1) // another conversation than the others'
			for ctx.Err() == nil {
				if !m.serving.Load() {
					select { // it comes back
					case <-ctx.Done():
					case <-time.After(20 * time.Millisecond):
					}
					continue
				}
				life := m.life.Load()
				e := g.stream(ctx, m, own, header...)
				if ctx.Err() != nil || m.life.Load() != life || !m.serving.Load() {
					continue // its gateway died under it
				}
				c.mu.Lock()
				c.ends = append(c.ends, e)
				c.mu.Unlock()
			}
		})
	}
	c.stop = func() { cancel(); all.Wait() }
	g.t.Cleanup(c.stop)
	return c
}

// stream sends one request and reads its answer to the end.
func (g *group) stream(ctx context.Context, m *member, body string, header ...string) (e ending) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.front+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return ending{text: err.Error()}
	}
	req.Header.Set("Authorization", "Bearer "+cliKey)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := g.http.Do(req)
	if err != nil {
		return ending{text: err.Error()}
	}
	defer func() { _ = res.Body.Close() }()
	e.code, e.dropped = res.StatusCode, res.Header.Get("X-Headgate-Dropped")
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line, data := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case res.StatusCode != http.StatusOK || strings.Contains(line, `"error"`):
			e.text += line
		case data && line == "[DONE]", strings.Contains(line, `"object":"chat.completion"`):
			e.whole = true
			fallthrough
		case data:
			e.begun = true
			var u struct {
				Usage struct {
					Total int64 `json:"total_tokens"`
				} `json:"usage"`
			}
			if json.Unmarshal([]byte(line), &u) == nil && u.Usage.Total > 0 {
				e.tokens = u.Usage.Total
			}
		}
	}
	if err := lines.Err(); err != nil {
		e.text += err.Error()
	}
	return e
}

// count says how many ended in a way.
func (c *clients) count(how func(ending) bool) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.ends {
		if how(e) {
			n++
		}
	}
	return n
}

// meanRunning is how many ran on average in the last whole windows of a span.
func (s *modelServer) meanRunning(from, to time.Time) float64 {
	var sum float64
	n := 0
	for _, w := range s.Timeline() {
		if !w.At.Before(from) && w.At.Add(100*time.Millisecond).Before(to) {
			sum, n = sum+w.Mean(), n+1
		}
	}
	return sum / float64(max(n, 1))
}

// TestSystemSlotsOfOneBackend: four gateways before one backend of 32 slots use 32 of them and never 33, by the
// backend's own log, also while gateways are killed, leave and come.
func TestSystemSlotsOfOneBackend(t *testing.T) {
	heavy(t)
	up := newModelServer(t, fakevllm.Config{Slots: 256, TTFT: 500 * time.Millisecond})
	g := newGroup(t, 4, boundedPolicy(32, "capacity: {target_wait: 4s}\n", up))
	g.up()
	c := g.gather(96, `{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}`)
	steady := func(what string, least float64) {
		t.Helper()
		from := time.Now()
		g.lasting(5 * time.Second)
		if mean := up.meanRunning(from.Add(500*time.Millisecond), time.Now()); mean < least {
			t.Errorf("%s: %.2f of 32 slots in use, want %v", what, mean, least)
		} else {
			t.Logf("%s: %.2f of 32 slots in use", what, mean)
		}
	}
	eventually(t, "all slots in use", func() bool { return up.Stats().Running == 32 })
	steady("four gateways", 31)
	for _, s := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		for _, m := range g.members[:2] { // one of four is the one that keeps the queue: in the end each was tried or both survived
			m.end(s)
			g.lasting(3 * time.Second)
			m.up()
			g.awaitView(g.members...)
			eventually(t, "all slots in use again", func() bool { return up.Stats().Running == 32 })
		}
	}
	steady("after kills and leaves", 31)
	c.stop()
	if s := up.Stats(); s.PeakRunning > 32 {
		t.Errorf("%d ran at once at a backend of 32 slots", s.PeakRunning)
	}
	if lost := c.count(func(e ending) bool { return !e.whole && e.code != http.StatusTooManyRequests }); lost > 0 {
		t.Errorf("%d requests to living gateways failed: %+v", lost, c.bad())
	}
	for _, m := range g.members {
		eventually(t, "no slot in use after all", func() bool {
			return g.metric(m, "headgate_slots_in_use") == 0 && g.metric(m, "headgate_queue_depth") == 0
		})
	}
}

// bad are some that failed.
func (c *clients) bad() []ending {
	c.mu.Lock()
	defer c.mu.Unlock()
	bad := slices.DeleteFunc(slices.Clone(c.ends), func(e ending) bool { return e.whole || e.code == http.StatusTooManyRequests })
	return bad[:min(len(bad), 5)]
}

// lasting lets what was set up go on.
func (g *group) lasting(d time.Duration) {
	g.t.Helper()
	select {
	case <-time.After(d):
	case <-g.t.Context().Done():
	}
}

// metric sums the series of a metric at a member.
func (g *group) metric(m *member, name string, labels ...string) (sum float64) {
	res, err := g.http.Get(m.admin + "/metrics")
	if err != nil {
		return -1
	}
	defer func() { _ = res.Body.Close() }()
	for lines := bufio.NewScanner(res.Body); lines.Scan(); {
		line := lines.Text()
		if !strings.HasPrefix(line, name+"{") && !strings.HasPrefix(line, name+" ") || slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(line, l) }) {
			continue
		}
		if v, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64); err == nil {
			sum += v
		}
	}
	return sum
}

// TestSystemBackendsDie: backends are killed, stall and come back under streaming load. What had not begun to
// stream is answered all the same, what had gets an error that its client can read, and nobody pays twice.
func TestSystemBackendsDie(t *testing.T) {
	heavy(t)
	var servers []*modelServer
	for range 3 {
		servers = append(servers, newModelServer(t, fakevllm.Config{Slots: 64, TTFT: 150 * time.Millisecond, InterToken: 20 * time.Millisecond, StallMax: 30 * time.Second}))
	}
	g := newGroup(t, 2, boundedPolicy(24, "", servers...))
	g.up()
	const body = `{"model": "m", "max_tokens": 10, "stream": true, "stream_options": {"include_usage": true}, "messages": [{"role": "user", "content": "hello"}]}`
	c := g.gather(20, body)
	for round, f := range []fakevllm.Fault{fakevllm.Refuse, fakevllm.Hang, fakevllm.Reset, fakevllm.Hang, fakevllm.Refuse} {
		s := servers[round%len(servers)]
		g.lasting(time.Second)
		s.set(t, f, 1)
		g.lasting(4 * time.Second)
		s.set(t, f, 0)
		eventually(t, "all backends to be up", func() bool {
			return g.metric(g.members[0], "headgate_backend_up") == 3 && g.metric(g.members[1], "headgate_backend_up") == 3
		})
	}
	g.lasting(2 * time.Second)
	c.stop()
	whole, cut := c.count(func(e ending) bool { return e.whole }), 0
	var reported int64
	for _, e := range c.ends {
		switch {
		case e.whole && e.text == "":
			reported += e.tokens
		case e.begun && strings.Contains(e.text, "upstream_error"), e.begun && strings.Contains(e.text, "deadline_exceeded"):
			cut++
		default:
			t.Errorf("lost: %+v", e)
		}
	}
	if whole < 100 || cut == 0 {
		t.Errorf("%d whole, %d cut: nothing was tried", whole, cut)
	}
	var settled float64
	for _, m := range g.members {
		eventually(t, "nothing in flight", func() bool { return g.metric(m, "headgate_inflight_reservations") == 0 })
		settled += g.metric(m, "headgate_tokens_total", `kind="settled"`)
	}
	const most = 64 // tokens of one request, at the very most
	abandoned := len(g.members) * 20
	if over := int64(settled) - reported; over < 0 || over > int64(cut+abandoned)*most {
		t.Errorf("%v tokens were charged for %d reported by whole answers; %d were cut", settled, reported, cut)
	}
	t.Logf("%d whole, %d cut in the middle, %v tokens charged, %d reported", whole, cut, settled, reported)
}

// TestSystemThousandUsers: a thousand at once, at two gateways before one backend, are each served or told that the fleet is
// full, and when to come again; none hangs or is dropped. Those who come first find a queue that does not know yet how fast the
// backend is, and has two places a slot; a second thousand finds as many places as it serves in the target wait.
func TestSystemThousandUsers(t *testing.T) {
	heavy(t)
	const slots = 32
	up := newModelServer(t, fakevllm.Config{Slots: 2 * slots, TTFT: 100 * time.Millisecond})
	g := newGroup(t, 2, boundedPolicy(slots, "", up))
	g.http.Transport.(*http.Transport).MaxConnsPerHost = 0
	g.up()
	for _, least := range []int{2 * slots, 5 * slots} {
		if kinds := thousand(t, g); kinds["served"] < least {
			t.Errorf("%v: fewer than %d were served", kinds, least)
		}
	}
	if s := up.Stats(); s.PeakRunning > slots || s.WastedTokens > 0 {
		t.Errorf("%d ran at once, %d tokens were made for nobody", s.PeakRunning, s.WastedTokens)
	}
}

// thousand sends a thousand requests at once, and counts how they ended.
func thousand(t *testing.T, g *group) map[string]int {
	const body = `{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}`
	ends := make([]ending, 1000)
	var all sync.WaitGroup
	for i := range ends {
		all.Go(func() { ends[i] = g.stream(t.Context(), g.members[i%2], body, "X-Headgate-Timeout", "5") })
	}
	all.Wait()
	kinds := map[string]int{}
	for _, e := range ends {
		switch {
		case e.whole:
			kinds["served"]++
		case e.code == http.StatusTooManyRequests && e.dropped != "" && strings.Contains(e.text, "over_capacity"):
			kinds[e.dropped]++
		default:
			t.Errorf("neither served nor refused: %+v", e)
		}
	}
	t.Logf("%v", kinds)
	return kinds
}
