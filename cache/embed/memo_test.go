package embed

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
)

// gate is an embedder whose calls wait until they are let go, if there is something to wait for.
type gate struct {
	release chan struct{} // nil: nothing to wait for
	fail    func(text string) error

	mu            sync.Mutex
	version       string
	dim           int // 0: 3
	calls         [][]string
	running, most int
	cancelled     int
}

func (g *gate) Version() string { return "gate " + g.version }
func (g *gate) Dim() int {
	if g.dim != 0 {
		return g.dim
	}
	return 3
}

func (g *gate) Embed(ctx context.Context, texts []string) ([][]float32, error) {
	g.mu.Lock()
	g.calls = append(g.calls, slices.Clone(texts))
	g.running++
	g.most = max(g.most, g.running)
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.running--
	}()
	if g.release != nil {
		select {
		case <-g.release:
		case <-ctx.Done():
			g.mu.Lock()
			defer g.mu.Unlock()
			g.cancelled++
			return nil, ctx.Err()
		}
	}
	vectors := make([][]float32, len(texts))
	for i, text := range texts {
		if g.fail != nil {
			if err := g.fail(text); err != nil {
				return nil, err
			}
		}
		vectors[i] = fakeVector(text)
		for len(vectors[i]) < g.dim {
			vectors[i] = append(vectors[i], 0)
		}
	}
	return vectors, nil
}

func memo(t *testing.T, next Embedder, maxBytes int64) *Memo {
	t.Helper()
	m := NewMemo(next, maxBytes)
	t.Cleanup(m.Close)
	return m
}

func embedOne(ctx context.Context, t *testing.T, m *Memo, text string) {
	t.Helper()
	vectors, err := m.Embed(ctx, []string{text})
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	if !slices.Equal(vectors[0], fakeVector(text)) {
		t.Fatalf("%q: %v", text, vectors[0])
	}
}

func TestMemoRemembers(t *testing.T) {
	g := &gate{}
	m := memo(t, g, 1<<20)
	embedOne(t.Context(), t, m, "a")
	embedOne(t.Context(), t, m, "a")
	vectors, err := m.Embed(t.Context(), []string{"bb", "a", "bb", "ccc"})
	if err != nil {
		t.Fatal(err)
	}
	for i, text := range []string{"bb", "a", "bb", "ccc"} {
		if !slices.Equal(vectors[i], fakeVector(text)) {
			t.Errorf("%q: %v", text, vectors[i])
		}
	}
	if got, want := fmt.Sprint(g.calls), "[[a] [bb ccc]]"; got != want {
		t.Errorf("asked for %s, want %s", got, want)
	}
	g.version = "2" // another model has other vectors
	embedOne(t.Context(), t, m, "a")
	if len(g.calls) != 3 {
		t.Errorf("asked for %v, want the text again for another version", g.calls)
	}
	if s := m.Stats(); s.Hits != 2 || s.Joined != 1 || s.Misses != 4 || s.Entries != 4 || s.Bytes != 4*(12+memoOverhead) {
		t.Errorf("%+v", s)
	}
}

// TestMemoOfAnotherLength: what was kept of a server's old length is not given beside the new.
func TestMemoOfAnotherLength(t *testing.T) {
	g := &gate{}
	m := memo(t, g, 1<<20)
	embedOne(t.Context(), t, m, "a")
	g.dim = 5
	vectors, err := m.Embed(t.Context(), []string{"a", "b"})
	if err != nil || len(vectors[0]) != 5 || len(vectors[1]) != 5 {
		t.Errorf("%v, %v", vectors, err)
	}
}

// TestMemoGivesOneLength: the length changed while a text was under way.
func TestMemoGivesOneLength(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{release: make(chan struct{})}
		m := memo(t, g, 1<<20)
		var callers sync.WaitGroup
		callers.Go(func() { embedOne(t.Context(), t, m, "a") })
		synctest.Wait()
		callers.Go(func() {
			if v, err := m.Embed(t.Context(), []string{"a", "b"}); kindOf(err) != Malformed {
				t.Errorf("%v, %v", v, err)
			}
		})
		synctest.Wait()
		g.release <- struct{}{}
		synctest.Wait()
		g.dim = 5
		close(g.release)
		callers.Wait()
	})
}

func TestMemoIsBounded(t *testing.T) {
	g := &gate{}
	const fit = 10
	m := memo(t, g, fit*(12+memoOverhead)+1)
	for i := range 3 * fit {
		embedOne(t.Context(), t, m, strconv.Itoa(i))
		embedOne(t.Context(), t, m, "0") // is used all the time
	}
	if s := m.Stats(); s.Entries != fit || s.Bytes != fit*(12+memoOverhead) || s.Evicted != 2*fit {
		t.Errorf("%+v, want %d entries", s, fit)
	}
	if len(g.calls) != 3*fit {
		t.Errorf("asked %d times, want %d", len(g.calls), 3*fit)
	}
	none := memo(t, g, 0)
	embedOne(t.Context(), t, none, "a")
	embedOne(t.Context(), t, none, "a")
	if len(g.calls) != 3*fit+2 || none.Stats().Entries != 0 {
		t.Errorf("kept %+v of nothing", none.Stats())
	}
}

func TestTheSameTextIsEmbeddedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{release: make(chan struct{})}
		m := memo(t, g, 1<<20)
		first, leave := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		callers.Go(func() {
			if _, err := m.Embed(first, []string{"a"}); !errors.Is(err, context.Canceled) {
				t.Errorf("who left got %v", err)
			}
		})
		synctest.Wait()
		for range 50 {
			callers.Go(func() { embedOne(t.Context(), t, m, "a") })
		}
		synctest.Wait()
		leave() // the one whose call it was
		synctest.Wait()
		close(g.release)
		callers.Wait()
		if len(g.calls) != 1 || g.cancelled != 0 {
			t.Errorf("asked for %v, cancelled %d", g.calls, g.cancelled)
		}
	})
}

func TestWhatNobodyWantsIsCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{release: make(chan struct{})}
		m := memo(t, g, 1<<20)
		ctx, leave := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		turns := runtime.GOMAXPROCS(0)
		for i := range turns + 3 {
			callers.Go(func() { _, _ = m.Embed(ctx, []string{strconv.Itoa(i)}) })
		}
		synctest.Wait()
		if len(g.calls) != turns {
			t.Errorf("%d calls run, want %d", len(g.calls), turns)
		}
		leave()
		callers.Wait()
		synctest.Wait()
		if g.cancelled != len(g.calls) || len(m.flights) != 0 {
			t.Errorf("%d of %d calls cancelled, %d texts under way", g.cancelled, len(g.calls), len(m.flights))
		}
		close(g.release)
		embedOne(t.Context(), t, m, "0")
	})
}

func TestCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{release: make(chan struct{})}
		m := memo(t, g, 1<<20)
		var callers sync.WaitGroup
		for i := range 100 {
			callers.Go(func() { embedOne(t.Context(), t, m, strconv.Itoa(i)) })
		}
		synctest.Wait()
		callers.Go(func() {
			if _, err := m.Embed(t.Context(), manyTexts(maxMemoFlying)); kindOf(err) != Overloaded {
				t.Errorf("%v, want that it is overloaded", err)
			}
		})
		synctest.Wait()
		close(g.release)
		callers.Wait()
		if g.most != runtime.GOMAXPROCS(0) {
			t.Errorf("%d calls at a time, want %d", g.most, runtime.GOMAXPROCS(0))
		}
	})
}

func manyTexts(n int) []string {
	texts := make([]string, n)
	for i := range texts {
		texts[i] = "text " + strconv.Itoa(i)
	}
	return texts
}

func TestErrorsAreOfTheirTexts(t *testing.T) {
	g := &gate{fail: func(text string) error {
		if strings.HasPrefix(text, "long") {
			return &TooLongError{Tokens: 300, Limit: 256}
		}
		return nil
	}}
	m := memo(t, g, 1<<20)
	_, err := m.Embed(t.Context(), []string{"a", "long", "b"})
	if long, ok := errors.AsType[*TooLongError](err); !ok || long.Index != 1 || long.Tokens != 300 || long.Limit != 256 {
		t.Errorf("%v, want that text 1 is too long", err)
	}
	calls := len(g.calls)
	embedOne(t.Context(), t, m, "a") // was embedded nonetheless
	embedOne(t.Context(), t, m, "b")
	if len(g.calls) != calls {
		t.Errorf("asked again: %v", g.calls[calls:])
	}
	if _, err := m.Embed(t.Context(), []string{"long"}); err == nil || len(g.calls) != calls+1 {
		t.Errorf("an error was kept: %v", err)
	}
}

func TestMemoIsRaceFree(t *testing.T) {
	g := &gate{}
	m := NewMemo(g, 50*(12+memoOverhead))
	var callers sync.WaitGroup
	for c := range 8 {
		callers.Go(func() {
			for i := range 300 {
				ctx, cancel := context.WithCancel(t.Context())
				if (c+i)%5 == 0 {
					cancel()
				}
				_, _ = m.Embed(ctx, []string{strconv.Itoa((c + i) % 80), strconv.Itoa(i % 7)})
				cancel()
			}
		})
	}
	callers.Wait()
	m.Close()
	if s := m.Stats(); s.Bytes > 50*(12+memoOverhead) || s.Entries > 50 || len(m.flights) != 0 {
		t.Errorf("%+v, %d texts under way", s, len(m.flights))
	}
	if _, err := m.Embed(t.Context(), []string{"a"}); kindOf(err) != Unavailable {
		t.Errorf("%v after Close", err)
	}
}
