package vec

const (
	panelN = 16 // columns of the result that lie together in a panel
	panelK = 4  // numbers of each of them that follow one another
)

// Packed is a matrix of int8 weights in the order in which the kernels read it: panels of 16
// rows, in each panel 4 numbers of each row, then the next 4. A weight is kept as weight + 128,
// as VNNI multiplies unsigned by signed; Mul takes that off again. It never changes after Pack.
type Packed struct {
	n, k int
	w    []uint8
}

// Pack packs w, n rows of k numbers (out × in, as model files have them). k must be a
// multiple of 4. The packed matrix takes as many bytes, with n rounded up to 16, and shares none with w.
func Pack(w []int8, n, k int) *Packed {
	if n <= 0 || k <= 0 || k%panelK != 0 || len(w) != n*k {
		panic("vec: Pack wants n rows of k numbers, k a multiple of 4")
	}
	panels := (n + panelN - 1) / panelN
	p := &Packed{n: n, k: k, w: make([]uint8, panels*panelN*k)}
	for i := range p.w {
		p.w[i] = 128
	}
	for row := range n {
		panel := p.w[row/panelN*panelN*k:]
		for col, v := range w[row*k : (row+1)*k] {
			panel[col/panelK*panelN*panelK+row%panelN*panelK+col%panelK] = uint8(int(v) + 128)
		}
	}
	return p
}

// Shape is the number of rows and of columns that Pack was given.
func (p *Packed) Shape() (n, k int) { return p.n, p.k }

// Mul sets dst[i*n+j] to the inner product of row i of x and row j of the packed matrix:
// t rows of k in x, t rows of n in dst. Exact: sums of up to 65,536 products fit.
func (p *Packed) Mul(dst []int32, x []int8, t int) {
	if t < 0 || len(x) != t*p.k || len(dst) != t*p.n {
		panic("vec: Mul wants t rows of k and room for t rows of n")
	}
	mulGo(p, dst, x, t)
}

func mulGo(p *Packed, dst []int32, x []int8, t int) {
	for first := 0; first < p.n; first += panelN {
		panel := p.w[first*p.k:][:panelN*p.k]
		for i := range t {
			var sums [panelN]int32
			row := x[i*p.k:][:p.k]
			for c := 0; c < len(row); c += panelK {
				x0, x1, x2, x3 := int32(row[c]), int32(row[c+1]), int32(row[c+2]), int32(row[c+3])
				w := panel[c*panelN:][:panelN*panelK]
				for j := range sums {
					v := w[j*panelK:][:panelK]
					sums[j] += x0*(int32(v[0])-128) + x1*(int32(v[1])-128) + x2*(int32(v[2])-128) + x3*(int32(v[3])-128)
				}
			}
			copy(dst[i*p.n+first:(i+1)*p.n], sums[:])
		}
	}
}
