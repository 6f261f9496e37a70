package journal

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of a Log.
type metrics struct {
	reserved, settled, bytes, dropped prometheus.Counter
	failing                           prometheus.Gauge
	sync                              prometheus.Histogram
	all                               []prometheus.Collector
	reg                               prometheus.Registerer
}

// newMetrics makes and, with a registerer, registers them.
func newMetrics(reg prometheus.Registerer, l *Log) (*metrics, error) {
	records := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headgate_journal_records_total", Help: "Records written to the journal of money and usage.",
	}, []string{"kind"})
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &metrics{
		reserved: records.WithLabelValues("reservation"), settled: records.WithLabelValues("usage"),
		bytes:   counter("headgate_journal_bytes_total", "Bytes written to the journal."),
		dropped: counter("headgate_journal_dropped_total", "Usage records of requests without a budget that were dropped because the disk refused them."),
		failing: prometheus.NewGauge(prometheus.GaugeOpts{Name: "headgate_journal_failing", Help: "1 while the disk does not take the journal: budgeted tenants are refused."}),
		sync: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "headgate_journal_sync_seconds", Help: "How long the disk took to sync the journal.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 9),
		}),
		reg: reg,
	}
	kept := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "headgate_journal_kept", Help: "Settled records that wait in memory for the disk.",
	}, func() float64 {
		l.mu.Lock()
		defer l.mu.Unlock()
		return float64(len(l.kept))
	})
	m.all = []prometheus.Collector{records, m.bytes, m.dropped, m.failing, m.sync, kept}
	if reg == nil {
		return m, nil
	}
	var errs []error
	for _, c := range m.all {
		errs = append(errs, reg.Register(c))
	}
	return m, errors.Join(errs...)
}

// unregister takes them away again; a nil one has none.
func (m *metrics) unregister() {
	if m == nil || m.reg == nil {
		return
	}
	for _, c := range m.all {
		m.reg.Unregister(c)
	}
}
