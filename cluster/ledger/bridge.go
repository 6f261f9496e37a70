package ledger

import (
	"errors"

	"github.com/hashicorp/raft"
)

// bridged is a log that, where it begins behind the newest snapshot, also shows that snapshot's
// last entry, of which only index and term are known. After a restore, or once a snapshot was
// taken over, the log holds nothing of before. Raft (v1.8.0) then compares the entry before a
// leader's first one with its log, not with its snapshot: a follower that has entries of an
// earlier leader there would refuse all that follow, and be sent the same snapshot for ever.
type bridged struct {
	raft.LogStore
	snapshots raft.SnapshotStore
}

// IsMonotonic passes on what the log says of itself.
func (b bridged) IsMonotonic() bool {
	m, ok := b.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// GetLog never gives the snapshot's entry to a leader that would replicate it: for that, raft
// first asks for the entry before it, which is not there.
func (b bridged) GetLog(index uint64, entry *raft.Log) error {
	missing := b.LogStore.GetLog(index, entry)
	if !errors.Is(missing, raft.ErrLogNotFound) {
		return missing
	}
	if first, err := b.LogStore.FirstIndex(); err != nil || first != 0 && first != index+1 {
		return missing
	}
	list, err := b.snapshots.List()
	if err != nil || len(list) == 0 || list[0].Index != index {
		return missing
	}
	*entry = raft.Log{Index: index, Term: list[0].Term, Type: raft.LogNoop}
	return nil
}

// dropCovered empties a log that ends before the newest snapshot, as raft does once it has taken
// a snapshot over: a crash came between, and what follows the snapshot would not fit.
func dropCovered(logs raft.LogStore, snapshots raft.SnapshotStore) error {
	list, err := snapshots.List()
	if err != nil || len(list) == 0 {
		return err
	}
	first, err := logs.FirstIndex()
	if err != nil {
		return err
	}
	last, err := logs.LastIndex()
	if err != nil || last == 0 || last >= list[0].Index {
		return err
	}
	return logs.DeleteRange(first, last)
}
