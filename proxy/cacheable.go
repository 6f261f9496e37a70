package proxy

import (
	"fmt"

	"headgate/proxy/openai"
)

// uncacheable says in words why answers to this request are not kept; "" where they may be.
// What is not named here is in the key.
func (x *exchange) uncacheable() string {
	s, in := x.cache.surface, &x.in
	switch x.route.kind {
	case openai.Chat, openai.Completion, openai.Message, openai.Response, openai.Embedding, openai.Pooling:
	default:
		return "answers of this route are not kept"
	}
	switch {
	case s.Exact.Volatile && x.p.cfg.Hearing != nil && !x.p.cfg.Hearing():
		return "this node is cut off and does not hear which answers are void"
	case s.Personal && x.user == "":
		return "the surface is personal and the request has no user: send X-Headgate-User with a key that has assert_user, or use a key with a user of its own"
	case in.Background:
		return "background: the answer is fetched later"
	case in.PreviousResponseID != "":
		return "previous_response_id: the answer depends on what the backend holds"
	case in.Outside != "":
		return in.Outside + ": the answer depends on what the request does not hold"
	case in.Bounds.Rounds != "":
		return in.Bounds.Rounds + ": the backend may look elsewhere for the answer"
	case in.Store:
		return "store: the answer is kept by its backend, under an id of its own; send store: false"
	case in.Stream && in.Continuous:
		return "stream_options.continuous_usage_stats: what is kept does not say how usage grew"
	case in.Sequences > max(in.Inputs, 1) && !s.Exact.Many:
		return "n: several answers are wanted, and the surface does not keep those (exact.n)"
	}
	if x.route.generate {
		return x.tooWarm()
	}
	return ""
}

// tooWarm: answers are drawn by lot above the surface's temperature, unless the seed is told.
func (x *exchange) tooWarm() string {
	t := x.model.DefaultTemperature
	word := "temperature: it is the model's default, %g, where the request has none, and the surface keeps answers up to %g (exact.temperature)"
	if s := &x.in.Sampling; s.HasTemperature {
		t, word = s.Temperature, "temperature: it is %g, and the surface keeps answers up to %g (exact.temperature)"
	}
	if most := x.cache.surface.Exact.Temperature; t > most && !x.in.Sampling.HasSeed {
		return fmt.Sprintf(word, t, most)
	}
	return ""
}
