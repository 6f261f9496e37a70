package budget

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Waiting.
const (
	// maxWait bounds how long a Take waits for draws, all of them together.
	maxWait = 2 * time.Second
	// maxTries bounds how often it tries anew after another account has helped.
	maxTries = 64
	// retryInFlight and retryUnavailable are what a refusal tells to wait.
	retryInFlight    = time.Second
	retryUnavailable = time.Second
)

var errDraining = errors.New("this process stops")

// request is a Take under way.
type request struct {
	cs    []Charge
	out   []Taken
	cells [MaxCharges]*cell
	order [MaxCharges]uint8 // of the charges, by their cells' seq
	most  int64             // what is granted where less will do, at most
	by    int               // the charge because of which it is that
	ask   *ask              // ready, at the cell of charge waited
	at    int               // that charge
	timer *time.Timer       // of all waiting; nil before
	// emergency says of a charge that what lies aside may be taken: its account has said so.
	emergency [MaxCharges]bool
}

// Take grants all charges or none, and says in out, of the same length, what each gave. It waits for
// draws while ctx lives, for two seconds at most. Its errors are *Refused and ctx's. After nil, Settle is
// due.
//
// Charges for which less will do are granted the same amount: the most, up to the least of their costs, that
// all of them afford.
func (m *Manager) Take(ctx context.Context, cs []Charge, out []Taken) error {
	if len(cs) > MaxCharges || len(out) != len(cs) {
		return fmt.Errorf("budget: %d charges with room for %d: a request has %d at most, and as much room as charges", len(cs), len(out), MaxCharges)
	}
	r := request{cs: cs, out: out, most: MaxAmount}
	for i := range cs {
		if cs[i].clampable() {
			if c := amount(cs[i].Cost); c < r.most {
				r.most, r.by = c, i
			}
		}
	}
	if len(cs) == 0 {
		return nil
	}
	at := m.instant()
	if refused := m.locate(&r, at); refused != nil {
		return m.count(refused)
	}
	for i := 1; i < len(cs); i++ {
		if a, b := r.order[i-1], r.order[i]; r.cells[a] == r.cells[b] {
			return fmt.Errorf("budget: charges %d and %d are of the same account: make one of them", a, b)
		}
	}
	for tries := 0; ; tries++ {
		if refused := m.lock(&r, at); refused != nil {
			m.abandon(&r, at)
			return m.count(refused)
		}
		q, refused := m.try(&r, at, tries)
		if q == nil && refused == nil {
			r.stop()
			return nil
		}
		if refused == nil {
			var err error
			if refused, err = m.wait(ctx, &r, q); err != nil {
				r.stop()
				return err
			}
		}
		if refused != nil {
			r.stop()
			return m.count(refused)
		}
		at = m.instant()
	}
}

func (c *Charge) clampable() bool { return c.Least > 0 && c.Least < c.Cost }

// least is what will do.
func (c *Charge) least() int64 {
	if c.clampable() {
		return c.Least
	}
	return amount(c.Cost)
}

// cost is what charge i is to be granted now.
func (r *request) cost(i int) int64 {
	if r.cs[i].clampable() {
		return r.most
	}
	return amount(r.cs[i].Cost)
}

func (r *request) stop() {
	if r.timer != nil {
		r.timer.Stop()
	}
}

// locate finds the cells and their order.
func (m *Manager) locate(r *request, at instant) *Refused {
	for i := range r.cs {
		ch := &r.cs[i]
		if r.cells[i] = m.table.find(&ch.Key); r.cells[i] == nil && ch.least() > amount(ch.Terms.Amount) {
			// It needs no account, and nobody's accounts are made for it.
			a := newAccount(ch.Key, ch.Terms, at)
			return a.refusal(i, Exhausted, nil, at)
		}
	}
	for i := range r.cs {
		if r.cells[i] == nil {
			var err error
			if r.cells[i], err = m.table.obtain(&r.cs[i], at, nil); err != nil {
				return m.full(i, &r.cs[i].Key, at, err)
			}
		}
		r.insert(i)
	}
	return nil
}

// insert puts charge i into the order of those before it.
func (r *request) insert(i int) {
	j := i
	for ; j > 0 && r.cells[r.order[j-1]].seq > r.cells[i].seq; j-- {
		r.order[j] = r.order[j-1]
	}
	r.order[j] = uint8(i)
}

// lock locks all cells, unless there is no room for one that was forgotten meanwhile.
func (m *Manager) lock(r *request, at instant) *Refused {
	for {
		var gone *cell
		r.eachCell(func(c *cell) {
			c.mu.Lock()
			if c.gone {
				gone = c
			}
		})
		if gone == nil {
			return nil
		}
		r.eachCell(func(c *cell) { c.mu.Unlock() })
		for i := range r.cs {
			if r.cells[i] == gone {
				var err error
				if r.cells[i], err = m.table.obtain(&r.cs[i], at, gone); err != nil {
					return m.full(i, &r.cs[i].Key, at, err)
				}
			}
		}
		for i := range r.cs {
			r.insert(i)
		}
	}
}

// eachCell calls f for each cell, in order.
func (r *request) eachCell(f func(*cell)) {
	for _, i := range r.order[:len(r.cs)] {
		f(r.cells[i])
	}
}

// try takes all charges, or has the request wait at one that lacks something. The cells are locked; it unlocks them.
func (m *Manager) try(r *request, at instant, tries int) (*ask, *Refused) {
	defer r.eachCell(func(c *cell) {
		c.serve()
		m.after(c, at)
		c.mu.Unlock()
	})
	for i := range r.cs {
		r.cells[i].touch(&r.cs[i])
	}
	if r.ask != nil { // what it was granted is for this try
		r.cells[r.at].leave(r.ask)
	}
	waited := r.ask
	r.ask = nil
	if m.draining.Load() { // its walk may have missed an account that has just come
		r.eachCell(func(c *cell) { c.stop() })
		return nil, r.refusal(0, Unavailable, errDraining, at)
	}
	for i := range r.cs {
		if r.cs[i].clampable() && r.most < r.cs[i].Least {
			return nil, r.refusal(r.by, r.cells[r.by].kindFor(r.cs[i].Least), nil, at)
		}
		cost, c := r.cost(i), r.cells[i]
		part, ok := c.hold(cost, waited != nil && i == r.at, r.emergency[i])
		if ok {
			r.out[i] = Taken{Granted: cost, cell: c, emergency: part}
			continue
		}
		var held [MaxCharges]int64
		for j := range i {
			held[j] = r.out[j].Granted
			r.cells[j].release(held[j], r.out[j].emergency)
			r.out[j] = Taken{}
		}
		if tries >= maxTries {
			return nil, r.refusal(i, InFlight, nil, at)
		}
		q, refused := m.join(r, i, cost, at)
		for j := 0; j < i && q != nil; j++ {
			r.cells[j].promise(at, held[j])
		}
		return q, refused
	}
	for i := range r.cs {
		r.cells[i].admit(at, r.out[i].Granted)
		r.cells[i].fill(&r.out[i])
	}
	return nil, nil
}

// join has the request wait at charge i.
func (m *Manager) join(r *request, i int, cost int64, at instant) (*ask, *Refused) {
	q := &ask{cost: cost, least: r.cs[i].least(), done: make(chan struct{})}
	r.at = i
	r.cells[i].join(at, q, m.outlook())
	if q.refused != 0 {
		return nil, r.refusal(i, q.refused, q.err, at)
	}
	return q, nil
}

// wait waits until q is decided, ctx ends, or the request has waited long enough.
func (m *Manager) wait(ctx context.Context, r *request, q *ask) (*Refused, error) {
	if r.timer == nil {
		r.timer = time.NewTimer(maxWait)
		m.met.waits.Inc()
	}
	c := r.cells[r.at]
	var err error
	select {
	case <-q.done:
	case <-r.timer.C:
		r.timer.Reset(0) // should it wait at another account, then no longer
	case <-ctx.Done():
		err = fmt.Errorf("budget: waiting for the ledger: %w", context.Cause(ctx))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at := m.instant()
	switch {
	case q.ready && err == nil:
		r.granted(q)
		return nil, nil
	case q.refused != 0:
		return r.refusal(r.at, q.refused, q.err, at), nil
	}
	c.leave(q)
	if err == nil && q.least <= c.avail() { // it has waited long enough for more
		c.grant(q, min(q.cost, c.avail()))
		m.after(c, at)
		r.granted(q)
		return nil, nil
	}
	c.serve()
	m.after(c, at)
	if err != nil {
		return nil, err
	}
	if c.fails > 0 || c.fruitless == 0 {
		return r.refusal(r.at, Unavailable, m.outlook().down, at), nil
	}
	return r.refusal(r.at, InFlight, nil, at), nil
}

// abandon gives back what the request was granted where it waited.
func (m *Manager) abandon(r *request, at instant) {
	r.stop()
	if r.ask == nil {
		return
	}
	c := r.cells[r.at] // it is not gone: the ask lies open there
	c.mu.Lock()
	c.leave(r.ask)
	c.serve()
	m.after(c, at)
	c.mu.Unlock()
}

// granted notes that the ask that was waited for is ready.
func (r *request) granted(q *ask) {
	r.ask = q
	r.emergency[r.at] = r.emergency[r.at] || q.emergency > 0
	if q.granted < q.cost {
		r.most, r.by = q.granted, r.at
	}
}

// refusal describes a refusal by charge i. Its cell is locked.
func (r *request) refusal(i int, kind Kind, err error, at instant) *Refused {
	c := r.cells[i]
	return c.refusal(i, kind, err, at)
}

func (a *account) refusal(i int, kind Kind, err error, at instant) *Refused {
	f := &Refused{Index: i, Kind: kind, Used: a.total(), Amount: a.limit(), Left: a.left(), Now: at.wall, Err: err}
	switch kind {
	case InFlight:
		f.RetryAfter = retryInFlight
	case Unavailable:
		f.RetryAfter = retryUnavailable
	case Exhausted:
		switch {
		case a.key.End != 0:
			f.RetryAfter = max(time.Duration(a.key.End-at.wall), 0)
		case a.terms.Window > 0:
			f.RetryAfter = max(a.terms.Slot, retryInFlight)
		}
	case OutOfPeriod:
		f.RetryAfter = max(time.Duration(a.key.Start-at.wall), 0)
	}
	return f
}

// fill says how the account stands.
func (a *account) fill(t *Taken) {
	t.Used, t.Amount, t.Left = a.total(), a.limit(), a.left()
	t.Alert = a.alert(t.Used, t.Amount)
}

// Settle ends what Take granted: actual is what the request cost each of its budgets, 0 if nothing came of it. It
// never waits. What was settled already is left as it is. Used, Amount, Left and Alert are then as they stand.
func (m *Manager) Settle(taken []Taken, actual int64) {
	at := m.instant()
	actual = amount(actual)
	for i := range taken {
		t := &taken[i]
		c := t.cell
		if c == nil {
			continue
		}
		t.cell = nil
		c.mu.Lock()
		c.settle(t.Granted, t.emergency, actual)
		c.fill(t)
		m.after(c, at)
		c.mu.Unlock()
	}
}

// Peek says in out what Take would, without a word with the ledger, and changes nothing: an account of which it has not heard
// yet gives all. What it says of is not to be settled.
func (m *Manager) Peek(cs []Charge, out []Taken) error {
	if len(out) != len(cs) {
		return fmt.Errorf("budget: %d charges with room for %d", len(cs), len(out))
	}
	at, o := m.instant(), m.outlook()
	for i := range cs {
		ch := &cs[i]
		cost := amount(ch.Cost)
		c := m.table.find(&ch.Key)
		if c == nil {
			out[i] = Taken{Granted: cost, Amount: amount(ch.Terms.Amount), Left: amount(ch.Terms.Amount)}
			if o.down != nil && cost > 0 {
				return &Refused{Index: i, Kind: Unavailable, RetryAfter: retryUnavailable, Amount: amount(ch.Terms.Amount), Err: o.down}
			}
			continue
		}
		c.mu.Lock()
		kind, err := c.peek(at, ch, o, &out[i])
		var refused *Refused
		if kind != 0 {
			refused = c.refusal(i, kind, err, at)
		}
		c.mu.Unlock()
		if refused != nil {
			return refused
		}
	}
	return nil
}

func (a *account) peek(at instant, ch *Charge, o outlook, t *Taken) (Kind, error) {
	a.fill(t)
	t.Granted = min(amount(ch.Cost), t.Left)
	least := ch.least()
	if least <= max(a.avail(), 0) {
		return 0, nil
	}
	switch kind, err := a.shut(at); {
	case kind != 0:
		return kind, err
	case o.down != nil:
		return Unavailable, o.down
	case least <= t.Left:
		return 0, nil
	}
	return a.kindFor(least), nil
}
