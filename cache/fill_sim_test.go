package cache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestFillSimulation has a small cluster answer requests for few keys while nodes are cut off, killed,
// restarted, cleared and moved on the ring, and leaders do whatever leaders may. Every request ends
// within its time, with its own key's answer; a stream's reader gets a prefix of what its leader
// wrote, or all of it; what was invalidated before a request came is not given to it; at the end
// nothing is left. HEADGATE_FILL_SEED=N replays one, HEADGATE_FILL_SEEDS=N runs so many.
func TestFillSimulation(t *testing.T) {
	first, count := uint64(1), uint64(40)
	if s := os.Getenv("HEADGATE_FILL_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		first, count = n, 1
	} else if s := os.Getenv("HEADGATE_FILL_SEEDS"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		count = n
	}
	var sum simSums
	for seed := first; seed < first+count && !t.Failed(); seed++ {
		synctest.Test(t, func(t *testing.T) {
			t.Cleanup(func() { // after the nodes were closed
				if t.Failed() {
					t.Logf("replay: HEADGATE_FILL_SEED=%d", seed)
				}
			})
			simulate(t, seed, &sum)
		})
	}
	t.Logf("%d seeds: %v", count, sum.turns)
	if count >= 40 && (sum.turns[TurnHit] == 0 || sum.turns[TurnLead] == 0 || sum.turns[TurnLive] == 0 || sum.turns[TurnFailed] == 0 ||
		sum.turns[TurnPass] == 0 || sum.turns[TurnBusy] == 0 || sum.broken == 0 || sum.whole == 0) {
		t.Errorf("something never happened: %+v", sum)
	}
}

type simSums struct {
	turns         [TurnBusy + 1]int
	broken, whole int
}

// sim is one run.
type sim struct {
	*world
	t    *testing.T
	rng  *rand.Rand
	calm bool // no faults: then one at a time leads for a key
	wg   sync.WaitGroup
	open atomic.Int32 // requests that have not ended

	mu      sync.Mutex
	sum     *simSums
	leading map[Key]int
	written map[string]int // by lead: how many chunks were written in all; set at a whole end
	numbers int
}

func simulate(t *testing.T, seed uint64, sum *simSums) {
	rng := rand.New(rand.NewPCG(seed, 11))
	s := &sim{
		world: newWorld(t, 2+rng.IntN(4)), t: t, rng: rng, calm: rng.IntN(4) == 0, sum: sum, leading: map[Key]int{}, written: map[string]int{},
	}
	s.shuffle()
	var keys []Key
	for i := range 1 + rng.IntN(5) {
		keys = append(keys, fillKey(fmt.Sprint(i)))
	}
	for range 150 + rng.IntN(150) {
		for range rng.IntN(12) {
			s.request(s.nodes[rng.IntN(len(s.nodes))], keys[rng.IntN(len(keys))])
		}
		if !s.calm && rng.IntN(6) == 0 {
			s.fault()
		}
		if rng.IntN(20) == 0 {
			s.invalidate(fmt.Sprint(rng.IntN(3)))
		}
		time.Sleep(time.Duration(rng.ExpFloat64() * float64(300*time.Millisecond)))
		s.invariants()
	}
	s.net.Heal()
	s.wg.Wait()
	if n := s.open.Load(); n != 0 {
		t.Errorf("%d requests did not end", n)
	}
}

// shuffle gives each key an owner and successors of its own.
func (s *sim) shuffle() {
	salt := s.rng.Uint64()
	n := len(s.nodes)
	f := func(k Key) []int {
		return rand.New(rand.NewPCG(salt, uint64(k[0]))).Perm(n)
	}
	s.ring.Store(&f)
}

func (s *sim) fault() {
	n := s.nodes[s.rng.IntN(len(s.nodes))]
	other := s.nodes[s.rng.IntN(len(s.nodes))]
	switch s.rng.IntN(7) {
	case 0, 1:
		if n.dead {
			n.start()
		} else {
			n.kill()
		}
	case 2:
		if n != other {
			s.net.Cut(fmt.Sprint("n", n.index), fmt.Sprint("n", other.index))
		}
	case 3:
		s.net.Delay(fmt.Sprint("n", n.index), fmt.Sprint("n", other.index), time.Duration(s.rng.IntN(3000))*time.Millisecond)
	case 4, 5:
		s.net.Heal()
	case 6:
		s.shuffle()
	}
}

// request is one client: it joins and does as it is told.
func (s *sim) request(n *peerNode, k Key) {
	if n.dead {
		return
	}
	ask := Ask{Key: k, Live: s.rng.IntN(2) == 0, Refresh: s.rng.IntN(12) == 0, LeadFor: time.Duration(1+s.rng.IntN(20)) * time.Second}
	if s.rng.IntN(12) == 0 {
		ask.Early, ask.Age = true, time.Duration(s.rng.IntN(10))*time.Second
	}
	rng := rand.New(rand.NewPCG(s.rng.Uint64(), 1))
	patience := time.Duration(s.rng.IntN(40_000)) * time.Millisecond
	e, alive := n.Exact, n.ctx
	stamp := s.stamp.Load()
	s.open.Add(1)
	s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(alive, patience)
		defer cancel()
		began := time.Now()
		turn, err := e.Join(ctx, &ask)
		if time.Since(began) > patience {
			s.t.Errorf("a request of %v waited %v", patience, time.Since(began))
		}
		s.open.Add(-1)
		s.mu.Lock()
		if err == nil {
			s.sum.turns[turn.Kind]++
		}
		s.mu.Unlock()
		if err != nil {
			if ctx.Err() == nil {
				s.t.Errorf("join: %v", err)
			}
			return
		}
		switch turn.Kind {
		case TurnHit:
			s.hit(&ask, turn.Hit, stamp)
		case TurnLead:
			s.lead(ctx, rng, k, turn.Fill)
		case TurnLive:
			s.follow(ctx, rng, k, turn.Live)
		case TurnFailed:
			if broken := turn.Failed.Status == statusBroken && turn.Failed.Body == nil; !broken && !bytes.Equal(turn.Failed.Body, k[:]) {
				s.t.Error("a foreign failure")
			}
		case TurnBusy:
			if !ask.Early {
				s.t.Error("busy, for one that waits")
			}
		}
		if turn.Stale != nil && turn.Stale.Key != k {
			s.t.Error("a foreign stale answer")
		}
	})
}

// hit checks an answer: whose it is, and that it is not older than what was invalidated before it was asked for.
func (s *sim) hit(ask *Ask, h Hit, stamp uint64) {
	if h.Key != ask.Key || !bytes.HasPrefix(h.Body, fmt.Appendf(nil, "%x/", ask.Key)) {
		s.t.Errorf("a foreign answer: %q", h.Body)
	}
	for _, tag := range h.Tags {
		if at, ok := s.void.Load(tag); ok && at.(uint64) <= stamp && at.(uint64) > h.Stamp {
			s.t.Errorf("an answer that was invalidated: stamp %d, at %d, asked at %d, tier %s", h.Stamp, at, stamp, h.Tier)
		}
	}
	if ask.Refresh && !ask.Early && h.Tier != Live {
		s.t.Errorf("a stored answer of tier %q for one who takes none", h.Tier)
	}
}

// lead is a leader, of one of many kinds.
func (s *sim) lead(client context.Context, rng *rand.Rand, k Key, f *Fill) {
	s.mu.Lock()
	s.numbers++
	name := fmt.Sprintf("%x/%d", k, s.numbers)
	s.leading[k]++
	if s.calm && s.leading[k] > 1 && f.b.id.kind != asEarly {
		s.t.Errorf("%d lead at once, though nothing is amiss", s.leading[k])
	}
	s.mu.Unlock()
	done := func() {
		s.mu.Lock()
		s.leading[k]--
		s.mu.Unlock()
	}
	if rng.IntN(4) == 0 {
		var leave context.CancelFunc
		client, leave = context.WithTimeout(client, time.Duration(rng.IntN(3000))*time.Millisecond)
		defer leave()
	}
	ctx, cancel := f.Context(client)
	defer cancel()
	longest := 900 // ms: below every LeadFor
	if !s.calm && rng.IntN(5) == 0 {
		longest = 15_000
	}
	wait := func() bool {
		select {
		case <-time.After(time.Duration(rng.IntN(longest)) * time.Millisecond):
			return true
		case <-ctx.Done():
			return false
		}
	}
	if !wait() {
		done()
		f.Abandon(true)
		return
	}
	chunks := 0
	if rng.IntN(2) == 0 {
		f.Begin("text/event-stream")
		for range rng.IntN(20) {
			f.Write(fmt.Appendf(nil, "%s/%d;", name, chunks))
			chunks++
			if rng.IntN(4) == 0 && !wait() {
				break
			}
		}
	}
	done()
	s.conclude(rng, k, f, name, chunks)
}

func (s *sim) conclude(rng *rand.Rand, k Key, f *Fill, name string, chunks int) {
	s.mu.Lock()
	s.written[name] = chunks
	s.mu.Unlock()
	en := &Entry{Body: fmt.Appendf(nil, "%s", name), Tags: []string{fmt.Sprint(rng.IntN(3))}, Life: Life{
		TTL: time.Duration(rng.IntN(10)) * time.Second, Stale: time.Duration(rng.IntN(5)) * time.Second, StaleIfError: time.Minute,
	}}
	switch rng.IntN(12) {
	case 0:
		f.Failed(Failure{Status: 500, Body: k[:]})
	case 1:
		f.Abandon(rng.IntN(2) == 0)
	case 2:
		f.Broken()
	case 3:
		f.Unshareable()
	case 4:
		f.Share(en)
	default:
		f.Store(en)
	}
	if rng.IntN(4) == 0 { // nothing counts after the end
		f.Write([]byte("foreign"))
		f.Store(&Entry{Body: []byte("foreign")})
	}
}

// follow reads a stream: it is one lead's, from its beginning and without a gap.
func (s *sim) follow(ctx context.Context, rng *rand.Rand, k Key, r *Reader) {
	defer r.Close()
	var all []byte
	for leaves := rng.IntN(30); leaves > 0; leaves-- {
		p, err := r.Next(ctx)
		if err == nil {
			all = append(all, p...)
			continue
		}
		whole := errors.Is(err, io.EOF)
		if !whole && !errors.Is(err, ErrBroken) && ctx.Err() == nil {
			s.t.Errorf("a stream ended with %v", err)
		}
		s.mu.Lock()
		if whole {
			s.sum.whole++
		} else if errors.Is(err, ErrBroken) {
			s.sum.broken++
		}
		s.mu.Unlock()
		s.prefix(k, all, whole)
		return
	}
	s.prefix(k, all, false)
}

func (s *sim) prefix(k Key, all []byte, whole bool) {
	parts := strings.Split(strings.TrimSuffix(string(all), ";"), ";")
	if len(all) == 0 {
		return
	}
	name := parts[0][:strings.LastIndexByte(parts[0], '/')]
	if !strings.HasPrefix(name, fmt.Sprintf("%x/", k)) {
		s.t.Errorf("a foreign stream: %q", parts[0])
	}
	for i, p := range parts {
		if p != fmt.Sprintf("%s/%d", name, i) {
			s.t.Errorf("chunk %d is %q, of %s", i, p, name)
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if whole && len(parts) != s.written[name] {
		s.t.Errorf("%d of %d chunks of %s, which was said to be whole", len(parts), s.written[name], name)
	}
}

// invariants looks into every node.
func (s *sim) invariants() {
	for _, n := range s.nodes {
		if n.dead {
			continue
		}
		n.held(func() {
			waiting := 0
			for id, b := range n.branches {
				waiting += b.waiters.Len()
				if b.retired || b.id != id || b.done() {
					s.t.Errorf("a branch that is over is in the map: %+v", b)
				}
			}
			if waiting > n.waiting { // those of retired branches count, too
				s.t.Errorf("%d wait, %d are counted", waiting, n.waiting)
			}
			for k, f := range n.referee.flights {
				if wrong := f.wrong(k); wrong != "" {
					s.t.Error(wrong)
				}
			}
		})
	}
}
