//go:build !amd64

package vec

const present = plain

func (level) dots(dst, q, rows []float32)                 { dotsGo(dst, q, rows) }
func (level) dotsAt(dst, q, base []float32, ids []uint32) { dotsAtGo(dst, q, base, ids) }

func (level) dotsI8(dst []int32, q, rows []int8)                 { dotsI8Go(dst, q, rows) }
func (level) dotsAtI8(dst []int32, q, base []int8, ids []uint32) { dotsAtI8Go(dst, q, base, ids) }

func (level) tileShape() (rows, panels int) { return maxTileRows, 1 }

func (level) tile(tile *sumsOfTile, x []int8, w []uint8, sums []int32, k int) {
	tileGo(tile, x, w, sums, k)
}

func (level) scale(dst []float32, sums []int32, c Columns, rowScale, rowZero float32) {
	scaleGo(dst, sums, c, rowScale, rowZero)
}

func (level) boundsBlocks([]float32, *[8]float32, *[8]float32) (done int)   { return 0 }
func (level) quantizeBlocks([]int8, []float32, float32, float32) (done int) { return 0 }
func (level) geluBlocks([]float32) (done int)                               { return 0 }
