package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"headgate/cluster/pki"
	"headgate/proxy"
	"headgate/proxy/admin"
)

// These tests run the command as people do: as a process, with flags, environment, files
// and signals.

const (
	cliKey   = "cli-test-key-0123456789"
	cliToken = "cli-test-token"
	patience = time.Minute // ends a hang, asserts nothing
)

// cliPolicy has a bucket that hardly refills while a test runs.
func cliPolicy(upstream string, burst int, more string) string {
	return fmt.Sprintf(`version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b], price_per_million: {input: "1.00", output: "2.00"}}]
plans:
  - name: p
    limits: [{name: org-tokens, scope: org, unit: tokens, rate: 1000/day, burst: %d}]
tenants: [{name: dev, plan: p}]
%s`, upstream, burst, more)
}

// headgate is the path of a binary of that name; see TestMain.
func headgate(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "headgate")
	if err := os.Symlink(self, link); err != nil {
		t.Fatal(err)
	}
	return link
}

// cleanEnv is the environment without what would configure headgate, and with more.
func cleanEnv(more ...string) []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "HEADGATE_") })
	return append(env, more...)
}

// result is how a command ended.
type result struct {
	code           int
	stdout, stderr string
}

// runCLI runs a command to its end.
func runCLI(t *testing.T, env []string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, headgate(t), args...)
	cmd.Dir, cmd.Env = t.TempDir(), cleanEnv(env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// output collects what a process writes.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// nodeProcess is a running `headgate serve`.
type nodeProcess struct {
	t            *testing.T
	cmd          *exec.Cmd
	log          output
	exited       chan struct{}
	front, admin string // URLs
}

// startNode starts a node on ports of its own and returns once it listens.
func startNode(t *testing.T, env []string, args ...string) *nodeProcess {
	t.Helper()
	n := &nodeProcess{t: t, exited: make(chan struct{})}
	n.cmd = exec.Command(headgate(t), append([]string{"serve"}, args...)...)
	n.cmd.Dir = t.TempDir()
	n.cmd.Env = cleanEnv(append([]string{
		"HEADGATE_DEV=true", "HEADGATE_DEV_KEY=" + cliKey, "HEADGATE_ADMIN_TOKEN=" + cliToken,
		"HEADGATE_LISTEN=127.0.0.1:0", "HEADGATE_ADMIN_LISTEN=127.0.0.1:0", "HEADGATE_CLUSTER_LISTEN=127.0.0.1:0", "HEADGATE_DATA_DIR=data",
	}, env...)...)
	n.cmd.Stdout, n.cmd.Stderr = &n.log, &n.log
	if err := n.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { defer close(n.exited); _ = n.cmd.Wait() }() // how it ended is in its state
	t.Cleanup(func() {
		n.stop()
		if t.Failed() {
			t.Logf("the node's log ends:\n%s", tail(n.log.String(), 4000))
		}
	})
	n.await("listening", func() bool {
		for line := range strings.Lines(n.log.String()) {
			var e struct {
				Msg    string
				Listen string
				Admin  string `json:"admin_listen"`
			}
			if json.Unmarshal([]byte(line), &e) == nil && e.Msg == "serving" {
				n.front, n.admin = "http://"+e.Listen, "http://"+e.Admin
				return true
			}
		}
		return false
	})
	n.await("its policy", func() bool { // from then on what stands in the way is a backend at most
		code, text := readiness(t, n.admin)
		return code == http.StatusOK || strings.Contains(text, "backend")
	})
	return n
}

// readiness is what /readyz answers.
func readiness(t *testing.T, admin string) (code int, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, admin+"/readyz", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, ""
	}
	return res.StatusCode, string(raw)
}

// await waits for a condition while the node lives.
func (n *nodeProcess) await(what string, ok func() bool) {
	n.t.Helper()
	eventually(n.t, what, func() bool {
		select {
		case <-n.exited:
			n.t.Fatalf("the node ended while waiting for: %s\n%s", what, tail(n.log.String(), 4000))
		default:
		}
		return ok()
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	enough := time.NewTimer(patience)
	defer enough.Stop()
	for !ok() {
		select {
		case <-again.C:
		case <-enough.C:
			t.Fatalf("still waiting for: %s", what)
		}
	}
}

func (n *nodeProcess) signal(s os.Signal) {
	n.t.Helper()
	if err := n.cmd.Process.Signal(s); err != nil {
		n.t.Fatal(err)
	}
}

// stop ends the node and returns its exit code.
func (n *nodeProcess) stop() int {
	_ = n.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	<-n.exited
	return n.cmd.ProcessState.ExitCode()
}

// cli runs a command against the node.
func (n *nodeProcess) cli(args ...string) result {
	n.t.Helper()
	return runCLI(n.t, []string{"HEADGATE_ADMIN=" + n.admin, "HEADGATE_ADMIN_TOKEN=" + cliToken}, args...)
}

// ok runs a command that must succeed and returns what it printed.
func (n *nodeProcess) ok(args ...string) string {
	n.t.Helper()
	r := n.cli(args...)
	if r.code != 0 {
		n.t.Fatalf("headgate %s: exit code %d\n%s", strings.Join(args, " "), r.code, r.stderr)
	}
	return r.stdout
}

// decoded runs a command with --json and decodes what it printed.
func decoded[T any](n *nodeProcess, args ...string) (v T) {
	n.t.Helper()
	out := n.ok(append(args, "--json")...)
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		n.t.Fatalf("headgate %s: %v in %s", strings.Join(args, " "), err, out)
	}
	return v
}

// apply applies a policy and returns how that ended.
func (n *nodeProcess) apply(policy string, flags ...string) result {
	n.t.Helper()
	return n.cli(append([]string{"apply", "-f", writeFile(n.t, "policy.yaml", policy)}, flags...)...)
}

// left is the level of the policy's one bucket.
func (n *nodeProcess) left() (level, capacity int64) {
	n.t.Helper()
	for _, l := range decoded[[]admin.Level](n, "limits", "show", "dev") {
		if l.Limit == "org-tokens" {
			return l.Level, l.Capacity
		}
	}
	n.t.Fatal("the bucket is not in use")
	return 0, 0
}

// awaitLeft waits until so much is left: what an answer used beyond its estimate, or less, reaches
// the bucket's owner a moment later.
func (n *nodeProcess) awaitLeft(level, capacity int64) {
	n.t.Helper()
	n.await(fmt.Sprintf("%d of %d to be left", level, capacity), func() bool {
		l, c := n.left()
		return l == level && c == capacity
	})
}

// chat sends one small chat and returns the status, the error's code, and the tokens used.
func (n *nodeProcess) chat(key string) (status int, code string, tokens int64) {
	n.t.Helper()
	req, err := http.NewRequestWithContext(n.t.Context(), http.MethodPost, n.front+"/v1/chat/completions",
		strings.NewReader(`{"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}]}`))
	if err != nil {
		n.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	var body struct {
		Error struct{ Code string }
		Usage struct {
			Total int64 `json:"total_tokens"`
		}
	}
	if err := json.NewDecoder(res.Body).Decode(&body); err != nil {
		n.t.Fatal(err)
	}
	return res.StatusCode, body.Error.Code, body.Usage.Total
}

// spend sends one small chat that must pass and returns the tokens it took.
func (n *nodeProcess) spend() int64 {
	n.t.Helper()
	status, code, tokens := n.chat(cliKey)
	if status != http.StatusOK || tokens == 0 {
		n.t.Fatalf("status %d, code %q, %d tokens", status, code, tokens)
	}
	return tokens
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func contains(t *testing.T, text string, wants ...string) {
	t.Helper()
	for _, want := range wants {
		if !strings.Contains(text, want) {
			t.Errorf("want %q in:\n%s", want, text)
		}
	}
}

func TestExitCodes(t *testing.T) {
	t.Parallel()
	token := []string{"HEADGATE_ADMIN_TOKEN=" + cliToken}
	policy := writeFile(t, "good.yaml", cliPolicy("http://127.0.0.1:1", 100, ""))
	bad := writeFile(t, "bad.yaml", strings.Replace(cliPolicy("http://127.0.0.1:1", 100, ""), "scope: org", "scope: orga", 1))
	odd := writeFile(t, "odd.yaml", "node_id: a\nlistening: 127.0.0.1:0\n")
	routes := writeFile(t, "routes.yaml", "max_body: {chatt: 1000}\n")
	busy := strings.TrimPrefix(startFake(t), "http://")
	for name, c := range map[string]struct {
		env  []string
		args []string
		code int
		out  string // on stdout where the code is 0, else on stderr
	}{
		"version":            {nil, []string{"version"}, 0, "dev"},
		"help":               {nil, []string{"serve", "--help"}, 0, "--admin-listen"},
		"pages":              {nil, []string{"docs"}, 0, "operate"},
		"a page":             {nil, []string{"docs", "operate"}, 0, "# Operate"},
		"no page":            {nil, []string{"docs", "opera"}, 2, "the pages are"},
		"no command":         {nil, []string{"serv"}, 2, `unknown command "serv"`},
		"no subcommand":      {nil, []string{"keys", "make"}, 2, `unknown command "make" for "headgate keys"`},
		"no flag":            {nil, []string{"serve", "--prot", "1"}, 2, "unknown flag: --prot"},
		"flag's value":       {nil, []string{"serve", "--max-conns", "many"}, 2, "max-conns"},
		"variable's value":   {[]string{"HEADGATE_MAX_CONNS=many"}, []string{"serve"}, 2, `HEADGATE_MAX_CONNS: "many" is not a whole number`},
		"argument":           {nil, []string{"serve", "now"}, 2, "headgate serve takes no argument, not \"now\": serve\nSee headgate serve --help.\n"},
		"a file, no flag":    {token, []string{"apply", "p.yaml"}, 2, "headgate apply -f p.yaml"},
		"a flag's slip":      {nil, []string{"serve", "--nod-id", "x"}, 2, "unknown flag: --nod-id; did you mean --node-id?\nSee headgate serve --help.\n"},
		"an argument's flag": {nil, []string{"budgets", "show", "--tenant", "acme"}, 2, "TENANT is an argument, not a flag: headgate budgets show [TENANT]"},
		"a command's slip":   {nil, []string{"budgets", "shwo"}, 2, "did you mean \"show\"?\nSee headgate budgets --help.\n"},
		"a number's slip":    {nil, []string{"explain", "--input", "x"}, 2, `--input: "x" is not a whole number`},
		"a great number":     {nil, []string{"explain", "--input", "9223372036854775808"}, 2, `beyond what can be counted`},
		"neither yes nor no": {nil, []string{"serve", "--dev=perhaps"}, 2, `--dev: "perhaps" is neither true nor false`},
		"a tenant for show":  {nil, []string{"limits", "acme"}, 2, `unknown command "acme" for "headgate limits"; write headgate limits show acme`},
		"another command":    {nil, []string{"keys", "zzzzzzz"}, 2, `unknown command "zzzzzzz" for "headgate keys"; there are create, rotate, revoke, list`},
		"a page's slip":      {nil, []string{"docs", "capcity"}, 2, `; did you mean "capacity"?`},
		"no such page":       {nil, []string{"docs", "zzzzzzz"}, 2, `there is no page "zzzzzzz"; the pages are air-gapped, `},
		"no argument":        {token, []string{"limits", "show"}, 2, "takes one argument, not 0: show TENANT"},
		"no tenant":          {nil, []string{"keys", "create"}, 2, "--tenant NAME"},
		"no file":            {token, []string{"apply"}, 2, "headgate apply -f policy.yaml"},
		"missing file":       {token, []string{"apply", "-f", "none.yaml"}, 2, "none.yaml"},
		"no token":           {nil, []string{"status"}, 2, "HEADGATE_ADMIN_TOKEN is not set"},
		"no node":            {token, []string{"status", "--admin", "http://127.0.0.1:1"}, 1, "is --admin right?"},
		"serve, no token":    {nil, []string{"serve", "--policy", policy}, 2, "HEADGATE_ADMIN_TOKEN is not set"},
		"beyond the machine": {token, []string{"serve", "--cluster-listen", "0.0.0.0:0"}, 2, "cluster_tls"},
		"no such folder":     {token, []string{"serve", "--cluster-tls", "none"}, 2, "none"},
		"policy's file":      {token, []string{"serve", "--policy", "none.yaml"}, 2, "none.yaml"},
		"policy's mistake":   {token, []string{"serve", "--policy", bad}, 2, `line 6: plans[p].limits[org-tokens].scope: "orga" is not one of key, user, org, model, global; did you mean "org"?` + "\nSee headgate docs policy.\n"},
		"upstream, no dev":   {token, []string{"serve", "--upstream", "http://127.0.0.1:1"}, 2, "goes with dev only"},
		"upstream, policy":   {token, []string{"serve", "--dev", "--upstream", "http://127.0.0.1:1", "--policy", policy}, 2, "exclude each other"},
		"address":            {token, []string{"serve", "--policy", policy, "--listen", "8080"}, 2, "is not HOST:PORT"},
		"log level":          {token, []string{"serve", "--policy", policy, "--log-level", "loud"}, 2, "debug, info, warn, error"},
		"network":            {token, []string{"serve", "--policy", policy, "--trusted-proxies", "10.0.0.1"}, 2, "10.0.0.0/8"},
		"certificate":        {token, []string{"serve", "--policy", policy, "--tls-cert", "c.pem"}, 2, "needs both tls_cert and tls_key"},
		"short key":          {append([]string{"HEADGATE_DEV_KEY=short"}, token...), []string{"serve", "--dev", "--policy", policy}, 2, "fewer than 16 characters"},
		"file's field":       {token, []string{"serve", "--config", odd}, 2, `[2:1] unknown field "listening"`},
		"file's route":       {token, []string{"serve", "--config", routes}, 2, `no route "chatt"`},
		"address is in use":  {token, []string{"serve", "--policy", policy, "--listen", busy}, 1, "address already in use"},
		"simulator's faults": {nil, []string{"bench", "upstream", "--faults", "fire=1"}, 2, `unknown fault "fire"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := runCLI(t, c.env, c.args...)
			if r.code != c.code {
				t.Errorf("exit code %d, want %d", r.code, c.code)
			}
			said := r.stderr
			if c.code == 0 {
				said = r.stdout
			} else if r.stdout != "" {
				t.Errorf("a failure wrote to stdout: %s", r.stdout)
			}
			contains(t, said, c.out)
		})
	}
}

// TestConfigurationLayers: flags go over the environment, that over the file, that over
// the defaults.
func TestConfigurationLayers(t *testing.T) {
	t.Parallel()
	policy := writeFile(t, "policy.yaml", cliPolicy(startFake(t), 100, ""))
	config := writeFile(t, "headgate.yaml", "node_id: from-file\npolicy: "+policy+"\ndrain_timeout: 5s\nmax_body: {default: 100000, chat: 200}\nprefilter: {requests_per_second: 500}\n")
	for _, c := range []struct {
		want string
		env  []string
		args []string
	}{
		{"from-file", nil, nil},
		{"from-env", []string{"HEADGATE_NODE_ID=from-env"}, nil},
		{"from-flag", []string{"HEADGATE_NODE_ID=from-env"}, []string{"--node-id", "from-flag"}},
	} {
		t.Run(c.want, func(t *testing.T) {
			t.Parallel()
			n := startNode(t, append([]string{"HEADGATE_CONFIG=" + config}, c.env...), c.args...)
			if s := decoded[admin.Status](n, "status"); s.Node != c.want || s.PolicySource != "applied by node "+c.want {
				t.Errorf("node %q with the policy of %s", s.Node, s.PolicySource)
			}
			n.spend()
			if code := n.stop(); code != 0 {
				t.Errorf("exit code %d", code)
			}
		})
	}
}

// TestApply: a policy binds at once, and what was spent stays spent.
func TestApply(t *testing.T) {
	t.Parallel()
	fake := startFake(t)
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", cliPolicy(fake, 100, "")))
	spent := n.spend()
	check := func(capacity int64) {
		t.Helper()
		n.awaitLeft(capacity-spent, capacity)
	}
	check(100)

	dry := n.apply(cliPolicy(fake, 200, ""), "--dry-run")
	contains(t, dry.stdout, "~ plans[p].limits[org-tokens].burst: 100 -> 200", "1 changes; nothing was applied")
	check(100)

	contains(t, n.apply(cliPolicy(fake, 200, "")).stdout, "~ plans[p].limits[org-tokens].burst: 100 -> 200", "1 changes applied as revision 2")
	check(200)
	spent += n.spend()
	check(200)

	low := spent + 5
	n.apply(cliPolicy(fake, int(low), ""))
	check(low)
	if status, code, _ := n.chat(cliKey); status != http.StatusTooManyRequests || code != "rate_limit_exceeded" {
		t.Errorf("5 are left, but status %d, code %q", status, code)
	}
	check(low)

	bad := n.apply(strings.Replace(cliPolicy(fake, 500, ""), "plan: p}", "plan: q}", 1))
	if bad.code != 2 {
		t.Errorf("exit code %d for a wrong policy", bad.code)
	}
	contains(t, bad.stderr, `line 7: tenants[dev].plan: there is no plan "q"; did you mean "p"?`)
	check(low)
}

func TestHangupReadsThePolicyAgain(t *testing.T) {
	t.Parallel()
	fake := startFake(t)
	file := writeFile(t, "policy.yaml", cliPolicy(fake, 100, ""))
	n := startNode(t, nil, "--policy", file)
	spent := n.spend()
	rewrite := func(policy string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(policy), 0o600); err != nil {
			t.Fatal(err)
		}
		n.signal(syscall.SIGHUP)
	}
	rewrite(cliPolicy(fake, 300, ""))
	n.await("the policy to be read again", func() bool { return strings.Contains(n.log.String(), "policy read again") })
	n.awaitLeft(300-spent, 300)
	rewrite("version: 1\nplan: []\n")
	n.await("the refusal", func() bool { return strings.Contains(n.log.String(), "the policy was not read again") })
	contains(t, n.log.String(), `unknown field \"plan\"; did you mean \"plans\"?`)
	if _, of := n.left(); of != 300 {
		t.Errorf("a wrong policy changed the limit to %d", of)
	}
}

// TestKillLosesABlock: the policy last applied outlives SIGKILL, and so does what was spent of a limit by
// the day, but for what the node had in hand of it.
func TestKillLosesABlock(t *testing.T) {
	t.Parallel()
	fake := startFake(t)
	data := t.TempDir()
	n := startNode(t, nil, "--data-dir", data, "--policy", writeFile(t, "policy.yaml", cliPolicy(fake, 100, "")))
	if r := n.apply(cliPolicy(fake, 70, "")); r.code != 0 {
		t.Fatal(r.stderr)
	}
	before := n.spend()
	n.signal(syscall.SIGKILL)
	<-n.exited

	again := startNode(t, nil, "--data-dir", data)
	if s := decoded[admin.Status](again, "status"); s.PolicyRevision != 2 || s.Buckets != 0 {
		t.Errorf("policy of %s, %d buckets", s.PolicySource, s.Buckets)
	}
	status, code, spent := again.chat(cliKey)
	if level, of := again.left(); status == http.StatusOK && (of != 70 || level > 70-before-spent+10) { // what each used beyond its estimate may be on its way, or lost with the process
		t.Errorf("%d of %d after %d and %d", level, of, before, spent)
	} else if status != http.StatusOK && code != "rate_limit_exceeded" {
		t.Errorf("%d %s", status, code)
	}
}

// slowStream is a model server whose stream goes on when it is told to.
func slowStream(t *testing.T) (url string, goOn func()) {
	t.Helper()
	proceed := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"content":"first"}}]}`+"\n\n")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-proceed:
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"content":"last"},"finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n")
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return srv.URL, sync.OnceFunc(func() { close(proceed) })
}

// TestTermDrains: a stream under way finishes, readiness goes at once, and the node
// leaves with 0.
func TestTermDrains(t *testing.T) {
	t.Parallel()
	upstream, goOn := slowStream(t)
	defer goOn()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", cliPolicy(upstream, 1000, "")))
	n.await("readiness", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })

	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.front+"/v1/chat/completions",
		strings.NewReader(`{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hello"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+cliKey)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if _, err := res.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}

	n.signal(syscall.SIGTERM)
	n.await("readiness to go", func() bool { return status(t, n.admin+"/readyz") == http.StatusServiceUnavailable })
	if code := status(t, n.admin+"/healthz"); code != http.StatusOK {
		t.Errorf("healthz is %d while the node drains", code)
	}
	goOn()
	rest, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	contains(t, string(rest), `"last"`, "data: [DONE]")
	<-n.exited
	if code := n.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	contains(t, n.log.String(), `"msg":"stopped"`)
}

// status of a GET; 0 if there was no answer.
func status(t *testing.T, url string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0
	}
	_ = res.Body.Close()
	return res.StatusCode
}

// TestKeys: a key works once it was made, and no longer once it was revoked, whatever the
// policy file says; so does one whose lines were made offline and applied.
func TestKeys(t *testing.T) {
	t.Parallel()
	fake := startFake(t)
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", cliPolicy(fake, 1000, "")))
	made := decoded[admin.CreatedKey](n, "keys", "create", "--tenant", "dev", "--id", "dev-1", "--models", "m")
	if status, code, _ := n.chat(made.Key); status != http.StatusOK || !strings.HasPrefix(made.Key, "hg_live_") || made.ID != "dev-1" {
		t.Errorf("%d %s with %s", status, code, made.ID)
	}

	offline := n.ok("keys", "create", "--offline", "--tenant", "dev", "--id", "dev-2")
	secret, entry, ok := strings.Cut(strings.TrimPrefix(offline, "key (shown once): "), "\n")
	if !ok || !strings.HasPrefix(secret, "hg_live_") {
		t.Fatalf("keys create printed %s", offline)
	}
	if status, code, _ := n.chat(secret); status != http.StatusUnauthorized || code != "invalid_api_key" {
		t.Errorf("before it is applied: %d %s", status, code)
	}
	if r := n.apply(cliPolicy(fake, 1000, entry)); r.code != 0 {
		t.Fatal(r.stderr)
	}
	if status, code, _ := n.chat(secret); status != http.StatusOK {
		t.Errorf("%d %s", status, code)
	}
	human := n.ok("keys", "list")
	contains(t, human, "ID ", "TENANT", "LAST USED", "dev-2", "active")
	if strings.Contains(human, secret) {
		t.Error("the list shows a secret")
	}
	keys := decoded[[]admin.Key](n, "keys", "list")
	i := slices.IndexFunc(keys, func(k admin.Key) bool { return k.ID == "dev-2" })
	if i < 0 || keys[i].Status != "active" || keys[i].LastUsed == "" || keys[i].Tenant != "dev" {
		t.Errorf("%+v", keys)
	}

	rotated := decoded[admin.CreatedKey](n, "keys", "rotate", "dev-1", "--overlap", "0s")
	if status, code, _ := n.chat(rotated.Key); status != http.StatusOK || rotated.Replaces != "dev-1" {
		t.Errorf("rotated: %d %s", status, code)
	}
	if status, _, _ := n.chat(made.Key); status != http.StatusUnauthorized {
		t.Errorf("the replaced key gets %d", status)
	}

	n.ok("keys", "revoke", "dev-2")
	for _, what := range []string{"after it was revoked", "after its file was applied again"} {
		if status, code, _ := n.chat(secret); status != http.StatusUnauthorized || code != "key_revoked" {
			t.Errorf("%s: %d %s", what, status, code)
		}
		contains(t, n.apply(cliPolicy(fake, 1000, entry)).stdout, "warning: ")
	}
	contains(t, n.ok("keys", "list"), "revoked")

	var k admin.CreatedKey
	out := runCLI(t, nil, "keys", "create", "--offline", "--tenant", "dev", "--test", "--json")
	if err := json.Unmarshal([]byte(out.stdout), &k); err != nil || !strings.HasPrefix(k.Key, "hg_test_") || !strings.HasPrefix(k.ID, "dev-") || !strings.HasPrefix(k.Hash, "sha256:") {
		t.Errorf("%v in %s", err, out.stdout)
	}
}

// TestDemo is what make run shows: one answer through a node, and how to get another.
func TestDemo(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), headgate(t), "demo", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0")
	cmd.Dir, cmd.Env = t.TempDir(), cleanEnv()
	var out output
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the answer", func() bool { return strings.Contains(out.String(), "Ctrl-C stops all.") })
	contains(t, out.String(), "simulated vLLM: http://", "gateway http://", "API key:        hg_test_", "curl -N http://", "usage top --by model", "Tokens left this minute in all: ", "Spent so far, as node-1 knows: $0.0000")
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || !strings.HasSuffix(out.String(), "\nstopped\n") {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// TestUnknownVariables are told of, by name only.
func TestUnknownVariables(t *testing.T) {
	t.Parallel()
	policy := writeFile(t, "policy.yaml", cliPolicy(startFake(t), 100, ""))
	n := startNode(t, []string{"HEADGATE_DATADIR=odd-value", "HEADGATE_LOG_LEVEL=info", "HEADGATE_ADMIN=http://x", "HEADGATE_PORT=tcp://10.0.0.1:80", "HEADGATE_PORT_80_TCP_ADDR=10.0.0.1", "HEADGATE_GW_SERVICE_PORT_HTTP=80"}, "--policy", policy)
	contains(t, n.log.String(), `"variables that name no flag are ignored, unless the policy names them","variables":["HEADGATE_DATADIR"]}`)
	if strings.Contains(n.log.String(), "odd-value") {
		t.Error("the log has a variable's value")
	}
	if n = startNode(t, nil, "--policy", policy); strings.Contains(n.log.String(), "that name no flag") {
		t.Error(n.log.String())
	}
}

// TestLooking: what an operator can ask a node, for people and for programs.
func TestLooking(t *testing.T) {
	t.Parallel()
	n := startNode(t, []string{"HEADGATE_NODE_ID=looked-at"}, "--policy", writeFile(t, "policy.yaml", cliPolicy(startFake(t), 100, "")))
	spent := n.spend()
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })

	contains(t, n.ok("status"), "looked-at (dev), ready", "revision 1", "1 tenants", "models m", "BACKEND", "b ", "up")
	if s := decoded[admin.Status](n, "status"); !s.Ready || len(s.Backends) != 1 || s.Backends[0].State != "up" || s.Buckets != 1 {
		t.Errorf("%+v", s)
	}
	n.awaitLeft(100-spent, 100)
	contains(t, n.ok("limits", "show", "dev"), "LIMIT", "org-tokens", "tokens", fmt.Sprint(100-spent), "looked-at")
	for args, says := range map[string]string{
		"limits show nobody": `there is no tenant "nobody"; there are "dev" (headgate policy show)`, "budgets show deb": `there is no tenant "deb"; did you mean "dev"?`,
		"budgets credit dev ever 1 --reason x": `tenant "dev" has no budget "ever", nor any other; headgate budgets show dev lists them`,
		"explain --tenant deb --model m":       `there is no tenant "deb"; did you mean "dev"?`, "explain --tenant dev --key k --model m": `there is no key "k" of tenant "dev"; headgate keys list`,
	} {
		if r := n.cli(strings.Fields(args)...); r.code != 1 || !strings.Contains(r.stderr, says) {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if r := n.cli("explain", "--tenant", "dev"); r.code != 2 || !strings.Contains(r.stderr, "--model") {
		t.Errorf("%+v", r)
	}

	contains(t, n.ok("explain", "--tenant", "dev", "--model", "m", "--input", "10", "--output", "20"),
		"admitted: 10 input and 20 output tokens, $0.00005", "LIMIT", "org-tokens", "admits")
	refused := decoded[proxy.Explanation](n, "explain", "--tenant", "dev", "--model", "m", "--input", fmt.Sprint(101-spent))
	if refused.Admitted || refused.Refused != "org-tokens" || len(refused.Limits) != 1 || refused.Limits[0].RetryAfterMS < 1 {
		t.Errorf("%+v", refused)
	}
	contains(t, n.ok("explain", "--tenant", "dev", "--model", "m", "--input", "101"), "refused by org-tokens", "waiting does not help")
	n.awaitLeft(100-spent, 100) // to ask costs nothing
	if r := n.cli("explain", "--tenant", "dev", "--model", "x"); r.code != 1 || !strings.Contains(r.stderr, "`x` does not exist") {
		t.Errorf("%+v", r)
	}
	if r := n.cli("explain", "--tenant", "dev", "--model", "m", "--input", "-1"); r.code != 2 || !strings.Contains(r.stderr, "must not be negative") {
		t.Errorf("%+v", r)
	}
}

// TestDoctor: what would stop a start is found before it.
func TestDoctor(t *testing.T) {
	t.Parallel()
	policy := writeFile(t, "policy.yaml", cliPolicy("http://127.0.0.1:1", 100, ""))
	bad := writeFile(t, "bad.yaml", "version: 1\nplan: []\n")
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = busy.Close() })
	file, key := writeFile(t, "a-file", ""), writeFile(t, "key", "sk-1\n")
	keyed := func(file string) string {
		text := cliPolicy("http://127.0.0.1:1", 100, "")
		with := strings.Replace(text, "name: b, ", "name: b, api_key_file: "+file+", ", 1)
		if with == text {
			t.Fatal("no backend to give a key to")
		}
		return writeFile(t, "keyed.yaml", with)
	}
	free := []string{"HEADGATE_LISTEN=127.0.0.1:0", "HEADGATE_ADMIN_LISTEN=127.0.0.1:0", "HEADGATE_CLUSTER_LISTEN=127.0.0.1:0", "HEADGATE_ADMIN_TOKEN=x"}
	for _, c := range []struct {
		args string
		code int
		says []string
	}{
		{"--policy " + policy, 0, []string{"ok configuration valid", "ok policy " + policy + ": 1 tenants, 1 models", "ok data_dir", "an fsync takes", "clock", "ok listen 127.0.0.1:0/tcp is free", "open files"}},
		{"", 0, []string{"ok policy no file"}},
		{"--policy " + bad, 1, []string{"fail policy", `did you mean "plans"?`, "ok data_dir"}},
		{"--policy none.yaml", 1, []string{"fail policy", "none.yaml"}},
		{"--policy " + keyed("/none/key"), 1, []string{"fail policy", "keyed.yaml: line 2: backends[b].api_key_file: open /none/key: no such file or directory; every node needs it"}},
		{"--policy " + keyed(file), 1, []string{"fail policy", file + " is empty; write the key into it"}},
		{"--policy " + keyed(key), 0, []string{"ok policy", "1 tenants, 1 models"}},
		{"--listen " + busy.Addr().String(), 1, []string{"fail listen", "is in use"}},
		{"--listen 8080", 1, []string{"fail configuration", "is not HOST:PORT"}},
		{"--data-dir " + file, 1, []string{"fail data_dir"}},
		{"--tls-cert " + file + " --tls-key " + file, 1, []string{"fail tls"}},
		{"--config none", 1, []string{"fail configuration", "none"}},
	} {
		r := runCLI(t, free, append([]string{"doctor"}, strings.Fields(c.args)...)...)
		if r.code != c.code {
			t.Errorf("doctor %s: %+v", c.args, r)
		}
		contains(t, spaced(r.stdout), c.says...)
	}
	// What a node of a cluster needs besides.
	dir := filepath.Join(t.TempDir(), "pki")
	if r := runCLI(t, nil, "init", "--cluster", "west", "--node", "gw-1", "--out", dir); r.code != 0 {
		t.Fatal(r.stderr)
	}
	folder := filepath.Join(dir, "gw-1")
	cert := " --admin-tls-cert " + filepath.Join(folder, "node.pem") + " --admin-tls-key "
	for _, c := range []struct {
		args string
		code int
		says []string
	}{
		{"--cluster-tls " + folder + cert + filepath.Join(folder, "node-key.pem"), 0, []string{"is node gw-1 of cluster west, valid until", "ok admin_tls", "ok configuration"}},
		{"--cluster-tls " + folder + cert + filepath.Join(dir, "ca-key.pem"), 1, []string{"fail admin_tls"}},
		{"--cluster-tls " + folder + " --node-id gw-2", 1, []string{"fail cluster_tls", "for node gw-1, not gw-2"}},
		{"--cluster-tls " + folder + " --cluster-name east", 1, []string{"fail cluster_tls", "for cluster west, not east"}},
		{"--cluster-tls " + dir, 1, []string{"fail cluster_tls"}},
		{"--join " + busy.Addr().String() + ",127.0.0.1:1", 0, []string{"ok join " + busy.Addr().String() + " answers", "warn join 127.0.0.1:1 does not answer"}},
		{"--cluster-listen " + busy.Addr().String(), 1, []string{"fail cluster_listen", "is in use"}},
	} {
		r := runCLI(t, free, append([]string{"doctor"}, strings.Fields(c.args)...)...)
		if r.code != c.code {
			t.Errorf("doctor %s: %+v", c.args, r)
		}
		contains(t, spaced(r.stdout), c.says...)
	}
	r := runCLI(t, free, "doctor", "--json")
	var found []struct{ Verdict, What, Detail string }
	if err := json.Unmarshal([]byte(r.stdout), &found); err != nil || len(found) < 6 {
		t.Errorf("%v in %s", err, r.stdout)
	}
}

// TestInit: the folder of a new cluster, a node more, renewal and rotation, in their order.
func TestInit(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "pki")
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"", 2, "name the nodes"},
		{"--node a/b", 2, "only letters"},
		{"--cluster west --node gw-1=127.0.0.1,gw-1.example --node gw-2", 0, "cluster west and 2 certificates"},
		{"--node gw-1", 2, "there already"},
		{"add-node gw-3=10.0.0.3", 0, dir + "/gw-3/"},
		{"add-node gw-3", 2, "there already"},
		{"renew-node gw-2", 0, dir + "/gw-2/node.pem"},
		{"renew-node gw-9", 2, "gw-9"},
		{"rotate-ca use", 2, "begin with phase add"},
		{"rotate-ca twist", 2, "add"},
		{"rotate-ca add", 0, "gw-1/ca.pem"},
		{"rotate-ca use", 0, "gw-3/node.pem"},
		{"rotate-ca drop", 0, "no longer trusted"},
		{"rotate-gossip-key add", 0, "gw-2/gossip.keys"},
		{"rotate-gossip-key use", 0, "gossip.keys"},
		{"rotate-gossip-key drop", 0, "no longer read"},
	} {
		r := runCLI(t, nil, append(append([]string{"init"}, strings.Fields(c.args)...), "--out", dir)...)
		said := r.stdout
		if c.code != 0 {
			said = r.stderr
		}
		if r.code != c.code || !strings.Contains(said, c.says) {
			t.Errorf("init %s: %+v", c.args, r)
		}
	}
	b, err := pki.Load(filepath.Join(dir, "gw-1"))
	if err != nil || b.ClusterName() != "west" || b.NodeName() != "gw-1" || len(b.GossipKeys()) != 1 || b.AdminToken() == "" {
		t.Errorf("%v %+v", err, b)
	}
	var step struct {
		Done string
		Copy []string
	}
	r := runCLI(t, nil, "init", "add-node", "gw-4", "--out", dir, "--json")
	if err := json.Unmarshal([]byte(r.stdout), &step); err != nil || len(step.Copy) != 1 || step.Done == "" {
		t.Errorf("%v in %+v", err, r)
	}
}
