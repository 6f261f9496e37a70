package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"strings"
)

// The form of a segment's file: frames, one after the other, each a mark, the payload's
// length, its checksum and the payload, a journalpb.Record.
const (
	mark       = "\xf1hg\xfe" // no part of valid UTF-8
	frameHead  = 12
	maxPayload = 128 << 10
	scanBuffer = 256 << 10 // holds the longest frame
)

// origin is what a frame is written by and for: a frame from elsewhere does not verify, be it
// an old block of the disk or bytes that a client chose.
type origin struct{ segment, incarnation uint64 }

// sum is CRC-32C, begun with a mix of where the payload stands.
func (o origin) sum(at int64, payload []byte) uint32 {
	h := mix(o.incarnation)
	h = mix(h ^ o.segment)
	h = mix(h ^ uint64(at))
	h = mix(h ^ uint64(len(payload)))
	return crc32.Update(uint32(h>>32), crc32.MakeTable(crc32.Castagnoli), payload)
}

// mix is the finalizer of splitmix64 (Steele, Lea, Flood 2014).
func mix(h uint64) uint64 {
	h += 0x9e3779b97f4a7c15
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// appendFrame adds the frame of a payload that is to stand at an offset of the file.
func (o origin) appendFrame(dst []byte, at int64, payload []byte) []byte {
	dst = append(dst, mark...)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(payload)))
	dst = binary.LittleEndian.AppendUint32(dst, o.sum(at, payload))
	return append(dst, payload...)
}

const (
	namePrefix = "usage-"
	nameSuffix = ".hgu"
	newSuffix  = ".new" // of a segment that is not whole yet
	lockName   = ".lock"
)

// name of the segment's file. The incarnation stands in it so that a damaged head does not
// make the rest unreadable.
func (o origin) name() string {
	return fmt.Sprintf("%s%06d-%016x%s", namePrefix, o.segment, o.incarnation, nameSuffix)
}

// parseName undoes name; other names are not ours.
func parseName(name string) (origin, bool) {
	rest, ok := strings.CutPrefix(name, namePrefix)
	number, incarnation, cut := strings.Cut(strings.TrimSuffix(rest, nameSuffix), "-")
	if !ok || !cut {
		return origin{}, false
	}
	n, err1 := strconv.ParseUint(number, 10, 64)
	i, err2 := strconv.ParseUint(incarnation, 16, 64)
	o := origin{n, i}
	return o, err1 == nil && err2 == nil && n > 0 && o.name() == name
}

// badStretch is what a scanner passes over: bytes that are no frame.
type badStretch struct{ from, to int64 }

func (b *badStretch) Error() string {
	return fmt.Sprintf("bytes %d to %d are no record", b.from, b.to)
}

// scanner reads the frames of a file.
type scanner struct {
	file io.ReaderAt
	from origin
	at   int64 // of the next frame
	end  int64 // where the frames end

	buf  []byte // the file's bytes from base on
	base int64
}

func newScanner(file io.ReaderAt, from origin, end int64) *scanner {
	return &scanner{file: file, from: from, end: end, buf: make([]byte, 0, min(scanBuffer, max(end, frameHead)))}
}

// next gives the next frame's payload, valid until the next call, and where it begins. It
// fails with a *badStretch where something else stands; the call after that goes on behind it. It
// ends with io.EOF. Other errors are the disk's.
func (s *scanner) next() (payload []byte, at int64, err error) {
	if s.at >= s.end {
		return nil, s.at, io.EOF
	}
	payload, ok, err := s.frame(s.at)
	if err != nil {
		return nil, s.at, err
	}
	if ok {
		at, s.at = s.at, s.at+int64(frameHead+len(payload))
		return payload, at, nil
	}
	bad := &badStretch{from: s.at}
	for s.at++; s.at < s.end; s.at++ {
		found, err := s.seek()
		if err != nil {
			return nil, s.at, err
		}
		if !found {
			break
		}
		_, ok, err := s.frame(s.at)
		if err != nil {
			return nil, s.at, err
		}
		if ok {
			bad.to = s.at
			return nil, bad.from, bad
		}
	}
	s.at, bad.to = s.end, s.end
	return nil, bad.from, bad
}

// frame checks for a frame at an offset.
func (s *scanner) frame(at int64) (payload []byte, ok bool, err error) {
	head, err := s.bytes(at, frameHead)
	if len(head) < frameHead || string(head[:4]) != mark {
		return nil, false, err
	}
	length := int64(binary.LittleEndian.Uint32(head[4:]))
	sum := binary.LittleEndian.Uint32(head[8:])
	if length > maxPayload || at+frameHead+length > s.end {
		return nil, false, nil
	}
	payload, err = s.bytes(at+frameHead, int(length))
	if int64(len(payload)) < length || s.from.sum(at, payload) != sum {
		return nil, false, err
	}
	return payload, true, nil
}

// seek moves to the next mark, if there is one.
func (s *scanner) seek() (bool, error) {
	for s.at < s.end {
		part, err := s.bytes(s.at, int(min(scanBuffer/2, s.end-s.at)))
		if err != nil || len(part) < len(mark) {
			return false, err
		}
		if i := bytes.Index(part, []byte(mark)); i >= 0 {
			s.at += int64(i)
			return true, nil
		}
		s.at += int64(len(part) - len(mark) + 1)
	}
	return false, nil
}

// bytes gives n bytes at an offset, fewer where the file ends.
func (s *scanner) bytes(at int64, n int) ([]byte, error) {
	if have := s.base + int64(len(s.buf)); at < s.base || at+int64(n) > have {
		want := min(int64(cap(s.buf)), max(s.end-at, int64(n)))
		got, err := s.file.ReadAt(s.buf[:want], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		s.buf, s.base = s.buf[:got], at
	}
	from := at - s.base
	return s.buf[from:min(from+int64(n), int64(len(s.buf)))], nil
}
