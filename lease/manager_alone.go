package lease

import (
	"math"
	"time"

	"headgate/limiter"
)

// NewAlone returns a Manager that owns every bucket and needs no other process, nor Run: for a
// process without a cluster, tests and benchmarks. What durable limits lend it keeps in memory.
// maxBuckets 0 is DefaultMaxBuckets.
func NewAlone(clock Clock, maxBuckets int) (*Manager, error) {
	self := Member{Name: "alone", Incarnation: 1}
	m, err := NewManager(ManagerConfig{Self: self, Clock: clock, Rights: allRights{}, MaxBuckets: maxBuckets, Wait: sessionFor})
	if err != nil {
		return nil, err
	}
	blocks := memoryBlocks{states: map[Bucket]*drawnFrom{}}
	m.drawAll = func(at Instant) { blocks.drawFor(m, at) }
	m.Step(&View{Epoch: 1, Members: []Member{self}, Owners: make([]int32, 1), Place: func(string) uint32 { return 0 }})
	return m, nil
}

// allRights are those of a process that nobody else shares with.
type allRights struct{}

func (allRights) Left(int64, uint32) int64      { return math.MaxInt64 }
func (allRights) Lease(int64, uint64) int64     { return math.MaxInt64 }
func (allRights) Started(int64, uint64, uint32) {}

// memoryBlocks stand in for the ledger of a process that has none. They are as safe as the process
// is: its end forgets them.
// They are under the owner's lock.
type memoryBlocks struct{ states map[Bucket]*drawnFrom }

type drawnFrom struct {
	limit limiter.Limit
	state limiter.State
}

// maxDrawRounds is of blocks in memory, in one step.
const maxDrawRounds = 8

func (b *memoryBlocks) drawFor(m *Manager, at Instant) {
	for range maxDrawRounds {
		ds := m.owner.Draws(at)
		if len(ds) == 0 {
			return
		}
		for i := range ds {
			m.routeLocked(m.owner.Drawn(at, b.draw(at, &ds[i])))
		}
	}
}

func (b *memoryBlocks) draw(at Instant, d *Draw) Drawn {
	now := at.Now
	if d.Limit.Algorithm == limiter.FixedWindow {
		now = at.Wall
	}
	s := b.states[d.Bucket]
	if s == nil {
		s = &drawnFrom{limit: d.Limit}
		b.states[d.Bucket] = s
	}
	if s.limit != d.Limit {
		d.Limit.Convert(&s.state, now, &s.limit)
		s.limit = d.Limit
	}
	out := Drawn{Bucket: d.Bucket, N: d.N}
	s.limit.Credit(&s.state, now, d.Returned, d.Holding)
	s.limit.Debit(&s.state, now, d.Debt)
	if d.Limit.Algorithm == limiter.FixedWindow {
		out.Window = now / int64(d.Limit.Rate.Per)
	} else if over := s.limit.Peek(&s.state, now, 0, limiter.Refuse).Remaining - max(s.limit.Capacity()-d.Holding, 0); over > 0 {
		s.limit.Take(&s.state, now, over, limiter.Refuse) // what can still be spent of earlier blocks is not there twice
	}
	left := s.limit.Peek(&s.state, now, 0, limiter.Refuse).Remaining
	out.Granted = max(min(d.Want, left), 0)
	if s.limit.Full(&s.state, now) && d.Want == 0 {
		delete(b.states, d.Bucket)
	}
	if out.Granted < d.Least || out.Granted == 0 {
		out.Granted = 0
		out.RetryAfter = int64(max(s.limit.Peek(&s.state, now, max(d.Least, 1), limiter.Refuse).RetryAfter, time.Millisecond))
	}
	s.limit.Take(&s.state, now, out.Granted, limiter.Refuse)
	out.Level = left - out.Granted
	return out
}
