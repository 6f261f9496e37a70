package edge

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
)

func post(body io.Reader, length int64) *http.Request {
	r := httptest.NewRequest("POST", "/", body)
	r.ContentLength = length
	return r
}

func TestBodySizes(t *testing.T) {
	bodies := new(Bodies)
	for _, n := range []int{0, 1, 4095, 4096, 4097, 32_769, 65_536, 65_537, 1 << 20, 5 << 20} {
		want := bytes.Repeat([]byte("abcdefg"), n/7+1)[:n]
		for name, length := range map[string]int64{"announced": int64(n), "in chunks": -1} {
			for _, limit := range []int64{int64(n), int64(n) + 1, 8 << 20} {
				b, err := bodies.Read(httptest.NewRecorder(), post(bytes.NewReader(want), length), limit)
				if err != nil {
					t.Fatalf("%d %s, limit %d: %v", n, name, limit, err)
				}
				if !bytes.Equal(b.Bytes(), want) {
					t.Fatalf("%d %s: read %d other bytes", n, name, len(b.Bytes()))
				}
				b.Release()
			}
			if n > 0 {
				w := httptest.NewRecorder()
				_, err := bodies.Read(w, post(bytes.NewReader(want), length), int64(n)-1)
				var large TooLarge
				if !errors.As(err, &large) || large.Limit != int64(n)-1 || w.Header().Get("Connection") != "close" {
					t.Fatalf("%d %s over the limit: %v %v", n, name, err, w.Header())
				}
			}
		}
	}
}

type untouchable struct{ t *testing.T }

func (u untouchable) Read([]byte) (int, error) {
	u.t.Error("read although its length was refused")
	return 0, io.EOF
}

func TestBodyErrors(t *testing.T) {
	bodies := new(Bodies)
	if _, err := bodies.Read(httptest.NewRecorder(), post(untouchable{t}, 11), 10); !errors.As(err, new(TooLarge)) {
		t.Error(err)
	}
	for _, c := range []struct{ from, want error }{
		{os.ErrDeadlineExceeded, ErrTooSlow},
		{ErrTooSlow, ErrTooSlow},
		{io.ErrUnexpectedEOF, ErrTruncated},
		{&net.OpError{Op: "read", Err: errors.New("connection reset")}, ErrClientGone},
		{errors.New("malformed chunked encoding"), ErrMalformed},
	} {
		_, err := bodies.Read(httptest.NewRecorder(), post(io.MultiReader(strings.NewReader("some"), iotest.ErrReader(c.from)), -1), 10)
		if !errors.Is(err, c.want) {
			t.Errorf("%v: %v, want %v", c.from, err, c.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := bodies.Read(httptest.NewRecorder(), post(iotest.ErrReader(errors.New("stream reset")), -1).WithContext(ctx), 10); !errors.Is(err, ErrClientGone) {
		t.Error(err)
	}
}

// TestAnnouncedBodyTakesNoRoom: memory follows what arrives.
func TestAnnouncedBodyTakesNoRoom(t *testing.T) {
	b, err := new(Bodies).read(post(strings.NewReader("x"), 8<<20), 8<<20)
	if err != nil || cap(b.data) > 1<<openClass {
		t.Errorf("%d bytes for one, %v", cap(b.data), err)
	}
}

// TestBodyOutlivesItsReaders: a transport may still read when the pipeline is done.
func TestBodyOutlivesItsReaders(t *testing.T) {
	bodies := new(Bodies)
	var wg sync.WaitGroup
	for i := range 200 {
		want := strings.Repeat(string(rune('a'+i%26)), 5000)
		b, err := bodies.Read(httptest.NewRecorder(), post(strings.NewReader(want), int64(len(want))), 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		one, two := b.Open(), b.Open()
		for _, r := range []io.ReadCloser{one, two} {
			wg.Go(func() {
				got, err := io.ReadAll(r)
				if err != nil || string(got) != want {
					t.Errorf("read %.10q…, %v", got, err)
				}
				r.Close()
				r.Close()
				if _, err := r.Read(make([]byte, 1)); err == nil {
					t.Error("read after close")
				}
			})
		}
		b.Release()
	}
	wg.Wait()

	b, err := bodies.Read(httptest.NewRecorder(), post(http.NoBody, 0), 10)
	if err != nil || len(b.Bytes()) != 0 {
		t.Error(err)
	}
	b.Release()
	defer func() {
		if recover() == nil {
			t.Error("a second release went unnoticed")
		}
	}()
	b.Release()
}

func TestBodyBuffersAreReused(t *testing.T) {
	bodies := new(Bodies)
	payload := bytes.Repeat([]byte("x"), 60<<10)
	src := bytes.NewReader(payload)
	r := post(src, int64(len(payload)))
	r.Body = io.NopCloser(src)
	w := httptest.NewRecorder()
	n := testing.AllocsPerRun(100, func() {
		src.Reset(payload)
		b, err := bodies.Read(w, r, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		b.Release()
	})
	if n > 3 { // the Body and the pool's slice header; a collection in between may cost a buffer
		t.Errorf("%v allocations", n)
	}
}
