package main

import (
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// ahead is how many rows before its turn a row is fetched into the cache.
const ahead = 4

// job is what a kernel makes of one row and q.
type job struct {
	name string
	q    reg.Register
	row  reg.Register
	next reg.Register // the row that is fetched meanwhile; nil: none, as the processor foresees it

	block, many int          // bytes of a block, and how many are worked on at a time
	bulk        reg.Register // bytes of a row in so many blocks
	full        reg.Register // bytes of a row in blocks
	rest        reg.Register // numbers behind them
}

// shape splits rows of n numbers, each of some bytes, into blocks of so many, and makes n
// bytes.
func (j *job) shape(n reg.Register, numbers, bytes, many int) {
	j.block, j.many = numbers*bytes, many
	rest := gp(n)
	build.ANDQ(operand.Imm(uint64(numbers-1)), rest)
	if bytes > 1 {
		build.IMUL3Q(operand.Imm(uint64(bytes)), n, n)
	}
	bulk, full := gp(n), gp(n)
	build.ANDQ(operand.I32(-int32(j.block*many)), bulk)
	build.ANDQ(operand.I32(-int32(j.block)), full)
	j.bulk, j.full, j.rest = bulk, full, rest
}

// blocks runs step over many blocks at a time as long as there are so many, and then over
// the first as long as there is one. It gives the offset behind them.
func (j *job) blocks(step func(offset reg.Register, block int)) reg.Register {
	offset := build.GP64()
	build.XORQ(offset, offset)
	build.Label(j.name + "_bulk")
	build.CMPQ(offset, j.bulk)
	build.JGE(operand.LabelRef(j.name + "_full"))
	for i := range j.many {
		step(offset, i)
	}
	build.ADDQ(operand.I32(int32(j.many*j.block)), offset)
	build.JMP(operand.LabelRef(j.name + "_bulk"))
	build.Label(j.name + "_full")
	build.CMPQ(offset, j.full)
	build.JGE(operand.LabelRef(j.name + "_rest"))
	step(offset, 0)
	build.ADDQ(operand.Imm(uint64(j.block)), offset)
	build.JMP(operand.LabelRef(j.name + "_full"))
	build.Label(j.name + "_rest")
	return offset
}

func (j *job) prefetch(offset reg.Register, bytes int) {
	if j.next != nil && bytes%64 == 0 {
		build.PREFETCHT0(at(j.next, offset, bytes))
	}
}

// begin opens a kernel of one vector and many rows.
func begin(name, number, result string, scattered bool) {
	if scattered {
		build.TEXT(name, build.NOSPLIT, "func(dst *"+result+", q, base *"+number+", ids *uint32, n, count int)")
		build.Doc(name + " takes the rows of base that ids name, count of them, each of n numbers.")
	} else {
		build.TEXT(name, build.NOSPLIT, "func(dst *"+result+", q, base *"+number+", n, count int)")
		build.Doc(name + " takes count rows of n numbers.")
	}
	build.Pragma("noescape")
}

// eachRow sets j.row, and j.next where the rows are scattered, to one row after the other, and
// stores what rowOf makes of it; then it returns. stride is the size of a row in bytes.
func eachRow(j *job, stride, dst reg.Register, scattered bool, rowOf func() reg.VecVirtual) {
	base := build.Load(build.Param("base"), build.GP64())
	count := build.Load(build.Param("count"), build.GP64())
	var ids reg.Register
	if scattered {
		ids = build.Load(build.Param("ids"), build.GP64())
	}
	build.Label(j.name + "_row")
	build.TESTQ(count, count)
	build.JZ(operand.LabelRef(j.name + "_done"))
	j.row = base
	if scattered {
		// the row to fetch is the one that comes `ahead` later; where there is none, this one
		later := build.GP64()
		build.XORQ(later, later)
		build.CMPQ(count, operand.Imm(ahead))
		build.SETGT(later.As8())
		build.IMUL3Q(operand.Imm(4*ahead), later, later)
		j.row = rowAt(operand.Mem{Base: ids}, stride, base)
		j.next = rowAt(operand.Mem{Base: ids, Index: later, Scale: 1}, stride, base)
	}
	build.VMOVD(rowOf().AsX(), operand.Mem{Base: dst})
	build.ADDQ(operand.Imm(4), dst)
	if scattered {
		build.ADDQ(operand.Imm(4), ids)
	} else {
		build.ADDQ(stride, base)
	}
	build.DECQ(count)
	build.JMP(operand.LabelRef(j.name + "_row"))
	build.Label(j.name + "_done")
	build.VZEROUPPER()
	build.RET()
}

// rowAt is the address of the row whose id lies at id.
func rowAt(id operand.Mem, stride, base reg.Register) reg.Register {
	row := build.GP64()
	build.MOVL(id, row.As32())
	build.IMULQ(stride, row)
	build.ADDQ(base, row)
	return row
}

// firstLanes is a mask of as many bits as n says, up to 64.
func firstLanes(n reg.Register) reg.OpmaskVirtual {
	ones, mask := build.GP64(), build.K()
	build.MOVQ(operand.I32(-1), ones)
	build.BZHIQ(n, ones, ones)
	build.KMOVQ(ones, mask)
	return mask
}
