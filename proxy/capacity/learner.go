package capacity

import (
	"math"
	"time"
)

// How a limit moves. The figures behind them are in DESIGN.md; none is sharp: halving or doubling one costs a few per cent.
const (
	interval     = time.Second      // the least time between two moves
	longestPause = 30 * time.Second // what a cut waits for at most, before the next for slowness
	longestHold  = 30 * time.Second // after a cut, in which slow answers that are not slow enough for another keep it from growing

	startShare  = 0.125 // of the slots: where one that has metrics begins
	startLeast  = 4     // where one that has none begins, and the least that the other does
	startGrowth = 1.25  // an interval, until the first cut

	growthShare = 0.05 // of the limit: the most that it grows in an interval after a cut,
	growthLeast = 0.5  // where that is less than this
	growthRamp  = 0.1  // slots an interval for each second without a cut: little at first, since what was sent goes on growing

	cutShare  = 0.9 // what a cut leaves
	cutDeeply = 0.7 // and where there is a measure of how much is too much, at the least

	usedUp   = 0.9 // share of the limit in use from which on more would be used
	halfUsed = 0.5 // share in use below which slowness is not for the crowd

	failing = 10 // one in so many may fail while a limit grows
)

// settings bound what is learnt of a backend: slots the most, least ≥ 1.
type settings struct {
	slots, least int64
	metrics      bool // scraped will be called
}

// learner moves one backend's limit: up while it is used and nothing speaks against it, down at a sign that the backend has too
// much. It is a pure core: time is an argument (ns, of any origin), and one goroutine at a time uses it.
type learner struct {
	set   settings
	limit float64
	since tally
	first firstBytes
	word  word

	inUse     int64
	streams   bool  // first bytes are known
	pausedTo  int64 // by a Retry-After
	untouched bool  // since it began or was resumed: another's limit is better
	everCut   bool
	cutAt     int64
	grewAt    int64
	cut       progress
	drainedAt int64
}

// progress is how far the last cut has come true.
type progress uint8

const (
	shown   progress = iota // what was sent since has begun: what is slow now is slow in spite of it
	drained                 // no more is in flight than the limit allows
	begun
)

// tally is what was observed since the last move.
type tally struct {
	from          int64 // 0: nothing yet
	peak          int64 // slots in use at most
	wanted        bool  // something waited
	ended, failed int64
	pushed, begun int64
	slotTime      time.Duration
}

func newLearner(set settings) *learner {
	l := &learner{set: set, untouched: true, limit: startLeast}
	if set.metrics {
		l.limit = max(startLeast, math.Ceil(float64(set.slots)*startShare))
	}
	l.limit = l.within(l.limit)
	return l
}

// apply takes other bounds. What was learnt stays as far as they allow.
func (l *learner) apply(set settings) {
	l.set = set
	l.limit = l.within(l.limit)
	if !set.metrics {
		l.word = word{}
	}
}

func (l *learner) within(v float64) float64 {
	return max(float64(l.set.least), min(float64(l.set.slots), v))
}

// seed takes a limit that was learnt elsewhere, unless this one has moved its own.
func (l *learner) seed(limit int64) {
	if l.untouched {
		l.limit, l.everCut = l.within(float64(limit)), true
	}
}

// resume goes on after a time in which nothing was told: it is no sign of anything that no metrics came.
func (l *learner) resume(now int64) {
	l.untouched, l.since, l.inUse = true, tally{}, 0
	l.word.resume(now)
}

// observe adds what the cluster's requests said, and moves the limit if it is time.
func (l *learner) observe(now int64, o *Observation) {
	l.inUse = o.InUse
	l.since.peak = max(l.since.peak, o.InUse)
	l.since.wanted = l.since.wanted || o.Waiting > 0
	l.since.ended += o.Done
	l.since.failed += o.Failures
	l.since.pushed += o.Pushbacks
	l.since.begun += o.FirstBytes
	l.since.slotTime += o.SlotTime
	l.pausedTo = max(l.pausedTo, now+int64(min(max(0, o.Pause), time.Minute)))
	switch {
	case o.FirstBytes > 0 && !l.streams:
		l.streams, l.first = true, firstBytes{}
		fallthrough
	case l.streams:
		l.first.add(o.FirstByte, o.FirstBytes)
	default: // nothing streams here: the whole answer is its first byte
		l.first.add(o.Answer, o.Answers)
	}
	l.word.served(now, o.FirstBytes+o.Answers)
	l.move(now)
}

// scraped takes a reading of the backend's metrics; nil: there was none.
func (l *learner) scraped(now int64, s *Sample) {
	if s != nil {
		l.word.take(now, s)
	}
	l.move(now)
}

// told is the limit in whole slots, at least 1.
func (l *learner) told() int64 { return max(1, int64(l.limit)) }

func (l *learner) stale(now int64) bool { return l.word.stale(now) }

// move decides, once an interval.
func (l *learner) move(now int64) {
	gone := now - l.since.from
	if l.since.from == 0 || gone < 0 {
		l.since.from = now
		return
	}
	if gone < int64(interval) {
		return
	}
	l.settle(now)
	use := max(float64(l.since.peak), float64(l.since.slotTime)/float64(gone))
	if l.stale(now) {
		if now-l.cutAt >= int64(staleAfter) {
			l.fall(now, cutShare)
		}
	} else if share, full := l.full(now, use); full {
		l.fall(now, share)
	} else if l.mayGrow(now, use) {
		l.grow(now)
	}
	l.since = tally{from: now, peak: l.inUse}
	l.first.turn(now)
	l.word.turn()
}

// settle notes how far the last cut has come true. Until what was sent before it has begun, slowness is of before.
func (l *learner) settle(now int64) {
	switch {
	case l.cut == begun && l.inUse <= l.told():
		l.cut, l.drainedAt = drained, now
	case l.cut == drained && now-l.drainedAt >= int64(l.first.smooth), l.cut != shown && now-l.cutAt >= int64(longestPause):
		l.cut = shown
		l.first.restart()
	}
}

// full reports whether the backend has too much, and what share of it it should have.
func (l *learner) full(now int64, use float64) (share float64, full bool) {
	if l.cut == begun {
		return 1, false
	}
	if share, full = l.word.full(now - l.cutAt); full {
		return share, true
	}
	if l.since.pushed > 0 {
		return cutShare, true
	}
	if l.cut == shown && use >= halfUsed*l.limit {
		return l.first.slow()
	}
	return 1, false
}

func (l *learner) mayGrow(now int64, use float64) bool {
	asked := l.since.wanted || use >= usedUp*l.limit
	serves := l.since.ended+l.since.begun > 0 && l.since.failed*failing <= l.since.ended
	known := l.word.known() || l.first.floor() > 0 // unknown is not idle
	answered := now-l.grewAt >= int64(l.first.smooth)
	return asked && serves && known && answered && l.cut != begun && now >= l.pausedTo && !l.word.high() && (!l.first.high() || now-l.cutAt >= int64(longestHold))
}

func (l *learner) grow(now int64) {
	more := (startGrowth - 1) * l.limit
	if l.everCut {
		more = min(max(growthLeast, growthShare*l.limit), growthRamp*time.Duration(now-l.cutAt).Seconds())
	}
	l.limit = l.within(l.limit + more)
	l.grewAt, l.untouched = now, false
}

func (l *learner) fall(now int64, share float64) {
	l.first.cut(l.limit, l.word.clear())
	l.limit = l.within(l.limit * share)
	l.cutAt, l.cut, l.everCut, l.untouched = now, begun, true, false
}
