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

// metrics writes the counters under vLLM's names, in Prometheus's text format.
func (c *call) metrics() {
	c.s.mu.Lock()
	st, kv := c.s.snapshot(), c.s.kv
	c.s.mu.Unlock()
	var sb strings.Builder
	label := fmt.Sprintf(`{engine="0",model_name=%q}`, c.s.cfg.Models[0])
	one := func(name, kind, help string, value any) {
		fmt.Fprintf(&sb, "# HELP %s %s\n# TYPE %s %s\n%s%s %v\n", name, help, name, kind, name, label, value)
	}
	one("vllm:num_requests_running", "gauge", "Requests that hold a slot.", st.Running)
	one("vllm:num_requests_waiting", "gauge", "Requests that wait for a slot.", st.Waiting)
	one("vllm:kv_cache_usage_perc", "gauge", "Share of the slots' whole context that running requests may fill.",
		float64(kv)/(float64(c.s.cfg.Slots)*float64(c.s.cfg.ContextLen)))
	one("vllm:prompt_tokens_total", "counter", "Prompt tokens of ended requests.", st.PromptTokens)
	one("vllm:generation_tokens_total", "counter", "Generated tokens of ended requests.", st.OutputTokens)
	one("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache.", st.PromptTokens)
	one("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.", st.CachedTokens)
	one("vllm:num_preemptions_total", "counter", "Always 0: nothing is preempted.", 0)
	fmt.Fprintf(&sb, "# HELP vllm:cache_config_info Shape of the cache.\n# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"%d\"} 1\n",
		c.s.cfg.Slots*c.s.cfg.ContextLen/16)
	fmt.Fprintf(&sb, "# HELP vllm:request_success_total Ended requests.\n# TYPE vllm:request_success_total counter\n")
	outcomes := []Outcome{OK, Refused, Failed, Aborted}
	slices.Sort(outcomes)
	for _, o := range outcomes {
		fmt.Fprintf(&sb, "vllm:request_success_total{engine=\"0\",model_name=%q,finished_reason=%q} %d\n", c.s.cfg.Models[0], o, st.Outcomes[o])
	}
	c.finish(OK, "")
	c.reply(http.StatusOK, "text/plain; version=0.0.4; charset=utf-8", []byte(sb.String()))
}
