package budget

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"headgate/limiter"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bed is a cluster in virtual time: Managers, and the ledger between them.
type bed struct {
	t        *testing.T
	ledger   *lockedLedger
	managers []*Manager
	cut      []atomic.Bool  // the node's draws find nobody
	wallOff  []atomic.Int64 // ns, of its wall clock
	deaf     atomic.Bool    // draws are made, and their answers lost
	slow     atomic.Int64   // ns that a draw takes before it comes to the ledger
	tries    atomic.Int64
	override atomic.Bool
	began    time.Time
	stop     func()
}

const (
	commit = 5 * time.Millisecond // what a draw takes
	usd    = int64(1_000_000_000)
)

var errNobody = errors.New("nobody leads")

func newBed(t *testing.T, nodes int, offs ...time.Duration) *bed {
	b := &bed{t: t, ledger: &lockedLedger{modelLedger: *newModelLedger()}, cut: make([]atomic.Bool, nodes), wallOff: make([]atomic.Int64, nodes), began: time.Now()}
	for i, off := range offs {
		b.wallOff[i].Store(int64(off))
	}
	ctx, cancel := context.WithCancel(context.Background())
	var runs sync.WaitGroup
	for i := range nodes {
		m, err := New(Config{
			Holder: uint64(i + 1),
			Draw:   func(ctx context.Context, d Draw) (Drawn, error) { return b.draw(ctx, i, d) },
			Clock: func() (mono, wall int64) {
				return int64(time.Since(b.began)) + 1, time.Now().UnixNano() + b.wallOff[i].Load()
			},
			Override: b.override.Load,
		})
		if err != nil {
			t.Fatal(err)
		}
		b.managers = append(b.managers, m)
		runs.Go(func() { m.Run(ctx) })
	}
	b.ledger.managers = b.managers
	b.stop = func() { cancel(); runs.Wait() }
	return b
}

func (b *bed) draw(ctx context.Context, node int, d Draw) (Drawn, error) {
	if d.Holder != uint64(node+1) {
		b.t.Errorf("node %d draws as %d", node, d.Holder)
	}
	b.tries.Add(1)
	if b.cut[node].Load() {
		time.Sleep(commit)
		return Drawn{}, errNobody
	}
	time.Sleep(commit/2 + time.Duration(b.slow.Load()))
	res, err := b.ledger.Draw(d, time.Now().UnixNano())
	time.Sleep(commit / 2)
	if ctx.Err() != nil || b.deaf.Load() {
		return Drawn{}, cmp.Or(ctx.Err(), errNobody)
	}
	return res, err
}

// account is the ledger's.
func (b *bed) account(k Key) modelAccount {
	b.ledger.Lock()
	defer b.ledger.Unlock()
	if a := b.ledger.accounts[k]; a != nil {
		return *a
	}
	return modelAccount{}
}

func (b *bed) draws() int {
	b.ledger.Lock()
	defer b.ledger.Unlock()
	return b.ledger.draws
}

func (b *bed) outstanding(k Key) int64 {
	b.ledger.Lock()
	defer b.ledger.Unlock()
	return b.ledger.accounts[k].outstanding()
}

func key(name string) Key { return Key{Key: limiter.Key{Tenant: "acme", Limit: name}} }

func charge(name string, total, cost int64) Charge {
	return Charge{Key: key(name), Terms: &Terms{Amount: total, Revision: 1, Name: name, Alerts: []int{50, 80, 100}}, Cost: cost}
}

func take(t *testing.T, m *Manager, cs ...Charge) []Taken {
	t.Helper()
	out := make([]Taken, len(cs))
	if err := m.Take(t.Context(), cs, out); err != nil {
		t.Fatalf("take: %v", err)
	}
	return out
}

func refused(t *testing.T, m *Manager, kind Kind, cs ...Charge) Refused {
	t.Helper()
	var r *Refused
	if err := m.Take(t.Context(), cs, make([]Taken, len(cs))); !errors.As(err, &r) || r.Kind != kind {
		t.Fatalf("take: %v, want %v", err, kind)
	}
	return *r
}

func inBubble(t *testing.T, nodes int, f func(t *testing.T, b *bed), offs ...time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nodes, offs...)
		defer b.stop()
		f(t, b)
	})
}

func TestRequestsAtOnceJoinInADraw(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				b.managers[0].Settle(take(t, b.managers[0], charge("b", usd, 1000)), 1000)
			})
		}
		wg.Wait()
		if n := b.draws(); n > 3 {
			t.Errorf("200 requests at once took %d draws", n)
		}
	})
}

func TestALeasedRequestWaitsForNobody(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m, waited := b.managers[0], 0
		for range 2000 {
			began := time.Now()
			taken := take(t, m, charge("b", usd, 1000))
			if time.Since(began) > 0 {
				waited++
			}
			time.Sleep(10 * time.Millisecond)
			m.Settle(taken, 900)
		}
		if n := b.draws(); waited > 5 || n > 60 {
			t.Errorf("in 20 s of 100 requests a second %d waited, and there were %d draws", waited, n)
		}
		time.Sleep(1100 * time.Millisecond)
		if a := b.account(key("b")); a.spent != 2000*900 {
			t.Errorf("the ledger has %d as spent, not %d", a.spent, 2000*900)
		}
	})
}

// TestABudgetIsUsedToItsEnd: nothing over, and nearly nothing left.
func TestABudgetIsUsedToItsEnd(t *testing.T) {
	for _, c := range []struct {
		name                string
		cost, least, actual int64
	}{
		{"exact", 200_000, 0, 200_000},
		{"half of what was reserved", 400_000, 0, 200_000},
		{"a tenth of what was reserved", 2_000_000, 0, 200_000},
		{"or as much as there is", 2_000_000, 50_000, 200_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, b *bed) {
				total := usd / 10
				var wg sync.WaitGroup
				var spent atomic.Int64
				for i := range 32 {
					rng := rand.New(rand.NewPCG(1, uint64(i)))
					wg.Go(func() {
						m := b.managers[i%3]
						for {
							out, ch := make([]Taken, 1), charge("b", total, c.cost)
							ch.Least = c.least
							err := m.Take(t.Context(), []Charge{ch}, out)
							var r *Refused
							switch {
							case err == nil:
								time.Sleep(time.Duration(rng.IntN(int(40 * time.Millisecond))))
								actual := min(c.actual, out[0].Granted)
								spent.Add(actual)
								m.Settle(out, actual)
							case errors.As(err, &r) && r.Kind == InFlight:
								time.Sleep(r.RetryAfter)
							case errors.As(err, &r) && r.Kind == Exhausted:
								return
							default:
								t.Errorf("take: %v", err)
								return
							}
						}
					})
				}
				wg.Wait()
				// A request that reserves more than is left is refused, so the last reservation stays unused.
				if got := spent.Load(); got > total || got < min(total*98/100, total-c.cost) || c.least > 0 && got < total-c.least {
					t.Errorf("%d of %d spent", got, total)
				}
				time.Sleep(2 * time.Second)
				if a := b.account(key("b")); a.spent != spent.Load() {
					t.Errorf("the ledger has %d as spent, requests cost %d", a.spent, spent.Load())
				}
				t.Logf("%.2f %% used, %d draws, %v", 100*float64(spent.Load())/float64(total), b.draws(), time.Since(b.began))
			})
		})
	}
}

func TestAllBudgetsOrNone(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		cs := []Charge{charge("a", 1000, 100), charge("b", 250, 100), charge("c", 1000, 0)}
		first, second := take(t, m, cs...), take(t, m, cs...)
		r := refused(t, m, InFlight, cs...)
		if r.Index != 1 || r.RetryAfter != time.Second || r.Amount != 250 {
			t.Errorf("refused: %+v", r)
		}
		if l, _ := m.Level(key("a")); l.Open != 200 || l.Requests != 2 {
			t.Errorf("a refused request holds something: %+v", l)
		}
		m.Settle(first, 100)
		m.Settle(first, 100)
		m.Settle(second, 100)
		if l, _ := m.Level(key("a")); l.Open != 0 || l.Requests != 0 || l.Spent != 200 {
			t.Errorf("settled: %+v", l)
		}
		if r := refused(t, m, Exhausted, cs...); r.Index != 1 || r.Used != 200 || r.RetryAfter != 0 {
			t.Errorf("refused: %+v", r)
		}
		if out := take(t, m, charge("b", 250, 0)); out[0].Alert != 80 || out[0].Used != 200 {
			t.Errorf("a free request of a spent budget: %+v", out[0])
		}
	})
}

func TestARequestThatMakesNoSenseTakesNothing(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m, c := b.managers[0], charge("a", 250, 100)
		for name, err := range map[string]error{
			"an account twice": m.Take(t.Context(), []Charge{c, charge("b", 250, 100), c}, make([]Taken, 3)),
			"no room":          m.Take(t.Context(), []Charge{c}, nil),
			"too many charges": m.Take(t.Context(), make([]Charge, MaxCharges+1), make([]Taken, MaxCharges+1)),
		} {
			if err == nil || errors.As(err, new(*Refused)) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := m.Take(t.Context(), nil, nil); err != nil {
			t.Errorf("nothing: %v", err)
		}
		if l, _ := m.Level(key("a")); l.Requests != 0 || l.Open != 0 {
			t.Errorf("level: %+v", l)
		}
	})
}

func TestWhatMayBeLessIsTheLeastThatAllAfford(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		strict := func(name string, total int64) Charge {
			c := charge(name, total, 100)
			c.Least = 10
			return c
		}
		out := take(t, m, strict("a", 1000), strict("b", 60), charge("normal", 1000, 30), strict("c", 45))
		for i, want := range []int64{45, 45, 30, 45} {
			if out[i].Granted != want {
				t.Errorf("charge %d was granted %d, want %d", i, out[i].Granted, want)
			}
		}
		if r := refused(t, m, InFlight, strict("a", 1000), strict("c", 45)); r.Index != 1 {
			t.Errorf("refused: %+v", r)
		}
		m.Settle(out, 40)
		if r := refused(t, m, Exhausted, strict("a", 1000), strict("c", 45)); r.Index != 1 {
			t.Errorf("refused: %+v", r)
		}
	})
}

// TestDebtIsToldAndPaid: what requests cost beyond what they took.
func TestDebtIsToldAndPaid(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		m.Settle(take(t, m, charge("b", 1000, 100)), 600)
		take(t, m, charge("b", 1000, 300))
		time.Sleep(2 * time.Second)
		if a := b.account(key("b")); a.spent != 600 || a.outstanding() < 300 || a.spent+a.outstanding() > 1000 {
			t.Errorf("the ledger has %d spent and %d outstanding", a.spent, a.outstanding())
		}
		refused(t, m, InFlight, charge("b", 1000, 200))
	})
}

func TestWithoutLedgerABlockIsSpentAndNoMore(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		for range 300 { // so that there is a block
			m.Settle(take(t, m, charge("b", usd, 1000)), 1000)
			time.Sleep(10 * time.Millisecond)
		}
		for i := range 50 { // who all have something to tell
			m.Settle(take(t, m, charge(fmt.Sprint("x", i), usd, 1000)), 1000)
		}
		b.cut[0].Store(true)
		held, _ := m.Level(key("b"))
		served := int64(0)
		out := make([]Taken, 1)
		for range 1000 {
			if err := m.Take(t.Context(), []Charge{charge("b", usd, 1000)}, out); err != nil {
				break
			}
			m.Settle(out, 1000)
			served++
		}
		if served == 0 || served != held.Held/1000 {
			t.Errorf("%d requests were served from %d", served, held.Held)
		}
		time.Sleep(1500 * time.Millisecond)
		began, draws := time.Now(), b.tries.Load()
		for range 100 {
			if r := refused(t, m, Unavailable, charge("b", usd, 1000), charge("b2", usd, 10)); r.Err == nil || r.RetryAfter != time.Second {
				t.Fatalf("refused: %+v", r)
			}
		}
		if time.Since(began) != 0 {
			t.Errorf("100 refusals took %v", time.Since(began))
		}
		time.Sleep(10 * time.Second)
		if n := b.tries.Load() - draws; n < 9 || n > 12 {
			t.Errorf("%d tries in 10 s without a ledger", n)
		}
		b.cut[0].Store(false)
		time.Sleep(1200 * time.Millisecond)
		m.Settle(take(t, m, charge("b", usd, 1000)), 1000)
		time.Sleep(2 * time.Second)
		if a := b.account(key("b")); a.spent != (300+served+1)*1000 {
			t.Errorf("the ledger has %d as spent, requests cost %d", a.spent, (300+served+1)*1000)
		}
	})
}

func TestWhatLiesAsideIsForEmergencies(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		c := charge("b", 1000, 100)
		c.Emergency = 250
		m.Settle(take(t, m, c), 100)
		if l, _ := m.Level(c.Key); l.Emergency != 250 {
			t.Fatalf("aside: %+v", l)
		}
		b.cut[0].Store(true)
		out := make([]Taken, 1)
		for m.Take(t.Context(), []Charge{c}, out) == nil { // what there is otherwise
			m.Settle(out, 100)
		}
		refused(t, m, Unavailable, c)
		b.override.Store(true)
		taken := take(t, m, c)
		if l, _ := m.Level(c.Key); l.Emergency != 150 {
			t.Errorf("after one under an override: %+v", l)
		}
		m.Settle(taken, 60)
		if l, _ := m.Level(c.Key); l.Emergency != 190 || l.Held != 0 {
			t.Errorf("what was left did not go back to where it came from: %+v", l)
		}
		m.Settle(take(t, m, c), 100)
		refused(t, m, Unavailable, c)
		b.override.Store(false)
		b.cut[0].Store(false)
		time.Sleep(3 * time.Second)
		l, _ := m.Level(c.Key)
		if a := b.account(c.Key); a.spent != l.Spent || a.spent+a.outstanding() > 1000 {
			t.Errorf("the ledger has %d spent and %d outstanding; here are %+v", a.spent, a.outstanding(), l)
		}
	})
}

func TestIdleBlocksAreRecalled(t *testing.T) {
	inBubble(t, 2, func(t *testing.T, b *bed) {
		a, other := b.managers[0], b.managers[1]
		for range 100 { // a block for a
			a.Settle(take(t, a, charge("b", 160_000, 1000)), 0)
			time.Sleep(5 * time.Millisecond)
		}
		held, _ := a.Level(key("b"))
		if held.Held < 5000 {
			t.Fatalf("held: %+v", held)
		}
		time.Sleep(1500 * time.Millisecond) // it is quiet there now
		taken := take(t, other, charge("b", 160_000, 160_000))
		if l, _ := a.Level(key("b")); l.Held != 0 {
			t.Errorf("held after the recall: %+v", l)
		}
		refused(t, a, InFlight, charge("b", 160_000, 1000))
		other.Settle(taken, 160_000)
		time.Sleep(1100 * time.Millisecond)
		refused(t, a, Exhausted, charge("b", 160_000, 1000))
	})
}

func TestWhatIsIdleGoesBack(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		m.Settle(take(t, m, charge("b", 160_000, 1000)), 700)
		time.Sleep(12 * time.Second)
		if out := b.outstanding(key("b")); out != 0 {
			t.Errorf("%d outstanding after a while without requests", out)
		}
		time.Sleep(11 * time.Minute)
		if _, ok := m.Level(key("b")); ok {
			t.Error("the account is not forgotten")
		}
		m.Settle(take(t, m, charge("b", 160_000, 1000)), 700)
		time.Sleep(2 * time.Second)
		if a := b.account(key("b")); a.spent != 1400 {
			t.Errorf("the ledger has %d as spent, requests cost 1400", a.spent)
		}
	})
}

// TestDearAndSmall: where the end is near, neither keeps the other from what there is.
func TestDearAndSmall(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		take(t, m, charge("b", 1000, 700)) // stays open
		var wg sync.WaitGroup
		var small, dear atomic.Int64
		for range 20 {
			wg.Go(func() {
				if m.Take(t.Context(), []Charge{charge("b", 1000, 500)}, make([]Taken, 1)) == nil {
					dear.Add(1)
				}
			})
			wg.Go(func() {
				if m.Take(t.Context(), []Charge{charge("b", 1000, 10)}, make([]Taken, 1)) == nil {
					small.Add(1)
				}
			})
		}
		wg.Wait()
		if small.Load() != 20 || dear.Load() != 0 {
			t.Errorf("%d small and %d dear requests were served of 300", small.Load(), dear.Load())
		}
	})
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 20 { // small ones all the time, for all there is
			wg.Go(func() {
				for ctx.Err() == nil {
					out := make([]Taken, 1)
					if m.Take(ctx, []Charge{charge("b", usd, 100)}, out) == nil {
						time.Sleep(time.Millisecond)
						m.Settle(out, 100)
					}
				}
			})
		}
		time.Sleep(time.Second)
		began := time.Now()
		take(t, m, charge("b", usd, usd/2))
		if took := time.Since(began); took > 3*commit {
			t.Errorf("a dear request waited %v among small ones", took)
		}
		cancel()
		wg.Wait()
	})
}

func TestPeriodsAreTheLedgers(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m, day := b.managers[0], int64(24*time.Hour)
		periodOf := func(now int64) Charge {
			c := charge("b", 1000, 100)
			c.Key.Start = now / day * day
			c.Key.End = c.Key.Start + day
			return c
		}
		wrong := periodOf(m.Now()) // its clock is 26 hours ahead
		r := refused(t, m, OutOfPeriod, wrong)
		if off := time.Duration(r.Now - time.Now().UnixNano()); off.Abs() > time.Second {
			t.Fatalf("the ledger's clock was not found: %v off", off)
		}
		right := periodOf(r.Now)
		m.Settle(take(t, m, right), 100)
		open := take(t, m, right)
		b.wallOff[0].Store(int64(-26 * time.Hour)) // a jump changes nothing
		if periodOf(m.Now()) != periodOf(time.Now().UnixNano()) && periodOf(m.Now()).Key != right.Key {
			t.Errorf("the period moved with the wall clock")
		}
		time.Sleep(time.Duration(right.Key.End-m.Now()) + time.Millisecond)
		next := periodOf(m.Now())
		if next.Key == right.Key {
			t.Fatal("the period has not turned")
		}
		m.Settle(take(t, m, next), 30)
		refused(t, m, OutOfPeriod, Charge{Key: right.Key, Terms: right.Terms, Cost: 1000})
		time.Sleep(5 * time.Second)
		if a := b.account(right.Key); a.spent != 100 || a.outstanding() != 100 {
			t.Errorf("with a request open the period before has %d spent, %d outstanding", a.spent, a.outstanding())
		}
		m.Settle(open, 80)
		time.Sleep(5 * time.Second)
		a := b.account(right.Key)
		if a.spent != 180 || a.outstanding() != 0 || !a.holders[1].closed {
			t.Errorf("the period before was not ended: %+v, %+v", a, a.holders[1])
		}
		if _, ok := m.Level(right.Key); ok {
			t.Error("the period before is not forgotten")
		}
		if a := b.account(next.Key); a.spent != 30 {
			t.Errorf("the next period has %d spent", a.spent)
		}
	}, 26*time.Hour)
}

// TestALateAnswerTurnsNoClockBack: a draw that comes again is answered as of when it came first.
func TestALateAnswerTurnsNoClockBack(t *testing.T) {
	for _, heard := range []bool{false, true} {
		inBubble(t, 1, func(t *testing.T, b *bed) {
			m := b.managers[0]
			if heard {
				m.Settle(take(t, m, charge("a", 1000, 100)), 100)
				time.Sleep(time.Minute)
			}
			b.deaf.Store(true)
			refused(t, m, Unavailable, charge("b", 1000, 100))
			time.Sleep(time.Hour)
			b.deaf.Store(false)
			for range 2000 {
				time.Sleep(time.Millisecond)
				if off := time.Duration(m.Now() - time.Now().UnixNano()); off.Abs() > time.Second {
					t.Fatalf("the ledger's clock is %v off", off)
				}
			}
			if l, known := m.Level(key("b")); known || b.outstanding(key("b")) != 0 {
				t.Errorf("what nobody wants any more did not go back: %+v", l)
			}
		})
	}
}

// TestAPeriodThatEndedInAnOutageIsLeft: the draw that comes again is refused, and that refusal has the clock.
func TestAPeriodThatEndedInAnOutageIsLeft(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		c := charge("b", 1000, 100)
		c.Key.Start, c.Key.End = m.Now(), m.Now()+int64(time.Minute)
		m.Settle(take(t, m, charge("a", 1000, 100)), 100)
		b.wallOff[0].Store(int64(time.Hour))
		b.cut[0].Store(true)
		refused(t, m, Unavailable, c)
		time.Sleep(2 * time.Minute)
		b.cut[0].Store(false)
		time.Sleep(5 * time.Second)
		r := refused(t, m, OutOfPeriod, c)
		if off := time.Duration(r.Now - time.Now().UnixNano()); off.Abs() > time.Second {
			t.Errorf("the ledger's clock is %v off", off)
		}
		time.Sleep(5 * time.Second)
		if l, known := m.Level(c.Key); known {
			t.Errorf("an account that never had anything is kept after its period: %+v", l)
		}
	})
}

func TestAHigherRevisionBinds(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		c := charge("b", 1000, 1000)
		m.Settle(take(t, m, c), 1000)
		refused(t, m, Exhausted, c)
		for range 100 {
			time.Sleep(20 * time.Millisecond)
			refused(t, m, Exhausted, c)
		}
		raised, began := c, time.Now()
		raised.Terms = &Terms{Amount: 3000, Revision: 2, Name: "b"}
		taken := take(t, m, raised)
		if took := time.Since(began); taken[0].Amount != 3000 || took > 2*commit {
			t.Errorf("taken after %v: %+v", took, taken[0])
		}
		m.Settle(take(t, m, c), 500) // of the policy before
		lowered := c
		lowered.Terms = &Terms{Amount: 2000, Revision: 3, Name: "b"}
		if r := refused(t, m, Exhausted, Charge{Key: c.Key, Terms: lowered.Terms, Cost: 501}); r.Amount != 2000 {
			t.Errorf("refused: %+v", r)
		}
		m.Settle(taken, 1000) // what was granted stays usable
		time.Sleep(2 * time.Second)
		if a := b.account(c.Key); a.spent != 2500 || a.terms.Revision != 3 {
			t.Errorf("the ledger has %d spent of revision %d", a.spent, a.terms.Revision)
		}
	})
}

func TestWhoGivesUpHoldsNothing(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		ctx, cancel := context.WithTimeout(t.Context(), commit/2)
		defer cancel()
		if err := m.Take(ctx, []Charge{charge("b", 1000, 1000)}, make([]Taken, 1)); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("take: %v", err)
		}
		m.Settle(take(t, m, charge("b", 1000, 1000)), 0)
	})
}

func TestAHangingLedgerHoldsNobodyForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		m, err := New(Config{
			Holder: 1,
			Draw: func(ctx context.Context, _ Draw) (Drawn, error) {
				<-ctx.Done()
				return Drawn{}, ctx.Err()
			},
			Clock: func() (mono, wall int64) { return int64(time.Since(began)), time.Now().UnixNano() },
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { m.Run(ctx); close(done) }()
		refused(t, m, Unavailable, charge("b", 1000, 1))
		if took := time.Since(began); took != maxWait {
			t.Errorf("the first request waited %v", took)
		}
		synctest.Wait()
		refused(t, m, Unavailable, charge("b", 1000, 1))
		if took := time.Since(began); took != maxWait {
			t.Errorf("the second one waited, too: %v", took)
		}
		cancel()
		<-done
		if r := refused(t, m, Unavailable, charge("c", 1000, 1)); !errors.Is(&r, errStopped) {
			t.Errorf("after the end: %v", &r)
		}
	})
}

func TestWhoIsNoMemberIsTold(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		m.Settle(take(t, m, charge("b", 1000, 400)), 400)
		b.ledger.Lock()
		b.ledger.denied[1] = true
		b.ledger.Unlock()
		if r := refused(t, m, Unavailable, charge("b", 1000, 600)); !errors.Is(&r, ErrNotDone) {
			t.Errorf("refused: %v", &r)
		}
		time.Sleep(2 * time.Second)
		if a := b.account(key("b")); a.spent != 400 {
			t.Errorf("what it spent was not told: %d", a.spent)
		}
		b.ledger.Lock()
		b.ledger.denied[1] = false
		b.ledger.Unlock()
		m.Settle(take(t, m, charge("b", 1000, 600)), 600)
	})
}

func TestDrainTellsAll(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		for i := range 200 {
			m.Settle(take(t, m, charge(fmt.Sprint("b", i), usd, 1000)), 700)
		}
		open := take(t, m, charge("open", usd, 1000))
		m.Settle(take(t, m, charge("free", usd, 0)), 700) // it did cost something
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := m.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("drained with a request open: %v", err)
		}
		if a := b.account(key("open")); a.outstanding() < 1000 {
			t.Errorf("what a request holds was given back")
		}
		refused(t, m, Unavailable, charge("b0", usd, 1000))
		refused(t, m, Unavailable, charge("new", usd, 1000))
		m.Settle(open, 900)
		if err := m.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		for k, a := range b.ledger.accounts {
			want := int64(700)
			if k == key("open") {
				want = 900
			}
			if a.spent != want || a.outstanding() != 0 || !a.holders[1].closed {
				t.Errorf("%v: %d spent, %d outstanding", k, a.spent, a.outstanding())
			}
		}
	})
}

func TestATableThatIsFullRefuses(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		m.table.most = 2
		take(t, m, charge("a", 1000, 1), charge("b", 1000, 1))
		if r := refused(t, m, Unavailable, charge("a", 1000, 1), charge("c", 1000, 1)); r.Index != 1 || !errors.Is(&r, errFull) {
			t.Errorf("refused: %v", &r)
		}
		if l, _ := m.Level(key("a")); l.Requests != 1 {
			t.Errorf("level: %+v", l)
		}
	})
}

func TestAnAnswerThatCannotBeIsNotBelieved(t *testing.T) {
	for _, c := range []struct{ granted, want int64 }{{100, 100}, {50, 50}, {5000, 200}, {-1, 0}} {
		at := instant{1e9, 1e9}
		a := newAccount(key("b"), &Terms{Amount: 10_000, Revision: 1}, at)
		a.join(at, &ask{cost: 100, least: 100}, outlook{})
		d, _ := a.step(at, 1)
		if d.Want != 200 {
			t.Fatalf("draw: %+v", d)
		}
		a.answered(at, Drawn{N: d.N, Granted: c.granted, Spent: -5, Amount: 10_000, Free: 1 << 62}, nil, outlook{})
		if a.allowed != c.want || a.total() != -5 || a.left() > MaxAmount {
			t.Errorf("granted %d: %d may be spent; total %d, left %d", c.granted, a.allowed, a.total(), a.left())
		}
	}
}

func TestPeekChangesNothing(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m, out := b.managers[0], make([]Taken, 1)
		if err := m.Peek([]Charge{charge("b", 1000, 100)}, out); err != nil || out[0].Left != 1000 {
			t.Errorf("peek at nothing: %+v, %v", out[0], err)
		}
		m.Settle(take(t, m, charge("b", 1000, 600)), 600)
		time.Sleep(2 * time.Second)
		before, _ := m.Level(key("b"))
		if err := m.Peek([]Charge{charge("b", 1000, 400)}, out); err != nil || out[0].Used != 600 || out[0].Alert != 50 || out[0].Left != 400 {
			t.Errorf("peek: %+v, %v", out[0], err)
		}
		var r *Refused
		if err := m.Peek([]Charge{charge("b", 1000, 401)}, out); !errors.As(err, &r) || r.Kind != Exhausted {
			t.Errorf("peek at too much: %v", err)
		}
		if after, _ := m.Level(key("b")); after != before {
			t.Errorf("peek changed %+v to %+v", before, after)
		}
	})
}

// TestTheBooksAddUp: nodes that are cut off and come back, requests with several budgets, recalls, debt.
func TestTheBooksAddUp(t *testing.T) {
	for seed := range uint64(15) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, b *bed) {
				totals := map[string]int64{"a": 50_000, "b": 400_000, "c": 20_000}
				strict := seed%3 != 0
				var mu sync.Mutex
				spent := map[string]int64{}
				var wg sync.WaitGroup
				end := time.Now().Add(20 * time.Second)
				for i := range 24 {
					rng := rand.New(rand.NewPCG(seed, uint64(i)))
					wg.Go(func() {
						m := b.managers[i%3]
						for time.Now().Before(end) {
							var cs []Charge
							cost := int64(rng.IntN(300))
							for _, name := range []string{"c", "a", "b"} {
								if rng.IntN(2) == 0 {
									c := charge(name, totals[name], cost)
									if rng.IntN(2) == 0 {
										c.Least = cost/4 + 1
									}
									cs = append(cs, c)
								}
							}
							out := make([]Taken, len(cs))
							ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rng.IntN(300))*time.Millisecond)
							err := m.Take(ctx, cs, out)
							cancel()
							time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond)
							if err != nil {
								continue
							}
							actual := cost * 2
							if strict {
								for j := range out {
									actual = min(actual, out[j].Granted)
								}
								actual = rng.Int64N(actual + 1)
							}
							mu.Lock()
							for j := range cs {
								spent[cs[j].Key.Limit] += actual
							}
							mu.Unlock()
							m.Settle(out, actual)
						}
					})
				}
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(seed, 99))
					for time.Now().Before(end) {
						b.cut[rng.IntN(3)].Store(rng.IntN(3) == 0)
						time.Sleep(time.Duration(rng.IntN(700)) * time.Millisecond)
						b.ledger.Lock()
						for k, a := range b.ledger.accounts {
							if strict && a.spent+a.outstanding() > a.terms.Amount {
								t.Errorf("%v: %d spent and %d outstanding of %d", k, a.spent, a.outstanding(), a.terms.Amount)
							}
						}
						b.ledger.Unlock()
					}
				})
				wg.Wait()
				for i := range b.cut {
					b.cut[i].Store(false)
				}
				for _, m := range b.managers {
					if err := m.Drain(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				for name, total := range totals {
					a := b.account(key(name))
					if a.spent != spent[name] || a.outstanding() != 0 {
						t.Errorf("%s: the ledger has %d spent, %d outstanding; requests cost %d", name, a.spent, a.outstanding(), spent[name])
					}
					if strict && a.spent > total {
						t.Errorf("%s: %d of %d spent", name, a.spent, total)
					}
				}
				if b.ledger.believed > 0 {
					t.Errorf("a node claimed to hold more than was granted")
				}
			})
		})
	}
}
