package ledger

import (
	"errors"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
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

// foundedAs is the cluster that a log from its beginning belongs to, nil where it does not say:
// raft applies nothing of it before there is a leader, and by then this node has told others
// what it is.
func foundedAs(logs raft.LogStore) ([]byte, error) {
	first, err := logs.FirstIndex()
	if err != nil || first != 1 {
		return nil, err // what is before is in a snapshot, which is applied at once
	}
	last, err := logs.LastIndex()
	if err != nil {
		return nil, err
	}
	for index := first; index <= last; index++ {
		var entry raft.Log
		if err := logs.GetLog(index, &entry); err != nil {
			return nil, err
		}
		var command ledgerpb.Command
		if entry.Type != raft.LogCommand || proto.Unmarshal(entry.Data, &command) != nil {
			continue
		}
		if id := command.GetFound().GetClusterId(); len(id) > 0 {
			return id, nil
		}
	}
	return nil, nil
}
