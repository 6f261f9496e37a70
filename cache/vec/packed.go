package vec

const (
	panelN = 16 // rows of w, columns of the result that lie together in a panel
	panelK = 4  // numbers of each of them that follow one another
)

// Packed is a matrix of int8 weights in the order in which the kernels read it: panels of 16
// rows, in each panel 4 numbers of each row, then the next 4. A weight is kept as weight + 128,
// as VNNI multiplies unsigned by signed; Mul takes that off again. It never changes after Pack.
type Packed struct {
	n, k int
	w    []uint8
	ones []int8 // k of them: the sum of a row is its product with them
}

// Pack packs w, n rows of k numbers (out × in, as model files have them). k must be a
// multiple of 4. The packed matrix takes as many bytes, with n rounded up to 16, and shares none with w.
func Pack(w []int8, n, k int) *Packed {
	if n <= 0 || k <= 0 || k%panelK != 0 || len(w) != n*k {
		panic("vec: Pack wants n rows of k numbers, k a multiple of 4")
	}
	panels := (n + panelN - 1) / panelN
	p := &Packed{n: n, k: k, w: make([]uint8, panels*panelN*k), ones: make([]int8, k)}
	for i := range p.w {
		p.w[i] = 128
	}
	for i := range p.ones {
		p.ones[i] = 1
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
// The weights are read once for every 48 rows of x.
func (p *Packed) Mul(dst []int32, x []int8, t int) {
	if t < 0 || len(x) != t*p.k || len(dst) != t*p.n {
		panic("vec: Mul wants t rows of k and room for t rows of n")
	}
	present.mul(p, x, t, &product{sums: dst})
}

// Rows says what the numbers of each row of x are worth: Scale·x + Zero.
type Rows struct{ Scale, Zero []float32 }

// Columns says of each row of the packed matrix, a column of the result, what its numbers are worth,
// Scale·w; their sum, Scale·Σw; and what is added.
type Columns struct{ Scale, Sum, Bias []float32 }

func (c Columns) cut(from, end int) Columns {
	return Columns{c.Scale[from:end], c.Sum[from:end], c.Bias[from:end]}
}

// Linear is Mul with what the sums are worth, a layer of a model:
//
//	dst[i*n+j] = (sum · (rows.Scale[i] · columns.Scale[j]) + rows.Zero[i] · columns.Sum[j]) + columns.Bias[j]
//
// with every step rounded to float32, so that all machines have the same. There are as many rows as
// scales of them.
func (p *Packed) Linear(dst []float32, x []int8, rows Rows, columns Columns) {
	t := len(rows.Scale)
	if len(x) != t*p.k || len(dst) != t*p.n || len(rows.Zero) != t {
		panic("vec: Linear wants rows of k, room for as many rows of n, and a scale and a zero for each")
	}
	if len(columns.Scale) != p.n || len(columns.Sum) != p.n || len(columns.Bias) != p.n {
		panic("vec: Linear wants a scale, a sum and a bias for each of n columns")
	}
	present.mul(p, x, t, &product{numbers: dst, rows: rows, columns: columns})
}

// product is where the result goes: sums, or numbers with their scales.
type product struct {
	sums    []int32
	numbers []float32
	rows    Rows
	columns Columns
}

const (
	maxTileRows   = 6
	maxTilePanels = 4
	// chunkRows of x are multiplied by a panel while that is in the caches of the core.
	chunkRows = 48
)

// sumsOfTile is what a tile leaves behind: its rows, one behind the other.
type sumsOfTile [maxTileRows * maxTilePanels * panelN]int32

func (l level) mul(p *Packed, x []int8, t int, to *product) {
	var tile sumsOfTile
	var sums [chunkRows]int32
	maxRows, maxPanels := l.tileShape()
	panels := len(p.w) / (panelN * p.k)
	for first := 0; first < t; first += chunkRows {
		rows := min(chunkRows, t-first)
		chunk := x[first*p.k:][:rows*p.k]
		l.dotsI8(sums[:rows], p.ones, chunk)
		tiles := (rows + maxRows - 1) / maxRows
		for panel := 0; panel < panels; {
			wide := maxPanels
			if panels-panel < wide {
				wide = 1
			}
			w := p.w[panel*panelN*p.k:][:wide*panelN*p.k]
			for i := range tiles { // of like sizes
				from, end := rows*i/tiles, rows*(i+1)/tiles
				l.tile(&tile, chunk[from*p.k:end*p.k], w, sums[from:end], p.k)
				l.put(p, to, &tile, first+from, end-from, panel*panelN, wide*panelN)
			}
			panel += wide
		}
	}
}

// put takes rows of a tile to where they belong: from row and col, columns beyond the last left out.
func (l level) put(p *Packed, to *product, tile *sumsOfTile, row, rows, col, cols int) {
	n := min(cols, p.n-col)
	for i := range rows {
		sums, at := tile[i*cols:][:n], (row+i)*p.n+col
		if to.sums != nil {
			copy(to.sums[at:], sums)
			continue
		}
		l.scale(to.numbers[at:][:n], sums, to.columns.cut(col, col+n), to.rows.Scale[row+i], to.rows.Zero[row+i])
	}
}

// tileGo is the plain Go of a tile of one panel; as the kernels do, it takes the weights as
// they lie, and what is too much by the sums of the rows of x.
func tileGo(tile *sumsOfTile, x []int8, w []uint8, sums []int32, k int) {
	for i, sum := range sums {
		row, dst := x[i*k:][:k], (*[panelN]int32)(tile[i*panelN:])
		for j := range dst {
			dst[j] = -128 * sum
		}
		for c := 0; c < len(row); c += panelK {
			x0, x1, x2, x3 := int32(row[c]), int32(row[c+1]), int32(row[c+2]), int32(row[c+3])
			block := (*[panelN * panelK]uint8)(w[c*panelN:])
			for j := range dst {
				v := block[j*panelK:][:panelK]
				dst[j] += x0*int32(v[0]) + x1*int32(v[1]) + x2*int32(v[2]) + x3*int32(v[3])
			}
		}
	}
}

// scaleGo rounds every step: a product that is converted is never fused with a sum.
func scaleGo(dst []float32, sums []int32, c Columns, rowScale, rowZero float32) {
	for i, sum := range sums {
		scaled := float32(float32(sum) * float32(rowScale*c.Scale[i]))
		shifted := float32(scaled + float32(rowZero*c.Sum[i]))
		dst[i] = shifted + c.Bias[i]
	}
}
