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
)

// levelsFile in the data folder holds, between a clean stop and the next start, what this node owned
// and nobody took over: a line of JSON that says whose it is, then what lease.Manager saved. It gets
// another name before anything is granted, so that no later start goes by it again.
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
}

// loadLevels gives what an earlier process saved to the leases, before this one's first view. They
// use it if that view follows the one in which it was saved; otherwise others may have granted since.
func (n *Node) loadLevels() {
	path := filepath.Join(n.cfg.DataDir, levelsFile)
	used := path + usedSuffix
	err := os.Rename(path, used)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		err = syncFolder(n.cfg.DataDir)
	}
	if err != nil {
		n.log.Error("the saved levels can't be taken away, so that they would be used twice: they are not used; let the node write its data folder", "file", path, "error", err)
		return
	}
	head, buckets, err := n.readLevels(used)
	if err != nil {
		n.log.Error("the saved levels can't be used: buckets start empty", "file", used, "error", err)
		return
	}
	_ = os.Remove(used) // nothing reads it again
	n.log.Info("saved levels read", "buckets", buckets, "saved", head.Saved, "saved_epoch", head.Epoch)
}

func (n *Node) readLevels(path string) (head levelsHead, buckets int, err error) {
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
	buckets, err = n.limits.Load(r)
	return head, buckets, err
}

// saveLevels is for when everything is settled and handed over as far as somebody took it. A process
// that never had a view leaves what an earlier one saved as it is.
func (n *Node) saveLevels() error {
	s := n.current()
	if s.view == nil {
		return nil
	}
	head := levelsHead{Node: n.cfg.NodeID, Saved: time.Now().UTC(), Epoch: s.view.Epoch}
	err := writeWhole(filepath.Join(n.cfg.DataDir, levelsFile), func(w io.Writer) error {
		line, err := json.Marshal(head)
		if err != nil {
			return err
		}
		if _, err := w.Write(append(line, '\n')); err != nil {
			return err
		}
		return n.limits.Save(w)
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
