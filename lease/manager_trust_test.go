package lease_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"headgate/lease"
	"headgate/lease/leasepb"
)

// knownPeers is a world whose nodes know from which node a call comes, as they would by its certificate.
func knownPeers(t *testing.T, nodes int) (w *world) {
	w = newWorld(t, nodes, func(c *lease.ManagerConfig) {
		c.Peer = func(ctx context.Context) string {
			p, _ := peer.FromContext(ctx)
			host, _, _ := net.SplitHostPort(p.Addr.String())
			for _, n := range w.nodes {
				if n.host.IP() == host {
					return n.self.Name
				}
			}
			return ""
		}
	})
	return w
}

// TestManagerBelievesNodesOfThemselves: a node may speak for its own processes alone; who speaks for another's does not
// even end that one's stream.
func TestManagerBelievesNodesOfThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := knownPeers(t, 3)
		w.step(w.nodes, 0, 0, 0, 0)
		owner, holder, liar := w.nodes[0], w.nodes[1], w.nodes[2]
		limit := slow()
		if ok, d := holder.take(chargeOn("0acme", limit, 1)); !ok {
			t.Fatalf("%+v", d)
		}
		cc, err := liar.client(owner.self.Address)
		if err != nil {
			t.Fatal(err)
		}
		c := leasepb.NewLeaseClient(cc)
		session, err := c.Session(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		_ = session.Send(&leasepb.Frame{Holder: holder.self.Incarnation, Owner: owner.self.Incarnation}) // Recv says why
		if _, err = session.Recv(); status.Code(err) != codes.PermissionDenied {
			t.Errorf("a session in another's name: %v", err)
		}
		hand, err := c.HandOff(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		err = hand.Send(&leasepb.HandOffPart{Head: &leasepb.HandOffHead{
			From: holder.self.Incarnation, To: owner.self.Incarnation, Epoch: 1, Partition: 1, Nothing: true,
		}, End: true})
		if err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if _, err = hand.CloseAndRecv(); status.Code(err) != codes.PermissionDenied {
			t.Errorf("a hand-off in another's name: %v", err)
		}
		if n := owner.count("headgate_lease_malformed_total"); n != 2 {
			t.Errorf("%v calls are counted as refused", n)
		}
		trips := holder.count("headgate_lease_round_trips_total")
		time.Sleep(time.Second)
		if ok, d := holder.take(chargeOn("0acme", limit, 1)); !ok || holder.Degraded() != "" {
			t.Errorf("%+v; degraded: %s", d, holder.Degraded())
		}
		if n := holder.count("headgate_lease_round_trips_total"); n == trips {
			t.Error("the holder's stream says nothing any more")
		}
	})
}

// TestManagerKnowsItsPeersLater: a stream that came before the view that has its process is judged by that view.
func TestManagerKnowsItsPeersLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := knownPeers(t, 2)
		w.step(w.nodes, 0, 0, 0, 0)
		owner := w.nodes[0]
		cc, err := w.nodes[1].client(owner.self.Address)
		if err != nil {
			t.Fatal(err)
		}
		session, err := leasepb.NewLeaseClient(cc).Session(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		third := uint64(3) // of a node that comes now
		say := func(seq uint64) {
			_ = session.Send(&leasepb.Frame{Holder: third, Owner: owner.self.Incarnation, Requests: []*leasepb.Request{
				{Holder: third, Owner: owner.self.Incarnation, Epoch: 1, Seq: seq},
			}}) // Recv says why
		}
		say(1)
		synctest.Wait()
		w.add("n3")
		w.step(w.nodes, 0, 0, 0, 0)
		say(2)
		for err = nil; err == nil; {
			_, err = session.Recv()
		}
		if code := status.Code(err); code != codes.PermissionDenied && code != codes.Aborted {
			t.Errorf("%v", err)
		}
		synctest.Wait()
		if ok, d := w.nodes[2].take(chargeOn("0acme", slow(), 1)); !ok {
			t.Errorf("%+v", d)
		}
	})
}

// TestManagerWaitsForThePolicy: a holder that knows a policy before the owner does asks again, and is admitted once the
// owner knows it, too.
func TestManagerWaitsForThePolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		newest := make([]atomic.Uint64, 2)
		i := 0
		w := newWorld(t, 2, func(c *lease.ManagerConfig) {
			n := &newest[i]
			i++
			c.Newest = n.Load
		})
		w.step(w.nodes, 0, 0, 0, 0)
		limit := slow()
		newest[0].Store(1)
		newest[1].Store(2)
		if ok, d := w.nodes[1].take(chargeOn("0acme", limit, 1)); !ok {
			t.Fatalf("%+v", d)
		}
		limit = slow()
		limit.Revision = 2
		began := time.Now()
		go func() {
			time.Sleep(60 * time.Millisecond)
			newest[0].Store(2)
		}()
		if ok, d := w.nodes[1].take(chargeOn("0acme", limit, 50)); ok {
			t.Errorf("50 of 49: %+v", d)
		}
		if ok, d := w.nodes[1].take(chargeOn("0acme", limit, 1)); !ok || time.Since(began) > budget {
			t.Errorf("%+v after %v", d, time.Since(began))
		}
		if n := w.nodes[0].count("headgate_lease_rejected_total"); n < 2 {
			t.Errorf("%v asks were counted", n)
		}
	})
}
