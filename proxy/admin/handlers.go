package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// below is a pattern of the API as http.ServeMux wants it.
func below(pattern string) string { return strings.Replace(pattern, " ", " /admin/v1/", 1) }

// gate sends what matches a route of api there, and all else through unmatched.
func gate(api *http.ServeMux, unmatched http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pattern := api.Handler(r); pattern == "" {
			unmatched.ServeHTTP(w, r)
			return
		}
		api.ServeHTTP(w, r)
	})
}

// unsupported answers for functions that this node does not have.
func unsupported(w http.ResponseWriter) {
	fail(w, Errorf(Unsupported, "this node has no such function"))
}

// get shows what needs nothing.
func get[T any](f func() T) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, f()) })
}

// one shows a thing.
func one[T any](f func(context.Context) (T, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f == nil {
			unsupported(w)
			return
		}
		v, err := f(r.Context())
		if err != nil {
			fail(w, err)
			return
		}
		writeJSON(w, http.StatusOK, v)
	})
}

// list shows things: none is [], not null.
func list[T any](f func(context.Context) ([]T, error)) http.Handler {
	if f == nil {
		return one[[]T](nil)
	}
	return one(func(ctx context.Context) ([]T, error) {
		v, err := f(ctx)
		return append([]T{}, v...), err
	})
}

// change reads what is wanted, does it, and shows what came of it.
func change[In, Out any](f func(context.Context, Actor, In) (Out, error), read func(http.ResponseWriter, *http.Request) (In, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f == nil {
			unsupported(w)
			return
		}
		in, err := read(w, r)
		if err != nil {
			fail(w, coded(Invalid, err))
			return
		}
		out, err := f(r.Context(), actorOf(r), in)
		if err != nil {
			fail(w, err)
			return
		}
		writeJSON(w, http.StatusOK, out)
	})
}

// decode reads a JSON body of so many bytes at most strictly; an empty one leaves v as it is.
func decode(w http.ResponseWriter, r *http.Request, v any, most int64) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, most))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("the body can't be read: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("the body goes on after its JSON")
	}
	return nil
}

func pathValue(name string) func(http.ResponseWriter, *http.Request) (string, error) {
	return func(_ http.ResponseWriter, r *http.Request) (string, error) { return r.PathValue(name), nil }
}

// flag reads a parameter that is true, false or absent.
func flag(r *http.Request, name string) (bool, error) {
	switch v := r.URL.Query().Get(name); v {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	default:
		return false, Errorf(Invalid, "%s=%q is neither true nor false", name, v)
	}
}

// number reads a parameter that is a whole number; nil where it is absent.
func number(r *http.Request, name string) (*uint64, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return nil, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return nil, Errorf(Invalid, "%s=%q is not a whole number", name, s)
	}
	return &n, nil
}

// span reads a length of time that must be above least and at most most.
func span(field, s string, least, most time.Duration) (time.Duration, error) {
	d, err := ParseSpan(s)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", field, err)
	}
	if d < least || d > most {
		return 0, fmt.Errorf("%s: %s is not between %s and %s", field, s, least, most)
	}
	return d, nil
}

// ParseSpan reads a length of time: as Go writes it, or whole days such as 30d.
func ParseSpan(s string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(s, "d"); ok {
		if n, err := strconv.Atoi(days); err == nil && n >= 0 && n <= 100_000 {
			return time.Duration(n) * 24 * time.Hour, nil
		}
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("%q is not a length of time: write 15m, 24h or 30d", s)
	}
	return d, nil
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

func (c Config) getLimits(w http.ResponseWriter, r *http.Request) {
	levels, err := c.Levels(r.Context(), r.PathValue("tenant"))
	if err != nil {
		fail(w, err)
		return
	}
	writeJSON(w, http.StatusOK, append([]Level{}, levels...)) // none is [], not null
}

// maxAskedTokens bounds what is asked about: no model holds as much.
const maxAskedTokens = 1_000_000_000_000

func (c Config) postExplain(w http.ResponseWriter, r *http.Request) {
	var q ExplainRequest
	err := decode(w, r, &q, maxAsk)
	if err == nil && (q.Input < 0 || q.Output < 0 || q.Input > maxAskedTokens || q.Output > maxAskedTokens) {
		err = fmt.Errorf("input_tokens and output_tokens must not be negative, nor above %d", int64(maxAskedTokens))
	}
	if err != nil {
		fail(w, coded(Invalid, err))
		return
	}
	e, err := c.Explain(r.Context(), q)
	if err != nil {
		fail(w, coded(NotFound, err))
		return
	}
	writeJSON(w, http.StatusOK, e)
}

// revisionHeader says which revision a policy is.
const revisionHeader = "X-Headgate-Policy-Revision"

func (c Config) getPolicy(w http.ResponseWriter, r *http.Request) {
	if c.PolicyText == nil {
		unsupported(w)
		return
	}
	revision, err := number(r, "revision")
	if err != nil {
		fail(w, err)
		return
	}
	if revision == nil {
		revision = new(uint64)
	}
	p, err := c.PolicyText(r.Context(), *revision)
	if err != nil {
		fail(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/yaml")
	if p.Revision != 0 {
		w.Header().Set(revisionHeader, strconv.FormatUint(p.Revision, 10))
	}
	_, _ = w.Write(p.Text) // the client may be gone
}

func readPolicyChange(w http.ResponseWriter, r *http.Request) (p PolicyChange, err error) {
	if p.DryRun, err = flag(r, "dry_run"); err != nil {
		return p, err
	}
	if p.Expected, err = number(r, "expected"); err != nil {
		return p, err
	}
	p.Text, err = io.ReadAll(http.MaxBytesReader(w, r.Body, maxPolicy))
	return p, err
}

func readRollback(w http.ResponseWriter, r *http.Request) (b Rollback, err error) {
	err = decode(w, r, &b, maxAsk)
	if err == nil && b.Revision == 0 {
		err = errors.New("revision: name the one to go back to; headgate policy revisions lists them")
	}
	return b, err
}

func readNewKey(w http.ResponseWriter, r *http.Request) (k NewKey, err error) {
	err = decode(w, r, &k, maxAsk)
	if err == nil && k.Tenant == "" {
		err = errors.New("tenant: name the one that the key belongs to")
	}
	return k, err
}

// defaultOverlap is how long a rotated key is good if the rotation does not say.
const defaultOverlap = 24 * time.Hour

func readRotation(w http.ResponseWriter, r *http.Request) (KeyRotation, error) {
	k := KeyRotation{ID: r.PathValue("id"), Overlap: defaultOverlap}
	var ask struct {
		Overlap string `json:"overlap"`
	}
	err := decode(w, r, &ask, maxAsk)
	if err == nil && ask.Overlap != "" {
		k.Overlap, err = span("overlap", ask.Overlap, 0, MaxOverlap)
	}
	return k, err
}

// kinds are what kill switches are for.
func kinds() []string { return []string{"global", "model", "tenant", "key"} }

// target reads which kill switch a path means.
func target(r *http.Request) (k KillSwitch, err error) {
	k.Kind, k.Name = r.PathValue("kind"), r.PathValue("name")
	switch {
	case !slices.Contains(kinds(), k.Kind):
		err = fmt.Errorf("kind %q is not one of %s", k.Kind, strings.Join(kinds(), ", "))
	case k.Kind == "global" && k.Name != "":
		err = errors.New("the global kill switch has no name")
	case k.Kind != "global" && k.Name == "":
		err = fmt.Errorf("name the %s", k.Kind)
	}
	return k, err
}

func readKill(on bool) func(http.ResponseWriter, *http.Request) (KillSwitch, error) {
	return func(w http.ResponseWriter, r *http.Request) (KillSwitch, error) {
		k, err := target(r)
		if err != nil {
			return k, err
		}
		var ask struct {
			Reason string `json:"reason"`
		}
		err = decode(w, r, &ask, maxAsk)
		k.On, k.Reason = on, ask.Reason
		return k, err
	}
}

func readNodeKill(on bool) func(http.ResponseWriter, *http.Request) (KillSwitch, error) {
	return func(w http.ResponseWriter, r *http.Request) (KillSwitch, error) {
		k, err := target(r)
		if err != nil || !on {
			return k, err
		}
		var ask struct {
			Reason string `json:"reason"`
			For    string `json:"for"`
		}
		if err := decode(w, r, &ask, maxAsk); err != nil {
			return k, err
		}
		if len(k.Name) > maxName || len(ask.Reason) > maxReason || strings.ContainsFunc(ask.Reason, unicode.IsControl) { // the cluster's are the ledger's to bound
			return k, fmt.Errorf("a kill switch's name has at most %d bytes, and its reason %d in one line", maxName, maxReason)
		}
		k.On, k.Reason = on, ask.Reason
		k.For, err = span("for", ask.For, time.Second, MaxNodeFor)
		return k, err
	}
}

// maxRungFor bounds a rung's time; one without an end has none.
const maxRungFor = 365 * 24 * time.Hour

// readDrain reads what is asked of a backend as of a rung.
func readDrain(w http.ResponseWriter, r *http.Request) (DrainChange, error) {
	c, err := readRung(w, r)
	return DrainChange{r.PathValue("backend"), c.On, c.For, c.Reason}, err
}

func readRung(w http.ResponseWriter, r *http.Request) (RungChange, error) {
	c := RungChange{Rung: r.PathValue("rung")}
	var ask struct {
		On     *bool  `json:"on"`
		For    string `json:"for"`
		Reason string `json:"reason"`
	}
	err := decode(w, r, &ask, maxAsk)
	switch {
	case err != nil:
		return c, err
	case ask.On == nil:
		return c, errors.New("on: say true or false")
	case ask.For != "" && !*ask.On:
		return c, errors.New("for: only what is set on has an end")
	case ask.For != "":
		c.For, err = span("for", ask.For, time.Second, maxRungFor)
	}
	c.On, c.Reason = *ask.On, ask.Reason
	return c, err
}

func readOverride(w http.ResponseWriter, r *http.Request) (c OverrideChange, err error) {
	var ask struct {
		Unavailable string `json:"unavailable"`
		For         string `json:"for"`
	}
	if err := decode(w, r, &ask, maxAsk); err != nil {
		return c, err
	}
	if !slices.Contains([]string{"allow", "deny", "local"}, ask.Unavailable) {
		return c, fmt.Errorf("unavailable: %q is not one of allow, deny, local", ask.Unavailable)
	}
	c.Unavailable = ask.Unavailable
	c.For, err = span("for", ask.For, time.Second, MaxNodeFor)
	return c, err
}

func noOverride(http.ResponseWriter, *http.Request) (OverrideChange, error) {
	return OverrideChange{}, nil
}

func readNewToken(w http.ResponseWriter, r *http.Request) (t NewToken, err error) {
	err = decode(w, r, &t, maxAsk)
	switch {
	case err != nil:
	case t.Name == "" || t.Name == rootName:
		err = fmt.Errorf("name: name the token; %q is taken", rootName)
	case strings.ContainsFunc(t.Name, notOfAName): // such as "node gw-1", which the audit log calls a node
		err = fmt.Errorf("name: %q has more than letters, digits and . _ : / @ -", t.Name)
	case t.Role == 0:
		err = errors.New("role: say read, operate or admin")
	}
	return t, err
}

// notOfAName is what names have none of, as in a policy.
func notOfAName(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._:/@-", r)
}

// defaultAudit is how many entries an answer has if the call does not say.
const defaultAudit = 100

func (c Config) getAudit(w http.ResponseWriter, r *http.Request) {
	if c.Audit == nil {
		unsupported(w)
		return
	}
	q := r.URL.Query()
	f := AuditFilter{Limit: defaultAudit, Object: q.Get("object"), Actor: q.Get("actor")}
	limit, err := number(r, "limit")
	switch {
	case err != nil:
	case limit != nil && (*limit < 1 || *limit > MaxAudit):
		err = fmt.Errorf("limit: %d is not between 1 and %d", *limit, MaxAudit)
	case limit != nil:
		f.Limit = int(*limit)
	}
	if s := q.Get("since"); s != "" && err == nil {
		f.Since, err = ParseTime(s)
	}
	if err != nil {
		fail(w, coded(Invalid, err))
		return
	}
	list(func(ctx context.Context) ([]AuditEntry, error) { return c.Audit(ctx, f) }).ServeHTTP(w, r)
}

// begun is a body of which something may have been written.
type begun struct {
	http.ResponseWriter
	wrote bool
}

func (b *begun) Write(p []byte) (int, error) {
	b.wrote = true
	return b.ResponseWriter.Write(p)
}

// getBackup streams; an error after the first byte breaks the connection, so that what was
// received is not taken for a whole.
func (c Config) getBackup(w http.ResponseWriter, r *http.Request) {
	if c.Backup == nil {
		unsupported(w)
		return
	}
	stale, err := flag(r, "stale")
	if err != nil {
		fail(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Disposition", `attachment; filename="headgate-`+time.Now().UTC().Format("20060102T150405Z")+`.backup"`)
	b := &begun{ResponseWriter: w}
	if err := c.Backup(r.Context(), actorOf(r), b, stale); err != nil {
		if b.wrote {
			panic(http.ErrAbortHandler)
		}
		w.Header().Del("Content-Disposition")
		fail(w, err)
	}
}

func (c Config) postRestore(w http.ResponseWriter, r *http.Request) {
	if c.Restore == nil {
		unsupported(w)
		return
	}
	force, err := flag(r, "force")
	if err != nil {
		fail(w, err)
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(restoreTime)) // without it the server's own holds
	done, err := c.Restore(r.Context(), actorOf(r), http.MaxBytesReader(w, r.Body, maxBackup), force)
	if err != nil {
		fail(w, err)
		return
	}
	writeJSON(w, http.StatusOK, done)
}

// getContent exports the content log as JSON lines.
func (c Config) getContent(w http.ResponseWriter, r *http.Request) {
	f, err := filter(r)
	if err != nil {
		fail(w, coded(Invalid, err))
		return
	}
	w.Header().Set("Content-Type", "application/jsonl")
	b := &begun{ResponseWriter: w}
	if err := c.ExportContent(actorOf(r), b, f); err != nil {
		if b.wrote {
			panic(http.ErrAbortHandler) // only a broken connection says so
		}
		fail(w, err)
	}
}

// deleteContent erases what the filter names, also what waits to be written.
func (c Config) deleteContent(w http.ResponseWriter, r *http.Request) {
	f, err := filter(r)
	if err == nil && f.Tenant == "" && f.User == "" {
		err = errors.New("name a tenant or a user to erase")
	}
	if err != nil {
		fail(w, coded(Invalid, err))
		return
	}
	n, err := c.EraseContent(actorOf(r), f)
	if err != nil {
		fail(w, err)
		return
	}
	writeJSON(w, http.StatusOK, Erased{n})
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
