package cache

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// promptText is made-up prose of about so many bytes, always the same for one seed.
func promptText(seed uint64, bytes int) string {
	rng := rand.New(rand.NewPCG(seed, 7))
	var b strings.Builder
	for b.Len() < bytes {
		for range 2 + rng.IntN(8) {
			b.WriteByte(byte('a' + rng.IntN(26)))
		}
		b.WriteByte(' ')
	}
	return b.String()
}

// promptChat is the body of a chat.
func promptChat(t interface{ Fatal(...any) }, texts ...string) []byte {
	messages := []map[string]string{}
	for i, text := range texts {
		messages = append(messages, map[string]string{"role": []string{"system", "user", "assistant"}[min(i, 1)+i/2%2], "content": text})
	}
	body, err := json.Marshal(map[string]any{"model": "m", "messages": messages})
	if err != nil {
		t.Fatal(err)
	}
	return body
}

func TestPrefixLint(t *testing.T) {
	instructions := promptText(1, 6_000)
	date := func(rng *rand.Rand) string { return fmt.Sprint(rng.Uint64() >> rng.IntN(40)) }
	question := func(rng *rand.Rand) string { return promptText(rng.Uint64(), 100+rng.IntN(900)) }
	for name, c := range map[string]struct {
		prompt    func(rng *rand.Rand) []string
		least     int64
		cached    float64
		prompts   int
		want      FindingKind
		text      string
		prefixMin int64 // bytes
		prefixMax int64
	}{
		"instructions first": {func(r *rand.Rand) []string { return []string{instructions, question(r)} }, 1_024, 0.2, 200, FindingGood, "", 5_900, 6_200},
		"a date first": {
			func(r *rand.Rand) []string { return []string{date(r) + instructions, question(r)} }, 1_024, 0, 200, FindingVarying, "what varies stands first", 0, 200,
		},
		"a date first, and no minimum known": {
			func(r *rand.Rand) []string { return []string{date(r) + instructions, question(r)} }, 0, 0, 200, FindingVarying, "Put it last", 0, 200,
		},
		"a date first, and the provider caches all the same": {
			func(r *rand.Rand) []string { return []string{date(r) + instructions, question(r)} }, 1_024, 0.9, 200, FindingGood, "", 0, 200,
		},
		"short instructions": {
			func(r *rand.Rand) []string { return []string{instructions[:1_500], promptText(r.Uint64(), 4_000)} }, 1_024, 0, 200, FindingTooShort, "the first 368 do not vary, and the provider caches no prefix below 1024", 1_400, 1_700,
		},
		"short instructions, and no minimum known": {
			func(r *rand.Rand) []string { return []string{instructions[:1_500], question(r)} }, 0, 0, 200, FindingGood, "", 1_400, 1_700,
		},
		"short prompts with a date first": {
			func(r *rand.Rand) []string { return []string{date(r) + instructions[:1_200], question(r)} }, 1_024, 0, 200, FindingTooShort, "whatever stands first", 0, 100,
		},
		"nothing in common": {
			func(r *rand.Rand) []string { return []string{promptText(r.Uint64(), 4_000)} }, 0, 0, 200, FindingVaried, "little in common", 0, 100,
		},
		"a cache that is off": {
			func(r *rand.Rand) []string { return []string{instructions, question(r)} }, 1_024, 0, 800, FindingUnused, "reuses nothing", 5_900, 6_200,
		},
		"two templates under one name": {
			func(r *rand.Rand) []string {
				return []string{[]string{"A ", "B "}[r.IntN(2)] + instructions, question(r)}
			}, 1_024, 0.2, 400, FindingGood, "", 5_000, 6_200,
		},
		"few": {func(r *rand.Rand) []string { return []string{instructions, question(r)} }, 1_024, 0, 20, FindingFew, "", 0, 6_200},
	} {
		rng := rand.New(rand.NewPCG(3, 4))
		p := NewPrefixes()
		for range c.prompts {
			p.Note(&Prompt{Tenant: "acme", Surface: "faq", Template: "v1", Model: "m", Body: promptChat(t, c.prompt(rng)...), Input: 1_000, Cached: int64(1_000 * c.cached)}, watchStart)
		}
		list := p.Lint(func(model string) int64 {
			if model != "m" {
				t.Errorf("%s: model %q", name, model)
			}
			return c.least
		})
		if len(list) != 1 {
			t.Fatalf("%s: %+v", name, list)
		}
		f := list[0]
		if f.Kind != c.want || !strings.Contains(f.Text, c.text) || (f.Text == "") != (f.Kind == FindingGood || f.Kind == FindingFew) {
			t.Errorf("%s: %s, want %s: %s", name, f.Kind, c.want, f.Text)
		}
		if f.Prefix < c.prefixMin || f.Prefix > c.prefixMax || f.Prompt < f.Prefix {
			t.Errorf("%s: a prefix of %d bytes of %d", name, f.Prefix, f.Prompt)
		}
		if f.Requests != int64(c.prompts) || f.Input != int64(c.prompts)*1_000 || f.Share < c.cached-1e-9 || f.Share > c.cached+1e-9 || f.Template != "v1" {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// TestPrefixMends: what is found goes by the last prompts.
func TestPrefixMends(t *testing.T) {
	p := NewPrefixes()
	rng := rand.New(rand.NewPCG(5, 6))
	instructions := promptText(1, 4_000)
	for i := range 1_200 * lookAtEvery {
		texts := []string{"not looked at"}
		switch {
		case i >= lookAtFirst && (i+1)%lookAtEvery != 0:
		case i < 600*lookAtEvery:
			texts = []string{fmt.Sprint(rng.Uint64(), instructions), "What?"}
		default:
			texts = []string{instructions, fmt.Sprint("What of ", rng.Uint64())}
		}
		p.Note(&Prompt{Model: "m", Body: promptChat(t, texts...), Input: 10, Cached: 1}, watchStart)
		want := map[int]FindingKind{600*lookAtEvery - 1: FindingVarying, 1_200*lookAtEvery - 1: FindingGood}[i]
		if want == "" {
			continue
		}
		if f := p.Lint(func(string) int64 { return 0 })[0]; f.Kind != want {
			t.Errorf("after %d: %+v", i+1, f)
		}
	}
}

// TestPrefixShapes: the text is found wherever a route has it, in the order in which it is read.
func TestPrefixShapes(t *testing.T) {
	p := NewPrefixes()
	read := func(body string) (text []promptChunk, size int) {
		s := new(promptScan)
		if !s.scan(p, []byte(body)) {
			return nil, 0
		}
		return slices.Clone(s.chunks), s.size
	}
	alpha, beta := promptText(1, 500), promptText(2, 500)
	for name, bodies := range map[string][]string{
		"a string and parts": {
			`{"messages":[{"role":"system","content":"` + alpha + `"},{"role":"user","content":"` + beta + `"}]}`,
			`{"messages":[{"content":[{"type":"text","text":"` + alpha + `"}],"role":"system"},{"role":"user","content":[{"text":"` + beta + `","type":"text"}]}],"stream":true}`,
		},
		"instructions, system": {
			`{"system":"` + alpha + `","messages":[{"role":"user","content":"` + beta + `"}]}`,
			`{"instructions":"` + alpha + `","input":[{"role":"user","content":[{"type":"input_text","text":"` + beta + `"}]}]}`,
			`{"messages":[{"role":"user","content":"` + beta + `"}],"system":[{"type":"text","text":"` + alpha + `"}]}`,
		},
		"all":      {`{"prompt":"` + beta + `","system":"b","tools":["` + alpha + `"]}`, `{"prompt":["` + alpha + `","b","` + beta + `"]}`},
		"one text": {`{"prompt":"` + alpha + `"}`, `{"input":"` + alpha + `"}`, `{"input":["` + alpha + `"]}`},
		"tools": {
			`{"tools":[{"b":1,"a":"` + alpha + `"}],"messages":[{"role":"user","content":"` + beta + `"}]}`,
			`{"messages":[{"role":"user","content":"` + beta + `"}],"tools":[{"a":"` + alpha + `","b":1.0}]}`,
		},
		"calls": {
			`{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{"arguments":"` + alpha + `"}}]}]}`,
			`{"messages":[{"tool_calls":[{"function":{"arguments":"` + alpha + `"},"id":"1"}],"content":null,"role":"assistant"}]}`,
		},
	} {
		want, size := read(bodies[0])
		if size < 500 {
			t.Errorf("%s: %d bytes", name, size)
		}
		for _, b := range bodies[1:] {
			if got, n := read(b); n != size || !slices.Equal(got, want) {
				t.Errorf("%s: %d bytes of %.60s, want %d", name, n, b, size)
			}
		}
	}
	for _, body := range []string{"", "{", "[]", "null", `"a"`, "{}", `{"messages":[]}`, `{"messages":[{"role":"user","content":"` + alpha + `"}]`} {
		if _, n := read(body); n != 0 {
			t.Errorf("%s: %d bytes", body, n)
		}
	}
	again := new(promptScan)
	for i := range uint64(200) {
		body := `{"prompt":"` + promptText(i, 100) + `"}`
		want, _ := read(body)
		if !again.scan(p, []byte(body)) || !slices.Equal(again.chunks, want) {
			t.Fatalf("text %d is cut otherwise after another", i)
		}
	}
	if _, n := read(`{"prompt":"` + strings.Repeat(alpha, 500) + `"}`); n != maxPromptText {
		t.Errorf("a long one: %d bytes", n)
	}
}

// TestPrefixBlocks: two texts have blocks in common for as long as they begin alike, and chunks for
// as much as they have in common at all.
func TestPrefixBlocks(t *testing.T) {
	p := NewPrefixes()
	rapid.Check(t, func(t *rapid.T) {
		same := rapid.IntRange(0, 5_000).Draw(t, "same")
		seed := rapid.Uint64().Draw(t, "seed")
		a, b := new(promptScan), new(promptScan)
		head := promptText(seed, same)
		one, other := head+"1"+promptText(seed+1, 500), head+"2"+promptText(seed+2, 500)
		if !a.scan(p, promptPlain(t, one)) || !b.scan(p, promptPlain(t, other)) {
			t.Fatal("no text")
		}
		n := 0
		for n < min(len(a.blocks), len(b.blocks)) && a.blocks[n] == b.blocks[n] {
			n++
		}
		if want := len(head) / promptBlock; n != want {
			t.Fatalf("%d blocks, want %d", n, want)
		}
		if want := (a.size + promptBlock - 1) / promptBlock; len(a.blocks) != want {
			t.Fatalf("%d blocks of %d bytes", len(a.blocks), a.size)
		}
		sum := 0
		for _, c := range a.chunks {
			sum += int(c.length)
		}
		if sum != a.size {
			t.Fatalf("chunks of %d bytes in a text of %d", sum, a.size)
		}
		long := promptText(seed+3, 4_000)
		shift := rapid.IntRange(1, 300).Draw(t, "shift")
		a.scan(p, promptPlain(t, long))
		known := slices.Clone(a.chunks)
		b.scan(p, promptPlain(t, promptText(seed+4, shift)+long))
		recurs := 0
		for _, c := range b.chunks {
			if slices.Contains(known, c) {
				recurs += int(c.length)
			}
		}
		if recurs < 3_000 {
			t.Fatalf("of 4,000 bytes %d recur", recurs)
		}
	})
}

func promptPlain(t *rapid.T, text string) []byte {
	body, err := json.Marshal(map[string]string{"prompt": text})
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// TestPrefixBounds: templates beyond the bound wait until another is not used any more.
func TestPrefixBounds(t *testing.T) {
	p := NewPrefixes()
	body := promptChat(t, promptText(1, 200))
	for i := range maxTemplates + 100 {
		p.Note(&Prompt{Template: fmt.Sprint(i), Body: body}, watchStart+int64(i))
	}
	least := func(string) int64 { return 0 }
	if n := len(p.Lint(least)); n != maxTemplates {
		t.Errorf("%d templates", n)
	}
	for i := range 10 {
		p.Note(&Prompt{Template: fmt.Sprint("new", i), Body: body}, watchStart+templateLinger+1)
	}
	names := []string{}
	for _, f := range p.Lint(least) {
		names = append(names, f.Template)
	}
	if len(names) != maxTemplates || slices.Contains(names, "0") || slices.Contains(names, "1") || !slices.Contains(names, "2") || !slices.Contains(names, "new1") || slices.Contains(names, "new2") {
		t.Errorf("%d templates", len(names))
	}
	huge := promptChat(t, strings.Repeat("a", maxPromptBody))
	q := NewPrefixes()
	for range 3 {
		q.Note(&Prompt{Body: huge, Input: 5}, watchStart)
	}
	if f := q.Lint(least)[0]; f.Input != 15 || f.Prompt != 0 {
		t.Errorf("a long body: %+v", f)
	}
	for range 40_000 {
		q.Note(&Prompt{Body: body, Input: 5}, watchStart)
	}
	for _, tmpl := range q.templates {
		if tmpl.looked > maxLooked || tmpl.recent.requests > maxTold || tmpl.requests != 40_003 {
			t.Errorf("%d looked at, %d recent, %d in all", tmpl.looked, tmpl.recent.requests, tmpl.requests)
		}
	}
}

func TestPrefixAllocates(t *testing.T) {
	p := NewPrefixes()
	r := &Prompt{Tenant: "t", Surface: "s", Template: "v", Model: "m", Body: promptChat(t, promptText(1, 3_000)), Input: 7}
	for range 100 {
		p.Note(r, watchStart)
	}
	if n := testing.AllocsPerRun(lookAtEvery-6, func() { p.Note(r, watchStart) }); n != 0 {
		t.Errorf("a prompt that is not looked at allocates %v times", n)
	}
}

func TestPrefixKeepsNoContent(t *testing.T) {
	p := NewPrefixes()
	for i := range 40 {
		p.Note(&Prompt{Tenant: "acme", Model: "m", Body: []byte(`{"tools":[{"classified":"classified tool \u0041"}],"messages":[{"role":"user","content":"classified \"text\" number ` + fmt.Sprint(i) + `"}]}`)}, watchStart)
	}
	s, ok := p.free.Get().(*promptScan)
	if !ok || p.Lint(func(string) int64 { return 0 })[0].Prompt == 0 {
		t.Fatal("nothing was looked at")
	}
	for _, v := range []any{p, s, p.Lint(func(string) int64 { return 0 })} {
		if at := holds(reflect.ValueOf(v), "", []string{"classified"}, map[uintptr]bool{}); at != "" {
			t.Errorf("content in %T%s", v, at)
		}
	}
	if s.scan(p, []byte(`{"prompt":"classified"}`)); holds(reflect.ValueOf(s), "", []string{"classified"}, map[uintptr]bool{}) == "" {
		t.Error("this test finds nothing")
	}
}

func FuzzPromptScan(f *testing.F) {
	for _, body := range []string{
		`{"messages":[{"role":"user","content":"a"}]}`, `{"tools":[{}],"system":[{"text":1}],"input":[[["a"]]]}`, `{"prompt":[1,2,[3]]}`, `{"messages":{"content":[]}}`, `{`,
	} {
		f.Add([]byte(body))
	}
	p := NewPrefixes()
	f.Fuzz(func(t *testing.T, body []byte) {
		a, b := new(promptScan), new(promptScan)
		ok := a.scan(p, body)
		if ok && (a.size == 0 || a.size > maxPromptText || len(a.blocks) != (a.size+promptBlock-1)/promptBlock || len(a.chunks) > a.size/minPromptChunk+1) {
			t.Errorf("%d bytes, %d blocks, %d chunks", a.size, len(a.blocks), len(a.chunks))
		}
		b.scan(p, []byte(`{"prompt":"something else","messages":[{"content":"x"}]}`))
		if again := b.scan(p, body); again != ok || !slices.Equal(a.blocks, b.blocks) || !slices.Equal(a.chunks, b.chunks) {
			t.Error("another scan finds another text")
		}
	})
}

func BenchmarkPromptScan(b *testing.B) {
	p, s := NewPrefixes(), new(promptScan)
	body := promptChat(b, promptText(1, 16_000), promptText(2, 400))
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		s.scan(p, body)
	}
}
