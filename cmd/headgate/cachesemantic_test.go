package main_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"headgate/proxy/admin"
)

// wordingsPolicy has a surface that serves other wordings, one that only watches, one that learns, and one whose answers are its
// own wordings' only.
func wordingsPolicy(upstream string) string {
	return fmt.Sprintf(`version: 1
backends: [{name: b, url: %q}]
models: [{name: m, backends: [b], default_temperature: 0}]
plans: [{name: p}]
tenants: [{name: dev, plan: p}]
surfaces:
  - {name: faq, share: tenant, exact: {}, semantic: {mode: static, threshold: 0.85, audit: 0.000001}}
  - {name: watched, share: tenant, exact: {}, semantic: {}}
  - {name: taught, share: tenant, exact: {}, semantic: {mode: learned}}
  - {name: own, exact: {}}
`, upstream)
}

// wordings is a file with one question of a user.
func wordings(t *testing.T, text string) string {
	t.Helper()
	body, err := json.Marshal(map[string]any{"model": "m", "temperature": 0, "messages": []any{map[string]string{"role": "user", "content": text}}})
	if err != nil {
		t.Fatal(err)
	}
	return writeFile(t, "request.json", string(body))
}

// TestOtherWordings: what is answered from another question, what an operator sees of it, and how it ends.
func TestOtherWordings(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", wordingsPolicy(startFake(t))))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	learned := func(entries int) {
		t.Helper()
		n.await("the answer to be put in", func() bool {
			return strings.Contains(get(t, n.admin+"/metrics"), fmt.Sprintf("\nheadgate_semantic_entries %d\n", entries))
		})
	}
	expect := func(want, question string, headers ...string) {
		t.Helper()
		if got := n.cached(question, headers...); got != want {
			t.Errorf("%q: %s, want %s", question, got, want)
		}
	}
	expect("miss", "How do I reset my password?")
	learned(1)
	expect("semantic", "How can I reset my password?")
	expect("semantic", "How can I reset my password?", "X-Headgate-Cache: only")
	expect("miss", "How could I reset my password?", "X-Headgate-Similarity: 1")
	learned(2)
	expect("miss", "How do I reset my username?")
	learned(3)

	list := decoded[[]admin.CacheDecision](n, "cache", "recent")
	if len(list) != 5 || list[1].Action != "explore" || list[0].Action != "miss" || list[0].Refused == nil || list[2].Action != "serve" || list[2].Similarity < 0.85 || list[2].Threshold != 0.85 || list[2].Shadow || len(list[2].Entry) != 16 {
		t.Errorf("%+v", list)
	}
	contains(t, spaced(n.ok("cache", "recent", "--served", "--surface", "faq")), "TIME TENANT SURFACE ACTION SIMILARITY THRESHOLD ENTRY REFUSED BY WHY REQUEST\n", "dev faq serve 0.9")
	if text := n.ok("cache", "recent", "--served"); strings.Contains(text, "miss") || strings.Contains(text, "password") {
		t.Errorf("%s", text)
	}
	r := n.cli("cache", "recent", "--surface", "watched")
	if want := "headgate: none of the latest 5 decisions of this node is of surface watched; headgate cache stats lists the surfaces that it knows of\n"; r.code != 0 || strings.Count(r.stdout, "\n") != 1 || r.stderr != want {
		t.Errorf("%+v", r)
	}
	if text := spaced(n.ok("cache", "recent")); !regexp.MustCompile(`dev faq miss 0\.\d\d\d - [0-9a-f]{16} \S*substitute\S* guards refuse`).MatchString(text) {
		t.Errorf("%s", text)
	}
	if s := decoded[admin.CacheStats](n, "cache", "stats").Semantic; len(s) != 1 || s[0].Mode != "static" || s[0].Served != 2 || s[0].Missed != 2 || s[0].Explored != 1 || s[0].Entries != 3 || s[0].Bytes == 0 || s[0].Embedder == "" || len(s[0].ServedAt) != 50 {
		t.Errorf("%+v", s)
	}
	contains(t, spaced(n.ok("cache", "stats")), " SERVED AUDITED EXPLORED MISSED SAME OTHER PROBES REPORTED WRONG OF HITS ", "not known not known serves\n")
	n.await("the comparison", func() bool { return strings.Contains(spaced(n.ok("cache", "stats")), " 2 0 1 2 0 1 0 0 not known") })

	entry := list[2].Entry
	contains(t, n.ok("cache", "wrong", entry), "entry "+entry+" of surface faq of tenant dev is counted as wrong; it was on 1 nodes")
	if r := n.cli("cache", "wrong", entry); r.code != 1 || !strings.Contains(r.stderr, "no node knows entry "+entry) {
		t.Errorf("a report counts twice: %+v", r)
	}
	n.cached("How can I reset my password?")
	if d := decoded[[]admin.CacheDecision](n, "cache", "recent"); d[0].Entry == entry {
		t.Errorf("what was reported is given again: %+v", d[0])
	}
	other := strings.NewReplacer("mode: static,", "mode: static, embedder: vectors,", "models: [", `models: [{name: vectors, version: "1", backends: [b]}, `)
	n.ok("apply", "-f", writeFile(t, "policy.yaml", other.Replace(wordingsPolicy("http://127.0.0.1:1"))))
	n.await("the other embedder", func() bool { return strings.Contains(n.ok("cache", "stats"), "not in use any more") })
	n.ok("apply", "-f", writeFile(t, "policy.yaml", wordingsPolicy("http://127.0.0.1:1")))
	n.await("the first embedder", func() bool { return !strings.Contains(n.ok("cache", "stats"), "not in use any more") })
	n.ok("apply", "-f", writeFile(t, "policy.yaml", strings.Replace(wordingsPolicy("http://127.0.0.1:1"), ", semantic: {mode: static, threshold: 0.85, audit: 0.000001}", "", 1)))
	n.await("the policy", func() bool { return strings.Contains(n.ok("cache", "stats"), "not in use any more") })
}

// TestWarmedWordings: a question that is warmed gets an answer of its own, whatever is kept in other words, and serves others.
func TestWarmedWordings(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", wordingsPolicy(startFake(t))))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	put := func(entries int) {
		t.Helper()
		n.await("the answer to be put in", func() bool {
			return strings.Contains(get(t, n.admin+"/metrics"), fmt.Sprintf("\nheadgate_semantic_entries %d\n", entries))
		})
	}
	for i, text := range []string{"How do I reset my password?", "How can I reset my password?"} {
		r := runCLI(t, []string{"HEADGATE_API_KEY=" + cliKey}, "cache", "warm", "-f", wordings(t, text), "--url", n.front, "--surface", "faq")
		if r.code != 0 || !strings.Contains(r.stdout, "1 requests: 0 kept already, 1 asked of the model, 0 asked but not cacheable") {
			t.Errorf("%q: %+v", text, r)
		}
		put(i + 1)
	}
	if got := n.cached("How can I reset my password?"); got != "exact" {
		t.Errorf("what was warmed is a %s", got)
	}
	if got := n.cached("How could I reset my password?"); got != "semantic" {
		t.Errorf("what was warmed serves no other wording, which is a %s", got)
	}
}

// TestWrongWordingCalls: what can't be is refused, by the command or by the node.
func TestWrongWordingCalls(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", wordingsPolicy(startFake(t))))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	looks := decoded[admin.CreatedToken](n, "tokens", "create", "looks", "--role", "read").Token
	for args, want := range map[string]struct {
		code int
		says string
	}{
		"wrong":                             {2, "takes one argument"},
		"wrong a b":                         {2, "takes one argument"},
		"wrong xyz":                         {2, "entry: "},
		"wrong 0000000000000000":            {2, "entry: "},
		"wrong " + strings.Repeat("1", 200): {2, "entry: "},
		"wrong 8f14e45fceea167a":            {1, "no node knows entry 8f14e45fceea167a"},
		"recent x":                          {2, "takes no argument"},
		"recent --last 1h":                  {2, "unknown flag"},
		"wrnog 8f14e45fceea167a":            {2, `did you mean "wrong"?`},
	} {
		if r := n.cli(append([]string{"cache"}, strings.Fields(args)...)...); r.code != want.code || !strings.Contains(r.stderr, want.says) || r.stdout != "" {
			t.Errorf("%s: %+v", args, r)
		}
	}
	env := []string{"HEADGATE_ADMIN=" + n.admin, "HEADGATE_ADMIN_TOKEN=" + looks}
	if r := runCLI(t, env, "cache", "wrong", "8f14e45fceea167a"); r.code != 1 || !strings.Contains(r.stderr, "role operate") {
		t.Errorf("%+v", r)
	}
	if r := runCLI(t, env, "cache", "recent"); r.code != 0 {
		t.Errorf("%+v", r)
	}
}

// TestExplainWordings: why another wording gets an answer, and why not, in words.
func TestExplainWordings(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil, "--policy", writeFile(t, "policy.yaml", wordingsPolicy(startFake(t))))
	n.await("the backend to be up", func() bool { return status(t, n.admin+"/readyz") == http.StatusOK })
	on, again, off := wordings(t, "How do I turn on dark mode?"), wordings(t, "How can I turn on the dark mode?"), wordings(t, "How do I turn off dark mode?")
	talk := writeFile(t, "talk.json", `{"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "How do I turn on dark mode?"}]}`)
	const builtin = "by all-MiniLM-L6-v2/int8-1, partition "
	for args, says := range map[string][]string{
		on + " --surface faq":                                         {"compared with other wordings: static from 0.85 on, " + builtin, "PART"},
		on + " --surface watched":                                     {"compared with other wordings: shadow, " + builtin},
		on + " --surface own":                                         {"not compared with other wordings: surface own has no semantic cache in the policy"},
		on + " --surface faq --against " + again:                      {"one after the other: a hit: ", "similarity: 0.9", "DIFFERS IN"},
		on + " --surface watched --against " + again:                  {"one after the other: no hit: in mode shadow nothing is served"},
		on + " --surface taught --against " + again:                   {"one after the other: perhaps a hit: it goes by what was learned"},
		on + " --surface faq --against " + off:                        {"no hit: guards refuse them", `refused by guard antonym: "turn_on" in one, "turn_off" in the other`},
		on + " --surface faq --against " + talk:                       {"no hit: they differ in more than the last user text", "similarity: 1.000"},
		on + " --surface faq --against " + on:                         {"a hit: they are one request: the exact cache answers", "they differ in nothing that counts"},
		wordings(t, strings.Repeat("a b ", 250)) + " --surface faq":   {"not compared with other wordings: the last user text has ", "and the embedder takes 256"},
		wordings(t, strings.Repeat("long ", 2000)) + " --surface faq": {"the last user text has 9999 bytes, and 1024 at most are compared"},
	} {
		contains(t, n.ok(append([]string{"cache", "explain-key", "-f"}, strings.Fields(args)...)...), says...)
	}
	header := []string{"cache", "explain-key", "-f", on, "--surface", "faq", "--against", again, "--header"}
	contains(t, n.ok(append(header, "X-Headgate-Similarity: 0.999")...), "static from 0.85 on, 0.999 at least by its own header", "no hit: the request asks for 0.999")
	contains(t, n.ok(append(header, "X-Headgate-Similarity: 1")...), "not compared with other wordings: X-Headgate-Similarity: 1 takes no answer of another question")
	if r := n.cli(append(header, "X-Headgate-Similarity: much")...); r.code != 2 || !strings.Contains(r.stderr, "a number from 0 to 1") {
		t.Errorf("%+v", r)
	}
	warm := writeFile(t, "warm.json", `{"model": "m", "temperature": 1, "messages": [{"role": "user", "content": "Hi"}]}`)
	if text := n.ok("cache", "explain-key", "-f", warm, "--surface", "faq"); strings.Contains(text, "wordings") {
		t.Errorf("what is not kept is told about twice: %s", text)
	}
	e := decoded[admin.CacheExplanation](n, "cache", "explain-key", "-f", on, "--surface", "faq", "--against", off)
	if e.Semantic == nil || !e.Semantic.Compared || e.Pair == nil || e.Pair.Hit != "no" || !e.Pair.SamePartition || e.Pair.Similarity == nil || *e.Pair.Similarity < 0.85 || len(e.Pair.Refused) == 0 || e.Semantic.Partition != e.Other.Semantic.Partition {
		t.Errorf("%+v", e)
	}
	if s := decoded[admin.CacheStats](n, "cache", "stats"); len(s.Semantic) != 0 || s.Store.Entries != 0 {
		t.Errorf("to ask was counted: %+v", s)
	}
}
