package queue

import (
	"math"
	"time"
)

const (
	minRetry    = 250 * time.Millisecond
	maxRetry    = 60 * time.Second
	unknownWait = time.Second // of a queue whose rate is not known
	// hopeless is how many times its patience a ticket must be expected to wait to be refused at once.
	hopeless = 2
	// alongside is the part of the target wait that an account may fill beside others. What is left keeps
	// most from growing so old that they go by age alone.
	alongside = 0.75
	// maxEvictions bounds how many tickets make room for one.
	maxEvictions = 64
)

// crowd is what waits at a ticket's backends, and how many may.
type crowd struct {
	places float64 // all of them together
	rate   float64 // requests a second; 0 where one of them is unknown
	load   [Classes]float64
	total  float64
}

// crowdOf sums up the backends where a ticket may go.
func (s *Scheduler) crowdOf(t *ticket) (w crowd) {
	known := true
	for i := range t.places {
		b := t.places[i].backend
		if b == nil {
			continue
		}
		b.accrue(s.now)
		w.places += b.places(s.cfg.TargetWait)
		r := b.rate()
		known = known && r > 0
		w.rate += r
		for c := range b.classes {
			w.load[c] += float64(b.classes[c].load) / whole
		}
	}
	if !known {
		w.rate = 0
	}
	for _, l := range w.load {
		w.total += l
	}
	return w
}

// full says that one more of a class would be too many: for all places, or for those that its class needs
// to be served within the target: as many as its weight gives it, or as it was served lately.
func (s *Scheduler) full(t *ticket, w *crowd) bool {
	if w.total+1 > math.Round(w.places)+1e-9 {
		return true
	}
	if w.total == w.load[t.class] {
		return false // nobody else waits
	}
	served := 0.0
	for i := range t.places {
		if b := t.places[i].backend; b != nil {
			_, rate, _ := b.classes[t.class].pace(s.now, s.cfg.TargetWait)
			served += rate
		}
	}
	own := max(w.places*s.part(&w.load, t.class), served*s.cfg.TargetWait.Seconds())
	return w.load[t.class]+1 > max(1, math.Round(own))+1e-9
}

// part is a class's weight among those that wait and itself.
func (s *Scheduler) part(load *[Classes]float64, class Class) float64 {
	var sum float64
	for c, l := range load {
		if l > 0 || Class(c) == class {
			sum += float64(s.cfg.Weights[c])
		}
	}
	return float64(s.cfg.Weights[class]) / sum
}

// admit makes room for a ticket that has to wait, or says that there is none.
func (s *Scheduler) admit(t *ticket, out *Output) bool {
	if t.waited {
		return true
	}
	w := s.crowdOf(t)
	if s.isHopeless(t, &w) {
		return false
	}
	if s.isBehind(t) {
		if w.total >= w.places/2 { // else it is its tenant's affair
			s.refuse(t)
		}
		return false
	}
	for range maxEvictions {
		if !s.full(t, &w) {
			return true
		}
		v := s.victim(t, &w)
		if v == nil {
			break
		}
		s.refuse(t)
		s.drop(v, Evicted, out)
		w = s.crowdOf(t)
	}
	if math.Round(w.load[t.class]) == 0 {
		return true // one of each class may always wait
	}
	s.refuse(t)
	return false
}

// isHopeless says that a ticket would wait for far longer than it has patience.
func (s *Scheduler) isHopeless(t *ticket, w *crowd) bool {
	if w.rate == 0 || t.deadline == math.MaxInt64 {
		return false
	}
	own, tenants := s.before(t)
	ahead := min(float64(own*tenants), w.load[t.class])
	wait := ahead / (w.rate * s.part(&w.load, t.class))
	return wait > hopeless*time.Duration(t.deadline-s.now).Seconds()
}

// isBehind says that a ticket's turn is further away than the target wait, wherever it may go: its account is
// served as fast as is fair, and comes faster.
func (s *Scheduler) isBehind(t *ticket) bool {
	a := s.accounts[accountKey{t.tenant, t.class}]
	if a == nil {
		return false
	}
	for i := range t.places {
		b := t.places[i].backend
		if b == nil {
			continue
		}
		c := a.claims[b]
		l := &b.classes[t.class]
		if c == nil || c.epoch != b.epoch || l.order.len() == 0 {
			return false
		}
		pace, _, known := l.pace(s.now, s.cfg.TargetWait)
		ahead := c.tag - l.virtual + b.charge(c.weight)*c.ratio
		reach := float64(s.cfg.TargetWait)
		if b.contested() { // the pace of a class varies with what the others have: a quarter is for that
			reach = reach / 4 * 3
		}
		if l.claims > 1 || c.n == 0 {
			reach *= alongside
		}
		if !known || ahead <= pace*reach {
			return false
		}
	}
	return true
}

// contested says whether tickets of more than one class wait.
func (b *backend) contested() bool {
	n := 0
	for i := range b.classes {
		if b.classes[i].order.len() > 0 {
			n++
		}
	}
	return n > 1
}

// before tells how many of a ticket's own account wait at one of its backends, and how many accounts of its
// class do, its own included.
func (s *Scheduler) before(t *ticket) (own, tenants int) {
	a := s.accounts[accountKey{t.tenant, t.class}]
	for i := range t.places {
		b := t.places[i].backend
		if b == nil {
			continue
		}
		tenants = max(tenants, b.classes[t.class].order.len())
		if a == nil {
			continue
		}
		if c := a.claims[b]; c != nil {
			own = max(own, c.n)
		}
	}
	if own == 0 {
		tenants++
	}
	return own, tenants
}

// refuse remembers that there was no place at a ticket's backends.
func (s *Scheduler) refuse(t *ticket) {
	for i := range t.places {
		if b := t.places[i].backend; b != nil {
			b.refusedAt, b.everRefused = s.now, true
		}
	}
}

// chosen is the class that has to make room for one that has load and wants more: the one that is the most
// above its part of all, if class is below its own; otherwise class itself. Nobody's part is below least.
func (s *Scheduler) chosen(class Class, load *[Classes]float64, more, all, least float64) Class {
	unit := all * s.part(load, class) / float64(s.cfg.Weights[class])
	part := func(c Class) float64 { return max(least, unit*float64(s.cfg.Weights[c])) }
	if load[class]+more > part(class)+1e-9 {
		return class
	}
	worst, over := class, 0.0
	for c := range Class(Classes) {
		if d := load[c] - part(c); c != class && d > over+1e-9 {
			worst, over = c, d
		}
	}
	return worst
}

// victim is the ticket that has to make room for t where its backends have no place: the youngest of the
// tenant with the most, in another class if t's is below its part. In t's own that tenant must have at
// least two more than t's, or nothing would be gained.
func (s *Scheduler) victim(t *ticket, w *crowd) *ticket {
	class := s.chosen(t.class, &w.load, 1, math.Round(w.places), 1)
	var most *claim
	for i := range t.places {
		b := t.places[i].backend
		if b == nil || b.classes[class].biggest.len() == 0 {
			continue
		}
		if c, _ := b.classes[class].biggest.first(); most == nil || c.n > most.n {
			most = c
		}
	}
	if most == nil {
		return nil
	}
	if own, _ := s.before(t); class == t.class && most.n < own+2 {
		return nil
	}
	return most.ages.tail.ticket
}

// admitSize keeps the bounds of memory, wherever tickets go. t counts already.
func (s *Scheduler) admitSize(t *ticket, out *Output) bool {
	for range maxEvictions {
		if len(s.tickets) <= s.cfg.Tickets && s.bytes <= s.cfg.MaxBytes {
			return true
		}
		s.refuse(t)
		v := s.largest(t)
		if v == nil {
			return false
		}
		s.drop(v, Evicted, out)
	}
	return false
}

// largest is victim's counterpart for memory: sizes stand for numbers.
func (s *Scheduler) largest(t *ticket) *ticket {
	var load [Classes]float64
	all := float64(t.size())
	for c := range s.size {
		load[c] = float64(s.size[c])
		all += load[c]
	}
	class := s.chosen(t.class, &load, float64(t.size()), all, 0)
	if s.sizes[class].len() == 0 {
		return nil
	}
	a, _ := s.sizes[class].first()
	if class == t.class {
		var own int64
		if o := s.accounts[accountKey{t.tenant, t.class}]; o != nil {
			own = o.size
		}
		if a.size-a.tail.size() < own+t.size() {
			return nil
		}
	}
	return a.tail
}

// retryAfter is how long what waits of a ticket's class takes to drain, jittered.
func (s *Scheduler) retryAfter(t *ticket) time.Duration {
	d := unknownWait
	if w := s.crowdOf(t); w.rate > 0 {
		d = seconds(w.load[t.class] / (w.rate * s.part(&w.load, t.class)))
	}
	if s.cfg.Rand != nil {
		d = time.Duration(float64(d) * (0.75 + s.cfg.Rand.Float64()/2))
	}
	return min(max(d, minRetry), maxRetry)
}
