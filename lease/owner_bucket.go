package lease

import (
	"hash/maphash"
	"math"
	"math/bits"

	"headgate/limiter"
)

// bucket is what the owner keeps of one, beside its key: 56 bytes.
type bucket struct {
	limit     *limiter.Limit
	state     limiter.State // of a durable limit: unused, see reservoir
	partition uint32
	first     uint32 // of its series, by number in the pool; 0: none
}

// The flags of a series.
const (
	seriesEnded     = 1 << iota // the lease: it counts no more; refunds still come
	seriesPending               // the last Number is not acknowledged
	seriesMore                  // Granted rose while it was
	seriesInherited             // opened by an owner of before: see Owner.inherited
	seriesSlots                 // of a semaphore
	seriesRolled
	seriesDirty  // its lease is to be sent with this step's responses
	seriesQueued // it is in its peer's queue
)

// series is one, with its lease: 96 bytes. Where the last Number is not acknowledged the lease counts
// with the larger of share and old share, and of depth and old depth (R3).
type series struct {
	tagged                            uint64 // the number and, above it, when it was last reported
	granted, returned, refunded, debt int64
	depth, oldDepth                   int64
	direct                            float64 // units of direct decisions, and all that the share brought
	share, oldShare                   uint32
	high                              uint32 // GCRA: the upper half of the old share; fixed window: its index
	session                           uint32
	sent                              uint32 // the last Number
	next                              uint32
	peer                              uint16
	demand, level                     hint
	cost                              coarse
	flags                             uint8
}

func (s *series) is(flags uint8) bool { return s.flags&flags != 0 }

// A number has numberBits. Above it is whether the holder said that the lease is dead, and the reading
// of the last report in units of 2^readingShift ns.
const (
	numberBits   = 40
	dyingBit     = 1 << numberBits
	readingShift = 24
)

// dying says that the holder reported the lease dead: though it may still count, nothing more is put
// into it, and no decision names it.
func (s *series) dying() bool { return s.tagged&dyingBit != 0 }

func (s *series) number() uint64 { return s.tagged & (dyingBit - 1) }

func (s *series) reportedAt(now int64) {
	s.tagged = s.tagged&(2*dyingBit-1) | uint64(now)>>readingShift<<(numberBits+1)
}

// reported is the reading of the last report, to within 17 ms, if that is less than 39 hours back.
func (s *series) reported(now int64) int64 {
	age := (uint64(now)>>readingShift - s.tagged>>(numberBits+1)) & (1<<(63-numberBits) - 1)
	return now - int64(age<<readingShift)
}

// counted is what of the rate and at once the holder may spend.
func (s *series) counted() (share uint64, depth int64) {
	if s.is(seriesEnded | seriesSlots) {
		return 0, 0
	}
	share, depth = uint64(s.share), s.depth
	if s.is(seriesPending) {
		share = max(share, s.before())
		depth = max(depth, s.oldDepth)
	}
	return share, depth
}

// before is the old share. A lowered limit can make it more than the whole.
func (s *series) before() uint64 {
	if s.share == 0 && s.oldShare == 0 {
		return 0
	}
	return uint64(s.high)<<32 | uint64(s.oldShare)
}

func (s *series) setBefore(share uint64) { s.high, s.oldShare = uint32(share>>32), uint32(share) }

// lent is the slots of a semaphore that are with the holder.
func (s *series) lent() int64 { return s.granted - s.returned }

// hint is a figure to within 1 %: the upper half of a float32. Nothing that must hold depends on it.
type hint uint16

func newHint(v int64) hint { return hint(math.Float32bits(float32(max(v, 0))) >> 16) }

// atLeast is a hint that is no less than v: of what may be in a lease.
func atLeast(v int64) hint {
	h := newHint(v)
	if h.value() < v {
		h++
	}
	return h
}

func (h hint) value() int64 {
	f := float64(math.Float32frombits(uint32(h) << 16))
	if f >= math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(f)
}

// coarse is one to within an eighth: its highest bit and the three after it.
type coarse uint8

func newCoarse(v int64) coarse {
	if v < 8 {
		return coarse(max(v, 0))
	}
	n := bits.Len64(uint64(v)) - 1 // 3 to 62
	return coarse(min((n-2)<<3|int(v>>(n-3)&7), math.MaxUint8))
}

func (c coarse) value() int64 {
	if c < 8 {
		return int64(c)
	}
	return int64(8+c&7) << (c>>3 - 1)
}

// pool holds the series. They never move.
type seriesPool struct {
	slabs []*[seriesSlab]series
	free  []uint32
	used  uint32
	live  int
}

// seriesSlab fills a size class of the allocator.
const seriesSlab = 170

// at returns a series by its place, which is never 0.
func (p *seriesPool) at(i uint32) *series { return &p.slabs[(i-1)/seriesSlab][(i-1)%seriesSlab] }

func (p *seriesPool) open() (uint32, *series) {
	p.live++
	if n := len(p.free); n > 0 {
		i := p.free[n-1]
		p.free = p.free[:n-1]
		return i, p.at(i)
	}
	if p.used%seriesSlab == 0 {
		p.slabs = append(p.slabs, new([seriesSlab]series))
	}
	p.used++
	return p.used, p.at(p.used)
}

func (p *seriesPool) drop(i uint32) {
	*p.at(i) = series{}
	p.free = append(p.free, i)
	p.live--
}

// inherited is what a series that another owner opened has beside.
type inherited struct {
	granter uint64
	end     int64 // when the lease has ended for certain
}

// byWall says whether a limit goes by the wall clock.
func byWall(l *limiter.Limit) bool {
	return l.Algorithm == limiter.FixedWindow || l.Algorithm == limiter.SlidingWindow || l.Algorithm == limiter.SlidingLog
}

// reading is the clock that a bucket goes by.
func reading(l *limiter.Limit, at Instant) int64 {
	if byWall(l) {
		return at.Wall
	}
	return at.Now
}

// sums is what is lent of a bucket.
func (o *Owner) sums(b *bucket) (share uint64, depth int64) {
	for i := b.first; i != 0; i = o.pool.at(i).next {
		sh, d := o.pool.at(i).counted()
		share, depth = share+sh, depth+d
	}
	return share, min(depth, maxOutstanding)
}

// floor is what holds a bucket's level down.
func (o *Owner) floor(depth int64) int64 {
	if o.cfg.Break&BreakOutstanding != 0 {
		return 0
	}
	return depth
}

// touch brings a bucket to now: it ends the leases that have ended meanwhile, each at its time, and
// advances (R2).
func (o *Owner) touch(at Instant, b *bucket) {
	for {
		first, when := uint32(0), int64(never)
		for i := b.first; i != 0; i = o.pool.at(i).next {
			if end, ok := o.ended(at, b, i); ok && end < when {
				first, when = i, end
			}
		}
		if first == 0 {
			break
		}
		if b.limit.Algorithm == limiter.GCRA {
			o.advance(b, min(when, at.Now))
		}
		o.end(o.pool.at(first))
	}
	o.advance(b, reading(b.limit, at))
}

// ended says whether a lease that still counts has ended, and when.
func (o *Owner) ended(at Instant, b *bucket, i uint32) (when int64, ok bool) {
	s := o.pool.at(i)
	if s.is(seriesEnded | seriesSlots) {
		return 0, false
	}
	if s.is(seriesInherited) {
		if end := o.inherited[i].end; end <= at.Now {
			return end, true
		}
	} else if p := o.peers[s.peer]; s.session != p.session {
		return p.endedAt, true
	}
	if b.limit.Algorithm == limiter.FixedWindow && at.Wall != 0 && s.high != 0 && s.high != o.slice(b, at) {
		return at.Now, true
	}
	return 0, false
}

// advance is R2.
func (o *Owner) advance(b *bucket, now int64) {
	if b.limit.Durable() {
		return // nothing comes back by itself
	}
	share, depth := o.sums(b)
	if d := now - b.state.Newest(); share > 0 && d > 0 && b.limit.Algorithm == limiter.GCRA {
		perNS := float64(b.limit.Rate.Count) / float64(b.limit.Rate.Per) / limiter.ShareOne
		for i := b.first; i != 0; i = o.pool.at(i).next {
			s := o.pool.at(i)
			if sh, _ := s.counted(); sh > 0 {
				s.direct += float64(sh) * float64(d) * perNS * clockSlack
			}
		}
	}
	if o.cfg.Break&BreakAdvance != 0 {
		share = 0
	}
	b.limit.Advance(&b.state, now, share, o.floor(depth))
}

// end ends a lease: what was in it counts as spent, unless it was given back before.
func (o *Owner) end(s *series) {
	_, depth := s.counted()
	o.stats.Outstanding -= depth
	s.share, s.oldShare, s.depth, s.oldDepth = 0, 0, 0, 0
	s.flags = s.flags&^(seriesPending|seriesMore) | seriesEnded
}

// set puts a series under another share and depth, with the next Number (R3).
func (o *Owner) set(b *bucket, s *series, share uint32, depth int64) {
	_, was := s.counted()
	s.oldDepth = s.depth
	if b.limit.Algorithm == limiter.GCRA {
		s.setBefore(uint64(s.share))
	}
	s.share, s.depth = share, depth
	s.sent++
	s.flags |= seriesPending
	if o.cfg.Break&BreakLarger != 0 {
		s.flags &^= seriesPending
	}
	_, is := s.counted()
	o.stats.Outstanding += is - was
}

// acked is R3's acknowledgement of the last Number. Where there is more to say the next Number follows,
// and what the one before it may have brought counts until that is acknowledged.
func (o *Owner) acked(b *bucket, s *series) (more bool) {
	if s.is(seriesMore) && !s.dying() {
		s.flags &^= seriesMore
		s.sent++
		return true
	}
	_, was := s.counted()
	s.flags &^= seriesPending | seriesMore
	_, is := s.counted()
	o.stats.Outstanding += is - was
	return false
}

// window is the index of the window that is open, which never goes back, whatever a wall does; 0: none
// of which a lease can be.
func (o *Owner) window(b *bucket, at Instant) uint32 {
	if b.limit.Algorithm != limiter.FixedWindow || b.limit.Rate.Per < leastWindow || at.Wall <= 0 {
		return 0
	}
	if w := max(at.Wall, b.state.Newest()) / int64(b.limit.Rate.Per); w < math.MaxUint32 {
		return uint32(w)
	}
	return 0
}

// sliceOf is the length of what a series of a limit that goes by the wall clock is of: what comes back of it must
// not free what was never charged. A window, or so much of a log that to take all of it for expired
// when its beginning is loses little.
func sliceOf(l *limiter.Limit) int64 {
	if l.Algorithm == limiter.SlidingLog {
		return max(1, int64(l.Rate.Per)/64)
	}
	return max(1, int64(l.Rate.Per))
}

// slice is the present one's index, of windows too short to lend modulo 2^32; 0: there is none.
func (o *Owner) slice(b *bucket, at Instant) uint32 {
	switch {
	case !byWall(b.limit):
		return 0
	case b.limit.Algorithm == limiter.FixedWindow && b.limit.Rate.Per >= leastWindow:
		return o.window(b, at)
	}
	return uint32(max(at.Wall, b.state.Newest()) / sliceOf(b.limit))
}

// sliceBegan is when, by the wall clock, the slice began that a series of the bucket is of. False: it is of another
// limit's.
func (o *Owner) sliceBegan(b *bucket, s *series, at Instant) (wall int64, ok bool) {
	now := max(at.Wall, b.state.Newest()) / sliceOf(b.limit)
	behind := int64(int32(uint32(now) - s.high))
	return (now - behind) * sliceOf(b.limit), behind >= 0 && behind <= now
}

// fresh is the level of a bucket that has none (V3, V4).
func (o *Owner) fresh(l *limiter.Limit, part *part, at Instant) (s limiter.State) {
	if part.full || o.cfg.Break&BreakEmpty != 0 || l.Algorithm == limiter.Semaphore || l.Durable() {
		return limiter.State{}
	}
	if l.Algorithm == limiter.GCRA {
		return l.EmptyAt(at.Now, part.floor)
	}
	if at.Wall == 0 {
		return limiter.State{} // of a bucket whose state is about to be restored: see may
	}
	// The walls of two nodes differ: the owner of before may have lent of a window that opens here
	// only after the wait.
	floor := max(0, at.Wall-(at.Now-part.floor)+wallSlack)
	return l.EmptyAt(max(at.Wall, floor), floor)
}

// wallSlack is by how much the walls of two nodes that may open windows differ at most, in ns.
const wallSlack = int64(1e9)

// locate hashes a key.
func (o *Owner) locate(k *limiter.Key) uint32 {
	const odd = 0x9e3779b97f4a7c15
	whole := (maphash.String(o.seed, k.Limit)*odd+maphash.String(o.seed, k.Subject))*odd + maphash.String(o.seed, k.Tenant)
	hi, lo := bits.Mul64(whole, odd)
	return uint32(hi ^ lo)
}

func (o *Owner) find(k *limiter.Key) (*bucket, uint32) { return o.table.find(o.locate(k), k) }

// make adds a bucket for a key that has none, even above the bound.
func (o *Owner) make(k *limiter.Key, l *limiter.Limit, partition uint32, at Instant) (*bucket, uint32) {
	b, id := o.table.insert(o.locate(k), k)
	*b = bucket{limit: l, partition: partition, state: o.fresh(l, &o.parts[partition], at)}
	return b, id
}

// forget drops a bucket with its series.
func (o *Owner) forget(id uint32, b *bucket) {
	for b.first != 0 {
		o.unlink(b, b.first)
	}
	k := o.keyOf(id)
	delete(o.reservoirs, id)
	delete(o.recalls, id)
	delete(o.refusals, id)
	delete(o.askers, id)
	o.table.remove(o.locate(&k), id)
}

func (o *Owner) keyOf(id uint32) limiter.Key {
	slab, class, i := o.table.at(id)
	return slab.key(class, i)
}

func (o *Owner) bucketOf(id uint32) *bucket {
	slab, _, i := o.table.at(id)
	return &slab.values[i]
}

// link opens a series on a bucket for a peer's live session.
func (o *Owner) link(b *bucket, p *peer, at Instant) (uint32, *series) {
	i, s := o.pool.open()
	o.numbers++
	*s = series{tagged: o.numbers, session: p.session, peer: p.index, next: b.first, high: o.slice(b, at)}
	if b.limit.Algorithm == limiter.Semaphore {
		s.flags = seriesSlots
	}
	// What the holder said of the bucket by its series of before is the best guess.
	for j := b.first; j != 0; j = o.pool.at(j).next {
		if x := o.pool.at(j); x.peer == p.index {
			s.demand, s.cost = x.demand, x.cost
			break
		}
	}
	s.reportedAt(at.Now)
	b.first = i
	return i, s
}

// unlink drops a series.
func (o *Owner) unlink(b *bucket, i uint32) {
	s := o.pool.at(i)
	o.end(s)
	if b.first == i {
		b.first = s.next
	} else {
		for at := o.pool.at(b.first); ; at = o.pool.at(at.next) {
			if at.next == i {
				at.next = s.next
				break
			}
		}
	}
	delete(o.inherited, i)
	o.pool.drop(i)
}

// live is the series that a peer's next lease on a bucket goes by; 0: none.
func (o *Owner) live(b *bucket, p *peer, at Instant) uint32 {
	for i := b.first; i != 0; i = o.pool.at(i).next {
		s := o.pool.at(i)
		if s.peer == p.index && s.session == p.session && !s.is(seriesEnded|seriesInherited|seriesRolled) && !s.dying() &&
			s.is(seriesSlots) == (b.limit.Algorithm == limiter.Semaphore) && (s.is(seriesSlots) || !byWall(b.limit) || s.high == o.slice(b, at)) {
			return i
		}
	}
	return 0
}

// intern gives equal limits one place.
func (o *Owner) intern(l *limiter.Limit) *limiter.Limit {
	if known, ok := o.limits[*l]; ok {
		return known
	}
	if len(o.limits) >= maxInterned {
		clear(o.limits) // buckets keep theirs; only the sharing is lost
	}
	own := *l
	o.limits[own] = &own
	return &own
}

// ahead says whether a limit is of a later policy than this process knows.
func (o *Owner) ahead(l *limiter.Limit) bool {
	if o.cfg.Newest == nil || l.Revision <= o.newest {
		return false
	}
	o.newest = max(o.newest, o.cfg.Newest())
	return l.Revision > o.newest
}

// told is a limit that a member told with a bucket's state, which is not lost for it: of a later policy than this
// process knows it binds only until somebody asks under one that it does.
func (o *Owner) told(l *limiter.Limit) *limiter.Limit {
	if !o.ahead(l) {
		return o.intern(l)
	}
	o.stats.Rejected++
	until := *l
	until.Revision = 0
	return o.intern(&until)
}

// supersede puts a bucket that was touched under l where l comes from a later policy (R9). Leases keep
// what they may spend until they are replaced.
func (o *Owner) supersede(at Instant, id uint32, b *bucket, l *limiter.Limit) {
	if l.Revision <= b.limit.Revision {
		return
	}
	from, to := b.limit, o.intern(l)
	b.limit = to
	same := *from
	if same.Revision = to.Revision; same == *to {
		return
	}
	if !from.Durable() && !to.Durable() {
		if to.Convert(&b.state, reading(to, at), from); o.cfg.Break&BreakConvert != 0 {
			b.state = limiter.State{}
		}
	} else {
		o.convertReservoir(at, id, b, from)
	}
	for i := b.first; i != 0; i = o.pool.at(i).next {
		switch s := o.pool.at(i); {
		case s.is(seriesEnded|seriesInherited) || s.sent == 0:
		case s.is(seriesSlots):
			// Its holder would not believe the lease under this limit, and never say that it came.
			if most := slotsOf(to); s.depth > most {
				o.set(b, s, 0, most)
				o.send(id, i)
			}
		default:
			o.replace(b, s, from)
			o.send(id, i)
		}
	}
	o.advance(b, reading(to, at))
}

// slotsOf is how many slots of a limit a holder may keep; 0: it has none.
func slotsOf(l *limiter.Limit) int64 {
	if l.Algorithm != limiter.Semaphore {
		return 0
	}
	return l.Burst
}

// replace puts a lease that was given under an older limit under the bucket's: by the next Number, or
// by the one after that.
func (o *Owner) replace(b *bucket, s *series, from *limiter.Limit) {
	share, before := s.share, uint64(s.share)
	if s.is(seriesPending) {
		s.flags |= seriesMore
		before = max(before, s.before())
	} else {
		s.sent++
		s.flags |= seriesPending
		s.oldDepth = s.depth
	}
	s.oldDepth, s.depth = max(s.depth, s.oldDepth), min(s.depth, b.limit.Capacity())
	if from.Algorithm != b.limit.Algorithm {
		s.share, s.oldShare, s.high, s.depth = 0, 0, 0, 0
		return
	}
	switch {
	case b.limit.Durable(): // nothing comes in by itself, but from the ledger
		s.share = 0
	case b.limit.Algorithm == limiter.GCRA:
		s.share = uint32(min(b.limit.Share(uint64(share), from), limiter.ShareOne))
		s.setBefore(b.limit.Share(before, from))
	}
}
