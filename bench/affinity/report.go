package main

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// report is what a run has found.
type report struct {
	config  config
	trace   *trace
	started time.Time
	took    time.Duration
	machine string
	commit  string
	cells   []*cell
}

// cell is one setting of servers.
type cell struct {
	replicas, blocks int
	busy             float64
	big              float64 // hit rate of one cache as large as all
	rows             []row   // by contender
}

// row is what a contender came to.
type row struct {
	contender
	outcome
}

// shown are the caches whose balance is told in words and drawn, in blocks: the middle of the three.
func (r *report) shown() int { return r.config.blocks[len(r.config.blocks)/2] }

// measure runs all contenders in all settings.
func (r *report) measure(ctx context.Context) error {
	for _, busy := range r.config.busy {
		for _, n := range r.config.replicas {
			for _, blocks := range r.config.blocks {
				c := &cell{replicas: n, blocks: blocks, busy: busy}
				c.big = run(r.trace, setting{replicas: 1, blocks: n * blocks, gateways: 1, busy: busy}, &turns{make([]int, 1)}).hit
				for _, k := range contenders() {
					if ctx.Err() != nil {
						return ctx.Err()
					}
					var sum outcome
					for seed := range r.config.seeds {
						o := run(r.trace, setting{n, blocks, r.config.gateways, busy, uint64(seed)}, k.make(r.config.gateways))
						sum.add(&o, 1/float64(r.config.seeds))
					}
					c.rows = append(c.rows, row{k, sum})
				}
				r.cells = append(r.cells, c)
			}
		}
	}
	return nil
}

func (c *cell) row(name string) *row {
	for i := range c.rows {
		if c.rows[i].name == name {
			return &c.rows[i]
		}
	}
	return nil
}

// String is the report for people.
func (r *report) String() string {
	var b strings.Builder
	t := r.trace
	fmt.Fprintf(&b, "affinity: %s, %d requests in %.0f s, %d tokens of prompts in blocks of %d; %d gateways, means of %d runs\n",
		t.name, len(t.requests), t.seconds(), t.tokens(), blockTokens, r.config.gateways, r.config.seeds)
	fmt.Fprintf(&b, "started  %s, took %s\ncommit   %s\nmachine  %s\n", r.started.Format(time.RFC3339), r.took.Round(time.Second), r.commit, r.machine)
	fmt.Fprintf(&b, `
A server works off prompts one after the other, %d tokens a second but for what is cached, then writes answers beside each other, %g ms a
token. Its cache gives up the block that was longest not used. The trace is stretched in time so that servers would be so busy with prompts
if nothing were cached. Gateways get requests by chance and know of each other's load every %g ms. The clock of the trace ticks every 3 s:
requests of one tick are spread over it. A slot is %d tokens of prompt and answer.
`, prefillRate, outputTime*1e3, broadcast*1e3, slotTokens)
	r.writeHits(&b)
	for _, busy := range r.config.busy {
		r.writeBalance(&b, busy)
	}
	r.aims(&b)
	return b.String()
}

func (r *report) writeHits(b *strings.Builder) {
	fmt.Fprintf(b, "\nshare of the blocks of prompts that is found in the cache, busy %g: servers × blocks of each\n\n%-49s", r.config.busy[0], "")
	cells := r.of(r.config.busy[0])
	for _, c := range cells {
		fmt.Fprintf(b, " %8s", fmt.Sprintf("%d×%d", c.replicas, c.blocks))
	}
	fmt.Fprintf(b, "\n%-49s", "one big cache")
	for _, c := range cells {
		fmt.Fprintf(b, " %8.4f", c.big)
	}
	b.WriteString("\n")
	for i := range cells[0].rows {
		if cells[0].rows[i].hidden {
			continue
		}
		fmt.Fprintf(b, "%-49s", cells[0].rows[i].name)
		for _, c := range cells {
			fmt.Fprintf(b, " %8.4f", c.rows[i].hit)
		}
		b.WriteString("\n")
	}
}

func (r *report) of(busy float64) (cells []*cell) {
	for _, c := range r.cells {
		if c.busy == busy {
			cells = append(cells, c)
		}
	}
	return cells
}

func (r *report) writeBalance(b *strings.Builder, busy float64) {
	for _, c := range r.of(busy) {
		if c.blocks != r.shown() {
			continue
		}
		fmt.Fprintf(b, "\n%d servers of %d blocks, busy %g. Requests in flight on a server: most to mean, and 99th percentile; tokens worked off: most to mean;\n"+
			"seconds to the first token; requests that go elsewhere than the last of their conversation\n\n%-49s %6s %6s | %8s %5s | %6s | %7s %7s %7s | %6s\n",
			c.replicas, c.blocks, busy, "", "hits", "of big", "in flght", "p99", "tokens", "mean", "p50", "p99", "moved")
		for i := range c.rows {
			w := &c.rows[i]
			if w.hidden {
				continue
			}
			fmt.Fprintf(b, "%-49s %6.4f %6.3f | %8.2f %5.0f | %6.2f | %7.2f %7.2f %7.2f | %6.3f\n",
				w.name, w.hit, w.hit/c.big, w.spread, w.p99, w.work, w.meanTTFT, w.ttft[0], w.ttft[1], w.elsewhere)
		}
	}
}

// aims says what was to be reached.
func (r *report) aims(b *strings.Builder) {
	b.WriteString("\naims\n")
	say := func(kept bool, format string, args ...any) {
		fmt.Fprintf(b, "  %-4s  %s\n", map[bool]string{true: "kept", false: "MISS"}[kept], fmt.Sprintf(format, args...))
	}
	for _, c := range r.cells {
		o, told, robin, least, fixed := c.row(ours), c.row(oursTold), c.row(roundRobin), c.row(leastLoaded), c.row(flat)
		what := fmt.Sprintf("%d × %d, busy %g", c.replicas, c.blocks, c.busy)
		say(o.hit >= .9*c.big, "%s: hits %.4f, %.3f of one big cache's, at least .9 (round robin %.3f)", what, o.hit, o.hit/c.big, robin.hit/c.big)
		say(o.meanTTFT <= fixed.meanTTFT*1.1, "%s: mean time to the first token %.2f s, at most a tenth above a fixed bound's of 1.25, %.2f s", what, o.meanTTFT, fixed.meanTTFT)
		say(told.hit >= .9*c.big && told.meanTTFT <= min(least.meanTTFT, o.meanTTFT)*1.1, "%s: told of all, hits %.3f of one big cache's, at least .9, and %.2f s to the first token, at most a tenth above ours (%.2f s) and least loaded (%.2f s)",
			what, told.hit/c.big, told.meanTTFT, o.meanTTFT, least.meanTTFT)
	}
}

// csv has a line for each contender in each setting.
func (r *report) csv() string {
	var b strings.Builder
	b.WriteString("servers,blocks,busy,gateways,seeds,contender,hit_rate,hit_rate_big,in_flight_most_to_mean,in_flight_p99,tokens_most_to_mean,ttft_mean_s,ttft_p50_s,ttft_p99_s,moved\n")
	for _, c := range r.cells {
		for i := range c.rows {
			w := &c.rows[i]
			fmt.Fprintf(&b, "%d,%d,%g,%d,%d,%q,%.5f,%.5f,%.4f,%.1f,%.4f,%.4f,%.4f,%.4f,%.4f\n", c.replicas, c.blocks, c.busy, r.config.gateways, r.config.seeds,
				w.name, w.hit, c.big, w.spread, w.p99, w.work, w.meanTTFT, w.ttft[0], w.ttft[1], w.elsewhere)
		}
	}
	return b.String()
}
