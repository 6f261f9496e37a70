package proxy

import (
	"cmp"
	"net/http"

	"github.com/cespare/xxhash/v2"

	"headgate/proxy/affinity"
	"headgate/proxy/dispatch"
	"headgate/proxy/ladder"
	"headgate/proxy/openai"
	routing "headgate/proxy/route"
	"headgate/proxy/upstream"
)

// steer puts the model in the place of the one asked for that the policy's routes choose, where the
// caller may use it.
func (x *exchange) steer() {
	if x.snap.Routes == nil || !x.generates() {
		return
	}
	in := x.p.est.input(x.caller.Tenant, x.asked, &x.in)
	x.steerBy(x.r.Header, in, x.p.est.output(x.caller.KeyID, x.asked, &x.in, in))
}

func (x *exchange) steerBy(h http.Header, in, out int64) {
	q := routing.Query{
		Model: cmp.Or(x.named, x.asked.Name), Surface: x.surface, Class: routing.Class(x.class), Tenant: x.caller.Tenant, Tier: x.caller.Tier, User: x.user, Key: x.caller.KeyID,
		Draw: x.draw(), Input: in, Output: out, Header: h.Get,
	}
	c, ok := x.snap.Routes.Choose(&q)
	if !ok {
		return
	}
	x.rule, x.why = c.Rule, c.Why
	if m := x.mayUse(c.Model); m != nil && x.killed(c.Model, m) == nil {
		x.routed = m
	}
}

// draw decides for a request of nobody's: a conversation stays where it began, as far as it shows.
func (x *exchange) draw() uint64 {
	if x.body == nil {
		return 0
	}
	var p openai.Prefix
	x.in.Prefix(x.body.Bytes(), 0, &p)
	if p.Root != 0 {
		return p.Root
	}
	return xxhash.Sum64String(x.id)
}

// generates: vectors and tokens of two models don't mix, so that neither routes nor rungs touch what
// brings no text.
func (x *exchange) generates() bool { return x.route == nil || x.route.generate }

// fitting leaves out the models whose context the request can't fit into. A quarter of a doubt about
// the estimate is the backend's to settle.
func (x *exchange) fitting(ms []*Model) ([]*Model, error) {
	fit := ms[:0:len(ms)]
	var short *Model
	for _, m := range ms {
		if x.overlong(m) {
			short = m
			continue
		}
		fit = append(fit, m)
	}
	if len(fit) == 0 && short != nil {
		return nil, errOverlong(short, x.leastInput(short))
	}
	return fit, nil
}

// leastInput is how many tokens the input surely has, about.
func (x *exchange) leastInput(m *Model) int64 {
	text := x.in
	text.InputTokens = 0
	return x.in.InputTokens/max(x.in.Inputs, 1) + x.p.est.input(x.caller.Tenant, m, &text)/2/max(x.in.Inputs, 1)
}

// overlong: no tokenizer would make the request fit.
func (x *exchange) overlong(m *Model) bool {
	if m.Context == 0 || !x.generates() || x.in.FileBytes > 0 || x.earlier > 0 {
		return false
	}
	return x.leastInput(m) >= m.Context
}

func errOverlong(m *Model, in int64) *Error {
	e := malformed(http.StatusBadRequest, "messages", "model %q has a context of %d tokens, and this request needs more: its input alone is some %d or longer; shorten it, or use a model with a larger context", m.Name, m.Context, in)
	e.Code = "context_length_exceeded"
	return e
}

// descend finds out which rungs of the ladder hold for the request.
func (x *exchange) descend() {
	hand := x.p.switches.Load().hand.On(x.start)
	x.rungs, x.cutoff = x.p.cfg.Ladder.State(x.routed.Name).With(hand)
	if x.noDegrade {
		x.rungs = x.rungs.Kept()
	}
}

// shorten has the answer end earlier, where the ladder says so and the request bears it.
func (x *exchange) shorten() {
	x.cut = 0
	if !x.rungs.Has(ladder.CutMaxTokens) || x.body == nil {
		return
	}
	if limit, ok := ladder.Cut(x.route.kind, &x.in, x.body.Bytes(), x.p.cfg.Ladder.State(x.routed.Name).MaxTokens); ok {
		x.cut, x.in.MaxOutput = limit, limit
	}
}

// shed refuses what is given up for others, before anything is spent. m is the model that would
// answer.
func (x *exchange) shed(m *Model) *Error {
	if x.staticByHand() {
		return errStatic()
	}
	tokens := int64(0)
	if x.route.metered && x.cutoff.AboveTokens > 0 {
		tokens = x.p.est.input(x.caller.Tenant, m, &x.in) + x.earlier
		if x.route.generate {
			tokens += x.p.est.output(x.caller.KeyID, m, &x.in, tokens)
		}
	}
	why := x.cutoff.Sheds(tokens, x.caller.Tier, ladder.Class(x.class))
	if why == "" {
		return nil
	}
	return errShed(why, tokens, x)
}

// staticByHand: the operator has the static answer given to everybody. By itself that rung takes the
// place of refusals only, or the fleet would fall idle by it.
func (x *exchange) staticByHand() bool {
	return x.rungs.Has(ladder.StaticAnswer) && !x.p.cfg.Ladder.State(x.routed.Name).Rungs.Has(ladder.StaticAnswer) && x.mayRelieve()
}

// mayRelieve: a static answer does for the request.
func (x *exchange) mayRelieve() bool {
	return !x.noDegrade && x.body != nil && x.route.generate && ladder.CanAnswer(x.route.kind, &x.in, x.body.Bytes())
}

// relieve answers statically instead of with a refusal for want of capacity, where the ladder says so.
func (x *exchange) relieve() bool {
	e := x.gotErr
	if x.answer.begun || x.r.Context().Err() != nil || x.routed == nil || !x.rungs.Has(ladder.StaticAnswer) ||
		e.Code != codeOverCapacity && e.Code != codeNoBackend || !x.mayRelieve() {
		return false
	}
	s := x.p.cfg.Ladder.State(x.routed.Name)
	x.settle(outcomeRefused)
	if s.FallbackURL != "" {
		if x.answer.started {
			return false // there is no header any more that could send it elsewhere
		}
		e.Status, e.location, e.degraded = http.StatusTemporaryRedirect, s.FallbackURL, ladder.StaticAnswer.String()
		return false
	}
	a := ladder.Answer{
		Kind: x.route.kind, Model: x.in.Model, Text: s.Text, ID: x.id, Created: x.start, Choices: x.in.Sequences, Stream: x.in.Stream, IncludeUsage: x.in.WantsUsage,
	}
	body, contentType, err := a.Body()
	if err != nil {
		x.p.cfg.Logger.Error("the ladder's static answer can't be made", "request_id", x.id, "error", err)
		return false
	}
	x.gotErr, x.model, x.tab.clamped = nil, x.asked, false
	x.served |= ladder.SetOf(ladder.StaticAnswer)
	x.write(http.StatusOK, contentType, body)
	return true
}

// prefer puts those endpoints first that are likely to have the prompt's beginning in their prefix cache, as
// far as they are not much fuller than the others.
func (x *exchange) prefer(cs []upstream.Candidate) {
	n := 0 // overflow, and what is not known to be up, stay behind
	for n < len(cs) && !cs[n].Overflow && cs[n].State == upstream.Up {
		n++
	}
	q := &x.line.affinity
	if n < 2 || x.model.Affinity == ByNothing || !x.begins(q) {
		return
	}
	state := x.p.state()
	q.Tokens, q.Told = x.res.inTokens, state.Reachable // then each node hears of all requests
	found := x.line.found[:0]
	for i := range cs[:n] {
		c := &cs[i]
		a := affinity.Candidate{ID: c.ID, Slots: int64(c.Slots), Load: int64(c.InFlight)}
		if s, ok := state.Backends[c.ID]; ok && c.Bounded {
			a.Load = max(a.Load, s.InUse)
		}
		found = append(found, a)
	}
	x.line.found = found
	x.line.order = x.p.cfg.Affinity.Order(x.line.order[:0], q, found)
	sorted := make([]upstream.Candidate, 0, n)
	for _, i := range x.line.order {
		sorted = append(sorted, cs[i])
	}
	copy(cs, sorted)
}

// begins says what the request has in common with others, if anything.
func (x *exchange) begins(q *affinity.Query) bool {
	if x.line.hashed || x.body == nil {
		return q.Root != 0 || q.Session != 0
	}
	x.line.hashed = true
	seed := xxhash.Sum64String(x.model.Name)
	if x.snap.Salted != nil {
		seed ^= xxhash.Sum64String(x.caller.CacheSalt)
	}
	if x.in.PromptCacheKey != "" {
		q.Session = affinity.Session(seed^xxhash.Sum64String(x.caller.Tenant), x.in.PromptCacheKey)
	}
	if x.model.Affinity == ByPrefix {
		x.in.Prefix(x.body.Bytes(), seed, &x.line.prefix)
		q.Root, q.Chain = x.line.prefix.Root, x.line.prefix.Chain()
	}
	return q.Root != 0 || q.Session != 0
}

// state is what is known of the backends' places in the cluster.
func (p *Proxy) state() *dispatch.State {
	if p.cfg.Dispatch == nil {
		return &dispatch.State{}
	}
	return p.cfg.Dispatch.State()
}
