package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"headgate/cluster/ledger/ledgerpb"
	"headgate/proxy/admin"
)

func loner(t *testing.T, dir string) *alone {
	t.Helper()
	n, err := openNotes(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return &alone{notes: n}
}

var operator = admin.Actor{Name: "ann", Role: admin.RoleOperate}

func TestNodeKillsExpire(t *testing.T) {
	a, now := loner(t, t.TempDir()), time.Unix(1000, 0)
	throw := func(name string, d time.Duration) {
		t.Helper()
		if err := a.set(operator, admin.KillSwitch{Kind: "tenant", Name: name, On: true, Reason: "r", For: d}, now); err != nil {
			t.Fatal(err)
		}
	}
	throw("short", time.Minute)
	throw("long", time.Hour)
	if kills, next := a.live(now.Add(time.Minute - 1)); len(kills) != 2 || !next.Equal(now.Add(time.Minute)) {
		t.Errorf("%v, next %v", kills, next)
	}
	kills, next := a.live(now.Add(time.Minute))
	want := admin.Kill{Kind: "tenant", Name: "long", Reason: "r", Actor: "ann", At: now, Expires: now.Add(time.Hour)}
	if len(kills) != 1 || kills[0] != want || !next.Equal(want.Expires) {
		t.Errorf("%+v, next %v", kills, next)
	}
	if err := a.set(operator, admin.KillSwitch{Kind: "tenant", Name: "long"}, now); err != nil {
		t.Error(err)
	}
	if kills, next := a.live(now); len(kills) != 0 || !next.IsZero() {
		t.Errorf("after its release: %v, %v", kills, next)
	}
	var refused *admin.Error
	if err := a.set(operator, admin.KillSwitch{Kind: "tenant", Name: "long"}, now); !errors.As(err, &refused) || refused.Code != admin.NotFound {
		t.Errorf("released twice: %v", err)
	}
}

func TestNodeKillsAreBounded(t *testing.T) {
	a, now := loner(t, t.TempDir()), time.Unix(1000, 0)
	a.kills = map[target]admin.Kill{}
	for i := range maxNodeKills {
		name := fmt.Sprint("t", i)
		a.kills[target{"tenant", name}] = admin.Kill{Kind: "tenant", Name: name, Expires: now.Add(time.Hour)}
	}
	k := admin.KillSwitch{Kind: "tenant", Name: "one more", On: true, For: time.Hour}
	if err := a.set(operator, k, now); err == nil {
		t.Error("one more was thrown")
	}
	k.Name, k.For = "t7", 2*time.Hour
	if err := a.set(operator, k, now); err != nil {
		t.Errorf("one that is thrown already can't be extended: %v", err)
	}
	if a.notes.waiting = make([]note, maxNotes); a.set(operator, k, now) == nil || a.overrule(operator, admin.OverrideChange{}, now) == nil {
		t.Error("done without a note")
	}
}

func TestOverrideExpires(t *testing.T) {
	a, now := loner(t, t.TempDir()), time.Unix(1000, 0)
	if err := a.overrule(operator, admin.OverrideChange{Unavailable: "deny", For: time.Minute}, now); err != nil {
		t.Fatal(err)
	}
	if o := a.current(now.Add(time.Minute - 1)); o == nil || *o != (admin.Override{Unavailable: "deny", Actor: "ann", Expires: now.Add(time.Minute)}) {
		t.Errorf("%+v", o)
	}
	if o := a.current(now.Add(time.Minute)); o != nil {
		t.Errorf("expired: %+v", o)
	}
	_ = a.overrule(operator, admin.OverrideChange{Unavailable: "deny", For: time.Minute}, now)
	if err := a.overrule(operator, admin.OverrideChange{}, now); err != nil || a.current(now) != nil {
		t.Errorf("ended: %v, %+v", err, a.current(now))
	}
}

// TestNothingIsDoneWithoutItsNote on disk.
func TestNothingIsDoneWithoutItsNote(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gone")
	a, now := &alone{notes: &notes{path: filepath.Join(dir, notesFile)}}, time.Unix(1000, 0)
	if err := a.set(operator, admin.KillSwitch{Kind: "global", On: true, For: time.Hour}, now); err == nil {
		t.Error("a kill switch was thrown")
	}
	if err := a.overrule(operator, admin.OverrideChange{Unavailable: "deny", For: time.Hour}, now); err == nil {
		t.Error("an override was set")
	}
	if kills, _ := a.live(now); len(kills) != 0 || a.current(now) != nil || len(a.notes.waiting) != 0 {
		t.Errorf("%v, %v, %v", kills, a.current(now), a.notes.waiting)
	}
}

// told stands for the ledger: it does each id once, and may lose its answers.
type told struct {
	done []*ledgerpb.Note
	ids  map[string]bool
	lose int // answers
}

func (l *told) propose(_ context.Context, c *ledgerpb.Command) error {
	if !l.ids[string(c.GetId())] {
		l.ids[string(c.GetId())] = true
		l.done = append(l.done, c.GetNote())
	}
	if l.lose > 0 {
		l.lose--
		return errors.New("the answer was lost")
	}
	return nil
}

// TestNotesAreToldOnce: also after a restart, a torn line, and an answer that was lost.
func TestNotesAreToldOnce(t *testing.T) {
	dir, now := t.TempDir(), time.Unix(1000, 0)
	a := loner(t, dir)
	long := strings.Repeat("<", 200_000) // what a scanner of lines would choke on
	for _, reason := range []string{"first", long, "last"} {
		if err := a.set(operator, admin.KillSwitch{Kind: "key", Name: "k", On: true, Reason: reason, For: time.Hour}, now); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, notesFile)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(text), "\n")
	if err := os.WriteFile(path, []byte(lines[0]+lines[0][:20]+"\n"+lines[1]+lines[2]+lines[2][:30]), 0o600); err != nil {
		t.Fatal(err)
	}
	l := &told{ids: map[string]bool{}, lose: 1}
	a = loner(t, dir) // the process starts anew
	if err := a.notes.tell(t.Context(), "n1", l.propose); err == nil {
		t.Error("an answer was lost and nobody noticed")
	}
	a = loner(t, dir) // and again: what was told and not answered is told again, under its id
	for range 2 {
		if err := a.notes.tell(t.Context(), "n1", l.propose); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.done) != 3 {
		t.Fatalf("%d notes were told", len(l.done))
	}
	for i, reason := range []string{"first", long, "last"} {
		want := "key k for 1h0m0s: " + reason
		if n := l.done[i]; n.GetDetail() != want || n.GetAction() != "node.kill" || n.GetNode() != "n1" || n.GetUnixNano() != now.UnixNano() {
			t.Errorf("note %d: %.200s", i, n)
		}
	}
	if again := loner(t, dir); len(again.notes.waiting) != 0 {
		t.Errorf("still %d wait", len(again.notes.waiting))
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
