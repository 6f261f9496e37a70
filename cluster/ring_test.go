package cluster

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strconv"
	"testing"

	"headgate/cluster/ledger"
)

func viewOf(epoch uint64, names ...string) *ledger.View {
	v := &ledger.View{Epoch: epoch, Partitions: Partitions, RingVersion: RingVersion}
	for i, name := range names {
		v.Members = append(v.Members, ledger.Member{Name: name, Incarnation: uint64(i + 1)})
	}
	return v
}

func manyNames(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("gw-%d", i+1))
	}
	return names
}

func TestRingPlacesNoTwoReplicasAlike(t *testing.T) {
	at := map[uint64]string{}
	for _, name := range manyNames(MaxMembers) {
		for i := range ringReplicas {
			key := place{name: name + nameEnd}.String() + strconv.Itoa(i) // as the library does
			h := ringHash{}.Sum64([]byte(key))
			if other, ok := at[h]; ok {
				t.Fatalf("%q and %q are at the same place", key, other)
			}
			at[h] = key
		}
	}
}

func TestRingDependsOnTheMembersOnly(t *testing.T) {
	want := NewRing(viewOf(1, manyNames(12)...))
	rng := rand.New(rand.NewPCG(1, 2))
	for range 5 {
		v := viewOf(7, manyNames(12)...)
		rng.Shuffle(len(v.Members), func(i, j int) { v.Members[i], v.Members[j] = v.Members[j], v.Members[i] })
		for i := range v.Members {
			v.Members[i].Incarnation, v.Members[i].Address = rng.Uint64(), "elsewhere:1"
		}
		got := NewRing(v)
		for p := range uint32(Partitions) {
			if a, b := want.Members()[want.Owner(p)].Name, got.Members()[got.Owner(p)].Name; a != b {
				t.Fatalf("partition %d is owned by %s or by %s, by the order of the members", p, a, b)
			}
		}
	}
}

// A ring version is a promise between nodes of different releases: nothing that it
// covers may change, a library's new version among it.
func TestRingVersionOneStaysAsItIs(t *testing.T) {
	r := NewRing(viewOf(1, manyNames(5)...))
	h := fnv.New64a()
	for p := range uint32(Partitions) {
		fmt.Fprintf(h, "%d ", r.Owner(p))
	}
	if got, want := h.Sum64(), uint64(goldenRing); got != want {
		t.Errorf("the owners hash to %#x, want %#x: this needs a new ring version", got, want)
	}
	if got := r.Partition("tenant-1"); got != goldenPartition {
		t.Errorf("tenant-1 is in partition %d, want %d: this needs a new ring version", got, goldenPartition)
	}
}

const (
	goldenRing      = 0xb586677540bcfbbc
	goldenPartition = 39
)

// A newcomer takes about its share from the others, and nothing else moves.
func TestRingMovesOnlyToTheNewcomer(t *testing.T) {
	before := NewRing(viewOf(1, manyNames(1)...))
	for n := 2; n <= 32; n++ {
		after := NewRing(viewOf(2, manyNames(n)...))
		newcomer, moved := manyNames(n)[n-1], 0
		for p := range uint32(Partitions) {
			from, to := before.Members()[before.Owner(p)].Name, after.Members()[after.Owner(p)].Name
			if from == to {
				continue
			}
			moved++
			if to != newcomer {
				t.Fatalf("%d members: partition %d moved from %s to %s", n, p, from, to)
			}
		}
		if most := Partitions * 14 / (10 * n); moved > most || moved == 0 {
			t.Errorf("%d members: %d partitions moved, want some and at most %d (1.4 shares)", n, moved, most)
		}
		before = after
	}
}

func TestRingSharesEvenly(t *testing.T) {
	for n := 1; n <= 32; n++ {
		r := NewRing(viewOf(1, manyNames(n)...))
		owned := make([]int, n)
		for p := range uint32(Partitions) {
			owned[r.Owner(p)]++
		}
		for i, got := range owned {
			if share := Partitions / n; got < share*6/10 || got > share*14/10+1 {
				t.Errorf("%d members: %s owns %d partitions, its share is %d", n, r.Members()[i].Name, got, share)
			}
		}
	}
}

func TestRingOfNothing(t *testing.T) {
	tooMany := viewOf(1, manyNames(MaxMembers+1)...)
	unknown, none, crowded, vast := viewOf(1, "a"), viewOf(1, "a"), viewOf(1, "a", "b"), viewOf(1, "a")
	unknown.RingVersion, none.Partitions, crowded.Partitions, vast.Partitions = RingVersion+1, 0, 1, MaxPartitions+1
	for name, v := range map[string]*ledger.View{
		"no view": nil, "no member": viewOf(1), "too many members": tooMany, "unknown ring version": unknown,
		"no partition": none, "a name that holds the delimiter": viewOf(1, "a", "b\x00"), "fewer partitions than members": crowded, "too many partitions": vast,
	} {
		r := NewRing(v)
		if got := r.Owner(r.Partition("t")); got != -1 {
			t.Errorf("%s: the owner is %d, want none", name, got)
		}
		if got := r.OwnerOf("t"); got != (ledger.Member{}) {
			t.Errorf("%s: the owner is %v, want none", name, got)
		}
	}
	if got := NewRing(viewOf(1, "a")).Owner(Partitions); got != -1 {
		t.Errorf("partition %d is owned by %d, want nobody", Partitions, got)
	}
}

func TestRingLookupAllocatesNothing(t *testing.T) {
	r := NewRing(viewOf(1, manyNames(16)...))
	var found int
	if n := testing.AllocsPerRun(1000, func() { found += len(r.OwnerOf("acme").Name) }); n != 0 {
		t.Errorf("a look-up allocates %v times", n)
	}
	if found == 0 {
		t.Error("nobody owns acme")
	}
}

func BenchmarkRingLookup(b *testing.B) {
	r := NewRing(viewOf(1, manyNames(16)...))
	tenants := make([]string, 1024)
	for i := range tenants {
		tenants[i] = fmt.Sprintf("tenant-%d", i)
	}
	b.ReportAllocs()
	i, found := 0, 0
	for b.Loop() {
		found += len(r.OwnerOf(tenants[i&1023]).Name)
		i++
	}
	if found == 0 {
		b.Fatal("nobody owns anything")
	}
}

func BenchmarkNewRing(b *testing.B) {
	for _, n := range []int{3, 16, 64} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			v := viewOf(1, manyNames(n)...)
			for b.Loop() {
				NewRing(v)
			}
		})
	}
}
