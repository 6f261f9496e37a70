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

	"headgate/cluster/ledger"
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
			n.limits.Peek(n.proxy.Now(), []limiter.Charge{{Key: limiter.Key{Tenant: "dev", Limit: l.Bucket}, Limit: l.Spec}}, ds)
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
	lives(t, "1000/min", func(*testing.T, string) {}, spendTen, refused, refused)
}

// A crash saves nothing: what fills within a minute starts empty, so that no crash admits more;
// a day's limit would be gone for a day, and starts full. So it is with levels that can't be
// read. Nothing is spent before, so that only the floor can refuse.
func TestLostLevelsStartEmpty(t *testing.T) {
	t.Parallel()
	full := func(t *testing.T, n *Node) {
		t.Helper()
		if minute, day := left(t, n, "minute"), left(t, n, "day"); minute != 1 || day != 10 {
			t.Errorf("%d and %d left at the first start", minute, day)
		}
	}
	empty := func(t *testing.T, n *Node) {
		t.Helper()
		refused(t, n)
		if minute, day := left(t, n, "minute"), left(t, n, "day"); minute != 0 || day != 10 {
			t.Errorf("%d and %d left", minute, day)
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
	n := &Node{cfg: Defaults(), log: slog.New(slog.NewTextHandler(log, nil)), registry: prometheus.NewRegistry()}
	n.cfg.DataDir, n.cfg.NodeID = dir, "n1"
	if err := n.build(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.pool.Close()
		if err := n.content.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return n
}

var hour = &limiter.Limit{Rate: limiter.Rate{Count: 10, Per: time.Hour}, Burst: 10}

func (n *Node) take(cost int64) (remaining int64) {
	ds := make([]limiter.Decision, 1)
	n.limits.Take(n.proxy.Now(), []limiter.Charge{{Key: limiter.Key{Tenant: "dev", Limit: "hour"}, Limit: hour, Cost: cost}}, ds)
	return ds[0].Remaining
}

// Who founds a cluster starts full, who enters one later starts empty where nothing was saved; it
// is done once, and who decided nothing leaves the file alone.
func TestLevelsAreRestoredOnce(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, levelsFile)
	minute := &limiter.Limit{Rate: limiter.Rate{Count: 1, Per: time.Minute}, Burst: 1}
	restored := func(entered uint64, ago int64) (*Node, int64, string) {
		var log strings.Builder
		n := unjoined(t, dir, &log)
		n.now.entered, n.now.enteredAt, n.now.view, n.now.spent = entered, n.proxy.Now()-ago, &ledger.View{Epoch: 7}, ledger.Share{Rank: 1, Of: 3}
		if err := n.restoreLevels(); err != nil {
			t.Fatal(err)
		}
		ds := make([]limiter.Decision, 1)
		n.limits.Peek(n.proxy.Now(), []limiter.Charge{{Key: limiter.Key{Limit: "minute"}, Limit: minute}}, ds)
		return n, ds[0].Remaining, log.String()
	}
	if _, level, log := restored(1, 0); level != 1 || log != "" {
		t.Errorf("a founder has %d: %s", level, log)
	}
	if _, level, _ := restored(4, int64(2*time.Minute)); level != 1 {
		t.Errorf("who entered two minutes before the first policy has %d", level)
	}
	back, level, log := restored(4, 0)
	if level != 0 || !strings.Contains(log, "no saved levels") {
		t.Errorf("who entered has %d: %s", level, log)
	}
	if back.take(4) != 6 {
		t.Error("an hour's limit is not full")
	}
	if err := back.saveLevels(); err != nil {
		t.Fatal(err)
	}
	saved, err := os.ReadFile(path)
	if head := `"epoch":7,"rank":1,"of":3}` + "\n"; err != nil || !strings.Contains(string(saved), head) {
		t.Errorf("saved: %q: %v", saved, err)
	}
	idle := unjoined(t, dir, io.Discard)
	idle.now.entered = 4
	if err := idle.saveLevels(); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != string(saved) {
		t.Errorf("a node that decided nothing wrote: %q: %v", text, err)
	}
	again, level, log := restored(9, 0)
	if files, err := filepath.Glob(path + "*"); err != nil || len(files) > 0 {
		t.Errorf("%v is left: %v", files, err)
	}
	if level != 1 || again.take(0) != 6 || !strings.Contains(log, "buckets=1") || !strings.Contains(log, "saved_epoch=7") {
		t.Errorf("restored %d and %d: %s", level, again.take(0), log)
	}
	// A second time, with a file that came from somewhere: no.
	if err := os.WriteFile(path, saved, 0o600); err != nil {
		t.Fatal(err)
	}
	again.take(1)
	if err := again.restoreLevels(); err != nil || again.take(0) != 5 {
		t.Errorf("%v, %d left", err, again.take(0))
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
	stuck := unjoined(t, dir, io.Discard)
	if err := stuck.restoreLevels(); err == nil || !strings.Contains(err.Error(), "take the saved levels away") || stuck.now.levels {
		t.Errorf("levels that stay: %v", err)
	}
	if err := os.RemoveAll(path + usedSuffix); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"nothing": "", "no JSON": "levels\n", "no end": "{}", "no levels": "{}\n", "a long first line": strings.Repeat("x", 10_000) + "\n",
		"another version": "{}\nheadgate levels 9\n.............",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var log strings.Builder
		n := unjoined(t, dir, &log)
		n.now.entered = 4
		if err := n.restoreLevels(); err != nil || !strings.Contains(log.String(), "can't be used") || !n.now.levels || n.limits.Len() != 0 {
			t.Errorf("%s: %v, log %s", name, err, log.String())
		}
		moved, err := os.ReadFile(path + usedSuffix)
		if _, gone := os.Stat(path); err != nil || string(moved) != text || !errors.Is(gone, fs.ErrNotExist) {
			t.Errorf("%s: moved %q: %v, %v", name, moved, err, gone)
		}
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
