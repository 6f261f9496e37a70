package journal

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"time"
	"unicode/utf8"
)

// The records in protobuf's wire format, written and read by hand: a reservation and its
// usage stand in every request's way, and an export reads millions. TestWire holds them to
// the generated code. Fields are written in the order of their numbers, empty ones left out.

// Numbers of Record.kind.
const (
	recHead        = 1
	recCheckpoint  = 2
	recReservation = 3
	recUsage       = 4
	recClosed      = 5
	recStop        = 6
)

// Wire types.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireFixed32 = 5
)

func putUint(b []byte, field int, v uint64) []byte {
	if v == 0 {
		return b
	}
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(field)<<3|wireVarint), v)
}

func putInt(b []byte, field int, v int64) []byte { return putUint(b, field, uint64(v)) }

func putBool(b []byte, field int, v bool) []byte {
	if !v {
		return b
	}
	return putUint(b, field, 1)
}

func putFixed(b []byte, field int, v uint64) []byte {
	if v == 0 {
		return b
	}
	return binary.LittleEndian.AppendUint64(binary.AppendUvarint(b, uint64(field)<<3|wireFixed64), v)
}

func putText(b []byte, field int, s string) []byte {
	if s == "" {
		return b
	}
	b = binary.AppendUvarint(b, uint64(field)<<3|wireBytes)
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func putTime(b []byte, field int, t time.Time) []byte { return putInt(b, field, nanos(t)) }

// begin starts a nested message; end, given where it began, ends it.
func begin(b []byte, field int) ([]byte, int) {
	b = append(binary.AppendUvarint(b, uint64(field)<<3|wireBytes), 0)
	return b, len(b)
}

func end(b []byte, from int) []byte {
	n := len(b) - from
	more := (bits.Len(uint(n)|1)+6)/7 - 1 // bytes of the length beyond the one that is there
	for range more {
		b = append(b, 0)
	}
	copy(b[from+more:], b[from:from+n])
	binary.PutUvarint(b[from-1:], uint64(n))
	return b
}

func putAccount(b []byte, field int, a *Account) []byte {
	b, from := begin(b, field)
	b = putText(b, 1, a.Tenant)
	b = putText(b, 2, a.Budget)
	b = putText(b, 3, a.Subject)
	b = putInt(b, 4, a.Start)
	return end(putInt(b, 5, a.End), from)
}

func putParts(b []byte, field int, parts []Part) []byte {
	for i := range parts {
		var from int
		b, from = begin(b, field)
		b = putAccount(b, 1, &parts[i].Account)
		b = end(putInt(b, 2, parts[i].Amount), from)
	}
	return b
}

// putReservation adds the fields of a Reservation.
func putReservation(b []byte, r *Reservation) []byte {
	b = putUint(b, 1, r.ID)
	b = putTime(b, 2, r.Time)
	b = putText(b, 3, clip(r.RequestID))
	b = putText(b, 4, clip(r.Tenant))
	b = putText(b, 5, clip(r.Key))
	b = putText(b, 6, clip(r.User))
	b = putText(b, 7, clip(r.Model))
	b = putInt(b, 8, r.InputTokens)
	b = putInt(b, 9, r.OutputTokens)
	b = putInt(b, 10, r.Cost)
	return putParts(b, 11, r.Parts)
}

// putUsage adds the fields of a Usage, without Node, which its segment says.
func putUsage(b []byte, u *Usage) []byte {
	b = putUint(b, 1, u.ID)
	b = putFixed(b, 2, u.Incarnation)
	b = putTime(b, 3, u.Time)
	b = putTime(b, 4, u.Started)
	b = putText(b, 5, clip(u.RequestID))
	b = putText(b, 6, clip(u.Tenant))
	b = putText(b, 7, clip(u.Key))
	b = putText(b, 8, clip(u.User))
	b = putText(b, 9, clip(u.Surface))
	b = putText(b, 10, clip(u.Model))
	b = putText(b, 11, clip(u.Asked))
	b = putText(b, 12, clip(u.Backend))
	b = putInt(b, 13, u.Input)
	b = putInt(b, 14, u.CachedInput)
	b = putInt(b, 15, u.CacheWrite)
	b = putInt(b, 16, u.CacheWrite1h)
	b = putInt(b, 17, u.Output)
	b = putInt(b, 18, u.Images)
	b = putInt(b, 19, u.AudioSeconds)
	b = putInt(b, 20, u.Cost)
	b = putInt(b, 21, u.Reserved)
	b = putText(b, 22, clip(u.Tier))
	b = putInt(b, 23, int64(u.Latency))
	b = putInt(b, 24, int64(u.TTFT))
	b = putInt(b, 25, int64(int32(u.Status)))
	b = putText(b, 26, clip(u.Outcome))
	b = putBool(b, 27, u.Stream)
	b = putBool(b, 28, u.Estimated)
	return putParts(b, 29, u.Parts)
}

// before tells of the segment before a head's.
type before struct {
	segment          uint64
	end, first, last int64
}

// head is a segment's first record.
type head struct {
	version     uint64
	segment     uint64
	incarnation uint64
	node, boot  string
	created     int64
	before      *before
	checkpoints uint64
}

func putHead(b []byte, h *head) []byte {
	b = putUint(b, 1, h.version)
	b = putUint(b, 2, h.segment)
	b = putFixed(b, 3, h.incarnation)
	b = putText(b, 4, h.node)
	b = putText(b, 5, h.boot)
	b = putInt(b, 6, h.created)
	if h.before != nil {
		var from int
		b, from = begin(b, 7)
		b = putUint(b, 1, h.before.segment)
		b = putInt(b, 2, h.before.end)
		b = putInt(b, 3, h.before.first)
		b = end(putInt(b, 4, h.before.last), from)
	}
	return putUint(b, 8, h.checkpoints)
}

func putTotal(b []byte, field int, a *Account, t *total) []byte {
	b, from := begin(b, field)
	b = putAccount(b, 1, a)
	b = putInt(b, 2, t.settled)
	b = putInt(b, 3, t.crashed)
	b = putInt(b, 4, t.lost)
	return end(b, from)
}

// clip cuts a name to MaxName bytes, between two characters.
func clip(s string) string {
	if len(s) <= MaxName {
		return s
	}
	cut := MaxName
	for cut > MaxName-utf8.UTFMax && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut]
}

// nanos is t since the Unix epoch, 0 for the zero time.
func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// atNanos undoes nanos.
func atNanos(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

var errMalformed = errors.New("malformed record")

// fields walks over a message's fields.
type fields struct {
	rest  []byte
	field int
	v     uint64 // of a varint or fixed one
	data  []byte // of one with bytes
	bad   bool
}

// next moves to the next field; at the end, or where the message is malformed (bad), it is
// false.
func (f *fields) next() bool {
	if len(f.rest) == 0 {
		return false
	}
	key, n := binary.Uvarint(f.rest)
	if n <= 0 || key>>3 == 0 || key>>3 > 1<<29-1 {
		return f.malformed()
	}
	f.rest, f.field, f.v, f.data = f.rest[n:], int(key>>3), 0, nil
	switch key & 7 {
	case wireVarint:
		f.v, n = binary.Uvarint(f.rest)
		if n <= 0 {
			return f.malformed()
		}
		f.rest = f.rest[n:]
	case wireFixed64:
		if len(f.rest) < 8 {
			return f.malformed()
		}
		f.v, f.rest = binary.LittleEndian.Uint64(f.rest), f.rest[8:]
	case wireFixed32:
		if len(f.rest) < 4 {
			return f.malformed()
		}
		f.v, f.rest = uint64(binary.LittleEndian.Uint32(f.rest)), f.rest[4:]
	case wireBytes:
		size, n := binary.Uvarint(f.rest)
		if n <= 0 || size > uint64(len(f.rest)-n) {
			return f.malformed()
		}
		f.data, f.rest = f.rest[n:n+int(size)], f.rest[n+int(size):]
	default:
		return f.malformed()
	}
	return true
}

func (f *fields) malformed() bool {
	f.bad, f.rest = true, nil
	return false
}

func (f *fields) err() error {
	if f.bad {
		return errMalformed
	}
	return nil
}

// names keeps the strings that records repeat; it is bounded, and nil keeps none.
type names map[string]string

const maxNames = 1 << 12

func (m names) text(b []byte) string {
	if s, ok := m[string(b)]; ok {
		return s
	}
	s := string(b)
	if m != nil && len(m) < maxNames {
		m[s] = s
	}
	return s
}

func (m names) account(b []byte, a *Account) error {
	f := fields{rest: b}
	for f.next() {
		switch f.field {
		case 1:
			a.Tenant = m.text(f.data)
		case 2:
			a.Budget = m.text(f.data)
		case 3:
			a.Subject = m.text(f.data)
		case 4:
			a.Start = int64(f.v)
		case 5:
			a.End = int64(f.v)
		}
	}
	return f.err()
}

func (m names) part(b []byte, p *Part) error {
	f := fields{rest: b}
	for f.next() {
		switch f.field {
		case 1:
			if err := m.account(f.data, &p.Account); err != nil {
				return err
			}
		case 2:
			p.Amount = int64(f.v)
		}
	}
	return f.err()
}

func (m names) parts(b []byte, parts []Part) ([]Part, error) {
	parts = append(parts, Part{})
	return parts, m.part(b, &parts[len(parts)-1])
}

// reservation reads a Reservation into r, whose Parts it reuses.
func (m names) reservation(b []byte, r *Reservation) (err error) {
	*r = Reservation{Parts: r.Parts[:0]}
	f := fields{rest: b}
	for f.next() {
		switch f.field {
		case 1:
			r.ID = f.v
		case 2:
			r.Time = atNanos(int64(f.v))
		case 3:
			r.RequestID = string(f.data)
		case 4:
			r.Tenant = m.text(f.data)
		case 5:
			r.Key = m.text(f.data)
		case 6:
			r.User = m.text(f.data)
		case 7:
			r.Model = m.text(f.data)
		case 8:
			r.InputTokens = int64(f.v)
		case 9:
			r.OutputTokens = int64(f.v)
		case 10:
			r.Cost = int64(f.v)
		case 11:
			if r.Parts, err = m.parts(f.data, r.Parts); err != nil {
				return err
			}
		}
	}
	return f.err()
}

// usage reads a Usage into u, whose Parts it reuses.
func (m names) usage(b []byte, u *Usage) error {
	*u = Usage{Parts: u.Parts[:0]}
	f := fields{rest: b}
	for f.next() {
		if f.data != nil {
			if err := m.usageText(&f, u); err != nil {
				return err
			}
			continue
		}
		switch f.field {
		case 1:
			u.ID = f.v
		case 2:
			u.Incarnation = f.v
		case 3:
			u.Time = atNanos(int64(f.v))
		case 4:
			u.Started = atNanos(int64(f.v))
		case 13:
			u.Input = int64(f.v)
		case 14:
			u.CachedInput = int64(f.v)
		case 15:
			u.CacheWrite = int64(f.v)
		case 16:
			u.CacheWrite1h = int64(f.v)
		case 17:
			u.Output = int64(f.v)
		case 18:
			u.Images = int64(f.v)
		case 19:
			u.AudioSeconds = int64(f.v)
		case 20:
			u.Cost = int64(f.v)
		case 21:
			u.Reserved = int64(f.v)
		case 23:
			u.Latency = time.Duration(f.v)
		case 24:
			u.TTFT = time.Duration(f.v)
		case 25:
			u.Status = int(int32(f.v))
		case 27:
			u.Stream = f.v != 0
		case 28:
			u.Estimated = f.v != 0
		}
	}
	return f.err()
}

// usageText reads a field of bytes.
func (m names) usageText(f *fields, u *Usage) (err error) {
	switch f.field {
	case 5:
		u.RequestID = string(f.data)
	case 6:
		u.Tenant = m.text(f.data)
	case 7:
		u.Key = m.text(f.data)
	case 8:
		u.User = m.text(f.data)
	case 9:
		u.Surface = m.text(f.data)
	case 10:
		u.Model = m.text(f.data)
	case 11:
		u.Asked = m.text(f.data)
	case 12:
		u.Backend = m.text(f.data)
	case 22:
		u.Tier = m.text(f.data)
	case 26:
		u.Outcome = m.text(f.data)
	case 29:
		u.Parts, err = m.parts(f.data, u.Parts)
	case 30:
		u.Node = m.text(f.data)
	}
	return err
}

func parseHead(b []byte) (h head, err error) {
	f := fields{rest: b}
	for f.next() {
		switch f.field {
		case 1:
			h.version = f.v
		case 2:
			h.segment = f.v
		case 3:
			h.incarnation = f.v
		case 4:
			h.node = string(f.data)
		case 5:
			h.boot = string(f.data)
		case 6:
			h.created = int64(f.v)
		case 7:
			if h.before, err = parseBefore(f.data); err != nil {
				return h, err
			}
		case 8:
			h.checkpoints = f.v
		}
	}
	return h, f.err()
}

func parseBefore(b []byte) (*before, error) {
	f, out := fields{rest: b}, &before{}
	for f.next() {
		switch f.field {
		case 1:
			out.segment = f.v
		case 2:
			out.end = int64(f.v)
		case 3:
			out.first = int64(f.v)
		case 4:
			out.last = int64(f.v)
		}
	}
	return out, f.err()
}

// parseRecord tells a record's kind and gives its message.
func parseRecord(payload []byte) (kind int, message []byte, err error) {
	f := fields{rest: payload}
	for f.next() {
		kind, message = f.field, f.data
	}
	return kind, message, f.err()
}
