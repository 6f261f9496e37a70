package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headgate/proxy/admin"
)

// switches throws a kill switch and revokes a key in every round, each time at another node.
func (b *bench) switches(ctx context.Context) error {
	var key admin.CreatedKey
	if err := b.ask(ctx, b.nodes[0], http.MethodPost, "keys", admin.NewKey{Tenant: killTenant}, &key); err != nil {
		return err
	}
	for round := 1; round <= b.cfg.Rounds; round++ {
		told := b.nodes[round%len(b.nodes)]
		if err := b.killSwitch(ctx, round, told, key.Key); err != nil {
			return err
		}
		if err := b.revocation(ctx, round, told); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) killSwitch(ctx context.Context, round int, told *node, key string) error {
	const path = "kill/tenant/" + killTenant
	w, err := b.refused(ctx, key, http.StatusForbidden, func() error {
		return b.ask(ctx, told, http.MethodPut, path, map[string]string{"reason": "benchmark"}, nil)
	})
	if err != nil {
		return fmt.Errorf("kill switch: %w", err)
	}
	b.rep.took(killAccepted, round, w.last.Sub(w.accepted))
	b.rep.took(killSent, round, w.last.Sub(w.sent))
	b.progress("round %d: killed everywhere %v after it was sent", round, w.last.Sub(w.sent).Round(time.Microsecond))
	return b.ask(ctx, told, http.MethodDelete, path, nil, nil)
}

func (b *bench) revocation(ctx context.Context, round int, told *node) error {
	var key admin.CreatedKey
	if err := b.ask(ctx, told, http.MethodPost, "keys", admin.NewKey{Tenant: killTenant}, &key); err != nil {
		return err
	}
	created := time.Now()
	w, err := b.refused(ctx, key.Key, http.StatusUnauthorized, func() error {
		return b.ask(ctx, told, http.MethodDelete, "keys/"+url.PathEscape(key.ID), nil, nil)
	})
	if err != nil {
		return fmt.Errorf("key revocation: %w", err)
	}
	b.rep.took(keyCreated, round, w.admitted.Sub(created))
	b.rep.took(revokeAccepted, round, w.last.Sub(w.accepted))
	b.rep.took(revokeSent, round, w.last.Sub(w.sent))
	b.progress("round %d: revoked everywhere %v after it was sent", round, w.last.Sub(w.sent).Round(time.Microsecond))
	return nil
}

// spreading is when a change was made and when it had reached every front door.
type spreading struct {
	admitted       time.Time // every node had let the key in
	sent, accepted time.Time // of the change
	last           time.Time // the last node had refused
}

// refused sends requests with a key to every node until each has let one in, then has the change
// made, and goes on until each has refused one with the status.
func (b *bench) refused(ctx context.Context, key string, status int, change func() error) (spreading, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	admitted, refused := make([]time.Time, len(b.nodes)), make([]time.Time, len(b.nodes))
	errs := make([]error, len(b.nodes))
	var in, out sync.WaitGroup
	for i, n := range b.nodes {
		in.Add(1)
		out.Go(func() {
			admitted[i], errs[i] = b.until(ctx, n, key, http.StatusOK)
			in.Done()
			if errs[i] == nil {
				refused[i], errs[i] = b.until(ctx, n, key, status)
			}
		})
	}
	in.Wait()
	w := spreading{admitted: slices.MaxFunc(admitted, time.Time.Compare), sent: time.Now()}
	err := change()
	w.accepted = time.Now()
	if err != nil {
		cancel()
	}
	out.Wait()
	w.last = slices.MaxFunc(refused, time.Time.Compare)
	return w, errors.Join(append(errs, err)...)
}

// until sends chats to a node until one is answered with the status, and says when that was.
func (b *bench) until(ctx context.Context, n *node, key string, status int) (at time.Time, err error) {
	k := int64(0)
	err = poll(ctx, pollEvery, waitBound, func(ctx context.Context) (bool, error) {
		k++
		got, answer, err := b.do(ctx, http.MethodPost, "http://"+n.front+"/v1/chat/completions", key, chat(k))
		if err == nil && got != status {
			err = fmt.Errorf("status %d, want %d: %.200s", got, status, answer)
		}
		at = time.Now()
		return err == nil, err
	})
	if err != nil {
		err = fmt.Errorf("%s: %w", n.name, err)
	}
	return at, err
}

// changes measures changes through the admin API, at the leader and at another node.
func (b *bench) changes(ctx context.Context) error {
	for repeat := 1; repeat <= b.cfg.Repeats; repeat++ {
		leader, err := b.whole(ctx)
		if err != nil {
			return err
		}
		followers := b.others(leader)
		for _, at := range [...]struct {
			name string
			node *node
		}{{"the leader", leader}, {"a follower", followers[repeat%len(followers)]}} {
			for _, writers := range b.cfg.Writers {
				if err := b.write(ctx, repeat, at.name, at.node, writers); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// write has so many writers make one change after another for a while.
func (b *bench) write(ctx context.Context, repeat int, where string, n *node, writers int) error {
	took := make([][]float64, writers)
	var failed atomic.Int64
	var ready, wg sync.WaitGroup
	ready.Add(writers)
	began := make(chan time.Time)
	for i := range writers {
		wg.Go(func() {
			err := b.change(ctx, n) // opens the connection
			ready.Done()
			start := <-began
			for err == nil && ctx.Err() == nil && time.Since(start) < b.cfg.Each {
				sent := time.Now()
				if err = b.change(ctx, n); err == nil {
					took[i] = append(took[i], float64(time.Since(sent))/float64(time.Millisecond))
				}
			}
			if err != nil {
				failed.Add(1)
			}
		})
	}
	ready.Wait()
	start := time.Now()
	for range writers {
		began <- start
	}
	wg.Wait()
	elapsed := time.Since(start)
	if err := ctx.Err(); err != nil {
		return err
	}
	if f := failed.Load(); f > 0 {
		b.rep.note("%d of %d writers at %s ended with an error", f, writers, where)
	}
	b.recordWrites(repeat, where, writers, slices.Sorted(slices.Values(slices.Concat(took...))), elapsed)
	return nil
}

func (b *bench) recordWrites(repeat int, where string, writers int, sorted []float64, elapsed time.Duration) {
	if len(sorted) == 0 {
		return
	}
	name := fmt.Sprintf("changes at %s, %d writers: ", where, writers)
	p50, p99, rate := nearestRank(sorted, 0.5), nearestRank(sorted, 0.99), float64(len(sorted))/elapsed.Seconds()
	b.rep.add(name+"p50", repeat, p50, "ms")
	b.rep.add(name+"p99", repeat, p99, "ms")
	b.rep.add(name+"accepted", repeat, rate, "/s")
	b.progress("%sp50 %.2f ms, p99 %.2f ms, %.0f/s", name, p50, p99, rate)
}
