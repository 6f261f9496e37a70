package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"headgate/bench/fakevllm"
)

// Bounds.
const (
	pollEvery  = 2 * time.Millisecond  // between two looks while something is measured
	restEvery  = 50 * time.Millisecond // and while nothing is
	waitBound  = 30 * time.Second      // for what is measured
	wholeBound = time.Minute           // for the cluster to be whole again
	callBound  = 10 * time.Second      // for one request
	exitBound  = 10 * time.Second      // for a killed process to be gone
	lastBytes  = 600                   // of a node's log, shown where it fails

	clusterPorts = 3 // in a row: gossip, gRPC, raft
	portTries    = 2000
)

// fleet is an upstream and the nodes in front of it.
type fleet struct {
	cfg      Config
	dir      string
	devKey   string
	token    string
	client   *http.Client
	upstream *http.Server
	nodes    []*node
	policy   string
	config   string
}

// node is one headgate process, started anew after every kill.
type node struct {
	name, dir            string
	front, admin, gossip string
	args                 []string
	cmd                  *exec.Cmd     // nil: it does not run
	exited               chan struct{} // closed when cmd has ended
}

// newFleet starts the upstream and readies what nodes are started with.
func newFleet(cfg Config, dir string) (*fleet, error) {
	dir, err := filepath.Abs(dir) // each node works in its own
	if err != nil {
		return nil, err
	}
	f := &fleet{cfg: cfg, dir: dir, devKey: secret(), token: secret(), client: &http.Client{Transport: newTransport()}}
	f.policy, f.config = filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "headgate.yaml")
	s, err := fakevllm.New(fakevllm.Config{Models: []string{model}, Slots: maxInFlight, LogSize: 64, RecordBody: -1})
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	f.upstream = &http.Server{Handler: s.Handler(), ReadHeaderTimeout: callBound}
	go func() { _ = f.upstream.Serve(l) }() // ends with stop
	for path, text := range map[string]string{f.policy: policyText("http://" + l.Addr().String()), f.config: configText()} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return nil, errors.Join(err, f.upstream.Close())
		}
	}
	return f, nil
}

// secret is long and good for this run only.
func secret() string {
	return fmt.Sprintf("hg_test_%016x%016x%016x%016x", rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64())
}

// newTransport keeps enough connections for all that may be under way, and talks to nobody
// but whom it is told.
func newTransport() *http.Transport {
	return &http.Transport{MaxIdleConns: maxInFlight, MaxIdleConnsPerHost: maxInFlight, IdleConnTimeout: time.Minute, DisableCompression: true}
}

// prepare makes nodes with fresh folders and ports; those of before must have ended.
func (f *fleet) prepare() error {
	var taken []int
	port := func(n int) (int, error) {
		p, err := freePorts(n, taken)
		for i := range n {
			taken = append(taken, p+i)
		}
		return p, err
	}
	dir, err := os.MkdirTemp(f.dir, "cluster-")
	if err != nil {
		return err
	}
	f.nodes = nil
	for i := range f.cfg.Nodes {
		front, err1 := port(1)
		admin, err2 := port(1)
		gossip, err3 := port(clusterPorts)
		if err := errors.Join(err1, err2, err3); err != nil {
			return err
		}
		name := fmt.Sprintf("node-%d", i+1)
		f.nodes = append(f.nodes, &node{
			name: name, dir: filepath.Join(dir, name), front: loopback(front), admin: loopback(admin), gossip: loopback(gossip),
		})
	}
	for _, n := range f.nodes {
		n.args = []string{
			"serve", "--dev", "--config", f.config, "--policy", f.policy, "--node-id", n.name, "--data-dir", n.dir,
			"--listen", n.front, "--admin-listen", n.admin, "--cluster-listen", n.gossip, "--bootstrap-expect", strconv.Itoa(f.cfg.Nodes),
		}
		for _, other := range f.nodes {
			if other != n {
				n.args = append(n.args, "--join", other.gossip)
			}
		}
	}
	return nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// freePorts finds n ports in a row that nobody listens at. They lie below those that the
// system gives to outgoing connections, so that none of them takes a port while its node is down.
func freePorts(n int, taken []int) (int, error) {
	const low, high = 10_000, 30_000
	for range portTries {
		p := low + rand.IntN(high-low)
		if free(p, n, taken) {
			return p, nil
		}
	}
	return 0, fmt.Errorf("no %d free ports in a row between %d and %d", n, low, high)
}

func free(port, n int, taken []int) bool {
	for p := port; p < port+n; p++ {
		if slices.Contains(taken, p) {
			return false
		}
		l, err := net.Listen("tcp", loopback(p))
		if err != nil {
			return false
		}
		u, err := net.ListenPacket("udp", loopback(p))
		if err := errors.Join(err, l.Close()); err != nil {
			return false
		}
		if err := u.Close(); err != nil {
			return false
		}
	}
	return true
}

// start starts a node and returns at once. What it logs is added to its log.
func (f *fleet) start(n *node) error {
	log, err := os.OpenFile(n.dir+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() //nolint:errcheck // the node has its own descriptor
	cmd := exec.Command(f.cfg.Headgate, n.args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = f.dir, log, log, apart()
	// What is set for this process must not go over what the node is told.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "HEADGATE_") })
	cmd.Env = append(cmd.Env, "HEADGATE_DEV_KEY="+f.devKey, "HEADGATE_ADMIN_TOKEN="+f.token)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", n.name, err)
	}
	exited := make(chan struct{})
	n.cmd, n.exited = cmd, exited
	go func() {
		defer close(exited)
		_ = cmd.Wait() // how it ended shows in its log
	}()
	return nil
}

// kill ends a node as a crash does, and returns once it is gone.
func (n *node) kill() error {
	if n.cmd == nil {
		return nil
	}
	_ = n.cmd.Process.Kill() // an error means that it has ended
	select {
	case <-n.exited:
		n.cmd = nil
		return nil
	case <-time.After(exitBound):
		return fmt.Errorf("%s is not gone %v after its SIGKILL", n.name, exitBound)
	}
}

// stopNodes ends all nodes.
func (f *fleet) stopNodes() error {
	var errs []error
	for _, n := range f.nodes {
		errs = append(errs, n.kill())
	}
	f.client.CloseIdleConnections()
	return errors.Join(errs...)
}

// stop ends everything.
func (f *fleet) stop() error {
	return errors.Join(f.stopNodes(), f.upstream.Close())
}

// others are the nodes but one.
func (f *fleet) others(n *node) (out []*node) {
	for _, x := range f.nodes {
		if x != n {
			out = append(out, x)
		}
	}
	return out
}

func (f *fleet) byName(name string) *node {
	for _, n := range f.nodes {
		if n.name == name {
			return n
		}
	}
	return nil
}

// ended says so if a node that should run does not.
func (n *node) ended() error {
	if n.cmd == nil {
		return fmt.Errorf("%s does not run", n.name)
	}
	select {
	case <-n.exited:
		return fmt.Errorf("%s ended: %s", n.name, n.lastWords())
	default:
		return nil
	}
}

// lastWords are the end of what a node has logged.
func (n *node) lastWords() string {
	b, err := os.ReadFile(n.dir + ".log")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b[max(0, len(b)-lastBytes):]))
}

// errTimeout is what poll gives up with.
var errTimeout = errors.New("it did not come about in time")

// poll looks every so often until look says that it is done, then returns look's error. Before
// that an error is only remembered, for the case that the bound passes.
func poll(ctx context.Context, every, bound time.Duration, look func(context.Context) (done bool, err error)) error {
	within, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	tick := time.NewTicker(every)
	defer tick.Stop()
	var last error
	for {
		done, err := look(within)
		if done {
			return err
		}
		if err != nil && within.Err() == nil {
			last = err
		}
		select {
		case <-tick.C:
		case <-within.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return errors.Join(errTimeout, last)
		}
	}
}
