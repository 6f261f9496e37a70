package cluster

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// maxNameLen bounds a node's or cluster's name, so that a node's description fits into gossip.
const maxNameLen = 128

// nodeIDFile keeps a node's raft server id in its data folder.
const nodeIDFile = "node-id"

// CheckName says whether name may name a node or a cluster: 1 to 128 characters of
// [A-Za-z0-9._-]. The error names what and the remedy.
func CheckName(what, name string) error {
	if name == "" || len(name) > maxNameLen {
		return fmt.Errorf("%s %.40q: must have 1 to %d characters, has %d", what, name, maxNameLen, len(name))
	}
	for _, c := range []byte(name) {
		ok := c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-'
		if !ok {
			return fmt.Errorf("%s %q: only letters, digits, '.', '_' and '-' may stand in it", what, name)
		}
	}
	return nil
}

// NewIncarnation draws the number by which one process start is told from every other of
// the same name. It is never 0 and carries no order.
func NewIncarnation() uint64 {
	var b [8]byte
	for {
		// crypto/rand.Read never fails: it ends the process instead.
		_, _ = rand.Read(b[:])
		if n := binary.LittleEndian.Uint64(b[:]); n != 0 {
			return n
		}
	}
}

// StoredServerID returns the raft server id "NAME.xxxxxxxx" of the data folder dir, drawing
// and storing one where there is none yet: a wiped folder is a new server to raft, which
// must not vote on the word of the one before. A folder that belongs to another name is an
// error, and so is an unreadable one. The folder is made if need be.
func StoredServerID(dir, name string) (string, error) {
	if err := CheckName("--node-id", name); err != nil {
		return "", err
	}
	path := filepath.Join(dir, nodeIDFile)
	stored, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return storeServerID(dir, path, name)
	}
	if err != nil {
		return "", fmt.Errorf("read the node's identity: %w", err)
	}
	id := strings.TrimSpace(string(stored))
	owner, suffix, ok := cutServerID(id)
	if !ok {
		return "", fmt.Errorf("%s holds %.40q, not NAME.xxxxxxxx: restore it, or start with an empty --data-dir to join as a new server", path, id)
	}
	if owner != name {
		return "", fmt.Errorf("--data-dir %s belongs to node %q, not %q: start with --node-id %s, or give %q a folder of its own", dir, owner, name, owner, name)
	}
	return owner + "." + suffix, nil
}

func storeServerID(dir, path, name string) (string, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("make the data folder: %w", err)
	}
	var suffix [4]byte
	_, _ = rand.Read(suffix[:])
	id := name + "." + hex.EncodeToString(suffix[:])
	if err := writeDurably(path, []byte(id+"\n")); err != nil {
		return "", fmt.Errorf("store the node's identity: %w", err)
	}
	return id, nil
}

// ServerIDName is the node's name within a raft server id, "" if id is none.
func ServerIDName(id string) string {
	name, _, ok := cutServerID(id)
	if !ok {
		return ""
	}
	return name
}

// cutServerID splits at the last point, since a name may hold some itself.
func cutServerID(id string) (name, suffix string, ok bool) {
	at := strings.LastIndexByte(id, '.')
	if at < 1 {
		return "", "", false
	}
	name, suffix = id[:at], id[at+1:]
	raw, err := hex.DecodeString(suffix)
	return name, suffix, err == nil && len(raw) == 4 && CheckName("name", name) == nil
}

// writeDurably puts data at path, whole or not at all, and returns once it is on the disk:
// an identity that a crash takes back would be a second vote.
func writeDurably(path string, data []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	if _, err = f.Write(data); err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = folder.Close() }()
	return folder.Sync()
}
