package journal

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/big"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"pgregory.net/rapid"

	pb "headgate/proxy/journal/journalpb"
)

// TestGroups holds sums to an addition in big numbers, also where they come in parts.
func TestGroups(t *testing.T) {
	zone, err := time.LoadLocation("America/St_Johns")
	if err != nil {
		t.Skip("no time zones here")
	}
	rapid.Check(t, func(t *rapid.T) {
		by := rapid.SliceOfNDistinct(rapid.SampledFrom(Fields()), 0, 4, rapid.ID).Draw(t, "by")
		whole, err := NewGroups(by, zone)
		if err != nil {
			t.Fatal(err)
		}
		half, _ := NewGroups(by, zone)
		want := map[string]*big.Int{}
		for range rapid.IntRange(0, 50).Draw(t, "requests") {
			some := rapid.SampledFrom([]string{"", "a", "b\x00", "\xff"})
			u := &Usage{
				Time:   noon.Add(time.Duration(rapid.IntRange(0, 50).Draw(t, "hours")) * 20 * time.Minute),
				Tenant: some.Draw(t, "tenant"), Key: some.Draw(t, "key"), User: some.Draw(t, "user"), Model: some.Draw(t, "model"),
				Outcome: rapid.SampledFrom([]string{"ok", Lost}).Draw(t, "outcome"), Input: 1,
			}
			if u.Outcome == Lost {
				u.Reserved = 7
			} else {
				u.Cost = rapid.Int64Range(0, 1<<50).Draw(t, "cost")
			}
			local := u.Time.In(zone)
			values := map[string]string{
				"tenant": u.Tenant, "key": u.Key, "user": u.User, "model": u.Model, "outcome": u.Outcome,
				"day": local.Format("2006-01-02"), "hour": local.Format("2006-01-02T15") + ":00:00" + local.Format("Z07:00"),
			}
			var key []string
			for _, f := range by {
				key = append(key, values[f])
			}
			k := fmt.Sprintf("%q", key)
			if want[k] == nil {
				want[k] = new(big.Int)
			}
			want[k].Add(want[k], big.NewInt(u.Cost))
			g := whole
			if rapid.Bool().Draw(t, "half") {
				g = half
			}
			if err := g.Add(u); err != nil {
				t.Fatal(err)
			}
		}
		for _, r := range half.Rows() {
			if err := whole.AddRow(&r); err != nil {
				t.Fatal(err)
			}
		}
		rows := whole.Rows()
		if len(rows) != len(want) || !slices.IsSortedFunc(rows, func(a, b Row) int { return slices.Compare(a.Values, b.Values) }) {
			t.Fatalf("%d groups, want %d", len(rows), len(want))
		}
		for _, r := range rows {
			if w := want[fmt.Sprintf("%q", append([]string(nil), r.Values...))]; w == nil || w.Cmp(big.NewInt(r.Cost)) != 0 || r.Lost%7 != 0 || r.Requests+r.Lost/7 != r.Input {
				t.Fatalf("%+v, want %v", r, w)
			}
		}
	})
}

func TestGroupsRefuse(t *testing.T) {
	for _, by := range [][]string{{"tenants"}, {"day", "day"}, {""}} {
		if _, err := NewGroups(by, nil); err == nil {
			t.Errorf("grouped by %q", by)
		}
	}
	g, err := NewGroups([]string{"user"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	g.most = 2
	for i, want := range []error{nil, nil, ErrTooManyGroups} {
		if err := g.Add(&Usage{User: fmt.Sprint(i)}); !errors.Is(err, want) {
			t.Errorf("group %d: %v", i, err)
		}
	}
	if err := g.AddRow(&Row{Values: []string{"0", "x"}}); err == nil {
		t.Error("took a row of other fields")
	}
	for range 3 {
		if err := g.Add(&Usage{User: "0", Cost: math.MaxInt64 / 2}); err != nil {
			t.Fatal(err)
		}
	}
	if got := g.Rows()[0].Cost; got != math.MaxInt64 {
		t.Errorf("a sum beyond an int64 is %d", got)
	}
}

// TestUSD: as a decimal, exact.
func TestUSD(t *testing.T) {
	for nano, want := range map[int64]string{
		0: "0.00", 1: "0.000000001", 10: "0.00000001", 1e7: "0.01", 1e8: "0.10", 1e9: "1.00", 1234567890: "1.23456789",
		-5e8: "-0.50", math.MaxInt64: "9223372036.854775807", math.MinInt64: "-9223372036.854775808",
	} {
		if got := string(appendUSD(nil, nano)); got != want {
			t.Errorf("%d is %s, want %s", nano, got, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		nano := rapid.Int64().Draw(t, "nano")
		text := string(appendUSD(nil, nano))
		back, ok := new(big.Rat).SetString(text)
		if !ok || back.Cmp(big.NewRat(nano, 1e9)) != 0 {
			t.Fatalf("%d is %s", nano, text)
		}
	})
}

var update = flag.Bool("update", false, "write testdata anew")

// TestEncoders writes requests and groups as CSV and JSON, as testdata has them.
func TestEncoders(t *testing.T) {
	u := benchUsage()
	u.Node, u.CachedInput, u.CacheWrite, u.CacheWrite1h, u.Images, u.AudioSeconds, u.Tier, u.Estimated = "node-1", 3, 4, 5, 6, 7, "exact", true
	odd := &Usage{Tenant: "a,b", Key: "say \"hi\"", User: "=cmd()", Model: "line\r\nbreak", Asked: " @x", Backend: "-1+2", Surface: "\xffü", Outcome: "+ok"}
	row := &Row{Values: []string{"@acme", "2026-05-03"}, Requests: 2, Input: 3, CachedInput: 4, CacheWrite: 5, CacheWrite1h: 6, Output: 7, Images: 8, AudioSeconds: 9, Cost: 1_500_000_001, Lost: 2e9}
	by := []string{"tenant", "day"}
	var all bytes.Buffer
	for _, format := range []string{"csv", "json"} {
		e, err := NewEncoder(&all, format, nil)
		if err == nil {
			err = errors.Join(e.Usage(u), e.Usage(odd))
		}
		if err != nil || format == "csv" && all.Len() > 0 {
			t.Fatalf("before Flush there are %d bytes, %v", all.Len(), err)
		}
		rows, err := NewEncoder(&all, format, by)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(e.Flush(), rows.Row(row), rows.Flush()); err != nil {
			t.Fatal(err)
		}
		if err := rows.Row(&Row{Values: []string{"x"}}); err == nil {
			t.Error("took a row of other fields")
		}
	}
	want, err := os.ReadFile("testdata/encoded.txt")
	if err != nil || !bytes.Equal(all.Bytes(), want) {
		t.Errorf("%v; it is now\n%s", err, all.Bytes())
	}
	if *update {
		if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile("testdata/encoded.txt", all.Bytes(), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := NewEncoder(&all, "xml", nil); err == nil {
		t.Error("took an unknown format")
	}
}

// TestEncodedReadsBack: any names come back from a CSV and JSON reader, formulas with their '.
func TestEncodedReadsBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.String(), rapid.StringOf(rapid.SampledFrom([]rune("=+-@＝＋－＠\t\r\n\", a'"))))
		u := &Usage{Tenant: text.Draw(t, "tenant"), User: text.Draw(t, "user"), Outcome: text.Draw(t, "outcome"), Cost: 5}
		var out bytes.Buffer
		e, _ := NewEncoder(&out, "csv", nil)
		if err := errors.Join(e.Usage(u), e.Flush()); err != nil {
			t.Fatal(err)
		}
		lines, err := csv.NewReader(&out).ReadAll()
		if err != nil || len(lines) != 2 || !slices.Equal(lines[0], Columns(nil)) {
			t.Fatalf("%q, %v", lines, err)
		}
		for name, v := range map[string]string{"tenant": u.Tenant, "user": u.User, "outcome": u.Outcome} {
			want := strings.ReplaceAll(v, "\r\n", "\n") // as Go's reader does
			if v != "" && slices.Contains([]rune("=+-@＝＋－＠\t\r"), []rune(v)[0]) {
				want = "'" + want
			}
			if got := lines[1][slices.Index(lines[0], name)]; got != want {
				t.Fatalf("%s %q comes back as %q", name, v, got)
			}
		}
		e, _ = NewEncoder(&out, "json", nil)
		if err := errors.Join(e.Usage(u), e.Flush()); err != nil {
			t.Fatal(err)
		}
		var back map[string]any
		if err := json.Unmarshal(out.Bytes(), &back); err != nil || back["tenant"] != u.Tenant || back["cost_usd"] != "0.000000005" {
			t.Fatalf("%v, %v", back, err)
		}
		out.Reset()
	})
}

// remote serves a Log over gRPC in memory.
func remote(t *testing.T, l *Log) *grpc.ClientConn {
	t.Helper()
	pipe := bufconn.Listen(1 << 20)
	s := grpc.NewServer()
	Register(s, l)
	done := make(chan error, 1)
	go func() { done <- s.Serve(pipe) }()
	conn, err := grpc.NewClient("passthrough:journal", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return conn
}

// TestRemote reads and groups another node's journal: it is the same as on the spot.
func TestRemote(t *testing.T) {
	l := mustOpen(t, testConfig(newDisk(), 1))
	defer mustClose(t, l)
	conn := remote(t, l)
	for i := range 3000 {
		u := benchUsage()
		u.Parts, u.User, u.Time = nil, fmt.Sprintf("user\xff%d", i%7), noon.Add(time.Duration(i)*time.Minute)
		if err := l.Settle(u); err != nil {
			t.Fatal(err)
		}
	}
	settle(t, l, reserve(t, l, month, 5), month, 4)
	for _, q := range []Query{{}, {From: noon.Add(time.Hour), Until: noon.Add(2 * time.Hour)}, {Tenant: "acme", User: "user\xff3", Key: "key_7f3a91", Model: "llama-3.3-70b"}, {Tenant: "nobody"}} {
		var got []Usage
		err := ReadFrom(t.Context(), conn, q, func(u *Usage) error {
			c := *u
			c.Parts = slices.Clone(u.Parts)
			got = append(got, c)
			return nil
		})
		want := readAll(t, l, q)
		if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%+v: %d requests, %v, want %d", q, len(got), err, len(want))
		}
		zone := time.UTC
		here, _ := NewGroups([]string{"user", "day"}, zone)
		there, _ := NewGroups([]string{"user", "day"}, zone)
		if err := errors.Join(l.Read(t.Context(), q, here.Add), GroupFrom(t.Context(), conn, q, there)); err != nil || fmt.Sprint(here.Rows()) != fmt.Sprint(there.Rows()) {
			t.Errorf("%+v: %v groups, %v, want %v", q, len(there.Rows()), err, len(here.Rows()))
		}
	}
}

func TestRemoteRefuses(t *testing.T) {
	c := testConfig(newDisk(), 1)
	c.Zone = func(string) (*time.Location, error) { return nil, errors.New("no such zone") }
	l := mustOpen(t, c)
	defer mustClose(t, l)
	conn := remote(t, l)
	settle(t, l, reserve(t, l, month, 5), month, 4)
	settle(t, l, reserve(t, l, month, 5), month, 4)
	g, _ := NewGroups(nil, time.UTC)
	if err := GroupFrom(t.Context(), conn, Query{}, g); status.Code(err) != codes.InvalidArgument || len(g.Rows()) != 0 {
		t.Errorf("an unknown zone: %v", err)
	}
	local, _ := NewGroups(nil, time.Local)
	if err := GroupFrom(t.Context(), conn, Query{}, local); time.Local.String() == "Local" && (err == nil || !strings.Contains(err.Error(), "Local")) {
		t.Errorf("the local zone: %v", err)
	}
	stop := errors.New("stop")
	if err := ReadFrom(t.Context(), conn, Query{}, func(*Usage) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the reader's error: %v", err)
	}
	l.cfg.Zone = time.LoadLocation
	g, _ = NewGroups([]string{"user"}, time.UTC)
	g.most = 0
	if err := GroupFrom(t.Context(), conn, Query{}, g); !errors.Is(err, ErrTooManyGroups) || len(g.rows) != 0 {
		t.Errorf("too many groups: %v", err)
	}
	busy := &server{log: l, reads: make(chan struct{}, 1)}
	busy.reads <- struct{}{}
	if err := busy.Read(nil, nil); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a busy node: %v", err)
	}
}

// mute is a connection on which nothing ever comes.
type mute struct{ grpc.ClientConnInterface }

func (mute) NewStream(ctx context.Context, _ *grpc.StreamDesc, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return muteStream{ctx: ctx}, nil
}

type muteStream struct {
	grpc.ClientStream
	ctx context.Context
}

func (muteStream) SendMsg(any) error { return nil }
func (muteStream) CloseSend() error  { return nil }
func (s muteStream) RecvMsg(any) error {
	<-s.ctx.Done()
	return s.ctx.Err()
}

// TestSilence: a node that says nothing is given up, and one that reads for long says so.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from := time.Now()
		err := ReadFrom(t.Context(), mute{}, Query{}, func(*Usage) error { return nil })
		if err == nil || !strings.Contains(err.Error(), "nothing came") || time.Since(from) != maxWait {
			t.Errorf("after %v: %v", time.Since(from), err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		sent := 0
		p := &pages{stream: counting{n: &sent}, page: nil, sent: time.Now()}
		for range 10 {
			if err := p.beat(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		if sent != 4 {
			t.Errorf("%d pages in 9 seconds", sent)
		}
	})
}

// counting counts pages.
type counting struct {
	grpc.ServerStreamingServer[pb.Page]
	n *int
}

func (c counting) Send(*pb.Page) error { *c.n++; return nil }
