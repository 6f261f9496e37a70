package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Why a body could not be read. They say what to answer: 413, 408, 400, 400, nothing.
var (
	ErrTooSlow    = errors.New("the request body arrives too slowly")
	ErrTruncated  = errors.New("the request body ends before its announced length")
	ErrMalformed  = errors.New("the request body is not framed as HTTP demands")
	ErrClientGone = errors.New("the client went away while sending its body")
)

// TooLarge refuses a body above Limit bytes.
type TooLarge struct{ Limit int64 }

func (e TooLarge) Error() string {
	return fmt.Sprintf("the request body is larger than %d bytes", e.Limit)
}

const (
	minClass  = 12 // the smallest pooled buffer is 1<<minClass bytes, the
	maxClass  = 24 // largest 1<<maxClass; larger ones go to the garbage collector
	openClass = 16 // the largest that is taken on the word of Content-Length alone

	linger = time.Second // for the rest of a body that was refused
)

// Bodies reads request bodies into pooled buffers. It is safe for concurrent use; the
// zero value is ready.
type Bodies struct {
	pools [maxClass + 1]sync.Pool
}

// Read reads the body of r, at most limit bytes. A Content-Length above the limit is
// refused before a byte is read, hence before a client that sent Expect: 100-continue
// is told to go on. On an error w is told to close the connection, since the rest of the
// body may stand in it, and gets a second for that rest; the error is TooLarge, ErrTooSlow, ErrTruncated, ErrMalformed
// or ErrClientGone. The caller must Release the Body.
func (bs *Bodies) Read(w http.ResponseWriter, r *http.Request, limit int64) (*Body, error) {
	b, err := bs.read(r, limit)
	if err != nil && r.ProtoMajor == 1 {
		w.Header().Set("Connection", "close")
		// The server reads on for a while after the answer, lest a reset overtake it.
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(linger))
	}
	return b, err
}

func (bs *Bodies) read(r *http.Request, limit int64) (*Body, error) {
	if r.ContentLength > limit {
		return nil, TooLarge{limit}
	}
	b := &Body{from: bs}
	b.refs.Store(1)
	if r.Body == nil || r.Body == http.NoBody {
		return b, nil
	}
	b.grow(classOf(min(max(r.ContentLength, 1), 1<<openClass)))
	for {
		if len(b.data) == cap(b.data) {
			b.grow(classOf(int64(cap(b.data)) + 1))
		}
		// No further than one byte past the limit, which is enough to see it passed.
		room := min(int64(cap(b.data)), limit+1)
		n, err := r.Body.Read(b.data[len(b.data):room])
		b.data = b.data[:len(b.data)+n]
		if int64(len(b.data)) > limit {
			b.Release()
			return nil, TooLarge{limit}
		}
		if err == io.EOF {
			return b, nil
		}
		if err != nil {
			b.Release()
			return nil, classify(r.Context(), err)
		}
	}
}

func classify(ctx context.Context, err error) error {
	var ne net.Error
	switch {
	case errors.Is(err, ErrTooSlow), errors.Is(err, os.ErrDeadlineExceeded):
		return ErrTooSlow
	case errors.Is(err, io.ErrUnexpectedEOF):
		return ErrTruncated
	case errors.As(err, &ne), ctx.Err() != nil:
		return ErrClientGone
	default:
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
}

// classOf is the smallest class that holds n bytes.
func classOf(n int64) int { return max(minClass, bits.Len64(uint64(n-1))) }

// Body is a request body in memory. It lives until Release has been called and every
// reader of Open is closed, then its buffer goes back to the pool: an HTTP transport may
// read a request's body for a while after it returned, and closes it when done.
type Body struct {
	data []byte
	from *Bodies
	refs atomic.Int32
}

// NewBody is a body that is there already. data must not be written to any more.
func NewBody(data []byte) *Body {
	b := &Body{data: slices.Clip(data), from: &Bodies{}}
	b.refs.Store(1)
	return b
}

// Bytes is the body, valid until Release.
func (b *Body) Bytes() []byte { return b.data }

// Open gives a reader from the start, for an http.Request's Body or GetBody. To be
// called before Release.
func (b *Body) Open() io.ReadCloser {
	b.refs.Add(1)
	return &bodyReader{b: b}
}

// Share is one more hold of the body, to be released like the first one. To be called before Release.
func (b *Body) Share() *Body {
	b.refs.Add(1)
	return b
}

// Release gives up the caller's hold; call it once.
func (b *Body) Release() {
	switch refs := b.refs.Add(-1); {
	case refs == 0:
		b.from.put(b.data)
		b.data = nil
	case refs < 0:
		panic("edge: Body released twice")
	}
}

// grow moves the body to a buffer of the given class.
func (b *Body) grow(class int) {
	var fresh []byte
	if class <= maxClass {
		if p, ok := b.from.pools[class].Get().(*[]byte); ok {
			fresh = *p
		}
	}
	if fresh == nil {
		fresh = make([]byte, 0, 1<<class)
	}
	fresh = append(fresh, b.data...)
	b.from.put(b.data)
	b.data = fresh
}

func (bs *Bodies) put(buf []byte) {
	if cap(buf) == 0 {
		return
	}
	buf = buf[:0]
	if class := classOf(int64(cap(buf))); class <= maxClass && cap(buf) == 1<<class {
		bs.pools[class].Put(&buf)
	}
}

// bodyReader may be read and closed by different goroutines, as a transport does.
type bodyReader struct {
	mu     sync.Mutex
	b      *Body
	off    int
	closed bool
}

func (r *bodyReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, http.ErrBodyReadAfterClose
	}
	if r.off == len(r.b.data) {
		return 0, io.EOF
	}
	n := copy(p, r.b.data[r.off:])
	r.off += n
	return n, nil
}

func (r *bodyReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.closed = true
		r.b.Release()
	}
	return nil
}
