package lease_test

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headgate/lease"
	"headgate/limiter"

	"pgregory.net/rapid"
)

const start = int64(1_788_111_222_333_444_555)

func newLocal(t rapid.TB, c lease.Config) *lease.Local {
	t.Helper()
	l, err := lease.NewLocal(c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

var (
	perMinute = limiter.Rate{Count: 10, Per: time.Minute}
	gcra      = &limiter.Limit{Rate: perMinute, Burst: 10}
	fixed     = &limiter.Limit{Algorithm: limiter.FixedWindow, Rate: perMinute}
	sliding   = &limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: perMinute}
	slidelog  = &limiter.Limit{Algorithm: limiter.SlidingLog, Rate: perMinute}
	slots     = &limiter.Limit{Algorithm: limiter.Semaphore, Burst: 10}
	every     = []*limiter.Limit{gcra, fixed, sliding, slidelog, slots}
)

func charge(tenant, name, subject string, l *limiter.Limit, cost int64) limiter.Charge {
	return limiter.Charge{Key: limiter.Key{Tenant: tenant, Limit: name, Subject: subject}, Limit: l, Cost: cost}
}

func level(l *lease.Local, now int64, c limiter.Charge) int64 {
	var ds [1]limiter.Decision
	c.Cost = 0
	l.Peek(now, []limiter.Charge{c}, ds[:])
	return ds[0].Remaining
}

func TestAllOrNothing(t *testing.T) {
	l := newLocal(t, lease.Config{})
	var ds [4]limiter.Decision
	cs := []limiter.Charge{
		charge("acme", "tokens", "", gcra, 4),
		charge("", "model", "llama", fixed, 4),
		charge("acme", "slots", "k1", slots, 1),
		charge("acme", "day", "", sliding, 6),
	}
	if refused := l.Take(start, cs, ds[:]); refused != -1 || ds[0].Remaining != 6 || ds[3].Remaining != 4 {
		t.Fatal(refused, ds)
	}
	again := slices.Clone(cs)
	if refused := l.Take(start, again, ds[:]); refused != 3 {
		t.Fatal(refused, ds)
	}
	for i, want := range []int64{6, 6, 9, 4} {
		if got := level(l, start, cs[i]); got != want || ds[i].Remaining != want || ds[i].Admitted != (i != 3) || again[i].At != limiter.NotTaken {
			t.Errorf("charge %d: %d left, want %d; decision %+v, at %d", i, got, want, ds[i], again[i].At)
		}
	}
	// What was refused settles as nothing, what was taken settles once.
	l.Settle(start, again, make([]int64, 4), ds[:])
	for range 2 {
		l.Settle(start, cs, []int64{1, 4, 0, 9}, ds[:])
		for i, want := range []int64{9, 6, 10, 1} {
			if ds[i].Remaining != want {
				t.Errorf("charge %d: %d left after settling, want %d", i, ds[i].Remaining, want)
			}
		}
	}
}

func TestTheLongestWaitIsNamed(t *testing.T) {
	l := newLocal(t, lease.Config{})
	slow := &limiter.Limit{Rate: limiter.Rate{Count: 1, Per: time.Hour}, Burst: 10}
	cs := []limiter.Charge{charge("a", "x", "", gcra, 10), charge("a", "y", "", slow, 10), charge("a", "z", "", gcra, 10)}
	var ds [3]limiter.Decision
	if refused := l.Take(start, cs, ds[:]); refused != -1 {
		t.Fatal(refused)
	}
	if refused := l.Take(start, cs, ds[:]); refused != 1 || ds[1].RetryAfter != 10*time.Hour || ds[0].RetryAfter != time.Minute {
		t.Fatal(refused, ds)
	}
	if refused := l.Take(start+int64(10*time.Hour), cs, ds[:]); refused != -1 {
		t.Fatal(refused, ds)
	}
}

func TestShadowNeverRefusesAndIsNotRefunded(t *testing.T) {
	l := newLocal(t, lease.Config{})
	var ds [2]limiter.Decision
	shadow := charge("a", "shadow", "", gcra, 8)
	shadow.Shadow = true
	first := []limiter.Charge{shadow, charge("a", "real", "", fixed, 1)}
	second := slices.Clone(first)
	if refused := l.Take(start, first, ds[:]); refused != -1 || !ds[0].Admitted {
		t.Fatal(refused, ds)
	}
	if refused := l.Take(start, second, ds[:]); refused != -1 || ds[0].Admitted || second[0].At != limiter.NotTaken || ds[1].Remaining != 8 {
		t.Fatal(refused, ds, second)
	}
	l.Settle(start, second, []int64{0, 0}, ds[:])
	if ds[0].Remaining != 2 || ds[1].Remaining != 9 {
		t.Error("a shadow charge that was not taken was refunded", ds)
	}
	l.Settle(start, first, []int64{0, 0}, ds[:])
	if ds[0].Remaining != 10 || ds[1].Remaining != 10 {
		t.Error(ds)
	}
}

func TestDuplicateKeysCountTogether(t *testing.T) {
	for _, limit := range every {
		l := newLocal(t, lease.Config{})
		var ds [2]limiter.Decision
		twice := func(a, b int64) []limiter.Charge {
			return []limiter.Charge{charge("a", "l", "", limit, a), charge("a", "l", "", limit, b)}
		}
		if refused := l.Take(start, twice(6, 5), ds[:]); refused != 1 || l.Len() != 0 {
			t.Errorf("%v: 11 of 10: refused %d, %d buckets", limit.Algorithm, refused, l.Len())
		}
		if refused := l.Peek(start, twice(6, 5), ds[:]); refused != 1 {
			t.Errorf("%v: 11 of 10 peeked: refused %d", limit.Algorithm, refused)
		}
		if refused := l.Take(start, twice(6, 4), ds[:]); refused != -1 || ds[1].Remaining != 0 {
			t.Errorf("%v: 10 of 10: refused %d, %+v", limit.Algorithm, refused, ds)
		}
	}
}

func TestNewerLimitsBind(t *testing.T) {
	at := func(rev uint64, burst int64) *limiter.Limit {
		return &limiter.Limit{Rate: perMinute, Burst: burst, Revision: rev}
	}
	l := newLocal(t, lease.Config{})
	var ds [1]limiter.Decision
	for _, step := range []struct {
		limit           *limiter.Limit
		cost, remaining int64
		refused         int
	}{
		{at(2, 10), 8, 2, -1},
		{at(3, 20), 0, 12, -1},  // raised: at once, and what was spent stays spent
		{at(2, 10), 12, 0, -1},  // an older policy's request meets the newer limit
		{at(3, 10), 0, 0, -1},   // the same revision is the same policy
		{at(4, 15), 1, -5, 0},   // lowered: likewise
		{at(5, 15), 0, -5, -1},  // a new revision of the same limit
		{at(6, 100), 80, 0, -1}, // raised again
	} {
		refused := l.Take(start, []limiter.Charge{charge("a", "l", "", step.limit, step.cost)}, ds[:])
		if refused != step.refused || ds[0].Remaining != step.remaining {
			t.Errorf("%+v cost %d: refused %d, %+v", *step.limit, step.cost, refused, ds[0])
		}
	}
}

// A charge taken as tokens must not give slots back.
func TestUnitsDoNotCrossIntoSlots(t *testing.T) {
	l := newLocal(t, lease.Config{})
	var ds [1]limiter.Decision
	tokens := []limiter.Charge{charge("a", "l", "", gcra, 9)}
	l.Take(start, tokens, ds[:])
	newer := *slots
	newer.Revision = 1
	held := []limiter.Charge{charge("a", "l", "", &newer, 10)}
	if refused := l.Take(start, held, ds[:]); refused != -1 {
		t.Fatal(refused)
	}
	if l.Settle(start, tokens, []int64{0}, ds[:]); ds[0].Remaining != 0 {
		t.Error("tokens came back as slots", ds)
	}
	if l.Settle(start, held, []int64{0}, ds[:]); ds[0].Remaining != 10 {
		t.Error(ds)
	}
}

func TestTableIsBounded(t *testing.T) {
	l := newLocal(t, lease.Config{Shards: 4, MaxBuckets: 100})
	var ds [2]limiter.Decision
	now := start
	take := func(subject int, cost int64) int {
		return l.Take(now, []limiter.Charge{charge("", "l", fmt.Sprint(subject), gcra, cost)}, ds[:])
	}
	for i := range 1000 {
		if refused := take(i, 11); refused != 0 {
			t.Fatal(refused)
		}
	}
	if l.Len() != 0 {
		t.Errorf("refused requests left %d buckets", l.Len())
	}
	for i := range 100 {
		if refused := take(i, 1); refused != -1 {
			t.Fatal(i, refused)
		}
	}
	if refused := take(100, 1); refused != lease.TableFull {
		t.Error("the 101st bucket was not refused:", refused)
	}
	shadow := charge("", "l", "100", gcra, 1)
	shadow.Shadow = true
	pair := []limiter.Charge{shadow, charge("", "l", "7", gcra, 1)}
	if refused := l.Take(now, pair, ds[:]); refused != -1 || pair[0].At != limiter.NotTaken || pair[1].At != now {
		t.Error("a shadow charge refused for lack of room:", refused, pair)
	}
	now += int64(6 * time.Second)
	if refused := take(100, 1); refused != -1 {
		t.Error("full buckets kept a new one out:", refused)
	}
	if n := l.Len(); n != 2 {
		t.Errorf("%d buckets, want the one in use and the new one", n)
	}
}

// Debt is not dropped for want of a bucket.
func TestLateDebtMakesItsBucket(t *testing.T) {
	l := newLocal(t, lease.Config{MaxBuckets: 1})
	var ds [1]limiter.Decision
	cs := []limiter.Charge{charge("a", "l", "", gcra, 5)}
	l.Take(start, cs, ds[:])
	later := start + int64(time.Hour)
	if n := l.Sweep(later, 1000); n != 1 || l.Len() != 0 {
		t.Fatal(n, l.Len())
	}
	l.Take(later, []limiter.Charge{charge("b", "l", "", gcra, 1)}, ds[:])
	if l.Settle(later, cs, []int64{25}, ds[:]); ds[0].Remaining != -10 || l.Len() != 2 {
		t.Error(ds, l.Len())
	}
}

func TestConfig(t *testing.T) {
	for c, word := range map[lease.Config]string{
		{}:                                     "",
		{Shards: 1, MaxBuckets: 1}:             "",
		{Shards: 3}:                            "power of two",
		{Shards: -2}:                           "power of two",
		{Shards: 2048}:                         "1024",
		{MaxBuckets: -1}:                       "1 to",
		{MaxBuckets: lease.MaxMaxBuckets + 1}:  "1 to",
		{MaxBuckets: lease.MaxMaxBuckets >> 1}: "",
	} {
		_, err := lease.NewLocal(c)
		if (err == nil) != (word == "") || err != nil && !strings.Contains(err.Error(), word) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// model is a table in its plainest form.
type model map[limiter.Key]*entry

type entry struct {
	limit *limiter.Limit
	state limiter.State
}

func (m model) clone() model {
	c := model{}
	for k, e := range m {
		c[k] = &entry{e.limit, e.state.Clone()}
	}
	return c
}

// open makes the buckets that cs need, or says that they do not fit.
func (m model) open(now int64, cs []limiter.Charge, room int) bool {
	for _, c := range cs {
		e := m[c.Key]
		switch {
		case e != nil:
			if c.Limit.Revision > e.limit.Revision {
				c.Limit.Convert(&e.state, now, e.limit)
				e.limit = c.Limit
			}
		case len(m) < room:
			m[c.Key] = &entry{limit: c.Limit}
		case !c.Shadow:
			return false
		}
	}
	return true
}

// take returns the table after cs and the decisions.
func (m model) take(now int64, cs []limiter.Charge, room int) (model, int, []limiter.Decision) {
	before := m.clone()
	if !before.open(now, cs, room) {
		return m, lease.TableFull, nil
	}
	after, refused := before.clone(), -1
	ds := make([]limiter.Decision, len(cs))
	for i, c := range cs {
		e := after[c.Key]
		if e == nil {
			ds[i].At = now
			continue
		}
		ds[i] = e.limit.Take(&e.state, now, c.Cost, c.Oversize)
		if !ds[i].Admitted && !c.Shadow && (refused < 0 || ds[i].RetryAfter > ds[refused].RetryAfter) {
			refused = i
		}
	}
	if refused < 0 {
		return after, refused, ds
	}
	for i, c := range cs {
		if e := before[c.Key]; e != nil {
			d := e.limit.Peek(&e.state, now, 0, limiter.Refuse)
			ds[i].Remaining, ds[i].Reset = d.Remaining, d.Reset
		}
	}
	return before, refused, ds
}

// forget drops the full ones among what was not there before.
func (m model) forget(now int64, before model) {
	maps.DeleteFunc(m, func(k limiter.Key, e *entry) bool { return before[k] == nil && e.limit.Full(&e.state, now) })
}

type machine struct {
	local *lease.Local
	model model
	room  int
	now   int64
	rev   uint64
	open  [][]limiter.Charge
}

func (m *machine) draw(t *rapid.T) []limiter.Charge {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) limiter.Charge {
		l := *rapid.SampledFrom(every).Draw(t, "limit")
		l.Revision = rapid.Uint64Range(m.rev-min(m.rev, 1), m.rev).Draw(t, "revision")
		return limiter.Charge{
			Key: limiter.Key{
				Tenant:  rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "tenant"),
				Limit:   rapid.SampledFrom([]string{"x", "xy"}).Draw(t, "name"),
				Subject: rapid.SampledFrom([]string{"", "y", strings.Repeat("z", 40), strings.Repeat("z", 300)}).Draw(t, "subject"),
			},
			Limit:    &l,
			Cost:     rapid.Int64Range(-1, 12).Draw(t, "cost"),
			Oversize: rapid.SampledFrom([]limiter.Oversize{limiter.Refuse, limiter.Debt}).Draw(t, "oversize"),
			Shadow:   rapid.Bool().Draw(t, "shadow"),
		}
	}), 1, 5).Draw(t, "charges")
}

func (m *machine) step(t *rapid.T) {
	m.now += rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, int64(20*time.Second)), rapid.Int64Range(0, int64(3*time.Minute))).Draw(t, "step")
}

func (m *machine) take(t *rapid.T) {
	m.step(t)
	cs := m.draw(t)
	ds, peeked := make([]limiter.Decision, len(cs)), make([]limiter.Decision, len(cs))
	after, want, decisions := m.model.take(m.now, cs, m.room)
	roomy := want != lease.TableFull
	if !roomy {
		m.model.forget(m.now, nil)
		after, want, decisions = m.model.take(m.now, cs, m.room)
	}
	peek := m.local.Peek(m.now, cs, peeked)
	got := m.local.Take(m.now, cs, ds)
	if got != want {
		t.Fatalf("refused %d, want %d", got, want)
	}
	if want == lease.TableFull {
		return
	}
	if skipped := slices.ContainsFunc(cs, func(c limiter.Charge) bool { return after[c.Key] == nil }); roomy && !skipped && (peek != got || !slices.Equal(peeked, ds)) {
		t.Fatalf("peeked %d %+v, took %d %+v", peek, peeked, got, ds)
	}
	for i, c := range cs {
		at := limiter.NotTaken
		if got == -1 && ds[i].Admitted {
			at = m.now
		}
		if ds[i] != decisions[i] || c.At != at {
			t.Fatalf("charge %d: got %+v at %d, want %+v", i, ds[i], c.At, decisions[i])
		}
	}
	after.forget(m.now, m.model)
	m.model = after
	m.open = append(m.open, cs)
}

func (m *machine) settle(t *rapid.T) {
	if len(m.open) == 0 {
		t.Skip("nothing open")
	}
	m.step(t)
	cs := m.open[0]
	if rapid.Bool().Draw(t, "for good") {
		m.open = m.open[1:]
	}
	actual := rapid.SliceOfN(rapid.Int64Range(0, 25), len(cs), len(cs)).Draw(t, "actual")
	want := make([]int64, len(cs))
	for i, c := range cs {
		want[i] = m.settleOne(&c, actual[i])
	}
	ds := make([]limiter.Decision, len(cs))
	m.local.Settle(m.now, cs, actual, ds)
	for i := range cs {
		if ds[i].Remaining != want[i] {
			t.Fatalf("charge %d: %d left, want %d", i, ds[i].Remaining, want[i])
		}
	}
}

func (m *machine) settleOne(c *limiter.Charge, actual int64) int64 {
	delta := max(c.Cost, 0) - actual
	if c.At == limiter.NotTaken {
		delta = 0
	}
	if m.model[c.Key] == nil && delta >= 0 {
		return c.Limit.Capacity()
	}
	m.model.open(m.now, []limiter.Charge{*c}, len(m.model)+1)
	e := m.model[c.Key]
	if (e.limit.Algorithm == limiter.Semaphore) == (c.Limit.Algorithm == limiter.Semaphore) {
		e.limit.Adjust(&e.state, m.now, c.At, delta)
	}
	return e.limit.Peek(&e.state, m.now, 0, limiter.Refuse).Remaining
}

func (m *machine) sweep(t *rapid.T) {
	m.step(t)
	before := m.local.Len()
	budget := rapid.IntRange(0, 40).Draw(t, "budget")
	forgotten := m.local.Sweep(m.now, budget)
	if forgotten > budget || m.local.Len() != before-forgotten {
		t.Fatalf("forgot %d of %d with a budget of %d; %d are left", forgotten, before, budget, m.local.Len())
	}
	live := map[limiter.Key]bool{}
	for _, tenant := range []string{"", "a", "b"} {
		for _, l := range m.local.Levels(m.now, tenant) {
			live[l.Key] = true
		}
	}
	for k, e := range m.model {
		if live[k] {
			continue
		}
		if !e.limit.Full(&e.state, m.now) {
			t.Fatalf("%v was forgotten with something spent", k)
		}
		delete(m.model, k)
	}
}

func (m *machine) check(t *rapid.T) {
	seen := 0
	for _, tenant := range []string{"", "a", "b"} {
		levels := m.local.Levels(m.now, tenant)
		seen += len(levels)
		for i, l := range levels {
			e := m.model[l.Key]
			if e == nil || l.Key.Tenant != tenant {
				t.Fatalf("unexpected bucket %v", l.Key)
			}
			d := e.limit.Peek(&e.state, m.now, 0, limiter.Refuse)
			if l.Level != d.Remaining || l.Reset != d.Reset || l.Limit != *e.limit {
				t.Fatalf("%+v, want %+v", l, d)
			}
			if i > 0 && levels[i-1].Key.Limit+"\x00"+levels[i-1].Key.Subject >= l.Key.Limit+"\x00"+l.Key.Subject {
				t.Fatalf("not sorted: %v", levels)
			}
		}
	}
	if seen != len(m.model) || m.local.Len() != seen {
		t.Fatalf("%d buckets listed, %d counted, want %d", seen, m.local.Len(), len(m.model))
	}
}

func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &machine{model: model{}, now: start, room: rapid.IntRange(1, 20).Draw(t, "room")}
		m.local = newLocal(t, lease.Config{Shards: rapid.SampledFrom([]int{1, 2, 8}).Draw(t, "shards"), MaxBuckets: m.room})
		t.Repeat(map[string]func(*rapid.T){
			"take": m.take, "settle": m.settle, "sweep": m.sweep, "": m.check,
			"policy": func(*rapid.T) { m.rev++ },
		})
	})
}

// Fifty at once against a balance for ten: exactly ten, for every algorithm.
func TestFiftyAgainstTen(t *testing.T) {
	for _, limit := range every {
		l := newLocal(t, lease.Config{})
		if n := concurrently(50, func(int) bool {
			var ds [1]limiter.Decision
			return l.Take(start, []limiter.Charge{charge("a", "l", "", limit, 1)}, ds[:]) == -1
		}); n != 10 {
			t.Errorf("%v: %d passed", limit.Algorithm, n)
		}
	}
}

// Two limits in two shards, one half as large: the smaller one's refusals burn
// nothing of the larger, whoever comes first, in whatever order they are named.
func TestRefusalsBurnNothingElsewhere(t *testing.T) {
	for _, limit := range every {
		l := newLocal(t, lease.Config{})
		wide := *limit
		if wide.Burst > 0 {
			wide.Burst = 20
		}
		if wide.Rate.Count > 0 {
			wide.Rate.Count = 20
		}
		cs := []limiter.Charge{charge("a", "narrow", "", limit, 1), charge("", "wide", "m", &wide, 1)}
		passed := concurrently(50, func(i int) bool {
			var ds [2]limiter.Decision
			mine := slices.Clone(cs)
			if i%2 == 1 {
				slices.Reverse(mine)
			}
			ok := l.Take(start, mine, ds[:]) == -1
			if i%5 == 0 { // a settle in between, for its own charges only
				l.Settle(start, mine, []int64{1, 1}, ds[:])
			}
			return ok
		})
		if narrow, wide := level(l, start, cs[0]), level(l, start, cs[1]); passed != 10 || narrow != 0 || wide != 10 {
			t.Errorf("%v: %d passed, %d and %d left", limit.Algorithm, passed, narrow, wide)
		}
	}
}

// concurrently runs f n times at once and counts the true ones.
func concurrently(n int, f func(i int) bool) int {
	var wg sync.WaitGroup
	var passed atomic.Int64
	gate := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-gate
			if f(i) {
				passed.Add(1)
			}
		})
	}
	close(gate)
	wg.Wait()
	return int(passed.Load())
}

// Everything at once, for the race detector: at the end nothing is held.
func TestConcurrentUseEndsFull(t *testing.T) {
	l := newLocal(t, lease.Config{Shards: 4, MaxBuckets: 64})
	var clock atomic.Int64
	clock.Store(start)
	concurrently(8, func(g int) bool {
		var ds [3]limiter.Decision
		for i := range 500 {
			now := clock.Add(int64(time.Millisecond))
			cs := []limiter.Charge{
				charge("a", "l", fmt.Sprint(i%7), gcra, 1),
				charge(fmt.Sprint(g), "s", "", slots, 1),
				charge("", "l", fmt.Sprint(i%50), fixed, 1),
			}
			if l.Take(now, cs, ds[:]) == -1 {
				l.Settle(now, cs, []int64{0, 0, 0}, ds[:])
			}
			switch i % 50 {
			case 0:
				l.Sweep(now, 10)
			case 1:
				l.Levels(now, "a")
			case 2:
				l.Peek(now, cs, ds[:])
			}
		}
		return true
	})
	l.Sweep(clock.Load()+int64(time.Hour), 1<<20)
	if n := l.Len(); n != 0 {
		t.Errorf("%d buckets still hold something", n)
	}
}

func TestDecisionsDoNotAllocate(t *testing.T) {
	l := newLocal(t, lease.Config{})
	cs := []limiter.Charge{
		charge("a", "tokens", "", gcra, 2), charge("", "fleet", "llama", sliding, 1),
		charge("a", "slots", "k", slots, 1), charge("b", "day", "", fixed, 2),
	}
	ds, actual := make([]limiter.Decision, 4), []int64{1, 1, 0, 1}
	now := start
	round := func() {
		now += int64(time.Second)
		for i := range cs {
			cs[i].Cost = 2
		}
		l.Take(now, cs, ds)
		l.Settle(now, cs, actual, ds)
		l.Peek(now, cs, ds)
	}
	round()
	if n := testing.AllocsPerRun(1000, round); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A million buckets cost no more than 80 bytes each beyond their keys.
func TestBytesPerBucket(t *testing.T) {
	if testing.Short() {
		t.Skip("makes a million buckets")
	}
	l := newLocal(t, lease.Config{MaxBuckets: 1 << 21})
	const n = 1_000_000
	var keys int64
	var ds [1]limiter.Decision
	cs := make([]limiter.Charge, 1)
	before := heap()
	for i := range n {
		cs[0] = charge(fmt.Sprintf("tenant-%06d", i/10), "key-requests", fmt.Sprintf("key-%012d", i), gcra, 1)
		keys += int64(len(cs[0].Key.Tenant) + len(cs[0].Key.Limit) + len(cs[0].Key.Subject))
		l.Take(start, cs, ds[:])
	}
	each := float64(heap()-before) / n
	own := each - float64(keys)/n
	t.Logf("%.1f bytes a bucket, %.1f of them beyond the %.1f characters of its key", each, own, float64(keys)/n)
	if own > 80 {
		t.Errorf("%.1f bytes a bucket beyond its key", own)
	}
	runtime.KeepAlive(l)
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func BenchmarkTake(b *testing.B) {
	for _, n := range []int{1, 4} {
		b.Run(fmt.Sprintf("hot/charges=%d", n), func(b *testing.B) {
			l := newLocal(b, lease.Config{})
			big := &limiter.Limit{Rate: limiter.Rate{Count: 1e9, Per: time.Second}, Burst: 1e9}
			cs, ds := make([]limiter.Charge, n), make([]limiter.Decision, n)
			for i := range cs {
				cs[i] = charge("acme", fmt.Sprintf("limit-%d", i), "hg_live_0123456789abcdef", big, 1)
			}
			now := start
			for b.Loop() {
				now += 100
				l.Take(now, cs, ds)
			}
		})
	}
}

// Keys of any length, and those that differ only in where a part ends, have
// buckets of their own; and a removal disturbs no other.
func TestKeysAreKeptApart(t *testing.T) {
	l := newLocal(t, lease.Config{Shards: 1})
	var ds [1]limiter.Decision
	now := start
	keys := []limiter.Key{{Tenant: "ab", Limit: "c"}, {Tenant: "a", Limit: "bc"}, {Limit: "abc"}, {Subject: "abc"}, {Limit: "ab", Subject: "c"}}
	for n := range 600 {
		text := strings.Repeat("x", n)
		keys = append(keys, limiter.Key{Tenant: "t", Limit: "l", Subject: text}, limiter.Key{Tenant: text + "y", Limit: "l"}, limiter.Key{Limit: text + "z"})
	}
	for round := range 3 {
		for i, k := range keys {
			cost := int64((i+round)%5 + 1)
			l.Take(now, []limiter.Charge{{Key: k, Limit: gcra, Cost: cost}}, ds[:])
			if ds[0].Remaining != 10-cost {
				t.Fatalf("%v: %d left after %d of 10", k, ds[0].Remaining, cost)
			}
		}
		if l.Len() != len(keys) {
			t.Fatalf("%d buckets for %d keys", l.Len(), len(keys))
		}
		// The cheapest fifth is full again and goes, then the next.
		for spent := int64(1); spent <= 5; spent++ {
			now += int64(6 * time.Second)
			if n := l.Sweep(now, 1<<20); n != len(keys)/5 {
				t.Fatalf("%d forgotten of %d", n, len(keys))
			}
			for i, k := range keys {
				want := min(10, 10-int64((i+round)%5+1)+spent)
				if got := level(l, now, limiter.Charge{Key: k, Limit: gcra}); got != want {
					t.Fatalf("%v: %d left, want %d", k, got, want)
				}
			}
		}
	}
}
