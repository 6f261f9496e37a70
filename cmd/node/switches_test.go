package node

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/proxy/admin"
)

// overtaken is a truth that changes right after it was read.
type overtaken struct {
	agreed
	then func()
}

func (o *overtaken) Facts() *ledger.Facts {
	f := o.agreed.Facts()
	if then := o.then; then != nil {
		o.then = nil
		then()
	}
	return f
}

// unclustered is a node with a policy and no cluster; answer gives the front door's status and code.
func unclustered(t *testing.T, facts *ledger.Facts) (n *Node, truth *overtaken) {
	t.Helper()
	truth = &overtaken{}
	truth.facts.Store(facts)
	n = &Node{
		cfg: Defaults(), log: slog.New(slog.DiscardHandler), registry: prometheus.NewRegistry(), truth: truth,
		changed: make(chan struct{}, 1), inForce: make(chan struct{}), self: 1, time: cluster.NewClock(), devKey: "node-test-key-0123",
	}
	n.cfg.Dev, n.cfg.DataDir, n.cfg.NodeID = true, t.TempDir(), "n1"
	n.now.share = &ledger.Share{Of: 1}
	if err := n.build(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.discard(context.Background()); err != nil {
			t.Error(err)
		}
	})
	n.factsChanged(facts)
	n.compile(facts, time.Now())
	return n, truth
}

func models(n *Node) string {
	r := httptest.NewRequest(http.MethodGet, "/v1/models/none", nil)
	r.Header.Set("Authorization", "Bearer "+n.devKey)
	w := httptest.NewRecorder()
	n.proxy.ServeHTTP(w, r)
	return w.Body.String()
}

// TestNoKillSwitchIsLostToAnother: whatever of this node's own and of the cluster's is thrown last, both
// bind.
func TestNoKillSwitchIsLostToAnother(t *testing.T) {
	state := ledger.NewState()
	apply := func(c *ledgerpb.Command) *ledger.Facts {
		t.Helper()
		c.Version, c.Actor = 1, "ann"
		r, err := state.Apply(state.Facts().Index+1, c)
		if err != nil || ledger.RefusalOf(r) != nil {
			t.Fatal(err, ledger.RefusalOf(r))
		}
		return state.Facts()
	}
	before := apply(&ledgerpb.Command{Body: &ledgerpb.Command_SetPolicy{SetPolicy: &ledgerpb.SetPolicy{Text: fmt.Appendf(nil, governPolicy, "http://127.0.0.1:1")}}})
	n, truth := unclustered(t, before)
	if got := models(n); !strings.Contains(got, "model_not_found") {
		t.Fatalf("before: %s", got)
	}
	after := apply(&ledgerpb.Command{Body: &ledgerpb.Command_SetKill{SetKill: &ledgerpb.SetKill{Kind: ledgerpb.KillKind_KILL_KIND_TENANT, Name: "dev", On: true}}})
	truth.then = func() {
		truth.facts.Store(after)
		n.factsChanged(after)
	}
	own := admin.KillSwitch{Kind: "key", Name: "other", On: true, For: time.Hour}
	if _, err := n.setNodeKill(t.Context(), operator, own); err != nil {
		t.Fatal(err)
	}
	if then := truth.then; then != nil { // nobody looked
		then()
	}
	if got := models(n); !strings.Contains(got, `tenant \"dev\"`) {
		t.Errorf("the cluster's switch was lost: %s", got)
	}
}
