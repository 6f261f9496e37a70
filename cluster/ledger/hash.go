package ledger

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
)

// multisetHash is the sum, modulo 2²⁵⁶, of the SHA-256 of every entry of a set. So it does
// not depend on order, and an entry comes or goes in the time that hashing it takes. The
// idea is AdHash (Bellare and Micciancio, A New Paradigm for Collision-Free Hashing, 1997)
// and MSet-Add-Hash (Clarke et al., Incremental Multiset Hash Functions, 2003).
//
// It is good for finding replicas that diverged by accident. It does not resist an
// attacker who chooses entries: at this size a generalised birthday attack finds sets of equal sums.
type multisetHash [4]uint64 // the least significant first

func (m *multisetHash) add(entry [32]byte) {
	var carry uint64
	for i := range m {
		m[i], carry = bits.Add64(m[i], binary.LittleEndian.Uint64(entry[8*i:]), carry)
	}
}

func (m *multisetHash) remove(entry [32]byte) {
	var borrow uint64
	for i := range m {
		m[i], borrow = bits.Sub64(m[i], binary.LittleEndian.Uint64(entry[8*i:]), borrow)
	}
}

func (m *multisetHash) sum() (out [32]byte) {
	for i := range m {
		binary.LittleEndian.PutUint64(out[8*i:], m[i])
	}
	return out
}

// canon writes an entry so that two entries are written alike only if they are alike. Its
// forms are part of the state hash: a changed one is another state machine version.
type canon []byte

// entry begins an entry of a kind, in the space of the last.
func (c *canon) entry(kind string) { *c = append((*c)[:0], "headgate.ledger.v1 "...); c.str(kind) }
func (c *canon) num(n uint64)      { *c = binary.LittleEndian.AppendUint64(*c, n) }
func (c *canon) str(s string)      { c.num(uint64(len(s))); *c = append(*c, s...) }
func (c *canon) sum() [32]byte     { return sha256.Sum256(*c) }

func (c *canon) bit(b bool) {
	if b {
		c.num(1)
	} else {
		c.num(0)
	}
}

func (c *canon) strs(list []string) {
	c.num(uint64(len(list)))
	for _, s := range list {
		c.str(s)
	}
}

func (c *canon) policy(p *PolicyRevision) [32]byte {
	c.entry("policy")
	c.num(p.Revision)
	c.num(uint64(nanoOrZero(p.Time)))
	c.str(p.Actor)
	c.num(p.RolledBackTo)
	c.str(string(p.Text))
	return c.sum()
}

func (c *canon) key(k *KeyRecord) [32]byte {
	c.entry("key")
	c.str(k.ID)
	*c = append(*c, k.Hash[:]...)
	c.str(k.Tenant)
	c.str(k.Name)
	c.str(k.User)
	c.str(k.Class)
	c.num(uint64(k.expires))
	c.num(uint64(k.created))
	c.bit(k.Revoked)
	c.bit(k.AssertUser)
	c.strs(k.Models)
	c.strs(k.Routes)
	c.strs(k.Surfaces)
	return c.sum()
}

// used is an entry of its own, so that a touch need not hash the whole key.
func (c *canon) used(k *KeyRecord, seconds uint32) [32]byte {
	c.entry("used")
	*c = append(*c, k.Hash[:]...)
	c.num(uint64(seconds))
	return c.sum()
}

func (c *canon) kill(k *Kill) [32]byte {
	c.entry("kill")
	c.num(uint64(k.Kind))
	c.str(k.Name)
	c.str(k.Reason)
	c.str(k.Actor)
	c.num(uint64(nanoOrZero(k.Time)))
	return c.sum()
}

func (c *canon) rung(r *Rung) [32]byte {
	c.entry("rung")
	c.str(r.Name)
	c.num(uint64(nanoOrZero(r.Expires)))
	c.str(r.Reason)
	c.str(r.Actor)
	c.num(uint64(nanoOrZero(r.Time)))
	return c.sum()
}

func (c *canon) token(t *Token) [32]byte {
	c.entry("token")
	c.str(t.Name)
	*c = append(*c, t.Hash[:]...)
	c.num(uint64(t.Role))
	c.num(uint64(nanoOrZero(t.Created)))
	c.num(uint64(nanoOrZero(t.Expires)))
	return c.sum()
}
