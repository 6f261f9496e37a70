package lease

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"headgate/limiter"
)

// mill is one bucket in virtual time: an owner, process 1, and holders, all of them real, the first in the owner's
// process; streams that keep their order and take their time; and what a Manager does in between. Clients ask for one
// unit after the other, whatever they are told. An ideal bucket, which knows of every request at once, says what was
// there.
type mill struct {
	t     *testing.T
	rng   *rand.Rand
	at    Instant
	due   dues
	o     *Owner
	nodes []*grinder
	limit limiter.Limit
	delay func(*rand.Rand) time.Duration // of a message
	slack func(*rand.Rand) time.Duration // of a keep-alive
	tick  int64                          // when the owner's next is due

	full     int64 // when the ideal bucket is full again
	had      int64 // when it came to have what is refused, and nothing was admitted since
	admitted int
	slowest  time.Duration // the longest round trip
	rest     time.Duration // the longest that a client was silent
	early    time.Duration // the most that a word of the next admission was too early
	idle     time.Duration // the longest that a unit was there and refused
}

// grinder is a holder with its line to the owner.
type grinder struct {
	m      *mill
	id     uint64
	h      *Holder
	asks   map[uint64]func(*AskDecision)
	sent   map[uint64]int64 // when, by the Seq of what is not answered
	last   int64
	wanted bool
	there  [2]int64 // when the last message of a direction arrives
}

// due is something to do; those of one time in their order.
type due struct {
	at int64
	n  int
	do func()
}

type dues struct {
	all []due
	n   int
}

func (d *dues) Len() int      { return len(d.all) }
func (d *dues) Swap(i, j int) { d.all[i], d.all[j] = d.all[j], d.all[i] }
func (d *dues) Push(x any)    { d.all = append(d.all, x.(due)) }
func (d *dues) Less(i, j int) bool {
	x, y := d.all[i], d.all[j]
	return x.at < y.at || x.at == y.at && x.n < y.n
}

func (d *dues) Pop() any {
	x := d.all[len(d.all)-1]
	d.all = d.all[:len(d.all)-1]
	return x
}

func newMill(t *testing.T, seed uint64, limit limiter.Limit, w weather) *mill {
	m := &mill{t: t, rng: rand.New(rand.NewPCG(seed, 1)), at: Instant{1e12, 1_700_000_000e9}, limit: limit, delay: w.delay, slack: w.slack, tick: never, full: 1e12, had: 1e12}
	v := &View{Epoch: 1, Owners: []int32{0}, Place: func(string) uint32 { return 0 }}
	for i := range 3 {
		v.Members = append(v.Members, Member{Name: fmt.Sprint("n", i+1), Incarnation: uint64(i + 1)})
	}
	m.o = NewOwner(OwnerConfig{Self: 1, Rights: &deedRights{lease: 98e7}, Wait: 1.07e9})
	m.o.Step(m.at, v)
	for i := range v.Members {
		g := &grinder{m: m, id: uint64(i + 1), asks: map[uint64]func(*AskDecision){}, sent: map[uint64]int64{}}
		g.h = NewHolder(HolderConfig{Self: g.id, Clock: func() Instant { return m.at }, Wake: func(uint64) {
			g.wanted = true
			m.after(0, g.poke)
		}})
		g.h.Step(v)
		m.nodes = append(m.nodes, g)
		m.after(time.Duration(m.rng.Int64N(int64(KeepEvery))), g.keepAlive)
	}
	return m
}

func (m *mill) after(d time.Duration, do func()) {
	m.due.n++
	heap.Push(&m.due, due{m.at.Now + max(0, int64(d)), m.due.n, do})
}

// run goes on for a while.
func (m *mill) run(d time.Duration) {
	for end := m.at.Now + int64(d); m.due.Len() > 0 && m.due.all[0].at <= end; {
		x := heap.Pop(&m.due).(due)
		m.at = Instant{x.at, m.at.Wall + x.at - m.at.Now}
		x.do()
	}
}

func (g *grinder) keepAlive() {
	g.m.after(KeepEvery+g.m.slack(g.m.rng), g.keepAlive)
	if len(g.h.Owners()) > 0 {
		g.wanted = true
		g.poke()
	}
}

// poke sends what nobody waits for, if nothing is on its way.
func (g *grinder) poke() {
	if g.wanted && (len(g.sent) == 0 || g.m.at.Now-g.last >= int64(KeepEvery)) {
		g.send(nil)
	}
}

func (g *grinder) send(asks []Ask) {
	g.wanted, g.last = false, g.m.at.Now
	r := g.h.Request(1, asks)
	g.sent[r.Seq] = g.last
	g.carry(0, func() { g.m.route(g.m.o.Handle(g.m.at, r)) })
}

// carry brings a message there, behind those before it; to and from the owner's own process at once.
func (g *grinder) carry(way int, do func()) {
	if g.id != 1 {
		g.there[way] = max(g.there[way], g.m.at.Now+int64(g.m.delay(g.m.rng)))
	}
	g.m.after(time.Duration(g.there[way]-g.m.at.Now), do)
}

// route carries what the owner says, and has it go on when it wants to.
func (m *mill) route(rs []*Response) {
	for _, r := range rs {
		g := m.nodes[r.Holder-1]
		g.carry(1, func() { g.heard(r) })
	}
	if next := m.o.Next(); next < m.tick {
		m.tick = next
		m.after(time.Duration(next-m.at.Now), func() {
			m.tick = never
			m.route(m.o.Tick(m.at))
		})
	}
}

func (g *grinder) heard(r *Response) {
	g.h.Handle(r)
	for seq, sent := range g.sent {
		if seq <= r.Answers {
			g.m.slowest = max(g.m.slowest, time.Duration(g.m.at.Now-sent))
			delete(g.sent, seq)
		}
	}
	for i := range r.Decisions {
		d := &r.Decisions[i]
		if do := g.asks[d.ID]; do != nil {
			delete(g.asks, d.ID)
			do(d)
		}
	}
	g.poke()
}

// take asks for a unit and says what came of it.
func (g *grinder) take(done func(ok bool, d limiter.Decision)) {
	m := g.m
	cs, ds := []limiter.Charge{{Key: limiter.Key{Tenant: "a", Limit: "l"}, Limit: &m.limit, Cost: 1}}, make([]limiter.Decision, 1)
	refused, missing := g.h.Take(cs, ds)
	end := func(refused int) {
		if refused == -1 {
			g.h.Settle(cs, []int64{1}, ds)
		}
		done(refused == -1, ds[0])
	}
	if refused >= 0 || missing == 0 {
		end(refused)
		return
	}
	a, sent := g.h.Ask(cs, 1, int64(180*time.Millisecond), false), m.at.Now
	g.asks[a.ID] = func(d *AskDecision) {
		refused, ok := g.h.Decided(cs, 1, d, sent, ds)
		if !ok || refused < -1 {
			m.t.Fatalf("a decision came to nothing: %+v", d)
		}
		end(refused)
	}
	g.send([]Ask{a})
}

// client asks on a node again and again, with pauses of gap on average and gap/10 at least, until it is stopped.
func (m *mill) client(node int, gap time.Duration) (stop func()) {
	g, began, stopped := m.nodes[node], m.at.Now, false
	var again func()
	again = func() {
		if stopped {
			return
		}
		asked := m.at.Now
		g.take(func(ok bool, d limiter.Decision) {
			m.rest = max(m.rest, time.Duration(asked-began))
			began = m.at.Now
			m.judge(ok, d)
			m.after(gap/10+time.Duration(m.rng.ExpFloat64()*0.9*float64(gap)), again)
		})
	}
	again()
	return func() { stopped = true }
}

// judge holds a decision against the ideal bucket, which is full after so much of its refill.
func (m *mill) judge(ok bool, d limiter.Decision) {
	unit, now := int64(m.limit.Fill(1)), m.at.Now
	if ok {
		m.admitted++
	}
	if m.limit.Algorithm != limiter.GCRA {
		return
	}
	if ok {
		m.full, m.had = max(m.full, now)+unit, now
		return
	}
	free := max(m.full-now, 0) + unit*(1-m.limit.Burst) // in so long it has a unit
	if free > 0 {
		m.early = max(m.early, time.Duration(free)-d.RetryAfter)
		return
	}
	m.had = max(m.had, now+free)
	m.idle = max(m.idle, time.Duration(now-m.had))
}

// weather is how messages and keep-alives fare.
type weather struct {
	name         string
	delay, slack func(*rand.Rand) time.Duration
}

var weathers = []weather{
	{"one machine", exponential(50*time.Microsecond, 50*time.Microsecond), exponential(0, 0)},
	{"one site", exponential(time.Millisecond, time.Millisecond), exponential(0, time.Millisecond)},
	{"a machine with too much to do", func(r *rand.Rand) time.Duration {
		if r.IntN(50) == 0 {
			return min(exponential(0, 40*time.Millisecond)(r), 80*time.Millisecond) // an ask's budget is 250 ms
		}
		return exponential(0, 2*time.Millisecond)(r)
	}, exponential(0, 50*time.Millisecond)},
}

func exponential(least, beyond time.Duration) func(*rand.Rand) time.Duration {
	return func(r *rand.Rand) time.Duration { return least + time.Duration(r.ExpFloat64()*float64(beyond)) }
}

// TestHammeredBucketKeepsItsWord: of a small bucket that one node asks for without a rest every unit is there when it
// has come, and who is refused hears when that is: not earlier than it is, but for what is on its way.
func TestHammeredBucketKeepsItsWord(t *testing.T) {
	for _, l := range []*limiter.Limit{small(60, time.Minute, 5), small(40, time.Minute, 40), small(10, time.Second, 10)} {
		for _, w := range weathers {
			for node := range 2 {
				for seed := range uint64(20) {
					m := newMill(t, seed, *l, w)
					m.client(node, 10*time.Millisecond)
					m.run(10 * time.Second)
					came := int(l.Burst) + int(10*time.Second/l.Fill(1))
					if m.admitted < came-1 || m.admitted > came+1 {
						t.Errorf("%d of %v, %s, node %d, seed %d: %d were admitted, and %d came", l.Burst, l.Rate, w.name, node, seed, m.admitted, came)
					}
					if most := 2*m.slowest + time.Millisecond; m.early > most {
						t.Errorf("%d of %v, %s, node %d, seed %d: a word was %s early; a round trip is %s at most", l.Burst, l.Rate, w.name, node, seed, m.early, m.slowest)
					}
					if most := 2*m.slowest + m.rest + 50*time.Millisecond; m.idle > most {
						t.Errorf("%d of %v, %s, node %d, seed %d: a unit was refused that was there for %s", l.Burst, l.Rate, w.name, node, seed, m.idle)
					}
				}
			}
		}
	}
}

// TestSmallBucketIsUsedUp: through whatever nodes they ask, those who ask get all of a small bucket while they do, and
// later no unit stays where it is not asked for.
func TestSmallBucketIsUsedUp(t *testing.T) {
	window := &limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 40, Per: time.Minute}, Revision: 1}
	for _, l := range []*limiter.Limit{small(40, time.Minute, 40), window} {
		for _, w := range weathers {
			for _, nodes := range [][]int{{0}, {1}, {0, 1}, {1, 2}, {0, 1, 2}} {
				for seed := range uint64(10) {
					m := newMill(t, seed, *l, w)
					for _, n := range nodes {
						m.client(n, 7*time.Millisecond)
					}
					if m.run(1500 * time.Millisecond); m.admitted < 40 {
						t.Errorf("algorithm %v, %s, nodes %v, seed %d: %d of 40 were admitted", l.Algorithm, w.name, nodes, seed, m.admitted)
					}
					m.run(4 * time.Second)
					if most := 2*m.slowest + KeepEvery + 400*time.Millisecond; m.idle > most {
						t.Errorf("%s, nodes %v, seed %d: a unit was refused that was there for %s", w.name, nodes, seed, m.idle)
					}
				}
			}
		}
	}
}

// TestNewcomerFindsWhatWasLentWhole: who asks of a bucket that was lent whole to another, who has gone, gets what lies there
// at once, but for a part of a unit, and then what comes.
func TestNewcomerFindsWhatWasLentWhole(t *testing.T) {
	limit := small(60, time.Minute, 5)
	for _, w := range weathers {
		for _, nodes := range [][2]int{{1, 2}, {1, 0}, {0, 1}} {
			for _, after := range []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, 1100 * time.Millisecond, 2100 * time.Millisecond, 5 * time.Second, 12 * time.Second} {
				for seed := range uint64(5) {
					m := newMill(t, seed, *limit, w)
					stop := m.client(nodes[0], 10*time.Millisecond)
					m.run(4 * time.Second)
					stop()
					m.run(after)
					const lag = 100 * time.Millisecond // of the first behind the ideal bucket
					there := int(limit.Burst) - int((max(m.full-m.at.Now, 0)+int64(lag+time.Second)-1)/int64(time.Second))
					before := m.admitted
					m.client(nodes[1], 10*time.Millisecond)
					m.run(500 * time.Millisecond)
					if n := m.admitted - before; n < there-1 {
						t.Errorf("%s, nodes %v, %s later, seed %d: %d of %d that were there", w.name, nodes, after, seed, n, there)
					}
					m.run(2500 * time.Millisecond)
					if n := m.admitted - before; n < there+2 {
						t.Errorf("%s, nodes %v, %s later, seed %d: %d of %d that were there and 3 that came", w.name, nodes, after, seed, n, there)
					}
				}
			}
		}
	}
}

func small(count int64, per time.Duration, burst int64) *limiter.Limit {
	return &limiter.Limit{Rate: limiter.Rate{Count: count, Per: per}, Burst: burst, Revision: 1}
}
