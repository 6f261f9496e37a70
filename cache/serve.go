package cache

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "headgate/cache/cachepb"
)

// server answers other nodes.
type server struct {
	pb.UnimplementedExactServer
	e *Exact
}

// Register serves other nodes.
func (e *Exact) Register(s grpc.ServiceRegistrar) { pb.RegisterExactServer(s, &server{e: e}) }

// Join is part of Exact in cache.proto.
func (s *server) Join(stream grpc.BidiStreamingServer[pb.Up, pb.Down]) error {
	return s.e.serve(stream.Context(), &wireAnswerer{stream: stream, decoder: upDecoder{joiner: joiner{max: s.e.cfg.MaxEntry}}}, false)
}

// wireAnswerer is a link from another node.
type wireAnswerer struct {
	stream  grpc.BidiStreamingServer[pb.Up, pb.Down]
	decoder upDecoder
}

func (w *wireAnswerer) send(batch []*down) error {
	for _, m := range encodeDowns(batch) {
		if err := w.stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (w *wireAnswerer) recv() (*up, error) {
	for {
		m, err := w.stream.Recv()
		if err != nil {
			return nil, err
		}
		u, err := w.decoder.next(m)
		if err != nil {
			return nil, errors.Join(errMalformed, err)
		}
		if u != nil {
			return u, nil
		}
	}
}

// serving is a session while its link lasts.
type serving struct {
	e     *Exact
	a     answerer
	s     *session
	asked bool
	last  atomic.Int64 // when something was heard
	ended chan struct{}
	once  sync.Once
	err   error // set before ended is closed
}

// serve answers one branch of another node, or of this one (self), until it has heard all, or is lost.
func (e *Exact) serve(ctx context.Context, a answerer, self bool) error {
	if e.ctx.Err() != nil {
		return errClosed()
	}
	v := &serving{e: e, a: a, s: newSession(self), ended: make(chan struct{})}
	quiet := func() {}
	if !self {
		var t atomic.Pointer[time.Timer]
		t.Store(time.AfterFunc(lockTTL, func() {
			if v.patient() {
				t.Load().Reset(beatEvery)
				return
			}
			v.end(status.Error(codes.DeadlineExceeded, "nothing was heard of the node"))
		}))
		defer func() { t.Load().Stop() }()
		quiet = func() {
			v.last.Store(e.cfg.Now())
			t.Load().Reset(lockTTL)
		}
	}
	listens := make(chan struct{})
	go func() {
		defer close(listens)
		v.listen(quiet)
	}()
	err := v.speak(ctx)
	v.end(err)
	if self {
		<-listens // of another node's it ends when this returns
	}
	return v.err
}

// patient says of a node that nothing is heard of that it has more time: it follows a stream, and leads nothing.
func (v *serving) patient() bool {
	v.e.mu.Lock()
	defer v.e.mu.Unlock()
	s := v.s
	return !s.left && s.follows != nil && v.e.cfg.Now()-v.last.Load() < int64(followTTL) &&
		!slices.ContainsFunc(s.flight.leads, func(l *lead) bool { return l.by == s })
}

func errClosed() error { return status.Error(codes.Unavailable, "this node's cache is closed") }

// end takes the session out of its flight: what it leads goes to the next.
func (v *serving) end(err error) {
	v.once.Do(func() {
		v.e.mu.Lock()
		v.e.referee.leave(v.s, v.e.cfg.Now())
		v.s.left = true
		ask := v.s.ask
		v.e.mu.Unlock()
		if ask.early {
			v.e.cfg.Store.Release(ask.key, refreshPause) // what was stored again is not held back
		}
		v.err = err
		close(v.ended)
	})
}

// listen takes what the node says.
func (v *serving) listen(heard func()) {
	for {
		u, err := v.a.recv()
		if err == nil {
			heard()
			err = v.hear(u)
		}
		switch {
		case err == nil:
			continue
		case errors.Is(err, io.EOF):
			err = nil
		case errors.Is(err, errMalformed):
			v.e.met.malformed.Inc()
			err = status.Error(codes.InvalidArgument, err.Error())
		}
		v.end(err)
		return
	}
}

// speak says what the session has to hear. It begins at once, so that the node knows that somebody is there.
func (v *serving) speak(ctx context.Context) error {
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	out := []*down{{kind: downBeat}}
	for {
		if len(out) > 0 {
			if err := v.a.send(out); err != nil {
				return err
			}
		}
		tick := false
		select {
		case <-v.ended:
			return v.err
		case <-ctx.Done():
			return ctx.Err()
		case <-v.e.ctx.Done():
			return errClosed()
		case <-v.s.poke:
		case <-beat.C:
			tick = true
		}
		v.e.mu.Lock()
		if tick && v.s.flight != nil {
			v.e.referee.slow(v.s.flight, v.e.cfg.Now())
		}
		out, v.s.out = v.s.out, nil
		v.e.mu.Unlock()
		v.addStale(out)
		if tick && !v.s.self && len(out) == 0 {
			out = []*down{{kind: downBeat}}
		}
	}
}

// addStale adds what the node may serve where the model fails, unless it has the same store.
func (v *serving) addStale(out []*down) {
	if v.s.self {
		return
	}
	for i, d := range out {
		if d.kind != downLead && d.kind != downFailed && d.kind != downPass {
			continue
		}
		if h, ok := v.e.cfg.Store.Stale(v.s.ask.key, v.e.cfg.Now()); ok {
			with := *d // others may get d, too
			with.hit = h
			out[i] = &with
		}
	}
}

// hear takes one message.
func (v *serving) hear(u *up) error {
	switch {
	case u.kind == upBeat:
		return nil
	case (u.kind == upAsk) == v.asked:
		return errors.Join(errMalformed, errors.New("an ask comes first, and once"))
	case u.kind == upAsk:
		v.asked = true
		v.join(u)
		return nil
	case u.about != nil && u.about.Key != v.s.ask.key:
		return errors.Join(errMalformed, errors.New("a stream about another key"))
	case u.entry != nil:
		return v.whole(u)
	}
	e := v.e
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.cfg.Now()
	if u.kind == upWants {
		e.referee.wants(v.s, u.waits, u.live, now)
		return nil
	}
	l := v.s.of(u.token)
	if l == nil {
		return nil // it is over, or was never given
	}
	switch u.kind {
	case upBegin:
		e.referee.begin(l, u.contentType, u.about, now)
	case upData:
		e.referee.data(l, u.data, now)
	case upUnshareable:
		e.referee.unshareable(l, !u.cut, now)
	case upFailed:
		e.referee.failed(l, true, true, u.failure, handFailed, now)
	case upAbandon:
		e.referee.abandoned(l, u, now)
	case upBroken:
		e.referee.failed(l, true, false, Failure{Status: statusBroken}, handBroken, now)
	}
	return nil
}

// join answers from the store, or has the session join its flight.
func (v *serving) join(u *up) {
	e := v.e
	h, ok := e.lookThenLock(func() (Hit, bool) {
		if u.ask.early {
			return e.stored(u.ask, e.cfg.Store.Stale)
		}
		return e.stored(u.ask, e.cfg.Store.Get)
	}, func() bool {
		_, there := e.stored(u.ask, e.cfg.Store.Peek)
		return there
	})
	if ok {
		e.mu.Lock()
	}
	defer e.mu.Unlock()
	if v.s.left {
		return
	}
	v.s.want(*u.ask)
	if ok {
		v.s.say(&down{kind: downHit, hit: h, stored: true, keep: true})
		return
	}
	e.referee.join(v.s, u.waits, u.live, e.cfg.Now())
}

// stored finds, by look, what the store has that will do for an ask.
func (e *Exact) stored(a *asked, look func(Key, int64) (Hit, bool)) (Hit, bool) {
	if a.refresh || len(a.leads) > 0 {
		return Hit{}, false
	}
	h, ok := look(a.key, e.cfg.Now())
	return h, ok && (!a.early || !h.Stale && h.Age < a.age)
}

// whole takes a whole answer.
func (v *serving) whole(u *up) error {
	e := v.e
	if u.entry.Key != v.s.ask.key {
		return errors.Join(errMalformed, errors.New("the entry of another key"))
	}
	e.mu.Lock()
	l := v.s.of(u.token)
	e.mu.Unlock()
	if l == nil {
		return nil
	}
	valid := e.cfg.Valid(u.entry)
	if valid && u.kind == upStore && !v.s.self { // before the flight ends, so that nobody finds neither
		e.cfg.Store.Put(u.entry)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch l = v.s.of(u.token); {
	case l == nil:
	case valid:
		e.referee.done(l, u.entry, u.kind == upStore, e.cfg.Now())
	default:
		e.referee.failed(l, false, true, Failure{}, handInvalid, e.cfg.Now())
	}
	return nil
}

// Get is part of Exact in cache.proto.
func (s *server) Get(in *pb.GetRequest, stream grpc.ServerStreamingServer[pb.Piece]) error {
	if len(in.GetKeys()) > maxMany {
		return status.Errorf(codes.InvalidArgument, "%d keys, of at most %d", len(in.GetKeys()), maxMany)
	}
	for i, b := range in.GetKeys() {
		k, err := decodeKey(b)
		if err != nil {
			s.e.met.malformed.Inc()
			return status.Error(codes.InvalidArgument, err.Error())
		}
		h, ok := s.e.cfg.Store.Read(k, s.e.cfg.Now())
		if !ok {
			continue
		}
		for _, p := range encodePieces(&h, i) {
			if err := stream.Send(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// Put is part of Exact in cache.proto.
func (s *server) Put(stream grpc.ClientStreamingServer[pb.Piece, pb.PutResponse]) error {
	decoder := pieceDecoder{joiner: joiner{max: s.e.cfg.MaxEntry}}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&pb.PutResponse{})
		}
		if err != nil {
			return err
		}
		h, _, err := decoder.next(m)
		if err != nil {
			s.e.met.malformed.Inc()
			return status.Error(codes.InvalidArgument, err.Error())
		}
		if h.Entry != nil && s.e.cfg.Valid(h.Entry) {
			s.e.cfg.Store.Put(h.Entry)
		}
	}
}
