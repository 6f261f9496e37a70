package node

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"headgate/proxy/journal"
)

// simDisk is a file system in memory that knows what a kill and a power cut leave of it, and that can be told
// to refuse, or to die in the middle of an operation.
type simDisk struct {
	mu     sync.Mutex
	names  map[string]*simInode
	ops    []func(map[string]*simInode) // on the folder since the last SyncDir
	old    map[string]*simInode         // the folder at the last SyncDir
	locked bool

	dead   bool
	refuse bool
	fuse   int    // operations until the process dies in the middle of one; 0: it does not
	torn   int    // what of that operation's write is done, in percent
	blown  bool   // the fuse has
	died   func() // called when it does, with mu held
}

type simInode struct {
	data   []byte
	synced int // bytes that a power cut leaves
}

var errSimDead = errors.New("the process is dead")

func newSimDisk() *simDisk {
	return &simDisk{names: map[string]*simInode{}, old: map[string]*simInode{}}
}

// step is asked before an operation that changes something; last says that the process dies in it.
func (d *simDisk) step() (last bool, err error) {
	switch {
	case d.dead:
		return false, errSimDead
	case d.fuse == 1:
		d.dead, d.blown, d.fuse = true, true, 0
		d.died()
		return true, errSimDead
	case d.refuse:
		return false, syscall.EIO
	}
	d.fuse = max(0, d.fuse-1)
	return false, nil
}

// killed gives the disk as the next process finds it.
func (d *simDisk) killed() *simDisk {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dead = true
	return &simDisk{names: d.names, old: d.old, ops: d.ops}
}

// cut gives the disk as it is after a power cut: pick(n) chooses from 0 to n.
func (d *simDisk) cut(pick func(n int) int) *simDisk {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dead = true
	next := &simDisk{names: maps.Clone(d.old)}
	for _, op := range d.ops[:pick(len(d.ops))] {
		op(next.names)
	}
	for _, name := range slices.Sorted(maps.Keys(next.names)) {
		node := next.names[name]
		data := slices.Clone(node.data[:node.synced+pick(len(node.data)-node.synced)])
		next.names[name] = &simInode{data: data, synced: len(data)}
	}
	next.old = maps.Clone(next.names)
	return next
}

func (d *simDisk) isDead() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dead
}

// refuses has the disk take nothing, or again all.
func (d *simDisk) refuses(on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refuse = on
}

// light lights a fuse.
func (d *simDisk) light(ops, torn int, died func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fuse, d.torn, d.died = ops, torn, died
}

func (d *simDisk) change(op func(map[string]*simInode)) {
	op(d.names)
	d.ops = append(d.ops, op)
}

func (d *simDisk) MkdirAll(string) error { return nil }

func (d *simDisk) ReadDir(dir string) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return nil, errSimDead
	}
	var names []string
	for name := range d.names {
		if filepath.Dir(name) == dir {
			names = append(names, filepath.Base(name))
		}
	}
	return names, nil
}

func (d *simDisk) Open(name string) (journal.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	node, ok := d.names[name]
	switch {
	case d.dead:
		return nil, errSimDead
	case !ok:
		return nil, fs.ErrNotExist
	}
	return &simFile{d, node}, nil
}

func (d *simDisk) Create(name string) (journal.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	node := &simInode{}
	last, err := d.step()
	if err == nil || last {
		d.change(func(names map[string]*simInode) { names[name] = node })
	}
	if err != nil {
		return nil, err
	}
	return &simFile{d, node}, nil
}

func (d *simDisk) Rename(from, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.step()
	if err == nil {
		d.change(func(names map[string]*simInode) { names[to] = names[from]; delete(names, from) })
	}
	return err
}

func (d *simDisk) Remove(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.step()
	if err == nil {
		d.change(func(names map[string]*simInode) { delete(names, name) })
	}
	return err
}

func (d *simDisk) SyncDir(string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.step()
	if err == nil {
		d.old, d.ops = maps.Clone(d.names), nil
	}
	return err
}

type simUnlock struct{ d *simDisk }

func (u simUnlock) Close() error {
	u.d.mu.Lock()
	defer u.d.mu.Unlock()
	u.d.locked = false
	return nil
}

func (d *simDisk) Lock(string) (io.Closer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.locked {
		return nil, journal.ErrInUse
	}
	d.locked = true
	return simUnlock{d}, nil
}

// simFile is a simDisk's open file.
type simFile struct {
	disk *simDisk
	node *simInode
}

func (f *simFile) ReadAt(p []byte, at int64) (int, error) {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	if f.disk.dead {
		return 0, errSimDead
	}
	if at >= int64(len(f.node.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.node.data[at:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *simFile) WriteAt(p []byte, at int64) (int, error) {
	d := f.disk
	d.mu.Lock()
	defer d.mu.Unlock()
	last, err := d.step()
	n := len(p)
	switch {
	case last:
		n = n * d.torn / 100
	case err != nil:
		return 0, err
	}
	if more := int(at) + n - len(f.node.data); more > 0 {
		f.node.data = append(f.node.data, make([]byte, more)...)
	}
	copy(f.node.data[at:], p[:n])
	return n, err
}

func (f *simFile) Size() (int64, error) {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	if f.disk.dead {
		return 0, errSimDead
	}
	return int64(len(f.node.data)), nil
}

func (f *simFile) Truncate(size int64) error {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	_, err := f.disk.step()
	if err == nil {
		f.node.data = f.node.data[:size:size]
		f.node.synced = min(f.node.synced, int(size))
	}
	return err
}

func (f *simFile) Sync() error {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	_, err := f.disk.step()
	if err == nil {
		f.node.synced = len(f.node.data)
	}
	return err
}

func (f *simFile) Close() error { return nil }
