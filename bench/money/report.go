package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// key names a cell: who decided or wrote, for how many callers, on how many accounts (0: on none), at which pace (0: as
// fast as may be).
type key struct {
	who               string
	callers, accounts int
	pace              float64
}

// row is a cell's samples, one a round.
type row struct {
	key
	samples []sample
}

// report is what a run has found.
type report struct {
	config     config
	started    time.Time
	took       time.Duration
	machine    string
	commit     string
	order      []key
	rows       map[key]*row
	recordSize int // bytes
	filled     time.Duration
	exports    []exported
	notes      []string
}

func (r *report) add(k key, s sample) {
	if r.rows[k] == nil {
		r.rows[k] = &row{key: k}
		r.order = append(r.order, k)
	}
	r.rows[k].samples = append(r.rows[k].samples, s)
}

func (r *report) note(s string) {
	if !slices.Contains(r.notes, s) {
		r.notes = append(r.notes, s)
	}
}

func median[T cmp.Ordered](values []T) T {
	values = slices.Sorted(slices.Values(values))
	var none T
	if len(values) == 0 {
		return none
	}
	return values[(len(values)-1)/2]
}

// of gives the median over the rounds of what f makes of a sample.
func (r *row) of(f func(*sample) float64) float64 {
	vs := make([]float64, len(r.samples))
	for i := range r.samples {
		vs[i] = f(&r.samples[i])
	}
	return median(vs)
}

// against gives the median over the rounds of f's ratio between this cell and another.
func (r *row) against(other *row, f func(*sample) float64) float64 {
	var vs []float64
	for i := range r.samples {
		if other != nil && i < len(other.samples) {
			vs = append(vs, f(&r.samples[i])/f(&other.samples[i]))
		}
	}
	return median(vs)
}

func p50(s *sample) float64  { return float64(s.p50) / 1e3 }
func p99(s *sample) float64  { return float64(s.p99) / 1e3 }
func rate(s *sample) float64 { return s.perSecond() }

// cpuEach is the processor time of this process for each operation, in µs.
func cpuEach(s *sample) float64 { return float64(s.cpu.Microseconds()) / float64(max(s.ops, 1)) }

// String is the report for people.
func (r *report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "budgets and the usage log, median of %d rounds of %v\n", r.config.rounds, r.config.each)
	fmt.Fprintf(&b, "started  %s, took %s\ncommit   %s\nmachine  %s\n", r.started.Format(time.RFC3339), r.took.Round(time.Second), r.commit, r.machine)
	r.decisions(&b)
	r.records(&b)
	r.exported(&b)
	b.WriteString("\naims\n")
	for _, a := range r.aims() {
		fmt.Fprintf(&b, "  %-4s  %s\n", map[bool]string{true: "kept", false: "MISS"}[a.kept], a.text)
	}
	for _, n := range r.notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	return b.String()
}

func (r *report) decisions(b *strings.Builder) {
	b.WriteString("\ndecisions on three nodes in this process, ledgers over loopback with fsync, no HTTP. Each takes from one budget, writes the\n" +
		"reservation, the usage, and settles; callers go round the nodes and the accounts. A commit is the least change, at the leader;\n" +
		"Redis checks and lowers by a script, and syncs before it answers. Ratios are to a commit by as many callers in the same round.\n" +
		"Draws are for each decision, with reports of what was spent; cpu is this process's, that of all nodes and without Redis's.\n\n")
	fmt.Fprintf(b, "%-22s %7s %8s %12s %9s %9s %9s %9s %10s %10s\n", "", "callers", "accounts", "decisions/s", "p50 µs", "p99 µs", "cpu µs", "draws", "rate ratio", "p50 ratio")
	for _, k := range r.order {
		switch k.who {
		case leased, direct, commits, redised:
		default:
			continue
		}
		w, base := r.rows[k], r.rows[key{commits, k.callers, 0, 0}]
		accounts, draws := "-", "-"
		if k.accounts > 0 {
			accounts = fmt.Sprint(k.accounts)
		}
		if k.who == leased || k.who == direct {
			draws = fmt.Sprintf("%.4f", w.of(func(s *sample) float64 { return float64(s.draws) / float64(max(s.ops, 1)) }))
		}
		name := k.who
		if k.pace > 0 {
			name += fmt.Sprintf(" %gk/s", k.pace/1000)
		}
		fmt.Fprintf(b, "%-22s %7d %8s %12.0f %9.1f %9.1f %9.1f %9s %10.2f %10.4f\n", name, k.callers, accounts, w.of(rate), w.of(p50), w.of(p99), w.of(cpuEach), draws, w.against(base, rate), w.against(base, p50))
	}
}

func (r *report) records(b *strings.Builder) {
	fmt.Fprintf(b, "\nrecords: a reservation and its usage take turns, %d bytes each on average; a bare write has as many, slog the usage's fields.\n"+
		"µs a record is the time that passed by the records of all callers; ratios are to a bare write by as many.\n\n", r.recordSize)
	fmt.Fprintf(b, "%-22s %7s %12s %12s %9s %9s %9s %10s\n", "", "callers", "records/s", "µs a record", "p50 µs", "p99 µs", "cpu µs", "µs ratio")
	for _, k := range r.order {
		switch k.who {
		case journaled, synced, slogged, bare, bareSync:
		default:
			continue
		}
		w, base := r.rows[k], r.rows[key{bare, k.callers, 0, 0}]
		fmt.Fprintf(b, "%-22s %7d %12.0f %12.2f %9.2f %9.2f %9.2f %10.2f\n", k.who, k.callers, w.of(rate), w.of(perRecord), w.of(p50), w.of(p99), w.of(cpuEach), w.against(base, perRecord))
	}
}

// perRecord is the µs that passed for each.
func perRecord(s *sample) float64 { return float64(s.took.Microseconds()) / float64(max(s.ops, 1)) }

func (r *report) exported(b *strings.Builder) {
	fmt.Fprintf(b, "\nexport of %d records (written in %s), once, by a process of its own\n\n", r.config.records, r.filled.Round(100*time.Millisecond))
	fmt.Fprintf(b, "%-22s %12s %12s %9s %9s\n", "", "records/s", "lines", "s", "peak MiB")
	for _, e := range r.exports {
		fmt.Fprintf(b, "%-22s %12.0f %12d %9.1f %9.0f\n", "CSV "+cmp.Or(e.By, "of requests"), float64(e.Records)/e.Seconds, e.Lines, e.Seconds, float64(e.Peak)/(1<<20))
	}
}

// aim is one that the figures are held against.
type aim struct {
	kept bool
	text string
}

func (r *report) aims() (as []aim) {
	for _, accounts := range accountsOf() {
		least := 0.0
		for i, callers := range callersOf() {
			if v := r.value(key{leased, callers, accounts, 0}, rate); i == 0 || v < least {
				least = v
			}
		}
		as = append(as, aim{least >= steady, fmt.Sprintf("with blocks in hand, %d accounts: %.0f decisions a second at the least, aim ≥ %d", accounts, least, steady)})
		for _, k := range []key{{leased, 1, accounts, 0}, {leased, 64, accounts, steady}} {
			v := r.value(k, p50)
			as = append(as, aim{v <= 20, fmt.Sprintf("with blocks in hand, %d accounts, %d callers%s: p50 %.1f µs, aim ≤ 20", accounts, k.callers, map[bool]string{true: " at 20,000 a second"}[k.pace > 0], v)})
		}
		for _, callers := range callersOf() {
			w, base := r.rows[key{direct, callers, accounts, 0}], r.rows[key{commits, callers, 0, 0}]
			if w != nil && base != nil {
				v := w.against(base, p50)
				as = append(as, aim{v <= 1, fmt.Sprintf("each draws, %d accounts, %d callers: p50 %.2f of a commit's, aim ≤ 1", accounts, callers, v)})
			}
		}
	}
	for _, callers := range writersOf() {
		v := r.value(key{journaled, callers, 0, 0}, perRecord)
		as = append(as, aim{v <= 2, fmt.Sprintf("journal, %d callers: %.2f µs a record, aim ≤ 2", callers, v)})
	}
	return as
}

func (r *report) value(k key, f func(*sample) float64) float64 {
	if w := r.rows[k]; w != nil {
		return w.of(f)
	}
	return 0
}
