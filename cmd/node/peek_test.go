package node

import (
	"testing"

	"headgate/cluster/ledger"
	"headgate/lease/budget"
	"headgate/proxy"
)

// TestReplica: what is left is what the ledger has free and this process holds itself, whatever it heard when it last
// asked; and a budget is refused by that.
func TestReplica(t *testing.T) {
	acct := func(revision uint64, amount, spent, mine, mineSpent, others int64) ledger.BudgetAccount {
		return ledger.BudgetAccount{Terms: ledger.BudgetTerms{Amount: amount, Revision: revision}, Spent: spent, Holders: []ledger.BudgetHolder{
			{Holder: 3, Outstanding: others}, {Holder: 2, Outstanding: mine, Spent: mineSpent},
		}}
	}
	for name, c := range map[string]struct {
		account             ledger.BudgetAccount
		own                 budget.Level
		amount, spent, left int64
		least               int64 // 0: 400, which is the cost
		kind                string
	}{
		"nobody has spent":             {ledger.BudgetAccount{}, budget.Level{}, 1000, 0, 1000, 0, ""},
		"others have, and idle here":   {acct(1, 1000, 800, 0, 0, 100), budget.Level{Heard: true, Used: 10, Amount: 1000, Left: 990}, 1000, 800, 100, 0, "exhausted"},
		"enough for less":              {acct(1, 1000, 800, 0, 0, 100), budget.Level{}, 1000, 800, 100, 100, ""},
		"others hold it":               {acct(1, 1000, 100, 0, 0, 800), budget.Level{}, 1000, 100, 100, 0, "in_flight"},
		"held here":                    {acct(1, 1000, 100, 500, 50, 400), budget.Level{Held: 450, Spent: 90}, 1000, 140, 450, 0, ""},
		"held here, not yet told here": {acct(1, 1000, 100, 0, 0, 500), budget.Level{Held: 300}, 1000, 100, 400, 0, ""},
		"an account with older terms":  {acct(0, 500, 100, 0, 0, 0), budget.Level{}, 1000, 100, 900, 0, ""},
		"an account with newer terms":  {acct(2, 500, 400, 0, 0, 0), budget.Level{}, 500, 400, 100, 0, "exhausted"},
		"in debt":                      {acct(1, 1000, 1300, 0, 0, 0), budget.Level{}, 1000, 1300, 0, 0, "exhausted"},
		"after a credit":               {acct(1, 1000, -300, 0, 0, 0), budget.Level{}, 1000, -300, 1300, 0, ""},
	} {
		b := proxy.BudgetCharge{Budget: &proxy.Budget{Terms: &budget.Terms{Amount: 1000, Revision: 1}}, Cost: 400, Least: c.least}
		replica(&b, &c.account, &c.own, 2)
		if b.Amount != c.amount || b.Spent != c.spent || b.Left != c.left {
			t.Errorf("%s: %d of %d spent, %d left; want %d of %d, %d left", name, b.Spent, b.Amount, b.Left, c.spent, c.amount, c.left)
		}
		kind := ""
		if short := wants(&b); short != nil {
			kind = short.Kind.String()
		}
		if kind != c.kind {
			t.Errorf("%s: refused %q, want %q", name, kind, c.kind)
		}
	}
}
