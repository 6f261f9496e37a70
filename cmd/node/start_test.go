package node

import (
	"errors"
	"strings"
	"testing"
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
		"a policy with a file that is not there": {func(c *Config) { c.Policy = policyFile(t, tlsPolicy) }, "/none/ca.pem"},
		"a policy that is none":                  {func(c *Config) { c.Policy = policyFile(t, "version: 2") }, "version"},
		"a founder alone that joins":             {func(c *Config) { c.Join, c.BootstrapExpect = []string{"127.0.0.1:1"}, 1 }, "bootstrap-expect"},
		"fewer than no founders":                 {func(c *Config) { c.BootstrapExpect = -1 }, "bootstrap-expect"},
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
