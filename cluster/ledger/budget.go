package ledger

import (
	"cmp"
	"container/list"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"headgate/cluster/ledger/ledgerpb"
)

// Bounds of the budgets' accounts.
const (
	// MaxBudgets bounds the accounts.
	MaxBudgets = 1 << 18
	// MaxHolders bounds the holders of one account.
	MaxHolders = 256
	// MaxNano bounds an amount of money that a command names: over a billion dollars.
	MaxNano = 1 << 60

	maxBudgetBytes = 64 << 20  // of the accounts' names
	tenantPart     = 4         // what part of the accounts and of their names one tenant has at most
	maxSlots       = 512       // of a rolling budget's window
	maxLevels      = 16        // alerts of one budget
	maxPercent     = 1_000     // of an alert
	maxSum         = 1<<62 - 1 // where sums of money stop; two of them can be added

	// keptEnded is how long an account stays after its period.
	keptEnded = 35 * 24 * int64(time.Hour)
	// grantPart is what part of what is free a block is at most, above one request's cost.
	grantPart = 8
	// rearm is by how many percent spending falls below an alert before it is one again.
	rearm = 5

	minute       = int64(time.Minute)
	spikeMinutes = 60          // that a minute is compared with
	spikeYoung   = 10          // so many an account has lived before any is a spike
	spikeOnce    = 60 * minute // between two spikes of an account
	millionth    = 1_000_000   // of a factor
)

// account is a BudgetAccount and what only the state looks at.
//
// Outstanding is what holders may still spend without asking. Always Spent + Σ Outstanding ≤
// Amount, but for what holders spent or claim beyond what they were granted, what an operator charged,
// and an amount that was lowered: then nothing is granted.
type account struct {
	BudgetAccount
	born    int64
	slots   []slot // of a rolling budget: what Spent is the sum of
	minutes []slot // of the last hour, where spikes are looked for
}

// accountTable holds the accounts, and how many each tenant has: so that one whose users are made up
// leaves room for the others.
type accountTable struct {
	*table[BudgetKey, *account]
	shares map[string]share // by tenant; of those that have any
}

// share is how many accounts a tenant has, and the bytes of their names.
type share struct{ count, bytes int }

func newAccountTable() *accountTable {
	return &accountTable{newTable[BudgetKey, *account](MaxBudgets, maxBudgetBytes), map[string]share{}}
}

func (as *accountTable) add(a *account) {
	as.table.add(a)
	as.count(a, 1)
}

func (as *accountTable) remove(e *list.Element) {
	as.count(e.Value.(*account), -1)
	as.table.remove(e)
}

func (as *accountTable) count(a *account, n int) {
	s := as.shares[a.Key.Tenant]
	s.count, s.bytes = s.count+n, s.bytes+n*a.size()
	if as.shares[a.Key.Tenant] = s; s.count == 0 {
		delete(as.shares, a.Key.Tenant)
	}
}

// within says whether one more is within its tenant's share. What belongs to no tenant is the operator's own.
func (as *accountTable) within(k *BudgetKey) bool {
	s := as.shares[k.Tenant]
	return k.Tenant == "" || s.count < as.most/tenantPart && s.bytes+keySize(&k.Key) <= as.mostBytes/tenantPart
}

// slot is what was spent in one slot of time, in the order of time; none is 0.
type slot struct{ index, amount int64 }

// drawn is what a holder's last draw gave.
type drawn struct {
	granted, spent, amount, others, free, nano, lost int64
	closed                                           bool
}

func (r *drawn) message(n uint64) *ledgerpb.BudgetResult {
	return &ledgerpb.BudgetResult{
		N: n, Granted: r.granted, Spent: r.spent, Amount: r.amount, Others: r.others, Free: r.free, UnixNano: r.nano, Lost: r.lost, Closed: r.closed,
	}
}

func (a *account) name() BudgetKey { return a.Key }
func (a *account) size() int       { return keySize(&a.Key.Key) }
func (a *account) nano() int64     { return nanoOrZero(a.Time) }

// addNano adds money and stops at maxSum.
func addNano(a, b int64) int64 { return min(max(a+b, -maxSum), maxSum) }

func budgetTermsOf(m *ledgerpb.BudgetTerms) BudgetTerms {
	t := BudgetTerms{
		Amount: m.GetAmount(), Revision: m.GetRevision(), Window: time.Duration(m.GetWindowNs()), Slot: time.Duration(m.GetSlotNs()), Name: m.GetLabel(),
		Spike: Spike{Factor: Factor(m.GetSpikeMillionths()), Floor: NanoUSD(m.GetSpikeFloor()), Kill: m.GetSpikeKill()},
	}
	for _, percent := range m.GetAlerts() {
		t.Alerts = append(t.Alerts, int(percent))
	}
	return t
}

func (t *BudgetTerms) check(k *BudgetKey) error {
	switch {
	case !nanos(t.Amount, int64(t.Spike.Floor)):
		return refuse(codeInvalid, "a budget is of 0 to %d nano-dollars, and so is what a spike spends at least", int64(MaxNano))
	case len(t.Name) > maxBucketName:
		return refuse(codeInvalid, "a budget's name has at most %d bytes", maxBucketName)
	case t.Window < 0 || t.Slot < 0 || (t.Window > 0) != (t.Slot > 0) || t.Slot > t.Window || t.Slot > 0 && t.Window/t.Slot > maxSlots:
		return refuse(codeInvalid, "a rolling budget has a window of 1 to %d slots, not %v of %v", maxSlots, t.Window, t.Slot)
	case t.Window > 0 && k.End != 0:
		return refuse(codeInvalid, "a budget that rolls has no period")
	case t.Spike.Factor < 0 || t.Spike.Factor > maxFactor:
		return refuse(codeInvalid, "a spike's factor is 0 to %d millionths", int64(maxFactor))
	case len(t.Alerts) > maxLevels:
		return refuse(codeInvalid, "a budget has at most %d alerts", maxLevels)
	}
	for i, percent := range t.Alerts {
		if percent < 1 || percent > maxPercent || i > 0 && percent <= t.Alerts[i-1] {
			return refuse(codeInvalid, "alerts are 1 to %d percent and rise", maxPercent)
		}
	}
	return nil
}

// maxFactor bounds a spike's, in millionths.
const maxFactor = 1_000 * millionth

// nanos says of amounts that each is one that a command may name.
func nanos(amounts ...int64) bool {
	return !slices.ContainsFunc(amounts, func(n int64) bool { return n < 0 || n > MaxNano })
}

func (k *BudgetKey) check() error {
	if err := checkBucket(&k.Key); err != nil {
		return err
	}
	if k.Start < 0 || k.End < k.Start || k.End == k.Start && k.End != 0 {
		return refuse(codeInvalid, "a period begins after 1970 and before it ends, or is 0 to 0 for none")
	}
	return nil
}

func budgetDrawOf(c *ledgerpb.Budget) (*BudgetDraw, error) {
	d := &BudgetDraw{
		Key: budgetKeyOf(c.GetKey()), Terms: budgetTermsOf(c.GetTerms()), Holder: c.GetHolder(), N: c.GetN(), Spent: c.GetSpent(), Holding: c.GetHolding(),
		Want: c.GetWant(), Need: c.GetNeed(), Least: c.GetLeast(), Final: c.GetFinal(), Lost: c.GetLost(),
	}
	switch {
	case d.Holder == 0 || d.N == 0:
		return nil, refuse(codeInvalid, "a draw has a holder and a number, neither of them 0")
	case !nanos(d.Spent, d.Holding, d.Want, d.Need, d.Least):
		return nil, refuse(codeInvalid, "a draw is of 0 to %d nano-dollars", int64(MaxNano))
	case d.Lost && !d.Final || d.Final && d.Want > 0:
		return nil, refuse(codeInvalid, "what is lost is said with the final draw, and that wants nothing")
	}
	if err := d.Key.check(); err != nil {
		return nil, err
	}
	return d, d.Terms.check(&d.Key)
}

// budget applies a draw. What it gave goes to s.budgetGave.
func (s *State) budget(c *ledgerpb.Budget) (changed bool, err error) {
	d, err := budgetDrawOf(c)
	if err != nil {
		return false, err
	}
	now := max(0, s.stamp)
	old, known := s.budgets.find(d.Key)
	if known {
		if done, err := s.drew(old, d); done {
			return false, err
		}
	}
	if err := s.mayDraw(old, d, now); err != nil {
		return false, err
	}
	if !known {
		if changed, err = s.roomForBudget(&d.Key, now); err != nil {
			return changed, err
		}
		old = &account{BudgetAccount: BudgetAccount{Key: d.Key, Terms: d.Terms}, born: now}
	}
	next := old.next(now)
	next.bind(&d.Terms)
	i, err := next.hold(d.Holder, s.member)
	if err != nil {
		return changed, err
	}
	h := &next.Holders[i]
	if h.Node == "" {
		h.Node = s.memberName(d.Holder)
	}
	next.serve(h, d, now)
	if h.last.granted < min(d.Want, d.Need) && h.last.others > 0 {
		s.recall(d.Key)
	}
	s.budgetGave = h.last.message(h.N)
	s.putBudget(old, next, known, d.Want > 0 && h.last.granted == 0 && h.last.others == 0)
	return true, nil
}

// memberName is what the view calls an incarnation; "": it has none such.
func (s *State) memberName(incarnation uint64) string {
	if v := s.work.View; v != nil {
		for i := range v.Members {
			if v.Members[i].Incarnation == incarnation {
				return v.Members[i].Name
			}
		}
	}
	return ""
}

// drew answers a draw that was applied before, and one that another has overtaken.
func (s *State) drew(a *account, d *BudgetDraw) (done bool, err error) {
	i, own := a.find(d.Holder)
	if !own || d.N > a.Holders[i].N {
		return false, nil
	}
	h := &a.Holders[i]
	if d.N == h.N {
		s.budgetGave = h.last.message(h.N)
		return true, nil
	}
	s.budgetGave = &ledgerpb.BudgetResult{N: h.N, Known: h.Spent, Closed: h.Closed}
	return true, refuse(codeStale, "draw %d of the budget is known already, of the same holder: this is %d", h.N, d.N)
}

// mayDraw refuses what is about nothing, and what wants a block that there cannot be. a is nil where
// there is no account. now is the leader's clock, not the account's time: of the accounts of two periods that
// a leader before saw with another clock, one may be drawn on at any time.
func (s *State) mayDraw(a *account, d *BudgetDraw, now int64) error {
	own := false
	if a != nil {
		_, own = a.find(d.Holder)
	}
	switch {
	case d.Final && !own && (d.Spent == 0 || a == nil && d.forgotten(now)), a == nil && d.Want == 0 && d.Spent == 0 && d.Holding == 0:
		return refuse(codeNotFound, "nothing of the budget %q is known of this holder", d.Terms.Name)
	case d.Want > 0 && d.Key.End != 0 && (now < d.Key.Start || now >= d.Key.End):
		s.budgetGave = &ledgerpb.BudgetResult{UnixNano: now}
		return refuse(codePeriod, "it is %s, and the budget's period is another", timeOrZero(now).Format(time.RFC3339))
	case d.Want > 0 && !s.member(d.Holder):
		return refuse(codeNoMember, "the holder %x is not in the view", d.Holder)
	}
	return nil
}

// forgotten says of an account that is not there whether it may have been, with what was spent of
// it: after its period, or where it rolls, and may do so where nobody says that it does not.
func (d *BudgetDraw) forgotten(now int64) bool {
	if d.Key.End != 0 {
		return now >= d.Key.End
	}
	return d.Terms.Name == "" || d.Terms.Window != 0
}

// roomForBudget makes room for one account more.
func (s *State) roomForBudget(k *BudgetKey, now int64) (changed bool, err error) {
	changed = s.forgetBudgets(now, sweepEach, func(*account) bool { return false })
	if !s.budgets.room(keySize(&k.Key)) {
		changed = s.forgetBudgets(now, sweepFull, func(*account) bool { return true }) || changed
	}
	if !s.budgets.within(k) {
		changed = s.forgetBudgets(now, sweepFull, func(a *account) bool { return a.Key.Tenant == k.Tenant }) || changed
	}
	switch {
	case !s.budgets.within(k):
		return changed, refuse(codeFull, "tenant %q has %d accounts of budgets in use, which is the most of one tenant", k.Tenant, s.budgets.shares[k.Tenant].count)
	case !s.budgets.room(keySize(&k.Key)):
		return changed, refuse(codeFull, "%d accounts of budgets are in use, which is the most", len(s.budgets.at))
	}
	return changed, nil
}

// forgetBudgets looks at so many accounts for those that count no more, of which those that full
// selects must make room. It says whether there were any.
func (s *State) forgetBudgets(now int64, most int, full func(*account) bool) (changed bool) {
	for range min(most, s.budgets.queue.Len()) {
		e := s.budgets.queue.Front()
		a := e.Value.(*account)
		if !a.over(now, full(a), s.member) {
			s.budgets.queue.MoveToBack(e)
			continue
		}
		s.rehash(a, nil)
		s.budgets.remove(e)
		delete(s.tell, a.Key)
		changed = true
	}
	return changed
}

// over says of an account that it may be forgotten: long after its period, or where there is no
// room after it; or as nothing is spent and nobody may spend, and none of its draws is so recent that the log might hold it
// once more. Who has spent and is gone without a last word is waited for as long, and where there is room: what it said
// is known by its total, which it will say again.
func (a *account) over(now int64, full bool, member func(uint64) bool) bool {
	if a.Key.End != 0 && now >= a.Key.End {
		return now-a.Key.End >= keptEnded || full && a.Outstanding() == 0
	}
	if !full && now-a.nano() < minute || a.next(now).Spent != 0 {
		return false
	}
	return !slices.ContainsFunc(a.Holders, func(h BudgetHolder) bool {
		awaited := h.Spent > 0 && !full && now-nanoOrZero(h.Time) < keptEnded
		return h.Outstanding > 0 || !h.Closed && (awaited || member(h.Holder))
	})
}

// putBudget puts an account in the place of its past, and looks at what it spent. dry: what is left was not enough for
// somebody, though nobody else holds any.
func (s *State) putBudget(old, next *account, known, dry bool) {
	s.watch(next, dry)
	if known {
		s.rehash(old, next)
		s.budgets.put(next)
	} else {
		s.rehash(nil, next)
		s.budgets.add(next)
	}
	delete(s.tell, next.Key)
	if next.untold() {
		s.tell[next.Key] = struct{}{}
	}
}

// rehash takes the hash from one state of an account to the next; nil is none. Holders are entries of
// their own, so that a draw need not hash all of them.
func (s *State) rehash(old, next *account) {
	none := new(account)
	if old == nil {
		old = none
	} else {
		s.hash.remove(s.enc.budget(old))
	}
	if next == nil {
		next = none
	} else {
		s.hash.add(s.enc.budget(next))
	}
	before, after := old.Holders, next.Holders
	for len(before) > 0 || len(after) > 0 {
		switch {
		case len(after) == 0 || len(before) > 0 && before[0].Holder < after[0].Holder:
			s.hash.remove(s.enc.holder(&old.Key, &before[0]))
			before = before[1:]
		case len(before) == 0 || after[0].Holder < before[0].Holder:
			s.hash.add(s.enc.holder(&next.Key, &after[0]))
			after = after[1:]
		default:
			if before[0] != after[0] {
				s.hash.remove(s.enc.holder(&old.Key, &before[0]))
				s.hash.add(s.enc.holder(&next.Key, &after[0]))
			}
			before, after = before[1:], after[1:]
		}
	}
}

// recall has nodes told, once for all commands of a batch, that others want what they hold.
func (s *State) recall(k BudgetKey) {
	if !slices.Contains(s.recalls, k) && len(s.recalls) < maxRecalls {
		s.recalls = append(s.recalls, k)
	}
}

// maxRecalls bounds the accounts of one batch that are recalled; who is refused asks again.
const maxRecalls = 64

// at is the account for showing, as of now where it rolls.
func (a *account) at(now int64) *BudgetAccount {
	if a.Terms.Window == 0 {
		return &a.BudgetAccount
	}
	return &a.next(now).BudgetAccount
}

// next is a copy of the account at a later moment.
func (a *account) next(now int64) *account {
	n := *a
	n.Holders = slices.Clone(a.Holders)
	n.Time = timeOrZero(max(now, a.nano()))
	n.roll()
	return &n
}

// roll lets what was spent before the window go.
func (a *account) roll() {
	if a.Terms.Window == 0 {
		return
	}
	from := a.nano() - int64(a.Terms.Window)
	a.slots = slices.DeleteFunc(slices.Clone(a.slots), func(s slot) bool { return (s.index+1)*int64(a.Terms.Slot) <= from })
	a.Spent = total(a.slots)
}

func total(slots []slot) (sum int64) {
	for _, s := range slots {
		sum = addNano(sum, s.amount)
	}
	return sum
}

// enter adds to the slot of an index, which may be any. It changes slots.
func enter(slots []slot, index, amount int64) []slot {
	i, found := slices.BinarySearchFunc(slots, index, func(s slot, index int64) int { return cmp.Compare(s.index, index) })
	if !found {
		slots = slices.Insert(slots, i, slot{index: index})
	}
	if slots[i].amount = addNano(slots[i].amount, amount); slots[i].amount == 0 {
		slots = slices.Delete(slots, i, i+1)
	}
	return slots
}

// bind lets newer terms bind, and any where there were none. What was spent stays spent, and
// where its moment is not known it was just now.
func (a *account) bind(t *BudgetTerms) {
	if t.Revision <= a.Terms.Revision && a.Terms.Name != "" {
		return
	}
	window, width := a.Terms.Window, int64(a.Terms.Slot)
	a.Terms = *t
	if t.Window == window && int64(t.Slot) == width {
		return
	}
	old := a.slots
	a.slots = nil
	switch {
	case t.Window == 0:
		return
	case window == 0:
		a.slots = enter(nil, a.nano()/int64(t.Slot), a.Spent)
	default:
		for _, s := range old {
			last := min((s.index+1)*width-1, a.nano())
			a.slots = enter(a.slots, last/int64(t.Slot), s.amount)
		}
	}
	a.roll()
}

func (a *account) find(holder uint64) (int, bool) {
	return slices.BinarySearchFunc(a.Holders, holder, func(h BudgetHolder, holder uint64) int { return cmp.Compare(h.Holder, holder) })
}

// hold finds a holder, or adds it. Where there is no room it forgets who holds nothing: who was ended
// longest ago first, then who is in the view no more. Should one of those say again what it spent, it counts twice.
func (a *account) hold(holder uint64, member func(uint64) bool) (int, error) {
	i, own := a.find(holder)
	if own {
		return i, nil
	}
	if len(a.Holders) >= MaxHolders {
		drop := -1
		for j := range a.Holders {
			h := &a.Holders[j]
			if h.Outstanding > 0 || !h.Closed && member(h.Holder) {
				continue
			}
			if drop < 0 || h.Closed && !a.Holders[drop].Closed || h.Closed == a.Holders[drop].Closed && h.Time.Before(a.Holders[drop].Time) {
				drop = j
			}
		}
		if drop < 0 {
			return 0, refuse(codeFull, "%d holders hold some of the budget %q, which is the most", MaxHolders, a.Terms.Name)
		}
		a.Holders = slices.Delete(a.Holders, drop, drop+1)
		i, _ = a.find(holder)
	}
	a.Holders = slices.Insert(a.Holders, i, BudgetHolder{Holder: holder})
	return i, nil
}

// serve takes what a holder says and grants it a block. now is the leader's clock.
func (a *account) serve(h *BudgetHolder, d *BudgetDraw, now int64) {
	r := drawn{amount: a.Terms.Amount, nano: now}
	more := max(0, d.Spent-h.Spent)
	left := max(0, h.Outstanding-more)
	h.Spent, h.N, h.Time = h.Spent+more, d.N, a.Time
	switch {
	case d.Final && d.Lost:
		r.lost, h.Spent, h.Outstanding = left, addNano(h.Spent, left), 0
	case d.Final, h.Closed:
		h.Outstanding = 0
	default:
		// It may be more than is known of: of an account that was restored, or where an open request
		// will cost more than was granted. It is believed, since that only lowers what is free.
		h.Outstanding = d.Holding
	}
	h.Closed = h.Closed || d.Final
	a.spend(addNano(more, r.lost))
	a.meter(more)
	if !h.Closed {
		r.granted = a.grant(d)
		h.Outstanding = addNano(h.Outstanding, r.granted)
	}
	r.spent, r.free, r.closed = a.Spent, a.Free(), h.Closed
	r.others = a.Outstanding() - h.Outstanding
	h.last = r
}

// grant is how much a draw gets: what it wants, but less as the account nears its end, so that
// others get some too, and one request's cost as long as there is as much.
func (a *account) grant(d *BudgetDraw) int64 {
	free := a.Free()
	g := min(d.Want, max(min(d.Need, free), free/grantPart))
	if g <= 0 || g < d.Least {
		return 0
	}
	return g
}

// spend counts an amount as spent now.
func (a *account) spend(amount int64) {
	if a.Terms.Window == 0 {
		a.Spent = addNano(a.Spent, amount)
		return
	}
	a.slots = enter(a.slots, a.nano()/int64(a.Terms.Slot), amount) // roll made them its own
	a.Spent = total(a.slots)
}

// meter counts what was spent for spikes.
func (a *account) meter(amount int64) {
	if a.Terms.Spike.Factor == 0 {
		a.minutes = nil
		return
	}
	now := a.nano() / minute
	a.minutes = slices.DeleteFunc(slices.Clone(a.minutes), func(s slot) bool { return s.index < now-spikeMinutes })
	a.minutes = enter(a.minutes, now, amount)
}

// spikes says whether this minute spent more than the minutes of the hour before it did, times the
// factor. A young account has few of them, and a very young one none that say much.
func (a *account) spikes() bool {
	now, recent, before := a.nano()/minute, int64(0), int64(0)
	lived := min(spikeMinutes, now-a.born/minute)
	if a.Terms.Spike.Factor == 0 || a.Key.Tenant == "" || lived < spikeYoung || !a.Spiked.IsZero() && a.nano()-nanoOrZero(a.Spiked) < spikeOnce {
		return false
	}
	for _, s := range a.minutes {
		if s.index == now {
			recent = s.amount
		} else {
			before = addNano(before, s.amount)
		}
	}
	return recent > 0 && recent >= int64(a.Terms.Spike.Floor) && exceeds(recent, lived*millionth, before, int64(a.Terms.Spike.Factor))
}

// exceeds says whether a·b > c·d, exactly. None is negative.
func exceeds(a, b, c, d int64) bool {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	hi2, lo2 := bits.Mul64(uint64(c), uint64(d))
	return hi > hi2 || hi == hi2 && lo > lo2
}

// passed says whether at least so many percent of the amount are spent; of nothing, if anything is.
func (a *account) passed(percent int) bool {
	return a.Spent > 0 && !exceeds(a.Terms.Amount, int64(max(0, percent)), a.Spent, 100)
}

// watch looks for alerts and spikes, and makes them known. Where what is left is dry it is used up, if nearly all of
// the amount is spent: the last of it pays for no request, and would keep the alert from ever coming.
func (s *State) watch(a *account, dry bool) {
	level := 0
	for _, percent := range a.Terms.Alerts {
		if a.passed(percent) || dry && percent == 100 && a.passed(100-rearm) {
			level = percent
		}
	}
	switch {
	case level > a.Crossed:
		a.Crossed, a.CrossedAt = level, a.Time
		s.recordBudget(alertAction, a, fmt.Sprintf("%d %%: %v of %v dollars are spent", level, NanoUSD(a.Spent), NanoUSD(a.Terms.Amount)))
	case level < a.Crossed && !a.passed(a.Crossed-rearm):
		a.Crossed, a.Notified = level, min(a.Notified, level)
	}
	if !a.spikes() {
		return
	}
	a.Spiked = a.Time
	recent, _ := slices.BinarySearchFunc(a.minutes, a.nano()/minute, func(s slot, index int64) int { return cmp.Compare(s.index, index) })
	what := fmt.Sprintf("%v dollars are spent in a minute, more than %v times the mean of the hour before", NanoUSD(a.minutes[recent].amount), a.Terms.Spike.Factor)
	s.recordBudget(spikeAction, a, what)
	if _, on := s.work.Kills.Lookup(KillTenant, a.Key.Tenant); a.Terms.Spike.Kill && !on {
		s.killFor(a, what)
	}
}

// killFor throws the kill switch of the account's tenant.
func (s *State) killFor(a *account, why string) {
	actor := s.actor
	s.actor = cut("budget "+a.Terms.Name, maxLabel)
	defer func() { s.actor = actor }()
	if _, err := s.setKill(&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_TENANT, Name: a.Key.Tenant, On: true, Reason: why}); err != nil {
		s.recordBudget(spikeAction, a, "the kill switch was not thrown: "+err.Error())
	}
}

// recordBudget writes what happened to an account where the audit log shows it, and lets it show.
// What users spend is a trail of its own: it would push out what people did.
func (s *State) recordBudget(action string, a *account, what string) {
	s.shows = true
	s.events.add(s.entry(action, a.Key.describe(), "", what))
}

// budgetEvent says of an audit entry that recordBudget wrote it.
func budgetEvent(action string) bool { return action == alertAction || action == spikeAction }

// What is audited of budgets without anybody having done it.
const (
	alertAction = "budget.alert"
	spikeAction = "budget.spike"
)

func (k *BudgetKey) describe() string {
	out := "budget " + k.Limit
	if k.Tenant != "" {
		out += " of tenant " + k.Tenant
	}
	if k.Subject != "" {
		out += fmt.Sprintf(", subject %q", k.Subject)
	}
	if k.End != 0 {
		out += ", from " + timeOrZero(k.Start).Format(time.RFC3339)
	}
	return out
}

func (a *account) untold() bool { return a.Crossed > a.Notified || a.Spiked.After(a.SpikeTold) }

func (s *State) adjustBudget(c *ledgerpb.AdjustBudget) (changed bool, err error) {
	k, amount, now := budgetKeyOf(c.GetKey()), c.GetAmount(), max(0, s.stamp)
	if err := k.check(); err != nil {
		return false, err
	}
	if amount == 0 || amount < -MaxNano || amount > MaxNano || c.GetReason() == "" || len(c.GetReason()) > maxReason {
		return false, refuse(codeInvalid, "a correction is not 0, of at most %d nano-dollars, and has a reason of 1 to %d bytes", int64(MaxNano), maxReason)
	}
	old, known := s.budgets.find(k)
	if !known {
		if k.End != 0 && now >= k.End {
			return false, refuse(codeNotFound, "the %s is not known any more", k.describe())
		}
		if now < k.Start {
			s.budgetGave = &ledgerpb.BudgetResult{UnixNano: now}
			return false, refuse(codePeriod, "it is %s, and the period of %s has not begun", timeOrZero(now).Format(time.RFC3339), k.describe())
		}
		if changed, err = s.roomForBudget(&k, now); err != nil {
			return changed, err
		}
		old = &account{BudgetAccount: BudgetAccount{Key: k}, born: now}
	}
	next := old.next(now)
	before := next.Spent
	if next.spend(amount); next.Spent < -2*MaxNano || next.Spent > 2*MaxNano {
		return changed, refuse(codeInvalid, "with that %v dollars were spent, which is no amount of money", NanoUSD(next.Spent))
	}
	action, what := "budget.charge", fmt.Sprintf("charge of %v dollars", NanoUSD(amount))
	if amount < 0 {
		action, what = "budget.credit", fmt.Sprintf("credit of %v dollars", NanoUSD(-amount))
	}
	s.record(action, k.describe(), fmt.Sprintf("%v dollars spent", NanoUSD(before)), fmt.Sprintf("%s: %s; %v dollars spent now", what, c.GetReason(), NanoUSD(next.Spent)))
	s.putBudget(old, next, known, false)
	s.budgetGave = (&drawn{spent: next.Spent, amount: next.Terms.Amount, others: next.Outstanding(), free: next.Free(), nano: now}).message(0)
	return true, nil
}

func (s *State) releaseHolder(c *ledgerpb.ReleaseHolder) (changed bool, err error) {
	holder := c.GetHolder()
	switch {
	case holder == 0 || len(c.GetNode()) > maxID || c.GetReason() == "" || len(c.GetReason()) > maxReason:
		return false, refuse(codeInvalid, "a release names a holder and its node, and has a reason of 1 to %d bytes", maxReason)
	case s.work.View != nil && s.member(holder):
		return false, refuse(codeConflict, "the process %x of node %q is a member of the cluster and may still spend what it holds: stop it, and wait until it is no member any more (see `headgate members`)", holder, c.GetNode())
	}
	if name := s.holderName(holder); name != "" && name != c.GetNode() {
		return false, refuse(codeConflict, "the process %x was one of node %q, not %q", holder, name, c.GetNode())
	}
	freed, accounts, known := int64(0), 0, false
	for e := s.budgets.queue.Front(); e != nil; e = e.Next() {
		old := e.Value.(*account)
		i, own := old.find(holder)
		known = known || own
		if !own || old.Holders[i].Closed {
			continue
		}
		next := *old
		next.Holders = slices.Clone(old.Holders)
		h := &next.Holders[i]
		if freed = addNano(freed, h.Outstanding); h.Outstanding > 0 {
			accounts++
		}
		h.Outstanding, h.Closed = 0, true
		h.last.granted, h.last.closed = 0, true // the last draw may come again: its answer was lost
		s.putBudget(old, &next, true, false)
		changed = true
	}
	if !known {
		return false, refuse(codeNotFound, "no budget knows of a process %x", holder)
	}
	if changed {
		s.record("budget.release", fmt.Sprintf("node %s (%x)", c.GetNode(), holder), "", fmt.Sprintf("%v dollars of %d accounts: %s", NanoUSD(freed), accounts, c.GetReason()))
	}
	s.budgetGave = &ledgerpb.BudgetResult{Freed: freed}
	return changed, nil
}

// holderName is what the view called a holder when it drew first; "": it was in none.
func (s *State) holderName(holder uint64) string {
	for e := s.budgets.queue.Front(); e != nil; e = e.Next() {
		a := e.Value.(*account)
		if i, own := a.find(holder); own && a.Holders[i].Node != "" {
			return a.Holders[i].Node
		}
	}
	return ""
}

func (s *State) budgetNotified(c *ledgerpb.BudgetNotified) (bool, error) {
	old, ok := s.budgets.find(budgetKeyOf(c.GetKey()))
	if !ok {
		return false, refuse(codeNotFound, "there is no such account of a budget")
	}
	next := *old
	next.Notified = max(old.Notified, min(int(c.GetPercent()), old.Crossed))
	if spike := timeOrZero(c.GetSpike()); spike.After(old.SpikeTold) && !spike.After(old.Spiked) {
		next.SpikeTold = spike
	}
	if next.Notified == old.Notified && next.SpikeTold.Equal(old.SpikeTold) {
		return false, nil
	}
	s.putBudget(old, &next, true, false)
	return true, nil
}
