package leasetest

import (
	"math/bits"
	"unsafe"
)

func mix(h, x uint64) uint64 {
	hi, lo := bits.Mul64(h^x^0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9)
	return hi ^ lo
}

func mixBytes(h uint64, b []byte) uint64 {
	for len(b) >= 8 {
		if x := *(*uint64)(unsafe.Pointer(&b[0])); x != 0 {
			h = mix(h, x^uint64(len(b))<<32)
		}
		b = b[8:]
	}
	for _, x := range b {
		h = mix(h, uint64(x))
	}
	return h
}

func zero(b []byte) bool {
	for len(b) >= 8 {
		if *(*uint64)(unsafe.Pointer(&b[0])) != 0 {
			return false
		}
		b = b[8:]
	}
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
