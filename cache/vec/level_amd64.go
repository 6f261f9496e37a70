package vec

import "golang.org/x/sys/cpu"

// present is the best that this processor and its operating system have.
var present = detect() //nolint:gochecknoglobals // what the processor is, never changed

func detect() level {
	x := &cpu.X86
	switch {
	case x.HasAVX512F && x.HasAVX512BW && x.HasAVX512VL && x.HasAVX512DQ && x.HasAVX512VNNI && x.HasBMI2:
		return avx512
	case x.HasAVX2 && x.HasFMA && x.HasBMI2:
		return avx2
	default:
		return plain
	}
}

func (l level) dots(dst, q, rows []float32) {
	if len(dst) == 0 {
		return
	}
	if len(q) == 0 {
		clear(dst)
		return
	}
	switch l {
	case avx512:
		dotsAVX512(&dst[0], &q[0], &rows[0], len(q), len(dst))
	case avx2:
		dotsAVX2(&dst[0], &q[0], &rows[0], len(q), len(dst))
	default:
		dotsGo(dst, q, rows)
	}
}

func (l level) dotsAt(dst, q, base []float32, ids []uint32) {
	if len(dst) == 0 {
		return
	}
	if len(q) == 0 {
		clear(dst)
		return
	}
	switch l {
	case avx512:
		dotsAtAVX512(&dst[0], &q[0], &base[0], &ids[0], len(q), len(dst))
	case avx2:
		dotsAtAVX2(&dst[0], &q[0], &base[0], &ids[0], len(q), len(dst))
	default:
		dotsAtGo(dst, q, base, ids)
	}
}

func (l level) dotsI8(dst []int32, q, rows []int8) {
	if len(dst) == 0 {
		return
	}
	if len(q) == 0 {
		clear(dst)
		return
	}
	switch l {
	case avx512:
		dotsI8AVX512(&dst[0], &q[0], &rows[0], len(q), len(dst))
	case avx2:
		dotsI8AVX2(&dst[0], &q[0], &rows[0], len(q), len(dst))
	default:
		dotsI8Go(dst, q, rows)
	}
}

func (l level) dotsAtI8(dst []int32, q, base []int8, ids []uint32) {
	if len(dst) == 0 {
		return
	}
	if len(q) == 0 {
		clear(dst)
		return
	}
	switch l {
	case avx512:
		dotsAtI8AVX512(&dst[0], &q[0], &base[0], &ids[0], len(q), len(dst))
	case avx2:
		dotsAtI8AVX2(&dst[0], &q[0], &base[0], &ids[0], len(q), len(dst))
	default:
		dotsAtI8Go(dst, q, base, ids)
	}
}

// tileShape is how much of a product the registers hold.
func (l level) tileShape() (rows, panels int) {
	switch l {
	case avx512:
		return maxTileRows, maxTilePanels
	default:
		return maxTileRows, 1
	}
}

func (l level) tile(tile *sumsOfTile, x []int8, w []uint8, sums []int32, k int) {
	rows, wide := len(sums), len(w) > panelN*k
	switch {
	case l == plain:
		tileGo(tile, x, w, sums, k)
	case l == avx512 && wide:
		wideTile512(&tile[0], &x[0], &w[0], &sums[0], k, rows)
	case l == avx512:
		tile512(&tile[0], &x[0], &w[0], &sums[0], k, rows)
	default:
		tile256(&tile[0], &x[0], &w[0], &sums[0], k, rows)
	}
}

// wideTile512, tile512 and tile256 are switches, as what a kernel in a variable is given escapes.
func wideTile512(d *int32, x *int8, w *uint8, s *int32, k, rows int) {
	switch rows {
	case 1:
		mul1x4AVX512(d, x, w, s, k, 4*panelN)
	case 2:
		mul2x4AVX512(d, x, w, s, k, 4*panelN)
	case 3:
		mul3x4AVX512(d, x, w, s, k, 4*panelN)
	case 4:
		mul4x4AVX512(d, x, w, s, k, 4*panelN)
	case 5:
		mul5x4AVX512(d, x, w, s, k, 4*panelN)
	case 6:
		mul6x4AVX512(d, x, w, s, k, 4*panelN)
	}
}

func tile512(d *int32, x *int8, w *uint8, s *int32, k, rows int) {
	switch rows {
	case 1:
		mul1x1AVX512(d, x, w, s, k, 1*panelN)
	case 2:
		mul2x1AVX512(d, x, w, s, k, 1*panelN)
	case 3:
		mul3x1AVX512(d, x, w, s, k, 1*panelN)
	case 4:
		mul4x1AVX512(d, x, w, s, k, 1*panelN)
	case 5:
		mul5x1AVX512(d, x, w, s, k, 1*panelN)
	case 6:
		mul6x1AVX512(d, x, w, s, k, 1*panelN)
	}
}

func tile256(d *int32, x *int8, w *uint8, s *int32, k, rows int) {
	switch rows {
	case 1:
		mul1x1AVX2(d, x, w, s, k, panelN)
	case 2:
		mul2x1AVX2(d, x, w, s, k, panelN)
	case 3:
		mul3x1AVX2(d, x, w, s, k, panelN)
	case 4:
		mul4x1AVX2(d, x, w, s, k, panelN)
	case 5:
		mul5x1AVX2(d, x, w, s, k, panelN)
	case 6:
		mul6x1AVX2(d, x, w, s, k, panelN)
	}
}

func (l level) scale(dst []float32, sums []int32, c Columns, rowScale, rowZero float32) {
	whole := len(dst) / panelN
	if l == plain || whole == 0 {
		scaleGo(dst, sums, c, rowScale, rowZero)
		return
	}
	if l == avx512 {
		scaleAVX512(&dst[0], &sums[0], &c.Scale[0], &c.Sum[0], &c.Bias[0], rowScale, rowZero, whole)
	} else {
		scaleAVX2(&dst[0], &sums[0], &c.Scale[0], &c.Sum[0], &c.Bias[0], rowScale, rowZero, whole)
	}
	done := whole * panelN
	scaleGo(dst[done:], sums[done:], c.cut(done, len(dst)), rowScale, rowZero)
}

// The kernels of layers take whole blocks; they give how many numbers those have.

func (l level) boundsBlocks(x []float32, low, high *[8]float32) (done int) {
	blocks := len(x) / block
	if l == plain || blocks == 0 {
		return 0
	}
	boundsAVX2(&x[0], blocks, low, high)
	return blocks * block
}

func (l level) quantizeBlocks(dst []int8, x []float32, inverse, shift float32) (done int) {
	blocks := len(x) / block
	if l == plain || blocks == 0 {
		return 0
	}
	quantizeAVX2(&dst[0], &x[0], blocks, inverse, shift)
	return blocks * block
}

func (l level) geluBlocks(x []float32) (done int) {
	blocks := len(x) / block
	if l == plain || blocks == 0 {
		return 0
	}
	geluAVX2(&x[0], blocks)
	return blocks * block
}
