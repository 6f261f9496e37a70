package node

import (
	"context"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/cluster"
	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
)

// TestSpendable over what was spendable before, the share of the new view, and whether the wait is over.
func TestSpendable(t *testing.T) {
	now := time.Unix(1000, 0)
	at := func(rank, of int) *ledger.Share { return &ledger.Share{Rank: rank, Of: of} }
	for name, c := range map[string]struct {
		before, share *ledger.Share
		settledAt     time.Time
		want          ledger.Share
		ok            bool
	}{
		"no view":                         {nil, nil, time.Time{}, ledger.Share{}, false},
		"the first view":                  {nil, at(1, 3), time.Time{}, ledger.Share{Rank: 1, Of: 3}, true},
		"enters":                          {nil, at(1, 3), now.Add(1), ledger.Share{}, false},
		"entered":                         {nil, at(1, 3), now, ledger.Share{Rank: 1, Of: 3}, true},
		"grows":                           {at(0, 3), at(0, 2), now.Add(1), ledger.Share{Of: 3, Least: true}, true},
		"has grown":                       {at(0, 3), at(0, 2), now, ledger.Share{Of: 2}, true},
		"shrinks":                         {at(0, 2), at(0, 3), now.Add(1), ledger.Share{Of: 3, Least: true}, true},
		"stays":                           {at(1, 3), at(1, 3), now.Add(1), ledger.Share{Rank: 1, Of: 3}, true},
		"is at another place":             {at(1, 3), at(0, 3), now.Add(1), ledger.Share{Of: 3, Least: true}, true},
		"grows twice":                     {&ledger.Share{Of: 3, Least: true}, at(0, 1), now.Add(1), ledger.Share{Of: 3, Least: true}, true},
		"goes":                            {at(0, 3), nil, now.Add(1), ledger.Share{}, false},
		"gone":                            {at(0, 3), nil, now, ledger.Share{}, false},
		"back where it was, not settled":  {&ledger.Share{Of: 3, Least: true}, at(0, 3), now.Add(1), ledger.Share{Of: 3, Least: true}, true},
		"the whole, which is rank 0 of 1": {at(0, 1), at(0, 1), now.Add(1), ledger.Share{Of: 1}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := standing{before: c.before, share: c.share, settledAt: c.settledAt}
			if got, ok := s.spendable(now); got != c.want || ok != c.ok {
				t.Errorf("%+v, %v, want %+v, %v", got, ok, c.want, c.ok)
			}
		})
	}
}

// TestSteps: what is spendable after a row of views, each with its time.
func TestSteps(t *testing.T) {
	type step struct {
		after time.Duration
		epoch uint64
		share *ledger.Share
	}
	whole, half, third := &ledger.Share{Of: 1}, &ledger.Share{Of: 2}, &ledger.Share{Of: 3}
	const w = cluster.TakeoverWait
	for name, c := range map[string]struct {
		steps []step
		want  string // spendable: at once, and when settled
	}{
		"the first view":              {[]step{{0, 1, third}}, "{0 3 false} true, {0 3 false} true"},
		"others go":                   {[]step{{0, 1, third}, {w, 2, half}}, "{0 3 true} true, {0 2 false} true"},
		"others go, one by one":       {[]step{{0, 1, third}, {w, 2, half}, {w / 2, 3, whole}}, "{0 3 true} true, {0 1 false} true"},
		"others go, one by one later": {[]step{{0, 1, third}, {w, 2, half}, {w, 3, whole}}, "{0 2 true} true, {0 1 false} true"},
		"others come":                 {[]step{{0, 1, whole}, {w, 2, half}}, "{0 2 true} true, {0 2 false} true"},
		"others go and come at once":  {[]step{{0, 1, half}, {w, 2, whole}, {w / 2, 3, half}}, "{0 2 true} true, {0 2 false} true"},
		"a view was skipped":          {[]step{{0, 1, half}, {w, 3, half}}, "{0 0 false} false, {0 2 false} true"},
		"joins":                       {[]step{{0, 7, half}}, "{0 0 false} false, {0 2 false} true"},
		"joins, and others go":        {[]step{{0, 7, third}, {w / 2, 8, half}}, "{0 0 false} false, {0 2 false} true"},
		"was out for a moment":        {[]step{{0, 1, half}, {w, 2, nil}, {w / 2, 3, half}}, "{0 0 false} false, {0 2 false} true"},
		"all stays as it was":         {[]step{{0, 1, half}, {w, 2, half}}, "{0 2 false} true, {0 2 false} true"},
	} {
		t.Run(name, func(t *testing.T) {
			var s standing
			now := time.Unix(1000, 0)
			for _, step := range c.steps {
				now = now.Add(step.after)
				s.step(now, &ledger.View{Epoch: step.epoch}, step.share)
			}
			share, ok := s.spendable(now)
			later, okLater := s.spendable(now.Add(w))
			if got := fmt.Sprint(share, ok, ", ", later, okLater); strings.ReplaceAll(got, " , ", ", ") != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// portions gives what a share of a limit of so many tokens is, by the ledger's own arithmetic.
type portions struct {
	policy *ledger.Policy
	known  map[ledger.Share]int64
}

func newPortions(t *rapid.T, tokens int64) *portions {
	p, err := ledger.ParsePolicy(fmt.Appendf(nil, `version: 1
backends: [{name: b, url: "http://127.0.0.1:1"}]
models: [{name: m, backends: [b]}]
plans: [{name: p, limits: [{name: l, scope: org, unit: tokens, algorithm: fixed_window, rate: %d/min}]}]
tenants: [{name: dev, plan: p}]
`, tokens))
	if err != nil {
		t.Fatal(err)
	}
	return &portions{policy: p, known: map[ledger.Share]int64{}}
}

func (p *portions) of(t *rapid.T, s ledger.Share) int64 {
	if n, ok := p.known[s]; ok {
		return n
	}
	ix, err := p.policy.Index(time.Unix(0, 0), 1, s, nil)
	if err != nil {
		t.Fatal(err)
	}
	c, ok := ix.Tenant("dev")
	if !ok {
		t.Fatal("no tenant")
	}
	n := c.Limits[0].Spec.Capacity()
	if c.Limits[0].None {
		n = 0
	}
	p.known[s] = n
	return n
}

// follower is a node that hears of views late, and of some never.
type follower struct {
	name     string
	fence    *cluster.Fence
	standing standing
	late     []time.Duration // for each view; negative: it skips it
	stepped  int             // views dealt with
	sent     time.Time       // of the request for a lease that is under way; zero: none
	answered time.Time
	epoch    uint64
}

// TestSharesNeverAddUpToMore: whatever views come, and however late each node hears of each and gets its
// leases, those that hold one never may spend more of a limit than there is.
func TestSharesNeverAddUpToMore(t *testing.T) {
	const tick = 20 * time.Millisecond
	names := []string{"a", "b", "c"}
	memberships := [][]string{{"a"}, {"a", "b"}, {"b", "c"}, {"a", "b", "c"}}
	worth := 0 // runs in which somebody spent while views differed
	rapid.Check(t, func(t *rapid.T) {
		tokens := rapid.Int64Range(4, 12).Draw(t, "tokens")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "answers"), 0))
		share := newPortions(t, tokens)
		type committed struct {
			view *ledger.View
			at   time.Time
		}
		at, views := time.Unix(1_000_000, 0), []committed(nil)
		begin := at
		for i := range rapid.IntRange(3, 6).Draw(t, "views") {
			v := &ledger.View{Epoch: uint64(i + 1), Partitions: 16, RingVersion: cluster.RingVersion}
			for _, n := range rapid.SampledFrom(memberships).Draw(t, "members") {
				v.Members = append(v.Members, ledger.Member{Name: n, Incarnation: 1})
			}
			views = append(views, committed{v, at})
			at = at.Add(tick * time.Duration(rapid.SampledFrom([]int{3, 30, 60, 90}).Draw(t, "until the next")))
		}
		nodes := make([]*follower, len(names))
		for i, name := range names {
			f := &follower{name: name, fence: cluster.NewFence(cluster.Self{Name: name, Incarnation: 1}, cluster.FenceOptions{})}
			for range views {
				f.late = append(f.late, tick*time.Duration(rapid.SampledFrom([]int{0, 4, 45, -1}).Draw(t, "late")))
			}
			nodes[i] = f
		}
		for now := begin; now.Before(at.Add(3 * time.Second)); now = now.Add(tick) {
			newest := uint64(0)
			for _, v := range views {
				if !v.at.After(now) {
					newest = v.view.Epoch
				}
			}
			spent, epochs := int64(0), map[uint64]bool{}
			for _, f := range nodes {
				for f.stepped < len(views) && !views[f.stepped].at.Add(f.late[f.stepped]).After(now) && !views[f.stepped].at.After(now) {
					v := views[f.stepped].view
					if f.late[f.stepped] >= 0 {
						f.standing.step(now, v, shareOf(v, f.name, 1))
						f.fence.Step(now.UnixNano(), v)
					}
					f.stepped++
				}
				if !f.sent.IsZero() && !now.Before(f.answered) {
					f.fence.Granted(f.sent.UnixNano(), now.UnixNano(), f.epoch)
					f.sent = time.Time{}
				}
				if epoch, ok := f.fence.Want(); ok && f.sent.IsZero() && epoch == newest && f.standing.share != nil {
					f.sent, f.epoch = now, epoch
					f.answered = now.Add(tick * time.Duration([]int{0, 0, 1, 30}[rng.IntN(4)]))
				}
				if !f.fence.Valid(now.UnixNano()) {
					continue
				}
				if s, ok := f.standing.spendable(now); ok {
					spent += share.of(t, s)
					epochs[f.fence.Epoch()] = true
				}
			}
			if spent > tokens {
				t.Fatalf("%v after the first view %d of %d tokens may be spent", now.Sub(begin), spent, tokens)
			}
			if spent > 0 && len(epochs) > 1 {
				worth++
			}
		}
	})
	if worth == 0 {
		t.Error("nobody ever spent while views differed")
	}
}

const caPolicy = `version: 1
backends: [{name: b, url: %q, ca_file: %q}]
models: [{name: m, backends: [b]}]
plans: [{name: p, limits: [{name: org-tokens, scope: org, unit: tokens, rate: 6000/min}]}]
tenants: [{name: dev, plan: p}]
`

// TestPolicyThisNodeCannotUse, as a file is missing that another node has: the one before stays in
// force, for whatever share the node has by then, and readiness says why; once the file is there the policy is
// applied again and in force.
func TestPolicyThisNodeCannotUse(t *testing.T) {
	server := upstreamServer(t)
	var log syncBuffer
	n := start(t, func(c *Config) {
		c.Policy, c.Logger = policyFile(t, fmt.Sprintf(adminPolicy, server)), slog.New(slog.NewTextHandler(&log, nil))
	})
	waitFor(t, "it is ready", func() bool { return n.ready() == nil })
	ca := filepath.Join(t.TempDir(), "ca.pem")
	text := fmt.Sprintf(caPolicy, "https://127.0.0.1:1", ca)
	const bearer = "Bearer node-test-token"
	if status, answer := ask(t, n, "PUT", "/admin/v1/policy", bearer, text); status != http.StatusBadRequest || !strings.Contains(answer, "ca.pem") {
		t.Errorf("applied here: status %d: %s", status, answer)
	}
	// Another node, which has the file, applies it.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := n.cluster.Propose(ctx, setPolicy(t, n, text)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "readiness says why", func() bool {
		status, answer := ask(t, n, "GET", "/readyz", "", "")
		return status == http.StatusServiceUnavailable && strings.Contains(answer, "can't be used here") && strings.Contains(answer, "ca.pem")
	})
	capacity := func() int64 {
		s := n.current()
		c, ok := s.index.Tenant("dev")
		if !ok {
			t.Fatal("no tenant")
		}
		return c.Limits[0].Spec.Capacity()
	}
	if s := n.current(); s.policy.Revision != 1 || capacity() != 1000 {
		t.Errorf("revision %d is in force, with %d tokens", s.policy.Revision, capacity())
	}
	// The view changes meanwhile: its share does, of the policy that is in force.
	n.mu.Lock()
	n.now.share, n.now.settledAt = &ledger.Share{Of: 4}, time.Time{}
	n.mu.Unlock()
	n.notify()
	waitFor(t, "the share changes all the same", func() bool { return capacity() == 250 })
	if c := strings.Count(log.String(), "a policy can't be put in force here"); c != 1 {
		t.Errorf("logged %d times", c)
	}
	if err := os.WriteFile(ca, testCA(t), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, answer := ask(t, n, "PUT", "/admin/v1/policy", bearer, text); status != http.StatusOK || strings.Contains(answer, "not in force") {
		t.Errorf("applied again: status %d: %s", status, answer)
	}
	waitFor(t, "it is in force, and the node ready", func() bool { return capacity() == 1500 && n.current().problem == nil })
}

// TestOutdatedShareIsNotSpent once the lease of before has ended, until the new one is in force.
func TestOutdatedShareIsNotSpent(t *testing.T) {
	n := start(t, func(c *Config) { c.Policy = policyFile(t, fmt.Sprintf(adminPolicy, "http://127.0.0.1:1")) })
	waitFor(t, "the node is counted on", n.leased)
	n.outdatedAt.Store(cluster.Now() + int64(time.Hour))
	if !n.leased() {
		t.Error("the lease of before has not ended yet")
	}
	n.outdatedAt.Store(cluster.Now())
	if n.leased() {
		t.Error("it has ended")
	}
	n.notify() // what is in force is brought up to date
	waitFor(t, "the node is counted on again", n.leased)
}

// waitFor polls a condition of a real node.
func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	const most = 20 * time.Second
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); !cond(); {
		if time.Since(begin) > most {
			t.Fatalf("not within %v: %s", most, what)
		}
		<-tick.C
	}
}

// setPolicy is the command by which another node puts a policy in force.
func setPolicy(t *testing.T, n *Node, text string) *ledgerpb.Command {
	t.Helper()
	plan, err := ledger.Prepare(time.Now(), []byte(text), n.truth.Facts(), n.keyTable(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return &ledgerpb.Command{Version: 1, Actor: "another node", Body: &ledgerpb.Command_SetPolicy{SetPolicy: plan.Command}}
}

// testCA is some authority's certificate.
func testCA(t *testing.T) []byte {
	t.Helper()
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}
