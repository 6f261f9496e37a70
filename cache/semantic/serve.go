package semantic

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "headgate/cache/semantic/semanticpb"
	"headgate/cache/threshold"
)

// maxMoves is how many nodes may bring entries at a time.
const maxMoves = 4

// server answers other nodes.
type server struct {
	pb.UnimplementedSemanticServer
	c *Cache
}

// Register serves other nodes.
func (c *Cache) Register(s grpc.ServiceRegistrar) { pb.RegisterSemanticServer(s, &server{c: c}) }

// refuse is the status for what no node would send.
func (s *server) refuse(err error) error {
	s.c.met.malformed.Inc()
	return status.Error(codes.InvalidArgument, err.Error())
}

// Find is part of Semantic in semantic.proto.
func (s *server) Find(_ context.Context, m *pb.FindRequest) (*pb.FindResponse, error) {
	q, err := decodeQuestion(m)
	if err != nil {
		return nil, s.refuse(err)
	}
	a := s.c.here(q)
	return encodeAnswer(&a), nil
}

// Learn is part of Semantic in semantic.proto.
func (s *server) Learn(_ context.Context, m *pb.LearnRequest) (*pb.LearnResponse, error) {
	now := s.c.cfg.Now()
	l, err := decodeLesson(m, now)
	if err != nil {
		return nil, s.refuse(err)
	}
	s.c.shard.learn(now, l)
	if s.c.owner(l.place.key) != "" { // the views of two nodes differ: what was kept goes on
		s.c.Moved()
	}
	return &pb.LearnResponse{}, nil
}

// Move is part of Semantic in semantic.proto.
func (s *server) Move(stream grpc.ClientStreamingServer[pb.MoveRequest, pb.MoveResponse]) error {
	select {
	case s.c.moves <- struct{}{}:
		defer func() { <-s.c.moves }()
	default:
		return status.Errorf(codes.ResourceExhausted, "%d nodes bring entries already", maxMoves)
	}
	var p *place
	var pol threshold.Policy
	for n := 0; ; n++ {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&pb.MoveResponse{})
		}
		if err != nil {
			return err
		}
		if n > moveEntries {
			return s.refuse(errors.New("too many entries at once"))
		}
		if m.GetPlace() != nil {
			to, err := decodePlace(m.GetPlace())
			if err != nil {
				return s.refuse(err)
			}
			if s.c.owner(to.key) != "" { // else two nodes that disagree send it to and fro
				return status.Error(codes.FailedPrecondition, "the partition is not this node's")
			}
			p = &to
			if pol, err = decodePolicy(m.GetPolicy()); err != nil {
				return s.refuse(err)
			}
		}
		if m.GetEntry() == nil {
			continue
		}
		if p == nil {
			return s.refuse(errors.New("an entry without a place"))
		}
		f, err := decodeMoved(m.GetEntry(), p)
		if err != nil {
			return s.refuse(err)
		}
		if s.c.shard.insert(s.c.cfg.Now(), p, &pol, f, true) == notRoom {
			return status.Error(codes.ResourceExhausted, "there is no room")
		}
	}
}

// Tell is part of Semantic in semantic.proto.
func (s *server) Tell(_ context.Context, m *pb.TellRequest) (*pb.TellResponse, error) {
	if m.GetNode() == 0 || m.GetNode() == s.c.node || len(m.GetSketches()) > maxTold {
		return nil, s.refuse(errors.New("sketches of nobody, or too many"))
	}
	now := s.c.cfg.Now()
	for _, k := range m.GetSketches() {
		p := place{tenant: string(k.GetTenant()), surface: string(k.GetSurface()), embedder: string(k.GetEmbedder())}
		if err := p.check(); err != nil {
			return nil, s.refuse(err)
		}
		pol, err := decodePolicy(k.GetPolicy())
		if err != nil {
			return nil, s.refuse(err)
		}
		if err := s.c.shard.hear(now, m.GetNode(), p.scope(), &pol, k.GetPool(), k.GetBudget()); err != nil {
			return nil, s.refuse(err)
		}
	}
	return &pb.TellResponse{}, nil
}

// Wrong is part of Semantic in semantic.proto.
func (s *server) Wrong(_ context.Context, m *pb.WrongRequest) (*pb.WrongResponse, error) {
	id := m.GetId()
	switch {
	case id == 0:
		return nil, s.refuse(errors.New("a report of no entry"))
	case m.GetCount():
		return &pb.WrongResponse{Counted: s.c.shard.countWrong(s.c.cfg.Now(), id)}, nil
	case m.GetCounted():
		s.c.shard.countedWrong(id)
		return &pb.WrongResponse{Counted: true}, nil
	}
	r, found := s.c.wrong(id)
	return &pb.WrongResponse{Found: found, Counted: r.counted, Held: r.held, Had: r.had, Node: s.c.node, Tenant: []byte(r.scope.tenant), Surface: []byte(r.scope.surface)}, nil
}
