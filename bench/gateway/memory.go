package gateway

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
)

// memory opens Held streams that fall silent after their first token, and records
// how much the target has grown by then.
func (f *fleet) memory(ctx context.Context, rep *Report, t *target, round int) error {
	before, err := residentSet(t.pid)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	n := f.cfg.Held
	results := make(chan error, n)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for i := range n {
		wg.Go(func() { hold(ctx, t, int64(i), results) })
	}
	open := 0
	for range n {
		if err := <-results; err == nil {
			open++
		} else if ctx.Err() != nil {
			return ctx.Err()
		} else if open == 0 {
			rep.note("memory of %s: %v", t.name, err)
		}
	}
	after, err := residentSet(t.pid)
	if err != nil {
		return err
	}
	row := Row{Scenario: "held", Target: t.name, Round: round + 1, Arrivals: int64(n), Good: int64(open)}
	if open > 0 {
		row.Memory = float64(after-before)/float64(open) - chatBytes
	}
	rep.add(row)
	fmt.Fprintf(f.cfg.Log, "round %d %-16s %-9s %.1f KiB each, %d open of %d\n", round+1, row.Scenario, t.name, row.Memory/1024, open, n)
	return nil
}

// hold opens one stream, reports once its first token is there, and keeps it open
// until ctx ends.
func hold(ctx context.Context, t *target, n int64, opened chan<- error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url+chatPath, bytes.NewReader(heldBody(n)))
	if err != nil {
		opened <- err
		return
	}
	req.Header = t.header.Clone()
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.transport.RoundTrip(req)
	if err != nil {
		opened <- err
		return
	}
	defer resp.Body.Close() //nolint:errcheck // cut off on purpose
	buf := make([]byte, 4096)
	for got := 0; got < 2; { // the role and one token
		n, err := resp.Body.Read(buf)
		got += bytes.Count(buf[:n], []byte("\n\n"))
		if resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("status %d: %s", resp.StatusCode, buf[:n])
		}
		if err != nil && got < 2 {
			opened <- err
			return
		}
	}
	opened <- nil
	_, _ = io.Copy(io.Discard, resp.Body) // ends with ctx
}
