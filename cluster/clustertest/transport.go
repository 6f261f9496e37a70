package clustertest

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/hashicorp/raft"
)

// Gossip is a memberlist transport of a host: packets and streams on one port.
type Gossip struct {
	host    *Host
	port    int
	packets chan *memberlist.Packet
	streams chan net.Conn
	once    sync.Once
}

var _ memberlist.NodeAwareTransport = (*Gossip)(nil)

// Gossip takes a port of the host for a memberlist. Whoever gets it must shut it down, as
// memberlist does.
func (h *Host) Gossip(port int) (*Gossip, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gossips[port] != nil || h.listeners[port] != nil {
		return nil, &net.OpError{Op: "listen", Net: "udp", Addr: h.addr(port), Err: os.NewSyscallError("bind", syscall.EADDRINUSE)}
	}
	g := &Gossip{host: h, port: port, packets: make(chan *memberlist.Packet, maxPackets), streams: make(chan net.Conn, maxBacklog)}
	h.gossips[port] = g
	return g, nil
}

// FinalAdvertiseAddr is the host's, whatever was configured.
func (g *Gossip) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return g.host.ip, g.port, nil
}

// WriteTo sends a packet, which may get lost without a word.
func (g *Gossip) WriteTo(b []byte, address string) (time.Time, error) {
	now := time.Now()
	to, port, err := g.host.net.at(address)
	if err != nil {
		return now, &net.OpError{Op: "write", Net: "udp", Err: err}
	}
	if !g.open() {
		return now, &net.OpError{Op: "write", Net: "udp", Err: net.ErrClosed}
	}
	lost, delay := g.host.net.lost(link{g.host.name, to.name})
	if lost {
		return now, nil
	}
	p := &memberlist.Packet{Buf: append([]byte(nil), b...), From: &net.UDPAddr{IP: g.host.ip, Port: g.port}}
	if delay == 0 {
		to.receive(port, p)
		return now, nil
	}
	time.AfterFunc(delay, func() { to.receive(port, p) })
	return now, nil
}

func (g *Gossip) open() bool {
	g.host.mu.Lock()
	defer g.host.mu.Unlock()
	return g.host.gossips[g.port] == g
}

func (h *Host) receive(port int, p *memberlist.Packet) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.gossips[port]
	if g == nil {
		return
	}
	p.Timestamp = time.Now()
	select {
	case g.packets <- p:
	default: // a full socket buffer
	}
}

// WriteToAddress is WriteTo; the name is not looked at.
func (g *Gossip) WriteToAddress(b []byte, to memberlist.Address) (time.Time, error) {
	return g.WriteTo(b, to.Addr)
}

// PacketCh gives the packets received.
func (g *Gossip) PacketCh() <-chan *memberlist.Packet { return g.packets }

// DialTimeout opens a stream.
func (g *Gossip) DialTimeout(address string, timeout time.Duration) (net.Conn, error) {
	return g.host.DialTimeout(address, timeout)
}

// DialAddressTimeout is DialTimeout; the name is not looked at.
func (g *Gossip) DialAddressTimeout(to memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return g.host.DialTimeout(to.Addr, timeout)
}

// StreamCh gives the streams that others opened.
func (g *Gossip) StreamCh() <-chan net.Conn { return g.streams }

// Shutdown gives the port back.
func (g *Gossip) Shutdown() error {
	g.once.Do(func() {
		g.host.mu.Lock()
		delete(g.host.gossips, g.port)
		g.host.mu.Unlock()
		for {
			select {
			case c := <-g.streams:
				_ = c.Close()
			default:
				return
			}
		}
	})
	return nil
}

// Close is Shutdown.
func (g *Gossip) Close() error { return g.Shutdown() }

// Stream is a raft.StreamLayer of a host, without TLS or preamble: give it to
// raft.NewNetworkTransportWithConfig.
type Stream struct {
	net.Listener
	host *Host
}

var _ raft.StreamLayer = (*Stream)(nil)

// RaftStream takes a port of the host for raft.
func (h *Host) RaftStream(port int) (*Stream, error) {
	l, err := h.Listen(port)
	if err != nil {
		return nil, fmt.Errorf("raft stream: %w", err)
	}
	return &Stream{Listener: l, host: h}, nil
}

// Dial opens a stream to another host's raft.
func (s *Stream) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return s.host.Dial(ctx, string(address))
}
