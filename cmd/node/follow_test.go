package node

import (
	"context"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
)

const caPolicy = `version: 1
backends: [{name: b, url: %q, ca_file: %q}]
models: [{name: m, backends: [b]}]
plans: [{name: p, limits: [{name: org-tokens, scope: org, unit: tokens, rate: 6000/min}]}]
tenants: [{name: dev, plan: p}]
`

// TestPolicyThisNodeCannotUse, as a file is missing that another node has: the one before stays in
// force, for whatever private share the node has by then, and readiness says why; once the file is there the policy is
// applied again and in force.
func TestPolicyThisNodeCannotUse(t *testing.T) {
	server := upstreamServer(t)
	var log syncBuffer
	n := start(t, func(c *Config) {
		c.Policy, c.Logger = policyFile(t, fmt.Sprintf(adminPolicy, server)), slog.New(slog.NewTextHandler(&log, nil))
	})
	waitFor(t, "it is ready", func() bool { return n.ready() == nil })
	ca := filepath.Join(t.TempDir(), "ca.pem")
	text := fmt.Sprintf(caPolicy, "https://127.0.0.1:1", ca)
	const bearer = "Bearer node-test-token"
	if status, answer := ask(t, n, "PUT", "/admin/v1/policy", bearer, text); status != http.StatusBadRequest || !strings.Contains(answer, "ca.pem") {
		t.Errorf("applied here: status %d: %s", status, answer)
	}
	// Another node, which has the file, applies it.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := n.cluster.Propose(ctx, setPolicy(t, n, text)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "readiness says why", func() bool {
		status, answer := ask(t, n, "GET", "/readyz", "", "")
		return status == http.StatusServiceUnavailable && strings.Contains(answer, "can't be used here") && strings.Contains(answer, "ca.pem")
	})
	limit := func() ledger.ResolvedLimit {
		s := n.current()
		c, ok := s.index.Tenant("dev")
		if !ok {
			t.Fatal("no tenant")
		}
		return c.Limits[0]
	}
	capacity := func() int64 { return limit().Whole.Capacity() }
	if s := n.current(); s.policy.Revision != 1 || capacity() != 1000 {
		t.Errorf("revision %d is in force, with %d tokens", s.policy.Revision, capacity())
	}
	// The view changes meanwhile: its share does, of the policy that is in force.
	n.mu.Lock()
	n.now.share = &ledger.Share{Of: 4}
	n.mu.Unlock()
	n.notify()
	waitFor(t, "the share changes all the same", func() bool { return limit().Private.Capacity() == 250 && capacity() == 1000 })
	if c := strings.Count(log.String(), "a policy can't be put in force here"); c != 1 {
		t.Errorf("logged %d times", c)
	}
	if err := os.WriteFile(ca, testCA(t), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, answer := ask(t, n, "PUT", "/admin/v1/policy", bearer, text); status != http.StatusOK || strings.Contains(answer, "not in force") {
		t.Errorf("applied again: status %d: %s", status, answer)
	}
	waitFor(t, "it is in force, and the node ready", func() bool { return capacity() == 6000 && n.current().problem == nil })
}

// waitFor polls a condition of a real node.
func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	const most = 20 * time.Second
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); !cond(); {
		if time.Since(begin) > most {
			t.Fatalf("not within %v: %s", most, what)
		}
		<-tick.C
	}
}

// setPolicy is the command by which another node puts a policy in force.
func setPolicy(t *testing.T, n *Node, text string) *ledgerpb.Command {
	t.Helper()
	plan, err := ledger.Prepare(time.Now(), []byte(text), n.truth.Facts(), n.keyTable(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return &ledgerpb.Command{Version: 1, Actor: "another node", Body: &ledgerpb.Command_SetPolicy{SetPolicy: plan.Command}}
}

// testCA is some authority's certificate.
func testCA(t *testing.T) []byte {
	t.Helper()
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}
