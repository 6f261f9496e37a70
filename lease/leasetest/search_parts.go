package leasetest

import (
	"maps"
	"slices"

	"headgate/lease"
	"headgate/limiter"
)

// local is all that is of one process, and of what the judge knows of it alone.
type local struct {
	proc    proc
	open    []*request
	sent    map[sentKey]int64
	live    map[holding]int64
	granted map[seriesID]int64
	opened  map[seriesID]uint64
	rolled  map[holding]uint64
}

// oracle is what the judge knows of the bucket.
type oracle struct {
	ideal   *ideal
	win     *windows
	refunds map[int64]int64
	debts   int64
	frozen  int64
	inUse   map[uint64]int64
	excess  map[uint64]int64
	told    map[seriesID]told
	windows map[seriesID]int64
	asks    map[askKey]askedFor
	granter uint64 // who granted last, and since which view
	since   uint64
}

// askedFor is an ask of which no decision is known: of one charge.
type askedFor struct{ cost int64 }

// view is what the judge looks at of a process in check.
type view struct {
	alive  bool
	rights rights
	epoch  uint64
	out    uint64
	rolled map[holding]uint64
	owner  []seenOwner
	holder []seenHolder
}

type seenOwner struct {
	partition uint32
	here      int64
	window    int64
}

type seenHolder struct {
	granter       uint64
	level, window int64
	live          bool
}

// searchRules say what of a field counts for what can come. A field that makes numbers for people (headers,
// statistics), is found from others (an index), or is scratch does not count. Of a moment it counts how long ago it was,
// so that equal futures look equal whenever they begin; where only whether it has passed, or passed by some time, is
// ever asked, that is all.
func searchRules() map[string]fieldRule {
	rules := map[string]fieldRule{}
	all := func(treat treat, keep int64, fields ...string) {
		for _, f := range fields {
			rules[f] = fieldRule{treat, keep}
		}
	}
	// Statistics, names, headers; what hangs on the seed of a hash; indices and caches; what follows from the limit.
	all(unhashed, 0, "Owner.stats", "Holder.stats", "packet.number", "request.do",
		"cell.level", "Lease.Level", "Refusal.Level", "Refusal.RetryAfter", "refusal.level", "refusal.retryAt", "refusal.at",
		"Decision.Remaining", "Decision.Reset", "Decision.RetryAfter",
		"shard.slots", "Holder.table", "purse.hash", "Holder.terms", "Owner.limits", "terms.whole", "terms.plain", "terms.full")
	// Scratch, written anew before each use; counters that are compared within a step.
	all(emptied, 0, "Owner.step", "Owner.sight", "Owner.spare", "Owner.used", "proc.work", "proc.readings", "proc.readAt", "ideal.a", "ideal.b")
	all(unhashed, 0, "Owner.looks", "Owner.steps", "peer.look", "peer.place", "refused.step", "refused.place")
	// What only a Sizer looks at: that of the small world does not.
	all(unhashed, 0, "Owner.askers", "series.demand", "series.cost", "Report.Demand", "Report.Cost", "demand.requests")
	all(numbered, 0, "series.tagged")
	// Whether something was asked says whether a report is due; how much is for the Sizer.
	all(positive, 0, "demand.units", "demand.told", "purse.asked")
	// Of a process that never owns nothing of its owner does: see engine.hashOf.
	all(unhashed, 0, "proc.owner", "proc.rights")
	// What counts after longer than there is.
	all(unhashed, 0, "purse.askedAt", "peer.wanted")
	// Moments.
	all(moment, 0, "rights.deadline", "peer.deadline", "refused.until", "part.slotsAt", "lender.spendable", "session.deadline", "cell.word",
		"local.live", "refusal.until")
	all(moment, takeoverWait, "rights.stepped", "part.step")
	all(moment, 50*ms, "unacked.sent")
	all(moment, 100*ms, "Holder.swept")
	all(moment, 10*ms, "lender.looked")
	all(moment, forever, "rights.start", "peer.endedAt", "peer.gone", "Owner.buryAt", "Owner.wantAt", "Owner.earlyAt", "part.floor",
		"inherited.end", "State.last", "State.a", "lender.asking", "flight.sent", "request.truth", "Instant.Now", "Instant.Wall", "Charge.At", "Decision.At",
		"local.sent", "entry.at", "entry.debtor")
	all(ticks, 20*ms, "demand.at")
	all(ticks, forever, "tab.sent", "purse.wokenAt", "demand.usedAt", "facts.deadAt")
	return rules
}

// futureRules are searchRules for whole states: which requests an owner has seen follows from which are on their way, and
// from which of them comes for the second time.
func futureRules() map[string]fieldRule {
	rules := searchRules()
	rules["peer.seen"], rules["peer.top"] = fieldRule{treat: unhashed}, fieldRule{treat: unhashed}
	return rules
}

// plainRules leave out nothing but what names nothing that lasts.
func plainRules() map[string]fieldRule {
	rules := map[string]fieldRule{}
	for field, how := range searchRules() {
		if how.treat == emptied {
			rules[field] = how
		}
	}
	for _, field := range []string{
		"Owner.stats", "Holder.stats", "packet.number", "request.do", "shard.slots", "Holder.table", "purse.hash", "Holder.terms", "Owner.limits",
		"terms.plain", "terms.full", "Owner.looks", "Owner.steps", "peer.look", "peer.place", "refused.step", "refused.place", "proc.owner", "proc.rights",
	} {
		rules[field] = fieldRule{treat: unhashed}
	}
	return rules
}

// searchShared are what copies share: the world round the processes, and what never changes.
func searchShared() map[string]share {
	return map[string]share{
		"leasetest.world": sharedFrame, "leasetest.node": sharedFrame, "leasetest.proc": sharedFrame, "leasetest.bucket": sharedFrame,
		"rand.Rand": sharedFrame, "lease.View": sharedFact, "limiter.Limit": sharedFact,
		"lease.terms": sharedFact, "lease.tariff": sharedFact, "lease.refusal": sharedFact,
	}
}

// part takes what is of one process out of the lab, which has all. It shares with the lab.
func (w *lab) part(p *proc) *local {
	l := &local{
		proc: *p, sent: map[sentKey]int64{}, live: map[holding]int64{}, granted: map[seriesID]int64{}, opened: map[seriesID]uint64{}, rolled: map[holding]uint64{},
	}
	for _, q := range w.open {
		if q.p == p {
			l.open = append(l.open, q)
		}
	}
	j := w.judge
	keep(l.sent, j.sent, func(k sentKey) bool { return k.holder == p.inc })
	keep(l.live, j.live, func(k holding) bool { return k.holder == p.inc })
	keep(l.granted, j.granted, func(k seriesID) bool { return k.granter == p.inc })
	keep(l.opened, j.opened, func(k seriesID) bool { return k.granter == p.inc })
	keep(l.rolled, j.rolled, func(k holding) bool { return k.owner == p.inc })
	return l
}

func keep[K comparable, V any](to, from map[K]V, which func(K) bool) {
	for k, v := range from {
		if which(k) {
			to[k] = v
		}
	}
}

// put makes a process what l says, alone or with others. It shares with l.
func (w *lab) put(p *proc, l *local) {
	*p = l.proc
	w.open = append(w.open, l.open...)
	j := w.judge
	maps.Copy(j.sent, l.sent)
	maps.Copy(j.live, l.live)
	maps.Copy(j.granted, l.granted)
	maps.Copy(j.opened, l.opened)
	maps.Copy(j.rolled, l.rolled)
}

// clear makes everybody dead, until put.
func (w *lab) clear() {
	for _, p := range w.procs {
		p.alive = false
	}
	w.bag, w.open, w.failed = w.bag[:0], nil, ""
	j := w.judge
	clear(j.sent)
	clear(j.live)
	clear(j.granted)
	clear(j.opened)
	clear(j.rolled)
}

// oracle takes what the judge knows of the bucket out of the lab. It shares with the lab.
func (w *lab) oracle() *oracle {
	b, j := w.buckets[0], w.judge
	o := &oracle{
		ideal: b.ideal, win: b.win, refunds: b.refunds, debts: b.debts, frozen: b.frozen, inUse: b.inUse, excess: b.excess,
		told: j.told, windows: j.windows, asks: map[askKey]askedFor{},
	}
	for k, a := range j.asks {
		o.asks[k] = askedFor{a.req.cs[0].Cost}
	}
	if t := w.started[0]; t.proc != nil {
		o.granter, o.since = t.proc.inc, t.since
	}
	return o
}

// tidy puts what is of the past so that equal futures look equal: nothing is entered before now any more.
func (o *oracle) tidy(now int64) {
	if o.ideal != nil {
		o.ideal.forget(now)
	}
	dropZero(o.refunds)
	dropZero(o.inUse)
	dropZero(o.excess)
	dropZero(o.told)
	dropZero(o.windows)
	if o.win != nil {
		dropZero(o.win.used)
		dropZero(o.win.debts)
	}
}

func dropZero[K, V comparable](m map[K]V) {
	var none V
	maps.DeleteFunc(m, func(_ K, v V) bool { return v == none })
}

// forget makes one entry at an instant of all before it.
func (d *ideal) forget(now int64) {
	n := len(d.entries)
	if n == 0 {
		return
	}
	last := d.entries[n-1]
	if last.at > now {
		panic("an entry of the future")
	}
	e := entry{at: now, owed: last.owed, plain: last.plain, debtor: last.debtor}
	d.owedBefore(e.owed, n, now, false)
	d.owedBefore(e.plain, n, now, true)
	_, burst := d.most(now)
	if d.b.SetInt64(burst); e.owed.Cmp(d.b.Mul(&d.b, d.scale)) <= 0 {
		e.debtor = never
	}
	d.entries = append(d.entries[:0], e)
}

// know makes the judge know of the bucket what o says. It shares with o.
func (w *lab) know(o *oracle) {
	b, j := w.buckets[0], w.judge
	b.ideal, b.win, b.refunds, b.debts, b.frozen, b.inUse, b.excess = o.ideal, o.win, o.refunds, o.debts, o.frozen, o.inUse, o.excess
	j.told, j.windows = o.told, o.windows
	clear(j.asks)
	for k, a := range o.asks {
		q := &request{p: w.byInc[k.holder], bs: w.buckets[:1], cs: []limiter.Charge{{Key: b.key, Limit: b.limit, Cost: a.cost}}}
		j.asks[k] = &asked{q, 1}
	}
	w.started[0] = tenure{w.byInc[o.granter], o.since}
}

// seen is what check looks at of a process, as it says it.
func (w *lab) seen(p *proc) *view {
	v := &view{alive: p.alive}
	if !p.alive {
		return v
	}
	v.epoch, v.out = p.epoch, p.lastOut
	if slices.Min(p.rights.start) != never {
		v.rights = *p.rights
	}
	v.rolled = map[holding]uint64{}
	keep(v.rolled, w.judge.rolled, func(k holding) bool { return k.owner == p.inc })
	at := p.clock.read(w.now)
	tenant := w.buckets[0].key.Tenant
	for _, l := range p.owner.Levels(at, tenant) {
		v.owner = append(v.owner, seenOwner{l.Partition, l.Here, l.Window})
	}
	for _, l := range p.holder.Levels(tenant) {
		if l.Left > 0 && l.Level > 0 {
			v.holder = append(v.holder, seenHolder{l.Granter, l.Level, l.Window, true})
		}
	}
	return v
}

// viewsAhead makes the views that the small world comes to, and leaves the first.
func (w *lab) viewsAhead(move bool) []*lease.View {
	all := slices.Clone(w.views)
	w.proc('a').alive = move
	w.own(w.proc('b'), w.living()...)
	w.proc('a').alive = true
	all = append(all, w.newest())
	w.views = w.views[:1]
	return all
}
