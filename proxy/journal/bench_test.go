package journal

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"
)

// benchLog is a Log on the machine's disk.
func benchLog(tb testing.TB, change func(*Config)) *Log {
	c := Config{Dir: tb.TempDir(), Node: "a", Incarnation: 1, BootID: "b", Logger: quiet(), MaxBytes: 4 << 30}
	if change != nil {
		change(&c)
	}
	l, err := Open(c)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := l.Close(context.Background()); err != nil {
			tb.Error(err)
		}
	})
	return l
}

func benchParts() []Part {
	return []Part{
		{Account{"acme", "standard/org-month", "acme", 1772323200e9, 1775001600e9}, 2_000_000},
		{Account{"acme", "standard/user-day", "alice@example.com", 1772323200e9, 1772409600e9}, 2_000_000},
	}
}

func benchReservation() *Reservation {
	return &Reservation{
		Time: noon, RequestID: "req_01J8ZQ3V7N9K2M4P6R8T0W2Y4A", Tenant: "acme", Key: "key_7f3a91", User: "alice@example.com",
		Model: "llama-3.3-70b", InputTokens: 1200, OutputTokens: 800, Cost: 1_500_000, Parts: benchParts(),
	}
}

func benchUsage() *Usage {
	return &Usage{
		Time: noon.Add(3 * time.Second), Started: noon, RequestID: "req_01J8ZQ3V7N9K2M4P6R8T0W2Y4A", Tenant: "acme", Key: "key_7f3a91",
		User: "alice@example.com", Surface: "chat", Model: "llama-3.3-70b", Asked: "llama", Backend: "gpu-1", Input: 1187, Output: 412,
		Cost: 1_100_000, Reserved: 1_500_000, Latency: 3 * time.Second, TTFT: 200 * time.Millisecond, Status: 200, Outcome: "ok", Stream: true, Parts: benchParts(),
	}
}

// BenchmarkAppend is one reservation and its settling, each a record of some 200 to 300
// bytes: two operations a turn.
func BenchmarkAppend(b *testing.B) {
	for _, procs := range []int{0, 16} {
		b.Run(fmt.Sprintf("waiting=%d", procs), func(b *testing.B) {
			l := benchLog(b, nil)
			b.ReportAllocs()
			b.ResetTimer()
			turn := func(r *Reservation, u *Usage) {
				if err := l.Reserve(r); err != nil {
					b.Error(err)
				}
				u.ID = r.ID
				if err := l.Settle(u); err != nil {
					b.Error(err)
				}
			}
			if procs == 0 {
				for r, u := benchReservation(), benchUsage(); b.Loop(); {
					turn(r, u)
				}
				return
			}
			b.SetParallelism(procs)
			b.RunParallel(func(pb *testing.PB) {
				for r, u := benchReservation(), benchUsage(); pb.Next(); {
					turn(r, u)
				}
			})
		})
	}
}

// BenchmarkExport is one record read, and what else an export does with it.
func BenchmarkExport(b *testing.B) {
	const records = 200_000
	l := benchLog(b, nil)
	for i := range records {
		u := benchUsage()
		u.Time = noon.Add(time.Duration(i) * 10 * time.Millisecond)
		u.Parts, u.User = nil, fmt.Sprintf("user-%d", i%1000)
		if err := l.Settle(u); err != nil {
			b.Fatal(err)
		}
	}
	read := func(b *testing.B, fn func(*Usage) error) {
		n := 0
		for b.Loop() {
			if n == 0 {
				n = records
				if err := l.Read(b.Context(), Query{}, fn); err != nil {
					b.Fatal(err)
				}
			}
			n--
		}
	}
	b.Run("read", func(b *testing.B) { read(b, func(*Usage) error { return nil }) })
	for _, format := range []string{"csv", "json"} {
		b.Run(format, func(b *testing.B) {
			e, err := NewEncoder(io.Discard, format, nil)
			if err != nil {
				b.Fatal(err)
			}
			read(b, e.Usage)
		})
	}
	b.Run("group", func(b *testing.B) {
		g, err := NewGroups([]string{"tenant", "user", "day"}, nil)
		if err != nil {
			b.Fatal(err)
		}
		read(b, g.Add)
	})
}
