package fakevllm

import (
	"container/list"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Outcome is how a request ended.
type Outcome string

// The outcomes.
const (
	Open    Outcome = "open"    // not ended yet
	OK      Outcome = "ok"      // answered as asked
	Refused Outcome = "refused" // answered with an error that the request earned
	Failed  Outcome = "failed"  // broken by a fault
	Aborted Outcome = "aborted" // the client went away
)

// Record is what the server knows of one request.
type Record struct {
	Seq          int64 // 1 for the first since New or Reset
	Time         time.Time
	Method, Path string      // Path with its query
	Header       http.Header // those of recordedHeaders that the request carried
	Body         []byte      // the first Config.RecordBody bytes
	BodyBytes    int64
	Model        string
	Stream       bool
	// PromptTokens counts cached ones too. OutputTokens is what was generated so
	// far or until the end, all choices together, whatever usage was reported.
	PromptTokens, CachedTokens, OutputTokens int64
	Status                                   int       // 0 if nothing was answered
	Started, Ended                           time.Time // got its slot; left it. Zero: not yet, or never
	Outcome                                  Outcome
	Fault                                    Fault // the one that ended it
	Management                               bool  // a route that only an operator may reach
}

// Stats are sums over all requests since New or Reset; gauges are never reset.
type Stats struct {
	Requests, Management, Unknown            int64 // all; to management routes; to routes that do not exist
	InFlight, Running, Waiting, Held         int64 // gauges of inference requests: arrived; in a slot; before it; stopped by Hold
	PeakInFlight, PeakRunning, PeakWaiting   int64
	SlotTime                                 time.Duration // of all requests together, so far
	PromptTokens, CachedTokens, OutputTokens int64         // of ended requests
	WastedTokens                             int64         // those of OutputTokens that were for a client who left
	Dropped                                  int64         // records pushed out of the log
	Outcomes                                 map[Outcome]int64
}

// Server is a model server. All methods are safe for concurrent use.
type Server struct {
	cfg    Config
	words  []string
	mux    *http.ServeMux
	born   time.Time
	prefix *prefixCache // nil for none
	hold   atomic.Pointer[hold]
	faults atomic.Pointer[[]standing]
	load   atomic.Int64 // Running, to be read without the lock

	mu        sync.Mutex
	queue     list.List // of *waiter
	booked    time.Time // until when the time is accounted for
	windows   []Window  // a ring once it is full
	oldest    int
	open      []*door
	seq       int64
	ring      []*Record // record n lies at n % len
	stats     Stats
	kv        int64 // tokens of running requests
	metricsAs Metrics
	frozen    []byte // what MetricsFrozen answers; nil until it was asked
	healthAs  Health
	changed   chan struct{} // closed at the next change; nil while nobody waits
	stored    map[string]*stored
	order     []string // ids in stored, oldest first
}

type hold struct {
	after    int64
	released chan struct{}
}

// New returns a server that is ready to answer. It starts nothing and needs no
// closing.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("fakevllm: %w", err)
	}
	s := &Server{cfg: cfg.withDefaults(), words: words()}
	s.born = time.Now()
	s.booked = s.born
	s.prefix = newPrefixCache(s.cfg.PrefixBlocks, s.cfg.BlockTokens)
	s.metricsAs, s.healthAs = s.cfg.Metrics, HealthFollows
	standings := []standing{}
	for _, f := range slices.Sorted(maps.Keys(s.cfg.Faults)) {
		standings = append(standings, standing{fault: f, share: s.cfg.Faults[f], since: s.born})
	}
	s.faults.Store(&standings)
	s.Reset()
	s.mux = s.routes()
	return s, nil
}

// Handler returns the server's routes. It may be served over HTTP/1.1 and HTTP/2.
func (s *Server) Handler() http.Handler { return s.mux }

// Log returns copies of the records kept, oldest first. A request is in it from
// its arrival on. The slices and headers inside are shared and must not be changed.
func (s *Server) Log() []Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Record, 0, min(s.seq, int64(len(s.ring))))
	for n := max(1, s.seq-int64(len(s.ring))+1); n <= s.seq; n++ {
		out = append(out, *s.ring[n%int64(len(s.ring))])
	}
	return out
}

// Stats returns the counters as they stand.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.snapshot()
}

func (s *Server) snapshot() Stats {
	s.elapse()
	st := s.stats
	st.Outcomes = maps.Clone(st.Outcomes)
	return st
}

// Reset forgets the log, the sums, the peaks and the stored responses. Requests
// that are open stay in the gauges but leave no record.
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.elapse()
	old := s.stats
	s.windows, s.oldest = nil, 0
	s.stats = Stats{
		InFlight: old.InFlight, Running: old.Running, Waiting: old.Waiting, Held: old.Held,
		PeakInFlight: old.InFlight, PeakRunning: old.Running, PeakWaiting: old.Waiting, Outcomes: map[Outcome]int64{},
	}
	s.seq, s.ring = 0, make([]*Record, s.cfg.LogSize)
	s.stored, s.order = map[string]*stored{}, nil
}

// Await returns nil once cond holds for the counters, or ctx's error. cond is
// called after every change, under the server's lock.
func (s *Server) Await(ctx context.Context, cond func(Stats) bool) error {
	for {
		s.mu.Lock()
		if cond(s.snapshot()) {
			s.mu.Unlock()
			return nil
		}
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Hold stops every running request before its first byte until Release.
func (s *Server) Hold() { s.HoldAfter(0) }

// HoldAfter stops every running request that reaches n generated tokens until
// Release. A later call replaces an earlier one and releases what that one held.
func (s *Server) HoldAfter(n int64) {
	s.release(s.hold.Swap(&hold{after: n, released: make(chan struct{})}))
}

// Release lets held requests go on and holds no more.
func (s *Server) Release() { s.release(s.hold.Swap(nil)) }

func (s *Server) release(h *hold) {
	if h != nil {
		close(h.released)
	}
}

// update changes the counters under the lock and wakes those who wait for it.
func (s *Server) update(f func(*Stats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.stats)
	s.notify()
}

func (s *Server) notify() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// routes names every path once. Inference routes take a slot; lookups do not.
func (s *Server) routes() *http.ServeMux {
	mux := http.NewServeMux()
	inference := func(f func(*call), paths ...string) {
		for _, p := range paths {
			mux.HandleFunc(p, s.handle(http.MethodPost, true, f))
		}
	}
	inference((*call).chat, "/v1/chat/completions")
	inference((*call).completions, "/v1/completions")
	inference((*call).messages, "/v1/messages")
	inference((*call).responses, "/v1/responses")
	inference((*call).transcribe, "/v1/audio/transcriptions", "/v1/audio/translations")
	inference((*call).embeddings, "/v1/embeddings")
	inference((*call).pooling, "/pooling")
	inference((*call).classify, "/classify")
	inference((*call).score, "/score", "/v1/score")
	inference((*call).rerank, "/rerank", "/v1/rerank", "/v2/rerank")

	lookup := func(method string, f func(*call), paths ...string) {
		for _, p := range paths {
			mux.HandleFunc(p, s.handle(method, false, f))
		}
	}
	lookup(http.MethodPost, (*call).countTokens, "/v1/messages/count_tokens")
	lookup(http.MethodPost, (*call).tokenize, "/tokenize")
	lookup(http.MethodPost, (*call).detokenize, "/detokenize")
	lookup(http.MethodGet, (*call).getResponse, "/v1/responses/{id}")
	lookup(http.MethodPost, (*call).cancelResponse, "/v1/responses/{id}/cancel")
	lookup(http.MethodGet, (*call).models, "/v1/models")
	lookup(http.MethodGet, (*call).version, "/version")
	lookup(http.MethodGet, (*call).load, "/load")
	lookup(http.MethodGet, (*call).metrics, "/metrics")
	lookup("", (*call).health, healthRoutes()...)
	lookup("", (*call).manage, managementRoutes()...)
	lookup("", (*call).unknown, "/")
	s.control(mux)
	return mux
}

func healthRoutes() []string { return []string{"/health", "/health/ready", "/ping"} }

// managementRoutes are those of vLLM that change or reveal the server itself. A
// gateway must let nobody through to them.
func managementRoutes() []string {
	return []string{
		"/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused",
		"/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
		"/collective_rpc", "/server_info", "/abort_requests", "/get_world_size",
		"/start_profile", "/stop_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep",
		"/init_weight_transfer_engine", "/update_weights",
		"/v1/load_lora_adapter", "/v1/unload_lora_adapter",
	}
}
