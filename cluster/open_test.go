package cluster

import (
	"net"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"google.golang.org/grpc"

	"headgate/cluster/clusterpb"
	"headgate/cluster/ledger"
)

// slowStart is a gossip transport that takes its time to say where it listens, as the lookup of
// an advertised name may.
type slowStart struct {
	memberlist.NodeAwareTransport
	meanwhile func()
}

func (s slowStart) FinalAdvertiseAddr(ip string, port int) (net.IP, int, error) {
	s.meanwhile()
	return s.NodeAwareTransport.FinalAdvertiseAddr(ip, port)
}

// A node's ledger may lead, and others may call, before its gossip has begun.
func TestCallsBeforeTheGossip(t *testing.T) {
	inRealm(t, 1, func(r *realm) {
		alone := func(c *Config) { c.Seeds, c.BootstrapExpect = nil, 1 }
		n := r.start("a", alone)
		r.within(10*time.Second, "a lease", n.Leased)
		n.crash()
		<-n.gone

		calls := newPeers("test", nil, r.net.Host("b").Dial)
		defer calls.close()
		type answer struct {
			resp *clusterpb.RemoveResponse
			err  error
		}
		answered := make(chan answer, 1)
		n = r.start("a", func(c *Config) {
			alone(c)
			c.Seams.Gossip = slowStart{c.Seams.Gossip, func() {
				go func() {
					client, err := calls.client(rpcOf(r.address("a")))
					if err != nil {
						answered <- answer{nil, err}
						return
					}
					resp, err := client.Remove(r.t.Context(), &clusterpb.RemoveRequest{Name: "z"}, grpc.WaitForReady(true))
					answered <- answer{resp, err}
				}()
				time.Sleep(2 * time.Second) // of the bubble: its ledger leads by then
			}}
		})
		if got := <-answered; got.err != nil || got.resp.GetCode() != codeNotFound {
			t.Errorf("removing nobody: %v, %v", got.resp, got.err)
		}
		r.within(10*time.Second, "a lease", n.Leased)
	})
}

// What changes without the view leaves room for the views.
func TestOnlyViewsWaitToBeSteppedTo(t *testing.T) {
	c := &Cluster{cfg: Config{Changed: func(*ledger.Facts) {}}, views: make(chan *ledger.View, viewsPending)}
	for epoch := uint64(1); epoch <= 3; epoch++ {
		for range viewsPending {
			c.changed(&ledger.Facts{View: &ledger.View{Epoch: epoch}})
		}
	}
	for epoch := uint64(1); epoch <= 3; epoch++ {
		select {
		case v := <-c.views:
			if v.Epoch != epoch {
				t.Errorf("epoch %d stands where %d should", v.Epoch, epoch)
			}
		default:
			t.Errorf("epoch %d found no room", epoch)
		}
	}
}
