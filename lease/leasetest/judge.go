package leasetest

import (
	"math/big"

	"headgate/lease"
	"headgate/limiter"
)

// bucket is a limit of the run and what ought to be true of it.
type bucket struct {
	index   int
	key     limiter.Key
	spread  bool
	limit   *limiter.Limit // the newest; processes adopt it when they hear of it
	durable bool
	revs    []revision

	ideal *ideal   // GCRA
	win   *windows // fixed window

	// What settled reservations gave back (by window) or owe, of which no core is known to have taken
	// account. An oracle credits no more than that, and each unit once.
	refunds map[int64]int64
	debts   int64
	frozen  int64 // the part of refunds[0] that may have gone into a lease that shows no level now
	inUse   map[uint64]int64
}

func newBucket(index int, key limiter.Key, spread bool, l limiter.Limit) *bucket {
	b := &bucket{index: index, key: key, spread: spread, limit: &l, durable: l.Durable(), refunds: map[int64]int64{}}
	b.revs = []revision{{limit: l}}
	switch l.Algorithm {
	case limiter.GCRA:
		b.ideal = newIdeal(l)
	case limiter.FixedWindow:
		b.win = &windows{revs: b.revs, used: map[int64]int64{}}
	case limiter.Semaphore:
		b.inUse = map[uint64]int64{}
	}
	return b
}

func (b *bucket) revise(at int64, l limiter.Limit) {
	b.revs = append(b.revs, revision{l, at})
	b.limit = &l
	switch {
	case b.ideal != nil:
		b.ideal.revise(at, l)
	case b.win != nil:
		b.win.revs = b.revs
	}
}

// slots is the most slots that any limit in force may give.
func (b *bucket) slots(at int64) (n int64) {
	for _, r := range b.revs {
		if r.from <= at {
			n = max(n, r.limit.Burst)
		}
	}
	return n
}

// windowOf is the window that a wall reading lies in; 0 where the bucket has none.
func (b *bucket) windowOf(wall int64) int64 {
	if b.win == nil {
		return 0
	}
	return wall / int64(b.limit.Rate.Per)
}

// seriesID names a series of one granter.
type seriesID struct{ granter, number uint64 }

// told is what a report was last known to say.
type told struct{ refunded, debt int64 }

// judge is what the oracles know: nothing of it comes from within a core, save what it would let
// somebody spend (Levels) and what it says to others.
type judge struct {
	w       *world
	asks    map[askKey]*asked
	told    map[seriesID]told
	windows map[seriesID]int64
	live    map[holding]int64 // until when, by the holder's clock, any session with any owner may last
	sent    map[sentKey]int64
}

type (
	holding struct{ holder, owner uint64 }
	sentKey struct {
		holder, owner, seq uint64
	}
	askKey struct{ holder, id uint64 }
	// asked is an Ask on its way: the charges in which of a request.
	asked struct {
		req   *request
		which uint32
	}
)

func newJudge(w *world) *judge {
	return &judge{
		w: w, asks: map[askKey]*asked{}, told: map[seriesID]told{}, windows: map[seriesID]int64{},
		live: map[holding]int64{}, sent: map[sentKey]int64{},
	}
}

// spent enters what was taken of a bucket at a true instant.
func (j *judge) spent(b *bucket, at, window, cost int64, kind entryKind) {
	switch {
	case cost == 0:
	case b.ideal != nil:
		if kind == admitted && cost > b.limit.Burst && cost > b.mostBurst(at) {
			kind = oversize
		}
		b.ideal.put(at, cost, kind)
		if b.ideal.over != "" {
			j.w.fail("%s: %s", b.key.Limit, b.ideal.over)
		}
	case b.win != nil:
		b.win.used[window] += cost
		if n, most := b.win.used[window], b.win.count(at); kind == admitted && n > most {
			j.w.fail("%s: window %d admitted %d of %d", b.key.Limit, window, n, most)
		}
	}
}

func (b *bucket) mostBurst(at int64) int64 {
	_, burst := b.ideal.most(at)
	return burst
}

// back enters what came back into a bucket.
func (j *judge) back(b *bucket, at, window, n int64) {
	n = min(n, b.refunds[window])
	if n <= 0 {
		return
	}
	b.refunds[window] -= n
	b.frozen = min(b.frozen, b.refunds[0])
	switch {
	case b.ideal != nil:
		b.ideal.put(at, -n, forced)
	case b.win != nil:
		b.win.used[window] -= n
	}
}

// answered looks at what an owner said at a reading of its clock, and enters it. r is what it
// answers; nil: nothing.
func (j *judge) answered(p *proc, at lease.Instant, truth int64, r *lease.Request, outs []*lease.Response) {
	if r != nil && len(outs) > 0 && outs[0].Answers == r.Seq {
		j.reported(truth, r, outs[0])
	}
	for _, out := range outs {
		for i := range out.Leases {
			l := &out.Leases[i]
			j.windows[seriesID{out.Owner, l.Series}] = l.Window
			if l.Number == 1 && l.Depth > 0 && !l.Rolled {
				j.mayGrant(p, at, l.Partition, "lent")
			}
		}
		for i := range out.Decisions {
			j.decided(p, at, truth, out, &out.Decisions[i])
		}
	}
}

func (j *judge) mayGrant(p *proc, at lease.Instant, partition uint32, did string) {
	if p.rights.Left(at.Now, partition) == 0 {
		j.w.fail("%s %s of partition %d, of which it might not grant", p.name, did, partition)
	}
}

func (j *judge) decided(p *proc, at lease.Instant, truth int64, out *lease.Response, d *lease.AskDecision) {
	a := j.asks[askKey{out.Holder, d.ID}]
	if a == nil || a.req.peek || d.Refused != -1 {
		return
	}
	delete(j.asks, askKey{out.Holder, d.ID})
	n := 0
	for i := range a.req.cs {
		if a.which>>i&1 == 0 {
			continue
		}
		if n >= len(d.Charges) {
			break
		}
		c, b := &d.Charges[n], a.req.bs[i]
		n++
		if c.Series == 0 || !c.Admitted {
			continue
		}
		window := b.windowOf(at.Wall)
		if c.At > epoch {
			window = b.windowOf(c.At)
		}
		j.windows[seriesID{out.Owner, c.Series}] = window
		j.mayGrant(p, at, b.partition(j.w), "admitted")
		if !c.Lent {
			j.w.logf("%s admits %d of %s for %s", p.name, a.req.cs[i].Cost, b.key.Limit, a.req.p.name)
			j.spent(b, truth, window, a.req.cs[i].Cost, admitted)
		}
	}
}

// reported enters the refunds and debts that an owner acknowledged. Those of series that it does
// not know it is free to forget.
func (j *judge) reported(truth int64, r *lease.Request, answer *lease.Response) {
	for i := range r.Reports {
		rep := &r.Reports[i]
		id := seriesID{rep.Granter, rep.Series}
		forgotten := false
		for _, f := range answer.Forgotten {
			forgotten = forgotten || f == lease.Series{Granter: rep.Granter, Number: rep.Series}
		}
		b := j.w.bucketOf(&rep.Key)
		if forgotten || b == nil {
			continue
		}
		t := j.told[id]
		if rep.Refunded > t.refunded {
			j.back(b, truth, j.windows[id], rep.Refunded-t.refunded)
			t.refunded = rep.Refunded
		}
		if n := min(rep.Debt-t.debt, b.debts); n > 0 {
			b.debts -= n
			j.w.logf("debt of %d of %s is known", n, b.key.Limit)
			window := j.windows[id]
			j.spent(b, truth, window, n, forced)
		}
		t.debt = max(t.debt, rep.Debt)
		j.told[id] = t
	}
}

// check is what must be true at every instant.
func (j *judge) check() {
	w := j.w
	if w.failed != "" {
		return
	}
	j.oneGranter()
	for _, tenant := range w.tenants {
		j.gather(tenant)
	}
	for _, b := range w.buckets {
		j.spendable(b)
	}
}

// oneGranter: of no partition do two processes grant, and nobody grants of one after a wait while
// something lent before can still be spent.
func (j *judge) oneGranter() {
	w := j.w
	for part := range w.partitions {
		var granter *proc
		for _, p := range w.procs {
			if !p.alive || p.rights.Left(p.clock.local(w.now), uint32(part)) == 0 {
				continue
			}
			if granter != nil {
				w.fail("%s and %s grant of partition %d", granter.name, p.name, part)
			}
			granter = p
		}
		w.granters[part] = granter
	}
}

// gather adds up what could be spent now of a tenant's buckets.
func (j *judge) gather(tenant string) {
	w := j.w
	for _, b := range w.buckets {
		if b.key.Tenant == tenant {
			w.sums[b.index] = sum{}
		}
	}
	for _, p := range w.procs {
		if !p.alive {
			continue
		}
		at := p.clock.read(w.now)
		if p.busy {
			at = p.busyAt
		}
		for i, ls := 0, p.owner.Levels(at, tenant); i < len(ls); i++ {
			if b := w.bucketOf(&ls[i].Key); b != nil && p.rights.Left(at.Now, b.partition(w)) > 0 {
				s := &w.sums[b.index]
				s.owner += ls[i].Level
				s.ownerWindow = b.windowOf(at.Wall)
				s.known = true
			}
		}
		for i, ls := 0, p.holder.Levels(tenant); i < len(ls); i++ {
			j.gatherHolder(p, &ls[i])
		}
	}
}

// sum is what can be spent of a bucket.
type sum struct {
	owner, holders, inUse int64
	ownerWindow           int64
	known                 bool // the owner has it
	byWindow              map[int64]int64
}

func (j *judge) gatherHolder(p *proc, l *lease.HolderLevel) {
	w := j.w
	b := w.bucketOf(&l.Key)
	if b == nil {
		return
	}
	s := &w.sums[b.index]
	if b.inUse != nil && member(w.newest(), p.inc) {
		s.inUse += l.InUse
	}
	if l.Left <= 0 || l.Level <= 0 {
		return
	}
	// Slots are not lost with a session: a new owner knows of those that are in use, and of no others.
	if g := w.granters[l.Partition]; g != nil && g.inc != l.Granter && g.rights.waited[l.Partition] && !j.w.lax {
		w.fail("%s can spend %d of %s that %d lent it, and %s grants it after its wait", p.name, l.Level, b.key.Limit, l.Granter, g.name)
	}
	s.holders += l.Level
	if b.win != nil {
		if s.byWindow == nil {
			s.byWindow = map[int64]int64{}
		}
		s.byWindow[l.Window] += l.Level
	}
}

// spendable: all that could be spent of a bucket at this instant, fed to the ideal one, conforms.
func (j *judge) spendable(b *bucket) {
	w := j.w
	s := &w.sums[b.index]
	switch {
	case b.ideal != nil:
		total := s.owner + s.holders
		if !s.known && w.granters[b.partition(w)] != nil {
			return // what an owner does not remember is full, or as its floor has it: seen once it is asked for
		}
		excess := b.ideal.room(w.now, total)
		if excess == nil {
			return
		}
		// What was refunded into a lease that showed no level then shows now.
		need := excess.Add(excess, b.ideal.scale)
		need.Sub(need, big.NewInt(1)).Div(need, b.ideal.scale)
		if n := need.Int64(); need.IsInt64() && n <= b.frozen {
			b.frozen -= n
			j.back(b, w.now, 0, n)
			return
		}
		w.fail("%s: %d with the owner and %d with holders is %s more than an ideal bucket has (%d)",
			b.key.Limit, s.owner, s.holders, need, b.ideal.level(w.now))
	case b.win != nil:
		for window, n := range s.byWindow {
			j.windowRoom(b, s, window, n)
		}
		if s.byWindow == nil && s.known {
			j.windowRoom(b, s, s.ownerWindow, 0)
		}
	case b.inUse != nil:
		j.slots(b, s)
	}
}

func (j *judge) windowRoom(b *bucket, s *sum, window, lent int64) {
	total := lent
	if s.ownerWindow == window && s.owner > 0 {
		total += s.owner
	}
	if most := b.win.count(j.w.now); total > 0 && b.win.used[window]+total > most {
		j.w.fail("%s: of window %d %d are spent and %d can be, of %d", b.key.Limit, window, b.win.used[window], total, most)
	}
}

// slots: those in use at members, by their own count, are at most as many as there are; a process that is in
// no view any more, and does not know it, is excess.
func (j *judge) slots(b *bucket, s *sum) {
	w := j.w
	var used, excess int64
	for inc, n := range b.inUse {
		if p := w.byInc[inc]; p == nil || !p.alive {
			continue
		}
		if !member(w.newest(), inc) {
			excess += n
			continue
		}
		used += n
	}
	w.stats.ExcessSlots = max(w.stats.ExcessSlots, excess)
	if most := b.slots(w.now); used > most {
		w.fail("%s: %d slots of %d are in use", b.key.Limit, used, most)
	}
	if most := b.slots(w.now); s.known && used+max(s.owner, 0)+s.holders > most {
		w.fail("%s: %d slots are in use, %d free with the owner and %d with holders, of %d", b.key.Limit, used, s.owner, s.holders, most)
	}
}

// sentOff notes when a request was sent, by its holder's clock.
func (j *judge) sentOff(r *lease.Request, now int64) { j.sent[sentKey{r.Holder, r.Owner, r.Seq}] = now }

// heard notes for how long a session may last at most by an answer (R4).
func (j *judge) heard(r *lease.Response) {
	sent, ok := j.sent[sentKey{r.Holder, r.Owner, r.Answers}]
	if !ok || r.Left <= 0 {
		return
	}
	h := holding{r.Holder, r.Owner}
	j.live[h] = max(j.live[h], sent+min(r.Left, leaseFor)*98/100)
}

// liveUntil is when the last session of a process ends, with whomever.
func (j *judge) liveUntil(p *proc) (until int64) {
	until = -never
	for h, t := range j.live {
		if h.holder == p.inc {
			until = max(until, t)
		}
	}
	return until
}
