package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/lease/budget"
	"headgate/limiter"
	"headgate/proxy/journal"
)

// What a request costs, and what its budget has: enough for all.
const (
	cost   = 1_000_000 // a tenth of a cent
	amount = 1 << 58
)

// steady is the pace, in decisions a second of all nodes, at which the time that one takes is held against its aim.
const steady = 20_000

// Names of the contenders of decisions.
const (
	leased  = "blocks in hand"
	direct  = "each draws"
	commits = "one commit each"
	redised = "Redis, fsync always"
)

func callersOf() []int  { return []int{1, 16, 64} }
func accountsOf() []int { return []int{1, 1000} }

// decisions measures three nodes that decide and record, with blocks in hand and without, and what a gateway
// without blocks would do: a commit for each.
func decisions(ctx context.Context, c config, dir string, rep *report) (err error) {
	w, err := openWorld(ctx, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	leader := w.leader()
	for _, callers := range callersOf() {
		s, err := drive(ctx, callers, c.each, 0, func(int, int) error {
			_, err := leader.ledger.Propose(ctx, tiny())
			return err
		})
		if err != nil {
			return fmt.Errorf("commits: %w", err)
		}
		rep.add(key{commits, callers, 0, 0}, s)
	}
	for _, accounts := range accountsOf() {
		cells := []key{{leased, 64, accounts, steady}}
		for _, callers := range callersOf() {
			cells = append(cells, key{leased, callers, accounts, 0})
			if err := w.measure(ctx, c, rep, []key{{direct, callers, accounts, 0}}); err != nil {
				return fmt.Errorf("%s, %d callers, %d accounts: %w", direct, callers, accounts, err)
			}
		}
		if err := w.measure(ctx, c, rep, cells); err != nil {
			return fmt.Errorf("%s, %d accounts: %w", leased, accounts, err)
		}
	}
	return nil
}

// tiny is as small a change as there is.
func tiny() *ledgerpb.Command {
	return &ledgerpb.Command{Version: 1, Actor: "bench", Body: &ledgerpb.Command_SetKill{SetKill: &ledgerpb.SetKill{
		Kind: ledgerpb.KillKind_KILL_KIND_TENANT, Name: "nobody", On: true,
	}}}
}

// till is one caller's: it decides as cmd/node's money does, and keeps what it needs for that.
type till struct {
	w        *world
	purses   *purses
	accounts []limiter.Key
	calendar ledger.Calendar
	terms    *budget.Terms
	charges  [1]budget.Charge
	taken    [1]budget.Taken
	parts    [1]journal.Part
	r        journal.Reservation
	u        journal.Usage
}

func (t *till) decide(ctx context.Context, node, account int) error {
	m, j := t.purses.each[node], t.w.nodes[node].journal
	k := budget.Key{Key: t.accounts[account]}
	k.Start, k.End = t.calendar.At(time.Unix(0, m.Now()))
	t.charges[0] = budget.Charge{Key: k, Terms: t.terms, Cost: cost}
	if err := m.Take(ctx, t.charges[:], t.taken[:]); err != nil {
		return err
	}
	t.parts[0] = journal.Part{Account: journal.Account{Tenant: k.Tenant, Budget: k.Limit, Subject: k.Subject, Start: k.Start, End: k.End}, Amount: cost}
	t.r.Time, t.r.Parts = time.Now(), t.parts[:]
	if err := j.Reserve(&t.r); err != nil {
		return err
	}
	// Here a request goes to its backend.
	t.u.ID, t.u.Time, t.u.Started, t.u.Parts = t.r.ID, time.Now(), t.r.Time, t.parts[:]
	if err := j.Settle(&t.u); err != nil {
		return err
	}
	m.Settle(t.taken[:], cost)
	return nil
}

// tills makes one for each caller.
func (w *world) tills(p *purses, accounts, callers int) ([]*till, error) {
	calendar, err := ledger.CalendarOf("month", "Europe/Berlin")
	if err != nil {
		return nil, err
	}
	terms := &budget.Terms{Amount: amount, Revision: 1, Alerts: []int{50, 80, 100}, Name: "user-month"}
	keys := make([]limiter.Key, accounts)
	for i := range keys {
		keys[i] = limiter.Key{Tenant: "acme", Limit: p.budget, Subject: fmt.Sprintf("user-%d@example.com", i)}
	}
	ts := make([]*till, callers)
	for i := range ts {
		ts[i] = &till{w: w, purses: p, accounts: keys, calendar: calendar, terms: terms, r: reservation(), u: usage()}
	}
	return ts, nil
}

// mostCallers is at least what callersOf says.
const mostCallers = 64

// measure takes a sample of each cell, with purses of their own, and sees whether the ledger has all that was spent.
// The cells are of one contender and as many accounts.
func (w *world) measure(ctx context.Context, c config, rep *report, cells []key) error {
	who, accounts := cells[0].who, cells[0].accounts
	p, err := w.open(ctx, who == direct)
	if err != nil {
		return err
	}
	decided, err := w.sample(ctx, c, rep, cells, p)
	if err = errors.Join(err, p.close(ctx)); err != nil {
		return err
	}
	leader := w.leader()
	if err := leader.ledger.Barrier(ctx); err != nil {
		return err
	}
	var spent, outstanding int64
	for _, a := range leader.ledger.Budgets(func(a *ledger.BudgetAccount) bool { return a.Key.Limit == p.budget }, accounts) {
		spent += a.Spent
		outstanding += a.Outstanding()
	}
	if spent != decided*cost || outstanding != 0 {
		return fmt.Errorf("%d decisions of %d nano-dollars, but the ledger has %d spent and %d outstanding", decided, cost, spent, outstanding)
	}
	return nil
}

func (w *world) sample(ctx context.Context, c config, rep *report, cells []key, p *purses) (decided int64, err error) {
	accounts := cells[0].accounts
	ts, err := w.tills(p, accounts, mostCallers)
	if err != nil {
		return 0, err
	}
	// Each caller goes round the nodes and the accounts, from a place of its own.
	op := func(caller, turn int) error {
		at := caller*7919 + turn
		return ts[caller].decide(ctx, at%nodes, at%accounts)
	}
	if err := warm(ctx, ts, accounts); err != nil {
		return 0, fmt.Errorf("warming up: %w", err)
	}
	decided = int64(nodes * accounts)
	if cells[0].who == leased { // until the blocks fit the demand
		s, err := drive(ctx, mostCallers, c.settle(), steady, op)
		decided += s.ops
		if err != nil {
			return decided, err
		}
	}
	for _, k := range cells {
		before := p.draws.Load()
		s, err := drive(ctx, k.callers, c.each, k.pace, op)
		s.draws = p.draws.Load() - before
		decided += s.ops
		if err != nil {
			return decided, err
		}
		rep.add(k, s)
	}
	return decided, nil
}

// warm has every account known on every node.
func warm(ctx context.Context, ts []*till, accounts int) error {
	var wg sync.WaitGroup
	errs := make([]error, len(ts))
	for i, t := range ts {
		wg.Go(func() {
			for at := i; at < nodes*accounts && errs[i] == nil; at += len(ts) {
				errs[i] = t.decide(ctx, at%nodes, at/nodes)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
