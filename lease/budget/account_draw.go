package budget

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Times in ns.
const (
	reportEvery = int64(time.Second)      // between reports of what was spent
	idleAfter   = int64(10 * time.Second) // without a request: what is left goes back
	forgetAfter = int64(10 * time.Minute) // without a request: the account is forgotten
	periodGrace = int64(2 * time.Second)  // after a period's end: requests that found it before still come
	wantedFor   = int64(time.Second)      // after others wanted it nothing is drawn ahead, and what is idle goes back
	promiseFor  = int64(100 * time.Millisecond)
	deniedFor   = int64(time.Second) // after the ledger refused this process
	firstRetry  = int64(5 * time.Millisecond)
	lastRetry   = int64(time.Second)
	firstRound  = int64(10 * time.Millisecond)
	lastRound   = int64(time.Second)
)

// blockPart: a block that is drawn ahead is at most this part of the amount.
const blockPart = 16

// asidePart: what all nodes have set aside is at most this part of the amount.
const asidePart = 2

var errClosed = errors.New("this process is done with the account, or an operator released what it held")

// duty is what an account has to do next.
type duty uint8

const (
	nothing  duty = iota
	retry         // the draw under way again
	help          // a draw for requests that wait
	giveBack      // others want what is idle
	ahead         // a draw before requests need it
	report        // of what was spent
	idle          // nobody has asked for a while: what is left goes back
	finish        // the last word
	forget        // the account may be dropped, or goes back to the ledger so that it may
)

// urgent duties go before the others.
func (d duty) urgent() bool { return d == help || d == giveBack || d == ahead }

// doubled is first after one failure, twice that after two, and so on up to last.
func doubled(first, last int64, failures int) int64 {
	return min(first<<min(max(failures-1, 0), 20), last)
}

// next says what the account has to do, and when. Doing it makes another due, or this one later.
func (a *account) next(at instant) (int64, duty) {
	switch {
	case a.calling:
		return never, nothing
	case a.drawing:
		return a.retryAt, retry
	case len(a.line) > 0:
		return max(a.notBefore, a.holdOff), help
	case a.quiet() && (a.leaving || a.over(at)):
		if a.n == 0 || a.closed && a.spent == a.told {
			return at.mono, forget
		}
		return a.holdOff, finish
	}
	due, what := int64(never), nothing
	sooner := func(t int64, d duty) {
		if t = max(t, a.holdOff); t < due {
			due, what = t, d
		}
	}
	have := a.avail()
	if at.mono < a.recalled && have > 0 {
		if have > a.keep(at) {
			sooner(at.mono, giveBack)
		} else if at.mono < a.until {
			sooner(a.until, giveBack)
		}
	}
	if block := a.block(at); block > 0 && have < block/2 && at.mono < a.used+idleAfter && !a.closed && !a.leaving && !a.over(at) {
		sooner(max(a.notBefore, a.scarce, a.denied), ahead)
	}
	if a.spent != a.told || a.counted > a.allowed || a.answers > 0 && a.revision < a.terms.Revision {
		sooner(a.reported+reportEvery, report)
	}
	if a.retell && a.n > 0 {
		sooner(at.mono, report)
	}
	if have > 0 || a.n > 0 && a.heardN < 2 { // so that it may be forgotten
		sooner(a.used+idleAfter, idle)
	}
	if a.quiet() {
		sooner(a.used+forgetAfter, forget)
		if a.key.End != 0 {
			sooner(at.mono+min(max(a.key.End-at.wall, 0), never/2)+periodGrace, finish)
		}
	}
	return due, what
}

// step does what is due. A Draw is to be made, and answered is to be called with what came of it; with nothing and forget
// there is none.
func (a *account) step(at instant, holder uint64) (Draw, duty) {
	due, what := a.next(at)
	if due > at.mono {
		return Draw{}, nothing
	}
	switch {
	case what == nothing:
		return Draw{}, nothing
	case what == retry:
		a.calling = true
		return a.draw, retry
	case what == forget && a.forgettable():
		return Draw{}, forget
	}
	a.build(at, holder, what)
	if what == forget {
		what = report
	}
	return a.draw, what
}

// forgettable says that nobody would miss the account. Should it come back its draws begin at 1 again: the ledger must have answered
// a later one, so that the new 1 is stale and its answer says what was spent.
func (a *account) forgettable() bool {
	said := a.spent == a.told && a.counted <= a.spent && !a.retell
	return (a.n == 0 || a.heardN > 1 || a.closed) && said && a.allowed <= a.spent && a.aside == 0
}

// keep is what is kept where others want what is idle: 50 ms of demand, if that is a request at all, and what is promised.
func (a *account) keep(at instant) (kept int64) {
	a.demand.roll(at.mono)
	if part := a.demand.flow / 5; part >= a.last {
		kept = part
	}
	if at.mono < a.until {
		kept = max(kept, a.promised)
	}
	return kept
}

// block is how much should lie here when nobody else wants it: two seconds of demand, but a small part of the amount. 0
// where that is not even a request: then each draws for itself.
func (a *account) block(at instant) int64 {
	a.demand.roll(at.mono)
	size := min(a.demand.ahead(), a.limit()/blockPart)
	if size < a.last {
		return 0
	}
	return size
}

// build makes the draw for a duty. What goes back is out of reach from here on, whatever becomes of the draw.
func (a *account) build(at instant, holder uint64, what duty) {
	kept := max(a.avail(), 0)
	switch enough := max(a.block(at), a.last); {
	case what == finish || what == forget:
		kept, a.aside = 0, 0
	case what == idle || what == help && at.mono < a.recalled && a.fruitless > 0:
		kept = 0
	case what == giveBack:
		kept = min(kept, a.keep(at))
	case what == report && kept > 2*enough:
		kept = enough
	}
	holding := max(min(a.allowed-a.spent, a.open+a.aside+kept), 0)
	a.allowed = min(a.allowed, a.spent+holding)
	a.aside = min(a.aside, max(holding-a.open, 0)) // the rest of it has gone into debt
	a.n++
	a.draw = Draw{Key: a.key, Terms: a.terms, Holder: holder, N: a.n, Spent: a.spent, Holding: holding}
	a.draw.Final = what == finish && (a.known || a.spent == a.told) // what is not known there cannot end
	// What will be available once the debt is told.
	switch have := holding - a.open - a.aside; what {
	case help:
		a.wantHelp(at, have)
	case ahead:
		a.wantAhead(at, have)
	}
	a.drawing, a.calling, a.fails, a.reported = true, true, 0, at.mono
	a.telling, a.retell = a.retell, false
}

// wantHelp asks for what those who wait lack, of whom all have is available, and for a block if nobody else wants it.
func (a *account) wantHelp(at instant, have int64) {
	costs, least := int64(0), int64(MaxAmount)
	for _, q := range a.line {
		costs = add(costs, q.cost)
		least = min(least, q.least)
		if q.n == 0 {
			q.n = a.n
		}
	}
	a.first = max(amount(costs-have), 1)
	a.draw.Need, a.draw.Want = a.first, a.first
	a.draw.Least = max(amount(least-have), 1)
	if at.mono >= a.scarce {
		a.draw.Need = add(a.first, a.room())
		a.draw.Want = add(a.draw.Need, max(a.block(at), a.last))
	}
}

// wantAhead asks for what is lacking of a block, but not for less than another request's cost.
func (a *account) wantAhead(at instant, have int64) {
	lacking := max(amount(a.block(at)-have), 1)
	a.first = min(max(a.last, 1)+max(-have, 0), lacking)
	a.draw.Least = a.first
	a.draw.Need = add(a.first, a.room())
	a.draw.Want = add(lacking, a.room())
}

// answered takes the outcome of the draw under way. One that comes when there is none is not believed.
func (a *account) answered(at instant, res Drawn, err error, o outlook) {
	if !a.calling {
		return
	}
	if err == nil && res.N != a.draw.N {
		err = fmt.Errorf("the ledger answered draw %d with %d", a.draw.N, res.N)
	}
	a.calling = false
	var stale *StaleError
	var period *PeriodError
	switch {
	case err == nil:
		a.drawing = false
		a.apply(at, res)
		return
	case errors.As(err, &stale):
		a.drawing = false
		a.resume(stale)
		return
	case errors.As(err, &period):
		a.denied, a.deniedKind, a.deniedErr = never, OutOfPeriod, nil
		if period.Now < a.key.End {
			a.denied = at.mono + max(a.key.Start-period.Now, firstRetry)
		}
	case errors.Is(err, ErrNoAccount):
		a.denied, a.deniedKind, a.deniedErr = at.mono+deniedFor, Unavailable, err
		a.heardN = a.draw.N
		a.known, a.allowed, a.aside = false, min(a.allowed, a.draw.Spent), 0
		a.counted, a.telling = a.allowed, false
		a.closed = a.closed || a.draw.Final && a.draw.Spent == a.told
	case errors.Is(err, ErrNotDone):
		a.denied, a.deniedKind, a.deniedErr = at.mono+deniedFor, Unavailable, err
	default:
		a.fails++
		a.retryAt = at.mono + doubled(firstRetry, lastRetry, a.fails)
		if o.down != nil {
			a.cutAll(o)
		}
		return
	}
	a.drawing = false
	a.retell = a.retell || a.telling
	a.holdOff = at.mono + deniedFor
	a.refuseAll(a.deniedKind, a.deniedErr)
}

// resume goes on with an account that was forgotten here, but not in the ledger.
func (a *account) resume(stale *StaleError) {
	a.n = max(a.n, stale.N)
	if a.answers == 0 && a.told == 0 {
		a.told = amount(stale.Spent)
		a.spent = add(a.spent, a.told)
		a.allowed, a.counted = a.told, a.told
	}
	a.retell = a.retell || a.telling
	for _, q := range a.line {
		q.n = 0
	}
}

// apply takes the ledger's answer to the draw under way.
func (a *account) apply(at instant, res Drawn) {
	d := a.draw
	granted := min(max(res.Granted, 0), d.Want)
	// After a credit less than nothing may be spent, and in debt less than nothing is free.
	res.Spent, res.Free = max(min(res.Spent, MaxAmount), -MaxAmount), max(min(res.Free, MaxAmount), -MaxAmount)
	res.Amount, res.Others = amount(res.Amount), amount(res.Others)
	before := a.limit()
	a.heard, a.told, a.revision = res, d.Spent, d.Terms.Revision
	a.heardN = d.N
	a.answers++
	a.known = true
	a.lowered(before)
	// As the ledger counts it now. What was spent beyond all grants is among what it knows of: that debt is told.
	a.allowed = add(d.Spent+d.Holding, granted)
	if d.Final || res.Closed {
		a.closed = true
		a.allowed = d.Spent
		kind, err := a.shut(at)
		a.refuseAll(kind, err)
	}
	a.counted = a.allowed
	a.serve()
	if d.Want == 0 {
		return
	}
	if granted < d.Want/2 {
		a.scarce = at.mono + wantedFor
	}
	if a.pass(d.N) {
		a.fruitless++ // also where something came: it may be what this draw gave back, or what another did who will want it again
		a.notBefore, a.lacks = at.mono+doubled(firstRound, lastRound, a.fruitless), d.Least
		a.judge(at, d.N)
		a.serve()
		return
	}
	a.fruitless, a.notBefore, a.lacks = 0, 0, 0
	// Of what is left, half stays for requests.
	a.aside += max(min(a.room(), granted-a.first, a.avail(), (granted-a.first+max(res.Free, 0))/2), 0)
}

// pass has those whom the draw n was to help, and did not, be passed by those that fit. It says whether any are left.
func (a *account) pass(n uint64) bool {
	waits := func(q *ask) bool { return q.n != 0 && q.n <= n }
	for _, q := range a.line {
		q.passed = q.passed || waits(q)
	}
	a.serve()
	return slices.ContainsFunc(a.line, waits)
}
