package main

import (
	"strconv"

	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// job is one block of rows: their inner products with q go into the returned registers.
type job struct {
	name  string
	q     reg.Register
	rows  []reg.Register
	next  []reg.Register // what is fetched meanwhile; nil: nothing, as the processor foresees it
	bulk  reg.Register   // bytes of a row in blocks of 64 numbers
	full  reg.Register   // bytes of a row in blocks of 16 numbers
	rest  reg.Register   // numbers behind them
	mask  reg.Register   // AVX-512: a bit for each of those
	masks [2]reg.Register
}

// floatRows generates a kernel of inner products of one vector with many rows: `many` rows at
// a time, then one by one. Whatever the width, number i of a row goes to sum i modulo 64, those
// behind the last 16 to 16 + i, and the sums are added in one order: so the results are the
// same to the bit for AVX2 and AVX-512, and for a row alone and a row among others.
func floatRows(name string, rowsOf func(*job) []reg.VecVirtual, many int, scattered bool) {
	signature := "func(dst, q, rows *float32, n, count int)"
	if scattered {
		signature = "func(dst, q, base *float32, ids *uint32, n, count int)"
	}
	build.TEXT(name, build.NOSPLIT, signature)
	build.Pragma("noescape")
	if scattered {
		build.Doc(name + " is Dots of the rows of base that ids name, count of them, and nothing is checked.")
	} else {
		build.Doc(name + " is Dots of count rows of n numbers.")
	}
	j := &job{name: name, q: build.Load(build.Param("q"), build.GP64())}
	dst := build.Load(build.Param("dst"), build.GP64())
	n := build.Load(build.Param("n"), build.GP64())
	count := build.Load(build.Param("count"), build.GP64())
	shape(j, n)
	stride := gp(n)
	build.SHLQ(operand.Imm(2), stride)

	f := &feed{scattered: scattered, stride: stride, count: count}
	if scattered {
		f.base = build.Load(build.Param("base"), build.GP64())
		f.ids = build.Load(build.Param("ids"), build.GP64())
	} else {
		f.base = build.Load(build.Param("rows"), build.GP64())
	}
	for _, size := range []int{many, 1} {
		label := name + "_by" + strconv.Itoa(size)
		build.Label(label)
		build.CMPQ(count, operand.Imm(uint64(size)))
		build.JLT(operand.LabelRef(label + "_done"))
		j.name = label
		j.rows, j.next = f.take(label, size)
		for i, sum := range rowsOf(j) {
			build.VMOVSS(sum.AsX(), operand.Mem{Base: dst, Disp: 4 * i})
		}
		build.ADDQ(operand.Imm(uint64(4*size)), dst)
		f.advance(size)
		build.JMP(operand.LabelRef(label))
		build.Label(label + "_done")
		if many == 1 {
			break
		}
	}
	build.VZEROUPPER()
	build.RET()
}

// shape splits rows of n numbers into blocks.
func shape(j *job, n reg.Register) {
	bulk, full, rest := gp(n), gp(n), gp(n)
	build.ANDQ(operand.I32(^63), bulk)
	build.SHLQ(operand.Imm(2), bulk)
	build.ANDQ(operand.I32(^15), full)
	build.SHLQ(operand.Imm(2), full)
	build.ANDQ(operand.Imm(15), rest)
	j.bulk, j.full, j.rest = bulk, full, rest
}

// feed says where the rows are.
type feed struct {
	scattered         bool
	base, ids, stride reg.Register
	count             reg.Register // of rows left
}

// take gives the next rows, and those to fetch meanwhile.
func (f *feed) take(label string, size int) (rows, next []reg.Register) {
	if !f.scattered {
		rows = append(rows, f.base)
		for i := 1; i < size; i++ {
			row := gp(rows[i-1])
			build.ADDQ(f.stride, row)
			rows = append(rows, row)
		}
		return rows, nil
	}
	for i := range size {
		rows = append(rows, f.row(operand.Mem{Base: f.ids, Disp: 4 * i}))
	}
	for i := range size {
		// the row that comes `ahead` after this one, or this one again where there is none
		index := build.GP64()
		build.XORQ(index, index)
		far := build.GP64()
		build.MOVQ(operand.U32(4*(ahead+i)), far)
		build.CMPQ(f.count, operand.Imm(uint64(ahead+i)))
		build.CMOVQGT(far, index)
		next = append(next, f.row(operand.Mem{Base: f.ids, Index: index, Scale: 1}))
	}
	return rows, next
}

// row is the address of the row whose id lies at m.
func (f *feed) row(m operand.Mem) reg.Register {
	row := build.GP64()
	build.MOVL(m, row.As32())
	build.IMULQ(f.stride, row)
	build.ADDQ(f.base, row)
	return row
}

func (f *feed) advance(size int) {
	if f.scattered {
		build.ADDQ(operand.Imm(uint64(4*size)), f.ids)
	} else {
		for range size {
			build.ADDQ(f.stride, f.base)
		}
	}
	build.SUBQ(operand.Imm(uint64(size)), f.count)
}

func prefetch(j *job, offset reg.Register, bytes int) {
	for _, next := range j.next {
		build.PREFETCHT0(at(next, offset, bytes))
	}
}

// rowsOfFloat512 has four sums of 16 lanes for each row.
func rowsOfFloat512(j *job) []reg.VecVirtual {
	sums := make([][4]reg.VecVirtual, len(j.rows))
	for r := range sums {
		for s := range sums[r] {
			sums[r][s] = build.ZMM()
			build.VPXORD(sums[r][s], sums[r][s], sums[r][s])
		}
	}
	q := build.ZMM()
	step := func(offset reg.Register, s int) {
		build.VMOVUPS(at(j.q, offset, 64*s), q)
		for r, row := range j.rows {
			build.VFMADD231PS(at(row, offset, 64*s), q, sums[r][s])
		}
		prefetch(j, offset, 64*s)
	}
	blocks(j, step)

	build.TESTQ(j.rest, j.rest)
	build.JZ(operand.LabelRef(j.name + "_sum"))
	ones, mask, row := build.GP64(), build.K(), build.ZMM()
	build.MOVQ(operand.I32(-1), ones)
	build.BZHIQ(j.rest, ones, ones)
	build.KMOVW(ones.As32(), mask)
	build.VMOVUPS_Z(at(j.q, j.full, 0), mask, q)
	for r := range j.rows {
		build.VMOVUPS_Z(at(j.rows[r], j.full, 0), mask, row)
		build.VFMADD231PS(row, q, sums[r][1])
	}

	build.Label(j.name + "_sum")
	results := make([]reg.VecVirtual, len(j.rows))
	high := build.ZMM()
	for r := range sums {
		s := sums[r]
		build.VADDPS(s[1], s[0], s[0])
		build.VADDPS(s[3], s[2], s[2])
		build.VADDPS(s[2], s[0], s[0])
		build.VEXTRACTF64X4(operand.Imm(1), s[0], high.AsY())
		results[r] = lanes(s[0], high, func(i, y, x operand.Op) { build.VEXTRACTF32X4(i, y, x) })
	}
	return results
}

// rowsOfFloat256 has eight sums of 8 lanes for its row.
func rowsOfFloat256(j *job) []reg.VecVirtual {
	row := j.rows[0]
	var s [8]reg.VecVirtual
	for i := range s {
		s[i] = build.YMM()
		build.VXORPS(s[i], s[i], s[i])
	}
	q := build.YMM()
	half := func(offset reg.Register, i int) {
		build.VMOVUPS(at(j.q, offset, 32*i), q)
		build.VFMADD231PS(at(row, offset, 32*i), q, s[i])
	}
	blocks(j, func(offset reg.Register, i int) {
		half(offset, 2*i)
		half(offset, 2*i+1)
		prefetch(j, offset, 64*i)
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
		build.VMASKMOVPS(at(row, offset, 0), mask, other)
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
	return []reg.VecVirtual{lanes(s[0], s[1], build.VEXTRACTF128)}
}

// blocks runs step over the four blocks of 16 numbers in 64, as long as there are 64, and
// then over the first as long as there are 16.
func blocks(j *job, step func(offset reg.Register, block int)) {
	offset := build.GP64()
	build.XORQ(offset, offset)
	build.Label(j.name + "_bulk")
	build.CMPQ(offset, j.bulk)
	build.JGE(operand.LabelRef(j.name + "_full"))
	for i := range 4 {
		step(offset, i)
	}
	build.ADDQ(operand.I32(256), offset)
	build.JMP(operand.LabelRef(j.name + "_bulk"))
	build.Label(j.name + "_full")
	build.CMPQ(offset, j.full)
	build.JGE(operand.LabelRef(j.name + "_rest"))
	step(offset, 0)
	build.ADDQ(operand.Imm(64), offset)
	build.JMP(operand.LabelRef(j.name + "_full"))
	build.Label(j.name + "_rest")
}

// lanes adds up the eight lanes of low and those of high, into low's first. Only extract
// reaches the upper registers of AVX-512, or is there without it.
func lanes(low, high reg.VecVirtual, extract func(i, y, x operand.Op)) reg.VecVirtual {
	x := build.XMM()
	build.VADDPS(high.AsY(), low.AsY(), low.AsY())
	extract(operand.Imm(1), low.AsY(), x)
	build.VADDPS(x, low.AsX(), low.AsX())
	build.VMOVHLPS(low.AsX(), low.AsX(), x)
	build.VADDPS(x, low.AsX(), low.AsX())
	build.VMOVSHDUP(low.AsX(), x)
	build.VADDSS(x, low.AsX(), low.AsX())
	return low
}
