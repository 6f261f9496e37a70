package lease

import (
	"testing"

	"pgregory.net/rapid"

	"headgate/limiter"
)

// newcomer is an owner of the same partitions as the model's, in the view after the model's.
func (m *crowdModel) newcomer(self uint64) *Owner {
	o := NewOwner(OwnerConfig{Self: self, Rights: m.rights, Wait: 1.07e9})
	o.Step(m.at, &View{Epoch: m.epoch + 1, Members: []Member{{"next", self, ""}}, Owners: []int32{0, 0}, Place: deedPlace})
	return o
}

// overTheWire is a hand-off as its receiver reads it.
func overTheWire(h *Handoff) (*Handoff, error) {
	var out *Handoff
	for part := range handParts(h) {
		if out == nil {
			var err error
			if out, err = handOffOf(part.GetHead()); err != nil {
				return nil, err
			}
		}
		for _, b := range part.GetBuckets() {
			handed, err := handedOf(b)
			if err != nil {
				return nil, err
			}
			out.Buckets = append(out.Buckets, handed)
		}
	}
	return out, nil
}

// checkHandOffs: whatever happened to an owner, what it would hand over can be read and taken. One
// bucket that cannot would lose its whole partition, and a saved file all of them.
func (m *crowdModel) checkHandOffs(t *rapid.T) {
	_, hs := m.o.Save(m.at)
	for _, self := range []uint64{9, 1} { // another process, and the one that opened the series
		next := m.newcomer(self)
		next.numbers = m.o.numbers
		for _, h := range hs {
			h.To = self
			got, err := overTheWire(h)
			if err != nil {
				t.Fatalf("%v in %+v", err, h)
			}
			if !next.validHandoff(got) {
				t.Fatalf("to %d, refused: %+v", self, h)
			}
		}
	}
}

func TestOwnerHandsOverWhatIsTaken(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newCrowdModel(t)
		actions := m.actions()
		actions[""] = m.checkHandOffs
		t.Repeat(actions)
	})
}

// TestOwnerHandsOverDebts: a durable limit in debt, as it is where requests use more than they reserved.
func TestOwnerHandsOverDebts(t *testing.T) {
	o := NewOwner(OwnerConfig{Self: 1, Rights: &deedRights{lease: 1e9}, Wait: 1.07e9})
	at := Instant{1e9, 1_700_000_000e9}
	o.Step(at, viewOf(1, 0, 0))
	l := limiter.Limit{Rate: limiter.Rate{Count: 6400, Per: 86400e9}, Burst: 6400}
	b, id := o.make(&limiter.Key{Tenant: "a", Limit: "day"}, o.intern(&l), 0, at)
	o.debit(at, id, b, 5)
	o.Step(at, viewOf(2, 1, 0))
	hs := o.HandOffs(at)
	if len(hs) != 1 || len(hs[0].Buckets) != 1 {
		t.Fatalf("%+v", hs)
	}
	got, err := overTheWire(hs[0])
	if err != nil || got.Buckets[0].Drawn != -5 {
		t.Errorf("got %+v, %v; want 5 of debt", got, err)
	}
}

// viewOf has the members 1 and 2, and of each partition the place of its owner.
func viewOf(epoch uint64, owners ...int32) *View {
	return &View{Epoch: epoch, Members: []Member{{"n1", 1, ""}, {"n2", 2, ""}}, Owners: owners, Place: deedPlace}
}

// duo is two owners, 1 and 2, that step together and lend 50 at a time.
type duo struct {
	*testing.T
	at  Instant
	o   map[uint64]*Owner
	seq uint64
}

func newDuo(t *testing.T, s *oneSize) *duo {
	d := &duo{T: t, at: Instant{1e9, 1_700_000_000e9}, o: map[uint64]*Owner{}}
	for _, id := range []uint64{1, 2} {
		d.o[id] = NewOwner(OwnerConfig{Self: id, Rights: &deedRights{lease: 1e9}, Sizer: s, Wait: 1.07e9})
	}
	d.step(viewOf(1, 0, 0))
	return d
}

func (d *duo) step(v *View) {
	d.o[1].Step(d.at, v)
	d.o[2].Step(d.at, v)
}

// later lets time pass.
func (d *duo) later(ns int64) { d.at.Now, d.at.Wall = d.at.Now+ns, d.at.Wall+ns }

// say has the holder 2 say something to an owner.
func (d *duo) say(to uint64, session uint64, reports []Report, asks ...Ask) *Response {
	d.seq++
	return d.o[to].Handle(d.at, &Request{Holder: 2, Owner: to, Epoch: d.o[to].view.Epoch, Seq: d.seq, Session: session, Reports: reports, Asks: asks})[0]
}

// handOver gives partition 0 over the wire.
func (d *duo) handOver(from, to uint64) {
	d.Helper()
	hs := d.o[from].HandOffs(d.at)
	if len(hs) != 1 || hs[0].Nothing {
		d.Fatalf("%d has %+v to hand over", from, hs)
	}
	h, err := overTheWire(hs[0])
	if err != nil || !d.o[to].Accept(d.at, h) || d.o[to].Stats().Rejected > 0 {
		d.Fatalf("refused by %d: %v, %+v", to, err, h)
	}
	d.o[from].HandedOff(0, h.Epoch)
}

func (d *duo) level(of uint64, want int64) {
	d.Helper()
	if ls := d.o[of].allLevels(d.at); len(ls) != 1 || ls[0].Level != want {
		d.Fatalf("%d has %+v, want a level of %d", of, ls, want)
	}
}

var duoKey = Bucket{0, limiter.Key{Tenant: "a", Limit: "tokens"}}

func duoAsk(id uint64, cost int64, l limiter.Limit) Ask {
	return Ask{ID: id, Charges: []AskCharge{{Bucket: duoKey, Limit: l, Cost: cost}}}
}

// TestOwnerTakesBackItsSeries: a partition goes there and back while a reservation is open. Nothing is
// lost, and what is said of the series before the hand-over waits for it, though this owner opened it.
func TestOwnerTakesBackItsSeries(t *testing.T) {
	d := newDuo(t, &oneSize{})
	l := limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 50, Per: 50e9}}
	if r := d.say(1, 0, nil, duoAsk(1, 20, l)); r.Decisions[0].Refused != -1 {
		t.Fatalf("%+v", r)
	}
	d.level(1, 30)
	d.step(viewOf(2, 1, 0))
	d.handOver(1, 2)
	d.level(2, 30)
	d.later(5e9)
	d.step(viewOf(3, 0, 0))
	owed := Report{Bucket: duoKey, Granter: 1, Series: 1, Debt: 7, Idle: true}
	if r := d.say(1, 1, []Report{owed}); len(r.Forgotten) > 0 {
		t.Fatalf("%+v", r)
	}
	d.handOver(2, 1)
	d.level(1, 23)
	owed.Refunded, owed.Closed = 4, true
	d.say(1, 1, []Report{owed, owed})
	d.level(1, 27)
	if n := d.o[1].Stats().Series; n != 0 {
		t.Errorf("%d series after it was closed", n)
	}
	// A series that it never opened it does not take.
	d.later(5e9)
	d.step(viewOf(4, 1, 0))
	d.handOver(1, 2)
	d.step(viewOf(5, 0, 0))
	h := d.o[2].HandOffs(d.at)[0]
	h.Buckets[0].Series = []HandedSeries{{Holder: 2, Granter: 1, Series: d.o[1].numbers + 1}}
	if d.o[1].Accept(d.at, h) {
		t.Error("took a series in its own name that it never opened")
	}
}

// TestOwnerHandsOverLoweredLimits: a lease of before may be more than the whole of a lowered limit.
func TestOwnerHandsOverLoweredLimits(t *testing.T) {
	d := newDuo(t, &oneSize{share: 1, depth: 50, grant: 50})
	l := limiter.Limit{Rate: limiter.Rate{Count: 10, Per: 1e9}, Burst: 100}
	d.say(1, 0, nil, duoAsk(1, 1, l))
	l.Rate.Count, l.Burst, l.Revision = 1, 50, 1
	d.say(1, 1, nil, duoAsk(2, 1, l))
	d.step(viewOf(2, 1, 0))
	if s := d.o[1].HandOffs(d.at)[0].Buckets[0].Series[0]; s.Share <= ShareOne {
		t.Fatalf("%+v is not above the whole", s)
	}
	d.handOver(1, 2)
}

// TestOwnerAnswersEarlyReports: what was said of series that no hand-over brought is answered once
// none can come any more, and does not take the room of others.
func TestOwnerAnswersEarlyReports(t *testing.T) {
	d := newDuo(t, &oneSize{})
	d.step(viewOf(2, 1, 0))
	early := Report{Bucket: duoKey, Granter: 1, Series: 1, Debt: 7, Idle: true, Closed: true}
	if r := d.say(2, 0, []Report{early}); len(r.Forgotten) > 0 {
		t.Fatalf("%+v", r)
	}
	if next := d.o[2].Next(); next > d.at.Now+earlyFor {
		t.Errorf("it looks again in %d ms", (next-d.at.Now)/1e6)
	}
	d.later(earlyFor)
	var lost []Series
	for _, r := range d.o[2].Tick(d.at) {
		lost = append(lost, r.Forgotten...)
	}
	if len(lost) != 1 || d.o[2].Stats().LostDebt != 7 || len(d.o[2].early) > 0 {
		t.Errorf("%+v, %+v; %d reports wait", lost, d.o[2].Stats(), len(d.o[2].early))
	}
}
