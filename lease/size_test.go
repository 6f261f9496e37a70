package lease

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/limiter"
)

func gcra(count, burst int64) *limiter.Limit {
	return &limiter.Limit{Rate: limiter.Rate{Count: count, Per: time.Second}, Burst: burst, Revision: 1}
}

// askingOf is a holder that asks so many requests of one unit a second.
func askingOf(requests, depth, level int64) SightHolder {
	return SightHolder{At: 1, Depth: depth, Level: level, Demand: requests * 1024, Cost: 1, Live: true}
}

func TestTopup(t *testing.T) {
	now := int64(1)
	sight := func(l *limiter.Limit, level int64, hs ...SightHolder) *Sight {
		s := &Sight{Now: now, Limit: l, Level: level, Holders: hs}
		for _, h := range hs {
			s.Share, s.Outstanding = s.Share+h.Share, s.Outstanding+h.Depth
		}
		return s
	}
	self := askingOf(100, 0, 0)
	self.Self = true
	for _, c := range []struct {
		name                    string
		s                       *Sight
		whole, leased, refusing bool
	}{
		{"ample: a lease, and leave to ask", sight(gcra(1000, 10_000), 9000, askingOf(100, 0, 0), askingOf(100, 40, 40)), false, true, false},
		{"scarce: a lease, and nothing beside", sight(gcra(100, 1000), 10, askingOf(100, 20, 0), askingOf(100, 20, 5)), false, true, true},
		{"who seldom asks has no lease", sight(gcra(100, 1000), 900, askingOf(1, 0, 0), askingOf(50, 20, 5)), false, false, false},
		{"a small bucket is decided exactly", sight(gcra(10, 10), 9, askingOf(4, 0, 0), askingOf(5, 0, 0)), false, false, false},
		{"but not where the crowd is far too large", sight(gcra(10, 10), 1, askingOf(40, 0, 0), askingOf(50, 0, 0)), false, true, true},
		{"the only holder of a scarce bucket has it all", sight(gcra(100, 1000), 10, askingOf(200, 20, 0)), true, true, true},
		{"the owner's own process asks", sight(gcra(100, 1000), 10, self), false, true, false},
		{"but waits for its part where others ask", sight(gcra(100, 1000), 10, self, askingOf(100, 20, 5)), false, true, true},
		{"nobody asks", sight(gcra(100, 1000), 1000, askingOf(0, 0, 0)), false, false, false},
	} {
		share, depth, grant, refuse := Topup{}.Size(c.s, 0)
		if (share == ShareOne) != c.whole || (depth > 0) != c.leased || (refuse > 0) != c.refusing || grant > c.s.Level {
			t.Errorf("%s: share %d, depth %d, grant %d, refuse %d", c.name, share, depth, grant, refuse)
		}
	}
}

func TestTopupForgetsDemand(t *testing.T) {
	s := &Sight{Now: 1, Limit: gcra(100, 1000), Level: 900, Holders: []SightHolder{askingOf(50, 20, 5), askingOf(50, 0, 0)}}
	if _, depth, _, _ := (Topup{}).Size(s, 0); depth == 0 {
		t.Fatal("no lease")
	}
	s.Now += int64(10 * time.Second)
	if _, depth, _, _ := (Topup{}).Size(s, 0); depth != 0 {
		t.Fatalf("a depth of %d for who has not been heard of for 10 s", depth)
	}
}

func TestTopupRecalls(t *testing.T) {
	s := &Sight{Now: 1, Limit: gcra(100, 1000), Level: 5, Holders: []SightHolder{askingOf(1, 0, 0), askingOf(10, 900, 800)}}
	if !(Topup{}).Recall(s, 0, 50) {
		t.Error("refused while 800 lie idle")
	}
	if (Topup{}).Recall(s, 0, 900) {
		t.Error("recalled what does not cover it")
	}
	s.Holders[1] = askingOf(500, 30, 20)
	if (Topup{}).Recall(s, 0, 15) {
		t.Error("recalled above the limit, where all is spent as it comes")
	}
}

// TestTopupOfASmallBucket: each unit counts, so one that lies elsewhere is called back, and none is lost with a part that
// has come of the next.
func TestTopupOfASmallBucket(t *testing.T) {
	busy := askingOf(100, 5, 2)
	s := &Sight{Now: 1, Limit: gcra(1, 5), Holders: []SightHolder{askingOf(1, 0, 0), busy}}
	if !(Topup{}).Recall(s, 0, 1) || (Topup{}).Recall(s, 0, 3) {
		t.Error("of two that lie with another one is to be recalled, and three are not")
	}
	s = &Sight{Now: 1, Limit: gcra(1, 5), Part: 3e8, Holders: []SightHolder{askingOf(100, 0, 0)}}
	if share, _, _, _ := (Topup{}).Size(s, 0); share != 0 {
		t.Errorf("a share of %d, while three tenths of a unit would be lost", share)
	}
	s.Part = 1e7
	if share, depth, _, _ := (Topup{}).Size(s, 0); share != ShareOne || depth != 5 {
		t.Errorf("a share of %d and a depth of %d for the only holder", share, depth)
	}
	s.Part, s.Holders[0].Share, s.Holders[0].Depth = 3e8, ShareOne, 5
	if share, _, _, _ := (Topup{}).Size(s, 0); share != ShareOne {
		t.Errorf("it keeps a share of %d of what it has", share)
	}
}

// TestTopupIsSane: whatever it sees, it wants nothing that cannot be.
func TestTopupIsSane(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := gcra(rapid.Int64Range(1, 1<<40).Draw(t, "count"), rapid.Int64Range(1, 1<<40).Draw(t, "burst"))
		s := &Sight{Now: 1 << 40, Limit: l, Level: rapid.Int64Range(-1<<40, l.Burst).Draw(t, "level")}
		for range rapid.IntRange(1, 5).Draw(t, "holders") {
			h := SightHolder{
				At: rapid.Int64Range(0, 1<<40).Draw(t, "at"), Depth: rapid.Int64Range(0, l.Burst).Draw(t, "depth"),
				Demand: rapid.Int64Range(0, 1<<60).Draw(t, "demand"), Cost: rapid.Int64Range(0, 1<<50).Draw(t, "cost"),
				Live: rapid.Bool().Draw(t, "live"), Self: rapid.Bool().Draw(t, "self"), Share: rapid.Uint32Range(0, ShareOne).Draw(t, "share"),
			}
			h.Level = rapid.Int64Range(0, h.Depth).Draw(t, "in")
			s.Share, s.Outstanding = min(s.Share+h.Share, ShareOne), s.Outstanding+h.Depth
			s.Holders = append(s.Holders, h)
		}
		i := rapid.IntRange(0, len(s.Holders)-1).Draw(t, "i")
		share, depth, grant, refuse := Topup{}.Size(s, i)
		if share > ShareOne || depth < 0 || depth > l.Burst || grant < 0 || grant > max(s.Level, 0) ||
			refuse < 0 || refuse > int64(time.Second) || depth == 0 && (share > 0 || grant > 0) {
			t.Fatalf("share %d, depth %d, grant %d, refuse %d", share, depth, grant, refuse)
		}
	})
}
