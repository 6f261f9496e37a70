package ledger

// Policy is the operator's whole will, as written.
type Policy struct {
	Version  int       `yaml:"version"`
	Backends []Backend `yaml:"backends,omitempty"`
	Models   []Model   `yaml:"models,omitempty"`
	Plans    []Plan    `yaml:"plans,omitempty"`
	Tenants  []Tenant  `yaml:"tenants,omitempty"`
	Keys     []Key     `yaml:"keys,omitempty"`
	Surfaces []Surface `yaml:"surfaces,omitempty"`
	Global   Global    `yaml:"global,omitempty"`
	Notify   Notify    `yaml:"notify,omitempty"`
	// Capacity is how requests wait and which are shed; Ladder the rungs of degradation, lowest first;
	// Routes which model a request goes to, the first that matches.
	Capacity Capacity     `yaml:"capacity,omitempty"`
	Ladder   []LadderRung `yaml:"ladder,omitempty"`
	Routes   []Route      `yaml:"routes,omitempty"`
}

// Backend is a model server, or with a dns:// URL a headless service of many; see Index.Backends for what it
// becomes.
type Backend struct {
	Name       string `yaml:"name"`
	URL        string `yaml:"url"`
	Slots      int    `yaml:"slots,omitempty"`        // in flight at each endpoint, at most; 0: unbounded
	APIKeyEnv  string `yaml:"api_key_env,omitempty"`  // the environment variable that holds its key
	APIKeyFile string `yaml:"api_key_file,omitempty"` // or the file, read again when it changes
	CAFile     string `yaml:"ca_file,omitempty"`
	CertFile   string `yaml:"cert_file,omitempty"`
	KeyFile    string `yaml:"key_file,omitempty"`
	ServerName string `yaml:"server_name,omitempty"`
	HealthPath string `yaml:"health_path,omitempty"`
	// CacheSalt keeps the prefixes that the server caches apart: "" not at all, tenant by tenant.
	CacheSalt string `yaml:"cache_salt,omitempty"`
	Kind      string `yaml:"kind,omitempty"` // vllm | openai | anthropic; absent: vllm
	// Overflow: used only where no other backend of the model has room.
	Overflow   bool              `yaml:"overflow,omitempty"`
	SlotTokens int64             `yaml:"slot_tokens,omitempty"`  // of input and output, that one slot stands for; absent: 16384
	Learn      *Learn            `yaml:"learn,omitempty"`        // absent: Slots is how many there are
	Models     map[string]string `yaml:"models,omitempty"`       // what it calls models of the policy; absent: Model.Upstream
	Metrics    string            `yaml:"metrics_path,omitempty"` // of vLLM's own; none: it has none; absent: /metrics, for vllm
	Timeouts   Timeouts          `yaml:"timeouts,omitempty"`
}

// Learn says that how many slots there are is learnt, up to Backend.Slots.
type Learn struct {
	Min *int `yaml:"min,omitempty"` // never fewer; absent: 1
}

// Timeouts are of requests to a backend.
type Timeouts struct {
	Connect   Duration `yaml:"connect,omitempty"`    // TCP and TLS each; absent: the node's
	FirstByte Duration `yaml:"first_byte,omitempty"` // of streams, from the request sent; absent: none
	Idle      Duration `yaml:"idle,omitempty"`       // between two reads of an answer; absent: none
}

// Model is a served model.
type Model struct {
	Name          string   `yaml:"name"`
	Aliases       []string `yaml:"aliases,omitempty"`
	Backends      []string `yaml:"backends"`
	Upstream      string   `yaml:"upstream_model,omitempty"` // absent: Name
	Version       string   `yaml:"version,omitempty"`
	Context       int64    `yaml:"context,omitempty"` // tokens
	Price         Price    `yaml:"price_per_million,omitempty"`
	Flat          Flat     `yaml:"price_flat,omitempty"`
	Gratis        bool     `yaml:"free,omitempty"`   // it costs nothing, on purpose
	Prices        []Dated  `yaml:"prices,omitempty"` // from later moments on
	DefaultOutput int64    `yaml:"default_output_tokens,omitempty"`
	// TemplateTokens is how many tokens the chat template adds to a conversation at most, beside those of
	// its messages; absent: 256.
	TemplateTokens int64    `yaml:"template_tokens,omitempty"`
	ImageTokens    int64    `yaml:"image_tokens,omitempty"`
	AudioTokens    int64    `yaml:"audio_tokens,omitempty"`
	BytesPerToken  Factor   `yaml:"bytes_per_token,omitempty"` // where the learned ratio starts
	Fallback       []string `yaml:"fallback,omitempty"`
	// DefaultTemperature is that of a request which names none: Temperature has it.
	DefaultTemperature *Factor `yaml:"default_temperature,omitempty"`
	// PrefixMinimum is the least that a prefix must have for the provider to cache it, in tokens; 0: not known.
	PrefixMinimum int64 `yaml:"prefix_minimum,omitempty"`
	// Affinity is what is sent to the same endpoint: prefix | session | none; absent: prefix. See AffinityOf.
	Affinity string `yaml:"affinity,omitempty"`
}

// Plan is what a tenant has bought.
type Plan struct {
	Name     string     `yaml:"name"`
	Tier     int        `yaml:"tier,omitempty"` // lower tiers are shed first
	Limits   []Limit    `yaml:"limits,omitempty"`
	Budgets  []Budget   `yaml:"budgets,omitempty"`
	Oversize string     `yaml:"oversize,omitempty"` // refuse | debt
	Timeout  Duration   `yaml:"timeout,omitempty"`
	Ramp     []RampStep `yaml:"ramp,omitempty"`
	// SpreadUsers places the buckets of limits whose scope names user by tenant and user, not by tenant
	// alone, so that a tenant of millions of users does not sit on one node.
	SpreadUsers bool `yaml:"spread_users,omitempty"`
	// Cached says what answers cost that the cache gave: free (as ""), or metered as if the model had answered.
	Cached string `yaml:"cached,omitempty"`
}

// RampStep scales a plan's limits for tenants that are at least After old.
type RampStep struct {
	After  Duration `yaml:"after"`
	Factor Factor   `yaml:"factor"`
}

// Limit is one limit as written; see Policy.Index for what it becomes.
type Limit struct {
	Name        string   `yaml:"name"`
	Scope       string   `yaml:"scope"`
	Unit        string   `yaml:"unit"`
	Algorithm   string   `yaml:"algorithm,omitempty"`
	Rate        Scalar   `yaml:"rate,omitempty"`  // COUNT/PERIOD; dollars for usd
	Burst       Scalar   `yaml:"burst,omitempty"` // units; dollars for usd; absent: the rate's count
	Max         int64    `yaml:"max,omitempty"`   // concurrency
	Unavailable string   `yaml:"unavailable,omitempty"`
	Shadow      bool     `yaml:"shadow,omitempty"`
	Wait        Duration `yaml:"wait,omitempty"`
}

// Tenant is a paying organisation.
type Tenant struct {
	Name       string     `yaml:"name"`
	Plan       string     `yaml:"plan"`
	Class      string     `yaml:"class,omitempty"`
	Since      Date       `yaml:"since,omitempty"`
	Standing   *Factor    `yaml:"standing,omitempty"`
	Suspended  bool       `yaml:"suspended,omitempty"`
	ContentLog ContentLog `yaml:"content_log,omitempty"`
}

// ContentLog says whether prompts and answers of a tenant are kept, and how.
type ContentLog struct {
	Mode      string   `yaml:"mode,omitempty"`      // off | errors | sample | all
	Sample    *Factor  `yaml:"sample,omitempty"`    // share of the requests
	Retention Duration `yaml:"retention,omitempty"` // default 30d
	Redact    []string `yaml:"redact,omitempty"`    // email, phone, card, or a regular expression
	Path      string   `yaml:"path,omitempty"`      // folder; default content/ of the data folder
}

// Key is an API key, known by its hash.
type Key struct {
	ID         string   `yaml:"id"`
	Tenant     string   `yaml:"tenant"`
	Hash       string   `yaml:"hash"` // sha256:HEX of the whole key
	Name       string   `yaml:"name,omitempty"`
	User       string   `yaml:"user,omitempty"` // all its requests are this user's
	Class      string   `yaml:"class,omitempty"`
	Expires    Date     `yaml:"expires,omitempty"`
	Revoked    bool     `yaml:"revoked,omitempty"`
	Models     []string `yaml:"models,omitempty"`   // absent: all
	Routes     []string `yaml:"routes,omitempty"`   // absent: all
	Surfaces   []string `yaml:"surfaces,omitempty"` // those a client may name; "*": any
	AssertUser bool     `yaml:"assert_user,omitempty"`
}

// Global is what applies to everybody.
type Global struct {
	Limits  []Limit  `yaml:"limits,omitempty"`
	Budgets []Budget `yaml:"budgets,omitempty"`
}

// Notify says whom to tell of budgets that pass a threshold and of sudden spending.
type Notify struct {
	Webhook  string `yaml:"webhook,omitempty"`   // a URL that takes JSON by POST
	TokenEnv string `yaml:"token_env,omitempty"` // the environment variable with its bearer token
}
