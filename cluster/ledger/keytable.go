package ledger

import (
	"bytes"
	"cmp"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"iter"
	"math"
	"math/bits"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"headgate/cluster/ledger/ledgerpb"
)

const (
	// MaxKeys bounds the keys of a cluster, revoked and expired ones with them.
	MaxKeys = 2_000_000

	shardBits  = 14
	shardCount = 1 << shardBits // at the bound some 120 keys a shard
	window     = 16             // entries around where a hash is expected: two standard deviations at a million keys
)

// KeyRecord is what the cluster holds of a key. It never changes: a key that is revoked
// or set to expire is a new record. So its pointer stands for the key as it is, and may be
// what is derived from it is cached by.
type KeyRecord struct {
	ID, Tenant, Name    string
	Hash                [32]byte // SHA-256 of the whole key
	expires, created    int64    // nanoseconds since the Unix epoch; 0: never, unknown
	Revoked, AssertUser bool
	*KeyScope           // never nil; many keys have the same
}

// KeyScope is what a key is held to. Nothing of it may be changed.
type KeyScope struct {
	User, Class              string
	Models, Routes, Surfaces []string
}

// Expires is zero for a key that never does.
func (k *KeyRecord) Expires() time.Time { return timeOrZero(k.expires) }

// Created is when it was added to the cluster; zero if it never was.
func (k *KeyRecord) Created() time.Time { return timeOrZero(k.created) }

// Active is neither revoked nor expired as of now.
func (k *KeyRecord) Active(now time.Time) bool {
	return !k.Revoked && (k.expires == 0 || now.UnixNano() < k.expires)
}

func timeOrZero(unixNano int64) time.Time {
	if unixNano == 0 {
		return time.Time{}
	}
	return time.Unix(0, unixNano).UTC()
}

// Keys is the table of all keys, in the order of their hashes. One goroutine writes, any
// number reads; a read takes no lock and allocates nothing. A nil *Keys is empty.
//
// It is 16384 shards by the first bits of the hash, and as many by id. A shard never
// changes but for the moments of last use: a write swaps in a new one. So a capture is a copy of
// the shards' pointers, and a write costs some kilobytes of copying.
type Keys struct{ table atomic.Pointer[keyTable] }

type keyTable struct {
	byHash [shardCount]atomic.Pointer[keyShard]
	byID   [shardCount]atomic.Pointer[[]*KeyRecord] // each by id
	count  atomic.Int64

	// The writer's own.
	generation uint64 // of captures: a usage of an older one is copied before it is written
	tenants    map[string]string
	noScope    *KeyScope
}

// keyShard holds keys in the order of their hashes.
type keyShard struct {
	entries []keyEntry
	used    *usage
}

// keyEntry holds the bits of a hash after the shard's beside the record, so that a search stays in few
// cache lines, and the record is the only one of its own.
type keyEntry struct {
	prefix uint64
	record *KeyRecord
}

// usage is when each key of a shard was last used.
type usage struct {
	generation uint64
	seconds    []atomic.Uint32 // since the Unix epoch; 0: never
}

func newKeys() *Keys {
	ks := &Keys{}
	ks.table.Store(newKeyTable())
	return ks
}

func newKeyTable() *keyTable {
	return &keyTable{tenants: map[string]string{}, noScope: &KeyScope{}}
}

// KeysOf makes a table of the keys as a policy writes them. An id or a hash that comes twice is an error.
func KeysOf(keys ...Key) (*Keys, error) {
	ks := newKeys()
	t := ks.table.Load()
	records := make([]*KeyRecord, len(keys))
	for i := range keys {
		k, err := keys[i].message()
		if err != nil {
			return nil, err
		}
		records[i] = t.record(k)
	}
	if err := t.admit(records); err != nil {
		return nil, err
	}
	t.insert(records, nil)
	return ks, nil
}

// message is a key as commands carry it.
func (k *Key) message() (*ledgerpb.Key, error) {
	h, err := ParseHash(k.Hash)
	if err != nil {
		return nil, fmt.Errorf("key %s: %w", k.ID, err)
	}
	m := &ledgerpb.Key{
		Id: k.ID, Hash: h[:], Tenant: k.Tenant, Name: k.Name, User: k.User, Class: k.Class, Revoked: k.Revoked,
		Models: k.Models, Routes: k.Routes, Surfaces: k.Surfaces, AssertUser: k.AssertUser,
	}
	if !k.Expires.IsZero() {
		m.ExpiresUnixNano = unixNano(time.Time(k.Expires))
	}
	return m, nil
}

// unixNano is bounded by what an int64 holds: until the year 2262.
func unixNano(t time.Time) int64 {
	if t.After(time.Unix(0, math.MaxInt64)) {
		return math.MaxInt64
	}
	return t.UnixNano()
}

// Lookup finds a key by its hash, revoked and expired ones too. The search may take a time
// that depends on the hash; that tells an attacker nothing about a key, whose SHA-256 he
// cannot steer towards a known one. The comparison that decides takes constant time.
func (ks *Keys) Lookup(hash [32]byte) (*KeyRecord, bool) {
	if ks == nil {
		return nil, false
	}
	s, i := ks.table.Load().find(&hash)
	if s == nil {
		return nil, false
	}
	return s.entries[i].record, true
}

// ByID finds a key by its id.
func (ks *Keys) ByID(id string) (*KeyRecord, bool) {
	if ks == nil {
		return nil, false
	}
	return ks.table.Load().byIDOf(id)
}

// Len is how many keys there are.
func (ks *Keys) Len() int {
	if ks == nil {
		return 0
	}
	return int(ks.table.Load().count.Load())
}

// LastUsed is when a key was last used, to the second, as far as the cluster was told; zero
// if it never was or does not exist.
func (ks *Keys) LastUsed(k *KeyRecord) time.Time {
	if ks == nil {
		return time.Time{}
	}
	s, i := ks.table.Load().find(&k.Hash)
	if s == nil {
		return time.Time{}
	}
	return secondsOrZero(s.used.seconds[i].Load())
}

func secondsOrZero(s uint32) time.Time {
	if s == 0 {
		return time.Time{}
	}
	return time.Unix(int64(s), 0).UTC()
}

// All gives every key and when it was last used, in the order of their hashes. What is
// written meanwhile may show or not.
func (ks *Keys) All() iter.Seq2[*KeyRecord, time.Time] {
	return func(yield func(*KeyRecord, time.Time) bool) {
		if ks == nil {
			return
		}
		t := ks.table.Load()
		for i := range t.byHash {
			s := t.byHash[i].Load()
			if s == nil {
				continue
			}
			for j := range s.entries {
				if !yield(s.entries[j].record, secondsOrZero(s.used.seconds[j].Load())) {
					return
				}
			}
		}
	}
}

// placeOf says in which shard a hash belongs, and its prefix there.
func placeOf(hash *[32]byte) (shard int, prefix uint64) {
	v := binary.BigEndian.Uint64(hash[:8])
	return int(v >> (64 - shardBits)), v << shardBits
}

// idShard is FNV-1a (Fowler, Noll, Vo), its high bits.
func idShard(id string) int {
	h := uint32(2166136261)
	for i := range len(id) {
		h = (h ^ uint32(id[i])) * 16777619
	}
	return int(h >> (32 - shardBits))
}

// find gives the shard of a hash and where in it the hash stands; nil if it is not there.
func (t *keyTable) find(hash *[32]byte) (*keyShard, int) {
	shard, prefix := placeOf(hash)
	s := t.byHash[shard].Load()
	if s == nil {
		return nil, 0
	}
	i := s.lowerBound(prefix)
	n := len(s.entries)
	if i == n || s.entries[i].prefix != prefix {
		return nil, 0
	}
	if i+1 < n && s.entries[i+1].prefix == prefix { // a table of made-up hashes
		end := n
		for i < end { // by hand: a closure would let hash escape
			if mid := (i + end) / 2; bytes.Compare(s.entries[mid].record.Hash[:], hash[:]) < 0 {
				i = mid + 1
			} else {
				end = mid
			}
		}
		if i == n {
			return nil, 0
		}
	}
	if !sameHash(&s.entries[i].record.Hash, hash) {
		return nil, 0
	}
	return s, i
}

// sameHash takes a time that does not depend on where they differ. (crypto/subtle's
// comparison does no more, a byte at a time.)
func sameHash(a, b *[32]byte) bool {
	var differ uint64
	for i := 0; i < len(a); i += 8 {
		differ |= binary.NativeEndian.Uint64(a[i:]) ^ binary.NativeEndian.Uint64(b[i:])
	}
	return subtle.ConstantTimeEq(int32(differ|differ>>32), 0) == 1
}

// lowerBound is the first place with at least that prefix. Hashes are spread evenly, so it
// looks around where the prefix should be (interpolation search: Peterson, 1957), at all of a few
// cache lines at once and without a branch that depends on them, which would be guessed wrong.
func (s *keyShard) lowerBound(prefix uint64) int {
	n := len(s.entries)
	expected, _ := bits.Mul64(prefix, uint64(n))
	from := max(min(int(expected)-window/2, n-window), 0)
	around := s.entries[from:min(from+window, n)]
	less := uint64(0)
	for i := range around {
		_, borrow := bits.Sub64(around[i].prefix, prefix, 0)
		less += borrow
	}
	if less == 0 && from > 0 || int(less) == len(around) && from+len(around) < n {
		return s.bisect(prefix)
	}
	return from + int(less)
}

func (s *keyShard) bisect(prefix uint64) int {
	i, _ := slices.BinarySearchFunc(s.entries, prefix, func(e keyEntry, p uint64) int { return cmp.Compare(e.prefix, p) })
	return i
}

func (t *keyTable) byIDOf(id string) (*KeyRecord, bool) {
	s := t.byID[idShard(id)].Load()
	if s == nil {
		return nil, false
	}
	i, ok := slices.BinarySearchFunc(*s, id, compareID)
	if !ok {
		return nil, false
	}
	return (*s)[i], true
}

func compareID(r *KeyRecord, id string) int { return strings.Compare(r.ID, id) }

// record makes a record of a key that was checked, with the table's own copy of what many share.
func (t *keyTable) record(k *ledgerpb.Key) *KeyRecord {
	tenant, ok := t.tenants[k.GetTenant()]
	if !ok {
		tenant = k.GetTenant()
		t.tenants[tenant] = tenant
	}
	return newRecord(k, tenant, t.noScope)
}

// newRecord keeps the message's strings. unheld is the scope of a key that is held to nothing.
func newRecord(k *ledgerpb.Key, tenant string, unheld *KeyScope) *KeyRecord {
	r := &KeyRecord{
		ID: k.GetId(), Tenant: tenant, Name: k.GetName(), expires: k.GetExpiresUnixNano(), created: k.GetCreatedUnixNano(),
		Revoked: k.GetRevoked(), AssertUser: k.GetAssertUser(), KeyScope: unheld,
	}
	copy(r.Hash[:], k.GetHash())
	if k.GetUser() != "" || k.GetClass() != "" || len(k.GetModels())+len(k.GetRoutes())+len(k.GetSurfaces()) > 0 {
		r.KeyScope = &KeyScope{User: k.GetUser(), Class: k.GetClass(), Models: k.GetModels(), Routes: k.GetRoutes(), Surfaces: k.GetSurfaces()}
	}
	return r
}

// admit says why records cannot be added to the table, nil if they can: *Refusal.
func (t *keyTable) admit(records []*KeyRecord) error {
	if n := int(t.count.Load()) + len(records); n > MaxKeys {
		return refuse(codeInvalid, "there would be %d keys, of %d at most", n, MaxKeys)
	}
	ids := make(map[string]bool, len(records))
	hashes := make(map[[32]byte]string, len(records))
	for _, r := range records {
		if _, ok := t.byIDOf(r.ID); ok {
			return refuse(codeExists, "a key %q exists already; choose another id", r.ID)
		}
		if s, i := t.find(&r.Hash); s != nil {
			return refuse(codeExists, "key %q is the same as key %q; make a new one", r.ID, s.entries[i].record.ID)
		}
		if ids[r.ID] {
			return refuse(codeExists, "two of the keys are called %q; ids are unique", r.ID)
		}
		if other, ok := hashes[r.Hash]; ok {
			return refuse(codeExists, "key %q is the same as key %q; make a new one", r.ID, other)
		}
		ids[r.ID], hashes[r.Hash] = true, r.ID
	}
	return nil
}

// insert adds records, none of which is there, with when they were last used (nil: never).
func (t *keyTable) insert(records []*KeyRecord, used []uint32) {
	order := make([]int, len(records))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return bytes.Compare(records[a].Hash[:], records[b].Hash[:]) })
	for len(order) > 0 {
		shard, _ := placeOf(&records[order[0]].Hash)
		n := 1
		for n < len(order) {
			if next, _ := placeOf(&records[order[n]].Hash); next != shard {
				break
			}
			n++
		}
		t.byHash[shard].Store(t.merged(t.byHash[shard].Load(), order[:n], records, used))
		order = order[n:]
	}
	t.insertIDs(slices.Clone(records))
	t.count.Add(int64(len(records)))
}

// merged is a shard and those of records that order names, which are in the order of their hashes.
func (t *keyTable) merged(old *keyShard, order []int, records []*KeyRecord, used []uint32) *keyShard {
	if old == nil {
		old = &keyShard{}
	}
	n := len(old.entries) + len(order)
	s := &keyShard{
		entries: make([]keyEntry, 0, n),
		used:    &usage{generation: t.generation, seconds: make([]atomic.Uint32, n)},
	}
	add := func(r *KeyRecord, seconds uint32) {
		_, prefix := placeOf(&r.Hash)
		s.used.seconds[len(s.entries)].Store(seconds)
		s.entries = append(s.entries, keyEntry{prefix, r})
	}
	i := 0
	for _, j := range order {
		for ; i < len(old.entries) && bytes.Compare(old.entries[i].record.Hash[:], records[j].Hash[:]) < 0; i++ {
			add(old.entries[i].record, old.used.seconds[i].Load())
		}
		seconds := uint32(0)
		if used != nil {
			seconds = used[j]
		}
		add(records[j], seconds)
	}
	for ; i < len(old.entries); i++ {
		add(old.entries[i].record, old.used.seconds[i].Load())
	}
	return s
}

// insertIDs puts records, which it reorders, into the shards by id.
func (t *keyTable) insertIDs(records []*KeyRecord) {
	slices.SortFunc(records, func(a, b *KeyRecord) int {
		if d := idShard(a.ID) - idShard(b.ID); d != 0 {
			return d
		}
		return strings.Compare(a.ID, b.ID)
	})
	for len(records) > 0 {
		shard := idShard(records[0].ID)
		n := 1
		for n < len(records) && idShard(records[n].ID) == shard {
			n++
		}
		var old []*KeyRecord
		if p := t.byID[shard].Load(); p != nil {
			old = *p
		}
		merged := make([]*KeyRecord, 0, len(old)+n)
		for _, r := range records[:n] {
			i, _ := slices.BinarySearchFunc(old, r.ID, compareID)
			merged = append(append(merged, old[:i]...), r)
			old = old[i:]
		}
		merged = append(merged, old...)
		t.byID[shard].Store(&merged)
		records = records[n:]
	}
}

// replace puts a record into the place of the one with the same id and hash.
func (t *keyTable) replace(r *KeyRecord) {
	shard, _ := placeOf(&r.Hash)
	s, i := t.find(&r.Hash)
	next := &keyShard{entries: slices.Clone(s.entries), used: s.used}
	next.entries[i].record = r
	t.byHash[shard].Store(next)
	ids := slices.Clone(*t.byID[idShard(r.ID)].Load())
	i, _ = slices.BinarySearchFunc(ids, r.ID, compareID)
	ids[i] = r
	t.byID[idShard(r.ID)].Store(&ids)
}

// touch notes that a key was used, and gives what was noted before and what is now. It
// never goes back.
func (t *keyTable) touch(r *KeyRecord, unix int64) (before, after uint32) {
	s, i := t.find(&r.Hash)
	before = s.used.seconds[i].Load()
	after = uint32(min(max(unix, 0), math.MaxUint32))
	if after <= before {
		return before, before
	}
	if s.used.generation != t.generation { // a capture holds it
		next := &usage{generation: t.generation, seconds: make([]atomic.Uint32, len(s.used.seconds))}
		for j := range s.used.seconds {
			next.seconds[j].Store(s.used.seconds[j].Load())
		}
		s = &keyShard{entries: s.entries, used: next}
		shard, _ := placeOf(&r.Hash)
		t.byHash[shard].Store(s)
	}
	s.used.seconds[i].Store(after)
	return before, after
}

// capture gives the shards as they are; what is written later does not show in them.
func (t *keyTable) capture() []*keyShard {
	t.generation++
	out := make([]*keyShard, 0, shardCount)
	for i := range t.byHash {
		if s := t.byHash[i].Load(); s != nil {
			out = append(out, s)
		}
	}
	return out
}
