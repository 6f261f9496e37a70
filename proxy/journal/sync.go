package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"time"
)

// syncer brings what was written to the disk, a short while after it was, tries a disk that
// refuses, and removes old segments.
func (l *Log) syncer() {
	defer close(l.synced)
	hourly := time.NewTicker(keepEvery)
	defer hourly.Stop()
	pause := time.NewTimer(l.cfg.SyncEvery)
	defer pause.Stop()
	for {
		select {
		case <-l.quit:
			return
		case <-hourly.C:
			l.age()
			l.prune()
			continue
		case <-l.wake:
		}
		pause.Reset(l.cfg.SyncEvery)
		select {
		case <-l.quit:
			return
		case <-pause.C:
		}
		l.round()
	}
}

// round is one round of the syncer.
func (l *Log) round() {
	l.mu.Lock()
	rotated := len(l.retired) > 0
	l.mu.Unlock()
	if err := l.syncOnce(); err == nil && rotated {
		l.prune()
	}
	l.mu.Lock()
	again := l.failing != nil || l.trim
	l.mu.Unlock()
	if !again {
		return
	}
	err := l.probe()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil || l.failing != nil {
		l.rouse()
	}
}

// syncOnce brings all that was written before the call to the disk.
func (l *Log) syncOnce() error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	retired, file, dirty, renamed := l.retired, l.file, l.dirty, l.renamed
	l.retired, l.dirty, l.renamed = nil, false, false
	l.mu.Unlock()
	var errs []error
	for _, old := range retired {
		errs = append(errs, l.timedSync(old), old.Close())
	}
	if dirty {
		errs = append(errs, l.timedSync(file))
	}
	if renamed {
		errs = append(errs, l.folder.fs.SyncDir(l.folder.dir))
	}
	err := errors.Join(errs...)
	if err != nil {
		// After a failed sync the kernel may forget what it could not write, and say of the
		// next one that all is well: only a new segment, with all of the books, is.
		l.mu.Lock()
		l.rotate = true
		l.fails(err)
		l.mu.Unlock()
	}
	return err
}

// timedSync syncs a file and measures it.
func (l *Log) timedSync(f File) error {
	from := time.Now()
	err := f.Sync()
	l.metrics.sync.Observe(time.Since(from).Seconds())
	if err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	return nil
}

// sync brings a segment of an earlier process to the disk.
func (f folder) sync(s *segment) error {
	file, err := f.fs.Open(f.path(s.name()))
	if err != nil {
		return err
	}
	if err := errors.Join(file.Sync(), file.Close()); err != nil {
		return fmt.Errorf("sync %s: %w", s.name(), err)
	}
	return nil
}

// age lets the next record begin a new segment where the current one is a day old.
func (l *Log) age() {
	now := l.cfg.Now().UnixNano()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current.last != 0 && now-l.current.created > int64(segmentAge) {
		l.rotate = true
	}
}

// prune removes the oldest segments, those beyond the retention or MaxBytes.
func (l *Log) prune() {
	for _, s := range l.outdated() {
		err := l.folder.fs.Remove(l.folder.path(s.name()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.cfg.Logger.Error("journal cannot remove an old segment", "file", l.folder.path(s.name()), "error", err)
		}
	}
}

// outdated takes the segments that are to go out of the list. Those stay on which a
// recovery may have to fall back: the last one before the current, those with a record of an
// open reservation, and the last two of every process that is not closed. (They are never
// needed while the current one can be read: its checkpoint has all of the books.)
func (l *Log) outdated() (gone []segment) {
	l.mu.Lock()
	defer l.mu.Unlock()
	need := map[uint64]bool{}
	for _, p := range l.own.open {
		need[p.segment] = true
	}
	left := map[uint64]int{}
	for _, b := range l.books {
		left[b.incarnation] = 2
	}
	left[l.own.incarnation] = 1 // and the current one
	total := l.current.end
	for i := len(l.segments) - 1; i >= 0; i-- {
		s := &l.segments[i]
		total += s.end
		if i == len(l.segments)-1 || left[s.incarnation] > 0 {
			left[s.incarnation]--
			need[s.segment] = true
		}
	}
	oldest := l.cfg.Now().Add(-l.cfg.Retention).UnixNano()
	var stay []segment
	for i, s := range l.segments {
		followed := l.current.created
		if i+1 < len(l.segments) {
			followed = l.segments[i+1].created
		}
		if old := followed != 0 && followed < oldest; !need[s.segment] && (old || total > l.cfg.MaxBytes) {
			total -= s.end
			gone = append(gone, s)
		} else {
			stay = append(stay, s)
		}
	}
	l.segments = stay
	return gone
}
