package lease

import (
	"cmp"
	"context"
	"math/bits"
	"time"

	"headgate/limiter"
)

// The times of a Take that has to ask.
const (
	firstPause = 5 * time.Millisecond // before another try where an owner may not grant yet; then twice that, and so on
	maxPause   = 40 * time.Millisecond
	shutProbe  = 100 * time.Millisecond // how often a partition that is shut is tried
	maxTries   = 32                     // of one owner, in one Take
	// maxOwnersAsked, in one Take: each charge has one, and some may change meanwhile.
	maxOwnersAsked = 4 * limiter.MaxCharges
)

// shut is a partition whose owner has not granted charges of a kind for a whole budget: such charges on it
// fail at once, but for one try in a while. A new view opens it.
type shut struct{ until int64 }

// shutKey names one.
type shutKey struct {
	partition uint32
	kind      chargeKind
}

// chargeKind is by what an owner may be kept from granting.
type chargeKind uint8

const (
	anyCharge  chargeKind = iota // by nothing but what keeps it from granting at all
	wallCharge                   // by a wall clock in doubt
	slotCharge                   // by slots that others may have
)

func kindOf(c *limiter.Charge) chargeKind {
	switch {
	case c.Limit.Algorithm == limiter.Semaphore:
		return slotCharge
	case byWall(c.Limit):
		return wallCharge
	}
	return anyCharge
}

// kind is that of the charge that an owner may be kept from granting longest.
func (t *taking) kind(which uint32) (kind chargeKind) {
	for w := which; w != 0; w &= w - 1 {
		kind = max(kind, kindOf(&t.cs[bits.TrailingZeros32(w)]))
	}
	return kind
}

// Take charges all of cs or none. It returns -1 if all was charged; otherwise nothing was, and it
// returns the index of a refusing charge, or TableFull. ds[i] is what decided cs[i], and By says
// who that was. Where leases in hand cover cs it takes no lock and allocates nothing; else it asks
// owners, for no longer than the budget or until ctx ends. What an owner that is out of reach
// would have to decide goes by the charge's Apart. At most limiter.MaxCharges charges; a charge that
// was taken is settled once.
func (m *Manager) Take(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) (refused int) {
	refused, missing := m.holder.Take(cs, ds)
	if missing == 0 || refused != -1 {
		return refused
	}
	t := taking{m: m, ctx: ctx, cs: cs, ds: ds[:len(cs)]}
	return t.run(missing)
}

// Peek decides as Take would, asking the owners, and takes nothing. An owner goes on to the charges' limits, where
// these are newer, and draws what they would need of the ledger.
func (m *Manager) Peek(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) (refused int) {
	refused, missing := m.holder.Peek(cs, ds)
	if missing == 0 || refused != -1 {
		return refused
	}
	t := taking{m: m, ctx: ctx, cs: cs, ds: ds[:len(cs)], peek: true}
	return t.run(missing)
}

// taking is a Take or a Peek that has to ask.
type taking struct {
	m    *Manager
	ctx  context.Context
	cs   []limiter.Charge
	ds   []limiter.Decision
	peek bool

	timer *time.Timer // closes over at the end of the budget; nil until there is something to wait for
	over  chan struct{}
	began int64
	held  uint32        // charges that the holder holds for this Take
	lent  map[int]int64 // charges out of reach whose leases may still be spent, and for how long
}

// run asks for the charges that are missing, one owner after the other in an order that all processes
// share, so that no two of them wait for each other.
func (t *taking) run(missing uint32) (refused int) {
	defer func() {
		if t.timer != nil {
			t.timer.Stop()
		}
	}()
	t.began = t.m.cfg.Clock().Now
	t.held = (1<<len(t.cs) - 1) &^ missing
	apart := uint32(0)
	for pending, asks := missing, 0; pending != 0; asks++ {
		to, partition, which := t.next(pending)
		refused, reached := -1, false
		if asks < maxOwnersAsked {
			refused, reached = t.ask(to, partition, which)
		}
		switch {
		case refused != -1:
			return t.undo(refused)
		case !reached:
			apart |= which &^ t.held
			if refused := t.denied(apart); refused >= 0 {
				t.m.met.countApart(t.ds, 1<<refused)
				return t.undo(refused)
			}
		}
		pending &^= t.held | apart
	}
	if apart == 0 {
		return -1
	}
	refused = t.m.apart(t.cs, t.ds, apart, t.lent, t.peek)
	t.m.met.countApart(t.ds, apart)
	if refused != -1 {
		return t.undo(refused)
	}
	return -1
}

// next is whom to ask next, and for which charges: the first owner by name that has any of pending.
func (t *taking) next(pending uint32) (to Member, partition uint32, which uint32) {
	var first limiter.Key
	for w := pending; w != 0; w &= w - 1 {
		i := bits.TrailingZeros32(w)
		owner, b := t.m.holder.Owner(&t.cs[i])
		order := cmp.Or(cmp.Compare(owner.Name, to.Name), cmp.Compare(owner.Incarnation, to.Incarnation))
		if which == 0 || order < 0 {
			to, partition, which, first = owner, b.Partition, 0, b.Key
		} else if order == 0 && b.Key.Limit < first.Limit {
			partition, first = b.Partition, b.Key
		}
		if which == 0 || order <= 0 {
			which |= 1 << i
		}
	}
	return to, partition, which
}

// undo gives back what is held.
func (t *taking) undo(refused int) int {
	if t.held != 0 && !t.peek {
		t.m.holder.Cancel(t.cs, t.held)
	}
	return refused
}

// denied is a charge out of reach that refuses already; -1: none.
func (t *taking) denied(apart uint32) int {
	for w := apart; w != 0; w &= w - 1 {
		i := bits.TrailingZeros32(w)
		_, waits := t.lent[i]
		c := &t.cs[i]
		if !c.Shadow && c.Apart != limiter.ByAllow && (c.Apart == limiter.ByDeny || c.Private == nil || waits) {
			t.m.apart(t.cs, t.ds, 1<<i, t.lent, t.peek)
			return i
		}
	}
	return -1
}

// ask has an owner decide the charges in which. Where refused is -1 and it was reached, the charges that
// it decided are in t.held; of others another owner has to be asked. Not reached: it decides none of
// those that t.held lacks.
func (t *taking) ask(to Member, partition, which uint32) (refused int, reached bool) {
	if to.Incarnation == 0 {
		return -1, false
	}
	alone := to.Incarnation == t.m.cfg.Self.Incarnation
	if !alone && t.left() == 0 {
		return -1, false
	}
	key := shutKey{partition, t.kind(which)}
	try, fresh := t.m.mayTry(key)
	for tries := 0; try && tries < maxTries; tries++ {
		refused, open, out := -1, which, outAgain
		l := t.m.self
		if !alone {
			l = t.m.line(to.Incarnation)
		}
		if l != nil { // else this process is just stepping to another view
			refused, open, out = t.once(l, partition, which)
		}
		which = open
		switch {
		case out == outDecided:
			t.m.granted(key)
			return refused, true
		case out == outSilent:
			t.noteLent(l, which)
			return -1, false
		case t.elsewhere(to, which):
			return -1, true
		}
		// Without a view lease there is nobody to wait for.
		if !fresh || alone && t.m.cfg.Rights.Lease(t.m.cfg.Clock().Now, anyEpoch) <= 0 || !t.pause(tries) {
			break
		}
	}
	if fresh {
		t.m.shutOff(key)
	}
	return -1, false
}

// elsewhere says that another owner has any of the charges by now.
func (t *taking) elsewhere(to Member, which uint32) bool {
	for w := which; w != 0; w &= w - 1 {
		if now, _ := t.m.holder.Owner(&t.cs[bits.TrailingZeros32(w)]); now.Incarnation != to.Incarnation {
			return true
		}
	}
	return false
}

// noteLent notes, for charges whose owner is silent, until when what it lent may be spent.
func (t *taking) noteLent(l *line, which uint32) {
	left := l.liveUntil() - t.m.cfg.Clock().Now
	if left <= 0 {
		return
	}
	if t.lent == nil {
		t.lent = map[int]int64{}
	}
	for w := which; w != 0; w &= w - 1 {
		t.lent[bits.TrailingZeros32(w)] = left
	}
}

// once is one try. It returns the charges that are still open, besides what ask returns.
func (t *taking) once(l *line, partition, which uint32) (refused int, open uint32, out outcome) {
	if l == t.m.self {
		return t.askSelf(which)
	}
	if !l.start() {
		return -1, which, outSilent
	}
	began := t.m.cfg.Clock().Now
	a := t.asking(which)
	turn, ok := l.enter(a, partition, !t.peek)
	for turn != nil {
		select {
		case <-turn:
		case <-t.timeout():
			l.leave(a, turn)
			return t.missed(l, which, began, true)
		case <-t.ctx.Done():
			l.leave(a, turn)
			return t.gone(which)
		}
		// What the answer before brought may cover these.
		refused, which = t.local(which)
		ln := a.lane
		if which == 0 || refused != -1 {
			l.join(ln, nil)
			return refused, 0, outDecided
		}
		a = t.asking(which)
		a.lane = ln
		if turn = nil; !l.join(ln, a) {
			a.lane = nil
			turn, ok = l.enter(a, partition, true)
		}
	}
	if !ok {
		return -1, which, outSilent
	}
	return t.await(l, a, which, began)
}

func (t *taking) asking(which uint32) *asking {
	return &asking{ask: t.m.holder.Ask(t.cs, which, t.left()*3/4, t.peek), decided: make(chan askingOutcome, 1)}
}

// await is the end of an ask that was sent.
func (t *taking) await(l *line, a *asking, which uint32, began int64) (refused int, open uint32, out outcome) {
	var d askingOutcome
	select {
	case d = <-a.decided:
	default:
		select {
		case d = <-a.decided:
		case <-t.timeout():
			return t.missed(l, which, began, l.giveUp(a, t.cs, which))
		case <-t.ctx.Done():
			l.giveUp(a, t.cs, which)
			return t.gone(which)
		}
	}
	if d.outcome != outDecided {
		return -1, which, d.outcome
	}
	refused, ok := t.m.holder.Decided(t.cs, which, &d.decision, a.sent, t.ds)
	if !ok || refused == NotOwner {
		return -1, which, outAgain // void: nothing is held of it
	}
	if refused >= 0 && t.thawed(which) {
		refused = -1
	}
	if refused == -1 {
		t.held |= which
	}
	return refused, 0, outDecided
}

// thawed has the holder take the charges in which after all, if leases cover them that the answer has brought, or has thawed:
// their owner refused beside these.
func (t *taking) thawed(which uint32) bool {
	if t.peek {
		return false
	}
	sub, index := subset(t.cs, which)
	ds := make([]limiter.Decision, len(sub))
	refused, missing := t.m.holder.take(sub, ds, false)
	switch {
	case refused != -1:
		return false
	case missing != 0:
		t.m.holder.Cancel(sub, (1<<len(sub)-1)&^missing)
		return false
	}
	for i := range sub {
		t.cs[index[i]], t.ds[index[i]] = sub[i], ds[i]
	}
	return true
}

// missed: the budget is over. An owner that had a fair part of it, and has said nothing at all for as
// long, is out of reach until it does.
func (t *taking) missed(l *line, which uint32, began int64, silent bool) (refused int, open uint32, out outcome) {
	now, fair := t.m.cfg.Clock().Now, int64(t.m.cfg.Budget/2)
	if silent && l != t.m.self && now-began >= fair && now-l.heardLast() >= fair {
		l.breakOff("no answer within the budget")
	}
	return -1, which, outSilent
}

// gone: nobody waits for this Take any more.
func (t *taking) gone(which uint32) (refused int, open uint32, out outcome) {
	i := bits.TrailingZeros32(which)
	t.ds[i] = limiter.Decision{By: limiter.ByDeny, At: t.m.cfg.Clock().Now, RetryAfter: refuseFor}
	return i, 0, outDecided
}

// local has the holder take the charges in which, as far as its leases cover them.
func (t *taking) local(which uint32) (refused int, open uint32) {
	sub, index := subset(t.cs, which)
	ds := make([]limiter.Decision, len(sub))
	refused, missing := t.m.holder.take(sub, ds, false)
	for i := range sub {
		t.cs[index[i]], t.ds[index[i]] = sub[i], ds[i]
		if refused == -1 && missing>>i&1 == 0 {
			t.held |= 1 << index[i]
		}
	}
	if refused >= 0 {
		return index[refused], 0
	}
	return refused, which &^ t.held
}

// askSelf asks the owner in this process: by calls, without a stream.
func (t *taking) askSelf(which uint32) (refused int, open uint32, out outcome) {
	m, a := t.m, t.asking(which)
	m.self.mu.Lock()
	full := len(m.self.asks) >= maxOpenAsks
	if !full {
		m.self.asks[a.ask.ID] = a
	}
	m.self.mu.Unlock()
	if full {
		return -1, which, outSilent
	}
	m.exchange(a)
	return t.await(m.self, a, which, m.cfg.Clock().Now)
}

// timeout ends with the budget.
func (t *taking) timeout() <-chan struct{} {
	if t.timer == nil {
		over := make(chan struct{})
		t.over = over
		t.timer = time.AfterFunc(time.Duration(t.left()), func() { close(over) })
	}
	return t.over
}

// left is how many ns of the budget are left.
func (t *taking) left() int64 {
	return max(int64(t.m.cfg.Budget)-(t.m.cfg.Clock().Now-t.began), 0)
}

// pause waits before another try, for a change of whom to ask, or a while. false: the budget is over.
func (t *taking) pause(tries int) bool {
	t.m.mu.Lock()
	changed := t.m.changed
	t.m.mu.Unlock()
	wait := time.NewTimer(min(firstPause<<min(tries, 3), maxPause))
	defer wait.Stop()
	select {
	case <-changed:
	case <-wait.C:
	case <-t.ctx.Done():
		return false
	case <-t.timeout():
		return false
	}
	return t.left() > 0
}

// mayTry says whether to ask the owner of a partition at all, and whether it is not known to be shut.
func (m *Manager) mayTry(key shutKey) (try, fresh bool) {
	if m.shutCount.Load() == 0 {
		return true, true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.shuts[key]
	if s == nil {
		return true, true
	}
	now := m.cfg.Clock().Now
	if now < s.until {
		return false, false
	}
	s.until = now + int64(shutProbe)
	return true, false
}

// granted opens a partition again.
func (m *Manager) granted(key shutKey) {
	if m.shutCount.Load() == 0 {
		return
	}
	m.mu.Lock()
	_, was := m.shuts[key]
	delete(m.shuts, key)
	m.shutCount.Store(int64(len(m.shuts)))
	m.mu.Unlock()
	if was {
		m.assess()
	}
}

// shutOff notes that the owner of a partition may not grant charges of a kind.
func (m *Manager) shutOff(key shutKey) {
	m.mu.Lock()
	m.shuts[key] = &shut{until: m.cfg.Clock().Now + int64(shutProbe)}
	m.shutCount.Store(int64(len(m.shuts)))
	m.mu.Unlock()
	m.assess()
}
