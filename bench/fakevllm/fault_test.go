package fakevllm

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"
)

// attempt posts hello with a fault, reads what comes and returns both errors as one.
func attempt(t *testing.T, url, members, fault string) (resp *http.Response, body []byte, err error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/chat/completions", strings.NewReader(with(hello, members)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Fake-Fault", fault)
	tr := &http.Transport{DisableCompression: true, DisableKeepAlives: true}
	defer tr.CloseIdleConnections()
	resp, err = tr.RoundTrip(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	body, err = io.ReadAll(resp.Body)
	return resp, body, err
}

func TestFaultsThatEndAnAnswer(t *testing.T) {
	const stream, whole = `"stream":true`, `"n":1`
	for _, tc := range []struct {
		members, fault string
		status         int // 0: none
		broken         bool
		tokens         int64
	}{
		{stream, "cut=5", 200, true, 5},
		{stream, "cut", 200, true, 20},
		{stream, "cut=0", 200, true, 0},
		{stream, "cut=99", 200, true, 40},
		{whole, "cut=5", 200, true, 5},
		{stream, "inband=5", 200, false, 5},
		{whole, "inband=5", 500, false, 5},
		{stream, "reset", 0, true, 0},
		{stream, "500", 500, false, 0},
		{whole, "502", 502, false, 0},
		{stream, "503", 503, false, 0},
		{whole, "429", 429, false, 0},
		{stream, "garbage", 200, false, 0},
	} {
		s, url := start(t, Config{})
		resp, body, err := attempt(t, url, tc.members, tc.fault)
		status := 0
		if resp != nil {
			status = resp.StatusCode
		}
		if status != tc.status || (err != nil) != tc.broken {
			t.Errorf("%s: status %d, error %v, body %.80s", tc.fault, status, err, body)
		}
		name, _, _ := strings.Cut(tc.fault, "=")
		if err := s.Await(t.Context(), func(st Stats) bool { return st.Outcomes[Failed] == 1 }); err != nil {
			t.Fatal(err)
		}
		if r := s.Log()[0]; r.Fault != Fault(name) || r.OutputTokens != tc.tokens || r.Status != tc.status {
			t.Errorf("%s: record %+v, want %d tokens", tc.fault, r, tc.tokens)
		}
		if st := s.Stats(); st.InFlight != 0 || st.Running != 0 {
			t.Errorf("%s: left in flight %+v", tc.fault, st)
		}
	}
}

func TestResetIsAReset(t *testing.T) {
	_, url := start(t, Config{})
	if _, _, err := attempt(t, url, `"n":1`, "reset"); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
		t.Errorf("error %v", err)
	}
}

func TestInBandErrors(t *testing.T) {
	_, url := start(t, Config{})
	_, body, err := attempt(t, url, `"stream":true`, "inband=3")
	fs := frames(string(body))
	if err != nil || len(fs) != 1+3+2 || !strings.HasPrefix(fs[4], `{"error":{`) || fs[5] != "[DONE]" {
		t.Errorf("chat: %v %s", err, body)
	}
	_, messages := post(t, url+"/v1/messages", with(hello, `"stream":true`), "X-Fake-Fault", "inband=3")
	if !strings.HasSuffix(messages, "}}\n\n") || !strings.Contains(messages, "event: error\n"+`data: {"type":"error"`) {
		t.Errorf("messages: %s", messages)
	}
	_, responses := post(t, url+"/v1/responses", `{"input":"x","stream":true}`, "X-Fake-Fault", "inband=3")
	if !strings.Contains(responses, "event: error\n"+`data: {"type":"error"`) || strings.Contains(responses, "response.completed") {
		t.Errorf("responses: %s", responses)
	}
}

func TestFaultsThatBendAnAnswer(t *testing.T) {
	s, url := start(t, Config{})
	asked := `"stream":true,"stream_options":{"include_usage":true}`
	_, plain, err := attempt(t, url, asked, "")
	if err != nil {
		t.Fatal(err)
	}
	want := string(plain)
	for fault, undo := range map[string]func(b []byte) string{
		"split": func(b []byte) string { return string(b) },
		"gzip": func(b []byte) string {
			z, err := gzip.NewReader(bytes.NewReader(b))
			if err != nil {
				return err.Error()
			}
			out, err := io.ReadAll(z)
			if err != nil {
				return err.Error()
			}
			return string(out)
		},
		"comments":  func(b []byte) string { return strings.ReplaceAll(string(b), ": tick\n\n", "") },
		"crlf":      func(b []byte) string { return strings.ReplaceAll(string(b), "\r\n", "\n") },
		"nonewline": func(b []byte) string { return string(b) + "\n\ndata: [DONE]\n\n" },
	} {
		_, got, err := attempt(t, url, asked, fault)
		if err != nil || undo(got) != want || fault != "split" && string(got) == want {
			t.Errorf("%s: %v %s", fault, err, got)
		}
	}
	for fault, usage := range map[string]string{
		"nousage": "", "lieusage=negative": `"prompt_tokens":-9`, "lieusage=huge": `"prompt_tokens":9223372036854775799`,
		"lieusage=string": `"prompt_tokens":"8"`, "lieusage=float": `"prompt_tokens":8.5`, "lieusage": `"prompt_tokens":`,
	} {
		for _, members := range []string{asked, `"n":1`} {
			_, got, err := attempt(t, url, members, fault)
			if err != nil || !strings.Contains(string(got), usage) || (usage == "") == strings.Contains(string(got), `"usage"`) {
				t.Errorf("%s: %v %s", fault, err, got)
			}
		}
	}
	for _, r := range s.Log() {
		if r.Outcome != OK || r.PromptTokens != 8 || r.OutputTokens != 40 {
			t.Errorf("record %+v", r)
		}
	}
}

func TestWholeAnswersAreBentToo(t *testing.T) {
	_, url := start(t, Config{})
	_, want, _ := attempt(t, url, `"n":1`, "")
	resp, got, err := attempt(t, url, `"n":1`, "gzip")
	if err != nil || resp.Header.Get("Content-Encoding") != "gzip" || bytes.Equal(got, want) {
		t.Errorf("gzip: %v %s", err, got)
	}
	if _, got, err = attempt(t, url, `"n":1`, "split"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("split: %v %s", err, got)
	}
}

// chunks records the size of every write between two flushes.
type chunks struct {
	*httptest.ResponseRecorder
	now  []byte
	seen [][]byte
}

func (c *chunks) Write(b []byte) (int, error) { c.now = append(c.now, b...); return len(b), nil }

func (c *chunks) Flush() { c.seen = append(c.seen, c.now); c.now = nil }

func TestSplitCutsInsideCharacters(t *testing.T) {
	s, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	w := &chunks{ResponseRecorder: httptest.NewRecorder()}
	s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(with(hello, `"stream":true,"vllm_xargs":{"fake_fault":"split"}`))))
	broken := 0
	for _, c := range w.seen {
		if !utf8.Valid(c) {
			broken++
		}
	}
	if broken < 5 || len(w.seen) < 200 {
		t.Errorf("%d of %d parts are cut inside a character", broken, len(w.seen))
	}
}

func TestEveryFrameIsFlushedByItself(t *testing.T) {
	s, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	for path, body := range map[string]string{
		"/v1/chat/completions": with(hello, `"stream":true`), "/v1/messages": with(hello, `"stream":true`),
		"/v1/responses": `{"input":"x","stream":true}`, "/v1/completions": `{"prompt":"x","stream":true}`,
	} {
		w := &chunks{ResponseRecorder: httptest.NewRecorder()}
		s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, strings.NewReader(body)))
		for _, c := range w.seen {
			if bytes.Count(c, []byte("\n\n")) != 1 || !bytes.HasSuffix(c, []byte("\n\n")) {
				t.Errorf("%s: flushed %q", path, c)
			}
		}
	}
}

func TestPausesOfFaultsInVirtualTime(t *testing.T) {
	run := func(members string, cfg Config) (d time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			s, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			from := time.Now()
			defer func() {
				d = time.Since(from)
				if r := recover(); r != nil && r != any(http.ErrAbortHandler) {
					panic(r)
				}
			}()
			s.Handler().ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(with(hello, members))))
		})
		return d
	}
	xargs := func(f string) string { return `"stream":true,"vllm_xargs":{"fake_fault":"` + f + `"}` }
	for _, tc := range []struct {
		members string
		cfg     Config
		want    time.Duration
	}{
		{xargs("slow"), Config{SlowToken: time.Second}, 39 * time.Second},
		{xargs("stall=5"), Config{StallMax: time.Hour}, time.Hour},
		{xargs("stall=5"), Config{}, time.Minute},
		{xargs("split"), Config{SplitPause: 150 * time.Millisecond}, 43 * 150 * time.Millisecond}, // role, 40 tokens, finish, end marker
	} {
		if got := run(tc.members, tc.cfg); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.members, got, tc.want)
		}
	}
}

func TestEndlessLineEndsWithItsReader(t *testing.T) {
	s, url := start(t, Config{})
	resp := send(t, url+"/v1/chat/completions", with(hello, `"stream":true`), "X-Fake-Fault", "endless=2")
	br := bufio.NewReader(resp.Body)
	for range 6 { // the role and two tokens
		if _, err := br.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	part := make([]byte, 1<<20)
	if _, err := io.ReadFull(br, part); err != nil || bytes.ContainsRune(part, '\n') {
		t.Fatalf("the line ended, or the answer did: %v", err)
	}
	_ = resp.Body.Close()
	if err := s.Await(t.Context(), func(st Stats) bool { return st.Outcomes[Aborted] == 1 }); err != nil {
		t.Fatal(err)
	}
}

func TestChanceFaultsFollowTheSeed(t *testing.T) {
	outcomes := func(seed uint64) string {
		s, err := New(Config{Seed: seed, Faults: map[Fault]float64{"503": 0.3, LieUsage: 1}})
		if err != nil {
			t.Fatal(err)
		}
		var sb strings.Builder
		for range 100 {
			w := httptest.NewRecorder()
			s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(hello)))
			fmt.Fprintf(&sb, "%d ", w.Code)
		}
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/models", nil))
		if w.Code != 200 {
			t.Errorf("a lookup was struck: %d", w.Code)
		}
		return sb.String()
	}
	a := outcomes(7)
	if n := strings.Count(a, "503"); a != outcomes(7) || a == outcomes(8) || n < 10 || n > 60 {
		t.Errorf("of 100 requests %d were struck with probability 0.3: %s", n, a)
	}
}
