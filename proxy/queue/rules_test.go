package queue

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// serveAll lets one slot of "a" go round n times, 10 ms each, and returns the classes and tenants that got it, in
// order. fill is called before each turn.
func (d *desk) serveAll(n int, owner map[uint64]string, fill func()) (got []string) {
	for range n {
		fill()
		ids := d.start()
		if len(ids) != 1 {
			d.t.Fatalf("%d were granted", len(ids))
		}
		got = append(got, owner[ids[0]])
		d.pass(10 * time.Millisecond)
		d.finish("a", owner[ids[0]], classOf(owner[ids[0]]), 1, 10*time.Millisecond)
	}
	return got
}

func classOf(tenant string) Class {
	if strings.HasPrefix(tenant, "bg") {
		return Background
	}
	return Interactive
}

// keep joins a ticket of the tenant wherever fewer than n of it wait.
func (d *desk) keep(owner map[uint64]string, tenant string, n int) {
	waiting := 0
	for _, t := range d.s.tickets {
		if t.tenant == tenant && t.granted == nil {
			waiting++
		}
	}
	for ; waiting < n; waiting++ {
		id := d.join(tenant, classOf(tenant), 1, time.Minute, "a")
		owner[id] = tenant
	}
}

func count(list []string, word string) (n int) {
	for _, w := range list {
		if w == word {
			n++
		}
	}
	return n
}

// Who was away has no credit for it, neither a class nor a tenant; nor a debt, where nobody else was there.
func TestNoCreditForHavingBeenAway(t *testing.T) {
	for _, late := range []string{"bg", "other"} {
		d := newDesk(t, Config{}, Backend{ID: "a", Slots: 1, Limit: -1})
		owner := map[uint64]string{}
		both := func() { d.keep(owner, "t", 2); d.keep(owner, late, 2) }
		d.serveAll(40, owner, both)
		d.serveAll(500, owner, func() { d.keep(owner, "t", 2) })
		got := d.serveAll(40, owner, both)
		least, most := 18, 22
		if late == "bg" {
			least, most = 7, 11
		}
		if n := count(got, late); n < least || n > most {
			t.Errorf("%s got %d of 40: %v", late, n, got)
		}
	}
}

// A class in which nobody waited for a while is open to whom it served last.
func TestNoDebtToNobody(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 1, Limit: -1})
	owner := map[uint64]string{}
	interactive := func() { d.keep(owner, "t", 2); d.keep(owner, "other", 2) }
	d.serveAll(200, owner, func() { interactive(); d.keep(owner, "bg", 2) })
	d.serveAll(20, owner, interactive)
	d.out.Drops = nil // of when the rate was not known
	got := d.serveAll(100, owner, func() { interactive(); d.keep(owner, "bg", 2) })
	if n := count(got, "bg"); n < 20 || n > 25 {
		t.Errorf("bg got %d of 100", n)
	}
	for _, k := range d.out.Drops {
		if owner[k.ID] == "bg" {
			t.Errorf("a ticket of bg was dropped: %v", k.Reason)
		}
	}
}

// A tenant owes nothing for what it had while nobody else of its class was there, however long that took.
func TestNoDebtToLatecomers(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 1, Limit: -1})
	owner := map[uint64]string{}
	interactive := func() { d.keep(owner, "t", 3) }
	d.serveAll(100, owner, func() { interactive(); d.keep(owner, "bg", 1) })
	for d.s.waiting[Background] > 0 {
		d.serveAll(1, owner, interactive)
	}
	d.s.Done(d.now, "a", Background, "bg", 1, 10*time.Second, true)
	got := d.serveAll(400, owner, func() { interactive(); d.keep(owner, "bg", 1); d.keep(owner, "bg2", 1) })
	if n, m := count(got, "bg"), count(got, "bg2"); n == 0 || m == 0 || n < m-2 {
		t.Errorf("bg got %d, bg2 %d", n, m)
	}
}

// Where one place is all that there is, one of each class has one all the same.
func TestOneOfEachClass(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 1, Limit: -1})
	for range 10 {
		d.join("t", Interactive, 1, time.Hour, "a")
		d.start()
		d.pass(10 * time.Second)
		d.finish("a", "t", Interactive, 1, 10*time.Second)
		d.start()
	}
	d.join("t", Interactive, 1, time.Hour, "a")
	d.start()
	d.want("places", d.backend("a").Places, 1)
	for c := range Class(Classes) {
		d.join("t", c, 1, time.Hour, "a")
		d.want("drops", d.drops(), []string(nil))
		d.join("other", c, 1, time.Hour, "a")
		d.want("drops", len(d.drops()), 1)
	}
	d.want("waiting", d.s.waiting, [Classes]int{1, 1, 1})
}

// Grants that come to nothing are not charged.
func TestMissesAreNotCharged(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 1, Limit: -1})
	owner := map[uint64]string{}
	both := func() { d.keep(owner, "t", 2); d.keep(owner, "other", 2) }
	d.serveAll(40, owner, both)
	b := d.s.backends["a"]
	for range 20 {
		both()
		line := b.classes[Interactive].tag
		if len(d.out.Grants) != 1 {
			t.Fatalf("%d grants", len(d.out.Grants))
		}
		g := d.out.Grants[0]
		d.out.Reset()
		d.s.Miss(d.now, g.Node, g.ID, &d.out)
		if tag := b.classes[Interactive].tag; tag >= line {
			t.Fatalf("a miss was charged: %v, then %v", line, tag)
		}
		d.pass(time.Second)
	}
}

// A pause after a miss is over when somebody uses less, for the ticket that missed as well.
func TestPauseEndsWhenSlotsComeBack(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 2, Limit: -1})
	d.s.Used(d.now, 2, "a", 1, &d.out)
	id := d.join("t", Interactive, 1, time.Minute, "a")
	d.out.Reset()
	for range 5 {
		d.s.Miss(d.now, 1, id, &d.out)
		d.want("grants in the pause", len(d.out.Grants), 0)
		d.s.Used(d.now, 2, "a", 2, &d.out)
		d.s.Used(d.now, 2, "a", 1, &d.out)
		d.want("grants after it", len(d.out.Grants), 1)
		d.out.Reset()
	}
}

// Room that was saved up goes to others at once when whom it was for goes, or loses the backend.
func TestSaverGoes(t *testing.T) {
	begin := func() (*desk, uint64, uint64) {
		d := newDesk(t, Config{}, Backend{ID: "a", Slots: 4, Limit: -1}, Backend{ID: "b", Slots: 1, Limit: -1})
		d.s.Used(d.now, 2, "a", 3, &d.out)
		d.s.Used(d.now, 2, "b", 1, &d.out)
		big := d.join("t", Interactive, 2, time.Minute, "a", "b")
		small := d.join("t", Interactive, 1, time.Minute, "a")
		d.want("grants", len(d.out.Grants), 0)
		return d, big, small
	}
	d, big, small := begin()
	d.s.Leave(d.now, 1, big, &d.out)
	d.want("granted", d.start(), []uint64{small})

	d, big, _ = begin()
	d.s.SetBackends(d.now, []Backend{{ID: "b", Slots: 4, Limit: -1}}, &d.out)
	d.want("drops", len(d.out.Drops), 1)
	d.want("granted", d.start(), []uint64{big})
	d.s.SetBackends(d.now, []Backend{{ID: "a", Slots: 4, Limit: -1}, {ID: "b", Slots: 4, Limit: -1}}, &d.out)
	next := d.join("t", Interactive, 1, time.Minute, "a")
	d.want("granted", d.start(), []uint64{next})
}

// Room is saved up for one big ticket after another only by turns with the small ones.
func TestSavingByTurns(t *testing.T) {
	d := newDesk(t, Config{TargetWait: time.Second}, Backend{ID: "a", Slots: 8, Limit: -1})
	d.s.Used(d.now, 2, "a", 7, &d.out)
	for range 5 {
		d.join("t", Interactive, 4, time.Hour, "a")
	}
	granted := time.Duration(0)
	for range 400 {
		id := d.join("t", Interactive, 1, time.Hour, "a")
		if slices.Contains(d.start(), id) {
			granted += 50 * time.Millisecond
			d.finish("a", "t", Interactive, 1, 50*time.Millisecond)
		} else {
			d.s.Leave(d.now, 1, id, &d.out)
		}
		d.pass(50 * time.Millisecond)
	}
	if granted < 8*time.Second {
		t.Errorf("small ones had the last slot for %v of 20 s", granted)
	}
}

// Tenants with one more than another lose nothing to it, or both would turn each other out for ever.
func TestEvictionGainsSomething(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 2, Limit: -1})
	d.s.Used(d.now, 2, "a", 2, &d.out)
	for range 3 {
		d.join("x", Interactive, 1, time.Minute, "a")
	}
	d.join("y", Interactive, 1, time.Minute, "a")
	d.want("drops", d.drops(), []string(nil))
	d.join("y", Interactive, 1, time.Minute, "a")
	d.want("drops", d.drops(), []string{"3 evicted"})
	d.join("x", Interactive, 1, time.Minute, "a")
	d.want("drops", d.drops(), []string{"6 queue_full"})
	d.join("z", Interactive, 1, time.Minute, "a")
	d.want("drops", len(d.drops()), 1)
	d.want("z's turn out", d.s.accounts[accountKey{"x", Interactive}].n, 1)
	d.join("x", Interactive, 1, time.Minute, "a")
	d.want("drops", d.drops(), []string{"8 queue_full"})
	d.want("waiting", d.s.Waiting(), 4)
}

// What nobody uses takes room and teaches nothing.
func TestNobodysUse(t *testing.T) {
	d := newDesk(t, Config{}, Backend{ID: "a", Slots: 8, Limit: -1})
	for range 20 {
		d.join("t", Interactive, 1, time.Minute, "a")
		d.start()
		d.pass(100 * time.Millisecond)
		d.finish("a", "t", Interactive, 1, 100*time.Millisecond)
	}
	before := d.backend("a").Rate
	d.s.Used(d.now, 0, "a", 8, &d.out)
	d.join("t", Interactive, 1, time.Minute, "a")
	d.want("granted", d.start(), []uint64(nil))
	d.pass(5 * time.Second)
	if rate := d.backend("a").Rate; rate < before*.95 {
		t.Errorf("%v/s became %v/s", before, rate)
	}
	d.s.Used(d.now, 0, "a", 0, &d.out)
	d.want("granted", len(d.start()), 1)
}

// Who stands before others, does not fit and is not the one that room is saved for makes way when it leaves.
func TestWhoLeavesMakesWay(t *testing.T) {
	d := newDesk(t, Config{TargetWait: 10 * time.Second}, Backend{ID: "a", Slots: 16, Limit: -1})
	d.s.Used(d.now, 9, "a", 12, &d.out)
	join := func(tenant string, class Class, cost int64) uint64 {
		d.pass(time.Millisecond)
		return d.join(tenant, class, cost, time.Hour, "a")
	}
	join("t", BestEffort, 8) // room is saved for it
	next := join("t", Interactive, 8)
	fits := join("t", Interactive, 1)
	d.want("granted", len(d.out.Grants), 0)
	d.s.Leave(d.now, 1, next, &d.out)
	if len(d.out.Grants) == 0 {
		d.s.Expire(d.now+int64(time.Second), &d.out)
	}
	if b := d.s.backends["a"]; len(d.out.Grants) == 0 && b.saver == nil {
		t.Errorf("%d fits and waits with %d slots free", fits, b.room(d.now))
	}
}
