package journal

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

// disk is a file system in memory that knows what a kill and a power cut leave of it, and
// that can be told to refuse.
type disk struct {
	mu    sync.Mutex
	names map[string]*inode
	ops   []func(map[string]*inode) // on the folder since the last SyncDir
	old   map[string]*inode         // the folder at the last SyncDir
	locks map[string]bool

	dead  bool
	fuse  int // operations until the process is killed in the middle of one; 0: it is not
	torn  int // what of that operation's write is done, in percent
	room  int // bytes until the disk is full; < 0: no bound
	fails map[string]bool
	once  string        // fails the next time
	pause time.Duration // of each write, in virtual time
	did   int           // operations that change something
}

type inode struct {
	data   []byte
	synced int // bytes that a power cut leaves
}

var errDead = errors.New("the process is dead")

func newDisk() *disk {
	return &disk{names: map[string]*inode{}, old: map[string]*inode{}, locks: map[string]bool{}, room: -1, fails: map[string]bool{}}
}

// step is asked before an operation; last says that the process dies in it.
func (d *disk) step(op string) (last bool, err error) {
	if d.dead {
		return false, errDead
	}
	if d.fails[op] || d.once == op {
		d.once = ""
		return false, syscall.EIO
	}
	if op != "read" {
		d.did++
		if d.fuse > 0 {
			if d.fuse--; d.fuse == 0 {
				d.dead = true
				return true, errDead
			}
		}
	}
	return false, nil
}

// killed gives the disk as the next process finds it.
func (d *disk) killed() *disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dead = true
	next := newDisk()
	next.names, next.old, next.ops = d.names, d.old, d.ops
	return next
}

// cut gives the disk as it is after a power cut: pick(n) chooses from 0 to n.
func (d *disk) cut(pick func(n int) int) *disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dead = true
	next := newDisk()
	next.names = maps.Clone(d.old)
	for _, op := range d.ops[:pick(len(d.ops))] {
		op(next.names)
	}
	for name, node := range next.names {
		data := slices.Clone(node.data[:node.synced+pick(len(node.data)-node.synced)])
		for at := node.synced; at < len(data); at += 64 { // blocks that never arrived
			if pick(3) == 0 {
				clear(data[at:min(at+64, len(data))])
			}
		}
		next.names[name] = &inode{data: data, synced: len(data)}
	}
	next.old = maps.Clone(next.names)
	return next
}

// leave sets how much room there is.
func (d *disk) leave(room int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.room = room
}

// state tells how much of a file is synced, and written.
func (d *disk) state(name string) (synced, written int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.names[name].synced, len(d.names[name].data)
}

func (d *disk) change(op func(map[string]*inode)) {
	op(d.names)
	d.ops = append(d.ops, op)
}

func (d *disk) MkdirAll(string) error { return nil }

func (d *disk) ReadDir(dir string) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := d.step("read"); err != nil {
		return nil, err
	}
	var names []string
	for name := range d.names {
		if filepath.Dir(name) == dir {
			names = append(names, filepath.Base(name))
		}
	}
	return names, nil
}

func (d *disk) Open(name string) (File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := d.step("read"); err != nil {
		return nil, err
	}
	node, ok := d.names[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return &handle{d, node}, nil
}

func (d *disk) Create(name string) (File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	node := &inode{}
	last, err := d.step("create")
	if err == nil || last {
		d.change(func(names map[string]*inode) { names[name] = node })
	}
	if err != nil {
		return nil, err
	}
	return &handle{d, node}, nil
}

func (d *disk) Rename(from, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.step("rename")
	if err == nil {
		d.change(func(names map[string]*inode) { names[to] = names[from]; delete(names, from) })
	}
	return err
}

func (d *disk) Remove(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.step("remove")
	if err == nil {
		d.change(func(names map[string]*inode) { delete(names, name) })
	}
	return err
}

func (d *disk) SyncDir(string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.step("sync")
	if err == nil {
		d.old, d.ops = maps.Clone(d.names), nil
	}
	return err
}

type unlock func()

func (u unlock) Close() error { u(); return nil }

func (d *disk) Lock(name string) (io.Closer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.locks[name] {
		return nil, ErrInUse
	}
	d.locks[name] = true
	return unlock(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.locks, name)
	}), nil
}

type handle struct {
	disk *disk
	node *inode
}

func (h *handle) ReadAt(p []byte, at int64) (int, error) {
	h.disk.mu.Lock()
	defer h.disk.mu.Unlock()
	if _, err := h.disk.step("read"); err != nil {
		return 0, err
	}
	if at >= int64(len(h.node.data)) {
		return 0, io.EOF
	}
	n := copy(p, h.node.data[at:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (h *handle) WriteAt(p []byte, at int64) (done int, err error) {
	d := h.disk
	if d.pause > 0 {
		time.Sleep(d.pause)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	last, err := d.step("write")
	n := len(p)
	switch {
	case last:
		n = n * d.torn / 100
	case err != nil:
		return 0, err
	case d.fails["lie"]: // it is written, and said not to be
		defer func() { done, err = 0, syscall.EIO }()
	case d.room >= 0 && n > d.room:
		n, err = d.room, syscall.ENOSPC
	}
	if d.room >= 0 {
		d.room -= n
	}
	for len(h.node.data) < int(at)+n {
		h.node.data = append(h.node.data, make([]byte, int(at)+n-len(h.node.data))...)
	}
	copy(h.node.data[at:], p[:n])
	return n, err
}

func (h *handle) Size() (int64, error) {
	h.disk.mu.Lock()
	defer h.disk.mu.Unlock()
	_, err := h.disk.step("read")
	return int64(len(h.node.data)), err
}

func (h *handle) Truncate(size int64) error {
	h.disk.mu.Lock()
	defer h.disk.mu.Unlock()
	_, err := h.disk.step("truncate")
	if err == nil {
		h.node.data = h.node.data[:size:size]
		h.node.synced = min(h.node.synced, int(size))
	}
	return err
}

func (h *handle) Sync() error {
	h.disk.mu.Lock()
	defer h.disk.mu.Unlock()
	_, err := h.disk.step("sync")
	if err == nil {
		h.node.synced = len(h.node.data)
	}
	return err
}

func (h *handle) Close() error { return nil }
