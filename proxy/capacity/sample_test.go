package capacity

import (
	"errors"
	"math"
	"strings"
	"testing"
)

func TestParseMetrics(t *testing.T) {
	all := Sample{
		Waiting: 4, HasWaiting: true, Running: 7, HasRunning: true, KVUsage: 0.83, HasKV: true, Preemptions: 2, HasPreemptions: true,
		Tokens: 150, HasTokens: true,
	}
	for name, c := range map[string]struct {
		text string
		want Sample
	}{
		"V0, 0.6": {`# HELP vllm:num_requests_running Number of requests currently running on GPU.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 7.0
vllm:num_requests_swapped{model_name="m"} 1.0
vllm:num_requests_waiting{model_name="m"} 3.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.83
vllm:cpu_cache_usage_perc{model_name="m"} 0.99
vllm:num_preemptions_total{model_name="m"} 2.0
vllm:prompt_tokens_total{model_name="m"} 100.0
vllm:generation_tokens_total{model_name="m"} 50.0
`, all},
		"V1, 0.9: both names": {`vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.83
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.83
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="0",model_name="m"} 50.0
`, all},
		"V1, two engines; those who wait for something else left out": {`vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
vllm:num_requests_waiting{engine="0"} 9
vllm:num_requests_waiting{engine="1"} 1
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 6
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 1
vllm:kv_cache_usage_perc{engine="0"} 0.83
vllm:kv_cache_usage_perc{engine="1"} 0.1
vllm:num_preemptions_total{engine="0"} 2
vllm:num_preemptions_total{engine="1"} 0
vllm:prompt_tokens_total{engine="0"} 1.5e2
`, all},
		"no labels, tabs, timestamps, carriage returns": {"vllm:num_requests_running 7 1712345678901\r\n\tvllm:num_requests_waiting\t4\r\n" +
			"vllm:kv_cache_usage_perc{} .83 5\nvllm:num_preemptions_total 2\nvllm:generation_tokens_total 150\n", all},
		"braces and quotes in a label": {`vllm:num_requests_running{model_name="a}\" 9 {b\\"} 1` + "\n", Sample{Running: 1, HasRunning: true}},
		"zero is known":                {"vllm:num_requests_waiting 0\n", Sample{HasWaiting: true}},
		"absent":                       {"go_goroutines 5\n", Sample{}},
		"empty":                        {"", Sample{}},
		"not metrics at all":           {"<html>\n404\n</html>\n", Sample{}},
		"a torn last line":             {"vllm:num_requests_waiting 0\nvllm:num_requests_running 1", Sample{HasWaiting: true}},
		"NaN of one engine":            {"vllm:num_requests_waiting{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"1\"} NaN\n", Sample{}},
		"negative":                     {"vllm:num_requests_running -1\n", Sample{}},
		"infinite":                     {"vllm:num_requests_running +Inf\nvllm:num_requests_waiting 1e999\n", Sample{}},
		"a share that is none":         {"vllm:kv_cache_usage_perc 83\n", Sample{}},
		"no sum overflows": {
			strings.Repeat("vllm:num_requests_running 1e15\n", 10000),
			Sample{Running: maxCount, HasRunning: true},
		},
		"longer names": {"vllm:num_requests_waiting_total 5\nvllm:kv_cache_usage_percent 0.5\n", Sample{}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseMetrics([]byte(c.text))
			if err != nil || got != c.want {
				t.Errorf("got %+v, %v\nwant %+v", got, err, c.want)
			}
		})
	}
}

func TestParseMetricsRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"vllm:num_requests_running{a=\"b 7\n":                           "line 1: vllm:num_requests_running: labels without an end",
		"a 1\nvllm:num_requests_running\n":                              "line 2: vllm:num_requests_running: no value",
		"vllm:kv_cache_usage_perc x\n":                                  `line 1: vllm:kv_cache_usage_perc: value "x" is not a number`,
		"vllm:num_requests_waiting 1" + strings.Repeat("0", 900) + "\n": "is not a number",
	} {
		got, err := ParseMetrics([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) || got != (Sample{}) {
			t.Errorf("%.40q: %+v, %v; want an error with %q", text, got, err, want)
		}
		if err != nil && len(err.Error()) > 200 {
			t.Errorf("%.40q: an error of %d bytes", text, len(err.Error()))
		}
	}
	if _, err := ParseMetrics(make([]byte, MaxPage+1)); !errors.Is(err, ErrPageTooLong) {
		t.Errorf("a text beyond the bound: %v", err)
	}
}

func FuzzParseMetrics(f *testing.F) {
	f.Add([]byte("vllm:num_requests_running{engine=\"0\"} 7.0\nvllm:gpu_cache_usage_perc 0.5 12\n"))
	f.Add([]byte("vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 3\nvllm:num_requests_waiting 9\n"))
	f.Add([]byte("vllm:num_requests_swapped -1\nvllm:num_requests_waiting 1\n"))
	f.Add([]byte("vllm:num_preemptions_total{a=\"\\\"}\"} 1e300\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := ParseMetrics(text)
		if err != nil {
			if s != (Sample{}) {
				t.Fatalf("an error, and yet %+v", s)
			}
			return
		}
		for _, c := range []struct {
			v   int64
			has bool
		}{{s.Waiting, s.HasWaiting}, {s.Running, s.HasRunning}, {s.Preemptions, s.HasPreemptions}, {s.Tokens, s.HasTokens}} {
			if c.v < 0 || c.v > 2*maxCount || !c.has && c.v != 0 {
				t.Fatalf("%+v", s)
			}
		}
		if math.IsNaN(s.KVUsage) || s.KVUsage < 0 || s.KVUsage > 1 || !s.HasKV && s.KVUsage != 0 {
			t.Fatalf("%+v", s)
		}
		// Lines of other names, before or after, change nothing.
		again, err := ParseMetrics(append(append([]byte("# x\nother 1\n"), text...), "\nother{a=\"b\"} 2\n"...))
		torn := len(text) > 0 && text[len(text)-1] != '\n'
		if !torn && (err != nil || again != s) {
			t.Fatalf("%+v, %v beside other lines, %+v without", again, err, s)
		}
	})
}

// TestParseMetricsAllocates: a page is read once a second for each backend, and most of it is histograms.
func TestParseMetricsAllocates(t *testing.T) {
	text := []byte(strings.Repeat("vllm:time_to_first_token_seconds_bucket{engine=\"0\",le=\"0.1\",model_name=\"m\"} 5.0\n", 1000) +
		"vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 7.0\n")
	if n := testing.AllocsPerRun(20, func() {
		if s, err := ParseMetrics(text); err != nil || s.Running != 7 {
			t.Fatalf("%+v, %v", s, err)
		}
	}); n > 0 {
		t.Errorf("%v allocations a page, want none", n)
	}
}
