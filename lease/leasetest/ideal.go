package leasetest

import (
	"fmt"
	"math/big"
	"slices"

	"headgate/limiter"
)

// revision is a limit and from when on it may be in force somewhere.
type revision struct {
	limit limiter.Limit
	from  int64
}

// ideal is a token bucket that one process keeps on true time, 1 % faster than its limit says. It
// is fed what the cluster spends and gets back, at the instants at which that changed a level there.
// Amounts come late and are put where they belong. All is exact: scaled by period·100.
//
// While a limit changes, of the limits that may be in force the most generous counts.
type ideal struct {
	revs    []revision
	durable bool
	scale   *big.Int
	entries []entry
	over    string // what was wrong first

	a, b big.Int // scratch
}

type entry struct {
	at     int64
	amount int64 // spent; negative: came back
	kind   entryKind
	// Scaled, after the entry: what is owed, and what would be had there been no debts. What holders had
	// in hand before a debt they may still spend.
	owed, plain *big.Int
	debtor      int64 // since when more than the burst is owed, debts included; never: it is not
}

type entryKind uint8

const (
	admitted entryKind = iota
	oversize           // admitted above the burst, which only a full bucket may
	forced             // debts and refunds: nobody was asked
	turn               // a limit comes into force
	forgiven           // nobody knows what was owed beyond the least burst that a bucket may be made with since
)

// debtFor is how long something may still be admitted of a bucket that is in debt by what owners know: until they have
// called back what holders have, or these have lost touch.
const debtFor = 2500 * ms

// heardBy is when everybody has heard of a limit.
const heardBy = 400 * ms

func newIdeal(first limiter.Limit) *ideal {
	return &ideal{revs: []revision{{limit: first}}, durable: first.Durable(), scale: big.NewInt(int64(first.Rate.Per) * 100)}
}

// revise lets another limit, of the same period, come into force at some instant.
func (d *ideal) revise(at int64, l limiter.Limit) {
	d.revs = append(d.revs, revision{l, at})
	d.put(at, 0, turn)
	for i := range d.entries { // a bucket that was empty at a takeover may be made with this one
		d.settle(i)
	}
}

// least is the least burst that a bucket may be made with that was empty at an instant: nodes hear of a limit late, and
// of a bucket later still.
func (d *ideal) least(at int64) (burst int64) {
	burst = never
	for i := range d.revs {
		if i+1 == len(d.revs) || d.revs[i+1].from+heardBy > at {
			burst = min(burst, d.revs[i].limit.Burst)
		}
	}
	return burst
}

// most is the most generous rate and burst that may be in force at an instant.
func (d *ideal) most(at int64) (count, burst int64) {
	for _, r := range d.revs {
		if r.from <= at {
			count, burst = max(count, r.limit.Rate.Count), max(burst, r.limit.Burst)
		}
	}
	return count, burst
}

// put enters an amount and looks at all that came after.
func (d *ideal) put(at, amount int64, kind entryKind) {
	i := len(d.entries)
	for i > 0 && d.entries[i-1].at > at {
		i--
	}
	d.entries = slices.Insert(d.entries, i, entry{at: at, amount: amount, kind: kind, owed: new(big.Int), plain: new(big.Int)})
	for ; i < len(d.entries); i++ {
		d.settle(i)
	}
}

// settle computes what is owed after entry i, and says whether it may be.
func (d *ideal) settle(i int) {
	e := &d.entries[i]
	d.owedBefore(e.owed, i, e.at, false)
	d.owedBefore(e.plain, i, e.at, true)
	empty := e.owed.Sign() == 0
	_, burst := d.most(e.at)
	d.b.SetInt64(burst)
	d.b.Mul(&d.b, d.scale)
	if e.debtor = never; i > 0 && e.owed.Cmp(&d.b) > 0 {
		e.debtor = d.entries[i-1].debtor
	}
	if d.over == "" && e.kind == admitted && e.amount > 0 && e.at-debtFor > e.debtor {
		d.over = fmt.Sprintf("%d admitted at %d ms, in debt since %d ms", e.amount, e.at/ms, e.debtor/ms)
	}
	if e.kind == forgiven {
		d.forgive(e)
	}
	d.add(e.owed, e.amount)
	if e.kind != forced || e.amount < 0 {
		d.add(e.plain, e.amount)
	}
	if d.b.SetInt64(burst); e.owed.Cmp(d.b.Mul(&d.b, d.scale)) <= 0 {
		e.debtor = never
	} else {
		e.debtor = min(e.debtor, e.at)
	}
	if e.amount <= 0 || d.over != "" {
		return
	}
	d.b.SetInt64(burst)
	switch {
	case e.kind == oversize && !empty:
		d.over = fmt.Sprintf("%d admitted above the burst of %d at %d ms, when the bucket was not full", e.amount, burst, e.at/ms)
	case e.kind == admitted && e.plain.Cmp(d.b.Mul(&d.b, d.scale)) > 0:
		d.over = fmt.Sprintf("some window that ends at %d ms admitted %s over burst + 1.01·rate·w (burst %d, the last cost %d)",
			e.at/ms, d.units(new(big.Int).Sub(e.plain, &d.b)), burst, e.amount)
	}
}

// forgive lets what was owed beyond a burst go.
func (d *ideal) forgive(e *entry) {
	if d.durable { // the ledger knows what was admitted, and of no debt
		e.owed.Set(e.plain)
		return
	}
	d.b.SetInt64(d.least(e.at))
	d.b.Mul(&d.b, d.scale)
	for _, z := range []*big.Int{e.owed, e.plain} {
		if z.Cmp(&d.b) > 0 {
			z.Set(&d.b)
		}
	}
}

func (d *ideal) add(z *big.Int, amount int64) {
	d.a.SetInt64(amount)
	z.Add(z, d.a.Mul(&d.a, d.scale))
	if z.Sign() < 0 {
		z.SetInt64(0)
	}
}

// owedBefore sets z to what is owed at an instant at which entries [0,i) are over; plain: without debts.
func (d *ideal) owedBefore(z *big.Int, i int, at int64, plain bool) {
	if i == 0 {
		z.SetInt64(0)
		return
	}
	p := &d.entries[i-1]
	was := p.owed
	if plain {
		was = p.plain
	}
	count, _ := d.most(p.at)
	d.a.SetInt64(at - p.at)
	d.b.SetInt64(count * 101)
	z.Sub(was, d.a.Mul(&d.a, &d.b))
	if z.Sign() < 0 {
		z.SetInt64(0)
	}
}

// room says by how much spendable exceeds what the ideal bucket has at an instant; nil: it does not. plain: as if
// there were no debts.
func (d *ideal) room(at, spendable int64, plain bool) (excess *big.Int) {
	i := len(d.entries)
	for i > 0 && d.entries[i-1].at > at {
		i--
	}
	var owed big.Int
	d.owedBefore(&owed, i, at, plain)
	_, burst := d.most(at)
	d.a.SetInt64(burst - spendable)
	left := d.a.Mul(&d.a, d.scale)
	if owed.Cmp(left) <= 0 {
		return nil
	}
	return owed.Sub(&owed, left)
}

func (d *ideal) units(scaled *big.Int) string {
	return new(big.Rat).SetFrac(scaled, d.scale).FloatString(6)
}

// level is what is in the bucket at an instant, in whole units, rounded down.
func (d *ideal) level(at int64) int64 {
	var owed big.Int
	d.owedBefore(&owed, len(d.entries), at, false)
	_, burst := d.most(at)
	owed.Add(&owed, d.scale)
	owed.Sub(&owed, big.NewInt(1))
	return burst - owed.Div(&owed, d.scale).Int64()
}

// windows is the ideal of a fixed window: what each index admitted, less what came back into it.
type windows struct {
	revs        []revision
	used, debts map[int64]int64
}

func (d *windows) count(at int64) (count int64) {
	for _, r := range d.revs {
		if r.from <= at {
			count = max(count, r.limit.Rate.Count)
		}
	}
	return count
}
