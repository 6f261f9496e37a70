package node

import (
	"encoding/json"
	"errors"
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

	"headgate/cache/guard"
)

// The leak hunt among questions in other words, through the whole of a node. People of two tenants ask nearly
// the same things, alone and at once, while operators end what is kept, report answers and change the policy.
// All questions are alike to the embedders, at .97, and guards can tell some by a number only. The model server
// answers each request with its number. What the test knows of a request it knows by itself.

// wish is a request by what it means.
type wish struct {
	tenant, key    int
	header, inBody string // users that it names; "": none
	surface        int
	model          string // by a name of it
	system, before string // messages before the last, if any
	account        string // that it asks for: a number, which guards tell; "": none
	words          int    // of many wordings
	blanks         uint64 // between the words
	option         string // a member of the body
	version        string // a header that counts
	route          int
	tags           string
	mode           string // of X-Headgate-Cache
	least          string // of X-Headgate-Similarity
	stream         bool
}

// wordings of one question; guards have nothing to object to any two.
func wordings() []string {
	return []string{
		"What's my account balance?", "What is my account balance?", "what's my account balance, please", "Please tell me, what's my account balance?",
		"Could you tell me what my account balance is?", "Hi, what is my account balance?",
	}
}

// text is how it is said.
func (a *wish) text() string {
	words := strings.Fields(wordings()[a.words%len(wordings())])
	if a.account != "" {
		for i, w := range words {
			if w == "account" {
				words[i] = "account " + a.account
			}
		}
	}
	var b strings.Builder
	for i, w := range words {
		b.WriteString(w + " ")
		if a.blanks>>i&1 != 0 {
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// bankPlace is a surface as operators have it.
type bankPlace struct {
	name, template, share, normalize, semantic, embedder string
}

// tellers hold what is known of what was asked.
type tellers struct {
	t        *testing.T
	n        *Node
	rng      *rand.Rand
	urls     [2]any
	keys     [2][4]string
	places   []bankPlace
	versions map[string]string // by model

	mu       sync.Mutex
	names    map[string]int // each that is whose an answer may be, once
	whose    []int          // by number of the request
	tags     []string
	epoch    int // rises with whatever ends answers
	raised   map[string]int
	asked    []*wish
	entries  []string        // that were served lately
	reported map[string]bool // entries

	requests, others, similar, calls int
}

const bankPolicy = `version: 1
backends: [{name: b, url: %q, slots: 1000}, {name: e, url: %q, slots: 1000}]
models:
  - {name: m, aliases: [alias-m], version: %q, backends: [b], default_temperature: 0}
  - {name: n, upstream_model: big, version: %q, backends: [b], default_temperature: 0}
  - {name: e1, version: %q, backends: [e]}
plans: [{name: p}]
tenants: [{name: t0, plan: p}, {name: t1, plan: p}]
surfaces:
`

func newTellers(t *testing.T, seed uint64) *tellers {
	t.Helper()
	h := &tellers{
		t: t, rng: rand.New(rand.NewPCG(seed, 6)), names: map[string]int{}, raised: map[string]int{}, reported: map[string]bool{}, versions: map[string]string{"m": "1", "n": "1", "e1": "1"},
		places: []bankPlace{
			{"all", "v1", "tenant", "none", "mode: static, threshold: 0.6, audit: 0.000001, error_bound: 0.2, hit_error_bound: 0.5", "builtin"},
			{"own", "v1", "user", "none", "mode: static, threshold: 0.7, audit: 0.000001, error_bound: 0.2, hit_error_bound: 0.5", "builtin"},
			{"fold", "v1", "tenant", "fold", "mode: static, threshold: 0.8, audit: 0.000001, error_bound: 0.2, hit_error_bound: 0.5", "e1"},
			{"shade", "v1", "tenant", "none", "mode: shadow", "builtin"},
			{"learns", "v1", "user", "none", "mode: learned, error_bound: 0.2, hit_error_bound: 0.5, answers: 0.6", "builtin"},
			{"audits", "v1", "tenant", "none", "mode: static, threshold: 0.9, audit: 0.2, error_bound: 0.2, hit_error_bound: 0.5", "builtin"},
		},
	}
	up := httptest.NewServer(h)
	t.Cleanup(up.Close)
	vectors := httptest.NewServer(http.HandlerFunc(serveVectors))
	t.Cleanup(vectors.Close)
	h.urls = [2]any{up.URL, vectors.URL}
	h.n = start(t, func(c *Config) {
		c.Policy, c.Prefilter = policyFile(t, h.policy()), PrefilterConfig{RequestsPerSecond: 1e6, RequestBurst: 1e6, ErrorsPerMinute: 1e6, ErrorBurst: 1e6}
	})
	h.n.similar.embedders.byModel[""] = &embedderUse{Embedder: blurred{"builtin"}}
	for tenant := range h.keys {
		for i, in := range []map[string]any{{"assert_user": true}, {}, {"user": "ann"}, {"user": "bob", "assert_user": true}} {
			in["tenant"], in["id"], in["surfaces"] = fmt.Sprint("t", tenant), fmt.Sprintf("t%d-k%d", tenant, i), []string{"*"}
			h.keys[tenant][i] = newKey(t, h.n, in)
		}
	}
	return h
}

// policy is what operators have written.
func (h *tellers) policy() string {
	var b strings.Builder
	fmt.Fprintf(&b, bankPolicy, h.urls[0], h.urls[1], h.versions["m"], h.versions["n"], h.versions["e1"])
	for _, p := range h.places {
		fmt.Fprintf(&b, "  - {name: %s, template_version: %s, share: %s, exact: {ttl: 1h, beta: 0, normalize: %s, timestamps: ok}, semantic: {%s, embedder: %s}}\n",
			p.name, p.template, p.share, p.normalize, p.semantic, p.embedder)
	}
	return b.String()
}

// ServeHTTP answers with the number of the request, which its trace tells, and the epoch in which it came.
func (h *tellers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if r.Method != http.MethodPost {
		_, _ = io.WriteString(w, `{"object": "list", "data": [{"id": "m"}]}`)
		return
	}
	h.mu.Lock()
	says := fmt.Sprintf("#%s/%d#", r.Header.Get("Traceparent"), h.epoch)
	h.calls++
	h.mu.Unlock()
	raw, _ := io.ReadAll(r.Body)
	chat := r.URL.Path == "/v1/chat/completions"
	switch stream := strings.Contains(string(raw), `"stream":true`); {
	case stream:
		w.Header().Set("Content-Type", "text/event-stream")
		kind, said, end := "text_completion", `"text":"`+says+`"`, `"text":""`
		if chat {
			kind, said, end = "chat.completion.chunk", `"delta":{"role":"assistant","content":"`+says+`"}`, `"delta":{}`
		}
		for _, choice := range []string{said + `,"finish_reason":null`, end + `,"finish_reason":"stop"`} {
			_, _ = fmt.Fprintf(w, `data: {"id":"c","object":%q,"created":7,"model":"m","choices":[{"index":0,%s}]}`+"\n\n", kind, choice)
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	case chat:
		_, _ = io.WriteString(w, chatSays(says))
	default:
		_, _ = fmt.Fprintf(w, `{"id":"c","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":%q,"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`, says)
	}
}

// owner is all that the answer may depend on.
func (h *tellers) owner(a *wish) string {
	p := &h.places[a.surface]
	user := "*"
	if p.share == "user" {
		ofKey := []string{"", "", "ann", "bob"}[a.key]
		switch {
		case a.header != "":
			user = "user " + a.header
		case (a.key == 0 || a.key == 3) && a.inBody != "":
			user = "user " + a.inBody
		case ofKey == "":
			user = fmt.Sprint("key ", a.key)
		default:
			user = "user " + ofKey
		}
		user += " claims " + a.inBody
	}
	before := a.system + "|" + a.before
	if a.route == 1 {
		before = ""
	}
	model := strings.TrimPrefix(a.model, "alias-")
	return fmt.Sprintf("tenant %d %s surface %s %s model %s %s %q account %q option %s version %s route %d",
		a.tenant, user, p.name, p.template, model, h.versions[model], before, a.account, a.option, a.version, a.route)
}

// body spells a request.
func (a *wish) body() string {
	in := map[string]any{"model": a.model}
	if a.route == 0 {
		body := turns(a.system, a.text())
		if a.before != "" {
			body = turns(a.system, a.before, "so", a.text())
		}
		in["messages"] = body["messages"]
	} else {
		in["prompt"] = a.text()
	}
	if name, value, ok := strings.Cut(a.option, "="); ok {
		in[name] = json.Number(value)
	}
	if a.inBody != "" {
		in["user"] = a.inBody
	}
	if a.stream {
		in["stream"] = true
	}
	raw, err := json.Marshal(in)
	if err != nil {
		panic(err)
	}
	return string(raw)
}

// near is one that was asked before, in other words or with one thing changed; or a new one.
func (h *tellers) near() *wish {
	a := wish{model: "m"}
	changes := h.rng.IntN(5)
	if len(h.asked) > 0 && h.rng.IntN(8) > 0 {
		a, changes = *h.asked[h.rng.IntN(len(h.asked))], min(h.rng.IntN(3), 1)
	}
	a.words, a.blanks, a.mode, a.least = h.rng.IntN(99), h.rng.Uint64N(32), "", ""
	for range changes {
		h.vary(&a)
	}
	return &a
}

func (h *tellers) vary(a *wish) {
	pick := func(from ...string) string { return from[h.rng.IntN(len(from))] }
	users := []string{"", "", "ann", "bob", "t0-k0", "cid"}
	switch h.rng.IntN(18) {
	case 0:
		a.tenant = 1 - a.tenant
	case 1, 2:
		if a.key = h.rng.IntN(4); a.key == 1 || a.key == 2 {
			a.header = "" // it may name nobody
		}
	case 3:
		if a.key == 0 || a.key == 3 {
			a.header = pick(users...)
		}
	case 4:
		a.inBody = pick(users...)
	case 5, 6:
		a.surface = h.rng.IntN(len(h.places))
	case 7:
		a.model = pick("m", "n", "alias-m")
	case 8:
		a.system = pick("", "I am Ann.", "I am Bob.")
	case 9:
		a.before = pick("", "I am Ann.", "I am Bob.")
	case 10, 11:
		a.account = pick("", "17", "71", "170")
	case 12:
		a.option = pick("", "seed=1", "seed=2", "top_p=0.5", "max_tokens=5", "num_ctx=1")
	case 13:
		a.version = pick("", "1", "2")
	case 14:
		a.route = 1 - a.route
	case 15:
		a.tags = pick("", "x", "y", "x,y")
	case 16:
		a.mode, a.least = pick("", "bypass", "refresh", "only"), pick("", "0.1", "0.995", "1")
	default:
		a.stream = !a.stream
	}
}

// send asks, and judges the answer.
func (h *tellers) send(a *wish) error {
	whose, place := h.owner(a), h.places[a.surface].name
	tenant := fmt.Sprint("t", a.tenant)
	h.mu.Lock()
	id, ok := h.names[whose]
	if !ok {
		id = len(h.names)
		h.names[whose] = id
	}
	n := len(h.whose)
	h.whose, h.tags = append(h.whose, id), append(h.tags, a.tags)
	least := max(h.raised[" "], h.raised[tenant+" "], h.raised[" "+place], h.raised[tenant+" "+place])
	h.requests++
	h.mu.Unlock()
	w := frontDoor(h.n, h.keys[a.tenant][a.key], []string{"/v1/chat/completions", "/v1/completions"}[a.route], a.body(), "X-Headgate-Surface", place, "X-Headgate-User", a.header,
		"X-Headgate-Cache", a.mode, "X-Headgate-Similarity", a.least, "X-Headgate-Cache-Tags", a.tags, "Anthropic-Version", a.version, "Traceparent", strconv.Itoa(n))
	if w.Code == http.StatusGatewayTimeout && a.mode == "only" {
		return nil
	}
	marks := regexp.MustCompile(`#(\d+)/(\d+)#`).FindAllStringSubmatch(w.Body.String(), -1)
	if w.Code != http.StatusOK || len(marks) != 1 {
		return fmt.Errorf("%s\nwas answered %d %s", whose, w.Code, w.Body)
	}
	of, _ := strconv.Atoi(marks[0][1])
	in, _ := strconv.Atoi(marks[0][2])
	h.mu.Lock()
	defer h.mu.Unlock()
	for tag := range strings.SplitSeq(h.tags[of], ",") {
		least = max(least, h.raised[tenant+" #"+tag])
	}
	switch {
	case h.whose[of] != id:
		return fmt.Errorf("a foreign answer:\n%s\nwas answered as\n%s", whose, h.name(h.whose[of]))
	case in < least:
		return fmt.Errorf("%s\nwas answered by what ended before: epoch %d, after %d", whose, in, least)
	case of != n:
		h.others++
		return h.anothers(a, w.Header())
	}
	return nil
}

func (h *tellers) name(id int) string {
	for name, i := range h.names {
		if i == id {
			return name
		}
	}
	return "nobody"
}

// anothers judges how an answer came that was another request's.
func (h *tellers) anothers(a *wish, got http.Header) error {
	word, entry := got.Get("X-Headgate-Cache"), got.Get("X-Headgate-Cache-Entry")
	if word != "semantic" {
		if entry != "" || !slices.Contains([]string{"exact", "live"}, word) {
			return fmt.Errorf("another's answer is told as %q, entry %q", word, entry)
		}
		return nil
	}
	h.similar++
	similarity, err := strconv.ParseFloat(got.Get("X-Headgate-Similarity"), 64)
	least, _ := strconv.ParseFloat("0"+strings.TrimPrefix(a.least, "0"), 64)
	switch {
	case err != nil || len(entry) != 16:
		return fmt.Errorf("a hit at %q of entry %q", got.Get("X-Headgate-Similarity"), entry)
	case h.reported[entry]:
		return fmt.Errorf("entry %s was reported, and is served", entry)
	case a.least == "1" || similarity < least-.001:
		return fmt.Errorf("a hit at %v for who wants %s", similarity, a.least)
	case strings.HasPrefix(h.places[a.surface].semantic, "mode: shadow"):
		return errors.New("a hit in the shadow")
	}
	if h.entries = append(h.entries, entry); len(h.entries) > 20 {
		h.entries = h.entries[1:]
	}
	return nil
}

// admin calls the node, which must do as told.
func (h *tellers) admin(method, path string, in any) {
	h.t.Helper()
	body, ok := in.(string)
	if !ok {
		raw, err := json.Marshal(in)
		if err != nil {
			h.t.Fatal(err)
		}
		body = string(raw)
	}
	if status, text := ask(h.t, h.n, method, "/admin/v1/"+path, rootBearer, body); status != http.StatusOK {
		h.t.Fatalf("%s %s %s: %d %s", method, path, body, status, text)
	}
}

// change is what an operator does.
func (h *tellers) change() {
	h.t.Helper()
	tenant, p := fmt.Sprint("t", h.rng.IntN(2)), &h.places[h.rng.IntN(len(h.places))]
	what := h.rng.IntN(15)
	h.mu.Lock()
	h.epoch++
	now := h.epoch
	h.mu.Unlock()
	ends := ""
	switch what {
	case 0, 1, 2, 3: // of whom, and of what
		if what == 0 && h.rng.IntN(4) > 0 {
			return // all there is: seldom
		}
		in := map[string]any{"all": what == 0}
		if what&1 != 0 {
			in["tenant"], ends = tenant, tenant
		}
		if ends += " "; what&2 != 0 {
			in["surface"] = p.name
			ends += p.name
		}
		h.admin(http.MethodPost, "cache/invalidate", in)
	case 4, 5:
		tag := []string{"x", "y"}[h.rng.IntN(2)]
		h.admin(http.MethodPost, "cache/invalidate", map[string]any{"tenant": tenant, "tags": []string{tag}})
		ends = tenant + " #" + tag
	case 6, 7:
		if n := len(h.entries); n > 0 {
			entry := h.entries[h.rng.IntN(n)]
			h.reported[entry] = true
			status, text := ask(h.t, h.n, http.MethodPost, "/admin/v1/cache/wrong", rootBearer, fmt.Sprintf(`{"entry": %q}`, entry))
			if status != http.StatusOK && status != http.StatusNotFound {
				h.t.Fatalf("report of %s: %d %s", entry, status, text)
			}
		}
		return
	case 8, 9:
		p.template = fmt.Sprint("v", 1+h.rng.IntN(2))
	case 10, 11:
		p.share = []string{"tenant", "user"}[h.rng.IntN(2)]
	case 12:
		p.embedder = []string{"builtin", "e1"}[h.rng.IntN(2)]
	default:
		h.versions[[]string{"m", "m", "n", "e1"}[h.rng.IntN(4)]] = fmt.Sprint(1 + h.rng.IntN(2))
	}
	if ends == "" {
		h.admin(http.MethodPut, "policy", h.policy())
		return
	}
	h.mu.Lock()
	h.raised[ends] = now
	h.mu.Unlock()
}

// step is one thing that happens.
func (h *tellers) step() {
	h.t.Helper()
	if h.rng.IntN(40) == 0 {
		h.change()
		return
	}
	wishes := make([]*wish, 1)
	if h.rng.IntN(12) == 0 {
		wishes = make([]*wish, 2+h.rng.IntN(4))
	}
	errs := make([]error, len(wishes))
	for i := range wishes {
		wishes[i] = h.near()
	}
	var all sync.WaitGroup
	for i, a := range wishes[1:] {
		all.Go(func() { errs[i+1] = h.send(a) })
	}
	errs[0] = h.send(wishes[0])
	all.Wait()
	for _, err := range errs {
		if err != nil {
			h.t.Fatal(err)
		}
	}
	if h.asked = append(h.asked, wishes...); len(h.asked) > 60 {
		h.asked = h.asked[len(h.asked)-60:]
	}
}

// leakRound is how many steps are taken at one node: a tenant may learn so many answers at once, and few a second after that.
const leakRound = 3000

// TestLeakHuntInOtherWords: nobody is given another's answer. HEADGATE_LEAK_STEPS sets how many steps are taken,
// HEADGATE_LEAK_SEED which are the first.
func TestLeakHuntInOtherWords(t *testing.T) {
	steps, seed := 2*leakRound, 1
	for name, to := range map[string]*int{"HEADGATE_LEAK_STEPS": &steps, "HEADGATE_LEAK_SEED": &seed} {
		if value := os.Getenv(name); value != "" {
			n, err := strconv.Atoi(value)
			if err != nil || n < 1 {
				t.Fatalf("%s is %q; use a number above 0", name, value)
			}
			*to = n
		}
	}
	for _, a := range wordings() {
		for _, b := range wordings() {
			if x, y := guard.Parse(a), guard.Parse(b); !x.Compare(y).Allowed() || x.Shared(y) < .2 {
				t.Fatalf("%q and %q are told apart: %v, %v", a, b, x.Compare(y), x.Shared(y))
			}
		}
	}
	for ; steps > 0 && !t.Failed(); steps, seed = steps-leakRound, seed+1 {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			newTellers(t, uint64(seed)).hunt(min(steps, leakRound))
		})
	}
}

func (h *tellers) hunt(steps int) {
	h.t.Helper()
	first := wish{surface: 1, header: "ann", model: "m"}
	second := first
	second.header, second.words = "bob", 1
	for _, a := range []*wish{&first, &second} {
		if err := h.send(a); err != nil {
			h.t.Fatal(err)
		}
	}
	for range steps {
		h.step()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.t.Logf("%d steps, %d requests of %d partitions, %d of them answered by another's answer, %d of those in other words, the model was asked %d times",
		steps, h.requests, len(h.names), h.others, h.similar, h.calls)
	if h.similar < steps/10 {
		h.t.Errorf("%d hits in other words in %d steps: nothing was hunted", h.similar, steps)
	}
}
