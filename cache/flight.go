package cache

import (
	"io"
	"slices"
	"time"
)

// The bounds and times of flights.
const (
	maxFlight   = 8 << 20 // bytes of a stream that are kept for those who come later
	maxGiven    = 8       // leads that one flight gives
	maxTries    = 2       // of which so many may come to nothing before the others stop to wait
	maxSessions = 1 << 16 // of nodes that wait, with one owner
	maxPasses   = 1 << 14 // keys that are not shared for a while
	passFor     = 10 * time.Second
	leadForever = time.Hour // the longest LeadFor
	leadUsually = 30 * time.Second
)

// Why a lead went to the next.
const (
	handLost    = "lost"
	handSlow    = "slow"
	handFailed  = "failed"
	handGivenUp = "abandoned"
	handBroken  = "broken"
	handInvalid = "invalid" // what it depends on was invalidated meanwhile
)

// referee has the flights of the keys for which this node is asked: it gives the lead to one
// session at a time. It is pure but for what it is made with; whoever calls it holds a lock. What
// it says stands in the sessions' queues afterwards.
type referee struct {
	flights  map[Key]*flight
	passes   map[Key]int64 // until when a key's answers are known not to be shared
	sessions int
	room     *room
	valid    func(*Entry) bool // whether nothing that it depends on was invalidated
	token    func() uint64     // unique in the cluster, not 0
	handed   func(reason string)
}

// flight is one key's: those who wait for its answer, and those who ask the model.
type flight struct {
	key      Key
	sessions []*session
	queue    []*session // that wait for an answer, in order
	lock     *lead      // the one that keeps others from leading
	leads    []*lead    // all that have not ended
	live     *lead      // whose stream the others follow: the first that began
	given    int
	tries    int
	over     bool // it is in no map any more and gives no lead
}

// lead is the right to ask the model.
type lead struct {
	token  uint64
	by     *session
	since  int64
	for_   int64  // how long it may be silent
	tape   *tape  // what it published; nil: it has not begun
	about  *Entry // what its stream depends on, without a body; nil: not known
	flows  bool   // others follow it, or did
	ending bool   // its last word is on its way: nobody begins to follow it
	others bool   // what its node was told
	told   bool
}

// session is a node that waits, or leads, or follows.
type session struct {
	ask         asked
	self        bool // it is this node's
	flight      *flight
	waits, live bool
	queued      bool
	follows     *lead
	out         []*down
	poke        chan struct{}
	left        bool // its link has ended
}

func newSession(self bool) *session { return &session{self: self, poke: make(chan struct{}, 1)} }

// want is what a session came for.
func (s *session) want(ask asked) {
	if ask.leadFor <= 0 {
		ask.leadFor = leadUsually
	}
	ask.leadFor = min(ask.leadFor, leadForever)
	s.ask = ask
}

// say queues a message. The queue is bounded by what a flight may publish and by maxGiven.
func (s *session) say(d *down) {
	s.out = append(s.out, d)
	signal(s.poke)
}

// signal wakes whoever waits on c, which has room for one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// passed says whether a key's answers are known not to be shared.
func (r *referee) passed(k Key, now int64) bool {
	until, ok := r.passes[k]
	if ok && now >= until {
		delete(r.passes, k)
		ok = false
	}
	return ok
}

func (r *referee) pass(k Key, now int64) {
	if len(r.passes) < maxPasses {
		r.passes[k] = now + int64(passFor)
	}
}

// prune forgets what passed is not asked about.
func (r *referee) prune(now int64) {
	for k, until := range r.passes {
		if now >= until {
			delete(r.passes, k)
		}
	}
}

// join takes a session into its key's flight, or answers it. What is stored has been looked at before.
func (r *referee) join(s *session, waits, live bool, now int64) {
	k := s.ask.key
	f := r.flights[k]
	switch resumes := len(s.ask.leads) > 0; {
	case r.sessions >= maxSessions, !resumes && r.passed(k, now):
		s.say(&down{kind: downPass})
		return
	case f == nil:
		f = &flight{key: k}
		r.flights[k] = f
	case s.ask.early && !resumes && len(f.leads) > 0:
		s.say(&down{kind: downBusy})
		return
	}
	s.flight = f
	r.sessions++
	f.sessions = append(f.sessions, s)
	for _, token := range s.ask.leads[:min(len(s.ask.leads), maxGiven)] {
		r.adopt(f, s, token, now)
	}
	r.wants(s, waits, live, now)
}

// adopt takes a lead that an owner gave which is lost.
func (r *referee) adopt(f *flight, s *session, token uint64, now int64) {
	l := &lead{token: token, by: s, since: now, for_: int64(s.ask.leadFor)}
	f.leads = append(f.leads, l)
	if f.lock == nil {
		f.lock = l
	}
}

// wants is what a session waits for from now on.
func (r *referee) wants(s *session, waits, live bool, now int64) {
	f := s.flight
	if f == nil {
		return
	}
	s.waits, s.live = waits, live
	switch {
	case !waits:
		f.unqueue(s)
	case s.queued:
	case f.over: // the answer was there before its node knew of those who wait now
		s.waits = false
		s.say(&down{kind: downAgain})
	default:
		s.queued = true
		f.queue = append(f.queue, s)
	}
	r.follow(f, s)
	r.settle(f, now)
}

// holds says whether nothing is known to be invalidated of what a lead's answer depends on.
func (r *referee) holds(l *lead) bool { return l.about == nil || r.valid(l.about) }

// follow has a session that wants to get the stream, or not any more.
func (r *referee) follow(f *flight, s *session) {
	switch {
	case !s.live:
		s.follows = nil
	case s.follows == nil && f.live != nil && f.live.by != s && !f.live.ending && r.holds(f.live):
		s.follows = f.live
		s.say(&down{kind: downBegin, token: f.live.token, contentType: f.live.tape.contentType, about: f.live.about})
		for _, c := range f.live.tape.all() {
			s.say(&down{kind: downData, token: f.live.token, data: c})
		}
	}
}

func (f *flight) unqueue(s *session) {
	if s.queued {
		s.queued = false
		f.queue = slices.DeleteFunc(f.queue, func(q *session) bool { return q == s })
	}
}

// settle gives the lead where nobody has it, tells leaders whether somebody waits, and ends a flight that
// nobody is interested in.
func (r *referee) settle(f *flight, now int64) {
	if l := f.lock; l != nil && len(f.queue) > 0 && !f.over && !r.holds(l) {
		f.lock = nil // what it comes to is not for those who wait
		r.handed(handInvalid)
	}
	if f.over && len(f.leads) == 0 && len(f.queue) > 0 { // the answer that it was over for did not come
		r.answer(f, &down{kind: downAgain})
	}
	for f.lock == nil && len(f.queue) > 0 && !f.over {
		if f.given >= maxGiven {
			r.answer(f, &down{kind: downPass})
			break
		}
		r.give(f, f.queue[0], now)
	}
	for _, l := range f.leads {
		others := slices.ContainsFunc(f.sessions, func(s *session) bool { return s != l.by && (s.waits || s.live) })
		if !l.told || others != l.others {
			l.told, l.others = true, others
			l.by.say(&down{kind: downOthers, token: l.token, others: others})
		}
	}
	if len(f.sessions) == 0 || len(f.leads) == 0 && len(f.queue) == 0 {
		r.finish(f)
	}
}

// give is the only place where a lead is given.
func (r *referee) give(f *flight, s *session, now int64) {
	f.unqueue(s)
	s.waits = false // until it says that others of the node wait
	f.given++
	f.lock = &lead{token: r.token(), by: s, since: now, for_: int64(s.ask.leadFor)}
	f.leads = append(f.leads, f.lock)
	s.say(&down{kind: downLead, token: f.lock.token})
}

// slow lets the next of the queue try too, where the one that leads has published nothing for long, or what
// was invalidated meanwhile.
func (r *referee) slow(f *flight, now int64) {
	if f.lock != nil && !r.holds(f.lock) {
		r.settle(f, now)
	}
	if l := f.lock; l != nil && l.tape == nil && now-l.since >= l.for_ && len(f.queue) > 0 && f.given < maxGiven {
		f.lock = nil
		r.handed(handSlow)
		r.settle(f, now)
	}
}

// answer tells all that wait, and ends the flight for them.
func (r *referee) answer(f *flight, d *down) {
	for _, s := range f.queue {
		s.queued, s.waits = false, false
		s.say(d)
	}
	f.queue = nil
	r.finish(f)
}

// finish takes a flight out of the map: the next who asks begins another. What is left of it goes on:
// leads that the answer came before, and who follows them.
func (r *referee) finish(f *flight) {
	f.over = true
	if r.flights[f.key] == f {
		delete(r.flights, f.key)
	}
}

// of finds a lead of a session.
func (s *session) of(token uint64) *lead {
	if s.flight == nil {
		return nil
	}
	for _, l := range s.flight.leads {
		if l.by == s && l.token == token {
			return l
		}
	}
	return nil
}

// ending is called as soon as a lead of this node has said its last word, which may be on its way for a moment:
// who comes from now on has no part in it. over: it is the answer to all. passes: nobody may have it.
func (r *referee) ending(k Key, token uint64, over, passes bool, now int64) {
	f := r.flights[k]
	if f == nil {
		return
	}
	i := slices.IndexFunc(f.leads, func(l *lead) bool { return l.token == token && l.by.self })
	if i < 0 {
		return // its flight is another node's
	}
	f.leads[i].ending = true
	if passes {
		r.pass(k, now)
	}
	if over {
		r.finish(f)
	}
}

// begin is the head of a stream that others may follow.
func (r *referee) begin(l *lead, contentType string, about *Entry, now int64) {
	f := l.by.flight
	if l.tape != nil {
		return
	}
	l.tape, l.about = &tape{contentType: contentType, room: r.room}, about
	if l.by.self {
		l.tape.room = nil // the same bytes are on the tape of the Fill
	}
	if f.live == nil || !r.holds(f.live) {
		f.live, l.flows = l, true
		for _, s := range f.sessions {
			r.follow(f, s)
		}
	}
	r.settle(f, now)
}

// data is more of it. A lead whose stream nobody can follow any more because it is too large ends for
// the others.
func (r *referee) data(l *lead, p []byte, now int64) {
	f := l.by.flight
	if l.tape == nil || !l.flows {
		return
	}
	if !l.tape.add(p) {
		r.unshareable(l, false, now)
		return
	}
	for _, s := range f.sessions {
		if s.follows == l {
			s.say(&down{kind: downData, token: l.token, data: p})
		}
	}
}

// over ends a lead, and its stream for those who follow.
func (r *referee) over(l *lead, whole bool) {
	f := l.by.flight
	f.leads = slices.DeleteFunc(f.leads, func(o *lead) bool { return o == l })
	if f.lock == l {
		f.lock = nil
	}
	if f.live == l {
		f.live = nil
	}
	if l.tape != nil {
		l.tape.end(io.EOF) // nobody begins to follow it
	}
	for _, s := range f.sessions {
		if s.follows == l {
			s.follows = nil
			s.say(&down{kind: downEnd, token: l.token, whole: whole})
		}
	}
}

// done is a whole answer; keep says that it may be stored.
func (r *referee) done(l *lead, entry *Entry, keep bool, now int64) {
	f := l.by.flight
	r.over(l, true)
	r.answer(f, &down{kind: downHit, hit: Hit{Entry: entry, Age: entry.Age, Tier: Live}, keep: keep})
	r.settle(f, now)
}

// unshareable is an answer that others must not have; or, not whole, cannot.
func (r *referee) unshareable(l *lead, whole bool, now int64) {
	f := l.by.flight
	r.pass(f.key, now)
	r.over(l, whole)
	r.answer(f, &down{kind: downPass})
	r.settle(f, now)
}

// failed is a lead that came to nothing: the next leads, unless enough have tried. Then all get what
// the last one came to, x, or a pass where that is nothing. whole: who followed saw the error pass.
func (r *referee) failed(l *lead, counts, whole bool, x Failure, reason string, now int64) {
	f := l.by.flight
	held := f.lock == l
	r.over(l, whole)
	if counts {
		f.tries++
	}
	if f.tries >= maxTries && !f.over {
		d := &down{kind: downPass}
		if x.Status != 0 {
			d = &down{kind: downFailed, failure: x}
		}
		r.answer(f, d)
	}
	if held && len(f.queue) > 0 {
		r.handed(reason)
	}
	r.settle(f, now)
}

// abandoned is a lead without an answer, or with one that does not hold any more, which counts as none: the
// next leads. One that did not even ask the model is as if it had not been given.
func (r *referee) abandoned(l *lead, u *up, now int64) {
	switch {
	case u.invalid:
		r.failed(l, false, true, Failure{}, handInvalid, now)
	case u.unasked:
		l.by.flight.given = max(l.by.flight.given-1, 0)
		r.failed(l, false, false, Failure{}, handGivenUp, now)
	default:
		r.failed(l, u.counts, false, Failure{}, handGivenUp, now)
	}
}

// leave is the end of a session: what it leads is lost.
func (r *referee) leave(s *session, now int64) {
	f := s.flight
	if f == nil {
		return
	}
	s.waits, s.live, s.follows = false, false, nil
	r.sessions--
	f.unqueue(s)
	f.sessions = slices.DeleteFunc(f.sessions, func(o *session) bool { return o == s })
	for _, l := range slices.DeleteFunc(slices.Clone(f.leads), func(l *lead) bool { return l.by != s }) {
		r.failed(l, false, false, Failure{}, handLost, now)
	}
	s.flight = nil
	r.settle(f, now)
}
