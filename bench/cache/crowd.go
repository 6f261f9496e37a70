package cache

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	crowdTTFT   = 300 * time.Millisecond // of the model, so that all are there before it answers
	crowdTokens = 128
)

// crowdKind is one way in which many ask at once.
type crowdKind struct {
	name   string
	stream bool
	mode   string // of the cache
	bare   bool   // of a handler that does nothing, instead of the cluster
}

func crowdKinds() []crowdKind {
	return []crowdKind{
		{name: "JSON"},
		{name: "stream", stream: true},
		{name: "JSON, cache bypassed", mode: "bypass"},
		{name: "stream, cache bypassed", stream: true, mode: "bypass"},
		{name: "JSON, of a bare handler", bare: true},
	}
}

// crowdSample is what became of one crowd.
type crowdSample struct {
	calls     int64 // of the model
	failed    int
	reason    error         // why one did
	p50, last time.Duration // of answers, since all were sent off
}

type crowdRow struct {
	crowdKind
	samples []crowdSample
}

type crowdSection struct {
	nodes, crowd int
	rows         []*crowdRow
}

// crowd has many ask a cluster the same at once, spread over its nodes.
func crowd(ctx context.Context, c *Config, rep *Report) (_ section, err error) {
	f, err := newFleet(c.Dir, "crowd")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.stop()) }()
	up, err := f.start(ctx, "upstream", order{Role: "upstream", TTFT: crowdTTFT})
	if err != nil {
		return nil, err
	}
	nodes, err := f.cluster(ctx, c.Nodes, up.url(), "")
	if err != nil {
		return nil, err
	}
	a, err := f.chat(ctx, nodes[0], question("bare", 0, crowdTokens, false), "bypass", "bypass")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(f.dir, "answer")
	if err := os.WriteFile(file, a.body, 0o600); err != nil {
		return nil, err
	}
	bare, err := f.start(ctx, "bare", order{Role: "bare", Answers: map[string]plainAnswer{"/": {a.kind, file}}})
	if err != nil {
		return nil, err
	}
	s := &crowdSection{nodes: c.Nodes, crowd: c.Crowd}
	for _, k := range crowdKinds() {
		s.rows = append(s.rows, &crowdRow{crowdKind: k})
	}
	for round := range c.Rounds + 1 { // the first opens the connections and does not count
		for i := range s.rows {
			r := s.rows[(i+round)%len(s.rows)]
			targets := nodes
			if r.bare {
				targets = []*process{bare}
			}
			sample, err := f.gather(ctx, c.Crowd, targets, up, r.crowdKind, fmt.Sprintf("crowd %s %d", r.name, round))
			if err != nil {
				return nil, err
			}
			if sample.failed > 0 {
				rep.note("crowd, %s: %d of %d requests failed, such as by %v", r.name, sample.failed, c.Crowd, sample.reason)
			}
			if round > 0 {
				r.samples = append(r.samples, sample)
			}
		}
	}
	return s, nil
}

// gather sends one crowd off and waits for its last answer.
func (f *fleet) gather(ctx context.Context, n int, targets []*process, up *process, k crowdKind, name string) (s crowdSample, err error) {
	before, err := f.asked(ctx, up)
	if err != nil {
		return s, err
	}
	body, answers, off := question(name, 0, crowdTokens, k.stream), make([]answered, n), make(chan struct{})
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() {
			<-off
			answers[i] = f.ask(ctx, http.MethodPost, targets[i%len(targets)].url()+"/v1/chat/completions", body, front(k.mode))
		})
	}
	began := time.Now()
	close(off)
	all.Wait()
	after, err := f.asked(ctx, up)
	if err != nil {
		return s, err
	}
	s.calls = after - before
	var took []time.Duration
	for i := range answers {
		a := &answers[i]
		if a.err != nil || a.status != http.StatusOK || k.stream && !strings.Contains(string(a.body), "data: [DONE]") {
			s.failed++
			s.reason = a.bad()
			continue
		}
		took = append(took, a.at.Sub(began))
	}
	if len(took) == 0 {
		return s, fmt.Errorf("nobody was answered: %w", answers[0].bad())
	}
	s.p50, s.last = median(took), slices.Max(took)
	return s, nil
}

func (s *crowdSection) write(b *strings.Builder) {
	fmt.Fprintf(b, "%d requests at once for what nobody has, spread over %d nodes on this machine, with connections open; the model takes %v to its first token.\n"+
		"Times are since all were sent off, and hold what the one generator takes for all of them: so does the bare handler's.\n\n", s.crowd, s.nodes, crowdTTFT)
	fmt.Fprintf(b, "%-26s %14s %14s %12s %12s %12s\n", "", "calls", "calls at most", "failed", "p50 ms", "last ms")
	for _, r := range s.rows {
		fmt.Fprintf(b, "%-26s %14d %14d %12d %12.1f %12.1f\n", r.name, median(calls(r.samples)), slices.Max(calls(r.samples)), failures(r.samples),
			median(each(r.samples, func(s *crowdSample) float64 { return micros(s.p50) / 1e3 })), median(each(r.samples, func(s *crowdSample) float64 { return micros(s.last) / 1e3 })))
	}
}

func calls(ss []crowdSample) (out []int64) {
	for _, s := range ss {
		out = append(out, s.calls)
	}
	return out
}

func failures(ss []crowdSample) (n int) {
	for _, s := range ss {
		n += s.failed
	}
	return n
}

func (s *crowdSection) aims() (as []aim) {
	for _, r := range s.rows {
		if r.mode == "" && !r.bare {
			most, failed := slices.Max(calls(r.samples)), failures(r.samples)
			as = append(as, aim{most == 1 && failed == 0, fmt.Sprintf("%d at once over %d nodes, %s: %d calls of the model at most, %d failed, aim 1 and 0", s.crowd, s.nodes, r.name, most, failed)})
		}
	}
	return as
}
