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
