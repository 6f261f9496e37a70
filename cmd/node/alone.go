package node

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"headgate/cluster/ledger/ledgerpb"
	"headgate/proxy/admin"
)

// alone is what an operator had this one node do, with no quorum: an override of its limits'
// `unavailable`, and kill switches of its own. Both expire, and end with the process. Each is
// noted in a file first, and in the ledger's audit log as soon as there is a quorum.
type alone struct {
	changing sync.Mutex // one change at a time: the disk is waited for under it, never under mu
	mu       sync.Mutex
	override *admin.Override
	kills    map[target]admin.Kill
	notes    *notes
}

// target is what a kill switch is for.
type target struct{ kind, name string }

// maxNodeKills bounds a node's own kill switches.
const maxNodeKills = 1024

// live are the node's own kill switches that have not expired, and when the next one does.
func (a *alone) live(now time.Time) (kills []admin.Kill, next time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for t, k := range a.kills {
		if !now.Before(k.Expires) {
			delete(a.kills, t)
			continue
		}
		kills = append(kills, k)
		if next.IsZero() || k.Expires.Before(next) {
			next = k.Expires
		}
	}
	return kills, next
}

// set throws or releases a kill switch of this node.
func (a *alone) set(by admin.Actor, k admin.KillSwitch, now time.Time) error {
	a.changing.Lock()
	defer a.changing.Unlock()
	t := target{k.Kind, k.Name}
	a.mu.Lock()
	_, thrown := a.kills[t]
	count := len(a.kills)
	a.mu.Unlock()
	switch {
	case !k.On && !thrown:
		return admin.Errorf(admin.NotFound, "this node has no kill switch of its own for %s %s; headgate revive releases the cluster's", k.Kind, k.Name)
	case k.On && !thrown && count >= maxNodeKills:
		return admin.Errorf(admin.Invalid, "this node has %d kill switches of its own already; release some, or kill a tenant instead of its keys", maxNodeKills)
	}
	action := "node.revive"
	if k.On {
		action = "node.kill"
	}
	if err := a.notes.add(by, action, fmt.Sprintf("%s %s for %s: %s", k.Kind, k.Name, k.For, k.Reason), now); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !k.On {
		delete(a.kills, t)
		return nil
	}
	if a.kills == nil {
		a.kills = map[target]admin.Kill{}
	}
	a.kills[t] = admin.Kill{Kind: k.Kind, Name: k.Name, Reason: k.Reason, Actor: by.Name, At: now, Expires: now.Add(k.For)}
	return nil
}

// current is the override, nil where none is or it has expired.
func (a *alone) current(now time.Time) *admin.Override {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.override != nil && !now.Before(a.override.Expires) {
		a.override = nil
	}
	return a.override
}

// overrule sets the override, or ends it.
func (a *alone) overrule(by admin.Actor, o admin.OverrideChange, now time.Time) error {
	a.changing.Lock()
	defer a.changing.Unlock()
	what := "cleared"
	if o.Unavailable != "" {
		what = fmt.Sprintf("unavailable: %s for %s", o.Unavailable, o.For)
	}
	if err := a.notes.add(by, "node.override", what, now); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.override = nil
	if o.Unavailable != "" {
		a.override = &admin.Override{Unavailable: o.Unavailable, Actor: by.Name, Expires: now.Add(o.For)}
	}
	return nil
}

// notesFile in the data folder holds what the ledger's audit log has still to be told of what was
// done on this node, a JSON object a line.
const notesFile = "notes.jsonl"

// maxNotes bounds what waits for a quorum.
const maxNotes = 10_000

// note is one line of it.
type note struct {
	ID     []byte    `json:"id"` // of the command, so that it is noted once
	At     time.Time `json:"at"`
	Actor  string    `json:"actor"`
	Action string    `json:"action"`
	Detail string    `json:"detail"`
}

// notes are kept until the ledger has them.
type notes struct {
	path string

	mu      sync.Mutex
	waiting []note
}

// openNotes reads what an earlier process could not tell the ledger. A line torn by a crash
// was never acted on: it is written before.
func openNotes(dir string, log *slog.Logger) (*notes, error) {
	s := &notes{path: filepath.Join(dir, notesFile)}
	text, err := os.ReadFile(s.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the notes for the audit log: %w", err)
	}
	for line := range bytes.Lines(text) {
		var e note
		if err := json.Unmarshal(line, &e); err != nil {
			log.Warn("a line of the notes for the audit log can't be read", "file", s.path, "error", err)
			continue
		}
		s.waiting = append(s.waiting, e)
	}
	return s, nil
}

// add notes an action on disk before it is done.
func (s *notes) add(by admin.Actor, action, detail string, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) >= maxNotes {
		return admin.Errorf(admin.NoQuorum, "%d actions of this node wait to be noted in the ledger; bring its quorum back first", maxNotes)
	}
	e := note{ID: make([]byte, 16), At: now, Actor: by.Name, Action: action, Detail: detail}
	if _, err := rand.Read(e.ID); err != nil {
		return err
	}
	waiting := append(slices.Clip(s.waiting), e)
	if err := s.write(waiting); err != nil {
		return fmt.Errorf("note the action: %w", err)
	}
	s.waiting = waiting
	return nil
}

// write replaces the file: whole or not at all.
func (s *notes) write(waiting []note) error {
	return writeWhole(s.path, func(w io.Writer) error {
		enc := json.NewEncoder(w)
		for _, e := range waiting {
			if err := enc.Encode(e); err != nil {
				return err
			}
		}
		return nil
	})
}

// tell hands what waits to the ledger; propose is called once for each.
func (s *notes) tell(ctx context.Context, node string, propose func(context.Context, *ledgerpb.Command) error) error {
	for {
		s.mu.Lock()
		if len(s.waiting) == 0 {
			s.mu.Unlock()
			return nil
		}
		e := s.waiting[0]
		s.mu.Unlock()
		err := propose(ctx, &ledgerpb.Command{
			Version: 1, Id: e.ID, Actor: e.Actor,
			Body: &ledgerpb.Command_Note{Note: &ledgerpb.Note{Node: node, UnixNano: e.At.UnixNano(), Action: e.Action, Detail: e.Detail}},
		})
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.waiting = s.waiting[1:]
		err = s.write(s.waiting)
		s.mu.Unlock()
		if err != nil {
			return err
		}
	}
}
