package leasetest

import (
	"math/rand/v2"

	"headgate/lease"
)

// whim is a Sizer of no reason: what must hold must hold however much is lent to whom. It asks for more than there
// is, takes all back, and lends what nobody wants; once there is calm, it lends nothing.
type whim struct {
	rng  *rand.Rand
	calm *bool
}

func (x whim) Size(s *lease.Sight, i int) (share uint32, depth, grant, refuse int64) {
	if *x.calm {
		return 0, 0, 0, 0
	}
	capacity, h := s.Limit.Capacity(), &s.Holders[i]
	share, depth, grant = h.Share, h.Depth, 0
	switch x.rng.IntN(8) {
	case 0:
		return 0, 0, 0, 0
	case 1:
		share, depth = lease.ShareOne, capacity
	case 2:
		depth = x.rng.Int64N(capacity + 1)
	case 3:
		share = uint32(x.rng.Int64N(lease.ShareOne + 1))
	case 4:
		share, depth = lease.ShareOne/uint32(1+x.rng.IntN(4)), 1+capacity/int64(1+x.rng.IntN(4))
	}
	switch x.rng.IntN(4) {
	case 0:
		grant = x.rng.Int64N(capacity + 1)
	case 1:
		grant = depth
	case 2:
		grant = max(0, depth-h.Level)
	}
	if x.rng.IntN(10) == 0 {
		refuse = x.rng.Int64N(100 * ms)
	}
	return share, depth, grant, refuse
}

func (x whim) Recall(*lease.Sight, int, int64) bool { return *x.calm || x.rng.IntN(4) > 0 }
