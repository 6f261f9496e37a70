package guard

import (
	"cmp"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxReasons bounds a Verdict.
const maxReasons = 12

// Compare holds two questions against each other. It is symmetric but for which side a
// Reason calls A. It allows two texts that are equal but for letter case, white space and
// closing punctuation, unless one is over the bounds or holds a block of code. It is safe for concurrent use and
// costs a few microseconds for two questions.
func (t *Text) Compare(u *Text) Verdict {
	if u.before(t) {
		// The rules pair words greedily: in one order of the sides, the verdict is one.
		v := u.Compare(t)
		for i := range v.Refused {
			v.Refused[i].A, v.Refused[i].B = v.Refused[i].B, v.Refused[i].A
		}
		return v
	}
	p := pair{a: t, b: u}
	switch {
	case t.tooLong || u.tooLong:
		p.refuse(KindLength, nil, nil)
	case t.fenced || u.fenced:
		p.refuse(KindCode, nil, nil)
	case t.equal(u):
	case t.foreign || u.foreign:
		p.refuse(KindScript, nil, nil)
	case t.lang != u.lang:
		p.refuse(KindLanguage, nil, nil)
	default:
		p.x = loaded()
		p.match()
		p.numbers()
		p.identifiers()
		p.groups()
		p.negation()
		p.opposites()
		p.question()
		p.persons()
		p.roles()
		p.order()
		p.substitution()
		p.sentences()
		p.tenses()
		p.voices()
		p.scopes()
	}
	return Verdict{Refused: p.refused}
}

// pair is one comparison under way.
type pair struct {
	a, b    *Text
	x       *lexicon
	refused []Reason

	// For each topic token of a the topic token of b that says the same, or -1; and back.
	toB, toA     [MaxTokens]int16
	leftA, leftB int // topic tokens without a counterpart
}

// refuse notes a reason; of one kind the first is kept.
func (p *pair) refuse(k Kind, a, b *token) {
	for i := range p.refused {
		if p.refused[i].Kind == k {
			return
		}
	}
	if len(p.refused) < maxReasons {
		p.refused = append(p.refused, Reason{Kind: k, A: clip(a), B: clip(b)})
	}
}

func clip(t *token) string {
	if t == nil {
		return ""
	}
	n := min(len(t.word), maxReason)
	for n > 0 && n < len(t.word) && !utf8.RuneStart(t.word[n]) {
		n--
	}
	return t.word[:n]
}

// before orders texts: shorter ones first, then by their words.
func (t *Text) before(u *Text) bool {
	if len(t.tokens) != len(u.tokens) {
		return len(t.tokens) < len(u.tokens)
	}
	for i := range t.tokens {
		if c := strings.Compare(t.tokens[i].word, u.tokens[i].word); c != 0 {
			return c < 0
		}
	}
	if c := slices.CompareFunc(t.tokens, u.tokens, func(x, y token) int { return cmp.Compare(x.flags, y.flags) }); c != 0 {
		return c < 0
	}
	return slices.CompareFunc(t.quotes, u.quotes, func(x, y span) int {
		return cmp.Or(cmp.Compare(x.from, y.from), cmp.Compare(x.to, y.to))
	}) < 0
}

// equal reports whether both are the same words in the same order.
func (t *Text) equal(u *Text) bool {
	if len(t.tokens) != len(u.tokens) || len(t.quotes) != len(u.quotes) {
		return false
	}
	for i := range t.tokens {
		if t.tokens[i].word != u.tokens[i].word {
			return false
		}
	}
	return true
}

// related reports whether two tokens say the same: one word, or synonyms.
func related(a, b *token) bool {
	if a.stem == b.stem {
		return true
	}
	const exact = tNumber | tID | tCode
	if (a.flags|b.flags)&exact != 0 {
		return false
	}
	if a.lex != nil && b.lex != nil {
		for _, s := range a.lex.syns {
			if slices.Contains(b.lex.syns, s) {
				return true
			}
		}
		for _, v := range a.lex.vals {
			for _, w := range b.lex.vals {
				if v == w && !v.soft {
					return true
				}
			}
		}
	}
	return derived(a.word, b.word)
}

// derived reports whether two words share a stem of five letters or more and differ in
// endings that leave the sense alone.
func derived(a, b string) bool {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	if n >= 4 && n < len(a) && n < len(b) && a[n-1] == 'i' && a[n+1:] == b[n+1:] && (a[n] == 's' && b[n] == 'z' || a[n] == 'z' && b[n] == 's') {
		return true // "summarise", "summarize"
	}
	return n >= 5 && ending(a[n:]) && ending(b[n:])
}

func ending(s string) bool {
	switch s {
	case "", "e", "s", "es", "d", "ed", "ing", "ion", "ions", "ation", "ations", "al", "als", "ment", "ments", "ance", "ence", "ly", "able":
		return true
	}
	return false
}

// match pairs the topic tokens: equal words before synonyms, each at most once.
func (p *pair) match() {
	a, b := p.a, p.b
	for i := range a.core {
		p.toB[i] = -1
	}
	for j := range b.core {
		p.toA[j] = -1
	}
	for pass := range 2 {
		for i, ti := range a.core {
			if p.toB[i] >= 0 {
				continue
			}
			for j, tj := range b.core {
				if p.toA[j] >= 0 {
					continue
				}
				s, t := &a.tokens[ti], &b.tokens[tj]
				if s.stem == t.stem || pass == 1 && related(s, t) {
					p.toB[i], p.toA[j] = int16(j), int16(i)
					break
				}
			}
		}
	}
	for i := range a.core {
		if p.toB[i] < 0 {
			p.leftA++
		}
	}
	for j := range b.core {
		if p.toA[j] < 0 {
			p.leftB++
		}
	}
}

// has reports whether t holds a token that says the same as tok.
func (t *Text) has(tok *token) bool {
	for i := range t.tokens {
		if related(tok, &t.tokens[i]) {
			return true
		}
	}
	return false
}

// numbers wants the same numbers on both sides, in the same order or beside the same words,
// and each with the same unit.
func (p *pair) numbers() {
	p.numbersOf(p.a, p.b, false)
	p.numbersOf(p.b, p.a, true)
	if len(p.refused) > 0 {
		return
	}
	i, j := 0, 0
	for {
		for i < len(p.a.tokens) && p.a.tokens[i].flags&tNumber == 0 {
			i++
		}
		for j < len(p.b.tokens) && p.b.tokens[j].flags&tNumber == 0 {
			j++
		}
		if i == len(p.a.tokens) || j == len(p.b.tokens) {
			return
		}
		if p.a.tokens[i].word != p.b.tokens[j].word && !p.besideSame() {
			p.refuse(KindNumber, &p.a.tokens[i], &p.b.tokens[j])
			return
		}
		i++
		j++
	}
}

// numbersOf refuses a number of t that u has not, or has with another unit.
func (p *pair) numbersOf(t, u *Text, swapped bool) {
	for i := range t.tokens {
		tok := &t.tokens[i]
		if tok.flags&tNumber == 0 {
			continue
		}
		found, unit := false, false
		var other *token
		for j := range u.tokens {
			o := &u.tokens[j]
			if o.flags&tNumber != 0 && o.word == tok.word || o.flags&tOne != 0 && tok.word == "1" {
				found = true
				unit = unit || p.sameUnit(t, i, u, j)
			} else if o.flags&tNumber != 0 && other == nil {
				other = o
			}
		}
		kind := KindNumber
		if found {
			kind = KindUnit
		}
		if found && unit {
			continue
		}
		if swapped {
			p.refuse(kind, other, tok)
		} else {
			p.refuse(kind, tok, other)
		}
	}
}

// sameUnit reports whether the units at two equal numbers agree, where both have one.
func (p *pair) sameUnit(t *Text, i int, u *Text, j int) bool {
	for _, da := range [2]int{1, -1} {
		a := t.at(i + da)
		if a == nil || a.lex == nil || a.flags&tSkip != 0 {
			continue
		}
		for _, db := range [2]int{1, -1} {
			b := u.at(j + db)
			if b == nil || b.lex == nil || b.flags&tSkip != 0 {
				continue
			}
			for _, v := range a.lex.vals {
				for _, w := range b.lex.vals {
					if v.group == w.group && v.val != w.val && p.x.groups[v.group].kind == KindUnit && !shareValue(a.lex, b.lex) {
						return false
					}
				}
			}
		}
	}
	return true
}

func shareValue(a, b *lexeme) bool {
	for _, v := range a.vals {
		for _, w := range b.vals {
			if v.group == w.group && v.val == w.val {
				return true
			}
		}
	}
	return false
}

func (t *Text) at(i int) *token {
	if i < 0 || i >= len(t.tokens) {
		return nil
	}
	return &t.tokens[i]
}

// besideSame reports whether every number stands before the same word on both sides, and
// that word is none that gives it a part to play.
func (p *pair) besideSame() bool {
	for i := range p.a.tokens {
		tok := &p.a.tokens[i]
		if tok.flags&tNumber == 0 {
			continue
		}
		next := p.a.at(i + 1)
		ok := false
		for j := range p.b.tokens {
			o := p.b.at(j + 1)
			if p.b.tokens[j].word == tok.word && next != nil && o != nil && !next.is(fFunction) && related(next, o) {
				ok = true
			}
		}
		if !ok {
			return false
		}
	}
	return true
}

// identifiers wants names, identifiers, addresses, code and quotations on both sides.
func (p *pair) identifiers() {
	p.identifiersOf(p.a, p.b, false)
	p.identifiersOf(p.b, p.a, true)
	p.quotesOf(p.a, p.b, false)
	p.quotesOf(p.b, p.a, true)
}

func (p *pair) identifiersOf(t, u *Text, swapped bool) {
	titled := t.titled()
	for i := range t.tokens {
		tok := &t.tokens[i]
		kind := KindEntity
		switch {
		case tok.flags&tSkip != 0:
			continue
		case tok.flags&tCode != 0:
			kind = KindCode
		case tok.flags&tID != 0:
		case tok.flags&tName != 0 && tok.lex == nil && t.lang != german && (!titled && tok.flags&tSentence == 0):
		case tok.flags&tAcronym != 0 && tok.lex == nil && p.leftAcronym(u, t) != nil:
		default:
			continue
		}
		if u.has(tok) {
			continue
		}
		if swapped {
			p.refuse(kind, nil, tok)
		} else {
			p.refuse(kind, tok, nil)
		}
	}
}

// leftAcronym finds an acronym or name of t that u has not.
func (p *pair) leftAcronym(t, u *Text) *token {
	for i := range t.tokens {
		tok := &t.tokens[i]
		if tok.flags&(tAcronym|tName) != 0 && tok.flags&tSentence == 0 && tok.lex == nil && !u.has(tok) {
			return tok
		}
	}
	return nil
}

// titled reports whether a text capitalises its words throughout, so that a capital tells
// nothing.
func (t *Text) titled() bool {
	words, capitals := 0, 0
	for i := range t.tokens {
		tok := &t.tokens[i]
		if tok.flags&(tNumber|tID|tCode|tSentence) != 0 || tok.word == "i" {
			continue
		}
		words++
		if tok.flags&(tName|tAcronym) != 0 {
			capitals++
		}
	}
	return words > 2 && capitals*3 > words*2
}

// quotesOf refuses a quotation of t whose words u does not have in one run.
func (p *pair) quotesOf(t, u *Text, swapped bool) {
	for _, q := range t.quotes {
		if int(q.to) > len(t.tokens) || q.from >= q.to || u.run(t.tokens[q.from:q.to]) {
			continue
		}
		var other *token
		if len(u.quotes) > 0 && int(u.quotes[0].from) < len(u.tokens) {
			other = &u.tokens[u.quotes[0].from]
		}
		if swapped {
			p.refuse(KindQuote, other, &t.tokens[q.from])
		} else {
			p.refuse(KindQuote, &t.tokens[q.from], other)
		}
	}
}

// run reports whether t holds these words one after another.
func (t *Text) run(words []token) bool {
next:
	for i := 0; i+len(words) <= len(t.tokens); i++ {
		for j := range words {
			if t.tokens[i+j].word != words[j].word {
				continue next
			}
		}
		return true
	}
	return false
}

// groups holds the values of every group against each other.
func (p *pair) groups() {
	a, b := p.a, p.b
	for i := range a.marks {
		if g := a.marks[i].group; !seen(a.marks[:i], g) {
			p.group(g)
		}
	}
	for i := range b.marks {
		if g := b.marks[i].group; !seen(b.marks[:i], g) && !seen(a.marks, g) {
			p.group(g)
		}
	}
}

func seen(marks []mark, g uint16) bool {
	for i := range marks {
		if marks[i].group == g {
			return true
		}
	}
	return false
}

// group refuses where the sides name values that the other lacks; in a strict group also
// where only one side names any.
func (p *pair) group(g uint16) {
	gr := &p.x.groups[g]
	onlyA, hardA, anyA := extra(p.a, p.b, g)
	onlyB, hardB, anyB := extra(p.b, p.a, g)
	switch {
	case onlyA == nil && onlyB == nil:
	case anyA && anyB:
		if onlyA != nil && onlyB != nil && (onlyA.flags^onlyB.flags)&tNegated != 0 && gr.kind == KindAntonym {
			return // "is not accepted", "is rejected": whether that is so is the negation's business
		}
		if onlyA != nil && onlyB != nil && p.converse(onlyA, onlyB) {
			return
		}
		if onlyA != nil && onlyB != nil || gr.strict && hardA && hardB {
			p.refuse(gr.kind, onlyA, onlyB)
		}
	case gr.strict && (gr.kind == KindAntonym || gr.kind == KindQuantifier) && p.leftA > 0 && p.leftB > 0:
		// Put otherwise; where nothing else differs, one word more is seen below.
	case gr.strict && (anyA && hardA || anyB && hardB):
		p.refuse(gr.kind, onlyA, onlyB)
	}
}

// converse reports whether two words are one trade seen from its two sides: "do you sell
// stamps" or "where are stamps sold", and "can I buy stamps".
func (p *pair) converse(s, t *token) bool {
	if s.stem != "sell" && t.stem != "sell" {
		return false
	}
	who, whom := p.a.trader(s), p.b.trader(t)
	return who != whom && who != 0 && whom != 0
}

// trader is who is named before a word for buying or selling, as speaks tells it; -1 where
// it is passive, 0 where nobody is named.
func (t *Text) trader(tok *token) int {
	at := 0
	for at < len(t.tokens) && &t.tokens[at] != tok {
		at++
	}
	for i := at - 1; i >= max(at-4, 0); i-- {
		switch w := t.tokens[i].word; w {
		case "is", "are", "was", "were", "be":
			if tok.word != tok.stem {
				return -1
			}
		default:
			if who := speaks(w); who != 0 {
				return who
			}
		}
	}
	for i := at - 1; i >= 0; i-- {
		if w := t.tokens[i].word; (w == "are" || w == "is") && tok.word == "sold" {
			return -1
		}
	}
	return 0
}

// extra finds a token of t with a value of the group that no token of u has. Words that
// count only for want of plainer ones are left out where there are plainer ones.
func extra(t, u *Text, g uint16) (only *token, hard, found bool) {
	hard = hardIn(t, g)
	uHard := hardIn(u, g)
	for i := range t.marks {
		m := &t.marks[i]
		if m.group != g || hard && m.soft {
			continue
		}
		found = true
		if only != nil {
			continue
		}
		covered := false
		for _, v := range t.tokens[m.tok].lex.vals {
			for j := range u.marks {
				n := &u.marks[j]
				if v.group == g && n.group == g && n.val == v.val && (!uHard || !n.soft) {
					covered = true
				}
			}
		}
		if !covered {
			only = &t.tokens[m.tok]
		}
	}
	return only, hard, found
}

func hardIn(t *Text, g uint16) bool {
	for i := range t.marks {
		if t.marks[i].group == g && !t.marks[i].soft {
			return true
		}
	}
	return false
}
