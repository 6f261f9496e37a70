// Package dispatch brings requests that wait to slots that are free, across the cluster: the shell round
// package queue. Each node has a Dispatcher. One of them, on the node that owns the slots' partition in
// the present view, keeps the queue; the others send it tickets. DESIGN.md has the protocol, what it
// costs, and how it fails.
//
// What it says is soft state. A slot is held by a lease (Slots), or not at all.
package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"headgate/proxy/capacity"
	"headgate/proxy/queue"
)

// Slots are the leases of backends' slots. Its methods are called concurrently.
type Slots interface {
	// Hold holds cost slots of a backend, or says false. With ask it may ask their owner, and wait for as
	// long as that takes, a part of a second at most; without, it holds only what this node's leases
	// cover, takes no lock and waits for nothing.
	Hold(ctx context.Context, backend string, cost int64, ask bool) (Held, bool)
	// Yield gives the slots of a backend that this node's leases have and nobody here uses back to their
	// owner at once. It waits for nothing.
	Yield(backend string)
}

// Held is slots that are held.
type Held interface {
	// Release frees them. It is called once. With yield others wait for them: what is free is not to stay in
	// this node's lease, as by Slots.Yield.
	Release(yield bool)
}

// Scheduling says who keeps the queue. Where Address is "" and Self false, nobody does.
type Scheduling struct {
	// Address is what Config.Client takes; "" where Self.
	Address string
	// Self: this process does.
	Self bool
	// Members is how many nodes the view has; 0 is unknown: the last that was known, at least 1, goes on to count.
	Members int
}

// Learner learns how many of a backend's slots are worth using. It is asked on the node that schedules, one call
// at a time. *capacity.Fleet is one.
type Learner interface {
	Observe(now int64, o capacity.Observation)
	Limit(now int64, backend string) (limit int64, stale bool)
	// Seed tells what another node's last State had as limit.
	Seed(backend string, limit int64)
}

// Config is what a Dispatcher is made from. Self, Where, Slots and Now are needed, in a cluster Client, too.
type Config struct {
	// Self is this process's incarnation.
	Self uint64
	// Where says who keeps the queue now. It is cheap and does not block; Moved says that it may have changed.
	Where func() Scheduling
	// Client is the connection to the process at an address of Where.
	Client func(address string) (grpc.ClientConnInterface, error)
	// Peer refuses a call that speaks for a process of another node than the one that it comes from. nil:
	// everybody is believed.
	Peer func(ctx context.Context, incarnation uint64) error
	// Slots are the leases.
	Slots Slots
	// Learner may be nil: then the policy's slots are used.
	Learner Learner
	// Placed is told what went where at other nodes. It must not block. nil: nobody is.
	Placed func(p Placement)
	// Alone is after how long without a scheduler within reach this node uses its part of the slots, slots/Members and
	// at least one, by itself, without leases; 0: 10 s. Below 0 it never does.
	Alone time.Duration
	// Now is a clock that does not go back, in ns.
	Now func() int64
	// Rand spreads waits; nil: the shared source. It is used by the Dispatcher alone.
	Rand       *rand.Rand
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Validate names the field and the remedy.
func (c *Config) Validate() error {
	switch {
	case c.Self == 0:
		return errors.New("dispatch: Self is 0; give the process's incarnation")
	case c.Where == nil:
		return errors.New("dispatch: Where is nil; say who schedules")
	case c.Slots == nil:
		return errors.New("dispatch: Slots is nil; give the leases")
	case c.Now == nil:
		return errors.New("dispatch: Now is nil; give a clock")
	}
	return nil
}

// Placement says that an endpoint has a prompt's beginning in its cache now, both by their hashes.
type Placement struct {
	Prompt   uint64
	Endpoint uint32
}

// Ticket is a request that wants a slot. It is the caller's, and not changed before Acquire returns.
type Ticket struct {
	Tenant string
	Class  queue.Class
	// Work is the request's estimated tokens, Bytes what this node keeps for it while it waits.
	Work, Bytes int64
	// Waited is how long it has waited already, where it comes again. Patience is how long it may wait from now on.
	Waited, Patience time.Duration
	// Refused: it was refused for want of room before, at other backends.
	Refused bool
	// Places are where it may go, by preference; at least one, at most queue.MaxPlaces.
	Places []queue.Place
	// Watch is called in Acquire's goroutine when the wait begins, and again whenever the channel that it
	// returned is closed. With moved Acquire gives the place up and returns ErrMoved: the caller comes
	// again with other Places, and Waited. nil: never.
	Watch func() (changed <-chan struct{}, moved bool)
	// Tick is called in Acquire's goroutine each TickEvery while it waits; 0: never.
	Tick      func()
	TickEvery time.Duration
}

// ErrMoved is what Acquire returns where Ticket.Watch said so.
var ErrMoved = errors.New("dispatch: the places of the ticket have changed")

// Dropped is the error of a request that is not to wait, or not any longer.
type Dropped struct {
	Reason queue.Reason
	// RetryAfter is when it is worth coming again, by what waits now.
	RetryAfter time.Duration
}

// Error see error.
func (d *Dropped) Error() string {
	return fmt.Sprintf("dispatch: %s; retry after %v", d.Reason, d.RetryAfter)
}
