package ledger

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
)

// Report is what Inspect, InspectFile and Recover found.
type Report struct {
	Path string
	// Of a node's data folder; empty for a backup.
	Term       uint64
	FirstIndex uint64 // of the log; 0: it is empty
	LastIndex  uint64
	LastTerm   uint64
	Members    []raft.Server // of the newest configuration
	Snapshots  []SnapshotReport
	// Of the state: the snapshot, and all of the log on it, be it committed or not.
	AppliedIndex uint64
	ClusterID    []byte
	Epoch        uint64
	Revision     uint64
	Keys         int
	Kills        int
	Rungs        int
	Tokens       int
	Budgets      int // accounts
	Hash         [32]byte
}

// SnapshotReport is one snapshot on disk.
type SnapshotReport struct {
	ID    string
	Index uint64
	Term  uint64
	Size  int64
	Err   string // why it cannot be read; empty: it can
}

// ErrNoLedger says that the folder holds nothing to look at.
var ErrNoLedger = errors.New("there is no ledger in this data folder")

// offline is a node's ledger without raft, held against a node that would start.
type offline struct {
	store     *store
	snapshots raft.SnapshotStore
}

func openOffline(dir string, logger *slog.Logger) (*offline, error) {
	path := filepath.Join(dir, "raft")
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("%s: %w", dir, ErrNoLedger)
	}
	s, err := openStore(path, nil, logger, func(error) {})
	if err != nil {
		return nil, err
	}
	snapshots, err := openSnapshots(path, logger)
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	has, err := raft.HasExistingState(s, s, snapshots)
	if err == nil && !has {
		err = fmt.Errorf("%s: %w", dir, ErrNoLedger)
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return &offline{s, snapshots}, nil
}

func (o *offline) close() error { return o.store.close() }

// Inspect reads a stopped node's ledger in its data folder. What it could read before an
// error is in the report.
func Inspect(dir string, logger *slog.Logger) (report Report, err error) {
	report.Path = dir
	o, err := openOffline(dir, logger)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, o.close()) }()
	if report.Term, err = o.store.GetUint64([]byte("CurrentTerm")); err != nil {
		return report, err
	}
	if report.FirstIndex, err = o.store.FirstIndex(); err != nil {
		return report, err
	}
	if report.LastIndex, err = o.store.LastIndex(); err != nil {
		return report, err
	}
	state, at, err := o.fromSnapshot(&report)
	if err != nil {
		return report, err
	}
	if err := verify(o.store, o.snapshots, o.store.dir); err != nil {
		return report, err
	}
	err = o.replay(&report, state, at)
	report.describe(state)
	return report, err
}

// fromSnapshot lists the snapshots and gives the state of the newest that can be read, and
// its index.
func (o *offline) fromSnapshot(report *Report) (*State, uint64, error) {
	list, err := o.snapshots.List()
	if err != nil {
		return nil, 0, err
	}
	state, at := NewState(), uint64(0)
	for _, meta := range list {
		s := SnapshotReport{ID: meta.ID, Index: meta.Index, Term: meta.Term, Size: meta.Size}
		read, err := o.readSnapshot(meta.ID)
		switch {
		case err != nil:
			s.Err = err.Error()
		case at == 0:
			state, at = read, meta.Index
			report.Members, report.LastTerm = meta.Configuration.Servers, meta.Term
			report.LastIndex = max(report.LastIndex, meta.Index)
		}
		report.Snapshots = append(report.Snapshots, s)
	}
	return state, at, nil
}

func (o *offline) readSnapshot(id string) (*State, error) {
	_, r, err := o.snapshots.Open(id)
	if err != nil {
		return nil, err
	}
	state, err := ReadState(bufio.NewReader(r))
	return state, errors.Join(err, r.Close())
}

// replay applies the log after the index.
func (o *offline) replay(report *Report, state *State, after uint64) error {
	for index := after + 1; index <= report.LastIndex; index++ {
		var entry raft.Log
		if err := o.store.GetLog(index, &entry); err != nil {
			return err
		}
		report.LastTerm = entry.Term
		switch entry.Type {
		case raft.LogConfiguration:
			report.Members = raft.DecodeConfiguration(entry.Data).Servers
		case raft.LogCommand:
			var command ledgerpb.Command
			if err := proto.Unmarshal(entry.Data, &command); err != nil {
				return fmt.Errorf("entry %d is no command: %w", index, err)
			}
			if _, err := state.Apply(index, &command); err != nil {
				return fmt.Errorf("entry %d: %w", index, err)
			}
		}
	}
	return nil
}

func (r *Report) describe(state *State) {
	f := state.Facts()
	r.AppliedIndex, r.ClusterID, r.Hash = f.Index, f.ClusterID, f.Hash
	r.Revision, r.Keys = f.Revision(), f.KeyCount
	r.Kills, r.Rungs, r.Tokens, r.Budgets = f.Kills.Len(), f.Rungs.Len(), f.Tokens.Len(), f.Budgets
	if f.View != nil {
		r.Epoch = f.View.Epoch
	}
}

// InspectFile reads a backup to its end.
func InspectFile(path string) (report Report, err error) {
	report.Path = path
	f, err := os.Open(path)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	state, err := ReadState(bufio.NewReader(f))
	if err != nil {
		return report, fmt.Errorf("%s: %w", path, err)
	}
	report.describe(state)
	return report, nil
}

// Recover makes self, a stopped node, the only voter of a new cluster that keeps what its
// data folder holds, for a cluster whose majority is lost for good. What only the lost nodes
// had committed is gone; what this node had in its log and nobody committed is in force.
// The cluster gets a new id and its view's epoch jumps, so that whoever comes back from the
// old one is refused rather than believed; its data folder must be wiped before it can join.
// This node remembers the ids of those it gave up, and never follows them again.
// It refuses a folder in use. Where it fails the folder is as it was, or recovered already.
func Recover(dir string, self raft.Server, logger *slog.Logger) (report Report, err error) {
	if self.ID == "" || self.Address == "" {
		return report, errors.New("recovering the ledger needs this node's raft id and address")
	}
	if report, err = Inspect(dir, logger); err != nil {
		return report, err
	}
	if err := recoverFolder(dir, self, report.Members, logger); err != nil {
		return report, err
	}
	return Inspect(dir, logger)
}

func recoverFolder(dir string, self raft.Server, members []raft.Server, logger *slog.Logger) (err error) {
	o, err := openOffline(dir, logger)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, o.close()) }()
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return fmt.Errorf("making a cluster's id: %w", err)
	}
	var lost []raft.ServerID
	for _, m := range members {
		if m.ID != self.ID {
			lost = append(lost, m.ID)
		}
	}
	if err := forget(o.store.dir, lost); err != nil {
		return err
	}
	c := raft.DefaultConfig()
	c.LocalID = self.ID
	c.Logger = newHclog(logger, "raft")
	self.Suffrage = raft.Voter
	_, transport := raft.NewInmemTransport(self.Address)
	f := &recoveredFSM{newFSM(func(*Facts) {}, func(error) {}), id}
	err = raft.RecoverCluster(c, f, o.store, o.store, o.snapshots, transport, raft.Configuration{Servers: []raft.Server{self}})
	if err != nil {
		return fmt.Errorf("recovering the ledger: %w", err)
	}
	return nil
}

// recoveredFSM renames the cluster in the snapshot that raft takes at the end of a recovery.
type recoveredFSM struct {
	*fsm
	clusterID []byte
}

func (f *recoveredFSM) Snapshot() (raft.FSMSnapshot, error) {
	view := f.state.Facts().View
	f.state.Adopt(&Facts{ClusterID: f.clusterID, View: skipped(view, view)})
	return f.fsm.Snapshot()
}
