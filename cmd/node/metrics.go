package node

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/proxy/ladder"
	"headgate/proxy/upstream"
)

// backendCollector shows the endpoints as they are when asked.
type backendCollector struct{ pool *upstream.Pool }

// Describe sends nothing: which endpoints there are is the policy's and DNS's to say.
func (backendCollector) Describe(chan<- *prometheus.Desc) {}

// Collect sends every endpoint's gauges. One that leaves while another has come under its name, as when a
// backend's url was changed, is that other with what it has yet in flight.
func (c backendCollector) Collect(ch chan<- prometheus.Metric) {
	status := c.pool.Status()
	inFlight := make(map[string]int, len(status))
	for i := range status {
		inFlight[status[i].Endpoint] += status[i].InFlight
	}
	for _, b := range status { // those that leave are the last
		n, ok := inFlight[b.Endpoint]
		if !ok {
			continue
		}
		delete(inFlight, b.Endpoint)
		gauge := func(name, help string, value float64) {
			d := prometheus.NewDesc("headgate_backend_"+name, help, []string{"backend", "endpoint"}, nil)
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, b.Name, b.Endpoint)
		}
		gauge("up", "Whether the endpoint is known to be up.", asGauge(b.State == upstream.Up))
		gauge("inflight", "Requests in flight to the endpoint.", float64(n))
		gauge("slots", "Requests that the endpoint may have in flight; 0 is unbounded.", float64(b.Slots))
		gauge("breaker_open", "Whether failures keep requests from the endpoint, but for one that may try.", asGauge(b.Breaker != upstream.BreakerClosed))
		gauge("ejected", "Whether the endpoint gets nothing since its peers do much better.", asGauge(b.Ejected))
		gauge("paused", "Whether the endpoint asked to be left alone for a time that is not over.", asGauge(b.Paused > 0))
		gauge("drained", "Whether an operator has taken the endpoint out of use.", asGauge(b.Drained))
		gauge("share", "Part of its room that the endpoint has, below 1 during a slow start.", b.Share)
	}
}

// asGauge is how metrics say yes and no.
func asGauge(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// ladderCollector shows which rungs are in force when asked.
type ladderCollector struct{ n *Node }

// rungDesc is of the one metric that there is.
func rungDesc() *prometheus.Desc {
	return prometheus.NewDesc("headgate_ladder_rung", "Models for which a rung of the ladder is in force, by whom it was set (hand: for all models; trigger: by itself, as this node sees it).", []string{"rung", "by"}, nil)
}

// Describe sends the one description.
func (ladderCollector) Describe(ch chan<- *prometheus.Desc) { ch <- rungDesc() }

// Collect sends each rung's two gauges.
func (c ladderCollector) Collect(ch chan<- prometheus.Metric) {
	desc, f, now := rungDesc(), c.n.truth.Facts(), time.Now()
	for _, r := range ladder.Rungs() {
		byHand := 0
		if s, ok := f.Rungs.Lookup(r.String()); ok && (s.Expires.IsZero() || now.Before(s.Expires)) {
			byHand = len(*c.n.admission.models.Load())
		}
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(byHand), r.String(), "hand")
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(len(c.n.automatic(r))), r.String(), "trigger")
	}
}
