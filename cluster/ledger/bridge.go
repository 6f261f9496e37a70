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

// bridge is what the entry holds that stands for a snapshot's last one. It is for comparing only.
const bridge = "in place of a snapshot's last entry"

// errBridge refuses to store it: whoever was sent it needs the snapshot, and is sent that once this entry is refused.
var errBridge = errors.New("ledger: this entry stands for a snapshot that is not here")

// StoreLog see StoreLogs.
func (b bridged) StoreLog(entry *raft.Log) error { return b.StoreLogs([]*raft.Log{entry}) }

// StoreLogs takes no bridge from a leader. Before raft replicates an entry it asks for the one before it, and
// where that is gone it sends the snapshot: but while a restore empties the log, that one may still be
// there, and the snapshot's be shown a moment later. A follower that stored it would go on from the state
// of before the restore.
func (b bridged) StoreLogs(entries []*raft.Log) error {
	for _, e := range entries {
		if e.Type == raft.LogNoop && string(e.Data) == bridge {
			return errBridge
		}
	}
	return b.LogStore.StoreLogs(entries)
}

// GetLog shows the snapshot's last entry where the log begins behind it.
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
	*entry = raft.Log{Index: index, Term: list[0].Term, Type: raft.LogNoop, Data: []byte(bridge)}
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
