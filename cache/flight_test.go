package cache

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestReferee has sessions of one key come, wait, lead, end and go in any order. One lead at most has the
// lock, and somebody has it where anybody waits; what a session was sent makes sense to it; and when all leads have
// ended everybody has an answer.
func TestReferee(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &refereeMachine{t: t, heard: map[*session]*heardOf{}}
		var tokens uint64
		m.r = &referee{
			flights: map[Key]*flight{}, passes: map[Key]int64{}, handed: func(string) {}, room: &room{most: 1 << 20}, valid: func(e *Entry) bool { return e.Stamp >= m.floor },
			token: func() uint64 { tokens++; return tokens },
		}
		t.Repeat(map[string]func(*rapid.T){
			"":       func(t *rapid.T) { m.t = t; m.check() },
			"join":   func(*rapid.T) { m.join() },
			"wants":  func(*rapid.T) { m.wants() },
			"leave":  func(*rapid.T) { m.leave() },
			"begin":  func(*rapid.T) { m.onLead(func(l *lead) { m.r.begin(l, "c", &Entry{Stamp: m.floor}, m.now) }) },
			"data":   func(*rapid.T) { m.onLead(func(l *lead) { m.r.data(l, []byte{1}, m.now) }) },
			"end":    func(*rapid.T) { m.onLead(m.end) },
			"ending": func(*rapid.T) { m.onLead(m.ending) },
			"invalidate": func(*rapid.T) {
				m.floor++
				for _, f := range m.r.flights {
					m.r.slow(f, m.now)
				}
				m.hear()
			},
			"resume": func(*rapid.T) { m.resume() },
			"time": func(t *rapid.T) {
				m.now += rapid.Int64Range(0, 2*int64(leadUsually)).Draw(t, "passes")
				for _, f := range m.r.flights {
					m.r.slow(f, m.now)
				}
				m.r.prune(m.now)
				m.hear()
			},
		})
		m.t = t
		m.finish()
	})
}

type refereeMachine struct {
	t        *rapid.T
	r        *referee
	now      int64
	floor    uint64 // the least stamp that is valid
	resumed  uint64
	sessions []*session
	heard    map[*session]*heardOf
}

// heardOf is what a node makes of what it was sent.
type heardOf struct {
	waits, live bool
	leads       []uint64
	follows     uint64
}

func (m *refereeMachine) any() *session {
	if len(m.sessions) == 0 {
		m.t.Skip("nobody is there")
	}
	return m.sessions[rapid.IntRange(0, len(m.sessions)-1).Draw(m.t, "session")]
}

func (m *refereeMachine) join() {
	if len(m.sessions) > 8 {
		m.t.Skip("enough are there")
	}
	m.add(asked{key: Key{1}, early: rapid.IntRange(0, 4).Draw(m.t, "early") == 0}, true)
}

func (m *refereeMachine) add(ask asked, waits bool) {
	s := newSession(rapid.Bool().Draw(m.t, "self"))
	s.want(ask)
	h := &heardOf{waits: waits, live: rapid.Bool().Draw(m.t, "live"), leads: ask.leads}
	m.sessions = append(m.sessions, s)
	m.heard[s] = h
	m.r.join(s, h.waits, h.live, m.now)
	m.hear()
}

func (m *refereeMachine) resume() {
	if len(m.sessions) > 8 {
		m.t.Skip("enough are there")
	}
	m.resumed += 2
	m.add(asked{key: Key{1}, leads: []uint64{1<<40 + m.resumed, 1<<40 + m.resumed + 1}}, rapid.Bool().Draw(m.t, "waits"))
}

// wants: more requests come to a node, or all leave.
func (m *refereeMachine) wants() {
	s := m.any()
	h := m.heard[s]
	if s.flight == nil {
		m.t.Skip("it was answered at once")
	}
	h.waits, h.live = rapid.Bool().Draw(m.t, "waits"), rapid.Bool().Draw(m.t, "live")
	if !h.live {
		h.follows = 0
	}
	m.r.wants(s, h.waits, h.live, m.now)
	m.hear()
}

func (m *refereeMachine) leave() {
	s := m.any()
	m.r.leave(s, m.now)
	m.sessions = slices.DeleteFunc(m.sessions, func(o *session) bool { return o == s })
	delete(m.heard, s)
	m.hear()
}

func (m *refereeMachine) leads() (all []*lead) {
	for _, s := range m.sessions {
		for _, token := range m.heard[s].leads {
			if l := s.of(token); l != nil {
				all = append(all, l)
			}
		}
	}
	return all
}

func (m *refereeMachine) onLead(do func(*lead)) {
	all := m.leads()
	if len(all) == 0 {
		m.t.Skip("nobody leads")
	}
	do(all[rapid.IntRange(0, len(all)-1).Draw(m.t, "lead")])
	m.hear()
}

func (m *refereeMachine) end(l *lead) {
	switch rapid.IntRange(0, 6).Draw(m.t, "how") {
	case 0:
		m.r.done(l, &Entry{}, true, m.now)
	case 1:
		m.r.unshareable(l, true, m.now)
	case 2:
		m.r.failed(l, true, true, Failure{Status: 500}, handFailed, m.now)
	case 3:
		m.r.failed(l, false, false, Failure{}, handGivenUp, m.now)
	case 4:
		m.r.failed(l, true, false, Failure{Status: statusBroken}, handBroken, m.now)
	case 5:
		m.r.abandoned(l, &up{unasked: true}, m.now)
	case 6:
		m.r.abandoned(l, &up{invalid: true}, m.now)
	}
}

// ending says that the last word of a lead is on its way.
func (m *refereeMachine) ending(l *lead) {
	m.r.ending(Key{1}, l.token, rapid.Bool().Draw(m.t, "over"), rapid.Bool().Draw(m.t, "passes"), m.now)
}

// hear takes what was sent.
func (m *refereeMachine) hear() {
	for _, s := range m.sessions {
		h := m.heard[s]
		out := s.out
		s.out = nil
		for _, d := range out {
			switch d.kind {
			case downLead:
				if !h.waits {
					m.t.Fatal("one that does not wait is given the lead")
				}
				h.waits = false
				h.leads = append(h.leads, d.token)
			case downOthers:
				if s.of(d.token) == nil && !slices.Contains(h.leads, d.token) {
					m.t.Fatal("others, of an unknown lead")
				}
			case downBegin:
				if !h.live || h.follows != 0 || slices.Contains(h.leads, d.token) {
					m.t.Fatal("a stream for one that wants none, or has one, or writes it")
				}
				for _, l := range s.flight.leads {
					if l.token == d.token && (l.about != d.about || d.about.Stamp < m.floor || l.ending) {
						m.t.Fatal("a stream that was invalidated, or has ended, for one that has not got it yet")
					}
				}
				h.follows = d.token
			case downData, downEnd:
				if h.follows != d.token {
					m.t.Fatal("bytes of another stream")
				}
				if d.kind == downEnd {
					h.follows = 0
				}
			case downHit, downFailed, downPass, downBusy, downAgain:
				if !h.waits {
					m.t.Fatalf("answer %d for one that does not wait", d.kind)
				}
				h.waits = false
			}
		}
	}
}

func (m *refereeMachine) check() {
	sessions := 0
	for _, s := range m.sessions {
		if s.flight != nil {
			sessions++
		}
	}
	if sessions != m.r.sessions {
		m.t.Fatalf("%d sessions are counted, not %d", m.r.sessions, sessions)
	}
	for k, f := range m.r.flights {
		if err := f.wrong(k); err != "" {
			m.t.Fatal(err)
		}
	}
}

// wrong is what must not be: one lead at most has the lock, and where somebody waits one does.
func (f *flight) wrong(k Key) string {
	switch {
	case f.over, f.key != k:
		return "a flight that is over is in the map"
	case f.lock != nil && !slices.Contains(f.leads, f.lock):
		return "the lock is held by a lead that has ended"
	case f.lock == nil && len(f.queue) > 0:
		return "somebody waits and nobody leads"
	case f.given > maxGiven || f.given < 0:
		return "too many leads were given"
	case f.live != nil && (f.live.tape == nil || !slices.Contains(f.leads, f.live)):
		return "a stream without a lead is followed"
	case len(f.sessions) == 0, len(f.leads) == 0:
		return "a flight without anybody"
	}
	for _, q := range f.queue {
		if !q.queued || !q.waits || q.flight != f || !slices.Contains(f.sessions, q) {
			return "a session in the queue does not wait"
		}
	}
	for _, l := range f.leads {
		if l.by.flight != f || !slices.Contains(f.sessions, l.by) {
			return "a lead of nobody"
		}
	}
	return ""
}

// finish: all who lead give up, one after the other, and nobody waits any more.
func (m *refereeMachine) finish() {
	for range 1000 {
		all := m.leads()
		if len(all) == 0 {
			break
		}
		m.r.failed(all[0], false, false, Failure{}, handGivenUp, m.now)
		m.hear()
	}
	for _, s := range m.sessions {
		if h := m.heard[s]; h.waits || h.follows != 0 {
			m.t.Fatalf("a session was forgotten: %+v", h)
		}
	}
	for len(m.sessions) > 0 {
		s := m.sessions[0]
		m.sessions = m.sessions[1:]
		m.r.leave(s, m.now)
	}
	if held := m.r.room.held.Load(); len(m.r.flights) > 0 || m.r.sessions != 0 || held != 0 {
		m.t.Fatalf("%d flights, %d sessions, %d bytes are left", len(m.r.flights), m.r.sessions, held)
	}
}
