package cluster

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"headgate/cluster/ledger"
)

// resendEvery is the pause before a leader sends again what a follower did not take.
const resendEvery = 100 * time.Millisecond

var errStalled = errors.New("this leader's disk hangs")

// resending is raft's transport with one patience: raft (v1.8.0) doubles its pause with every call
// that a follower does not answer, up to ten seconds, and so a node that comes back after a long cut
// would hear of a kill switch so much later. Here such a call is made again until it is answered, for as
// long as this node leads in that term and the follower is a member. And a leader whose disk hangs
// sends nothing, so that the others elect another: raft's heartbeats do not wait for its disk.
type resending struct {
	*raft.NetworkTransport
	ledger atomic.Pointer[ledger.Ledger] // nil until it is open
}

// AppendEntries see raft.Transport. What it sends twice changes a follower once.
func (t *resending) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	heartbeat := args.PrevLogEntry == 0 && args.PrevLogTerm == 0 && len(args.Entries) == 0 && args.LeaderCommitIndex == 0
	for {
		err := errStalled
		if l := t.ledger.Load(); l == nil || !l.Stalled() {
			err = t.NetworkTransport.AppendEntries(id, target, args, resp)
		}
		if err == nil || heartbeat || !t.replicates(id, args.Term) {
			return err
		}
		time.Sleep(resendEvery)
		*resp = raft.AppendEntriesResponse{}
	}
}

// replicates says whether this node leads in that term and has a follower of that id.
func (t *resending) replicates(id raft.ServerID, term uint64) bool {
	l := t.ledger.Load()
	if l == nil || !l.IsLeader() || l.Stats().Term != term {
		return false
	}
	for _, s := range l.Members() {
		if s.ID == id {
			return true
		}
	}
	return false
}
