package journal

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
)

// version of the form of the files.
const version = 1

// folder is where the segments are.
type folder struct {
	fs  FS
	dir string
	log *slog.Logger
}

func (f folder) path(name string) string { return filepath.Join(f.dir, name) }

// segment is what is known of a file without reading it.
type segment struct {
	origin
	node    string
	created int64 // ns; 0: not known
	begin   int64 // bytes of its head and checkpoint; 0: not known
	end     int64 // bytes that hold
	dated   bool  // first and last, the times of its earliest and latest usage, are known
	first   int64
	last    int64
}

// saw widens the times by a usage record's.
func (s *segment) saw(at int64) {
	if s.first == 0 || at < s.first {
		s.first = at
	}
	s.last = max(s.last, at)
}

// segments lists the files by number, with what their heads say, and names what is left of
// beginning one that was never finished.
func (f folder) segments() (found []segment, unfinished []string, err error) {
	all, err := f.fs.ReadDir(f.dir)
	if err != nil {
		return nil, nil, err
	}
	for _, name := range all {
		if o, ok := parseName(name); ok {
			found = append(found, segment{origin: o})
		} else if strings.HasSuffix(name, newSuffix) {
			unfinished = append(unfinished, name)
		}
	}
	slices.SortFunc(found, func(a, b segment) int {
		return cmp.Or(cmp.Compare(a.segment, b.segment), cmp.Compare(a.incarnation, b.incarnation))
	})
	for i := range found {
		if err := f.look(found, i); err != nil {
			return nil, nil, err
		}
	}
	return found, unfinished, nil
}

// look reads a segment's head, which tells of the one before it, too. One that cannot be read
// tells nothing.
func (f folder) look(all []segment, i int) error {
	s := &all[i]
	file, err := f.fs.Open(f.path(s.name()))
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if s.end, err = file.Size(); err != nil {
		return fmt.Errorf("%s: %w", s.name(), err)
	}
	in := newScanner(file, s.origin, s.end)
	h, err := in.head()
	if errors.Is(err, errNoHead) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", s.name(), err)
	}
	s.created, s.node = h.created, h.node
	if b := h.before; b != nil && i > 0 && all[i-1].segment == b.segment {
		p := &all[i-1]
		p.end, p.dated, p.first, p.last = b.end, true, b.first, b.last
	}
	return nil
}

// errNoHead is a segment whose beginning is damaged.
var errNoHead = errors.New("the head is damaged")

// errNewer is a segment of a later form.
var errNewer = errors.New("it was written by a newer version of headgate: start that version")

// head reads the first record.
func (s *scanner) head() (head, error) {
	payload, at, err := s.next()
	var bad *badStretch
	if errors.Is(err, io.EOF) || errors.As(err, &bad) || err == nil && at != 0 {
		return head{}, errNoHead
	}
	if err != nil {
		return head{}, err
	}
	kind, message, err := parseRecord(payload)
	if err != nil || kind != recHead {
		return head{}, errNoHead
	}
	h, err := parseHead(message)
	switch {
	case err != nil || h.segment != s.from.segment || h.incarnation != s.from.incarnation:
		return head{}, errNoHead
	case h.version > version:
		return head{}, errNewer
	}
	return h, nil
}

// checkpoint reads the records that follow the head.
func (s *scanner) checkpoint(h head) (bs books, err error) {
	for range h.checkpoints {
		payload, _, err := s.next()
		var bad *badStretch
		if errors.Is(err, io.EOF) || errors.As(err, &bad) {
			return nil, errNoHead
		}
		if err != nil {
			return nil, err
		}
		kind, message, err := parseRecord(payload)
		if err == nil && kind == recCheckpoint {
			bs, err = bs.load(message, s.from.segment)
		}
		if err != nil || kind != recCheckpoint {
			return nil, errNoHead
		}
	}
	return bs, nil
}

// begin makes a segment of a head and a checkpoint of the books. It appears under its name
// when it is whole; with sync it is on the disk then.
func (f folder) begin(h head, bs books, sync bool) (file File, size int64, err error) {
	o := origin{h.segment, h.incarnation}
	var parts [][]byte
	for _, b := range bs {
		parts = append(parts, b.checkpoint()...)
	}
	h.version, h.checkpoints = version, uint64(len(parts))
	rec, from := begin(nil, recHead)
	text := o.appendFrame(nil, 0, end(putHead(rec, &h), from))
	for _, p := range parts {
		text = o.appendFrame(text, int64(len(text)), p)
	}
	name := f.path(o.name())
	file, err = f.fs.Create(name + newSuffix)
	if err != nil {
		return nil, 0, err
	}
	if err := f.fill(file, text, name, sync); err != nil {
		_ = f.fs.Remove(name + newSuffix) // or the next Open does
		return nil, 0, errors.Join(err, file.Close())
	}
	return file, int64(len(text)), nil
}

// fill writes what a new file begins with, and gives it its name.
func (f folder) fill(file File, text []byte, name string, sync bool) error {
	if n, err := file.WriteAt(text, 0); err != nil || n < len(text) {
		return cmp.Or(err, io.ErrShortWrite)
	}
	if sync {
		if err := file.Sync(); err != nil {
			return err
		}
	}
	if err := f.fs.Rename(name+newSuffix, name); err != nil || !sync {
		return err
	}
	return f.fs.SyncDir(f.dir)
}

// recovered is what a folder says.
type recovered struct {
	segments []segment
	books    books // of what is not closed
}

// recoverBooks reads the folder's books: the newest checkpoint that is whole, and every record
// since.
func (f folder) recoverBooks() (recovered, error) {
	found, unfinished, err := f.segments()
	if err != nil {
		return recovered{}, err
	}
	for _, name := range unfinished {
		if err := f.fs.Remove(f.path(name)); err != nil {
			return recovered{}, err
		}
	}
	r := recovered{segments: found}
	base, err := f.base(&r)
	if err != nil {
		return recovered{}, err
	}
	for i := max(base, 0); i < len(found); i++ {
		if i > 0 && i > base && found[i].segment != found[i-1].segment+1 {
			for _, b := range r.books {
				b.damage("a segment before " + found[i].name() + " is missing")
			}
		}
		if err := f.replay(&r, &found[i], i == base); err != nil {
			return recovered{}, fmt.Errorf("%s: %w", found[i].name(), err)
		}
	}
	r.books = slices.DeleteFunc(r.books, func(b *book) bool { return b.closed })
	return r, nil
}

// base finds the newest segment with a whole checkpoint and takes its books; −1: there is
// none.
func (f folder) base(r *recovered) (int, error) {
	for i := len(r.segments) - 1; i >= 0; i-- {
		s := &r.segments[i]
		err := f.scan(s, func(in *scanner) error {
			h, err := in.head()
			if err == nil {
				r.books, err = in.checkpoint(h)
			}
			return err
		})
		if !errors.Is(err, errNoHead) {
			return i, err
		}
		f.log.Warn("journal segment has a damaged beginning, what it says of its process may not be whole", "file", f.path(s.name()))
		r.books = nil
	}
	return -1, nil
}

// scan opens a segment.
func (f folder) scan(s *segment, do func(*scanner) error) error {
	file, err := f.fs.Open(f.path(s.name()))
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	return do(newScanner(file, s.origin, s.end))
}

// replay enters a segment's records. Of one that is not the base the beginning is damaged.
func (f folder) replay(r *recovered, s *segment, base bool) error {
	own := r.books.find(s.incarnation)
	if own == nil {
		own = newBook(s.incarnation, s.node, "")
		r.books = append(r.books, own)
	}
	if !base {
		own.damage("the beginning of " + s.name() + " is damaged")
	}
	s.first, s.last, s.dated = 0, 0, true
	return f.scan(s, func(in *scanner) error {
		var u Usage
		for {
			payload, at, err := in.next()
			var bad *badStretch
			switch {
			case errors.Is(err, io.EOF):
				return nil
			case errors.As(err, &bad):
				f.warn(s, bad)
				own.damage(bad.reason(s))
			case err != nil:
				return err
			default:
				if err := r.enter(s, own, payload, &u); err != nil {
					f.log.Warn("journal record cannot be read", "file", f.path(s.name()), "offset", at, "error", err)
					own.damage(fmt.Sprintf("malformed at %s:%d", s.name(), at))
				}
			}
		}
	})
}

// reason says what a bad stretch does to the books.
func (b *badStretch) reason(s *segment) string {
	if b.to == s.end {
		return fmt.Sprintf("torn at %s:%d", s.name(), b.from)
	}
	return fmt.Sprintf("checksum at %s:%d", s.name(), b.from)
}

func (f folder) warn(s *segment, bad *badStretch) {
	f.log.Warn("journal is damaged, what stood there is passed over", "file", f.path(s.name()), "offset", bad.from, "bytes", bad.to-bad.from)
}

// enter enters one record.
func (r *recovered) enter(s *segment, own *book, payload []byte, u *Usage) error {
	kind, message, err := parseRecord(payload)
	if err != nil {
		return err
	}
	switch kind {
	case recReservation:
		return own.reserve(bytes.Clone(payload), s.segment)
	case recUsage:
		if err := names(nil).usage(message, u); err != nil {
			return err
		}
		s.saw(nanos(u.Time))
		b := own
		if u.Incarnation != 0 && u.Incarnation != own.incarnation {
			b = r.books.find(u.Incarnation)
		}
		if b != nil { // nil: it is closed
			b.usage(u.ID, u.Outcome, u.Parts)
		}
	case recClosed:
		f := fields{rest: message}
		for f.next() {
			if b := r.books.find(f.v); f.field == 1 && b != nil {
				b.closed = true
			}
		}
		return f.err()
	case recStop:
		own.stopped = true
	}
	return nil
}
