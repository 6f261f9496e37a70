package node

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

const (
	rootBearer = "Bearer node-test-token"
	askForIt   = `{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}`
)

// answeringServer is a backend that completes chats.
func answeringServer(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if strings.HasSuffix(r.URL.Path, "/chat/completions") {
			_, _ = io.WriteString(w, `{"id": "c", "object": "chat.completion", "model": "m", "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}`)
			return
		}
		_, _ = io.WriteString(w, `{"object": "list", "data": [{"id": "m"}]}`)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

const governPolicy = `version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b]}]
plans: [{name: p, limits: [{name: org-tokens, scope: org, unit: tokens, rate: 1000000/min}]}]
tenants: [{name: dev, plan: p}, {name: acme, plan: p}]
`

// governed is a node that is up, and its policy.
func governed(t *testing.T) (n *Node, policy string) {
	t.Helper()
	policy = fmt.Sprintf(governPolicy, answeringServer(t))
	n = start(t, func(c *Config) { c.Policy = policyFile(t, policy) })
	waitFor(t, "the node is ready", func() bool { return n.ready() == nil })
	return n, policy
}

// must calls the admin API and takes its answer apart.
func must[T any](t *testing.T, n *Node, status int, method, path, bearer, body string) (answer T) {
	t.Helper()
	got, text := ask(t, n, method, "/admin/v1/"+path, bearer, body)
	if got != status {
		t.Fatalf("%s %s: status %d, want %d: %s", method, path, got, status, text)
	}
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		t.Fatalf("%s %s: %v: %s", method, path, err, text)
	}
	return answer
}

type (
	object  = map[string]any
	objects = []map[string]any
)

// refusedWith calls the admin API and checks how it refuses.
func refusedWith(t *testing.T, n *Node, status int, code, part, method, path, bearer, body string) {
	t.Helper()
	text := fmt.Sprint(must[object](t, n, status, method, path, bearer, body))
	if !strings.Contains(text, code) || !strings.Contains(text, part) {
		t.Errorf("%s %s: %s, want %s with %q", method, path, text, code, part)
	}
}

// chat asks the front door for a completion and gives the status.
func chat(t *testing.T, n *Node, key string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+n.Addr()+"/v1/chat/completions", strings.NewReader(askForIt))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

func TestPoliciesAreAppliedAndRolledBack(t *testing.T) {
	n, policy := governed(t)
	second := strings.Replace(policy, "1000000/min", "2000000/min", 1)
	refusedWith(t, n, 409, "conflict", "revision 1 is in force, not 7", "PUT", "policy?expected=7", rootBearer, second)
	if a := must[object](t, n, 200, "PUT", "policy?expected=1", rootBearer, second); a["revision"] != 2.0 || a["warnings"] != nil {
		t.Errorf("applied: %v", a)
	}
	if s := n.current(); s.policy.Revision != 2 || s.index.Policy.Plans[0].Limits[0].Name != "org-tokens" || string(s.policy.Text) != second {
		t.Errorf("in force after apply returned: revision %d", s.policy.Revision)
	}
	refusedWith(t, n, 409, "conflict", "revision 2 is in force, not 1", "POST", "policy/rollback", rootBearer, `{"revision": 1, "expected": 1}`)
	refusedWith(t, n, 404, "not_found", "9", "POST", "policy/rollback", rootBearer, `{"revision": 9}`)
	if a := must[object](t, n, 200, "POST", "policy/rollback", rootBearer, `{"revision": 1, "expected": 2}`); a["revision"] != 3.0 {
		t.Errorf("rolled back: %v", a)
	}
	if _, text := ask(t, n, "GET", "/admin/v1/policy", rootBearer, ""); text != policy {
		t.Errorf("after the rollback: %s", text)
	}
	revisions := must[objects](t, n, 200, "GET", "policy/revisions", rootBearer, "")
	if len(revisions) != 3 || revisions[2]["rolled_back_to"] != 1.0 && revisions[0]["rolled_back_to"] != 1.0 {
		t.Errorf("revisions: %v", revisions)
	}
	text := fmt.Sprint(must[objects](t, n, 200, "GET", "audit", rootBearer, ""))
	if !strings.Contains(text, "2000000") || !strings.Contains(text, "1000000") {
		t.Errorf("the audit log does not show what changed: %s", text)
	}
}

// TestKeysBindAtOnce on the front door: no waiting in here.
func TestKeysBindAtOnce(t *testing.T) {
	n, _ := governed(t)
	made := must[object](t, n, 200, "POST", "keys", rootBearer, `{"tenant": "acme", "name": "one"}`)
	first, id := made["key"].(string), made["id"].(string)
	if status := chat(t, n, first); status != 200 {
		t.Errorf("a new key: %d", status)
	}
	if _, text := ask(t, n, "GET", "/admin/v1/keys", rootBearer, ""); strings.Contains(text, first) || !strings.Contains(text, id) {
		t.Errorf("the keys: %s", text)
	}
	refusedWith(t, n, 400, "invalid", "nobody", "POST", "keys", rootBearer, `{"tenant": "nobody"}`)
	refusedWith(t, n, 409, "", id, "POST", "keys", rootBearer, fmt.Sprintf(`{"tenant": "acme", "id": %q}`, id))

	rotated := must[object](t, n, 200, "POST", "keys/"+id+"/rotate", rootBearer, `{"overlap": "1h"}`)
	second := rotated["key"].(string)
	if a, b := chat(t, n, first), chat(t, n, second); a != 200 || b != 200 {
		t.Errorf("during the overlap: %d and %d", a, b)
	}
	must[object](t, n, 200, "DELETE", "keys/"+id, rootBearer, "")
	if a, b := chat(t, n, first), chat(t, n, second); a != 401 || b != 200 {
		t.Errorf("after the revocation: %d and %d", a, b)
	}
	refusedWith(t, n, 409, "conflict", "revoked or expired", "POST", "keys/"+id+"/rotate", rootBearer, `{}`)
	refusedWith(t, n, 404, "not_found", "none", "DELETE", "keys/none", rootBearer, "")

	third := must[object](t, n, 200, "POST", "keys/"+rotated["id"].(string)+"/rotate", rootBearer, `{"overlap": "0s"}`)["key"].(string)
	if a, b := chat(t, n, second), chat(t, n, third); a != 401 || b != 200 {
		t.Errorf("rotated without an overlap: %d and %d", a, b)
	}
}

// TestKillsBindAtOnce on the front door, whatever they are for, and so does their release.
func TestKillsBindAtOnce(t *testing.T) {
	n, _ := governed(t)
	made := must[object](t, n, 200, "POST", "keys", rootBearer, `{"tenant": "acme"}`)
	key, id := made["key"].(string), made["id"].(string)
	for _, what := range []string{"global", "tenant/acme", "model/m", "key/" + id} {
		for _, where := range []string{"kill/", "node/kill/"} {
			if status := chat(t, n, key); status != 200 {
				t.Fatalf("before %s%s: %d", where, what, status)
			}
			body := `{"reason": "a test"}`
			if where != "kill/" {
				body = `{"reason": "a test", "for": "1h"}`
			}
			must[object](t, n, 200, "PUT", where+what, rootBearer, body)
			if status := chat(t, n, key); status < 400 {
				t.Errorf("%s%s is thrown: %d", where, what, status)
			}
			if kills := must[objects](t, n, 200, "GET", strings.TrimSuffix(where, "/"), rootBearer, ""); len(kills) != 1 || kills[0]["reason"] != "a test" {
				t.Errorf("%s: %v", where, kills)
			}
			must[object](t, n, 200, "DELETE", where+what, rootBearer, "")
		}
	}
	if status := chat(t, n, key); status != 200 {
		t.Errorf("all are released: %d", status)
	}
	if done := must[object](t, n, 200, "PUT", "kill/tenant/acmee", rootBearer, `{}`); !strings.Contains(fmt.Sprint(done["warnings"]), "acmee") {
		t.Errorf("a slip: %v", done)
	}
	waitFor(t, "the audit log tells of the node's own", func() bool {
		text := fmt.Sprint(must[objects](t, n, 200, "GET", "audit", rootBearer, ""))
		return strings.Contains(text, "node.kill") && strings.Contains(text, "node.revive")
	})
}

func TestLadderAndOverride(t *testing.T) {
	n, _ := governed(t)
	rungs := must[objects](t, n, 200, "GET", "ladder", rootBearer, "")
	if len(rungs) == 0 || rungs[0]["on"] != false {
		t.Fatalf("the ladder: %v", rungs)
	}
	rung := rungs[0]["rung"].(string)
	must[object](t, n, 200, "PUT", "ladder/"+rung, rootBearer, `{"on": true, "for": "1h", "reason": "a test"}`)
	if r := must[objects](t, n, 200, "GET", "ladder", rootBearer, "")[0]; r["on"] != true || r["reason"] != "a test" || r["expires"] == nil {
		t.Errorf("set: %v", r)
	}
	shown := func() bool {
		_, text := ask(t, n, "GET", "/metrics", "", "")
		return !strings.Contains(text, `headgate_ladder_rung{by="hand",rung="`+rung+`"} 0`)
	}
	if !shown() {
		t.Errorf("the metrics don't show %s", rung)
	}
	must[object](t, n, 200, "PUT", "ladder/"+rung, rootBearer, `{"on": false}`)
	if shown() {
		t.Errorf("the metrics still show %s", rung)
	}
	if r := must[objects](t, n, 200, "GET", "ladder", rootBearer, "")[0]; r["on"] != false {
		t.Errorf("released: %v", r)
	}
	refusedWith(t, n, 404, "not_found", "none", "PUT", "ladder/none", rootBearer, `{"on": true}`)

	must[object](t, n, 200, "PUT", "node/override", rootBearer, `{"unavailable": "deny", "for": "1h"}`)
	if o := must[object](t, n, 200, "GET", "node/override", rootBearer, ""); o["unavailable"] != "deny" {
		t.Errorf("override: %v", o)
	}
	must[object](t, n, 200, "DELETE", "node/override", rootBearer, "")
	if o := must[object](t, n, 200, "GET", "node/override", rootBearer, ""); len(o) != 0 {
		t.Errorf("ended: %v", o)
	}
}

// TestTokensHaveRoles, until they are revoked or have expired.
func TestTokensHaveRoles(t *testing.T) {
	n, policy := governed(t)
	token := func(name, role, more string) string {
		made := must[object](t, n, 200, "POST", "tokens", rootBearer, fmt.Sprintf(`{"name": %q, "role": %q%s}`, name, role, more))
		return "Bearer " + made["token"].(string)
	}
	bearers := map[string]string{"read": token("r", "read", ""), "operate": token("o", "operate", ""), "admin": token("a", "admin", "")}
	for _, c := range []struct{ method, path, body, least string }{
		{"GET", "status", "", "read"},
		{"GET", "audit", "", "read"},
		{"PUT", "kill/tenant/x", "{}", "operate"},
		{"PUT", "node/override", `{"unavailable": "local", "for": "1h"}`, "operate"},
		{"PUT", "policy?dry_run=true", policy, "admin"},
		{"POST", "keys", `{"tenant": "acme"}`, "admin"},
	} {
		allowed := false
		for _, role := range []string{"read", "operate", "admin"} {
			allowed = allowed || role == c.least
			if status, text := ask(t, n, c.method, "/admin/v1/"+c.path, bearers[role], c.body); allowed != (status < 300) || !allowed && status != 403 {
				t.Errorf("%s %s as %s: %d: %s", c.method, c.path, role, status, text)
			}
		}
	}
	audit := must[objects](t, n, 200, "GET", "audit?actor=o", rootBearer, "")
	if len(audit) == 0 || audit[0]["actor"] != "o" || audit[0]["action"] != "kill.throw" {
		t.Errorf("what o did: %v", audit)
	}
	if _, text := ask(t, n, "GET", "/admin/v1/tokens", rootBearer, ""); strings.Contains(text, strings.TrimPrefix(bearers["admin"], "Bearer ")) || strings.Count(text, `"name"`) != 3 {
		t.Errorf("tokens: %s", text)
	}
	must[object](t, n, 200, "DELETE", "tokens/a", rootBearer, "")
	if status, _ := ask(t, n, "GET", "/admin/v1/status", bearers["admin"], ""); status != 401 {
		t.Errorf("a revoked token: %d", status)
	}
	old := token("old", "admin", fmt.Sprintf(`, "expires": %q`, time.Now().Add(time.Second).Format(time.RFC3339Nano)))
	waitFor(t, "the token expires", func() bool { status, _ := ask(t, n, "GET", "/admin/v1/status", old, ""); return status == 401 })
}

// TestAuditShowsBeforeAndAfter of each change.
func TestAuditShowsBeforeAndAfter(t *testing.T) {
	n, _ := governed(t)
	id := must[object](t, n, 200, "POST", "keys", rootBearer, `{"tenant": "acme"}`)["id"].(string)
	must[object](t, n, 200, "DELETE", "keys/"+id, rootBearer, "")
	must[object](t, n, 200, "PUT", "kill/tenant/acme", rootBearer, `{"reason": "why"}`)
	must[object](t, n, 200, "DELETE", "kill/tenant/acme", rootBearer, "")
	type change struct{ action, before, after string }
	var got []change
	for _, e := range must[objects](t, n, 200, "GET", "audit", rootBearer, "") {
		text := func(field string) string { s, _ := e[field].(string); return s }
		got = append(got, change{text("action"), text("before"), text("after")})
	}
	if got[len(got)-1].action != "kill.release" {
		t.Errorf("the newest is not last: %v", got)
	}
	find := func(action string) change {
		for _, c := range got {
			if c.action == action {
				return c
			}
		}
		t.Errorf("no %s in %v", action, got)
		return change{}
	}
	if c := find("key.revoke"); c.before == c.after || !strings.Contains(c.after, "revoked") {
		t.Errorf("%+v", c)
	}
	if c := find("kill.throw"); c.before == c.after || !strings.Contains(c.after, "why") {
		t.Errorf("%+v", c)
	}
	if c := find("kill.release"); !strings.Contains(c.before, "why") || c.before == c.after {
		t.Errorf("%+v", c)
	}
}

// TestBackupAndRestore: refused where it would replace something, done with force, and then all is as it
// was: the state's hash, the keys, the policy that requests are decided by.
func TestBackupAndRestore(t *testing.T) {
	n, policy := governed(t)
	made := must[object](t, n, 200, "POST", "keys", rootBearer, `{"tenant": "acme"}`)
	key, id := made["key"].(string), made["id"].(string)
	hash := must[object](t, n, 200, "GET", "ledger", rootBearer, "")["state_hash"].(string)
	status, backup := ask(t, n, "GET", "/admin/v1/ledger/backup", rootBearer, "")
	if status != 200 || backup == "" {
		t.Fatalf("backup: %d", status)
	}

	must[object](t, n, 200, "DELETE", "keys/"+id, rootBearer, "")
	must[object](t, n, 200, "PUT", "kill/global", rootBearer, `{}`)
	must[object](t, n, 200, "PUT", "policy", rootBearer, strings.Replace(policy, "1000000/min", "5/min", 1))
	if status := chat(t, n, key); status == 200 {
		t.Error("a revoked key of a stopped cluster works")
	}
	refusedWith(t, n, 409, "conflict", "force", "POST", "ledger/restore", rootBearer, backup)
	refusedWith(t, n, 400, "invalid", "", "POST", "ledger/restore?force=true", rootBearer, backup[:len(backup)/2])

	restored := must[object](t, n, 200, "POST", "ledger/restore?force=true", rootBearer, backup)
	if restored["state_hash"] != hash {
		t.Errorf("the state's hash is %v, was %s", restored["state_hash"], hash)
	}
	waitFor(t, "the policy of before is in force", func() bool { return string(n.current().policy.Text) == policy })
	waitFor(t, "the node has its lease again", n.cluster.Leased)
	waitFor(t, "the revoked key works as before", func() bool { return chat(t, n, key) == 200 })
	if kills := must[objects](t, n, 200, "GET", "kill", rootBearer, ""); len(kills) != 0 {
		t.Errorf("kills: %v", kills)
	}
	// A policy that another ledger has under the same revision is another policy.
	must[object](t, n, 200, "PUT", "policy", rootBearer, strings.Replace(policy, "1000000/min", "6/min", 1))
	if s := n.current(); s.policy.Revision != 2 || !strings.Contains(string(s.policy.Text), " 6/min") {
		t.Errorf("in force: revision %d: %s", s.policy.Revision, s.policy.Text)
	}
}

// TestBackupOfAnotherLedgerWithTheSameRevision is put in force, too.
func TestBackupOfAnotherLedgerWithTheSameRevision(t *testing.T) {
	n, policy := governed(t)
	other := strings.Replace(policy, "1000000/min", "7/min", 1)
	var backup string
	t.Run("another cluster", func(t *testing.T) {
		m := start(t, func(c *Config) { c.Policy = policyFile(t, other) })
		_, backup = ask(t, m, "GET", "/admin/v1/ledger/backup", rootBearer, "")
	})
	must[object](t, n, 200, "POST", "ledger/restore?force=true", rootBearer, backup)
	waitFor(t, "its policy is in force", func() bool { s := n.current(); return s.policy.Revision == 1 && string(s.policy.Text) == other })
}

// TestFollowerGoverns as the leader does: what is changed there binds on both, and its backup has it.
func TestFollowerGoverns(t *testing.T) {
	leader, policy := governed(t)
	follower := start(t, func(c *Config) {
		c.NodeID, c.Join, c.Policy = "n2", []string{leader.cluster.Address()}, policyFile(t, policy)
	})
	waitFor(t, "the second node is ready, and counted on", func() bool { return follower.ready() == nil && follower.cluster.Leased() })
	if follower.cluster.Ledger().IsLeader() {
		t.Fatal("the second node leads")
	}
	key := must[object](t, follower, 200, "POST", "keys", rootBearer, `{"tenant": "acme"}`)["key"].(string)
	waitFor(t, "the key works on both", func() bool { return chat(t, leader, key) == 200 && chat(t, follower, key) == 200 })
	status, backup := ask(t, follower, "GET", "/admin/v1/ledger/backup", rootBearer, "")
	if status != 200 {
		t.Fatalf("backup: %d: %s", status, backup)
	}
	hash := must[object](t, follower, 200, "GET", "ledger", rootBearer, "")["state_hash"]
	must[object](t, follower, 200, "PUT", "kill/global", rootBearer, `{"reason": "a test"}`)
	if status := chat(t, follower, key); status < 400 {
		t.Errorf("where it was thrown: %d", status)
	}
	waitFor(t, "it holds on the other", func() bool { return chat(t, leader, key) >= 400 })
	if restored := must[object](t, follower, 200, "POST", "ledger/restore?force=true", rootBearer, backup); restored["state_hash"] != hash {
		t.Errorf("restored %v, want %v", restored["state_hash"], hash)
	}
	waitFor(t, "the key works on both again", func() bool { return chat(t, leader, key) == 200 && chat(t, follower, key) == 200 })
}

// TestRemovingNobody: a name that no node has is told from one that is not to be removed.
func TestRemovingNobody(t *testing.T) {
	n := start(t, func(c *Config) { c.Policy = policyFile(t, fmt.Sprintf(drainPolicy, answeringServer(t))) })
	refusedWith(t, n, 404, "not_found", "headgate members lists those that are", "DELETE", "members/gw-9", rootBearer, "")
}
