package budget

import (
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"headgate/limiter"
)

var errLost = errors.New("lost")

// node is one process of the model: an account, its requests, and the draw that is on its way.
type node struct {
	account
	holder  uint64
	opens   []opened
	waiting []*ask
	under   bool // a draw of it is on its way
	past    []Draw
}

type opened struct{ granted, part int64 }

// world is what the model checks: processes, and the ledger between them.
type world struct {
	t        *rapid.T
	ledger   *modelLedger
	nodes    []*node
	mono     int64
	terms    *Terms
	key      Key
	actual   int64 // Σ of what settled requests cost
	overrun  int64 // Σ of what they cost beyond what they had been granted
	lowered  bool
	revived  bool // a draw came to the ledger after it had refused the same
	strict   bool
	override bool
	emergent int64 // granted under an override
}

func newWorld(t *rapid.T) *world {
	w := &world{t: t, ledger: newModelLedger(), mono: 5e9, strict: rapid.Bool().Draw(t, "strict")}
	w.terms = &Terms{Amount: rapid.SampledFrom([]int64{0, 1, 100, 1000, 100_000}).Draw(t, "amount"), Revision: 1, Name: "b", Alerts: []int{50, 80, 100}}
	w.key = Key{Key: limiter.Key{Tenant: "t", Limit: "b"}}
	if rapid.Bool().Draw(t, "period") {
		w.key.Start, w.key.End = w.ledger.now-5e9, w.ledger.now+60e9
	}
	for i := range rapid.IntRange(1, 3).Draw(t, "nodes") {
		n := &node{holder: uint64(i + 1)}
		n.account = newAccount(w.key, w.terms, w.at())
		w.nodes = append(w.nodes, n)
	}
	return w
}

func (w *world) at() instant { return instant{w.mono, w.ledger.now} }

func (w *world) node() *node { return w.nodes[rapid.IntRange(0, len(w.nodes)-1).Draw(w.t, "node")] }

// admit counts a request in.
func (n *node) take(w *world, granted, part int64) {
	n.admit(w.at(), granted)
	n.opens = append(n.opens, opened{granted, part})
	w.emergent += part
}

// told handles what the account decided.
func (w *world) told(n *node) {
	for len(n.decided) > 0 {
		decided := slices.Clone(n.decided)
		n.decided = n.decided[:0]
		for _, q := range decided {
			i := slices.Index(n.waiting, q)
			if i < 0 {
				w.t.Fatalf("an ask is decided that does not wait")
			}
			n.waiting = slices.Delete(n.waiting, i, i+1)
			if !q.ready {
				if q.refused == 0 {
					w.t.Fatalf("decided, and neither ready nor refused")
				}
				continue
			}
			if q.granted < q.least || q.granted > q.cost {
				w.t.Fatalf("granted %d of %d, at least %d", q.granted, q.cost, q.least)
			}
			n.leave(q)
			part, ok := n.hold(q.granted, true, q.emergency > 0)
			if !ok {
				w.t.Fatalf("what was ready cannot be held: %+v", q)
			}
			n.take(w, q.granted, part)
			n.serve()
		}
	}
}

func (w *world) take(t *rapid.T) {
	n := w.node()
	w.overTaken(n, rapid.SampledFrom([]int64{0, 1, 3, 10, 60, 500}).Draw(t, "cost"), rapid.Bool().Draw(t, "clampable"), outlook{})
}

func (w *world) overTaken(n *node, cost int64, clampable bool, o outlook) {
	n.touch(&Charge{Terms: w.terms, Cost: cost, Emergency: n.spare})
	if part, ok := n.hold(cost, false, false); ok {
		n.take(w, cost, part)
		return
	}
	q := &ask{cost: cost, least: cost}
	if clampable {
		q.least = (cost + 3) / 4
	}
	n.waiting = append(n.waiting, q)
	n.join(w.at(), q, o)
	w.told(n)
}

func (w *world) cutOffTake(t *rapid.T) {
	o := outlook{down: errLost, override: rapid.Bool().Draw(t, "override")}
	w.overTaken(w.node(), rapid.SampledFrom([]int64{1, 10, 60}).Draw(t, "cost"), rapid.Bool().Draw(t, "clampable"), o)
}

func (w *world) settle(t *rapid.T) {
	n := w.node()
	if len(n.opens) == 0 {
		return
	}
	i := rapid.IntRange(0, len(n.opens)-1).Draw(t, "which")
	o := n.opens[i]
	n.opens = slices.Delete(n.opens, i, i+1)
	most := o.granted
	if !w.strict {
		most = o.granted*2 + 3
	}
	actual := rapid.Int64Range(0, most).Draw(t, "actual")
	w.actual += actual
	w.overrun += max(0, actual-o.granted)
	n.settle(o.granted, o.part, actual)
	w.told(n)
}

// step lets a node begin what is due.
func (w *world) step(n *node) bool {
	if n.under {
		return false
	}
	d, what := n.account.step(w.at(), n.holder)
	switch what {
	case nothing:
		return false
	case forget:
		if n.spent != n.told || n.allowed > n.spent || n.open != 0 || n.account.opens != 0 || len(n.line) != 0 {
			w.t.Fatalf("forgotten with money: %+v", n.account)
		}
		n.account = newAccount(w.key, w.terms, w.at())
		return false
	case retry:
		if d != n.past[len(n.past)-1] {
			w.t.Fatalf("a retry differs: %+v, %+v", d, n.past[len(n.past)-1])
		}
	}
	n.past = append(n.past, d)
	n.under = true
	return true
}

// deliver lets the draw under way have an outcome.
func (w *world) deliver(n *node, how string) {
	d := n.draw
	var res Drawn
	var err error
	switch how {
	case "answered":
		res, err = w.ledger.draw(d)
	case "answer lost":
		_, _ = w.ledger.draw(d)
		err = errLost
	case "lost":
		err = errLost
	case "another's":
		res, err = w.ledger.draw(d)
		res.N, res.Granted = res.N+1, 1000
	}
	n.under = false
	o := outlook{}
	if errors.Is(err, errLost) && w.override {
		o = outlook{down: err, override: true}
	}
	n.answered(w.at(), res, err, o)
	w.told(n)
}

func (w *world) stepAny(*rapid.T) { w.step(w.node()) }

func (w *world) deliverAny(t *rapid.T) {
	if n := w.node(); n.under {
		w.deliver(n, rapid.SampledFrom([]string{"answered", "answered", "answered", "answer lost", "lost", "another's"}).Draw(t, "how"))
	}
}

func (w *world) repeat(t *rapid.T) {
	if n := w.node(); len(n.past) > 0 {
		w.ledger.fresh = false
		_, _ = w.ledger.draw(n.past[rapid.IntRange(0, len(n.past)-1).Draw(t, "past")])
		w.revived = w.revived || w.ledger.fresh && !n.drawing
	}
}

func (w *world) pass(t *rapid.T) {
	d := rapid.SampledFrom([]int64{1e6, 20e6, 300e6, 1e9, 11e9}).Draw(t, "passed")
	w.mono += d
	w.ledger.now += d
}

// check is what holds at every step.
func (w *world) check(t *rapid.T) {
	a := w.ledger.accounts[w.key]
	if w.ledger.believed > 0 {
		t.Fatalf("a node claims to hold more than was granted")
	}
	var spent, held, aside int64
	for _, n := range w.nodes {
		var open int64
		for _, o := range n.opens {
			open += o.granted
		}
		if n.account.open != open || n.account.opens != int64(len(n.opens)) {
			t.Fatalf("node %d has %d in %d requests open, the account says %d in %d", n.holder, open, len(n.opens), n.account.open, n.account.opens)
		}
		var known int64
		if a != nil && a.holders[n.holder] != nil {
			known = a.holders[n.holder].spent + a.holders[n.holder].out
		}
		if n.allowed > known && n.told > 0 || n.told == 0 && n.allowed > known {
			t.Fatalf("node %d may spend up to %d, the ledger knows of %d", n.holder, n.allowed, known)
		}
		if w.strict && n.avail() < 0 {
			t.Fatalf("node %d has %d available", n.holder, n.avail())
		}
		if n.aside < 0 || n.aside > n.spare {
			t.Fatalf("node %d has %d of %d aside", n.holder, n.aside, n.spare)
		}
		aside += n.aside
		spent += n.spent
		held += n.account.open + n.aside + max(n.avail(), 0)
	}
	if a == nil {
		return
	}
	if !w.lowered && aside > a.terms.Amount/2 {
		t.Fatalf("%d lie aside of %d", aside, a.terms.Amount)
	}
	if w.strict && !w.lowered && (a.spent+a.outstanding() > a.terms.Amount || spent+held > w.terms.Amount) {
		t.Fatalf("%d spent and %d outstanding of %d; the nodes have %d and %d", a.spent, a.outstanding(), a.terms.Amount, spent, held)
	}
	if !w.lowered && w.actual > a.terms.Amount+w.overrun {
		t.Fatalf("requests cost %d of %d, %d of it debt", w.actual, a.terms.Amount, w.overrun)
	}
	if a.spent > w.actual {
		t.Fatalf("the ledger has %d as spent, requests cost %d", a.spent, w.actual)
	}
}

// finish settles everything, lets every message arrive, and compares the books.
func (w *world) finish(t *rapid.T) {
	for _, n := range w.nodes {
		for _, o := range n.opens {
			n.settle(o.granted, o.part, 0)
		}
		n.opens = nil
		w.told(n)
	}
	for range 3000 {
		for _, n := range w.nodes {
			if n.under || w.step(n) {
				w.deliver(n, "answered")
			}
			for len(n.waiting) > 0 { // the shell's limit
				q := n.waiting[0]
				n.waiting = n.waiting[1:]
				n.leave(q)
				n.serve()
				w.told(n)
			}
			for _, o := range n.opens {
				n.settle(o.granted, o.part, 0)
			}
			n.opens = nil
		}
		w.mono += 500e6
		w.ledger.now += 500e6
	}
	w.check(t)
	a := w.ledger.accounts[w.key]
	if a == nil {
		if w.actual != 0 {
			t.Fatalf("%d was spent and never told", w.actual)
		}
		return
	}
	if a.spent != w.actual {
		t.Fatalf("the ledger has %d as spent, requests cost %d", a.spent, w.actual)
	}
	if out := a.outstanding(); out != 0 && !w.revived {
		t.Fatalf("%d is outstanding after all was settled: %+v", out, a.holders)
	}
}

func TestAccountAgainstAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		t.Repeat(map[string]func(*rapid.T){
			"take":     w.take,
			"take2":    w.take,
			"cut off":  w.cutOffTake,
			"settle":   w.settle,
			"settle2":  w.settle,
			"step":     w.stepAny,
			"step2":    w.stepAny,
			"deliver":  w.deliverAny,
			"deliver2": w.deliverAny,
			"repeat":   w.repeat,
			"time":     w.pass,
			"retell":   func(*rapid.T) { w.node().retell = true },
			"recall":   func(*rapid.T) { w.node().recall(w.at()) },
			"spare": func(t *rapid.T) {
				n := w.node()
				n.touch(&Charge{Terms: w.terms, Emergency: rapid.SampledFrom([]int64{0, 5, 50, 700}).Draw(t, "emergency")})
			},
			"override": func(*rapid.T) { w.override = !w.override },
			"member": func(*rapid.T) {
				h := w.node().holder
				w.ledger.denied[h] = !w.ledger.denied[h]
			},
			"terms": func(t *rapid.T) {
				terms := *w.terms
				terms.Amount, terms.Revision = rapid.Int64Range(0, 2000).Draw(t, "amount"), terms.Revision+1
				w.lowered = w.lowered || terms.Amount < w.terms.Amount
				w.terms = &terms
			},
			"": w.check,
		})
		clear(w.ledger.denied)
		w.finish(t)
	})
}
