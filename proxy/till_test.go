package proxy_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"headgate/limiter"
	"headgate/proxy"
)

// till keeps budgets as a ledger would that is always in reach, and demands that every
// reservation is settled once.
type till struct {
	mu       sync.Mutex
	accounts map[account]*balance
	open     map[uint64]granted
	last     uint64
	bills    []proxy.Bill // as settled, with charges of their own

	opening int64             // spent of each account from the start
	refuse  error             // what Reserve and Peek answer, if anything
	before  func()            // called by Reserve
	after   func(*proxy.Bill) // called by Settle
	wrong   []string          // what must not happen
}

type account struct {
	key   limiter.Key
	start int64
}

// balance of an account, in nano-dollars.
type balance struct{ spent, reserved int64 }

type granted struct{ amounts []int64 }

func newTill() *till { return &till{accounts: map[account]*balance{}, open: map[uint64]granted{}} }

func (t *till) balance(c *proxy.BudgetCharge) *balance {
	k := account{c.Key, c.Start}
	if t.accounts[k] == nil {
		t.accounts[k] = &balance{spent: t.opening}
	}
	return t.accounts[k]
}

func (t *till) tell(b *proxy.Bill) {
	for i := range b.Charges {
		c := &b.Charges[i]
		c.Start, c.End = c.Budget.Period(time.Now())
		a := t.balance(c)
		c.Amount, c.Spent, c.Left = c.Budget.Amount, a.spent, max(c.Budget.Amount-a.spent-a.reserved, 0)
	}
}

// decide grants each charge what it may have, or says which one refuses.
func (t *till) decide(b *proxy.Bill) error {
	t.tell(b)
	if t.refuse != nil {
		return t.refuse
	}
	g := int64(1 << 62)
	for i := range b.Charges {
		c := &b.Charges[i]
		if c.Left < c.Least {
			kind := proxy.Exhausted
			if c.Amount-c.Spent >= c.Least {
				kind = proxy.InFlight
			}
			return &proxy.Broke{Index: i, Kind: kind}
		}
		if c.Least < c.Cost {
			g = min(g, c.Left)
		}
	}
	for i := range b.Charges {
		c := &b.Charges[i]
		if c.Granted = c.Cost; c.Least < c.Cost {
			c.Granted = min(g, c.Cost)
		}
	}
	return nil
}

func (t *till) Reserve(_ context.Context, b *proxy.Bill) error {
	if t.before != nil {
		t.before()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if b.RequestID == "" || b.Tenant == "" || b.Key == "" || b.User == "" || b.Model == "" || b.Asked == "" || b.Time.IsZero() {
		t.wrong = append(t.wrong, "a bill of nobody")
	}
	if err := t.decide(b); err != nil {
		return err
	}
	t.last++
	b.ID, b.Held = t.last, t
	var g granted
	for i := range b.Charges {
		c := &b.Charges[i]
		t.balance(c).reserved += c.Granted
		g.amounts = append(g.amounts, c.Granted)
	}
	t.open[b.ID] = g
	t.tell(b)
	return nil
}

func (t *till) Settle(b *proxy.Bill) {
	if t.after != nil {
		t.after(b)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	g, ok := t.open[b.ID]
	nothing := b.Held == nil && b.ID == 0 && b.Cost == 0 && len(b.Charges) == 0 // of the cache
	if !nothing && (!ok || b.Held != t) {
		t.wrong = append(t.wrong, "settled what is not open")
		return
	}
	delete(t.open, b.ID)
	if b.Cancelled && b.Cost != 0 {
		t.wrong = append(t.wrong, "cancelled and charged")
	}
	for i := range b.Charges {
		a := t.balance(&b.Charges[i])
		a.reserved -= g.amounts[i]
		a.spent += b.Cost
	}
	t.tell(b)
	kept := *b
	kept.Charges = append([]proxy.BudgetCharge(nil), b.Charges...)
	t.bills = append(t.bills, kept)
}

func (t *till) Peek(_ context.Context, b *proxy.Bill) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.decide(b)
}

// settled fails the test unless all that was reserved was settled, once.
func (t *till) settled(test *testing.T) {
	test.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.open) > 0 {
		test.Errorf("%d bills were never settled", len(t.open))
	}
	for _, w := range t.wrong {
		test.Error(w)
	}
	for k, a := range t.accounts {
		if a.reserved != 0 {
			test.Errorf("%v still has %d reserved", k.key, a.reserved)
		}
	}
}

// bill is the newest of those settled.
func (t *till) bill(test *testing.T) proxy.Bill {
	test.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.bills) == 0 {
		test.Fatal("no bill was settled")
	}
	return t.bills[len(t.bills)-1]
}

// spent of all accounts of a bucket, in nano-dollars.
func (t *till) spent(bucket string) (sum int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k, a := range t.accounts {
		if k.key.Limit == bucket {
			sum += a.spent
		}
	}
	return sum
}

// spent is a till of whose accounts so much is.
func spent(nanoUSD int64) *till {
	t := newTill()
	t.opening = nanoUSD
	return t
}

// refusing is a till that answers err.
func refusing(err error) *till {
	t := newTill()
	t.refuse = err
	return t
}

// budget is one of a tenant, without a period.
func budget(name string, amount int64) proxy.Budget {
	return proxy.Budget{Name: name, Bucket: name, Scope: proxy.ScopeOrg, Amount: amount, Period: func(time.Time) (int64, int64) { return 0, 0 }}
}

func strict(b proxy.Budget) proxy.Budget {
	b.Strict = true
	return b
}

// budgeted gives the default caller budgets.
func budgeted(bs ...proxy.Budget) func(*proxy.Caller) {
	return func(c *proxy.Caller) { c.Budgets = bs }
}
