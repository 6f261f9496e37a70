package proxy_test

import (
	"strings"
	"testing"

	"headgate/proxy"
)

// TestVerdictOfSimilar: what is said of a request, whether it is compared with questions in other words, is what becomes
// of it.
func TestVerdictOfSimilar(t *testing.T) {
	surface := func(name string, change func(*proxy.Surface)) *proxy.Surface {
		return faqWith(func(s *proxy.Surface) {
			s.Name = name
			change(s)
		})
	}
	similar := &proxy.SemanticCache{Mode: "static", Threshold: 0.85}
	s := setup{surfaces: []*proxy.Surface{
		help(), surface("exactly", func(*proxy.Surface) {}), surface("mine", func(s *proxy.Surface) { s.Share, s.Personal = false, true }),
		surface("warm", func(s *proxy.Surface) { s.Semantic, s.Exact.Temperature = similar, 1 }),
	}}
	for name, c := range map[string]struct {
		off     bool // this node has no cache of similar questions
		surface string
		call    call
		why     string // "": it is compared
		least   float64
	}{
		"compared":     {surface: "faq", call: call{body: asking(resetDo)}},
		"streamed":     {surface: "faq", call: call{body: streaming(asking(resetDo))}},
		"a wish":       {surface: "faq", call: call{body: asking(resetDo), header: header("X-Headgate-Similarity", "0.9")}, least: 0.9},
		"no wish":      {surface: "faq", call: call{body: asking(resetDo), header: header("X-Headgate-Similarity", "1")}, why: "X-Headgate-Similarity: 1", least: 1},
		"no block":     {surface: "exactly", call: call{body: asking(resetDo)}, why: "no semantic cache in the policy"},
		"personal":     {surface: "mine", call: call{body: asking(resetDo)}, why: "is personal"},
		"not here":     {off: true, surface: "faq", call: call{body: asking(resetDo)}, why: "this node"},
		"too warm":     {surface: "faq", call: call{body: `{"model":"m","temperature":1,"messages":[{"role":"user","content":"Hi"}]}`}, why: "no answer to it is kept"},
		"warm":         {surface: "warm", call: call{body: `{"model":"m","temperature":1,"messages":[{"role":"user","content":"Hi"}]}`}},
		"an embedding": {surface: "faq", call: call{path: "/v1/embeddings", body: `{"model":"m","input":"Hi"}`}, why: "answers of this route"},
	} {
		t.Run(name, func(t *testing.T) {
			table := newTwins(nil)
			if s.semantic = table; c.off {
				s.semantic = nil
			}
			w := newWorld(t, s)
			if c.call.path == "" {
				c.call.path = "/v1/chat/completions"
			}
			if c.call.header == nil {
				c.call.header = header()
			}
			v, err := w.proxy.CacheVerdict(&proxy.CacheQuestion{Caller: w.caller, Surface: c.surface, Path: c.call.path, Header: c.call.header, Body: []byte(c.call.body)})
			if err != nil || (v.Apart == "") != (c.why == "") || !strings.Contains(v.Apart, c.why) || v.Least != c.least || (v.Semantic != nil) != (c.surface == "faq" || c.surface == "warm") {
				t.Errorf("%+v, %v", v, err)
			}
			if looked, _ := table.count(); looked != 0 || w.asked() != 0 {
				t.Errorf("looked %d times, and the model was asked %d", looked, w.asked())
			}
			c.call.header.Set("X-Headgate-Surface", c.surface)
			w.do(c.call).want(t, 200)
			table.mu.Lock()
			defer table.mu.Unlock()
			if takes := len(table.asked) == 1 && table.asked[0].Least < 1; takes != (c.why == "") { // who takes none asks, too, so that what it gets is learned
				t.Errorf("%q was said, and it was looked for by %+v", v.Apart, table.asked)
			}
		})
	}
}
