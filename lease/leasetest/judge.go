package leasetest

import (
	"math/big"
	"slices"

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
	excess  map[uint64]int64 // in use by processes that a view left out since
}

func newBucket(index int, key limiter.Key, spread bool, l limiter.Limit) *bucket {
	b := &bucket{index: index, key: key, spread: spread, limit: &l, durable: l.Durable(), refunds: map[int64]int64{}}
	b.revs = []revision{{limit: l}}
	switch l.Algorithm {
	case limiter.GCRA:
		b.ideal = newIdeal(l)
	case limiter.FixedWindow:
		b.win = &windows{revs: b.revs, used: map[int64]int64{}, debts: map[int64]int64{}}
	case limiter.Semaphore:
		b.inUse, b.excess = map[uint64]int64{}, map[uint64]int64{}
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
	granted map[seriesID]int64
	opened  map[seriesID]uint64 // since which view its granter owned the partition then
	rolled  map[holding]uint64  // the newest roll that an owner took of a holder
	live    map[holding]int64   // until when, by the holder's clock, any session with any owner may last
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
		w: w, asks: map[askKey]*asked{}, told: map[seriesID]told{}, windows: map[seriesID]int64{}, granted: map[seriesID]int64{}, opened: map[seriesID]uint64{}, rolled: map[holding]uint64{},
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
		if most := b.mostBurst(at); kind == oversize && b.durable {
			// What is beyond the burst the ledger is owed, and the owner is not.
			b.ideal.put(at, most, kind)
			kind, cost = forced, cost-most
		}
		b.ideal.put(at, cost, kind)
		if b.ideal.over != "" {
			j.w.fail("%s: %s", b.key.Limit, b.ideal.over)
		}
	case b.win != nil:
		if kind == forced {
			b.win.debts[window] += cost
			return
		}
		b.win.used[window] += cost
		if n, most := b.win.used[window], b.win.count(at); n > most && (cost <= most || n > cost) {
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
	j.w.logf("%d of %s are back (of %d)", n, b.key.Limit, b.refunds[window])
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
	if r != nil && len(outs) > 0 && outs[0].Answers == r.Seq && outs[0].Epoch != 0 {
		j.reported(p, truth, r, outs[0])
	}
	for _, out := range outs {
		if out.RollTaken > 0 {
			h := holding{out.Holder, out.Owner}
			j.rolled[h] = max(j.rolled[h], out.RollTaken)
		}
		for i := range out.Leases {
			l := &out.Leases[i]
			id := seriesID{out.Owner, l.Series}
			j.windows[id] = l.Window
			j.open(p, id, l.Partition)
			if l.Granted > j.granted[id] && !l.Rolled {
				j.mayGrant(p, at, l.Partition, "lent")
			}
			j.granted[id] = max(j.granted[id], l.Granted)
		}
		for i := range out.Decisions {
			j.decided(p, at, truth, out, &out.Decisions[i])
		}
	}
}

// open notes when a series was opened.
func (j *judge) open(p *proc, id seriesID, partition uint32) {
	if _, known := j.opened[id]; !known {
		j.opened[id] = p.rights.since[partition]
	}
}

func (j *judge) mayGrant(p *proc, at lease.Instant, partition uint32, did string) {
	if p.rights.Left(at.Now, partition) == 0 || p.lags() {
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
		if c.At > epoch/2 {
			window = b.windowOf(c.At)
		}
		j.windows[seriesID{out.Owner, c.Series}] = window
		j.open(p, seriesID{out.Owner, c.Series}, b.partition(j.w))
		j.mayGrant(p, at, b.partition(j.w), "admitted")
		if !c.Lent {
			j.w.logf("%s admits %d of %s for %s", p.name, a.req.cs[i].Cost, b.key.Limit, a.req.p.name)
			j.spent(b, truth, window, a.req.cs[i].Cost, admitted)
		}
	}
}

// reported enters the refunds and debts that an owner acknowledged. Those of series that it does not know it is
// free to forget. Those of a partition that is still to be handed to it count once it is.
func (j *judge) reported(p *proc, truth int64, r *lease.Request, answer *lease.Response) {
	for i := range r.Reports {
		rep := &r.Reports[i]
		if p.w.views[answer.Epoch-1].OwnerOf(rep.Partition).Incarnation != p.inc ||
			slices.Contains(answer.Forgotten, lease.Series{Granter: rep.Granter, Number: rep.Series}) {
			continue
		}
		own := rep.Granter == p.inc && j.opened[seriesID{rep.Granter, rep.Series}] == p.rights.since[rep.Partition]
		if !own && !p.knows[rep.Partition] {
			p.early = append(p.early, *rep)
			continue
		}
		j.take(truth, rep)
	}
}

// accepted enters what was told early of the series that a hand-off names. Who accepts one after another's tenure
// began, because it has not looked, knows what nobody will ask it for.
func (j *judge) accepted(p *proc, truth int64, h *lease.Handoff) {
	p.knows[h.Partition] = true
	if p.rights.since[h.Partition] == h.Epoch {
		p.rights.waited[h.Partition] = false
	}
	for i := range p.early {
		rep := &p.early[i]
		if j.w.started[h.Partition].since > h.Epoch {
			break
		}
		for _, b := range h.Buckets {
			if b.Key == rep.Key && slices.ContainsFunc(b.Series, func(s lease.HandedSeries) bool {
				return s.Granter == rep.Granter && s.Series == rep.Series
			}) {
				j.take(truth, rep)
			}
		}
	}
	p.early = slices.DeleteFunc(p.early, func(r lease.Report) bool { return r.Partition == h.Partition })
}

// take enters what is new in a report.
func (j *judge) take(truth int64, rep *lease.Report) {
	id := seriesID{rep.Granter, rep.Series}
	b := j.w.bucketOf(&rep.Key)
	if b == nil {
		return
	}
	t := j.told[id]
	if rep.Refunded > t.refunded {
		j.back(b, truth, j.windows[id], rep.Refunded-t.refunded)
		t.refunded = rep.Refunded
	}
	if n := min(rep.Debt-t.debt, b.debts); n > 0 {
		b.debts -= n
		j.w.logf("debt of %d of %s is known", n, b.key.Limit)
		j.spent(b, truth, j.windows[id], n, forced)
	}
	t.debt = max(t.debt, rep.Debt)
	j.told[id] = t
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
		if is := (tenure{granter, granter.sinceOf(part)}); granter != nil && is != w.started[part] && granter.rights.waited[part] {
			w.stats.Takeovers++
			for _, b := range w.buckets { // it counts as empty, whatever was owed beyond
				if b.ideal != nil && int(b.partition(w)) == part {
					b.ideal.put(granter.clock.when(granter.rights.start[part]), 0, forgiven)
				}
			}
		}
		w.granters[part] = granter
		if granter != nil {
			w.started[part] = tenure{granter, granter.rights.since[part]}
		}
	}
}

// tenure is a process's time as the owner of a partition, since a view.
type tenure struct {
	proc  *proc
	since uint64
}

func (p *proc) sinceOf(part int) uint64 {
	if p == nil {
		return 0
	}
	return p.rights.since[part]
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
		// A core that its rights have left behind gives nothing until it has caught up: mayGrant sees to that.
		for i, ls := 0, p.owner.Levels(at, tenant); i < len(ls) && !p.lags(); i++ {
			if b := w.bucketOf(&ls[i].Key); b != nil && p.rights.Left(at.Now, b.partition(w)) > 0 && w.granters[b.partition(w)] == p {
				s := &w.sums[b.index]
				if b.inUse != nil && !j.lendsSlots(p, b.partition(w)) {
					continue
				}
				s.owner += ls[i].Here
				s.ownerWindow = ls[i].Window
				s.known = true
			}
		}
		for i, ls := 0, p.holder.Levels(tenant); i < len(ls); i++ {
			j.gatherHolder(p, &ls[i])
		}
	}
}

// lendsSlots says whether an owner knows of all slots that others lent of a partition.
func (j *judge) lendsSlots(p *proc, part uint32) bool {
	since := p.rights.since[part]
	if since == 1 {
		return true
	}
	for _, m := range j.w.views[p.epoch-1].Members {
		if j.rolled[holding{m.Incarnation, p.inc}] < since {
			return false
		}
	}
	return p.clock.local(j.w.now) >= p.rights.stepped[part]+takeoverWait
}

// sum is what can be spent of a bucket.
type sum struct {
	owner, holders int64
	ownerWindow    int64
	known          bool // the owner has it
	byWindow       map[int64]int64
}

func (j *judge) gatherHolder(p *proc, l *lease.HolderLevel) {
	w := j.w
	b := w.bucketOf(&l.Key)
	if b == nil {
		return
	}
	s := &w.sums[b.index]
	if l.Left <= 0 || l.Level <= 0 {
		return
	}
	// Slots are not lost with a session: a new owner knows of those that are in use, and of no others.
	if g := w.granters[l.Partition]; g != nil && g.inc != l.Granter && g.rights.waited[l.Partition] && !j.w.lax {
		w.fail("%s can spend %d of %s that %d lent it, and %s grants it after its wait", p.name, l.Level, b.key.Limit, l.Granter, g.name)
	}
	if b.inUse != nil && p.epoch <= p.lastOut {
		return // what it takes now is excess
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
		if g := w.granters[b.partition(w)]; !s.known && g != nil && !g.lags() {
			return // what an owner does not remember is full, or as its floor has it: seen once it is asked for
		}
		// Debts apart: what somebody can spend. With them: what the owner thinks that it is owed, too. Where no
		// owner grants nobody has a debt: it is on its way to the next one, or lost.
		if total := max(0, s.owner) + s.holders; total > 0 {
			j.conforms(b, s, total, true)
		}
		if s.known && !b.durable { // whose debts the ledger has
			j.conforms(b, s, s.owner+s.holders, false)
		}
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

// conforms compares a sum with the ideal bucket.
func (j *judge) conforms(b *bucket, s *sum, total int64, plain bool) {
	w := j.w
	excess := b.ideal.room(w.now, total, plain)
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
	w.dump(b.key.Tenant)
	w.fail("%s: %d with the owner and %d with holders is %s more than an ideal bucket has (%d)",
		b.key.Limit, s.owner, s.holders, need, b.ideal.level(w.now))
}

func (j *judge) windowRoom(b *bucket, s *sum, window, lent int64) {
	// What holders had in hand before a debt they may still spend; the owner pays for it first.
	used, total := b.win.used[window], lent
	if s.known && s.ownerWindow == window && !b.durable { // whose debts the ledger has
		if s.owner < 0 {
			used += b.win.debts[window]
		}
		total += s.owner
	} else if s.known && s.ownerWindow == window {
		total += max(0, s.owner)
	}
	if most := b.win.count(j.w.now); total > 0 && used+total > most {
		j.w.fail("%s: of window %d %d are spent and %d can be, of %d", b.key.Limit, window, used, total, most)
	}
}

// slots: those in use, by the processes' own count, are at most as many as there are; what a process uses that a
// view left out while it did is excess.
func (j *judge) slots(b *bucket, s *sum) {
	w := j.w
	var used, excess int64
	for inc, n := range b.inUse {
		if w.byInc[inc].alive {
			used += n
		}
	}
	for inc, n := range b.excess {
		if w.byInc[inc].alive {
			excess += n
		}
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
