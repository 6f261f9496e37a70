package queue

import (
	"math"
	"time"
)

// backend is one endpoint: its room, those that wait for it, and what was measured.
type backend struct {
	id          string
	seq         uint64
	known       bool // SetBackends names it
	closed      bool // it does so no longer
	overflow    bool
	stale       bool
	slots       int64
	limit       int64
	used        int64 // by all nodes
	nobody      int64 // the part of it that is node 0's
	granted     int64
	classes     [Classes]line
	n           int   // tickets that wait here
	load        int64 // their parts of the places
	epoch       uint64
	virtual     float64 // start tag of the class that was served last
	parked      []*place
	parkedTill  int64 // no sooner is one of them to be looked at again
	idle        claimList
	saver       *ticket // room is saved up for it
	saveUntil   int64
	spendUntil  int64 // room is saved for nobody
	pauseUntil  int64
	misses      uint8
	contended   bool
	quietAt     int64
	limited     bool
	wake        int // in Scheduler.wakes
	dirty       bool
	at          int64 // until when the sums below are
	decayed     int64
	recent      float64 // ∫ slots in use dt since decayed: slot-nanoseconds
	busy        float64 // the same before that, decayed
	window      float64 // ∫ dt, decayed likewise
	departures  float64
	dropped     float64
	seen        int     // departures, up to meanOver
	slotTime    float64 // mean of a departure, slot-nanoseconds
	held        float64 // mean of a departure, nanoseconds
	work        float64 // mean of Work × Cost of those that joined
	taken       float64 // ∫ load dt since lookedAt
	lookedAt    int64
	pressure    float64
	refusedAt   int64
	everRefused bool
}

const (
	rateWindow     = 10 * time.Second // time constant of what is measured of a backend
	decayEvery     = float64(50 * time.Millisecond)
	pressureWindow = time.Second
	refusedFor     = int64(time.Second)
	contendedFor   = int64(100 * time.Millisecond)
	meanOver       = 32 // departures
	warmAfter      = 8  // departures, or the slots if they are fewer
	unknownPlaces  = 64 // of a backend that policy does not name yet
)

// capacity is how many slots may be in use.
func (b *backend) capacity() int64 {
	if b.limit < 0 {
		return b.slots
	}
	return min(b.slots, max(b.limit, 1))
}

// room is how many slots a grant may take now.
func (b *backend) room(now int64) int64 {
	if !b.known || now < b.pauseUntil {
		return 0
	}
	if b.used+b.granted == 0 {
		return b.slots // an idle backend admits one, whatever it costs
	}
	return max(0, b.capacity()-b.used-b.granted)
}

// accrue brings the sums up to now. It comes before every change of used or load.
func (b *backend) accrue(now int64) {
	dt := float64(now - b.at)
	if dt <= 0 {
		return
	}
	b.at = now
	b.recent += float64(b.used-b.nobody) * dt
	b.taken += float64(b.load) * dt
	if d := float64(now - b.decayed); d >= decayEvery {
		f := math.Exp(-d / float64(rateWindow))
		kept := (1 - f) * float64(rateWindow) / d // of what was even over that time
		b.busy = b.busy*f + b.recent*kept
		b.window = b.window*f + d*kept
		b.departures *= f
		b.dropped *= f
		b.recent, b.decayed = 0, now
	}
}

// depart measures a request that ended.
func (b *backend) depart(cost, held int64) {
	b.departures++
	b.seen = min(b.seen+1, meanOver)
	gain := 1 / float64(b.seen)
	b.slotTime += (float64(cost)*float64(held) - b.slotTime) * gain
	b.held += (float64(held) - b.held) * gain
}

// expect takes what another queue has measured, where this one has not measured enough.
func (b *backend) expect(slotTime time.Duration) {
	if slotTime <= 0 || b.warm() {
		return
	}
	b.slotTime, b.held, b.seen = float64(slotTime), float64(slotTime), max(b.seen, warmAfter)
}

// warm says that enough ended to tell a rate.
func (b *backend) warm() bool {
	return b.known && int64(b.seen) >= min(warmAfter, b.capacity()) && b.slotTime > 0
}

// meanSlotTime is Little's: slots in use over departures, in slot-nanoseconds. One departure of the usual
// length for every slot is thrown in: those that are on their way. So a beginning does not look like a
// stall, and a stall does.
func (b *backend) meanSlotTime() float64 {
	flying := float64(b.capacity())
	return (b.busy + b.recent + flying*b.slotTime) / (b.departures + flying)
}

// rate is what the backend serves with all its slots, in requests a second; 0 is unknown.
func (b *backend) rate() float64 {
	if !b.warm() {
		return 0
	}
	return float64(b.capacity()) / b.meanSlotTime() * 1e9
}

// places is how many tickets may wait for this backend alone.
func (b *backend) places(target time.Duration) float64 {
	switch {
	case !b.known:
		return unknownPlaces
	case !b.warm():
		return 2 * float64(b.capacity())
	}
	return max(1, b.rate()*target.Seconds())
}

// weight is how much serving a ticket takes beside the mean.
func (b *backend) weight(work, cost int64) float64 {
	if b.work <= 0 {
		return 1
	}
	return min(8, max(1.0/8, float64(work)*float64(cost)/b.work))
}

// charge is what serving what weighs so much is expected to take, in slot-nanoseconds.
func (b *backend) charge(weight float64) float64 {
	if b.slotTime <= 0 {
		return weight * float64(time.Second)
	}
	return weight * b.slotTime
}

// hold is how long room is saved up for a ticket, or spent on others instead: by then most requests
// of this moment have ended.
func (b *backend) hold(target time.Duration, times uint8) int64 {
	d := 2 * int64(b.held)
	if b.seen == 0 {
		d = int64(target)
	}
	return min(max(d, int64(100*time.Millisecond)), int64(10*time.Second)) << min(times, 2)
}

// look is the backend's part of Look.
func (b *backend) look(now int64, target time.Duration) BackendStats {
	b.accrue(now)
	places := b.places(target)
	if dt := float64(now - b.lookedAt); dt > 0 {
		mean := b.taken / dt / whole / places
		b.pressure += (mean - b.pressure) * -math.Expm1(-dt/float64(pressureWindow))
		b.taken, b.lookedAt = 0, now
	}
	if b.n == 0 && b.pressure < 0.01 {
		b.pressure = 0
	}
	st := BackendStats{
		ID: b.id, Waiting: b.n, Places: int(math.Round(places)), InUse: b.used, Granted: b.granted,
		Limit: b.capacity(), Slots: b.slots, Contended: b.contended, Limited: b.limited, Stale: b.stale,
		Pressure: b.pressure, Rate: b.rate(),
	}
	for c := range b.classes {
		st.WaitingByClass[c] = b.classes[c].n
	}
	if b.everRefused && now-b.refusedAt < refusedFor {
		st.Pressure = max(st.Pressure, 1)
	}
	if st.Rate > 0 {
		st.Drain = seconds(float64(b.load) / whole / st.Rate)
	}
	if b.window > 0 {
		offered := b.busy
		if b.warm() {
			offered += b.dropped * b.meanSlotTime()
		}
		st.Desired = offered / b.window / float64(b.slots)
	}
	return st
}

// seconds is a duration of s seconds, at most a day.
func seconds(s float64) time.Duration {
	return time.Duration(min(s, 86400) * float64(time.Second))
}
