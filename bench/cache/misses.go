package cache

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/proxy/admin"
)

const missTokens = 128

// missSection is how long requests took that were alone, one after the other.
type missSection struct {
	nodes int
	// What nobody has, at a node that does not own its key, and at one that does, each beside the same without the cache.
	others, othersBypassed, own, ownBypassed []time.Duration
	// After that, what the owner has, at a third node, and there once more.
	atOwner, local []time.Duration
}

// misses asks one node of a cluster what nobody has asked, and then others the same.
func misses(ctx context.Context, c *Config, _ *Report) (_ section, err error) {
	f, err := newFleet(c.Dir, "misses")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.stop()) }()
	up, err := f.start(ctx, "upstream", order{Role: "upstream"})
	if err != nil {
		return nil, err
	}
	nodes, err := f.cluster(ctx, c.Nodes, up.url(), "")
	if err != nil {
		return nil, err
	}
	for i := range warming { // connections, here and between the nodes
		for _, n := range nodes {
			if a := f.ask(ctx, http.MethodPost, n.url()+"/v1/chat/completions", question("warm", i, missTokens, false), front("")); a.err != nil {
				return nil, a.err
			}
		}
	}
	s := &missSection{nodes: c.Nodes}
	own, err := f.missPairs(ctx, c, s, nodes)
	if err != nil {
		return nil, err
	}
	for body, owner := range own {
		third := nodes[1]
		if owner == third.name {
			third = nodes[len(nodes)-1]
		}
		for i, to := range [...]*[]time.Duration{&s.atOwner, &s.local} {
			a, err := f.chat(ctx, third, []byte(body), "", "exact")
			if err != nil {
				return nil, fmt.Errorf("time %d: %w", i+1, err)
			}
			*to = append(*to, a.took)
		}
	}
	if len(s.others) == 0 || len(s.own) == 0 || len(s.atOwner) == 0 {
		return nil, fmt.Errorf("too few misses to measure: %d at other nodes, %d at owners; raise -misses", len(s.others), len(s.own))
	}
	return s, nil
}

// missPairs asks the first node so much that nobody has asked, with the cache and without, and gives back what of that
// another node owns that is neither of the first two, and which.
func (f *fleet) missPairs(ctx context.Context, c *Config, s *missSection, nodes []*process) (owners map[string]string, err error) {
	owners = map[string]string{}
	ring := ringOf(nodes)
	for i := 0; len(s.others) < c.Misses; i++ {
		body := question("miss", i, missTokens, false)
		owner, err := f.owner(ctx, ring, nodes[0], body)
		if err != nil {
			return nil, err
		}
		miss, bypassed := &s.others, &s.othersBypassed
		if owner == nodes[0].name {
			miss, bypassed = &s.own, &s.ownBypassed
		} else if len(nodes) > 2 {
			owners[string(body)] = owner
		}
		ways := []struct {
			mode, want string
			to         *[]time.Duration
		}{{"bypass", "bypass", bypassed}, {"", "miss", miss}}
		if i%2 == 1 {
			ways[0], ways[1] = ways[1], ways[0]
		}
		for _, w := range ways {
			a, err := f.chat(ctx, nodes[0], body, w.mode, w.want)
			if err != nil {
				return nil, err
			}
			*w.to = append(*w.to, a.took)
		}
	}
	return owners, nil
}

// ringOf is the ring that these nodes have.
func ringOf(nodes []*process) *cluster.Ring {
	v := &ledger.View{Epoch: 1, Partitions: cluster.Partitions, RingVersion: cluster.RingVersion}
	for _, n := range nodes {
		v.Members = append(v.Members, ledger.Member{Name: n.name})
	}
	return cluster.NewRing(v)
}

// owner is the node that an answer belongs to.
func (f *fleet) owner(ctx context.Context, ring *cluster.Ring, n *process, body []byte) (string, error) {
	var e admin.CacheExplanation
	q := admin.CacheQuestion{CacheRequest: admin.CacheRequest{Tenant: tenant, Surface: surface, Body: body}}
	if err := f.admin(ctx, n, http.MethodPost, "cache/explain-key", q, &e); err != nil {
		return "", err
	}
	key, err := hex.DecodeString(e.Key)
	if err != nil {
		return "", fmt.Errorf("key %q: %w", e.Key, err)
	}
	if !e.Cacheable {
		return "", fmt.Errorf("the answer to a question is not kept: %s", e.Why)
	}
	return ring.OwnerOf(string(key)).Name, nil
}

// addedBy is the median of the differences between two that were measured side by side, in µs.
func addedBy(a, b []time.Duration) float64 {
	return median(pairs(a, b, func(a, b *time.Duration) float64 { return micros(*a - *b) }))
}

func (s *missSection) write(b *strings.Builder) {
	fmt.Fprintf(b, "a request that is alone, at one of %d nodes on this machine, each once with the cache and once with the cache bypassed, one after the other; the model\n"+
		"answers at once. added is the median of the differences. After that the same at a third node, which has it from the key's owner, and there once more.\n\n", s.nodes)
	fmt.Fprintf(b, "%-44s %8s %12s %12s %12s\n", "", "n", "p50 µs", "bypassed µs", "added µs")
	fmt.Fprintf(b, "%-44s %8d %12.1f %12.1f %12.1f\n", "miss, another node owns the key", len(s.others), micros(median(s.others)), micros(median(s.othersBypassed)), addedBy(s.others, s.othersBypassed))
	fmt.Fprintf(b, "%-44s %8d %12.1f %12.1f %12.1f\n", "miss, this node owns the key", len(s.own), micros(median(s.own)), micros(median(s.ownBypassed)), addedBy(s.own, s.ownBypassed))
	fmt.Fprintf(b, "%-44s %8d %12.1f\n", "hit at the owner, asked of another node", len(s.atOwner), micros(median(s.atOwner)))
	fmt.Fprintf(b, "%-44s %8d %12.1f\n", "hit on this node, after that", len(s.local), micros(median(s.local)))
}

func (s *missSection) aims() []aim { return nil }
