package hnsw

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"headgate/cache/hnsw"
)

// Report is what a run has found.
type Report struct {
	config    Config
	started   time.Time
	took      time.Duration
	machine   string
	commit    string
	data      string
	peer      peers
	deletes   []deleted
	readers   []readerRow
	few       []fewRow
	crossover int
	aims      []aim
}

// peers are hnswlib, ours, and ours with int8, in this order everywhere.
type peers struct {
	missing  string
	builds   [][3]time.Duration
	bytes    [3]int64
	raw      int64
	searches []searched
}

type searched struct {
	ef       int
	cpu      [3][]time.Duration
	ten, one [3]float64
}

type deleted struct {
	what          string
	ten, one      float64
	search, write time.Duration
	stats         hnsw.Stats
}

type readerRow struct {
	readers int
	did     [2][]crowded // alone, and beside a writer
}

// crowded is what goroutines did in a second, and the CPU µs of a search.
type crowded struct{ searches, writes, cpu float64 }

// of is the median of a figure.
func (r *readerRow) of(beside int, figure func(crowded) float64) float64 {
	var all []float64
	for _, d := range r.did[beside] {
		all = append(all, figure(d))
	}
	return median(all)
}

type fewRow struct {
	n   int
	cpu [2][]time.Duration // all, graph
}

// aim is one that the figures are held against.
type aim struct {
	kept bool
	text string
}

func (r *Report) aim(kept bool, format string, args ...any) {
	r.aims = append(r.aims, aim{kept, fmt.Sprintf(format, args...)})
}

// String is the report for people.
func (r *Report) String() string {
	var b strings.Builder
	r.aims = nil
	fmt.Fprintf(&b, "cache/hnsw: %s, %d queries for the nearest %d, M %d, efConstruction %d\n", r.data, r.config.Queries, k, r.config.M, r.config.EfConstruction)
	fmt.Fprintf(&b, "started  %s, took %s\ncommit   %s\nmachine  %s\n", r.started.Format(time.RFC3339), r.took.Round(time.Second), r.commit, r.machine)
	r.writePeer(&b)
	r.writeDeletes(&b)
	r.writeReaders(&b)
	r.writeFew(&b)
	b.WriteString("\naims\n")
	for _, a := range r.aims {
		fmt.Fprintf(&b, "  %-4s  %s\n", map[bool]string{true: "kept", false: "MISS"}[a.kept], a.text)
	}
	return b.String()
}

func (r *Report) writePeer(b *strings.Builder) {
	p := &r.peer
	if p.missing != "" {
		fmt.Fprintf(b, "\nbeside hnswlib: not measured: %s\n", p.missing)
	}
	if len(p.builds) == 0 {
		return
	}
	fmt.Fprintf(b, "\nbeside hnswlib (g++ -O3 -march=native), one thread each, by CPU time; medians of %d builds and of %d rounds of searches, ratios of each round's\n\n",
		len(p.builds), r.config.Rounds)
	b.WriteString("                     hnswlib    float32       int8 |  float32 and int8 to hnswlib\n")
	var build [3][]float64
	for i := range build {
		for _, t := range p.builds {
			build[i] = append(build[i], t[i].Seconds())
		}
	}
	ratio, ratio8 := median(ratios(build[1], build[0])), median(ratios(build[2], build[0]))
	fmt.Fprintf(b, "build, s          %10.2f %10.2f %10.2f | %8.3f %8.3f\n", median(build[0]), median(build[1]), median(build[2]), ratio, ratio8)
	r.aim(ratio <= 1.1, "build %.3f of hnswlib's, at most 1.1", ratio)
	raw := float64(p.raw)
	fmt.Fprintf(b, "bytes to raw      %10.3f %10.3f %10.3f |\n\n", float64(p.bytes[0])/raw, float64(p.bytes[1])/raw, float64(p.bytes[2])/raw)
	r.aim(float64(p.bytes[1])/raw <= 1.15, "memory %.3f of the raw vectors, at most 1.15 (hnswlib %.3f)", float64(p.bytes[1])/raw, float64(p.bytes[0])/raw)
	b.WriteString("   ef      recall@10 (@1) of the three               | CPU µs of a query            |  float32 and int8 to hnswlib\n")
	best8 := 0.0
	for i := range p.searches {
		s := &p.searches[i]
		var us [3][]float64
		for j := range us {
			for _, t := range s.cpu[j] {
				us[j] = append(us[j], float64(t)/1e3)
			}
		}
		ratio, ratio8 := median(ratios(us[1], us[0])), median(ratios(us[2], us[0]))
		fmt.Fprintf(b, "%5d %.4f (%.3f) %.4f (%.3f) %.4f (%.3f) | %8.1f %8.1f %8.1f | %8.3f %8.3f\n", s.ef,
			s.ten[0], s.one[0], s.ten[1], s.one[1], s.ten[2], s.one[2], median(us[0]), median(us[1]), median(us[2]), ratio, ratio8)
		most := 1.0
		if s.ef > 64 {
			most = 1.2
		}
		r.aim(ratio <= most, "CPU of a query at ef %d %.3f of hnswlib's, at most %.1f", s.ef, ratio, most)
		r.aim(s.ten[1] >= s.ten[0]-.005, "recall@10 at ef %d %+.4f beside hnswlib's, at least -.005", s.ef, s.ten[1]-s.ten[0])
		best8 = max(best8, s.ten[2])
	}
	small := float64(p.bytes[2]) / raw
	r.aim(small <= .35 && best8 >= .97, "int8: memory %.3f of the raw float32, at most .35, at recall@10 up to %.4f, at least .97", small, best8)
}

func (r *Report) writeDeletes(b *strings.Builder) {
	if len(r.deletes) == 0 {
		return
	}
	b.WriteString("\ndeletes, searched at ef 64; a write is CPU for one\n\n                     recall@10       @1  search µs   write µs       len    slots     dead\n")
	for _, d := range r.deletes {
		fmt.Fprintf(b, "%-20s %9.4f %8.4f %10.1f %10.1f %9d %8d %8d\n", d.what, d.ten, d.one,
			float64(d.search)/1e3, float64(d.write)/1e3, d.stats.Len, d.stats.Slots, d.stats.Dead)
	}
	all, after, fresh := r.deletes[0], r.deletes[1], r.deletes[2]
	r.aim(after.one >= .99,
		"recall@1 at ef 64 after 30 %% deletes %.4f, at least .99 (before %.4f, new %.4f)", after.one, all.one, fresh.one)
}

func (r *Report) writeReaders(b *strings.Builder) {
	if len(r.readers) == 0 {
		return
	}
	b.WriteString("\nsearches at ef 64 by so many goroutines, alone, and beside one that replaces vectors all the time. What they do in a\n" +
		"second depends on what else the machine does; CPU µs of a search, by the clock of its thread, says what they do to each other\n\n" +
		" readers    alone/s  beside/s   writes/s | CPU alone    beside\n")
	searches, writes, cpu := func(c crowded) float64 { return c.searches }, func(c crowded) float64 { return c.writes }, func(c crowded) float64 { return c.cpu }
	for i := range r.readers {
		row := &r.readers[i]
		fmt.Fprintf(b, "%8d %10.0f %9.0f %10.0f | %9.1f %9.1f\n", row.readers, row.of(0, searches), row.of(1, searches), row.of(1, writes), row.of(0, cpu), row.of(1, cpu))
	}
	first, last := &r.readers[0], &r.readers[len(r.readers)-1]
	ratio, beside := last.of(0, cpu)/first.of(0, cpu), last.of(1, cpu)/first.of(0, cpu)
	r.aim(ratio <= 1.25, "CPU of a search of %d goroutines %.2f of that of one, at most 1.25", last.readers, ratio)
	r.aim(beside <= 1.25, "CPU of a search of %d goroutines beside a writer %.2f of that of one, at most 1.25", last.readers, beside)
}

func (r *Report) writeFew(b *strings.Builder) {
	if len(r.few) == 0 {
		return
	}
	b.WriteString("\nfew vectors: CPU µs of a query that looks at all, and by a graph at ef 64\n\n       n        all      graph\n")
	for _, row := range r.few {
		fmt.Fprintf(b, "%8d %10.1f %10.1f\n", row.n, float64(median(row.cpu[0]))/1e3, float64(median(row.cpu[1]))/1e3)
	}
	fmt.Fprintf(b, "Crossover says %d\n", r.crossover)
}

func ratios(a, b []float64) []float64 {
	out := make([]float64, min(len(a), len(b)))
	for i := range out {
		out[i] = a[i] / b[i]
	}
	return out
}

func median[T cmp.Ordered](values []T) T {
	values = slices.Sorted(slices.Values(values))
	var none T
	if len(values) == 0 {
		return none
	}
	return values[(len(values)-1)/2]
}
