package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// step is something that a test's process does with request n.
type step struct {
	settle bool
	n      int
	amount int64
}

func (s step) account() Account { return Account{Tenant: "t", Budget: fmt.Sprint("b", s.n%2)} }

// script is a small life: some requests are settled, the fourth and the sixth stand open.
func script() []step {
	return []step{
		{false, 1, 100}, {false, 2, 200}, {true, 1, 70}, {false, 3, 300}, {false, 4, 400}, {true, 3, 0}, {true, 2, 250}, {false, 5, 500}, {true, 5, 500}, {false, 6, 600},
	}
}

// play lets l do the steps until it is killed, and gives those that succeeded.
func play(l *Log, d *disk, steps []step) (done []step) {
	ids := map[int]uint64{}
	for _, s := range steps {
		var err error
		if s.settle {
			u := &Usage{ID: ids[s.n], Time: noon, Tenant: "t", Outcome: "ok", Cost: s.amount}
			if s.amount > 0 {
				u.Parts = []Part{{s.account(), s.amount}}
			}
			err = l.Settle(u)
		} else {
			r := &Reservation{Time: noon, Tenant: "t", User: fmt.Sprint("user ", s.n), Cost: s.amount, Parts: []Part{{s.account(), s.amount}}}
			err = l.Reserve(r)
			ids[s.n] = r.ID
		}
		if d.dead {
			return done
		}
		if err == nil {
			done = append(done, s)
		}
	}
	return done
}

// books of steps: what settled, and what stands open in full.
func booksOf(steps []step) map[Account]int64 {
	sum, open := map[Account]int64{}, map[int]int64{}
	for _, s := range steps {
		if !s.settle {
			open[s.n] = s.amount
			continue
		}
		delete(open, s.n)
		if s.amount > 0 {
			sum[s.account()] += s.amount
		}
	}
	for n, amount := range open {
		sum[step{n: n}.account()] += amount
	}
	return sum
}

func sumsOf(p *Past) map[Account]int64 {
	sum := map[Account]int64{}
	for _, a := range p.Accounts {
		sum[a.Account] = a.Settled + a.Open
	}
	return sum
}

// lived is a disk with the script's life on it, the name of its segment, and the ends of the
// records in it.
func lived(t *testing.T) (d *disk, name string, ends []int64) {
	t.Helper()
	d = newDisk()
	l, err := Open(testConfig(d, 1))
	if err != nil {
		t.Fatal(err)
	}
	if done := play(l, d, script()); len(done) != len(script()) {
		t.Fatal("the script does not succeed")
	}
	name = "/usage/" + l.current.name()
	abandon(l)
	d = d.killed()
	node := d.names[name]
	in := newScanner(bytes.NewReader(node.data), l.current.origin, int64(len(node.data)))
	for {
		if _, _, err := in.next(); err != nil {
			break
		}
		ends = append(ends, in.at)
	}
	if len(ends) != 2+len(script()) || ends[len(ends)-1] != int64(len(node.data)) {
		t.Fatalf("records end at %v of %d", ends, len(node.data))
	}
	return d, name, ends
}

// with is the disk with other bytes in one file.
func (d *disk) with(name string, data []byte) *disk {
	next := newDisk()
	next.names = maps.Clone(d.names)
	next.names[name] = &inode{data: data, synced: len(data)}
	return next
}

// reopen opens a disk as a later process, reads everything, and gives what it says of
// incarnation 1, nil if nothing.
func reopen(t *testing.T, d *disk, incarnation uint64) (past *Past, usage map[Account]int64) {
	t.Helper()
	l, err := Open(testConfig(d, incarnation))
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	defer abandon(l)
	usage = map[Account]int64{}
	if err := l.Read(context.Background(), Query{}, func(u *Usage) error {
		if u.Incarnation == 1 {
			for _, p := range u.Parts {
				usage[p.Account] += p.Amount
			}
		}
		return nil
	}); err != nil {
		t.Fatalf("read: %v", err)
	}
	for _, p := range l.Unclosed() {
		if p.Incarnation == 1 {
			past = &p
		}
	}
	return past, usage
}

// TestTornAtEveryByte: of a file that ends anywhere, the records that are whole count, and
// nothing else; what is torn makes the process damaged.
func TestTornAtEveryByte(t *testing.T) {
	d, name, ends := lived(t)
	whole := d.names[name].data
	for cut := range len(whole) + 1 {
		torn := d.with(name, bytes.Clone(whole[:cut]))
		past, usage := reopen(t, torn, 2)
		if past == nil {
			t.Fatalf("cut at %d: the process is forgotten", cut)
		}
		records := 0
		for _, e := range ends[2:] {
			if int64(cut) >= e {
				records++
			}
		}
		if want := booksOf(script()[:records]); !maps.Equal(sumsOf(past), want) || !maps.Equal(usage, want) {
			t.Fatalf("cut at %d: the books are %v, the usage %v, want %v", cut, sumsOf(past), usage, want)
		}
		boundary := slices.Contains(ends[1:], int64(cut))
		if boundary != (past.Damaged == "") {
			t.Fatalf("cut at %d of %v: damaged is %q", cut, ends, past.Damaged)
		}
		again, usage2 := reopen(t, torn.killed(), 3)
		if !slices.Equal(again.Accounts, past.Accounts) || (again.Damaged == "") != (past.Damaged == "") || !maps.Equal(usage, usage2) {
			t.Fatalf("cut at %d: opened again it is %v, before %v", cut, again, past)
		}
	}
}

// TestEveryBitFlipped: a flipped bit anywhere is noticed, costs the record it is in, and
// invents nothing.
func TestEveryBitFlipped(t *testing.T) {
	d, name, ends := lived(t)
	whole := d.names[name].data
	for at := range whole {
		hit := slices.IndexFunc(ends, func(e int64) bool { return int64(at) < e })
		left := script()
		if hit >= 2 {
			left = slices.Delete(left, hit-2, hit-1)
		}
		want := booksOf(left) // a usage whose reservation is gone counts, too
		for bit := range 8 {
			data := bytes.Clone(whole)
			data[at] ^= 1 << bit
			flipped := d.with(name, data)
			past, usage := reopen(t, flipped, 2)
			if past == nil || past.Damaged == "" {
				t.Fatalf("bit %d of byte %d: not noticed", bit, at)
			}
			if !maps.Equal(sumsOf(past), want) || !maps.Equal(usage, want) {
				t.Fatalf("bit %d of byte %d (record %d): the books are %v, the usage %v, want %v", bit, at, hit, sumsOf(past), usage, want)
			}
		}
	}
}

// TestFlippedCheckpoint: where a later process's beginning is damaged, the books are those
// of the segment before and all that followed.
func TestFlippedCheckpoint(t *testing.T) {
	d, _, _ := lived(t)
	before, usage := reopen(t, d, 2)
	d = d.killed()
	name := "/usage/" + (origin{2, 2}).name()
	whole := d.names[name].data
	for at := range whole {
		data := bytes.Clone(whole)
		data[at] ^= 0x10
		flipped := d.with(name, data)
		past, usage2 := reopen(t, flipped, 3)
		// The crashed record may be the one that is lost; then it is written again.
		if past == nil || !maps.Equal(sumsOf(past), sumsOf(before)) || !maps.Equal(usage, usage2) {
			t.Fatalf("byte %d: the books are %v, the usage %v, before %v and %v", at, past, usage2, before, usage)
		}
	}
}

// TestStrayBlocks: frames that are whole but stand elsewhere than they were written for are
// not believed: an old block of the disk, or one of another segment of the same process.
func TestStrayBlocks(t *testing.T) {
	d, name, ends := lived(t)
	whole := d.names[name].data
	stray := whole[ends[1]:ends[len(ends)-1]] // all reservations and usages
	past, usage := reopen(t, d.with(name, slices.Concat(whole, stray)), 2)
	if want := booksOf(script()); past.Damaged == "" || !maps.Equal(sumsOf(past), want) || !maps.Equal(usage, want) {
		t.Errorf("at another offset: %+v, usage %v, want %v", past, usage, want)
	}
	next := origin{2, 1}
	other := d.with("/usage/"+next.name(), whole)
	past, usage = reopen(t, other, 3)
	if want := booksOf(script()); past.Damaged == "" || !maps.Equal(sumsOf(past), want) || !maps.Equal(usage, want) {
		t.Errorf("in another segment: %+v, usage %v, want %v", past, usage, want)
	}
}

// TestMissing: a segment that is gone, or that does not know its own process, is damage.
func TestMissing(t *testing.T) {
	d, name, _ := lived(t)
	o := origin{3, 9}
	rec, from := begin(nil, recHead)
	text := o.appendFrame(nil, 0, end(putHead(rec, &head{version: version, segment: 3, incarnation: 9, node: "a", boot: "boot 1"}), from))
	l, err := Open(testConfig(d.with("/usage/"+o.name(), text), 10))
	if err != nil {
		t.Fatal(err)
	}
	abandon(l)
	if past := l.Unclosed(); len(past) != 1 || past[0].Incarnation != 9 || past[0].Damaged == "" {
		t.Errorf("without a checkpoint of its own: %+v", past)
	}
	// Segment 2 is gone, and the beginning of 3 is damaged: the books go back to 1.
	gone := d.with("/usage/"+o.name(), text[:len(text)-1])
	past, _ := reopen(t, gone, 11)
	if past == nil || !strings.Contains(past.Damaged, "missing") || !maps.Equal(sumsOf(past), booksOf(script())) {
		t.Errorf("without segment 2 of %s: %+v", name, past)
	}
}

// TestClientBytesAreNoRecord: a user whose name is a frame gains nothing, even where the record
// it stands in is damaged.
func TestClientBytesAreNoRecord(t *testing.T) {
	d := newDisk()
	l, err := Open(testConfig(d, 1))
	if err != nil {
		t.Fatal(err)
	}
	forged, from := begin(nil, recUsage)
	forged = end(putUsage(forged, &Usage{Tenant: "victim", Outcome: "ok", Time: noon, Cost: 5}), from)
	// Once all but the incarnation is known, once all but where it will stand.
	frame := string((origin{1, 1}).appendFrame((origin{1, 77}).appendFrame(nil, 0, forged), 5, forged))
	r := &Reservation{Time: noon, Tenant: "t", User: frame, Parts: []Part{{Account{Tenant: "t"}, 9}}}
	at := int(l.current.end)
	if err := l.Reserve(r); err != nil {
		t.Fatal(err)
	}
	abandon(l)
	d = d.killed()
	name := "/usage/" + (origin{1, 1}).name()
	data := bytes.Clone(d.names[name].data)
	if !bytes.Contains(data, []byte(frame)) {
		t.Fatal("the name was cut")
	}
	data[at+20] ^= 1
	past, usage := reopen(t, d.with(name, data), 2)
	if past.Damaged == "" || len(usage) != 0 || len(past.Accounts) != 0 {
		t.Fatalf("%+v, usage %v", past, usage)
	}
}

// TestFullDisk: a disk that fills at any byte refuses reservations and keeps what is settled;
// when there is room again, the books are exact, and nothing is damaged.
func TestFullDisk(t *testing.T) {
	for room := 0; ; room++ {
		d := newDisk()
		c := testConfig(d, 1)
		c.Segment = 400
		l, err := Open(c)
		if err != nil {
			t.Fatal(err)
		}
		d.room = room
		done := play(l, d, script())
		for _, s := range script() {
			reserved := slices.ContainsFunc(done, func(o step) bool { return o.n == s.n && !o.settle })
			if s.settle && reserved && !slices.Contains(done, s) {
				t.Fatalf("%d bytes: settling %d failed", room, s.n)
			}
		}
		all := len(done) == len(script())
		if r := (&Reservation{Parts: []Part{{Account{Tenant: "t"}, 1}}}); !all && l.failing != nil {
			if err := l.Reserve(r); !errors.Is(err, ErrFailing) {
				t.Fatalf("%d bytes: reserved on a full disk: %v", room, err)
			}
		}
		d.room = -1
		l.round()
		l.round()
		if l.failing != nil || len(l.kept) > 0 {
			t.Fatalf("%d bytes: with room again it fails: %v, %d kept", room, l.failing, len(l.kept))
		}
		abandon(l)
		past, usage := reopen(t, d.killed(), 2)
		if want := booksOf(done); past.Damaged != "" || !maps.Equal(sumsOf(past), want) || !maps.Equal(usage, want) {
			t.Fatalf("%d bytes: %+v, usage %v, want %v", room, past, usage, want)
		}
		if all {
			return
		}
	}
}

// TestKilledInEveryOperation kills a process in each of its operations on the disk, and the
// next one in each of those of its recovery; in the end the books are the same.
func TestKilledInEveryOperation(t *testing.T) {
	for fuse := 1; ; fuse++ {
		d := newDisk()
		c := testConfig(d, 1)
		c.Segment = 400
		d.fuse, d.torn = fuse, 40
		var done []step
		l, err := Open(c)
		if err == nil {
			done = play(l, d, script())
			abandon(l)
		}
		lived := !d.dead
		d = d.killed()
		with := booksOf(script()[:min(len(done)+1, len(script()))]) // and what it was killed in
		var first *Past
		for again := 1; ; again++ {
			d.fuse, d.torn = again, 60
			next, err := Open(testConfig(d, uint64(again)+1))
			if err == nil {
				abandon(next)
			}
			ended := !d.dead
			d = d.killed()
			past, usage := reopen(t, d, uint64(again)+1000)
			d = d.killed()
			if past == nil {
				if len(done) > 0 {
					t.Fatalf("fuse %d, %d: forgotten", fuse, again)
				}
			} else {
				sums := sumsOf(past)
				if !maps.Equal(sums, usage) || !maps.Equal(sums, booksOf(done)) && !maps.Equal(sums, with) {
					t.Fatalf("fuse %d, %d: the books are %v, the usage %v, acknowledged were %v, and perhaps %v", fuse, again, sums, usage, booksOf(done), with)
				}
				if first != nil && !slices.Equal(first.Accounts, past.Accounts) {
					t.Fatalf("fuse %d, %d: the books are %v, before %v", fuse, again, past, first)
				}
				first = past
			}
			if ended {
				break
			}
		}
		if lived {
			return
		}
	}
}
