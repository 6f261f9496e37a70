package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"headgate/proxy/admin"
)

// model is the one that is served.
const model = "fake"

// Tenants of the cluster's policy: the one of the development key that the load comes from, one
// whose kill switch is thrown, and more, so that every node owns some.
const (
	loadTenant  = "dev"
	killTenant  = "switched"
	moreTenants = 24
)

// ghost is a tenant that no policy has: a kill switch against it is a change that hurts nobody.
const ghost = "nobody"

// maxInFlight bounds the requests under way, at the generator and everywhere behind.
const maxInFlight = 1024

// maxAnswer bounds the bytes of an answer that is read.
const maxAnswer = 8 << 20

// policyText gives every node all it does for a paying tenant, with limits that nobody reaches.
func policyText(upstream string) string {
	var tenants strings.Builder
	for i := range moreTenants {
		fmt.Fprintf(&tenants, "  - {name: tenant-%02d, plan: bench}\n", i+1)
	}
	return fmt.Sprintf(`version: 1
backends: [{name: up, url: %q, slots: %d}]
models:
  - {name: %s, backends: [up], version: "1", context: 131072, price_per_million: {input: "0.20", cached_input: "0.02", output: "0.60"}, default_output_tokens: 32}
plans:
  - name: bench
    tier: 1
    limits:
      - {name: org-tokens, scope: org, unit: tokens, rate: 6000000000/min, burst: 6000000000}
      - {name: key-requests, scope: key, unit: requests, rate: 6000000/min, burst: 6000000}
      - {name: key-inflight, scope: key, unit: concurrency, max: %d}
tenants:
  - {name: %s, plan: bench}
  - {name: %s, plan: bench}
%s`, upstream, maxInFlight, model, maxInFlight, loadTenant, killTenant, tenants.String())
}

// configText lifts the limits against floods from one address: all requests come from one, and
// refusals are what is waited for.
func configText() string {
	return fmt.Sprintf("prefilter: {requests_per_second: 1000000, request_burst: 1000000, errors_per_minute: 60000000, error_burst: 1000000}\nmax_conns_per_ip: %d\n", 4*maxInFlight)
}

// chat is a short request, no two alike.
func chat(n int64) []byte {
	return fmt.Appendf(nil, `{"model":%q,"max_tokens":4,"messages":[{"role":"user","content":"Are you there? %d"}]}`, model, n)
}

// do sends a request and gives the whole answer.
func (f *fleet) do(ctx context.Context, method, address, bearer string, body []byte) (status int, answer []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, address, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+bearer)
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close() //nolint:errcheck // a read-only body has nothing to lose
	answer, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	return resp.StatusCode, answer, err
}

// ask calls a node's admin API and decodes the answer into out, if that is not nil.
func (f *fleet) ask(ctx context.Context, n *node, method, path string, in, out any) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	status, answer, err := f.do(ctx, method, "http://"+n.admin+"/admin/v1/"+path, f.token, body)
	switch {
	case err != nil:
		return fmt.Errorf("%s of %s: %w", path, n.name, err)
	case status != http.StatusOK:
		return fmt.Errorf("%s of %s: status %d: %.200s", path, n.name, status, answer)
	case out == nil:
		return nil
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fmt.Errorf("%s of %s: %w", path, n.name, err)
	}
	return nil
}

// change makes a change that hurts nobody: it is committed as any other.
func (f *fleet) change(ctx context.Context, n *node) error {
	return f.ask(ctx, n, http.MethodPut, "kill/tenant/"+ghost, map[string]string{"reason": "benchmark"}, nil)
}

func (f *fleet) tenants(ctx context.Context, n *node) (owners map[string]string, err error) {
	var list []admin.Tenant
	if err := f.ask(ctx, n, http.MethodGet, "tenants", nil, &list); err != nil {
		return nil, err
	}
	owners = make(map[string]string, len(list))
	for _, t := range list {
		owners[t.Name] = t.Owner
	}
	return owners, nil
}

// metrics reads the named series of a node, and has the node write no others.
func (f *fleet) metrics(ctx context.Context, n *node, names ...string) (gauges, error) {
	q := url.Values{"name[]": names}
	status, answer, err := f.do(ctx, http.MethodGet, "http://"+n.admin+"/metrics?"+q.Encode(), f.token, nil)
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, fmt.Errorf("metrics of %s: status %d", n.name, status)
	}
	return parseMetrics(bytes.NewReader(answer), names...)
}

// standings reads what is known of several nodes' views.
func (f *fleet) standings(ctx context.Context, nodes []*node) (map[*node]gauges, error) {
	out := make(map[*node]gauges, len(nodes))
	for _, n := range nodes {
		g, err := f.metrics(ctx, n, metricLapses, metricHeld, metricEpoch, metricMembers, metricWaiting)
		if err != nil {
			return nil, err
		}
		out[n] = g
	}
	return out, nil
}

// ready waits until nodes are ready.
func (f *fleet) ready(ctx context.Context, nodes ...*node) error {
	for _, n := range nodes {
		err := poll(ctx, pollEvery, waitBound, func(ctx context.Context) (bool, error) {
			if err := n.ended(); err != nil {
				return true, err
			}
			status, answer, err := f.do(ctx, http.MethodGet, "http://"+n.admin+"/readyz", f.token, nil)
			if err == nil && status != http.StatusOK {
				err = fmt.Errorf("status %d: %.200s", status, answer)
			}
			return err == nil, err
		})
		if err != nil {
			return fmt.Errorf("%s is not ready: %w", n.name, err)
		}
	}
	return nil
}

// whole waits until nothing is left of a kill: every node is ready, alive, a voter, in one view
// with all, holds its lease, waits for nothing and has what the leader has. It gives the leader.
func (f *fleet) whole(ctx context.Context) (leader *node, err error) {
	err = poll(ctx, restEvery, wholeBound, func(ctx context.Context) (bool, error) {
		for _, n := range f.nodes {
			if err := n.ended(); err != nil {
				return true, err
			}
		}
		leader, err = f.wholeNow(ctx)
		return err == nil, err
	})
	if err != nil {
		return nil, fmt.Errorf("the cluster is not whole: %w", err)
	}
	return leader, nil
}

func (f *fleet) wholeNow(ctx context.Context) (*node, error) {
	var list []admin.Member
	if err := f.ask(ctx, f.nodes[0], http.MethodGet, "members", nil, &list); err != nil {
		return nil, err
	}
	leader, err := wholeMembers(list, len(f.nodes))
	if err != nil {
		return nil, err
	}
	standings, err := f.standings(ctx, f.nodes)
	if err != nil {
		return nil, err
	}
	epoch := standings[f.nodes[0]][metricEpoch]
	for n, g := range standings {
		if g[metricEpoch] != epoch || g[metricMembers] != float64(len(f.nodes)) || !g.settled(0) {
			return nil, fmt.Errorf("%s is at epoch %v with %v members, lease %v, %v partitions waiting; %s is at epoch %v",
				n.name, g[metricEpoch], g[metricMembers], g[metricHeld], g[metricWaiting], f.nodes[0].name, epoch)
		}
	}
	n := f.byName(leader)
	if n == nil {
		return nil, fmt.Errorf("%q leads", leader)
	}
	return n, nil
}

// wholeMembers gives the leader's name if the list shows n nodes that lack nothing.
func wholeMembers(list []admin.Member, n int) (leader string, err error) {
	if len(list) != n {
		return "", fmt.Errorf("%d members, want %d", len(list), n)
	}
	newest := slices.MaxFunc(list, func(a, b admin.Member) int { return int(min(a.AppliedIndex, 1<<62)) - int(min(b.AppliedIndex, 1<<62)) }).AppliedIndex
	for _, m := range list {
		switch {
		case m.Error != "":
			return "", fmt.Errorf("%s: %s", m.Name, m.Error)
		case m.Gossip != "alive" || !m.InView || !m.ViewLease:
			return "", fmt.Errorf("%s is %s; in the view: %v; lease: %v", m.Name, m.Gossip, m.InView, m.ViewLease)
		case m.AppliedIndex+behind < newest:
			return "", fmt.Errorf("%s has applied %d of %d", m.Name, m.AppliedIndex, newest)
		case m.Raft == "leader":
			leader = m.Name
		case m.Raft != "voter":
			return "", fmt.Errorf("%s is a %s of raft", m.Name, m.Raft)
		}
	}
	if leader == "" {
		return "", errors.New("nobody leads")
	}
	return leader, nil
}

// behind is how many entries a follower may lack that has caught up.
const behind = 2
