package cluster

import (
	"testing"
	"time"
)

func TestTrail(t *testing.T) {
	t.Parallel()
	const ms = int64(time.Millisecond)
	var tr trail
	due := func(now int64, want uint64) {
		t.Helper()
		if got := tr.due(now * ms); got != want {
			t.Errorf("at %d ms %d is due, not %d", now, got, want)
		}
	}
	due(0, 0)
	tr.note(1000*ms, 10)
	tr.note(1050*ms, 10) // nothing new
	tr.note(1500*ms, 12)
	due(2999, 0)
	due(3000, 10)
	due(3499, 10)
	due(3500, 12)
	due(90_000, 12)
	tr.note(90_000*ms, 20)
	due(90_000, 12)
	due(92_000, 20)
	for i := range uint64(10_000) {
		tr.note(int64(100_000+50*i)*ms, 100+i)
	}
	if most := int(lagAllowed/leadEvery) + 2; len(tr.steps) > most {
		t.Errorf("%d steps are kept, more than %d", len(tr.steps), most)
	}
	tr.note(700_000*ms, 5) // restored
	due(701_000, 0)
	due(702_000, 5)
	tr.forget()
	due(800_000, 0)
}

// TestDeafFollower: one that does not hear the leader, but the third node, does not follow the
// ledger. It is no member any more, and says that it is cut off, until it follows again.
func TestDeafFollower(t *testing.T) {
	for seed := range uint64(8) {
		inRealm(t, seed, func(r *realm) {
			nodes := r.three()
			lead := leaderOf(nodes)
			deaf := others(nodes, lead)[r.rng.IntN(2)]
			rest := others(nodes, deaf)
			r.net.Drop(lead.cfg.Name, deaf.cfg.Name)
			r.propose(lead, kill("one"))
			took := r.within(10*time.Second, "the deaf one has the kill switch, or knows that it is cut off", func() bool {
				return deaf.Facts().Kills.Len() > 0 || !deaf.Leased()
			})
			r.within(10*time.Second, "a view without the deaf one, or its following", func() bool { return deaf.Facts().Kills.Len() > 0 || agree(rest, 2) })
			r.net.Heal()
			r.delays()
			back := r.within(15*time.Second, "one view of three", func() bool { return agree(nodes, 3) && deaf.Facts().Kills.Len() > 0 })
			r.t.Logf("seed %d: %s does not hear %s: known after %v, one of three %v after the heal", seed, deaf.cfg.Name, lead.cfg.Name, took, back)
		})
	}
}
