//go:build linux

package main_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"headgate/proxy/admin"
)

// TestKillAnyThenAnother: any node may be killed, and after it any other. What was committed
// stays, and requests to the living are answered. HEADGATE_SOAK says how long to go on (make soak).
func TestKillAnyThenAnother(t *testing.T) {
	heavy(t)
	g := newGroup(t, 3, systemPolicy(slowFake(t)))
	g.up()
	traffic := g.startLoad(40 * time.Millisecond)
	w := g.startWriters(4)

	until := time.Now()
	if s := os.Getenv("HEADGATE_SOAK"); s != "" {
		length, err := time.ParseDuration(s)
		if err != nil {
			t.Fatal(err)
		}
		until = until.Add(length)
	}

	victim := g.leader(g.members...)
	for round := 0; round < 3 || time.Now().Before(until); round++ {
		rest := g.others(victim)
		killed := time.Now()
		victim.end(syscall.SIGKILL)
		writes := g.writable(rest[round%2])
		g.awaitView(rest...)
		view := time.Since(killed)
		w.settle(rest)
		victim.up()
		g.awaitView(g.members...)
		t.Logf("round %d: %s killed; a change was taken after %s, the others' view is without it after %s", round, victim.name, seconds(writes), seconds(view))
		w.era.Add(1)
		if lead := g.leader(g.members...); round%2 == 0 { // then a follower, and then the leader again
			victim = g.others(lead, victim)[0]
		} else {
			victim = lead
		}
	}

	w.end()
	traffic.end()
	g.awaitSame(g.members...)
	for _, m := range g.members {
		w.read(m)
	}
	w.judge(t)
	t.Logf("%d requests answered, %d were in flight at a node that was killed; %s", traffic.answered.Load(), traffic.excused.Load(), w)
}

// TestWritersMissNothing: the model of what is committed finds a lost and an invented change.
func TestWritersMissNothing(t *testing.T) {
	t.Parallel()
	at := func(call, ret int64, do, object, value, got, seen string) porcupine.Operation {
		return porcupine.Operation{Call: call, Return: ret, Input: wrote{do, object, value}, Output: answer{got, seen}}
	}
	for name, c := range map[string]struct {
		history []porcupine.Operation
		ok      bool
	}{
		"seen":     {[]porcupine.Operation{at(1, 2, "set", "kill a", "x", "done", ""), at(3, 4, "read", "kill a", "", "done", "x")}, true},
		"lost":     {[]porcupine.Operation{at(1, 2, "set", "kill a", "x", "done", ""), at(3, 4, "read", "kill a", "", "done", "")}, false},
		"unknown":  {[]porcupine.Operation{at(1, math.MaxInt64, "set", "kill a", "x", "unknown", ""), at(3, 4, "read", "kill a", "", "done", "")}, true},
		"late":     {[]porcupine.Operation{at(1, math.MaxInt64, "set", "kill a", "x", "unknown", ""), at(3, 4, "read", "kill a", "", "done", ""), at(5, 6, "read", "kill a", "", "done", "x")}, true},
		"invented": {[]porcupine.Operation{at(3, 4, "read", "kill a", "", "done", "x")}, false},
		"came back": {[]porcupine.Operation{
			at(1, 2, "create", "key a", "", "done", ""), at(3, 4, "revoke", "key a", "", "done", ""), at(5, 6, "read", "key a", "", "done", "active"),
		}, false},
		"another's": {[]porcupine.Operation{at(1, 2, "set", "kill a", "x", "done", ""), at(3, 4, "read", "kill b", "", "done", "")}, true},
	} {
		if got := porcupine.CheckOperations(registers(), c.history); got != c.ok {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// wrote is a change, or a read, of one object: a kill switch, which holds the reason that it
// was thrown for, or "", or a key, which is "", active, or revoked for ever.
type wrote struct{ do, object, value string }

// answer is how it ended: done, exists, not_found or unknown; and what was read.
type answer struct{ got, seen string }

// registers is what the cluster promises: each object is a register, on its own.
func registers() porcupine.Model {
	return porcupine.Model{
		Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
			by := map[string][]porcupine.Operation{}
			for _, o := range history {
				object := o.Input.(wrote).object
				by[object] = append(by[object], o)
			}
			var out [][]porcupine.Operation
			for _, part := range by {
				out = append(out, part)
			}
			return out
		},
		Init: func() any { return "" },
		Step: func(state, input, output any) (bool, any) {
			s, in, out := state.(string), input.(wrote), output.(answer)
			unknown := out.got == "unknown" // whatever it found, it did what it then does
			switch in.do {
			case "read":
				return out.seen == s, s
			case "set":
				return unknown || out.got == "done", in.value
			case "clear":
				return unknown || (out.got == "done") == (s != ""), ""
			case "create":
				if s != "" {
					return unknown || out.got == "exists", s
				}
				return unknown || out.got == "done", "active"
			default: // revoke
				if s == "" {
					return unknown || out.got == "not_found", s
				}
				return unknown || out.got == "done", "revoked"
			}
		},
		DescribeOperation: func(input, output any) string { return fmt.Sprint(input, " ", output) },
	}
}

// writers change kill switches and keys through any node, and read what all of them changed.
type writers struct {
	g       *group
	stop    context.CancelFunc
	stopped sync.WaitGroup
	began   time.Time
	keys    atomic.Int64 // how many keys there may be
	era     atomic.Int64 // kill switches have names of it, so that no object has too long a history

	mu      sync.Mutex
	history []porcupine.Operation
	objects map[string]bool
	bad     []string
	counts  map[string]int
	done    time.Time // of the last change that was taken
}

const switches = 6 // that the writers throw in each era

func (g *group) startWriters(n int) *writers {
	ctx, cancel := context.WithCancel(g.t.Context())
	w := &writers{g: g, stop: cancel, began: time.Now(), objects: map[string]bool{}, counts: map[string]int{}}
	for i := range n {
		w.stopped.Go(func() { w.run(ctx, i) })
	}
	w.stopped.Go(func() { w.reader(ctx) })
	g.t.Cleanup(w.end)
	return w
}

func (w *writers) end() {
	w.stop()
	w.stopped.Wait()
}

func (w *writers) now() int64 { return int64(time.Since(w.began)) }

// some is a member that serves; nil if none does.
func (w *writers) some() *member {
	var up []*member
	for _, m := range w.g.members {
		if m.serving.Load() {
			up = append(up, m)
		}
	}
	if len(up) == 0 {
		return nil
	}
	return up[rand.IntN(len(up))]
}

// run makes changes, at most one at a time and some twenty a second.
func (w *writers) run(ctx context.Context, id int) {
	t := time.NewTicker(50 * time.Millisecond)
	defer t.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if m := w.some(); m != nil {
			w.change(m, fmt.Sprintf("%d-%d", id, n))
		}
	}
}

func (w *writers) change(m *member, value string) {
	var in wrote
	var method, path string
	var body any
	switch kill, key := fmt.Sprintf("ghost-%d-%d", w.era.Load(), rand.IntN(switches)), fmt.Sprintf("k-%d", max(w.keys.Load()-int64(rand.IntN(4)), 0)); rand.IntN(6) {
	case 0, 1:
		in, method, path, body = wrote{"set", "kill " + kill, value}, http.MethodPut, "kill/tenant/"+kill, map[string]string{"reason": value}
	case 2:
		in, method, path = wrote{"clear", "kill " + kill, ""}, http.MethodDelete, "kill/tenant/"+kill
	case 3:
		key = fmt.Sprintf("k-%d", w.keys.Add(1))
		in, method, path, body = wrote{"create", "key " + key, ""}, http.MethodPost, "keys", admin.NewKey{Tenant: "dev", ID: key}
	case 4:
		in, method, path, body = wrote{"create", "key " + key, ""}, http.MethodPost, "keys", admin.NewKey{Tenant: "dev", ID: key}
	default:
		in, method, path = wrote{"revoke", "key " + key, ""}, http.MethodDelete, "keys/"+key
	}
	call := w.now()
	code, apiErr, err := w.g.call(m, method, path, body, nil)
	w.record(m, in, call, code, apiErr, err)
}

// record notes how a change ended. What was refused without a quorum, or did not reach a node,
// did not happen: should it show, it was never asked for.
func (w *writers) record(m *member, in wrote, call int64, code int, apiErr admin.Code, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.objects[in.object] = true
	op := porcupine.Operation{Input: in, Call: call, Return: w.now()}
	got := string(apiErr)
	switch {
	case err != nil && nothingSent(err):
		w.counts["unsent"]++
		return
	case err != nil || apiErr == admin.Unknown:
		got, op.Return = "unknown", math.MaxInt64
	case code == http.StatusOK:
		got, w.done = "done", time.Now()
	case apiErr == admin.NoQuorum:
		w.counts["no quorum"]++
		return
	case apiErr != admin.Exists && apiErr != admin.NotFound:
		w.bad = append(w.bad, fmt.Sprintf("%s %s through %s: status %d %s", in.do, in.object, m.name, code, apiErr))
		return
	}
	op.Output = answer{got: got}
	w.counts[got]++
	w.history = append(w.history, op)
}

// reader reads everything through some node, again and again.
func (w *writers) reader(ctx context.Context) {
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if m := w.some(); m != nil {
			w.read(m)
		}
	}
}

// read reads all objects through a node, and is linearizable: it first makes a change, so that
// what it then finds there was in force after it began. It says whether it succeeded.
func (w *writers) read(m *member) bool {
	w.mu.Lock()
	objects := make([]string, 0, len(w.objects))
	for o := range w.objects {
		objects = append(objects, o)
	}
	w.mu.Unlock()
	var mark admin.Done
	var kills []admin.Kill
	var keys []admin.Key
	call := w.now()
	if code, _, err := w.g.call(m, http.MethodPut, "kill/model/marker", map[string]string{"reason": fmt.Sprint(call)}, &mark); code != http.StatusOK || err != nil {
		return false
	}
	for info := (admin.LedgerInfo{}); info.Index < mark.Index; {
		if code, _, err := w.g.call(m, http.MethodGet, "ledger", nil, &info); code != http.StatusOK || err != nil {
			return false
		}
	}
	code1, _, err1 := w.g.call(m, http.MethodGet, "kill", nil, &kills)
	end1 := w.now()
	code2, _, err2 := w.g.call(m, http.MethodGet, "keys", nil, &keys)
	end2 := w.now()
	if code1 != http.StatusOK || code2 != http.StatusOK || err1 != nil || err2 != nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range objects {
		seen, end := "", end1
		name, isKill := strings.CutPrefix(o, "kill ")
		if isKill {
			if i := slices.IndexFunc(kills, func(k admin.Kill) bool { return k.Kind == "tenant" && k.Name == name }); i >= 0 {
				seen = kills[i].Reason
			}
		} else {
			name, end = strings.TrimPrefix(o, "key "), end2
			if i := slices.IndexFunc(keys, func(k admin.Key) bool { return k.ID == name }); i >= 0 {
				seen = keys[i].Status
			}
		}
		w.history = append(w.history, porcupine.Operation{Input: wrote{"read", o, ""}, Output: answer{"done", seen}, Call: call, Return: end})
	}
	w.counts["reads"]++
	return true
}

// settle waits until the living have taken a change of the writers' since now.
func (w *writers) settle(living []*member) {
	w.g.t.Helper()
	since := time.Now()
	eventually(w.g.t, "the writers to go on", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.done.After(since)
	})
	for _, m := range living {
		eventually(w.g.t, "a read through "+m.name, func() bool { return w.read(m) })
	}
}

// judge fails the test if what was read can't be what was written.
func (w *writers) judge(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.bad) > 0 {
		t.Errorf("%d calls ended in no way that a change may end in; the first: %s", len(w.bad), strings.Join(w.bad[:min(5, len(w.bad))], "; "))
	}
	model := registers()
	for _, part := range model.Partition(w.history) {
		if r := porcupine.CheckOperationsTimeout(model, part, 20*time.Second); r != porcupine.Ok {
			slices.SortFunc(part, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
			var b strings.Builder
			for _, o := range part {
				if in := o.Input.(wrote); in.do != "read" || b.Len() < 4000 {
					fmt.Fprintf(&b, "%8.3f - %8.3f %s %v\n", float64(o.Call)/1e9, float64(o.Return)/1e9, in.do, o.Output)
				}
			}
			t.Errorf("%s: what was read is not what was written (%s):\n%s", part[0].Input.(wrote).object, r, b.String())
		}
	}
	if w.counts["done"] == 0 || w.counts["reads"] == 0 {
		t.Errorf("nothing was changed or read: %v", w.counts)
	}
}

func (w *writers) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return fmt.Sprintf("changes by how they ended: %v, of %d objects", w.counts, len(w.objects))
}
