package contentlog

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Filter picks entries: those that match every field that is set.
type Filter struct {
	Tenant, User string
	Since, Until time.Time // Since ≤ the entry's time < Until
}

// ErrEmptyFilter refuses an erasure that names nothing: it would erase everything.
var ErrEmptyFilter = errors.New("contentlog: an erasure needs a tenant, a user or a time")

func (f Filter) empty() bool {
	return f.Tenant == "" && f.User == "" && f.Since.IsZero() && f.Until.IsZero()
}

func (f Filter) picks(h header) bool {
	return (f.Tenant == "" || f.Tenant == h.Tenant) && (f.User == "" || clean(f.User) == h.User) &&
		(f.Since.IsZero() || !h.Time.Before(f.Since)) && (f.Until.IsZero() || h.Time.Before(f.Until))
}

// mayHold tells whether a file can hold an entry that f picks.
func (f Filter) mayHold(at file) bool {
	return (f.Tenant == "" || stem(f.Tenant) == at.stem) &&
		(f.Since.IsZero() || at.end().After(f.Since)) && (f.Until.IsZero() || at.day.Before(f.Until))
}

// ExportDir writes the entries of a folder that f picks to w, as the lines that stand there:
// by tenant and day, each file in the order of writing. It needs no node and disturbs none.
// Lines that cannot be read are passed over. It returns how many entries it wrote.
func ExportDir(dir string, w io.Writer, f Filter) (int, error) {
	d, n := folder(dir), 0
	files, err := d.files()
	if err != nil {
		return 0, fmt.Errorf("contentlog: export: %w", err)
	}
	for _, at := range files {
		if !f.mayHold(at) {
			continue
		}
		err := d.read(at, func(text line, h header, ok bool) error {
			if !ok || !f.picks(h) {
				return nil
			}
			n++
			_, err := w.Write(text)
			return err
		})
		if err != nil {
			return n, fmt.Errorf("contentlog: export: %w", err)
		}
	}
	return n, nil
}

// EraseDir removes the entries of a folder that f picks and that were written before the
// call, rewriting one file after the other; nodes may write meanwhile. It returns how many
// entries are gone, also when an error kept it from going on. An empty Filter is refused
// with ErrEmptyFilter.
func EraseDir(dir string, f Filter) (int, error) {
	if f.empty() {
		return 0, ErrEmptyFilter
	}
	d, total := folder(dir), 0
	files, err := d.files()
	if err != nil {
		return 0, fmt.Errorf("contentlog: erase: %w", err)
	}
	for _, at := range files {
		if !f.mayHold(at) {
			continue
		}
		n, err := d.remove(at, f.picks)
		total += n
		if err != nil {
			return total, fmt.Errorf("contentlog: erase: %w", err)
		}
	}
	return total, nil
}

// line is one entry as it stands in a file, its line end included.
type line []byte

// header is what a line is picked by.
type header struct {
	Time   time.Time `json:"time"`
	Tenant string    `json:"tenant"`
	User   string    `json:"user"`
}

// place is where a line goes: a tenant's day in a folder.
type place struct {
	dir  folder
	stem string
	day  string
}

// file is one file of a folder.
type file struct {
	stem string
	day  time.Time
	seq  int
}

const dayForm = "2006-01-02"

func (f file) name() string {
	return fmt.Sprintf("%s.%s.%04d.jsonl", f.stem, f.day.Format(dayForm), f.seq)
}

func (f file) end() time.Time { return f.day.AddDate(0, 0, 1) }

// parseFile undoes name; other names are not ours.
func parseFile(name string) (file, bool) {
	part := strings.Split(name, ".")
	if len(part) != 4 || part[0] == "" || part[3] != "jsonl" {
		return file{}, false
	}
	day, errDay := time.Parse(dayForm, part[1])
	seq, errSeq := strconv.Atoi(part[2])
	f := file{stem: part[0], day: day, seq: seq}
	return f, errDay == nil && errSeq == nil && f.name() == name
}

// maxStem bounds a stem in bytes, so that the whole name stays below the 255 of NAME_MAX.
const maxStem = 160

// stem makes a tenant's name safe as part of a file name: no separator, no dot, no capital
// (file systems that fold case would mix two tenants). Distinct names give distinct stems.
func stem(tenant string) string {
	var b strings.Builder
	for i := range len(tenant) {
		if c := tenant[i]; 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '_' || c == '-' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02x", c)
		}
	}
	if b.Len() <= maxStem {
		return b.String()
	}
	sum := sha256.Sum256([]byte(tenant))
	return b.String()[:maxStem-33] + "~" + hex.EncodeToString(sum[:16]) // '~' is in no short stem
}

// folder is a folder of content files.
type folder string

const (
	lockName    = ".lock"
	rewriteName = ".rewrite" // one at a time, under the exclusive lock
)

func (d folder) path(name string) string { return filepath.Join(string(d), name) }

// prepare makes the folder and removes an unfinished rewrite.
func (d folder) prepare() error {
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return err
	}
	return d.locked(syscall.LOCK_EX, func() error {
		if err := os.Remove(d.path(rewriteName)); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}

// locked runs do under the folder's lock, shared or exclusive. Each call opens the lock file
// anew, so that it excludes goroutines of this process too.
func (d folder) locked(how int, do func() error) error {
	f, err := os.OpenFile(d.path(lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // gives the lock back
	if err := keepOwner(f, string(d)); err != nil {
		return err
	}
	for {
		err := syscall.Flock(int(f.Fd()), how)
		if err == nil {
			return do()
		}
		if !errors.Is(err, syscall.EINTR) {
			return fmt.Errorf("lock %s: %w", d, err)
		}
	}
}

// keepOwner gives f the owner of like, where they differ: a command that root runs must not
// lock out the node, which runs as somebody else.
func keepOwner(f *os.File, like string) error {
	want, err := os.Stat(like)
	if err != nil {
		return err
	}
	have, err := f.Stat()
	if err != nil {
		return err
	}
	w, h := want.Sys().(*syscall.Stat_t), have.Sys().(*syscall.Stat_t)
	if w.Uid == h.Uid || os.Geteuid() != 0 {
		return nil
	}
	return f.Chown(int(w.Uid), int(w.Gid))
}

// files lists the content files by stem, day and number.
func (d folder) files() ([]file, error) {
	names, err := os.ReadDir(string(d))
	if err != nil {
		return nil, err
	}
	var files []file
	for _, n := range names {
		if f, ok := parseFile(n.Name()); ok {
			files = append(files, f)
		}
	}
	slices.SortFunc(files, func(a, b file) int {
		return cmp.Or(cmp.Compare(a.stem, b.stem), a.day.Compare(b.day), cmp.Compare(a.seq, b.seq))
	})
	return files, nil
}

// read hands the lines of a file to each as it stands now; ok is false for a line that
// cannot be read. A file that is gone has no lines. The lock is held only while opening.
func (d folder) read(at file, each func(text line, h header, ok bool) error) error {
	var f *os.File
	var size int64
	err := d.locked(syscall.LOCK_SH, func() (err error) {
		if f, err = os.Open(d.path(at.name())); err != nil {
			return err
		}
		info, err := f.Stat()
		if err != nil {
			_ = f.Close()
			return err
		}
		size = info.Size()
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return eachLine(io.LimitReader(f, size), each)
}

// eachLine cuts r into lines. A line beyond maxLine, without an end or that is not an entry
// is handed over as not ok, without its text.
func eachLine(r io.Reader, each func(text line, h header, ok bool) error) error {
	in := bufio.NewReaderSize(r, 64<<10)
	var text line
	whole := true
	for {
		part, err := in.ReadSlice('\n')
		if len(text)+len(part) > maxLine {
			text, whole = text[:0], false
		}
		if whole {
			text = append(text, part...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if errors.Is(err, io.EOF) && len(text) == 0 && whole {
			return nil
		}
		var h header
		ok := whole && err == nil && json.Unmarshal(text, &h) == nil && h.Tenant != ""
		if !ok {
			text = text[:0]
		}
		if fail := each(text, h, ok); fail != nil {
			return fail
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		text, whole = text[:0], true
	}
}

// remove takes the lines that drop picks out of a file, and those that cannot be read. Most
// files hold none: it looks first, and takes the exclusive lock only if there is work.
func (d folder) remove(at file, drop func(header) bool) (int, error) {
	work := false
	err := d.read(at, func(_ line, h header, ok bool) error {
		if !ok || drop(h) {
			work = true
			return io.EOF
		}
		return nil
	})
	if err != nil && !errors.Is(err, io.EOF) || !work {
		return 0, err
	}
	n := 0
	err = d.locked(syscall.LOCK_EX, func() (err error) {
		n, err = d.rewrite(at, drop)
		return err
	})
	return n, err
}

// rewrite replaces a file by what drop leaves of it, at once and synced; a file of which
// nothing is left is deleted. The caller holds the exclusive lock.
func (d folder) rewrite(at file, drop func(header) bool) (int, error) {
	old, err := os.Open(d.path(at.name()))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { _ = old.Close() }()
	tmp, err := os.OpenFile(d.path(rewriteName), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.Remove(tmp.Name()) }() // a rename leaves nothing to remove
	defer func() { _ = tmp.Close() }()
	dropped, left := 0, 0
	out := bufio.NewWriterSize(tmp, 64<<10)
	err = eachLine(old, func(text line, h header, ok bool) error {
		if !ok {
			return nil
		}
		if drop(h) {
			dropped++
			return nil
		}
		left++
		_, err := out.Write(text)
		return err
	})
	if err = errors.Join(err, out.Flush(), keepOwner(tmp, old.Name())); err != nil {
		return 0, err
	}
	if left == 0 {
		return dropped, errors.Join(os.Remove(old.Name()), d.sync())
	}
	if err := errors.Join(tmp.Sync(), os.Rename(tmp.Name(), old.Name())); err != nil {
		return 0, err
	}
	return dropped, d.sync()
}

// sync makes renames and removals last.
func (d folder) sync() error {
	f, err := os.Open(string(d))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return f.Sync()
}

// prune deletes what is older than its tenant's retention, by stem. It ends early, without
// an error, when quit is closed.
func (d folder) prune(now time.Time, retention map[string]time.Duration, quit <-chan struct{}) error {
	files, err := d.files()
	if err != nil {
		return err
	}
	var errs []error
	for _, at := range files {
		select {
		case <-quit:
			return nil
		default:
		}
		keep, ok := retention[at.stem]
		if !ok {
			keep = DefaultRetention
		}
		cutoff := now.Add(-keep)
		if !at.day.Before(cutoff) {
			continue
		}
		errs = append(errs, d.pruneFile(at, cutoff))
	}
	return errors.Join(errs...)
}

// pruneFile deletes a file whose day has passed as a whole. In one whose day has begun to
// pass it looks at the first line, so that of a busy day's many files only the one that is
// due is rewritten.
func (d folder) pruneFile(at file, cutoff time.Time) error {
	expired := func(h header) bool { return h.Time.Before(cutoff) }
	if !at.end().After(cutoff) {
		return d.locked(syscall.LOCK_EX, func() error {
			if err := os.Remove(d.path(at.name())); !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			return nil
		})
	}
	due := false
	err := d.read(at, func(_ line, h header, ok bool) error {
		due = !ok || expired(h)
		return io.EOF
	})
	if err != nil && !errors.Is(err, io.EOF) || !due {
		return err
	}
	_, err = d.remove(at, expired)
	return err
}

// writer appends lines. It belongs to one goroutine.
type writer struct {
	maxFile int64
	last    map[place]int // number of the file that a place was last seen to use; a guess, checked under the lock
	failing bool          // the last batch met an error
}

// maxPlaces bounds writer.last; beyond, it is learned anew from the folder.
const maxPlaces = 4096

// write appends a batch, each folder under its lock. It returns how many lines it lost, and
// why; it goes on with the other places.
func (w *writer) write(batch map[place][]line) (int, error) {
	byDir := map[folder][]place{}
	for at := range batch {
		byDir[at.dir] = append(byDir[at.dir], at)
	}
	lost, errs := 0, []error(nil)
	for dir, places := range byDir {
		written := map[place]bool{}
		err := dir.locked(syscall.LOCK_EX, func() error {
			var errs []error
			for _, at := range places {
				err := w.append(at, bytes.Join(asBytes(batch[at]), nil))
				written[at] = err == nil
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		})
		for _, at := range places {
			if !written[at] {
				lost += len(batch[at])
			}
		}
		errs = append(errs, err)
	}
	return lost, errors.Join(errs...)
}

func asBytes(lines []line) [][]byte {
	out := make([][]byte, len(lines))
	for i, l := range lines {
		out[i] = l
	}
	return out
}

// append adds text to the newest file of a place, or to the next one if that is full. The
// caller holds the exclusive lock.
func (w *writer) append(at place, text []byte) error {
	day, err := time.Parse(dayForm, at.day)
	if err != nil {
		return err
	}
	seq, err := w.newest(at)
	for ; err == nil; seq++ {
		f, openErr := os.OpenFile(at.dir.path(file{at.stem, day, seq}.name()), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
		if openErr != nil {
			return openErr
		}
		full, writeErr := appendTo(f, text, w.maxFile)
		err = errors.Join(writeErr, f.Close())
		if !full {
			w.last[at] = seq
			return err
		}
	}
	return err
}

// newest is the number of a place's newest file, 1 if it has none.
func (w *writer) newest(at place) (int, error) {
	if seq, ok := w.last[at]; ok {
		return seq, nil
	}
	if len(w.last) >= maxPlaces {
		clear(w.last)
	}
	files, err := at.dir.files()
	if err != nil {
		return 0, err
	}
	seq := 1
	for _, f := range files {
		if f.stem == at.stem && f.day.Format(dayForm) == at.day {
			seq = max(seq, f.seq)
		}
	}
	return seq, nil
}

// appendTo appends text to f unless f is full, after cutting off a line that a crash left
// torn. What a failed write left is cut off too.
func appendTo(f *os.File, text []byte, maxFile int64) (full bool, err error) {
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	size, err := lastLineEnd(f, info.Size())
	if err != nil {
		return false, err
	}
	if size != info.Size() {
		if err := f.Truncate(size); err != nil {
			return false, err
		}
	}
	if size >= maxFile {
		return true, nil
	}
	if _, err := f.Write(text); err != nil {
		return false, errors.Join(err, f.Truncate(size))
	}
	return false, nil
}

// lastLineEnd is the length of f up to and with its last line end.
func lastLineEnd(f io.ReaderAt, size int64) (int64, error) {
	buf := make([]byte, 1) // nearly always the last byte is it
	for size > 0 {
		part := buf[:min(int64(len(buf)), size)]
		if _, err := f.ReadAt(part, size-int64(len(part))); err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
			return size - int64(len(part)) + int64(i) + 1, nil
		}
		size -= int64(len(part))
		if len(buf) == 1 {
			buf = make([]byte, 64<<10)
		}
	}
	return 0, nil
}
