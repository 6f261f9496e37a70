package ledger

import "container/list"

// named is what a table holds. It never changes: its next state is another one, so that a
// capture needs only its pointer.
type named[K comparable] interface {
	name() K
	size() int // bytes of the name
}

// table holds values in the order in which they came, but that one looked at in vain goes to
// the end. So its order is that of the log, and what is forgotten is the same on all replicas.
type table[K comparable, V named[K]] struct {
	at    map[K]*list.Element
	queue list.List // of V
	bytes int

	most, mostBytes int
}

func newTable[K comparable, V named[K]](most, mostBytes int) *table[K, V] {
	return &table[K, V]{at: map[K]*list.Element{}, most: most, mostBytes: mostBytes}
}

func (t *table[K, V]) find(k K) (v V, ok bool) {
	e, ok := t.at[k]
	if !ok {
		return v, false
	}
	return e.Value.(V), true
}

func (t *table[K, V]) add(v V) {
	t.at[v.name()] = t.queue.PushBack(v)
	t.bytes += v.size()
}

// put puts a value in the place of its past.
func (t *table[K, V]) put(v V) { t.at[v.name()].Value = v }

func (t *table[K, V]) remove(e *list.Element) {
	v := t.queue.Remove(e).(V)
	delete(t.at, v.name())
	t.bytes -= v.size()
}

// all are the values in their order.
func (t *table[K, V]) all() []V {
	out := make([]V, 0, t.queue.Len())
	for e := t.queue.Front(); e != nil; e = e.Next() {
		out = append(out, e.Value.(V))
	}
	return out
}

// room says whether one of a name of so many bytes may be added.
func (t *table[K, V]) room(size int) bool {
	return len(t.at) < t.most && t.bytes+size <= t.mostBytes
}
