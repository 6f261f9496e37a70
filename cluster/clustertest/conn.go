package clustertest

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// conn is one end of a stream. Each direction is a buffer that the reader takes from as
// the link lets it.
type conn struct {
	host          *Host
	local, remote net.Addr
	in, out       *pipe
	once          sync.Once
}

func newConnPair(a, b *Host, local, remote net.Addr) (near, far *conn) {
	ab := newPipe(a.net, link{a.name, b.name})
	ba := newPipe(a.net, link{b.name, a.name})
	near = &conn{host: a, local: local, remote: remote, in: ba, out: ab}
	far = &conn{host: b, local: remote, remote: local, in: ab, out: ba}
	a.keep(near)
	b.keep(far)
	return near, far
}

func (h *Host) keep(c *conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.conns[c] = true
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.in.read(b)
	if err != nil && err != io.EOF { //nolint:errorlint // io.Reader's contract: EOF itself
		err = &net.OpError{Op: "read", Net: "tcp", Source: c.local, Addr: c.remote, Err: err}
	}
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	n, err := c.out.write(b, c.in.over())
	if err != nil {
		err = &net.OpError{Op: "write", Net: "tcp", Source: c.local, Addr: c.remote, Err: err}
	}
	return n, err
}

// Close ends both directions: the other end reads what is under way, then EOF.
func (c *conn) Close() error {
	c.once.Do(func() {
		c.host.mu.Lock()
		delete(c.host.conns, c)
		c.host.mu.Unlock()
		c.out.shut()
		c.in.abandon()
	})
	return nil
}

func (c *conn) LocalAddr() net.Addr  { return c.local }
func (c *conn) RemoteAddr() net.Addr { return c.remote }

func (c *conn) SetDeadline(t time.Time) error {
	_ = c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

func (c *conn) SetReadDeadline(t time.Time) error {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	c.in.readBy = t
	c.in.announce()
	return nil
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.out.writeBy = t
	c.out.announce()
	return nil
}

// pipe is one direction of a stream.
type pipe struct {
	net  *Net
	link link

	mu              sync.Mutex
	changed         chan struct{} // closed and replaced at every change
	segments        []segment
	size            int
	readBy, writeBy time.Time
	ended           bool // the writer closed
	endAt           time.Time
	abandoned       bool // the reader closed
}

type segment struct {
	at time.Time // not to be read before
	b  []byte
}

func newPipe(n *Net, l link) *pipe { return &pipe{net: n, link: l, changed: make(chan struct{})} }

// announce wakes both ends; p.mu is held.
func (p *pipe) announce() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// over says that all has been read that ever will be: the other end's closing has arrived.
func (p *pipe) over() bool {
	f, _ := p.net.state(p.link)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended && len(p.segments) == 0 && !time.Now().Before(p.endAt) && !f.cut
}

// write fails on a stream that the other end has closed once that is known here. Until then, behind a cut
// for example, what is written is lost, as it is with TCP before the RST comes: gRPC takes an
// error of a write for a sign that its next read fails, too, and spins until it does.
func (p *pipe) write(b []byte, known bool) (n int, err error) {
	b = append([]byte(nil), b...)
	total := len(b)
	for {
		f, _ := p.net.state(p.link)
		p.mu.Lock()
		switch {
		case p.ended:
			err = net.ErrClosed
		case p.abandoned && known:
			err = syscall.EPIPE
		case p.abandoned:
			p.mu.Unlock()
			return total, nil
		case !p.writeBy.IsZero() && !time.Now().Before(p.writeBy):
			err = os.ErrDeadlineExceeded
		}
		if err != nil {
			p.mu.Unlock()
			return total - len(b), err
		}
		if room := min(maxInFlight-p.size, len(b)); room > 0 {
			p.segments = append(p.segments, segment{time.Now().Add(f.delay), b[:room]})
			p.size += room
			b = b[room:]
			p.announce()
		}
		if len(b) == 0 {
			p.mu.Unlock()
			return total, nil
		}
		changed, by := p.changed, p.writeBy
		p.mu.Unlock()
		wait(by, changed, nil)
	}
}

func (p *pipe) read(b []byte) (int, error) {
	for {
		f, faults := p.net.state(p.link)
		p.mu.Lock()
		now := time.Now()
		switch {
		case p.abandoned:
			p.mu.Unlock()
			return 0, net.ErrClosed
		case !p.readBy.IsZero() && !now.Before(p.readBy):
			p.mu.Unlock()
			return 0, os.ErrDeadlineExceeded
		case len(b) == 0:
			p.mu.Unlock()
			return 0, nil
		}
		wake := p.readBy
		switch {
		case f.cut:
		case len(p.segments) > 0 && !now.Before(p.segments[0].at):
			n := p.take(b)
			p.announce()
			p.mu.Unlock()
			return n, nil
		case len(p.segments) > 0:
			wake = earlier(wake, p.segments[0].at)
		case p.ended && !now.Before(p.endAt):
			p.mu.Unlock()
			return 0, io.EOF
		case p.ended:
			wake = earlier(wake, p.endAt)
		}
		changed := p.changed
		p.mu.Unlock()
		wait(wake, changed, faults)
	}
}

// take moves what has arrived into b; p.mu is held.
func (p *pipe) take(b []byte) int {
	s := &p.segments[0]
	n := copy(b, s.b)
	s.b = s.b[n:]
	p.size -= n
	if len(s.b) == 0 {
		p.segments = p.segments[1:]
	}
	return n
}

func (p *pipe) shut() {
	f, _ := p.net.state(p.link)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended, p.endAt = true, time.Now().Add(f.delay)
	p.announce()
}

func (p *pipe) abandon() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.abandoned, p.segments, p.size = true, nil, 0
	p.announce()
}

func earlier(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}

// wait returns when the time has come (zero: never) or a channel closes.
func wait(until time.Time, changed, faults <-chan struct{}) {
	var timer <-chan time.Time
	if !until.IsZero() {
		t := time.NewTimer(time.Until(until))
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-changed:
	case <-faults:
	case <-timer:
	}
}
