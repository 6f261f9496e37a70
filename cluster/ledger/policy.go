package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"headgate/limiter"
)

// Bounds on what a policy may hold.
const (
	maxPolicySize = 64 << 20 // bytes
	maxNesting    = 32       // collections within each other on one line
	maxProblems   = 50       // reported at once
)

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
}

// Backend is a model server, or with a dns:// URL a headless service of many.
type Backend struct {
	Name       string `yaml:"name"`
	URL        string `yaml:"url"`
	Slots      int    `yaml:"slots,omitempty"`       // requests in flight; 0: unbounded
	APIKeyEnv  string `yaml:"api_key_env,omitempty"` // the environment variable that holds its key
	CAFile     string `yaml:"ca_file,omitempty"`
	CertFile   string `yaml:"cert_file,omitempty"`
	KeyFile    string `yaml:"key_file,omitempty"`
	ServerName string `yaml:"server_name,omitempty"`
	HealthPath string `yaml:"health_path,omitempty"`
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
	DefaultOutput int64    `yaml:"default_output_tokens,omitempty"`
	ImageTokens   int64    `yaml:"image_tokens,omitempty"`
	AudioTokens   int64    `yaml:"audio_tokens,omitempty"`
	BytesPerToken Factor   `yaml:"bytes_per_token,omitempty"` // where the learned ratio starts
	Fallback      []string `yaml:"fallback,omitempty"`
}

// Plan is what a tenant has bought.
type Plan struct {
	Name     string     `yaml:"name"`
	Tier     int        `yaml:"tier,omitempty"` // lower tiers are shed first
	Limits   []Limit    `yaml:"limits,omitempty"`
	Budgets  []any      `yaml:"budgets,omitempty"`  // refused until they exist
	Oversize string     `yaml:"oversize,omitempty"` // refuse | debt
	Timeout  Duration   `yaml:"timeout,omitempty"`
	Ramp     []RampStep `yaml:"ramp,omitempty"`
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

// Surface is a named product entry.
type Surface struct {
	Name            string   `yaml:"name"`
	TemplateVersion string   `yaml:"template_version,omitempty"`
	Share           string   `yaml:"share,omitempty"`
	Sensitive       []string `yaml:"sensitive,omitempty"`
	Volatility      string   `yaml:"volatility,omitempty"`
	Exact           any      `yaml:"exact,omitempty"`    // refused until the cache exists
	Semantic        any      `yaml:"semantic,omitempty"` // refused until the cache exists
}

// Global is what applies to everybody.
type Global struct {
	Limits []Limit `yaml:"limits,omitempty"`
}

// Duration is a Go duration, or whole days as in 14d.
type Duration time.Duration

// UnmarshalYAML reads a duration.
func (d *Duration) UnmarshalYAML(text []byte) error {
	s := strings.Trim(strings.TrimSpace(string(text)), `"'`)
	if days, ok := strings.CutSuffix(s, "d"); ok {
		if h, err := time.ParseDuration(days + "h"); err == nil && h >= 0 && h <= limiter.MaxSpan/24 {
			*d = Duration(h * 24)
			return nil
		}
	}
	v, err := time.ParseDuration(s)
	if err != nil || v < 0 {
		return fmt.Errorf("%q is not a duration: write 500ms, 60s, 10m, 6h or 14d", s)
	}
	*d = Duration(v)
	return nil
}

// MarshalYAML is the inverse of UnmarshalYAML.
func (d Duration) MarshalYAML() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// Date is a day (midnight UTC) or a moment (RFC 3339).
type Date time.Time

// UnmarshalYAML reads a date.
func (d *Date) UnmarshalYAML(text []byte) error {
	s := strings.Trim(strings.TrimSpace(string(text)), `"'`)
	for _, form := range [...]string{time.DateOnly, time.RFC3339} {
		if t, err := time.Parse(form, s); err == nil {
			*d = Date(t.UTC())
			return nil
		}
	}
	return fmt.Errorf("%q is not a date: write 2026-01-15 or 2026-01-15T12:00:00Z", s)
}

// MarshalYAML is the inverse of UnmarshalYAML.
func (d Date) MarshalYAML() ([]byte, error) { return []byte(time.Time(d).Format(time.RFC3339)), nil }

// IsZero lets an absent date be left out.
func (d Date) IsZero() bool { return time.Time(d).IsZero() }

// Scalar is a plain value kept as written, so that nothing becomes a float on the way.
type Scalar string

// UnmarshalYAML keeps the text.
func (s *Scalar) UnmarshalYAML(text []byte) error {
	*s = Scalar(strings.Trim(strings.TrimSpace(string(text)), `"'`))
	return nil
}

// MarshalYAML is the inverse of UnmarshalYAML.
func (s Scalar) MarshalYAML() (any, error) { return string(s), nil }

// Problem is one thing wrong with a policy.
type Problem struct {
	Line    int    `json:"line,omitempty"` // 0: unknown
	Path    string `json:"path,omitempty"` // such as plans[pro].limits[org-tokens].rate
	Message string `json:"message"`        // what is wrong and what to write instead
}

// Problems is everything found wrong, maxProblems at most.
type Problems []Problem

func (ps Problems) Error() string {
	var b strings.Builder
	for i, p := range ps {
		if i > 0 {
			b.WriteByte('\n')
		}
		if p.Line > 0 {
			fmt.Fprintf(&b, "line %d: ", p.Line)
		}
		if p.Path != "" {
			b.WriteString(p.Path + ": ")
		}
		b.WriteString(p.Message)
	}
	return b.String()
}

// ParsePolicy reads and validates a policy. Its error is of type Problems.
func ParsePolicy(text []byte) (*Policy, error) {
	if len(text) > maxPolicySize {
		return nil, Problems{{Message: fmt.Sprintf("the policy is larger than %d bytes", maxPolicySize)}}
	}
	if p := guard(text); p != nil {
		return nil, Problems{*p}
	}
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		return nil, Problems{yamlProblem(err)}
	}
	if len(file.Docs) > 1 {
		return nil, Problems{{Message: "a policy is one YAML document; remove the other ones"}}
	}
	var p Policy
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(&p); err != nil && !errors.Is(err, io.EOF) { // an empty policy is checked like any other
		return nil, Problems{yamlProblem(err)}
	}
	if ps := p.check(); len(ps) > 0 {
		out := make(Problems, 0, len(ps))
		for _, f := range ps {
			f.Line = lineOf(file, f.yamlPath)
			out = append(out, f.Problem)
		}
		return nil, out
	}
	return &p, nil
}

// Validate says what is wrong with a policy that was not read by ParsePolicy.
func (p *Policy) Validate() error {
	var out Problems
	for _, f := range p.check() {
		out = append(out, f.Problem)
	}
	if out == nil {
		return nil
	}
	return out
}

// guard refuses what the parser should not even be asked to read: anchors, which can
// make a small text large, and nesting that would cost it its stack.
func guard(text []byte) *Problem {
	for line := range bytes.Lines(text) {
		if bytes.Count(line, []byte("- ")) > maxNesting || bytes.Count(line, []byte("? ")) > maxNesting {
			return &Problem{Message: "a line nests too many collections"}
		}
	}
	if bytes.Count(text, []byte("[")) > maxNesting || bytes.Count(text, []byte("{")) > maxNesting {
		depth := 0
		for _, c := range text { // quoted brackets count too: a policy has no need of them
			switch c {
			case '[', '{':
				depth++
			case ']', '}':
				depth = max(depth-1, 0)
			}
			if depth > maxNesting {
				return &Problem{Message: fmt.Sprintf("collections are nested more than %d deep", maxNesting)}
			}
		}
	}
	for _, t := range lexer.Tokenize(string(text)) {
		if t.Type == token.AnchorType || t.Type == token.AliasType || t.Type == token.MergeKeyType {
			return &Problem{Line: t.Position.Line, Message: "anchors, aliases and merge keys are not allowed; write the values out"}
		}
	}
	return nil
}

// yamlProblem words the decoder's errors, with the nearest known name for an unknown one.
func yamlProblem(err error) Problem {
	var unknown *yaml.UnknownFieldError
	var any yaml.Error
	switch {
	case errors.As(err, &unknown):
		name := unknown.Token.Value
		return Problem{Line: unknown.Token.Position.Line, Message: fmt.Sprintf("unknown field %q; did you mean %q?", name, nearest(name, knownFields(reflect.TypeFor[Policy]())))}
	case errors.As(err, &any) && any.GetToken() != nil:
		return Problem{Line: any.GetToken().Position.Line, Message: any.GetMessage()}
	}
	return Problem{Message: err.Error()}
}

// lineOf finds the line of a YAML path, or of the nearest of its parents that was written.
func lineOf(file *ast.File, path string) int {
	for path != "$" && path != "" {
		if p, err := yaml.PathString(path); err == nil {
			if n, err := p.FilterFile(file); err == nil && n != nil && n.GetToken() != nil {
				return n.GetToken().Position.Line
			}
		}
		path = path[:max(strings.LastIndexAny(path, ".["), 0)]
	}
	return 0
}

// knownFields lists every field name of a type and of those it holds.
func knownFields(t reflect.Type) []string {
	var names []string
	switch t.Kind() {
	case reflect.Slice, reflect.Pointer:
		return knownFields(t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			if tag, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); tag != "" {
				names = append(names, tag)
				names = append(names, knownFields(f.Type)...)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// nearest is the candidate with the smallest edit distance to name.
func nearest(name string, candidates []string) string {
	best, least := "", 1<<30
	name = name[:min(len(name), 64)]
	for _, c := range candidates {
		if d := editDistance(name, c); d < least {
			best, least = c, d
		}
	}
	return best
}

// editDistance is Levenshtein's, for short names.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
