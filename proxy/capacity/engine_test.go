package capacity

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// engine is a model of a vLLM: continuous batching with a step that grows with the batch, prefill in chunks under a token
// budget, KV memory that fills as answers grow, preemption by recomputation, and its own queue.
type engine struct {
	maxSeqs, budget, kv     int64
	base, perSeq, perPrompt time.Duration
	slow                    float64 // all of it

	running, waiting []*job
	used             int64 // tokens of KV
	preemptions      int64
	tokens           int64
}

// job is one request inside the engine.
type job struct {
	prompt, output int64
	cost           int64
	sent, first    int64 // ns; 0: not yet
	prefilled, out int64
	again          int64 // tokens to be computed anew after a preemption
}

// newEngine: a step of 10 ms and .25 ms a sequence, so that 40 sequences double it; 16,000 prompt tokens a second.
func newEngine() *engine {
	return &engine{maxSeqs: 256, budget: 2048, kv: 60_000, base: 10 * time.Millisecond, perSeq: 250 * time.Microsecond, perPrompt: 60 * time.Microsecond, slow: 1}
}

func (e *engine) preempt() {
	j := e.running[len(e.running)-1]
	e.running = e.running[:len(e.running)-1]
	e.used -= j.prefilled + j.out
	j.again, j.prefilled = j.out, 0
	e.waiting = slices.Insert(e.waiting, 0, j)
	e.preemptions++
}

// want is what has to be computed before the next token: after a preemption, what was generated counts as prompt.
func (j *job) want() int64 { return j.prompt + j.again }

// step runs one step from now on and returns its length and the jobs that ended.
func (e *engine) step(now int64) (time.Duration, []*job) {
	var decodes, prefill int64
	left := e.budget
	for i := 0; i < len(e.running) && left > 0; i++ {
		j := e.running[i]
		n := int64(1)
		if j.prefilled < j.want() {
			n = min(left, j.want()-j.prefilled)
		}
		for e.used+n > e.kv && i < len(e.running)-1 {
			e.preempt()
		}
		if e.used+n > e.kv {
			break
		}
		e.used, left = e.used+n, left-n
		if j.prefilled < j.want() {
			j.prefilled += n
			prefill += n
			continue
		}
		decodes++
		j.out++
	}
	for left > 0 && len(e.waiting) > 0 && int64(len(e.running)) < e.maxSeqs {
		j := e.waiting[0]
		n := min(left, j.want())
		if e.used+j.want() > e.kv {
			break
		}
		e.waiting = e.waiting[1:]
		e.running = append(e.running, j)
		j.prefilled, left = n, left-n
		e.used += n
		prefill += n
	}
	d := time.Duration(e.slow * float64(e.base+time.Duration(decodes)*e.perSeq+time.Duration(prefill)*e.perPrompt))
	e.tokens += decodes + prefill
	var done []*job
	e.running = slices.DeleteFunc(e.running, func(j *job) bool {
		if j.first == 0 && j.prefilled >= j.want() {
			j.first = now + int64(d)
		}
		if j.out < j.output {
			return false
		}
		e.used -= j.prefilled + j.out - j.again
		done = append(done, j)
		return true
	})
	return d, done
}

func (e *engine) sample() Sample {
	return Sample{
		Waiting: int64(len(e.waiting)), HasWaiting: true, Running: int64(len(e.running)), HasRunning: true,
		KVUsage: float64(e.used) / float64(e.kv), HasKV: true, Preemptions: e.preemptions, HasPreemptions: true, Tokens: e.tokens, HasTokens: true,
	}
}

// load is what is asked of the engine in one phase.
type load struct {
	prompt, output float64 // means; prompts are lognormal (σ .8), outputs exponential
	rate           float64 // requests a second; +Inf: there is always one more
}

func (l load) job(rng *rand.Rand) *job {
	const sigma = 0.8
	p := math.Exp(rng.NormFloat64()*sigma+math.Log(l.prompt)-sigma*sigma/2) + 1
	o := rng.ExpFloat64()*l.output + 1
	return &job{prompt: int64(min(p, 12_000)), output: int64(min(o, 4_000))}
}

// control is a learner or a rival.
type control interface {
	observe(now int64, o Observation)
	scraped(now int64, s Sample)
	limit(now int64) int64
}

// world drives an engine through a control with an endless or a Poisson queue before it.
type world struct {
	e       *engine
	c       control
	rng     *rand.Rand
	metrics bool
	tokens  int64 // slot_tokens

	now, next    int64
	queue        []int64 // arrival times
	inUse        int64
	o            Observation
	tick, scrape int64

	// what is asserted on, since the last mark
	marked int64
	limits []float64 // each second
	firsts []float64 // seconds
	good   int64     // tokens of answers that began within the bound
	all    int64
}

const withinFirst = 2 * time.Second

func newWorld(e *engine, c control, seed uint64, metrics bool) *world {
	return &world{e: e, c: c, rng: rand.New(rand.NewPCG(seed, 7)), metrics: metrics, tokens: 16_384, now: int64(time.Hour), tick: int64(time.Hour), scrape: int64(time.Hour), next: int64(time.Hour)}
}

func (w *world) mark() { w.marked, w.limits, w.firsts, w.good, w.all = w.now, nil, nil, 0, 0 }

func (w *world) run(l load, d time.Duration) {
	for end := w.now + int64(d); w.now < end; {
		w.send(l)
		d, done := w.e.step(w.now)
		w.now += int64(d)
		for _, j := range w.e.running {
			if j.first == w.now {
				w.firstByte(j)
			}
		}
		for _, j := range done {
			if j.first == w.now {
				w.firstByte(j)
			}
			w.inUse -= j.cost
			w.o.Done++
			w.o.SlotTime += time.Duration(j.cost * (w.now - j.sent))
			w.all += j.out
			if time.Duration(j.first-j.sent) <= withinFirst {
				w.good += j.out
			}
		}
		w.tell()
	}
}

func (w *world) firstByte(j *job) {
	w.o.FirstBytes++
	w.o.FirstByte += time.Duration(j.first - j.sent)
	w.firsts = append(w.firsts, time.Duration(j.first-j.sent).Seconds())
}

func (w *world) send(l load) {
	for ; !math.IsInf(l.rate, 1) && w.next <= w.now; w.next += int64(w.rng.ExpFloat64() / l.rate * 1e9) {
		if len(w.queue) < 200 {
			w.queue = append(w.queue, w.next)
		}
	}
	limit := w.c.limit(w.now)
	for len(w.queue) > 0 || math.IsInf(l.rate, 1) {
		j := l.job(w.rng)
		j.cost = (j.prompt + j.output + w.tokens - 1) / w.tokens
		if w.inUse > 0 && w.inUse+j.cost > limit {
			w.o.Waiting = 1
			return
		}
		if len(w.queue) > 0 {
			w.queue = w.queue[1:]
		}
		j.sent = w.now
		w.inUse += j.cost
		w.e.waiting = append(w.e.waiting, j)
	}
	w.o.Waiting = 0
}

func (w *world) tell() {
	for ; w.tick <= w.now; w.tick += int64(100 * time.Millisecond) {
		w.o.Backend, w.o.InUse = "b", w.inUse
		w.c.observe(w.tick, w.o)
		w.o = Observation{Waiting: w.o.Waiting}
	}
	for ; w.scrape <= w.now; w.scrape += int64(time.Second) {
		if w.metrics {
			w.c.scraped(w.scrape, w.e.sample())
		}
		w.limits = append(w.limits, float64(w.c.limit(w.now)))
	}
}

func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	s := slices.Clone(v)
	slices.Sort(s)
	return s[int(q*float64(len(s)-1))]
}

// figures of the time since mark.
func (w *world) goodput() float64 {
	return float64(w.good) / time.Duration(w.now-w.marked).Seconds()
}

// swing is how far the limit goes from its median: the 5th and the 95th of 100 seconds.
func (w *world) swing() (median, low, high float64) {
	m := quantile(w.limits, .5)
	return m, quantile(w.limits, .05) / m, quantile(w.limits, .95) / m
}

// fixed is a configured limit that nobody learns.
type fixed int64

func (f fixed) observe(int64, Observation) {}
func (f fixed) scraped(int64, Sample)      {}
func (f fixed) limit(int64) int64          { return int64(f) }
