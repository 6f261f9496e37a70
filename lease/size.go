package lease

import (
	"math"
	"time"

	"headgate/limiter"
)

// Sizer says how much of a bucket a holder is to be lent. It is pure.
type Sizer interface {
	// Size returns what Holders[i] should hold: its share of the rate, the depth of its lease, and the
	// tokens to put into it now. The owner cuts all three to what is there. Depth 0 ends the lease:
	// the holder asks for each request. For refuse ns the holder is not to ask for more than its lease
	// has, but to refuse by itself; where it has no lease, that counts only after a refused ask.
	Size(s *Sight, i int) (share uint32, depth, grant, refuse int64)
	// Recall says whether other leases are worth calling back for an ask of Holders[i] that Level does
	// not cover.
	Recall(s *Sight, i int, cost int64) bool
}

// Sight is what a Sizer sees of a bucket.
type Sight struct {
	Now   int64 // ns of the owner's clock
	Limit *limiter.Limit
	// Level is what is left with the owner, negative in debt, and Part what has come of the next unit, as ns of
	// the rate.
	Level, Part int64
	// Share and Outstanding are what all holders have, as the owner counts it (R3), Holders[i]'s included.
	Share       uint32
	Outstanding int64
	Holders     []SightHolder
}

// SightHolder is one holder of a bucket.
type SightHolder struct {
	At     int64  // ns of the owner's clock, of the last report; 0: none yet
	Share  uint32 // last sent
	Depth  int64  // last sent
	Level  int64  // in its lease: as last reported, and what was granted, or came by its share, since
	Demand int64  // units per 1024 s, refused or not
	Cost   int64  // of a typical request
	Live   bool   // its session holds
	Asks   bool   // it asks now
	Self   bool   // it is the owner's own process, which asks for nothing
}

// The default policy, Topup: what a holder needs until its next keep-alive is put into its lease at
// each, and the refill stays with the owner. Rate is lent only where the burst is too short to bridge
// two keep-alives, or to the only holder of a bucket that has less than it wants: it decides exactly,
// and asks nobody. Against shares of the rate this wastes nothing: a lease that is full takes no
// refill from others, and a share that moves counts twice until it is acknowledged (R3).
//
// bench/lease measures it; the numbers come from there.
const (
	// sizeHorizon is what a lease is sized for: a keep-alive and the way of its answer.
	sizeHorizon = 0.3 // s
	// sizeSpread is how many standard deviations of the demand over a horizon a lease has on top of it,
	// where the level is ample.
	sizeSpread = 3
	// sizeMost is the part of the burst that all leases' depths may take: the rest is where the refill
	// goes, and what asks of holders without a lease are served from.
	sizeMost = 0.75
	// sizeFair times a holder's share of the demand is the part of the level that it may be granted at
	// once.
	sizeFair = 2
	// sizeWhole: a part that is at least this part of a typical cost is rounded up to it.
	sizeWhole = 4
	// sizeLeast is how many requests a second are worth a lease; one that exists is kept down to
	// sizeKeep of that.
	sizeLeast, sizeKeep = 1.3, 0.7
	// sizeSmall: in a bucket of fewer typical costs each request counts, and only holders of sizeBusy
	// requests a second have a lease.
	sizeSmall, sizeBusy = 60, 15
	// sizeSure is by how many standard deviations demand must be above the rate of a small bucket.
	sizeSure = 3
	// sizeLow and sizeLowAll are the parts of the burst below which the level, and all that is
	// unspent anywhere, are scarce.
	sizeLow, sizeLowAll = 0.3, 0.45
	// sizeFew typical costs are a low level, too.
	sizeFew = 4
	// sizeSteady is by how much a depth or share may be off before it is replaced.
	sizeSteady = 0.25
	// sizeAsks is how many asks of refused holders are let through for each that the rate can serve.
	sizeAsks = 2.5
	// sizePart is how much of the next unit may have come, as s of the rate, when a bucket is lent whole: a lease has
	// whole units, and that part is lost.
	sizePart = 0.05
	// demandFor is the time constant of the demand's average, in s.
	demandFor = 1.0
	// sizeRefuse bounds a refusal, in s.
	sizeRefuse = 1.0
)

// Topup is the default Sizer.
type Topup struct{}

// crowd is what all holders come to, in units and seconds.
type crowd struct {
	rate, burst float64
	demand      float64 // of all
	cost        float64 // typical, weighed by demand
	unspent     float64 // with the owner and in leases
	active      float64 // holders with demand
	small       bool
	scarce      bool
	affordable  float64 // part of the demand that the rate can serve
	refills     bool
	level       float64
}

func look(s *Sight) (c crowd) {
	c.level, c.unspent = float64(s.Level), float64(s.Level)
	for j := range s.Holders {
		h := &s.Holders[j]
		d := h.demand(s.Now)
		c.demand += d
		c.cost += d * float64(h.Cost)
		if d > 0.2*float64(h.Cost) {
			c.active++
		}
		if h.Live {
			c.unspent += float64(h.Level)
		}
	}
	if c.demand > 0 {
		c.cost /= c.demand
	}
	c.affordable = 1
	c.burst = float64(s.Limit.Capacity())
	c.refills = s.Limit.Algorithm == limiter.GCRA && !s.Limit.Durable()
	if !c.refills {
		c.scarce = c.unspent < max(c.cost, 1)
		return c
	}
	c.rate = float64(s.Limit.Rate.Count) / s.Limit.Rate.Per.Seconds()
	c.small = c.burst < sizeSmall*c.cost
	low := max(min(c.rate*sizeHorizon, sizeLow*c.burst), min(sizeFew*c.cost, c.burst/2))
	c.scarce = c.level < low && c.unspent < sizeLowAll*c.burst && c.demand > 0.8*c.rate
	if c.small {
		// The level of a small bucket is often low below the limit, too: only what cannot be chance counts.
		c.scarce = c.scarce && c.demand-sizeSure*math.Sqrt(c.demand*c.cost/demandFor) > c.rate
	}
	if c.demand > c.rate {
		c.affordable = c.rate / c.demand
	}
	return c
}

// demand is in units a second. What was reported long ago has faded.
func (h *SightHolder) demand(now int64) float64 {
	d := float64(h.Demand) / 1024
	if age := time.Duration(now - h.At).Seconds(); age > sizeHorizon {
		d *= math.Exp(-(age - sizeHorizon) / demandFor)
	}
	return d
}

// worth says that a holder asks often enough for a lease.
func (c *crowd) worth(h *SightHolder, demand float64) bool {
	requests := demand / max(float64(h.Cost), 1e-9)
	if h.Depth > 0 {
		requests /= sizeKeep
	}
	return requests >= sizeLeast && (!c.small || requests >= sizeBusy)
}

// want is what a holder would need for itself, in units.
func (c *crowd) want(h *SightHolder, demand float64) float64 {
	need := demand * c.affordable
	if c.scarce {
		// What comes in from one keep-alive to the next, so that it does for all: with more, who comes after a
		// longer pause of the others takes what was theirs.
		return max(need*KeepEvery.Seconds(), 1.5*float64(h.Cost))
	}
	need *= sizeHorizon
	return need + sizeSpread*math.Sqrt(2*need*float64(h.Cost))
}

// Size is documented with Sizer.
func (Topup) Size(s *Sight, i int) (share uint32, depth, grant, refuse int64) {
	c, h := look(s), &s.Holders[i]
	demand := h.demand(s.Now)
	if demand <= 0 {
		return 0, 0, 0, 0
	}
	all := 0.0
	for j := range s.Holders {
		g := &s.Holders[j]
		if d := g.demand(s.Now); !c.scarce || c.worth(g, d) {
			all += c.want(g, d)
		}
	}
	target, part, cost := c.want(h, demand), demand/c.demand, float64(h.Cost)
	least := 2 * cost
	if c.refills {
		target *= min(1, sizeMost*c.burst/max(all, 1e-9))
	} else {
		target = min(target, max(c.level, 0)*part/2+float64(h.Level))
	}
	if c.scarce {
		least = cost
	}
	if share, depth, grant, ok := c.whole(s, i); ok && c.worth(h, demand) {
		return share, depth, grant, seconds(sizeHorizon)
	}
	if !c.worth(h, demand) || target < least {
		if c.scarce && !c.alone(h) {
			refuse = c.pause()
		}
		return 0, 0, 0, refuse
	}
	if off := math.Abs(float64(h.Depth) - target); h.Depth > 0 && off < sizeSteady*target {
		target = float64(h.Depth)
	}
	give, fair := target-float64(h.Level), c.level*min(1, sizeFair*part)
	if fair < cost && fair > cost/sizeWhole {
		fair = min(cost, c.level) // less would admit nothing
	}
	give = max(0, min(give, fair))
	// Depth beyond what is granted needs room in the burst; without it the owner's own level would go.
	room := max(0, c.burst-c.level-float64(s.Outstanding))
	depth = int64(min(target, float64(h.Depth)+room+give))
	if c.scarce && !c.alone(h) {
		refuse = seconds(sizeHorizon)
	}
	if depth == 0 {
		return 0, 0, 0, refuse
	}
	return c.lend(s, h, part), depth, int64(give), refuse
}

// lend is the share of the rate that a holder is lent, which is none but for short bursts.
func (c *crowd) lend(s *Sight, h *SightHolder, part float64) uint32 {
	if !c.refills || c.burst >= 2*c.rate*sizeHorizon {
		return 0
	}
	share := (1 - c.burst/(8*c.rate*sizeHorizon)) * part * min(1, c.demand/c.rate)
	if was := float64(h.Share) / ShareOne; was > 0 && math.Abs(was-share) < sizeSteady*share {
		share = was
	}
	left := float64(ShareOne-min(s.Share, ShareOne)) + float64(h.Share)
	return uint32(max(0, min(share*ShareOne, left)))
}

// alone says that a holder in the owner's process has no rival: it may ask whenever it likes, which
// takes nothing from anybody and makes each decision exact. Otherwise it waits for its part as all do.
func (c *crowd) alone(h *SightHolder) bool { return h.Self && c.active <= 1 }

// whole lends the rate to the only holder, while the level is scarce and then as long as it wants more
// than half of the rate. With the rate goes the whole burst: what a lease is too full for is lost. In the
// owner's process an ask is as good.
func (c *crowd) whole(s *Sight, i int) (share uint32, depth, grant int64, ok bool) {
	h := &s.Holders[i]
	if !c.refills || c.active > 1 || h.Self || !c.scarce && (h.Share < ShareOne/2 || c.demand < c.rate/2) {
		return 0, 0, 0, false
	}
	for j := range s.Holders {
		if g := &s.Holders[j]; j != i && (g.Depth > 0 || g.Share > 0) {
			return 0, 0, 0, false
		}
	}
	if h.Share < ShareOne && s.Part > seconds(sizePart) {
		return 0, 0, 0, false // when that unit is here and taken
	}
	depth = s.Limit.Capacity()
	return ShareOne, depth, max(0, min(s.Level, depth-h.Level)), true
}

// pause is for how long a refused holder without a lease asks no more: the fewer the tokens for each
// holder, the longer.
func (c *crowd) pause() int64 {
	if c.rate == 0 {
		return seconds(sizeRefuse)
	}
	return seconds(min(sizeRefuse, c.active*c.cost/(sizeAsks*c.rate)))
}

func seconds(s float64) int64 { return int64(s * float64(time.Second)) }

// Recall is documented with Sizer.
func (Topup) Recall(s *Sight, i int, cost int64) bool {
	c := look(s)
	return (!c.scarce || !c.refills || c.small) && c.unspent-float64(s.Holders[i].Level) >= float64(cost)
}

// FixedBlocks lends blocks of n units and no rate: the baseline of the benchmarks.
func FixedBlocks(n int64) Sizer { return blocks(max(1, n)) }

type blocks int64

// Size is documented with Sizer.
func (n blocks) Size(s *Sight, i int) (share uint32, depth, grant, refuse int64) {
	h := &s.Holders[i]
	if h.Level > int64(n)/4 {
		return 0, h.Depth, 0, 0
	}
	give := max(0, min(int64(n), s.Level))
	return 0, h.Level + give, give, 0
}

// Recall is documented with Sizer.
func (blocks) Recall(*Sight, int, int64) bool { return true }
