package lease

import (
	"errors"
	"fmt"
	"math"
	"time"

	"headgate/lease/leasepb"
	"headgate/limiter"
)

// The messages as protobuf. What comes from the wire is checked field by field, so that the cores
// never see a number that their arithmetic is not made for; a message with one that is wrong is
// refused whole. That every number of it is true is for the cores to doubt.

// Bounds of one message. A frame carries as many messages as wait, up to frameMessages.
const (
	wireReports    = 1024
	wireLeases     = 1024
	wireAsks       = 1024
	wireDecisions  = 4096 + wireAsks // all that were parked, too
	wireRolled     = 1 << 19
	wireForgotten  = wireReports
	maxKeyText     = 4096    // bytes of a tenant, a limit, a subject
	wireTotal      = 1 << 62 // units
	wirePartitions = 1 << 20
	maxHeldSeries  = 1 << 16 // of one bucket
	maxHandedLeft  = time.Minute
	wireWait       = time.Minute // that an ask leaves for a recall
	frameMessages  = 256
)

// errWire is what is wrong with a message from another process.
var errWire = errors.New("a message that no process of this release sends")

// checker notes the first thing that is wrong.
type checker struct{ err error }

func (c *checker) that(ok bool, what string) {
	if !ok && c.err == nil {
		c.err = fmt.Errorf("%w: %s", errWire, what)
	}
}

// amount is from 0 to wireTotal.
func (c *checker) amount(n int64, what string) int64 {
	c.that(n >= 0 && n <= wireTotal, what)
	return n
}

// span is a time that is not negative.
func (c *checker) span(n int64, what string) time.Duration {
	c.that(n >= 0, what)
	return time.Duration(n)
}

func (c *checker) number(n uint64, what string) uint64 {
	c.that(n != 0, what)
	return n
}

func (c *checker) bucket(b *leasepb.Bucket) Bucket {
	c.that(b != nil, "bucket")
	c.that(b.GetPartition() < wirePartitions, "partition")
	return Bucket{b.GetPartition(), c.key(b)}
}

func (c *checker) key(b *leasepb.Bucket) limiter.Key {
	for _, t := range [...][]byte{b.GetTenant(), b.GetLimit(), b.GetSubject()} {
		c.that(len(t) <= maxKeyText, "key")
	}
	if c.err != nil {
		return limiter.Key{}
	}
	return limiter.Key{Tenant: string(b.GetTenant()), Limit: string(b.GetLimit()), Subject: string(b.GetSubject())}
}

func (c *checker) limit(l *leasepb.Limit) limiter.Limit {
	c.that(l != nil && l.GetAlgorithm() <= math.MaxUint8 && l.GetParts() <= math.MaxInt32, "limit")
	if c.err != nil {
		return limiter.Limit{}
	}
	out := limiter.Limit{
		Algorithm: limiter.Algorithm(l.GetAlgorithm()), Rate: limiter.Rate{Count: l.GetCount(), Per: time.Duration(l.GetPer())},
		Burst: l.GetBurst(), Revision: l.GetRevision(), Parts: int32(l.GetParts()),
	}
	if err := out.Validate(); err != nil {
		c.that(false, "limit: "+err.Error())
	}
	return out
}

func bucketPB(b *Bucket) *leasepb.Bucket {
	return &leasepb.Bucket{Partition: b.Partition, Tenant: []byte(b.Key.Tenant), Limit: []byte(b.Key.Limit), Subject: []byte(b.Key.Subject)}
}

func keyPB(k *limiter.Key) *leasepb.Bucket { return bucketPB(&Bucket{Key: *k}) }

func limitPB(l *limiter.Limit) *leasepb.Limit {
	return &leasepb.Limit{
		Algorithm: uint32(l.Algorithm), Count: l.Rate.Count, Per: int64(l.Rate.Per), Burst: l.Burst,
		Revision: l.Revision, Parts: uint32(max(l.Parts, 0)),
	}
}

// collect makes a list of what one of its items becomes.
func collect[F, T any](from []F, one func(*F) T) []T {
	if len(from) == 0 {
		return nil
	}
	out := make([]T, len(from))
	for i := range from {
		out[i] = one(&from[i])
	}
	return out
}

// checked is collect for what came from the wire, as long as nothing is wrong.
func checked[F, T any](c *checker, from []F, most int, what string, one func(F) T) []T {
	c.that(len(from) <= most, what)
	if c.err != nil || len(from) == 0 {
		return nil
	}
	out := make([]T, len(from))
	for i := range from {
		if out[i] = one(from[i]); c.err != nil {
			return nil
		}
	}
	return out
}

func requestPB(r *Request) *leasepb.Request {
	out := &leasepb.Request{
		Holder: r.Holder, Owner: r.Owner, Epoch: r.Epoch, Seq: r.Seq, Session: r.Session, Dropped: r.Dropped,
		Reports: collect(r.Reports, reportPB), Asks: collect(r.Asks, askPB),
	}
	if r.Roll != nil {
		out.Roll = &leasepb.Roll{Epoch: r.Roll.Epoch, Slots: collect(r.Roll.Slots, func(s *RolledSlots) *leasepb.RolledSlots {
			return &leasepb.RolledSlots{Bucket: bucketPB(&s.Bucket), InUse: s.InUse, Limit: limitPB(&s.Limit)}
		})}
	}
	return out
}

func reportPB(r *Report) *leasepb.Report {
	return &leasepb.Report{
		Bucket: bucketPB(&r.Bucket), Granter: r.Granter, Series: r.Series, Ack: r.Ack, Returned: r.Returned, Refunded: r.Refunded,
		Debt: r.Debt, Idle: r.Idle, Closed: r.Closed, Level: max(r.Level, 0), Demand: max(r.Demand, 0), Cost: max(r.Cost, 0),
	}
}

func askPB(a *Ask) *leasepb.Ask {
	return &leasepb.Ask{Id: a.ID, Wait: max(a.Wait, 0), Peek: a.Peek, Charges: collect(a.Charges, func(c *AskCharge) *leasepb.AskCharge {
		return &leasepb.AskCharge{
			Bucket: bucketPB(&c.Bucket), Limit: limitPB(&c.Limit), Oversize: uint32(c.Oversize), Shadow: c.Shadow,
			Cost: max(0, min(c.Cost, limiter.MaxUnits+1)), // a limit takes no difference beyond these
		}
	})}
}

// requestOf checks r and says what is wrong with it.
func requestOf(r *leasepb.Request) (*Request, error) {
	var c checker
	out := &Request{
		Holder: c.number(r.GetHolder(), "holder"), Owner: c.number(r.GetOwner(), "owner"), Epoch: r.GetEpoch(),
		Seq: c.number(r.GetSeq(), "seq"), Session: r.GetSession(), Dropped: r.GetDropped(),
		Reports: checked(&c, r.GetReports(), wireReports, "reports", c.report), Asks: checked(&c, r.GetAsks(), wireAsks, "asks", c.ask),
	}
	if roll := r.GetRoll(); roll != nil {
		out.Roll = &Roll{Epoch: c.number(roll.GetEpoch(), "roll epoch"), Slots: checked(&c, roll.GetSlots(), wireRolled, "rolled slots",
			func(s *leasepb.RolledSlots) RolledSlots {
				return RolledSlots{Bucket: c.bucket(s.GetBucket()), InUse: c.amount(s.GetInUse(), "slots in use"), Limit: c.limit(s.GetLimit())}
			})}
	}
	if c.err != nil {
		return nil, c.err
	}
	return out, nil
}

func (c *checker) report(r *leasepb.Report) Report {
	return Report{
		Bucket: c.bucket(r.GetBucket()), Granter: r.GetGranter(), Series: r.GetSeries(), Ack: r.GetAck(), // series 0: the hints alone
		Returned: c.amount(r.GetReturned(), "returned"), Refunded: c.amount(r.GetRefunded(), "refunded"), Debt: c.amount(r.GetDebt(), "debt"),
		Idle: r.GetIdle(), Closed: r.GetClosed(),
		Level: c.amount(r.GetLevel(), "level"), Demand: c.amount(r.GetDemand(), "demand"), Cost: c.amount(r.GetCost(), "cost"),
	}
}

func (c *checker) ask(a *leasepb.Ask) Ask {
	c.that(a.GetWait() >= 0 && a.GetWait() <= int64(wireWait), "wait")
	c.that(len(a.GetCharges()) > 0, "an ask without charges")
	return Ask{ID: c.number(a.GetId(), "id"), Wait: a.GetWait(), Peek: a.GetPeek(), Charges: checked(c, a.GetCharges(), limiter.MaxCharges, "charges",
		func(q *leasepb.AskCharge) AskCharge {
			c.that(q.GetCost() >= 0 && q.GetCost() <= limiter.MaxUnits+1, "cost")
			c.that(q.GetOversize() <= uint32(limiter.Debt), "oversize")
			return AskCharge{
				Bucket: c.bucket(q.GetBucket()), Limit: c.limit(q.GetLimit()), Cost: q.GetCost(),
				Oversize: limiter.Oversize(q.GetOversize()), Shadow: q.GetShadow(),
			}
		})}
}

func responsePB(r *Response) *leasepb.Response {
	return &leasepb.Response{
		Owner: r.Owner, Holder: r.Holder, Epoch: r.Epoch, Answers: r.Answers, Session: r.Session, Left: r.Left,
		Leases: collect(r.Leases, grantPB), Decisions: collect(r.Decisions, decisionPB), RollTaken: r.RollTaken, RollWanted: r.RollWanted,
		Refusals: collect(r.Refusals, func(f *Refusal) *leasepb.Refusal {
			return &leasepb.Refusal{Bucket: bucketPB(&f.Bucket), Cost: f.Cost, For: f.For, RetryAfter: f.RetryAfter, Level: f.Level}
		}),
		Forgotten: collect(r.Forgotten, func(s *Series) *leasepb.Series {
			return &leasepb.Series{Granter: s.Granter, Number: s.Number}
		}),
	}
}

func grantPB(l *Lease) *leasepb.Grant {
	return &leasepb.Grant{
		Bucket: bucketPB(&l.Bucket), Series: l.Series, Number: l.Number, Share: l.Share, Depth: l.Depth, Granted: l.Granted,
		Window: l.Window, Limit: limitPB(&l.Limit), Level: l.Level, Rolled: l.Rolled,
	}
}

func decisionPB(d *AskDecision) *leasepb.AskDecision {
	return &leasepb.AskDecision{Id: d.ID, Refused: int32(d.Refused), Left: d.Left, Charges: collect(d.Charges, func(c *ChargeDecision) *leasepb.ChargeDecision {
		return &leasepb.ChargeDecision{
			Admitted: c.Admitted, By: uint32(c.By), Remaining: c.Remaining, RetryAfter: int64(c.RetryAfter), Reset_: int64(c.Reset),
			At: c.At, Series: c.Series, Lent: c.Lent,
		}
	})}
}

// responseOf checks r and says what is wrong with it. A time that it promises for too long is cut
// to what the protocol knows.
func responseOf(r *leasepb.Response) (*Response, error) {
	var c checker
	out := &Response{
		Owner: c.number(r.GetOwner(), "owner"), Holder: c.number(r.GetHolder(), "holder"), Epoch: r.GetEpoch(), Answers: r.GetAnswers(),
		Session: r.GetSession(), Left: int64(min(c.span(r.GetLeft(), "left"), sessionFor)), RollTaken: r.GetRollTaken(), RollWanted: r.GetRollWanted(),
		Leases:    checked(&c, r.GetLeases(), wireLeases, "leases", c.grant),
		Decisions: checked(&c, r.GetDecisions(), wireDecisions, "decisions", c.decision),
		Refusals: checked(&c, r.GetRefusals(), wireDecisions, "refusals", func(f *leasepb.Refusal) Refusal {
			return Refusal{
				Bucket: c.bucket(f.GetBucket()), Cost: c.amount(f.GetCost(), "cost"), Level: f.GetLevel(),
				For: int64(c.span(f.GetFor(), "for")), RetryAfter: int64(c.span(f.GetRetryAfter(), "retry after")),
			}
		}),
		Forgotten: checked(&c, r.GetForgotten(), wireForgotten, "forgotten", func(s *leasepb.Series) Series {
			return Series{Granter: s.GetGranter(), Number: s.GetNumber()}
		}),
	}
	if c.err != nil {
		return nil, c.err
	}
	return out, nil
}

func (c *checker) grant(l *leasepb.Grant) Lease {
	c.that(l.GetShare() <= ShareOne, "share")
	c.that(l.GetWindow() >= 0, "window")
	return Lease{
		Bucket: c.bucket(l.GetBucket()), Series: c.number(l.GetSeries(), "series"), Number: c.number(l.GetNumber(), "number"), Share: l.GetShare(),
		Depth: c.amount(l.GetDepth(), "depth"), Granted: c.amount(l.GetGranted(), "granted"), Window: l.GetWindow(),
		Limit: c.limit(l.GetLimit()), Level: l.GetLevel(), Rolled: l.GetRolled(),
	}
}

func (c *checker) decision(d *leasepb.AskDecision) AskDecision {
	n := int32(len(d.GetCharges()))
	c.that(d.GetRefused() >= -1 && d.GetRefused() < max(n, 1) || d.GetRefused() == TableFull || d.GetRefused() == NotOwner, "refused")
	return AskDecision{
		ID: c.number(d.GetId(), "id"), Refused: int(d.GetRefused()), Left: int64(min(c.span(d.GetLeft(), "left"), sessionFor)),
		Charges: checked(c, d.GetCharges(), limiter.MaxCharges, "charges", func(q *leasepb.ChargeDecision) ChargeDecision {
			c.that(q.GetBy() <= uint32(limiter.ByAllow), "by")
			return ChargeDecision{
				Decision: limiter.Decision{
					Admitted: q.GetAdmitted(), By: limiter.By(q.GetBy()), Remaining: q.GetRemaining(),
					RetryAfter: c.span(q.GetRetryAfter(), "retry after"), Reset: c.span(q.GetReset_(), "reset"), At: q.GetAt(),
				},
				Series: q.GetSeries(), Lent: q.GetLent(),
			}
		}),
	}
}

func handOffHeadPB(h *Handoff) *leasepb.HandOffHead {
	return &leasepb.HandOffHead{From: h.From, To: h.To, Epoch: h.Epoch, Partition: h.Partition, Nothing: h.Nothing, Floor: h.Floor}
}

func handedPB(b *HandedBucket) *leasepb.HandedBucket {
	return &leasepb.HandedBucket{
		Bucket: keyPB(&b.Key), Limit: limitPB(&b.Limit), State: b.State, Drawn: b.Drawn, Block: b.Block,
		Series: collect(b.Series, func(s *HandedSeries) *leasepb.HandedSeries {
			return &leasepb.HandedSeries{
				Holder: s.Holder, Granter: s.Granter, Series: s.Series, Number: s.Number, Share: s.Share, Depth: s.Depth, Left: s.Left,
				Granted: s.Granted, Returned: s.Returned, Refunded: s.Refunded, Debt: s.Debt, Window: s.Window,
			}
		}),
	}
}

// handOffOf checks the head of a hand-off; its buckets come in parts.
func handOffOf(h *leasepb.HandOffHead) (*Handoff, error) {
	var c checker
	c.that(h.GetPartition() < wirePartitions, "partition")
	c.that(h.GetFloor() >= FloorNever, "floor")
	out := &Handoff{
		From: c.number(h.GetFrom(), "from"), To: c.number(h.GetTo(), "to"), Epoch: c.number(h.GetEpoch(), "epoch"),
		Partition: h.GetPartition(), Nothing: h.GetNothing(), Floor: h.GetFloor(),
	}
	if c.err != nil {
		return nil, c.err
	}
	return out, nil
}

// maxState bounds a bucket's state: a log of limiter.MaxLogEntries takes 110 kB, no other comes near.
const maxState = 1 << 20

func handedOf(b *leasepb.HandedBucket) (HandedBucket, error) {
	var c checker
	c.that(b.GetBucket() != nil, "bucket")
	c.that(len(b.GetState()) <= maxState, "state")
	c.that(len(b.GetBucket().GetTenant())+len(b.GetBucket().GetLimit())+len(b.GetBucket().GetSubject()) <= maxKey, "key") // as an owner has them
	c.that(b.GetDrawn() >= -wireTotal && b.GetDrawn() <= wireTotal, "drawn")                                              // below zero: a debt
	out := HandedBucket{
		Key: c.key(b.GetBucket()), Limit: c.limit(b.GetLimit()), State: b.GetState(), Drawn: b.GetDrawn(), Block: b.GetBlock(),
		Series: checked(&c, b.GetSeries(), maxHeldSeries, "series", c.handedSeries),
	}
	return out, c.err
}

// handedSeries takes any share: of a limit that was lowered a lease may have more than the whole (R9).
func (c *checker) handedSeries(s *leasepb.HandedSeries) HandedSeries {
	c.that(s.GetLeft() >= 0 && s.GetLeft() <= int64(maxHandedLeft), "left")
	c.that(s.GetWindow() >= 0, "window")
	return HandedSeries{
		Holder: c.number(s.GetHolder(), "holder"), Granter: c.number(s.GetGranter(), "granter"), Series: c.number(s.GetSeries(), "series"),
		Number: s.GetNumber(), Share: s.GetShare(), Depth: c.amount(s.GetDepth(), "depth"), Left: s.GetLeft(),
		Granted: c.amount(s.GetGranted(), "granted"), Returned: c.amount(s.GetReturned(), "returned"),
		Refunded: c.amount(s.GetRefunded(), "refunded"), Debt: c.amount(s.GetDebt(), "debt"), Window: s.GetWindow(),
	}
}
