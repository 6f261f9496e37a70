package threshold

// Cell is a class of evidence that the pool counts as one.
type Cell uint32

// Pool is what was observed of all entries of one (tenant, surface, embedder), as counts by Cell, and the model that is
// fitted to them. Its counts are sums: those of several nodes are added. Safe for concurrent use.
type Pool struct{}

// NewPool is an empty one.
func NewPool() *Pool { return &Pool{} }

// Seen counts a question whose evidence was of that cell, whatever was decided.
func (p *Pool) Seen(c Cell) {}

// Add counts a label: whether the candidate's answer was the answer.
func (p *Pool) Add(c Cell, same bool) {}

// Own is what this node has counted, for others to Hear. At most MaxSketch bytes.
func (p *Pool) Own() []byte { return nil }

// MaxSketch is the most bytes that Own returns and Hear reads.
const MaxSketch = 256 << 10

// Hear replaces what the peer has last told. Anything but what Own returned is an error, and changes nothing.
func (p *Pool) Hear(peer string, told []byte) error { return nil }

// Forget drops what the peer has told.
func (p *Pool) Forget(peer string) {}
