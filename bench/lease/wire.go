package lease

import (
	"slices"

	"headgate/lease"
	"headgate/limiter"
)

// wire is what a process, as a holder, has to an owner in another one: a lease.Manager's line.
type wire struct {
	p, to  *process
	up     bool // there is a stream
	gone   bool // the owner is a member no more
	broken bool // asks fail at once until there is any answer
	wanted bool // the holder wants to speak when the answer before is there
	woken  bool // and said so itself
	out    []*asker
	asks   []*asker // all that are not decided, sent or not
	late   []*asker // given up, whose decision may still come
	later  []*asker // that wait for the answer that is under way: what it brings may cover them
	lane   int      // asks in requests without an answer, and to be sent
	sent   []flying // requests without an answer, oldest first
	live   int64    // until when what the owner lent may be spent
	heard  int64    // when it said anything last
	epoch  int      // of the stream
}

// flying is a request on its way.
type flying struct {
	seq  uint64
	at   int64
	asks []*asker
}

// enter has an ask sent, or wait for its turn.
func (l *wire) enter(x *asker) {
	if l.lane > 0 {
		l.later = append(l.later, x)
		return
	}
	l.put(x)
	l.next()
}

func (l *wire) put(x *asker) {
	l.lane++
	x.ask, x.sent, x.heard = 0, 0, false
	l.out, l.asks = append(l.out, x), append(l.asks, x)
}

func (l *wire) keepAlive() {
	l.wanted = true
	l.next()
}

// next sends the request that is due, if one is. It carries the asks that wait.
func (l *wire) next() {
	now := l.p.f.w.now
	if !l.up || l.gone {
		return
	}
	var xs []*asker
	for _, x := range l.out {
		if slices.Contains(l.asks, x) {
			xs = append(xs, x)
		} else {
			l.lane--
		}
	}
	l.out = nil
	if l.lane == 0 && len(l.later) > 0 { // those before them have given up
		l.turn()
		xs, l.out = l.out, nil
	}
	if len(xs) == 0 && (!l.wanted || len(l.sent) > 0 && now-l.sent[len(l.sent)-1].at < int64(lease.KeepEvery)) {
		return
	}
	if len(xs) > 0 || l.woken {
		l.p.f.w.trips[l.p.node]++
	} else {
		l.p.f.w.kept++
	}
	l.wanted, l.woken = false, false
	asks := make([]lease.Ask, 0, len(xs))
	for _, x := range xs {
		asks = append(asks, x.question())
		x.sent = epoch + now
	}
	r := l.p.holder.Request(l.to.inc, asks)
	if r == nil { // it is no member any more
		l.fail(func(x *asker) { x.again() })
		return
	}
	l.sent = append(l.sent, flying{r.Seq, now, xs})
	l.p.f.send(l.p, l.to, func() { l.to.handle(r) })
}

// hear takes what the owner says.
func (l *wire) hear(r *lease.Response) {
	if l.gone || !l.up {
		return
	}
	p := l.p
	p.holder.Handle(r)
	l.heard = p.f.w.now
	again := l.answered(r)
	if l.broken {
		l.broken = false
		p.assess()
	}
	for i := range r.Decisions {
		l.decides(&r.Decisions[i])
	}
	for _, x := range again {
		x.again()
	}
	if l.lane == 0 {
		l.turn()
	}
	l.next()
}

// answered ends the turn of the asks in the request that is answered. It returns those that the owner does not decide on now.
func (l *wire) answered(r *lease.Response) (again []*asker) {
	for len(l.sent) > 0 && l.sent[0].seq <= r.Answers {
		s := l.sent[0]
		l.sent = l.sent[1:]
		if s.seq == r.Answers && r.Session != 0 {
			l.live = max(l.live, epoch+s.at+r.Left/100*98)
		}
		for _, x := range s.asks {
			x.heard = true
			l.lane--
			decides := slices.ContainsFunc(r.Decisions, func(d lease.AskDecision) bool { return d.ID == x.ask })
			if r.Session == 0 && !decides && slices.Contains(l.asks, x) {
				l.asks = drop(l.asks, x)
				again = append(again, x)
			}
		}
	}
	return again
}

// decides hands a decision to who waits for it; what comes too late is undone.
func (l *wire) decides(d *lease.AskDecision) {
	is := func(x *asker) bool { return x.ask == d.ID }
	if i := slices.IndexFunc(l.asks, is); i >= 0 {
		x := l.asks[i]
		l.asks = slices.Delete(l.asks, i, i+1)
		x.line = nil
		x.decided(d)
		return
	}
	if i := slices.IndexFunc(l.late, is); i >= 0 {
		x := l.late[i]
		l.late = slices.Delete(l.late, i, i+1)
		cs := []limiter.Charge{x.charges[0]}
		cs[0].Held = nil
		if refused, ok := l.p.holder.Decided(cs, 1, d, x.sent, make([]limiter.Decision, 1)); ok && refused == -1 {
			l.p.holder.Cancel(cs, 1)
		}
	}
}

// turn has those that waited look at what the answer brought; those that it does not cover go together.
func (l *wire) turn() {
	later := l.later
	l.later = nil
	for _, x := range later {
		if !x.done && !x.local() {
			l.put(x)
		}
	}
}

// missed: a request's budget is over. An owner that had a fair part of it, and has said nothing at all for as long, is out of reach
// until it does.
func (l *wire) missed(x *asker) {
	silent := !x.heard
	l.later = drop(l.later, x)
	if slices.Contains(l.asks, x) {
		l.asks = drop(l.asks, x)
		if x.sent != 0 {
			l.late = append(l.late, x)
		}
	}
	now, fair := l.p.f.w.now, int64(budget/2)
	x.line = nil
	if silent && now-x.tried >= fair && now-l.heard >= fair {
		l.breakOff()
	}
}

// fail ends every ask of the line.
func (l *wire) fail(how func(*asker)) {
	asks, later := l.asks, l.later
	l.asks, l.later, l.out, l.sent, l.lane = nil, nil, nil, nil, 0
	for _, x := range asks {
		x.line = nil
		how(x)
	}
	for _, x := range later {
		if !x.done {
			x.once()
		}
	}
}

func (l *wire) breakOff() {
	if !l.broken {
		l.broken = true
		l.p.assess()
	}
	l.fail(func(x *asker) { x.silent(l) })
}

// end: the owner is a member no more.
func (l *wire) end() {
	l.gone, l.up = true, false
	l.epoch++
	delete(l.p.lines, l.to.inc)
	i := slices.Index(l.p.peers, l)
	l.p.peers = slices.Delete(l.p.peers, i, i+1)
	l.fail(func(x *asker) { x.again() })
}

// reset: the stream broke.
func (l *wire) reset() {
	if l.gone || !l.up {
		return
	}
	l.up, l.late = false, nil
	l.epoch++
	l.fail(func(x *asker) { x.again() })
	l.redial(int64(firstBackoff))
}

// check ends a stream that should have said something and did not.
func (l *wire) check() {
	if l.up && len(l.sent) > 0 && l.p.f.w.now-max(l.sent[0].at, l.heard) > int64(silentFor) {
		l.reset()
	}
}

// redial opens a stream after a pause. Until it is open asks wait for it.
func (l *wire) redial(backoff int64) {
	f, stream := l.p.f, l.epoch
	still := func() bool { return l.epoch == stream && l.p.alive && !l.gone }
	f.w.after(backoff/2+f.rand.Int64N(backoff/2), func() {
		if !still() {
			return
		}
		reached := f.reach(l.p, l.to)
		wait := f.rtt()
		if !reached {
			wait = int64(openFor)
		}
		f.w.after(wait, func() {
			switch {
			case !still():
			case reached && l.to.alive && f.reach(l.p, l.to):
				l.up = true
				l.wanted = true
				l.next()
			default:
				l.breakOff()
				l.redial(min(2*backoff, int64(maxBackoff)))
			}
		})
	})
}
