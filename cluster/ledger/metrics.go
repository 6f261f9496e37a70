package ledger

import (
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"

	"headgate/cluster/ledger/ledgerpb"
)

// metrics of one Ledger.
type metrics struct {
	registerer prometheus.Registerer // nil: none
	registered []prometheus.Collector
	proposals  *prometheus.CounterVec
	seconds    prometheus.Histogram
}

func newMetrics(registerer prometheus.Registerer, l *Ledger) (*metrics, error) {
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "headgate_ledger_" + name, Help: help}, value)
	}
	m := &metrics{
		registerer: registerer,
		proposals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_ledger_proposals_total", Help: "Changes proposed on this node, by how they ended.",
		}, []string{"outcome"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "headgate_ledger_proposal_seconds", Help: "How long changes proposed on this node took until they were committed.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
		}),
	}
	collectors := []prometheus.Collector{
		m.proposals, m.seconds,
		gauge("leader", "1 while this node leads the ledger.", func() float64 { return one(l.IsLeader()) }),
		gauge("healthy", "0 where this replica stopped or its disk refuses writes.", func() float64 { return one(l.Health() == nil) }),
		gauge("term", "Raft's term.", func() float64 { return float64(l.raft.CurrentTerm()) }),
		gauge("last_index", "The last entry of this node's log.", func() float64 { return float64(l.raft.LastIndex()) }),
		gauge("budget_accounts", fmt.Sprintf("Accounts of budgets that the ledger holds, of %d at most.", MaxBudgets), func() float64 { return float64(l.Facts().Budgets) }),
		gauge("applied_index", "The last entry that this replica applied.", func() float64 { return float64(l.raft.AppliedIndex()) }),
	}
	if registerer == nil {
		return m, nil
	}
	for _, c := range collectors {
		if err := registerer.Register(c); err != nil {
			m.unregister()
			return m, err
		}
		m.registered = append(m.registered, c)
	}
	return m, nil
}

func one(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// proposed counts one proposal.
func (m *metrics) proposed(began time.Time, result *ledgerpb.Result, err error) {
	outcome := "unknown"
	switch {
	case err == nil && result.GetCode() != "":
		outcome = "refused"
	case err == nil:
		outcome = "done"
	case errors.Is(err, ErrNoLeader), errors.Is(err, raft.ErrRaftShutdown), errors.Is(err, ErrStopped):
		outcome = "no_leader"
	case errors.Is(err, ErrTooLarge), errors.Is(err, ErrBusy):
		outcome = "too_much"
	}
	m.proposals.WithLabelValues(outcome).Inc()
	if err == nil {
		m.seconds.Observe(time.Since(began).Seconds())
	}
}

func (m *metrics) unregister() {
	for _, c := range m.registered {
		m.registerer.Unregister(c)
	}
}
