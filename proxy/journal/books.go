package journal

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// total is what a book has for an account, in nano-dollars.
type total struct {
	settled, crashed, lost int64
}

// pending is a reservation that is open.
type pending struct {
	payload  []byte // its record
	id       uint64
	segment  uint64 // where the record stands
	settling bool   // a Usage for it is on its way; under Log.mu
}

// book is what one incarnation did with money: pure, and the same whether it comes from
// records as they are written, from the records of a file, or from a checkpoint.
type book struct {
	incarnation uint64
	node, boot  string
	damaged     string // why its records may not be whole
	stopped     bool   // cleanly, or read by a later process: no machine that goes down takes any of it away
	closed      bool   // the ledger has the last word
	forgotten   int64  // accounts whose period ended before then may be missing
	totals      map[Account]*total
	open        map[uint64]*pending
}

func newBook(incarnation uint64, node, boot string) *book {
	return &book{
		incarnation: incarnation, node: node, boot: boot,
		totals: map[Account]*total{}, open: map[uint64]*pending{},
	}
}

// damage marks the book; the first reason stays.
func (b *book) damage(why string) {
	if b.damaged == "" {
		b.damaged = why
	}
}

func (b *book) total(a *Account) *total {
	t := b.totals[*a]
	if t == nil {
		t = &total{}
		b.totals[*a] = t
	}
	return t
}

// usage enters what ended, and gives the reservation that it ended, if that was open.
func (b *book) usage(id uint64, outcome string, parts []Part) *pending {
	for i := range parts {
		p := &parts[i]
		switch t := b.total(&p.Account); outcome {
		case Lost:
			t.lost = p.Amount // admitUsage lets the first pass
		case Crashed:
			t.crashed = add(t.crashed, p.Amount)
		default:
			t.settled = add(t.settled, p.Amount)
		}
	}
	p := b.open[id]
	delete(b.open, id)
	return p
}

// add adds amounts that are not negative, and stays at the end of an int64.
func add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// past is the book for whoever tells the ledger.
func (b *book) past() Past {
	p := Past{Incarnation: b.incarnation, Node: b.node, Damaged: b.damaged, Forgotten: b.forgotten, Accounts: make([]Total, 0, len(b.totals))}
	for a, t := range b.totals {
		p.Accounts = append(p.Accounts, Total{Account: a, Settled: t.settled, Open: t.crashed, Lost: t.lost})
	}
	slices.SortFunc(p.Accounts, func(x, y Total) int { return x.compare(&y.Account) })
	return p
}

func (a *Account) compare(b *Account) int {
	return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Budget, b.Budget), cmp.Compare(a.Subject, b.Subject),
		cmp.Compare(a.Start, b.Start), cmp.Compare(a.End, b.End))
}

// trim forgets accounts whose period ended before a time and of which nothing is open. The ledger
// should have heard of them long ago; where it has not, what it granted is all that is known.
func (b *book) trim(endedBefore int64) error {
	var ended []Account
	for a := range b.totals {
		if a.End != 0 && a.End < endedBefore {
			ended = append(ended, a)
		}
	}
	if len(ended) == 0 {
		return nil
	}
	held := map[Account]bool{}
	var r Reservation
	for _, p := range b.open {
		if err := p.read(nil, &r); err != nil {
			return err
		}
		for i := range r.Parts {
			held[r.Parts[i].Account] = true
		}
	}
	for _, a := range ended {
		if !held[a] {
			delete(b.totals, a)
			b.forgotten = max(b.forgotten, a.End+1)
		}
	}
	return nil
}

// unseen says whether a reservation names an account that the book does not have.
func (b *book) unseen(p *pending) bool {
	var r Reservation
	if err := p.read(nil, &r); err != nil {
		return true // it is our own, and can be read
	}
	return slices.ContainsFunc(r.Parts, func(p Part) bool { return b.totals[p.Account] == nil })
}

// read gives the reservation.
func (p *pending) read(m names, r *Reservation) error {
	_, message, err := parseRecord(p.payload)
	if err == nil {
		err = m.reservation(message, r)
	}
	if err != nil {
		return fmt.Errorf("reservation %d: %w", p.id, err)
	}
	return nil
}

// partBytes is the size at which a checkpoint goes on in another record: with the longest
// item on top it stays below maxPayload.
const partBytes = 16 << 10

// checkpoint gives the book's records, at least one.
func (b *book) checkpoint() [][]byte {
	var parts [][]byte
	rec, from := b.checkpointHead()
	next := func() {
		if len(rec) >= partBytes {
			parts = append(parts, end(rec, from))
			rec, from = b.checkpointHead()
		}
	}
	for a, t := range b.totals {
		rec = putTotal(rec, 6, &a, t)
		next()
	}
	for _, p := range b.open {
		_, message, _ := parseRecord(p.payload) // it was read before, or is our own
		rec = putText(rec, 7, string(message))
		next()
	}
	return append(parts, end(rec, from))
}

func (b *book) checkpointHead() (rec []byte, from int) {
	rec, from = begin(nil, recCheckpoint)
	rec = putFixed(rec, 1, b.incarnation)
	rec = putText(rec, 2, b.node)
	rec = putText(rec, 3, b.boot)
	rec = putText(rec, 4, b.damaged)
	rec = putBool(rec, 5, b.stopped)
	rec = putBool(rec, 8, b.closed)
	return putFixed(rec, 9, uint64(b.forgotten)), from
}

// books are those of the incarnations that the ledger may not know in full, the oldest first.
type books []*book

func (bs books) find(incarnation uint64) *book {
	for _, b := range bs {
		if b.incarnation == incarnation {
			return b
		}
	}
	return nil
}

// load adds what a Checkpoint says.
func (bs books) load(message []byte, segment uint64) (books, error) {
	part, items := newBook(0, "", ""), fields{rest: message}
	f := fields{rest: message}
	for f.next() {
		switch f.field {
		case 1:
			part.incarnation = f.v
		case 2:
			part.node = string(f.data)
		case 3:
			part.boot = string(f.data)
		case 4:
			part.damaged = string(f.data)
		case 5:
			part.stopped = f.v != 0
		case 8:
			part.closed = f.v != 0
		case 9:
			part.forgotten = int64(f.v)
		}
	}
	if f.bad || part.incarnation == 0 {
		return bs, errMalformed
	}
	b := bs.find(part.incarnation)
	if b == nil {
		b, bs = part, append(bs, part)
	}
	for items.next() {
		switch items.field {
		case 6:
			if err := b.loadTotal(items.data); err != nil {
				return bs, err
			}
		case 7:
			rec, from := begin(nil, recReservation)
			if err := b.reserve(end(append(rec, items.data...), from), segment); err != nil {
				return bs, err
			}
		}
	}
	return bs, nil
}

func (b *book) loadTotal(message []byte) error {
	var a Account
	var t total
	f := fields{rest: message}
	for f.next() {
		switch f.field {
		case 1:
			if err := names(nil).account(f.data, &a); err != nil {
				return err
			}
		case 2:
			t.settled = int64(f.v)
		case 3:
			t.crashed = int64(f.v)
		case 4:
			t.lost = int64(f.v)
		}
	}
	b.totals[a] = &t
	return f.err()
}

// reserve enters a reservation's record, which it keeps.
func (b *book) reserve(record []byte, segment uint64) error {
	p := &pending{payload: record, segment: segment}
	var r Reservation
	if err := p.read(nil, &r); err != nil {
		return err
	}
	p.id = r.ID
	b.open[r.ID] = p
	return nil
}
