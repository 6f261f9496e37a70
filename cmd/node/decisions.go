package node

import (
	"context"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"headgate/lease"
	"headgate/limiter"
)

// decisionLog writes down what requests took of their limits, and what they gave back, a line each:
//
//	NANOSECONDS,TENANT,LIMIT,SUBJECT,UNITS,BY
//
// The clock is that of the process that changed the bucket (of windows, which go by the wall clock, that
// reading by this one's), and counts from the machine's start: logs of nodes on one machine can be laid side by side. UNITS are negative where they came back. Each line is
// written at once, so that a process that is killed has written what it did.
type decisionLog struct {
	*lease.Manager
	clock  lease.Clock
	file   *os.File
	log    *slog.Logger
	failed atomic.Bool // that it can't be written was said
}

// openDecisions appends to a file.
func openDecisions(path string, m *lease.Manager, clock lease.Clock, log *slog.Logger) (*decisionLog, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return &decisionLog{Manager: m, clock: clock, file: f, log: log}, nil
}

// Take see lease.Manager.
func (d *decisionLog) Take(ctx context.Context, cs []limiter.Charge, ds []limiter.Decision) int {
	refused := d.Manager.Take(ctx, cs, ds)
	if refused != -1 {
		return refused
	}
	var lines []byte
	for i := range cs {
		if cs[i].At != limiter.NotTaken && cs[i].Cost > 0 {
			at := ds[i].At
			switch cs[i].Limit.Algorithm {
			case limiter.FixedWindow, limiter.SlidingWindow, limiter.SlidingLog:
				if r := d.clock(); r.Wall > 0 { // theirs is the wall clock's
					at = r.Now - (r.Wall - at)
				}
			}
			lines = appendDecision(lines, at, &cs[i], cs[i].Cost, ds[i].By.String())
		}
	}
	d.write(lines)
	return refused
}

// Settle see lease.Manager.
func (d *decisionLog) Settle(cs []limiter.Charge, actual []int64, ds []limiter.Decision) {
	var before [limiter.MaxCharges]limiter.Charge // settling ends the holds
	copy(before[:], cs)
	d.Manager.Settle(cs, actual, ds)
	now := d.clock().Now
	var lines []byte
	for i := range cs {
		if more := max(actual[i], 0) - max(before[i].Cost, 0); more != 0 && before[i].At != limiter.NotTaken {
			lines = appendDecision(lines, now, &cs[i], more, "settle")
		}
	}
	d.write(lines)
}

func appendDecision(b []byte, at int64, c *limiter.Charge, units int64, by string) []byte {
	b = append(strconv.AppendInt(b, at, 10), ',')
	for _, name := range [...]string{c.Key.Tenant, c.Key.Limit, c.Key.Subject} {
		if strings.ContainsAny(name, "\",\r\n") { // a user's name may hold anything
			name = strconv.Quote(name)
		}
		b = append(append(b, name...), ',')
	}
	b = append(strconv.AppendInt(b, units, 10), ',')
	return append(append(b, by...), '\n')
}

// close ends the log, once nothing is decided any more.
func (d *decisionLog) close() error {
	if d == nil {
		return nil
	}
	return d.file.Close()
}

func (d *decisionLog) write(lines []byte) {
	if len(lines) == 0 {
		return
	}
	if _, err := d.file.Write(lines); err != nil && !d.failed.Swap(true) {
		d.log.Error("the decision log can't be written", "error", err)
	}
}
