package overload

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/xml"
	"errors"
	"io"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"headgate/bench/fakevllm"
	"headgate/bench/load"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(d time.Duration) time.Time { return epoch.Add(d) }

// ended makes an interactive request due at d, answered first after it, or refused.
func ended(d, first time.Duration, status int) end {
	e := end{Seen: load.Seen{Due: at(d), Sent: at(d), Last: at(d + first), Status: status}, class: interactive}
	if status == 200 {
		e.First = e.Last
	} else {
		e.Kind = "status"
	}
	return e
}

func TestRecoveryIsFromWhenOnNearlyAllIsWell(t *testing.T) {
	const normal = 100 * time.Millisecond
	series := func(n int, bad ...int) (out []end) {
		for i := range n {
			e := ended(time.Duration(i)*10*time.Millisecond, 50*time.Millisecond, 200)
			for _, b := range bad {
				if b == i {
					e = ended(time.Duration(i)*10*time.Millisecond, time.Second, 200)
				}
			}
			out = append(out, e)
		}
		return out
	}
	refusedAt := func(n, i int) []end {
		out := series(n)
		out[i] = ended(time.Duration(i)*10*time.Millisecond, 0, 429)
		return out
	}
	for name, tc := range map[string]struct {
		ends []end
		want time.Duration
		ok   bool
	}{
		"well at once":              {series(200), 0, true},
		"one in two hundred is bad": {series(200, 150), 0, true},
		"bad at first":              {series(200, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 80 * time.Millisecond, true}, // 2 of the last 192 would be too many, but one is not
		"a refusal is bad too":      {refusedAt(60, 30), 310 * time.Millisecond, true},
		"bad to the end":            {series(100, 95, 97, 99), 0, false},
		"too few to tell":           {series(10), 0, false},
	} {
		got, ok := recovery(tc.ends, epoch, normal)
		if ok != tc.ok || name != "bad at first" && got != tc.want {
			t.Errorf("%s: %v, %t; want %v, %t", name, got, ok, tc.want, tc.ok)
		}
		if name == "bad at first" && (got < tc.want || got > 100*time.Millisecond) {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestRowsSortWhatBecameOfRequests(t *testing.T) {
	s := span{load: 2, from: epoch, to: at(11 * time.Second)}
	late := ended(10*time.Second, 2*time.Second, 200) // ends after the phase
	left := ended(5*time.Second, 5*time.Second, 0)
	left.Kind = "impatient"
	other := ended(6*time.Second, time.Second, 200)
	other.class = background
	ends := []end{
		ended(2*time.Second, 100*time.Millisecond, 200), ended(3*time.Second, 300*time.Millisecond, 200), late, left, other,
		ended(4*time.Second, time.Millisecond, 429), ended(4*time.Second, time.Millisecond, 502), ended(12*time.Second, 0, 200),
	}
	r := rowOf(headgate, 10, ends, s)
	if r.Arrivals != 7 || r.Good != 4 || r.Refused != 1 || r.Left != 1 || r.Broken != 1 {
		t.Errorf("%+v", r)
	}
	if r.Goodput != 3.0/10/10 || r.Served[background] != 1 || r.Served[interactive] != 0.5 {
		t.Errorf("goodput %v, served %v", r.Goodput, r.Served)
	}
	if r.FirstP50 != 300*time.Millisecond || r.FirstP99 != 2*time.Second || r.RefusedP99 != time.Millisecond {
		t.Errorf("first %v, %v, refused %v", r.FirstP50, r.FirstP99, r.RefusedP99)
	}
	if n := rowOf(nginxSlots, 10, ends, s); n.Refused != 2 || n.Broken != 0 {
		t.Errorf("nginx at its max_conns: %+v", n)
	}
}

func record(body string, from, to time.Duration, tokens int64, o fakevllm.Outcome) fakevllm.Record {
	return fakevllm.Record{Body: []byte(body), Started: at(from), Ended: at(to), OutputTokens: tokens, Outcome: o}
}

func TestSlotTimeIsTakenFromTheUpstreamsLog(t *testing.T) {
	body := func(class int, id int64) string {
		return `{"messages":[{"role":"user","content":"` + mark(class, id) + `What`
	}
	log := []fakevllm.Record{
		record(body(interactive, 1), 0, 2*time.Second, 10, fakevllm.OK),                                           // half before
		record(body(background, 2), 2*time.Second, 4*time.Second, 5, fakevllm.Aborted),                            //
		record(body(bestEffort, 3), 9*time.Second, 11*time.Second, 8, fakevllm.OK),                                // half after
		record(body(interactive, 4), 20*time.Second, 21*time.Second, 8, fakevllm.OK),                              // elsewhere
		record(`{"messages":[{"role":"user","content":"c9 n1 What`, 2*time.Second, 4*time.Second, 8, fakevllm.OK), // nobody's
	}
	due := map[int64]time.Time{1: at(0), 2: at(-20 * time.Second), 3: at(8 * time.Second)}
	u := usedBetween(log, at(time.Second), at(10*time.Second), due)
	if u.slotTime != [classes]time.Duration{time.Second, 2 * time.Second, time.Second} || u.wastedTime != 2*time.Second {
		t.Errorf("slot-time %v, wasted %v", u.slotTime, u.wastedTime)
	}
	if u.tokens != 23 || u.wastedTokens != 5 || u.late != 1 {
		t.Errorf("%+v", u)
	}
}

// TestTrial loads a proxy in this process with twice what the upstream can do.
func TestTrial(t *testing.T) {
	up, err := startUpstream(8)
	if err != nil {
		t.Fatal(err)
	}
	defer up.stop()
	u, err := url.Parse(up.url)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(httputil.NewSingleHostReverseProxy(u))
	defer srv.Close()
	cfg := Config{Headgate: "none", Slots: 8, Loads: []float64{2}, PeerSurge: 2 * time.Second, After: 2 * time.Second}.withDefaults()
	rep := &Report{Config: cfg, Capacity: 28}
	x := &trial{cfg: &cfg, up: up, t: &target{name: bare, url: srv.URL, pid: os.Getpid()}, rep: rep}
	if err := x.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(rep.Rows) != 2 || rep.Rows[0].Load != 2 || rep.Rows[1].Load != calm {
		t.Fatalf("rows %+v", rep.Rows)
	}
	r := rep.Rows[0]
	if r.Arrivals < 50 || r.Good == 0 || r.Goodput <= 0 || r.Running <= 0 || r.PeakRunning != 8 || r.PeakWaiting == 0 {
		t.Errorf("%+v", r)
	}
	if sum := r.Share[0] + r.Share[1] + r.Share[2]; sum < 0.999 || sum > 1.001 {
		t.Errorf("shares %v", r.Share)
	}
	if err := up.idle(t.Context()); err != nil {
		t.Errorf("left at the upstream: %v", err)
	}
}

func sample() *Report {
	r := &Report{Started: epoch, Config: Config{Headgate: "x"}.withDefaults(), Capacity: 100, Recovery: map[string]time.Duration{headgate: time.Second}}
	for _, name := range targetNames()[:2] {
		for _, l := range append(r.Config.Loads, calm) {
			r.Rows = append(r.Rows, Row{
				Target: name, Load: l, Length: time.Minute, Arrivals: 100, Good: 50, Goodput: 0.96, Share: [classes]float64{0.7, 0.25, 0.05},
				FirstP99: 300 * time.Millisecond, WaitP99: time.Second, PeakRunning: 32, Memory: []int64{1 << 20, 4 << 20, 4 << 20},
			})
		}
	}
	return r
}

func TestReports(t *testing.T) {
	r := sample()
	r.judge()
	for _, a := range r.Aims {
		if !a.Holds() {
			t.Errorf("missed: %+v", a)
		}
	}
	var text, table, picture bytes.Buffer
	if err := errors.Join(r.WriteText(&text), r.WriteCSV(&table), r.WriteSVG(&picture)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"bare             not within 15s", "headgate         1.00 s", "≥ 0.95: holds"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, text.String())
		}
	}
	lines, err := csv.NewReader(&table).ReadAll()
	if err != nil || len(lines) != 1+len(r.Rows) {
		t.Errorf("%d lines, %v", len(lines), err)
	}
	for d := xml.NewDecoder(&picture); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func TestAimsAreMissed(t *testing.T) {
	r := sample()
	x := r.surgeOf(headgate)
	if x == nil || x.Load != 5 {
		t.Fatalf("surge %+v", x)
	}
	x.Goodput, x.WaitP99, x.Share[background], x.Late, x.PeakRunning, x.Memory = 0.9, 3*time.Second, 0.1, 1, 33, []int64{1, 1, 2}
	r.Recovery = nil
	r.judge()
	for _, a := range r.Aims {
		if a.Holds() {
			t.Errorf("holds: %+v", a)
		}
	}
	if len(r.Aims) != 7 || len(r.Notes) != 1 {
		t.Errorf("%d aims, notes %q", len(r.Aims), r.Notes)
	}
}

func TestConfigIsChecked(t *testing.T) {
	for want, c := range map[string]Config{
		"no headgate binary": {}, "slots": {Headgate: "x", Slots: -1}, "longer than an hour": {Headgate: "x", Surge: 2 * time.Hour},
		"at least": {Headgate: "x", Each: time.Second}, "ascend": {Headgate: "x", Loads: []float64{2, 1}}, "no target": {Headgate: "x", Only: []string{"envoy"}},
	} {
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
	if err := (Config{Headgate: "x", Quick: true, Loads: []float64{0.5, 3}, Only: []string{bare}}).Validate(); err != nil {
		t.Error(err)
	}
}

func TestAMissingTargetIsToldApart(t *testing.T) {
	_, err := startTarget(context.Background(), &Config{Nginx: "none"}, t.TempDir(), nginx, "http://127.0.0.1:1")
	if !errors.Is(err, errMissing) {
		t.Errorf("error %v", err)
	}
}
