package node

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"headgate/cluster/ledger"
	"headgate/proxy/admin"
)

// Bounds of what a webhook is told.
const (
	notifyEvery   = time.Second      // how often the leader looks for what is to be told
	notifyTime    = 10 * time.Second // for one call
	notifyBackoff = time.Second      // after a round with a failure, doubled up to
	notifyRest    = 5 * time.Minute
	maxNotices    = 256 // of one round
	maxReply      = 1 << 16
	noticeStale   = 24 * time.Hour     // after its period people are not told of a budget any more
	noticeOld     = 7 * 24 * time.Hour // nor of what happened so long ago
)

// notice is what a webhook is told of a budget or a cache. The text is for people: most chat systems show
// a field of that name.
type notice struct {
	ID      string    `json:"id"`    // the same in every try: who gets one twice drops the second
	Event   string    `json:"event"` // budget.alert | budget.spike | cache.drop | cache.never | cache.rise
	Text    string    `json:"text"`
	Cluster string    `json:"cluster"`
	Node    string    `json:"node"` // that sends it
	Time    time.Time `json:"time"` // of the ledger, when it happened
	Tenant  string    `json:"tenant,omitempty"`
	Surface string    `json:"surface,omitempty"` // of a cache
	Parts   []string  `json:"parts,omitempty"`   // of requests: those that most often differ between misses
	Budget  string    `json:"budget,omitempty"`
	Subject []string  `json:"subject,omitempty"` // whose budget it is: its parts
	Start   time.Time `json:"period_start,omitzero"`
	End     time.Time `json:"period_end,omitzero"`
	Percent int       `json:"alert_percent,omitempty"` // of an alert: the threshold that was passed
	Amount  admin.USD `json:"amount_usd,omitzero"`
	Spent   admin.USD `json:"spent_usd,omitzero"`

	key   ledger.BudgetKey
	spike time.Time // of a spike: when it was
	stale bool      // nobody is told of it any more
}

// webhook is where notices go.
type webhook struct{ url, token string }

// notifier tells a webhook what people want to know. What is to be told of budgets stands in the
// ledger until it was: a notice goes out at least once, whoever leads. For that of caches see
// cacheNotifier.
type notifier struct {
	leads   func() bool
	pending func(most int) []notice
	hook    func() (webhook, bool) // of the policy in force; false: there is none
	told    func(context.Context, notice) error
	client  *http.Client
	log     *slog.Logger
}

// notifier of this node.
func (n *Node) notifier() *notifier {
	l := n.cluster.Ledger()
	client := newNotifyClient()
	client.Transport = countNotices(n.registry, client.Transport)
	var after *ledger.BudgetKey // those before were tried in the rounds before
	return &notifier{
		leads: l.IsLeader, hook: n.webhook, client: client, log: n.log,
		pending: func(most int) (out []notice) {
			now := n.wall()
			list := l.UntoldBudgets(after, most)
			if after = nil; len(list) == most {
				after = &list[most-1].Key
			}
			for _, a := range list {
				for _, notice := range noticesOf(&a, now) {
					notice.Cluster, notice.Node = n.cfg.ClusterName, n.cfg.NodeID
					out = append(out, notice)
				}
			}
			return out
		},
		told: func(ctx context.Context, notice notice) error {
			ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
			defer cancel()
			err := l.BudgetNotified(ctx, notice.key, notice.Percent, notice.spike)
			if errors.Is(err, ledger.ErrNoBudget) { // it was forgotten meanwhile
				return nil
			}
			return err
		},
	}
}

// webhook is that of the policy in force.
func (n *Node) webhook() (webhook, bool) {
	s := n.current()
	w := s.policyOrNone().Notify
	if w.Webhook == "" {
		return webhook{}, false
	}
	hook := webhook{url: w.Webhook}
	if w.TokenEnv != "" {
		hook.token = os.Getenv(w.TokenEnv)
	}
	return hook, true
}

// noticesOf an account are what people were not told of it yet.
func noticesOf(a *ledger.BudgetAccount, now time.Time) (out []notice) {
	base := notice{
		Time: a.CrossedAt.UTC(), Tenant: a.Key.Tenant, Budget: cmp.Or(a.Terms.Name, a.Key.Limit), Amount: admin.USD(a.Terms.Amount), Spent: admin.USD(a.Spent), key: a.Key,
	}
	of := fmt.Sprintf("budget %q", base.Budget)
	if a.Key.Tenant != "" {
		of += fmt.Sprintf(" of tenant %q", a.Key.Tenant)
	}
	if a.Key.Subject != "" {
		base.Subject = strings.Split(a.Key.Subject, "\x1f")
		of += fmt.Sprintf(" for %q", strings.Join(base.Subject, " / "))
	}
	if a.Key.End != 0 {
		base.Start, base.End = time.Unix(0, a.Key.Start).UTC(), time.Unix(0, a.Key.End).UTC()
		base.stale = now.Sub(base.End) > noticeStale
	}
	if a.Crossed > a.Notified {
		n := base
		n.Event, n.Percent, n.stale = "budget.alert", a.Crossed, base.stale || now.Sub(a.CrossedAt) > noticeOld
		n.ID = noticeID(&n, a.CrossedAt)
		n.Text = fmt.Sprintf("%s has passed %d %%: $%s of $%s are spent", of, n.Percent, n.Spent, n.Amount)
		out = append(out, n)
	}
	if a.Spiked.After(a.SpikeTold) {
		n := base
		n.Event, n.Time, n.spike, n.stale = "budget.spike", a.Spiked.UTC(), a.Spiked, base.stale || now.Sub(a.Spiked) > noticeOld
		n.ID = noticeID(&n, a.Spiked)
		n.Text = fmt.Sprintf("spending of %s has suddenly risen: $%s of $%s are spent", of, n.Spent, n.Amount)
		if a.Terms.Spike.Kill && a.Key.Tenant != "" {
			n.Text += "; the tenant is killed, headgate revive ends that"
		}
		out = append(out, n)
	}
	return out
}

// noticeID is the same for one alert, however often it is tried, and another where a threshold is passed again: of
// what rolls, or was credited.
func noticeID(n *notice, at time.Time) string {
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %q %q %d %d %d %d", n.Event, n.key.Tenant, n.key.Limit, n.key.Subject, n.key.Start, n.key.End, n.Percent, at.UnixNano())
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// newNotifyClient makes the client for webhooks. It follows no redirect: the token is for one host.
func newNotifyClient() *http.Client {
	return &http.Client{
		Timeout:       notifyTime,
		Transport:     &http.Transport{Proxy: nil, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12}, MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// run tells until ctx ends.
func (n *notifier) run(ctx context.Context) {
	defer n.client.CloseIdleConnections()
	wait, said := notifyEvery, ""
	t := time.NewTimer(wait)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		err := n.round(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			wait, said = notifyEvery, ""
		default:
			if wait = max(notifyBackoff, min(2*wait, notifyRest)); err.Error() != said {
				said = err.Error()
				n.log.Warn("the webhook was not told; it will be tried again", "error", err)
			}
		}
		t.Reset(wait)
	}
}

// round tells all that waits. One notice that is refused does not hold up the others, but the
// webhook that does not answer is asked for no more of them.
func (n *notifier) round(ctx context.Context) (failed error) {
	hook, ok := n.hook()
	if !ok || !n.leads() {
		return nil
	}
	for _, notice := range n.pending(maxNotices) {
		answered, err := true, error(nil)
		if !notice.stale {
			answered, err = n.post(ctx, hook, &notice)
		}
		if err == nil {
			err = n.told(ctx, notice)
		}
		if err != nil && failed == nil {
			failed = fmt.Errorf("%s of %q: %w", notice.Event, cmp.Or(notice.Budget, notice.Surface), err)
		}
		if !answered || ctx.Err() != nil {
			break
		}
	}
	return failed
}

// post sends one notice.
func (n *notifier) post(ctx context.Context, hook webhook, notice *notice) (answered bool, err error) {
	body, err := json.Marshal(notice)
	if err != nil {
		return true, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, hook.url, bytes.NewReader(body))
	if err != nil {
		return false, withoutURL(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "headgate")
	req.Header.Set("Idempotency-Key", notice.ID)
	if hook.token != "" {
		req.Header.Set("Authorization", "Bearer "+hook.token)
	}
	resp, err := n.client.Do(req)
	if err != nil {
		return false, withoutURL(err)
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxReply)) // so that the connection can be used again
	if resp.StatusCode/100 != 2 {
		return true, fmt.Errorf("the webhook answered %s", resp.Status)
	}
	return true, nil
}

// withoutURL: that of a webhook is often a secret.
func withoutURL(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err
	}
	return fmt.Errorf("the webhook does not answer: %w", err)
}
