package cluster

import (
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/cluster/ledger"
)

const (
	fenceMS   = int64(time.Millisecond)
	fenceSec  = int64(time.Second)
	fenceT0   = 1000 * fenceSec
	fenceSelf = 1 // incarnation
)

func selfA() Self { return Self{Name: "a", Incarnation: fenceSelf} }

// with is a view of members named by letters, all of incarnation 1, but for those named.
func with(epoch uint64, names ...string) *ledger.View {
	v := viewOf(epoch, names...)
	for i := range v.Members {
		v.Members[i].Incarnation = fenceSelf
	}
	return v
}

// ownedBy is a partition that owner has in all the views.
func ownedBy(t testing.TB, owner string, views ...*ledger.View) uint32 {
	t.Helper()
	for p := range uint32(Partitions) {
		all := true
		for _, v := range views {
			r := NewRing(v)
			all = all && r.Members()[r.Owner(p)].Name == owner
		}
		if all {
			return p
		}
	}
	t.Fatalf("%s owns no partition throughout", owner)
	return 0
}

// movedTo is a partition that goes from one owner to another.
func movedTo(t testing.TB, from, to string, before, after *ledger.View) uint32 {
	t.Helper()
	a, b := NewRing(before), NewRing(after)
	for p := range uint32(Partitions) {
		if a.Members()[a.Owner(p)].Name == from && b.Members()[b.Owner(p)].Name == to {
			return p
		}
	}
	t.Fatalf("no partition moves from %s to %s", from, to)
	return 0
}

func wantGrant(t *testing.T, f *Fence, now int64, p uint32, want bool, why string) {
	t.Helper()
	if got := f.MayGrant(now, p); got != want {
		t.Errorf("%s: MayGrant at T0%+v = %v, want %v", why, time.Duration(now-fenceT0), got, want)
	}
}

func TestFenceGrantsUnderALeaseOnly(t *testing.T) {
	f := NewFence(selfA(), FenceOptions{})
	wantGrant(t, f, fenceT0, 0, false, "no view")
	if epoch, ok := f.Want(); epoch != 0 || !ok {
		t.Errorf("Want() = %d, %v before the first view, want 0, true: asking is how one joins", epoch, ok)
	}
	if f.Granted(fenceT0, fenceT0, 0) || f.Granted(fenceT0, fenceT0, 1) {
		t.Error("a lease without a view was taken")
	}
	f.Step(fenceT0, with(1, "a"))
	wantGrant(t, f, fenceT0, 7, false, "no lease")
	if !f.Granted(fenceT0+5, fenceT0+9, 1) {
		t.Fatal("a lease was refused")
	}
	wantGrant(t, f, fenceT0-1, 7, false, "before the view")
	wantGrant(t, f, fenceT0+9, 7, true, "the first view of all: nobody can have granted (V5)")
	end := fenceT0 + 5 + 980*fenceMS
	wantGrant(t, f, end-1, 7, true, "until .98 s from the send")
	wantGrant(t, f, end, 7, false, "no longer than .98 s from the send")
	wantGrant(t, f, fenceT0+9, Partitions, false, "no such partition")
	if left := f.Left(end-3, 7); left != 3 {
		t.Errorf("Left = %d, want 3", left)
	}
	if f.Until() != end || !f.Valid(end-1) || f.Valid(end) {
		t.Errorf("Until = %d, want %d, and Valid until then", f.Until(), end)
	}
}

func TestFenceTakesOnlyBetterLeases(t *testing.T) {
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, with(1, "a"))
	f.Step(fenceT0, with(2, "a", "b"))
	for _, tc := range []struct {
		name             string
		sent, now, epoch int64
		want             bool
	}{
		{"of a view not stepped to", 0, 0, 3, false},
		{"first, of the view before", 0, 0, 1, true},
		{"that came after its end", 0, 980 * fenceMS, 2, false},
		{"of this view", 0, 0, 2, true},
		{"of the view before, again", 5, 5, 1, false},
		{"sent earlier than the one held", -1, 5, 2, false},
		{"the same again", 0, 5, 2, false},
		{"sent later", 1, 5, 2, true},
	} {
		if got := f.Granted(fenceT0+tc.sent, fenceT0+tc.now, uint64(tc.epoch)); got != tc.want {
			t.Errorf("a lease %s: taken = %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestFenceWaitsForThePredecessor(t *testing.T) {
	before, after := with(4, "b", "a"), with(5, "a")
	kept, taken := ownedBy(t, "a", before, after), movedTo(t, "b", "a", before, after)
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, before)
	now := fenceT0 + 2*fenceSec
	f.Granted(now, now, 4)
	wantGrant(t, f, now, kept, true, "its wait is over")

	f.Step(now, after)
	wantGrant(t, f, now, kept, true, "the older epoch's lease is good for what it owned all along")
	wantGrant(t, f, now, taken, false, "taken over just now")
	starts := now + 1070*fenceMS
	if n := f.Waiting(now); n == 0 {
		t.Errorf("%d partitions wait, want some", n)
	}
	if at, ok := f.NextChange(now); !ok || at != now+980*fenceMS {
		t.Errorf("NextChange = T0%+v, want the end of the lease", time.Duration(at-fenceT0))
	}
	f.Granted(starts-fenceMS, starts-fenceMS, 4)
	wantGrant(t, f, starts, taken, false, "a lease of before does not cover it")
	f.Granted(starts-fenceMS, starts-fenceMS, 5)
	if at, ok := f.NextChange(starts - fenceMS); !ok || at != starts {
		t.Errorf("NextChange = T0%+v, want the end of the wait", time.Duration(at-fenceT0))
	}
	wantGrant(t, f, starts-1, taken, false, "1.07 s are not over")
	wantGrant(t, f, starts, taken, true, "1.07 s are over")
	if f.Waiting(starts) != 0 {
		t.Errorf("%d partitions wait yet", f.Waiting(starts))
	}
}

func TestFenceWaitsAfreshForWhatComesBack(t *testing.T) {
	alone, both := with(2, "a"), with(3, "a", "b")
	p := movedTo(t, "a", "b", alone, both)
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, alone)
	now := fenceT0 + 5*fenceSec
	f.Granted(now, now, 2)
	wantGrant(t, f, now, p, true, "settled")
	f.Step(now, both)
	wantGrant(t, f, now, p, false, "given up at once")
	f.Step(now+1, with(4, "a"))
	f.Granted(now+1, now+1, 4)
	wantGrant(t, f, now+1, p, false, "b may have begun in between")
	f.Granted(now+fenceSec, now+fenceSec, 4)
	wantGrant(t, f, now+1070*fenceMS, p, false, "the wait is from the last view")
	wantGrant(t, f, now+1+1070*fenceMS, p, true, "its wait is over")
}

func TestFenceTrustsNoGap(t *testing.T) {
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, with(1, "a"))
	f.Granted(fenceT0, fenceT0, 1)
	f.Step(fenceT0+1, with(1, "a", "b"))
	wantGrant(t, f, fenceT0+1, 9, true, "a view seen before is ignored")
	f.Step(fenceT0+1, with(3, "a"))
	f.Granted(fenceT0+2, fenceT0+2, 3)
	wantGrant(t, f, fenceT0+2, 9, false, "view 2 may have given it to another")
	if f.Epoch() != 3 {
		t.Errorf("the epoch is %d, want 3", f.Epoch())
	}
	f.Step(fenceT0+3, with(2, "b"))
	if f.Epoch() != 3 {
		t.Errorf("the epoch went back to %d", f.Epoch())
	}
	f.Granted(fenceT0+fenceSec, fenceT0+fenceSec, 3)
	wantGrant(t, f, fenceT0+1+1070*fenceMS, 9, true, "its wait is over")
}

func TestFenceTrustsNoOtherPartitionCount(t *testing.T) {
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, with(1, "a"))
	next := with(2, "a")
	next.Partitions = 101
	f.Step(fenceT0, next)
	f.Granted(fenceT0, fenceT0, 2)
	wantGrant(t, f, fenceT0, 9, false, "it is another partition now")
}

func TestFenceIsForOneIncarnation(t *testing.T) {
	f := NewFence(Self{"a", 2}, FenceOptions{})
	f.Step(fenceT0, with(1, "a", "b"))
	if _, ok := f.Want(); !ok || f.Replaced() {
		t.Error("a process that was never a member must go on asking")
	}
	f.Granted(fenceT0, fenceT0, 1)
	for p := range uint32(Partitions) {
		if f.MayGrant(fenceT0, p) {
			t.Fatalf("partition %d is granted for by another incarnation", p)
		}
	}
	if f.Valid(fenceT0) || f.Until() != 0 {
		t.Error("valid without being a member")
	}

	old := NewFence(selfA(), FenceOptions{})
	old.Step(fenceT0, with(1, "a", "b"))
	old.Granted(fenceT0, fenceT0, 1)
	if !old.Valid(fenceT0) {
		t.Error("a member with a lease is not valid")
	}
	next := with(2, "a", "b")
	next.Members[0].Incarnation = 2
	old.Step(fenceT0, next)
	if _, ok := old.Want(); ok || !old.Replaced() || old.Valid(fenceT0) {
		t.Error("a process whose name is another's now must end")
	}
	old.Step(fenceT0, with(3, "b"))
	if !old.Replaced() {
		t.Error("replaced is for good")
	}
}

// A member that is removed first and replaced later is replaced, too.
func TestFenceIsReplacedLater(t *testing.T) {
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, with(1, "a", "b"))
	f.Step(fenceT0, with(2, "b"))
	if f.Replaced() {
		t.Error("replaced by nobody")
	}
	next := with(3, "a", "b")
	next.Members[0].Incarnation = 2
	f.Step(fenceT0, next)
	if !f.Replaced() {
		t.Error("not replaced")
	}
}

func TestFenceStartsWhatWasHandedOver(t *testing.T) {
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, with(3, "a"))
	f.Granted(fenceT0, fenceT0, 3)
	if n := f.Started(fenceT0+1, 2, 5); n != 0 {
		t.Errorf("%d started by a hand-off of another epoch", n)
	}
	if n := f.Started(fenceT0+1, 3, 5, 6, Partitions); n != 2 {
		t.Errorf("%d started, want 2", n)
	}
	wantGrant(t, f, fenceT0+1, 5, true, "handed over")
	wantGrant(t, f, fenceT0, 5, false, "before the hand-off")
	wantGrant(t, f, fenceT0+1, 7, false, "not handed over")
	if n := f.Started(fenceT0+2, 3, 5); n != 0 {
		t.Error("started twice")
	}
}

func TestFenceCountsLapses(t *testing.T) {
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, with(1, "a"))
	f.Granted(fenceT0, fenceT0, 1)
	f.Granted(fenceT0+500*fenceMS, fenceT0+500*fenceMS, 1)
	end := fenceT0 + 1480*fenceMS
	if n := f.Lapses(end - 1); n != 0 {
		t.Errorf("%d lapses, want 0", n)
	}
	if n := f.Lapses(end); n != 1 {
		t.Errorf("%d lapses, want the one that lasts", n)
	}
	f.Granted(end+5, end+6, 1)
	if n := f.Lapses(end + 6); n != 1 {
		t.Errorf("%d lapses, want 1", n)
	}
	if _, ok := f.NextChange(end + 5*fenceSec); ok {
		t.Error("nothing is to come")
	}
}

// fenceModel answers from all that ever happened, by the letter of the rules.
type fenceModel struct {
	steps  []fenceStep
	leases []fenceLease
}

type fenceStep struct {
	now int64
	v   *ledger.View
}

type fenceLease struct {
	epoch    uint64
	deadline int64
}

func (m *fenceModel) owned(i int, p uint32) bool {
	r := NewRing(m.steps[i].v)
	o := r.Owner(p)
	return o >= 0 && r.Members()[o].Name == "a" && r.Members()[o].Incarnation == fenceSelf
}

func (m *fenceModel) mayGrant(now int64, p uint32) bool {
	i := len(m.steps) - 1
	if i < 0 || !m.owned(i, p) {
		return false
	}
	for i > 0 && m.steps[i-1].v.Epoch+1 == m.steps[i].v.Epoch && m.owned(i-1, p) {
		i--
	}
	since := m.steps[i]
	if starts := since.now + 1070*fenceMS; since.v.Epoch > 1 && now < starts {
		return false
	}
	for _, l := range m.leases {
		if l.epoch >= since.v.Epoch && now < l.deadline {
			return true
		}
	}
	return false
}

func TestFenceAgreesWithItsRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f, m := NewFence(selfA(), FenceOptions{}), &fenceModel{}
		now, epoch := fenceT0, uint64(0)
		for range rapid.IntRange(1, 25).Draw(t, "steps") {
			now += rapid.Int64Range(0, 700).Draw(t, "ms") * fenceMS
			switch rapid.IntRange(0, 2).Draw(t, "what") {
			case 0:
				epoch += rapid.SampledFrom([]uint64{1, 1, 1, 2}).Draw(t, "epochs on")
				v := &ledger.View{Epoch: epoch, Partitions: 5, RingVersion: RingVersion}
				for _, name := range []string{"a", "b"} {
					if inc := rapid.SampledFrom([]uint64{0, 1, 1, 2}).Draw(t, name); inc != 0 {
						v.Members = append(v.Members, ledger.Member{Name: name, Incarnation: inc})
					}
				}
				f.Step(now, v)
				m.steps = append(m.steps, fenceStep{now, v})
			default:
				// Leases come in order here, as they do but for the oddest delays.
				if epoch > 0 {
					f.Granted(now, now, epoch)
					m.leases = append(m.leases, fenceLease{epoch, now + 980*fenceMS})
				}
			}
			for p := range uint32(5) {
				if got, want := f.MayGrant(now, p), m.mayGrant(now, p); got != want {
					t.Fatalf("MayGrant(%d) at epoch %d = %v, want %v", p, epoch, got, want)
				}
			}
		}
	})
}

func TestFenceIsReadWhileItChanges(t *testing.T) {
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, with(1, "a"))
	f.Granted(fenceT0, fenceT0, 1)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if !f.MayGrant(fenceT0+10, 3) || !f.Valid(fenceT0+10) || f.Ring().Owner(3) != 0 {
					t.Error("what it owned throughout was not granted for")
					return
				}
			}
		})
	}
	for i := range uint64(100) {
		f.Step(fenceT0+int64(i), with(i+2, "a"))
		f.Granted(fenceT0+int64(i), fenceT0+int64(i), i+2)
		f.Started(fenceT0, i+2, 1)
	}
	close(stop)
	readers.Wait()
}

func TestFenceReadsAllocateNothing(t *testing.T) {
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, with(1, "a"))
	f.Granted(fenceT0, fenceT0, 1)
	granted := 0
	if n := testing.AllocsPerRun(1000, func() {
		if f.MayGrant(fenceT0, 5) && f.Valid(fenceT0) {
			granted++
		}
	}); n != 0 {
		t.Errorf("MayGrant and Valid allocate %v times", n)
	}
	if granted == 0 {
		t.Error("nothing was granted")
	}
}

func BenchmarkMayGrant(b *testing.B) {
	f := NewFence(selfA(), FenceOptions{})
	f.Step(fenceT0, with(1, "a"))
	f.Granted(fenceT0, fenceT0, 1)
	b.ReportAllocs()
	p, granted := uint32(0), 0
	for b.Loop() {
		if f.MayGrant(fenceT0, p&2047) {
			granted++
		}
		p++
	}
	if granted == 0 {
		b.Fatal("nothing was granted")
	}
}

// NextChange is the next instant after now at which time alone changes what this
// process may do: a wait or its lease ends. Not ok: there is none.
func (f *Fence) NextChange(now int64) (at int64, ok bool) {
	r := f.rights.Load()
	at = never
	if r.deadline > now {
		at = r.deadline
	}
	for _, x := range r.parts {
		if x.start > now {
			at = min(at, x.start)
		}
	}
	return at, at != never
}

// A lease for a later view is none to who has not gone on to that view.
func TestLeaseOfALaterView(t *testing.T) {
	f := NewFence(Self{Name: "a", Incarnation: fenceSelf}, FenceOptions{})
	f.Step(0, with(1, "a", "b"))
	f.Granted(0, 1, 1)
	if left := f.Lease(2, 1); left != int64(leaseCounts)-2 {
		t.Errorf("%d ns are left", left)
	}
	f.Step(3, with(2, "a", "b"))
	f.Granted(4, 5, 2)
	if left, then := f.Lease(6, 2), f.Lease(6, 1); left != int64(leaseCounts)-2 || then != 0 {
		t.Errorf("%d ns are left by view 2, %d by view 1", left, then)
	}
}
