package node

import (
	"context"
	"time"

	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/proxy/journal"
)

// simBook is what the simulation itself knows of an account: what the ledger must have, worked out from the commands,
// and what requests did, from the requests.
type simBook struct {
	key      ledger.BudgetKey
	strict   bool
	revision uint64
	amount   int64 // by the terms that bind
	peak     int64 // the highest amount that ever bound
	spent    int64
	out      int64 // of all holders
	charged  int64 // by hand
	credited int64
	freed    int64 // released
	beyond   int64 // told beyond what was outstanding, or claimed
	holders  map[uint64]*simHolder

	over      int64 // what requests cost beyond what they were granted: all that may be beyond
	committed int64 // granted to open requests, and what ended ones cost
	open      int64
	ended     []simEnded // of a strict budget that rolls
	window    time.Duration
	crashed   int64 // what the requests that were open at crashes count beyond what was served
}

type simEnded struct {
	at   time.Time
	cost int64
}

// simHolder is a process in an account.
type simHolder struct {
	n                uint64
	granted          int64 // by the last draw
	spent, out, lost int64
	closed           bool
	unheard          bool // it said its last word before the ledger had heard of it: a draw that comes after that is granted
	freed            int64

	served    int64 // by the upstream
	low, high int64 // what must be recorded
	full      int64 // of all requests, what a crash would have counted
	over      int64
}

func (w *simWorld) book(k ledger.BudgetKey) *simBook {
	b := w.books[k]
	if b == nil {
		b = &simBook{key: k, holders: map[uint64]*simHolder{}}
		for i := range w.budgets {
			if w.budgets[i].name == k.Limit {
				b.strict, b.window = w.budgets[i].strict, w.budgets[i].window
			}
		}
		w.books[k] = b
	}
	return b
}

func (b *simBook) holder(id uint64) *simHolder {
	h := b.holders[id]
	if h == nil {
		h = &simHolder{}
		b.holders[id] = h
	}
	return h
}

// check holds the ledger's answer to a command against the books.
func (w *simWorld) check(c *ledgerpb.Command, r *ledgerpb.Result) {
	switch {
	case c.GetBudget() != nil:
		w.checkDraw(c.GetBudget(), r)
	case c.GetAdjustBudget() != nil:
		w.checkAdjusted(c, r)
	case c.GetReleaseHolder() != nil:
		w.checkReleased(c.GetReleaseHolder(), r)
	}
}

func (w *simWorld) checkDraw(d *ledgerpb.Budget, r *ledgerpb.Result) {
	b := w.book(simKeyOf(d.GetKey()))
	h, res := b.holder(d.GetHolder()), r.GetBudget()
	w.note("ledger: %s holder %x draw %d: spent %d holding %d want %d need %d least %d final %v lost %v → %q granted %d spent %d amount %d others %d free %d lost %d",
		b.name(), d.GetHolder(), d.GetN(), d.GetSpent(), d.GetHolding(), d.GetWant(), d.GetNeed(), d.GetLeast(), d.GetFinal(), d.GetLost(),
		r.GetCode(), res.GetGranted(), res.GetSpent(), res.GetAmount(), res.GetOthers(), res.GetFree(), res.GetLost())
	w.mix(d.GetHolder(), d.GetN(), uint64(d.GetSpent()), uint64(d.GetHolding()), uint64(res.GetGranted()))
	switch {
	case r.GetCode() != "":
		h.unheard = h.unheard || d.GetFinal() && r.GetCode() == "not_found"
		return
	case d.GetN() <= h.n && res.GetGranted() > 0 && h.granted == 0 && h.spent == 0 && h.out == 0:
		*h = simHolder{served: h.served, low: h.low, high: h.high, full: h.full, over: h.over} // the account of nothing was forgotten
	case d.GetN() <= h.n:
		if d.GetN() < h.n || res.GetGranted() != h.granted && !(h.closed && res.GetGranted() == 0) {
			w.fail("%s: draw %d of %x was answered twice, with %d and %d", b.name(), d.GetN(), d.GetHolder(), h.granted, res.GetGranted())
		}
		return
	}
	if t := d.GetTerms(); t.GetRevision() > b.revision || t.GetLabel() != "" && b.spent == 0 && b.out == 0 && res.GetAmount() == t.GetAmount() {
		b.revision, b.amount, b.peak = t.GetRevision(), t.GetAmount(), max(b.peak, t.GetAmount())
	}
	more := max(0, d.GetSpent()-h.spent)
	left := max(0, h.out-more)
	b.beyond += max(0, more-h.out)
	out, lost := d.GetHolding()+res.GetGranted(), int64(0)
	if d.GetLost() {
		lost = left
	}
	if d.GetFinal() || h.closed {
		out = 0
	} else {
		b.beyond += max(0, d.GetHolding()-left)
	}
	b.out += out - h.out
	if b.spent += more + lost; b.window != 0 {
		b.spent = res.GetSpent()
	}
	h.spent, h.out, h.lost, h.n, h.granted = h.spent+more+lost, out, h.lost+lost, d.GetN(), res.GetGranted()
	h.closed = h.closed || d.GetFinal()
	w.checkResult(b, res)
	if res.GetGranted() > 0 && b.spent+b.out > b.amount {
		w.fail("%s: a grant of %d makes %d spent and %d outstanding of %d", b.name(), res.GetGranted(), b.spent, b.out, b.amount)
	}
	if res.GetOthers() != b.out-h.out || res.GetLost() != lost {
		w.fail("%s: the ledger says %d with others and %d lost, the books %d and %d", b.name(), res.GetOthers(), res.GetLost(), b.out-h.out, lost)
	}
	w.checkHeld(b, d.GetHolder())
	if res.GetGranted() < min(d.GetWant(), d.GetNeed()) && res.GetOthers() > 0 {
		w.recall(b.key)
	}
}

// checkResult holds an account to its promise at this step: what is spent and outstanding is within the amount, but
// for what requests cost beyond what they were granted, and what an operator did.
func (w *simWorld) checkResult(b *simBook, res *ledgerpb.BudgetResult) {
	if res.GetSpent() != b.spent || res.GetAmount() != b.amount || res.GetFree() != b.amount-b.spent-b.out {
		w.fail("%s: the ledger says %d spent of %d and %d free, the books %d of %d and %d", b.name(), res.GetSpent(), res.GetAmount(), res.GetFree(), b.spent, b.amount, b.amount-b.spent-b.out)
	}
	most := b.peak + b.charged + b.beyond
	if b.window != 0 {
		most += b.credited // a credit leaves the window before what it paid for
	}
	if b.spent+b.out > most {
		w.fail("%s: %d spent and %d outstanding of %d, with %d charged and a debt of %d", b.name(), b.spent, b.out, b.peak, b.charged, b.beyond)
	}
	if b.beyond > b.over+b.freed {
		w.fail("%s: %d was told beyond what was granted, requests explain %d and releases %d", b.name(), b.beyond, b.over, b.freed)
	}
}

// checkHeld holds what a process believes that it may spend against what the ledger has counted for it.
func (w *simWorld) checkHeld(b *simBook, holder uint64) {
	p, h := w.procs[holder], b.holder(holder)
	if p == nil || p.dead || h.closed {
		return
	}
	v, ok := p.m.budgets.Level(simPurseKey(b.key))
	if may := v.Spent + v.Open + v.Held + v.Emergency; ok && may > h.spent+h.out {
		w.fail("%s: %s (%x) may spend %d, and the ledger counts %d spent and %d outstanding of it", b.name(), p.node.name, holder, may, h.spent, h.out)
	}
}

func (w *simWorld) checkAdjusted(c *ledgerpb.Command, r *ledgerpb.Result) {
	a := c.GetAdjustBudget()
	b := w.book(simKeyOf(a.GetKey()))
	w.note("ledger: %s adjusted by %d → %q spent %d", b.name(), a.GetAmount(), r.GetCode(), r.GetBudget().GetSpent())
	if r.GetCode() != "" || w.log.seen[string(c.GetId())] {
		return
	}
	w.log.seen[string(c.GetId())] = true
	if b.spent == 0 && b.out == 0 && r.GetBudget().GetAmount() == 0 {
		b.amount, b.revision = 0, 0 // the account of nothing was forgotten, and its terms with it
	}
	b.charged += max(0, a.GetAmount())
	b.credited += max(0, -a.GetAmount())
	if b.spent += a.GetAmount(); b.window != 0 {
		b.spent = r.GetBudget().GetSpent()
	}
	w.checkResult(b, r.GetBudget())
}

func (w *simWorld) checkReleased(c *ledgerpb.ReleaseHolder, r *ledgerpb.Result) {
	w.note("ledger: %x released → %q freed %d", c.GetHolder(), r.GetCode(), r.GetBudget().GetFreed())
	if r.GetCode() != "" {
		return
	}
	sum := int64(0)
	for _, b := range w.books {
		if h := b.holders[c.GetHolder()]; h != nil && !h.closed && h.n > 0 {
			sum += h.out
			if p := w.procs[c.GetHolder()]; p.dead { // else nobody may have released it
				b.freed += h.out
			}
			h.freed, b.out = h.out, b.out-h.out
			h.out, h.closed = 0, true
		}
	}
	if got := r.GetBudget().GetFreed(); got != sum && got != 0 {
		w.fail("the release of %x freed %d, the books say %d", c.GetHolder(), got, sum)
	}
}

// granted enters what a request was granted; it is open from here on.
func (q *simRequest) granted() {
	now := time.Now()
	for i := range q.bill.Charges {
		b := q.w.book(q.key(i))
		b.committed += q.charged(i)
		b.open += q.charged(i)
		q.w.checkHeld(b, q.p.self)
		if !b.strict {
			continue
		}
		if b.window == 0 && b.committed > b.peak+b.credited+b.freed {
			q.w.fail("%s is strict: requests cost and hold %d of %d, with %d credited and %d released", b.name(), b.committed, b.peak, b.credited, b.freed)
		}
		if sum := b.rolling(now, q.w.jumps); b.window != 0 && sum > b.peak+b.credited+b.freed {
			q.w.fail("%s is strict: in its window requests cost and hold %d of %d, with %d credited and %d released", b.name(), sum, b.peak, b.credited, b.freed)
		}
	}
}

// rolling is what was spent in the window, and is open. Where another leader's clock was ahead the window was shorter.
func (b *simBook) rolling(now time.Time, jumped time.Duration) int64 {
	sum := b.open
	for _, e := range b.ended {
		if now.Sub(e.at) < b.window-jumped {
			sum += e.cost
		}
	}
	return sum
}

// served enters how a request ended: what it cost, and what the journal may have of it instead.
func (q *simRequest) served(cost, low, high int64) {
	for i := range q.bill.Charges {
		q.enter(i, cost, min(cost, low), max(cost, high))
	}
}

func (q *simRequest) enter(i int, cost, low, high int64) {
	b := q.w.book(q.key(i))
	h, granted := b.holder(q.p.self), q.charged(i)
	h.served, h.low, h.high, h.full = h.served+cost, h.low+low, h.high+high, h.full+max(high, q.counts(i))
	h.over += max(0, high-granted)
	b.over += max(0, high-granted)
	b.committed += cost - granted
	b.open -= granted
	if b.strict && b.window != 0 {
		b.ended = append(b.ended, simEnded{time.Now(), cost})
	}
}

// crash enters that a process ended with the request open: the upstream served some of it, and all of it counts.
func (q *simRequest) crash(part int64) {
	q.w.note("request %s was open: the upstream served %d", q.bill.RequestID, part)
	for i := range q.bill.Charges {
		b, counts := q.w.book(q.key(i)), q.counts(i)
		b.crashed += counts - part
		h, granted := b.holder(q.p.self), q.charged(i)
		h.served, h.low, h.high, h.full = h.served+part, h.low+counts, h.high+counts, h.full+counts
		h.over += max(0, counts-granted)
		b.over += max(0, counts-granted)
		b.committed += counts - granted
		b.open -= granted
		if b.strict && b.window != 0 {
			b.ended = append(b.ended, simEnded{time.Now(), counts})
		}
	}
}

// checkEnd is for the end, when everything was said.
func (w *simWorld) checkEnd() {
	recorded := w.readUsage()
	seen := map[*simBook]bool{}
	for _, a := range w.log.accounts() {
		b := w.book(a.Key)
		if seen[b] = true; a.Spent != b.spent && b.window == 0 {
			w.fail("%s: the ledger has %d as spent, the books %d", b.name(), a.Spent, b.spent)
		}
		for _, h := range a.Holders {
			if m := b.holder(h.Holder); m.spent != h.Spent || m.out != h.Outstanding || m.closed != h.Closed {
				w.fail("%s: of %x the ledger has %d spent, %d outstanding, the books %d and %d", b.name(), h.Holder, h.Spent, h.Outstanding, m.spent, m.out)
			}
		}
		w.checkBook(b, recorded[a.Key])
	}
	for _, b := range w.books {
		if b.open != 0 {
			w.fail("%s: requests hold %d at the end", b.name(), b.open)
		}
		if !seen[b] && b.key.End == 0 && b.window == 0 { // else nobody can tell when that was spent
			w.checkBook(b, recorded[b.key])
		}
	}
	if len(seen) == 0 && len(w.recorded) > 20 {
		w.fail("nobody drew from a budget")
	}
}

// checkBook compares what was recorded with what was served.
func (w *simWorld) checkBook(b *simBook, inJournals int64) {
	var spent, served, lost int64
	gone, power := false, false
	for id, h := range b.holders {
		p := w.procs[id]
		spent, served, lost = spent+h.spent, served+h.served, lost+h.lost
		if p.node.gone {
			gone = true
			if h.spent+h.out+h.freed+h.over < h.served {
				w.fail("%s: %x never came back, the ledger counts %d spent and %d outstanding of it, and %d was served", b.name(), id, h.spent, h.out, h.served)
			}
			continue
		}
		if h.out != 0 && !h.unheard {
			w.fail("%s: %x has said its last word, and %d is outstanding", b.name(), id, h.out)
		}
		if h.unheard && (b.window != 0 || b.key.End != 0) && h.spent < h.low {
			gone = true // the ledger cannot tell whether it has forgotten the account: that was said, and logged
			continue
		}
		low, high := h.low, h.high
		if p.power {
			power = true
			low, high = h.served-h.over-h.freed, h.full
		}
		if !p.power && !p.torn && h.lost != 0 {
			w.fail("%s: %d of %x counts as lost, and nothing happened to its journal", b.name(), h.lost, id)
		}
		if h.spent < low || h.spent > high+h.lost {
			w.fail("%s: %s (%x) is recorded with %d, %d was served, and %d to %d must be, with %d lost", b.name(), p.node.name, id, h.spent, h.served, low, high, h.lost)
		}
	}
	if gone || power {
		return
	}
	if spent < served || spent-served > b.crashed+lost {
		w.fail("%s: %d is recorded, %d was served, and %d was open at crashes, with %d lost", b.name(), spent, served, b.crashed, lost)
	}
	if spent != inJournals {
		w.fail("%s: the ledger has %d as spent, the journals have %d", b.name(), spent, inJournals)
	}
}

// readUsage reads all journals: what they have of each account. Each request stands there once.
func (w *simWorld) readUsage() map[ledger.BudgetKey]int64 {
	sums, costs := map[ledger.BudgetKey]int64{}, map[string]int64{}
	type id struct{ incarnation, id uint64 }
	seen := map[id]bool{}
	for _, n := range w.nodes {
		err := n.read(func(u *journal.Usage) error {
			if k := (id{u.Incarnation, u.ID}); u.ID != 0 && u.Outcome != journal.Lost {
				if seen[k] {
					w.fail("request %d of %x stands in the journal twice", u.ID, u.Incarnation)
				}
				seen[k] = true
			}
			if u.Outcome != journal.Lost {
				costs[u.RequestID] = u.Cost
			}
			w.note("usage %s %d of %x: %s %d %v", u.RequestID, u.ID, u.Incarnation, u.Outcome, u.Cost, u.Parts)
			for i := range u.Parts {
				sums[budgetKey(&u.Parts[i].Account)] += u.Parts[i].Amount
			}
			return nil
		})
		if err != nil {
			w.fail("%s: reading its journal: %v", n.name, err)
		}
	}
	for q, cost := range w.recorded {
		if got, ok := costs[q.bill.RequestID]; !q.p.power && (!ok || got != cost) {
			w.fail("request %s cost %d, its journal has %d (%v)", q.bill.RequestID, cost, got, ok)
		}
	}
	return sums
}

// read reads the journal that a node left behind.
func (n *simNode) read(f func(*journal.Usage) error) error {
	l, err := journal.Open(n.w.journalConfig(n, n.w.incarnation(), n.disk))
	if err != nil {
		return err
	}
	if past := l.Unclosed(); len(past) > 0 && !n.gone {
		n.w.fail("%s: all was said, and %x is not closed", n.name, past[0].Incarnation)
	}
	if err := l.Read(context.Background(), journal.Query{}, f); err != nil {
		return err
	}
	return l.Close(context.Background())
}
