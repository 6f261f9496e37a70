package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/cluster/ledger"
	"headgate/proxy"
	"headgate/proxy/admin"
)

// The commands against a cluster that is a fake behind the real admin API.

var fakeTime = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

// fakeCluster notes what it was asked to change last.
type fakeCluster struct {
	mu   sync.Mutex
	last any
	url  string
}

func (f *fakeCluster) note(v any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = v
}

// asked returns the last change and forgets it.
func (f *fakeCluster) asked() any {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.last
	f.last = nil
	return v
}

func done[In any](f *fakeCluster) func(context.Context, admin.Actor, In) (admin.Done, error) {
	return func(_ context.Context, _ admin.Actor, in In) (admin.Done, error) {
		f.note(in)
		return admin.Done{Index: 7}, nil
	}
}

func always[T any](v T) func(context.Context) (T, error) {
	return func(context.Context) (T, error) { return v, nil }
}

// startCluster serves it.
func startCluster(t *testing.T) *fakeCluster {
	t.Helper()
	f := &fakeCluster{}
	s := httptest.NewServer(admin.Handler(f.config()))
	t.Cleanup(s.Close)
	f.url = s.URL
	return f
}

func (f *fakeCluster) config() admin.Config {
	c := admin.Config{
		Token: cliToken, Gatherer: prometheus.NewRegistry(), Ready: func() error { return nil },
		Authorize: func(token string) (admin.Actor, bool) {
			return admin.Actor{Name: "looker", Role: admin.RoleRead}, token == "read-token"
		},
		Status: func() admin.Status {
			return admin.Status{Node: "gw-1", Version: "v1", Ready: true, Degraded: "no owner in reach", PolicyRevision: 4, PolicySource: "ledger", Models: []string{"m"}, Cluster: &admin.ClusterStatus{
				Name: "west", ID: "00112233445566778899aabbccddeeff", Incarnation: "ab", Leader: "gw-2", Epoch: 3, Members: []string{"gw-1", "gw-2"},
				ViewLease: admin.ViewLease{Held: true, UntilMS: 812}, Partitions: 2047, Waiting: 5, Owing: []string{"gw-2"},
			}, Backends: []admin.Backend{
				{Name: "vllm", Endpoint: "vllm@10.0.0.1:8000", State: "up", Draining: true, Slots: 64, Breaker: "half_open", Drained: true, Ejected: true, PausedMS: 2340, Share: 0.25, Stale: true, Overflow: true},
				{Name: "older", Endpoint: "older", State: "down", URL: "http://o", InFlight: 3, LastError: "refused"}, // as a node of an earlier release has it
			}}
		},
		Tenants: func() []admin.Tenant { return []admin.Tenant{{Name: "acme"}, {Name: "other"}} },
		Levels: func(_ context.Context, tenant string) ([]admin.Level, error) {
			if tenant != "acme" {
				return nil, admin.Errorf(admin.NotFound, "there is no such tenant")
			}
			most, some, forty := 0.75, 0.25, int64(40)
			return []admin.Level{
				{Limit: "flat", Scope: "org", Unit: "tokens", Level: 0, Capacity: 9, ResetMS: 1500, Owner: "gw-2", Unavailable: "local"},
				{Limit: "tokens", Scope: "org", Unit: "tokens", Level: 40, Capacity: 100, ResetMS: 6000, Owner: "gw-1", Unavailable: "deny", Debt: 3, Lendable: -3, Outstanding: 120, LentRate: 1, Holders: []admin.Holding{
					{Node: "gw-1", Outstanding: 60, InHand: &forty, LentRate: &most}, {Node: "gw-2", Outstanding: 60, LentRate: &some},
				}, Away: "gw-2 did not answer"},
				{Limit: "slots", Scope: "key", Unit: "concurrency", Subject: "k", Level: 6, Capacity: 8, ResetMS: -1, Owner: "gw-1", Outstanding: 4, Holders: []admin.Holding{{Node: "gw-1", Outstanding: 4, InUse: 2}}},
			}, nil
		},
		Explain: func(_ context.Context, q admin.ExplainRequest) (any, error) {
			e := proxy.Explanation{Refused: "kill switch", Reason: "a leak", Model: "small", Rungs: []string{"smaller_model", "shed_best_effort"}, Degraded: true, Override: "deny", Limits: []proxy.ExplainLimit{
				{Name: "a", By: "allow", Admitted: true, Owner: "gw-2", Away: "gw-2 does not answer"},
				{Name: "d", By: "deny", Away: "no view lease"},
				{Name: "n", By: "deny", NoShare: true},
				{Name: "s", By: "deny", NoShare: true, Shadow: true},
				{Name: "y", By: "deny", Away: "no answer", RetryAfterMS: 70},
				{Name: "l", By: "local", Held: 70, Remaining: 69, Admitted: true},
				{Name: "o", By: "direct", Owner: "gw-2", Held: 5, Remaining: 3, Admitted: true},
				{Name: "r", By: "refused_local", Owner: "gw-2", RetryAfterMS: 20},
				{Name: "p", By: "private", Away: "no view lease", Remaining: 8, Admitted: true},
			}}
			e.Budgets = []proxy.ExplainBudget{
				{Name: "month", Scope: "org", Strict: true, Cost: 5e9, Least: 1, Left: 2e9, Amount: 250e9, Spent: 248e9, UsedPercent: 99, Ends: &fakeTime, Admitted: true},
				{Name: "day", Scope: "key", Cost: 5e9, Least: 5e9, Left: 0, Amount: 1e9, Spent: 2e9, UsedPercent: 200},
				{Name: "ever", Scope: "org", Cost: 5e9, Least: 5e9, Amount: 1e9, UsedPercent: -1, Admitted: true},
			}
			switch q.Tenant {
			case "plain":
				e = proxy.Explanation{Admitted: true, Model: "m", Policy: []string{"from pressure 0.9: class best_effort"}, Places: []proxy.ExplainPlace{{Backend: "b", InUse: 3}}}
			case "full":
				e = proxy.Explanation{
					Refused: "shed_cost", Reason: "too much", Model: "m", Route: "canary", Routed: "5 of 100", Shedding: "requests above 32,768 tokens",
					Policy: []string{"from pressure 0.75: requests above 32,768 tokens", "static_answer by hand only"},
					Places: []proxy.ExplainPlace{{Backend: "vllm-a", Cost: 3, InUse: 31, Limit: 32, Waiting: 34, Places: 40, Pressure: 0.82}, {Backend: "bought", Overflow: true, InUse: 2}},
				}
			}
			return e, nil
		},
		PolicyText: func(_ context.Context, revision uint64) (admin.PolicyText, error) {
			return admin.PolicyText{Revision: 4, Text: fmt.Appendf(nil, "# revision %d\nversion: 1\n", revision)}, nil
		},
		PolicyRevisions: always([]admin.PolicyRevision{{Revision: 3, At: fakeTime, Actor: "root"}, {Revision: 4, At: fakeTime, Actor: "ops", RolledBackTo: 2, InForce: true}}),
		ListKeys:        always([]admin.Key{{ID: "acme-1", Tenant: "acme", Status: "active", LastUsed: "2026-06-01T00:00:00Z", Name: "search"}}),
		Kills:           always([]admin.Kill{{Kind: "tenant", Name: "acme", Reason: "leak", Actor: "ops", At: fakeTime}}),
		SetKill:         done[admin.KillSwitch](f), SetRung: done[admin.RungChange](f), RemoveMember: done[string](f),
		RevokeKey: done[string](f), RevokeToken: done[string](f), SetOverride: done[admin.OverrideChange](f), SetNodeKill: done[admin.KillSwitch](f),
		Ladder: always([]admin.Rung{{Rung: "clamp", On: true, Expires: fakeTime, Reason: "load", Actor: "ops", At: fakeTime}, {Rung: "fallback"}, {Rung: "auto", Models: []string{"m", "n"}}}),
		Backends: always([]admin.BackendState{
			{Backend: "vllm", Endpoint: "vllm@10.0.0.1:8000", State: "up", Breaker: "half_open", Share: 0.25, Stale: true, Slots: 64, Limit: 40, InUse: 39, Waiting: 7, Places: 80, Pressure: 0.0875, Rate: 19.96},
			{Backend: "b", Endpoint: "b", State: "up", Breaker: "closed", Share: 1, Ejected: true, Drained: true, Leaving: true, PausedMS: 2340, Overflow: true, InFlight: 3, LastError: "it answered with status 503"},
		}),
		SetDrain: done[admin.DrainChange](f),
		Members: always([]admin.Member{
			{Name: "gw-1", Gossip: "alive", Raft: "leader", InView: true, Partitions: 2047, AppliedIndex: 99, StateHash: "0123456789abcdef0123", ViewLease: true, Version: "v1", Address: "10.0.0.1:7946", Self: true},
			{Name: "gw-2", Gossip: "failed", Raft: "voter", Error: "no answer"},
		}),
		Tokens: always([]admin.Token{{Name: "ops", Role: admin.RoleOperate, Created: fakeTime}}),
		Audit: func(_ context.Context, q admin.AuditFilter) ([]admin.AuditEntry, error) {
			f.note(q)
			return []admin.AuditEntry{{Index: 7, At: fakeTime, Actor: "ops", Action: "kill.on", Object: "tenant acme", After: "leak"}}, nil
		},
		Ledger: always(admin.LedgerInfo{ClusterID: "00ff", Index: 99, Term: 2, Leader: "gw-2", Voters: []string{"gw-1", "gw-2"}, StateHash: "abcd", Counts: map[string]int{"keys": 3, "audit": 9}}),
		Budgets: func(_ context.Context, tenant string) ([]admin.Budget, error) {
			if tenant != "" && tenant != "acme" {
				return nil, admin.Errorf(admin.NotFound, "there is no such tenant")
			}
			return []admin.Budget{
				{Tenant: "acme", Budget: "org-month", Scope: "org", Mode: "strict", Period: "month", End: fakeTime, Amount: 250e9, Spent: 249_999_999_999, Outstanding: 1, Percent: 100, Holders: []admin.BudgetHolder{{Node: "gw-1", Incarnation: "ab", Outstanding: 1}}},
				{Tenant: "acme", Budget: "key-day", Scope: "key+model", Subject: "k\x1fm", Mode: "normal", Period: "day", Amount: 0, Spent: 5e8, Left: -5e8, Stale: true, Holders: []admin.BudgetHolder{{Node: "gw-9", Gone: true, Incarnation: "cd", Outstanding: 2e9}}},
			}, nil
		},
		AdjustBudget: func(_ context.Context, _ admin.Actor, b admin.BudgetAdjustment) (admin.Adjusted, error) {
			f.note(b)
			return admin.Adjusted{Spent: 187_500_000_000, Left: 62_500_000_000}, nil
		},
		Holders: always([]admin.BudgetHolder{{Node: "gw-9", Gone: true, Incarnation: "cd", Outstanding: 2e9, Accounts: 1}, {Node: "gw-1", Incarnation: "ab", Outstanding: 1, Accounts: 3}}),
		ReleaseBudget: func(_ context.Context, _ admin.Actor, b admin.BudgetRelease) (admin.Released, error) {
			f.note(b)
			return admin.Released{Freed: 2e9}, nil
		},
		ExportUsage: func(_ context.Context, w io.Writer, q admin.UsageQuery) ([]admin.Missing, error) {
			f.note(q)
			if q.Tenant == "acmee" {
				_, err := io.WriteString(w, "tenant,cost_usd\r\n")
				return nil, err
			}
			_, err := io.WriteString(w, "tenant,cost_usd\r\nacme,0.5\r\n")
			if q.Tenant == "half" {
				return []admin.Missing{{Node: "gw-3", Error: "no answer"}}, err
			}
			return nil, err
		},
		TopUsage: func(_ context.Context, q admin.UsageTop) (admin.UsageRows, error) {
			f.note(q.Most)
			rows := admin.UsageRows{
				Rows:  []admin.UsageRow{{By: map[string]string{"key": "k", "user": "a\x1b[2J"}, Requests: 3, Input: 30, Output: 40, Cost: 75e7}},
				Total: admin.UsageRow{Requests: 4, Input: 40, Output: 50, Cost: 1e9},
			}
			if q.Tenant == "acmee" {
				return admin.UsageRows{}, nil
			}
			if q.Tenant == "half" {
				rows.Missing = []admin.Missing{{Node: "gw-3", Error: "no answer"}}
			}
			return rows, nil
		},
		Override:  always(&admin.Override{Unavailable: "deny", Actor: "ops", Expires: fakeTime}),
		NodeKills: always([]admin.Kill{{Kind: "global", Expires: fakeTime}}),
		Backup: func(_ context.Context, _ admin.Actor, w io.Writer, stale bool) error {
			f.note(stale)
			return ledger.NewState().Capture().Write(w)
		},
	}
	c.ApplyPolicy = func(_ context.Context, _ admin.Actor, p admin.PolicyChange) (admin.Applied, error) {
		f.note(p)
		if p.Expected != nil && *p.Expected != 4 {
			return admin.Applied{}, admin.Errorf(admin.Conflict, "revision 4 is in force, not %d", *p.Expected)
		}
		return admin.Applied{Revision: 5, DryRun: p.DryRun, Changes: []string{"+ x"}, Warnings: []string{"plan p has no tenant"}}, nil
	}
	c.RollBack = func(_ context.Context, _ admin.Actor, b admin.Rollback) (admin.Applied, error) {
		f.note(b)
		return admin.Applied{Revision: 5, Changes: []string{"- x"}}, nil
	}
	c.CreateKey = func(_ context.Context, _ admin.Actor, k admin.NewKey) (admin.CreatedKey, error) {
		f.note(k)
		if k.Tenant == "later" {
			return admin.CreatedKey{}, admin.Errorf(admin.NoQuorum, "2 of 3 voters are out of reach")
		}
		return admin.CreatedKey{Key: "hg_live_secret", ID: "acme-2", Tenant: k.Tenant, Hash: "sha256:00", Expires: k.Expires}, nil
	}
	c.RotateKey = func(_ context.Context, _ admin.Actor, k admin.KeyRotation) (admin.CreatedKey, error) {
		f.note(k)
		return admin.CreatedKey{Key: "hg_live_new", ID: "acme-2", Tenant: "acme", Replaces: k.ID, ReplacedExpires: fakeTime}, nil
	}
	c.CreateToken = func(_ context.Context, _ admin.Actor, k admin.NewToken) (admin.CreatedToken, error) {
		f.note(k)
		return admin.CreatedToken{Token: "hga_secret", Name: k.Name, Role: k.Role}, nil
	}
	c.Restore = func(_ context.Context, _ admin.Actor, r io.Reader, force bool) (admin.Restored, error) {
		text, err := io.ReadAll(r)
		f.note(fmt.Sprint(string(text), force))
		return admin.Restored{StateHash: "0123456789abcdef0123"}, err
	}
	return c
}

func (f *fakeCluster) env(more ...string) []string {
	return append([]string{"HEADGATE_ADMIN=" + f.url, "HEADGATE_ADMIN_TOKEN=" + cliToken}, more...)
}

// TestCommandsAsk: each command asks for what its arguments say, and prints what came.
func TestCommandsAsk(t *testing.T) {
	t.Parallel()
	f := startCluster(t)
	policy := writeFile(t, "policy.yaml", "version: 1\n")
	four := uint64(4)
	day := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		args string
		want any
		says []string
	}{
		{"status", nil, []string{"gw-1 (v1), ready", "west (001122334455), leader gw-2", "epoch 3: gw-1, gw-2; lease held, 812 ms left", "2047 owned, 5 of them waiting", "slots       some are not lent until it is known what gw-2 has in use", "degraded    no owner in reach"}},
		{"status", nil, []string{"\nvllm@10.0.0.1:8000  up, drained, leaving, breaker half open, ejected, paused 2.3s, starting (25 %), metrics stale, overflow  0 ", "\nolder               down                                                                                                     3 "}},
		{"members", nil, []string{"NODE", "leader", "2047", "0123456789ab ", "this one", "failed", "no answer"}},
		{"members remove gw-2", "gw-2", []string{"gw-2 is out"}},
		{"apply -f " + policy, admin.PolicyChange{Text: []byte("version: 1\n")}, []string{"+ x\nwarning: plan p has no tenant\n1 changes applied as revision 5"}},
		{"apply -f " + policy + " --dry-run --expected 4", admin.PolicyChange{Text: []byte("version: 1\n"), DryRun: true, Expected: &four}, []string{"nothing was applied"}},
		{"apply --rollback 2 --expected 4", admin.Rollback{Revision: 2, Expected: &four}, []string{"applied as revision 5"}},
		{"apply --rollback 2 --dry-run", admin.PolicyChange{Text: []byte("# revision 2\nversion: 1\n"), DryRun: true}, []string{"nothing was applied"}},
		{"explain --tenant plain --model m", nil, []string{"admitted: 0 input and 0 output tokens, $0.00\n\nLIMIT"}},
		{"explain --tenant acme --model m", nil, []string{
			"refused by kill switch: 0 input", "a leak\n", "the ladder: smaller_model, shed_best_effort; it would be tried with model small\n", "\nowners of limits are out of this node's reach\n", "override says deny\n",
			"-     admits, uncounted                           unavailable: allow, gw-2 does not answer\n", "-     refuses until its owner is back             unavailable: deny, no view lease\n",
			"-     refuses: the share of this node is nothing  this node's private bucket\n", "-     would refuse (shadow)",
			"69    admits                                      this node, which holds 70\n", "3     admits                                      gw-2, which owns it, this node holds 5\n",
			"refuses; again in 20ms                      this node, as gw-2 said\n", "refuses; again in 70ms                      this node's private bucket, no answer\n",
			"8     admits                                      this node's private bucket, no view lease\n",
			"month   org    strict  $5.00  $2.00  $250.00  2026-06-01T12:00:00Z  admits, with a shorter answer\n", "day     key    normal  $5.00  $0.00  $1.00                          refuses\n",
			"$5.00  ?      $1.00                          admits if the ledger does",
		}},
		{"explain --tenant full --model m", nil, []string{
			"refused by shed_cost", "too much\nroute canary: 5 of 100\nrefused now: requests above 32,768 tokens\npolicy: from pressure 0.75: requests above 32,768 tokens\npolicy: static_answer by hand only\n",
			"PLACE              COSTS    IN USE  LIMIT  WAITING  PLACES  PRESSURE\nvllm-a             3 slots  31      32     34       40      0.82\nbought (overflow)  -        2       -      -        -       -\n",
		}},
		{"limits show acme", nil, []string{
			"LEFT         OF   FULL IN  OWNER  RATE LENT  HELD BY\n", "0            9    1.5s     gw-2              \n",
			"40 (debt 3)  100  6s       gw-1   100%       gw-1 40 (75%), gw-2 up to 60 (25%), gw-2 did not answer\n", "6            8    -        gw-1              gw-1 4 (2 in use)\n",
		}},
		{"policy show", nil, []string{"# revision 0\n"}},
		{"policy show --revision 3", nil, []string{"# revision 3\n"}},
		{"policy revisions", nil, []string{"REVISION", "2026-06-01T12:00:00Z", "as revision 2, in force"}},
		{
			"keys create --tenant acme --id a --models m,n --assert-user --expires 2027-01-01",
			admin.NewKey{Tenant: "acme", ID: "a", Models: []string{"m", "n"}, AssertUser: true, Expires: day},
			[]string{"key (shown once): hg_live_secret\n", "id acme-2 of tenant acme, until 2027-01-01T00:00:00Z"},
		},
		{"keys rotate acme-1 --overlap 7d", admin.KeyRotation{ID: "acme-1", Overlap: 7 * 24 * time.Hour}, []string{"hg_live_new", "acme-1 is good until 2026-06-01"}},
		{"keys rotate acme-1", admin.KeyRotation{ID: "acme-1", Overlap: 24 * time.Hour}, []string{"for ever"}},
		{"keys revoke acme-1", "acme-1", []string{"acme-1 is revoked, for ever"}},
		{"keys list", nil, []string{"LAST USED", "acme-1", "2026-06-01T00:00:00Z"}},
		{"kill tenant dev --reason leak", admin.KillSwitch{Kind: "tenant", Name: "dev", On: true, Reason: "leak"}, []string{"tenant dev is killed on every node; headgate revive tenant dev ends that"}},
		{"kill model org/model", admin.KillSwitch{Kind: "model", Name: "org/model", On: true}, []string{"org/model"}},
		{"kill global", admin.KillSwitch{Kind: "global", On: true}, []string{"everything is killed"}},
		{"kill", nil, []string{"KIND", "tenant", "leak"}},
		{"revive key k-1", admin.KillSwitch{Kind: "key", Name: "k-1"}, []string{"key k-1 is no longer killed"}},
		{"ladder show", nil, []string{"RUNG", "clamp", "on", "fallback", "off", "auto      by itself, for m, n "}},
		{"ladder", nil, []string{"RUNG", "clamp"}},
		{"backends", nil, []string{
			"BACKEND             STATE                                                  IN USE  LIMIT  SLOTS  WAITING  PLACES  PRESSURE  RATE    LAST ERROR\n",
			"vllm@10.0.0.1:8000  up, breaker half open, starting (25 %), metrics stale  39      40     64     7        80      0.09      20.0/s  \n",
			"b                   up, drained, leaving, ejected, paused 2.3s, overflow   3       -      -      -        -       -         -       it answered with status 503\n",
		}},
		{"drain vllm-a --for 30m --reason weights", admin.DrainChange{Backend: "vllm-a", On: true, For: 30 * time.Minute, Reason: "weights"}, []string{"vllm-a gets no new requests on any node; headgate undrain vllm-a ends that\n"}},
		{"drain vllm@10.0.0.1:8000", admin.DrainChange{Backend: "vllm@10.0.0.1:8000", On: true}, []string{"headgate undrain vllm@10.0.0.1:8000"}},
		{"undrain vllm-a --reason done", admin.DrainChange{Backend: "vllm-a", Reason: "done"}, []string{"vllm-a gets requests again\n"}},
		{"ladder set clamp on --for 10m --reason load", admin.RungChange{Rung: "clamp", On: true, For: 10 * time.Minute, Reason: "load"}, []string{"clamp is on"}},
		{"ladder set clamp off", admin.RungChange{Rung: "clamp"}, []string{"clamp is off"}},
		{"audit --limit 5 --actor ops --object x --since 2027-01-01", admin.AuditFilter{Limit: 5, Actor: "ops", Object: "x", Since: day}, []string{"ACTION", "kill.on"}},
		{"tokens create ops --role operate", admin.NewToken{Name: "ops", Role: admin.RoleOperate}, []string{"token (shown once): hga_secret\nops with the role operate"}},
		{"tokens list", nil, []string{"ROLE", "operate"}},
		{"tokens revoke ops", "ops", []string{"token ops is revoked"}},
		{"budgets show acme", nil, []string{
			"BUDGET     SCOPE      SUBJECT  MODE    SPENT           OF       USED   OUTSTANDING   LEFT    PERIOD      ENDS                  HELD BY\n",
			"org-month  org                 strict  $249.999999999  $250.00  99.9%  $0.000000001  $0.00   month       2026-06-01T12:00:00Z  gw-1 $0.000000001\n",
			"key-day    key+model  k / m    normal  $0.50           $0.00           $0.00         -$0.50  day (over)                        gw-9 gone cd $2.00\n",
		}},
		{"budgets show", nil, []string{"TENANT  BUDGET", "acme    org-month"}},
		{"budgets credit acme org-month 12.50 --reason outage", admin.BudgetAdjustment{Tenant: "acme", Budget: "org-month", Amount: -125e8, Reason: "outage"}, []string{"credit of $12.50: $187.50 of org-month are spent now, $62.50 are left\n"}},
		{
			"budgets charge acme key-day 0.000000001 --subject k --subject m --at 2027-01 --reason twice --new-subject",
			admin.BudgetAdjustment{Tenant: "acme", Budget: "key-day", Subject: "k\x1fm", At: "2027-01", Amount: 1, Reason: "twice", NewSubject: true},
			[]string{"charge of $0.000000001"},
		},
		{"budgets charge --global fleet 5 --reason x", admin.BudgetAdjustment{Budget: "fleet", Amount: 5e9, Reason: "x"}, []string{"of fleet"}},
		{"budgets holders", nil, []string{"NODE         INCARNATION  OUTSTANDING   ACCOUNTS\ngw-9 (gone)  cd           $2.00         1\n"}},
		{"budgets release gw-3 --incarnation cd --reason dead", admin.BudgetRelease{Node: "gw-3", Incarnation: "cd", Reason: "dead"}, []string{"$2.00 that gw-3 held are free again\n"}},
		{"usage export", admin.UsageQuery{Location: time.UTC, Format: admin.UsageCSV, Partial: true}, []string{"tenant,cost_usd\r\nacme,0.5\r\n"}},
		{
			"usage export --by key,day --from 2027-01-01 --tenant a --key k --user u --model m --json",
			admin.UsageQuery{By: []string{"key", "day"}, From: day, Tenant: "a", Key: "k", User: "u", Model: "m", Location: time.UTC, Format: admin.UsageJSON, Partial: true},
			nil,
		},
		{"usage top --by key,user --last 24h -n 3", 3, []string{"KEY  USER", `k    "a\x1b[2J"`, "3         30     40      $0.75  75%\n", "all", "$1.00  100%\n"}},
		{"node override --unavailable local --for 15m", admin.OverrideChange{Unavailable: "local", For: 15 * time.Minute}, []string{"answers local for 15m"}},
		{"node override --clear", admin.OverrideChange{}, []string{"no override"}},
		{"node override", nil, []string{"deny until 2026-06-01T12:00:00Z, by ops"}},
		{"node kill tenant acme --for 15m", admin.KillSwitch{Kind: "tenant", Name: "acme", On: true, For: 15 * time.Minute}, []string{"tenant acme is killed on this node for 15m"}},
		{"node kill", nil, []string{"global", "2026-06-01T12:00:00Z"}},
		{"node revive global", admin.KillSwitch{Kind: "global"}, []string{"everything is no longer killed on this node"}},
		{"ledger inspect", nil, []string{"leader   gw-2", "voters   gw-1, gw-2", "keys     3"}},
	} {
		f.asked()
		r := runCLI(t, f.env(), strings.Fields(c.args)...)
		if r.code != 0 {
			t.Errorf("headgate %s: exit code %d: %s", c.args, r.code, r.stderr)
			continue
		}
		if got := f.asked(); !reflect.DeepEqual(got, c.want) {
			t.Errorf("headgate %s: asked for %+v, want %+v", c.args, got, c.want)
		}
		contains(t, r.stdout, c.says...)
	}
}

// TestListingsAsJSON: every listing is also for programs.
func TestListingsAsJSON(t *testing.T) {
	t.Parallel()
	f := startCluster(t)
	for _, args := range []string{
		"budgets show", "budgets holders", "usage top", "status", "members", "policy revisions", "policy show", "keys list", "kill", "ladder show", "backends", "audit", "tokens list", "node override", "node kill", "ledger inspect",
	} {
		r := runCLI(t, f.env(), append(strings.Fields(args), "--json")...)
		if r.code != 0 || !json.Valid([]byte(r.stdout)) {
			t.Errorf("headgate %s: %+v", args, r)
		}
	}
}

// TestWrongUse asks nothing and says what is wrong; what the node refuses comes in its words.
func TestWrongUse(t *testing.T) {
	t.Parallel()
	f := startCluster(t)
	policy := writeFile(t, "policy.yaml", "version: 1\n")
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"apply", 2, "--rollback"},
		{"apply -f x --rollback 3", 2, "--rollback"},
		{"apply -f " + policy + " --expected 3", 1, "revision 4 is in force, not 3"},
		{"kill tenant", 2, "tenant NAME"},
		{"kill global all", 2, "say what"},
		{"kill tenants acme", 2, "global, model, tenant, key"},
		{"revive", 2, "say what"},
		{"node kill tenant acme", 2, "--for 15m"},
		{"node kill tenant acme --for 25h", 2, "not between"},
		{"node override --unavailable deny", 2, "say both"},
		{"node override --clear --for 1m", 2, "no other flag"},
		{"ladder set clamp up", 2, "neither on nor off"},
		{"drain", 2, "takes one argument"},
		{"drain a b", 2, "takes one argument"},
		{"drain vllm-a --for soon", 2, "for: "},
		{"undrain", 2, "takes one argument"},
		{"undrain vllm-a --for 1h", 2, "unknown flag: --for"},
		{"backends vllm-a", 2, "takes no argument"},
		{"tokens create ops", 2, "--role"},
		{"tokens create ops --role boss", 2, "read, operate, admin"},
		{"keys rotate k --overlap soon", 2, "--overlap"},
		{"keys create --tenant acme --expires soon", 2, "--expires"},
		{"keys create --tenant later", 1, "2 of 3 voters are out of reach; headgate docs recover"},
		{"keys revoke", 2, "takes one argument"},
		{"ledger backup", 2, "name the file"},
		{"budgets show nobody", 1, "no such tenant"},
		{"budgets show a b", 2, "takes one argument"},
		{"budgets spend", 2, "unknown command"},
		{"budgets credit acme org-month", 2, "takes 3 arguments, not 2"},
		{"budgets credit --global acme org-month 1", 2, "takes 2 arguments, not 3"},
		{"budgets credit acme org-month 1", 2, "--reason"},
		{"budgets credit acme org-month 0 --reason x", 2, "not above zero"},
		{"budgets charge acme org-month 1e15 --reason x", 2, "not an amount of money"},
		{"budgets charge acme org-month 1 --reason x --at soon", 2, "--at"},
		{"budgets release gw-3 --reason x", 2, "budgets holders"},
		{"budgets release gw-3 --incarnation cd", 2, "--reason"},
		{"budgets release gw-3 --incarnation gw-3 --reason x", 2, "is not one"},
		{"usage export --by colour", 2, "by: "},
		{"usage export --format xml", 2, "neither csv nor json"},
		{"usage export --from soon", 2, "from: "},
		{"usage export --time-zone Mars", 2, "time_zone"},
		{"usage top -n 0", 2, "not between"},
		{"usage top --last soon", 2, "--last"},
		{"usage top --last 1h --from 7d", 2, "exclude each other"},
		{"usage export --last soon", 2, "--last"},
		{"usage export --last 0d", 2, "--last"},
		{"ledger restore none", 2, "none"},
		{"ledger inspect --file none", 1, "none"},
		{"ledger inspect --file x --data-dir y", 2, "exclude each other"},
		{"ledger inspect --data-dir none", 1, "there is no ledger"},
		{"ledger recover", 2, "name the data folder"},
		{"ledger recover --data-dir none", 2, "no node-id"},
		{"audit --limit 0", 2, "not between"},
		{"status --token-file none", 2, "--token-file"},
		{"status --ca none", 2, "--ca"},
	} {
		f.asked()
		r := runCLI(t, f.env(), strings.Fields(c.args)...)
		if got := f.asked(); c.code == 2 && got != nil {
			t.Errorf("headgate %s asked for %+v", c.args, got)
		}
		if r.code != c.code || !strings.Contains(r.stderr, c.says) {
			t.Errorf("headgate %s: %+v", c.args, r)
		}
	}
}

// TestUsageOfNobody is nothing, which may be a slip.
func TestUsageOfNobody(t *testing.T) {
	t.Parallel()
	f := startCluster(t)
	for _, args := range []string{"usage export --tenant acmee", "usage top --tenant acmee", "usage top --tenant acmee --json"} {
		r := runCLI(t, f.env(), strings.Fields(args)...)
		if r.code != 0 || !strings.Contains(r.stderr, `warning: there is no tenant "acmee" now; did you mean "acme"?`) {
			t.Errorf("headgate %s: %+v", args, r)
		}
	}
	if r := runCLI(t, f.env(), "usage", "export", "--tenant", "acme"); r.code != 0 || r.stderr != "" {
		t.Errorf("%+v", r)
	}
}

// TestMissingUsage: what there is is printed, and the rest is an error.
func TestMissingUsage(t *testing.T) {
	t.Parallel()
	f := startCluster(t)
	for args, says := range map[string]string{
		"usage export --tenant half": "acme,0.5", "usage top --tenant half": "$1.00", "usage top --tenant half --json": `"node": "gw-3"`,
	} {
		r := runCLI(t, f.env(), strings.Fields(args)...)
		if r.code != 1 || !strings.Contains(r.stdout, says) || !strings.Contains(r.stderr, "missing: gw-3 (no answer)") {
			t.Errorf("headgate %s: %+v", args, r)
		}
	}
	if r := runCLI(t, f.env(), "usage", "export", "--tenant", "half"); !strings.Contains(r.stderr, "headgate usage export --dir DATA_DIR/usage reads") {
		t.Errorf("%+v", r)
	}
	cutting := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "tenant,cost")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(cutting.Close)
	r := runCLI(t, []string{"HEADGATE_ADMIN=" + cutting.URL, "HEADGATE_ADMIN_TOKEN=" + cliToken}, "usage", "export")
	if r.code != 1 || r.stdout != "tenant,cost" || !strings.Contains(r.stderr, "broke off") {
		t.Errorf("%+v", r)
	}
}

// TestTokens: from a file, too small, wrong, or none.
func TestTokens(t *testing.T) {
	t.Parallel()
	f := startCluster(t)
	file := writeFile(t, "token", "read-token\n")
	if r := runCLI(t, f.env(), "status", "--token-file", file); r.code != 0 {
		t.Errorf("%+v", r)
	}
	r := runCLI(t, f.env(), "kill", "tenant", "acme", "--token-file", file)
	if r.code != 1 || !strings.Contains(r.stderr, `this needs a token with the role operate; "looker" has the role read`) {
		t.Errorf("%+v", r)
	}
	r = runCLI(t, []string{"HEADGATE_ADMIN=" + f.url, "HEADGATE_ADMIN_TOKEN=guess"}, "status")
	if r.code != 1 || !strings.Contains(r.stderr, "missing or wrong") {
		t.Errorf("%+v", r)
	}
	if r = runCLI(t, f.env(), "status", "--token-file", writeFile(t, "empty", "\n")); r.code != 2 || !strings.Contains(r.stderr, "is empty") {
		t.Errorf("%+v", r)
	}
}

// TestAnAnswerThatIsLost may be one to a change that was made.
func TestAnAnswerThatIsLost(t *testing.T) {
	t.Parallel()
	aborting := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	t.Cleanup(aborting.Close)
	cutting := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "{")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(cutting.Close)
	closed := httptest.NewServer(nil)
	closed.Close()
	const unknown, none = "may or may not have been done", "is it running"
	for _, c := range []struct{ url, args, says, not string }{
		{aborting.URL, "kill tenant acme", unknown, none},
		{aborting.URL, "ledger restore " + emptyBackup(t), unknown, none},
		{aborting.URL, "status", none, unknown},
		{cutting.URL, "kill tenant acme", unknown, none},
		{cutting.URL, "ledger restore " + emptyBackup(t), unknown, none},
		{cutting.URL, "status", "the answer broke off", unknown},
		{closed.URL, "kill tenant acme", none, unknown},
	} {
		r := runCLI(t, []string{"HEADGATE_ADMIN=" + c.url, "HEADGATE_ADMIN_TOKEN=" + cliToken}, strings.Fields(c.args)...)
		if r.code != 1 || !strings.Contains(r.stderr, c.says) || strings.Contains(r.stderr, c.not) {
			t.Errorf("headgate %s: %+v", c.args, r)
		}
	}
}

// emptyBackup is a file that a restore would take.
func emptyBackup(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	if err := ledger.NewState().Capture().Write(&b); err != nil {
		t.Fatal(err)
	}
	return writeFile(t, "headgate.backup", b.String())
}

// TestAdminOverTLS: the node's authority comes with --ca.
func TestAdminOverTLS(t *testing.T) {
	t.Parallel()
	f := &fakeCluster{}
	s := httptest.NewUnstartedServer(admin.Handler(f.config()))
	s.Config.ErrorLog = nil
	s.StartTLS()
	t.Cleanup(s.Close)
	f.url = s.URL
	ca := writeFile(t, "ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
	if r := runCLI(t, f.env(), "status", "--ca", ca); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if r := runCLI(t, f.env("HEADGATE_CA="+ca), "status"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if r := runCLI(t, f.env(), "status"); r.code != 1 || !strings.Contains(r.stderr, "with --ca") {
		t.Errorf("%+v", r)
	}
	f.url = strings.Replace(s.URL, "https:", "http:", 1)
	if r := runCLI(t, f.env(), "status"); r.code != 1 || !strings.Contains(r.stderr, "has TLS: write https://, not http://") {
		t.Errorf("%+v", r)
	}
	if r := runCLI(t, f.env(), "status", "--ca", writeFile(t, "junk.pem", "junk")); r.code != 2 || !strings.Contains(r.stderr, "holds no certificate") {
		t.Errorf("%+v", r)
	}
}

// TestWhatIsNoNode is told from a node.
func TestWhatIsNoNode(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusFound)
	}))
	t.Cleanup(s.Close)
	r := runCLI(t, []string{"HEADGATE_ADMIN=" + s.URL, "HEADGATE_ADMIN_TOKEN=x"}, "status")
	if r.code != 1 || !strings.Contains(r.stderr, "status 302 from what answers at --admin") {
		t.Errorf("%+v", r)
	}
}

// TestWrongAddress is told from a node that is not there.
func TestWrongAddress(t *testing.T) {
	t.Parallel()
	f := startCluster(t)
	host := strings.TrimPrefix(f.url, "http://")
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", cliPolicy(startFake(t), 100, "")))
	for url, want := range map[string]struct {
		code int
		says string
	}{
		host: {2, "write http://" + host}, "localhost": {2, "write http://localhost"}, "ftp://" + host: {2, "neither http nor https"}, "https://" + host: {1, "write http://, not https://"},
		n.front: {1, "is the front door of a node: the admin API is at its --admin-listen"},
	} {
		if r := runCLI(t, []string{"HEADGATE_ADMIN_TOKEN=" + cliToken}, "status", "--admin", url); r.code != want.code || !strings.Contains(r.stderr, want.says) {
			t.Errorf("%s: %+v", url, r)
		}
	}
}

// TestBackupFile: whole or not at all, and readable by its owner only.
func TestBackupFile(t *testing.T) {
	t.Parallel()
	f := startCluster(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "b.backup")
	for flag, stale := range map[string]bool{"--stale=false": false, "--stale": true} {
		r := runCLI(t, f.env(), "ledger", "backup", "-o", file, flag)
		if report, err := ledger.InspectFile(file); r.code != 0 || err != nil || report.Keys != 0 || f.asked() != stale {
			t.Errorf("%+v %v %+v", r, err, report)
		}
	}
	if r := runCLI(t, nil, "ledger", "inspect", "--file", file); r.code != 0 || !strings.Contains(spaced(r.stdout), "keys 0\n") {
		t.Errorf("%+v", r)
	}
	if r := runCLI(t, f.env(), "ledger", "restore", writeFile(t, "junk", "junk")); r.code != 2 || f.asked() != nil {
		t.Errorf("junk was sent: %+v", r)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	r := runCLI(t, f.env(), "ledger", "restore", file, "--force")
	if got := fmt.Sprint(f.asked()); r.code != 0 || !strings.HasSuffix(got, "true") || !strings.Contains(r.stdout, "state 0123456789ab") {
		t.Errorf("%+v %s", r, got)
	}

	broken := f.config()
	broken.Backup = func(_ context.Context, _ admin.Actor, w io.Writer, _ bool) error {
		_, _ = w.Write(bytes.Repeat([]byte("part"), 1<<12))
		return io.ErrUnexpectedEOF
	}
	s := httptest.NewUnstartedServer(admin.Handler(broken))
	s.Config.ErrorLog = nil
	s.Start()
	t.Cleanup(s.Close)
	none := filepath.Join(dir, "none.backup")
	if r := runCLI(t, []string{"HEADGATE_ADMIN=" + s.URL, "HEADGATE_ADMIN_TOKEN=" + cliToken}, "ledger", "backup", "-o", none); r.code != 1 {
		t.Errorf("%+v", r)
	}
	if list, err := filepath.Glob(filepath.Join(dir, "*none*")); err != nil || len(list) != 0 {
		t.Errorf("a broken backup left %v", list)
	}
}

// TestOfflineKeyIsAPolicysKey: the printed lines say what the flags said.
func TestOfflineKeyIsAPolicysKey(t *testing.T) {
	t.Parallel()
	r := runCLI(t, nil, "keys", "create", "--offline", "--tenant", "dev", "--id", "k", "--name", `"q"`, "--user", "u", "--class", "background", "--expires", "2027-01-01",
		"--models", "m", "--routes", "chat,models", "--surfaces", "*", "--assert-user")
	if r.code != 0 {
		t.Fatal(r.stderr)
	}
	_, lines, _ := strings.Cut(r.stdout, "\n")
	p, err := ledger.ParsePolicy([]byte(cliPolicy("http://127.0.0.1:1", 100, lines)))
	if err != nil {
		t.Fatalf("%v in %s", err, lines)
	}
	k := p.Keys[0]
	if k.ID != "k" || k.Name != `"q"` || k.User != "u" || k.Class != "background" || !k.AssertUser || k.Surfaces[0] != "*" || len(k.Routes) != 2 || k.Models[0] != "m" ||
		!time.Time(k.Expires).Equal(time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)) {
		t.Errorf("%+v", k)
	}
}

// TestEveryCommandHelps: help has a sentence, and examples where there are flags to set.
func TestEveryCommandHelps(t *testing.T) {
	t.Parallel()
	for _, args := range []string{"apply", "kill", "keys create", "keys rotate", "tokens create", "node override", "ledger backup", "ledger restore", "members", "audit", "doctor", "budgets show", "budgets credit", "budgets charge", "budgets holders", "budgets release", "usage export", "usage top", "demo", "docs", "status", "explain"} {
		r := runCLI(t, nil, append(strings.Fields(args), "--help")...)
		if r.code != 0 {
			t.Errorf("%+v", r)
		}
		contains(t, r.stdout, "Usage:", "Examples:\n  headgate "+args)
	}
}
