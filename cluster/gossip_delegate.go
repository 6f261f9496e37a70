package cluster

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/hashicorp/memberlist"
)

// What nodes tell each other beside memberlist's own messages.
const (
	messageLeave = 1 // the sender leaves
	messageDoubt = 2 // nobody listens at this member's port: look for yourselves
)

// delegate is what memberlist calls, most of it with its lock held: nothing here waits.
type delegate struct{ g *Gossip }

func (d *delegate) NodeMeta(int) []byte {
	d.g.mu.Lock()
	defer d.g.mu.Unlock()
	return d.g.meta.encode()
}

func (d *delegate) NotifyMsg(b []byte) {
	kind, h, ok := parseUserMessage(b)
	if !ok {
		return
	}
	switch kind {
	case messageLeave:
		d.g.left(h)
	case messageDoubt:
		d.g.doubt(h)
	}
}

func (d *delegate) GetBroadcasts(overhead, limit int) [][]byte {
	return d.g.queue.GetBroadcasts(overhead, limit)
}

func (d *delegate) LocalState(bool) []byte        { return nil }
func (d *delegate) MergeRemoteState([]byte, bool) {}
func (d *delegate) NotifyJoin(n *memberlist.Node) { d.g.learned(n, true) }
func (d *delegate) NotifyUpdate(n *memberlist.Node) {
	d.g.learned(n, true)
}
func (d *delegate) NotifyLeave(n *memberlist.Node) { d.g.learned(n, false) }

// AckPayload tells which process answered a ping: another may have taken the port.
func (d *delegate) AckPayload() []byte {
	return binary.BigEndian.AppendUint64(nil, d.g.cfg.Incarnation)
}

func (d *delegate) NotifyPingComplete(n *memberlist.Node, _ time.Duration, payload []byte) {
	if len(payload) == 8 {
		d.g.answered(n.Name, binary.BigEndian.Uint64(payload))
	}
}

// NotifyAlive refuses nodes of other clusters and protocols, one by one.
func (d *delegate) NotifyAlive(n *memberlist.Node) error {
	if n.Name == d.g.cfg.Name {
		return nil
	}
	return d.g.admit(n)
}

// NotifyMerge refuses a join to or of another cluster as a whole, so that the joining node
// gets the reason.
func (d *delegate) NotifyMerge(nodes []*memberlist.Node) error {
	for _, n := range nodes {
		if n.State != memberlist.StateAlive || n.Name == d.g.cfg.Name {
			continue
		}
		if err := d.g.admit(n); err != nil {
			return err
		}
	}
	return nil
}

// rival is a process seen under a name that another, live one holds.
type rival struct {
	name, address string
	meta          []byte
}

// NotifyConflict hears of a process that has an existing, live one's name at another address.
func (d *delegate) NotifyConflict(existing, other *memberlist.Node) {
	g := d.g
	if existing.Name == g.cfg.Name {
		g.mu.Lock()
		g.conflicts++
		g.rival = other.Address()
		g.mu.Unlock()
		return
	}
	select {
	case g.rivals <- rival{name: existing.Name, address: other.Address(), meta: bytes.Clone(other.Meta)}:
	default: // the newcomer repeats itself until it is in
	}
}

// admit says why a node may not be a member, or nil.
func (g *Gossip) admit(n *memberlist.Node) error {
	meta, err := decodeMeta(n.Meta)
	g.mu.Lock()
	mine := g.meta
	full := g.members[n.Name] == nil && len(g.members) >= maxMembers
	g.mu.Unlock()
	var remedy string
	switch {
	case len(meta.ClusterID) == 0 && err != nil && meta.Protocol == 0:
		err, remedy = fmt.Errorf("%s says nothing that this version understands: %w", n.Address(), err), "let no other program gossip on this port"
	case meta.Protocol != mine.Protocol:
		err = fmt.Errorf("node %s at %s speaks protocol %d, this one %d", n.Name, n.Address(), meta.Protocol, mine.Protocol)
		remedy = "run versions whose protocol is the same, see the upgrade notes"
	case err != nil:
		err, remedy = fmt.Errorf("node %s at %s: %w", n.Name, n.Address(), err), "run the same version on all nodes"
	case meta.Cluster != mine.Cluster:
		err = fmt.Errorf("node %s at %s is of cluster %q, this one of %q", n.Name, n.Address(), meta.Cluster, mine.Cluster)
		remedy = "check --join and --cluster-name"
	case len(meta.ClusterID) > 0 && len(mine.ClusterID) > 0 && !bytes.Equal(meta.ClusterID, mine.ClusterID):
		err = fmt.Errorf("node %s at %s belongs to cluster id %x, this one to %x", n.Name, n.Address(), meta.ClusterID, mine.ClusterID)
		remedy = "two clusters were founded under one name: point --join at the right one, and empty the --data-dir of a node that is to change over"
	case full:
		err, remedy = fmt.Errorf("node %s would be member %d", n.Name, maxMembers+1), "somebody with a gossip key invents names: rotate the key"
	default:
		return nil
	}
	name, address, reason := n.Name, n.Address(), err.Error()
	g.say("refused "+name+" "+address, func() {
		g.log.Warn("a node was refused in gossip", "node", name, "address", address, "error", reason, "remedy", remedy)
	})
	return fmt.Errorf("%w: %s", err, remedy)
}

// learned takes what memberlist makes of a node.
func (g *Gossip) learned(n *memberlist.Node, listed bool) {
	meta, err := decodeMeta(n.Meta)
	if err != nil || n.Name == g.cfg.Name {
		return
	}
	address := n.Address()
	g.mu.Lock()
	defer g.mu.Unlock()
	m := g.members[n.Name]
	if !listed {
		// News of a process that was replaced meanwhile says nothing of its successor.
		if m != nil && m.Incarnation == meta.Incarnation {
			m.listed = false
			g.lost(m)
		}
		return
	}
	now := time.Now()
	if m == nil || m.Incarnation != meta.Incarnation {
		m = &member{Peer: Peer{Name: n.Name, Incarnation: meta.Incarnation, Since: now}}
		g.members[n.Name] = m
	}
	m.adopt(meta, address)
	m.listed, m.acked, m.Suspected, m.misses = true, now, false, 0
	switch {
	case meta.Leaving:
		m.become(PeerLeft, now)
	default:
		m.become(PeerAlive, now)
	}
}

func (m *member) adopt(meta nodeMeta, address string) {
	m.ServerID, m.Version, m.ClusterID, m.Address = meta.ServerID, meta.Version, meta.ClusterID, address
	m.BootstrapExpect, m.Founded = int(min(meta.BootstrapExpect, 1<<20)), meta.Founded
}

func (m *member) become(s PeerStatus, now time.Time) {
	if m.Status != s {
		m.Status, m.Since = s, now
	}
}

// lost decides about a member that memberlist gave up; g.mu is held. Without anybody to ask,
// its word counts; else a look follows.
func (g *Gossip) lost(m *member) {
	if m.Status != PeerAlive {
		return
	}
	if g.cfg.Identify == nil {
		m.become(PeerFailed, time.Now())
		return
	}
	g.doubt(hint{m.Name, m.Incarnation})
}

// left takes a member's own word that it goes, and passes it on once.
func (g *Gossip) left(h hint) {
	g.mu.Lock()
	m := g.members[h.name]
	news := m != nil && m.Incarnation == h.incarnation && m.Status != PeerLeft
	if news {
		m.become(PeerLeft, time.Now())
		m.Suspected = false
	}
	g.mu.Unlock()
	if news {
		g.queue.QueueBroadcast(broadcast(userMessage(messageLeave, h.name, h.incarnation)))
	}
}

// answered takes a sign of life from a process.
func (g *Gossip) answered(name string, incarnation uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m := g.members[name]
	if m == nil || m.Incarnation != incarnation {
		return
	}
	m.acked, m.misses = time.Now(), 0
	if m.Suspected || m.Status == PeerFailed {
		m.Suspected = false
		m.become(PeerAlive, m.acked)
	}
}

// known is the number of nodes, for how often a message is repeated.
func (g *Gossip) known() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.members) + 1
}
