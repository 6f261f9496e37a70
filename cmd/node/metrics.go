package node

import (
	"github.com/prometheus/client_golang/prometheus"

	"headgate/proxy/upstream"
)

// backendCollector shows the endpoints as they are when asked.
type backendCollector struct{ pool *upstream.Pool }

// backendMetric is one of the endpoints' gauges.
func backendMetric(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("headgate_backend_"+name, help, []string{"backend", "endpoint"}, nil)
}

// Describe sends nothing: which endpoints there are is the policy's and DNS's to say.
func (backendCollector) Describe(chan<- *prometheus.Desc) {}

// Collect sends every endpoint's gauges.
func (c backendCollector) Collect(ch chan<- prometheus.Metric) {
	up := backendMetric("up", "Whether the endpoint is known to be up.")
	inFlight := backendMetric("inflight", "Requests in flight to the endpoint.")
	slots := backendMetric("slots", "Requests that the endpoint may have in flight; 0 is unbounded.")
	for _, b := range c.pool.Status() {
		alive := 0.0
		if b.State == upstream.Up {
			alive = 1
		}
		ch <- prometheus.MustNewConstMetric(up, prometheus.GaugeValue, alive, b.Name, b.Endpoint)
		ch <- prometheus.MustNewConstMetric(inFlight, prometheus.GaugeValue, float64(b.InFlight), b.Name, b.Endpoint)
		ch <- prometheus.MustNewConstMetric(slots, prometheus.GaugeValue, float64(b.Slots), b.Name, b.Endpoint)
	}
}
