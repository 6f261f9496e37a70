package fakevllm

import (
	"bytes"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// created is the timestamp of every answer: they are a function of the request.
const created = 1_767_225_600

// words are the vocabulary of prose. None needs escaping in JSON; many hold
// characters of two, three and four bytes, so that careless splitting shows.
func words() []string {
	return []string{
		"the ", "gate ", "größe ", "naïve ", "river ", "日本 ", "écoute ", "🚀 ", "stone ", "数据 ", "señor ", "light ", "Ωμέγα ", "über ", "and ", "of ",
		"мир ", "water ", "façade ", "한국 ", "slow ", "🌍 ", "quiet ", "word ", "élan ", "to ", "a ", "in ", "smörgås ", "open ", "東京 ", "key ",
		"every ", "hour ", "žába ", "night ", "✓ ", "green ", "piñata ", "moves ", "back ", "çay ", "under ", "🎈 ", "it ", "is ", "not ", "here ",
		"leaf ", "çok ", "north ", "ทะเล ", "paper ", "clock ", "ночь ", "door ", "rain ", "€5 ", "small ", "we ", "see ", "₂O ", "last ", "first ",
	}
}

// mix is the finalizer of splitmix64: every bit of x moves every bit of the result.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// unit maps a hash to [0, 1).
func unit(x uint64) float64 { return float64(x>>11) / (1 << 53) }

// hashBytes is 64-bit FNV-1a started from h.
func hashBytes(h uint64, b []byte) uint64 {
	h ^= 14695981039346656037
	for _, c := range b {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return h
}

func hashString(h uint64, s string) uint64 { return hashBytes(h, []byte(s)) }

// caps are what the dialects share in limiting an answer.
type caps struct {
	n      int64  // choices for each prompt
	most   *int64 // tokens, nil for no cap
	param  string // which member gave it
	prompt int64
}

// choice is one of the answers to a request: prose made word by word, or prepared
// pieces of JSON.
type choice struct {
	seed   uint64
	n      int64 // tokens
	pieces []string
	finish string
	tool   *toolCall // the pieces are its arguments
}

type toolCall struct{ id, name string }

// plan is an answer decided but not yet given.
type plan struct {
	words          []string
	id, model      string
	prompt, cached int64
	choices        []choice
	stream         bool
	includeUsage   bool
	continuous     bool
	logprobs       int    // -1: none; else how many alternatives
	contentType    string // without streaming
	lie            string // a way to lie about usage, "none" to leave it out, "" for the truth
}

func (p *plan) token(k, i int) string {
	ch := &p.choices[k]
	if ch.pieces != nil {
		return ch.pieces[i]
	}
	return p.words[mix(ch.seed+uint64(i))%uint64(len(p.words))]
}

// text is the whole of a choice.
func (p *plan) text(k int) string {
	var sb strings.Builder
	for i := range int(p.choices[k].n) {
		sb.WriteString(p.token(k, i))
	}
	return sb.String()
}

func (p *plan) output() int64 {
	var n int64
	for i := range p.choices {
		n += p.choices[i].n
	}
	return n
}

// appendCount writes a usage figure, as it is or as a lie.
func (p *plan) appendCount(b []byte, n int64) []byte {
	switch p.lie {
	case "negative":
		return strconv.AppendInt(b, -n-1, 10)
	case "huge":
		return strconv.AppendInt(b, math.MaxInt64-n, 10)
	case "string":
		return append(strconv.AppendInt(append(b, '"'), n, 10), '"')
	case "float":
		return append(strconv.AppendInt(b, n, 10), ".5"...)
	}
	return strconv.AppendInt(b, n, 10)
}

func (p *plan) usage() bool { return p.lie != "none" }

// plan decides an answer for each of count prompts. seed is what the text is a
// function of; lim.prompt is what all prompts cost together. It answers and
// returns nil when the limits make no sense.
func (c *call) plan(model string, seed uint64, lim caps, count int, stream bool) *plan {
	if e := c.checkCaps(lim, count); e != nil {
		c.refuse(e)
		return nil
	}
	cfg := &c.s.cfg
	p := &plan{
		words: c.s.words, model: model, prompt: lim.prompt, stream: stream, logprobs: -1, contentType: "application/json",
		id:     fmt.Sprintf("%016x%016x", mix(seed), mix(seed+1)),
		cached: int64(float64(lim.prompt) * cfg.CachedFraction),
	}
	n, finish := min(int64(cfg.DefaultOutput), int64(cfg.ContextLen)-lim.prompt), "stop"
	if lim.most != nil {
		n, finish = *lim.most, "length"
	}
	if want, err := strconv.ParseInt(c.r.Header.Get("X-Fake-Output"), 10, 64); err == nil && want >= 0 && want < n {
		n, finish = want, "stop"
	}
	p.choices = make([]choice, count*int(lim.n))
	for k := range p.choices {
		p.choices[k] = choice{seed: mix(seed ^ uint64(k)<<32), n: n, finish: finish}
	}
	switch {
	case c.has(NoUsage):
		p.lie = "none"
	case c.has(LieUsage):
		if p.lie = c.faults[LieUsage]; p.lie == "" {
			p.lie = [2]string{"negative", "huge"}[mix(seed)&1]
		}
	}
	p.continuous = c.has(ContUsage)
	c.s.update(func(*Stats) { c.rec.Stream = stream })
	return p
}

func (c *call) checkCaps(lim caps, count int) *apiError {
	limit := int64(c.s.cfg.ContextLen)
	switch {
	case lim.n < 1 || lim.n > maxChoices:
		return badRequest("n", "n must lie between 1 and %d, got %d.", maxChoices, lim.n)
	case int64(count)*lim.n > maxChoices:
		return badRequest("prompt", "%d prompts with n = %d give more than %d choices.", count, lim.n, maxChoices)
	case lim.most != nil && *lim.most < 1:
		return badRequest(lim.param, "%s must be at least 1, got %d.", lim.param, *lim.most)
	case lim.most == nil && lim.prompt >= limit:
		return badRequest("", "This model's maximum context length is %d tokens. However, the messages hold %d tokens.", limit, lim.prompt)
	case lim.most != nil && (*lim.most > limit || lim.prompt+*lim.most > limit):
		return badRequest(lim.param, "This model's maximum context length is %d tokens. However, you requested %d in the completion beside %d in the messages.",
			limit, *lim.most, lim.prompt)
	case lim.most != nil && *lim.most > maxOutput:
		return badRequest(lim.param, "%s must not exceed %d here.", lim.param, maxOutput)
	}
	return nil
}

// prepare replaces the words of every choice by prepared text, cut off at the cap.
func (p *plan) prepare(text string, finish string, tool *toolCall, most *int64) {
	all := pieces(text)
	if most != nil && int64(len(all)) > *most {
		all, finish = all[:*most], "length"
	}
	for k := range p.choices {
		ch := &p.choices[k]
		ch.pieces, ch.n, ch.finish = all, int64(len(all)), finish
		if tool != nil {
			t := *tool
			t.id = fmt.Sprintf("%s%d", tool.id, k)
			ch.tool = &t
		}
	}
}

// tool is a function offered by a request, in any of the three dialects.
type tool struct {
	Type        string         `json:"type"`
	Name        string         `json:"name"`
	Parameters  jsontext.Value `json:"parameters"`
	InputSchema jsontext.Value `json:"input_schema"`
	Function    struct {
		Name       string         `json:"name"`
		Parameters jsontext.Value `json:"parameters"`
	} `json:"function"`
}

func (t *tool) name() string { return t.Name + t.Function.Name }

func (t *tool) schema() jsontext.Value {
	for _, s := range []jsontext.Value{t.Parameters, t.InputSchema, t.Function.Parameters} {
		if s != nil {
			return s
		}
	}
	return nil
}

// pickTool says which tool the answer calls: the one named; or, for "auto" (unless
// a result was just handed in), "required" and "any", one drawn by the seed; or none.
func pickTool(tools []tool, toolChoice jsontext.Value, seed uint64, resultGiven bool) (*tool, *apiError) {
	mode, name := "auto", ""
	switch toolChoice.Kind() {
	case '"':
		mode = strings.Trim(string(toolChoice), `"`)
	case '{':
		var t struct {
			Type     string `json:"type"`
			Name     string `json:"name"`
			Function struct {
				Name string `json:"name"`
			} `json:"function"`
		}
		if err := json.Unmarshal(toolChoice, &t, jsontext.AllowDuplicateNames(true)); err != nil {
			return nil, badRequest("tool_choice", "The tool_choice cannot be read: %v", err)
		}
		mode, name = t.Type, t.Name+t.Function.Name
	}
	if len(tools) == 0 {
		if mode != "auto" && mode != "none" {
			return nil, badRequest("tool_choice", "A tool_choice needs tools.")
		}
		return nil, nil
	}
	switch {
	case mode == "none" || mode == "auto" && resultGiven:
		return nil, nil
	case name == "":
		return &tools[seed%uint64(len(tools))], nil
	}
	for i := range tools {
		if tools[i].name() == name {
			return &tools[i], nil
		}
	}
	return nil, badRequest("tool_choice", "The tool %q is not among the tools.", name)
}

// schema is the part of JSON Schema that steers generation.
type schema struct {
	Type       jsontext.Value            `json:"type"`
	Properties jsontext.Value            `json:"properties"`
	Required   []string                  `json:"required"`
	Items      jsontext.Value            `json:"items"`
	Enum       []jsontext.Value          `json:"enum"`
	Const      jsontext.Value            `json:"const"`
	AnyOf      []jsontext.Value          `json:"anyOf"`
	OneOf      []jsontext.Value          `json:"oneOf"`
	Ref        string                    `json:"$ref"`
	Defs       map[string]jsontext.Value `json:"$defs"`
}

// generate writes a value that fits a schema: the required members, or all where
// none is required; the first of an enum or of alternatives; one array element.
// What it cannot read becomes an empty object.
func generate(b []byte, raw jsontext.Value, defs map[string]jsontext.Value, seed uint64, depth int) []byte {
	var sc schema
	if json.Unmarshal(raw, &sc, jsontext.AllowDuplicateNames(true)) != nil || depth > maxDepth {
		return append(b, `{}`...)
	}
	if sc.Defs != nil {
		defs = sc.Defs
	}
	next := func(v jsontext.Value, salt uint64) []byte { return generate(b, v, defs, mix(seed+salt), depth+1) }
	switch {
	case sc.Ref != "":
		return next(defs[sc.Ref[strings.LastIndexByte(sc.Ref, '/')+1:]], 1)
	case sc.Const != nil:
		return append(b, sc.Const...)
	case len(sc.Enum) > 0:
		return append(b, sc.Enum[seed%uint64(len(sc.Enum))]...)
	case len(sc.AnyOf) > 0:
		return next(sc.AnyOf[0], 2)
	case len(sc.OneOf) > 0:
		return next(sc.OneOf[0], 3)
	}
	kind := strings.Trim(string(sc.Type), `"`)
	if sc.Type.Kind() == '[' {
		var kinds []string
		if json.Unmarshal(sc.Type, &kinds) == nil && len(kinds) > 0 {
			kind = kinds[0]
		}
	}
	switch kind {
	case "string":
		w := words()
		return appendString(b, strings.TrimSpace(w[seed%uint64(len(w))]))
	case "integer":
		return strconv.AppendUint(b, seed%10, 10)
	case "number":
		return append(strconv.AppendUint(b, seed%10, 10), ".5"...)
	case "boolean":
		return strconv.AppendBool(b, seed&1 == 0)
	case "null":
		return append(b, `null`...)
	case "array":
		b = append(b, '[')
		if sc.Items != nil {
			b = next(sc.Items, 4)
		}
		return append(b, ']')
	}
	return generateObject(b, &sc, defs, seed, depth)
}

func generateObject(b []byte, sc *schema, defs map[string]jsontext.Value, seed uint64, depth int) []byte {
	type member struct {
		name string
		raw  jsontext.Value
	}
	var members []member
	if sc.Properties.Kind() == '{' {
		dec := jsontext.NewDecoder(bytes.NewReader(sc.Properties), jsontext.AllowDuplicateNames(true))
		_, err := dec.ReadToken()
		for err == nil && dec.PeekKind() == '"' {
			var name jsontext.Token
			var v jsontext.Value
			if name, err = dec.ReadToken(); err == nil {
				key := name.String()
				if v, err = dec.ReadValue(); err == nil {
					members = append(members, member{key, v.Clone()})
				}
			}
		}
	}
	b = append(b, '{')
	first := true
	for i, m := range members {
		if len(sc.Required) > 0 && !slices.Contains(sc.Required, m.name) {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = append(appendString(b, m.name), ':')
		b = generate(b, m.raw, defs, mix(seed+uint64(i)), depth+1)
	}
	return append(b, '}')
}

// strike says after how many tokens a fault ends the answer, and which.
type strike struct {
	fault Fault
	at    int64
}

func (c *call) strikeAt(total int64) strike {
	for _, f := range []Fault{Stall, Cut, InBand, Endless} {
		arg, ok := c.faults[f]
		if !ok {
			continue
		}
		at, err := strconv.ParseInt(arg, 10, 64)
		if err != nil || at < 0 {
			at = total / 2
		}
		return strike{f, min(at, total)}
	}
	return strike{at: -1}
}

// dialect is how an answer looks on the wire. Each method appends to b; frames end
// in an empty line and may be several.
type dialect interface {
	open(b []byte) []byte                 // before the first token
	token(b []byte, choice, i int) []byte // one frame
	close(b []byte) []byte                // finish, usage, end marker
	body(b []byte) []byte                 // the answer without streaming
}

// answer gives a planned answer.
func (c *call) answer(p *plan, d dialect) {
	if !c.admit(p.prompt, &p.cached, p.output()) {
		return
	}
	var o *wire
	var buf []byte
	if p.stream {
		o = c.openStream()
		buf = d.open(make([]byte, 0, 1024))
		if !o.frames(buf) {
			c.abort()
			return
		}
	}
	if !c.generate(p, d, o, buf) {
		return
	}
	if p.stream {
		o.last(d.close(buf[:0]))
		return
	}
	c.finish(OK, "")
	c.reply(http.StatusOK, p.contentType, d.body(make([]byte, 0, 1024)))
}

// generate lets every token take its time and sends it if o is there. It returns
// false when the answer has ended early.
func (c *call) generate(p *plan, d dialect, o *wire, buf []byte) bool {
	between := c.s.cfg.InterToken
	if c.has(Slow) {
		between = c.s.cfg.SlowToken
	}
	var longest int64
	for k := range p.choices {
		longest = max(longest, p.choices[k].n)
	}
	fate := c.strikeAt(p.output())
	for i := range int(longest) {
		if i > 0 && !c.pause(c.pace(between)) {
			c.abort()
			return false
		}
		if c.down() {
			c.finish(Failed, Flap)
			c.reset()
			return false
		}
		for k := range p.choices {
			if int64(i) >= p.choices[k].n {
				continue
			}
			if c.out == fate.at {
				c.strike(fate.fault, d, o)
				return false
			}
			if o != nil {
				buf = d.token(buf[:0], k, i)
				if !o.frame(buf) {
					c.abort()
					return false
				}
			}
			c.out++
			if !c.held() {
				c.abort()
				return false
			}
		}
	}
	if fate.at >= 0 {
		c.strike(fate.fault, d, o)
		return false
	}
	return true
}

// strike ends an answer by a fault. o is nil without streaming.
func (c *call) strike(f Fault, d dialect, o *wire) {
	switch f {
	case Stall:
		if !c.pause(c.s.cfg.StallMax) {
			c.abort()
			return
		}
		c.finish(Failed, f)
		panic(http.ErrAbortHandler)
	case InBand:
		c.finish(Failed, f)
		e := &apiError{status: http.StatusInternalServerError, msg: "EngineCore encountered an issue."}
		if o == nil {
			c.fail(e)
			return
		}
		o.inband(e)
	case Cut:
		c.finish(Failed, f)
		if o == nil {
			b := d.body(nil)
			c.w.Header().Set("Content-Type", "application/json")
			c.w.Header().Set("Content-Length", strconv.Itoa(len(b)))
			c.status(http.StatusOK)
			c.w.WriteHeader(http.StatusOK)
			if _, err := c.w.Write(b[:len(b)/2]); err == nil {
				_ = http.NewResponseController(c.w).Flush() // the connection is cut next; an error changes nothing
			}
		}
		panic(http.ErrAbortHandler)
	case Endless:
		if o == nil {
			c.finish(Failed, f)
			panic(http.ErrAbortHandler)
		}
		o.endless()
	}
}
