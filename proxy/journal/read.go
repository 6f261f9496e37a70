package journal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"time"
)

// Query picks requests; what is empty picks all.
type Query struct {
	From, Until              time.Time // From ≤ Usage.Time < Until
	Tenant, Key, User, Model string    // Model is the one that answered
}

func (q *Query) picks(u *Usage) bool {
	is := func(want, have string) bool { return want == "" || clip(want) == have }
	return is(q.Tenant, u.Tenant) && is(q.Key, u.Key) && is(q.User, u.User) && is(q.Model, u.Model) &&
		(q.From.IsZero() || !u.Time.Before(q.From)) && (q.Until.IsZero() || u.Time.Before(q.Until))
}

// mayHold says whether a segment may have what q picks.
func (q *Query) mayHold(s *segment) bool {
	return !s.dated || s.last != 0 && (q.From.IsZero() || s.last >= q.From.UnixNano()) && (q.Until.IsZero() || s.first < q.Until.UnixNano())
}

// Read hands the requests that q picks to fn, in the order of their records, those that were
// settled before the call among them; Cancelled ones are passed over. fn must not keep u or its
// slices; it runs without a lock, and its error ends the reading. What cannot be read is
// passed over with a warning in the log.
func (l *Log) Read(ctx context.Context, q Query, fn func(u *Usage) error) error {
	return l.read(ctx, q, fn, nil)
}

// read is Read that calls beat now and then, also while it finds nothing.
func (l *Log) read(ctx context.Context, q Query, fn func(u *Usage) error, beat func() error) error {
	l.mu.Lock()
	current := l.current
	current.dated = true
	all := append(slices.Clip(l.segments), current)
	l.mu.Unlock()
	return l.folder.readAll(ctx, all, q, fn, beat)
}

// ReadDir is Read of a folder whose Log is not open here; it writes nothing there. Of a node
// that runs it reads what was written when it was called. A folder without a log is an error: nothing
// was used there, or it is another than was meant.
func ReadDir(ctx context.Context, dir string, logger *slog.Logger, q Query, fn func(u *Usage) error) error {
	f := folder{fs: osFS{}, dir: dir, log: logger}
	all, _, err := f.segments()
	if err != nil {
		return fmt.Errorf("journal: read %s: %w", dir, err)
	}
	if len(all) == 0 {
		return f.none()
	}
	return f.readAll(ctx, all, q, fn, nil)
}

// inDataDir is the folder of the log in a node's data folder.
const inDataDir = "usage"

// none says that the folder has no log, and where it may be.
func (f folder) none() error {
	below := f
	below.dir = filepath.Join(f.dir, inDataDir)
	if all, _, err := below.segments(); err == nil && len(all) > 0 {
		return fmt.Errorf("journal: %s holds no usage log; did you mean %s?", f.dir, below.dir)
	}
	return fmt.Errorf("journal: %s holds no usage log", f.dir)
}

func (f folder) readAll(ctx context.Context, all []segment, q Query, fn func(u *Usage) error, beat func() error) error {
	r := reader{folder: f, query: q, fn: fn, beat: beat, names: names{}}
	for i := range all {
		if !q.mayHold(&all[i]) {
			continue
		}
		err := f.scan(&all[i], func(in *scanner) error { return r.segment(ctx, &all[i], in) })
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it was removed meanwhile, for its age
			return fmt.Errorf("journal: read %s: %w", all[i].name(), err)
		}
	}
	return nil
}

// reader hands out usage records.
type reader struct {
	folder folder
	query  Query
	fn     func(*Usage) error
	beat   func() error
	names  names
	usage  Usage
}

// checkEvery is how many records a reader reads between looking at its context.
const checkEvery = 1 << 10

func (r *reader) segment(ctx context.Context, s *segment, in *scanner) error {
	for n := 0; ; n++ {
		if n%checkEvery == 0 {
			if err := r.pause(ctx); err != nil {
				return err
			}
		}
		payload, at, err := in.next()
		var bad *badStretch
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.As(err, &bad):
			r.folder.warn(s, bad)
			continue
		case err != nil:
			return err
		}
		kind, message, err := parseRecord(payload)
		if err == nil && kind == recUsage {
			err = r.names.usage(message, &r.usage)
		}
		if err != nil {
			r.folder.log.Warn("journal record cannot be read", "file", r.folder.path(s.name()), "offset", at, "error", err)
			continue
		}
		if kind != recUsage || r.usage.Outcome == Cancelled || !r.query.picks(&r.usage) {
			continue
		}
		r.usage.Incarnation, r.usage.Node = cmp.Or(r.usage.Incarnation, s.incarnation), s.node
		if err := r.fn(&r.usage); err != nil {
			return err
		}
	}
}

func (r *reader) pause(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if r.beat != nil {
		return r.beat()
	}
	return nil
}
