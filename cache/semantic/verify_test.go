package semantic

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"

	"headgate/cache/threshold"
)

// counted is what speaks of one decision: the owner's figures, and what its asker remembers.
type counted struct {
	explored, served, hits, budget, seen int64
	recent                               int
}

func countedOf(owner, asker *worldNode) (c counted) {
	synctest.Wait()
	for _, s := range owner.Stats() {
		c.explored, c.served, c.hits, c.budget = s.Explored, s.Served, s.Budget.WouldHits, s.Budget.Served
		for _, n := range s.ServedAt {
			c.seen += n
		}
	}
	for _, d := range asker.Recent() {
		if d.Action != threshold.Miss.String() {
			c.recent++
		}
	}
	return c
}

// TestVerifierHasTheLastWord has a borderline hit counted by what its verifier said, wherever its owner is.
func TestVerifierHasTheLastWord(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		owner := w.nodes[0]
		owner.learn(question("How do I reset my password", nil), "so")
		near := question("How can I reset my password", func(q *Question) { q.Verify = true }) // .866 at .85
		want := countedOf(owner, owner)
		for _, n := range w.nodes {
			for _, same := range []bool{false, true} {
				was := countedOf(owner, n)
				a := n.ask(near)
				if a.Action != threshold.Serve || !a.Borderline {
					t.Fatalf("%+v", a)
				}
				if got := countedOf(owner, n); got != was {
					t.Errorf("before the verifier was asked: %+v, not %+v", got, was)
				}
				for range 2 { // the second says nothing
					n.Verified(near, &a, same)
				}
				want.recent = was.recent + 1
				if same {
					want.served, want.hits, want.budget, want.seen = want.served+1, want.hits+1, want.budget+1, want.seen+1
				} else {
					want.explored++
				}
				if got := countedOf(owner, n); got != want {
					t.Errorf("node %d, the same question: %t: %+v, not %+v", n.index, same, got, want)
				}
				d, action := n.Recent()[0], map[bool]threshold.Action{true: threshold.Serve, false: threshold.Explore}[same]
				if a.Action != action || d.Action != action.String() || d.Why != a.Why || d.Entry != a.EntryID || !strings.Contains(d.Why, "verifier") {
					t.Errorf("%+v, remembered as %+v", a, d)
				}
				if a.Action == threshold.Explore {
					n.Learn(context.Background(), near, &a, Label{Known: true}, nil)
				}
			}
		}
		synctest.Wait()
		if s := owner.Stats()[0]; s.Different != 2 || s.Budget.Audited != 0 || s.Unknown != 0 {
			t.Errorf("what the verifier kept from being served: %+v", s)
		}
	})
}

// TestVerifierIsNotAsked has what is no close thing, or has no verifier, counted at once.
func TestVerifierIsNotAsked(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		owner, asker := w.nodes[0], w.nodes[1]
		stored := question("How do I reset my password", nil)
		owner.learn(stored, "so")
		sure := *stored
		sure.Verify = true
		for name, q := range map[string]*Question{"the same words": &sure, "no verifier": question("How can I reset my password", nil)} {
			was := countedOf(owner, asker)
			a := asker.want(q, "so")
			got := countedOf(owner, asker)
			if got.served != was.served+1 || got.budget != was.budget+1 || got.recent != was.recent+1 {
				t.Errorf("%s: %+v after %+v", name, got, was)
			}
			asker.Verified(q, &a, true)
			if again := countedOf(owner, asker); again != got {
				t.Errorf("%s: counted twice: %+v", name, again)
			}
		}
	})
}

// TestVerifierWhereNoModelIsAsked has the audit that was left out missed by the budget only where the hit was served.
func TestVerifierWhereNoModelIsAsked(t *testing.T) {
	worldTest(t, 2, func(w *world) {
		owner := w.nodes[0]
		owner.learn(question("How do I reset my password", nil), "so")
		near := question("How can I reset my password", func(q *Question) { q.Verify, q.Only, q.Policy.Audit = true, true, 1 })
		want := int64(0)
		for _, n := range w.nodes {
			for _, same := range []bool{false, true} {
				a := n.ask(near)
				n.Verified(near, &a, same)
				synctest.Wait()
				if same {
					want++
				}
				if got := owner.Stats()[0].Budget.Unlabelled; got != want {
					t.Errorf("node %d, the same question: %t: %d, not %d", n.index, same, got, want)
				}
			}
		}
	})
}

// TestWrongFollowsTheVerifier has a report count what was served in the end, and nothing else.
func TestWrongFollowsTheVerifier(t *testing.T) {
	worldTest(t, 1, func(w *world) {
		n := w.nodes[0]
		near := question("How can I reset my password", func(q *Question) { q.Verify = true })
		for _, same := range []bool{false, true} {
			n.learn(question("How do I reset my password", nil), "so")
			a := n.ask(near)
			n.Verified(near, &a, same)
			synctest.Wait()
			e := n.shard.find(wallNow(), near).e
			if hits := len(e.hits); (hits == 1) != same || hits > 1 {
				t.Errorf("the verifier said %t: %d hits are remembered", same, hits)
			}
			if d, ok := n.recent.served(a.id); ok != same {
				t.Errorf("the verifier said %t: %+v is remembered as served", same, d)
			}
			n.shard.mu.Lock()
			n.shard.drop(e, &n.shard.counts.expired)
			n.shard.mu.Unlock()
		}
	})
}
