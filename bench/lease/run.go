package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"headgate/bench/origin"
)

// Config says what to run. The zero value runs every policy in every cell of Grid and Troubles, with one seed.
type Config struct {
	Quick bool // fewer cells: whether it works, not how well
	// Cells to run instead of theirs.
	Cells []Cell
	// Policies, Nodes, Loads and Limits leave out what they do not name; Limits by a part of the cell's name. Headgate always runs.
	Policies, Limits []string
	Nodes            []int
	Loads            []float64
	Faults           []Fault       // only these; NoFault is one
	RTT              time.Duration // of all cells; 0: as they have it
	Seed             uint64        // of the first run; 0: 1
	Seeds            int           // how many runs; 0: one
	Command          string        // that is shown as the one that does this again
	Progress         *Progress
}

// Validate names the field and the remedy.
func (c *Config) Validate() error {
	known := make([]string, 0, len(Policies()))
	for _, p := range Policies() {
		known = append(known, p.Name)
	}
	for _, name := range c.Policies {
		if !slices.Contains(known, name) {
			return fmt.Errorf("policy %q is not known: use some of %s", name, strings.Join(known, "; "))
		}
	}
	for _, f := range c.Faults {
		if !slices.Contains(Faults(), f) {
			return fmt.Errorf("fault %q is not known: use none or some of %q", f, Faults()[1:])
		}
	}
	if c.Seeds < 0 || c.Seeds > 1000 || c.RTT < 0 || c.RTT > time.Minute {
		return errors.New("seeds are at most 1000, and a round trip at most a minute")
	}
	if len(c.cells()) == 0 {
		return errors.New("no cell is left: the grid has 4, 16 and 64 nodes, loads of 0.5, 0.9, 1.1, 2 and 10, limits named as in `10 requests/s`, `1M tokens/min`, and faults 4 and 16 nodes and loads of 0.9 and 2")
	}
	return nil
}

// quickly is how many cells Quick leaves out for each that it runs.
const quickly = 13

func (c *Config) cells() (out []Cell) {
	all := c.Cells
	if all == nil {
		for i, cell := range Grid() {
			if !c.Quick || i%quickly == 0 {
				all = append(all, cell)
			}
		}
		troubles := Troubles()
		if c.Quick {
			troubles = troubles[:len(Faults())-1]
		}
		all = append(all, troubles...)
	}
	for _, cell := range all {
		skip := len(c.Faults) > 0 && !slices.Contains(c.Faults, cell.Fault) ||
			len(c.Nodes) > 0 && !slices.Contains(c.Nodes, cell.Nodes) || len(c.Loads) > 0 && !slices.Contains(c.Loads, cell.Load) ||
			len(c.Limits) > 0 && !slices.ContainsFunc(c.Limits, func(part string) bool { return strings.Contains(cell.Name, part) })
		if skip {
			continue
		}
		cell.RTT = cmp.Or(c.RTT, cell.RTT)
		for s := range max(c.Seeds, 1) {
			cell.Seed = cmp.Or(c.Seed, 1) + uint64(s)
			out = append(out, cell)
		}
	}
	return out
}

func (c *Config) policies() (out []Policy) {
	for _, p := range Policies() {
		if len(c.Policies) == 0 || p.Name == Headgate || slices.Contains(c.Policies, p.Name) {
			out = append(out, p)
		}
	}
	return out
}

// Run measures every policy in every cell, in virtual time, a processor each; cells of many tenants one after the other, with all
// processors.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	r := &Report{Started: time.Now().UTC(), Machine: origin.Machine(), Commit: origin.Commit(ctx), Command: cfg.Command}
	cells, policies := cfg.cells(), cfg.policies()
	r.Results = make([]Result, len(cells)*len(policies))
	var mu sync.Mutex
	done := 0
	tell := func() {
		mu.Lock()
		defer mu.Unlock()
		done++
		left := time.Since(r.Started) / time.Duration(done) * time.Duration(len(cells)-done)
		cfg.Progress.Tell(done, len(cells), left.Round(time.Second).String())
	}
	work := make(chan int)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for i := range work {
				for j, p := range policies {
					r.Results[i*len(policies)+j] = measure(cells[i], p)
				}
				tell()
			}
		})
	}
	for i := range cells {
		if cells[i].tenants() == 1 && ctx.Err() == nil {
			work <- i
		}
	}
	close(work)
	wg.Wait()
	for i := range cells {
		if cells[i].tenants() == 1 {
			continue
		}
		for j, p := range policies {
			var err error
			if r.Results[i*len(policies)+j], err = measureMany(ctx, cells[i], p, runtime.GOMAXPROCS(0)); err != nil {
				return nil, fmt.Errorf("measure leases: %w", err)
			}
		}
		tell()
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("measure leases: %w", err)
	}
	r.Took = time.Since(r.Started)
	return r, nil
}
