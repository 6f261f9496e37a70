package proxy

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/proxy/openai"
)

// grants everything.
type grants struct{}

func (grants) Reserve(_ context.Context, b *Bill) error {
	for i := range b.Charges {
		b.Charges[i].Granted = b.Charges[i].Cost
	}
	return nil
}
func (grants) Settle(*Bill)                      {}
func (grants) Peek(context.Context, *Bill) error { return nil }

// paying is an exchange that has to pay for what budgets say.
func paying(tb testing.TB, budgets ...Budget) *exchange {
	p, err := New(Config{Registerer: prometheus.NewRegistry(), Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Money: grants{}})
	if err != nil {
		tb.Fatal(err)
	}
	m := &Model{
		Name: "m", Cost: func(u openai.Usage, _, _ int64) int64 { return u.Input + u.Output },
		UpperBound: func(in, out, _, _ int64) int64 { return in + out },
	}
	x := &exchange{
		p: p, r: &http.Request{}, start: time.Now(), user: "u", asked: m, model: m, caller: &Caller{KeyID: "k", Tenant: "t", Budgets: budgets},
		route: &route{kind: openai.Chat, generate: true, metered: true}, in: openai.Request{MaxOutput: 100, Sequences: 1, Inputs: 1, Bounds: openai.Bounds{Text: 100}},
	}
	x.res.inTokens, x.res.outTokens, x.res.nanoUSD = 25, 100, 125
	return x
}

func (x *exchange) payOnce() bool {
	x.tab.bill.Charges = nil
	if x.invoice() != nil || x.pay() != nil {
		return false
	}
	x.answer.nanoUSD, x.answer.whole = 7, true
	x.settleBill(outcomeAnswered)
	return x.tab.bill.Cost == 7
}

// TestBillsAreCheap: a bill without budgets allocates nothing, with budgets its charges.
func TestBillsAreCheap(t *testing.T) {
	none := func(time.Time) (int64, int64) { return 0, 0 }
	b := Budget{Name: "b", Bucket: "b", Scope: ScopeOrg, Amount: 1 << 40, Period: none}
	s := b
	s.Strict = true
	for _, c := range []struct {
		budgets []Budget
		most    float64
	}{{nil, 0}, {[]Budget{b}, 1}, {[]Budget{b, s, b, s}, 1}} {
		x, ok := paying(t, c.budgets...), true
		if n := testing.AllocsPerRun(100, func() { ok = ok && x.payOnce() }); n > c.most || !ok {
			t.Errorf("%d budgets: %v allocations, right %t", len(c.budgets), n, ok)
		}
	}
}

func BenchmarkBill(b *testing.B) {
	none := func(time.Time) (int64, int64) { return 0, 0 }
	s := Budget{Name: "b", Bucket: "b", Scope: ScopeOrg, Strict: true, Amount: 1 << 40, Period: none}
	for _, c := range []struct {
		name    string
		budgets []Budget
	}{{"none", nil}, {"one", []Budget{s}}, {"four", []Budget{s, s, s, s}}} {
		b.Run(c.name, func(b *testing.B) {
			x := paying(b, c.budgets...)
			b.ReportAllocs()
			for b.Loop() {
				if !x.payOnce() {
					b.Fatal("not paid")
				}
			}
		})
	}
}

// TestBudgetsWithoutMoneyRefuse: who has budgets is not served where nobody keeps them.
func TestBudgetsWithoutMoneyRefuse(t *testing.T) {
	b := Budget{Name: "b", Scope: ScopeOrg, Amount: 1 << 40}
	x := paying(t, b)
	x.p.cfg.Money = nil
	err := x.invoice()
	if e, ok := errors.AsType[*Error](x.pay()); err != nil || !ok || e.Code != "billing_unavailable" {
		t.Errorf("%v, %v", err, e)
	}
	x.model.Free = true
	if err := x.pay(); err != nil {
		t.Errorf("a free model: %v", err)
	}
}
