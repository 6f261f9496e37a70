package budget

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are what a Manager counts.
type metrics struct {
	draws   *prometheus.CounterVec
	refused *prometheus.CounterVec
	waits   prometheus.Counter
}

// newMetrics registers them with r, which may be nil.
func newMetrics(r prometheus.Registerer, m *Manager) (*metrics, error) {
	met := &metrics{
		draws: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_budget_draws_total", Help: "Draws of budgets at the ledger, by what came of them.",
		}, []string{"outcome"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_budget_refused_total", Help: "Requests that a budget refused, by why.",
		}, []string{"kind"}),
		waits: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_budget_waits_total", Help: "Requests that waited for a draw.",
		}),
	}
	if r == nil {
		return met, nil
	}
	accounts := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "headgate_budget_accounts", Help: "Budget accounts that this node spends from.",
	}, func() float64 { return float64(m.table.count.Load()) })
	down := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "headgate_budget_unavailable", Help: "1 while the ledger is out of reach: what was granted before is spent, and no more.",
	}, func() float64 {
		if m.down.Load() != nil {
			return 1
		}
		return 0
	})
	for _, c := range [...]prometheus.Collector{met.draws, met.refused, met.waits, accounts, down} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("budget: %w", err)
		}
	}
	return met, nil
}
