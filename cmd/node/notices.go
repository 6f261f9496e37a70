package node

import (
	"fmt"
	"net/http"
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/cluster/ledger"
)

// countedNotices is the way to the webhook, with what became of what went there.
type countedNotices struct {
	way          http.RoundTripper
	sent, failed prometheus.Counter
}

// countNotices makes the metric of way.
func countNotices(reg prometheus.Registerer, way http.RoundTripper) *countedNotices {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headgate_notices_total", Help: "Notices of budgets, while this node led, and of its cache, that it posted to the policy's webhook, by outcome (sent; failed: it did not answer with a 2xx, each try counts).",
	}, []string{"outcome"})
	reg.MustRegister(c)
	return &countedNotices{way: way, sent: c.WithLabelValues("sent"), failed: c.WithLabelValues("failed")}
}

// RoundTrip is way's.
func (c *countedNotices) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := c.way.RoundTrip(r)
	if err == nil && resp.StatusCode/100 == 2 {
		c.sent.Inc()
	} else {
		c.failed.Inc()
	}
	return resp, err
}

// CloseIdleConnections is way's, for http.Client.
func (c *countedNotices) CloseIdleConnections() {
	if t, ok := c.way.(*http.Transport); ok {
		t.CloseIdleConnections()
	}
}

// tokenless says that the token of a policy's webhook is not to be had on this node; "": it is, or none
// is wanted.
func (n *Node) tokenless(p *ledger.Policy) string {
	w := p.Notify
	if w.Webhook == "" || w.TokenEnv == "" || os.Getenv(w.TokenEnv) != "" {
		return ""
	}
	return fmt.Sprintf("notify.token_env: %s is not set on node %s: while it leads, notices go without a token; set it on all nodes, since any may lead, and start them again", w.TokenEnv, n.cfg.NodeID)
}
