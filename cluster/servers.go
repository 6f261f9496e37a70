package cluster

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/cluster/clusterpb"
	"headgate/cluster/ledger"
)

// forwarder hands proposals to the leader.
type forwarder struct{ peers *peers }

// Propose see ledger.Peer.
func (f forwarder) Propose(ctx context.Context, _ raft.ServerID, address raft.ServerAddress, command []byte) (result []byte, notLeader, unknown bool, err error) {
	client, err := f.peers.client(rpcOfRaft(string(address)))
	if err != nil {
		return nil, true, false, nil //nolint:nilerr // nothing was sent: the ledger looks for the leader again
	}
	r, err := client.Propose(ctx, &clusterpb.ProposeRequest{Command: command})
	if err != nil {
		refused := status.Code(err) == codes.FailedPrecondition
		if refused {
			return nil, false, false, err
		}
		return nil, false, true, nil //nolint:nilerr // it may have been done before the answer was lost
	}
	if r.GetError() != "" && !r.GetNotLeader() && !r.GetUnknown() {
		return nil, false, false, errors.New(r.GetError())
	}
	return r.GetResult(), r.GetNotLeader(), r.GetUnknown(), nil
}

// servers are the nodes as the ledger needs to know them.
func (c *Cluster) servers() []ledger.Server {
	select {
	case <-c.gossips:
	default:
		return nil
	}
	members := c.gossip.Members()
	out := make([]ledger.Server, 0, len(members))
	for _, m := range members {
		if m.Founded && !bytes.Equal(m.ClusterID, c.ledger.ClusterID()) && !c.hasServer(m.ServerID) {
			continue // of another ledger, for all that is known: to follow this one it would give up its own
		}
		out = append(out, ledger.Server{ID: raft.ServerID(m.ServerID), Name: m.Name, Address: raft.ServerAddress(raftOf(m.Address)), Status: ledgerStatus(m.Status), Since: m.Since})
	}
	return out
}

// hasServer says whether the ledger has a server of that id.
func (c *Cluster) hasServer(id string) bool {
	return slices.ContainsFunc(c.ledger.Members(), func(s raft.Server) bool { return string(s.ID) == id })
}

func ledgerStatus(s PeerStatus) ledger.Status {
	switch s {
	case PeerFailed:
		return ledger.StatusFailed
	case PeerLeft:
		return ledger.StatusLeft
	default:
		return ledger.StatusAlive
	}
}

// raftAddress of a server, as gossip has it now.
func (c *Cluster) raftAddress(id string) (address string, ok bool) {
	for _, s := range c.servers() {
		if string(s.ID) == id {
			return string(s.Address), true
		}
	}
	return "", false
}

func (c *Cluster) raftAddressOr(id raft.ServerID, fallback raft.ServerAddress) string {
	if a, ok := c.raftAddress(string(id)); ok {
		return a
	}
	return string(fallback)
}

// RestoreLedger replaces the ledger's content, through the leader; it gives the state's hash. With
// ledger.ErrBackup, ErrNotEmpty and ErrNoLeader nothing was done; with other errors it may have been.
func (c *Cluster) RestoreLedger(ctx context.Context, r io.Reader, force bool) ([]byte, error) {
	if c.ledger.IsLeader() {
		f, err := c.ledger.Restore(ctx, r, force)
		switch {
		case errors.Is(err, ledger.ErrNotLeader): // any more
			return nil, ledger.ErrNoLeader
		case err != nil:
			return nil, err
		}
		return f.Hash[:], nil
	}
	_, leader := c.ledger.Leader()
	if leader == "" {
		return nil, ledger.ErrNoLeader
	}
	client, err := c.peers.client(rpcOfRaft(string(leader)))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // where r fails the leader waits for more
	stream, err := client.Restore(ctx)
	if err != nil {
		return nil, err
	}
	resp, err := sendChunks(stream, r, force)
	switch {
	case err != nil:
		return nil, err
	case resp.GetCode() == codeNotEmpty:
		return nil, ledger.ErrNotEmpty
	case resp.GetCode() == ReasonNotLeader:
		return nil, ledger.ErrNoLeader
	case resp.GetCode() == codeBackup:
		return nil, as(ledger.ErrBackup, resp.GetError())
	case resp.GetError() != "":
		return nil, errors.New(resp.GetError())
	}
	return resp.GetStateHash(), nil
}
