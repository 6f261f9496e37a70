package proxy

import (
	"net/http"
	"strings"

	"headgate/proxy/openai"
)

// route is how one path is treated. Routes not in the table are refused: a path that
// nobody thought about is neither a way around the meter nor a way to the backends'
// management.
type route struct {
	name     string // for key scopes, logs and metrics
	kind     openai.Kind
	generate bool // answers cost output tokens
	metered  bool // has a body whose tokens count
	local    func(*exchange) error
}

// match finds the route of a request. id is the path's variable part, where it has one.
func (t *routes) match(method, path string) (rt *route, id string, err error) {
	if m, ok := t.byPath[path]; ok {
		if m.method != method {
			return nil, "", errMethod(m.method)
		}
		return &m.route, "", nil
	}
	if rest, ok := strings.CutPrefix(path, "/v1/models/"); ok && rest != "" {
		if method != http.MethodGet {
			return nil, "", errMethod(http.MethodGet)
		}
		return &t.model, rest, nil // names of models may hold slashes
	}
	if rest, ok := strings.CutPrefix(path, "/v1/responses/"); ok && rest != "" {
		if id, ok := strings.CutSuffix(rest, "/cancel"); ok {
			return needs(http.MethodPost, method, &t.response, id)
		}
		if method == http.MethodDelete {
			return &t.response, rest, nil
		}
		return needs(http.MethodGet, method, &t.response, rest)
	}
	if isManagement(path) {
		return nil, "", errManagement(path)
	}
	return nil, "", errRoute(method, path)
}

func needs(want, got string, rt *route, id string) (*route, string, error) {
	if strings.Contains(id, "/") {
		return nil, "", errRoute(got, id)
	}
	if want != got {
		return nil, "", errMethod(want)
	}
	return rt, id, nil
}

// isManagement tells the paths by which a backend is operated rather than used. They
// are unknown routes like any other; they only get a clearer refusal.
func isManagement(path string) bool {
	p := strings.TrimPrefix(path, "/v1")
	for _, prefix := range [...]string{
		"/sleep", "/wake_up", "/is_sleeping", "/reset_", "/collective_rpc", "/load_lora_adapter", "/unload_lora_adapter",
		"/server_info", "/start_profile", "/stop_profile", "/metrics", "/scale_elastic_ep", "/is_scaling_elastic_ep",
		"/update_weights", "/init_weight", "/pause", "/resume", "/abort_requests", "/docs", "/openapi.json",
	} {
		if strings.HasPrefix(p, prefix) {
			return true
		}
	}
	return false
}

// routes is the table, made once and only read afterwards.
type routes struct {
	byPath          map[string]methodRoute
	model, response route // of the paths that end in a name
}

type methodRoute struct {
	method string
	route
}

func newRoutes() *routes {
	t := &routes{
		byPath:   map[string]methodRoute{"/v1/models": {http.MethodGet, route{name: "models", local: (*exchange).serveModels}}},
		model:    route{name: "models", local: (*exchange).serveModel},
		response: route{name: "responses", kind: openai.Response, local: (*exchange).serveResponse},
	}
	post := func(name string, kind openai.Kind, generate, metered bool, paths ...string) {
		for _, p := range paths {
			t.byPath[p] = methodRoute{http.MethodPost, route{name: name, kind: kind, generate: generate, metered: metered}}
		}
	}
	post("chat", openai.Chat, true, true, "/v1/chat/completions")
	post("completions", openai.Completion, true, true, "/v1/completions")
	post("responses", openai.Response, true, true, "/v1/responses")
	post("messages", openai.Message, true, true, "/v1/messages")
	post("embeddings", openai.Embedding, false, true, "/v1/embeddings", "/v2/embed")
	post("audio", openai.Audio, true, true, "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech")
	post("pooling", openai.Pooling, false, true, "/pooling", "/v1/pooling", "/classify", "/v1/classify",
		"/score", "/v1/score", "/generative_scoring", "/rerank", "/v1/rerank", "/v2/rerank")
	// These run no model: they cost a request, no tokens.
	post("tokenize", openai.CountTokens, false, false, "/v1/messages/count_tokens")
	post("tokenize", openai.Tokenize, false, false, "/tokenize")
	post("tokenize", openai.Detokenize, false, false, "/detokenize")
	return t
}
