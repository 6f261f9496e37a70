package upstream

import (
	"slices"
	"time"
)

const (
	ejectPause   = 10 * time.Second // of the first ejection; doubles
	downPause    = 5 * time.Second  // of the second time down: the first ends with a good probe
	rampTime     = 10 * time.Second // of a slow start
	rampFrom     = 0.1              // share of the room that a slow start begins with
	leastWeight  = 0.1              // of an endpoint that is slower than its peers
	maxSamples   = 16               // first bytes that are kept
	fewSamples   = 8                // fewer say nothing yet
	freshFor     = 30 * time.Second // first bytes say something
	maxPushback  = 60 * time.Second // of a Retry-After
	dfltPushback = time.Second      // of a 429 without one
)

// vitals is what an endpoint's answers and probes say of it, and whether it takes
// requests. It decides; the pool around it keeps the lock, the clock and the log. now is
// as for breaker.
type vitals struct {
	state        State
	failedProbes int // in a row
	failedDials  int // in a row

	breaker breaker
	rest    rest
	drained bool
	// newcomer came to others that were in use: it starts slowly, as one that came back.
	newcomer bool

	downUntil    int64 // good probes don't bring it back before
	pausedUntil  int64
	ejectedUntil int64 // 0: it is not ejected
	rampSince    int64 // 0: no slow start

	// first holds how long the last streams waited for their first byte, n so far, the
	// last at sampled. Their median counts: a mean would take a few long prompts for an ill server.
	first   [maxSamples]int64
	n       int
	sampled int64
	// waiting streams have had no byte, the oldest since oldest; heard is when any answer
	// of the endpoint last brought one. The shell fills them in before judge.
	waiting       int
	oldest, heard int64

	weight  float64 // by latency, ≤ 1; 0 is 1
	suspect int     // judgements in a row that found it an outlier
}

// settle lets pauses that are over be over. changed says that one was.
func (v *vitals) settle(now int64) (changed bool) {
	was := v.breaker.state
	v.breaker.settle(now)
	if v.ejectedUntil > 0 && now >= v.ejectedUntil {
		v.ejectedUntil = 0
		v.forget()
		v.returned(now)
		changed = true
	}
	if v.pausedUntil > 0 && now >= v.pausedUntil {
		v.pausedUntil = 0
		changed = true
	}
	return changed || was != v.breaker.state
}

// forget drops what its answers said of it, which is old news.
func (v *vitals) forget() {
	v.n, v.weight, v.suspect = 0, 0, 0
	v.breaker.window = tally{}
}

// returned begins a slow start if nothing else keeps the endpoint out.
func (v *vitals) returned(now int64) {
	if v.state == Down || v.breaker.state != BreakerClosed || v.ejectedUntil > 0 {
		return
	}
	v.rest.back(now)
	v.rampSince = now
}

// eligible: requests may go, apart from pauses that were asked for.
func (v *vitals) eligible(now int64) bool {
	return v.state != Down && !v.drained && v.ejectedUntil == 0 && v.breaker.allows(now)
}

// onTrial: but for the breaker, which waits for the one request that it let through, the endpoint were eligible.
func (v *vitals) onTrial(now int64) bool {
	return v.state != Down && !v.drained && v.ejectedUntil == 0 && v.breaker.state == BreakerHalfOpen && !v.breaker.allows(now)
}

// paused by the endpoint's own word.
func (v *vitals) paused(now int64) bool { return now < v.pausedUntil }

// share of its room that the endpoint may use: below 1 during a slow start.
func (v *vitals) share(now int64) float64 {
	t := now - v.rampSince
	if v.rampSince == 0 || t >= int64(rampTime) {
		return 1
	}
	return rampFrom + (1-rampFrom)*float64(max(t, 0))/float64(rampTime)
}

// latencyWeight is what it gets of the requests that a peer as fast as the others gets.
func (v *vitals) latencyWeight() float64 {
	if v.weight == 0 {
		return 1
	}
	return v.weight
}

// begin notes that a request goes.
func (v *vitals) begin(now int64) (gen uint32) { return v.breaker.begin(now) }

// began notes the first byte of a good answer, after wait if it is a stream's, else < 0.
func (v *vitals) began(now int64, gen uint32, wait int64) uint32 {
	gen, closed := v.breaker.began(gen)
	if closed {
		v.forget()
		v.returned(now)
	}
	if wait >= 0 {
		v.first[v.n%maxSamples] = wait
		v.n++
		v.sampled = now
	}
	return gen
}

// typical is the median of the last first bytes; 0: there are none.
func (v *vitals) typical() int64 {
	n := min(v.n, maxSamples)
	if n == 0 {
		return 0
	}
	s := v.first
	slices.Sort(s[:n])
	return s[(n-1)/2]
}

// end notes what a request came to. lost says that what waits there waits in vain.
func (v *vitals) end(now int64, gen uint32, what verdict) (opened, lost bool) {
	tried := v.breaker.state == BreakerHalfOpen
	opens, row := v.breaker.end(now, gen, what)
	if opens && tried {
		v.breaker.open(now + pause(breakerPause, v.rest.again()))
	} else if opens {
		v.breaker.open(now + pause(breakerPause, v.rest.fail(now)))
	}
	return opens, opens && row
}

// push leaves the endpoint alone for as long as it asked, within reason.
func (v *vitals) push(now int64, wait time.Duration) {
	v.pausedUntil = max(v.pausedUntil, now+int64(min(wait, maxPushback)))
}

// up notes that the endpoint answered. changed says that it came to be up by that.
func (v *vitals) up(now int64) (changed bool) {
	v.failedProbes, v.failedDials = 0, 0
	if v.state == Up || v.state == Down && now < v.downUntil {
		return false
	}
	was := v.state
	v.state = Up
	if was == Down || v.newcomer {
		v.returned(now)
	}
	v.newcomer = false
	return true
}

// down takes the endpoint out of use. changed says that it was in.
func (v *vitals) down(now int64) (changed bool) {
	if v.state == Down {
		return false
	}
	v.state = Down
	v.downUntil = now
	if n := v.rest.fail(now); n > 1 {
		v.downUntil = now + pause(downPause, n-1)
	}
	return true
}

// hasten ends the time sooner for which the endpoint is left alone, if it is: it may be up by the next good probe, and be tried five
// seconds after its breaker opened at the earliest.
func (v *vitals) hasten(now int64) bool {
	switch {
	case v.drained || v.ejectedUntil > 0:
		return false
	case v.state == Down:
		v.downUntil = min(v.downUntil, now)
		return true
	case v.breaker.state == BreakerOpen && v.breaker.until > now+int64(breakerPause):
		v.breaker.until = now + int64(breakerPause)
		return true
	}
	return false
}

// eject takes the endpoint out of use because its peers do better.
func (v *vitals) eject(now int64) {
	v.ejectedUntil = now + pause(ejectPause, v.rest.fail(now))
	v.suspect = 0
}

// due is when settle may change something; 0: never.
func (v *vitals) due() int64 {
	var t int64
	for _, u := range [...]int64{v.ejectedUntil, v.pausedUntil} {
		if u > 0 && (t == 0 || u < t) {
			t = u
		}
	}
	if v.breaker.state == BreakerOpen && (t == 0 || v.breaker.until < t) {
		t = v.breaker.until
	}
	return t
}
