package leasetest

import (
	"reflect"

	"headgate/lease"
)

// procsOf is how many processes the small world has: a and b own, b and c hold.
const procsOf = 3

// engine knows what an act does at a process in a state: it is played once, in a lab, and then looked up. What an act
// does hangs on the process, on what the judge knows of the bucket, and on nothing else; so the many states that differ
// elsewhere share it.
type engine struct {
	*lab
	plain  bool
	views  []*lease.View // all that come
	copier *copier
	future *copier

	locals    []known
	owners    map[uint64]owning
	oracles   []*oracle
	packets   []packet
	hashes    struct{ oracles, packets []uint64 }
	index     map[uint64]int32 // of all of them, by hash
	looks     map[uint64]int32 // of views
	did       map[step1]done
	packetsAt map[atTime]uint64
	judged    map[check1]judged

	outcomes map[uint64]bool // nil: nobody asks
	shown    *copier         // hashes them

	plays, checks int
}

// known is a process in a state, at an instant.
type known struct {
	*local
	hash uint64
	view int32
	proc byte
	at   int64 // when it is
	next int64 // when its owner has something to do, by true time
}

// step1 is an act at a process.
type step1 struct {
	local, oracle, n int32
	kind             byte
	views            byte
}

type done struct {
	local, oracle int32
	sent          []int32
	failed        string
}

type check1 struct {
	now    int64
	views  [procsOf]int32
	oracle int32
}

type judged struct {
	oracle  int32
	failed  string
	outcome uint64 // of what the judge was shown, if somebody asks
}

const nobody = -1

func newEngine(s *Space) (*engine, state) {
	rules, future := searchRules(), futureRules()
	if s.plain {
		rules, future = plainRules(), plainRules()
	}
	e := &engine{
		lab: s.lab(), plain: s.plain, outcomes: s.outcomes, shown: newCopier(futureRules(), searchShared()), copier: newCopier(rules, searchShared()), future: newCopier(future, searchShared()),
		index: map[uint64]int32{}, owners: map[uint64]owning{}, looks: map[uint64]int32{}, did: map[step1]done{}, packetsAt: map[atTime]uint64{}, judged: map[check1]judged{},
	}
	e.views = e.viewsAhead(s.Move)
	return e, e.split()
}

// lab is the small world at its beginning.
func (s *Space) lab() *lab {
	w := newSmallLab(Config{Break: s.Break, Sizer: s.Sizer}, procsOf, s.Limit)
	for _, p := range w.procs {
		shrink(p.holder)
	}
	if s.Warm {
		for _, name := range "bc" {
			w.take(w.proc(name), 1)
			w.flush()
			w.settle(w.proc(name), 1)
		}
	}
	w.look()
	return w
}

// shrink has a holder remember fewer asks: it is copied with them.
func shrink(h *lease.Holder) {
	asks := reflect.ValueOf(h).Elem().FieldByName("asks")
	few := reflect.MakeSlice(asks.Type(), maxAsksMade, maxAsksMade)
	reflect.NewAt(asks.Type(), asks.Addr().UnsafePointer()).Elem().Set(few)
}

// maxAsksMade bounds the asks that a holder of the small world makes; one more panics.
const maxAsksMade = 16

// state is the small world: what its processes are and the judge knows, by number, and what may still happen.
type state struct {
	now    int64
	local  [procsOf]int32
	oracle int32
	ended  bool // the first owner's time
	sent   int8
	again  int32 // the message that comes for the second time
	kept   byte  // who sent a keep-alive in this instant
	left   budget
	bag    [maxBag]int32
	bagged int8
}

const maxBag = 8

// budget is how often what can happen at any time may.
type budget struct{ takes, refunds, debts, repeats, times int8 }

// split makes a state of what is in the lab.
func (e *engine) split() (s state) {
	s.now, s.again = e.now, nobody
	parts := [procsOf]*local{}
	for i, p := range e.procs {
		if parts[i] = nil; p.alive {
			parts[i] = copyOf(e.copier, e.part(p))
		}
	}
	s.oracle = e.ownOracle(copyOf(e.copier, e.lab.oracle()))
	for _, m := range e.bag {
		s.put(e.internPacket(m))
	}
	for i, l := range parts {
		if s.local[i] = nobody; l != nil {
			e.clear()
			e.put(e.procs[i], l)
			s.local[i] = e.intern(e.procs[i])
		}
	}
	return s
}

func (s *state) put(m int32) bool {
	if int(s.bagged) == len(s.bag) {
		return false
	}
	i := s.bagged
	for ; i > 0 && s.bag[i-1] > m; i-- {
		s.bag[i] = s.bag[i-1]
	}
	s.bag[i] = m
	s.bagged++
	return true
}

func (s *state) drop(i int) {
	copy(s.bag[i:], s.bag[i+1:])
	s.bagged--
	s.bag[s.bagged] = 0
}

// intern gives a process, which is alone in the lab, its number.
func (e *engine) intern(p *proc) int32 {
	v := e.seen(p)
	l := &local{
		proc: *p, open: e.open, sent: e.judge.sent, live: e.judge.live, granted: e.judge.granted, opened: e.judge.opened, rolled: e.judge.rolled,
	}
	h := mix(e.hashOf(e.copier, l), uint64(e.now))
	if n, ok := e.index[h]; ok {
		return n
	}
	l.proc.readings = nil
	look := e.hashView(v)
	if _, ok := e.looks[look]; !ok {
		e.looks[look] = int32(len(e.looks)) + 1
	}
	next := p.clock.when(p.owner.Next())
	future := e.hashOf(e.future, l)
	e.share(l)
	e.locals = append(e.locals, known{local: l, at: e.now, hash: future, view: e.looks[look], proc: p.node.name[0], next: next})
	e.index[h] = int32(len(e.locals)) - 1
	// They are l's now.
	j := e.judge
	j.sent, j.live, j.granted = map[sentKey]int64{}, map[holding]int64{}, map[seriesID]int64{}
	j.opened, j.rolled = map[seriesID]uint64{}, map[holding]uint64{}
	return e.index[h]
}

// ownOracle gives what the judge knows its number.
func (e *engine) ownOracle(o *oracle) int32 {
	o.tidy(e.now)
	e.setNow()
	canon := hashOf(e.copier, o)
	h := mix(canon, uint64(e.now)) ^ 0x5555
	if n, ok := e.index[h]; ok {
		return n
	}
	e.oracles = append(e.oracles, o)
	e.hashes.oracles = append(e.hashes.oracles, canon)
	e.index[h] = int32(len(e.oracles)) - 1
	return e.index[h]
}

func (e *engine) internPacket(m packet) int32 {
	m.number = 0
	e.copier.now = lease.Instant{}
	h := hashOf(e.copier, &m) ^ 0xaaaa
	if n, ok := e.index[h]; ok {
		return n
	}
	e.packets = append(e.packets, m.clone())
	e.hashes.packets = append(e.hashes.packets, h)
	e.index[h] = int32(len(e.packets)) - 1
	return e.index[h]
}

// setNow has moments be hashed against now. All clocks of the small world show the same.
func (e *engine) setNow() { e.copier.now = e.procs[0].clock.read(e.now) }

func (e *engine) hashOf(c *copier, l *local) uint64 {
	c.now = l.proc.clock.read(e.now)
	h := mix(hashOf(c, l), l.proc.inc)
	if l.proc.node.name == "c" && !e.plain {
		return h
	}
	return mix(h, hashOf(c, &owning{l.proc.owner, l.proc.rights}))
}

// owning is what a process owns by.
type owning struct {
	owner  *lease.Owner
	rights *rights
}

// share has equal processes' owners be one, for they are large. Nobody changes what is kept here.
func (e *engine) share(l *local) {
	e.copier.now = l.proc.clock.read(e.now)
	h := mix(mix(hashOf(e.copier, &owning{l.proc.owner, l.proc.rights}), l.proc.inc), uint64(e.now))
	o, ok := e.owners[h]
	if !ok {
		o = owning{l.proc.owner, l.proc.rights}
		e.owners[h] = o
	}
	l.proc.owner, l.proc.rights = o.owner, o.rights
}

func (e *engine) hashView(v *view) uint64 {
	e.setNow()
	return hashOf(e.copier, v)
}

// packetHash is of a message as it counts at an instant.
func (e *engine) packetHash(now int64, m int32) uint64 {
	if r := e.packets[m].response; r == nil || len(r.Decisions) == 0 {
		return e.hashes.packets[m]
	}
	k := atTime{now, m}
	h, ok := e.packetsAt[k]
	if !ok {
		e.copier.now = e.procs[0].clock.read(now)
		h = hashOf(e.copier, &e.packets[m])
		e.packetsAt[k] = h
	}
	return h
}

type atTime struct {
	now int64
	m   int32
}

// load puts a process, alone, into the lab, to be played with.
func (e *engine) load(now int64, local, oracle int32, views int) *proc {
	k := &e.locals[local]
	e.clear()
	e.now, e.lab.views = now, e.views[:views]
	p := e.lab.proc(rune(k.proc))
	l := copyOf(e.copier, k.local)
	*p = l.proc
	e.open = l.open
	j := e.judge
	j.sent, j.live, j.granted, j.opened, j.rolled = l.sent, l.live, l.granted, l.opened, l.rolled
	if oracle >= 0 {
		e.know(copyOf(e.copier, e.oracles[oracle]))
	}
	return p
}

// act does an act at a process.
func (e *engine) act(now int64, local, oracle int32, kind byte, n int32, views int) done {
	k := step1{local, oracle, n, kind, byte(views)}
	if kind == actPass { // which tells the judge nothing
		k.oracle, oracle = nobody, nobody
	}
	if d, ok := e.did[k]; ok {
		return d
	}
	e.plays++
	p := e.load(now, local, oracle, views)
	e.blind = true
	drop := 0
	switch kind {
	case actDeliver:
		e.bag = append(e.bag, e.packets[n])
		drop = 1
		e.lab.deliver(0, true)
	case actPass:
		e.now += int64(n)
		e.renew()
	case actTick:
		p.own(ownerWork{do: p.owner.Tick})
	default:
		e.lab.do(act{kind: kind, proc: p.node.name[0], n: int(n)}, false)
	}
	e.blind = false
	d := done{failed: e.failed}
	for _, m := range e.bag[drop:] {
		d.sent = append(d.sent, e.internPacket(m))
	}
	d.oracle = nobody
	if kind != actPass {
		d.oracle = e.ownOracle(e.lab.oracle())
	}
	d.local = e.intern(p)
	e.did[k] = d
	return d
}

// check asks the judge, and puts what it knows of the past in order.
func (e *engine) check(s *state) (failed string) {
	k := check1{now: s.now, oracle: s.oracle}
	for i, l := range s.local {
		if l >= 0 {
			k.views[i] = e.locals[l].view
		}
	}
	if j, ok := e.judged[k]; ok {
		return e.judge1(s, j)
	}
	e.checks++
	e.clear()
	e.now, e.lab.views = s.now, e.views[:s.epoch()]
	e.know(copyOf(e.copier, e.oracles[s.oracle]))
	for i, l := range s.local {
		if l >= 0 {
			e.put(e.procs[i], e.locals[l].local)
		}
	}
	e.judge.check()
	j := judged{oracle: e.ownOracle(e.lab.oracle()), failed: e.failed}
	if e.outcomes != nil {
		j.outcome = e.outcome(s, j.oracle)
	}
	e.judged[k] = j
	return e.judge1(s, j)
}

func (e *engine) judge1(s *state, j judged) (failed string) {
	s.oracle = j.oracle
	if e.outcomes != nil {
		e.outcomes[j.outcome] = true
	}
	return j.failed
}

// outcome hashes what the judge sees, as the future counts it.
func (e *engine) outcome(s *state, oracle int32) uint64 {
	c := e.shown
	c.now = e.procs[0].clock.read(s.now)
	h := hashOf(c, e.oracles[oracle])
	if e.buckets[0].win != nil {
		h = mix(h, uint64(s.now))
	}
	for _, p := range e.procs {
		h = mix(h, hashOf(c, e.seen(p)))
	}
	return h
}

func (s *state) epoch() int {
	if s.ended {
		return 2
	}
	return 1
}

// hash is of all that can matter from here on.
func (e *engine) hash(s *state) uint64 {
	h := mix(1, e.hashes.oracles[s.oracle])
	if e.buckets[0].win != nil || e.plain { // windows go by the wall
		h = mix(h, uint64(s.now))
	}
	for _, l := range s.local {
		if l < 0 {
			h = mix(h, 7)
		} else {
			h = mix(h, e.locals[l].hash)
		}
	}
	bag := uint64(0)
	for _, m := range s.bag[:s.bagged] {
		x := mix(3, e.packetHash(s.now, m))
		if m == s.again {
			x++
		}
		bag += x
	}
	b := s.left
	h = mix(h, bag)
	h = mix(h, uint64(s.sent)|uint64(b.takes)<<8|uint64(b.refunds)<<16|uint64(b.debts)<<24|uint64(b.repeats)<<32|uint64(b.times)<<40|uint64(s.kept)<<48)
	if s.ended {
		h++
	}
	return h
}
