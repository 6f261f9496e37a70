package cluster

import (
	"testing"
	"time"

	"headgate/cluster/ledger"
)

// A node that was started without --join founded a cluster of its own. Started again to join
// another, it must be refused: with a ledger of its own it would take the others' over.
func TestANodeWithALedgerOfItsOwnIsRefused(t *testing.T) {
	inRealm(t, 1, func(r *realm) {
		alone := func(c *Config) { c.BootstrapExpect, c.Seeds = 1, nil }
		joining := func(c *Config) { c.BootstrapExpect, c.Seeds = 0, r.addresses("a") }
		d := r.start("d", alone)
		r.within(10*time.Second, "a cluster of one", func() bool { return agree([]*realNode{d}, 1) })
		for range 5 { // terms beyond the others'
			d.crash()
			<-d.gone
			d = r.start("d", alone)
			r.within(10*time.Second, "the cluster of one again", func() bool { return agree([]*realNode{d}, 1) })
		}
		d.crash()
		<-d.gone

		nodes := r.three()
		r.propose(nodes[1], kill("of-three"))
		time.Sleep(2 * time.Second) // gossip says what the nodes are
		d = r.start("d", joining)
		time.Sleep(10 * time.Second)
		r.propose(nodes[2], kill("of-three-still"))
		for _, n := range nodes {
			if _, ok := n.Facts().Kills.Lookup(ledger.KillTenant, "of-three"); !ok || len(n.ledger.Members()) != 3 || !n.Leased() {
				t.Errorf("node %s: kill switch kept %v, servers %v, lease %v", n.cfg.Name, ok, n.ledger.Members(), n.Leased())
			}
		}
		if servers := d.ledger.Members(); len(servers) != 1 {
			t.Errorf("the node with a ledger of its own has the servers %v", servers)
		}
		if d.logged.count("two clusters were founded under one name") == 0 {
			t.Error("it does not say why it was refused")
		}
	})
}

// A node that nobody of its own ledger reached but a call of raft's, such as one to who was at its address
// before, has a term and no ledger. It joins like any other.
func TestATermIsNoLedger(t *testing.T) {
	inRealm(t, 1, func(r *realm) {
		nodes := r.three()
		if err := r.disks["d"].log.SetUint64([]byte("CurrentTerm"), 7); err != nil {
			t.Fatal(err)
		}
		d := r.start("d", func(c *Config) { c.BootstrapExpect, c.Seeds = 0, r.addresses("a") })
		if d.ledger.HasState() {
			t.Error("it has a ledger")
		}
		r.within(30*time.Second, "a view of all four", func() bool { return agree(append(nodes, d), 4) })
	})
}
