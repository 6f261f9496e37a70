package node

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"headgate/cluster/ledger"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/journal"
)

// words is a ledger that writes down the last words.
type words struct {
	mu       sync.Mutex
	said     map[string]ledger.BudgetDraw // by budget
	accounts []ledger.BudgetAccount
	answer   func(*ledger.BudgetDraw) (ledger.BudgetDrawn, error)
}

func (w *words) DrawBudget(_ context.Context, d ledger.BudgetDraw) (ledger.BudgetDrawn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said[d.Key.Limit] = d
	if w.answer != nil {
		return w.answer(&d)
	}
	return ledger.BudgetDrawn{N: d.N, Spent: d.Spent, Closed: true}, nil
}

func (w *words) Budgets(match func(*ledger.BudgetAccount) bool, most int) (out []ledger.BudgetAccount) {
	for _, a := range w.accounts {
		if len(out) < most && match(&a) {
			out = append(out, a)
		}
	}
	return out
}

// viewed is a truth with a view of these incarnations.
type viewed []uint64

func (v viewed) Facts() *ledger.Facts {
	view := &ledger.View{Epoch: 1}
	for _, id := range v {
		view.Members = append(view.Members, ledger.Member{Name: "n", Incarnation: id})
	}
	return &ledger.Facts{View: view}
}
func (v viewed) Keys() *ledger.Keys { return nil }

// diedWith is money whose process 1 has settled 60 and left 40 open of each budget and is dead; this is process 2.
func diedWith(t *testing.T, w *words, view viewed, budgets ...string) *money {
	t.Helper()
	c := journal.Config{Dir: filepath.Join(t.TempDir(), "usage"), Node: "n", Incarnation: 1, BootID: "b", Logger: slog.New(slog.DiscardHandler), Zone: ledger.LoadZone}
	l, err := journal.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range budgets {
		parts := func(n int64) []journal.Part {
			return []journal.Part{{Account: journal.Account{Tenant: "acme", Budget: b}, Amount: n}}
		}
		done, open := journal.Reservation{Parts: parts(70)}, journal.Reservation{Parts: parts(40)}
		err := errors.Join(l.Reserve(&done), l.Reserve(&open), l.Settle(&journal.Usage{ID: done.ID, Time: time.Now(), Outcome: "ok", Parts: parts(60)}))
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.Incarnation = 2
	if l, err = journal.Open(c); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	w.said = map[string]ledger.BudgetDraw{}
	return &money{
		n: &Node{log: slog.New(slog.DiscardHandler), self: 2, truth: view}, journal: l, bank: func() bank { return w },
		terms: func(k ledger.BudgetKey) ledger.BudgetTerms {
			return ledger.BudgetTerms{Name: "the " + k.Limit, Revision: 9}
		},
	}
}

// account is one that process 1 has part in.
func partOf(b string, spent, outstanding int64, end time.Time) ledger.BudgetAccount {
	a := ledger.BudgetAccount{Key: ledger.BudgetKey{Key: limiter.Key{Tenant: "acme", Limit: b}}, Holders: []ledger.BudgetHolder{
		{Holder: 2, Spent: 7, Outstanding: 7}, {Holder: 1, Spent: spent, Outstanding: outstanding},
	}}
	if !end.IsZero() {
		a.Key.Start, a.Key.End = end.Add(-time.Hour).UnixNano(), end.UnixNano()
	}
	return a
}

func TestLastWords(t *testing.T) {
	ago, soon := time.Now().Add(-5*time.Hour), time.Now().Add(time.Hour)
	for name, c := range map[string]struct {
		accounts []ledger.BudgetAccount
		lost     map[string]bool // what is said: whether what was held counts
	}{
		"the ledger knows less":             {[]ledger.BudgetAccount{partOf("a", 60, 90, time.Time{})}, map[string]bool{"a": false}},
		"it knows nothing":                  {nil, map[string]bool{"a": false}},
		"it knows all":                      {[]ledger.BudgetAccount{partOf("a", 100, 0, time.Time{})}, map[string]bool{}},
		"all, but for what is held":         {[]ledger.BudgetAccount{partOf("a", 100, 1, time.Time{})}, map[string]bool{"a": false}},
		"it knows more: the log is old":     {[]ledger.BudgetAccount{partOf("a", 101, 5, time.Time{}), partOf("b", 0, 5, soon)}, map[string]bool{"a": true, "b": true}},
		"it knows one that the log has not": {[]ledger.BudgetAccount{partOf("b", 1, 5, soon)}, map[string]bool{"a": true, "b": true}},
		"a block was never spent from":      {[]ledger.BudgetAccount{partOf("b", 0, 5, soon)}, map[string]bool{"a": false, "b": false}},
		"the log may have forgotten it":     {[]ledger.BudgetAccount{partOf("b", 3, 5, ago)}, map[string]bool{"a": false, "b": true}},
		"another's":                         {[]ledger.BudgetAccount{{Key: partOf("b", 0, 0, soon).Key, Holders: []ledger.BudgetHolder{{Holder: 3, Outstanding: 1}}}}, map[string]bool{"a": false}},
	} {
		t.Run(name, func(t *testing.T) {
			w := &words{accounts: c.accounts}
			m := diedWith(t, w, viewed{2}, "a")
			past := m.journal.Unclosed()
			past[0].Forgotten = time.Now().UnixNano()
			if err := m.settleAll(t.Context(), past); err != nil {
				t.Fatal(err)
			}
			for b, lost := range c.lost {
				d, ok := w.said[b]
				if want := map[string]int64{"a": 100}[b]; !ok || d.Lost != lost || d.Spent != want || !d.Final || d.N != lastDraw || d.Holder != 1 || d.Terms.Name != "the "+b {
					t.Errorf("of %s is said %v, %+v; want %d spent, lost %v", b, ok, d, want, lost)
				}
			}
			if len(w.said) != len(c.lost) || len(m.journal.Unclosed()) > 0 {
				t.Errorf("%d last words, want %d; %d are not closed", len(w.said), len(c.lost), len(m.journal.Unclosed()))
			}
		})
	}
}

// TestOneAccountHoldsUpNone: whatever the ledger says to one, the others are settled, and what it will never take does
// not keep the process open.
func TestOneAccountHoldsUpNone(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		open int
	}{
		"unknown":   {ledger.ErrUnknownOutcome, 1},
		"full":      {ledger.ErrBudgetFull, 1},
		"refused":   {&ledger.Refusal{Code: "invalid", Message: "no"}, 0},
		"forgotten": {ledger.ErrNoBudget, 0},
	} {
		w := &words{}
		w.answer = func(d *ledger.BudgetDraw) (ledger.BudgetDrawn, error) {
			if d.Key.Limit == "a" {
				return ledger.BudgetDrawn{}, c.err
			}
			return ledger.BudgetDrawn{N: d.N}, nil
		}
		m := diedWith(t, w, viewed{2}, "a", "b", "c")
		err := m.settleAll(t.Context(), m.journal.Unclosed())
		if (err != nil) != (c.open > 0) || len(w.said) != 3 || len(m.journal.Unclosed()) != c.open {
			t.Errorf("%s: %v, %d said, %d not closed", name, err, len(w.said), len(m.journal.Unclosed()))
		}
	}
}

// TestNothingIsSaidForTheLiving: while this process is not in the view, or one of before is.
func TestNothingIsSaidForTheLiving(t *testing.T) {
	for _, view := range []viewed{nil, {1}, {1, 2}, {3}} {
		w := &words{}
		m := diedWith(t, w, view, "a")
		if err := m.settleAll(t.Context(), m.journal.Unclosed()); err == nil || len(w.said) > 0 || len(m.journal.Unclosed()) != 1 {
			t.Errorf("in the view %v: %v, %d said", view, err, len(w.said))
		}
	}
}

// TestWhatWasLostIsWrittenDown, beside the words of the ledger.
func TestWhatWasLostIsWrittenDown(t *testing.T) {
	w := &words{accounts: []ledger.BudgetAccount{partOf("a", 130, 20, time.Time{})}}
	w.answer = func(d *ledger.BudgetDraw) (ledger.BudgetDrawn, error) {
		return ledger.BudgetDrawn{N: d.N, Lost: 20}, nil
	}
	m := diedWith(t, w, viewed{2}, "a")
	if err := m.settleAll(t.Context(), m.journal.Unclosed()); err != nil {
		t.Fatal(err)
	}
	var lost int64
	err := m.journal.Read(t.Context(), journal.Query{}, func(u *journal.Usage) error {
		if u.Outcome == journal.Lost {
			lost += u.Parts[0].Amount
		}
		return nil
	})
	if err != nil || lost != 20 {
		t.Errorf("%d are lost, %v, want 20", lost, err)
	}
}

// TestUnknownProcessesAreNamed: the usage log was lost, or its folder is another's.
func TestUnknownProcessesAreNamed(t *testing.T) {
	held := func(holder uint64, node string, outstanding int64) ledger.BudgetAccount {
		return ledger.BudgetAccount{Key: partOf("a", 0, 0, time.Time{}).Key, Holders: []ledger.BudgetHolder{{Holder: holder, Node: node, Outstanding: outstanding}}}
	}
	for name, c := range map[string]struct {
		accounts []ledger.BudgetAccount
		want     string
	}{
		"two of its own":    {[]ledger.BudgetAccount{held(5, "n", 30), held(6, "n", 4), held(5, "n", 2)}, "processes=2 held_nano_usd=36"},
		"another node's":    {[]ledger.BudgetAccount{held(5, "m", 30)}, ""},
		"one that is known": {[]ledger.BudgetAccount{held(1, "n", 30)}, ""},
		"itself":            {[]ledger.BudgetAccount{held(2, "n", 30)}, ""},
		"nothing is held":   {[]ledger.BudgetAccount{held(5, "n", 0)}, ""},
	} {
		w := &words{accounts: c.accounts}
		m := diedWith(t, w, viewed{2}, "a")
		var out bytes.Buffer
		m.n.cfg.NodeID, m.n.log = "n", slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn}))
		m.settlePast(t.Context())
		if got := out.String(); (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: the log says %q, want %q", name, got, c.want)
		}
	}
}

// TestACrashedRequestCostsWhatTheLedgerCounts: what a strict budget granted, which may be less than was asked for.
func TestACrashedRequestCostsWhatTheLedgerCounts(t *testing.T) {
	c := journal.Config{Dir: filepath.Join(t.TempDir(), "usage"), Node: "n", Incarnation: 1, BootID: "b", Logger: slog.New(slog.DiscardHandler), Zone: ledger.LoadZone}
	l, err := journal.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	m := &money{n: &Node{}, journal: l}
	b := proxy.Bill{RequestID: "clamped", Tenant: "acme", Reserved: 900, Charges: []proxy.BudgetCharge{
		{Budget: &proxy.Budget{Strict: true}, Key: limiter.Key{Tenant: "acme", Limit: "month"}, Cost: 900, Least: 10, Most: 900, Granted: 300},
	}}
	if err := errors.Join(m.record(&b, new(held)), l.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	c.Incarnation = 2
	if l, err = journal.Open(c); err != nil {
		t.Fatal(err)
	}
	var costs []int64
	err = l.Read(t.Context(), journal.Query{}, func(u *journal.Usage) error { costs = append(costs, u.Cost); return nil })
	if err := errors.Join(err, l.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	if past := l.Unclosed(); !slices.Equal(costs, []int64{300}) || len(past) != 1 || len(past[0].Accounts) != 1 || past[0].Accounts[0].Open != 300 {
		t.Errorf("the usage log says %d, the ledger is told %+v; both should have 300", costs, past)
	}
}
