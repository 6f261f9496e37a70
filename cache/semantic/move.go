package semantic

import (
	"context"
	"slices"
	"time"

	pb "headgate/cache/semantic/semanticpb"
	"headgate/cache/threshold"
)

const (
	moveEntries = 256      // in one call
	moveBytes   = 4 << 20  // likewise, but for the last of them
	moveRate    = 32 << 20 // bytes a second
	moveFor     = 30 * time.Second
	// moveSoon is when what an owner did not take is offered again, doubling up to moveAgain: it may hear of the ring a
	// moment later.
	moveSoon  = 100 * time.Millisecond
	moveAgain = 5 * time.Second
	// handEvery is how often it is by who leaves.
	handEvery = 20 * time.Millisecond
	// moveRounds is how often a partition is gone through before the next has its turn: what changes under way is
	// sent again.
	moveRounds = 3
)

// Moved says that the ring changed: partitions that are not this node's any more go to their owners in the background,
// and are found here until an owner has them. It does not wait.
func (c *Cache) Moved() {
	select {
	case c.moved <- struct{}{}:
	default:
	}
}

// HandOver waits, after the ring went on without this node, until all that it holds is at the owners, or ctx or the Cache ends. It
// tells how many partitions are left here. Run must go on meanwhile.
func (c *Cache) HandOver(ctx context.Context) (left int) {
	tick := time.NewTicker(handEvery)
	defer tick.Stop()
	for {
		left = 0
		for _, p := range c.shard.held() {
			if c.owner(p.place.key) != "" {
				left++
			}
		}
		if left == 0 {
			return 0
		}
		c.Moved()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return left
		case <-c.ctx.Done():
			return left
		}
	}
}

// moveAll brings partitions to their owners whenever the ring has changed, until ctx ends. What an owner did not take is
// offered again.
func (c *Cache) moveAll(ctx context.Context) {
	again := time.NewTimer(0)
	again.Stop()
	defer again.Stop()
	pause := moveSoon
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.moved:
			pause = moveSoon
		case <-again.C:
		}
		if c.moveOut(ctx) {
			again.Reset(pause)
			pause = min(2*pause, moveAgain)
		}
	}
}

// moveOut goes through what is not this node's once. It tells whether something is left.
func (c *Cache) moveOut(ctx context.Context) (left bool) {
	for _, p := range c.shard.held() {
		address := c.owner(p.place.key)
		if address == "" {
			continue
		}
		if !c.movePartition(ctx, p, address) {
			left = true
		}
		if ctx.Err() != nil {
			return true
		}
	}
	return left
}

// movePartition brings one to its owner. It tells whether all of it is there.
func (c *Cache) movePartition(ctx context.Context, p *partition, address string) bool {
	most := c.shard.length(p)*moveRounds/moveEntries + moveRounds
	for range most {
		batch := c.shard.batch(p, c.cfg.Now())
		if len(batch) == 0 {
			return true
		}
		size, err := c.hand(ctx, address, p.place, batch)
		if err != nil {
			c.cfg.Logger.Debug("a partition did not reach its owner", "address", address, "error", err.Error())
			return false
		}
		c.shard.release(batch)
		pause := time.NewTimer(time.Duration(size) * time.Second / moveRate)
		select {
		case <-ctx.Done():
			pause.Stop()
			return false
		case <-pause.C:
		}
	}
	return c.shard.length(p) == 0
}

// hand gives some entries to their owner. What it acknowledged is its.
func (c *Cache) hand(ctx context.Context, address string, pl place, batch []handed) (size int, err error) {
	cl, err := c.client(address)
	if err != nil {
		return 0, err
	}
	bounded, cancel := context.WithTimeout(ctx, moveFor)
	defer cancel()
	stream, err := cl.Move(bounded)
	if err == nil {
		pol := c.shard.policyOf(pl.scope())
		m := &pb.MoveRequest{Place: pl.encode(), Policy: encodePolicy(&pol)}
		for i := range batch {
			m.Entry = batch[i].encode()
			size += batch[i].size()
			if err = stream.Send(m); err != nil {
				break
			}
			m = &pb.MoveRequest{}
		}
		if _, closed := stream.CloseAndRecv(); closed != nil || err == nil {
			err = closed // says why
		}
	}
	if ctx.Err() == nil {
		c.judge(address, answered(err))
	}
	return size, err
}

// handed is an entry on its way, as it was.
type handed struct {
	fresh
	e       *entry
	changed uint64
}

func (h *handed) size() int {
	return len(h.text) + 4*len(h.vector) + len(h.entry.Body) + len(h.obs) + 512
}

// held is the partitions that there are.
func (s *shard) held() []*partition {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*partition, 0, len(s.partitions))
	for _, p := range s.partitions {
		out = append(out, p)
	}
	return out
}

// length is the number of a partition's entries.
func (s *shard) length(p *partition) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(p.texts)
}

// policyOf is what a scope was last asked with.
func (s *shard) policyOf(k scopeKey) (p threshold.Policy) {
	s.mu.Lock()
	sc := s.scopes[k]
	s.mu.Unlock()
	if sc != nil {
		sc.mu.Lock()
		defer sc.mu.Unlock()
		p = sc.policy
	}
	return p
}

// batch is some of a partition's entries, as they are now.
func (s *shard) batch(p *partition, now int64) []handed {
	s.mu.Lock()
	var some []*entry
	var hits [][]threshold.Cell
	var classes []uint64
	bytes := int64(0)
	for _, e := range p.texts {
		if e.dies <= now {
			continue
		}
		some, hits, classes = append(some, e), append(hits, slices.Clone(e.hits)), append(classes, e.class)
		if bytes += e.size + 4*int64(p.dim); len(some) == moveEntries || bytes >= moveBytes {
			break
		}
	}
	s.mu.Unlock()
	out := make([]handed, 0, len(some))
	for i, e := range some {
		h := handed{e: e, fresh: fresh{id: e.id, text: e.text, class: classes[i], answer: e.answer, meaning: e.meaning, hits: hits[i]}}
		h.entry = e.plain()
		v, ok := p.index.Vector(e.id)
		if h.entry == nil || !ok {
			continue // it goes
		}
		h.vector, h.entry.Age = v, time.Duration(max(now-e.filled, 0))
		p.scope.mu.Lock()
		h.changed = e.changed.Load()
		h.obs, _ = e.obs.AppendBinary(nil) // it never fails
		p.scope.mu.Unlock()
		out = append(out, h)
	}
	return out
}

// release drops what its owner has by now, but for what has changed since.
func (s *shard) release(batch []handed) {
	s.mu.Lock()
	for i := range batch {
		if e := batch[i].e; e.changed.Load() == batch[i].changed {
			s.drop(e, &s.counts.movedOut)
		}
	}
	s.mu.Unlock()
	s.tidy()
}
