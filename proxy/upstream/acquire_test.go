package upstream

// Acquire is Candidates and Hold in one, with each pool the only one that there is: a slot of the best that has less in
// flight here than its Slots.
func (p *Pool) Acquire(names, tried []string) (*Slot, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	var best Candidate
	var at *endpoint
	full := false
	err := p.eachLocked(now, names, tried, func(e *endpoint) {
		c := e.candidate(now)
		switch {
		case c.Bounded && c.InFlight >= c.Slots:
			full = true
		case at == nil || compareCandidates(c, best) < 0:
			best, at = c, e
		}
	})
	switch {
	case at != nil:
		return p.holdLocked(now, at, nil), nil
	case full:
		return nil, ErrSaturated
	}
	return nil, err
}
