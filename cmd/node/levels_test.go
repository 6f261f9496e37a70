package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/cluster"
	"headgate/limiter"
)

const levelsPolicy = `version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b]}]
plans:
  - name: p
    limits:
      - {name: minute, scope: org, unit: requests, rate: %s}
      - {name: day, scope: org, unit: requests, rate: 10/day}
tenants: [{name: dev, plan: p}]
`

// request asks for a completion, again while no backend is up yet, and returns the status.
func request(t *testing.T, n *Node) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+n.Addr()+"/v1/chat/completions", strings.NewReader(`{"model": "m", "messages": []}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer node-test-key-0123")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable {
			return resp.StatusCode
		}
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// left is what a limit of the tenant has.
func left(t *testing.T, n *Node, name string) int64 {
	t.Helper()
	c, ok := n.current().index.Tenant("dev")
	if !ok {
		t.Fatal("no tenant dev")
	}
	for _, l := range c.Limits {
		if l.Name == name {
			ds := make([]limiter.Decision, 1)
			n.limits.Peek(t.Context(), []limiter.Charge{{Key: limiter.Key{Tenant: "dev", Limit: l.Bucket}, Limit: l.Whole}}, ds)
			return ds[0].Remaining
		}
	}
	t.Fatalf("no limit %s", name)
	return 0
}

// lives runs a node once for each life, in one data folder; between two lives comes nothing
// but what between does to the folder.
func lives(t *testing.T, policy string, between func(t *testing.T, levels string), each ...func(t *testing.T, n *Node)) {
	t.Helper()
	data, upstream := t.TempDir(), upstreamServer(t)
	path := filepath.Join(data, levelsFile)
	for i, life := range each {
		t.Run(fmt.Sprint("life ", i+1), func(t *testing.T) {
			n := start(t, func(c *Config) {
				c.DataDir, c.NodeID, c.Policy = data, "n1", policyFile(t, fmt.Sprintf(levelsPolicy, upstream, policy))
			})
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is there while the node decides: %v", levelsFile, err)
			}
			life(t, n)
		})
		if _, err := os.Stat(path); err != nil {
			t.Fatalf("after life %d: %v", i+1, err)
		}
		between(t, path)
	}
}

func spendTen(t *testing.T, n *Node) {
	t.Helper()
	for i := range 10 {
		if status := request(t, n); status != http.StatusOK {
			t.Fatalf("request %d of 10: status %d", i+1, status)
		}
	}
}

func refused(t *testing.T, n *Node) {
	t.Helper()
	if status := request(t, n); status != http.StatusTooManyRequests {
		t.Errorf("status %d", status)
	}
}

// Ten of ten spent, stopped and started, twice: the eleventh is refused.
func TestLevelsOutliveAStop(t *testing.T) {
	t.Parallel()
	lives(t, "10/min", func(*testing.T, string) {}, spendTen, refused, refused)
}

// A crash saves nothing: what fills within a minute starts empty, so that no crash admits more. A
// day's limit would be gone for a day: it is drawn from the ledger, which remembers. So it is with levels
// that can't be read. Nothing is spent before, so that only the empty start can refuse.
func TestLostLevelsStartEmpty(t *testing.T) {
	t.Parallel()
	full := func(t *testing.T, n *Node) {
		t.Helper()
		if minute := left(t, n, "minute"); minute != 1 {
			t.Errorf("%d left at the first start", minute)
		}
	}
	empty := func(t *testing.T, n *Node) {
		t.Helper()
		refused(t, n)
		if minute := left(t, n, "minute"); minute != 0 {
			t.Errorf("%d left", minute)
		}
	}
	t.Run("crash", func(t *testing.T) {
		lives(t, "1/min", func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}, full, empty)
	})
	t.Run("damage", func(t *testing.T) {
		lives(t, "1/min", func(t *testing.T, path string) {
			if err := os.Truncate(path, 150); err != nil {
				t.Fatal(err)
			}
		}, full, empty)
	})
}

// unjoined is a node without a cluster.
func unjoined(t *testing.T, dir string, log io.Writer) *Node {
	t.Helper()
	n := &Node{cfg: Defaults(), log: slog.New(slog.NewTextHandler(log, nil)), registry: prometheus.NewRegistry(), self: cluster.NewIncarnation(), time: cluster.NewClock()}
	n.cfg.DataDir, n.cfg.NodeID = dir, "n1"
	if err := n.build(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.discard(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return n
}

// A node that had no view leaves what an earlier one saved as it is.
func TestIdleNodeSavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, levelsFile)
	if err := os.WriteFile(path, []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unjoined(t, dir, io.Discard).saveLevels(); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "before" {
		t.Errorf("it wrote %q: %v", text, err)
	}
}

// What can't be used is moved aside, and what can't be written says so and leaves no part.
func TestUnusableLevels(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, levelsFile)
	// A folder of the other name is in the way: the levels are not used, lest they are twice.
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.MkdirAll(filepath.Join(path+usedSuffix, "x"), 0o700)); err != nil {
		t.Fatal(err)
	}
	var stuck strings.Builder
	t.Run("they stay", func(t *testing.T) {
		if unjoined(t, dir, &stuck).loadLevels(); !strings.Contains(stuck.String(), "can't be taken away") {
			t.Errorf("levels that stay: %s", stuck.String())
		}
	})
	if err := os.RemoveAll(path + usedSuffix); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"nothing": "", "no JSON": "levels\n", "no end": "{}", "no levels": "{}\n", "a long first line": strings.Repeat("x", 10_000) + "\n",
		"another version": "{}\nheadgate levels 9\n.............",
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			var log strings.Builder
			n := unjoined(t, dir, &log)
			if n.loadLevels(); !strings.Contains(log.String(), "can't be used") || n.limits.Len() != 0 {
				t.Errorf("%s: log %s", name, log.String())
			}
			moved, err := os.ReadFile(path + usedSuffix)
			if _, gone := os.Stat(path); err != nil || string(moved) != text || !errors.Is(gone, fs.ErrNotExist) {
				t.Errorf("%s: moved %q: %v, %v", name, moved, err, gone)
			}
		})
	}

	full := errors.New("no space left")
	if err := os.WriteFile(path, []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	err := writeWhole(path, func(w io.Writer) error {
		_, err := io.WriteString(w, "half of")
		return errors.Join(err, full)
	})
	text, readErr := os.ReadFile(path)
	if _, part := os.Stat(path + ".part"); !errors.Is(err, full) || readErr != nil || string(text) != "before" || !errors.Is(part, fs.ErrNotExist) {
		t.Errorf("%v; the file is %q; its part: %v", err, text, part)
	}
}
