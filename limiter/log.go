package limiter

import (
	"slices"
	"sort"
	"time"
)

// log is the memory of a SlidingLog: what was charged in the last Per, oldest
// first, one entry for each instant. An entry of instant t counts before
// t + Per. What is charged beyond the count is debt, and it is charged again,
// as it were, the moment that an entry makes room for it. So the entries'
// costs never sum to more than the count, there are never more than Count of
// them, and while there is debt the sum is the count.
type log struct {
	entries []entry
	head    int // entries before it are gone
	sum     int64
	debt    int64
}

type entry struct{ at, cost int64 }

func (g *log) live() []entry { return g.entries[g.head:] }

func (g *log) clone() *log {
	c := *g
	c.entries, c.head = slices.Clone(g.live()), 0
	return &c
}

// push appends a cost at an instant no older than the newest entry's.
func (g *log) push(at, cost int64) {
	if cost == 0 {
		return
	}
	g.sum += cost
	if n := len(g.entries); n > g.head && g.entries[n-1].at == at {
		g.entries[n-1].cost += cost
		return
	}
	if len(g.entries) == cap(g.entries) && g.head > len(g.entries)/2 {
		g.entries, g.head = append(g.entries[:0], g.live()...), 0
	}
	g.entries = append(g.entries, entry{at, cost})
}

// add charges cost at now without asking.
func (g *log) add(now, cost, count int64) {
	room := max(0, min(cost, count-g.sum))
	g.push(now, room)
	g.debt = min(g.debt+cost-room, maxOwed)
}

// expire drops what no longer counts at now and charges debt to the room.
func (g *log) expire(now int64, rate Rate) {
	per := int64(rate.Per)
	// Whole rounds first: while debt exceeds the count, all entries come back
	// Per later. This leaves at most two rounds for the loop.
	if g.debt >= rate.Count {
		live := g.live()
		rounds := min((now-live[len(live)-1].at)/per, g.debt/rate.Count)
		for i := range live {
			live[i].at += rounds * per
		}
		g.debt -= rounds * rate.Count
	}
	for g.head < len(g.entries) && g.entries[g.head].at <= now-per {
		e := g.entries[g.head]
		g.head++
		g.sum -= e.cost
		paid := min(e.cost, g.debt)
		g.debt -= paid
		g.push(e.at+per, paid)
	}
	if g.head == len(g.entries) {
		g.entries, g.head = g.entries[:0], 0
	}
}

// released returns when the first units ≥ 1 of sum + debt have left, counting
// that debt leaves after it was charged.
func (g *log) released(now, units int64, rate Rate) time.Duration {
	rounds := (units - 1) / rate.Count
	units -= rounds * rate.Count
	live := g.live()
	last := len(live) - 1
	if units < g.sum {
		for i := range live {
			if units -= live[i].cost; units <= 0 {
				last = i
				break
			}
		}
	}
	// Entries are never older than Per, so the difference is not negative.
	return time.Duration(add(times(int64(rate.Per), rounds), live[last].at+int64(rate.Per)-now))
}

func (l *Limit) takeLog(s *State, now, cost int64, over Oversize, d *Decision) {
	if s.log == nil {
		s.log = new(log)
	}
	g, count := s.log, l.Rate.Count
	g.expire(now, l.Rate)
	owed := g.sum + g.debt
	d.Admitted = fits(cost, count, over, cost <= count-owed, owed == 0)
	switch {
	case d.Admitted:
		g.add(now, cost, count)
		owed += cost
	case cost <= count:
		d.RetryAfter = g.released(now, owed+cost-count, l.Rate)
	case over == Debt && cost <= MaxUnits:
		d.RetryAfter = g.released(now, owed, l.Rate)
	default:
		d.RetryAfter = Never
	}
	d.Remaining = count - owed
	if owed > 0 {
		d.Reset = g.released(now, owed, l.Rate)
	}
}

func (l *Limit) adjustLog(s *State, now, at, delta int64) {
	if s.log == nil {
		s.log = new(log)
	}
	g := s.log
	g.expire(now, l.Rate)
	if delta <= 0 {
		g.add(now, -delta, l.Rate.Count)
		return
	}
	paid := min(delta, g.debt)
	g.debt -= paid
	g.remove(at, delta-paid)
}

// remove takes up to cost out of the entry of an instant, if it still counts.
func (g *log) remove(at, cost int64) {
	live := g.live()
	i := sort.Search(len(live), func(i int) bool { return live[i].at >= at })
	if i == len(live) || live[i].at != at {
		return
	}
	cost = min(cost, live[i].cost)
	live[i].cost -= cost
	g.sum -= cost
	if live[i].cost == 0 {
		g.entries = slices.Delete(g.entries, g.head+i, g.head+i+1)
	}
}

// resize keeps the log's rules under another count: room takes in debt, and
// what exceeds the count becomes debt, the newest first.
func (g *log) resize(now, count int64) {
	for g.sum > count {
		n := len(g.entries) - 1
		moved := min(g.sum-count, g.entries[n].cost)
		g.entries[n].cost -= moved
		g.sum -= moved
		g.debt += moved
		if g.entries[n].cost == 0 {
			g.entries = g.entries[:n]
		}
	}
	paid := min(g.debt, count-g.sum)
	g.debt -= paid
	g.push(now, paid)
}
