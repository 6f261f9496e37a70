package guard

import (
	"strings"
	"unicode"
)

// maxChunk is how many bytes without a blank are read as one: the scanner looks at a chunk
// more than once.
const maxChunk = 192

// block is a fenced block of code: its text without blanks, prompts and lines of comment,
// and its pieces, sorted.
type block struct {
	text   string
	pieces []uint32
}

// fences parts an answer into prose and its blocks of code.
func fences(s string) (string, []block) {
	if !strings.Contains(s, "```") {
		return s, nil
	}
	var prose strings.Builder
	var blocks []block
	for i := 0; ; i++ {
		before, rest, found := strings.Cut(s, "```")
		if i%2 == 0 {
			prose.WriteString(before)
			prose.WriteString("\n")
		} else if b := code(before); b.text != "" && len(blocks) < maxBlocks {
			blocks = append(blocks, b)
		}
		if !found {
			return prose.String(), blocks
		}
		s = rest
	}
}

// code reads a block. Its first word is dropped where it names the language.
func code(s string) block {
	var b strings.Builder
	var out block
	first := true
	for line := range strings.Lines(s) {
		line = strings.TrimSpace(line)
		if first {
			word, rest, _ := strings.Cut(line, " ")
			if line != s && rest == "" && strings.IndexFunc(word, func(r rune) bool { return !unicode.IsLetter(r) && r != '+' && r != '#' }) < 0 || named(word) {
				line = strings.TrimSpace(rest)
			}
			first = false
		}
		line = strings.TrimPrefix(strings.TrimPrefix(line, "$ "), "> ")
		if strings.HasPrefix(line, "# ") || strings.HasPrefix(line, "//") || strings.HasPrefix(line, "-- ") {
			continue
		}
		for from := 0; from < len(line); {
			to := from + 1
			if letter(line[from]) {
				for to < len(line) && letter(line[to]) {
					to++
				}
			}
			if piece := line[from:to]; piece != " " && piece != "\t" {
				b.WriteString(piece)
				out.pieces = append(out.pieces, hash(piece, 'c'))
			}
			from = to
		}
	}
	out.text, out.pieces = b.String(), sorted(out.pieces)
	return out
}

func letter(b byte) bool {
	return b == '_' || b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= 0x80
}

// named tells the names of languages that follow an opening fence.
func named(w string) bool {
	switch w {
	case "bash", "sh", "shell", "zsh", "console", "python", "py", "go", "js", "javascript", "ts", "typescript", "java", "json", "yaml",
		"yml", "sql", "html", "css", "c", "cpp", "c++", "c#", "csharp", "rust", "ruby", "php", "kotlin", "swift", "toml", "xml",
		"text", "txt", "plaintext", "powershell", "dockerfile", "diff", "markdown":
		return true
	}
	return false
}

// plain takes the signs of Markdown out of folded prose, puts every list item, cell and
// heading on a line of its own, and digits of every script into one.
func plain(s string) string {
	var b strings.Builder
	b.Grow(len(s) + len(s)/8)
	next := 1 // the number of the list item that may follow
	for line := range strings.Lines(s) {
		begun, ended := false, true
		for word := range strings.FieldsSeq(line) {
			switch {
			case !begun && (word == "-" || word == "*" || word == "+" || word == "•" || word == ">" || strings.Trim(word, "#") == ""):
				continue
			case ended && (word == "-" || word == "*" || word == "•"):
				b.WriteByte('\n')
				continue
			case word == "|":
				b.WriteString(", ")
				continue
			case strings.Trim(word, "-|:=") == "" && len(word) > 2:
				continue
			}
			if n, ok := marker(word); ok && (n == next && next > 1 || n == 1 && (ended || !begun) || !begun) {
				b.WriteByte('\n')
				next, begun, ended = n+1, true, true
				continue
			}
			begun = true
			last := word[len(word)-1]
			ended = strings.IndexByte(".:;!?", last) >= 0
			for len(word) > maxChunk {
				unmark(&b, word[:maxChunk])
				b.WriteByte(' ')
				word = word[maxChunk:]
			}
			unmark(&b, word)
			b.WriteByte(' ')
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// marker reads the number of a list item: "1.", "2)", "**3.**".
func marker(word string) (int, bool) {
	word = strings.Trim(word, "*(")
	if len(word) < 2 || len(word) > 3 || word[len(word)-1] != '.' && word[len(word)-1] != ')' {
		return 0, false
	}
	n := 0
	for _, c := range []byte(word[:len(word)-1]) {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int(c-'0')
	}
	return n, true
}

// unmark writes a word without the signs of Markdown. Signs of scripts that put no blanks
// between words become words of their own.
func unmark(b *strings.Builder, word string) {
	word = strings.Trim(word, "_~")
	if strings.IndexFunc(word, func(r rune) bool { return r >= 0x80 || r == '*' || r == '`' || r == '|' }) < 0 {
		b.WriteString(word)
		return
	}
	prev := rune(0)
	for i, r := range word {
		switch {
		case r == '*':
			if prev >= '0' && prev <= '9' && i+1 < len(word) && word[i+1] != '*' {
				b.WriteRune(r)
			}
		case r == '`':
		case r == '|':
			b.WriteString(", ")
		case r < 0x80:
			if unspaced(prev) {
				b.WriteByte(' ')
			}
			b.WriteRune(r)
		case unicode.Is(unicode.Nd, r):
			if prev > 0x80 {
				b.WriteByte(' ')
			}
			r = '0' + digit(r)
			b.WriteRune(r)
		case unspaced(r):
			b.WriteByte(' ')
			b.WriteRune(r)
		default:
			b.WriteRune(r)
		}
		prev = r
	}
}

// digit is the value of a decimal digit of any script: ranges of them begin at a zero.
func digit(r rune) rune {
	for _, t := range unicode.Nd.R16 {
		if r >= rune(t.Lo) && r <= rune(t.Hi) {
			return (r - rune(t.Lo)) % 10
		}
	}
	for _, t := range unicode.Nd.R32 {
		if r >= rune(t.Lo) && r <= rune(t.Hi) {
			return (r - rune(t.Lo)) % 10
		}
	}
	return 0
}

func unspaced(r rune) bool {
	return r >= 0x2E80 && r <= 0xA4CF || r >= 0xF900 && r <= 0xFAFF || r >= 0x20000 && r <= 0x3FFFF || r >= 0x0E00 && r <= 0x0EFF
}
