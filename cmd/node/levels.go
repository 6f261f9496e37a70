package node

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"headgate/cluster"
)

// levelsFile in the data folder holds the levels of the buckets between a clean stop and the
// next start: a line of JSON that says whose they are, then what lease.Local saved. It gets
// another name before the first request is decided, so that no later start goes by it again.
const levelsFile = "levels"

const (
	maxLevelsHead = 4096 // bytes of its first line
	usedSuffix    = ".used"
)

// levelsHead is that line. Nothing is decided by it; it is for the log.
type levelsHead struct {
	Node  string    `json:"node"`
	Saved time.Time `json:"saved"`
	Epoch uint64    `json:"epoch"` // of the view
	Rank  int       `json:"rank"`  // of the share
	Of    int       `json:"of"`
}

// restoreLevels is done once, before the first request is decided; n.mu is held. A process
// without saved levels starts with full buckets only if it founded its cluster: one that
// crashed spent nobody knows what, and what a newcomer's share is was others' until now.
func (n *Node) restoreLevels() error {
	s := &n.now
	if s.levels {
		return nil
	}
	path := filepath.Join(n.cfg.DataDir, levelsFile)
	used, now := path+usedSuffix, n.proxy.Now()
	floor := min(now, s.enteredAt+int64(cluster.TakeoverWait)) // it could spend since then, though perhaps there was no policy
	err := os.Rename(path, used)
	if errors.Is(err, fs.ErrNotExist) {
		if s.entered > 1 {
			n.limits.SetFloor(floor)
			n.log.Info("no saved levels: buckets start empty where they fill within a minute", "epoch", s.entered)
		}
		s.levels = true
		return nil
	}
	if err == nil {
		err = syncFolder(n.cfg.DataDir)
	}
	if err != nil {
		return fmt.Errorf("take the saved levels away, so that they are used once: %w; let the node write %s", err, n.cfg.DataDir)
	}
	s.levels = true
	head, buckets, err := n.loadLevels(used, now)
	if err != nil {
		n.limits.SetFloor(floor)
		n.log.Error("the saved levels can't be used: buckets start empty where they fill within a minute", "file", used, "error", err)
		return nil
	}
	_ = os.Remove(used) // nothing reads it again
	n.log.Info("levels restored", "buckets", buckets, "saved", head.Saved, "saved_epoch", head.Epoch, "saved_rank", head.Rank, "saved_of", head.Of, "epoch", s.entered)
	return nil
}

func (n *Node) loadLevels(path string, now int64) (head levelsHead, buckets int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return head, 0, err
	}
	defer func() { _ = f.Close() }() // it is read only
	r := bufio.NewReaderSize(f, maxLevelsHead)
	line, err := r.ReadSlice('\n')
	if err == nil {
		err = json.Unmarshal(line, &head)
	}
	if err != nil {
		return head, 0, fmt.Errorf("their first line: %w", err)
	}
	buckets, err = n.limits.Load(now, r)
	return head, buckets, err
}

// saveLevels is for when everything is settled. A process that decided nothing leaves what an
// earlier one saved as it is, and takes nothing of it any more.
func (n *Node) saveLevels() error {
	n.mu.Lock()
	s := n.now
	n.now.levels = true
	n.mu.Unlock()
	if !s.levels {
		return nil
	}
	head := levelsHead{Node: n.cfg.NodeID, Saved: time.Now().UTC(), Rank: s.spent.Rank, Of: s.spent.Of}
	if s.view != nil {
		head.Epoch = s.view.Epoch
	}
	err := writeWhole(filepath.Join(n.cfg.DataDir, levelsFile), func(w io.Writer) error {
		line, err := json.Marshal(head)
		if err != nil {
			return err
		}
		if _, err := w.Write(append(line, '\n')); err != nil {
			return err
		}
		return n.limits.Save(n.proxy.Now(), w)
	})
	if err != nil {
		return fmt.Errorf("save the levels of the buckets, which start empty then: %w", err)
	}
	return nil
}

// writeWhole replaces a file by what write writes: whole or not at all, and on disk when it
// returns.
func writeWhole(path string, write func(io.Writer) error) error {
	part := path + ".part"
	f, err := os.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err = write(f); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(part))
	}
	if err := os.Rename(part, path); err != nil {
		return err
	}
	return syncFolder(filepath.Dir(path))
}

// syncFolder makes sure that what came into a folder, or went, is on disk.
func syncFolder(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
