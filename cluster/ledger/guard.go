package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/hashicorp/raft"
)

var (
	// errOnlyVoter answers a server that would lead one that has no other voter.
	errOnlyVoter = errors.New("this ledger has one voter, itself, and follows nobody: were you part of it before it was recovered? Then wipe your data folder")
	// errForgotten answers a server that was given up by a recovery.
	errForgotten = errors.New("this ledger was recovered without you: wipe your data folder and join anew")
)

// guardedTransport keeps a server from following those whom Recover gave up, who would
// overwrite what was recovered if they came back with their data: the servers that it
// remembers by their ids and, while it alone votes, anyone. (Whoever else may lead a sole
// voter was made a voter by an entry in its own log.)
type guardedTransport struct {
	raft.Transport
	onlyVoter func() bool
	forgotten map[raft.ServerID]bool // not changed any more
	in        chan raft.RPC
}

// preVoting is a guardedTransport over a transport that has pre-votes.
type preVoting struct {
	*guardedTransport
	raft.WithPreVote
}

// guard wraps t. What it starts ends with ctx. Closing t stays its owner's to do.
func guard(ctx context.Context, t raft.Transport, onlyVoter func() bool, forgotten map[raft.ServerID]bool) (guarded raft.Transport, run func()) {
	g := &guardedTransport{Transport: t, onlyVoter: onlyVoter, forgotten: forgotten, in: make(chan raft.RPC)}
	run = func() { g.run(ctx) }
	if pre, ok := t.(raft.WithPreVote); ok {
		return preVoting{g, pre}, run
	}
	return g, run
}

// Consumer gives the calls of others, those refused apart.
func (g *guardedTransport) Consumer() <-chan raft.RPC { return g.in }

// SetHeartbeatHandler sets the way past the consumer that heartbeats take.
func (g *guardedTransport) SetHeartbeatHandler(handle func(raft.RPC)) {
	if handle == nil {
		g.Transport.SetHeartbeatHandler(nil)
		return
	}
	g.Transport.SetHeartbeatHandler(func(rpc raft.RPC) {
		if !g.refuse(rpc) {
			handle(rpc)
		}
	})
}

func (g *guardedTransport) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case rpc := <-g.Transport.Consumer():
			if g.refuse(rpc) {
				continue
			}
			select {
			case g.in <- rpc:
			case <-ctx.Done():
				return // as a raft that stopped, it answers no more
			}
		}
	}
}

func (g *guardedTransport) refuse(rpc raft.RPC) bool {
	var response any
	var from []byte
	header := raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}
	switch c := rpc.Command.(type) {
	case *raft.AppendEntriesRequest:
		response, from = &raft.AppendEntriesResponse{RPCHeader: header}, c.ID
	case *raft.InstallSnapshotRequest:
		response, from = &raft.InstallSnapshotResponse{RPCHeader: header}, c.ID
	default:
		return false // votes are given to members only, by raft itself
	}
	switch {
	case g.forgotten[raft.ServerID(from)]:
		rpc.Respond(response, errForgotten)
	case g.onlyVoter():
		rpc.Respond(response, errOnlyVoter)
	default:
		return false
	}
	return true
}

// forgottenFile holds the ids of the servers that recoveries gave up, one a line.
const forgottenFile = "forgotten"

// readForgotten gives the servers that were given up; dir is that of the log.
func readForgotten(dir string) (map[raft.ServerID]bool, error) {
	data, err := os.ReadFile(filepath.Join(dir, forgottenFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading whom the ledger gave up: %w", err)
	}
	forgotten := map[raft.ServerID]bool{}
	for id := range strings.FieldsSeq(string(data)) {
		forgotten[raft.ServerID(id)] = true
	}
	return forgotten, nil
}

// forget adds to them, durably.
func forget(dir string, ids []raft.ServerID) (err error) {
	f, err := os.OpenFile(filepath.Join(dir, forgottenFile), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("writing whom the ledger gives up: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for _, id := range ids {
		if _, err := fmt.Fprintln(f, id); err != nil {
			return fmt.Errorf("writing whom the ledger gives up: %w", err)
		}
	}
	return f.Sync()
}
