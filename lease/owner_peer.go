package lease

// peer is a process that holds, or may hold, something of this owner's buckets.
type peer struct {
	incarnation uint64
	name        string
	index       uint16
	member      bool   // of the newest view
	gone        int64  // since when it is not
	session     uint32 // the live one; 0: none
	deadline    int64  // of the session
	endedAt     int64  // when the last session ended
	rolled      uint64 // the epoch of the last roll that was taken
	wanted      int    // times that it was asked for one since
	top         uint64 // the highest Seq seen
	seen        uint64 // bit i: top - i was seen
	pending     []unacked
	look        uint64 // of Owner.looks: place is this peer's in what the Sizer sees
	place       int
}

// unacked is a lease whose last Number was sent and is not acknowledged.
type unacked struct {
	leaseRef
	sent int64
}

// note says whether a Seq is seen for the first time. One that comes more than 63 late is not.
func (p *peer) note(seq uint64) bool {
	switch {
	case seq > p.top:
		if d := seq - p.top; d < 64 {
			p.seen = p.seen<<d | 1
		} else {
			p.seen = 1
		}
		p.top = seq
		return true
	case p.top-seq >= 64 || p.seen>>(p.top-seq)&1 == 1:
		return false
	}
	p.seen |= 1 << (p.top - seq)
	return true
}

// peer is the process of an incarnation; nil: it is neither a member nor holds anything.
func (o *Owner) peer(incarnation uint64) *peer {
	if i, ok := o.index[incarnation]; ok {
		return o.peers[i]
	}
	return nil
}

// addPeer adds one that is not known; nil: there are too many.
func (o *Owner) addPeer(incarnation uint64) *peer {
	i := 0
	for i < len(o.peers) && o.peers[i] != nil {
		i++
	}
	if i == len(o.peers) {
		if i == maxPeers {
			return nil
		}
		o.peers = append(o.peers, nil)
	}
	p := &peer{incarnation: incarnation, index: uint16(i)}
	o.peers[i] = p
	o.index[incarnation] = p.index
	return p
}

// greet is R4 and R5: which session the peer and this owner go by, and how long it holds.
func (o *Owner) greet(at Instant, p *peer, r *Request, answer *Response) {
	ends := p.session != 0 && r.Dropped >= uint64(p.session)
	if o.cfg.Break&BreakNumbers != 0 && p.session != 0 && r.Session != uint64(p.session) {
		ends = true
	}
	if ends {
		o.endSession(at, p)
	}
	if p.session == 0 && p.member {
		o.sessions++
		p.session = o.sessions
	}
	answer.Session = uint64(p.session)
	if p.session == 0 || !p.member {
		return
	}
	answer.Left = int64(sessionFor)
	if o.cfg.Break&BreakViewBound == 0 {
		answer.Left = min(answer.Left, o.cfg.Rights.Lease(at.Now, o.view.Epoch))
	}
	p.deadline = max(p.deadline, at.Now+answer.Left*102/100+int64(sessionMargin))
}

// endSession ends a session with all its leases. They are settled when their buckets are next looked
// at, as of now.
func (o *Owner) endSession(at Instant, p *peer) {
	p.session, p.endedAt = 0, at.Now
	o.stats.Ended++
}

// endLapsed ends the sessions past their deadline of those that hold something of a bucket, since
// others want it (R4).
func (o *Owner) endLapsed(at Instant, b *bucket) (ended bool) {
	for i := b.first; i != 0; i = o.pool.at(i).next {
		s := o.pool.at(i)
		if s.is(seriesEnded | seriesInherited | seriesSlots) {
			continue
		}
		if p := o.peers[s.peer]; p.session != 0 && s.session == p.session && p.deadline < at.Now {
			o.endSession(at, p)
			ended = true
		}
	}
	if ended {
		o.touch(at, b)
	}
	return ended
}
