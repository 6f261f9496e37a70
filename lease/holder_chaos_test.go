package lease

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/limiter"
)

// anyResponse draws what an owner, or whoever says that it is one, may say.
func anyResponse(t *rapid.T, s *stand, ids []uint64) *Response {
	small := func(name string, more ...int64) int64 {
		return rapid.SampledFrom(append([]int64{0, 1, 2, 3, 5, 8}, more...)).Draw(t, name)
	}
	odd := []int64{-1, math.MinInt64, math.MaxInt64, limiter.MaxUnits + 1, 1 << 62}
	amount := func(name string) int64 {
		if rapid.IntRange(0, 9).Draw(t, "odd") == 0 {
			return rapid.SampledFrom(odd).Draw(t, name)
		}
		return rapid.Int64Range(0, 1000).Draw(t, name)
	}
	bucket := func() Bucket {
		k := rapid.SampledFrom([]limiter.Key{keyA, keyZ}).Draw(t, "key")
		return Bucket{uint32(small("partition")) % 3, k}
	}
	limits := []limiter.Limit{*perSec, *perSec, *daily, *slots8, {}, {Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 10, Per: 1}}}
	p := s.h.peer(uint64(rapid.SampledFrom([]int64{ownerA, ownerB}).Draw(t, "owner")))
	r := &Response{Owner: uint64(small("stranger")), Holder: self, Epoch: uint64(small("epoch")), Session: uint64(small("session")), Left: amount("left")}
	if p != nil {
		r.Owner = p.id
		r.Answers = uint64(max(0, int64(p.seq)-small("answers")))
		r.Epoch = s.view.Epoch - uint64(rapid.IntRange(0, 1).Draw(t, "behind"))
	}
	r.RollTaken, r.RollWanted = uint64(small("taken", odd...)), uint64(small("wanted", odd...))
	for range rapid.IntRange(0, 2).Draw(t, "leases") {
		l := Lease{Bucket: bucket(), Series: uint64(small("series")), Number: uint64(small("number")), Depth: amount("depth"), Granted: amount("granted"), Level: amount("level")}
		l.Limit = rapid.SampledFrom(limits).Draw(t, "limit")
		if l.Limit.Algorithm == limiter.GCRA {
			l.Share = uint32(rapid.SampledFrom([]int64{0, 1, ShareOne / 3, ShareOne, math.MaxUint32}).Draw(t, "share"))
		}
		if l.Limit.Algorithm == limiter.FixedWindow {
			l.Window = rapid.SampledFrom([]int64{0, s.clock().Wall / int64(24*time.Hour), math.MaxInt64}).Draw(t, "window")
		}
		l.Rolled = rapid.IntRange(0, 3).Draw(t, "rolled") == 0
		r.Leases = append(r.Leases, l)
	}
	for range rapid.IntRange(0, 1).Draw(t, "refusals") {
		r.Refusals = append(r.Refusals, Refusal{Bucket: bucket(), Cost: amount("cost"), For: amount("for"), RetryAfter: amount("retry"), Level: amount("level")})
	}
	for range rapid.IntRange(0, 1).Draw(t, "forgotten") {
		r.Forgotten = append(r.Forgotten, Series{uint64(rapid.SampledFrom([]int64{ownerA, ownerB}).Draw(t, "granter")), uint64(small("number"))})
	}
	if len(ids) > 0 && rapid.Bool().Draw(t, "decides") {
		d := AskDecision{ID: ids[0], Refused: int(small("refused", -1, -1, -1, -2, -3, -4, math.MaxInt64)), Left: amount("left")}
		for range rapid.IntRange(0, 3).Draw(t, "charges") {
			d.Charges = append(d.Charges, ChargeDecision{
				Decision: limiter.Decision{Admitted: rapid.Bool().Draw(t, "admitted")}, Series: uint64(small("series")), Lent: rapid.Bool().Draw(t, "lent"),
			})
		}
		r.Decisions = append(r.Decisions, d)
	}
	return r
}

// sound checks what must hold of a holder whatever it was told.
func sound(t *rapid.T, h *Holder) {
	leases := map[uint64]int{}
	queued := 0
	for _, b := range h.buckets {
		k := b.key()
		if h.lookup(&k) != b {
			t.Fatalf("%v is not where it is looked for", k)
		}
		c := b.lease.Load()
		found := c == nil
		for s := b.series; s != nil; s = s.next() {
			if s.queued {
				queued++
			}
			if s.gone || s.returned.Load() < 0 || s.refunded.Load() < 0 || s.debt.Load() < 0 || s.open.Load() < 0 {
				t.Fatalf("series %d: gone %v, returned %d, refunded %d, debt %d, open %d", s.number, s.gone, s.returned.Load(), s.refunded.Load(), s.debt.Load(), s.open.Load())
			}
			if c != nil && c.series == s {
				found = true
				if s.dead || s.cell.Load() != c {
					t.Fatalf("series %d is dead and spent", s.number)
				}
				if !s.detached {
					leases[s.granter()]++
				}
			}
		}
		if !found {
			t.Fatalf("%v has a lease of no series", k)
		}
		if c == nil {
			continue
		}
		if w := c.word.Load(); w == sealed || c.kind != kindRate && w < 0 || c.holds(w, h.cfg.Clock().Now) > c.depth {
			t.Fatalf("word %d of %+v", w, c.depth)
		}
	}
	for _, p := range h.peers {
		if p.leases != leases[p.id] {
			t.Fatalf("%d leases of %d, counted as %d", leases[p.id], p.id, p.leases)
		}
		for _, s := range p.queue {
			if !s.queued {
				t.Fatalf("series %d is in a queue and does not know", s.number)
			}
			if !s.gone {
				queued--
			}
		}
	}
	if queued != 0 {
		t.Fatalf("%d series think that they are in a queue", queued)
	}
}

// TestHolderSurvivesWhateverItIsTold draws what owners say, true or not, between what callers do.
func TestHolderSurvivesWhateverItIsTold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newStand(t, 0)
		var held [][]limiter.Charge
		var asked [][]limiter.Charge
		var ids []uint64
		charges := func(t *rapid.T) (cs []limiter.Charge) {
			for range rapid.IntRange(1, 2).Draw(t, "charges") {
				cs = append(cs, limiter.Charge{
					Key: rapid.SampledFrom([]limiter.Key{keyA, keyZ}).Draw(t, "key"), Limit: rapid.SampledFrom([]*limiter.Limit{perSec, perSec, daily, slots8}).Draw(t, "limit"),
					Cost: rapid.SampledFrom([]int64{0, 1, 3, 100, 1001, -5, math.MaxInt64}).Draw(t, "cost"), Shadow: rapid.Bool().Draw(t, "shadow"),
				})
			}
			return cs
		}
		t.Repeat(map[string]func(*rapid.T){
			"handle": func(t *rapid.T) {
				r := anyResponse(t, s, ids)
				s.h.Handle(r)
				for _, d := range r.Decisions {
					cs := asked[0]
					s.h.Decided(cs, 1<<len(cs)-1, &d, s.now.Load()-1e6, make([]limiter.Decision, 2))
					held, asked, ids = append(held, cs), asked[1:], ids[1:]
				}
			},
			"step": func(t *rapid.T) {
				owner := func() uint64 { return uint64(rapid.SampledFrom([]int64{ownerA, ownerB}).Draw(t, "owner")) }
				s.step(s.view.Epoch+uint64(rapid.IntRange(0, 2).Draw(t, "epochs")), owner(), owner())
				s.view = s.h.view.Load()
			},
			"take": func(t *rapid.T) {
				cs, ds := charges(t), make([]limiter.Decision, 2)
				s.h.Peek(cs, ds)
				if refused, missing := s.h.Take(cs, ds); refused >= 0 && missing != 0 {
					t.Fatalf("refused %d, missing %b", refused, missing)
				}
				held = append(held, cs)
			},
			"settle": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip()
				}
				actual := []int64{rapid.SampledFrom([]int64{0, 0, 2, 100, math.MaxInt64, -1}).Draw(t, "actual"), 0}
				cs := held[0]
				held = held[1:]
				if rapid.Bool().Draw(t, "cancel") {
					s.h.Cancel(cs, 3)
					return
				}
				s.h.Settle(cs, actual[:len(cs)], make([]limiter.Decision, 2))
			},
			"ask": func(t *rapid.T) {
				cs := charges(t)
				m, _ := s.h.Owner(&cs[0])
				a := s.h.Ask(cs, 1<<len(cs)-1, 0, rapid.Bool().Draw(t, "peek"))
				if q := s.h.Request(m.Incarnation, []Ask{a}); q != nil {
					asked, ids = append(asked, cs), append(ids, a.ID)
				}
			},
			"request": func(t *rapid.T) {
				s.h.Request(uint64(rapid.SampledFrom([]int64{ownerA, ownerB}).Draw(t, "owner")), nil)
			},
			"pass": func(t *rapid.T) { s.pass(time.Duration(rapid.SampledFrom([]int64{1e6, 1e8, 1e9, 2e10}).Draw(t, "ns"))) },
			"yield": func(t *rapid.T) {
				key := rapid.SampledFrom([]limiter.Key{keyA, keyZ}).Draw(t, "key")
				s.h.Yield(&key)
			},
			"drain": func(t *rapid.T) {
				if rapid.IntRange(0, 19).Draw(t, "drain") == 0 {
					s.h.Drain()
				}
			},
			"": func(t *rapid.T) {
				s.h.Owners() // hands out what is new
				s.h.Levels("a")
				sound(t, s.h)
			},
		})
	})
}
