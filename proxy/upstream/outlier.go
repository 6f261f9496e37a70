package upstream

import (
	"cmp"
	"slices"
	"time"
)

const (
	judgeEvery   = time.Second            // outliers are looked for
	suspectLimit = 3                      // judgements in a row that eject
	slowTimes    = 5                      // the peers' median first byte: an outlier
	slowerTimes  = 2                      // of it: takes less
	slowLeast    = 200 * time.Millisecond // above the median: less is noise
	silentFor    = 30 * time.Second       // without a byte while a stream waits: as if that were its first byte;
	silentLeast  = 5 * time.Second        // sooner the more wait, since one may have a long prompt
	badShare     = 0.2                    // of an endpoint's answers in the window, and
	badTimes     = 4                      // the peers' median share: an outlier
)

// judge looks for endpoints that do much worse than their peers, gives those that are
// slower less weight, and ejects those that stay so. A group is the indices of the
// endpoints that answer for one model. Of no group more than half is ejected, and never
// the last that takes requests: where all are bad, none is an outlier. It returns the
// indices of those that it ejected.
func judge(now int64, all []*vitals, groups [][]int) (ejected []int) {
	worst := make([]float64, len(all)) // by how much it is worse than its bound; > 1 is an outlier
	for i, v := range all {
		v.weight = 1
		worst[i] = 0
	}
	for _, g := range groups {
		judgeLatency(now, all, g, worst)
		judgeFailures(now, all, g, worst)
	}
	order := make([]int, 0, len(all))
	for i, v := range all {
		if worst[i] <= 1 || !v.eligible(now) {
			v.suspect = 0
			continue
		}
		if v.suspect++; v.suspect >= suspectLimit {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(worst[b], worst[a]) })
	for _, i := range order {
		if mayEject(now, all, groups, i) {
			all[i].eject(now)
			ejected = append(ejected, i)
		}
	}
	return ejected
}

// firstByte is how long e's streams wait for their first byte, if that is known.
func (v *vitals) firstByte(now int64) (wait int64, known bool) {
	if v.waiting > 0 {
		if silent := now - max(v.oldest, v.heard); silent >= max(int64(silentFor)/int64(v.waiting), int64(silentLeast)) {
			return silent, true
		}
	}
	if v.n < fewSamples || now-v.sampled >= int64(freshFor) {
		return 0, false
	}
	return v.typical(), true
}

func judgeLatency(now int64, all []*vitals, g []int, worst []float64) {
	sorted := make([]int64, 0, len(g))
	for _, i := range g {
		if w, ok := all[i].firstByte(now); ok && all[i].ejectedUntil == 0 {
			sorted = append(sorted, w)
		}
	}
	slices.Sort(sorted)
	for _, i := range g {
		mine, ok := all[i].firstByte(now)
		if !ok || all[i].ejectedUntil > 0 || len(sorted) < 2 {
			continue
		}
		median := max(medianOfOthers(sorted, mine), 1)
		if mine-median < int64(slowLeast) {
			continue
		}
		times := float64(mine) / float64(median)
		if times > slowerTimes {
			all[i].weight = min(all[i].weight, max(slowerTimes/times, leastWeight))
		}
		worst[i] = max(worst[i], times/slowTimes)
	}
}

func judgeFailures(now int64, all []*vitals, g []int, worst []float64) {
	sorted := make([]float64, 0, len(g))
	for _, i := range g {
		if s, ok := all[i].badShare(now); ok && all[i].ejectedUntil == 0 {
			sorted = append(sorted, s)
		}
	}
	slices.Sort(sorted)
	for _, i := range g {
		if mine, ok := all[i].badShare(now); ok && all[i].ejectedUntil == 0 && len(sorted) > 1 {
			worst[i] = max(worst[i], mine/max(badShare, badTimes*medianOfOthers(sorted, mine)))
		}
	}
}

// medianOfOthers is the lower median of sorted without one that equals mine, which is in
// it beside at least one other.
func medianOfOthers[T cmp.Ordered](sorted []T, mine T) T {
	k := (len(sorted) - 2) / 2
	if sorted[k] >= mine { // mine stands at or before k
		return sorted[k+1]
	}
	return sorted[k]
}

// badShare of its answers within the window, if there are enough of them.
func (v *vitals) badShare(now int64) (share float64, known bool) {
	good, bad := v.breaker.window.count(now)
	if good+bad < windowLeast {
		return 0, false
	}
	return float64(bad) / float64(good+bad), true
}

// mayEject: in each of its groups at most half are ejected then, and another one takes
// requests.
func mayEject(now int64, all []*vitals, groups [][]int, i int) bool {
	for _, g := range groups {
		if !slices.Contains(g, i) {
			continue
		}
		out, others := 1, 0
		for _, j := range g {
			switch {
			case j == i:
			case all[j].ejectedUntil > 0:
				out++
			case all[j].eligible(now) && !all[j].paused(now) && all[j].breaker.state == BreakerClosed:
				others++
			}
		}
		if 2*out > len(g) || others == 0 {
			return false
		}
	}
	return true
}
