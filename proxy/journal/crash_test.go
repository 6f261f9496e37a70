package journal

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var noon = time.Date(2026, 5, 3, 12, 0, 0, 0, time.UTC)

// never lets the syncer sleep: tests call round themselves.
const never = 1000 * time.Hour

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func testConfig(d *disk, incarnation uint64) Config {
	return Config{
		Dir: "/usage", Node: "a", Incarnation: incarnation, BootID: "boot 1", FS: d, SyncEvery: never,
		Now: func() time.Time { return noon }, Logger: quiet(),
	}
}

// abandon ends a Log's goroutine as a kill does: nothing reaches the disk any more.
func abandon(l *Log) {
	close(l.quit)
	<-l.synced
}

// span is what a request may count for an account: once it is known how it ended, low = high.
type span struct{ low, high int64 }

// request is one as the model knows it.
type request struct {
	id      uint64
	account Account
	span    span
	full    int64 // what a crash counts
	open    bool
}

// process is one incarnation of the model.
type process struct {
	incarnation uint64
	requests    map[uint64]*request
	maybe       []*request // refused, but the disk was not asked to take it back
	torn        bool       // it may have left torn bytes
	power       bool       // it died with the machine
	clean       bool
	tried       bool  // a later one began to read it
	read        bool  // a later one has: nothing of it can be lost any more
	past        *Past // as first recovered
}

// world is a folder, the processes that used it, and the truth about them.
type world struct {
	t     *rapid.T
	disk  *disk
	boot  int
	log   *Log
	self  *process
	all   []*process
	each  bool // SyncEach
	next  uint64
	power bool // there was a power cut: usage may be lost, not money
}

func (w *world) config() Config {
	c := testConfig(w.disk, w.next)
	c.BootID, c.SyncEach, c.Segment = fmt.Sprint("boot ", w.boot), w.each, 2000
	return c
}

// open starts processes until one survives its start.
func (w *world) open() {
	for try := 0; ; try++ {
		w.next++
		p := &process{incarnation: w.next, requests: map[uint64]*request{}}
		for _, q := range w.all {
			q.tried = true
		}
		w.disk.fuse, w.disk.torn = 0, rapid.IntRange(0, 100).Draw(w.t, "torn")
		if try < 3 && rapid.Bool().Draw(w.t, "killed while it opens") {
			w.disk.fuse = rapid.IntRange(1, 12).Draw(w.t, "fuse")
		}
		l, err := Open(w.config())
		if err != nil && !w.disk.dead {
			w.t.Fatalf("open: %v", err)
		}
		w.all = append(w.all, p)
		if err == nil && !w.disk.dead {
			w.disk.fuse = 0
			w.log, w.self = l, p
			w.check()
			return
		}
		if err == nil {
			abandon(l)
		}
		p.torn = true
		w.die(p)
	}
}

// die lets the process end, and perhaps the machine.
func (w *world) die(p *process) {
	if rapid.IntRange(0, 4).Draw(w.t, "power cut") == 0 {
		w.disk = w.disk.cut(func(n int) int { return rapid.IntRange(0, n).Draw(w.t, "left") })
		w.boot++
		w.power = true
		for _, q := range w.all {
			if !q.clean && !q.read {
				q.power = true
			}
		}
		return
	}
	w.disk = w.disk.killed()
}

// check compares the books with the truth.
func (w *world) check() {
	found := map[uint64]*Past{}
	for _, p := range w.log.Unclosed() {
		found[p.Incarnation] = &p
	}
	for _, p := range w.all {
		got := found[p.incarnation]
		if p == w.self || p.past == nil && got == nil && len(p.requests) == 0 {
			continue // a process that never came as far as to a segment
		}
		if got == nil && !p.power {
			w.t.Fatalf("incarnation %d is not among the unclosed", p.incarnation)
		}
		if got != nil {
			w.checkPast(p, got)
			p.past = got
		}
		p.read = true
	}
	w.checkUsage()
}

func (w *world) checkPast(p *process, got *Past) {
	if p.power && got.Damaged == "" {
		if !p.tried || p.read {
			w.t.Fatalf("incarnation %d: the machine was started again, and it is not damaged", p.incarnation)
		}
		p.power = false // who was killed while it opened had read it
	}
	low, high := map[Account]int64{}, map[Account]int64{}
	for _, r := range slices.Concat(slices.Collect(maps.Values(p.requests)), p.maybe) {
		low[r.account] += r.span.low
		high[r.account] += r.span.high
		if p.power { // the record of how it ended may be lost
			high[r.account] += r.full - r.span.high
		}
	}
	for _, a := range got.Accounts {
		sum := a.Settled + a.Open
		if sum > high[a.Account] {
			w.t.Fatalf("incarnation %d invents: account %v has %d, at most %d", p.incarnation, a.Account, sum, high[a.Account])
		}
		if sum < low[a.Account] && !p.power {
			w.t.Fatalf("incarnation %d: account %v has %d, at least %d", p.incarnation, a.Account, sum, low[a.Account])
		}
		delete(low, a.Account)
	}
	for a, n := range low {
		if n > 0 && !p.power {
			w.t.Fatalf("incarnation %d: account %v is missing, it has at least %d", p.incarnation, a, n)
		}
	}
	if !p.power && !p.torn && got.Damaged != "" {
		w.t.Fatalf("incarnation %d is damaged: %s", p.incarnation, got.Damaged)
	}
	if p.read && p.past != nil && !slices.Equal(p.past.Accounts, got.Accounts) {
		w.t.Fatalf("incarnation %d: opened again, the books are\n%v\nbefore\n%v", p.incarnation, got.Accounts, p.past.Accounts)
	}
}

// checkUsage holds the usage log to the books: each request once, and the same sums.
func (w *world) checkUsage() {
	type ref struct{ incarnation, id uint64 }
	seen, sums := map[ref]bool{}, map[uint64]map[Account]int64{}
	err := w.log.Read(context.Background(), Query{}, func(u *Usage) error {
		if k := (ref{u.Incarnation, u.ID}); seen[k] {
			w.t.Fatalf("request %v stands there twice", k)
		} else {
			seen[k] = true
		}
		if sums[u.Incarnation] == nil {
			sums[u.Incarnation] = map[Account]int64{}
		}
		for _, p := range u.Parts {
			sums[u.Incarnation][p.Account] += p.Amount
		}
		return nil
	})
	if err != nil {
		w.t.Fatalf("read: %v", err)
	}
	if w.power {
		return
	}
	for _, p := range w.log.Unclosed() {
		for _, a := range p.Accounts {
			if got := sums[p.Incarnation][a.Account]; got != a.Settled+a.Open {
				w.t.Fatalf("incarnation %d, account %v: the usage log has %d, the books %d", p.Incarnation, a.Account, got, a.Settled+a.Open)
			}
		}
	}
}

func (w *world) reserve() {
	a := Account{Tenant: "t", Budget: rapid.SampledFrom([]string{"month", "day"}).Draw(w.t, "budget"), Subject: "s"}
	r := &request{account: a, open: true}
	full := rapid.Int64Range(1, 100).Draw(w.t, "most")
	r.span, r.full = span{full, full}, full
	rec := Reservation{Time: noon, RequestID: "r", Tenant: "t", Cost: full, Parts: []Part{{a, full}}}
	if rapid.Bool().Draw(w.t, "long") {
		rec.Model = fmt.Sprintf("%0200d", 0)
	}
	err := w.log.Reserve(&rec)
	if err == nil {
		r.id = rec.ID
		w.self.requests[r.id] = r
		return
	}
	// In the file all the same: the write was cut, and the cut was not, or it was not synced.
	if w.disk.dead || w.self.torn || w.each {
		r.span.low = 0
		w.self.maybe = append(w.self.maybe, r)
	}
}

func (w *world) settle() {
	var open []*request
	for _, id := range slices.Sorted(maps.Keys(w.self.requests)) {
		if r := w.self.requests[id]; r.open {
			open = append(open, r)
		}
	}
	if len(open) == 0 {
		return
	}
	r := rapid.SampledFrom(open).Draw(w.t, "which")
	u := Usage{ID: r.id, Time: noon, RequestID: "r", Tenant: "t", Outcome: "ok"}
	actual := rapid.Int64Range(0, r.span.high).Draw(w.t, "actual")
	if actual == 0 {
		u.Outcome = Cancelled
	} else {
		u.Cost, u.Parts = actual, []Part{{r.account, actual}}
	}
	if err := w.log.Settle(&u); err != nil {
		w.t.Fatalf("settle: %v", err)
	}
	r.open, r.span.low = false, actual
	if err := w.log.Settle(&u); err == nil {
		w.t.Fatal("settled twice")
	}
	w.know()
}

// know narrows what is settled, once the disk has it all.
func (w *world) know() {
	w.log.mu.Lock()
	sure := w.log.failing == nil && len(w.log.kept) == 0 && !w.disk.dead
	w.log.mu.Unlock()
	for _, r := range w.self.requests {
		if !r.open && sure {
			r.span.high = r.span.low
		}
	}
}

// disturb lets the disk refuse, or work again.
func (w *world) disturb() {
	w.disk.room, w.disk.fails = -1, map[string]bool{}
	switch rapid.IntRange(0, 4).Draw(w.t, "trouble") {
	case 1:
		w.disk.room = rapid.IntRange(0, 600).Draw(w.t, "room")
	case 2:
		w.disk.fails["sync"] = true
	case 3:
		w.disk.room = rapid.IntRange(0, 600).Draw(w.t, "room")
		w.disk.fails["truncate"] = true
		w.self.torn = true
	case 4:
		w.disk.fails["lie"], w.disk.fails["truncate"] = true, true
		w.self.torn = true
	}
}

func (w *world) run(steps int) {
	for range steps {
		if w.disk.dead {
			break
		}
		switch rapid.IntRange(0, 9).Draw(w.t, "step") {
		case 0, 1, 2, 3:
			w.reserve()
		case 4, 5, 6:
			w.settle()
		case 7:
			w.log.round()
			w.know()
		case 8:
			w.disturb()
		case 9:
			if rapid.IntRange(0, 3).Draw(w.t, "arm") == 0 {
				w.disk.fuse = rapid.IntRange(1, 8).Draw(w.t, "fuse")
				w.self.torn = true // it dies in the middle of something
			}
		}
	}
}

// TestCrashes runs processes that die at any moment, on disks that fill and fail, with
// machines that lose their power, and holds every start's books to the truth.
func TestCrashes(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := &world{t: rt, disk: newDisk(), each: rapid.Bool().Draw(rt, "sync each")}
		for range rapid.IntRange(1, 5).Draw(rt, "lives") {
			w.open()
			w.run(rapid.IntRange(0, 40).Draw(rt, "steps"))
			if !w.disk.dead && rapid.IntRange(0, 3).Draw(rt, "clean") == 0 {
				w.stop()
			} else {
				abandon(w.log)
			}
			w.die(w.self)
		}
		w.open()
		abandon(w.log)
	})
}

// stop ends the process as it should end.
func (w *world) stop() {
	w.disk.room, w.disk.fails, w.disk.fuse = -1, map[string]bool{}, 0
	if err := w.log.Close(context.Background()); err != nil {
		w.t.Fatalf("close: %v", err)
	}
	w.knowAll()
	w.self.clean = true
}

// knowAll narrows everything after a clean stop.
func (w *world) knowAll() {
	for _, r := range w.self.requests {
		if !r.open {
			r.span.high = r.span.low
		}
	}
	for _, r := range w.self.maybe {
		r.span.high = 0
	}
}
