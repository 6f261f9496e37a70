package main

import (
	"math"

	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// each runs step for every block of 64 bytes of float32: count of them, at least one.
func each(step func(offset reg.Register)) {
	count := build.Load(build.Param("blocks"), build.GP64())
	offset := build.GP64()
	build.XORQ(offset, offset)
	build.Label("block")
	step(offset)
	build.ADDQ(operand.Imm(64), offset)
	build.DECQ(count)
	build.JNZ(operand.LabelRef("block"))
}

// bounds finds the least and the greatest of blocks of 16 numbers, eight lanes of each.
func bounds(name string) {
	build.TEXT(name, build.NOSPLIT, "func(x *float32, blocks int, low, high *[8]float32)")
	build.Pragma("noescape")
	build.Doc(name + " lowers low to the least and raises high to the greatest in each of eight lanes of blocks of 16.")
	x := build.Load(build.Param("x"), build.GP64())
	lowAt := build.Load(build.Param("low"), build.GP64())
	highAt := build.Load(build.Param("high"), build.GP64())
	var low, high [2]reg.VecVirtual
	for i := range low {
		low[i], high[i] = build.YMM(), build.YMM()
		build.VMOVUPS(operand.Mem{Base: lowAt}, low[i])
		build.VMOVUPS(operand.Mem{Base: highAt}, high[i])
	}
	v := build.YMM()
	each(func(offset reg.Register) {
		for i := range low {
			build.VMOVUPS(at(x, offset, 32*i), v)
			build.VMINPS(v, low[i], low[i])
			build.VMAXPS(v, high[i], high[i])
		}
	})
	build.VMINPS(low[1], low[0], low[0])
	build.VMAXPS(high[1], high[0], high[0])
	build.VMOVUPS(low[0], operand.Mem{Base: lowAt})
	build.VMOVUPS(high[0], operand.Mem{Base: highAt})
	build.VZEROUPPER()
	build.RET()
}

// quantize rounds x · inverse + shift to bytes, 16 at a time, to even and within their range.
func quantize(name string) {
	build.TEXT(name, build.NOSPLIT, "func(dst *int8, x *float32, blocks int, inverse, shift float32)")
	build.Pragma("noescape")
	build.Doc(name + " rounds x · inverse + shift to bytes, in blocks of 16.")
	dst := build.Load(build.Param("dst"), build.GP64())
	x := build.Load(build.Param("x"), build.GP64())
	inverse, shift := build.YMM(), build.YMM()
	broadcast("inverse", inverse)
	broadcast("shift", shift)
	v := [2]reg.VecVirtual{build.YMM(), build.YMM()}
	each(func(offset reg.Register) {
		for i := range v {
			build.VMULPS(at(x, offset, 32*i), inverse, v[i])
			build.VADDPS(shift, v[i], v[i])
			build.VCVTPS2DQ(v[i], v[i])
		}
		// packing works within halves: the quarters come out as 0, 2, 1, 3
		build.VPACKSSDW(v[1], v[0], v[0])
		build.VPERMQ(operand.Imm(0b11011000), v[0], v[0])
		build.VEXTRACTI128(operand.Imm(1), v[0], v[1].AsX())
		build.VPACKSSWB(v[1].AsX(), v[0].AsX(), v[0].AsX())
		build.VMOVDQU(v[0].AsX(), operand.Mem{Base: dst})
		build.ADDQ(operand.Imm(16), dst)
	})
	build.VZEROUPPER()
	build.RET()
}

// The Gaussian error linear unit, x · Φ(x), with Φ(x) = ½ + x · P(x²)/Q(x²) for |x| ≤ 5.25; plain.go
// has the same numbers.
var (
	geluP = []float32{0.39894214272499084, 0.033619675785303116, 0.004672061186283827, 0.00016767121269367635, 6.463330464612227e-06, 2.370860308076317e-08}
	geluQ = []float32{1, 0.2509371340274811, 0.02853626199066639, 0.0018774372292682528, 7.389755774056539e-05, 1.2335411838648724e-06}
)

const geluEdge = 5.25

// geluConstants writes the numbers of the unit, each in eight lanes.
func geluConstants() {
	build.GLOBL("gelu", build.RODATA|build.NOPTR)
	numbers := append(append([]float32{}, geluP...), geluQ...)
	for i, c := range append(numbers, geluEdge, -geluEdge, .5) {
		for lane := range 8 {
			build.DATA(32*i+4*lane, operand.U32(math.Float32bits(c)))
		}
	}
}

func gelu(name string) {
	build.TEXT(name, build.NOSPLIT, "func(x *float32, blocks int)")
	build.Pragma("noescape")
	build.Doc(name + " applies the Gaussian error linear unit to blocks of 16.")
	x, constants := build.Load(build.Param("x"), build.GP64()), build.GP64()
	build.LEAQ(operand.NewDataAddr(operand.Symbol{Name: "gelu", Static: true}, 0), constants)
	constant := func(i int) operand.Mem { return operand.Mem{Base: constants, Disp: 32 * i} }
	edge, lowest, half := constant(len(geluP)+len(geluQ)), constant(len(geluP)+len(geluQ)+1), constant(len(geluP)+len(geluQ)+2)
	each(func(offset reg.Register) {
		for i := range 2 {
			v, c, u, p, q := build.YMM(), build.YMM(), build.YMM(), build.YMM(), build.YMM()
			build.VMOVUPS(at(x, offset, 32*i), v)
			build.VMINPS(edge, v, c)
			build.VMAXPS(lowest, c, c)
			build.VMULPS(c, c, u)
			polynomial(u, p, 0, len(geluP), constant)
			polynomial(u, q, len(geluP), len(geluQ), constant)
			build.VDIVPS(q, p, p)
			build.VMULPS(c, p, p)
			build.VADDPS(half, p, p)
			build.VMULPS(v, p, p)
			build.VCMPPS(operand.Imm(14), lowest, v, q) // greater than: all ones
			build.VANDPS(q, p, p)
			build.VMOVUPS(p, at(x, offset, 32*i))
		}
	})
	build.VZEROUPPER()
	build.RET()
}

// polynomial evaluates the n coefficients from first at u, into sum.
func polynomial(u, sum reg.VecVirtual, first, n int, constant func(int) operand.Mem) {
	build.VMOVUPS(constant(first+n-1), sum)
	for i := n - 2; i >= 0; i-- {
		build.VMULPS(u, sum, sum)
		build.VADDPS(constant(first+i), sum, sum)
	}
}
