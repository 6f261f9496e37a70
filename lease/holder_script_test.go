package lease

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"headgate/limiter"
)

var update = flag.Bool("update", false, "write testdata anew")

// script plays a transcript: lines that begin with "> " are what happens to a holder, the others what
// it says to that.
type script struct {
	*stand
	seq      map[uint64]uint64 // of the last request to each owner
	response Response          // what the next answer or push will carry
	taken    [][]limiter.Charge
	missing  []uint32
	asks     map[uint64]int // by ID: which of taken
	sent     map[uint64]int64
	out      strings.Builder
}

// fields reads k=v words.
func fields(words []string) map[string]string {
	m := map[string]string{}
	for _, w := range words {
		k, v, _ := strings.Cut(w, "=")
		m[k] = v
	}
	return m
}

func number(s string) int64 {
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}

func nanos(s string) int64 {
	if s == "never" {
		return int64(limiter.Never)
	}
	d, _ := time.ParseDuration(s)
	return int64(d)
}

// limitsOf are the limits of a script, by the name of the key that they are used with.
func limitOf(name string) *limiter.Limit {
	switch {
	case strings.HasPrefix(name, "slots"):
		return slots8
	case strings.HasPrefix(name, "day"):
		return daily
	}
	return perSec
}

// bucketOf reads TENANT/LIMIT.
func bucketOf(s string) Bucket {
	tenant, limit, _ := strings.Cut(s, "/")
	k := limiter.Key{Tenant: tenant, Limit: limit}
	return Bucket{zApart(Home(&k, false)), k}
}

func (x *script) lease(m map[string]string) {
	l := Lease{Bucket: bucketOf(m["of"]), Series: uint64(number(m["series"])), Number: uint64(number(m["number"])), Depth: number(m["depth"]), Granted: number(m["granted"])}
	share, _ := strconv.ParseFloat(m["share"], 64)
	l.Share = uint32(share * ShareOne)
	l.Limit = *limitOf(l.Key.Limit)
	if w, ok := m["window"]; ok {
		l.Window = x.clock().Wall/int64(l.Limit.Rate.Per) + number(w)
	}
	_, l.Rolled = m["rolled"]
	x.response.Leases = append(x.response.Leases, l)
}

func (x *script) send(owner uint64, answers uint64, m map[string]string) {
	r := x.response
	x.response = Response{}
	r.Owner, r.Holder, r.Answers, r.Epoch, r.Session = owner, self, answers, x.view.Epoch, uint64(number(m["session"]))
	if answers != 0 {
		r.Left = 1e9
	}
	if e, ok := m["epoch"]; ok {
		r.Epoch = uint64(number(e))
	}
	if l, ok := m["left"]; ok {
		r.Left = nanos(l)
	}
	r.RollTaken = uint64(number(m["roll"]))
	before := x.h.Stats()
	x.h.Handle(&r)
	after := x.h.Stats()
	if n := after.Rejected - before.Rejected; n > 0 {
		fmt.Fprintf(&x.out, "rejected %d\n", n)
	}
	if n := after.Discarded - before.Discarded; n > 0 {
		fmt.Fprintf(&x.out, "discarded %d\n", n)
	}
	for _, d := range r.Decisions {
		i := x.asks[d.ID]
		cs := x.taken[i]
		ds := make([]limiter.Decision, len(cs))
		refused, ok := x.h.Decided(cs, x.missing[i], &d, x.sent[d.ID], ds)
		fmt.Fprintf(&x.out, "decided %d: refused %d, in time %v\n", i+1, refused, ok)
	}
}

func (x *script) request(owner uint64, asks []Ask) {
	q := x.h.Request(owner, asks)
	if q == nil {
		x.out.WriteString("nobody\n")
		return
	}
	x.seq[owner] = q.Seq
	fmt.Fprintf(&x.out, "request %d to %d: epoch %d, session %d, dropped %d\n", q.Seq, owner, q.Epoch, q.Session, q.Dropped)
	for _, r := range q.Reports {
		fmt.Fprintf(&x.out, "  report %s/%s series %d/%d: ack %d, returned %d, refunded %d, debt %d, level %d", r.Key.Tenant, r.Key.Limit, r.Granter, r.Series, r.Ack, r.Returned, r.Refunded, r.Debt, r.Level)
		if r.Idle {
			x.out.WriteString(", idle")
		}
		if r.Closed {
			x.out.WriteString(", closed")
		}
		x.out.WriteString("\n")
	}
	for _, a := range q.Asks {
		for _, c := range a.Charges {
			fmt.Fprintf(&x.out, "  ask %d: %s/%s cost %d\n", a.ID, c.Key.Tenant, c.Key.Limit, c.Cost)
		}
	}
	if q.Roll != nil {
		fmt.Fprintf(&x.out, "  roll of epoch %d\n", q.Roll.Epoch)
		for _, s := range q.Roll.Slots {
			fmt.Fprintf(&x.out, "    %s/%s: %d in use\n", s.Key.Tenant, s.Key.Limit, s.InUse)
		}
	}
}

func (x *script) takes(words []string) {
	var cs []limiter.Charge
	for i := 0; i+1 < len(words); i += 2 {
		b := bucketOf(words[i])
		cs = append(cs, limiter.Charge{Key: b.Key, Limit: limitOf(b.Key.Limit), Cost: number(words[i+1])})
	}
	ds := make([]limiter.Decision, len(cs))
	refused, missing := x.h.Take(cs, ds)
	x.taken, x.missing = append(x.taken, cs), append(x.missing, missing)
	fmt.Fprintf(&x.out, "take %d:", len(x.taken))
	for i, d := range ds {
		switch {
		case missing>>i&1 == 1:
			x.out.WriteString(" ask")
		case !d.Admitted:
			fmt.Fprintf(&x.out, " refused for %v by %v", d.RetryAfter, d.By)
		case refused >= 0:
			x.out.WriteString(" undone")
		default:
			fmt.Fprintf(&x.out, " taken, %d remain", d.Remaining)
		}
	}
	x.out.WriteString("\n")
}

func (x *script) play(line string) {
	words := strings.Fields(line)
	owner := func() uint64 { return uint64(number(words[1])) }
	at := func() []limiter.Charge { return x.taken[number(words[1])-1] }
	switch words[0] {
	case "step":
		var owners []uint64
		for _, w := range words[2:] {
			owners = append(owners, uint64(number(w)))
		}
		x.step(owner(), owners...)
	case "pass":
		x.pass(time.Duration(nanos(words[1])))
	case "stopped": // between the two readings of the next take
		x.countdown, x.between = 2, func() { x.pass(time.Duration(nanos(words[1]))) }
	case "request":
		x.request(owner(), nil)
	case "lease":
		x.lease(fields(words[1:]))
	case "refuse":
		m := fields(words[1:])
		x.response.Refusals = append(x.response.Refusals, Refusal{Bucket: bucketOf(m["of"]), Cost: number(m["cost"]), For: nanos(m["for"]), RetryAfter: nanos(m["retry"])})
	case "forgotten":
		x.response.Forgotten = append(x.response.Forgotten, Series{uint64(number(words[1])), uint64(number(words[2]))})
	case "decision":
		m := fields(words[1:])
		d := AskDecision{ID: uint64(number(m["ask"])), Refused: int(number(m["refused"])), Left: nanos(m["left"])}
		for range x.taken[x.asks[d.ID]] {
			_, lent := m["lent"]
			d.Charges = append(d.Charges, ChargeDecision{Decision: limiter.Decision{Admitted: d.Refused == -1}, Series: uint64(number(m["series"])), Lent: lent})
		}
		x.response.Decisions = append(x.response.Decisions, d)
	case "answer":
		x.send(owner(), x.seq[owner()], fields(words[2:]))
	case "push":
		x.send(owner(), 0, fields(words[2:]))
	case "take":
		x.takes(words[1:])
	case "ask":
		cs, i := at(), int(number(words[1]))-1
		a := x.h.Ask(cs, x.missing[i], 0, false)
		m, _ := x.h.Owner(&cs[0])
		x.asks[a.ID], x.sent[a.ID] = i, x.now.Load()
		x.request(m.Incarnation, []Ask{a})
	case "settle":
		var actual []int64
		for _, w := range words[2:] {
			actual = append(actual, number(w))
		}
		x.h.Settle(at(), actual, make([]limiter.Decision, len(actual)))
	case "cancel":
		x.h.Cancel(at(), 1<<len(at())-1)
	case "drain":
		x.h.Drain()
	case "levels":
		for _, l := range x.h.Levels(words[1]) {
			fmt.Fprintf(&x.out, "%s series %d/%d: level %d of %d, in use %d, left %v, dead %v\n", l.Key.Limit, l.Granter, l.Series, l.Level, l.Depth, l.InUse, max(0, time.Duration(l.Left)), l.Dead)
		}
		if st := x.h.Stats(); st.Void > 0 {
			fmt.Fprintf(&x.out, "%d void\n", st.Void)
		}
	default:
		x.t.Fatalf("no such command: %s", line)
	}
}

func TestHolderTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/holder/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			x := &script{stand: newStand(t, 0), seq: map[uint64]uint64{}, asks: map[uint64]int{}, sent: map[uint64]int64{}}
			for line := range strings.SplitSeq(string(want), "\n") {
				switch {
				case strings.HasPrefix(line, "#"), line == "" && x.out.Len() > 0 && !strings.HasSuffix(x.out.String(), "\n\n"):
					x.out.WriteString(line + "\n")
				case strings.HasPrefix(line, "> "):
					x.out.WriteString(line + "\n")
					x.play(line[2:])
				}
			}
			got := strings.TrimRight(x.out.String(), "\n") + "\n"
			if *update {
				if err := os.WriteFile(f, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != string(want) {
				t.Errorf("%s differs; run with -update and read the difference:\n%s", f, got)
			}
		})
	}
}
