package main_test

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"headgate/proxy/admin"
)

// systemMoney has a model with prices and a budget that no test reaches.
func systemMoney(upstream string) string {
	return fmt.Sprintf(`version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b], context: 4096, price_per_million: {input: "1.00", output: "2.00"}}]
plans: [{name: p, budgets: [{name: month, scope: org, amount: "100.00", period: month}]}]
tenants: [{name: dev, plan: p}]
`, upstream)
}

// exported are the lines of an export, by the names of their columns.
func exported(t *testing.T, text string) (rows []map[string]string) {
	t.Helper()
	lines, err := csv.NewReader(strings.NewReader(text)).ReadAll()
	if err != nil || len(lines) == 0 {
		t.Fatalf("%v in %q", err, text)
	}
	for _, line := range lines[1:] {
		row := map[string]string{}
		for i, name := range lines[0] {
			row[name] = line[i]
		}
		rows = append(rows, row)
	}
	return rows
}

// TestSystemUsage: any node exports what all of them served, to the nano-dollar; one that is dead is
// missing by name, and when it is back nothing is.
func TestSystemUsage(t *testing.T) {
	t.Parallel()
	g := newGroup(t, 3, systemMoney(slowFake(t)))
	g.up()
	want := map[string]int{}
	for i, m := range g.members {
		for range i + 2 {
			if code, text, _, err := g.chat(m, cliKey, smallChat); code != http.StatusOK {
				t.Fatalf("%s: %d %s %v", m.name, code, text, err)
			}
			want[m.name]++
		}
	}
	export := func(m *member, args ...string) result {
		t.Helper()
		return runCLI(t, []string{"HEADGATE_ADMIN=" + m.admin, "HEADGATE_ADMIN_TOKEN=" + cliToken}, append([]string{"usage", "export"}, args...)...)
	}
	count := func(rows []map[string]string) map[string]int {
		got := map[string]int{}
		for _, row := range rows {
			got[row["node"]]++
		}
		return got
	}

	var whole string
	for _, m := range g.members {
		r := export(m)
		rows := exported(t, r.stdout)
		if got := count(rows); r.code != 0 || !reflect.DeepEqual(got, want) {
			t.Fatalf("%s has %v, want %v: %s", m.name, got, want, r.stderr)
		}
		var sum admin.USD
		for _, row := range rows {
			cost, err := admin.ParseUSD(row["cost_usd"])
			if err != nil || cost == 0 || row["outcome"] != "ok" || row["tenant"] != "dev" || row["model"] != "m" {
				t.Errorf("%v %v", row, err)
			}
			sum += cost
		}
		if !slices.IsSortedFunc(rows, func(a, b map[string]string) int { return strings.Compare(a["time"], b["time"]) }) {
			t.Errorf("%s does not export in the order of time", m.name)
		}
		sums := export(m, "--by", "tenant,day", "--time-zone", "Asia/Kathmandu")
		var summed admin.USD
		for _, row := range exported(t, sums.stdout) {
			cost, err := admin.ParseUSD(row["cost_usd"])
			if err != nil {
				t.Error(err)
			}
			summed += cost
		}
		if summed != sum {
			t.Errorf("%s: lines come to %s, sums to %s", m.name, sum, summed)
		}
		if whole != "" && whole != r.stdout {
			t.Errorf("%s exports something else than the others", m.name)
		}
		whole = r.stdout
	}

	asked, dead := g.members[0], g.members[2]
	dead.end(syscall.SIGKILL)
	lost := want[dead.name]
	delete(want, dead.name)
	r := export(asked)
	if got := count(exported(t, r.stdout)); r.code != 1 || !reflect.DeepEqual(got, want) || !strings.Contains(r.stderr, "missing: n3 (") {
		t.Errorf("with %s dead: exit code %d, %v, %s", dead.name, r.code, got, r.stderr)
	}
	if code, apiErr, err := g.call(asked, http.MethodGet, "usage", nil, nil); err == nil && (code != http.StatusServiceUnavailable || apiErr != admin.Incomplete) {
		t.Errorf("a part looked whole: %d %s", code, apiErr)
	}
	if r := runCLI(t, nil, "usage", "export", "--dir", dead.dir+"/usage"); r.code != 0 || len(exported(t, r.stdout)) != lost {
		t.Errorf("its disk has %d of %d: %s", len(exported(t, r.stdout)), lost, r.stderr)
	}

	dead.up()
	g.awaitView(g.members...)
	if r := export(asked); r.code != 0 || r.stdout != whole {
		t.Errorf("with %s back: exit code %d %s\n%s\nwant\n%s", dead.name, r.code, r.stderr, r.stdout, whole)
	}
}

// TestSystemRelease: what a dead node held is released by its incarnation, and that of a live one is
// not; who did it and why is in the audit log.
func TestSystemRelease(t *testing.T) {
	t.Parallel()
	g := newGroup(t, 3, systemMoney(slowFake(t)))
	g.up()
	asked, dead := g.members[0], g.members[2]
	if code, text, _, err := g.chat(dead, cliKey, smallChat); code != http.StatusOK {
		t.Fatalf("%d %s %v", code, text, err)
	}
	holder := func(gone bool) (found *admin.BudgetHolder) {
		for _, h := range look[[]admin.BudgetHolder](g, asked, "holders") {
			if h.Gone == gone && h.Node == dead.name {
				found = &h
			}
		}
		return found
	}
	var held *admin.BudgetHolder
	eventually(t, "the node to hold something", func() bool { held = holder(false); return held != nil })
	release := map[string]string{"node": dead.name, "incarnation": held.Incarnation, "reason": "a drill"}
	if code, apiErr, err := g.call(asked, http.MethodPost, "budgets/release", release, nil); code != http.StatusConflict || apiErr != admin.Conflict {
		t.Errorf("a live node's: %d %s %v", code, apiErr, err)
	}
	dead.end(syscall.SIGKILL)
	g.awaitView(g.others(dead)...)
	gone := holder(true)
	if gone == nil || gone.Incarnation != held.Incarnation || gone.Outstanding <= 0 {
		t.Fatalf("what the dead node held: %+v", gone)
	}
	var freed admin.Released
	if code, apiErr, err := g.call(asked, http.MethodPost, "budgets/release", release, &freed); code != http.StatusOK || freed.Freed != gone.Outstanding {
		t.Fatalf("%d %s %v, %s of %s", code, apiErr, err, freed.Freed, gone.Outstanding)
	}
	if again := holder(true); again != nil {
		t.Errorf("still held: %+v", again)
	}
	var entry *admin.AuditEntry
	for _, e := range look[[]admin.AuditEntry](g, asked, "audit") {
		if e.Action == "budget.release" {
			entry = &e
		}
	}
	if entry == nil || entry.Actor != "root" || !strings.Contains(entry.Object+entry.Before+entry.After, "a drill") {
		t.Errorf("%+v", entry)
	}
	if code, apiErr, err := g.call(asked, http.MethodPost, "budgets/release", map[string]string{"node": "n9", "incarnation": "abc", "reason": "x"}, nil); code != http.StatusNotFound || apiErr != admin.NotFound {
		t.Errorf("of nobody: %d %s %v", code, apiErr, err)
	}
}

// TestBudgetsOfANode: spending is shown, corrected and told of.
func TestBudgetsOfANode(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var told []map[string]any
	refuse := true // the first try
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		var n map[string]any
		if err := json.NewDecoder(r.Body).Decode(&n); err != nil || r.Header.Get("Authorization") != "Bearer hook-secret" {
			t.Errorf("%v %v", err, r.Header)
		}
		told = append(told, n)
		if refuse {
			refuse = false
			w.WriteHeader(http.StatusBadGateway)
		}
	}))
	t.Cleanup(hook.Close)
	policy := fmt.Sprintf(`version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b], context: 4096, price_per_million: {input: "1.00", output: "2.00"}}]
plans: [{name: p, budgets: [{name: ever, scope: org, amount: "0.00004", period: none, alerts: [50, 100]}]}]
tenants: [{name: dev, plan: p}]
notify: {webhook: %q, token_env: HOOK_TOKEN}
`, startFake(t), hook.URL)
	n := startNode(t, []string{"HOOK_TOKEN=hook-secret"}, "--policy", writeFile(t, "policy.yaml", policy))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	n.spend() // some 0.000027
	n.await("the webhook to be told twice", func() bool { mu.Lock(); defer mu.Unlock(); return len(told) >= 2 })
	mu.Lock()
	if first, second := told[0], told[1]; first["id"] != second["id"] || second["event"] != "budget.alert" || second["budget"] != "ever" || second["alert_percent"] != 50.0 || second["tenant"] != "dev" || second["amount_usd"] != "0.00004" {
		t.Errorf("%v, then %v", first, second)
	}
	mu.Unlock()

	list := decoded[[]admin.Budget](n, "budgets", "show", "dev")
	if len(list) != 1 || list[0].Spent == 0 || list[0].Passed != 50 || list[0].Spent+list[0].Outstanding+list[0].Left != list[0].Amount {
		t.Fatalf("%+v", list)
	}
	if code, why, _ := n.chat(cliKey); code != http.StatusTooManyRequests || why != "insufficient_quota" {
		t.Errorf("%d %s", code, why)
	}
	after := decoded[admin.Adjusted](n, "budgets", "credit", "dev", "ever", list[0].Spent.String(), "--reason", "a gift")
	if after.Spent != 0 {
		t.Errorf("%+v", after)
	}
	n.await("the next request to pass", func() bool { code, _, _ := n.chat(cliKey); return code == http.StatusOK })
	if r := n.cli("budgets", "credit", "dev", "never", "1", "--reason", "x"); r.code != 1 || !strings.Contains(r.stderr, `has no budget "never"; did you mean "ever"?`) {
		t.Errorf("%+v", r)
	}
	if e := decoded[[]admin.AuditEntry](n, "audit", "--actor", "root"); !slices.ContainsFunc(e, func(e admin.AuditEntry) bool {
		return e.Action == "budget.credit" && strings.Contains(e.After, "a gift")
	}) {
		t.Errorf("%+v", e)
	}
	if strings.Contains(n.log.String(), "hook-secret") || strings.Contains(n.log.String(), hook.URL) {
		t.Error("the log has the webhook's secrets")
	}
	contains(t, n.ok("explain", "--tenant", "dev", "--model", "m", "--input", "1", "--output", "1"), "BUDGET", "ever")
	if rows := decoded[admin.UsageRows](n, "usage", "top"); rows.Total.Requests < 2 || rows.Total.Cost == 0 || len(rows.Missing) != 0 {
		t.Errorf("%+v", rows)
	}
}

// TestCorrectionOfNobody is refused, unless it is meant.
func TestCorrectionOfNobody(t *testing.T) {
	t.Parallel()
	policy := fmt.Sprintf(`version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b], context: 4096, price_per_million: {input: "1.00", output: "2.00"}}]
plans: [{name: p, budgets: [{name: key-day, scope: key, amount: "5.00", period: day}]}]
tenants: [{name: dev, plan: p}]
`, startFake(t))
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", policy))
	credit := func(more ...string) result {
		return n.cli(append([]string{"budgets", "credit", "dev", "key-day", "1", "--reason", "x"}, more...)...)
	}
	if r := credit("--subject", "alize"); r.code != 1 || !strings.Contains(r.stderr, `nothing was charged to "alize" of budget "key-day" in that period, nor to anybody else; --new-subject`) {
		t.Errorf("%+v", r)
	}
	contains(t, n.ok("budgets", "charge", "dev", "key-day", "1", "--reason", "x", "--subject", "alice", "--new-subject"), "$1.00 of key-day are spent now")
	if r := credit("--subject", "alize"); r.code != 1 || !strings.Contains(r.stderr, `did you mean "alice"?`) {
		t.Errorf("%+v", r)
	}
	if r := credit("--subject", "bob"); r.code != 1 || !strings.Contains(r.stderr, `there are "alice"`) {
		t.Errorf("%+v", r)
	}
	if r := credit("--subject", "alice"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if list := decoded[[]admin.Budget](n, "budgets", "show", "dev"); len(list) != 1 || list[0].Subject != "alice" || list[0].Spent != 0 {
		t.Errorf("%+v", list)
	}
}

// TestWebhookWithoutToken is told of where the policy is applied, and on the node that leads.
func TestWebhookWithoutToken(t *testing.T) {
	t.Parallel()
	policy := writeFile(t, "policy.yaml", cliPolicy(startFake(t), 100, "notify: {webhook: \"https://hook.example/x\", token_env: NOSUCH_ENV}\n"))
	n := startNode(t, []string{"HEADGATE_NODE_ID=gw-2"}, "--policy", policy)
	const says = "notify.token_env: NOSUCH_ENV is not set on node gw-2"
	contains(t, n.ok("apply", "-f", policy, "--dry-run"), "warning: "+says)
	n.await("the leader to say so", func() bool { return strings.Count(n.log.String(), says) >= 1 })
}
