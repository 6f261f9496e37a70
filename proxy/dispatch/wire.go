package dispatch

import (
	"errors"
	"fmt"
	"math"
	"time"

	pb "headgate/proxy/dispatch/dispatchpb"
	"headgate/proxy/queue"
)

// The bounds of what comes over the wire.
const (
	wireName  = 1024    // bytes
	wireIDs   = 1 << 17 // tickets of a kind in a message
	wireUnits = 1 << 40 // slots, requests
	wireNS    = int64(1000 * time.Hour)
	wireBytes = 1 << 50
)

// errWire is a message that no node would send.
var errWire = errors.New("dispatch: malformed message")

func wrong(what string) error { return fmt.Errorf("%w: %s", errWire, what) }

// checker notes the first wrong field of a message.
type checker struct{ err error }

func (c *checker) is(ok bool, what string) {
	if !ok && c.err == nil {
		c.err = wrong(what)
	}
}

func (c *checker) name(b []byte, what string) string {
	c.is(len(b) <= wireName, what)
	if c.err != nil {
		return ""
	}
	return string(b)
}

func (c *checker) within(n, most int64, what string) int64 {
	c.is(n >= 0 && n <= most, what)
	return n
}

// hello is a node's first word.
type hello struct {
	node   uint64
	limits []limit
}

type limit struct {
	backend string
	limit   int64
}

func helloOf(p *pb.Hello) (*hello, error) {
	if p == nil {
		return nil, wrong("the first message has no hello")
	}
	var c checker
	c.is(len(p.GetLimits()) <= queue.MaxBackends, "limits")
	h := &hello{node: p.GetNode()}
	for _, l := range p.GetLimits() {
		if c.err != nil {
			break
		}
		h.limits = append(h.limits, limit{c.name(l.GetBackend(), "limits"), c.within(l.GetLimit(), wireUnits, "limits")})
	}
	return h, c.err
}

// up is what a node says.
type up struct {
	told
	misses, leaves []uint64
	joins          []queue.Ticket // without Node
}

// upOf checks a message whole before any of it counts.
func upOf(p *pb.Up) (*up, error) {
	var c checker
	c.is(len(p.GetStarted()) <= wireIDs && len(p.GetMisses()) <= wireIDs && len(p.GetLeaves()) <= wireIDs, "tickets")
	c.is(len(p.GetUses()) <= maxEndpoints && len(p.GetSeen()) <= maxEndpoints, "backends")
	c.is(len(p.GetDones()) <= frameItems, "dones")
	c.is(len(p.GetJoins()) <= frameTickets, "joins")
	if c.err != nil {
		return nil, c.err
	}
	u := &up{misses: p.GetMisses(), leaves: p.GetLeaves()}
	u.started, u.placed = p.GetStarted(), placedOf(p.GetPlaced(), &c)
	for _, x := range p.GetUses() {
		u.uses = append(u.uses, use{backend: c.name(x.GetBackend(), "uses"), inUse: c.within(x.GetInUse(), wireUnits, "uses")})
	}
	at := make(map[string]int, len(u.uses))
	for i := range u.uses {
		at[u.uses[i].backend] = i
	}
	for _, x := range p.GetSeen() {
		i, ok := at[c.name(x.GetBackend(), "seen")]
		c.is(ok, "seen")
		if c.err != nil {
			return nil, c.err
		}
		u.uses[i].found = found{
			c.within(x.GetFirstByte(), math.MaxInt64/4, "seen"), c.within(x.GetFirstBytes(), wireUnits, "seen"),
			c.within(x.GetAnswer(), math.MaxInt64/4, "seen"), c.within(x.GetAnswers(), wireUnits, "seen"),
			c.within(x.GetPushbacks(), wireUnits, "seen"), c.within(x.GetPause(), wireNS, "seen"), c.within(x.GetFailures(), wireUnits, "seen"),
		}
	}
	for _, x := range p.GetDones() {
		c.is(x.GetClass() < queue.Classes, "class")
		u.dones = append(u.dones, done{
			c.name(x.GetBackend(), "dones"), c.name(x.GetTenant(), "dones"), queue.Class(x.GetClass()),
			c.within(x.GetCost(), wireUnits, "dones"), c.within(x.GetHeld(), math.MaxInt64, "dones"), !x.GetIdle(),
		})
	}
	for _, x := range p.GetJoins() {
		if c.err != nil {
			break
		}
		u.joins = append(u.joins, ticketOf(x, &c))
	}
	if c.err != nil {
		return nil, c.err
	}
	return u, nil
}

func ticketOf(p *pb.Ticket, c *checker) queue.Ticket {
	c.is(p.GetClass() < queue.Classes, "class")
	c.is(len(p.GetPlaces()) > 0 && len(p.GetPlaces()) <= queue.MaxPlaces, "places")
	t := queue.Ticket{
		ID: p.GetId(), Tenant: c.name(p.GetTenant(), "tenant"), Class: queue.Class(p.GetClass()),
		Work: c.within(p.GetWork(), wireBytes, "work"), Bytes: c.within(p.GetBytes(), wireBytes, "bytes"),
		Waited: time.Duration(c.within(p.GetWaited(), wireNS, "waited")), Patience: time.Duration(c.within(p.GetPatience(), wireNS, "patience")),
		Refused: p.GetRefused(),
	}
	if c.err != nil {
		return t
	}
	t.Places = make([]queue.Place, 0, len(p.GetPlaces()))
	for _, x := range p.GetPlaces() {
		t.Places = append(t.Places, queue.Place{Backend: c.name(x.GetBackend(), "places"), Cost: c.within(x.GetCost(), wireUnits, "places")})
	}
	return t
}

// ticketPB cuts what the other side would not take.
func ticketPB(t *queue.Ticket) *pb.Ticket {
	p := &pb.Ticket{
		Id: t.ID, Tenant: nameOf(t.Tenant), Class: uint32(t.Class),
		Work: min(max(t.Work, 0), wireBytes), Bytes: min(max(t.Bytes, 0), wireBytes),
		Waited: min(int64(t.Waited), wireNS), Patience: min(int64(t.Patience), wireNS), Refused: t.Refused,
	}
	for i := range t.Places {
		p.Places = append(p.GetPlaces(), &pb.Place{Backend: nameOf(t.Places[i].Backend), Cost: min(max(t.Places[i].Cost, 0), wireUnits)})
	}
	return p
}

func nameOf(s string) []byte { return []byte(s[:min(len(s), wireName)]) }

func usesPB(us []use) []*pb.Use {
	ps := make([]*pb.Use, 0, len(us))
	for i := range us {
		ps = append(ps, &pb.Use{Backend: nameOf(us[i].backend), InUse: max(0, us[i].inUse)})
	}
	return ps
}

func seenPB(us []use) (ps []*pb.Seen) {
	for i := range us {
		if u := &us[i]; !u.nothing() {
			ps = append(ps, &pb.Seen{
				Backend: nameOf(u.backend), FirstByte: u.firstByte, FirstBytes: u.firstBytes, Answer: u.answer, Answers: u.answers, Pushbacks: u.pushbacks,
				Pause: min(u.pause, wireNS), Failures: u.failures,
			})
		}
	}
	return ps
}

func donesPB(ds []done) (ps []*pb.Done) {
	for i := range ds {
		d := &ds[i]
		ps = append(ps, &pb.Done{Backend: nameOf(d.backend), Tenant: nameOf(d.tenant), Class: uint32(d.class), Cost: min(d.cost, wireUnits), Held: d.held, Idle: !d.worked})
	}
	return ps
}

// placedPB is nil where nothing was placed.
func placedPB(ps []Placement) *pb.Placed {
	if len(ps) == 0 {
		return nil
	}
	x := &pb.Placed{Prompts: make([]uint64, len(ps)), Endpoints: make([]uint32, len(ps))}
	for i, p := range ps {
		x.GetPrompts()[i], x.GetEndpoints()[i] = p.Prompt, p.Endpoint
	}
	return x
}

func placedOf(p *pb.Placed, c *checker) []Placement {
	prompts, endpoints := p.GetPrompts(), p.GetEndpoints()
	c.is(len(prompts) == len(endpoints) && len(prompts) <= maxPlaced, "placed")
	if c.err != nil || len(prompts) == 0 {
		return nil
	}
	ps := make([]Placement, len(prompts))
	for i := range ps {
		ps[i] = Placement{prompts[i], endpoints[i]}
	}
	return ps
}

func grantsPB(gs []queue.Grant) (ps []*pb.Grant) {
	for i := range gs {
		ps = append(ps, &pb.Grant{Id: gs[i].ID, Backend: nameOf(gs[i].Backend), Cost: gs[i].Cost})
	}
	return ps
}

func dropsPB(ds []queue.Drop) (ps []*pb.Drop) {
	for i := range ds {
		ps = append(ps, &pb.Drop{Id: ds[i].ID, Reason: uint32(ds[i].Reason), RetryAfter: int64(ds[i].RetryAfter)})
	}
	return ps
}

func statePB(whole bool, changed []queue.BackendStats, gone []string) *pb.State {
	p := &pb.State{Whole: whole}
	for i := range changed {
		b := &changed[i]
		x := &pb.Backend{
			Id: nameOf(b.ID), Waiting: int64(b.Waiting), Places: int64(b.Places), InUse: b.InUse, Granted: b.Granted, Limit: b.Limit, Slots: b.Slots,
			Contended: b.Contended, Limited: b.Limited, Stale: b.Stale, Pressure: b.Pressure, Rate: b.Rate, Drain: int64(b.Drain), Desired: b.Desired,
		}
		for _, n := range b.WaitingByClass {
			x.WaitingByClass = append(x.GetWaitingByClass(), int64(n))
		}
		p.Backends = append(p.GetBackends(), x)
	}
	for _, id := range gone {
		p.Backends = append(p.GetBackends(), &pb.Backend{Id: nameOf(id), Gone: true})
	}
	return p
}

// standing is how things stand, as a scheduler says.
type standing struct {
	whole   bool
	changed []queue.BackendStats
	gone    []string
}

// downOf checks a scheduler's message whole. st is nil where it does not say how things stand.
func downOf(p *pb.Down) (grants []queue.Grant, drops []queue.Drop, placed []Placement, st *standing, err error) {
	var c checker
	c.is(len(p.GetGrants()) <= wireIDs && len(p.GetDrops()) <= wireIDs, "tickets")
	c.is(len(p.GetState().GetBackends()) <= 2*queue.MaxBackends, "backends")
	if c.err != nil {
		return nil, nil, nil, nil, c.err
	}
	for _, x := range p.GetGrants() {
		c.is(x.GetCost() > 0, "cost")
		grants = append(grants, queue.Grant{ID: x.GetId(), Backend: c.name(x.GetBackend(), "grants"), Cost: c.within(x.GetCost(), wireUnits, "cost")})
	}
	for _, x := range p.GetDrops() {
		c.is(x.GetReason() < queue.Reasons, "reason")
		drops = append(drops, queue.Drop{ID: x.GetId(), Reason: queue.Reason(x.GetReason()), RetryAfter: time.Duration(c.within(x.GetRetryAfter(), wireNS, "retry_after"))})
	}
	placed = placedOf(p.GetPlaced(), &c)
	if p.GetState() == nil {
		return grants, drops, placed, nil, c.err
	}
	st = &standing{whole: p.GetState().GetWhole()}
	for _, x := range p.GetState().GetBackends() {
		id := c.name(x.GetId(), "backends")
		if x.GetGone() {
			st.gone = append(st.gone, id)
			continue
		}
		st.changed = append(st.changed, backendOf(id, x, &c))
	}
	return grants, drops, placed, st, c.err
}

func backendOf(id string, x *pb.Backend, c *checker) queue.BackendStats {
	for _, f := range [...]float64{x.GetPressure(), x.GetRate(), x.GetDesired()} {
		c.is(f >= 0 && f <= math.MaxFloat64, "backends")
	}
	c.is(x.GetLimit() >= -1 && x.GetLimit() <= wireUnits && len(x.GetWaitingByClass()) <= queue.Classes, "backends")
	b := queue.BackendStats{
		ID: id, Waiting: int(c.within(x.GetWaiting(), wireUnits, "waiting")), Places: int(c.within(x.GetPlaces(), wireUnits, "places")),
		InUse: c.within(x.GetInUse(), math.MaxInt64, "in_use"), Granted: c.within(x.GetGranted(), math.MaxInt64, "granted"), Limit: x.GetLimit(),
		Slots: c.within(x.GetSlots(), wireUnits, "slots"), Contended: x.GetContended(), Limited: x.GetLimited(), Stale: x.GetStale(),
		Pressure: x.GetPressure(), Rate: x.GetRate(), Drain: time.Duration(c.within(x.GetDrain(), math.MaxInt64, "drain")), Desired: x.GetDesired(),
	}
	for i, n := range x.GetWaitingByClass() {
		if i < queue.Classes {
			b.WaitingByClass[i] = int(c.within(n, wireUnits, "waiting"))
		}
	}
	return b
}
