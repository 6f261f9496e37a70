package fakevllm

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
)

func (c *call) models() {
	data := make([]any, len(c.s.cfg.Models))
	for i, m := range c.s.cfg.Models {
		data[i] = map[string]any{
			"id": m, "object": "model", "created": created, "owned_by": "vllm", "root": m, "parent": nil,
			"max_model_len": c.s.cfg.ContextLen,
		}
	}
	c.answerJSON(map[string]any{"object": "list", "data": data})
}

func (c *call) version() { c.answerJSON(map[string]string{"version": "0.0.0+fake"}) }

func (c *call) load() { c.answerJSON(map[string]int64{"server_load": c.s.Stats().InFlight}) }

func (c *call) health() {
	if c.s.health() == HealthDown {
		c.finish(Failed, "")
		c.reply(http.StatusServiceUnavailable, "", nil)
		return
	}
	c.finish(OK, "")
	c.reply(http.StatusOK, "", nil)
}

// manage answers like a server that obeyed; the record is what matters.
func (c *call) manage() {
	c.s.update(func(st *Stats) { c.rec.Management = true; st.Management++ })
	c.finish(OK, "")
	c.reply(http.StatusOK, "", nil)
}

func (c *call) unknown() {
	c.s.update(func(st *Stats) { st.Unknown++ })
	c.refuse(&apiError{status: http.StatusNotFound, msg: "Not Found"})
}

// metrics answers as it was told to.
func (c *call) metrics() {
	s := c.s
	s.mu.Lock()
	as := s.metricsAs
	b := s.frozen
	if as != MetricsFrozen || b == nil {
		b = s.exposition(as == MetricsOld)
	}
	if as == MetricsFrozen {
		s.frozen = b
	}
	s.mu.Unlock()
	switch as {
	case MetricsNone:
		c.refuse(&apiError{status: http.StatusNotFound, msg: "Not Found"})
		return
	case MetricsHang:
		c.hang("")
		return
	}
	c.finish(OK, "")
	c.reply(http.StatusOK, "text/plain; version=0.0.4; charset=utf-8", b)
}

// exposition is the counters under vLLM's names, in Prometheus's text format: the
// names of today, or those that the cache's had before. The caller holds the lock.
func (s *Server) exposition(old bool) []byte {
	st := s.snapshot()
	var sb strings.Builder
	label := fmt.Sprintf(`{engine="0",model_name=%q}`, s.cfg.Models[0])
	kv, cache := "vllm:kv_cache_usage_perc", "vllm:prefix_cache_"
	if old {
		label = fmt.Sprintf(`{model_name=%q}`, s.cfg.Models[0])
		kv, cache = "vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache_"
	}
	one := func(name, kind, help string, value any) {
		fmt.Fprintf(&sb, "# HELP %s %s\n# TYPE %s %s\n%s%s %v\n", name, help, name, kind, name, label, value)
	}
	one("vllm:num_requests_running", "gauge", "Requests that hold a slot.", st.Running)
	one("vllm:num_requests_waiting", "gauge", "Requests that wait for a slot.", st.Waiting)
	one(kv, "gauge", "Share of the cache that running requests may fill.", float64(s.kv)/float64(s.cfg.KVTokens))
	one("vllm:prompt_tokens_total", "counter", "Prompt tokens of ended requests.", st.PromptTokens)
	one("vllm:generation_tokens_total", "counter", "Generated tokens of ended requests.", st.OutputTokens)
	one(cache+"queries_total", "counter", "Prompt tokens looked up in the cache.", st.PromptTokens)
	one(cache+"hits_total", "counter", "Prompt tokens found in the cache.", st.CachedTokens)
	one("vllm:num_preemptions_total", "counter", "Always 0: nothing is preempted.", 0)
	fmt.Fprintf(&sb, "# HELP vllm:cache_config_info Shape of the cache.\n# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"%d\",num_gpu_blocks=\"%d\"} 1\n",
		s.cfg.BlockTokens, s.cfg.KVTokens/int64(s.cfg.BlockTokens))
	fmt.Fprintf(&sb, "# HELP vllm:request_success_total Ended requests.\n# TYPE vllm:request_success_total counter\n")
	outcomes := []Outcome{OK, Refused, Failed, Aborted}
	slices.Sort(outcomes)
	for _, o := range outcomes {
		fmt.Fprintf(&sb, "vllm:request_success_total%s,finished_reason=%q} %d\n", strings.TrimSuffix(label, "}"), o, st.Outcomes[o])
	}
	return []byte(sb.String())
}
