package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"headgate/bench/fakevllm"
	benchnginx "headgate/bench/nginx"
)

const (
	envRole   = "HEADGATE_BENCH_ROLE"
	envTarget = "HEADGATE_BENCH_TARGET"
	envListen = "HEADGATE_BENCH_LISTEN"
	benchKey  = "hg_test_benchbenchbenchbenchbenchbenchbenchbenchbenchbenchbenchbench"
	// LiteLLM does not start without a key of its own, of this form.
	litellmKey = "sk-6e1f0c5b7a9d4e3288c1d2f3a4b5c6d7e8f9a0b1c2d3e4f5"

	startBound   = 30 * time.Second // for a process of ours or Headgate to answer
	litellmBound = 2 * time.Minute
	stopBound    = 10 * time.Second
	pollEvery    = 50 * time.Millisecond
)

// Child turns this process into one of the benchmark's helpers if Run has started it
// as one: it then serves until its standard input ends and reports true. Whatever
// command Config.Self names must call it before anything else.
func Child() (bool, error) {
	var h http.Handler
	switch os.Getenv(envRole) {
	case "":
		return false, nil
	case "upstream":
		s, err := fakevllm.New(fakevllm.Config{
			Models: []string{model}, Slots: maxInFlight, LogSize: 64, RecordBody: -1, StallMax: 10 * time.Minute,
			SlowToken: chunkGap,
		})
		if err != nil {
			return true, err
		}
		h = s.Handler()
	case "proxy":
		u, err := url.Parse(os.Getenv(envTarget))
		if err != nil {
			return true, fmt.Errorf("bare proxy: %w", err)
		}
		p := httputil.NewSingleHostReverseProxy(u)
		p.Transport = newTransport()
		h = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == statsPath {
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				fmt.Fprintf(w, "go_memstats_mallocs_total %d\ngo_memstats_alloc_bytes_total %d\n", m.Mallocs, m.TotalAlloc)
				return
			}
			// Without full duplex the server swallows what is left of a request body
			// when the answer begins, while the transport still looks for its end: it
			// then takes the closed body for an error and cuts the answer, about once
			// in a thousand fast streams.
			if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			p.ServeHTTP(w, r)
		})
	default:
		return true, fmt.Errorf("unknown role %q", os.Getenv(envRole))
	}
	listen := os.Getenv(envListen)
	if listen == "" {
		listen = "127.0.0.1:0"
	}
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return true, err
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // however it ends, the parent is done with us
		_ = srv.Close()
	}()
	fmt.Printf("listening %s\n", ln.Addr())
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return true, err
	}
	return true, nil
}

// ProxyEnv is the environment in which [Child] serves a bare reverse proxy before a
// server.
func ProxyEnv(behind string) []string {
	return []string{envRole + "=proxy", envTarget + "=" + behind}
}

// newTransport is what the generator and the bare proxy use: enough idle connections
// for all that may be under way, and bytes as they come.
func newTransport() *http.Transport {
	return &http.Transport{MaxIdleConns: maxInFlight, MaxIdleConnsPerHost: maxInFlight, IdleConnTimeout: time.Minute, DisableCompression: true}
}

// target is one thing to load.
type target struct {
	name      string
	url       string
	stats     string          // where it tells of its allocations; "": nowhere
	pid       int             // 0: unknown
	slow      map[string]bool // scenarios with whose rate it does not keep up
	header    http.Header
	transport *http.Transport
}

// fleet is the processes of a run.
type fleet struct {
	cfg     Config
	dir     string
	subject string // the target held against the bare proxy
	metrics string // Headgate's
	targets []*target
	procs   []*process
}

// process is a started program. Waiting for it happens once, in a goroutine of its
// own that ends with it.
type process struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	exited chan struct{}
}

func (f *fleet) stop() {
	for _, t := range f.targets {
		t.transport.CloseIdleConnections()
	}
	for _, p := range f.procs {
		_ = p.stdin.Close()                       // ends our own
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // and the others; an error means that it has ended
	}
	for _, p := range f.procs {
		select {
		case <-p.exited:
		case <-time.After(stopBound):
			_ = p.cmd.Process.Kill() // an error means that it has ended
			<-p.exited
		}
	}
}

// launch starts a program whose output goes to the log and, line by line, to lines.
func (f *fleet) launch(name string, argv, env []string, lines func(string)) (*process, error) {
	cmd := exec.Command(argv[0], argv[1:]...) // the caller's own programs
	cmd.Env = append(os.Environ(), env...)
	cmd.Dir = f.dir
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	logFile, err := os.Create(filepath.Join(f.dir, name+".log"))
	if err != nil {
		return nil, err
	}
	defer logFile.Close() //nolint:errcheck // the child has its own descriptor
	cmd.Stderr = logFile
	var out io.ReadCloser
	if lines == nil {
		cmd.Stdout = logFile
	} else if out, err = cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{cmd: cmd, stdin: stdin, exited: make(chan struct{})}
	f.procs = append(f.procs, p)
	go func() {
		defer close(p.exited)
		if out != nil {
			for sc := bufio.NewScanner(out); sc.Scan(); {
				lines(sc.Text())
			}
		}
		_ = cmd.Wait() // how it ended shows in its log
	}()
	return p, nil
}

func (f *fleet) add(name, url string, pid int) {
	key := benchKey
	if name == litellm {
		key = litellmKey
	}
	t := &target{name: name, slow: map[string]bool{}, url: url, pid: pid, transport: newTransport(), header: http.Header{"Authorization": {"Bearer " + key}}}
	switch name {
	case bare, twin:
		t.stats = url + statsPath
	case headgate:
		t.stats = f.metrics
	}
	f.targets = append(f.targets, t)
}

// own starts a helper of this package and returns where it listens.
func (f *fleet) own(ctx context.Context, name, role, behind string) (url string, pid int, err error) {
	addr := make(chan string, 1)
	var once sync.Once
	listen := ""
	if role == "upstream" {
		listen = f.cfg.Upstream
	}
	p, err := f.launch(name, f.cfg.Self, []string{envRole + "=" + role, envTarget + "=" + behind, envListen + "=" + listen}, func(line string) {
		if a, ok := strings.CutPrefix(line, "listening "); ok {
			once.Do(func() { addr <- a })
		}
	})
	if err != nil {
		return "", 0, err
	}
	select {
	case a := <-addr:
		return "http://" + a, p.cmd.Process.Pid, nil
	case <-p.exited:
		return "", 0, fmt.Errorf("%s ended: %s", name, f.lastWords(name))
	case <-time.After(startBound):
		return "", 0, fmt.Errorf("%s does not listen after %v", name, startBound)
	case <-ctx.Done():
		return "", 0, ctx.Err()
	}
}

// lastWords is the end of what a process has printed.
func (f *fleet) lastWords(name string) string {
	b, err := os.ReadFile(filepath.Join(f.dir, name+".log"))
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b[max(0, len(b)-500):]))
}

// start brings up all targets.
func (f *fleet) start(ctx context.Context, rep *Report) error {
	upstream, pid, err := f.own(ctx, direct, "upstream", "")
	if err != nil {
		return err
	}
	f.add(direct, upstream, pid)
	url, pid, err := f.own(ctx, bare, "proxy", upstream)
	if err != nil {
		return err
	}
	f.add(bare, url, pid)
	if f.cfg.Headgate == "" {
		f.subject = twin
		rep.note("no headgate binary: a second bare proxy stands in for it")
		if url, pid, err = f.own(ctx, twin, "proxy", upstream); err != nil {
			return err
		}
	} else {
		f.subject = headgate
		if url, pid, err = f.startHeadgate(ctx, upstream); err != nil {
			return err
		}
	}
	f.add(f.subject, url, pid)
	if f.cfg.Nginx == benchnginx.None {
		rep.note("nginx: not installed, or not wanted; skipped")
	} else if url, pid, err = f.startNginx(ctx, upstream); err != nil {
		rep.note("nginx: skipped: %v", err)
	} else {
		f.add(nginx, url, pid)
	}
	if f.cfg.LiteLLM == "" {
		rep.note("litellm: not given, skipped")
	} else if url, pid, err = f.startLiteLLM(ctx, upstream); err != nil {
		rep.note("litellm: skipped: %v", err)
	} else {
		f.add(litellm, url, pid)
	}
	if err := f.peers(ctx, rep); err != nil {
		return err
	}
	return ctx.Err()
}

// startHeadgate starts a node that does everything it does for a paying tenant, with
// limits that nobody reaches: also those against floods from one address, since all
// the load comes from one.
func (f *fleet) startHeadgate(ctx context.Context, upstream string) (url string, pid int, err error) {
	policy := filepath.Join(f.dir, "policy.yaml")
	text := fmt.Sprintf(`version: 1
backends: [{name: up, url: %q, slots: %d}]
models:
  - {name: %s, backends: [up], version: "1", context: 131072, price_per_million: {input: "0.20", cached_input: "0.02", output: "0.60"}, default_output_tokens: 32}
plans:
  - name: bench
    tier: 1
    limits:
      - {name: org-tokens, scope: org, unit: tokens, rate: 6000000000/min, burst: 6000000000}
      - {name: key-requests, scope: key, unit: requests, rate: 6000000/min, burst: 6000000}
      - {name: key-inflight, scope: key, unit: concurrency, max: %d}
tenants: [{name: dev, plan: bench}]
`, upstream, maxInFlight, model, maxInFlight)
	if err := os.WriteFile(policy, []byte(text), 0o600); err != nil {
		return "", 0, err
	}
	config := filepath.Join(f.dir, "headgate.yaml")
	text = fmt.Sprintf("prefilter: {requests_per_second: 1000000, request_burst: 1000000}\nmax_conns_per_ip: %d\n", 2*maxInFlight)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return "", 0, err
	}
	ports, err := freePorts(2)
	if err != nil {
		return "", 0, err
	}
	argv := append([]string{
		f.cfg.Headgate, "serve", "--dev", "--config", config, "--policy", policy, "--listen", ports[0], "--admin-listen", ports[1],
		"--data-dir", filepath.Join(f.dir, "data"),
	}, f.cfg.HeadgateArgs...)
	p, err := f.launch(headgate, argv, []string{envRole + "=", "HEADGATE_DEV_KEY=" + benchKey, "HEADGATE_ADMIN_TOKEN=bench-admin-token"}, nil)
	if err != nil {
		return "", 0, err
	}
	if err := f.await(ctx, p, headgate, "http://"+ports[1]+"/readyz", startBound); err != nil {
		return "", 0, err
	}
	f.metrics = "http://" + ports[1] + "/metrics"
	return "http://" + ports[0], p.cmd.Process.Pid, nil
}

func (f *fleet) startLiteLLM(ctx context.Context, upstream string) (url string, pid int, err error) {
	config := filepath.Join(f.dir, "litellm.yaml")
	text := fmt.Sprintf(`model_list:
  - model_name: %s
    litellm_params: {model: openai/%s, api_base: "%s/v1", api_key: none}
litellm_settings: {telemetry: false}
`, model, model, upstream)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return "", 0, err
	}
	ports, err := freePorts(1)
	if err != nil {
		return "", 0, err
	}
	host, port, err := net.SplitHostPort(ports[0])
	if err != nil {
		return "", 0, err
	}
	p, err := f.launch(litellm, []string{f.cfg.LiteLLM, "--config", config, "--host", host, "--port", port, "--num_workers", "1"},
		[]string{"LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_LOG=ERROR", "LITELLM_MASTER_KEY=" + litellmKey}, nil)
	if err != nil {
		return "", 0, err
	}
	return "http://" + ports[0], p.cmd.Process.Pid, f.await(ctx, p, litellm, "http://"+ports[0]+"/health/liveliness", litellmBound)
}

// await polls a health address until it answers 200.
func (f *fleet) await(ctx context.Context, p *process, name, address string, bound time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
		if err != nil {
			return err
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-p.exited:
			return fmt.Errorf("%s ended: %s", name, f.lastWords(name))
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w: %s", name, ctx.Err(), f.lastWords(name))
		}
	}
}

// freePorts finds loopback addresses that nobody listens on now.
func freePorts(n int) ([]string, error) {
	out := make([]string, n)
	for i := range out {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer ln.Close() //nolint:errcheck // all are held until the last is found
		out[i] = ln.Addr().String()
	}
	return out, nil
}

// ticksPerSecond is the unit of /proc/PID/stat, fixed by the kernel's interface.
const ticksPerSecond = 100

// cpuTime is the user and system time that a process has used.
func cpuTime(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("cpu time needs /proc: %w", err)
	}
	// The second field is the name in parentheses and may hold anything.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("cpu time: %d fields in /proc/%d/stat", len(fields), pid)
	}
	var ticks int64
	for _, s := range fields[11:13] { // proc(5): utime and stime are fields 14 and 15
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("cpu time: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / ticksPerSecond, nil
}

// residentSet is the memory that a process occupies, in bytes.
func residentSet(pid int) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, fmt.Errorf("resident set needs /proc: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("resident set: %w", err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("resident set: no VmRSS for process %d", pid)
}
