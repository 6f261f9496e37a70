package lease

import (
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"headgate/lease/leasepb"
	"headgate/limiter"
)

// What a process of this release may send.
var (
	amounts    = rapid.Int64Range(0, wireTotal)
	numbers    = rapid.Uint64Range(1, math.MaxUint64)
	texts      = rapid.OneOf(rapid.SampledFrom([]string{"", "acme", "\xff\x00", "user"}), rapid.String())
	wireLimits = rapid.SampledFrom([]limiter.Limit{
		{Rate: limiter.Rate{Count: 100, Per: time.Second}, Burst: 50, Revision: 7},
		{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 1000, Per: time.Hour}},
		{Algorithm: limiter.SlidingLog, Rate: limiter.Rate{Count: 10, Per: time.Minute}},
		{Algorithm: limiter.Semaphore, Burst: 8, Parts: 3},
	})
	wireBuckets = rapid.Custom(func(t *rapid.T) Bucket {
		return Bucket{rapid.Uint32Range(0, wirePartitions-1).Draw(t, "partition"), limiter.Key{Tenant: texts.Draw(t, "tenant"), Limit: texts.Draw(t, "limit"), Subject: texts.Draw(t, "subject")}}
	})
	anyReports = rapid.Custom(func(t *rapid.T) Report {
		return Report{
			wireBuckets.Draw(t, "bucket"), rapid.Uint64().Draw(t, "granter"), rapid.Uint64().Draw(t, "series"), rapid.Uint64().Draw(t, "ack"),
			amounts.Draw(t, "returned"), amounts.Draw(t, "refunded"), amounts.Draw(t, "debt"), rapid.Bool().Draw(t, "idle"), rapid.Bool().Draw(t, "closed"),
			amounts.Draw(t, "level"), amounts.Draw(t, "demand"), amounts.Draw(t, "cost"),
		}
	})
	anyAsks = rapid.Custom(func(t *rapid.T) Ask {
		return Ask{numbers.Draw(t, "id"), rapid.Int64Range(0, int64(wireWait)).Draw(t, "wait"), rapid.Bool().Draw(t, "peek"), rapid.SliceOfN(rapid.Custom(func(t *rapid.T) AskCharge {
			return AskCharge{
				wireBuckets.Draw(t, "bucket"), wireLimits.Draw(t, "limit"), rapid.Int64Range(0, limiter.MaxUnits+1).Draw(t, "cost"),
				rapid.SampledFrom([]limiter.Oversize{limiter.Refuse, limiter.Debt}).Draw(t, "oversize"), rapid.Bool().Draw(t, "shadow"),
			}
		}), 1, 3).Draw(t, "charges")}
	})
	wireRolls = rapid.Custom(func(t *rapid.T) *Roll {
		if rapid.Bool().Draw(t, "no roll") {
			return nil
		}
		return &Roll{numbers.Draw(t, "epoch"), list(t, "slots", rapid.Custom(func(t *rapid.T) RolledSlots {
			return RolledSlots{wireBuckets.Draw(t, "bucket"), amounts.Draw(t, "in use"), wireLimits.Draw(t, "limit")}
		}))}
	})
	anyLeases = rapid.Custom(func(t *rapid.T) Lease {
		return Lease{
			wireBuckets.Draw(t, "bucket"), numbers.Draw(t, "series"), numbers.Draw(t, "number"), rapid.Uint32Range(0, ShareOne).Draw(t, "share"),
			amounts.Draw(t, "depth"), amounts.Draw(t, "granted"), amounts.Draw(t, "window"), wireLimits.Draw(t, "limit"), rapid.Int64().Draw(t, "level"), rapid.Bool().Draw(t, "rolled"),
		}
	})
	anyDecisions = rapid.Custom(func(t *rapid.T) AskDecision {
		charges := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) ChargeDecision {
			return ChargeDecision{
				limiter.Decision{
					Admitted: rapid.Bool().Draw(t, "admitted"), By: limiter.By(rapid.Uint8Range(0, uint8(limiter.ByAllow)).Draw(t, "by")), Remaining: rapid.Int64().Draw(t, "remaining"),
					RetryAfter: time.Duration(rapid.Int64Range(0, math.MaxInt64).Draw(t, "retry")), Reset: limiter.Never, At: rapid.Int64().Draw(t, "at"),
				},
				rapid.Uint64().Draw(t, "series"), rapid.Bool().Draw(t, "lent"),
			}
		}), 1, 3).Draw(t, "charges")
		return AskDecision{numbers.Draw(t, "id"), rapid.SampledFrom([]int{-1, 0, TableFull, NotOwner}).Draw(t, "refused"), rapid.Int64Range(0, int64(sessionFor)).Draw(t, "left"), charges}
	})
)

// list is nil where it is empty, as on the wire.
func list[T any](t *rapid.T, name string, of *rapid.Generator[T]) []T {
	if out := rapid.SliceOfN(of, 0, 3).Draw(t, name); len(out) > 0 {
		return out
	}
	return nil
}

// TestWireKeepsRequests and TestWireKeepsResponses: what one process says is what the other reads.
func TestWireKeepsRequests(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := &Request{
			numbers.Draw(t, "holder"), numbers.Draw(t, "owner"), rapid.Uint64().Draw(t, "epoch"), numbers.Draw(t, "seq"), rapid.Uint64().Draw(t, "session"),
			rapid.Uint64().Draw(t, "dropped"), list(t, "reports", anyReports), list(t, "asks", anyAsks), wireRolls.Draw(t, "roll"),
		}
		got, err := requestOf(remade(t, requestPB(want)))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, %v\nwant %+v", got, err, want)
		}
	})
}

func TestWireKeepsResponses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := &Response{
			numbers.Draw(t, "owner"), numbers.Draw(t, "holder"), rapid.Uint64().Draw(t, "epoch"), rapid.Uint64().Draw(t, "answers"), rapid.Uint64().Draw(t, "session"),
			rapid.Int64Range(0, int64(sessionFor)).Draw(t, "left"), list(t, "leases", anyLeases), list(t, "decisions", anyDecisions),
			list(t, "refusals", rapid.Custom(func(t *rapid.T) Refusal {
				return Refusal{wireBuckets.Draw(t, "bucket"), amounts.Draw(t, "cost"), rapid.Int64Range(0, math.MaxInt64).Draw(t, "for"), math.MaxInt64, rapid.Int64().Draw(t, "level")}
			})),
			list(t, "forgotten", rapid.Custom(func(t *rapid.T) Series { return Series{numbers.Draw(t, "granter"), numbers.Draw(t, "number")} })),
			rapid.Uint64().Draw(t, "roll"), rapid.Uint64().Draw(t, "wanted"),
		}
		got, err := responseOf(remade(t, responsePB(want)))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, %v\nwant %+v", got, err, want)
		}
	})
}

func TestWireKeepsHandOffs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := Handoff{
			From: numbers.Draw(t, "from"), To: numbers.Draw(t, "to"), Epoch: numbers.Draw(t, "epoch"), Partition: 5, Nothing: rapid.Bool().Draw(t, "nothing"),
			Floor: rapid.Int64Range(FloorNever, math.MaxInt64).Draw(t, "floor"),
		}
		got, err := handOffOf(remade(t, handOffHeadPB(&want)))
		if err != nil || !reflect.DeepEqual(*got, want) {
			t.Fatalf("got %+v, %v\nwant %+v", got, err, want)
		}
		b := HandedBucket{
			limiter.Key{Tenant: texts.Draw(t, "tenant")},
			wireLimits.Draw(t, "limit"), []byte("state"),
			list(t, "series", rapid.Custom(func(t *rapid.T) HandedSeries {
				return HandedSeries{
					numbers.Draw(t, "holder"), numbers.Draw(t, "granter"), numbers.Draw(t, "series"), rapid.Uint64().Draw(t, "number"), rapid.Uint32().Draw(t, "share"),
					amounts.Draw(t, "depth"), rapid.Int64Range(0, int64(maxHandedLeft)).Draw(t, "left"), amounts.Draw(t, "granted"), amounts.Draw(t, "returned"),
					amounts.Draw(t, "refunded"), amounts.Draw(t, "debt"), amounts.Draw(t, "window"),
				}
			})), rapid.Int64Range(-wireTotal, wireTotal).Draw(t, "drawn"), rapid.Uint64().Draw(t, "block"),
		}
		if got, err := handedOf(remade(t, handedPB(&b))); err != nil || !reflect.DeepEqual(got, b) {
			t.Fatalf("got %+v, %v\nwant %+v", got, err, b)
		}
	})
}

// remade is m as the other side has it.
func remade[M proto.Message](t *rapid.T, m M) M {
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	out := m.ProtoReflect().New().Interface().(M)
	if err := proto.Unmarshal(b, out); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestWireRefuses holds each check: one wrong field, and nothing of the message counts.
func TestWireRefuses(t *testing.T) {
	limit := &leasepb.Limit{Count: 1, Per: 1, Burst: 1}
	bucket := func() *leasepb.Bucket { return &leasepb.Bucket{Tenant: []byte("acme")} }
	request := func() *leasepb.Request {
		return &leasepb.Request{
			Holder: 1, Owner: 2, Seq: 3, Reports: []*leasepb.Report{{Bucket: bucket(), Granter: 2, Series: 4}},
			Asks: []*leasepb.Ask{{Id: 5, Charges: []*leasepb.AskCharge{{Bucket: bucket(), Limit: limit}}}},
			Roll: &leasepb.Roll{Epoch: 1, Slots: []*leasepb.RolledSlots{{Bucket: bucket(), Limit: &leasepb.Limit{Algorithm: 4, Burst: 1}}}},
		}
	}
	if _, err := requestOf(request()); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*leasepb.Request){
		"holder": func(r *leasepb.Request) { r.Holder = 0 }, "owner": func(r *leasepb.Request) { r.Owner = 0 }, "seq": func(r *leasepb.Request) { r.Seq = 0 },
		"bucket":          func(r *leasepb.Request) { r.Reports[0].Bucket = nil },
		"partition":       func(r *leasepb.Request) { r.Reports[0].Bucket.Partition = wirePartitions },
		"key":             func(r *leasepb.Request) { r.Reports[0].Bucket.Subject = make([]byte, maxKeyText+1) },
		"returned":        func(r *leasepb.Request) { r.Reports[0].Returned = -1 },
		"returned, huge":  func(r *leasepb.Request) { r.Reports[0].Returned = wireTotal + 1 },
		"refunded":        func(r *leasepb.Request) { r.Reports[0].Refunded = -1 },
		"debt":            func(r *leasepb.Request) { r.Reports[0].Debt = math.MinInt64 },
		"level":           func(r *leasepb.Request) { r.Reports[0].Level = -1 },
		"demand":          func(r *leasepb.Request) { r.Reports[0].Demand = -1 },
		"cost of reports": func(r *leasepb.Request) { r.Reports[0].Cost = -1 },
		"many reports":    func(r *leasepb.Request) { r.Reports = make([]*leasepb.Report, wireReports+1) },
		"nil report":      func(r *leasepb.Request) { r.Reports[0] = nil },
		"id":              func(r *leasepb.Request) { r.Asks[0].Id = 0 },
		"wait":            func(r *leasepb.Request) { r.Asks[0].Wait = -1 },
		"wait, long":      func(r *leasepb.Request) { r.Asks[0].Wait = int64(wireWait) + 1 },
		"no charges":      func(r *leasepb.Request) { r.Asks[0].Charges = nil },
		"many charges":    func(r *leasepb.Request) { r.Asks[0].Charges = make([]*leasepb.AskCharge, limiter.MaxCharges+1) },
		"many asks":       func(r *leasepb.Request) { r.Asks = make([]*leasepb.Ask, wireAsks+1) },
		"cost":            func(r *leasepb.Request) { r.Asks[0].Charges[0].Cost = -1 },
		"cost, huge":      func(r *leasepb.Request) { r.Asks[0].Charges[0].Cost = limiter.MaxUnits + 2 },
		"oversize":        func(r *leasepb.Request) { r.Asks[0].Charges[0].Oversize = 2 },
		"limit":           func(r *leasepb.Request) { r.Asks[0].Charges[0].Limit = nil },
		"algorithm": func(r *leasepb.Request) {
			r.Asks[0].Charges[0].Limit = &leasepb.Limit{Algorithm: 256, Count: 1, Per: 1, Burst: 1}
		},
		"rate":         func(r *leasepb.Request) { r.Asks[0].Charges[0].Limit = &leasepb.Limit{Per: 1, Burst: 1} },
		"roll epoch":   func(r *leasepb.Request) { r.Roll.Epoch = 0 },
		"slots in use": func(r *leasepb.Request) { r.Roll.Slots[0].InUse = -1 },
	} {
		r := request()
		spoil(r)
		if got, err := requestOf(r); err == nil || got != nil {
			t.Errorf("%s: taken as %+v", name, got)
		}
	}
	response := func() *leasepb.Response {
		return &leasepb.Response{
			Owner: 1, Holder: 2, Leases: []*leasepb.Grant{{Bucket: bucket(), Series: 1, Number: 1, Limit: limit}},
			Decisions: []*leasepb.AskDecision{{Id: 1, Refused: -1, Charges: []*leasepb.ChargeDecision{{}}}}, Refusals: []*leasepb.Refusal{{Bucket: bucket()}},
		}
	}
	if _, err := responseOf(response()); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*leasepb.Response){
		"owner": func(r *leasepb.Response) { r.Owner = 0 }, "holder": func(r *leasepb.Response) { r.Holder = 0 }, "left": func(r *leasepb.Response) { r.Left = -1 },
		"series":           func(r *leasepb.Response) { r.Leases[0].Series = 0 },
		"number":           func(r *leasepb.Response) { r.Leases[0].Number = 0 },
		"share":            func(r *leasepb.Response) { r.Leases[0].Share = ShareOne + 1 },
		"depth":            func(r *leasepb.Response) { r.Leases[0].Depth = -1 },
		"granted":          func(r *leasepb.Response) { r.Leases[0].Granted = wireTotal + 1 },
		"window":           func(r *leasepb.Response) { r.Leases[0].Window = -1 },
		"limit":            func(r *leasepb.Response) { r.Leases[0].Limit = nil },
		"many leases":      func(r *leasepb.Response) { r.Leases = make([]*leasepb.Grant, wireLeases+1) },
		"id":               func(r *leasepb.Response) { r.Decisions[0].Id = 0 },
		"refused":          func(r *leasepb.Response) { r.Decisions[0].Refused = 1 },
		"refused, unknown": func(r *leasepb.Response) { r.Decisions[0].Refused = -4 },
		"by":               func(r *leasepb.Response) { r.Decisions[0].Charges[0].By = 9 },
		"retry after":      func(r *leasepb.Response) { r.Decisions[0].Charges[0].RetryAfter = -1 },
		"cost":             func(r *leasepb.Response) { r.Refusals[0].Cost = -1 },
		"for":              func(r *leasepb.Response) { r.Refusals[0].For = -1 },
	} {
		r := response()
		spoil(r)
		if got, err := responseOf(r); err == nil || got != nil {
			t.Errorf("%s: taken as %+v", name, got)
		}
	}
	long := response()
	long.Left = math.MaxInt64
	if r, err := responseOf(long); err != nil || r.Left != int64(sessionFor) {
		t.Errorf("a session for %d ns, %v; want %d", r.Left, err, sessionFor)
	}
	for name, h := range map[string]*leasepb.HandOffHead{
		"nil": nil, "from": {To: 1, Epoch: 1}, "to": {From: 1, Epoch: 1}, "epoch": {From: 1, To: 1},
		"floor": {From: 1, To: 1, Epoch: 1, Floor: -2}, "partition": {From: 1, To: 1, Epoch: 1, Partition: wirePartitions},
	} {
		if got, err := handOffOf(h); err == nil {
			t.Errorf("head of a hand-off, %s: taken as %+v", name, got)
		}
	}
	for name, s := range map[string]*leasepb.HandedSeries{
		"holder": {Granter: 1, Series: 1}, "left": {Holder: 1, Granter: 1, Series: 1, Left: -1}, "left, long": {Holder: 1, Granter: 1, Series: 1, Left: math.MaxInt64},
		"depth": {Holder: 1, Granter: 1, Series: 1, Depth: -1},
	} {
		if got, err := handedOf(&leasepb.HandedBucket{Bucket: bucket(), Limit: limit, Series: []*leasepb.HandedSeries{s}}); err == nil {
			t.Errorf("handed series, %s: taken as %+v", name, got)
		}
	}
	for _, drawn := range []int64{-wireTotal - 1, wireTotal + 1} {
		if got, err := handedOf(&leasepb.HandedBucket{Bucket: bucket(), Limit: limit, Drawn: drawn}); err == nil {
			t.Errorf("handed bucket, drawn: taken as %+v", got)
		}
	}
}

// FuzzWire: whatever comes is refused, or reads the same again once it was written.
func FuzzWire(f *testing.F) {
	for _, m := range []proto.Message{
		&leasepb.Frame{Holder: 1, Owner: 2},
		&leasepb.Frame{Requests: []*leasepb.Request{{Holder: 1, Owner: 2, Seq: 3, Asks: []*leasepb.Ask{{Id: 1, Charges: []*leasepb.AskCharge{{
			Bucket: &leasepb.Bucket{Tenant: []byte("acme")}, Limit: &leasepb.Limit{Count: 1, Per: 1, Burst: 1},
		}}}}}}},
		&leasepb.Frame{Responses: []*leasepb.Response{{Owner: 1, Holder: 2, Leases: []*leasepb.Grant{{
			Bucket: &leasepb.Bucket{Tenant: []byte("acme")}, Limit: &leasepb.Limit{Count: 1, Per: 1, Burst: 1}, Series: 1, Number: 1, Depth: 1,
		}}}}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var frame leasepb.Frame
		if proto.Unmarshal(b, &frame) == nil {
			for _, q := range frame.GetRequests() {
				if r, err := requestOf(q); err == nil {
					same(t, r, func() (*Request, error) { return requestOf(requestPB(r)) })
				}
			}
			for _, p := range frame.GetResponses() {
				if r, err := responseOf(p); err == nil {
					same(t, r, func() (*Response, error) { return responseOf(responsePB(r)) })
				}
			}
		}
		var part leasepb.HandOffPart
		if proto.Unmarshal(b, &part) == nil {
			if h, err := handOffOf(part.GetHead()); err == nil {
				same(t, h, func() (*Handoff, error) { return handOffOf(handOffHeadPB(h)) })
			}
			for _, q := range part.GetBuckets() {
				if h, err := handedOf(q); err == nil {
					same(t, h, func() (HandedBucket, error) { return handedOf(handedPB(&h)) })
				}
			}
		}
	})
}

func same[M any](t *testing.T, want M, again func() (M, error)) {
	t.Helper()
	if got, err := again(); err != nil || fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) && !reflect.DeepEqual(got, want) {
		t.Fatalf("read again: %+v, %v\nwas %+v", got, err, want)
	}
}
