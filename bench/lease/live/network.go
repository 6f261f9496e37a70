package live

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"headgate/bench/load"
)

const (
	segmentBytes = 32 << 10
	// maxSegments bounds what is on its way on one connection in one direction; who writes more waits.
	maxSegments = 4096
)

// network is TCP on loopback on which everything takes a while: what is written at one end can be read at the other after the way.
type network struct {
	way   time.Duration
	bytes atomic.Int64 // written to it by both ends of all connections
	wg    sync.WaitGroup
}

// close waits until all connections have ended. Their owners close them.
func (n *network) close() { n.wg.Wait() }

// dial connects to a listener.
func (n *network) dial(ctx context.Context, address string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	alive, quit := context.WithCancel(context.Background())
	s := &slow{Conn: c, net: n, alive: alive, quit: quit, out: make(chan segment, maxSegments), in: make(chan segment, maxSegments)}
	n.wg.Go(s.send)
	n.wg.Go(s.receive)
	return s, nil
}

// segment is what is on its way. The last one has the error with which the connection ended.
type segment struct {
	due time.Time
	b   []byte
	err error
}

// slow is the dialing end of a connection, which makes the way of both directions. Deadlines are those of the connection below.
type slow struct {
	net.Conn
	net     *network
	alive   context.Context
	quit    context.CancelFunc
	out, in chan segment
	rest    segment // being read
}

// Write implements net.Conn.
func (s *slow) Write(b []byte) (int, error) {
	select {
	case s.out <- segment{due: time.Now().Add(s.net.way), b: append([]byte(nil), b...)}:
		return len(b), nil
	case <-s.alive.Done():
		return 0, net.ErrClosed
	}
}

// Read implements net.Conn. One goroutine reads at a time.
func (s *slow) Read(b []byte) (int, error) {
	if len(s.rest.b) == 0 && s.rest.err == nil {
		select {
		case s.rest = <-s.in:
		case <-s.alive.Done():
			return 0, net.ErrClosed
		}
		if !load.WaitUntil(s.alive, s.rest.due) {
			return 0, net.ErrClosed
		}
	}
	if len(s.rest.b) == 0 {
		return 0, s.rest.err
	}
	n := copy(b, s.rest.b)
	s.rest.b = s.rest.b[n:]
	return n, nil
}

// Close implements net.Conn.
func (s *slow) Close() error {
	s.quit()
	return s.Conn.Close()
}

// send brings what was written to the other end.
func (s *slow) send() {
	for {
		select {
		case <-s.alive.Done():
			return
		case x := <-s.out:
			if !load.WaitUntil(s.alive, x.due) {
				return
			}
			n, err := s.Conn.Write(x.b)
			s.net.bytes.Add(int64(n))
			if err != nil {
				return // so does the read
			}
		}
	}
}

// receive takes what the other end has written.
func (s *slow) receive() {
	for {
		b := make([]byte, segmentBytes)
		n, err := s.Conn.Read(b)
		s.net.bytes.Add(int64(n))
		if n == 0 && err == nil {
			err = io.ErrNoProgress
		}
		x := segment{due: time.Now().Add(s.net.way), b: b[:n], err: err}
		select {
		case s.in <- x:
		case <-s.alive.Done():
			return
		}
		if err != nil {
			return
		}
	}
}
