package admin

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestUSD(t *testing.T) {
	for s, want := range map[string]USD{
		"0": 0, "1": 1e9, "250.00": 250e9, "0.000000001": 1, "-12.5": -125e8, "9223372036.854775807": math.MaxInt64, "007": 7e9, "-0": 0,
	} {
		if u, err := ParseUSD(s); err != nil || u != want {
			t.Errorf("%s: %d %v", s, u, err)
		}
	}
	for _, s := range []string{"", "-", ".", ".5", "5.", "1e3", "$5", "1,5", "+1", "--1", "1.0000000001", "9223372036.854775808", "99999999999", " 1", "٣", "NaN"} {
		if u, err := ParseUSD(s); err == nil {
			t.Errorf("%q is %d", s, u)
		}
	}
	for u, want := range map[USD]string{0: "0.00", 5e8: "0.50", 1: "0.000000001", -125e8: "-12.50", math.MinInt64: "-9223372036.854775808"} {
		if u.String() != want {
			t.Errorf("%d: %s, want %s", int64(u), u, want)
		}
	}
}

// TestUSDIsExact: an amount survives its text.
func TestUSDIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		u := USD(rapid.Int64Range(-math.MaxInt64, math.MaxInt64).Draw(t, "nano"))
		raw, err := json.Marshal(u)
		var back USD
		if err != nil || json.Unmarshal(raw, &back) != nil || back != u {
			t.Fatalf("%d became %s and %d", int64(u), raw, int64(back))
		}
	})
}

func FuzzParseUSD(f *testing.F) {
	for _, s := range []string{"1", "-1.5", "0.000000001", "9223372036.854775807", "1e9", ".", "--0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		u, err := ParseUSD(s)
		if err != nil {
			return
		}
		if back, err := ParseUSD(u.String()); err != nil || back != u {
			t.Errorf("%q is %s, and that %s: %v", s, u, back, err)
		}
	})
}

func zone(t *testing.T, name string) *time.Location {
	t.Helper()
	z, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return z
}

func TestParseWhen(t *testing.T) {
	now := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct{ s, zone, want string }{
		{"2026-01-15", "UTC", "2026-01-15T00:00:00Z"},
		{"2026-01", "Europe/Berlin", "2025-12-31T23:00:00Z"},
		{"2026-07", "Europe/Berlin", "2026-06-30T22:00:00Z"},
		{"2026-01-15T10:00:00+02:00", "America/New_York", "2026-01-15T08:00:00Z"},
		{"7d", "Europe/Berlin", "2026-05-25T12:00:00Z"},
		{"90m", "UTC", "2026-06-01T10:30:00Z"},
		{"2018-11-04", "America/Sao_Paulo", "2018-11-04T03:00:00Z"}, // has no midnight
		{"2024-04-26", "Africa/Cairo", "2024-04-25T22:00:00Z"},      // neither
		{"2020-11-01", "America/Havana", "2020-11-01T04:00:00Z"},    // has two
		{"2011-12-30", "Pacific/Apia", "2011-12-30T10:00:00Z"},      // was none
	} {
		got, err := ParseWhen(c.s, zone(t, c.zone), now)
		if err != nil || got.UTC().Format(time.RFC3339) != c.want {
			t.Errorf("%s in %s: %s %v, want %s", c.s, c.zone, got.UTC().Format(time.RFC3339), err, c.want)
		}
	}
	for _, s := range []string{"", "soon", "2026", "2026-13", "2026-02-30", "-7d", "7"} {
		if got, err := ParseWhen(s, time.UTC, now); err == nil {
			t.Errorf("%q is %s", s, got)
		}
	}
}

// TestDaysBegin at a moment whose neighbour before belongs to another day.
func TestDaysBegin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom([]string{"UTC", "Europe/Berlin", "America/Sao_Paulo", "Africa/Cairo", "America/Havana", "Asia/Beirut", "Australia/Lord_Howe", "America/St_Johns"}).Draw(t, "zone")
		z, err := time.LoadLocation(name)
		if err != nil {
			t.Fatal(err)
		}
		day := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).AddDate(0, 0, rapid.IntRange(0, 12_000).Draw(t, "day"))
		start := startOfDay(day, z)
		if start.Day() != day.Day() || start.Add(-time.Nanosecond).Day() == day.Day() && start.Add(-3*time.Hour).Day() == day.Day() {
			t.Errorf("%s in %s begins at %s", day.Format(time.DateOnly), name, start)
		}
	})
}

func TestUsageQuery(t *testing.T) {
	c, last := fakeNode()
	w := ask(Handler(c), http.MethodGet, "/admin/v1/usage?by=key,day&from=2026-01&until=2026-02&tenant=acme&key=k&user=u&model=m&format=json&time_zone=Europe/Berlin&partial=true", "read", "")
	if w.Code != 200 || w.Header().Get("Content-Type") != "application/jsonl" {
		t.Errorf("%d %v", w.Code, w.Header())
	}
	berlin := zone(t, "Europe/Berlin")
	want := UsageQuery{
		From: time.Date(2026, 1, 1, 0, 0, 0, 0, berlin), Until: time.Date(2026, 2, 1, 0, 0, 0, 0, berlin), Tenant: "acme", Key: "k", User: "u", Model: "m",
		By: []string{"key", "day"}, Location: berlin, Format: UsageJSON, Partial: true,
	}
	if got, ok := last.what.(UsageQuery); !ok || got.Location.String() != "Europe/Berlin" {
		t.Errorf("%+v", last.what)
	} else if got.Location = berlin; !got.From.Equal(want.From) || !got.Until.Equal(want.Until) {
		t.Errorf("%s to %s", got.From, got.Until)
	} else if got.From, got.Until = want.From, want.Until; !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
	if w := ask(Handler(c), http.MethodGet, "/admin/v1/usage", "read", ""); !strings.HasPrefix(w.Header().Get("Content-Type"), "text/csv") || w.Body.String() != "tenant\r\n" {
		t.Errorf("%v %s", w.Header(), w.Body)
	}
	if want := (UsageQuery{Location: time.UTC, Format: UsageCSV}); !reflect.DeepEqual(last.what, want) {
		t.Errorf("%+v", last.what)
	}

	before := time.Now()
	if w := ask(Handler(c), http.MethodGet, "/admin/v1/usage/top", "read", ""); !strings.Contains(w.Body.String(), `"rows": []`) || !strings.Contains(w.Body.String(), `"missing": []`) {
		t.Errorf("%s", w.Body)
	}
	q, ok := last.what.(UsageTop)
	if back := before.Sub(q.From); !ok || back > time.Hour || back < time.Hour-time.Minute || q.Most != 10 || !reflect.DeepEqual(q.By, []string{"tenant"}) {
		t.Errorf("%+v", last.what)
	}
}

// TestMissingNodes: an export that some nodes are missing from is an error, or breaks off,
// unless a part is asked for; then a trailer says which.
func TestMissingNodes(t *testing.T) {
	c, _ := fakeNode()
	lines, gone := "", []Missing{{"gw-3", "no answer\nin time"}}
	var mu sync.Mutex // an answer that broke off is seen before its handler has ended
	c.ExportUsage = func(_ context.Context, w io.Writer, _ UsageQuery) ([]Missing, error) {
		mu.Lock()
		defer mu.Unlock()
		if lines == "" {
			return gone, nil
		}
		_, err := io.WriteString(w, lines)
		return gone, err
	}
	s := httptest.NewUnstartedServer(Handler(c))
	s.Config.ErrorLog = nil
	s.Start()
	defer s.Close()
	export := func(query string) (status int, body string, trailer http.Header, err error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+"/admin/v1/usage"+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+rootToken)
		res, err := s.Client().Do(r)
		if err != nil {
			return 0, "", nil, err
		}
		text, err := io.ReadAll(res.Body)
		return res.StatusCode, string(text), res.Trailer, errors.Join(err, res.Body.Close())
	}

	if w := ask(Handler(c), http.MethodGet, "/admin/v1/usage", rootToken, ""); code(t, w) != Incomplete || w.Code != 503 || !strings.Contains(w.Body.String(), "gw-3: no answer") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	for _, size := range []int{10, 1 << 20} {
		mu.Lock()
		lines = strings.Repeat("x", size)
		mu.Unlock()
		if status, _, _, err := export(""); err == nil && status == 200 {
			t.Errorf("%d bytes without a node's looked whole", size)
		}
		status, body, trailer, err := export("?partial=true")
		if err != nil || status != 200 || body != lines {
			t.Errorf("%d, %d of %d bytes: %v", status, len(body), size, err)
		}
		if m, err := ReadMissing(trailer); err != nil || !reflect.DeepEqual(m, gone) {
			t.Errorf("missing %+v: %v", m, err)
		}
	}
	mu.Lock()
	gone = nil
	mu.Unlock()
	if status, body, trailer, err := export(""); err != nil || status != 200 || body != lines || trailer.Get(missingTrailer) != "" {
		t.Errorf("%d, %d bytes, %v: %v", status, len(body), trailer, err)
	}
	if _, err := ReadMissing(http.Header{missingTrailer: {"{"}}); err == nil {
		t.Error("a broken trailer was read")
	}
}

func FuzzParseWhen(f *testing.F) {
	for _, s := range []string{"2026-01", "2018-11-04", "2026-01-15T12:00:00Z", "7d", "1h30m", "-1h", "9999-12-31", "0000-01-01", "106751d"} {
		f.Add(s)
	}
	now := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	sao, err := time.LoadLocation("America/Sao_Paulo")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, s string) {
		at, err := ParseWhen(s, sao, now)
		if err != nil {
			return
		}
		if day, derr := time.Parse(time.DateOnly, s); derr == nil && at.In(sao).Format(time.DateOnly) != day.Format(time.DateOnly) {
			t.Errorf("%q is %s", s, at)
		}
		if _, serr := ParseSpan(s); serr == nil && at.After(now) {
			t.Errorf("%q ago is %s", s, at)
		}
	})
}

func FuzzParseBy(f *testing.F) {
	for _, s := range []string{"", "tenant", "key,user,model,day,hour,outcome,tenant", "tenant,", "day,day"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		by, err := ParseBy(s)
		if err == nil && (strings.Join(by, ",") != s || len(by) > len(UsageBy())) {
			t.Errorf("%q is %q", s, by)
		}
	})
}
