package leasetest

// event is something that happens to proc, if there is one: not if it has died by then, and later
// if it is paused.
type event struct {
	proc *proc
	do   func()
}

// The simulation of package cluster has one like it: a package that both imported would be more than that.

// queue gives events back in the order of their instants, and of one instant in the order in which
// they came. The heap holds no pointers.
type queue struct {
	heap  []due
	slots []event
	free  []int32
	seq   uint64
}

type due struct {
	at   int64
	seq  uint64
	slot int32
}

func (d due) before(o due) bool { return d.at < o.at || d.at == o.at && d.seq < o.seq }

func (q *queue) push(at int64, e event) {
	var slot int32
	if n := len(q.free); n > 0 {
		slot, q.free = q.free[n-1], q.free[:n-1]
		q.slots[slot] = e
	} else {
		slot = int32(len(q.slots))
		q.slots = append(q.slots, e)
	}
	q.seq++
	d := due{at, q.seq, slot}
	q.heap = append(q.heap, d)
	i := len(q.heap) - 1
	for i > 0 && d.before(q.heap[(i-1)/2]) {
		q.heap[i] = q.heap[(i-1)/2]
		i = (i - 1) / 2
	}
	q.heap[i] = d
}

// next is the instant of the earliest event; never: there is none.
func (q *queue) next() int64 {
	if len(q.heap) == 0 {
		return never
	}
	return q.heap[0].at
}

func (q *queue) pop() event {
	first := q.heap[0]
	d := q.heap[len(q.heap)-1]
	q.heap = q.heap[:len(q.heap)-1]
	i := 0
	for {
		child := 2*i + 1
		if child >= len(q.heap) {
			break
		}
		if child+1 < len(q.heap) && q.heap[child+1].before(q.heap[child]) {
			child++
		}
		if !q.heap[child].before(d) {
			break
		}
		q.heap[i] = q.heap[child]
		i = child
	}
	if len(q.heap) > 0 {
		q.heap[i] = d
	}
	e := q.slots[first.slot]
	q.slots[first.slot] = event{}
	q.free = append(q.free, first.slot)
	return e
}
