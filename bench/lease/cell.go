package lease

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/limiter"
)

// Cell is one setting: a bucket, and the demand on it.
type Cell struct {
	Name    string // of the limit
	Limit   limiter.Limit
	Mean    float64 // of the cost of a request, in units
	Sigma   float64 // of the logarithm of the cost; 0: all cost Mean
	Holders int
	Zipf    bool    // the demand of the i-th holder is 1/i of the first's; otherwise all have the same
	Load    float64 // demand, in times the limit's rate
	Seed    uint64
}

// rate is in units a second.
func (c *Cell) rate() float64 { return float64(c.Limit.Rate.Count) / c.Limit.Rate.Per.Seconds() }

// burst is in seconds of the rate.
func (c *Cell) burst() float64 { return float64(c.Limit.Burst) / c.rate() }

func (c *Cell) demand() string {
	if c.Zipf {
		return "zipf"
	}
	return "even"
}

func (c *Cell) String() string {
	return fmt.Sprintf("%s, burst %gs, %d holders, %s, load %g", c.Name, math.Round(c.burst()*10)/10, c.Holders, c.demand(), c.Load)
}

// length is how long the demand lasts: at least a minute and, where there is more demand than rate,
// until the burst that it starts with is long spent, and at least some 20,000 requests.
func (c *Cell) length() time.Duration {
	s := 60.0
	if c.Load > 1 {
		s += min(c.burst()/(c.Load-1), 120) + 24*c.burst()
	}
	s = min(max(s, 20000/(c.Load*c.rate()/c.Mean)), 1500)
	return time.Duration(s * float64(time.Second))
}

// arrival is one request.
type arrival struct {
	at     int64 // ns from the start
	holder int
	cost   int64
}

// arrivals is the demand: a Poisson process at each holder. No cost is above the burst, which no
// bucket could ever admit.
func (c *Cell) arrivals() []arrival {
	r := rand.New(rand.NewPCG(c.Seed, 1))
	each := float64(time.Second) * c.Mean / (c.Load * c.rate())
	ends := float64(c.length())
	upTo := make([]float64, c.Holders) // of the demand, up to and with the i-th holder
	sum := 0.0
	for i := range upTo {
		w := 1.0
		if c.Zipf {
			w = 1 / float64(i+1)
		}
		sum += w
		upTo[i] = sum
	}
	var as []arrival
	for t := r.ExpFloat64() * each; t < ends; t += r.ExpFloat64() * each {
		i, _ := slices.BinarySearch(upTo, r.Float64()*sum)
		as = append(as, arrival{at: int64(t), holder: min(i, c.Holders-1), cost: c.cost(r)})
	}
	return as
}

func (c *Cell) cost(r *rand.Rand) int64 {
	x := c.Mean
	if c.Sigma > 0 {
		x *= math.Exp(c.Sigma*r.NormFloat64() - c.Sigma*c.Sigma/2)
	}
	return min(max(int64(math.Round(x)), 1), c.Limit.Burst)
}

// Grid is every cell that is measured.
func Grid() (cs []Cell) {
	limits := []struct {
		name        string
		count       int64
		per         time.Duration
		mean, sigma float64
	}{
		{"10 requests/s", 10, time.Second, 1, 0},
		{"100 requests/s", 100, time.Second, 1, 0},
		{"1000 requests/s", 1000, time.Second, 1, 0},
		{"1M tokens/min", 1_000_000, time.Minute, 1000, 1},
		{"20M tokens/min", 20_000_000, time.Minute, 1000, 1},
	}
	for _, l := range limits {
		for _, burst := range []time.Duration{time.Second, 10 * time.Second} {
			for _, holders := range []int{4, 16, 64} {
				for _, zipf := range []bool{false, true} {
					for _, load := range []float64{0.5, 0.9, 1.1, 2, 10} {
						cs = append(cs, Cell{
							Name: l.name, Mean: l.mean, Sigma: l.sigma, Holders: holders, Zipf: zipf, Load: load, Seed: 1,
							Limit: limiter.Limit{Rate: limiter.Rate{Count: l.count, Per: l.per}, Burst: int64(float64(l.count) * float64(burst) / float64(l.per))},
						})
					}
				}
			}
		}
	}
	return cs
}
