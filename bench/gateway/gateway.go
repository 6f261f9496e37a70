package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"headgate/bench/load"
	benchnginx "headgate/bench/nginx"
	"headgate/bench/origin"
)

// Config says what is measured and how long. The zero value of a field means its
// default.
type Config struct {
	// Self is the command that calls Child first thing. Default: this executable
	// with its own arguments.
	Self []string
	// Headgate is the binary to measure; without it a second bare proxy is.
	Headgate string
	// HeadgateArgs follow the arguments of "headgate serve".
	HeadgateArgs []string
	// LiteLLM is the command of LiteLLM's proxy; without it LiteLLM is left out.
	LiteLLM string
	// Nginx is its command. Default: nginx where it is found; "none" leaves it out.
	Nginx string
	// Peers are measured, too.
	Peers []Peer
	// PeerKey is the bearer token that peers are sent. Default: one of Headgate's form.
	PeerKey string
	// Upstream is where the simulated vLLM listens. Default: a free port of loopback.
	Upstream string
	// Quick makes it some seconds: whether it works, not how well.
	Quick bool
	// Rounds of measurements. Default: 5.
	Rounds int
	// Each is how long one measurement takes. Default: 4 s.
	Each time.Duration
	// ChatRate, StreamRate and SlowRate are arrivals a second: of 1 KB chats, of
	// streams of 300 chunks a millisecond apart, and of the chats that LiteLLM is to
	// keep up with.
	// Defaults: 400, 15, 20.
	ChatRate, StreamRate, SlowRate float64
	// Parallel is the number under way at saturation. Default: 32.
	Parallel int
	// Held is the number of streams that stand open while memory is measured.
	// Default: 500.
	Held int
	// Log receives progress and the processes' own output, if set.
	Log io.Writer
}

// Validate reports what makes no sense.
func (c Config) Validate() error {
	if c.Rounds < 0 || c.Each < 0 || c.ChatRate < 0 || c.StreamRate < 0 || c.SlowRate < 0 || c.Parallel < 0 || c.Held < 0 {
		return errors.New("gateway benchmark: a count, rate or time is negative")
	}
	if c.Rounds > 100 || c.Each > time.Hour || c.Held > maxInFlight || c.Parallel > maxInFlight {
		return fmt.Errorf("gateway benchmark: more than 100 rounds, an hour each or %d requests under way", maxInFlight)
	}
	if len(c.Peers) > maxPeers {
		return fmt.Errorf("gateway benchmark: %d peers; at most %d", len(c.Peers), maxPeers)
	}
	for i, p := range c.Peers {
		if _, err := ParsePeer(p.Name + "=" + p.URL); err != nil {
			return fmt.Errorf("gateway benchmark: %w", err)
		}
		if slices.ContainsFunc(c.Peers[:i], func(o Peer) bool { return o.Name == p.Name }) {
			return fmt.Errorf("gateway benchmark: two peers %q", p.Name)
		}
	}
	return nil
}

// maxInFlight bounds the requests under way, at the generator and everywhere behind.
const maxInFlight = 4096

func (c Config) withDefaults() (Config, error) {
	set := func(p *float64, d float64) {
		if *p == 0 {
			*p = d
		}
	}
	set(&c.ChatRate, 400)
	set(&c.StreamRate, 15)
	set(&c.SlowRate, 20)
	rounds, each, held := 5, 4*time.Second, 500
	if c.Quick {
		rounds, each, held = 1, time.Second, 100
	}
	c.Rounds, c.Each, c.Held, c.Parallel = cmp.Or(c.Rounds, rounds), cmp.Or(c.Each, each), cmp.Or(c.Held, held), cmp.Or(c.Parallel, 32)
	c.Nginx = benchnginx.Find(c.Nginx)
	if c.Log == nil {
		c.Log = io.Discard
	}
	if len(c.Self) == 0 {
		exe, err := os.Executable()
		if err != nil {
			return c, fmt.Errorf("find own executable: %w", err)
		}
		c.Self = append([]string{exe}, os.Args[1:]...)
	}
	return c, nil
}

// Names of targets, as they stand in the results.
const (
	direct   = "direct"
	bare     = "bare"
	twin     = "bare-twin"
	headgate = "headgate"
	nginx    = "nginx"
	litellm  = "litellm"
)

// scenario is one kind of load.
type scenario struct {
	name    string
	rate    float64 // 0: saturation
	stream  bool
	litellm bool // light enough for LiteLLM
}

func (c Config) scenarios() []scenario {
	return []scenario{
		{name: "chat", rate: c.ChatRate},
		{name: "stream", rate: c.StreamRate, stream: true},
		{name: "chat-slow", rate: c.SlowRate, litellm: true},
		{name: "chat-saturated", litellm: true},
		{name: "stream-saturated", stream: true},
	}
}

// Run measures and returns the report. It takes about Rounds × Each × 22, with peers
// more, and a minute for LiteLLM to start. An error means that something could not be started
// or ctx ended; a bound that is missed is no error but stands in the report.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "headgate-bench-")
	if err != nil {
		return nil, fmt.Errorf("gateway benchmark: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a scratch directory
	f := &fleet{cfg: cfg, dir: dir}
	defer f.stop()
	rep := &Report{Started: time.Now().UTC(), Machine: origin.Machine(), Commit: origin.Commit(ctx), Config: cfg}
	if err := f.start(ctx, rep); err != nil {
		return nil, err
	}
	rep.Subject = f.subject
	for round := range cfg.Rounds {
		for _, sc := range cfg.scenarios() {
			if err := f.round(ctx, rep, sc, round); err != nil {
				return nil, err
			}
		}
		for _, t := range f.inTurn(round, "held", false) {
			if t.name == direct || t.pid == 0 {
				continue
			}
			if err := f.memory(ctx, rep, t, round); err != nil {
				return nil, err
			}
		}
	}
	rep.summarize()
	return rep, nil
}

// inTurn is the targets in the order of a round, with LiteLLM or without, and without those that could not keep up.
func (f *fleet) inTurn(round int, scenario string, withLiteLLM bool) []*target {
	var out []*target
	for i := range f.targets {
		t := f.targets[(i+round)%len(f.targets)]
		if (t.name != litellm || withLiteLLM) && !t.slow[scenario] {
			out = append(out, t)
		}
	}
	return out
}

func (f *fleet) round(ctx context.Context, rep *Report, sc scenario, round int) error {
	for _, t := range f.inTurn(round, sc.name, sc.litellm) {
		row, err := f.measure(ctx, t, sc, round)
		if err != nil {
			return err
		}
		rep.add(row)
		if sc.rate > 0 && row.Dropped > 0 && f.isPeer(t.name) {
			t.slow[sc.name] = true
			rep.note("%s does not keep up with %s, and is left out of it from round %d on", t.name, sc.name, round+2)
		}
		fmt.Fprintf(f.cfg.Log, "round %d %-16s %-9s %6.0f/s cpu %7.1f µs p50 %7.1f µs p99 %8.1f µs, %d good of %d\n",
			round+1, sc.name, t.name, row.Throughput, row.CPU, row.P50, row.P99, row.Good, row.Arrivals)
	}
	return nil
}

// measure loads one target once, after a short warm-up on the same connections.
func (f *fleet) measure(ctx context.Context, t *target, sc scenario, round int) (Row, error) {
	cfg := load.Config{
		URL: t.url + chatPath, Header: t.header, Rate: sc.rate, Poisson: true, Seed: uint64(round + 1),
		Duration: f.cfg.Each, MaxInFlight: maxInFlight, Transport: t.transport, Body: chatBody,
	}
	switch {
	case sc.stream && sc.rate > 0:
		cfg.Body, cfg.End = pacedBody, "[DONE]"
	case sc.stream:
		cfg.Body, cfg.End = streamBody, "[DONE]"
	}
	if sc.rate == 0 {
		cfg.MaxInFlight = f.cfg.Parallel
	}
	warm := cfg
	warm.Rate, warm.MaxInFlight, warm.Count, warm.Duration = 0, 4, 12, 0
	if sc.stream {
		warm.Body = streamBody
	}
	if _, err := load.Run(ctx, warm); err != nil {
		return Row{}, err
	}
	own, err := t.asking(ctx)
	if err != nil {
		return Row{}, err
	}
	before, err := t.read(ctx)
	if err != nil {
		return Row{}, err
	}
	res, err := load.Run(ctx, cfg)
	if err != nil {
		return Row{}, err
	}
	after, err := t.read(ctx)
	if err != nil {
		return Row{}, err
	}
	if err := ctx.Err(); err != nil {
		return Row{}, err
	}
	row := newRow(sc.name, t.name, round, sc.rate, after.cpu-before.cpu, res)
	if t.pid > 0 {
		rss, err := residentSet(t.pid)
		if err != nil {
			return Row{}, err
		}
		row.Resident = float64(rss)
	}
	if t.stats != "" && res.Good > 0 {
		row.Objects = (after.heap.objects - before.heap.objects - own.objects) / float64(res.Good)
		row.Allocated = (after.heap.bytes - before.heap.bytes - own.bytes) / float64(res.Good)
	}
	return row, nil
}

// isPeer says whether a target is one that the user has started.
func (f *fleet) isPeer(name string) bool {
	return slices.ContainsFunc(f.cfg.Peers, func(p Peer) bool { return p.Name == name })
}
