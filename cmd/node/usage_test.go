package node

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"headgate/cluster"
	"headgate/proxy/admin"
	"headgate/proxy/journal"
)

var usageEpoch = time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)

// usageOf is a source that has these records, and then fails, if err is not nil.
func usageOf(node string, list []journal.Usage, err error) usageSource {
	read := func(ctx context.Context, q journal.Query, fn func(*journal.Usage) error) error {
		var u journal.Usage
		for _, u = range list { // one place for all, as a log may have
			if (q.Tenant == "" || q.Tenant == u.Tenant) && !u.Time.Before(q.From) {
				if err := fn(&u); err != nil {
					return err
				}
			}
		}
		return errors.Join(ctx.Err(), err)
	}
	return usageSource{node: node, read: read, group: func(ctx context.Context, q journal.Query, g *journal.Groups) error { return read(ctx, q, g.Add) }}
}

// used are n requests of a node, a second apart or at the same time.
func used(node string, n int) []journal.Usage {
	out := make([]journal.Usage, n)
	for i := range out {
		out[i] = journal.Usage{
			Node: node, Incarnation: 7, Time: usageEpoch.Add(time.Duration(i/2) * time.Second), RequestID: fmt.Sprint(node, i), Tenant: "acme", Key: "k", Model: "m",
			Input: 10, Output: 3, Cost: 1_000_000_001, Outcome: "ok", Status: 200, Reserved: int64(i), Parts: []journal.Part{{Amount: int64(i)}},
		}
	}
	return out
}

// TestUsageIsMerged: all that every source has, once, each source in its order, the earliest
// first; what came before a source failed counts, and it is named.
func TestUsageIsMerged(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var sources []usageSource
		var want []string
		var broken []string
		for i := range rapid.IntRange(0, 5).Draw(t, "nodes") {
			node := fmt.Sprintf("gw-%d", i)
			list := used(node, rapid.SampledFrom([]int{0, 1, 7, usageBatch, usageBatch + 1, 4 * usageBatch}).Draw(t, "records"))
			var err error
			if rapid.IntRange(0, 3).Draw(t, "fails") == 0 {
				err = errors.New("broken")
				broken = append(broken, node)
			}
			sources = append(sources, usageOf(node, list, err))
			for _, u := range list {
				want = append(want, u.RequestID)
			}
		}
		var got []string
		var last time.Time
		missing, err := mergeUsage(context.Background(), sources, journal.Query{}, true, func(u *journal.Usage) error {
			if u.Time.Before(last) {
				t.Errorf("%s came after %s", u.Time, last)
			}
			if fmt.Sprint(u.Node, u.Reserved) != u.RequestID || u.Parts != nil {
				t.Errorf("%s is mixed up with another: %+v", u.RequestID, u)
			}
			last = u.Time
			got = append(got, u.RequestID)
			return nil
		})
		slices.Sort(want)
		slices.Sort(got)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("%d of %d records: %v", len(got), len(want), err)
		}
		var named []string
		for _, m := range missing {
			named = append(named, m.Node)
		}
		slices.Sort(named)
		if !slices.Equal(named, broken) {
			t.Fatalf("missing %v, want %v", named, broken)
		}

		_, err = mergeUsage(context.Background(), sources, journal.Query{}, false, func(*journal.Usage) error { return nil })
		var e *admin.Error
		if failed := len(broken) > 0; failed != (err != nil) || failed && (!errors.As(err, &e) || e.Code != admin.Incomplete) {
			t.Fatalf("without a part: %v", err)
		}
	})
}

// TestUsageEndsEarly: when the reader of an export is gone every source is left, also one
// that hangs.
func TestUsageEndsEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := usageSource{node: "gw-9", read: func(ctx context.Context, _ journal.Query, _ func(*journal.Usage) error) error {
			<-ctx.Done()
			return ctx.Err()
		}}
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			synctest.Wait() // all that can be read was
			cancel()
		}()
		n := 0
		missing, err := mergeUsage(ctx, []usageSource{usageOf("gw-1", used("gw-1", 10*usageBatch), nil), hangs}, journal.Query{}, true, func(*journal.Usage) error { n++; return nil })
		if !errors.Is(err, context.Canceled) || missing != nil || n != 0 {
			t.Errorf("%d records, missing %v: %v", n, missing, err)
		}

		gone := errors.New("the reader is gone")
		_, err = mergeUsage(t.Context(), []usageSource{usageOf("gw-1", used("gw-1", 10*usageBatch), nil), usageOf("gw-2", used("gw-2", 10*usageBatch), nil)}, journal.Query{}, true,
			func(*journal.Usage) error { n++; return gone })
		if !errors.Is(err, gone) || n != 1 {
			t.Errorf("%d records: %v", n, err)
		}
	})
}

func TestUsageSources(t *testing.T) {
	var dialled []string
	sources := usageSources([]cluster.MemberStatus{
		{Name: "gw-1", Self: true},
		{Name: "gw-2", Address: "10.0.0.2:7946", Gossip: "alive"},
		{Name: "gw-3", Gossip: "failed", Err: errors.New("does not answer")},
		{Name: "gw-4", Gossip: "left"},
		{Name: "gw-5", Address: "x"},
	}, &journal.Log{}, func(address string) (usageSource, error) {
		dialled = append(dialled, address)
		if address == "x" {
			return usageSource{}, errors.New("no such address")
		}
		return usageOf("", nil, nil), nil
	})
	var problems []string
	for _, s := range sources {
		problems = append(problems, s.node+": "+s.problem)
		if (s.problem == "") != (s.read != nil && s.group != nil) {
			t.Errorf("%s has a problem or can be read: %q", s.node, s.problem)
		}
	}
	want := []string{"gw-1: ", "gw-2: ", "gw-3: does not answer; its records are on its disk", "gw-4: it has left; its records are on its disk", "gw-5: no such address"}
	if !slices.Equal(problems, want) || !slices.Equal(dialled, []string{"10.0.0.2:7946", "x"}) {
		t.Errorf("%q, dialled %v", problems, dialled)
	}
}

// exported reads what an export wrote.
func exported(t *testing.T, text string) (rows []map[string]string) {
	t.Helper()
	lines, err := csv.NewReader(strings.NewReader(text)).ReadAll()
	if err != nil || len(lines) == 0 {
		t.Fatalf("%v in %q", err, text)
	}
	for _, line := range lines[1:] {
		row := map[string]string{}
		for i, name := range lines[0] {
			row[name] = line[i]
		}
		rows = append(rows, row)
	}
	return rows
}

// TestUsageIsSummed exactly, over all nodes, and the same whichever way.
func TestUsageIsSummed(t *testing.T) {
	others := used("gw-2", 3)
	for i := range others {
		others[i].Key = "other"
	}
	sources := []usageSource{usageOf("gw-1", used("gw-1", 1001), nil), usageOf("gw-2", others, nil), {node: "gw-3", problem: "it has left"}}
	var out strings.Builder
	missing, err := exportUsage(t.Context(), sources, &out, admin.UsageQuery{By: []string{"key", "day"}, Location: time.UTC, Format: admin.UsageCSV, Partial: true})
	if err != nil || !reflect.DeepEqual(missing, []admin.Missing{{Node: "gw-3", Error: "it has left"}}) {
		t.Fatalf("missing %v: %v", missing, err)
	}
	rows := exported(t, out.String())
	if len(rows) != 2 || rows[0]["key"] != "k" || rows[0]["day"] != "2026-06-01" || rows[0]["requests"] != "1001" || rows[0]["cost_usd"] != "1001.000001001" || rows[1]["cost_usd"] != "3.000000003" {
		t.Errorf("%v", rows)
	}

	out.Reset()
	if _, err := exportUsage(t.Context(), sources[:2], &out, admin.UsageQuery{Location: time.UTC, Format: admin.UsageCSV}); err != nil {
		t.Fatal(err)
	}
	var sum admin.USD
	for _, row := range exported(t, out.String()) {
		cost, err := admin.ParseUSD(row["cost_usd"])
		if err != nil {
			t.Fatal(err)
		}
		sum += cost
	}
	if sum != 1004*1_000_000_001 {
		t.Errorf("the requests come to %s", sum)
	}

	out.Reset()
	if _, err := exportUsage(t.Context(), sources, &out, admin.UsageQuery{By: []string{"key"}, Location: time.UTC, Format: admin.UsageCSV}); err == nil || out.Len() != 0 {
		t.Errorf("without gw-3: %v and %q", err, out.String())
	}
	_, err = exportUsage(t.Context(), []usageSource{usageOf("gw-1", nil, journal.ErrTooManyGroups)}, io.Discard, admin.UsageQuery{By: []string{"user"}, Location: time.UTC, Format: admin.UsageCSV, Partial: true})
	var e *admin.Error
	if !errors.As(err, &e) || e.Code != admin.Invalid {
		t.Errorf("too many groups: %v", err)
	}
}

func TestTopUsage(t *testing.T) {
	var list []journal.Usage
	for i := range 30 {
		u := used("gw-1", 1)[0]
		u.User, u.Cost = fmt.Sprintf("u-%02d", i), int64(i)
		list = append(list, u)
	}
	top, err := topUsage(t.Context(), []usageSource{usageOf("gw-1", list, nil), usageOf("gw-2", list, nil), usageOf("gw-3", nil, errors.New("broken"))},
		admin.UsageTop{By: []string{"user"}, Location: time.UTC, Most: 2})
	want := admin.UsageRows{
		Rows: []admin.UsageRow{
			{By: map[string]string{"user": "u-29"}, Requests: 2, Input: 20, Output: 6, Cost: 58}, {By: map[string]string{"user": "u-28"}, Requests: 2, Input: 20, Output: 6, Cost: 56},
		},
		Total:   admin.UsageRow{By: map[string]string{}, Requests: 60, Input: 600, Output: 180, Cost: 2 * 435},
		Missing: []admin.Missing{{Node: "gw-3", Error: "broken"}},
	}
	if err != nil || !reflect.DeepEqual(top, want) {
		t.Errorf("%+v %v", top, err)
	}
	if plus[int64](math.MaxInt64-1, 5) != math.MaxInt64 || plus[int64](2, 3) != 5 {
		t.Error("a sum goes over")
	}
}

// endless is a source whose records never end; it counts them.
func endless(node string, made *int64) usageSource {
	return usageSource{node: node, read: func(_ context.Context, _ journal.Query, fn func(*journal.Usage) error) error {
		for u := used(node, 1)[0]; ; u.Time = u.Time.Add(time.Millisecond) {
			*made++
			if err := fn(&u); err != nil {
				return err
			}
		}
	}}
}

// stuck is a reader that takes no more.
type stuck struct{ ctx context.Context }

func (s stuck) Write([]byte) (int, error) {
	<-s.ctx.Done()
	return 0, s.ctx.Err()
}

// TestUsageIsStreamed: nodes read no further ahead than the reader takes, however much there is.
func TestUsageIsStreamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var made [3]int64
		var sources []usageSource
		for i := range made {
			sources = append(sources, endless(fmt.Sprintf("gw-%d", i), &made[i]))
		}
		done := make(chan error)
		go func() {
			_, err := exportUsage(ctx, sources, stuck{ctx}, admin.UsageQuery{Location: time.UTC, Format: admin.UsageCSV, Partial: true})
			done <- err
		}()
		synctest.Wait()
		const most = (usageAhead+3)*usageBatch + 64<<10/100 // and what the encoder buffers, at over 100 bytes each
		for i, n := range made {
			if n > most {
				t.Errorf("%d records of a node were read for a reader that took none", n)
			}
			if n == 0 {
				t.Errorf("node %d was not read", i)
			}
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// BenchmarkUsageExport is one record's way from three nodes into a CSV.
func BenchmarkUsageExport(b *testing.B) {
	sources := make([]usageSource, 3)
	for i := range sources {
		name := fmt.Sprintf("gw-%d", i)
		sources[i] = usageSource{node: name, read: func(_ context.Context, _ journal.Query, fn func(*journal.Usage) error) error {
			u := used(name, 1)[0]
			for range b.N/3 + 1 {
				u.Time = u.Time.Add(time.Millisecond)
				if err := fn(&u); err != nil {
					return err
				}
			}
			return nil
		}}
	}
	b.ReportAllocs()
	if _, err := exportUsage(b.Context(), sources, io.Discard, admin.UsageQuery{Location: time.UTC, Format: admin.UsageCSV}); err != nil {
		b.Fatal(err)
	}
}
