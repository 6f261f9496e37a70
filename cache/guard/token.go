package guard

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// What a token is, besides what its lexeme says.
const (
	tNumber   uint16 = 1 << iota // word holds a canonical value
	tID                          // identifier, address, path, file or domain name
	tCode                        // operator or piece of code
	tName                        // capitalised within a sentence and not a common word
	tAcronym                     // all capitals
	tNegated                     // within reach of a word that says no
	tStart                       // first of a sentence or clause
	tSentence                    // first of a sentence
	tJoined                      // follows its predecessor without a blank (hyphen, slash, apostrophe)
	tOrdinal                     // an ordinal number in digits
	tSkip                        // part of an opening: no rule looks at it
	tOne                         // "one" or "a single": a number only where the other side has a 1
)

// token is one word, number, name or sign. word is a part of the source or of the lexicon
// wherever it can be, so a Text keeps few strings of its own.
type token struct {
	word  string // lower case; for numbers the canonical value
	stem  string // what makes two words the same
	lex   *lexeme
	flags uint16
}

func (t *token) is(f uint32) bool { return t.lex != nil && t.lex.flags&f != 0 }

// scanner splits a text into tokens.
type scanner struct {
	tokens           []token
	quotes           []span
	open             int  // the token at which the quotation that stands open began, -1 without
	closer           rune // what ends it
	sentence, clause bool
	foreign          bool // a letter of a script that no list covers, or two scripts in a word
	latin            bool // a letter beyond ASCII
	most             int  // tokens after which it stops
}

type span struct{ from, to uint16 }

// scan reads a folded text. It stops soon after the first token beyond most.
func (s *scanner) scan(text string) {
	s.open, s.sentence, s.clause = -1, true, true
	for i := 0; i < len(text) && len(s.tokens) <= s.most; {
		if text[i] <= ' ' {
			if text[i] == '\n' {
				s.sentence, s.clause = true, true
			}
			i++
			continue
		}
		j := i
		for j < len(text) && text[j] > ' ' {
			j++
		}
		s.chunk(text[i:j])
		i = j
	}
}

// chunk reads what stands between two blanks: quotes and punctuation around it first.
func (s *scanner) chunk(c string) {
	for c != "" {
		r, n := utf8.DecodeRuneInString(c)
		if r == '(' || r == '[' || r == '{' && len(c) > 1 || r == '¿' || r == '¡' {
			s.clause = true
			c = c[n:]
			continue
		}
		if q := closing(r); q != 0 && s.open < 0 && len(c) > n {
			s.open, s.closer = len(s.tokens), q
			s.clause = s.clause || r != '\''
			c = c[n:]
			continue
		}
		break
	}
	if c == "" {
		return
	}
	body, tail := trimTail(c)
	if body == "" {
		s.sign(c)
		return
	}
	s.body(body)
	if last := body[len(body)-1]; tail != "" && last >= '0' && last <= '9' {
		switch {
		case tail[0] == '!' && len(tail) > 1:
			s.push("!", tCode) // "what is 5!?"
		case tail[0] == '"' && s.open < 0:
			s.push("inch", tJoined)
		case tail[0] == '\'' && s.open < 0:
			s.push("foot", tJoined)
		}
	}
	for _, r := range tail {
		s.punctuation(r)
	}
}

// closing returns what ends a quotation that r begins, 0 where it begins none.
func closing(r rune) rune {
	switch r {
	case '"', '\'', '`':
		return r
	case '«':
		return '»'
	case '»':
		return '«'
	case '„':
		return '"'
	}
	return 0
}

// trimTail cuts closing punctuation off a chunk.
func trimTail(c string) (body, tail string) {
	end := len(c)
	for end > 0 {
		r, n := utf8.DecodeLastRuneInString(c[:end])
		if !strings.ContainsRune(".,;:!?)]}\"'`»«…->~", r) {
			break
		}
		if (r == '-' || r == '}' || r == '`') && end == len(c) && n == end {
			break
		}
		end -= n
	}
	return c[:end], c[end:]
}

func (s *scanner) punctuation(r rune) {
	switch r {
	case '.', '!', '?', '…':
		s.sentence, s.clause = true, true
	case ',', ';', ':', ')', ']', '-':
		s.clause = true
	}
	if s.open >= 0 && r == s.closer {
		if n := len(s.tokens); n > s.open && len(s.quotes) < 16 {
			s.quotes = append(s.quotes, span{uint16(s.open), uint16(n)})
		}
		s.open = -1
	}
}

// sign reads a chunk without letters or digits: dashes part clauses, the rest is code.
func (s *scanner) sign(c string) {
	for _, r := range c {
		if s.open >= 0 && r == s.closer || strings.ContainsRune(".,;:!?)]…", r) {
			s.punctuation(r)
		}
	}
	switch strings.Trim(c, ".,;:!?()[]\"'`»«…") {
	case "", "--", "---", "|", "•", "#":
		s.clause = true
	case "-", "*":
		// Between numbers an operator, elsewhere a dash or a bullet.
		s.clause = true
		if n := len(s.tokens); n > 0 && s.tokens[n-1].flags&tNumber != 0 {
			s.push(c[:1], tCode)
		}
	case "&":
		s.push("and", 0)
	default:
		s.push(c, tCode)
	}
}

func (s *scanner) push(word string, flags uint16) {
	if s.sentence {
		flags |= tSentence
	}
	if s.clause {
		flags |= tStart
	}
	s.sentence, s.clause = false, false
	s.tokens = append(s.tokens, token{word: word, flags: flags})
}

// What runes a chunk holds.
const (
	hasLetter uint8 = 1 << iota
	hasDigit
	hasUpper
	hasInner // a capital after a small letter
	hasSign
	hasWide // beyond ASCII
)

func classify(c string) (has uint8) {
	lower := false
	for _, r := range c {
		switch {
		case r >= 'a' && r <= 'z':
			has |= hasLetter
			lower = true
		case r >= 'A' && r <= 'Z':
			has |= hasLetter | hasUpper
			if lower {
				has |= hasInner
			}
		case r >= '0' && r <= '9':
			has |= hasDigit
		case r < utf8.RuneSelf:
			has |= hasSign
		case unicode.IsLetter(r) || unicode.IsMark(r):
			has |= hasLetter | hasWide
			if unicode.IsUpper(r) {
				has |= hasUpper
			} else {
				lower = true
			}
		default:
			has |= hasSign | hasWide
		}
	}
	return has
}

// body reads a chunk without the punctuation around it.
func (s *scanner) body(c string) {
	if len(s.tokens) > s.most {
		return
	}
	has := classify(c)
	if has&hasWide != 0 {
		s.script(c)
	}
	switch {
	case has&(hasSign|hasDigit) == 0:
		s.letters(c, has, 0)
	case has&hasLetter == 0 && has&hasDigit == 0:
		s.sign(c)
	case has&hasDigit == 0 && s.run(c):
	case isAddress(c):
		s.push(strings.TrimSuffix(c, "/"), tID)
	case has&hasLetter != 0 && has&hasDigit == 0 && isWords(c):
		s.words(c)
	case has&hasDigit != 0 && s.numeric(c):
	case strings.ContainsAny(c, "_(){}[];=<>|&^$\\*+~%#@:"):
		s.push(c, tCode|tID)
	default:
		s.parts(c)
	}
}

// run splits what someone typed without a blank after the punctuation: "card...how",
// "something,else", "late.Why".
func (s *scanner) run(c string) bool {
	i := strings.IndexAny(c, ",;!?.")
	if i <= 0 || strings.ContainsAny(c, "()[]{}=<>@/\\_:") {
		return false
	}
	j := i
	for j < len(c) && strings.IndexByte(",;!?.", c[j]) >= 0 {
		j++
	}
	if j == len(c) || j == i+1 && c[i] == '.' && (c[j] < 'A' || c[j] > 'Z' || i == 1) {
		return false
	}
	s.body(c[:i])
	s.punctuation(rune(c[i]))
	s.body(c[j:])
	return true
}

// isAddress tells e-mail addresses, URLs, domains and paths.
func isAddress(c string) bool {
	if strings.Contains(c, "://") || strings.Contains(c, "@") || strings.HasPrefix(c, "www.") ||
		strings.HasPrefix(c, "~/") || strings.Contains(c, ":\\") || strings.HasPrefix(c, "\\\\") {
		return true
	}
	return len(c) > 1 && c[0] == '/' && c[1] != '/'
}

// isWords tells words joined by hyphens, slashes and apostrophes from everything else.
func isWords(c string) bool {
	for i := 0; i < len(c); i++ {
		switch b := c[i]; {
		case b == '-' || b == '/' || b == '\'' || b == '&' && i > 0:
		case b >= utf8.RuneSelf, b >= 'a' && b <= 'z', b >= 'A' && b <= 'Z':
		default:
			return false
		}
	}
	return true
}

// words splits at hyphens and slashes, and cuts contractions.
func (s *scanner) words(c string) {
	flags := uint16(0)
	for c != "" {
		end := strings.IndexAny(c, "-/&")
		part := c
		if end >= 0 {
			part, c = c[:end], c[end+1:]
		} else {
			c = ""
		}
		if part == "" {
			continue
		}
		if i := strings.IndexByte(part, '\''); i >= 0 {
			s.contraction(part, i, flags)
		} else {
			s.letters(part, classify(part), flags)
		}
		flags = tJoined
	}
}

// contraction reads a word with an apostrophe at i: "don't", "I'd", "Alice's", "l'essai".
func (s *scanner) contraction(c string, i int, flags uint16) {
	head, tail := c[:i], c[i+1:]
	if len(tail) <= 2 {
		tail = lower(tail) // no longer one is looked for: a chain of apostrophes stays linear
	}
	if len(s.tokens) > s.most {
		return
	}
	switch {
	case tail == "t" && i > 0 && (head[i-1] == 'n' || head[i-1] == 'N'):
		switch verb := lower(head[:i-1]); verb {
		case "ca":
			s.push("can", flags)
		case "wo":
			s.push("will", flags)
		case "sha":
			s.push("shall", flags)
		case "ai":
			s.push("is", flags)
		default:
			s.push(verb, flags)
		}
		s.push("not", tJoined)
	case tail == "s":
		s.letters(head, classify(head), flags)
		if n := len(s.tokens); n > 0 && pronounLike(s.tokens[n-1].word) {
			s.push("is", tJoined)
		}
	case tail == "m" && (head == "I" || head == "i"):
		s.push("i", flags)
		s.push("am", tJoined)
	case tail == "re":
		s.letters(head, classify(head), flags)
		s.push("are", tJoined)
	case tail == "ve":
		s.letters(head, classify(head), flags)
		s.push("have", tJoined)
	case tail == "ll":
		s.letters(head, classify(head), flags)
		s.push("will", tJoined)
	case tail == "d":
		s.letters(head, classify(head), flags)
		s.push("would", tJoined)
	default:
		if head != "" {
			s.letters(head, classify(head), flags)
		}
		if rest := c[i+1:]; rest != "" {
			if j := strings.IndexByte(rest, '\''); j >= 0 && j+1 < len(rest) {
				s.contraction(rest, j, tJoined)
				return
			}
			rest = strings.Trim(rest, "'")
			s.letters(rest, classify(rest), tJoined)
		}
	}
}

// pronounLike tells the words after which "'s" is "is" and not a genitive.
func pronounLike(w string) bool {
	switch w {
	case "what", "who", "where", "when", "how", "why", "it", "that", "there", "he", "she", "here", "let":
		return true
	}
	return false
}

// letters pushes one word; dropped apostrophes ("dont", "cant", "im") are put right.
func (s *scanner) letters(c string, has uint8, flags uint16) {
	if c == "" {
		return
	}
	w := c
	if has&hasUpper != 0 {
		w = lower(c)
		first, n := utf8.DecodeRuneInString(c)
		switch {
		case len(c) > 1 && len(c) <= 6 && strings.ToUpper(c) == c:
			flags |= tAcronym
		case unicode.IsUpper(first) && len(c) > n || has&hasInner != 0:
			flags |= tName
		}
	}
	switch w {
	case "a":
		if c == "A" && !s.sentence && !s.clause {
			w, flags = c, flags|tID // "does A depend on B?"
		}
		s.push(w, flags)
	case "us":
		if c == "US" {
			w = "usa"
		}
		s.push(w, flags)
	case "cannot", "cant":
		s.push("can", flags)
		s.push("not", tJoined)
	case "dont", "doesnt", "didnt", "isnt", "arent", "wasnt", "werent", "hasnt", "havent", "hadnt", "couldnt", "wouldnt", "shouldnt", "wont":
		verb := w[:len(w)-2]
		if w == "wont" {
			verb = "will"
		}
		s.push(verb, flags)
		s.push("not", tJoined)
	case "im", "ive":
		s.push("i", flags&^tName)
		if w == "im" {
			s.push("am", tJoined)
		} else {
			s.push("have", tJoined)
		}
	case "whats", "wheres", "hows", "whos":
		s.push(w[:len(w)-1], flags)
		s.push("is", tJoined)
	default:
		s.push(w, flags)
	}
}

// lower is strings.ToLower, without an allocation where nothing changes.
func lower(s string) string {
	return strings.ToLower(s)
}

// parts reads a chunk with signs that is neither words nor a number: dotted abbreviations
// lose their dots, joined numbers and words come apart, the rest is an identifier.
func (s *scanner) parts(c string) {
	if dotted(c) {
		s.push(lower(strings.ReplaceAll(c, ".", "")), tAcronym)
		return
	}
	if strings.ContainsAny(c, "-/") && !strings.ContainsAny(c, "._") {
		if s.apart(c) {
			return
		}
	}
	s.push(lower(c), tID)
}

// dotted tells "a.m", "U.S", "e.g": single letters parted by dots.
func dotted(c string) bool {
	for i := 0; i < len(c); i++ {
		letter := c[i] >= 'a' && c[i] <= 'z' || c[i] >= 'A' && c[i] <= 'Z'
		if letter != (i%2 == 0) || !letter && c[i] != '.' {
			return false
		}
	}
	return len(c) > 1
}

// apart splits "10-minute" and "16-year-old": a short number, then words.
func (s *scanner) apart(c string) bool {
	i := strings.IndexAny(c, "-/")
	if i <= 0 || i > 4 {
		return false
	}
	for _, part := range strings.FieldsFunc(c[i+1:], func(r rune) bool { return r == '-' || r == '/' }) {
		if has := classify(part); has&^(hasUpper|hasInner) != hasLetter || len(part) < 3 {
			return false
		}
	}
	if classify(c[:i]) != hasDigit {
		return false
	}
	s.push(c[:i], tNumber)
	s.words(c[i+1:])
	return true
}

// script notes what letters beyond ASCII a chunk holds.
func (s *scanner) script(c string) {
	ascii := false
	other := false
	for _, r := range c {
		switch {
		case r < utf8.RuneSelf:
			ascii = ascii || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		case unicode.Is(unicode.Latin, r):
			ascii = true
			s.latin = true
		case unicode.IsMark(r):
		case unicode.IsLetter(r):
			other = r != 'µ' && r != 'μ' || other
		case unicode.IsDigit(r):
			other = true
		}
	}
	s.foreign = s.foreign || other
}
