package node

import (
	"context"

	"headgate/lease"
	"headgate/limiter"
	"headgate/proxy/admin"
)

// shares decides by this node's table, in which every limit is the node's share of it. While the
// node is cut off from its cluster that goes on for the limits that say local.
type shares struct {
	table *lease.Local
	cut   func() bool
	now   func() int64
}

// Take implements proxy.Limits.
func (s shares) Take(_ context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	return s.decide(cs, ds, s.table.Take)
}

// Peek implements proxy.Limits.
func (s shares) Peek(_ context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	return s.decide(cs, ds, s.table.Peek)
}

func (s shares) decide(cs []limiter.Charge, ds []limiter.Decision, decide func(int64, []limiter.Charge, []limiter.Decision) int) int {
	cut := s.cut()
	var own [limiter.MaxCharges]limiter.Charge
	var decisions [limiter.MaxCharges]limiter.Decision
	var places [limiter.MaxCharges]int
	n, denied := 0, -1
	for i := range cs {
		c := &cs[i]
		c.At, ds[i] = limiter.NotTaken, limiter.Decision{By: limiter.ByPrivate}
		switch {
		case cut && c.Apart == limiter.ByAllow:
			ds[i] = limiter.Decision{Admitted: true, By: c.Apart}
		case cut && c.Apart == limiter.ByDeny, c.Private == nil:
			if cut {
				ds[i].By = c.Apart
			}
			if !c.Shadow {
				denied = i
			}
		default:
			own[n], places[n] = *c, i
			n++
		}
	}
	if denied >= 0 {
		return denied
	}
	refused := decide(s.now(), own[:n], decisions[:n])
	for j, i := range places[:n] {
		if cut {
			decisions[j].By = limiter.ByPrivate
		}
		cs[i].At, cs[i].Held, ds[i] = own[j].At, s.table, decisions[j]
	}
	if refused >= 0 {
		refused = places[refused]
	}
	return refused
}

// Settle implements proxy.Limits.
func (s shares) Settle(cs []limiter.Charge, actual []int64, ds []limiter.Decision) {
	for i := range cs {
		if cs[i].Held != nil {
			s.table.Settle(s.now(), cs[i:i+1], actual[i:i+1], ds[i:i+1])
		}
	}
}

// whyDegraded is what the front door says of limits that follow their unavailable mode.
func (n *Node) whyDegraded() string {
	if n.leased() {
		return ""
	}
	return "cut off from the cluster: limits follow their unavailable mode"
}

// levels is Levels for the admin API.
func (n *Node) levels(_ context.Context, tenant string) ([]admin.Level, error) {
	l := n.Levels(tenant)
	if l == nil {
		return nil, admin.Errorf(admin.NotFound, "there is no such tenant; GET /admin/v1/tenants lists them")
	}
	return l, nil
}
