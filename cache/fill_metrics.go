package cache

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are what an Exact counts; what its store counts is read of that.
type metrics struct {
	handovers *prometheus.CounterVec
	broken    *prometheus.CounterVec
	lockless  prometheus.Counter
	malformed prometheus.Counter
	unsent    prometheus.Counter
	seconds   *prometheus.HistogramVec
}

// newMetrics registers them with r, which may be nil.
func newMetrics(r prometheus.Registerer, e *Exact) (*metrics, error) {
	m := &metrics{
		handovers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_cache_handovers_total", Help: "Times that the next request got to ask the model, by why the one before did not answer.",
		}, []string{"reason"}),
		broken: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_cache_broken_total", Help: "Requests that read another's stream which broke off: its leader, or the link to the owner.",
		}, []string{"reason"}),
		lockless: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_cache_lockless_total", Help: "Fills by this node alone, as no owner of the key was in reach.",
		}),
		malformed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_cache_malformed_total", Help: "Messages of other nodes that were refused.",
		}),
		unsent: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_cache_unsent_total", Help: "Entries that did not reach their owner.",
		}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "headgate_cache_peer_seconds", Help: "How long another node took: to its first word of a join, to the end of a get or put.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .1, .3, 1, 5},
		}, []string{"call"}),
	}
	if r == nil {
		return m, nil
	}
	for _, c := range [...]prometheus.Collector{m.handovers, m.broken, m.lockless, m.malformed, m.unsent, m.seconds, exactCollector{e}} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) peer(call string, took time.Duration) {
	m.seconds.WithLabelValues(call).Observe(took.Seconds())
}

// exactCollector reads what is there.
type exactCollector struct{ e *Exact }

// Describe see prometheus.Collector. Nothing is promised: the names are in Collect.
func (exactCollector) Describe(chan<- *prometheus.Desc) {}

// Collect see prometheus.Collector.
func (c exactCollector) Collect(ch chan<- prometheus.Metric) {
	c.e.mu.Lock()
	flights, waiting := len(c.e.branches), c.e.waiting
	c.e.mu.Unlock()
	s := c.e.cfg.Store.Stats()
	put := func(kind prometheus.ValueType, name, help string, v int64) {
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, nil, nil), kind, float64(v))
	}
	put(prometheus.GaugeValue, "headgate_cache_flights", "Keys that requests of this node ask the model for, or wait for.", int64(flights))
	put(prometheus.GaugeValue, "headgate_cache_waiters", "Requests of this node that wait for another's answer.", int64(waiting))
	put(prometheus.GaugeValue, "headgate_cache_flying_bytes", "Memory that streams take which are on their way, for those who follow them.", c.e.room.held.Load())
	put(prometheus.GaugeValue, "headgate_cache_entries", "Entries of this node.", s.Entries)
	put(prometheus.GaugeValue, "headgate_cache_bytes", "Memory that they take.", s.Bytes)
	put(prometheus.CounterValue, "headgate_cache_evicted_total", "Entries that went to make room, or whose time was over.", s.Evicted)
	put(prometheus.CounterValue, "headgate_cache_rejected_total", "Entries that admission refused.", s.Rejected)
	put(prometheus.CounterValue, "headgate_cache_dropped_total", "Entries that the store's buffer had no room for.", s.Dropped)
}
