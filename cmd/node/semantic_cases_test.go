package node

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"headgate/cache/embed"
	"headgate/cache/embed/embedtest"
	"headgate/cache/guard"
	"headgate/cache/vec"
)

// The cases of 03-cache.md about questions in other words, through the front door of a node. Its embedder tells
// no texts apart and the guards have nothing to object to, so that all that keeps two questions apart is what
// is meant to.

// blurred is such an embedder: two texts have a similarity of .97.
type blurred struct{ version string }

func (a blurred) Version() string { return "blurred " + a.version }
func (blurred) Dim() int          { return 64 }

func (a blurred) Embed(ctx context.Context, texts []string) ([][]float32, error) {
	out := make([][]float32, len(texts))
	for i, text := range texts {
		h := fnv.New32a()
		_, _ = h.Write([]byte(a.version + text)) // never fails
		v := make([]float32, a.Dim())
		v[0], v[1+h.Sum32()%63] = float32(math.Sqrt(.97)), float32(math.Sqrt(.03))
		out[i] = v
	}
	return out, ctx.Err()
}

// serveVectors answers /v1/embeddings like blurred, in the version that the model's name is.
func serveVectors(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Model string
		Input []string
	}
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	vectors, _ := blurred{in.Model}.Embed(r.Context(), in.Input) // it is gone then
	type row struct {
		Index     int       `json:"index"`
		Embedding []float32 `json:"embedding"`
	}
	out := struct {
		Data []row `json:"data"`
	}{make([]row, len(vectors))}
	for i, v := range vectors {
		out.Data[i] = row{i, v}
	}
	_ = json.NewEncoder(w).Encode(out) // or the node is gone
}

// forum is a node before a parrot, whose questions are all alike.
type forum struct {
	t      *testing.T
	n      *Node
	parrot *parrot
	keys   map[string]string // by tenant
	policy string
	kept   int          // entries that there must be
	embeds atomic.Int64 // calls of the models that embed
}

// forumPolicy has a place for what changes: the embedder, and the version of the template.
const forumPolicy = `version: 1
backends: [{name: b, url: %q}, {name: e, url: %q}]
models: [{name: m, backends: [b], default_temperature: 0}, {name: n, backends: [b], default_temperature: 0}, {name: e1, version: "1", backends: [e]}, {name: e2, version: "1", backends: [e]}]
plans: [{name: p}]
tenants: [{name: alice, plan: p}, {name: bob, plan: p}, {name: cid, plan: p}, {name: dan, plan: p}]
surfaces:
  - {name: test1, share: tenant, template_version: v1, exact: {ttl: 1h, timestamps: ok}, semantic: {mode: static, threshold: 0.6, audit: 0.000001, embedder: builtin}}
  - {name: test2, share: tenant, template_version: v1, exact: {ttl: 1h, timestamps: ok}, semantic: {mode: static, threshold: 0.6, audit: 0.000001, embedder: builtin}}
  - {name: own, exact: {ttl: 1h, timestamps: ok}, semantic: {mode: static, threshold: 0.6, audit: 0.000001, embedder: builtin}}
`

func forumTenants() []string { return []string{"alice", "bob", "cid", "dan"} }

func newForum(t *testing.T, change func(*Config)) *forum {
	t.Helper()
	f := &forum{t: t, parrot: &parrot{says: map[string]string{}}, keys: map[string]string{}}
	up := httptest.NewServer(f.parrot)
	t.Cleanup(up.Close)
	vectors := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.embeds.Add(1)
		serveVectors(w, r)
	}))
	t.Cleanup(vectors.Close)
	f.policy = fmt.Sprintf(forumPolicy, up.URL, vectors.URL)
	f.n = start(t, func(c *Config) {
		c.Policy, c.Prefilter = policyFile(t, f.policy), PrefilterConfig{RequestsPerSecond: 1e6, RequestBurst: 1e6, ErrorsPerMinute: 1e6, ErrorBurst: 1e6}
		if change != nil {
			change(c)
		}
	})
	f.n.similar.embedders.byModel[""] = &embedderUse{Embedder: blurred{"builtin"}}
	for _, tenant := range forumTenants() {
		f.keys[tenant] = newKey(t, f.n, map[string]any{"tenant": tenant, "surfaces": []string{"*"}, "assert_user": true})
	}
	return f
}

// newKey makes one.
func newKey(t *testing.T, n *Node, in map[string]any) string {
	t.Helper()
	body, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	return must[object](t, n, http.StatusOK, http.MethodPost, "keys", rootBearer, string(body))["key"].(string)
}

// apply changes the policy.
func (f *forum) apply(old, with string) {
	f.t.Helper()
	f.policy = strings.ReplaceAll(f.policy, old, with)
	must[object](f.t, f.n, http.StatusOK, http.MethodPut, "policy", rootBearer, f.policy)
}

// turns is a body with messages of the system, the user, the assistant, the user and so on; "" is left out.
func turns(texts ...string) map[string]any {
	var messages []map[string]string
	for i, text := range texts {
		role := []string{"assistant", "user"}[i%2]
		if i == 0 {
			role = "system"
		}
		if text != "" {
			messages = append(messages, map[string]string{"role": role, "content": text})
		}
	}
	return map[string]any{"model": "m", "messages": messages}
}

// with is a body with other members.
func with(body map[string]any, pairs ...any) map[string]any {
	body = maps.Clone(body)
	for i := 0; i < len(pairs); i += 2 {
		body[pairs[i].(string)] = pairs[i+1]
	}
	return body
}

// ask gives what the cache says. What the model answers is learnt before it returns.
func (f *forum) ask(tenant, surface string, body map[string]any, pairs ...string) (word string) {
	f.t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		f.t.Fatal(err)
	}
	w := frontDoor(f.n, f.keys[tenant], "/v1/chat/completions", string(raw), append(pairs, "X-Headgate-Surface", surface)...)
	if w.Code != http.StatusOK {
		f.t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	word = w.Header().Get("X-Headgate-Cache")
	if word == "miss" {
		f.kept++
		waitFor(f.t, fmt.Sprintf("the answer to %s is learnt", raw), func() bool { return entriesOf(f.n) == f.kept })
	}
	return word
}

// frontDoor asks without a connection.
func frontDoor(n *Node, key, path, body string, pairs ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer "+key)
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			r.Header.Set(pairs[i], pairs[i+1])
		}
	}
	w := httptest.NewRecorder()
	n.proxy.ServeHTTP(w, r)
	return w
}

// entriesOf counts what is kept for other wordings.
func entriesOf(n *Node) (sum int) {
	for _, s := range n.similar.cache.Stats() {
		sum += s.Entries
	}
	return sum
}

// want fails where the cache says something else.
func (f *forum) want(what, word, got string) {
	f.t.Helper()
	if got != word {
		f.t.Errorf("%s: %s, want %s", what, got, word)
	}
}

const (
	balanceIs   = "What's my account balance?"
	balanceWhat = "What is my account balance?"
	balanceTell = "Please tell me, what's my account balance?"
)

// TestAlikeTenants: the tenant's name stands in the prompt alone, and the prompts are alike.
func TestAlikeTenants(t *testing.T) {
	f := newForum(t, nil)
	alice, bob := "I'm a customer of Alice. ", "I'm a customer of Bob. "
	f.want("Alice's first", "miss", f.ask("alice", "test1", turns("", alice+balanceIs)))
	f.want("Bob's, in Alice's words", "miss", f.ask("bob", "test1", turns("", alice+balanceIs)))
	f.want("Bob's, in others", "miss", f.ask("bob", "own", turns("", alice+balanceWhat)))
	f.want("Alice's, in others", "semantic", f.ask("alice", "test1", turns("", alice+balanceWhat)))
	f.want("Alice's, of Bob", "miss", f.ask("alice", "test1", turns("", bob+balanceWhat))) // that the guards tell
	f.want("Bob's, in others", "semantic", f.ask("bob", "test1", turns("", alice+balanceWhat)))
}

// TestAlikeNamespaces: surfaces, users, whom the body names, and what a template was.
func TestAlikeNamespaces(t *testing.T) {
	f := newForum(t, nil)
	first, again := turns("", balanceIs), turns("", balanceWhat)
	f.want("test1", "miss", f.ask("alice", "test1", first))
	f.want("test2", "miss", f.ask("alice", "test2", again))
	f.want("own", "miss", f.ask("alice", "own", again, "X-Headgate-User", "ann"))
	f.want("own, of another", "miss", f.ask("alice", "own", first, "X-Headgate-User", "bob"))
	f.want("own, of nobody", "miss", f.ask("alice", "own", first))
	f.want("own, of whom the body names", "miss", f.ask("alice", "own", with(first, "user", "cid")))
	f.want("own, of whom both name", "miss", f.ask("alice", "own", with(first, "user", "cid"), "X-Headgate-User", "ann"))
	f.want("own, the same", "semantic", f.ask("alice", "own", turns("", balanceTell), "X-Headgate-User", "ann"))
	f.want("test1, whoever", "semantic", f.ask("alice", "test1", with(again, "user", "cid"), "X-Headgate-User", "bob"))
	f.apply("name: test1, share: tenant, template_version: v1", "name: test1, share: tenant, template_version: v2")
	f.want("another template", "miss", f.ask("alice", "test1", again))
	f.apply("name: m, backends: [b]", `name: m, version: "2", backends: [b]`)
	f.want("another version of the model", "miss", f.ask("alice", "test1", first))
	must[object](t, f.n, http.StatusOK, http.MethodPost, "cache/invalidate", rootBearer, `{"tenant": "alice", "surface": "test1"}`)
	f.want("another generation", "miss", f.ask("alice", "test1", first))
	f.want("the same, at last", "semantic", f.ask("alice", "test1", again))
}

// TestAlikeSettings: another wording is found whatever the hash of the request, and only under the same settings.
func TestAlikeSettings(t *testing.T) {
	f := newForum(t, nil)
	first, again := turns("", balanceIs), turns("", balanceWhat)
	f.want("the first", "miss", f.ask("alice", "test1", first))
	for name, body := range map[string]map[string]any{
		"top_p": with(again, "top_p", 0.5), "a cap": with(again, "max_tokens", 5), "stop": with(again, "stop", "."), "seed": with(again, "seed", 1),
		"a penalty": with(again, "frequency_penalty", 1), "a form": with(again, "response_format", map[string]string{"type": "json_object"}),
		"what nobody knows": with(again, "guided_choice", []string{"a", "b"}), "another model": with(again, "model", "n"), "a temperature": with(again, "temperature", 0),
		"tools": with(again, "tools", []any{map[string]any{"type": "function", "function": map[string]any{"name": "f"}}}),
	} {
		f.want(name, "miss", f.ask("alice", "test1", body))
	}
	f.want("a header that counts", "miss", f.ask("alice", "test1", again, "Anthropic-Beta", "x"))
	for name, body := range map[string]map[string]any{
		"nothing else": again, "metadata": with(turns("", balanceTell), "metadata", map[string]string{"trace": "1"}),
		"an id": with(turns("", "Well, "+balanceIs), "request_id", "7"), "a stream": with(again, "stream", true),
	} {
		f.want(name, "semantic", f.ask("alice", "test1", body))
	}
}

// TestAlikeConversations: "How old is he?" is another question after another one.
func TestAlikeConversations(t *testing.T) {
	f := newForum(t, nil)
	const old, oldToo = "How old is he?", "How old is he"
	f.want("after the first", "miss", f.ask("alice", "test1", turns("", "Who leads France?", "M.", old)))
	for name, body := range map[string]map[string]any{
		"after another": turns("", "Who leads Spain?", "S.", oldToo), "after another answer": turns("", "Who leads France?", "C.", oldToo),
		"after nothing": turns("", oldToo), "later on": turns("", "Who leads France?", "M.", "Well.", "So.", oldToo),
	} {
		f.want(name, "miss", f.ask("alice", "test1", body))
	}
	f.want("after the same", "semantic", f.ask("alice", "test1", turns("", "Who leads France?", "M.", oldToo)))
}

// TestAlikeSystemPrompts: one that differs by a blank makes another question.
func TestAlikeSystemPrompts(t *testing.T) {
	f := newForum(t, nil)
	f.want("the first", "miss", f.ask("alice", "test1", turns("You are a bank.", balanceIs)))
	for _, system := range []string{"", "You are a bank. ", "You are a bank", "you are a bank.", "You are a cloud."} {
		f.want(system, "miss", f.ask("alice", "test1", turns(system, balanceWhat)))
	}
	f.want("the same", "semantic", f.ask("alice", "test1", turns("You are a bank.", balanceWhat)))
}

// TestAlikeOpposites: what embeds alike and means the opposite, at .97, through the front door; what no guard
// objects to is found in the same place.
func TestAlikeOpposites(t *testing.T) {
	f := newForum(t, nil)
	for i, pair := range [][3]string{
		{"How do I turn on dark mode?", "How do I turn off dark mode?", "How can I turn on dark mode?"},
		{"Is the port open by default?", "Is the port closed by default?", "Is the port open by default, please?"},
		{"Flights from Paris to Rome", "Flights from Rome to Paris", "Flights from Paris to Rome, please"},
		{"Who reports to Alice?", "Who does Alice report to?", "Tell me, who reports to Alice?"},
	} {
		system := fmt.Sprint("place ", i)
		f.want(pair[0], "miss", f.ask("alice", "test1", turns(system, pair[0])))
		f.want(pair[1], "miss", f.ask("alice", "test1", turns(system, pair[1])))
		f.want(pair[2], "semantic", f.ask("alice", "test1", turns(system, pair[2])))
	}
}

// TestAlikeLeast: a client that says from which similarity on it takes an answer may ask for more than the policy, and not for
// less.
func TestAlikeLeast(t *testing.T) {
	f := newForum(t, nil)
	f.n.similar.embedders.byModel[""] = &embedderUse{Embedder: new(embedtest.Words)}
	const first, again, far = "How do I reset my password?", "How can I reset my password?", "How can I reset my forum password now?" // .866 and .655 of the first
	f.want("the first", "miss", f.ask("alice", "test1", turns("", first)))
	f.want("less", "semantic", f.ask("alice", "test1", turns("", far), "X-Headgate-Similarity", "0.1"))
	f.apply("threshold: 0.6", "threshold: 0.85")
	f.want("less than the policy's", "semantic", f.ask("alice", "test1", turns("", again), "X-Headgate-Similarity", "0.1"))
	f.want("far, and less than the policy's", "miss", f.ask("alice", "test1", turns("", far), "X-Headgate-Similarity", "0.1"))
	word, h := "", http.Header(nil)
	for least, want := range map[string]string{"0.86": "semantic", "0.87": "miss", "1": "miss"} {
		raw, err := json.Marshal(turns("", again))
		if err != nil {
			t.Fatal(err)
		}
		w := frontDoor(f.n, f.keys["alice"], "/v1/chat/completions", string(raw), "X-Headgate-Surface", "test1", "X-Headgate-Similarity", least, "X-Headgate-Cache", "only")
		if word, h = w.Header().Get("X-Headgate-Cache"), w.Header(); word == "" && w.Code == http.StatusGatewayTimeout {
			word = "miss"
		}
		if word != want || want == "semantic" && h.Get("X-Headgate-Similarity") != "0.866" {
			t.Errorf("least %s: %s at %s, want %s", least, word, h.Get("X-Headgate-Similarity"), want)
		}
	}
}

// TestAlikeTags: an answer without a tag would not end with it, and is none for who sends it.
func TestAlikeTags(t *testing.T) {
	f := newForum(t, nil)
	tag := []string{"X-Headgate-Cache-Tags", "doc-7"}
	f.want("the first", "miss", f.ask("alice", "test1", turns("", balanceIs)))
	f.want("with a tag", "miss", f.ask("alice", "test1", turns("", balanceWhat), tag...))
	f.want("with it again", "semantic", f.ask("alice", "test1", turns("", balanceTell), tag...))
	f.want("with another", "miss", f.ask("alice", "test1", turns("", balanceTell), "X-Headgate-Cache-Tags", "doc-7,doc-8"))
	must[object](t, f.n, http.StatusOK, http.MethodPost, "cache/invalidate", rootBearer, `{"tenant": "alice", "tags": ["doc-7"]}`)
	f.want("without one", "semantic", f.ask("alice", "test1", turns("", "Hi, what is my account balance?")))
	f.kept -= 2
	f.want("after its end", "miss", f.ask("alice", "test1", turns("", balanceTell), tag...))
}

// TestAlikeEmbedders: what one model's vectors found is not found by another's, in any version; back again, it is.
func TestAlikeEmbedders(t *testing.T) {
	f := newForum(t, nil)
	bodies := []map[string]any{turns("", balanceIs), turns("", balanceWhat), turns("", balanceTell), turns("", "Well, "+balanceIs), turns("", "So "+balanceIs)}
	steps := []struct{ old, with string }{
		{"embedder: builtin", "embedder: e1"}, {"embedder: e1", "embedder: e2"}, {`name: e2, version: "1"`, `name: e2, version: "2"`},
	}
	f.want("the first", "miss", f.ask("alice", "test1", bodies[0]))
	for i, s := range steps {
		f.apply(s.old, s.with)
		f.want(s.with, "miss", f.ask("alice", "test1", bodies[i+1]))
	}
	for _, s := range []struct{ old, with string }{{`name: e2, version: "2"`, `name: e2, version: "1"`}, {"embedder: e2", "embedder: e1"}, {"embedder: e1", "embedder: builtin"}} {
		f.apply(s.old, s.with)
		f.want("again "+s.with, "semantic", f.ask("alice", "test1", bodies[4]))
	}
	embedders := map[string]int{}
	for _, s := range f.n.similar.cache.Stats() {
		embedders[s.Embedder] += s.Entries
	}
	if len(embedders) != 4 || f.embeds.Load() == 0 {
		t.Errorf("%v, asked %d times", embedders, f.embeds.Load())
	}
	for e, n := range embedders {
		if n != 1 {
			t.Errorf("%s has %d entries", e, n)
		}
	}
}

// pairs are the lines of a list of the guards': two questions, whether one answer is for both, and which half they are in.
func pairs(t *testing.T, name string) (out [][5]string) {
	t.Helper()
	file, err := os.Open(filepath.Join("..", "..", "cache", "guard", "testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	all, err := csv.NewReader(file).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all[1:] {
		out = append(out, [5]string(r))
	}
	return out
}

// thresholdOf is from where on two thirds of some pairs would be hits, guards included.
func thresholdOf(t *testing.T, of [][5]string) float64 {
	t.Helper()
	e, err := embed.Builtin()
	if err != nil {
		t.Fatal(err)
	}
	var at []float64
	for _, p := range of {
		v, err := e.Embed(t.Context(), p[:2])
		if err != nil {
			t.Fatal(err)
		}
		similarity := float64(vec.Dot(v[0], v[1]))
		if !guard.Parse(p[0]).Compare(guard.Parse(p[1])).Allowed() {
			similarity = -1
		}
		at = append(at, similarity)
	}
	slices.Sort(at)
	return at[len(at)/3]
}

// TestNearMissesAreNotServed replays the guards' lists through a node with the built-in embedder, each pair in a place
// of its own. The threshold is what two thirds of one half of the paraphrases reach; the pairs of the other half are to be hits, and no
// near-miss is to be one.
func TestNearMissesAreNotServed(t *testing.T) {
	var calibrate, test [][5]string
	for _, p := range pairs(t, "paraphrases.csv") {
		switch p[4] {
		case "calib":
			calibrate = append(calibrate, p)
		case "test":
			test = append(test, p)
		}
	}
	near := slices.DeleteFunc(pairs(t, "near_misses.csv"), func(p [5]string) bool { return p[2] != "0" })
	f := newForum(t, nil)
	delete(f.n.similar.embedders.byModel, "") // the node's own instead
	least := thresholdOf(t, calibrate)
	f.apply("threshold: 0.6", fmt.Sprintf("threshold: %.4f", least))
	all := append(slices.Clone(near), test...)
	ask := func(i, side int) string {
		body, err := json.Marshal(turns(fmt.Sprint("place ", i), all[i][side]))
		if err != nil {
			t.Fatal(err)
		}
		w := frontDoor(f.n, f.keys[forumTenants()[i%4]], "/v1/chat/completions", string(body), "X-Headgate-Surface", "test1")
		if w.Code != http.StatusOK {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		return w.Header().Get("X-Headgate-Cache")
	}
	for i := range all {
		f.want(all[i][0], "miss", ask(i, 0))
		if i%25 == 24 || i == len(all)-1 { // so many may wait to be learnt
			waitFor(t, "the answers are learnt", func() bool { return entriesOf(f.n) == i+1 })
		}
	}
	hits := 0
	for i, p := range all {
		word := ask(i, 1)
		switch {
		case word == "semantic" && i < len(near):
			t.Errorf("%q is answered as %q", p[1], p[0])
		case word == "semantic":
			hits++
		}
	}
	share := float64(hits) / float64(len(test))
	t.Logf("%d near-misses, none of which may be a hit; %.1f %% of %d paraphrases are hits, from a similarity of %.4f on, which %d others chose", len(near), 100*share, len(test), least, len(calibrate))
	if share < .6 || len(test) < 200 || len(near) < 136 {
		t.Errorf("of %d paraphrases %d are hits; %d near-misses", len(test), hits, len(near))
	}
}
