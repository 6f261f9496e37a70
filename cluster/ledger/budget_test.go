package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"headgate/cluster/ledger/ledgerpb"
	"headgate/limiter"
)

// monthly is an account of a period that bank's time is in the middle of.
func monthly(budget string) BudgetKey {
	return BudgetKey{Key: limiter.Key{Tenant: "acme", Limit: budget, Subject: "k1\xff"}, Start: begun - 10*24*hour, End: begun + 20*24*hour}
}

// endless is one without a period.
func endless(budget string) BudgetKey {
	return BudgetKey{Key: limiter.Key{Tenant: "acme", Limit: budget}}
}

func terms(amount int64) BudgetTerms { return BudgetTerms{Amount: amount, Revision: 1, Name: "b"} }

// budgetBodies are of two accounts, with something of everything; members are 1, and 2 or nobody.
func budgetBodies() []any {
	month := BudgetKey{Key: limiter.Key{Tenant: "acme", Limit: "org-month", Subject: "u\x1f\xff"}, Start: 9e17, End: 3e18}
	alerts := BudgetTerms{Amount: 1000, Revision: 3, Alerts: []int{50, 80, 100}, Name: "org-month"}
	rolls := BudgetTerms{
		Amount: 5000, Revision: 3, Window: 24 * time.Hour, Slot: time.Hour, Name: "global",
		Spike: Spike{Factor: 3 * factorOne, Floor: 10, Kill: true},
	}
	m := func(d BudgetDraw) any { return d.message() }
	return []any{
		m(BudgetDraw{Key: month, Terms: alerts, Holder: 1, N: 1, Want: 100, Need: 20, Least: 10}),
		m(BudgetDraw{Key: month, Terms: alerts, Holder: 2, N: 4, Spent: 30, Holding: 7}),
		m(BudgetDraw{Key: month, Terms: alerts, Holder: 1, N: 2, Spent: 60, Holding: 40, Want: 10, Need: 10}),
		m(BudgetDraw{Key: month, Terms: alerts, Holder: 9, N: 1 << 63, Spent: 5, Final: true}),
		m(BudgetDraw{Key: month, Terms: alerts, Holder: 77, N: 1, Spent: 1, Holding: 5}),
		m(BudgetDraw{Key: BudgetKey{Key: limiter.Key{Limit: "global"}}, Terms: rolls, Holder: 1, N: 1, Spent: 7, Holding: 2, Want: 50}),
		&ledgerpb.AdjustBudget{Key: month.message(), Amount: 600, Reason: "by hand"},
		&ledgerpb.AdjustBudget{Key: month.message(), Amount: -100, Reason: "sorry"},
		&ledgerpb.BudgetNotified{Key: month.message(), Percent: 50},
		&ledgerpb.ReleaseHolder{Holder: 77, Node: "c", Reason: "burnt"},
	}
}

func (b *bank) drawBudget(d BudgetDraw) (BudgetDrawn, error) { return drawnOf(b.result(d.message())) }

func (b *bank) untold() []BudgetAccount { return (&fsm{state: b.s}).untold(nil, 9) }

func (b *bank) account(t interface{ Fatalf(string, ...any) }, k BudgetKey) *account {
	a, ok := b.s.budgets.find(k)
	if !ok {
		t.Fatalf("the account %+v is not there", k)
	}
	return a
}

// brought is a drawn without what tests do not look at.
func brought(granted, spent, amount, others, free int64) BudgetDrawn {
	return BudgetDrawn{Granted: granted, Spent: spent, Amount: amount, Others: others, Free: free}
}

func TestBudget(t *testing.T) {
	k := monthly("b")
	type step struct {
		after    time.Duration
		draw     BudgetDraw
		want     BudgetDrawn
		closed   bool
		mistaken error
	}
	say := func(holder, n uint64, spent, holding, want, need, least int64) BudgetDraw {
		return BudgetDraw{Key: k, Terms: terms(1000), Holder: holder, N: n, Spent: spent, Holding: holding, Want: want, Need: need, Least: least}
	}
	final := func(d BudgetDraw, lost bool) BudgetDraw { d.Final, d.Lost = true, lost; return d }
	under := func(d BudgetDraw, amount int64, revision uint64) BudgetDraw {
		d.Terms.Amount, d.Terms.Revision = amount, revision
		return d
	}
	for name, steps := range map[string][]step{
		"blocks shrink to one request's cost": {
			{draw: say(1, 1, 0, 0, 400, 10, 10), want: brought(125, 0, 1000, 0, 875)}, // an eighth
			{draw: say(1, 2, 125, 0, 800, 300, 1), want: brought(300, 125, 1000, 0, 575)},
			{draw: say(2, 1, 0, 0, 600, 500, 1), want: brought(500, 125, 1000, 300, 75)},
			{draw: say(2, 2, 500, 0, 80, 80, 80), want: brought(0, 625, 1000, 300, 75)}, // not enough for one
			{draw: say(2, 3, 500, 0, 80, 80, 50), want: brought(75, 625, 1000, 300, 0)}, // but enough if it asks for less
			{draw: say(1, 3, 425, 0, 1, 1, 0), want: brought(0, 925, 1000, 75, 0)},
		},
		"what is neither spent nor held is free": {
			{draw: say(1, 1, 0, 0, 200, 200, 0), want: brought(200, 0, 1000, 0, 800)},
			{draw: say(1, 2, 50, 100, 0, 0, 0), want: brought(0, 50, 1000, 0, 850)},
			{draw: say(1, 3, 50, 0, 0, 0, 0), want: brought(0, 50, 1000, 0, 950)},
		},
		"a number once": {
			{draw: say(1, 5, 0, 0, 200, 200, 0), want: brought(200, 0, 1000, 0, 800)},
			{draw: say(1, 5, 0, 0, 200, 200, 0), want: brought(200, 0, 1000, 0, 800)},
			{draw: say(1, 4, 0, 0, 200, 200, 0), mistaken: &StaleBlock{N: 5}},
			{draw: say(1, 6, 70, 130, 0, 0, 0), want: brought(0, 70, 1000, 0, 800)},
			{draw: say(1, 5, 0, 0, 200, 200, 0), mistaken: &StaleBlock{N: 6, Spent: 70}},
		},
		"spent never falls": {
			{draw: say(1, 1, 0, 0, 200, 200, 0), want: brought(200, 0, 1000, 0, 800)},
			{draw: say(1, 2, 90, 110, 0, 0, 0), want: brought(0, 90, 1000, 0, 800)},
			{draw: say(1, 3, 10, 110, 0, 0, 0), want: brought(0, 90, 1000, 0, 800)},
			{draw: say(1, 4, 95, 105, 0, 0, 0), want: brought(0, 95, 1000, 0, 800)},
		},
		"a debt": {
			{draw: say(1, 1, 0, 0, 1000, 1000, 0), want: brought(1000, 0, 1000, 0, 0)},
			{draw: say(1, 2, 1200, 0, 10, 10, 0), want: brought(0, 1200, 1000, 0, -200)},
			{draw: say(2, 1, 0, 0, 10, 10, 0), want: brought(0, 1200, 1000, 0, -200)},
		},
		"what is held is believed": { // the ledger was restored, or an open request costs more
			{draw: say(1, 7, 300, 500, 0, 0, 0), want: brought(0, 300, 1000, 0, 200)},
			{draw: say(2, 1, 0, 0, 300, 300, 0), want: brought(200, 300, 1000, 500, 0)},
		},
		"final gives back the rest": {
			{draw: say(1, 1, 0, 0, 400, 400, 0), want: brought(400, 0, 1000, 0, 600)},
			{draw: final(say(1, 1<<63, 150, 0, 0, 0, 0), false), want: brought(0, 150, 1000, 0, 850), closed: true},
			{draw: final(say(1, 1<<63, 150, 0, 0, 0, 0), false), want: brought(0, 150, 1000, 0, 850), closed: true},
			{draw: say(1, 2, 160, 240, 100, 100, 0), mistaken: &StaleBlock{N: 1 << 63, Spent: 150}}, // late
			{draw: say(1, 1<<63+1, 160, 240, 100, 100, 0), want: brought(0, 160, 1000, 0, 840), closed: true},
			{draw: say(2, 1, 0, 0, 100, 100, 0), want: brought(100, 160, 1000, 0, 740)},
		},
		"lost counts as spent": {
			{draw: say(1, 1, 0, 0, 400, 400, 0), want: brought(400, 0, 1000, 0, 600)},
			{draw: final(say(1, 1<<63, 150, 0, 0, 0, 0), true), want: BudgetDrawn{Spent: 400, Amount: 1000, Free: 600, Lost: 250}, closed: true},
			{draw: say(1, 1<<63+1, 390, 0, 0, 0, 0), want: brought(0, 400, 1000, 0, 600), closed: true}, // it was counted
		},
		"a lowered amount": {
			{draw: say(1, 1, 0, 0, 400, 400, 0), want: brought(400, 0, 1000, 0, 600)},
			{draw: under(say(1, 2, 100, 300, 1, 1, 0), 350, 2), want: brought(0, 100, 350, 0, -50)},
			{draw: say(1, 3, 100, 300, 1, 1, 0), want: brought(0, 100, 350, 0, -50)}, // the higher revision binds
			{draw: say(1, 4, 300, 20, 1, 1, 0), want: brought(1, 300, 350, 0, 29)},
		},
		"nothing": {
			{draw: say(1, 1, 0, 0, 0, 0, 0), mistaken: ErrNoBudget},
			{draw: final(say(1, 1<<63, 0, 0, 0, 0, 0), true), mistaken: ErrNoBudget},
			{draw: under(say(1, 1, 0, 0, 10, 10, 0), 0, 1), want: brought(0, 0, 0, 0, 0)},
			{draw: final(say(2, 1<<63, 0, 0, 0, 0, 0), true), mistaken: ErrNoBudget},
		},
		"spent without a block": { // all of it debt, and then it crashed
			{draw: final(say(1, 1<<63, 10, 0, 0, 0, 0), true), want: brought(0, 10, 1000, 0, 990), closed: true},
			{draw: final(say(1, 1<<63, 10, 0, 0, 0, 0), true), want: brought(0, 10, 1000, 0, 990), closed: true},
		},
		"before and after the period": {
			{draw: say(1, 1, 0, 0, 400, 400, 0), want: brought(400, 0, 1000, 0, 600)},
			{after: 20*24*time.Hour - 1, draw: say(1, 2, 100, 300, 1, 1, 0), want: brought(1, 100, 1000, 0, 599)},
			{after: 1, draw: say(1, 3, 200, 101, 1, 1, 0), mistaken: &PeriodError{}},
			{draw: say(1, 4, 201, 100, 0, 0, 0), want: brought(0, 201, 1000, 0, 699)},
			{draw: final(say(1, 5, 250, 0, 0, 0, 0), false), want: brought(0, 250, 1000, 0, 750), closed: true},
		},
		"long before it": {
			{after: -10*24*time.Hour - 1, draw: say(1, 1, 0, 0, 400, 400, 0), mistaken: &PeriodError{}},
			{after: 1, draw: say(1, 1, 0, 0, 400, 400, 0), want: brought(400, 0, 1000, 0, 600)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBank(t)
			for i, s := range steps {
				b.now += int64(s.after)
				got, err := b.drawBudget(s.draw)
				if s.mistaken != nil {
					if !sameMistake(err, s.mistaken) {
						t.Errorf("step %d: got %+v, %v, want %v", i+1, got, err, s.mistaken)
					}
					continue
				}
				want := s.want
				want.N, want.Closed, want.Time = s.draw.N, s.closed, got.Time
				if err != nil || got != want {
					t.Errorf("step %d: got %+v, %v, want %+v", i+1, got, err, want)
				}
				if again := b.again(t); again.s.Facts().Hash != b.s.Facts().Hash || again.s.Facts().Budgets != 1 {
					t.Fatalf("step %d: read back it is another state", i+1)
				}
			}
		})
	}
}

// sameMistake compares errors by what they carry; of a period only that it is one.
func sameMistake(got, want error) bool {
	if stale, ok := errors.AsType[*StaleBlock](want); ok {
		is, ok := errors.AsType[*StaleBlock](got)
		return ok && *is == *stale
	}
	if _, ok := errors.AsType[*PeriodError](want); ok {
		_, ok := errors.AsType[*PeriodError](got)
		return ok
	}
	return errors.Is(got, want)
}

func TestNoBudget(t *testing.T) {
	good := BudgetDraw{Key: monthly("b"), Terms: terms(10), Holder: 1, N: 1, Want: 1}
	for name, c := range map[string]struct {
		change func(*BudgetDraw)
		want   string
	}{
		"a budget without a name":   {func(d *BudgetDraw) { d.Key.Limit = "" }, "1 to 262 bytes"},
		"a long subject":            {func(d *BudgetDraw) { d.Key.Subject = strings.Repeat("l", maxSubject+1) }, "subject 1024"},
		"a period backwards":        {func(d *BudgetDraw) { d.Key.Start = d.Key.End + 1 }, "a period begins"},
		"a period of nothing":       {func(d *BudgetDraw) { d.Key.Start = d.Key.End }, "a period begins"},
		"a period of before":        {func(d *BudgetDraw) { d.Key.Start = -1 }, "a period begins"},
		"a negative amount":         {func(d *BudgetDraw) { d.Terms.Amount = -1 }, "a budget is of 0 to"},
		"a huge amount":             {func(d *BudgetDraw) { d.Terms.Amount = MaxNano + 1 }, "a budget is of 0 to"},
		"a huge spike":              {func(d *BudgetDraw) { d.Terms.Spike.Floor = math.MaxInt64 }, "a budget is of 0 to"},
		"a negative factor":         {func(d *BudgetDraw) { d.Terms.Spike.Factor = -1 }, "a spike's factor"},
		"a huge factor":             {func(d *BudgetDraw) { d.Terms.Spike.Factor = math.MaxInt64 }, "a spike's factor"},
		"a long name":               {func(d *BudgetDraw) { d.Terms.Name = strings.Repeat("l", maxBucketName+1) }, "at most 262 bytes"},
		"it rolls and has a period": {func(d *BudgetDraw) { d.Terms.Window, d.Terms.Slot = time.Hour, time.Minute }, "that rolls has no period"},
		"a window without slots":    {func(d *BudgetDraw) { d.Terms.Window = time.Hour }, "a window of 1 to 512 slots"},
		"slots without a window":    {func(d *BudgetDraw) { d.Terms.Slot = time.Hour }, "a window of 1 to 512 slots"},
		"a negative window":         {func(d *BudgetDraw) { d.Terms.Window, d.Terms.Slot = -2, -1 }, "a window of 1 to 512 slots"},
		"many slots":                {func(d *BudgetDraw) { d.Terms.Window, d.Terms.Slot = time.Hour, time.Second }, "a window of 1 to 512 slots"},
		"alerts that fall":          {func(d *BudgetDraw) { d.Terms.Alerts = []int{80, 50} }, "alerts are 1 to 1000"},
		"an alert at nothing":       {func(d *BudgetDraw) { d.Terms.Alerts = []int{0} }, "alerts are 1 to 1000"},
		"an alert too high":         {func(d *BudgetDraw) { d.Terms.Alerts = []int{1001} }, "alerts are 1 to 1000"},
		"many alerts":               {func(d *BudgetDraw) { d.Terms.Alerts = make([]int, maxLevels+1) }, "at most 16 alerts"},
		"nobody":                    {func(d *BudgetDraw) { d.Holder = 0 }, "has a holder and a number"},
		"no number":                 {func(d *BudgetDraw) { d.N = 0 }, "has a holder and a number"},
		"a negative want":           {func(d *BudgetDraw) { d.Want = -1 }, "a draw is of 0 to"},
		"a huge need":               {func(d *BudgetDraw) { d.Need = MaxNano + 1 }, "a draw is of 0 to"},
		"a negative least":          {func(d *BudgetDraw) { d.Least = math.MinInt64 }, "a draw is of 0 to"},
		"a negative holding":        {func(d *BudgetDraw) { d.Holding = -1 }, "a draw is of 0 to"},
		"too much spent":            {func(d *BudgetDraw) { d.Spent = math.MaxInt64 }, "a draw is of 0 to"},
		"lost and going on":         {func(d *BudgetDraw) { d.Want, d.Lost = 0, true }, "said with the final draw"},
		"final and wanting":         {func(d *BudgetDraw) { d.Final = true }, "said with the final draw"},
		"a stranger":                {func(d *BudgetDraw) { d.Holder = 2 }, "not a member of the view"},
	} {
		b := newBank(t)
		_, _ = b.apply(&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 1, Members: []*ledgerpb.Member{{Name: "a", Incarnation: 1}}}})
		before := b.s.Facts().Hash
		d := good
		c.change(&d)
		if got, err := b.drawBudget(d); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %+v, %v, want an error with %q", name, got, err, c.want)
		}
		if after := b.s.Facts(); after.Budgets != 0 || after.Hash != before {
			t.Errorf("%s: refused, it changed the state", name)
		}
	}
}

// ideal is an account by big integers.
type ideal struct {
	amount       *big.Int
	window, slot int64 // 0: it does not roll
	spent        []idealSpent
	out          map[uint64]*big.Int // by holder
}

type idealSpent struct {
	at     int64
	amount *big.Int
}

func (m *ideal) spend(at int64, amount *big.Int) {
	m.spent = append(m.spent, idealSpent{at, amount})
}

func (m *ideal) total(now int64) *big.Int {
	sum := new(big.Int)
	for _, s := range m.spent {
		if m.window == 0 || (s.at/m.slot+1)*m.slot > now-m.window { // its slot touches the window
			sum.Add(sum, s.amount)
		}
	}
	return sum
}

func (m *ideal) outstanding() *big.Int {
	sum := new(big.Int)
	for _, n := range m.out {
		sum.Add(sum, n)
	}
	return sum
}

func (m *ideal) free(now int64) *big.Int {
	f := new(big.Int).Sub(m.amount, m.total(now))
	return f.Sub(f, m.outstanding())
}

func least(a, b *big.Int) *big.Int {
	if a.Cmp(b) < 0 {
		return a
	}
	return b
}

func most(a, b *big.Int) *big.Int {
	if a.Cmp(b) > 0 {
		return a
	}
	return b
}

// grant is what of free a draw gets.
func (m *ideal) grant(now int64, d *BudgetDraw) *big.Int {
	free := m.free(now)
	g := least(big.NewInt(d.Want), most(least(big.NewInt(d.Need), free), new(big.Int).Quo(free, big.NewInt(8))))
	if g.Sign() <= 0 || g.Cmp(big.NewInt(d.Least)) < 0 {
		return new(big.Int)
	}
	return g
}

// purse is a holder, and what it really has.
type purse struct {
	id, n       uint64
	spent, held int64 // of its own knowledge
	told        int64 // of spent
	last        BudgetDraw
	gave        BudgetDrawn
}

// budgetRun is one run of the model below.
type budgetRun struct {
	t       *rapid.T
	b       *bank
	key     BudgetKey
	terms   BudgetTerms
	m       ideal
	purses  []*purse // alive
	dead    []*purse // crashed, and not ended
	ended   []*purse // said to be final, or released, and perhaps alive all the same
	next    uint64
	honest  bool // nothing was charged, lowered or spent that was not granted
	granted int
}

// TestBudgetsAgainstBigInt lets holders spend, crash, come back, be ended and released, and say
// things twice or late, while operators correct what was spent and change the amount. The ledger
// grants what big integers grant, and never more than there is.
func TestBudgetsAgainstBigInt(t *testing.T) {
	granted := 0
	rapid.Check(t, func(t *rapid.T) {
		r := &budgetRun{t: t, b: &bank{t: t, s: NewState(), now: begun}, next: 3, honest: true, key: endless("b")}
		r.terms = BudgetTerms{Revision: 1, Name: "b", Alerts: []int{50, 100}, Amount: rapid.OneOf(rapid.Int64Range(0, 1000), rapid.Int64Range(0, MaxNano)).Draw(t, "amount")}
		switch rapid.IntRange(0, 2).Draw(t, "kind") {
		case 0:
			r.key = monthly("b")
		case 1:
			r.terms.Window = 24 * time.Hour
			r.terms.Slot = rapid.SampledFrom([]time.Duration{time.Hour, 7 * time.Minute, 24 * time.Hour}).Draw(t, "slot")
		}
		r.m = ideal{amount: big.NewInt(r.terms.Amount), window: int64(r.terms.Window), slot: int64(r.terms.Slot), out: map[uint64]*big.Int{}}
		r.purses = []*purse{{id: 1}, {id: 2}}
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			r.b.now += rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, hour)).Draw(t, "pause")
			if r.key.End != 0 {
				r.b.now = min(r.b.now, r.key.End-1)
			}
			r.step()
			r.check()
			if rapid.IntRange(0, 4).Draw(t, "restart") == 0 {
				r.b.s = restored(t, r.b.s)
			}
		}
		granted += r.granted
	})
	if granted == 0 {
		t.Error("nothing was ever granted")
	}
}

func (r *budgetRun) step() {
	p := rapid.SampledFrom(r.purses).Draw(r.t, "who")
	switch rapid.IntRange(0, 11).Draw(r.t, "what") {
	case 0: // an answer was lost
		if p.n > 0 {
			before := r.b.s.Facts().Hash
			if again, err := r.b.drawBudget(p.last); err != nil || again != p.gave || r.b.s.Facts().Hash != before {
				r.t.Fatalf("said again, %+v gives %+v (%v), and gave %+v", p.last, again, err, p.gave)
			}
		}
	case 1: // an older one comes late
		if p.n > 1 {
			late, before := p.last, r.b.s.Facts().Hash
			late.N, late.Want, late.Spent = rapid.Uint64Range(1, p.n-1).Draw(r.t, "n"), 100, p.spent+5
			_, err := r.b.drawBudget(late)
			if stale, ok := errors.AsType[*StaleBlock](err); !ok || stale.N != p.n || stale.Spent != p.told || r.b.s.Facts().Hash != before {
				r.t.Fatalf("draw %d after %d gives %v, and %d are told", late.N, p.n, err, p.told)
			}
		}
	case 2: // it crashes, perhaps with a draw under way that was applied
		r.dead = append(r.dead, p)
		r.purses[slices.Index(r.purses, p)] = &purse{id: r.next}
		r.next++
	case 3:
		r.recover()
	case 4:
		r.release()
	case 5:
		r.late()
	case 6:
		r.change()
	case 7:
		r.adjust()
	default:
		r.draw(p)
	}
}

// draw has a purse spend, give back and ask.
func (r *budgetRun) draw(p *purse) {
	spent := rapid.Int64Range(0, p.held).Draw(r.t, "spent")
	p.spent, p.held = p.spent+spent, p.held-spent
	p.held -= rapid.SampledFrom([]int64{0, 0, p.held, p.held / 2}).Draw(r.t, "returned")
	p.n++
	amounts := rapid.OneOf(rapid.Int64Range(0, 100), rapid.Int64Range(0, max(1, r.terms.Amount)))
	p.last = BudgetDraw{
		Key: r.key, Terms: r.terms, Holder: p.id, N: p.n, Spent: p.spent, Holding: p.held,
		Want: amounts.Draw(r.t, "want"), Need: amounts.Draw(r.t, "need"), Least: amounts.Draw(r.t, "least"),
	}
	if p.n == 1 && p.last.Want == 0 {
		p.last.Want = 1
	}
	r.say(p)
	p.held += p.gave.Granted
	if p.gave.Granted > 0 {
		r.granted++
	}
}

// say applies p.last, and what the ideal makes of it.
func (r *budgetRun) say(p *purse) {
	d := &p.last
	if _, known := r.m.out[p.id]; !known {
		r.m.out[p.id] = new(big.Int)
	}
	more := d.Spent - p.told
	p.told = d.Spent
	lost := new(big.Int)
	if d.Lost {
		lost = most(new(big.Int), new(big.Int).Sub(r.m.out[p.id], big.NewInt(more)))
	}
	r.m.spend(r.b.now, new(big.Int).Add(big.NewInt(more), lost))
	r.m.out[p.id] = big.NewInt(d.Holding)
	if d.Final {
		r.m.out[p.id] = new(big.Int)
	}
	want := r.m.grant(r.b.now, d)
	r.m.out[p.id] = new(big.Int).Add(r.m.out[p.id], want)
	gave, err := r.b.drawBudget(*d)
	others := new(big.Int).Sub(r.m.outstanding(), r.m.out[p.id])
	exact := BudgetDrawn{
		N: d.N, Granted: want.Int64(), Spent: r.m.total(r.b.now).Int64(), Amount: r.m.amount.Int64(), Others: others.Int64(),
		Free: r.m.free(r.b.now).Int64(), Lost: lost.Int64(), Closed: d.Final, Time: gave.Time,
	}
	if err != nil || gave != exact || gave.Time.UnixNano() != r.b.now {
		r.t.Fatalf("%+v gives %+v (%v), want %+v", *d, gave, err, exact)
	}
	p.gave = gave
}

// recover has the next process tell what a dead one spent, as its journal knows it, or that it is lost.
func (r *budgetRun) recover() {
	if len(r.dead) == 0 {
		return
	}
	p := r.dead[0]
	r.dead = r.dead[1:]
	if p.n == 0 {
		return // nothing of it is known
	}
	p.spent += rapid.Int64Range(0, p.held).Draw(r.t, "open") // in the journal, and not told
	p.held = 0
	p.last = BudgetDraw{Key: r.key, Terms: r.terms, Holder: p.id, N: 1 << 63, Spent: p.spent, Final: true, Lost: rapid.Bool().Draw(r.t, "lost")}
	out := new(big.Int).Set(r.m.out[p.id])
	before := p.told
	r.say(p)
	if p.last.Lost && p.gave.Lost+p.spent-before != out.Int64() {
		r.t.Fatalf("%v were outstanding, %d are spent and %d lost", out, p.spent-before, p.gave.Lost)
	}
	p.told, p.n = max(p.told, p.told+p.gave.Lost), p.last.N
	p.spent = max(p.spent, p.told)
	r.ended = append(r.ended, p)
}

// release has an operator give up on a dead one.
func (r *budgetRun) release() {
	if len(r.dead) == 0 {
		return
	}
	p := r.dead[0]
	r.dead = r.dead[1:]
	result := r.b.result(&ledgerpb.ReleaseHolder{Holder: p.id, Node: "n", Reason: "burnt"})
	if p.n == 0 {
		if result.GetCode() != codeNotFound {
			r.t.Fatalf("releasing whom nobody knows gives %v", result)
		}
		return
	}
	if result.GetCode() != "" || result.GetBudget().GetFreed() != r.m.out[p.id].Int64() {
		r.t.Fatalf("releasing %v gives %v", r.m.out[p.id], result)
	}
	r.m.out[p.id] = new(big.Int)
	r.ended = append(r.ended, p)
}

// late is a report of one that was ended, and lives: it adds, and gets nothing.
func (r *budgetRun) late() {
	if len(r.ended) == 0 {
		return
	}
	p := rapid.SampledFrom(r.ended).Draw(r.t, "ended")
	spent := rapid.Int64Range(0, p.held).Draw(r.t, "spent late")
	p.spent, p.held, p.n = p.spent+spent, p.held-spent, p.n+1
	r.honest = r.honest && spent == 0
	r.m.spend(r.b.now, big.NewInt(p.spent-p.told))
	p.told = p.spent
	gave, err := r.b.drawBudget(BudgetDraw{Key: r.key, Terms: r.terms, Holder: p.id, N: p.n, Spent: p.spent, Holding: p.held, Want: 10, Need: 10})
	if err != nil || !gave.Closed || gave.Granted != 0 || gave.Spent != r.m.total(r.b.now).Int64() {
		r.t.Fatalf("after its end a holder gets %+v (%v), and %v are spent", gave, err, r.m.total(r.b.now))
	}
}

// change raises or lowers the amount, from the next draw on.
func (r *budgetRun) change() {
	amount := rapid.Int64Range(0, max(1, min(MaxNano, 2*r.terms.Amount))).Draw(r.t, "new amount")
	r.terms.Revision++
	r.honest = r.honest && amount >= r.terms.Amount
	r.terms.Amount = amount
	r.m.amount = big.NewInt(amount)
	r.draw(r.purses[0])
}

func (r *budgetRun) adjust() {
	if _, ok := r.b.s.budgets.find(r.key); !ok {
		return
	}
	amount := rapid.Int64Range(-1000, 1000).Filter(func(n int64) bool { return n != 0 }).Draw(r.t, "correction")
	r.honest = r.honest && amount < 0 && r.key.End != 0 // a credit that rolls out of the window is a charge
	if result := r.b.result(&ledgerpb.AdjustBudget{Key: r.key.message(), Amount: amount, Reason: "why"}); result.GetCode() != "" {
		r.t.Fatalf("adjusting by %d: %v", amount, result)
	}
	r.m.spend(r.b.now, big.NewInt(amount))
}

// check holds the account against the ideal.
func (r *budgetRun) check() {
	a, ok := r.b.s.budgets.find(r.key)
	if !ok {
		return
	}
	shown := a.at(r.b.now)
	if spent := r.m.total(r.b.now); spent.Cmp(big.NewInt(shown.Spent)) != 0 || r.m.outstanding().Cmp(big.NewInt(shown.Outstanding())) != 0 {
		r.t.Fatalf("%d are spent and %d outstanding, exactly %v and %v", shown.Spent, shown.Outstanding(), spent, r.m.outstanding())
	}
	if both := new(big.Int).Add(r.m.total(r.b.now), r.m.outstanding()); r.honest && both.Cmp(r.m.amount) > 0 {
		r.t.Fatalf("%v are spent or outstanding, of %v", both, r.m.amount)
	}
	held := new(big.Int) // and so is what they really hold
	for _, p := range slices.Concat(r.purses, r.dead) {
		held.Add(held, big.NewInt(p.spent-p.told+p.held))
	}
	if held.Cmp(r.m.outstanding()) > 0 {
		r.t.Fatalf("%v are held, and %v outstanding", held, r.m.outstanding())
	}
}

// audited are the entries of an action, the oldest first: their actor and what they say.
func (b *bank) audited(action string) (out []string) {
	for _, e := range b.s.Audit(1000, AuditFilter{Action: action}) {
		out = append(out, e.Actor+": "+e.Object+": "+e.After)
	}
	slices.Reverse(out)
	return out
}

func TestAlerts(t *testing.T) {
	b := newBank(t)
	k := monthly("org")
	d := BudgetDraw{Key: k, Terms: BudgetTerms{Amount: 1000, Revision: 1, Alerts: []int{50, 80, 100}, Name: "org"}, Holder: 1}
	spend := func(spent int64) *account {
		t.Helper()
		d.N, d.Spent = d.N+1, spent
		_, err := b.drawBudget(d)
		must(t, err)
		return b.account(t, k)
	}
	adjust := func(amount int64) *account {
		t.Helper()
		if r := b.result(&ledgerpb.AdjustBudget{Key: k.message(), Amount: amount, Reason: "r"}); r.GetCode() != "" {
			t.Fatal(r)
		}
		return b.account(t, k)
	}
	var at time.Time
	for i, c := range []struct {
		a       func() *account
		crossed int
		alerts  int // so far
		untold  bool
	}{
		{func() *account { return spend(499) }, 0, 0, false},
		{func() *account { return spend(500) }, 50, 1, true},
		{func() *account { return spend(799) }, 50, 1, true},
		{func() *account { return spend(1300) }, 100, 2, true},  // past two at once
		{func() *account { return adjust(-340) }, 100, 2, true}, // 960: a little below is no news
		{func() *account { return adjust(50) }, 100, 2, true},
		{func() *account { return adjust(-60) }, 100, 2, true},  // 950
		{func() *account { return adjust(-1) }, 80, 2, true},    // 949
		{func() *account { return adjust(100) }, 100, 3, true},  // once more
		{func() *account { return adjust(-1045) }, 0, 3, false}, // 4
		{func() *account { d.Terms.Revision, d.Terms.Amount = 2, 5; return spend(1300) }, 80, 4, true},
		{func() *account { d.Terms.Revision, d.Terms.Amount = 3, 0; return spend(1300) }, 100, 5, true},
		{func() *account { return adjust(-4) }, 0, 5, false},
	} {
		b.now += minute
		before := len(b.audited("budget.alert"))
		a := c.a()
		if c.alerts > before {
			at = a.Time
		}
		if back := b.again(t).account(t, k); !a.CrossedAt.Equal(at) || !back.CrossedAt.Equal(at) {
			t.Errorf("step %d: crossed at %v, read back %v, want %v", i+1, a.CrossedAt, back.CrossedAt, at)
		}
		if got := len(b.audited("budget.alert")); a.Crossed != c.crossed || got != c.alerts || len(b.untold()) == 1 != c.untold {
			t.Errorf("step %d: %d spent: crossed %d, %d alerts, untold %v; want %+v", i+1, a.Spent, a.Crossed, got, b.untold(), c)
		}
		if back := b.again(t); len(back.untold()) != len(b.untold()) {
			t.Errorf("step %d: read back, %d are untold", i+1, len(back.untold()))
		}
	}
	if first := b.audited("budget.alert")[0]; !strings.Contains(first, "budget org of tenant acme") || !strings.Contains(first, "50 %: 0.0000005 of 0.000001 dollars") {
		t.Errorf("the alert says %q", first)
	}
}

// TestUntoldGoOn from where the last ones ended, so that those that are refused hold up no others.
func TestUntoldGoOn(t *testing.T) {
	b := newBank(t)
	for i := range 10 {
		d := BudgetDraw{Key: monthly(fmt.Sprint("b", i)), Terms: BudgetTerms{Amount: 10, Revision: 1, Alerts: []int{50}, Name: "b"}, Holder: 1, N: 1, Spent: 4 + int64(i%3)}
		_, err := b.drawBudget(d)
		must(t, err)
	}
	var got []string
	var after *BudgetKey
	for f := (&fsm{state: b.s}); ; {
		list := f.untold(after, 2)
		for _, a := range list {
			got, after = append(got, a.Key.Limit), &a.Key
		}
		if len(list) < 2 {
			break
		}
	}
	if want := []string{"b1", "b2", "b4", "b5", "b7", "b8"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestUsedUp: what is left may pay for no request, and never be spent.
func TestUsedUp(t *testing.T) {
	for name, c := range map[string]struct {
		spent, held, least int64
		alerts             []int
		want               int
	}{
		"the last does not do":         {960, 0, 50, []int{50, 100}, 100},
		"it does":                      {960, 0, 30, []int{50, 100}, 50},
		"others hold the rest":         {960, 20, 50, []int{50, 100}, 50},
		"a request as dear as much":    {900, 0, 200, []int{50, 100}, 50},
		"nobody wants to hear of 100":  {960, 0, 50, []int{50, 99}, 50},
		"and of more it has not come":  {960, 0, 50, []int{50, 100, 110}, 100},
		"all is spent":                 {1000, 0, 1, []int{50, 100}, 100},
		"nothing is wanted of nothing": {999, 0, 0, []int{50, 100}, 50},
	} {
		b := newBank(t)
		k, terms := monthly("b"), BudgetTerms{Amount: 1000, Revision: 1, Alerts: c.alerts, Name: "b"}
		_, err := b.drawBudget(BudgetDraw{Key: k, Terms: terms, Holder: 2, N: 1, Spent: c.spent, Holding: c.held})
		must(t, err)
		for n := range uint64(2) {
			_, err = b.drawBudget(BudgetDraw{Key: k, Terms: terms, Holder: 1, N: n + 1, Want: 2 * c.least, Need: c.least, Least: c.least})
			must(t, err)
			if c.least < 40 { // it was granted some
				_, err = b.drawBudget(BudgetDraw{Key: k, Terms: terms, Holder: 1, N: n + 10})
				break
			}
		}
		must(t, err)
		got := b.audited("budget.alert")
		if a := b.account(t, k); a.Crossed != c.want || len(got) > 2 {
			t.Errorf("%s: %d is passed, want %d: %q", name, a.Crossed, c.want, got)
		}
		if r := b.result(&ledgerpb.AdjustBudget{Key: k.message(), Amount: -200, Reason: "r"}); r.GetCode() != "" || b.account(t, k).Crossed > 50 {
			t.Errorf("%s: after a credit %d is passed: %v", name, b.account(t, k).Crossed, r)
		}
	}
}

func TestNotified(t *testing.T) {
	b := newBank(t)
	k := monthly("org")
	d := BudgetDraw{Key: k, Terms: BudgetTerms{Amount: 1000, Revision: 1, Alerts: []int{50, 80}, Name: "org"}, Holder: 1, N: 1, Spent: 600}
	_, err := b.drawBudget(d)
	must(t, err)
	tell := func(percent uint32, spike int64, notified int, untold bool) {
		t.Helper()
		r := b.result(&ledgerpb.BudgetNotified{Key: k.message(), Percent: percent, Spike: spike})
		a := b.account(t, k)
		if r.GetCode() != "" || a.Notified != notified || !a.SpikeTold.IsZero() || len(b.untold()) == 1 != untold {
			t.Errorf("%v: told of %d %% and of a spike %v, untold %d", r, a.Notified, a.SpikeTold, len(b.untold()))
		}
	}
	tell(0, b.now, 0, true) // there was no spike
	tell(50, 0, 50, false)
	tell(80, 0, 50, false) // nor that alert
	d.N, d.Spent = 2, 800
	_, err = b.drawBudget(d)
	must(t, err)
	tell(50, 0, 50, true)
	tell(80, 0, 80, false)
	tell(50, 0, 80, false)
	none := endless("none")
	if r := b.result(&ledgerpb.BudgetNotified{Key: none.message(), Percent: 5}); r.GetCode() != codeNotFound {
		t.Errorf("of an account that is not there: %v", r)
	}
}

func TestSpikes(t *testing.T) {
	for name, c := range map[string]struct {
		spike  Spike
		tenant string
		young  bool
		recent []int64 // what is spent in each of the last minutes, after 100 in each of an hour
		spikes int
		killed bool
	}{
		"three times":              {Spike{Factor: 3 * factorOne, Floor: 1}, "acme", false, []int64{301}, 1, false},
		"not quite":                {Spike{Factor: 3 * factorOne, Floor: 1}, "acme", false, []int64{300}, 0, false},
		"in parts":                 {Spike{Factor: 3_500_000, Floor: 1}, "acme", false, []int64{100, 351 + 3}, 1, false},
		"below the floor":          {Spike{Factor: 3 * factorOne, Floor: 302}, "acme", false, []int64{301}, 0, false},
		"killed":                   {Spike{Factor: 3 * factorOne, Floor: 1, Kill: true}, "acme", false, []int64{301}, 1, true},
		"once an hour":             {Spike{Factor: 3 * factorOne, Floor: 1}, "acme", false, []int64{1000, 100_000}, 1, false},
		"of all tenants":           {Spike{Factor: 3 * factorOne, Floor: 1, Kill: true}, "", false, []int64{301}, 0, false},
		"none wanted":              {Spike{Floor: 1, Kill: true}, "acme", false, []int64{1 << 50}, 0, false},
		"too young to tell":        {Spike{Factor: 3 * factorOne, Floor: 1}, "acme", true, []int64{1, 1, 1, 1, 1, 1, 1, 1, 1, 1000}, 0, false},
		"young, but old enough":    {Spike{Factor: 3 * factorOne, Floor: 1}, "acme", true, []int64{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1000}, 1, false},
		"young, measured by young": {Spike{Factor: 3 * factorOne, Floor: 1}, "acme", true, []int64{9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 27}, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBank(t)
			k := monthly("org")
			k.Tenant = c.tenant
			d := BudgetDraw{Key: k, Terms: BudgetTerms{Amount: MaxNano, Revision: 1, Name: "org", Spike: c.spike}, Holder: 1, Want: 1}
			b.now -= b.now % minute
			spend := func(amount int64) {
				for range 2 { // a report or two a minute
					d.N, d.Spent = d.N+1, d.Spent+amount/2+amount%2*int64(d.N%2)
					_, err := b.drawBudget(d)
					must(t, err)
					b.now += minute / 2
				}
			}
			if !c.young {
				for range 70 {
					spend(100)
				}
			}
			for _, amount := range c.recent {
				spend(amount)
			}
			_, killed := b.s.Facts().Kills.Lookup(KillTenant, "acme")
			if got := b.audited("budget.spike"); len(got) != c.spikes || killed != c.killed || len(b.untold()) != c.spikes {
				t.Errorf("spikes %v, killed %v, untold %d", got, killed, len(b.untold()))
			}
			if c.killed {
				if got := b.audited("kill."); len(got) != 1 || !strings.HasPrefix(got[0], "budget org: tenant acme: on: 0.0000003") {
					t.Errorf("the kill switch is audited as %q", got)
				}
			}
			if c.spikes > 0 {
				at := b.account(t, k).Spiked
				_ = b.result(&ledgerpb.BudgetNotified{Key: k.message(), Spike: at.UnixNano()})
				if a := b.account(t, k); !a.SpikeTold.Equal(at) || len(b.untold()) != 0 {
					t.Errorf("told of a spike at %v, not %v", a.SpikeTold, at)
				}
			}
			if back := b.again(t); back.s.Facts().Hash != b.s.Facts().Hash {
				t.Error("read back it is another state")
			}
		})
	}
}

// TestASpikeShows though blocks do not: the switch that it throws must be seen at once.
func TestASpikeShows(t *testing.T) {
	b := newBank(t)
	d := BudgetDraw{Key: monthly("org"), Terms: BudgetTerms{Amount: 1000, Revision: 1, Alerts: []int{50}, Name: "org"}, Holder: 1, N: 1, Spent: 499}
	_, err := b.drawBudget(d)
	must(t, err)
	if b.s.shown != 0 {
		t.Error("a draw shows")
	}
	d.N, d.Spent = 2, 500
	_, err = b.drawBudget(d)
	must(t, err)
	if b.s.shown != b.index {
		t.Error("an alert does not show")
	}
}

func TestRollingBudget(t *testing.T) {
	b := newBank(t)
	b.now -= b.now % hour
	k := endless("b")
	d := BudgetDraw{Key: k, Terms: BudgetTerms{Amount: 1000, Revision: 1, Name: "b", Window: 24 * time.Hour, Slot: time.Hour}, Holder: 1}
	say := func(after time.Duration, spent, want, granted, total int64) {
		t.Helper()
		b.now += int64(after)
		d.N, d.Spent, d.Want, d.Need = d.N+1, spent, want, want
		got, err := b.drawBudget(d)
		if err != nil || got.Granted != granted || got.Spent != total {
			t.Errorf("draw %d gives %+v, %v, want %d of %d", d.N, got, err, granted, total)
		}
		d.Holding = 0
	}
	say(0, 0, 600, 600, 0)
	say(30*time.Minute, 600, 500, 400, 600)
	say(10*time.Hour, 1000, 1, 0, 1000)
	say(14*time.Hour, 1000, 1, 0, 1000) // 24.5 h after: its slot is just touched
	if shown := b.account(t, k).at(b.now + int64(30*time.Minute)); shown.Spent != 400 {
		t.Errorf("half an hour later %d are shown", shown.Spent)
	}
	say(30*time.Minute, 1000, 700, 600, 400)
	b.now -= 20 * hour // a clock that is set back does not bring it again, nor another window
	say(0, 1000, 700, 600, 400)
	d.Terms.Revision, d.Terms.Slot = 2, 4*time.Hour
	say(20*time.Hour, 1000, 700, 600, 400)
	d.Terms.Revision, d.Terms.Window, d.Terms.Slot = 3, 0, 0
	say(0, 1000, 700, 600, 400)
	say(100*time.Hour, 1000, 700, 600, 400) // what was in the window stays for good
	d.Terms.Revision, d.Terms.Window, d.Terms.Slot = 4, time.Hour, time.Hour
	say(0, 1000, 700, 600, 400)
	say(2*time.Hour, 1000, 1000, 1000, 0)
}

func TestAdjustments(t *testing.T) {
	b := newBank(t)
	adjust := func(k BudgetKey, amount int64, reason string) (BudgetDrawn, error) {
		return drawnOf(b.result(&ledgerpb.AdjustBudget{Key: k.message(), Amount: amount, Reason: reason}))
	}
	if got, err := adjust(monthly("new"), -50, "welcome"); err != nil || got.Spent != -50 {
		t.Errorf("a credit before anything is spent: %+v, %v", got, err)
	}
	d := BudgetDraw{Key: monthly("new"), Terms: terms(100), Holder: 1, N: 1, Want: 1000, Need: 1000}
	if got, err := b.drawBudget(d); err != nil || got.Granted != 150 || got.Amount != 100 {
		t.Errorf("with a credit of 50 and 100 it gives %+v, %v", got, err)
	}
	if got, err := adjust(monthly("new"), 30, "forgotten"); err != nil || got.Spent != -20 || got.Free != -30 || got.Others != 150 {
		t.Errorf("a charge: %+v, %v", got, err)
	}
	past := monthly("past")
	past.Start, past.End = 1, b.now
	for name, err := range map[string]error{
		"nothing":       second(adjust(monthly("new"), 0, "r")),
		"no reason":     second(adjust(monthly("new"), 1, "")),
		"too much":      second(adjust(monthly("new"), MaxNano+1, "r")),
		"a past period": second(adjust(past, 1, "r")),
		"nobody":        second(adjust(BudgetKey{}, 1, "r")),
	} {
		if err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	for range 2 {
		_, _ = adjust(monthly("new"), -MaxNano, "r")
	}
	if _, err := adjust(monthly("new"), -MaxNano, "r"); err == nil || b.account(t, monthly("new")).Spent < -2*MaxNano {
		t.Errorf("credits without end: %v", err)
	}
	want := []string{"budget.credit alice: ", "budget.charge alice: "}
	got := b.s.Audit(100, AuditFilter{Action: "budget."})
	slices.Reverse(got)
	for i, w := range want {
		if e := got[i]; !strings.HasPrefix(e.Action+" "+e.Actor+": ", w) || !strings.Contains(e.After, []string{"credit of 0.00000005 dollars: welcome; ", "charge of 0.00000003 dollars: forgotten; -0.00000002 dollars spent now"}[i]) {
			t.Errorf("entry %d is %+v", i, e)
		}
	}
	early := monthly("tomorrow") // of a node whose clock is ahead, or a human in error
	early.Start = b.now + hour
	before := b.s.Facts().Budgets
	_, err := drawnOf(b.result(&ledgerpb.AdjustBudget{Key: early.message(), Amount: 1, Reason: "r"}))
	if period, ok := errors.AsType[*PeriodError](err); !ok || period.Now.UnixNano() != b.now || b.s.Facts().Budgets != before {
		t.Errorf("a period that has not begun is corrected: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestRelease(t *testing.T) {
	b := newBank(t)
	view := func(epoch uint64, incarnations ...uint64) {
		v := &ledgerpb.View{Epoch: epoch}
		for _, i := range incarnations {
			v.Members = append(v.Members, &ledgerpb.Member{Name: fmt.Sprint("n", i), Incarnation: i})
		}
		_, err := b.apply(&ledgerpb.SetView{View: v})
		must(t, err)
	}
	view(1, 1, 2)
	for i, k := range []BudgetKey{monthly("a"), endless("b"), monthly("c")} {
		_, err := b.drawBudget(BudgetDraw{Key: k, Terms: terms(1000), Holder: uint64(1 + i/2), N: 1, Want: 100, Need: 100})
		must(t, err)
	}
	release := func(holder uint64, reason string) *ledgerpb.Result {
		return b.result(&ledgerpb.ReleaseHolder{Holder: holder, Node: "n1", Reason: reason})
	}
	if r := release(1, "r"); r.GetCode() != codeConflict || !strings.Contains(r.GetMessage(), "headgate members") {
		t.Errorf("releasing a member gives %v", r)
	}
	view(2, 2)
	if _, err := b.drawBudget(BudgetDraw{Key: monthly("a"), Terms: terms(1000), Holder: 1, N: 2, Holding: 100, Want: 5}); !errors.Is(err, ErrNotMember) {
		t.Errorf("one that is no member draws: %v", err)
	}
	if r := release(1, ""); r.GetCode() != codeInvalid {
		t.Errorf("without a reason: %v", r)
	}
	if r := release(7, "r"); r.GetCode() != codeNotFound {
		t.Errorf("nobody: %v", r)
	}
	b = b.again(t)
	wrong := b.result(&ledgerpb.ReleaseHolder{Holder: 1, Node: "n7", Reason: "r"})
	if wrong.GetCode() != codeConflict || !strings.Contains(wrong.GetMessage(), `was one of node "n1", not "n7"`) || b.account(t, monthly("a")).Outstanding() != 100 {
		t.Errorf("of another node: %v", wrong)
	}
	if h := b.account(t, monthly("a")).Holders[0]; h.Node != "n1" {
		t.Errorf("the holder is %+v", h)
	}
	if r := release(1, "burnt"); r.GetCode() != "" || r.GetBudget().GetFreed() != 200 {
		t.Errorf("released: %v", r)
	}
	if out := b.account(t, monthly("c")).Outstanding(); out != 100 || b.account(t, monthly("a")).Outstanding() != 0 {
		t.Errorf("of another's %d are outstanding", out)
	}
	if got := b.audited("budget.release"); len(got) != 1 || !strings.Contains(got[0], "0.0000002 dollars of 2 accounts: burnt") {
		t.Errorf("audited: %q", got)
	}
	// A draw whose answer was lost comes again: what it gave is not given twice.
	if got, err := b.drawBudget(BudgetDraw{Key: monthly("a"), Terms: terms(1000), Holder: 1, N: 1, Want: 100, Need: 100}); err != nil || got.Granted != 0 || !got.Closed {
		t.Errorf("a draw of before the release comes again, and is given %+v, %v", got, err)
	}
	if r := release(1, "again"); r.GetCode() != "" || r.GetBudget().GetFreed() != 0 || len(b.audited("budget.release")) != 1 {
		t.Errorf("released again: %v", r)
	}
	view(3, 1, 2) // it lives, and comes back
	got, err := b.drawBudget(BudgetDraw{Key: monthly("a"), Terms: terms(1000), Holder: 1, N: 2, Spent: 30, Holding: 70, Want: 5})
	if want := (BudgetDrawn{N: 2, Spent: 30, Amount: 1000, Free: 970, Closed: true, Time: got.Time}); err != nil || got != want {
		t.Errorf("it gets %+v, %v, want %+v", got, err, want)
	}
}

// TestRecall: who is refused what others hold has them told, once for a batch.
func TestRecall(t *testing.T) {
	var told []BudgetKey
	f := newFSM(func(*Facts) {}, func(err error) { t.Error(err) })
	f.recalled = func(k BudgetKey) { told = append(told, k) }
	index := uint64(0)
	apply := func(draws ...BudgetDraw) []BudgetKey {
		t.Helper()
		told = nil
		var batch []*raft.Log
		for _, d := range draws {
			index++
			c := command(index, d.message())
			c.UnixNano = begun
			batch = append(batch, &raft.Log{Index: index, Type: raft.LogCommand, Data: mustMarshal(t, c)})
		}
		for _, o := range f.ApplyBatch(batch) {
			if o := o.(*outcome); o.err != nil || o.result.GetCode() != "" {
				t.Fatalf("%+v", o)
			}
		}
		return told
	}
	draw := func(k BudgetKey, holder, n uint64, holding, want, need int64) BudgetDraw {
		return BudgetDraw{Key: k, Terms: terms(100), Holder: holder, N: n, Holding: holding, Want: want, Need: need}
	}
	a, b := monthly("a"), monthly("b")
	if got := apply(draw(a, 1, 1, 0, 90, 90), draw(b, 1, 1, 0, 200, 200)); len(got) != 0 {
		t.Errorf("recalled %v of which nobody else holds any", got)
	}
	if got := apply(draw(a, 2, 1, 0, 90, 10)); len(got) != 0 {
		t.Errorf("recalled %v though one request's cost was there", got)
	}
	if got := apply(draw(a, 3, 1, 0, 5, 5), draw(b, 2, 1, 0, 1, 1), draw(a, 2, 2, 10, 5, 5), draw(b, 3, 1, 0, 0, 0), draw(a, 3, 1, 0, 5, 5)); !slices.Equal(got, []BudgetKey{a, b}) {
		t.Errorf("recalled %v", got)
	}
}

func TestBudgetsAreBounded(t *testing.T) {
	b := newBank(t)
	view := &ledgerpb.View{Epoch: 1, Members: []*ledgerpb.Member{{Name: "a", Incarnation: 9}}}
	_, err := b.apply(&ledgerpb.SetView{View: view})
	must(t, err)
	filler := monthly("filler")
	for i := range MaxBudgets {
		filler.Tenant, filler.Subject = fmt.Sprint("t", i%8), fmt.Sprint(i)
		b.s.budgets.add(&account{BudgetAccount: BudgetAccount{Key: filler, Terms: terms(10), Spent: 1}})
	}
	d := BudgetDraw{Key: monthly("l"), Terms: terms(10), Holder: 9, N: 1, Want: 1}
	if _, err := b.drawBudget(d); !errors.Is(err, ErrBudgetFull) || len(b.s.budgets.at) != MaxBudgets {
		t.Errorf("one more than the most: %v, now %d", err, len(b.s.budgets.at))
	}
	b.now = filler.End // their period is over: they make room for others
	d.Key = endless("l")
	if _, err := b.drawBudget(d); err != nil || len(b.s.budgets.at) > MaxBudgets {
		t.Errorf("after the others' period: %v, now %d", err, len(b.s.budgets.at))
	}
	b.s.budgets.bytes = maxBudgetBytes + 1<<20
	d.Key = endless("by bytes")
	if _, err := b.drawBudget(d); !errors.Is(err, ErrBudgetFull) {
		t.Errorf("names have no bound: %v", err)
	}
}

// TestATenantHasAShare: whose users are made up leaves room for the others, and gets some again when its periods end.
func TestATenantHasAShare(t *testing.T) {
	b := newBank(t)
	filler := monthly("filler")
	fill := func(n int, subject string) {
		for i := range n {
			filler.Subject = fmt.Sprint(subject, i)
			b.s.budgets.add(&account{BudgetAccount: BudgetAccount{Key: filler, Terms: terms(10), Spent: 1}})
		}
	}
	fill(MaxBudgets/4, "")
	d := BudgetDraw{Key: monthly("l"), Terms: terms(10), Holder: 9, N: 1, Want: 1}
	if _, err := b.drawBudget(d); !errors.Is(err, ErrBudgetFull) || !strings.Contains(err.Error(), `tenant "acme"`) {
		t.Errorf("beyond its share a tenant gets %v", err)
	}
	if _, err := drawnOf(b.result(&ledgerpb.AdjustBudget{Key: d.Key.message(), Amount: 1, Reason: "r"})); !errors.Is(err, ErrBudgetFull) {
		t.Errorf("beyond its share a correction gives %v", err)
	}
	for _, tenant := range []string{"other", ""} {
		d.Key.Tenant = tenant
		if _, err := b.drawBudget(d); err != nil {
			t.Errorf("tenant %q is shut out: %v", tenant, err)
		}
	}
	b.now = filler.End
	d.Key = endless("l")
	d.Key.Tenant = "acme"
	if _, err := b.drawBudget(d); err != nil || len(b.s.budgets.at) > MaxBudgets/4+2 {
		t.Errorf("after its periods a tenant gets %v, now %d", err, len(b.s.budgets.at))
	}

	b = newBank(t) // by the bytes of names
	fill(maxBudgetBytes/4/500, strings.Repeat("x", 500))
	if _, err := b.drawBudget(d); !errors.Is(err, ErrBudgetFull) {
		t.Errorf("a tenant's names have no bound: %v", err)
	}
}

// TestSharesAreCounted: what is added, forgotten, written and read back.
func TestSharesAreCounted(t *testing.T) {
	b := newBank(t)
	d := BudgetDraw{Terms: terms(10), Holder: 9, N: 1, Spent: 1}
	for i := range int64(100) {
		d.Key = BudgetKey{Key: limiter.Key{Tenant: fmt.Sprint("t", i%3), Limit: "b"}, Start: b.now, End: b.now + 24*hour}
		_, err := b.drawBudget(d)
		must(t, err)
		b.now += 24 * hour
	}
	for name, s := range map[string]*State{"as it was": b.s, "read back": b.again(t).s} {
		want := map[string]share{}
		for _, a := range s.budgets.all() {
			w := want[a.Key.Tenant]
			want[a.Key.Tenant] = share{w.count + 1, w.bytes + a.size()}
		}
		if len(want) != 3 || len(s.budgets.at) > 60 || !maps.Equal(s.budgets.shares, want) {
			t.Errorf("%s: the shares are %v, want %v", name, s.budgets.shares, want)
		}
	}
}

func TestHoldersAreBounded(t *testing.T) {
	b := newBank(t)
	k := monthly("b")
	d := BudgetDraw{Key: k, Terms: terms(MaxNano), N: 1, Want: 1, Need: 1}
	for i := range uint64(MaxHolders) {
		d.Holder = 2*i + 2
		_, err := b.drawBudget(d)
		must(t, err)
		b.now++
	}
	d.Holder = 1
	if got, err := b.drawBudget(d); !errors.Is(err, ErrBudgetFull) {
		t.Errorf("a holder more than the most gives %+v, %v", got, err)
	}
	for i, holder := range []uint64{40, 20, 60} { // ended one after the other
		b.now++
		_, err := b.drawBudget(BudgetDraw{Key: k, Terms: d.Terms, Holder: holder, N: 2, Spent: int64(i % 2), Final: true})
		must(t, err)
	}
	for i, c := range []struct{ comes, goes uint64 }{{1, 40}, {3, 20}, {1001, 60}} { // the oldest first
		d.Holder = c.comes
		if got, err := b.drawBudget(d); err != nil || got.Granted != 1 {
			t.Fatalf("with one ended a holder gets %+v, %v", got, err)
		}
		if _, found := b.account(t, k).find(c.goes); found || len(b.account(t, k).Holders) != MaxHolders {
			t.Errorf("%d: %d is still known, of %d", i, c.goes, len(b.account(t, k).Holders))
		}
	}
	// Of those that hold nothing, who is no member goes.
	_, err := b.drawBudget(BudgetDraw{Key: k, Terms: d.Terms, Holder: 100, N: 2})
	must(t, err)
	d.Holder = 5
	if got, err := b.drawBudget(d); !errors.Is(err, ErrBudgetFull) {
		t.Errorf("with all members, %+v, %v", got, err)
	}
	_, err = b.apply(&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 1, Members: []*ledgerpb.Member{{Name: "a", Incarnation: 5}}}})
	must(t, err)
	if got, err := b.drawBudget(d); err != nil || got.Granted != 1 {
		t.Errorf("with one gone, %+v, %v", got, err)
	}
	if back := b.again(t); back.s.Facts().Hash != b.s.Facts().Hash {
		t.Error("read back it is another state")
	}
}

// TestAccountsAreForgotten long after their period, and at once where nothing is spent and nobody may spend.
func TestAccountsAreForgotten(t *testing.T) {
	b := newBank(t)
	day := func(i int64) BudgetKey {
		return BudgetKey{Key: limiter.Key{Tenant: "acme", Limit: "b"}, Start: begun + i*24*hour, End: begun + (i+1)*24*hour}
	}
	d := BudgetDraw{Terms: terms(100), Holder: 1, N: 1, Want: 10, Need: 10}
	for i := range int64(100) {
		d.Key = day(i)
		_, err := b.drawBudget(d) // outstanding for ever
		must(t, err)
		b.now += 24 * hour
	}
	if n := b.s.Facts().Budgets; n < 36 || n > 60 { // two are looked at for each that comes
		t.Errorf("%d days are kept", n)
	}
	if back := b.again(t); back.s.Facts().Hash != b.s.Facts().Hash {
		t.Error("the hash does not fit what is left")
	}
	if _, err := b.drawBudget(BudgetDraw{Key: day(3), Terms: terms(100), Holder: 1, N: 1 << 63, Spent: 5, Final: true}); !errors.Is(err, ErrNoBudget) {
		t.Errorf("the end of what was forgotten gives %v", err)
	}
	rolls := BudgetDraw{Terms: BudgetTerms{Amount: 10, Revision: 1, Name: "r", Window: time.Hour, Slot: time.Minute}, Holder: 1}
	for i := range 500 { // each is spent from and ended
		rolls.Key = endless(fmt.Sprintf("r%d", i))
		rolls.N, rolls.Spent, rolls.Want, rolls.Final = 1, 0, 5, false
		_, err := b.drawBudget(rolls)
		must(t, err)
		rolls.N, rolls.Spent, rolls.Want, rolls.Final = 2, 5, 0, i != 7
		_, err = b.drawBudget(rolls)
		must(t, err)
		b.now += minute
	}
	if n := b.s.Facts().Budgets; n > 150 {
		t.Errorf("%d accounts are kept, of which some sixty count and forty are days", n)
	}
	if _, ok := b.s.budgets.find(endless("r7")); !ok {
		t.Error("an account was forgotten of which a member may still report")
	}
}

// TestWhoIsGoneIsAwaited: what a process had told before it died is not counted again by its last word, though nothing of
// it was left in the window meanwhile.
func TestWhoIsGoneIsAwaited(t *testing.T) {
	b := newBank(t)
	d := BudgetDraw{Terms: BudgetTerms{Amount: 10, Revision: 1, Name: "r", Window: time.Hour, Slot: time.Minute}, Key: endless("r"), Holder: 1, N: 1, Want: 5}
	_, err := b.drawBudget(d)
	must(t, err)
	d.N, d.Spent, d.Want = 2, 5, 0
	_, err = b.drawBudget(d)
	must(t, err)
	_, err = b.apply(&ledgerpb.SetView{View: &ledgerpb.View{Epoch: 1, Members: []*ledgerpb.Member{{Name: "a", Incarnation: 2}}}})
	must(t, err)
	others := func(wait time.Duration) {
		b.now += int64(wait)
		for i := range 10 { // each looks at two accounts
			_, err := b.drawBudget(BudgetDraw{Terms: terms(10), Key: endless(fmt.Sprint(wait, i)), Holder: 2, N: 1, Want: 1})
			must(t, err)
		}
	}
	others(3 * time.Hour)
	d.N, d.Final = 1<<63, true
	if got, err := b.drawBudget(d); err != nil || got.Spent != 0 || got.Free != 10 {
		t.Errorf("hours later the last word gives %+v, %v, want nothing spent", got, err)
	}
	others(time.Second)
	if _, ok := b.s.budgets.find(d.Key); !ok {
		t.Error("the account is forgotten at once: a draw that the log holds once more would be granted")
	}
	others(4 * time.Hour)
	if _, ok := b.s.budgets.find(d.Key); ok {
		t.Error("the account is kept, though the last word was said")
	}
}

// TestSnapshotsWithoutBudgetsAreOfBefore, so that a program from before them can read these.
func TestSnapshotsWithoutBudgetsAreOfBefore(t *testing.T) {
	b := newBank(t)
	for i, version := range []uint32{1, 2, 3} {
		switch i {
		case 1:
			_, err := b.reserve(Reserve{Bucket: bucketOf("l"), Limit: daily(5), Owner: 1, N: 1})
			must(t, err)
		case 2:
			_, err := b.drawBudget(BudgetDraw{Key: monthly("b"), Terms: terms(5), Holder: 1, N: 1, Want: 1})
			must(t, err)
		}
		var head ledgerpb.Header
		must(t, proto.Unmarshal(firstMessage(t, snapshotOf(t, b.s)), &head))
		if head.GetVersion() != version {
			t.Errorf("the version is %d, want %d", head.GetVersion(), version)
		}
	}
}

// TestCapturedBudgetsStay as they were while draws go on being applied.
func TestCapturedBudgetsStay(t *testing.T) {
	b := newBank(t)
	d := BudgetDraw{Key: endless("b"), Terms: BudgetTerms{Amount: 1000, Revision: 1, Name: "b", Window: time.Hour, Slot: time.Minute, Spike: Spike{Factor: factorOne}}, Holder: 1, N: 1, Want: 10}
	_, err := b.drawBudget(d)
	must(t, err)
	captured, want := b.s.Capture(), snapshotOf(t, b.s)
	for range 100 {
		b.now += minute
		d.N, d.Spent, d.Holder = d.N+1, d.Spent+3, 1+d.N%3
		_, err := b.drawBudget(d)
		must(t, err)
	}
	var got strings.Builder
	must(t, captured.Write(&got))
	if got.String() != string(want) {
		t.Error("what was captured has changed")
	}
}

// TestBudgetsOverRaft: whatever becomes of leaders and answers, what holders spent and have is what the
// ledger counts, and it is within the budget.
func TestBudgetsOverRaft(t *testing.T) {
	const amount = 3000
	k := BudgetKey{Key: limiter.Key{Tenant: "t", Limit: "l"}}
	inBubble(t, func(c *Config) {
		c.Servers = nil // who votes is not the subject
		c.SnapshotThreshold, c.TrailingLogs, c.SnapshotInterval = 100, 20, time.Second
		c.WallOff = func() (time.Duration, bool) { return time.Second, true }
	}, func(t *testing.T, c *testCluster) {
		nodes := c.bootstrap(3)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var again, spent atomic.Int64
		var holders sync.WaitGroup
		for id := range uint64(3) {
			holders.Go(func() {
				d, have := BudgetDraw{Key: k, Terms: terms(amount), Holder: id + 1, N: 1, Want: 9, Need: 3, Least: 3}, int64(0)
				for ended := false; !ended; {
					ended = ctx.Err() != nil
					if ended {
						d.Want, d.Need, d.Holding, d.Final = 0, 0, 0, true
					}
					have += c.drawUntilKnown(t, nodes[id], d, &again).Granted
					if have > 0 {
						have--
						d.Spent++
						spent.Add(1)
					}
					if have > 10 { // too much: some goes back
						have -= 4
					}
					d.N, d.Holding = d.N+1, have
					time.Sleep(20 * time.Millisecond)
				}
				if have > 0 || d.Spent > 0 { // what it spent since its end
					c.drawUntilKnown(t, nodes[id], d, &again)
				}
			})
		}
		if disturbed := disturb(ctx, c, nodes, rand.New(rand.NewPCG(1, 2))); disturbed < 3 {
			t.Errorf("only %d disturbances", disturbed)
		}
		holders.Wait()
		c.settled()
		a, ok := c.leader().ledger.Budget(k)
		if !ok || a.Spent != spent.Load() || a.Outstanding() != 0 || a.Spent < 200 || a.Spent > amount {
			t.Errorf("%d were spent, and the ledger has %+v", spent.Load(), a)
		}
		if all := c.leader().ledger.Budgets(nil, 5); len(all) != 1 || all[0].Spent != a.Spent || len(all[0].Holders) != 3 {
			t.Errorf("all of them are %+v", all)
		}
		if again.Load() == 0 {
			t.Error("no draw had to be tried again")
		}
	})
}

// drawUntilKnown says the same again whatever becomes of it.
func (c *testCluster) drawUntilKnown(t *testing.T, n *testNode, d BudgetDraw, again *atomic.Int64) BudgetDrawn {
	for {
		if here := c.reach(n.addr, n.id); here != nil {
			within, cancel := context.WithTimeout(t.Context(), time.Second)
			got, err := here.DrawBudget(within, d)
			cancel()
			if err == nil {
				return got
			}
			if !errors.Is(err, ErrUnknownOutcome) && !errors.Is(err, ErrNoLeader) && !errors.Is(err, ErrStopped) {
				t.Errorf("%+v: %v", d, err)
				return got
			}
		}
		again.Add(1)
		time.Sleep(10 * time.Millisecond) // virtual, as a client would
	}
}

// TestAWrongClockSpendsNothing of budgets, and all else about them goes on.
func TestAWrongClockSpendsNothing(t *testing.T) {
	var off atomic.Int64
	inBubble(t, func(c *Config) {
		c.WallOff = func() (time.Duration, bool) { return time.Duration(off.Load()), true }
	}, func(t *testing.T, c *testCluster) {
		c.bootstrap(3)
		l := c.leader().ledger
		k := BudgetKey{Key: limiter.Key{Tenant: "t", Limit: "l"}}
		d := BudgetDraw{Key: k, Terms: BudgetTerms{Amount: 100, Revision: 1, Alerts: []int{50}, Name: "l"}, Holder: 1, N: 1, Want: 60, Need: 60}
		off.Store(26 * hour)
		if got, err := l.DrawBudget(t.Context(), d); !errors.Is(err, ErrWallOff) {
			t.Errorf("a clock that is 26 hours off gives %+v, %v", got, err)
		}
		if err := l.AdjustBudget(t.Context(), "bob", k, 1, "r"); !errors.Is(err, ErrWallOff) {
			t.Errorf("a clock that is 26 hours off adjusts: %v", err)
		}
		off.Store(int64(time.Second))
		if got, err := l.DrawBudget(t.Context(), d); err != nil || got.Granted != 60 {
			t.Errorf("a clock that is right gives %+v, %v", got, err)
		}
		must(t, l.AdjustBudget(t.Context(), "bob", k, 50, "r"))
		if untold := l.UntoldBudgets(nil, 5); len(untold) != 1 || untold[0].Crossed != 50 {
			t.Errorf("untold are %+v", untold)
		}
		off.Store(26 * hour)
		must(t, l.BudgetNotified(t.Context(), k, 50, time.Time{}))
		if freed, err := l.ReleaseHolder(t.Context(), "bob", 1, "n1", "r"); err != nil || freed != 60 || len(l.UntoldBudgets(nil, 5)) != 0 {
			t.Errorf("freed %d, %v", freed, err)
		}
		if _, err := l.ReleaseHolder(t.Context(), "bob", 2, "n2", "r"); err == nil {
			t.Error("nobody was released")
		}
		if e := l.Audit(1, AuditFilter{Action: "budget.release"}); len(e) != 1 || e[0].Actor != "bob" {
			t.Errorf("audited as %+v", e)
		}
	})
}

// TestRollingBudgetsAreShownByTheClustersTime, and not by the clock of the node that is asked.
func TestRollingBudgetsAreShownByTheClustersTime(t *testing.T) {
	inBubble(t, func(c *Config) { c.CheckEvery = time.Hour }, func(t *testing.T, c *testCluster) {
		c.bootstrap(1)
		l := c.leader().ledger
		d := BudgetDraw{Key: endless("l"), Terms: BudgetTerms{Amount: 100, Revision: 1, Name: "l", Window: time.Minute, Slot: time.Second}, Holder: 1, N: 1, Spent: 60}
		_, err := l.DrawBudget(t.Context(), d)
		must(t, err)
		spent := func() [2]int64 {
			one, _ := l.Budget(d.Key)
			return [2]int64{one.Spent, l.Budgets(nil, 1)[0].Spent}
		}
		time.Sleep(2 * time.Minute) // in the bubble; nothing is committed
		if got := spent(); got != [2]int64{60, 60} {
			t.Errorf("by a clock that went on alone %v are spent", got)
		}
		c.propose(c.leader(), set("x", "v"))
		if got := spent(); got != [2]int64{} {
			t.Errorf("two minutes later %v are spent", got)
		}
	})
}

// FuzzBudgets: whatever holders and operators say in whatever order, no replica panics or stops,
// nothing is granted that is not free, and what is written is read back.
func FuzzBudgets(f *testing.F) {
	f.Add([]byte{0, 1, 1, 20, 5, 0, 3, 9, 0, 1, 2, 90, 1, 20, 9, 1, 3, 2, 1, 1, 5, 5, 5, 5})
	f.Add([]byte{1, 1, 1, 200, 0, 0, 0, 255, 5, 2, 2, 1, 50, 9, 60, 255, 6, 2, 2, 2, 128, 3, 7, 0})
	f.Add([]byte{2, 1, 1, 99, 100, 0, 0, 0, 8, 1, 1, 10, 10, 1, 200, 7, 12, 3, 9, 1, 1, 1, 1, 255})
	f.Fuzz(func(t *testing.T, data []byte) {
		b := newBank(t)
		kinds := []BudgetTerms{
			{Amount: 1000, Alerts: []int{50, 100}, Name: "a"},
			{Amount: MaxNano, Window: time.Hour, Slot: time.Minute, Name: "a", Spike: Spike{Factor: factorOne, Kill: true}},
			{Amount: 7, Window: 400 * 24 * time.Hour, Slot: 24 * time.Hour, Name: "a", Alerts: []int{1, 1000}},
		}
		for ; len(data) >= 8; data = data[8:] {
			kind, holder, n := data[0], uint64(data[1]%4), uint64(data[2])
			k, tm := endless("a"), kinds[kind>>2%3]
			if kind>>2%3 == 0 && data[7]&1 == 0 {
				k = monthly("a")
			}
			tm.Revision = uint64(kind >> 4)
			amount := func(i int) int64 { return int64(data[i]) << (data[6] % 56) }
			b.now += int64(data[7]) << (data[7] % 50)
			before, _ := b.s.budgets.find(k)
			switch kind & 3 {
			case 3:
				_ = b.result(&ledgerpb.AdjustBudget{Key: k.message(), Amount: amount(3) - amount(4), Reason: "r"})
			case 2:
				_ = b.result(&ledgerpb.ReleaseHolder{Holder: holder, Reason: "r"})
				_ = b.result(&ledgerpb.BudgetNotified{Key: k.message(), Percent: uint32(data[3]), Spike: amount(4)})
			default:
				d := BudgetDraw{Key: k, Terms: tm, Holder: holder, N: n, Spent: amount(3), Holding: amount(4), Want: amount(5), Need: int64(data[5]), Final: kind&1 != 0}
				if d.Final {
					d.Want, d.Lost = 0, data[5]&1 != 0
				}
				got, err := b.drawBudget(d)
				if a, ok := b.s.budgets.find(k); err == nil && got.Granted > 0 && a != before && (!ok || a.Free() < 0) {
					t.Fatalf("%d were granted, of %+v", got.Granted, a)
				}
			}
			if back := readState(t, snapshotOf(t, b.s)); back.Facts().Hash != b.s.Facts().Hash {
				t.Fatal("read back it is another state")
			}
		}
	})
}

// TestAlertsDoNotPushOutWhatPeopleDid: a day brings more alerts than the audit log has entries.
func TestAlertsDoNotPushOutWhatPeopleDid(t *testing.T) {
	b := newBank(t)
	_ = b.result(&ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_GLOBAL, On: true, Reason: "once"})
	k := monthly("b")
	for i := range maxAudit + 10 {
		k.Subject = fmt.Sprint(i)
		_, err := b.drawBudget(BudgetDraw{Key: k, Terms: BudgetTerms{Amount: 10, Revision: 1, Alerts: []int{50}, Name: "b"}, Holder: 1, N: 1, Spent: 5})
		must(t, err)
	}
	_ = b.result(&ledgerpb.AdjustBudget{Key: k.message(), Amount: 5, Reason: "last"})
	for name, s := range map[string]*State{"here": b.s, "read back": b.again(t).s} {
		all := s.Audit(1<<20, AuditFilter{})
		if len(all) != maxEvents+2 || all[0].Action != "budget.charge" || all[1].Action != alertAction || all[len(all)-1].After != "on: once" {
			t.Errorf("%s: %d entries, from %+v to %+v", name, len(all), all[0], all[len(all)-1])
		}
		if !slices.IsSortedFunc(all, func(a, b AuditEntry) int { return cmp.Compare(b.Index, a.Index) }) {
			t.Errorf("%s: they are out of order", name)
		}
	}
	if got := b.s.Audit(3, AuditFilter{Action: alertAction}); len(got) != 3 || got[0].Index != b.index-1 {
		t.Errorf("the last three alerts are %+v", got)
	}
}

// TestAccountsDoNotGoBack: neither in time, where a leader's clock is behind, nor in terms.
func TestAccountsDoNotGoBack(t *testing.T) {
	b := newBank(t)
	k := monthly("b")
	b.now = k.End - minute
	d := BudgetDraw{Key: k, Terms: terms(100), Holder: 1, N: 1, Want: 10, Need: 10}
	_, err := b.drawBudget(d)
	must(t, err)
	newest := b.now
	b.now -= hour
	d.N, d.Holding, d.Terms.Amount = 2, 10, 1000 // of the same revision
	if got, err := b.drawBudget(d); err != nil || got.Time.UnixNano() != b.now || b.account(t, k).nano() != newest || got.Amount != 100 {
		t.Errorf("an hour back a draw gives %+v, %v", got, err)
	}
	if got, err := drawnOf(b.result(&ledgerpb.AdjustBudget{Key: k.message(), Amount: 1, Reason: "r"})); err != nil || b.account(t, k).nano() != newest {
		t.Errorf("an hour back a correction gives %+v, %v", got, err)
	}
	d.N, d.Terms.Revision = 3, 0
	if got, err := b.drawBudget(d); err != nil || got.Amount != 100 {
		t.Errorf("terms of a lower revision: %+v, %v", got, err)
	}
	made := monthly("made by hand") // without terms: any bind
	if _, err := drawnOf(b.result(&ledgerpb.AdjustBudget{Key: made.message(), Amount: 1, Reason: "r"})); err != nil {
		t.Fatal(err)
	}
	d.Key, d.Holding = made, 0
	if got, err := b.drawBudget(d); err != nil || got.Amount != 1000 || got.Granted != 10 || got.Spent != 1 {
		t.Errorf("the first terms: %+v, %v", got, err)
	}
}

// TestPeriodsGoByTheLeader: after a leader whose clock was ahead, at a period's end, the next finds one account that may
// be drawn on, whatever the accounts have seen; and every answer says which.
func TestPeriodsGoByTheLeader(t *testing.T) {
	b := newBank(t)
	old := monthly("b")
	next := old
	next.Start, next.End = old.End, old.End+20*24*hour
	draw := func(k BudgetKey, n uint64) error {
		got, err := b.drawBudget(BudgetDraw{Key: k, Terms: terms(100), Holder: 1, N: n, Want: 1, Need: 1})
		if err == nil && got.Time.UnixNano() != b.now {
			t.Errorf("at %d the answer is of %v", b.now, got.Time)
		}
		return err
	}
	b.now = old.End - 50
	must(t, draw(old, 1))
	b.now = old.End + 9 // another leads
	must(t, draw(next, 1))
	_, err := b.drawBudget(BudgetDraw{Key: old, Terms: terms(100), Holder: 1, N: 2, Spent: 1})
	must(t, err)
	b.now = old.End - 40 // and another
	must(t, draw(old, 3))
	period, ok := errors.AsType[*PeriodError](draw(next, 2))
	if !ok || period.Now.UnixNano() != b.now {
		t.Errorf("the period that has not begun by the leader's clock: %v", period)
	}
	b.now = old.End
	must(t, draw(next, 2))
	if _, ok := errors.AsType[*PeriodError](draw(old, 4)); !ok {
		t.Error("a period that is over is drawn on")
	}
}

// TestTheEndOfWhatWasForgotten is refused, as all of it would count again; of what never was it is not.
func TestTheEndOfWhatWasForgotten(t *testing.T) {
	rolls := BudgetTerms{Amount: 100, Revision: 1, Window: time.Hour, Slot: time.Minute, Name: "b"}
	for name, c := range map[string]struct {
		key   BudgetKey
		terms BudgetTerms
		at    int64
		want  error
	}{
		"in its period":      {monthly("b"), BudgetTerms{}, begun, nil},
		"after its period":   {monthly("b"), terms(100), monthly("b").End, ErrNoBudget},
		"it never ends":      {endless("b"), terms(100), begun, nil},
		"it rolls":           {endless("b"), rolls, begun, ErrNoBudget},
		"nobody knows of it": {endless("b"), BudgetTerms{}, begun, ErrNoBudget},
	} {
		b := newBank(t)
		b.now = c.at
		got, err := b.drawBudget(BudgetDraw{Key: c.key, Terms: c.terms, Holder: 1, N: 1 << 63, Spent: 30, Final: true})
		if !errors.Is(err, c.want) || err == nil && got.Spent != 30 {
			t.Errorf("%s: got %+v, %v, want %v", name, got, err, c.want)
		}
	}
}
