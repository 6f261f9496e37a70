package guard

import (
	"cmp"
	"embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
)

//go:embed words/*.txt
var wordFiles embed.FS

// lang is a language whose function words the gate knows.
type lang uint8

const (
	english lang = iota
	german
	french
	spanish
	italian
	portuguese
	dutch
	languages
)

// maxPhrase is the most words that make one entry of the lexicon.
const maxPhrase = 6

// What an entry of the lexicon is.
const (
	fFunction uint32 = 1 << iota // carries no topic
	fLight                       // narrows nothing
	fFrame                       // an opening to skip
	fNegation                    // says no
	fFailure                     // says that something failed
	fRole                        // gives the next words a part to play
	fAux                         // opens a yes/no question
	fKnown                       // more than the first word of a phrase
	fNumber                      // lexeme.num holds a value
	fVague                       // a verb of no sense of its own
	fVerb                        // an infinitive that "to" may introduce
)

// The kinds of answer that a question may want, as bits.
const (
	whWhen uint16 = 1 << iota
	whWhere
	whWhy
	whWho
	whHow
	whMuch
	whMany
	whLong
	whOften
	whFar
	whOld
	whResult
	whIf      // "what if": asks for a consequence, or merely tells of a case
	whContact // never asked for: whom to tell is as well asked by where and how
)

// What a question says of doing something, as bits.
const (
	modalCan uint8 = 1 << iota
	modalMust
	modalShould
	modalWill
	modalDid
	modalDone // "has it …?": neither past nor not
)

// value is one word's place in a group.
type value struct {
	group, val uint16
	soft       bool // counts only where its side has no plainer word of the group
}

// group is a set of values that exclude one another.
type group struct {
	kind   Kind
	strict bool // one side alone is enough to refuse
	poles  int  // how many values it has
}

// lexeme is what the lexicon knows of a word or phrase. Immutable once the lexicon stands.
type lexeme struct {
	base    string // the word of which it is a form: what makes two words the same
	flags   uint32
	asks    uint16 // bits wh…: asks for it
	answers uint16 // bits wh…: answers to it
	modal   uint8
	phrase  uint8 // the most words of a phrase that it begins; 0 for none
	num     string
	syns    []uint16
	vals    []value
}

// lexicon is the parsed word lists.
type lexicon struct {
	words  [languages]map[string]*lexeme
	votes  map[string]uint8 // bit per language of which it is a function word
	groups []group
	sizes  map[value]float64 // of units, in the first of their kind
	syns   uint16
}

// loaded parses the lists once: about 3 ms and 1.5 MB.
var loaded = sync.OnceValue(func() *lexicon { //nolint:gochecknoglobals // derived from files in the binary, never changed
	x, err := readLexicon()
	if err != nil {
		panic(err) // the lists are compiled in: TestLexicon reads them
	}
	return x
})

// readLexicon parses the lists; an error names file and line.
func readLexicon() (*lexicon, error) {
	x := &lexicon{votes: make(map[string]uint8, 1024)}
	for l := range x.words {
		x.words[l] = make(map[string]*lexeme, 512)
	}
	// Foreign words point at English groups and forms at words with all their senses.
	for _, name := range []string{"antonyms", "groups", "units", "synonyms", "english", "languages"} {
		text, err := wordFiles.ReadFile("words/" + name + ".txt")
		if err != nil {
			return nil, err
		}
		if err := x.file(name, string(text)); err != nil {
			return nil, err
		}
	}
	x.families()
	x.measures()
	for word, lx := range x.words[english] {
		if lx.flags&fFunction != 0 {
			x.votes[word] |= 1 << english
		}
	}
	return x, nil
}

// families makes listed words that are forms of listed words the same word: "called" is
// "call", with its own senses beside.
func (x *lexicon) families() {
	words := slices.SortedFunc(maps.Keys(x.words[english]), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b)) // a word before its forms
	})
	for _, word := range words {
		lx := x.words[english][word]
		switch word {
		case "news", "goods", "savings", "customs", "means", "glasses", "arms", "papers", "thing", "things":
			continue
		}
		if lx.base != word || lx.flags&fFunction != 0 {
			continue
		}
		if from := x.derive(word); from != nil {
			lx.base = from.base
		}
	}
}

func (x *lexicon) file(name, text string) error {
	section := "synonyms"
	n := 0
	for line := range strings.Lines(text) {
		n++
		line, _, _ = strings.Cut(line, "# ")
		line = strings.TrimSpace(line)
		switch {
		case line == "" || line == "#":
		case line[0] == '[' && line[len(line)-1] == ']':
			section = line[1 : len(line)-1]
		default:
			if err := x.line(section, line); err != nil {
				return fmt.Errorf("words/%s.txt:%d: %w", name, n, err)
			}
		}
	}
	return nil
}

// line adds one line of a section.
func (x *lexicon) line(section, line string) error {
	name, rest, _ := strings.Cut(section, " ")
	switch name {
	case "antonym", "date", "quantifier", "entity", "unit":
		return x.group(Kind(name), rest == "strict", line)
	case "wh":
		return x.wh(rest, line)
	case "modal":
		return x.modal(rest, line)
	case "form":
		return x.form(line)
	case "number":
		for w := range strings.FieldsSeq(line) {
			word, num, ok := strings.Cut(w, "=")
			if !ok {
				return fmt.Errorf("%q has no value", w)
			}
			lx := x.word(english, word)
			lx.num, lx.flags = num, lx.flags|fNumber
		}
		return nil
	case "synonyms":
		x.syns++
		for w := range strings.FieldsSeq(line) {
			lx := x.word(english, w)
			lx.syns = append(lx.syns, x.syns)
		}
		return nil
	}
	if l := language(name); l != english {
		return x.foreign(l, rest, line)
	}
	return x.flag(english, name, line)
}

// word returns the entry of a word, made where there is none, and tells the first word of
// a phrase how far to look.
func (x *lexicon) word(l lang, w string) *lexeme {
	lx := x.words[l][w]
	if lx == nil {
		lx = &lexeme{base: w}
		x.words[l][w] = lx
	}
	lx.flags |= fKnown
	if n := strings.Count(w, "_"); n > 0 {
		first := w[:strings.IndexByte(w, '_')]
		f := x.words[l][first]
		if f == nil {
			f = &lexeme{base: first}
			x.words[l][first] = f
		}
		f.phrase = max(f.phrase, uint8(min(n+1, maxPhrase)))
	}
	return lx
}

func (x *lexicon) group(kind Kind, strict bool, line string) error {
	poles := strings.Split(line, "|")
	if len(poles) < 2 && !strict {
		return fmt.Errorf("a group of one value must be strict")
	}
	x.groups = append(x.groups, group{kind: kind, strict: strict, poles: len(poles)})
	g := uint16(len(x.groups) - 1)
	for i, pole := range poles {
		words := strings.Fields(pole)
		if len(words) == 0 {
			return fmt.Errorf("an empty value")
		}
		for k, w := range words {
			bare := strings.TrimPrefix(w, "~")
			lx := x.word(english, bare)
			for _, before := range words[:k] {
				before = strings.TrimPrefix(before, "~")
				if kind == KindUnit || stem(english, before) == stem(english, bare) {
					lx.base = x.word(english, before).base // "mile", "miles"
					break
				}
			}
			lx.vals = append(lx.vals, value{group: g, val: uint16(i), soft: bare != w})
		}
	}
	return nil
}

func (x *lexicon) wh(name, line string) error {
	bits := map[string]uint16{
		"when": whWhen, "where": whWhere, "why": whWhy, "who": whWho, "how": whHow, "much": whMuch,
		"many": whMany, "long": whLong, "often": whOften, "far": whFar, "old": whOld, "result": whResult,
		"contact": whContact, "if": whIf,
	}
	bit, ok := bits[name]
	if !ok {
		return fmt.Errorf("no question word class %q", name)
	}
	for w := range strings.FieldsSeq(line) {
		bare := strings.TrimPrefix(w, "~")
		lx := x.word(english, bare)
		lx.answers |= bit
		if bare == w {
			lx.asks |= bit
			lx.flags |= fFunction
		}
	}
	return nil
}

func (x *lexicon) modal(name, line string) error {
	bits := map[string]uint8{"can": modalCan, "must": modalMust, "should": modalShould, "will": modalWill, "did": modalDid, "done": modalDone}
	bit, ok := bits[name]
	if !ok {
		return fmt.Errorf("no modality %q", name)
	}
	for w := range strings.FieldsSeq(line) {
		x.word(english, w).modal |= bit
	}
	return nil
}

// form makes the later words of a line forms of its first: the same word, with its senses.
func (x *lexicon) form(line string) error {
	words := strings.Fields(line)
	base := x.word(english, words[0])
	for _, w := range words[1:] {
		lx := x.word(english, w)
		lx.base = base.base
		lx.syns = append(lx.syns, base.syns...)
		lx.vals = append(lx.vals, base.vals...)
		lx.flags |= base.flags & (fLight | fFailure)
		lx.answers |= base.answers
	}
	return nil
}

func (x *lexicon) flag(l lang, name, line string) error {
	flags := map[string]uint32{
		"function": fFunction, "light": fLight, "frame": fFrame, "negation": fNegation | fFunction,
		"failure": fFailure, "vague": fVague, "verb": fVerb, "role": fRole, "aux": fAux | fFunction,
	}
	f, ok := flags[name]
	if !ok {
		return fmt.Errorf("no section %q", name)
	}
	for w := range strings.FieldsSeq(line) {
		x.word(l, w).flags |= f
		if f&fFunction != 0 {
			x.votes[w] |= 1 << l
		}
	}
	return nil
}

// foreign adds the words of another language: its function words and negations, and words
// that take the groups and numbers of an English one.
func (x *lexicon) foreign(l lang, name, line string) error {
	if name != "" {
		return x.flag(l, name, line)
	}
	for w := range strings.FieldsSeq(line) {
		word, meaning, ok := strings.Cut(w, "=")
		if !ok {
			return fmt.Errorf("%q has no meaning", w)
		}
		lx := x.word(l, word)
		x.votes[word] |= 1 << l
		bare := strings.TrimPrefix(meaning, "~")
		if bare[0] >= '0' && bare[0] <= '9' {
			lx.num, lx.flags = bare, lx.flags|fNumber
			continue
		}
		en := x.words[english][bare]
		if en == nil || len(en.vals) == 0 {
			return fmt.Errorf("%q means %q, which is in no group", word, bare)
		}
		for _, v := range en.vals {
			v.soft = bare != meaning
			lx.vals = append(lx.vals, v)
		}
	}
	return nil
}

func language(name string) lang {
	switch name {
	case "de":
		return german
	case "fr":
		return french
	case "es":
		return spanish
	case "it":
		return italian
	case "pt":
		return portuguese
	case "nl":
		return dutch
	}
	return english
}
