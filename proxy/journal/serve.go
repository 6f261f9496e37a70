package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "headgate/proxy/journal/journalpb"
)

// Bounds of reading another node's journal.
const (
	maxReads  = 4         // at once, of one node
	pageBytes = 128 << 10 // after which a page goes, well below gRPC's 4 MiB
	beatEvery = 2 * time.Second
	maxWait   = 20 * time.Second // of a client for a page
)

// server serves a Log.
type server struct {
	pb.UnimplementedUsageLogServer
	log   *Log
	reads chan struct{}
}

// Register serves the Log's Read to other nodes, as UsageLog.
func Register(s grpc.ServiceRegistrar, l *Log) {
	pb.RegisterUsageLogServer(s, &server{log: l, reads: make(chan struct{}, maxReads)})
}

// Read is part of UsageLog.
func (s *server) Read(in *pb.Query, stream grpc.ServerStreamingServer[pb.Page]) error {
	select {
	case s.reads <- struct{}{}:
		defer func() { <-s.reads }()
	default:
		return status.Error(codes.ResourceExhausted, "too many exports read this node's journal: try again when one of them has ended")
	}
	q := Query{
		From: atNanos(in.GetFrom()), Until: atNanos(in.GetUntil()), Tenant: string(in.GetTenant()),
		Key: string(in.GetKey()), User: string(in.GetUser()), Model: string(in.GetModel()),
	}
	out := &pages{stream: stream, page: &pb.Page{}, sent: time.Now()}
	if !in.GetGrouped() {
		if err := s.log.read(stream.Context(), q, out.usage, out.beat); err != nil {
			return err
		}
		return out.flush()
	}
	loc, err := s.log.cfg.Zone(in.GetTimeZone())
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "time zone %q: %v", in.GetTimeZone(), err)
	}
	g, err := NewGroups(in.GetBy(), loc)
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if err := s.log.read(stream.Context(), q, g.Add, out.beat); err != nil {
		return err
	}
	for _, r := range g.Rows() {
		if err := out.row(&r); err != nil {
			return err
		}
	}
	return out.flush()
}

// pages fills pages and sends them.
type pages struct {
	stream grpc.ServerStreamingServer[pb.Page]
	page   *pb.Page
	size   int
	sent   time.Time
}

func (p *pages) usage(u *Usage) error {
	m := toProto(u)
	p.page.Usages = append(p.page.Usages, m)
	return p.grown(proto.Size(m))
}

func (p *pages) row(r *Row) error {
	m := &pb.Row{
		Requests: r.Requests, Input: r.Input, CachedInput: r.CachedInput, CacheWrite: r.CacheWrite, CacheWrite_1H: r.CacheWrite1h,
		Output: r.Output, Images: r.Images, AudioSeconds: r.AudioSeconds, Cost: r.Cost, Lost: r.Lost,
	}
	for _, v := range r.Values {
		m.Values = append(m.Values, []byte(v))
	}
	p.page.Rows = append(p.page.Rows, m)
	return p.grown(proto.Size(m))
}

func (p *pages) grown(by int) error {
	if p.size += by; p.size < pageBytes {
		return nil
	}
	return p.flush()
}

// beat sends what there is, be it nothing, so that the client knows that it is read on.
func (p *pages) beat() error {
	if time.Since(p.sent) < beatEvery {
		return nil
	}
	return p.flush()
}

func (p *pages) flush() error {
	err := p.stream.Send(p.page)
	p.page, p.size, p.sent = &pb.Page{}, 0, time.Now()
	return err
}

// ReadFrom is Log.Read of another node; fn must not keep u. It fails where nothing comes for 20
// seconds; fn may take longer.
func ReadFrom(ctx context.Context, conn grpc.ClientConnInterface, q Query, fn func(u *Usage) error) error {
	var u Usage
	return receive(ctx, conn, q.proto(), func(page *pb.Page) error {
		for _, m := range page.GetUsages() {
			fromProto(m, &u)
			if err := fn(&u); err != nil {
				return err
			}
		}
		return nil
	})
}

// GroupFrom adds to g what q picks of another node; the grouping happens there, in g's
// location, which must have a name of the IANA data base. On an error g may have a part of it.
func GroupFrom(ctx context.Context, conn grpc.ClientConnInterface, q Query, g *Groups) error {
	in := q.proto()
	in.Grouped, in.By, in.TimeZone = true, g.by, g.loc.String()
	if in.TimeZone == "Local" {
		return errors.New("journal: the time zone must have a name, such as Europe/Paris: \"Local\" is another on each machine")
	}
	return receive(ctx, conn, in, func(page *pb.Page) error {
		for _, m := range page.GetRows() {
			row := rowFrom(m)
			if err := g.AddRow(&row); err != nil {
				return err
			}
		}
		return nil
	})
}

// receive hands the pages of a query to each.
func receive(ctx context.Context, conn grpc.ClientConnInterface, q *pb.Query, each func(*pb.Page) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(maxWait, func() {
		cancel(fmt.Errorf("nothing came for %v", maxWait))
	})
	defer silent.Stop()
	stream, err := pb.NewUsageLogClient(conn).Read(ctx, q)
	for err == nil {
		silent.Reset(maxWait)
		var page *pb.Page
		page, err = stream.Recv()
		silent.Stop()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			if err := each(page); err != nil {
				return err
			}
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return fmt.Errorf("journal: read another node: %w", err)
}

func (q *Query) proto() *pb.Query {
	return &pb.Query{
		From: nanos(q.From), Until: nanos(q.Until), Tenant: []byte(q.Tenant), Key: []byte(q.Key),
		User: []byte(q.User), Model: []byte(q.Model),
	}
}

func toProto(u *Usage) *pb.Usage {
	m := &pb.Usage{
		Id: u.ID, Incarnation: u.Incarnation, Time: nanos(u.Time), Started: nanos(u.Started),
		RequestId: []byte(u.RequestID), Tenant: []byte(u.Tenant), Key: []byte(u.Key), User: []byte(u.User),
		Surface: []byte(u.Surface), Model: []byte(u.Model), Asked: []byte(u.Asked), Backend: []byte(u.Backend),
		Input: u.Input, CachedInput: u.CachedInput, CacheWrite: u.CacheWrite, CacheWrite_1H: u.CacheWrite1h, Output: u.Output,
		Images: u.Images, AudioSeconds: u.AudioSeconds, Cost: u.Cost, Reserved: u.Reserved, Tier: []byte(u.Tier),
		Latency: int64(u.Latency), Ttft: int64(u.TTFT), Status: int32(u.Status), Outcome: []byte(u.Outcome),
		Stream: u.Stream, Estimated: u.Estimated, Node: []byte(u.Node),
	}
	for i := range u.Parts {
		m.Parts = append(m.Parts, partToProto(&u.Parts[i]))
	}
	return m
}

func partToProto(p *Part) *pb.Part {
	return &pb.Part{Amount: p.Amount, Account: &pb.Account{
		Tenant: []byte(p.Tenant), Budget: []byte(p.Budget), Subject: []byte(p.Subject), Start: p.Start, End: p.End,
	}}
}

// fromProto undoes toProto, into u, whose Parts it reuses.
func fromProto(m *pb.Usage, u *Usage) {
	*u = Usage{
		ID: m.GetId(), Incarnation: m.GetIncarnation(), Time: atNanos(m.GetTime()), Started: atNanos(m.GetStarted()),
		RequestID: string(m.GetRequestId()), Tenant: string(m.GetTenant()), Key: string(m.GetKey()), User: string(m.GetUser()),
		Surface: string(m.GetSurface()), Model: string(m.GetModel()), Asked: string(m.GetAsked()), Backend: string(m.GetBackend()),
		Input: m.GetInput(), CachedInput: m.GetCachedInput(), CacheWrite: m.GetCacheWrite(), CacheWrite1h: m.GetCacheWrite_1H(),
		Output: m.GetOutput(), Images: m.GetImages(), AudioSeconds: m.GetAudioSeconds(), Cost: m.GetCost(), Reserved: m.GetReserved(),
		Tier: string(m.GetTier()), Latency: time.Duration(m.GetLatency()), TTFT: time.Duration(m.GetTtft()),
		Status: int(m.GetStatus()), Outcome: string(m.GetOutcome()), Stream: m.GetStream(), Estimated: m.GetEstimated(),
		Node: string(m.GetNode()), Parts: u.Parts[:0],
	}
	for _, p := range m.GetParts() {
		a := p.GetAccount()
		u.Parts = append(u.Parts, Part{Amount: p.GetAmount(), Account: Account{
			Tenant: string(a.GetTenant()), Budget: string(a.GetBudget()), Subject: string(a.GetSubject()), Start: a.GetStart(), End: a.GetEnd(),
		}})
	}
}

func rowFrom(m *pb.Row) Row {
	r := Row{
		Requests: m.GetRequests(), Input: m.GetInput(), CachedInput: m.GetCachedInput(), CacheWrite: m.GetCacheWrite(),
		CacheWrite1h: m.GetCacheWrite_1H(), Output: m.GetOutput(), Images: m.GetImages(), AudioSeconds: m.GetAudioSeconds(),
		Cost: m.GetCost(), Lost: m.GetLost(),
	}
	for _, v := range m.GetValues() {
		r.Values = append(r.Values, string(v))
	}
	return r
}
