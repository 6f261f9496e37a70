package fakevllm

import (
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// poolUsage is what vLLM reports where nothing is generated.
type poolUsage struct {
	PromptTokens     int64 `json:"prompt_tokens"`
	TotalTokens      int64 `json:"total_tokens"`
	CompletionTokens int64 `json:"completion_tokens"`
}

// usageValue is the usage to report, or nil for none, or a lie.
func (c *call) usageValue(n int64) any {
	switch {
	case c.has(NoUsage):
		return nil
	case c.has(LieUsage):
		p := plan{lie: cmp.Or(c.faults[LieUsage], "negative")}
		v := jsontext.Value(p.appendCount(nil, n))
		return map[string]any{"prompt_tokens": v, "total_tokens": v, "completion_tokens": 0}
	}
	return poolUsage{PromptTokens: n, TotalTokens: n}
}

// pooled runs a request that generates nothing. answer makes its body once the
// request had its turn.
func (c *call) pooled(prompt int64, answer func() any) {
	var cached int64
	if !c.admit(prompt, &cached, 0) {
		return
	}
	if f := c.strikeAt(0); f.at >= 0 {
		c.strike(f.fault, raw(answer), nil)
		return
	}
	c.answerJSON(answer())
}

// raw lets a body that is a plain value break like a generated one.
type raw func() any

func (r raw) open(b []byte) []byte            { return b }
func (r raw) token(b []byte, _, _ int) []byte { return b }
func (r raw) close(b []byte) []byte           { return b }
func (r raw) body(b []byte) []byte {
	out, err := json.Marshal(r(), json.Deterministic(true))
	if err != nil {
		return b
	}
	return append(b, out...)
}

type poolRequest struct {
	Model      string         `json:"model"`
	Input      jsontext.Value `json:"input"`
	Messages   jsontext.Value `json:"messages"`
	Format     string         `json:"encoding_format"`
	Dimensions *int           `json:"dimensions"`
}

// readPool parses a body with an input, or with messages as vLLM's embeddings also
// take, and counts each entry.
func (c *call) readPool() (q poolRequest, model string, counts []int64, total int64, ok bool) {
	if !c.decode(&q) {
		return
	}
	if model, ok = c.model(q.Model); !ok {
		return
	}
	var e *apiError
	if q.Input == nil && q.Messages != nil {
		var n int64
		_, _, n, e = c.conversation(q.Messages, nil)
		counts = []int64{n}
	} else {
		counts, e = prompts(q.Input, "input")
	}
	if e == nil && q.Dimensions != nil && (*q.Dimensions < 1 || *q.Dimensions > maxDims) {
		e = badRequest("dimensions", "dimensions must lie between 1 and %d, got %d.", maxDims, *q.Dimensions)
	}
	if e == nil && q.Format != "" && q.Format != "float" && q.Format != "base64" {
		e = badRequest("encoding_format", "encoding_format must be float or base64, got %q.", q.Format)
	}
	for i, n := range counts {
		if e == nil && n > int64(c.s.cfg.ContextLen) {
			e = badRequest("input", "This model's maximum context length is %d tokens. However, entry %d of the input holds %d.", c.s.cfg.ContextLen, i, n)
		}
		total += n
	}
	if e != nil {
		c.refuse(e)
		return q, model, nil, 0, false
	}
	return q, model, counts, total, true
}

// vector is a unit vector drawn from a hash.
func vector(seed uint64, n int) []float32 {
	v := make([]float32, n)
	var norm float64
	for i := range v {
		x := 2*unit(mix(seed+uint64(i))) - 1
		v[i] = float32(x)
		norm += x * x
	}
	for i := range v {
		v[i] /= float32(math.Sqrt(max(norm, 1e-12)))
	}
	return v
}

func (c *call) vectors(q *poolRequest, count int, encode func(i int, v any) any) []any {
	dims := c.s.cfg.Dimensions
	if q.Dimensions != nil {
		dims = *q.Dimensions
	}
	seed := c.seed(q.Input, q.Messages)
	out := make([]any, count)
	for i := range out {
		v := vector(mix(seed+uint64(i)<<20), dims)
		if q.Format != "base64" {
			out[i] = encode(i, v)
			continue
		}
		b := make([]byte, 0, 4*len(v))
		for _, f := range v {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
		}
		out[i] = encode(i, base64.StdEncoding.EncodeToString(b))
	}
	return out
}

func (c *call) poolID(prefix string) string {
	return fmt.Sprintf("%s-%016x", prefix, mix(c.seed(c.body)))
}

func (c *call) embeddings() {
	q, model, counts, total, ok := c.readPool()
	if !ok {
		return
	}
	c.pooled(total, func() any {
		data := c.vectors(&q, len(counts), func(i int, v any) any {
			return map[string]any{"index": i, "object": "embedding", "embedding": v}
		})
		return withUsage(map[string]any{"id": c.poolID("embd"), "object": "list", "created": created, "model": model, "data": data}, c.usageValue(total))
	})
}

func withUsage(m map[string]any, usage any) map[string]any {
	if usage != nil {
		m["usage"] = usage
	}
	return m
}

func (c *call) pooling() {
	q, model, counts, total, ok := c.readPool()
	if !ok {
		return
	}
	c.pooled(total, func() any {
		data := c.vectors(&q, len(counts), func(i int, v any) any {
			return map[string]any{"index": i, "object": "pooling", "data": v}
		})
		return withUsage(map[string]any{"id": c.poolID("pool"), "object": "list", "created": created, "model": model, "data": data}, c.usageValue(total))
	})
}

func (c *call) classify() {
	q, model, counts, total, ok := c.readPool()
	if !ok {
		return
	}
	c.pooled(total, func() any {
		data := make([]any, len(counts))
		seed := c.seed(q.Input)
		for i := range data {
			p := unit(mix(seed + uint64(i)))
			label := "no"
			if p >= 0.5 {
				label = "yes"
			}
			data[i] = map[string]any{"index": i, "label": label, "probs": []float64{1 - p, p}, "num_classes": 2}
		}
		return withUsage(map[string]any{"id": c.poolID("classify"), "object": "list", "created": created, "model": model, "data": data}, c.usageValue(total))
	})
}

// texts reads a text or a list of texts.
func texts(v jsontext.Value, param string) ([]string, *apiError) {
	var one string
	if v.Kind() == '"' && json.Unmarshal(v, &one) == nil {
		return []string{one}, nil
	}
	var many []string
	if v == nil || json.Unmarshal(v, &many) != nil || len(many) == 0 || len(many) > maxInputs {
		return nil, badRequest(param, "%s must be a string or a list of 1 to %d strings.", param, maxInputs)
	}
	return many, nil
}

func (c *call) score() {
	var q struct {
		Model string         `json:"model"`
		A     jsontext.Value `json:"text_1"`
		B     jsontext.Value `json:"text_2"`
	}
	if !c.decode(&q) {
		return
	}
	model, ok := c.model(q.Model)
	if !ok {
		return
	}
	a, e := texts(q.A, "text_1")
	var b []string
	if e == nil {
		b, e = texts(q.B, "text_2")
	}
	if e == nil && len(a) != 1 && len(a) != len(b) {
		e = badRequest("text_1", "text_1 holds %d texts, text_2 %d: want one, or as many.", len(a), len(b))
	}
	if e != nil {
		c.refuse(e)
		return
	}
	var total int64
	data := make([]any, len(b))
	for i := range b {
		left := a[min(i, len(a)-1)]
		total += tokensOf(len(left)) + tokensOf(len(b[i]))
		data[i] = map[string]any{"index": i, "object": "score", "score": c.relevance(left, b[i])}
	}
	c.pooled(total, func() any {
		return withUsage(map[string]any{"id": c.poolID("score"), "object": "list", "created": created, "model": model, "data": data}, c.usageValue(total))
	})
}

func (c *call) relevance(a, b string) float64 {
	return unit(mix(hashString(hashString(c.s.cfg.Seed, a), b)))
}

func (c *call) rerank() {
	var q struct {
		Model     string   `json:"model"`
		Query     string   `json:"query"`
		Documents []string `json:"documents"`
		TopN      int      `json:"top_n"`
	}
	if !c.decode(&q) {
		return
	}
	model, ok := c.model(q.Model)
	if !ok {
		return
	}
	if len(q.Documents) == 0 || len(q.Documents) > maxInputs {
		c.refuse(badRequest("documents", "documents must be a list of 1 to %d strings.", maxInputs))
		return
	}
	type result struct {
		Index    int               `json:"index"`
		Document map[string]string `json:"document"`
		Score    float64           `json:"relevance_score"`
	}
	var total int64
	results := make([]result, len(q.Documents))
	for i, d := range q.Documents {
		total += tokensOf(len(q.Query)) + tokensOf(len(d))
		results[i] = result{i, map[string]string{"text": d}, c.relevance(q.Query, d)}
	}
	slices.SortStableFunc(results, func(a, b result) int { return cmp.Compare(b.Score, a.Score) })
	if q.TopN > 0 && q.TopN < len(results) {
		results = results[:q.TopN]
	}
	c.pooled(total, func() any {
		return withUsage(map[string]any{"id": c.poolID("rerank"), "model": model, "results": results}, c.usageValue(total))
	})
}
