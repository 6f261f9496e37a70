package main

import (
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// int8Rows512 multiplies unsigned by signed, as VNNI does: a row is made unsigned by adding
// 128 to each number, which adds 128 times the sum of q to the result, and that is taken off.
func int8Rows512(name string, scattered bool) {
	begin(name, "int8", "int32", scattered)
	j := &job{name: name + "_q", q: build.Load(build.Param("q"), build.GP64())}
	dst := build.Load(build.Param("dst"), build.GP64())
	n := build.Load(build.Param("n"), build.GP64())
	j.shape(n, 64, 1, 2)
	mask, high, extra, row := firstLanes(j.rest), build.ZMM(), build.ZMM(), build.ZMM()
	bits := build.GP32()
	build.MOVL(operand.U32(0x80808080), bits)
	build.VPBROADCASTD(bits, high)
	build.VPXORD(extra, extra, extra)
	j.blocks(func(offset reg.Register, i int) {
		multiplyAdd(at(j.q, offset, 64*i), high, extra)
	})
	q := build.ZMM()
	build.VMOVDQU8_Z(at(j.q, j.full, 0), mask, q)
	multiplyAdd(q, high, extra)

	j.name = name
	eachRow(j, n, dst, scattered, func() reg.VecVirtual {
		s := [2]reg.VecVirtual{build.ZMM(), build.ZMM()}
		for i := range s {
			build.VPXORD(s[i], s[i], s[i])
		}
		j.blocks(func(offset reg.Register, i int) {
			build.VPXORD(at(j.row, offset, 64*i), high, row)
			multiplyAdd(at(j.q, offset, 64*i), row, s[i])
			j.prefetch(offset, 64*i)
		})
		// where nothing is left the mask is empty: a masked load touches no memory then
		build.VMOVDQU8_Z(at(j.row, j.full, 0), mask, row)
		build.VPXORD(row, high, row)
		multiplyAdd(q, row, s[1])
		build.VPADDD(s[1], s[0], s[0])
		build.VPSUBD(extra, s[0], s[0])
		build.VEXTRACTI64X4(operand.Imm(1), s[0], row.AsY())
		build.VPADDD(row.AsY(), s[0].AsY(), s[0].AsY())
		return int32Lanes(s[0])
	})
}

// multiplyAdd adds the products of four signed and four unsigned bytes to each lane of sum.
func multiplyAdd(signed, unsigned, sum operand.Op) {
	other("VPDPBUSD", nil, "AVX512VNNI", signed, unsigned, sum)
}

// int8Rows256 widens both to 16 bits: multiplying bytes would saturate.
func int8Rows256(name string, scattered bool) {
	begin(name, "int8", "int32", scattered)
	j := &job{name: name, q: build.Load(build.Param("q"), build.GP64())}
	dst := build.Load(build.Param("dst"), build.GP64())
	n := build.Load(build.Param("n"), build.GP64())
	j.shape(n, 16, 1, 4)
	eachRow(j, n, dst, scattered, func() reg.VecVirtual {
		s := [2]reg.VecVirtual{build.YMM(), build.YMM()}
		for i := range s {
			build.VPXOR(s[i], s[i], s[i])
		}
		row, q := build.YMM(), build.YMM()
		offset := j.blocks(func(offset reg.Register, i int) {
			build.VPMOVSXBW(at(j.q, offset, 16*i), q)
			build.VPMOVSXBW(at(j.row, offset, 16*i), row)
			build.VPMADDWD(row, q, q)
			build.VPADDD(q, s[i%2], s[i%2])
			j.prefetch(offset, 16*i)
		})
		sum, x, y := build.GP32(), build.GP32(), build.GP32()
		build.XORL(sum, sum)
		build.Label(j.name + "_one")
		build.CMPQ(offset, n)
		build.JGE(operand.LabelRef(j.name + "_sum"))
		build.MOVBLSX(at(j.q, offset, 0), x)
		build.MOVBLSX(at(j.row, offset, 0), y)
		build.IMULL(y, x)
		build.ADDL(x, sum)
		build.INCQ(offset)
		build.JMP(operand.LabelRef(j.name + "_one"))

		build.Label(j.name + "_sum")
		build.VPADDD(s[1], s[0], s[0])
		build.VMOVD(sum, q.AsX())
		build.VPADDD(q, s[0], s[0])
		return int32Lanes(s[0])
	})
}

// int32Lanes adds up eight lanes into the first.
func int32Lanes(s reg.VecVirtual) reg.VecVirtual {
	x := build.XMM()
	build.VEXTRACTI128(operand.Imm(1), s.AsY(), x)
	build.VPADDD(x, s.AsX(), s.AsX())
	build.VPSHUFD(operand.Imm(0b01001110), s.AsX(), x)
	build.VPADDD(x, s.AsX(), s.AsX())
	build.VPSHUFD(operand.Imm(0b10110001), s.AsX(), x)
	build.VPADDD(x, s.AsX(), s.AsX())
	return s
}
