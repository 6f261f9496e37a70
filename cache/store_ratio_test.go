package cache

import (
	"container/list"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// zipfTrace is n reads of keys by Zipf's law. What is popular moves on by a key each so many
// reads; 0: never.
func zipfTrace(s float64, n int, keys uint64, drift int) []int32 {
	z := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), s, 1, keys-1)
	trace := make([]int32, n)
	for i := range trace {
		k := z.Uint64()
		if drift > 0 {
			k = (k + uint64(i/drift)) % keys
		}
		trace[i] = int32(k)
	}
	return trace
}

// answerSizes are like answers': log-normal around 1.5 KB.
func answerSizes(keys int) []int {
	r := rand.New(rand.NewPCG(3, 4))
	sizes := make([]int, keys)
	for i := range sizes {
		sizes[i] = int(min(64<<10, 1500*math.Exp(r.NormFloat64())))
	}
	return sizes
}

// lruHits is the share of hits of a plain LRU of so many bytes, without tables.
func lruHits(trace []int32, size func(int32) int64, maxBytes int64) float64 {
	order, at := list.New(), map[int32]*list.Element{}
	var used int64
	hits := 0
	for _, k := range trace {
		if e := at[k]; e != nil {
			hits++
			order.MoveToFront(e)
			continue
		}
		at[k] = order.PushFront(k)
		for used += size(k); used > maxBytes; {
			last := order.Back()
			k := order.Remove(last).(int32)
			used -= size(k)
			delete(at, k)
		}
	}
	return float64(hits) / float64(len(trace))
}

// storeHits is that of a store, which has its tables and its bridge in the same bytes.
func storeHits(t testing.TB, trace []int32, keys []Key, bodies func(int32) []byte, maxBytes int64) float64 {
	w := newStoreWorld(t, maxBytes)
	defer w.Close()
	hits := 0
	for _, k := range trace {
		w.pass(time.Millisecond)
		if _, ok := w.get(keys[k]); ok {
			hits++
			continue
		}
		w.Put(&Entry{Key: keys[k], Body: bodies(k), Life: Life{TTL: 1000 * time.Hour}})
	}
	return float64(hits) / float64(len(trace))
}

type ratioCase struct {
	zipf  float64
	share float64 // of all bytes that the cache has
	drift int
}

func hitRatios(t testing.TB, c ratioCase, reads, keys int) (store, lru float64) {
	sizes := answerSizes(keys)
	noise := storeEntry(storeKey(0), 64<<10).Body
	body := func(k int32) []byte { return noise[:sizes[k]] }
	// The LRU pays for an entry what the store does.
	costs := make([]int64, keys)
	names := make([]Key, keys)
	var total int64
	for k := range costs {
		names[k] = storeKey(k)
		costs[k] = newStored(&Entry{Body: body(int32(k))}, 0, 0).size
		total += costs[k]
	}
	maxBytes := max(storeLeast, int64(float64(total)*c.share))
	trace := zipfTrace(c.zipf, reads, uint64(keys), c.drift)
	lru = lruHits(trace, func(k int32) int64 { return costs[k] }, maxBytes)
	return storeHits(t, trace, names, body, maxBytes), lru
}

// The store finds more than an LRU of the same bytes, though it has its tables within them. Where
// nearly all is found anyway it is as good, give or take what chance does in so small a store.
func TestStoreHitRatio(t *testing.T) {
	if storeRace {
		t.Skip("under the race detector, sync.Pool drops the reads that admission counts")
	}
	for _, c := range []struct {
		ratioCase
		least float64 // more than the LRU
	}{{ratioCase{1.01, 0.1, 0}, 0.005}, {ratioCase{1.2, 0.1, 0}, -0.02}} {
		store, lru := hitRatios(t, c.ratioCase, 150_000, 20_000)
		t.Logf("zipf %v, %v of all bytes: store %.4f, lru %.4f", c.zipf, c.share, store, lru)
		if store < lru+c.least {
			t.Errorf("zipf %v, %v of all bytes: store %.4f, lru %.4f", c.zipf, c.share, store, lru)
		}
	}
}

// BenchmarkStoreHitRatio shows the store beside an LRU. With a drift, what was most popular is not
// asked for again each 100 reads, until its time is over: there admission is slow to forget.
func BenchmarkStoreHitRatio(b *testing.B) {
	for _, zipf := range []float64{1.01, 1.2} {
		for _, share := range []float64{0.01, 0.1} {
			for _, drift := range []int{0, 100} {
				b.Run(fmt.Sprintf("zipf%v/share%v/drift%d", zipf, share, drift), func(b *testing.B) {
					for b.Loop() {
						store, lru := hitRatios(b, ratioCase{zipf, share, drift}, 1_000_000, 200_000)
						b.ReportMetric(100*store, "hit%")
						b.ReportMetric(100*lru, "lru%")
					}
				})
			}
		}
	}
}
