package gateway

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestMain lets the test binary be the helpers that Run starts.
func TestMain(m *testing.M) {
	if was, err := Child(); was {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// A short run against a twin of the bare proxy: everything is measured, nothing is
// lost, and no figure depends on how fast this machine is.
func TestTwinsAreMeasured(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("CPU time and memory are read from Linux's /proc")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ports, err := freePorts(2)
	if err != nil {
		t.Fatal(err)
	}
	peer := startPeer(t, ports[1], "http://"+ports[0])
	rep, err := Run(t.Context(), Config{
		Self: []string{exe}, Rounds: 2, Each: 100 * time.Millisecond, ChatRate: 100, StreamRate: 20, SlowRate: 50,
		Parallel: 2, Held: 20, Upstream: ports[0], Peers: []Peer{peer}, Log: t.Output(),
	})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, r := range rep.Rows {
		seen[r.Scenario+" "+r.Target]++
		if r.Good == 0 || r.Failed != 0 || r.Dropped != 0 {
			t.Errorf("%s, %s: %d good, %d failed, %d dropped of %d: %s", r.Scenario, r.Target, r.Good, r.Failed, r.Dropped, r.Arrivals, r.Errors)
		}
		if r.Scenario != "held" && (r.P50 <= 0 || r.P99 < r.P50 || r.FirstP50 <= 0) {
			t.Errorf("%s, %s: times %+v", r.Scenario, r.Target, r)
		}
	}
	for _, sc := range rep.Config.scenarios() {
		for _, target := range []string{direct, bare, twin, "peer"} {
			if seen[sc.name+" "+target] != 2 {
				t.Errorf("%s, %s: %d measurements, want 2", sc.name, target, seen[sc.name+" "+target])
			}
		}
	}
	for _, r := range rep.Rows {
		if ours := r.Target == bare || r.Target == twin; r.Scenario == "stream" && (r.GapP50 <= 0 || r.Resident <= 0 || ours != (r.Objects > 0)) {
			t.Errorf("%s, %s: %+v", r.Scenario, r.Target, r)
		}
	}
	if seen["held bare"] != 2 || seen["held "+twin] != 2 || seen["held peer"] != 2 {
		t.Errorf("held streams: %v", seen)
	}
	dir := t.TempDir()
	if err := rep.Write(dir); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(dir + "/gateway.csv")
	if err != nil {
		t.Fatal(err)
	}
	if lines, err := csv.NewReader(bytes.NewReader(raw)).ReadAll(); err != nil || len(lines) != len(rep.Rows)+1 {
		t.Errorf("csv: %d lines, %v", len(lines), err)
	}
	text, err := os.ReadFile(dir + "/gateway.txt")
	if err != nil || !strings.Contains(string(text), "chat: p50 added") || !strings.Contains(string(text), "litellm: not given, skipped") || !strings.Contains(string(text), "stream           peer") {
		t.Errorf("text: %v\n%s", err, text)
	}
}

// startPeer serves a proxy before an upstream that need not be there yet, as a user would.
func startPeer(t *testing.T, listen, upstream string) Peer {
	t.Helper()
	u, err := url.Parse(upstream)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", listen)
	if err != nil {
		t.Fatal(err)
	}
	p := httputil.NewSingleHostReverseProxy(u)
	transport := newTransport()
	p.Transport = transport
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil { // see Child
			t.Error(err)
		}
		p.ServeHTTP(w, r)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l) // ends by the Close
	}()
	t.Cleanup(func() {
		_ = srv.Close() // nothing is lost by it
		<-done
		transport.CloseIdleConnections()
	})
	return Peer{Name: "peer", URL: "http://" + listen}
}

func TestPeersAreNamedAndLocal(t *testing.T) {
	if p, err := ParsePeer("envoy=http://localhost:10000/"); err != nil || p != (Peer{"envoy", "http://localhost:10000"}) {
		t.Errorf("%+v, %v", p, err)
	}
	for _, text := range []string{"envoy", "=http://127.0.0.1:1", "nginx=http://127.0.0.1:1", "a=http://127.0.0.1", "a=https://127.0.0.1:1", "a=http://192.0.2.1:80", "a=:"} {
		if p, err := ParsePeer(text); err == nil {
			t.Errorf("%q is %+v", text, p)
		}
	}
	if err := (Config{Peers: []Peer{{"a", "http://127.0.0.1:1"}, {"a", "http://127.0.0.1:2"}}}).Validate(); err == nil {
		t.Error("two peers have one name")
	}
}

// A peer that is not there ends the run, and is named.
func TestAPeerThatIsNotThere(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ports, err := freePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Run(t.Context(), Config{Self: []string{exe}, Nginx: "none", Peers: []Peer{{"gone", "http://" + ports[0]}}})
	if err == nil || !strings.Contains(err.Error(), "peer gone") {
		t.Errorf("error %v", err)
	}
}

func TestFiguresAreMediansOverRounds(t *testing.T) {
	rep := &Report{Subject: headgate}
	for i, us := range []float64{130, 110, 400, 120, 90} {
		rep.add(Row{Scenario: "chat", Target: bare, Round: i + 1, Good: 1, CPU: 100, P50: 200, P99: 500})
		rep.add(Row{Scenario: "chat", Target: headgate, Round: i + 1, Good: 1, CPU: us, P50: 200 + us, P99: 3000})
	}
	rep.add(Row{Scenario: "chat", Target: bare, Round: 6, Good: 1, CPU: 1, Rate: 1, LagP99: 2 * lateBound})
	rep.add(Row{Scenario: "chat", Target: headgate, Round: 6, Good: 0, Failed: 9, Arrivals: 9})
	rep.summarize()
	find := func(name string) Figure {
		i := slices.IndexFunc(rep.Figures, func(f Figure) bool { return f.Name == name })
		if i < 0 {
			t.Fatalf("no figure %q in %v", name, rep.Figures)
		}
		return rep.Figures[i]
	}
	if f := find("chat: CPU a request over bare"); f.Median != 1.2 || f.Low != 0.9 || f.Top != 4 || !f.Holds() {
		t.Errorf("CPU %+v", f)
	}
	if f := find("chat: p50 added"); f.Median != 120 || !f.Holds() {
		t.Errorf("p50 %+v", f)
	}
	if f := find("chat: p99 added"); f.Median != 2500 || f.Holds() {
		t.Errorf("p99 %+v", f)
	}
	if (Figure{Bounded: true, AtLeast: true, Bound: 0.8, Median: 0.7}).Holds() {
		t.Error("0.7 is at least 0.8")
	}
	if len(rep.Notes) != 2 || !strings.Contains(rep.Notes[0], "9 failed") || !strings.Contains(rep.Notes[1], "in 1 of 1 measurements") {
		t.Errorf("notes %q", rep.Notes)
	}
}

func TestBodiesAreAKilobyte(t *testing.T) {
	for name, b := range map[string][]byte{"chat": chatBody(7), "stream": streamBody(123456), "paced": pacedBody(99), "held": heldBody(0)} {
		if len(b) != chatBytes {
			t.Errorf("%s: %d bytes, want %d", name, len(b), chatBytes)
		}
	}
	if bytes.Equal(chatBody(1), chatBody(2)) {
		t.Error("two chats are alike")
	}
}

func TestConfigRefusesWhatMakesNoSense(t *testing.T) {
	for _, c := range []Config{{Rounds: -1}, {Rounds: 101}, {Held: maxInFlight + 1}, {ChatRate: -1}, {Each: 2 * time.Hour}} {
		if _, err := Run(t.Context(), c); err == nil {
			t.Errorf("ran %+v", c)
		}
	}
}

// BenchmarkOverhead is the real measurement, for a Headgate binary named by
// HEADGATE_BINARY (else the twin) and LiteLLM's command in LITELLM, into the
// directory BENCH_RESULTS (else only the log).
func BenchmarkOverhead(b *testing.B) {
	exe, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		rep, err := Run(b.Context(), Config{Self: []string{exe}, Headgate: os.Getenv("HEADGATE_BINARY"), LiteLLM: os.Getenv("LITELLM"), Log: os.Stderr})
		if err != nil {
			b.Fatal(err)
		}
		if dir := os.Getenv("BENCH_RESULTS"); dir != "" {
			if err := rep.Write(dir); err != nil {
				b.Fatal(err)
			}
		}
		if err := rep.WriteText(os.Stderr); err != nil {
			b.Fatal(err)
		}
		for _, f := range rep.Figures {
			b.ReportMetric(f.Median, strings.NewReplacer(" ", "-", ":", "", ",", "").Replace(f.Name)+"-"+f.Unit)
		}
	}
}
