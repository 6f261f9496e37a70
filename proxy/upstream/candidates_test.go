package upstream

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func ids(cs []Candidate) string {
	var s []string
	for _, c := range cs {
		s = append(s, c.ID)
	}
	return strings.Join(s, " ")
}

func TestCandidatesAreInOrder(t *testing.T) {
	a := newActors(map[string]act{"up": answers(200), "busy": answers(200)})
	p := newTestPool(t, Config{Transport: a.transport, Backends: []Backend{
		{Name: "openai", URL: "http://openai", Kind: OpenAI, Overflow: true, Slots: 4},
		{Name: "unknown", URL: "http://unknown", SlotTokens: 100},
		{Name: "busy", URL: "http://busy", Slots: 8},
		{Name: "up", URL: "http://up", Slots: 8},
	}})
	names := []string{"openai", "unknown", "busy", "up", "nobody"}
	for _, n := range []string{"busy", "up"} {
		if _, err := one(t, p, n); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.Hold("busy", nil); err != nil {
		t.Fatal(err)
	}
	kept := []Candidate{{ID: "kept"}}
	for range 5 {
		got, err := p.Candidates(kept, names, nil)
		if err != nil || ids(got) != "kept up busy unknown openai" {
			t.Fatalf("%s, %v", ids(got), err)
		}
		c := got[2]
		if c.Slots != 8 || !c.Bounded || c.InFlight != 1 || c.Load != 2./8 || c.SlotTokens != DefaultSlotTokens || c.State != Up {
			t.Errorf("%+v", c)
		}
		if c := got[3]; c.Bounded || c.SlotTokens != 100 || c.State != Unknown {
			t.Errorf("%+v", c)
		}
	}
	if got, err := p.Candidates(nil, names, []string{"up", "busy"}); err != nil || ids(got) != "unknown openai" {
		t.Errorf("%s, %v", ids(got), err)
	}
	if got, err := p.Candidates(nil, []string{"up", "nobody"}, []string{"up"}); !errors.Is(err, ErrNoBackend) || len(got) > 0 {
		t.Errorf("%s, %v", ids(got), err)
	}
	if n := testing.AllocsPerRun(100, func() { kept, _ = p.Candidates(kept[:0], names, nil) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
	p.Close()
	if _, err := p.Candidates(nil, names, nil); !errors.Is(err, ErrNoBackend) {
		t.Error(err)
	}
}

type lease struct{ released int }

func (l *lease) Release() { l.released++ }

func TestHoldGivesItsLeaseBackOnce(t *testing.T) {
	p := newTestPool(t, Config{Backends: []Backend{{Name: "a", URL: "http://a", Slots: 1}}})
	l := &lease{}
	s, err := p.Hold("a", l)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Hold("a", nil); err != nil { // the bound is the cluster's to keep
		t.Error(err)
	}
	s.Release()
	s.Release()
	if l.released != 1 || status(t, p, "a").InFlight != 1 {
		t.Errorf("released %d times, %d in flight", l.released, status(t, p, "a").InFlight)
	}
	l = &lease{}
	if _, err := p.Hold("b", l); !errors.Is(err, ErrNoBackend) || l.released > 0 {
		t.Errorf("%v, the caller's lease released %d times", err, l.released)
	}
}

func TestDrainByName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, dns := newFleet(), &names{}
		dns.set(nil, "10.0.0.1", "10.0.0.2")
		p := newTestPool(t, Config{Transport: f.transport, Resolver: dns, ResolveInterval: time.Second, Backends: []Backend{
			{Name: "svc", URL: "dns://vllm:80"}, {Name: "b", URL: "http://b"},
		}})
		defer serve(t, p)()
		synctest.Wait()
		held, err := p.Hold("b", nil)
		if err != nil {
			t.Fatal(err)
		}
		changed := p.Changed()
		p.Drain([]string{"b", "svc@10.0.0.2:80", "svc@10.0.0.3:80"})
		if !fired(changed) {
			t.Error("nobody was told")
		}
		both := []string{"svc", "b"}
		if got, err := p.Candidates(nil, both, nil); err != nil || ids(got) != "svc@10.0.0.1:80" {
			t.Errorf("%s, %v", ids(got), err)
		}
		if _, err := p.Hold("b", nil); !errors.Is(err, ErrNoBackend) {
			t.Errorf("held a drained one: %v", err)
		}
		if st := status(t, p, "b"); !st.Drained || st.State != Up || st.InFlight != 1 {
			t.Errorf("%+v", st)
		}
		if err := send(t, held, "{}"); err != nil {
			t.Errorf("in flight as it was drained: %v", err)
		}
		changed = p.Changed()
		dns.set(nil, "10.0.0.1", "10.0.0.2", "10.0.0.3")
		pass(2 * time.Second)
		if got, _ := p.Candidates(nil, both, nil); ids(got) != "svc@10.0.0.1:80" || !fired(changed) {
			t.Errorf("an address that was drained before it came: %s", ids(got))
		}
		if err := p.Update([]Backend{{Name: "b", URL: "http://elsewhere"}}); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Candidates(nil, both, nil); !errors.Is(err, ErrNoBackend) {
			t.Errorf("a policy undid the drain: %v", err)
		}
		p.Drain(nil)
		if got, err := p.Candidates(nil, both, nil); err != nil || ids(got) != "b" {
			t.Errorf("%s, %v", ids(got), err)
		}
		held.Release()
	})
}

// TestSlowStartOfAnUnbounded: one that comes back does not get the whole load at once, without a
// queue before it.
func TestSlowStartOfAnUnbounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		f.set("a:80", true)
		p := newTestPool(t, Config{Transport: f.transport, Peers: func() int { return 2 }, Backends: []Backend{{Name: "a", URL: "http://a"}}})
		defer serve(t, p)()
		pass(10 * time.Second)
		f.set("a:80", false)
		changed := p.Changed()
		for status(t, p, "a").State == Down {
			<-changed
			changed = p.Changed()
		}
		fill := func() (n int) {
			for {
				if _, err := p.Hold("a", nil); err != nil {
					var e *PausedError
					if !errors.As(err, &e) || !errors.Is(err, ErrSaturated) || !e.Until.After(time.Now()) {
						t.Fatalf("%v", err)
					}
					if _, err := p.Candidates(nil, []string{"a"}, nil); !errors.As(err, &e) {
						t.Fatalf("%v", err)
					}
					return n
				}
				if n++; n == 1000 {
					return n
				}
			}
		}
		if n := fill(); n != 3 {
			t.Errorf("%d at once, as it came back", n)
		}
		pass(rampTime / 2)
		if n := fill(); n != 17-3 {
			t.Errorf("%d more at half time", n)
		}
		s, _ := p.Hold("a", nil)
		if s != nil {
			t.Fatal("not full")
		}
		pass(rampTime / 2)
		if n := fill(); n != 1000 {
			t.Errorf("%d after the slow start", n)
		}
	})
}

func TestSlowStartGivesAPlaceOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		p := newTestPool(t, Config{Transport: f.transport, HealthInterval: time.Second, Peers: func() int { return 100 }, Backends: []Backend{{Name: "a", URL: "http://a"}, {Name: "b", URL: "http://b", Slots: 10}}})
		defer serve(t, p)()
		synctest.Wait()
		f.set("a:80", true)
		f.set("b:80", true)
		pass(5 * time.Second)
		f.set("a:80", false)
		f.set("b:80", false)
		for status(t, p, "a").State != Up || status(t, p, "b").State != Up {
			pass(100 * time.Millisecond)
		}
		s, err := p.Hold("a", nil)
		if err != nil {
			t.Fatal(err)
		}
		changed := p.Changed()
		if _, err := p.Hold("a", nil); !errors.Is(err, ErrSaturated) {
			t.Fatal(err)
		}
		s.Release()
		if !fired(changed) {
			t.Error("who waits is not told of the place")
		}
		for range 10 { // of a bounded one, the cluster gives out the room
			if _, err := p.Hold("b", nil); err != nil {
				t.Fatal(err)
			}
		}
		if sh := p.Share("b"); sh >= 0.5 || sh != p.Endpoints()[1].Share || p.Share("nobody") != 1 {
			t.Errorf("share %v", sh)
		}
		pass(rampTime)
		if sh := p.Share("b"); sh != 1 {
			t.Errorf("share %v after the slow start", sh)
		}
	})
}

func TestNewAddressStartsSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, dns := newFleet(), &names{}
		dns.set(nil, "10.0.0.1")
		p := newTestPool(t, Config{Transport: f.transport, Resolver: dns, ResolveInterval: time.Second, Backends: []Backend{{Name: "svc", URL: "dns://vllm:80"}}})
		defer serve(t, p)()
		synctest.Wait()
		if sh := p.Share("svc@10.0.0.1:80"); sh != 1 {
			t.Errorf("the first: %v", sh)
		}
		dns.set(nil, "10.0.0.1", "10.0.0.2")
		for len(p.Endpoints()) < 2 || status(t, p, "svc@10.0.0.2:80").State != Up {
			pass(100 * time.Millisecond)
		}
		if sh := p.Share("svc@10.0.0.2:80"); sh > 0.2 || p.Share("svc@10.0.0.1:80") != 1 {
			t.Errorf("beside another: %v", sh)
		}
		if got, err := p.Candidates(nil, []string{"svc"}, nil); err != nil || ids(got) != "svc@10.0.0.1:80 svc@10.0.0.2:80" {
			t.Errorf("%s %v", ids(got), err)
		}
		pass(rampTime)
		if sh := p.Share("svc@10.0.0.2:80"); sh != 1 {
			t.Errorf("after that: %v", sh)
		}
	})
}

func BenchmarkPlace(b *testing.B) {
	p := newTestPool(b, Config{Backends: []Backend{{Name: "a", URL: "http://a", Slots: 8}, {Name: "b", URL: "http://b", Slots: 8}, {Name: "c", URL: "http://c"}, {Name: "d", URL: "http://d"}}})
	names := []string{"a", "b", "c", "d"}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		var cs []Candidate
		for pb.Next() {
			var err error
			if cs, err = p.Candidates(cs[:0], names, nil); err != nil {
				b.Error(err)
				return
			}
			s, err := p.Hold(cs[0].ID, nil)
			if err != nil {
				b.Error(err)
				return
			}
			s.Release()
		}
	})
}

func TestEndpointsForTheQueue(t *testing.T) {
	p := newTestPool(t, Config{Backends: []Backend{
		{Name: "a", URL: "http://a", Slots: 3, SlotTokens: 7},
		{Name: "b", URL: "http://b", MetricsPath: "none", Overflow: true},
		{Name: "c", URL: "https://c", Kind: Anthropic},
		{Name: "d", URL: "dns://d:1"},
	}})
	want := []Endpoint{
		{ID: "a", Backend: "a", Slots: 3, SlotTokens: 7, Metrics: true, Share: 1},
		{ID: "b", Backend: "b", SlotTokens: DefaultSlotTokens, Overflow: true, Share: 1},
		{ID: "c", Backend: "c", SlotTokens: DefaultSlotTokens, Share: 1},
	}
	if got := p.Endpoints(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%+v", got)
	}
	if got := status(t, p, "c"); got.State != Up || got.Kind != Anthropic {
		t.Errorf("an endpoint that nobody probes: %+v", got)
	}
}

func TestFetchMetrics(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/base/metrics", "/base/own":
			fmt.Fprint(w, r.URL.Path, r.Header.Get("Authorization"))
		default:
			w.WriteHeader(404)
		}
	}))
	defer srv.Close()
	p := newTestPool(t, Config{Backends: []Backend{
		{Name: "a", URL: srv.URL + "/base", APIKey: "k"}, {Name: "own", URL: srv.URL + "/base", MetricsPath: "/own"}, {Name: "none", URL: srv.URL, MetricsPath: "none"},
	}})
	for _, c := range []struct {
		id, path, want string
		limit          int64
		err            string
	}{
		{id: "a", want: "/base/metricsBearer k", limit: 100},
		{id: "own", want: "/base/own", limit: 100},
		{id: "a", path: "/own", want: "/base/ownBearer k", limit: 100},
		{id: "a", limit: 5, err: "longer than 5 bytes"},
		{id: "a", path: "/x", limit: 100, err: "404"},
		{id: "none", limit: 100, err: ErrNoMetrics.Error()},
		{id: "nobody", limit: 100, err: ErrNoBackend.Error()},
	} {
		got, err := p.Fetch(t.Context(), c.id, c.path, c.limit)
		if c.err == "" && (err != nil || string(got) != c.want) || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%s%s: %q, %v", c.id, c.path, got, err)
		}
	}
}

func TestCredentialsByKindAndFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "key")
		write := func(s string) {
			if err := os.WriteFile(file, []byte(s), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write("first\n")
		a := newActors(map[string]act{"o": answers(200), "c": answers(200), "v": answers(200)})
		bs := []Backend{
			{Name: "o", URL: "http://o", Kind: OpenAI, APIKeyFile: file},
			{Name: "c", URL: "http://c", Kind: Anthropic, APIKey: "claude", Models: map[string]string{"big": "claude-x"}},
			{Name: "v", URL: "http://v"},
		}
		p := newTestPool(t, Config{Transport: a.transport, Backends: bs, ResolveInterval: 10 * time.Second})
		defer serve(t, p)()
		sent := func(name, header string) string {
			if _, err := one(t, p, name); err != nil {
				t.Fatal(err)
			}
			return a.last.Get(header)
		}
		if got := sent("o", "Authorization"); got != "Bearer first" {
			t.Error(got)
		}
		if got := sent("c", "X-Api-Key"); got != "claude" || a.last.Get("Authorization") != "" || a.last.Get("Anthropic-Version") != anthropicVersion {
			t.Errorf("%q %v", got, a.last)
		}
		if got := sent("v", "Authorization"); got != "" || a.last.Get("X-Api-Key") != "" {
			t.Errorf("%v", a.last)
		}
		s, _ := p.Hold("c", nil)
		if m, ok := s.Upstream("big"); m != "claude-x" || !ok {
			t.Errorf("%q %v", m, ok)
		}
		if _, ok := s.Upstream("small"); ok {
			t.Error("a name that nobody gave")
		}
		s.Release()

		write("second")
		pass(11 * time.Second)
		if got := sent("o", "Authorization"); got != "Bearer second" {
			t.Errorf("a changed key file: %s", got)
		}
		write("")
		pass(11 * time.Second)
		if got := sent("o", "Authorization"); got != "Bearer second" {
			t.Errorf("an empty key file: %s", got)
		}
		for content, want := range map[string]string{"": "is empty", "a\nb": "several lines", strings.Repeat("k", maxKeyFile+1): "longer"} {
			write(content)
			if err := p.Check(bs); err == nil || !strings.Contains(err.Error(), "backends[0].api_key_file: ") || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %s", err, want)
			}
			if err := p.Update(bs); err == nil || strings.Contains(err.Error(), "kkk") {
				t.Errorf("%v", err)
			}
		}
		bs[0].APIKeyFile, bs[0].APIKey = "", "third"
		if err := p.Update(bs); err != nil {
			t.Fatal(err)
		}
		if got := sent("o", "Authorization"); got != "Bearer third" {
			t.Error(got)
		}
	})
}
