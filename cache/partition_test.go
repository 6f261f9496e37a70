package cache

import (
	"strings"
	"testing"
)

// A question's partition holds all but its last user text, and the embedder.
func TestPartition(t *testing.T) {
	body := func(turns ...string) string {
		return `{"messages":[` + strings.Join(turns, ",") + `]}`
	}
	const system, hello, bye = `{"role":"system","content":"s"}`, `{"role":"user","content":"Hello"}`, `{"role":"user","content":"Bye"}`
	of := func(path, body, embedder string) (Key, string, bool) {
		t.Helper()
		c := keyContext(body)
		c.Path = path
		k, text, ok, err := c.Partition(embedder)
		if err != nil {
			t.Fatal(err)
		}
		return k, text, ok
	}
	for _, c := range []struct {
		name, path, a, b, text string // of b
		same                   bool
	}{
		{"another question", "/v1/chat/completions", body(system, hello), body(system, bye), "Bye", true},
		{"what was said before", "/v1/chat/completions", body(hello, hello), body(bye, hello), "Hello", false},
		{"the system prompt", "/v1/chat/completions", body(system, hello), body(`{"role":"system","content":"t"}`, hello), "Hello", false},
		{"what follows", "/v1/chat/completions", body(hello), body(hello, `{"role":"assistant","content":"Well,"}`), "Hello", false},
		{"a setting", "/v1/chat/completions", body(hello), `{"messages":[` + hello + `],"top_p":0.5}`, "Hello", false},
		{
			"an image", "/v1/chat/completions",
			body(`{"role":"user","content":[{"type":"text","text":"What?"},{"type":"image_url","image_url":{"url":"u"}}]}`),
			body(`{"role":"user","content":[{"type":"text","text":"What?"},{"type":"image_url","image_url":{"url":"v"}}]}`), "What?", false,
		},
		{
			"words beside an image", "/v1/chat/completions",
			body(`{"role":"user","content":[{"type":"text","text":"What?"},{"type":"image_url","image_url":{"url":"u"}}]}`),
			body(`{"role":"user","content":[{"type":"text","text":" Who?\n"},{"type":"image_url","image_url":{"url":"u"}}]}`), "Who?", true,
		},
		{
			"parts", "/v1/chat/completions", body(`{"role":"user","content":"a\nb"}`),
			body(`{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}`), "a\nb", false,
		},
		{"an input", "/v1/responses", `{"input":"a"}`, `{"input":"b"}`, "b", true},
		{"instructions", "/v1/responses", `{"input":"a"}`, `{"input":"a","instructions":"x"}`, "a", false},
		{"a message", "/v1/messages", `{"max_tokens":5,"messages":[` + hello + `]}`, `{"max_tokens":5,"messages":[` + bye + `]}`, "Bye", true},
		{"its cap", "/v1/messages", `{"max_tokens":5,"messages":[` + hello + `]}`, `{"max_tokens":6,"messages":[` + hello + `]}`, "Hello", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, _, okA := of(c.path, c.a, "e")
			b, text, okB := of(c.path, c.b, "e")
			if !okA || !okB || a == b != c.same || text != c.text {
				t.Errorf("same %v, text %q, ok %v %v", a == b, text, okA, okB)
			}
		})
	}
	one, _, _ := of("/v1/chat/completions", body(hello), "e")
	if two, _, _ := of("/v1/chat/completions", body(hello), "f"); one == two {
		t.Error("vectors of two embedders share a partition")
	}
	for _, c := range []struct{ path, body string }{
		{"/v1/chat/completions", body(system)},
		{"/v1/chat/completions", body(`{"role":"user","content":" \n"}`)},
		{"/v1/chat/completions", body(`{"role":"user","content":[]}`)},
		{"/v1/completions", `{"prompt":"### System: be brief. ### User: Hello"}`},
		{"/v1/embeddings", `{"input":"a"}`},
	} {
		if _, text, ok := of(c.path, c.body, "e"); ok {
			t.Errorf("%s %s: a partition with the text %q", c.path, c.body, text)
		}
	}
	if _, _, ok, err := keyContext(`{"a":1,"a":2}`).Partition("e"); err == nil || ok {
		t.Error("a body without a canonical form has a partition")
	}
}
