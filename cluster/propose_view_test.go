package cluster

import (
	"fmt"
	"strings"
	"testing"

	"headgate/cluster/ledger"
)

// proposeNow is the instant of the tables; what is ago in them is before it.
const proposeNow = 1_000_000 * fenceMS

func saw(name string, incarnation uint64, gossip Liveness, keptAgoMS int64) Seen {
	s := Seen{Name: name, Incarnation: incarnation, Gossip: gossip}
	if keptAgoMS >= 0 {
		s.LastKeep = proposeNow - keptAgoMS*fenceMS
	}
	return s
}

func removed(s Seen, agoMS int64) Seen {
	s.Removed = proposeNow - agoMS*fenceMS
	return s
}

func membersOf(v *ledger.View) string {
	if v == nil {
		return "as it is"
	}
	var names []string
	for _, m := range v.Members {
		names = append(names, fmt.Sprintf("%s.%d", m.Name, m.Incarnation))
	}
	return strings.Join(names, " ")
}

func TestNextView(t *testing.T) {
	const never = -1
	fresh := []Seen{saw("a", 1, GossipAlive, 50), saw("b", 1, GossipAlive, 50)}
	and := func(more ...Seen) []Seen { return append(append([]Seen(nil), fresh...), more...) }
	onlyA := func(more ...Seen) []Seen { return append([]Seen{fresh[0]}, more...) }
	for _, tc := range []struct {
		name string
		seen []Seen // of the members a.1 and b.1, and others
		want string
	}{
		{"all is well", fresh, "as it is"},
		{"left", onlyA(saw("b", 1, GossipLeft, 10)), "a.1"},
		{"dead and silent", onlyA(saw("b", 1, GossipDead, 300)), "a.1"},
		{"said to be dead, but it asks", onlyA(saw("b", 1, GossipDead, 299)), "as it is"},
		{"alive and silent for a while", onlyA(saw("b", 1, GossipAlive, 2999)), "as it is"},
		{"alive and silent for long", onlyA(saw("b", 1, GossipAlive, 3000)), "a.1"},
		{"unknown to gossip, but it asks", onlyA(saw("b", 1, GossipUnknown, 50)), "as it is"},
		{"unknown to gossip and silent for long", onlyA(saw("b", 1, GossipUnknown, 3000)), "a.1"},
		{"a newcomer", and(saw("c", 9, GossipAlive, 50)), "a.1 b.1 c.9"},
		{"a newcomer that does not ask", and(saw("c", 9, GossipAlive, never)), "as it is"},
		{"a newcomer that asks no more", and(saw("c", 9, GossipAlive, 1001)), "as it is"},
		{"a newcomer that gossip does not know", and(saw("c", 9, GossipUnknown, 50)), "as it is"},
		{"a newcomer that gossip says is dead", and(saw("c", 9, GossipDead, 50)), "as it is"},
		{"restarted and asking", and(saw("b", 2, GossipAlive, 50)), "a.1 b.2"},
		{"restarted, not asking yet", onlyA(saw("b", 1, GossipUnknown, 299), saw("b", 2, GossipAlive, never)), "as it is"},
		{"restarted, the old one silent", onlyA(saw("b", 1, GossipUnknown, 300), saw("b", 2, GossipAlive, never)), "a.1"},
		{"the one it replaced wakes up", and(Seen{Name: "b", Incarnation: 3, Gossip: GossipAlive, LastKeep: proposeNow, Replaced: true}), "as it is"},
		{"two of a name: the one that asked last", and(saw("c", 3, GossipAlive, 90), saw("c", 4, GossipAlive, 10)), "a.1 b.1 c.4"},
		{"removed and back too soon", and(removed(saw("c", 1, GossipAlive, 10), 1999)), "as it is"},
		{"removed and back", and(removed(saw("c", 1, GossipAlive, 10), 2000)), "a.1 b.1 c.1"},
		{"removed, and it has not asked since", and(removed(saw("c", 1, GossipAlive, 1000), 900)), "as it is"},
		{"several at once", []Seen{saw("a", 1, GossipLeft, 0), saw("b", 2, GossipAlive, 0), saw("c", 1, GossipAlive, 0)}, "b.2 c.1"},
		{"nobody is left", []Seen{saw("a", 1, GossipLeft, 0), saw("b", 1, GossipDead, 5000)}, "as it is"},
	} {
		current := with(4, "a", "b")
		next, ok := NextView(current, tc.seen, proposeNow, ViewConfig{})
		if got := membersOf(next); got != tc.want || ok != (next != nil) {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
		if next != nil && (next.Epoch != 5 || next.Partitions != Partitions || next.RingVersion != RingVersion) {
			t.Errorf("%s: the view after epoch 4 is %+v", tc.name, next)
		}
	}
}

func TestNextViewIsTheFirst(t *testing.T) {
	if next, ok := NextView(nil, []Seen{saw("a", 1, GossipAlive, -1)}, proposeNow, ViewConfig{}); ok {
		t.Errorf("a first view of nobody: %v", next)
	}
	next, ok := NextView(nil, []Seen{saw("b", 2, GossipAlive, 5), saw("a", 1, GossipAlive, 5)}, proposeNow, ViewConfig{Partitions: 31})
	if !ok || membersOf(next) != "a.1 b.2" || next.Epoch != 1 || next.Partitions != 31 || next.RingVersion != RingVersion {
		t.Errorf("the first view is %+v", next)
	}
}

func TestNextViewIsBounded(t *testing.T) {
	var seen []Seen
	for i := range MaxMembers + 10 {
		seen = append(seen, saw(fmt.Sprintf("n%03d", i), 1, GossipAlive, 5))
	}
	if next, _ := NextView(nil, seen, proposeNow, ViewConfig{}); len(next.Members) != MaxMembers {
		t.Errorf("%d members, want at most %d", len(next.Members), MaxMembers)
	}
	if next, _ := NextView(nil, seen, proposeNow, ViewConfig{Partitions: 3}); len(next.Members) != 3 {
		t.Errorf("%d members on 3 partitions", len(next.Members))
	}
}

// leading is a proposer with a leader's clock and ledger, in steps of 10 ms.
type leading struct {
	*Proposer
	now    int64
	view   *ledger.View
	gossip map[string]Seen // by name
	asking map[string]bool
}

func newLeading(v *ledger.View) *leading {
	l := &leading{Proposer: NewProposer(ViewConfig{}), now: proposeNow, view: v, gossip: map[string]Seen{}, asking: map[string]bool{}}
	if v != nil {
		for _, m := range v.Members {
			l.alive(m.Name, m.Incarnation)
		}
	}
	l.Elected(l.now)
	return l
}

func (l *leading) alive(name string, incarnation uint64) {
	l.gossip[name] = Seen{Name: name, Incarnation: incarnation, Gossip: GossipAlive}
	l.asking[name] = true
}

func (l *leading) says(name string, g Liveness) {
	s := l.gossip[name]
	s.Gossip = g
	l.gossip[name] = s
}

// until goes on until a view is proposed, and commits it; 0: none was within limit ms.
func (l *leading) until(limitMS int64) (tookMS int64) {
	for ms := int64(0); ms <= limitMS; ms += 10 {
		var seen []Seen
		for name, s := range l.gossip {
			seen = append(seen, s)
			if l.asking[name] {
				l.Asked(l.now, name, s.Incarnation, l.epoch())
			}
		}
		next, ok := l.Next(l.now, l.view, seen)
		l.now += 10 * fenceMS
		if ok {
			l.view = next
			return ms
		}
	}
	return -1
}

func (l *leading) epoch() uint64 {
	if l.view == nil {
		return 0
	}
	return l.view.Epoch
}

func (l *leading) want(t *testing.T, what string, tookMS, atLeastMS, atMostMS int64, members string) {
	t.Helper()
	if tookMS < atLeastMS || tookMS > atMostMS || membersOf(l.view) != members {
		t.Errorf("%s: after %d ms: %s; want after %d to %d ms: %s", what, tookMS, membersOf(l.view), atLeastMS, atMostMS, members)
	}
}

func TestProposerDebounces(t *testing.T) {
	l := newLeading(with(3, "a", "b"))
	l.alive("c", 1)
	if took := l.until(50); took >= 0 {
		t.Errorf("a newcomer was taken in after %d ms, want after the debounce", took)
	}
	l.alive("d", 1)
	l.want(t, "two newcomers", l.until(500), 30, 60, "a.1 b.1 c.1 d.1")
	if took := l.until(5000); took >= 0 {
		t.Errorf("another view after %d ms: %s", took, membersOf(l.view))
	}
	l.says("b", GossipLeft)
	l.want(t, "one left", l.until(500), 0, 0, "a.1 c.1 d.1")
}

func TestProposerBeginsTheFirstViewAtOnce(t *testing.T) {
	l := newLeading(nil)
	l.alive("a", 1)
	l.want(t, "the founder", l.until(500), 0, 10, "a.1")
}

func TestProposerGivesAFreshLeadersMembersTime(t *testing.T) {
	l := newLeading(with(3, "a", "b"))
	l.says("b", GossipDead)
	l.asking["b"] = false
	l.want(t, "dead since before the election", l.until(5000), 390, 420, "a.1")

	l = newLeading(with(3, "a", "b"))
	l.asking["b"] = false
	l.want(t, "silent since before the election", l.until(5000), 3090, 3120, "a.1")
}

func TestProposerTakesBackAfterAWhile(t *testing.T) {
	l := newLeading(with(3, "a", "b"))
	l.asking["b"] = false
	l.until(5000)
	if took := l.until(3000); took >= 0 {
		t.Errorf("it is back after %d ms without asking", took)
	}
	l.asking["b"] = true
	l.want(t, "it asks again, long after", l.until(5000), 90, 120, "a.1 b.1")

	l.asking["b"] = false
	l.until(5000)
	l.asking["b"] = true
	l.want(t, "it asks again at once", l.until(5000), 2080, 2130, "a.1 b.1")
}

// Of two processes of one name the one that took the other's place stays.
func TestProposerDoesNotGoBack(t *testing.T) {
	l := newLeading(with(3, "a", "b"))
	l.gossip["b, restarted"] = Seen{Name: "b", Incarnation: 2, Gossip: GossipAlive}
	l.Asked(l.now, "b", 2, 3)
	l.want(t, "restarted", l.until(500), 0, 0, "a.1 b.2")
	for range 500 {
		l.Asked(l.now, "b", 2, 4)
		l.Asked(l.now, "b", 1, 4)
		if l.until(0) >= 0 {
			t.Fatalf("the view went on to %s", membersOf(l.view))
		}
	}
}

// One that asked before it learned that another has its name does not get it back.
func TestProposerTrustsNoOldRequest(t *testing.T) {
	l := newLeading(with(3, "a"))
	l.gossip["b, the first"] = Seen{Name: "b", Incarnation: 1, Gossip: GossipAlive}
	l.gossip["b, the second"] = Seen{Name: "b", Incarnation: 2, Gossip: GossipAlive}
	l.Asked(l.now, "b", 1, 3)
	l.Asked(l.now+1, "b", 2, 3)
	l.want(t, "two of one name", l.until(500), 90, 110, "a.1 b.2")
	if took := l.until(2000); took >= 0 {
		t.Errorf("another view after %d ms: %s", took, membersOf(l.view))
	}
	l.Asked(l.now, "b", 1, 4)
	l.want(t, "one that knows the view and was never replaced", l.until(500), 0, 10, "a.1 b.1")
}

// Who owes another member an answer goes, comes back, and stays away the longer the more often that
// happens. Of two that accuse each other one goes.
func TestProposerHearsAccusations(t *testing.T) {
	v := with(3, "a", "b", "c")
	for i := range v.Members {
		v.Members[i].Incarnation = uint64(i + 1)
	}
	l := newLeading(v)
	l.until(0)
	l.Accused(l.now, 7, []uint64{2})
	if took := l.until(500); took >= 0 {
		t.Fatalf("a stranger's word made the view %s", membersOf(l.view))
	}
	l.Accused(l.now, 1, []uint64{2, 3})
	if took := l.until(500); took >= 0 {
		t.Fatalf("who hears nobody made the view %s", membersOf(l.view))
	}
	l.Accused(l.now, 1, []uint64{1})
	if took := l.until(500); took >= 0 {
		t.Fatalf("who accuses itself made the view %s", membersOf(l.view))
	}
	l.Accused(l.now, 1, []uint64{2, 99})
	l.Accused(l.now, 2, []uint64{1})
	l.want(t, "b owes a", l.until(500), 90, 110, "a.1 c.3")
	l.want(t, "b comes back", l.until(9000), 4000, 4200, "a.1 b.2 c.3") // RejoinAfter, doubled once
	l.until(0)
	l.Accused(l.now, 3, []uint64{2})
	l.want(t, "b owes c", l.until(500), 90, 110, "a.1 c.3")
	l.want(t, "b comes back again", l.until(20000), 8000, 8200, "a.1 b.2 c.3")
	l.until(0)
	l.Accused(l.now, 3, []uint64{2})
	l.now += 2 * int64(accusedFor)
	if took := l.until(3000); took >= 0 {
		t.Errorf("an old accusation made the view %s", membersOf(l.view))
	}
}

// Requests of a process that does not follow the ledger are no sign of life.
func TestProposerWantsMembersToFollow(t *testing.T) {
	l := newLeading(with(3, "a", "b"))
	l.asking["b"] = false
	took := int64(-1)
	for ms := int64(0); took < 0 && ms < 5000; ms += 10 {
		l.Asked(l.now, "b", 1, 2)
		if l.until(0) >= 0 {
			took = ms
		}
	}
	l.want(t, "b stays at epoch 2", took, 3000, 3150, "a.1")
}

func TestProposerForgets(t *testing.T) {
	l := newLeading(with(3, "a"))
	for i := range uint64(2 * maxKnown) {
		l.Asked(l.now, "stranger", i, 3)
	}
	if n := len(l.known); n != maxKnown {
		t.Errorf("%d processes are remembered, want %d", n, maxKnown)
	}
	l.now += int64(strangerFor) + 1
	l.until(0)
	if n := len(l.known); n > 1 {
		t.Errorf("%d processes are remembered, want the member alone", n)
	}
}
