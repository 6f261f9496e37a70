package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	benchnginx "headgate/bench/nginx"
)

// Peer is a gateway that the user has started, to be measured, too. It must pass what it is sent on to the upstream, which
// then needs an address that is known before: [Config.Upstream].
type Peer struct {
	Name string
	URL  string // of a loopback address
}

// maxPeers bounds them.
const maxPeers = 8

// ParsePeer reads "name=URL".
func ParsePeer(text string) (Peer, error) {
	name, address, ok := strings.Cut(text, "=")
	if !ok || name == "" {
		return Peer{}, fmt.Errorf("peer %q: want name=URL, such as envoy=http://127.0.0.1:10000", text)
	}
	switch name {
	case direct, bare, twin, headgate, litellm, nginx:
		return Peer{}, fmt.Errorf("peer %q: the name is taken by what is measured anyway", name)
	}
	u, err := url.Parse(address)
	if err != nil {
		return Peer{}, fmt.Errorf("peer %s: %w", name, err)
	}
	ip := net.ParseIP(u.Hostname())
	if u.Scheme != "http" || u.Port() == "" || u.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return Peer{}, fmt.Errorf("peer %s: %q: want http, a loopback address and a port", name, address)
	}
	return Peer{Name: name, URL: strings.TrimSuffix(address, "/")}, nil
}

// startNginx starts it between the clients and the upstream.
func (f *fleet) startNginx(ctx context.Context, upstream string) (url string, pid int, err error) {
	ports, err := freePorts(1)
	if err != nil {
		return "", 0, err
	}
	c := benchnginx.Config{
		Path: f.cfg.Nginx, Dir: filepath.Join(f.dir, nginx), Listen: ports[0], Upstream: upstream, Connections: 3 * maxInFlight, KeepAlive: maxInFlight,
	}
	argv, err := c.Command()
	if err != nil {
		return "", 0, err
	}
	p, err := f.launch(nginx, argv, nil, nil)
	if err != nil {
		return "", 0, err
	}
	return "http://" + ports[0], p.cmd.Process.Pid, f.await(ctx, p, nginx, "http://"+ports[0]+"/health", startBound)
}

// peers adds what the user has started. One that does not answer ends the run: it was asked for.
func (f *fleet) peers(ctx context.Context, rep *Report) error {
	for _, p := range f.cfg.Peers {
		key := f.cfg.PeerKey
		if key == "" {
			key = benchKey
		}
		t := &target{name: p.Name, slow: map[string]bool{}, url: p.URL, transport: newTransport(), header: http.Header{"Authorization": {"Bearer " + key}}}
		f.targets = append(f.targets, t)
		ctx, cancel := context.WithTimeout(ctx, startBound)
		err := t.ask(ctx)
		cancel()
		if err != nil {
			return fmt.Errorf("peer %s: %w: is it there, and does it pass %s on to the upstream?", p.Name, err, chatPath)
		}
		if t.pid, err = listener(p.URL); err != nil {
			rep.note("%s: CPU and memory are not measured: %v", p.Name, err)
		}
	}
	return nil
}

// chatPath is where all requests go.
const chatPath = "/v1/chat/completions"

// ask sends one chat.
func (t *target) ask(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url+chatPath, strings.NewReader(string(chatBody(0))))
	if err != nil {
		return err
	}
	req.Header = t.header.Clone()
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // a read-only body has nothing to lose
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 200)) // what there is of it
		return fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// listener is the process that listens on a local address, found by Linux's /proc as far as this user may look.
func listener(address string) (pid int, err error) {
	u, err := url.Parse(address)
	if err != nil {
		return 0, err
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil {
		return 0, err
	}
	inode := ""
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		b, err := os.ReadFile(table)
		if err != nil {
			continue // without IPv6 there is one only
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line) // proc(5): sl local_address rem_address st … inode
			if len(f) > 9 && f[3] == "0A" && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				inode = f[9]
			}
		}
	}
	if inode == "" {
		return 0, fmt.Errorf("nobody on this machine's network listens on port %d", port)
	}
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return 0, err
	}
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil && to == "socket:["+inode+"]" {
			return strconv.Atoi(strings.Split(l, "/")[2])
		}
	}
	return 0, fmt.Errorf("the process that listens on port %d is another user's", port)
}

// statsPath is where the bare proxy tells of its allocations, as Headgate does in its metrics.
const statsPath = "/bench/memstats"

// heap is what a process has allocated in its life.
type heap struct{ objects, bytes float64 }

// allocated asks a Go process of ours for it; others, which have no stats address, have none.
func (t *target) allocated(ctx context.Context) (h heap, err error) {
	if t.stats == "" {
		return h, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.stats, nil)
	if err != nil {
		return h, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return h, fmt.Errorf("allocations of %s: %w", t.name, err)
	}
	defer resp.Body.Close() //nolint:errcheck // a read-only body has nothing to lose
	found := 0
	for sc := bufio.NewScanner(io.LimitReader(resp.Body, 16<<20)); sc.Scan(); {
		name, value, _ := strings.Cut(sc.Text(), " ")
		to := map[string]*float64{"go_memstats_mallocs_total": &h.objects, "go_memstats_alloc_bytes_total": &h.bytes}[name]
		if to == nil {
			continue
		}
		if *to, err = strconv.ParseFloat(value, 64); err != nil {
			return h, fmt.Errorf("allocations of %s: %w", t.name, err)
		}
		found++
	}
	if found != 2 {
		return h, fmt.Errorf("allocations of %s: %s does not tell of them", t.name, t.stats)
	}
	return h, nil
}

// meter is what a target's process has used by a moment.
type meter struct {
	cpu  time.Duration
	heap heap
}

// read takes a meter's reading; what cannot be measured of a target is 0.
func (t *target) read(ctx context.Context) (m meter, err error) {
	if m.heap, err = t.allocated(ctx); err != nil {
		return m, err
	}
	if t.pid > 0 {
		m.cpu, err = cpuTime(t.pid)
	}
	return m, err
}

// asking is what being asked for allocations allocates by itself.
func (t *target) asking(ctx context.Context) (heap, error) {
	first, err := t.allocated(ctx)
	if err != nil {
		return heap{}, err
	}
	second, err := t.allocated(ctx)
	return heap{second.objects - first.objects, second.bytes - first.bytes}, err
}
