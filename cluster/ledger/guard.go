package ledger

import (
	"context"
	"errors"

	"github.com/hashicorp/raft"
)

// errOnlyVoter answers a server that would lead one that has no other voter.
var errOnlyVoter = errors.New("this ledger has one voter, itself, and follows nobody: were you part of it before it was recovered? Then wipe your data folder")

// guardedTransport keeps a server that alone votes from following anyone. Whoever else may
// lead it was made a voter by an entry in its own log, so only servers of a majority that
// was given up by Recover can want to; they would overwrite what was recovered.
type guardedTransport struct {
	raft.Transport
	onlyVoter func() bool
	in        chan raft.RPC
}

// preVoting is a guardedTransport over a transport that has pre-votes.
type preVoting struct {
	*guardedTransport
	raft.WithPreVote
}

// guard wraps t. What it starts ends with ctx. Closing t stays its owner's to do.
func guard(ctx context.Context, t raft.Transport, onlyVoter func() bool) (guarded raft.Transport, run func()) {
	g := &guardedTransport{Transport: t, onlyVoter: onlyVoter, in: make(chan raft.RPC)}
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
	switch rpc.Command.(type) {
	case *raft.AppendEntriesRequest:
		response = &raft.AppendEntriesResponse{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}}
	case *raft.InstallSnapshotRequest:
		response = &raft.InstallSnapshotResponse{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}}
	default:
		return false
	}
	if !g.onlyVoter() {
		return false
	}
	rpc.Respond(response, errOnlyVoter)
	return true
}
