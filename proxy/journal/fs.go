package journal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// FS is the file system under a Log; the zero Config uses the machine's. Names are whole
// paths. Its methods may be called concurrently: who writes creates and renames while others read, sync
// the folder or remove what is old.
type FS interface {
	MkdirAll(dir string) error
	ReadDir(dir string) (names []string, err error)
	Open(name string) (File, error)   // for reading
	Create(name string) (File, error) // for reading and writing, emptied if it was there
	Rename(from, to string) error
	Remove(name string) error
	SyncDir(dir string) error
	// Lock holds name against every other process and Log until it is closed; it fails with
	// ErrInUse at once where somebody holds it.
	Lock(name string) (io.Closer, error)
}

// File is an open file. Sync may be called while another goroutine writes or reads. WriteAt may leave any part of what it was given when it fails;
// the count says how much is certain.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Size() (int64, error)
	Truncate(size int64) error
	Sync() error
}

// ErrInUse refuses to open a folder that another process, or another Log of this one, holds.
var ErrInUse = errors.New("journal: the folder is in use by another process: two nodes must not share one data_dir")

// osFS is the machine's file system.
type osFS struct{}

// osFile is a file of it.
type osFile struct{ *os.File }

func (f osFile) Size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func (osFS) MkdirAll(dir string) error { return os.MkdirAll(dir, 0o700) }

func (osFS) ReadDir(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

func (osFS) Open(name string) (File, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Create(name string) (File, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Rename(from, to string) error { return os.Rename(from, to) }
func (osFS) Remove(name string) error     { return os.Remove(name) }

func (osFS) SyncDir(dir string) error {
	d, err := os.Open(filepath.Clean(dir))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (osFS) Lock(name string) (io.Closer, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EWOULDBLOCK):
			return nil, errors.Join(ErrInUse, f.Close())
		default:
			return nil, errors.Join(fmt.Errorf("lock %s: %w", name, err), f.Close())
		}
	}
}
