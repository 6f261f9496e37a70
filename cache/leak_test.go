package cache

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/text/unicode/norm"
	"pgregory.net/rapid"
)

// leakQuestion is what somebody asks, before it is known what of it counts.
type leakQuestion struct {
	tenant, user, claimed, surface string
	path, query, normalize         string
	header                         []string
	body                           *canonTree
}

// leakPlace is the surface of a tenant.
type leakPlace struct{ tenant, surface string }

// leakWorld is what operators set, and change while people ask.
type leakWorld struct {
	shares   map[leakPlace]bool
	template map[string]string // by surface
	version  map[string]string // by model
	backends []string
	all      uint64
	tenants  map[string]uint64
	surfaces map[string]uint64
	places   map[leakPlace]uint64
}

// context is what the front door makes of q: the code under test begins here.
func (w *leakWorld) context(q *leakQuestion, rng *rand.Rand) *Context {
	place := leakPlace{q.tenant, q.surface}
	c := &Context{
		Tenant: q.tenant, User: q.user, Claimed: q.claimed, Surface: q.surface, Template: w.template[q.surface],
		Model: "m", ModelVersion: w.version["m"], Backends: slices.Clone(w.backends),
		Generations: [4]uint64{w.all, w.tenants[q.tenant], w.surfaces[q.surface], w.places[place]},
		Path:        q.path, Query: q.query, Header: slices.Clone(q.header), Normalize: q.normalize,
		Body: q.body.render(nil, rng),
	}
	if w.shares[place] {
		c.User, c.Claimed = "", ""
	}
	rng.Shuffle(len(c.Backends), func(i, j int) { c.Backends[i], c.Backends[j] = c.Backends[j], c.Backends[i] })
	rng.Shuffle(len(c.Header), func(i, j int) { c.Header[i], c.Header[j] = c.Header[j], c.Header[i] })
	return c
}

// identity is the full tuple that the answer to q is kept under in the model, which shares
// nothing. It is found from the question itself, not from bytes, and by other code than Key's.
func (w *leakWorld) identity(q *leakQuestion) string {
	place := leakPlace{q.tenant, q.surface}
	who := fmt.Sprintf("%q %q", q.user, q.claimed)
	if w.shares[place] {
		who = `"" ""` // all; also those whom nobody named before it did
	}
	backends, header := slices.Sorted(slices.Values(w.backends)), slices.Sorted(slices.Values(q.header))
	return fmt.Sprintf("%q %s %q %q %q %q %d %d %d %d %q %q %q %q %s", q.tenant, who, q.surface, w.template[q.surface], w.version["m"], backends,
		w.all, w.tenants[q.tenant], w.surfaces[q.surface], w.places[place], q.path, q.query, header, q.normalize, leakBody(q))
}

// leakBody writes the body of q, but for what does not count.
func leakBody(q *leakQuestion) string {
	body := q.body.clone()
	var members []string
	for i, name := range body.names {
		switch name {
		case "stream", "stream_options", "user", "metadata", "request_id", "priority", "model":
			continue
		case "messages":
			leakNormalize(q.normalize, body.elems[i])
		}
		members = append(members, strconv.Quote(name)+":"+leakValue(body.elems[i]))
	}
	slices.Sort(members)
	return strings.Join(members, ",")
}

func leakValue(n *canonTree) string {
	var parts []string
	switch n.kind {
	case canonLiteral:
		return n.literal
	case canonNumber:
		m, e := n.mantissa, n.exponent
		for ; m != 0 && m%10 == 0; e++ {
			m /= 10
		}
		if m == 0 {
			return "0"
		}
		return fmt.Sprintf("%de%d", m, e)
	case canonString:
		return strconv.Quote(n.text)
	case canonArray:
		for _, e := range n.elems {
			parts = append(parts, leakValue(e))
		}
		return "[" + strings.Join(parts, ",") + "]"
	case canonObject:
		for i, e := range n.elems {
			parts = append(parts, strconv.Quote(n.names[i])+":"+leakValue(e))
		}
		slices.Sort(parts)
	}
	return "{" + strings.Join(parts, ",") + "}"
}

// leakNormalize rewrites the content of the last message of a user.
func leakNormalize(how string, messages *canonTree) {
	for _, m := range slices.Backward(messages.elems) {
		role, content := slices.Index(m.names, "role"), slices.Index(m.names, "content")
		if role < 0 || m.elems[role].kind != canonString || m.elems[role].text != "user" {
			continue
		}
		if content >= 0 && m.elems[content].kind == canonString && (how == NormalizeSpace || how == NormalizeFold) {
			text := strings.Join(strings.Fields(norm.NFC.String(m.elems[content].text)), " ")
			if how == NormalizeFold {
				text = strings.ToLower(text)
			}
			m.elems[content].text = text
		}
		return
	}
}

// leakTurn takes the content of the last message of a user out of messages.
func leakTurn(messages *canonTree) (text string) {
	for _, m := range slices.Backward(messages.elems) {
		role, content := slices.Index(m.names, "role"), slices.Index(m.names, "content")
		if role < 0 || m.elems[role].kind != canonString || m.elems[role].text != "user" {
			continue
		}
		if content >= 0 && m.elems[content].kind == canonString {
			text, m.elems[content].text = m.elems[content].text, ""
		}
		break
	}
	return text
}

// partition is the tuple without what was asked last, and that.
func (w *leakWorld) partition(q *leakQuestion) (identity, text string) {
	rest := *q
	rest.body = q.body.clone()
	if i := slices.Index(rest.body.names, "messages"); i >= 0 {
		text = strings.TrimSpace(leakTurn(rest.body.elems[i]))
	}
	return w.identity(&rest), text
}

// leakRun is one world, the answers that are kept under keys, and the model.
type leakRun struct {
	world     *leakWorld
	asked     []*leakQuestion // the latest
	cache     map[Key]string
	model     map[string]string
	parts     map[Key]string // likewise, of partitions
	partOf    map[string]Key
	hits, all int
}

const maxLeakAsked = 64

// Names that run into each other where something joins them without care.
var leakNames = []string{"", "a", "b", "ab", "a:b", "a\x00b", "A", "é", "e\u0301", "a ", "\"a\"", "all"} //nolint:gochecknoglobals // a table

func leakName(t *rapid.T, label string) string {
	return rapid.SampledFrom(leakNames).Draw(t, label)
}

func leakString(s string) *canonTree { return &canonTree{kind: canonString, text: s} }

func leakMessage(role, content string) *canonTree {
	return &canonTree{kind: canonObject, names: []string{"role", "content"}, elems: []*canonTree{leakString(role), leakString(content)}}
}

func drawLeakQuestion(t *rapid.T) *leakQuestion {
	texts := []string{"Hi", "hi", " hi ", "h i", "H  I", "É", "é", "e\u0301", "No", ""}
	messages := &canonTree{kind: canonArray}
	for range rapid.IntRange(1, 3).Draw(t, "messages") {
		messages.elems = append(messages.elems, leakMessage(
			rapid.SampledFrom([]string{"user", "user", "assistant", "system"}).Draw(t, "role"), rapid.SampledFrom(texts).Draw(t, "content")))
	}
	q := &leakQuestion{
		tenant: leakName(t, "tenant"), user: leakName(t, "user"), claimed: leakName(t, "claimed"), surface: leakName(t, "surface"),
		path: "/v1/chat/completions", normalize: rapid.SampledFrom([]string{"", NormalizeSpace, NormalizeFold}).Draw(t, "normalize"),
		body: &canonTree{kind: canonObject, names: []string{"model", "messages"}, elems: []*canonTree{leakString("m"), messages}},
	}
	for _, name := range []string{"stream", "user", "temperature", "seed", "x"} {
		if rapid.IntRange(0, 3).Draw(t, "has "+name) == 0 {
			q.body.names = append(q.body.names, name)
			q.body.elems = append(q.body.elems, drawCanonTree(t, 1))
		}
	}
	return q
}

// vary is q, but for one thing, or in all.
func (q leakQuestion) vary(t *rapid.T, rng *rand.Rand) *leakQuestion {
	q.body, q.header = q.body.clone(), slices.Clone(q.header)
	switch rapid.IntRange(0, 15).Draw(t, "vary") {
	case 0:
		q.tenant = leakName(t, "tenant")
	case 1:
		q.user = leakName(t, "user")
	case 2:
		q.claimed = leakName(t, "claimed")
	case 3:
		q.surface = leakName(t, "surface")
	case 4:
		q.tenant, q.user, q.claimed, q.surface = q.surface, q.claimed, q.user, q.tenant
	case 5:
		q.query = leakName(t, "query")
	case 6:
		q.header = append(q.header[:len(q.header)/2], rapid.SampledFrom([]string{"A: 1", "A: 2", "A", "B: 1"}).Draw(t, "header"))
	case 7:
		nodes := q.body.all()[1:] // it stays an object
		nodes[rng.IntN(len(nodes))].change(rng)
	case 8:
		q.normalize = rapid.SampledFrom([]string{"", NormalizeSpace, NormalizeFold}).Draw(t, "normalize")
	}
	return &q
}

// ask looks the answer to q up in both, and keeps one where there is none.
func (r *leakRun) ask(t *rapid.T, q *leakQuestion, rng *rand.Rand) {
	r.all++
	c := r.world.context(q, rng)
	key := keyOf(t, c)
	identity := r.world.identity(q)
	got, hit := r.cache[key]
	want, known := r.model[identity]
	switch {
	case hit && got != identity:
		t.Fatalf("a foreign answer:\n%s was asked\n%s was answered", identity, got)
	case hit != known || hit && want != got:
		t.Fatalf("hit %v, the model's %v: %s", hit, known, identity)
	case hit:
		r.hits++
	default:
		r.cache[key], r.model[identity] = identity, identity
	}
	r.part(t, q, c, key)
	if r.asked = append(r.asked, q); len(r.asked) > maxLeakAsked {
		r.asked = r.asked[1:]
	}
}

// part holds q's partition against those before: who asks something similar has to be of the same.
func (r *leakRun) part(t *rapid.T, q *leakQuestion, c *Context, key Key) {
	identity, want := r.world.partition(q)
	part, text, ok, err := c.Partition("e")
	if err != nil || ok != (want != "") || text != want {
		t.Fatalf("%q was asked, and the partition's text is %q, %v, %v", want, text, ok, err)
	}
	if !ok {
		return
	}
	if before, known := r.parts[part]; known && before != identity || part == key {
		t.Fatalf("a foreign partition:\n%s was asked\n%s shares it", identity, before)
	}
	if before, known := r.partOf[identity]; known && before != part {
		t.Fatalf("two partitions of %s", identity)
	}
	r.parts[part], r.partOf[identity] = identity, part
}

func (r *leakRun) actions() map[string]func(*rapid.T) {
	source := func(t *rapid.T) *rand.Rand { return rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)) }
	again := func(t *rapid.T) {
		if len(r.asked) == 0 {
			t.Skip("nobody has asked")
		}
		rng := source(t)
		r.ask(t, r.asked[rapid.IntRange(0, len(r.asked)-1).Draw(t, "of")].vary(t, rng), rng)
	}
	return map[string]func(*rapid.T){
		"ask": func(t *rapid.T) { r.ask(t, drawLeakQuestion(t), source(t)) },
		// Most questions are near another: rapid takes each of these as often.
		"again": again, "once more": again, "and again": again,
		"change": func(t *rapid.T) {
			w, tenant, surface := r.world, leakName(t, "tenant"), leakName(t, "surface")
			place := leakPlace{tenant, surface}
			switch rapid.IntRange(0, 40).Draw(t, "what") {
			case 0, 1:
				w.shares[place] = !w.shares[place]
			case 2:
				w.template[surface] = leakName(t, "template")
			case 3:
				w.version["m"] = leakName(t, "version")
			case 4:
				w.backends = rapid.SliceOfN(rapid.SampledFrom(leakNames), 1, 2).Draw(t, "backends")
			case 5:
				w.tenants[tenant]++
			case 6:
				w.surfaces[surface]++
			case 7:
				w.places[place]++
			case 8:
				w.all++
			}
		},
	}
}

// The leak hunt, of keys: people of several tenants ask nearly the same things, on surfaces
// that share and that do not, while operators change what they can. An answer is never
// another's, and never missed. HEADGATE_LEAK_STEPS sets how many steps are taken.
func TestLeakHunt(t *testing.T) {
	want, run := 5000, 1000
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
	var steps, asked, hits int
	for steps < want && !t.Failed() {
		set("rapid.checks", strconv.Itoa((want-steps+run-1)/run))
		rapid.Check(t, func(t *rapid.T) {
			r := &leakRun{
				world: &leakWorld{
					shares: make(map[leakPlace]bool), template: make(map[string]string), version: make(map[string]string), backends: []string{"a"},
					tenants: make(map[string]uint64), surfaces: make(map[string]uint64), places: make(map[leakPlace]uint64),
				},
				cache: make(map[Key]string), model: make(map[string]string), parts: make(map[Key]string), partOf: make(map[string]Key),
			}
			actions := r.actions()
			for _, name := range leakNames {
				r.world.shares[leakPlace{"a", name}] = true
			}
			actions[""] = func(t *rapid.T) {
				if len(r.cache) != len(r.model) {
					t.Fatalf("%d keys of %d questions", len(r.cache), len(r.model))
				}
				steps++
			}
			t.Repeat(actions)
			asked, hits = asked+r.all, hits+r.hits
		})
	}
	t.Logf("%d steps, %d questions, %d of them answered from the cache", steps, asked, hits)
	if hits < asked/50 || hits > asked*49/50 {
		t.Errorf("%d hits of %d questions: the hunt shows too little", hits, asked)
	}
}
