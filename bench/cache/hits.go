package cache

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"headgate/bench/load"
)

// questions are asked in turn, so that no one entry is always at hand.
const questions = 64

// warming is how many requests go before each measurement, on the same connections.
const warming = 100

// hitKind is one kind of answer that is kept.
type hitKind struct {
	name   string
	tokens int // of the answer
	stream bool
	body   int // bytes
}

func hitKinds() []hitKind {
	return []hitKind{
		{name: "JSON, short", tokens: 128},
		{name: "stream, short", tokens: 128, stream: true},
		{name: "JSON, long", tokens: 2500},
		{name: "stream, long", tokens: 2500, stream: true},
	}
}

func parallels() []int { return []int{1, 8} }

// hitSample is one measurement of one target.
type hitSample struct {
	p50, p99 time.Duration
	rate     float64
	cpu      time.Duration // of the target's process, for each answer
}

// hitRow is one kind with so many connections, by target.
type hitRow struct {
	kind       hitKind
	parallel   int
	path       string // at the bare handler
	bare, hits []hitSample
}

type hitSection struct{ rows []*hitRow }

// hits loads a node with questions whose answers it has, in a closed loop, and a bare handler in turn.
func hits(ctx context.Context, c *Config, rep *Report) (_ section, err error) {
	f, err := newFleet(c.Dir, "hits")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.stop()) }()
	up, err := f.start(ctx, "upstream", order{Role: "upstream"})
	if err != nil {
		return nil, err
	}
	profile := ""
	if c.Profile != "" {
		if profile, err = filepath.Abs(filepath.Join(c.Profile, "hits.pprof")); err != nil {
			return nil, err
		}
		rep.note("the node that served hits was profiled meanwhile")
	}
	nodes, err := f.cluster(ctx, 1, up.url(), profile)
	if err != nil {
		return nil, err
	}
	kinds := hitKinds()
	bare, err := f.keep(ctx, nodes[0], kinds)
	if err != nil {
		return nil, err
	}
	s := &hitSection{}
	for i, k := range kinds {
		for _, parallel := range parallels() {
			if strings.Contains(k.name, c.Kind) {
				s.rows = append(s.rows, &hitRow{kind: k, parallel: parallel, path: kindPath(i)})
			}
		}
	}
	before, err := f.asked(ctx, up)
	if err != nil {
		return nil, err
	}
	for round := range c.Rounds {
		fmt.Fprintf(c.Log, "  round %d of %d\n", round+1, c.Rounds)
		for _, r := range s.rows {
			if err := f.hitRound(ctx, c, r, nodes[0], bare, round); err != nil {
				return nil, err
			}
		}
	}
	after, err := f.asked(ctx, up)
	if err != nil {
		return nil, err
	}
	if after != before {
		return nil, fmt.Errorf("%d requests asked the model that should have been hits", after-before)
	}
	return s, nil
}

func kindPath(i int) string { return fmt.Sprintf("/kind/%d", i) }

// keep has a node keep all answers, and starts the bare handler with one of each kind.
func (f *fleet) keep(ctx context.Context, n *process, kinds []hitKind) (*process, error) {
	plain := map[string]plainAnswer{}
	for i := range kinds { // all, since a stream is replayed from what was not one
		k := &kinds[i]
		for q := range questions {
			body := question("hit", q, k.tokens, k.stream)
			if !k.stream { // one entry for both forms
				if _, err := f.chat(ctx, n, body, "", "miss"); err != nil {
					return nil, err
				}
			}
			a, err := f.chat(ctx, n, body, "", "exact")
			if err != nil {
				return nil, err
			}
			if q > 0 {
				continue
			}
			k.body = len(a.body)
			file := filepath.Join(f.dir, fmt.Sprintf("answer-%d", i))
			if err := os.WriteFile(file, a.body, 0o600); err != nil {
				return nil, err
			}
			plain[kindPath(i)] = plainAnswer{ContentType: a.kind, File: file}
		}
	}
	return f.start(ctx, "bare", order{Role: "bare", Answers: plain})
}

// hitRound measures both targets once; who comes first changes by the round.
func (f *fleet) hitRound(ctx context.Context, c *Config, r *hitRow, n, bare *process, round int) error {
	targets := []struct {
		p   *process
		url string
		to  *[]hitSample
	}{{bare, bare.url() + r.path, &r.bare}, {n, n.url() + "/v1/chat/completions", &r.hits}}
	if round%2 == 1 {
		targets[0], targets[1] = targets[1], targets[0]
	}
	for _, t := range targets {
		s, err := f.hitSample(ctx, t.p, t.url, r, c.Each)
		if err != nil {
			return fmt.Errorf("%s, %d connections, %s: %w", r.kind.name, r.parallel, t.p.name, err)
		}
		*t.to = append(*t.to, s)
	}
	return nil
}

func (f *fleet) hitSample(ctx context.Context, p *process, url string, r *hitRow, length time.Duration) (hitSample, error) {
	bodies := make([][]byte, questions)
	for i := range bodies {
		bodies[i] = question("hit", i, r.kind.tokens, r.kind.stream)
	}
	t, ok := f.client.Transport.(*http.Transport)
	if !ok {
		return hitSample{}, errors.New("the transport is another's")
	}
	cfg := load.Config{
		URL: url, Header: front(""), Body: func(n int64) []byte { return bodies[n%questions] }, MaxInFlight: r.parallel, Count: warming, Transport: t,
	}
	if _, err := load.Run(ctx, cfg); err != nil {
		return hitSample{}, err
	}
	cfg.Count, cfg.Duration = 0, length
	before, err := cpuTime(p.cmd.Process.Pid)
	if err != nil {
		return hitSample{}, err
	}
	res, err := load.Run(ctx, cfg)
	if err != nil {
		return hitSample{}, err
	}
	after, err := cpuTime(p.cmd.Process.Pid)
	if err != nil {
		return hitSample{}, err
	}
	if res.Good == 0 || res.Good != res.Arrivals {
		return hitSample{}, fmt.Errorf("%d of %d answers are good: %v, %v", res.Good, res.Arrivals, res.Status, res.Errors)
	}
	return hitSample{
		p50: time.Duration(res.Service.ValueAtQuantile(50)), p99: time.Duration(res.Service.ValueAtQuantile(99)),
		rate: res.Throughput(), cpu: (after - before) / time.Duration(res.Good),
	}, nil
}

func (r *hitRow) added() float64 {
	return median(pairs(r.hits, r.bare, func(h, b *hitSample) float64 { return micros(h.p50 - b.p50) }))
}

func (r *hitRow) ratio() float64 {
	return median(pairs(r.hits, r.bare, func(h, b *hitSample) float64 { return float64(h.cpu) / float64(max(b.cpu, 1)) }))
}

func (s *hitSection) write(b *strings.Builder) {
	b.WriteString("a local hit, in a closed loop of so many connections, beside a bare handler that writes the same bytes and does nothing else.\n" +
		"One node does all it does for a paying tenant (authentication, limits, usage log, metrics). CPU is the user and system time of the target's\n" +
		"process by the kernel's account (/proc/PID/stat: what getrusage tells) over the answers; added and ratio are medians of each round's.\n\n")
	fmt.Fprintf(b, "%-14s %7s %5s | %9s %9s %9s | %9s %9s %9s | %9s %9s\n", "", "bytes", "conns", "bare p50", "p99 µs", "cpu µs", "hit p50", "p99 µs", "cpu µs", "added p50", "cpu ratio")
	for _, r := range s.rows {
		fmt.Fprintf(b, "%-14s %7d %5d |", r.kind.name, r.kind.body, r.parallel)
		for _, t := range [...][]hitSample{r.bare, r.hits} {
			fmt.Fprintf(b, " %9.1f %9.1f %9.1f |", median(each(t, func(s *hitSample) float64 { return micros(s.p50) })),
				median(each(t, func(s *hitSample) float64 { return micros(s.p99) })), median(each(t, func(s *hitSample) float64 { return micros(s.cpu) })))
		}
		fmt.Fprintf(b, " %9.1f %9.2f\n", r.added(), r.ratio())
	}
}

func (s *hitSection) aims() (as []aim) {
	for _, r := range s.rows {
		if v := r.added(); r.parallel == 1 {
			as = append(as, aim{v <= 60, fmt.Sprintf("a local hit, %s: adds %.1f µs to the p50, aim ≤ 60", r.kind.name, v)})
		}
	}
	for _, r := range s.rows {
		v := r.ratio()
		as = append(as, aim{v <= 1.2, fmt.Sprintf("a local hit, %s, %d connections: %.2f of a bare answer's CPU, aim ≤ 1.2", r.kind.name, r.parallel, v)})
	}
	return as
}
