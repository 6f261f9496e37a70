package guard

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// segment is a sentence, list item or cell of an answer.
type segment struct {
	turned       uint32   // of the sides that its opposites take, in order
	from, to     uint16   // tokens
	ids          []uint32 // its content words, sorted, without numbers and units
	denied       []uint32 // what its words that say no bear on first, sorted
	affirmed     []uint32 // content words that none bears on, sorted
	poles        []pole
	names        []uint32
	skeleton     uint32 // of its content words in order
	stated       uint32 // skeleton, with poles and denials
	figures      [2]uint16
	negations    uint8
	polite       bool   // a wish: states nothing
	turns, takes uint32 // sums of the words that bound what is said, and of those that take something out
}

// pole is a place in a group of values that exclude one another.
type pole struct {
	value
	kind   Kind
	two    bool // the group has two poles: to deny one is to affirm the other
	denied bool
}

// Openings.
const (
	opensNo    int8 = -2
	opensSorry int8 = -1
	opensSure  int8 = 1
	opensYes   int8 = 2
	weakly     int8 = 2 // between opensSure and opensSorry, which are mere politeness
)

// hash is FNV-1a of a word and what sort of word it is. Two words of one hash are one word:
// with 2^32 values that is rarer than every other mistake.
func hash(s string, sort byte) uint32 {
	h := (uint32(2166136261) ^ uint32(sort)) * 16777619
	for i := 0; i < len(s); i++ {
		h = (h ^ uint32(s[i])) * 16777619
	}
	return max(h, 1)
}

// content is what a token counts as where sentences are compared: its word, or the group of
// words of which it is one; 0 for what carries no topic.
func (t *Text) content(x *lexicon, i int) uint32 {
	tok := &t.tokens[i]
	switch {
	case tok.flags&tNumber != 0, tok.flags&tCode != 0 && tok.flags&tID == 0:
		return 0
	case tok.is(fNegation) || negates(tok):
		return 0
	}
	if lx := tok.lex; lx != nil {
		for _, v := range lx.vals {
			if g := &x.groups[v.group]; !v.soft && (g.kind == KindAntonym || g.kind == KindDate) {
				return hash("group", byte(v.group)) ^ uint32(v.group)<<16
			}
		}
		if lx.flags&(fFunction|fLight) != 0 {
			return 0
		}
		if len(lx.syns) > 0 {
			return hash("synonym", byte(lx.syns[0])) ^ uint32(lx.syns[0])<<16
		}
		return hash(root(t.lang, lx.base), 'w')
	}
	return hash(root(t.lang, tok.stem), 'w')
}

// side is on which side of its scale a word stands that counts as a group.
func (t *token) side(x *lexicon) uint32 {
	if t.lex != nil {
		for _, v := range t.lex.vals {
			if x.groups[v.group].kind == KindAntonym && !v.soft {
				return uint32(v.val) + 1
			}
		}
	}
	return 0
}

// root cuts a word down to what its forms have in common, roughly.
func root(l lang, w string) string {
	if l == english {
		if len(w) < 5 {
			return w
		}
		for _, end := range [...]string{"ations", "ation", "ments", "ment", "ances", "ance", "ions", "ion", "ing", "ers", "er", "able", "ly", "al", "ed", "e"} {
			if rest, ok := strings.CutSuffix(w, end); ok && len(rest) >= 4 {
				return rest
			}
		}
		return w
	}
	if len(w) <= 7 {
		return w
	}
	n := 6
	for n < len(w) && !utf8.RuneStart(w[n]) {
		n++
	}
	return w[:n]
}

// negates tells the words that say no, in any language: those of the lexicon that deny, not
// those that make an exception, and those of languages that it does not hold.
func negates(tok *token) bool {
	switch tok.word {
	case "unless", "without", "hardly", "barely", "scarcely", "ohne", "sans", "sin", "sem", "senza", "zonder", "ni", "ne", "n":
		return false
	case "no":
		return true
	}
	return tok.is(fNegation) || deniesAbroad(tok.word)
}

func deniesAbroad(w string) bool {
	switch w {
	case "не", "нет", "нельзя", "никогда", "ні", "немає", "не́", // ru, uk
		"nie", "żaden", "żadna", "inte", "ej", "ikke", "ingen", "inga", "ei", "eivät", "není", "nelze", "nem", "nincs", "nu", // pl, sv, da, no, fi, cs, hu, ro
		"değil", "yok", "hayır", "δεν", "μη", "όχι", "لا", "ليس", "لن", "لم", "ليست", "לא", "אין", "नहीं", "मत", "không", "tidak", "bukan", // tr, el, ar, he, hi, vi, id
		"不", "没", "沒", "無", "无", "未", "非", "勿", "ぬ", "않", "없습니다", "않습니다", "아니요", "ไม่", "ไ": // zh, ja, ko, th
		return true
	}
	return false
}

// excepts tells words that turn what is denied, or bound it: "not until Monday", "only
// within a day". Where two sentences differ in them, a denial tells nothing.
func excepts(w string) bool {
	switch w {
	case "until", "till", "without", "only", "just", "before", "after", "if", "once", "but", "later", "longer", "more", "beyond", "over", "past",
		"exceeding", "outside", "less", "fewer", "than", "within", "as_long_as", "provided",
		"nur", "bis", "ohne", "wenn", "falls", "erst", "mehr", "später", "innerhalb", "sofern", "solange",
		"sans", "avant", "après", "si", "que", "seulement", "plus", "sin", "hasta", "solo", "sólo", "antes", "después", "más",
		"senza", "se", "sem", "zonder", "als":
		return true
	}
	return excludes(w)
}

// excludes tells words that take something out: "open daily except Tuesdays" is "closed on
// Tuesdays". Where two sentences differ in them, an opposite tells nothing either.
func excludes(w string) bool {
	switch w {
	case "unless", "except", "excluding", "besides", "other", "apart", "außer", "sauf", "salvo", "excepto", "tranne", "exceto", "behalve", "tenzij", "кроме":
		return true
	}
	return false
}

// weigh settles what every token counts as, and which are units.
func (f *Facts) weigh(x *lexicon) {
	f.content, f.units = make([]uint32, len(f.text.tokens)), make([]value, len(f.text.tokens))
	for i := range f.text.tokens {
		f.content[i], f.units[i] = f.text.content(x, i), f.text.unit(x, i)
	}
}

// split parts the tokens into sentences.
func (f *Facts) split(x *lexicon) {
	t := f.text
	from := 0
	for i := 1; i <= len(t.tokens); i++ {
		if i < len(t.tokens) && t.tokens[i].flags&tSentence == 0 && t.tokens[i].word != "but" && i-from < 4*maxSegment {
			continue
		}
		if i > from && len(f.segments) < 1<<15 {
			f.segments = append(f.segments, f.segment(x, from, i))
		}
		from = i
	}
}

// segment reads the sentence of these tokens.
func (f *Facts) segment(x *lexicon, from, to int) segment {
	t := f.text
	s := segment{from: uint16(from), to: uint16(to), skeleton: hash("", 's')}
	s.polite = t.polite(from, to)
	reach, first := 0, false
	condition := false
	for i := from; i < to; i++ {
		tok := &t.tokens[i]
		if tok.flags&tStart != 0 || tok.word == "and" || tok.word == "because" || tok.word == "und" || tok.word == "et" {
			reach = 0
			condition = condition && tok.flags&tStart == 0
		}
		switch tok.word {
		case "if", "whether", "in_case", "wenn", "falls", "si":
			condition = true
		}
		s.bounds(tok)
		if negates(tok) && !condition && t.bears(i, to) {
			if !(t.lang == french && s.negations > 0 && reach > 0) {
				s.negations++
			}
			reach, first = 4, true
			continue
		}
		id := f.content[i]
		if tok.lex != nil {
			s.pole(x, t, i, reach > 0)
		}
		if id == 0 || len(s.ids) >= maxSegment {
			continue
		}
		if f.units[i].group > 0 && i > 0 && t.tokens[i-1].flags&tNumber != 0 {
			continue
		}
		s.skeleton = (s.skeleton ^ id) * 16777619
		s.turned = (s.turned ^ tok.side(x)) * 16777619
		s.ids = append(s.ids, id)
		if t.names(x, i) {
			s.names = append(s.names, id)
		}
		if reach > 0 {
			if first {
				s.denied = append(s.denied, id)
			}
			reach, first = reach-1, false
		} else {
			s.affirmed = append(s.affirmed, id)
		}
	}
	s.stated = s.skeleton ^ uint32(s.negations)
	for _, p := range s.poles {
		s.stated = (s.stated ^ uint32(p.group)<<16 ^ uint32(p.val)) * 16777619
	}
	s.ids, s.denied, s.affirmed, s.names = sorted(s.ids), sorted(s.denied), sorted(s.affirmed), sorted(s.names)
	return s
}

// polite reports whether a sentence only wishes something: "have a great day".
func (t *Text) polite(from, to int) bool {
	if to-from > 5 || t.tokens[from].word != "have" && t.tokens[from].word != "enjoy" {
		return false
	}
	switch t.tokens[to-1].word {
	case "day", "weekend", "evening", "week", "trip", "stay", "one":
		return true
	}
	return false
}

// names reports whether token i is a name: capitalised within a sentence, an identifier, or
// a listed place or product.
func (t *Text) names(x *lexicon, i int) bool {
	tok := &t.tokens[i]
	if tok.lex == nil {
		return tok.flags&tID != 0 || tok.flags&tName != 0 && tok.flags&tSentence == 0 && t.lang != german
	}
	return slices.ContainsFunc(tok.lex.vals, func(v value) bool {
		return x.groups[v.group].kind == KindEntity && x.groups[v.group].strict
	})
}

// bounds notes a word that bounds what the sentence says.
func (s *segment) bounds(tok *token) {
	switch {
	case excludes(tok.word):
		s.takes += hash(tok.word, 'x')
	case excepts(tok.word):
		s.turns += hash(tok.word, 'x')
	}
}

// bears reports whether a word that says no denies what follows: not in "no problem",
// "don't worry", "not only".
func (t *Text) bears(i, to int) bool {
	tok := &t.tokens[i]
	if tok.word == "no" && i+1 < len(t.tokens) && t.tokens[i+1].flags&tStart != 0 {
		return false // the answer itself, which its opening tells
	}
	for j := i + 1; j < min(i+3, to); j++ {
		switch t.tokens[j].word {
		case "problem", "problems", "worry", "worries", "hesitate", "forget", "only", "necessarily", "matter", "doubt", "just", "sure", "nur", "solo", "seulement":
			return false
		}
	}
	return true
}

// pole notes the groups in which token i stands.
func (s *segment) pole(x *lexicon, t *Text, i int, denied bool) {
	if len(s.poles) >= maxSegment || t.tokens[i].word == "may" && !t.month(i) {
		return
	}
	for _, v := range t.tokens[i].lex.vals {
		g := &x.groups[v.group]
		switch {
		case g.kind == KindUnit, g.kind == KindEntity, v.soft && g.kind != KindAntonym:
			continue
		}
		p := pole{value: value{group: v.group, val: v.val}, kind: g.kind, two: g.poles == 2, denied: denied}
		if !slices.Contains(s.poles, p) {
			s.poles = append(s.poles, p)
		}
	}
}

// open reads how the answer begins: with "yes" or "no", or words to that effect.
func (f *Facts) open() {
	for i := range f.segments[:min(len(f.segments), 2)] {
		from, to := int(f.segments[i].from), int(f.segments[i].to)
		first := &f.text.tokens[from]
		alone := from+1 == len(f.text.tokens) || f.text.tokens[from+1].flags&tStart != 0
		switch w := first.word; w {
		case "yes", "yep", "yeah", "yup", "ja", "oui", "sim", "sì", "да", "так", "tak", "evet", "はい", "نعم", "כן", "हाँ", "हां", "네", "예", "ναι", "ano", "igen", "kyllä":
			f.opening = opensYes
		case "sí", "si":
			if alone {
				f.opening = opensYes
			}
		case "nope", "nein", "non", "nee", "não", "нет", "ні", "hayır", "いいえ", "نعم لا", "לא", "아니요", "아니오", "όχι", "nej", "nei":
			if alone {
				f.opening = opensNo
			}
		case "no", "nie", "不":
			if alone || from+1 < to && speaks(f.text.tokens[from+1].word) != 0 {
				f.opening = opensNo
			}
		case "absolutely", "certainly", "definitely", "of_course", "sure", "indeed", "selbstverständlich", "natürlich", "gerne", "claro", "certo":
			f.opening = opensSure
		case "of":
			if from+1 < to && f.text.tokens[from+1].word == "course" {
				f.opening = opensSure
			}
		case "unfortunately", "regrettably", "leider", "malheureusement", "lamentablemente", "purtroppo", "infelizmente", "helaas":
			f.opening = opensSorry
		}
		if f.opening != 0 {
			return
		}
	}
}
