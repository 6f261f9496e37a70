package main_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"headgate/cache/calibrate"
	"headgate/cache/embed/embedtest"
	"headgate/cluster/ledger"
)

// calibratePairs are a few that people could have labelled.
const calibratePairs = `a,b,same_answer
How can I reset my password?,How do I reset my password?,1
I forgot my password. What now?,How do I reset my password?,1
Where is my order?,How can I track my order?,1
How do I turn on dark mode?,How do I turn off dark mode?,0
What is the refund window for annual plans?,What is the refund window for monthly plans?,0
Where is my order?,Where can I find my invoices?,0
`

func TestCalibrate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pairs := filepath.Join(dir, "faq.csv")
	if err := os.WriteFile(pairs, []byte(calibratePairs+"one,,1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	page, svg := filepath.Join(dir, "faq.html"), filepath.Join(dir, "faq.svg")
	r := runCLI(t, nil, "cache", "calibrate", pairs, "--out", page, "--svg", svg)
	if r.code != 0 || r.stderr != "" {
		t.Fatalf("exit %d: %s", r.code, r.stderr)
	}
	contains(t, r.stdout, "6 used of 7 records: 3 the same, 3 different", "line 8: b is empty", "mode: shadow", "written to "+page, "written to "+svg)
	for path, want := range map[string]string{page: "From which similarity may an answer be reused?", svg: "<svg xmlns="} {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		contains(t, string(text), want)
	}

	r = runCLI(t, []string{"HEADGATE_BUDGET=50%"}, "cache", "calibrate", pairs, "--confidence", "0.5", "--json")
	var report calibrate.Report
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != 0 {
		t.Fatalf("exit %d, %v: %s", r.code, err, r.stderr)
	}
	if report.Pairs.Used != 6 || report.Budget != 0.5 || report.Confidence != 0.5 || report.Source != "faq.csv" || len(report.Curve) == 0 {
		t.Errorf("%+v", report)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*.html")); err != nil || len(left) != 1 {
		t.Errorf("--json wrote %v, %v", left, err)
	}
}

// A server's model is asked as any is that speaks OpenAI's API.
func TestCalibrateWithAServer(t *testing.T) {
	t.Parallel()
	var key, model atomic.Value
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var q struct {
			Model string
			Input []string
		}
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.URL.Path != "/v1/embeddings" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		key.Store(r.Header.Get("Authorization"))
		model.Store(q.Model)
		type item struct {
			Index     int       `json:"index"`
			Embedding []float32 `json:"embedding"`
		}
		var data []item
		for i, text := range q.Input {
			data = append(data, item{i, embedtest.Vector(text)})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"object": "list", "data": data})
	}))
	defer server.Close()
	pairs := writeFile(t, "faq.csv", calibratePairs)
	r := runCLI(t, []string{"EMBED_KEY=sesame"}, "cache", "calibrate", pairs, "--url", server.URL+"/v1", "--model", "e5-small", "--api-key-env", "EMBED_KEY", "--out", "")
	if r.code != 0 {
		t.Fatalf("exit %d: %s", r.code, r.stderr)
	}
	contains(t, r.stdout, "embedder       e5-small", "embedder: e5-small", "6 used of 6 records")
	if key.Load() != "Bearer sesame" || model.Load() != "e5-small" {
		t.Errorf("asked with %v for %v", key.Load(), model.Load())
	}
	for want, args := range map[string][]string{
		"there is no variable NONE":  {"--url", server.URL, "--model", "e5", "--api-key-env", "NONE"},
		"--url: embed endpoint: url": {"--url", "127.0.0.1", "--model", "e5"},
	} {
		if r := runCLI(t, nil, append([]string{"cache", "calibrate", pairs}, args...)...); r.code != 2 || !strings.Contains(r.stderr, want) {
			t.Errorf("%v: exit %d: %s; want %q", args, r.code, r.stderr, want)
		}
	}
	if r := runCLI(t, nil, "cache", "calibrate", pairs, "--url", server.URL+"/elsewhere", "--model", "e5"); r.code != 1 || !strings.Contains(r.stderr, "refused") {
		t.Errorf("another address: exit %d: %s", r.code, r.stderr)
	}
}

func TestCalibrateRefuses(t *testing.T) {
	t.Parallel()
	good, bad, alike := writeFile(t, "good.csv", calibratePairs), writeFile(t, "bad.csv", "a,b,same_answer\nsay \"x\",y,1\n"), writeFile(t, "alike.csv", "a,b,same_answer\nx,y,1\n")
	for want, args := range map[string][]string{
		"takes one argument": nil,
		"no such file":       {filepath.Join(t.TempDir(), "none.csv")},
		"bad.csv: line 2, column 5: a quote stands within a text": {bad},
		"alike.csv: none of 1 pair is labelled different":         {alike},
		"--embedder \"minilm\": there is builtin":                 {good, "--embedder", "minilm"},
		"needs both --url and --model":                            {good, "--model", "e5"},
		"would write over the pairs":                              {good, "--out", good},
		"name two files":                                          {good, "--out", "x", "--svg", "x"},
		"budget is 2: it is the share of hits that may be wrong":  {good, "--budget", "2"},
		"--budget: \"much\" is no share: write it as 0.02 or 2%":  {good, "--budget", "much"},
		"confidence is 1":                                         {good, "--confidence", "100%"},
	} {
		r := runCLI(t, nil, append([]string{"cache", "calibrate"}, args...)...)
		if r.code != 2 || !strings.Contains(r.stderr, want) {
			t.Errorf("%v: exit %d: %s; want %q", args, r.code, r.stderr, want)
		}
	}
}

// What is recommended can be pasted into a policy.
func TestCalibrationIsPolicy(t *testing.T) {
	var pairs strings.Builder
	pairs.WriteString("a,b,same_answer\n")
	for i := range 400 {
		fmt.Fprintf(&pairs, "Where is parcel %[1]d?,Where is parcel %[1]d now?,1\nHow large is screw %[1]d?,What do cats eat on day %[1]d?,0\n", i)
	}
	r := runCLI(t, nil, "cache", "calibrate", writeFile(t, "pairs.csv", pairs.String()), "--out", "", "--json")
	var report calibrate.Report
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != 0 {
		t.Fatalf("exit %d, %v: %s", r.code, err, r.stderr)
	}
	if report.Recommendation.Outcome != calibrate.Confirmed {
		t.Errorf("%+v", report.Recommendation)
	}
	policy, err := ledger.ParsePolicy([]byte(cliPolicy("http://127.0.0.1:1", 100, report.Policy)))
	if err != nil {
		t.Fatalf("%v:\n%s", err, report.Policy)
	}
	if s := policy.Surfaces[0].Semantic; s.Mode != "static" || s.Threshold == nil || s.Threshold.String() != fmt.Sprint(report.Recommendation.Threshold) {
		t.Errorf("%+v", s)
	}
}
