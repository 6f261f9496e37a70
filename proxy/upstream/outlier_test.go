package upstream

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// world is a model's endpoints in virtual time, before which the least loaded of those
// that take requests gets the next one, as in the pool.
type world struct {
	now    int64
	rng    *rand.Rand
	all    []*vitals
	groups [][]int
	active [][]simRequest // by endpoint

	sent, bad, refused, ejections []int // by endpoint, refused in [0]
	lost                          int   // ended by an ejection
}

type simRequest struct {
	gen            uint32
	at, first, end int64 // first and end are 0 where it hangs
	begun          bool
	what           verdict
}

// nature is what becomes of a request to endpoint i: when its first byte comes (< 0:
// never), how long it takes in all, and what it comes to.
type nature func(w *world, i int) (first, whole time.Duration, what verdict)

func newWorld(seed uint64, n int) *world {
	w := &world{now: second, rng: rand.New(rand.NewPCG(seed, 7)), active: make([][]simRequest, n)}
	var g []int
	for i := range n {
		w.all = append(w.all, &vitals{state: Up})
		g = append(g, i)
	}
	w.groups = [][]int{g}
	w.sent, w.bad, w.refused, w.ejections = make([]int, n), make([]int, n), make([]int, n), make([]int, n)
	return w
}

// run lets the time pass with rate requests a second.
func (w *world) run(t *testing.T, d time.Duration, rate float64, f nature) {
	t.Helper()
	const step = 10 * int64(time.Millisecond)
	for until := w.now + int64(d); w.now < until; w.now += step {
		for i, v := range w.all {
			v.settle(w.now)
			w.progress(i, v)
		}
		if w.now%second < step {
			w.judge(t)
		}
		for range int(rate*0.01 + w.rng.Float64()) {
			w.request(f)
		}
	}
}

func (w *world) progress(i int, v *vitals) {
	kept := w.active[i][:0]
	for _, r := range w.active[i] {
		if !r.begun && r.first > 0 && w.now >= r.first {
			r.begun = true
			v.heard = w.now
			r.gen = v.began(w.now, r.gen, w.now-r.at)
		}
		if r.end > 0 && w.now >= r.end {
			v.end(w.now, r.gen, r.what)
			continue
		}
		kept = append(kept, r)
	}
	w.active[i] = kept
}

func (w *world) judge(t *testing.T) {
	t.Helper()
	for i, v := range w.all {
		v.waiting, v.oldest = 0, 0
		for _, r := range w.active[i] {
			if !r.begun {
				if v.waiting++; v.waiting == 1 || r.at < v.oldest {
					v.oldest = r.at
				}
			}
		}
	}
	for _, i := range judge(w.now, w.all, w.groups) {
		w.ejections[i]++
		kept := w.active[i][:0]
		for _, r := range w.active[i] {
			if r.begun {
				kept = append(kept, r)
			} else {
				w.lost++
			}
		}
		w.active[i] = kept
	}
	out := 0
	for _, v := range w.all {
		if v.ejectedUntil > 0 {
			out++
		}
	}
	if 2*out > len(w.all) {
		t.Fatalf("%d of %d are ejected", out, len(w.all))
	}
}

func (w *world) request(f nature) {
	best, load := -1, 0.0
	for _, i := range w.rng.Perm(len(w.all)) {
		v := w.all[i]
		if !v.eligible(w.now) || v.paused(w.now) {
			continue
		}
		if l := float64(len(w.active[i])+1) / (v.share(w.now) * v.latencyWeight()); best < 0 || l < load {
			best, load = i, l
		}
	}
	if best < 0 {
		w.refused[0]++
		return
	}
	first, whole, what := f(w, best)
	r := simRequest{gen: w.all[best].begin(w.now), at: w.now, what: what}
	if first >= 0 {
		r.first = w.now + int64(first)
	}
	if whole > 0 {
		r.end = w.now + int64(whole)
	}
	w.sent[best]++
	if what != fine {
		w.bad[best]++
	}
	w.active[best] = append(w.active[best], r)
}

// reset forgets the counts.
func (w *world) reset() {
	clear(w.sent)
	clear(w.bad)
	clear(w.refused)
	clear(w.ejections)
}

// well answers in a fifth of a second or so, and streams for a second.
func well(w *world, _ int) (time.Duration, time.Duration, verdict) {
	first := time.Duration(100+w.rng.IntN(200)) * time.Millisecond
	return first, first + time.Second, fine
}

func seeds(t *testing.T, f func(t *testing.T, seed uint64)) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { f(t, seed) })
	}
}

func TestWellEndpointsAreLeftAlone(t *testing.T) {
	seeds(t, func(t *testing.T, seed uint64) {
		w := newWorld(seed, 4)
		w.run(t, 5*time.Minute, 40, func(w *world, i int) (time.Duration, time.Duration, verdict) {
			first, whole, _ := well(w, i)
			if w.rng.IntN(20) == 0 { // a long prompt now and then
				first, whole = 20*first, 20*first+whole
			}
			if w.rng.IntN(50) == 0 {
				return first, whole, error500
			}
			return first, whole, fine
		})
		for i := range w.all {
			if w.ejections[i] > 0 || w.all[i].breaker.gen > 0 || w.sent[i] < 1500 {
				t.Errorf("endpoint %d: %d ejections, breaker %+v, %d requests", i, w.ejections[i], w.all[i].breaker, w.sent[i])
			}
		}
	})
}

func TestTenfoldSlowerIsEjected(t *testing.T) {
	seeds(t, func(t *testing.T, seed uint64) {
		w := newWorld(seed, 3)
		w.run(t, time.Minute, 60, well)
		slow := func(w *world, i int) (time.Duration, time.Duration, verdict) {
			first, whole, v := well(w, i)
			if i == 0 {
				return 10 * first, 10 * whole, v
			}
			return first, whole, v
		}
		w.reset()
		w.run(t, 15*time.Second, 60, slow)
		if w.ejections[0] == 0 || w.ejections[1]+w.ejections[2] > 0 {
			t.Fatalf("ejections within 15 s: %v", w.ejections)
		}
		w.reset()
		w.run(t, 10*time.Minute, 60, slow)
		if share := float64(w.sent[0]) / 36000; share > 0.03 {
			t.Errorf("it gets %.3f of the requests", share)
		}
		if w.ejections[1]+w.ejections[2]+w.refused[0] > 0 {
			t.Errorf("the others paid for it: %v, %d refused", w.ejections, w.refused[0])
		}
		w.reset()
		w.run(t, 2*time.Minute, 60, well)
		w.reset()
		w.run(t, time.Minute, 60, well)
		if w.sent[0] < 800 {
			t.Errorf("well again, it gets %d of 3600 requests", w.sent[0])
		}
	})
}

func TestAllSlowAreAllKept(t *testing.T) {
	seeds(t, func(t *testing.T, seed uint64) {
		w := newWorld(seed, 3)
		w.run(t, time.Minute, 20, well)
		w.run(t, 5*time.Minute, 20, func(w *world, i int) (time.Duration, time.Duration, verdict) {
			first, whole, v := well(w, i)
			return 10 * first, 10 * whole, v
		})
		if w.ejections[0]+w.ejections[1]+w.ejections[2]+w.refused[0] > 0 {
			t.Errorf("ejections %v, %d refused", w.ejections, w.refused[0])
		}
	})
}

// TestAllBad: breakers open, nobody is ejected for being as bad as the others, and all
// come back once they are well.
func TestAllBad(t *testing.T) {
	seeds(t, func(t *testing.T, seed uint64) {
		w := newWorld(seed, 4)
		w.run(t, 5*time.Minute, 40, func(*world, int) (time.Duration, time.Duration, verdict) {
			return -1, 10 * time.Millisecond, failed
		})
		tried := 0
		for i := range w.all {
			tried += w.sent[i]
			if w.ejections[i] > 0 {
				t.Errorf("ejections: %v", w.ejections)
			}
		}
		if tried > 150 {
			t.Errorf("%d requests of 12000 went to endpoints that answer none", tried)
		}
		w.run(t, maxPause+2*rampTime, 40, well)
		w.reset()
		w.run(t, time.Minute, 40, well)
		for i := range w.all {
			if w.sent[i] < 400 || w.refused[0] > 0 {
				t.Errorf("after that %d gets %d of 2400, %d refused", i, w.sent[i], w.refused[0])
			}
		}
	})
}

func TestOneBadOfTwo(t *testing.T) {
	for name, what := range map[string]func(w *world) (time.Duration, time.Duration, verdict){
		"fails": func(*world) (time.Duration, time.Duration, verdict) { return -1, 10 * time.Millisecond, failed },
		"cuts its answers": func(*world) (time.Duration, time.Duration, verdict) {
			return 100 * time.Millisecond, time.Second, failed
		},
		"fails a third": func(w *world) (time.Duration, time.Duration, verdict) {
			if w.rng.IntN(3) == 0 {
				return -1, 10 * time.Millisecond, failed
			}
			return well(w, 0)
		},
		"hangs": func(*world) (time.Duration, time.Duration, verdict) { return -1, 0, nothing },
	} {
		t.Run(name, func(t *testing.T) {
			seeds(t, func(t *testing.T, seed uint64) {
				w := newWorld(seed, 2)
				f := func(w *world, i int) (time.Duration, time.Duration, verdict) {
					if i == 0 {
						return what(w)
					}
					return well(w, i)
				}
				w.run(t, time.Minute, 40, well)
				w.run(t, 30*time.Second, 40, f)
				w.reset()
				w.run(t, 5*time.Minute, 40, f)
				if w.ejections[1] > 0 || w.refused[0] > 0 || w.all[1].breaker.gen > 0 {
					t.Errorf("the good one suffered: ejections %v, %d refused", w.ejections, w.refused[0])
				}
				if bad := float64(w.bad[0]) / 12000; bad > 0.02 {
					t.Errorf("%.3f of the requests went wrong", bad)
				}
			})
		})
	}
}

// TestFlappingEndpointIsTriedEverMoreRarely: each second it is another one.
func TestFlappingEndpointIsTriedEverMoreRarely(t *testing.T) {
	seeds(t, func(t *testing.T, seed uint64) {
		w := newWorld(seed, 3)
		flaps := func(w *world, i int) (time.Duration, time.Duration, verdict) {
			if i == 0 && w.now/second%2 == 0 {
				return -1, 10 * time.Millisecond, failed
			}
			return well(w, i)
		}
		w.run(t, 5*time.Minute, 60, flaps)
		w.reset()
		w.run(t, 10*time.Minute, 60, flaps)
		if bad := float64(w.bad[0]) / 36000; bad > 0.005 {
			t.Errorf("%.4f of the requests went wrong, %d of %d of its own", bad, w.bad[0], w.sent[0])
		}
		if w.refused[0] > 0 || w.ejections[1]+w.ejections[2] > 0 {
			t.Errorf("the good ones suffered: %v, %d refused", w.ejections, w.refused[0])
		}
		w.run(t, maxPause+2*rampTime, 60, well)
		w.reset()
		w.run(t, time.Minute, 60, well)
		if w.sent[0] < 800 {
			t.Errorf("steady again, it gets %d of 3600", w.sent[0])
		}
	})
}

// TestJudgeKeepsHalfOfEachGroup draws endpoints in whatever state and overlapping groups.
func TestJudgeKeepsHalfOfEachGroup(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 8).Draw(t, "endpoints")
		now := 1000 * second
		all := make([]*vitals, n)
		for i := range all {
			v := &vitals{
				state: rapid.SampledFrom([]State{Up, Up, Unknown, Down}).Draw(t, "state"), drained: rapid.IntRange(0, 9).Draw(t, "drained") == 0,
				suspect: rapid.IntRange(0, 3).Draw(t, "suspect"),
			}
			first := rapid.Int64Range(1, 20*second).Draw(t, "first")
			for range rapid.IntRange(0, 20).Draw(t, "n") {
				v.began(now-second, 0, first)
			}
			for range rapid.IntRange(0, 40).Draw(t, "answers") {
				v.breaker.window.add(now, rapid.Bool().Draw(t, "good"))
			}
			if rapid.IntRange(0, 4).Draw(t, "ejected") == 0 {
				v.ejectedUntil = now + second
			}
			all[i] = v
		}
		groups := make([][]int, rapid.IntRange(1, 4).Draw(t, "groups"))
		for g := range groups {
			for i := range n {
				if rapid.Bool().Draw(t, "member") {
					groups[g] = append(groups[g], i)
				}
			}
		}
		before := make([]int, len(groups))
		count := func(g []int) (out int) {
			for _, i := range g {
				if all[i].ejectedUntil > 0 {
					out++
				}
			}
			return out
		}
		for g := range groups {
			before[g] = count(groups[g])
		}
		ejected := judge(now, all, groups)
		for g, members := range groups {
			if after := count(members); after > before[g] && 2*after > len(members) {
				t.Fatalf("%d of %d ejected", after, len(members))
			}
			took := false
			for _, i := range ejected {
				for _, j := range members {
					took = took || i == j
				}
			}
			left := 0
			for _, i := range members {
				if all[i].eligible(now) {
					left++
				}
			}
			if took && left == 0 {
				t.Fatal("the last one was ejected")
			}
		}
		for i, v := range all {
			if v.weight < leastWeight || v.weight > 1 {
				t.Fatalf("endpoint %d weighs %v", i, v.weight)
			}
		}
	})
}

// slowEndpoints have each brought first bytes after so many seconds.
func slowEndpoints(now int64, seconds ...int64) (all []*vitals) {
	for _, s := range seconds {
		v := &vitals{state: Up}
		for range maxSamples {
			v.began(now, 0, s*second)
		}
		all = append(all, v)
	}
	return all
}

func TestJudgeTakesItsTime(t *testing.T) {
	now := 100 * second
	all := slowEndpoints(now, 1, 6, 1)
	for i := 1; i <= suspectLimit; i++ {
		if out := judge(now, all, [][]int{{0, 1, 2}}); (len(out) == 1 && out[0] == 1) != (i == suspectLimit) {
			t.Errorf("judgement %d ejected %v", i, out)
		}
	}
	if all[1].weight > 0.34 || all[0].weight != 1 {
		t.Errorf("weights %v %v", all[0].weight, all[1].weight)
	}
	all = slowEndpoints(now, 1, 6, 1)
	judge(now, all, [][]int{{0, 1, 2}})
	judge(now, all, [][]int{{0, 1, 2}})
	judge(now+2*int64(freshFor), all, [][]int{{0, 1, 2}}) // what it was is not known to be any more
	if out := judge(now, all, [][]int{{0, 1, 2}}); len(out) > 0 {
		t.Errorf("not three in a row, yet %v", out)
	}
}

func TestJudgeKeepsTheBetterHalf(t *testing.T) {
	now := 100 * second
	for _, c := range []struct {
		seconds []int64
		out     []int // already
		groups  [][]int
		want    string
	}{
		{[]int64{1, 1, 1, 50, 60}, nil, [][]int{{0, 1, 2, 3, 4}}, "[4 3]"},
		{[]int64{1, 1, 50, 60}, []int{2}, [][]int{{0, 1, 2, 3}}, "[3]"},
		{[]int64{1, 1, 50, 60, 70}, []int{2, 3}, [][]int{{0, 1, 2, 3, 4}}, "[]"},
		{[]int64{1, 60, 70}, []int{2}, [][]int{{0, 1, 2}}, "[]"},
		{[]int64{1, 60}, nil, [][]int{{0, 1}}, "[1]"},
		{[]int64{1, 60, 1}, nil, [][]int{{0, 1}, {1, 2}}, "[1]"},
		{[]int64{1, 60, 1}, nil, [][]int{{0, 1, 2}, {1}}, "[]"}, // the last one of another model
	} {
		all := slowEndpoints(now, c.seconds...)
		for _, i := range c.out {
			all[i].eject(now)
		}
		for _, v := range all {
			v.suspect = suspectLimit - 1
		}
		if got := fmt.Sprint(judge(now, all, c.groups)); got != c.want {
			t.Errorf("%v less %v: ejected %s, want %s", c.seconds, c.out, got, c.want)
		}
	}
}

func TestSilenceCountsWhileStreamsWait(t *testing.T) {
	now := 100 * second
	for _, c := range []struct {
		waiting       int
		oldest, heard int64 // seconds ago
		want          int64 // seconds; 0: unknown
	}{
		{0, 90, 90, 0},
		{1, 29, 90, 0},
		{1, 30, 90, 30},
		{1, 90, 29, 0},
		{1, 90, 31, 31},
		{3, 10, 90, 10},
		{3, 9, 90, 0},
		{6, 5, 90, 5},
		{60, 4, 90, 0},
		{60, 90, 1, 0}, // it works on others, and on them in turn
	} {
		v := vitals{waiting: c.waiting, oldest: now - c.oldest*second, heard: now - c.heard*second}
		if got, known := v.firstByte(now); got != c.want*second || known != (c.want > 0) {
			t.Errorf("%+v: %v", c, time.Duration(got))
		}
	}
}

func TestMedianOfOthers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.SliceOfN(rapid.IntRange(0, 9), 2, 9).Draw(t, "values")
		slices.Sort(s)
		i := rapid.IntRange(0, len(s)-1).Draw(t, "mine")
		others := slices.Delete(slices.Clone(s), i, i+1)
		if got, want := medianOfOthers(s, s[i]), others[(len(others)-1)/2]; got != want {
			t.Fatalf("%d of %v without %d, want %d", got, s, s[i], want)
		}
	})
}
