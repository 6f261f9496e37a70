package semantic

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"headgate/cache/threshold"
)

// TestSimulation has requests of three tenants, each with users of its own, on nodes that are cut off, die and disagree about the ring. Nobody
// gets the answer of another user, or one that was reported wrong; and in the end all is where it belongs.
// HEADGATE_SEMANTIC_SEED replays one.
func TestSimulation(t *testing.T) {
	seeds := []uint64{1, 2, 3, 4, 5, 6}
	if s := os.Getenv("HEADGATE_SEMANTIC_SEED"); s != "" {
		seed, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seeds = []uint64{seed}
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			worldTest(t, 4, func(w *world) {
				w.t = t
				s := &sim{w: w, rng: rand.New(rand.NewPCG(seed, 9)), wrong: map[string]bool{}}
				s.spread()
				s.adopt(true)
				for range 600 {
					s.step()
				}
				s.settle()
				if s.hits < 30 || s.reports == 0 {
					t.Errorf("seed %d: %d hits, %d reports: nothing was tried", seed, s.hits, s.reports)
				}
			})
		})
	}
}

type sim struct {
	w             *world
	rng           *rand.Rand
	order         []int
	wrong         map[string]bool // ids
	last          string
	n             int
	hits, reports int
}

func (s *sim) node() *worldNode {
	for {
		if n := s.w.nodes[s.rng.IntN(len(s.w.nodes))]; !n.isDead() {
			return n
		}
	}
}

// spread changes the ring, which nodes hear of by adopt.
func (s *sim) spread() {
	s.order = nil
	for _, i := range s.rng.Perm(len(s.w.nodes)) {
		if !s.w.nodes[i].isDead() && (len(s.order) == 0 || s.rng.IntN(3) > 0) {
			s.order = append(s.order, i)
		}
	}
}

func (s *sim) adopt(all bool) {
	for _, n := range s.w.nodes {
		if !n.isDead() && (all || s.rng.IntN(2) == 0) {
			order := s.order
			n.order.Store(&order)
			n.Moved()
		}
	}
}

func (s *sim) step() {
	w := s.w
	switch x := s.rng.IntN(100); {
	case x < 70:
		s.request(s.node())
	case x < 76:
		time.Sleep(time.Duration(s.rng.IntN(8000)) * time.Millisecond)
	case x < 80:
		s.spread()
	case x < 88:
		s.adopt(false)
	case x < 90:
		a, b := s.rng.IntN(len(w.nodes)), s.rng.IntN(len(w.nodes))
		if a != b {
			w.net.Cut(fmt.Sprint("n", a), fmt.Sprint("n", b))
		}
	case x < 93:
		w.net.Heal()
	case x < 99 && s.last != "":
		r, err := s.node().Wrong(context.Background(), s.last, "sim")
		if err != nil {
			w.t.Error(err)
		}
		if r.Unreached == 0 {
			s.wrong[s.last] = true
			s.reports++
		}
		s.last = ""
	case x == 99 && s.rng.IntN(3) == 0:
		w.nodes[3].kill()
		s.spread()
		s.adopt(true)
	}
}

func (s *sim) request(n *worldNode) {
	tenant := fmt.Sprint("t", s.rng.IntN(3))
	user := fmt.Sprint(tenant, "u", s.rng.IntN(2))
	text := []string{"What's my account balance?", "what's my account balance", "WHAT'S MY ACCOUNT BALANCE?"}[s.rng.IntN(3)]
	q := question(text, func(q *Question) { q.Tenant, q.Partition, q.Policy.Audit = tenant, keyOf(user), 0.2 })
	a := n.ask(q)
	if a.Entry != nil && !strings.HasPrefix(string(a.Entry.Body), user+" ") {
		s.w.t.Errorf("%q for %s", a.Entry.Body, user)
	}
	if a.Action == threshold.Serve {
		if s.hits++; s.wrong[a.EntryID] {
			s.w.t.Errorf("entry %s was reported wrong, and is served", a.EntryID)
		}
		s.last = a.EntryID
		return
	}
	s.n++
	e := answerTo(q, fmt.Sprint(user, " ", s.n))
	e.Life.TTL = 10 * time.Minute
	n.Learn(context.Background(), q, &a, Label{Known: a.Entry != nil, Same: s.rng.IntN(10) > 0}, e)
	if s.rng.IntN(2) == 0 {
		synctest.Wait()
	}
}

// settle has all nodes agree, and looks whether what they hold is where it belongs.
func (s *sim) settle() {
	s.w.net.Heal()
	s.adopt(true)
	time.Sleep(time.Minute)
	synctest.Wait()
	for _, n := range s.w.nodes {
		if n.isDead() {
			continue
		}
		for _, p := range n.shard.held() {
			if owner := n.ring(p.place.key)[0]; owner != "" {
				s.w.t.Errorf("node %d holds a partition of %s", n.index, owner)
			}
		}
		(&place1{t: s.w.t, shard: n.shard}).sound()
		n.shard.mu.Lock()
		for id, e := range n.shard.entries {
			if s.wrong[formatID(id)] {
				s.w.t.Errorf("entry %s was reported wrong, and is there", formatID(id))
			}
			if want := keyOf(strings.Fields(string(e.about.Body))[0]); e.p.place.key != want {
				s.w.t.Errorf("%q is in the partition of another", e.about.Body)
			}
		}
		n.shard.mu.Unlock()
	}
}
