package dispatch

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "headgate/proxy/dispatch/dispatchpb"
	"headgate/proxy/queue"
)

// The bounds of the scheduler's side.
const (
	maxSessions = queue.MaxNodes - 2 // this node and the phantom are two
	maxUnsaid   = 1 << 17            // grants and drops that wait for one stream; a node that takes none is cut off
)

// session is a node's stream at the scheduler.
type session struct {
	node uint64
	wake chan struct{}
	cut  context.CancelFunc

	// Under Dispatcher.mu.
	grants []queue.Grant
	drops  []queue.Drop
	placed []Placement // at other nodes
	show   bool        // it is to hear how things stand
	seen   uint64      // the broadcast that it heard last
	heard  int         // messages: the second has what its node uses, and its tickets
}

// said has what waits sent; d.mu is held.
func (s *session) said() {
	if len(s.grants)+len(s.drops) > maxUnsaid {
		s.cut()
		return
	}
	signal(s.wake)
}

// service answers the other nodes.
type service struct {
	pb.UnimplementedDispatchServer
	d *Dispatcher
}

// Schedule see dispatch.proto.
func (x service) Schedule(stream pb.Dispatch_ScheduleServer) error {
	ctx, cut := context.WithCancel(stream.Context())
	defer cut()
	silent := time.AfterFunc(nodeFor, cut)
	defer silent.Stop()
	s := &session{wake: make(chan struct{}, 1), cut: cut}
	failed := make(chan error, 1)
	began := make(chan struct{})
	go func() { failed <- x.receive(ctx, stream, s, silent, began) }() // ends with the stream, which ends with this call
	select {
	case <-ctx.Done():
		return status.Error(codes.DeadlineExceeded, "no hello")
	case err := <-failed:
		return err
	case <-began:
	}
	for {
		if f := x.d.says(s); f != nil {
			if err := stream.Send(f); err != nil {
				return err
			}
			continue
		}
		select {
		case <-ctx.Done():
			return status.Error(codes.Aborted, "another stream of this node, too slow, silent, or the queue is kept elsewhere")
		case err := <-failed:
			return err
		case <-s.wake:
		}
	}
}

// receive takes what a node says. It returns nil when that has closed its side.
func (x service) receive(ctx context.Context, stream pb.Dispatch_ScheduleServer, s *session, silent *time.Timer, began chan struct{}) error {
	f, err := stream.Recv()
	if err != nil {
		return err
	}
	h, err := helloOf(f.GetHello())
	if err != nil {
		x.d.met.malformed.Inc()
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if x.d.cfg.Peer != nil {
		if err := x.d.cfg.Peer(stream.Context(), h.node); err != nil {
			x.d.met.malformed.Inc()
			return status.Error(codes.PermissionDenied, err.Error())
		}
	}
	s.node = h.node
	if err := x.d.admit(s, h); err != nil {
		return err
	}
	// At once when it is cut, also by Schedule's end: that may be stuck with a node that takes nothing.
	context.AfterFunc(ctx, func() { x.d.dismiss(s) })
	close(began)
	for {
		silent.Reset(nodeFor)
		u, err := upOf(f)
		if err != nil {
			x.d.met.malformed.Inc()
			return status.Error(codes.InvalidArgument, err.Error())
		}
		if !x.d.hear(s, u) {
			return status.Error(codes.Aborted, "another stream of this node, or the queue is kept elsewhere")
		}
		if f, err = stream.Recv(); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if f.GetHello() != nil {
			x.d.met.malformed.Inc()
			return status.Error(codes.InvalidArgument, "dispatch: a second hello")
		}
	}
}

// admit makes a stream that of its node. An earlier one ends, and what it said is forgotten.
func (d *Dispatcher) admit(s *session, h *hello) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	seat := d.seat
	switch {
	case d.closed || seat == nil || !seat.official:
		return status.Error(codes.FailedPrecondition, "the queue is kept elsewhere, or not here yet")
	case h.node == d.cfg.Self || h.node == phantom:
		d.met.malformed.Inc()
		return status.Error(codes.InvalidArgument, "the hello names no other node")
	}
	now := d.cfg.Now()
	if was := seat.sessions[h.node]; was != nil {
		was.cut()
		seat.core.Gone(now, h.node, &seat.out)
	} else if len(seat.sessions) >= maxSessions {
		return status.Error(codes.ResourceExhausted, "too many nodes")
	}
	seat.sessions[h.node] = s
	s.show = true
	if seat.settling != 0 && d.cfg.Learner != nil {
		for _, l := range h.limits {
			d.cfg.Learner.Seed(l.backend, l.limit)
		}
	}
	return nil
}

// dismiss forgets a node whose stream ended.
func (d *Dispatcher) dismiss(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	seat := d.seat
	if seat == nil || seat.sessions[s.node] != s {
		return
	}
	delete(seat.sessions, s.node)
	now := d.cfg.Now()
	seat.core.Gone(now, s.node, &seat.out)
	seat.touched = true
	d.after(now)
}

// hear takes what a node said. False: its session is over.
func (d *Dispatcher) hear(s *session, u *up) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	seat := d.seat
	if seat == nil || seat.sessions[s.node] != s {
		return false
	}
	now := d.cfg.Now()
	seat.hear(now, s.node, &u.told)
	for _, id := range u.misses {
		seat.core.Miss(now, s.node, id, &seat.out)
	}
	for _, id := range u.leaves {
		seat.core.Leave(now, s.node, id, &seat.out)
	}
	for i := range u.joins {
		u.joins[i].Node = s.node
		seat.join(now, &u.joins[i])
	}
	s.heard++
	seat.settled(now)
	d.after(now)
	return true
}

// says is what a node is to be told; nil: nothing.
func (d *Dispatcher) says(s *session) *pb.Down {
	d.mu.Lock()
	defer d.mu.Unlock()
	seat := d.seat
	if seat == nil || seat.sessions[s.node] != s || !s.show && len(s.grants) == 0 && len(s.drops) == 0 && len(s.placed) == 0 {
		return nil
	}
	f := &pb.Down{}
	n := min(len(s.grants), frameItems)
	f.Grants = grantsPB(s.grants[:n])
	if s.grants = s.grants[n:]; len(s.grants) == 0 {
		s.grants = nil
	}
	n = min(len(s.drops), frameItems)
	f.Drops = dropsPB(s.drops[:n])
	if s.drops = s.drops[n:]; len(s.drops) == 0 {
		s.drops = nil
	}
	f.Placed = placedPB(s.placed)
	s.placed = s.placed[:0]
	if s.show {
		changed, gone := seat.changes(s.seen)
		f.State = statePB(s.seen == 0, changed, gone)
		s.show, s.seen = false, max(1, seat.turn)
	}
	return f
}
