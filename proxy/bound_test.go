package proxy_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"headgate/proxy"
	"headgate/proxy/openai"
	"headgate/proxy/upstream"
)

// rates are prices in nano-dollars a token.
type rates struct{ input, cached, write, write1h, output, image int64 }

func (r *rates) cost(u openai.Usage, images, _ int64) int64 {
	plain := u.Input - u.CachedInput - u.CacheWrite
	return plain*r.input + u.CachedInput*r.cached + (u.CacheWrite-u.CacheWrite1h)*r.write + u.CacheWrite1h*r.write1h + u.Output*r.output + images*r.image
}

func (r *rates) upperBound(in, out, images, _ int64) int64 {
	return in*max(r.input, r.cached, r.write, r.write1h) + out*r.output + images*r.image
}

// glutton is a model server that takes all that a request lets it take: every byte of text
// is a token, templates print as much as they may, every answer is as long as its cap, and
// the dearest kind of input is reported.
type glutton struct {
	rates   *rates
	context int64
	served  int64 // nano-dollars
	calls   int
	cap     int64 // of the last request
	shows   int64 // tokens of a stream before it breaks off; -1: it does not
	unseen  int64 // tokens of each answer that nobody sees then
	near    bool  // the last one broke off, and had nothing hidden
}

type document = map[string]any

func (g *glutton) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var d document
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	if err != nil || dec.Decode(&d) != nil {
		http.Error(w, "no JSON", http.StatusBadRequest)
		return
	}
	in, prompts, images := g.prompt(r.URL.Path, d)
	n := max(number(d["n"]), number(d["best_of"]), 1)
	var out int64
	switch r.URL.Path {
	case "/v1/chat/completions":
		a, b := number(d["max_tokens"]), number(d["max_completion_tokens"])
		if g.cap = max(a, b); a <= 0 && b <= 0 {
			g.cap = g.most()
		}
		out = g.cap * n
	case "/v1/completions":
		switch v, there := d["max_tokens"]; {
		case !there:
			g.cap = 16
		case v == nil:
			g.cap = g.most()
		default:
			g.cap = max(number(v), 1)
		}
		out = g.cap * n * prompts
		if d["echo"] == true {
			out += in * n
		}
	case "/v1/responses", "/v1/messages":
		name := map[bool]string{true: "max_tokens", false: "max_output_tokens"}[r.URL.Path == "/v1/messages"]
		if g.cap = number(d[name]); g.cap <= 0 {
			g.cap = g.most()
		}
		out = g.cap
	}
	if g.near = false; d["stream"] == true && g.shows >= 0 && out > 0 {
		sequences, echoed := n*prompts, int64(0)
		if strings.HasSuffix(r.URL.Path, "messages") || r.URL.Path == "/v1/responses" {
			sequences = 1
		}
		if d["echo"] == true {
			echoed = in * n
		}
		hides := d["tools"] != nil || d["logit_bias"] != nil || d["use_beam_search"] == true || d["ignore_eos"] == true || number(d["best_of"]) > max(number(d["n"]), 1)
		g.breakOff(w, r.URL.Path, in, out-echoed, echoed, images, sequences, hides)
		return
	}
	g.answer(w, r.URL.Path, d["stream"] == true, in, out, images)
}

// breakOff shows some of out tokens, has made more, and goes away.
func (g *glutton) breakOff(w http.ResponseWriter, path string, in, out, echoed, images, sequences int64, hides bool) {
	shown := min(g.shows, out)
	made := min(shown+g.unseen*sequences, out)
	if g.near = !hides; hides {
		made = out
	}
	g.calls++
	g.served += g.rates.cost(openai.Usage{Input: in, Output: made + echoed}, images, 0)
	if path == "/v1/messages" { // may report dearer input than is plain, which the bound knows
		g.served += in * (max(g.rates.input, g.rates.cached, g.rates.write, g.rates.write1h) - g.rates.input)
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Break-Off", "1")
	for i := range shown {
		text := [...]string{`x`, ``, `\"`, `é`, `\n`}[i%5] // special tokens have no text
		switch path {
		case "/v1/messages":
			fmt.Fprintf(w, "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"%s\"}}\n\n", text)
		case "/v1/responses":
			fmt.Fprintf(w, "data: {\"type\":\"response.output_text.delta\",\"delta\":\"%s\"}\n\n", text)
		case "/v1/completions":
			fmt.Fprintf(w, "data: {\"choices\":[{\"index\":%d,\"text\":\"%s\"}]}\n\n", i%sequences, text)
		default:
			field := [...]string{"content", "reasoning_content", "refusal", "of_another_name"}[i/7%4]
			fmt.Fprintf(w, "data: {\"choices\":[{\"index\":%d,\"delta\":{\"%s\":\"%s\"}}]}\n\n", i%sequences, field, text)
			if i == 20 && sequences == 1 && g.rates.cached <= g.rates.input {
				fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":21}}\n\n", in)
			}
		}
	}
}

// most is what an answer without a cap takes.
func (g *glutton) most() int64 {
	if g.context > 0 {
		return g.context
	}
	return 1 << 19
}

func (g *glutton) answer(w http.ResponseWriter, path string, stream bool, in, out, images int64) {
	u := openai.Usage{Input: in, Output: out}
	var usage string
	switch r := g.rates; path {
	case "/v1/messages":
		plain, dearest := in, max(r.input, r.cached, r.write, r.write1h)
		switch {
		case r.input == dearest:
		case r.cached == dearest:
			plain, u.CachedInput = 0, in
		case r.write == dearest:
			plain, u.CacheWrite = 0, in
		default:
			plain, u.CacheWrite, u.CacheWrite1h = 0, in, in
		}
		usage = fmt.Sprintf(`{"input_tokens":%d,"cache_read_input_tokens":%d,"cache_creation_input_tokens":%d,"cache_creation":{"ephemeral_1h_input_tokens":%d},"output_tokens":%d}`,
			plain, u.CachedInput, u.CacheWrite, u.CacheWrite1h, out)
	default:
		if r.cached > r.input {
			u.CachedInput = in
		}
		usage = fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}`, in, out, u.CachedInput)
	}
	g.calls++
	g.served += g.rates.cost(u, images, 0)
	if !stream {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"id":"x%d","usage":%s}`, g.calls, usage)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	switch path {
	case "/v1/messages":
		fmt.Fprintf(w, "data: {\"type\":\"message_start\",\"message\":{\"usage\":%s}}\n\ndata: {\"type\":\"message_delta\",\"usage\":%s}\n\ndata: {\"type\":\"message_stop\"}\n\n", usage, usage)
	case "/v1/responses":
		fmt.Fprintf(w, "data: {\"type\":\"response.completed\",\"response\":{\"id\":\"x%d\",\"usage\":%s}}\n\n", g.calls, usage)
	default:
		fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":%s}\n\ndata: [DONE]\n\n", usage)
	}
}

// prompt is how many tokens the input becomes at most.
func (g *glutton) prompt(path string, d document) (tokens, prompts, images int64) {
	prompts = 1
	beyond := d["chat_template"] != nil || d["prompt_embeds"] != nil
	add := func(v any) {
		n, i, b := content(v)
		tokens, images, beyond = tokens+n, images+i, beyond || b
	}
	switch path {
	case "/v1/chat/completions", "/v1/messages", "/v1/responses":
		tokens = 256
		if d["tools"] != nil {
			tokens += 512
		}
		for _, f := range []string{"tools", "chat_template_kwargs", "documents"} {
			if d[f] != nil {
				tokens += printed(d[f], 0)
			}
		}
		for _, f := range []string{"system", "instructions", "messages", "input"} {
			add(d[f])
		}
	case "/v1/score":
		list, _ := d["text_2"].([]any)
		for _, doc := range list {
			tokens += 256 + int64(len(d["text_1"].(string))+len(doc.(string)))
		}
		return tokens, max(int64(len(list)), 1), 0
	default:
		v := d["prompt"]
		if path == "/v1/embeddings" {
			v = d["input"]
		}
		tokens, prompts = ids(v)
		tokens += 16 * prompts
		if path == "/v1/embeddings" {
			return tokens, prompts, 0
		}
	}
	if g.context > 0 && (tokens > g.context*prompts || beyond) {
		tokens = g.context * prompts
	}
	return tokens, prompts, images
}

// ids counts strings, ids, and arrays of either.
func ids(v any) (tokens, prompts int64) {
	switch v := v.(type) {
	case string:
		return int64(len(v)), 1
	case []any:
		if len(v) > 0 {
			if _, ok := v[0].(json.Number); ok {
				return int64(len(v)), 1
			}
		}
		for _, e := range v {
			n, p := ids(e)
			tokens, prompts = tokens+n, prompts+p
		}
	}
	return tokens, max(prompts, 1)
}

// content counts what messages, items and parts say.
func content(v any) (tokens, images int64, beyond bool) {
	switch v := v.(type) {
	case string:
		return int64(len(v)), 0, false
	case []any:
		for _, e := range v {
			n, i, b := content(e)
			tokens, images, beyond = tokens+n, images+i, beyond || b
		}
	case document:
		switch typ, _ := v["type"].(string); typ {
		case "image_url", "image", "input_image":
			return 16 << 10, 1, false
		case "input_audio":
			return 32 << 10, 0, false
		case "video_url":
			return 0, 0, true
		}
		tokens = 16
		for name, m := range v {
			switch name {
			case "tool_calls", "input":
				tokens += printed(m, 0)
				continue
			case "arguments": // read and printed anew
				var args any
				dec := json.NewDecoder(strings.NewReader(m.(string)))
				dec.UseNumber()
				if dec.Decode(&args) == nil {
					tokens += printed(args, -1)
				}
				continue
			}
			n, i, b := content(m)
			tokens, images, beyond = tokens+n, images+i, beyond || b
		}
	}
	return tokens, images, beyond
}

// printed is the length of v as Python's json.dumps writes it, with an indentation of four
// from depth on and all but ASCII escaped; without where depth is negative.
func printed(v any, depth int) int64 {
	indent := func(d int) int64 {
		if depth < 0 {
			return 1 // the blank behind a comma
		}
		return int64(1 + 4*d)
	}
	inner := depth + 1
	if depth < 0 {
		inner = depth
	}
	n := int64(2)
	switch v := v.(type) {
	case document:
		for name, m := range v {
			n += indent(inner) + printed(name, inner) + 3 + printed(m, inner)
		}
		return n + indent(depth)
	case []any:
		for _, m := range v {
			n += indent(inner) + 1 + printed(m, inner)
		}
		return n + indent(depth)
	case string:
		for _, c := range v {
			switch {
			case c == '"' || c == '\\' || c == '\n' || c == '\t' || c == '\r' || c == '\b' || c == '\f':
				n += 2
			case c < 0x20 || c >= 0x7f && c <= 0xffff:
				n += 6
			case c > 0xffff:
				n += 12
			default:
				n++
			}
		}
		return n
	case json.Number:
		if f, err := v.Float64(); err == nil && strings.ContainsAny(string(v), ".eE") && math.Abs(f) < 1e16 {
			return int64(len(strconv.FormatFloat(f, 'f', -1, 64)) + 2)
		}
		return int64(len(v))
	case nil:
		return 4
	}
	return 5
}

func number(v any) int64 {
	n, _ := v.(json.Number)
	f, _ := n.Float64() // small enough to be exact
	return int64(f)
}

var (
	texts = rapid.OneOf(
		rapid.StringOfN(rapid.RuneFrom([]rune("ab \n\t\"\\{}[],:<é你😀\u2028\u0001\x7f")), 0, 60, -1),
		rapid.Map(rapid.IntRange(0, 4000), func(n int) string { return strings.Repeat("x", n) }),
	)
	scalars = rapid.OneOf(
		rapid.Map(texts, func(s string) any { return s }),
		rapid.SampledFrom([]any{json.Number("1e15"), json.Number("1"), json.Number("-0.5"), json.Number("9e15"), nil, true, false}),
	)
	caps = rapid.SampledFrom([]any{nil, json.Number("0"), json.Number("1"), json.Number("5"), json.Number("3.0e1"), json.Number("1000"), json.Number("100000"), json.Number("1000000000")})
)

// tree draws JSON of some depth.
func tree(t *rapid.T, depth int) any {
	switch kind := rapid.IntRange(0, 4).Draw(t, "kind"); {
	case kind == 0 && depth > 0:
		o := document{}
		for range rapid.IntRange(0, 4).Draw(t, "members") {
			o[rapid.StringMatching(`[a-zé"]{1,6}`).Draw(t, "name")] = tree(t, depth-1)
		}
		return o
	case kind == 1 && depth > 0:
		a := []any{}
		for range rapid.IntRange(0, 5).Draw(t, "elements") {
			a = append(a, tree(t, depth-1))
		}
		return a
	case kind == 2:
		a := make([]any, rapid.IntRange(0, 400).Draw(t, "many"))
		for i := range a {
			a[i] = json.Number("1e15") // which is printed in full
		}
		return a
	}
	return scalars.Draw(t, "scalar")
}

func encode(v any) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(err)
	}
	return b.String()
}

// parts draws the content of a message.
func parts(t *rapid.T, path string) any {
	if rapid.Bool().Draw(t, "plain") {
		return texts.Draw(t, "text")
	}
	list := []any{}
	for range rapid.IntRange(0, 3).Draw(t, "parts") {
		switch kind := rapid.IntRange(0, 9).Draw(t, "part"); {
		case kind == 0 && path == "/v1/messages":
			list = append(list, document{"type": "image", "source": document{"type": "base64", "media_type": "image/png", "data": strings.Repeat("A", 500)}})
		case kind == 0:
			list = append(list, document{"type": "image_url", "image_url": document{"url": "data:AAAA"}})
		case kind == 1 && path == "/v1/chat/completions":
			list = append(list, document{"type": "input_audio", "input_audio": document{"data": "AAAA"}})
		case kind == 2 && path == "/v1/chat/completions":
			list = append(list, document{"type": "video_url", "video_url": document{"url": "http://x"}})
		case kind == 3 && path == "/v1/messages":
			list = append(list, document{"type": "tool_use", "id": "t", "name": "f", "input": tree(t, 3)})
		default:
			list = append(list, document{"type": "text", "text": texts.Draw(t, "text")})
		}
	}
	return list
}

// request draws one of a route.
func request(t *rapid.T, path string) document {
	d := document{"model": "m"}
	maybe := func(name string, v func() any) {
		if rapid.Bool().Draw(t, name) {
			d[name] = v()
		}
	}
	cap := func() any { return caps.Draw(t, "cap") }
	few := func() any { return json.Number(strconv.Itoa(rapid.IntRange(1, 4).Draw(t, "few"))) }
	conversation := func(name string) {
		list := []any{}
		for range rapid.IntRange(0, 4).Draw(t, "messages") {
			m := document{"role": "user", "content": parts(t, path)}
			switch {
			case path == "/v1/chat/completions" && rapid.Bool().Draw(t, "calls"):
				m["tool_calls"] = []any{document{"id": "c", "type": "function", "function": document{"name": "f", "arguments": encode(tree(t, 4))}}}
			case path == "/v1/responses" && rapid.Bool().Draw(t, "call"):
				m = document{"type": "function_call", "name": "f", "arguments": encode([]any{tree(t, 4)})}
			}
			list = append(list, m)
		}
		d[name] = list
		maybe("tools", func() any {
			return []any{document{"type": "function", "name": "f", "function": tree(t, 4)}, document{"parameters": tree(t, 6)}}
		})
	}
	switch path {
	case "/v1/chat/completions":
		conversation("messages")
		maybe("max_tokens", cap)
		maybe("max_completion_tokens", cap)
		maybe("n", few)
		maybe("best_of", few)
		if rapid.IntRange(0, 3).Draw(t, "bias") == 0 {
			d["logit_bias"] = document{"1": json.Number("100")}
		}
		maybe("chat_template_kwargs", func() any { return document{"x": tree(t, 3)} })
		maybe("logprobs", func() any { return true })
		if rapid.IntRange(0, 9).Draw(t, "template") == 0 {
			d["chat_template"] = "{% for x in range(1000000) %}x{% endfor %}"
		}
	case "/v1/messages":
		conversation("messages")
		maybe("max_tokens", cap)
		maybe("system", func() any { return parts(t, "") })
	case "/v1/responses":
		conversation("input")
		maybe("max_output_tokens", cap)
		maybe("instructions", func() any { return texts.Draw(t, "instructions") })
	case "/v1/completions":
		d["prompt"] = prompt(t)
		maybe("max_tokens", cap)
		maybe("n", few)
		maybe("best_of", few)
		maybe("echo", func() any { return true })
		maybe("use_beam_search", func() any { return true })
		maybe("ignore_eos", func() any { return true })
		maybe("min_tokens", few)
	case "/v1/embeddings":
		d["input"] = prompt(t)
	case "/v1/score":
		d["text_1"] = texts.Draw(t, "query")
		d["text_2"] = []any{texts.Draw(t, "a"), texts.Draw(t, "b"), texts.Draw(t, "c")}
	}
	if path != "/v1/embeddings" && path != "/v1/score" {
		maybe("stream", func() any { return true })
	}
	return d
}

// prompt draws text, ids, or several of either.
func prompt(t *rapid.T) any {
	numbers := func() any {
		a := []any{}
		for range rapid.IntRange(1, 20).Draw(t, "ids") {
			a = append(a, json.Number(strconv.Itoa(rapid.IntRange(0, 200_000).Draw(t, "id"))))
		}
		return a
	}
	switch rapid.IntRange(0, 3).Draw(t, "prompt") {
	case 0:
		return texts.Draw(t, "text")
	case 1:
		return []any{texts.Draw(t, "text"), texts.Draw(t, "text"), texts.Draw(t, "text")}
	case 2:
		return numbers()
	}
	return []any{numbers(), numbers()}
}

// TestStrictIsNeverPassed: whatever a request allows a backend to take, it costs no more
// than was reserved, and all requests together no more than the budget has.
func TestStrictIsNeverPassed(t *testing.T) {
	g := &glutton{}
	m := model("m", "vllm")
	m.Cost = func(u openai.Usage, images, audio int64) int64 { return g.rates.cost(u, images, audio) }
	m.UpperBound = func(in, out, images, audio int64) int64 { return g.rates.upperBound(in, out, images, audio) }
	b := strict(budget("all", 0))
	w := bubbled(t, setup{
		backends: []upstream.Backend{{Name: "vllm", Kind: upstream.OpenAI}}, // who bills what he took
		models:   []*proxy.Model{m}, around: func(http.Handler) http.Handler { return g }, prefilter: edge1000(),
		change: func(c *proxy.Caller) { c.Budgets = []proxy.Budget{b} },
	})
	statuses := map[int]int{}
	broke, near := 0, 0
	lefts := rapid.SampledFrom([]int64{0, 1e4, 1e5, 1e6, 3e6, 1e7, 2e7, 3e7, 5e7, 1e8, 3e8, 1e9, 1e10, 1e12})
	check := func(t *rapid.T) {
		price := rapid.Int64Range(0, 2000)
		g.rates = &rates{price.Draw(t, "input"), price.Draw(t, "cached"), price.Draw(t, "write"), price.Draw(t, "write1h"), price.Draw(t, "output"), price.Draw(t, "image")}
		g.context = rapid.SampledFrom([]int64{0, 512, 8192, 131_072}).Draw(t, "context")
		m.Context = g.context
		g.shows, g.unseen = rapid.Int64Range(-40, 200).Draw(t, "shows"), rapid.Int64Range(0, 64).Draw(t, "unseen")
		served, before := g.served, w.till.spent("all")
		// What is left is anything between nothing and more than is needed.
		w.caller.Budgets[0].Amount = before + lefts.Draw(t, "left")
		path := rapid.SampledFrom([]string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score"}).Draw(t, "path")
		body := encode(request(t, path))
		calls := g.calls
		a := w.handle(call{path: path, body: body})
		statuses[a.status]++
		if a.status != 200 && (a.status != 502 || g.calls == calls) { // a stream that breaks off before its first event is a 502
			if g.calls != calls || a.status != 429 && a.status != 400 {
				t.Fatalf("%d: %s", a.status, a.body)
			}
			return
		}
		bill := w.till.bill(w.t)
		if cost := g.served - served; bill.Cost < cost {
			t.Fatalf("the backend took %d, charged %d, reserved %d\n%s\n%s", cost, bill.Cost, bill.Reserved, body, a.body)
		}
		if g.near {
			broke++
			if bill.Cost < bill.Reserved {
				near++
			}
			if bill.Usage.Known || bill.Cost < bill.Reserved && g.rates.upperBound(bill.Usage.Input, bill.Usage.Output, 0, 0) < bill.Cost-g.rates.image*int64(bill.Images) {
				t.Fatalf("charged %d for %+v", bill.Cost, bill.Usage)
			}
		} else if cost := g.served - served; !bill.Usage.Known && bill.Cost != bill.Reserved || bill.Usage.Known && bill.Cost != cost || cost > bill.Reserved {
			t.Fatalf("the backend took %d, charged %d, reserved %d, cap %d\n%s", cost, bill.Cost, bill.Reserved, g.cap, body)
		}
		if c := bill.Charges[0]; bill.Cost > c.Granted || c.Spent > c.Budget.Amount {
			t.Fatalf("charged %d of %d; spent %d of %d", bill.Cost, c.Granted, c.Spent, c.Budget.Amount)
		}
	}
	for range 20 {
		rapid.Check(t, check)
	}
	if n := w.metric("headgate_strict_overruns_total"); n != 0 {
		t.Errorf("%v overruns", n)
	}
	if clamped := w.metric("headgate_budget_decisions_total", "outcome", "clamped"); statuses[200] < 100 || statuses[429] < 20 || clamped < 5 {
		t.Errorf("%v, %v clamped: nothing was shown", statuses, clamped)
	}
	if broke < 20 || near < 10 {
		t.Errorf("%d streams broke off, %d cost less than was reserved: nothing was shown", broke, near)
	}
}

// TestAStreamThatItsClientLeft costs, under a strict budget, what was seen of it and what the backend may have made before
// it noticed: never less than that, and near it. What its usage line says is what it costs.
func TestAStreamThatItsClientLeft(t *testing.T) {
	const shown, more = 91, 64
	gone, next := make(chan struct{}), make(chan struct{}, 1)
	m := model("m", "vllm")
	m.Context = 32768
	handler := func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			for range shown {
				select {
				case <-next:
				case <-r.Context().Done():
				}
				fmt.Fprint(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" four\"}}]}\n\n")
				w.(http.Flusher).Flush()
			}
			<-r.Context().Done()
			gone <- struct{}{}
		})
	}
	for _, c := range []struct {
		name, extra string
		whole       bool
	}{
		{"shown", ``, false},
		{"a stop", `,"stop":["END"]`, false},
		{"tools", `,"tools":[{"type":"function","function":{"name":"f"}}]`, true},
		{"no reasoning", `,"include_reasoning":false`, true},
		{"reasoning", `,"include_reasoning":true`, false},
		{"beams", `,"use_beam_search":true,"n":2`, true},
		{"best of", `,"best_of":2`, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, setup{models: []*proxy.Model{m}, around: handler, change: budgeted(strict(budget("all", dollar)))})
			ctx, leave := context.WithCancel(patience(t))
			defer leave()
			next <- struct{}{}
			resp, err := w.client.Do(w.request(ctx, call{body: `{"model":"m","messages":[{"role":"user","content":"Hi"}],"stream":true` + c.extra + `}`}))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			lines := bufio.NewScanner(resp.Body)
			for n := 0; n < shown && lines.Scan(); {
				if strings.HasPrefix(lines.Text(), "data: ") {
					if n++; n < shown {
						next <- struct{}{}
					}
				}
			}
			leave()
			<-gone
			w.settled()
			b := w.till.bill(t)
			served := int64(5*priceInput + (shown+more)*priceOutput)
			if b.Outcome != "client_gone" || b.Cost < served || b.Usage.Known {
				t.Errorf("%s: charged %d for %d", b.Outcome, b.Cost, served)
			}
			if c.whole != (b.Cost == b.Reserved) || !c.whole && b.Cost > 5*served {
				t.Errorf("charged %d of %d for %d", b.Cost, b.Reserved, served)
			}
			if got := b.Usage.Input*priceInput + b.Usage.Output*priceOutput; got != b.Cost {
				t.Errorf("%+v cost %d, and %d is charged", b.Usage, got, b.Cost)
			}
		})
	}
}

// TestCapsReachTheBackend: under a strict budget every answer has a cap, and no other byte
// of the body changes; without one none is added.
func TestCapsReachTheBackend(t *testing.T) {
	var sent string
	m := model("m", "vllm")
	m.Context, m.Upstream = 4096, "m"
	w := newWorld(t, setup{models: []*proxy.Model{m}, change: budgeted(strict(budget("all", dollar))), around: func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			sent = string(b)
			r.Body = io.NopCloser(bytes.NewReader(b))
			h.ServeHTTP(w, r)
		})
	}})
	for _, c := range []struct{ path, body, want string }{
		{"/v1/completions", `{"model":"m","prompt":"x"}`, `{"max_tokens":16,"model":"m","prompt":"x"}`},
		{"/v1/completions", `{"model":"m","prompt":"x","max_tokens":null}`, `{"model":"m","prompt":"x","max_tokens":4036}`}, // what 4096 leave of 44 bytes and 16 around them
		{"/v1/completions", `{"model":"m","prompt":"x","max_tokens":9}`, `{"model":"m","prompt":"x","max_tokens":9}`},
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}]}`, `{"max_tokens":3752,"model":"m","messages":[{"role":"user","content":"x"}]}`},
		{"/v1/chat/completions", `{"model":"m","max_completion_tokens":99999,"messages":[{"role":"user","content":"x"}]}`, `{"model":"m","max_completion_tokens":4096,"messages":[{"role":"user","content":"x"}]}`},
		{"/v1/responses", `{"model":"m","input":"x", "store":false}`, `{"max_output_tokens":3784,"model":"m","input":"x", "store":false}`},
		{"/v1/messages", `{"model":"m","max_tokens":7,"messages":[{"role":"user","content":"x"}]}`, `{"model":"m","max_tokens":7,"messages":[{"role":"user","content":"x"}]}`},
		{"/v1/embeddings", `{"model":"m","input":"x"}`, `{"model":"m","input":"x"}`},
	} {
		w.do(call{path: c.path, body: c.body})
		if sent != c.want {
			t.Errorf("%s: sent %s\nwant %s", c.path, sent, c.want)
		}
		w.caller.Budgets[0].Strict = false
		w.do(call{path: c.path, body: c.body})
		if sent != c.body {
			t.Errorf("%s: without a strict budget %s was sent", c.path, sent)
		}
		w.caller.Budgets[0].Strict = true
	}
}

// TestWhatAResponseGoesOnFrom counts as the backend reported it; where it did not, as the
// whole context.
func TestWhatAResponseGoesOnFrom(t *testing.T) {
	m := model("m", "vllm")
	w := newWorld(t, setup{models: []*proxy.Model{m}, change: budgeted(strict(budget("all", dollar)))})
	first := func(h http.Header) (id string, used int64) {
		a := w.do(call{path: "/v1/responses", body: `{"model":"m","input":"x","max_output_tokens":3}`, header: h}).want(t, 200)
		var r struct{ ID string }
		if err := json.Unmarshal([]byte(a.body), &r); err != nil || r.ID == "" {
			t.Fatalf("%v: %s", err, a.body)
		}
		w.settled()
		u := w.till.bill(t).Usage
		return r.ID, u.Input + u.Output
	}
	again := func(id string) call {
		return call{path: "/v1/responses", body: `{"model":"m","input":"x","max_output_tokens":3,"previous_response_id":"` + id + `"}`}
	}
	id, used := first(nil)
	c := again(id)
	w.do(c).want(t, 200)
	w.settled()
	if got, want := w.till.bill(t).Reserved, (int64(len(c.body))+used+256+16)*priceInput+3*priceOutput; got != want {
		t.Errorf("%d reserved, want %d", got, want)
	}
	id, _ = first(fault("nousage"))
	if a := w.do(again(id)).refused(t, 400, "invalid_request"); a.field("param") != "previous_response_id" {
		t.Error(a.body)
	}
	m.Context = 8192
	w.do(again(id)).want(t, 200)
	w.settled()
	if got := w.till.bill(t).Reserved; got != 8192*priceInput+3*priceOutput {
		t.Errorf("%d reserved", got)
	}
}

// TestWhatStrictCannotBoundIsRefused: where the context is not stated, or a server may go
// round as often as it likes.
func TestWhatStrictCannotBoundIsRefused(t *testing.T) {
	known := model("known", "vllm")
	known.Context = 8192
	w := newWorld(t, setup{models: []*proxy.Model{model("m", "vllm"), known}, prefilter: edge1000(), limits: []proxy.Limit{limit(proxy.Requests, 100)}, change: budgeted(strict(budget("all", dollar)))})
	video := `{"model":"m","messages":[{"role":"user","content":[{"type":"video_url","video_url":{"url":"http://x"}}]}],"max_tokens":5}`
	if a := w.do(call{body: video}).refused(t, 400, "invalid_request"); a.field("param") != "video_url" {
		t.Error(a.body)
	}
	w.settled()
	if n := w.spent(w.caller.Limits[0]); n != 1 || len(w.till.bills) != 0 {
		t.Errorf("%d requests spent, %d bills", n, len(w.till.bills))
	}
	w.do(call{body: strings.Replace(video, `"m"`, `"known"`, 1)})
	w.settled()
	if b := w.till.bill(t); b.Reserved != 8192*priceInput+5*priceOutput {
		t.Errorf("%+v", b)
	}
	tools := `{"model":"known","input":"x","tools":[{"type":"web_search_preview"}]}`
	if a := w.do(call{path: "/v1/responses", body: tools}).refused(t, 400, "invalid_request"); a.field("param") != "tools" {
		t.Error(a.body)
	}
	w.caller.Budgets[0].Strict = false
	w.do(call{path: "/v1/responses", body: tools}).want(t, 200)
}
