package edge

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func statusOf(err error) int {
	var large TooLarge
	switch {
	case errors.As(err, &large):
		return http.StatusRequestEntityTooLarge
	case errors.Is(err, ErrTooSlow):
		return http.StatusRequestTimeout
	default:
		return http.StatusBadRequest
	}
}

// TestHostileRequests sends raw bytes and reads until the server closes: it must, and
// with nothing but these answers.
func TestHostileRequests(t *testing.T) {
	const limit = 1000
	h := reply(limit)
	patient := Config{MaxHeaderBytes: 8 << 10, MaxHeaders: 20, IdleTimeout: 200 * time.Millisecond}
	hasty := patient // only where the time-out is the point: a busy machine is slow, too
	hasty.ReadHeaderTimeout, hasty.BodyGrace = 200*time.Millisecond, 50*time.Millisecond
	const post = "POST / HTTP/1.1\r\nHost: h\r\n"
	for name, c := range map[string]struct {
		raw       string
		halfClose bool
		want      []int // empty: closed without an answer
		handled   int64
	}{
		"good":                          {raw: post + "Content-Length: 2\r\n\r\n{}", want: []int{200}, handled: 1},
		"two good, kept alive":          {raw: strings.Repeat(post+"Content-Length: 2\r\n\r\n{}", 2), want: []int{200, 200}, handled: 2},
		"two lengths":                   {raw: post + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}!", want: []int{400}},
		"a list of lengths":             {raw: post + "Content-Length: 2, 3\r\n\r\n{}!", want: []int{400}},
		"negative length":               {raw: post + "Content-Length: -2\r\n\r\n{}", want: []int{400}},
		"length beyond 64 bits":         {raw: post + "Content-Length: 99999999999999999999\r\n\r\n{}", want: []int{400}},
		"length and chunks, smuggling":  {raw: post + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n", want: []int{200}, handled: 1},
		"chunks, then another request":  {raw: post + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n", want: []int{200}, handled: 1},
		"unknown transfer encoding":     {raw: post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", want: []int{501}},
		"obscured transfer encoding":    {raw: post + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", want: []int{400}},
		"two transfer encodings":        {raw: post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", want: []int{501}},
		"bad chunk size":                {raw: post + "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", want: []int{400}, handled: 1},
		"chunk without its end":         {raw: post + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx0\r\n\r\n", want: []int{400}, handled: 1},
		"endless chunk extension":       {raw: post + "Transfer-Encoding: chunked\r\n\r\n2;" + strings.Repeat("x", 8<<10), want: []int{400}, handled: 1},
		"chunk of 2^64 bytes":           {raw: post + "Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n", want: []int{400}, handled: 1},
		"chunked body over the limit":   {raw: post + "Transfer-Encoding: chunked\r\n\r\n7d0\r\n" + strings.Repeat("x", 2000), want: []int{413}, handled: 1},
		"announced over the limit":      {raw: post + "Content-Length: 2000\r\n\r\n{}", want: []int{413}, handled: 1},
		"announced as 100 MB":           {raw: post + "Content-Length: 104857600\r\n\r\n{}", want: []int{413}, handled: 1},
		"100-continue over the limit":   {raw: post + "Expect: 100-continue\r\nContent-Length: 2000\r\n\r\n", want: []int{413}, handled: 1},
		"huge header":                   {raw: post + "X: " + strings.Repeat("x", 32<<10) + "\r\n\r\n", want: []int{431}},
		"flood of header lines":         {raw: post + strings.Repeat("X: y\r\n", 30) + "\r\n", want: []int{431}},
		"slow header":                   {raw: "POST / HTTP/1.1\r\nHos", want: []int{400}},
		"says nothing":                  {raw: ""},
		"slow body":                     {raw: post + "Content-Length: 10\r\n\r\n{", want: []int{408}, handled: 1},
		"slow chunks":                   {raw: post + "Transfer-Encoding: chunked\r\n\r\n5\r\n{", want: []int{408}, handled: 1},
		"truncated body":                {raw: post + "Content-Length: 10\r\n\r\n{", halfClose: true, want: []int{400}, handled: 1},
		"half-closed after the request": {raw: post + "Content-Length: 2\r\n\r\n{}", halfClose: true, want: []int{200}, handled: 1},
		"no host":                       {raw: "POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", want: []int{400}},
		"line break in a header":        {raw: post + "X: a\rb\r\n\r\n", want: []int{400}},
		"header without a colon":        {raw: post + "nonsense\r\n\r\n", want: []int{400}},
		"not HTTP":                      {raw: "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", halfClose: true, want: []int{400}},
		"HTTP of the future":            {raw: "GET / HTTP/3.7\r\nHost: h\r\n\r\n", want: []int{505}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := patient
			if strings.HasPrefix(name, "slow") || name == "says nothing" {
				cfg = hasty
			}
			var handled atomic.Int64
			addr, _ := start(t, cfg, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				handled.Add(1)
				h(w, r)
			}))
			conn := dial(t, addr)
			written := make(chan struct{})
			go func() { // the server may stop reading before all is written
				defer close(written)
				_, _ = io.WriteString(conn, c.raw)
				if c.halfClose {
					_ = conn.(*net.TCPConn).CloseWrite()
				}
			}()
			got := answers(conn)
			conn.Close()
			<-written
			if !slices.Equal(got, c.want) {
				t.Errorf("answered %v, want %v", got, c.want)
			}
			if n := handled.Load(); n != c.handled {
				t.Errorf("the handler saw %d requests, want %d", n, c.handled)
			}
		})
	}
}

func TestContinueIsSentForABodyThatIsWanted(t *testing.T) {
	addr, _ := start(t, Config{}, reply(1000))
	c := dial(t, addr)
	r := bufio.NewReader(c)
	_, _ = io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
	if line, err := r.ReadString('\n'); err != nil || !strings.Contains(line, "100") {
		t.Fatalf("%q %v", line, err)
	}
	_, _ = r.ReadString('\n')
	_, _ = io.WriteString(c, "{}")
	if resp, err := http.ReadResponse(r, nil); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %v", resp, err)
	}
	c.Close()

	var asked atomic.Bool
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got100Continue: func() { asked.Store(true) }})
	req, _ := http.NewRequestWithContext(ctx, "POST", "http://"+addr, strings.NewReader(strings.Repeat("x", 2000)))
	req.Header.Set("Expect", "100-continue")
	tr := &http.Transport{ExpectContinueTimeout: time.Minute}
	defer tr.CloseIdleConnections()
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 413 || asked.Load() {
		t.Errorf("%d, continue sent: %v", resp.StatusCode, asked.Load())
	}
}

// TestSlowBodyInVirtualTime: a byte a second is too slow, 2 KiB a second is not,
// however long it takes, and the deadline does not outlive the body.
func TestSlowBodyInVirtualTime(t *testing.T) {
	for name, c := range map[string]struct {
		piece, pieces, want int
		atLeast, atMost     time.Duration
	}{
		"a byte a second": {1, 1000, 408, 10 * time.Second, 12 * time.Second},
		"2 KiB a second":  {2048, 300, 200, 300 * time.Second, 302 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bodies := new(Bodies)
				pipes, stop := startPipes(t, Config{}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					b, err := bodies.Read(w, r, 1<<20)
					if err != nil {
						w.WriteHeader(statusOf(err))
						return
					}
					b.Release()
					time.Sleep(10 * time.Minute) // a long answer: a read deadline left behind would end it
					if r.Context().Err() != nil {
						w.WriteHeader(500)
					}
				}))
				defer stop()
				conn := pipes.dial("10.0.0.1:1")
				defer conn.Close()
				begin := time.Now()
				written := make(chan struct{})
				go func() {
					defer close(written)
					fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n", c.piece*c.pieces)
					for range c.pieces {
						time.Sleep(time.Second)
						if _, err := conn.Write(bytes.Repeat([]byte("x"), c.piece)); err != nil {
							return
						}
					}
				}()
				codes := answers(conn)
				took := time.Since(begin)
				if c.want == 200 {
					took -= 10 * time.Minute
				}
				if !slices.Equal(codes, []int{c.want}) || took < c.atLeast || took > c.atMost {
					t.Errorf("%v after %v", codes, took)
				}
				conn.Close()
				<-written
			})
		})
	}
}

// TestUnreadSlowBodyDoesNotHang: net/http reads the rest of a body that the handler
// left before it lets the answer out.
func TestUnreadSlowBodyDoesNotHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pipes, stop := startPipes(t, Config{}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(401) }))
		defer stop()
		conn := pipes.dial("10.0.0.1:1")
		defer conn.Close()
		begin := time.Now()
		go func() { _, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{") }()
		codes := answers(conn)
		if took := time.Since(begin); !slices.Equal(codes, []int{401}) || took > 15*time.Second {
			t.Errorf("%v after %v", codes, took)
		}
	})
}

func TestIdleAndSilentConnectionsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pipes, stop := startPipes(t, Config{ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 60 * time.Second}, reply(10))
		defer stop()
		for raw, want := range map[string]time.Duration{"": 5 * time.Second, "GET / HT": 5 * time.Second, "GET / HTTP/1.1\r\nHost: h\r\n\r\n": 60 * time.Second} {
			conn := pipes.dial("10.0.0.1:1")
			begin := time.Now()
			go func() { _, _ = io.WriteString(conn, raw) }()
			answers(conn)
			if took := time.Since(begin); took < want || took > want+time.Second {
				t.Errorf("%q: closed after %v, want %v", raw, took, want)
			}
			conn.Close()
			synctest.Wait()
		}
	})
}

// TestClientThatStopsReading is dropped after WriteStall, and one whose model pauses
// for longer is not.
func TestClientThatStopsReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan time.Duration, 1)
		pipes, stop := startPipes(t, Config{WriteStall: 8 * time.Second}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			begin := time.Now()
			defer func() { ended <- time.Since(begin) }()
			for range 10 {
				if _, err := w.Write([]byte("data: x\n\n")); err != nil {
					return
				}
				if http.NewResponseController(w).Flush() != nil {
					return
				}
				time.Sleep(time.Minute) // the model thinks
			}
		}))
		defer stop()
		const get = "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
		conn := pipes.dial("10.0.0.1:1")
		go func() { _, _ = io.WriteString(conn, get) }()
		if codes := answers(conn); !slices.Equal(codes, []int{200}) || <-ended != 10*time.Minute {
			t.Errorf("a stream that pauses: %v", codes)
		}
		conn.Close()

		conn = pipes.dial("10.0.0.1:1")
		_, _ = io.WriteString(conn, get)
		if took := <-ended; took < 8*time.Second || took > 10*time.Second {
			t.Errorf("a client that does not read was dropped after %v", took)
		}
		conn.Close()
	})
}

func h2cClient(t *testing.T) *http.Transport {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: p}
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

func TestH2C(t *testing.T) {
	addr, _ := start(t, Config{}, reply(1000))
	tr := h2cClient(t)
	for _, c := range []struct {
		body string
		want int
	}{{"hello", 200}, {strings.Repeat("x", 2000), 413}} {
		req, _ := http.NewRequestWithContext(t.Context(), "POST", "http://"+addr, strings.NewReader(c.body))
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.ProtoMajor != 2 || resp.StatusCode != c.want || c.want == 200 && string(body) != c.body {
			t.Errorf("%s %d %q", resp.Proto, resp.StatusCode, body)
		}
	}
	req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://"+addr, nil)
	for i := range 200 {
		req.Header.Add("X", fmt.Sprint(i))
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 431 {
		t.Errorf("flood of header lines over h2: %d", resp.StatusCode)
	}
}

// TestH2CStalls: over HTTP/2 a write waits for the client's window, not for the socket.
func TestH2CStalls(t *testing.T) {
	ended := make(chan error, 1)
	addr, _ := start(t, Config{WriteStall: time.Second, BodyGrace: 50 * time.Millisecond, BodyMinRate: 1 << 20},
		http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == "POST" {
				_, err := new(Bodies).Read(w, r, 1000)
				w.WriteHeader(statusOf(err))
				return
			}
			var err error
			for chunk := make([]byte, 64<<10); err == nil; {
				_, err = w.Write(chunk)
			}
			<-r.Context().Done()
			ended <- err
		}))
	tr := h2cClient(t)
	req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://"+addr, nil)
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Error("no error for a client that does not read")
	}
	resp.Body.Close()

	pr, pw := io.Pipe()
	defer pw.Close()
	req, _ = http.NewRequestWithContext(t.Context(), "POST", "http://"+addr, pr)
	resp, err = tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusRequestTimeout {
		t.Errorf("a body that does not come: %d", resp.StatusCode)
	}
}

func TestDrainLetsStreamsFinish(t *testing.T) {
	for _, proto := range []string{"HTTP/1.1", "h2c"} {
		t.Run(proto, func(t *testing.T) {
			release := make(chan struct{})
			addr, srv := start(t, Config{}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(200)
				w.(http.Flusher).Flush()
				<-release
				_, _ = io.WriteString(w, "the end")
			}))
			tr := &http.Transport{}
			if proto == "h2c" {
				tr = h2cClient(t)
			}
			defer tr.CloseIdleConnections()
			req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://"+addr, nil)
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			drained := make(chan error, 1)
			go func() { drained <- Drain(t.Context(), srv) }()
			for { // until the listener is closed
				c, err := net.Dial("tcp", addr)
				if err != nil {
					break
				}
				c.Close()
			}
			select {
			case err := <-drained:
				t.Fatalf("drained with a stream in flight: %v", err)
			default:
			}
			close(release)
			if body, err := io.ReadAll(resp.Body); string(body) != "the end" || err != nil {
				t.Errorf("%q %v", body, err)
			}
			resp.Body.Close()
			if err := <-drained; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestDrainIsBounded(t *testing.T) {
	for _, proto := range []string{"HTTP/1.1", "h2c"} {
		t.Run(proto, func(t *testing.T) {
			var wg sync.WaitGroup
			in := make(chan struct{})
			wg.Add(1)
			addr, srv := start(t, Config{}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer wg.Done()
				close(in)
				<-r.Context().Done() // never by itself
			}))
			tr := &http.Transport{}
			if proto == "h2c" {
				tr = h2cClient(t)
			}
			defer tr.CloseIdleConnections()
			failed := make(chan error, 1)
			go func() {
				req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://"+addr, nil)
				resp, err := tr.RoundTrip(req)
				if err == nil {
					resp.Body.Close()
				}
				failed <- err
			}()
			<-in
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := Drain(ctx, srv); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			wg.Wait()
			if err := <-failed; err == nil {
				t.Error("an answer out of nothing")
			}
		})
	}
}

func TestPanicIsLogged(t *testing.T) {
	var log lines
	addr, srv := start(t, Config{Logger: logger(&log)}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("boom") }))
	c := dial(t, addr)
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	answers(c)
	if err := Drain(t.Context(), srv); err != nil {
		t.Error(err)
	}
	if !strings.Contains(log.String(), "level=ERROR") || !strings.Contains(log.String(), "boom") {
		t.Errorf("log: %s", log.String())
	}
}

func TestMultipartFilesAreRemoved(t *testing.T) {
	var form atomic.Pointer[http.Request]
	addr, srv := start(t, Config{}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(1); err != nil {
			t.Error(err)
		}
		form.Store(r)
	}))
	const body = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n"
	full := body + strings.Repeat("x", 64<<10) + "\r\n--b--\r\n"
	c := dial(t, addr)
	fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n%s", len(full), full)
	answers(c)
	if err := Drain(t.Context(), srv); err != nil {
		t.Error(err)
	}
	if _, err := form.Load().MultipartForm.File["file"][0].Open(); err == nil {
		t.Error("the temporary file is still there")
	}
}
