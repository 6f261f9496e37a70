package vec

// The plain Go of all kernels: what runs where no assembly does, and the reference that the
// assembly of whole numbers must equal. Four sums at a time keep the adders busy.

func dotGo(a, b []float32) float32 {
	var s0, s1, s2, s3 float32
	b = b[:len(a)]
	i := 0
	for ; i+4 <= len(a); i += 4 {
		x, y := a[i:i+4:i+4], b[i:i+4:i+4]
		s0 += x[0] * y[0]
		s1 += x[1] * y[1]
		s2 += x[2] * y[2]
		s3 += x[3] * y[3]
	}
	for ; i < len(a); i++ {
		s0 += a[i] * b[i]
	}
	return (s0 + s2) + (s1 + s3)
}

func dotsGo(dst, q, rows []float32) {
	for i := range dst {
		dst[i] = dotGo(q, rows[i*len(q):][:len(q)])
	}
}

func dotsAtGo(dst, q, base []float32, ids []uint32) {
	for i, id := range ids {
		dst[i] = dotGo(q, base[int(id)*len(q):][:len(q)])
	}
}

func dotI8Go(a, b []int8) int32 {
	var s0, s1, s2, s3 int32
	b = b[:len(a)]
	i := 0
	for ; i+4 <= len(a); i += 4 {
		x, y := a[i:i+4:i+4], b[i:i+4:i+4]
		s0 += int32(x[0]) * int32(y[0])
		s1 += int32(x[1]) * int32(y[1])
		s2 += int32(x[2]) * int32(y[2])
		s3 += int32(x[3]) * int32(y[3])
	}
	for ; i < len(a); i++ {
		s0 += int32(a[i]) * int32(b[i])
	}
	return s0 + s1 + s2 + s3
}

func dotsI8Go(dst []int32, q, rows []int8) {
	for i := range dst {
		dst[i] = dotI8Go(q, rows[i*len(q):][:len(q)])
	}
}

func dotsAtI8Go(dst []int32, q, base []int8, ids []uint32) {
	for i, id := range ids {
		dst[i] = dotI8Go(q, base[int(id)*len(q):][:len(q)])
	}
}
