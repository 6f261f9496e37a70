package trace

import (
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/bench/lease"
	"headgate/limiter"
)

// TestBy: a session goes to one tenant as a whole, the weights hold, and the seed decides alone.
func TestBy(t *testing.T) {
	tr, err := Sample(MooncakeSample)
	if err != nil {
		t.Fatal(err)
	}
	split := Split{Tenants: 10, Skew: 1, Seed: 7}
	got, err := tr.By(split)
	if err != nil {
		t.Fatal(err)
	}
	of := make(map[int32]int32)
	counts := make([]float64, split.Tenants)
	for i, r := range got.Requests {
		if k, known := of[r.Session]; known && k != r.Tenant {
			t.Fatalf("request %d of session %d is tenant %d's; the others are %d's", i, r.Session, r.Tenant, k)
		} else if !known {
			of[r.Session] = r.Tenant
			counts[r.Tenant]++
		}
		if r.At != tr.Requests[i].At || r.Input != tr.Requests[i].Input {
			t.Fatalf("request %d is another one: %+v", i, r)
		}
		if tr.Requests[i].Tenant != 0 {
			t.Fatal("the trace itself was changed")
		}
	}
	harmonic := 0.0
	for i := range split.Tenants {
		harmonic += 1 / float64(i+1)
	}
	for i, n := range counts {
		want := float64(len(of)) / harmonic / float64(i+1)
		if math.Abs(n-want) > 5*math.Sqrt(want) {
			t.Errorf("tenant %d has %v sessions; its weight is that of %.0f", i, n, want)
		}
	}
	if again, err := tr.By(split); err != nil || !reflect.DeepEqual(again, got) {
		t.Errorf("the same seed splits in another way: %v", err)
	}
	split.Seed++
	if other, err := tr.By(split); err != nil || reflect.DeepEqual(other.Requests, got.Requests) {
		t.Errorf("another seed splits in the same way: %v", err)
	}
	if want := "each session to one of 10 tenants, the i-th with a weight of 1/i^1, seed 7"; got.Split != want || tr.Split != "" {
		t.Errorf("%q, and of the trace itself %q", got.Split, tr.Split)
	}
	if _, err := tr.By(Split{}); err == nil || !strings.Contains(err.Error(), "zipf:20") {
		t.Errorf("a trace without tenants is left as it is: %v", err)
	}
}

// TestByPutsTenantsTogether: those that a trace names are not torn apart.
func TestByPutsTenantsTogether(t *testing.T) {
	tr := readText(t, "time,tenant,input_tokens,output_tokens\n0,a,1,0\n1,b,1,0\n2,a,1,0\n3,c,1,0\n4,b,1,0\n", CSV)
	if same, err := tr.By(Split{}); err != nil || same != tr {
		t.Errorf("file: %v, %v", same, err)
	}
	for seed := range uint64(20) {
		got, err := tr.By(Split{Tenants: 2, Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		if r := got.Requests; r[0].Tenant != r[2].Tenant || r[1].Tenant != r[4].Tenant {
			t.Errorf("seed %d: %+v", seed, r)
		}
	}
}

func TestParseSplit(t *testing.T) {
	for s, want := range map[string]Split{
		"file": {}, "even:3": {Tenants: 3, Seed: 5}, "zipf:20": {Tenants: 20, Skew: 1, Seed: 5}, "zipf:20:1.2": {Tenants: 20, Skew: 1.2, Seed: 5},
	} {
		got, err := ParseSplit(s, 5)
		if err != nil || got != want || got.String() != s {
			t.Errorf("%s: %+v (%s), %v", s, got, got, err)
		}
	}
	for s, words := range map[string]string{
		"": "write file, even:20", "file:1": "write file", "even": "write file", "even:0": "write file", "zipf:x": "write file", "zipf:20:y": "write file",
		"even:20:1": "write file", "zipf:-1": "write file", "zipf:9999999": "from 1 to 1048576", "zipf:2:11": "a skew of 11", "zipf:2:NaN": "a skew of NaN",
	} {
		if got, err := ParseSplit(s, 5); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%q: %+v, %v", s, got, err)
		}
	}
}

// TestCells: limits, loads and demand are what the configuration says.
func TestCells(t *testing.T) {
	tr := readText(t, "time,tenant,input_tokens,output_tokens\n0,a,100,20\n1,b,0,0\n2,a,1000,0\n3,b,79,0\n", CSV)
	cells, err := tr.Cells(Config{Headroom: []float64{0.5, 2}, Nodes: []int{2, 3}, Speed: 2, Burst: 10 * time.Second, Faults: []lease.Fault{lease.NoFault, lease.Join}, Seed: 9, RTT: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if len(cells) != 8 {
		t.Fatalf("%d cells, not 8", len(cells))
	}
	// 120 + 1 + 1000 + 79 tokens in 4 s, of two tenants, twice as fast: 300 a second and tenant.
	c := cells[0]
	want := lease.Cell{
		Name: "x, 0.5 × the mean", Limit: limiter.Limit{Rate: limiter.Rate{Count: 150 * 60, Per: time.Minute}, Burst: 1500}, Mean: 300, Nodes: 2,
		Load: 2, Seed: 9, Tenants: 2, RTT: time.Millisecond, For: 2 * time.Second, Replay: c.Replay,
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("%+v, not %+v", c, want)
	}
	if d := cells[7]; d.Nodes != 3 || d.Load != 0.5 || d.Limit.Rate.Count != 600*60 || d.Limit.Burst != 6000 || d.Fault != lease.Join {
		t.Errorf("the last one is %+v", d)
	}
	for i, a := range cells[0].Demand() {
		r := tr.Requests[i]
		if a.At != int64(r.At)/2 || a.Tenant != r.Tenant || a.Node < 0 || a.Node > 1 || a.Cost != max(1, r.Input+r.Output) {
			t.Errorf("request %d arrives as %+v", i, a)
		}
	}
	for speed, burst := range map[float64]int64{1: 600 * 60, 1000: 600_000 * 2} { // a minute, and a twentieth of 40 s
		long := &Trace{Name: "x", Tenants: []string{"a"}, Requests: []Request{{Input: 12_000_000}, {At: 20_000 * time.Second, Input: 12_000_000}}}
		cells, err := long.Cells(Config{Headroom: []float64{1}, Speed: speed})
		if err != nil || cells[0].Limit.Burst != max(burst, 12_000_000) {
			t.Errorf("by default the burst is %v, not %d; %v", cells[0].Limit, burst, err)
		}
	}
	cells, err = tr.Cells(Config{Headroom: []float64{0.01}, Burst: time.Second})
	if err != nil || cells[0].Limit.Burst != 1000 {
		t.Errorf("the burst is below the largest request: %+v, %v", cells, err)
	}
}

// TestCellsAreOnesThatCanBeMeasured: whatever the trace and the configuration, no arrival is outside of its cell.
func TestCellsAreOnesThatCanBeMeasured(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tr := &Trace{Name: "x"}
		at := time.Duration(0)
		for range rapid.IntRange(2, 30).Draw(rt, "requests") {
			tr.Requests = append(tr.Requests, Request{At: at, Session: int32(len(tr.Requests)), Input: rapid.Int64Range(0, MaxTokens).Draw(rt, "input"), Output: rapid.Int64Range(0, MaxTokens).Draw(rt, "output")})
			at += time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(rt, "gap"))
		}
		cells, err := tr.Cells(Config{
			Split: Split{Tenants: rapid.IntRange(0, 5).Draw(rt, "tenants"), Skew: 1}, Headroom: []float64{rapid.Float64Range(1e-9, maxHeadroom).Draw(rt, "headroom")},
			Burst: time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(rt, "burst")), Speed: rapid.Float64Range(0, maxSpeed).Draw(rt, "speed"),
		})
		if err != nil {
			return
		}
		for _, c := range cells {
			if err := c.Limit.Validate(); err != nil {
				rt.Fatalf("%v: %v", c.Limit, err)
			}
			last := int64(0)
			for _, a := range c.Demand() {
				if a.At < last || a.At >= int64(c.For) || a.Cost < 1 || a.Cost > c.Limit.Burst || int(a.Tenant) >= c.Tenants || int(a.Node) >= c.Nodes {
					rt.Fatalf("%+v in %+v", a, c)
				}
				last = a.At
			}
		}
	})
}

// TestReplayIsJudged: one central bucket a tenant keeps samples within their limits, refuses the less the more room
// there is, and differs in nothing from the ideal.
func TestReplayIsJudged(t *testing.T) {
	for _, name := range Samples() {
		tr, err := Sample(name)
		if err != nil {
			t.Fatal(err)
		}
		cells, err := tr.Cells(Config{})
		if err != nil {
			t.Fatal(err)
		}
		refused := 1.0
		for _, c := range cells {
			e := lease.Evidence{Demand: c.Demand(), Trips: make([]int, c.Nodes)}
			buckets := make([]limiter.State, c.Tenants)
			for _, a := range e.Demand {
				admitted := c.Limit.Take(&buckets[a.Tenant], 1+a.At, a.Cost, limiter.Refuse).Admitted
				e.Fates = append(e.Fates, lease.Fate{At: a.At, Decided: true, Admitted: admitted})
			}
			r := lease.Judge(c, &e)
			t.Logf("%s: %.3f refused", &c, r.IdealRefused)
			if r.Over != 0 || r.FalseRefused != 0 || r.Admitted != 1 || r.IdealRefused > refused || r.Requests != len(tr.Requests) {
				t.Errorf("%s: %+v", &c, r)
			}
			refused = r.IdealRefused
		}
		if refused > 0.2 {
			t.Errorf("%s: with room for twice the mean %.2f is refused", name, refused)
		}
	}
}

func TestConfigIsValidated(t *testing.T) {
	tr := readText(t, "time,input_tokens,output_tokens\n0,1,1\n1,1,1\n", CSV)
	for words, c := range map[string]Config{
		"a headroom of 0": {Headroom: []float64{0}}, "0 nodes": {Nodes: []int{0}}, "a speed of -1": {Speed: -1}, "a speed of NaN": {Speed: math.NaN()},
		"a burst of -1s": {Burst: -time.Second}, "a round trip of 1h": {RTT: time.Hour}, `no fault "flood"`: {Faults: []lease.Fault{"flood"}},
		"-1 tenants": {Split: Split{Tenants: -1}}, "more than 1000 cells": {Nodes: make([]int, 0), Headroom: headrooms(1001)},
	} {
		if _, err := tr.Cells(c); err == nil || !strings.Contains(err.Error(), words) || !strings.HasPrefix(err.Error(), "replay x: ") {
			t.Errorf("%+v: %v", c, err)
		}
	}
	at := readText(t, "time,input_tokens,output_tokens\n5,1,1\n5,1,1\n", CSV)
	if _, err := at.Cells(Config{}); err == nil || !strings.Contains(err.Error(), "within a millisecond") {
		t.Errorf("a trace of one moment: %v", err)
	}
	if _, err := tr.Cells(Config{Headroom: []float64{1e6}, Speed: 100}); err != nil {
		t.Errorf("a great limit: %v", err)
	}
}

func headrooms(n int) (h []float64) {
	for i := range n {
		h = append(h, float64(i+1))
	}
	return h
}
