package guard

import (
	"strings"
	"unicode/utf8"
)

// Text is a question as the rules see it. It is immutable, so it may be shared by any
// number of goroutines and kept as long as the entry it belongs to. It keeps parts of the
// source alive, not a copy of it.
type Text struct {
	tokens []token
	core   []uint16 // tokens that carry the topic, in order
	marks  []mark
	quotes []span

	asks, answers uint16 // bits wh…
	modal         uint8  // of a yes/no question
	people        uint8  // bits person…
	negations     uint8
	lang          lang
	yesNo         bool
	passive       bool
	what          bool // asks for "what" or "which"
	fenced        bool // holds a block of code
	foreign       bool // in a script or language that no list covers
	tooLong       bool
	bytes         int32
}

// mark is a token's place in a group.
type mark struct {
	value
	tok uint16
}

// Bits of who is spoken of.
const (
	personHe uint8 = 1 << iota
	personShe
)

// Parse reads a question. It never fails: a text that it cannot read becomes a Text that
// every Compare refuses, but for an equal one. It costs a few microseconds for a question.
func Parse(s string) *Text {
	t := &Text{bytes: int32(min(len(s), 1<<30))}
	if len(s) > MaxBytes {
		t.tooLong = true
		return t
	}
	folded := fold(s)
	sc := scanner{most: MaxTokens}
	sc.tokens = make([]token, 0, len(folded)/5+4)
	sc.scan(folded)
	if len(sc.tokens) > MaxTokens {
		t.tooLong = true
		return t
	}
	t.tokens, t.quotes = sc.tokens, sc.quotes
	t.fenced = strings.Contains(folded, "```")
	x := loaded()
	known := t.tongue(x)
	t.foreign = sc.foreign || !known && (sc.latin || len(t.tokens) > 2)
	t.look(x)
	t.spelled()
	t.durations()
	t.topic()
	t.scope()
	t.collect(x)
	t.question()
	return t
}

// fold puts the signs that keyboards vary (quotes, dashes, blanks, full-width forms) into
// one form and drops those that nobody sees. ASCII passes as it is.
func fold(s string) string {
	i := 0
	for i < len(s) && s[i] < utf8.RuneSelf {
		i++
	}
	if i == len(s) {
		return s
	}
	var b strings.Builder
	b.Grow(len(s))
	b.WriteString(s[:i])
	for _, r := range s[i:] {
		switch {
		case r == '’' || r == '‘' || r == 'ʼ' || r == '´' || r == '′':
			r = '\''
		case r == '“' || r == '”' || r == '‟':
			r = '"'
		case r >= 0x2010 && r <= 0x2015 || r == '−':
			r = '-'
		case r == 0xA0 || r >= 0x2000 && r <= 0x200A || r == 0x202F || r == 0x3000 || r == 0x2028 || r == 0x2029:
			r = ' '
		case r == 0xAD || r >= 0x200B && r <= 0x200F || r >= 0x202A && r <= 0x202E || r == 0x2060 || r == 0xFEFF || r == 0xFE0F:
			continue
		case r >= 0xFF01 && r <= 0xFF5E:
			r -= 0xFEE0
		case r == '。' || r == '؟' || r == '।':
			r = '?'
		case r == '、' || r == '،':
			r = ','
		}
		b.WriteRune(r)
	}
	return b.String()
}

// tongue settles the language by vote of its function words; English where none has any.
// It reports whether anything was recognised at all.
func (t *Text) tongue(x *lexicon) bool {
	var votes [languages]int
	known := false
	for i := range t.tokens {
		w := t.tokens[i].word
		v := x.votes[w]
		for l := range votes {
			votes[l] += int(v >> l & 1)
		}
		if known {
			continue
		}
		known = t.tokens[i].flags&(tNumber|tID|tCode) != 0 || x.find(english, w) != nil
	}
	for l := range votes {
		if votes[l] > votes[t.lang] {
			t.lang = lang(l)
		}
	}
	return known || votes[t.lang] > 0
}

// find looks a word up as it stands, then without the endings of English.
func (x *lexicon) find(l lang, w string) *lexeme {
	if lx := x.words[l][w]; lx != nil {
		return lx
	}
	if l != english {
		return nil
	}
	return x.derive(w)
}

// derive looks an English word up without its ending.
func (x *lexicon) derive(w string) *lexeme {
	if len(w) < 4 || len(w) > 24 {
		return nil
	}
	var buf [32]byte
	try := func(n int, end string) *lexeme {
		k := append(append(buf[:0], w[:n]...), end...)
		if lx := x.words[english][string(k)]; lx != nil && lx.flags&fKnown != 0 && lx.flags&(fFunction|fNegation|fNumber) == 0 {
			return lx
		}
		return nil
	}
	n := len(w)
	switch {
	case strings.HasSuffix(w, "ies"):
		return try(n-3, "y")
	case strings.HasSuffix(w, "es"):
		return first(try(n-1, ""), func() *lexeme { return try(n-2, "") })
	case w[n-1] == 's' && w[n-2] != 's':
		return try(n-1, "")
	case strings.HasSuffix(w, "ied"):
		return try(n-3, "y")
	case strings.HasSuffix(w, "ed"):
		return first(try(n-1, ""), func() *lexeme { return first(try(n-2, ""), func() *lexeme { return undouble(w, n-2, try) }) })
	case strings.HasSuffix(w, "ing") && n > 5:
		return first(try(n-3, ""), func() *lexeme { return first(try(n-3, "e"), func() *lexeme { return undouble(w, n-3, try) }) })
	case strings.HasSuffix(w, "ly") && n > 5:
		return try(n-2, "")
	}
	return nil
}

func first(lx *lexeme, next func() *lexeme) *lexeme {
	if lx != nil {
		return lx
	}
	return next()
}

func undouble(w string, n int, try func(int, string) *lexeme) *lexeme {
	if n > 3 && w[n-1] == w[n-2] {
		return try(n-1, "")
	}
	return nil
}

// stem cuts the endings of English off a word that the lexicon does not have. It only ever
// cuts, so that the stem is a part of the word.
func stem(l lang, w string) string {
	if l != english || len(w) < 4 {
		return w
	}
	n := len(w)
	switch {
	case strings.HasSuffix(w, "ies"), strings.HasSuffix(w, "ied"):
		n -= 3
	case strings.HasSuffix(w, "ing") && n > 5:
		n -= 3
	case strings.HasSuffix(w, "ed") && n > 4, strings.HasSuffix(w, "es") && n > 4:
		n -= 2
	case w[n-1] == 's' && w[n-2] != 's' && w[n-2] != 'u' && w[n-2] != 'i':
		n--
	case w[n-1] == 'y':
		n--
	}
	if n > 3 && w[n-1] == 'e' {
		n--
	}
	if n > 3 && n < len(w) && w[n-1] == w[n-2] && w[n-1] != 's' && w[n-1] != 'l' {
		n--
	}
	return w[:n]
}

// look gives every token its lexeme, phrases first: their tokens become one.
func (t *Text) look(x *lexicon) {
	out := t.tokens[:0]
	for i := 0; i < len(t.tokens); {
		tok := t.tokens[i]
		n := 1
		if tok.flags&tID != 0 && x.words[english][tok.word] != nil {
			tok.flags &^= tID // "2fa", "mp3": a word after all
		}
		if tok.flags&(tNumber|tID|tCode) == 0 {
			tok.lex, n = t.lexeme(x, i, len(out) == 0 || clauseOpens(out))
			if tok.lex == nil {
				tok.stem = stem(t.lang, tok.word)
			} else {
				tok.stem = tok.lex.base
			}
		} else {
			tok.stem = tok.word
		}
		if n > 1 {
			tok.word = tok.lex.base
			tok.flags &^= tName | tAcronym
		}
		if tok.is(fFrame) {
			tok.flags |= tSkip
		}
		t.shiftQuotes(len(out), i, n)
		out = append(out, tok)
		if tok.flags&tSkip != 0 && i+n < len(t.tokens) {
			// What an opening introduces opens the clause itself.
			t.tokens[i+n].flags |= tok.flags & (tStart | tSentence)
		}
		i += n
	}
	t.tokens = out
}

// clauseOpens reports whether an opening such as "I need to" may stand after these tokens:
// not after an auxiliary, where it is the question itself.
func clauseOpens(before []token) bool {
	last := &before[len(before)-1]
	return !last.is(fAux) && last.word != "what" && last.word != "where" && last.word != "how"
}

// shiftQuotes moves the bounds of quotations by the tokens that phrases swallow.
func (t *Text) shiftQuotes(at, from, n int) {
	for q := range t.quotes {
		s := &t.quotes[q]
		if int(s.from) >= from && int(s.from) < from+n {
			s.from = uint16(at)
		}
		if int(s.to) > from && int(s.to) <= from+n {
			s.to = uint16(at + 1)
		}
	}
}

// lexeme finds the longest entry that begins at token i and how many tokens it takes.
func (t *Text) lexeme(x *lexicon, i int, opens bool) (*lexeme, int) {
	word := t.tokens[i].word
	one := x.find(t.lang, word)
	if one == nil {
		if t.lang != english {
			one = x.find(english, word)
			if one != nil && !unitOrName(x, one) {
				one = nil
			}
		}
		return one, 1
	}
	var buf [96]byte
	for n := min(int(one.phrase), len(t.tokens)-i); n > 1; n-- {
		for pass := range 2 {
			head := word
			if pass == 1 {
				if head = one.base; head == word {
					break
				}
			}
			key, ok := t.join(buf[:0], head, i+1, i+n)
			if !ok {
				break
			}
			lx := x.words[t.lang][string(key)]
			if lx == nil || lx.flags&fKnown == 0 {
				continue
			}
			if lx.flags&fFrame != 0 && (!opens || strings.HasPrefix(lx.base, "i_") && !t.begins(i)) {
				continue
			}
			return lx, n
		}
	}
	if one.flags&fKnown == 0 {
		if t.lang != english {
			return nil, 1
		}
		return x.derive(word), 1 // "driving" begins a phrase, and is of "drive" where it does not
	}
	return one, 1
}

// begins reports whether a clause of its own begins at token i.
func (t *Text) begins(i int) bool {
	if i == 0 || t.tokens[i].flags&tStart != 0 {
		return true
	}
	switch t.tokens[i-1].word {
	case "and", "but", "so", "because", "hi", "hello", "hey", "please", "well", "since", "as", "then", "thanks":
		return true
	}
	return false
}

func (t *Text) join(key []byte, head string, from, to int) ([]byte, bool) {
	key = append(key, head...)
	for j := from; j < to; j++ {
		tok := &t.tokens[j]
		if tok.flags&tStart != 0 || len(key)+1+len(tok.word) > cap(key) {
			return nil, false
		}
		key = append(append(key, '_'), tok.word...)
	}
	return key, true
}

// unitOrName reports whether an English entry means the same in other languages.
func unitOrName(x *lexicon, lx *lexeme) bool {
	for _, v := range lx.vals {
		if k := x.groups[v.group].kind; k == KindUnit || k == KindEntity {
			return true
		}
	}
	return false
}

// spelled turns number words into numbers and joins those that make one.
func (t *Text) spelled() {
	for i := range t.tokens {
		tok := &t.tokens[i]
		var prev *token
		if i > 0 {
			prev = &t.tokens[i-1]
		}
		switch {
		case tok.word == "one" || tok.word == "single":
			tok.flags |= tOne
		case tok.word == "second" && prev != nil && determiner(prev.word):
			tok.word, tok.stem, tok.flags, tok.lex = "2", "2", tok.flags|tNumber, nil
		case tok.is(fNumber) && tok.flags&tNumber == 0:
			tok.word, tok.stem, tok.flags, tok.lex = tok.lex.num, tok.lex.num, tok.flags|tNumber&^(tName|tAcronym), nil
		}
		if tok.flags&tNumber == 0 || prev == nil || prev.flags&tNumber == 0 || tok.flags&tStart != 0 {
			continue
		}
		if sum, ok := spell(prev.word, tok.word); ok {
			tok.word, tok.stem = sum, sum
			prev.flags = prev.flags&^tNumber | tSkip
		}
	}
}

// durations gives durations a value that compares.
func (t *Text) durations() {
	for i := 0; i+1 < len(t.tokens); i++ {
		num, unit := &t.tokens[i], &t.tokens[i+1]
		if num.flags&tNumber == 0 || unit.flags&tStart != 0 && unit.flags&tJoined == 0 {
			continue
		}
		word := unit.word
		if t.lang != english && unit.lex != nil {
			word = unit.lex.base
		}
		if i+2 < len(t.tokens) && t.tokens[i+2].word == "old" {
			unit.flags |= tSkip // an age: "a ten year old", "who is 10"
			continue
		}
		if v, ok := duration(num.word, word); ok {
			num.word, num.stem = v, v
			unit.flags |= tSkip
		}
	}
}

func determiner(w string) bool {
	switch w {
	case "the", "my", "your", "our", "this", "his", "her", "their":
		return true
	}
	return false
}

// topic finds the tokens that carry the topic. Where only light words are left, they do.
func (t *Text) topic() {
	t.core = make([]uint16, 0, len(t.tokens))
	for _, mask := range [2]uint32{fFunction | fLight | fNegation, fFunction | fNegation} {
		for i := range t.tokens {
			tok := &t.tokens[i]
			if tok.flags&tSkip == 0 && !tok.is(mask) {
				t.core = append(t.core, uint16(i))
			}
		}
		if len(t.core) > 0 {
			return
		}
	}
}

// reach is how many topic words a word that says no bears on.
const reach = 3

// scope marks what stands within reach of a word that says no.
func (t *Text) scope() {
	left := 0
	for i := range t.tokens {
		tok := &t.tokens[i]
		if tok.flags&tSkip != 0 {
			continue
		}
		if tok.flags&tStart != 0 || tok.word == "but" || tok.word == "and" || tok.word == "because" {
			left = 0
		}
		if tok.is(fNegation) {
			if t.negations < 255 {
				t.negations++
			}
			left = reach
			continue
		}
		if left > 0 {
			tok.flags |= tNegated
			if !tok.is(fFunction | fLight) {
				left--
			}
		}
	}
	t.french()
}

// french counts "ne … pas" once.
func (t *Text) french() {
	if t.lang == french && t.negations > 1 {
		for i := range t.tokens {
			if w := t.tokens[i].word; (w == "ne" || w == "n") && t.negations > 1 {
				t.negations--
			}
		}
	}
}

// collect gathers the groups in which the tokens stand.
func (t *Text) collect(x *lexicon) {
	n := 0
	for i := range t.tokens {
		if lx := t.tokens[i].lex; lx != nil {
			n += len(lx.vals)
		}
	}
	if n > 0 {
		t.marks = make([]mark, 0, n)
	}
	for i := range t.tokens {
		tok := &t.tokens[i]
		if tok.lex == nil || tok.flags&tSkip != 0 || len(tok.lex.vals) == 0 {
			continue
		}
		number := i > 0 && t.tokens[i-1].flags&tNumber != 0
		unit, other := false, false
		for _, v := range tok.lex.vals {
			u := x.groups[v.group].kind == KindUnit
			unit, other = unit || u, other || !u
		}
		if tok.word == "am" && !number || tok.word == "may" && !t.month(i) {
			continue
		}
		for _, v := range tok.lex.vals {
			if unit && other && number != (x.groups[v.group].kind == KindUnit) {
				continue
			}
			t.marks = append(t.marks, mark{value: v, tok: uint16(i)})
		}
	}
}

// month tells the month of May from the verb.
func (t *Text) month(i int) bool {
	if i+1 < len(t.tokens) && t.tokens[i+1].flags&tNumber != 0 {
		return true
	}
	if i == 0 {
		return false
	}
	prev := &t.tokens[i-1]
	switch prev.word {
	case "in", "of", "for", "since", "until", "till", "by", "last", "next", "this", "on", "before", "after", "during", "from", "to":
		return true
	}
	return prev.flags&tNumber != 0
}

// question reads what is asked for, who is spoken of and how.
func (t *Text) question() {
	asking := false
	for i := range t.tokens {
		tok := &t.tokens[i]
		if tok.flags&tSentence != 0 {
			asking = false
		}
		if tok.flags&tSkip != 0 {
			continue
		}
		if tok.lex != nil {
			if !t.relative(i, asking || t.what || t.asks&^tok.lex.asks != 0) {
				t.asks |= tok.lex.asks
			}
			t.answers |= tok.lex.answers
		}
		if tok.is(fAux) && (tok.flags&(tSentence|tStart) != 0) && i+1 < len(t.tokens) {
			t.yesNo, asking = true, true
		}
		if asking && tok.lex != nil {
			m := tok.lex.modal
			if tok.flags&tStart == 0 {
				m &^= modalDid | modalDone // "since my phone was stolen" tells no time of what is asked
			}
			t.modal |= m
		}
		switch tok.word {
		case "what", "which":
			t.what = t.what || tok.flags&tStart != 0
		case "he", "him", "his", "himself":
			t.people |= personHe
		case "she", "her", "hers", "herself":
			t.people |= personShe
		case "be", "been", "being", "is", "are", "was", "were", "get", "gets", "got":
			t.passive = t.passive || t.participle(i+1)
		case "need", "needs":
			t.passive = t.passive || i+1 < len(t.tokens) && strings.HasSuffix(t.tokens[i+1].word, "ing")
		}
	}
	if t.asks != 0 {
		t.yesNo = false
	}
}

// relative reports whether a question word joins a clause instead of asking: "the number
// when I move", "people who smoke", anything after the question has begun.
func (t *Text) relative(i int, begun bool) bool {
	switch t.tokens[i].word {
	case "when", "where", "who", "whom", "whose", "how_much", "how_many", "how_long":
		if i == 0 || t.tokens[i].flags&tStart != 0 {
			return false
		}
		prev := &t.tokens[i-1]
		switch prev.word {
		case "by", "since", "until", "till", "from", "to", "at", "on", "in", "of", "and", "or", "about", "with", "for":
			return false
		}
		return begun || prev.flags&tSkip == 0 && !prev.is(fLight)
	}
	return false
}

// participle reports whether a past participle stands within three tokens from i.
func (t *Text) participle(i int) bool {
	for j := i; j < min(i+3, len(t.tokens)); j++ {
		tok := &t.tokens[j]
		w := tok.word
		if strings.HasSuffix(w, "ed") || strings.HasSuffix(w, "en") || tok.lex != nil && tok.lex.base != w && !strings.HasSuffix(w, "s") && !strings.HasSuffix(w, "ing") {
			return true
		}
	}
	return false
}

// Unreadable reports whether Compare refuses the text beside every other, an equal one
// included, so that an entry of it would never be found: it is over the bounds or holds a
// block of code.
func (t *Text) Unreadable() bool { return t.tooLong || t.fenced }

// Bytes is about what the Text keeps in memory, the source of its words included.
func (t *Text) Bytes() int64 {
	const tokenBytes, markBytes, fixed = 48, 8, 160
	if t.tooLong {
		return fixed
	}
	return fixed + int64(cap(t.tokens))*tokenBytes + int64(cap(t.marks))*markBytes + int64(cap(t.core))*2 + int64(cap(t.quotes))*4 + int64(t.bytes)
}
