package main

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// sample is one measurement.
type sample struct {
	ops      int64
	took     time.Duration
	p50, p99 time.Duration // of an operation
	draws    int64         // of blocks, where there are any
	cpu      time.Duration // of this process
}

func (s *sample) perSecond() float64 { return float64(s.ops) / s.took.Seconds() }

// longest is what a histogram tells apart from longer.
const longest = int64(10 * time.Second)

// drive has so many callers operate one after the other for a while, or until one fails. op is told its caller
// and its turn. pace is how many operations a second all callers begin together; 0: as many as they can.
func drive(ctx context.Context, callers int, length time.Duration, pace float64, op func(caller, turn int) error) (sample, error) {
	var s sample
	var mu sync.Mutex
	var failed error
	var halted atomic.Bool
	all := hdrhistogram.New(1, longest, 2)
	used, began := cpu(), time.Now()
	ends := began.Add(length)
	var wg sync.WaitGroup
	for caller := range callers {
		wg.Go(func() {
			h := hdrhistogram.New(1, longest, 2)
			err := loop(ctx, caller, &halted, ends, time.Duration(pause(pace, callers)), h, op)
			if err != nil {
				halted.Store(true)
			}
			mu.Lock()
			defer mu.Unlock()
			all.Merge(h)
			failed = errors.Join(failed, err)
		})
	}
	wg.Wait()
	s.took, s.ops, s.cpu = time.Since(began), all.TotalCount(), cpu()-used
	s.p50, s.p99 = time.Duration(all.ValueAtQuantile(50)), time.Duration(all.ValueAtQuantile(99))
	return s, failed
}

// pause is the time between two operations of one of so many callers, in ns.
func pause(pace float64, callers int) float64 {
	if pace == 0 {
		return 0
	}
	return float64(callers) / pace * float64(time.Second)
}

func loop(ctx context.Context, caller int, halted *atomic.Bool, ends time.Time, every time.Duration, h *hdrhistogram.Histogram, op func(caller, turn int) error) error {
	var tick *time.Ticker
	if every > 0 {
		tick = time.NewTicker(every)
		defer tick.Stop()
	}
	start := time.Now()
	for turn := 0; start.Before(ends) && !halted.Load(); turn++ {
		if tick != nil {
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
			start = time.Now()
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := op(caller, turn); err != nil {
			return err
		}
		now := time.Now()
		if err := h.RecordValue(min(max(int64(now.Sub(start)), 1), longest)); err != nil {
			return err
		}
		start = now
	}
	return nil
}
