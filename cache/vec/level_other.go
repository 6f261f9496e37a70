//go:build !amd64

package vec

const present = plain

func (level) dots(dst, q, rows []float32)                 { dotsGo(dst, q, rows) }
func (level) dotsAt(dst, q, base []float32, ids []uint32) { dotsAtGo(dst, q, base, ids) }
