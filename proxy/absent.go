package proxy

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headgate/proxy/upstream"
)

const (
	absentFor = 30 * time.Second
	maxAbsent = 4096 // pairs of endpoint and model that are remembered
)

// absences are the models that endpoints say they do not have: the wrong one is loaded there, or under another name. For a while they
// are asked for them only where there is no other. The zero value has none. Its methods may be called concurrently.
type absences struct {
	some  atomic.Bool // there may be one
	mu    sync.Mutex
	until map[absence]time.Time
}

type absence struct{ endpoint, sought string }

// sought is what an endpoint may not have: the model, by the route's way to ask for it.
func (x *exchange) sought() string {
	if x.route == nil {
		return x.model.Name
	}
	return x.model.Name + "\x00" + x.route.name
}

// note remembers what an endpoint says.
func (a *absences) note(endpoint, sought string, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.until == nil {
		a.until = map[absence]time.Time{}
	}
	if len(a.until) < maxAbsent {
		a.until[absence{endpoint, sought}] = now.Add(absentFor)
	}
	a.some.Store(true)
}

// without leaves those out that do not have the model, unless none would be left. It may change cs.
func (a *absences) without(cs []upstream.Candidate, sought string, now time.Time) []upstream.Candidate {
	if !a.some.Load() {
		return cs
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for k, until := range a.until {
		if now.After(until) {
			delete(a.until, k)
		}
	}
	a.some.Store(len(a.until) > 0)
	lacks := func(c upstream.Candidate) bool {
		_, ok := a.until[absence{c.ID, sought}]
		return ok
	}
	if !slices.ContainsFunc(cs, func(c upstream.Candidate) bool { return !lacks(c) }) {
		return cs
	}
	return slices.DeleteFunc(cs, lacks)
}
