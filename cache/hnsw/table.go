package hnsw

import "math/bits"

// table finds slots by id: open addressing with linear probing, five cells to four slots at
// least. It holds slots only; their ids are in the array that each call is given. Its zero
// value is empty and wants a grow before the first put.
type table struct {
	cells []uint32 // slot + 1; 0: empty
}

// home is the cell at which the search for id begins.
func (t *table) home(id uint64) int {
	// The finalizer of splitmix64: ids are often counted up.
	id = (id ^ id>>30) * 0xbf58476d1ce4e5b9
	id = (id ^ id>>27) * 0x94d049bb133111eb
	id ^= id >> 31
	hi, _ := bits.Mul64(id, uint64(len(t.cells)))
	return int(hi)
}

// cell is the index of the cell of id, or of the empty one in which the search ended.
func (t *table) cell(ids []uint64, id uint64) int {
	i := t.home(id)
	for t.cells[i] != 0 && ids[t.cells[i]-1] != id {
		if i++; i == len(t.cells) {
			i = 0
		}
	}
	return i
}

func (t *table) find(ids []uint64, id uint64) (slot uint32, ok bool) {
	if len(t.cells) == 0 {
		return 0, false
	}
	c := t.cells[t.cell(ids, id)]
	return c - 1, c != 0
}

// put adds slot, whose id is not there yet.
func (t *table) put(ids []uint64, slot uint32) { t.cells[t.cell(ids, ids[slot])] = slot + 1 }

// remove takes the slot of id out, if it is there, and closes the gap.
func (t *table) remove(ids []uint64, id uint64) {
	n := len(t.cells)
	gap := t.cell(ids, id)
	for i := gap; t.cells[gap] != 0; {
		if i++; i == n {
			i = 0
		}
		if t.cells[i] == 0 {
			t.cells[gap] = 0
			return
		}
		// What lies at i may move to the gap unless its home is behind the gap.
		if home := t.home(ids[t.cells[i]-1]); (i-home+n)%n >= (i-gap+n)%n {
			t.cells[gap] = t.cells[i]
			gap = i
		}
	}
}

// grow makes room for so many slots.
func (t *table) grow(ids []uint64, slots int) {
	old := t.cells
	t.cells = make([]uint32, slots+slots/4+1)
	for _, c := range old {
		if c != 0 {
			t.put(ids, c-1)
		}
	}
}
