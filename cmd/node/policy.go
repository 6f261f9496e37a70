package node

import (
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
	"headgate/cluster/ledger/ledgerpb"
	"headgate/proxy/admin"
)

// savedPolicy is the file in the data folder in which releases without a ledger kept the policy
// last applied. It seeds an empty ledger where nothing else does.
const savedPolicy = "policy.yaml"

// sourceDev is the policy that a development node makes for its upstream.
const sourceDev = "dev"

// loadSeed finds the policy for an empty ledger.
func (n *Node) loadSeed(ctx context.Context) (err error) {
	n.seedSource = n.cfg.Policy
	switch {
	case n.cfg.Policy != "":
		n.seedText, err = os.ReadFile(n.cfg.Policy)
	case n.cfg.Upstream != "":
		n.seedSource = sourceDev
		n.seedText, err = devPolicy(ctx, n.cfg.Upstream)
	default:
		n.seedSource = filepath.Join(n.cfg.DataDir, savedPolicy)
		n.seedText, err = os.ReadFile(n.seedSource)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("read the policy: %w", err)
	}
	return nil
}

// checkSeed says why this node could not use the seed, before anything starts.
func (n *Node) checkSeed() error {
	if n.seedText == nil {
		return nil
	}
	p, err := ledger.ParsePolicy(n.seedText)
	if err != nil {
		return err
	}
	return n.usable(n.seedText, p)
}

// The prices of a development node's models, by the million tokens: some, so that spending shows.
const (
	devInputPrice  ledger.NanoUSD = 200_000_000
	devOutputPrice ledger.NanoUSD = 600_000_000
)

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
	in, out := devInputPrice, devOutputPrice
	for _, m := range models {
		p.Models = append(p.Models, ledger.Model{Name: m, Backends: []string{"upstream"}, Price: ledger.Price{Input: &in, Output: &out}})
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

// Reload puts the policy file in force again, in the whole cluster.
func (n *Node) Reload(ctx context.Context) error {
	if n.cfg.Policy == "" {
		return errors.New("there is no policy file to read again; use headgate apply")
	}
	text, err := os.ReadFile(n.cfg.Policy)
	if err != nil {
		return fmt.Errorf("read the policy: %w", err)
	}
	applied, err := n.applyPolicy(ctx, n.actor(), admin.PolicyChange{Text: text})
	if err != nil {
		return err
	}
	n.log.Info("policy read again", "revision", applied.Revision, "changes", len(applied.Changes))
	return nil
}

// actor is the node itself.
func (n *Node) actor() admin.Actor {
	return admin.Actor{Name: "node " + n.cfg.NodeID, Role: admin.RoleAdmin}
}

// proposeSeed offers the seed to the ledger, which takes the first that it is offered.
func (n *Node) proposeSeed(ctx context.Context) error {
	plan, err := ledger.Prepare(time.Now(), n.seedText, n.truth.Facts(), n.keyTable(), nil)
	if err != nil {
		return err
	}
	if err := n.usable(n.seedText, plan.Policy); err != nil {
		return err
	}
	plan.Command.Seed = true
	if _, err = n.propose(ctx, n.actor(), &ledgerpb.Command{Body: &ledgerpb.Command_SetPolicy{SetPolicy: plan.Command}}); err != nil {
		return err
	}
	for _, w := range plan.Warnings { // nobody is there to be told by apply
		n.log.Warn("the policy may have a mistake", "policy", n.seedSource, "warning", w)
	}
	return nil
}

// keyTable holds the keys that the cluster knows.
func (n *Node) keyTable() *ledger.Keys { return n.truth.Keys() }

// devKeyID is the id of a development node's own key.
const devKeyID = "dev"

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
		ID: devKeyID, Tenant: tenant, Hash: ledger.FormatHash(ledger.HashKey(n.devKey)), Surfaces: []string{"*"}, AssertUser: true,
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
