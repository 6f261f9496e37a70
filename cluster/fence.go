package cluster

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"headgate/cluster/ledger"
)

// The times of the fence. Each is measured on one process's own clock; the factors make
// up for clocks that run up to 1 % off true time, either way (DESIGN.md has the proof).
const (
	// KeepEvery is how often to ask for a view lease, beside at once on a new view.
	KeepEvery = 100 * time.Millisecond
	// KeepRetry is when an unanswered question is asked afresh, of any voter.
	KeepRetry = 50 * time.Millisecond

	// TakeoverWait is how long after applying a view nobody can still act on the view before: what
	// a view lease may last, on a clock that runs slow, and a margin.
	TakeoverWait = leaseFor*102/100 + 50*time.Millisecond

	leaseFor    = 1 * time.Second
	leaseCounts = leaseFor * 98 / 100 // from the send of the request

	never = int64(math.MaxInt64)
)

// Self is the process a fence is for.
type Self struct {
	Name        string
	Incarnation uint64
}

// FenceOptions has nothing to set: it is where the package's tests break the rules to
// show that they are missed.
type FenceOptions struct {
	ring               func(*ledger.View) *Ring // a cache; nil: NewRing
	noWait             bool                     // breaks V4
	ignoreIncarnations bool                     // breaks V1
	bridgeGaps         bool                     // takes a skipped view for one that changed nothing
}

// Fence says what one process may grant for. At most one process of a cluster has
// MayGrant for a partition at any instant, as long as each is driven the way the
// methods say; DESIGN.md proves it. It holds nothing that needs closing.
//
// Times are nanoseconds of a clock of this process that counts suspend and never goes
// back. All methods may be called from any goroutine; MayGrant, Left, Valid, Until and
// Ring take no lock and allocate nothing.
type Fence struct {
	self Self
	opts FenceOptions

	mu     sync.Mutex // held by those who publish
	rights atomic.Pointer[rights]
}

// rights is all that a fence knows. It never changes: it is replaced.
type rights struct {
	epoch    uint64 // of the view last stepped to; 0: none yet
	ring     *Ring
	parts    []right // by partition
	member   right   // of the membership itself
	joined   bool    // it was a member once
	replaced bool

	leaseEpoch uint64 // what the lease was granted for
	deadline   int64  // when it ends; 0: there was none
	lapses     uint64
}

// right says that this process owned something in every view from since on, each
// stepped to after the one before it, and that its predecessor's rights have ended at
// start. A start of never: it does not own it.
type right struct {
	start int64
	since uint64
}

// NewFence returns a fence that grants nothing yet.
func NewFence(self Self, opts FenceOptions) *Fence {
	if opts.ring == nil {
		opts.ring = NewRing
	}
	f := &Fence{self: self, opts: opts}
	f.rights.Store(&rights{ring: &Ring{}, member: right{start: never}})
	return f
}

// Step goes on to a committed view. The caller reads now after it has the view in
// hand, and hands in the views that its replica of the ledger applies, in their order.
// A view that was skipped (by a snapshot, or for want of room) is seen by its number:
// what was owned before it counts as owned afresh. A view not newer than the last is
// ignored.
func (f *Fence) Step(now int64, v *ledger.View) {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := f.rights.Load()
	if v == nil || v.Epoch <= old.epoch {
		return
	}
	next := *old
	next.epoch = v.Epoch
	next.ring = f.opts.ring(v)
	next.parts = make([]right, len(next.ring.owners))

	me := f.find(next.ring)
	next.joined = old.joined || me >= 0
	next.replaced = old.replaced || old.joined && me < 0 && hasName(next.ring, f.self.Name)
	// Another partition count makes other partitions of the same numbers.
	follows := (v.Epoch == old.epoch+1 || f.opts.bridgeGaps) && len(old.parts) == len(next.parts)
	fresh := right{start: now + int64(TakeoverWait), since: v.Epoch}
	if v.Epoch == 1 || f.opts.noWait {
		fresh.start = now // V5: before the first view nobody can have granted
	}
	for p := range next.parts {
		switch {
		case me < 0 || int(next.ring.owners[p]) != me:
			next.parts[p].start = never
		case follows && old.parts[p].start != never:
			next.parts[p] = old.parts[p]
		default:
			next.parts[p] = fresh
		}
	}
	switch {
	case me < 0:
		next.member = right{start: never}
	case !follows || old.member.start == never:
		next.member = right{start: now, since: v.Epoch}
	}
	f.rights.Store(&next)
}

// find is this process's place in a ring; -1: it has none.
func (f *Fence) find(r *Ring) int {
	for i := range r.members {
		m := &r.members[i]
		if m.Name == f.self.Name && (m.Incarnation == f.self.Incarnation || f.opts.ignoreIncarnations) {
			return i
		}
	}
	return -1
}

func hasName(r *Ring, name string) bool {
	for i := range r.members {
		if r.members[i].Name == name {
			return true
		}
	}
	return false
}

// Want is the epoch to ask a lease for: that of the view last stepped to, 0 before the
// first. A process that is no member asks, too: it is how it says that it follows the
// ledger and wants to join. Not ok: another process has taken this name, for good, and
// there is nothing to ask for.
func (f *Fence) Want() (epoch uint64, ok bool) {
	r := f.rights.Load()
	return r.epoch, !r.replaced
}

// Member says whether this process is a member of the view last stepped to.
func (f *Fence) Member() bool { return f.rights.Load().member.start != never }

// Replaced says that this process was a member and that the ledger has another
// incarnation of its name now. That never ends: the process should.
func (f *Fence) Replaced() bool { return f.rights.Load().replaced }

// Granted notes a lease for epoch. The caller read sent before it sent the very
// request that was answered, and now after the answer came. It says whether the lease
// was of any use: one that is for an older epoch than the lease held, or that ends
// before it, or has ended, is not.
func (f *Fence) Granted(sent, now int64, epoch uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := f.rights.Load()
	deadline := sent + int64(leaseCounts)
	if epoch == 0 || epoch > old.epoch || epoch < old.leaseEpoch || now >= deadline ||
		epoch == old.leaseEpoch && deadline <= old.deadline {
		return false
	}
	next := *old
	next.lapses = old.lapsesAt(now)
	next.leaseEpoch, next.deadline = epoch, deadline
	f.rights.Store(&next)
	return true
}

// MayGrant says whether this process may grant for a partition at now, which the caller
// read before the call. It is of that instant that it speaks, however late the answer is
// acted upon. The partition is one of Ring's.
func (f *Fence) MayGrant(now int64, partition uint32) bool {
	return f.Left(now, partition) > 0
}

// Left is for how many nanoseconds more this process may grant for a partition, unless
// it steps to a view that takes it away; 0: not at all. What it lends for longer would
// outlive its right to lend.
func (f *Fence) Left(now int64, partition uint32) int64 {
	r := f.rights.Load()
	if uint64(partition) >= uint64(len(r.parts)) {
		return 0
	}
	return r.left(now, &r.parts[partition])
}

func (r *rights) left(now int64, x *right) int64 {
	if now < x.start || now >= r.deadline || x.since > r.leaseEpoch {
		return 0
	}
	return r.deadline - now
}

// Valid says whether this process is a member and holds a lease: for the current view,
// or for an older one since which it has been a member throughout.
func (f *Fence) Valid(now int64) bool {
	r := f.rights.Load()
	return r.left(now, &r.member) > 0
}

// Lease is for how many nanoseconds more Valid holds unless a lease comes; 0: it does not, or a view
// after epoch was stepped to. Whoever has not gone on to that view himself must not act on its lease:
// what he goes by may be another's.
func (f *Fence) Lease(now int64, epoch uint64) int64 {
	r := f.rights.Load()
	if r.epoch > epoch {
		return 0
	}
	return r.left(now, &r.member)
}

// Until is when Valid ends unless a lease comes; 0: it has ended for want of
// membership, or never began.
func (f *Fence) Until() int64 {
	r := f.rights.Load()
	if r.member.start == never || r.member.since > r.leaseEpoch {
		return 0
	}
	return r.deadline
}

// Epoch is that of the view last stepped to; 0: none yet.
func (f *Fence) Epoch() uint64 { return f.rights.Load().epoch }

// Ring is that of the view last stepped to; before the first, one that owns nothing.
func (f *Fence) Ring() *Ring { return f.rights.Load().ring }

// Started ends the wait of partitions early: their owner of before has stopped and has
// handed them over to this process in epoch. It counts those that were waiting since
// that epoch; the others stay as they are.
func (f *Fence) Started(now int64, epoch uint64, partitions ...uint32) (started int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := *f.rights.Load()
	parts := append([]right(nil), next.parts...)
	for _, p := range partitions {
		if uint64(p) < uint64(len(parts)) && parts[p].since == epoch && now < parts[p].start && parts[p].start != never {
			parts[p].start = now
			started++
		}
	}
	if started > 0 {
		next.parts = parts
		f.rights.Store(&next)
	}
	return started
}

// Waiting counts the partitions that this process owns and may not grant for yet
// because their owner of before might still.
func (f *Fence) Waiting(now int64) (partitions int) {
	for _, x := range f.rights.Load().parts {
		if now < x.start && x.start != never {
			partitions++
		}
	}
	return partitions
}

// Lapses counts how often a lease ran out before the next one came, the one that may
// be lapsing at now among them.
func (f *Fence) Lapses(now int64) uint64 { return f.rights.Load().lapsesAt(now) }

func (r *rights) lapsesAt(now int64) uint64 {
	if r.deadline != 0 && now >= r.deadline {
		return r.lapses + 1
	}
	return r.lapses
}
