package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"headgate/cluster/ledger"
	"headgate/lease/budget"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/journal"
)

// money joins the budgets, which this node spends out of blocks of the ledger's, and the journal, in which
// every request stands before a backend sees it. It is the proxy's Money.
//
// What the ledger hears of a budget and what the journal holds agree at every instant but for requests that are
// open: so a process that died is made good for by its successor, out of its journal (settlePast).
type money struct {
	n       *Node
	bank    func() bank // there is none before the node has joined
	terms   func(ledger.BudgetKey) ledger.BudgetTerms
	budgets *budget.Manager
	journal *journal.Log
	held    sync.Pool // of *held
}

// bank is the ledger, as far as money needs it.
type bank interface {
	DrawBudget(ctx context.Context, d ledger.BudgetDraw) (ledger.BudgetDrawn, error)
	Budgets(match func(*ledger.BudgetAccount) bool, most int) []ledger.BudgetAccount
}

// held is what a Bill holds from Reserve to Settle.
type held struct {
	charges [budget.MaxCharges]budget.Charge
	taken   [budget.MaxCharges]budget.Taken
	parts   [budget.MaxCharges]journal.Part
}

// usageDir is the folder of the journal inside the data folder.
const usageDir = "usage"

func (n *Node) openMoney() error {
	m := &money{n: n, bank: func() bank { return n.cluster.Ledger() }, terms: n.termsOf, held: sync.Pool{New: func() any { return new(held) }}}
	var err error
	m.budgets, err = budget.New(budget.Config{
		Holder: n.self, Draw: m.draw, Clock: m.clock, Override: n.spendsEmergency, Logger: n.log, Registerer: n.registry,
	})
	if err != nil {
		return err
	}
	m.journal, err = journal.Open(journal.Config{
		Dir: filepath.Join(n.cfg.DataDir, usageDir), Node: n.cfg.NodeID, Incarnation: n.self, BootID: bootID(), SyncEach: n.cfg.UsageSync,
		Retention: time.Duration(n.cfg.UsageRetention), MaxBytes: n.cfg.UsageMaxBytes, Now: n.wall, Zone: ledger.LoadZone,
		Logger: n.log, Registerer: n.registry,
	})
	if err != nil {
		return fmt.Errorf("--data-dir %s: open the usage log: %w", n.cfg.DataDir, err)
	}
	n.money = m
	return nil
}

// bootID tells a restart of the machine from one of the process: a machine that went down may have lost what was
// written and not synced. "": not known here.
func bootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}

// wall is this node's wall clock, set right by what the leader says of it: a usage log is read beside others'.
func (n *Node) wall() time.Time {
	now := time.Now()
	if c := n.joined.Load(); c != nil {
		if off, known := c.WallOff(); known {
			return now.Add(-off)
		}
	}
	return now
}

func (m *money) clock() (mono, wall int64) {
	mono, _ = m.n.time.Read()
	return mono, m.n.wall().UnixNano()
}

// spendsEmergency says whether the operator told this node to go on without the ledger.
func (n *Node) spendsEmergency() bool {
	mode, _, ok := n.proxy.Override()
	return ok && mode != proxy.Deny
}

// Reserve see proxy.Money.
func (m *money) Reserve(ctx context.Context, b *proxy.Bill) error {
	if len(b.Charges) == 0 {
		// Nobody's money hangs on it: the request goes on where the disk does not take it.
		_ = m.record(b, nil)
		return nil
	}
	h := m.held.Get().(*held)
	if err := m.take(ctx, b, h); err != nil {
		m.held.Put(h)
		return err
	}
	if err := m.record(b, h); err != nil {
		m.budgets.Settle(h.taken[:len(b.Charges)], 0)
		m.held.Put(h)
		return &proxy.Broke{Index: -1, Kind: proxy.Unavailable, Unwritten: true, RetryAfter: time.Second, Err: err}
	}
	b.Held = h
	return nil
}

// take takes from the budgets, for the periods that the ledger's clock is in. That clock may prove to be
// another than was thought, once.
func (m *money) take(ctx context.Context, b *proxy.Bill, h *held) error {
	n := len(b.Charges)
	for again := false; ; again = true {
		m.charge(b, h, m.budgets.Now())
		err := m.budgets.Take(ctx, h.charges[:n], h.taken[:n])
		if err == nil {
			stand(b, h)
			return nil
		}
		refused, ok := errors.AsType[*budget.Refused](err)
		if ok && refused.Kind == budget.OutOfPeriod && !again {
			continue
		}
		if ok {
			m.levels(b, refused.Index)
			return broke(b, refused)
		}
		return err
	}
}

// charge says what is taken from which account, as of now by the ledger's clock.
func (m *money) charge(b *proxy.Bill, h *held, now int64) {
	b.Now = now
	for i := range b.Charges {
		c := &b.Charges[i]
		c.Start, c.End = c.Budget.Period(time.Unix(0, now))
		h.charges[i] = budget.Charge{
			Key: budget.Key{Key: c.Key, Start: c.Start, End: c.End}, Terms: c.Budget.Terms.(*budget.Terms),
			Cost: c.Cost, Least: c.Least, Emergency: c.Budget.Emergency,
		}
	}
}

// stand tells the bill how its budgets stand.
func stand(b *proxy.Bill, h *held) {
	for i := range b.Charges {
		c, t := &b.Charges[i], &h.taken[i]
		c.Granted, c.Spent, c.Amount, c.Left = t.Granted, t.Used, t.Amount, max(0, t.Left)
	}
}

// broke words a refusal for the proxy.
func broke(b *proxy.Bill, r *budget.Refused) error {
	out := &proxy.Broke{Index: r.Index, RetryAfter: r.RetryAfter, Err: r}
	switch r.Kind {
	case budget.Exhausted:
		out.Kind = proxy.Exhausted
	case budget.InFlight:
		out.Kind = proxy.InFlight
	default:
		out.Kind = proxy.Unavailable
	}
	if r.Index >= 0 && r.Index < len(b.Charges) {
		c := &b.Charges[r.Index]
		c.Spent, c.Amount, c.Left = r.Used, r.Amount, max(0, r.Left)
	}
	return out
}

// record writes the reservation into the journal, where it counts in full until it is settled.
func (m *money) record(b *proxy.Bill, h *held) error {
	r := journal.Reservation{
		Time: m.n.wall(), RequestID: b.RequestID, Tenant: b.Tenant, Key: b.Key, User: b.User, Model: b.Model,
		InputTokens: b.InputTokens, OutputTokens: b.OutputTokens, Cost: b.Reserved,
	}
	if h != nil {
		r.Cost = 0
		for i := range b.Charges {
			c := &b.Charges[i]
			counts := c.Most
			if c.Budget.Strict {
				counts = c.Granted
			}
			h.parts[i] = journal.Part{Account: journalAccount(c), Amount: counts}
			r.Cost = max(r.Cost, counts) // what a crash counts stands in the usage log as it does in the ledger
		}
		r.Parts = h.parts[:len(b.Charges)]
	}
	b.ID = 0 // where nothing is reserved the usage is recorded all the same
	err := m.journal.Reserve(&r)
	if err == nil {
		b.ID = r.ID
	}
	return err
}

func journalAccount(c *proxy.BudgetCharge) journal.Account {
	return journal.Account{Tenant: c.Key.Tenant, Budget: c.Key.Limit, Subject: c.Key.Subject, Start: c.Start, End: c.End}
}

// Settle see proxy.Money. The journal comes first: what the ledger has been told of stands in it.
func (m *money) Settle(b *proxy.Bill) {
	h, _ := b.Held.(*held)
	actual := b.Cost
	if b.Cancelled {
		actual = 0
	}
	u := journal.Usage{
		ID: b.ID, Time: m.n.wall(), RequestID: b.RequestID, Tenant: b.Tenant, Key: b.Key, User: b.User,
		Surface: b.Surface, Model: b.Model, Asked: b.Asked, Backend: b.Backend, Input: b.Usage.Input, CachedInput: b.Usage.CachedInput,
		Output: b.Usage.Output, CacheWrite: b.Usage.CacheWrite, CacheWrite1h: b.Usage.CacheWrite1h, Images: b.Images, AudioSeconds: b.Usage.AudioSeconds,
		Cost: actual, Reserved: b.Reserved, Tier: b.Tier, Latency: b.Latency, TTFT: b.TTFT, Status: b.Status, Outcome: b.Outcome,
		Stream: b.Stream, Estimated: !b.Usage.Known,
	}
	u.Started = u.Time.Add(-b.Latency)
	if b.Cancelled {
		u.Outcome = journal.Cancelled
	}
	if h != nil {
		for i := range b.Charges {
			h.parts[i] = journal.Part{Account: journalAccount(&b.Charges[i]), Amount: actual}
		}
		u.Parts = h.parts[:len(b.Charges)]
	}
	if err := m.journal.Settle(&u); err != nil {
		m.n.log.Error("a request's usage could not be recorded", "request_id", b.RequestID, "cost_nano_usd", actual, "error", err)
	}
	if h == nil {
		return
	}
	m.budgets.Settle(h.taken[:len(b.Charges)], actual)
	stand(b, h)
	b.Held = nil
	m.held.Put(h)
}

// draw asks the ledger for a block.
func (m *money) draw(ctx context.Context, d budget.Draw) (budget.Drawn, error) {
	r, err := m.bank().DrawBudget(ctx, ledger.BudgetDraw{
		Key: ledger.BudgetKey(d.Key), Terms: ledgerTerms(d.Terms), Holder: d.Holder, N: d.N, Spent: d.Spent, Holding: d.Holding,
		Want: d.Want, Need: d.Need, Least: d.Least, Final: d.Final,
	})
	out := budget.Drawn{
		N: r.N, Granted: r.Granted, Spent: r.Spent, Amount: r.Amount, Others: r.Others, Free: r.Free, Now: r.Time.UnixNano(), Closed: r.Closed,
	}
	return out, drawError(err)
}

// drawError says in the budgets' words what came of a draw.
func drawError(err error) error {
	if stale, ok := errors.AsType[*ledger.StaleBlock](err); ok {
		return &budget.StaleError{N: stale.N, Spent: stale.Spent}
	}
	if period, ok := errors.AsType[*ledger.PeriodError](err); ok {
		return &budget.PeriodError{Now: period.Now.UnixNano()}
	}
	_, refused := errors.AsType[*ledger.Refusal](err)
	switch {
	case errors.Is(err, ledger.ErrNoBudget):
		return budget.ErrNoAccount
	case refused, errors.Is(err, ledger.ErrNotMember), errors.Is(err, ledger.ErrBudgetFull):
		return fmt.Errorf("%w: %w", budget.ErrNotDone, err)
	}
	return err
}

func ledgerTerms(t *budget.Terms) ledger.BudgetTerms {
	return ledger.BudgetTerms{
		Amount: t.Amount, Revision: t.Revision, Window: t.Window, Slot: t.Slot, Alerts: t.Alerts, Name: t.Name,
		Spike: ledger.Spike{Factor: ledger.Factor(t.SpikeFactor), Floor: ledger.NanoUSD(t.SpikeFloor), Kill: t.SpikeKill},
	}
}

func budgetTerms(t *ledger.BudgetTerms) *budget.Terms {
	return &budget.Terms{
		Amount: t.Amount, Revision: t.Revision, Window: t.Window, Slot: t.Slot, Alerts: t.Alerts, Name: t.Name,
		SpikeFactor: int64(t.Spike.Factor), SpikeFloor: int64(t.Spike.Floor), SpikeKill: t.Spike.Kill,
	}
}

// recalled is told by the ledger, in its own goroutine, that somebody wants what others have outstanding.
func (n *Node) recalled(k ledger.BudgetKey) {
	if n.money != nil {
		n.money.budgets.Recall(budget.Key(k))
	}
}

// settleAgain is how often it is tried anew to tell the ledger of processes of before.
const settleAgain = time.Second

// settlePast tells the ledger what this node's earlier processes had spent when they died, and so gives back what
// they had outstanding. It warns of those of which only the ledger knows.
func (m *money) settlePast(ctx context.Context) {
	past := m.journal.Unclosed()
	t := time.NewTimer(0)
	defer t.Stop()
	for said := ""; ; {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		err := m.settleAll(ctx, past)
		if err == nil {
			m.warnOfUnknown(past)
			return
		}
		if len(past) > 0 && ctx.Err() == nil && err.Error() != said {
			said = err.Error()
			m.n.log.Info("what earlier processes of this node have spent waits for the ledger", "error", err)
		}
		t.Reset(settleAgain)
	}
}

// settleAll settles for processes of before. Where this one is in the view none of them is, and so none was
// granted anything since: this node's replica, which has applied that view, knows all that they hold.
func (m *money) settleAll(ctx context.Context, past []journal.Past) error {
	v := m.n.truth.Facts().View
	if v == nil || !member(v, m.n.self) {
		return errors.New("this node is in no view yet")
	}
	var first error
	for i := range past {
		err := fmt.Errorf("the process %016x is still in the view", past[i].Incarnation)
		if !member(v, past[i].Incarnation) {
			err = m.settleOne(ctx, &past[i])
		}
		first = cmp.Or(first, err)
	}
	return first
}

// warnOfUnknown says what processes of this node hold of which the usage log does not know: it is new, or another's.
func (m *money) warnOfUnknown(past []journal.Past) {
	held, processes := int64(0), map[uint64]bool{}
	unknown := func(h *ledger.BudgetHolder) bool {
		return h.Node == m.n.cfg.NodeID && h.Holder != m.n.self && h.Outstanding > 0 &&
			!slices.ContainsFunc(past, func(p journal.Past) bool { return p.Incarnation == h.Holder })
	}
	for _, a := range m.bank().Budgets(func(a *ledger.BudgetAccount) bool {
		return slices.ContainsFunc(a.Holders, func(h ledger.BudgetHolder) bool { return unknown(&h) })
	}, ledger.MaxBudgets) {
		for i := range a.Holders {
			if h := &a.Holders[i]; unknown(h) {
				held, processes[h.Holder] = held+min(h.Outstanding, ledger.MaxNano-held), true
			}
		}
	}
	if len(processes) > 0 {
		m.n.log.Warn("the usage log knows nothing of earlier processes of this node that hold some of budgets: that counts as spent until you release it, see `headgate budgets holders`",
			"processes", len(processes), "held_nano_usd", held)
	}
}

func member(v *ledger.View, incarnation uint64) bool {
	for i := range v.Members {
		if v.Members[i].Incarnation == incarnation {
			return true
		}
	}
	return false
}

// lastDraw is the number of what is said for a process of before: above all that it can have sent.
const lastDraw = 1 << 63

const (
	settleAtOnce = 32 // accounts; the ledger commits them together
)

// lastWord is what is said of an account for a process of before.
type lastWord struct {
	key   ledger.BudgetKey
	spent int64
	lost  bool // what it held counts as spent
}

// settleOne says the last word on one process, of all its accounts, whatever becomes of each. The first error is
// returned; what was said is not said again but in the same words.
func (m *money) settleOne(ctx context.Context, p *journal.Past) error {
	words, damaged := m.lastWords(p)
	var (
		mu    sync.Mutex
		first error
		lost  int64
		all   sync.WaitGroup
		room  = make(chan struct{}, settleAtOnce)
	)
	for i := range words {
		room <- struct{}{}
		all.Go(func() {
			counted, err := m.settleAccount(ctx, p.Incarnation, &words[i])
			mu.Lock()
			lost, first = lost+counted, cmp.Or(first, err)
			mu.Unlock()
			<-room
		})
	}
	all.Wait()
	if first != nil {
		return first
	}
	m.n.log.Info("settled for an earlier process of this node", "incarnation", fmt.Sprintf("%016x", p.Incarnation), "accounts", len(words), "damaged", damaged, "counted_as_lost_nano_usd", lost)
	return m.journal.Closed(p.Incarnation)
}

// lastWords are those of the accounts that the ledger does not know the end of already, and why what the process
// held counts as lost: "" where it does not.
func (m *money) lastWords(p *journal.Past) (words []lastWord, damaged string) {
	known := map[ledger.BudgetKey]*ledger.BudgetHolder{}
	accounts := m.bank().Budgets(func(a *ledger.BudgetAccount) bool { return holder(a, p.Incarnation) != nil }, ledger.MaxBudgets)
	for i := range accounts {
		known[accounts[i].Key] = holder(&accounts[i], p.Incarnation)
	}
	damaged = p.Damaged
	// Of these the journal may have known more.
	forgotten := func(key ledger.BudgetKey) bool { return key.End != 0 && key.End < p.Forgotten }
	// The journal is written before the ledger hears of it.
	doubt := func(told, spent int64) {
		if told > spent && damaged == "" {
			damaged = "the ledger knows of more than the usage log does"
			m.n.log.Warn("the usage log of an earlier process is not whole: was an old copy put in its place? What the process held counts as spent", "incarnation", fmt.Sprintf("%016x", p.Incarnation))
		}
	}
	for i := range p.Accounts {
		a := &p.Accounts[i]
		spent := min(min(a.Settled, ledger.MaxNano)+min(a.Open, ledger.MaxNano), ledger.MaxNano)
		key := budgetKey(&a.Account)
		h := known[key]
		delete(known, key)
		if h != nil && !forgotten(key) {
			doubt(h.Spent-min(a.Lost, ledger.MaxNano), spent)
		}
		if h == nil || h.Outstanding > 0 || h.Spent != spent || p.Damaged != "" {
			words = append(words, lastWord{key: key, spent: spent, lost: forgotten(key)})
		}
	}
	for i := range accounts {
		key := accounts[i].Key
		h := known[key]
		if h == nil {
			continue
		}
		if !forgotten(key) {
			doubt(h.Spent, 0)
		}
		words = append(words, lastWord{key: key, lost: forgotten(key)})
	}
	for i := range words {
		words[i].lost = words[i].lost || damaged != ""
	}
	return words, damaged
}

// settleAccount says the last word on one account of a process, and what the ledger counted as lost of it.
func (m *money) settleAccount(ctx context.Context, incarnation uint64, w *lastWord) (lost int64, err error) {
	r, err := m.bank().DrawBudget(ctx, ledger.BudgetDraw{
		Key: w.key, Terms: m.terms(w.key), Holder: incarnation, N: lastDraw, Spent: w.spent, Final: true, Lost: w.lost,
	})
	refused, never := errors.AsType[*ledger.Refusal](err)
	switch {
	case errors.Is(err, ledger.ErrNoBudget) && w.spent == 0:
		return 0, nil
	case errors.Is(err, ledger.ErrNoBudget): // its period is over, or it rolls: nobody can tell when that was spent
		m.n.log.Warn("the ledger has forgotten a budget's account: what an earlier process spent of it counts in the usage log only",
			"tenant", w.key.Tenant, "budget", w.key.Limit, "spent_nano_usd", w.spent)
		return 0, nil
	case never:
		m.n.log.Error("the ledger refuses what an earlier process has spent of a budget, and always will",
			"tenant", w.key.Tenant, "budget", w.key.Limit, "spent_nano_usd", w.spent, "error", refused)
		return 0, nil
	case err != nil || r.Lost == 0:
		return 0, err
	}
	a := journal.Account{Tenant: w.key.Tenant, Budget: w.key.Limit, Subject: w.key.Subject, Start: w.key.Start, End: w.key.End}
	return r.Lost, m.journal.Lost(incarnation, a, r.Lost)
}

// termsOf are the terms of an account's budget by the policy in force here; none where it has no such budget.
func (n *Node) termsOf(k ledger.BudgetKey) ledger.BudgetTerms {
	ix := n.current().index
	if ix == nil {
		return ledger.BudgetTerms{}
	}
	for _, t := range ix.Policy.Tenants {
		if k.Tenant != "" && k.Tenant != t.Name {
			continue
		}
		c, _ := ix.Tenant(t.Name)
		for i := range c.Budgets {
			if c.Budgets[i].Bucket == k.Limit {
				return c.Budgets[i].Terms
			}
		}
	}
	return ledger.BudgetTerms{}
}

func budgetKey(a *journal.Account) ledger.BudgetKey {
	return ledger.BudgetKey{Key: limiter.Key{Tenant: a.Tenant, Limit: a.Budget, Subject: a.Subject}, Start: a.Start, End: a.End}
}

// holder is an incarnation's part of an account, or nil: also of one that has no more of it, since what was counted as
// lost may not have come as far as to the journal.
func holder(a *ledger.BudgetAccount, incarnation uint64) *ledger.BudgetHolder {
	i := slices.IndexFunc(a.Holders, func(h ledger.BudgetHolder) bool { return h.Holder == incarnation })
	if i < 0 {
		return nil
	}
	return &a.Holders[i]
}

// end says the last word on what this process has spent, so that nothing stays outstanding. Where that fails, the
// next process says it.
func (m *money) end(ctx context.Context) {
	err := m.budgets.Drain(ctx)
	if err == nil {
		err = m.journal.Closed(m.n.self)
	}
	if err != nil {
		m.n.log.Warn("not all that was spent could be told to the ledger: the next start of this node does it, until when what was lent to it counts as outstanding", "error", err)
	}
}
