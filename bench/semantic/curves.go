package semantic

import (
	"context"
	"sync"

	"headgate/bench/semantic/replay"
	"headgate/cache/threshold"
)

// contender is a way to decide, with the values of its one parameter, from many hits to few.
type contender struct {
	name      string
	policy    func(v float64) threshold.Policy
	values    []float64
	reluctant bool
	coarse    bool
	ablation  bool // ours with something missing: not drawn, and not held against aims
}

// auditShare is the share of would-be hits that is checked, by all but vCache, which has no audits.
const auditShare = 0.05

func contenders() []contender {
	fixed := func(v float64) threshold.Policy {
		return threshold.Policy{Mode: threshold.Static, Threshold: v, HitErrorBound: 1, ErrorBound: 1, Audit: auditShare}
	}
	learned := func(v float64) threshold.Policy {
		return threshold.Policy{Mode: threshold.Learned, HitErrorBound: v, ErrorBound: 1, Audit: auditShare}
	}
	vcache := func(v float64) threshold.Policy {
		return threshold.Policy{Mode: threshold.VCache, ErrorBound: v, HitErrorBound: 1}
	}
	similarities := []float64{0.65, 0.7, 0.725, 0.75, 0.775, 0.8, 0.825, 0.85, 0.875, 0.9, 0.925, 0.95, 0.975}
	bounds := []float64{0.3, 0.25, 0.2, 0.15, 0.125, 0.1, 0.075, 0.05, 0.035, 0.025, 0.02, 0.015, 0.01, 0.005}
	return []contender{
		{name: static, policy: fixed, values: similarities},
		{name: "vCache", policy: vcache, values: []float64{0.2, 0.15, 0.1, 0.075, 0.05, 0.03, 0.02, 0.01}, reluctant: true},
		{name: ours, policy: learned, values: bounds},
		{name: "static, inserting only other answers", policy: fixed, values: similarities, reluctant: true, ablation: true},
		{name: "ours, inserting only other answers", policy: learned, values: bounds, reluctant: true, ablation: true},
		{name: "ours, new answers compared with the candidate's only", policy: learned, values: bounds, coarse: true, ablation: true},
	}
}

const static, ours = "static", "ours"

// curve is what a contender came to in one set.
type curve struct {
	contender
	guarded bool
	points  [][]replay.Result // by value, then by seed
}

// replays plays the contenders, on as many cores as there are.
func (m *measured) replays(ctx context.Context, c *Config, all []contender) error {
	for _, guarded := range []bool{false, true} {
		for _, who := range all {
			points := make([][]replay.Result, len(who.values))
			for i := range points {
				points[i] = make([]replay.Result, c.Seeds)
			}
			m.curves = append(m.curves, &curve{contender: who, guarded: guarded, points: points})
		}
	}
	for seed := range c.Seeds {
		plain := replay.NewStream(m.prompts, m.vectors, c.Questions, uint64(seed))
		streams := map[bool]*replay.Stream{false: plain, true: plain.Guarded()}
		work := make(chan func())
		var crew sync.WaitGroup
		for range workers {
			crew.Go(func() {
				for f := range work {
					f()
				}
			})
		}
		for _, k := range m.curves {
			for i, v := range k.values {
				if ctx.Err() != nil {
					continue
				}
				work <- func() {
					k.points[i][seed] = streams[k.guarded].Run(replay.Options{Policy: k.policy(v), Seed: uint64(seed), Reluctant: k.reluctant, Coarse: k.coarse})
				}
			}
		}
		close(work)
		crew.Wait()
	}
	return ctx.Err()
}

// workers is how many replays run at once.
const workers = 2

// mean is the mean of f over the seeds.
func mean(rs []replay.Result, f func(*replay.Result) float64) (sum float64) {
	for i := range rs {
		sum += f(&rs[i])
	}
	return sum / float64(len(rs))
}

// perHit is the share of wrong ones among all hits of all seeds.
func perHit(rs []replay.Result) float64 {
	var sum replay.Result
	for i := range rs {
		sum.Add(&rs[i])
	}
	return sum.PerHit()
}

// reached is the greatest hit rate with at most that share of wrong hits, over the seeds pick names: at a point, or
// on the line between two neighbours of the sweep.
func (k *curve) reached(most float64, pick func([]replay.Result) []replay.Result) (best float64) {
	var lastX, lastY float64
	for i, p := range k.points {
		rs := pick(p)
		x, y := perHit(rs), mean(rs, (*replay.Result).HitRate)
		if x <= most {
			best = max(best, y)
		}
		if i > 0 && (x <= most) != (lastX <= most) {
			best = max(best, y+(lastY-y)*(most-x)/(lastX-x))
		}
		lastX, lastY = x, y
	}
	return best
}

func every(rs []replay.Result) []replay.Result { return rs }

func only(seed int) func([]replay.Result) []replay.Result {
	return func(rs []replay.Result) []replay.Result { return rs[seed : seed+1] }
}

// find is the set's curve of that name.
func (m *measured) find(name string, guarded bool) *curve {
	for _, k := range m.curves {
		if k.name == name && k.guarded == guarded {
			return k
		}
	}
	return nil
}
