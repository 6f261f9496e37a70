package main_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	"headgate/cluster/ledger"
	hgnode "headgate/cmd/node"
)

// The documentation is run. In each page
//
//   - blocks marked `sh` are one shell session, in an empty folder, that must not fail;
//   - a block marked `text` right after one is all that it prints: `…` stands for any
//     text within a line, and alone on a line for any number of lines; the width of gaps
//     does not count;
//   - blocks marked `sh untested` hold only calls of make;
//   - blocks marked `yaml` are policies.
//
// Ports on 127.0.0.1 are replaced by free ones, and the node's defaults with them.

const readme = "../../README.md"

// fence is a fenced block.
type fence struct {
	line       int
	info, text string
	output     *fence // the text block that follows, nil if none does
}

func fences(t *testing.T, page string) (blocks []*fence) {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var open *fence
	number, quiet := 0, true // quiet: only blank lines since the last block
	for line := range strings.Lines(string(text)) {
		number++
		info, mark := strings.CutPrefix(strings.TrimRight(line, "\n"), "```")
		switch {
		case open == nil && mark:
			open = &fence{line: number, info: info}
		case open == nil:
			quiet = quiet && strings.TrimSpace(line) == ""
		case mark:
			if last := len(blocks) - 1; open.info == "text" && quiet && last >= 0 && blocks[last].info == "sh" {
				blocks[last].output = open
			}
			blocks = append(blocks, open)
			open, quiet = nil, true
		default:
			open.text += line
		}
	}
	if open != nil {
		t.Fatalf("%s:%d: the block does not end", page, open.line)
	}
	return blocks
}

func pages(t *testing.T) []string {
	t.Helper()
	list, err := filepath.Glob("docs/*.md")
	if err != nil || len(list) == 0 {
		t.Fatalf("no pages: %v", err)
	}
	return append(list, readme)
}

func TestDocs(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages(t) {
		t.Run(strings.TrimSuffix(filepath.Base(page), ".md"), func(t *testing.T) {
			t.Parallel()
			var session []*fence
			for _, b := range fences(t, page) {
				switch b.info {
				case "sh":
					session = append(session, b)
				case "sh untested":
					for line := range strings.Lines(b.text) {
						target, ok := strings.CutPrefix(strings.Fields(line + " ")[0]+" "+strings.Join(strings.Fields(line)[1:], " "), "make ")
						if !ok || !regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(strings.Fields(target)[0])+`:`).Match(makefile) {
							t.Errorf("%s:%d: not a target of the Makefile: %s", page, b.line, line)
						}
					}
				case "yaml":
					if _, err := ledger.ParsePolicy([]byte(b.text)); err != nil {
						t.Errorf("%s:%d: %v", page, b.line, err)
					}
				case "text":
				default:
					t.Errorf("%s:%d: a block marked %q; mark it sh, text or yaml", page, b.line, b.info)
				}
			}
			if len(session) == 0 {
				t.Fatalf("%s has no commands", page)
			}
			runSession(t, page, session)
		})
	}
}

// runSession runs the blocks in one shell and compares what each printed.
func runSession(t *testing.T, page string, blocks []*fence) {
	t.Helper()
	for _, tool := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(tool); err != nil {
			if os.Getenv("CI") == "true" {
				t.Fatalf("the documentation's commands need %s", tool)
			}
			t.Skipf("the documentation's commands need %s", tool)
		}
	}
	ports := portMap{t: t, free: map[string]string{}}
	var script strings.Builder
	script.WriteString("set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || :; wait' EXIT\n")
	for i, b := range blocks {
		fmt.Fprintf(&script, "%s\nprintf '\\036%d\\n'\n", ports.replace(b.text), i)
	}

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", script.String())
	cmd.Dir = t.TempDir()
	cmd.Env = cleanEnv(
		"PATH="+filepath.Dir(headgate(t))+":"+os.Getenv("PATH"),
		"HEADGATE_LISTEN="+ports.replace("127.0.0.1:8080"), "HEADGATE_ADMIN_LISTEN="+ports.replace("127.0.0.1:8081"),
		"HEADGATE_CLUSTER_LISTEN="+ports.replace("127.0.0.1:7946"), "HEADGATE_ADMIN="+ports.replace("http://127.0.0.1:8081"),
	)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	err := cmd.Run()

	printed := strings.Split(ports.restore(out.String()), "\x1e")
	for i, b := range blocks {
		if i == len(printed)-1 {
			t.Fatalf("%s:%d: the block failed (%v):\n%s\nit printed:\n%s", page, b.line, err, b.text, tail(printed[i], 4000))
		}
		got := printed[i]
		if i > 0 {
			_, got, _ = strings.Cut(got, "\n") // what is left of the marker
		}
		if b.output != nil && !likePattern(b.output.text).MatchString(spaced(got)) {
			t.Errorf("%s:%d: want\n%s\ngot\n%s", page, b.output.line, b.output.text, got)
		}
	}
	if err != nil {
		t.Errorf("%s: the session ended with %v", page, err)
	}
}

// portMap replaces the documented ports by free ones, and back.
type portMap struct {
	t    *testing.T
	free map[string]string
}

// documentedPort is one of the front door's, of the admin API's or of a model server's, or
// with 7 the first of three that a cluster uses.
var documentedPort = regexp.MustCompile(`127\.0\.0\.1:[78]\d\d\d\b`)

func (m portMap) replace(s string) string {
	return documentedPort.ReplaceAllStringFunc(s, func(addr string) string {
		if m.free[addr] == "" {
			n := 1
			if strings.HasPrefix(addr, "127.0.0.1:7") {
				n = 3
			}
			m.free[addr] = freePorts(m.t, n)
		}
		return m.free[addr]
	})
}

func (m portMap) restore(s string) string {
	for documented, free := range m.free {
		s = strings.ReplaceAll(s, free, documented)
	}
	return s
}

var gap = regexp.MustCompile(`[ \t]+`)

// spaced makes every gap one space wide and ends lines and text in the same way.
func spaced(s string) string {
	var b strings.Builder
	for line := range strings.Lines(strings.ReplaceAll(s, "\r", "")) {
		b.WriteString(strings.TrimSpace(gap.ReplaceAllString(line, " ")) + "\n")
	}
	return strings.TrimSpace(b.String()) + "\n"
}

// likePattern is what text stands for.
func likePattern(text string) *regexp.Regexp {
	var b strings.Builder
	for line := range strings.Lines(spaced(text)) {
		if line == "…\n" {
			b.WriteString(`(?:.*\n)*?`)
			continue
		}
		b.WriteString(strings.ReplaceAll(regexp.QuoteMeta(line), "…", `.*`))
	}
	return regexp.MustCompile(`\A` + b.String() + `\z`)
}

// TestDocsAreComplete: what can be set, seen or met has its place in the documentation.
func TestDocsAreComplete(t *testing.T) {
	t.Parallel()
	read := func(path string) string {
		t.Helper()
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	found := func(pattern string, files ...string) (names []string) {
		t.Helper()
		for _, f := range files {
			for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(read(f), -1) {
				names = append(names, m[1])
			}
		}
		if len(names) == 0 {
			t.Fatalf("nothing matches %s in %v", pattern, files)
		}
		slices.Sort(names)
		return slices.Compact(names)
	}
	var all, links string
	for _, p := range pages(t) {
		all += read(p)
	}
	links = read(readme)
	operate, limits := read("docs/operate.md"), read("docs/limits.md")
	for what, c := range map[string]struct {
		names []string
		in    string
	}{
		"field of the configuration": {yamlFields(reflect.TypeFor[hgnode.Config]()), operate},
		"field of the policy":        {yamlFields(reflect.TypeFor[ledger.Policy]()), all},
		"metric":                     {metricNames(t), operate},
		"field of the log":           {found(`slog\.\w+\("(\w+)"`, "../../proxy/record.go"), operate},
		"error code":                 {found(`(?:newError\([\w.]+, |unauthorized\(|Code = )"(\w+)"`, "../../proxy/errors.go", "../../proxy/serve.go", "../../proxy/admit.go"), limits},
		"route":                      {found(`"(/v?\w[\w/]+)"[,)]`, "../../proxy/routes.go"), read("docs/upstreams.md")},
	} {
		for _, name := range c.names {
			if !regexp.MustCompile(`\b` + regexp.QuoteMeta(strings.Trim(name, "/")) + `\b`).MatchString(c.in) {
				t.Errorf("%s %s is not documented", what, name)
			}
		}
	}
	for _, page := range pages(t) {
		if name := "cmd/headgate/" + page; page != readme && !strings.Contains(links, "("+name+")") {
			t.Errorf("the README does not lead to %s", name)
		}
	}
}

// metricNames are those of a node that has answered a request.
func metricNames(t *testing.T) (names []string) {
	t.Helper()
	policy := strings.Replace(cliPolicy(startFake(t), 100, ""), "backends: [{name: b, ", "backends: [{name: b, slots: 4, learn: {}, ", 1)
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", policy))
	n.spend()
	n.await("the queue to have a backend", func() bool { return strings.Contains(get(t, n.admin+"/metrics"), "headgate_desired_replicas{") })
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (headgate_\w+) `).FindAllStringSubmatch(get(t, n.admin+"/metrics"), -1) {
		names = append(names, m[1])
	}
	if len(names) < 10 {
		t.Fatalf("only %v", names)
	}
	return names
}

func get(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// yamlFields are the names of a struct's fields in files, and of those below it.
func yamlFields(t reflect.Type) (names []string) {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice:
		return yamlFields(t.Elem())
	case reflect.Struct:
	default:
		return nil
	}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if name != "" && name != "-" {
			names = append(append(names, name), yamlFields(f.Type)...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// TestDeploy: the files that people start from are right.
func TestDeploy(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("deploy/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	p, err := ledger.ParsePolicy(text)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Index(time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC), 1, ledger.Share{}, nil); err != nil {
		t.Error(err)
	}
	if warnings := p.Warnings(); len(warnings) > 0 {
		t.Errorf("whoever applies it is warned: %q", warnings)
	}
	learnt := slices.ContainsFunc(p.Backends, func(b ledger.Backend) bool { return b.Learn != nil })
	if !learnt || p.Capacity == (ledger.Capacity{}) || len(p.Ladder) < 3 || len(p.Routes) < 2 {
		t.Error("it does not show what the fleet does when it is full")
	}
	cfg := hgnode.Defaults()
	if err := cfg.ReadConfig("deploy/headgate.yaml"); err != nil {
		t.Fatal(err)
	}
	cfg.AdminToken = "from the environment"
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	unit, err := os.ReadFile("deploy/headgate.service")
	if err != nil {
		t.Fatal(err)
	}
	start := regexp.MustCompile(`(?m)^ExecStart=\S+/headgate (.*)$`).FindStringSubmatch(string(unit))
	if start == nil {
		t.Fatal("the unit does not start headgate")
	}
	// Only its files are missing here.
	if r := runCLI(t, nil, strings.Fields(start[1])...); r.code != 2 || !strings.Contains(r.stderr, "read the configuration") {
		t.Errorf("%+v", r)
	}
}

// TestScrape: the page shows what Prometheus needs as it is in the file.
func TestScrape(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("docs/operate.md")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("deploy/prometheus.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, part, ok := strings.Cut(string(text), "\nscrape_configs:")
	if !ok || !strings.Contains(string(page), "```text\nscrape_configs:"+part+"```") {
		t.Error("the page does not show the file")
	}
	var m map[string]any
	if err := yaml.Unmarshal(text, &m); err != nil {
		t.Error(err)
	}
}

// TestAutoscalers: what scales the fleet asks for metrics that there are, and stands in the page as in the files.
func TestAutoscalers(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("docs/capacity.md")
	if err != nil {
		t.Fatal(err)
	}
	known := metricNames(t)
	for _, name := range []string{"keda.yaml", "hpa.yaml"} {
		text, err := os.ReadFile("deploy/" + name)
		if err != nil {
			t.Fatal(err)
		}
		_, manifest, ok := strings.Cut(string(text), "\napiVersion")
		if !ok || !strings.Contains(string(page), "```text\napiVersion"+manifest+"```") {
			t.Errorf("the page does not show %s", name)
		}
		for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
			var m struct{ Kind string }
			if err := d.Decode(&m); errors.Is(err, io.EOF) {
				break
			} else if err != nil || m.Kind == "" {
				t.Fatalf("%s: %v, kind %q", name, err, m.Kind)
			}
		}
		asked := regexp.MustCompile(`headgate_\w+`).FindAllString(string(text), -1)
		if len(asked) == 0 {
			t.Errorf("%s asks for nothing", name)
		}
		for _, metric := range asked {
			if !slices.Contains(known, metric) {
				t.Errorf("%s asks for %s, which no node has", name, metric)
			}
		}
	}
	// Those with a label for why are there once something was refused.
	for _, metric := range regexp.MustCompile(`headgate_\w+\b(\{reason|\{attempt)?`).FindAllString(string(page), -1) {
		if !strings.Contains(metric, "{") && !slices.Contains(known, metric) {
			t.Errorf("the page has %s, which no node has", metric)
		}
	}
}
