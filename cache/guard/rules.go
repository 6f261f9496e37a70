package guard

import "strings"

// negation wants both sides to say no, of the same thing, or neither. One side may say no
// where the other names a failure that the first does not: "doesn't work", "is broken".
func (p *pair) negation() {
	a, b := p.a, p.b
	switch {
	case a.negations == 0 && b.negations == 0:
	case a.negations > 0 && b.negations > 0:
		if s, t := p.negatedElsewhere(); s != nil {
			p.refuse(KindNegation, s, t)
		}
	case a.negations > 0:
		if !a.fails(b) {
			p.refuse(KindNegation, a.negator(), nil)
		}
	default:
		if !b.fails(a) {
			p.refuse(KindNegation, nil, b.negator())
		}
	}
}

func (t *Text) negator() *token {
	for i := range t.tokens {
		if tok := &t.tokens[i]; tok.flags&tSkip == 0 && tok.is(fNegation) {
			return tok
		}
	}
	return nil
}

// fails reports whether u may tell in plain words what t tells by saying no: it names a
// failure that t does not name, or nothing that t denies.
func (t *Text) fails(u *Text) bool {
	if failing(u, t) {
		return true
	}
	denied := t.denied()
	return denied != nil && (!u.has(denied) || u.freeOf(denied))
}

// freeOf reports whether t is said to be free of something: "gluten free", "free of gluten".
func (t *Text) freeOf(tok *token) bool {
	for i := range t.tokens {
		if t.tokens[i].word != "free" {
			continue
		}
		before, after := t.at(i-1), t.at(i+2)
		if before != nil && related(tok, before) || after != nil && t.tokens[i+1].word == "of" && related(tok, after) {
			return true
		}
	}
	return false
}

// failing reports whether t names a failure that u does not name.
func failing(t, u *Text) bool {
	for i := range t.tokens {
		if tok := &t.tokens[i]; tok.is(fFailure) && !u.has(tok) {
			return true
		}
	}
	return false
}

// negatedElsewhere finds the first word that each side denies, where the other side has both
// and denies the other one: "I can send but not receive", "receive but not send".
func (p *pair) negatedElsewhere() (s, t *token) {
	s, t = p.a.denied(), p.b.denied()
	if s == nil || t == nil || related(s, t) || failing(p.a, p.b) || failing(p.b, p.a) {
		return nil, nil
	}
	if p.a.affirms(t) && p.b.affirms(s) {
		return s, t
	}
	return nil, nil
}

// affirms reports whether t says the same as tok, and does not deny it.
func (t *Text) affirms(tok *token) bool {
	for i := range t.tokens {
		if o := &t.tokens[i]; o.flags&tNegated == 0 && related(tok, o) {
			return true
		}
	}
	return false
}

// denied is the word that the first word that says no bears on.
func (t *Text) denied() *token {
	for i := range t.tokens {
		if tok := &t.tokens[i]; tok.flags&tNegated != 0 && !tok.is(fFunction) {
			return tok
		}
	}
	return nil
}

// opposites finds words that a prefix or an ending turns into their opposite: "eligible"
// and "ineligible", "lock" and "unlock", "sugarless" and "sugar".
func (p *pair) opposites() {
	for i, ti := range p.a.core {
		if p.toB[i] >= 0 {
			continue
		}
		for j, tj := range p.b.core {
			s, t := &p.a.tokens[ti], &p.b.tokens[tj]
			if p.toA[j] < 0 && (turned(s, t) || turned(t, s)) {
				p.refuse(KindAntonym, s, t)
			}
		}
	}
}

// turned reports whether t is s with a prefix or ending that denies it.
func turned(s, t *token) bool {
	for _, prefix := range [...]string{"un", "in", "im", "il", "ir", "dis", "de", "non", "mis", "anti", "a"} {
		rest, ok := strings.CutPrefix(t.word, prefix)
		if ok && len(rest) >= 4 && (rest == s.word || stem(english, rest) == stem(english, s.word)) {
			return true
		}
	}
	rest, ok := strings.CutSuffix(t.word, "less")
	return ok && len(rest) >= 3 && (rest == s.word || strings.TrimSuffix(s.word, "ful") == rest)
}

// What one question word may stand for another: "when" and "how long" both ask for a time.
func compatible(asks uint16) uint16 {
	out := asks
	if asks&(whWhen|whLong|whOften) != 0 {
		out |= whWhen | whLong | whOften
	}
	if asks&(whResult|whIf) != 0 {
		out |= whResult | whIf
	}
	if asks&(whHow|whWhere) != 0 {
		out |= whHow | whWhere
	}
	return out
}

// question wants the same kind of answer: a time, a place, a reason, an amount, a way; and
// in questions to be answered by yes or no the same of may, must, should, will and did.
func (p *pair) question() {
	a, b := p.a, p.b
	switch {
	case p.apart():
		// Put otherwise throughout, which the threshold judges: "what are my options now that
		// my flight is cancelled?", "the airline cancelled my flight, what happens next?".
	case a.asks != 0 && b.asks != 0:
		answersA, answersB := a.asks|a.answers&^whHow, b.asks|b.answers&^whHow
		if a.answers&b.answers&whContact != 0 && (a.asks|b.asks)&^(whWho|whWhere|whHow) == 0 {
			return
		}
		if p.leftA+p.leftB == 0 {
			answersA, answersB = a.asks, b.asks // the same words: only what is asked differs
		}
		if a.asks&compatible(answersB) == 0 && b.asks&compatible(answersA) == 0 {
			p.refuse(KindWh, a.asker(), b.asker())
		}
	case (a.asks != 0) != (b.asks != 0) && p.leftA+p.leftB > 1:
		// "Is it back soon?", "when do you have it again?"
	case a.asks != 0:
		if p.unanswered(a, b) {
			p.refuse(KindWh, a.asker(), nil)
		}
	case b.asks != 0:
		if p.unanswered(b, a) {
			p.refuse(KindWh, nil, b.asker())
		}
	case a.yesNo && b.yesNo:
		p.modality()
	case a.yesNo && a.modal&modalDid != 0 && p.leftA+p.leftB <= 1, b.yesNo && b.modal&modalDid != 0 && p.leftA+p.leftB <= 1:
		p.refuse(KindModality, a.modalWord(), b.modalWord()) // "did I put it on the list?", "put it on the list"
	}
}

// modality wants the same of may, must, should, will and did in two questions to be
// answered by yes or no that are otherwise alike.
func (p *pair) modality() {
	const (
		deed = modalMust | modalShould | modalDid
		open = modalCan | modalWill // "will it fit?", "can I use it?"
	)
	s, t := p.a.modal, p.b.modal
	if (s|t)&modalDone != 0 {
		s, t = s&^(modalDone|modalDid), t&^(modalDone|modalDid)
	}
	left := p.leftA + p.leftB
	switch {
	case s&t != 0 || s|t == 0:
	case s != 0 && t != 0 && left <= 2 && (s|t)&^open != 0, (s == 0 || t == 0) && left <= 1 && (s|t)&deed != 0:
		p.refuse(KindModality, p.a.modalWord(), p.b.modalWord())
	}
}

// apart reports whether two questions share so little that nothing follows from a word that
// only one of them has.
func (p *pair) apart() bool {
	return p.leftA > 1 && p.leftB > 1 || p.leftA > 0 && p.leftB > 0 && len(p.a.core)-p.leftA <= 1
}

// unanswered reports whether a question of t is of a kind that u, which has no question
// word, cannot want.
func (p *pair) unanswered(t, u *Text) bool {
	missing := t.asks &^ compatible(u.asks|u.answers)
	switch {
	case t.asks&^missing != 0 && t.asks&whResult == 0 || t.asks&whHow != 0:
		return false
	case t.asks&whIf != 0:
		return false
	case t.asks&whResult != 0 && t.asks&whHow == 0:
		return u.answers&whResult == 0
	case t.asks&(whHow|whWhere) != 0:
		return u.yesNo && u.modal&(modalMust|modalShould|modalWill|modalDid) != 0
	}
	// "Who owns it?", "what does owning it cost?": what answers to another question asks it.
	return u.yesNo || u.what && (p.leftA+p.leftB == 0 || u.answers&^(whHow|whContact|whWho|whWhere) != 0)
}

func (t *Text) asker() *token {
	for i := range t.tokens {
		if tok := &t.tokens[i]; tok.lex != nil && tok.flags&tSkip == 0 && tok.lex.asks != 0 {
			return tok
		}
	}
	return nil
}

func (t *Text) modalWord() *token {
	for i := range t.tokens {
		if tok := &t.tokens[i]; tok.lex != nil && tok.flags&tSkip == 0 && tok.lex.modal != 0 {
			return tok
		}
	}
	return nil
}

// owner is whose a possessive says a thing is.
func owner(w string) uint8 {
	switch w {
	case "my", "our", "mine":
		return 1
	case "your", "yours":
		return 2
	case "his":
		return 3
	case "her":
		return 4
	case "their":
		return 5
	}
	return 0
}

// sexes is who "he" and "she" may be of those whom a text names.
func (t *Text) sexes() (bits uint8) {
	for i := range t.tokens {
		switch t.tokens[i].stem {
		case "husband", "father", "dad", "son", "brother", "uncle", "grandfather", "boyfriend", "nephew", "man", "boy":
			bits |= personHe
		case "wife", "mother", "mom", "mum", "daughter", "sister", "aunt", "grandmother", "girlfriend", "niece", "woman", "girl":
			bits |= personShe
		}
	}
	return bits
}

// persons wants the same he or she, the same owner of the same thing, and the same "I" and
// "you" in the same places.
func (p *pair) persons() {
	a, b := p.a, p.b
	if a.people != b.people && a.people|a.sexes() != b.people|b.sexes() {
		p.refuse(KindPerson, a.personWord(), b.personWord())
	}
	if a.lang != english {
		return
	}
	for i, ti := range a.core {
		if p.toB[i] < 0 {
			continue
		}
		s, t := a.ownerOf(int(ti)), b.ownerOf(int(b.core[p.toB[i]]))
		if s != nil && t != nil && owner(s.word) != owner(t.word) {
			p.refuse(KindPerson, s, t)
		}
	}
	if p.leftA == 0 && p.leftB == 0 {
		p.speakers()
	}
}

func (t *Text) personWord() *token {
	for i := range t.tokens {
		switch tok := &t.tokens[i]; tok.word {
		case "he", "him", "his", "himself", "she", "her", "hers", "herself":
			return tok
		}
	}
	return nil
}

// ownerOf finds the possessive before token i, over at most two words between.
func (t *Text) ownerOf(i int) *token {
	for j := i - 1; j >= max(i-3, 0); j-- {
		tok := &t.tokens[j]
		if owner(tok.word) != 0 {
			return tok
		}
		if tok.is(fFunction) || t.tokens[j+1].flags&tStart != 0 {
			return nil
		}
	}
	return nil
}

// speakers refuses "do I owe you" against "do you owe me", and "should I" against "should
// you" where nothing else differs.
func (p *pair) speakers() {
	s, sBoth := p.a.speaker()
	t, tBoth := p.b.speaker()
	if s != nil && t != nil && sBoth && tBoth && speaks(s.word) != speaks(t.word) {
		p.refuse(KindPerson, s, t)
	}
	s, t = p.a.subject(), p.b.subject()
	if s != nil && t != nil && speaks(s.word) != speaks(t.word) {
		p.refuse(KindPerson, s, t)
	}
}

// speaker finds the first "I" or "you", and whether both occur.
func (t *Text) speaker() (one *token, both bool) {
	for i := range t.tokens {
		tok := &t.tokens[i]
		if tok.flags&tSkip != 0 || speaks(tok.word) == 0 {
			continue
		}
		if one == nil {
			one = tok
		} else if speaks(tok.word) != speaks(one.word) {
			return one, true
		}
	}
	return one, false
}

// subject finds the "I" or "you" of "can I …?", "should you …?".
func (t *Text) subject() *token {
	for i := 1; i < len(t.tokens) && t.yesNo; i++ {
		aux, tok := &t.tokens[i-1], &t.tokens[i]
		if aux.flags&tStart != 0 && aux.is(fAux) && aux.lex.modal&^modalDid != 0 && speaks(tok.word) != 0 {
			return tok
		}
	}
	return nil
}

func speaks(w string) int {
	switch w {
	case "they", "them", "he", "him", "she", "her":
		return 3
	case "i", "we", "me", "us":
		return 1
	case "you":
		return 2
	}
	return 0
}

// part is the preposition that gives a topic token its part to play, nil where none does:
// one before it with nothing but articles and their like between. "to" before a verb is none.
func (t *Text) part(core int) *token {
	i := int(t.core[core])
	for j := i; j > 0 && j > i-5; j-- {
		if t.tokens[j].flags&tStart != 0 {
			return nil
		}
		tok := &t.tokens[j-1]
		if tok.is(fRole) {
			if tok.word == "to" && (t.tokens[j].is(fVerb) || j > 1 && t.tokens[j-2].is(fLight|fAux)) {
				return nil
			}
			return tok
		}
		if tok.flags&tSkip != 0 && tok.flags&tNumber == 0 || tok.flags&tNumber == 0 && !tok.is(fFunction|fLight) || tok.is(fVague) {
			return nil
		}
	}
	return nil
}

// preposition is the one that begins the noun phrase in which a topic token stands, "" where
// there is none.
func (t *Text) preposition(core int) string {
	i := int(t.core[core])
	for j := i; j > 0 && j > i-6; j-- {
		if t.tokens[j].flags&tStart != 0 {
			return ""
		}
		tok := &t.tokens[j-1]
		switch tok.word {
		case "of", "for", "in", "on", "at", "with", "about", "as", "using":
			return tok.word
		case "a", "an", "the", "this", "that", "these", "those", "another", "other":
			continue
		}
		if tok.is(fRole) {
			return tok.word
		}
		if tok.is(fFunction) && owner(tok.word) == 0 {
			return ""
		}
	}
	return ""
}

// roles refuses where one word is "from" on one side and "to" on the other, or where two
// words have changed places behind one preposition.
func (p *pair) roles() {
	a, b := p.a, p.b
	for i := range a.core {
		if p.toB[i] < 0 {
			continue
		}
		j := int(p.toB[i])
		s, t := a.part(i), b.part(j)
		x := &a.tokens[a.core[i]]
		switch {
		case s != nil && t != nil:
			if s.word != t.word && opposed(s.word, t.word) {
				p.refuse(KindOrder, s, t)
			}
		case s != nil && p.swapped(i, j, s.word):
			p.refuse(KindOrder, x, s)
		case t != nil && p.swappedBack(i, j, t.word):
			p.refuse(KindOrder, x, t)
		}
	}
	if p.leftA+p.leftB == 0 {
		s, t := a.stranded(), b.stranded()
		if (s == nil) != (t == nil) && (a.asks|b.asks)&whWho != 0 {
			p.refuse(KindOrder, s, t)
		}
	}
}

// opposed reports whether two words that only join others are opposites: prepositions that
// give opposite parts, and quantities.
func opposed(s, t string) bool {
	for _, o := range [...][2]string{
		{"from", "to"},
		{"from", "into"},
		{"from", "onto"},
		{"from", "toward"},
		{"from", "towards"},
		{"from", "until"},
		{"before", "after"},
		{"over", "under"},
		{"above", "below"},
		{"in", "out"},
		{"into", "out"},
		{"on", "off"},
		{"up", "down"},
		{"with", "without"},
		{"to", "by"},
		{"by", "than"},
		{"into", "than"},
		{"all", "any"},
		{"all", "some"},
		{"all", "both"},
		{"every", "any"},
		{"everything", "anything"},
		{"both", "either"},
		{"we", "they"},
	} {
		if s == o[0] && t == o[1] || s == o[1] && t == o[0] {
			return true
		}
	}
	return false
}

// swapped reports whether the part that word i of a plays is played in b by a word that
// plays no part in a.
func (p *pair) swapped(i, j int, part string) bool {
	for k := range p.b.core {
		if k == j || p.toA[k] < 0 || p.b.adjacent(j, k) || p.a.adjacent(i, int(p.toA[k])) {
			continue
		}
		if r := p.b.part(k); r != nil && r.word == part && p.a.part(int(p.toA[k])) == nil {
			return true
		}
	}
	return false
}

func (p *pair) swappedBack(i, j int, part string) bool {
	for k := range p.a.core {
		if k == i || p.toB[k] < 0 || p.a.adjacent(i, k) || p.b.adjacent(j, int(p.toB[k])) {
			continue
		}
		if r := p.a.part(k); r != nil && r.word == part && p.b.part(int(p.toB[k])) == nil {
			return true
		}
	}
	return false
}

// adjacent reports whether two topic words stand side by side, in one noun phrase.
func (t *Text) adjacent(i, k int) bool {
	d := int(t.core[i]) - int(t.core[k])
	return d == 1 || d == -1
}

// stranded finds a preposition at the end: "report to?".
func (t *Text) stranded() *token {
	if n := len(t.tokens); n > 0 && t.tokens[n-1].is(fRole) {
		return &t.tokens[n-1]
	}
	return nil
}

// order refuses where two topic words have changed places around a third, or around the
// question word, or are of one group, and neither a preposition nor a passive explains it:
// "the dog bit the man", "who manages Carol", "euros to dollars".
func (p *pair) order() {
	a := p.a
	if p.leftA > 1 || p.leftB > 1 {
		return
	}
	for i := range a.core {
		for k := i + 1; k < min(len(a.core), i+1+orderReach); k++ {
			j, l := int(p.toB[i]), int(p.toB[k])
			if j >= 0 && l >= 0 && l < j && p.exchanged(i, k, j, l) {
				p.refuse(KindOrder, &a.tokens[a.core[i]], &a.tokens[a.core[k]])
			}
		}
	}
}

// orderReach bounds how far apart two words may stand that are looked at for an exchange.
const orderReach = 8

// exchanged reports whether topic words i and k of a, which stand as j and l the other way
// round in b, play each other's part there.
func (p *pair) exchanged(i, k, j, l int) bool {
	a, b := p.a, p.b
	s, t := &a.tokens[a.core[i]], &a.tokens[a.core[k]]
	if s.stem != b.tokens[b.core[j]].stem || t.stem != b.tokens[b.core[l]].stem {
		return false // synonyms: "the parcel arrived", "I received a delivery"
	}
	if p.peers(s, t) {
		if a.counted(i) && b.counted(j) || a.counted(k) && b.counted(l) {
			return false // the number tells which is which
		}
		return (a.part(i) == nil || b.part(j) == nil) && (a.part(k) == nil || b.part(l) == nil) && !coordinated(a, b)
	}
	s1, t1, s2, t2 := a.preposition(i), a.preposition(k), b.preposition(j), b.preposition(l)
	if t1 != "" && t1 == s2 && s1 == "" && t2 == "" || s1 != "" && s1 == t2 && t1 == "" && s2 == "" {
		return true // "does A depend on B?"
	}
	if s1 != "" || t1 != "" || s2 != "" || t2 != "" || a.passive != b.passive || p.parted(i, k, j, l) {
		return false
	}
	for m := i + 1; m < k; m++ {
		if n := int(p.toB[m]); n > l && n < j {
			return true
		}
	}
	if k > i+1 {
		return false
	}
	return a.asks&b.asks&whWho != 0 || p.hinge(int(a.core[i]), int(a.core[k]), int(b.core[l]), int(b.core[j]))
}

// hinge reports whether one light word stands between both pairs of tokens: "does Sam like Kim?"
func (p *pair) hinge(i, k, l, j int) bool {
	for m := i + 1; m < k; m++ {
		s := &p.a.tokens[m]
		if s.is(fFunction) || !s.is(fLight|fVague) {
			continue
		}
		for n := l + 1; n < j; n++ {
			if p.b.tokens[n].stem == s.stem {
				return true
			}
		}
	}
	return false
}

// counted reports whether a number stands before a topic word.
func (t *Text) counted(core int) bool {
	i := int(t.core[core])
	return i > 0 && t.tokens[i-1].flags&tNumber != 0
}

// peers reports whether two words are values of one group: two cities, two currencies.
func (p *pair) peers(s, t *token) bool {
	if s.lex == nil || t.lex == nil {
		return false
	}
	for _, v := range s.lex.vals {
		for _, w := range t.lex.vals {
			if v.group == w.group && v.val != w.val {
				return true
			}
		}
	}
	return false
}

// coordinated reports whether both sides merely list: "TCP and UDP".
func coordinated(a, b *Text) bool {
	return a.lists() && b.lists()
}

func (t *Text) lists() bool {
	for i := range t.tokens {
		switch t.tokens[i].word {
		case "and", "or", "between", "vs", "versus", "und", "et", "y", "e", "en":
			return true
		}
	}
	return false
}

// parted reports whether a clause boundary stands between the two words on either side.
func (p *pair) parted(i, i2, j, j2 int) bool {
	return p.a.boundary(p.a.core[i], p.a.core[i2]) || p.b.boundary(p.b.core[j2], p.b.core[j])
}

func (t *Text) boundary(from, to uint16) bool {
	for i := from + 1; i <= to && int(i) < len(t.tokens); i++ {
		if t.tokens[i].flags&tStart != 0 {
			return true
		}
		switch t.tokens[i].word {
		case "and", "when", "if", "because", "since", "so", "but", "while", "that":
			return true
		}
	}
	return false
}

// narrowed is how many topic words two otherwise differently put questions share where one
// more before them is taken to narrow the question. With fewer it is as likely that the
// other side leaves out what goes without saying ("the cache", "the browser cache").
const narrowed = 3

// substitution refuses questions that are alike but for one word in the same place, unless
// that word is a synonym: the gate cannot know that "filter" and "battery" want different
// answers, but it knows that nothing says they want the same. So for one word more.
func (p *pair) substitution() {
	p.minimal()
	if min(p.leftA, p.leftB) == 0 && p.a.count("or") != p.b.count("or") && p.a.count("and")+p.b.count("and") == 0 {
		p.refuse(KindQuantifier, nil, nil) // "A or B?", "B?"
	}
	a, b := p.a, p.b
	shared := len(a.core) - p.leftA
	switch {
	case p.leftA == 1 && p.leftB == 1 && shared >= 2 && (a.asks == 0) == (b.asks == 0):
		i, j := p.left()
		if (i > 0 || j > 0 || shared >= narrowed) && p.samePlace(i, j) && !denies(&a.tokens[a.core[i]], &b.tokens[b.core[j]]) {
			p.refuse(KindSubstitute, &a.tokens[a.core[i]], &b.tokens[b.core[j]])
		}
	case p.leftA == 0 && p.leftB == 1 && shared >= narrowed:
		if _, j := p.left(); b.narrows(j, p.toA[:len(b.core)]) {
			p.refuse(KindModifier, nil, &b.tokens[b.core[j]])
		}
	case p.leftB == 0 && p.leftA == 1 && shared >= narrowed:
		if i, _ := p.left(); a.narrows(i, p.toB[:len(a.core)]) {
			p.refuse(KindModifier, &a.tokens[a.core[i]], nil)
		}
	}
}

func (t *Text) count(word string) (n int) {
	for i := range t.tokens {
		if t.tokens[i].word == word {
			n++
		}
	}
	return n
}

// left finds the first unmatched topic word of either side, -1 where there is none.
func (p *pair) left() (i, j int) {
	i, j = -1, -1
	for k := range p.a.core {
		if p.toB[k] < 0 {
			i = k
			break
		}
	}
	for k := range p.b.core {
		if p.toA[k] < 0 {
			j = k
			break
		}
	}
	return i, j
}

// samePlace reports whether the neighbours of the two words, on one side or the other,
// answer each other.
func (p *pair) samePlace(i, j int) bool {
	before := i == 0 && j == 0 || i > 0 && j > 0 && int(p.toB[i-1]) == j-1
	after := i == len(p.a.core)-1 && j == len(p.b.core)-1 || i+1 < len(p.a.core) && j+1 < len(p.b.core) && int(p.toB[i+1]) == j+1
	return before && after
}

// narrows reports whether topic word i stands right before a matched one, so that it
// narrows it: "router password".
func (t *Text) narrows(i int, matched []int16) bool {
	return i+1 < len(t.core) && matched[i+1] >= 0 && t.core[i+1] == t.core[i]+1 && t.tokens[t.core[i+1]].flags&tStart == 0
}

// minimal holds the texts against each other word by word, openings left out, and refuses
// where exactly one word differs, or one side has one more, and it carries a sense.
func (p *pair) minimal() {
	a, b := p.a, p.b
	i, j := 0, 0
	next := func(t *Text, i int) int {
		for i < len(t.tokens) && t.tokens[i].flags&tSkip != 0 {
			i++
		}
		return i
	}
	same := func(i, j int) bool {
		return related(&a.tokens[i], &b.tokens[j]) || bland(&a.tokens[i]) && bland(&b.tokens[j])
	}
	for {
		i, j = next(a, i), next(b, j)
		if i == len(a.tokens) || j == len(b.tokens) || !same(i, j) {
			break
		}
		i, j = i+1, j+1
	}
	m, n := len(a.tokens), len(b.tokens)
	for m > i && n > j {
		switch {
		case a.tokens[m-1].flags&tSkip != 0:
			m--
		case b.tokens[n-1].flags&tSkip != 0:
			n--
		case same(m-1, n-1):
			m, n = m-1, n-1
		default:
			p.middle(i, m, j, n)
			p.frame(i, m, j, n)
			return
		}
	}
	p.middle(i, m, j, n)
	p.frame(i, m, j, n)
}

// bland tells the words whose exchange changes nothing.
func bland(t *token) bool {
	switch t.word {
	case "a", "an", "the", "my", "this", "that", "these", "those", "any", "some", "please", "just", "do", "can", "would", "could", "is", "are", "does":
		return true
	}
	return false
}

// middle refuses what stands between the common beginning and the common end of two texts.
func (p *pair) middle(i, m, j, n int) {
	a, b := p.a, p.b
	size, common := max(m-i, n-j), i+min(len(a.tokens)-m, len(b.tokens)-n)
	if size > 2 && (size > 5 || i < 2 || common < 4 || common <= size) {
		return // too much differs to call it one place
	}
	if m-i == 1 && n-j == 1 && opposed(a.tokens[i].word, b.tokens[j].word) {
		p.refuse(KindAntonym, &a.tokens[i], &b.tokens[j])
		return
	}
	s, t := alien(a.tokens[i:m], b.tokens[j:n]), alien(b.tokens[j:n], a.tokens[i:m])
	switch {
	case s != nil && t != nil:
		if (!s.is(fVague) || !t.is(fVague)) && !denies(s, t) {
			p.refuse(KindSubstitute, s, t)
		}
	case m-i == 1 && n-j == 1 && s != nil && !s.is(fLight|fVague):
		p.refuse(KindSubstitute, s, &b.tokens[j])
	case m-i == 1 && n-j == 1 && t != nil && !t.is(fLight|fVague):
		p.refuse(KindSubstitute, &a.tokens[i], t)
	case t != nil && m == i && n-j == 1 && !t.is(fLight):
		p.refuse(KindModifier, nil, t)
	case s != nil && n == j && m-i == 1 && !s.is(fLight):
		p.refuse(KindModifier, s, nil)
	}
}

// denies reports whether one word is denied and the other names a failure: "does not work",
// "is broken".
func denies(s, t *token) bool {
	return s.flags&tNegated != 0 && t.is(fFailure) || t.flags&tNegated != 0 && s.is(fFailure)
}

// alien finds a word with a sense among these to which none of those is related.
func alien(these, those []token) *token {
next:
	for i := range these {
		tok := &these[i]
		if tok.flags&tSkip != 0 || tok.is(fFunction|fNegation) {
			continue
		}
		for j := range those {
			if related(tok, &those[j]) {
				continue next
			}
		}
		return tok
	}
	return nil
}

// Shared is the share of their topic words that two questions have in common, within [0, 1]
// (Jaccard's index over distinct words, synonyms counted as one): a high similarity beside a
// low share is what a probe for collisions looks like. Where a question has no topic word
// ("How old is he?"), all distinct words of both count. It is 0 for a text over the bounds.
func (t *Text) Shared(u *Text) float64 {
	if t.tooLong || u.tooLong {
		return 0
	}
	if t.equal(u) {
		return 1
	}
	if len(t.core) == 0 || len(u.core) == 0 {
		return jaccard(t.stems(), u.stems())
	}
	p := pair{a: t, b: u}
	p.match()
	shared := len(t.core) - p.leftA
	return float64(shared) / float64(shared+p.leftA+p.leftB)
}

// stems is the distinct words of a text.
func (t *Text) stems() map[string]bool {
	out := make(map[string]bool, len(t.tokens))
	for i := range t.tokens {
		out[t.tokens[i].stem] = true
	}
	return out
}

func jaccard(a, b map[string]bool) float64 {
	shared := 0
	for w := range a {
		if b[w] {
			shared++
		}
	}
	all := len(a) + len(b) - shared
	if all == 0 {
		return 0
	}
	return float64(shared) / float64(all)
}
