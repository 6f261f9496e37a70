package cluster

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"headgate/cluster/ledger"
)

func TestKeepDecides(t *testing.T) {
	v := with(7, "a", "b")
	for _, tc := range []struct {
		name        string
		view        *ledger.View
		who         string
		incarnation uint64
		epoch       uint64
		want        bool
		reason      string
	}{
		{"a member at the view", v, "a", 1, 7, true, ""},
		{"no view yet", nil, "a", 1, 0, false, ReasonNotMember},
		{"a stranger", v, "c", 1, 7, false, ReasonNotMember},
		{"another incarnation", v, "a", 2, 7, false, ReasonNotMember},
		{"one that has not stepped", v, "a", 1, 6, false, ReasonEpoch},
		{"one that is ahead", v, "a", 1, 8, false, ReasonEpoch},
	} {
		if got, reason := Keep(tc.view, tc.who, tc.incarnation, tc.epoch); got != tc.want || reason != tc.reason {
			t.Errorf("%s: %v %q, want %v %q", tc.name, got, reason, tc.want, tc.reason)
		}
	}
}

// barriers is a leader whose barriers take some time; it notes when they began.
type barriers struct {
	mu    sync.Mutex
	takes time.Duration
	err   error
	began []time.Time
	view  atomic.Pointer[ledger.View]
}

func (b *barriers) barrier(ctx context.Context) error {
	b.mu.Lock()
	b.began = append(b.began, time.Now())
	takes, err := b.takes, b.err
	b.mu.Unlock()
	select {
	case <-time.After(takes):
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *barriers) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.began)
}

// inKeeper runs a test in a bubble, with a keeper that is closed and leaves nothing behind.
func inKeeper(t *testing.T, takes time.Duration, test func(t *testing.T, k *Keeper, b *barriers)) {
	t.Helper()
	defer goleak.VerifyNone(t)
	synctest.Test(t, func(t *testing.T) {
		b := &barriers{takes: takes}
		b.view.Store(with(7, "a", "b"))
		k := NewKeeper(b.barrier, b.view.Load)
		test(t, k, b)
		k.Close()
		if granted, reason := k.Keep(t.Context(), "a", 1, 7); granted || reason != ReasonNoBarrier {
			t.Errorf("a closed keeper says %v %q", granted, reason)
		}
	})
}

func TestKeeperBeginsAtOnce(t *testing.T) {
	inKeeper(t, 3*time.Millisecond, func(t *testing.T, k *Keeper, b *barriers) {
		time.Sleep(time.Hour)
		start := time.Now()
		if granted, reason := k.Keep(t.Context(), "a", 1, 7); !granted {
			t.Errorf("refused: %s", reason)
		}
		if took := time.Since(start); took != 3*time.Millisecond {
			t.Errorf("took %v, want the barrier's 3 ms", took)
		}
		if granted, reason := k.Keep(t.Context(), "a", 1, 6); granted || reason != ReasonEpoch {
			t.Errorf("an old epoch: %v %q", granted, reason)
		}
		if took := time.Since(start); took != 23*time.Millisecond {
			t.Errorf("the second ended after %v, want 20 ms after the first began, and 3 ms", took)
		}
	})
}

// Many requests over a second share barriers, and each is answered only by one that
// began after it came.
func TestKeeperSharesBarriers(t *testing.T) {
	for _, takes := range []time.Duration{time.Millisecond, 70 * time.Millisecond} {
		inKeeper(t, takes, func(t *testing.T, k *Keeper, b *barriers) {
			var asking sync.WaitGroup
			for i := range 1000 {
				asking.Go(func() {
					time.Sleep(time.Duration(i) * time.Millisecond)
					came := time.Now()
					if granted, reason := k.Keep(t.Context(), "b", 1, 7); !granted {
						t.Errorf("refused: %s", reason)
					}
					took := time.Since(came)
					if took < takes || took > barrierEvery+takes {
						t.Errorf("answered after %v, want a whole barrier of %v within 20 ms", took, takes)
					}
				})
			}
			asking.Wait()
			if n := b.count(); n < 45 || n > 51 {
				t.Errorf("%d barriers in a second, want one in 20 ms", n)
			}
		})
	}
}

// What the view is after the barrier decides, not what it was when the request came.
func TestKeeperComparesAfterTheBarrier(t *testing.T) {
	inKeeper(t, 10*time.Millisecond, func(t *testing.T, k *Keeper, b *barriers) {
		go func() {
			time.Sleep(5 * time.Millisecond)
			b.view.Store(with(8, "b"))
		}()
		if granted, reason := k.Keep(t.Context(), "a", 1, 7); granted || reason != ReasonNotMember {
			t.Errorf("%v %q, want not_member", granted, reason)
		}
	})
}

func TestKeeperSaysWhenNoBarrierEnds(t *testing.T) {
	inKeeper(t, time.Millisecond, func(t *testing.T, k *Keeper, b *barriers) {
		b.mu.Lock()
		b.err = errors.New("leadership lost")
		b.mu.Unlock()
		if granted, reason := k.Keep(t.Context(), "a", 1, 7); granted || reason != ReasonNoBarrier {
			t.Errorf("after a failed barrier: %v %q", granted, reason)
		}
		b.mu.Lock()
		b.takes, b.err = time.Hour, nil
		b.mu.Unlock()
		start := time.Now()
		if granted, reason := k.Keep(t.Context(), "a", 1, 7); granted || reason != ReasonNoBarrier {
			t.Errorf("after a barrier that does not end: %v %q", granted, reason)
		}
		if took := time.Since(start); took > barrierEvery+barrierTimeout {
			t.Errorf("gave up after %v", took)
		}
	})
}

func TestKeeperLetsGo(t *testing.T) {
	inKeeper(t, 100*time.Millisecond, func(t *testing.T, k *Keeper, b *barriers) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		var other sync.WaitGroup
		other.Go(func() {
			if granted, reason := k.Keep(t.Context(), "b", 1, 7); !granted {
				t.Errorf("one that went took another's barrier with it: %s", reason)
			}
		})
		start := time.Now()
		if granted, _ := k.Keep(ctx, "a", 1, 7); granted || time.Since(start) != 30*time.Millisecond {
			t.Errorf("granted = %v after %v, want a refusal when the context ends", granted, time.Since(start))
		}
		other.Wait()
	})
}

// With a ledger that stands still, what is under way and who waits are bounded, and Close ends all of it.
func TestKeeperIsBounded(t *testing.T) {
	inKeeper(t, time.Hour, func(t *testing.T, k *Keeper, b *barriers) {
		var asking sync.WaitGroup
		var refused atomic.Int32
		ask := func() {
			if granted, reason := k.Keep(t.Context(), "a", 1, 7); granted || reason != ReasonNoBarrier {
				t.Errorf("%v %q, want no_barrier", granted, reason)
			}
			refused.Add(1)
		}
		for range maxBarriers + 5 {
			asking.Go(ask)
			time.Sleep(barrierEvery)
		}
		if n := b.count(); n != maxBarriers {
			t.Errorf("%d barriers are under way, want %d", n, maxBarriers)
		}
		for range maxKeepWaiting {
			asking.Go(ask)
		}
		synctest.Wait()
		if n := refused.Load(); n != maxBarriers+5 {
			t.Errorf("%d were refused at once, want those beyond %d", n, maxKeepWaiting)
		}
		k.Close()
		asking.Wait()
	})
}
