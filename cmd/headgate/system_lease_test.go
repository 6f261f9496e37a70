//go:build linux

package main_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headgate/cluster"
	"headgate/proxy/admin"
)

// The tests of limits that hold for a whole cluster share what is here: a model server that knows
// when each request came, a load that knows when each was sent, the nodes' decision logs, and the
// judgement on them, which is exact and shares nothing with package limiter. All times are of
// CLOCK_BOOTTIME, which is one clock for all processes of a machine.

// pace is what a limit admits: in any span w, burst + rate·w, the rate being count in per.
type pace struct {
	burst, count int64
	per          time.Duration
}

// taken is what a bucket gave, or with negative units got back.
type taken struct {
	at, units                      int64
	tenant, limit, subject, by, of string // of: the node
}

// verdict is by how much the worst of all spans exceeds what it may have; not over at 0 or below.
type verdict struct {
	by       float64 // units
	from, to int64
}

// worst judges what was taken, in order of time, against times·(burst + 1.01·rate·(w + lag)) over every
// span w. The 1 % is what clocks may differ by.
//
// A bucket that leaks at that rate holds after each taking the most that any span which ends there has
// above its part of the rate. Everything is in whole units of 1/(100·per) of a unit, so nothing rounds.
func (p pace) worst(ts []taken, lag time.Duration, times *big.Rat) verdict {
	scale := new(big.Int).Mul(big.NewInt(100*int64(p.per)), times.Denom())
	rate := new(big.Int).Mul(big.NewInt(101*p.count), times.Num()) // a nanosecond
	most := new(big.Int).Mul(big.NewInt(p.burst*100), big.NewInt(int64(p.per)))
	most.Mul(most, times.Num()).Add(most, new(big.Int).Mul(rate, big.NewInt(int64(lag))))
	level, v := new(big.Int), verdict{by: math.Inf(-1)}
	var from, last int64
	for i, t := range ts {
		if t.at < last {
			panic("what was taken is not in order")
		}
		if i > 0 {
			level.Sub(level, new(big.Int).Mul(rate, big.NewInt(t.at-last)))
		}
		if last = t.at; i == 0 || level.Sign() <= 0 {
			level.SetInt64(0)
			from = t.at
		}
		level.Add(level, new(big.Int).Mul(scale, big.NewInt(t.units)))
		over, _ := new(big.Rat).SetFrac(new(big.Int).Sub(level, most), scale).Float64()
		if over > v.by {
			v = verdict{over, from, t.at}
		}
	}
	return v
}

// whole is a limit itself.
func whole() *big.Rat { return big.NewRat(1, 1) }

// ideal is what one bucket that sees everything admits of requests of a cost, sent at those times: when.
func (p pace) ideal(sent []int64, cost int64) (admitted []int64) {
	scale := big.NewInt(int64(p.per))
	most := new(big.Int).Mul(big.NewInt(p.burst), scale)
	each := new(big.Int).Mul(big.NewInt(cost), scale)
	level := new(big.Int).Set(most)
	for i, at := range sent {
		if i > 0 {
			level.Add(level, new(big.Int).Mul(big.NewInt(p.count), big.NewInt(at-sent[i-1])))
			if level.Cmp(most) > 0 {
				level.Set(most)
			}
		}
		if level.Cmp(each) >= 0 {
			level.Sub(level, each)
			admitted = append(admitted, at)
		}
	}
	return admitted
}

// TestExcessIsFound: the judgement is that of all spans, each looked at by itself.
func TestExcessIsFound(t *testing.T) {
	t.Parallel()
	at := func(ms ...int64) (ts []taken) {
		for _, m := range ms {
			ts = append(ts, taken{at: m * 1e6, units: 1})
		}
		return ts
	}
	hundred := pace{burst: 3, count: 100, per: time.Second} // one in 10 ms, less 1 %
	for name, c := range map[string]struct {
		ts   []taken
		lag  time.Duration
		over float64
	}{
		"a burst":                   {at(0, 0, 0), 0, 0},
		"one more":                  {at(0, 0, 0, 0), 0, 1},
		"one more, in time":         {at(0, 0, 0, 10), 0, 0},
		"one more, too soon":        {at(0, 0, 0, 9), 0, 1 - 0.909},
		"excused by lag":            {at(0, 0, 0, 9), time.Millisecond, 1 - 0.909 - 0.101},
		"after a rest":              {at(0, 1000, 1000, 1000, 1000), 0, 1},
		"hidden between quiet ones": {at(0, 500, 1000, 1001, 1002, 1003, 2000), 0, 1 - 0.303},
		"what came back":            {[]taken{{at: 0, units: 3}, {at: 0, units: -2}, {at: 0, units: 2}}, 0, 0},
		"more than came back":       {[]taken{{at: 0, units: 3}, {at: 0, units: -2}, {at: 0, units: 3}}, 0, 1},
		"what came back long ago":   {[]taken{{at: 0, units: 3}, {at: 1e6, units: -3}, {at: 1e9, units: 4}}, 0, 1},
	} {
		if v := hundred.worst(c.ts, c.lag, whole()); math.Abs(v.by-c.over) > 1e-9 {
			t.Errorf("%s: over by %v, want %v", name, v.by, c.over)
		}
	}
	if v := hundred.worst(at(0, 0, 0, 0), 0, big.NewRat(4, 3)); v.by != 0 {
		t.Errorf("4/3 of 3 are %v more than 4", v.by)
	}
	daily := pace{burst: math.MaxInt32, count: 1e6, per: 24 * time.Hour} // no product overflows
	if v := daily.worst([]taken{{at: 0, units: math.MaxInt32}, {at: 864e11, units: 101e4 + 1}}, 0, whole()); v.by != 1 {
		t.Errorf("one more in a day is %v", v.by)
	}
	// Against every span, one by one.
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		p := pace{burst: 1 + r.Int64N(5), count: 1 + r.Int64N(9), per: time.Duration(1 + r.Int64N(50))}
		var ts []taken
		for now := int64(0); len(ts) < 30; now += r.Int64N(12) {
			ts = append(ts, taken{at: now, units: r.Int64N(6) - 1})
		}
		slowly := new(big.Rat)
		for i := range ts {
			for j, sum := i, int64(0); j < len(ts); j++ {
				sum += ts[j].units
				may := big.NewRat(101*p.count*(ts[j].at-ts[i].at), 100*int64(p.per))
				over := new(big.Rat).Sub(big.NewRat(sum-p.burst, 1), may)
				if i == 0 && j == 0 || over.Cmp(slowly) > 0 {
					slowly = over
				}
			}
		}
		if want, _ := slowly.Float64(); p.worst(ts, 0, whole()).by != want {
			t.Fatalf("%+v %v: %v, want %v", p, ts, p.worst(ts, 0, whole()).by, want)
		}
	}
	// The ideal is never over, and the next that it refused would have been.
	if got := hundred.ideal([]int64{0, 0, 0, 0, 5e6, 10e6, 1e9, 1e9, 1e9, 1e9}, 1); !slices.Equal(got, []int64{0, 0, 0, 10e6, 1e9, 1e9, 1e9}) {
		t.Errorf("the ideal admits at %v", got)
	}
}

// arrival of a request at the model server.
type arrival struct{ sent, at int64 }

// arrivals is a model server that notes when the requests of each tenant came. A request says in its
// field probe whose it is, when it was sent, and how its answer ends: at once, or after so many
// milliseconds of streaming, or (-1) when the test says so. The usage is what was asked for.
type arrivals struct {
	url string

	mu        sync.Mutex
	names     []string // of tenants
	at        map[string][]arrival
	now, most map[string]int // a tenant's requests that it works on; the most since forget
	peak      map[string]int // and ever
	finish    chan struct{}  // closed: streams without an end of their own end
}

// probe has no text, which would count as input.
type probe struct {
	Tenant int   `json:"tenant"` // a place in arrivals.names
	Sent   int64 `json:"sent"`
	For    int   `json:"for"`
}

func newArrivals(t *testing.T, address string) *arrivals {
	t.Helper()
	a := &arrivals{at: map[string][]arrival{}, now: map[string]int{}, most: map[string]int{}, peak: map[string]int{}, finish: make(chan struct{})}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(a)
	_ = s.Listener.Close() // its own
	s.Listener = l
	s.Start()
	t.Cleanup(func() { a.letGo(); s.Close() })
	a.url = s.URL
	return a
}

// letGo ends the streams that have no end of their own.
func (a *arrivals) letGo() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.finish)
	a.finish = make(chan struct{})
}

func (a *arrivals) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Prompt []int
		Max    int64 `json:"max_tokens"`
		Probe  probe
	}
	w.Header().Set("Content-Type", "application/json")
	if r.Method != http.MethodPost || json.NewDecoder(r.Body).Decode(&in) != nil {
		_, _ = fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
		return
	}
	tenant, finish := a.begin(in.Probe)
	// Before the last word is out: with it the slot is free, and another request may come.
	end := sync.OnceFunc(func() { a.end(tenant) })
	defer end()
	usage := fmt.Sprintf(`"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, len(in.Prompt), in.Max, int64(len(in.Prompt))+in.Max)
	if in.Probe.For == 0 {
		end()
		_, _ = fmt.Fprintf(w, `{"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"length"}],%s}`, usage)
		return
	}
	if a.stream(w, r, in.Probe.For, finish) {
		end()
		_, _ = fmt.Fprintf(w, `data: {"id":"c","object":"text_completion","choices":[],%s}`+"\n\ndata: [DONE]\n\n", usage)
	}
}

// stream goes on for so many milliseconds, or if they are negative until finish; it is false where the
// client went.
func (a *arrivals) stream(w http.ResponseWriter, r *http.Request, ms int, finish <-chan struct{}) bool {
	w.Header().Set("Content-Type", "text/event-stream")
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var end <-chan time.Time
	if ms > 0 {
		end = time.After(time.Duration(ms) * time.Millisecond)
	}
	for {
		if _, err := fmt.Fprint(w, `data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":null}]}`+"\n\n"); err != nil || http.NewResponseController(w).Flush() != nil {
			return false
		}
		select {
		case <-r.Context().Done():
			return false
		case <-finish:
			return true
		case <-end:
			return true
		case <-tick.C:
		}
	}
}

func (a *arrivals) begin(p probe) (tenant string, finish <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	tenant = a.names[p.Tenant]
	a.at[tenant] = append(a.at[tenant], arrival{p.Sent, cluster.Now()})
	a.now[tenant]++
	a.most[tenant] = max(a.most[tenant], a.now[tenant])
	a.peak[tenant] = max(a.peak[tenant], a.now[tenant])
	return tenant, a.finish
}

// number is what probes call a tenant.
func (a *arrivals) number(tenant string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	i := slices.Index(a.names, tenant)
	if i < 0 {
		i = len(a.names)
		a.names = append(a.names, tenant)
	}
	return i
}

func (a *arrivals) end(tenant string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now[tenant]--
}

// of a tenant, in order.
func (a *arrivals) of(tenant string) []arrival {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.at[tenant])
}

// inFlight of a tenant now, and the most since forget.
func (a *arrivals) inFlight(tenant string) (now, most int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.now[tenant], a.most[tenant]
}

// peakOf a tenant is the most that were ever in flight.
func (a *arrivals) peakOf(tenant string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.peak[tenant]
}

// forget the most that were in flight.
func (a *arrivals) forget(tenant string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.most[tenant] = a.now[tenant]
}

// fleet is a cluster before such a server, with tenants that have a key each, whose nodes write down
// what they decide.
type fleet struct {
	*group
	up   *arrivals
	keys map[string]string
	logs string

	mu    sync.Mutex
	nodes []*member // that may be asked, if they serve
}

// newFleet starts n nodes; limits are tenants by name, with the limits of each as a policy has them.
// place may be nil.
func newFleet(t *testing.T, n int, up *arrivals, limits map[string]string, place func(int) (string, string, []string)) *fleet {
	t.Helper()
	var plans, tenants strings.Builder
	for name, limit := range limits {
		fmt.Fprintf(&plans, "  - {name: %s, limits: [%s]}\n", name, limit)
		fmt.Fprintf(&tenants, "  - {name: %s, plan: %s}\n", name, name)
	}
	policy := fmt.Sprintf("version: 1\nbackends: [{name: b, url: %q}]\nmodels: [{name: m, backends: [b]}]\nplans:\n%stenants:\n%s", up.url, plans.String(), tenants.String())
	f := &fleet{up: up, keys: map[string]string{}, logs: t.TempDir()}
	if place == nil {
		subnet := freeSubnet(t)
		place = func(i int) (host, gossip string, in []string) {
			host = fmt.Sprintf("%s.%d", subnet, i)
			return host, host + ":7946", nil
		}
	}
	t.Cleanup(func() {
		if dir := os.Getenv("HEADGATE_SYSTEM_LOGS"); dir != "" {
			_ = os.CopyFS(filepath.Join(dir, t.Name()+"-decisions"), os.DirFS(f.logs)) // a convenience
		}
	})
	f.group = newGroupAt(t, 0, policy, place)
	f.http.Timeout = patience // some streams go on for long
	f.http.Transport.(*http.Transport).MaxIdleConnsPerHost = 256
	for range n {
		m := f.add()
		m.env = append(m.env, fmt.Sprintf("HEADGATE_BOOTSTRAP_EXPECT=%d", n))
	}
	f.group.up()
	for name := range limits {
		var k admin.CreatedKey
		if code, apiErr, err := f.call(f.members[0], http.MethodPost, "keys", admin.NewKey{Tenant: name, ID: name}, &k); code != http.StatusOK {
			t.Fatalf("%d %s %v", code, apiErr, err)
		}
		f.keys[name] = k.Key
	}
	f.awaitSame(f.members...)
	return f
}

// add is one more node.
func (f *fleet) add() *member {
	m := f.group.add()
	m.env = append(m.env, "HEADGATE_INSECURE=true", "HEADGATE_DECISION_LOG="+filepath.Join(f.logs, m.name))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.nodes = append(f.nodes, m)
	return m
}

// living are the nodes that serve.
func (f *fleet) living() (out []*member) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.nodes {
		if m.serving.Load() {
			out = append(out, m)
		}
	}
	return out
}

// owner is the member that owns a tenant, as another one says.
func (f *fleet) owner(tenant string, says *member) *member {
	f.t.Helper()
	var own *member
	eventually(f.t, "an owner of "+tenant, func() bool {
		for _, t := range look[[]admin.Tenant](f.group, says, "tenants") {
			if i := slices.IndexFunc(f.members, func(m *member) bool { return m.name == t.Owner }); t.Name == tenant && i >= 0 {
				own = f.members[i]
			}
		}
		return own != nil
	})
	return own
}

// reply to one request.
type reply struct {
	sent, got  int64
	code       int
	error      string // its code
	degraded   string
	retryAfter time.Duration
	err        error
}

// want is what a request asks for: tokens in all, of which 4 are the prompt's, and how long its answer
// streams.
type want struct {
	tokens int64
	ms     int
}

var errorCode = regexp.MustCompile(`"code":"(\w+)"`)

// ask sends one request of a tenant through a node. It may be used from any goroutine.
func (f *fleet) ask(ctx context.Context, m *member, tenant string, w want) (r reply) {
	r.sent = cluster.Now()
	body := fmt.Sprintf(`{"model":"m","prompt":[1,2,3,4],"max_tokens":%d,"stream":%t,"probe":{"tenant":%d,"sent":%d,"for":%d}}`, max(w.tokens-4, 1), w.ms != 0, f.up.number(tenant), r.sent, w.ms)
	defer func() { r.got = cluster.Now() }()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.front+"/v1/completions", strings.NewReader(body))
	if err != nil {
		r.err = err
		return r
	}
	req.Header.Set("Authorization", "Bearer "+f.keys[tenant])
	req.Header.Set("Content-Type", "application/json")
	res, err := f.http.Do(req)
	if err != nil {
		r.err = err
		return r
	}
	defer func() { _ = res.Body.Close() }()
	r.code, r.degraded = res.StatusCode, res.Header.Get("X-Headgate-Degraded")
	if ms, err := strconv.ParseInt(res.Header.Get("retry-after-ms"), 10, 64); err == nil {
		r.retryAfter = time.Duration(ms) * time.Millisecond
	}
	text, err := io.ReadAll(res.Body)
	if err != nil {
		r.err = err
		return r
	}
	if r.code != http.StatusOK {
		if found := errorCode.FindStringSubmatch(string(text)); found != nil {
			r.error = found[1]
		}
	}
	return r
}

// pressure is a load of one tenant: so many requests a second, each through any node that serves,
// whether or not earlier ones were answered.
type pressure struct {
	f      *fleet
	tenant string
	want   want
	cancel context.CancelFunc
	all    sync.WaitGroup
	open   atomic.Int64

	perSecond atomic.Int64

	mu      sync.Mutex
	sent    []int64
	codes   map[string]int
	failed  []string
	excused int
	slowest time.Duration
}

// pressEvery is how often a load sends what is due.
const pressEvery = 10 * time.Millisecond

// press starts one. Its requests may be refused; otherwise they must be answered, unless their
// node ended meanwhile.
func (f *fleet) press(tenant string, perSecond int64, w want) *pressure {
	ctx, cancel := context.WithCancel(f.t.Context())
	p := &pressure{f: f, tenant: tenant, want: w, cancel: cancel, codes: map[string]int{}}
	p.perSecond.Store(perSecond)
	p.all.Go(func() {
		tick := time.NewTicker(pressEvery)
		defer tick.Stop()
		for due := int64(0); ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			nodes := f.living()
			if len(nodes) == 0 {
				continue
			}
			for due += p.perSecond.Load(); due >= int64(time.Second/pressEvery); due -= int64(time.Second / pressEvery) {
				if p.open.Add(1) > maxInFlight {
					p.note(func() { p.failed = append(p.failed, fmt.Sprintf("%d requests are without an answer", maxInFlight)) })
					return
				}
				p.all.Go(func() { defer p.open.Add(-1); p.one(nodes[rand.IntN(len(nodes))]) })
			}
		}
	})
	f.t.Cleanup(p.stop)
	return p
}

func (p *pressure) note(what func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	what()
}

func (p *pressure) one(m *member) {
	life := m.life.Load()
	r := p.f.ask(context.Background(), m, p.tenant, p.want)
	p.note(func() {
		p.sent = append(p.sent, r.sent)
		p.codes[strings.TrimSpace(fmt.Sprint(r.code, " ", r.error))]++
		switch {
		case r.err == nil && (r.code == http.StatusOK || r.code == http.StatusTooManyRequests):
			if m.life.Load() == life {
				p.slowest = max(p.slowest, time.Duration(r.got-r.sent))
			}
		case m.life.Load() != life || !m.serving.Load():
			p.excused++
		default:
			p.failed = append(p.failed, fmt.Sprintf("%s: status %d %s, error %v", m.name, r.code, r.error, r.err))
		}
	})
}

// stop ends the load and waits for its answers.
func (p *pressure) stop() {
	p.cancel()
	p.all.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	slices.Sort(p.sent)
	if len(p.failed) > 0 {
		p.f.t.Errorf("%s: %d of %d requests to living nodes failed; the first: %s", p.tenant, len(p.failed), len(p.sent), strings.Join(p.failed[:min(3, len(p.failed))], "; "))
		p.failed = nil
	}
}

// lasting lets a load go on.
func (f *fleet) lasting(d time.Duration) {
	select {
	case <-time.After(d):
	case <-f.t.Context().Done():
	}
}

// decisions are all that the nodes wrote down, by time. A line that a killed process did not end is
// left out.
func (f *fleet) decisions() (all []taken) {
	f.t.Helper()
	files, err := os.ReadDir(f.logs)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(f.logs, file.Name()))
		if err != nil {
			f.t.Fatal(err)
		}
		lines, err := parseDecisions(file.Name(), string(text), time.Now().UnixNano()-cluster.Now())
		if err != nil {
			f.t.Fatal(err)
		}
		all = append(all, lines...)
	}
	slices.SortStableFunc(all, func(a, b taken) int { return cmp.Compare(a.at, b.at) })
	return all
}

// parseDecisions reads a decision log. Windows are decided by the wall clock, which is ahead by wall.
func parseDecisions(of, text string, wall int64) (all []taken, err error) {
	for line := range strings.Lines(text) {
		if !strings.HasSuffix(line, "\n") {
			break
		}
		parts := strings.Split(strings.TrimSuffix(line, "\n"), ",")
		if len(parts) != 6 {
			return nil, fmt.Errorf("%s: %q is not a decision", of, line)
		}
		at, err1 := strconv.ParseInt(parts[0], 10, 64)
		units, err2 := strconv.ParseInt(parts[4], 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", of, line, err)
		}
		if at > wall/2 && wall > 0 {
			at -= wall
		}
		all = append(all, taken{at: at, units: units, tenant: parts[1], limit: parts[2], subject: parts[3], by: parts[5], of: of})
	}
	return all, nil
}

// clocksApart is how far readings of two processes may be from their order: what a cluster.Clock takes
// for a change of the clock's offset, on both sides.
const clocksApart = 2 * time.Millisecond

// only are the decisions that fit.
func only(all []taken, fits func(t *taken) bool) (out []taken) {
	for i := range all {
		if fits(&all[i]) {
			out = append(out, all[i])
		}
	}
	return out
}

// units sums.
func units(ts []taken) (n int64) {
	for _, t := range ts {
		n += t.units
	}
	return n
}

// conform: over every span what the nodes admitted of a tenant's limit, by their own logs, is within
// times the limit; and so is what came to the model server, as far as that is later.
func (f *fleet) conform(what string, all []taken, tenant, limit string, p pace, cost int64, times *big.Rat) {
	f.t.Helper()
	mine := only(all, func(t *taken) bool { return t.tenant == tenant && t.limit == limit })
	if len(mine) == 0 {
		f.t.Errorf("%s: the decision logs have nothing of %s %s", what, tenant, limit)
		return
	}
	if v := p.worst(mine, clocksApart, times); v.by > 0 {
		f.t.Errorf("%s: %s %s: %.2f more than %v of the limit admitted in %s, %s after the first decision:\n%s", what, tenant, limit, v.by, times,
			seconds(time.Duration(v.to-v.from)), seconds(time.Duration(v.from-mine[0].at)), excerpt(mine, v))
	}
	came := f.up.of(tenant)
	var lag time.Duration
	var at []taken
	for _, a := range came {
		lag = max(lag, time.Duration(a.at-a.sent))
		at = append(at, taken{at: a.at, units: cost})
	}
	v := p.worst(at, lag, times)
	if v.by > 0 {
		f.t.Errorf("%s: %s %s: %.2f more than %v of the limit came to the model server within %s, delays up to %s", what, tenant, limit, v.by, times, seconds(time.Duration(v.to-v.from)), seconds(lag))
	}
	by := map[string]int64{}
	for _, t := range mine {
		by[t.by] += t.units
	}
	f.t.Logf("%s: %s %s: units by who decided %v; %d requests came, delayed by %s at most; in the worst span %.1f below the limit by the logs, %.1f by the model server", what, tenant, limit, by, len(came), seconds(lag), -p.worst(mine, 0, times).by, -v.by)
}

// excerpt sums what was taken in a span by hundredths of a second, node and who decided.
func excerpt(ts []taken, v verdict) string {
	type cell struct {
		slice  int64
		of, by string
	}
	sums, order := map[cell]int64{}, []cell{}
	step := max((v.to-v.from)/20, 1)
	for _, t := range ts {
		if t.at < v.from-2e9 || t.at > v.to {
			continue
		}
		c := cell{(t.at - v.from) / step, t.of, t.by}
		if t.at < v.from {
			c.slice = -1 // before the span
		}
		if _, ok := sums[c]; !ok {
			order = append(order, c)
		}
		sums[c] += t.units
	}
	var b strings.Builder
	for _, c := range order {
		fmt.Fprintf(&b, "  %+8.3f s %s %s %d\n", float64(c.slice*step)/1e9, c.of, c.by, sums[c])
	}
	return tail(b.String(), 4000)
}

// share is what was admitted between two instants of what the ideal bucket admits of the same requests.
func (p *pressure) share(all []taken, limit string, of pace, from, to int64) (ratio float64, got, best int64) {
	for _, t := range all {
		if t.tenant == p.tenant && t.limit == limit && t.at >= from && t.at <= to {
			got += t.units
		}
	}
	p.mu.Lock()
	sent := slices.Sorted(slices.Values(p.sent))
	p.mu.Unlock()
	cost := int64(1)
	if limit == "tokens" {
		cost = p.want.tokens
	}
	for _, at := range of.ideal(sent, cost) {
		if at >= from && at <= to {
			best += cost
		}
	}
	return float64(got) / float64(max(best, 1)), got, best
}

// String says how the load's requests ended.
func (p *pressure) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return fmt.Sprintf("%s: %d sent, %v, %d excused, the slowest answer took %s", p.tenant, len(p.sent), p.codes, p.excused, seconds(p.slowest))
}

// pause is the longest time without an admission after a moment: when it ended.
func pause(all []taken, tenant string, after, until int64) (longest time.Duration, ended int64) {
	last := after
	for _, t := range all {
		if t.tenant != tenant || t.at < after || t.at > until || t.units <= 0 {
			continue
		}
		if d := time.Duration(t.at - last); d > longest {
			longest, ended = d, t.at
		}
		last = t.at
	}
	return longest, ended
}

// total of a metric over its labels that match.
func total(t *testing.T, m *member, name, labels string) (sum float64) {
	t.Helper()
	for _, s := range regexp.MustCompile(`(?m)^`+name+`(?:\{`+labels+`\})? (\S+)$`).FindAllStringSubmatch(get(t, m.admin+"/metrics"), -1) {
		n, err := strconv.ParseFloat(s[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}
