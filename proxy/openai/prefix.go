package openai

import (
	"bytes"

	"github.com/cespare/xxhash/v2"
)

// Bounds of a Prefix.
const (
	// MaxTurns is how many turns of a conversation a Prefix tells apart.
	MaxTurns = 32
	// firstTurns of them are the first ones; the others are the last.
	firstTurns = 8
	// rootBytes is how much of a first turn tells conversations apart, about 1,000 tokens.
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
	chain [MaxTurns]uint64
}

// Chain are the hashes of all up to the end of each turn from the first on that is neither of system nor developer, at most
// MaxTurns: of more, the first 8 and the last 24. Nothing but the requests of a conversation has one in common.
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
	case turnsOf(m.kind):
		s.turns = span{v, end}
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

// turnsOf names the member that holds the conversation, or the prompt.
func turnsOf(kind Kind) string {
	switch kind {
	case Chat, Message, CountTokens:
		return "messages"
	case Response, Embedding:
		return "input"
	case Completion:
		return "prompt"
	}
	return ""
}

// Prefix hashes how the prompt of body begins, the very one that r was read from, into p. Turns whose bytes are equal hash
// equal, whatever follows them and in whichever order the members of the body stand; only Anthropic's cache_control is left
// out of them, which clients move from turn to turn. What should be told apart all the same, such as the model and a
// tenant's cache salt, goes into seed. One linear scan, at some GB/s, without garbage. Of a form, and of what is neither a
// conversation nor a text to go on with, nothing is known.
func (r *Request) Prefix(body []byte, seed uint64, p *Prefix) {
	*p = Prefix{}
	s := &r.spans
	if s.form || s.turns.end == 0 {
		return
	}
	h := prefixer{p: p, marked: bytes.Contains(body, []byte(cacheControl))}
	h.d.ResetWithSeed(seed)
	for _, at := range s.lead {
		if at.end > 0 && body[at.start] != 'n' {
			h.write(body[at.start:at.end])
		}
		h.close()
	}
	turns := body[s.turns.start:s.turns.end]
	if first := skipSpace(turns, 1); turns[0] != '[' || turns[first] != '{' && turns[first] != '"' {
		h.turn(turns) // a text, or ids
		return
	}
	for a := (array{b: turns}); a.next(); {
		if p.n == 0 && leading(a.value) {
			h.write(a.value)
			h.close()
			continue
		}
		h.turn(a.value)
	}
	if p.n == 0 { // nothing but instructions
		p.Root = h.sum()
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
	room   int  // bytes until the root is known, while it is being read
}

// turn hashes one turn of the conversation.
func (h *prefixer) turn(b []byte) {
	if h.p.n == 0 {
		h.room = rootBytes
	}
	h.write(b)
	h.room = 0
	h.close()
	p := h.p
	if p.n == MaxTurns {
		copy(p.chain[firstTurns:], p.chain[firstTurns+1:])
		p.n--
	}
	p.chain[p.n] = h.sum()
	if p.n++; p.Root == 0 {
		p.Root = p.chain[0]
	}
}

// close ends a turn or a lead: no JSON text has that byte.
func (h *prefixer) close() { _, _ = h.d.Write([]byte{0}) }

// sum is the hash of all so far.
func (h *prefixer) sum() uint64 { return max(h.d.Sum64(), 1) }

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

// bytes hashes b, and notes the root where enough of its turn is there.
func (h *prefixer) bytes(b []byte) {
	if h.room > 0 && len(b) >= h.room {
		_, _ = h.d.Write(b[:h.room])
		b, h.room = b[h.room:], 0
		h.p.Root = h.sum()
	} else if h.room > 0 {
		h.room -= len(b)
	}
	_, _ = h.d.Write(b)
}
