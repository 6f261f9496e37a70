package cache

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"headgate/proxy/admin"
)

const (
	model       = "fake"
	tenant      = "dev"
	surface     = "faq"
	benchKey    = "hg_test_benchbenchbenchbenchbenchbenchbenchbenchbenchbenchbenchbench"
	adminToken  = "bench-admin-token-bench-admin-token"
	maxInFlight = 4096
	maxAnswer   = 8 << 20

	startBound = 30 * time.Second // for a process to say where it listens
	readyBound = time.Minute      // for a cluster to be one
	callBound  = 30 * time.Second
	stopBound  = 15 * time.Second
	pollEvery  = 20 * time.Millisecond
	lastBytes  = 600 // of a log, shown where a process fails
)

// process is this program, started anew with an order. It ends when its input does.
type process struct {
	name    string
	cmd     *exec.Cmd
	stdin   io.Closer
	log     string
	exited  chan struct{}
	listens []string // addresses, in the order of which it spoke
}

// fleet is the processes of a part.
type fleet struct {
	dir    string
	client *http.Client
	all    []*process
}

func newFleet(dir, name string) (*fleet, error) {
	dir = filepath.Join(dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return &fleet{dir: dir, client: &http.Client{Transport: newTransport()}}, nil
}

// newTransport keeps a connection for each that may be under way.
func newTransport() *http.Transport {
	return &http.Transport{MaxIdleConns: maxInFlight, MaxIdleConnsPerHost: maxInFlight, IdleConnTimeout: time.Minute, DisableCompression: true}
}

// stop ends all processes, and says so where one had to be killed.
func (f *fleet) stop() error {
	f.client.CloseIdleConnections()
	var errs []error
	for _, p := range f.all {
		_ = p.stdin.Close() // an error means that it has ended
	}
	for _, p := range f.all {
		select {
		case <-p.exited:
		case <-time.After(stopBound):
			errs = append(errs, fmt.Errorf("%s did not end: %s", p.name, p.lastWords()))
			_ = p.cmd.Process.Kill() // an error means that it has ended
			<-p.exited
		}
	}
	return errors.Join(errs...)
}

// start starts a process and waits until it says where it listens.
func (f *fleet) start(ctx context.Context, name string, o order) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	p := &process{name: name, cmd: exec.Command(exe), log: filepath.Join(f.dir, name+".log"), exited: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), envChild+"="+string(text))
	log, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer log.Close() //nolint:errcheck // the child has its own descriptor
	p.cmd.Stderr = log
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	f.all = append(f.all, p)
	said := make(chan []string, 1)
	go func() {
		defer close(p.exited)
		var once sync.Once
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if at, ok := strings.CutPrefix(lines.Text(), "listening "); ok {
				once.Do(func() { said <- strings.Fields(at) })
			}
		}
		_ = p.cmd.Wait() // how it ended shows in its log
	}()
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	select {
	case p.listens = <-said:
		return p, nil
	case <-p.exited:
		return nil, fmt.Errorf("%s ended: %s", name, p.lastWords())
	case <-ctx.Done():
		return nil, fmt.Errorf("%s does not listen: %w", name, context.Cause(ctx))
	}
}

func (p *process) url() string { return "http://" + p.listens[0] }

// lastWords are the end of what a process has logged.
func (p *process) lastWords() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b[max(0, len(b)-lastBytes):]))
}

// policy gives every node all it does for a paying tenant. Answers end at their cap, so that those are kept, too.
// Where a machine is so busy that owners of limits fall silent, the limits let requests pass: they are not the subject.
func (f *fleet) policy(upstream string) (path string, err error) {
	path = filepath.Join(f.dir, "policy.yaml")
	text := fmt.Sprintf(`version: 1
backends: [{name: up, url: %q, slots: %d}]
models:
  - {name: %s, backends: [up], version: "1", context: 131072, price_per_million: {input: "0.20", cached_input: "0.02", output: "0.60"}, default_output_tokens: 32}
surfaces: [{name: %s, share: tenant, exact: {ttl: 7d, length: true}}]
plans:
  - name: bench
    tier: 1
    limits:
      - {name: org-tokens, scope: org, unit: tokens, rate: 6000000000/min, burst: 6000000000, unavailable: allow}
      - {name: key-requests, scope: key, unit: requests, rate: 60000000/min, burst: 60000000, unavailable: allow}
      - {name: key-inflight, scope: key, unit: concurrency, max: %d, unavailable: allow}
tenants: [{name: %s, plan: bench}]
`, upstream, maxInFlight, model, surface, maxInFlight, tenant)
	return path, os.WriteFile(path, []byte(text), 0o600)
}

// cluster starts so many nodes, each joining the first, and waits until all have the same view.
func (f *fleet) cluster(ctx context.Context, n int, upstream, profile string) (nodes []*process, err error) {
	policy, err := f.policy(upstream)
	if err != nil {
		return nil, err
	}
	join := ""
	for i := range n {
		name := fmt.Sprintf("node-%d", i+1)
		p, err := f.start(ctx, name, order{
			Role: "node", Name: name, Dir: filepath.Join(f.dir, name), Policy: policy, Key: benchKey, Token: adminToken, Join: join, Profile: profile,
		})
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, p)
		if i == 0 {
			var s admin.Status
			if err := f.await(ctx, p, func() error { return f.admin(ctx, p, http.MethodGet, "status", nil, &s) }); err != nil {
				return nil, err
			}
			join = s.ClusterListen
		}
	}
	for _, p := range nodes {
		err := f.await(ctx, p, func() error {
			var s admin.Status
			if err := f.admin(ctx, p, http.MethodGet, "status", nil, &s); err != nil {
				return err
			}
			if c := s.Cluster; len(c.Members) != n || c.Waiting != 0 || !c.ViewLease.Held || s.PolicyRevision == 0 {
				return fmt.Errorf("%d members, %d partitions waiting, view lease %v, policy %d", len(c.Members), c.Waiting, c.ViewLease.Held, s.PolicyRevision)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return nodes, nil
}

// await looks until look has nothing to complain of.
func (f *fleet) await(ctx context.Context, p *process, look func() error) error {
	ctx, cancel := context.WithTimeout(ctx, readyBound)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		err := look()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.exited:
			return fmt.Errorf("%s ended: %s", p.name, p.lastWords())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w: %s", p.name, err, p.lastWords())
		}
	}
}

// admin calls a node's admin API.
func (f *fleet) admin(ctx context.Context, p *process, method, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	if in == nil {
		body = nil
	}
	a := f.ask(ctx, method, "http://"+p.listens[1]+"/admin/v1/"+path, body, http.Header{"Authorization": {"Bearer " + adminToken}})
	if a.err != nil || a.status != http.StatusOK {
		return fmt.Errorf("%s of %s: %w", path, p.name, a.bad())
	}
	if err := json.Unmarshal(a.body, out); err != nil {
		return fmt.Errorf("%s of %s: %w", path, p.name, err)
	}
	return nil
}

// answered is what came of a request.
type answered struct {
	status int
	cache  string // what the cache did
	kind   string // content type
	body   []byte
	took   time.Duration // to the last byte
	at     time.Time     // when that was
	err    error
}

// bad says what an answer is that is not a good one.
func (a *answered) bad() error {
	if a.err != nil {
		return a.err
	}
	return fmt.Errorf("status %d: %.200s", a.status, a.body)
}

// ask sends a request and reads the whole answer.
func (f *fleet) ask(ctx context.Context, method, address string, body []byte, header http.Header) (a answered) {
	ctx, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	began := time.Now()
	req, err := http.NewRequestWithContext(ctx, method, address, bytes.NewReader(body))
	if err != nil {
		return answered{err: err}
	}
	req.Header = header.Clone()
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := f.client.Do(req)
	if err != nil {
		return answered{err: err}
	}
	defer res.Body.Close() //nolint:errcheck // a read-only body has nothing to lose
	a.body, a.err = io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	a.at = time.Now()
	a.took, a.status, a.cache, a.kind = a.at.Sub(began), res.StatusCode, res.Header.Get("X-Headgate-Cache"), res.Header.Get("Content-Type")
	return a
}

// front is what every request to a front door has, and mode, if that is one of the cache's.
func front(mode string) http.Header {
	h := http.Header{"Authorization": {"Bearer " + benchKey}, "X-Headgate-Surface": {surface}}
	if mode != "" {
		h.Set("X-Headgate-Cache", mode)
	}
	return h
}

// chat asks a node something, and says so where the answer is not a good one or the cache did anything else.
func (f *fleet) chat(ctx context.Context, p *process, body []byte, mode, want string) (answered, error) {
	a := f.ask(ctx, http.MethodPost, p.url()+"/v1/chat/completions", body, front(mode))
	if a.err != nil || a.status != http.StatusOK || a.cache != want {
		return a, fmt.Errorf("%s: cache %q where %q was to be: %w", p.name, a.cache, want, a.bad())
	}
	return a, nil
}

// asked is how often the model was.
func (f *fleet) asked(ctx context.Context, upstream *process) (int64, error) {
	a := f.ask(ctx, http.MethodGet, upstream.url()+askedPath, nil, http.Header{})
	if a.err != nil {
		return 0, a.err
	}
	return strconv.ParseInt(string(a.body), 10, 64)
}

// question is the body of a chat of 1 KB, no two alike, whose answer has so many tokens. The text is the same for a stream.
func question(name string, n, tokens int, stream bool) []byte {
	const size = 1024
	head := fmt.Sprintf(`{"model":%q,"temperature":0,"max_tokens":%d,"stream":%-5t,"messages":[{"role":"system","content":"You answer briefly."},{"role":"user","content":"%s %d `, model, tokens, stream, name, n)
	const tail = `"}]}`
	const filler = "What does a gateway do all day, and does it ever sleep? "
	pad := max(0, size-len(head)-len(tail))
	return []byte(head + strings.Repeat(filler, pad/len(filler)+1)[:pad] + tail)
}
