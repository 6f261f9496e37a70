package embed

import (
	"math"

	"headgate/cache/vec"
)

// pass is what one Embed needs besides the weights: the word pieces of its texts, and the
// numbers between the steps of the model. Those grow to what a pass needs and are used again.
// Products of numbers are rounded before they are added, by float32(…), so that machines with and
// without a fused multiply-add give the same.
type pass struct {
	ids  []uint16 // of all texts
	ends []int    // of each text in ids

	x     []float32 // the residual stream: a row for each word piece
	quant []int8    // rows that go into a product
	worth vec.Rows  // what those numbers are worth
	y     []float32 // what comes out of a product
	head  attentionHead
}

// attentionHead is the queries, keys and values of one text in one head.
type attentionHead struct {
	q, k  []float32 // rows of word pieces
	v     []float32 // rows of values: transposed
	probs []float32
	out   []float32
}

func (p *pass) start() {
	p.ids, p.ends = p.ids[:0], p.ends[:0]
}

// tokenize appends a text and says how many word pieces it has, at most one more than the window.
func (p *pass) tokenize(tok *tokenizer, text string) int {
	before := len(p.ids)
	p.ids = tok.append(p.ids, text, builtinWindow)
	p.ends = append(p.ends, len(p.ids))
	return len(p.ids) - before
}

func (p *pass) begin(text int) int {
	if text == 0 {
		return 0
	}
	return p.ends[text-1]
}

// next is the end of the texts, from first on, that go through the model together.
func (p *pass) next(first int) int {
	next := first + 1
	for next < len(p.ends) && p.ends[next]-p.begin(first) <= builtinPass {
		next++
	}
	return next
}

// run sets out to the means of the model's last layer over each of the texts.
func (p *pass) run(w *weights, first, next int, out []float32) {
	base := p.begin(first)
	rows := p.ends[next-1] - base
	p.grow(rows)
	for text := first; text < next; text++ {
		for i, id := range p.ids[p.begin(text):p.ends[text]] {
			at := p.begin(text) - base + i
			w.word(p.x[at*builtinDim:(at+1)*builtinDim], int(id), i)
		}
	}
	for i := range w.layers {
		p.layer(&w.layers[i], first, next, rows)
	}
	for text := first; text < next; text++ {
		mean := out[(text-first)*builtinDim:][:builtinDim]
		from, to := p.begin(text)-base, p.ends[text]-base
		for row := from; row < to; row++ {
			for j, v := range p.x[row*builtinDim : (row+1)*builtinDim] {
				mean[j] += v
			}
		}
	}
}

func (p *pass) grow(rows int) {
	if cap(p.x) < rows*builtinDim {
		p.x = make([]float32, rows*builtinDim)
		p.quant = make([]int8, rows*modelInner)
		p.worth = vec.Rows{Scale: make([]float32, rows), Zero: make([]float32, rows)}
		p.y = make([]float32, rows*modelInner)
	}
	p.x = p.x[:rows*builtinDim]
	p.worth = vec.Rows{Scale: p.worth.Scale[:rows], Zero: p.worth.Zero[:rows]}
}

// word sets x to the embedding of a word piece at a position of its text.
func (w *weights) word(x []float32, id, position int) {
	scale := w.wordScales[id]
	row := w.words[id*builtinDim : (id+1)*builtinDim]
	at := w.positions[position*builtinDim : (position+1)*builtinDim]
	for i := range x {
		x[i] = float32(float32(int8(row[i]))*scale) + at[i]
	}
	w.norm.apply(x)
}

func (p *pass) layer(l *layer, first, next, rows int) {
	y := p.multiply(&l.attention, p.x, rows, builtinDim)
	base := p.begin(first)
	for text := first; text < next; text++ {
		from, to := p.begin(text)-base, p.ends[text]-base
		for h := range modelHeads {
			p.head.run(y[from*3*builtinDim:to*3*builtinDim], h, to-from)
		}
	}
	// The result of each head has taken the place of its queries.
	for row := range rows {
		p.quantize(row, y[row*3*builtinDim:][:builtinDim])
	}
	p.addNormed(p.product(&l.merge, rows), l.mergeNorm)

	y = p.multiply(&l.widen, p.x, rows, builtinDim)
	vec.Gelu(y)
	p.addNormed(p.multiply(&l.narrow, y, rows, modelInner), l.outNorm)
}

// multiply is the linear step of rows rows of k numbers. The result lasts until the next.
func (p *pass) multiply(l *linear, x []float32, rows, k int) []float32 {
	for row := range rows {
		p.quantize(row, x[row*k:(row+1)*k])
	}
	return p.product(l, rows)
}

// quantize puts x into a row of what goes into a product.
func (p *pass) quantize(row int, x []float32) {
	p.worth.Scale[row], p.worth.Zero[row] = vec.QuantizeI8(p.quant[row*len(x):(row+1)*len(x)], x)
}

// product is the linear step of the rows that were quantised.
func (p *pass) product(l *linear, rows int) []float32 {
	n, k := l.packed.Shape()
	y := p.y[:rows*n]
	l.packed.Linear(y, p.quant[:rows*k], p.worth, l.worth)
	return y
}

// addNormed adds y to the residual stream and normalises that.
func (p *pass) addNormed(y []float32, norm layerNorm) {
	x := p.x
	y = y[:len(x)]
	for i, v := range y {
		x[i] += v
	}
	for ; len(x) > 0; x = x[builtinDim:] {
		norm.apply(x[:builtinDim])
	}
}

// run attends in one head: y has a row of all queries, keys and values for each word piece of
// one text. The results go where the queries were.
func (a *attentionHead) run(y []float32, head, rows int) {
	a.gather(y, head, rows)
	probs, out := a.probs[:rows], a.out[:modelHead]
	for row := range rows {
		vec.Dots(probs, a.q[row*modelHead:(row+1)*modelHead], a.k)
		total := softmax(probs)
		vec.Dots(out, probs, a.v)
		to := y[row*3*builtinDim+head*modelHead:][:modelHead]
		for i, v := range out {
			to[i] = v / total
		}
	}
}

func (a *attentionHead) gather(y []float32, head, rows int) {
	size := rows * modelHead
	if cap(a.q) < size {
		a.q, a.k, a.v = make([]float32, size), make([]float32, size), make([]float32, size)
		a.probs, a.out = make([]float32, rows), make([]float32, modelHead)
	}
	a.q, a.k, a.v = a.q[:size], a.k[:size], a.v[:size]
	for row := range rows {
		from := y[row*3*builtinDim+head*modelHead:]
		copy(a.q[row*modelHead:(row+1)*modelHead], from)
		copy(a.k[row*modelHead:(row+1)*modelHead], from[builtinDim:])
		for i, v := range from[2*builtinDim:][:modelHead] {
			a.v[i*rows+row] = v
		}
	}
}

// apply sets x to its deviations from the mean by their standard deviation, weighed and shifted.
func (n *layerNorm) apply(x []float32) {
	var s0, s1, s2, s3 float32
	for i := 0; i+4 <= len(x); i += 4 {
		v := x[i : i+4 : i+4]
		s0, s1, s2, s3 = s0+v[0], s1+v[1], s2+v[2], s3+v[3]
	}
	mean := (s0 + s1 + s2 + s3) / float32(len(x))
	s0, s1, s2, s3 = 0, 0, 0, 0
	for i := 0; i+4 <= len(x); i += 4 {
		v := x[i : i+4 : i+4]
		d0, d1, d2, d3 := v[0]-mean, v[1]-mean, v[2]-mean, v[3]-mean
		s0, s1, s2, s3 = s0+float32(d0*d0), s1+float32(d1*d1), s2+float32(d2*d2), s3+float32(d3*d3)
	}
	scale := float32(1 / math.Sqrt(float64((s0+s1+s2+s3)/float32(len(x)))+1e-12))
	weight, bias := n.weight[:len(x)], n.bias[:len(x)]
	for i, v := range x {
		x[i] = float32((v-mean)*scale*weight[i]) + bias[i]
	}
}
