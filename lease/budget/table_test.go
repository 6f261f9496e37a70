package budget

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestIdleAccountsMakeRoom: many users, each for a short while.
func TestIdleAccountsMakeRoom(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		m.table.most, m.table.share = 1024, 1024
		for round := range 5 {
			for i := range 768 {
				m.Settle(take(t, m, charge(fmt.Sprint(round, "-", i), 1000, 100)), 50)
			}
			time.Sleep(15 * time.Second)
		}
		synctest.Wait()
		if n := m.table.count.Load(); n > 1024 {
			t.Errorf("%d accounts", n)
		}
		for k, a := range b.ledger.accounts {
			if a.spent != 50 || a.outstanding() != 0 {
				t.Errorf("%v: %d spent, %d outstanding", k, a.spent, a.outstanding())
			}
		}
		if n := len(m.agenda.due[rushed]) + len(m.agenda.due[quiet]); int64(n) > m.table.count.Load() {
			t.Errorf("the agenda has %d accounts, the table %d", n, m.table.count.Load())
		}
	})
}

// TestATenantHasAQuarterOfTheAccounts: the others have room whatever it does.
func TestATenantHasAQuarterOfTheAccounts(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		var log bytes.Buffer
		m.log = slog.New(slog.NewTextHandler(&log, nil))
		m.table.most, m.table.share = 1024, 256
		served := 0
		for i := range 2000 {
			out := make([]Taken, 1)
			switch err := m.Take(t.Context(), []Charge{charge(fmt.Sprint(i), 1000, 100)}, out); {
			case err == nil:
				served++
			case !errors.Is(err, errTenantFull):
				t.Fatal(err)
			}
		}
		if served != 256 {
			t.Errorf("%d accounts of one tenant", served)
		}
		for i := range 200 {
			c := charge(fmt.Sprint(i), 1000, 100)
			c.Key.Tenant = fmt.Sprint("other", i%7)
			m.Settle(take(t, m, c), 100)
		}
		synctest.Wait()
		if n := strings.Count(log.String(), "tenant=acme"); n == 0 || n > 3 {
			t.Errorf("%d lines in the log: %s", n, log.String())
		}
		if err := m.table.enter(&m.table.shards[0], "", m.instant()); err != nil || m.table.tenants["acme"] != 256 {
			t.Errorf("%v, %v", err, m.table.tenants)
		}
	})
}

// TestWhatCanNeverFitMakesNoAccount: neither here nor in the ledger, also not of the request's other budgets.
func TestWhatCanNeverFitMakesNoAccount(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		dear := charge("dear", 1000, 1001)
		dear.Key.End = m.Now() + int64(time.Hour)
		if r := refused(t, m, Exhausted, charge("a", 1000, 10), dear); r.Index != 1 || r.Amount != 1000 || r.Left != 1000 || r.RetryAfter != time.Hour {
			t.Errorf("refused: %+v", r)
		}
		if n := m.table.count.Load(); n != 0 || b.draws() != 0 {
			t.Errorf("%d accounts, %d draws", n, b.draws())
		}
		dear.Least = 1000 // less will do
		if out := take(t, m, dear); out[0].Granted != 1000 {
			t.Errorf("taken: %+v", out)
		}
	})
}

func TestAReleaseIsSaidOnce(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, b *bed) {
		m := b.managers[0]
		var log bytes.Buffer
		m.log = slog.New(slog.NewTextHandler(&log, nil))
		for range 2 {
			m.Settle(take(t, m, charge("b", 1000, 100)), 100)
		}
		b.ledger.Lock()
		h := b.ledger.accounts[key("b")].holders[1]
		h.closed, h.out = true, 0
		b.ledger.Unlock()
		for range 3 {
			time.Sleep(2 * time.Second)
			refused(t, m, Unavailable, charge("b", 1000, 800))
		}
		synctest.Wait()
		if n := strings.Count(log.String(), "level=ERROR"); n != 1 {
			t.Errorf("log: %s", log.String())
		}
	})
}
