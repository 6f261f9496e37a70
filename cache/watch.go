package cache

import (
	"cmp"
	"hash/maphash"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of what is watched.
const (
	maxWatched  = 10_000 // pairs of a tenant and a surface; the rest are counted as one
	maxWhys     = 16     // reasons of one of them; the rest are counted as one
	maxWhy      = 60     // bytes of one
	watchShards = 16
)

// The windows in which rates are looked at: the last ten minutes, and the hour before those.
const (
	binLength   = int64(time.Minute)
	recentBins  = 10
	earlierBins = 60
	watchBins   = recentBins + earlierBins
	watchSpan   = watchBins * binLength
)

// OtherWatched is the name of what is not counted apart.
const OtherWatched = "other"

// Event is what the cache did for one request. Note keeps nothing of it but copies of the names.
type Event struct {
	Tenant, Surface string
	// Outcome is exact, stale, live, semantic, miss, partial (of several parts of the request some were kept),
	// failed (it got the error of another), bypass or uncacheable; or stale_if_error or unkept (its
	// answer was not kept), which come after the miss of the same request. Others are not counted.
	Outcome      string
	Why          string // of uncacheable and unkept; what follows a colon does not count
	Personal     bool   // the surface's answers are about their users
	SavedNanoUSD int64
	Context      func() *Context // what the key is made of; nil: there is none, or it may not be looked at
}

// Line is what the cache did for a surface of a tenant since the start.
type Line struct {
	Tenant, Surface string // OtherWatched, both, for those that are not counted apart
	Personal        bool
	Requests        int64
	Exact           int64 // hits,
	Stale           int64 // hits that were too old,
	Live            int64 // those on an answer that was under way,
	Semantic        int64 // and those by a question that means the same
	Misses          int64
	Partial         int64
	StaleIfError    int64 // of the misses
	Failed, Bypass  int64
	Uncacheable     map[string]int64 // requests whose answers are never kept, by why
	Unkept          map[string]int64 // answers to misses that were not kept, by why
	SavedNanoUSD    int64
	HitRate         float64     // hits of hits, misses and partial ones, 0 to 1; 0 where there are none
	Recent          float64     // the same of the last ten minutes,
	RecentOf        int64       // which had so many
	Alerts          []AlertKind // that are not over
}

// SurfaceRate is how a surface did in the last ten minutes, for all tenants.
type SurfaceRate struct {
	Surface       string
	Hits, Lookups int64
}

// Watch counts what the cache does for whom, and notices where it does badly. It keeps no
// content: of requests that missed, now and then, the names of what the key is made of and
// hashes under a secret that is nowhere else. Memory: some 1 KiB for each pair of a tenant and a
// surface, 10 MB at most, and at most as much for the hashes. Safe for concurrent use; time is
// an argument, in nanoseconds on any clock that does not go back by much.
type Watch struct {
	seed   maphash.Seed
	shards [watchShards]watchShard
	rest   watchShard // one pair, for what is beyond the bound

	pairs   atomic.Int64 // in shards
	samples atomic.Int64 // in all pairs

	telling sync.Mutex // taken before those of shards
	budgets [alertKinds]alertBudget
}

type watchShard struct {
	mu    sync.Mutex
	pairs map[watchName]*watched
}

type watchName struct{ tenant, surface string }

// watchKind is an outcome.
type watchKind uint8

const (
	watchExact watchKind = iota
	watchStale
	watchLive
	watchSemantic
	watchMiss
	watchPartial
	watchStaleIfError
	watchFailed
	watchBypass
	watchUncacheable
	watchUnkept
	watchKinds
)

func watchKindOf(outcome string) (watchKind, bool) {
	switch outcome {
	case "exact":
		return watchExact, true
	case "stale":
		return watchStale, true
	case "live":
		return watchLive, true
	case "semantic":
		return watchSemantic, true
	case "miss":
		return watchMiss, true
	case "partial":
		return watchPartial, true
	case "stale_if_error":
		return watchStaleIfError, true
	case "failed":
		return watchFailed, true
	case "bypass":
		return watchBypass, true
	case "uncacheable":
		return watchUncacheable, true
	case "unkept":
		return watchUnkept, true
	}
	return 0, false
}

// watched is a surface of a tenant. Its shard's lock is held round everything.
type watched struct {
	name        watchName
	personal    bool
	count       [watchKinds]int64
	uncacheable reasons
	unkept      reasons
	saved       int64
	first, last int64 // when it was asked for

	head int64 // the number of the newest bin
	bins [watchBins]watchBin

	unsampled int // misses since the last sample
	samples   []keySample
	oldest    int // of the samples, once there are as many as there may be

	episodes [alertKinds]episode
	gone     bool // it was folded into the rest
}

// watchBin is one minute.
type watchBin struct{ lookups, hits, partial uint32 }

// tally is a sum of bins.
type tally struct{ lookups, hits, partial int64 }

// used is the share of lookups that something came of.
func (t tally) used() float64 { return shareOf(t.hits+t.partial, t.lookups) }

func (t tally) plus(o tally) tally {
	return tally{t.lookups + o.lookups, t.hits + o.hits, t.partial + o.partial}
}

func shareOf(part, of int64) float64 {
	if of == 0 {
		return 0
	}
	return float64(part) / float64(of)
}

// NewWatch makes a Watch that has seen nothing.
func NewWatch() *Watch {
	w := &Watch{seed: maphash.MakeSeed()}
	for i := range w.shards {
		w.shards[i].pairs = make(map[watchName]*watched)
	}
	other := watchName{OtherWatched, OtherWatched}
	w.rest.pairs = map[watchName]*watched{other: {name: other}}
	return w
}

// Note counts e. It allocates nothing but where a name is new, or for one miss in 64, whose
// e.Context it asks for.
func (w *Watch) Note(e *Event, now int64) {
	kind, ok := watchKindOf(e.Outcome)
	if !ok {
		return
	}
	s, p := w.find(watchName{e.Tenant, e.Surface}, now)
	p.note(kind, e, now)
	sample := s != &w.rest && kind == watchMiss && e.Context != nil && p.sampled()
	s.mu.Unlock()
	if !sample {
		return
	}
	parts := sampleKey(w.seed, e.Context())
	if len(parts) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	w.keepSample(p, keySample{now, parts})
}

// find returns the pair of that name, or the rest where there is no room, and its shard, locked.
func (w *Watch) find(name watchName, now int64) (*watchShard, *watched) {
	h := maphash.String(w.seed, name.tenant) ^ maphash.String(w.seed, name.surface)>>8
	s := &w.shards[h%watchShards]
	s.mu.Lock()
	p := s.pairs[name]
	if p != nil {
		return s, p
	}
	if w.pairs.Add(1) > maxWatched {
		w.pairs.Add(-1)
		s.mu.Unlock()
		w.rest.mu.Lock()
		return &w.rest, w.rest.pairs[watchName{OtherWatched, OtherWatched}]
	}
	// a variable of its own, or e and its closure would be taken to escape from Note
	own := watchName{strings.Clone(name.tenant), strings.Clone(name.surface)}
	p = &watched{name: own, first: now, head: binOf(now)}
	s.pairs[own] = p
	return s, p
}

func (p *watched) note(kind watchKind, e *Event, now int64) {
	p.count[kind]++
	p.saved += e.SavedNanoUSD
	p.personal = e.Personal
	p.last = max(p.last, now)
	switch kind {
	case watchUncacheable:
		p.uncacheable.add(e.Why, 1)
	case watchUnkept:
		p.unkept.add(e.Why, 1)
	case watchExact, watchStale, watchLive, watchSemantic, watchMiss, watchPartial:
		b := p.bin(now)
		b.lookups++
		switch kind {
		case watchMiss:
		case watchPartial:
			b.partial++
		default:
			b.hits++
		}
	}
}

// reasons are how often there was each.
type reasons map[string]*int64

// add counts n times a reason, by what stands before its colon.
func (r *reasons) add(why string, n int64) {
	why, _, _ = strings.Cut(why, ":")
	if len(why) > maxWhy {
		why = strings.ToValidUTF8(why[:maxWhy], "")
	}
	c := (*r)[why]
	switch {
	case c != nil:
	case len(*r) >= maxWhys:
		if c = (*r)[OtherWatched]; c == nil {
			c = new(int64)
			(*r)[OtherWatched] = c
		}
	default:
		if *r == nil {
			*r = make(reasons)
		}
		c = new(int64)
		(*r)[strings.Clone(why)] = c
	}
	*c += n
}

func (r *reasons) addAll(o reasons) {
	for why, n := range o {
		r.add(why, *n)
	}
}

// counts copies r; nil where there are none.
func (r reasons) counts() map[string]int64 {
	if len(r) == 0 {
		return nil
	}
	out := make(map[string]int64, len(r))
	for why, n := range r {
		out[why] = *n
	}
	return out
}

// most is the most frequent one.
func (r reasons) most() (why string, n int64) {
	for w, c := range r {
		if *c > n || *c == n && w < why {
			why, n = w, *c
		}
	}
	return why, n
}

// binOf numbers the minutes.
func binOf(now int64) int64 {
	n := now / binLength
	if now%binLength < 0 {
		n--
	}
	return n
}

// bin is that of now. What comes late counts in the newest.
func (p *watched) bin(now int64) *watchBin {
	n := binOf(now)
	for i := max(p.head+1, n-watchBins+1); i <= n; i++ {
		*p.slot(i) = watchBin{}
	}
	p.head = max(p.head, n)
	return p.slot(p.head)
}

func (p *watched) slot(n int64) *watchBin {
	return &p.bins[(n%watchBins+watchBins)%watchBins]
}

// windows sums up the last ten minutes, of which the last is not over, and the hour before those.
func (p *watched) windows(now int64) (recent, earlier tally) {
	n := max(binOf(now), p.head)
	for i := n - watchBins + 1; i <= p.head; i++ {
		t := &earlier
		if i > n-recentBins {
			t = &recent
		}
		b := p.slot(i)
		t.lookups += int64(b.lookups)
		t.hits += int64(b.hits)
		t.partial += int64(b.partial)
	}
	return recent, earlier
}

// each calls f for every pair, with its shard locked; where f says so the pair is forgotten.
func (w *Watch) each(f func(*watched) (forget bool)) {
	for i := range w.shards {
		s := &w.shards[i]
		s.mu.Lock()
		for name, p := range s.pairs {
			if f(p) {
				p.gone = true
				delete(s.pairs, name)
				w.pairs.Add(-1)
			}
		}
		s.mu.Unlock()
	}
}

// tidy makes room: samples that are too old go, and, where there are as many pairs as there may be,
// those that nobody has asked for in an hour.
func (w *Watch) tidy(now int64) {
	full := w.pairs.Load() >= maxWatched
	var gone []*watched
	w.each(func(p *watched) bool {
		w.dropSamples(p, now)
		if !full || now-p.last < watchSpan {
			return false
		}
		gone = append(gone, p)
		return true
	})
	if len(gone) == 0 {
		return
	}
	w.rest.mu.Lock()
	defer w.rest.mu.Unlock()
	rest := w.rest.pairs[watchName{OtherWatched, OtherWatched}]
	for _, p := range gone { // nobody else has it now but a Note that looks at gone
		for i, n := range p.count {
			rest.count[i] += n
		}
		rest.uncacheable.addAll(p.uncacheable)
		rest.unkept.addAll(p.unkept)
		rest.saved += p.saved
	}
}

// Snapshot lists what was counted, by tenant and surface, what is not counted apart last.
func (w *Watch) Snapshot(now int64) []Line {
	var lines []Line
	w.each(func(p *watched) bool {
		lines = append(lines, p.line(now))
		return false
	})
	slices.SortFunc(lines, func(a, b Line) int {
		return cmp.Or(strings.Compare(a.Tenant, b.Tenant), strings.Compare(a.Surface, b.Surface))
	})
	w.rest.mu.Lock()
	defer w.rest.mu.Unlock()
	for _, p := range w.rest.pairs {
		if l := p.line(now); l.Requests > 0 {
			l.Personal = false // some are, some are not
			lines = append(lines, l)
		}
	}
	return lines
}

func (p *watched) line(now int64) Line {
	c := &p.count
	hits := c[watchExact] + c[watchStale] + c[watchLive] + c[watchSemantic]
	lookups := hits + c[watchMiss] + c[watchPartial]
	recent, _ := p.windows(now)
	l := Line{
		Tenant: p.name.tenant, Surface: p.name.surface, Personal: p.personal,
		Requests: lookups + c[watchFailed] + c[watchBypass] + c[watchUncacheable],
		Exact:    c[watchExact], Stale: c[watchStale], Live: c[watchLive], Semantic: c[watchSemantic], Misses: c[watchMiss], Partial: c[watchPartial],
		StaleIfError: c[watchStaleIfError], Failed: c[watchFailed], Bypass: c[watchBypass],
		Uncacheable: p.uncacheable.counts(), Unkept: p.unkept.counts(), SavedNanoUSD: p.saved,
		HitRate: shareOf(hits, lookups), Recent: shareOf(recent.hits, recent.lookups), RecentOf: recent.lookups,
	}
	for kind := range p.episodes {
		if p.episodes[kind].open {
			l.Alerts = append(l.Alerts, AlertKind(kind))
		}
	}
	return l
}

// Surfaces lists how each did in the last ten minutes, at most that many, those with the most
// lookups; the others are one more.
func (w *Watch) Surfaces(now int64, most int) []SurfaceRate {
	sums := make(map[string]tally)
	w.each(func(p *watched) bool {
		recent, _ := p.windows(now)
		sums[p.name.surface] = sums[p.name.surface].plus(recent)
		return false
	})
	w.rest.mu.Lock()
	recent, _ := w.rest.pairs[watchName{OtherWatched, OtherWatched}].windows(now)
	w.rest.mu.Unlock()
	list := make([]SurfaceRate, 0, len(sums))
	other := SurfaceRate{OtherWatched, recent.hits, recent.lookups}
	for name, t := range sums {
		if name == OtherWatched {
			other.Hits, other.Lookups = other.Hits+t.hits, other.Lookups+t.lookups
			continue
		}
		list = append(list, SurfaceRate{name, t.hits, t.lookups})
	}
	slices.SortFunc(list, func(a, b SurfaceRate) int {
		return cmp.Or(cmp.Compare(b.Lookups, a.Lookups), strings.Compare(a.Surface, b.Surface))
	})
	for _, s := range list[min(most, len(list)):] {
		other.Hits, other.Lookups = other.Hits+s.Hits, other.Lookups+s.Lookups
	}
	list = list[:min(most, len(list))]
	if other.Lookups > 0 {
		list = append(list, other)
	}
	return list
}
