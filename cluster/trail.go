package cluster

import (
	"sync"
	"time"
)

// lagAllowed is how far a member may be behind the leader's replica of the ledger and still get
// view leases: one that was sent nothing for so long does not follow.
const lagAllowed = 2 * time.Second

// reasonLags is why a request for a view lease of such a member is refused.
const reasonLags = "lags"

// trail is where the leader's replica has been of late. Its methods may be called
// concurrently; now is a reading of the process's clock in nanoseconds.
type trail struct {
	mu    sync.Mutex
	steps []step // of rising time and index; at most one for each note of the last lagAllowed
}

type step struct {
	at    int64
	index uint64
}

// note keeps that the replica has applied index. Where it went back, a restore made another
// ledger of it, and the trail begins anew.
func (t *trail) note(now int64, index uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.steps); n > 0 && t.steps[n-1].index == index {
		return
	} else if n > 0 && t.steps[n-1].index > index {
		t.steps = t.steps[:0]
	}
	t.drop(now)
	t.steps = append(t.steps, step{now, index})
}

// drop forgets the steps before the last one that is due; t.mu is held.
func (t *trail) drop(now int64) {
	last := 0
	for last+1 < len(t.steps) && now-t.steps[last+1].at >= int64(lagAllowed) {
		last++
	}
	t.steps = t.steps[:copy(t.steps, t.steps[last:])]
}

// due is what a member must have applied by now; 0 where that is not known.
func (t *trail) due(now int64) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(now)
	if len(t.steps) == 0 || now-t.steps[0].at < int64(lagAllowed) {
		return 0
	}
	return t.steps[0].index
}

// forget is for when the replica leads no more.
func (t *trail) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.steps = t.steps[:0]
}
