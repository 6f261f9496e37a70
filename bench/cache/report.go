package cache

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// section is what a part has found.
type section interface {
	write(b *strings.Builder)
	aims() []aim
}

// measured is a section, with the load of the machine before and after it.
type measured struct {
	section
	before, after string
}

// aim is one that the figures are held against.
type aim struct {
	kept bool
	text string
}

// Report is what a run has found.
type Report struct {
	config   Config
	started  time.Time
	took     time.Duration
	machine  string
	commit   string
	sections []measured
	notes    []string
	charges  map[string]charge // by contender; see memory
}

func (r *Report) note(format string, args ...any) {
	if s := fmt.Sprintf(format, args...); !slices.Contains(r.notes, s) {
		r.notes = append(r.notes, s)
	}
}

// String is the report for people.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "the cache of answers, median of %d rounds where nothing else is said\n", r.config.Rounds)
	fmt.Fprintf(&b, "started  %s, took %s\ncommit   %s\nmachine  %s\n", r.started.Format(time.RFC3339), r.took.Round(time.Second), r.commit, r.machine)
	var as []aim
	for _, s := range r.sections {
		b.WriteString("\n")
		s.write(&b)
		fmt.Fprintf(&b, "load of the machine: %s before, %s after\n", s.before, s.after)
		as = append(as, s.aims()...)
	}
	b.WriteString("\naims\n")
	for _, a := range as {
		fmt.Fprintf(&b, "  %-4s  %s\n", map[bool]string{true: "kept", false: "MISS"}[a.kept], a.text)
	}
	for _, n := range r.notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	return b.String()
}

func median[T cmp.Ordered](values []T) T {
	values = slices.Sorted(slices.Values(values))
	var none T
	if len(values) == 0 {
		return none
	}
	return values[(len(values)-1)/2]
}

// pairs is what f makes of two cells, round by round.
func pairs[S any](a, b []S, f func(a, b *S) float64) []float64 {
	out := make([]float64, min(len(a), len(b)))
	for i := range out {
		out[i] = f(&a[i], &b[i])
	}
	return out
}

// each is what f makes of a cell, round by round.
func each[S any](a []S, f func(*S) float64) []float64 {
	return pairs(a, a, func(s, _ *S) float64 { return f(s) })
}

// micros is a duration in µs.
func micros(d time.Duration) float64 { return float64(d) / 1e3 }
