package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

func (c Config) getBudgets(w http.ResponseWriter, r *http.Request) {
	if c.Budgets == nil {
		unsupported(w)
		return
	}
	list, err := c.Budgets(r.Context(), r.PathValue("tenant"))
	if err != nil {
		fail(w, err)
		return
	}
	writeJSON(w, http.StatusOK, append([]Budget{}, list...)) // none is [], not null
}

func readAdjustment(w http.ResponseWriter, r *http.Request) (BudgetAdjustment, error) {
	a := BudgetAdjustment{Tenant: r.PathValue("tenant")}
	var ask struct {
		Budget  string `json:"budget"`
		Subject string `json:"subject"`
		At      string `json:"at"`
		Amount  USD    `json:"amount_usd"`
		Reason  string `json:"reason"`

		NewSubject bool `json:"new_subject"`
	}
	err := decode(w, r, &ask, maxAsk)
	switch {
	case err != nil:
	case ask.Budget == "":
		err = errors.New("budget: name the one to correct; headgate budgets show lists them")
	case len(ask.Budget) > maxName || len(ask.Subject) > MaxSubject:
		err = fmt.Errorf("budget has at most %d bytes and subject %d", maxName, MaxSubject)
	case len(ask.At) > maxName:
		err = fmt.Errorf("at has at most %d bytes", maxName)
	case ask.Amount == 0 || ask.Amount == math.MinInt64:
		err = errors.New(`amount_usd: say how much, as in "12.50"; a charge is above zero, a credit below`)
	default:
		err = validReason(ask.Reason)
	}
	a.Budget, a.Subject, a.At, a.Amount, a.Reason, a.NewSubject = ask.Budget, ask.Subject, ask.At, ask.Amount, ask.Reason, ask.NewSubject
	return a, err
}

func readRelease(w http.ResponseWriter, r *http.Request) (b BudgetRelease, err error) {
	var ask struct {
		Node        string `json:"node"`
		Incarnation string `json:"incarnation"`
		Reason      string `json:"reason"`
	}
	err = decode(w, r, &ask, maxAsk)
	switch {
	case err != nil:
	case ask.Node == "" || len(ask.Node) > maxName:
		err = fmt.Errorf("node: name the one that does not come back, in at most %d bytes", maxName)
	default:
		if _, err = ParseIncarnation(ask.Incarnation); err == nil {
			err = validReason(ask.Reason)
		}
	}
	return BudgetRelease(ask), err
}

// ParseIncarnation reads a process's number as holders are listed with it: up to 16
// hexadecimal digits, not all of them 0.
func ParseIncarnation(s string) (uint64, error) {
	n, err := strconv.ParseUint(s, 16, 64)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("incarnation: %q is not one; headgate budgets holders lists them", s)
	}
	return n, nil
}

// validReason: whoever changes what others pay says why.
func validReason(reason string) error {
	if strings.TrimSpace(reason) == "" || len(reason) > maxReason || strings.ContainsFunc(reason, unicode.IsControl) {
		return fmt.Errorf("reason: say why, in one line of at most %d bytes; it stands in the audit log", maxReason)
	}
	return nil
}

func (c Config) now() time.Time {
	if c.Now == nil {
		return time.Now()
	}
	return c.Now()
}

// missingTrailer comes after an export: a JSON list of Missing, where some are. Exports
// that should be whole have none: without partial=true they fail, or break off.
const missingTrailer = "X-Headgate-Missing"

// getUsage streams an export.
func (c Config) getUsage(w http.ResponseWriter, r *http.Request) {
	if c.ExportUsage == nil {
		unsupported(w)
		return
	}
	q, err := c.readUsageQuery(r, c.now())
	if err != nil {
		fail(w, coded(Invalid, err))
		return
	}
	kind := "text/csv; charset=utf-8; header=present"
	if q.Format == UsageJSON {
		kind = "application/jsonl"
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Trailer", missingTrailer)
	b := &begun{ResponseWriter: w}
	missing, err := c.ExportUsage(r.Context(), b, q)
	if err == nil && len(missing) > 0 && !q.Partial {
		err = incomplete(missing)
	}
	switch {
	case err != nil && b.wrote:
		panic(http.ErrAbortHandler) // only a broken connection says so
	case err != nil:
		w.Header().Del("Trailer")
		fail(w, err)
	case len(missing) > 0:
		text, err := json.Marshal(missing)
		if err != nil { // of strings: it can't be
			panic(http.ErrAbortHandler)
		}
		w.Header().Set(missingTrailer, string(text))
	}
}

// incomplete is what some nodes left out.
func incomplete(missing []Missing) error {
	var out []string
	for _, m := range missing {
		out = append(out, m.Node+": "+m.Error)
	}
	return Errorf(Incomplete, "not every node answered (%s); partial=true goes on without them", strings.Join(out, "; "))
}

// ReadMissing says which nodes an export lacks, from the trailers of an answer that was
// read to its end.
func ReadMissing(trailer http.Header) ([]Missing, error) {
	text := trailer.Get(missingTrailer)
	if text == "" {
		return nil, nil
	}
	var m []Missing
	if err := json.Unmarshal([]byte(text), &m); err != nil {
		return nil, fmt.Errorf("%s can't be read: %w", missingTrailer, err)
	}
	return m, nil
}

func (c Config) readUsageQuery(r *http.Request, now time.Time) (UsageQuery, error) {
	q, err := ParseUsageQuery(r.URL.Query(), c.Zone, now)
	if err == nil {
		q.Partial, err = flag(r, "partial")
	}
	return q, err
}

// ParseUsageQuery reads the parameters of an export but for partial: by, from, until,
// time_zone, tenant, key, user, model and format. zone finds time zones, nil as in Config.
func ParseUsageQuery(v url.Values, zone func(name string) (*time.Location, error), now time.Time) (q UsageQuery, err error) {
	q = UsageQuery{Tenant: v.Get("tenant"), Key: v.Get("key"), User: v.Get("user"), Model: v.Get("model"), Format: UsageFormat(v.Get("format"))}
	switch q.Format {
	case "":
		q.Format = UsageCSV
	case UsageCSV, UsageJSON:
	default:
		return q, fmt.Errorf("format: %q is neither csv nor json", q.Format)
	}
	if q.By, err = ParseBy(v.Get("by")); err != nil {
		return q, err
	}
	q.Location, q.From, q.Until, err = parseRange(v, zone, now)
	return q, err
}

// parseRange reads time_zone, from and until.
func parseRange(v url.Values, zone func(string) (*time.Location, error), now time.Time) (loc *time.Location, from, until time.Time, err error) {
	if loc, err = parseZone(v.Get("time_zone"), zone); err != nil {
		return nil, from, until, err
	}
	for name, t := range map[string]*time.Time{"from": &from, "until": &until} {
		if s := v.Get(name); s != "" {
			if *t, err = ParseWhen(s, loc, now); err != nil {
				return nil, from, until, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	if !from.IsZero() && !until.IsZero() && !from.Before(until) {
		return nil, from, until, fmt.Errorf("from: %s is not before until, %s", from.Format(time.RFC3339), until.Format(time.RFC3339))
	}
	return loc, from, until, nil
}

// parseZone finds the zone with a name; "" is UTC. The node's own ("Local") is none: it is
// another on each node.
func parseZone(name string, zone func(string) (*time.Location, error)) (loc *time.Location, err error) {
	switch {
	case name == "":
		return time.UTC, nil
	case name == "Local":
		err = errors.New("the nodes may be in several")
	case zone != nil:
		loc, err = zone(name)
	default:
		loc, err = time.LoadLocation(name)
	}
	if err != nil {
		return nil, fmt.Errorf("time_zone: %q is not one; write a name such as Europe/Berlin: %w", name, err)
	}
	return loc, nil
}

// ParseWhen reads a month (its first moment in the zone), a day, a moment, or how long
// before now, such as 7d.
func ParseWhen(s string, zone *time.Location, now time.Time) (time.Time, error) {
	for _, form := range [...]string{"2006-01", time.DateOnly} {
		if t, err := time.ParseInLocation(form, s, time.UTC); err == nil {
			return startOfDay(t, zone), nil
		}
	}
	if t, err := time.Parse(time.RFC3339, s); err == nil {
		return t, nil
	}
	if d, err := ParseSpan(s); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	return time.Time{}, fmt.Errorf("%q is not a time: write 2026-01, 2026-01-15, 2026-01-15T12:00:00Z, or how long ago, such as 7d", s)
}

// startOfDay is the first moment of a day in a zone: the first of two midnights where the
// clocks go back over one, and what follows the gap where they leave it out. day is its
// midnight in UTC.
func startOfDay(day time.Time, zone *time.Location) time.Time {
	y, m, d := day.Date()
	t := time.Date(y, m, d, 0, 0, 0, 0, zone)
	if local := t.Format(time.DateOnly); local != day.Format(time.DateOnly) {
		if _, end := t.ZoneBounds(); local < day.Format(time.DateOnly) { // t is before the gap
			return end
		}
		return t
	}
	_, before := t.Add(-24 * time.Hour).Zone()
	if first := time.Date(y, m, d, 0, 0, 0, 0, time.FixedZone("", before)).In(zone); first.Before(t) && first.Day() == d {
		return first
	}
	return t
}

// ParseBy reads what usage is summed by, such as tenant,day.
func ParseBy(s string) ([]string, error) {
	if s == "" {
		return nil, nil
	}
	by := strings.Split(s, ",")
	for i, name := range by {
		if !slices.Contains(UsageBy(), name) {
			return nil, fmt.Errorf("by: %q is not one of %s", name, strings.Join(UsageBy(), ", "))
		}
		if slices.Contains(by[:i], name) {
			return nil, fmt.Errorf("by: %s stands there twice", name)
		}
	}
	return by, nil
}

// defaultTop is how many rows an answer has if the call does not say, and defaultLast how
// far back it looks.
const (
	defaultTop  = 10
	defaultLast = time.Hour
)

func (c Config) getTop(w http.ResponseWriter, r *http.Request) {
	if c.TopUsage == nil {
		unsupported(w)
		return
	}
	q, err := c.readTop(r, c.now())
	if err != nil {
		fail(w, coded(Invalid, err))
		return
	}
	one(func(ctx context.Context) (UsageRows, error) {
		rows, err := c.TopUsage(ctx, q)
		rows.Rows, rows.Missing = append([]UsageRow{}, rows.Rows...), append([]Missing{}, rows.Missing...)
		return rows, err
	}).ServeHTTP(w, r)
}

func (c Config) readTop(r *http.Request, now time.Time) (q UsageTop, err error) {
	q = UsageTop{Tenant: r.URL.Query().Get("tenant"), Most: defaultTop}
	if q.By, err = ParseBy(r.URL.Query().Get("by")); err != nil {
		return q, err
	}
	if len(q.By) == 0 {
		q.By = []string{"tenant"}
	}
	most, err := number(r, "n")
	switch {
	case err != nil:
		return q, err
	case most != nil && (*most < 1 || *most > MaxTop):
		return q, fmt.Errorf("n: %d is not between 1 and %d", *most, MaxTop)
	case most != nil:
		q.Most = int(*most)
	}
	if q.Location, q.From, q.Until, err = parseRange(r.URL.Query(), c.Zone, now); err == nil && q.From.IsZero() {
		q.From = now.Add(-defaultLast)
	}
	return q, err
}
