package queue

import "time"

// Scheduler is the queue and the room of every backend. It is not safe for concurrent use.
type Scheduler struct {
	cfg Config
}

// New returns a scheduler without backends.
func New(cfg Config) *Scheduler { return &Scheduler{cfg: cfg} }

// SetConfig replaces the policy. Tickets keep their places even where there are fewer now.
func (s *Scheduler) SetConfig(cfg Config) { s.cfg = cfg }

// SetBackends replaces the list of backends. Tickets lose the places that are gone; those that have none
// left are dropped as NoBackend. What nodes use of a backend that is gone is remembered while it lasts.
func (s *Scheduler) SetBackends(now int64, backends []Backend, out *Output) {}

// Join queues a ticket, or grants or drops it at once. A ticket of the same name that is there leaves first.
func (s *Scheduler) Join(now int64, t *Ticket, out *Output) {}

// Leave removes a ticket that waits or is granted; the room of its grant goes to others. An unknown one is ignored.
func (s *Scheduler) Leave(now int64, node, id uint64, out *Output) {}

// Used takes a node's own word on how many slots of a backend its requests occupy, absolute.
func (s *Scheduler) Used(now int64, node uint64, backend string, inUse int64, out *Output) {}

// Started ends a granted ticket: it holds its slots, which count as used by its node from now on, until
// the node's next Used says how many there are in all. So tell Started before the Used that includes it.
func (s *Scheduler) Started(now int64, node, id uint64) {}

// Miss says that the lease had no room for a granted ticket. It is back at its old place; that backend is
// left alone for a short while that grows with every miss in a row, and this ticket passed over there for longer.
func (s *Scheduler) Miss(now int64, node, id uint64, out *Output) {}

// Done tells that a request ended, granted or not, which held cost slots of backend for held: the rate is
// measured by it and the shares of class and tenant are corrected. It frees nothing: Used does.
func (s *Scheduler) Done(now int64, backend string, class Class, tenant string, cost int64, held time.Duration) {
}

// Gone forgets a node: its tickets, its grants and what it uses. It drops nothing, as nobody is there to be told.
func (s *Scheduler) Gone(now int64, node uint64, out *Output) {}

// Expire drops whose patience is over, ends pauses, and returns when it wants to be called next
// (math.MaxInt64: not before something changes). Other calls may make that sooner: call it after each batch.
func (s *Scheduler) Expire(now int64, out *Output) (next int64) { return 0 }

// Look tells how things stand.
func (s *Scheduler) Look(now int64) Stats { return Stats{} }
