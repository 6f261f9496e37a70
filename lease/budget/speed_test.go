package budget

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"headgate/limiter"
)

// rich returns a Manager before a ledger that has money for all, and what ends it.
func rich(tb testing.TB) (*Manager, func()) {
	tb.Helper()
	began := time.Now()
	ledger := &lockedLedger{modelLedger: *newModelLedger()}
	m, err := New(Config{
		Holder: 1,
		Draw:   func(_ context.Context, d Draw) (Drawn, error) { return ledger.Draw(d, 0) },
		Clock:  func() (mono, wall int64) { return int64(time.Since(began)), int64(time.Since(began)) },
	})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { m.Run(ctx); close(done) }()
	return m, func() { cancel(); <-done }
}

func richCharges(budgets, client int) []Charge {
	cs := make([]Charge, budgets)
	for i := range cs {
		k := Key{Key: limiter.Key{Tenant: "acme", Limit: fmt.Sprint("budget-", i)}}
		if i > 0 {
			k.Subject = fmt.Sprint("user-", client)
		}
		cs[i] = Charge{Key: k, Terms: &Terms{Amount: 1 << 58, Revision: 1, Alerts: []int{50, 80, 100}}, Cost: 200_000}
	}
	return cs
}

// BenchmarkTake takes and settles with money in hand.
func BenchmarkTake(b *testing.B) {
	for _, budgets := range []int{1, 4} {
		for _, clients := range []int{1, 2, 4, 8} {
			b.Run(fmt.Sprintf("budgets=%d/clients=%d", budgets, clients), func(b *testing.B) {
				m, stop := rich(b)
				defer stop()
				b.ReportAllocs()
				b.ResetTimer()
				var wg sync.WaitGroup
				for c := range clients {
					wg.Go(func() {
						cs, out := richCharges(budgets, c), make([]Taken, budgets)
						for range b.N / clients {
							if err := m.Take(context.Background(), cs, out); err != nil {
								b.Error(err)
								return
							}
							m.Settle(out, 150_000)
						}
					})
				}
				wg.Wait()
			})
		}
	}
}

// TestALeasedRequestAllocatesNothing is of what BenchmarkTake measures.
func TestALeasedRequestAllocatesNothing(t *testing.T) {
	m, stop := rich(t)
	defer stop()
	cs, out := richCharges(4, 1), make([]Taken, 4)
	pay := func() {
		if err := m.Take(t.Context(), cs, out); err != nil {
			t.Fatal(err)
		}
		m.Settle(out, 150_000)
	}
	for range 1000 {
		pay()
	}
	if n := testing.AllocsPerRun(1000, pay); n >= 1 {
		t.Errorf("%v allocations", n)
	}
}

// TestManyAtOnce is for the race detector: no virtual time, little money, two nodes' worth of goroutines.
func TestManyAtOnce(t *testing.T) {
	m, stop := rich(t)
	defer stop()
	var wg sync.WaitGroup
	for c := range 8 {
		wg.Go(func() {
			cs, out := richCharges(3, c%2), make([]Taken, 3)
			for i := range cs {
				cs[i].Terms = &Terms{Amount: 40_000_000, Revision: 1}
			}
			for range 300 {
				if m.Take(t.Context(), cs, out) == nil {
					m.Settle(out, 100_000)
				}
				m.Recall(cs[0].Key)
				m.Level(cs[1].Key)
				_ = m.Peek(cs, make([]Taken, 3))
			}
		})
	}
	wg.Wait()
	if err := m.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
}
