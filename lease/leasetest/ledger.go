package leasetest

import (
	"headgate/lease"
	"headgate/limiter"
)

// blocks is a durable limit as the ledger keeps it: what is owed, in units times period, and what of it owners
// may still spend.
type blocks struct {
	limit       limiter.Limit
	epoch       uint64
	last        int64 // by the ledger's clock
	owed        int64
	outstanding int64
	window      int64
	answers     map[uint64]lease.Drawn // the last to each owner
}

// draw is the ledger's command ReserveBlock (DESIGN.md §6, durable limits).
func (w *world) draw(from uint64, d lease.Draw) {
	w.stats.Draws++
	b := w.blocks[d.Key]
	if b == nil {
		b = &blocks{limit: d.Limit, answers: map[uint64]lease.Drawn{}, last: w.now, window: (epoch + w.now) / int64(d.Limit.Rate.Per)}
		w.blocks[d.Key] = b
	}
	if d.Limit.Revision > b.limit.Revision {
		b.advance(w.now)
		b.limit = d.Limit // of the same period: what is owed stays
	}
	a, known := b.answers[from]
	switch {
	case d.Epoch < b.epoch:
		return
	case known && d.N < a.N:
		a = lease.Drawn{Bucket: d.Bucket, N: d.N, Stale: a.N}
	case !known || d.N > a.N:
		b.epoch = d.Epoch
		a = b.grant(w.now, &d)
		b.answers[from] = a
	}
	w.send(packet{from: ledgerID, to: from, drawn: &a})
}

// advance brings it to now by the limit that was in force until then.
func (b *blocks) advance(now int64) {
	per := int64(b.limit.Rate.Per)
	if b.limit.Algorithm == limiter.FixedWindow {
		if w := (epoch + now) / per; w > b.window {
			b.window, b.owed, b.outstanding = w, 0, 0
		}
	} else {
		b.owed = max(b.owed-(now-b.last)*b.limit.Rate.Count, b.outstanding*per, 0)
	}
	b.last = now
}

func (b *blocks) grant(now int64, d *lease.Draw) lease.Drawn {
	per := int64(b.limit.Rate.Per)
	b.advance(now)
	b.owed = max(b.owed+max(0, d.Debt)*per-min(d.Returned, b.outstanding)*per, 0)
	a := lease.Drawn{Bucket: d.Bucket, N: d.N, Window: b.window}
	level := b.limit.Capacity() - (b.owed+per-1)/per
	if n := min(d.Want, level); d.Want == 0 {
		// It is told only.
	} else if n > 0 && n >= d.Least {
		a.Granted = n
	} else {
		a.RetryAfter = max(1, (d.Least-level)*per/b.limit.Rate.Count)
		if b.limit.Algorithm == limiter.FixedWindow {
			a.RetryAfter = (b.window+1)*per - epoch - now
		}
	}
	b.owed += a.Granted * per
	b.outstanding = max(d.Holding, 0) + a.Granted
	a.Level = level - a.Granted
	return a
}
