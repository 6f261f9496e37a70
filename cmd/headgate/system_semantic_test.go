//go:build linux

package main_test

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"headgate/proxy/admin"
)

// The tests of questions in other words as a whole cluster answers them: four processes with the built-in embedder
// before a model server that counts how often it was asked what.

// mumbler answers /v1/embeddings with what is none, or for the model hangs not at all.
type mumbler struct {
	url          string
	asked, hangs atomic.Int64
}

func newMumbler(t *testing.T) *mumbler {
	t.Helper()
	m := &mumbler{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Method != http.MethodPost {
			_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"mumbler"}]}`)
			return
		}
		if in, err := io.ReadAll(r.Body); err != nil || strings.Contains(string(in), `"hangs"`) {
			m.hangs.Add(1)
			<-r.Context().Done()
			return
		}
		says := []string{`{`, `{"data":[]}`, `{"data":[{"index":0,"embedding":[]}]}`, `{"data":[{"index":0,"embedding":[0,0,0]}]}`, `{"data":[{"index":7,"embedding":[1,2]}]}`, `[1,2]`, ``}
		_, _ = io.WriteString(w, says[m.asked.Add(1)%int64(len(says))])
	}))
	m.url = srv.URL
	t.Cleanup(srv.Close)
	return m
}

const semanticSystemPolicy = `version: 1
backends: [{name: b, url: %q, slots: 5000}, {name: gone, url: "http://127.0.0.1:1"}, {name: mumbler, url: %q}]
models:
  - {name: m, backends: [b]}
  - {name: dead, version: "1", backends: [gone]}
  - {name: garbage, version: "1", backends: [mumbler]}
  - {name: hangs, version: "1", backends: [mumbler]}
surfaces:
  - {name: faq, share: tenant, exact: {ttl: 1h}, semantic: {mode: static, threshold: 0.8, audit: 0.000001, error_bound: 0.2, hit_error_bound: 0.5}}
  - {name: own, exact: {ttl: 1h}, semantic: {mode: static, threshold: 0.8, audit: 0.000001}}
  - {name: shade, share: tenant, exact: {ttl: 1h}, semantic: {}}
  - {name: deaf, share: tenant, exact: {ttl: 1h}, semantic: {mode: static, threshold: 0.8, embedder: dead}}
  - {name: mumbles, share: tenant, exact: {ttl: 1h}, semantic: {mode: static, threshold: 0.8, embedder: garbage}}
  - {name: waits, share: tenant, exact: {ttl: 1h}, semantic: {mode: static, threshold: 0.8, embedder: hangs}}
plans:
  - name: p
    limits: [{name: requests, scope: key, unit: requests, rate: 1000000000/min, unavailable: allow}]
tenants: [{name: dev, plan: p}, {name: acme, plan: p}]
`

const (
	resetHow  = "How do I reset my password?"
	resetCan  = "How can I reset my password?"
	resetTell = "Please tell me, how do I reset my password?"
)

func newSemanticQuiz(t *testing.T, n int) (*quiz, *mumbler) {
	t.Helper()
	q := &quiz{up: newQuizzed(t), client: &http.Client{Timeout: patience, Transport: &http.Transport{MaxIdleConnsPerHost: 1000}}}
	t.Cleanup(q.client.CloseIdleConnections)
	m := newMumbler(t)
	q.group = newGroup(t, n, fmt.Sprintf(semanticSystemPolicy, q.up.url, m.url))
	q.group.up()
	return q, m
}

// inPart is a question in a place of its own: a header that a backend may answer by.
func inPart(part, question string, pairs ...string) asking {
	a := asking{question: question, header: map[string]string{"Anthropic-Beta": part}}
	for i := 0; i < len(pairs); i += 2 {
		a.header[pairs[i]] = pairs[i+1]
	}
	return a
}

// only asks for nothing but what is kept.
func (a asking) only() asking {
	header := map[string]string{"X-Headgate-Cache": "only"}
	maps.Copy(header, a.header)
	a.header = header
	return a
}

// similar says whether a node answers from another wording's entry, and from which. The model is not asked.
func (q *quiz) similar(m *member, a asking) (entry string, ok bool) {
	q.t.Helper()
	res, err := q.send(context.Background(), m, a.only())
	if err != nil {
		q.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	word := res.Header.Get("X-Headgate-Cache")
	switch {
	case err != nil || res.StatusCode != http.StatusOK && res.StatusCode != http.StatusGatewayTimeout:
		q.t.Fatalf("%s: %d %s %v", m.name, res.StatusCode, text, err)
	case word == "semantic" && (!strings.Contains(string(text), "answer ") || len(res.Header.Get("X-Headgate-Cache-Entry")) != 16 || res.Header.Get("X-Headgate-Similarity") < "0.8" || res.Header.Get("Age") == ""):
		q.t.Errorf("a hit says %v %s", res.Header, text)
	}
	return res.Header.Get("X-Headgate-Cache-Entry"), word == "semantic"
}

// teach asks one wording and waits until another is a hit at every node given.
func (q *quiz) teach(at *member, first, again asking, members ...*member) (entry string) {
	q.t.Helper()
	if w := q.ask(at, first); w.code != http.StatusOK || w.cache != "miss" {
		q.t.Fatalf("%s at %s: %+v", first.question, at.name, w)
	}
	for _, m := range members {
		eventually(q.t, "a hit in other words at "+m.name, func() (ok bool) { entry, ok = q.similar(m, again); return ok })
	}
	return entry
}

// owner is whoever has the place of a question, by what a node says of its last one.
func (q *quiz) owner(m *member, a asking) *member {
	q.t.Helper()
	q.similar(m, a)
	last := look[[]admin.CacheDecision](q.group, m, "cache/recent")
	if len(last) == 0 {
		q.t.Fatalf("%s remembers nothing", m.name)
	}
	if last[0].Owner == "" {
		return m
	}
	for _, o := range q.members {
		if strings.HasPrefix(last[0].Owner, o.host+":") {
			return o
		}
	}
	q.t.Fatalf("%q is nobody's address", last[0].Owner)
	return nil
}

// TestSystemSemantic is one life of a cluster, in which nodes die, leave and come.
func TestSystemSemantic(t *testing.T) {
	heavy(t)
	q, m := newSemanticQuiz(t, 4)
	q.paraphraseElsewhere()
	q.whoseBalance()
	q.reportedWrong()
	q.similarEnds("a generation of other wordings", map[string]any{"tenant": "dev", "surface": "faq"})
	q.similarEnds("a tag of other wordings", map[string]any{"tenant": "dev", "tags": []string{"doc-1"}})
	q.inTheShadow()
	q.badEmbedders(m)
	q.killedInLookups(q.members[3])
	q.movesKeepHits(q.members[3])
}

// paraphraseElsewhere: what one node was told is a hit at every other one, also as a stream.
func (q *quiz) paraphraseElsewhere() {
	q.t.Helper()
	for i, m := range q.members {
		part := fmt.Sprint("elsewhere ", i)
		q.teach(m, inPart(part, resetHow), inPart(part, resetCan), q.members...)
		for _, o := range q.members {
			if _, ok := q.similar(o, inPart(part+" else", resetCan)); ok {
				q.t.Errorf("%s answers what was asked in another place", o.name)
			}
			a := inPart(part, resetTell)
			a.stream = true
			if w := q.ask(o, a); w.code != http.StatusOK || w.cache != "semantic" || !strings.HasSuffix(strings.TrimSpace(w.text), "data: [DONE]") || !strings.Contains(w.text, "answer ") {
				q.t.Errorf("a stream in other words from %s: %+v", o.name, w)
			}
		}
	}
	if n := q.up.times(resetCan) + q.up.times(resetTell); n != 0 {
		q.t.Errorf("the model was asked %d times in other words", n)
	}
}

// whoseBalance: two users of a tenant, and one of another, on any nodes.
func (q *quiz) whoseBalance() {
	q.t.Helper()
	first, again := "What's my account balance?", "What is my account balance?"
	as := func(question, user, tenant string) asking {
		made := decoded[admin.CreatedKey](q.members[0].node, "keys", "create", "--tenant", tenant, "--user", user, "--surfaces", "own")
		q.awaitSame(q.members...)
		return inPart("balance", question, "X-Headgate-Surface", "own", "Authorization", "Bearer "+made.Key)
	}
	ann, bob, other := as(first, "ann", "dev"), as(again, "bob", "dev"), as(again, "ann", "acme")
	annAgain := ann
	annAgain.question = again
	q.teach(q.members[1], ann, annAgain, q.members...)
	for _, m := range q.members {
		for whose, a := range map[string]asking{"bob": bob, "acme's ann": other} {
			if entry, ok := q.similar(m, a); ok {
				q.t.Errorf("%s gives %s the balance of dev's ann, entry %s", m.name, whose, entry)
			}
		}
	}
	if w := q.ask(q.members[2], bob); w.code != http.StatusOK || w.cache != "miss" {
		q.t.Errorf("bob: %+v", w)
	}
}

// reportedWrong: by any node, and it is gone on all of them.
func (q *quiz) reportedWrong() {
	q.t.Helper()
	for i, m := range q.members {
		part := fmt.Sprint("wrong ", i)
		entry := q.teach(q.members[0], inPart(part, resetHow), inPart(part, resetCan), q.members...)
		if got := m.node.ok("cache", "wrong", entry); !strings.Contains(got, entry) {
			q.t.Errorf("%s", got)
		}
		for _, o := range q.members {
			if _, ok := q.similar(o, inPart(part, resetCan)); ok {
				q.t.Errorf("%s serves what was reported to %s", o.name, m.name)
			}
		}
	}
	if r := q.members[0].node.cli("cache", "wrong", "0123456789abcdef"); r.code == 0 || !strings.Contains(r.stderr, "0123456789abcdef") {
		q.t.Errorf("an entry that nobody knows: %d %s", r.code, r.stderr)
	}
}

// similarEnds: what ends answers ends those in other words, on all nodes.
func (q *quiz) similarEnds(what string, in map[string]any) {
	q.t.Helper()
	first, again := inPart(what, resetHow, "X-Headgate-Cache-Tags", "doc-1, doc-3"), inPart(what, resetCan)
	q.teach(q.members[0], first, again, q.members...)
	q.gone(what, again, in)
	q.teach(q.members[1], first, again, q.members...) // anew
}

// inTheShadow: what would be a hit is counted, and the model answers.
func (q *quiz) inTheShadow() {
	q.t.Helper()
	in := []string{"X-Headgate-Surface", "shade"}
	first := inPart("shade", resetHow, in...)
	if w := q.ask(q.members[0], first); w.code != http.StatusOK || w.cache != "miss" {
		q.t.Errorf("%+v", w)
	}
	m := q.members[1]
	shadows := func() float64 {
		return total(q.t, m, "headgate_cache_requests_total", `outcome="shadow",tier="semantic"`)
	}
	blanks := " "
	eventually(q.t, "a would-be hit", func() bool {
		w := q.ask(m, inPart("shade", strings.Replace(resetCan, " ", blanks, 1), in...))
		if w.code != http.StatusOK || w.cache != "miss" {
			q.t.Fatalf("in the shadow: %+v", w)
		}
		blanks += " "
		return shadows() > 0
	})
	if _, ok := q.similar(m, inPart("shade", resetTell, in...)); ok {
		q.t.Error("the shadow serves")
	}
}

// badEmbedders: one that is not there, one that says nonsense and one that says nothing cost nobody an answer, and are left alone after a while.
func (q *quiz) badEmbedders(mumbler *mumbler) {
	q.t.Helper()
	const asks = 60
	m := q.members[2]
	for _, surface := range []string{"deaf", "mumbles", "waits"} {
		failed := func() float64 {
			return total(q.t, m, "headgate_cache_requests_total", `outcome="failed",tier="semantic"`)
		}
		before := failed()
		for i := range asks {
			if w := q.ask(m, inPart(surface, fmt.Sprintf("%s, in the case of %d", resetHow, i), "X-Headgate-Surface", surface)); w.code != http.StatusOK || w.cache != "miss" || !strings.Contains(w.text, "answer ") {
				q.t.Fatalf("%s: %+v", surface, w)
			}
		}
		if n := failed() - before; n != asks {
			q.t.Errorf("%s: %v of %d looks failed", surface, n, asks)
		}
	}
	if n := mumbler.asked.Load(); n == 0 || n > asks/2 {
		q.t.Errorf("a model that says nonsense was asked %d times by %d requests", n, asks)
	}
	if n := mumbler.hangs.Load(); n == 0 || n > asks/2 {
		q.t.Errorf("a model that says nothing was asked %d times by %d requests", n, asks)
	}
}

// killedInLookups: the owner of a place dies while it is asked about questions of that place. All are answered; what is
// asked after that is learnt by whoever has the place then.
func (q *quiz) killedInLookups(victim *member) {
	q.t.Helper()
	rest := q.others(victim)
	part := ""
	for i := 0; part == ""; i++ {
		if p := fmt.Sprint("killed ", i); q.owner(rest[0], inPart(p, resetCan)) == victim {
			part = p
		}
	}
	q.teach(rest[0], inPart(part, resetHow), inPart(part, resetCan), q.members...)
	ctx, stop := context.WithCancel(q.t.Context())
	defer stop()
	var answered, hits atomic.Int64
	var asking sync.WaitGroup
	for i := range 12 {
		asking.Go(func() {
			for n := 1; ctx.Err() == nil; n++ {
				text := strings.Replace(resetCan, " ", strings.Repeat(" ", n), 1) // another wording each, and nobody else's
				text = strings.Replace(text, "?", strings.Repeat("?", i+2), 1)
				if w := q.ask(rest[i%len(rest)], inPart(part, text)); w.err != nil || w.code != http.StatusOK || !strings.Contains(w.text, "answer ") {
					q.t.Errorf("while the owner died: %+v", w)
					return
				} else if w.cache == "semantic" {
					hits.Add(1)
				}
				answered.Add(1)
			}
		})
	}
	eventually(q.t, "hits before the owner dies", func() bool { return hits.Load() > 100 })
	victim.end(syscall.SIGKILL)
	at := answered.Load()
	q.awaitView(rest...)
	eventually(q.t, "answers after that", func() bool { return answered.Load() > at+100 })
	stop()
	asking.Wait()
	q.t.Logf("%d requests around the death of the owner, %d hits", answered.Load(), hits.Load())
	heir := q.owner(rest[0], inPart(part, resetCan))
	if heir == victim {
		q.t.Errorf("%s is dead and has the place", victim.name)
	}
	q.teach(rest[1], inPart(part, "Where can I see my invoices?"), inPart(part, "Where can I find my invoices?"), rest...)
}

// movesKeepHits: a node that comes gets its places with what is in them, and one that leaves in order leaves them to others.
func (q *quiz) movesKeepHits(m *member) {
	q.t.Helper()
	rest := q.others(m)
	const places = 16
	part := func(i int) string { return fmt.Sprint("moves ", i) }
	owned := func() (n int) {
		for i := range places {
			if q.owner(rest[0], inPart(part(i), resetCan)) == m {
				n++
			}
		}
		return n
	}
	kept := func(when string, members []*member) {
		q.t.Helper()
		for i := range places {
			for _, o := range members {
				eventually(q.t, fmt.Sprintf("place %d at %s %s", i, o.name, when), func() bool { _, ok := q.similar(o, inPart(part(i), resetCan)); return ok })
			}
		}
	}
	for i := range places {
		q.teach(rest[i%len(rest)], inPart(part(i), resetHow), inPart(part(i), resetCan), rest[0])
	}
	m.up()
	q.awaitView(q.members...)
	began := time.Now()
	kept("after it came", q.members)
	came := owned()
	q.t.Logf("%d of %d places moved to %s, hits everywhere %s after the view", came, places, m.name, seconds(time.Since(began)))
	if came == 0 {
		q.t.Errorf("nothing moved to %s", m.name)
	}
	began = time.Now()
	m.end(syscall.SIGTERM)
	q.awaitView(rest...)
	kept("after it left", rest)
	q.t.Logf("hits everywhere %s after it was told to leave", seconds(time.Since(began)))
	if n := owned(); n != 0 {
		q.t.Errorf("%d places are still those of %s, which left", n, m.name)
	}
}
