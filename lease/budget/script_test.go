package budget

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"headgate/limiter"
)

var update = flag.Bool("update", false, "write testdata anew")

// script plays a transcript: lines that begin with "> " are what happens to an account, the others what it says to that.
type script struct {
	t        *testing.T
	account  *account
	ledger   *modelLedger
	otherN   uint64
	at       instant
	asks     []*ask
	taken    []opened
	down     error
	override bool
	out      strings.Builder
}

func (x *script) say(format string, args ...any) { fmt.Fprintf(&x.out, format+"\n", args...) }

// words reads k=v words, and the others by their place.
func words(line string) (m map[string]string) {
	m = map[string]string{}
	for i, w := range strings.Fields(line) {
		if k, v, ok := strings.Cut(w, "="); ok {
			m[k] = v
		} else {
			m[strconv.Itoa(i)] = w
		}
	}
	return m
}

func (x *script) number(s string) int64 {
	if s == "" {
		return 0
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		x.t.Fatal(err)
	}
	return n
}

func (x *script) span(s string) int64 {
	d, err := time.ParseDuration(s)
	if err != nil {
		x.t.Fatal(err)
	}
	return int64(d)
}

func (x *script) open(m map[string]string) {
	x.at = instant{int64(time.Hour), int64(1000 * time.Hour)}
	k := Key{Key: limiter.Key{Tenant: "acme", Limit: "month"}}
	if m["ends"] != "" {
		k.Start, k.End = x.at.wall, x.at.wall+x.span(m["ends"])
	}
	a := newAccount(k, &Terms{Amount: x.number(m["amount"]), Revision: 1, Alerts: []int{50, 80}}, x.at)
	a.spare = x.number(m["emergency"])
	x.account, x.asks, x.taken, x.down, x.override = &a, nil, nil, nil, false
	x.ledger, x.otherN = newModelLedger(), 0
}

func (x *script) take(m map[string]string) {
	cost := x.number(m["1"])
	if part, ok := x.account.hold(cost, false, false); ok {
		x.hold(cost, part)
		return
	}
	q := &ask{cost: cost, least: cost}
	if m["least"] != "" {
		q.least = x.number(m["least"])
	}
	x.asks = append(x.asks, q)
	x.say("ask %d", len(x.asks))
	x.account.join(x.at, q, outlook{x.down, x.override})
}

func (x *script) hold(cost, part int64) {
	x.account.admit(x.at, cost)
	x.taken = append(x.taken, opened{cost, part})
	x.say("taken %d: %d, %d of it from aside", len(x.taken), cost, part)
}

// decided tells of the asks that the account decided, and has the requests go on.
func (x *script) decided() {
	for len(x.account.decided) > 0 {
		q := x.account.decided[0]
		x.account.decided = x.account.decided[1:]
		n := slices.Index(x.asks, q) + 1
		if !q.ready {
			x.say("ask %d: %v", n, q.refused)
			continue
		}
		x.say("ask %d: ready", n)
		emergency := q.emergency > 0
		x.account.leave(q)
		part, ok := x.account.hold(q.granted, true, emergency)
		if !ok {
			x.t.Fatalf("ask %d cannot be held", n)
		}
		x.hold(q.granted, part)
		x.account.serve()
	}
}

func (x *script) step() {
	d, what := x.account.step(x.at, 7)
	if what == nothing || what == forget {
		due, next := x.account.next(x.at)
		if due == never || what == forget {
			x.say("%s", dutyNames[what])
		} else {
			x.say("%s; next %s in %v", dutyNames[what], dutyNames[next], time.Duration(due-x.at.mono))
		}
		return
	}
	x.say("%s: draw %d of revision %d: spent %d, holding %d, want %d, need %d, least %d, final %v",
		dutyNames[what], d.N, d.Terms.Revision, d.Spent, d.Holding, d.Want, d.Need, d.Least, d.Final)
}

var dutyNames = map[duty]string{
	nothing: "nothing", retry: "retry", help: "help", giveBack: "give back", ahead: "ahead", report: "report", idle: "idle", finish: "finish", forget: "forget",
}

// answer has the ledger answer the draw under way; what it recalls is heard before.
func (x *script) answer() {
	x.ledger.now = x.at.wall
	wanted := false
	x.ledger.recalled = func(Key) { wanted = true }
	res, err := x.ledger.draw(x.account.draw)
	if wanted {
		x.account.recall(x.at)
	}
	if err != nil {
		x.say("answer: %v", err)
	} else {
		x.say("answer: granted %d; spent %d, others %d, free %d, closed %v", res.Granted, res.Spent, res.Others, res.Free, res.Closed)
	}
	x.account.answered(x.at, res, err, outlook{x.down, x.override})
}

// other is another holder's draw: it has spent, holds, and is granted what it wants or what there is.
func (x *script) other(m map[string]string) {
	x.otherN++
	x.ledger.now = x.at.wall
	x.ledger.recalled = nil
	want := x.number(m["want"])
	res, err := x.ledger.draw(Draw{
		Key: x.account.key, Terms: x.account.terms, Holder: 8, N: x.otherN, Spent: x.number(m["spent"]), Holding: x.number(m["holding"]),
		Want: want, Need: want, Least: min(want, 1),
	})
	if err != nil {
		x.t.Fatal(err)
	}
	x.say("granted elsewhere: %d", res.Granted)
}

func (x *script) play(line string) {
	m := words(line)
	switch m["0"] {
	case "account":
		x.open(m)
	case "take":
		x.take(m)
	case "settle":
		o := x.taken[x.number(m["1"])-1]
		x.account.settle(o.granted, o.part, x.number(m["2"]))
	case "wait":
		d := x.span(m["1"])
		x.at.mono += d
		x.at.wall += d
	case "step":
		x.step()
	case "answer":
		x.answer()
	case "other":
		x.other(m)
	case "release":
		h := x.ledger.accounts[x.account.key].holders[7]
		h.closed, h.out = true, 0
	case "overtaken":
		x.ledger.accounts[x.account.key].holders[7].n = uint64(x.number(m["n"]))
	case "forgotten": // the process has, the ledger has not
		x.account.n = 0
		x.ledger.accounts[x.account.key] = &modelAccount{terms: x.account.terms, spent: x.number(m["spent"]), holders: map[uint64]*modelHolder{
			7: {n: uint64(x.number(m["n"])), spent: x.number(m["spent"])},
		}}
	case "member":
		x.ledger.denied[7] = m["1"] == "no"
	case "lost":
		x.account.answered(x.at, Drawn{}, errLost, outlook{x.down, x.override})
	case "recall":
		x.account.recall(x.at)
	case "terms":
		terms := *x.account.terms
		terms.Amount, terms.Revision = x.number(m["amount"]), terms.Revision+1
		x.account.touch(&Charge{Terms: &terms, Emergency: x.account.spare})
	case "down":
		x.down, x.override = errors.New("nobody leads"), m["override"] == "true"
	case "up":
		x.down = nil
	case "stop":
		x.account.stop()
	case "look":
		a := x.account
		x.say("available %d, open %d in %d, aside %d, spent %d, told %d, waiting %d", a.avail(), a.open, a.opens, a.aside, a.spent, a.told, len(a.line))
	default:
		x.t.Fatalf("no event %q", line)
	}
	x.decided()
}

func TestAccountTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			x := &script{t: t}
			for line := range strings.Lines(string(want)) {
				line = strings.TrimSuffix(line, "\n")
				event, ok := strings.CutPrefix(line, "> ")
				if !ok && !strings.HasPrefix(line, "#") && line != "" {
					continue
				}
				x.say("%s", line)
				if ok {
					x.play(event)
				}
			}
			if *update {
				if err := os.WriteFile(file, []byte(x.out.String()), 0o600); err != nil {
					t.Fatal(err)
				}
				return
			}
			if x.out.String() != string(want) {
				t.Errorf("it went otherwise:\n%s", x.out.String())
			}
		})
	}
}
