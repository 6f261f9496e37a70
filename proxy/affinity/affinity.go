package affinity

// MaxCandidates bounds the candidates that are put in order; those beyond it stay where they are.
const MaxCandidates = 64

// Candidate is an endpoint that may take a request.
type Candidate struct {
	ID       string
	Slots    int64 // its size beside the others; 0: unbounded, taken for as large as the largest
	Load     int64 // in flight there, in the unit of Slots, as far as is known
	Overflow bool  // used only where no other has room
}

// Query says what a request has in common with others. The zero value has nothing: then load alone decides.
type Query struct {
	// Session is the hash of what the client said belongs together (prompt_cache_key), 0 where it said nothing. It goes
	// before the prefix.
	Session uint64
	// Root is the hash of how the conversation begins, 0 where it is not known: see openai.Prefix.
	Root uint64
	// Chain are the hashes of ever longer beginnings of the prompt, the shortest first. It may be empty.
	Chain []uint64
}

// Router puts candidates in order. It is safe for concurrent use.
type Router struct{ cfg Config }

// Config is how a router works. The zero value is a good one.
type Config struct {
	// Bound is how far above the mean an endpoint's load may be and still be preferred for its cache; 0: the default.
	Bound float64
}

// New makes a router.
func New(cfg Config) *Router { return &Router{cfg: cfg} }

// Order puts the indices of cs into order, the first to be tried first, and appends them to order, which it returns. It
// neither keeps nor changes cs.
func (r *Router) Order(order []int, q *Query, cs []Candidate) []int {
	for i := range cs {
		order = append(order, i)
	}
	return order
}

// Placed tells where a request went, once it has a slot there.
func (r *Router) Placed(q *Query, id string) {}

// Session makes Query.Session of a prompt_cache_key. seed keeps apart whose caches are apart: the model and the tenant's
// cache salt, say.
func Session(seed uint64, key string) uint64 { return 0 }
