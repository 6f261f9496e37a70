package dispatch

import (
	"context"
	"errors"
	"time"

	pb "headgate/proxy/dispatch/dispatchpb"
	"headgate/proxy/queue"
)

// The bounds and times of a link.
const (
	helloFor     = time.Second     // the scheduler's first word
	beatEvery    = time.Second / 2 // a node says something so often
	nodeFor      = 4 * beatEvery   // one that does not is gone
	schedulerFor = 3 * time.Second // a scheduler says how things stand each second; one that does not is not within reach
	firstBackoff = 10 * time.Millisecond
	maxBackoff   = 500 * time.Millisecond
	maxLeaves    = 1 << 16 // that wait to be told; then the link starts anew
	frameTickets = 256     // tickets in a message
	frameItems   = 4096    // of each other kind
)

// link is this node's to the scheduler elsewhere.
type link struct {
	d       *Dispatcher
	address string
	urgent  chan struct{} // somebody waits for what is to be said
	hurry   chan struct{} // try again now
	quit    chan struct{}

	// Under Dispatcher.mu.
	ended  bool
	up     bool // it keeps this node's tickets
	joins  []*waiter
	leaves []uint64
	misses []uint64
	cut    context.CancelFunc // of the stream
}

func newLink(d *Dispatcher, to Scheduling) *link {
	return &link{
		d: d, address: to.Address, urgent: make(chan struct{}, 1), hurry: make(chan struct{}, 1), quit: make(chan struct{}),
	}
}

// close ends the link; d.mu is held.
func (l *link) close() {
	if !l.ended {
		l.ended = true
		close(l.quit)
	}
}

// leave says that a ticket has left; d.mu is held.
func (l *link) leave(id uint64) {
	if len(l.leaves) >= maxLeaves {
		l.cut() // it takes nothing
		return
	}
	l.leaves = append(l.leaves, id)
	signal(l.urgent)
}

// run keeps a stream open until the link is closed.
func (l *link) run(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	l.d.wg.Go(func() {
		select {
		case <-l.quit:
			stop()
		case <-ctx.Done():
		}
	})
	backoff := firstBackoff
	for {
		heard, err := l.stream(ctx)
		l.down()
		if ctx.Err() != nil {
			return
		}
		if heard {
			backoff = firstBackoff
			l.d.met.reconnects.Inc()
			l.d.log.Info("the link to the scheduler broke", "address", l.address, "error", err)
		}
		l.d.mu.Lock()
		wait := backoff/2 + time.Duration(l.d.rand.Int64N(int64(backoff/2)))
		l.d.mu.Unlock()
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-l.hurry:
		case <-t.C:
		}
		t.Stop()
		backoff = min(2*backoff, maxBackoff)
	}
}

// down takes the tickets back.
func (l *link) down() {
	d := l.d
	d.mu.Lock()
	defer d.mu.Unlock()
	was := l.up
	l.up, l.cut, l.joins, l.leaves, l.misses = false, nil, nil, nil, nil
	if was && d.link == l {
		d.lose(d.cfg.Now())
		signal(d.soon)
	}
}

var errSilent = errors.New("dispatch: the scheduler says nothing")

// stream is one stream's life. heard: the scheduler took this node in.
func (l *link) stream(ctx context.Context) (heard bool, err error) {
	ctx, cut := context.WithCancelCause(ctx)
	defer cut(nil)
	silent := time.AfterFunc(helloFor, func() { cut(errSilent) })
	defer silent.Stop()
	cc, err := l.d.cfg.Client(l.address)
	if err != nil {
		return false, err
	}
	s, err := pb.NewDispatchClient(cc).Schedule(ctx)
	if err != nil {
		return false, err
	}
	if err := s.Send(&pb.Up{Hello: l.hello()}); err != nil {
		_, err = s.Recv() // says why
		return false, err
	}
	// Nothing is sent before its first word: until then gRPC may begin the call anew, and holds a lock meanwhile.
	f, err := s.Recv()
	if err != nil {
		return false, err
	}
	// Whatever is sent next is told first: what this node uses, and all its tickets.
	if !l.open(func() { cut(nil) }) {
		return false, context.Cause(ctx)
	}
	done := make(chan struct{})
	defer func() { <-done }()
	defer cut(nil)
	go func() {
		defer close(done)
		defer cut(nil)
		l.write(ctx, s)
	}()
	for {
		silent.Reset(schedulerFor)
		if err := l.receive(f); err != nil {
			l.d.met.malformed.Inc()
			return true, err
		}
		if f, err = s.Recv(); err != nil {
			return true, err
		}
	}
}

// hello is what the scheduler hears first.
func (l *link) hello() *pb.Hello {
	h := &pb.Hello{Node: l.d.cfg.Self}
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	for id, n := range l.d.learnt {
		if len(h.GetLimits()) < queue.MaxBackends {
			h.Limits = append(h.GetLimits(), &pb.Limit{Backend: nameOf(id), Limit: n})
		}
	}
	return h
}

// open hands the tickets over. False: this link is not the one any more.
func (l *link) open(cut context.CancelFunc) bool {
	d := l.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.link != l || d.closed {
		return false
	}
	d.seat.dismissAll()
	d.seat = nil
	d.alone.Store(false)
	d.lost = maxTime
	l.up, l.cut = true, cut
	d.joinAll(d.cfg.Now())
	d.announce()
	signal(l.urgent)
	return true
}

// receive takes a message of the scheduler's.
func (l *link) receive(f *pb.Down) error {
	grants, drops, placed, st, err := downOf(f)
	if err != nil {
		return err
	}
	d := l.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.link != l || !l.up {
		return nil
	}
	if st != nil {
		d.shown(d.cfg.Now(), st.whole, st.changed, st.gone)
		d.learn(st.changed)
	}
	d.placed(placed)
	for i := range grants {
		d.granted(grants[i].ID, grants[i].Backend, grants[i].Cost)
	}
	for i := range drops {
		d.droppedBy(drops[i].ID, Dropped{drops[i].Reason, drops[i].RetryAfter})
	}
	return nil
}

// write says what there is to say until the stream ends.
func (l *link) write(ctx context.Context, s pb.Dispatch_ScheduleClient) {
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	var t told
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.urgent:
		case <-beat.C:
		}
		for more := true; more; {
			var f *pb.Up
			f, more = l.next(&t)
			if err := s.Send(f); err != nil {
				l.d.mu.Lock()
				l.d.news.again(&t, l.d.endpoint)
				l.d.mu.Unlock()
				return
			}
			t.reset()
		}
	}
}

// next is the next message. more: it does not hold all that there is.
func (l *link) next(t *told) (f *pb.Up, more bool) {
	d := l.d
	d.mu.Lock()
	defer d.mu.Unlock()
	f = &pb.Up{}
	if d.link != l || !l.up {
		return f, false // another queue is to hear the news
	}
	now := d.cfg.Now()
	more = d.news.take(now, t, frameItems)
	f.Started, f.Uses, f.Seen, f.Dones = t.started, usesPB(t.uses), seenPB(t.uses), donesPB(t.dones)
	f.Placed = placedPB(t.placed)
	f.Misses, l.misses = l.misses, nil
	f.Leaves, l.leaves = l.leaves, nil
	n := 0
	for _, w := range l.joins {
		if len(f.GetJoins()) == frameTickets {
			break
		}
		n++
		if w.how == waits && w.epoch == d.epoch { // else it has left
			f.Joins = append(f.GetJoins(), ticketPB(w.ticket(d.cfg.Self, now)))
		}
	}
	clear(l.joins[:n])
	l.joins = l.joins[n:]
	return f, more || len(l.joins) > 0
}
