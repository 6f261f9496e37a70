package dispatch

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/proxy/queue"
)

// metrics are what a Dispatcher counts itself; the rest it reads when it is asked.
type metrics struct {
	waits      [queue.Classes]prometheus.Observer
	drops      [queue.Reasons]prometheus.Counter
	misses     prometheus.Counter
	reconnects prometheus.Counter
	malformed  prometheus.Counter
}

// newMetrics registers them with r, which may be nil.
func newMetrics(r prometheus.Registerer, d *Dispatcher) (*metrics, error) {
	waits := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "headgate_queue_wait_seconds", Help: "How long requests of this node waited for the slots that they got, by class.",
		Buckets: []float64{.001, .005, .02, .05, .1, .25, .5, 1, 2, 4, 8, 16, 32, 64},
	}, []string{"class"})
	drops := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headgate_queue_dropped_total", Help: "Requests of this node that got no slot, by reason.",
	}, []string{"reason"})
	m := &metrics{
		misses: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_queue_misses_total", Help: "Times that a request of this node was given leave to run where no slot was to be leased.",
		}),
		reconnects: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_queue_reconnects_total", Help: "Links of this node to the scheduler that broke.",
		}),
		malformed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_queue_malformed_total", Help: "Messages of other nodes about the queue that were refused whole.",
		}),
	}
	for c := range m.waits {
		m.waits[c] = waits.WithLabelValues(queue.Class(c).String())
	}
	for x := range m.drops {
		m.drops[x] = drops.WithLabelValues(queue.Reason(x).String())
	}
	if r == nil {
		return m, nil
	}
	for _, c := range [...]prometheus.Collector{waits, drops, m.misses, m.reconnects, m.malformed, newCollector(d)} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) waited(c queue.Class, d time.Duration) { m.waits[c].Observe(d.Seconds()) }

func (m *metrics) dropped(r queue.Reason) {
	if int(r) < len(m.drops) {
		m.drops[r].Inc()
	}
}

// collector reads how things stand. What is of this node alone every node says, so that sums over nodes are the
// cluster's; what is of the cluster only the node that schedules says.
type collector struct {
	d                                                                       *Dispatcher
	depth, inUse, scheduling, reachable                                     *prometheus.Desc
	bytes, places, waiting, limit, slots, pressure, stale, desired, drainIn *prometheus.Desc
}

func newCollector(d *Dispatcher) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return &collector{
		d:          d,
		depth:      desc("headgate_queue_depth", "Requests of this node that wait for a slot, by class. The sum over nodes is the queue.", "class"),
		inUse:      desc("headgate_slots_in_use", "Slots of a backend that requests of this node have. The sum over nodes is what is in use.", "backend"),
		scheduling: desc("headgate_queue_scheduling", "Whether this node keeps the queue: 1 on one node."),
		reachable:  desc("headgate_queue_scheduler_reachable", "Whether the node that keeps the queue answers this one."),
		bytes:      desc("headgate_queue_bytes", "Bytes that nodes keep for requests that wait. Only the node that schedules says it."),
		places:     desc("headgate_queue_places", "How many requests may wait for a backend. Only the node that schedules says it.", "backend"),
		waiting:    desc("headgate_backend_waiting", "Requests that wait and may go to a backend. Only the node that schedules says it.", "backend"),
		limit:      desc("headgate_slots_limit", "Slots of a backend that may be used now: those of the policy, or what was learnt. Only the node that schedules says it.", "backend"),
		slots:      desc("headgate_slots", "Slots of a backend by the policy. Only the node that schedules says it.", "backend"),
		pressure:   desc("headgate_backend_pressure", "The smoothed part of a backend's places that is taken, 1 and more while requests are refused. Only the node that schedules says it.", "backend"),
		stale:      desc("headgate_backend_stale", "Whether a backend's own metrics are too old, so that it counts as saturated. Only the node that schedules says it.", "backend"),
		desired:    desc("headgate_desired_replicas", "How many backends like this one would do the work that is offered to it; the sum over a model's backends is the replicas that it needs. Only the node that schedules says it.", "backend"),
		drainIn:    desc("headgate_queue_drain_seconds", "How long those that wait for a backend will take. Only the node that schedules says it.", "backend"),
	}
}

// Describe see prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range [...]*prometheus.Desc{
		c.depth, c.inUse, c.scheduling, c.reachable, c.bytes, c.places, c.waiting, c.limit, c.slots, c.pressure, c.stale, c.desired, c.drainIn,
	} {
		ch <- d
	}
}

// Collect see prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	put := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for class := range c.d.waiting {
		put(c.depth, float64(c.d.waiting[class].Load()), queue.Class(class).String())
	}
	for id, e := range *c.d.ends.Load() {
		put(c.inUse, float64(e.used.Load()), id)
	}
	stats, scheduling, reachable := c.d.stats()
	put(c.scheduling, one(scheduling))
	put(c.reachable, one(reachable))
	if !scheduling {
		return
	}
	put(c.bytes, float64(stats.Bytes))
	for i := range stats.Backends {
		b := &stats.Backends[i]
		limit := b.Slots
		if b.Limit >= 0 {
			limit = min(limit, b.Limit)
		}
		put(c.places, float64(b.Places), b.ID)
		put(c.waiting, float64(b.Waiting), b.ID)
		put(c.limit, float64(limit), b.ID)
		put(c.slots, float64(b.Slots), b.ID)
		put(c.pressure, b.Pressure, b.ID)
		put(c.stale, one(b.Stale), b.ID)
		put(c.desired, b.Desired, b.ID)
		put(c.drainIn, b.Drain.Seconds(), b.ID)
	}
}

func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// stats is the queue as last shown here; scheduling: it is the cluster's.
func (d *Dispatcher) stats() (s queue.Stats, scheduling, reachable bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.seat != nil && d.seat.official {
		s, scheduling = d.seat.stats, true
	}
	return s, scheduling, d.lost == maxTime
}
