// Package admin is the operator's side of a node: health, metrics and the admin API, on a
// listener of its own.
//
// Health and metrics are open to whoever reaches the listener; everything below
// /admin/v1 needs the bearer token, compared in constant time. Answers are JSON; errors
// have the shape {"error": {"message": …}}, a policy with all its problems; for paths and
// methods that do not exist net/http answers in its own words.
//
// It holds no state and decides nothing: what it shows and does comes through Config. It
// leaves out the console and whatever needs more than one node.
package admin

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// maxBody bounds what the admin API takes, in bytes: a large policy.
const maxBody = 64 << 20

// Config is what the admin API needs of the node. All functions must be safe for
// concurrent use.
type Config struct {
	Token    string // "" refuses everything below /admin/v1
	Gatherer prometheus.Gatherer
	Ready    func() error // why the node should get no traffic; nil if it should
	Status   func() Status
	Policy   func() []byte // as applied
	// Apply takes a policy over, or with dry only says what it would change. A wrong
	// policy changes nothing and gives an error that marshals its problems.
	Apply   func(text []byte, dry bool) (Applied, error)
	Keys    func() []Key
	Tenants func() []Tenant
	Levels  func(tenant string) []Level // nil: no such tenant
	Explain func(ExplainRequest) (any, error)

	ExportContent func(io.Writer, ContentFilter) error
	EraseContent  func(ContentFilter) (int, error)
}

// ContentFilter says which kept prompts and answers are meant; empty fields mean all.
type ContentFilter struct {
	Tenant, User string
	Since, Until time.Time // from Since on, before Until
}

// Status is a node at a glance.
type Status struct {
	Node           string    `json:"node"`
	Version        string    `json:"version"`
	UptimeSeconds  int64     `json:"uptime_seconds"`
	Ready          bool      `json:"ready"`
	NotReady       string    `json:"not_ready,omitempty"`
	Listen         string    `json:"listen"`
	ClusterListen  string    `json:"cluster_listen"`
	PolicyRevision uint64    `json:"policy_revision"`
	PolicySource   string    `json:"policy_source"`
	Tenants        int       `json:"tenants"`
	Keys           int       `json:"keys"`
	Models         []string  `json:"models"`
	Buckets        int       `json:"buckets"`
	Backends       []Backend `json:"backends"`
}

// Backend is one endpoint.
type Backend struct {
	Name      string `json:"name"`
	Endpoint  string `json:"endpoint"`
	URL       string `json:"url"`
	State     string `json:"state"`
	Draining  bool   `json:"draining,omitempty"`
	InFlight  int    `json:"in_flight"`
	Slots     int    `json:"slots"` // 0: unbounded
	LastError string `json:"last_error,omitempty"`
}

// Applied is what a policy changed.
type Applied struct {
	Revision uint64   `json:"revision"`
	DryRun   bool     `json:"dry_run,omitempty"`
	Changes  []string `json:"changes"`
}

// Key is a key without its secret.
type Key struct {
	ID       string `json:"id"`
	Tenant   string `json:"tenant"`
	Name     string `json:"name,omitempty"`
	Status   string `json:"status"` // active | revoked | expired | suspended
	Expires  string `json:"expires,omitempty"`
	LastUsed string `json:"last_used,omitempty"` // since the node started
}

// Tenant is one tenant.
type Tenant struct {
	Name      string `json:"name"`
	Plan      string `json:"plan"`
	Keys      int    `json:"keys"`
	Suspended bool   `json:"suspended,omitempty"`
}

// Level is one bucket. Amounts are in the unit; nano-dollars for usd.
type Level struct {
	Limit    string `json:"limit"`
	Scope    string `json:"scope"`
	Unit     string `json:"unit"`
	Subject  string `json:"subject,omitempty"`
	Level    int64  `json:"level"`
	Capacity int64  `json:"capacity"`
	ResetMS  int64  `json:"reset_ms"` // until it is full; -1: not by waiting
}

// ExplainRequest asks whether a request would be admitted now.
type ExplainRequest struct {
	Tenant string `json:"tenant"`
	Key    string `json:"key"` // the key's id; "" takes any of the tenant's
	User   string `json:"user"`
	Model  string `json:"model"`
	Input  int64  `json:"input_tokens"`
	Output int64  `json:"output_tokens"`
}

// Handler serves everything.
func Handler(c Config) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"status": "alive"})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := c.Ready(); err != nil {
			writeError(w, http.StatusServiceUnavailable, err)
			return
		}
		writeJSON(w, http.StatusOK, map[string]string{"status": "ready"})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(c.Gatherer, promhttp.HandlerOpts{}))

	api := http.NewServeMux()
	api.HandleFunc("GET /admin/v1/status", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, c.Status()) })
	api.HandleFunc("GET /admin/v1/tenants", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, c.Tenants()) })
	api.HandleFunc("GET /admin/v1/keys", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, c.Keys()) })
	api.HandleFunc("GET /admin/v1/policy", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/yaml")
		_, _ = w.Write(c.Policy()) // the client may be gone
	})
	api.HandleFunc("PUT /admin/v1/policy", c.putPolicy)
	api.HandleFunc("GET /admin/v1/limits/{tenant}", func(w http.ResponseWriter, r *http.Request) {
		levels := c.Levels(r.PathValue("tenant"))
		if levels == nil {
			writeError(w, http.StatusNotFound, errors.New("there is no such tenant; GET /admin/v1/tenants lists them"))
			return
		}
		writeJSON(w, http.StatusOK, levels)
	})
	api.HandleFunc("POST /admin/v1/explain", c.postExplain)
	api.HandleFunc("GET /admin/v1/content", c.getContent)
	api.HandleFunc("DELETE /admin/v1/content", c.deleteContent)
	mux.Handle("/admin/v1/", c.authorized(api))
	return mux
}

// authorized lets only the bearer of the token through. Hashing first makes the
// comparison's time independent of the length, too.
func (c Config) authorized(next http.Handler) http.Handler {
	want := sha256.Sum256([]byte(c.Token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		got := sha256.Sum256([]byte(token))
		if !ok || c.Token == "" || subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			writeError(w, http.StatusUnauthorized, errors.New("the admin token is missing or wrong; send it as `Authorization: Bearer TOKEN` (HEADGATE_ADMIN_TOKEN)"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (c Config) putPolicy(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		writeError(w, http.StatusRequestEntityTooLarge, err)
		return
	}
	applied, err := c.Apply(text, r.URL.Query().Get("dry_run") == "true")
	if err != nil {
		writeError(w, http.StatusBadRequest, err)
		return
	}
	writeJSON(w, http.StatusOK, applied)
}

func (c Config) postExplain(w http.ResponseWriter, r *http.Request) {
	var q ExplainRequest
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16))
	d.DisallowUnknownFields()
	if err := d.Decode(&q); err != nil {
		writeError(w, http.StatusBadRequest, err)
		return
	}
	if q.Input < 0 || q.Output < 0 {
		writeError(w, http.StatusBadRequest, errors.New("input_tokens and output_tokens must not be negative"))
		return
	}
	e, err := c.Explain(q)
	if err != nil {
		writeError(w, http.StatusNotFound, err)
		return
	}
	writeJSON(w, http.StatusOK, e)
}

// getContent exports the content log as JSON lines.
func (c Config) getContent(w http.ResponseWriter, r *http.Request) {
	f, err := filter(r)
	if err != nil {
		writeError(w, http.StatusBadRequest, err)
		return
	}
	w.Header().Set("Content-Type", "application/jsonl")
	if err := c.ExportContent(w, f); err != nil {
		panic(http.ErrAbortHandler) // part of it is out: only a broken connection says so
	}
}

// deleteContent erases what the filter names, also what waits to be written.
func (c Config) deleteContent(w http.ResponseWriter, r *http.Request) {
	f, err := filter(r)
	if err == nil && f.Tenant == "" && f.User == "" {
		err = errors.New("name a tenant or a user to erase")
	}
	if err != nil {
		writeError(w, http.StatusBadRequest, err)
		return
	}
	n, err := c.EraseContent(f)
	if err != nil {
		writeError(w, http.StatusInternalServerError, err)
		return
	}
	writeJSON(w, http.StatusOK, Erased{n})
}

// Erased is how many requests were erased from the content log.
type Erased struct {
	Erased int `json:"erased"`
}

// filter reads tenant, user, since and until of the query.
func filter(r *http.Request) (f ContentFilter, err error) {
	q := r.URL.Query()
	f.Tenant, f.User = q.Get("tenant"), q.Get("user")
	for name, t := range map[string]*time.Time{"since": &f.Since, "until": &f.Until} {
		if s := q.Get(name); s != "" {
			if *t, err = ParseTime(s); err != nil {
				return f, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return f, nil
}

// ParseTime reads a day (midnight UTC) or a moment.
func ParseTime(s string) (time.Time, error) {
	for _, form := range [...]string{time.DateOnly, time.RFC3339} {
		if t, err := time.Parse(form, s); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("%q is not a date: write 2026-01-15 or 2026-01-15T12:00:00Z", s)
}

func writeError(w http.ResponseWriter, status int, err error) {
	writeJSON(w, status, map[string]any{"error": map[string]any{"message": err.Error()}})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	raw, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		status, raw = http.StatusInternalServerError, []byte(`{"error": {"message": "the answer can't be written as JSON"}}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(raw, '\n')) // the client may be gone
}
