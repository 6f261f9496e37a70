package upstream

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

func TestConfigNamesFieldAndRemedy(t *testing.T) {
	ok := Backend{Name: "a", URL: "http://h:8000"}
	for _, c := range []struct {
		cfg  Config
		want string // "" is valid
	}{
		{Config{Backends: []Backend{ok}}, ""},
		{Config{Backends: []Backend{{Name: "a", URL: "https://h/base/", CAFile: "ca.pem"}}}, ""},
		{Config{Backends: []Backend{{Name: "a", URL: "dns://svc:8000", ServerName: "x"}}}, ""},
		{Config{DialTimeout: -1}, "dial_timeout"},
		{Config{MaxIdlePerBackend: -1}, "max_idle_per_backend"},
		{Config{Backends: []Backend{ok, ok}}, "backends[1].name"},
		{Config{Backends: []Backend{{URL: "http://h"}}}, "backends[0].name"},
		{Config{Backends: []Backend{{Name: "a@b", URL: "http://h"}}}, "name"},
		{Config{Backends: []Backend{{Name: "a", URL: "h:8000"}}}, "url"},
		{Config{Backends: []Backend{{Name: "a", URL: "ftp://h"}}}, "scheme"},
		{Config{Backends: []Backend{{Name: "a", URL: "dns://svc"}}}, "port"},
		{Config{Backends: []Backend{{Name: "a", URL: "http://h:99999"}}}, "port"},
		{Config{Backends: []Backend{{Name: "a", URL: "http://u:p@h"}}}, "api_key_env"},
		{Config{Backends: []Backend{{Name: "a", URL: "http://h?x=1"}}}, "query"},
		{Config{Backends: []Backend{{Name: "a", URL: "http://h", CAFile: "ca.pem"}}}, "https"},
		{Config{Backends: []Backend{{Name: "a", URL: "https://h", CertFile: "c"}}}, "key_file"},
		{Config{Backends: []Backend{{Name: "a", URL: "http://h", Slots: -1}}}, "slots"},
		{Config{Backends: []Backend{{Name: "a", URL: "http://h", HealthPath: "up"}}}, "health_path"},
		{Config{Backends: []Backend{{Name: "a", URL: "http://h", APIKey: "a\nb"}}}, "api_key"},
		{Config{Backends: make([]Backend, maxBackends+1)}, "backends"},
	} {
		err := c.cfg.Validate()
		if c.want == "" && err != nil {
			t.Errorf("%+v: %v", c.cfg, err)
		}
		if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: got %v, want mention of %q", c.cfg, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), "u:p@") {
			t.Errorf("the error shows a password: %v", err)
		}
	}
}

func TestURLJoinsBasePath(t *testing.T) {
	p := newTestPool(t, Config{Backends: []Backend{
		{Name: "a", URL: "http://h:8000/pre fix/"}, {Name: "b", URL: "https://h"}, {Name: "c", URL: "http://[::1]:80"},
	}})
	for name, want := range map[string]string{
		"a": "http://h:8000/pre%20fix/v1/models", "b": "https://h:443/v1/models", "c": "http://[::1]:80/v1/models",
	} {
		s, err := p.Acquire([]string{name}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.URL("/v1/models"); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
		s.Release()
	}
}

func TestAcquireTakesTheLeastLoaded(t *testing.T) {
	p := newTestPool(t, Config{Backends: []Backend{{Name: "big", URL: "http://b", Slots: 6}, {Name: "small", URL: "http://s", Slots: 2}}})
	names := []string{"big", "small"}
	got := map[string]int{}
	var slots []*Slot
	for i := range 8 {
		s, err := p.Acquire(names, nil)
		if err != nil {
			t.Fatal(err)
		}
		slots = append(slots, s)
		got[s.Name()]++
		if i == 3 && got["big"] != 3 {
			t.Errorf("at half load: %v, want 3 and 1", got)
		}
	}
	if got["big"] != 6 || got["small"] != 2 {
		t.Errorf("full: %v", got)
	}
	if _, err := p.Acquire(names, nil); !errors.Is(err, ErrSaturated) {
		t.Errorf("full pool: %v, want ErrSaturated", err)
	}
	if _, err := p.Acquire([]string{"nobody"}, nil); !errors.Is(err, ErrNoBackend) {
		t.Errorf("unknown name: %v, want ErrNoBackend", err)
	}
	if _, err := p.Acquire(nil, nil); !errors.Is(err, ErrNoBackend) {
		t.Errorf("no names: %v, want ErrNoBackend", err)
	}
	if _, err := p.Acquire(names, names); !errors.Is(err, ErrNoBackend) {
		t.Errorf("all tried: %v, want ErrNoBackend", err)
	}
	slots[0].Release()
	slots[0].Release()
	if s, err := p.Acquire(names, nil); err != nil || s.Name() != slots[0].Name() {
		t.Errorf("after a release: %v %v", s, err)
	} else if _, err := p.Acquire(names, nil); !errors.Is(err, ErrSaturated) {
		t.Errorf("a slot released twice was given out twice: %v", err)
	}
}

func TestAcquireRotatesTies(t *testing.T) {
	p := newTestPool(t, Config{Backends: []Backend{{Name: "a", URL: "http://a"}, {Name: "b", URL: "http://b"}}})
	got := map[string]int{}
	for range 10 {
		s, err := p.Acquire([]string{"a", "b"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		got[s.Name()]++
		s.Release()
	}
	if got["a"] != 5 || got["b"] != 5 {
		t.Errorf("idle backends shared %v", got)
	}
}

func TestAcquirePrefersKnownHealth(t *testing.T) {
	f := newFleet()
	p := newTestPool(t, Config{Transport: f.transport, Backends: []Backend{{Name: "a", URL: "http://a", Slots: 1}, {Name: "b", URL: "http://b", Slots: 1}}})
	s, err := p.Acquire([]string{"b"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := send(t, s, "{}"); err != nil {
		t.Fatal(err)
	}
	s.Release()
	if got := states(p); got != "a=unknown b=up" || p.Up() != 1 {
		t.Fatalf("after one answer: %s, %d up", got, p.Up())
	}
	for _, want := range []string{"b", "a"} { // the live one first, then the unknown
		s, err := p.Acquire([]string{"a", "b"}, nil)
		if err != nil || s.Name() != want {
			t.Fatalf("got %v %v, want %s", s, err, want)
		}
		defer s.Release()
	}
}

// TestSlotsNeverLeak plays random policy changes, acquisitions and releases against a
// plain count of who holds what.
func TestSlotsNeverLeak(t *testing.T) {
	all := []string{"a", "b", "c"}
	rapid.Check(t, func(t *rapid.T) {
		policy := map[string]Backend{}
		p, err := NewPool(Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		held := map[string][]*Slot{} // by URL
		update := func() {
			if err := p.Update(slices.Collect(maps.Values(policy))); err != nil {
				t.Fatal(err)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				name := rapid.SampledFrom(all).Draw(t, "name")
				policy[name] = Backend{
					Name: name, Slots: rapid.IntRange(0, 3).Draw(t, "slots"),
					URL: fmt.Sprintf("http://%s%d:1", name, rapid.IntRange(0, 1).Draw(t, "host")),
				}
				update()
			},
			"remove": func(t *rapid.T) {
				delete(policy, rapid.SampledFrom(all).Draw(t, "name"))
				update()
			},
			"acquire": func(t *rapid.T) {
				s, err := p.Acquire(all, nil)
				if err != nil {
					for _, b := range policy {
						if b.Slots == 0 || len(held[b.URL]) < b.Slots {
							t.Fatalf("%v although %s has room", err, b.Name)
						}
					}
					if want := (map[bool]error{true: ErrNoBackend, false: ErrSaturated})[len(policy) == 0]; !errors.Is(err, want) {
						t.Fatalf("%v, want %v", err, want)
					}
					return
				}
				b := policy[s.Name()]
				if held[b.URL] = append(held[b.URL], s); b.Slots > 0 && len(held[b.URL]) > b.Slots {
					t.Fatalf("%s has %d out of %d", b.Name, len(held[b.URL]), b.Slots)
				}
			},
			"release": func(t *rapid.T) {
				for url, slots := range held {
					if len(slots) > 0 {
						i := rapid.IntRange(0, len(slots)-1).Draw(t, "which")
						for range rapid.IntRange(1, 2).Draw(t, "times") {
							slots[i].Release()
						}
						held[url] = slices.Delete(slots, i, i+1)
						return
					}
				}
			},
			"": func(t *rapid.T) {
				got, want := 0, 0
				for _, s := range p.Status() {
					got += s.InFlight
					if s.Draining && s.InFlight == 0 {
						t.Fatalf("%s drains nothing", s.Endpoint)
					}
				}
				for _, s := range held {
					want += len(s)
				}
				if got != want {
					t.Fatalf("%d slots out by the pool, %d by the count", got, want)
				}
			},
		})
	})
}

func TestConcurrentAcquireKeepsTheBound(t *testing.T) {
	const slots, workers, rounds = 5, 16, 400
	bs := []Backend{{Name: "a", URL: "http://a", Slots: slots}}
	p := newTestPool(t, Config{Backends: bs})
	var out, refused atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range rounds {
				s, err := p.Acquire([]string{"a"}, nil)
				if err != nil {
					refused.Add(1)
					continue
				}
				if n := out.Add(1); n > slots {
					t.Errorf("%d slots out of %d", n, slots)
				}
				out.Add(-1)
				wg.Go(s.Release)
				s.Release()
			}
		})
	}
	wg.Go(func() {
		for i := range rounds {
			with := slices.Clone(bs)
			if i%2 == 0 {
				with = append(with, Backend{Name: "b", URL: "http://b"})
			}
			if err := p.Update(with); err != nil {
				t.Error(err)
			}
			p.Status()
		}
	})
	wg.Wait()
	for _, s := range p.Status() {
		if s.InFlight != 0 {
			t.Errorf("%s leaked %d", s.Endpoint, s.InFlight)
		}
	}
}

func TestUpdateKeepsWhatItCan(t *testing.T) {
	f := newFleet()
	a := Backend{Name: "a", URL: "http://a", Slots: 2}
	p := newTestPool(t, Config{Transport: f.transport, Backends: []Backend{a}})
	s, err := p.Acquire([]string{"a"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := send(t, s, "{}"); err != nil {
		t.Fatal(err)
	}
	a.Slots, a.APIKey = 1, "k"
	if err := p.Update([]Backend{a}); err != nil {
		t.Fatal(err)
	}
	if got := p.Status()[0]; got.State != Up || got.InFlight != 1 || got.Slots != 1 {
		t.Fatalf("a changed bound lost what was known: %+v", got)
	}
	if _, err := p.Acquire([]string{"a"}, nil); !errors.Is(err, ErrSaturated) {
		t.Fatalf("lowered bound: %v", err)
	}
	if err := p.Update([]Backend{a, {Name: "a", URL: "http://other"}}); err == nil {
		t.Fatal("a bad policy was taken")
	}
	if err := p.Update(nil); err != nil {
		t.Fatal(err)
	}
	if got := p.Status(); len(got) != 1 || !got[0].Draining || got[0].InFlight != 1 {
		t.Fatalf("removed while busy: %+v", got)
	}
	if err := send(t, s, "{}"); err != nil {
		t.Fatalf("a request in flight to a removed backend: %v", err)
	}
	s.Release()
	if got := p.Status(); len(got) != 0 {
		t.Fatalf("drained: %+v", got)
	}
}

func TestAcquireAllocatesOnlyTheSlot(t *testing.T) {
	p := newTestPool(t, Config{Backends: []Backend{{Name: "a", URL: "http://a"}, {Name: "b", URL: "http://b"}}})
	names := []string{"a", "b"}
	if n := testing.AllocsPerRun(100, func() {
		s, _ := p.Acquire(names, nil)
		s.Release()
	}); n > 1 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkAcquire(b *testing.B) {
	p := newTestPool(b, Config{Backends: []Backend{{Name: "a", URL: "http://a"}, {Name: "b", URL: "http://b"}}})
	names := []string{"a", "b"}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			s, err := p.Acquire(names, nil)
			if err != nil {
				b.Error(err)
				return
			}
			s.Release()
		}
	})
}
