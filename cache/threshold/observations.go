package threshold

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// MaxObservations is how many an entry keeps, the newest.
const MaxObservations = 64

// observation is one. Eight bytes, since an entry may keep many.
type observation struct {
	s    float32
	cell uint16 // of the pool
	same bool
}

// Observations is what was found out about one entry: how similar a question was, of which cell the evidence was, and
// whether the entry's answer was the answer to it. The zero value is empty. Not safe for concurrent use: it belongs to
// whoever holds the entry.
type Observations struct {
	all []observation // the oldest first

	fitted bool // fit is that of all
	fit    Fit
}

// Add appends one, and drops the oldest where there are too many. A similarity outside of [0, 1] counts as the nearest
// in it, since vCache's curve knows no other; one that is no number is left out, as is a cell that no Decide gave.
func (o *Observations) Add(s float64, c Cell, same bool) {
	if math.IsNaN(s) || c >= cells {
		return
	}
	if len(o.all) == MaxObservations {
		o.all = append(o.all[:0], o.all[1:]...)
	}
	o.all = append(o.all, observation{float32(min(max(s, 0), 1)), uint16(c), same})
	o.fitted = false
}

// Merge adds what another copy of the entry has observed; the newest of both are kept as if the other's were newer.
func (o *Observations) Merge(other *Observations) {
	for _, x := range other.all {
		o.Add(float64(x.s), Cell(x.cell), x.same)
	}
}

// Len is how many are kept; a nil receiver has none.
func (o *Observations) Len() int {
	if o == nil {
		return 0
	}
	return len(o.all)
}

// Bytes is what they take in memory beside the struct itself.
func (o *Observations) Bytes() int { return 8 * cap(o.all) }

// observationBytes is the length of one in its binary form: float32, cell with the label as its top bit.
const observationBytes = 6

// AppendBinary appends them in a form that UnmarshalBinary reads. It never fails.
func (o *Observations) AppendBinary(b []byte) ([]byte, error) {
	for _, x := range o.all {
		c := x.cell
		if x.same {
			c |= 1 << 15
		}
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x.s))
		b = binary.LittleEndian.AppendUint16(b, c)
	}
	return b, nil
}

// UnmarshalBinary takes what AppendBinary wrote; anything else is an error, and changes nothing. The input may come
// from a peer.
func (o *Observations) UnmarshalBinary(b []byte) error {
	if len(b)%observationBytes != 0 || len(b) > MaxObservations*observationBytes {
		return fmt.Errorf("observations: %d bytes: not %d or less of %d each", len(b), MaxObservations, observationBytes)
	}
	all := make([]observation, 0, len(b)/observationBytes)
	for ; len(b) > 0; b = b[observationBytes:] {
		s, c := math.Float32frombits(binary.LittleEndian.Uint32(b)), binary.LittleEndian.Uint16(b[4:])
		if !(s >= 0 && s <= 1) || Cell(c&^(1<<15)) >= cells {
			return errors.New("observations: a similarity or a cell that is none")
		}
		all = append(all, observation{s, c &^ (1 << 15), c>>15 == 1})
	}
	*o = Observations{all: all}
	return nil
}
