package node

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"headgate/cluster"
)

// TestDecisionLog: what a request takes of each limit is written with a reading of the machine's clock,
// and so is what it gives back or owes in the end.
func TestDecisionLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "decisions")
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"object": "chat.completion", "model": "m", "choices": [], "data": [{"id": "m"}], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}`)
	}))
	defer model.Close()
	n := start(t, func(c *Config) {
		c.DecisionLog = path
		c.Policy = policyFile(t, fmt.Sprintf(`version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b], default_output_tokens: 1000}]
plans:
  - name: p
    limits:
      - {name: requests, scope: org, unit: requests, rate: 1000/min}
      - {name: minute, scope: org, unit: requests, algorithm: fixed_window, rate: 1000/min}
      - {name: day, scope: org, unit: requests, rate: 6400/day}
      - {name: tokens, scope: org, unit: tokens, rate: 100000/min}
tenants: [{name: dev, plan: p}]
`, model.URL))
	})
	before := cluster.Now()
	if status := request(t, n); status != http.StatusOK {
		t.Fatalf("status %d", status)
	}
	after := cluster.Now()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	units := map[string]int64{}
	for line := range strings.Lines(string(text)) {
		f := strings.Split(strings.TrimSpace(line), ",")
		if len(f) != 6 || f[1] != "dev" {
			t.Fatalf("a line says %q", line)
		}
		at, err := strconv.ParseInt(f[0], 10, 64)
		amount, err2 := strconv.ParseInt(f[4], 10, 64)
		const millisecond = 1_000_000 // within which the clock is read without a system call
		if err != nil || err2 != nil || at < before-2*millisecond || at > after+2*millisecond {
			t.Errorf("%q is not of between %d and %d", line, before, after)
		}
		units[f[2]] += amount
		if (f[5] == "settle") != (f[2] == "tokens" && units["tokens"] != amount) {
			t.Errorf("%q: by whom?", line)
		}
	}
	for _, name := range []string{"requests", "minute", "day"} {
		if units[name] != 1 {
			t.Errorf("%d %s", units[name], name)
		}
	}
	if units["tokens"] != 7 {
		t.Errorf("%d tokens, of more than 1000 that were reserved", units["tokens"])
	}
	if _, err := New(t.Context(), Config{DecisionLog: t.TempDir()}); err == nil {
		t.Error("a folder is no decision log")
	}
}
