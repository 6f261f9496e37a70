package threshold

// Budget holds one (tenant, surface, embedder) to its two bounds, by audits: a random share of would-be hits is asked
// of the model, and compared. Safe for concurrent use.
type Budget struct{}

// NewBudget is one for the policy's bounds.
func NewBudget(p *Policy) *Budget { return &Budget{} }

// Configure takes over other bounds; what was counted stays.
func (b *Budget) Configure(p *Policy) {}

// Allowed tells whether hits may be served: no bound is surely exceeded, or has been kept long enough since.
func (b *Budget) Allowed() bool { return true }

// Count counts a question by what became of it in the end.
func (b *Budget) Count(a Action) {}

// Label counts what the audit of a would-be hit (Action Audit) found. Labels of explored questions are none of the budget's.
func (b *Budget) Label(same bool) {}

// Wrong counts a served hit that somebody reported.
func (b *Budget) Wrong() {}

// Own is what this node has counted, for others to Hear. At most MaxTold bytes.
func (b *Budget) Own() []byte { return nil }

// MaxTold is the most bytes that Own returns and Hear reads.
const MaxTold = 4 << 10

// Hear replaces what the peer has last told. Anything but what Own returned is an error, and changes nothing.
func (b *Budget) Hear(peer string, told []byte) error { return nil }

// Forget drops what the peer has told.
func (b *Budget) Forget(peer string) {}

// Rate is a share, with the bounds between which it lies.
type Rate struct{ Estimate, Lower, Upper float64 }

// Snapshot is what is published.
type Snapshot struct {
	Requests, WouldHits, Served, Audited, Wrong, Reported int64
	PerRequest, PerHit                                    Rate
	Confidence                                            float64 // of the bounds, at any number of looks
	Tripped                                               bool
	Trips                                                 int64
	Why                                                   string // it tripped; "" otherwise
}

// Snapshot is the state of the whole cluster, as far as this node was told.
func (b *Budget) Snapshot() Snapshot { return Snapshot{} }
