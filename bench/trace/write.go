package trace

import (
	"encoding/csv"
	"io"
	"strconv"
)

// Write writes our own format, with times in seconds from the first request; reading it gives the same requests, but
// for their blocks and sessions.
func (t *Trace) Write(w io.Writer) error {
	out := csv.NewWriter(w)
	head := []string{"time", "tenant", "input_tokens", "output_tokens"}
	if t.Tenants == nil {
		head = []string{"time", "input_tokens", "output_tokens"}
	}
	if err := out.Write(head); err != nil {
		return err
	}
	line := make([]string, 0, len(head))
	for i := range t.Requests {
		r := &t.Requests[i]
		line = append(line[:0], strconv.FormatFloat(r.At.Seconds(), 'f', -1, 64))
		if t.Tenants != nil {
			line = append(line, t.Tenants[r.Tenant])
		}
		line = append(line, strconv.FormatInt(r.Input, 10), strconv.FormatInt(r.Output, 10))
		if err := out.Write(line); err != nil {
			return err
		}
	}
	out.Flush()
	return out.Error()
}
