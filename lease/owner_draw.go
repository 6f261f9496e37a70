package lease

import (
	"math"
	"slices"
	"time"

	"headgate/limiter"
)

// Draw asks the ledger for a block of a durable limit. A retry is the same in all fields.
type Draw struct {
	Bucket
	Limit limiter.Limit
	Epoch uint64 // of the view that the owner had stepped to when it first asked
	N     uint64 // rises with each draw of this owner for this bucket
	// Want is what it asks for, Least what it needs to admit the smallest that waits, Holding all that
	// it and its holders could still spend of earlier blocks.
	Want, Least, Holding int64
	// Debt is what was spent beyond all blocks. The ledger charges it once, whatever it grants.
	Debt int64
	// Returned is of earlier blocks, and nobody will spend it: the bucket is idle, Want and Holding are 0.
	Returned int64
}

// Drawn is what came of a Draw.
type Drawn struct {
	Bucket
	N          uint64
	Granted    int64
	RetryAfter int64 // where nothing was granted: ns until Least would be; limiter.Never
	Level      int64 // left in the ledger
	Err        bool  // unknown: the same Draw is to be tried again
	Window     int64 // of a fixed window: the window that the block is of
	// Stale is the N that the ledger has of this owner and bucket already, where that is not below the
	// Draw's: the Draw is made again with a higher one. 0: it was not stale.
	Stale uint64
}

// reservoir is what the owner has of a durable limit's blocks. Nothing comes back to it by itself.
type reservoir struct {
	left    int64 // negative: debt, which the next blocks pay
	window  int64 // of a fixed window: that of the block
	ledger  int64 // left there, by the last answer
	heard   bool  // there was one
	retryAt int64 // the ledger has less than lacks before, by Instant.Now
	lacks   int64
	drawing bool
	draw    Draw
	// told is what the ledger counts as unspent here and at the holders. What comes back beyond it waits
	// aside for the next draw to tell (telling): the ledger may have lent it to others already. So much of that as
	// the ledger is owed is not spent here: it goes back (owed).
	told, aside, telling, owed int64
}

// blockOf is what part of a limit one block is at most: what a crash loses. blockFor is for how long a
// block should last.
const (
	blockOf  = 64
	blockFor = 60 // s
)

// maxGiving bounds the draws under way for more blocks to be given back: those that requests wait for
// must not be behind them.
const maxGiving = 32

// drawSoon is a retry-after while the ledger is asked.
const drawSoon = 100 * time.Millisecond

func (o *Owner) reservoir(id uint32) *reservoir {
	r := o.reservoirs[id]
	if r == nil {
		r = &reservoir{}
		o.reservoirs[id] = r
	}
	return r
}

// left is what the reservoir can give now. A block ends with its window; debt does not.
func (o *Owner) left(at Instant, id uint32, b *bucket) int64 {
	r := o.reservoir(id)
	if b.limit.Algorithm != limiter.FixedWindow {
		return r.left
	}
	switch w := int64(o.window(b, at)); {
	case r.window < w:
		r.left, r.aside, r.telling, r.owed, r.heard = min(r.left, 0), 0, 0, 0, false
	case r.window > w:
		return min(r.left, 0) // the ledger's clock is ahead
	}
	return r.left
}

// takeReservoir is limiter.Take of a durable limit.
func (o *Owner) takeReservoir(at Instant, id uint32, b *bucket, cost int64, over limiter.Oversize, d *limiter.Decision) {
	left, capacity := o.left(at, id, b), b.limit.Capacity()
	r := o.reservoirs[id]
	*d = limiter.Decision{At: reading(b.limit, at)}
	switch {
	case cost == 0:
		d.Admitted = true
	case cost <= capacity:
		d.Admitted = cost <= left
	default:
		d.Admitted = over == limiter.Debt && left >= capacity
	}
	switch {
	case d.Admitted:
		r.left -= cost
	case cost > capacity && over != limiter.Debt:
		d.RetryAfter = limiter.Never
	default:
		d.RetryAfter = drawSoon
		if r.exhausted(at, min(cost, capacity)-max(0, left)-r.aside) {
			d.RetryAfter = max(drawSoon, time.Duration(r.retryAt-at.Now))
		}
	}
	d.Remaining = o.whole(at, id, b)
	if b.limit.Algorithm == limiter.FixedWindow {
		d.Reset = b.limit.Rate.Per - time.Duration(at.Wall%int64(b.limit.Rate.Per))
	} else {
		d.Reset = b.limit.Fill(max(0, capacity-d.Remaining))
	}
}

// whole is what is left of a durable limit: here and in the ledger.
func (o *Owner) whole(at Instant, id uint32, b *bucket) int64 {
	left := o.left(at, id, b)
	if r := o.reservoir(id); r.heard {
		return min(left+r.ledger, b.limit.Capacity())
	}
	return b.limit.Capacity() + min(0, left)
}

// exhausted says that the ledger is known to have less than so much now.
func (r *reservoir) exhausted(at Instant, least int64) bool {
	return at.Now < r.retryAt && least >= r.lacks
}

// draw asks the ledger for what a cost needs, if it is not asked already. False: it has nothing now.
func (o *Owner) draw(at Instant, id uint32, b *bucket, cost int64) bool {
	least := min(cost, b.limit.Capacity()) - max(0, o.left(at, id, b))
	return least > 0 && o.drawLeast(at, id, b, least)
}

// drawLeast asks for a block of at least so much.
func (o *Owner) drawLeast(at Instant, id uint32, b *bucket, least int64) bool {
	r := o.reservoir(id)
	if r.drawing {
		return true
	}
	if r.exhausted(at, least-r.aside) || !o.parts[b.partition].open(o, at, b.partition) {
		return false
	}
	left, capacity := o.left(at, id, b), b.limit.Capacity()
	debt := max(0, -left)
	_, depth := o.sums(b)
	r.telling, r.aside = r.telling+r.aside, 0
	o.draws++
	r.drawing = true
	r.draw = Draw{
		Bucket: Bucket{b.partition, o.keyOf(id)}, Limit: *b.limit, Epoch: o.view.Epoch, N: o.draws,
		Want: min(max(least, o.block(b)-max(0, left)), capacity), Least: least, Holding: max(0, left) + depth + r.telling, Debt: debt,
	}
	r.told = r.draw.Holding
	o.drawing = append(o.drawing, id)
	return true
}

// payBack returns to the ledger what it is owed of what came back.
func (o *Owner) payBack(at Instant, id uint32, b *bucket) {
	r := o.reservoir(id)
	if r.owed == 0 || r.drawing || !o.parts[b.partition].open(o, at, b.partition) {
		return
	}
	_, depth := o.sums(b)
	o.draws++
	r.drawing = true
	r.draw = Draw{
		Bucket: Bucket{b.partition, o.keyOf(id)}, Limit: *b.limit, Epoch: o.view.Epoch, N: o.draws,
		Holding: max(0, o.left(at, id, b)) + depth, Returned: r.owed, Debt: max(0, -r.left),
	}
	r.told, r.owed = r.draw.Holding, 0
	o.drawing = append(o.drawing, id)
}

// block is how much to draw: for some time of what is asked, and no more than a crash may lose.
func (o *Owner) block(b *bucket) int64 {
	demand := int64(0)
	for i := b.first; i != 0; i = o.pool.at(i).next {
		demand += min(o.pool.at(i).demand.value(), math.MaxInt64>>8) / 1024 * blockFor
		demand = min(demand, limiter.MaxUnits)
	}
	most := max(1, b.limit.Capacity()/blockOf)
	return max(1, most/16, min(demand, most))
}

// prefetch draws the next block before the last one is spent: what there is of it.
func (o *Owner) prefetch(at Instant, id uint32, b *bucket) {
	if o.left(at, id, b) < o.block(b)/2 {
		o.drawLeast(at, id, b, 1)
	}
}

// giveUp gives an idle bucket's block back to the ledger, so that both can forget the bucket. False: there
// is nothing to give.
func (o *Owner) giveUp(at Instant, id uint32, b *bucket) bool {
	r := o.reservoirs[id]
	if r == nil || r.drawing {
		return r != nil
	}
	left := o.left(at, id, b)
	if left == 0 && r.aside == 0 && r.owed == 0 {
		return false
	}
	if len(o.drawing) >= maxGiving || !o.parts[b.partition].open(o, at, b.partition) {
		return true
	}
	o.draws++
	r.drawing = true
	r.draw = Draw{
		Bucket: Bucket{b.partition, o.keyOf(id)}, Limit: *b.limit, Epoch: o.view.Epoch, N: o.draws,
		Returned: max(0, left) + r.aside + r.owed, Debt: max(0, -left),
	}
	r.left, r.aside, r.telling, r.owed, r.told = min(0, left), 0, 0, 0, 0
	o.drawing = append(o.drawing, id)
	return true
}

// refill puts back what came back of a block.
func (o *Owner) refill(at Instant, id uint32, b *bucket, s *series, units int64) {
	r := o.reservoir(id)
	if b.limit.Algorithm == limiter.FixedWindow && int64(s.high) != r.window {
		r.left = min(r.left+units, max(r.left, 0)) // of a window that is over: it can only lower debt
		return
	}
	_, depth := o.sums(b)
	now := max(0, min(units, r.told-r.left-depth))
	r.left += now
	r.aside += units - now
}

// convertReservoir carries a bucket over where its limit comes to be durable, or ceases to be, or is
// another durable one. What was spent of a durable limit stays spent.
func (o *Owner) convertReservoir(at Instant, id uint32, b *bucket, from *limiter.Limit) {
	to := b.limit
	if !from.Durable() {
		now := reading(from, at)
		if from.Algorithm != limiter.Semaphore {
			// Debts alone: what was spent before this limit came the ledger may know of already.
			o.reservoir(id).left = min(0, from.Level(&b.state, now))
		}
		b.state = limiter.State{}
		return
	}
	r := o.reservoir(id)
	b.limit = from
	left := o.left(at, id, b)
	spent := max(0, from.Capacity()-o.whole(at, id, b))
	b.limit = to
	if to.Durable() {
		// What is here of blocks under a larger limit is no more than what the smaller one has left.
		ledger := to.Capacity() - spent - left
		r.left, r.ledger, r.heard, r.retryAt = left+min(0, ledger), max(0, ledger), true, 0
		return
	}
	now := reading(to, at)
	b.state = limiter.State{}
	if !r.heard && to.Algorithm != limiter.Semaphore {
		b.state = to.EmptyAt(now, now) // nobody has said what is left
	} else if to.Algorithm != limiter.Semaphore {
		// A day's spending would take a limit of seconds out for hours: of it no more counts than empties it.
		to.Advance(&b.state, now, 0, 0)
		to.Debit(&b.state, now, min(spent, to.Capacity())+max(0, -left))
	}
	delete(o.reservoirs, id)
}

// Draws returns what is to be asked of the ledger, also again, until Drawn: of maxDraws buckets at once, those that
// have waited longest.
func (o *Owner) Draws(at Instant) (ds []Draw) {
	front := min(len(o.drawing), maxDraws)
	kept := slices.DeleteFunc(o.drawing[:front:front], func(id uint32) bool {
		r, b := o.reservoirs[id], o.bucketOf(id)
		if r == nil || !r.drawing || b.limit == nil {
			return true
		}
		if o.parts[b.partition].since == 0 {
			r.drawing = false
			return true
		}
		ds = append(ds, r.draw)
		return false
	})
	if gone := front - len(kept); gone > 0 {
		o.drawing = slices.Delete(o.drawing, len(kept), len(kept)+gone)
	}
	return ds
}

// Drawn is the ledger's answer; the Responses are decisions that waited for it.
func (o *Owner) Drawn(at Instant, d Drawn) []*Response {
	o.begin(at)
	b, id := o.find(&d.Key)
	if b == nil {
		return nil
	}
	r := o.reservoirs[id]
	switch {
	case r == nil || !r.drawing || r.draw.N != d.N || d.Err:
		return nil
	case d.Granted < 0 || d.Granted > 2*limiter.MaxUnits || d.RetryAfter < 0 || d.Window < 0:
		o.stats.Rejected++
		return nil
	}
	if d.Stale >= d.N {
		o.draws = max(o.draws, d.Stale) + 1
		r.draw.N = o.draws
		return nil
	}
	r.drawing = false
	o.drawing = slices.DeleteFunc(o.drawing, func(x uint32) bool { return x == id })
	r.ledger, r.heard = d.Level, true
	if o.parts[b.partition].since == 0 {
		return nil // what it granted is lost
	}
	o.touch(at, b)
	if d.Granted == 0 && r.draw.Least > 0 {
		r.retryAt, r.lacks = at.Now+min(max(d.RetryAfter, int64(drawSoon)), never-at.Now), r.draw.Least
	} else if b.limit.Algorithm == limiter.FixedWindow && d.Window != 0 && r.window != d.Window { // 0: the ledger refused
		r.left, r.window, r.aside, r.telling, r.owed = min(r.left, 0), d.Window, 0, 0, 0
	}
	// A debt that the ledger was told comes back with the reservation that it is a part of: it is paid first.
	pays := min(r.telling, max(0, -d.Level))
	r.told = r.draw.Holding - pays + d.Granted
	r.left += d.Granted + r.telling - pays + r.draw.Debt
	r.telling, r.owed = 0, r.owed+pays
	o.payBack(at, id, b)
	o.stir(id)
	if d.Granted > 0 {
		o.unrefuse(at, id, b)
	}
	o.unpark(at)
	o.lend(at)
	return o.flush()
}
