package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"headgate/proxy/journal"
)

// Names of the contenders of records.
const (
	journaled = "journal"
	synced    = "journal, sync each"
	slogged   = "slog JSON"
	bare      = "bare write"
	bareSync  = "bare write, fsync each"
)

func writersOf() []int { return []int{1, 8, 64} }

// part is the one account that a measured request is charged to.
func part() journal.Part {
	return journal.Part{Amount: cost, Account: journal.Account{
		Tenant: "acme", Budget: "standard/user-month", Subject: "alice@example.com", Start: 1_772_323_200e9, End: 1_775_001_600e9,
	}}
}

func reservation() journal.Reservation {
	return journal.Reservation{
		Time: time.Now(), RequestID: "req_01J8ZQ3V7N9K2M4P6R8T0W2Y4A", Tenant: "acme", Key: "key_7f3a91", User: "alice@example.com",
		Model: "llama-3.3-70b", InputTokens: 1200, OutputTokens: 800, Cost: cost, Parts: []journal.Part{part()},
	}
}

func usage() journal.Usage {
	now := time.Now()
	return journal.Usage{
		Time: now, Started: now.Add(-3 * time.Second), RequestID: "req_01J8ZQ3V7N9K2M4P6R8T0W2Y4A", Tenant: "acme", Key: "key_7f3a91",
		User: "alice@example.com", Surface: "chat", Model: "llama-3.3-70b", Asked: "llama", Backend: "gpu-1", Input: 1187, Output: 412,
		Cost: cost, Reserved: cost, Latency: 3 * time.Second, TTFT: 200 * time.Millisecond, Status: 200, Outcome: "ok", Stream: true,
		Parts: []journal.Part{part()},
	}
}

// appends measures what a request writes: its reservation and its usage, two records, in the journal, and as many
// bytes by others.
func appends(ctx context.Context, c config, dir string, rep *report) error {
	size := 0
	for _, sync := range []bool{false, true} {
		for _, writers := range writersOf() {
			each, err := journalAppends(ctx, c, filepath.Join(dir, fmt.Sprintf("journal-%v-%d", sync, writers)), sync, writers, rep)
			if err != nil {
				return err
			}
			size = max(size, each)
		}
	}
	rep.recordSize = size
	for _, writers := range writersOf() {
		if err := bareAppends(ctx, c, dir, size, writers, rep); err != nil {
			return err
		}
	}
	return nil
}

// journalAppends returns the bytes of a record, the mean of both kinds.
func journalAppends(ctx context.Context, c config, dir string, sync bool, writers int, rep *report) (size int, err error) {
	l, err := journal.Open(journal.Config{Dir: dir, Node: "n0.a", Incarnation: 1, BootID: "bench", SyncEach: sync, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close(context.WithoutCancel(ctx))) }()
	type desk struct {
		r journal.Reservation
		u journal.Usage
		// turns alternate, so that each operation is one record and both kinds are among them
	}
	desks := make([]desk, writers)
	for i := range desks {
		desks[i] = desk{r: reservation(), u: usage()}
	}
	who := journaled
	if sync {
		who = synced
	}
	s, err := drive(ctx, writers, c.each/2, 0, func(caller, turn int) error {
		d := &desks[caller]
		if turn%2 == 0 {
			return l.Reserve(&d.r)
		}
		d.u.ID = d.r.ID
		return l.Settle(&d.u)
	})
	if err != nil {
		return 0, err
	}
	rep.add(key{who, writers, 0, 0}, s)
	var bytes int64
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			bytes += info.Size()
		}
		return err
	})
	return int(bytes / max(s.ops, 1)), err
}

// bareAppends measures writes of records as long, unformatted, with and without a sync, and the same record by log/slog.
func bareAppends(ctx context.Context, c config, dir string, size, writers int, rep *report) (err error) {
	f, err := os.OpenFile(filepath.Join(dir, fmt.Sprint("bare-", writers)), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	record := make([]byte, size)
	h := slog.New(slog.NewJSONHandler(f, nil))
	u := usage()
	for _, m := range []struct {
		who string
		op  func() error
	}{
		{bare, func() error { _, err := f.Write(record); return err }},
		{bareSync, func() error {
			_, err := f.Write(record)
			return errors.Join(err, f.Sync())
		}},
		{slogged, func() error { logUsage(ctx, h, &u); return nil }},
	} {
		s, err := drive(ctx, writers, c.each/2, 0, func(int, int) error { return m.op() })
		if err != nil {
			return err
		}
		rep.add(key{m.who, writers, 0, 0}, s)
	}
	return nil
}

// logUsage is the usage log of a gateway that has none: a line with the same fields.
func logUsage(ctx context.Context, l *slog.Logger, u *journal.Usage) {
	l.LogAttrs(ctx, slog.LevelInfo, "usage",
		slog.Time("time_started", u.Started), slog.String("request_id", u.RequestID), slog.String("tenant", u.Tenant), slog.String("key", u.Key),
		slog.String("user", u.User), slog.String("surface", u.Surface), slog.String("model", u.Model), slog.String("asked", u.Asked),
		slog.String("backend", u.Backend), slog.Int64("input_tokens", u.Input), slog.Int64("output_tokens", u.Output),
		slog.Int64("cost_nano_usd", u.Cost), slog.Int64("reserved_nano_usd", u.Reserved), slog.Duration("latency", u.Latency),
		slog.Duration("ttft", u.TTFT), slog.Int("status", u.Status), slog.String("outcome", u.Outcome), slog.Bool("stream", u.Stream),
		slog.String("budget", u.Parts[0].Budget), slog.String("subject", u.Parts[0].Subject), slog.Int64("charged_nano_usd", u.Parts[0].Amount),
	)
}
