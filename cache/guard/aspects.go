package guard

import "strings"

// What a text says of when: yet to come, over, or under way.
const (
	tenseFuture uint8 = 1 << iota
	tensePast
	tenseStill
	tenseOnce    // "used to"
	tensePresent // "does"
	tenseDid     // "did", beside tensePast
	tenseNow     // "is reserved"
)

// tense reads whether a text speaks of what will be, what was and what still is.
func (t *Text) tense() (bits uint8) {
	for i := range t.tokens {
		tok := &t.tokens[i]
		if tok.flags&tSkip != 0 {
			continue
		}
		switch tok.word {
		case "will", "shall", "gonna", "going_to":
			bits |= tenseFuture
		case "do", "does":
			bits |= tensePresent
		case "did":
			bits |= tensePast | tenseDid
		case "was", "were", "had", "already":
			bits |= tensePast
		case "has", "have":
			if t.perfect(i) {
				bits |= tensePast
			}
		case "is", "are", "am":
			if t.perfect(i) {
				bits |= tenseNow
			}
		case "still", "ongoing":
			bits |= tenseStill
		case "about":
			if next := t.at(i + 1); next != nil && next.word == "to" {
				bits |= tenseFuture
			}
		case "used":
			if next := t.at(i + 1); next != nil && next.word == "to" && i > 0 && !t.tokens[i-1].is(fAux) {
				bits |= tenseOnce
			}
		}
	}
	return bits
}

// perfect reports whether the "have" at token i makes a perfect: "have been charged", "has
// my order arrived", not "have a locked door".
func (t *Text) perfect(i int) bool {
	from := i + 1
	if t.tokens[i].flags&tStart != 0 || i > 0 && t.tokens[i-1].lex != nil && t.tokens[i-1].lex.asks != 0 {
		from = min(i+3, len(t.tokens)) // the subject stands between
	}
	for j := i + 1; j < min(from+2, len(t.tokens)); j++ {
		switch t.tokens[j].word {
		case "to", "enough", "any", "some":
			return false
		case "a", "an", "the", "my", "your":
			if from == i+1 {
				return false
			}
		}
	}
	return t.participle(from)
}

// tenses refuses what will be beside what was, and what is still so beside what is over.
func (p *pair) tenses() {
	if p.a.lang != english || p.apart() && (p.leftA > 1 || p.leftB > 1) {
		return
	}
	s, t := p.a.tense(), p.b.tense()
	over := func(s, t uint8, u *Text) bool {
		return t&tensePast != 0 && t&s&(tenseFuture|tensePast|tenseStill) == 0 && (s&tenseFuture != 0 || s&tenseStill != 0 && u.negations == 0) && s&tensePast == 0
	}
	now := func(s, t uint8) bool {
		const times = tenseFuture | tensePast | tenseStill | tenseNow
		return s&times == tenseFuture && t&times == tenseNow && p.leftA+p.leftB == 0 && (p.a.asks|p.b.asks)&(whWhen|whLong) == 0
	}
	if now(s, t) || now(t, s) || over(s, t, p.b) || over(t, s, p.a) || (s^t)&tenseOnce != 0 ||
		p.leftA+p.leftB == 0 && (s^t)&tensePresent != 0 && (s^t)&tenseDid != 0 && (s&tenseDid != 0) == (t&tensePresent != 0) {
		p.refuse(KindModality, p.a.modalWord(), p.b.modalWord())
		return
	}
	for i := range p.a.core {
		if p.toB[i] < 0 {
			continue
		}
		s, t := int(p.a.core[i]), int(p.b.core[p.toB[i]])
		if x, y := p.a.timeOf(s), p.b.timeOf(t); (clash(x, y) || clash(y, x)) && p.a.tokens[s].flags&tNegated == 0 {
			p.refuse(KindModality, &p.a.tokens[s], &p.b.tokens[t])
		}
	}
}

// clash reports whether a verb is over on one side and not on the other.
func clash(x, y uint8) bool {
	return y&tensePast != 0 && (x == tenseFuture || x == tenseStill || x == tensePresent && y&tenseDid != 0)
}

// timeOf is when what the verb at token i says takes place; 0 where nothing tells.
func (t *Text) timeOf(i int) uint8 {
	tok := &t.tokens[i]
	if tok.flags&(tNumber|tID|tCode) != 0 || tok.word == tok.stem && strings.HasSuffix(tok.word, "s") {
		return 0
	}
	for j := i - 1; j >= max(i-4, 0) && t.tokens[j+1].flags&tStart == 0; j-- {
		prev := &t.tokens[j]
		switch prev.word {
		case "will", "shall", "gonna", "going_to", "about":
			return tenseFuture
		case "being":
			if before := t.at(j - 1); before != nil && before.is(fAux) {
				return tenseStill
			}
			return 0
		case "did":
			return tensePast | tenseDid
		case "do", "does":
			return tensePresent
		case "was", "were", "had", "has", "have":
			return tensePast
		case "is", "are", "am", "be", "get", "gets", "a", "an", "the":
			return 0
		case "to", "been", "not", "already", "just":
		default:
			if speaks(prev.word) != 0 {
				continue
			}
			if prev.is(fFunction) || !strings.HasSuffix(tok.word, "ed") {
				return 0
			}
			return tensePast
		}
	}
	return 0
}

// A speaker's part in what a verb says.
const (
	partNone = iota
	partDoes
	partSuffers
)

// voice is the part that "I" or "you" plays at token i, and which of them; "to get paid" and
// "to pay" are taken to be said of "I".
func (t *Text) voice(i int) (part, who int) {
	tok := &t.tokens[i]
	participle := tok.flags&tNumber == 0 && (strings.HasSuffix(tok.word, "ed") || strings.HasSuffix(tok.word, "en") || tok.word != tok.stem && !strings.HasSuffix(tok.word, "s") && !strings.HasSuffix(tok.word, "ing"))
	if next := t.at(i + 1); next != nil && (next.word == "me" || next.word == "us") && next.flags&tStart == 0 && !tok.is(fFunction) {
		return partSuffers, 1
	}
	part = partDoes
	for j := i - 1; j >= max(i-4, 0); j-- {
		prev := &t.tokens[j]
		switch prev.word {
		case "get", "got", "gets", "getting":
			if !participle {
				return partNone, 0
			}
			part, who = partSuffers, 1
		case "be", "been", "being", "am", "are", "is", "was", "were":
			if participle {
				part = partSuffers
			}
		case "to":
			return part, 1
		default:
			if k := speaks(prev.word); k != 0 {
				if before := t.at(j - 1); before != nil && participle && before.lex != nil && before.lex.base == "be" {
					part = partSuffers // "was I charged?"
				}
				return part, k
			}
			if !prev.is(fFunction) || owner(prev.word) != 0 || prev.word == "a" || prev.word == "an" || prev.word == "the" {
				return partNone, 0
			}
		}
	}
	if part == partSuffers && who != 0 {
		return part, who
	}
	return partNone, 0
}

// voices refuses where one does on one side what is done to him on the other: "how do I pay
// a company", "how do I get paid by a company".
func (p *pair) voices() {
	if p.a.lang != english {
		return
	}
	for i := range p.a.core {
		if p.toB[i] < 0 {
			continue
		}
		s, t := int(p.a.core[i]), int(p.b.core[p.toB[i]])
		part, who := p.a.voice(s)
		other, whom := p.b.voice(t)
		if part != partNone && other != partNone && part != other && who == whom {
			p.refuse(KindPerson, &p.a.tokens[s], &p.b.tokens[t])
		}
	}
}

// How many of its kind a word is said of.
const (
	scopeOpen = iota
	scopeThis
	scopeAll
	scopePlace // the first, the next
)

// scope tells which of its kind token i is said of, by what stands before it.
func (t *Text) scopeOf(i int) int {
	for j := i - 1; j >= max(i-4, 0) && t.tokens[j+1].flags&tStart == 0; j-- {
		switch t.tokens[j].word {
		case "this":
			return scopeThis
		case "that":
			if before := t.at(j - 1); before != nil && !before.is(fFunction) {
				return scopeOpen // "a battery that drains"
			}
			return scopeThis
		case "every", "each", "all", "both", "any":
			return scopeAll
		case "first", "next", "last", "previous", "initial", "final", "second", "latest", "newest", "oldest":
			return scopePlace
		case "of", "my", "our", "your", "the", "these", "those":
		default:
			return scopeOpen
		}
	}
	return scopeOpen
}

// many reports whether token i is a plural.
func (t *Text) many(i int) bool {
	w := t.tokens[i].word
	return w != t.tokens[i].stem && len(w) > 3 && w[len(w)-1] == 's' && w[len(w)-2] != 's'
}

// scopes refuses one thing beside all of its kind, and what goes for everyone beside what
// goes for one.
func (p *pair) scopes() {
	a, b := p.a, p.b
	if a.lang != english {
		return
	}
	for i := range a.core {
		if p.toB[i] < 0 {
			continue
		}
		s, t := int(a.core[i]), int(b.core[p.toB[i]])
		if x, y := a.scopeOf(s), b.scopeOf(t); x != y && x != scopeOpen && y != scopeOpen || x == scopeThis && y == scopeOpen && b.many(t) || y == scopeThis && x == scopeOpen && a.many(s) {
			p.refuse(KindQuantifier, &a.tokens[s], &b.tokens[t])
		}
	}
	for i := range a.tokens {
		if tok := &a.tokens[i]; tok.is(fLight) && !tok.is(fFunction) {
			p.lightScope(i)
		}
	}
	if s, t := a.everyone(), b.everyone(); (s == nil) != (t == nil) && p.leftA <= 1 && p.leftB <= 1 {
		p.refuse(KindQuantifier, s, t)
	}
}

// lightScope is scopes for a word that carries no topic: "this part", "every part".
func (p *pair) lightScope(i int) {
	x := p.a.scopeOf(i)
	if x == scopeOpen {
		return
	}
	for j := range p.b.tokens {
		if p.b.tokens[j].stem != p.a.tokens[i].stem {
			continue
		}
		if y := p.b.scopeOf(j); y != x && y != scopeOpen {
			p.refuse(KindQuantifier, &p.a.tokens[i], &p.b.tokens[j])
		}
		return
	}
}

// everyone finds the word by which a text speaks of all people.
func (t *Text) everyone() *token {
	for i := range t.tokens {
		switch t.tokens[i].word {
		case "everyone", "everybody", "publicly":
			return &t.tokens[i]
		}
	}
	return nil
}
