package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"headgate/proxy/journal"
)

// readFlag is what this program asks of itself, so that an export's memory is that of a process which does nothing
// else.
const readFlag = "read"

// What the exported requests are of.
const (
	exportTenants = 20
	exportUsers   = 1000
	exportModels  = 5
	exportDays    = 30
)

// exported is how one export went.
type exported struct {
	By      string
	Records int64
	Lines   int64 // written, without the head
	Seconds float64
	Peak    int64 // bytes of memory resident at most
}

// export fills a usage log and has it read back, request by request and grouped.
func export(ctx context.Context, c config, dir string, rep *report) error {
	began := time.Now()
	if err := fill(ctx, dir, c.records); err != nil {
		return err
	}
	rep.filled = time.Since(began)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for _, by := range []string{"", "tenant,model,day"} {
		fmt.Fprintf(c.log, "export by %q\n", by)
		var out, errs bytes.Buffer
		child := exec.CommandContext(ctx, self, "-"+readFlag, dir, "-by", by)
		child.Stdout, child.Stderr = &out, &errs
		if err := child.Run(); err != nil {
			return fmt.Errorf("%w: %s", err, bytes.TrimSpace(errs.Bytes()))
		}
		var e exported
		if err := json.Unmarshal(out.Bytes(), &e); err != nil {
			return fmt.Errorf("what was said of an export: %w", err)
		}
		if e.Records != int64(c.records) {
			return fmt.Errorf("%d records were read of %d", e.Records, c.records)
		}
		rep.exports = append(rep.exports, e)
	}
	return nil
}

// fill reserves and records so many requests of a month, in the order in which they ended.
func fill(ctx context.Context, dir string, records int) (err error) {
	l, err := journal.Open(journal.Config{Dir: dir, Node: "n0.a", Incarnation: 1, BootID: "bench", MaxBytes: 1 << 40, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close(context.WithoutCancel(ctx))) }()
	first := time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, -exportDays)
	step := exportDays * 24 * time.Hour / time.Duration(records)
	const writers = 2
	errs := make([]error, writers)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			r, u := reservation(), usage()
			for i := w; i < records && errs[w] == nil && ctx.Err() == nil; i += writers {
				u.Time = first.Add(time.Duration(i) * step)
				u.Started = u.Time.Add(-u.Latency)
				u.RequestID = "req_01J8ZQ3V7N9K2M4P" + strconv.FormatInt(int64(i)+1<<40, 16)
				u.Tenant, u.User = "tenant-"+strconv.Itoa(i%exportTenants), "user-"+strconv.Itoa(i*7%exportUsers)+"@example.com"
				u.Model = "model-" + strconv.Itoa(i/3%exportModels)
				u.Input, u.Output, u.Cost = int64(500+i%1500), int64(i%800), int64(1_000_000+i%1_000_000)
				r.Time, r.RequestID, r.Tenant, r.User, r.Model, r.Cost = u.Started, u.RequestID, u.Tenant, u.User, u.Model, u.Cost
				if errs[w] = l.Reserve(&r); errs[w] == nil {
					u.ID = r.ID
					errs[w] = l.Settle(&u)
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(append(errs, ctx.Err())...)
}

// readBack is the export, as CSV to where nothing is kept.
func readBack(ctx context.Context, dir, by string, w io.Writer) error {
	out, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	count := &lines{w: out}
	e := exported{By: by}
	began := time.Now()
	if err := errors.Join(write(ctx, dir, by, count, &e), out.Close()); err != nil {
		return err
	}
	e.Seconds, e.Lines = time.Since(began).Seconds(), count.n-1
	if e.Peak, err = peak(); err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(e)
}

func write(ctx context.Context, dir, by string, w io.Writer, e *exported) error {
	quiet := slog.New(slog.DiscardHandler)
	if by == "" {
		enc, err := journal.NewEncoder(w, "csv", nil)
		if err != nil {
			return err
		}
		err = journal.ReadDir(ctx, dir, quiet, journal.Query{}, func(u *journal.Usage) error { e.Records++; return enc.Usage(u) })
		return errors.Join(err, enc.Flush())
	}
	fields := strings.Split(by, ",")
	g, err := journal.NewGroups(fields, nil)
	if err != nil {
		return err
	}
	if err := journal.ReadDir(ctx, dir, quiet, journal.Query{}, func(u *journal.Usage) error { e.Records++; return g.Add(u) }); err != nil {
		return err
	}
	enc, err := journal.NewEncoder(w, "csv", fields)
	if err != nil {
		return err
	}
	rows := g.Rows()
	for i := range rows {
		if err := enc.Row(&rows[i]); err != nil {
			return err
		}
	}
	return enc.Flush()
}

// lines counts them on their way.
type lines struct {
	w io.Writer
	n int64
}

func (l *lines) Write(p []byte) (int, error) {
	l.n += int64(bytes.Count(p, []byte{'\n'}))
	return l.w.Write(p)
}

// peak is the most memory that this process had resident, in bytes; 0: not known here.
func peak() (int64, error) {
	b, err := os.ReadFile(filepath.Join("/proc", "self", "status"))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return kb << 10, err
		}
	}
	return 0, nil
}
