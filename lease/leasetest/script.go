package leasetest

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/limiter"
)

// Script is all that is done to a run from outside: what there is, who asks for what and when, and every
// fault. What it leaves to chance (delays, losses here and there) hangs on the seed.
type Script struct {
	Clocks     []clock
	Partitions int
	Buckets    []BucketSpec
	Whim       bool   // sizes of leases are anything
	MaxBuckets int    // at owners and holders; 0: enough
	Steps      []Step // in the order of At
}

// BucketSpec is a bucket of the run.
type BucketSpec struct {
	Key    limiter.Key
	Spread bool
	Limit  limiter.Limit
}

// Take is a client's request.
type Take struct {
	N       int
	Charges []TakeCharge
	Wait    int64 // ns that owners may take for a recall
	Hold    int64 // ns from the admission to the settle
	Twice   bool  // settled a second time
	Peek    bool
}

// TakeCharge is its part of one bucket.
type TakeCharge struct {
	Bucket       int
	Cost, Actual int64
	Oversize     limiter.Oversize
	Shadow       bool
}

// Step is one thing done to the run.
type Step struct {
	At   int64
	Kind StepKind
	Node int
	To   int   // another node; of links: the number of nodes is the ledger
	For  int64 // ns
	N    int64
	Take *Take
	Lim  *limiter.Limit
}

// StepKind says what.
type StepKind uint8

// The kinds of steps.
const (
	DoTake      StepKind = iota
	PauseProc            // for For, seen from outside as if it were gone
	PauseTake            // the next take pauses between its readings; N: the whole process does
	PauseOwner           // the owner pauses between its reading and what it does with it
	PauseStep            // the next step pauses between the rights' and the cores'
	PauseAnswer          // the owner pauses before it sends what it did
	Cut                  // nodes of mask N from the others
	CutOneWay            // from Node to To
	Lossy                // N per mille everywhere
	Slow                 // what is sent to Node comes N later
	Crash                // and starts again after For
	Leave                // gracefully, and comes back after For
	Zombie               // the process pauses, another of its name starts
	Move                 // partitions get new owners
	AwayAndBack          // A, B, A, while Node does not look
	Lag                  // Node applies no views for For
	Wild                 // a view of members N
	Policy               // a bucket (To) has a new limit
	Sweep
	Forge // of the next message from Node to To a twisted copy goes along
)

var stepNames = [...]string{
	"take", "pause", "pause take", "pause owner", "pause step", "pause answer", "cut", "cut one way", "lossy", "slow",
	"crash", "leave", "zombie", "move", "away and back", "lag", "wild view", "policy", "sweep", "forge",
}

func (s Step) String() string {
	text := fmt.Sprintf("%8.1f ms  %s", float64(s.At)/float64(ms), stepNames[s.Kind])
	if s.Kind == DoTake {
		text += fmt.Sprintf(" %d at %c:", s.Take.N, 'a'+s.Node)
		for _, c := range s.Take.Charges {
			text += fmt.Sprintf(" %d of bucket %d, used %d;", c.Cost, c.Bucket, c.Actual)
		}
		return text + fmt.Sprintf(" held %d ms", s.Take.Hold/ms)
	}
	text += fmt.Sprintf(" node %c to %d for %d ms, n %d", 'a'+s.Node, s.To, s.For/ms, s.N)
	if s.Lim != nil {
		text += fmt.Sprintf(" %+v", *s.Lim)
	}
	return text
}

// The phases of a run.
const (
	storm = 3500 * ms // faults and requests until then
	quiet = 4500 * ms // and then until all must be well
)

// maker makes a script from a seed.
type maker struct {
	rng *rand.Rand
	s   *Script
	n   int
}

// NewScript makes the script of a seed.
func NewScript(seed uint64) *Script {
	m := maker{rng: rand.New(rand.NewPCG(seed, 3)), s: &Script{}}
	nodes := 2 + m.rng.IntN(3)
	for range nodes {
		m.s.Clocks = append(m.s.Clocks, clock{offset: m.between(0, 1000*int64(time.Second)), ppm: m.between(-10_000, 10_000), wall: m.between(-400*ms, 400*ms)})
	}
	m.s.Partitions = 1 + m.rng.IntN(3)
	for i := range 1 + m.rng.IntN(3) {
		m.s.Buckets = append(m.s.Buckets, m.bucket(i))
	}
	m.s.Whim = m.chance(.5)
	if m.chance(.1) {
		m.s.MaxBuckets = 1 + m.rng.IntN(2)
	}
	m.load()
	m.faults()
	slices.SortStableFunc(m.s.Steps, func(a, b Step) int { return cmp.Compare(a.At, b.At) })
	return m.s
}

func (m *maker) between(from, to int64) int64 { return from + m.rng.Int64N(to-from+1) }
func (m *maker) chance(p float64) bool        { return m.rng.Float64() < p }
func (m *maker) node() int                    { return m.rng.IntN(len(m.s.Clocks)) }

func (m *maker) bucket(i int) BucketSpec {
	b := BucketSpec{Key: limiter.Key{Tenant: "t", Limit: fmt.Sprintf("l%d", i)}}
	switch {
	case i == 2 || m.chance(.2):
		b.Key.Tenant = ""
		b.Key.Subject = "model"
	case m.chance(.2):
		b.Key.Subject, b.Spread = "user", true
	}
	gcra := func(count int64, per time.Duration, burst int64) limiter.Limit {
		return limiter.Limit{Algorithm: limiter.GCRA, Rate: limiter.Rate{Count: count, Per: per}, Burst: burst, Revision: 1}
	}
	window := func(count int64, per time.Duration) limiter.Limit {
		return limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: count, Per: per}, Revision: 1}
	}
	switch m.rng.IntN(14) {
	case 0, 1:
		b.Limit = gcra(20, time.Second, 10)
	case 2, 3:
		b.Limit = gcra(100, time.Second, 200)
	case 4:
		b.Limit = gcra(5, time.Second, 50)
	case 5, 6:
		b.Limit = gcra(3000, time.Minute, 25)
	case 7:
		b.Limit = gcra(1000, time.Second, 1000)
	case 8, 9:
		b.Limit = window(40, time.Second)
	case 10:
		b.Limit = window(100, 2*time.Second)
	case 11, 12:
		b.Limit = limiter.Limit{Algorithm: limiter.Semaphore, Burst: m.between(1, 8), Revision: 1}
	case 13:
		b.Limit = gcra(60, 90*time.Second, 100)
		if m.chance(.5) {
			b.Limit = window(200, 90*time.Second)
		}
	}
	return b
}

// load makes requests: of each bucket less, as much, or more than it has.
func (m *maker) load() {
	for i, b := range m.s.Buckets {
		typical, perSecond := m.demand(&b.Limit)
		heavy := m.node()
		for at := m.between(0, 400*ms); at < storm; {
			m.request(at, i, typical, heavy)
			gap := int64(float64(time.Second) / perSecond * m.rng.ExpFloat64())
			if m.chance(.03) { // a burst of requests
				gap = 0
			}
			at += min(gap, 300*ms) + m.between(0, 300_000)
		}
	}
}

// demand is a typical cost and how many requests come a second.
func (m *maker) demand(l *limiter.Limit) (typical int64, perSecond float64) {
	load := []float64{.5, 1, 2, 6}[m.rng.IntN(4)]
	capacity, rate := float64(l.Capacity()), 0.
	if l.Algorithm == limiter.Semaphore {
		return 1, 12 * load
	}
	rate = float64(l.Rate.Count) / l.Rate.Per.Seconds()
	units := load * (capacity/(float64(storm)/float64(time.Second)) + rate)
	perSecond = []float64{8, 25, 40}[m.rng.IntN(3)]
	return max(1, int64(units/perSecond)), min(perSecond, units)
}

func (m *maker) request(at int64, b int, typical int64, heavy int) {
	m.n++
	take := &Take{N: m.n, Wait: m.between(0, 100*ms), Hold: m.between(0, 600*ms), Twice: m.chance(.1), Peek: m.chance(.01)}
	if m.chance(.1) {
		take.Hold = m.between(0, 2500*ms)
	}
	buckets := []int{b}
	if m.chance(.25) {
		buckets = append(buckets, m.rng.IntN(len(m.s.Buckets)))
	}
	for n, i := range buckets {
		l := &m.s.Buckets[i].Limit
		if n > 0 && i == b {
			continue
		}
		c := TakeCharge{Bucket: i, Cost: 1, Shadow: m.chance(.03)}
		if n == 0 && l.Algorithm != limiter.Semaphore {
			c.Cost = m.between(1, 2*typical-1)
		}
		if m.chance(.02) {
			c.Cost = l.Capacity() + m.between(-3, 3)
			c.Oversize = limiter.Oversize(m.rng.IntN(2))
		}
		if m.chance(.01) {
			c.Cost = 0
		}
		c.Cost = max(c.Cost, 0)
		c.Actual = c.Cost
		switch {
		case m.chance(.3):
			c.Actual = m.between(0, c.Cost)
		case m.chance(.1):
			c.Actual = c.Cost + m.between(0, 2*typical)
		}
		take.Charges = append(take.Charges, c)
	}
	node := heavy
	if m.chance(.5) {
		node = m.node()
	}
	m.add(Step{At: at, Kind: DoTake, Node: node, Take: take})
}

func (m *maker) add(s Step) { m.s.Steps = append(m.s.Steps, s) }

// faults makes the adversary's plan.
func (m *maker) faults() {
	if m.chance(.05) {
		return
	}
	for at := m.between(100*ms, 900*ms); at < storm-100*ms; at += m.between(40*ms, 500*ms) {
		m.fault(at)
	}
}

func (m *maker) fault(at int64) {
	nodes := len(m.s.Clocks)
	s := Step{At: at, Node: m.node(), To: m.rng.IntN(nodes + 1), For: min(m.between(20*ms, 2500*ms), storm-at)}
	switch m.rng.IntN(27) {
	case 0:
		s.Kind = PauseProc
	case 1, 2:
		s.Kind, s.N = PauseTake, m.between(0, 1)
		if m.chance(.5) {
			s.For = m.between(1, 60*ms)
		}
	case 3, 4:
		s.Kind = PauseOwner
		if m.chance(.5) {
			s.For = m.between(1, 60*ms)
		}
	case 5:
		s.Kind = PauseAnswer
	case 26:
		s.Kind = PauseStep
	case 6, 7:
		s.Kind, s.N = Cut, m.rng.Int64N(1<<nodes)
	case 8:
		s.Kind = CutOneWay
	case 9, 10:
		s.Kind, s.N = Lossy, m.between(100, 700)
	case 11:
		s.Kind, s.N = Slow, m.between(100*ms, 1200*ms)
	case 12, 13, 14:
		s.Kind, s.For = Crash, m.between(ms, 1500*ms)
	case 15, 16:
		s.Kind, s.For = Leave, m.between(ms, 1500*ms)
	case 17:
		s.Kind = Zombie
	case 18, 19:
		s.Kind, s.N = Move, m.rng.Int64()
	case 20:
		s.Kind = AwayAndBack
		s.For = m.between(20*ms, 300*ms)
		if m.chance(.5) {
			s.For = m.between(1100*ms, 2400*ms)
		}
	case 21:
		s.Kind = Lag
	case 22:
		s.Kind, s.N = Wild, m.rng.Int64N(1<<nodes)
	case 23:
		m.policy(&s)
	case 24, 25:
		s.Kind = Forge
	}
	m.add(s)
	if m.chance(.3) {
		m.add(Step{At: at, Kind: Sweep, Node: m.node()})
	}
}

func (m *maker) policy(s *Step) {
	s.Kind, s.To, s.For = Policy, m.rng.IntN(len(m.s.Buckets)), m.between(0, 300*ms)
	l := m.s.Buckets[s.To].Limit
	factor := func(n int64) int64 { return max(1, n*[]int64{1, 2, 4, 8}[m.rng.IntN(4)]/4) }
	if l.Algorithm != limiter.Semaphore {
		l.Rate.Count = factor(l.Rate.Count)
	}
	if l.Burst > 0 && l.Algorithm != limiter.FixedWindow {
		l.Burst = factor(l.Burst)
	}
	m.n++
	l.Revision = uint64(m.n) // they rise
	s.Lim = &l
}
