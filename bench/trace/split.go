package trace

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// Split says whose requests are whose. The zero value leaves that to the trace.
type Split struct {
	Tenants int     // how many; 0: those that the trace names
	Skew    float64 // the i-th gets each session with a weight of 1/i^Skew
	Seed    uint64
}

// maxSkew is where all but the first have nothing.
const maxSkew = 10

// ParseSplit reads what people write: "file", "even:20", "zipf:20" or, with another skew than 1, "zipf:20:1.2".
func ParseSplit(s string, seed uint64) (Split, error) {
	words := strings.Split(s, ":")
	wrong := fmt.Errorf("%q is no split into tenants: write file, even:20, zipf:20 or zipf:20:1.2", s)
	split := Split{Seed: seed}
	switch kind := words[0]; {
	case kind == "file" && len(words) == 1:
		return Split{}, nil
	case kind == "even" && len(words) == 2:
	case kind == "zipf" && (len(words) == 2 || len(words) == 3):
		split.Skew = 1
	default:
		return Split{}, wrong
	}
	var err error
	if split.Tenants, err = strconv.Atoi(words[1]); err != nil {
		return Split{}, wrong
	}
	if len(words) == 3 {
		if split.Skew, err = strconv.ParseFloat(words[2], 64); err != nil {
			return Split{}, wrong
		}
	}
	if split.Tenants < 1 {
		return Split{}, wrong
	}
	return split, split.Validate()
}

// Validate says what is wrong with a split.
func (s Split) Validate() error {
	switch {
	case s.Tenants < 0 || s.Tenants > MaxTenants:
		return fmt.Errorf("%d tenants: it must be from 1 to %d", s.Tenants, MaxTenants)
	case !(s.Skew >= 0 && s.Skew <= maxSkew):
		return fmt.Errorf("a skew of %v: it must be from 0 (all alike) to %d", s.Skew, maxSkew)
	}
	return nil
}

// String is what ParseSplit reads.
func (s Split) String() string {
	switch {
	case s.Tenants == 0:
		return "file"
	case s.Skew == 0:
		return fmt.Sprintf("even:%d", s.Tenants)
	case s.Skew == 1:
		return fmt.Sprintf("zipf:%d", s.Tenants)
	}
	return fmt.Sprintf("zipf:%d:%v", s.Tenants, s.Skew)
}

// sentence states the split, for a report.
func (s Split) sentence() string {
	weight := "with the same chance each"
	if s.Skew > 0 {
		weight = fmt.Sprintf("the i-th with a weight of 1/i^%v", s.Skew)
	}
	return fmt.Sprintf("each session to one of %d tenants, %s, seed %d", s.Tenants, weight, s.Seed)
}

// By returns the trace with its requests split: a session as a whole belongs to one tenant, t1, t2 and so on, drawn by
// the seed, so that the same seed splits in the same way. A tenant may get nothing. Sessions are the tenants that the
// trace names (they are then put together), Mooncake's conversations, and otherwise single requests.
func (t *Trace) By(s Split) (*Trace, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	if s.Tenants == 0 {
		if t.Tenants == nil {
			return nil, errors.New("the trace names no tenants: say how many it is split into, such as zipf:20")
		}
		return t, nil
	}
	split := *t
	split.Split = s.sentence()
	split.Tenants = make([]string, s.Tenants)
	upTo := make([]float64, s.Tenants)
	sum := 0.0
	for i := range upTo {
		split.Tenants[i] = "t" + strconv.Itoa(i+1)
		sum += math.Pow(float64(i+1), -s.Skew)
		upTo[i] = sum
	}
	split.Requests = slices.Clone(t.Requests)
	draw := rand.New(rand.NewPCG(s.Seed, 2))
	var of []int32 // by session, which are numbered by their first appearance
	for i := range split.Requests {
		r := &split.Requests[i]
		for int(r.Session) >= len(of) {
			k, _ := slices.BinarySearch(upTo, draw.Float64()*sum)
			of = append(of, int32(min(k, s.Tenants-1)))
		}
		r.Tenant = of[r.Session]
	}
	return &split, nil
}
