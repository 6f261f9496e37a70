package ledger_test

import (
	"fmt"
	"testing"

	"headgate/cluster/ledger"
	"headgate/limiter"
)

// BenchmarkBudget is a decision about a budget without leased blocks: what the last request cost is
// reported and the next one's cost is drawn, through three nodes. All writers spend from one account,
// as nodes do, or each from its own.
func BenchmarkBudget(b *testing.B) {
	for _, shared := range []bool{true, false} {
		name := "account=own"
		if shared {
			name = "account=shared"
		}
		for _, n := range writers {
			b.Run(fmt.Sprintf("%s/writers=%d", name, n), func(b *testing.B) {
				leader := newCluster(b, "raft-wal").leader(b)
				holders := make(chan *ledger.BudgetDraw, n)
				for i := range n {
					d := &ledger.BudgetDraw{
						Key: ledger.BudgetKey{Key: limiter.Key{Tenant: "acme", Limit: "org-month"}}, Holder: uint64(i + 1), Want: 1000, Need: 1000, Least: 1000,
						Terms: ledger.BudgetTerms{Amount: ledger.MaxNano, Revision: 1, Alerts: []int{50, 80, 100}, Name: "org-month"},
					}
					if !shared {
						d.Key.Subject = fmt.Sprint(i)
					}
					holders <- d
				}
				concurrently(b, n, func() error {
					d := <-holders
					d.N++
					drawn, err := leader.ledger.DrawBudget(b.Context(), *d)
					d.Spent += drawn.Granted
					holders <- d
					return err
				})
			})
		}
	}
}
