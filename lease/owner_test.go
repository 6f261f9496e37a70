package lease

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"headgate/limiter"
)

// random sizes leases by chance: whatever a Sizer says, R1 holds.
type random struct{ t *rapid.T }

func (r *random) Size(s *Sight, _ int) (share uint32, depth, grant, refuse int64) {
	if rapid.Bool().Draw(r.t, "none") {
		return 0, 0, 0, 0
	}
	most := 2 * s.Limit.Capacity()
	return rapid.Uint32().Draw(r.t, "share"), rapid.Int64Range(-1, most).Draw(r.t, "depth"), rapid.Int64Range(-1, most).Draw(r.t, "grant"), rapid.Int64Range(0, 1e9).Draw(r.t, "refuse")
}

func (r *random) Recall(*Sight, int, int64) bool { return rapid.Bool().Draw(r.t, "recall") }

// allLevels lists all buckets.
func (o *Owner) allLevels(at Instant) (ls []OwnerLevel) {
	o.eachBucket(func(id uint32, b *bucket) {
		if uint64(b.partition) < uint64(len(o.parts)) && o.parts[b.partition].since != 0 {
			ls = append(ls, o.levelOf(at, id, b))
		}
	})
	sortLevels(ls)
	return ls
}

// told is what a holder of the model has heard of a series.
type told struct {
	lease    Lease
	returned int64
	refunded int64
	direct   int64
	dead     bool
}

// crowdModel drives an owner with holders that say anything at all, likely or not.
type crowdModel struct {
	o        *Owner
	rights   *deedRights
	at       Instant
	sessions [3]uint64
	dropped  [3]uint64
	seq      [3]uint64
	known    [3]map[uint64]*told
	order    [3][]uint64
	asks     uint64
	epoch    uint64
	revision uint64
	changed  bool // a limit was: leases of before may have more of the rate than there is
}

func newCrowdModel(t *rapid.T) *crowdModel {
	m := &crowdModel{rights: &deedRights{lease: 1e9}, at: Instant{1e9, 1_700_000_000e9}}
	m.o = NewOwner(OwnerConfig{Self: 1, Rights: m.rights, Sizer: &random{t}, Wait: 1.07e9, MaxBuckets: 6})
	for i := range m.known {
		m.known[i] = map[uint64]*told{}
	}
	m.view(7)
	return m
}

// view steps to the next one, with those of the three holders in it that the bits say.
func (m *crowdModel) view(members int) {
	m.epoch++
	v := &View{Epoch: m.epoch, Members: []Member{{"n1", 1, ""}}, Owners: []int32{0, 0}, Place: deedPlace}
	for i := range 3 {
		if members>>i&1 == 1 {
			v.Members = append(v.Members, Member{fmt.Sprint("n", i+2), uint64(i + 2), ""})
		}
	}
	m.o.Step(m.at, v)
}

func (m *crowdModel) limit(name string) limiter.Limit {
	d := deed{revision: m.revision}
	l := d.limit(name)
	if m.revision > 0 && l.Algorithm == limiter.GCRA && !l.Durable() { // another one each time
		l.Rate.Count, l.Burst = int64(5+m.revision%3*10), int64(30+m.revision%4*40)
	}
	return l
}

var crowdKeys = []string{"tokens", "more", "window", "slots", "day", "sliding"}

func (m *crowdModel) ask(t *rapid.T, who int) Ask {
	m.asks++
	a := Ask{ID: m.asks, Wait: rapid.Int64Range(0, 50e6).Draw(t, "wait"), Peek: rapid.IntRange(0, 9).Draw(t, "peek") == 0}
	for range rapid.IntRange(1, 3).Draw(t, "charges") {
		k := limiter.Key{Tenant: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "tenant"), Limit: rapid.SampledFrom(crowdKeys).Draw(t, "limit")}
		c := AskCharge{Bucket: Bucket{deedPlace(k.Tenant), k}, Limit: m.limit(k.Limit), Cost: rapid.Int64Range(-1, 60).Draw(t, "cost")}
		c.Oversize = rapid.SampledFrom([]limiter.Oversize{limiter.Refuse, limiter.Refuse, limiter.Debt}).Draw(t, "oversize")
		if c.Limit.Algorithm == limiter.Semaphore {
			c.Oversize = limiter.Refuse // more slots than there are would be lent
		}
		c.Shadow = rapid.IntRange(0, 9).Draw(t, "shadow") == 0
		a.Charges = append(a.Charges, c)
	}
	return a
}

// report is of a series that the holder heard of, and may be true.
func (m *crowdModel) report(t *rapid.T, who int) (r Report, ok bool) {
	if len(m.order[who]) == 0 {
		return r, false
	}
	x := m.known[who][rapid.SampledFrom(m.order[who]).Draw(t, "series")]
	r = Report{
		Bucket: x.lease.Bucket, Granter: 1, Series: x.lease.Series, Ack: x.lease.Number,
		Level: rapid.Int64Range(0, 100).Draw(t, "level"), Demand: rapid.Int64Range(0, 1e6).Draw(t, "demand"), Cost: rapid.Int64Range(0, 20).Draw(t, "typical"),
	}
	if rapid.IntRange(0, 3).Draw(t, "late") == 0 && r.Ack > 0 {
		r.Ack--
	}
	x.returned += min(rapid.Int64Range(0, 40).Draw(t, "returned"), max(0, x.lease.Granted-x.returned))
	x.refunded += min(rapid.Int64Range(0, 20).Draw(t, "refunded"), max(0, x.direct-x.refunded))
	r.Returned, r.Refunded = x.returned, x.refunded
	if x.lease.Limit.Algorithm == limiter.Semaphore {
		r.Refunded = 0
	}
	r.Debt = rapid.SampledFrom([]int64{0, 0, 0, 5}).Draw(t, "debt")
	r.Idle = x.dead || rapid.IntRange(0, 4).Draw(t, "idle") == 0
	r.Closed = r.Idle && rapid.Bool().Draw(t, "closed")
	x.dead = r.Idle
	if rapid.IntRange(0, 9).Draw(t, "forged") == 0 {
		wild := rapid.SampledFrom([]int64{-1, -1 << 62, 1 << 53, 1 << 62, 1<<63 - 1})
		r.Returned, r.Refunded, r.Debt = wild.Draw(t, "returns"), wild.Draw(t, "refunds"), wild.Draw(t, "debts")
	}
	return r, true
}

func (m *crowdModel) request(t *rapid.T) {
	who := rapid.IntRange(0, 2).Draw(t, "who")
	if rapid.IntRange(0, 9).Draw(t, "again") > 0 {
		m.seq[who]++
	}
	if rapid.IntRange(0, 19).Draw(t, "drop") == 0 {
		m.dropped[who] = m.sessions[who]
	}
	r := &Request{Holder: uint64(who + 2), Owner: 1, Epoch: m.epoch, Seq: max(1, m.seq[who]), Session: m.sessions[who], Dropped: m.dropped[who]}
	for range rapid.IntRange(0, 3).Draw(t, "reports") {
		if x, ok := m.report(t, who); ok {
			r.Reports = append(r.Reports, x)
		}
	}
	for range rapid.IntRange(0, 2).Draw(t, "asks") {
		r.Asks = append(r.Asks, m.ask(t, who))
	}
	if rapid.IntRange(0, 4).Draw(t, "roll") == 0 {
		r.Roll = &Roll{Epoch: m.epoch}
	}
	m.hear(t, m.o.Handle(m.at, r))
}

func (m *crowdModel) hear(t *rapid.T, rs []*Response) {
	for _, r := range rs {
		if _, err := responseOf(responsePB(r)); err != nil || len(r.Leases) > maxReports || len(r.Refusals) > maxReports {
			t.Fatalf("%v: %d leases, %d refusals: no holder takes this: %+v", err, len(r.Leases), len(r.Refusals), r)
		}
		who := int(r.Holder) - 2
		if who < 0 || who > 2 {
			continue
		}
		if r.Session != 0 {
			m.sessions[who] = r.Session
		}
		for _, l := range r.Leases {
			m.learn(who, l.Bucket, l.Series, l.Limit).lease = l
		}
		for _, d := range r.Decisions {
			for i := range d.Charges {
				c := &d.Charges[i]
				if c.Series != 0 && !c.Lent {
					for _, x := range m.known[who] {
						if x.lease.Series == c.Series {
							x.direct++
						}
					}
				}
			}
		}
	}
}

func (m *crowdModel) learn(who int, b Bucket, series uint64, l limiter.Limit) *told {
	if m.known[who][series] == nil {
		m.known[who][series] = &told{lease: Lease{Bucket: b, Series: series, Limit: l}}
		m.order[who] = append(m.order[who], series)
	}
	return m.known[who][series]
}

// check is R1, and that the counts are those of what is there.
func (m *crowdModel) check(t *rapid.T) {
	outstanding, pending := int64(0), false
	seen := 0
	m.o.eachBucket(func(id uint32, b *bucket) {
		seen++
		_, depth := m.o.sums(b)
		outstanding += depth
		m.o.touch(m.at, b)
		share, depth := m.o.sums(b)
		level := m.o.level(m.at, id, b)
		if b.limit.Algorithm != limiter.Semaphore && !b.limit.Durable() && level > b.limit.Capacity()-depth {
			t.Fatalf("%v: level %d and %d outstanding of %d", m.o.keyOf(id), level, depth, b.limit.Capacity())
		}
		lent := int64(0)
		for i := b.first; i != 0; i = m.o.pool.at(i).next {
			s := m.o.pool.at(i)
			pending = pending || s.is(seriesPending)
			if s.is(seriesSlots) {
				lent += s.lent()
			}
			if s.lent() < 0 && s.is(seriesSlots) || s.granted < 0 || s.depth < 0 {
				t.Fatalf("%v: series %+v", m.o.keyOf(id), *s)
			}
		}
		if b.limit.Algorithm == limiter.Semaphore && (lent > b.limit.Burst || level != b.limit.Burst-lent) {
			t.Fatalf("%v: %d slots lent, level %d of %d", m.o.keyOf(id), lent, level, b.limit.Burst)
		}
		if m.changed {
			return
		}
		if b.limit.Algorithm != limiter.Semaphore && depth > b.limit.Capacity() {
			t.Fatalf("%v: %d outstanding of %d", m.o.keyOf(id), depth, b.limit.Capacity())
		}
		if share > limiter.ShareOne {
			t.Fatalf("%v: %d/%d of the rate is lent", m.o.keyOf(id), share, int64(limiter.ShareOne))
		}
	})
	if seen != int(m.o.table.live) || len(m.o.parked) > maxParked {
		t.Fatalf("%d buckets of %d", seen, m.o.table.live)
	}
	sum := int64(0)
	m.o.eachBucket(func(_ uint32, b *bucket) {
		_, depth := m.o.sums(b)
		sum += depth
	})
	if sum != m.o.stats.Outstanding {
		t.Fatalf("%d outstanding, counted %d", sum, m.o.stats.Outstanding)
	}
}

// actions are what may happen to the model.
func (m *crowdModel) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"request": m.request,
		"later": func(t *rapid.T) {
			d := rapid.SampledFrom([]int64{1, 1e6, 5e6, 100e6, 1e9, 12e9}).Draw(t, "ns")
			m.at.Now += d
			m.at.Wall += d
		},
		"tick": func(t *rapid.T) { m.hear(t, m.o.Tick(m.at)) },
		"sweep": func(*rapid.T) {
			m.o.Sweep(m.at, 10)
		},
		"limit": func(*rapid.T) {
			m.revision++
			m.changed = true
		},
		"view":   func(t *rapid.T) { m.view(rapid.IntRange(0, 7).Draw(t, "members")) },
		"rights": func(t *rapid.T) { m.rights.lease = rapid.SampledFrom([]int64{0, 300e6, 1e9, 1e9}).Draw(t, "left") },
		"draw": func(t *rapid.T) {
			for _, d := range m.o.Draws(m.at) {
				n := rapid.Int64Range(0, d.Want).Draw(t, "granted")
				m.hear(t, m.o.Drawn(m.at, Drawn{Bucket: d.Bucket, N: d.N, Granted: n, RetryAfter: 1e9, Level: 100, Err: n%7 == 1}))
			}
		},
	}
}

// TestOwnerNeverLendsMore: whatever holders say and a Sizer wants, level + Σc ≤ burst and Σρ ≤ rate.
func TestOwnerNeverLendsMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newCrowdModel(t)
		actions := m.actions()
		actions[""] = m.check
		t.Repeat(actions)
	})
}

// TestOwnerForgetsOnlyFullBuckets: a flood of other keys evicts none that is not.
func TestOwnerForgetsOnlyFullBuckets(t *testing.T) {
	o := NewOwner(OwnerConfig{Self: 1, Rights: &deedRights{lease: 1e9}, Sizer: &oneSize{}, Wait: 1e9, MaxBuckets: 100})
	o.Step(Instant{1, 1}, &View{Epoch: 1, Members: []Member{{"n1", 1, ""}, {"n2", 2, ""}}, Owners: []int32{0, 0}, Place: deedPlace})
	limit := limiter.Limit{Rate: limiter.Rate{Count: 1, Per: 1e9}, Burst: 10}
	full, refused := 0, 0
	for i := range 1000 {
		at := Instant{int64(i) * 1e6, int64(i+1) * 1e6}
		k := limiter.Key{Tenant: "a", Limit: "tokens", Subject: fmt.Sprint(i)}
		rs := o.Handle(at, &Request{Holder: 2, Owner: 1, Epoch: 1, Seq: uint64(i + 1), Asks: []Ask{{ID: uint64(i + 1), Charges: []AskCharge{{Bucket: Bucket{0, k}, Limit: limit, Cost: 10}}}}})
		switch rs[0].Decisions[0].Refused {
		case -1:
			refused++
		case TableFull:
			full++
		default:
			t.Fatalf("%+v", rs[0].Decisions[0])
		}
	}
	if refused != 100 || full != 900 || o.Stats().Buckets != 100 {
		t.Errorf("%d admitted, %d refused for want of room, %d buckets", refused, full, o.Stats().Buckets)
	}
	// Full again, and closed by their holder: then they go.
	late := Instant{100e9, 100e9}
	if n := o.Sweep(late, 1000); n != 0 {
		t.Errorf("%d with open series were forgotten", n)
	}
	for i := range 100 {
		k := limiter.Key{Tenant: "a", Limit: "tokens", Subject: fmt.Sprint(i)}
		o.Handle(late, &Request{Holder: 2, Owner: 1, Epoch: 1, Seq: uint64(2000 + i), Session: 1, Reports: []Report{{Bucket: Bucket{0, k}, Granter: 1, Series: uint64(i + 1), Idle: true, Closed: true}}})
	}
	if n := o.Sweep(late, 1000); n != 100 || o.Stats().Series != 0 {
		t.Errorf("%d of 100 full buckets were forgotten, %d series are left", n, o.Stats().Series)
	}
}

// lendMany makes an owner of n buckets with one lease each.
func lendMany(n int) *Owner {
	o := NewOwner(OwnerConfig{Self: 1, Rights: &deedRights{lease: 1e9}, Sizer: &oneSize{share: .5, depth: 50, grant: 20}, Wait: 1e9, MaxBuckets: n})
	o.Step(Instant{1, 1}, &View{Epoch: 1, Members: []Member{{"n1", 1, ""}, {"n2", 2, ""}}, Owners: []int32{0, 0}, Place: deedPlace})
	limit := limiter.Limit{Rate: limiter.Rate{Count: 1000, Per: 60e9}, Burst: 1000}
	at := Instant{1e9, 1e9}
	for i := range n {
		k := limiter.Key{Tenant: fmt.Sprintf("a%07d", i), Limit: "org-tokens"}
		rs := o.Handle(at, &Request{Holder: 2, Owner: 1, Epoch: 1, Seq: uint64(2*i + 1), Asks: []Ask{{ID: uint64(i + 1), Charges: []AskCharge{{Bucket: Bucket{0, k}, Limit: limit, Cost: 10}}}}})
		for seq := 2*i + 2; len(rs[0].Leases) > 0; seq++ { // all is acknowledged
			l := rs[0].Leases[0]
			rs = o.Handle(at, &Request{Holder: 2, Owner: 1, Epoch: 1, Seq: uint64(seq), Session: 1, Reports: []Report{{Bucket: l.Bucket, Granter: 1, Series: l.Series, Ack: l.Number, Level: 50, Demand: 1, Cost: 1}}})
		}
		at.Now += 1e5
	}
	return o
}

// TestOwnerMemory: a bucket with a lease takes at most 200 bytes.
func TestOwnerMemory(t *testing.T) {
	if b, s := unsafe.Sizeof(bucket{}), unsafe.Sizeof(series{}); b != 56 || s != 96 {
		t.Errorf("a bucket has %d bytes and a series %d; 56 and 96 fill what they should", b, s)
	}
	const n = 50_000
	if per := ownerBytes(n); per > 200 {
		t.Errorf("%.0f bytes a bucket", per)
	}
}

func ownerBytes(n int) float64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	o := lendMany(n)
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(o)
	return float64(after.HeapAlloc-before.HeapAlloc) / float64(n)
}

func BenchmarkOwnerMemory(b *testing.B) {
	for b.Loop() {
		b.ReportMetric(ownerBytes(1_000_000), "B/bucket")
	}
}

// BenchmarkOwnerAsk is a direct decision on one of many buckets.
func BenchmarkOwnerAsk(b *testing.B) {
	o := lendMany(100_000)
	limit := limiter.Limit{Rate: limiter.Rate{Count: 1000, Per: 60e9}, Burst: 1000}
	at, seq := Instant{100e9, 100e9}, uint64(1e6)
	keys := make([]limiter.Key, 1000)
	for i := range keys {
		keys[i] = limiter.Key{Tenant: fmt.Sprintf("a%07d", i*97), Limit: "org-tokens"}
	}
	r := &Request{Holder: 2, Owner: 1, Epoch: 1, Session: 1, Asks: []Ask{{ID: 1, Charges: make([]AskCharge, 1)}}}
	var leases []Lease
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		seq++
		at.Now += 1e6
		r.Seq, r.Reports = seq, r.Reports[:0]
		for _, l := range leases { // what the last answer lent is acknowledged
			r.Reports = append(r.Reports, Report{Bucket: l.Bucket, Granter: 1, Series: l.Series, Ack: l.Number, Level: 50, Demand: 1, Cost: 1})
		}
		r.Asks[0].Charges[0] = AskCharge{Bucket: Bucket{0, keys[i%len(keys)]}, Limit: limit, Cost: 1}
		leases = o.Handle(at, r)[0].Leases
	}
}

// TestRestoreWithoutAWall: a window that is handed over to a process whose wall clock is not trusted just
// then is not forgotten.
func TestRestoreWithoutAWall(t *testing.T) {
	l := limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 100, Per: 5 * time.Second}, Revision: 1}
	const wall = 1_796_044_215_000_000_000
	var s limiter.State
	l.Debit(&s, wall, 100)
	if n := l.Level(&s, wall+1); n != 0 {
		t.Fatalf("level %d", n)
	}
	b := HandedBucket{Limit: l, State: l.AppendState(binary.BigEndian.AppendUint64(nil, wall), &s, wall)}
	got, err := restore(&b, Instant{Now: 1, Wall: 0})
	if err != nil {
		t.Fatal(err)
	}
	if n := l.Level(&got, wall+1e9); n != 0 {
		t.Errorf("level %d in the same window, want 0", n)
	}
}
