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
	recoverAlpha = 0.001
	// publishAlpha is the chance that the published bounds ever exclude the truth.
	publishAlpha = 0.05

	blockAudits   = 128
	blockRequests = 1 << 20
	maxBlocks     = 16  // what is older is forgotten
	minRecover    = 200 // audits, of the newest after a trip, before hits are served again

	// minLook is how many audits there must be, the newest, before it is said of them that too few could be labelled. Below
	// blindBelow of them no hit is served any more, from sightFrom on it is again.
	minLook               = 64
	blindBelow, sightFrom = 0.5, 0.625
)

// tally is what was counted of requests. Hits are those that were served or would have been; unlabelled are audits of
// which nothing is known, beside those that audited counts.
type tally struct{ requests, hits, audited, wrong, unlabelled uint64 }

func (t *tally) add(o *tally) {
	t.requests += o.requests
	t.hits += o.hits
	t.audited += o.audited
	t.wrong += o.wrong
	t.unlabelled += o.unlabelled
}

// looked is how many audits there were, labelled or not.
func (t *tally) looked() uint64 { return t.audited + t.unlabelled }

// bound is the share of wrong hits at which the nearer of the two bounds is reached. How many requests are hits
// is counted, not sampled, so it adds no doubt.
func (t *tally) bound(hitBound, requestBound float64) float64 {
	if t.hits == 0 {
		return hitBound
	}
	return min(hitBound, requestBound*float64(max(t.requests, t.hits))/float64(t.hits))
}

// totals are all that was ever counted, for people.
type totals struct{ requests, hits, served, audited, wrong, reported, unlabelled uint64 }

func (t *totals) add(o *totals) {
	t.requests += o.requests
	t.hits += o.hits
	t.served += o.served
	t.audited += o.audited
	t.wrong += o.wrong
	t.reported += o.reported
	t.unlabelled += o.unlabelled
}

// word is what a node says of a surface.
type word struct {
	// state counts the changes: even while hits are served, odd after a trip. The greater one wins everywhere, so nodes
	// agree as soon as they have heard of each other.
	state  uint64
	by     tally   // what tripped it, while it is tripped: of all nodes
	since  tally   // the last change
	blocks []tally // the newest last
	totals totals
}

// Budget holds one (tenant, surface, embedder) to its two bounds, by audits: a random share of would-be hits is asked
// of the model, and compared. Once a bound is surely exceeded no hit is allowed; would-be hits are then all audited, and
// once it is surely kept they are allowed again. Nor is a hit allowed while most audits find out nothing: what is not known is
// not kept. It judges what this node counted and what peers told together. Safe for concurrent use. A nil Budget allows nothing.
type Budget struct {
	mu                     sync.Mutex
	hitBound, requestBound float64
	own                    word
	peers                  map[string]word
	blind                  bool // too few of the newest audits could be labelled
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

// Allowed tells whether hits may be served: no bound is surely exceeded, or it has been surely kept since, and enough of the
// audits could be labelled.
func (b *Budget) Allowed() bool { return b.refusal() == "" }

// refusal is why no hit may be served, in a few words; "" where one may.
func (b *Budget) refusal() string {
	if b == nil {
		return whyTripped
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.own.state%2 == 1:
		return whyTripped
	case b.blind:
		return "too few of the checked answers could be compared"
	}
	return ""
}

const whyTripped = "the budget for wrong answers is exceeded"

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

// Unlabelled counts an audit that found out nothing: the answers could not be compared, or a hit was to be checked for
// which the model cannot be asked (Decision.Unaudited). It says nothing for or against any bound, and the shares that are
// estimated leave it out; but where most audits are of this kind, no hit is allowed.
func (b *Budget) Unlabelled() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.own.totals.unlabelled++
	b.count(&tally{unlabelled: 1})
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
	if last := w.blocks[len(w.blocks)-1]; last.looked() >= blockAudits || last.requests >= blockRequests {
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
	b.look()
	tripped := b.own.state%2 == 1
	for n := 1; n <= maxBlocks; n++ {
		t := b.recent(n)
		p := t.bound(b.hitBound, b.requestBound)
		if tripped { // by the newest, too: what was wrong until somebody mended it must not hold it for ever
			if t.audited >= minRecover && excluded(&t, p, recoverAlpha) < 0 {
				b.change(b.own.state+1, tally{})
				return
			}
			continue
		}
		if float64(t.wrong) > p*float64(t.audited) && excluded(&t, p, tripAlpha) > 0 { // the first half is cheap, and mostly enough
			b.change(b.own.state+1, t)
			return
		}
	}
}

// look finds out whether enough of the newest audits could be labelled, once there are some: those of the newest block, or
// of two. Otherwise it stays as it was.
func (b *Budget) look() {
	t := b.recent(1)
	if t.looked() < minLook {
		t = b.recent(2)
	}
	switch share := float64(t.audited) / float64(max(t.looked(), 1)); {
	case t.looked() < minLook:
	case share < blindBelow:
		b.blind = true
	case share >= sightFrom:
		b.blind = false
	}
}

// change begins to count anew: what came before, by, must neither trip again nor speak for going on.
func (b *Budget) change(state uint64, by tally) {
	b.own.state, b.own.by, b.own.since, b.own.blocks = state, by, tally{}, make([]tally, 1)
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
	// Since the nodes started. Unlabelled are audits that found out nothing; Audited has those that did.
	Requests, WouldHits, Served, Audited, Wrong, Reported, Unlabelled int64
	// Of the newest blocks; and after a trip, until they are enough to let it go on, of By, too. Where it is Blind, bounds are 0 and 1: it is not known.
	PerRequest, PerHit Rate
	// Confidence of the bounds, however often one looks.
	Confidence float64
	// Tripped: a bound was surely exceeded; no hits are served.
	Tripped bool
	Trips   int64
	// By is what tripped it, reports among it, Since what was found after that; both are empty where it is not tripped.
	By, Since Found
	// Blind: too few of the newest audits could be labelled; no hits are served.
	Blind bool
}

// Found is what audits and reports found.
type Found struct{ Audited, Wrong int64 }

func (t *tally) found() Found { return Found{int64(t.audited), int64(t.wrong)} }

// Snapshot is the state now.
func (b *Budget) Snapshot() Snapshot {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.own.totals
	for _, w := range b.peers {
		all.add(&w.totals)
	}
	s := Snapshot{
		Requests: int64(all.requests), WouldHits: int64(all.hits), Served: int64(all.served), Audited: int64(all.audited), Wrong: int64(all.wrong), Reported: int64(all.reported), Unlabelled: int64(all.unlabelled),
		Confidence: 1 - publishAlpha, Tripped: b.own.state%2 == 1, Trips: int64((b.own.state + 1) / 2), Blind: b.blind,
	}
	t := b.recent(maxBlocks)
	if s.Tripped {
		since := b.recent(0)
		s.By, s.Since = b.own.by.found(), since.found()
		if t.audited < minRecover { // too few to let it go on
			t.add(&b.own.by)
		}
	}
	s.PerHit = interval(&t, publishAlpha)
	if s.Blind {
		s.PerHit.Lower, s.PerHit.Upper = 0, 1
	}
	if t.requests > 0 {
		hits := float64(t.hits) / float64(max(t.requests, t.hits))
		s.PerRequest = Rate{s.PerHit.Estimate * hits, s.PerHit.Lower * hits, s.PerHit.Upper * hits}
	}
	return s
}

// MaxTold is the most bytes that Own returns and Hear reads.
const MaxTold = 2 << 10

const wordVersion = 2

// numbers are the word's in the order in which they are told, but for the blocks.
func (w *word) numbers() []*uint64 {
	n := []*uint64{
		&w.state,
		&w.totals.requests, &w.totals.hits, &w.totals.served, &w.totals.audited, &w.totals.wrong, &w.totals.reported, &w.totals.unlabelled,
	}
	return append(append(n, w.by.numbers()...), w.since.numbers()...)
}

func (t *tally) numbers() []*uint64 {
	return []*uint64{&t.requests, &t.hits, &t.audited, &t.wrong, &t.unlabelled}
}

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
	for _, t := range append(w.blocks, w.by, w.since) {
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
		b.change(w.state, w.by)
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
	return (1 + len(b.peers)) * (maxBlocks*40 + 320)
}
