package upstream

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"
)

// ErrLost is why a request ended whose endpoint went down, was ejected or failed several
// times in a row before it brought a byte.
var ErrLost = errors.New("the backend was given up before it answered")

// maxDrains bounds the names that Drain takes.
const maxDrains = 4 * maxBackends

// tend lets pauses end and judges outliers, until ctx ends.
func (p *Pool) tend(ctx context.Context) {
	timer := time.NewTimer(judgeEvery)
	defer timer.Stop()
	judged := p.now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-p.retend:
		}
		p.mu.Lock()
		now := p.now()
		due := p.settleLocked(now)
		if now-judged >= int64(judgeEvery) {
			judged = now
			p.judgeLocked(now)
		}
		p.mu.Unlock()
		timer.Reset(max(min(time.Duration(due-now), time.Duration(judged+int64(judgeEvery)-now)), time.Millisecond))
	}
}

// tendSoon has tend look at what is due anew.
func (p *Pool) tendSoon() {
	select {
	case p.retend <- struct{}{}:
	default:
	}
}

// settleLocked ends what is over and says when to come again.
func (p *Pool) settleLocked(now int64) (due int64) {
	due = now + int64(judgeEvery)
	changed := false
	for _, b := range p.order {
		for _, e := range b.endpoints {
			changed = e.v.settle(now) || changed
			if t := e.v.due(); t > 0 {
				due = min(due, t)
			}
		}
	}
	if changed {
		p.changedLocked()
	}
	return due
}

// judgeLocked looks for outliers among those that answer for the same model.
func (p *Pool) judgeLocked(now int64) {
	var all []*vitals
	var at []*endpoint
	byModel := map[string][]int{} // bounded by the policy
	for _, b := range p.order {
		var own []int
		for _, e := range b.endpoints {
			e.lookAtWaiting()
			own = append(own, len(all))
			all, at = append(all, &e.v), append(at, e)
		}
		for _, m := range b.cfg.Serves {
			byModel[m] = append(byModel[m], own...)
		}
		if len(b.cfg.Serves) == 0 {
			byModel["@"+b.cfg.Name] = own // no model's name: those have no place for it in the policy
		}
	}
	groups := make([][]int, 0, len(byModel))
	for _, g := range byModel {
		if len(g) > 1 {
			groups = append(groups, g)
		}
	}
	out := judge(now, all, groups)
	for _, i := range out {
		e := at[i]
		e.lastError = "its peers do much better"
		p.cfg.Logger.Warn("backend is ejected: its peers do much better", "backend", e.id,
			"first_byte", time.Duration(e.v.typical()).String(), "pause", time.Duration(e.v.ejectedUntil-now).String())
		p.lostLocked(e, p.budget.left(now, p.fullBudgetLocked()))
	}
	if len(out) > 0 {
		p.changedLocked()
		p.tendSoon()
	}
}

// lookAtWaiting tells e's vitals of the streams that have had no byte yet.
func (e *endpoint) lookAtWaiting() {
	v := &e.v
	v.waiting, v.oldest, v.heard = 0, 0, e.heard.Load()
	for s := e.held; s != nil; s = s.next {
		if s.open && !s.begun && s.stream {
			if v.waiting++; v.waiting == 1 || s.sentAt < v.oldest {
				v.oldest = s.sentAt
			}
		}
	}
}

// lostLocked ends requests to e that may move to another endpoint and have no byte yet,
// most of them at the most: what finds no place in the retry budget had better wait on.
func (p *Pool) lostLocked(e *endpoint, most int) {
	close(e.lost)
	e.lost = make(chan struct{})
	for s := e.held; s != nil && most > 0; s = s.next {
		if s.open && !s.begun && s.movable {
			s.cancel(ErrLost)
			most--
		}
	}
}

// beganLocked notes the first byte of the answer to s, if it is a good answer.
func (p *Pool) beganLocked(now int64, s *Slot, good bool) {
	s.begun = true
	if !good || s.done {
		return
	}
	wait := int64(-1)
	if s.stream {
		wait = now - s.sentAt
	}
	was := s.e.v.breaker.state
	s.gen = s.e.v.began(now, s.gen, wait)
	if was != s.e.v.breaker.state {
		p.cfg.Logger.Info("backend's breaker closed", "backend", s.e.id)
		p.changedLocked()
	}
}

// endLocked notes what the request of s came to; only the first word counts.
func (p *Pool) endLocked(now int64, s *Slot, what verdict) {
	if s.done {
		return
	}
	s.done = true
	e := s.e
	tried := e.v.breaker.state == BreakerHalfOpen
	opened, lost := e.v.end(now, s.gen, what)
	if opened {
		p.cfg.Logger.Warn("backend's breaker opened", "backend", e.id, "pause", time.Duration(e.v.breaker.until-now).String(), "err", e.lastError)
		p.tendSoon()
	}
	if lost {
		p.lostLocked(e, p.inFlight)
	}
	if opened || tried { // a half-open one takes another
		p.changedLocked()
	}
}

// pushLocked leaves e alone for as long as it asked.
func (p *Pool) pushLocked(now int64, e *endpoint, wait time.Duration) {
	before := e.v.paused(now)
	e.v.push(now, wait)
	if !before {
		p.cfg.Logger.Info("backend asked to be left alone", "backend", e.id, "pause", time.Duration(e.v.pausedUntil-now).String())
		p.changedLocked()
	}
	p.tendSoon()
}

// Drain makes names the backends and endpoints that take no new request; those in flight
// finish, and health is followed as ever. It replaces what an earlier call named. Names
// that nothing bears count once something does; beyond 4,096 names they are left out.
func (p *Pool) Drain(names []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drains = slices.Clone(names[:min(len(names), maxDrains)])
	for _, b := range p.order {
		for _, e := range b.endpoints {
			e.v.drained = p.drainedLocked(e)
		}
	}
	p.changedLocked()
}

func (p *Pool) drainedLocked(e *endpoint) bool {
	name, _, _ := strings.Cut(e.id, "@")
	return slices.Contains(p.drains, name) || slices.Contains(p.drains, e.id)
}

// MayRetry takes one attempt from the pool's retry budget: a fifth of the requests and
// three a second, up to a hundred and as many as are in flight. It is to be asked before
// a request is sent to another endpoint, so that trouble does not multiply load.
func (p *Pool) MayRetry() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.budget.take(p.now(), p.fullBudgetLocked())
}

func (p *Pool) fullBudgetLocked() float64 { return float64(retryBurst + p.inFlight) }
