package cache

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const (
	watchMinute = int64(time.Minute)
	watchStart  = 17*watchMinute + 12345
)

// watchRun is a Watch whose alerts are drained every half minute.
type watchRun struct {
	*Watch
	now    int64
	rng    *rand.Rand
	alerts []Alert
}

func newWatchRun() *watchRun {
	return &watchRun{Watch: NewWatch(), now: watchStart, rng: rand.New(rand.NewPCG(1, 2))}
}

// flow is the traffic of one surface.
type flow struct {
	tenant, surface string
	personal        bool
	perMinute       int
	rate            float64 // of hits
	context         func() *Context
}

// pass lets minutes go by.
func (r *watchRun) pass(minutes int, flows ...flow) {
	for range minutes * 2 {
		for i := range flows {
			f := &flows[i]
			for range f.perMinute / 2 {
				e := Event{Tenant: f.tenant, Surface: f.surface, Personal: f.personal, Outcome: "miss", Context: f.context}
				if r.rng.Float64() < f.rate {
					e.Outcome = "exact"
				}
				r.Note(&e, r.now)
			}
		}
		r.now += watchMinute / 2
		r.alerts = append(r.alerts, r.Alerts(r.now)...)
	}
}

// take returns the alerts so far, as words, and forgets them.
func (r *watchRun) take() string {
	var words []string
	for _, a := range r.alerts {
		words = append(words, strings.TrimRight(a.Kind.String()+" "+a.Tenant+"/"+a.Surface, " /"))
	}
	r.alerts = nil
	return strings.Join(words, ", ")
}

func TestWatchCounts(t *testing.T) {
	w := NewWatch()
	note := func(n int, e Event) {
		for range n {
			w.Note(&e, watchStart)
		}
	}
	faq := Event{Tenant: "acme", Surface: "faq"}
	for outcome, n := range map[string]int{
		"exact": 5, "stale": 2, "live": 1, "miss": 7, "partial": 1, "failed": 3, "bypass": 4, "stale_if_error": 2, "refresh": 9, "": 9,
	} {
		e := faq
		e.Outcome = outcome
		if outcome == "exact" {
			e.SavedNanoUSD = 11
		}
		note(n, e)
	}
	note(2, Event{Tenant: "acme", Surface: "faq", Outcome: "uncacheable", Why: "temperature: it is 0.7, and the surface keeps answers up to 0"})
	note(1, Event{Tenant: "acme", Surface: "faq", Outcome: "uncacheable", Why: "answers of this route are not kept"})
	note(3, Event{Tenant: "acme", Surface: "faq", Outcome: "unkept", Why: "length"})
	note(1, Event{Tenant: "Acme", Surface: "faq", Outcome: "exact", Personal: true})
	want := []Line{
		{Tenant: "Acme", Surface: "faq", Personal: true, Requests: 1, Exact: 1, HitRate: 1, Recent: 1, RecentOf: 1},
		{
			Tenant: "acme", Surface: "faq", Requests: 26, Exact: 5, Stale: 2, Live: 1, Misses: 7, Partial: 1, StaleIfError: 2, Failed: 3, Bypass: 4,
			Uncacheable: map[string]int64{"temperature": 2, "answers of this route are not kept": 1}, Unkept: map[string]int64{"length": 3}, SavedNanoUSD: 55,
			HitRate: 0.5, Recent: 0.5, RecentOf: 16,
		},
	}
	if got := w.Snapshot(watchStart); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
	later := w.Snapshot(watchStart + 11*watchMinute)
	if later[1].RecentOf != 0 || later[1].Recent != 0 || later[1].HitRate != 0.5 {
		t.Errorf("eleven minutes later: %+v", later[1])
	}
	if got := fmt.Sprint(w.Surfaces(watchStart, 5), w.Surfaces(watchStart, 0)); got != "[{faq 9 17}] [{other 9 17}]" {
		t.Errorf("surfaces: %s", got)
	}
}

// TestWatchWindows holds the bins to a list of all that was noted.
func TestWatchWindows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := NewWatch()
		now := rapid.Int64Range(-200*watchMinute, 200*watchMinute).Draw(t, "start")
		type seen struct {
			minute int64
			tally
		}
		var all []seen
		floor := func(now int64) int64 { // otherwise than binOf does
			m := int64(-10_000)
			return m + (now-m*watchMinute)/watchMinute
		}
		steps := rapid.IntRange(1, 60).Draw(t, "steps")
		for range steps {
			now += rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, watchMinute), rapid.Int64Range(0, 20*watchMinute), rapid.Int64Range(0, 200*watchMinute)).Draw(t, "later")
			outcome := rapid.SampledFrom([]string{"exact", "stale", "live", "semantic", "miss", "partial", "failed", "bypass", "uncacheable", "stale_if_error"}).Draw(t, "outcome")
			w.Note(&Event{Tenant: "t", Surface: "s", Outcome: outcome}, now)
			s := seen{floor(now), tally{lookups: 1}}
			switch outcome {
			case "exact", "stale", "live", "semantic":
				s.hits = 1
			case "partial":
				s.partial = 1
			case "miss":
			default:
				s.lookups = 0
			}
			all = append(all, s)
			at := now + rapid.SampledFrom([]int64{0, 0, watchMinute, 9 * watchMinute, 71 * watchMinute}).Draw(t, "looked at")
			var recent, earlier tally
			for _, s := range all {
				switch age := floor(at) - s.minute; {
				case age < 10:
					recent = recent.plus(s.tally)
				case age < 70:
					earlier = earlier.plus(s.tally)
				}
			}
			shard, p := w.find(watchName{"t", "s"}, at)
			gotRecent, gotEarlier := p.windows(at)
			shard.mu.Unlock()
			if gotRecent != recent || gotEarlier != earlier {
				t.Fatalf("%+v and %+v, want %+v and %+v", gotRecent, gotEarlier, recent, earlier)
			}
		}
	})
}

// TestWatchLate: clocks of concurrent requests are read in any order.
func TestWatchLate(t *testing.T) {
	w := NewWatch()
	for _, minute := range []int64{100, 99, 30, -50, 100} {
		w.Note(&Event{Tenant: "t", Surface: "s", Outcome: "exact"}, minute*watchMinute)
	}
	if l := w.Snapshot(99 * watchMinute)[0]; l.RecentOf != 5 || l.Exact != 5 {
		t.Errorf("%+v", l)
	}
}

func TestAlertDrop(t *testing.T) {
	r := newWatchRun()
	faq := flow{tenant: "acme", surface: "faq", perMinute: 60, rate: 0.6}
	low := faq
	low.rate = 0.1
	r.pass(90, faq)
	if got := r.take(); got != "" {
		t.Fatalf("a steady rate: %s", got)
	}
	r.pass(10, low)
	if len(r.alerts) != 1 || r.alerts[0].Parts != nil || r.alerts[0].Before < 0.5 || r.alerts[0].Rate > 0.3 ||
		!strings.HasPrefix(r.alerts[0].Text, `the hit rate of surface "faq" of tenant "acme" has dropped: `) {
		t.Fatalf("%+v", r.alerts)
	}
	if l := r.Snapshot(r.now)[0]; fmt.Sprint(l.Alerts) != "[drop]" {
		t.Errorf("the line has %v", l.Alerts)
	}
	r.take()
	r.pass(240, low)
	if got := r.take(); got != "" {
		t.Errorf("told again: %s", got)
	}
	if l := r.Snapshot(r.now)[0]; l.Alerts != nil {
		t.Errorf("the rate has been what it is for hours, and the line has %v", l.Alerts)
	}
	r.pass(90, faq)
	if got := r.take(); got != "" {
		t.Errorf("it rose on a surface that is not personal: %s", got)
	}
	r.pass(20, low)
	if got := r.take(); got != "drop acme/faq" {
		t.Errorf("another drop: %q", got)
	}
}

func TestAlertLeasts(t *testing.T) {
	for name, c := range map[string]struct {
		before, after flow
		want          string
	}{
		"few before":    {flow{perMinute: 2, rate: 1}, flow{perMinute: 100}, ""},
		"few after":     {flow{perMinute: 8, rate: 1}, flow{perMinute: 8}, ""},
		"just enough":   {flow{perMinute: 6, rate: 1}, flow{perMinute: 12}, "drop t/s"},
		"not half":      {flow{perMinute: 60, rate: 0.6}, flow{perMinute: 60, rate: 0.4}, ""},
		"may be chance": {flow{perMinute: 60, rate: 0.02}, flow{perMinute: 12}, ""},
		"none at all":   {flow{perMinute: 60, rate: 0.6}, flow{}, ""},
	} {
		r := newWatchRun()
		c.before.tenant, c.before.surface, c.after.tenant, c.after.surface = "t", "s", "t", "s"
		r.pass(60, c.before)
		if got := r.take(); got != "" {
			t.Errorf("%s: before: %s", name, got)
		}
		r.pass(10, c.after)
		if got := r.take(); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestAlertJudge(t *testing.T) {
	const ten, personal = 10 * watchMinute, true
	for _, c := range []struct {
		kind            AlertKind
		recent, earlier tally
		personal        bool
		after           int64
		want            verdict
	}{
		{AlertDrop, tally{100, 10, 0}, tally{300, 180, 0}, false, ten, wrong},
		{AlertDrop, tally{99, 10, 0}, tally{300, 180, 0}, false, ten, unclear},
		{AlertDrop, tally{100, 10, 0}, tally{299, 180, 0}, false, ten, unclear},
		{AlertDrop, tally{100, 35, 0}, tally{300, 180, 0}, false, ten, unclear},
		{AlertDrop, tally{100, 44, 0}, tally{300, 180, 0}, false, ten, unclear},
		{AlertDrop, tally{100, 45, 0}, tally{300, 180, 0}, false, ten, right},
		{AlertDrop, tally{100, 10, 35}, tally{300, 0, 180}, false, ten, right}, // partial ones count
		{AlertDrop, tally{100, 0, 0}, tally{300, 30, 0}, false, ten, unclear},  // 3.3 sigmas
		{AlertDrop, tally{1_000, 0, 0}, tally{3_000, 300, 0}, false, ten, wrong},
		{AlertDrop, tally{100, 0, 0}, tally{300, 0, 0}, false, ten, right},
		{AlertRise, tally{100, 21, 0}, tally{300, 19, 0}, personal, ten, unclear}, // 3.9 sigmas
		{AlertRise, tally{1_000, 210, 0}, tally{3_000, 190, 0}, personal, ten, wrong},
		{AlertRise, tally{1_000, 210, 0}, tally{3_000, 190, 0}, !personal, ten, right},
		{AlertRise, tally{1_000, 190, 0}, tally{3_000, 30, 0}, personal, ten, unclear}, // below 20 %
		{AlertRise, tally{1_000, 800, 0}, tally{3_000, 900, 0}, personal, ten, unclear},
		{AlertRise, tally{1_000, 400, 0}, tally{3_000, 900, 0}, personal, ten, right},
		{AlertRise, tally{1_000, 99, 0}, tally{3_000, 30, 0}, personal, ten, right},
		{AlertNever, tally{500, 2, 0}, tally{}, false, ten, wrong},
		{AlertNever, tally{100, 1, 0}, tally{400, 1, 0}, false, ten, wrong},
		{AlertNever, tally{499, 0, 0}, tally{}, false, ten, unclear},
		{AlertNever, tally{500, 0, 0}, tally{}, false, ten - 1, unclear},
		{AlertNever, tally{500, 3, 0}, tally{}, false, ten, unclear},
		{AlertNever, tally{500, 5, 0}, tally{}, false, ten, right},
		{AlertNever, tally{500, 0, 5}, tally{}, false, ten, right},
	} {
		if got := c.kind.judge(c.recent, c.earlier, c.personal, c.after); got != c.want {
			t.Errorf("%s of %v after %v: %d, want %d", c.kind, c.recent, c.earlier, got, c.want)
		}
	}
}

// TestAlertNoise: rates that stay the same, whatever they are, alert nobody in a day.
func TestAlertNoise(t *testing.T) {
	r := newWatchRun()
	var flows []flow
	for i := range 20 {
		flows = append(flows, flow{tenant: "t", surface: fmt.Sprint(i), personal: i%2 == 0, perMinute: 14, rate: 0.02 + 0.049*float64(i)})
	}
	r.pass(24*60, flows...)
	if got := r.take(); got != "" {
		t.Errorf("alerts for nothing: %s", got)
	}
}

// TestAlertSwings: a rate that goes up and down alerts no more than once an hour.
func TestAlertSwings(t *testing.T) {
	r := newWatchRun()
	up, down := flow{tenant: "t", surface: "s", personal: true, perMinute: 100, rate: 0.8}, flow{tenant: "t", surface: "s", personal: true, perMinute: 100, rate: 0.02}
	for range 18 {
		r.pass(20, up)
		r.pass(20, down)
	}
	count := map[AlertKind]int{}
	for _, a := range r.alerts {
		count[a.Kind]++
	}
	if count[AlertDrop] < 2 || count[AlertDrop] > 12 || count[AlertRise] > 12 || count[AlertNever] > 0 {
		t.Errorf("in twelve hours: %v", count)
	}
}

func TestAlertNever(t *testing.T) {
	r := newWatchRun()
	never := flow{tenant: "acme", surface: "faq", perMinute: 100}
	r.pass(9, never)
	if got := r.take(); got != "" {
		t.Errorf("nothing can be a hit at first: %s", got)
	}
	r.pass(2, never)
	if got := r.take(); got != "never acme/faq" {
		t.Errorf("%q", got)
	}
	r.pass(24*60, never)
	if got := r.take(); got != "" {
		t.Errorf("told again: %s", got)
	}
	r.pass(6*24*60, never)
	if got := r.take(); got != "never acme/faq" {
		t.Errorf("a week later: %q", got)
	}
	some := never
	some.rate = 0.05
	r.pass(60, some)
	if l := r.Snapshot(r.now)[0]; l.Alerts != nil {
		t.Errorf("it is over, and the line has %v", l.Alerts)
	}
	r.pass(120, never)
	if got := r.take(); got != "drop acme/faq, never acme/faq" {
		t.Errorf("anew: %q", got)
	}
	quiet := newWatchRun()
	quiet.pass(120, flow{tenant: "t", surface: "s", perMinute: 6})
	if got := quiet.take(); got != "" {
		t.Errorf("420 requests in 70 minutes: %s", got)
	}
	for range 100 {
		for range 20 {
			quiet.Note(&Event{Tenant: "t", Surface: "embed", Outcome: "partial"}, quiet.now)
		}
		quiet.pass(1)
	}
	if got := quiet.take(); got != "" {
		t.Errorf("of each request some inputs were kept: %s", got)
	}
}

func TestAlertRise(t *testing.T) {
	for _, personal := range []bool{true, false} {
		r := newWatchRun()
		mail := flow{tenant: "acme", surface: "mail", personal: personal, perMinute: 30, rate: 0.05}
		r.pass(70, mail)
		mail.rate = 0.7
		r.pass(180, mail)
		want := ""
		if personal {
			want = "rise acme/mail"
			if len(r.alerts) == 1 && (!strings.Contains(r.alerts[0].Text, "user") || r.alerts[0].Parts != nil) {
				t.Errorf("%+v", r.alerts[0])
			}
		}
		if got := r.take(); got != want {
			t.Errorf("personal %v: %q, want %q", personal, got, want)
		}
	}
}

// TestAlertStorm: what goes wrong everywhere is told of as one.
func TestAlertStorm(t *testing.T) {
	r := newWatchRun()
	flows := make([]flow, 300)
	for i := range flows {
		flows[i] = flow{tenant: fmt.Sprintf("t%03d", i), surface: "s", perMinute: 30, rate: 0.7}
	}
	r.pass(60, flows...)
	if got := r.take(); got != "" {
		t.Fatal(got)
	}
	for i := range flows {
		flows[i].rate = 0.05
	}
	r.pass(59, flows...)
	drops, text := 0, []string{}
	for _, a := range r.alerts {
		switch {
		case a.Tenant != "":
			drops++
		default:
			text = append(text, a.Text)
		}
	}
	if drops != maxAnHour || len(text) != 1 || !strings.Contains(text[0], "more surfaces has dropped, among them \"s\" of tenant \"t") {
		t.Errorf("%d drops and %q", drops, text)
	}
	r.take()
	r.pass(10)
	if len(r.alerts) != 1 || r.alerts[0].Tenant != "" { // those that came after the first of these
		t.Errorf("an hour later: %+v", r.alerts)
	}
	open := 0
	for _, l := range r.Snapshot(r.now) {
		if slices.Contains(l.Alerts, AlertDrop) {
			open++
		}
	}
	if open < len(flows)/2 { // some are over
		t.Errorf("%d of %d lines show it", open, len(flows))
	}
}

// watchedContext is a request with one of so many questions.
func watchedContext(questions int, rng *rand.Rand) *Context {
	return &Context{
		Tenant: "acme", Surface: "faq", Model: "m", Path: "/v1/chat/completions", Backends: []string{"b"}, Header: []string{"Anthropic-Version: 2023-06-01"},
		Body: fmt.Appendf(nil, `{"model":"m","temperature":0,"messages":[{"role":"system","content":"Answer in French."},{"role":"user","content":"question %d"}]}`, rng.IntN(questions)),
	}
}

func TestAlertNamesParts(t *testing.T) {
	in := func(old, add string) func(*Context, uint64) {
		return func(c *Context, n uint64) {
			c.Body = []byte(strings.Replace(string(c.Body), old, old+fmt.Sprintf(add, n), 1))
		}
	}
	for name, c := range map[string]struct {
		questions int
		change    func(c *Context, n uint64)
		want      []string
		text      string
	}{
		"a random header":              {3, func(c *Context, n uint64) { c.Header = append(c.Header, fmt.Sprintf("X-Trace: %d", n)) }, []string{`header "X-Trace"`}, `differ most often in header "X-Trace": `},
		"a time in the system message": {3, in("French.", " It is %d."), []string{"body.messages[0]"}, "differ most often in body.messages[0]: "},
		"a field":                      {3, in(`"temperature":0`, `,"seed":%d`), []string{"body.seed"}, "in body.seed: "},
		"a field of odd name":          {3, in(`"temperature":0`, `,"the odd %d":1`), []string{sampleOdd}, sampleOdd},
		"a user":                       {3, func(c *Context, n uint64) { c.User = fmt.Sprint(n) }, []string{"user"}, "in user: "},
		"a question never asked twice": {1e9, func(*Context, uint64) {}, []string{"body.messages[1]"}, "in body.messages[1]: "},
		"both":                         {1e9, in("French.", " It is %d."), []string{"body.messages[0]", "body.messages[1]"}, ""},
		"nothing":                      {1, func(*Context, uint64) {}, nil, "are the same request: its answers are not kept"},
	} {
		r := newWatchRun()
		r.pass(12, flow{tenant: "acme", surface: "faq", perMinute: 120, context: func() *Context {
			k := watchedContext(c.questions, r.rng)
			c.change(k, r.rng.Uint64())
			return k
		}})
		if len(r.alerts) != 1 || r.alerts[0].Kind != AlertNever || !slices.Equal(r.alerts[0].Parts, c.want) || !strings.Contains(r.alerts[0].Text, c.text) {
			t.Errorf("%s: %+v", name, r.alerts)
		}
	}
}

// TestAlertUnkept: it is not the key where answers are not kept.
func TestAlertUnkept(t *testing.T) {
	for n, want := range map[int]string{45: "; most answers are not kept: timestamps", 15: "; those that were sampled differ"} {
		r := newWatchRun()
		for range 12 {
			for i := range n {
				r.Note(&Event{Tenant: "t", Surface: "s", Outcome: "unkept", Why: []string{"tools", "timestamps", "timestamps"}[i%3]}, r.now)
			}
			r.pass(1, flow{tenant: "t", surface: "s", perMinute: 60, context: func() *Context { return watchedContext(1e9, r.rng) }})
		}
		if len(r.alerts) != 1 || !strings.Contains(r.alerts[0].Text, want) {
			t.Errorf("%+v", r.alerts)
		}
	}
}

// TestSamples: one miss in 64 is looked at, a body that is not JSON or too long is none, and old ones go.
func TestSamples(t *testing.T) {
	r := newWatchRun()
	asked := 0
	f := flow{tenant: "t", surface: "s", perMinute: 640, context: func() *Context {
		asked++
		return watchedContext(9, r.rng)
	}}
	r.pass(1, f)
	if p := r.shardOf("t", "s").pairs[watchName{"t", "s"}]; asked != 10 || len(p.samples) != 10 {
		t.Errorf("640 misses: %d looked at, %d kept", asked, len(p.samples))
	}
	r.pass(5, f)
	if n := r.samples.Load(); n != maxPairSamples {
		t.Errorf("%d samples", n)
	}
	for _, s := range r.shardOf("t", "s").pairs[watchName{"t", "s"}].samples {
		if s.at < r.now-2*watchMinute { // ten come in a minute, and sixteen are kept
			t.Errorf("a sample of %d minutes ago was not replaced", (r.now-s.at)/watchMinute)
		}
	}
	one := newWatchRun()
	asked = 0
	for n := range 2*sampleEvery - 1 {
		one.Note(&Event{Outcome: "miss", Context: f.context}, one.now)
		if want := (n + 1) / sampleEvery; asked != want {
			t.Fatalf("%d looked at after %d misses", asked, n+1)
		}
	}
	r.pass(80)
	if n := r.samples.Load(); n != 0 {
		t.Errorf("%d samples more than an hour later", n)
	}
	for _, body := range []string{"{", `{"messages":[` + strings.Repeat(" ", maxSampleBody) + `]}`} {
		if parts := sampleKey(r.seed, &Context{Body: []byte(body)}); parts != nil {
			t.Errorf("%.20s: %d parts", body, len(parts))
		}
	}
	if sampleKey(r.seed, nil) != nil {
		t.Error("of nothing")
	}
	many := &Context{Body: []byte(`{"messages":[` + strings.Repeat(`{"role":"user","content":"a"},`, 500) + `{}],"zz":1}`)}
	first := sampleKey(r.seed, many)
	many.Body = []byte(strings.Replace(string(many.Body), `"zz":1`, `"zz":2`, 1))
	diff := sampleDiff(nil, first, sampleKey(r.seed, many))
	if len(first) > maxSampleParts || len(diff) != 1 || diff[0].name.Value() != sampleRest {
		t.Errorf("%d parts, differing in %v", len(first), diff)
	}
}

// shardOf is the shard of a pair.
func (w *Watch) shardOf(tenant, surface string) *watchShard {
	for i := range w.shards {
		if w.shards[i].pairs[watchName{tenant, surface}] != nil {
			return &w.shards[i]
		}
	}
	return &w.rest
}

// TestWatchFlood: any number of tenants, reasons and samples takes bounded room; what is not
// counted apart is counted, and room is made once somebody is not asked for any more.
func TestWatchFlood(t *testing.T) {
	r := newWatchRun()
	for i := range maxWatched + 5_000 {
		r.Note(&Event{Tenant: fmt.Sprint("t", i), Surface: "s", Outcome: "exact", SavedNanoUSD: 1}, r.now)
	}
	lines := r.Snapshot(r.now)
	rest := lines[len(lines)-1]
	if len(lines) != maxWatched+1 || rest.Tenant != OtherWatched || rest.Surface != OtherWatched || rest.Exact != 5_000 || rest.SavedNanoUSD != 5_000 {
		t.Errorf("%d lines, the last %+v", len(lines), rest)
	}
	if got := fmt.Sprint(r.Surfaces(r.now, 5)); got != fmt.Sprintf("[{s %d %d} {other 5000 5000}]", maxWatched, maxWatched) {
		t.Error(got)
	}
	for i := range 1_000 {
		r.Note(&Event{Tenant: "t1", Surface: "s", Outcome: "uncacheable", Why: fmt.Sprint("reason ", i, ": x")}, r.now)
	}
	r.Note(&Event{Tenant: "t1", Surface: "s", Outcome: "unkept", Why: "tools"}, r.now)
	long := strings.Repeat("é", 100)
	r.Note(&Event{Tenant: "t2", Surface: "s", Outcome: "uncacheable", Why: long}, r.now)
	for _, l := range r.Snapshot(r.now) {
		if n := l.Uncacheable[OtherWatched]; l.Tenant == "t1" && (len(l.Uncacheable) != maxWhys+1 || n != 1_000-maxWhys) {
			t.Errorf("%d reasons, %d others", len(l.Uncacheable), n)
		}
		if l.Tenant == "t2" && l.Uncacheable[long[:maxWhy]] != 1 {
			t.Errorf("%v", l.Uncacheable)
		}
	}
	r.now += 69 * watchMinute
	r.Note(&Event{Tenant: "t3", Surface: "s", Outcome: "exact", SavedNanoUSD: 1}, r.now)
	r.pass(5)
	lines = r.Snapshot(r.now)
	if len(lines) != 2 || lines[0].Tenant != "t3" || lines[1].Exact != maxWatched+5_000-1 || lines[1].SavedNanoUSD != maxWatched+5_000-1 || lines[1].Unkept["tools"] != 1 || lines[1].Uncacheable[OtherWatched] < 900 {
		t.Errorf("%d lines: %.300v", len(lines), lines)
	}
	for i := range 2_000 {
		s, p := r.find(watchName{fmt.Sprint("u", i), "s"}, r.now)
		for range 5 {
			r.keepSample(p, keySample{at: r.now})
		}
		s.mu.Unlock()
	}
	kept := 0
	r.each(func(p *watched) bool {
		kept += len(p.samples)
		return false
	})
	if n := r.samples.Load(); n != maxSamples || kept != maxSamples {
		t.Errorf("%d samples, %d of them counted", kept, n)
	}
}

func TestWatchAllocates(t *testing.T) {
	w := NewWatch()
	asked := &Context{Body: []byte("{")}
	for name, e := range map[string]*Event{
		"a hit":            {Tenant: "t", Surface: "s", Outcome: "exact", SavedNanoUSD: 5, Personal: true},
		"a miss":           {Tenant: "t", Surface: "s", Outcome: "miss", Context: func() *Context { return asked }},
		"a known reason":   {Tenant: "t", Surface: "s", Outcome: "uncacheable", Why: "n: several answers are wanted"},
		"a further minute": {Tenant: "t", Surface: "s", Outcome: "live"},
	} {
		now := watchStart
		w.Note(e, now)
		if n := testing.AllocsPerRun(50, func() { // fewer than one miss in 64
			now += watchMinute / 2
			w.Note(e, now)
		}); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

func TestWatchConcurrently(t *testing.T) {
	w := NewWatch()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			for k := range 2_000 {
				w.Note(&Event{
					Tenant: fmt.Sprint(k % 3), Surface: fmt.Sprint(k % 2), Outcome: []string{"miss", "miss", "exact", "uncacheable"}[k%4], Why: "n",
					Context: func() *Context { return watchedContext(3, rng) },
				}, watchStart+int64(k)*watchMinute/100)
				if k%100 == i {
					w.Snapshot(watchStart)
					w.Alerts(watchStart + int64(k)*watchMinute)
					w.Surfaces(watchStart, 1)
				}
			}
		})
	}
	wg.Wait()
	sum := int64(0)
	for _, l := range w.Snapshot(watchStart) {
		sum += l.Requests
	}
	if sum != 16_000 {
		t.Errorf("%d of 16,000 requests were counted", sum)
	}
}

// holds says where in v, to any depth, there is a text that has one of words in it.
func holds(v reflect.Value, path string, words []string, met map[uintptr]bool) string {
	has := func(s string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(s, w) })
	}
	switch v.Kind() {
	case reflect.String:
		if has(v.String()) {
			return path
		}
	case reflect.Pointer:
		if v.IsNil() || met[v.Pointer()] {
			return ""
		}
		met[v.Pointer()] = true
		return holds(v.Elem(), path, words, met)
	case reflect.Interface:
		return holds(v.Elem(), path, words, met)
	case reflect.Struct:
		for i := range v.NumField() {
			if at := holds(v.Field(i), path+"."+v.Type().Field(i).Name, words, met); at != "" {
				return at
			}
		}
	case reflect.Map:
		for it := v.MapRange(); it.Next(); {
			if at := holds(it.Key(), path+"[key]", words, met) + holds(it.Value(), path+"[]", words, met); at != "" {
				return at
			}
		}
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			var b strings.Builder
			if v.Kind() == reflect.Slice {
				v = v.Slice3(0, v.Cap(), v.Cap()) // what was there before, too
			}
			for i := range v.Len() {
				b.WriteByte(byte(v.Index(i).Uint()))
			}
			if has(b.String()) {
				return path
			}
			return ""
		}
		for i := range v.Len() {
			if at := holds(v.Index(i), path, words, met); at != "" {
				return at
			}
		}
	}
	return ""
}

// TestWatchKeepsNoContent looks for a request's text, values and headers in everything that is kept
// of it, and in what is said of it.
func TestWatchKeepsNoContent(t *testing.T) {
	r := newWatchRun()
	r.pass(12, flow{tenant: "acme", surface: "faq", perMinute: 200, context: func() *Context {
		return &Context{
			Tenant: "acme", User: "classified-user", Header: []string{"X-Trace: classified-header"}, Query: "q=classified-query",
			Body: fmt.Appendf(nil, `{"classified member":1,"seed":%d,"messages":[{"role":"system","content":"classified system"},{"role":"user","content":"classified text, and quite a lot of it: %s"}],"tools":[{"classified":"tool"}]}`,
				r.rng.Uint64(), strings.Repeat("long ", 100)),
		}
	}})
	if len(r.alerts) != 1 || len(r.alerts[0].Parts) == 0 || r.samples.Load() == 0 {
		t.Fatalf("%+v", r.alerts)
	}
	for _, v := range []any{r.Watch, r.alerts, r.Snapshot(r.now)} {
		if at := holds(reflect.ValueOf(v), "", []string{"classified"}, map[uintptr]bool{}); at != "" {
			t.Errorf("content in %T%s", v, at)
		}
	}
	r.shardOf("acme", "faq").pairs[watchName{"acme", "faq"}].name.tenant = "classified"
	if holds(reflect.ValueOf(r.Watch), "", []string{"classified"}, map[uintptr]bool{}) == "" {
		t.Error("this test finds nothing")
	}
}

func BenchmarkWatchNote(b *testing.B) {
	w := NewWatch()
	e := &Event{Tenant: "acme", Surface: "faq", Outcome: "exact", SavedNanoUSD: 5}
	b.ReportAllocs()
	for i := int64(0); b.Loop(); i++ {
		w.Note(e, i*1_000)
	}
}
