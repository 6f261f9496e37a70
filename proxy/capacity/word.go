package capacity

import "time"

const (
	staleAfter = 5 * time.Second // without metrics that were there before
	// A reading that does not change is no news if this much was answered well so long after it came. What is answered about
	// then it may have counted already.
	unmoved     = 8
	countsAfter = 2 * time.Second

	kvFull  = 0.95            // nothing fits any more: vLLM preempts next
	kvHigh  = 0.8             // answers that run will fill the rest: no growth, but no cut
	kvPause = 3 * time.Second // after a cut, for answers to end that hold memory

	fewWaiting = 0.05 // of those who run: what one step leaves for the next
	crowded    = 2    // readings in a row
)

// word is what vLLM says of itself.
type word struct {
	last Sample
	at   int64 // of the last reading; 0: there was none

	crowd     int     // readings in a row with too many waiting
	share     float64 // who runs, of all that it has
	preempted bool    // since the last turn

	answered int64 // requests since the reading changed,
	changed  int64 // which was then
}

// served says that so many requests have begun to be answered with tokens.
func (w *word) served(now, n int64) {
	if now-w.changed >= int64(countsAfter) {
		w.answered += n
	}
}

// take takes a reading, unless it says nothing, or is the same as ever while requests are answered: then it is as if none had come.
func (w *word) take(now int64, s *Sample) {
	switch {
	case !s.Known():
		return
	case w.at == 0 || *s != w.last:
		w.changed, w.answered = now, 0
	case s.HasTokens && w.answered >= unmoved && now-w.changed >= int64(staleAfter):
		return
	}
	if w.at != 0 && s.HasPreemptions && w.last.HasPreemptions && s.Preemptions > w.last.Preemptions {
		w.preempted = true
	}
	w.crowd, w.share = w.crowd+1, float64(s.Running)/float64(max(1, s.Running+s.Waiting))
	if !s.HasWaiting || float64(s.Waiting) <= fewWaiting*float64(s.Running) {
		w.crowd = 0
	}
	w.last, w.at = *s, now
}

func (w *word) known() bool { return w.at != 0 }

// stale: there were metrics, and there are none.
func (w *word) stale(now int64) bool { return w.at != 0 && now-w.at >= int64(staleAfter) }

// full reports whether vLLM has too much, and what share of it would run; since is the time since the last cut.
func (w *word) full(since int64) (share float64, full bool) {
	if w.crowd >= crowded {
		if !w.last.HasRunning {
			return cutShare, true
		}
		return max(cutDeeply, min(cutShare, w.share)), true
	}
	return cutShare, since >= int64(kvPause) && (w.preempted || w.last.KVUsage >= kvFull)
}

func (w *word) high() bool { return w.crowd > 0 || w.last.KVUsage >= kvHigh }

// clear: vLLM says that nothing of it is full. Then what is slow is not waiting in it.
func (w *word) clear() bool { return w.last.HasWaiting && w.last.HasKV && !w.high() }

func (w *word) turn() { w.preempted = false }

// resume goes on after a pause in which nothing was read.
func (w *word) resume(now int64) {
	if w.at != 0 {
		w.at, w.changed, w.answered, w.crowd = now, now, 0, 0
	}
}
