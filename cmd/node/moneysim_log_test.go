package node

import (
	"bytes"
	"context"
	"encoding/binary"
	"hash/fnv"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/limiter"
)

// simLog is the replicated log: one sequence of commands, applied to the real state. A proposal reaches the leader or does
// not, is appended at once, later, twice or never, and its answer is lost or comes late. The world's lock guards it.
type simLog struct {
	w       *simWorld
	state   *ledger.State
	index   uint64
	applied []*ledgerpb.Command // all of them, where the run is to be replayed

	leaderless bool
	term       chan struct{} // closed when the leadership changes
	off        time.Duration // of the leader's clock
	wallOff    bool          // it knows that it is off: it grants nothing
	tries      map[simTry]int
	seen       map[string]bool // ids of commands
	renumber   bool            // broken on purpose: a duplicate is a draw of its own
}

// simTry counts how often a draw was proposed.
type simTry struct {
	key    ledger.BudgetKey
	holder uint64
	n      uint64
}

// dice are a proposal's own, whatever else happens at the same instant.
func (l *simLog) dice(d *ledger.BudgetDraw) *rand.Rand {
	try := simTry{d.Key, d.Holder, d.N}
	l.tries[try]++
	h := fnv.New64a()
	_, _ = h.Write([]byte(d.Key.Limit + "\x00" + d.Key.Subject))
	var b [32]byte
	for i, v := range [...]uint64{uint64(d.Key.Start), d.Holder, d.N, uint64(l.tries[try])} {
		binary.LittleEndian.PutUint64(b[8*i:], v)
	}
	_, _ = h.Write(b[:])
	return rand.New(rand.NewPCG(l.w.seed, h.Sum64()))
}

// append applies a command now.
func (l *simLog) append(c *ledgerpb.Command) *ledgerpb.Result {
	c = &ledgerpb.Command{Version: c.GetVersion(), Id: c.GetId(), Actor: c.GetActor(), UnixNano: time.Now().Add(l.off).UnixNano(), Body: c.GetBody()}
	l.index++
	if l.w.replayed {
		l.applied = append(l.applied, c)
	}
	r, err := l.state.Apply(l.index, c)
	if err != nil {
		l.w.fail("apply: %v", err)
		return &ledgerpb.Result{Code: "broken"}
	}
	l.w.check(c, r)
	return r
}

// reload puts the state through a snapshot.
func (l *simLog) reload() {
	var buf bytes.Buffer
	err := l.state.Capture().Write(&buf)
	if err == nil {
		before := l.state.Facts().Hash
		if l.state, err = ledger.ReadState(&buf); err == nil && l.state.Facts().Hash != before {
			l.w.fail("a snapshot is of another state")
		}
	}
	if err != nil {
		l.w.fail("snapshot: %v", err)
	}
}

// accounts reads the accounts of a snapshot.
func (l *simLog) accounts() []ledger.BudgetAccount {
	var buf bytes.Buffer
	if err := l.state.Capture().Write(&buf); err != nil {
		l.w.fail("snapshot: %v", err)
		return nil
	}
	var out []ledger.BudgetAccount
	r := bytes.NewReader(buf.Bytes())
	if err := protodelim.UnmarshalFrom(r, &ledgerpb.Header{}); err != nil {
		l.w.fail("snapshot: %v", err)
	}
	for r.Len() > 0 {
		var rec ledgerpb.Record
		if err := (protodelim.UnmarshalOptions{MaxSize: -1}).UnmarshalFrom(r, &rec); err != nil {
			l.w.fail("snapshot: %v", err)
			return nil
		}
		m := rec.GetBudget()
		if m == nil {
			continue
		}
		a := ledger.BudgetAccount{Key: simKeyOf(m.GetKey()), Spent: m.GetSpent()}
		for _, h := range m.GetHolders() {
			a.Holders = append(a.Holders, ledger.BudgetHolder{Holder: h.GetHolder(), Spent: h.GetSpent(), Outstanding: h.GetOutstanding(), Closed: h.GetClosed()})
		}
		out = append(out, a)
	}
	return out
}

func simKeyOf(k *ledgerpb.BudgetKey) ledger.BudgetKey {
	return ledger.BudgetKey{Key: limiter.Key{Tenant: k.GetTenant(), Limit: k.GetBudget(), Subject: string(k.GetSubject())}, Start: k.GetStart(), End: k.GetEnd()}
}

// between is a random time.
func between(r *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(r.Int64N(int64(to-from)))
}

// rest waits, and says whether ctx is still alive.
func rest(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// later does something under the world's lock, unless the run is over.
func (w *simWorld) later(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.over {
			f()
		}
	})
}

// propose has a command of a process applied, perhaps.
func (l *simLog) propose(ctx context.Context, p *simProc, c *ledgerpb.Command, dice *rand.Rand) (*ledgerpb.Result, error) {
	w := l.w
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, 5*time.Second) // as the ledger does
		defer cancel()
	}
	w.mu.Lock()
	apart, term, faulty := p.node.apart || l.leaderless, l.term, w.faults.log
	w.mu.Unlock()
	if p.disk.isDead() { // and so is the process
		return nil, ledger.ErrNoLeader
	}
	late := func() {
		if faulty && dice.IntN(2) == 0 {
			w.later(between(dice, 10*time.Millisecond, 4*time.Second), func() { l.append(c) })
		}
	}
	if apart && dice.IntN(3) > 0 {
		rest(ctx, between(dice, time.Millisecond, 30*time.Millisecond))
		return nil, ledger.ErrNoLeader
	}
	if apart {
		if dice.IntN(4) == 0 {
			w.mu.Lock()
			late()
			w.mu.Unlock()
		}
		<-ctx.Done()
		return nil, ledger.ErrUnknownOutcome
	}
	send, back := between(dice, 100*time.Microsecond, 2*time.Millisecond), between(dice, 100*time.Microsecond, 2*time.Millisecond)
	lost, twice, seen := false, false, dice.IntN(2) == 0
	if faulty {
		if dice.IntN(20) == 0 {
			send += between(dice, 0, 400*time.Millisecond)
		}
		if dice.IntN(20) == 0 {
			back += between(dice, 0, 2500*time.Millisecond)
		}
		lost, twice = dice.IntN(12) == 0, dice.IntN(8) == 0
	}
	again := between(dice, 100*time.Microsecond, 3*time.Second)
	answer := make(chan *ledgerpb.Result, 1)
	w.later(send, func() {
		switch {
		case p.node.apart || l.leaderless:
			late()
			return
		case l.wallOff && c.GetBudget() != nil:
			w.later(back, func() { answer <- nil })
			return
		}
		r := l.append(c)
		if twice {
			w.later(again, func() { l.appendAgain(c) })
		}
		if !lost {
			w.later(back, func() {
				if !p.node.apart {
					answer <- r
				}
			})
		}
	})
	select {
	case r := <-answer:
		if r == nil {
			return nil, ledger.ErrWallOff
		}
		return r, nil
	case <-term:
		if !seen {
			<-ctx.Done()
		}
		return nil, ledger.ErrUnknownOutcome
	case <-ctx.Done():
		return nil, ledger.ErrUnknownOutcome
	}
}

// appendAgain applies a command that was applied before.
func (l *simLog) appendAgain(c *ledgerpb.Command) {
	if b := c.GetBudget(); b != nil && l.renumber {
		other := proto.Clone(c).(*ledgerpb.Command)
		other.GetBudget().N = l.w.book(simKeyOf(b.GetKey())).holder(b.GetHolder()).n + 1
		c = other
	}
	l.append(c)
}

// simBank is the ledger as one process reaches it.
type simBank struct {
	w *simWorld
	p *simProc
}

func (b *simBank) DrawBudget(ctx context.Context, d ledger.BudgetDraw) (ledger.BudgetDrawn, error) {
	b.w.mu.Lock()
	dice := b.w.log.dice(&d)
	b.w.mu.Unlock()
	r, err := b.w.log.propose(ctx, b.p, &ledgerpb.Command{
		Version: ledger.StateVersion, Actor: "node " + b.p.node.name, Body: &ledgerpb.Command_Budget{Budget: simMessage(&d)},
	}, dice)
	if err != nil {
		return ledger.BudgetDrawn{}, err
	}
	return simDrawn(r)
}

// Budgets is of a replica that may not be further than the view that Facts has.
func (b *simBank) Budgets(match func(*ledger.BudgetAccount) bool, most int) (out []ledger.BudgetAccount) {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	for _, a := range b.w.seen(b.p).accounts {
		if len(out) < most && match(&a) {
			out = append(out, a)
		}
	}
	return out
}

// simView is what a replica shows when it has applied a view, and no more.
type simView struct {
	at       time.Time
	facts    *ledger.Facts
	accounts []ledger.BudgetAccount
}

// seen is what a process's replica shows: it lags.
func (w *simWorld) seen(p *simProc) *simView {
	lag := time.Duration(p.self*7919%700) * time.Millisecond
	at := 0
	for i := range w.views {
		if time.Since(w.views[i].at) >= lag {
			at = i
		}
	}
	return &w.views[at]
}

// simTruth is what a process knows of the cluster.
type simTruth struct{ p *simProc }

func (t simTruth) Facts() *ledger.Facts {
	t.p.w.mu.Lock()
	defer t.p.w.mu.Unlock()
	return t.p.w.seen(t.p).facts
}
func (t simTruth) Keys() *ledger.Keys { return nil }

func simMessage(d *ledger.BudgetDraw) *ledgerpb.Budget {
	m := &ledgerpb.Budget{
		Key:    &ledgerpb.BudgetKey{Tenant: d.Key.Tenant, Budget: d.Key.Limit, Subject: []byte(d.Key.Subject), Start: d.Key.Start, End: d.Key.End},
		Terms:  &ledgerpb.BudgetTerms{Amount: d.Terms.Amount, Revision: d.Terms.Revision, WindowNs: int64(d.Terms.Window), SlotNs: int64(d.Terms.Slot), Label: d.Terms.Name},
		Holder: d.Holder, N: d.N, Spent: d.Spent, Holding: d.Holding, Want: d.Want, Need: d.Need, Least: d.Least, Final: d.Final, Lost: d.Lost,
	}
	for _, percent := range d.Terms.Alerts {
		m.Terms.Alerts = append(m.Terms.Alerts, uint32(percent))
	}
	return m
}

// simDrawn words a result as the ledger does.
func simDrawn(result *ledgerpb.Result) (ledger.BudgetDrawn, error) {
	b := result.GetBudget()
	switch result.GetCode() {
	case "":
	case "stale":
		return ledger.BudgetDrawn{}, &ledger.StaleBlock{N: b.GetN(), Spent: b.GetKnown()}
	case "period":
		return ledger.BudgetDrawn{}, &ledger.PeriodError{Now: time.Unix(0, b.GetUnixNano())}
	case "no_member":
		return ledger.BudgetDrawn{}, ledger.ErrNotMember
	case "not_found":
		return ledger.BudgetDrawn{}, ledger.ErrNoBudget
	default:
		return ledger.BudgetDrawn{}, ledger.RefusalOf(result)
	}
	return ledger.BudgetDrawn{
		N: b.GetN(), Granted: b.GetGranted(), Spent: b.GetSpent(), Amount: b.GetAmount(), Others: b.GetOthers(), Free: b.GetFree(),
		Lost: b.GetLost(), Closed: b.GetClosed(), Time: time.Unix(0, b.GetUnixNano()),
	}, nil
}
