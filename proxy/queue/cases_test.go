package queue

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"
)

// desk is a scheduler with one node that never misses, moved by hand.
type desk struct {
	t    *testing.T
	s    *Scheduler
	out  Output
	now  int64
	used map[string]int64
	id   uint64
}

func newDesk(t *testing.T, cfg Config, backends ...Backend) *desk {
	d := &desk{t: t, s: New(cfg), now: 1, used: map[string]int64{}}
	d.s.SetBackends(d.now, backends, &d.out)
	return d
}

func (d *desk) pass(p time.Duration) {
	d.now += int64(p)
	d.s.Expire(d.now, &d.out)
}

// join asks for cost slots at backends and returns the ticket's number.
func (d *desk) join(tenant string, class Class, cost int64, patience time.Duration, backends ...string) uint64 {
	d.id++
	k := Ticket{Node: 1, ID: d.id, Tenant: tenant, Class: class, Work: 1000 * cost, Bytes: 1000, Patience: patience}
	for _, b := range backends {
		k.Places = append(k.Places, Place{b, cost})
	}
	d.s.Join(d.now, &k, &d.out)
	return d.id
}

// start begins all that was granted, and returns which.
func (d *desk) start() (ids []uint64) {
	for len(d.out.Grants) > 0 {
		g := d.out.Grants[0]
		d.out.Grants = d.out.Grants[1:]
		ids = append(ids, g.ID)
		d.used[g.Backend] += g.Cost
		d.s.Started(d.now, g.Node, g.ID)
		d.s.Used(d.now, g.Node, g.Backend, d.used[g.Backend], &d.out)
	}
	return ids
}

// finish ends a request that held cost slots of a backend for held.
func (d *desk) finish(backend, tenant string, class Class, cost int64, held time.Duration) {
	d.used[backend] -= cost
	d.s.Done(d.now, backend, class, tenant, cost, held, true)
	d.s.Used(d.now, 1, backend, d.used[backend], &d.out)
}

// drops takes the drops that there are, as words.
func (d *desk) drops() (words []string) {
	for _, k := range d.out.Drops {
		words = append(words, fmt.Sprint(k.ID, " ", k.Reason))
	}
	d.out.Drops = d.out.Drops[:0]
	return words
}

func (d *desk) want(what string, got, want any) {
	d.t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		d.t.Errorf("%s: %v, not %v", what, got, want)
	}
}

func (d *desk) backend(id string) BackendStats {
	d.t.Helper()
	for _, b := range d.s.Look(d.now).Backends {
		if b.ID == id {
			return b
		}
	}
	d.t.Fatalf("no backend %q", id)
	return BackendStats{}
}

// Case 1: whoever times out in the queue is gone at once, wherever it stood; nothing of it stays, and who
// is behind moves up.
func TestExpiredLeavesAtOnce(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 2, Limit: -1})
	d.join("t", Interactive, 1, time.Minute, "a")
	d.join("t", Interactive, 1, time.Minute, "a")
	d.start()
	head := d.join("t", Interactive, 1, time.Second, "a")
	next := d.join("t", Interactive, 1, time.Minute, "a")
	last := d.join("t", Interactive, 1, time.Second, "a")
	if next := d.s.Expire(d.now, &d.out); next != d.now+int64(time.Second) {
		t.Errorf("to be called in %v", time.Duration(next-d.now))
	}
	d.pass(time.Second)
	d.want("drops", d.drops(), []string{fmt.Sprint(head, " ttl_expired"), fmt.Sprint(last, " ttl_expired")})
	d.want("waiting", d.s.Waiting(), 1)
	d.finish("a", "t", Interactive, 1, time.Second)
	d.want("granted", d.start(), []uint64{next})

	// Without a timer's help, too: patience is looked at when it would be granted.
	late := d.join("t", Interactive, 1, time.Second, "a")
	d.now += int64(time.Second)
	d.finish("a", "t", Interactive, 1, time.Second)
	d.want("granted", d.start(), []uint64(nil))
	d.want("drops", d.drops(), []string{fmt.Sprint(late, " ttl_expired")})

	for range 100_000 {
		d.join("t", Interactive, 1, time.Millisecond, "a")
		d.start()
		d.pass(2 * time.Millisecond)
	}
	d.s.Gone(d.now, 1, &d.out)
	d.pass(time.Second)
	if n := len(d.s.tickets) + len(d.s.accounts) + d.s.due.len() + len(d.s.nodes); n > 0 {
		t.Errorf("%d things are left", n)
	}
	if n := len(d.s.freeTickets); n > 10 {
		t.Errorf("%d tickets were made", n)
	}
}

// Case 2: bytes are bounded, and shared out: a tenant with many bodies makes room for one with none.
func TestBytesAreBounded(t *testing.T) {
	d := newDesk(t, Config{MaxBytes: 100_000}, Backend{ID: "a", Slots: 1000, Limit: -1})
	d.s.Used(d.now, 2, "a", 1000, &d.out)
	for range 200 {
		d.join("big", Interactive, 1, time.Minute, "a")
		if n := d.s.Look(d.now).Bytes; n > 100_000 {
			t.Fatalf("%d bytes are kept", n)
		}
	}
	d.want("waiting", d.s.Waiting(), 100)
	d.want("drops", len(d.drops()), 100)
	for range 50 {
		d.join("other", Interactive, 1, time.Minute, "a")
	}
	counts := map[Reason]int{}
	for _, k := range d.out.Drops {
		counts[k.Reason]++
	}
	d.want("evicted", counts[Evicted], 50)
	d.out.Reset()
	d.join("one", Interactive, 1, time.Minute, "a")
	d.want("drops", len(d.drops()), 1)
	d.want("waiting", d.s.Waiting(), 100)

	// What is granted counts as well: the body is still there.
	d = newDesk(t, Config{MaxBytes: 3000}, Backend{ID: "a", Slots: 10, Limit: -1})
	for range 5 {
		d.join("t", Interactive, 1, time.Minute, "a")
	}
	d.want("grants", len(d.out.Grants), 3)
	d.want("drops", d.drops(), []string{"4 queue_full", "5 queue_full"})
	d.start()
	d.want("bytes", d.s.Look(d.now).Bytes, 0)
}

// Case 3: a learner that has gone down to nothing stops nobody for good.
func TestZeroLimitAdmitsOne(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 8, Limit: 0})
	done := 0
	for range 50 {
		d.join("t", Interactive, 4, time.Minute, "a")
		if n := len(d.start()); n > 1 {
			t.Fatalf("%d at once", n)
		}
		if d.used["a"] > 0 {
			d.pass(100 * time.Millisecond)
			d.finish("a", "t", Interactive, 4, 100*time.Millisecond)
			done++
		}
	}
	if done != 50 {
		t.Errorf("%d of 50 were served", done)
	}
	d.start()
	// It goes up again as the learner does.
	d.s.SetBackends(d.now, []Backend{{ID: "a", Slots: 8, Limit: 8}}, &d.out)
	d.join("t", Interactive, 4, time.Minute, "a")
	d.join("t", Interactive, 4, time.Minute, "a")
	d.start()
	d.want("in use", d.used["a"], 8)
}

// A limit that wanders between nothing and all slots, seeded: it is kept, and never wedges.
func TestWanderingLimit(t *testing.T) {
	for seed := range uint64(5) {
		w := newWorld(t, seed, 3, Config{}, Backend{ID: "a", Slots: 8, Limit: 0})
		limit := int64(0)
		var wander func()
		wander = func() {
			limit = max(0, min(8, limit+w.rng.Int64N(3)-1))
			if w.rng.IntN(8) == 0 {
				limit = 0
			}
			w.s.SetBackends(w.now, []Backend{{ID: "a", Slots: 8, Limit: limit}}, &w.out)
			w.deliver()
			w.after(int64(500*time.Millisecond), wander)
		}
		wander()
		until := 60 * time.Second
		w.arrivals(30, until, func() {
			w.ask(Class(w.rng.IntN(3)), fmt.Sprint(w.rng.IntN(5)), 1+w.rng.Int64N(4), 1000, 100*time.Millisecond, 5*time.Second, "a")
		})
		w.run(until + 10*time.Second)
		if len(w.waiting) > 0 || w.held["a"] != 0 {
			t.Errorf("seed %d: %d wait, %d held", seed, len(w.waiting), w.held["a"])
		}
		if w.grants < 200 {
			t.Errorf("seed %d: only %d were served", seed, w.grants)
		}
	}
}

// Case 5: a thousand users at once, who come again as soon as they are answered.
func TestThousandUsers(t *testing.T) {
	w := newWorld(t, 5, 4, Config{TargetWait: 30 * time.Second}, Backend{ID: "a", Slots: 32, Limit: -1})
	until := 120 * time.Second
	turns := make([]int, 1000)
	var user func(i int)
	user = func(i int) {
		if w.now > int64(until) {
			return
		}
		takes := time.Duration(300+w.rng.Int64N(400)) * time.Millisecond
		r := w.ask(Interactive, fmt.Sprint("u", i), 1, 1000, takes, time.Minute, "a")
		again := func(ok bool) {
			if ok {
				turns[i]++
			}
			w.after(int64(time.Second)+w.rng.Int64N(int64(time.Second)), func() { user(i) })
		}
		if w.waiting[r.id] == nil {
			again(false)
		} else {
			r.done = again
		}
	}
	for i := range turns {
		user(i)
	}
	w.run(until + time.Minute)
	least, most := slices.Min(turns), slices.Max(turns)
	t.Logf("turns %d to %d, peak %d, drops %v", least, most, w.peakWaiting, w.drops)
	if least < 4 || most > 14 { // 64/s among 1,000 for 120 s: 7.7 each
		t.Errorf("turns of users: %d to %d", least, most)
	}
	if len(w.waiting) > 0 || len(w.s.tickets) > 0 || w.held["a"] != 0 {
		t.Errorf("%d are left", len(w.waiting))
	}
}

// 20 a second and 2 s hold 40: Little's law, from what is measured; before that, twice the slots. A stall
// lowers it, and it comes back.
func TestLittle(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 8, Limit: -1})
	fill := func() (waiting int) {
		for range 100 {
			d.join("t", Interactive, 1, time.Minute, "a")
		}
		d.out.Drops = d.out.Drops[:0]
		return d.s.Waiting()
	}
	fill()
	d.start()
	d.want("in use", d.used["a"], 8)
	d.want("waiting at first", fill(), 16)
	serve := func(n int) {
		for range n { // one every 50 ms, after 400 ms each
			d.pass(50 * time.Millisecond)
			d.finish("a", "t", Interactive, 1, 400*time.Millisecond)
			d.join("t", Interactive, 1, time.Minute, "a")
			d.start()
		}
	}
	serve(400)
	d.want("waiting", fill(), 40)
	b := d.backend("a")
	d.want("places", b.Places, 40)
	if math.Abs(b.Rate-20) > .5 || b.Drain < 1900*time.Millisecond || b.Drain > 2100*time.Millisecond {
		t.Errorf("rate %v drain %v", b.Rate, b.Drain)
	}
	d.pass(30 * time.Second) // nothing ends
	if b = d.backend("a"); b.Places > 8 || b.Places < 1 {
		t.Errorf("%d places in a stall", b.Places)
	}
	d.s.Gone(d.now, 1, &d.out)
	clear(d.used)
	d.out.Reset()
	for range 8 {
		d.join("t", Interactive, 1, time.Minute, "a")
	}
	d.start()
	serve(800)
	if n := fill(); n < 38 || n > 41 {
		t.Errorf("%d wait after the stall", n)
	}
}

// What another queue has measured counts until this one has measured enough, and not afterwards.
func TestBeginsWithWhatWasMeasured(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 8, Limit: -1, SlotTime: 100 * time.Millisecond})
	d.want("places at first", d.backend("a").Places, 160) // 80/s for 2 s
	for range 200 {
		d.join("t", Interactive, 1, time.Minute, "a")
	}
	d.start()
	d.want("waiting", d.s.Waiting(), 160)
	for range 400 { // they take four times as long
		d.pass(50 * time.Millisecond)
		d.finish("a", "t", Interactive, 1, 400*time.Millisecond)
		d.join("t", Interactive, 1, time.Minute, "a")
		d.start()
	}
	d.s.SetBackends(d.now, []Backend{{ID: "a", Slots: 8, Limit: -1, SlotTime: 100 * time.Millisecond}}, &d.out)
	if p := d.backend("a").Places; p < 38 || p > 41 {
		t.Errorf("%d places, not 40", p)
	}
}

// Work that is refused at one backend and then at another was offered once.
func TestRefusedTwiceIsOfferedOnce(t *testing.T) {
	var desired [2]float64
	for i, second := range []bool{false, true} {
		w := newWorld(t, 11, 1, Config{}, Backend{ID: "a", Slots: 16, Limit: -1}, Backend{ID: "b", Slots: 16, Limit: -1})
		w.arrivals(120, 60*time.Second, func() { // of 40/s each
			if r := w.ask(Interactive, "t", 1, 1000, 400*time.Millisecond, 10*time.Second, "a"); second && w.waiting[r.id] == nil {
				w.nextID++
				other := &request{id: w.nextID, takes: r.takes, came: w.now, dies: r.dies, ticket: r.ticket}
				other.ticket.ID, other.ticket.Refused, other.ticket.Places = other.id, true, []Place{{"b", 1}}
				w.waiting[other.id] = other
				w.s.Join(w.now, &other.ticket, &w.out)
				w.deliver()
			}
		})
		w.run(60 * time.Second)
		for _, b := range w.s.Look(w.now).Backends {
			desired[i] += b.Desired
		}
	}
	// With the other one it has served 40/s more, for which the first would be desired still.
	if desired[0] < 2.7 || desired[0] > 3.3 || desired[1] < 3.6 || desired[1] > 4.4 {
		t.Errorf("%.2f are desired, not 3 and 4", desired)
	}
}

// A big request of a tenant that keeps the fleet busy with small ones waits like those, and says nothing of the fleet's pressure.
func TestBigOfABusyTenant(t *testing.T) {
	w := newWorld(t, 5, 2, Config{TargetWait: 4 * time.Second}, Backend{ID: "a", Slots: 8, Limit: -1})
	until := 40 * time.Second
	const mean = 100 * time.Millisecond // 80/s
	var again func()
	again = func() {
		if w.now < int64(until) {
			w.ask(Interactive, "t", 1, 100, mean, time.Minute, "a").done = func(bool) { again() }
		}
	}
	for range 40 {
		again()
	}
	w.run(5 * time.Second)
	served, most := 0, 0.0
	for range 20 {
		w.ask(Interactive, "t", 4, 300, 3*mean, time.Minute, "a").done = func(ok bool) {
			if ok {
				served++
			}
		}
		w.run(time.Duration(w.now) + time.Second)
		most = max(most, w.s.Look(w.now).Backends[0].Pressure)
	}
	w.run(until)
	if served < 18 || most > .6 {
		t.Errorf("%d of 20 were served, at a pressure of %.2f at most", served, most)
	}
}

// What a backend refuses at once says nothing of its pace, so that no more may wait for it than before.
func TestRefusalsAreNoPace(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 4, Limit: -1})
	for range 100 {
		d.join("t", Interactive, 1, time.Minute, "a")
	}
	d.start()
	work := func(n int, held time.Duration, worked bool) {
		for range n {
			d.pass(held / 4)
			d.s.Done(d.now, "a", Interactive, "t", 1, held, worked)
			d.join("t", Interactive, 1, time.Minute, "a")
			d.start()
		}
	}
	work(200, 100*time.Millisecond, true)
	before := d.backend("a").Places
	work(2000, 2*time.Millisecond, false)
	if after := d.backend("a").Places; after > before*5/4 {
		t.Errorf("%d places, before it refused 2,000 there were %d", after, before)
	}
}

// A request that needs half of the slots gets them beside a stream of small ones, and costs them little.
func TestBigAmongSmall(t *testing.T) {
	w := newWorld(t, 3, 3, Config{}, Backend{ID: "a", Slots: 16, Limit: -1})
	until := 120 * time.Second
	w.arrivals(60, until, func() {
		w.ask(Interactive, "small", 1, 1000, time.Duration(200+w.rng.Int64N(400))*time.Millisecond, 10*time.Second, "a")
	})
	asked, served := 0, 0
	w.arrivals(0.5, until, func() {
		asked++
		r := w.ask(Interactive, "big", 8, 100_000, time.Second, 20*time.Second, "a")
		r.done = func(ok bool) {
			if ok {
				served++
			}
		}
	})
	w.run(until + 30*time.Second)
	big, small := w.served["big"], w.served["small"]
	use := (big.slotTime + small.slotTime) / (16 * float64(until))
	t.Logf("big %d of %d, p99 %v; small %d p99 %v; use %.3f", served, asked, quantile(big.waits, .99), small.n, quantile(small.waits, .99), use)
	if served < asked*9/10 {
		t.Errorf("%d of %d big ones were served", served, asked)
	}
	if p := quantile(big.waits, .99); p > 4*time.Second {
		t.Errorf("big ones wait %v", p)
	}
	if use < .85 {
		t.Errorf("%.2f of the slots were used", use)
	}
}

// Where the room for a big one does not come, it is not saved up for ever.
func TestSavingEnds(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 8, Limit: -1})
	for range 8 {
		d.join("t", Interactive, 1, time.Hour, "a")
	}
	d.start()
	big := d.join("big", Interactive, 4, time.Hour, "a")
	d.pass(100 * time.Millisecond)
	d.finish("a", "t", Interactive, 1, 100*time.Millisecond)
	small := d.join("t", Interactive, 1, time.Hour, "a")
	d.want("granted while it is saved up", d.start(), []uint64(nil))
	d.pass(2 * time.Second)
	d.want("granted then", d.start(), []uint64{small})
	for range 4 {
		d.pass(100 * time.Millisecond)
		d.finish("a", "t", Interactive, 1, 100*time.Millisecond)
	}
	d.pass(2 * time.Second)
	d.want("granted at last", d.start(), []uint64{big})
}

// A hung backend holds up nobody who can go elsewhere, and its own queue stays short.
func TestHungBackend(t *testing.T) {
	w := newWorld(t, 4, 3, Config{}, Backend{ID: "hung", Slots: 8, Limit: -1}, Backend{ID: "well", Slots: 8, Limit: -1})
	until := 60 * time.Second
	w.arrivals(60, until, func() {
		w.ask(Interactive, fmt.Sprint("t", w.rng.IntN(5)), 1, 1000, 100*time.Millisecond, 5*time.Second, "hung", "well")
	})
	w.arrivals(20, until, func() {
		w.ask(Interactive, fmt.Sprint("h", w.rng.IntN(5)), 1, 1000, 100*time.Millisecond, 5*time.Second, "hung")
	})
	w.after(int64(10*time.Second), func() { w.hang["hung"] = true })
	w.run(15 * time.Second)
	n := w.grants
	w.run(until)
	if rate := float64(w.grants-n) / 45; rate < 57 {
		t.Errorf("%.1f/s of 60 went on", rate)
	}
	y := w.served["t0"]
	if p := quantile(y.waits, .99); p > time.Second {
		t.Errorf("others wait %v", p)
	}
	for _, b := range w.s.Look(w.now).Backends {
		if b.ID == "hung" && (b.Places > 16 || b.Waiting > 30) {
			t.Errorf("%d wait for %d places of the hung one", b.Waiting, b.Places)
		}
	}
	w.hang["hung"] = false
	w.run(until + 10*time.Second)
	if len(w.waiting) > 0 || w.held["hung"] != 0 {
		t.Errorf("%d wait, %d held", len(w.waiting), w.held["hung"])
	}
}

// Slots that a dead node holds until its leases end are free to the scheduler alone: it asks now and
// then, and uses them within a moment when they come back.
func TestLeakedSlots(t *testing.T) {
	w := newWorld(t, 6, 3, Config{}, Backend{ID: "a", Slots: 8, Limit: -1})
	w.leaked["a"] = 8
	for i := range 16 {
		w.ask(Interactive, fmt.Sprint("t", i%4), 1, 1000, 100*time.Millisecond, time.Minute, "a")
	}
	w.run(5 * time.Second)
	if w.grants > 0 || w.misses < 50 || w.misses > 1200 {
		t.Errorf("%d grants, %d misses", w.grants, w.misses)
	}
	w.leaked["a"] = 0
	w.run(5500 * time.Millisecond)
	if w.grants != 16 {
		t.Errorf("%d of 16 were served", w.grants)
	}
}

// A new scheduler gets all tickets anew, from one node after the other: the order is that of age, and
// nobody loses a place to a bound that is not known yet.
func TestTakeover(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 2, Limit: -1})
	d.s.Used(d.now, 9, "a", 2, &d.out)
	for _, node := range []uint64{1, 2, 3} {
		for i := range uint64(200) {
			age := time.Duration(700-3*i-node) * time.Millisecond
			d.s.Join(d.now, &Ticket{Node: node, ID: i, Tenant: "t", Waited: age, Patience: time.Minute, Places: []Place{{"a", 1}}}, &d.out)
		}
	}
	d.want("drops", d.drops(), []string(nil))
	d.want("waiting", d.s.Waiting(), 600)
	last := int64(math.MinInt64)
	for range 600 {
		d.s.Used(d.now, 9, "a", 1, &d.out)
		g := d.out.Grants[0]
		d.out.Reset()
		at := int64(3*g.ID + g.Node)
		if at <= last {
			t.Fatalf("%d of %d goes after one that is younger", g.ID, g.Node)
		}
		last = at
		d.s.Used(d.now, 9, "a", 2, &d.out)
		d.s.Leave(d.now, g.Node, g.ID, &d.out)
	}
}

// Overflow is used where nothing else has room, and not before.
func TestOverflow(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "own", Slots: 2, Limit: -1}, Backend{ID: "dear", Slots: 2, Limit: -1, Overflow: true})
	for range 3 {
		d.join("t", Interactive, 1, time.Minute, "dear", "own")
	}
	d.start()
	d.want("in use", d.used, map[string]int64{"own": 2, "dear": 1})
	d.finish("own", "t", Interactive, 1, time.Second)
	d.join("t", Interactive, 1, time.Minute, "dear", "own")
	d.start()
	d.want("in use", d.used, map[string]int64{"own": 2, "dear": 1})
}

// Who would wait far longer than it has patience hears so at once, and after what time to come again.
func TestHopeless(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 8, Limit: -1})
	for range 8 {
		d.join("t", Interactive, 1, time.Minute, "a")
	}
	d.start()
	for range 200 {
		d.pass(50 * time.Millisecond)
		d.finish("a", "t", Interactive, 1, 400*time.Millisecond)
		d.start()
		for i := 0; i < 2 && d.s.Waiting() < 30; i++ {
			d.join("t", Interactive, 1, time.Minute, "a")
		}
	}
	d.out.Reset()
	d.want("waiting", d.s.Waiting(), 30)
	id := d.join("t", Interactive, 1, 500*time.Millisecond, "a")
	if len(d.out.Drops) != 1 || d.out.Drops[0].ID != id || d.out.Drops[0].Reason != QueueFull {
		t.Fatalf("%+v", d.out.Drops)
	}
	if after := d.out.Drops[0].RetryAfter; after < 1400*time.Millisecond || after > 1600*time.Millisecond { // 30 at 20/s
		t.Errorf("come again after %v", after)
	}
	d.drops()
	d.join("t", Interactive, 1, time.Second, "a")
	d.want("drops", d.drops(), []string(nil))
}

// Background keeps a fifth of a single slot that is always wanted, by requests of any length.
func TestBackgroundOnOneSlot(t *testing.T) {
	for _, lengths := range [][2]time.Duration{{time.Second, time.Second}, {100 * time.Millisecond, 3 * time.Second}, {5 * time.Second, 200 * time.Millisecond}} {
		w := newWorld(t, 9, 2, Config{}, Backend{ID: "a", Slots: 1, Limit: -1})
		until := 30 * time.Minute
		for c, takes := range lengths {
			w.arrivals(4/takes.Seconds(), until, func() {
				w.ask(Class(c), "t", 1, 1000, takes, 2*time.Minute, "a")
			})
		}
		w.countFrom = int64(time.Minute)
		w.run(until)
		if bg := w.share(Background); bg < .2 || bg > .3 {
			t.Errorf("%v: background got %.3f", lengths, bg)
		}
	}
}

// After a surge of twenty times what can be done, the queue that it left, a target wait's work, is gone as
// soon as those who still come leave time for it: with a load of 0.7, after three such waits and a half.
func TestRecovery(t *testing.T) {
	w := newWorld(t, 10, 4, Config{}, Backend{ID: "a", Slots: 32, Limit: -1})
	const mean = 400 * time.Millisecond // 80/s
	ask := func() {
		w.ask(Class(w.rng.IntN(3)), fmt.Sprint("t", w.rng.IntN(20)), 1, 1000, time.Duration(w.rng.ExpFloat64()*float64(mean)), time.Duration(1+w.rng.IntN(10))*time.Second, "a")
	}
	w.arrivals(56, 100*time.Second, ask)
	w.run(30 * time.Second)
	w.arrivals(1600, 60*time.Second, ask)
	w.run(60 * time.Second)
	if p := pressureOf(w.s.Look(w.now), "a"); p < 1 {
		t.Errorf("pressure %v in the surge", p)
	}
	w.run(68 * time.Second)
	w.countFrom = w.now
	w.waits = [Classes][]time.Duration{}
	w.run(76 * time.Second)
	all := slices.Concat(w.waits[0], w.waits[1], w.waits[2])
	if p := quantile(all, .99); p > 500*time.Millisecond {
		t.Errorf("p99 %v after the surge", p)
	}
	if p := pressureOf(w.s.Look(w.now), "a"); p > .3 {
		t.Errorf("pressure %v after the surge", p)
	}
	w.run(120 * time.Second)
	if p := pressureOf(w.s.Look(w.now), "a"); p != 0 || len(w.waiting) > 0 {
		t.Errorf("pressure %v at rest, %d wait", p, len(w.waiting))
	}
}

func pressureOf(s Stats, id string) float64 {
	for _, b := range s.Backends {
		if b.ID == id {
			return b.Pressure
		}
	}
	return math.NaN()
}

// What the autoscaler reads: how many backends the work that is offered would keep busy.
func TestDesired(t *testing.T) {
	w := newWorld(t, 11, 2, Config{}, Backend{ID: "a", Slots: 16, Limit: -1}, Backend{ID: "b", Slots: 16, Limit: -1})
	w.arrivals(240, 60*time.Second, func() { // of 80/s
		order := []string{"a", "b"}
		if w.rng.IntN(2) == 0 {
			slices.Reverse(order)
		}
		w.ask(Interactive, fmt.Sprint("t", w.rng.IntN(5)), 1, 1000, 400*time.Millisecond, 10*time.Second, order...)
	})
	w.run(60 * time.Second)
	var desired float64
	for _, b := range w.s.Look(w.now).Backends {
		desired += b.Desired
	}
	if desired < 5.4 || desired > 6.6 {
		t.Errorf("%.2f backends are desired, not 6", desired)
	}
}

// Changes says when a backend begins or ceases to be contended.
func TestChanges(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 1, Limit: -1})
	before := d.s.Changes()
	d.join("t", Interactive, 1, time.Minute, "a")
	d.start()
	d.want("changes", d.s.Changes()-before, 0)
	id := d.join("t", Interactive, 1, time.Minute, "a")
	d.want("changes", d.s.Changes()-before, 1)
	d.want("contended", d.backend("a").Contended, true)
	d.s.Leave(d.now, 1, id, &d.out)
	d.want("contended still", d.backend("a").Contended, true)
	d.pass(100 * time.Millisecond)
	d.want("contended", d.backend("a").Contended, false)
	d.want("changes", d.s.Changes()-before, 2)
	d.s.SetBackends(d.now, []Backend{{ID: "a", Slots: 4, Limit: 2, Stale: true}}, &d.out)
	b := d.backend("a")
	d.want("limited, stale, limit", fmt.Sprint(b.Limited, b.Stale, b.Limit), "true true 2")
	d.want("changes", d.s.Changes()-before, 3)
}
