package node

import (
	"context"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"headgate/cluster/ledger"
	"headgate/cluster/pki"
)

// newestLimit is the highest Revision that a limit may have by what this node's ledger has applied: another node may
// know a policy first, and a liar a higher one.
func (n *Node) newestLimit() uint64 {
	if c := n.joined.Load(); c != nil {
		if p := c.Ledger().Facts().Policy; p != nil {
			return newestOf(p)
		}
	}
	return 0
}

// newestOf is the highest Revision of a limit of a policy, however many steps of its ramps have begun: see
// ledger.Numbers.
func newestOf(p *ledger.PolicyRevision) uint64 { return (p.Number()+1)<<20 - 1 }

// peerName is the name of the node that a call comes from, by its certificate; "": it has shown none.
func peerName(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			return pki.PeerName(info.State)
		}
	}
	return ""
}

// namesPeers is peerName where the cluster has certificates, else nil.
func (n *Node) namesPeers() func(context.Context) string {
	if n.tls == nil {
		return nil
	}
	return peerName
}
