package lease

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"google.golang.org/protobuf/proto"

	"headgate/lease/leasepb"
)

// The form of saved partitions, version 1: the line partitionsHeader and the epoch of the view in which
// they were owned, in 8 bytes; then records, each its length in 4 bytes and so many bytes: a
// HandOffPart of lease.proto, those of one partition in a row, from the one with the head to the one
// with the end; an empty record; and last the CRC-32C of all before it, in 4 bytes. Fixed numbers are
// big-endian.
const (
	partitionsHeader = "headgate partitions 1\n"
	maxPart          = 64 << 20 // bytes
)

// ErrSaved is what Load's error wraps where the levels can't be read.
var ErrSaved = errors.New("damaged saved levels")

// Save writes what this process owned and did not hand over, for Load in a later process. It is for
// after HandOver, when nothing is granted any more. It buffers, and neither syncs nor closes w.
func (m *Manager) Save(w io.Writer) error {
	m.ownerMu.Lock()
	epoch, hs := m.owner.Save(m.cfg.Clock())
	m.ownerMu.Unlock()
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	bw := bufio.NewWriterSize(io.MultiWriter(w, sum), 1<<16)
	_, err := bw.Write(binary.BigEndian.AppendUint64([]byte(partitionsHeader), epoch))
	for _, h := range hs {
		if h.To == 0 { // whoever is next
			h.To = m.cfg.Self.Incarnation
		}
		if err = errors.Join(err, saveHandoff(bw, h)); err != nil {
			break
		}
	}
	if err == nil {
		_, err = bw.Write(make([]byte, 4))
	}
	if err == nil {
		err = bw.Flush()
	}
	if err == nil {
		_, err = w.Write(sum.Sum(nil))
	}
	if err != nil {
		return fmt.Errorf("lease: save levels: %w", err)
	}
	return nil
}

func saveHandoff(w io.Writer, h *Handoff) error {
	for part := range handParts(h) {
		b, err := proto.Marshal(part)
		if err != nil {
			return err
		}
		if _, err := w.Write(binary.BigEndian.AppendUint32(nil, uint32(len(b)))); err != nil {
			return err
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// Load takes what Save wrote in an earlier process of this node, before the first Step. It counts only
// if the first view of which this process is a member is the one after that of Save. Where the form
// is damaged its error wraps ErrSaved, and nothing was taken.
func (m *Manager) Load(r io.Reader) (buckets int, err error) {
	epoch, hs, err := loadHandoffs(r)
	if err != nil {
		return 0, fmt.Errorf("lease: load levels: %w", err)
	}
	for _, h := range hs {
		buckets += len(h.Buckets)
	}
	m.ownerMu.Lock()
	defer m.ownerMu.Unlock()
	m.owner.Load(epoch, hs)
	return buckets, nil
}

func loadHandoffs(r io.Reader) (epoch uint64, hs []*Handoff, err error) {
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	br := bufio.NewReaderSize(r, 1<<16)
	in := io.TeeReader(br, sum)
	head := make([]byte, len(partitionsHeader)+8)
	if _, err := io.ReadFull(in, head); err != nil {
		return 0, nil, damaged("the header", err)
	}
	if !bytes.HasPrefix(head, []byte(partitionsHeader)) {
		return 0, nil, damaged(fmt.Sprintf("they begin with %q, not with %q", head[:len(partitionsHeader)], partitionsHeader), nil)
	}
	epoch = binary.BigEndian.Uint64(head[len(partitionsHeader):])
	var open *Handoff // whose end has not come
	for {
		part, err := loadPart(in)
		switch {
		case err != nil:
			return 0, nil, err
		case part == nil && open != nil:
			return 0, nil, damaged("a partition without an end", nil)
		case part == nil:
			return epoch, hs, loadEnd(br, sum.Sum32())
		}
		if open == nil {
			if open, err = handOffOf(part.GetHead()); err != nil {
				return 0, nil, damaged(err.Error(), nil)
			}
			if hs = append(hs, open); len(hs) > wirePartitions {
				return 0, nil, damaged("too many partitions", nil)
			}
		}
		for _, b := range part.GetBuckets() {
			hb, err := handedOf(b)
			if err != nil {
				return 0, nil, damaged(err.Error(), nil)
			}
			open.Buckets = append(open.Buckets, hb)
		}
		if part.GetEnd() {
			if part.GetCount() != uint64(len(open.Buckets)) {
				return 0, nil, damaged("a partition with another number of buckets than it says", nil)
			}
			open = nil
		}
	}
}

// loadPart reads a record; nil: the empty one.
func loadPart(r io.Reader) (*leasepb.HandOffPart, error) {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, damaged("a record's length", err)
	}
	size := binary.BigEndian.Uint32(length[:])
	if size == 0 {
		return nil, nil
	}
	if size > maxPart {
		return nil, damaged(fmt.Sprintf("a record of %d bytes", size), nil)
	}
	var buf bytes.Buffer // grows with what is there, not with what is said to be
	if n, err := io.CopyN(&buf, r, int64(size)); n < int64(size) {
		return nil, damaged("a record", err)
	}
	part := &leasepb.HandOffPart{}
	if err := proto.Unmarshal(buf.Bytes(), part); err != nil {
		return nil, damaged("a record: "+err.Error(), nil)
	}
	return part, nil
}

// loadEnd checks the checksum, and that nothing comes behind it.
func loadEnd(r *bufio.Reader, want uint32) error {
	var sum [4]byte
	if _, err := io.ReadFull(r, sum[:]); err != nil {
		return damaged("the checksum", err)
	}
	if got := binary.BigEndian.Uint32(sum[:]); got != want {
		return damaged(fmt.Sprintf("the checksum is %08x and should be %08x", got, want), nil)
	}
	if _, err := r.ReadByte(); !errors.Is(err, io.EOF) {
		return damaged("something follows their end", nil)
	}
	return nil
}

// damaged says what is wrong. A read that failed for a reason of its own is not damage.
func damaged(what string, err error) error {
	switch {
	case err == nil:
		return fmt.Errorf("%w: %s", ErrSaved, what)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: they end in the middle, in %s", ErrSaved, what)
	}
	return fmt.Errorf("read %s: %w", what, err)
}
