package queue

import "cmp"

// heap is a binary heap, least first, of items that know where they are, so that any can be moved or
// taken out. Keys stand in it, so that comparing them touches no item.
type heap[K cmp.Ordered, T any] struct {
	entries []entry[K, T]
	// at gives where an item keeps its position: 0 is outside, i+1 is entries[i].
	at func(T) *int
}

type entry[K cmp.Ordered, T any] struct {
	key  K
	tie  uint64
	item T
}

func (h *heap[K, T]) len() int { return len(h.entries) }

// first is the item with the least key, and that key; the heap must not be empty.
func (h *heap[K, T]) first() (T, K) { return h.entries[0].item, h.entries[0].key }

// set puts an item in, or moves it, to key. Equal keys stand by tie.
func (h *heap[K, T]) set(item T, key K, tie uint64) {
	i := *h.at(item) - 1
	if i < 0 {
		i = len(h.entries)
		h.entries = append(h.entries, entry[K, T]{})
	}
	h.settle(i, entry[K, T]{key, tie, item})
}

// remove takes an item out, if it is in.
func (h *heap[K, T]) remove(item T) {
	pos := h.at(item)
	i := *pos - 1
	if i < 0 {
		return
	}
	*pos = 0
	end := len(h.entries) - 1
	last := h.entries[end]
	h.entries[end] = entry[K, T]{}
	h.entries = h.entries[:end]
	if i < end {
		h.settle(i, last)
	}
}

// settle fills the hole at i with e, or moves the hole to where e belongs.
func (h *heap[K, T]) settle(i int, e entry[K, T]) {
	for i > 0 {
		up := (i - 1) / 2
		if !e.before(&h.entries[up]) {
			break
		}
		h.put(i, h.entries[up])
		i = up
	}
	for {
		down := 2*i + 1
		if down >= len(h.entries) {
			break
		}
		if right := down + 1; right < len(h.entries) && h.entries[right].before(&h.entries[down]) {
			down = right
		}
		if !h.entries[down].before(&e) {
			break
		}
		h.put(i, h.entries[down])
		i = down
	}
	h.put(i, e)
}

func (h *heap[K, T]) put(i int, e entry[K, T]) {
	h.entries[i] = e
	*h.at(e.item) = i + 1
}

func (e *entry[K, T]) before(o *entry[K, T]) bool {
	return e.key < o.key || e.key == o.key && e.tie < o.tie
}
