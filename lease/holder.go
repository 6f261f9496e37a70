package lease

import (
	"cmp"
	"hash/maphash"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"headgate/limiter"
)

// HolderConfig is what a Holder is made of.
type HolderConfig struct {
	Self  uint64 // this process's incarnation
	Clock Clock  // safe for concurrent use
	// MaxBuckets bounds the buckets; 0: DefaultMaxBuckets. Those with reservations that are still to be
	// settled are kept above it.
	MaxBuckets int
	// Wake says that a Request to an owner should not wait for the next keep-alive. It is called from
	// within the Holder's methods, with its lock held or not: it must not block or call back. May be nil.
	Wake  func(owner uint64)
	Break Rule // for tests that show that a broken rule is missed; 0 in use
}

const (
	// maxSaid bounds the reports of a Request, and the leases and refusals of a Response.
	maxSaid = 1024
	// maxFlight bounds the requests to one owner of which it is remembered what they said. What an older
	// one said is said again.
	maxFlight = 64
	// maxAsked bounds the asks of which it is remembered whom they went to; a power of two.
	maxAsked   = 1 << 13
	firstAsked = 1 << 6
	// maxTerms bounds the limits that are shared between leases.
	maxTerms = 1 << 12
	// maxRefusal bounds how long a refusal lease counts.
	maxRefusal = 10 * sessionFor
	// unusedAfter is how long a lease that nobody asks of is kept, and emptyAfter a bucket that holds
	// nothing.
	unusedAfter = 10 * sessionFor
	emptyAfter  = 3 * sessionFor
	// askFor is how long an ask may be on its way, as far as closing a series goes.
	askFor = 5 * sessionFor
	// maxShut is how many closed series of an owner are remembered one by one, twice.
	maxShut = 1 << 12
)

// Holder spends what owners lend to this process (DESIGN.md). It is safe for concurrent use, starts
// no goroutine and does no I/O.
type Holder struct {
	cfg   HolderConfig
	seed  maphash.Seed
	table atomic.Pointer[index] // written under mu
	view  atomic.Pointer[View]  // written under mu
	ids   atomic.Uint64
	stats struct{ rejected, discarded, void, lostDebt, full atomic.Uint64 }

	newsMu sync.Mutex
	news   []*tab // each once: see tab.noted

	mu       sync.Mutex
	since    []uint64  // by partition: the epoch that brought its owner
	peers    []*lender // by incarnation
	gone     []*lender // those that left the view, the earliest first: their numbers
	terms    map[period]*terms
	asks     []asked  // by ID
	buckets  []*purse // in no order that depends on their hashes, so that a seed repeats a run
	hand     int      // of buckets, the one that a sweep looks at next
	swept    int64    // when there was a sweep last
	undoing  map[*purse]*undoing
	draining bool
}

// asked is what is remembered of an ask on its way.
type asked struct {
	id, owner uint64
	peek      bool
}

// lender is an owner as this holder sees it. All of it is under Holder.mu.
type lender struct {
	id      uint64
	seq     uint64
	session *session // nil: none
	none    *session // what a series of no session has for one
	dropped uint64   // the highest session that was dropped
	// Until spendable leases of a session that is dropped may still be spent: the owner left a view, and
	// they kept their deadline. So long it is named that was dropped before: who is told ends a session (R5).
	named     uint64
	spendable int64
	rtt       int64 // ns; 0: not known
	flights   []flight
	queue     []*tab   // those of its partitions of which something is to be said, or that live
	extra     []Report // of series that are not kept
	backlog   bool     // the last request had no room for all that is new
	looked    int64    // when the queue was last gone through
	asking    int64    // when a lease was last asked for, as long as one may lie there unheard of; 0: it does not
	rolls     []*Roll  // the oldest first
	rolled    uint64   // the Epoch of the newest
	leases    int      // live ones
	// detached are leases that its partitions' owners of before lent.
	detached []*tab
	// shut are series that were closed and forgotten; of those up to shutUpTo it is not known which.
	shut, shutBefore map[uint64]bool
	shutUpTo         uint64
}

// flight is a request on its way.
type flight struct {
	seq   uint64
	sent  int64
	items []flown
}

// flown is what a request said of a series.
type flown struct {
	series     *tab
	mark, debt int64
	closed     bool
}

// NewHolder returns a holder of nothing, before its first view.
func NewHolder(c HolderConfig) *Holder {
	c.MaxBuckets = cmp.Or(c.MaxBuckets, DefaultMaxBuckets)
	h := &Holder{cfg: c, seed: maphash.MakeSeed(), terms: map[period]*terms{}, asks: make([]asked, firstAsked)}
	h.table.Store(newIndex(firstSlots))
	return h
}

func (h *Holder) breaks(r Rule) bool { return h.cfg.Break&r != 0 }

// Home is what a bucket is placed by: all buckets of a tenant by the tenant, with spread by tenant
// and subject; those of no tenant by limit and subject.
func Home(k *limiter.Key, spread bool) string {
	switch {
	case k.Tenant == "":
		return "\x00" + k.Limit + "\x00" + k.Subject
	case spread:
		return k.Tenant + "\x00" + k.Subject
	}
	return k.Tenant
}

// Owner says whom to ask about a charge; the zero Member: nobody.
func (h *Holder) Owner(c *limiter.Charge) (Member, Bucket) {
	v := h.view.Load()
	if v == nil {
		return Member{}, Bucket{Key: c.Key}
	}
	p := v.Place(Home(&c.Key, c.Spread))
	return v.OwnerOf(p), Bucket{Partition: p, Key: c.Key}
}

// Ask makes the question about the charges in which, all of one owner.
func (h *Holder) Ask(cs []limiter.Charge, which uint32, wait int64, peek bool) Ask {
	a := Ask{ID: h.ids.Add(1), Wait: wait, Peek: peek}
	for i := range cs {
		if which>>i&1 == 1 {
			c := &cs[i]
			_, b := h.Owner(c)
			a.Charges = append(a.Charges, AskCharge{Bucket: b, Limit: *c.Limit, Cost: max(c.Cost, 0), Oversize: c.Oversize, Shadow: c.Shadow})
		}
	}
	return a
}

// peer returns the owner with an incarnation, or nil.
func (h *Holder) peer(id uint64) *lender {
	if i, ok := slices.BinarySearchFunc(h.peers, id, (*lender).compare); ok {
		return h.peers[i]
	}
	return nil
}

// sessionOf is the session of an owner that this process goes by; none of it if there is none.
func (h *Holder) sessionOf(owner uint64) *session {
	if p := h.peer(owner); p != nil && p.session != nil {
		return p.session
	}
	return h.noSession(owner)
}

// noSession is what a series of an owner has that was opened in none.
func (h *Holder) noSession(owner uint64) *session {
	if p := h.peer(owner); p != nil {
		return p.none
	}
	return newSession(owner, 0)
}

func (p *lender) compare(id uint64) int { return cmp.Compare(p.id, id) }

// ownerOf is the peer that owns a partition, or nil.
func (h *Holder) ownerOf(part uint32) *lender { return h.peer(h.view.Load().OwnerOf(part).Incarnation) }

// lookup finds a bucket by its key.
func (h *Holder) lookup(k *limiter.Key) *purse { return h.table.Load().find(h.hashOf(k), k) }

// make finds a bucket or makes it; nil: there is no room. Above the bound it makes one only if needed.
func (h *Holder) make(b *Bucket, needed bool) *purse {
	hash := h.hashOf(&b.Key)
	x := h.table.Load()
	if found := x.find(hash, &b.Key); found != nil {
		return found
	}
	if !needed && x.live >= h.cfg.MaxBuckets {
		h.sweep(h.cfg.Clock().Now, sweepWhenFull)
		if x.live >= h.cfg.MaxBuckets {
			return nil
		}
	}
	made := newPurse(b, hash)
	h.buckets = append(h.buckets, made)
	if y := x.add(made); y != x {
		h.table.Store(y)
	}
	return made
}

// drop forgets a bucket, the one at a place in buckets.
func (h *Holder) drop(place int) {
	h.table.Load().forget(h.buckets[place])
	last := len(h.buckets) - 1
	h.buckets[place], h.buckets[last] = h.buckets[last], nil
	h.buckets = h.buckets[:last]
}

// sweep looks at up to budget buckets, going on where the last sweep left off. It ends leases and
// closes series that nobody needs, and forgets buckets that say nothing.
func (h *Holder) sweep(now int64, budget int) {
	for range min(budget, len(h.buckets)) {
		if h.hand--; h.hand < 0 || h.hand >= len(h.buckets) {
			h.hand = len(h.buckets) - 1
		}
		b := h.buckets[h.hand]
		if b.pending > 0 && b.askedAt.age(now) > int64(askFor) {
			b.pending = 0
		}
		b.demand.look(b, now)
		idle := b.demand.usedAt.age(now)
		for s := b.series; s != nil; s = s.next() {
			switch {
			case !s.dead:
				if idle > int64(unusedAfter) && s.number != 0 && s.done() {
					h.kill(s, now, true)
				}
			case s.rarely().late:
			case s.aside().deadAt == 0:
				s.aside().deadAt = tickOf(now)
			case s.aside().deadAt.age(now) > int64(askFor):
				// Asks that were given up stay pending in a bucket that is always asked for.
				s.aside().late = true
			}
			if s.news() {
				h.enqueue(s)
			}
		}
		if idle > int64(emptyAfter) && b.idle(now) {
			h.drop(h.hand)
		}
		if len(h.buckets) == 0 {
			return
		}
	}
}

// sweepAtTimes is a sweep every sweepEvery, so that all buckets are seen in some ten seconds.
func (h *Holder) sweepAtTimes(now int64) {
	if now-h.swept >= int64(sweepEvery) {
		h.swept = now
		h.sweep(now, min(64+len(h.buckets)/40, maxSwept))
	}
}

// share returns the terms of a limit, of a fixed one's window.
func (h *Holder) share(l *limiter.Limit, window int64) *terms {
	p := period{*l, window}
	t := h.terms[p]
	if t == nil {
		if len(h.terms) >= maxTerms {
			clear(h.terms)
		}
		t = newTerms(p)
		h.terms[p] = t
	}
	return t
}

// enqueue has a series looked at with the next request to the owner of its partition.
func (h *Holder) enqueue(s *tab) {
	if p := h.ownerOf(s.bucket.part); p != nil && !s.queued && !s.gone {
		s.queued = true
		p.queue = append(p.queue, s)
	}
}

// sort hands out what is new to the owners that are to hear of it.
func (h *Holder) sort() {
	h.newsMu.Lock()
	news := h.news
	h.news = nil
	h.newsMu.Unlock()
	for _, s := range news {
		s.noted.Store(false)
		h.enqueue(s)
	}
}

// kill ends a lease. Its tokens are given back, or lost. Of slots, the free ones are given back and
// the others as they are freed.
func (h *Holder) kill(s *tab, now int64, back bool) {
	c := s.cell.Load()
	if s.live() {
		h.unlease(s.bucket, c)
	}
	s.dead = true
	if c != nil {
		w := c.word.Swap(sealed)
		var rest *cell
		switch {
		case c.kind == kindSlots:
			s.returned.Add(max(0, s.granted-s.returned.Load()-w))
			if w > 0 {
				rest = &cell{tariff: &c.terms.plain, series: s}
				rest.word.Store(w)
			}
		default:
			a := s.aside()
			if back {
				a.back = c.holds(w, now)
				s.returned.Add(a.back)
			}
			a.room = c.depth - a.back
		}
		s.cell.Store(rest)
	}
	h.enqueue(s)
}

// forget forgets a series of which an owner has all, or knows nothing.
func (h *Holder) forget(s *tab, now int64) {
	if !s.dead {
		h.kill(s, now, false)
	}
	s.gone = true
	s.bucket.drop(s)
	if p := h.peer(s.granter()); p != nil && s.number != 0 {
		p.shutSeries(s.number)
	}
}

// shutSeries remembers that a series is closed and forgotten.
func (p *lender) shutSeries(number uint64) {
	if len(p.shut) >= maxShut {
		for n := range p.shutBefore {
			p.shutUpTo = max(p.shutUpTo, n)
		}
		p.shut, p.shutBefore = nil, p.shut
	}
	if p.shut == nil {
		p.shut = map[uint64]bool{}
	}
	p.shut[number] = true
}

// Owners lists, in ascending order, to whom there is anything to say or to keep alive: a keep-alive a
// KeepEvery is due to each.
func (h *Holder) Owners() []uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sort()
	h.sweepAtTimes(h.cfg.Clock().Now) // of what nobody speaks of any more, too
	var ids []uint64
	for _, p := range h.peers {
		if p.leases > 0 || len(p.queue)+len(p.extra)+len(p.rolls)+len(p.detached) > 0 || p.asking != 0 {
			ids = append(ids, p.id)
		}
	}
	return ids
}

// Drain is for a process that leaves: it returns every lease and takes no new ones. What is in flight
// is settled as ever.
func (h *Holder) Drain() {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.cfg.Clock().Now
	h.draining = true
	for _, b := range h.buckets {
		for s := b.series; s != nil; s = s.next() {
			if s.cell.Load() != nil && !s.dead && s.number != 0 {
				h.kill(s, now, !s.detached || now < s.deadline())
			}
		}
	}
	for _, p := range h.peers {
		p.detached = nil
		h.wake(p.id)
	}
}

// Drained says that after Drain nothing is held, and that owners have all totals.
func (h *Holder) Drained() bool {
	s := h.Stats()
	return s.Leases == 0 && s.Unacknowledged == 0
}

// breathe gives the lock up for a moment, once in a while, where all buckets are looked through: requests wait for it.
// What moves meanwhile may be missed.
func (h *Holder) breathe(i int) {
	const atOnce = 4096
	if i%atOnce == atOnce-1 {
		h.mu.Unlock()
		h.mu.Lock()
	}
}

// HolderLevel is one series as an operator sees it.
type HolderLevel struct {
	Bucket
	Granter, Series uint64
	Limit           limiter.Limit // zero where it never had a lease
	// Level is what a Take can spend now: 0 where the lease is frozen, ended, or of another window. Of
	// a semaphore, free slots.
	Level  int64
	Left   int64 // ns until the lease's deadline; 0 or less: frozen or ended
	Share  uint32
	Depth  int64
	InUse  int64 // of a semaphore
	Window int64
	Dead   bool // the series is kept for reservations alone
}

// Levels lists a tenant's series, also frozen and dead ones, by limit, subject and series; of tenant "",
// those of no tenant.
func (h *Holder) Levels(tenant string) []HolderLevel {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := h.cfg.Clock()
	var levels []HolderLevel
	for i := 0; i < len(h.buckets); i++ {
		h.breathe(i)
		if i >= len(h.buckets) || h.buckets[i].key().Tenant != tenant {
			continue
		}
		b := h.buckets[i]
		for s := b.series; s != nil; s = s.next() {
			l := HolderLevel{Bucket: b.bucket(), Granter: s.granter(), Series: s.number, Window: s.rarely().window, Dead: s.dead, InUse: s.inUse()}
			if c := s.cell.Load(); c != nil {
				l.Limit, l.Share, l.Depth = c.terms.limit, c.share, c.depth
				if l.Left = math.MinInt64 / 2; !s.dead {
					l.Left = max(s.deadline(), math.MinInt64/2) - at.Now
				}
				if s.live() && c.spendable(at) {
					l.Level = c.holds(c.word.Load(), at.Now)
				}
			}
			levels = append(levels, l)
		}
	}
	slices.SortFunc(levels, func(a, b HolderLevel) int {
		return cmp.Or(cmp.Compare(a.Key.Limit, b.Key.Limit), cmp.Compare(a.Key.Subject, b.Key.Subject),
			cmp.Compare(a.Granter, b.Granter), cmp.Compare(a.Series, b.Series))
	})
	return levels
}

// HolderStats counts.
type HolderStats struct {
	Buckets, Leases, Series int
	// Unacknowledged are series and rolls of which owners do not have all totals yet.
	Unacknowledged int
	Rejected       uint64 // parts of messages that could not be true
	Discarded      uint64 // those of owners of before, or late
	Void           uint64 // takes and decisions past their deadline
	LostDebt       uint64 // units of debt whose series nobody knew any more
	Full           uint64 // leases given back for want of room
}

// Stats counts. It looks at every bucket.
func (h *Holder) Stats() HolderStats {
	h.mu.Lock()
	defer h.mu.Unlock()
	st := HolderStats{
		Buckets:  h.table.Load().live,
		Rejected: h.stats.rejected.Load(), Discarded: h.stats.discarded.Load(), Void: h.stats.void.Load(),
		LostDebt: h.stats.lostDebt.Load(), Full: h.stats.full.Load(),
	}
	for _, p := range h.peers {
		st.Unacknowledged += len(p.rolls) + len(p.extra)
	}
	for i := 0; i < len(h.buckets); i++ {
		if h.breathe(i); i >= len(h.buckets) {
			break
		}
		for s := h.buckets[i].series; s != nil; s = s.next() {
			st.Series++
			if s.live() {
				st.Leases++
			}
			if s.news() {
				st.Unacknowledged++
			}
		}
	}
	return st
}
