package vec

// level is which kernels run. Those of a level need all that its processors have: AVX-512 is
// here what Ice Lake and Zen 4 brought, with VNNI, as what came before slows down at it.
type level uint8

const (
	plain level = iota
	avx2
	avx512
)

func (l level) String() string { return [...]string{"plain", "avx2", "avx512"}[l] }

// Kernels names the kernels that run on this machine: plain, avx2 or avx512.
func Kernels() string { return present.String() }
