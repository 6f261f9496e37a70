package lease

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"sync"
	"time"

	"headgate/bench/origin"
)

// Config says what to run. The zero value runs all.
type Config struct {
	Quick bool      // every 7th cell: whether it works, not how well
	Log   io.Writer // progress; nil: none
}

// quickly is how many cells Quick leaves out for each that it runs.
const quickly = 7

// Run measures every contender in every cell, a processor each.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	r := &Report{Started: time.Now().UTC(), Machine: origin.Machine(), Commit: origin.Commit(ctx)}
	var cells []Cell
	for i, c := range Grid() {
		if !cfg.Quick || i%quickly == 0 {
			cells = append(cells, c)
		}
	}
	all := contenders()
	r.Results = make([]Result, len(cells)*len(all))
	work := make(chan int)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for i := range work {
				for j, e := range all {
					r.Results[i*len(all)+j] = measure(cells[i], e)
				}
			}
		})
	}
	for i := range cells {
		if ctx.Err() != nil {
			break
		}
		work <- i
		if cfg.Log != nil && i%20 == 19 {
			fmt.Fprintf(cfg.Log, "%d of %d cells\n", i+1, len(cells))
		}
	}
	close(work)
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("measure leases: %w", err)
	}
	r.Took = time.Since(r.Started)
	return r, nil
}
