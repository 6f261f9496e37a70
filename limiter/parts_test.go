package limiter

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

func part(of int32, burst int64) *Limit {
	return &Limit{Algorithm: GCRA, Rate: Rate{Count: burst, Per: time.Minute}, Burst: burst, Revision: uint64(of), Parts: of}
}

// TestPartsKeepTheLevel: a part that grows gains room and no level, one that shrinks loses
// what has no room; debt stays debt. The same change of a whole keeps the deficit.
func TestPartsKeepTheLevel(t *testing.T) {
	for name, c := range map[string]struct {
		from, to    *Limit
		spent, want int64
	}{
		"grows, full":          {part(3, 20), part(2, 30), 0, 20},
		"grows, half":          {part(3, 20), part(2, 30), 10, 10},
		"grows, empty":         {part(3, 20), part(2, 30), 20, 0},
		"shrinks, full":        {part(2, 30), part(3, 20), 0, 20},
		"shrinks, still room":  {part(2, 30), part(3, 20), 5, 20},
		"shrinks, empty":       {part(2, 30), part(3, 20), 30, 0},
		"shrinks, in debt":     {part(2, 30), part(3, 20), 40, -10},
		"becomes the whole":    {part(2, 30), part(0, 60), 30, 0},
		"the whole is lowered": {part(0, 30), part(0, 20), 15, 5},
		"the whole is raised":  {part(0, 20), part(0, 30), 15, 15},
	} {
		var s State
		c.from.owe(&s, 0, product(c.spent, int64(time.Minute)))
		c.to.Convert(&s, 0, c.from)
		deficit, rest := c.to.deficit(&s, 0).over(int64(time.Minute))
		if got := c.to.Burst - deficit; got != c.want || rest != 0 {
			t.Errorf("%s: level %d, want %d", name, got, c.want)
		}
	}
}

// TestPartsNeverGain: whatever parts a bucket is made of in turn, its level never rises but by
// its refill.
func TestPartsNeverGain(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const whole = 600
		var s State
		now, limit := int64(0), part(1, whole)
		spent := product(rapid.Int64Range(0, 2*whole).Draw(t, "spent"), int64(time.Minute))
		limit.owe(&s, now, spent)
		for range rapid.IntRange(1, 8).Draw(t, "changes") {
			of := int32(rapid.IntRange(1, 6).Draw(t, "of"))
			next := part(of, whole/int64(of))
			before, _ := limit.deficit(&s, now).over(int64(time.Minute))
			level := limit.Burst - before
			next.Convert(&s, now, limit)
			after, _ := next.deficit(&s, now).over(int64(time.Minute))
			if got := next.Burst - after; got > level+1 || got > next.Burst {
				t.Fatalf("%d of %d parts: level %d became %d", of, limit.Parts, level, got)
			}
			limit, now = next, now+rapid.Int64Range(0, int64(10*time.Second)).Draw(t, "wait")
		}
	})
}
