package threshold

// MaxObservations is how many an entry keeps, the newest.
const MaxObservations = 64

// Observations is what was found out about one entry: how similar a question was, and whether the entry's answer was
// the answer to it. The zero value is empty. Not safe for concurrent use: it belongs to whoever holds the entry.
type Observations struct {
	s    []float32
	same []bool
}

// Add appends one. A similarity outside of [-1, 1] counts as the nearest in it, one that is no number is left out.
func (o *Observations) Add(s float64, same bool) {}

// Len is how many are kept.
func (o *Observations) Len() int { return len(o.s) }

// Bytes is about what they take in memory.
func (o *Observations) Bytes() int { return 0 }

// AppendBinary appends them in a form that UnmarshalBinary reads. It never fails.
func (o *Observations) AppendBinary(b []byte) ([]byte, error) { return b, nil }

// UnmarshalBinary takes what AppendBinary wrote; anything else is an error, and changes nothing. The input may come from a peer.
func (o *Observations) UnmarshalBinary(b []byte) error { return nil }
