package cache

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// keyContext returns a context of which every field is set.
func keyContext(body string) *Context {
	return &Context{
		Tenant: "acme", User: "u1", Claimed: "c1", Surface: "help", Template: "v3",
		Model: "llama", ModelVersion: "2026-01", Backends: []string{"b1", "b2"},
		Generations: [4]uint64{1, 2, 3, 4}, Path: "/v1/chat/completions", Query: "a=b",
		Header: []string{"Anthropic-Version: 1", "X-Mode: fast"}, Normalize: NormalizeNone,
		Body: []byte(body),
	}
}

const keyChat = `{"model":"gpt","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello"}],"temperature":0}`

func keyOf(t interface {
	Helper()
	Fatalf(string, ...any)
}, c *Context,
) Key {
	t.Helper()
	key, err := c.Key()
	if err != nil {
		t.Fatalf("%v: %s", err, c.Body)
	}
	return key
}

// Each field of Context, each element of those that have some, and each length of them, is in
// the key: also of a field that is added one day.
func TestEveryFieldCounts(t *testing.T) {
	base := keyContext(keyChat)
	seen := map[Key]string{keyOf(t, base): "nothing"}
	check := func(path string, c *Context) {
		t.Helper()
		key := keyOf(t, c)
		if before, ok := seen[key]; ok {
			t.Errorf("a change of %s gives the key of a change of %s", path, before)
		}
		seen[key] = path
	}
	fields := reflect.TypeFor[Context]()
	for i := range fields.NumField() {
		name := fields.Field(i).Name
		changes := 0
		for n := 0; ; n++ {
			c := keyContext(keyChat)
			v := reflect.ValueOf(c).Elem().Field(i)
			if v.IsZero() {
				t.Fatalf("keyContext does not set %s", name)
			}
			if !keyChange(t, name, v, n) {
				break
			}
			changes++
			check(fmt.Sprintf("%s (%d)", name, n), c)
		}
		if changes == 0 {
			t.Errorf("%s was not changed", name)
		}
	}
	for i := range fields.NumField() { // what is set counts against what is not, too
		name := fields.Field(i).Name
		c := keyContext(keyChat)
		reflect.ValueOf(c).Elem().Field(i).SetZero()
		if name == "Body" {
			if _, err := c.Key(); err == nil {
				t.Error("a key without a body")
			}
			continue
		}
		check("no "+name, c)
	}
}

// keyChange makes the n-th change to v, if there is one.
func keyChange(t *testing.T, name string, v reflect.Value, n int) bool {
	switch {
	case name == "Body":
		bodies := []string{
			`{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello!"}],"temperature":0}`,
			`{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello"}],"temperature":0.1}`,
			`{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello"}],"temperature":0,"x":null}`,
			`{"messages":[{"role":"user","content":"Hello"},{"role":"system","content":"Be brief."}],"temperature":0}`,
			`[]`, `{}`,
		}
		if n < len(bodies) {
			v.SetBytes([]byte(bodies[n]))
		}
		return n < len(bodies)
	case name == "Normalize":
		if n < 2 {
			v.SetString([]string{NormalizeSpace, NormalizeFold}[n])
		}
		return n < 2
	}
	switch v.Kind() {
	case reflect.Slice:
		if n == 0 {
			v.Set(reflect.AppendSlice(v, v.Slice(0, 1))) // how often counts
			return true
		}
		return n <= v.Len() && keyChange(t, "", v.Index(n-1), 0)
	case reflect.Array:
		return n < v.Len() && keyChange(t, "", v.Index(n), 0)
	case reflect.Struct:
		return n < v.NumField() && keyChange(t, "", v.Field(n), 0)
	case reflect.String:
		v.SetString(v.String() + "x")
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(v.Int() + 1)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(v.Uint() ^ 1<<7)
	case reflect.Float32, reflect.Float64:
		v.SetFloat(v.Float() + 1)
	default:
		t.Fatalf("%s is of a kind that this test cannot change: %s", name, v.Type())
	}
	return n == 0
}

// The fields to which keyRoleOf gives a role exist, and have it.
func TestKeyRoles(t *testing.T) {
	plan, err := keyPlan()
	if err != nil {
		t.Fatal(err)
	}
	roles := make(map[string]keyRole)
	for _, f := range plan {
		if f.role != keyPlain {
			roles[f.name] = f.role
		}
	}
	want := map[string]keyRole{"Backends": keySet, "Header": keySet, "Body": keyBody}
	if !reflect.DeepEqual(roles, want) {
		t.Errorf("roles %v, want %v", roles, want)
	}
}

// A struct that has a field more is another image, whatever the kind of the field; and kinds
// that have no encoding are found when the plan is made, which the tests above do.
func TestKeyKinds(t *testing.T) {
	plain := func(string) keyRole { return keyPlain }
	type inner struct{ N int8 }
	type good struct {
		S string
		B bool
		I int
		U uint16
		F float64
		X []byte
		L [][]string
		A [2]inner
	}
	full := good{"s", true, 1, 1, 1, []byte("x"), [][]string{{"a"}, {}}, [2]inner{{1}, {2}}}
	plan, err := keyPlanOf(reflect.TypeFor[good](), plain)
	if err != nil {
		t.Fatal(err)
	}
	image := func(g good) string {
		var b []byte
		for i := range plan {
			b = (&keyScratch{}).appendField(b, &plan[i], reflect.ValueOf(&g).Elem().Field(i))
		}
		return string(b)
	}
	images := map[string]bool{image(full): true}
	for i := range reflect.TypeFor[good]().NumField() {
		g := full
		reflect.ValueOf(&g).Elem().Field(i).SetZero()
		images[image(g)] = true
	}
	for _, l := range [][][]string{{{"a", ""}}, {{}, {"a"}}, {{"a"}}, {{"a", "a"}, {}}} {
		g := full
		g.L = l
		images[image(g)] = true
	}
	if want := 1 + 8 + 4; len(images) != want {
		t.Errorf("%d images of %d values", len(images), want)
	}
	for _, kind := range []reflect.Type{
		reflect.TypeFor[*int](), reflect.TypeFor[map[string]int](), reflect.TypeFor[error](), reflect.TypeFor[func()](),
		reflect.TypeFor[chan int](), reflect.TypeFor[[]*int](), reflect.TypeFor[struct{ I any }](), reflect.TypeFor[complex64](),
	} {
		bad := reflect.StructOf([]reflect.StructField{{Name: "F", Type: kind}})
		if _, err := keyPlanOf(bad, plain); err == nil || !strings.Contains(err.Error(), "field F of") {
			t.Errorf("%s has a plan: %v", bad, err)
		}
	}
	for role, bad := range map[keyRole]any{keySet: struct{ L []int }{}, keyBody: struct{ S string }{}} {
		if _, err := keyPlanOf(reflect.TypeOf(bad), func(string) keyRole { return role }); err == nil {
			t.Errorf("%T has a plan for role %d", bad, role)
		}
	}
}

// What ends one field cannot begin the next, also where people send what stands between
// fields: no two ways to lay strings over the fields share a key.
func TestKeyBounds(t *testing.T) {
	fields := reflect.TypeFor[Context]()
	pieces := []string{"a", "\x00", "\x01", "\x02", "s", "S", "l"}
	var texts []int // fields that take any string
	for i := range fields.NumField() {
		f := fields.Field(i)
		pieces = append(pieces, string(keyAppendString(nil, f.Name))+"s", f.Name)
		if f.Type.Kind() == reflect.String && f.Name != "Normalize" {
			texts = append(texts, i)
		}
	}
	text := rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(rapid.SampledFrom(pieces), 0, 2).Draw(t, "pieces"), "")
	})
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(text, len(texts), len(texts)).Draw(t, "values")
		lists := rapid.SliceOfN(text, 0, 4).Draw(t, "list")
		lay := func(label string) *Context {
			c := &Context{Body: []byte("{}")}
			for i, value := range rapid.Permutation(values).Draw(t, label) {
				reflect.ValueOf(c).Elem().Field(texts[i]).SetString(value)
			}
			n := rapid.IntRange(0, len(lists)).Draw(t, label)
			c.Backends, c.Header = slices.Sorted(slices.Values(lists[:n])), slices.Sorted(slices.Values(lists[n:]))
			return c
		}
		a, b := lay("a"), lay("b")
		if same := keyOf(t, a) == keyOf(t, b); same != reflect.DeepEqual(a, b) {
			t.Fatalf("same %v: %+v, %+v", same, a, b)
		}
	})
	// One after the other, x and x-field-x read as x-field-x and x, had they no lengths.
	for _, i := range texts[1:] {
		if !slices.Contains(texts, i-1) {
			continue
		}
		for _, x := range []string{"", "a"} {
			a, b := &Context{Body: []byte("{}")}, &Context{Body: []byte("{}")}
			long := x + string(keyAppendString(nil, fields.Field(i).Name)) + "s" + x
			for n, c := range []*Context{a, b} {
				v := reflect.ValueOf(c).Elem()
				v.Field(i - n).SetString(x)
				v.Field(i - 1 + n).SetString(long)
			}
			if keyOf(t, a) == keyOf(t, b) {
				t.Errorf("%+v and %+v have one key", a, b)
			}
		}
	}
}

// Bad input and what may not matter, by name.
func TestKeyTable(t *testing.T) {
	chat := func(members string) *Context {
		return keyContext(`{"model":"m","messages":[{"role":"user","content":"Hi"}]` + members + "}")
	}
	with := func(c *Context, change func(*Context)) *Context { change(c); return c }
	for _, c := range []struct {
		name string
		a, b *Context
		same bool
	}{
		{"one question twice", chat(""), chat(""), true},
		{"two users, one prompt", chat(""), with(chat(""), func(c *Context) { c.User = "u2" }), false},
		{"two claimed users", chat(""), with(chat(""), func(c *Context) { c.Claimed = "c2" }), false},
		{"a user who is named as claimed", with(chat(""), func(c *Context) { c.User, c.Claimed = "x", "" }), with(chat(""), func(c *Context) { c.User, c.Claimed = "", "x" }), false},
		{"two tenants", chat(""), with(chat(""), func(c *Context) { c.Tenant = "other" }), false},
		{"the order of members", keyContext(`{"a":1,"messages":[{"content":"Hi","role":"user"}]}`), keyContext(`{"messages":[{"role":"user","content":"Hi"}],"a":1}`), true},
		{"the order of messages", keyContext(`{"messages":[1,2]}`), keyContext(`{"messages":[2,1]}`), false},
		{"1.0 and 1", chat(`,"n":1.0`), chat(`,"n":1`), true},
		{"-0 and 0", chat(`,"temperature":-0`), chat(`,"temperature":0.0`), true},
		{"1 and \"1\"", chat(`,"n":1`), chat(`,"n":"1"`), false},
		{"2^53+1 and 2^53", chat(`,"seed":9007199254740993`), chat(`,"seed":9007199254740992`), false},
		{"0.1 and what is the same double", chat(`,"top_p":0.1`), chat(`,"top_p":0.1000000000000000055`), false},
		{"1e400 and 1e401", chat(`,"x":1e400`), chat(`,"x":1e401`), false},
		{"composed and decomposed", chat(`,"x":"é"`), chat(`,"x":"e\u0301"`), false},
		{"compatible characters", chat(`,"x":"ﬁ"`), chat(`,"x":"fi"`), false},
		{"escaped or not", chat(`,"x":"é/"`), chat(`,"x":"\u00E9\/"`), true},
		{"stream", chat(`,"stream":true,"stream_options":{"include_usage":true}`), chat(`,"stream":false`), true},
		{"stream alone", keyContext(`{"stream":true}`), keyContext(`{}`), true},
		{"what does not count, in any order", keyContext(`{"user":"u","a":1,"model":"m"}`), keyContext(`{"metadata":{},"b":1,"a":1}`), false},
		{"members before and after those that count", keyContext(`{"user":"u","p":1,"metadata":"m"}`), keyContext(`{"p":1}`), true},
		{"stream, escaped", chat(`,"str\u0065am":true`), chat(""), true},
		{"stream, not of the body", chat(`,"x":{"stream":true}`), chat(`,"x":{}`), false},
		{"Stream, in another case", chat(`,"Stream":true`), chat(""), false},
		{"user, metadata and the rest", chat(`,"user":"u","metadata":{"a":1},"request_id":"r","priority":3`), chat(""), true},
		{"null and absent", chat(`,"seed":null`), chat(""), false},
		{"parallel_tool_calls", chat(`,"parallel_tool_calls":true`), chat(`,"parallel_tool_calls":false`), false},
		{"prediction", chat(`,"prediction":{"type":"content","content":"a"}`), chat(`,"prediction":{"type":"content","content":"b"}`), false},
		{"extra body", chat(`,"chat_template_kwargs":{"thinking":true}`), chat(""), false},
		{"cache_salt", chat(`,"cache_salt":"a"`), chat(`,"cache_salt":"b"`), false},
		{"white space in a text", chat(`,"x":"a b"`), chat(`,"x":"a  b"`), false},
		{"an empty message more", keyContext(`{"messages":[{}]}`), keyContext(`{"messages":[{},{}]}`), false},
		{"two lists or one", keyContext(`{"a":[[1],[2]]}`), keyContext(`{"a":[[1,2]]}`), false},
		{"the order of backends", chat(""), with(chat(""), func(c *Context) { c.Backends = []string{"b2", "b1"} }), true},
		{"the order of headers", chat(""), with(chat(""), func(c *Context) { slices.Reverse(c.Header) }), true},
		{"no backends, and none", with(chat(""), func(c *Context) { c.Backends = nil }), with(chat(""), func(c *Context) { c.Backends = []string{} }), true},
		{"a generation more", chat(""), with(chat(""), func(c *Context) { c.Generations[3]++ }), false},
		{"generations swapped", chat(""), with(chat(""), func(c *Context) { c.Generations = [4]uint64{2, 1, 3, 4} }), false},
	} {
		a, b := keyOf(t, c.a), keyOf(t, c.b)
		if (a == b) != c.same {
			t.Errorf("%s: same %v, want %v", c.name, a == b, c.same)
		}
		found, err := Differ(c.a, c.b)
		if err != nil || (len(found) == 0) != c.same {
			t.Errorf("%s: differ in %v, %v", c.name, found, err)
		}
	}
}

func TestKeyRefuses(t *testing.T) {
	for _, body := range []string{"", "{", `{"a":1,"a":2}`, `{"metadata":{"a":1,"a":2}}`, `{"a":1}{}`, "{\"a\":\"\xff\"}", `{"a":1e9999999999}`} {
		var bad *BodyError
		if _, err := keyContext(body).Key(); !errors.As(err, &bad) {
			t.Errorf("the key of %s: %v, want a BodyError", body, err)
		}
	}
	c := keyContext("{}")
	if c.Normalize = "Fold"; true {
		if _, err := c.Key(); err == nil || !strings.Contains(err.Error(), `"Fold"`) {
			t.Errorf("normalize Fold: %v", err)
		}
	}
}

// A key outlives the process that made it: nodes of two versions ask each other. Where this
// fails, change keyDomain.
func TestKeyGolden(t *testing.T) {
	const want = "e214d0a942e0bd819b05ebd9d1063c077efedd65bf1f41fb8c39327bba3e1a4e"
	c := keyContext(`{"z":[true,null],"n":10e-1,"messages":[{"role":"user","content":" \u00C9 a\n"}],"stream":true}`)
	c.Normalize = NormalizeFold
	if key := keyOf(t, c); hex.EncodeToString(key[:]) != want {
		t.Errorf("the key is %x", key)
	}
}

// keyBodies holds a body of each endpoint with all that people send to it.
func keyBodies() map[string]string {
	return map[string]string{
		"/v1/chat/completions": `{"model":"m","stream":true,"stream_options":{"include_usage":true},"user":"u","metadata":{"k":"v"},
			"messages":[{"role":"developer","content":"D"},{"role":"system","content":"S","name":"n"},{"role":"user","content":[{"type":"text","text":"Hi"},
			{"type":"image_url","image_url":{"url":"data:image/png;base64,AA==","detail":"low"}},{"type":"input_audio","input_audio":{"data":"AA==","format":"wav"}}]},
			{"role":"assistant","content":null,"refusal":"no","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},
			{"role":"tool","tool_call_id":"c1","content":"r"}],"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.1,"n":2,"seed":7,"stop":["a","b"],
			"max_tokens":10,"max_completion_tokens":10,"presence_penalty":0.1,"frequency_penalty":0.2,"repetition_penalty":1.1,"logit_bias":{"50256":-100},
			"logprobs":true,"top_logprobs":2,"response_format":{"type":"json_schema","json_schema":{"name":"s","strict":true,"schema":{"type":"object","properties":{"a":{"type":"string"}}}}},
			"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"},"strict":false}}],"tool_choice":{"type":"function","function":{"name":"f"}},
			"parallel_tool_calls":true,"prediction":{"type":"content","content":"p"},"modalities":["text"],"audio":{"voice":"v","format":"mp3"},"reasoning_effort":"low","verbosity":"low",
			"service_tier":"auto","store":true,"prompt_cache_key":"k","safety_identifier":"s","web_search_options":{},"functions":[],"function_call":"auto",
			"chat_template_kwargs":{"thinking":true},"guided_json":{"type":"object"},"cache_salt":"s","ignore_eos":false,"extra_body":{"x":[1,2]},"request_id":"r","priority":1}`,
		"/v1/completions": `{"model":"m","prompt":["a","b"],"suffix":"s","max_tokens":5,"temperature":0,"top_p":1,"n":1,"best_of":2,"echo":true,"logprobs":3,
			"stop":"x","seed":1,"logit_bias":{"1":2},"stream":false,"user":"u","prompt_embeds":"AA=="}`,
		"/v1/responses": `{"model":"m","instructions":"i","input":[{"role":"user","content":[{"type":"input_text","text":"Hi"},{"type":"input_image","image_url":"u"}]},
			{"type":"function_call_output","call_id":"c","output":"o"}],"previous_response_id":"r","conversation":"c","reasoning":{"effort":"low"},"text":{"format":{"type":"text"}},
			"truncation":"auto","include":["x"],"max_output_tokens":9,"max_tool_calls":2,"tools":[{"type":"web_search"}],"background":false,"store":false,"metadata":{"a":"b"},"stream":true}`,
		"/v1/messages": `{"model":"m","system":[{"type":"text","text":"S","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":[{"type":"text","text":"Hi"},
			{"type":"tool_result","tool_use_id":"t","content":"c","is_error":false}]},{"role":"assistant","content":"A"}],"max_tokens":10,"stop_sequences":["s"],"temperature":1,"top_k":3,"top_p":0.5,
			"thinking":{"type":"enabled","budget_tokens":1024},"tools":[{"name":"n","description":"d","input_schema":{"type":"object"}}],"tool_choice":{"type":"auto","disable_parallel_tool_use":true},
			"container":"c","mcp_servers":[],"service_tier":"auto","metadata":{"user_id":"u"},"stream":true}`,
		"/v1/embeddings": `{"model":"m","input":["a",[1,2,3]],"dimensions":256,"encoding_format":"float","user":"u","truncate_prompt_tokens":5}`,
		"/v1/rerank":     `{"model":"m","query":"q","documents":["a","b"],"top_n":1,"return_documents":true}`,
	}
}

// Every value of every member of the bodies of all endpoints counts, but for those of the
// uncounted members; so does the loss of any.
func TestEveryMemberCounts(t *testing.T) {
	for path, body := range keyBodies() {
		c := keyContext(body)
		c.Path = path
		base := keyOf(t, c)
		var root map[string]any
		if err := json.Unmarshal([]byte(body), &root); err != nil {
			t.Fatal(path, err)
		}
		check := func(where string, counts bool) {
			t.Helper()
			text, err := json.Marshal(root)
			if err != nil {
				t.Fatal(err)
			}
			c.Body = text
			if same := keyOf(t, c) == base; same == counts {
				t.Errorf("%s: a change of %s: same key %v", path, where, same)
			}
		}
		check("nothing", false)
		for name, value := range root {
			counts := !slices.Contains(Uncounted(), name)
			keyChangeAll(name, value, func(v any) { root[name] = v }, func(where string) { check(where, counts) })
			delete(root, name)
			check("no "+name, counts)
			root[name] = value
		}
	}
}

// keyChangeAll changes v and each value in it in turn: set puts a changed v in its place.
func keyChangeAll(where string, v any, set func(any), check func(where string)) {
	switch v := v.(type) {
	case map[string]any:
		for name, value := range v {
			keyChangeAll(where+"."+name, value, func(x any) { v[name] = x }, check)
		}
		v["added"] = true
		check(where + ".added")
		delete(v, "added")
	case []any:
		for i, value := range v {
			keyChangeAll(where+"["+strconv.Itoa(i)+"]", value, func(x any) { v[i] = x }, check)
		}
		set(append(slices.Clip(v), "added"))
		check(where + "[added]")
	case string:
		set(v + "x")
		check(where)
	case float64:
		set(v + 1)
		check(where)
	case bool:
		set(!v)
		check(where)
	case nil:
		set("null")
		check(where)
	}
	set(v)
}

// Any writing of a tree has one key, and any change of it another, uncounted members aside.
func TestKeyIndependent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tree := drawCanonTree(t, 3)
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		c := keyContext(string(tree.render(nil, rng)))
		base := keyOf(t, c)
		c.Body = tree.render(nil, rng)
		if keyOf(t, c) != base {
			t.Fatalf("written as %s it has another key", c.Body)
		}
		if tree.kind != canonObject {
			return
		}
		for i, name := range tree.names {
			changed := tree.clone()
			nodes := changed.elems[i].all()
			nodes[rng.IntN(len(nodes))].change(rng)
			c.Body = changed.render(nil, rng)
			if same := keyOf(t, c) == base; same != slices.Contains(Uncounted(), name) {
				t.Fatalf("a change of %q to %s: same %v", name, c.Body, same)
			}
		}
	})
}

// Many at once share the scratch memory, and each gets the key that it would get alone.
func TestKeyConcurrent(t *testing.T) {
	var contexts []*Context
	var want []Key
	for path, body := range keyBodies() {
		for _, normalize := range []string{"", NormalizeSpace, NormalizeFold} {
			c := keyContext(body)
			c.Path, c.Normalize = path, normalize
			contexts, want = append(contexts, c), append(want, keyOf(t, c))
		}
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				k := (i*7 + g) % len(contexts)
				if key, err := contexts[k].Key(); err != nil || key != want[k] {
					t.Errorf("context %d has another key among others, %v", k, err)
				}
			}
		})
	}
	wg.Wait()
}

// Key does not write to the body, nor to the lists that it sorts.
func TestKeyKeepsContext(t *testing.T) {
	c := keyContext(`{"b":1.0,"a":"\u0061","messages":[{"role":"user","content":"  A  "}]}`)
	c.Backends, c.Header, c.Normalize = []string{"z", "a"}, []string{"Z: 1", "A: 2"}, NormalizeFold
	before := fmt.Sprintf("%+v", *c)
	keyOf(t, c)
	if _, err := c.Explain(); err != nil {
		t.Error(err)
	}
	if after := fmt.Sprintf("%+v", *c); after != before {
		t.Errorf("%s became %s", before, after)
	}
}

func TestKeyAllocs(t *testing.T) {
	plan, err := keyPlan()
	if err != nil {
		t.Fatal(err)
	}
	for _, normalize := range []string{NormalizeNone, NormalizeFold} {
		c, s := keyContext(keyBench(1<<10)), new(keyScratch) // not from the pool, which the race detector empties
		c.Normalize = normalize
		n := testing.AllocsPerRun(200, func() {
			if _, err := s.key(c, plan); err != nil {
				t.Fatal(err)
			}
		})
		if n > 0 {
			t.Errorf("%v allocations a key, want none; normalize %s", n, normalize)
		}
	}
}

// The scratch memory keeps nothing alive of what it was used for.
func TestKeyFree(t *testing.T) {
	plan, err := keyPlan()
	if err != nil {
		t.Fatal(err)
	}
	s := new(keyScratch)
	if _, err := s.key(keyContext(keyChat), plan); err != nil {
		t.Fatal(err)
	}
	s.free()
	if s.doc.src != nil || slices.ContainsFunc(s.set[:cap(s.set)], func(e string) bool { return e != "" }) {
		t.Errorf("kept: %q, %q", s.doc.src, s.set)
	}
}

// keyBench returns a chat request of about n bytes, its members as an SDK sends them.
func keyBench(n int) string {
	const head = `{"model":"meta-llama/Llama-3.1-8B-Instruct","messages":[{"role":"system","content":"You are a helpful assistant of Acme.\nAnswer in one sentence."},{"role":"user","content":"`
	const tail = `"}],"temperature":0.0,"max_tokens":256,"top_p":0.95,"stream":true,"stream_options":{"include_usage":true},"seed":42}`
	const text = "What is the return policy for items that were bought on sale? "
	return head + strings.Repeat(text, max(0, n-len(head)-len(tail))/len(text)) + tail
}

func BenchmarkKey(b *testing.B) {
	tokens := `{"input":[` + strings.Repeat("1234,", 2000) + `0]}`
	for _, c := range []struct{ name, body, normalize string }{
		{"1KB", keyBench(1 << 10), ""},
		{"1KB/fold", keyBench(1 << 10), NormalizeFold},
		{"1KB/escaped", strings.ReplaceAll(keyBench(1<<10), "?", `\u003f`), ""},
		{"32KB", keyBench(32 << 10), ""},
		{"10KB/tokens", tokens, ""},
	} {
		b.Run(c.name, func(b *testing.B) {
			ctx := keyContext(c.body)
			ctx.Normalize = c.normalize
			b.SetBytes(int64(len(c.body)))
			b.ReportAllocs()
			for b.Loop() {
				keyOf(b, ctx)
			}
		})
	}
}
