package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

const (
	preambleMagic    = "HGRF"
	handshakeTimeout = 2 * time.Second
	maxHandshakes    = 64 // incoming connections that have not said who they are yet

	preambleOK       = 0
	preambleMagicBad = 1
	preambleProtocol = 2
	preambleCluster  = 3
)

var errNotRaft = errors.New("what connected is no Headgate node")

// RaftStreamConfig is what a RaftStream needs; all but the two TLS configurations and
// Advertise must be given.
type RaftStreamConfig struct {
	Listener  net.Listener // without TLS; the RaftStream closes it
	Advertise net.Addr     // what raft calls this end; nil: the listener's
	Dial      func(ctx context.Context, address string) (net.Conn, error)

	ServerTLS, ClientTLS *tls.Config // both or none; none is plaintext

	ClusterName string
	Protocol    uint32
	Logger      *slog.Logger
}

// RaftStream is raft's way to other nodes (a raft.StreamLayer): mutual TLS, and on each
// connection a preamble by which both ends know at once, and can say, that they belong to
// different clusters or speak different protocols. Peers that are slow or silent hold up
// nobody else. It is safe for concurrent use.
type RaftStream struct {
	cfg   RaftStreamConfig
	ready chan net.Conn
	slots chan struct{}

	ctx    context.Context
	cancel context.CancelFunc
	done   sync.WaitGroup
	said   *sayings
}

var _ raft.StreamLayer = (*RaftStream)(nil)

// NewRaftStream starts to accept. The caller, or the raft transport it is given to, must
// Close it.
func NewRaftStream(cfg RaftStreamConfig) (*RaftStream, error) {
	switch {
	case (cfg.ServerTLS == nil) != (cfg.ClientTLS == nil):
		return nil, errors.New("raft connections: TLS must be configured for both directions or for none")
	case cfg.Listener == nil || cfg.Dial == nil || cfg.Logger == nil:
		return nil, errors.New("raft connections: a listener, a dialer and a logger must be given")
	case cfg.ClusterName == "" || len(cfg.ClusterName) > maxClusterLen:
		return nil, fmt.Errorf("raft connections: the cluster's name must have 1 to %d characters", maxClusterLen)
	}
	s := &RaftStream{cfg: cfg, ready: make(chan net.Conn), slots: make(chan struct{}, maxHandshakes), said: newSayings()}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.done.Go(s.acceptAll)
	return s, nil
}

// Addr is the address that this end advertises.
func (s *RaftStream) Addr() net.Addr {
	if s.cfg.Advertise != nil {
		return s.cfg.Advertise
	}
	return s.cfg.Listener.Addr()
}

// Accept gives the next connection whose preamble was good.
func (s *RaftStream) Accept() (net.Conn, error) {
	select {
	case conn := <-s.ready:
		return conn, nil
	case <-s.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close stops accepting, breaks off handshakes and waits for them. Connections that were
// accepted stay open.
func (s *RaftStream) Close() error {
	s.cancel()
	err := s.cfg.Listener.Close()
	s.done.Wait()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("close the raft listener: %w", err)
	}
	return nil
}

func (s *RaftStream) acceptAll() {
	const pause = 50 * time.Millisecond // after an error that may pass, too many open files for one
	for s.ctx.Err() == nil {
		conn, err := s.cfg.Listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			select {
			case <-s.ctx.Done():
			case <-time.After(pause):
			}
			continue
		}
		select {
		case s.slots <- struct{}{}:
		default:
			_ = conn.Close()
			s.said.once("full", func() {
				s.cfg.Logger.Warn("raft connections were refused: too many are in their handshake", "limit", maxHandshakes)
			})
			continue
		}
		s.done.Go(func() { s.receive(conn) })
	}
}

// receive does one handshake and hands the connection over.
func (s *RaftStream) receive(conn net.Conn) {
	from := conn.RemoteAddr()
	held, err := s.greeted(conn)
	<-s.slots
	if err != nil {
		_ = conn.Close()
		if s.ctx.Err() == nil {
			s.said.once("refused "+addressHost(from), func() {
				s.cfg.Logger.Warn("a raft connection was refused", "from", from.String(), "error", err.Error(),
					"remedy", "check that both nodes run the same version and belong to one cluster, with certificates of its CA")
			})
		}
		return
	}
	select {
	case s.ready <- held:
	case <-s.ctx.Done():
		_ = held.Close()
	}
}

// greeted is the accepting side's handshake.
func (s *RaftStream) greeted(conn net.Conn) (net.Conn, error) {
	stop := context.AfterFunc(s.ctx, func() { _ = conn.Close() })
	defer stop()
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	if s.cfg.ServerTLS != nil {
		secured := tls.Server(conn, s.cfg.ServerTLS)
		if err := secured.HandshakeContext(s.ctx); err != nil {
			return nil, fmt.Errorf("TLS: %w", err)
		}
		conn = secured
	}
	theirs, err := readPreamble(conn)
	answer := preamble{Protocol: s.cfg.Protocol, Cluster: s.cfg.ClusterName}
	verdict := answer.judge(theirs, err)
	if _, werr := conn.Write(append([]byte{verdict}, answer.encode()...)); werr != nil && err == nil {
		err = werr
	}
	if err != nil {
		return nil, err
	}
	if verdict != preambleOK {
		return nil, answer.explain(verdict, theirs)
	}
	return conn, conn.SetDeadline(time.Time{})
}

// Dial opens a connection to another node and waits until it was accepted. The error says
// why it was not: an address that nobody listens at, a certificate, another cluster.
func (s *RaftStream) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	if timeout <= 0 {
		timeout = handshakeTimeout
	}
	ctx, cancel := context.WithTimeout(s.ctx, timeout)
	defer cancel()
	conn, err := s.cfg.Dial(ctx, string(address))
	if err != nil {
		return nil, fmt.Errorf("raft connection to %s: %w", address, err)
	}
	held, err := s.greet(ctx, conn)
	if err == nil {
		return held, nil
	}
	_ = conn.Close()
	err = fmt.Errorf("raft connection to %s: %w", address, err)
	if s.ctx.Err() == nil {
		s.said.once("dial "+string(address), func() {
			s.cfg.Logger.Warn("a node refused the raft connection", "address", string(address), "error", err.Error(),
				"remedy", "check that both nodes run the same version and belong to one cluster, with certificates of its CA")
		})
	}
	return nil, err
}

// greet is the dialing side's handshake.
func (s *RaftStream) greet(ctx context.Context, conn net.Conn) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if s.cfg.ClientTLS != nil {
		secured := tls.Client(conn, s.cfg.ClientTLS)
		if err := secured.HandshakeContext(ctx); err != nil {
			return nil, fmt.Errorf("TLS: %w", err)
		}
		conn = secured
	}
	mine := preamble{Protocol: s.cfg.Protocol, Cluster: s.cfg.ClusterName}
	if _, err := conn.Write(mine.encode()); err != nil {
		return nil, err
	}
	var verdict [1]byte
	if _, err := io.ReadFull(conn, verdict[:]); err != nil {
		return nil, fmt.Errorf("no answer to the preamble: %w", err)
	}
	theirs, err := readPreamble(conn)
	if err != nil {
		return nil, err
	}
	if verdict[0] != preambleOK {
		return nil, mine.explain(verdict[0], theirs)
	}
	if v := mine.judge(theirs, nil); v != preambleOK {
		return nil, mine.explain(v, theirs)
	}
	if !stop() {
		return nil, ctx.Err() // the connection is being closed
	}
	return conn, nil
}

// preamble is the first thing on a raft connection, and again in the answer: magic,
// protocol, and the cluster's name after its length.
type preamble struct {
	Protocol uint32
	Cluster  string
}

func (p preamble) encode() []byte {
	b := binary.BigEndian.AppendUint32([]byte(preambleMagic), p.Protocol)
	return appendShort(b, p.Cluster)
}

// readPreamble reads untrusted bytes, none beyond the preamble.
func readPreamble(r io.Reader) (preamble, error) {
	var head [len(preambleMagic) + 5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return preamble{}, fmt.Errorf("read the preamble: %w", err)
	}
	n := int(head[len(head)-1])
	if !bytes.Equal(head[:len(preambleMagic)], []byte(preambleMagic)) || n == 0 || n > maxClusterLen {
		return preamble{}, errNotRaft
	}
	name := make([]byte, n)
	if _, err := io.ReadFull(r, name); err != nil {
		return preamble{}, fmt.Errorf("read the preamble: %w", err)
	}
	return preamble{binary.BigEndian.Uint32(head[len(preambleMagic):]), string(name)}, nil
}

func (p preamble) judge(theirs preamble, err error) byte {
	switch {
	case err != nil:
		return preambleMagicBad
	case theirs.Protocol != p.Protocol:
		return preambleProtocol
	case theirs.Cluster != p.Cluster:
		return preambleCluster
	}
	return preambleOK
}

func (p preamble) explain(verdict byte, theirs preamble) error {
	switch verdict {
	case preambleProtocol:
		return fmt.Errorf("it speaks protocol %d, this node %d", theirs.Protocol, p.Protocol)
	case preambleCluster:
		return fmt.Errorf("it is of cluster %q, this node of %q", theirs.Cluster, p.Cluster)
	}
	return errNotRaft
}

// RaftAddresses finds raft servers by their id, whose addresses change when a node moves:
// it is raft's ServerAddressProvider.
type RaftAddresses func(id string) (address string, ok bool)

var _ raft.ServerAddressProvider = RaftAddresses(nil)

// ServerAddr is an error for an id that is not known; raft then takes the address it was
// configured with.
func (f RaftAddresses) ServerAddr(id raft.ServerID) (raft.ServerAddress, error) {
	address, ok := f(string(id))
	if !ok {
		return "", fmt.Errorf("raft server %s is not in the gossip", id)
	}
	return raft.ServerAddress(address), nil
}

// sayings limits log lines to one per key and minute. It is safe for concurrent use.
type sayings struct {
	mu   sync.Mutex
	last map[string]time.Time
}

func newSayings() *sayings { return &sayings{last: map[string]time.Time{}} }

// once runs line unless it did for the same key within the last minute.
func (s *sayings) once(key string, line func()) {
	if s.due(key) {
		line()
	}
}

func (s *sayings) due(key string) bool {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if last, known := s.last[key]; known && now.Sub(last) < sayEvery {
		return false
	}
	if len(s.last) >= maxSaid {
		clear(s.last)
	}
	s.last[key] = now
	return true
}

func addressHost(a net.Addr) string {
	host, _, err := net.SplitHostPort(a.String())
	if err != nil {
		return a.String()
	}
	return host
}
