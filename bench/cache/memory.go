package cache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"time"

	"headgate/cache"
)

// weighed is the body of the entries whose memory is weighed: below what the store compresses.
const weighed = 1536

// charge is what a kind of cache takes of memory for an entry.
type charge struct {
	heap float64 // bytes in all
	over float64 // of which are not the body's
	said float64 // the store's own account; 0: it has none
	held int     // of those put, found
}

type memorySection struct {
	entries int
	rows    map[string]charge
	packed  charge // the store, with text of 8 KB
}

// memory fills each contender with entries of one size, and weighs the heap before and after.
func memory(_ context.Context, c *Config, rep *Report) (section, error) {
	s := &memorySection{entries: c.Entries, rows: map[string]charge{}}
	noise := make([]byte, weighed)
	fillNoise(noise)
	for _, k := range contenders() {
		w, err := weigh(k, c.Entries, noise, int64(weighed+assumed))
		if err != nil {
			return nil, err
		}
		s.rows[k.name] = w
	}
	var err error
	if s.packed, err = weigh(contenders()[0], c.Entries/4, prose(8<<10), 8<<10); err != nil {
		return nil, err
	}
	rep.charges = s.rows
	return s, nil
}

func fillNoise(b []byte) {
	r := rand.New(rand.NewPCG(3, 5))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

func heap() int64 {
	runtime.GC()
	runtime.GC() // what finalizers held goes in the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// weigh puts n entries into a contender that has room for a tenth more at so many bytes each.
func weigh(k contenderKind, n int, body []byte, room int64) (charge, error) {
	keys := make([]cache.Key, n)
	for i := range keys {
		keys[i] = keyOf(i)
	}
	before := heap()
	c, err := k.open(max(room*int64(n)*11/10, 1<<20))
	if err != nil {
		return charge{}, err
	}
	defer c.close()
	for i := range keys {
		c.put(&cache.Entry{Key: keys[i], Tenant: "acme", Surface: "faq", ContentType: "application/json", Body: body, Life: cache.Life{TTL: time.Hour}})
	}
	held := 0
	for i := range keys {
		if c.get(&keys[i]) {
			held++
		}
	}
	after := heap()
	if held < n*9/10 {
		return charge{}, fmt.Errorf("%s has %d of %d entries", k.name, held, n)
	}
	w := charge{heap: float64(after-before) / float64(held), held: held}
	w.over = w.heap - float64(len(body))
	if s, ok := c.(storeContender); ok {
		st := s.Stats()
		w.said = float64(st.Bytes) / float64(st.Entries)
	}
	runtime.KeepAlive(keys)
	return w, nil
}

func (s *memorySection) write(b *strings.Builder) {
	fmt.Fprintf(b, "memory of an entry, by the heap before and after %d of %d bytes that do not compress; each a whole entry with its tags, life and counts,\n"+
		"in a cache with room for a tenth more, whose tables count, too; in the store's own account of its entries they do not\n\n", s.entries, weighed)
	fmt.Fprintf(b, "%-24s %12s %14s %16s\n", "", "bytes", "beside body", "by own account")
	for _, k := range contenders() {
		w := s.rows[k.name]
		fmt.Fprintf(b, "%-24s %12.0f %14.0f %16s\n", k.name, w.heap, w.over, account(w))
	}
	fmt.Fprintf(b, "%-24s %12.0f %14s %16s\n", "store, text of 8 KB", s.packed.heap, "compressed", account(s.packed))
}

func account(w charge) string {
	if w.said == 0 {
		return ""
	}
	return fmt.Sprintf("%.0f", w.said)
}

func (s *memorySection) aims() []aim { return nil }
