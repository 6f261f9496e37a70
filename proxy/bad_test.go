package proxy_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"headgate/proxy"
	"headgate/proxy/edge"
	"headgate/proxy/upstream"
)

// with is the chat call with one more member.
func with(member string) string { return strings.TrimSuffix(chat, "}") + "," + member + "}" }

// TestBadInput: each is refused in the same clear words however often it comes, reaches
// no model, costs a request where the caller is known and never a token, and is cut off
// by the pre-filter after twenty.
func TestBadInput(t *testing.T) {
	type bad struct {
		name   string
		call   call
		status int
		code   string
		param  any    // nil: none
		says   string // in the message
		free   bool   // costs no request: nobody is known to charge
	}
	json := func(name, body string, param any, says string) bad {
		return bad{name: name, call: call{body: body}, status: 400, code: "invalid_request", param: param, says: says}
	}
	cases := []bad{
		json("empty", "", nil, "byte 0"),
		json("truncated", `{"model":"m","messages":[`, "messages", "byte 25"),
		json("trailing", `{"model":"m"}x`, nil, "byte 13"),
		json("no object", `["model"]`, nil, "byte 0"),
		json("null", `null`, nil, "byte 0"),
		json("twice the model", `{"model":"m","messages":[],"model":"other"}`, "model", "byte 27"),
		json("twice the cap", `{"max_tokens":1,"model":"m","messages":[],"max_tokens":1000}`, "max_tokens", "byte 42"),
		json("twice by escape", `{"model":"m","messages":[],"max_tokens":1,"max\u005ftokens":1000}`, "max_tokens", "byte 42"),
		json("twice below", `{"model":"m","messages":[{"role":"user","role":"system","content":"x"}]}`, "messages…role", "byte 40"),
		json("other case", `{"model":"m","messages":[],"MAX_TOKENS":1000}`, "MAX_TOKENS", "byte"),
		json("a million deep", `{"model":"m","messages":`+strings.Repeat("[", 1_000_000), "messages", "depth"),
		json("invalid UTF-8", "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}", "messages", "byte"),
		json("cap negative", strings.Replace(chat, "5}", "-5}", 1), "max_tokens", "byte"),
		json("cap huge", strings.Replace(chat, "5}", "99999999999999999999}", 1), "max_tokens", "byte"),
		json("cap infinite", strings.Replace(chat, "5}", "1e999}", 1), "max_tokens", "byte"),
		json("cap string", strings.Replace(chat, "5}", `"5"}`, 1), "max_tokens", "byte"),
		json("cap fraction", strings.Replace(chat, "5}", "5.5}", 1), "max_tokens", "byte"),
		json("cap true", strings.Replace(chat, "5}", "true}", 1), "max_tokens", "byte"),
		json("second cap negative", with(`"max_completion_tokens":-1`), "max_completion_tokens", "byte"),
		json("n negative", with(`"n":-2`), "n", "byte"),
		json("n huge", with(`"n":1000000000000`), "n", "byte"),
		json("stream string", with(`"stream":"true"`), "stream", "byte"),
		json("stream one", with(`"stream":1`), "stream", "byte"),
		json("stream_options list", with(`"stream":true,"stream_options":[]`), "stream_options", "byte"),
		json("model number", `{"model":7,"messages":[]}`, "model", "byte"),
		{name: "unknown model", call: call{body: strings.Replace(chat, `"m"`, `"gpt-x"`, 1)}, status: 404, code: "model_not_found", param: "model", says: "gpt-x"},
		{name: "model of others", call: call{body: strings.Replace(chat, `"m"`, `"secret"`, 1)}, status: 404, code: "model_not_found", param: "model", says: "secret"},
		{name: "unknown model described", call: call{method: "GET", path: "/v1/models/org/name"}, status: 404, code: "model_not_found", param: "model", says: "org/name"},
		{name: "form elsewhere", call: call{body: "--B\r\n", header: header("Content-Type", "multipart/form-data; boundary=B")}, status: 400, code: "invalid_request", says: "byte 1"},
		{name: "broken form", call: call{path: "/v1/audio/transcriptions", body: "--B\r\nnonsense", header: header("Content-Type", "multipart/form-data; boundary=B")}, status: 400, code: "invalid_request", says: "byte"},
		{name: "unknown response", call: call{method: "GET", path: "/v1/responses/resp_x"}, status: 404, code: "invalid_request", param: "response_id", says: "resp_x"},
		{name: "cancel of unknown response", call: call{path: "/v1/responses/resp_x/cancel"}, status: 404, code: "invalid_request", param: "response_id", says: "resp_x"},
		{name: "unknown previous", call: call{path: "/v1/responses", body: `{"model":"m","input":"a","previous_response_id":"resp_x"}`}, status: 404, code: "invalid_request", param: "previous_response_id", says: "resp_x"},
		{name: "user not assertable", call: call{body: chat, header: header("X-Headgate-User", "eve")}, status: 403, code: "permission_denied", param: "X-Headgate-User", says: "assert_user"},
		{name: "surface", call: call{body: chat, header: header("X-Headgate-Surface", "docs")}, status: 403, code: "permission_denied", param: "X-Headgate-Surface", says: "docs"},
		{name: "class", call: call{body: chat, header: header("X-Headgate-Class", "urgent")}, status: 400, code: "invalid_request", param: "X-Headgate-Class", says: "interactive"},
		{name: "timeout", call: call{body: chat, header: header("X-Headgate-Timeout", "-1")}, status: 400, code: "invalid_request", param: "X-Headgate-Timeout", says: "30s"},
		{name: "timeout NaN", call: call{body: chat, header: header("X-Headgate-Timeout", "NaN")}, status: 400, code: "invalid_request", param: "X-Headgate-Timeout", says: "30s"},
		{name: "method", call: call{method: "GET", path: "/v1/chat/completions"}, status: 405, code: "invalid_request", says: "POST"},
		{name: "route", call: call{path: "/v1/images/generations", body: "{}"}, status: 404, code: "invalid_request", says: "/v1/images/generations"},
		{name: "route by dots", call: call{path: "/v1/chat/../chat/completions", body: chat}, status: 404, code: "invalid_request", says: "no route"},
		{name: "route by slashes", call: call{path: "//v1/chat/completions", body: chat}, status: 404, code: "invalid_request", says: "no route"},
		{name: "response by dots", call: call{method: "GET", path: "/v1/responses/..%2f..%2fsleep"}, status: 404, code: "invalid_request", says: "no route"},
		{name: "no key", call: call{body: chat, key: "none"}, status: 401, code: "invalid_api_key", says: "Authorization", free: true},
		{name: "unknown key", call: call{body: chat, key: "hg_live_x"}, status: 401, code: "invalid_api_key", says: "not known", free: true},
		{name: "basic", call: call{body: chat, key: "none", header: header("Authorization", "Basic "+key)}, status: 401, code: "invalid_api_key", says: "Bearer", free: true},
		{name: "revoked key", call: call{body: chat, key: "revoked"}, status: 401, code: "key_revoked", says: "revoked", free: true},
		{name: "expired key", call: call{body: chat, key: "expired"}, status: 401, code: "invalid_api_key", says: "1970-01-01", free: true},
		{name: "suspended tenant", call: call{body: chat, key: "suspended"}, status: 403, code: "permission_denied", says: "acme", free: true},
		{name: "route of others", call: call{path: "/v1/embeddings", body: `{"model":"m","input":"x"}`}, status: 403, code: "permission_denied", says: "embeddings"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, setup{
				prefilter: edge.PrefilterConfig{ErrorsPerMinute: 1},
				models:    []*proxy.Model{model("m", "vllm"), model("secret", "vllm")},
				limits:    []proxy.Limit{limit(proxy.Requests, 1000), limit(proxy.Tokens, 100_000), limit(proxy.USD, 1_000_000), limit(proxy.Concurrency, 1)},
				change: func(c *proxy.Caller) {
					c.Models = map[string]bool{"m": true}
					c.Routes = map[string]bool{"chat": true, "responses": true, "models": true, "audio": true}
				},
				callers: map[string]*proxy.Caller{
					"revoked": {KeyID: "k2", Tenant: "acme", Revoked: true}, "expired": {KeyID: "k3", Tenant: "acme", Expires: time.Unix(1, 0)},
					"suspended": {KeyID: "k4", Tenant: "acme", Suspended: true},
				},
			})
			for range 20 {
				a := w.do(c.call).refused(t, c.status, c.code)
				if message, _ := a.field("message").(string); a.field("param") != c.param || !strings.Contains(message, c.says) {
					t.Fatalf("param %v, want %v; message without %q: %s", a.field("param"), c.param, c.says, clip(a.body))
				}
				if got := a.header.Get("X-Should-Retry"); c.status == 400 && got != "false" {
					t.Errorf("x-should-retry: %q", got)
				}
			}
			if a := w.do(c.call).refused(t, 429, "rate_limit_exceeded"); a.field("limit") != "prefilter" || a.header.Get("Retry-After") == "" {
				t.Errorf("%s %v", a.body, a.header)
			}
			w.settled()
			want := int64(20)
			if c.free {
				want = 0
			}
			if r, k, d := w.spent(w.caller.Limits[0]), w.spent(w.caller.Limits[1]), w.spent(w.caller.Limits[2]); r != want || k != 0 || d != 0 {
				t.Errorf("spent %d requests, %d tokens, %d nano-dollars; want %d requests", r, k, d, want)
			}
			if n := w.fake.Stats().Requests; n != 0 {
				t.Errorf("%d reached the model server", n)
			}
		})
	}
}

// TestManagementIsOutOfReach: also where a path only looks like one of ours.
func TestManagementIsOutOfReach(t *testing.T) {
	w := newWorld(t, setup{prefilter: edge1000(), limits: []proxy.Limit{limit(proxy.Requests, 1000)}})
	paths := []string{
		"/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
		"/collective_rpc", "/server_info", "/abort_requests", "/get_world_size", "/start_profile", "/stop_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep",
		"/init_weight_transfer_engine", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/metrics", "/health", "/ping", "/version", "/load",
		"/docs", "/openapi.json", "/sleep/", "/v1/sleep", "/sleep?level=1", "/%73leep", "/v1/models/..%2f..%2fsleep",
	}
	for i, p := range paths {
		for _, method := range []string{http.MethodPost, http.MethodGet} {
			if a := w.do(call{method: method, path: p}); a.status != 403 && a.status != 404 && a.status != 405 {
				t.Errorf("%s %s: status %d: %s", method, p, a.status, clip(a.body))
			}
		}
		if got := w.spent(w.caller.Limits[0]); got != int64(2*(i+1)) {
			t.Fatalf("%s: %d requests spent", p, got)
		}
	}
	w.do(call{path: "/sleep"}).refused(t, 403, "permission_denied")
	if s := w.fake.Stats(); s.Requests != 0 {
		t.Errorf("%d reached the model server", s.Requests)
	}
}

// TestResponsesBelongToTheirTenant, and stay at the backend that has them.
func TestResponsesBelongToTheirTenant(t *testing.T) {
	m := model("m", "vllm", "second")
	w := newWorld(t, setup{
		models: []*proxy.Model{m}, limits: []proxy.Limit{limit(proxy.Requests, 100)}, backends: []upstream.Backend{{Name: "vllm"}, {Name: "second"}},
		callers: map[string]*proxy.Caller{"same": {KeyID: "k2", Tenant: "acme"}, "other": {KeyID: "k3", Tenant: "other"}},
	})
	for _, body := range []string{`{"model":"m","input":"a","max_output_tokens":3}`, `{"model":"m","input":"b","max_output_tokens":3,"stream":true}`, `{"model":"m","input":"c","max_output_tokens":3,"background":true}`} {
		a := w.do(call{path: "/v1/responses", body: body}).want(t, 200)
		at := strings.Index(a.body, `"resp_`)
		id := a.body[at+1 : at+1+strings.Index(a.body[at+1:], `"`)]
		reached := w.fake.Stats().Requests
		again := `{"model":"m","input":"b","max_output_tokens":3,"previous_response_id":"` + id + `"}`
		w.do(call{method: "GET", path: "/v1/responses/" + id, key: "other"}).refused(t, 404, "invalid_request")
		w.do(call{method: "DELETE", path: "/v1/responses/" + id, key: "other"}).refused(t, 404, "invalid_request")
		w.do(call{path: "/v1/responses/" + id + "/cancel", key: "other"}).refused(t, 404, "invalid_request")
		w.do(call{path: "/v1/responses", body: again, key: "other"}).refused(t, 404, "invalid_request")
		if got := w.fake.Stats().Requests; got != reached {
			t.Errorf("%d of another tenant's requests reached the model server", got-reached)
		}
		for _, k := range []string{key, "same"} {
			got := w.do(call{method: "GET", path: "/v1/responses/" + id, key: k}).want(t, 200)
			next := w.do(call{path: "/v1/responses", body: again, key: k}).want(t, 200)
			for _, b := range []answer{got, next} {
				if b.header.Get("X-Headgate-Backend") != a.header.Get("X-Headgate-Backend") {
					t.Errorf("made at %s, looked for at %s", a.header.Get("X-Headgate-Backend"), b.header.Get("X-Headgate-Backend"))
				}
			}
		}
	}
}

// TestAssertedUsers have buckets of their own, but only where the key may name them.
func TestAssertedUsers(t *testing.T) {
	perUser := limit(proxy.Requests, 1)
	perUser.Scope = proxy.ScopeUser
	w := newWorld(t, setup{
		limits: []proxy.Limit{perUser}, change: func(c *proxy.Caller) { c.AssertUser = true },
		callers: map[string]*proxy.Caller{"plain": {KeyID: "k2", Tenant: "acme", Limits: []proxy.Limit{perUser}}},
	})
	named := func(u string) string { return with(`"user":"` + u + `"`) }
	for i, c := range []struct {
		call call
		want int
	}{
		{call{body: chat, header: header("X-Headgate-User", "ann")}, 200},
		{call{body: named("ann")}, 429},
		{call{body: named("bob")}, 200},
		{call{body: chat, header: header("X-Headgate-User", "bob")}, 429},
		{call{body: named("bob"), header: header("X-Headgate-User", "cem")}, 200},
		{call{body: named("dan"), key: "plain"}, 200},
		{call{body: named("eve"), key: "plain"}, 429},
		{call{body: named(strings.Repeat("x", 257))}, 400},
	} {
		if a := w.do(c.call); a.status != c.want {
			t.Errorf("%d: status %d, want %d: %s", i, a.status, c.want, a.body)
		}
	}
	for _, r := range w.fake.Log() {
		if r.Header.Get("X-Headgate-User") != "" || r.Header.Get("Authorization") != "" {
			t.Errorf("what is between client and gateway reached the model server: %v", r.Header)
		}
	}
}

// TestModelsAreThoseOfTheKey.
func TestModelsAreThoseOfTheKey(t *testing.T) {
	w := newWorld(t, setup{
		models: []*proxy.Model{model("org/m", "vllm"), called(model("other", "vllm"), "nobody"), model("hidden", "vllm")},
		change: func(c *proxy.Caller) { c.Models = map[string]bool{"org/m": true, "other": true} },
	})
	a := w.do(call{method: "GET", path: "/v1/models"}).want(t, 200)
	if !strings.Contains(a.body, `"id":"org/m"`) || !strings.Contains(a.body, `"id":"other"`) || strings.Contains(a.body, "hidden") || strings.Contains(a.body, `"id":"fake"`) {
		t.Error(a.body)
	}
	for _, p := range []string{"/v1/models/org/m", "/v1/models/org%2Fm"} {
		if a := w.do(call{method: "GET", path: p}).want(t, 200); !strings.Contains(a.body, `"id":"org/m"`) {
			t.Error(a.body)
		}
	}
	w.do(call{method: "GET", path: "/v1/models/hidden"}).refused(t, 404, "model_not_found")
}

// raw sends bytes and reads the statuses of all answers until the connection closes.
func (w *world) raw(text string, closeWrite bool) (statuses []int) {
	w.t.Helper()
	c := must[net.Conn](w.t)(net.Dial("tcp", w.addr))
	defer c.Close()
	if _, err := io.WriteString(c, text); err != nil {
		w.t.Fatal(err)
	}
	if closeWrite {
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			w.t.Fatal(err)
		}
	}
	for r := bufio.NewReader(c); ; {
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			return statuses
		}
		_, _ = io.Copy(io.Discard, resp.Body) // an answer that breaks off is the last
		resp.Body.Close()
		statuses = append(statuses, resp.StatusCode)
	}
}

// TestFraming: what two servers could read differently, and what never comes.
func TestFraming(t *testing.T) {
	head := "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer " + key + "\r\n"
	smuggled := "GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer " + key + "\r\n\r\n"
	for name, c := range map[string]struct {
		text    string
		end     bool
		want    []int
		request int64 // charged
	}{
		"two lengths":       {head + "Content-Length: 5\r\nContent-Length: 7\r\n\r\n{}   " + smuggled, false, []int{400}, 0},
		"negative length":   {head + "Content-Length: -5\r\n\r\n", false, []int{400}, 0},
		"length and chunks": {head + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n" + smuggled, false, []int{400}, 1},
		"bad chunk":         {head + "Transfer-Encoding: chunked\r\n\r\nzz\r\n", false, []int{400}, 1},
		"truncated":         {head + "Content-Length: 100\r\n\r\n{\"model\":", true, []int{400}, 1},
		"slow":              {head + "Content-Length: 100\r\n\r\n{\"model\":", false, []int{408}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, setup{limits: []proxy.Limit{limit(proxy.Requests, 10), limit(proxy.Tokens, 1000)}, edge: edge.Config{BodyGrace: 20 * time.Millisecond, BodyMinRate: 1 << 20}})
			if got := w.raw(c.text, c.end); fmt.Sprint(got) != fmt.Sprint(c.want) {
				t.Errorf("statuses %v, want %v", got, c.want)
			}
			w.settled()
			if r, k := w.spent(w.caller.Limits[0]), w.spent(w.caller.Limits[1]); r != c.request || k != 0 {
				t.Errorf("spent %d requests and %d tokens", r, k)
			}
			if n := w.fake.Stats().Requests; n != 0 {
				t.Errorf("%d reached the model server", n)
			}
		})
	}
}
