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
	scale   *big.Int
	entries []entry
	over    string // what was wrong first

	a, b big.Int // scratch
}

type entry struct {
	at     int64
	amount int64 // spent; negative: came back
	kind   entryKind
	owed   *big.Int // scaled, after the entry
}

type entryKind uint8

const (
	admitted entryKind = iota
	oversize           // admitted above the burst, which only a full bucket may
	forced             // debts and refunds: nobody was asked
	turn               // a limit comes into force
)

func newIdeal(first limiter.Limit) *ideal {
	return &ideal{revs: []revision{{limit: first}}, scale: big.NewInt(int64(first.Rate.Per) * 100)}
}

// revise lets another limit, of the same period, come into force at some instant.
func (d *ideal) revise(at int64, l limiter.Limit) {
	d.revs = append(d.revs, revision{l, at})
	d.put(at, 0, turn)
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
	d.entries = slices.Insert(d.entries, i, entry{at: at, amount: amount, kind: kind, owed: new(big.Int)})
	for ; i < len(d.entries); i++ {
		d.settle(i)
	}
}

// settle computes what is owed after entry i, and says whether it may be.
func (d *ideal) settle(i int) {
	e := &d.entries[i]
	d.owedBefore(e.owed, i, e.at)
	empty := e.owed.Sign() == 0
	d.a.SetInt64(e.amount)
	e.owed.Add(e.owed, d.a.Mul(&d.a, d.scale))
	if e.owed.Sign() < 0 {
		e.owed.SetInt64(0)
	}
	if e.amount <= 0 || d.over != "" {
		return
	}
	_, burst := d.most(e.at)
	d.b.SetInt64(burst)
	switch {
	case e.kind == oversize && !empty:
		d.over = fmt.Sprintf("%d admitted above the burst of %d at %d ms, when the bucket was not full", e.amount, burst, e.at/ms)
	case e.kind == admitted && e.owed.Cmp(d.b.Mul(&d.b, d.scale)) > 0:
		d.over = fmt.Sprintf("some window that ends at %d ms admitted %s over burst + 1.01·rate·w (burst %d, the last cost %d)",
			e.at/ms, d.units(new(big.Int).Sub(e.owed, &d.b)), burst, e.amount)
	}
}

// owedBefore sets z to what is owed at an instant at which entries [0,i) are over.
func (d *ideal) owedBefore(z *big.Int, i int, at int64) {
	if i == 0 {
		z.SetInt64(0)
		return
	}
	p := &d.entries[i-1]
	count, _ := d.most(p.at)
	d.a.SetInt64(at - p.at)
	d.b.SetInt64(count * 101)
	z.Sub(p.owed, d.a.Mul(&d.a, &d.b))
	if z.Sign() < 0 {
		z.SetInt64(0)
	}
}

// room says by how much spendable exceeds what the ideal bucket has at an instant; nil: it does not.
func (d *ideal) room(at, spendable int64) (excess *big.Int) {
	i := len(d.entries)
	for i > 0 && d.entries[i-1].at > at {
		i--
	}
	var owed big.Int
	d.owedBefore(&owed, i, at)
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
	d.owedBefore(&owed, len(d.entries), at)
	_, burst := d.most(at)
	owed.Add(&owed, d.scale)
	owed.Sub(&owed, big.NewInt(1))
	return burst - owed.Div(&owed, d.scale).Int64()
}

// windows is the ideal of a fixed window: what each index admitted, less what came back into it.
type windows struct {
	revs []revision
	used map[int64]int64
}

func (d *windows) count(at int64) (count int64) {
	for _, r := range d.revs {
		if r.from <= at {
			count = max(count, r.limit.Rate.Count)
		}
	}
	return count
}
