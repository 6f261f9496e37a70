package ledger

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"headgate/cluster/ledger/ledgerpb"
	"headgate/limiter"
)

const hour = int64(time.Hour)

// hourly is a GCRA of 3,600 units an hour, so one a second, and of the burst given.
func hourly(burst int64) limiter.Limit {
	return limiter.Limit{Rate: limiter.Rate{Count: 3600, Per: time.Hour}, Burst: burst, Revision: 1}
}

// daily admits so many a day of the calendar.
func daily(count int64) limiter.Limit {
	return limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: count, Per: 24 * time.Hour}, Revision: 1}
}

// bank applies what is said of blocks at times that the test sets.
type bank struct {
	t     interface{ Fatalf(string, ...any) }
	s     *State
	index uint64
	now   int64
}

// begun is a time in the middle of a day.
const begun = 1000*24*hour + 10*hour

func newBank(t testing.TB) *bank { return &bank{t: t, s: NewState(), now: begun} }

func (b *bank) result(body any) *ledgerpb.Result {
	b.index++
	c := command(b.index, body)
	c.UnixNano, c.Version = b.now, StateVersion
	result, err := b.s.Apply(b.index, c)
	if err != nil {
		b.t.Fatalf("entry %d stops the replica: %v", b.index, err)
	}
	return result
}

func (b *bank) apply(body any) (Reserved, error) { return reservedOf(b.result(body)) }

func (b *bank) reserve(r Reserve) (Reserved, error) { return b.apply(r.message()) }
func (b *bank) settle(s Settle) (Reserved, error)   { return b.apply(s.message()) }

// again is a copy of the bank.
func (b *bank) again(t testing.TB) *bank {
	return &bank{t: b.t, s: readState(t, snapshotOf(t, b.s)), index: b.index, now: b.now}
}

// bucketOf is the one bucket of these tests.
func bucketOf(limit string) limiter.Key {
	return limiter.Key{Tenant: "acme", Limit: limit, Subject: "k1\xff"} // a subject is any bytes
}

// step is a command, after a while, and what it gives: "" for an error is none.
type step struct {
	after    time.Duration
	reserve  *Reserve
	settle   *Settle
	want     Reserved
	mistaken string
}

func TestBlocks(t *testing.T) {
	gcra, day := hourly(100), daily(100)
	r := func(l limiter.Limit, n uint64, want, least, holding int64) *Reserve {
		return &Reserve{Bucket: bucketOf("l"), Limit: l, Owner: 7, Epoch: 1, N: n, Want: want, Least: least, Holding: holding}
	}
	owing := func(r *Reserve, debt int64) *Reserve { r.Debt = debt; return r }
	of := func(r *Reserve, owner, epoch uint64) *Reserve { r.Owner, r.Epoch = owner, epoch; return r }
	got := func(granted, level int64) Reserved { return Reserved{Granted: granted, Level: level} }
	in := func(window, granted, level int64) Reserved {
		return Reserved{Granted: granted, Level: level, Window: 1000 + window}
	}
	raised, lowered := gcra, gcra
	raised.Burst, raised.Revision = 200, 2
	lowered.Burst, lowered.Revision = 50, 3
	calendar := daily(150)
	calendar.Revision = 2
	for name, steps := range map[string][]step{
		"what is there is granted": {
			{reserve: r(gcra, 1, 60, 1, 0), want: got(60, 40)},
			{reserve: r(gcra, 2, 60, 1, 60), want: got(40, 0)},
			{reserve: r(gcra, 3, 60, 5, 100), want: Reserved{RetryAfter: 5 * time.Second}}, // at the earliest: all of the burst is held
			{reserve: r(gcra, 4, 60, 5, 80), want: Reserved{RetryAfter: 5 * time.Second}},
			{after: 10 * time.Second, reserve: r(gcra, 5, 60, 5, 80), want: got(10, 0)},
		},
		"spent units come back, held ones do not": {
			{reserve: r(gcra, 1, 100, 1, 0), want: got(100, 0)},
			{after: time.Hour, reserve: r(gcra, 2, 0, 0, 100), want: got(0, 0)},
			{reserve: r(gcra, 3, 0, 0, 40), want: got(0, 0)}, // 60 spent just now, for all that is known
			{after: time.Minute, reserve: r(gcra, 4, 0, 0, 40), want: got(0, 60)},
		},
		"what is returned is there at once, and no more than was": {
			{reserve: r(gcra, 1, 80, 1, 0), want: got(80, 20)},
			{settle: &Settle{Bucket: bucketOf("l"), Owner: 7, Epoch: 1, N: 2, Holding: 20, Returned: 30}, want: got(0, 50)}, // 30 spent
			{settle: &Settle{Bucket: bucketOf("l"), Owner: 7, Epoch: 1, N: 3, Returned: 90}, want: got(0, 70)},
			{settle: &Settle{Bucket: bucketOf("l"), Owner: 7, Epoch: 1, N: 4, Returned: 1}, want: got(0, 70)},
		},
		"a number once": {
			{reserve: r(gcra, 5, 60, 1, 0), want: got(60, 40)},
			{reserve: r(gcra, 5, 60, 1, 0), want: got(60, 40)},
			{after: time.Minute, reserve: r(gcra, 5, 60, 1, 0), want: got(60, 40)},
			{reserve: r(gcra, 4, 60, 1, 0), mistaken: "command 5 about the block was applied already"},
			{reserve: r(gcra, 6, 200, 101, 0), want: Reserved{RetryAfter: limiter.Never, Level: 40}},
			{reserve: r(gcra, 6, 200, 101, 0), want: Reserved{RetryAfter: limiter.Never, Level: 40}},
			{settle: &Settle{Bucket: bucketOf("l"), Owner: 7, Epoch: 1, N: 6}, want: Reserved{RetryAfter: limiter.Never, Level: 40}},
		},
		"a later epoch ends what others held": {
			{reserve: of(r(gcra, 9, 60, 1, 0), 7, 4), want: got(60, 40)},
			{reserve: of(r(gcra, 1, 60, 1, 0), 8, 5), want: got(40, 0)},
			{reserve: of(r(gcra, 10, 1, 1, 0), 7, 4), mistaken: "another owner's since epoch 5"},
			{settle: &Settle{Bucket: bucketOf("l"), Owner: 7, Epoch: 4, N: 11, Returned: 60}, mistaken: "another owner's since epoch 5"},
			{after: time.Hour, reserve: of(r(gcra, 2, 60, 1, 0), 8, 5), want: got(60, 0)}, // 40 held until just now, 60 come back
		},
		"what is handed over goes on": {
			{reserve: of(r(gcra, 9, 60, 1, 0), 7, 4), want: got(60, 40)},
			{after: time.Hour, reserve: of(r(gcra, 1, 100, 1, 60), 8, 5), want: got(40, 0)},
		},
		"one epoch, two owners": {
			{reserve: of(r(gcra, 9, 60, 1, 0), 7, 4), want: got(60, 40)},
			{after: time.Hour, reserve: of(r(gcra, 1, 100, 1, 0), 8, 4), want: got(40, 0)},
			{after: time.Hour, reserve: of(r(gcra, 10, 100, 1, 60), 7, 4), want: Reserved{RetryAfter: time.Second}},
			{after: time.Hour, reserve: of(r(gcra, 11, 100, 1, 50), 7, 5), want: Reserved{RetryAfter: time.Second}}, // 8's are spent as of now
			{after: 40 * time.Second, reserve: of(r(gcra, 12, 100, 1, 50), 7, 5), want: got(40, 0)},
		},
		"a debt is charged once": {
			{reserve: r(gcra, 1, 100, 1, 0), want: got(100, 0)},
			{reserve: owing(r(gcra, 2, 10, 10, 0), 50), want: Reserved{RetryAfter: time.Minute, Level: -50}},
			{reserve: owing(r(gcra, 2, 10, 10, 0), 50), want: Reserved{RetryAfter: time.Minute, Level: -50}},
			{after: time.Minute, reserve: r(gcra, 3, 10, 10, 0), want: got(10, 0)},
		},
		"a holding that is not known of is believed": {
			{reserve: r(gcra, 7, 100, 1, 70), want: got(30, 0)},
			{reserve: r(gcra, 8, 0, 0, 0), want: got(0, 0)},
		},
		"a raised limit keeps what was spent": {
			{reserve: r(gcra, 1, 60, 1, 0), want: got(60, 40)},
			{reserve: r(raised, 2, 0, 0, 60), want: got(0, 140)},
			{reserve: r(gcra, 3, 0, 0, 60), want: got(0, 140)}, // the higher revision binds
			{reserve: r(lowered, 4, 1, 1, 60), want: Reserved{RetryAfter: 11 * time.Second, Level: -10}},
			{after: time.Hour, reserve: r(lowered, 5, 0, 0, 10), want: got(0, -10)},
			{after: time.Hour, reserve: r(lowered, 6, 0, 0, 10), want: got(0, 40)},
		},
		"another algorithm too": {
			{reserve: r(gcra, 1, 60, 1, 0), want: got(60, 40)},
			{reserve: r(calendar, 2, 100, 1, 60), want: in(0, 90, 0)},
		},
		"a window": {
			{reserve: r(day, 1, 60, 1, 0), want: in(0, 60, 40)},
			{reserve: r(day, 2, 60, 50, 10), want: Reserved{RetryAfter: 14 * time.Hour, Level: 40, Window: 1000}},
			{settle: &Settle{Bucket: bucketOf("l"), Owner: 7, Epoch: 1, N: 3, Holding: 0, Returned: 10}, want: in(0, 0, 50)},
			{reserve: r(day, 4, 60, 50, 0), want: in(0, 50, 0)},
			{reserve: r(day, 5, 200, 101, 50), want: Reserved{RetryAfter: limiter.Never, Window: 1000}},
			{after: 14 * time.Hour, reserve: r(day, 6, 60, 1, 50), want: in(1, 60, 40)}, // the 50 were yesterday's
			{after: -time.Hour, reserve: r(day, 7, 60, 1, 60), want: in(1, 40, 0)},      // and no clock that is set back brings it again
			{after: 26 * time.Hour, settle: &Settle{Bucket: bucketOf("l"), Owner: 7, Epoch: 1, N: 8, Holding: 0, Returned: 90}, want: in(2, 0, 100)},
		},
		"a window's debt": {
			{reserve: r(day, 1, 100, 1, 0), want: in(0, 100, 0)},
			{reserve: owing(r(day, 2, 1, 1, 0), 150), want: Reserved{RetryAfter: 38 * time.Hour, Level: -150, Window: 1000}},
			{after: 14 * time.Hour, reserve: r(day, 3, 1, 1, 0), want: Reserved{RetryAfter: 24 * time.Hour, Level: -50, Window: 1001}},
			{after: 24 * time.Hour, reserve: r(day, 4, 100, 1, 0), want: in(2, 50, 0)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBank(t)
			for i, s := range steps {
				b.now += int64(s.after)
				var got Reserved
				var err error
				if s.settle != nil {
					got, err = b.settle(*s.settle)
				} else {
					got, err = b.reserve(*s.reserve)
				}
				if s.mistaken != "" {
					if err == nil || !strings.Contains(err.Error(), s.mistaken) {
						t.Errorf("step %d: got %+v, %v, want an error with %q", i+1, got, err, s.mistaken)
					}
					continue
				}
				if err != nil || got != s.want {
					t.Errorf("step %d: got %+v, %v, want %+v", i+1, got, err, s.want)
				}
				if again := b.again(t); again.s.Facts().Hash != b.s.Facts().Hash || again.s.Facts().Durables != 1 {
					t.Fatalf("step %d: read back it is another state", i+1)
				}
			}
		})
	}
}

func TestNoBlocks(t *testing.T) {
	good := Reserve{Bucket: bucketOf("l"), Limit: hourly(10), Owner: 1, Epoch: 1, N: 1, Want: 1}
	for name, c := range map[string]struct {
		change func(*Reserve)
		want   string
	}{
		"a limit without a name": {func(r *Reserve) { r.Bucket.Limit = "" }, "1 to 262 bytes"},
		"a long limit":           {func(r *Reserve) { r.Bucket.Limit = strings.Repeat("l", maxBucketName+1) }, "1 to 262 bytes"},
		"a long tenant":          {func(r *Reserve) { r.Bucket.Tenant = strings.Repeat("l", maxID+1) }, "at most 128"},
		"a long subject":         {func(r *Reserve) { r.Bucket.Subject = strings.Repeat("l", maxSubject+1) }, "subject 1024"},
		"slots":                  {func(r *Reserve) { r.Limit = limiter.Limit{Algorithm: limiter.Semaphore, Burst: 3} }, "semaphore has no blocks"},
		"a log":                  {func(r *Reserve) { r.Limit.Algorithm = limiter.SlidingLog }, "sliding_log has no blocks"},
		"no algorithm":           {func(r *Reserve) { r.Limit.Algorithm = 9 }, "no algorithm 9"},
		"no burst":               {func(r *Reserve) { r.Limit.Burst = 0 }, "it is no limit: burst 0"},
		"no period":              {func(r *Reserve) { r.Limit.Rate.Per = -1 }, "it is no limit: rate period"},
		"a negative want":        {func(r *Reserve) { r.Want = -1 }, "not of -1"},
		"a huge want":            {func(r *Reserve) { r.Want = math.MaxInt64 }, "0 to"},
		"a huge least":           {func(r *Reserve) { r.Least = limiter.MaxUnits + 1 }, "0 to"},
		"a huge holding":         {func(r *Reserve) { r.Holding = limiter.MaxUnits + 1 }, "0 to"},
		"a negative holding":     {func(r *Reserve) { r.Holding = math.MinInt64 }, "0 to"},
		"a negative debt":        {func(r *Reserve) { r.Debt = -1 }, "0 to"},
		"nobody":                 {func(r *Reserve) { r.Owner = 0 }, "has an owner and a number"},
		"no number":              {func(r *Reserve) { r.N = 0 }, "has an owner and a number"},
		"a view to come":         {func(r *Reserve) { r.Epoch = 3 }, "the view of epoch 1 is in force, and there is none of 3"},
	} {
		b := newBank(t)
		_, _ = b.apply(&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 1}})
		before := snapshotOf(t, b.s)
		r := good
		c.change(&r)
		if got, err := b.reserve(r); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %+v, %v, want an error with %q", name, got, err, c.want)
		}
		b.index = 0
		if after := b.s.Facts(); after.Durables != 0 || after.Hash != readState(t, before).Facts().Hash {
			t.Errorf("%s: refused, it changed the state", name)
		}
	}
	b := newBank(t)
	if _, err := b.settle(Settle{Bucket: bucketOf("l"), Owner: 1, N: 1}); err == nil || !strings.Contains(err.Error(), "there is no bucket") {
		t.Errorf("settling nothing gives %v", err)
	}
}

// TestACrashLosesOneBlock at most: all that an owner held and took with it.
func TestACrashLosesOneBlock(t *testing.T) {
	for _, l := range []limiter.Limit{hourly(1000), daily(1000)} {
		b := newBank(t)
		r := Reserve{Bucket: bucketOf("l"), Limit: l, Owner: 1, Epoch: 1, N: 1, Want: 100}
		spent := int64(0)
		for ; r.N <= 5; r.N++ { // each block spent before the next is drawn
			got, err := b.reserve(r)
			must(t, err)
			spent += got.Granted
		}
		next, err := b.reserve(Reserve{Bucket: r.Bucket, Limit: l, Owner: 2, Epoch: 2, N: 1, Want: 1000})
		must(t, err)
		if lost := 1000 - (spent - 100) - next.Granted; spent != 500 || lost != 100 {
			t.Errorf("%v: of 1000, %d were granted before the last block and %d after it", l.Algorithm, spent-100, next.Granted)
		}
	}
}

// model is a bucket by big integers: of a GCRA the deficit in units × period, of a window what was granted in it.
type model struct {
	l        limiter.Limit
	deficit  *big.Int
	last     int64
	windowed bool
}

func times(a, b int64) *big.Int { return new(big.Int).Mul(big.NewInt(a), big.NewInt(b)) }

func (m *model) advance(now, held int64) {
	per := int64(m.l.Rate.Per)
	if m.windowed {
		if now/per > m.last/per {
			m.deficit.SetInt64(0)
		}
	} else if m.deficit.Sub(m.deficit, times(now-m.last, m.l.Rate.Count)); m.deficit.Sign() < 0 {
		m.deficit.SetInt64(0)
	}
	m.last = now
	if floor := times(held, per); m.deficit.Cmp(floor) < 0 {
		m.deficit.Set(floor)
	}
}

func (m *model) level() int64 {
	left := new(big.Int).Sub(times(m.l.Capacity(), int64(m.l.Rate.Per)), m.deficit)
	return left.Div(left, big.NewInt(int64(m.l.Rate.Per))).Int64() // rounded down, as the divisor is positive
}

// spender is an owner, and what it really holds.
type spender struct {
	owner, epoch, n   uint64
	held, outstanding int64 // outstanding as the ledger has it, of the owner before at first
	window            int64
	last              Reserve // to be said again
	gave              Reserved
}

// TestBlocksAgainstBigInt lets owners come and crash, hand over, spend, return and say things twice. The
// ledger grants what big integers grant, and whatever is spent conforms to the limit.
func TestBlocksAgainstBigInt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := limiter.Limit{Rate: limiter.Rate{
			Count: rapid.OneOf(rapid.Int64Range(1, 50), rapid.Int64Range(1, 1<<40)).Draw(t, "count"),
			Per:   rapid.SampledFrom([]time.Duration{7 * time.Minute, time.Hour, 24 * time.Hour}).Draw(t, "per"),
		}, Revision: 1}
		windowed := rapid.Bool().Draw(t, "windowed")
		if windowed {
			l.Algorithm = limiter.FixedWindow
		} else {
			l.Burst = rapid.OneOf(rapid.Int64Range(1, 50), rapid.Int64Range(1, 1<<40)).Draw(t, "burst")
		}
		if l.Validate() != nil {
			t.Skip("no limit")
		}
		per, capacity := int64(l.Rate.Per), l.Capacity()
		b := &bank{t: t, s: NewState(), now: begun}
		m := &model{l: l, deficit: new(big.Int), windowed: windowed}
		o := spender{owner: 1, epoch: 1}
		// potential is the most that was spent in any span that ends now, beyond what the rate brought in it: in units × period.
		potential, spentAt := new(big.Int), b.now
		spent := map[int64]int64{} // by window
		spend := func(units int64) {
			if potential.Sub(potential, times(b.now-spentAt, l.Rate.Count)); potential.Sign() < 0 {
				potential.SetInt64(0)
			}
			spentAt = b.now
			potential.Add(potential, times(units, per))
			o.held -= units
			if spent[b.now/per] += units; windowed && spent[b.now/per] > l.Rate.Count {
				t.Fatalf("%d of %d are spent in one window", spent[b.now/per], l.Rate.Count)
			} else if !windowed && potential.Cmp(times(capacity, per)) > 0 {
				t.Fatalf("more is spent than a burst of %d and the rate", capacity)
			}
		}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			b.now += rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, per/4), rapid.Int64Range(0, 3*per)).Draw(t, "pause")
			if windowed && b.now/per != o.window {
				o.held = 0
			}
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0, 1:
				if o.held > 0 {
					spend(rapid.Int64Range(0, o.held).Draw(t, "spent"))
				}
			case 2: // it crashes: the next owner knows nothing
				o = spender{owner: o.owner + 1, epoch: o.epoch + 1, outstanding: o.outstanding, window: o.window}
			case 3: // it hands over
				o = spender{owner: o.owner + 1, epoch: o.epoch + 1, held: o.held, outstanding: o.outstanding, window: o.window}
			case 4: // an answer was lost
				if o.n > 0 {
					if again, err := b.reserve(o.last); err != nil || again != o.gave {
						t.Fatalf("said again, %+v gives %+v (%v), and gave %+v", o.last, again, err, o.gave)
					}
				}
			default:
				o.converse(t, b, m, windowed)
			}
			if rapid.IntRange(0, 4).Draw(t, "restart") == 0 {
				b.s = restored(t, b.s)
			}
		}
	})
}

func (o *spender) outstandingAt(now, per int64, windowed bool) int64 {
	if windowed && now/per != o.window {
		return 0
	}
	return o.outstanding
}

// converse reserves, and returns some of what is held before.
func (o *spender) converse(t *rapid.T, b *bank, m *model, windowed bool) {
	per := int64(m.l.Rate.Per)
	fresh := o.n == 0
	before := o.outstandingAt(b.now, per, windowed)
	m.advance(b.now, before)
	if !fresh && o.held > 0 && rapid.Bool().Draw(t, "return") {
		returned := rapid.Int64Range(0, o.held).Draw(t, "returned")
		o.n++
		o.held -= returned
		m.deficit.Sub(m.deficit, times(returned, per))
		m.advance(b.now, o.held)
		got, err := b.settle(Settle{Bucket: bucketOf("l"), Owner: o.owner, Epoch: o.epoch, N: o.n, Holding: o.held, Returned: returned})
		if err != nil || got.Level != m.level() {
			t.Fatalf("returning %d gives %+v (%v), want level %d", returned, got, err, m.level())
		}
	}
	o.n++
	o.last = Reserve{
		Bucket: bucketOf("l"), Limit: m.l, Owner: o.owner, Epoch: o.epoch, N: o.n, Holding: o.held,
		Want:  rapid.Int64Range(0, 2*m.l.Capacity()).Draw(t, "want"),
		Least: rapid.Int64Range(0, m.l.Capacity()+1).Draw(t, "least"),
	}
	m.advance(b.now, o.held)
	want := int64(0)
	if asked := max(o.last.Want, o.last.Least); asked > 0 && m.level() >= max(o.last.Least, 1) {
		want = min(asked, m.level())
	}
	var err error
	o.gave, err = b.reserve(o.last)
	m.deficit.Add(m.deficit, times(want, per))
	if err != nil || o.gave.Granted != want || o.gave.Level != m.level() {
		t.Fatalf("%+v gives %+v (%v), want %d and level %d", o.last, o.gave, err, want, m.level())
	}
	if wait := int64(o.gave.RetryAfter); want == 0 && wait > 0 && o.last.Least <= m.l.Capacity() && (windowed || max(o.last.Least, 1) <= m.l.Capacity()-o.held) {
		for _, c := range []struct {
			at    int64
			grant bool
		}{{b.now + wait - 1, false}, {b.now + wait, true}} {
			clone := &bank{t: t, s: restored(t, b.s), index: b.index, now: c.at}
			next := o.last
			next.N++
			if got, err := clone.reserve(next); err != nil || got.Granted > 0 != c.grant {
				t.Fatalf("after %d ns of %d %+v gives %+v, %v", c.at-b.now, wait, next, got, err)
			}
		}
	}
	o.held += want
	o.outstanding, o.window = o.held, b.now/per
	if windowed && o.gave.Window != o.window {
		t.Fatalf("it is of window %d, at %d", o.gave.Window, o.window)
	}
}

// TestBlocksShowInTheHashOnly: each changes it, and nobody is told.
func TestBlocksShowInTheHashOnly(t *testing.T) {
	var told []*Facts
	f := newFSM(func(facts *Facts) { told = append(told, facts) }, func(err error) { t.Error(err) })
	b := &bank{t: t, s: f.state, now: begun}
	apply := func(body any) *Facts {
		c := command(b.index+1, body)
		c.UnixNano = b.now
		if o := f.Apply(&raft.Log{Index: b.index + 1, Type: raft.LogCommand, Data: mustMarshal(t, c)}).(*outcome); o.err != nil || o.result.GetCode() != "" {
			t.Fatalf("%T: %+v", body, o)
		}
		b.index++
		return f.state.Facts()
	}
	r := Reserve{Bucket: bucketOf("l"), Limit: hourly(10), Owner: 1, Epoch: 1, N: 1, Want: 2}
	first := apply(r.message())
	again := apply(r.message())
	r.N, r.Want, r.Holding = 2, 0, 2
	second := apply(r.message())
	if first.Hash == NewState().Facts().Hash || again.Hash != first.Hash || second.Hash == first.Hash {
		t.Errorf("hashes %x, again %x, then %x", first.Hash[:4], again.Hash[:4], second.Hash[:4])
	}
	if first.Changed != 1 || again.Changed != 1 || second.Changed != 3 || len(told) != 0 {
		t.Errorf("changed at %d, %d and %d, and %d were told", first.Changed, again.Changed, second.Changed, len(told))
	}
	apply(&ledgerpb.SetRung{Rung: "r", On: true})
	if len(told) != 1 || told[0].Durables != 1 {
		t.Errorf("told %d times of a rung", len(told))
	}
}

func TestDurablesAreBounded(t *testing.T) {
	b := newBank(t)
	full := func() {
		for i := range MaxDurable - len(b.s.durables.at) {
			b.s.durables.add(&durable{key: limiter.Key{Limit: "filler", Subject: fmt.Sprint(i)}, limit: hourly(10), blocks: []block{{owner: 9, epoch: 1, outstanding: 1}}, epoch: 1})
		}
	}
	member := &ledgerpb.View{Epoch: 1, Members: []*ledgerpb.Member{{Name: "a", Incarnation: 9}}}
	_, _ = b.apply(&ledgerpb.SetView{View: member})
	full()
	r := Reserve{Bucket: bucketOf("l"), Limit: hourly(10), Owner: 9, Epoch: 1, N: 1, Want: 1}
	if _, err := b.reserve(r); err == nil || !strings.Contains(err.Error(), "the ledger holds as many buckets") || len(b.s.durables.at) != MaxDurable {
		t.Errorf("one more than the most: %v, now %d", err, len(b.s.durables.at))
	}
	_, _ = b.apply(&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 2, Members: member.GetMembers()}})
	if _, err := b.reserve(r); err == nil {
		t.Error("blocks of a member were taken for nobody's")
	}
	// Their owner leaves: what it held counts as spent from when that is seen, and is back a moment later.
	_, _ = b.apply(&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 3}})
	r.Owner, r.Epoch = 10, 3
	if _, err := b.reserve(r); err == nil {
		t.Error("what nobody holds any more was back at once")
	}
	b.now += hour
	for range MaxDurable / (sweepEach + sweepFull) { // one round, in which the rest is seen
		r.Bucket.Subject += "x"
		if _, err := b.reserve(r); err == nil {
			break
		}
		r.Bucket.Subject = "y"
	}
	if n := len(b.s.durables.at); n >= MaxDurable {
		t.Errorf("none of %d was forgotten", n)
	}
	b.s.durables.bytes = maxDurableBytes
	r.Bucket.Subject = "by bytes"
	for e := b.s.durables.queue.Front(); e != nil; e = e.Next() {
		e.Value.(*durable).blocks = []block{{owner: 10, epoch: 3, outstanding: 1}}
	}
	if _, err := b.reserve(r); err == nil {
		t.Error("names have no bound")
	}
}

// TestFullBucketsAreForgotten while others are added, so that a snapshot holds what counts.
func TestFullBucketsAreForgotten(t *testing.T) {
	b := newBank(t)
	for i := range 1000 {
		r := Reserve{Bucket: limiter.Key{Tenant: "acme", Limit: "l", Subject: fmt.Sprint(i)}, Limit: hourly(100), Owner: 1, Epoch: 1, N: uint64(2*i + 1), Want: 10}
		_, err := b.reserve(r)
		must(t, err)
		if i != 3 { // whose block stays with its owner
			_, err = b.settle(Settle{Bucket: r.Bucket, Owner: 1, Epoch: 1, N: r.N + 1})
			must(t, err)
		}
		b.now += int64(time.Second)
	}
	if n := b.s.Facts().Durables; n < 10 || n > 20 {
		t.Errorf("%d buckets are kept, of which ten or eleven count", n)
	}
	if _, ok := b.s.durables.find(limiter.Key{Tenant: "acme", Limit: "l", Subject: "3"}); !ok {
		t.Error("a bucket was forgotten of which a block is held")
	}
	if got, err := b.reserve(Reserve{Bucket: limiter.Key{Tenant: "acme", Limit: "l", Subject: "0"}, Limit: hourly(100), Owner: 1, Epoch: 1, N: 3000, Want: 200}); err != nil || got.Granted != 100 {
		t.Errorf("one that was forgotten gives %+v, %v", got, err)
	}
	if back := b.again(t); back.s.Facts().Hash != b.s.Facts().Hash {
		t.Error("the hash does not fit what is left")
	}
}

// TestSnapshotsWithoutBucketsAreOfBefore, so that a program from before them can read these.
func TestSnapshotsWithoutBucketsAreOfBefore(t *testing.T) {
	for version, b := range map[uint32]*bank{1: newBank(t), 2: newBank(t)} {
		_, _ = b.apply(&ledgerpb.SetRung{Rung: "r", On: true})
		if version == 2 {
			_, err := b.reserve(Reserve{Bucket: bucketOf("l"), Limit: daily(5), Owner: 1, N: 1})
			must(t, err)
		}
		var head ledgerpb.Header
		must(t, proto.Unmarshal(firstMessage(t, snapshotOf(t, b.s)), &head))
		if head.GetVersion() != version {
			t.Errorf("the version is %d, want %d", head.GetVersion(), version)
		}
	}
}

func firstMessage(t testing.TB, snapshot []byte) []byte {
	t.Helper()
	size, used := protowire.ConsumeVarint(snapshot)
	if used <= 0 || len(snapshot) < used+int(size) {
		t.Fatal("no message")
	}
	return snapshot[used : used+int(size)]
}

// TestBlocksAreGrantedOnce: whatever becomes of leaders and answers, what owners were told that they
// have is what the ledger counts as theirs.
func TestBlocksAreGrantedOnce(t *testing.T) {
	const burst = 50_000
	l := limiter.Limit{Rate: limiter.Rate{Count: burst, Per: 365 * 24 * time.Hour}, Burst: burst, Revision: 1}
	inBubble(t, func(c *Config) {
		c.Servers = nil // who votes is not the subject
		c.SnapshotThreshold, c.TrailingLogs, c.SnapshotInterval = 100, 20, time.Second
		c.WallOff = func() (time.Duration, bool) { return time.Second, true }
	}, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(3)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var again atomic.Int64
		var owners sync.WaitGroup
		for id := range uint64(3) {
			owners.Go(func() {
				last, known := Reserve{Bucket: limiter.Key{Tenant: "t", Limit: "l", Subject: fmt.Sprint(id)}, Limit: l, Owner: id + 1, Epoch: 1, N: 1, Want: 7}, 0
				var got Reserved
				for ended := false; !ended; {
					ended = ctx.Err() != nil
					for got = (Reserved{}); ; { // whatever becomes of it, the same again
						err := errors.New("down")
						if here := c.reach(nodes[id].addr, nodes[id].id); here != nil {
							within, cancel := context.WithTimeout(t.Context(), time.Second)
							got, err = here.ReserveBlock(within, last)
							cancel()
						}
						if err == nil {
							break
						}
						again.Add(1)
						time.Sleep(10 * time.Millisecond) // virtual, as a client would
					}
					known++
					last.N, last.Holding = last.N+1, last.Holding+got.Granted
					time.Sleep(20 * time.Millisecond)
				}
				if known < 50 {
					t.Errorf("owner %d drew %d blocks", id, known)
				}
				if last.Holding+got.Level != burst {
					t.Errorf("owner %d has %d, and the ledger %d of %d", id, last.Holding, got.Level, burst)
				}
			})
		}
		if disturbed := disturb(ctx, c, nodes, rand.New(rand.NewPCG(1, 2))); disturbed < 3 {
			t.Errorf("only %d disturbances", disturbed)
		}
		owners.Wait()
		if again.Load() == 0 {
			t.Error("no draw had to be tried again")
		}
		c.settled()
	})
}

// TestAWrongClockGrantsNothing: neither one that is off, nor one of which nobody knows yet.
func TestAWrongClockGrantsNothing(t *testing.T) {
	var off atomic.Pointer[time.Duration]
	inBubble(t, func(c *Config) {
		c.WallOff = func() (time.Duration, bool) {
			if d := off.Load(); d != nil {
				return *d, true
			}
			return 0, false
		}
	}, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		follower := c.follower().ledger
		r := Reserve{Bucket: bucketOf("l"), Limit: hourly(10), Owner: 1, Epoch: 0, N: 1, Want: 3}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if got, err := follower.ReserveBlock(ctx, r); !errors.Is(err, ErrNoLeader) {
			t.Errorf("a clock that nobody compared gives %+v, %v", got, err)
		}
		for _, d := range []time.Duration{maxWallOff + 1, -maxWallOff - 1} {
			off.Store(&d)
			if got, err := c.leader().ledger.ReserveBlock(t.Context(), r); !errors.Is(err, ErrWallOff) {
				t.Errorf("a clock that is %v off gives %+v, %v", d, got, err)
			}
			if got, err := follower.ReserveBlock(t.Context(), r); err == nil {
				t.Errorf("a clock that is %v off gives %+v", d, got)
			}
			c.propose(c.leader(), set("x", fmt.Sprint(d))) // all else goes on
		}
		right := maxWallOff
		off.Store(&right)
		if got, err := follower.ReserveBlock(t.Context(), r); err != nil || got.Granted != 3 || got.Level != 7 {
			t.Errorf("a clock that is right gives %+v, %v", got, err)
		}
		if got, err := c.leader().ledger.SettleBlock(t.Context(), Settle{Bucket: r.Bucket, Owner: 1, N: 2, Returned: 3}); err != nil || got.Level != 10 {
			t.Errorf("settled, it gives %+v, %v", got, err)
		}
		var stale *StaleBlock
		if _, err := follower.ReserveBlock(t.Context(), r); !errors.As(err, &stale) || stale.N != 2 {
			t.Errorf("an older number gives %v", err)
		}
	})
}
