package node

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"headgate/cache"
	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/proxy"
)

// full sets every field of v, which holds no pointers but slices of bytes and strings, to something else than
// its zero value.
func full(t *testing.T, v reflect.Value, n *int64) {
	t.Helper()
	*n++
	switch v.Kind() {
	case reflect.Struct:
		for _, field := range v.Fields() {
			full(t, field, n)
		}
	case reflect.String:
		v.SetString(fmt.Sprint("s", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int64:
		v.SetInt(*n)
	case reflect.Uint64:
		v.SetUint(uint64(*n))
	case reflect.Uint8:
		v.SetUint(7)
	case reflect.Float64:
		v.SetFloat(float64(*n) / 8)
	case reflect.Array:
		for i := range v.Len() {
			full(t, v.Index(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			full(t, v.Index(i), n)
		}
	default:
		t.Fatalf("no value for %s", v.Type())
	}
}

// sameFields compares what both have under one name, and says what only one of them has.
func sameFields(t *testing.T, a, b any) (only []string) {
	t.Helper()
	x, y := reflect.ValueOf(a), reflect.ValueOf(b)
	for i := range x.NumField() {
		name := x.Type().Field(i).Name
		f := y.FieldByName(name)
		switch {
		case !f.IsValid():
			only = append(only, name)
		case f.Kind() == reflect.Struct:
			if sub := sameFields(t, x.Field(i).Interface(), f.Interface()); len(sub) > 0 {
				t.Errorf("%s lacks %v", name, sub)
			}
		case !reflect.DeepEqual(x.Field(i).Interface(), f.Interface()):
			t.Errorf("%s is %v, was %v", name, f, x.Field(i))
		}
	}
	return only
}

// TestAnswersGoOverWhole: what the front door says of an answer the cache keeps, and says again.
func TestAnswersGoOverWhole(t *testing.T) {
	var n int64
	var in proxy.CacheEntry
	full(t, reflect.ValueOf(&in).Elem(), &n)
	e := answer(&in)
	if only := sameFields(t, in, *e); len(only) > 0 {
		t.Errorf("the cache does not hear of %v", only)
	}
	full(t, reflect.ValueOf(e).Elem(), &n)
	h := cache.Hit{Entry: e, Age: time.Second, Stale: true, Refresh: true, Tier: cache.Live}
	out := kept(&h)
	if only := sameFields(t, *out, h); !slices.Equal(only, []string{"Live"}) || !out.Live {
		t.Errorf("%+v: %v", out, only)
	}
	if h.Tier = cache.Owner; kept(&h).Live {
		t.Error("what the owner kept is another's live answer")
	}
	if kept(nil) != nil || kept(&cache.Hit{}) != nil {
		t.Error("nothing was kept")
	}
}

const everything = `version: 1
backends: [{name: b, url: "http://127.0.0.1:1"}]
models: [{name: m, backends: [b]}, {name: judge, backends: [b]}]
plans: [{name: p}]
tenants: [{name: acme, plan: p}]
surfaces:
  - {name: all, template_version: v7, share: tenant, volatility: live, exact: {ttl: 1m, max_ttl: 2m, stale: 3m, stale_if_error: 4m, beta: 0.5, temperature: 0.7, normalize: fold, timestamps: ok, tools: true, n: true, length: true, max_bytes: 5000},
     semantic: {mode: static, threshold: 0.9, error_bound: 0.03, hit_error_bound: 0.04, audit: 0.06, ttl: 30s, answers: 0.8, embedder: m, verifier: judge}}
  - {name: own, sensitive: [personal], exact: {}}
  - {name: plain}
`

// TestSurfacesGoOverWhole: all that a policy says of a surface reaches the front door.
func TestSurfacesGoOverWhole(t *testing.T) {
	p, err := ledger.ParsePolicy([]byte(everything))
	if err != nil {
		t.Fatal(err)
	}
	ix, err := p.Index(time.Now(), 1, ledger.Share{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	m, judge := &proxy.Model{Name: "m"}, &proxy.Model{Name: "judge"}
	got := surfaces(ix, map[string]*proxy.Model{"m": m, "judge": judge})
	want := map[string]*proxy.Surface{
		"all": {Name: "all", Template: "v7", Share: true, Exact: &proxy.ExactCache{
			Life:        proxy.CacheLife{TTL: time.Minute, MaxTTL: 2 * time.Minute, Stale: 3 * time.Minute, StaleIfError: 4 * time.Minute, Beta: .5},
			Temperature: .7, Normalize: "fold", Timestamps: true, Tools: true, Many: true, Length: true, MaxBytes: 5000, Volatile: true,
		}, Semantic: &proxy.SemanticCache{Mode: "static", Threshold: .9, ErrorBound: .03, HitErrorBound: .04, Audit: .06, Answers: .8, TTL: 30 * time.Second, Embedder: m, Verifier: judge}},
		"own":   {Name: "own", Personal: true, Exact: &proxy.ExactCache{Life: proxy.CacheLife{TTL: time.Hour, MaxTTL: time.Hour, Beta: 1}, Normalize: "none", MaxBytes: 1 << 20}},
		"plain": {Name: "plain"},
	}
	if !reflect.DeepEqual(got, want) {
		for name := range want {
			t.Errorf("%s: %+v\n%+v", name, got[name], got[name].Exact)
		}
	}
	for _, of := range []any{*got["all"].Exact, *got["all"].Semantic} {
		for field, v := range reflect.ValueOf(of).Fields() {
			if v.IsZero() {
				t.Errorf("nothing sets %s", field.Name)
			}
		}
	}
}

// TestEveryWayToEndAFill: each means to those who wait what the front door says it does. Whoever is given the
// lead next ends it in the same way.
func TestEveryWayToEndAFill(t *testing.T) {
	const waiters = 12
	store, err := cache.NewStore(cache.StoreConfig{MaxBytes: 2 << 20, MaxEntry: 1 << 20, Now: cluster.Now, Rand: rand.New(rand.NewPCG(1, 2))})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	reg := prometheus.NewRegistry()
	exact, err := cache.NewExact(cache.Config{
		Store: store, Ring: func(cache.Key) []string { return nil },
		Client: func(string) (grpc.ClientConnInterface, error) { return nil, errors.New("there is no other node") },
		Valid:  func(*cache.Entry) bool { return true }, Stamp: func() uint64 { return 0 }, Now: cluster.Now,
		Rand: rand.New(rand.NewPCG(3, 4)), Registerer: reg,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer exact.Close()
	a := answers{Exact: exact}
	entry := &proxy.CacheEntry{ContentType: "application/json", Body: []byte("{}"), Life: proxy.CacheLife{TTL: time.Hour}}
	ways := map[proxy.FillKind]struct {
		leads int // in all
		rest  string
		kept  bool
	}{
		proxy.FillStore:       {1, "hit", true},
		proxy.FillShare:       {1, "hit", false},
		proxy.FillUnshareable: {1, "pass", false},
		proxy.FillFailed:      {2, "failed 418", false},
		proxy.FillBroken:      {2, "failed 502", false},
		proxy.FillAbandoned:   {2, "pass", false},
		proxy.FillRefused:     {8, "pass", false},
		proxy.FillUnasked:     {waiters + 1, "", false},
	}
	if len(ways) != int(proxy.FillUnshareable)+1 {
		t.Errorf("%d ways of %d", len(ways), proxy.FillUnshareable+1)
	}
	for kind, c := range ways {
		t.Run(fmt.Sprint("kind ", kind), func(t *testing.T) {
			key := [32]byte{byte(kind) + 1}
			end := proxy.FillEnd{Kind: kind, Entry: entry, Failure: proxy.CacheFailure{Status: 418, Body: []byte("no")}, Err: errors.New("x")}
			join := func() (word string, f proxy.CacheFill) {
				switch turn, err := a.Join(t.Context(), &proxy.CacheAsk{Key: key}); {
				case err != nil:
					return err.Error(), nil
				case turn.Fill != nil:
					return "lead", turn.Fill
				case turn.Failed != nil:
					return fmt.Sprint("failed ", turn.Failed.Status), nil
				case turn.Hit != nil:
					return "hit", nil
				default:
					return "pass", nil
				}
			}
			words := make(chan string, waiters)
			_, first := join()
			for range waiters {
				go func() {
					word, f := join()
					if f != nil {
						f.End(end)
					}
					words <- word
				}()
			}
			for waiting := 0.0; waiting != waiters; {
				families, err := reg.Gather()
				if err != nil {
					t.Fatal(err)
				}
				for _, f := range families {
					if f.GetName() == "headgate_cache_waiters" {
						waiting = f.GetMetric()[0].GetGauge().GetValue()
					}
				}
			}
			first.End(end)
			leads := 1
			for range waiters {
				if word := <-words; word == "lead" {
					leads++
				} else if word != c.rest {
					t.Errorf("one who waits: %s, want %s", word, c.rest)
				}
			}
			if leads != c.leads {
				t.Errorf("%d lead, want %d", leads, c.leads)
			}
			if _, ok := a.Look(key); ok != c.kept {
				t.Errorf("kept: %v", ok)
			}
		})
	}
}
