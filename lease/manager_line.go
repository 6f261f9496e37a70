package lease

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headgate/lease/leasepb"
	"headgate/limiter"
)

// The bounds and times of a line.
const (
	maxOpenAsks  = 4096 // of one owner: on their way, parked or waiting for a batch
	maxUnheard   = 1024 // requests without an answer; more wait until there is one
	openFor      = time.Second
	silentFor    = 2 * KeepEvery // a stream that says nothing for so long though it should is dead
	firstBackoff = 25 * time.Millisecond
	maxBackoff   = time.Second
)

// outcome is what came of asking an owner.
type outcome uint8

const (
	outDecided outcome = iota
	outAgain           // it may not grant now, or the stream broke: another try may reach the one who does
	outSilent          // it is out of reach
)

// asking is an Ask on its way.
type asking struct {
	ask     Ask
	lane    *lane
	sent    int64              // the reading before the request with it was sent
	heard   bool               // that request was answered: the ask is parked
	decided chan askingOutcome // of one place; written once
	cs      []limiter.Charge   // once its asker has given up: its charges, and which of them are asked for
	which   uint32
}

type askingOutcome struct {
	outcome
	decision AskDecision
}

// lane holds back the asks of one partition while one is on its way: what the answer brings may cover
// them, and what it does not goes in one message.
type lane struct {
	partition uint32
	unheard   int           // asks in requests without an answer
	waiting   int           // who waits for that answer
	forming   int           // were woken and have not said yet whether they still ask
	batch     []*asking     // of those who have
	turn      chan struct{} // closed when the answer came, or the line broke
	gone      bool          // the line broke
}

// line is what this process, as a holder, has to an owner: the stream, what waits to go on it, and
// whether the owner is out of reach. The line to the owner in this process has no stream.
type line struct {
	m      *Manager
	to     Member
	poke   chan struct{} // to the stream's writer, and to whoever opens it
	broken atomic.Bool   // the breaker: asks fail at once until there is any answer
	wanted atomic.Bool   // the holder wants to speak when the answer before is there
	quit   chan struct{} // the owner is a member no more
	once   sync.Once

	mu      sync.Mutex
	runs    bool // a goroutine has the stream
	out     []*asking
	asks    map[uint64]*asking // all that are not decided, by Ask.ID
	late    map[uint64]*asking // those given up whose decision may still come on this stream
	sent    []sending          // requests without an answer, oldest first
	cut     context.CancelFunc // of the stream; nil: there is none
	lanes   map[uint32]*lane
	live    int64 // until when what the owner lent may be spent
	heardAt int64
}

type sending struct {
	seq  uint64
	at   int64
	asks []*asking
}

func newLine(m *Manager, to Member) *line {
	return &line{
		m: m, to: to, poke: make(chan struct{}, 1), quit: make(chan struct{}),
		asks: map[uint64]*asking{}, late: map[uint64]*asking{}, lanes: map[uint32]*lane{},
	}
}

func (l *line) close() { l.once.Do(func() { close(l.quit) }) }

// want is for the holder: it has something to say. One message that nobody waits for is on its way at
// a time; the answer to it sends the next.
func (l *line) want() {
	l.wanted.Store(true)
	signal(l.poke)
}

// keepAlive sends a request now.
func (l *line) keepAlive() {
	l.wanted.Store(true)
	l.start()
	signal(l.poke)
}

// start has a goroutine keep the stream, unless one does. It says whether one does.
func (l *line) start() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.runs && l.m.cfg.Client != nil {
		l.runs = l.m.run(l.serve)
	}
	return l.runs
}

// enter has an ask sent, or, behind another of its lane, has the caller wait for its turn. A nil lane
// waits for nobody. ok is false where the line is broken or full.
func (l *line) enter(a *asking, partition uint32, queued bool) (turn <-chan struct{}, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken.Load() || len(l.asks) >= maxOpenAsks {
		return nil, false
	}
	if !queued {
		l.enqueue(a)
		return nil, true
	}
	ln := l.lanes[partition]
	switch {
	case ln == nil:
		ln = &lane{partition: partition, turn: make(chan struct{}), unheard: 1}
		l.lanes[partition] = ln
		a.lane = ln
		l.enqueue(a)
	case ln.forming > 0:
		a.lane = ln
		l.asks[a.ask.ID] = a
		ln.batch = append(ln.batch, a)
	default:
		if ln.waiting >= maxOpenAsks {
			return nil, false
		}
		ln.waiting++
		a.lane = ln
		return ln.turn, true
	}
	return nil, true
}

// enqueue hands an ask to the stream's writer; l.mu is held.
func (l *line) enqueue(as ...*asking) {
	for _, a := range as {
		l.asks[a.ask.ID] = a
	}
	l.out = append(l.out, as...)
	signal(l.poke)
}

// leave is for one who waited for a turn that did not come.
func (l *line) leave(a *asking, turn <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a.lane.turn == turn {
		a.lane.waiting--
		return
	}
	l.say(a.lane)
}

// join is for one whose turn came: it still asks, unless a is nil. ok is false where the line broke.
func (l *line) join(ln *lane, a *asking) (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ln.gone {
		return false
	}
	if a != nil {
		l.asks[a.ask.ID] = a
		ln.batch = append(ln.batch, a)
	}
	l.say(ln)
	return true
}

// say: one more of those woken has said whether it asks. The last one sends the batch; l.mu is held.
func (l *line) say(ln *lane) {
	if ln.gone {
		return
	}
	ln.forming--
	l.flush(ln)
}

// flush sends the batch once all have said, and ends a lane in which nothing is left; l.mu is held.
func (l *line) flush(ln *lane) {
	if ln.forming > 0 {
		return
	}
	if ln.batch == nil {
		delete(l.lanes, ln.partition)
		return
	}
	ln.unheard = len(ln.batch)
	l.enqueue(ln.batch...)
	ln.batch = nil
}

// giveUp is for who does not wait any longer. What a decision that comes later takes of cs goes back. It says whether
// the owner has not even answered.
func (l *line) giveUp(a *asking, cs []limiter.Charge, which uint32) (silent bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asks[a.ask.ID] == a && a.sent != 0 && !a.ask.Peek && len(l.late) < maxOpenAsks {
		a.cs, a.which = slices.Clone(cs), which
		l.late[a.ask.ID] = a
	}
	delete(l.asks, a.ask.ID)
	return !a.heard
}

// tooLate takes a decision that nobody waits for any more, and undoes it.
func (l *line) tooLate(a *asking, d *AskDecision) {
	for i := range a.cs {
		if a.which>>i&1 == 1 {
			a.cs[i].Held = nil
		}
	}
	if refused, ok := l.m.holder.Decided(a.cs, a.which, d, a.sent, make([]limiter.Decision, len(a.cs))); ok && refused == -1 {
		l.m.holder.Cancel(a.cs, a.which)
	}
}

// heardOf takes what the owner says, for the askers.
func (l *line) heardOf(r *Response) {
	l.m.holder.Handle(r)
	l.mu.Lock()
	l.heardAt = l.m.cfg.Clock().Now
	l.answered(r)
	var late []*asking
	var of []*AskDecision
	for i := range r.Decisions {
		d := &r.Decisions[i]
		if a := l.late[d.ID]; a != nil {
			delete(l.late, d.ID)
			late, of = append(late, a), append(of, d)
		}
		if a := l.asks[d.ID]; a != nil {
			delete(l.asks, d.ID)
			out := askingOutcome{outDecided, *d}
			if d.Refused == NotOwner {
				out.outcome = outAgain
			}
			a.decided <- out
		}
	}
	l.mu.Unlock()
	for i, a := range late {
		l.tooLate(a, of[i])
	}
	if l.broken.Swap(false) {
		l.m.log.Info("an owner answers again", "owner", l.to.Name)
		l.m.assess()
	}
	if l.wanted.Load() {
		signal(l.poke)
	}
	signal(l.m.heard)
}

// answered ends the turn of the asks in the request that is answered; l.mu is held.
func (l *line) answered(r *Response) {
	for len(l.sent) > 0 && l.sent[0].seq <= r.Answers {
		s := l.sent[0]
		l.sent = l.sent[1:]
		if s.seq == r.Answers && r.Session != 0 {
			l.live = max(l.live, s.at+r.Left*98/100)
		}
		for _, a := range s.asks {
			a.heard = true
			if r.Session == 0 {
				delete(l.late, a.ask.ID)
			}
			if r.Session == 0 && l.asks[a.ask.ID] == a && !decides(r, a.ask.ID) {
				delete(l.asks, a.ask.ID)
				a.decided <- askingOutcome{outcome: outAgain}
			}
			l.unlane(a)
		}
	}
}

func decides(r *Response, id uint64) bool {
	for i := range r.Decisions {
		if r.Decisions[i].ID == id {
			return true
		}
	}
	return false
}

// liveUntil is when the session ends that this process has by its own count.
func (l *line) liveUntil() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.live
}

// heardLast is when the owner said anything last.
func (l *line) heardLast() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.heardAt
}

// fail ends every ask of the line: the stream broke, or the owner is out of reach.
func (l *line) fail(o outcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.asks {
		a.decided <- askingOutcome{outcome: o}
	}
	clear(l.asks)
	l.out, l.sent = nil, nil
	for _, ln := range l.lanes {
		ln.gone = true
		close(ln.turn)
	}
	clear(l.lanes)
}

// breakOff opens the breaker.
func (l *line) breakOff(why string) {
	if l.broken.Swap(true) {
		l.fail(outSilent)
		return
	}
	l.m.log.Warn("an owner is out of reach: charges on its buckets that no lease covers go by their unavailable mode", "owner", l.to.Name, "address", l.to.Address, "reason", why)
	l.m.assess()
	l.fail(outSilent)
	l.start()
	signal(l.poke)
}

// serve opens the stream whenever there is something to say, until the owner is a member no more.
func (l *line) serve(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	l.m.wg.Go(func() {
		select {
		case <-l.quit:
			stop()
		case <-ctx.Done():
		}
	})
	backoff := firstBackoff
	for {
		select {
		case <-ctx.Done():
			l.fail(outAgain)
			return
		case <-l.poke:
		}
		heard, err := l.stream(ctx)
		l.mu.Lock()
		clear(l.late)
		l.mu.Unlock()
		if ctx.Err() != nil {
			l.fail(outAgain)
			return
		}
		if heard {
			backoff = firstBackoff
			l.fail(outAgain)
		} else {
			l.breakOff(err.Error())
		}
		pause(ctx, backoff/2+rand.N(backoff/2))
		backoff = min(2*backoff, maxBackoff)
		signal(l.poke) // what is lost with a stream is said anew
		l.wanted.Store(true)
	}
}

// stream is one stream's life. heard: the owner said something on it.
func (l *line) stream(ctx context.Context) (heard bool, err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	cc, err := l.m.cfg.Client(l.to.Address)
	if err != nil {
		return false, err
	}
	late := time.AfterFunc(openFor, stop)
	s, err := leasepb.NewLeaseClient(cc).Session(ctx)
	late.Stop()
	if err != nil {
		return false, err
	}
	l.mu.Lock()
	l.cut = stop
	l.mu.Unlock()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() {
		l.write(ctx, s)
		stop()
	})
	for {
		f, rerr := s.Recv()
		if rerr != nil {
			return heard, rerr
		}
		for _, p := range f.GetResponses() {
			r, werr := responseOf(p)
			if werr != nil || r.Owner != l.to.Incarnation || r.Holder != l.m.cfg.Self.Incarnation {
				l.m.met.rejected.Inc()
				continue
			}
			heard = true
			l.heardOf(r)
		}
	}
}

// write sends requests as there is reason to.
func (l *line) write(ctx context.Context, s leasepb.Lease_SessionClient) {
	frame := &leasepb.Frame{Holder: l.m.cfg.Self.Incarnation, Owner: l.to.Incarnation}
	l.wanted.Store(true)
	for {
		if r := l.next(); r != nil {
			frame.Requests = []*leasepb.Request{requestPB(r)}
			if s.Send(frame) != nil {
				return // Recv says why
			}
			frame = &leasepb.Frame{}
			l.m.met.roundTrip(r)
			if len(r.Reports) >= wireReports {
				l.wanted.Store(true)
			}
			if len(r.Asks) >= wireAsks {
				continue
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-l.poke:
		}
	}
}

// check ends a stream that should have said something and did not.
func (l *line) check() {
	l.mu.Lock()
	dead := len(l.sent) > 0 && l.m.cfg.Clock().Now-max(l.sent[0].at, l.heardAt) > int64(silentFor)
	cut := l.cut
	l.mu.Unlock()
	if !dead || cut == nil {
		return
	}
	if l.m.cfg.Drop != nil {
		l.m.cfg.Drop(l.to.Address)
	}
	cut()
}

// next is the request that is due, nil if none is. It carries the asks that wait.
func (l *line) next() *Request {
	l.mu.Lock()
	n := min(len(l.out), wireAsks)
	if len(l.sent) >= maxUnheard {
		n = 0
	}
	sendings := l.out[:n:n]
	l.out = l.out[n:]
	if n == 0 && (!l.wanted.Load() || len(l.sent) > 0 && l.m.cfg.Clock().Now-l.sent[len(l.sent)-1].at < int64(KeepEvery)) {
		l.mu.Unlock()
		return nil
	}
	as, asks := make([]*asking, 0, n), make([]Ask, 0, n)
	for _, a := range sendings {
		if l.asks[a.ask.ID] == a { // else its asker has given up
			as, asks = append(as, a), append(asks, a.ask)
			continue
		}
		l.unlane(a)
	}
	l.mu.Unlock()
	l.wanted.Store(false)
	at := l.m.cfg.Clock().Now
	r := l.m.holder.Request(l.to.Incarnation, asks)
	l.mu.Lock()
	defer l.mu.Unlock()
	if r == nil { // it is no member any more
		l.dropLocked(as)
		return nil
	}
	for _, a := range as {
		a.sent = at
	}
	l.sent = append(l.sent, sending{r.Seq, at, as})
	return r
}

// drop gives asks back that could not be sent.
func (l *line) drop(as []*asking) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropLocked(as)
}

func (l *line) dropLocked(as []*asking) {
	for _, a := range as {
		l.unlane(a)
		if l.asks[a.ask.ID] == a {
			delete(l.asks, a.ask.ID)
			a.decided <- askingOutcome{outcome: outAgain}
		}
	}
}

// unlane ends the turn of an ask that was answered or will not be sent; l.mu is held.
func (l *line) unlane(a *asking) {
	ln := a.lane
	if ln == nil || ln.gone {
		return
	}
	if ln.unheard--; ln.unheard == 0 {
		ln.forming, ln.waiting = ln.waiting, 0
		close(ln.turn)
		ln.turn = make(chan struct{})
		l.flush(ln)
	}
}
