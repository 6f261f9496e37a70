package ledger

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
)

// fsm feeds committed entries to the State. Raft calls it from one goroutine. Once State
// refused an entry it applies nothing more, takes no snapshot, and says so by onFailure:
// a replica that guesses would diverge, one that panics would take the gateway with it.
type fsm struct {
	changed   func(*Facts)    // not nil
	recalled  func(BudgetKey) // not nil
	onFailure func(error)     // not nil; called once

	mu       sync.Mutex // between an Apply, and a Capture from elsewhere
	state    *State
	told     uint64 // State.shown when changed was called last
	failed   error
	awaiting chan struct{} // closed when applied grows; nil: nobody waits

	applied atomic.Uint64 // index of the last command applied
}

// outcome is what raft hands back for a command.
type outcome struct {
	result *ledgerpb.Result
	err    error // this replica stopped; the command is committed nevertheless
}

func newFSM(changed func(*Facts), onFailure func(error)) *fsm {
	return &fsm{state: NewState(), changed: changed, recalled: func(BudgetKey) {}, onFailure: onFailure}
}

var _ raft.BatchingFSM = (*fsm)(nil)

// Apply applies one entry.
func (f *fsm) Apply(entry *raft.Log) any { return f.ApplyBatch([]*raft.Log{entry})[0] }

// ApplyBatch applies the entries in order and then tells of the changes: of each view, and of
// where all of them led.
func (f *fsm) ApplyBatch(entries []*raft.Log) []any {
	outcomes := make([]any, len(entries))
	f.mu.Lock()
	before := f.failed
	view := f.state.Facts().View
	var tell []*Facts
	for i, entry := range entries {
		if entry.Type != raft.LogCommand {
			continue
		}
		o := &outcome{err: f.failed}
		if f.failed == nil {
			o.result, o.err = f.apply(entry)
			f.failed = o.err
		}
		outcomes[i] = o
		if v := f.state.Facts().View; v != view {
			view, tell = v, f.toTell(tell)
		}
	}
	failed := f.failed
	tell = f.toTell(tell)
	recalls := f.state.recalls
	f.state.recalls = nil
	f.wake()
	f.mu.Unlock()
	for _, facts := range tell {
		f.changed(facts)
	}
	for _, key := range recalls {
		f.recalled(key)
	}
	if before == nil && failed != nil {
		f.onFailure(failed)
	}
	return outcomes
}

// apply applies one command. A panic, which every replica would meet at this entry and at
// every start, is an error: the process lives, as State's own refusals let it.
func (f *fsm) apply(entry *raft.Log) (result *ledgerpb.Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			result, err = nil, fmt.Errorf("entry %d of the ledger: panic: %v\n%s", entry.Index, p, debug.Stack())
		}
	}()
	var command ledgerpb.Command
	if err := proto.Unmarshal(entry.Data, &command); err != nil {
		return nil, fmt.Errorf("entry %d of the ledger is no command: %w", entry.Index, err)
	}
	result, err = f.state.Apply(entry.Index, &command)
	if err != nil {
		return nil, fmt.Errorf("entry %d of the ledger: %w", entry.Index, err)
	}
	f.applied.Store(entry.Index)
	return result, nil
}

// toTell adds the facts to those to tell if they changed since. Callers hold mu.
func (f *fsm) toTell(tell []*Facts) []*Facts {
	if f.state.shown == f.told {
		return tell
	}
	f.told = f.state.shown
	return append(tell, f.state.Facts())
}

// wake lets those in wait look again. Callers hold mu.
func (f *fsm) wake() {
	if f.awaiting != nil {
		close(f.awaiting)
		f.awaiting = nil
	}
}

// wait returns once the command at index is applied here, or with ctx's error.
func (f *fsm) wait(ctx context.Context, index uint64) error {
	for {
		f.mu.Lock()
		if f.applied.Load() >= index || f.failed != nil {
			f.mu.Unlock()
			return nil
		}
		if f.awaiting == nil {
			f.awaiting = make(chan struct{})
		}
		grown := f.awaiting
		f.mu.Unlock()
		select {
		case <-grown:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// capture freezes the state for writing. Any goroutine may call it.
func (f *fsm) capture() (*Capture, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failed != nil {
		return nil, f.failed
	}
	return f.state.Capture(), nil
}

// budgets are the accounts at this moment. Any goroutine may call it.
func (f *fsm) budgets() []*account {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state.budgets.all()
}

// untold see Ledger.UntoldBudgets. There may be many: entries are not held up while they are put in order.
func (f *fsm) untold(after *BudgetKey, most int) (out []BudgetAccount) {
	f.mu.Lock()
	keys := make([]BudgetKey, 0, len(f.state.tell))
	for k := range f.state.tell {
		if after == nil || compareBudgetKeys(k, *after) > 0 {
			keys = append(keys, k)
		}
	}
	f.mu.Unlock()
	slices.SortFunc(keys, compareBudgetKeys)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range keys {
		if len(out) >= most {
			break
		}
		if a, ok := f.state.budgets.find(k); ok && a.untold() {
			out = append(out, a.BudgetAccount)
		}
	}
	return out
}

// Snapshot freezes the state; Persist writes it while entries go on being applied.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	captured, err := f.capture()
	if err != nil {
		return nil, err
	}
	return snapshot{captured}, nil
}

// Restore puts a snapshot in the place of the whole state, after it was read to its end.
func (f *fsm) Restore(from io.ReadCloser) error {
	restored, err := ReadState(bufio.NewReader(from))
	if err != nil {
		return fmt.Errorf("snapshot of the ledger: %w", err)
	}
	f.mu.Lock()
	f.state.Replace(restored)
	facts := f.state.Facts()
	f.told = f.state.shown
	f.applied.Store(facts.Index)
	f.wake()
	f.mu.Unlock()
	f.changed(facts)
	return nil
}

// snapshot is one frozen state on its way into raft's store.
type snapshot struct{ captured *Capture }

func (s snapshot) Persist(sink raft.SnapshotSink) error {
	if err := s.captured.Write(sink); err != nil {
		cancelled := sink.Cancel()
		if cancelled != nil {
			return fmt.Errorf("writing a snapshot of the ledger: %w (and cancelling it: %w)", err, cancelled)
		}
		return fmt.Errorf("writing a snapshot of the ledger: %w", err)
	}
	return sink.Close()
}

func (snapshot) Release() {}
