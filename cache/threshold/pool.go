package threshold

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"sync"
)

// Cell is a class of evidence that the pool counts as one: a step of the similarity by a step of the vote.
type Cell uint32

const (
	simSteps  = 50 // of the similarity, .02 each
	voteSteps = 64 // of the vote, a quarter each
	voteFrom  = -4.0
	voteStep  = 0.25
	cells     = Cell(simSteps * voteSteps)
)

// cellOf is the cell of a similarity and a vote; what lies outside belongs to the nearest.
func cellOf(s, vote float64) Cell {
	x := min(max(int(s*simSteps), 0), simSteps-1)
	y := min(max(int(math.Floor((vote-voteFrom)/voteStep)), 0), voteSteps-1)
	return Cell(x*voteSteps + y)
}

// middle is the evidence that a cell stands for.
func (c Cell) middle() (s, vote float64) {
	return (float64(c/voteSteps) + 0.5) / simSteps, voteFrom + (float64(c%voteSteps)+0.5)*voteStep
}

// count is what was seen of a cell.
type count struct {
	seen     uint32 // questions
	labelled uint32 // of them
	same     uint32 // of these
}

func (c *count) add(o count) {
	c.seen, c.labelled, c.same = sum32(c.seen, o.seen), sum32(c.labelled, o.labelled), sum32(c.same, o.same)
}

func sum32(a, b uint32) uint32 { return uint32(min(uint64(a)+uint64(b), math.MaxUint32)) }

// sketch is counts by cell.
type sketch map[Cell]count

func (k sketch) addTo(to sketch) {
	for c, n := range k {
		sum := to[c]
		sum.add(n)
		to[c] = sum
	}
}

// maxLabels is how many labels a node keeps of a pool before it halves all counts: what is old counts less and less.
const maxLabels = 20_000

// Pool is what was observed of all entries of one (tenant, surface, embedder), as counts by Cell, and the model that is
// fitted to them. Its counts are sums: those of several nodes are added. Safe for concurrent use.
type Pool struct {
	mu     sync.Mutex
	own    sketch
	labels int // in own
	told   answers
	record records
	peers  map[string]sketch

	model  model
	fresh  int  // labels since the model was fitted
	stale  bool // a peer told something since
	bounds [2]float64
}

// NewPool is an empty one.
func NewPool() *Pool {
	return &Pool{own: sketch{}, peers: map[string]sketch{}, model: unlearned()}
}

// Seen counts a question whose evidence was of that cell, whatever was decided. A cell that no Decide gave counts nothing.
func (p *Pool) Seen(c Cell) {
	if p == nil || c >= cells {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count(c, count{seen: 1})
}

// Add counts a label: whether the candidate's answer was the answer. answer are names of the candidate's answer, its class
// first, then others such as a hash of its words; 0 is none. That it is the same says little where all answers are one, as an
// outage's or a refusal: of the right labels that count at most leastTold are of one name, on all nodes, or as many as a quarter of all labels.
// Wrong ones all count, the safe direction, but for those of an answer that is disowned.
func (p *Pool) Add(c Cell, same bool, answer ...uint64) {
	if p == nil || c >= cells {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	most := max(1, leastTold/(1+len(p.peers)), p.labels/partTold)
	often := slices.ContainsFunc(answer, func(a uint64) bool { return p.told.times(a) >= most })
	if s, _ := c.middle(); s >= floor && len(answer) > 0 {
		p.record.add(answer[0], same, p.told.times(answer[0]) >= most)
	}
	switch {
	case same && !often:
		for _, a := range answer {
			p.told.add(a)
		}
		p.count(c, count{labelled: 1, same: 1})
	case !same && !(len(answer) > 0 && p.record.disowned(answer[0])):
		p.count(c, count{labelled: 1})
	}
}

// disowned tells whether an answer that had more than its share of labels was mostly wrong of late: it is served to no
// other question, and its wrong labels are no longer the surface's, which has learned enough from them.
func (p *Pool) disowned(answer uint64) bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.record.disowned(answer)
}

// count adds to a cell. The caller holds mu.
func (p *Pool) count(c Cell, n count) {
	sum := p.own[c]
	sum.add(n)
	p.own[c] = sum
	p.labels += int(n.labelled)
	p.fresh += int(n.labelled)
	if p.labels > maxLabels {
		p.halve()
	}
}

// halve forgets half of everything.
func (p *Pool) halve() {
	p.labels = 0
	p.told.halve()
	for c, n := range p.own {
		n = count{n.seen / 2, n.labelled / 2, min(n.same/2, n.labelled/2)}
		if n == (count{}) {
			delete(p.own, c)
			continue
		}
		p.own[c] = n
		p.labels += int(n.labelled)
	}
}

// MaxSketch is the most bytes that Own returns and Hear reads.
const MaxSketch = 64 << 10

const sketchVersion = 1

// Own is what this node has counted, for others to Hear. At most MaxSketch bytes.
func (p *Pool) Own() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := []byte{sketchVersion}
	for _, c := range slices.Sorted(maps.Keys(p.own)) {
		n := p.own[c]
		b = binary.AppendUvarint(b, uint64(c))
		b = binary.AppendUvarint(b, uint64(n.seen))
		b = binary.AppendUvarint(b, uint64(n.labelled))
		b = binary.AppendUvarint(b, uint64(n.same))
	}
	return b
}

// readSketch is the sketch that Own wrote: cells in order, none twice.
func readSketch(b []byte) (sketch, error) {
	switch {
	case len(b) > MaxSketch:
		return nil, fmt.Errorf("sketch: %d bytes: above %d", len(b), MaxSketch)
	case len(b) == 0 || b[0] != sketchVersion:
		return nil, errors.New("sketch: of another version")
	}
	k, last := sketch{}, -1
	for b = b[1:]; len(b) > 0; {
		var v [4]uint64
		for i := range v {
			n := 0
			if v[i], n = binary.Uvarint(b); n <= 0 || v[i] > math.MaxUint32 {
				return nil, errors.New("sketch: it breaks off")
			}
			b = b[n:]
		}
		if v[0] >= uint64(cells) || int(v[0]) <= last || v[3] > v[2] {
			return nil, errors.New("sketch: cells out of order, or more right than labelled")
		}
		last = int(v[0])
		k[Cell(v[0])] = count{uint32(v[1]), uint32(v[2]), uint32(v[3])}
	}
	return k, nil
}

// MaxPeers is from how many peers a pool or a budget keeps what they told. Beyond, they are an error.
const MaxPeers = 64

// Hear replaces what the peer has last told. Anything but what Own returned is an error, and changes nothing.
func (p *Pool) Hear(peer string, told []byte) error {
	k, err := readSketch(told)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.peers[peer]; !known && len(p.peers) >= MaxPeers {
		return fmt.Errorf("sketch: more than %d peers", MaxPeers)
	}
	p.peers[peer], p.stale = k, true
	return nil
}

// Forget drops what the peer has told.
func (p *Pool) Forget(peer string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.peers, peer)
	p.stale = true
}

// Bytes is about what the pool takes in memory.
func (p *Pool) Bytes() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.own.bytes() + p.told.bytes() + p.record.bytes()
	for _, k := range p.peers {
		n += k.bytes()
	}
	return n
}

// bytes is what the map takes: its places are a power of two of which up to seven eighths are taken, of 16 bytes and two
// for control and what allocating them leaves over.
func (k sketch) bytes() int {
	const fixed, place = 128, 18
	return fixed + place<<bits.Len(uint(max(len(k)*8/7, 8)-1))
}

// current is the model for the policy's bounds, fitted anew where enough was learned since: a twelfth more labels, at
// least six.
func (p *Pool) current(hitBound, bound float64) model {
	if p == nil {
		return unlearned()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if want := [2]float64{hitBound, bound}; p.fresh >= max(6, p.model.labels/12) || p.stale || p.bounds != want {
		all := maps.Clone(p.own)
		for _, k := range p.peers {
			k.addTo(all)
		}
		p.model = fitModel(all, hitBound, bound)
		p.fresh, p.stale, p.bounds = 0, false, want
	}
	return p.model
}
