// Package queue decides which request that waits for a slot of a bounded backend goes next, and how many
// may wait. It is the cluster's one queue: the node that schedules keeps a Scheduler, the others send it
// tickets and hold the bodies. DESIGN.md has the order, the bounds, and why they hold.
//
// It is a pure core: no goroutine, clock, lock or socket. Times are nanoseconds of one clock that does not
// go back, given as the first argument (an earlier one is taken as the latest that was seen). What it
// decides is soft state: a Grant is leave to try for a lease, never a slot.
package queue

import (
	"math/rand/v2"
	"time"
)

// Class is a request's class of service. The zero value is Interactive; an unknown one counts as BestEffort.
type Class uint8

// The classes, the most urgent first.
const (
	Interactive Class = iota
	Background
	BestEffort
	// Classes is how many there are.
	Classes = 3
)

// Reason says why a ticket was dropped.
type Reason uint8

// The reasons. QueueFull: there is no place for it, or it would wait far longer than it has patience.
// Expired: its patience is over. Evicted: it had a place, and somebody below its share needed one.
// NoBackend: it has no places, or policy took away the last of them.
const (
	QueueFull Reason = iota
	Expired
	Evicted
	NoBackend
	// Reasons is how many there are.
	Reasons = 4
)

// Bounds of what a caller may hand in.
const (
	// MaxPlaces is how many places of a ticket count; Join leaves out those behind.
	MaxPlaces = 16
	// MaxBackends is how many backends SetBackends takes; it leaves out those behind.
	MaxBackends = 4096
	// MaxNodes is how many nodes may have tickets or slots; those that come later get QueueFull until one is Gone.
	MaxNodes = 1024
)

// String gives the words that headers and metrics show: queue_full, ttl_expired, evicted, no_backend.
func (r Reason) String() string {
	switch r {
	case QueueFull:
		return "queue_full"
	case Expired:
		return "ttl_expired"
	case Evicted:
		return "evicted"
	case NoBackend:
		return "no_backend"
	}
	return "unknown"
}

// String gives the words that policies and metrics show: interactive, background, best_effort.
func (c Class) String() string {
	switch c {
	case Interactive:
		return "interactive"
	case Background:
		return "background"
	case BestEffort:
		return "best_effort"
	}
	return "unknown"
}

// Place is a backend where a ticket may go.
type Place struct {
	// Backend is the ID of one endpoint.
	Backend string
	// Cost is what the request occupies there, in slots. Below 1 counts as 1; more than the backend
	// has counts as all that it has.
	Cost int64
}

// Ticket stands for a request that waits on some node. Join copies what it needs.
type Ticket struct {
	// Node and ID name the ticket: a node's incarnation, and a number that it gives once.
	Node, ID uint64
	Tenant   string
	Class    Class
	// Work is the request's estimated tokens, in and out: beside the mean it says how long slots are held.
	Work int64
	// Bytes is what the node keeps for it; it counts towards Config.MaxBytes.
	Bytes int64
	// Waited is how long the request has waited already, elsewhere: its age in the order. A ticket
	// that has waited has had a place: only the bounds in bytes and of Config.Tickets refuse it.
	Waited time.Duration
	// Refused: it was refused for want of room before, at other backends, and counts there as work that was offered.
	Refused bool
	// Patience is how long it may wait from now on. It is never granted afterwards.
	Patience time.Duration
	// Places are where it may go, by preference. Backends marked Overflow are used only where no other
	// of them has room, wherever they stand.
	Places []Place
}

// Backend is one endpoint as policy and learner know it.
type Backend struct {
	ID string
	// Slots is the most that may ever be in use; below 1 counts as 1.
	Slots int64
	// Limit is the learnt part of them; below 0 there is none. A backend with nothing in use admits one
	// request whatever its limit.
	Limit int64
	// Stale says that Limit comes from old measurements; it is shown in Look, nothing more.
	Stale bool
	// Overflow backends are used only where no other place of a ticket has room.
	Overflow bool
	// SlotTime is for how long a request holds its slots, times those, as another queue has measured it: what counts until this one
	// has measured enough. 0: not known.
	SlotTime time.Duration
}

// Config is what policy says. The zero value means the defaults.
type Config struct {
	// TargetWait bounds the queue: as many places as are served in this time (default 2 s).
	TargetWait time.Duration
	// MaxBytes bounds the sum of Ticket.Bytes of those that wait or are granted (default 256 MiB).
	MaxBytes int64
	// Weights are the classes' parts of slot-time while they wait (default 75, 22, 3). One below 1 counts as 1.
	Weights [Classes]int64
	// Tickets is the hard bound of those that wait or are granted (default 65,536).
	Tickets int
	// Rand spreads RetryAfter by ±25 %; nil: it is not spread. The scheduler uses it alone.
	Rand *rand.Rand
}

// Grant is leave to try for Cost slots of Backend. It holds the room for them until Started, Miss,
// Leave or Gone tells how it went, at most GrantTimeout.
type Grant struct {
	Node, ID uint64
	Backend  string
	Cost     int64
}

// GrantTimeout is how long a grant stays without an answer. Afterwards its room is given to others and
// the ticket dropped as Expired.
const GrantTimeout = 10 * time.Second

// Drop says that a ticket is gone, and after what time it is worth coming again.
type Drop struct {
	Node, ID   uint64
	Reason     Reason
	RetryAfter time.Duration
}

// Output collects what calls decide, in order. Calls append; the caller takes what is there and calls
// Reset, so that nothing is allocated.
type Output struct {
	Grants []Grant
	Drops  []Drop
}

// Reset empties o and keeps its memory.
func (o *Output) Reset() {
	o.Grants, o.Drops = o.Grants[:0], o.Drops[:0]
}

// Stats is a picture of the queue. It shares no memory with the scheduler.
type Stats struct {
	// Waiting counts tickets without a grant, Granted those whose grant is unanswered.
	Waiting        int
	WaitingByClass [Classes]int
	Granted        int
	// Bytes are of both kinds of tickets.
	Bytes int64
	// Tenants counts the pairs of tenant and class that wait.
	Tenants int
	// Backends are those of SetBackends, by ID.
	Backends []BackendStats
}

// BackendStats is a picture of one backend's queue.
type BackendStats struct {
	ID string
	// Waiting counts tickets that may go here. Those with several places are counted at each.
	Waiting        int
	WaitingByClass [Classes]int
	// Places is how many may wait for this backend alone: Rate × TargetWait, at least 1; twice Slots
	// before the rate is known. A ticket with several places takes a part of each, and the places of
	// its backends together are the bound. One of each class may always wait.
	Places int
	// InUse is what nodes say that they use, Granted what is on offer besides, in slots.
	InUse, Granted, Limit, Slots int64
	// Contended: something waits here, or did within the last 100 ms. Limited: the learnt limit is below Slots.
	Contended, Limited bool
	Stale              bool
	// Pressure is the smoothed part of the places that is taken (time constant 1 s): at least 1 while
	// tickets are refused or evicted, 0 when nothing waits.
	Pressure float64
	// Rate is what the backend can serve with every slot of its limit in use, in requests a second;
	// 0 before anything is known.
	Rate float64
	// Drain is how long those that wait will take.
	Drain time.Duration
	// Desired is how many backends like this one would do all the work that is offered to it, dropped
	// tickets included: the sum over a model's backends is the replicas that it needs.
	Desired float64
}
