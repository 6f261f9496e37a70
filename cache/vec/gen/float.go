package main

import (
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// floatRows generates a kernel of inner products of one vector with many rows, one by one:
// several at a time were slower, as the rows come from beyond the caches of the core.
// Whatever the width, number i of a row goes to sum i modulo 64, those
// behind the last 16 to 16 + i, and the sums are added in one order: so the results are the
// same to the bit for AVX2 and AVX-512.
func floatRows(name string, rowOf func(*job) reg.VecVirtual, scattered bool) {
	begin(name, "float32", "float32", scattered)
	j := &job{name: name, q: build.Load(build.Param("q"), build.GP64())}
	dst := build.Load(build.Param("dst"), build.GP64())
	n := build.Load(build.Param("n"), build.GP64())
	j.shape(n, 16, 4, 4)
	eachRow(j, n, dst, scattered, func() reg.VecVirtual { return rowOf(j) })
}

// rowOfFloat512 has four sums of 16 lanes for each row.
func rowOfFloat512(j *job) reg.VecVirtual {
	var s [4]reg.VecVirtual
	for i := range s {
		s[i] = build.ZMM()
		build.VPXORD(s[i], s[i], s[i])
	}
	q := build.ZMM()
	j.blocks(func(offset reg.Register, i int) {
		build.VMOVUPS(at(j.q, offset, 64*i), q)
		build.VFMADD231PS(at(j.row, offset, 64*i), q, s[i])
		j.prefetch(offset, 64*i)
	})

	build.TESTQ(j.rest, j.rest)
	build.JZ(operand.LabelRef(j.name + "_sum"))
	mask, other := firstLanes(j.rest), build.ZMM()
	build.VMOVUPS_Z(at(j.q, j.full, 0), mask, q)
	build.VMOVUPS_Z(at(j.row, j.full, 0), mask, other)
	build.VFMADD231PS(other, q, s[1])

	build.Label(j.name + "_sum")
	build.VADDPS(s[1], s[0], s[0])
	build.VADDPS(s[3], s[2], s[2])
	build.VADDPS(s[2], s[0], s[0])
	build.VEXTRACTF64X4(operand.Imm(1), s[0], q.AsY())
	return lanes(s[0], q)
}

// rowOfFloat256 has eight sums of 8 lanes for its row.
func rowOfFloat256(j *job) reg.VecVirtual {
	var s [8]reg.VecVirtual
	for i := range s {
		s[i] = build.YMM()
		build.VXORPS(s[i], s[i], s[i])
	}
	q := build.YMM()
	half := func(offset reg.Register, i int) {
		build.VMOVUPS(at(j.q, offset, 32*i), q)
		build.VFMADD231PS(at(j.row, offset, 32*i), q, s[i])
	}
	j.blocks(func(offset reg.Register, i int) {
		half(offset, 2*i)
		half(offset, 2*i+1)
		j.prefetch(offset, 64*i)
	})

	// What is left may fill the first eight lanes, and of the next some are masked.
	build.TESTQ(j.rest, j.rest)
	build.JZ(operand.LabelRef(j.name + "_sum"))
	masks, mask, left, offset, other := build.GP64(), build.YMM(), gp(j.rest), gp(j.full), build.YMM()
	build.LEAQ(maskTable(), masks)
	for i := range 2 {
		// masks + 4·(16 − left): as many lanes as are left; none below zero
		index := build.GP64()
		build.MOVQ(operand.U32(16), index)
		build.SUBQ(left, index)
		build.VMOVUPS(operand.Mem{Base: masks, Index: index, Scale: 4}, mask)
		build.VMASKMOVPS(at(j.q, offset, 0), mask, q)
		build.VMASKMOVPS(at(j.row, offset, 0), mask, other)
		build.VFMADD231PS(other, q, s[2+i])
		if i == 0 {
			build.SUBQ(operand.Imm(8), left)
			build.JLE(operand.LabelRef(j.name + "_sum"))
			build.ADDQ(operand.Imm(32), offset)
		}
	}

	build.Label(j.name + "_sum")
	build.VADDPS(s[2], s[0], s[0])
	build.VADDPS(s[3], s[1], s[1])
	build.VADDPS(s[6], s[4], s[4])
	build.VADDPS(s[7], s[5], s[5])
	build.VADDPS(s[4], s[0], s[0])
	build.VADDPS(s[5], s[1], s[1])
	return lanes(s[0], s[1])
}

// lanes adds up the eight lanes of low and those of high, into low's first.
func lanes(low, high reg.VecVirtual) reg.VecVirtual {
	x := build.XMM()
	build.VADDPS(high.AsY(), low.AsY(), low.AsY())
	build.VEXTRACTF128(operand.Imm(1), low.AsY(), x)
	build.VADDPS(x, low.AsX(), low.AsX())
	build.VMOVHLPS(low.AsX(), low.AsX(), x)
	build.VADDPS(x, low.AsX(), low.AsX())
	build.VMOVSHDUP(low.AsX(), x)
	build.VADDSS(x, low.AsX(), low.AsX())
	return low
}
