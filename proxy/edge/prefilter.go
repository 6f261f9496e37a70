package edge

import (
	"fmt"
	"hash/maphash"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"time"
)

// PrefilterConfig sets the pre-filter's rates, for each address and each key alike.
// Zero values take the defaults.
type PrefilterConfig struct {
	RequestsPerSecond int64 // default 1000
	RequestBurst      int64 // default 2000
	ErrorsPerMinute   int64 // default 60
	ErrorBurst        int64 // default 20
	// Buckets is how many addresses and keys with something to remember are held, for
	// requests and for errors each, at 8 bytes; rounded up to a power of two. Default 65536.
	Buckets int
}

const (
	ways       = 8  // buckets in a set: one cache line
	tatBits    = 44 // of a word, microseconds: 203 days until they come round
	tatMask    = 1<<tatBits - 1
	maxDepth   = int64(24 * time.Hour / time.Microsecond)
	maxBuckets = 1 << 24
	maxRetries = 64 // of a compare-and-swap, then the request passes
	// clockSlack is how far apart the clock readings of concurrent callers may be, in microseconds.
	clockSlack = 10_000_000
)

// Validate reports the first field that cannot work, with the remedy.
func (c PrefilterConfig) Validate() error {
	d := c.withDefaults()
	switch {
	case d.RequestsPerSecond < 1 || d.RequestsPerSecond > 1e6:
		return fmt.Errorf("requests_per_second: %d is not within 1 and 1000000", d.RequestsPerSecond)
	case d.ErrorsPerMinute < 1 || d.ErrorsPerMinute > 6e7:
		return fmt.Errorf("errors_per_minute: %d is not within 1 and 60000000", d.ErrorsPerMinute)
	case d.RequestBurst < 1 || d.RequestBurst > maxDepth*d.RequestsPerSecond/1e6:
		return fmt.Errorf("request_burst: %d is not within 1 and a day's requests", d.RequestBurst)
	case d.ErrorBurst < 1 || d.ErrorBurst > maxDepth/1e6*d.ErrorsPerMinute/60:
		return fmt.Errorf("error_burst: %d is not within 1 and a day's errors", d.ErrorBurst)
	case d.Buckets < ways || d.Buckets > maxBuckets:
		return fmt.Errorf("buckets: %d is not within %d and %d", d.Buckets, ways, maxBuckets)
	}
	return nil
}

func (c PrefilterConfig) withDefaults() PrefilterConfig {
	def := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.RequestsPerSecond, 1000)
	def(&c.RequestBurst, 2000)
	def(&c.ErrorsPerMinute, 60)
	def(&c.ErrorBurst, 20)
	if c.Buckets == 0 {
		c.Buckets = 1 << 16
	}
	return c
}

// Prefilter refuses addresses and keys that flood or that keep failing, before their
// request is parsed or their key looked up. Each has a bucket of requests and a bucket
// of errors. It takes no lock, allocates nothing and never grows.
//
// A bucket is one word, a tag and a theoretical arrival time (GCRA), in a
// set-associative table: a hash under a secret seed picks the set of eight and gives
// the tag. A bucket whose time has passed is full, which is the same as having none: its
// word is free. So only who spent lately takes up room, a lone request for a
// millisecond.
//
//   - Nobody is charged for another, but where both set and tag agree (one pair in
//     2³³ at the default size), and without the seed no one can aim for that.
//   - When a set is full of buckets that are not, the newcomer takes the word of the one
//     nearest to full. Whoever held it may spend a little more than its rate: the table
//     forgets, it never refuses an innocent. To make it forget on purpose needs thousands
//     of addresses at once; made-up keys do not do it, since a key's bucket is touched
//     only by requests that their address's buckets let pass.
//
// IPv6 addresses count by their /64.
type Prefilter struct {
	start           time.Time
	ipSeed, keySeed maphash.Seed
	requests        table
	errors          table
}

// NewPrefilter makes a pre-filter with all buckets full. now's monotonic reading is
// what later ones are compared with.
func NewPrefilter(cfg PrefilterConfig, now time.Time) (*Prefilter, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	n := 1 << bits.Len(uint(cfg.Buckets-1))
	return &Prefilter{
		start: now, ipSeed: maphash.MakeSeed(), keySeed: maphash.MakeSeed(),
		requests: newTable(n, 1e6/cfg.RequestsPerSecond, cfg.RequestBurst),
		errors:   newTable(n, 60e6/cfg.ErrorsPerMinute, cfg.ErrorBurst),
	}, nil
}

// Allow charges one request to ip and to key (the credential as presented, "" for none)
// and says whether it may go on; else when to come back. A refused request charges
// nothing. The zero ip is not limited.
func (p *Prefilter) Allow(now time.Time, ip netip.Addr, key string) (ok bool, retryAfter time.Duration) {
	t := p.micros(now)
	hs, n := p.hashes(ip, key)
	var wait uint64
	for _, h := range hs[:n] {
		wait = max(wait, p.errors.wait(h, t), p.requests.wait(h, t))
	}
	for i, h := range hs[:n] {
		if wait > 0 {
			break
		}
		if wait = p.requests.take(h, t, false); wait > 0 && i > 0 {
			p.requests.giveBack(hs[0], t) // lost a race for the last of the second bucket
		}
	}
	return wait == 0, time.Duration(wait) * time.Microsecond
}

// Fault charges one error to ip and to key. A bucket's worth of them refuses further
// requests until the oldest is paid off; more faults, of requests then in flight, do not
// lengthen that.
func (p *Prefilter) Fault(now time.Time, ip netip.Addr, key string) {
	t := p.micros(now)
	hs, n := p.hashes(ip, key)
	for _, h := range hs[:n] {
		p.errors.take(h, t, true)
	}
}

// hashes gives the n hashes to charge, the address's first.
func (p *Prefilter) hashes(ip netip.Addr, key string) (hs [2]uint64, n int) {
	if ip.IsValid() {
		a := subscriber(ip.Unmap()).As16()
		hs[n] = maphash.Bytes(p.ipSeed, a[:])
		n++
	}
	if key != "" {
		hs[n] = maphash.String(p.keySeed, key)
		n++
	}
	return hs, n
}

// micros is never 0, the time in words never written.
func (p *Prefilter) micros(now time.Time) uint64 {
	return uint64(max(0, now.Sub(p.start).Microseconds())) + 1
}

// table is buckets of one rate. Times are microseconds modulo 1<<tatBits.
type table struct {
	words    []atomic.Uint64
	setMask  uint64
	interval uint64 // between two emissions
	depth    uint64 // burst × interval
}

func newTable(n int, interval, burst int64) table {
	return table{
		words: make([]atomic.Uint64, n), setMask: uint64(n/ways - 1),
		interval: uint64(interval), depth: uint64(interval * burst),
	}
}

// ahead is how far w's arrival time lies after now; 0 for a full bucket. What lies
// further ahead than a bucket can be is from before the clock last came round. (A word
// untouched for a multiple of 203 days, to within a bucket's depth, is taken at its
// word: its owner may find its bucket emptier than it is, for as long as it takes to fill.)
func (t *table) ahead(w, now uint64) uint64 {
	a := (w - now) & tatMask
	if a > t.depth+clockSlack {
		return 0
	}
	return a
}

// find gives the word of h: its own, with what it is ahead, or the one to take over.
func (t *table) find(h, now uint64) (word *atomic.Uint64, old, ahead uint64) {
	set := t.words[(h&t.setMask)*ways:][:ways]
	least := ^uint64(0)
	for i := range set {
		w := set[i].Load()
		a := t.ahead(w, now)
		if a > 0 && w>>tatBits == h>>tatBits {
			return &set[i], w, a
		}
		if a < least {
			word, old, least = &set[i], w, a
		}
	}
	return word, old, 0
}

// wait is how long until the bucket of h has one to give; 0: now.
func (t *table) wait(h, now uint64) uint64 {
	_, _, ahead := t.find(h, now)
	return t.excess(ahead)
}

func (t *table) excess(ahead uint64) uint64 {
	if ahead+t.interval <= t.depth {
		return 0
	}
	return ahead + t.interval - t.depth
}

// take takes one of the bucket of h, or gives the wait; with force it takes what there
// is and gives 0.
func (t *table) take(h, now uint64, force bool) (wait uint64) {
	for range maxRetries {
		word, old, ahead := t.find(h, now)
		if wait := t.excess(ahead); wait > 0 && !force {
			return wait
		}
		tat := (now + min(ahead+t.interval, t.depth)) & tatMask
		if word.CompareAndSwap(old, h>>tatBits<<tatBits|tat) {
			return 0
		}
	}
	return 0
}

// giveBack returns one that take took.
func (t *table) giveBack(h, now uint64) {
	for range maxRetries {
		word, old, ahead := t.find(h, now)
		if ahead == 0 {
			return
		}
		tat := (now + ahead - min(ahead, t.interval)) & tatMask
		if word.CompareAndSwap(old, h>>tatBits<<tatBits|tat) {
			return
		}
	}
}
