package ledger

import (
	"bytes"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
)

// FuzzApply: whatever command the log holds, a replica does not panic, does not stop but for
// the two reasons, and what it holds afterwards can be written, read back, and is what it says.
func FuzzApply(f *testing.F) {
	for i, body := range append(goldenBodies(), blockBodies()...) {
		c := command(uint64(i+100), body)
		text, err := proto.Marshal(c)
		must(f, err)
		f.Add(text)
		c.UnixNano += 24 * hour // what was spent of it is back
		if r := c.GetReserveBlock(); r != nil {
			r.N += 100
			if text, err = proto.Marshal(c); err == nil {
				f.Add(text)
			}
		}
	}
	f.Add([]byte{8, 2})
	f.Fuzz(func(t *testing.T, text []byte) {
		var c ledgerpb.Command
		if proto.Unmarshal(text, &c) != nil {
			return
		}
		s := lived(t).s
		before := s.Facts()
		for i := range uint64(2) {
			r, err := s.Apply(100+i, &c)
			if err != nil {
				if !errors.Is(err, ErrUnknownCommand) && !errors.Is(err, ErrDiverged) || r != nil {
					t.Fatalf("it stops for %v, with %v", err, r)
				}
				if s.Facts() != before {
					t.Fatal("it stops, and changed something")
				}
				return
			}
			switch r.GetCode() {
			case "", codeConflict, codeNotFound, codeExists, codeInvalid, codeStale, codeFull:
			default:
				t.Fatalf("the code is %q", r.GetCode())
			}
		}
		after := s.Facts()
		if after.Time.Before(before.Time) || after.Index != 101 {
			t.Fatalf("after it: %+v", after)
		}
		back := readState(t, snapshotOf(t, s)) // checks the hash
		if back.Facts().Hash != after.Hash || back.Facts().Changed != after.Changed {
			t.Fatal("read back it is another state")
		}
	})
}

// FuzzReadState: no bytes make a reader panic, and what it takes can be written again.
func FuzzReadState(f *testing.F) {
	for _, s := range []*State{NewState(), lived(f).s} {
		snapshot := snapshotOf(f, s)
		f.Add(snapshot)
		f.Add(snapshot[:len(snapshot)/2])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ReadState(bytes.NewReader(b))
		if err != nil {
			if _, ok := errors.AsType[*SnapshotError](err); !ok && !errors.Is(err, ErrSnapshotVersion) || s != nil {
				t.Fatalf("it fails with %v", err)
			}
			return
		}
		if back := readState(t, snapshotOf(t, s)); back.Facts().Hash != s.Facts().Hash {
			t.Fatal("written again it is another state")
		}
	})
}
