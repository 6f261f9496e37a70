package cluster

import (
	"context"
	"sync"
	"time"

	"headgate/cluster/ledger"
)

// Why a view lease is refused, as KeepViewResponse.reason says it.
const (
	ReasonNotLeader = "not_leader"
	ReasonNotMember = "not_member"
	ReasonEpoch     = "epoch"
	ReasonNoBarrier = "no_barrier"
)

// The bounds of a Keeper.
const (
	barrierEvery   = 20 * time.Millisecond
	barrierTimeout = 500 * time.Millisecond // an answer later than a lease lasts is worth nothing
	maxBarriers    = 16                     // begun and unanswered
	maxKeepWaiting = 4096                   // requests
)

// Keep is the leader's decision on a view lease: name must be a member of the view as
// this incarnation, and have stepped to that very view. The view is that of the
// leader's own ledger, read after a barrier that began after the request came.
func Keep(view *ledger.View, name string, incarnation, epoch uint64) (granted bool, reason string) {
	if view == nil || !isMember(view, name, incarnation) {
		return false, ReasonNotMember
	}
	if view.Epoch != epoch {
		return false, ReasonEpoch
	}
	return true, ""
}

func isMember(v *ledger.View, name string, incarnation uint64) bool {
	for i := range v.Members {
		if v.Members[i].Name == name {
			return v.Members[i].Incarnation == incarnation
		}
	}
	return false
}

// Keeper answers requests for view leases on the node that leads. Requests share
// barriers, and none is answered by a barrier that began before it came: the first one
// begins a barrier at once, or 20 ms after the last began.
type Keeper struct {
	barrier func(context.Context) error
	view    func() *ledger.View

	ctx    context.Context // that of the barriers: theirs, not of one request
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu      sync.Mutex
	next    *keepRound // not begun yet, may be joined; nil: none
	began   time.Time  // when the last one did
	running int
	waiting int
	closed  bool
}

// keepRound is one barrier and those who wait for it.
type keepRound struct {
	scheduled bool // guarded by Keeper.mu
	done      chan struct{}
	view      *ledger.View // nil: no_barrier; written before done is closed
}

// NewKeeper returns a keeper. The barrier must succeed only if this node led when it
// was called and the node's ledger has applied everything committed before the call;
// view is then read from that ledger. Barriers may run at the same time. Close it.
func NewKeeper(barrier func(context.Context) error, view func() *ledger.View) *Keeper {
	k := &Keeper{barrier: barrier, view: view}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	return k
}

// Keep answers a request: it returns once a barrier that began after it was called has
// ended, or ctx has. Not granted says why: ReasonNoBarrier also where ctx ended, where too
// many wait, and after Close.
func (k *Keeper) Keep(ctx context.Context, name string, incarnation, epoch uint64) (granted bool, reason string) {
	round := k.join()
	if round == nil {
		return false, ReasonNoBarrier
	}
	defer k.leave()
	select {
	case <-round.done:
	case <-ctx.Done():
		return false, ReasonNoBarrier
	}
	if round.view == nil {
		return false, ReasonNoBarrier
	}
	return Keep(round.view, name, incarnation, epoch)
}

// join finds the round that has not begun yet, or makes it; nil: no more may wait.
func (k *Keeper) join() *keepRound {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed || k.waiting >= maxKeepWaiting {
		return nil
	}
	k.waiting++
	if k.next == nil {
		k.next = &keepRound{done: make(chan struct{})}
		k.schedule()
	}
	return k.next
}

func (k *Keeper) leave() {
	k.mu.Lock()
	k.waiting--
	k.mu.Unlock()
}

// schedule sees to it that the next round begins, in time. Its caller holds mu. With
// maxBarriers under way it is left to the first of them that ends.
func (k *Keeper) schedule() {
	round := k.next
	if round == nil || round.scheduled || k.running >= maxBarriers {
		return
	}
	if k.closed {
		k.next = nil
		close(round.done)
		return
	}
	k.running++
	round.scheduled = true
	wait := barrierEvery - time.Since(k.began)
	k.done.Go(func() { k.run(round, wait) })
}

// run waits, closes the round to those who come later, and only then begins its barrier.
func (k *Keeper) run(round *keepRound, wait time.Duration) {
	if wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-k.ctx.Done():
		}
	}
	k.mu.Lock()
	k.next, k.began = nil, time.Now()
	k.mu.Unlock()

	ctx, cancel := context.WithTimeout(k.ctx, barrierTimeout)
	defer cancel()
	if ctx.Err() == nil && k.barrier(ctx) == nil {
		round.view = k.view()
	}
	close(round.done)

	k.mu.Lock()
	k.running--
	k.schedule()
	k.mu.Unlock()
}

// Close refuses everybody and waits until no barrier is under way.
func (k *Keeper) Close() {
	k.mu.Lock()
	k.closed = true
	k.mu.Unlock()
	k.cancel()
	k.done.Wait()
}
