package main

import "slices"

// lru is a prefix cache of blocks, the ids of which are dense. As vLLM does, it gives up the block that was longest not used, of
// one request the last ones first.
type lru struct {
	size, most int
	prev, next []int32 // by id+1; 0 is both ends of the list, next[0] the newest
	in         []bool
}

func newLRU(most int, ids int32) *lru {
	return &lru{most: most, prev: make([]int32, ids+1), next: make([]int32, ids+1), in: make([]bool, ids+1)}
}

// use finds how many leading blocks are there, and puts all of them there.
func (c *lru) use(blocks []int32) (hits int) {
	for hits < len(blocks) && c.in[blocks[hits]+1] {
		hits++
	}
	for _, id := range slices.Backward(blocks) { // so that the first is the newest
		c.touch(id + 1)
	}
	return hits
}

func (c *lru) touch(id int32) {
	if c.in[id] {
		c.next[c.prev[id]], c.prev[c.next[id]] = c.next[id], c.prev[id]
	} else {
		c.in[id] = true
		c.size++
	}
	first := c.next[0]
	c.prev[id], c.next[id] = 0, first
	c.next[0], c.prev[first] = id, id
	if c.size > c.most {
		last := c.prev[0]
		c.prev[0] = c.prev[last]
		c.next[c.prev[last]] = 0
		c.in[last] = false
		c.size--
	}
}
