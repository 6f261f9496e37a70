package proxy

import (
	"errors"
	"net/http"
	"sync"
)

// detached writes to a client in a goroutine of its own, so that one that reads slowly holds up
// nobody else who waits for the same answer. Beyond `most` bytes that the client has not taken
// Write waits. It is for one goroutine at a time, which must call Close.
type detached struct {
	w       http.ResponseWriter
	flusher *http.ResponseController
	most    int64

	mu     sync.Mutex
	moved  sync.Cond // something of what follows has changed
	buf    []byte
	flush  bool
	closed bool
	err    error         // of the client
	ended  chan struct{} // when nothing touches w any more
}

// errClosed: nothing is written after the end.
var errClosed = errors.New("the answer has ended")

func detach(w http.ResponseWriter, most int64) *detached {
	d := &detached{w: w, most: most, flusher: http.NewResponseController(w), ended: make(chan struct{})}
	d.moved.L = &d.mu
	go d.run()
	return d
}

// Write takes a copy of p. It fails with what became of an earlier write.
func (d *detached) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.err == nil && !d.closed && len(d.buf) > 0 && int64(len(d.buf)+len(p)) > d.most {
		d.moved.Wait()
	}
	switch {
	case d.err != nil:
		return 0, d.err
	case d.closed:
		return 0, errClosed
	}
	d.buf = append(d.buf, p...)
	d.moved.Broadcast()
	return len(p), nil
}

// Flush has sent what was written, soon.
func (d *detached) Flush() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.flush = true
	d.moved.Broadcast()
	return d.err
}

// Close waits until all is written, or the client is gone.
func (d *detached) Close() error {
	d.mu.Lock()
	d.closed = true
	d.moved.Broadcast()
	d.mu.Unlock()
	<-d.ended
	return d.err
}

func (d *detached) run() {
	defer close(d.ended)
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		for len(d.buf) == 0 && !d.flush && !d.closed {
			d.moved.Wait()
		}
		if len(d.buf) == 0 && !d.flush {
			return
		}
		buf, flush := d.buf, d.flush
		d.buf, d.flush = nil, false
		d.mu.Unlock()
		err := error(nil)
		if len(buf) > 0 {
			_, err = d.w.Write(buf)
		}
		if err == nil && flush {
			err = d.flusher.Flush()
		}
		d.mu.Lock()
		if d.err = err; err != nil {
			d.buf = nil
			d.moved.Broadcast()
			return
		}
		d.moved.Broadcast()
	}
}
