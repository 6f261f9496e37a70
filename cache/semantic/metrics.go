package semantic

import (
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/cache/threshold"
)

const (
	maxTenantLabels = 100
	otherTenants    = "other"
)

// metrics are what a Cache counts; what its shard counts is read of that.
type metrics struct {
	seconds    prometheus.Histogram
	decisions  *prometheus.CounterVec
	labels     *prometheus.CounterVec
	similarity *prometheus.HistogramVec
	probes     *prometheus.CounterVec
	lost       *prometheus.CounterVec
	malformed  prometheus.Counter
	tripped    prometheus.Gauge

	mu      sync.Mutex
	tenants map[string]struct{} // that have a label
}

// newMetrics registers them with r, which may be nil.
func newMetrics(r prometheus.Registerer, c *Cache) (*metrics, error) {
	m := &metrics{
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "headgate_semantic_lookup_seconds", Help: "How long a look for an answer to a similar question took, its owner's included, without the embedding.",
			Buckets: []float64{.0001, .0002, .0003, .0005, .001, .0025, .005, .01, .025, .1, .25},
		}),
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_semantic_decisions_total", Help: "Questions of this node, by what became of them. Those of shadow mode are never served.",
		}, []string{"action"}),
		labels: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_semantic_labels_total", Help: "Comparisons of an answer of the model with a stored one: same, different, or unknown.",
		}, []string{"same"}),
		similarity: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "headgate_cache_similarity", Help: "Similarity of the stored question, by what became of the new one.",
			Buckets: []float64{.5, .6, .7, .75, .8, .85, .9, .92, .94, .96, .98, .99, 1},
		}, []string{"action"}),
		probes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_semantic_probes_total", Help: "Questions near in their vectors that guards refuse, or whose words differ: near-misses, or attempts to collide.",
		}, []string{"tenant"}),
		lost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_semantic_dropped_total", Help: "Labels and answers that were not taken, by why.",
		}, []string{"reason"}),
		malformed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_semantic_malformed_total", Help: "Messages of other nodes that were refused.",
		}),
		tripped: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headgate_semantic_tripped", Help: "Surfaces of tenants that exceed their budget for wrong answers, or of which audits find out too little, as this node sees it: they serve no similar questions.",
		}),
		tenants: map[string]struct{}{},
	}
	if r == nil {
		return m, nil
	}
	for _, x := range [...]prometheus.Collector{m.seconds, m.decisions, m.labels, m.similarity, m.probes, m.lost, m.malformed, m.tripped, collector{c}} {
		if err := r.Register(x); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) dropped(reason string) { m.lost.WithLabelValues(reason).Inc() }

func (m *metrics) decided(a *Answer) {
	m.decisions.WithLabelValues(a.Action.String()).Inc()
	if a.id != 0 {
		m.similarity.WithLabelValues(a.Action.String()).Observe(a.Similarity)
	}
}

func (m *metrics) label(l *lesson) {
	if l.id == 0 || l.action == threshold.Miss || l.settles {
		return
	}
	same := "unknown"
	if l.label.Known {
		same = strconv.FormatBool(l.label.Same)
	}
	m.labels.WithLabelValues(same).Inc()
}

func (m *metrics) probe(tenant string) {
	m.mu.Lock()
	_, ok := m.tenants[tenant]
	if !ok && len(m.tenants) < maxTenantLabels {
		m.tenants[tenant] = struct{}{}
		ok = true
	}
	m.mu.Unlock()
	if !ok {
		tenant = otherTenants
	}
	m.probes.WithLabelValues(tenant).Inc()
}

// collector reads what is there.
type collector struct{ c *Cache }

// Describe see prometheus.Collector. Nothing is promised: the names are in Collect.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect see prometheus.Collector.
func (x collector) Collect(ch chan<- prometheus.Metric) {
	t := x.c.shard.totals()
	put := func(kind prometheus.ValueType, name, help string, v int64, labels ...string) {
		var names []string
		if len(labels) > 0 {
			names = []string{"reason"}
		}
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, nil), kind, float64(v), labels...)
	}
	put(prometheus.GaugeValue, "headgate_semantic_entries", "Entries of this node.", t.entries)
	put(prometheus.GaugeValue, "headgate_semantic_bytes", "Memory that they take, their indices included.", t.bytes)
	put(prometheus.GaugeValue, "headgate_semantic_partitions", "Partitions of this node.", t.partitions)
	put(prometheus.CounterValue, "headgate_semantic_evicted_total", "Entries that went to make room.", t.evicted)
	put(prometheus.CounterValue, "headgate_semantic_expired_total", "Entries whose time was over.", t.expired)
	put(prometheus.CounterValue, "headgate_semantic_invalid_total", "Entries that were found to be invalidated.", t.invalid)
	put(prometheus.CounterValue, "headgate_semantic_replaced_total", "Entries that a newer answer to the same words took the place of.", t.replaced)
	put(prometheus.CounterValue, "headgate_semantic_wrong_total", "Entries that somebody reported as wrong.", t.wrong)
	put(prometheus.CounterValue, "headgate_semantic_moved_total", "Entries that went to another node, which owns them by now.", t.movedOut)
	for o := kept + 1; o < outcomes; o++ {
		put(prometheus.CounterValue, "headgate_semantic_refused_total", "Answers that this node did not keep, by why.", t.dropped[o], o.String())
	}
}
