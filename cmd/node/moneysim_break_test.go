package node

import (
	"context"
	"errors"
	"testing"
	"time"

	"headgate/cluster/ledger"
	"headgate/proxy"
)

// simBreak is something that is broken on purpose, at a seam: the simulation must find it.
type simBreak struct {
	wrapBank      func(*simBank) bank
	wrapTill      func(*money) simTill
	charge        func(*proxy.Bill) // changes what is settled
	forgetPast    bool
	renumber      bool
	unclamped     bool
	releaseLiving bool
}

func (s *simBreak) bank(b *simBank) bank {
	if s == nil || s.wrapBank == nil {
		return b
	}
	return s.wrapBank(b)
}

func (s *simBreak) till(m *money) simTill {
	if s == nil || s.wrapTill == nil {
		return m
	}
	return s.wrapTill(m)
}

// lateTill writes the reservation into the journal when the answer is there.
type lateTill struct{ *money }

func (t lateTill) Reserve(ctx context.Context, b *proxy.Bill) error {
	if len(b.Charges) == 0 {
		return t.money.Reserve(ctx, b)
	}
	h := t.held.Get().(*held)
	if err := t.take(ctx, b, h); err != nil {
		return err
	}
	b.Held = h
	return nil
}

func (t lateTill) Settle(b *proxy.Bill) {
	if h, ok := b.Held.(*held); ok {
		_ = t.record(b, h)
	}
	t.money.Settle(b)
}

// twiceTill settles what it took a second time.
type twiceTill struct{ *money }

func (t twiceTill) Settle(b *proxy.Bill) {
	h, _ := b.Held.(*held)
	if h == nil {
		t.money.Settle(b)
		return
	}
	again := h.taken
	t.money.Settle(b)
	t.budgets.Settle(again[:len(b.Charges)], b.Cost)
}

// deafTill settles nothing where the client has gone.
type deafTill struct{ *money }

func (t deafTill) Settle(b *proxy.Bill) {
	if b.Outcome != "client_gone" {
		t.money.Settle(b)
	}
}

// drawBank changes draws.
type drawBank struct {
	*simBank
	change func(*simBank, *ledger.BudgetDraw)
}

func (s drawBank) DrawBudget(ctx context.Context, d ledger.BudgetDraw) (ledger.BudgetDrawn, error) {
	s.change(s.simBank, &d)
	return s.simBank.DrawBudget(ctx, d)
}

func changeDraws(change func(*simBank, *ledger.BudgetDraw)) func(*simBank) bank {
	return func(b *simBank) bank { return drawBank{b, change} }
}

// hopefulBank takes a draw without an answer as granted.
type hopefulBank struct{ *simBank }

func (f hopefulBank) DrawBudget(ctx context.Context, d ledger.BudgetDraw) (ledger.BudgetDrawn, error) {
	r, err := f.simBank.DrawBudget(ctx, d)
	if errors.Is(err, ledger.ErrUnknownOutcome) {
		return ledger.BudgetDrawn{N: d.N, Granted: d.Want, Spent: d.Spent, Amount: d.Terms.Amount, Time: time.Now()}, nil
	}
	return r, err
}

// breaks are what the simulation must find.
func breaks() map[string]*simBreak {
	return map[string]*simBreak{
		"the journal hears of a request after the upstream": {wrapTill: func(m *money) simTill { return lateTill{m} }},
		"a request is settled twice":                        {wrapTill: func(m *money) simTill { return twiceTill{m} }},
		"a request whose client has gone is not settled":    {wrapTill: func(m *money) simTill { return deafTill{m} }},
		"a request whose client has gone costs nothing": {charge: func(b *proxy.Bill) {
			if b.Outcome == "client_gone" {
				b.Cost = 0
			}
		}},
		"a request is charged twice for a retry": {charge: func(b *proxy.Bill) { b.Cost *= 2 }},
		"a nano-dollar is lost in rounding":      {charge: func(b *proxy.Bill) { b.Cost -= b.Cost % 2 }},
		"a strict cap is not clamped":            {unclamped: true},
		"the last word leaves out what was open": {wrapBank: changeDraws(func(b *simBank, d *ledger.BudgetDraw) {
			for _, p := range b.p.m.journal.Unclosed() {
				for _, a := range p.Accounts {
					if d.N == lastDraw && p.Incarnation == d.Holder && budgetKey(&a.Account) == d.Key {
						d.Spent = a.Settled
					}
				}
			}
		})},
		"what may be lost does not count": {wrapBank: changeDraws(func(_ *simBank, d *ledger.BudgetDraw) { d.Lost = false })},
		"a node forgets its past":         {forgetPast: true},
		"a report tells of too little": {wrapBank: changeDraws(func(_ *simBank, d *ledger.BudgetDraw) {
			if d.N != lastDraw {
				d.Spent -= d.Spent / 8
			}
		})},
		"a holder gives back what it goes on spending": {wrapBank: changeDraws(func(_ *simBank, d *ledger.BudgetDraw) { d.Holding = 0 })},
		"a duplicate is a draw of its own":             {renumber: true},
		"a draw without an answer counts as granted":   {wrapBank: func(b *simBank) bank { return hopefulBank{b} }},
		"an operator releases a process that lives":    {releaseLiving: true},
	}
}

// TestMoneySimulationFinds breaks money at its seams: each must be found within a few seeds, else the simulation says
// nothing about it.
func TestMoneySimulationFinds(t *testing.T) {
	skipUnderRace(t)
	const seeds = 120
	for name, broken := range breaks() {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(seeds) {
				if w := simulate(t, seed, broken, false); w.bad != "" {
					t.Logf("seed %d: %s", seed, w.bad)
					return
				}
			}
			t.Errorf("not found within %d seeds", seeds)
		})
	}
}
