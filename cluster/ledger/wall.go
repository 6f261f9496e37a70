package ledger

import (
	"context"
	"time"
)

const (
	// wallEvery is how often a leader looks at its wall clock.
	wallEvery = time.Second
	// wallPatience is how long a leader's clock is off before it lets another lead.
	wallPatience = 10 * time.Second
	// wallAgain is how long it waits before it says and does so again.
	wallAgain = time.Minute
)

// wallWatch says when a leader that grants nothing, as its wall clock is off, is to do something about it.
// It is for one goroutine; it is kept from one reign to the next.
type wallWatch struct{ since, acted time.Time }

func (w *wallWatch) due(now time.Time, off bool) bool {
	switch {
	case !off:
		w.since = time.Time{}
		return false
	case w.since.IsZero():
		w.since = now
	}
	if now.Sub(w.since) < wallPatience || !w.acted.IsZero() && now.Sub(w.acted) < wallAgain {
		return false
	}
	w.acted = now
	return true
}

// watchWall hands the lead over where this node's wall clock keeps it from granting, until ctx ends: other voters
// have right ones, or theirs would be the median.
func (l *Ledger) watchWall(ctx context.Context) {
	tick := time.NewTicker(wallEvery)
	defer tick.Stop()
	l.wall.since = time.Time{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		ahead, known := l.config.WallOff()
		if !l.wall.due(time.Now(), known && ahead.Abs() > maxWallOff) {
			continue
		}
		l.logger.Error("this node leads the ledger and its wall clock is wrong, it grants nothing of budgets and durable limits and lets another voter lead: set the clock right",
			"ahead", ahead, "other_voters", len(l.Voters())-1)
		if err := l.TransferLeadership(ctx); err != nil && ctx.Err() == nil {
			l.logger.Error("the lead of the ledger was not handed over", "error", err)
		}
	}
}
