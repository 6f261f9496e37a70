package budget

import (
	"errors"
	"fmt"
	"sync"
)

// modelLedger is the ledger as this room is promised it, written from the promise alone.
type modelLedger struct {
	now      int64
	accounts map[Key]*modelAccount
	recalled func(Key)
	denied   map[uint64]bool // holders that are not members
	draws    int
	fresh    bool // the last draw was a new one
	believed int  // holdings above what was outstanding: there should be none
}

type modelAccount struct {
	terms   *Terms
	spent   int64
	holders map[uint64]*modelHolder
}

type modelHolder struct {
	n          uint64
	res        Drawn
	spent, out int64
	closed     bool
}

var errModelNotMember = fmt.Errorf("%w: the holder is not in the view", ErrNotDone)

func newModelLedger() *modelLedger {
	return &modelLedger{now: 1_000_000_000_000, accounts: map[Key]*modelAccount{}, denied: map[uint64]bool{}}
}

func (a *modelAccount) outstanding() (sum int64) {
	for _, h := range a.holders {
		sum += h.out
	}
	return sum
}

func (a *modelAccount) others(holder uint64) (sum int64) {
	for id, h := range a.holders {
		if id != holder {
			sum += h.out
		}
	}
	return sum
}

func (l *modelLedger) draw(d Draw) (Drawn, error) {
	l.draws++
	if d.Spent < 0 || d.Holding < 0 || d.Want < 0 || d.Need > d.Want || d.Want > 0 && (d.Least < 1 || d.Least > d.Need) || d.N == 0 {
		return Drawn{}, errors.New("a draw that makes no sense")
	}
	a := l.accounts[d.Key]
	var h *modelHolder
	if a != nil {
		h = a.holders[d.Holder]
	}
	switch {
	case h != nil && d.N == h.n:
		return h.res, nil
	case h != nil && d.N < h.n:
		return Drawn{}, &StaleError{N: h.n, Spent: h.spent}
	case d.Final && h == nil && (d.Spent == 0 || a == nil), a == nil && d.Want == 0 && d.Spent == 0 && d.Holding == 0:
		return Drawn{}, ErrNoAccount
	case d.Want > 0 && d.Key.End != 0 && (l.now < d.Key.Start || l.now >= d.Key.End):
		return Drawn{}, &PeriodError{Now: l.now}
	case d.Want > 0 && l.denied[d.Holder]:
		return Drawn{}, errModelNotMember
	case a == nil:
		a = &modelAccount{terms: d.Terms, holders: map[uint64]*modelHolder{}}
		l.accounts[d.Key] = a
	}
	if h == nil {
		h = &modelHolder{}
		a.holders[d.Holder] = h
	}
	l.fresh = true
	if d.Terms.Revision > a.terms.Revision {
		a.terms = d.Terms
	}
	delta := max(0, d.Spent-h.spent)
	a.spent += delta
	h.spent += delta
	if d.Holding > max(0, h.out-delta) && !h.closed {
		l.believed++
	}
	h.out = d.Holding // whatever it is
	if h.closed {
		h.out = 0
	}
	granted := int64(0)
	if free := a.terms.Amount - a.spent - a.outstanding(); d.Want > 0 && !h.closed && free > 0 {
		if g := min(d.Want, max(min(d.Need, free), free/8)); g >= d.Least {
			granted = g
		}
	}
	h.out += granted
	if d.Final {
		h.closed, h.out = true, 0
	}
	h.n = d.N
	h.res = Drawn{
		N: d.N, Granted: granted, Spent: a.spent, Amount: a.terms.Amount, Others: a.others(d.Holder),
		Free: a.terms.Amount - a.spent - a.outstanding(), Now: l.now, Closed: h.closed,
	}
	if granted < min(d.Want, d.Need) && h.res.Others > 0 && l.recalled != nil {
		l.recalled(d.Key)
	}
	return h.res, nil
}

// lockedLedger is one for concurrent Managers, whose recalls reach all of them.
type lockedLedger struct {
	sync.Mutex
	modelLedger
	managers []*Manager
}

func (l *lockedLedger) Draw(d Draw, now int64) (Drawn, error) {
	l.Lock()
	l.now = max(l.now, now)
	var wanted []Key
	l.recalled = func(k Key) { wanted = append(wanted, k) }
	res, err := l.modelLedger.draw(d)
	managers := l.managers
	l.Unlock()
	for _, k := range wanted {
		for _, m := range managers {
			m.Recall(k)
		}
	}
	return res, err
}
