package trace

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/bench/lease"
	"headgate/limiter"
)

// Config says how a trace is replayed. The zero value of a field is its default.
type Config struct {
	// Split is whose requests are whose. Default: as the trace names them, and zipf:20 where it names none.
	Split Split
	// Headroom is the limits that are tried: what a tenant may take, in times of what tenants take on average over the
	// whole trace. At 1 the large ones are refused much and the small ones little. Default: 0.5, 1 and 2.
	Headroom []float64
	// Burst is how long the limit's rate takes to fill the burst, which is never below the largest request. Default: a
	// minute, so that the limit is one of so many tokens a minute, but not above a twentieth of the replay, of which
	// what buckets hold in the beginning would otherwise be a great part.
	Burst time.Duration
	Nodes []int // of the cluster. Default: 4
	// Speed is how many times as fast as it was recorded the trace is replayed. Default: 1
	Speed  float64
	RTT    time.Duration // see lease.Cell
	Faults []lease.Fault // Default: none
	Seed   uint64        // draws the nodes where requests arrive
}

// Bounds of a Config.
const (
	maxHeadroom = 1e6
	maxSpeed    = 1e6
	maxNodes    = 10_000
	maxCells    = 1000
)

const (
	defaultTenants = 20
	defaultNodes   = 4
	defaultBurst   = time.Minute
	leastBursts    = 20 // in a replay, by default
	// per is the period of a limit's rate.
	per = time.Minute
)

// Validate says what is wrong with a configuration and what to write instead.
func (c *Config) Validate() error {
	if err := c.Split.Validate(); err != nil {
		return err
	}
	for _, h := range c.Headroom {
		if !(h > 0 && h <= maxHeadroom) {
			return fmt.Errorf("a headroom of %v: it must be above 0 and at most %d; 1 is what tenants take on average", h, int64(maxHeadroom))
		}
	}
	for _, n := range c.Nodes {
		if n < 1 || n > maxNodes {
			return fmt.Errorf("%d nodes: it must be from 1 to %d", n, maxNodes)
		}
	}
	for _, f := range c.Faults {
		if !slices.Contains(lease.Faults(), f) {
			return fmt.Errorf("there is no fault %q: it is one of %q", f, lease.Faults())
		}
	}
	switch {
	case !(c.Speed >= 0 && c.Speed <= maxSpeed):
		return fmt.Errorf("a speed of %v: it must be above 0 and at most %d; 1 is as it was recorded", c.Speed, int64(maxSpeed))
	case c.Burst < 0 || c.Burst > limiter.MaxSpan:
		return fmt.Errorf("a burst of %v: it must be above 0 and at most %v", c.Burst, time.Duration(limiter.MaxSpan))
	case c.RTT < 0 || c.RTT > time.Minute:
		return fmt.Errorf("a round trip of %v: it must be above 0 and at most a minute", c.RTT)
	case max(1, len(c.Headroom))*max(1, len(c.Nodes))*max(1, len(c.Faults)) > maxCells:
		return fmt.Errorf("more than %d cells: try fewer headrooms, nodes or faults", maxCells)
	}
	return nil
}

// Cells are what the lease benchmark measures of a trace: a cell for each number of nodes, headroom and fault. All
// tenants have the same limit, of tokens. A request costs its input and output when it arrives, as if what it will
// answer were known: a gateway reserves an estimate instead, and gives back or takes the rest when the answer ends.
// It arrives at any of the nodes with the same chance, drawn by the seed. Cells of as many nodes share their Replay.
//
// The memory of a trace is that of the requests once more for each number of nodes: 24 bytes each.
func (t *Trace) Cells(cfg Config) ([]lease.Cell, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("replay %s: %w", t.Name, err)
	}
	if cfg.Split.Tenants == 0 && t.Tenants == nil {
		cfg.Split = Split{Tenants: defaultTenants, Skew: 1, Seed: cfg.Seed}
	}
	if len(cfg.Headroom) == 0 {
		cfg.Headroom = []float64{0.5, 1, 2}
	}
	if len(cfg.Nodes) == 0 {
		cfg.Nodes = []int{defaultNodes}
	}
	if len(cfg.Faults) == 0 {
		cfg.Faults = []lease.Fault{lease.NoFault}
	}
	cfg.Speed = cmp.Or(cfg.Speed, 1)
	split, err := t.By(cfg.Split)
	if err != nil {
		return nil, fmt.Errorf("replay %s: %w", t.Name, err)
	}
	cells, err := split.cells(&cfg)
	if err != nil {
		return nil, fmt.Errorf("replay %s: %w", t.Name, err)
	}
	return cells, nil
}

// cells is Cells of what is split, for a Config without zeros but for the burst.
func (t *Trace) cells(cfg *Config) (cells []lease.Cell, err error) {
	length, err := t.length(cfg.Speed)
	if err != nil {
		return nil, err
	}
	burst := cmp.Or(cfg.Burst, min(defaultBurst, length/leastBursts))
	var units, largest int64
	for i := range t.Requests {
		c := t.Requests[i].cost()
		units, largest = units+c, max(largest, c)
	}
	for _, nodes := range cfg.Nodes {
		replay := t.replay(nodes, cfg.Speed, cfg.Seed)
		for _, headroom := range cfg.Headroom {
			limit, err := limitFor(headroom*float64(units)/float64(len(t.Tenants))/length.Seconds(), burst, largest)
			if err != nil {
				return nil, fmt.Errorf("a limit of %v × the mean: %w", headroom, err)
			}
			for _, fault := range cfg.Faults {
				cells = append(cells, lease.Cell{
					Name: fmt.Sprintf("%s, %v × the mean", t.Name, headroom), Limit: limit,
					Mean: float64(units) / float64(len(t.Requests)), Nodes: nodes, Load: math.Round(1000/headroom) / 1000, Seed: cfg.Seed,
					Tenants: len(t.Tenants), RTT: cfg.RTT, Fault: fault, For: length, Replay: replay,
				})
			}
		}
	}
	return cells, nil
}

// cost is in units of a limit of tokens.
func (r *Request) cost() int64 { return max(1, r.Input+r.Output) }

// length is how long the replay takes: until as long after the last request as one is after another on average.
func (t *Trace) length(speed float64) (time.Duration, error) {
	n := float64(len(t.Requests))
	length := float64(t.Span()) / speed * n / (n - 1)
	switch {
	case length < float64(time.Millisecond):
		return 0, errors.New("all of its requests come within a millisecond: look at the column of times, or replay it more slowly")
	case length > float64(MaxSpan):
		return 0, fmt.Errorf("it takes more than %d days: replay it faster", MaxSpan/(24*time.Hour))
	}
	return time.Duration(math.Ceil(length)), nil
}

// limitFor is of so many tokens a second.
func limitFor(rate float64, burst time.Duration, largest int64) (limiter.Limit, error) {
	units := max(1, rate*burst.Seconds(), float64(largest))
	if count := rate * per.Seconds(); count <= limiter.MaxUnits && units <= limiter.MaxUnits {
		l := limiter.Limit{Rate: limiter.Rate{Count: max(1, int64(math.Round(count))), Per: per}, Burst: int64(math.Round(units))}
		return l, l.Validate()
	}
	return limiter.Limit{}, fmt.Errorf("more than %d tokens a minute or in a burst: lower it", int64(limiter.MaxUnits))
}

// replay is all that arrives.
func (t *Trace) replay(nodes int, speed float64, seed uint64) []lease.Arrival {
	draw := rand.New(rand.NewPCG(seed, 3))
	as := make([]lease.Arrival, len(t.Requests))
	for i := range t.Requests {
		r := &t.Requests[i]
		as[i] = lease.Arrival{At: int64(float64(r.At) / speed), Cost: r.cost(), Tenant: r.Tenant, Node: int32(draw.IntN(nodes))}
	}
	return as
}
