package node

import (
	"context"
	"errors"

	"headgate/cluster/ledger"
	"headgate/lease/budget"
	"headgate/proxy"
)

// Peek see proxy.Money. Of a budget that this node has not used lately the purse knows what was true then, so this decides
// by the node's replica of the ledger, and what the node holds.
func (m *money) Peek(_ context.Context, b *proxy.Bill) error {
	if len(b.Charges) == 0 {
		return nil
	}
	var h held
	m.charge(b, &h, m.budgets.Now())
	n := len(b.Charges)
	err := m.budgets.Peek(h.charges[:n], h.taken[:n])
	known := true
	for i := range b.Charges {
		known = m.level(&b.Charges[i]) && known
	}
	refused, ok := errors.AsType[*budget.Refused](err)
	switch {
	case ok && refused.Kind != budget.Exhausted && refused.Kind != budget.InFlight:
		return &proxy.Broke{Index: refused.Index, Kind: proxy.Unavailable, RetryAfter: refused.RetryAfter, Err: refused}
	case ok && !known:
		return broke(b, refused)
	case err != nil && !ok:
		return err
	}
	for i := range b.Charges {
		c := &b.Charges[i]
		if short := wants(c); short != nil && known {
			short.Index = i
			return short
		}
	}
	return nil
}

// wants says why a budget that stands as c says refuses; nil: it does not.
func wants(c *proxy.BudgetCharge) *proxy.Broke {
	need := c.Cost
	if c.Least > 0 && c.Least < c.Cost {
		need = c.Least
	}
	switch {
	case need <= c.Left:
		return nil
	case need <= c.Amount-c.Spent:
		return &proxy.Broke{Kind: proxy.InFlight}
	}
	return &proxy.Broke{Kind: proxy.Exhausted}
}

// level fills in how a budget stands: by this node's replica of the ledger, with what the node has spent since it last
// said so, and what it holds for requests to come. false: nobody here knows.
func (m *money) level(c *proxy.BudgetCharge) bool {
	key := budget.Key{Key: c.Key, Start: c.Start, End: c.End}
	own, _ := m.budgets.Level(key)
	cl := m.n.joined.Load()
	if cl == nil {
		heard(c, &own)
		return own.Heard
	}
	a, _ := cl.Ledger().Budget(ledger.BudgetKey(key)) // of what it does not have nothing was spent
	replica(c, &a, &own, m.n.self)
	return true
}

// levels fills in how the budgets stand that were not asked when the one at index refused.
func (m *money) levels(b *proxy.Bill, index int) {
	for i := range b.Charges {
		c := &b.Charges[i]
		if i == index {
			continue
		}
		own, _ := m.budgets.Level(budget.Key{Key: c.Key, Start: c.Start, End: c.End})
		if own.Heard {
			heard(c, &own)
		} else {
			m.level(c)
		}
	}
}

// heard fills in what the ledger last told this node.
func heard(c *proxy.BudgetCharge, own *budget.Level) {
	if own.Heard {
		c.Spent, c.Amount, c.Left = own.Used, own.Amount, max(own.Left, 0)
	}
}

// replica fills in what the replica has in its account a, of which self, which is this process, says own.
func replica(c *proxy.BudgetCharge, a *ledger.BudgetAccount, own *budget.Level, self uint64) {
	var mine ledger.BudgetHolder
	if h := holder(a, self); h != nil {
		mine = *h
	}
	c.Amount = a.Terms.Amount
	if terms := c.Budget.Terms.(*budget.Terms); terms.Revision >= a.Terms.Revision { // the account learns of it with the next block
		c.Amount = terms.Amount
	}
	c.Spent = a.Spent + max(own.Spent-mine.Spent, 0)
	free := c.Amount - a.Spent - a.Outstanding()
	c.Left = max(free+min(own.Held, mine.Outstanding), own.Held, 0)
}
