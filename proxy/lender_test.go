package proxy_test

import (
	"context"

	"headgate/lease"
	"headgate/limiter"
	"headgate/proxy"
)

// lender decides as a node does whose buckets all have one owner, which tests put out of reach: by
// each charge's Apart then. now is the clock of both tables.
type lender struct {
	owner, private *lease.Local
	reach          func() bool
	by             limiter.By
	now            func() int64
}

func (l *lender) degraded() string {
	if l.reach() {
		return ""
	}
	return "gw-2 is out of reach"
}

func (l *lender) where(*limiter.Charge) proxy.Whereabouts {
	return proxy.Whereabouts{Owner: "gw-2", Held: 7, Away: l.degraded()}
}

func (l *lender) Take(_ context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	return l.decide(cs, ds, (*lease.Local).Take)
}

func (l *lender) Peek(_ context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	return l.decide(cs, ds, (*lease.Local).Peek)
}

func (l *lender) decide(cs []limiter.Charge, ds []limiter.Decision, decide func(*lease.Local, int64, []limiter.Charge, []limiter.Decision) int) int {
	if l.reach() {
		refused := decide(l.owner, l.now(), cs, ds)
		for i := range cs {
			ds[i].By, cs[i].Held = l.by, l.owner
		}
		return refused
	}
	var own []limiter.Charge
	var places []int
	denied := -1
	for i := range cs {
		c := &cs[i]
		c.At, ds[i] = limiter.NotTaken, limiter.Decision{By: c.Apart}
		switch {
		case c.Apart == limiter.ByAllow:
			ds[i].Admitted = true
		case c.Apart == limiter.ByPrivate && c.Private != nil:
			alone := *c
			alone.Limit = c.Private
			own, places = append(own, alone), append(places, i)
		default:
			if ds[i].By = limiter.ByDeny; !c.Shadow {
				denied = i
			}
		}
	}
	if denied >= 0 {
		return denied
	}
	decisions := make([]limiter.Decision, len(own))
	refused := decide(l.private, l.now(), own, decisions)
	for j, i := range places {
		decisions[j].By = limiter.ByPrivate
		cs[i].At, cs[i].Held, ds[i] = own[j].At, l.private, decisions[j]
	}
	if refused >= 0 {
		refused = places[refused]
	}
	return refused
}

func (l *lender) Settle(cs []limiter.Charge, actual []int64, ds []limiter.Decision) {
	for i := range cs {
		table, ok := cs[i].Held.(*lease.Local)
		if !ok {
			continue // nobody decided on it
		}
		alone := cs[i]
		if table == l.private {
			alone.Limit = alone.Private
		}
		table.Settle(l.now(), []limiter.Charge{alone}, actual[i:i+1], ds[i:i+1])
		cs[i].Cost = actual[i]
	}
}
