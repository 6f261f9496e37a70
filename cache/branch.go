package cache

import (
	"container/list"
	"io"
	"slices"
	"time"
)

// The bounds and times of branches.
const (
	maxWaiting = 1 << 17 // requests that wait on this node
	maxAgain   = 3       // how often one is sent to another flight
)

// asKind keeps requests apart that are answered by different things.
type asKind uint8

const (
	asUsual asKind = iota
	asRefresh
	asEarly
)

type branchID struct {
	key  Key
	kind asKind
}

// branch is what this node has of a flight: the requests here that wait, lead and follow. Its link
// speaks for all of them to the flight's owner. Exact.mu is held round all its methods.
type branch struct {
	e       *Exact
	id      branchID
	ask     asked
	waiters list.List // of *waiter, in order of arrival
	lives   int       // of which so many would take a stream
	readers int
	fills   []*Fill // that have not ended
	ended   []*up   // last words of those that have, until the owner is known to have heard them
	tape    *tape   // what those who take a stream go on with; nil: nothing yet
	relay   *tape   // what the owner passes on, of another node's lead
	relayOf uint64
	retired bool // it is in the map no more: whoever comes begins another

	linked      bool // what is said goes somewhere
	waits, live bool // as was said
	out         []*up
	poke        chan struct{}
}

// waiter is a request that waits.
type waiter struct {
	ask   *Ask
	turn  chan Turn // of one place, written once
	b     *branch
	at    *list.Element // nil: it was answered, or has left
	again int
}

// enter has a request wait in the branch of its kind, which is made where there is none.
func (e *Exact) enter(w *waiter, kind asKind) {
	id := branchID{w.ask.Key, kind}
	b := e.branches[id]
	switch {
	case e.closed, e.waiting >= maxWaiting:
		w.turn <- Turn{Kind: TurnPass}
		return
	case kind == asEarly && (b != nil || e.leads(w.ask.Key)):
		w.turn <- Turn{Kind: TurnBusy}
		return
	case b == nil:
		b = &branch{e: e, id: id, poke: make(chan struct{}, 1), ask: asked{
			key: id.key, refresh: kind == asRefresh, early: kind == asEarly, age: w.ask.Age, leadFor: w.ask.LeadFor,
		}}
		e.branches[id] = b
		e.start(func() { e.link(b) })
	}
	if w.ask.Live && b.tape != nil && e.holds(b.tape) {
		w.turn <- b.reader()
		return
	}
	e.waiting++
	w.b, w.at = b, b.waiters.PushBack(w)
	if w.ask.Live {
		b.lives++
	}
	b.restate()
}

// holds says whether nothing is known to be invalidated of what a stream depends on: who comes after that must
// not follow it.
func (e *Exact) holds(t *tape) bool { return t.about == nil || e.cfg.Valid(t.about) }

// leads says whether a request of this node asks the model for a key.
func (e *Exact) leads(k Key) bool {
	for _, kind := range [...]asKind{asUsual, asRefresh} {
		if b := e.branches[branchID{k, kind}]; b != nil && len(b.fills) > 0 {
			return true
		}
	}
	return false
}

// drop takes a request out of the queue.
func (b *branch) drop(w *waiter) {
	b.waiters.Remove(w.at)
	w.at = nil
	b.e.waiting--
	if w.ask.Live {
		b.lives--
	}
}

// leave is for a request that does not wait any longer.
func (b *branch) leave(w *waiter) {
	b.drop(w)
	b.restate()
}

// answer ends a request's waiting.
func (b *branch) answer(w *waiter, t Turn) {
	b.drop(w)
	w.turn <- t
}

// finish answers all who wait; the next to come begins another branch.
func (b *branch) finish(t Turn) {
	b.retire()
	for at := b.waiters.Front(); at != nil; at = b.waiters.Front() {
		b.answer(at.Value.(*waiter), t)
	}
	b.restate()
}

// moveOn sends all who wait to another branch.
func (b *branch) moveOn(kind asKind) {
	b.retire()
	for at := b.waiters.Front(); at != nil; at = b.waiters.Front() {
		w := at.Value.(*waiter)
		if w.again++; w.again > maxAgain {
			b.answer(w, Turn{Kind: TurnPass})
			continue
		}
		b.drop(w)
		b.e.enter(w, kind)
	}
	b.restate()
}

func (b *branch) retire() {
	b.retired = true
	if b.e.branches[b.id] == b {
		delete(b.e.branches, b.id)
	}
}

// done says that nobody here wants anything of the owner any more.
func (b *branch) done() bool {
	return b.waiters.Len() == 0 && len(b.fills) == 0 && (b.relay == nil || b.readers == 0)
}

// restate follows every change: the owner hears what is wanted now, calls to the model end that nobody
// waits for, and a branch without anybody ends.
func (b *branch) restate() {
	waits, live := b.wants()
	if !live && b.relay != nil {
		b.endRelay(ErrBroken) // nobody reads it; whoever wants it later gets it from its beginning
	}
	if b.linked && (waits != b.waits || live != b.live) {
		b.sayWants()
	}
	for _, f := range b.fills {
		if f.gone && !f.others && b.waiters.Len() == 0 && b.readers == 0 {
			f.stop()
		}
	}
	if b.done() {
		b.retire()
		signal(b.poke)
	}
}

func (b *branch) wants() (waits, live bool) {
	return b.waiters.Len() > 0, b.lives > 0 || b.relay != nil && b.readers > 0
}

func (b *branch) sayWants() {
	b.waits, b.live = b.wants()
	b.say(&up{kind: upWants, waits: b.waits, live: b.live})
}

// say queues a message to the owner. The queue is bounded by what fills may publish.
func (b *branch) say(u *up) {
	if b.linked {
		b.out = append(b.out, u)
		signal(b.poke)
	}
}

// connect is the beginning of a link: the owner hears all that it has to know.
func (b *branch) connect() {
	ask := b.ask
	for _, u := range b.ended {
		if !u.late {
			ask.leads = append(ask.leads, u.token)
		}
	}
	for _, f := range b.fills {
		if !f.large {
			ask.leads = append(ask.leads, f.token)
		}
	}
	b.linked, b.out = true, nil
	b.waits, b.live = b.wants()
	b.say(&up{kind: upAsk, ask: &ask, waits: b.waits, live: b.live})
	for _, u := range b.ended {
		if !u.late {
			b.say(u)
		}
	}
	for _, f := range b.fills {
		if f.tape == nil || f.large {
			continue
		}
		b.say(&up{kind: upBegin, token: f.token, contentType: f.tape.contentType, about: f.tape.about})
		for _, c := range f.tape.all() {
			b.say(&up{kind: upData, token: f.token, data: c})
		}
	}
}

// disconnect is the end of a link. What was not heard of is said again, to the next owner.
func (b *branch) disconnect() {
	b.linked, b.out = false, nil
	b.endRelay(errLink)
	b.restate()
}

func (b *branch) endRelay(err error) {
	if b.relay == nil {
		return
	}
	b.relay.end(err)
	if b.tape == b.relay {
		b.tape = nil
	}
	b.relay = nil
}

// receive takes what the owner says. self: the owner is this node.
func (b *branch) receive(d *down, self bool) {
	switch d.kind {
	case downLead:
		b.lead(d)
	case downOthers:
		for _, f := range b.fills {
			if f.token == d.token {
				f.others = d.others
			}
		}
	case downBegin:
		b.endRelay(ErrBroken)
		b.relay, b.relayOf = &tape{contentType: d.contentType, about: d.about, room: &b.e.room}, d.token
		b.pass(b.relay)
	case downData:
		if b.relay != nil && b.relayOf == d.token && !b.relay.add(d.data) {
			b.endRelay(ErrBroken)
		}
	case downEnd:
		if b.relayOf == d.token && d.whole {
			b.endRelay(io.EOF)
		} else if b.relayOf == d.token {
			b.endRelay(ErrBroken)
		}
	case downHit:
		b.hit(d, self)
	case downFailed:
		b.finish(Turn{Kind: TurnFailed, Failed: d.failure, Stale: staleOf(d)})
	case downPass:
		b.finish(Turn{Kind: TurnPass, Stale: staleOf(d)})
	case downBusy:
		b.finish(Turn{Kind: TurnBusy})
	case downAgain:
		b.moveOn(b.id.kind)
	}
	b.restate()
}

// lead gives the lead to the first who waits.
func (b *branch) lead(d *down) {
	at := b.waiters.Front()
	if at == nil {
		b.say(&up{kind: upAbandon, token: d.token, unasked: true})
		return
	}
	w, e := at.Value.(*waiter), b.e
	f := &Fill{
		e: e, b: b, token: d.token, stamp: e.cfg.Stamp(), since: e.cfg.Now(), maxEntry: e.cfg.MaxEntry,
		others: true, // until the owner says
	}
	f.about = &Entry{Key: b.id.key, Tenant: w.ask.Tenant, Tags: w.ask.Tags, Stamp: f.stamp}
	if w.ask.MaxEntry > 0 {
		f.maxEntry = min(f.maxEntry, w.ask.MaxEntry)
	}
	b.fills = append(b.fills, f)
	b.answer(w, Turn{Kind: TurnLead, Fill: f, Stale: staleOf(d)})
	b.sayWants() // the owner takes it that nobody waits until it hears of it
}

// pass is a stream that those can go on with who take one, unless it was invalidated: who waits may have come
// after that.
func (b *branch) pass(t *tape) {
	if b.tape != nil && b.e.holds(b.tape) || !b.e.holds(t) {
		return
	}
	b.tape = t
	for at := b.waiters.Front(); at != nil; {
		w := at.Value.(*waiter)
		at = at.Next()
		if w.ask.Live {
			b.answer(w, b.reader())
		}
	}
}

func (b *branch) reader() Turn {
	b.readers++
	b.tape.read(1)
	return Turn{Kind: TurnLive, Live: &Reader{b: b, tape: b.tape}}
}

// hit is an answer from the owner.
func (b *branch) hit(d *down, self bool) {
	h := d.hit
	switch valid := b.e.cfg.Valid(h.Entry); {
	case !valid && b.id.kind == asEarly:
		b.finish(Turn{Kind: TurnBusy})
		return
	case !valid:
		b.moveOn(asRefresh)
		return
	}
	switch {
	case !d.stored:
		h.Tier = Live
	case self:
		h.Tier = Local
	default:
		h.Tier = Owner
	}
	b.finish(Turn{Kind: TurnHit, Hit: h})
}

// staleOf is what the owner said that may be served where the model fails.
func staleOf(d *down) *Hit {
	if d.hit.Entry == nil {
		return nil
	}
	h := d.hit
	h.Stale, h.Refresh, h.Tier = true, false, Owner
	return &h
}

// begin is Fill.Begin.
func (f *Fill) begin(contentType string) {
	if f.tape != nil {
		return
	}
	f.tape = &tape{contentType: contentType, about: f.about, room: &f.e.room}
	f.b.say(&up{kind: upBegin, token: f.token, contentType: contentType, about: f.about})
	f.b.pass(f.tape)
	f.b.restate()
}

// write is Fill.Write. What is too large to be followed ends for the others.
func (f *Fill) write(p []byte) {
	if f.tape == nil || f.large {
		return
	}
	if f.tape.add(p) {
		f.b.say(&up{kind: upData, token: f.token, data: p})
		return
	}
	f.large, f.others = true, false
	f.endTape(ErrBroken)
	f.b.say(&up{kind: upUnshareable, token: f.token, cut: true})
	f.b.e.referee.ending(f.b.id.key, f.token, true, true, f.b.e.cfg.Now())
	f.b.finish(Turn{Kind: TurnPass})
}

func (f *Fill) endTape(err error) {
	if f.tape == nil {
		return
	}
	f.tape.end(err)
	if f.b.tape == f.tape {
		f.b.tape = nil
	}
}

// conclude takes a fill out of its branch, with its last word to the owner.
func (f *Fill) conclude(u *up, err error) {
	b := f.b
	u.token = f.token
	f.endTape(err)
	b.fills = slices.DeleteFunc(b.fills, func(o *Fill) bool { return o == f })
	u.late = f.large
	if f.gone {
		f.stop()
	}
	// Who waits here is answered first: the owner need not send the answer back.
	switch u.kind {
	case upStore, upShare:
		b.ended = append(b.ended, u)
		b.finish(Turn{Kind: TurnHit, Hit: Hit{Entry: u.entry, Age: u.entry.Age, Tier: Live}})
	case upUnshareable:
		b.ended = append(b.ended, u)
		b.finish(Turn{Kind: TurnPass})
	}
	if !u.late {
		b.say(u)
		passes := u.kind == upUnshareable
		b.e.referee.ending(b.id.key, f.token, passes || u.kind == upStore || u.kind == upShare, passes, b.e.cfg.Now())
	}
	b.restate()
}

// stop ends the call to the model.
func (f *Fill) stop() {
	for _, cancel := range f.cancels {
		cancel()
	}
	f.cancels = nil
}

// delta is how long the fill took.
func (f *Fill) delta() time.Duration { return time.Duration(max(f.e.cfg.Now()-f.since, 0)) }
