package openai

import (
	"bytes"

	"github.com/cespare/xxhash/v2"
)

// Bounds of a Prefix.
const (
	// MaxMarks is how many beginnings of a prompt a Prefix tells apart.
	MaxMarks = 32
	// firstMarks of them are the shortest ones; the others are the longest.
	firstMarks = 8
	// markBytes is the first length within a turn at which there is a mark, about 512 tokens: shorter prefixes are
	// hardly worth a choice of server.
	markBytes = 2 << 10
	// rootBytes is how much of a long first turn tells conversations apart.
	rootBytes = 4 << 10
)

// Prefix says how a prompt begins, in hashes of ever longer beginnings of it: a server that has seen a request with one of
// them has the start of this prompt in its prefix cache. The hashes are those of xxhash64, the same on every node and
// in every release; nobody should rely on their being hard to forge.
type Prefix struct {
	// Root is the hash of how the conversation begins: what stands before the messages, the messages of system and developer,
	// and the first other one, of which the first 4 KiB count. All requests of a conversation have it in common, and
	// conversations of one application differ in it. 0: nothing is known of the prompt.
	Root uint64

	n     int
	chain [MaxMarks]uint64
}

// Chain are the hashes, the shortest beginning first, at most MaxMarks: of tools, system prompt and what else is
// rendered before the conversation; then with each turn, and within a turn of more than 2 KiB at some lengths, each about half as
// long again as the one before. Of many, the first 8 and the last 24 are kept.
func (p *Prefix) Chain() []uint64 { return p.chain[:p.n] }

// lead are the members of the top level that come before the conversation, in the order in which they are hashed.
const (
	leadTools = iota
	leadFunctions
	leadDocuments
	leadTemplate
	leadTemplateArgs
	leadSystem
	leadInstructions
	leadSalt
	leads
)

// prompt notes where the member stands that makes the beginning of a prompt.
func (m *meter) prompt(name []byte, v, end int) {
	s := &m.req.spans
	at := 0
	switch string(name) {
	case "messages", "input", "prompt":
		if s.turns.end == 0 || string(name) == "messages" {
			s.turns = span{v, end}
		}
		return
	case "tools":
		at = leadTools
	case "functions":
		at = leadFunctions
	case "documents":
		at = leadDocuments
	case "chat_template":
		at = leadTemplate
	case "chat_template_kwargs":
		at = leadTemplateArgs
	case "system":
		at = leadSystem
	case "instructions":
		at = leadInstructions
	case "cache_salt":
		at = leadSalt
	case "prompt_cache_key":
		if raw := m.body[v:end]; isString(raw) && len(raw) <= maxIdentity+2 {
			m.req.PromptCacheKey = unquote(raw)
		}
		return
	default:
		return
	}
	s.lead[at] = span{v, end}
}

// Prefix hashes how the prompt of body begins, the very one that r was read from, into p. Turns whose bytes are equal hash equal, whatever
// follows them and in whichever order the members of the body stand; only Anthropic's cache_control is left out of them, which
// clients move from turn to turn. What should be told apart all the same, such as the model and a tenant's cache salt, goes into seed.
// One linear scan, at some GB/s, without garbage. Of a form nothing is known.
func (r *Request) Prefix(body []byte, seed uint64, p *Prefix) {
	*p = Prefix{}
	s := &r.spans
	if s.form || s.turns.end == 0 {
		return
	}
	h := prefixer{p: p, marked: bytes.Contains(body, []byte(cacheControl))}
	h.d.ResetWithSeed(seed)
	some := false
	for _, at := range s.lead {
		if at.end > 0 && body[at.start] != 'n' {
			some = true
			h.write(body[at.start:at.end])
		}
		h.close()
	}
	if some {
		h.mark()
	}
	turns := body[s.turns.start:s.turns.end]
	if first := skipSpace(turns, 1); turns[0] != '[' || turns[first] != '{' && turns[first] != '"' {
		h.turn(turns, true) // a text, or ids
		return
	}
	for a := (array{b: turns}); a.next(); {
		h.turn(a.value, p.Root == 0 && !leading(a.value))
	}
	if p.Root == 0 && p.n > 0 { // nothing but instructions
		p.Root = p.chain[p.n-1]
	}
}

// leading tells whether a turn is the application's, not of the conversation.
func leading(turn []byte) bool {
	for o := (object{b: turn}); turn[0] == '{' && o.next(); {
		if string(o.name) == "role" {
			return string(o.value) == `"system"` || string(o.value) == `"developer"`
		}
	}
	return false
}

const cacheControl = `"cache_control"`

// prefixer hashes a prompt. All that it has hashed so far is one stream.
type prefixer struct {
	d      xxhash.Digest
	p      *Prefix
	marked bool // cache_control occurs

	root     bool // this turn tells conversations apart
	at, next int  // bytes of the turn so far; where its next mark is
}

// turn hashes one turn, with its marks.
func (h *prefixer) turn(b []byte, root bool) {
	h.root, h.at, h.next = root, 0, markBytes
	h.write(b)
	h.next = 0
	h.close()
	sum := h.mark()
	if h.root {
		h.p.Root = sum
	}
}

// close ends a turn or a lead: no JSON text has that byte.
func (h *prefixer) close() { _, _ = h.d.Write([]byte{0}) }

// mark notes the hash of all so far.
func (h *prefixer) mark() uint64 {
	sum := max(h.d.Sum64(), 1)
	p := h.p
	if p.n == MaxMarks {
		copy(p.chain[firstMarks:], p.chain[firstMarks+1:])
		p.n--
	}
	p.chain[p.n] = sum
	p.n++
	return sum
}

// write hashes b without its members called cache_control.
func (h *prefixer) write(b []byte) {
	from := 0 // where the next search begins
	for h.marked {
		i := bytes.Index(b[from:], []byte(cacheControl))
		if i < 0 {
			break
		}
		start, end := cutMember(b, from+i)
		h.bytes(b[:start])
		b, from = b[end:], 0
		if start == end {
			h.bytes(b[:len(cacheControl)])
			b = b[len(cacheControl):]
		}
	}
	h.bytes(b)
}

// cutMember is what to leave out of b so that the member whose name begins at i is gone; nothing, where no member does.
func cutMember(b []byte, i int) (start, end int) {
	colon := skipSpace(b, i+len(cacheControl))
	if colon == len(b) || b[colon] != ':' {
		return i, i
	}
	v := skipSpace(b, colon+1)
	if end = skipValue(b, v); end <= v {
		return i, i
	}
	for start = i; start > 0 && isSpace(b[start-1]); {
		start--
	}
	if start > 0 && b[start-1] == ',' {
		return start - 1, end
	}
	if comma := skipSpace(b, end); comma < len(b) && b[comma] == ',' {
		return i, skipSpace(b, comma+1)
	}
	return i, end
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\r' || c == '\t' }

// bytes hashes b and marks the lengths that it reaches within its turn.
func (h *prefixer) bytes(b []byte) {
	for h.next > 0 && len(b) >= h.next-h.at {
		n := h.next - h.at
		_, _ = h.d.Write(b[:n])
		b, h.at = b[n:], h.next
		sum := h.mark()
		if h.root && h.at >= rootBytes {
			h.p.Root, h.root = sum, false
		}
		h.next = nextMark(h.at)
	}
	_, _ = h.d.Write(b)
	h.at += len(b)
}

// nextMark is where the mark behind the one at that length is: 2, 4, 6, 8, 12, 16, 24, 32 KiB and so on.
func nextMark(at int) int {
	step := markBytes
	for 4*step <= at {
		step *= 2
	}
	return at + step
}
