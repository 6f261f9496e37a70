package node

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"headgate/cluster/ledger"
	"headgate/limiter"
	"headgate/proxy/admin"
)

var budgetNow = time.Date(2026, 6, 15, 12, 0, 0, 0, time.UTC)

// budgetPolicy has a budget of each kind.
const budgetPolicy = `
version: 1
backends: [{name: b, url: "http://127.0.0.1:1"}]
models: [{name: m, backends: [b], price_per_million: {input: "1.00", output: "2.00"}}]
plans:
  - name: pro
    budgets:
      - {name: month, scope: org, amount: "250.00", period: month, mode: strict}
      - {name: each, scope: key+model, amount: "1.00", period: day}
      - {name: model, scope: model, amount: "9.00", period: none}
  - {name: free, budgets: [{name: model, scope: model, amount: "1.00", period: none}]}
tenants: [{name: acme, plan: pro}, {name: other, plan: pro}, {name: poor, plan: free}]
global: {budgets: [{name: fleet, scope: global, amount: "1000.00", period: rolling, window: 24h}]}
`

// testRules are those of a tenant under budgetPolicy, or of all, as Node.budgetRules has them.
func testRules(t *testing.T, tenant string) []budgetRule {
	t.Helper()
	p, err := ledger.ParsePolicy([]byte(budgetPolicy))
	if err != nil {
		t.Fatal(err)
	}
	ix, err := p.Index(budgetNow, 1, ledger.Share{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{}
	n.now.index = ix
	rules, err := n.budgetRules(tenant)
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

func TestBudgetRules(t *testing.T) {
	var got []string
	for _, r := range testRules(t, "") {
		start, end := r.at(budgetNow)
		got = append(got, fmt.Sprint(r.tenant, "|", r.bucket, " ", strings.Join(r.subject, ","), " ", r.strict, " ", r.amount/1e9, " ", time.Duration(end-start)))
	}
	want := []string{
		"acme|month  true 250 720h0m0s", "acme|each key,model false 1 24h0m0s", "|pro/model model false 9 0s", "|fleet  false 1000 0s",
		"other|month  true 250 720h0m0s", "other|each key,model false 1 24h0m0s", "|free/model model false 1 0s",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%q", got)
	}
	if got := len(testRules(t, "poor")); got != 2 {
		t.Errorf("%d rules of a tenant with one budget and the global one", got)
	}
	n := &Node{}
	var e *admin.Error
	if _, err := n.budgetRules(""); !errors.As(err, &e) || e.Code != admin.Conflict {
		t.Errorf("without a policy: %v", err)
	}
}

func account(tenant, bucket, subject string, start, end time.Time, amount, spent int64, holders ...ledger.BudgetHolder) ledger.BudgetAccount {
	a := ledger.BudgetAccount{
		Key: ledger.BudgetKey{Key: limiter.Key{Tenant: tenant, Limit: bucket, Subject: subject}}, Terms: ledger.BudgetTerms{Amount: amount}, Spent: spent, Holders: holders,
	}
	if !end.IsZero() {
		a.Key.Start, a.Key.End = start.UnixNano(), end.UnixNano()
	}
	return a
}

func TestShowBudgets(t *testing.T) {
	june, july := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC), time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)
	today := time.Date(2026, 6, 15, 0, 0, 0, 0, time.UTC)
	var none time.Time
	accounts := []ledger.BudgetAccount{
		account("acme", "month", "", june, july, 100e9, 200e9, ledger.BudgetHolder{Holder: 0xab, Outstanding: 10e9}, ledger.BudgetHolder{Holder: 0xcd, Node: "gw-9", Outstanding: 5e9}, ledger.BudgetHolder{Holder: 0xef, Spent: 1}),
		account("acme", "each", "k\x1fm", today, today.AddDate(0, 0, 1), 1e9, 2e9),
		account("acme", "each", "k\x1fm", today.AddDate(0, 0, -1), today, 1e9, 1e9),                                                                // over
		account("acme", "each", "l\x1fm", today.AddDate(0, 0, -1), today, 1e9, 1, ledger.BudgetHolder{Holder: 0xcd, Node: "gw-9", Outstanding: 2}), // over, and held
		account("", "pro/model", "m", none, none, 9e9, 1e9),
		account("acme", "was", "", none, none, 9e9, 1e9, ledger.BudgetHolder{Holder: 0xcd, Node: "gw-9", Outstanding: 3}), // not in the policy
		account("acme", "was", "x", none, none, 9e9, 1e9),
		account("", "gone/model", "m", none, none, 9e9, 1e9, ledger.BudgetHolder{Holder: 0xcd, Node: "gw-9", Outstanding: 3}),
	}
	names := map[uint64]string{0xab: "gw-1"}
	var got []string
	for _, b := range showBudgets(testRules(t, "acme"), accounts, false, budgetNow, names) {
		line := fmt.Sprintf("%s|%s %s %s %s of %s, %s out, %s left, %.0f%%", b.Tenant, b.Budget, b.Subject, b.Mode, b.Spent, b.Amount, b.Outstanding, b.Left, b.Percent)
		for _, h := range b.Holders {
			line += fmt.Sprintf(" %s/%s %s", h.Node, h.Incarnation[12:], h.Outstanding)
		}
		if b.Stale {
			line += " stale"
		}
		got = append(got, line)
	}
	want := []string{
		"|fleet  normal 0.00 of 1000.00, 0.00 out, 1000.00 left, 0%",
		"|pro/model m normal 1.00 of 9.00, 0.00 out, 8.00 left, 11%",
		"acme|each k\x1fm normal 2.00 of 1.00, 0.00 out, -1.00 left, 200%",
		"acme|each l\x1fm normal 0.000000001 of 1.00, 0.000000002 out, 0.999999997 left, 0% gw-9/00cd 0.000000002 stale",
		"acme|month  strict 200.00 of 250.00, 15.00 out, 35.00 left, 80% gw-9/00cd 5.00 gw-1/00ab 10.00", // the amount was raised
		"acme|was   1.00 of 9.00, 0.000000003 out, 7.999999997 left, 11% gw-9/00cd 0.000000003 stale",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	all := showBudgets(testRules(t, ""), accounts, true, budgetNow, names)
	if last := all[1]; last.Budget != "gone/model" || !last.Stale || len(all) != 8 {
		t.Errorf("of all: %+v", all)
	}

	holders := sumHolders(accounts, names)
	if want := []admin.BudgetHolder{{Node: "gw-9", Gone: true, Incarnation: "00000000000000cd", Outstanding: 5e9 + 8, Accounts: 4}, {Node: "gw-1", Incarnation: "00000000000000ab", Outstanding: 10e9, Accounts: 1}}; !reflect.DeepEqual(holders, want) {
		t.Errorf("%+v", holders)
	}
}

// TestManyBudgets: those that matter are shown.
func TestManyBudgets(t *testing.T) {
	today := time.Date(2026, 6, 15, 0, 0, 0, 0, time.UTC)
	var accounts []ledger.BudgetAccount
	for i := range maxBudgetsShown + 100 {
		accounts = append(accounts, account("acme", "each", fmt.Sprintf("k%05d\x1fm", i), today, today.AddDate(0, 0, 1), 1e9, int64(i)))
	}
	out := showBudgets(testRules(t, "acme"), accounts, false, budgetNow, nil)
	if len(out) != maxBudgetsShown || out[0].Subject != "k00100\x1fm" {
		t.Errorf("%d budgets, the first %+v", len(out), out[0])
	}
}

func TestPickBudget(t *testing.T) {
	for _, c := range []struct {
		a    admin.BudgetAdjustment
		want string // bucket, or what the error says
	}{
		{admin.BudgetAdjustment{Tenant: "acme", Budget: "month"}, "month"},
		{admin.BudgetAdjustment{Tenant: "acme", Budget: "each", Subject: "k\x1fm"}, "each"},
		{admin.BudgetAdjustment{Budget: "fleet"}, "fleet"},
		{admin.BudgetAdjustment{Budget: "pro/model", Subject: "m"}, "pro/model"},
		{admin.BudgetAdjustment{Budget: "model", Subject: "m"}, `may be "pro/model" or "free/model"`},
		{admin.BudgetAdjustment{Tenant: "acme", Budget: "mont"}, `tenant "acme" has no budget "mont"; did you mean "month"?`},
		{admin.BudgetAdjustment{Budget: "month"}, `all tenants share no budget "month"; there are "fleet", "model"; headgate budgets show lists them`},
		{admin.BudgetAdjustment{Tenant: "acme", Budget: "fleet"}, "--global"},
		{admin.BudgetAdjustment{Tenant: "acme", Budget: "month", Subject: "k"}, "nobody in particular"},
		{admin.BudgetAdjustment{Tenant: "acme", Budget: "each", Subject: "k"}, "one key, one model"},
		{admin.BudgetAdjustment{Tenant: "acme", Budget: "each"}, "one key, one model"},
	} {
		rule, err := pickBudget(testRules(t, c.a.Tenant), &c.a)
		switch {
		case err == nil && rule.bucket != c.want, err != nil && !strings.Contains(err.Error(), c.want):
			t.Errorf("%+v: %+v %v", c.a, rule, err)
		}
	}
}

func TestBudgetErrors(t *testing.T) {
	n := &Node{}
	for want, err := range map[admin.Code]error{
		admin.NotFound: fmt.Errorf("x: %w", ledger.ErrNoBudget), admin.Conflict: &ledger.PeriodError{Now: budgetNow}, admin.Invalid: &ledger.Refusal{Code: "invalid"}, admin.Unknown: ledger.ErrUnknownOutcome, admin.NoQuorum: ledger.ErrWallOff,
	} {
		var e *admin.Error
		if !errors.As(n.budgetError(err), &e) || e.Code != want || !errors.Is(e, e.Err) {
			t.Errorf("%v: %v", err, e)
		}
	}
	if n.budgetError(nil) != nil {
		t.Error("nothing is an error")
	}
}
