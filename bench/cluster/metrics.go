package cluster

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// The node's metrics that are looked at.
const (
	metricLapses  = "headgate_view_lease_lapses_total"
	metricHeld    = "headgate_view_lease_held"
	metricEpoch   = "headgate_view_epoch"
	metricMembers = "headgate_view_members"
	metricWaiting = "headgate_view_partitions_waiting"
)

// maxMetrics bounds the bytes read of a node's metrics, maxMetricLine those of a line.
const (
	maxMetrics    = 8 << 20
	maxMetricLine = 64 << 10
)

// gauges are the values of series without labels, by name.
type gauges map[string]float64

// parseMetrics reads the named series from Prometheus's text format. One that is not there, or
// whose value is no number, is an error; labelled series of these names are passed over.
func parseMetrics(r io.Reader, names ...string) (gauges, error) {
	want := make(map[string]bool, len(names))
	for _, n := range names {
		want[n] = true
	}
	out := gauges{}
	lines := bufio.NewScanner(io.LimitReader(r, maxMetrics))
	lines.Buffer(nil, maxMetricLine)
	for lines.Scan() {
		fields := strings.Fields(lines.Text()) // name, value and perhaps a time
		if len(fields) < 2 || len(fields) > 3 || !want[fields[0]] {
			continue
		}
		v, err := strconv.ParseFloat(fields[1], 64)
		if err != nil {
			return nil, fmt.Errorf("metric %s: %w", fields[0], err)
		}
		out[fields[0]] = v
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	for _, n := range names {
		if _, ok := out[n]; !ok {
			return nil, fmt.Errorf("metric %s is not there: is the node of another version?", n)
		}
	}
	return out, nil
}

// settled says that a node holds its lease in a view newer than before and waits for nothing.
func (g gauges) settled(before float64) bool {
	return g[metricEpoch] > before && g[metricHeld] == 1 && g[metricWaiting] == 0
}
