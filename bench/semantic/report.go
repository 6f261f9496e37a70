package semantic

import (
	"fmt"
	"strings"
	"time"

	"headgate/bench/semantic/replay"
)

// Report is what a run has found.
type Report struct {
	config   Config
	embedder string
	started  time.Time
	took     time.Duration
	machine  string
	commit   string
	sets     []*measured
}

// targets are the shares of wrong hits at which hit rates are compared.
func targets() []float64 { return []float64{0.01, 0.02, 0.05, 0.10} }

func word(guarded bool) string {
	if guarded {
		return "guards"
	}
	return "no guards"
}

// String is the report for people.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "the semantic cache: replays of %d questions, mean of %d orders; a question's answer is that of its intent\n", r.config.Questions, r.config.Seeds)
	fmt.Fprintf(&b, "started  %s, took %s\ncommit   %s\nmachine  %s\nembedder %s\n", r.started.Format(time.RFC3339), r.took.Round(time.Second), r.commit, r.machine, r.embedder)
	b.WriteString("\nthe embedder: AUC of pairs of one intent against pairs of two, over all pairs; time to embed one question by itself, median\n\n")
	for _, m := range r.sets {
		fmt.Fprintf(&b, "  %-25s %6d questions %9d pairs   AUC %.4f   %7.2f ms\n", m.name, len(m.prompts), m.pairs, m.auc, float64(m.each)/1e6)
	}
	for _, m := range r.sets {
		m.write(&b)
	}
	r.aims(&b)
	return b.String()
}

// write tells of a set: first by error, then by parameter.
func (m *measured) write(b *strings.Builder) {
	fmt.Fprintf(b, "\n%s: hit rate with at most such a share of wrong hits\n\n%-55s %-10s", m.name, "", "")
	for _, t := range targets() {
		fmt.Fprintf(b, "  ≤ %.2f", t)
	}
	b.WriteString("\n")
	for _, k := range m.curves {
		fmt.Fprintf(b, "%-55s %-10s", k.name, word(k.guarded))
		for _, t := range targets() {
			fmt.Fprintf(b, "  %6.3f", k.reached(t, every))
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(b, "\n%s: by parameter (static: similarity; vCache: δ, error a request; ours: bound of the error a hit)\n\n", m.name)
	fmt.Fprintf(b, "%-10s %-10s %6s | %8s %11s %9s  worst seed | %9s late\n", "", "", "", "hit rate", "per request", "per hit", "hit rate")
	for _, k := range m.curves {
		if k.ablation {
			continue
		}
		for i, v := range k.values {
			rs, worst := k.points[i], 0.0
			for j := range rs {
				worst = max(worst, rs[j].PerHit())
			}
			fmt.Fprintf(b, "%-10s %-10s %6g | %8.3f %11.4f %9.4f  %10.4f | %9.3f\n", k.name, word(k.guarded), v,
				mean(rs, (*replay.Result).HitRate), mean(rs, (*replay.Result).PerRequest), perHit(rs), worst, mean(rs, (*replay.Result).LateHitRate))
		}
	}
}

// aims says what was to be reached.
func (r *Report) aims(b *strings.Builder) {
	b.WriteString("\naims\n")
	say := func(kept bool, format string, args ...any) {
		fmt.Fprintf(b, "  %-4s  %s\n", map[bool]string{true: "kept", false: "MISS"}[kept], fmt.Sprintf(format, args...))
	}
	for _, m := range r.sets {
		for _, guarded := range []bool{false, true} {
			s, o := m.find(static, guarded), m.find(ours, guarded)
			for _, t := range targets() {
				won := 0
				for seed := range r.config.Seeds {
					if o.reached(t, only(seed)) > s.reached(t, only(seed)) {
						won++
					}
				}
				say(won == r.config.Seeds, "%s, %s: more hits than static at %.2f wrong a hit: %.3f to %.3f, in %d of %d orders",
					m.name, word(guarded), t, o.reached(t, every), s.reached(t, every), won, r.config.Seeds)
			}
			above, runs, worst := 0, 0, 0.0
			for i, bound := range o.values {
				for j := range o.points[i] {
					runs++
					if e := o.points[i][j].PerHit(); e > bound {
						above++
						worst = max(worst, e/bound)
					}
				}
			}
			say(above*10 <= runs, "%s, %s: ours keeps its bound of the error a hit in nine of ten replays: above it in %d of %d, at worst by a factor of %.2f", m.name, word(guarded), above, runs, worst)
		}
	}
}

// csv has one line for each value of a contender's parameter: sums over the orders, and the worst of them.
func (r *Report) csv() string {
	var b strings.Builder
	b.WriteString("set,guards,policy,parameter,orders,requests,served,wrong,explored,audited,entries,hit_rate,error_per_request,error_per_hit,worst_error_per_hit,late_hit_rate\n")
	for _, m := range r.sets {
		for _, k := range m.curves {
			for i, v := range k.values {
				var sum replay.Result
				worst := 0.0
				for _, p := range k.points[i] {
					sum.Add(&p)
					worst = max(worst, p.PerHit())
				}
				fmt.Fprintf(&b, "%s,%t,%q,%g,%d,%d,%d,%d,%d,%d,%d,%.4f,%.5f,%.5f,%.5f,%.4f\n", m.name, k.guarded, k.name, v, len(k.points[i]),
					sum.Requests, sum.Served, sum.Wrong, sum.Explored, sum.Audited, sum.Entries, sum.HitRate(), sum.PerRequest(), sum.PerHit(), worst, sum.LateHitRate())
			}
		}
	}
	return b.String()
}
