package lease_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"headgate/lease"
	"headgate/limiter"

	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write testdata anew")

// goldenFile holds levels in the form of version 1, saved at start.
const goldenFile = "testdata/levels-1.bin"

func saved(t rapid.TB, l *lease.Local, now int64) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := l.Save(now, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func loaded(t rapid.TB, now int64, text []byte) *lease.Local {
	t.Helper()
	l := newLocal(t, lease.Config{})
	if n, err := l.Load(now, bytes.NewReader(text)); err != nil || n != l.Len() {
		t.Fatalf("%d buckets of %d: %v", n, l.Len(), err)
	}
	return l
}

// take charges cost to one bucket and returns what is left.
func take(t rapid.TB, l *lease.Local, now int64, c limiter.Charge) int64 {
	t.Helper()
	var ds [1]limiter.Decision
	if refused := l.Take(now, []limiter.Charge{c}, ds[:]); refused != -1 {
		t.Fatalf("%v: refused: %+v", c.Key, ds[0])
	}
	return ds[0].Remaining
}

// spentTable has one bucket of each algorithm, keys of several lengths, and debt; always the
// same.
func spentTable(t rapid.TB) *lease.Local {
	l := newLocal(t, lease.Config{Shards: 1})
	long := strings.Repeat("long", 60)
	for i, limit := range every {
		name := limit.Algorithm.String()
		take(t, l, start-int64(40*time.Second), charge("acme", name, "", limit, 2))
		take(t, l, start, charge("acme", name, "", limit, int64(i)+1))
		take(t, l, start, charge("", name, long, limit, 3))
		debt := charge("acme", name, "debt", limit, 25)
		debt.Oversize = limiter.Debt
		take(t, l, start, debt)
	}
	fraction := &limiter.Limit{Rate: limiter.Rate{Count: 7, Per: time.Second}, Burst: 9, Revision: 12}
	take(t, l, start, charge("acme", "fraction", "", fraction, 5))
	return l
}

// sameLevels but for semaphores.
func sameLevels(t rapid.TB, now int64, a, b *lease.Local) {
	t.Helper()
	for _, tenant := range []string{"", "acme"} {
		var as []lease.Level
		for _, l := range a.Levels(now, tenant) {
			if l.Limit.Revision = 0; l.Limit.Algorithm != limiter.Semaphore && l.Reset > 0 {
				as = append(as, l)
			}
		}
		bs := b.Levels(now, tenant)
		for i := range bs {
			bs[i].Limit.Revision = 0
		}
		bs = deleteFull(bs)
		if fmt.Sprint(as) != fmt.Sprint(bs) {
			t.Fatalf("at %d levels of %q are\n%v, want\n%v", now, tenant, bs, as)
		}
	}
}

func deleteFull(ls []lease.Level) (out []lease.Level) {
	for _, l := range ls {
		if l.Reset > 0 {
			out = append(out, l)
		}
	}
	return out
}

func TestLoadIsWhatWasSaved(t *testing.T) {
	l := spentTable(t)
	text := saved(t, l, start)
	again := loaded(t, start, text)
	if again.Len() != 13 { // all but the semaphores'
		t.Errorf("%d buckets", again.Len())
	}
	for _, after := range []time.Duration{0, time.Second, 19 * time.Second, 21 * time.Second, time.Minute, 2 * time.Minute, time.Hour} {
		sameLevels(t, start+int64(after), l, again)
	}
	if empty := saved(t, newLocal(t, lease.Config{}), start); loaded(t, start, empty).Len() != 0 {
		t.Error("an empty table has buckets")
	}
	if full := saved(t, l, start+int64(time.Hour)); loaded(t, start+int64(time.Hour), full).Len() != 0 {
		t.Error("full buckets were saved")
	}
	if _, err := again.Load(start, bytes.NewReader(text)); err == nil || again.Len() != 13 {
		t.Errorf("loaded twice: %v, %d buckets", err, again.Len())
	}
}

// Time between Save and Load gives a GCRA nothing; windows and logs go by the clock, also by
// one that was set back.
func TestTimeBetweenSaveAndLoad(t *testing.T) {
	l := newLocal(t, lease.Config{})
	for _, limit := range every[:4] {
		take(t, l, start, charge("a", limit.Algorithm.String(), "", limit, 10))
	}
	text := saved(t, l, start)
	toEnd := int64(time.Minute) - start%int64(time.Minute)
	for _, c := range []struct {
		what   string
		load   int64
		at     int64
		levels [4]int64 // of every
	}{
		{"at once", start, start, [4]int64{0, 0, 0, 0}},
		{"an hour later", start + int64(time.Hour), start + int64(time.Hour), [4]int64{0, 10, 10, 10}},
		{"an hour later, and six seconds", start + int64(time.Hour), start + int64(time.Hour+6*time.Second), [4]int64{1, 10, 10, 10}},
		{"in the next window", start + toEnd, start + toEnd, [4]int64{0, 10, 0, 0}},
		{"a second too early", start - int64(time.Second), start - int64(time.Second), [4]int64{0, 0, 0, 0}},
		{"a second too early, then in the next window", start - int64(time.Second), start + toEnd, [4]int64{min(10, (toEnd+int64(time.Second))/int64(6*time.Second)), 10, 0, 0}},
		{"a day too early", start - int64(24*time.Hour), start - int64(24*time.Hour), [4]int64{0, 0, 0, 0}},
		{"a day too early, then two minutes", start - int64(24*time.Hour), start - int64(24*time.Hour-2*time.Minute), [4]int64{10, 10, 10, 10}},
	} {
		again := loaded(t, c.load, text)
		for i, limit := range every[:4] {
			if got := level(again, c.at, charge("a", limit.Algorithm.String(), "", limit, 0)); got != c.levels[i] {
				t.Errorf("%s: %v has %d, want %d", c.what, limit.Algorithm, got, c.levels[i])
			}
		}
	}
}

// A limit of the new process binds, though the old one's had a higher revision, and keeps what
// was spent.
func TestRevisionsStartAnew(t *testing.T) {
	old, fresh := *gcra, *gcra
	old.Revision, fresh.Revision, fresh.Burst = 900, 1, 6
	l := newLocal(t, lease.Config{})
	take(t, l, start, charge("a", "l", "", &old, 4))
	again := loaded(t, start, saved(t, l, start))
	if left := take(t, again, start, charge("a", "l", "", &fresh, 1)); left != 1 {
		t.Errorf("%d left of 6 after 4 and 1", left)
	}
	if ls := again.Levels(start, "a"); len(ls) != 1 || ls[0].Limit != fresh {
		t.Errorf("%+v", ls)
	}
}

func TestEveryBucketIsLoaded(t *testing.T) {
	const many = 3000
	l := newLocal(t, lease.Config{})
	for i := range many {
		limit := *gcra
		limit.Burst += int64(i % 5)
		take(t, l, start, charge(fmt.Sprint("t", i%40), "l", fmt.Sprint(i), &limit, 1+int64(i%9)))
	}
	text := saved(t, l, start)
	small := newLocal(t, lease.Config{MaxBuckets: 10})
	if n, err := small.Load(start, bytes.NewReader(text)); n != many || err != nil {
		t.Fatalf("%d buckets: %v", n, err)
	}
	for i := range 40 {
		tenant := fmt.Sprint("t", i)
		if got, want := fmt.Sprint(small.Levels(start, tenant)), fmt.Sprint(l.Levels(start, tenant)); got != want {
			t.Fatalf("%s: %s, want %s", tenant, got, want)
		}
	}
	var ds [1]limiter.Decision
	if refused := small.Take(start, []limiter.Charge{charge("new", "l", "", gcra, 1)}, ds[:]); refused != lease.TableFull {
		t.Errorf("a new bucket above the bound: %d", refused)
	}
	if small.Sweep(start+int64(time.Hour), 1<<20); small.Len() != 0 {
		t.Errorf("%d buckets are left", small.Len())
	}
}

// Old files stay readable, and the form does not change unawares.
func TestGolden(t *testing.T) {
	l := spentTable(t)
	text := saved(t, l, start)
	if *update {
		if err := os.WriteFile(goldenFile, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(goldenFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, want) {
		t.Errorf("the form has changed; a new one needs a new version:\n%q, want\n%q", text, want)
	}
	sameLevels(t, start, l, loaded(t, start, want))
}

// Whatever is cut off, changed or added: an error that says so, and nothing is loaded.
func TestDamageLoadsNothing(t *testing.T) {
	text := saved(t, spentTable(t), start)
	check := func(what string, damaged []byte) {
		t.Helper()
		l := newLocal(t, lease.Config{})
		n, err := l.Load(start, bytes.NewReader(damaged))
		if n != 0 || !errors.Is(err, lease.ErrSaved) || l.Len() != 0 || len(l.Levels(start, "acme")) != 0 {
			t.Fatalf("%s: %d buckets of %d: %v", what, n, l.Len(), err)
		}
		if _, err := l.Load(start, bytes.NewReader(text)); err != nil || l.Len() == 0 {
			t.Fatalf("%s: the table is of no use afterwards: %v", what, err)
		}
	}
	for i := range text {
		check(fmt.Sprintf("cut at %d", i), text[:i])
		flipped := bytes.Clone(text)
		flipped[i] ^= 1 << (i % 8)
		check(fmt.Sprintf("bit %d of byte %d", i%8, i), flipped)
	}
	check("a byte more", append(bytes.Clone(text), 0))
	check("twice", append(bytes.Clone(text), text...))
}

func TestSaveAndLoadPassErrorsOn(t *testing.T) {
	broken := errors.New("broken disk")
	text := saved(t, spentTable(t), start)
	for _, n := range []int{0, 5, 30, len(text) - 1, len(text)} {
		l := newLocal(t, lease.Config{})
		_, err := l.Load(start, io.MultiReader(bytes.NewReader(text[:n]), iotest.ErrReader(broken)))
		if !errors.Is(err, broken) || errors.Is(err, lease.ErrSaved) || l.Len() != 0 {
			t.Errorf("after %d bytes: %v, %d buckets", n, err, l.Len())
		}
		if n == len(text) {
			continue
		}
		if err := spentTable(t).Save(start, &shortWriter{left: n, err: broken}); !errors.Is(err, broken) {
			t.Errorf("after %d bytes: %v", n, err)
		}
	}
	huge := newLocal(t, lease.Config{})
	take(t, huge, start, charge("a", strings.Repeat("x", 1<<20), "", gcra, 1))
	if err := huge.Save(start, io.Discard); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("a key of a megabyte: %v", err)
	}
}

type shortWriter struct {
	left int
	err  error
}

func (w *shortWriter) Write(p []byte) (int, error) {
	if w.left -= len(p); w.left < 0 {
		return 0, w.err
	}
	return len(p), nil
}

// restarts drives two tables by the same charges. One is saved and loaded every now and then,
// by processes whose revisions start anew; the other lives on. It is charged what the first one
// admits, and must admit it, too.
type restarts struct {
	restarted, living *lease.Local
	now               int64
	limits            [2]limiter.Limit // by name, as of now
	revision, all     uint64           // of this process, and of all
	open              []limiter.Charge
	openLiving        []limiter.Charge
}

func (r *restarts) charges(t *rapid.T) (ours, living limiter.Charge) {
	i := rapid.IntRange(0, 1).Draw(t, "limit")
	mine, theirs := r.limits[i], r.limits[i]
	mine.Revision, theirs.Revision = r.revision, r.all
	c := limiter.Charge{
		Key:      limiter.Key{Tenant: "a", Limit: fmt.Sprint(i), Subject: rapid.SampledFrom([]string{"", "k"}).Draw(t, "subject")},
		Cost:     rapid.Int64Range(0, 12).Draw(t, "cost"),
		Oversize: rapid.SampledFrom([]limiter.Oversize{limiter.Refuse, limiter.Debt}).Draw(t, "oversize"),
	}
	ours, living = c, c
	ours.Limit, living.Limit = &mine, &theirs
	return ours, living
}

func (r *restarts) step(t *rapid.T) {
	r.now += rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, int64(10*time.Second)), rapid.Int64Range(0, int64(2*time.Minute))).Draw(t, "step")
}

func (r *restarts) take(t *rapid.T) {
	r.step(t)
	ours, living := r.charges(t)
	var ds [1]limiter.Decision
	cs := []limiter.Charge{ours}
	admitted := r.restarted.Take(r.now, cs, ds[:]) == -1
	if !admitted {
		living.Cost = 0 // so that both meet the same limits at the same time
	}
	theirs := []limiter.Charge{living}
	if r.living.Take(r.now, theirs, ds[:]) != -1 {
		t.Fatalf("%v: what lives on refuses %d where what was restarted admits it: %+v", living.Limit, living.Cost, ds[0])
	}
	if admitted {
		r.open, r.openLiving = append(r.open, cs...), append(r.openLiving, theirs...)
	}
}

func (r *restarts) settle(t *rapid.T) {
	if len(r.open) == 0 {
		t.Skip("nothing is open")
	}
	r.step(t)
	actual := []int64{rapid.Int64Range(0, 15).Draw(t, "actual")}
	var ds [1]limiter.Decision
	r.restarted.Settle(r.now, r.open[:1], actual, ds[:])
	r.living.Settle(r.now, r.openLiving[:1], actual, ds[:])
	r.open, r.openLiving = r.open[1:], r.openLiving[1:]
}

func (r *restarts) restart(t *rapid.T) {
	for len(r.open) > 0 {
		r.settle(t)
	}
	text := saved(t, r.restarted, r.now)
	r.step(t)
	r.restarted = loaded(t, r.now, text)
	if rapid.Bool().Draw(t, "another policy") {
		r.policy(t)
	}
	r.revision, r.all = 1, r.all+1
}

func (r *restarts) policy(t *rapid.T) {
	r.revision, r.all = r.revision+1, r.all+1
	r.limits[rapid.IntRange(0, 1).Draw(t, "changed")] = drawLimit(t)
}

func drawLimit(t *rapid.T) limiter.Limit {
	l := *rapid.SampledFrom(every[:4]).Draw(t, "algorithm")
	l.Rate.Count = rapid.Int64Range(1, 15).Draw(t, "count")
	if l.Algorithm == limiter.GCRA {
		l.Burst = rapid.Int64Range(1, 15).Draw(t, "burst")
	}
	return l
}

// The restarted one admits nothing that the other would not.
func TestRestartsAdmitNoMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := &restarts{restarted: newLocal(t, lease.Config{}), living: newLocal(t, lease.Config{}), now: start, revision: 1, all: 1}
		r.limits = [2]limiter.Limit{drawLimit(t), drawLimit(t)}
		t.Repeat(map[string]func(*rapid.T){"take": r.take, "take again": r.take, "settle": r.settle, "restart": r.restart, "policy": r.policy})
	})
}

func TestFloor(t *testing.T) {
	minute := limiter.Rate{Count: 60, Per: time.Minute}
	begin := start - start%int64(time.Minute) // of a window
	at := begin + int64(20*time.Second)
	for _, c := range []struct {
		what  string
		limit limiter.Limit
		after map[time.Duration]int64 // the level, so long after the floor
	}{
		{"gcra", limiter.Limit{Rate: minute, Burst: 30}, map[time.Duration]int64{0: 0, 999 * time.Millisecond: 0, time.Second: 1, 29 * time.Second: 29, 31 * time.Second: 30, time.Hour: 30}},
		{"gcra of a minute", limiter.Limit{Rate: minute, Burst: 60}, map[time.Duration]int64{0: 0, 59 * time.Second: 59, time.Minute: 60}},
		{"gcra of more", limiter.Limit{Rate: minute, Burst: 61}, map[time.Duration]int64{0: 61}},
		{"fixed", limiter.Limit{Algorithm: limiter.FixedWindow, Rate: minute}, map[time.Duration]int64{0: 0, 39 * time.Second: 0, 40 * time.Second: 60}},
		{"fixed, a day", limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 5, Per: 24 * time.Hour}}, map[time.Duration]int64{0: 5}},
		{"sliding", limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: minute}, map[time.Duration]int64{0: 0, 40 * time.Second: 0, 50 * time.Second: 10, 100 * time.Second: 60}},
		{"log", limiter.Limit{Algorithm: limiter.SlidingLog, Rate: minute}, map[time.Duration]int64{0: 0, 59 * time.Second: 0, time.Minute: 60}},
		{"log, an hour", limiter.Limit{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 5, Per: time.Hour}}, map[time.Duration]int64{0: 5}},
		{"slots", limiter.Limit{Algorithm: limiter.Semaphore, Burst: 3}, map[time.Duration]int64{0: 3}},
	} {
		l := newLocal(t, lease.Config{})
		l.SetFloor(at)
		for after, want := range c.after {
			now := at + int64(after)
			one := charge("a", c.what, fmt.Sprint(after), &c.limit, want)
			if got := level(l, now, one); got != want {
				t.Errorf("%s, after %v: %d, want %d", c.what, after, got, want)
			}
			if want > 0 {
				if left := take(t, l, now, one); left != 0 {
					t.Errorf("%s, after %v: %d left", c.what, after, left)
				}
				continue
			}
			one.Cost = 1
			var ds [1]limiter.Decision
			if refused := l.Take(now, []limiter.Charge{one}, ds[:]); refused != 0 || l.Len() > len(c.after) || level(l, now, one) != 0 {
				t.Errorf("%s, after %v: %d, %+v", c.what, after, refused, ds[0])
			}
			if ds[0].RetryAfter < 0 || level(l, now+int64(ds[0].RetryAfter), one) < 1 {
				t.Errorf("%s, after %v: %v is no true wait", c.what, after, ds[0].RetryAfter)
			}
		}
	}
}

// Refused requests fill no table under a floor, either; and it lies above what was saved.
func TestFloorLeavesNothingBehind(t *testing.T) {
	l := newLocal(t, lease.Config{MaxBuckets: 2})
	l.SetFloor(start)
	var ds [2]limiter.Decision
	for range 3 {
		cs := []limiter.Charge{charge("a", "x", "", slots, 1), charge("a", "y", "", gcra, 1)}
		if refused := l.Take(start, cs, ds[:]); refused != 1 || l.Len() != 0 {
			t.Fatalf("refused %d, %d buckets", refused, l.Len())
		}
		if refused := l.Take(start, append(cs, charge("a", "z", "", gcra, 1)), append(ds[:], limiter.Decision{})); refused != lease.TableFull || l.Len() != 0 {
			t.Fatalf("refused %d, %d buckets", refused, l.Len())
		}
	}

	of := newLocal(t, lease.Config{})
	debt := charge("a", "debt", "", gcra, 25)
	debt.Oversize = limiter.Debt
	take(t, of, start, debt)
	take(t, of, start, charge("a", "level", "", gcra, 3))
	under := newLocal(t, lease.Config{})
	under.SetFloor(start)
	if _, err := under.Load(start+int64(12*time.Second), bytes.NewReader(saved(t, of, start))); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int64{"debt": -15, "level": 2, "unknown": 2} {
		if got := level(under, start+int64(12*time.Second), charge("a", name, "", gcra, 0)); got != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
}

// Loaded buckets, and a floor, cost a decision no allocation; nor does a refused newcomer.
func TestLoadedAndFloorDoNotAllocate(t *testing.T) {
	l := loaded(t, start, saved(t, spentTable(t), start))
	l.SetFloor(start)
	known, newcomer := []limiter.Charge{charge("acme", "gcra", "", gcra, 1)}, []limiter.Charge{charge("acme", "new", "", gcra, 10)}
	var ds [1]limiter.Decision
	now := start
	if n := testing.AllocsPerRun(1000, func() {
		now += int64(time.Millisecond)
		l.Take(now, known, ds[:])
		l.Settle(now, known, []int64{0}, ds[:])
		l.Take(now, newcomer, ds[:])
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// resealed makes the checksum right again.
func resealed(text []byte) []byte {
	if len(text) < 4 {
		return text
	}
	body := bytes.Clone(text[:len(text)-4])
	return binary.BigEndian.AppendUint32(body, crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)))
}

// record is one of a saved file, from bytes, uvarints (ints) and texts.
func record(parts ...any) []byte {
	var b []byte
	for _, p := range parts {
		switch p := p.(type) {
		case byte:
			b = append(b, p)
		case int:
			b = binary.AppendUvarint(b, uint64(p))
		case string:
			b = append(binary.AppendUvarint(b, uint64(len(p))), p...)
		}
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
}

// What has a good checksum and makes no sense is refused all the same.
func TestWhatMakesNoSense(t *testing.T) {
	minute := int(time.Minute)
	limit, window := record(byte(1), byte(limiter.GCRA), 10, minute, 10), record(byte(1), byte(limiter.FixedWindow), 10, minute, 0)
	bucket, end := record(byte(2), 0, "a", "l", "", 0, minute, 0), record(byte(0), 1)
	for what, c := range map[string]struct {
		at      int64
		records [][]byte
		ok      bool
	}{
		"sense":                   {start, [][]byte{limit, bucket, end}, true},
		"a time below 0":          {-1, [][]byte{limit, bucket, end}, false},
		"an empty record":         {start, [][]byte{limit, record(), bucket, end}, false},
		"an unknown record":       {start, [][]byte{limit, record(byte(9)), bucket, end}, false},
		"no algorithm":            {start, [][]byte{record(byte(1)), bucket, end}, false},
		"a semaphore":             {start, [][]byte{record(byte(1), byte(limiter.Semaphore), 0, 0, 10), bucket, end}, false},
		"an unknown algorithm":    {start, [][]byte{record(byte(1), byte(9), 10, minute, 10), bucket, end}, false},
		"an invalid limit":        {start, [][]byte{record(byte(1), byte(limiter.GCRA), 0, minute, 10), bucket, end}, false},
		"a limit cut off":         {start, [][]byte{record(byte(1), byte(limiter.GCRA), 10, minute), bucket, end}, false},
		"a limit and more":        {start, [][]byte{record(byte(1), byte(limiter.GCRA), 10, minute, 10, 0), bucket, end}, false},
		"a bucket before limits":  {start, [][]byte{bucket, limit, end}, false},
		"a limit too far":         {start, [][]byte{limit, record(byte(2), 1, "a", "l", "", 0, minute, 0), end}, false},
		"half a key":              {start, [][]byte{limit, record(byte(2), 0, "a", 5), end}, false},
		"another algorithm's":     {start, [][]byte{window, bucket, end}, false},
		"a bucket twice":          {start, [][]byte{limit, bucket, bucket, record(byte(0), 2)}, false},
		"a bucket too few":        {start, [][]byte{limit, bucket, record(byte(0), 2)}, false},
		"no number of buckets":    {start, [][]byte{limit, bucket, record(byte(0))}, false},
		"no end":                  {start, [][]byte{limit, bucket}, false},
		"something after the end": {start, [][]byte{limit, bucket, end, bucket}, false},
	} {
		text := binary.BigEndian.AppendUint64([]byte("headgate levels 1\n"), uint64(c.at))
		text = resealed(append(bytes.Join(append([][]byte{text}, c.records...), nil), 0, 0, 0, 0))
		l := newLocal(t, lease.Config{})
		n, err := l.Load(start, bytes.NewReader(text))
		if n != l.Len() || (n == 1) != c.ok || (err == nil) != c.ok || err != nil && !errors.Is(err, lease.ErrSaved) {
			t.Errorf("%s: %d buckets of %d: %v", what, n, l.Len(), err)
		}
	}
}

// Whatever is loaded can be decided by and saved again; what can't be is an error.
func FuzzLoad(f *testing.F) {
	text := saved(f, spentTable(f), start)
	f.Add(text, start)
	f.Add(text, start+int64(time.Minute))
	f.Add(text[:len(text)/2], int64(0))
	f.Add([]byte("headgate levels 2\n"), start)
	f.Fuzz(func(t *testing.T, text []byte, now int64) {
		now = max(now, 0)
		l := newLocal(t, lease.Config{Shards: 2})
		n, err := l.Load(now, bytes.NewReader(resealed(text)))
		if n != l.Len() || err != nil && (n != 0 || !errors.Is(err, lease.ErrSaved)) {
			t.Fatalf("%d buckets of %d: %v", n, l.Len(), err)
		}
		if err != nil {
			return
		}
		again := loaded(t, now, saved(t, l, now))
		sameLevels(t, now, l, again)
		for _, tenant := range []string{"", "acme"} {
			for _, b := range l.Levels(now, tenant) {
				cs, ds := []limiter.Charge{{Key: b.Key, Limit: &b.Limit, Cost: 1}}, make([]limiter.Decision, 1)
				if l.Take(now, cs, ds) == -1 && ds[0].Remaining >= b.Level {
					t.Fatalf("%+v has %d left after a charge of 1", b, ds[0].Remaining)
				}
				l.Settle(now, cs, []int64{2}, ds)
			}
		}
	})
}

func BenchmarkSaveAndLoad(b *testing.B) {
	const buckets = 100_000
	l := newLocal(b, lease.Config{})
	for i := range buckets {
		take(b, l, start, charge(fmt.Sprintf("tenant-%05d", i/10), "plan/key-requests", fmt.Sprintf("key-%012d", i), gcra, 1))
	}
	text := saved(b, l, start)
	b.Run("save", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		for b.Loop() {
			saved(b, l, start)
		}
	})
	b.Run("load", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		for b.Loop() {
			loaded(b, start, text)
		}
	})
}

// Under a floor a bucket admits what one that was empty at that moment would, however often it
// is forgotten and made anew.
func TestFloorAdmitsNoMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, limit := newLocal(t, lease.Config{}), drawLimit(t)
		if limit.Algorithm == limiter.GCRA {
			limit.Burst = min(limit.Burst, limit.Rate.Count) // fills within the minute
		}
		l.SetFloor(start)
		window := func(now int64) int64 { return now / int64(time.Minute) }
		now, admitted, inWindow := start, int64(0), map[int64]int64{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += rapid.Int64Range(0, int64(8*time.Second)).Draw(t, "step")
			if rapid.Bool().Draw(t, "sweep") {
				l.Sweep(now, 100)
			}
			var ds [1]limiter.Decision
			c := charge("a", "l", "", &limit, rapid.Int64Range(1, 15).Draw(t, "cost"))
			if l.Take(now, []limiter.Charge{c}, ds[:]) == -1 {
				admitted += c.Cost
				inWindow[window(now)] += c.Cost
			}
			switch limit.Algorithm {
			case limiter.GCRA:
				if most := limit.Rate.Count * (now - start) / int64(time.Minute); admitted > most {
					t.Fatalf("%d admitted, of %d at most", admitted, most)
				}
			case limiter.SlidingLog:
				if now < start+int64(time.Minute) && admitted > 0 {
					t.Fatalf("%d admitted within the period", admitted)
				}
			default:
				if inWindow[window(start)] > 0 || inWindow[window(now)] > limit.Rate.Count {
					t.Fatalf("%v admitted by window", inWindow)
				}
			}
		}
	})
}
