package dispatch

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	pb "headgate/proxy/dispatch/dispatchpb"
	"headgate/proxy/queue"
)

// a message of each kind with every field set.
func fullUp() *pb.Up {
	return &pb.Up{
		Placed:  placedPB([]Placement{{1 << 63, 1 << 31}, {2, 3}}),
		Hello:   &pb.Hello{Node: 3, Limits: []*pb.Limit{{Backend: []byte("a"), Limit: 7}}},
		Started: []uint64{1}, Misses: []uint64{2}, Leaves: []uint64{3},
		Uses:  usesPB([]use{{backend: "a", inUse: 5}}),
		Seen:  seenPB([]use{{backend: "a", found: found{1, 2, 6, 7, 3, 4, 5}}}),
		Dones: donesPB([]done{{"a", "acme\xff", queue.Background, 2, 1e9, true}}),
		Joins: []*pb.Ticket{ticketPB(&queue.Ticket{
			ID: 9, Tenant: "acme\xff", Class: queue.BestEffort, Work: 100, Bytes: 200, Waited: time.Second, Patience: time.Minute, Refused: true,
			Places: []queue.Place{{Backend: "a", Cost: 2}, {Backend: "b", Cost: 1}},
		})},
	}
}

func fullDown() *pb.Down {
	return &pb.Down{
		Grants: grantsPB([]queue.Grant{{ID: 1, Backend: "a", Cost: 2}}), Drops: dropsPB([]queue.Drop{{ID: 2, Reason: queue.Evicted, RetryAfter: time.Second}}),
		State: statePB(true, []queue.BackendStats{fullStats()}, []string{"b"}), Placed: placedPB([]Placement{{4, 5}}),
	}
}

func fullStats() queue.BackendStats {
	return queue.BackendStats{
		ID: "a", Waiting: 6, WaitingByClass: [queue.Classes]int{1, 2, 3}, Places: 4, InUse: 5, Granted: 1, Limit: 7, Slots: 8, Contended: true, Limited: true, Stale: true,
		Pressure: .5, Rate: 2.5, Drain: time.Second, Desired: 1.5,
	}
}

// TestWire: what is said arrives.
func TestWire(t *testing.T) {
	u, err := upOf(fullUp())
	if err != nil {
		t.Fatal(err)
	}
	want := &up{
		told: told{
			started: []uint64{1}, uses: []use{{"a", 5, found{1, 2, 6, 7, 3, 4, 5}}},
			dones: []done{{"a", "acme\xff", queue.Background, 2, 1e9, true}}, placed: []Placement{{1 << 63, 1 << 31}, {2, 3}},
		},
		misses: []uint64{2}, leaves: []uint64{3},
		joins: []queue.Ticket{{
			ID: 9, Tenant: "acme\xff", Class: queue.BestEffort, Work: 100, Bytes: 200, Waited: time.Second, Patience: time.Minute, Refused: true,
			Places: []queue.Place{{Backend: "a", Cost: 2}, {Backend: "b", Cost: 1}},
		}},
	}
	if !reflect.DeepEqual(u, want) {
		t.Errorf("%+v, want %+v", u, want)
	}
	h, err := helloOf(fullUp().GetHello())
	if err != nil || !reflect.DeepEqual(h, &hello{3, []limit{{"a", 7}}}) {
		t.Errorf("%+v, %v", h, err)
	}
	gs, ds, ps, st, err := downOf(fullDown())
	if err != nil || !reflect.DeepEqual(gs, []queue.Grant{{ID: 1, Backend: "a", Cost: 2}}) || !reflect.DeepEqual(ds, []queue.Drop{{ID: 2, Reason: queue.Evicted, RetryAfter: time.Second}}) ||
		!reflect.DeepEqual(ps, []Placement{{4, 5}}) || !reflect.DeepEqual(st, &standing{true, []queue.BackendStats{fullStats()}, []string{"b"}}) {
		t.Errorf("%+v, %+v, %+v, %+v, %v", gs, ds, ps, st, err)
	}
}

// TestWireRefuses: one wrong field, and nothing of a message counts.
func TestWireRefuses(t *testing.T) {
	long := []byte(strings.Repeat("x", wireName+1))
	ups := map[string]func(*pb.Up){
		"ids":        func(u *pb.Up) { u.Leaves = make([]uint64, wireIDs+1) },
		"joins":      func(u *pb.Up) { u.Joins = make([]*pb.Ticket, frameTickets+1) },
		"empty join": func(u *pb.Up) { u.Joins = append(u.Joins, nil) },
		"dones":      func(u *pb.Up) { u.Dones = make([]*pb.Done, frameItems+1) },
		"uses":       func(u *pb.Up) { u.Uses = make([]*pb.Use, maxEndpoints+1) },
		"use name":   func(u *pb.Up) { u.Uses[0].Backend = long },
		"use":        func(u *pb.Up) { u.Uses[0].InUse = -1 },
		"use much":   func(u *pb.Up) { u.Uses[0].InUse = wireUnits + 1 },
		"seen":       func(u *pb.Up) { u.Seen[0].Failures = -1 },
		"seen where": func(u *pb.Up) { u.Seen[0].Backend = []byte("z") },
		"done class": func(u *pb.Up) { u.Dones[0].Class = queue.Classes },
		"done held":  func(u *pb.Up) { u.Dones[0].Held = -1 },
		"tenant":     func(u *pb.Up) { u.Joins[0].Tenant = long },
		"class":      func(u *pb.Up) { u.Joins[0].Class = 256 },
		"work":       func(u *pb.Up) { u.Joins[0].Work = -1 },
		"bytes":      func(u *pb.Up) { u.Joins[0].Bytes = math.MaxInt64 },
		"waited":     func(u *pb.Up) { u.Joins[0].Waited = math.MaxInt64 },
		"patience":   func(u *pb.Up) { u.Joins[0].Patience = -1 },
		"no places":  func(u *pb.Up) { u.Joins[0].Places = nil },
		"places":     func(u *pb.Up) { u.Joins[0].Places = make([]*pb.Place, queue.MaxPlaces+1) },
		"cost":       func(u *pb.Up) { u.Joins[0].Places[1].Cost = -1 },
		"placed":     func(u *pb.Up) { u.Placed.Prompts = u.Placed.GetPrompts()[1:] },
		"placed many": func(u *pb.Up) {
			u.Placed = &pb.Placed{Prompts: make([]uint64, maxPlaced+1), Endpoints: make([]uint32, maxPlaced+1)}
		},
	}
	for name, twist := range ups {
		u := fullUp()
		twist(u)
		if _, err := upOf(u); !errors.Is(err, errWire) {
			t.Errorf("%s: %v", name, err)
		}
	}
	downs := map[string]func(*pb.Down){
		"grants":   func(d *pb.Down) { d.Grants = make([]*pb.Grant, wireIDs+1) },
		"cost":     func(d *pb.Down) { d.Grants[0].Cost = 0 },
		"name":     func(d *pb.Down) { d.Grants[0].Backend = long },
		"reason":   func(d *pb.Down) { d.Drops[0].Reason = queue.Reasons },
		"retry":    func(d *pb.Down) { d.Drops[0].RetryAfter = -1 },
		"backends": func(d *pb.Down) { d.State.Backends = make([]*pb.Backend, 2*queue.MaxBackends+1) },
		"pressure": func(d *pb.Down) { d.State.Backends[0].Pressure = math.NaN() },
		"rate":     func(d *pb.Down) { d.State.Backends[0].Rate = math.Inf(1) },
		"limit":    func(d *pb.Down) { d.State.Backends[0].Limit = -2 },
		"slots":    func(d *pb.Down) { d.State.Backends[0].Slots = -1 },
		"classes":  func(d *pb.Down) { d.State.Backends[0].WaitingByClass = make([]int64, 4) },
		"placed":   func(d *pb.Down) { d.Placed.Endpoints = nil },
		"gone":     func(d *pb.Down) { d.State.Backends[1].Id = long },
	}
	for name, twist := range downs {
		d := fullDown()
		twist(d)
		if _, _, _, _, err := downOf(d); !errors.Is(err, errWire) {
			t.Errorf("%s: %v", name, err)
		}
	}
	hellos := map[string]func(*pb.Hello){
		"limits": func(h *pb.Hello) { h.Limits = make([]*pb.Limit, queue.MaxBackends+1) },
		"limit":  func(h *pb.Hello) { h.Limits[0].Limit = -1 },
		"name":   func(h *pb.Hello) { h.Limits[0].Backend = long },
	}
	for name, twist := range hellos {
		h := fullUp().GetHello()
		twist(h)
		if _, err := helloOf(h); !errors.Is(err, errWire) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := helloOf(nil); !errors.Is(err, errWire) {
		t.Errorf("%v", err)
	}
}

// FuzzUp: whatever a node says, what is taken of it is within bounds, and does a queue no harm.
func FuzzUp(f *testing.F) {
	seed := func(u *pb.Up) {
		b, err := proto.Marshal(u)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	seed(fullUp())
	seed(&pb.Up{})
	f.Fuzz(func(t *testing.T, b []byte) {
		p := new(pb.Up)
		if proto.Unmarshal(b, p) != nil {
			return
		}
		if h, err := helloOf(p.GetHello()); err == nil && len(h.limits) > queue.MaxBackends {
			t.Error("limits")
		}
		u, err := upOf(p)
		if err != nil {
			return
		}
		core := queue.New(queue.Config{})
		var out queue.Output
		core.SetBackends(0, []queue.Backend{{ID: "a", Slots: 2, Limit: -1}}, &out)
		for i := range u.joins {
			x := &u.joins[i]
			if len(x.Places) == 0 || len(x.Places) > queue.MaxPlaces || x.Class >= queue.Classes || x.Patience < 0 || x.Waited < 0 || x.Bytes < 0 {
				t.Errorf("%+v", x)
			}
			x.Node = 1
			core.Join(1, x, &out)
		}
		for _, x := range u.dones {
			core.Done(2, x.backend, x.class, x.tenant, x.cost, time.Duration(x.held), x.worked)
		}
		for _, id := range u.started {
			core.Started(2, 1, id)
		}
		for _, x := range u.uses {
			core.Used(2, 1, x.backend, x.inUse, &out)
		}
		for _, id := range u.misses {
			core.Miss(2, 1, id, &out)
		}
		for _, id := range u.leaves {
			core.Leave(2, 1, id, &out)
		}
		core.Gone(3, 1, &out)
		if n := core.Waiting(); n != 0 {
			t.Errorf("%d wait of a node that is gone", n)
		}
	})
}

// FuzzDown: whatever a scheduler says, what is taken of it is within bounds.
func FuzzDown(f *testing.F) {
	b, err := proto.Marshal(fullDown())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		p := new(pb.Down)
		if proto.Unmarshal(b, p) != nil {
			return
		}
		gs, ds, ps, st, err := downOf(p)
		if err != nil {
			return
		}
		if len(ps) > maxPlaced {
			t.Errorf("%d placements", len(ps))
		}
		for _, g := range gs {
			if g.Cost <= 0 || len(g.Backend) > wireName {
				t.Errorf("%+v", g)
			}
		}
		for _, d := range ds {
			if d.Reason >= queue.Reasons || d.RetryAfter < 0 {
				t.Errorf("%+v", d)
			}
		}
		if st == nil {
			return
		}
		for _, b := range st.changed {
			if !(b.Pressure >= 0) || b.Slots < 0 || b.Drain < 0 {
				t.Errorf("%+v", b)
			}
		}
	})
}
