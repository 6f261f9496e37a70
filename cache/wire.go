package cache

import (
	"errors"
	"fmt"
	"math"
	"time"

	pb "headgate/cache/cachepb"
)

// Bounds of what nodes say to each other.
const (
	pieceBytes = 256 << 10 // of a body in one message
	batchBytes = 64 << 10  // of a stream in one message, unless one chunk is larger
	maxData    = 32 << 20  // of a chunk that comes
	maxFailure = 1 << 20   // bytes of a failure's body
	maxName    = 4096      // bytes of a content type, a tenant, a surface, a tag
	maxTags    = 1024
)

func encodeEntry(e *Entry, age time.Duration) *pb.Entry {
	m := &pb.Entry{
		Key: e.Key[:], Tenant: []byte(e.Tenant), Surface: []byte(e.Surface), ContentType: []byte(e.ContentType),
		Stamp: e.Stamp, Input: e.Input, CachedInput: e.CachedInput, Output: e.Output, Ttl: int64(e.Life.TTL),
		MaxTtl: int64(e.Life.MaxTTL), Stale: int64(e.Life.Stale), StaleIfError: int64(e.Life.StaleIfError), Beta: e.Life.Beta,
		Delta: int64(e.Delta), Age: int64(age), Via: []byte(e.Via), Similarity: e.Similarity,
	}
	for _, t := range e.Tags {
		m.Tags = append(m.Tags, []byte(t))
	}
	return m
}

// EncodeEntry is e for another node, with its body.
func EncodeEntry(e *Entry, age time.Duration) *pb.Entry {
	m := encodeEntry(e, age)
	m.Body = e.Body
	return m
}

// DecodeEntry refuses what no node would send. The body is m's.
func DecodeEntry(m *pb.Entry) (*Entry, error) {
	e, err := decodeEntry(m)
	if err == nil {
		e.Body = m.GetBody()
	}
	return e, err
}

// decodeEntry refuses what no node would send. The body is not looked at.
func decodeEntry(m *pb.Entry) (*Entry, error) {
	k, err := decodeKey(m.GetKey())
	if err != nil {
		return nil, err
	}
	switch {
	case len(m.GetTenant()) > maxName, len(m.GetSurface()) > maxName, len(m.GetContentType()) > maxName, len(m.GetTags()) > maxTags:
		return nil, errors.New("entry: a name is too long, or there are too many tags")
	case min(m.GetTtl(), m.GetMaxTtl(), m.GetStale(), m.GetStaleIfError(), m.GetDelta(), m.GetAge()) < 0:
		return nil, errors.New("entry: a time is negative")
	case min(m.GetInput(), m.GetCachedInput(), m.GetOutput()) < 0:
		return nil, errors.New("entry: a count is negative")
	case math.IsNaN(m.GetBeta()), math.IsInf(m.GetBeta(), 0), m.GetBeta() < 0:
		return nil, fmt.Errorf("entry: beta %v", m.GetBeta())
	case len(m.GetVia()) > maxName, !(m.GetSimilarity() >= 0 && m.GetSimilarity() <= 1):
		return nil, fmt.Errorf("entry: found at similarity %v", m.GetSimilarity())
	}
	e := &Entry{
		Key: k, Tenant: string(m.GetTenant()), Surface: string(m.GetSurface()), ContentType: string(m.GetContentType()),
		Stamp: m.GetStamp(), Input: m.GetInput(), CachedInput: m.GetCachedInput(), Output: m.GetOutput(),
		Delta: time.Duration(m.GetDelta()), Age: time.Duration(m.GetAge()), Via: string(m.GetVia()), Similarity: m.GetSimilarity(),
		Life: Life{
			TTL: time.Duration(m.GetTtl()), MaxTTL: time.Duration(m.GetMaxTtl()), Stale: time.Duration(m.GetStale()),
			StaleIfError: time.Duration(m.GetStaleIfError()), Beta: m.GetBeta(),
		},
	}
	for _, t := range m.GetTags() {
		if len(t) > maxName {
			return nil, errors.New("entry: a tag is too long")
		}
		e.Tags = append(e.Tags, string(t))
	}
	return e, nil
}

func decodeKey(b []byte) (k Key, err error) {
	if copy(k[:], b) != len(b) || len(b) != len(k) {
		return k, fmt.Errorf("key: %d bytes, not %d", len(b), len(k))
	}
	return k, nil
}

// cut gives the pieces of a body, at least one.
func cut(body []byte) (first []byte, rest [][]byte) {
	n := min(len(body), pieceBytes)
	first, body = body[:n], body[n:]
	for len(body) > 0 {
		n = min(len(body), pieceBytes)
		rest, body = append(rest, body[:n]), body[n:]
	}
	return first, rest
}

// joiner puts the pieces of a body together.
type joiner struct {
	max  int64
	body []byte
	rest uint64
}

// first takes the first piece and how much there is to come. done: that is all.
func (j *joiner) first(p []byte, rest uint64) (done bool, err error) {
	if j.rest != 0 {
		return false, errors.New("body: it was not whole")
	}
	if rest > uint64(j.max) || uint64(len(p))+rest > uint64(j.max) {
		return false, fmt.Errorf("body: %d bytes, of at most %d", uint64(len(p))+rest, j.max)
	}
	if rest == 0 {
		j.body = p
		return true, nil
	}
	// What is claimed is not yet there: room for it comes as it does.
	j.body, j.rest = append([]byte(nil), p...), rest
	return false, nil
}

func (j *joiner) more(p []byte) (done bool, err error) {
	if len(p) == 0 || uint64(len(p)) > j.rest {
		return false, fmt.Errorf("body: a piece of %d bytes where %d are to come", len(p), j.rest)
	}
	j.body, j.rest = append(j.body, p...), j.rest-uint64(len(p))
	return j.rest == 0, nil
}

// encodeUps makes messages of a batch, in its order. Chunks of one stream go together.
func encodeUps(batch []*up) (out []*pb.Up) {
	var data *pb.Up // the last message, where it can take more
	for _, u := range batch {
		if u.kind == upData && data != nil && data.GetToken() == u.token && len(data.GetData())+len(u.data) <= batchBytes {
			data.Data = append(data.Data, u.data...)
			continue
		}
		m := &pb.Up{
			Kind: pb.Up_Kind(u.kind), Token: u.token, Waits: u.waits, Live: u.live, ContentType: []byte(u.contentType), Counts: u.counts, Cut: u.cut,
			Unasked: u.unasked, Invalid: u.invalid,
		}
		data = nil
		switch u.kind {
		case upData:
			m.Data = append([]byte(nil), u.data...) // it may be appended to
			data = m
		case upAsk:
			m.Ask = &pb.Ask{
				Key: u.ask.key[:], Refresh: u.ask.refresh, Early: u.ask.early, Age: int64(u.ask.age), LeadFor: int64(u.ask.leadFor), Leads: u.ask.leads,
			}
		case upFailed:
			m.Status, m.ContentType, m.Data = int32(u.failure.Status), []byte(u.failure.ContentType), u.failure.Body
		}
		out = append(out, m)
		if u.about != nil {
			m.Entry = encodeEntry(u.about, 0)
		}
		if u.entry != nil {
			m.Entry = encodeEntry(u.entry, u.entry.Age)
			first, rest := cut(u.entry.Body)
			m.Entry.Body, m.Rest = first, uint64(len(u.entry.Body)-len(first))
			for _, p := range rest {
				out = append(out, &pb.Up{Kind: pb.Up_MORE, Data: p})
			}
		}
	}
	return out
}

// upDecoder undoes encodeUps, message by message.
type upDecoder struct {
	joiner
	part *up
}

// next returns nil where more has to come.
func (d *upDecoder) next(m *pb.Up) (*up, error) {
	if m.GetKind() == pb.Up_MORE {
		if d.part == nil {
			return nil, errors.New("more of nothing")
		}
		done, err := d.more(m.GetData())
		return d.take(done), err
	}
	if d.part != nil && m.GetKind() != pb.Up_BEAT {
		return nil, errors.New("body: it was not whole")
	}
	u := &up{
		kind: upKind(m.GetKind()), token: m.GetToken(), waits: m.GetWaits(), live: m.GetLive(), counts: m.GetCounts(), cut: m.GetCut(),
		unasked: m.GetUnasked(), invalid: m.GetInvalid(),
	}
	if len(m.GetContentType()) > maxName || len(m.GetData()) > maxData {
		return nil, errors.New("a content type or a chunk is too large")
	}
	switch m.GetKind() {
	case pb.Up_BEAT, pb.Up_WANTS, pb.Up_UNSHAREABLE, pb.Up_ABANDON, pb.Up_BROKEN:
	case pb.Up_BEGIN:
		u.contentType = string(m.GetContentType())
		return u, decodeAbout(&u.about, m.GetEntry())
	case pb.Up_DATA:
		u.data = m.GetData()
	case pb.Up_ASK:
		return u, u.decodeAsk(m.GetAsk())
	case pb.Up_FAILED:
		return u, decodeFailure(&u.failure, m.GetStatus(), m.GetContentType(), m.GetData())
	case pb.Up_STORE, pb.Up_SHARE:
		entry, err := decodeEntry(m.GetEntry())
		if err != nil {
			return nil, err
		}
		u.entry, d.part = entry, u
		done, err := d.first(m.GetEntry().GetBody(), m.GetRest())
		return d.take(done), err
	default:
		return nil, fmt.Errorf("kind %d is unknown", m.GetKind())
	}
	return u, nil
}

func (d *upDecoder) take(done bool) *up {
	if !done {
		return nil
	}
	u := d.part
	u.entry.Body, d.part, d.body = d.body, nil, nil
	return u
}

func (u *up) decodeAsk(m *pb.Ask) error {
	k, err := decodeKey(m.GetKey())
	if err != nil {
		return err
	}
	if m.GetAge() < 0 || m.GetLeadFor() < 0 || len(m.GetLeads()) > 2*maxGiven {
		return errors.New("ask: a time is negative, or there are too many leads")
	}
	u.ask = &asked{
		key: k, refresh: m.GetRefresh(), early: m.GetEarly(), age: time.Duration(m.GetAge()), leadFor: time.Duration(m.GetLeadFor()), leads: m.GetLeads(),
	}
	return nil
}

// decodeAbout decodes what a stream depends on, where that is said.
func decodeAbout(about **Entry, m *pb.Entry) (err error) {
	if m != nil {
		*about, err = decodeEntry(m)
	}
	return err
}

func decodeFailure(x *Failure, status int32, contentType, body []byte) error {
	if status <= 0 || status > 999 || len(body) > maxFailure {
		return fmt.Errorf("failure: status %d with %d bytes", status, len(body))
	}
	*x = Failure{Status: int(status), ContentType: string(contentType), Body: body}
	return nil
}

// encodeDowns makes messages of a batch, in its order. Chunks of one stream go together.
func encodeDowns(batch []*down) (out []*pb.Down) {
	var data *pb.Down
	for _, d := range batch {
		if d.kind == downData && data != nil && data.GetToken() == d.token && len(data.GetData())+len(d.data) <= batchBytes {
			data.Data = append(data.Data, d.data...)
			continue
		}
		m := &pb.Down{
			Kind: pb.Down_Kind(d.kind), Token: d.token, Others: d.others, ContentType: []byte(d.contentType), Whole: d.whole,
			Stored: d.stored, Keep: d.keep, Stale: d.hit.Stale, Refresh: d.hit.Refresh,
		}
		data = nil
		switch d.kind {
		case downData:
			m.Data = append([]byte(nil), d.data...) // it may be appended to
			data = m
		case downFailed:
			m.Status, m.ContentType, m.Data = int32(d.failure.Status), []byte(d.failure.ContentType), d.failure.Body
		}
		out = append(out, m)
		if d.about != nil {
			m.Entry = encodeEntry(d.about, 0)
		}
		if d.hit.Entry != nil {
			m.Entry = encodeEntry(d.hit.Entry, d.hit.Age)
			first, rest := cut(d.hit.Body)
			m.Entry.Body, m.Rest = first, uint64(len(d.hit.Body)-len(first))
			for _, p := range rest {
				out = append(out, &pb.Down{Kind: pb.Down_MORE, Data: p})
			}
		}
	}
	return out
}

// downDecoder undoes encodeDowns, message by message.
type downDecoder struct {
	joiner
	part *down
}

// next returns nil where more has to come.
func (d *downDecoder) next(m *pb.Down) (*down, error) {
	if m.GetKind() == pb.Down_MORE {
		if d.part == nil {
			return nil, errors.New("more of nothing")
		}
		done, err := d.more(m.GetData())
		return d.take(done), err
	}
	if d.part != nil && m.GetKind() != pb.Down_BEAT {
		return nil, errors.New("body: it was not whole")
	}
	if len(m.GetContentType()) > maxName || len(m.GetData()) > maxData {
		return nil, errors.New("a content type or a chunk is too large")
	}
	n := &down{
		kind: downKind(m.GetKind()), token: m.GetToken(), others: m.GetOthers(), whole: m.GetWhole(), stored: m.GetStored(), keep: m.GetKeep(),
	}
	switch m.GetKind() {
	case pb.Down_BEAT, pb.Down_OTHERS, pb.Down_END, pb.Down_BUSY, pb.Down_AGAIN:
		return n, nil
	case pb.Down_BEGIN:
		n.contentType = string(m.GetContentType())
		return n, decodeAbout(&n.about, m.GetEntry())
	case pb.Down_DATA:
		n.data = m.GetData()
		return n, nil
	case pb.Down_FAILED:
		if err := decodeFailure(&n.failure, m.GetStatus(), m.GetContentType(), m.GetData()); err != nil {
			return nil, err
		}
	case pb.Down_LEAD, pb.Down_PASS:
	case pb.Down_HIT:
		if m.GetEntry() == nil {
			return nil, errors.New("a hit without an entry")
		}
	default:
		return nil, fmt.Errorf("kind %d is unknown", m.GetKind())
	}
	if m.GetEntry() == nil {
		return n, nil
	}
	entry, err := decodeEntry(m.GetEntry())
	if err != nil {
		return nil, err
	}
	n.hit = Hit{Entry: entry, Age: entry.Age, Stale: m.GetStale(), Refresh: m.GetRefresh()}
	d.part = n
	done, err := d.first(m.GetEntry().GetBody(), m.GetRest())
	return d.take(done), err
}

func (d *downDecoder) take(done bool) *down {
	if !done {
		return nil
	}
	n := d.part
	n.hit.Body, d.part, d.body = d.body, nil, nil
	return n
}

// encodePieces makes messages of an entry that was found.
func encodePieces(h *Hit, index int) []*pb.Piece {
	m := encodeEntry(h.Entry, h.Age)
	first, rest := cut(h.Body)
	m.Body = first
	out := []*pb.Piece{{Entry: m, Rest: uint64(len(h.Body) - len(first)), Index: uint32(index), Stale: h.Stale}}
	for _, p := range rest {
		out = append(out, &pb.Piece{Data: p})
	}
	return out
}

// pieceDecoder undoes encodePieces.
type pieceDecoder struct {
	joiner
	hit   Hit // Entry is nil where none is on its way
	index uint32
}

// next returns a hit without an entry where more has to come.
func (d *pieceDecoder) next(m *pb.Piece) (hit Hit, index int, err error) {
	var done bool
	switch {
	case m.GetEntry() != nil && d.hit.Entry != nil:
		return Hit{}, 0, errors.New("body: it was not whole")
	case m.GetEntry() != nil:
		entry, err := decodeEntry(m.GetEntry())
		if err != nil {
			return Hit{}, 0, err
		}
		d.hit, d.index = Hit{Entry: entry, Age: entry.Age, Stale: m.GetStale(), Tier: Owner}, m.GetIndex()
		if done, err = d.first(m.GetEntry().GetBody(), m.GetRest()); err != nil {
			return Hit{}, 0, err
		}
	case d.hit.Entry == nil:
		return Hit{}, 0, errors.New("more of nothing")
	default:
		if done, err = d.more(m.GetData()); err != nil {
			return Hit{}, 0, err
		}
	}
	if !done {
		return Hit{}, 0, nil
	}
	hit = d.hit
	hit.Body, d.hit, d.body = d.body, Hit{}, nil
	return hit, int(d.index), nil
}
