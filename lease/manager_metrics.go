package lease

import (
	"math/bits"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/limiter"
)

// metrics are what a Manager counts itself; the rest it reads of the cores when it is asked.
type metrics struct {
	trips    *prometheus.CounterVec
	rejected prometheus.Counter
	hands    *prometheus.CounterVec
	apart    *prometheus.CounterVec
}

// newMetrics registers them with r, which may be nil.
func newMetrics(r prometheus.Registerer, m *Manager) (*metrics, error) {
	met := &metrics{
		trips: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_lease_round_trips_total", Help: "Messages to owners in other processes, by whether a request waited for them.",
		}, []string{"kind"}),
		rejected: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_lease_malformed_total", Help: "Messages of other processes that were refused whole.",
		}),
		hands: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_lease_handoffs_total", Help: "Partitions handed over, by side and outcome.",
		}, []string{"side", "outcome"}),
		apart: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_lease_apart_total", Help: "Charges decided while the owner of their bucket was out of reach, by who decided.",
		}, []string{"by"}),
	}
	if r == nil {
		return met, nil
	}
	for _, c := range [...]prometheus.Collector{met.trips, met.rejected, met.hands, met.apart, coreCollector{m}} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return met, nil
}

func (m *metrics) roundTrip(r *Request) {
	kind := "keep"
	if len(r.Asks) > 0 {
		kind = "ask"
	}
	m.trips.WithLabelValues(kind).Inc()
}

func (m *metrics) handOff(side string, accepted bool) {
	outcome := "accepted"
	if !accepted {
		outcome = "useless"
	}
	m.hands.WithLabelValues(side, outcome).Inc()
}

func (m *metrics) countApart(ds []limiter.Decision, which uint32) {
	for ; which != 0; which &= which - 1 {
		m.apart.WithLabelValues(ds[bits.TrailingZeros32(which)].By.String()).Inc()
	}
}

// coreCollector reads the owner's and the holder's counts.
type coreCollector struct{ m *Manager }

// Describe see prometheus.Collector. Nothing is promised: the names are in Collect.
func (coreCollector) Describe(chan<- *prometheus.Desc) {}

// Collect see prometheus.Collector.
func (c coreCollector) Collect(ch chan<- prometheus.Metric) {
	o, h := c.m.stats(), c.m.holder.Stats()
	put := func(kind prometheus.ValueType, name, help string, v float64) {
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, nil, nil), kind, v)
	}
	put(prometheus.GaugeValue, "headgate_lease_buckets", "Buckets that this node owns.", float64(o.Buckets))
	put(prometheus.GaugeValue, "headgate_lease_outstanding", "Units that holders may still spend of this node's buckets.", float64(o.Outstanding))
	put(prometheus.GaugeValue, "headgate_lease_stranded", "Units that lay in other nodes' leases, by their last reports, when a request was refused last.", float64(o.Stranded))
	put(prometheus.GaugeValue, "headgate_lease_parked", "Requests that wait for a recall or a block.", float64(o.Parked))
	put(prometheus.GaugeValue, "headgate_lease_held", "Leases that this node holds.", float64(h.Leases))
	put(prometheus.CounterValue, "headgate_lease_full_total", "Leases given back since this node holds max_buckets.", float64(h.Full))
	put(prometheus.CounterValue, "headgate_lease_discarded_total", "Parts of messages that came too late, or from owners of before.", float64(h.Discarded))
	put(prometheus.CounterValue, "headgate_lease_rejected_total", "Parts of messages that could not be true, and at a change of policy some of nodes that knew it first.", float64(o.Rejected+h.Rejected))
	put(prometheus.CounterValue, "headgate_lease_void_total", "Takes and decisions past their session's deadline.", float64(h.Void))
	put(prometheus.CounterValue, "headgate_lease_sessions_ended_total", "Sessions that ended with what they were lent counted as spent.", float64(o.Ended))
	put(prometheus.CounterValue, "headgate_lease_recalls_total", "Leases recalled.", float64(o.Recalls))
	put(prometheus.CounterValue, "headgate_lease_debt_lost_total", "Units of debt that no bucket took.", float64(o.LostDebt)+float64(h.LostDebt))
	put(prometheus.CounterValue, "headgate_lease_slots_excess_total", "Slots found to be in use above a limit, by nodes that had been given up.", float64(o.Excess))
	put(prometheus.CounterValue, "headgate_lease_slots_lost_total", "Slots of processes that left, free again.", float64(o.SlotsLost))
}
