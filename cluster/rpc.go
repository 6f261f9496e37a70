package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"headgate/cluster/clusterpb"
	"headgate/cluster/ledger"
)

// Bounds of what nodes say to each other.
const (
	maxMessage   = 64 << 20 // bytes; a large policy with its keys
	maxStreams   = 4096     // calls at once over one connection
	restoreChunk = 1 << 20
	maxStrikes   = 2 // deadlines missed in a row before a connection is made anew
)

// Every call names the cluster and the protocol that its sender speaks.
const (
	clusterHeader  = "headgate-cluster"
	protocolHeader = "headgate-protocol"
)

// Protocol is the version of gossip, gRPC and raft preamble. Nodes of different protocols
// refuse each other; one minor release never changes it.
const Protocol = 1

// peers holds one connection to each address, made when first used. A connection whose
// calls miss their deadlines is made anew: after a partition a TCP connection may take
// minutes to notice that it has healed.
type peers struct {
	cluster string
	creds   credentials.TransportCredentials
	dial    func(ctx context.Context, address string) (net.Conn, error)

	mu    sync.Mutex
	conns map[string]*peerConn
}

type peerConn struct {
	*grpc.ClientConn
	strikes int
}

func newPeers(cluster string, creds credentials.TransportCredentials, dial func(context.Context, string) (net.Conn, error)) *peers {
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	return &peers{cluster: cluster, creds: creds, dial: dial, conns: map[string]*peerConn{}}
}

// client speaks to the gRPC address of a node.
func (p *peers) client(address string) (clusterpb.ClusterClient, error) {
	c, err := p.conn(address)
	if err != nil {
		return nil, err
	}
	return clusterpb.NewClusterClient(c), nil
}

// drop closes the connection to an address; the next use makes it anew.
func (p *peers) drop(address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.conns[address]; c != nil {
		delete(p.conns, address)
		_ = c.Close() // what was under way fails with it
	}
}

// conn is the connection to a gRPC address.
func (p *peers) conn(address string) (grpc.ClientConnInterface, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		return nil, net.ErrClosed
	}
	if c, ok := p.conns[address]; ok {
		return c, nil
	}
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(p.creds),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			err := call(p.outgoing(ctx), method, req, reply, cc, opts...)
			p.judge(address, cc, err)
			return err
		}),
		grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, stream grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			return stream(p.outgoing(ctx), desc, cc, method, opts...)
		}),
	}
	if p.dial != nil {
		opts = append(opts, grpc.WithContextDialer(p.dial))
	}
	cc, err := grpc.NewClient("passthrough:///"+address, opts...)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", address, err)
	}
	p.conns[address] = &peerConn{ClientConn: cc}
	return cc, nil
}

func (p *peers) outgoing(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, clusterHeader, p.cluster, protocolHeader, strconv.Itoa(Protocol))
}

// judge counts the deadlines that a connection missed. What an earlier one to the address missed
// says nothing of it.
func (p *peers) judge(address string, of *grpc.ClientConn, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.conns[address]
	if c == nil || c.ClientConn != of {
		return
	}
	if status.Code(err) != codes.DeadlineExceeded {
		c.strikes = 0
		return
	}
	if c.strikes++; c.strikes >= maxStrikes {
		delete(p.conns, address)
		go func() { _ = c.Close() }() // waits for calls in flight, of which this is one
	}
}

// keep closes the connections to all other addresses.
func (p *peers) keep(addresses map[string]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for a, c := range p.conns {
		if !addresses[a] {
			delete(p.conns, a)
			_ = c.Close() // nothing waits for it
		}
	}
}

func (p *peers) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close() // the process or the test ends
	}
	p.conns = nil
}

// tidy closes the connections to nodes that are gone.
func (c *Cluster) tidy(ctx context.Context) {
	t := time.NewTicker(10 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		addresses := map[string]bool{}
		for _, m := range c.gossip.Members() {
			addresses[rpcOf(m.Address)] = true
		}
		c.peers.keep(addresses)
	}
}

// identify asks who answers at a gRPC address.
func (c *Cluster) identify(ctx context.Context, address string) (Identity, error) {
	client, err := c.peers.client(address)
	if err != nil {
		return Identity{}, err
	}
	r, err := client.Identify(ctx, &clusterpb.IdentifyRequest{}, grpc.WaitForReady(true)) // a connection that waits to be retried is no silence
	return Identity{Name: r.GetName(), Incarnation: r.GetIncarnation(), ServerID: r.GetServerId()}, err
}

// newServer is the gRPC server of a node. It refuses calls of other clusters and protocols.
func newServer(cluster string, creds credentials.TransportCredentials, log *slog.Logger) *grpc.Server {
	g := guard{cluster: cluster, log: log, said: newSayings()}
	if creds == nil {
		creds = insecure.NewCredentials()
	} else {
		creds = heardCredentials{creds, g}
	}
	return grpc.NewServer(
		grpc.Creds(creds), grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage), grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(5*time.Second),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			if err := g.check(ctx); err != nil {
				return nil, err
			}
			return handle(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			if err := g.check(s.Context()); err != nil {
				return err
			}
			return handle(srv, s)
		}),
	)
}

// guard refuses strangers, and says so, but not each time.
type guard struct {
	cluster string
	log     *slog.Logger
	said    *sayings
}

func (g *guard) check(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	first := func(name string) string {
		if v := md.Get(name); len(v) > 0 {
			return v[0]
		}
		return ""
	}
	cluster, protocol := first(clusterHeader), first(protocolHeader)
	var reason string
	switch {
	case protocol != strconv.Itoa(Protocol):
		reason = fmt.Sprintf("it speaks protocol %q, this node %d: run releases that are at most one minor version apart", protocol, Protocol)
	case cluster != g.cluster:
		reason = fmt.Sprintf("it belongs to cluster %q, this node to %q: see --cluster-name", cluster, g.cluster)
	default:
		return nil
	}
	from := "unknown"
	if p, ok := peer.FromContext(ctx); ok {
		from = addressHost(p.Addr)
	}
	g.said.once("refused "+from, func() { g.log.Warn("a call from another cluster was refused", "from", from, "reason", reason) })
	return status.Error(codes.FailedPrecondition, "refused: "+reason)
}

// heardCredentials say whose certificate was refused: gRPC keeps that to itself.
type heardCredentials struct {
	credentials.TransportCredentials
	guard guard
}

// ServerHandshake see credentials.TransportCredentials.
func (h heardCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := h.TransportCredentials.ServerHandshake(c)
	if err != nil && !errors.Is(err, io.EOF) {
		from := addressHost(c.RemoteAddr())
		h.guard.said.once("handshake "+from, func() {
			h.guard.log.Warn("a gRPC connection was refused", "from", from, "error", err.Error(),
				"remedy", "check that both nodes belong to one cluster, with certificates of its CA that are valid now")
		})
	}
	return conn, info, err
}

// Clone see credentials.TransportCredentials.
func (h heardCredentials) Clone() credentials.TransportCredentials {
	return heardCredentials{h.TransportCredentials.Clone(), h.guard}
}

// service answers the other nodes.
type service struct {
	clusterpb.UnimplementedClusterServer
	c *Cluster
}

// KeepView see cluster.proto. The lease runs from when the asker sent its request: no time
// crosses the wire.
func (s service) KeepView(ctx context.Context, r *clusterpb.KeepViewRequest) (*clusterpb.KeepViewResponse, error) {
	if s.c.ledger.IsLeader() {
		return s.c.keepAsLeader(ctx, r), nil
	}
	no := &clusterpb.KeepViewResponse{Reason: ReasonNotLeader}
	_, address := s.c.ledger.Leader()
	if r.GetForwarded() || address == "" {
		return no, nil
	}
	leader, err := s.c.peers.client(rpcOfRaft(string(address)))
	if err != nil {
		return no, nil //nolint:nilerr // the asker tries another way
	}
	r.Forwarded = true // and as it came otherwise
	return leader.KeepView(ctx, r)
}

// Propose see cluster.proto.
func (s service) Propose(ctx context.Context, r *clusterpb.ProposeRequest) (*clusterpb.ProposeResponse, error) {
	result, leader, unknown, err := s.c.ledger.ProposeLocal(ctx, r.GetCommand())
	resp := &clusterpb.ProposeResponse{Result: result, NotLeader: leader != "" || errors.Is(err, ledger.ErrNotLeader), Leader: string(leader), Unknown: unknown}
	if err != nil {
		resp.Error = err.Error()
	}
	return resp, nil
}

// Identify see cluster.proto.
func (s service) Identify(context.Context, *clusterpb.IdentifyRequest) (*clusterpb.IdentifyResponse, error) {
	return s.c.identity(), nil
}

// Promise see cluster.proto.
func (s service) Promise(_ context.Context, r *clusterpb.PromiseRequest) (*clusterpb.PromiseResponse, error) {
	ok, reason := s.c.promise(r.GetBootstrapper())
	return &clusterpb.PromiseResponse{Promised: ok, Reason: reason}, nil
}

// LastUsed see cluster.proto.
func (s service) LastUsed(context.Context, *clusterpb.LastUsedRequest) (*clusterpb.LastUsedResponse, error) {
	return &clusterpb.LastUsedResponse{Unix: s.c.cfg.LastUsed()}, nil
}

// Remove see cluster.proto.
func (s service) Remove(ctx context.Context, r *clusterpb.RemoveRequest) (*clusterpb.RemoveResponse, error) {
	err := ledger.ErrNotLeader
	if s.c.ledger.IsLeader() {
		err = s.c.removeHere(ctx, r.GetName())
	}
	resp := &clusterpb.RemoveResponse{}
	switch {
	case err == nil:
		return resp, nil
	case errors.Is(err, ErrNoMember):
		resp.Code = codeNotFound
	case errors.Is(err, ErrAlive):
		resp.Code = codeAlive
	case errors.Is(err, ledger.ErrNotLeader):
		resp.Code = ReasonNotLeader
	}
	resp.Error = err.Error()
	return resp, nil
}

// Restore see cluster.proto.
func (s service) Restore(stream grpc.ClientStreamingServer[clusterpb.RestoreChunk, clusterpb.RestoreResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if !s.c.ledger.IsLeader() {
		return stream.SendAndClose(&clusterpb.RestoreResponse{Code: ReasonNotLeader, Error: ledger.ErrNotLeader.Error()})
	}
	resp := &clusterpb.RestoreResponse{}
	f, err := s.c.ledger.Restore(stream.Context(), &chunkReader{stream: stream, rest: bytes.NewReader(first.GetData())}, first.GetForce())
	switch {
	case errors.Is(err, ledger.ErrNotEmpty):
		resp.Code, resp.Error = codeNotEmpty, err.Error()
	case errors.Is(err, ledger.ErrNotLeader):
		resp.Code, resp.Error = ReasonNotLeader, err.Error()
	case errors.Is(err, ledger.ErrBackup):
		resp.Code, resp.Error = codeBackup, err.Error()
	case err != nil:
		resp.Error = err.Error()
	default:
		resp.StateHash = f.Hash[:]
	}
	return stream.SendAndClose(resp)
}

// chunkReader reads a stream of chunks as one file.
type chunkReader struct {
	stream grpc.ClientStreamingServer[clusterpb.RestoreChunk, clusterpb.RestoreResponse]
	rest   *bytes.Reader
}

func (r *chunkReader) Read(p []byte) (int, error) {
	for r.rest.Len() == 0 {
		chunk, err := r.stream.Recv()
		if err != nil {
			return 0, err // io.EOF at the end
		}
		r.rest = bytes.NewReader(chunk.GetData())
	}
	return r.rest.Read(p)
}

// sendChunks streams a file to the leader.
func sendChunks(stream grpc.ClientStreamingClient[clusterpb.RestoreChunk, clusterpb.RestoreResponse], r io.Reader, force bool) (*clusterpb.RestoreResponse, error) {
	buf := make([]byte, restoreChunk)
	for first := true; ; first = false {
		n, err := io.ReadFull(r, buf)
		if n > 0 || first {
			if serr := stream.Send(&clusterpb.RestoreChunk{Data: buf[:n], Force: force && first}); serr != nil && !errors.Is(serr, io.EOF) {
				return nil, serr // io.EOF: the other side has answered already
			} else if serr != nil {
				break
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read the backup: %w", err)
		}
	}
	return stream.CloseAndRecv()
}

// A node's gossip, gRPC and raft listen on three ports in a row.
func rpcOf(gossip string) string   { return addToPort(gossip, GRPCPortOffset) }
func raftOf(gossip string) string  { return addToPort(gossip, RaftPortOffset) }
func rpcOfRaft(raft string) string { return addToPort(raft, GRPCPortOffset-RaftPortOffset) }
