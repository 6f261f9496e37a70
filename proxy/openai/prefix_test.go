package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
	"pgregory.net/rapid"
)

// prefixOf is the Prefix of a body, which must be metered.
func prefixOf(t testing.TB, kind Kind, body string, seed uint64) *Prefix {
	t.Helper()
	r, err := Meter(kind, []byte(body))
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	var p Prefix
	r.Prefix([]byte(body), seed, &p)
	return &p
}

// TestPrefixLeadingTurns: what follows makes no difference to the turns before it, nor does the order of members, their space
// or what does not become prompt; what comes before a turn, and the turn itself, do.
func TestPrefixLeadingTurns(t *testing.T) {
	const sys, one, two, three = `{"role":"system","content":"be brief"}`, `{"role":"user","content":"one"}`, `{"role":"assistant","content":"two"}`, `{"role":"user","content":"three"}`
	base := prefixOf(t, Chat, `{"model":"m","messages":[`+sys+`,`+one+`]}`, 7)
	for _, c := range []struct {
		name, body string
		seed       uint64
		root, turn bool // the same Root; the first turn has the same hash
	}{
		{"more turns", `{"model":"m","messages":[` + sys + `,` + one + `,` + two + `,` + three + `]}`, 7, true, true},
		{"other members, order and space", `{ "temperature":1, "messages" : [ ` + sys + ` , ` + one + ` ], "stream":true, "model":"other", "user":"u"}`, 7, true, true},
		{"tools that are null", `{"tools":null,"messages":[` + sys + `,` + one + `]}`, 7, true, true},
		{"tools", `{"tools":[{"type":"function","function":{"name":"f"}}],"messages":[` + sys + `,` + one + `]}`, 7, false, false},
		{"other instructions", `{"messages":[{"role":"system","content":"be long"},` + one + `]}`, 7, false, false},
		{"another question", `{"messages":[` + sys + `,` + three + `]}`, 7, false, false},
		{"another seed", `{"messages":[` + sys + `,` + one + `]}`, 8, false, false},
		{"a salt", `{"cache_salt":"s","messages":[` + sys + `,` + one + `]}`, 7, false, false},
		{"no instructions", `{"messages":[` + one + `]}`, 7, false, false},
	} {
		p := prefixOf(t, Chat, c.body, c.seed)
		if (p.Root == base.Root) != c.root || (p.Chain()[0] == base.Chain()[0]) != c.turn {
			t.Errorf("%s: root the same: %t, first turn the same: %t", c.name, p.Root == base.Root, p.Chain()[0] == base.Chain()[0])
		}
	}
	if base.Root != base.Chain()[0] || len(base.Chain()) != 1 {
		t.Errorf("the root of a short first turn is %x, its chain %x", base.Root, base.Chain())
	}
}

// TestPrefixKinds: each shape of a conversation gives a root and a hash for each turn; bodies of none give nothing.
func TestPrefixKinds(t *testing.T) {
	for _, c := range []struct {
		kind  Kind
		body  string
		turns int
		root  bool
	}{
		{Chat, `{"messages":[{"role":"system","content":"s"},{"role":"developer","content":"d"},{"role":"user","content":"u"},{"role":"system","content":"late"}]}`, 2, true},
		{Chat, `{"messages":[{"role":"system","content":"s"}]}`, 0, true},
		{Chat, `{"messages":[]}`, 1, true},
		{Chat, `{"model":"m"}`, 0, false},
		{Message, `{"system":"s","messages":[{"role":"user","content":"u"},{"role":"assistant","content":"a"}]}`, 2, true},
		{Response, `{"input":"hi","prompt":{"id":"p"}}`, 1, true},
		{Response, `{"prompt":{"id":"p"},"input":[{"type":"message","role":"user","content":"u"},{"type":"function_call","name":"f","call_id":"1","arguments":"{}"}]}`, 2, true},
		{Completion, `{"prompt":"once upon"}`, 1, true},
		{Completion, `{"prompt":["a","b"]}`, 2, true},
		{Completion, `{"prompt":[1,2,3]}`, 1, true},
		{Completion, `{"prompt":[[1,2],[3]]}`, 1, true},
		{Pooling, `{"query":"q","documents":["d"]}`, 0, false},
	} {
		p := prefixOf(t, c.kind, c.body, 0)
		if len(p.Chain()) != c.turns || (p.Root != 0) != c.root {
			t.Errorf("%s: %d turns, root %x", c.body, len(p.Chain()), p.Root)
		}
	}
}

// TestPrefixRootOfLongTurn: of a long first turn the first 4 KiB tell conversations apart.
func TestPrefixRootOfLongTurn(t *testing.T) {
	ask := func(text string) *Prefix {
		return prefixOf(t, Chat, `{"messages":[{"role":"user","content":"`+text+`"}]}`, 1)
	}
	document := strings.Repeat("word ", 2000)
	a, b, c := ask(document+"first question"), ask(document+"second question"), ask("x"+document)
	if a.Root != b.Root || a.Root == c.Root {
		t.Errorf("roots %x %x %x: the first two should be one, the third another", a.Root, b.Root, c.Root)
	}
	if a.Chain()[0] == b.Chain()[0] || a.Chain()[0] == a.Root {
		t.Error("turns that differ hash equal")
	}
}

// TestPrefixManyTurns: of many turns the first 8 and the last 24 are kept.
func TestPrefixManyTurns(t *testing.T) {
	var turns []string
	for i := range 100 {
		turns = append(turns, fmt.Sprintf(`{"role":"user","content":"%d"}`, i))
	}
	body := func(n int) string { return `{"messages":[` + strings.Join(turns[:n], ",") + `]}` }
	long := prefixOf(t, Chat, body(100), 0).Chain()
	if len(long) != MaxTurns {
		t.Fatalf("%d turns", len(long))
	}
	for i, hash := range long {
		n := i + 1
		if i >= firstTurns {
			n = 100 - MaxTurns + i + 1
		}
		if short := prefixOf(t, Chat, body(n), 0).Chain(); short[len(short)-1] != hash {
			t.Errorf("entry %d is not the end of turn %d", i, n)
		}
	}
}

// TestPrefixCacheControl: clients of Anthropic move cache_control from turn to turn; the turns are the same all the same.
func TestPrefixCacheControl(t *testing.T) {
	turn := func(inside string) string {
		return `{"messages":[{"role":"user","content":[` + inside + `]},{"role":"user","content":"go on"}]}`
	}
	plain := prefixOf(t, Message, turn(`{"type":"text","text":"a"}`), 0)
	for _, inside := range []string{
		`{"type":"text","text":"a","cache_control":{"type":"ephemeral"}}`,
		`{"type":"text" , "cache_control" : {"type":"ephemeral","ttl":"1h"},"text":"a"}`,
		`{"cache_control":null,"type":"text","text":"a"}`,
	} {
		p := prefixOf(t, Message, turn(inside), 0)
		if strings.Contains(inside, " ,") == (p.Root == plain.Root) { // other space is another turn, which nobody sends
			t.Errorf("%s: root %x, without it %x", inside, p.Root, plain.Root)
		}
	}
	quoted := `{"type":"text","text":"say \"cache_control\": now"}`
	other := `{"type":"text","text":"say \"cache_control\": later"}`
	if prefixOf(t, Message, turn(quoted), 0).Root == prefixOf(t, Message, turn(other), 0).Root {
		t.Error("text that speaks of cache_control is left out")
	}
	value := `{"type":"text","text":"cache_control"}`
	if prefixOf(t, Message, turn(value), 0).Root == plain.Root {
		t.Error("a value is left out")
	}
}

// TestPromptCacheKey: what is no string, and what is too long, is none; nothing is refused.
func TestPromptCacheKey(t *testing.T) {
	for raw, want := range map[string]string{
		`"user-7"`: "user-7", `"a\u0062"`: "ab", `""`: "", `null`: "", `7`: "", `["x"]`: "",
		`"` + strings.Repeat("x", maxIdentity) + `"`:   strings.Repeat("x", maxIdentity),
		`"` + strings.Repeat("x", maxIdentity+1) + `"`: "",
	} {
		r, err := Meter(Chat, []byte(`{"messages":[],"prompt_cache_key":`+raw+`}`))
		if err != nil || r.PromptCacheKey != want {
			t.Errorf("%.40s: %.40q, %v", raw, r.PromptCacheKey, err)
		}
	}
}

// plainPrefix is Prefix once more, by encoding/json and without a stream: for each turn the hash of all that was said so far.
func plainPrefix(t testing.TB, kind Kind, body []byte, seed uint64) (root uint64, chain []uint64) {
	hash := func(b []byte) uint64 {
		d := xxhash.NewWithSeed(seed)
		_, _ = d.Write(b)
		return max(d.Sum64(), 1)
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil {
		t.Fatal(err)
	}
	turns, ok := members[turnsOf(kind)]
	if !ok {
		return 0, nil
	}
	var said []byte
	for _, name := range []string{"tools", "functions", "documents", "chat_template", "chat_template_kwargs", "system", "instructions", "cache_salt"} {
		if v := members[name]; string(v) != "null" {
			said = append(said, v...)
		}
		said = append(said, 0)
	}
	var list []json.RawMessage
	if json.Unmarshal(turns, &list) != nil || len(list) == 0 || list[0][0] != '{' && list[0][0] != '"' {
		list = []json.RawMessage{turns}
	}
	for _, turn := range list {
		var message map[string]json.RawMessage
		_ = json.Unmarshal(turn, &message)
		role := string(message["role"])
		began := len(said)
		said = append(append(said, turn...), 0)
		if len(chain) == 0 && (role == `"system"` || role == `"developer"`) && len(list) > 0 && turns[0] == '[' {
			continue
		}
		if len(chain) == 0 && len(turn) >= rootBytes {
			root = hash(said[:began+rootBytes])
		}
		chain = append(chain, hash(said))
		if root == 0 {
			root = chain[0]
		}
	}
	if root == 0 {
		root = hash(said)
	}
	if len(chain) > MaxTurns {
		chain = append(slices.Clone(chain[:firstTurns]), chain[len(chain)-(MaxTurns-firstTurns):]...)
	}
	return root, chain
}

// FuzzPrefix holds Prefix against plainPrefix on every body that is accepted, and on the same one with more behind its turns.
func FuzzPrefix(f *testing.F) {
	f.Add(uint8(Chat), []byte(`{"messages":[{"role":"system","content":"s"},{"content":"u","role":"user"}],"tools":[{"type":"function"}]}`), uint64(1))
	f.Add(uint8(Message), []byte(`{"system":[{"type":"text","text":"s"}],"messages":[ {"role":"user","content":"u"} , {"role":"assistant","content":"a"}]}`), uint64(2))
	f.Add(uint8(Response), []byte(`{"input":"text","instructions":"i"}`), uint64(3))
	f.Add(uint8(Completion), []byte(`{"prompt":["a",{"prompt":"b"}, 3]}`), uint64(4))
	f.Add(uint8(Completion), []byte(`{"prompt":"~"}`), uint64(5))
	f.Add(uint8(Chat), []byte(`{"messages":[{"role":"user","content":"a~b~"},1]}`), uint64(6))
	f.Fuzz(func(t *testing.T, k uint8, body []byte, seed uint64) {
		body = bytes.Replace(body, []byte("~"), bytes.Repeat([]byte("x"), rootBytes-20), 3) // long turns in short inputs
		kind := Kind(k % uint8(Audio))
		r, err := Meter(kind, body)
		if err != nil {
			return
		}
		var p Prefix
		r.Prefix(body, seed, &p)
		if bytes.Contains(body, []byte(cacheControl)) || bytes.ContainsRune(body, '\\') {
			return // of which the plain one knows nothing; it must only not fail
		}
		root, chain := plainPrefix(t, kind, body, seed)
		if p.Root != root || !slices.Equal(p.Chain(), chain) {
			t.Fatalf("root %x, not %x; chain %x, not %x", p.Root, root, p.Chain(), chain)
		}
	})
}

// TestPrefixGrows: a conversation that grows keeps the hashes that it had, with cache_control wherever it stands.
func TestPrefixGrows(t *testing.T) {
	text := rapid.Map(rapid.SliceOfN(rapid.RuneFrom([]rune(`ab"\{}[]:, üé`+"\n\t")), 0, 40), func(r []rune) string { return string(r) })
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(t, "turns")
		var turns, marked []string
		for i := range n {
			content, err := json.Marshal(strings.Repeat(text.Draw(t, "text"), rapid.SampledFrom([]int{1, 1, 1, 300}).Draw(t, "times")))
			if err != nil {
				t.Fatal(err)
			}
			role := []string{"user", "assistant"}[i%2]
			turns = append(turns, `{"role":"`+role+`","content":[{"type":"text","text":`+string(content)+`}]}`)
			marked = append(marked, `{"role":"`+role+`","content":[{"type":"text","text":`+string(content)+`,"cache_control":{"type":"ephemeral"}}]}`)
		}
		of := func(turns []string) *Prefix {
			body := []byte(`{"model":"m","messages":[` + strings.Join(turns, ",") + `]}`)
			r, err := Meter(Message, body)
			if err != nil {
				t.Fatal(err)
			}
			var p Prefix
			r.Prefix(body, 3, &p)
			return &p
		}
		k := rapid.IntRange(1, n).Draw(t, "first")
		early := slices.Clone(turns[:k])
		early[k-1] = marked[k-1]
		a, b := of(early), of(turns)
		if a.Root != b.Root {
			t.Fatalf("roots %x and %x", a.Root, b.Root)
		}
		end := a.Chain()[len(a.Chain())-1]
		if kept := k <= firstTurns || k > n-(MaxTurns-firstTurns); kept && !slices.Contains(b.Chain(), end) {
			t.Fatalf("the end of turn %d is not in the chain of %d turns", k, n)
		}
	})
}

// TestPrefixAllocates nothing.
func TestPrefixAllocates(t *testing.T) {
	body := []byte(conversation(64 << 10))
	r, err := Meter(Chat, body)
	if err != nil {
		t.Fatal(err)
	}
	var p Prefix
	if n := testing.AllocsPerRun(100, func() { r.Prefix(body, 1, &p) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// conversation is a chat of about so many bytes.
func conversation(size int) string {
	var b strings.Builder
	b.WriteString(`{"model":"m","messages":[{"role":"system","content":"You are of help."}`)
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, `,{"role":%q,"content":"turn %d: %s"}`, []string{"user", "assistant"}[i%2], i, strings.Repeat("some words of a talk, \\\"quoted\\\" now and then. ", min(size/600+1, 20)))
	}
	return b.String() + `]}`
}

func BenchmarkPrefix(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 10, 1 << 20} {
		body := []byte(conversation(size))
		r, err := Meter(Chat, body)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("%dKB", size>>10), func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			var p Prefix
			for b.Loop() {
				r.Prefix(body, 1, &p)
			}
		})
	}
}

// TestPrefixOfForm: nothing is known of a form.
func TestPrefixOfForm(t *testing.T) {
	body := []byte("--b\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\nhello\r\n--b--\r\n")
	r, err := MeterMultipart("b", body)
	if err != nil {
		t.Fatal(err)
	}
	p := Prefix{Root: 1}
	r.Prefix(body, 1, &p)
	if p.Root != 0 || len(p.Chain()) != 0 {
		t.Errorf("root %x, %d turns", p.Root, len(p.Chain()))
	}
}
