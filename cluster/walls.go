package cluster

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// wallsFor is how long what a member's wall clock was is taken for what it is.
const wallsFor = 5 * time.Second

// walls is how far the members' wall clocks are from the leader's. Each says with every request for
// a view lease what its clock shows; what the request took on its way counts against it, a few
// milliseconds. Its methods may be called concurrently.
type walls struct {
	mu   sync.Mutex
	seen map[uint64]wall // by incarnation
}

type wall struct {
	name  string
	ahead int64 // ns of the leader's
	at    int64 // when that was seen, by the leader's monotonic clock
}

// note takes a member's reading, and says how far it is ahead of the voters' median: of those heard
// of lately, at least half of all voters. now is monotonic, leader this process's own wall clock.
func (w *walls) note(now int64, name string, incarnation uint64, reading, leader int64, voters []string) (ahead int64, known bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.seen == nil {
		w.seen = map[uint64]wall{}
	}
	for id, s := range w.seen {
		if now-s.at > int64(wallsFor) || s.name == name && id != incarnation {
			delete(w.seen, id)
		}
	}
	if len(w.seen) >= MaxMembers {
		return 0, false
	}
	mine := reading - leader
	w.seen[incarnation] = wall{name, mine, now}
	var heard []int64
	for _, s := range w.seen {
		if slices.Contains(voters, s.name) {
			heard = append(heard, s.ahead)
		}
	}
	if 2*len(heard) <= len(voters) {
		return 0, false
	}
	slices.Sort(heard)
	return mine - (heard[(len(heard)-1)/2]+heard[len(heard)/2])/2, true
}

// wallTrip is how long a request for a view lease may have been on its way for what its answer says
// of the wall clock to count: one that waited for a connection shows an old reading.
const wallTrip = 200 * time.Millisecond

// wallOff is what the last answers said. The zero value: nothing yet.
type wallOff struct {
	mu    sync.Mutex // of those who note
	last  *time.Duration
	shown atomic.Pointer[time.Duration]
}

// note takes an answer. One proves nothing: of two the one nearer to 0 counts.
func (w *wallOff) note(ahead time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	shown := &ahead
	if w.last != nil && w.last.Abs() < ahead.Abs() {
		shown = w.last
	}
	w.last = &ahead
	w.shown.Store(shown)
}

// WallOff is by how much this node's wall clock was ahead of the median of the voters' when the
// leader answered last, or the time before if it was nearer then. Not known before there was an
// answer. It takes no lock.
func (c *Cluster) WallOff() (ahead time.Duration, known bool) {
	off := c.wallOff.shown.Load()
	if off == nil {
		return 0, false
	}
	return *off, true
}
