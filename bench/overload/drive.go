package overload

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"headgate/bench/fakevllm"
	"headgate/bench/load"
)

// driver sends the marked requests of one trial and keeps how each ended.
type driver struct {
	url       string
	header    http.Header
	transport *http.Transport

	mu   sync.Mutex
	next int64 // ids begin here in the next phase
	ends []end // by id
}

// end is how a request ended, or with a zero Due that it was not sent.
type end struct {
	load.Seen
	class int
}

func (e *end) good() bool { return e.Kind == "" && !e.First.IsZero() }

func newDriver(url string, header http.Header) *driver {
	return &driver{url: url, header: header, transport: &http.Transport{
		MaxIdleConns: maxInFlight, MaxIdleConnsPerHost: maxInFlight, IdleConnTimeout: 10 * time.Second, DisableCompression: true,
	}}
}

func (d *driver) close() { d.transport.CloseIdleConnections() }

// classOf draws the class of a request: half interactive, three tenths background.
func classOf(h uint64) int {
	switch n := h % 10; {
	case n < 5:
		return interactive
	case n < 8:
		return background
	}
	return bestEffort
}

// scatter is the finalizer of splitmix64.
func scatter(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// request is the id-th request of a phase with this seed; the n-th is the same for
// every target.
func (d *driver) request(seed uint64, n, id int64) (load.Shot, int) {
	h := scatter(seed<<32 ^ uint64(n))
	class, stream := classOf(h), h>>20&1 == 0
	out := leastOut + int64(h>>32%(mostOut-leastOut+1))
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":"%sWhat is left when all want the same at once?"}],"model":%q,"max_tokens":%d,"temperature":0.7,"stream":%t}`,
		mark(class, id), model, out, stream)
	header := d.header.Clone()
	if header == nil {
		header = http.Header{}
	}
	header.Set("X-Headgate-Class", classNames()[class])
	header.Set("X-Headgate-Timeout", strconv.Itoa(int(patience(class).Seconds())))
	shot := load.Shot{Body: []byte(body), Header: header, Patience: patience(class), End: "}"}
	if stream {
		shot.End = "[DONE]"
	}
	return shot, class
}

// phase runs a load until its last answer. Phases of one driver may overlap.
func (d *driver) phase(ctx context.Context, cfg load.Config, seed uint64) error {
	const span = 1 << 22 // ids of one phase; more requests than an hour at any rate has
	d.mu.Lock()
	base := d.next
	d.next += span
	d.mu.Unlock()
	cfg.URL, cfg.Transport, cfg.Timeout = d.url+"/v1/chat/completions", d.transport, requestBound
	cfg.Poisson, cfg.Seed = true, seed
	if cfg.MaxInFlight == 0 {
		cfg.MaxInFlight = maxInFlight
	}
	cfg.Each = func(n int64) load.Shot {
		shot, _ := d.request(seed, n, base+n)
		return shot
	}
	cfg.Seen = func(s load.Seen) {
		e := end{Seen: s, class: classOf(scatter(seed<<32 ^ uint64(s.N)))}
		e.N += base
		d.mu.Lock()
		defer d.mu.Unlock()
		d.ends = append(d.ends, e)
	}
	res, err := load.Run(ctx, cfg)
	if err != nil {
		return err
	}
	if res.Dropped > 0 {
		return fmt.Errorf("the generator had %d requests under way and dropped %d", cfg.MaxInFlight, res.Dropped)
	}
	return ctx.Err()
}

// goodBetween counts the good answers that ended in an interval.
func (d *driver) goodBetween(from, to time.Time) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.ends {
		if e := &d.ends[i]; e.good() && e.Last.After(from) && e.Last.Before(to) {
			n++
		}
	}
	return n
}

// trial loads one target with all loads, the surge last, and then watches it recover.
type trial struct {
	cfg *Config
	up  *upstream
	t   *target
	rep *Report
}

// span is a phase that has been.
type span struct {
	load     float64
	from, to time.Time
	memory   []int64 // of the target, once a second
}

func (x *trial) run(ctx context.Context) error {
	x.up.server.Reset()
	d := newDriver(x.t.url, x.t.header)
	defer d.close()
	if err := d.phase(ctx, load.Config{MaxInFlight: 4, Count: 16}, 99); err != nil { // connections, caches
		return err
	}
	surge := x.cfg.PeerSurge
	if x.t.name == headgate {
		surge = x.cfg.Surge
	}
	var spans []span
	for i, l := range x.cfg.Loads {
		if i == len(x.cfg.Loads)-1 {
			break
		}
		s, err := x.phases(ctx, d, []step{{l, x.cfg.Each}})
		if err != nil {
			return err
		}
		spans = append(spans, s...)
		x.say(&spans[len(spans)-1], d)
	}
	s, err := x.phases(ctx, d, []step{{x.cfg.Loads[len(x.cfg.Loads)-1], surge}, {calm, x.cfg.After}})
	if err != nil {
		return err
	}
	spans = append(spans, s...)
	x.say(&s[0], d)
	log := x.up.server.Log()
	x.rep.add(x, d, log, spans)
	return nil
}

// calm is the load after the surge.
const calm = 0.8

type step struct {
	load float64
	each time.Duration
}

// phases loads step after step without a pause in between: the next one begins while
// answers of the last are still to come. It returns when all have come.
func (x *trial) phases(ctx context.Context, d *driver, steps []step) ([]span, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, len(steps))
	spans := make([]span, len(steps))
	begin := time.Now()
	for i, s := range steps {
		spans[i] = span{load: s.load, from: begin, to: begin.Add(s.each)}
		seed := uint64(s.load*1000) + uint64(i)<<20
		go func(at time.Time) {
			select {
			case <-time.After(time.Until(at)):
				errs <- d.phase(ctx, load.Config{Rate: s.load * x.rep.Capacity, Duration: s.each}, seed)
			case <-ctx.Done():
				errs <- ctx.Err()
			}
		}(begin)
		begin = spans[i].to
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var err error
	for left := len(steps); left > 0; {
		select {
		case e := <-errs:
			left--
			if e != nil && err == nil {
				err = e
				cancel()
			}
		case now := <-tick.C:
			for i := range spans {
				if now.After(spans[i].from) && now.Before(spans[i].to) {
					if n, e := residentSet(x.t.pid); e == nil {
						spans[i].memory = append(spans[i].memory, n)
					}
				}
			}
		}
	}
	return spans, err
}

func (x *trial) say(s *span, d *driver) {
	secs := s.to.Sub(s.from.Add(settle)).Seconds()
	good := float64(d.goodBetween(s.from.Add(settle), s.to)) / secs
	fmt.Fprintf(x.cfg.Log, "%-16s %4.1f × capacity: %6.1f good answers/s, %.3f of capacity\n", x.t.name, s.load, good, good/x.rep.Capacity)
}

// used is slot-time and tokens at the upstream within an interval.
type used struct {
	slotTime     [classes]time.Duration
	wastedTime   time.Duration
	tokens       int64
	wastedTokens int64
	waits        []time.Duration // of interactive requests: from due to their slot
	late         int             // got a slot when the client had left, or ought to have
}

// usedBetween sums up the upstream's log. due is when the request of an id was due.
func usedBetween(log []fakevllm.Record, from, to time.Time, due map[int64]time.Time) (u used) {
	for i := range log {
		r := &log[i]
		class, id, ok := marked(r)
		if !ok || r.Started.IsZero() || r.Started.After(to) || !r.Ended.IsZero() && r.Ended.Before(from) {
			continue
		}
		a, b := r.Started, r.Ended
		if a.Before(from) {
			a = from
		}
		if b.IsZero() || b.After(to) {
			b = to
		}
		u.slotTime[class] += b.Sub(a)
		u.tokens += r.OutputTokens
		if r.Outcome == fakevllm.Aborted {
			u.wastedTime += b.Sub(a)
			u.wastedTokens += r.OutputTokens
		}
		if at, ok := due[id]; ok && class == interactive && r.Started.After(from) {
			u.waits = append(u.waits, r.Started.Sub(at))
		}
		if at, ok := due[id]; ok && r.Started.Sub(at) > patience(class)+lateBy {
			u.late++
		}
	}
	return u
}

// lateBy is how long after the end of its client's patience a request may get its
// slot before it counts as late: what the news of a closed connection takes.
const lateBy = 50 * time.Millisecond

// recovery is from when on, counted from the end of the surge, no more than one in a
// hundred interactive requests are answered later than is normal, or not at all.
// ok is false where that does not come to be.
func recovery(ends []end, from time.Time, normal time.Duration) (d time.Duration, ok bool) {
	var after []end
	for _, e := range ends {
		if e.class == interactive && !e.Due.Before(from) {
			after = append(after, e)
		}
	}
	slices.SortFunc(after, func(a, b end) int { return a.Due.Compare(b.Due) })
	bad, since := 0, len(after) // from the back: the earliest from which on all is well
	for i := len(after) - 1; i >= 0; i-- {
		e := &after[i]
		if !e.good() || e.First.Sub(e.Due) > normal {
			bad++
		}
		if n := len(after) - i; bad*100 <= n && n >= 20 {
			since = i
		}
	}
	if since == len(after) {
		return 0, false
	}
	if since == 0 {
		return 0, true
	}
	return after[since].Due.Sub(from), true
}
