package cache

import "time"

// upKind and downKind are those of cachepb.
type (
	upKind   uint8
	downKind uint8
)

const (
	upBeat upKind = iota
	upAsk
	upWants
	upBegin
	upData
	upStore
	upShare
	upUnshareable
	upFailed
	upAbandon
	upBroken
)

const (
	downBeat downKind = iota
	downLead
	downOthers
	downBegin
	downData
	downEnd
	downHit
	downFailed
	downPass
	downBusy
	downAgain
)

// asked is what a node wants of a key's owner.
type asked struct {
	key     Key
	refresh bool
	early   bool
	age     time.Duration
	leadFor time.Duration
	leads   []uint64 // it leads already, of an owner that was lost
}

// up is what a branch says to a flight. What it points to never changes.
type up struct {
	kind        upKind
	token       uint64
	ask         *asked
	waits, live bool
	contentType string
	data        []byte
	entry       *Entry
	failure     Failure
	counts      bool
	unasked     bool   // with upAbandon: the model was not asked
	invalid     bool   // with upAbandon: whole, but what it depends on was invalidated meanwhile
	about       *Entry // with upBegin: what the stream depends on, without a body; nil: not known
	cut         bool   // with upUnshareable: the stream is not whole, it was too large to go on with
	late        bool   // the owner does not hear it: the lead was over there
}

// down is what a flight says to a branch. What it points to never changes.
type down struct {
	kind        downKind
	token       uint64
	others      bool
	contentType string
	about       *Entry // with downBegin, as of upBegin
	data        []byte
	whole       bool
	hit         Hit  // Entry is nil where there is none
	stored      bool // the hit comes from the store
	keep        bool // the hit may be stored
	failure     Failure
}
