package proxy_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"headgate/proxy/dispatch"
	"headgate/proxy/queue"
)

// places are the slots of all backends, of a cluster of one node.
type places struct {
	mu    sync.Mutex
	slots map[string]int64
	used  map[string]int64
	over  int // times that more was used than there is
}

// place is slots that are held.
type place struct {
	p       *places
	backend string
	cost    int64
}

// Hold see dispatch.Slots.
func (p *places) Hold(_ context.Context, backend string, cost int64, _ bool) (dispatch.Held, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.used[backend]+cost > p.slots[backend] {
		return nil, false
	}
	p.used[backend] += cost
	return &place{p, backend, cost}, true
}

// Yield see dispatch.Slots.
func (p *places) Yield(string) {}

// Release see dispatch.Held.
func (h *place) Release(bool) {
	h.p.mu.Lock()
	defer h.p.mu.Unlock()
	if h.p.used[h.backend] -= h.cost; h.p.used[h.backend] < 0 {
		h.p.over++
	}
}

// openPlaces makes the queue before the pool's backends.
func (w *world) openPlaces(t *testing.T, cfg queue.Config) {
	w.places = &places{slots: map[string]int64{}, used: map[string]int64{}}
	began := time.Now()
	d := must[*dispatch.Dispatcher](t)(dispatch.New(dispatch.Config{
		Self: 1, Where: func() dispatch.Scheduling { return dispatch.Scheduling{Self: true, Members: 1} }, Slots: w.places,
		Now: func() int64 { return int64(time.Since(began)) + 1 }, Rand: rand.New(rand.NewPCG(1, 2)), Registerer: w.reg,
	}))
	var backends []queue.Backend
	for _, e := range w.pool.Endpoints() {
		if e.Slots > 0 {
			w.places.slots[e.ID] = int64(e.Slots)
			backends = append(backends, queue.Backend{ID: e.ID, Slots: int64(e.Slots), Limit: -1, Overflow: e.Overflow})
		}
	}
	d.Apply(backends, cfg)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); d.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		<-ended
		w.places.mu.Lock()
		defer w.places.mu.Unlock()
		for b, n := range w.places.used {
			if n != 0 {
				t.Errorf("%d slots of %s are held after all requests ended", n, b)
			}
		}
		if w.places.over > 0 {
			t.Errorf("slots were freed %d times too often", w.places.over)
		}
	})
	w.dispatch = d
}
