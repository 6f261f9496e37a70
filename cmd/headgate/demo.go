package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
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

	"github.com/spf13/cobra"

	"headgate/bench/fakevllm"
	"headgate/cluster/ledger"
	"headgate/cmd/node"
	"headgate/proxy/admin"
)

// demoConfig says what a demo runs.
type demoConfig struct {
	nodes                              int
	upstream                           string
	listen, adminListen, clusterListen string // of the first node; each further one listens demoStep higher
}

// The ports of the demo's nodes are apart by these; a cluster needs three in a row.
const (
	demoStep        = 100
	demoClusterStep = 10
	maxDemoNodes    = 9
)

func demoCommand() *cobra.Command {
	d := node.Defaults()
	cfg := demoConfig{nodes: 3, listen: d.Listen, adminListen: d.AdminListen, clusterListen: d.ClusterListen}
	c := &cobra.Command{
		Use:   "demo",
		Short: "Run nodes before a simulated vLLM (or --upstream URL) and stream one answer through them",
		Long: "Run nodes before a simulated vLLM, or before --upstream URL, and stream one answer through them.\n" +
			"It prints a curl and goes on until Ctrl-C, which stops all of it and removes its data. With\n" +
			"--nodes 1 it is one node, which is enough to try things out.",
		Example: "  headgate demo\n  headgate demo --nodes 1 --upstream http://127.0.0.1:8000",
		Args:    exactly(0),
		RunE: func(c *cobra.Command, _ []string) error {
			if cfg.nodes < 1 || cfg.nodes > maxDemoNodes {
				return usageError{fmt.Errorf("nodes: %d is not between 1 and %d", cfg.nodes, maxDemoNodes)}
			}
			return demo(c.Context(), c.OutOrStdout(), cfg)
		},
	}
	c.Flags().IntVar(&cfg.nodes, "nodes", cfg.nodes, "how many nodes")
	c.Flags().StringVar(&cfg.upstream, "upstream", "", "model server to stand in front of (default: a simulated one)")
	c.Flags().StringVar(&cfg.listen, "listen", cfg.listen, "address of the first node's front door; the others follow 100 ports apart")
	c.Flags().StringVar(&cfg.adminListen, "admin-listen", cfg.adminListen, "address of the first node's admin API; the others follow 100 ports apart")
	c.Flags().StringVar(&cfg.clusterListen, "cluster-listen", cfg.clusterListen, "address of the first node's gossip; the others follow 10 ports apart")
	return c
}

// demo runs an upstream, the nodes and one request, then waits for ctx's end.
func demo(ctx context.Context, out io.Writer, cfg demoConfig) error {
	dir, err := os.MkdirTemp("", "headgate-demo")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // a temporary folder left behind harms nobody
	if cfg.upstream == "" {
		stop, url, err := simulated()
		if err != nil {
			return err
		}
		defer stop()
		cfg.upstream = url
		fmt.Fprintf(out, "simulated vLLM: %s\n", url)
	}
	key, token, err := demoSecrets()
	if err != nil {
		return err
	}
	var nodes []*demoNode
	defer func() {
		for _, n := range nodes {
			n.stop()
		}
	}()
	for i := range cfg.nodes {
		n, err := startDemoNode(ctx, out, dir, cfg, i, nodes, key, token)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
	}
	if err := proof(ctx, out, nodes, key, token); err != nil {
		return fmt.Errorf("the request failed: %w", err)
	}
	<-ctx.Done()
	for _, n := range nodes {
		n.stop()
	}
	fmt.Fprintln(out, "stopped")
	return nil
}

// simulated runs a vLLM that is none.
func simulated() (stop func(), url string, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", err
	}
	s, err := fakevllm.New(fakevllm.Config{Models: []string{"demo-model"}, TTFT: 150 * time.Millisecond, InterToken: 30 * time.Millisecond})
	if err != nil {
		return nil, "", errors.Join(err, l.Close())
	}
	up := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = up.Serve(l) }() // ends with stop
	return func() { _ = up.Close() }, "http://" + l.Addr().String(), nil
}

// demoSecrets are the environment's, or fresh: all nodes need the same.
func demoSecrets() (key, token string, err error) {
	if key = os.Getenv("HEADGATE_DEV_KEY"); key == "" {
		if key, _, err = ledger.NewKey(rand.Reader, false); err != nil {
			return "", "", err
		}
	}
	if token = os.Getenv("HEADGATE_ADMIN_TOKEN"); token == "" {
		token, _, err = ledger.NewKey(rand.Reader, false)
	}
	return key, token, err
}

// demoNode is a process that serves.
type demoNode struct {
	name                 string
	cmd                  *exec.Cmd
	front, admin, gossip string
	exited               chan struct{}
	stopping             chan struct{}
	once                 sync.Once
}

// startDemoNode starts a node and returns once it listens. What it logs goes to a file.
func startDemoNode(ctx context.Context, out io.Writer, dir string, cfg demoConfig, i int, before []*demoNode, key, token string) (*demoNode, error) {
	n := &demoNode{name: fmt.Sprintf("node-%d", i+1), exited: make(chan struct{}), stopping: make(chan struct{})}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := []string{
		"headgate", "serve", "--dev", "--upstream", cfg.upstream, "--node-id", n.name, "--data-dir", filepath.Join(dir, n.name),
		"--listen", above(cfg.listen, i*demoStep), "--admin-listen", above(cfg.adminListen, i*demoStep),
		"--cluster-listen", above(cfg.clusterListen, i*demoClusterStep), "--bootstrap-expect", strconv.Itoa(cfg.nodes),
	}
	if i > 0 {
		args = append(args, "--join", before[0].gossip)
	}
	n.cmd = &exec.Cmd{Path: exe, Args: args, Dir: dir, Env: append(os.Environ(), "HEADGATE_DEV_KEY="+key, "HEADGATE_ADMIN_TOKEN="+token)}
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the demo, which then stops the nodes
	stderr, err := n.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, n.name+".log"))
	if err != nil {
		return nil, err
	}
	if err := n.cmd.Start(); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	serving := make(chan [3]string, 1)
	go n.watch(out, stderr, log, serving)
	select {
	case a := <-serving:
		n.front, n.admin, n.gossip = a[0], a[1], a[2]
		return n, nil
	case <-n.exited:
		text, _ := os.ReadFile(log.Name()) // shown if it is there
		return nil, fmt.Errorf("%s did not start:\n%s", n.name, bytes.TrimSpace(text))
	case <-ctx.Done():
		n.stop()
		return nil, ctx.Err()
	}
}

// watch keeps a node's log, tells of its addresses, and says so should it end by itself.
func (n *demoNode) watch(out io.Writer, stderr io.Reader, log *os.File, serving chan<- [3]string) {
	lines := bufio.NewScanner(stderr)
	lines.Buffer(nil, 1<<20)
	served := false
	for lines.Scan() {
		_, _ = log.Write(append(lines.Bytes(), '\n')) // a full disk ends no demo
		var e struct {
			Msg           string
			Listen        string
			AdminListen   string `json:"admin_listen"`
			ClusterListen string `json:"cluster_listen"`
		}
		if json.Unmarshal(lines.Bytes(), &e) == nil && e.Msg == "serving" {
			served = true
			select {
			case serving <- [3]string{e.Listen, e.AdminListen, e.ClusterListen}:
			default:
			}
		}
	}
	_, _ = io.Copy(log, stderr) // what is left of a line too long
	err := n.cmd.Wait()
	_ = log.Close()
	select {
	case <-n.stopping:
	default:
		if served { // else the start says why
			fmt.Fprintf(out, "%s ended (%v); the others go on\n", n.name, err)
		}
	}
	close(n.exited)
}

// stop ends the node as an operator would, and at last hard.
func (n *demoNode) stop() {
	n.once.Do(func() { close(n.stopping) })
	_ = n.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-n.exited:
	case <-time.After(15 * time.Second):
		_ = n.cmd.Process.Kill()
		<-n.exited
	}
}

// above is the address whose port is by n higher; port 0 stays.
func above(addr string, n int) string {
	host, port, err := net.SplitHostPort(addr)
	p, perr := strconv.Atoi(port)
	if err != nil || perr != nil || p == 0 {
		return addr
	}
	return net.JoinHostPort(host, strconv.Itoa(p+n))
}

// proof prints how to reach the nodes and streams one answer through the last.
func proof(ctx context.Context, out io.Writer, nodes []*demoNode, key, token string) error {
	for _, n := range nodes {
		if err := waitReady(ctx, "http://"+n.admin+"/readyz"); err != nil {
			return err
		}
	}
	for _, n := range nodes {
		fmt.Fprintf(out, "%s:         gateway http://%s/v1   admin API http://%s   pid %d\n", n.name, n.front, n.admin, n.cmd.Process.Pid)
	}
	base := "http://" + nodes[len(nodes)-1].front
	model, err := firstModel(ctx, base, key)
	if err != nil {
		return err
	}
	body := fmt.Sprintf(`{"model": %q, "stream": true, "max_tokens": 24, "messages": [{"role": "user", "content": "Say hello."}]}`, model)
	fmt.Fprintf(out, "API key:        %s\nadmin token:    %s\n\nTry it:\n  curl -N %s/v1/chat/completions -H 'Authorization: Bearer %s' -H 'Content-Type: application/json' -d '%s'\n", key, token, base, key, body)
	fmt.Fprintf(out, "  HEADGATE_ADMIN_TOKEN=%s %s members --admin http://%s\n", token, os.Args[0], nodes[len(nodes)-1].admin)
	fmt.Fprintf(out, "  HEADGATE_ADMIN_TOKEN=%s %s usage top --by model --admin http://%s\n", token, os.Args[0], nodes[0].admin)
	if len(nodes) > 1 {
		fmt.Fprintf(out, "  kill -9 %d   # %s; the others go on\n", nodes[0].cmd.Process.Pid, nodes[0].name)
	}
	fmt.Fprint(out, "\nOne answer, streamed through the last of them:\n")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := printAnswer(out, resp); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n\nTokens left this minute in all: %s of %s.", resp.Header.Get("X-Ratelimit-Remaining-Tokens"), resp.Header.Get("X-Ratelimit-Limit-Tokens"))
	used, err := demoUsage(ctx, nodes[0].admin, token)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, " Spent so far, as %s knows: $%s for %d tokens. Ctrl-C stops all.\n", nodes[0].name, used.Cost, used.Input+used.Output)
	return nil
}

// demoUsage is what was used in all, by the logs of all nodes; one of them asks the others.
func demoUsage(ctx context.Context, addr, token string) (admin.UsageRow, error) {
	var rows admin.UsageRows
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/admin/v1/usage/top", nil)
	if err != nil {
		return rows.Total, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return rows.Total, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return rows.Total, fmt.Errorf("what was spent is not known: status %d", resp.StatusCode)
	}
	err = json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&rows)
	return rows.Total, err
}

// firstModel is the first that the key may use.
func firstModel(ctx context.Context, base, key string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/v1/models", nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	var list struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&list); err != nil || len(list.Data) == 0 {
		return "", fmt.Errorf("the gateway lists no model: status %d: %w", resp.StatusCode, err)
	}
	return list.Data[0].ID, nil
}

// printAnswer prints the text of a stream as it comes.
func printAnswer(out io.Writer, resp *http.Response) error {
	if resp.StatusCode != http.StatusOK {
		raw, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<16)) // what came is shown
		return fmt.Errorf("status %d: %s", resp.StatusCode, raw)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	done := false
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if done = done || data == "[DONE]"; !ok || data == "[DONE]" {
			continue
		}
		text, err := deltaText(data)
		if err != nil {
			return err
		}
		fmt.Fprint(out, text)
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if !done {
		return errors.New("the stream ended without [DONE]")
	}
	return nil
}

func waitReady(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return errors.New("the node did not become ready: is its upstream up?")
		case <-time.After(50 * time.Millisecond):
		}
	}
}
