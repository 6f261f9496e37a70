package journal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

func mustOpen(t *testing.T, c Config) *Log {
	t.Helper()
	l, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func mustClose(t *testing.T, l *Log) {
	t.Helper()
	if err := l.Close(context.Background()); err != nil {
		t.Fatalf("close: %v", err)
	}
}

func reserve(t *testing.T, l *Log, a Account, amount int64) uint64 {
	t.Helper()
	r := &Reservation{Time: noon, Tenant: a.Tenant, Cost: amount, Parts: []Part{{a, amount}}}
	if err := l.Reserve(r); err != nil {
		t.Fatalf("reserve: %v", err)
	}
	return r.ID
}

func settle(t *testing.T, l *Log, id uint64, a Account, amount int64) {
	t.Helper()
	if err := l.Settle(&Usage{ID: id, Time: noon, Tenant: a.Tenant, Outcome: "ok", Cost: amount, Parts: []Part{{a, amount}}}); err != nil {
		t.Fatalf("settle: %v", err)
	}
}

func readAll(t *testing.T, l *Log, q Query) (all []Usage) {
	t.Helper()
	if err := l.Read(t.Context(), q, func(u *Usage) error {
		c := *u
		c.Parts = slices.Clone(u.Parts)
		all = append(all, c)
		return nil
	}); err != nil {
		t.Fatalf("read: %v", err)
	}
	return all
}

var month = Account{Tenant: "acme", Budget: "month", Subject: "acme", Start: 1, End: math.MaxInt64}

// TestManyWriters lets many write at once, also waiting for the disk each time: everything
// stands in the file once, in more than one segment.
func TestManyWriters(t *testing.T) {
	for _, each := range []bool{false, true} {
		t.Run(fmt.Sprint("each=", each), func(t *testing.T) {
			d := newDisk()
			c := testConfig(d, 1)
			c.SyncEach, c.Segment, c.SyncEvery = each, 20_000, time.Microsecond
			l := mustOpen(t, c)
			var all sync.WaitGroup
			for range 16 {
				all.Go(func() {
					for i := range 100 {
						id := reserve(t, l, month, 10)
						if i%10 != 0 {
							settle(t, l, id, month, 3)
						}
					}
				})
			}
			all.Wait()
			l.mu.Lock() // the syncer is at work
			current, segments := l.current.name(), len(l.segments)
			l.mu.Unlock()
			if each {
				if synced, written := d.state("/usage/" + current); synced != written {
					t.Errorf("%d of %d bytes are on the disk", synced, written)
				}
			}
			if segments < 5 {
				t.Errorf("%d segments", segments)
			}
			if got := readAll(t, l, Query{}); len(got) != 16*90 {
				t.Errorf("%d requests, want %d", len(got), 16*90)
			}
			mustClose(t, l)
			next := mustOpen(t, testConfig(d.killed(), 2))
			defer mustClose(t, next)
			want := []Total{{Account: month, Settled: 16 * 90 * 3, Open: 16 * 10 * 10}}
			if past := next.Unclosed(); len(past) != 1 || past[0].Damaged != "" || !slices.Equal(past[0].Accounts, want) {
				t.Errorf("%+v, want %+v", past, want)
			}
		})
	}
}

// TestPartOfABatch: of a batch that did not fit, the records that did are good.
func TestPartOfABatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk()
		l := mustOpen(t, testConfig(d, 1))
		l.writing = true // until two have queued
		errs := make(chan error, 2)
		for range 2 {
			go func() { errs <- l.Reserve(&Reservation{Time: noon, Parts: []Part{{month, 10}}}) }()
		}
		synctest.Wait()
		l.mu.Lock()
		d.leave(frameHead + len(l.queue[0].payload) + 5)
		l.write()
		if good, bad := <-errs, <-errs; (good == nil) == (bad == nil) || !errors.Is(errors.Join(good, bad), ErrFailing) {
			t.Errorf("%v and %v", good, bad)
		}
		d.leave(-1)
		l.round()
		if len(l.own.open) != 1 || l.failing != nil {
			t.Errorf("%d are open, failing %v", len(l.own.open), l.failing)
		}
		abandon(l)
		past, _ := reopen(t, d.killed(), 2)
		if past.Damaged != "" || past.Accounts[0].Open != 10 {
			t.Errorf("%+v", past)
		}
	})
}

// TestNobodyWritesForEver: a caller that finds itself writing for the others is let go, though
// more and more of them come.
func TestNobodyWritesForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk()
		l := mustOpen(t, testConfig(d, 1))
		d.pause = time.Millisecond
		var all sync.WaitGroup
		for range 400 {
			all.Go(func() {
				from := time.Now()
				reserve(t, l, month, 1)
				if took := time.Since(from); took > (maxRounds+2)*d.pause {
					t.Errorf("a reservation took %v of virtual time", took)
				}
			})
			time.Sleep(d.pause / 2)
		}
		all.Wait()
		if len(l.own.open) != 400 {
			t.Errorf("%d are open", len(l.own.open))
		}
		abandon(l)
	})
}

// TestUncut: what a failed write left and nobody could cut off is not written over, for that
// would leave a part of it behind.
func TestUncut(t *testing.T) {
	d := newDisk()
	l := mustOpen(t, testConfig(d, 1))
	d.fails["lie"], d.fails["truncate"] = true, true
	if err := l.Reserve(&Reservation{Time: noon, User: strings.Repeat("u", 200), Parts: []Part{{month, 7}}}); !errors.Is(err, ErrFailing) {
		t.Fatalf("reserve: %v", err)
	}
	d.fails["lie"] = false
	l.round()
	reserve(t, l, month, 3)
	abandon(l)
	past, _ := reopen(t, d.killed(), 2)
	if past.Damaged != "" || len(past.Accounts) != 1 || past.Accounts[0].Open != 3 {
		t.Errorf("%+v", past)
	}
}

// TestSyncedSoon: what was written is on the disk after SyncEvery, with no caller waiting for it.
func TestSyncedSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk()
		c := testConfig(d, 1)
		c.SyncEvery = 50 * time.Millisecond
		l := mustOpen(t, c)
		defer mustClose(t, l)
		time.Sleep(time.Minute) // virtual: whatever opening left to do is done
		reserve(t, l, month, 5)
		name := "/usage/" + l.current.name()
		if synced, written := d.state(name); synced == written {
			t.Error("the reservation waited for the disk")
		}
		time.Sleep(51 * time.Millisecond)
		synctest.Wait()
		if synced, written := d.state(name); synced != written {
			t.Errorf("%d of %d bytes are on the disk", synced, written)
		}
	})
}

// TestOldSegmentIsSynced: a segment that another follows is brought to the disk, too.
func TestOldSegmentIsSynced(t *testing.T) {
	d := newDisk()
	l := mustOpen(t, testConfig(d, 1))
	defer abandon(l)
	reserve(t, l, month, 5)
	old := "/usage/" + l.current.name()
	l.rotate = true
	reserve(t, l, month, 5)
	if synced, written := d.state(old); synced == written {
		t.Error("the reservation waited for the disk")
	}
	l.round()
	for _, name := range []string{old, "/usage/" + l.current.name()} {
		if synced, written := d.state(name); synced != written {
			t.Errorf("%s: %d of %d bytes are on the disk", name, synced, written)
		}
	}
}

// TestDiskComesBack: by itself, without another request, what was kept is written.
func TestDiskComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, reg := newDisk(), prometheus.NewRegistry()
		c := testConfig(d, 1)
		c.SyncEvery, c.Registerer = 50*time.Millisecond, reg
		l := mustOpen(t, c)
		id := reserve(t, l, month, 5)
		d.leave(0)
		settle(t, l, id, month, 4)
		if err := l.Settle(&Usage{ID: id, Outcome: "ok"}); !errors.Is(err, ErrUnknown) {
			t.Errorf("settled twice: %v", err)
		}
		time.Sleep(time.Second)
		if err := l.Reserve(&Reservation{}); !errors.Is(err, ErrFailing) {
			t.Errorf("reserved on a full disk: %v", err)
		}
		if n := value(t, reg, "headgate_journal_failing"); n != 1 {
			t.Errorf("failing is %v", n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		d.leave(-1)
		time.Sleep(time.Second)
		synctest.Wait()
		if n := value(t, reg, "headgate_journal_failing"); n != 0 {
			t.Errorf("failing is %v", n)
		}
		if got := readAll(t, l, Query{}); len(got) != 1 || got[0].Cost != 4 {
			t.Errorf("read %+v", got)
		}
		reserve(t, l, month, 5)
		if err := l.Close(ctx); err != nil {
			t.Error(err)
		}
	})
}

// value of a metric.
func value(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			m := f.GetMetric()[0]
			return m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// TestCloseGivesUp: Close waits for a disk that refuses as long as its context lives, says so,
// and what it could not write counts in full.
func TestCloseGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk()
		c := testConfig(d, 1)
		c.SyncEvery = 50 * time.Millisecond
		l := mustOpen(t, c)
		id := reserve(t, l, month, 5)
		d.leave(0)
		settle(t, l, id, month, 4)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := l.Close(ctx); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrFailing) {
			t.Errorf("close: %v", err)
		}
		if err := l.Close(t.Context()); err != nil {
			t.Errorf("close again: %v", err)
		}
		next := mustOpen(t, testConfig(d.killed(), 2))
		defer mustClose(t, next)
		if past := next.Unclosed(); past[0].Accounts[0].Open != 5 || past[0].Damaged != "" {
			t.Errorf("%+v", past)
		}
	})
}

// TestFailedSyncBeginsASegment: after a sync that failed nobody knows what the disk has, so
// all of the books are written anew, elsewhere.
func TestFailedSyncBeginsASegment(t *testing.T) {
	for _, each := range []bool{false, true} {
		d := newDisk()
		c := testConfig(d, 1)
		c.SyncEach = each
		l := mustOpen(t, c)
		id, first := reserve(t, l, month, 5), l.current.segment
		d.once = "sync"
		r := &Reservation{Time: noon, Parts: []Part{{month, 7}}}
		if err := l.Reserve(r); each != errors.Is(err, ErrFailing) || !each && err != nil {
			t.Fatalf("each %v: reserved without a sync: %v", each, err)
		}
		if !each {
			_ = l.syncOnce() // the test is whether the Log has noticed
		}
		if l.failing == nil {
			t.Fatalf("each %v: a failed sync goes unnoticed", each)
		}
		settle(t, l, id, month, 4)
		l.round()
		l.round()
		if l.failing != nil || l.current.segment == first {
			t.Errorf("each %v: failing %v, segment %d after %d", each, l.failing, l.current.segment, first)
		}
		abandon(l)
		want := []Total{{Account: month, Settled: 4}}
		if !each {
			want[0].Open = 7
		}
		next := mustOpen(t, testConfig(d.killed(), 2))
		if past := next.Unclosed(); past[0].Damaged != "" || !slices.Equal(past[0].Accounts, want) {
			t.Errorf("each %v: %+v, want %+v", each, past, want)
		}
		mustClose(t, next)
	}
}

// TestPast goes through what a node does with an earlier incarnation.
func TestPast(t *testing.T) {
	d := newDisk()
	l := mustOpen(t, testConfig(d, 1))
	settle(t, l, reserve(t, l, month, 10), month, 8)
	reserve(t, l, month, 10)
	abandon(l)
	d = d.killed()

	c := testConfig(d, 2)
	c.BootID = "boot 2"
	l = mustOpen(t, c)
	past := l.Unclosed()
	if len(past) != 1 || past[0].Incarnation != 1 || past[0].Node != "a" || !strings.Contains(past[0].Damaged, "machine") {
		t.Fatalf("%+v", past)
	}
	for range 2 { // again after a crash in between
		if err := l.Lost(1, month, 30); err != nil {
			t.Fatal(err)
		}
	}
	abandon(l)
	d = d.killed()
	l = mustOpen(t, testConfig(d, 3))
	if err := l.Lost(1, month, 31); err != nil {
		t.Fatal(err)
	}
	want := Total{Account: month, Settled: 8, Open: 10, Lost: 30}
	if past := l.Unclosed(); len(past) != 2 || past[0].Damaged == "" || past[0].Accounts[0] != want || past[1].Incarnation != 2 || len(past[1].Accounts) != 0 {
		t.Fatalf("%+v", past)
	}
	usage := readAll(t, l, Query{})
	if len(usage) != 3 || usage[0].Cost != 8 || usage[1].Outcome != Crashed || usage[1].Cost != 10 || usage[2].Outcome != Lost || usage[2].Cost != 0 || usage[2].Parts[0].Amount != 30 || usage[2].Incarnation != 1 {
		t.Fatalf("%+v", usage)
	}
	for range 2 {
		if err := errors.Join(l.Closed(1), l.Closed(2), l.Closed(99)); err != nil {
			t.Fatal(err)
		}
	}
	if past := l.Unclosed(); len(past) != 0 || len(l.books) != 1 {
		t.Fatalf("%+v, %d books", past, len(l.books))
	}
	if err := l.Lost(1, month, 5); err != nil || len(readAll(t, l, Query{})) != 3 {
		t.Errorf("lost of a closed one: %v", err)
	}
	abandon(l)
	l = mustOpen(t, testConfig(d.killed(), 4))
	defer mustClose(t, l)
	if past := l.Unclosed(); len(past) != 1 || past[0].Incarnation != 3 || len(l.books) != 2 {
		t.Fatalf("%+v, %d books", past, len(l.books))
	}
}

// TestReadBooksAreOnTheDisk: a process that was killed is not Damaged by the machine going down after a later one has
// read its books; the later one is.
func TestReadBooksAreOnTheDisk(t *testing.T) {
	d := newDisk()
	a := mustOpen(t, testConfig(d, 1))
	settle(t, a, reserve(t, a, month, 10), month, 8)
	reserve(t, a, month, 10)
	abandon(a)
	b := mustOpen(t, testConfig(d.killed(), 2))
	d = b.cfg.FS.(*disk)
	reserve(t, b, month, 7)
	abandon(b)
	for incarnation := range uint64(2) { // the power goes, twice
		c := testConfig(d.cut(func(int) int { return 0 }), 3+incarnation)
		c.BootID = fmt.Sprint("boot ", 2+incarnation)
		l := mustOpen(t, c)
		want := Total{Account: month, Settled: 8, Open: 10}
		if past := l.Unclosed(); len(past) != int(2+incarnation) || past[0].Damaged != "" || !slices.Equal(past[0].Accounts, []Total{want}) || past[1].Damaged == "" {
			t.Errorf("%+v", past)
		}
		abandon(l)
		d = c.FS.(*disk)
	}
}

// TestNoBootID: where nobody can tell whether the machine went down, it may have.
func TestNoBootID(t *testing.T) {
	d := newDisk()
	c := testConfig(d, 1)
	c.BootID = ""
	abandon(mustOpen(t, c))
	c = testConfig(d.killed(), 2)
	c.BootID = ""
	l := mustOpen(t, c)
	mustClose(t, l)
	if past := l.Unclosed(); past[0].Damaged == "" {
		t.Errorf("%+v", past)
	}
	c = testConfig(c.FS.(*disk).killed(), 3)
	c.BootID = ""
	l = mustOpen(t, c)
	defer mustClose(t, l)
	if past := l.Unclosed(); past[0].Damaged == "" || past[1].Damaged != "" {
		t.Errorf("%+v", past)
	}
}

// TestLastWordsAreOnDisk: what must be on the disk is, also where it begins a segment.
func TestLastWordsAreOnDisk(t *testing.T) {
	nothing := func(int) int { return 0 }
	d := newDisk()
	abandon(mustOpen(t, testConfig(d, 1)))
	d = d.killed()
	l := mustOpen(t, testConfig(d, 2))
	l.rotate = true
	if err := l.Closed(1); err != nil {
		t.Fatal(err)
	}
	abandon(l)
	d = d.cut(nothing)
	abandon(mustOpen(t, testConfig(d, 20)))
	d = d.killed()
	l = mustOpen(t, testConfig(d, 21))
	l.rotate = true
	reserve(t, l, month, 1) // begins the segment, waiting for nothing
	if err := errors.Join(l.Closed(2), l.Closed(20)); err != nil {
		t.Fatal(err)
	}
	abandon(l)
	d = d.cut(nothing)
	c := testConfig(d, 3)
	c.BootID = "boot 2"
	l = mustOpen(t, c)
	if past := l.Unclosed(); len(past) != 1 || past[0].Incarnation != 21 {
		t.Errorf("what was closed is back: %+v", past)
	}
	reserve(t, l, month, 1)
	l.rotate = true
	mustClose(t, l)
	l = mustOpen(t, testConfig(d.cut(nothing), 4))
	defer mustClose(t, l)
	if past := l.Unclosed(); len(past) != 2 || past[1].Damaged != "" || past[1].Accounts[0].Open != 1 {
		t.Errorf("after a clean stop: %+v", past)
	}
}

// TestOpenIsOnDisk: what an Open has read and written outlives a power cut right after it.
func TestOpenIsOnDisk(t *testing.T) {
	d := newDisk()
	l := mustOpen(t, testConfig(d, 1))
	settle(t, l, reserve(t, l, month, 10), month, 8)
	reserve(t, l, month, 10)
	abandon(l)
	d = d.killed()
	l = mustOpen(t, testConfig(d, 2))
	want := readAll(t, l, Query{})
	if synced, written := d.state("/usage/" + l.current.name()); synced != written {
		t.Errorf("%d of %d bytes are on the disk", synced, written)
	}
	abandon(l)
	l = mustOpen(t, testConfig(d.cut(func(int) int { return 0 }), 3))
	defer mustClose(t, l)
	if got := readAll(t, l, Query{}); len(want) != 2 || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("after the power cut %+v, before %+v", got, want)
	}
}

// TestClosedOwn: a process that has told the ledger everything leaves nothing to tell.
func TestClosedOwn(t *testing.T) {
	d := newDisk()
	l := mustOpen(t, testConfig(d, 1))
	id := reserve(t, l, month, 10)
	if err := l.Closed(1); err == nil {
		t.Error("closed while a request is open")
	}
	settle(t, l, id, month, 8)
	if err := l.Closed(1); err != nil {
		t.Fatal(err)
	}
	if err := l.Reserve(&Reservation{}); !errors.Is(err, ErrClosed) {
		t.Errorf("reserved after the last word: %v", err)
	}
	if err := l.Settle(&Usage{Time: noon, Outcome: "ok"}); err != nil { // without a budget
		t.Error(err)
	}
	l.mu.Lock()
	l.rotate = true // the last word must stand in a checkpoint, too
	l.mu.Unlock()
	if err := l.Settle(&Usage{Time: noon, Outcome: "ok"}); err != nil {
		t.Error(err)
	}
	mustClose(t, l)
	if err := l.Settle(&Usage{Outcome: "ok"}); !errors.Is(err, ErrClosed) {
		t.Errorf("settled after Close: %v", err)
	}
	l = mustOpen(t, testConfig(d.killed(), 2))
	defer mustClose(t, l)
	if past := l.Unclosed(); len(past) != 0 {
		t.Errorf("%+v", past)
	}
	if got := readAll(t, l, Query{}); len(got) != 3 {
		t.Errorf("%d requests, want 3", len(got))
	}
}

func TestRefused(t *testing.T) {
	d := newDisk()
	l := mustOpen(t, testConfig(d, 1))
	long := Account{Tenant: strings.Repeat("x", MaxAccountName+1)}
	for name, err := range map[string]error{
		"negative":         l.Reserve(&Reservation{Parts: []Part{{month, -1}}}),
		"long":             l.Reserve(&Reservation{Parts: []Part{{long, 1}}}),
		"many":             l.Reserve(&Reservation{Parts: make([]Part, MaxParts+1)}),
		"negative usage":   l.Settle(&Usage{Parts: []Part{{month, -1}}}),
		"charge alone":     l.Settle(&Usage{Parts: []Part{{month, 1}}}),
		"unknown":          l.Settle(&Usage{ID: 7}),
		"our own word":     l.Settle(&Usage{Outcome: Crashed}),
		"our other word":   l.Settle(&Usage{Outcome: Lost}),
		"negative loss":    l.Lost(9, month, -1),
		"loss of our own":  l.Lost(1, month, 1),
		"a second Log":     second(Open(testConfig(d, 2))),
		"no node":          second(Open(Config{Dir: "x", Incarnation: 1, Logger: quiet()})),
		"no incarnation":   second(Open(Config{Dir: "x", Node: "a", Logger: quiet()})),
		"negative segment": second(Open(Config{Dir: "x", Node: "a", Incarnation: 1, Logger: quiet(), Segment: -1})),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	mustClose(t, l)
	if _, err := Open(testConfig(d, 1)); err == nil || !strings.Contains(err.Error(), "used before") {
		t.Errorf("an incarnation that was used: %v", err)
	}
	if l, err := Open(testConfig(d, 2)); err != nil { // the refusal before gave the lock back
		t.Error(err)
	} else {
		mustClose(t, l)
	}
}

func second(_ *Log, err error) error { return err }

// TestNewerVersion: a segment of a later form is nothing to guess about.
func TestNewerVersion(t *testing.T) {
	d := newDisk()
	o := origin{1, 1}
	rec, from := begin(nil, recHead)
	d.names["/usage/"+o.name()] = &inode{data: o.appendFrame(nil, 0, end(putHead(rec, &head{version: version + 1, segment: 1, incarnation: 1}), from))}
	if _, err := Open(testConfig(d, 2)); !errors.Is(err, errNewer) {
		t.Errorf("open: %v", err)
	}
}

// TestBounds: what is bounded refuses, and goes on when there is room.
func TestBounds(t *testing.T) {
	d, now := newDisk(), noon
	c := testConfig(d, 1)
	reg := prometheus.NewRegistry()
	c.Now, c.Registerer = func() time.Time { return now }, reg
	l := mustOpen(t, c)
	defer abandon(l)
	for range maxOpen {
		reserve(t, l, month, 1)
	}
	if err := l.Reserve(&Reservation{}); !errors.Is(err, ErrFull) {
		t.Errorf("%d are open, and one more: %v", maxOpen, err)
	}
	for id := range uint64(maxOpen) {
		u := Usage{ID: id + 1, Time: noon, Outcome: "ok", Parts: []Part{{Account{Tenant: "t", Start: 1, End: noon.UnixNano() + int64(id)}, 1}}}
		if id%2 == 0 {
			u.Parts = append(u.Parts, u.Parts[0], u.Parts[0])
			u.Parts[1].Subject, u.Parts[2].Subject = "x", "y"
		}
		if err := l.Settle(&u); err != nil {
			t.Fatal(err)
		}
	}
	seen := Part{Account{Tenant: "t", Start: 1, End: noon.UnixNano()}, 1}
	for name, r := range map[string]*Reservation{"the first": {Parts: []Part{seen, {month, 1}}}, "the last": {Parts: []Part{{month, 1}, seen}}} {
		if err := l.Reserve(r); !errors.Is(err, ErrFull) {
			t.Errorf("%d accounts, and one more beside %s: %v", len(l.own.totals), name, err)
		}
	}
	for _, r := range []*Reservation{{}, {Parts: []Part{seen}}} { // who brings none is not shut out by who did
		if err := errors.Join(l.Reserve(r), l.Settle(&Usage{ID: r.ID, Time: noon, Outcome: "ok", Parts: r.Parts})); err != nil {
			t.Errorf("%d accounts, and none more: %v", len(l.own.totals), err)
		}
	}
	now = noon.Add(2 * time.Hour)
	l.round()
	held := Account{Tenant: "t", Start: 1, End: 2}
	id := reserve(t, l, held, 1)
	if len(l.own.totals) != 0 {
		t.Errorf("%d accounts are left", len(l.own.totals))
	}
	settle(t, l, id, month, 0)
	d.room = 0
	for range maxKept + 5 {
		if err := l.Settle(&Usage{Time: noon, Outcome: "ok"}); err != nil {
			t.Fatal(err)
		}
	}
	if n := value(t, reg, "headgate_journal_dropped_total"); len(l.kept) != maxKept || n != 5 {
		t.Errorf("%d are kept, %v dropped", len(l.kept), n)
	}
	d.room = -1
	for range maxKept/maxRetry + 1 {
		l.round()
	}
	if l.failing != nil || len(l.kept) != 0 {
		t.Errorf("failing %v, %d are kept", l.failing, len(l.kept))
	}
}

// TestTrimKeepsWhatIsOpen: an account with an open request is not forgotten.
func TestTrimKeepsWhatIsOpen(t *testing.T) {
	l := mustOpen(t, testConfig(newDisk(), 1))
	defer abandon(l)
	old, gone := Account{Tenant: "t", Start: 1, End: 2}, Account{Tenant: "u", Start: 1, End: 2}
	settle(t, l, reserve(t, l, old, 1), old, 1)
	settle(t, l, reserve(t, l, gone, 1), gone, 1)
	settle(t, l, reserve(t, l, month, 1), month, 1)
	reserve(t, l, old, 1)
	if err := l.own.trim(10); err != nil {
		t.Fatal(err)
	}
	if got := slices.Collect(maps.Keys(l.own.totals)); len(got) != 2 || l.own.totals[gone] != nil {
		t.Errorf("left are %v", got)
	}
}

// TestForgottenIsSaid: what was forgotten may not be what nobody spent, for whoever tells the ledger.
func TestForgottenIsSaid(t *testing.T) {
	d, now := newDisk(), noon
	open := func(incarnation uint64) *Log {
		c := testConfig(d, incarnation)
		c.Now = func() time.Time { return now }
		return mustOpen(t, c)
	}
	l := open(1)
	ended := Account{Tenant: "t", Start: 1, End: noon.UnixNano()}
	settle(t, l, reserve(t, l, ended, 1), ended, 1)
	if p := l.own.past(); p.Forgotten != 0 || len(p.Accounts) != 1 {
		t.Errorf("%+v", p)
	}
	now = noon.Add(2 * forgetAfter)
	for incarnation := uint64(2); incarnation < 5; incarnation++ {
		l.mu.Lock()
		l.rotate = true
		l.mu.Unlock()
		settle(t, l, reserve(t, l, month, 1), month, 1)
		abandon(l)
		d = d.killed()
		l = open(incarnation)
		if p := l.Unclosed()[0]; p.Forgotten != ended.End+1 || len(p.Accounts) != 1 || p.Accounts[0].Account != month {
			t.Errorf("process %d finds %+v", incarnation, p)
		}
	}
	abandon(l)
}

// TestRetention removes whole segments, the oldest first, and none that a recovery may want.
func TestRetention(t *testing.T) {
	d, now := newDisk(), noon
	c := testConfig(d, 1)
	c.Segment, c.Now, c.Retention, c.MaxBytes = 1000, func() time.Time { return now }, 100*24*time.Hour, 1<<30
	l := mustOpen(t, c)
	open := reserve(t, l, month, 1) // in segment 1
	for range 60 {
		settle(t, l, reserve(t, l, month, 1), month, 1)
		now = now.Add(24 * time.Hour)
	}
	numbers := func(l *Log) (all []uint64) {
		files, _, err := l.folder.segments()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range files {
			all = append(all, s.segment)
		}
		return all
	}
	l.round()
	last := l.current.segment
	if got := numbers(l); len(got) != int(last) || last < 4 {
		t.Fatalf("segments %v", got)
	}
	now = now.Add(300 * 24 * time.Hour)
	l.prune()
	if got, want := numbers(l), []uint64{1, last - 1, last}; !slices.Equal(got, want) {
		t.Fatalf("after the retention %v, want %v", got, want)
	}
	settle(t, l, open, month, 1)
	now = now.Add(time.Hour)
	l.age()
	settle(t, l, reserve(t, l, month, 1), month, 1)
	if l.current.segment != last+1 {
		t.Errorf("a segment of %d days is still written", 300)
	}
	abandon(l)
	d = d.killed()
	c.FS, c.Incarnation, c.MaxBytes = d, 2, 1
	l = mustOpen(t, c)
	if got, want := numbers(l), []uint64{last, last + 1, last + 2}; !slices.Equal(got, want) {
		t.Errorf("of an unclosed process %v, want %v", got, want)
	}
	if past := l.Unclosed(); past[0].Accounts[0].Settled != 62 {
		t.Errorf("%+v", past)
	}
	if err := l.Closed(1); err != nil {
		t.Fatal(err)
	}
	l.prune()
	if got, want := numbers(l), []uint64{last + 1, last + 2}; !slices.Equal(got, want) {
		t.Errorf("of a closed one %v, want %v", got, want)
	}
	mustClose(t, l)
}

// TestQuery picks by names and times, also where segments are passed over.
func TestQuery(t *testing.T) {
	d := newDisk()
	c := testConfig(d, 1)
	c.Segment = 400
	l := mustOpen(t, c)
	defer mustClose(t, l)
	for i := range 40 {
		u := Usage{
			Time: noon.Add(time.Duration(i) * time.Hour), RequestID: fmt.Sprint(i), Tenant: fmt.Sprint("t", i%2), Key: fmt.Sprint("k", i%4),
			User: fmt.Sprint("u", i%5), Model: fmt.Sprint("m", i%8), Outcome: "ok",
		}
		if i == 7 {
			u.Outcome = Cancelled
		}
		if err := l.Settle(&u); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.segments) < 4 {
		t.Fatalf("%d segments", len(l.segments))
	}
	for _, c := range []struct {
		q    Query
		want []int
	}{
		{Query{From: noon.Add(37 * time.Hour)}, []int{37, 38, 39}},
		{Query{Until: noon.Add(2 * time.Hour)}, []int{0, 1}},
		{Query{From: noon.Add(6 * time.Hour), Until: noon.Add(9 * time.Hour)}, []int{6, 8}},
		{Query{Model: "m3"}, []int{3, 11, 19, 27, 35}},
		{Query{Tenant: "t1", Key: "k1", User: "u0", From: noon.Add(time.Hour)}, []int{5, 25}},
		{Query{Key: "k9"}, nil},
		{Query{From: noon.Add(100 * time.Hour)}, nil},
	} {
		var got []int
		for _, u := range readAll(t, l, c.q) {
			var n int
			if _, err := fmt.Sscan(u.RequestID, &n); err != nil || u.Node != "a" || u.Incarnation != 1 {
				t.Fatalf("%+v", u)
			}
			got = append(got, n)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.q, got, c.want)
		}
	}
	for i := range 40 {
		at := noon.Add(time.Duration(i) * time.Hour)
		if got := readAll(t, l, Query{From: at, Until: at.Add(1)}); i != 7 && (len(got) != 1 || got[0].RequestID != fmt.Sprint(i)) {
			t.Errorf("request %d by its time: %+v", i, got)
		}
	}
	stop := errors.New("stop")
	if err := l.Read(t.Context(), Query{}, func(*Usage) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the reader's error: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Read(ctx, Query{}, func(*Usage) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that ended: %v", err)
	}
}

// TestReadDir reads a folder in use without a trace, and one that is damaged with a warning.
func TestReadDir(t *testing.T) {
	dir := t.TempDir() + "/usage"
	c := testConfig(nil, 1)
	c.FS, c.Dir = nil, dir
	l := mustOpen(t, c)
	for i := range 10 {
		if err := l.Settle(&Usage{Time: noon, RequestID: fmt.Sprint(i), Tenant: "t", Outcome: "ok"}); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	count := func(*Usage) error { n++; return nil }
	if err := ReadDir(t.Context(), dir, quiet(), Query{Tenant: "t"}, count); err != nil || n != 10 {
		t.Errorf("%d requests, %v", n, err)
	}
	mustClose(t, l)
	if err := ReadDir(t.Context(), dir+"/nowhere", quiet(), Query{}, count); err == nil {
		t.Error("read a folder that is not there")
	}
}
