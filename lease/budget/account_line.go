package budget

import "slices"

// MaxWaiting bounds the requests that wait for one account.
const MaxWaiting = 4096

// maxRounds is how many draws in a row may help nobody while requests wait for what others give back: 10, 20, 40 and 80 ms lie
// between them. From then on a refusal is immediate until the next draw, a second later at most.
const maxRounds = 4

// outlook is what the shell knows of the ledger.
type outlook struct {
	down     error // it is out of reach
	override bool  // what lies aside may be spent
}

// join has a request wait. It may be decided at once.
func (a *account) join(at instant, q *ask, o outlook) {
	if a.fruitless > 0 && at.mono-a.notBefore > lastRound {
		a.fruitless = 0 // long ago: others are asked again to give back
	}
	a.used = at.mono
	if a.last == 0 {
		a.last = q.cost
	}
	known := at.mono < a.notBefore && a.short(q) >= a.lacks
	switch kind, err := a.shut(at); {
	case kind != 0:
		a.refuse(q, kind, err)
	case o.down != nil:
		a.cutOff(q, o)
	case len(a.line) >= MaxWaiting:
		a.refuse(q, InFlight, nil)
	case known && (a.fruitless > maxRounds || !a.hopeful(q.least)):
		a.giveUp(q)
	default:
		a.line = append(a.line, q)
		if !known {
			a.notBefore = min(a.notBefore, at.mono)
		}
		a.serve()
	}
}

// leave ends an ask that the shell does not wait for any more, or has been told of. What it was granted is available again.
func (a *account) leave(q *ask) {
	if q.ready {
		a.open -= q.granted
		a.aside += q.emergency
		q.ready = false
	} else {
		a.line = slices.DeleteFunc(a.line, func(other *ask) bool { return other == q })
	}
}

// shut says why nobody is granted anything; 0: somebody may be.
func (a *account) shut(at instant) (Kind, error) {
	switch {
	case a.closed && a.over(at):
		return OutOfPeriod, nil
	case a.closed || a.leaving:
		return Unavailable, errClosed
	case at.mono < a.denied:
		return a.deniedKind, a.deniedErr
	}
	return 0, nil
}

// serve grants what is available in the order in which requests came. One that the ledger may still help is waited for
// by those behind it: else small requests would take what is being gathered for a dear one. One that the ledger could not
// help is passed by: else it would keep small ones from money that it has no use for.
func (a *account) serve() {
	if len(a.line) == 0 {
		a.blocked = false
		return
	}
	blocked, have := false, a.avail()
	kept := a.line[:0]
	for _, q := range a.line {
		if !blocked && q.cost <= have {
			have -= q.cost
			a.grant(q, q.cost)
			continue
		}
		blocked = blocked || !q.passed
		kept = append(kept, q)
	}
	clear(a.line[len(kept):])
	a.line, a.blocked = kept, blocked
}

func (a *account) grant(q *ask, granted int64) {
	a.open += granted
	q.ready, q.granted = true, granted
	a.decided = append(a.decided, q)
}

func (a *account) refuse(q *ask, kind Kind, err error) {
	q.refused, q.err = kind, err
	a.decided = append(a.decided, q)
}

// refuseAll is for all that wait.
func (a *account) refuseAll(kind Kind, err error) {
	for _, q := range a.line {
		a.refuse(q, kind, err)
	}
	clear(a.line)
	a.line, a.blocked = a.line[:0], false
}

// cutOff decides for a request while the ledger is out of reach. It is not in the line.
func (a *account) cutOff(q *ask, o outlook) {
	have := a.avail()
	switch {
	case have >= q.least:
		a.grant(q, min(have, q.cost))
	case o.override && have+a.aside >= q.least:
		granted := min(have+a.aside, q.cost)
		q.emergency = granted - max(have, 0)
		a.aside -= q.emergency
		a.grant(q, granted)
	default:
		a.refuse(q, Unavailable, o.down)
	}
}

// cutAll is cutOff for all that wait.
func (a *account) cutAll(o outlook) {
	line := a.line
	a.line, a.blocked = nil, false
	for _, q := range line {
		a.cutOff(q, o)
	}
}

// hopeful says whether what is spent leaves room for cost, so that only what is open, here or elsewhere, is in its
// way.
func (a *account) hopeful(cost int64) bool {
	return a.total()+a.aside+cost <= a.limit()
}

// kindFor says why there is nothing for cost: what is spent leaves room or not. What lies aside here is not waited for, but
// it is not spent either.
func (a *account) kindFor(cost int64) Kind {
	if a.total()+cost <= a.limit() {
		return InFlight
	}
	return Exhausted
}

// giveUp decides for a request that no draw will help soon: it gets what there is, if that will do. It is not in the line.
func (a *account) giveUp(q *ask) {
	have := a.avail()
	switch {
	case q.least <= have:
		a.grant(q, min(q.cost, have))
	default:
		a.refuse(q, a.kindFor(q.least), nil)
	}
}

// judge is for the requests that the draw n was to help, and did not, and for those that came meanwhile and lack as much. While
// there are rounds left and what is in the way may come back, they wait: for all of their cost first. Who came
// meanwhile and lacks less has a draw at once.
func (a *account) judge(at instant, n uint64) {
	kept := a.line[:0]
	for _, q := range a.line {
		covered := q.n != 0 && q.n <= n
		less := !covered && a.short(q) < a.lacks
		if less {
			a.notBefore = at.mono
		}
		hope := a.fruitless <= maxRounds && (a.hopeful(q.cost) || a.avail() < q.least && a.hopeful(q.least))
		if less || hope {
			kept = append(kept, q)
			continue
		}
		a.giveUp(q)
	}
	clear(a.line[len(kept):])
	a.line = kept
}

// short is what must come for q, at the least.
func (a *account) short(q *ask) int64 { return q.least - max(a.avail(), 0) }
