package lease

import (
	"math"

	"headgate/limiter"
)

// Sizer says how much of a bucket a holder is to be lent. It is pure.
type Sizer interface {
	// Size returns what Holders[i] should hold: its share of the rate, the depth of its lease, and the
	// tokens to put into it now. The owner cuts all three to what is there. Depth 0 ends the lease:
	// the holder asks for each request. refuse, in ns, tells the holder to refuse by itself for so long
	// what its lease does not cover; 0: to ask.
	Size(s *Sight, i int) (share uint32, depth, grant, refuse int64)
	// Recall says whether a request of Holders[i], whose cost the level does not cover, is worth a recall
	// of what others hold.
	Recall(s *Sight, i int, cost int64) bool
}

// Sight is what a Sizer sees of a bucket.
type Sight struct {
	Now   int64 // ns of the owner's clock
	Limit *limiter.Limit
	// Level is what is left with the owner, negative in debt; of a semaphore, slots not lent.
	Level int64
	// Share and Outstanding are what all holders have, Holders[i]'s included.
	Share       uint32
	Outstanding int64
	Holders     []SightHolder
}

// SightHolder is one holder of a bucket, or one that was of late.
type SightHolder struct {
	Share  uint32
	Depth  int64
	Level  int64 // in its lease, as last reported; of a semaphore, slots lent
	Demand int64 // units per 1024 s, refused or not, as last reported
	Cost   int64 // of a typical request
	At     int64 // the reading of the last report, to within 17 ms
	Live   bool  // its session holds
	Asks   bool  // it asks now
}

// Even lends rate by demand, and the tokens that a horizon of it may need. A sole holder is lent all.
type Even struct{}

// horizon is for how long ahead a lease is filled, demandUnit what a demand is per.
const (
	horizon    = 500 // ms
	demandUnit = 1024 * 1000
	// forgetAfter is when a holder's demand counts no more, in ns.
	forgetAfter = int64(2e9)
)

// Size implements Sizer.
func (Even) Size(s *Sight, i int) (share uint32, depth, grant, refuse int64) {
	h := &s.Holders[i]
	demand, others := h.demand(s.Now, i, i), 0.0
	sole := true
	for j := range s.Holders {
		if x := &s.Holders[j]; j != i {
			others += x.demand(s.Now, i, j)
			sole = sole && x.Depth == 0 && x.Demand == 0
		}
	}
	if s.Limit.Algorithm == limiter.Semaphore {
		return 0, evenSlots(s, demand, others, sole), 0, 0
	}
	level := max(0, s.Level)
	if sole {
		return limiter.ShareOne, s.Limit.Capacity(), level, 0
	}
	part := demand / max(demand+others, 1e-9)
	ahead := demand * horizon / demandUnit
	if ahead < float64(max(h.Cost, 1)) {
		return 0, 0, 0, 0 // less than about one request a horizon
	}
	share = uint32(part * (limiter.ShareOne - 16))
	most := float64(s.Limit.Capacity()) * part
	depth = max(1, int64(min(most, 2*ahead+float64(2*h.Cost))))
	want := min(int64(ahead), depth) - h.Level
	grant = max(0, min(want, int64(float64(level)*part/2)))
	return share, depth, grant, 0
}

// demand is what a holder asks of the bucket; one that asks for the first time counts a little.
func (h *SightHolder) demand(now int64, i, j int) float64 {
	if j != i && now-h.At > forgetAfter && h.Depth == 0 {
		return 0
	}
	if h.Demand == 0 && (i == j || h.Asks) {
		return float64(h.Cost)
	}
	return float64(h.Demand)
}

// evenSlots is how many slots a holder may keep when it does not use them.
func evenSlots(s *Sight, demand, others float64, sole bool) int64 {
	if sole {
		return s.Limit.Burst
	}
	if s.Level < s.Limit.Burst/4 {
		return 0
	}
	return int64(math.Ceil(float64(s.Limit.Burst) * demand / max(demand+others, 1e-9) / 2))
}

// Recall implements Sizer.
func (Even) Recall(*Sight, int, int64) bool { return true }

// FixedBlocks lends blocks of n units and no rate: the baseline of the benchmarks.
func FixedBlocks(n int64) Sizer { return blocks(max(1, n)) }

type blocks int64

// Size implements Sizer.
func (n blocks) Size(s *Sight, i int) (share uint32, depth, grant, refuse int64) {
	h := &s.Holders[i]
	if h.Level > int64(n)/4 && !h.Asks {
		return 0, h.Depth, 0, 0
	}
	return 0, max(h.Depth, h.Level+int64(n)), int64(n), 0
}

// Recall implements Sizer.
func (blocks) Recall(*Sight, int, int64) bool { return true }
