package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Bounds of what is recorded.
const (
	maxRecorded = 10 * time.Minute // longer times count as this
	maxGaps     = 1 << 16          // gaps kept of one answer
	tailSize    = 64               // bytes in which the end marker is looked for
	readSize    = 32 << 10
)

// Config describes a run.
type Config struct {
	// URL receives POST requests. Its host must be a loopback address.
	URL    string
	Header http.Header
	// Body returns the n-th body, from 0. It is called from many goroutines and must
	// not change a slice that it has returned.
	Body func(n int64) []byte
	// End, if set, must stand in the last 64 bytes of a good answer.
	End string
	// Each, if set, describes the n-th request instead of Body, Header and End. It is
	// called from many goroutines.
	Each func(n int64) Shot
	// Seen, if set, is told how each request that was sent has ended. It is called
	// from many goroutines.
	Seen func(Seen)
	// Rate is arrivals a second; 0 keeps MaxInFlight requests under way.
	Rate float64
	// Poisson draws the times between arrivals from Seed instead of spacing them evenly.
	Poisson bool
	Seed    uint64
	// Count bounds the arrivals, Duration the time in which they come. At least one
	// must be set.
	Count    int64
	Duration time.Duration
	// MaxInFlight bounds the requests under way. Default: 1024.
	MaxInFlight int
	// Timeout bounds one request. Default: 30 s.
	Timeout time.Duration
	// MaxAnswer bounds the bytes read of one answer. Default: 64 MiB.
	MaxAnswer int64
	// Transport replaces the default one, which keeps MaxInFlight idle connections.
	// It is not closed.
	Transport http.RoundTripper
}

// Shot is one request.
type Shot struct {
	Body   []byte
	Header http.Header // not changed
	End    string      // as in Config
	// Patience is how long after it was due the client leaves if no byte of the answer
	// has come. 0 is as long as Config.Timeout.
	Patience time.Duration
}

// Seen is how a request ended.
type Seen struct {
	N         int64
	Due, Sent time.Time
	First     time.Time // first byte of the answer's body; zero if none came
	Last      time.Time // the end, good or bad
	Status    int       // 0: no answer
	Kind      string    // "" for a good answer; else as in Result.Errors, or "status"
}

// Validate reports what makes no sense.
func (c Config) Validate() error {
	u, err := url.Parse(c.URL)
	if err != nil {
		return fmt.Errorf("target: %w", err)
	}
	host := u.Hostname()
	ip := net.ParseIP(host)
	switch {
	case u.Scheme != "http":
		return fmt.Errorf("target %q: want http", c.URL)
	case host != "localhost" && (ip == nil || !ip.IsLoopback()):
		return fmt.Errorf("target %q: only loopback addresses are loaded", c.URL)
	case c.Body == nil && c.Each == nil:
		return errors.New("no body")
	case c.Rate < 0 || c.Count < 0 || c.Duration < 0 || c.MaxInFlight < 0 || c.Timeout < 0 || c.MaxAnswer < 0:
		return errors.New("a bound or rate is negative")
	case c.Count == 0 && c.Duration == 0:
		return errors.New("neither count nor duration bounds the run")
	}
	return nil
}

// Result is what a run measured. Times in the histograms are nanoseconds and only of
// good answers: 2xx, read to their end, with the end marker.
type Result struct {
	Arrivals int64 // dropped ones too
	Dropped  int64
	Good     int64
	Status   map[int]int64
	Errors   map[string]int64 // by kind: timeout, impatient, transport, truncated, too_long
	Bytes    int64
	Chunks   int64 // SSE frames
	// Elapsed runs from the first arrival's due time to the last answer.
	Elapsed                           time.Duration
	Latency, Service, First, Gap, Lag *hdrhistogram.Histogram
}

// Throughput is good answers a second.
func (r *Result) Throughput() float64 { return float64(r.Good) / r.Elapsed.Seconds() }

// run is a run in progress.
type run struct {
	cfg    Config
	client *http.Client
	places chan struct{}
	pool   sync.Pool
	wait   func(ctx context.Context, until time.Time) bool

	mu  sync.Mutex
	res Result
}

// Run loads the target until the bounds of cfg are reached or ctx ends, waits for
// the requests under way, and returns what it measured. It fails only for a
// configuration that makes no sense.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	return runWith(ctx, cfg, WaitUntil)
}

func runWith(ctx context.Context, cfg Config, wait func(context.Context, time.Time) bool) (*Result, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("load: %w", err)
	}
	if cfg.MaxInFlight == 0 {
		cfg.MaxInFlight = 1024
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 30 * time.Second
	}
	if cfg.MaxAnswer == 0 {
		cfg.MaxAnswer = 64 << 20
	}
	r := &run{cfg: cfg, places: make(chan struct{}, cfg.MaxInFlight), wait: wait}
	r.pool.New = func() any { return &scratch{buf: make([]byte, readSize)} }
	histogram := func() *hdrhistogram.Histogram { return hdrhistogram.New(1000, int64(maxRecorded), 3) }
	r.res = Result{
		Status: map[int]int64{}, Errors: map[string]int64{},
		Latency: histogram(), Service: histogram(), First: histogram(), Gap: histogram(), Lag: histogram(),
	}
	if cfg.Transport == nil {
		t := &http.Transport{
			MaxIdleConns: cfg.MaxInFlight, MaxIdleConnsPerHost: cfg.MaxInFlight,
			IdleConnTimeout: time.Minute, DisableCompression: true, ReadBufferSize: readSize,
		}
		defer t.CloseIdleConnections()
		cfg.Transport = t
	}
	r.client = &http.Client{Transport: cfg.Transport}
	start := time.Now()
	if cfg.Rate == 0 {
		r.saturate(ctx, start)
	} else {
		r.arrive(ctx, start)
	}
	r.res.Elapsed = time.Since(start)
	return &r.res, nil
}

// arrive starts a request at each arrival and waits for all of them.
func (r *run) arrive(ctx context.Context, start time.Time) {
	rng := rand.New(rand.NewPCG(r.cfg.Seed, 1))
	var wg sync.WaitGroup
	defer wg.Wait()
	due := start
	for n := int64(0); r.cfg.Count == 0 || n < r.cfg.Count; n++ {
		if r.cfg.Duration > 0 && due.Sub(start) >= r.cfg.Duration || !r.wait(ctx, due) {
			return
		}
		r.res.Arrivals++
		select {
		case r.places <- struct{}{}:
			at := due
			wg.Go(func() {
				defer func() { <-r.places }()
				r.one(ctx, n, at)
			})
		default:
			r.res.Dropped++
		}
		gap := 1 / r.cfg.Rate
		if r.cfg.Poisson {
			gap *= rng.ExpFloat64()
		}
		due = due.Add(time.Duration(gap * float64(time.Second)))
	}
}

// saturate keeps MaxInFlight requests under way.
func (r *run) saturate(ctx context.Context, start time.Time) {
	var wg sync.WaitGroup
	for range r.cfg.MaxInFlight {
		wg.Go(func() {
			for ctx.Err() == nil && (r.cfg.Duration == 0 || time.Since(start) < r.cfg.Duration) {
				r.mu.Lock()
				n := r.res.Arrivals
				if r.cfg.Count > 0 && n >= r.cfg.Count {
					r.mu.Unlock()
					return
				}
				r.res.Arrivals++
				r.mu.Unlock()
				r.one(ctx, n, time.Now())
			}
		})
	}
	wg.Wait()
}

// scratch is what one request needs, reused by later ones.
type scratch struct {
	buf  []byte
	tail []byte
	gaps []int64
}

// shot describes the n-th request.
func (r *run) shot(n int64) Shot {
	if r.cfg.Each != nil {
		return r.cfg.Each(n)
	}
	return Shot{Body: r.cfg.Body(n), Header: r.cfg.Header, End: r.cfg.End}
}

// errImpatient ends the request of a client who waited too long for the first byte.
var errImpatient = errors.New("no first byte within the client's patience")

// one sends a request and records its answer.
func (r *run) one(ctx context.Context, n int64, due time.Time) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	sc, ok := r.pool.Get().(*scratch)
	if !ok {
		return
	}
	defer r.pool.Put(sc)
	shot := r.shot(n)
	stay := func() bool { return true }
	if shot.Patience > 0 {
		var leave context.CancelCauseFunc
		ctx, leave = context.WithCancelCause(ctx)
		defer leave(nil)
		stay = time.AfterFunc(time.Until(due.Add(shot.Patience)), func() { leave(errImpatient) }).Stop
		defer stay()
	}
	seen := Seen{N: n, Due: due, Sent: time.Now()}
	a := r.exchange(ctx, &shot, &seen, sc, stay)
	seen.First, seen.Last = a.first, a.last
	if seen.Kind == "" {
		r.good(&seen, a, sc.gaps)
	} else {
		seen.Last = time.Now()
		r.failed(seen.Status, seen.Kind)
	}
	if r.cfg.Seen != nil {
		r.cfg.Seen(seen)
	}
}

// exchange sends a request and reads its answer. It says in seen how that went; stay
// is called at the first byte.
func (r *run) exchange(ctx context.Context, shot *Shot, seen *Seen, sc *scratch, stay func() bool) (a answer) {
	seen.Kind = "transport"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.cfg.URL, bytes.NewReader(shot.Body))
	if err != nil {
		return a
	}
	req.Header = shot.Header.Clone()
	if req.Header == nil {
		req.Header = http.Header{}
	}
	if req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := r.client.Do(req)
	if err != nil {
		seen.Kind = kind(ctx)
		return a
	}
	defer resp.Body.Close() //nolint:errcheck // a read-only body has nothing to lose
	seen.Status = resp.StatusCode
	a = r.readAnswer(resp.Body, seen.Sent, sc, stay)
	switch {
	case a.err != nil:
		seen.Kind = kind(ctx)
	case a.bytes > r.cfg.MaxAnswer:
		seen.Kind = "too_long"
	case resp.StatusCode/100 != 2:
		seen.Kind = "status"
	case shot.End != "" && !bytes.Contains(sc.tail, []byte(shot.End)):
		seen.Kind = "truncated"
	default:
		seen.Kind = ""
	}
	return a
}

func kind(ctx context.Context) string {
	switch {
	case errors.Is(context.Cause(ctx), errImpatient):
		return "impatient"
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return "timeout"
	}
	return "transport"
}

// answer is what was read of a response.
type answer struct {
	first, last   time.Time
	bytes, chunks int64
	err           error
}

func (r *run) readAnswer(body io.Reader, sent time.Time, sc *scratch, stay func() bool) (a answer) {
	sc.tail, sc.gaps = sc.tail[:0], sc.gaps[:0]
	a.last = sent
	for a.bytes <= r.cfg.MaxAnswer {
		n, err := body.Read(sc.buf)
		if n > 0 {
			now := time.Now()
			if a.bytes == 0 {
				stay()
				a.first = now
			} else if len(sc.gaps) < maxGaps {
				sc.gaps = append(sc.gaps, int64(now.Sub(a.last)))
			}
			a.last = now
			a.bytes += int64(n)
			a.chunks += int64(bytes.Count(sc.buf[:n], []byte("\n\n")))
			sc.tail = append(sc.tail, sc.buf[max(0, n-tailSize):n]...)
			sc.tail = sc.tail[:copy(sc.tail, sc.tail[max(0, len(sc.tail)-tailSize):])]
		}
		if err == io.EOF {
			return a
		}
		if err != nil {
			a.err = err
			return a
		}
	}
	return a
}

func (r *run) failed(status int, kind string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if status != 0 {
		r.res.Status[status]++
	}
	if kind != "status" {
		r.res.Errors[kind]++
	}
}

func (r *run) good(seen *Seen, a answer, gaps []int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.res.Good++
	r.res.Status[seen.Status]++
	r.res.Bytes += a.bytes
	r.res.Chunks += a.chunks
	record(r.res.Latency, int64(a.last.Sub(seen.Due)))
	record(r.res.Service, int64(a.last.Sub(seen.Sent)))
	record(r.res.Lag, int64(seen.Sent.Sub(seen.Due)))
	if !a.first.IsZero() {
		record(r.res.First, int64(a.first.Sub(seen.Sent)))
	}
	for _, g := range gaps {
		record(r.res.Gap, g)
	}
}

// record clamps v into what the histograms hold, so that recording cannot fail.
func record(h *hdrhistogram.Histogram, v int64) {
	_ = h.RecordValue(min(max(v, 0), int64(maxRecorded))) // in range by the clamp
}
