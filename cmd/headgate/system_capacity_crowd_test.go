//go:build linux

package main_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/proxy/admin"
)

// late is how much later things may happen on a machine whose two cores do everything at once: gateways,
// model servers and clients.
const late = 400 * time.Millisecond

// sent is a request as its body tells of it.
type sent struct {
	class     string
	at, until time.Time // its client wants the beginning of an answer by then
}

var sentWords = regexp.MustCompile(`class=(\w+) at=(\d+) until=(\d+)`)

// body of a request that tells of itself.
func (s *sent) body(model string) string {
	return fmt.Sprintf(`{"model": %q, "max_tokens": 1, "messages": [{"role": "user", "content": "class=%s at=%d until=%d"}]}`, model, s.class, s.at.UnixNano(), s.until.UnixNano())
}

// readSent is what the body of a request says that came to a model server.
func readSent(body []byte) (s sent, ok bool) {
	m := sentWords.FindSubmatch(body)
	if m == nil {
		return s, false
	}
	at, err1 := strconv.ParseInt(string(m[2]), 10, 64)
	until, err2 := strconv.ParseInt(string(m[3]), 10, 64)
	return sent{string(m[1]), time.Unix(0, at), time.Unix(0, until)}, errors.Join(err1, err2) == nil
}

// flood sends so many requests a second for a while, each through the next member, whether or not earlier ones
// were answered, and returns when all have ended. The most that were open at once is of them all.
func (g *group) flood(perSecond int, length time.Duration, one func(m *member, i int)) (requests int, most int64) {
	g.t.Helper()
	const bound = 10_000 // more would mean that answers stopped coming
	var all sync.WaitGroup
	var open atomic.Int64
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); time.Since(began) < length; <-tick.C {
		for due := int(time.Since(began).Seconds() * float64(perSecond)); requests < due; requests++ {
			if n := open.Add(1); n > bound {
				g.t.Fatalf("%d requests are without an answer", n)
			} else {
				most = max(most, n)
			}
			m, i := g.members[requests%len(g.members)], requests
			all.Go(func() { defer open.Add(-1); one(m, i) })
		}
	}
	all.Wait()
	return requests, most
}

// tally counts how requests ended.
type tally struct {
	mu    sync.Mutex
	ends  map[string]int
	wrong []string
}

// add one; what is neither a whole answer nor a proper refusal is wrong.
func (y *tally) add(kind string, e ending, late bool) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.ends == nil {
		y.ends = map[string]int{}
	}
	how := strings.TrimSpace(fmt.Sprint(kind, " ", e.code, " ", e.dropped))
	y.ends[how]++
	proper := e.whole || e.code == http.StatusTooManyRequests && e.dropped != "" && strings.Contains(e.text, `"over_capacity"`) || e.code == http.StatusGatewayTimeout
	if !proper || late {
		y.wrong = append(y.wrong, fmt.Sprintf("%s late=%t: %+v", kind, late, e))
	}
}

// of is how many ended so.
func (y *tally) of(how string) int {
	y.mu.Lock()
	defer y.mu.Unlock()
	return y.ends[how]
}

// all that ended.
func (y *tally) all() (n int) {
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, k := range y.ends {
		n += k
	}
	return n
}

// judge fails the test for what is wrong.
func (y *tally) judge(t *testing.T) {
	t.Helper()
	y.mu.Lock()
	defer y.mu.Unlock()
	if len(y.wrong) > 0 {
		t.Errorf("%d requests were neither answered nor properly refused, of %v; the first: %s", len(y.wrong), y.ends, strings.Join(y.wrong[:min(3, len(y.wrong))], "\n"))
	}
	t.Logf("requests by how they ended: %v", y.ends)
}

// sums of all series of each metric of a member; nil if it did not answer.
func (g *group) sums(m *member) map[string]float64 {
	res, err := g.http.Get(m.admin + "/metrics")
	if err != nil {
		return nil
	}
	defer func() { _ = res.Body.Close() }()
	sums := map[string]float64{}
	for lines := bufio.NewScanner(res.Body); lines.Scan(); {
		line := lines.Text()
		name := line[:max(strings.IndexAny(line, "{ "), 0)]
		if v, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64); err == nil && name != "" {
			sums[name] += v
		}
	}
	return sums
}

// resident is a member's memory in MiB.
func (m *member) resident() int64 {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.node.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(raw)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
			if err == nil {
				return kib >> 10
			}
		}
	}
	return 0
}

// watch is what was seen of a cluster's queue while it was watched.
type watch struct {
	stop func()

	mu       sync.Mutex
	places   float64 // the most
	waiting  float64 // the most
	bytes    float64 // the most
	memory   []int64 // of the largest member, in MiB, by look
	pressure float64 // the most
}

// watching looks several times a second.
func (g *group) watching() *watch {
	ctx, cancel := context.WithCancel(g.t.Context())
	w := &watch{}
	var all sync.WaitGroup
	all.Go(func() {
		tick := time.NewTicker(150 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			w.look(g)
			<-tick.C
		}
	})
	w.stop = func() { cancel(); all.Wait() }
	g.t.Cleanup(w.stop)
	return w
}

func (w *watch) look(g *group) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var memory int64
	for _, m := range g.members {
		s := g.sums(m)
		places, waiting := s["headgate_queue_places"], s["headgate_backend_waiting"]
		w.places, w.waiting, w.bytes, w.pressure = max(w.places, places), max(w.waiting, waiting), max(w.bytes, s["headgate_queue_bytes"]), max(w.pressure, s["headgate_backend_pressure"])
		memory = max(memory, m.resident())
	}
	w.memory = append(w.memory, memory)
}

// soaking is how long a test goes on: short, or as long as HEADGATE_SOAK says.
func soaking(t *testing.T, short time.Duration) time.Duration {
	t.Helper()
	s := os.Getenv("HEADGATE_SOAK")
	if s == "" {
		return short
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// idle waits until nothing is left of a load: nobody waits, nothing is in use, nothing is reserved.
func (g *group) idle() {
	g.t.Helper()
	for _, m := range g.members {
		var s map[string]float64
		defer func() {
			if g.t.Failed() {
				g.t.Logf("%s: %v wait, %v slots in use, %v in flight, %v reserved", m.name, s["headgate_queue_depth"], s["headgate_slots_in_use"], s["headgate_inflight_requests"], s["headgate_inflight_reservations"])
			}
		}()
		eventually(g.t, m.name+" to be idle", func() bool {
			s = g.sums(m)
			return s != nil && s["headgate_queue_depth"] == 0 && s["headgate_slots_in_use"] == 0 && s["headgate_inflight_requests"] == 0 && s["headgate_inflight_reservations"] == 0
		})
	}
}

// TestSystemCapacityOverload: three gateways before one backend that does 80 requests a second get 400. The queue
// stays within what is served in the target wait, interactive requests wait no longer than that, background keeps
// a fifth of the backend's time, the backend never sees who had better not be served any more, memory is flat, and
// when the load ends all is as it was. HEADGATE_SOAK says for how long (make soak).
func TestSystemCapacityOverload(t *testing.T) {
	heavy(t)
	const slots, perSecond, target = 16, 80, time.Second
	length := soaking(t, 14*time.Second)
	up := newModelServer(t, fakevllm.Config{Slots: 256, TTFT: 200 * time.Millisecond})
	g := newGroup(t, 3, boundedPolicy(slots, "capacity: {target_wait: 1s, shed: [{at: 1, class: best_effort}]}\n", up))
	g.http.Transport.(*http.Transport).MaxIdleConnsPerHost = 1024
	g.up()
	classes := []string{"interactive", "interactive", "background", "interactive", "background", "interactive", "best_effort", "interactive"}
	patience := map[string]time.Duration{"interactive": 2 * time.Second, "background": 6 * time.Second, "best_effort": 6 * time.Second}
	y := &tally{}
	w := g.watching()
	began := time.Now()
	requests, most := g.flood(5*perSecond, length, func(m *member, i int) {
		s := sent{class: classes[i%len(classes)], at: time.Now()}
		wait := patience[s.class]
		if i%16 == 0 { // some who can wait for little more than their answer takes
			wait = 500 * time.Millisecond
		}
		s.until = s.at.Add(wait)
		e := g.stream(context.Background(), m, s.body("m"), "X-Headgate-Class", s.class, "X-Headgate-Timeout", fmt.Sprint(wait.Seconds()))
		y.add(s.class, e, e.whole && time.Now().After(s.until.Add(late)))
	})
	ended := time.Now()
	w.stop()
	y.judge(t)
	judgeOverload(t, up, began.Add(3*time.Second), began.Add(length), target)
	if w.waiting > w.places || w.places > 1.5*perSecond*target.Seconds() || w.waiting < slots || most > 4*perSecond { // fewer places send away nobody who has one
		t.Errorf("the queue had up to %v places and %v in it, %d requests were open", w.places, w.waiting, most)
	}
	if s := up.Stats(); s.PeakRunning > slots {
		t.Errorf("%d ran at once at a backend of %d slots", s.PeakRunning, slots)
	}
	third := len(w.memory) / 3
	before, after := slices.Max(w.memory[:third]), slices.Max(w.memory[2*third:])
	if after > before+before/4+24 {
		t.Errorf("a gateway grew from %d to %d MiB", before, after)
	}
	g.idle()
	t.Logf("%d requests; at most %v waited at %v places, %d were open; the largest gateway had %d MiB at first, %d at last; idle %s after the last of them", requests, w.waiting, w.places, most, before, after, seconds(time.Since(ended)))
	g.recovered(up)
}

// judgeOverload by the backend's own log.
func judgeOverload(t *testing.T, up *modelServer, from, to time.Time, target time.Duration) {
	t.Helper()
	busy := map[string]time.Duration{}
	var all time.Duration
	var waits []time.Duration
	overdue := 0
	for _, r := range up.Log() {
		s, ok := readSent(r.Body)
		if !ok {
			continue
		}
		if r.Time.After(s.until.Add(late / 4)) {
			overdue++
		}
		if r.Started.Before(from) || r.Ended.After(to) || r.Ended.IsZero() {
			continue
		}
		busy[s.class] += r.Ended.Sub(r.Started)
		all += r.Ended.Sub(r.Started)
		if s.class == "interactive" {
			waits = append(waits, r.Started.Sub(s.at))
		}
	}
	if overdue > 0 {
		t.Errorf("%d requests reached the backend when their time was over", overdue)
	}
	if len(waits) < 100 {
		t.Fatalf("only %d interactive requests were served", len(waits))
	}
	slices.Sort(waits)
	p50, p99 := waits[len(waits)/2], waits[len(waits)*99/100]
	if p99 > target+late {
		t.Errorf("of 100 interactive requests 99 waited for up to %s, want %s", seconds(p99), seconds(target))
	}
	share := func(class string) float64 { return float64(busy[class]) / float64(all) }
	if share("background") < .2 || share("interactive") < share("background") {
		t.Errorf("background had %.3f of the backend's time, interactive %.3f", share("background"), share("interactive"))
	}
	mean := up.meanRunning(from, to)
	if mean < .9*16 {
		t.Errorf("%.2f of 16 slots in use under load", mean)
	}
	t.Logf("interactive waited %s (p50), %s (p99); shares of time: interactive %.3f, background %.3f, best_effort %.3f; %.2f slots in use", seconds(p50), seconds(p99), share("interactive"), share("background"), share("best_effort"), mean)
}

// recovered: whoever comes now, of any class, waits for nothing.
func (g *group) recovered(up *modelServer) {
	g.t.Helper()
	for _, class := range []string{"best_effort", "background", "interactive"} {
		for _, m := range g.members {
			var e ending
			eventually(g.t, "a request of class "+class+" to be served at once", func() bool { // cut-offs take two seconds to end
				s := sent{class: class, at: time.Now(), until: time.Now().Add(10 * time.Second)}
				e = g.stream(g.t.Context(), m, s.body("m"), "X-Headgate-Class", class)
				log := up.Log()
				return e.whole && log[len(log)-1].Started.Sub(s.at) < late/2
			})
		}
	}
}

// key is a new one, of a tenant.
func (g *group) key(tenant string) string {
	g.t.Helper()
	var k admin.CreatedKey
	if code, apiErr, err := g.call(g.members[0], http.MethodPost, "keys", admin.NewKey{Tenant: tenant, ID: "of-" + tenant}, &k); code != http.StatusOK {
		g.t.Fatalf("%d %s %v", code, apiErr, err)
	}
	g.awaitSame(g.members...)
	return "Bearer " + k.Key
}

// crowdPolicy has a fast backend and a slow one, and two tenants.
func crowdPolicy(target time.Duration, fast, slow *modelServer) string {
	return fmt.Sprintf(`version: 1
backends: [{name: fast, url: %q, slots: 32}, {name: slow, url: %q, slots: 4}]
models: [{name: m, backends: [fast]}, {name: s, backends: [slow], upstream_model: m}]
plans: [{name: p, timeout: 60s}]
tenants: [{name: dev, plan: p}, {name: other, plan: p}]
capacity: {target_wait: %s}
`, fast.url, slow.url, target)
}

// TestSystemCapacityCrowds: a thousand users at once, a flood of twenty times what a backend does from clients
// who leave, and one tenant with ten thousand requests in the queue.
func TestSystemCapacityCrowds(t *testing.T) {
	heavy(t)
	fast, slow := newModelServer(t, fakevllm.Config{Slots: 256, TTFT: 100 * time.Millisecond}), newModelServer(t, fakevllm.Config{Slots: 256, TTFT: 200 * time.Millisecond})
	g := newGroup(t, 3, crowdPolicy(time.Second, fast, slow))
	g.http.Transport.(*http.Transport).MaxIdleConnsPerHost = 512
	g.http.Timeout = patience
	for _, m := range g.members {
		m.env = append(m.env, "HEADGATE_MAX_CONNS_PER_IP=10000") // all come from one
	}
	g.up()
	other := g.key("other")
	thousandUsers(g, fast)
	impatientFlood(g, slow, other)
	if r := g.members[0].node.apply(crowdPolicy(time.Minute, fast, slow)); r.code != 0 {
		t.Fatal(r.stderr)
	}
	g.awaitSame(g.members...)
	tenThousand(g, fast, other)
}

// thousandUsers all ask at once, three times: everybody is answered or told that the fleet is full.
func thousandUsers(g *group, up *modelServer) {
	g.t.Helper()
	y := &tally{}
	var all sync.WaitGroup
	for i := range 1000 {
		m := g.members[i%len(g.members)]
		all.Go(func() {
			for range 3 {
				s := sent{class: "interactive", at: time.Now(), until: time.Now().Add(20 * time.Second)}
				y.add("user", g.stream(g.t.Context(), m, s.body("m"), "X-Headgate-Timeout", "20s"), false)
			}
		})
	}
	all.Wait()
	y.judge(g.t)
	if y.of("user 200") < 200 || y.of("user 429 queue_full")+y.of("user 429 evicted") == 0 || up.Stats().PeakRunning > 32 {
		g.t.Errorf("%d ran at once; %v", up.Stats().PeakRunning, y.ends)
	}
	g.idle()
}

// impatientFlood is of clients who leave before they are served, half of them without having said that they will;
// another tenant's patient ones are served meanwhile, and nothing is left of it afterwards.
func impatientFlood(g *group, up *modelServer, other string) {
	g.t.Helper()
	const perSecond = 20 // that the backend does
	y, patient := &tally{}, &tally{}
	requests, _ := g.flood(20*perSecond, 6*time.Second, func(m *member, i int) {
		s := sent{class: "interactive", at: time.Now(), until: time.Now().Add(600 * time.Millisecond)}
		switch {
		case i%200 == 100:
			s.until = s.at.Add(10 * time.Second)
			patient.add("patient", g.stream(g.t.Context(), m, s.body("s"), "Authorization", other, "X-Headgate-Timeout", "10s"), false)
			return
		case i%2 == 0:
			y.add("told", g.stream(g.t.Context(), m, s.body("s"), "X-Stainless-Timeout", "0.6"), false)
			return
		}
		ctx, cancel := context.WithTimeout(g.t.Context(), 600*time.Millisecond)
		defer cancel()
		if e := g.stream(ctx, m, s.body("s")); ctx.Err() == nil { // the others left
			y.add("silent", e, false)
		}
	})
	y.judge(g.t)
	patient.judge(g.t)
	s := up.Stats()
	if patient.of("patient 200") != patient.all() || patient.all() < 10 || s.PeakRunning > 4 {
		g.t.Errorf("of %d patient clients these were served: %v; %d ran at once at a backend of 4 slots", patient.all(), patient.ends, s.PeakRunning)
	}
	g.idle()
	g.t.Logf("%d requests in 6 s; %d reached the backend: %v", requests, s.Requests, s.Outcomes)
	if e := g.stream(g.t.Context(), g.members[1], (&sent{class: "after"}).body("s"), "X-Headgate-Timeout", "2s"); !e.whole {
		g.t.Errorf("after the flood: %+v", e)
	}
}

// tenThousand requests of one tenant come at once, and wait, or are told that they can't; another's are served
// within seconds meanwhile, the gateways keep their memory, and when they all leave their places are free at once.
func tenThousand(g *group, up *modelServer, other string) {
	g.t.Helper()
	const clients = 10_400
	_, _ = g.flood(200, 3*time.Second, func(m *member, _ int) { // so that the backend's pace is known
		g.stream(g.t.Context(), m, (&sent{class: "first"}).body("m"))
	})
	w := g.watching()
	ctx, leave := context.WithCancel(g.t.Context())
	defer leave()
	var all sync.WaitGroup
	var refused atomic.Int64 // and sit it out
	for i := range clients {
		m := g.members[i%len(g.members)]
		all.Go(func() {
			for ctx.Err() == nil {
				if e := g.stream(ctx, m, (&sent{class: "many"}).body("m")); e.code == http.StatusTooManyRequests {
					refused.Add(1)
					select {
					case <-time.After(10 * time.Second):
					case <-ctx.Done():
					}
					refused.Add(-1)
				}
			}
		})
	}
	depth := func() (n float64) {
		for _, m := range g.members {
			n += g.sums(m)["headgate_queue_depth"]
		}
		return n
	}
	eventually(g.t, "ten thousand to wait or to be told", func() bool {
		waiting := depth()
		return waiting >= 5000 && int64(waiting)+refused.Load() >= 10_000
	})
	y := &tally{}
	for i := range 30 {
		s := sent{class: "other", at: time.Now(), until: time.Now().Add(5 * time.Second)}
		e := g.stream(g.t.Context(), g.members[i%len(g.members)], s.body("m"), "Authorization", other, "X-Headgate-Timeout", "5s")
		y.add("other", e, false)
	}
	still, told := depth(), refused.Load()
	leave()
	all.Wait()
	w.stop()
	y.judge(g.t)
	if y.of("other 200") != 30 {
		g.t.Errorf("of another tenant's 30 requests these were served: %v", y.ends)
	}
	const memory = 512 // MiB
	if w.bytes > 256<<20 || slices.Max(w.memory) > memory || up.Stats().PeakRunning > 32 {
		g.t.Errorf("%v bytes waited, the largest gateway had %d MiB, %d ran at once", w.bytes, slices.Max(w.memory), up.Stats().PeakRunning)
	}
	left := time.Now()
	g.idle()
	g.t.Logf("%v waited, %v when the other tenant was through, %d were told to come later; %v bytes in the queue; the largest gateway had %d MiB; idle %s after they left", w.waiting, still, told, w.bytes, slices.Max(w.memory), seconds(time.Since(left)))
	if e := g.stream(g.t.Context(), g.members[1], (&sent{class: "after"}).body("m"), "X-Headgate-Timeout", "2s"); !e.whole {
		g.t.Errorf("after they left: %+v", e)
	}
}
