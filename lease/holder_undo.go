package lease

import "headgate/limiter"

// maxUndoing bounds the buckets of which it is remembered what cancelled charges have missed.
const maxUndoing = 4096

// undoing is what the cancelled charges on a bucket have missed of its refill.
type undoing struct {
	from, to int64   // the time that is accounted for
	missed   float64 // ns of it that no charge has paid for yet
}

// undone is what comes back of units that were taken at then, or after, and are cancelled now: what the bucket would
// have had more without them. Without them it might have been full all the while, and what came in since might have had
// no room. Charges that overlap share what came while they did: of fifty that are cancelled at once, not each is to miss
// it. The lock is held.
func (h *Holder) undone(now, then int64, l *limiter.Limit, b *purse, units int64) int64 {
	if l.Algorithm != limiter.GCRA || now <= then || units <= 0 {
		return units // what was taken out of a window comes back into that one
	}
	u := h.undoing[b]
	if u == nil {
		h.forgetUndoing(now)
		u = &undoing{from: then, to: then}
		h.undoing[b] = u
	}
	ns := float64(l.Rate.Per) / float64(l.Rate.Count) // a unit
	if then > u.to {                                  // nobody who shares in what is left is on the way any more
		u.from, u.to, u.missed = then, then, min(u.missed, ns)
	}
	u.missed += float64(max(0, now-u.to) + max(0, u.from-then))
	u.from, u.to = min(u.from, then), max(u.to, now)
	missed := min(int64(min(u.missed/ns, limiter.MaxUnits)), units)
	u.missed -= float64(missed) * ns
	return units - missed
}

// undoFor is how long it is remembered, in ns; it is less than a unit by then, or of charges that are long over.
const undoFor = int64(10e9)

// forgetUndoing makes room for one bucket more.
func (h *Holder) forgetUndoing(now int64) {
	if h.undoing == nil {
		h.undoing = map[*purse]*undoing{}
	}
	if len(h.undoing) < maxUndoing {
		return
	}
	for b, u := range h.undoing {
		if now-u.to > undoFor {
			delete(h.undoing, b)
		}
	}
	if len(h.undoing) >= maxUndoing {
		clear(h.undoing)
	}
}
