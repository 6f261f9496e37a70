package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"headgate/cluster/ledger/ledgerpb"
	"headgate/limiter"
)

// budgetsVersion is the least StateVersion that knows budgets.
const budgetsVersion = 3

var (
	// ErrBudgetFull says that a budget has no room in the ledger for another account, or an account
	// for another holder; nothing was done.
	ErrBudgetFull = errors.New("the ledger holds as many budgets' accounts, or holders of one, as it can: give fewer users or keys budgets of their own, or release holders that are gone")
	// ErrNotMember says that the holder is not in the view and so gets nothing; nothing was done. What
	// it spent it may still say, without wanting more.
	ErrNotMember = errors.New("the holder is not a member of the view in force")
	// ErrNoBudget says that there is no such account: it was forgotten, or never was. Nothing was done.
	ErrNoBudget = errors.New("the ledger has no such account of a budget")
)

// PeriodError says that a period has not begun or is over; nothing was done. What was spent in it
// may still be said, without wanting more.
type PeriodError struct {
	Now time.Time // the ledger's
}

func (e *PeriodError) Error() string {
	return "the budget's period is not that of " + e.Now.UTC().Format(time.RFC3339)
}

// BudgetKey names an account: what a subject spends of a budget in one period.
type BudgetKey struct {
	limiter.Key       // Limit is the budget's bucket
	Start, End  int64 // of the period, nanoseconds since 1970, End exclusive; both 0: the budget has none, or rolls
}

// BudgetTerms are what an account may spend: the same for all that name it. Amounts are
// nano-dollars. Of several Revisions the highest binds, and is kept.
type BudgetTerms struct {
	Amount   int64
	Revision uint64
	// Window and Slot are of a rolling budget: what is spent counts for Window, and for a Slot more at most.
	Window, Slot time.Duration
	Alerts       []int // percent of Amount, rising; shared, never changed
	Spike        Spike
	Name         string // the budget's
}

// BudgetDraw is what a holder says of an account, and what it asks for. It may have one
// at a time under way for an account.
type BudgetDraw struct {
	Key    BudgetKey
	Terms  BudgetTerms
	Holder uint64 // an incarnation; not 0
	// N rises with each draw of this holder for this account and is not 0. Whatever the outcome was, the same
	// draw with the same N may be sent again and gives what it gave, or is not the last any more.
	N uint64
	// Spent is all that this holder ever spent of the account. It never falls.
	Spent int64
	// Holding is what it was granted, did not spend and keeps, open reservations among it. What is
	// neither spent nor held is free again.
	Holding int64
	// Want is what it asks for; 0 reports only. It gets less as the account nears its end, but not
	// less than Need while there is as much. Where less than Least is there it gets nothing.
	Want, Need, Least int64
	// Final ends the holder in this account, for good: nothing is held any more, and nothing will be
	// granted. One that tells so of another that is gone takes N = 1<<63.
	Final bool
	// Lost, with Final: all that the holder held counts as spent, as nobody knows.
	Lost bool
}

// BudgetDrawn is what came of it.
type BudgetDrawn struct {
	N                     uint64
	Granted               int64
	Spent, Amount, Others int64 // of the account: by all; in all; outstanding with other holders
	Free                  int64 // neither spent nor outstanding; negative is debt
	Lost                  int64 // what was counted as spent by BudgetDraw.Lost
	// Closed: the holder was ended in this account, by Final or by ReleaseHolder. What it may think
	// that it holds is gone.
	Closed bool
	Time   time.Time // the ledger's: the clock of its leader, which the periods go by
}

// BudgetHolder is one holder of an account.
type BudgetHolder struct {
	Holder             uint64
	Node               string // as the view called it; "": it was in none when it drew
	Spent, Outstanding int64
	Closed             bool
	N                  uint64    // of its last draw
	Time               time.Time // of its last draw
	last               drawn
}

// BudgetAccount is an account at one moment. It never changes, and nothing that it leads to
// may be changed.
type BudgetAccount struct {
	Key     BudgetKey
	Terms   BudgetTerms
	Time    time.Time // the newest that it has seen
	Spent   int64     // of a rolling budget: as of Time; negative after a credit
	Holders []BudgetHolder
	// Crossed is the highest alert that spending has passed, in percent, and Notified the highest that people
	// were told of; 0: none. Both fall again with what is spent.
	Crossed, Notified int
	CrossedAt         time.Time // when Crossed rose last; zero: never
	// Spiked is when spending last spiked, and SpikeTold the last spike that people were told of; zero: never.
	Spiked, SpikeTold time.Time
}

// Outstanding is what all holders hold.
func (a *BudgetAccount) Outstanding() (sum int64) {
	for i := range a.Holders {
		sum = addNano(sum, a.Holders[i].Outstanding)
	}
	return sum
}

// Free is what is neither spent nor outstanding; negative is debt.
func (a *BudgetAccount) Free() int64 { return a.Terms.Amount - a.Spent - a.Outstanding() }

// DrawBudget reports what was spent and draws a block, through the leader, in one write with
// others that come meanwhile. Its errors are Propose's, *StaleBlock, ErrWallOff, ErrBudgetFull, *PeriodError,
// ErrNotMember, ErrNoBudget for a report of nothing on nothing and for a final of what may have been forgotten (say
// Terms where they are known), or a *Refusal for what is no draw: with each of those nothing was done. ErrUnknownOutcome, ErrBusy and
// ErrNoLeader: try the same again.
func (l *Ledger) DrawBudget(ctx context.Context, d BudgetDraw) (BudgetDrawn, error) {
	result, err := l.Propose(ctx, &ledgerpb.Command{
		Version: budgetsVersion, Actor: "node " + string(l.config.ServerID), Body: &ledgerpb.Command_Budget{Budget: d.message()},
	})
	if err != nil {
		return BudgetDrawn{}, err
	}
	return drawnOf(result)
}

// AdjustBudget charges an account, or credits it where amount is negative, also beyond what
// was spent. It is audited as budget.charge or budget.credit. One that the ledger has not seen is
// made in its period; before it that is a *PeriodError, after it ErrNoBudget.
func (l *Ledger) AdjustBudget(ctx context.Context, actor string, key BudgetKey, amount int64, reason string) error {
	result, err := l.Propose(ctx, &ledgerpb.Command{Version: budgetsVersion, Actor: actor, Body: &ledgerpb.Command_AdjustBudget{
		AdjustBudget: &ledgerpb.AdjustBudget{Key: key.message(), Amount: amount, Reason: reason},
	}})
	if err != nil {
		return err
	}
	_, err = drawnOf(result)
	return err
}

// ReleaseHolder frees what a holder that is gone holds of all accounts, and says how much that
// was (0 where it holds nothing, or a retry found it done). A *Refusal: conflict while it is in the view or where it was a process of
// another node than node, not_found where no account knows it. It is audited as budget.release. The holder gets nothing more of those accounts; what it spent it
// may still say, and that adds.
func (l *Ledger) ReleaseHolder(ctx context.Context, actor string, holder uint64, node, reason string) (freed int64, err error) {
	result, err := l.Propose(ctx, &ledgerpb.Command{Version: budgetsVersion, Actor: actor, Body: &ledgerpb.Command_ReleaseHolder{
		ReleaseHolder: &ledgerpb.ReleaseHolder{Holder: holder, Node: node, Reason: reason},
	}})
	if err != nil {
		return 0, err
	}
	return result.GetBudget().GetFreed(), RefusalOf(result)
}

// BudgetNotified notes that people were told of an alert and of a spike of an account; 0 and the
// zero time: of none. See UntoldBudgets.
func (l *Ledger) BudgetNotified(ctx context.Context, key BudgetKey, percent int, spike time.Time) error {
	result, err := l.Propose(ctx, &ledgerpb.Command{
		Version: budgetsVersion, Actor: "node " + string(l.config.ServerID), Body: &ledgerpb.Command_BudgetNotified{
			BudgetNotified: &ledgerpb.BudgetNotified{Key: key.message(), Percent: uint32(max(0, percent)), Spike: nanoOrZero(spike)},
		},
	})
	if err != nil {
		return err
	}
	_, err = drawnOf(result)
	return err
}

// Budgets gives the accounts that match selects (nil: all), most at most, in no order that
// means anything, as of the cluster's time where they roll. It holds up what is applied for a few milliseconds where there
// are MaxBudgets.
func (l *Ledger) Budgets(match func(*BudgetAccount) bool, most int) []BudgetAccount {
	now := nanoOrZero(l.Facts().Time)
	var out []BudgetAccount
	for _, a := range l.fsm.budgets() {
		if len(out) >= most {
			break
		}
		if shown := a.at(now); match == nil || match(shown) {
			out = append(out, *shown)
		}
	}
	return out
}

// Budget gives one account, as Budgets does.
func (l *Ledger) Budget(key BudgetKey) (BudgetAccount, bool) {
	l.fsm.mu.Lock()
	a, ok := l.fsm.state.budgets.find(key)
	l.fsm.mu.Unlock()
	if !ok {
		return BudgetAccount{}, false
	}
	return *a.at(nanoOrZero(l.Facts().Time)), true
}

// UntoldBudgets are the accounts whose Crossed is above Notified, or Spiked after SpikeTold: by key, from the first
// after a key on (nil: from the first), most at most. Config.Changed is called when there is another.
func (l *Ledger) UntoldBudgets(after *BudgetKey, most int) []BudgetAccount {
	return l.fsm.untold(after, most)
}

func drawnOf(result *ledgerpb.Result) (BudgetDrawn, error) {
	b := result.GetBudget()
	switch result.GetCode() {
	case "":
	case codeStale:
		return BudgetDrawn{}, &StaleBlock{N: b.GetN(), Spent: b.GetKnown()}
	case codeFull:
		return BudgetDrawn{}, fmt.Errorf("%w (%s)", ErrBudgetFull, result.GetMessage())
	case codePeriod:
		return BudgetDrawn{}, &PeriodError{Now: time.Unix(0, b.GetUnixNano())}
	case codeNoMember:
		return BudgetDrawn{}, ErrNotMember
	case codeNotFound:
		return BudgetDrawn{}, ErrNoBudget
	default:
		return BudgetDrawn{}, RefusalOf(result)
	}
	return BudgetDrawn{
		N: b.GetN(), Granted: b.GetGranted(), Spent: b.GetSpent(), Amount: b.GetAmount(), Others: b.GetOthers(), Free: b.GetFree(),
		Lost: b.GetLost(), Closed: b.GetClosed(), Time: time.Unix(0, b.GetUnixNano()),
	}, nil
}

func (k *BudgetKey) message() *ledgerpb.BudgetKey {
	return &ledgerpb.BudgetKey{Tenant: k.Tenant, Budget: k.Limit, Subject: []byte(k.Subject), Start: k.Start, End: k.End}
}

func budgetKeyOf(m *ledgerpb.BudgetKey) BudgetKey {
	return BudgetKey{Key: limiter.Key{Tenant: m.GetTenant(), Limit: m.GetBudget(), Subject: string(m.GetSubject())}, Start: m.GetStart(), End: m.GetEnd()}
}

func compareBudgetKeys(a, b BudgetKey) int {
	for _, c := range [...]int{strings.Compare(a.Tenant, b.Tenant), strings.Compare(a.Limit, b.Limit), strings.Compare(a.Subject, b.Subject)} {
		if c != 0 {
			return c
		}
	}
	return slices.Compare([]int64{a.Start, a.End}, []int64{b.Start, b.End})
}

func (t *BudgetTerms) message() *ledgerpb.BudgetTerms {
	m := &ledgerpb.BudgetTerms{
		Amount: t.Amount, Revision: t.Revision, WindowNs: int64(t.Window), SlotNs: int64(t.Slot), Label: t.Name,
		SpikeMillionths: int64(t.Spike.Factor), SpikeFloor: int64(t.Spike.Floor), SpikeKill: t.Spike.Kill,
	}
	for _, percent := range t.Alerts {
		m.Alerts = append(m.Alerts, uint32(percent))
	}
	return m
}

func (d *BudgetDraw) message() *ledgerpb.Budget {
	return &ledgerpb.Budget{
		Key: d.Key.message(), Terms: d.Terms.message(), Holder: d.Holder, N: d.N, Spent: d.Spent, Holding: d.Holding,
		Want: d.Want, Need: d.Need, Least: d.Least, Final: d.Final, Lost: d.Lost,
	}
}
