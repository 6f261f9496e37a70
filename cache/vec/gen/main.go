// Command gen writes the assembly of cache/vec: `make generate` runs it.
package main

import (
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func main() {
	build.ConstraintExpr("amd64")
	masks()
	floatRows("dotsAVX512", rowOfFloat512, false)
	floatRows("dotsAtAVX512", rowOfFloat512, true)
	floatRows("dotsAVX2", rowOfFloat256, false)
	floatRows("dotsAtAVX2", rowOfFloat256, true)
	int8Rows512("dotsI8AVX512", false)
	int8Rows512("dotsAtI8AVX512", true)
	int8Rows256("dotsI8AVX2", false)
	int8Rows256("dotsAtI8AVX2", true)
	for rows := 1; rows <= 6; rows++ {
		mul512(rows, 4)
		mul512(rows, 1)
	}
	for rows := 1; rows <= 6; rows++ {
		mul256(rows)
	}
	scale("scaleAVX512", func() reg.VecVirtual { return build.ZMM() }, 64)
	scale("scaleAVX2", func() reg.VecVirtual { return build.YMM() }, 32)
	bounds("boundsAVX2")
	quantize("quantizeAVX2")
	geluConstants()
	gelu("geluAVX2")
	build.Generate()
}

// gp makes a copy of a register.
func gp(from reg.Register) reg.GPVirtual {
	to := build.GP64()
	build.MOVQ(from, to)
	return to
}

// at is the memory at base plus an index of bytes plus a constant.
func at(base reg.Register, index reg.Register, bytes int) operand.Mem {
	return operand.Mem{Base: base, Index: index, Scale: 1, Disp: bytes}
}

// other makes an instruction that avo does not know; the last of operands is read and written.
func other(opcode string, suffixes []string, isa string, operands ...operand.Op) {
	build.Instruction(&ir.Instruction{
		Opcode: opcode, Suffixes: suffixes, Operands: operands,
		Inputs: operands, Outputs: operands[len(operands)-1:], ISA: []string{isa},
	})
}

// maskTable is 16 lanes of ones and then 8 of zeros: 8 lanes from 16 − n are n of ones, from 8 − n for n > 8 eight.
func maskTable() operand.Mem {
	return operand.NewDataAddr(operand.Symbol{Name: "masks", Static: true}, 0)
}

// masks writes the data of maskTable.
func masks() {
	build.GLOBL("masks", build.RODATA|build.NOPTR)
	for i := range 24 {
		v := uint32(0)
		if i < 16 {
			v = 1<<32 - 1
		}
		build.DATA(4*i, operand.U32(v))
	}
}
