package live

import (
	benchlease "headgate/bench/lease"
	"headgate/lease"
)

// asking is the policy without leases.
const asking = "each request asks"

// Policies are the names of those policies of the benchmark that InProcess runs: they are Headgate's protocol, with another lease.Sizer each.
func Policies() (names []string) {
	for _, p := range benchlease.Policies() {
		if _, ok := sizerOf(&benchlease.Cell{Mean: 1, Nodes: 1}, p.Name); ok {
			names = append(names, p.Name)
		}
	}
	return names
}

// sizerOf is the Sizer of a policy; nil is Headgate's own.
func sizerOf(c *benchlease.Cell, policy string) (s lease.Sizer, ok bool) {
	n := float64(c.Nodes)
	switch policy {
	case benchlease.Headgate:
		return nil, true
	case asking:
		return none{}, true
	case "blocks of 5 requests":
		return lease.FixedBlocks(int64(5 * c.Mean)), true
	case "blocks of 50 requests":
		return lease.FixedBlocks(int64(50 * c.Mean)), true
	case "blocks of burst/4N":
		return lease.FixedBlocks(int64(float64(c.Limit.Burst) / 4 / n)), true
	case "blocks of burst/N":
		return lease.FixedBlocks(int64(float64(c.Limit.Burst) / n)), true
	}
	return nil, false
}

// none lends nothing: each request is the owner's to decide.
type none struct{}

// Size implements lease.Sizer.
func (none) Size(*lease.Sight, int) (share uint32, depth, grant, refuse int64) { return 0, 0, 0, 0 }

// Recall implements lease.Sizer.
func (none) Recall(*lease.Sight, int, int64) bool { return false }
