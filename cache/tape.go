package cache

import (
	"slices"
	"sync"
	"sync/atomic"
)

// room is what the tapes of a node hold together.
type room struct {
	most int64
	held atomic.Int64 // bytes
}

// take says whether there is room for n more. nil has always: what it would hold is counted elsewhere.
func (r *room) take(n int) bool {
	if r == nil {
		return true
	}
	if r.held.Add(int64(n)) > r.most {
		r.held.Add(-int64(n))
		return false
	}
	return true
}

func (r *room) give(n int) {
	if r != nil {
		r.held.Add(-int64(n))
	}
}

// tape is a stream as it passes: chunks that never change, appended until it ends.
type tape struct {
	contentType string
	about       *Entry // what it depends on, without a body; nil: not known
	room        *room

	mu      sync.Mutex
	chunks  [][]byte
	size    int // of chunks
	readers int
	err     error         // nil until the end; io.EOF: whole
	changed chan struct{} // closed at the next change; nil: nobody waits for it
}

// add appends a chunk, which must not change any more. It says whether there was room: a tape
// that ended, or that would be larger than maxFlight, takes nothing, nor does one where those of the node
// are too large together.
func (t *tape) add(p []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil || t.size+len(p) > maxFlight || !t.room.take(len(p)) {
		return false
	}
	t.size += len(p)
	t.chunks = append(t.chunks, p)
	t.wake()
	return true
}

// end ends the tape, once. It is forgotten when nobody reads it.
func (t *tape) end(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = err
		t.wake()
		t.forget()
	}
}

// read counts one who reads the tape, with 1, or does no more, with -1.
func (t *tape) read(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.readers += n
	t.forget()
}

// forget gives the room back that a tape took which nobody needs any more; t.mu is held.
func (t *tape) forget() {
	if t.err != nil && t.readers == 0 {
		t.room.give(t.size)
		t.chunks, t.size = nil, 0
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
