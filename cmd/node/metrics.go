package node

import (
	"github.com/prometheus/client_golang/prometheus"

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
