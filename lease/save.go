package lease

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"

	"headgate/limiter"
)

// The form of saved levels, version 1: the line savedHeader and the reading at which they
// were saved, in 8 bytes; then records, each its length in 4 bytes and so many bytes, of which the
// first is its kind:
//
//	recordLimit   algorithm (a byte), rate count, rate period in ns, burst
//	recordBucket  number of its limit, in the order of the limits' records from 0; tenant,
//	              limit and subject, each behind its length; limiter.AppendState's bytes
//	recordEnd     number of buckets
//
// and last the CRC-32C of all before it, in 4 bytes. Fixed numbers are big-endian, all
// others uvarints. The same form may come with other limits and levels in it; a change of it
// needs another header.
const (
	savedHeader  = "headgate levels 1\n"
	recordEnd    = 0
	recordLimit  = 1
	recordBucket = 2

	// maxRecord bounds a record: a log of limiter.MaxLogEntries takes 110 kB, and no key comes
	// near the rest.
	maxRecord = 1 << 20
)

// MaxFloorFill is how long a bucket may take to fill, or its window be, for a floor to count.
// An hour's or a day's limit that started empty would be an outage.
const MaxFloorFill = time.Minute

// ErrSaved is what Load's error wraps where the levels can't be read.
var ErrSaved = errors.New("damaged saved levels")

// SetFloor says that nobody knows what was spent before at: a bucket without a level counts as
// having been empty then, not full, if it fills within MaxFloorFill. Semaphores start free all
// the same. It is for a process whose predecessor's levels are lost. Call it before any charge.
func (l *Local) SetFloor(at int64) { l.floor.Store(at) }

// fresh is the level of a bucket that has none.
func (l *Local) fresh(now int64, limit *limiter.Limit) limiter.State {
	at := l.floor.Load()
	// Two periods are what a sliding window looks back on.
	if at == 0 || now-at >= 2*int64(MaxFloorFill) {
		return limiter.State{}
	}
	fills := limit.Rate.Per
	if limit.Algorithm == limiter.GCRA {
		s := limit.EmptyAt(at, at)
		fills = limit.Take(&s, at, 0, limiter.Refuse).Reset
	}
	if fills > MaxFloorFill {
		return limiter.State{}
	}
	return limit.EmptyAt(now, at)
}

// saver writes the form. Its error stays.
type saver struct {
	w      *bufio.Writer
	err    error
	length [4]byte
	record []byte
	limits map[limiter.Limit]uint64
	n      uint64
}

func (s *saver) put(record []byte) {
	switch {
	case s.err != nil:
		return
	case len(record) > maxRecord:
		s.err = fmt.Errorf("a bucket's record has %d bytes, more than %d", len(record), maxRecord)
		return
	}
	if _, s.err = s.w.Write(binary.BigEndian.AppendUint32(s.length[:0], uint32(len(record)))); s.err == nil {
		_, s.err = s.w.Write(record)
	}
}

// limit returns the number of a limit, whose revision means something in this process only.
func (s *saver) limit(l limiter.Limit) uint64 {
	l.Revision = 0
	if i, ok := s.limits[l]; ok {
		return i
	}
	b := []byte{recordLimit, byte(l.Algorithm)}
	for _, v := range [...]int64{l.Rate.Count, int64(l.Rate.Per), l.Burst} {
		b = binary.AppendUvarint(b, uint64(v))
	}
	s.put(b)
	i := uint64(len(s.limits))
	s.limits[l] = i
	return i
}

func (s *saver) bucket(now int64, k *limiter.Key, a *account) {
	b := append(s.record[:0], recordBucket)
	b = binary.AppendUvarint(b, s.limit(*a.limit))
	for _, t := range [...]string{k.Tenant, k.Limit, k.Subject} {
		b = binary.AppendUvarint(b, uint64(len(t)))
		b = append(b, t...)
	}
	s.record = a.limit.AppendState(b, &a.state, now)
	s.put(s.record)
	s.n++
}

// Save writes every bucket that is not full and is no semaphore, for Load. It is for a
// process that decides nothing more: a charge taken or settled meanwhile may be in it or not,
// and would wait for w. It buffers, and neither syncs nor closes w.
func (l *Local) Save(now int64, w io.Writer) error {
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	s := &saver{w: bufio.NewWriterSize(io.MultiWriter(w, sum), 1<<16), limits: map[limiter.Limit]uint64{}}
	_, s.err = s.w.Write(binary.BigEndian.AppendUint64([]byte(savedHeader), uint64(max(now, 0))))
	for i := range l.shards {
		shard := &l.shards[i]
		shard.each(func(id uint32) {
			b, class, at := shard.at(id)
			a := &b.values[at]
			if s.err != nil || a.limit.Algorithm == limiter.Semaphore || a.limit.Full(&a.state, now) {
				return
			}
			k := b.key(class, at)
			s.bucket(now, &k, a)
		})
	}
	s.put(binary.AppendUvarint([]byte{recordEnd}, s.n))
	if s.err == nil {
		s.err = s.w.Flush()
	}
	if s.err == nil {
		_, s.err = w.Write(sum.Sum(nil))
	}
	if s.err != nil {
		return fmt.Errorf("lease: save levels: %w", s.err)
	}
	return nil
}

// Load fills an empty table, before any charge, with what Save wrote in an earlier process,
// and returns how many buckets that made: those that are not full at now. It takes all or
// nothing; where the levels are damaged its error wraps ErrSaved. The time since Save gives a
// GCRA nothing back (see limiter.RestoreState); where a floor stands, no level is above it.
//
// A loaded bucket's limit has revision 0, whatever it had in the earlier process, so that the
// first charge by a policy of this one converts it. All buckets are taken even where
// MaxBuckets is less than it was.
func (l *Local) Load(now int64, r io.Reader) (n int, err error) {
	if l.Len() > 0 {
		return 0, errors.New("lease: load levels: the table has buckets already")
	}
	d := loader{r: bufio.NewReaderSize(r, 1<<16), into: l, now: now}
	if err := d.all(); err != nil {
		l.clear()
		return 0, fmt.Errorf("lease: load levels: %w", err)
	}
	return l.Len(), nil
}

// clear forgets everything.
func (l *Local) clear() {
	for i := range l.shards {
		s := &l.shards[i]
		s.mu.Lock()
		l.count.Add(-int64(s.live))
		s.clear()
		s.mu.Unlock()
	}
}

// loader reads the form.
type loader struct {
	r      *bufio.Reader
	sum    uint32
	into   *Local
	saved  int64
	now    int64
	limits []*limiter.Limit
	n      uint64 // bucket records so far
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

func (d *loader) all() error {
	head := make([]byte, len(savedHeader)+8)
	if _, err := io.ReadFull(d.r, head); err != nil {
		return damaged("the header", err)
	}
	if !bytes.HasPrefix(head, []byte(savedHeader)) {
		return damaged(fmt.Sprintf("they begin with %q, not with %q", head[:len(savedHeader)], savedHeader), nil)
	}
	d.add(head)
	saved := binary.BigEndian.Uint64(head[len(savedHeader):])
	if d.saved = int64(saved); d.saved < 0 {
		return damaged("the time of saving is out of bounds", nil)
	}
	for buf := []byte(nil); ; {
		record, err := d.record(buf)
		if err != nil {
			return err
		}
		buf = record
		switch record[0] {
		case recordLimit:
			err = d.limit(record[1:])
		case recordBucket:
			err = d.bucket(record[1:])
		case recordEnd:
			return d.end(record[1:])
		default:
			err = damaged(fmt.Sprintf("a record of unknown kind %d", record[0]), nil)
		}
		if err != nil {
			return err
		}
	}
}

func (d *loader) add(p []byte) { d.sum = crc32.Update(d.sum, crc32.MakeTable(crc32.Castagnoli), p) }

// record reads the next one, which is not empty, into buf if it is large enough.
func (d *loader) record(buf []byte) ([]byte, error) {
	var length [4]byte
	if _, err := io.ReadFull(d.r, length[:]); err != nil {
		return nil, damaged("a record's length", err)
	}
	size := binary.BigEndian.Uint32(length[:])
	if size == 0 || size > maxRecord {
		return nil, damaged(fmt.Sprintf("a record of %d bytes", size), nil)
	}
	if uint64(cap(buf)) < uint64(size) {
		buf = make([]byte, size)
	}
	buf = buf[:size]
	if _, err := io.ReadFull(d.r, buf); err != nil {
		return nil, damaged("a record", err)
	}
	d.add(length[:])
	d.add(buf)
	return buf, nil
}

func (d *loader) limit(b []byte) error {
	l := &limiter.Limit{}
	if len(b) == 0 {
		return damaged("a limit without an algorithm", nil)
	}
	l.Algorithm, b = limiter.Algorithm(b[0]), b[1:]
	ok := true
	number := func() int64 {
		v, n := binary.Uvarint(b)
		if ok = ok && n > 0 && v <= uint64(limiter.MaxSpan); !ok {
			return 0
		}
		b = b[n:]
		return int64(v)
	}
	l.Rate.Count, l.Rate.Per, l.Burst = number(), time.Duration(number()), number()
	if !ok || len(b) > 0 || l.Algorithm == limiter.Semaphore {
		return damaged("a limit", nil)
	}
	if err := l.Validate(); err != nil {
		return damaged("a limit: "+err.Error(), nil)
	}
	if d.limits = append(d.limits, l); len(d.limits) > MaxMaxBuckets {
		return damaged(fmt.Sprintf("more than %d limits", MaxMaxBuckets), nil)
	}
	return nil
}

func (d *loader) bucket(b []byte) error {
	i, n := binary.Uvarint(b)
	if n <= 0 || i >= uint64(len(d.limits)) {
		return damaged("a bucket without a limit", nil)
	}
	l, b := d.limits[i], b[n:]
	var texts [3]string
	for i := range texts {
		size, n := binary.Uvarint(b)
		if n <= 0 || size > uint64(len(b)-n) {
			return damaged("a bucket's key", nil)
		}
		texts[i] = string(b[n : n+int(size)])
		b = b[n+int(size):]
	}
	k := limiter.Key{Tenant: texts[0], Limit: texts[1], Subject: texts[2]}
	state, err := l.RestoreState(b, d.saved, d.now)
	if err != nil {
		return damaged("a bucket's level: "+err.Error(), nil)
	}
	if d.n++; d.n > MaxMaxBuckets {
		return damaged(fmt.Sprintf("more than %d buckets", MaxMaxBuckets), nil)
	}
	if !d.into.restore(d.now, &k, l, &state) {
		return damaged("a bucket is in them twice", nil)
	}
	return nil
}

// end checks the count and the checksum, and that nothing comes behind them.
func (d *loader) end(b []byte) error {
	if n, size := binary.Uvarint(b); size <= 0 || size != len(b) || n != d.n {
		return damaged(fmt.Sprintf("they are %d buckets and should be %d", d.n, n), nil)
	}
	var sum [4]byte
	if _, err := io.ReadFull(d.r, sum[:]); err != nil {
		return damaged("the checksum", err)
	}
	if got := binary.BigEndian.Uint32(sum[:]); got != d.sum {
		return damaged(fmt.Sprintf("the checksum is %08x and should be %08x", got, d.sum), nil)
	}
	switch _, err := d.r.ReadByte(); {
	case err == nil:
		return damaged("something follows their end", nil)
	case !errors.Is(err, io.EOF):
		return damaged("the end", err)
	}
	return nil
}

// restore adds a bucket that is not full, at the lower of its level and the floor. It returns
// false if there is one already.
func (l *Local) restore(now int64, k *limiter.Key, limit *limiter.Limit, state *limiter.State) bool {
	p := l.locate(k)
	s := &l.shards[p.shard]
	s.mu.Lock()
	defer s.mu.Unlock()
	if found, _ := s.find(p.tag, k); found != nil {
		return false
	}
	if floor := l.fresh(now, limit); limit.Take(&floor, now, 0, limiter.Refuse).Remaining < limit.Take(state, now, 0, limiter.Refuse).Remaining {
		*state = floor
	}
	if limit.Full(state, now) {
		return true
	}
	l.count.Add(1)
	found, _ := s.insert(p.tag, k)
	*found = account{limit, *state}
	return true
}
