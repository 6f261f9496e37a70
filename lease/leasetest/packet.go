package leasetest

import (
	"fmt"
	"slices"
	"strings"

	"headgate/lease"
)

// clone copies what a packet refers to.
func (m packet) clone() packet {
	switch {
	case m.request != nil:
		r := *m.request
		r.Reports = slices.Clone(r.Reports)
		r.Asks = slices.Clone(r.Asks)
		for i := range r.Asks {
			r.Asks[i].Charges = slices.Clone(r.Asks[i].Charges)
		}
		if r.Roll != nil {
			roll := *r.Roll
			roll.Slots = slices.Clone(roll.Slots)
			r.Roll = &roll
		}
		m.request = &r
	case m.response != nil:
		r := *m.response
		r.Leases = slices.Clone(r.Leases)
		r.Refusals = slices.Clone(r.Refusals)
		r.Forgotten = slices.Clone(r.Forgotten)
		r.Decisions = slices.Clone(r.Decisions)
		for i := range r.Decisions {
			r.Decisions[i].Charges = slices.Clone(r.Decisions[i].Charges)
		}
		m.response = &r
	case m.handoff != nil:
		h := *m.handoff
		h.Buckets = slices.Clone(h.Buckets)
		for i := range h.Buckets {
			h.Buckets[i].State = slices.Clone(h.Buckets[i].State)
			h.Buckets[i].Series = slices.Clone(h.Buckets[i].Series)
		}
		m.handoff = &h
	}
	return m
}

func (w *world) nameOf(inc uint64) string {
	if p := w.byInc[inc]; p != nil {
		return p.name
	}
	return "ledger"
}

// describe says in one line what a packet holds.
func (w *world) describe(m *packet, arrow string) string {
	if !w.cfg.Trace {
		return ""
	}
	s := w.nameOf(m.from) + " " + arrow + " " + w.nameOf(m.to) + ": "
	switch {
	case m.request != nil:
		return s + describeRequest(m.request)
	case m.response != nil:
		return s + describeResponse(m.response)
	case m.handoff != nil:
		h := m.handoff
		s += fmt.Sprintf("hand-off of %d, view %d, nothing %v, floor %d", h.Partition, h.Epoch, h.Nothing, h.Floor)
		for _, b := range h.Buckets {
			s += fmt.Sprintf("; %s %d B, drawn %d, %v", b.Key.Limit, len(b.State), b.Drawn, b.Series)
		}
		return s
	case m.handedOff != nil:
		return s + fmt.Sprintf("has the hand-off of %d, view %d", m.handedOff.partition, m.handedOff.epoch)
	case m.draw != nil:
		return s + fmt.Sprintf("draw %d of %s: want %d, least %d, holding %d", m.draw.N, m.draw.Key.Limit, m.draw.Want, m.draw.Least, m.draw.Holding)
	case m.drawn != nil:
		return s + fmt.Sprintf("drawn %d of %s: %d", m.drawn.N, m.drawn.Key.Limit, m.drawn.Granted)
	}
	return s
}

func describeRequest(r *lease.Request) string {
	var s strings.Builder
	fmt.Fprintf(&s, "request %d view %d session %d", r.Seq, r.Epoch, r.Session)
	if r.Dropped != 0 {
		fmt.Fprintf(&s, " dropped %d", r.Dropped)
	}
	for _, p := range r.Reports {
		fmt.Fprintf(&s, "; %s/%d.%d ack %d returned %d refunded %d debt %d", p.Key.Limit, p.Granter, p.Series, p.Ack, p.Returned, p.Refunded, p.Debt)
		if p.Idle {
			s.WriteString(" idle")
		}
		if p.Closed {
			s.WriteString(" closed")
		}
		fmt.Fprintf(&s, " (level %d demand %d)", p.Level, p.Demand>>10)
	}
	for _, a := range r.Asks {
		fmt.Fprintf(&s, "; ask %d", a.ID)
		for _, c := range a.Charges {
			fmt.Fprintf(&s, " %d of %s", c.Cost, c.Key.Limit)
		}
	}
	if r.Roll != nil {
		fmt.Fprintf(&s, "; roll %d", r.Roll.Epoch)
		for _, x := range r.Roll.Slots {
			fmt.Fprintf(&s, " %d of %s", x.InUse, x.Key.Limit)
		}
	}
	return s.String()
}

func describeResponse(r *lease.Response) string {
	var s strings.Builder
	fmt.Fprintf(&s, "answer to %d view %d session %d left %d ms", r.Answers, r.Epoch, r.Session, r.Left/ms)
	for _, l := range r.Leases {
		fmt.Fprintf(&s, "; lease %s/%d number %d share %.3f depth %d granted %d window %d", l.Key.Limit, l.Series, l.Number,
			float64(l.Share)/lease.ShareOne, l.Depth, l.Granted, l.Window)
		if l.Rolled {
			s.WriteString(" rolled")
		}
	}
	for _, d := range r.Decisions {
		fmt.Fprintf(&s, "; decision %d refused %d", d.ID, d.Refused)
		for _, c := range d.Charges {
			fmt.Fprintf(&s, " (%v series %d lent %v)", c.Admitted, c.Series, c.Lent)
		}
	}
	for _, x := range r.Refusals {
		fmt.Fprintf(&s, "; refuses %d of %s for %d ms", x.Cost, x.Key.Limit, x.For/ms)
	}
	for _, f := range r.Forgotten {
		fmt.Fprintf(&s, "; forgot %d.%d", f.Granter, f.Number)
	}
	if r.RollTaken != 0 {
		fmt.Fprintf(&s, "; roll %d taken", r.RollTaken)
	}
	return s.String()
}

func (w *world) describeView(v *lease.View) string {
	var s strings.Builder
	for i, m := range v.Members {
		fmt.Fprintf(&s, " %s.%d", m.Name, m.Incarnation)
		for part, o := range v.Owners {
			if int(o) == i {
				fmt.Fprintf(&s, " %d", part)
			}
		}
		s.WriteString(",")
	}
	return s.String()
}
