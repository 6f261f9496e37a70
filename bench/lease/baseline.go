package lease

import (
	"time"

	"headgate/limiter"
)

// direct asks the owner for each request.
type direct struct {
	w     *world
	state limiter.State
}

func (s *direct) start(w *world) { s.w = w }
func (s *direct) lent() float64  { return 0 }

func (s *direct) arrive(id int) {
	w, at := s.w, int64(0)
	node, cost := w.node(id), w.demand[id].Cost
	var d limiter.Decision
	w.trips[node]++
	w.call(node, func() {
		at = w.now
		d = w.Limit.Take(&s.state, epoch+at, cost, limiter.Refuse)
	}, func() { w.decide(id, d.Admitted, false, at) }, func() { w.decide(id, false, false, 0) })
}

func (s *direct) emptied() { s.state = limiter.State{} }

func (s *direct) crash(int)  {}
func (s *direct) leave(int)  {}
func (s *direct) comes(int)  {}
func (s *direct) deaf([]int) {}

// split gives each of N holders a bucket of rate/N and burst/N. N is what somebody wrote down: a node that goes takes its part with it,
// one that comes brings another, and one that comes back has a full bucket.
type split struct {
	w      *world
	part   limiter.Limit
	states []limiter.State
}

func (s *split) start(w *world) {
	s.w, s.part, s.states = w, w.Limit, make([]limiter.State, w.nodesOf())
	s.part.Rate.Per *= time.Duration(w.Nodes)
	s.part.Burst = max(w.Limit.Burst/int64(w.Nodes), 1)
}

func (s *split) lent() (sum float64) {
	for i := range s.states {
		if s.w.plan == nil || !s.w.gone[i] {
			sum += float64(s.part.Peek(&s.states[i], epoch+s.w.now, 0, limiter.Refuse).Remaining)
		}
	}
	return sum
}

func (s *split) arrive(id int) {
	d := s.part.Take(&s.states[s.w.node(id)], epoch+s.w.now, s.w.demand[id].Cost, limiter.Refuse)
	s.w.decide(id, d.Admitted, true, s.w.now)
}

func (s *split) comes(node int) { s.states[node] = limiter.State{} }

func (s *split) emptied()   {}
func (s *split) crash(int)  {}
func (s *split) leave(int)  {}
func (s *split) deaf([]int) {}

// tank is a bucket that may be lent from: level and what holders may still spend never exceed the
// burst, as in R1.
type tank struct {
	rate, burst, level, out float64
	last                    int64
}

func newTank(c *Cell) tank {
	return tank{rate: c.rate() / 1e9, burst: float64(c.Limit.Burst), level: float64(c.Limit.Burst)}
}

func (t *tank) advance(now int64) {
	t.level = min(t.level+float64(now-t.last)*t.rate, t.burst-t.out)
	t.last = now
}

// blockFor is how long a block lies idle before its holder gives back what is left.
const blockFor = int64(time.Second)

// blocks lends a fixed number of tokens at a time: who is out of tokens asks for the next block.
type blocks struct {
	w    *world
	size float64
	tank tank
	// By holder: tokens in hand, as much of the tank's out as is its, how many blocks it had, who waits,
	// and whether it asks.
	hand, out []float64
	had       []int
	waits     [][]int
	asks      []bool
}

func (s *blocks) start(w *world) {
	s.w, s.tank = w, newTank(&w.Cell)
	n := w.nodesOf()
	s.hand, s.out, s.had = make([]float64, n), make([]float64, n), make([]int, n)
	s.waits, s.asks = make([][]int, n), make([]bool, n)
}

func (s *blocks) lent() (sum float64) {
	for _, h := range s.hand {
		sum += h
	}
	return sum
}

func (s *blocks) arrive(id int) {
	cost := float64(s.w.demand[id].Cost)
	if i := s.w.node(id); s.hand[i] >= cost {
		s.hand[i] -= cost
		s.w.decide(id, true, true, s.w.now)
	} else {
		s.waits[i] = append(s.waits[i], id)
		s.ask(i)
	}
}

// ask gets a block for the first of those that wait; the others look at what it brings.
func (s *blocks) ask(i int) {
	if s.asks[i] || len(s.waits[i]) == 0 {
		return
	}
	s.asks[i] = true
	s.w.trips[i]++
	had, got := s.hand[i], 0.0
	want := max(s.size, float64(s.w.demand[s.waits[i][0]].Cost)-had)
	s.w.call(i, func() {
		s.tank.advance(s.w.now)
		s.tank.out -= s.out[i] - had // what it has spent since
		got = max(0, min(s.tank.level, want))
		s.tank.level -= got
		s.out[i] = had + got
		s.tank.out += got
	}, func() { s.answered(i, got, got < s.size) }, func() {
		s.asks[i] = false
		for _, id := range s.waits[i] {
			s.w.decide(id, false, false, 0)
		}
		s.waits[i] = nil
	})
}

// answered serves those that wait. What the owner was short of, nobody who waits gets by asking again.
func (s *blocks) answered(i int, got float64, short bool) {
	s.asks[i] = false
	s.hand[i] += got
	s.had[i]++
	block := s.had[i]
	s.w.after(blockFor, func() {
		if s.had[i] == block && !s.asks[i] {
			s.giveBack(i)
		}
	})
	waits := s.waits[i]
	s.waits[i] = nil
	for _, id := range waits {
		switch cost := float64(s.w.demand[id].Cost); {
		case s.hand[i] >= cost:
			s.hand[i] -= cost
			s.w.decide(id, true, false, s.w.now)
		case short:
			s.w.decide(id, false, false, s.w.now)
		default:
			s.waits[i] = append(s.waits[i], id)
		}
	}
	s.ask(i)
}

func (s *blocks) giveBack(i int) {
	back := s.hand[i]
	s.hand[i] = 0
	s.asks[i] = true // until it is back, so that the two do not cross
	s.w.trips[i]++
	again := func() {
		s.asks[i] = false
		s.ask(i)
	}
	s.w.call(i, func() {
		s.tank.advance(s.w.now)
		s.tank.out -= s.out[i]
		s.out[i] = 0
		s.tank.level += back
		again()
	}, func() {}, again)
}

// emptied: the store knows neither what was spent nor what is out.
func (s *blocks) emptied() {
	s.tank = newTank(&s.w.Cell)
	s.tank.last = s.w.now
	clear(s.out)
}

func (s *blocks) crash(node int) { s.comes(node) }

func (s *blocks) comes(node int) {
	s.hand[node], s.waits[node], s.asks[node] = 0, nil, false
	s.had[node]++
}

func (s *blocks) leave(node int) {
	if !s.asks[node] {
		s.giveBack(node)
	}
}

// deaf: what those have counts as spent, and they spend no more of it.
func (s *blocks) deaf(nodes []int) {
	s.tank.advance(s.w.now)
	for _, i := range nodes {
		s.tank.out -= s.out[i]
		s.out[i], s.hand[i] = 0, 0
	}
}

// counted decides by the last known level and tells the owner of its hits every so often.
type counted struct {
	w     *world
	every int64
	tank  tank
	known []tank    // by holder: the level as it last heard, refilled since, less its own hits
	hits  []float64 // not yet told
}

func (s *counted) start(w *world) {
	s.w, s.tank, s.hits = w, newTank(&w.Cell), make([]float64, w.nodesOf())
	for i := range w.nodesOf() {
		s.known = append(s.known, newTank(&w.Cell))
		w.after(w.rand.Int64N(s.every), func() {
			s.tell(i)
			w.every(s.every, func() { s.tell(i) })
		})
	}
}

func (s *counted) lent() float64 { return 0 }

func (s *counted) arrive(id int) {
	i, cost := s.w.node(id), float64(s.w.demand[id].Cost)
	k := &s.known[i]
	k.advance(s.w.now)
	fits := k.level >= cost
	if fits {
		k.level -= cost
		s.hits[i] += cost
	}
	s.w.decide(id, fits, true, s.w.now)
}

func (s *counted) tell(i int) {
	if s.w.plan != nil && s.w.gone[i] {
		return
	}
	told, level := s.hits[i], 0.0
	s.hits[i] = 0
	s.w.kept++
	s.w.call(i, func() {
		s.tank.advance(s.w.now)
		s.tank.level -= told
		level = s.tank.level
	}, func() { s.known[i].level, s.known[i].last = level-s.hits[i], s.w.now }, func() { s.hits[i] += told })
}

func (s *counted) emptied() {
	s.tank = newTank(&s.w.Cell)
	s.tank.last = s.w.now
}

func (s *counted) crash(node int) { s.hits[node] = 0 }

func (s *counted) comes(node int) {
	s.hits[node], s.known[node] = 0, newTank(&s.w.Cell)
	s.known[node].last = s.w.now
}

func (s *counted) leave(node int) {
	s.tank.advance(s.w.now) // its last word comes before it goes
	s.tank.level -= s.hits[node]
	s.hits[node] = 0
}

func (s *counted) deaf([]int) {}
