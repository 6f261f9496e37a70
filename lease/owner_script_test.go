package lease

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"headgate/limiter"
)

// deedRights may grant everything for so long.
type deedRights struct{ lease int64 }

func (r *deedRights) Left(int64, uint32) int64      { return r.lease }
func (r *deedRights) Lease(int64, uint64) int64     { return r.lease }
func (r *deedRights) Started(int64, uint64, uint32) {}

// oneSize says the same for everybody.
type oneSize struct {
	share                float64
	depth, grant, refuse int64
	stingy               bool // no recall
}

func (s *oneSize) Size(v *Sight, _ int) (share uint32, depth, grant, refuse int64) {
	return uint32(s.share * ShareOne), s.depth, s.grant, s.refuse
}

func (s *oneSize) Recall(*Sight, int, int64) bool { return !s.stingy }

// deed plays a transcript: lines that begin with "> " are what happens to owners, the others what they
// say to that. The word before the first of a line's fields names what happens; see its methods.
type deed struct {
	owners   map[uint64]*Owner
	rights   map[uint64]*deedRights
	sizer    *oneSize
	o        *Owner
	at       Instant
	request  Request
	seq      map[[2]uint64]uint64
	asks     uint64
	handoffs []*Handoff
	revision uint64
	out      strings.Builder
}

// deedLimit is the limit of a key by its name.
func (x *deed) limit(name string) limiter.Limit {
	l := limiter.Limit{Rate: limiter.Rate{Count: 10, Per: 1e9}, Burst: 100, Revision: x.revision}
	switch {
	case strings.HasPrefix(name, "slots"):
		l = limiter.Limit{Algorithm: limiter.Semaphore, Burst: 8, Revision: x.revision}
	case strings.HasPrefix(name, "window"):
		l = limiter.Limit{Algorithm: limiter.FixedWindow, Rate: limiter.Rate{Count: 100, Per: 10e9}, Revision: x.revision}
	case strings.HasPrefix(name, "day"):
		l = limiter.Limit{Rate: limiter.Rate{Count: 6400, Per: 86400e9}, Burst: 6400, Revision: x.revision}
	case strings.HasPrefix(name, "sliding"):
		l = limiter.Limit{Algorithm: limiter.SlidingWindow, Rate: limiter.Rate{Count: 100, Per: 10e9}, Revision: x.revision}
	}
	if x.revision > 0 && l.Algorithm == limiter.GCRA && !l.Durable() {
		l.Burst, l.Rate.Count = 50, 5
	}
	return l
}

func (x *deed) bucket(s string) Bucket {
	tenant, limit, _ := strings.Cut(s, "/")
	return Bucket{deedPlace(tenant), limiter.Key{Tenant: tenant, Limit: limit}}
}

// deedPlace is a partition by a home's first letter: a and b.
func deedPlace(home string) uint32 {
	if strings.HasPrefix(home, "b") {
		return 1
	}
	return 0
}

func (x *deed) own(id uint64) {
	if x.owners[id] == nil {
		x.rights[id] = &deedRights{lease: 1e9}
		x.owners[id] = NewOwner(OwnerConfig{Self: id, Rights: x.rights[id], Sizer: x.sizer, Wait: 1.07e9})
	}
	x.o = x.owners[id]
}

// view epoch=E members=1,2,3 owners=1,1: the current owner steps to it.
func (x *deed) view(m map[string]string) {
	v := &View{Epoch: uint64(number(m["epoch"])), Place: deedPlace}
	place := map[string]int32{"": -1}
	for i, id := range strings.Split(m["members"], ",") {
		v.Members = append(v.Members, Member{Name: "n" + id, Incarnation: uint64(number(id))})
		place[id] = int32(i)
	}
	for id := range strings.SplitSeq(m["owners"], ",") {
		v.Owners = append(v.Owners, place[id])
	}
	x.o.Step(x.at, v)
}

func (x *deed) report(m map[string]string) {
	r := Report{
		Bucket: x.bucket(m["of"]), Granter: x.o.cfg.Self, Series: uint64(number(m["series"])), Ack: uint64(number(m["ack"])),
		Returned: number(m["returned"]), Refunded: number(m["refunded"]), Debt: number(m["debt"]),
		Level: number(m["level"]), Demand: 1024 * number(m["demand"]), Cost: number(m["cost"]),
	}
	if g, ok := m["granter"]; ok {
		r.Granter = uint64(number(g))
	}
	_, r.Idle = m["idle"]
	_, r.Closed = m["closed"]
	x.request.Reports = append(x.request.Reports, r)
}

// ask of=a/tokens,a/slots cost=5,1 wait=50ms [peek] [debt] [shadow]: shadow is the first charge.
func (x *deed) ask(m map[string]string) {
	x.asks++
	a := Ask{ID: x.asks, Wait: nanos(m["wait"])}
	_, a.Peek = m["peek"]
	costs := strings.Split(m["cost"], ",")
	for i, of := range strings.Split(m["of"], ",") {
		c := AskCharge{Bucket: x.bucket(of), Cost: number(costs[i])}
		c.Limit = x.limit(c.Key.Limit)
		if _, ok := m["debt"]; ok {
			c.Oversize = limiter.Debt
		}
		_, c.Shadow = m["shadow"]
		c.Shadow = c.Shadow && i == 0
		a.Charges = append(a.Charges, c)
	}
	x.request.Asks = append(x.request.Asks, a)
}

func (x *deed) roll(m map[string]string) {
	x.request.Roll = &Roll{Epoch: uint64(number(m["epoch"]))}
	if of, ok := m["of"]; ok {
		b := x.bucket(of)
		x.request.Roll.Slots = []RolledSlots{{b, number(m["inuse"]), x.limit(b.Key.Limit)}}
	}
}

// send from=2 session=1 dropped=0 [epoch=] [again]: the request with all reports and asks before it.
func (x *deed) send(m map[string]string) {
	r := x.request
	x.request = Request{}
	r.Holder, r.Owner = uint64(number(m["from"])), x.o.cfg.Self
	pair := [2]uint64{r.Holder, r.Owner}
	if _, again := m["again"]; !again {
		x.seq[pair]++
	}
	r.Seq, r.Session, r.Dropped = x.seq[pair], uint64(number(m["session"])), uint64(number(m["dropped"]))
	if x.o.view != nil {
		r.Epoch = x.o.view.Epoch
	}
	if e, ok := m["epoch"]; ok {
		r.Epoch = uint64(number(e))
	}
	before := x.o.Stats()
	x.say(x.o.Handle(x.at, &r))
	if n := x.o.Stats().Rejected - before.Rejected; n > 0 {
		fmt.Fprintf(&x.out, "rejected %d\n", n)
	}
}

func deedKey(b *Bucket) string { return b.Key.Tenant + "/" + b.Key.Limit }

// say writes responses down.
func (x *deed) say(rs []*Response) {
	for _, r := range rs {
		fmt.Fprintf(&x.out, "to %d: session %d", r.Holder, r.Session)
		if r.Left > 0 {
			fmt.Fprintf(&x.out, ", left %dms", r.Left/1e6)
		}
		if r.RollTaken > 0 {
			fmt.Fprintf(&x.out, ", roll %d taken", r.RollTaken)
		}
		if r.RollWanted > 0 {
			fmt.Fprintf(&x.out, ", roll %d wanted", r.RollWanted)
		}
		x.out.WriteByte('\n')
		for i := range r.Leases {
			l := &r.Leases[i]
			fmt.Fprintf(&x.out, "  lease %s series %d number %d share %.3f depth %d granted %d", deedKey(&l.Bucket), l.Series, l.Number, float64(l.Share)/ShareOne, l.Depth, l.Granted)
			if l.Window > 0 {
				fmt.Fprintf(&x.out, " window %d", l.Window)
			}
			if l.Rolled {
				x.out.WriteString(" rolled")
			}
			x.out.WriteByte('\n')
		}
		for i := range r.Decisions {
			d := &r.Decisions[i]
			fmt.Fprintf(&x.out, "  ask %d: refused %d, good for %dms\n", d.ID, d.Refused, d.Left/1e6)
			for _, c := range d.Charges {
				fmt.Fprintf(&x.out, "    admitted %v, remaining %d, retry %s, series %d", c.Admitted, c.Remaining, deedTime(int64(c.RetryAfter)), c.Series)
				if c.Lent {
					x.out.WriteString(", lent")
				}
				x.out.WriteByte('\n')
			}
		}
		for i := range r.Refusals {
			f := &r.Refusals[i]
			fmt.Fprintf(&x.out, "  refuse %s cost %d for %dms, retry %s\n", deedKey(&f.Bucket), f.Cost, f.For/1e6, deedTime(f.RetryAfter))
		}
		for _, s := range r.Forgotten {
			fmt.Fprintf(&x.out, "  forgotten %d.%d\n", s.Granter, s.Number)
		}
	}
}

func deedTime(ns int64) string {
	if ns == int64(limiter.Never) {
		return "never"
	}
	return fmt.Sprintf("%dms", ns/1e6)
}

func (x *deed) handoff() {
	x.handoffs = x.o.HandOffs(x.at)
	for _, h := range x.handoffs {
		fmt.Fprintf(&x.out, "partition %d to %d in %d", h.Partition, h.To, h.Epoch)
		switch {
		case h.Nothing:
			x.out.WriteString(": nothing\n")
			continue
		case h.Floor == FloorNever:
			x.out.WriteString(", never empty\n")
		default:
			fmt.Fprintf(&x.out, ", empty %dms ago\n", h.Floor/1e6)
		}
		for i := range h.Buckets {
			b := &h.Buckets[i]
			fmt.Fprintf(&x.out, "  %s drawn %d\n", b.Key.Tenant+"/"+b.Key.Limit, b.Drawn)
			for _, s := range b.Series {
				fmt.Fprintf(&x.out, "    %d's %d.%d number %d share %.3f depth %d left %dms granted %d returned %d refunded %d debt %d\n",
					s.Holder, s.Granter, s.Series, s.Number, float64(s.Share)/ShareOne, s.Depth, s.Left/1e6, s.Granted, s.Returned, s.Refunded, s.Debt)
			}
		}
	}
}

func (x *deed) levels() {
	for _, l := range x.o.allLevels(x.at) {
		fmt.Fprintf(&x.out, "%s/%s level %d of %d, lent %.3f, outstanding %d\n", l.Key.Tenant, l.Key.Limit, l.Level, l.Limit.Capacity(), float64(l.Lent)/ShareOne, l.Outstanding)
	}
}

func (x *deed) play(line string) {
	words := strings.Fields(line)
	m := fields(words[1:])
	switch words[0] {
	case "as":
		x.own(uint64(number(words[1])))
	case "at":
		x.at = Instant{Now: 1e9 + nanos(words[1]), Wall: 1_700_000_000e9 + nanos(words[1])}
	case "size":
		*x.sizer = oneSize{depth: number(m["depth"]), grant: number(m["grant"]), refuse: nanos(m["refuse"])}
		x.sizer.share, _ = strconv.ParseFloat(m["share"], 64)
		_, x.sizer.stingy = m["stingy"]
	case "rights":
		x.rights[x.o.cfg.Self].lease = nanos(words[1])
	case "revision":
		x.revision = uint64(number(words[1]))
	case "view":
		x.view(m)
	case "report":
		x.report(m)
	case "ask":
		x.ask(m)
	case "roll":
		x.roll(m)
	case "send":
		x.send(m)
	case "tick":
		x.say(x.o.Tick(x.at))
	case "ticks": // once in KeepEvery; nobody hears of it
		for range number(words[1]) {
			x.at.Now, x.at.Wall = x.at.Now+int64(KeepEvery), x.at.Wall+int64(KeepEvery)
			x.o.Tick(x.at)
		}
	case "next":
		fmt.Fprintf(&x.out, "in %dms\n", (x.o.Next()-x.at.Now)/1e6)
	case "handoffs":
		x.handoff()
	case "accept":
		for _, h := range x.handoffs {
			fmt.Fprintf(&x.out, "accepted %v\n", x.o.Accept(x.at, h))
		}
	case "levels":
		x.levels()
	case "draws":
		for _, d := range x.o.Draws(x.at) {
			fmt.Fprintf(&x.out, "draw %d of %s: want %d, least %d, holding %d, debt %d\n", d.N, deedKey(&d.Bucket), d.Want, d.Least, d.Holding, d.Debt)
		}
	case "drawn":
		x.say(x.o.Drawn(x.at, Drawn{
			Bucket: x.bucket(m["of"]), N: uint64(number(m["n"])), Granted: number(m["granted"]), RetryAfter: nanos(m["retry"]),
			Level: number(m["level"]), Stale: uint64(number(m["stale"])),
		}))
	case "sweep":
		fmt.Fprintf(&x.out, "forgotten %d\n", x.o.Sweep(x.at, 1000))
	case "owing":
		fmt.Fprintln(&x.out, x.o.Owing())
	default:
		fmt.Fprintf(&x.out, "unknown %q\n", words[0])
	}
}

// TestOwnerTranscripts plays testdata/owner. With -update it writes what owners say now.
func TestOwnerTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/owner/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			x := &deed{owners: map[uint64]*Owner{}, rights: map[uint64]*deedRights{}, sizer: &oneSize{}, seq: map[[2]uint64]uint64{}}
			x.own(1)
			x.at = Instant{Now: 1e9, Wall: 1_700_000_000e9}
			for line := range strings.Lines(string(text)) {
				switch {
				case strings.HasPrefix(line, "> "):
					x.out.WriteString(line)
					x.play(line[2:])
				case strings.HasPrefix(line, "#"), line == "\n":
					x.out.WriteString(line)
				}
			}
			got := x.out.String()
			if *update {
				if err := os.WriteFile(f, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(text) {
				t.Errorf("says now:\n%s", got)
			}
		})
	}
}
