package cache

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"time"

	"headgate/cache"
)

// trace is what is read, and how many bytes there are for it.
type trace struct {
	zipf  float64
	drift int     // what is popular moves on by a key each so many reads; 0: never
	share float64 // of all bytes that the cache has
}

func traces() (ts []trace) {
	for _, share := range []float64{0.01, 0.1} {
		for _, zipf := range []float64{1.01, 1.2} {
			ts = append(ts, trace{zipf, 0, share})
		}
		ts = append(ts, trace{1.01, 100, share})
	}
	return ts
}

func (t trace) name() string {
	s := fmt.Sprintf("Zipf %g", t.zipf)
	if t.drift > 0 {
		s += fmt.Sprintf(", drifting by a key in %d reads", t.drift)
	}
	return s
}

// reads are the keys of a trace, in order.
func (t trace) reads(n, keys int) []int32 {
	z := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), t.zipf, 1, uint64(keys-1))
	out := make([]int32, n)
	for i := range out {
		k := z.Uint64()
		if t.drift > 0 {
			k = (k + uint64(i/t.drift)) % uint64(keys)
		}
		out[i] = int32(k)
	}
	return out
}

// answerSizes are like answers': log-normal around 1.5 KB, 64 KB at most.
func answerSizes(keys int) []int {
	r := rand.New(rand.NewPCG(3, 4))
	sizes := make([]int, keys)
	for i := range sizes {
		sizes[i] = int(min(64<<10, 1500*math.Exp(r.NormFloat64())))
	}
	return sizes
}

type ratioRow struct {
	trace
	bytes int64
	hits  map[string]float64 // share, by contender
	best  float64            // of any policy that knows the traffic: see static
}

type ratioSection struct {
	reads, keys int
	mean        int64
	charges     map[string]charge
	rows        []ratioRow
}

// ratio plays traces to the store and to its peers, which have the same bytes of memory.
func ratio(ctx context.Context, c *Config, rep *Report) (section, error) {
	if rep.charges == nil { // what an entry costs has to be known
		if _, err := memory(ctx, c, rep); err != nil {
			return nil, err
		}
	}
	s := &ratioSection{reads: c.Reads, keys: c.Keys, charges: rep.charges}
	sizes, noise := answerSizes(c.Keys), make([]byte, 64<<10)
	fillNoise(noise)
	keys := make([]cache.Key, c.Keys)
	var total int64
	for i := range keys {
		keys[i] = keyOf(i)
		total += int64(sizes[i])
	}
	s.mean = total / int64(c.Keys)
	total += int64(rep.charges[theStore].over) * int64(c.Keys)
	for _, t := range traces() {
		fmt.Fprintf(c.Log, "  %s, %g of all bytes\n", t.name(), t.share)
		row := ratioRow{trace: t, bytes: max(1<<20, int64(float64(total)*t.share)), hits: map[string]float64{}}
		reads := t.reads(c.Reads, c.Keys)
		for _, k := range contenders() {
			hit, err := play(ctx, k.with(int64(rep.charges[k.name].over)), row.bytes, reads, func(i int32) *cache.Entry {
				return &cache.Entry{Key: keys[i], Tenant: "acme", Surface: "faq", ContentType: "application/json", Body: noise[:sizes[i]], Life: cache.Life{TTL: 1000 * time.Hour}}
			}, keys)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", k.name, err)
			}
			row.hits[k.name] = hit
		}
		if t.drift == 0 {
			row.best = static(reads, sizes, int64(rep.charges[plainLRU].over), row.bytes)
		}
		s.rows = append(s.rows, row)
	}
	return s, nil
}

// play reads a trace and puts what is not found. It yields after each read, since caches that work behind the scenes
// would be asked a hundred times as fast as a gateway asks them.
func play(ctx context.Context, open func(int64) (contender, error), maxBytes int64, reads []int32, entry func(int32) *cache.Entry, keys []cache.Key) (float64, error) {
	c, err := open(maxBytes)
	if err != nil {
		return 0, err
	}
	defer c.close()
	hits := 0
	for i, k := range reads {
		if c.get(&keys[k]) {
			hits++
		} else {
			c.put(entry(k))
		}
		runtime.Gosched()
		if i%(1<<16) == 0 && ctx.Err() != nil {
			return 0, ctx.Err()
		}
	}
	return float64(hits) / float64(len(reads)), nil
}

// static is what a cache finds that holds from its first read on what the trace reads most often by the byte: hardly
// any can do better on traffic whose favourites do not change.
func static(reads []int32, sizes []int, overhead, maxBytes int64) float64 {
	counts := make([]int, len(sizes))
	for _, k := range reads {
		counts[k]++
	}
	order := make([]int, len(sizes))
	for i := range order {
		order[i] = i
	}
	worth := func(k int) float64 { return float64(counts[k]) / float64(int64(sizes[k])+overhead) }
	slices.SortFunc(order, func(a, b int) int {
		switch x, y := worth(a), worth(b); {
		case x > y:
			return -1
		case x < y:
			return 1
		}
		return a - b
	})
	hits := 0
	for _, k := range order {
		if maxBytes -= int64(sizes[k]) + overhead; maxBytes < 0 {
			break
		}
		hits += max(0, counts[k]-1) // the first is a miss
	}
	return float64(hits) / float64(len(reads))
}

func (s *ratioSection) write(b *strings.Builder) {
	fmt.Fprintf(b, "hits in percent of %d reads of %d keys, whose answers have %d bytes on average (log-normal), do not compress, and are put where they are not\n"+
		"found; from empty. All have the same bytes of memory: an entry is charged its body and, in peers, what theirs takes beside (above);\n"+
		"the store has its tables and its bridge within. best holds, from the first read on, what is read most by the byte. One reader, which\n"+
		"yields after each read; otter does its upkeep at once.\n\n", s.reads, s.keys, s.mean)
	fmt.Fprintf(b, "%-46s %6s %9s", "", "share", "MiB")
	for _, k := range contenders() {
		fmt.Fprintf(b, " %10s", k.name)
	}
	fmt.Fprintf(b, " %10s\n", "best")
	for _, r := range s.rows {
		fmt.Fprintf(b, "%-46s %5.0f%% %9.1f", r.name(), 100*r.share, float64(r.bytes)/(1<<20))
		for _, k := range contenders() {
			fmt.Fprintf(b, " %10.2f", 100*r.hits[k.name])
		}
		best := "-"
		if r.best > 0 {
			best = fmt.Sprintf("%.2f", 100*r.best)
		}
		fmt.Fprintf(b, " %10s\n", best)
	}
}

func (s *ratioSection) aims() (as []aim) {
	for _, r := range s.rows {
		ours, its := 100*r.hits[theStore], 100*r.hits[plainLRU]
		as = append(as, aim{ours >= its, fmt.Sprintf("%s, %.0f %% of all bytes: %.2f %% of hits, aim ≥ the LRU's %.2f", r.name(), 100*r.share, ours, its)})
	}
	return as
}
