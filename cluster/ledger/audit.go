package ledger

import (
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"headgate/cluster/ledger/ledgerpb"
)

// auditTrail is the last entries, most of them and of mostBytes at most. One goroutine adds; any may read. Entries are only ever
// appended behind what readers were given, so that these need no copy.
type auditTrail struct {
	window atomic.Pointer[[]*AuditEntry] // all[from:]
	all    []*AuditEntry
	from   int
	bytes  int // of the window

	most, mostBytes int
}

func (a *auditTrail) entries() []*AuditEntry {
	if w := a.window.Load(); w != nil {
		return *w
	}
	return nil
}

func (a *auditTrail) add(e *AuditEntry) {
	a.all, a.bytes = append(a.all, e), a.bytes+e.size()
	for len(a.all)-a.from > a.most || a.bytes > a.mostBytes {
		a.bytes -= a.all[a.from].size()
		a.from++
	}
	if a.from > len(a.all)-a.from { // let go of as many as are kept
		a.all, a.from = slices.Clone(a.all[a.from:]), 0
	}
	w := a.all[a.from:]
	a.window.Store(&w)
}

func (a *auditTrail) replace(entries []*AuditEntry) {
	a.all, a.from, a.bytes = slices.Clone(entries), 0, 0
	for _, e := range entries {
		a.bytes += e.size()
	}
	w := a.all
	a.window.Store(&w)
}

func (e *AuditEntry) size() int {
	return len(e.Actor) + len(e.Action) + len(e.Object) + len(e.Before) + len(e.After)
}

// doneRing remembers the ids of the last commands and how they ended, in some 80 bytes each.
// Like the audit trail it is only appended to behind what a capture was given.
type doneRing struct {
	list []done
	at   map[[16]byte]int // where in list, from its very beginning
	gone int              // how many left list at its beginning
}

type done struct {
	id              [16]byte
	index, revision uint64
	refusal         *Refusal // nil: it was done
	raised          *raised  // nil: it was no SetGeneration
}

// raised is what a SetGeneration gave.
type raised struct{ now, previous uint64 }

func (d *done) result() *ledgerpb.Result {
	r := &ledgerpb.Result{Index: d.index, Revision: d.revision}
	if d.refusal != nil {
		r.Code, r.Message = d.refusal.Code, d.refusal.Message
	}
	if d.raised != nil {
		r.Generation = &ledgerpb.GenerationResult{Now: d.raised.now, Previous: d.raised.previous}
	}
	return r
}

func (r *doneRing) find(id []byte) (*done, bool) {
	if len(id) != len(done{}.id) {
		return nil, false
	}
	i, ok := r.at[[16]byte(id)]
	if !ok {
		return nil, false
	}
	return &r.list[i-r.gone], true
}

// add remembers a command whose id is not known.
func (r *doneRing) add(d done) {
	if r.at == nil {
		r.at = map[[16]byte]int{}
	}
	r.list = append(r.list, d)
	r.at[d.id] = r.gone + len(r.list) - 1
	if old := len(r.list) - 1 - maxDone; old >= 0 {
		delete(r.at, r.list[old].id)
	}
	if len(r.list) >= 2*maxDone {
		r.gone += len(r.list) - maxDone
		r.list = slices.Clone(r.last())
	}
}

// last are those that are remembered, the oldest first.
func (r *doneRing) last() []done { return r.list[max(0, len(r.list)-maxDone):] }

// cut keeps the beginning of a text that is too long.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most-len("…")], "") + "…"
}

// hashDigits are as many of a hash as may be shown.
const hashDigits = 12

func shortHash(h [32]byte) string { return "sha256:" + hex.EncodeToString(h[:])[:hashDigits] + "…" }

// redact cuts every run of hexadecimal digits that is long enough for a key, a token or the hash of one.
func redact(s string) string {
	const long = 32
	var b strings.Builder
	kept, run := 0, 0
	for i := 0; i <= len(s); i++ {
		if i < len(s) && (s[i] >= '0' && s[i] <= '9' || s[i] >= 'a' && s[i] <= 'f' || s[i] >= 'A' && s[i] <= 'F') {
			run++
			continue
		}
		if run > long {
			b.WriteString(s[kept:i-run+hashDigits] + "…")
			kept = i
		}
		run = 0
	}
	return b.String() + s[kept:]
}

// describe is a key for the audit log.
func (k *KeyRecord) describe() string {
	var b strings.Builder
	fmt.Fprintf(&b, "tenant %s, %s", k.Tenant, shortHash(k.Hash))
	for _, f := range [...]struct{ what, is string }{
		{"name", k.Name},
		{"user", k.User},
		{"class", k.Class},
		{"models", strings.Join(k.Models, " ")},
		{"routes", strings.Join(k.Routes, " ")},
		{"surfaces", strings.Join(k.Surfaces, " ")},
	} {
		if f.is != "" {
			fmt.Fprintf(&b, ", %s %s", f.what, f.is)
		}
	}
	if k.AssertUser {
		b.WriteString(", assert_user")
	}
	if k.expires != 0 {
		b.WriteString(", expires " + k.Expires().Format(time.RFC3339))
	}
	if k.Revoked {
		b.WriteString(", revoked")
	}
	return b.String()
}

// idList names keys, as many as an audit text holds.
func idList(keys []*KeyRecord) string {
	var b strings.Builder
	for i, k := range keys {
		if i > 0 {
			b.WriteString(", ")
		}
		if b.WriteString(k.ID); b.Len() > maxAuditText {
			break
		}
	}
	return b.String()
}
