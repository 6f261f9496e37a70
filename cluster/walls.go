package cluster

import (
	"slices"
	"sync"
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

// WallOff is by how much this node's wall clock was ahead of the median of the voters' when the
// leader answered last; not known before it did.
func (c *Cluster) WallOff() (ahead time.Duration, known bool) {
	off := c.wallOff.Load()
	if off == nil {
		return 0, false
	}
	return *off, true
}
