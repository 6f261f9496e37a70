package fakevllm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// standing is a fault that strikes by chance.
type standing struct {
	fault Fault
	arg   string
	share float64
	since time.Time
}

// Set lets a fault strike a share of the requests from now on, from 0, never, to 1,
// all of them; it replaces what was set of that fault before. A fault with an
// argument is given as NAME=ARGUMENT, as in "429=2" or "drag=20". At share 1 the
// routes that are no inference suffer too: see [HealthFollows]. Set(Refuse, 0) fails
// if the address was taken in the meantime.
func (s *Server) Set(fault Fault, share float64) error {
	name, arg, _ := strings.Cut(string(fault), "=")
	f := Fault(name)
	if err := checkFaults(map[Fault]float64{f: share}); err != nil {
		return fmt.Errorf("fakevllm: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list := slices.DeleteFunc(slices.Clone(s.standing()), func(x standing) bool { return x.fault == f })
	if share > 0 {
		list = append(list, standing{f, arg, share, time.Now()})
	}
	s.faults.Store(&list)
	if f == Refuse {
		return s.doors(share > 0)
	}
	return nil
}

// Clear takes back every fault that [Config.Faults] or [Server.Set] has set.
func (s *Server) Clear() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.Store(&[]standing{})
	return s.doors(false)
}

func (s *Server) standing() []standing { return *s.faults.Load() }

// SetMetrics changes how /metrics answers from now on. MetricsFrozen freezes what
// the next reader sees.
func (s *Server) SetMetrics(m Metrics) error {
	if !m.valid() || m == "" {
		return fmt.Errorf("fakevllm: unknown metrics %q (new, old, none, frozen or hang)", m)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metricsAs, s.frozen = m, nil
	return nil
}

// SetHealth changes how /health answers from now on.
func (s *Server) SetHealth(h Health) error {
	if !slices.Contains([]Health{HealthFollows, HealthUp, HealthDown}, h) {
		return fmt.Errorf("fakevllm: unknown health %q (follows, up or down)", h)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.healthAs = h
	return nil
}

// Listen listens on a TCP address for a server of [Server.Handler]. Under the fault
// [Refuse] the address refuses connections, and those that were accepted are reset.
// The listener lives until it is closed.
func (s *Server) Listen(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	d := &door{s: s, addr: l.Addr(), now: l, changed: make(chan struct{}), conns: map[net.Conn]struct{}{}}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = append(s.open, d)
	for _, f := range s.standing() {
		if f.fault == Refuse {
			return d, d.set(true)
		}
	}
	return d, nil
}

// doors opens or shuts all listeners. The caller holds the lock.
func (s *Server) doors(shut bool) error {
	var errs []error
	for _, d := range s.open {
		errs = append(errs, d.set(shut))
	}
	return errors.Join(errs...)
}

// door is a listener that can refuse connections, which a listening socket cannot:
// it closes the socket and later opens one at the same address.
type door struct {
	s    *Server
	addr net.Addr

	mu      sync.Mutex
	now     net.Listener // nil while it refuses
	changed chan struct{}
	conns   map[net.Conn]struct{}
	closed  bool
}

func (d *door) set(shut bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || shut == (d.now == nil) {
		return nil
	}
	if shut {
		_ = d.now.Close() // nothing is left to lose
		d.now = nil
		for c := range d.conns {
			resetConn(c)
		}
		clear(d.conns)
	} else {
		l, err := net.Listen("tcp", d.addr.String())
		if err != nil {
			return fmt.Errorf("fakevllm: open %s again: %w", d.addr, err)
		}
		d.now = l
	}
	close(d.changed)
	d.changed = make(chan struct{})
	return nil
}

// Accept implements net.Listener. It blocks while connections are refused.
func (d *door) Accept() (net.Conn, error) {
	for {
		d.mu.Lock()
		now, changed, closed := d.now, d.changed, d.closed
		d.mu.Unlock()
		if closed {
			return nil, net.ErrClosed
		}
		if now == nil {
			<-changed
			continue
		}
		c, err := now.Accept()
		d.mu.Lock()
		switch {
		case err != nil && d.now == now && !d.closed:
			d.mu.Unlock()
			return nil, err
		case err != nil: // the door was shut; there may be a new one
		case d.now != now:
			resetConn(c)
		default:
			a := &accepted{Conn: c, d: d}
			d.conns[a] = struct{}{}
			d.mu.Unlock()
			return a, nil
		}
		d.mu.Unlock()
	}
}

// Close implements net.Listener.
func (d *door) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	close(d.changed)
	if d.now == nil {
		return nil
	}
	return d.now.Close()
}

// Addr implements net.Listener.
func (d *door) Addr() net.Addr { return d.addr }

// accepted is a connection that its door can find.
type accepted struct {
	net.Conn
	d *door
}

func (a *accepted) Close() error {
	a.d.mu.Lock()
	delete(a.d.conns, a)
	a.d.mu.Unlock()
	return a.Conn.Close()
}

// SyscallConn lets a server find the socket below.
func (a *accepted) SyscallConn() (syscall.RawConn, error) {
	if c, ok := a.Conn.(syscall.Conn); ok {
		return c.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}

// resetConn drops a connection so that its peer reads "connection reset".
func resetConn(c net.Conn) {
	if a, ok := c.(*accepted); ok {
		c = a.Conn
	}
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // best effort: without it the close is a plain one
	}
	_ = c.Close() // nothing is left to lose
}

// Control returns the routes by which another process steers and reads the server;
// the server's own handler has them too, but does not answer under [Refuse]. What
// comes by them is in no log and no counter.
//
//	POST /fake/set?fault=NAME[=ARGUMENT]&share=P   as Set; share defaults to 1
//	POST /fake/set?metrics=WAY                     as SetMetrics
//	POST /fake/set?health=WAY                      as SetHealth
//	POST /fake/clear                               as Clear
//	POST /fake/hold?after=N, /fake/release         as HoldAfter, Release
//	POST /fake/reset                               as Reset
//	GET  /fake/stats, /fake/timeline, /fake/log    as Stats, Timeline, Log; JSON, bodies and headers left out
func (s *Server) Control() http.Handler {
	mux := http.NewServeMux()
	s.control(mux)
	return mux
}

func (s *Server) control(mux *http.ServeMux) {
	do := func(path string, f func(r *http.Request) error) {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			if err := f(r); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			w.WriteHeader(http.StatusNoContent)
		})
	}
	do("/fake/set", s.setBy)
	do("/fake/clear", func(*http.Request) error { return s.Clear() })
	do("/fake/release", func(*http.Request) error { s.Release(); return nil })
	do("/fake/reset", func(*http.Request) error { s.Reset(); return nil })
	do("/fake/hold", func(r *http.Request) error {
		n, err := strconv.ParseInt(orText(r.URL.Query().Get("after"), "0"), 10, 64)
		if err == nil {
			s.HoldAfter(n)
		}
		return err
	})
	read := func(path string, f func() any) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(f()) // who asked has left
		})
	}
	read("/fake/stats", func() any { return s.Stats() })
	read("/fake/timeline", func() any { return s.Timeline() })
	read("/fake/log", func() any {
		log := s.Log()
		for i := range log {
			log[i].Body, log[i].Header = nil, nil
		}
		return log
	})
}

func orText(s, d string) string {
	if s == "" {
		return d
	}
	return s
}

func (s *Server) setBy(r *http.Request) error {
	q := r.URL.Query()
	var errs []error
	if f := q.Get("fault"); f != "" {
		share, err := strconv.ParseFloat(orText(q.Get("share"), "1"), 64)
		if err == nil {
			err = s.Set(Fault(f), share)
		}
		errs = append(errs, err)
	}
	if m := q.Get("metrics"); m != "" {
		errs = append(errs, s.SetMetrics(Metrics(m)))
	}
	if h := q.Get("health"); h != "" {
		errs = append(errs, s.SetHealth(Health(h)))
	}
	if len(errs) == 0 {
		return errors.New("nothing to set: give fault=NAME[=ARGUMENT] with share=P, metrics=WAY or health=WAY")
	}
	return errors.Join(errs...)
}

// sick lets a fault that strikes all inference strike another route too. It reports
// whether the request has ended by it.
func (c *call) sick() bool {
	if c.s.health() != HealthFollows && slices.Contains(healthRoutes(), c.r.URL.Path) {
		return false
	}
	for _, f := range c.s.standing() {
		if f.share < 1 {
			continue
		}
		switch code := f.fault.status(); {
		case code >= 500:
			c.finish(Failed, f.fault)
			c.reply(code, "", nil)
		case f.fault == Hang:
			c.hang(Hang)
		case f.fault == Reset || f.fault == Refuse || f.fault == Flap && c.s.flapped(f.since):
			c.finish(Failed, f.fault)
			c.reset()
		default:
			continue
		}
		return true
	}
	return false
}

func (s *Server) health() Health {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.healthAs
}

// hang lets a request wait for nothing.
func (c *call) hang(f Fault) {
	if !c.pause(c.s.cfg.StallMax) {
		c.abort()
		return
	}
	c.finish(Failed, f)
	panic(http.ErrAbortHandler)
}

// flapped says whether a server that flaps since then is down.
func (s *Server) flapped(since time.Time) bool {
	return time.Since(since)/s.cfg.FlapPeriod%2 == 1
}

// down says whether the fault Flap has come over a request.
func (c *call) down() bool {
	if !c.has(Flap) {
		return false
	}
	for _, f := range c.s.standing() {
		if f.fault == Flap {
			return c.s.flapped(f.since)
		}
	}
	return c.s.flapped(c.s.born) // the request itself has asked for it
}

// AwaitIdle returns nil once no inference request is in flight, or ctx's error.
func (s *Server) AwaitIdle(ctx context.Context) error {
	return s.Await(ctx, func(st Stats) bool { return st.InFlight == 0 && st.Running == 0 && st.Waiting == 0 })
}
