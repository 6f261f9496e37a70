package cache

import (
	"crypto/sha256"
	"reflect"
	"strings"
)

// partitionDomain goes first into every partition's key, so that none is an answer's.
const partitionDomain = "headgate cache partition 1\n"

// Partition names all that an answer depends on but the last user text, and the embedder by
// whose vectors texts are compared there, and gives that text: its parts a line each, as they
// came. It is derived by the code of Key, and fails for a body that has no key. There is no partition
// (ok is false) for a request without such a text, and for a completion: instructions and the
// turns of a conversation are all one text there.
func (c *Context) Partition(embedder string) (k Key, text string, ok bool, err error) {
	plan, err := keyPlan()
	if err != nil {
		return k, "", false, err
	}
	if c.Path == "/v1/completions" {
		return k, "", false, nil
	}
	s := keyPool.Get().(*keyScratch)
	defer s.free()
	if err = s.doc.parse(c.Body); err != nil {
		return k, "", false, err
	}
	var b strings.Builder
	s.texts = s.doc.lastUser(s.texts[:0], c.Path)
	for i, t := range s.texts {
		s.plain = s.doc.decode(s.plain[:0], t)
		s.doc.replace(t, nil)
		if i > 0 {
			b.WriteByte('\n')
		}
		b.Write(s.plain)
	}
	if text = strings.TrimSpace(b.String()); text == "" {
		return k, "", false, nil
	}
	s.image = keyAppendString(append(s.image[:0], partitionDomain...), embedder)
	v := reflect.ValueOf(c).Elem()
	for i := range plan {
		s.image = s.appendField(s.image, &plan[i], v.Field(i))
	}
	return sha256.Sum256(s.image), text, true, nil
}
