package proxy

import (
	"cmp"
	"net/http"

	"headgate/proxy/openai"
)

// What a request is taken to need at most, in tokens, beside its text. Too much is given
// back when the answer ends.
const (
	defaultTemplateTokens = 256 // of a chat template, with the prompt that it may begin with
	toolsTokens           = 512 // around all tools
	messageTokens         = 16  // around a message
	promptTokens          = 16  // around a prompt
	pairTokens            = 256 // around a query and a document
	mostImageTokens       = 16 << 10
	mostAudioTokens       = 32 << 10 // of an audio part
	contextUnstated       = 32 << 10 // the context of a model that states none

	bytesPerSecond  = 500   // of speech, in the tightest of the usual codecs
	usualPerSecond  = 8_000 // of audio files
	secondsPerChunk = 29    // of audio: each chunk has an answer of its own
	tokensPerSecond = 50    // that audio becomes, at most
)

// bounds are what a request takes at most. What each route can bring:
//
//   - Text is a token a byte of the body: see openai.Bounds. Conversations add what the
//     template may write around messages, tools and before all (Model.TemplateTokens, or more
//     where a backend was seen to take more), all others what stands around a prompt. What goes on from a response takes in all of that again, as the backend
//     reported it.
//   - A picture is mostImageTokens, an audio part mostAudioTokens. Whatever has no size that
//     the body shows (videos, documents, tensors, a template of the client's own, stored
//     prompts, a response that told no usage) is the whole context of each prompt; without a stated context a strict budget
//     refuses it.
//   - Where the route generates, no prompt is longer than the context. Embeddings may be:
//     servers can split them.
//   - The answer is the cap times the sequences (n or best_of, times the prompts of a
//     completion), a completion that echoes adds its prompts. min_tokens, ignore_eos, beams,
//     speculation and logprobs add no token to a cap. vllm_xargs are the operator's own
//     plug-ins, not bounded here. Without a cap it is what the context leaves; of a completion
//     that says nothing, openai.DefaultCompletion.
//   - Built-in tools, for which a server runs the model as often as it likes, have no bound:
//     a strict budget refuses them.
//   - Audio files are taken for speech at bytesPerSecond. This is no proof: a file of
//     compressed silence lasts longer, and what it then costs is charged all the same.
//
// The bound holds as far as the backend keeps to the cap, the policy's context to the
// backend's, and the template to its tokens: one that begins with a page of instructions, as
// a few do where the client gives none, needs Model.TemplateTokens. What is taken beyond it is
// charged, counted, logged and, if a template's, learnt.
type bounds struct {
	in         int64
	cap, least int64 // tokens of one sequence; 0 where the route generates nothing
	sequences  int64
	echo       int64 // tokens that answers begin with
	seconds    int64 // of audio
	beyond     bool  // in is the context, which nobody states
}

func (x *exchange) bounds() bounds {
	in, m := &x.in, x.model
	b := bounds{sequences: max(in.Sequences, 1)}
	if in.FileBytes > 0 {
		b.seconds = min(in.FileBytes/bytesPerSecond+1, maxAudioSeconds)
		b.sequences *= b.seconds/secondsPerChunk + 1
	}
	prompts := max(in.Inputs, 1)
	b.in = x.mostInput()
	if in.Bounds.Beyond != "" || x.guessed {
		b.beyond = m.Context == 0
		b.in = max(b.in, times(orDefault(m.Context, contextUnstated), prompts))
	}
	if !x.route.generate {
		return b
	}
	if m.Context > 0 && in.FileBytes == 0 {
		b.in = min(b.in, times(m.Context, prompts))
	}
	context := orDefault(m.Context, contextUnstated)
	switch {
	case in.MaxOutput >= 0:
		b.cap = max(in.MaxOutput, 1)
	case x.route.kind == openai.Completion && !in.Bounds.Uncapped:
		b.cap = openai.DefaultCompletion
	default: // as much as the context leaves, and surely not more: servers refuse that
		b.cap = max(context-b.in/prompts, (context-x.res.inTokens/prompts)/2, 1)
	}
	if m.Context > 0 {
		b.cap = min(b.cap, m.Context)
	}
	b.least = min(max(in.Bounds.MinOutput, 1), b.cap)
	if in.Bounds.Echo {
		b.echo = times(b.in, ceilDiv(b.sequences, prompts))
	}
	return b
}

// seconds estimates the length of the audio file that the request brings.
func (x *exchange) seconds() int64 {
	return min(ceilDiv(x.in.FileBytes, usualPerSecond), maxAudioSeconds)
}

// mostInput bounds the tokens of what the body shows.
func (x *exchange) mostInput() int64 {
	in, prompts := &x.in, max(x.in.Inputs, 1)
	n := in.Bounds.Text + in.InputTokens + x.earlier + promptTokens*prompts
	switch x.route.kind {
	case openai.Pooling:
		n += pairTokens * prompts
		if in.Images > 0 { // the query's come with each document
			n += times(mostImageTokens*int64(in.Images), prompts)
		}
	case openai.Audio:
		n += in.FileBytes / bytesPerSecond * tokensPerSecond
	}
	if x.templated() {
		n += x.p.est.template(x.model) + messageTokens*in.Bounds.Messages
		if in.Bounds.Tools {
			n += toolsTokens
		}
	}
	return n + mostImageTokens*int64(in.Images) + mostAudioTokens*int64(in.Audio)
}

// templated says whether a chat template makes the prompt.
func (x *exchange) templated() bool {
	k := x.route.kind
	return k == openai.Chat || k == openai.Response || k == openai.Message || x.in.Bounds.Messages > 0
}

// learnTemplate takes in what an answer shows of its model's template: input for which the
// body does not account. Nearly every body does. What media become is not the template's.
func (x *exchange) learnTemplate(u openai.Usage) {
	in := &x.in
	if !x.templated() || in.Bounds.Beyond != "" || x.guessed || in.Images+in.Audio+in.Video > 0 || in.FileBytes > 0 {
		return
	}
	var more int64
	if u.Input > in.Bounds.Text {
		more = max(u.Input-x.mostInput()+x.p.est.template(x.model), 0)
	}
	if tell := x.p.est.learnTemplate(x.model, more, u.Input); tell > 0 {
		x.p.cfg.Logger.Warn("an answer's input was longer than its request accounts for; strict budgets now reserve so much for the model's chat template: state template_tokens in the policy, or mend the backend",
			"request_id", x.id, "model", x.model.Name, "backend", x.answer.backend, "template_tokens", tell)
	}
}

// unseenTokens is what a backend makes of each answer, at most, that nobody sees: after its client left or its connection broke,
// until it notices, and without text, as the ends and the marks around thoughts are.
const unseenTokens = 64

// seen bounds what the stream's answer has taken: the input as reported or bounded, a token a byte of all that passed, or
// what was reported on the way and a token a byte of what passed since, and what nobody saw. It holds for servers that send
// what they generate as it comes. Where the request lets it not all be sent, where the rest may lie unread since
// the client was slow, and where a report is beyond belief, there is no bound.
func (x *exchange) seen(s *openai.Stream) seen {
	in, u, b := &x.in, s.Usage(), x.bounds()
	switch {
	case in.Bounds.Hidden != "" || in.Background || x.answer.behind && !s.Complete() || x.route.kind == openai.Audio || !x.route.generate:
		return seen{}
	case u.Known && (u.Input > x.maxTokens() || u.Output > x.maxTokens()):
		return seen{}
	}
	out := s.Most(b.sequences) + times(unseenTokens+in.Bounds.Held, b.sequences) + b.echo
	if u.Known && u.Input > 0 {
		u.Output, u.Known = out, false
		return seen{true, u, x.model.Cost(u, int64(in.Images), 0)}
	}
	return seen{true, openai.Usage{Input: b.in, Output: out}, x.model.UpperBound(b.in, out, int64(in.Images), 0)}
}

// cost is the price of the request with answers of so many tokens.
func (b *bounds) cost(x *exchange, tokens int64) int64 {
	var out int64
	if tokens > 0 {
		out = times(tokens, b.sequences) + b.echo
	}
	return x.model.UpperBound(b.in, out, int64(x.in.Images), b.seconds)
}

// affordable is the longest answer that costs no more than so much, between least and cap.
func (b *bounds) affordable(x *exchange, nanoUSD int64) int64 {
	low, high := b.least, b.cap
	for low < high { // 63 rounds at most
		mid := low + (high-low+1)/2
		if b.cost(x, mid) <= nanoUSD {
			low = mid
		} else {
			high = mid - 1
		}
	}
	return low
}

// unbounded refuses what has no upper bound.
func (b *bounds) unbounded(x *exchange) *Error {
	switch {
	case x.in.Bounds.Rounds != "":
		return malformed(http.StatusBadRequest, x.in.Bounds.Rounds, "%s lets the backend run the model any number of times, which a strict budget cannot bound; leave it out, or use a key without a strict budget", x.in.Bounds.Rounds)
	case b.beyond:
		field := cmp.Or(x.in.Bounds.Beyond, "previous_response_id")
		return malformed(http.StatusBadRequest, field, "%s brings in what the body does not show, which a strict budget cannot bound as long as the policy states no context for model %q; leave it out, or ask the operator to state it", field, x.model.Name)
	}
	return nil
}
