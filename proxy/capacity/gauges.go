package capacity

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// gauges shows what the backends said last. They are read when Prometheus asks, only on the node that schedules, and only what is
// known: a backend that says nothing has no line, not a zero. So a sum over nodes is right.
type gauges struct {
	f                         *Fleet
	waiting, running, kv, age *prometheus.Desc
}

func newGauges(f *Fleet) *gauges {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("headgate_backend_"+name, help+" Told by the node that schedules.", []string{"backend"}, nil)
	}
	return &gauges{
		f:       f,
		waiting: desc("vllm_waiting", "Requests that wait inside the backend for room."),
		running: desc("vllm_running", "Requests in the backend's batch."),
		kv:      desc("kv_usage", "Share of the backend's KV cache in use, 0 to 1."),
		age:     desc("metrics_age_seconds", "Time since the backend's metrics last said something new."),
	}
}

func (g *gauges) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{g.waiting, g.running, g.kv, g.age} {
		out <- d
	}
}

func (g *gauges) Collect(out chan<- prometheus.Metric) {
	type reading struct {
		id string
		s  Sample
		at int64
	}
	now := g.f.cfg.Now()
	active := g.f.rouse(now)
	var all []reading
	g.f.mu.Lock()
	for id, m := range g.f.of {
		if w := &m.learner.word; active && w.known() {
			all = append(all, reading{id, w.last, w.at})
		}
	}
	g.f.mu.Unlock()
	for _, r := range all {
		one := func(d *prometheus.Desc, v float64, has bool) {
			if has {
				out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, r.id)
			}
		}
		one(g.waiting, float64(r.s.Waiting), r.s.HasWaiting)
		one(g.running, float64(r.s.Running), r.s.HasRunning)
		one(g.kv, r.s.KVUsage, r.s.HasKV)
		one(g.age, time.Duration(now-r.at).Seconds(), true)
	}
}
