package ledger

import (
	"maps"
	"time"
)

const (
	// defaultSlotTokens is how many tokens one slot stands for where a backend says nothing.
	defaultSlotTokens = 16_384

	defaultTargetWait = 2 * time.Second
	// defaultQueueBytes is how many bytes wait in all of the cluster where a policy says nothing.
	defaultQueueBytes = 256 << 20

	defaultShedAt Factor = 900_000
)

// Names of what backends and models may say.
var (
	kindNames     = []string{"vllm", "openai", "anthropic"}
	affinityNames = []string{"prefix", "session", "none"}
)

// noMetrics is what a policy calls the path of metrics that a backend does not have.
const noMetrics = "none"

// Capacity says how requests wait for backends, and which are shed before that, as written; see Index.Capacity
// for what it becomes.
type Capacity struct {
	TargetWait Duration `yaml:"target_wait,omitempty"` // how long those at the end of the queue may expect to wait; absent: 2s
	MaxBytes   int64    `yaml:"max_bytes,omitempty"`   // of the bodies that wait, in the whole cluster; absent: 256 MiB
	KeepAlive  Duration `yaml:"keepalive,omitempty"`   // a comment to streams that wait, so often; absent: none
	Weights    Weights  `yaml:"weights,omitempty"`
	// Shed are the cut-offs, lowest pressure first. Absent: best_effort at 0.9; an empty list: none.
	Shed *[]Cutoff `yaml:"shed,omitempty"`
}

// Weights are the classes' shares of the slot-time while all of them wait.
type Weights struct {
	Interactive *int64 `yaml:"interactive,omitempty"` // absent: 75
	Background  *int64 `yaml:"background,omitempty"`  // absent: 22
	BestEffort  *int64 `yaml:"best_effort,omitempty"` // absent: 3
}

// Cutoff says which requests are shed from a pressure on. It has exactly one of the three.
type Cutoff struct {
	At          *Factor `yaml:"at,omitempty"`
	AboveTokens *int64  `yaml:"above_tokens,omitempty"` // of input and output
	BelowTier   *int    `yaml:"below_tier,omitempty"`   // of the plan
	Class       string  `yaml:"class,omitempty"`        // and those below it
}

// ResolvedBackend is a backend with its defaults in place. Nothing of it may be changed.
type ResolvedBackend struct {
	*Backend
	Kind       string // vllm | openai | anthropic. It hides Backend.Kind
	SlotTokens int64  // > 0. It hides Backend.SlotTokens
	// LearnMin is the least that is learnt, 1 to Slots; 0 where Slots is how many there are.
	LearnMin int
	// Models are what the backend calls models, by their own names, never by aliases; nil: none by another
	// name than Model.Upstream. It hides Backend.Models.
	Models map[string]string
	// MetricsPath is where vLLM's metrics are; "": nowhere.
	MetricsPath string
	// ConnectTimeout is 0 for the node's, FirstByteTimeout and IdleTimeout for none.
	ConnectTimeout, FirstByteTimeout, IdleTimeout time.Duration
}

// ResolvedCapacity is Capacity with its defaults in place.
type ResolvedCapacity struct {
	TargetWait time.Duration // > 0
	MaxBytes   int64         // > 0
	KeepAlive  time.Duration // 0: none
	// Weights are those of interactive, background and best_effort: each at least 1, the second at least a
	// fifth of their sum.
	Weights [3]int64
	// Shed are in the order of At, and where that is the same by cost, tier, class.
	Shed []ResolvedCutoff
}

// ResolvedCutoff is a Cutoff. Of the last three one says something.
type ResolvedCutoff struct {
	At          float64 // in (0, 1]
	AboveTokens int64   // > 0: requests with more tokens of input and output together are shed
	BelowTier   *int    // those of plans of a lower tier
	Class       string  // background or best_effort: those, and the less urgent
}

// AffinityOf is what of a request is sent to the same endpoint: prefix, session or none.
func (m *Model) AffinityOf() string {
	if m.Affinity == "" {
		return affinityNames[0]
	}
	return m.Affinity
}

// kind is what a backend is, with its default in place.
func (b *Backend) kind() string {
	if b.Kind == "" {
		return kindNames[0]
	}
	return b.Kind
}

// metricsPath is where vLLM's metrics are; "": nowhere.
func (b *Backend) metricsPath() string {
	switch {
	case b.Metrics == noMetrics, b.Metrics == "" && b.kind() != "vllm":
		return ""
	case b.Metrics == "":
		return "/metrics"
	}
	return b.Metrics
}

// ResolvedBackends are a valid policy's, in its order.
func (p *Policy) ResolvedBackends() []ResolvedBackend {
	models := map[string]*Model{}
	for i := range p.Models {
		m := &p.Models[i]
		models[m.Name] = m
		for _, a := range m.Aliases {
			models[a] = m
		}
	}
	out := make([]ResolvedBackend, len(p.Backends))
	for i := range p.Backends {
		out[i] = p.Backends[i].resolve(models)
	}
	return out
}

// resolve compiles a valid backend. models are by name and alias.
func (b *Backend) resolve(models map[string]*Model) ResolvedBackend {
	r := ResolvedBackend{
		Backend: b, Kind: b.kind(), SlotTokens: b.SlotTokens, MetricsPath: b.metricsPath(),
		ConnectTimeout: time.Duration(b.Timeouts.Connect), FirstByteTimeout: time.Duration(b.Timeouts.FirstByte), IdleTimeout: time.Duration(b.Timeouts.Idle),
	}
	if r.SlotTokens == 0 {
		r.SlotTokens = defaultSlotTokens
	}
	if b.Learn != nil {
		r.LearnMin = valueOr(b.Learn.Min, 1)
	}
	if len(b.Models) > 0 {
		r.Models = make(map[string]string, len(b.Models))
	}
	for public, upstream := range maps.All(b.Models) {
		r.Models[models[public].Name] = upstream
	}
	return r
}

// weights are those of the classes, with the defaults in place.
func (w *Weights) weights() [3]int64 {
	return [3]int64{valueOr(w.Interactive, 75), valueOr(w.Background, 22), valueOr(w.BestEffort, 3)}
}

// shed are the cut-offs, with the default in place.
func (c *Capacity) shed() []Cutoff {
	at := defaultShedAt
	return valueOr(c.Shed, []Cutoff{{At: &at, Class: "best_effort"}})
}

// resolve compiles what a valid policy says.
func (c *Capacity) resolve() ResolvedCapacity {
	r := ResolvedCapacity{TargetWait: time.Duration(c.TargetWait), MaxBytes: c.MaxBytes, KeepAlive: time.Duration(c.KeepAlive), Weights: c.Weights.weights()}
	if r.TargetWait == 0 {
		r.TargetWait = defaultTargetWait
	}
	if r.MaxBytes == 0 {
		r.MaxBytes = defaultQueueBytes
	}
	for _, s := range c.shed() {
		r.Shed = append(r.Shed, ResolvedCutoff{At: s.At.float(), AboveTokens: valueOr(s.AboveTokens, 0), BelowTier: s.BelowTier, Class: s.Class})
	}
	return r
}
