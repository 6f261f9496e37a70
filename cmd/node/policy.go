package node

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"headgate/cluster/ledger"
	"headgate/proxy/admin"
)

// savedPolicy is the file in the data folder that holds the policy last applied.
const savedPolicy = "policy.yaml"

// loadPolicy finds the policy that a starting node works with.
func (n *Node) loadPolicy(ctx context.Context) (text []byte, source string, err error) {
	saved := filepath.Join(n.cfg.DataDir, savedPolicy)
	switch {
	case n.cfg.Policy != "":
		text, err = os.ReadFile(n.cfg.Policy)
		if err != nil {
			return nil, "", fmt.Errorf("read the policy: %w", err)
		}
		if applied, err := os.ReadFile(saved); err == nil && !bytes.Equal(applied, text) {
			n.log.Warn("the policy file replaces the one applied last", "policy", n.cfg.Policy, "applied", saved)
		}
		return text, n.cfg.Policy, nil
	case n.cfg.Upstream != "":
		text, err = devPolicy(ctx, n.cfg.Upstream)
		return text, "dev", err
	}
	text, err = os.ReadFile(saved)
	if errors.Is(err, os.ErrNotExist) {
		return nil, "", errors.New("no policy: name a file with --policy, or try it with --dev --upstream URL")
	}
	return text, saved, err
}

// devPolicy makes a generous policy for one tenant before one upstream, whose models it asks.
func devPolicy(ctx context.Context, url string) ([]byte, error) {
	models, err := discover(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("ask %s for its models: %w; start it first, or write a policy", url, err)
	}
	p := ledger.Policy{
		Version:  1,
		Backends: []ledger.Backend{{Name: "upstream", URL: url}},
		Plans: []ledger.Plan{{Name: "dev", Limits: []ledger.Limit{
			{Name: "org-tokens", Scope: "org", Unit: "tokens", Rate: "1000000/min"},
			{Name: "org-requests", Scope: "org", Unit: "requests", Rate: "6000/min"},
			{Name: "key-inflight", Scope: "key", Unit: "concurrency", Max: 256},
		}}},
		Tenants: []ledger.Tenant{{Name: "dev", Plan: "dev"}},
	}
	for _, m := range models {
		p.Models = append(p.Models, ledger.Model{Name: m, Backends: []string{"upstream"}})
	}
	return yaml.Marshal(p)
}

// discover asks an upstream for its models, some seconds long: it may be starting.
func discover(ctx context.Context, url string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for {
		names, err := listModels(ctx, url)
		if err == nil {
			return names, nil
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(250 * time.Millisecond):
		}
	}
}

func listModels(ctx context.Context, url string) ([]string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(url, "/")+"/v1/models", nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	var list struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&list); err != nil || resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET /v1/models: status %d: %w", resp.StatusCode, err)
	}
	var names []string
	for _, m := range list.Data {
		names = append(names, m.ID)
	}
	if len(names) == 0 {
		return nil, errors.New("it serves no model")
	}
	return names, nil
}

// Apply takes a policy over at once. A wrong one changes nothing. With dry it only says
// what would change.
func (n *Node) Apply(text []byte, dry bool) (admin.Applied, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	applied, err := n.apply(text, "applied", dry)
	if err != nil || dry {
		return applied, err
	}
	if err := n.save(text); err != nil {
		return applied, fmt.Errorf("the policy is in force, but will not outlive a restart: %w", err)
	}
	return applied, nil
}

// Reload reads the policy file again.
func (n *Node) Reload() error {
	if n.cfg.Policy == "" {
		return errors.New("there is no policy file to read again; use headgate apply")
	}
	text, err := os.ReadFile(n.cfg.Policy)
	if err != nil {
		return fmt.Errorf("read the policy: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	applied, err := n.apply(text, n.cfg.Policy, false)
	if err != nil {
		return err
	}
	n.log.Info("policy read again", "revision", applied.Revision, "changes", len(applied.Changes))
	return nil
}

// apply; n.mu is held.
func (n *Node) apply(text []byte, source string, dry bool) (admin.Applied, error) {
	p, err := ledger.ParsePolicy(text)
	if err != nil {
		return admin.Applied{}, err
	}
	old := &ledger.Policy{}
	if n.index != nil {
		old = n.index.Policy
	}
	applied := admin.Applied{Revision: n.revision + 1, DryRun: dry, Changes: []string{}}
	for _, c := range ledger.Diff(old, p) {
		applied.Changes = append(applied.Changes, c.String())
	}
	keys, err := ledger.KeysOf(p.Keys...)
	if err != nil {
		return applied, err
	}
	ix, err := p.Index(time.Now(), applied.Revision, ledger.Share{}, keys, n.devKeys(p)...)
	if err != nil {
		return applied, err
	}
	if dry {
		applied.Revision = n.revision
		return applied, nil
	}
	if err := n.pool.Update(backends(p)); err != nil {
		return applied, err
	}
	if err := n.content.SetPolicies(contentPolicies(p)); err != nil {
		return applied, errors.Join(err, n.pool.Update(backends(old))) // as it was
	}
	n.use(ix)
	n.text, n.source = text, source
	return applied, nil
}

// use makes ix what requests are decided by; n.mu is held.
func (n *Node) use(ix *ledger.Index) {
	n.index, n.revision = ix, ix.Revision
	n.proxy.Apply(n.compiler.snapshot(ix))
	select {
	case n.ramped <- struct{}{}: // the next step may have moved
	default:
	}
}

// devKeys is the development node's own key, with every scope.
func (n *Node) devKeys(p *ledger.Policy) []ledger.Key {
	if !n.cfg.Dev || len(p.Tenants) == 0 {
		return nil
	}
	tenant := p.Tenants[0].Name
	for _, t := range p.Tenants {
		if t.Name == "dev" {
			tenant = "dev"
		}
	}
	return []ledger.Key{{
		ID: "dev", Tenant: tenant, Hash: ledger.FormatHash(ledger.HashKey(n.devKey)), Surfaces: []string{"*"}, AssertUser: true,
	}}
}

// devSecrets makes what the environment did not give, and prints it once.
func (n *Node) devSecrets() error {
	if !n.cfg.Dev {
		return nil
	}
	if n.devKey = n.cfg.DevKey; n.devKey == "" {
		secret, _, err := ledger.NewKey(rand.Reader, false)
		if err != nil {
			return err
		}
		n.devKey = secret
		fmt.Fprintf(n.cfg.Out, "API key (shown once): %s\n", secret)
	}
	if n.cfg.AdminToken == "" {
		n.cfg.AdminToken = rand.Text()
		fmt.Fprintf(n.cfg.Out, "admin token (shown once): %s\n", n.cfg.AdminToken)
	}
	return nil
}

// save keeps the policy for the next start: written whole or not at all.
func (n *Node) save(text []byte) error {
	f, err := os.CreateTemp(n.cfg.DataDir, savedPolicy+".*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // gone already if all went well
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(n.cfg.DataDir, savedPolicy))
	}
	return err
}
