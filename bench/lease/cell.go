package lease

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/limiter"
)

// Cell is one setting: limits, nodes, the demand on them, and what goes wrong. Every engine makes the same of it.
type Cell struct {
	Name  string // of the limit
	Limit limiter.Limit
	Mean  float64 // of the cost of a request, in units
	Sigma float64 // of the logarithm of the cost; 0: all cost Mean
	Nodes int
	Zipf  bool    // the demand of the i-th node is 1/i of the first's; otherwise all have the same
	Load  float64 // demand, in times the rates of all tenants' limits together
	Seed  uint64

	// Tenants have a bucket each, of the same limit; 0 is one. The demand of the i-th is 1/i^TenantSkew of the first's.
	Tenants    int
	TenantSkew float64
	Spread     int           // nodes at which a tenant's requests arrive, the same for all its life; 0: all
	RTT        time.Duration // of a message and its answer; 0: 2 ms
	Fault      Fault
	For        time.Duration // how long the demand lasts; 0: long enough for Load to show

	// Replay is what arrives, by time, instead of what the other fields make arrive: those then only describe it.
	// No cost is above the burst, and For ends after the last of it.
	Replay []Arrival `json:"-"`
}

// Fault is what goes wrong a third of the way through a cell.
type Fault string

// The faults. Clients of a node that is gone go to the next one that is there.
const (
	NoFault        Fault = ""
	OwnerCrash     Fault = "owner crash"     // the owner of the first tenant's bucket stops without a word, and stays away
	HolderCrash    Fault = "holder crash"    // so does a node that holds a lease of that bucket and does not own it
	Partition      Fault = "partition"       // a third of the nodes, the owner not among them, is cut off for a sixth of the time
	Join           Fault = "join"            // one node more comes, and takes its part of buckets and demand
	RollingRestart Fault = "rolling restart" // one node after the other leaves with leave to do so, and comes back
)

// Faults are all of them, no fault first.
func Faults() []Fault {
	return []Fault{NoFault, OwnerCrash, HolderCrash, Partition, Join, RollingRestart}
}

// rate is in units a second.
func (c *Cell) rate() float64 { return float64(c.Limit.Rate.Count) / c.Limit.Rate.Per.Seconds() }

// burst is in seconds of the rate.
func (c *Cell) burst() float64 { return float64(c.Limit.Burst) / c.rate() }

// tenants is at least one.
func (c *Cell) tenants() int { return max(c.Tenants, 1) }

// way is how long a message takes, in ns.
func (c *Cell) way() int64 { return int64(cmp.Or(c.RTT, 2*time.Millisecond)) / 2 }

func (c *Cell) demand() string {
	if c.Zipf {
		return "zipf"
	}
	return "even"
}

func (c *Cell) String() string {
	s := fmt.Sprintf("%s, burst %gs, %d nodes, %s, load %g", c.Name, math.Round(c.burst()*10)/10, c.Nodes, c.demand(), c.Load)
	if c.Tenants > 1 {
		s += fmt.Sprintf(", %d tenants", c.Tenants)
	}
	if c.RTT != 0 {
		s += fmt.Sprintf(", RTT %v", c.RTT)
	}
	if c.Fault != NoFault {
		s += ", " + string(c.Fault)
	}
	return s
}

// length is how long the demand lasts: at least a minute and, where there is more demand than rate,
// until the burst that it starts with is long spent, and at least some 20,000 requests.
func (c *Cell) length() time.Duration {
	if c.For > 0 {
		return c.For
	}
	s := 60.0
	if c.Load > 1 {
		s += min(c.burst()/(c.Load-1), 120) + 24*c.burst()
	}
	s = min(max(s, 20000/(c.Load*c.rate()*float64(c.tenants())/c.Mean)), 1500)
	return time.Duration(s * float64(time.Second))
}

// Arrival is one request.
type Arrival struct {
	At     int64 // ns from the start
	Cost   int64 // units
	Tenant int32
	Node   int32 // where it arrives, if that node is there
}

// Demand is all that arrives, by time. No cost is above the burst, which no bucket could ever admit.
func (c *Cell) Demand() []Arrival {
	if c.Replay != nil {
		return c.Replay
	}
	d := c.drawer()
	if c.tenants() == 1 {
		return d.of(0)
	}
	var as []Arrival
	for t := range c.tenants() {
		as = append(as, d.of(t)...)
	}
	slices.SortStableFunc(as, func(a, b Arrival) int { return cmp.Compare(a.At, b.At) })
	return as
}

// drawer draws the demand of one tenant at a time. It may be used by many at once.
type drawer struct {
	c     *Cell
	nodes wheel
	rate  float64 // requests a ns of the first tenant
	ends  float64
}

func (c *Cell) drawer() *drawer {
	d := &drawer{c: c, ends: float64(c.length())}
	d.nodes = newWheel(c.Nodes, func(i int) float64 {
		if c.Zipf {
			return 1 / float64(i+1)
		}
		return 1
	})
	weights := 0.0
	for i := range c.tenants() {
		weights += c.weight(i)
	}
	d.rate = c.Load * c.rate() * float64(c.tenants()) / c.Mean / float64(time.Second) / weights
	return d
}

// weight is a tenant's demand beside the first one's.
func (c *Cell) weight(tenant int) float64 { return math.Pow(float64(tenant+1), -c.TenantSkew) }

// of is one tenant's demand: a Poisson process, each request at a node by chance.
func (d *drawer) of(tenant int) []Arrival {
	c := d.c
	r := rand.New(rand.NewPCG(c.Seed, uint64(tenant)+1))
	each := 1 / (d.rate * c.weight(tenant))
	as := make([]Arrival, 0, int(d.ends/each*1.05)+4)
	for t := r.ExpFloat64() * each; t < d.ends; t += r.ExpFloat64() * each {
		a := Arrival{At: int64(t), Node: int32(d.nodes.draw(r)), Tenant: int32(tenant)}
		a.Cost = c.cost(r)
		if c.Spread > 0 && c.Spread < c.Nodes { // the n-th of the tenant's own nodes stands for the n-th of all
			first := splitmix(c.Seed, uint64(tenant)) % uint64(c.Nodes)
			a.Node = int32((first + uint64(int(a.Node)%c.Spread)) % uint64(c.Nodes))
		}
		as = append(as, a)
	}
	return as
}

// wheel draws numbers by weight.
type wheel struct{ upTo []float64 }

func newWheel(n int, weight func(int) float64) wheel {
	w, sum := wheel{make([]float64, n)}, 0.0
	for i := range w.upTo {
		sum += weight(i)
		w.upTo[i] = sum
	}
	return w
}

func (w wheel) draw(r *rand.Rand) int {
	i, _ := slices.BinarySearch(w.upTo, r.Float64()*w.upTo[len(w.upTo)-1])
	return min(i, len(w.upTo)-1)
}

// splitmix mixes a seed and a number (Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
func splitmix(seed, n uint64) uint64 {
	x := seed + (n+1)*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (c *Cell) cost(r *rand.Rand) int64 {
	x := c.Mean
	if c.Sigma > 0 {
		x *= math.Exp(c.Sigma*r.NormFloat64() - c.Sigma*c.Sigma/2)
	}
	return min(max(int64(math.Round(x)), 1), c.Limit.Burst)
}

// Grid is every cell without a fault that is measured.
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
			for _, nodes := range []int{4, 16, 64} {
				for _, zipf := range []bool{false, true} {
					for _, load := range []float64{0.5, 0.9, 1.1, 2, 10} {
						cs = append(cs, Cell{
							Name: l.name, Mean: l.mean, Sigma: l.sigma, Nodes: nodes, Zipf: zipf, Load: load, Seed: 1,
							Limit: limiter.Limit{Rate: limiter.Rate{Count: l.count, Per: l.per}, Burst: int64(float64(l.count) * float64(burst) / float64(l.per))},
						})
					}
				}
			}
		}
	}
	return cs
}
