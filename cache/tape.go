package cache

import (
	"slices"
	"sync"
)

// tape is a stream as it passes: chunks that never change, appended until it ends.
type tape struct {
	contentType string
	about       *Entry // what it depends on, without a body; nil: not known

	mu      sync.Mutex
	chunks  [][]byte
	size    int
	err     error         // nil until the end; io.EOF: whole
	changed chan struct{} // closed at the next change; nil: nobody waits for it
}

// add appends a chunk, which must not change any more. It says whether there was room: a tape
// that ended, or that would be larger than maxFlight, takes nothing.
func (t *tape) add(p []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil || t.size+len(p) > maxFlight {
		return false
	}
	t.size += len(p)
	t.chunks = append(t.chunks, p)
	t.wake()
	return true
}

// end ends the tape, once.
func (t *tape) end(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = err
		t.wake()
	}
}

// wake tells those who wait; t.mu is held.
func (t *tape) wake() {
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
}

// from gives chunk i, or, where there is none yet, how the tape ended, or else what is closed
// when there is more.
func (t *tape) from(i int) (chunk []byte, err error, more <-chan struct{}) { //nolint:revive,staticcheck // in the order in which they are looked at
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case i < len(t.chunks):
		return t.chunks[i], nil, nil
	case t.err != nil:
		return nil, t.err, nil
	case t.changed == nil:
		t.changed = make(chan struct{})
	}
	return nil, nil, t.changed
}

// all gives the chunks until now.
func (t *tape) all() [][]byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clip(t.chunks)
}
