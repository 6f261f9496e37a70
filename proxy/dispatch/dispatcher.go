package dispatch

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"headgate/proxy/queue"
)

// Dispatcher is a node's part in the cluster's queue. Its methods may be called concurrently.
type Dispatcher struct {
	cfg   Config
	state atomic.Pointer[State]
}

// New returns a Dispatcher that knows no backends: call Apply, and Run.
func New(cfg Config) (*Dispatcher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	d := &Dispatcher{cfg: cfg}
	d.state.Store(&State{})
	return d, nil
}

// Register adds the service that other nodes send their tickets to, before the server serves.
func (d *Dispatcher) Register(*grpc.Server) {}

// Run speaks to the scheduler, or is it, until ctx ends. Tickets that still wait then are dropped as NoBackend. It returns
// when all that it started has ended. It is called once.
func (d *Dispatcher) Run(ctx context.Context) { <-ctx.Done() }

// Moved says that Config.Where may say something else now.
func (d *Dispatcher) Moved() {}

// Apply takes the policy's backends, those of all models, and the queue's config (its Rand is not used: Config.Rand is).
func (d *Dispatcher) Apply([]queue.Backend, queue.Config) {}

// Acquire waits until the request may run at one of its places, and holds slots there. It returns at once
// where a lease in hand covers that and nobody waits. The error is ErrMoved, a *Dropped, or the context's
// cause. Whatever ends the wait, its place is free at once.
func (d *Dispatcher) Acquire(context.Context, *Ticket) (*Grant, error) {
	return nil, &Dropped{Reason: queue.NoBackend}
}

// Waiting is how many requests of this node wait.
func (d *Dispatcher) Waiting() int { return 0 }

// State is how things stand in the cluster, by the scheduler's last word. It is never nil, does not change, and costs one
// atomic read.
func (d *Dispatcher) State() *State { return d.state.Load() }

// State is a picture of the cluster's queue. It never changes.
type State struct {
	// Backends are by endpoint ID, as the scheduler broadcast them: each 100 ms while anything waits or changes,
	// else each second.
	Backends map[string]queue.BackendStats
	// At is when that was, by Config.Now; 0: there is no word yet.
	At int64
	// Scheduler is the address of the node that keeps the queue, "self", or "" where nobody does.
	Scheduler string
	// Reachable: it answers. Alone: it has not for so long that this node goes by its own part of the slots.
	Reachable, Alone bool
}

// Age is how old the picture is at now.
func (s *State) Age(now int64) time.Duration { return time.Duration(max(0, now-s.At)) }

// Grant is a right to run one request, with the slots for it.
type Grant struct {
	Backend string
	Cost    int64
	// Queued is how long it was waited for in this Acquire; 0: not at all.
	Queued time.Duration
}

// Release frees the slots. Only the first call does anything.
func (g *Grant) Release() {}

// FirstByte says how long the backend took to the first byte of a stream.
func (g *Grant) FirstByte(time.Duration) {}

// Pushback says that the backend answered 429 and wants to be left alone for after.
func (g *Grant) Pushback(time.Duration) {}

// Failed says that the backend failed the request.
func (g *Grant) Failed() {}
