package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// A panel holds 16 columns of the result: 4 numbers of each, then the next 4.
const panelN, panelK = 16, 4

// tile is the part of a product that stays in registers.
type tile struct {
	rows, panels int
	dst          reg.Register
	dstStride    reg.Register // bytes from a row of dst to the next
	x            [2]reg.Register
	w            reg.Register
	k            reg.Register // numbers of a row of x and of a column
	panel        [3]reg.Register
	sums         reg.Register
}

// newTile opens the kernel of a tile.
func newTile(width string, rows, panels int) *tile {
	name := fmt.Sprintf("mul%dx%d%s", rows, panels, width)
	build.TEXT(name, build.NOSPLIT, "func(dst *int32, x *int8, w *uint8, sums *int32, k, stride int)")
	build.Pragma("noescape")
	build.Doc(fmt.Sprintf("%s multiplies %d rows of x by %d panels of w. sums are those of the rows of x,", name, rows, panels),
		"stride is from one row of dst to the next, in numbers.")
	t := &tile{rows: rows, panels: panels}
	t.dst = build.Load(build.Param("dst"), build.GP64())
	t.x[0] = build.Load(build.Param("x"), build.GP64())
	t.w = build.Load(build.Param("w"), build.GP64())
	t.sums = build.Load(build.Param("sums"), build.GP64())
	t.k = build.Load(build.Param("k"), build.GP64())
	t.dstStride = build.Load(build.Param("stride"), build.GP64())
	build.SHLQ(operand.Imm(2), t.dstStride)
	if rows > 3 {
		t.x[1] = build.GP64()
		build.LEAQ(operand.Mem{Base: t.x[0], Index: t.k, Scale: 2}, t.x[1])
		build.ADDQ(t.k, t.x[1])
	}
	if panels > 1 {
		t.panel[0], t.panel[2] = gp(t.k), build.GP64()
		build.SHLQ(operand.Imm(4), t.panel[0])
		build.LEAQ(operand.Mem{Base: t.panel[0], Index: t.panel[0], Scale: 2}, t.panel[2])
	}
	return t
}

// rowOfX is where the next numbers of a row are.
func (t *tile) rowOfX(r int) operand.Mem {
	m := operand.Mem{Base: t.x[r/3]}
	if r%3 > 0 {
		m.Index, m.Scale = t.k, uint8(r%3)
	}
	return m
}

// panelOfW is where the next numbers of a panel are.
func (t *tile) panelOfW(p int) operand.Mem {
	m := operand.Mem{Base: t.w}
	switch p {
	case 1, 2:
		m.Index, m.Scale = t.panel[0], uint8(p)
	case 3:
		m.Index, m.Scale = t.panel[2], 1
	}
	return m
}

// loop runs step for every 4 numbers of a row.
func (t *tile) loop(label string, step func()) {
	left := gp(t.k)
	build.Label(label)
	step()
	for _, x := range t.x {
		if x != nil {
			build.ADDQ(operand.Imm(panelK), x)
		}
	}
	build.ADDQ(operand.Imm(panelN*panelK), t.w)
	build.SUBQ(operand.Imm(panelK), left)
	build.JNZ(operand.LabelRef(label))
}

// rewind is back where loop began.
func (t *tile) rewind() {
	for _, x := range t.x {
		if x != nil {
			build.SUBQ(t.k, x)
		}
	}
	panel := gp(t.k)
	build.SHLQ(operand.Imm(4), panel)
	build.SUBQ(panel, t.w)
}

// mul512 is a tile with VNNI, which multiplies unsigned weights by signed x. The weights are
// 128 too large, which the sums of x's rows take off.
func mul512(rows, panels int) {
	t := newTile("AVX512", rows, panels)
	acc := make([][]reg.VecVirtual, rows)
	for r := range acc {
		acc[r] = make([]reg.VecVirtual, panels)
		for p := range acc[r] {
			acc[r][p] = build.ZMM()
		}
		build.VPBROADCASTD(operand.Mem{Base: t.sums, Disp: 4 * r}, acc[r][0])
		build.VPSLLD(operand.Imm(7), acc[r][0], acc[r][0])
	}
	zero := build.ZMM()
	build.VPXORD(zero, zero, zero)
	for r := range acc {
		build.VPSUBD(acc[r][0], zero, acc[r][0])
		for p := 1; p < panels; p++ {
			build.VMOVDQA32(acc[r][0], acc[r][p])
		}
	}
	w := make([]reg.VecVirtual, panels)
	for p := range w {
		w[p] = build.ZMM()
	}
	x := zero
	t.loop("loop", func() {
		for p := range w {
			build.VMOVDQU8(t.panelOfW(p), w[p])
		}
		for r := range acc {
			build.VPBROADCASTD(t.rowOfX(r), x)
			for p := range w {
				multiplyAdd(x, w[p], acc[r][p])
			}
		}
	})
	for r := range acc {
		for p := range w {
			build.VMOVDQU32(acc[r][p], operand.Mem{Base: t.dst, Disp: 64 * p})
		}
		build.ADDQ(t.dstStride, t.dst)
	}
	build.VZEROUPPER()
	build.RET()
}

// mul256 is a tile of one panel without VNNI: both sides are widened to 16 bits, as to
// multiply bytes would saturate. The registers hold the sums of half of the columns of up to six
// rows, so the panel is gone through twice: it is in the nearest cache by then.
func mul256(rows int) {
	t := newTile("AVX2", rows, 1)
	acc := make([][2]reg.VecVirtual, rows)
	for r := range acc {
		acc[r] = [2]reg.VecVirtual{build.YMM(), build.YMM()}
	}
	w := [2]reg.VecVirtual{build.YMM(), build.YMM()}
	x, product := build.YMM(), build.YMM()
	dst := t.dst
	for half := range 2 {
		for r := range acc {
			for g := range w {
				build.VPXOR(acc[r][g], acc[r][g], acc[r][g])
			}
		}
		label := fmt.Sprintf("half%d", half)
		t.loop(label, func() {
			for g := range w {
				build.VPMOVZXBW(operand.Mem{Base: t.w, Disp: 32*half + 16*g}, w[g])
			}
			for r := range acc {
				build.VPBROADCASTD(t.rowOfX(r), x.AsX())
				build.VPMOVSXBW(x.AsX(), x)
				build.VPMADDWD(x, w[0], product)
				build.VPADDD(product, acc[r][0], acc[r][0])
				build.VPMADDWD(x, w[1], x)
				build.VPADDD(x, acc[r][1], acc[r][1])
			}
		})
		row := gp(dst)
		for r := range acc {
			// each column has two sums, in neighbouring lanes; that of x's row, times 128, is too much
			build.VPBROADCASTD(operand.Mem{Base: t.sums, Disp: 4 * r}, x)
			build.VPSLLD(operand.Imm(7), x, x)
			sum := acc[r][0]
			build.VPHADDD(acc[r][1], sum, sum)
			build.VPERMQ(operand.Imm(0b11011000), sum, sum)
			build.VPSUBD(x, sum, sum)
			build.VMOVDQU(sum, operand.Mem{Base: row, Disp: 32 * half})
			build.ADDQ(t.dstStride, row)
		}
		t.rewind()
	}
	build.VZEROUPPER()
	build.RET()
}

// scale makes numbers of the sums of one row of a product, 16 at a time:
// dst[i] = (float(sums[i]) · (rowScale · scale[i]) + rowZero · sum[i]) + bias[i], each step rounded, so that plain Go has the same.
func scale(name string, vector func() reg.VecVirtual, bytes int) {
	build.TEXT(name, build.NOSPLIT, "func(dst *float32, sums *int32, scale, sum, bias *float32, rowScale, rowZero float32, panels int)")
	build.Pragma("noescape")
	build.Doc(name + " makes numbers of the sums of a row of panels of 16.")
	dst := build.Load(build.Param("dst"), build.GP64())
	sums := build.Load(build.Param("sums"), build.GP64())
	scale := build.Load(build.Param("scale"), build.GP64())
	sum := build.Load(build.Param("sum"), build.GP64())
	bias := build.Load(build.Param("bias"), build.GP64())
	panels := build.Load(build.Param("panels"), build.GP64())
	row, zero, v, s := vector(), vector(), vector(), vector()
	broadcast("rowScale", row)
	broadcast("rowZero", zero)
	offset := build.GP64()
	build.XORQ(offset, offset)
	build.Label("panel")
	for i := 0; i < 64; i += bytes {
		build.VCVTDQ2PS(at(sums, offset, i), v)
		build.VMULPS(at(scale, offset, i), row, s)
		build.VMULPS(s, v, v)
		build.VMULPS(at(sum, offset, i), zero, s)
		build.VADDPS(s, v, v)
		build.VADDPS(at(bias, offset, i), v, v)
		build.VMOVUPS(v, at(dst, offset, i))
	}
	build.ADDQ(operand.Imm(64), offset)
	build.DECQ(panels)
	build.JNZ(operand.LabelRef("panel"))
	build.VZEROUPPER()
	build.RET()
}

// broadcast has a parameter in all lanes.
func broadcast(param string, to reg.VecVirtual) {
	p, err := build.Param(param).Resolve()
	if err != nil {
		panic(err)
	}
	build.VBROADCASTSS(p.Addr, to)
}
