package ledger

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
)

// snapshotVersion is the newest form of a snapshot that ReadState reads. Write writes the oldest that can hold it: 1
// has no durable buckets, 2 no budgets, and 3 nothing of caches.
const snapshotVersion = 4

// maxRecord bounds a record of a snapshot, in bytes: none is larger than a policy.
const maxRecord = MaxCommand + 1<<20

// Capture is a state at one moment. What is applied later does not show in it, and it may be
// written by any goroutine.
type Capture struct {
	facts    *Facts
	nano     int64
	shards   []*keyShard
	audit    []*AuditEntry // and the other trails behind it
	done     []done
	durables []*durable
	budgets  []*account
	tags     []*tagged
}

// Capture takes the state as it is, in a time that does not depend on how many keys there
// are (16384 shards), and that takes a few milliseconds for MaxDurable buckets, as many accounts, and MaxTags. It is for the goroutine that applies.
func (s *State) Capture() *Capture {
	return &Capture{
		facts: s.Facts(), nano: s.nano, shards: s.keys.table.Load().capture(), audit: slices.Concat(s.audit.entries(), s.events.entries(), s.tagTrail.entries()), done: s.done.last(),
		durables: s.durables.all(), budgets: s.budgets.all(), tags: s.tags.records(),
	}
}

// Facts are those of the moment.
func (c *Capture) Facts() *Facts { return c.facts }

// Write writes the snapshot: ledgerpb's Header, Records and Trailer, each with its length before it as
// a varint. States that applied the same log write the same bytes.
func (c *Capture) Write(w io.Writer) error {
	sw := &snapshotWriter{w: bufio.NewWriterSize(w, 64<<10), sum: sha256.New()}
	f := c.facts
	sw.message(&ledgerpb.Header{
		Version: c.version(), Index: f.Index, Changed: f.Changed, UnixNano: c.nano, ClusterId: f.ClusterID, StateHash: f.Hash[:],
	})
	for _, p := range f.History {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_Policy{Policy: &ledgerpb.PolicyRevision{
			Revision: p.Revision, UnixNano: nanoOrZero(p.Time), Actor: p.Actor, Text: p.Text, RolledBackTo: p.RolledBackTo, Index: p.Index,
		}}})
	}
	c.writeKeys(sw)
	for _, k := range f.Kills.All() {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_Kill{Kill: &ledgerpb.Kill{
			Kind: ledgerpb.KillKind(k.Kind), Name: k.Name, Reason: k.Reason, Actor: k.Actor, UnixNano: nanoOrZero(k.Time),
		}}})
	}
	for _, r := range f.Rungs.All() {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_Rung{Rung: &ledgerpb.Rung{
			Rung: r.Name, ExpiresUnixNano: nanoOrZero(r.Expires), Reason: r.Reason, Actor: r.Actor, UnixNano: nanoOrZero(r.Time),
		}}})
	}
	if f.View != nil {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_View{View: f.View.Message()}})
	}
	for _, t := range f.Tokens.All() {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_Token{Token: &ledgerpb.Token{
			Name: t.Name, Hash: t.Hash[:], Role: ledgerpb.Role(t.Role), CreatedUnixNano: nanoOrZero(t.Created), ExpiresUnixNano: nanoOrZero(t.Expires),
		}}})
	}
	for _, b := range c.durables {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_Durable{Durable: b.message()}})
	}
	for _, a := range c.budgets {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_Budget{Budget: a.message()}})
	}
	c.writeCaches(sw)
	for _, e := range c.audit {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_Audit{Audit: &ledgerpb.AuditEntry{
			Index: e.Index, UnixNano: nanoOrZero(e.Time), Actor: e.Actor, Action: e.Action, Object: e.Object, Before: e.Before, After: e.After,
		}}})
	}
	for i := range c.done {
		sw.record(&ledgerpb.Record{Body: &ledgerpb.Record_Done{Done: &ledgerpb.Done{Id: c.done[i].id[:], Result: c.done[i].result()}}})
	}
	sw.message(trailer(sw.records, sw.sum))
	if sw.err == nil {
		sw.err = sw.w.Flush()
	}
	if sw.err != nil {
		return fmt.Errorf("write a snapshot: %w", sw.err)
	}
	return nil
}

// version is the oldest that can hold it.
func (c *Capture) version() uint32 {
	switch {
	case c.facts.Caches.used():
		return snapshotVersion
	case len(c.budgets) > 0:
		return 3
	case len(c.durables) > 0:
		return 2
	}
	return 1
}

func (c *Capture) writeKeys(sw *snapshotWriter) {
	var m ledgerpb.Key
	rec := &ledgerpb.Record{Body: &ledgerpb.Record_Key{Key: &m}}
	for _, s := range c.shards {
		for i := range s.entries {
			k := s.entries[i].record
			m.Id, m.Hash, m.Tenant, m.Name, m.User, m.Class = k.ID, k.Hash[:], k.Tenant, k.Name, k.User, k.Class
			m.ExpiresUnixNano, m.CreatedUnixNano, m.Revoked, m.AssertUser = k.expires, k.created, k.Revoked, k.AssertUser
			m.Models, m.Routes, m.Surfaces = k.Models, k.Routes, k.Surfaces
			m.LastUsedUnix = int64(s.used.seconds[i].Load())
			if sw.record(rec); sw.err != nil {
				return
			}
		}
	}
}

// trailer ends a snapshot of so many records, whose bytes up to here have gone into sum.
func trailer(records uint64, sum hash.Hash) *ledgerpb.Record {
	return &ledgerpb.Record{Body: &ledgerpb.Record_Trailer{Trailer: &ledgerpb.Trailer{Records: records, Sha256: sum.Sum(nil)}}}
}

// snapshotWriter writes messages until the first error, which it keeps.
type snapshotWriter struct {
	w       *bufio.Writer
	sum     hash.Hash
	records uint64
	buf     []byte
	err     error
}

func (sw *snapshotWriter) record(r *ledgerpb.Record) {
	sw.records++
	sw.message(r)
}

func (sw *snapshotWriter) message(m proto.Message) {
	if sw.err != nil {
		return
	}
	if sw.buf, sw.err = appendMessage(sw.buf[:0], m); sw.err != nil {
		return
	}
	_, _ = sw.sum.Write(sw.buf) // never fails
	_, sw.err = sw.w.Write(sw.buf)
}

// appendMessage appends a message with its length before it.
func appendMessage(buf []byte, m proto.Message) ([]byte, error) {
	buf = protowire.AppendVarint(buf, uint64(proto.Size(m)))
	return proto.MarshalOptions{Deterministic: true, UseCachedSize: true}.MarshalAppend(buf, m)
}

// ErrSnapshotVersion says that the snapshot was written by a newer program.
var ErrSnapshotVersion = errors.New("the snapshot was written by a newer version: upgrade this node")

// SnapshotError says what of a snapshot is damaged.
type SnapshotError struct {
	Record uint64 // its number from 1; 0: the header
	Offset int64  // of the record, in bytes
	Reason string
}

func (e *SnapshotError) Error() string {
	what := fmt.Sprintf("record %d", e.Record)
	if e.Record == 0 {
		what = "its header"
	}
	return fmt.Sprintf("the snapshot is damaged: %s at byte %d %s: use another one", what, e.Offset, e.Reason)
}

// ReadState reads a snapshot that Capture.Write wrote. The error is a *SnapshotError if the
// snapshot is damaged, ErrSnapshotVersion if it is too new, else that of r. It reads r to its end.
func ReadState(r io.Reader) (*State, error) {
	sr := &snapshotReader{
		r: bufio.NewReaderSize(r, 64<<10), sum: sha256.New(), state: NewState(),
		kills: map[killName]*Kill{}, rungs: map[string]*Rung{}, tokens: Tokens{map[string]*Token{}, map[[32]byte]*Token{}},
	}
	sr.caches = sr.state.editCaches()
	if err := sr.header(); err != nil {
		return nil, err
	}
	for {
		msg, err := sr.next()
		if err != nil {
			return nil, err
		}
		var rec ledgerpb.Record
		if err := proto.Unmarshal(msg, &rec); err != nil {
			return nil, sr.damaged("cannot be decoded (%v)", err)
		}
		if rec.GetTrailer() != nil {
			return sr.finish(msg)
		}
		if err := sr.take(&rec); err != nil {
			return nil, err
		}
	}
}

type snapshotReader struct {
	r      *bufio.Reader
	sum    hash.Hash // over all but the record last read
	length []byte    // of the record last read, as it was written
	buf    []byte    // the record last read
	offset int64     // of it
	record uint64

	head   ledgerpb.Header
	state  *State
	keys   []*KeyRecord
	used   []uint32
	audit  []*AuditEntry
	events []*AuditEntry
	tagged []*AuditEntry

	caches         *cachesEdit
	lastGeneration *cacheName

	kills  map[killName]*Kill
	rungs  map[string]*Rung
	tokens Tokens
}

func (sr *snapshotReader) damaged(format string, args ...any) error {
	return &SnapshotError{sr.record, sr.offset, clip(fmt.Sprintf(format, args...))}
}

// next reads a message; it is valid until the next one is read.
func (sr *snapshotReader) next() ([]byte, error) {
	_, _ = sr.sum.Write(sr.length) // never fails
	_, _ = sr.sum.Write(sr.buf)
	sr.offset += int64(len(sr.length) + len(sr.buf))
	for sr.length, sr.buf = sr.length[:0], sr.buf[:0]; ; {
		b, err := sr.r.ReadByte()
		if err != nil {
			return nil, sr.short(err)
		}
		if sr.length = append(sr.length, b); b < 0x80 {
			break
		}
		if len(sr.length) == binary.MaxVarintLen64 {
			return nil, sr.damaged("has no valid length")
		}
	}
	size, used := protowire.ConsumeVarint(sr.length)
	if used != len(sr.length) || size > maxRecord {
		return nil, sr.damaged("claims to have %d bytes, of %d at most", size, maxRecord)
	}
	for len(sr.buf) < int(size) { // in steps: a wrong length must not take memory that no data follow
		at := len(sr.buf)
		sr.buf = slices.Grow(sr.buf, min(int(size)-at, 1<<20))
		sr.buf = sr.buf[:at+min(int(size)-at, 1<<20)]
		if _, err := io.ReadFull(sr.r, sr.buf[at:]); err != nil {
			return nil, sr.short(err)
		}
	}
	return sr.buf, nil
}

// short is what a failed read means.
func (sr *snapshotReader) short(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return sr.damaged("is cut off: the snapshot ends before its trailer")
	}
	return fmt.Errorf("read a snapshot: %w", err)
}

func (sr *snapshotReader) header() error {
	msg, err := sr.next()
	if err != nil {
		return err
	}
	if err := proto.Unmarshal(msg, &sr.head); err != nil || sr.head.GetVersion() == 0 {
		return sr.damaged("is not that of a ledger's snapshot")
	}
	if v := sr.head.GetVersion(); v > snapshotVersion {
		return fmt.Errorf("version %d, of %d known: %w", v, snapshotVersion, ErrSnapshotVersion)
	}
	sr.record = 1
	if n := len(sr.head.GetClusterId()); n != 0 && n != 16 || len(sr.head.GetStateHash()) != 32 {
		return sr.damaged("has a cluster id of %d bytes and a state hash of %d", n, len(sr.head.GetStateHash()))
	}
	return nil
}

// take puts a record into the state. Whatever it finds wrong is damage that the trailer would show
// too; it says better what.
func (sr *snapshotReader) take(rec *ledgerpb.Record) error {
	s := sr.state
	switch b := rec.GetBody().(type) {
	case *ledgerpb.Record_Policy:
		p := b.Policy
		if p.GetRevision() <= s.work.Revision() {
			return sr.damaged("is revision %d of the policy after %d", p.GetRevision(), s.work.Revision())
		}
		s.putPolicy(&PolicyRevision{p.GetRevision(), timeOrZero(p.GetUnixNano()), p.GetActor(), p.GetText(), p.GetRolledBackTo(), p.GetIndex()})
	case *ledgerpb.Record_Key:
		if err := checkKey(b.Key); err != nil {
			return sr.damaged("is no key: %v", err)
		}
		r := s.keys.table.Load().record(b.Key)
		if n := len(sr.keys); n > 0 && bytes.Compare(sr.keys[n-1].Hash[:], r.Hash[:]) >= 0 {
			return sr.damaged("is a key out of order")
		}
		sr.keys, sr.used = append(sr.keys, r), append(sr.used, uint32(b.Key.GetLastUsedUnix()))
	case *ledgerpb.Record_Kill:
		k := &Kill{KillKind(b.Kill.GetKind()), b.Kill.GetName(), b.Kill.GetReason(), b.Kill.GetActor(), timeOrZero(b.Kill.GetUnixNano())}
		s.hash.add(s.enc.kill(k))
		sr.kills[killName{k.Kind, k.Name}] = k
	case *ledgerpb.Record_Rung:
		r := &Rung{b.Rung.GetRung(), timeOrZero(b.Rung.GetExpiresUnixNano()), b.Rung.GetReason(), b.Rung.GetActor(), timeOrZero(b.Rung.GetUnixNano())}
		s.hash.add(s.enc.rung(r))
		sr.rungs[r.Name] = r
	case *ledgerpb.Record_View:
		s.work.View = viewOf(b.View)
	case *ledgerpb.Record_Token:
		t := &Token{Name: b.Token.GetName(), Role: Role(b.Token.GetRole()), Created: timeOrZero(b.Token.GetCreatedUnixNano()), Expires: timeOrZero(b.Token.GetExpiresUnixNano())}
		if copy(t.Hash[:], b.Token.GetHash()) != len(t.Hash) {
			return sr.damaged("is a token with a hash of %d bytes", len(b.Token.GetHash()))
		}
		s.hash.add(s.enc.token(t))
		sr.tokens.byName[t.Name], sr.tokens.byHash[t.Hash] = t, t
	case *ledgerpb.Record_Audit:
		e := b.Audit
		into := &sr.audit
		switch {
		case budgetEvent(e.GetAction()):
			into = &sr.events
		case e.GetAction() == tagsAction:
			into = &sr.tagged
		}
		*into = append(*into, &AuditEntry{e.GetIndex(), timeOrZero(e.GetUnixNano()), e.GetActor(), e.GetAction(), e.GetObject(), e.GetBefore(), e.GetAfter()})
	case *ledgerpb.Record_Done:
		return sr.takeDone(b.Done)
	case *ledgerpb.Record_Durable:
		return sr.takeDurable(b.Durable)
	case *ledgerpb.Record_Budget:
		return sr.takeBudget(b.Budget)
	case *ledgerpb.Record_CacheCount:
		return sr.takeCount(b.CacheCount)
	case *ledgerpb.Record_CacheGeneration:
		return sr.takeGeneration(b.CacheGeneration)
	case *ledgerpb.Record_CacheFloor:
		return sr.takeFloor(b.CacheFloor)
	case *ledgerpb.Record_CacheTag:
		return sr.takeTag(b.CacheTag)
	default:
		return sr.damaged("is of a kind that this version does not know")
	}
	sr.record++
	return nil
}

func (sr *snapshotReader) takeDone(m *ledgerpb.Done) error {
	if len(m.GetId()) != 16 {
		return sr.damaged("remembers a command whose id has %d bytes", len(m.GetId()))
	}
	d := done{id: [16]byte(m.GetId()), index: m.GetResult().GetIndex(), revision: m.GetResult().GetRevision()}
	if _, ok := sr.state.done.find(d.id[:]); ok {
		return sr.damaged("remembers a command twice")
	}
	if code := m.GetResult().GetCode(); code != "" {
		d.refusal = &Refusal{code, m.GetResult().GetMessage()}
	}
	if g := m.GetResult().GetGeneration(); g != nil {
		d.raised = &raised{g.GetNow(), g.GetPrevious()}
	}
	sr.state.done.add(d)
	sr.record++
	return nil
}

func (sr *snapshotReader) takeDurable(m *ledgerpb.DurableBucket) error {
	b, err := durableOf(m)
	if err != nil {
		return sr.damaged("is no bucket of a durable limit: %v", err)
	}
	s := sr.state
	if _, ok := s.durables.find(b.key); ok || !s.durables.room(b.size()) {
		return sr.damaged("is a bucket twice, or one too many")
	}
	b.sum = s.enc.durable(b)
	s.hash.add(b.sum)
	s.durables.add(b)
	sr.record++
	return nil
}

func (sr *snapshotReader) takeBudget(m *ledgerpb.BudgetAccount) error {
	a, err := accountOf(m)
	if err != nil {
		return sr.damaged("is no account of a budget: %v", err)
	}
	s := sr.state
	if _, ok := s.budgets.find(a.Key); ok || !s.budgets.room(a.size()) {
		return sr.damaged("is an account twice, or one too many")
	}
	s.rehash(nil, a)
	s.budgets.add(a)
	if a.untold() {
		s.tell[a.Key] = struct{}{}
	}
	sr.record++
	return nil
}

// finish compares the trailer, and what was read with what the header promised.
func (sr *snapshotReader) finish(msg []byte) (*State, error) {
	want, err := proto.MarshalOptions{Deterministic: true}.Marshal(&ledgerpb.Record{Body: &ledgerpb.Record_Trailer{
		Trailer: &ledgerpb.Trailer{Records: sr.record - 1, Sha256: sr.sum.Sum(nil)},
	}})
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(msg, want) {
		return nil, sr.damaged("is a trailer that does not fit: a byte before it or in it was changed")
	}
	if _, err := sr.r.ReadByte(); !errors.Is(err, io.EOF) {
		return nil, sr.damaged("is the trailer, and more follows it")
	}
	s, t := sr.state, sr.state.keys.table.Load()
	if err := t.admit(sr.keys); err != nil {
		return nil, sr.damaged("ends keys that cannot be: %v", err)
	}
	t.insert(sr.keys, sr.used)
	for i, k := range sr.keys {
		s.hash.add(s.enc.key(k))
		if sr.used[i] != 0 {
			s.hash.add(s.enc.used(k, sr.used[i]))
		}
	}
	s.audit.replace(sr.audit)
	s.events.replace(sr.events)
	s.tagTrail.replace(sr.tagged)
	if sr.caches.next.count > 0 || sr.caches.generations.next.len() > 0 {
		sr.caches.done()
	}
	s.work.Kills, s.work.Rungs, s.work.Tokens = Kills{sr.kills}, Rungs{sr.rungs}, sr.tokens
	s.work.Index, s.work.Changed, s.nano = sr.head.GetIndex(), sr.head.GetChanged(), sr.head.GetUnixNano()
	s.shown = s.work.Changed
	if id := sr.head.GetClusterId(); len(id) > 0 {
		s.work.ClusterID = id
	}
	if sum := s.hash.sum(); !bytes.Equal(sum[:], sr.head.GetStateHash()) {
		return nil, sr.damaged("ends a state whose hash is %x, not %x", sum[:6], sr.head.GetStateHash()[:6])
	}
	s.publish()
	return s, nil
}
