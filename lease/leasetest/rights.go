package leasetest

import (
	"slices"

	"headgate/lease"
)

// The times of view leases, as package cluster has them.
const (
	leaseFor     = 1000 * ms
	leaseCounts  = leaseFor * 98 / 100 // from the send of the request
	takeoverWait = leaseFor*102/100 + 50*ms
	askEvery     = 100 * ms
	askRetry     = 50 * ms
)

// rights is what a process may grant: a view lease (V1), and for each partition the wait (V4). It is
// modelled on cluster.Fence, which has a simulation of its own.
type rights struct {
	self    uint64
	noWait  bool // breaks V4
	epoch   uint64
	start   []int64 // by partition; never: not this process's
	since   []uint64
	stepped []int64 // when the view of since was stepped to
	waited  []bool  // its start came by waiting, not by a hand-off

	leaseEpoch uint64
	deadline   int64
}

var _ lease.Rights = (*rights)(nil)

func (r *rights) step(now int64, v *lease.View) {
	if v.Epoch <= r.epoch {
		return
	}
	follows := v.Epoch == r.epoch+1 && len(r.start) == len(v.Owners)
	start, since, waited, stepped := r.start, r.since, r.waited, r.stepped
	r.stepped = make([]int64, len(v.Owners))
	r.start, r.since, r.waited = make([]int64, len(v.Owners)), make([]uint64, len(v.Owners)), make([]bool, len(v.Owners))
	for p := range v.Owners {
		switch {
		case v.OwnerOf(uint32(p)).Incarnation != r.self:
			r.start[p] = never
		case follows && start[p] != never:
			r.start[p], r.since[p], r.waited[p], r.stepped[p] = start[p], since[p], waited[p], stepped[p]
		default:
			r.start[p], r.since[p], r.waited[p], r.stepped[p] = now+takeoverWait, v.Epoch, v.Epoch > 1, now
			if v.Epoch == 1 || r.noWait {
				r.start[p] = now
			}
		}
	}
	r.epoch = v.Epoch
}

// granted notes a view lease for epoch, asked for at sent.
func (r *rights) granted(sent, now int64, epoch uint64) bool {
	deadline := sent + leaseCounts
	if epoch == 0 || epoch > r.epoch || epoch < r.leaseEpoch || now >= deadline ||
		epoch == r.leaseEpoch && deadline <= r.deadline {
		return false
	}
	r.leaseEpoch, r.deadline = epoch, deadline
	return true
}

// Left implements lease.Rights.
func (r *rights) Left(now int64, partition uint32) int64 {
	if uint64(partition) >= uint64(len(r.start)) || r.start[partition] == never || now < r.start[partition] ||
		now >= r.deadline || r.since[partition] > r.leaseEpoch {
		return 0
	}
	return r.deadline - now
}

// Lease implements lease.Rights.
func (r *rights) Lease(now int64, epoch uint64) int64 {
	if r.epoch > epoch {
		return 0
	}
	return max(0, r.deadline-now)
}

// Started implements lease.Rights.
func (r *rights) Started(now int64, epoch uint64, partition uint32) {
	p := int(partition)
	if p < len(r.start) && r.since[p] == epoch && now < r.start[p] && r.start[p] != never {
		r.start[p], r.waited[p] = now, false
	}
}

// member says whether a process is in a view.
func member(v *lease.View, incarnation uint64) bool {
	return v != nil && slices.ContainsFunc(v.Members, func(m lease.Member) bool { return m.Incarnation == incarnation })
}
