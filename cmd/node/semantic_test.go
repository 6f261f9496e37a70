package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"headgate/cache"
	"headgate/cache/embed/embedtest"
	"headgate/cache/semantic"
	"headgate/proxy"
	"headgate/proxy/openai"
)

// parrot is a model server that answers each question by its words, or by what it was told to say.
type parrot struct {
	mu    sync.Mutex
	says  map[string]string
	asked []string
}

func (p *parrot) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		_, _ = io.WriteString(w, `{"object": "list", "data": [{"id": "m"}]}`)
		return
	}
	var in struct {
		Messages []struct{ Content string }
	}
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	text := in.Messages[len(in.Messages)-1].Content
	p.mu.Lock()
	p.asked = append(p.asked, text)
	says, ok := p.says[text]
	p.mu.Unlock()
	if !ok {
		says = "You asked: " + text
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, chatSays(says))
}

func (p *parrot) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.asked)
}

func chatSays(text string) string {
	return fmt.Sprintf(`{"id":"c","object":"chat.completion","created":7,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":%q},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`, text)
}

const semanticPolicy = `version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b]}]
plans: [{name: p}]
tenants: [{name: dev, plan: p}, {name: acme, plan: p}]
surfaces:
  - {name: help, share: tenant, exact: {normalize: fold, ttl: 1h}, semantic: {mode: static, threshold: 0.85, audit: 0.000001, ttl: %s}}
`

// helpDesk is a node before a parrot whose questions are compared by their words.
type helpDesk struct {
	t      *testing.T
	n      *Node
	parrot *parrot
}

func newHelpDesk(t *testing.T, ttl string) *helpDesk {
	d := &helpDesk{t: t, parrot: &parrot{says: map[string]string{}}}
	up := httptest.NewServer(d.parrot)
	t.Cleanup(up.Close)
	d.n = start(t, func(c *Config) { c.Policy = policyFile(t, fmt.Sprintf(semanticPolicy, up.URL, ttl)) })
	d.n.similar.embedders.byModel[""] = &embedderUse{Embedder: new(embedtest.Words), study: new(embedtest.Words)}
	return d
}

// ask gives the word of the cache, and the header.
func (d *helpDesk) ask(text string, pairs ...string) (word string, h http.Header) {
	d.t.Helper()
	body := fmt.Sprintf(`{"model":"m","temperature":0,"messages":[{"role":"user","content":%q}]}`, text)
	req, err := http.NewRequestWithContext(d.t.Context(), http.MethodPost, "http://"+d.n.Addr()+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer node-test-key-0123")
	req.Header.Set("X-Headgate-Surface", "help")
	for i := 0; i < len(pairs); i += 2 {
		req.Header.Set(pairs[i], pairs[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		d.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		d.t.Fatalf("status %d: %s, %v", resp.StatusCode, got, err)
	}
	return resp.Header.Get("X-Headgate-Cache"), resp.Header
}

// learned waits until so many entries are kept for other wordings.
func (d *helpDesk) learned(entries int) {
	d.t.Helper()
	d.until(func() bool {
		n := 0
		for _, s := range d.n.similar.cache.Stats() {
			n += s.Entries
		}
		return n == entries
	})
}

// until waits for a condition.
func (d *helpDesk) until(met func() bool) {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), time.Minute)
	defer cancel()
	for !met() {
		select {
		case <-ctx.Done():
			d.t.Fatal("what was waited for did not come")
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// TestWorkedExample is the one that everybody is told.
func TestWorkedExample(t *testing.T) {
	d := newHelpDesk(t, "1h")
	want := func(text, word, similarity string, pairs ...string) {
		t.Helper()
		got, h := d.ask(text, pairs...)
		if got != word || h.Get("X-Headgate-Similarity") != similarity {
			t.Errorf("%q: %s at %q, want %s at %q", text, got, h.Get("X-Headgate-Similarity"), word, similarity)
		}
	}
	want("How do I reset my password?", "miss", "")
	d.learned(1)
	want("how do I reset my PASSWORD?", "exact", "")
	want("How can I reset my password?", "semantic", "0.866")
	want("How can I reset my password?", "miss", "", "X-Headgate-Similarity", "0.87")
	want("What is the refund window for annual plans?", "miss", "")
	d.learned(3)
	want("What is the refund window for monthly plans?", "miss", "") // .833
	d.learned(4)
}

// TestWorkedExampleEnds: after its time nothing is served by it, and nothing of it is left.
func TestWorkedExampleEnds(t *testing.T) {
	d := newHelpDesk(t, "1s")
	d.ask("How do I reset my password?")
	d.learned(1)
	if word, _ := d.ask("How can I reset my password?"); word != "semantic" && word != "miss" { // the machine may be slow
		t.Errorf("%s", word)
	}
	d.until(func() bool { word, _ := d.ask("How can I reset my password? "); return word != "semantic" })
	if n := d.parrot.count(); n < 2 {
		t.Errorf("the model was asked %d times", n)
	}
}

// TestCompare: what tells whether two answers say the same.
func TestCompare(t *testing.T) {
	type verdict struct {
		same bool
		err  error
	}
	call := strings.Replace(chatSays("x"), `"content":"x"`, `"content":null,"tool_calls":[{"id":"t","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]`, 1)
	long := func(s string) string {
		return chatSays("Thank you for asking about your order with us, which we have found. " + s + strings.Repeat(" Our team is glad to help you with whatever else you need to know about it.", 40))
	}
	for _, c := range []struct {
		name, before, now string
		verifier          *verdict // nil: there is none
		want              semantic.Label
	}{
		{"the same", chatSays("Click  Reset."), chatSays("click reset."), nil, semantic.Label{Same: true, Known: true, By: "exact"}},
		{"other words", chatSays("You click the reset button on the login page"), chatSays("Click reset button on the login page"), nil, semantic.Label{Same: true, Known: true, By: "embedding"}},
		{"another answer", chatSays("Click reset on the login page."), chatSays("Orders ship within the week."), nil, semantic.Label{Known: true, By: "embedding"}},
		{"another number", chatSays("Refunds are possible within 30 days."), chatSays("Refunds are possible within 14 days."), nil, semantic.Label{Known: true, By: "facts"}},
		{"another number, at length", long("Refunds are possible within 30 days."), long("Refunds are possible within 14 days."), nil, semantic.Label{Known: true, By: "facts"}},
		{"a negation, at length", long("Refunds are possible within 30 days."), long("Refunds are not possible within 30 days."), nil, semantic.Label{Known: true, By: "facts"}},
		{"another word, at length", long("You want the amber form."), long("You want the orchid form."), nil, semantic.Label{Known: true, By: "facts"}},
		{"a negation", chatSays("You can cancel your order after payment."), chatSays("You cannot cancel your order after payment."), nil, semantic.Label{Known: true, By: "facts"}},
		{"a call", chatSays("Click reset."), call, nil, semantic.Label{Known: true, By: "tools"}},
		{"one that was cut", chatSays("Click reset."), strings.Replace(chatSays("Click"), `"stop"`, `"length"`, 1), nil, semantic.Label{}},
		{"one that says nothing", chatSays("Click reset."), chatSays(""), nil, semantic.Label{}},
		{"close, and it is", chatSays("Click reset on the login page"), chatSays("Click reset on the start page please"), &verdict{same: true}, semantic.Label{Same: true, Known: true, By: "verifier"}},
		{"close, and it is not", chatSays("Click reset on the login page"), chatSays("Click reset on the start page please"), &verdict{}, semantic.Label{Known: true, By: "verifier"}},
		{"close, and nobody knows", chatSays("Click reset on the login page"), chatSays("Click reset on the start page please"), &verdict{err: errors.New("no")}, semantic.Label{Known: true, By: "embedding"}},
		{"far", chatSays("Click reset on the login page."), chatSays("Orders ship within the week."), &verdict{same: true}, semantic.Label{Known: true, By: "embedding"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &similar{verify: func(_ context.Context, _ *proxy.Model, what, _, _ string) (bool, error) {
				if what != answersTo {
					t.Errorf("it compares two %s", what)
				}
				return c.verifier.same, c.verifier.err
			}}
			l := &lesson{rules: &proxy.SemanticCache{Answers: 0.85}, study: new(embedtest.Words)}
			if c.verifier != nil {
				l.rules.Verifier = &proxy.Model{}
			}
			var got semantic.Label
			if s.compare(t.Context(), l, said(openai.Chat, []byte(c.before)), said(openai.Chat, []byte(c.now)), &got); !reflect.DeepEqual(got, c.want) {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

// TestSaid: what is compared of an answer.
func TestSaid(t *testing.T) {
	for _, c := range []struct {
		body string
		want saying
	}{
		{chatSays(" Hello,\n\tWORLD "), saying{raw: " Hello,\n\tWORLD \n", text: "hello, world", whole: true}},
		{strings.Replace(chatSays("Yes."), `"content"`, `"reasoning":"Well, no.","content"`, 1), saying{raw: "Yes.\n", text: "yes.", whole: true}},
		{strings.Replace(chatSays("Yes"), `"stop"`, `"length"`, 1), saying{}},
		{chatSays(""), saying{}},
		{chatSays(strings.Repeat("x", maxSaid+1)), saying{}},
		{`{"choices":1}`, saying{}},
	} {
		if got := said(openai.Chat, []byte(c.body)); got != c.want {
			t.Errorf("%.60s: %+v", c.body, got)
		}
	}
	long := strings.Repeat("word ", 5000) + strings.Repeat("é", 500)
	pieces := chunks(long)
	if len(pieces) != maxChunks {
		t.Errorf("%d pieces", len(pieces))
	}
	for _, p := range pieces {
		if len(p) > chunkSaid || strings.ContainsRune(p, '\ufffd') {
			t.Errorf("a piece of %d bytes: %q", len(p), p)
		}
	}
	if got := strings.Join(chunks(strings.Repeat("ab cd ", 200)), " "); strings.Join(strings.Fields(got), " ") != strings.TrimSpace(strings.Repeat("ab cd ", 200)) {
		t.Error("something is lost between the pieces")
	}
}

// TestAnswersAgeWhileTheyWait to be compared.
func TestAnswersAgeWhileTheyWait(t *testing.T) {
	d := newHelpDesk(t, "1m")
	s := d.n.similar
	q := proxy.SemanticQuestion{Context: &proxy.CacheContext{Tenant: "dev", Surface: "help", Path: "/v1/chat/completions", Body: []byte(`{"messages":[{"role":"user","content":"How do I reset my password?"}]}`)}, Kind: openai.Chat, Surface: &proxy.Surface{Name: "help", Semantic: &proxy.SemanticCache{Mode: "static", Threshold: .85, ErrorBound: .01, HitErrorBound: .02, Audit: 1e-6, TTL: time.Minute, Answers: .9}}}
	l, _ := s.lesson(t.Context(), &q)
	l.answer, l.keep, l.taught = answer(&proxy.CacheEntry{Tenant: "dev", Surface: "help", Body: []byte(chatSays("Click reset."))}), true, s.now()-int64(30*time.Second)
	l.answer.Life = cache.Life{TTL: time.Minute, MaxTTL: time.Minute}
	l.said = s.cache.Ask(t.Context(), &l.question)
	s.study(t.Context(), l)
	d.learned(1)
	again, _ := s.lesson(t.Context(), &q)
	if a := s.cache.Ask(t.Context(), &again.question); a.Entry == nil || a.Age < 30*time.Second {
		t.Errorf("%+v", a)
	}
}

// TestLessonsAreBounded by their number and by their bytes, of all and of each tenant, and taken from one tenant after the other.
func TestLessonsAreBounded(t *testing.T) {
	s := newLessons()
	push := func(tenant string, size int) bool {
		return s.push(&lesson{question: semantic.Question{Tenant: tenant}, answer: &cache.Entry{Body: make([]byte, size)}})
	}
	n := 0
	for push("flood", 1000) {
		n++
	}
	if n != maxLessons/lessonShare {
		t.Errorf("a tenant has room for %d", n)
	}
	for range 3 {
		if !push("calm", 10) {
			t.Fatal("another has none")
		}
	}
	if push("large", maxLessonBytes/lessonShare+1) || !push("large", maxLessonBytes/lessonShare) || push("large", 1) {
		t.Error("bytes are not bounded")
	}
	var order []string
	for range 8 {
		order = append(order, s.take().question.Tenant)
	}
	if want := []string{"flood", "calm", "large", "flood", "calm", "flood", "calm", "flood"}; !slices.Equal(order, want) {
		t.Errorf("%v, want %v", order, want)
	}
	for s.take() != nil {
		n--
	}
	if n != 4 || s.n != 0 || s.bytes != 0 || len(s.queues) != 0 || len(s.turns) != 0 {
		t.Errorf("%d, %+v", n, s)
	}
	ctx, stop := context.WithCancel(t.Context())
	got := make(chan *lesson)
	go func() { got <- s.pop(ctx); got <- s.pop(ctx) }()
	push("calm", 1)
	if l := <-got; l == nil {
		t.Error("nothing came")
	}
	stop()
	if l := <-got; l != nil {
		t.Error("something came")
	}
}

// TestWhatIsNotComparedIsKept: an answer that nothing is beside needs no turn, and where there is no turn it is kept without.
func TestWhatIsNotComparedIsKept(t *testing.T) {
	d := newHelpDesk(t, "1h")
	s := *d.n.similar
	s.lessons = newLessons() // which nobody takes from
	for i := range maxLessons {
		s.lessons.push(&lesson{question: semantic.Question{Tenant: fmt.Sprint(i % (2 * lessonShare))}, answer: &cache.Entry{}})
	}
	for i, rules := range []proxy.SemanticCache{
		{Mode: "static", Threshold: .85, ErrorBound: .01, HitErrorBound: .02, Audit: .05, TTL: time.Minute, Answers: .9},
		{Mode: "learned", ErrorBound: .01, HitErrorBound: .02, Audit: .05, TTL: time.Minute, Answers: .9},
	} {
		q := proxy.SemanticQuestion{
			Context: &proxy.CacheContext{Tenant: "dev", Surface: "help", Path: "/v1/chat/completions", Body: fmt.Appendf(nil, `{"messages":[{"role":"user","content":"Where is order %d?"}]}`, i)},
			Kind:    openai.Chat, Surface: &proxy.Surface{Name: "help", Semantic: &rules},
		}
		l, why := s.lesson(t.Context(), &q)
		if l == nil {
			t.Fatal(why)
		}
		l.said = s.cache.Ask(t.Context(), &l.question)
		s.teach(l, &proxy.CacheEntry{Tenant: "dev", Surface: "help", Body: []byte(chatSays("On its way."))}, true)
		d.learned(i + 1)
	}
	if s.lessons.n != maxLessons {
		t.Errorf("%d lessons wait", s.lessons.n)
	}
}

// TestWhatIsTooLargeIsAnAuditAllTheSame: one that found out nothing, and nothing is kept of it.
func TestWhatIsTooLargeIsAnAuditAllTheSame(t *testing.T) {
	d := newHelpDesk(t, "1h")
	s := d.n.similar
	rules := proxy.SemanticCache{Mode: "static", Threshold: .85, ErrorBound: .01, HitErrorBound: .02, Audit: 1, TTL: time.Minute, Answers: .9}
	ask := func(text string) *lesson {
		q := proxy.SemanticQuestion{
			Context: &proxy.CacheContext{Tenant: "dev", Surface: "help", Path: "/v1/chat/completions", Body: fmt.Appendf(nil, `{"messages":[{"role":"user","content":%q}]}`, text)},
			Kind:    openai.Chat, Surface: &proxy.Surface{Name: "help", Semantic: &rules},
		}
		l, why := s.lesson(t.Context(), &q)
		if l == nil {
			t.Fatal(why)
		}
		l.said = s.cache.Ask(t.Context(), &l.question)
		return l
	}
	entry := &proxy.CacheEntry{Tenant: "dev", Surface: "help", Body: []byte(chatSays("Click reset."))}
	s.teach(ask("How do I reset my password?"), entry, true)
	d.learned(1)
	l := ask("How can I reset my password?")
	if l.said.Entry == nil {
		t.Fatalf("%+v", l.said)
	}
	s.teach(l, &proxy.CacheEntry{Tenant: "dev", Surface: "help", Body: make([]byte, maxLesson+1)}, true)
	d.until(func() bool { return s.cache.Stats()[0].Budget.Unlabelled == 1 })
	d.learned(1)
}

// TestAlike: what two answers have in common does not make them say the same.
func TestAlike(t *testing.T) {
	polite := strings.Repeat("Thank you for asking about this, we are glad to help you today. ", 10)
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{"You want the amber form.", "You want the orchid form.", false},
		{polite + "You want the amber form. " + polite, polite + "You want the orchid form. " + polite, false},
		{polite + "You want the amber form.", polite + "You want the amber form. Shipping takes three weeks.", false},
		{polite + "You want the amber form.", "You want the amber form. " + polite, true},
		{"1. Open settings\n2. Choose reset", "* open settings.\n* choose reset", false}, // the numbers are words of it
		{"- Open settings\n- Choose reset", "* open settings.\n* choose reset", true},
	} {
		e := new(embedtest.Words)
		got, err := alike(t.Context(), e, said(openai.Chat, []byte(chatSays(c.a))), said(openai.Chat, []byte(chatSays(c.b))))
		if err != nil || (got >= 0.92) != c.same {
			t.Errorf("%q and %q: %v, %v", c.a, c.b, got, err)
		}
	}
}

// TestVerifier: only a plain word counts, and what the questions say is data.
func TestVerifier(t *testing.T) {
	for _, c := range []struct {
		answer string
		err    error
		same   bool
		fails  bool
	}{
		{chatSays("yes"), nil, true, false},
		{chatSays(" **Yes.**\n"), nil, true, false},
		{chatSays("No"), nil, false, false},
		{chatSays("Yes, but only"), nil, false, true},
		{chatSays(""), nil, false, true},
		{`{"choices":[]}`, nil, false, true},
		{`x`, nil, false, true},
		{"", errors.New("down"), false, true},
	} {
		var sent string
		v := verifier{func(_ context.Context, m *proxy.Model, path string, body []byte, _ int64) ([]byte, error) {
			sent = m.Name + path + string(body)
			return []byte(c.answer), c.err
		}}
		same, err := v.same(t.Context(), &proxy.Model{Name: "judge", Upstream: "up"}, questions, `is "it" on?`, "is it\noff?")
		if same != c.same || (err != nil) != c.fails {
			t.Errorf("%s: %v, %v", c.answer, same, err)
		}
		for _, part := range []string{"judge/v1/chat/completions", `"model":"up"`, `[\"is \\\"it\\\" on?\",\"is it\\noff?\"]`, `"temperature":0`, "two questions that users asked"} {
			if !strings.Contains(sent, part) {
				t.Errorf("%s lacks %s", sent, part)
			}
		}
	}
}

// TestPost: requests of the gateway's own go through its pool, past a backend that is not there.
func TestPost(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/broken":
			w.WriteHeader(http.StatusTeapot)
		case "/large":
			_, _ = w.Write(make([]byte, 100))
		default:
			_, _ = io.Copy(w, r.Body)
		}
	}))
	t.Cleanup(up.Close)
	policy := strings.Replace(fmt.Sprintf(adminPolicy, up.URL), "}]\nmodels: [{name: m, backends: [b]}]", `}, {name: gone, url: "http://127.0.0.1:1"}]
models: [{name: m, backends: [gone, b]}, {name: lost, backends: [gone]}]`, 1)
	n := start(t, func(c *Config) { c.Policy = policyFile(t, policy) })
	m := &proxy.Model{Backends: []string{"gone", "b"}}
	for range 5 { // whichever is tried first
		if got, err := n.post(t.Context(), m, "/echo", []byte("hello"), 99); err != nil || string(got) != "hello" {
			t.Fatalf("%s, %v", got, err)
		}
	}
	var status *statusError
	if _, err := n.post(t.Context(), m, "/broken", nil, 99); !errors.As(err, &status) || status.Status() != http.StatusTeapot {
		t.Errorf("%v", err)
	}
	if _, err := n.post(t.Context(), m, "/large", nil, 99); err == nil || !strings.Contains(err.Error(), "more than 99 bytes") {
		t.Errorf("%v", err)
	}
	if _, err := n.post(t.Context(), &proxy.Model{Backends: []string{"gone"}}, "/echo", nil, 99); err == nil {
		t.Error("nobody is there, and it answered")
	}
	n.proxy.SetSwitches(&proxy.Switches{Models: map[string]*proxy.Kill{"judge": {}}})
	m.Name = "judge"
	if _, err := n.post(t.Context(), m, "/echo", nil, 99); !errors.Is(err, errModelKilled) {
		t.Errorf("%v", err)
	}
}
