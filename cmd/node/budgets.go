package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"headgate/cluster/ledger"
	"headgate/proxy/admin"
)

// maxBudgetsShown bounds the accounts of one answer: those that have spent the greatest part of
// their amount.
const maxBudgetsShown = 10_000

// budgetRule is a budget of the policy as it applies to a tenant, or to all.
type budgetRule struct {
	tenant   string // "": all share its accounts
	bucket   string
	name     string
	scope    string
	subject  []string // what an account's subject is made of, in that order
	period   string
	strict   bool
	amount   int64
	revision uint64 // of amount
	zone     string
	at       func(time.Time) (start, end int64)
}

// budgetOwner is where an account's budget is found.
type budgetOwner struct{ tenant, bucket string }

// rulesOf a caller's budgets.
func rulesOf(c *ledger.Caller) []budgetRule {
	out := make([]budgetRule, 0, len(c.Budgets))
	for _, b := range c.Budgets {
		r := budgetRule{
			bucket: b.Bucket, name: b.Name, scope: b.Scope, period: b.Period, strict: b.Strict, amount: b.Terms.Amount, revision: b.Terms.Revision, at: b.Calendar.At,
			zone: cmp.Or(b.TimeZone, "UTC"),
		}
		parts := strings.Split(b.Scope, "+")
		if slices.Contains(parts, "key") || slices.Contains(parts, "user") || slices.Contains(parts, "org") {
			r.tenant = c.Tenant.Name
		}
		for _, part := range [...]string{"key", "user", "model"} { // as requests name them
			if slices.Contains(parts, part) {
				r.subject = append(r.subject, part)
			}
		}
		out = append(out, r)
	}
	return out
}

// budgetRules are those of one tenant, or of all where tenant is "".
func (n *Node) budgetRules(tenant string) ([]budgetRule, error) {
	s := n.current()
	if s.index == nil {
		return nil, admin.Errorf(admin.Conflict, "no policy is in force on this node yet")
	}
	if tenant != "" {
		c, ok := s.index.Tenant(tenant)
		if !ok {
			return nil, noTenant(s.index.Policy, tenant)
		}
		return rulesOf(&c), nil
	}
	var out []budgetRule
	shared := map[string]bool{}
	for _, t := range s.index.Policy.Tenants {
		c, ok := s.index.Tenant(t.Name)
		if !ok {
			continue
		}
		for _, r := range rulesOf(&c) {
			if r.tenant == "" {
				if shared[r.bucket] {
					continue
				}
				shared[r.bucket] = true
			}
			out = append(out, r)
		}
	}
	return out, nil
}

// budgets shows accounts: of a tenant, or of all.
func (n *Node) budgets(_ context.Context, tenant string) ([]admin.Budget, error) {
	rules, err := n.budgetRules(tenant)
	if err != nil {
		return nil, err
	}
	accounts := n.cluster.Ledger().Budgets(func(a *ledger.BudgetAccount) bool {
		return tenant == "" || a.Key.Tenant == "" || a.Key.Tenant == tenant
	}, ledger.MaxBudgets)
	return showBudgets(rules, accounts, tenant == "", n.wall(), n.memberNames()), nil
}

// memberNames are the members of the view by incarnation.
func (n *Node) memberNames() map[uint64]string {
	out := map[uint64]string{}
	for _, m := range n.cluster.Fence().Ring().Members() {
		out[m.Incarnation] = m.Name
	}
	return out
}

// showBudgets are the accounts of the periods that run, and what is still held of others. all: also
// those of budgets that rules do not have.
func showBudgets(rules []budgetRule, accounts []ledger.BudgetAccount, all bool, now time.Time, names map[uint64]string) []admin.Budget {
	byOwner := make(map[budgetOwner]*budgetRule, len(rules))
	for i := range rules {
		byOwner[budgetOwner{rules[i].tenant, rules[i].bucket}] = &rules[i]
	}
	out := []admin.Budget{}
	live := map[budgetOwner]bool{} // has an account
	for i := range accounts {
		a := &accounts[i]
		owner := budgetOwner{a.Key.Tenant, a.Key.Limit}
		rule := byOwner[owner]
		runs := a.Key.End == 0 || a.Key.Start <= now.UnixNano() && now.UnixNano() < a.Key.End
		if rule != nil && runs {
			start, end := rule.at(now)
			runs = start == a.Key.Start && end == a.Key.End // else the policy changed its period
		}
		switch {
		case rule != nil && runs:
			live[owner] = true
		case a.Outstanding() == 0, rule == nil && !all && a.Key.Tenant == "":
			continue
		}
		b := showAccount(a, rule, names)
		b.Stale = rule == nil || !runs
		out = append(out, b)
	}
	for i := range rules {
		r := &rules[i]
		if len(r.subject) > 0 || live[budgetOwner{r.tenant, r.bucket}] {
			continue
		}
		start, end := r.at(now) // nobody has spent of it yet
		out = append(out, showAccount(&ledger.BudgetAccount{Key: accountKey(r, "", start, end)}, r, names))
	}
	if len(out) > maxBudgetsShown {
		slices.SortFunc(out, func(a, b admin.Budget) int { return cmp.Compare(b.Percent, a.Percent) })
		out = out[:maxBudgetsShown]
	}
	slices.SortFunc(out, func(a, b admin.Budget) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Budget, b.Budget), cmp.Compare(a.Subject, b.Subject), a.Start.Compare(b.Start), a.End.Compare(b.End))
	})
	return out
}

func accountKey(r *budgetRule, subject string, start, end int64) (k ledger.BudgetKey) {
	k.Tenant, k.Limit, k.Subject, k.Start, k.End = r.tenant, r.bucket, subject, start, end
	return k
}

// showAccount words one account for people. rule is nil where the policy has the budget no more.
func showAccount(a *ledger.BudgetAccount, rule *budgetRule, names map[uint64]string) admin.Budget {
	b := admin.Budget{
		Tenant: a.Key.Tenant, Budget: a.Key.Limit, Subject: a.Key.Subject, Amount: admin.USD(a.Terms.Amount), Spent: admin.USD(a.Spent),
		Outstanding: admin.USD(a.Outstanding()), Passed: a.Crossed, Holders: []admin.BudgetHolder{},
	}
	if a.Key.End != 0 {
		b.Start, b.End = time.Unix(0, a.Key.Start).UTC(), time.Unix(0, a.Key.End).UTC()
	}
	if rule != nil {
		b.Scope, b.Period, b.Mode = rule.scope, rule.period, "normal"
		if rule.strict {
			b.Mode = "strict"
		}
		if rule.revision >= a.Terms.Revision { // the account learns of it with the next block
			b.Amount = admin.USD(rule.amount)
		}
	}
	b.Left = b.Amount - b.Spent - b.Outstanding
	if b.Amount > 0 {
		b.Percent = 100 * float64(b.Spent) / float64(b.Amount)
	}
	for _, h := range a.Holders {
		if h.Outstanding > 0 {
			b.Holders = append(b.Holders, budgetHolder(&h, h.Outstanding, names))
		}
	}
	slices.SortFunc(b.Holders, compareHolders)
	return b
}

// budgetHolder words a holder. names are those of the members of the view.
func budgetHolder(h *ledger.BudgetHolder, outstanding int64, names map[uint64]string) admin.BudgetHolder {
	name, here := names[h.Holder]
	return admin.BudgetHolder{Node: cmp.Or(name, h.Node), Gone: !here, Incarnation: fmt.Sprintf("%016x", h.Holder), Outstanding: admin.USD(outstanding)}
}

// compareHolders puts those first that may be gone for good.
func compareHolders(a, b admin.BudgetHolder) int {
	switch {
	case a.Gone && !b.Gone:
		return -1
	case b.Gone && !a.Gone:
		return 1
	}
	return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(b.Outstanding, a.Outstanding), cmp.Compare(a.Incarnation, b.Incarnation))
}

// holders are the processes that hold something of any budget.
func (n *Node) holders(context.Context) ([]admin.BudgetHolder, error) {
	return sumHolders(n.cluster.Ledger().Budgets(nil, ledger.MaxBudgets), n.memberNames()), nil
}

func sumHolders(accounts []ledger.BudgetAccount, names map[uint64]string) []admin.BudgetHolder {
	sums := map[uint64]*admin.BudgetHolder{}
	for i := range accounts {
		for _, h := range accounts[i].Holders {
			if h.Outstanding <= 0 {
				continue
			}
			s := sums[h.Holder]
			if s == nil {
				fresh := budgetHolder(&h, 0, names)
				s = &fresh
				sums[h.Holder] = s
			}
			s.Outstanding, s.Accounts = plus(s.Outstanding, admin.USD(h.Outstanding)), s.Accounts+1
		}
	}
	out := make([]admin.BudgetHolder, 0, len(sums))
	for _, s := range sums {
		out = append(out, *s)
	}
	slices.SortFunc(out, compareHolders)
	return out
}

// adjustBudget corrects what an account has spent.
func (n *Node) adjustBudget(ctx context.Context, by admin.Actor, a admin.BudgetAdjustment) (admin.Adjusted, error) {
	rules, err := n.budgetRules(a.Tenant)
	if err != nil {
		return admin.Adjusted{}, err
	}
	rule, err := pickBudget(rules, &a)
	if err != nil {
		return admin.Adjusted{}, err
	}
	at, err := rule.when(a.At, n.wall())
	if err != nil {
		return admin.Adjusted{}, err
	}
	start, end := rule.at(at)
	key := accountKey(rule, a.Subject, start, end)
	if _, seen := n.cluster.Ledger().Budget(key); !seen && a.Subject != "" && !a.NewSubject {
		return admin.Adjusted{}, uncharged(rule, key, n.cluster.Ledger().Budgets(func(a *ledger.BudgetAccount) bool {
			return a.Key.Tenant == key.Tenant && a.Key.Limit == key.Limit && a.Key.Start == key.Start && a.Key.End == key.End
		}, ledger.MaxBudgets))
	}
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	if err := n.budgetError(n.cluster.Ledger().AdjustBudget(ctx, by.Name, key, int64(a.Amount), a.Reason)); err != nil {
		return admin.Adjusted{}, err
	}
	account, ok := n.cluster.Ledger().Budget(key)
	if !ok {
		account.Key = key // another change removed it meanwhile
	}
	shown := showAccount(&account, rule, nil)
	out := admin.Adjusted{Start: shown.Start, End: shown.End, Spent: shown.Spent, Left: shown.Left}
	if most := admin.USD(rule.amount); a.Amount/10 > most || a.Amount/10 < -most {
		out.Warnings = append(out.Warnings, "this is more than ten times the amount of the budget; was it meant? The opposite correction undoes it")
	}
	return out, nil
}

// maxNamed bounds the names that stand in an error.
const maxNamed = 8

// uncharged refuses to correct an account that is not there: it would be of nobody, where the subject is
// written wrongly. accounts are those of the same budget and period.
func uncharged(rule *budgetRule, key ledger.BudgetKey, accounts []ledger.BudgetAccount) error {
	subjects := make([]string, 0, len(accounts))
	for i := range accounts {
		subjects = append(subjects, accounts[i].Key.Subject)
	}
	return admin.Errorf(admin.NotFound, "nothing was charged to %s of budget %q in that period%s; --new-subject corrects it nevertheless",
		wordSubject(key.Subject), rule.name, others(key.Subject, subjects, "nor to anybody else", wordSubject))
}

// wordSubject is a subject for people.
func wordSubject(s string) string { return strconv.Quote(strings.ReplaceAll(s, "\x1f", " / ")) }

// others is the end of an error about a name that is none of names: the one that was meant, or else which
// there are; none where there is no other.
func others(name string, names []string, none string, word func(string) string) string {
	if len(names) == 0 {
		return ", " + none
	}
	slices.Sort(names)
	if meant := ledger.Nearest(name, names); meant != "" {
		return "; did you mean " + word(meant) + "?"
	}
	more := ""
	if len(names) > maxNamed {
		names, more = names[:maxNamed], ", …"
	}
	words := make([]string, 0, len(names))
	for _, n := range names {
		words = append(words, word(n))
	}
	return "; there are " + strings.Join(words, ", ") + more
}

// when is the moment that a correction means, in the budget's zone.
func (r *budgetRule) when(text string, now time.Time) (time.Time, error) {
	switch {
	case text == "":
		return now, nil
	case r.period == "none" || r.period == "rolling":
		return now, admin.Errorf(admin.Invalid, "at: budget %q has no periods (%s): leave it out", r.name, r.period)
	}
	zone, err := ledger.LoadZone(r.zone)
	if err != nil {
		return now, err
	}
	at, err := admin.ParseWhen(text, zone, now)
	if err != nil {
		return now, admin.Errorf(admin.Invalid, "at: %v", err)
	}
	return at, nil
}

// pickBudget finds the budget that a correction means, and checks whom it is for.
func pickBudget(rules []budgetRule, a *admin.BudgetAdjustment) (*budgetRule, error) {
	var found *budgetRule
	for i := range rules {
		r := &rules[i]
		if r.bucket != a.Budget && r.name != a.Budget {
			continue
		}
		switch {
		case a.Tenant == "" && r.tenant != "":
			continue
		case a.Tenant != "" && r.tenant == "":
			return nil, admin.Errorf(admin.Invalid, "budget: all tenants share %q: correct it without naming one (--global)", a.Budget)
		case found != nil:
			return nil, admin.Errorf(admin.Invalid, "budget: %q may be %q or %q; say which", a.Budget, found.bucket, r.bucket)
		}
		found = r
	}
	if found == nil {
		return nil, noBudget(rules, a)
	}
	var parts []string
	if a.Subject != "" {
		parts = strings.Split(a.Subject, "\x1f")
	}
	if len(parts) != len(found.subject) {
		want := "nobody in particular"
		if len(found.subject) > 0 {
			want = "one " + strings.Join(found.subject, ", one ")
		}
		return nil, admin.Errorf(admin.Invalid, "subject: budget %q is for %s", a.Budget, want)
	}
	return found, nil
}

// noTenant is the error about a tenant that the policy does not have.
func noTenant(p *ledger.Policy, name string) error {
	names := make([]string, 0, len(p.Tenants))
	for i := range p.Tenants {
		names = append(names, p.Tenants[i].Name)
	}
	return admin.Errorf(admin.NotFound, "there is no tenant %q%s (headgate policy show)", name, others(name, names, "nor any other", strconv.Quote))
}

// noBudget is the error about a budget that rules do not have.
func noBudget(rules []budgetRule, a *admin.BudgetAdjustment) error {
	var names []string
	for i := range rules {
		if a.Tenant == "" && rules[i].tenant != "" {
			continue
		}
		if !slices.Contains(names, rules[i].name) {
			names = append(names, rules[i].name)
		}
	}
	of, show := fmt.Sprintf("tenant %q has no budget %q", a.Tenant, a.Budget), " "+a.Tenant
	if a.Tenant == "" {
		of, show = fmt.Sprintf("all tenants share no budget %q", a.Budget), ""
	}
	return admin.Errorf(admin.NotFound, "%s%s; headgate budgets show%s lists them", of, others(a.Budget, names, "nor any other", strconv.Quote), show)
}

// releaseBudget gives back what a process held that does not come back.
func (n *Node) releaseBudget(ctx context.Context, by admin.Actor, b admin.BudgetRelease) (admin.Released, error) {
	holder, err := admin.ParseIncarnation(b.Incarnation)
	if err != nil {
		return admin.Released{}, &admin.Error{Code: admin.Invalid, Err: err}
	}
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	freed, err := n.cluster.Ledger().ReleaseHolder(ctx, by.Name, holder, b.Node, b.Reason)
	return admin.Released{Freed: admin.USD(freed)}, n.budgetError(err)
}

// budgetError gives what the ledger said of a budget its code.
func (n *Node) budgetError(err error) error {
	var period *ledger.PeriodError
	var refused *ledger.Refusal
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ledger.ErrNoBudget):
		return admin.Errorf(admin.NotFound, "the ledger has nothing of this budget in that period any more")
	case errors.Is(err, ledger.ErrBudgetFull), errors.As(err, &period):
		return &admin.Error{Code: admin.Conflict, Err: err}
	case errors.As(err, &refused):
		return refusal(err)
	case errors.Is(err, ledger.ErrWallOff): // nothing was done
		return &admin.Error{Code: admin.NoQuorum, Err: err}
	}
	return n.notProposed(err)
}
