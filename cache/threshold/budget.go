package threshold

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
)

const (
	// tripAlpha is the chance that a surface whose error is just at its bound is ever tripped by what is counted from the
	// beginning of one block, however often it is looked at: at most one false trip in a thousand blocks, of 128 audits each.
	tripAlpha = 0.001
	// recoverAlpha is the chance that one whose error is above the bound is let go on after a trip, likewise.
	recoverAlpha = 0.05
	// publishAlpha is the chance that the published bounds ever exclude the truth.
	publishAlpha = 0.05

	blockAudits   = 128
	blockRequests = 1 << 20
	maxBlocks     = 16  // what is older is forgotten
	minRecover    = 200 // would-be hits, after a trip, before hits are served again
)

// tally is what was counted of requests. Hits are those that were served or would have been.
type tally struct{ requests, hits, audited, wrong uint64 }

func (t *tally) add(o *tally) {
	t.requests += o.requests
	t.hits += o.hits
	t.audited += o.audited
	t.wrong += o.wrong
}

// bound is the share of wrong hits at which the nearer of the two bounds is reached. How many requests are hits
// is counted, not sampled, so it adds no doubt.
func (t *tally) bound(hitBound, requestBound float64) float64 {
	if t.hits == 0 {
		return hitBound
	}
	return min(hitBound, requestBound*float64(max(t.requests, t.hits))/float64(t.hits))
}

// totals are all that was ever counted, for people.
type totals struct{ requests, hits, served, audited, wrong, reported uint64 }

// word is what a node says of a surface.
type word struct {
	// state counts the changes: even while hits are served, odd after a trip. The greater one wins everywhere, so nodes
	// agree as soon as they have heard of each other.
	state  uint64
	since  tally   // the last change
	blocks []tally // the newest last
	totals totals
}

// Budget holds one (tenant, surface, embedder) to its two bounds, by audits: a random share of would-be hits is asked
// of the model, and compared. Once a bound is surely exceeded no hit is allowed; would-be hits are then all audited, and
// once it is surely kept they are allowed again. It judges what this node counted and what peers told together. Safe for
// concurrent use. A nil Budget allows nothing.
type Budget struct {
	mu                     sync.Mutex
	hitBound, requestBound float64
	own                    word
	peers                  map[string]word
}

// NewBudget is one for the policy's bounds.
func NewBudget(p *Policy) *Budget {
	return &Budget{hitBound: p.HitErrorBound, requestBound: p.ErrorBound, own: word{blocks: make([]tally, 1)}, peers: map[string]word{}}
}

// Configure takes over other bounds. What was counted stays, and is judged by them.
func (b *Budget) Configure(p *Policy) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.hitBound != p.HitErrorBound || b.requestBound != p.ErrorBound {
		b.hitBound, b.requestBound = p.HitErrorBound, p.ErrorBound
		b.judge()
	}
}

// Allowed tells whether hits may be served: no bound is surely exceeded, or it has been surely kept since.
func (b *Budget) Allowed() bool {
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.own.state%2 == 0
}

// Count counts a question by what became of it in the end.
func (b *Budget) Count(a Action) {
	t := tally{requests: 1}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.own.totals.requests++
	if a == Serve || a == Audit {
		t.hits = 1
		b.own.totals.hits++
	}
	if a == Serve {
		b.own.totals.served++
	}
	b.count(&t)
}

// Label counts what the audit of a would-be hit (Action Audit) found. Labels of explored questions are none of the
// budget's.
func (b *Budget) Label(same bool) {
	t := tally{audited: 1}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.own.totals.audited++
	if !same {
		t.wrong = 1
		b.own.totals.wrong++
	}
	b.count(&t)
	b.judge()
}

// Wrong counts a served hit that somebody reported, as an audit that found it wrong. Nobody reports the right ones, so
// this makes the error look greater than it is: the safe direction.
func (b *Budget) Wrong() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.own.totals.reported++
	b.count(&tally{audited: 1, wrong: 1})
	b.judge()
}

// count adds to the newest block. A full one is followed by the next: by its size alone and never by what was found, or
// the chance of a false trip would not be what it is said to be.
func (b *Budget) count(t *tally) {
	w := &b.own
	if last := w.blocks[len(w.blocks)-1]; last.audited >= blockAudits || last.requests >= blockRequests {
		if len(w.blocks) == maxBlocks {
			w.blocks = append(w.blocks[:0], w.blocks[1:]...)
		}
		w.blocks = append(w.blocks, tally{})
	}
	w.blocks[len(w.blocks)-1].add(t)
	w.since.add(t)
}

// judge trips or lets go on, where either is sure.
func (b *Budget) judge() {
	if b.own.state%2 == 1 {
		t := b.recent(0)
		if t.audited >= minRecover && excluded(&t, t.bound(b.hitBound, b.requestBound), recoverAlpha) < 0 {
			b.change(b.own.state + 1)
		}
		return
	}
	for n := 1; n <= maxBlocks; n++ {
		t := b.recent(n)
		p := t.bound(b.hitBound, b.requestBound)
		if float64(t.wrong) > p*float64(t.audited) && excluded(&t, p, tripAlpha) > 0 { // the first half is cheap, and mostly enough
			b.change(b.own.state + 1)
			return
		}
	}
}

// change begins to count anew: what came before must neither trip again nor speak for going on.
func (b *Budget) change(state uint64) {
	b.own.state, b.own.since, b.own.blocks = state, tally{}, make([]tally, 1)
}

// recent adds up the newest n blocks of every node that is in the same state, or all since the last change (0).
func (b *Budget) recent(n int) (sum tally) {
	take := func(w *word) {
		if n == 0 {
			sum.add(&w.since)
			return
		}
		for i := max(0, len(w.blocks)-n); i < len(w.blocks); i++ {
			sum.add(&w.blocks[i])
		}
	}
	take(&b.own)
	for _, w := range b.peers {
		if w.state == b.own.state {
			take(&w)
		}
	}
	return sum
}

// The prior over shares of wrong ones that the martingale mixes: most of it below a tenth, where bounds are.
const mixWrong, mixRight = 0.5, 10.0

// excluded tells whether a true share of p is excluded by what was audited: +1, as too many were wrong, −1, as too few
// were, or 0. By Robbins' mixture martingale (1970): the mixture's likelihood over p's is one while p is true, so it
// ever exceeds 1/α with a chance of α at most (Ville), at whatever time one looks.
func excluded(t *tally, p, alpha float64) int {
	wrong, right := float64(t.wrong), float64(t.audited)-float64(t.wrong)
	if t.audited == 0 || p >= 1 {
		return 0
	}
	p = max(p, 1e-12)
	mixed := logBeta(wrong+mixWrong, right+mixRight) - logBeta(mixWrong, mixRight)
	if mixed-wrong*math.Log(p)-right*math.Log1p(-p) < -math.Log(alpha) {
		return 0
	}
	if wrong > p*float64(t.audited) {
		return 1
	}
	return -1
}

// interval is the shares that are not excluded.
func interval(t *tally, alpha float64) Rate {
	r := Rate{Lower: 0, Upper: 1}
	if t.audited == 0 {
		return r
	}
	r.Estimate = float64(t.wrong) / float64(t.audited)
	edge := func(in, out float64) float64 {
		for range 50 {
			if mid := (in + out) / 2; excluded(t, mid, alpha) == 0 {
				in = mid
			} else {
				out = mid
			}
		}
		return out
	}
	r.Lower, r.Upper = edge(r.Estimate, 0), edge(r.Estimate, 1)
	return r
}

// Rate is a share, with the bounds between which it lies.
type Rate struct{ Estimate, Lower, Upper float64 }

// Snapshot is what is published: the state of the whole cluster, as far as this node was told.
type Snapshot struct {
	// Since the nodes started.
	Requests, WouldHits, Served, Audited, Wrong, Reported int64
	// Of the newest blocks, or since the last trip.
	PerRequest, PerHit Rate
	// Confidence of the bounds, however often one looks.
	Confidence float64
	// Tripped: no hits are served.
	Tripped bool
	Trips   int64
}

// Snapshot is the state now.
func (b *Budget) Snapshot() Snapshot {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.own.totals
	for _, w := range b.peers {
		all.requests += w.totals.requests
		all.hits += w.totals.hits
		all.served += w.totals.served
		all.audited += w.totals.audited
		all.wrong += w.totals.wrong
		all.reported += w.totals.reported
	}
	s := Snapshot{
		Requests: int64(all.requests), WouldHits: int64(all.hits), Served: int64(all.served), Audited: int64(all.audited), Wrong: int64(all.wrong), Reported: int64(all.reported),
		Confidence: 1 - publishAlpha, Tripped: b.own.state%2 == 1, Trips: int64((b.own.state + 1) / 2),
	}
	n := maxBlocks
	if s.Tripped {
		n = 0
	}
	t := b.recent(n)
	s.PerHit = interval(&t, publishAlpha)
	if t.requests > 0 {
		hits := float64(t.hits) / float64(max(t.requests, t.hits))
		s.PerRequest = Rate{s.PerHit.Estimate * hits, s.PerHit.Lower * hits, s.PerHit.Upper * hits}
	}
	return s
}

// MaxTold is the most bytes that Own returns and Hear reads.
const MaxTold = 2 << 10

const wordVersion = 1

// numbers are the word's in the order in which they are told, but for the blocks.
func (w *word) numbers() []*uint64 {
	return []*uint64{
		&w.state, &w.since.requests, &w.since.hits, &w.since.audited, &w.since.wrong,
		&w.totals.requests, &w.totals.hits, &w.totals.served, &w.totals.audited, &w.totals.wrong, &w.totals.reported,
	}
}

func (t *tally) numbers() []*uint64 { return []*uint64{&t.requests, &t.hits, &t.audited, &t.wrong} }

// Own is what this node has counted, for others to Hear. At most MaxTold bytes.
func (b *Budget) Own() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := []byte{wordVersion, byte(len(b.own.blocks))}
	for _, v := range b.own.numbers() {
		out = binary.AppendUvarint(out, *v)
	}
	for i := range b.own.blocks {
		for _, v := range b.own.blocks[i].numbers() {
			out = binary.AppendUvarint(out, *v)
		}
	}
	return out
}

// maxCount bounds what a peer may say it counted, so that sums stay sums.
const maxCount = 1 << 48

func readWord(b []byte) (w word, err error) {
	if len(b) < 2 || len(b) > MaxTold || b[0] != wordVersion || b[1] > maxBlocks {
		return w, fmt.Errorf("budget: %d bytes that are no word of this version", len(b))
	}
	w.blocks = make([]tally, b[1])
	fields := w.numbers()
	for i := range w.blocks {
		fields = append(fields, w.blocks[i].numbers()...)
	}
	b = b[2:]
	for _, f := range fields {
		v, n := binary.Uvarint(b)
		if n <= 0 || v > maxCount {
			return w, errors.New("budget: a number is missing or too great")
		}
		*f, b = v, b[n:]
	}
	if len(b) > 0 {
		return w, errors.New("budget: more than was announced")
	}
	for _, t := range append(w.blocks, w.since) {
		if t.wrong > t.audited {
			return w, errors.New("budget: more wrong than audited")
		}
	}
	return w, nil
}

// Hear replaces what the peer has last told, and follows it where it has tripped or gone on since. Anything but what Own
// returned is an error, and changes nothing.
func (b *Budget) Hear(peer string, told []byte) error {
	w, err := readWord(told)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, known := b.peers[peer]; !known && len(b.peers) >= MaxPeers {
		return fmt.Errorf("budget: more than %d peers", MaxPeers)
	}
	b.peers[peer] = w
	if w.state > b.own.state {
		b.change(w.state)
	}
	b.judge()
	return nil
}

// Forget drops what the peer has told.
func (b *Budget) Forget(peer string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.peers, peer)
}

// Bytes is about what the budget takes in memory.
func (b *Budget) Bytes() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return (1 + len(b.peers)) * (maxBlocks*32 + 256)
}
