package ledger

import (
	"fmt"

	"headgate/limiter"
)

// Share is a node's part of every limit while limits are split between the members of a
// view: that of the member at place Rank, from 0, of Of members. The zero value and
// Share{Of: 1} are the whole. The shares of all ranks add up to the limit, exactly.
type Share struct {
	Rank, Of int
	// Least is the part that every rank holds at least, whatever Rank: for a member whose
	// share changes, until nobody spends by the shares of before.
	Least bool
}

func (s Share) validate() error {
	if s.Rank < 0 || s.Of < 0 || s.Of > maxMembers || s.Rank >= max(s.Of, 1) {
		return fmt.Errorf("no share of a limit: rank %d of %d members, of at most %d", s.Rank, s.Of, maxMembers)
	}
	return nil
}

// part is floor(n·(rank+1)/of) − floor(n·rank/of): the parts of n add up to it. The least
// of them is floor(n/of).
func (s Share) part(n int64) int64 {
	of, rank := int64(s.Of), int64(s.Rank)
	whole, rest := n/of, n%of // so that no product overflows
	if s.Least {
		return whole
	}
	return whole + rest*(rank+1)/of - rest*rank/of
}

// split makes a valid limit this node's part of it, and says whether that is nothing; then the
// limit stays what it was. Counts are split by part. A rate is divided between those that
// hold some of the burst: where there are fewer units of it than members, the others would waste theirs.
func (s Share) split(l *limiter.Limit) (none bool) {
	if s.Of <= 1 {
		return false
	}
	largest, _ := Share{Rank: s.Of - 1, Of: s.Of}.of(*l) // rounded up, and so never nothing
	if largest.Validate() != nil {                       // so slow (36 years to fill) that a part can't be reckoned with
		return s.Rank > 0 || s.Least
	}
	part, none := s.of(*l)
	if !none {
		*l = part
		l.Parts = int32(s.Of)
	}
	return none
}

func (s Share) of(l limiter.Limit) (part limiter.Limit, none bool) {
	switch l.Algorithm {
	case limiter.Semaphore:
		l.Burst = s.part(l.Burst)
		return l, l.Burst == 0
	case limiter.GCRA:
		l.Rate = fraction{1, min(int64(s.Of), l.Burst)}.ofRate(l.Rate)
		l.Burst = s.part(l.Burst)
		return l, l.Burst == 0
	}
	l.Rate.Count, l.Burst = s.part(l.Rate.Count), 0
	return l, l.Rate.Count == 0
}
