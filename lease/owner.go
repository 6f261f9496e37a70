package lease

import (
	"hash/maphash"
	"math"
	"slices"

	"headgate/limiter"
)

// OwnerConfig is what an Owner is made of.
type OwnerConfig struct {
	Self   uint64 // this process's incarnation
	Rights Rights
	Sizer  Sizer // nil: the default
	// MaxBuckets bounds the buckets; 0: DefaultMaxBuckets. Hand-offs and rolled slots are taken above it.
	MaxBuckets int
	// Wait is how long after a view nobody can still act on the one before, in ns; V4.
	Wait int64
	// Newest see ManagerConfig.
	Newest func() uint64
	Break  Rule // for tests that show that a broken rule is missed; 0 in use
}

// The bounds of an Owner, beside MaxBuckets.
const (
	maxReports  = 1024 // a message, and leases in one
	maxAsks     = 1024 // a message
	maxParked   = 4096
	maxEarly    = 1 << 16 // reports that wait for a hand-over
	maxPeers    = math.MaxUint16
	maxInterned = 1 << 16
	maxRefused  = 64         // refusals remembered a bucket
	maxAskers   = 64         // holders without a series remembered a bucket
	maxKey      = 1 << 10    // bytes of a key
	maxRolled   = wireRolled // buckets in a roll
	maxBuried   = 4096       // processes remembered that left with slots

	maxTotal       = 1 << 62 // of a running total
	maxOutstanding = 1 << 60

	// leastWindow is the shortest window of which there are leases.
	leastWindow = 1e9
	// clockSlack is by how much more a holder's share may have brought by its own clock.
	clockSlack = 1.02
	// retryEvery is when what was not acknowledged is sent again with an answer.
	retryEvery = int64(50e6)
	// maxPark bounds what an Ask may wait, leastDraw what one waits for the ledger at least.
	maxPark   = int64(2e9)
	leastDraw = int64(250e6)
	// maxUnrolled is how often a member is asked for a roll, once in KeepEvery, before Owing names it: a
	// process that was stopped for a while itself has asked nobody meanwhile.
	maxUnrolled = 12

	// never is a time that does not come.
	never = math.MaxInt64
)

// Owner owns partitions and lends their buckets (DESIGN.md). It does no I/O, reads no clock, and
// is not safe for concurrent use. `at` never goes back. It keeps nothing of the requests given to
// it but their strings' and slices' contents.
type Owner struct {
	cfg   OwnerConfig
	sizer Sizer
	view  *View
	parts []part

	seed      maphash.Seed
	table     shard[bucket]
	pool      seriesPool
	inherited map[uint32]inherited // by place in the pool
	limits    map[limiter.Limit]*limiter.Limit

	peers []*peer           // by index; nil: free
	index map[uint64]uint16 // of peers, by incarnation

	numbers  uint64 // of series given out
	sessions uint32 // numbers given out
	draws    uint64

	// Of few buckets, by id.
	reservoirs map[uint32]*reservoir
	recalls    map[uint32]*recall
	refusals   map[uint32][]refused
	waiting    map[uint32]int // parked asks
	askers     map[uint32][]asker

	drawing   []uint32    // buckets whose reservoir has a draw under way, in order
	parked    []*question // that wait for what was recalled, or for the ledger
	wantAt    int64       // when members that owe a roll are asked again
	spare     *question
	early     []early
	earlyAt   int64 // when the first of them waits no longer
	giving    []*giving
	loaded    *saved
	rollSince uint64           // the newest view since which a partition is this process's
	buryAt    int64            // when a process that left is forgotten
	buried    map[uint64]int64 // slots that were freed with it

	used  []uint32 // buckets that no sweep may forget just now
	step  step
	sight Sight
	looks uint64
	steps uint64 // taken

	newest uint64 // what Newest said last
	stats  OwnerStats
}

// step is what one call gathers.
type step struct {
	at      Instant
	answer  *Response
	pushes  []*Response
	dirty   []leaseRef // leases to be sent
	recalls []uint32   // of which these are recalled: their holders answer a push at once, and no answer
	stirred []uint32   // buckets whose parked asks may go on
	wants   []want     // leases to be sized
}

// leaseRef names a lease; where another series has come to its place its number differs.
type leaseRef struct {
	id, series uint32
	number     uint64
}

type want struct {
	id   uint32
	peer uint16
	asks bool // it asked in this step
	less bool // and was refused
}

// NewOwner returns an owner of nothing.
func NewOwner(c OwnerConfig) *Owner {
	if c.MaxBuckets == 0 {
		c.MaxBuckets = DefaultMaxBuckets
	}
	o := &Owner{
		cfg: c, sizer: c.Sizer,
		seed:       maphash.MakeSeed(),
		inherited:  map[uint32]inherited{},
		limits:     map[limiter.Limit]*limiter.Limit{},
		index:      map[uint64]uint16{},
		reservoirs: map[uint32]*reservoir{},
		recalls:    map[uint32]*recall{},
		refusals:   map[uint32][]refused{},
		waiting:    map[uint32]int{},
		askers:     map[uint32][]asker{},
		buryAt:     never,
		wantAt:     never,
		earlyAt:    never,
		buried:     map[uint64]int64{},
	}
	if o.sizer == nil {
		o.sizer = Topup{}
	}
	return o
}

// Handle answers a request: the first Response at once, the others are pushes to any holders.
func (o *Owner) Handle(at Instant, r *Request) []*Response {
	o.begin(at)
	answer := &Response{Owner: o.cfg.Self, Holder: r.Holder, Answers: r.Seq}
	p := o.admit(at, r)
	if p == nil {
		for i := range r.Asks[:min(len(r.Asks), maxAsks)] {
			answer.Decisions = append(answer.Decisions, AskDecision{ID: r.Asks[i].ID, Refused: NotOwner})
		}
		return []*Response{answer}
	}
	o.step.answer, answer.Epoch = answer, o.view.Epoch
	fresh := p.note(r.Seq)
	o.greet(at, p, r, answer)
	for i := range r.Reports {
		o.report(at, p, r.Epoch, &r.Reports[i])
	}
	if r.Roll != nil {
		o.roll(at, p, r.Roll)
	}
	o.unpark(at)
	for i := range r.Asks {
		if fresh {
			o.ask(at, p, r.Epoch, &r.Asks[i])
		}
	}
	o.lend(at)
	o.resend(at, p)
	if p.member && p.rolled < o.rollSince {
		answer.RollWanted = o.rollSince
	}
	return o.flush()
}

// admit says whose request it is; nil: of nobody to whom this owner may say anything now.
func (o *Owner) admit(at Instant, r *Request) *peer {
	switch {
	case r.Owner != o.cfg.Self, r.Seq == 0, len(r.Reports) > maxReports, len(r.Asks) > maxAsks, r.Dropped > uint64(o.sessions), r.Session > uint64(o.sessions):
		o.stats.Rejected++
		return nil
	case o.view == nil || o.cfg.Rights.Lease(at.Now, o.view.Epoch) <= 0:
		return nil
	}
	return o.peer(r.Holder)
}

// begin starts a step; flush ends it.
func (o *Owner) begin(at Instant) {
	s := &o.step
	o.steps++
	*s = step{at: at, dirty: s.dirty[:0], recalls: s.recalls[:0], stirred: s.stirred[:0], wants: s.wants[:0]}
}

// to is the response to a peer in this step.
func (o *Owner) to(p *peer) *Response {
	if o.step.answer != nil && o.step.answer.Holder == p.incarnation {
		return o.step.answer
	}
	return o.push(p)
}

// push is the response to a peer in this step that answers nothing.
func (o *Owner) push(p *peer) *Response {
	for _, r := range o.step.pushes {
		if r.Holder == p.incarnation {
			return r
		}
	}
	r := &Response{Owner: o.cfg.Self, Holder: p.incarnation, Epoch: o.view.Epoch, Session: uint64(p.session)}
	o.step.pushes = append(o.step.pushes, r)
	return r
}

// send notes that a lease is to be sent with this step's responses, as it is then.
func (o *Owner) send(id, i uint32) {
	if s := o.pool.at(i); !s.is(seriesDirty) {
		s.flags |= seriesDirty
		o.step.dirty = append(o.step.dirty, leaseRef{id, i, s.number()})
	}
}

// flush is all that a step has to say.
func (o *Owner) flush() []*Response {
	for _, ref := range o.step.dirty {
		if ref.number != o.pool.at(ref.series).number() {
			continue // it is gone
		}
		s := o.pool.at(ref.series)
		s.flags &^= seriesDirty
		p := o.peers[s.peer]
		if o.parts[o.bucketOf(ref.id).partition].since == 0 {
			continue // it is handed over
		}
		if !s.is(seriesSlots) && (s.is(seriesEnded) || s.session != p.session) {
			continue
		}
		r := o.to(p)
		if slices.Contains(o.step.recalls, ref.series) {
			r = o.push(p)
		}
		o.touch(o.step.at, o.bucketOf(ref.id)) // for the level that is told
		if len(r.Leases) < maxReports {
			r.Leases = append(r.Leases, o.leaseOf(ref.id, s))
		}
		if s.is(seriesPending) && !s.is(seriesQueued) {
			s.flags |= seriesQueued
			p.pending = append(p.pending, unacked{ref, o.step.at.Now})
		}
	}
	if o.step.answer == nil {
		return o.step.pushes
	}
	return append([]*Response{o.step.answer}, o.step.pushes...)
}

// leaseOf is a lease as it is sent.
func (o *Owner) leaseOf(id uint32, s *series) Lease {
	b := o.bucketOf(id)
	l := Lease{
		Bucket: Bucket{Partition: b.partition, Key: o.keyOf(id)}, Series: s.number(), Number: uint64(s.sent),
		Share: s.share, Depth: s.depth, Granted: s.granted, Limit: *b.limit,
		Level: o.shown(o.step.at, id, b), Rolled: s.is(seriesRolled),
	}
	if b.limit.Algorithm == limiter.FixedWindow {
		l.Window = int64(s.high)
	}
	if s.is(seriesSlots) {
		l.Share = 0
	}
	return l
}

// level is what is left with the owner of a bucket that was touched.
func (o *Owner) level(at Instant, id uint32, b *bucket) int64 {
	if b.limit.Durable() {
		return o.left(at, id, b)
	}
	return b.limit.Level(&b.state, reading(b.limit, at))
}

// shown is the level as others are told: of a durable limit, with what the ledger has left.
func (o *Owner) shown(at Instant, id uint32, b *bucket) int64 {
	if level := o.level(at, id, b); !b.limit.Durable() {
		return level
	}
	return o.whole(at, id, b)
}

// resend says again what a peer has not acknowledged.
func (o *Owner) resend(at Instant, p *peer) {
	n := 0
	for _, w := range p.pending {
		if at.Now-w.sent < retryEvery || len(o.step.dirty) >= maxReports {
			break
		}
		n++
		s := o.pool.at(w.series)
		if s.number() != w.number {
			continue
		}
		s.flags &^= seriesQueued
		if s.is(seriesPending) && (s.session == p.session || s.is(seriesSlots)) {
			o.send(w.id, w.series)
		}
	}
	p.pending = p.pending[n:]
}

// Tick does what time brings: parked asks that end, processes that left and are forgotten.
func (o *Owner) Tick(at Instant) []*Response {
	o.begin(at)
	if o.view == nil {
		return nil
	}
	if at.Now >= o.buryAt {
		o.bury(at)
	}
	if at.Now >= o.wantAt {
		o.wantRolls(at)
	}
	if at.Now >= o.earlyAt {
		o.installEarly(at)
	}
	o.expire(at)
	o.unpark(at)
	o.lend(at)
	return o.flush()
}

// Next is when Tick has something to do, by Instant.Now.
func (o *Owner) Next() int64 {
	next := min(o.buryAt, o.wantAt, o.earlyAt)
	for _, w := range o.parked {
		if next = min(next, w.until); w.retry != 0 {
			next = min(next, w.retry)
		}
	}
	return next
}
