package proxy_test

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/proxy"
	"headgate/proxy/edge"
)

// The leak hunt through the front door. People of two tenants ask nearly the same things, alone and at once,
// on surfaces that share and that do not, while operators end what is kept and change the policy. The model
// server answers each request with its number. What the test knows of requests, it knows by itself: it makes
// bodies out of their meaning and never reads one.

// leakAsk is a request by what it means.
type leakAsk struct {
	tenant, key    int
	header, inBody string // users that it names; "": none
	surface        int
	model          string // by a name of it
	system, before string // messages before the last, if any
	text           string
	option, seed   string // as a number; "": absent
	version        string // a header that counts
	query          string
	route          int
	tags           string
	mode           string // of X-Headgate-Cache
	stream         bool
}

// leakHunter holds what is known of what was asked.
type leakHunter struct {
	w     *world
	round int
	setup setup

	mu     sync.Mutex
	who    []string // by number of the request: whose answer it may be
	tags   []string // and by what it ends
	epoch  int      // rises with each invalidation
	raised map[string]int
	asked  []*leakAsk

	requests, others, calls int
}

var (
	leakTexts = []string{"Hi", "hi", " hi ", "h i", "H  I", "é", "e\u0301", "É", "a\tb", "a b"}
	leakMark  = regexp.MustCompile(`#(\d+)/(\d+)#`)
)

// leakSurfaces by number: shared, not shared, shared by meaning, another that shares, personal.
func leakSurfaces() []*proxy.Surface {
	life := func(s *proxy.Surface) {
		s.Exact.Life = proxy.CacheLife{TTL: time.Hour, Stale: time.Hour, StaleIfError: time.Hour, Beta: 1}
		s.Exact.Timestamps = true
	}
	return []*proxy.Surface{
		faqWith(life),
		faqWith(func(s *proxy.Surface) { life(s); s.Name, s.Share = "own", false }),
		faqWith(func(s *proxy.Surface) { life(s); s.Name, s.Exact.Normalize = "fold", "fold" }),
		faqWith(func(s *proxy.Surface) { life(s); s.Name, s.Exact.Normalize = "space", "space" }),
		faqWith(func(s *proxy.Surface) { life(s); s.Name, s.Share, s.Personal = "personal", false, true }),
	}
}

// serve answers with the number of the request, which its trace tells, and the epoch in which it came.
func (h *leakHunter) serve(_ int64, w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	text := fmt.Sprintf("#%s/%d#", r.Header.Get("Traceparent"), h.epoch)
	h.calls++
	h.mu.Unlock()
	body, _ := io.ReadAll(r.Body)
	if stream := bytes.Contains(body, []byte(`"stream":true`)); stream && r.URL.Path == "/v1/chat/completions" {
		emit(w, saysInPieces(1, text[:2], text[2:])...)
		return
	} else if stream {
		head := `data: {"id":"c","object":"text_completion","created":7,"model":"fake","choices":[{"index":0,"text":`
		emit(w, head+strconv.Quote(text)+`,"finish_reason":null}]}`+"\n\n", head+`"","finish_reason":"stop"}]}`+"\n\n", "data: [DONE]\n\n")
		return
	}
	if r.URL.Path == "/v1/chat/completions" {
		plain(w, says(1, text))
		return
	}
	plain(w, `{"id":"c","object":"text_completion","created":7,"model":"fake","choices":[{"index":0,"text":`+strconv.Quote(text)+`,"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`)
}

// begin is a round of its own: with tenants that nobody has asked for before.
func (h *leakHunter) begin() {
	h.round++
	h.setup.surfaces, h.raised, h.asked = leakSurfaces(), map[string]int{}, nil
	h.setup.callers = map[string]*proxy.Caller{}
	for tenant := range 2 {
		name := h.tenant(tenant)
		for key, c := range []*proxy.Caller{{AssertUser: true}, {}, {User: "ann"}, {User: "bob", AssertUser: true}} {
			c.KeyID, c.Tenant, c.AnySurface = "k"+strconv.Itoa(key), name, true
			h.setup.callers[h.key(tenant, key)] = c
		}
	}
	h.w.tenants = map[string]bool{"": true}
	h.w.apply(h.setup)
}

func (h *leakHunter) tenant(i int) string   { return fmt.Sprintf("%c%d", 'a'+i, h.round) }
func (h *leakHunter) key(t, key int) string { return fmt.Sprintf("hg_%s_%d", h.tenant(t), key) }

// whose is all that the answer may depend on.
func (h *leakHunter) whose(a *leakAsk) string {
	s := h.setup.surfaces[a.surface]
	text := a.text
	if n := s.Exact.Normalize; n != "none" {
		text = strings.Join(strings.Fields(strings.ReplaceAll(text, "e\u0301", "é")), " ")
		if n == "fold" {
			text = strings.ToLower(text)
		}
	}
	user := "*"
	if !s.Share {
		c := h.setup.callers[h.key(a.tenant, a.key)]
		user = "user " + c.User
		switch {
		case a.header != "":
			user = "user " + a.header
		case c.AssertUser && a.inBody != "":
			user = "user " + a.inBody
		case c.User == "":
			user = "key " + c.KeyID
		}
		user += " claims " + a.inBody
	}
	model := strings.TrimPrefix(a.model, "alias-")
	before := a.system + "|" + a.before
	if a.route == 1 {
		before = ""
	}
	return fmt.Sprintf("%s %s surface %s %q model %s %q %q %q option %s seed %s version %s query %s route %d",
		h.tenant(a.tenant), user, s.Name, s.Template, model, h.setup.models[slices.Index([]string{"m", "n"}, model)].Version, before, text, a.option, a.seed, a.version, a.query, a.route)
}

// spell is a number in one of its forms.
func spell(n string, rng *rand.Rand) string {
	return n + []string{"", ".0", "e0", ".000e0", "E+00"}[rng.IntN(5)]
}

// quote is a text in one of its forms.
func quote(s string, rng *rand.Rand) string {
	var b strings.Builder
	for _, c := range s {
		if c == '\t' || c < 0x10000 && rng.IntN(3) == 0 {
			fmt.Fprintf(&b, `\u%04x`, c)
		} else {
			b.WriteRune(c)
		}
	}
	return `"` + b.String() + `"`
}

// write spells a request, its members in any order.
func (a *leakAsk) write(rng *rand.Rand) string {
	message := func(role, text string) string {
		parts := []string{`"role":` + quote(role, rng), `"content":` + quote(text, rng)}
		rng.Shuffle(2, func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		return "{" + strings.Join(parts, ",") + "}"
	}
	members := []string{`"model":"` + a.model + `"`, `"temperature":` + spell("0", rng)}
	if a.route == 0 {
		var messages []string
		if a.system != "" {
			messages = append(messages, message("system", a.system))
		}
		if a.before != "" {
			messages = append(messages, message("user", a.before), message("assistant", "so"))
		}
		members = append(members, `"messages":[`+strings.Join(append(messages, message("user", a.text)), " , ")+`]`)
	} else {
		members = append(members, `"prompt":`+quote(a.text, rng))
	}
	for name, v := range map[string]string{"num_ctx": a.option, "seed": a.seed} {
		if v != "" {
			members = append(members, fmt.Sprintf(`"%s":%s`, name, spell(v, rng)))
		}
	}
	if a.inBody != "" {
		members = append(members, `"user":`+quote(a.inBody, rng))
	}
	if a.stream {
		members = append(members, `"stream":true`)
	}
	if rng.IntN(4) == 0 {
		members = append(members, fmt.Sprintf(`"metadata":{"trace":"%d"}`, rng.Int()))
	}
	rng.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
	return "{" + strings.Join(members, []string{",", ", ", "\n,"}[rng.IntN(3)]) + "}"
}

// draw is any request, vary one that is near.
func (h *leakHunter) draw(t *rapid.T) *leakAsk {
	a := &leakAsk{model: "m", text: leakTexts[0]}
	for range rapid.IntRange(0, 4).Draw(t, "changes") {
		a = h.vary(t, a)
	}
	return a
}

func (h *leakHunter) vary(t *rapid.T, from *leakAsk) *leakAsk {
	a := *from
	pick := func(from ...string) string { return rapid.SampledFrom(from).Draw(t, "to") }
	users := []string{"", "", "ann", "bob", "k0", "key k1"}
	switch rapid.IntRange(0, 20).Draw(t, "vary") {
	case 0:
		a.tenant = 1 - a.tenant
	case 1, 2:
		if a.key = rapid.IntRange(0, 3).Draw(t, "key"); a.key == 1 || a.key == 2 {
			a.header = "" // it may name nobody
		}
	case 3:
		if a.key == 0 || a.key == 3 {
			a.header = pick(users...)
		}
	case 4:
		a.inBody = pick(users...)
	case 5, 6:
		a.surface = rapid.IntRange(0, 4).Draw(t, "surface")
	case 7:
		a.model = pick("m", "n", "alias-m")
	case 8:
		a.system = pick("", "be brief", "be long")
	case 9:
		a.before = pick("", "Hi", "hi")
	case 10, 11:
		a.text = pick(leakTexts...)
	case 12:
		a.option = pick("", "1", "2")
	case 13:
		a.seed = pick("", "1", "9007199254740993", "9007199254740992")
	case 14:
		a.version = pick("", "1", "2")
	case 15:
		a.query = pick("", "?a=1", "?a=2")
	case 16:
		a.route = 1 - a.route
	case 17:
		a.tags = pick("", "x", "y", "x,y")
	case 18:
		a.mode = pick("", "", "bypass", "refresh", "only")
	default:
		a.stream = !a.stream
	}
	return &a
}

// send asks, and judges the answer.
func (h *leakHunter) send(a *leakAsk, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 5))
	whose := h.whose(a)
	h.mu.Lock()
	n := len(h.who)
	h.who = append(h.who, whose)
	least := max(h.raised[h.tenant(a.tenant)], h.raised[h.setup.surfaces[a.surface].Name], h.raised[h.tenant(a.tenant)+" "+h.setup.surfaces[a.surface].Name])
	h.tags = append(h.tags, a.tags)
	h.requests++
	h.mu.Unlock()
	r := httptest.NewRequest(http.MethodPost, []string{"/v1/chat/completions", "/v1/completions"}[a.route]+a.query, strings.NewReader(a.write(rng)))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer "+h.key(a.tenant, a.key))
	for name, v := range map[string]string{
		"X-Headgate-Surface": h.setup.surfaces[a.surface].Name, "X-Headgate-User": a.header, "X-Headgate-Cache": a.mode,
		"X-Headgate-Cache-Tags": a.tags, "Anthropic-Version": a.version, "Traceparent": strconv.Itoa(n), "User-Agent": strconv.Itoa(rng.IntN(3)),
	} {
		if v != "" {
			r.Header.Set(name, v)
		}
	}
	w := httptest.NewRecorder()
	h.w.proxy.ServeHTTP(w, r)
	text := w.Body.String()
	if w.Code == http.StatusGatewayTimeout && a.mode == "only" {
		return nil
	}
	if w.Code != http.StatusOK {
		return fmt.Errorf("%s\nwas answered %d %s", whose, w.Code, text)
	}
	if a.stream {
		text = strings.Join(regexp.MustCompile(`"(?:content|text)":"([^"]*)"`).FindAllString(text, -1), "")
		text = strings.NewReplacer(`"content":"`, "", `"text":"`, "", `"`, "").Replace(text)
	}
	marks := leakMark.FindAllStringSubmatch(text, -1)
	if len(marks) != 1 {
		return fmt.Errorf("%s\nwas answered %q", whose, w.Body)
	}
	of, _ := strconv.Atoi(marks[0][1])
	in, _ := strconv.Atoi(marks[0][2])
	h.mu.Lock()
	defer h.mu.Unlock()
	for tag := range strings.SplitSeq(h.tags[of], ",") {
		least = max(least, h.raised[h.tenant(a.tenant)+" #"+tag])
	}
	switch {
	case h.who[of] != whose:
		return fmt.Errorf("a foreign answer:\n%s\nwas answered as\n%s", whose, h.who[of])
	case in < least:
		return fmt.Errorf("%s\nwas answered by what ended before: epoch %d, after %d", whose, in, least)
	case of != n:
		h.others++
		if word := w.Header().Get("X-Headgate-Cache"); !slices.Contains([]string{"exact", "live", "stale"}, word) {
			return fmt.Errorf("%s\nwas answered by another's answer and is told %q", whose, word)
		}
	}
	return nil
}

func (h *leakHunter) ask(t *rapid.T, as ...*leakAsk) {
	errs := make([]error, len(as))
	seed := rapid.Uint64().Draw(t, "seed")
	if len(as) == 1 {
		errs[0] = h.send(as[0], seed)
	} else {
		var all sync.WaitGroup
		for i, a := range as {
			all.Go(func() { errs[i] = h.send(a, seed+uint64(i)) })
		}
		all.Wait()
	}
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	if h.asked = append(h.asked, as...); len(h.asked) > 60 {
		h.asked = h.asked[len(h.asked)-60:]
	}
}

func (h *leakHunter) near(t *rapid.T) *leakAsk {
	if len(h.asked) == 0 {
		return h.draw(t)
	}
	a := h.asked[rapid.IntRange(0, len(h.asked)-1).Draw(t, "of")]
	if rapid.Bool().Draw(t, "as it was") {
		return a
	}
	return h.vary(t, a)
}

func (h *leakHunter) raise(place string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.epoch++
	h.raised[place] = h.epoch
}

func (h *leakHunter) change(t *rapid.T) {
	tenant, surface := h.tenant(rapid.IntRange(0, 1).Draw(t, "tenant")), rapid.IntRange(0, 4).Draw(t, "surface")
	name := h.setup.surfaces[surface].Name
	switch rapid.IntRange(0, 30).Draw(t, "what") {
	case 0:
		h.raise(tenant)
		h.w.shelf.raise(tenant, "")
	case 1:
		h.raise(tenant + " " + name)
		h.w.shelf.raise(tenant, name)
	case 2:
		tag := rapid.SampledFrom([]string{"x", "y"}).Draw(t, "tag")
		h.raise(tenant + " #" + tag)
		h.w.shelf.untag(tenant, tag)
	case 3:
		h.w.shelf.pass(time.Duration(rapid.IntRange(1, 90).Draw(t, "minutes")) * time.Minute)
	case 4, 5, 6:
		s := *h.setup.surfaces[surface]
		if rapid.Bool().Draw(t, "template") {
			s.Template = rapid.SampledFrom([]string{"", "v1", "v2"}).Draw(t, "to")
		} else if !s.Personal {
			s.Share = !s.Share
		}
		h.setup.surfaces = slices.Clone(h.setup.surfaces)
		h.setup.surfaces[surface] = &s
		h.w.apply(h.setup)
	case 7:
		m := rapid.IntRange(0, 1).Draw(t, "model")
		h.setup.models = slices.Clone(h.setup.models)
		h.setup.models[m] = changed(model(h.setup.models[m].Name, "vllm"), func(n *proxy.Model) {
			n.Upstream, n.Version = h.setup.models[m].Upstream, rapid.SampledFrom([]string{"1", "2"}).Draw(t, "version")
		})
		h.w.apply(h.setup)
	}
}

// TestLeakHuntThroughTheProxy: nobody is given another's answer. HEADGATE_LEAK_STEPS sets how many steps are
// taken.
func TestLeakHuntThroughTheProxy(t *testing.T) {
	want, run := 4000, 500
	if many := os.Getenv("HEADGATE_LEAK_STEPS"); many != "" {
		n, err := strconv.Atoi(many)
		if err != nil || n < 1 {
			t.Fatalf("HEADGATE_LEAK_STEPS is %q; use a number above 0", many)
		}
		want = n
	}
	set := func(name, value string) {
		if err := flag.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"rapid.steps", "rapid.checks"} {
		before := flag.Lookup(name).Value.String()
		t.Cleanup(func() { set(name, before) })
	}
	set("rapid.steps", strconv.Itoa(run)) // on average
	h := &leakHunter{setup: setup{
		prefilter: edge.PrefilterConfig{RequestsPerSecond: 1e6, RequestBurst: 1e6, ErrorsPerMinute: 1e6, ErrorBurst: 1e6}, surfaces: leakSurfaces(), aliases: map[string]string{"alias-m": "m"},
		models: []*proxy.Model{model("m", "vllm"), changed(model("n", "vllm"), func(m *proxy.Model) { m.Upstream = "fake2" })},
	}}
	h.setup.around = script(h.serve).around
	h.w = newWorld(t, h.setup)
	steps := 0
	for steps < want && !t.Failed() {
		set("rapid.checks", strconv.Itoa((want-steps+run-1)/run))
		rapid.Check(t, func(t *rapid.T) {
			h.begin()
			alone := func(t *rapid.T) { h.ask(t, h.near(t)) }
			t.Repeat(map[string]func(*rapid.T){
				"ask": func(t *rapid.T) { h.ask(t, h.draw(t)) }, "near": alone, "near too": alone, "nearer": alone,
				"crowd": func(t *rapid.T) {
					as := make([]*leakAsk, rapid.IntRange(2, 6).Draw(t, "crowd"))
					for i := range as {
						as[i] = h.near(t)
					}
					h.ask(t, as...)
				},
				"change": h.change,
				"":       func(*rapid.T) { steps++ },
			})
		})
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	t.Logf("%d steps, %d requests, %d of them answered by another's answer, the model was asked %d times", steps, h.requests, h.others, h.calls)
	if h.others < h.requests/20 || h.others > h.requests*19/20 {
		t.Errorf("%d of %d requests got another's answer: the hunt shows too little", h.others, h.requests)
	}
}
