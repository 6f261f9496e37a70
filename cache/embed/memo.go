package embed

import (
	"container/list"
	"context"
	"crypto/sha256"
	"fmt"
	"runtime"
	"sync"
)

const (
	memoOverhead  = 256  // bytes that an entry takes beside its vector: key, map, list
	maxMemoFlying = 4096 // texts that are being embedded or wait for it
)

// Memo is an Embedder that remembers what another made of a text, under the hash of the text, the
// other's version and the length of its vectors; the texts themselves are not kept. What has been used longest ago goes first.
//
// Texts that come while the same are being embedded wait for that, and those who leave do not end
// it for the others. No more calls of the other's run at a time than there are processors, or
// than its method Concurrency() int says; when nobody wants a call any more it is cancelled, or
// does not begin.
type Memo struct {
	next     Embedder
	maxBytes int64
	turns    chan struct{}   // one for each call that runs
	ctx      context.Context // ended by Close: calls belong to nobody in particular
	cancel   context.CancelFunc
	running  sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	kept    map[memoKey]*list.Element // of *memoEntry
	order   list.List                 // the most recently used first
	bytes   int64
	flights map[memoKey]*memoFlight
	stats   MemoStats
}

type memoKey [sha256.Size]byte

type memoEntry struct {
	key    memoKey
	vector []float32
}

// memoFlight is a text that is being embedded.
type memoFlight struct {
	call   *memoCall
	text   string
	key    memoKey
	vector []float32
	err    error
}

// memoCall embeds the texts that one caller brought and nobody had.
type memoCall struct {
	flights []*memoFlight
	wanted  int // callers that wait for one of them; at none the call is cancelled
	cancel  context.CancelFunc
	done    chan struct{}
}

// MemoStats is what a Memo did since it was made, in texts, and what it holds.
type MemoStats struct {
	Hits, Joined, Misses, Evicted int64
	Entries                       int
	Bytes                         int64
}

// NewMemo gives a Memo that keeps at most maxBytes of vectors and their keys; 0 or less keeps none, and
// still embeds the same text once at a time. Close it before next.
func NewMemo(next Embedder, maxBytes int64) *Memo {
	turns := runtime.GOMAXPROCS(0)
	if c, ok := next.(interface{ Concurrency() int }); ok {
		turns = max(1, c.Concurrency())
	}
	m := &Memo{
		next: next, maxBytes: maxBytes, turns: make(chan struct{}, turns),
		kept: make(map[memoKey]*list.Element), flights: make(map[memoKey]*memoFlight),
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m
}

// Version is the other's.
func (m *Memo) Version() string { return m.next.Version() }

// Dim is the other's.
func (m *Memo) Dim() int { return m.next.Dim() }

// Stats is what it did so far.
func (m *Memo) Stats() MemoStats {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.stats
	s.Entries, s.Bytes = len(m.kept), m.bytes
	return s
}

// Close cancels what runs and waits for it. Embed fails from then on.
func (m *Memo) Close() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.cancel()
	m.running.Wait()
}

// Embed gives vectors that others have, too. See Embedder.
func (m *Memo) Embed(ctx context.Context, texts []string) ([][]float32, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	vectors := make([][]float32, len(texts))
	flights, calls, err := m.look(texts, vectors)
	if err != nil {
		return nil, err
	}
	defer m.leave(calls)
	for i, f := range flights {
		if f == nil {
			continue
		}
		select {
		case <-f.call.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if f.err != nil {
			return nil, indexed(f.err, i)
		}
		vectors[i] = f.vector
	}
	return ofOneLength(vectors)
}

// look fills in what is kept, and gives a flight for each of the others and the calls that
// they belong to, in each of which the caller is counted once.
func (m *Memo) look(texts []string, vectors [][]float32) (flights []*memoFlight, calls map[*memoCall]struct{}, err error) {
	keys := make([]memoKey, len(texts))
	version, dim := m.next.Version(), m.next.Dim()
	for i, text := range texts {
		keys[i] = keyOf(version, dim, text)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, nil, &Error{Kind: Unavailable, Reason: "the embedder is closed"}
	}
	if len(m.flights)+m.unknown(keys) > maxMemoFlying {
		return nil, nil, &Error{Kind: Overloaded, Reason: fmt.Sprintf("%d texts wait already", len(m.flights))}
	}
	var own *memoCall
	for i, key := range keys {
		if at, ok := m.kept[key]; ok {
			m.order.MoveToFront(at)
			vectors[i] = at.Value.(*memoEntry).vector
			m.stats.Hits++
			continue
		}
		if flights == nil {
			flights, calls = make([]*memoFlight, len(texts)), make(map[*memoCall]struct{})
		}
		f, ok := m.flights[key]
		if ok {
			m.stats.Joined++
		} else {
			if own == nil {
				own = &memoCall{done: make(chan struct{})}
			}
			f = &memoFlight{call: own, text: texts[i], key: key}
			own.flights = append(own.flights, f)
			m.flights[key] = f
			m.stats.Misses++
		}
		flights[i] = f
		calls[f.call] = struct{}{}
	}
	for call := range calls {
		call.wanted++
	}
	if own != nil {
		var runs context.Context
		runs, own.cancel = context.WithCancel(m.ctx)
		m.running.Go(func() { m.run(runs, own) })
	}
	return flights, calls, nil
}

// unknown is how many of keys are neither kept nor under way. m.mu is held.
func (m *Memo) unknown(keys []memoKey) (n int) {
	for _, key := range keys {
		if m.kept[key] == nil && m.flights[key] == nil {
			n++
		}
	}
	return n
}

// keyOf tells texts, versions and lengths of vectors apart, whatever is in them.
func keyOf(version string, dim int, text string) memoKey {
	h := sha256.New()
	_, _ = fmt.Fprintf(h, "%d:%d:%s", dim, len(version), version) // a hash takes all
	_, _ = h.Write([]byte(text))
	return memoKey(h.Sum(nil))
}

// leave counts a caller out of its calls. What nobody waits for is cancelled, and nobody joins it any more.
func (m *Memo) leave(calls map[*memoCall]struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for call := range calls {
		call.wanted--
		if call.wanted == 0 {
			call.cancel()
			m.forget(call)
		}
	}
}

// forget has the texts of a call no longer be under way. m.mu is held.
func (m *Memo) forget(call *memoCall) {
	for _, f := range call.flights {
		if m.flights[f.key] == f {
			delete(m.flights, f.key)
		}
	}
}

// run makes a call when its turn comes, and lands its flights.
func (m *Memo) run(ctx context.Context, call *memoCall) {
	defer call.cancel()
	select {
	case m.turns <- struct{}{}:
		m.embed(ctx, call.flights)
		<-m.turns
	case <-ctx.Done():
		for _, f := range call.flights {
			f.err = ctx.Err()
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range call.flights {
		if f.err == nil {
			m.keep(f)
		}
	}
	m.forget(call)
	close(call.done)
}

// embed asks for all texts together; where that fails each is asked for alone, as others may
// wait for one that is not at fault.
func (m *Memo) embed(ctx context.Context, flights []*memoFlight) {
	texts := make([]string, len(flights))
	for i, f := range flights {
		texts[i] = f.text
	}
	vectors, err := m.ask(ctx, texts)
	for i, f := range flights {
		switch {
		case err == nil:
			f.vector = vectors[i]
		case len(flights) == 1 || ctx.Err() != nil:
			f.err = err
		default:
			m.embed(ctx, flights[i:i+1])
		}
	}
}

// ask is the other's Embed, checked for what a map of vectors relies on.
func (m *Memo) ask(ctx context.Context, texts []string) ([][]float32, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	vectors, err := m.next.Embed(ctx, texts)
	if err == nil && len(vectors) != len(texts) {
		return nil, &Error{Kind: Malformed, Reason: fmt.Sprintf("%d vectors for %d texts", len(vectors), len(texts))}
	}
	return vectors, err
}

// keep remembers a vector, and forgets others where there is no room. m.mu is held.
func (m *Memo) keep(f *memoFlight) {
	size := entryBytes(f.vector)
	if size > m.maxBytes {
		return
	}
	if _, ok := m.kept[f.key]; ok {
		return // a call that nobody wanted any more, and another after it
	}
	m.kept[f.key] = m.order.PushFront(&memoEntry{f.key, f.vector})
	m.bytes += size
	for m.bytes > m.maxBytes {
		oldest := m.order.Remove(m.order.Back()).(*memoEntry)
		delete(m.kept, oldest.key)
		m.bytes -= entryBytes(oldest.vector)
		m.stats.Evicted++
	}
}

func entryBytes(v []float32) int64 { return int64(4*cap(v) + memoOverhead) }
