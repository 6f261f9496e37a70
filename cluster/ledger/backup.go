package ledger

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// epochSkip is how far a view's epoch jumps where the past of the ledger is replaced.
	// Epochs must never go back, and those skipped cost only a wait (V4).
	epochSkip = 1000
	// restoreTries is how often a restore that meets a change of the members is tried.
	restoreTries = 20
	// restoreWithin bounds how long raft takes a restored snapshot in.
	restoreWithin = time.Minute
)

// ErrNotEmpty refuses a restore over what is in use.
var ErrNotEmpty = errors.New("the ledger holds a policy or keys, which a restore would replace: force it if that is meant")

// ErrBackup refuses to restore what is no backup, or not all of one. Nothing was done.
var ErrBackup = errors.New("the backup cannot be restored")

// Backup writes the whole ledger to w, as Restore and InspectFile read it. On the leader it
// holds all that was committed before the call; elsewhere it fails with ErrNotLeader, unless
// stale allows what this replica has.
func (l *Ledger) Backup(ctx context.Context, w io.Writer, stale bool) error {
	if !stale {
		if err := l.Barrier(ctx); err != nil {
			return fmt.Errorf("backup of the ledger: %w", err)
		}
	}
	captured, err := l.fsm.capture()
	if err != nil {
		return fmt.Errorf("backup of the ledger: %w", err)
	}
	buffered := bufio.NewWriterSize(w, 64<<10)
	if err := captured.Write(buffered); err != nil {
		return fmt.Errorf("backup of the ledger: %w", err)
	}
	if err := buffered.Flush(); err != nil {
		return fmt.Errorf("backup of the ledger: %w", err)
	}
	return nil
}

// Restore replaces the ledger's content on all nodes by a backup's, after it read the backup
// to its end. Leader only. The cluster keeps its id, its members and its view, whose epoch
// jumps by epochSkip. It returns the facts that were put in place; their Hash is the backup's. What was
// proposed meanwhile is lost, and said to be unknown. An error may leave it unknown
// whether the restore was done: look at the hash.
func (l *Ledger) Restore(ctx context.Context, r io.Reader, force bool) (*Facts, error) {
	restored, err := ReadState(bufio.NewReaderSize(r, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBackup, err)
	}
	l.restoring.Lock() // what comes slowly has come
	defer l.restoring.Unlock()
	if err := l.Barrier(ctx); err != nil {
		return nil, fmt.Errorf("restoring the ledger: %w", err)
	}
	now := l.Facts()
	if !force && (now.Policy != nil || now.KeyCount > 0) {
		return nil, ErrNotEmpty
	}
	index := restored.Facts().Index
	restored.Adopt(successor(now, restored.Facts()))
	if err := l.putInPlace(ctx, restored.Capture(), index); err != nil {
		return nil, fmt.Errorf("restoring the ledger: %w", err)
	}
	return restored.Facts(), nil // and not what stands now: others may have changed it since
}

// successor is the cluster id, the view, the highest index so far and the invalidations, by which the past is replaced by the restored.
func successor(now, restored *Facts) *Facts {
	next := &Facts{ClusterID: now.ClusterID, View: now.View, Index: max(now.Index, restored.Index), Caches: now.Caches}
	if now.Policy != nil {
		next.Index = max(next.Index, now.Policy.Number())
	}
	if next.ClusterID == nil {
		next.ClusterID = restored.ClusterID
	}
	if next.View == nil {
		next.View = restored.View
	}
	next.View = skipped(next.View, now.View, restored.View)
	return next
}

// skipped is view with an epoch beyond all of those given; nil stays nil.
func skipped(view *View, past ...*View) *View {
	if view == nil {
		return nil
	}
	next := *view
	for _, p := range past {
		if p != nil {
			next.Epoch = max(next.Epoch, p.Epoch)
		}
	}
	next.Epoch += epochSkip
	return &next
}

// putInPlace has raft take the state for a snapshot of its own at an index beyond index.
func (l *Ledger) putInPlace(ctx context.Context, captured *Capture, index uint64) (err error) {
	spool, err := os.CreateTemp(l.config.Dir, "restore-*.tmp")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, spool.Close(), os.Remove(spool.Name())) }()
	if err := captured.Write(spool); err != nil {
		return err
	}
	size, err := spool.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	meta := &raft.SnapshotMeta{Version: raft.SnapshotVersionMax, Index: index, Size: size}
	for range restoreTries {
		if _, err = spool.Seek(0, io.SeekStart); err != nil {
			return err
		}
		err = l.raft.Restore(meta, spool, restoreWithin)
		if err == nil || !strings.Contains(err.Error(), "wait until the configuration entry") {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(l.config.CommitTimeout):
		}
	}
	return err
}
