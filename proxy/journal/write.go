package journal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// entry is a record on its way to the file. Kind 0 is a probe: it has no record, tries what
// is kept and waits for the disk.
type entry struct {
	kind     int
	payload  []byte
	internal bool // it comes from the Log itself: Close does not refuse it
	sync     bool // it waits for the disk
	keep     bool // it is kept where the disk refuses
	held     *pending
	err      error
	done     chan struct{} // gets one value when it is finished, and one before if it is to lead
	lead     bool          // it is to write for the others now
	kept     bool          // it was put aside: nobody waits for it

	// Of a usage.
	id, incarnation uint64
	outcome         string
	at              int64
	parts           []Part
	own             []byte // payload's buffer, for the next that uses the entry

	upTo    int64 // where its frame ends
	written bool
}

func (l *Log) entry(kind int) *entry {
	e, _ := l.entries.Get().(*entry)
	if e == nil {
		e = &entry{done: make(chan struct{}, 1)}
	}
	*e = entry{kind: kind, done: e.done, own: e.own, parts: e.parts}
	return e
}

// probe tries whether the disk takes what is kept.
func (l *Log) probe() error {
	e := l.entry(0)
	e.internal, e.sync = true, true
	return l.submit(e)
}

// submit brings an entry into the file, or refuses it. Whoever finds nobody writing writes,
// for all that come meanwhile; the others wait. The entry is not the caller's afterwards.
func (l *Log) submit(e *entry) error {
	l.mu.Lock()
	if ok, err := l.admit(e); !ok {
		l.mu.Unlock()
		l.release(e)
		return err
	}
	l.queue = append(l.queue, e)
	if l.writing {
		l.mu.Unlock()
		<-e.done
		if !e.lead {
			return l.finished(e)
		}
		l.mu.Lock()
	}
	l.writing = true
	l.write()
	<-e.done
	return l.finished(e)
}

func (l *Log) finished(e *entry) error {
	err := e.err
	l.release(e)
	return err
}

// release gives an entry back for another.
func (l *Log) release(e *entry) {
	if cap(e.own) > 4<<10 {
		e.own = nil
	}
	clear(e.parts) // names of tenants and budgets
	*e = entry{done: e.done, own: e.own, parts: e.parts[:0]}
	l.entries.Put(e)
}

// admit says whether an entry goes to the writer; if not, err is what its caller is told.
func (l *Log) admit(e *entry) (ok bool, err error) {
	if l.closing && !e.internal {
		return false, ErrClosed
	}
	switch e.kind {
	case recReservation:
		ok, err := l.admitReservation(e.held)
		if ok {
			l.reserving++
		}
		return ok, err
	case recUsage:
		return l.admitUsage(e)
	case recClosed:
		b := l.books.find(e.incarnation)
		switch {
		case b == nil || b.closed:
			return false, nil
		case b == l.own && len(b.open)+l.reserving > 0:
			return false, errors.New("requests are still open")
		case b == l.own:
			l.told = true
		}
	}
	return true, nil
}

func (l *Log) admitReservation(p *pending) (bool, error) {
	switch {
	case l.told:
		return false, ErrClosed
	case l.failing != nil:
		return false, fmt.Errorf("%w: %w", ErrFailing, l.failing)
	case len(l.own.open)+l.reserving >= maxOpen:
		return false, ErrFull
	case len(l.own.totals) >= maxAccounts && l.own.unseen(p):
		l.trim = true
		l.rouse()
		return false, ErrFull
	}
	return true, nil
}

func (l *Log) admitUsage(e *entry) (bool, error) {
	b := l.own
	if e.incarnation != 0 {
		if b = l.books.find(e.incarnation); b == nil {
			return false, nil // it is closed
		}
	}
	if e.outcome == Lost && e.incarnation != 0 {
		t := b.totals[e.parts[0].Account]
		return t == nil || t.lost == 0, nil
	}
	if e.id != 0 {
		p := b.open[e.id]
		if p == nil || p.settling {
			return false, ErrUnknown
		}
		p.settling = true
	}
	if l.failing == nil || !e.keep {
		return true, nil
	}
	l.keep(e)
	return false, nil
}

// keep puts a usage aside for a disk that will take it. There are at most maxOpen that end a
// reservation; of the others, which are no money, those beyond maxKept are dropped.
func (l *Log) keep(e *entry) {
	if e.id == 0 && len(l.kept) >= maxKept {
		l.metrics.dropped.Inc()
		return
	}
	l.kept = append(l.kept, &entry{
		kind: e.kind, payload: bytes.Clone(e.payload), keep: true, kept: true,
		id: e.id, incarnation: e.incarnation, outcome: e.outcome, at: e.at, parts: slices.Clone(e.parts),
	})
	l.rouse()
}

// rouse asks the syncer for a round.
func (l *Log) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// write writes what is queued, batch after batch, and at last lets somebody else do it. It
// is called with mu held and writing set, and returns without mu.
func (l *Log) write() {
	for round := 0; len(l.queue) > 0; round++ {
		if round == maxRounds {
			next := l.queue[0]
			l.mu.Unlock()
			next.lead = true
			next.done <- struct{}{}
			return
		}
		batch := l.queue
		l.queue, l.spare = l.spare[:0], nil
		probe := slices.ContainsFunc(batch, func(e *entry) bool { return e.kind == 0 })
		if probe {
			n := min(len(l.kept), maxRetry)
			batch = append(l.kept[:n:n], batch...)
			l.kept = l.kept[n:]
			l.trimNow()
		}
		rotate := l.rotate || l.current.end-l.current.begin >= l.cfg.Segment
		l.mu.Unlock()
		n, bad := l.writeBatch(batch, rotate)
		l.mu.Lock()
		l.finish(batch, n, bad)
		if probe && bad == nil && len(l.kept) == 0 {
			l.recoverDisk()
		}
		clear(batch)
		l.spare = batch[:0]
	}
	l.writing = false
	l.mu.Unlock()
}

// trimNow forgets accounts that ended an hour ago, if there are too many, at most once a
// minute.
func (l *Log) trimNow() {
	now := l.cfg.Now()
	if !l.trim || now.Sub(l.trimmed) < time.Minute {
		return
	}
	l.trim, l.trimmed = false, now
	if err := l.own.trim(now.Add(-forgetSoon).UnixNano()); err != nil {
		l.cfg.Logger.Error("journal cannot forget accounts", "error", err)
	}
}

// writeBatch writes the entries' frames with one call and says how many bytes hold; bad is
// why not all of them, or why the disk may not have them.
func (l *Log) writeBatch(batch []*entry, rotate bool) (end int64, bad error) {
	sync := l.cfg.SyncEach || slices.ContainsFunc(batch, func(e *entry) bool { return e.sync })
	if rotate {
		if err := l.next(sync); err != nil {
			return l.current.end, err
		}
	}
	from, buf := l.current.end, l.buf[:0]
	for _, e := range batch {
		if e.kind != 0 {
			buf = l.current.appendFrame(buf, from+int64(len(buf)), e.payload)
		}
		e.upTo = from + int64(len(buf))
	}
	n := 0
	if len(buf) > 0 {
		n, bad = l.file.WriteAt(buf, from)
		if bad == nil && n < len(buf) {
			bad = io.ErrShortWrite
		}
	}
	end = from
	for _, e := range batch {
		if e.written = e.upTo <= from+int64(n); e.written {
			end = e.upTo
		}
	}
	if l.buf = buf; cap(buf) > maxBuffer {
		l.buf = nil
	}
	if bad == nil && sync {
		bad = l.syncCurrent()
	}
	return end, bad
}

// syncCurrent brings the current segment to the disk, also its name.
func (l *Log) syncCurrent() error {
	l.mu.Lock()
	renamed := l.renamed
	l.mu.Unlock()
	err := l.timedSync(l.file)
	if err == nil && renamed {
		err = l.folder.fs.SyncDir(l.folder.dir)
	}
	if err != nil {
		l.mu.Lock()
		l.rotate = true // see syncOnce
		l.mu.Unlock()
	}
	return err
}

// finish enters a batch into the books and tells those that wait. The caller holds mu.
func (l *Log) finish(batch []*entry, end int64, bad error) {
	if bad != nil {
		l.refused(end, bad)
	}
	l.metrics.bytes.Add(float64(end - l.current.end))
	if end > l.current.end && !l.dirty {
		l.dirty = true
		l.rouse()
	}
	l.current.end = end
	for _, e := range batch {
		if e.written {
			l.enter(e)
		}
		if bad != nil {
			l.fail(e, bad)
		}
		if e.kind == recReservation {
			l.reserving--
		}
		if !e.kept {
			e.done <- struct{}{}
		}
	}
}

// enter enters a record that is in the file.
func (l *Log) enter(e *entry) {
	switch e.kind {
	case recReservation:
		l.metrics.reserved.Inc()
		e.held.segment = l.current.segment
		l.own.open[e.held.id] = e.held
	case recUsage:
		l.metrics.settled.Inc()
		l.current.saw(e.at)
		b := l.own
		if e.incarnation != 0 {
			b = l.books.find(e.incarnation)
		}
		if b == nil {
			return
		}
		if p := b.usage(e.id, e.outcome, e.parts); p != nil && cap(p.payload) <= 4<<10 {
			l.idle.Put(p)
		}
	case recClosed:
		if b := l.books.find(e.incarnation); b == l.own {
			b.closed = true
		} else {
			l.books = slices.DeleteFunc(slices.Clone(l.books), func(x *book) bool { return x == b })
		}
	}
}

// fail tells an entry of a batch that did not reach the disk as it should. What is in the
// file all the same and was to be refused is taken back by a record.
func (l *Log) fail(e *entry, bad error) {
	switch {
	case e.kind == recUsage && e.keep:
		if !e.written && e.kept {
			l.kept = append(l.kept, e)
		} else if !e.written {
			l.keep(e)
		}
	case e.kind == recReservation && e.written && !l.cfg.SyncEach:
		// Another one of the batch failed.
	case e.kind == recReservation && e.written:
		e.err = fmt.Errorf("%w: %w", ErrFailing, bad)
		e.held.settling = true
		u := &Usage{ID: e.held.id, Time: l.cfg.Now(), Outcome: Cancelled}
		cancel := l.usageEntry(u)
		l.keep(cancel)
		l.release(cancel)
	default:
		e.err = fmt.Errorf("%w: %w", ErrFailing, bad)
	}
}

// refused notes that the disk does not take what it should, and cuts off what it took in
// part; if even that fails, the next batch begins a new segment. Only the one who writes
// calls it, with mu held.
func (l *Log) refused(end int64, bad error) {
	l.fails(bad)
	if size, err := l.file.Size(); err != nil || size > end {
		if err != nil || l.file.Truncate(end) != nil {
			l.rotate = true
		}
	}
}

// fails notes why the disk does not take what it should. The caller holds mu.
func (l *Log) fails(bad error) {
	if l.failing == nil {
		l.cfg.Logger.Error("journal cannot write, requests of budgeted tenants are refused until it can", "error", bad)
		l.metrics.failing.Set(1)
	}
	l.failing = bad
	l.rouse()
}

// recoverDisk notes that the disk took everything. The caller holds mu.
func (l *Log) recoverDisk() {
	if l.failing != nil {
		l.cfg.Logger.Info("journal can write again")
		l.metrics.failing.Set(0)
	}
	l.failing = nil
}

// next begins another segment, with the books as they stand. Only the one who writes calls
// it. What the old one has is synced by the syncer, unless sync says now.
func (l *Log) next(sync bool) error {
	now := l.cfg.Now()
	h := head{segment: 1, incarnation: l.cfg.Incarnation, node: l.cfg.Node, boot: l.cfg.BootID, created: now.UnixNano()}
	last := l.current
	if l.file == nil && len(l.segments) > 0 {
		last = l.segments[len(l.segments)-1]
	}
	if last.segment != 0 {
		h.segment = last.segment + 1
		h.before = &before{segment: last.segment, end: last.end, first: last.first, last: last.last}
	}
	l.mu.Lock()
	err, many := l.own.trim(now.Add(-forgetAfter).UnixNano()), len(l.retired) >= maxRetired
	l.mu.Unlock()
	if err != nil {
		return err
	}
	if l.file != nil && (sync || many) {
		if err := l.timedSync(l.file); err != nil {
			return err
		}
	}
	file, size, err := l.folder.begin(h, l.books, sync)
	if err != nil {
		return fmt.Errorf("begin a segment: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		last.dated = true
		l.segments = append(slices.Clip(l.segments), last)
		l.retired = append(l.retired, l.file)
	}
	l.file, l.rotate, l.renamed = file, false, l.renamed || !sync
	l.current = segment{origin: origin{h.segment, h.incarnation}, node: h.node, created: h.created, begin: size, end: size}
	if !l.dirty {
		l.dirty = true
		l.rouse()
	}
	return nil
}
