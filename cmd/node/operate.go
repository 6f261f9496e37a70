package node

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"headgate/cluster/ledger"
	"headgate/limiter"
	"headgate/proxy/admin"
	"headgate/proxy/contentlog"
)

// adminConfig is what the admin API may see and do.
func (n *Node) adminConfig() admin.Config {
	return admin.Config{
		Token: n.cfg.AdminToken, Gatherer: n.registry, Ready: n.ready, Status: n.status, Apply: n.Apply,
		Policy:  func() []byte { n.mu.Lock(); defer n.mu.Unlock(); return n.text },
		Keys:    n.keys,
		Tenants: n.tenants,
		Levels:  n.Levels,
		Explain: n.explain,
		ExportContent: func(w io.Writer, f admin.ContentFilter) error {
			_, err := n.content.Export(w, contentlog.Filter(f))
			return err
		},
		EraseContent: func(f admin.ContentFilter) (int, error) { return n.content.Erase(contentlog.Filter(f)) },
	}
}

// ready says why the node should get no traffic.
func (n *Node) ready() error {
	switch {
	case n.draining.Load():
		return errors.New("draining")
	case n.pool.Up() == 0:
		return errors.New("no backend is up")
	}
	return nil
}

func (n *Node) current() (*ledger.Index, string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.index, n.source
}

func (n *Node) status() admin.Status {
	ix, source := n.current()
	s := admin.Status{
		Node: n.cfg.NodeID, Version: n.cfg.Version, UptimeSeconds: int64(time.Since(n.started).Seconds()), Ready: true,
		Listen: n.Addr(), ClusterListen: n.cfg.ClusterListen, PolicyRevision: ix.Revision, PolicySource: source,
		Tenants: len(ix.Policy.Tenants), Keys: len(ix.Policy.Keys), Models: []string{}, Buckets: n.limits.Len(), Backends: []admin.Backend{},
	}
	if err := n.ready(); err != nil {
		s.Ready, s.NotReady = false, err.Error()
	}
	for _, m := range ix.Policy.Models {
		s.Models = append(s.Models, m.Name)
	}
	for _, b := range n.pool.Status() {
		s.Backends = append(s.Backends, admin.Backend{
			Name: b.Name, Endpoint: b.Endpoint, URL: b.URL, State: b.State.String(), Draining: b.Draining, InFlight: b.InFlight, Slots: b.Slots, LastError: b.LastError,
		})
	}
	return s
}

func (n *Node) keys() []admin.Key {
	ix, _ := n.current()
	suspended := map[string]bool{}
	for _, t := range ix.Policy.Tenants {
		suspended[t.Name] = t.Suspended
	}
	keys := append(append([]ledger.Key{}, ix.Policy.Keys...), n.devKeys(ix.Policy)...)
	out := make([]admin.Key, 0, len(keys))
	for _, k := range keys {
		a := admin.Key{ID: k.ID, Tenant: k.Tenant, Name: k.Name, Status: "active"}
		if e := time.Time(k.Expires); !e.IsZero() {
			a.Expires = e.Format(time.RFC3339)
			if !time.Now().Before(e) {
				a.Status = "expired"
			}
		}
		if suspended[k.Tenant] {
			a.Status = "suspended"
		}
		if k.Revoked {
			a.Status = "revoked"
		}
		if used := n.compiler.used(k.ID).Load(); used > 0 {
			a.LastUsed = time.Unix(used, 0).UTC().Format(time.RFC3339)
		}
		out = append(out, a)
	}
	return out
}

func (n *Node) tenants() []admin.Tenant {
	ix, _ := n.current()
	keys := map[string]int{}
	for _, k := range ix.Policy.Keys {
		keys[k.Tenant]++
	}
	out := make([]admin.Tenant, 0, len(ix.Policy.Tenants))
	for _, t := range ix.Policy.Tenants {
		out = append(out, admin.Tenant{Name: t.Name, Plan: t.Plan, Keys: keys[t.Name], Suspended: t.Suspended})
	}
	return out
}

// Levels are a tenant's buckets under the policy in force; nil for a tenant that does not
// exist. A bucket takes a changed limit over when it is used next: it is shown as it will
// be then.
func (n *Node) Levels(tenant string) []admin.Level {
	ix, _ := n.current()
	if !slices.ContainsFunc(ix.Policy.Tenants, func(t ledger.Tenant) bool { return t.Name == tenant }) {
		return nil
	}
	limits := n.limitsOf(ix, tenant)
	now := n.proxy.Now()
	out := []admin.Level{}
	for _, l := range n.limits.Levels(now, tenant) {
		rule, ok := limits[l.Key.Limit]
		if !ok {
			continue // its plan has it no more
		}
		var d [1]limiter.Decision
		n.limits.Peek(now, []limiter.Charge{{Key: l.Key, Limit: rule.Spec}}, d[:])
		a := admin.Level{
			Limit: rule.Name, Scope: rule.Scope, Unit: rule.Unit, Subject: l.Key.Subject,
			Level: d[0].Remaining, Capacity: rule.Spec.Capacity(), ResetMS: d[0].Reset.Milliseconds(),
		}
		if d[0].Reset == limiter.Never {
			a.ResetMS = -1
		}
		out = append(out, a)
	}
	return out
}

// limitsOf are the limits that a tenant's keys resolve to, by the names of their buckets.
func (n *Node) limitsOf(ix *ledger.Index, tenant string) map[string]ledger.ResolvedLimit {
	limits := map[string]ledger.ResolvedLimit{}
	for _, k := range append(append([]ledger.Key{}, ix.Policy.Keys...), n.devKeys(ix.Policy)...) {
		if k.Tenant != tenant {
			continue
		}
		if hash, err := ledger.ParseHash(k.Hash); err == nil { // it was indexed by it
			if c, ok := ix.Lookup(hash); ok {
				for _, l := range c.Limits {
					limits[l.Bucket] = l
				}
				break // all keys of a tenant share them
			}
		}
	}
	return limits
}

func (n *Node) explain(q admin.ExplainRequest) (any, error) {
	ix, _ := n.current()
	for _, k := range append(append([]ledger.Key{}, ix.Policy.Keys...), n.devKeys(ix.Policy)...) {
		if q.Tenant != "" && k.Tenant != q.Tenant || q.Key != "" && k.ID != q.Key {
			continue
		}
		hash, err := ledger.ParseHash(k.Hash)
		if err != nil {
			return nil, err
		}
		c, ok := n.proxy.Snapshot().Lookup(hash)
		if !ok {
			continue
		}
		user := q.User
		if user == "" {
			user = c.User
		}
		return n.proxy.Explain(c, q.Model, user, q.Input, q.Output)
	}
	return nil, fmt.Errorf("no key %q of tenant %q", q.Key, q.Tenant)
}

// Models are the policy's, in its order.
func (n *Node) Models() []string {
	ix, _ := n.current()
	names := make([]string, 0, len(ix.Policy.Models))
	for _, m := range ix.Policy.Models {
		names = append(names, m.Name)
	}
	return names
}
