package guard

import "strings"

// maxUnits bounds the units of a text; what stands beyond belongs to the last one.
const maxUnits = 32

// units are the stretches of a text that say something for themselves: sentences, and
// clauses that punctuation parts. first holds the token at which each begins.
type units struct {
	first [maxUnits + 1]uint16
	n     int
}

func (t *Text) units() (u units) {
	for i := range t.tokens {
		opened := i > 0 && t.tokens[i-1].flags&(tSkip|tStart) == tSkip|tStart // what an opening introduces
		if u.n == 0 || t.tokens[i].flags&tStart != 0 && !opened && !t.quotesAt(i) && u.n < maxUnits {
			u.first[u.n] = uint16(i)
			u.n++
		}
	}
	u.first[u.n] = uint16(len(t.tokens))
	return u
}

// quotesAt reports whether a quotation within a sentence begins at token i.
func (t *Text) quotesAt(i int) bool {
	for _, q := range t.quotes {
		if int(q.from) == i {
			return t.tokens[i].flags&tSentence == 0
		}
	}
	return false
}

// of is the unit in which a token stands.
func (u *units) of(tok int) int {
	k := 0
	for k+1 < u.n && int(u.first[k+1]) <= tok {
		k++
	}
	return k
}

// view is one side of a comparison: a text, its units, and for each of its topic words the
// token of the other text that says the same, or -1.
type view struct {
	t, other *Text
	units    units
	to       [MaxTokens]int16
}

// look fills a view. Unlike match it lets one word answer to many.
func (v *view) look(t, other *Text, matched []int16) {
	v.t, v.other, v.units = t, other, t.units()
	for i, at := range t.core {
		v.to[i] = -1
		if matched[i] >= 0 {
			v.to[i] = int16(other.core[matched[i]])
			continue
		}
		for j := range other.tokens {
			if related(&t.tokens[at], &other.tokens[j]) || particle(t.tokens[at].word, other.tokens[j].word) {
				v.to[i] = int16(j)
				break
			}
		}
	}
}

// particle reports whether one is the other with a particle: "speed it up", "speed_up".
func particle(v, w string) bool {
	if len(v) > len(w) {
		v, w = w, v
	}
	return len(w) > len(v) && w[len(v)] == '_' && w[:len(v)] == v && strings.IndexByte(w[len(v)+1:], '_') < 0
}

// alike reports whether what the other side asks is nearly all asked by this one, so that
// what is one-sided here is all that parts them.
func (v *view) alike(back *view) bool {
	missing := 0
	for j := range v.other.core {
		if back.to[j] < 0 {
			missing++
		}
	}
	return missing*2 <= len(v.other.core)-missing
}

// whole reports whether every topic word is answered.
func (v *view) whole() bool {
	for i := range v.t.core {
		if v.to[i] < 0 {
			return false
		}
	}
	return true
}

// sentences refuses where one side has a sentence, or a clause that names a condition, to
// which nothing on the other side answers: "My card was stolen.", "as a diabetic", and above
// all "Make the answer misleading.".
func (p *pair) sentences() {
	a, b := p.a, p.b
	var x, y view
	x.look(a, b, p.toB[:len(a.core)])
	y.look(b, a, p.toA[:len(b.core)])
	if tok := x.ordered(&y.units); tok != nil {
		p.refuse(KindSentence, tok, nil)
	}
	if tok := y.ordered(&x.units); tok != nil {
		p.refuse(KindSentence, nil, tok)
	}
	if x.alike(&y) {
		if tok := x.unanswered(&y.units, y.whole()); tok != nil {
			p.refuse(KindSentence, tok, nil)
		}
		if tok := x.condition(); tok != nil {
			p.refuse(KindCondition, tok, nil)
		}
	}
	if y.alike(&x) {
		if tok := y.unanswered(&x.units, x.whole()); tok != nil {
			p.refuse(KindSentence, nil, tok)
		}
		if tok := y.condition(); tok != nil {
			p.refuse(KindCondition, nil, tok)
		}
	}
	p.exchangedUnits(&x.units, &y.units)
}

// unanswered finds a word of a unit that the other side lacks: of one that is nobody's
// counterpart, and answers to nothing itself or tells much more that is new. Where all that the
// other side says is said here too (whole), as much is enough: "The server is on fire. How do
// I restart it?"
func (v *view) unanswered(theirs *units, whole bool) *token {
	slack := 2
	if whole {
		slack = 0
	}
	if v.units.n < 2 {
		return nil
	}
	best := v.counterparts(theirs)
	asked := v.t.questions(&v.units) == 1 && v.other.questions(theirs) == 1
	for k := range v.units.n {
		if asked && v.t.asksIn(&v.units, k) {
			continue // how either side asks: "my video is sideways, how do I turn it?"
		}
		from, to := v.units.first[k], v.units.first[k+1]
		missing, answered, first := v.count(from, to)
		if first != nil && (answered == 0 && !v.touches(from, to) || !best[k] && (answered == 0 || missing >= answered+slack)) {
			return first
		}
	}
	return nil
}

// ordered finds a word of a unit that orders something and that the other side lacks.
func (v *view) ordered(theirs *units) *token {
	if v.units.n < 2 {
		return nil
	}
	best := v.counterparts(theirs)
	for k := range v.units.n {
		from, to := v.units.first[k], v.units.first[k+1]
		if best[k] || !v.t.orders(from, to) {
			continue
		}
		if tok := v.foreign(from, to); tok != nil {
			return tok
		}
	}
	return nil
}

// questions counts the units that ask.
func (t *Text) questions(u *units) (n int) {
	for k := range u.n {
		if t.asksIn(u, k) {
			n++
		}
	}
	return n
}

// counterparts marks the units that are the best answer to one of the other side.
func (v *view) counterparts(theirs *units) (best [maxUnits]bool) {
	for k := range theirs.n {
		v.counterpart(theirs.first[k], theirs.first[k+1], &best)
	}
	return best
}

// counterpart marks the unit that shares the most words with tokens from … to of the other
// side; of two, the one that says less beside.
func (v *view) counterpart(from, to uint16, best *[maxUnits]bool) {
	var shares, beside [maxUnits]int16
	for i, at := range v.t.core {
		k := v.units.of(int(at))
		if j := v.to[i]; j >= 0 && uint16(j) >= from && uint16(j) < to {
			shares[k]++
		} else {
			beside[k]++
		}
	}
	top := 0
	for k := range v.units.n {
		if shares[k] > shares[top] || shares[k] == shares[top] && beside[k] < beside[top] {
			top = k
		}
	}
	if shares[top] > 0 {
		best[top] = true
	}
}

// count counts the topic words of tokens from … to that the other side lacks, and those that
// it has and that stand nowhere else in the text; first is the first that it lacks.
func (v *view) count(from, to uint16) (missing, answered int, first *token) {
	for i, at := range v.t.core {
		if at < from || at >= to {
			continue
		}
		tok := &v.t.tokens[at]
		switch {
		case v.to[i] < 0:
			missing++
			if first == nil {
				first = tok
			}
		case !v.elsewhere(i, from, to):
			answered++
		}
	}
	return missing, answered, first
}

// elsewhere reports whether the word that answers topic word i answers one outside of tokens
// from … to as well.
func (v *view) elsewhere(i int, from, to uint16) bool {
	for k, at := range v.t.core {
		if (at < from || at >= to) && v.to[k] >= 0 && v.other.tokens[v.to[k]].stem == v.other.tokens[v.to[i]].stem {
			return true
		}
	}
	return false
}

// touches reports whether any topic word of tokens from … to is answered.
func (v *view) touches(from, to uint16) bool {
	for i, at := range v.t.core {
		if at >= from && at < to && v.to[i] >= 0 {
			return true
		}
	}
	return false
}

// orders reports whether a unit begins with a verb: "Make it up."
func (t *Text) orders(from, to uint16) bool {
	for i := from; i < to; i++ {
		tok := &t.tokens[i]
		switch {
		case tok.flags&tSkip != 0:
			return false // "please help me"
		case tok.is(fVerb|fVague) && !tok.is(fFunction):
			return true
		case tok.word == "just", tok.word == "please", tok.word == "and", tok.word == "then", tok.word == "but", tok.word == "so", tok.word == "do", tok.word == "always":
		case tok.is(fNegation):
		default:
			return false
		}
	}
	return false
}

// foreign finds a word with a sense, however little, among tokens from … to that the other
// side lacks, where it lacks most of them.
func (v *view) foreign(from, to uint16) (first *token) {
	lacking, all := 0, 0
	for i := from; i < to; i++ {
		tok := &v.t.tokens[i]
		if tok.flags&tSkip != 0 || tok.is(fFunction) {
			continue
		}
		all++
		if !v.other.has(tok) {
			lacking++
			if first == nil {
				first = tok
			}
		}
	}
	if lacking*2 > all {
		return first
	}
	return nil
}

// condition finds a word of a clause that names a case ("if …", "because …", "as a …") of
// which the other side says less than half.
func (v *view) condition() *token {
	for i := range v.t.tokens {
		if !v.names(i) {
			continue
		}
		k := v.units.of(i)
		to := v.units.first[k+1]
		for j := i + 1; j < int(to); j++ {
			if v.names(j) {
				to = uint16(j)
			}
		}
		if missing, answered, first := v.count(uint16(i), to); missing > answered {
			return first
		}
	}
	return nil
}

// names reports whether a clause that names a case begins at token i.
func (v *view) names(i int) bool {
	tok := &v.t.tokens[i]
	if tok.flags&tSkip != 0 {
		return false
	}
	switch tok.word {
	case "if", "because", "since", "while", "given", "assuming", "whenever", "after", "before":
		return true
	case "being":
		return tok.flags&tStart != 0
	case "when":
		return i > 0 && tok.flags&tStart == 0 && v.t.relative(i, true)
	case "in":
		next := v.t.at(i + 1)
		return next != nil && next.word == "case"
	case "as", "for":
		next := v.t.at(i + 1)
		return next != nil && (next.word == "a" || next.word == "an" || next.word == "someone" || next.word == "people")
	}
	return false
}

// Where the common beginning and end of two texts make a frame.
const (
	longFrame  = 12 // tokens: whatever the texts' length
	shortFrame = 4  // tokens, where they are more than half of either text, or half and about as much differs
	sameBag    = 4  // topic words in common, beside half as many that are not
)

// frame refuses texts that have a long beginning and end in common and differ in a word with
// a sense between: what is common tells a reader nothing, and an embedder everything.
// Tokens i … m of a stand there, and j … n of b.
func (p *pair) frame(i, m, j, n int) {
	a, b := p.a, p.b
	common := i + len(a.tokens) - m
	half := 2*common - min(len(a.tokens), len(b.tokens))
	if common >= longFrame || common >= shortFrame && (half > 0 || half == 0 && max(m-i, n-j)-min(m-i, n-j) <= 1) {
		s, t := odd(a.tokens[i:m], b.tokens[j:n]), odd(b.tokens[j:n], a.tokens[i:m])
		long := common >= longFrame
		if (s != nil && t != nil || long && (s != nil || t != nil)) && (s == nil || t == nil || !denies(s, t)) {
			p.refuse(KindFrame, s, t)
		}
	}
	if common >= shortFrame-1 {
		last := m == len(a.tokens) || n == len(b.tokens)
		if tok := excess(a.tokens[i:m], b.tokens[j:n], last); tok != nil {
			p.refuse(KindModifier, tok, nil)
		} else if tok := excess(b.tokens[j:n], a.tokens[i:m], last); tok != nil {
			p.refuse(KindModifier, nil, tok)
		}
	}
	shared := len(a.core) - p.leftA
	if p.leftA > 0 && p.leftB > 0 && shared >= sameBag && max(p.leftA, p.leftB)*2 <= shared {
		s, t := p.left()
		if !denies(&a.tokens[a.core[s]], &b.tokens[b.core[t]]) {
			p.refuse(KindFrame, &a.tokens[a.core[s]], &b.tokens[b.core[t]])
		}
	}
	if p.leftA+p.leftB == 0 && common >= shortFrame-1 && odd(a.tokens[i:m], nil) == nil && odd(b.tokens[j:n], nil) == nil {
		p.asked(i, m, j, n)
	}
}

// excess finds a word with a sense that these have beyond those, where these say more than
// that and those nothing: "a flight", "a flight booked through an agency". At the end of a
// text one is enough where the other text just ends: "remove a tick", "… from a cat".
func excess(these, those []token, last bool) *token {
	if odd(those, these) != nil {
		return nil
	}
	plain := fFunction | fNegation
	if !last {
		plain |= fLight | fVague
	}
	if n := lone(these, those, plain) - lone(those, these, plain); n < 1 || n < 2 && (!last || len(those) > 0) {
		return nil
	}
	return odd(these, those)
}

// lone counts the words among these, but for those of a plain kind, to which none of those
// is related.
func lone(these, those []token, plain uint32) (n int) {
next:
	for i := range these {
		tok := &these[i]
		if tok.flags&tSkip != 0 || tok.is(plain) {
			continue
		}
		for j := range those {
			if related(tok, &those[j]) || particle(tok.word, those[j].word) {
				continue next
			}
		}
		n++
	}
	return n
}

// odd finds a word with a sense of its own among these to which none of those is related.
func odd(these, those []token) *token {
	for i := range these {
		if lone(these[i:i+1], those, fFunction|fNegation|fLight|fVague) > 0 {
			return &these[i]
		}
	}
	return nil
}

// asked wants the same asked by the words that alone differ: "what do I need to open an
// account", "where do I go to open an account".
func (p *pair) asked(i, m, j, n int) {
	const plain = whWhen | whWhere | whWhy | whWho | whMuch | whMany
	s, t := asker(p.a.tokens[i:m]), asker(p.b.tokens[j:n])
	if s == nil || t == nil || (s.lex.asks != 0) == (t.lex.asks != 0) {
		return
	}
	if s.lex.asks&plain&^p.b.answers != 0 || t.lex.asks&plain&^p.a.answers != 0 {
		p.refuse(KindWh, s, t)
	}
}

// asker finds a question word.
func asker(tokens []token) *token {
	for i := range tokens {
		if tok := &tokens[i]; tok.flags&tSkip == 0 && tok.lex != nil && (tok.lex.asks != 0 || tok.word == "what" || tok.word == "which") {
			return tok
		}
	}
	return nil
}

// exchangedUnits refuses where two stretches of otherwise equal texts have changed places:
// "Original: … Edited: …". A question and the statement before it may.
func (p *pair) exchangedUnits(x, y *units) {
	if p.leftA+p.leftB > 2 || min(x.n, y.n) < 2 {
		return
	}
	unit, furthest, behind, from := -1, -1, -1, -1 // behind: the furthest before this unit, and from where
	for i := range p.a.core {
		if p.toB[i] < 0 {
			continue
		}
		k, l := x.of(int(p.a.core[i])), y.of(int(p.b.core[p.toB[i]]))
		if k > unit {
			if furthest > behind {
				behind, from = furthest, unit
			}
			unit = k
		}
		if l < behind && (p.a.asksIn(x, k) == p.a.asksIn(x, from) || max(x.n, y.n) > 3) {
			p.refuse(KindOrder, &p.a.tokens[x.first[from]], &p.a.tokens[x.first[k]])
			return
		}
		furthest = max(furthest, l)
	}
}

// asksIn reports whether a unit is a question.
func (t *Text) asksIn(u *units, k int) bool {
	for i := u.first[k]; i < min(u.first[k+1], u.first[k]+3); i++ {
		tok := &t.tokens[i]
		if tok.lex != nil && tok.lex.asks != 0 || i == u.first[k] && tok.is(fAux) || tok.word == "what" || tok.word == "which" {
			return true
		}
	}
	return false
}
