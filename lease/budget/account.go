package budget

import (
	"math"
	"math/bits"
	"slices"
)

// never is the time of what is not due.
const never = math.MaxInt64

// instant is when something happens: mono by the process's monotonic clock, wall by the ledger's.
type instant struct{ mono, wall int64 }

// account is one account's money in this process. It is pure: a step at a time, no clock, no lock, no I/O.
//
// The ledger counts, of this holder, told as spent and some more as outstanding: together they are at least
// allowed, whatever becomes of the draw under way. So as long as
//
//	spent + open + aside ≤ allowed
//
// nothing is spent that was not granted. Only what requests cost beyond what they took breaks that: debt,
// which nothing is taken from until the ledger has counted it.
type account struct {
	key   Key
	terms *Terms // of the highest revision that came

	allowed int64
	spent   int64 // of settled requests, since the process started; as the ledger would count it
	open    int64 // granted to requests that are not settled, and to asks that are ready
	opens   int64 // those requests
	aside   int64 // for emergencies
	spare   int64 // how much is to lie aside

	told     int64  // of spent the ledger knows so much
	counted  int64  // what it has of this process as spent and outstanding, by its last answer
	retell   bool   // it is to be told again, whatever it knew: what it knows is of an earlier time
	telling  bool   // the draw under way does that
	revision uint64 // of the terms that the ledger has from here
	heard    Drawn  // its last answer
	answers  int64  // that came; 0: heard is empty
	heardN   uint64 // the last draw to which the ledger answered with what it has
	known    bool   // the ledger has the account
	closed   bool   // the ledger grants nothing any more, and holds nothing for this process
	leaving  bool   // the process stops: all is to be told, and given back

	line    []*ask // requests that wait, as they came
	blocked bool   // one of them may be served by the next draw: younger ones wait behind it
	decided []*ask // what the last step decided: the shell takes them away

	n       uint64 // of the last draw
	draw    Draw   // its outcome is not known: it is under way, or to be repeated
	first   int64  // what it is for before anything is put aside
	drawing bool   // there is such a draw
	calling bool   // it is under way
	fails   int    // unknown outcomes of it in a row
	retryAt int64

	fruitless  int   // draws in a row that left requests waiting
	notBefore  int64 // no draw for a want that the ledger just refused
	lacks      int64 // that want's least
	scarce     int64 // until then nothing is drawn ahead
	recalled   int64 // until then others want what is idle
	promised   int64 // what requests found here that wait elsewhere,
	until      int64 // which others do not get before this
	holdOff    int64 // no draw before
	denied     int64 // until then the ledger grants nothing, for this reason
	deniedKind Kind
	deniedErr  error

	demand   demand
	last     int64 // the cost of the last request
	used     int64 // when one came, or wanted to
	reported int64 // when the last draw was built
}

// ask is a request that waits for one account.
type ask struct {
	cost, least int64
	n           uint64 // the first draw that was to cover it; 0: none yet
	passed      bool   // the ledger lacks its cost: younger ones that fit go first

	ready     bool // granted lies in open, emergency of it came from aside
	refused   Kind
	err       error
	granted   int64
	emergency int64
	done      chan struct{} // the shell's: closed when the ask is ready or refused
}

// amount cuts n into what amounts are.
func amount(n int64) int64 { return min(max(n, 0), MaxAmount) }

// add is a + b, at most MaxAmount.
func add(a, b int64) int64 { return min(a+b, MaxAmount) }

func newAccount(key Key, terms *Terms, at instant) account {
	return account{key: key, terms: terms, used: at.mono, reported: at.mono}
}

// touch takes in what the policy of a charge says.
func (a *account) touch(c *Charge) {
	if c.Terms.Revision > a.terms.Revision {
		before := a.limit()
		a.terms = c.Terms
		a.lowered(before)
		a.fruitless, a.notBefore, a.lacks, a.scarce = 0, 0, 0, 0
	}
	a.spare = amount(c.Emergency)
	a.aside = min(a.aside, a.spare)
}

// room is how much more may be set aside: with what others have outstanding, of which some may lie aside there, half of the amount at
// most, or the nodes together could set aside all of it. What others have is as of the ledger's last word: only with that of a grant is
// it certain that no two count on the same room, since the grant is outstanding before another one is made.
func (a *account) room() int64 {
	return max(min(a.spare-a.aside, a.limit()/asidePart-a.heard.Others-a.aside), 0)
}

// lowered cuts what lies aside as the amount was cut: at most half of it lies aside again.
func (a *account) lowered(before int64) {
	if limit := a.limit(); limit < before {
		hi, lo := bits.Mul64(uint64(a.aside), uint64(limit))
		part, _ := bits.Div64(hi, lo, uint64(before))
		a.aside = int64(part)
	}
}

// avail is what a request could have at once; negative: debt, or what is not covered of requests that are open.
func (a *account) avail() int64 { return a.allowed - a.spent - a.open - a.aside }

// hold takes cost for a request, ahead of those that wait where it has waited itself. What is missing may come from
// what lies aside, where emergency says so: that part is returned.
func (a *account) hold(cost int64, ahead, emergency bool) (part int64, ok bool) {
	have := a.avail()
	switch {
	case cost == 0:
	case have >= cost && (ahead || !a.blocked):
	case emergency && have+a.aside >= cost:
		part = cost - max(have, 0)
		a.aside -= part
	default:
		return 0, false
	}
	a.open += cost
	a.opens++
	return part, true
}

// release undoes hold.
func (a *account) release(cost, part int64) {
	a.open -= cost
	a.opens--
	a.aside += part
}

// promise keeps what a request found here, but did not take since it waits elsewhere, for a while: or it would lack this
// when it is awake, and wait here while the other gives back.
func (a *account) promise(at instant, cost int64) {
	if at.mono >= a.until {
		a.promised = 0
	}
	a.promised, a.until, a.used = add(a.promised, cost), at.mono+promiseFor, at.mono
}

// admit notes that what was held is for a request that goes on.
func (a *account) admit(at instant, cost int64) {
	a.used = at.mono
	if cost > 0 {
		a.last = cost
		a.demand.add(at.mono, cost)
	}
}

// settle ends a request that held cost, part of it from aside, with what it did cost.
func (a *account) settle(cost, part, actual int64) {
	a.open -= cost
	a.opens--
	a.spent = add(a.spent, actual)
	a.aside = min(a.aside+min(part, max(cost-actual, 0)), a.spare)
	a.serve()
}

// limit is the amount that binds.
func (a *account) limit() int64 {
	if a.answers == 0 || a.revision < a.terms.Revision {
		return amount(a.terms.Amount)
	}
	return a.heard.Amount
}

// total is what the account has spent, as far as is known here; below zero after a credit.
func (a *account) total() int64 { return add(a.heard.Spent, a.spent-a.told) }

// left is what could still be granted here.
func (a *account) left() int64 {
	if a.answers == 0 {
		return a.limit()
	}
	return add(max(a.heard.Free, 0), max(a.avail(), 0))
}

// alert is the highest of the terms' percents that is reached.
func (a *account) alert(total, limit int64) int {
	hi, lo := bits.Mul64(uint64(max(total, 0)), 100)
	for _, percent := range slices.Backward(a.terms.Alerts) {
		h, l := bits.Mul64(uint64(limit), uint64(max(percent, 0)))
		if hi > h || hi == h && lo >= l {
			return percent
		}
	}
	return 0
}

// recall says that others want what is idle.
func (a *account) recall(at instant) {
	a.recalled, a.scarce = at.mono+wantedFor, at.mono+wantedFor
}

// stop has the account tell all and give all back, when its requests are settled.
func (a *account) stop() {
	a.leaving = true
	a.refuseAll(Unavailable, errClosed)
}

// quiet says that nothing is under way: what the ledger has heard is all.
func (a *account) quiet() bool {
	return a.opens == 0 && a.open == 0 && len(a.line) == 0 && !a.drawing
}

// over says that the account's period is over by the ledger's clock, with some time for requests that found
// their period just before.
func (a *account) over(at instant) bool { return a.key.End != 0 && at.wall-periodGrace >= a.key.End }

// demand estimates what requests take: an average over quarters of a second, of which each new one counts a quarter.
type demand struct{ flow, count, quarter int64 }

const quarter = 250e6 // ns

func (d *demand) roll(mono int64) {
	passed := mono/quarter - d.quarter
	if passed <= 0 {
		return
	}
	d.quarter += passed
	if passed > 64 {
		d.flow, d.count = 0, 0
		return
	}
	d.flow += (d.count - d.flow) / 4
	d.count = 0
	for ; passed > 1 && d.flow > 0; passed-- {
		d.flow -= (d.flow + 3) / 4
	}
}

func (d *demand) add(mono, cost int64) {
	d.roll(mono)
	d.count = add(d.count, cost)
}

// ahead is what two seconds will take, by the average or by what the quarter has seen already.
func (d *demand) ahead() int64 { return max(min(d.flow, MaxAmount/8)*8, d.count) }
