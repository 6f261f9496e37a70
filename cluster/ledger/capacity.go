package ledger

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	// defaultSlotTokens is how many tokens one slot stands for where a backend says nothing.
	defaultSlotTokens = 16_384

	defaultTargetWait = 2 * time.Second
	// defaultQueueBytes is how many bytes wait in all of the cluster where a policy says nothing.
	defaultQueueBytes = 256 << 20

	defaultShedAt Factor = 900_000

	leastTargetWait, mostTargetWait = 50 * time.Millisecond, 5 * time.Minute
	leastQueueBytes, mostQueueBytes = 1 << 20, 1 << 40
	leastKeepAlive, mostKeepAlive   = time.Second, 5 * time.Minute
	mostWeight                      = 1_000
	// leastBackground is the part of the slot-time that background has at least: batches go on under any load.
	leastBackground = 5
	maxSheds        = 16
	mostTokens      = 1_000_000_000 // of one request, or of one slot
)

// Names of what backends and models may say.
var (
	kindNames     = []string{"vllm", "openai", "anthropic"}
	affinityNames = []string{"prefix", "session", "none"}
)

// aPressure is what a pressure of a policy may be: the part of the queue's places that is taken.
func aPressure() decimal { return decimal{"a pressure", 0, factorOne, 750_000} }

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
	models := p.modelsByName()
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

// plain brings a field's name into the form in which misnamed compare it.
func plain(name string) string {
	return strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(name))
}

// misnamed says what to write instead of a name that others use.
func (*Backend) misnamed(name string) string {
	switch n := plain(name); {
	case n == "concurrency", n == "capacity", strings.HasPrefix(n, "max") && !strings.Contains(n, "token"):
		return "write slots for how many requests it may have in flight"
	case n == "minslots", n == "autoslots":
		return "write slots for the most that there may be, and learn: {min: 8} for the least"
	case n == "type", n == "provider", n == "api":
		return "write kind: vllm, openai or anthropic"
	case strings.HasSuffix(n, "timeout"):
		return "write timeouts: {connect: 2s, first_byte: 30s, idle: 60s}, of which each may be left out"
	case n == "weight", n == "priority":
		return "the least loaded backend gets the request; write overflow: true for one that is used last, or routes with weights"
	case strings.HasPrefix(n, "model"), strings.HasPrefix(n, "upstreammodel"):
		return "write models: {NAME: what the backend calls it}"
	}
	return ""
}

// mistaken says of a field without a value, which looks as if it were on, what to write.
func (*Backend) mistaken(field, value string) string {
	if field != "learn" || value != "" {
		return ""
	}
	return "without a value nothing is learnt; write learn: {} for from 1 up to slots, or remove it"
}

// misnamed says what to write instead of a name that others use.
func (*Capacity) misnamed(name string) string {
	switch n := plain(name); {
	case strings.HasPrefix(n, "max") && strings.Contains(n, "wait"), strings.HasSuffix(n, "timeout"), n == "wait", n == "maxage":
		return "write target_wait for how long the queue is; how long one request waits is its X-Headgate-Timeout, or the plan's timeout"
	case strings.Contains(n, "queue"), strings.Contains(n, "depth"), strings.Contains(n, "length"), n == "size", n == "maxrequests":
		return "how many wait follows from target_wait and from what the backends serve; write target_wait, and max_bytes for the memory"
	case strings.Contains(n, "alive"), strings.Contains(n, "heartbeat"), strings.Contains(n, "ping"):
		return "write keepalive: 15s for a comment so often to streams that wait"
	case n == "classes", n == "shares":
		return "write weights: {interactive: 75, background: 22, best_effort: 3}"
	}
	return ""
}

// mistaken says of a list without a value, which looks like an empty one, what to write.
func (*Capacity) mistaken(field, value string) string {
	if field != "shed" || value != "" {
		return ""
	}
	return "without a value it is the default, best_effort at 0.9; write shed: [] for none, or remove it"
}

// misnamed says what to write instead of a name that others use.
func (*Cutoff) misnamed(name string) string {
	switch n := plain(name); {
	case n == "pressure", n == "threshold", n == "from", n == "above":
		return "write at: 0.75 for the pressure from which it sheds"
	case strings.Contains(n, "token"), n == "cost":
		return "write above_tokens for the input and output together above which requests are shed"
	case strings.Contains(n, "tier"), n == "plan", n == "plans":
		return "write below_tier for the tier below which requests are shed"
	}
	return ""
}

// mistaken says what to write instead of a value that is no pressure.
func (*Cutoff) mistaken(field, value string) string {
	if field != "at" {
		return ""
	}
	return aPressure().mistaken(value)
}

// String is the cut-off as one would say it.
func (s Cutoff) String() string {
	at := valueOr(s.At, 0).String() + ": "
	switch {
	case s.AboveTokens != nil:
		return fmt.Sprintf("%srequests above %d tokens", at, *s.AboveTokens)
	case s.BelowTier != nil:
		return fmt.Sprintf("%splans below tier %d", at, *s.BelowTier)
	}
	if s.Class == "background" {
		return at + "class background and best_effort"
	}
	return at + "class " + s.Class
}

// rank is the order in which cut-offs shed: by cost, by tier, by class.
func (s *Cutoff) rank() int {
	switch {
	case s.AboveTokens != nil:
		return 0
	case s.BelowTier != nil:
		return 1
	}
	return 2
}

// words is what a policy says of waiting and shedding, as one would say it.
func (c *Capacity) words() string {
	r := c.resolve()
	var b strings.Builder
	fmt.Fprintf(&b, "the queue is as long as can be served within %s and holds %d bytes at most; interactive, background and best_effort weigh %d, %d and %d", r.TargetWait, r.MaxBytes, r.Weights[0], r.Weights[1], r.Weights[2])
	if r.KeepAlive > 0 {
		fmt.Fprintf(&b, "; streams that wait get a comment every %s", r.KeepAlive)
	}
	for i, s := range c.shed() {
		b.WriteString([...]string{"; from pressure ", ", from "}[min(i, 1)])
		b.WriteString(strings.Replace(s.String(), ": ", " ", 1) + " are shed")
	}
	if len(r.Shed) == 0 {
		b.WriteString("; nothing is shed")
	}
	return b.String()
}

// capacityByPath is the policy's, where it says anything of it, by the path that differences call it by.
func (p *Policy) capacityByPath() map[string]*Capacity {
	if p.Capacity == (Capacity{}) {
		return nil
	}
	return map[string]*Capacity{"capacity": &p.Capacity}
}

// learnWords is what is learnt of a backend, as one would say it.
func (b *Backend) learnWords() string {
	return fmt.Sprintf("how many slots there are is learnt, from %d to %d", valueOr(b.Learn.Min, 1), b.Slots)
}

// learntByPath are the backends whose slots are learnt, by the path that differences call that by.
func (p *Policy) learntByPath() map[string]*Backend {
	out := map[string]*Backend{}
	for i := range p.Backends {
		if b := &p.Backends[i]; b.Learn != nil {
			out["backends["+b.Name+"].learn"] = b
		}
	}
	return out
}

// served checks how requests get to a backend.
func (c *checker) served(at place, b *Backend) {
	c.oneOf(at.field("kind"), b.Kind, kindNames, true)
	if b.CacheSalt != "" && b.Kind != "" && b.Kind != "vllm" {
		c.add(at.field("cache_salt"), "cache_salt is vLLM's, and an endpoint of kind %s refuses what it does not know; remove it", b.Kind)
	}
	if b.APIKeyEnv != "" && b.APIKeyFile != "" {
		c.add(at.field("api_key_file"), "a backend has one key: remove api_key_env or api_key_file")
	}
	c.printable(at.field("api_key_file"), "a path", b.APIKeyFile)
	if b.Metrics != "" && b.Metrics != noMetrics && !strings.HasPrefix(b.Metrics, "/") {
		c.add(at.field("metrics_path"), "metrics_path must begin with /, or be none for a backend without metrics")
	}
	c.printable(at.field("metrics_path"), "a path", b.Metrics)
	if b.SlotTokens < 0 || b.SlotTokens > mostTokens {
		c.add(at.field("slot_tokens"), "%d is not between 1 and %d tokens; %d is the default", b.SlotTokens, mostTokens, defaultSlotTokens)
	}
	if b.Slots == 0 { // those below are about slots
		for _, f := range [...]struct {
			name string
			is   bool
			why  string
		}{
			{"slot_tokens", b.SlotTokens != 0, "tokens are counted in slots, and without slots there is no bound"},
			{"learn", b.Learn != nil, "how many slots there are is learnt up to slots"},
			{"overflow", b.Overflow, "what overflows must be bounded"},
		} {
			if f.is {
				c.add(at.field(f.name), "%s needs slots: %s; write slots: 64, or remove %s", f.name, f.why, f.name)
			}
		}
	} else if b.Learn != nil && b.Learn.Min != nil && (*b.Learn.Min < 1 || *b.Learn.Min > b.Slots) {
		c.add(at.field("learn").field("min"), "%d is not between 1 and slots, which is %d", *b.Learn.Min, b.Slots)
	}
	for _, t := range [...]struct {
		name string
		is   Duration
		most time.Duration
	}{{"connect", b.Timeouts.Connect, time.Minute}, {"first_byte", b.Timeouts.FirstByte, time.Hour}, {"idle", b.Timeouts.Idle, time.Hour}} {
		if d := time.Duration(t.is); d > t.most || d != 0 && d < time.Millisecond {
			c.add(at.field("timeouts").field(t.name), "%s is not between 1ms and %s; leave it out for none of this backend's own", t.is, t.most)
		}
	}
}

// printable checks a path or a name in somebody else's words.
func (c *checker) printable(at place, what, text string) {
	if len(text) > maxLabel || !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		c.add(at, "%s is at most %d printable bytes", what, maxLabel)
	}
}

// publicNames checks what a backend calls models. models are all names and aliases.
func (c *checker) publicNames(at place, b *Backend, models map[string]bool) {
	seen := map[*Model]string{}
	for _, public := range slices.Sorted(maps.Keys(b.Models)) {
		in := at.entry(public)
		c.ref(in, "model", public, models)
		m := c.models[public]
		switch {
		case b.Models[public] == "":
			c.add(in, "what does the backend call the model? Write it, or remove this for the model's upstream_model")
		case m == nil:
		case seen[m] != "":
			c.add(in, "%s is the same model as %s; remove one of them", public, seen[m])
		case !slices.Contains(m.Backends, b.Name):
			c.add(in, "the model %s is not served here: add %s to its backends, or remove this", m.Name, clip(b.Name))
		}
		c.printable(in, "a model's name", b.Models[public])
		seen[m] = public
	}
}

// within checks a duration that a policy may leave out.
func (c *checker) within(at place, d Duration, least, most time.Duration, why string) {
	if d != 0 && (time.Duration(d) < least || time.Duration(d) > most) {
		c.add(at, "%s is not between %s and %s: %s", d, least, most, why)
	}
}

func (c *checker) capacity(at place, k *Capacity) {
	c.within(at.field("target_wait"), k.TargetWait, leastTargetWait, mostTargetWait, "it is how long the last in the queue waits")
	c.within(at.field("keepalive"), k.KeepAlive, leastKeepAlive, mostKeepAlive, "it is how often streams that wait get a comment; leave it out for none")
	if k.MaxBytes != 0 && (k.MaxBytes < leastQueueBytes || k.MaxBytes > mostQueueBytes) {
		c.add(at.field("max_bytes"), "%d is not between %d and %d: it is what the bodies of all who wait take, in the whole cluster", k.MaxBytes, leastQueueBytes, int64(mostQueueBytes))
	}
	in, sum, known := at.field("weights"), int64(0), true
	for i, w := range k.Weights.weights() {
		if sum += w; w < 1 || w > mostWeight {
			known = false
			c.add(in.field(classNames[i]), "%d is not between 1 and %d: every class that waits is served", w, mostWeight)
		}
	}
	if w := k.Weights.weights()[1]; known && w*leastBackground < sum {
		c.add(in.field("background"), "%d of %d is less than a fifth, which background work has at least: write %d or more, or less for the others", w, sum, (sum-w+leastBackground-2)/(leastBackground-1))
	}
	if k.Shed != nil {
		c.sheds(at.field("shed"), *k.Shed)
	}
}

// sheds checks the list of cut-offs.
func (c *checker) sheds(at place, sheds []Cutoff) {
	if len(sheds) > maxSheds {
		c.add(at, "%d cut-offs are more than %d", len(sheds), maxSheds)
	}
	for i := range sheds {
		s, in := &sheds[i], at.nth(i, "")
		c.pressure(in, s.At, "a cut-off needs the pressure from which it sheds, as in at: 0.75")
		said := 0
		for _, is := range [...]bool{s.AboveTokens != nil, s.BelowTier != nil, s.Class != ""} {
			if is {
				said++
			}
		}
		switch {
		case said != 1:
			c.add(in, "a cut-off has one of above_tokens, below_tier and class; write another entry for another")
			continue
		case s.AboveTokens != nil && (*s.AboveTokens < 1 || *s.AboveTokens > mostTokens):
			c.add(in.field("above_tokens"), "%d is not between 1 and %d tokens", *s.AboveTokens, mostTokens)
		case s.BelowTier != nil && *s.BelowTier < 1:
			c.add(in.field("below_tier"), "a tier below %d sheds nobody: tiers begin with 0; write 1 or more", *s.BelowTier)
		case s.Class == classNames[0]:
			c.add(in.field("class"), "interactive and all below it are everybody; write background or best_effort")
		case s.Class != "":
			c.oneOf(in.field("class"), s.Class, classNames[1:], false)
		}
		if i == 0 {
			continue
		}
		if b := &sheds[i-1]; b.rank() > s.rank() {
			c.add(in, "what is dear is shed before tiers, and tiers before classes: this entry goes before that at %s", valueOr(b.At, 0))
		} else if b.At != nil && s.At != nil && *b.At > *s.At {
			c.add(in.field("at"), "%s is below that of the entry before, %s: the first sheds first; write %s or more, or change their order", *s.At, *b.At, *b.At)
		}
	}
}

// pressure checks a pressure of an entry; needed: what to say where there is none, "" if there need be none.
func (c *checker) pressure(in place, f *Factor, needed string) {
	at := in.field("at")
	switch {
	case f == nil && needed != "":
		c.add(at, "%s", needed)
	case f == nil:
	case *f == 0:
		c.add(at, "a pressure of 0 is always reached: write one above 0 and at most 1, as in 0.75")
	case *f >= 2*factorOne && *f <= 100*factorOne:
		c.add(at, "%s looks like a percentage: write %s; a pressure is above 0 and at most 1", *f, *f/100)
	case *f > factorOne:
		c.add(at, "%s is above 1, at which the queue is full: write a pressure above 0 and at most 1, as in 0.75", *f)
	}
}
