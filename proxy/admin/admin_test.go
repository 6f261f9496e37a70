package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const rootToken = "root-token-of-the-test"

// seen is what the fake node was asked for.
type seen struct {
	who  Actor
	what any
}

// fakeNode answers everything and notes the last call that changed something.
func fakeNode() (Config, *seen) {
	var last seen
	note := func(who Actor, what any) (Done, error) { last = seen{who, what}; return Done{Index: 7}, nil }
	c := Config{
		Token: rootToken, Gatherer: prometheus.NewRegistry(), Ready: func() error { return nil },
		Authorize: func(token string) (Actor, bool) {
			var role Role
			if role.UnmarshalText([]byte(token)) != nil {
				return Actor{}, false
			}
			return Actor{"the " + token, role}, true
		},
		Status:  func() Status { return Status{Node: "gw-1"} },
		Tenants: func() []Tenant { return []Tenant{} },
		Levels: func(_ context.Context, tenant string) ([]Level, error) {
			switch tenant {
			case "acme":
				return nil, nil
			case "lost":
				return nil, Errorf(NoQuorum, "no node answered")
			}
			return nil, Errorf(NotFound, "there is no such tenant")
		},
		Explain: func(_ context.Context, q ExplainRequest) (any, error) { return q, nil },
		PolicyText: func(_ context.Context, revision uint64) (PolicyText, error) {
			if revision > 3 {
				return PolicyText{}, Errorf(NotFound, "there is no revision %d", revision)
			}
			return PolicyText{3, []byte("version: 1\n")}, nil
		},
		PolicyRevisions: func(context.Context) ([]PolicyRevision, error) { return nil, nil },
		ListKeys:        func(context.Context) ([]Key, error) { return nil, nil },
		Kills:           func(context.Context) ([]Kill, error) { return nil, nil },
		Ladder:          func(context.Context) ([]Rung, error) { return nil, nil },
		Backends:        func(context.Context) ([]BackendState, error) { return nil, nil },
		Members:         func(context.Context) ([]Member, error) { return nil, nil },
		Tokens:          func(context.Context) ([]Token, error) { return []Token{{Name: "ops", Role: RoleOperate}}, nil },
		Ledger:          func(context.Context) (LedgerInfo, error) { return LedgerInfo{Index: 9}, nil },
		Override:        func(context.Context) (*Override, error) { return nil, nil },
		NodeKills:       func(context.Context) ([]Kill, error) { return nil, nil },
		Holders:         func(context.Context) ([]BudgetHolder, error) { return nil, nil },
		Budgets: func(_ context.Context, tenant string) ([]Budget, error) {
			if tenant != "" && tenant != "acme" {
				return nil, Errorf(NotFound, "there is no such tenant")
			}
			return nil, nil
		},
		ExportUsage: func(_ context.Context, w io.Writer, q UsageQuery) ([]Missing, error) {
			last = seen{what: q}
			_, err := io.WriteString(w, "tenant\r\n")
			return nil, err
		},
		TopUsage: func(_ context.Context, q UsageTop) (UsageRows, error) { last = seen{what: q}; return UsageRows{}, nil },
		Audit: func(_ context.Context, f AuditFilter) ([]AuditEntry, error) {
			last = seen{what: f}
			return nil, nil
		},
		Backup: func(_ context.Context, _ Actor, w io.Writer, stale bool) error {
			_, err := fmt.Fprintf(w, "backup, stale=%v", stale)
			return err
		},
		ExportContent: func(_ Actor, w io.Writer, _ ContentFilter) error { _, err := io.WriteString(w, "{}\n"); return err },
		EraseContent:  func(a Actor, f ContentFilter) (int, error) { last = seen{a, f}; return 2, nil },
	}
	c.ApplyPolicy = func(_ context.Context, a Actor, p PolicyChange) (Applied, error) {
		last = seen{a, p}
		if p.Expected != nil && *p.Expected != 3 {
			return Applied{}, Errorf(Conflict, "revision 3 is in force, not %d", *p.Expected)
		}
		return Applied{Revision: 4, DryRun: p.DryRun, Changes: []string{}}, nil
	}
	c.RollBack = func(_ context.Context, a Actor, b Rollback) (Applied, error) {
		last = seen{a, b}
		return Applied{}, nil
	}
	c.CreateKey = func(_ context.Context, a Actor, k NewKey) (CreatedKey, error) {
		last = seen{a, k}
		return CreatedKey{}, nil
	}
	c.RotateKey = func(_ context.Context, a Actor, k KeyRotation) (CreatedKey, error) {
		last = seen{a, k}
		return CreatedKey{}, nil
	}
	c.RevokeKey = func(_ context.Context, a Actor, id string) (Done, error) { return note(a, id) }
	c.SetKill = func(_ context.Context, a Actor, k KillSwitch) (Done, error) { return note(a, k) }
	c.SetRung = func(_ context.Context, a Actor, r RungChange) (Done, error) { return note(a, r) }
	c.SetDrain = func(_ context.Context, a Actor, d DrainChange) (Done, error) { return note(a, d) }
	c.RemoveMember = func(_ context.Context, a Actor, name string) (Done, error) { return note(a, name) }
	c.CreateToken = func(_ context.Context, a Actor, t NewToken) (CreatedToken, error) {
		last = seen{a, t}
		return CreatedToken{Token: "secret", Name: t.Name, Role: t.Role}, nil
	}
	c.RevokeToken = func(_ context.Context, a Actor, name string) (Done, error) { return note(a, name) }
	c.AdjustBudget = func(_ context.Context, a Actor, b BudgetAdjustment) (Adjusted, error) {
		last = seen{a, b}
		return Adjusted{Spent: 7}, nil
	}
	c.ReleaseBudget = func(_ context.Context, a Actor, b BudgetRelease) (Released, error) {
		last = seen{a, b}
		return Released{Freed: 7}, nil
	}
	c.InvalidateCache = func(_ context.Context, a Actor, i CacheInvalidation) (CacheInvalidated, error) {
		last = seen{a, i}
		return CacheInvalidated{Index: 7, Generation: 3, Previous: 2}, nil
	}
	c.CacheGenerations = func(context.Context) ([]CacheGeneration, error) { return nil, nil }
	c.CacheStats = func(context.Context) (CacheStats, error) { return CacheStats{Node: "gw-1"}, nil }
	c.WrongAnswer = func(_ context.Context, a Actor, w CacheWrong) (CacheWrongDone, error) {
		last = seen{a, w}
		return CacheWrongDone{Evicted: 1}, nil
	}
	c.CacheRecent = func(context.Context) ([]CacheDecision, error) { return nil, nil }
	c.ExplainKey = func(_ context.Context, q CacheQuestion) (CacheExplanation, error) {
		last = seen{what: q}
		return CacheExplanation{}, nil
	}
	c.SetOverride = func(_ context.Context, a Actor, o OverrideChange) (Done, error) { return note(a, o) }
	c.SetNodeKill = func(_ context.Context, a Actor, k KillSwitch) (Done, error) { return note(a, k) }
	c.Restore = func(_ context.Context, a Actor, r io.Reader, force bool) (Restored, error) {
		text, err := io.ReadAll(r)
		last = seen{a, fmt.Sprint(string(text), force)}
		return Restored{StateHash: "ab"}, err
	}
	return c, &last
}

func ask(h http.Handler, method, path, token, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func code(t *testing.T, w *httptest.ResponseRecorder) (code Code) {
	t.Helper()
	var e struct {
		Error struct {
			Code    Code
			Message string
		}
	}
	if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil || e.Error.Message == "" {
		t.Errorf("%v in %s", err, w.Body)
	}
	return e.Error.Code
}

// example is a right call of every route, and the least role for it.
var example = map[string]struct {
	role Role
	path string // below /admin/v1/
	body string
}{
	"GET status":                        {RoleRead, "status", ""},
	"GET tenants":                       {RoleRead, "tenants", ""},
	"GET limits/{tenant}":               {RoleRead, "limits/acme", ""},
	"POST explain":                      {RoleRead, "explain", `{"tenant": "acme"}`},
	"GET policy":                        {RoleRead, "policy?revision=2", ""},
	"GET policy/revisions":              {RoleRead, "policy/revisions", ""},
	"PUT policy":                        {RoleAdmin, "policy?dry_run=true&expected=3", "version: 1"},
	"POST policy/rollback":              {RoleAdmin, "policy/rollback", `{"revision": 2, "expected": 3}`},
	"GET keys":                          {RoleRead, "keys", ""},
	"POST keys":                         {RoleAdmin, "keys", `{"tenant": "acme"}`},
	"POST keys/{id}/rotate":             {RoleAdmin, "keys/acme-1/rotate", ""},
	"DELETE keys/{id}":                  {RoleOperate, "keys/acme-1", ""},
	"GET kill":                          {RoleRead, "kill", ""},
	"PUT kill/{kind}":                   {RoleOperate, "kill/global", `{"reason": "leak"}`},
	"PUT kill/{kind}/{name...}":         {RoleOperate, "kill/model/org%2Fmodel", ""},
	"DELETE kill/{kind}":                {RoleOperate, "kill/global", ""},
	"DELETE kill/{kind}/{name...}":      {RoleOperate, "kill/tenant/acme", ""},
	"GET ladder":                        {RoleRead, "ladder", ""},
	"PUT ladder/{rung}":                 {RoleOperate, "ladder/clamp", `{"on": true, "for": "10m"}`},
	"GET backends":                      {RoleRead, "backends", ""},
	"PUT backends/{backend}/drain":      {RoleOperate, "backends/vllm-a/drain", `{"on": true, "for": "10m"}`},
	"GET members":                       {RoleRead, "members", ""},
	"DELETE members/{name}":             {RoleAdmin, "members/gw-3", ""},
	"GET audit":                         {RoleRead, "audit?limit=5", ""},
	"GET tokens":                        {RoleRead, "tokens", ""},
	"POST tokens":                       {RoleAdmin, "tokens", `{"name": "ops", "role": "operate"}`},
	"DELETE tokens/{name}":              {RoleAdmin, "tokens/ops", ""},
	"GET ledger":                        {RoleRead, "ledger", ""},
	"GET ledger/backup":                 {RoleAdmin, "ledger/backup", ""},
	"POST ledger/restore":               {RoleAdmin, "ledger/restore", "bytes"},
	"GET budgets":                       {RoleRead, "budgets", ""},
	"GET budgets/{tenant}":              {RoleRead, "budgets/acme", ""},
	"POST budgets/adjust":               {RoleAdmin, "budgets/adjust", `{"budget": "fleet", "amount_usd": "5", "reason": "an outage"}`},
	"POST budgets/{tenant}/adjust":      {RoleAdmin, "budgets/acme/adjust", `{"budget": "month", "amount_usd": "-5.00", "reason": "an outage"}`},
	"GET holders":                       {RoleRead, "holders", ""},
	"POST budgets/release":              {RoleAdmin, "budgets/release", `{"node": "gw-3", "incarnation": "ab", "reason": "burnt"}`},
	"GET usage":                         {RoleRead, "usage?by=tenant,day", ""},
	"GET usage/top":                     {RoleRead, "usage/top?n=3", ""},
	"POST cache/invalidate":             {RoleOperate, "cache/invalidate?tenant=acme&tag=doc-7", "what the sender of a webhook likes"},
	"GET cache/generations":             {RoleRead, "cache/generations", ""},
	"GET cache/stats":                   {RoleRead, "cache/stats", ""},
	"POST cache/wrong":                  {RoleOperate, "cache/wrong", `{"entry": "00112233445566ff"}`},
	"GET cache/recent":                  {RoleRead, "cache/recent", ""},
	"POST cache/explain-key":            {RoleRead, "cache/explain-key", `{"tenant": "acme", "body": {"model": "m"}}`},
	"GET node/override":                 {RoleRead, "node/override", ""},
	"PUT node/override":                 {RoleOperate, "node/override", `{"unavailable": "deny", "for": "15m"}`},
	"DELETE node/override":              {RoleOperate, "node/override", ""},
	"GET node/kill":                     {RoleRead, "node/kill", ""},
	"PUT node/kill/{kind}":              {RoleOperate, "node/kill/global", `{"for": "15m"}`},
	"PUT node/kill/{kind}/{name...}":    {RoleOperate, "node/kill/key/acme-1", `{"for": "15m"}`},
	"DELETE node/kill/{kind}":           {RoleOperate, "node/kill/global", ""},
	"DELETE node/kill/{kind}/{name...}": {RoleOperate, "node/kill/key/acme-1", ""},
	"GET content":                       {RoleAdmin, "content", ""},
	"DELETE content":                    {RoleAdmin, "content?user=u-1", ""},
}

// TestRoles: every route has the role that stands here, and holds it.
func TestRoles(t *testing.T) {
	c, _ := fakeNode()
	h := Handler(c)
	routes := c.routes()
	if len(routes) != len(example) {
		t.Errorf("%d routes, %d examples", len(routes), len(example))
	}
	for _, r := range routes {
		want, ok := example[r.pattern]
		if !ok {
			t.Errorf("%s has no role here", r.pattern)
			continue
		}
		method, _, _ := strings.Cut(r.pattern, " ")
		for token, least := range map[string]Role{
			"": 0, "guess": 0, "Root-token-of-the-test": 0, "read": RoleRead, "operate": RoleOperate, "admin": RoleAdmin, rootToken: RoleAdmin,
		} {
			status := http.StatusOK
			var why Code
			switch {
			case least == 0:
				status, why = http.StatusUnauthorized, Unauthorized
			case least < want.role:
				status, why = http.StatusForbidden, Forbidden
			}
			w := ask(h, method, "/admin/v1/"+want.path, token, want.body)
			if w.Code != status {
				t.Errorf("%s with %q: %d, want %d: %s", r.pattern, token, w.Code, status, w.Body)
			} else if why != "" && code(t, w) != why {
				t.Errorf("%s with %q: %s", r.pattern, token, w.Body)
			}
		}
	}
}

// TestARouteWithoutRoleIsShut: forgetting a role opens nothing.
func TestARouteWithoutRoleIsShut(t *testing.T) {
	c, _ := fakeNode()
	w := ask(c.authorized(0, get(c.Status)), http.MethodGet, "/", rootToken, "")
	if w.Code != http.StatusForbidden {
		t.Errorf("%d: %s", w.Code, w.Body)
	}
}

func TestNoTokenOfItsOwn(t *testing.T) {
	c, _ := fakeNode()
	c.Token, c.Authorize = "", nil
	for _, token := range []string{"", "x"} {
		if w := ask(Handler(c), http.MethodGet, "/admin/v1/status", token, ""); w.Code != http.StatusUnauthorized {
			t.Errorf("%q: %d", token, w.Code)
		}
	}
}

// TestOpen: health and metrics need no token; what does not exist is told to holders only.
func TestOpen(t *testing.T) {
	c, _ := fakeNode()
	c.Ready = func() error { return errors.New("draining") }
	h := Handler(c)
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 200, "/admin/v1/none": 401, "/admin/v1/": 401, "/none": 404} {
		if w := ask(h, http.MethodGet, path, "", ""); w.Code != want {
			t.Errorf("%s: %d, want %d", path, w.Code, want)
		}
	}
	for path, want := range map[string]int{"/admin/v1/none": 404, "/admin/v1/policy/rollback": 405} {
		if w := ask(h, http.MethodGet, path, "read", ""); w.Code != want {
			t.Errorf("%s: %d, want %d", path, w.Code, want)
		}
	}
}

// TestChanges: what is asked for arrives, with who asked.
func TestChanges(t *testing.T) {
	c, last := fakeNode()
	h := Handler(c)
	three := uint64(3)
	ops, boss := Actor{"the operate", RoleOperate}, Actor{"root", RoleAdmin}
	for _, x := range []struct {
		method, path, body string
		who                Actor
		want               any
	}{
		{"PUT", "policy?dry_run=true&expected=3", "version: 1", boss, PolicyChange{[]byte("version: 1"), true, &three}},
		{"PUT", "policy", "version: 1", boss, PolicyChange{Text: []byte("version: 1")}},
		{"POST", "policy/rollback", `{"revision": 2, "expected": 3}`, boss, Rollback{2, &three}},
		{
			"POST", "keys", `{"tenant": "acme", "id": "a", "models": ["m"], "assert_user": true, "test": true, "expires": "2027-01-01T00:00:00Z"}`, boss,
			NewKey{Tenant: "acme", ID: "a", Models: []string{"m"}, AssertUser: true, Test: true, Expires: time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)},
		},
		{"POST", "keys/a/rotate", `{"overlap": "7d"}`, boss, KeyRotation{"a", 7 * 24 * time.Hour}},
		{"POST", "keys/a/rotate", ``, boss, KeyRotation{"a", 24 * time.Hour}},
		{"POST", "keys/a/rotate", `{"overlap": "0s"}`, boss, KeyRotation{"a", 0}},
		{"DELETE", "keys/a%2Fb", "", ops, "a/b"},
		{"PUT", "kill/global", `{"reason": "leak"}`, ops, KillSwitch{Kind: "global", On: true, Reason: "leak"}},
		{"PUT", "kill/model/org%2Fm", "", ops, KillSwitch{Kind: "model", Name: "org/m", On: true}},
		{"DELETE", "kill/tenant/acme", "", ops, KillSwitch{Kind: "tenant", Name: "acme"}},
		{"PUT", "ladder/clamp", `{"on": true, "for": "10m", "reason": "load"}`, ops, RungChange{"clamp", true, 10 * time.Minute, "load"}},
		{"PUT", "ladder/clamp", `{"on": false}`, ops, RungChange{Rung: "clamp"}},
		{"PUT", "backends/vllm-a/drain", `{"on": true, "for": "10m", "reason": "new weights"}`, ops, DrainChange{"vllm-a", true, 10 * time.Minute, "new weights"}},
		{"PUT", "backends/vllm@10.0.0.1:8000/drain", `{"on": false}`, ops, DrainChange{Backend: "vllm@10.0.0.1:8000"}},
		{"DELETE", "members/gw-3", "", boss, "gw-3"},
		{"POST", "tokens", `{"name": "ops", "role": "operate"}`, boss, NewToken{Name: "ops", Role: RoleOperate}},
		{"DELETE", "tokens/ops", "", boss, "ops"},
		{"POST", "ledger/restore?force=true", "bytes", boss, "bytestrue"},
		{"POST", "budgets/adjust", `{"budget": "fleet", "amount_usd": "5", "reason": "r", "at": "2027-01-01T00:00:00Z"}`, boss, BudgetAdjustment{Budget: "fleet", Amount: 5e9, Reason: "r", At: "2027-01-01T00:00:00Z"}},
		{"POST", "budgets/ac%2Fme/adjust", `{"budget": "b", "subject": "k\u001fm", "amount_usd": "-0.000000001", "reason": "r"}`, boss, BudgetAdjustment{Tenant: "ac/me", Budget: "b", Subject: "k\x1fm", Amount: -1, Reason: "r"}},
		{"POST", "budgets/release", `{"node": "gw-3", "incarnation": "00ab", "reason": "r"}`, boss, BudgetRelease{"gw-3", "00ab", "r"}},
		{"PUT", "node/override", `{"unavailable": "allow", "for": "15m"}`, ops, OverrideChange{"allow", 15 * time.Minute}},
		{"DELETE", "node/override", "", ops, OverrideChange{}},
		{"PUT", "node/kill/key/k", `{"for": "24h", "reason": "r"}`, ops, KillSwitch{Kind: "key", Name: "k", On: true, Reason: "r", For: 24 * time.Hour}},
		{"DELETE", "node/kill/global", "", ops, KillSwitch{Kind: "global"}},
		{"DELETE", "content?user=u", "", boss, ContentFilter{User: "u"}},
	} {
		*last = seen{}
		token := "operate"
		if x.who == boss {
			token = rootToken
		}
		if w := ask(h, x.method, "/admin/v1/"+x.path, token, x.body); w.Code != http.StatusOK {
			t.Errorf("%s %s: %d %s", x.method, x.path, w.Code, w.Body)
		}
		if last.who != x.who || !reflect.DeepEqual(last.what, x.want) {
			t.Errorf("%s %s: %+v by %+v, want %+v by %+v", x.method, x.path, last.what, last.who, x.want, x.who)
		}
	}
}

// TestWrongCalls reach no function and say what is wrong.
func TestWrongCalls(t *testing.T) {
	c, last := fakeNode()
	h := Handler(c)
	for _, x := range []struct {
		method, path, body string
		code               Code
		says               string
	}{
		{"PUT", "policy?dry_run=yes", "", Invalid, `dry_run="yes" is neither`},
		{"PUT", "policy?expected=-1", "", Invalid, "not a whole number"},
		{"GET", "policy?revision=x", "", Invalid, "not a whole number"},
		{"GET", "policy?revision=9", "", NotFound, "no revision 9"},
		{"POST", "policy/rollback", "", Invalid, "policy revisions"},
		{"POST", "keys", `{"tenant": "acme"} x`, Invalid, "goes on"},
		{"POST", "keys", `{"tenant": "acme", "idd": "x"}`, Invalid, "idd"},
		{"POST", "keys", `{}`, Invalid, "tenant"},
		{"POST", "keys", `{"name": "` + strings.Repeat("x", maxAsk) + `"}`, TooLarge, "too large"},
		{"POST", "keys/a/rotate", `{"overlap": "a week"}`, Invalid, "30d"},
		{"POST", "keys/a/rotate", `{"overlap": "91d"}`, Invalid, "not between"},
		{"POST", "keys/a/rotate", `{"overlap": "-1s"}`, Invalid, "not between"},
		{"PUT", "kill/tenants/acme", "", Invalid, "global, model, tenant, key"},
		{"PUT", "kill/tenant", "", Invalid, "name the tenant"},
		{"PUT", "kill/global/all", "", Invalid, "has no name"},
		{"DELETE", "kill/tenant/", "", Invalid, "name the tenant"},
		{"PUT", "ladder/clamp", "", Invalid, "on: say"},
		{"PUT", "ladder/clamp", `{"on": false, "for": "1m"}`, Invalid, "has an end"},
		{"POST", "tokens", `{"name": "x", "role": "boss"}`, Invalid, "read, operate, admin"},
		{"POST", "tokens", `{"name": "x"}`, Invalid, "role"},
		{"POST", "tokens", `{"name": "root", "role": "read"}`, Invalid, "taken"},
		{"PUT", "node/override", `{"unavailable": "deny"}`, Invalid, "for:"},
		{"PUT", "node/override", `{"unavailable": "deny", "for": "25h"}`, Invalid, "not between"},
		{"PUT", "node/override", `{"unavailable": "perhaps", "for": "1h"}`, Invalid, "allow, deny, local"},
		{"PUT", "node/kill/key/k", `{}`, Invalid, "for:"},
		{"POST", "tokens", `{"name": "node gw-1", "role": "read"}`, Invalid, "letters, digits"},
		{"POST", "tokens", `{"name": "a\tb", "role": "read"}`, Invalid, "letters, digits"},
		{"PUT", "node/kill/key/k", `{"for": "0s"}`, Invalid, "not between"},
		{"PUT", "node/kill/key/" + strings.Repeat("k", 129), `{"for": "1m"}`, Invalid, "at most 128 bytes"},
		{"PUT", "node/kill/key/k", `{"for": "1m", "reason": "` + strings.Repeat("r", 1025) + `"}`, Invalid, "1024"},
		{"POST", "budgets/acme/adjust", `{"amount_usd": "1", "reason": "r"}`, Invalid, "budget: name"},
		{"POST", "budgets/acme/adjust", `{"budget": "b", "reason": "r"}`, Invalid, "amount_usd: say"},
		{"POST", "budgets/acme/adjust", `{"budget": "b", "amount_usd": "0.00", "reason": "r"}`, Invalid, "amount_usd: say"},
		{"POST", "budgets/acme/adjust", `{"budget": "b", "amount_usd": 5, "reason": "r"}`, Invalid, "can't be read"},
		{"POST", "budgets/acme/adjust", `{"budget": "b", "amount_usd": "1e15", "reason": "r"}`, Invalid, "nine decimals"},
		{"POST", "budgets/acme/adjust", `{"budget": "b", "amount_usd": "1000000000000000", "reason": "r"}`, Invalid, "more money"},
		{"POST", "budgets/acme/adjust", `{"budget": "b", "amount_usd": "5"}`, Invalid, "reason: say why"},
		{"POST", "budgets/acme/adjust", `{"budget": "b", "amount_usd": "5", "reason": " "}`, Invalid, "reason: say why"},
		{"POST", "budgets/acme/adjust", `{"budget": "` + strings.Repeat("b", 129) + `", "amount_usd": "5", "reason": "r"}`, Invalid, "at most 128 bytes"},
		{"POST", "budgets/release", `{"incarnation": "ab", "reason": "r"}`, Invalid, "node: name"},
		{"POST", "budgets/release", `{"node": "gw-3", "incarnation": "0", "reason": "r"}`, Invalid, "budgets holders"},
		{"POST", "budgets/release", `{"node": "gw-3", "incarnation": "xy", "reason": "r"}`, Invalid, "budgets holders"},
		{"POST", "budgets/release", `{"node": "gw-3", "incarnation": "ab"}`, Invalid, "reason: say why"},
		{"GET", "budgets/nobody", "", NotFound, "no such tenant"},
		{"GET", "usage?format=xml", "", Invalid, "neither csv nor json"},
		{"GET", "usage?by=tenant,colour", "", Invalid, `by: "colour" is not one of tenant, key`},
		{"GET", "usage?by=day,day", "", Invalid, "twice"},
		{"GET", "usage?time_zone=Mars/Olympus", "", Invalid, "Europe/Berlin"},
		{"GET", "usage?time_zone=Local", "", Invalid, "Europe/Berlin"},
		{"GET", "usage?from=soon", "", Invalid, "from: "},
		{"GET", "usage?from=2026-02&until=2026-01", "", Invalid, "is not before until"},
		{"GET", "usage?partial=1", "", Invalid, "neither true nor false"},
		{"GET", "usage/top?n=0", "", Invalid, "not between"},
		{"GET", "audit?limit=0", "", Invalid, "not between"},
		{"GET", "audit?since=yesterday", "", Invalid, "not a date"},
		{"GET", "ledger/backup?stale=1", "", Invalid, "neither true nor false"},
		{"POST", "explain", `{"input_tokens": -1}`, Invalid, "negative"},
		{"GET", "limits/nobody", "", NotFound, "no such tenant"},
		{"GET", "limits/lost", "", NoQuorum, "no node answered"},
		{"DELETE", "content", "", Invalid, "tenant or a user"},
		{"PUT", "policy?expected=2", "v", Conflict, "revision 3 is in force"},
	} {
		*last = seen{}
		w := ask(h, x.method, "/admin/v1/"+x.path, rootToken, x.body)
		if got := code(t, w); got != x.code || w.Code != x.code.Status() || !strings.Contains(w.Body.String(), strings.ReplaceAll(x.says, `"`, `\"`)) {
			t.Errorf("%s %s: %d %s", x.method, x.path, w.Code, w.Body)
		}
		if last.what != nil && x.code == Invalid {
			t.Errorf("%s %s reached the node: %+v", x.method, x.path, last.what)
		}
	}
}

// TestCodes: each has a status of its own kind, also through wrapping; what has none is 500.
func TestCodes(t *testing.T) {
	for code, want := range map[Code]int{
		Invalid: 400, Unauthorized: 401, Forbidden: 403, NotFound: 404, Conflict: 409, Exists: 409, TooLarge: 413, Internal: 500,
		Unsupported: 501, NoQuorum: 503, Incomplete: 503, Unknown: 504, "new": 500,
	} {
		w := httptest.NewRecorder()
		fail(w, fmt.Errorf("apply: %w", Errorf(code, "why")))
		if w.Code != want || !strings.Contains(w.Body.String(), "apply: why") {
			t.Errorf("%s: %d %s", code, w.Code, w.Body)
		}
	}
	w := httptest.NewRecorder()
	fail(w, errors.New("disk full"))
	if w.Code != 500 || code(t, w) != Internal {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestAbsentFunctions: a node that lacks one says so, for each route but what every node has.
func TestAbsentFunctions(t *testing.T) {
	full, _ := fakeNode()
	c := Config{
		Token: rootToken, Gatherer: full.Gatherer, Ready: full.Ready, Status: full.Status, Tenants: full.Tenants, Levels: full.Levels,
		Explain: full.Explain, ExportContent: full.ExportContent, EraseContent: full.EraseContent,
	}
	h := Handler(c)
	for pattern, e := range example {
		method, rest, _ := strings.Cut(pattern, " ")
		want := http.StatusNotImplemented
		for _, always := range []string{"status", "tenants", "limits", "explain", "content"} {
			if strings.HasPrefix(rest, always) {
				want = http.StatusOK
			}
		}
		if w := ask(h, method, "/admin/v1/"+e.path, rootToken, e.body); w.Code != want {
			t.Errorf("%s: %d, want %d", pattern, w.Code, want)
		}
	}
}

// TestListsAreNeverNull, so that programs need not ask.
func TestListsAreNeverNull(t *testing.T) {
	c, _ := fakeNode()
	h := Handler(c)
	for _, path := range []string{"keys", "kill", "ladder", "backends", "members", "audit", "policy/revisions", "node/kill", "budgets", "holders", "cache/generations", "cache/recent"} {
		if w := ask(h, http.MethodGet, "/admin/v1/"+path, "read", ""); w.Body.String() != "[]\n" {
			t.Errorf("%s: %s", path, w.Body)
		}
	}
	if w := ask(h, http.MethodGet, "/admin/v1/node/override", "read", ""); w.Body.String() != "null\n" {
		t.Errorf("%s", w.Body)
	}
}

func TestAuditFilter(t *testing.T) {
	c, last := fakeNode()
	ask(Handler(c), http.MethodGet, "/admin/v1/audit?limit=5&since=2026-01-15&object=key+acme-1&actor=ops", "read", "")
	if want := (AuditFilter{5, time.Date(2026, 1, 15, 0, 0, 0, 0, time.UTC), "key acme-1", "ops"}); last.what != want {
		t.Errorf("%+v", last.what)
	}
	ask(Handler(c), http.MethodGet, "/admin/v1/audit", "read", "")
	if want := (AuditFilter{Limit: defaultAudit}); last.what != want {
		t.Errorf("%+v", last.what)
	}
}

// TestBackup: whole, or an error, or a broken connection; never a part that looks whole.
func TestBackup(t *testing.T) {
	c, _ := fakeNode()
	w := ask(Handler(c), http.MethodGet, "/admin/v1/ledger/backup?stale=true", rootToken, "")
	if w.Body.String() != "backup, stale=true" || w.Header().Get("Content-Type") != "application/octet-stream" || !strings.Contains(w.Header().Get("Content-Disposition"), ".backup") {
		t.Errorf("%v %s", w.Header(), w.Body)
	}
	c.Backup = func(context.Context, Actor, io.Writer, bool) error { return Errorf(NoQuorum, "no leader; --stale") }
	if w := ask(Handler(c), http.MethodGet, "/admin/v1/ledger/backup", rootToken, ""); w.Code != 503 || code(t, w) != NoQuorum || w.Header().Get("Content-Disposition") != "" {
		t.Errorf("%d %s", w.Code, w.Body)
	}

	c.Backup = func(_ context.Context, _ Actor, w io.Writer, _ bool) error {
		_, err := io.WriteString(w, strings.Repeat("part", 1<<12))
		return errors.Join(err, errors.New("broken"))
	}
	s := httptest.NewUnstartedServer(Handler(c))
	s.Config.ErrorLog = nil
	s.Start()
	defer s.Close()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+"/admin/v1/ledger/backup", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+rootToken)
	res, err := s.Client().Do(r)
	if err == nil {
		_, err = io.ReadAll(res.Body)
		_ = res.Body.Close()
	}
	if err == nil {
		t.Error("a part of a backup looked like a whole one")
	}
}

func TestPolicyText(t *testing.T) {
	c, _ := fakeNode()
	w := ask(Handler(c), http.MethodGet, "/admin/v1/policy", "read", "")
	if w.Body.String() != "version: 1\n" || w.Header().Get(revisionHeader) != "3" || w.Header().Get("Content-Type") != "application/yaml" {
		t.Errorf("%v %s", w.Header(), w.Body)
	}
}

func TestParseSpan(t *testing.T) {
	for s, want := range map[string]time.Duration{"15m": 15 * time.Minute, "30d": 720 * time.Hour, "1h30m": 90 * time.Minute, "0s": 0} {
		if d, err := ParseSpan(s); err != nil || d != want {
			t.Errorf("%s: %s %v", s, d, err)
		}
	}
	for _, s := range []string{"", "d", "-1d", "15", "999999999d", "x"} {
		if d, err := ParseSpan(s); err == nil {
			t.Errorf("%q is %s", s, d)
		}
	}
}

func FuzzParseSpan(f *testing.F) {
	for _, s := range []string{"15m", "30d", "-1h", "1d1h", "106751d", "9999999999999999999h"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := ParseSpan(s)
		if err == nil && strings.HasSuffix(s, "d") && (d < 0 || d%(24*time.Hour) != 0) {
			t.Errorf("%q is %s", s, d)
		}
	})
}

func TestRoleNames(t *testing.T) {
	for r := RoleRead; r <= RoleAdmin; r++ {
		raw, err := json.Marshal(r)
		var back Role
		if err != nil || json.Unmarshal(raw, &back) != nil || back != r {
			t.Errorf("%s: %v", raw, err)
		}
	}
	if Role(0).String() != "none" || Role(4).String() != "none" {
		t.Error("a role outside the three has a name")
	}
}
