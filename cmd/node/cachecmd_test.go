package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/proxy"
	"headgate/proxy/admin"
)

const askedPolicy = `version: 1
backends: [{name: b, url: "http://127.0.0.1:1"}]
models: [{name: m, backends: [b], default_temperature: 0}]
plans: [{name: p}]
tenants: [{name: acme, plan: p}, {name: umbra, plan: p}]
surfaces: [{name: faq, share: tenant, exact: {}}, {name: desk, exact: {}}, {name: plain}]
`

// keyed is a truth with keys.
type keyed struct {
	agreed
	keys *ledger.Keys
}

func (k *keyed) Keys() *ledger.Keys { return k.keys }

// askedNode is a node without a cluster, whose keys may do different things at surfaces.
func askedNode(t *testing.T) *Node {
	t.Helper()
	state := ledger.NewState()
	r, err := state.Apply(1, &ledgerpb.Command{Version: 1, Actor: "ann", Body: &ledgerpb.Command_SetPolicy{SetPolicy: &ledgerpb.SetPolicy{Text: []byte(askedPolicy)}}})
	if err != nil || ledger.RefusalOf(r) != nil {
		t.Fatal(err, ledger.RefusalOf(r))
	}
	key := func(k ledger.Key) ledger.Key {
		k.Tenant, k.Hash = "acme", ledger.FormatHash(ledger.HashKey(k.ID))
		return k
	}
	keys, err := ledger.KeysOf(
		key(ledger.Key{ID: "acme-1"}),
		key(ledger.Key{ID: "acme-old", Surfaces: []string{"*"}, AssertUser: true, Revoked: true}),
		key(ledger.Key{ID: "acme-2", Surfaces: []string{"faq", "desk"}, User: "ada"}),
		key(ledger.Key{ID: "acme-3", Surfaces: []string{"*"}, AssertUser: true}),
	)
	if err != nil {
		t.Fatal(err)
	}
	truth := &keyed{keys: keys}
	truth.facts.Store(state.Facts())
	n := &Node{
		cfg: Defaults(), log: slog.New(slog.DiscardHandler), registry: prometheus.NewRegistry(), truth: truth,
		changed: make(chan struct{}, 1), inForce: make(chan struct{}), self: 1, time: cluster.NewClock(),
	}
	n.cfg.DataDir, n.cfg.NodeID = t.TempDir(), "n1"
	n.now.share = &ledger.Share{Of: 1}
	if err := n.build(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.discard(context.Background()); err != nil {
			t.Error(err)
		}
	})
	n.factsChanged(state.Facts())
	n.compile(state.Facts(), time.Now())
	return n
}

// TestNamedCaches: what the policy does not have is no one's cache.
func TestNamedCaches(t *testing.T) {
	ix := askedNode(t).current().index
	for _, c := range []struct{ tenant, surface, says string }{
		{"", "", ""},
		{"acme", "faq", ""},
		{"umbra", "", ""},
		{"acne", "faq", `there is no tenant "acne"; did you mean "acme"?`},
		{"acme", "fqa", `there is no surface "fqa"; did you mean "faq"?`},
		{"", "entirely-else", `there is no surface "entirely-else"; there are "desk", "faq", "plain"`},
	} {
		warnings, err := namedCaches(ix, c.tenant, c.surface)
		switch {
		case len(warnings) != 0 || (err == nil) != (c.says == ""):
			t.Errorf("%s %s: %v %v", c.tenant, c.surface, warnings, err)
		case err != nil:
			if e, ok := errors.AsType[*admin.Error](err); !ok || e.Code != admin.NotFound || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s %s: %v", c.tenant, c.surface, err)
			}
		}
	}
	if warnings, err := namedCaches(ix, "", "plain"); err != nil || len(warnings) != 1 || !strings.Contains(warnings[0], "has no cache") {
		t.Errorf("%v %v", warnings, err)
	}
}

// TestWhoAsks: without a key's id a question comes with one that fits it, if there is one.
func TestWhoAsks(t *testing.T) {
	n := askedNode(t)
	for _, c := range []struct {
		q    admin.CacheRequest
		want string // key
	}{
		{admin.CacheRequest{Tenant: "acme", Surface: "faq", User: "ada"}, "acme-2 acme-3"},
		{admin.CacheRequest{Tenant: "acme", Surface: "faq", User: "bob"}, "acme-3"},
		{admin.CacheRequest{Tenant: "acme", Surface: "plain"}, "acme-3"},
		{admin.CacheRequest{Tenant: "acme", Surface: "plain", Key: "acme-1"}, "acme-1"},
		{admin.CacheRequest{Key: "acme-2"}, "acme-2"},
	} {
		got, err := n.anyCaller(&c.q)
		if err != nil || !strings.Contains(c.want, got.KeyID) {
			t.Errorf("%+v: %+v %v", c.q, got, err)
		}
	}
	for says, q := range map[string]admin.CacheRequest{
		`there is no tenant "nobody"`:          {Tenant: "nobody"},
		`there is no surface "fqa"`:            {Tenant: "acme", Surface: "fqa"},
		`there is no key "x" of tenant "acme"`: {Tenant: "acme", Key: "x"},
		`there is no key "x"; headgate keys`:   {Key: "x"},
	} {
		if _, err := n.anyCaller(&q); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v", q, err)
		}
	}
}

// TestExplainKeySecond: what is wrong with the second request is told of it.
func TestExplainKeySecond(t *testing.T) {
	n := askedNode(t)
	request := func(user, body string) admin.CacheRequest {
		return admin.CacheRequest{Tenant: "acme", Surface: "desk", User: user, Path: admin.DefaultCachePath, Body: json.RawMessage(body)}
	}
	const question = `{"model": "m", "messages": [{"role": "user", "content": "hi"}]}`
	first, second := request("ada", question), request("bob", question)
	e, err := n.explainKey(t.Context(), admin.CacheQuestion{CacheRequest: first, Other: &second})
	if err != nil || len(e.Parts) < 10 || len(e.Differences) != 1 || e.Differences[0] != (admin.CacheDifference{Path: "user", First: "ada", Second: "bob"}) || e.Key == "" || e.Key == e.Other.Key {
		t.Errorf("%+v %v", e, err)
	}
	second = request("ada", `{"model": "m", "model": "m", "messages": []}`)
	_, err = n.explainKey(t.Context(), admin.CacheQuestion{CacheRequest: first, Other: &second})
	if e, ok := errors.AsType[*admin.Error](err); !ok || e.Code != admin.Invalid || !strings.HasPrefix(err.Error(), "other: it would be refused with status 400") {
		t.Errorf("%v", err)
	}
	plain := first
	plain.Surface = "plain"
	e, err = n.explainKey(t.Context(), admin.CacheQuestion{CacheRequest: plain, Other: &first})
	if err != nil || e.Cacheable || e.Why == "" || e.Parts != nil || e.Key != "" || !e.Other.Cacheable || e.Differences != nil {
		t.Errorf("%+v %v", e, err)
	}
}

// TestCacheErrors have the code that fits who is at fault.
func TestCacheErrors(t *testing.T) {
	n := &Node{}
	for want, err := range map[admin.Code]error{
		admin.Invalid: fmt.Errorf("x: %w", &ledger.Refusal{Code: "invalid"}), admin.Unknown: ledger.ErrUnknownOutcome, admin.NoQuorum: ledger.ErrBusy,
	} {
		if e, ok := errors.AsType[*admin.Error](n.cacheError(err)); !ok || e.Code != want {
			t.Errorf("%v: %+v", err, e)
		}
	}
	if err := n.cacheError(nil); err != nil {
		t.Error(err)
	}
	for want, err := range map[admin.Code]error{
		admin.Conflict: &proxy.Error{Status: http.StatusServiceUnavailable, Message: "no policy"},
		admin.Invalid:  &proxy.Error{Status: http.StatusForbidden, Message: "not yours", Param: "surface"},
	} {
		if e, ok := errors.AsType[*admin.Error](ofFrontDoor(err)); !ok || e.Code != want {
			t.Errorf("%v: %+v", err, e)
		}
	}
}
