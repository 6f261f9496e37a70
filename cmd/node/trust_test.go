package node

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"headgate/cluster/ledger"
	"headgate/cluster/pki"
)

// TestPeerNameIsTheCertificates: what a call's certificate says is who it is; where there is none it is nobody.
func TestPeerNameIsTheCertificates(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	nodes := []pki.NodeCert{{Name: "gw-1", Hosts: []string{"127.0.0.1"}}, {Name: "gw-2", Hosts: []string{"127.0.0.1"}}}
	if _, err := pki.Init(dir, pki.Options{ClusterName: "west", Nodes: nodes}); err != nil {
		t.Fatal(err)
	}
	var bundles [2]*pki.Bundle
	for i := range nodes {
		var err error
		if bundles[i], err = pki.Load(filepath.Join(dir, nodes[i].Name)); err != nil {
			t.Fatal(err)
		}
	}
	here, there := net.Pipe()
	defer func() { _, _ = here.Close(), there.Close() }()
	shaken := make(chan error, 1)
	go func() {
		_, _, err := credentials.NewTLS(bundles[1].ClientTLS()).ClientHandshake(t.Context(), "gw-1", there)
		shaken <- err
	}()
	_, info, err := credentials.NewTLS(bundles[0].ServerTLS()).ServerHandshake(here)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-shaken; err != nil {
		t.Fatal(err)
	}
	if got := peerName(peer.NewContext(t.Context(), &peer.Peer{AuthInfo: info})); got != "gw-2" {
		t.Errorf("the call comes from %q, want gw-2", got)
	}
	if got := peerName(peer.NewContext(t.Context(), &peer.Peer{})); got != "" {
		t.Errorf("a call without a certificate comes from %q", got)
	}
	if plain := (&Node{}).namesPeers(); plain != nil {
		t.Error("without certificates peers are checked")
	}
}

// TestNewestOfAPolicy: every limit of a policy is known with it, whatever has begun of its ramps, and none of the next.
func TestNewestOfAPolicy(t *testing.T) {
	p, err := ledger.ParsePolicy([]byte(rampPolicy))
	if err != nil {
		t.Fatal(err)
	}
	for _, number := range []uint64{1, 7, 1 << 30} {
		for _, age := range []time.Duration{0, 20 * 24 * time.Hour, 100 * 24 * time.Hour} {
			now := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).Add(age)
			ix, err := p.IndexAt(now, ledger.Numbers{Policy: number, Local: 1}, ledger.Share{Of: 1}, nil)
			if err != nil {
				t.Fatal(err)
			}
			c, ok := ix.Tenant("dev")
			if !ok || len(c.Limits) != 1 {
				t.Fatalf("%v %+v", ok, c)
			}
			if r := c.Limits[0].Whole.Revision; r > newestOf(&ledger.PolicyRevision{Revision: number}) || r <= newestOf(&ledger.PolicyRevision{Revision: number - 1}) {
				t.Errorf("a limit of policy %d has revision %d", number, r)
			}
		}
	}
}
