package budget

import (
	"testing"
	"time"
)

// TestALedgerThatWentBackIsToldAgain: it was restored to before what was spent, and before the account.
func TestALedgerThatWentBackIsToldAgain(t *testing.T) {
	for _, whole := range []bool{false, true} {
		inBubble(t, 2, func(t *testing.T, b *bed) {
			m := b.managers[0]
			m.Settle(take(t, m, charge("b", 1000, 100)), 100)
			time.Sleep(2 * time.Second)
			b.ledger.Lock()
			backup := *b.ledger.accounts[key("b")]
			holder := *backup.holders[1]
			backup.holders = map[uint64]*modelHolder{1: &holder}
			b.ledger.Unlock()
			open := take(t, m, charge("b", 1000, 300))
			m.Settle(take(t, m, charge("b", 1000, 400)), 400)
			time.Sleep(12 * time.Second)
			b.ledger.Lock()
			delete(b.ledger.accounts, key("b"))
			if !whole {
				b.ledger.accounts[key("b")] = &backup
			}
			b.ledger.denied[1] = true // reports are taken all the same
			b.ledger.Unlock()
			m.Retell()
			time.Sleep(100 * time.Millisecond)
			if a := b.account(key("b")); a.spent != 500 || a.outstanding() != 300 {
				t.Errorf("the ledger has %d spent, %d outstanding", a.spent, a.outstanding())
			}
			refused(t, b.managers[1], InFlight, charge("b", 1000, 300))
			m.Settle(open, 300)
			b.ledger.Lock()
			b.ledger.denied[1] = false
			b.ledger.Unlock()
			draws := b.tries.Load()
			time.Sleep(time.Minute)
			if n := b.tries.Load() - draws; n > 2 {
				t.Errorf("%d draws after all was told", n)
			}
			if a := b.account(key("b")); a.spent != 800 || a.outstanding() != 0 {
				t.Errorf("the ledger has %d spent, %d outstanding", a.spent, a.outstanding())
			}
		})
	}
}

// TestWhatARefusedDrawGaveBackIsGivenBack: the ledger refused the draw, and with it the report.
func TestWhatARefusedDrawGaveBackIsGivenBack(t *testing.T) {
	at := instant{1e9, 1e9}
	a := newAccount(key("b"), &Terms{Amount: 1000, Revision: 1}, at)
	answer := func(d Draw, granted int64) {
		a.answered(at, Drawn{N: d.N, Granted: granted, Amount: 1000, Others: 100}, nil, outlook{})
	}
	a.join(at, &ask{cost: 100, least: 100}, outlook{})
	d, _ := a.step(at, 1)
	answer(d, 100)
	a.leave(a.decided[0])
	a.join(at, &ask{cost: 500, least: 500}, outlook{})
	d, _ = a.step(at, 1)
	answer(d, 0) // it waits while others are asked
	a.recall(at)
	at.mono += int64(20 * time.Millisecond)
	d, what := a.step(at, 1)
	if what != help || d.Holding != 0 {
		t.Fatalf("%v: %+v", what, d)
	}
	a.answered(at, Drawn{}, errModelNotMember, outlook{})
	if a.forgettable() {
		t.Fatal("it may be forgotten while the ledger counts what it gave up")
	}
	at.mono += deniedFor
	d, what = a.step(at, 1)
	if what != report || d.Holding != 0 || d.Want != 0 {
		t.Fatalf("%v: %+v", what, d)
	}
	answer(d, 0)
	if due, what := a.next(at); !a.forgettable() || what != forget {
		t.Errorf("%v in %v", what, time.Duration(due-at.mono))
	}
}
