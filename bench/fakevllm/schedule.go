package fakevllm

import (
	"net/http"
	"time"
)

// windowLength is the grain of the timeline.
const windowLength = 100 * time.Millisecond

// Window is what a part of the timeline has seen. Windows in which nothing ran or
// waited are left out.
type Window struct {
	At                                   time.Time // its beginning, a multiple of 100 ms
	SlotTime                             time.Duration
	MinRunning, PeakRunning, PeakWaiting int64
}

// Mean is how many requests ran on average.
func (w Window) Mean() float64 { return float64(w.SlotTime) / float64(windowLength) }

// Timeline returns what ran and waited since New or Reset, in windows of 100 ms,
// oldest first: the last quarter of an hour of them. The last one is still open.
func (s *Server) Timeline() []Window {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.elapse()
	out := make([]Window, 0, len(s.windows))
	out = append(out, s.windows[s.oldest:]...)
	return append(out, s.windows[:s.oldest]...)
}

// elapse books the time since the last change of the gauges. The caller holds the
// lock and calls it before it changes Running or Waiting.
func (s *Server) elapse() {
	now, st := time.Now(), &s.stats
	from := s.booked
	s.booked = now
	st.SlotTime += time.Duration(st.Running) * now.Sub(from)
	if st.Running == 0 && st.Waiting == 0 {
		return
	}
	if now.Sub(from) > maxWindows*windowLength {
		from = now.Add(-maxWindows * windowLength)
	}
	for from.Before(now) {
		w := s.window(from)
		until := w.At.Add(windowLength)
		if until.After(now) {
			until = now
		}
		w.SlotTime += time.Duration(st.Running) * until.Sub(from)
		w.MinRunning = min(w.MinRunning, st.Running)
		w.PeakRunning = max(w.PeakRunning, st.Running)
		w.PeakWaiting = max(w.PeakWaiting, st.Waiting)
		from = until
	}
}

// window returns the window that holds t, which is in the last one or after it.
func (s *Server) window(t time.Time) *Window {
	at := t.Truncate(windowLength)
	if n := len(s.windows); n > 0 {
		if last := &s.windows[(s.oldest+n-1)%n]; last.At.Equal(at) {
			return last
		}
	}
	w := Window{At: at, MinRunning: s.stats.Running}
	if len(s.windows) < maxWindows {
		s.windows = append(s.windows, w)
		return &s.windows[len(s.windows)-1]
	}
	p := &s.windows[s.oldest]
	*p = w
	s.oldest = (s.oldest + 1) % maxWindows
	return p
}

// waiter is a request before its slot.
type waiter struct {
	c     *call
	ready chan struct{}
}

// fits says whether a request may run now. The caller holds the lock.
func (s *Server) fits(c *call) bool {
	return s.stats.Running < int64(s.cfg.Slots) && (s.stats.Running == 0 || s.kv+c.kv <= s.cfg.KVTokens)
}

// start gives a request its slot. The caller holds the lock.
func (s *Server) start(c *call) {
	s.elapse()
	st := &s.stats
	c.running = true
	c.rec.Started = s.booked
	st.Running++
	st.PeakRunning = max(st.PeakRunning, st.Running)
	s.kv += c.kv
	s.load.Store(st.Running)
	s.notify()
}

// stop takes a request out of the gauges and lets the next ones in. The caller holds
// the lock.
func (s *Server) stop(c *call) {
	if c.inference {
		c.inference = false
		s.stats.InFlight--
	}
	if !c.running {
		return
	}
	s.elapse()
	c.running = false
	s.stats.Running--
	s.kv -= c.kv
	s.load.Store(s.stats.Running)
	s.promote()
}

// promote gives slots to those who wait, in order of arrival; the first that does
// not fit holds up the rest. The caller holds the lock.
func (s *Server) promote() {
	for e := s.queue.Front(); e != nil; e = s.queue.Front() {
		w, ok := e.Value.(*waiter)
		if !ok || !s.fits(w.c) {
			return
		}
		s.queue.Remove(e)
		s.elapse()
		s.stats.Waiting--
		s.start(w.c)
		close(w.ready)
	}
}

// enter waits for a slot. It returns false when the request has ended.
func (c *call) enter() bool {
	s := c.s
	s.mu.Lock()
	if s.queue.Len() == 0 && s.fits(c) {
		s.start(c)
		s.mu.Unlock()
		return true
	}
	if s.cfg.MaxWaiting > 0 && s.queue.Len() >= s.cfg.MaxWaiting {
		s.mu.Unlock()
		c.refuse(&apiError{status: http.StatusTooManyRequests, msg: "The waiting queue is full."})
		return false
	}
	s.elapse()
	w := &waiter{c: c, ready: make(chan struct{})}
	e := s.queue.PushBack(w)
	s.stats.Waiting++
	s.stats.PeakWaiting = max(s.stats.PeakWaiting, s.stats.Waiting)
	s.notify()
	s.mu.Unlock()
	select {
	case <-w.ready:
		return true
	case <-c.r.Context().Done():
	}
	s.mu.Lock()
	if !c.running {
		s.elapse()
		s.queue.Remove(e)
		s.stats.Waiting--
		s.promote() // it may have been the one that did not fit
	}
	s.mu.Unlock()
	c.abort()
	return false
}

// pace is how long something takes that takes d on a server with time to spare.
func (c *call) pace(d time.Duration) time.Duration {
	if knee := int64(c.s.cfg.Knee); knee > 0 && d > 0 {
		if n := c.s.load.Load(); n > knee {
			d = d * time.Duration(n) / time.Duration(knee)
		}
	}
	return d * time.Duration(c.drag())
}
