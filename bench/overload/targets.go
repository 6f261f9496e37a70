package overload

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"headgate/bench/fakevllm"
	"headgate/bench/gateway"
	benchnginx "headgate/bench/nginx"
)

// Names of targets, as they stand in the results.
const (
	headgate   = "headgate"
	bare       = "bare"
	nginx      = "nginx"
	nginxSlots = "nginx-max-conns"
)

func targetNames() []string { return []string{headgate, bare, nginx, nginxSlots} }

const (
	startBound = 30 * time.Second
	stopBound  = 10 * time.Second
	pollEvery  = 50 * time.Millisecond
	devKey     = "hg_test_benchbenchbenchbenchbenchbenchbenchbenchbenchbenchbenchbench"
)

// errMissing says that a target is not installed.
var errMissing = errors.New("not installed, left out")

// upstream is the simulated vLLM, in this process.
type upstream struct {
	server *fakevllm.Server
	http   *http.Server
	url    string
	slots  int
	done   chan struct{}
}

func startUpstream(slots int) (*upstream, error) {
	s, err := fakevllm.New(fakevllm.Config{
		Models: []string{model}, TTFT: ttft, InterToken: interToken, Slots: slots, LogSize: logSize, RecordBody: logBody,
	})
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	u := &upstream{server: s, http: &http.Server{Handler: s.Handler(), ReadHeaderTimeout: time.Minute}, url: "http://" + l.Addr().String(), slots: slots, done: make(chan struct{})}
	go func() {
		defer close(u.done)
		_ = u.http.Serve(l) // ends by stop
	}()
	return u, nil
}

func (u *upstream) stop() {
	_ = u.http.Close() // what is under way is of no interest any more
	<-u.done
}

// idle waits until nothing of a stopped target is left.
func (u *upstream) idle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopBound)
	defer cancel()
	return u.server.AwaitIdle(ctx)
}

// target is a process between the clients and the upstream.
type target struct {
	name   string
	url    string
	pid    int
	header http.Header

	cmd    *exec.Cmd
	stdin  io.Closer
	exited chan struct{}
	log    string
}

// stop ends the process and waits for it.
func (t *target) stop() {
	_ = t.stdin.Close() // ends the bare proxy
	_ = t.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-t.exited:
	case <-time.After(stopBound):
		_ = t.cmd.Process.Kill() // an error means that it has ended
		<-t.exited
	}
}

// startTarget starts a target and waits until it answers.
func startTarget(ctx context.Context, cfg *Config, dir, name, behind string) (*target, error) {
	ports, err := freePorts(2)
	if err != nil {
		return nil, err
	}
	t := &target{name: name, url: "http://" + ports[0], exited: make(chan struct{}), log: filepath.Join(dir, name+".log")}
	var ready string
	switch name {
	case headgate:
		err = t.startHeadgate(cfg, dir, behind, ports)
		ready = "http://" + ports[1] + "/readyz"
	case bare:
		return t, t.startBare(ctx, cfg, behind)
	default:
		err = t.startNginx(cfg, dir, behind, ports[0])
		ready = t.url + "/health"
	}
	if err != nil {
		return nil, err
	}
	if err := t.await(ctx, ready); err != nil {
		t.stop()
		return nil, err
	}
	return t, nil
}

// launch starts a program whose output goes to the target's log, but for standard
// output where lines is given.
func (t *target) launch(argv, env []string, lines func(string)) error {
	cmd := exec.Command(argv[0], argv[1:]...) // the caller's own programs
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = apart()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	f, err := os.Create(t.log)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // the child has its own descriptor
	cmd.Stderr = f
	var out io.Reader
	if lines == nil {
		cmd.Stdout = f
	} else if out, err = cmd.StdoutPipe(); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	t.cmd, t.stdin, t.pid = cmd, stdin, cmd.Process.Pid
	go func() {
		defer close(t.exited)
		if out != nil {
			for sc := bufio.NewScanner(out); sc.Scan(); {
				lines(sc.Text())
			}
		}
		_ = cmd.Wait() // how it ended shows in its log
	}()
	return nil
}

func (t *target) startBare(ctx context.Context, cfg *Config, behind string) error {
	addr := make(chan string, 1)
	var once sync.Once
	err := t.launch([]string{cfg.Headgate}, gateway.ProxyEnv(behind), func(line string) {
		if a, ok := strings.CutPrefix(line, "listening "); ok {
			once.Do(func() { addr <- a })
		}
	})
	if err != nil {
		return err
	}
	select {
	case a := <-addr:
		t.url = "http://" + a
		return nil
	case <-t.exited:
		err = fmt.Errorf("ended: %s", t.lastWords())
	case <-time.After(startBound):
		err = fmt.Errorf("does not listen after %v", startBound)
	case <-ctx.Done():
		err = ctx.Err()
	}
	t.stop()
	return err
}

// startHeadgate starts a node whose limits for tenants nobody reaches: what is left is
// the backend's.
func (t *target) startHeadgate(cfg *Config, dir, behind string, ports []string) error {
	t.header = http.Header{"Authorization": {"Bearer " + devKey}}
	policy, config := filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "headgate.yaml")
	texts := map[string]string{
		policy: fmt.Sprintf(`version: 1
backends: [{name: up, url: %q, slots: %d}]
models:
  - {name: %s, backends: [up], version: "1", context: 131072, price_per_million: {input: "0.20", output: "0.60"}, default_output_tokens: %d}
plans:
  - name: bench
    limits:
      - {name: org-tokens, scope: org, unit: tokens, rate: 6000000000/min, burst: 6000000000}
tenants: [{name: dev, plan: bench}]
`, behind, cfg.Slots, model, mostOut),
		config: fmt.Sprintf("prefilter: {requests_per_second: 1000000, request_burst: 1000000}\nmax_conns_per_ip: %d\n", 2*maxInFlight),
	}
	for path, text := range texts {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return err
		}
	}
	argv := append([]string{
		cfg.Headgate, "serve", "--dev", "--config", config, "--policy", policy, "--listen", ports[0], "--admin-listen", ports[1],
		"--data-dir", filepath.Join(dir, "data"),
	}, cfg.HeadgateArgs...)
	return t.launch(argv, []string{"HEADGATE_DEV_KEY=" + devKey, "HEADGATE_ADMIN_TOKEN=bench-admin-token"}, nil)
}

// startNginx starts one that, with max_conns, lets no more requests through than the upstream has slots.
func (t *target) startNginx(cfg *Config, dir, behind, listen string) error {
	if cfg.Nginx == benchnginx.None {
		return errMissing
	}
	c := benchnginx.Config{
		Path: cfg.Nginx, Dir: filepath.Join(dir, t.name), Listen: listen, Upstream: behind, Connections: maxInFlight, KeepAlive: 2 * cfg.Slots,
	}
	if t.name == nginxSlots {
		c.MaxConns = cfg.Slots
	}
	argv, err := c.Command()
	if err != nil {
		return err
	}
	return t.launch(argv, nil, nil)
}

// await polls an address until it answers 200.
func (t *target) await(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
		if err != nil {
			return err
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_ = resp.Body.Close() // only its status was wanted
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-t.exited:
			return fmt.Errorf("ended: %s", t.lastWords())
		case <-time.After(pollEvery):
		case <-ctx.Done():
			return fmt.Errorf("does not answer: %w: %s", ctx.Err(), t.lastWords())
		}
	}
}

// lastWords is the end of what the process has printed.
func (t *target) lastWords() string {
	b, err := os.ReadFile(t.log)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b[max(0, len(b)-500):]))
}

// freePorts finds n loopback addresses that nobody listens on at the moment.
func freePorts(n int) ([]string, error) {
	out := make([]string, n)
	for i := range out {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() //nolint:errcheck // all are held until the last is found
		out[i] = l.Addr().String()
	}
	return out, nil
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
