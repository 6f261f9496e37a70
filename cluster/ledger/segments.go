package ledger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// indexSealed gives an index to each segment whose tail was cut off: raft-wal v0.4.0 seals such
// a segment without one, finds its way in it only until the process ends, and could not read a
// single entry of it afterwards. It goes before the log is opened.
func (s *store) indexSealed(meta *metadb.BoltMetaDB) error {
	state, err := meta.Load(s.dir)
	if err != nil {
		return err
	}
	found := false
	for i := range state.Segments {
		seg := &state.Segments[i]
		if seg.SealTime.IsZero() || seg.IndexStart != 0 {
			continue
		}
		if seg.IndexStart, err = appendIndex(s.dir, *seg); err != nil {
			return err
		}
		found = true
	}
	if !found {
		return nil
	}
	return meta.CommitState(state)
}

// appendIndex writes where each entry of a segment begins behind its end, durably, and gives
// the place of the first. Done twice, the first one lies idle.
func appendIndex(dir string, seg types.SegmentInfo) (start uint64, err error) {
	path := filepath.Join(dir, segment.FileName(seg))
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("reading the ledger's log: %w", err)
	}
	offsets, err := entryOffsets(data, int(seg.MaxIndex-seg.BaseIndex)+1)
	if err != nil {
		return 0, &CorruptError{Path: path, Err: err}
	}
	at := (len(data) + 7) &^ 7
	frame := binary.LittleEndian.AppendUint32([]byte{frameIndex, 0, 0, 0}, uint32(len(offsets)))
	frame = append(frame, offsets...)
	frame = append(frame, make([]byte, (8-len(frame)%8)%8)...)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return 0, fmt.Errorf("writing the ledger's log: %w", err)
	}
	_, err = f.WriteAt(frame, int64(at))
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return 0, fmt.Errorf("writing the ledger's log: %w", err)
	}
	return uint64(at + frameHeader), nil
}

// entryOffsets finds where the first n entries of a segment begin, four bytes each.
func entryOffsets(data []byte, n int) (offsets []byte, err error) {
	for at := segmentHeader; len(offsets) < 4*n; {
		if at+frameHeader > len(data) {
			return nil, fmt.Errorf("it ends after %d of %d entries", len(offsets)/4, n)
		}
		size := uint64(binary.LittleEndian.Uint32(data[at+4:]))
		switch data[at] {
		case frameCommit:
			at += frameHeader
			continue
		case frameEntry:
			offsets = binary.LittleEndian.AppendUint32(offsets, uint32(at))
		default:
			return nil, fmt.Errorf("unreadable from byte %d on, after %d of %d entries", at, len(offsets)/4, n)
		}
		if size > uint64(len(data)-at-frameHeader) {
			return nil, fmt.Errorf("entry at byte %d is cut off", at)
		}
		at += frameHeader + (int(size)+7)&^7
	}
	return offsets, nil
}
