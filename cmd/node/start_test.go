package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"headgate/cluster/ledger"
	"headgate/cluster/pki"
)

// TestNewRefusesWhatCannotBeUsed as a mistake of the operator's, before anything listens.
func TestNewRefusesWhatCannotBeUsed(t *testing.T) {
	const tlsPolicy = `version: 1
backends: [{name: b, url: "https://127.0.0.1:1", ca_file: /none/ca.pem}]
models: [{name: m, backends: [b]}]
plans: [{name: p}]
tenants: [{name: dev, plan: p}]
`
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"a policy with a file that is not there": {func(c *Config) { c.Policy = policyFile(t, tlsPolicy) }, "line 2: backends[b].ca_file: stat /none/ca.pem: "},
		"a policy with a key that is not there": {func(c *Config) {
			c.Policy = policyFile(t, strings.Replace(tlsPolicy, "backends: [", "backends:\n  [{name: a, url: 'http://127.0.0.1:1'},\n  {name: bought, url: 'https://127.0.0.1:1', kind: openai, api_key_file: /none/key}, ", 1))
		}, "line 4: backends[bought].api_key_file: open /none/key: no such file or directory; every node needs it\nline 4: backends[b].ca_file: stat /none/ca.pem: "},
		"a policy that is none":                    {func(c *Config) { c.Policy = policyFile(t, "version: 2") }, "version"},
		"a founder alone that joins":               {func(c *Config) { c.Join, c.BootstrapExpect = []string{"127.0.0.1:1"}, 1 }, "bootstrap-expect"},
		"a name that is none":                      {func(c *Config) { c.NodeID = "a b" }, "--node-id"},
		"a cluster without a name":                 {func(c *Config) { c.ClusterName = "" }, "--cluster-name"},
		"an address to be reached at that none is": {func(c *Config) { c.ClusterAdvertise = "here" }, "--cluster-advertise"},
		"ports beyond the last":                    {func(c *Config) { c.ClusterListen = "127.0.0.1:65534" }, "--cluster-listen"},
		"a drain that ends before it begins":       {func(c *Config) { c.DrainTimeout = -1 }, "drain-timeout"},
		"fewer than no founders":                   {func(c *Config) { c.BootstrapExpect = -1 }, "bootstrap-expect"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Defaults()
			cfg.Listen, cfg.AdminListen, cfg.ClusterListen, cfg.DataDir = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", t.TempDir()
			cfg.Dev, cfg.DevKey, cfg.AdminToken = true, "node-test-key-0123", "node-test-token"
			c.change(&cfg)
			n, err := New(t.Context(), cfg)
			if _, mistake := errors.AsType[*ConfigError](err); !mistake || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want a ConfigError with %s", err, c.want)
			}
			if err == nil {
				_ = errors.Join(n.cluster.Close(t.Context()), n.discard(t.Context()))
			}
			if err := cfg.Validate(); (err != nil) != (cfg.Policy == "") {
				t.Errorf("Validate: %v", err)
			}
		})
	}
}

// TestAPolicyThatCannotBeUsed leaves the one before in force, is tried again, and is forgotten where the
// cluster goes back to what is in force here.
func TestAPolicyThatCannotBeUsed(t *testing.T) {
	authority := filepath.Join(t.TempDir(), "pki")
	if _, err := pki.Init(authority, pki.Options{ClusterName: "west", Nodes: []pki.NodeCert{{Name: "gw-1"}}}); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(t.TempDir(), "ca.pem")
	text := fmt.Sprintf(governPolicy, "https://127.0.0.1:1")
	first := &ledger.Facts{Policy: &ledger.PolicyRevision{Revision: 1, Text: []byte(text)}}
	second := &ledger.Facts{Policy: &ledger.PolicyRevision{Revision: 2, Text: []byte(strings.Replace(text, `1"}`, `1", ca_file: `+missing+`}`, 1))}}
	n, _ := unclustered(t, first)
	now := time.Now()
	check := func(f *ledger.Facts, now time.Time, inForce uint64, problem bool) (next time.Time) {
		t.Helper()
		next = n.compile(f, now)
		if s := n.current(); s.policy.Revision != inForce || (s.problem != nil) != problem {
			t.Errorf("revision %d is in force, problem %v; want %d, %v", s.policy.Revision, s.problem, inForce, problem)
		}
		return next
	}
	check(second, now, 1, true)
	check(first, now, 1, false)
	next := check(second, now, 1, true)
	if next.IsZero() || next.Sub(now) > time.Minute {
		t.Errorf("it is tried again at %v, now is %v", next, now)
	}
	pem, err := os.ReadFile(filepath.Join(authority, "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(missing, pem, 0o600); err != nil {
		t.Fatal(err)
	}
	check(second, next, 2, false)
}

// TestAnEndingNodeTakesNoLevelsAway: it would not save them again.
func TestAnEndingNodeTakesNoLevelsAway(t *testing.T) {
	n, truth := unclustered(t, &ledger.Facts{})
	path := filepath.Join(n.cfg.DataDir, levelsFile)
	if err := os.WriteFile(path, []byte("of the process before"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := n.saveLevels(); err != nil {
		t.Fatal(err)
	}
	truth.facts.Store(&ledger.Facts{Policy: &ledger.PolicyRevision{Revision: 1, Text: fmt.Appendf(nil, governPolicy, "http://127.0.0.1:1")}})
	n.compile(truth.Facts(), time.Now())
	if text, err := os.ReadFile(path); err != nil || string(text) != "of the process before" {
		t.Errorf("%q, %v", text, err)
	}
}
