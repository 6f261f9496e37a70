package main_test

import (
	"encoding/csv"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"headgate/proxy/admin"
	"headgate/proxy/journal"
)

// usageFolder is the usage log of a node that is gone: n requests of a cent and a nano-dollar each, an
// hour apart from the start of 2026-06-01 on.
func usageFolder(t *testing.T, node string, n int) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "usage")
	l, err := journal.Open(journal.Config{Dir: dir, Node: node, Incarnation: 7, BootID: "b", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		at := time.Date(2026, 6, 1, i, 0, 0, 0, time.UTC)
		err := l.Settle(&journal.Usage{
			Time: at, Started: at, RequestID: fmt.Sprint("req_", node, i), Tenant: "acme", Key: "=k", User: `a "b"`, Model: "m", Input: 10, Output: 2, Cost: 10_000_001, Outcome: "ok", Status: 200,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestUsageOfDeadNodes is read from their disks, without a node.
func TestUsageOfDeadNodes(t *testing.T) {
	t.Parallel()
	a, b := usageFolder(t, "gw-1", 48), usageFolder(t, "gw-2", 24)
	before, err := os.ReadDir(a)
	if err != nil {
		t.Fatal(err)
	}
	export := func(args ...string) [][]string {
		t.Helper()
		r := runCLI(t, nil, append([]string{"usage", "export", "--dir", a, "--dir", b}, args...)...)
		rows, err := csv.NewReader(strings.NewReader(r.stdout)).ReadAll()
		if r.code != 0 || err != nil {
			t.Fatalf("%+v %v", r, err)
		}
		return rows
	}
	rows := export()
	if len(rows) != 1+48+24 || !slices.Equal(rows[0], journal.Columns(nil)) {
		t.Fatalf("%d rows, the first %v", len(rows), rows[0])
	}
	if !slices.IsSortedFunc(rows[1:], func(a, b []string) int { return strings.Compare(a[0], b[0]) }) {
		t.Error("they are not in the order of time")
	}
	if row := rows[1]; row[slices.Index(rows[0], "key")] != "'=k" || row[slices.Index(rows[0], "user")] != `a "b"` {
		t.Errorf("%v", row)
	}
	var sum admin.USD
	for _, row := range rows[1:] {
		cost, err := admin.ParseUSD(row[slices.Index(rows[0], "cost_usd")])
		if err != nil {
			t.Fatal(err)
		}
		sum += cost
	}
	if sum != 72*10_000_001 {
		t.Errorf("%s", sum)
	}

	// Midnight in Berlin is at 22:00 UTC.
	days := export("--by", "day,tenant", "--time-zone", "Europe/Berlin", "--from", "2026-06-01T00:00:00Z")
	want := [][]string{{"2026-06-01", "44", "0.440000044"}, {"2026-06-02", "26", "0.260000026"}, {"2026-06-03", "2", "0.020000002"}}
	for i, w := range want {
		row := days[i+1]
		if got := []string{row[0], row[slices.Index(days[0], "requests")], row[slices.Index(days[0], "cost_usd")]}; !slices.Equal(got, w) {
			t.Errorf("%v, want %v", got, w)
		}
	}
	if june := export("--from", "2026-06", "--until", "2026-06-02", "--time-zone", "Europe/Berlin"); len(june) != 1+44 {
		t.Errorf("%d requests in a day", len(june)-1)
	}
	if none := export("--tenant", "other"); len(none) != 1 {
		t.Errorf("%v", none)
	}

	after, err := os.ReadDir(a)
	if err != nil || len(after) != len(before) {
		t.Errorf("the folder has %d files, had %d: %v", len(after), len(before), err)
	}
	r := runCLI(t, nil, "usage", "export", "--dir", a, "--dir", filepath.Join(a, "none"), "--by", "tenant")
	if r.code != 1 || !strings.Contains(r.stdout, "0.480000048") || !strings.Contains(r.stderr, "none") {
		t.Errorf("%+v", r)
	}
	r = runCLI(t, nil, "usage", "export", "--dir", filepath.Dir(a), "--dir", b, "--by", "tenant") // the data folder
	if r.code != 1 || !strings.Contains(r.stdout, "0.240000024") || !strings.Contains(r.stderr, filepath.Dir(a)+" holds no usage log; did you mean "+a+"?") {
		t.Errorf("%+v", r)
	}
	if r = runCLI(t, nil, "usage", "export", "--dir", t.TempDir()); r.code != 1 || !strings.Contains(r.stderr, "holds no usage log)") {
		t.Errorf("%+v", r)
	}
	if hour := export("--last", "1h"); len(hour) != 1 { // long ago, all of it
		t.Errorf("%v", hour)
	}
	if r = runCLI(t, nil, "usage", "export", "--dir", a, "--last", "100000d"); r.code != 0 || strings.Count(r.stdout, "req_") != 48 {
		t.Errorf("%+v", r)
	}
	for args, warned := range map[string]bool{"--tenant acmee": true, "--tenant acmee --json": true, "--tenant acme": false, "--tenant acme --json": false, "--from 2027-01": false} {
		r = runCLI(t, nil, append([]string{"usage", "export", "--dir", a}, strings.Fields(args)...)...)
		if r.code != 0 || strings.Contains(r.stderr, `nothing of tenant "acmee"`) != warned {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if r := runCLI(t, nil, "usage", "export", "--dir", a, "--time-zone", "Mars"); r.code != 2 {
		t.Errorf("%+v", r)
	}
}
