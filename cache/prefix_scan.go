package cache

import "hash/maphash"

// How the text of prompts is cut.
const (
	maxPromptText  = 1 << 16 // bytes that are looked at
	promptBlock    = 64      // bytes
	minPromptChunk = 16
	maxPromptChunk = 256
	maxScanKept    = 1 << 20 // bytes of a buffer that is used again
)

// promptScan turns a prompt's text into hashes, in two ways: of blocks of one size, of which two
// prompts have as many in common as they begin alike; and of chunks that are cut where the text
// says so, which are the same wherever they stand. Not for concurrent use.
type promptScan struct {
	doc   canonDoc
	plain []byte // one text

	seed   maphash.Seed
	gear   *[256]uint64
	size   int // bytes that were looked at
	blocks []uint32
	block  [promptBlock]byte // the one that has begun

	chunks []promptChunk
	roll   uint64 // over the last 64 bytes
	chunk  uint64 // the hash of the one that has begun
	length int    // and its bytes
}

type promptChunk struct {
	hash   uint32
	length uint16
}

// scan reads the text of a body in the order in which models are given it: tools, instructions,
// messages. ok is false where it has none, or is not JSON.
func (s *promptScan) scan(p *Prefixes, body []byte) (ok bool) {
	s.seed, s.gear = p.seed, &p.gear
	s.size, s.blocks, s.chunks, s.roll = 0, s.blocks[:0], s.chunks[:0], 0
	s.begin()
	if s.doc.parse(body) != nil || s.doc.tokens[0].kind != canonObject {
		return false
	}
	for _, name := range [...]string{"tools", "functions", "system", "instructions"} {
		if v, ok := s.doc.member(0, name); ok {
			s.content(v)
		}
	}
	for _, name := range [...]string{"messages", "input", "prompt"} {
		if v, ok := s.doc.member(0, name); ok {
			s.messages(v)
		}
	}
	if s.size == 0 {
		return false
	}
	if n := s.size % promptBlock; n > 0 {
		s.endBlock(s.block[:n])
	}
	s.cut()
	return true
}

// full: no more is looked at.
func (s *promptScan) full() bool { return s.size == maxPromptText }

// messages reads a list of them, or one text.
func (s *promptScan) messages(v uint32) {
	if s.doc.tokens[v].kind != canonArray {
		s.content(v)
		return
	}
	for m := v + 1; m < s.doc.tokens[v].next && !s.full(); m = s.doc.tokens[m].next {
		content, ok := s.doc.member(m, "content")
		if s.doc.tokens[m].kind != canonObject || !ok {
			s.content(m) // a call of a tool, its result
			continue
		}
		if role, ok := s.doc.member(m, "role"); ok {
			s.content(role)
		}
		s.content(content)
		if calls, ok := s.doc.member(m, "tool_calls"); ok {
			s.content(calls)
		}
	}
}

// content reads a text, a list of parts with texts, or whatever else it is, as canonical JSON.
func (s *promptScan) content(v uint32) {
	switch t := s.doc.tokens[v]; t.kind {
	case canonString:
		s.plain = s.doc.decode(s.plain[:0], v)
		s.write(s.plain)
	case canonArray:
		for m := v + 1; m < t.next && !s.full(); m = s.doc.tokens[m].next {
			s.content(m)
		}
		return
	case canonObject:
		if text, ok := s.doc.member(v, "text"); ok && s.doc.tokens[text].kind == canonString {
			s.content(text)
			return
		}
		fallthrough
	default:
		s.plain = s.doc.appendValue(s.plain[:0], v, nil)
		s.write(s.plain)
	}
	s.write([]byte{'\n'})
}

func (s *promptScan) write(text []byte) {
	text = text[:min(len(text), maxPromptText-s.size)]
	for rest := text; len(rest) > 0; {
		n := copy(s.block[s.size%promptBlock:], rest)
		rest = rest[n:]
		if s.size += n; s.size%promptBlock == 0 {
			s.endBlock(s.block[:])
		}
	}
	roll, chunk, length := s.roll, s.chunk, s.length
	for _, c := range text {
		roll = roll<<1 + s.gear[c]
		chunk = (chunk ^ uint64(c)) * 0x100000001b3 // FNV-1a
		length++
		// one byte in 64 ends a chunk
		if length >= minPromptChunk && roll>>58 == 0 || length == maxPromptChunk {
			s.chunk, s.length = chunk, length
			s.cut()
			chunk, length = s.chunk, s.length
		}
	}
	s.roll, s.chunk, s.length = roll, chunk, length
}

func (s *promptScan) endBlock(block []byte) {
	s.blocks = append(s.blocks, uint32(maphash.Bytes(s.seed, block)))
}

// cut ends a chunk.
func (s *promptScan) cut() {
	if s.length > 0 {
		h := (s.chunk ^ s.chunk>>32) * 0x9e3779b97f4a7c15
		s.chunks = append(s.chunks, promptChunk{max(uint32(h>>32), 1), uint16(s.length)}) // 0 is an empty slot
	}
	s.begin()
}

func (s *promptScan) begin() { s.chunk, s.length = s.gear[0], 0 }

// forget lets go of the content.
func (s *promptScan) forget() {
	clear(s.block[:])
	clear(s.plain[:cap(s.plain)])
	clear(s.doc.arena[:cap(s.doc.arena)])
	s.doc.src = nil
	if cap(s.plain) > maxScanKept || cap(s.doc.arena) > maxScanKept || cap(s.doc.tokens) > maxKeyTokens || cap(s.doc.order) > maxKeyTokens {
		s.plain, s.doc = nil, canonDoc{}
	}
}
