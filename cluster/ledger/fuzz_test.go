package ledger

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"headgate/cluster/ledger/ledgerpb"
	"headgate/limiter"
)

// FuzzApply: whatever command the log holds, a replica does not panic, does not stop but for
// the two reasons, and what it holds afterwards can be written, read back, and is what it says.
func FuzzApply(f *testing.F) {
	for i, body := range slices.Concat(goldenBodies(), blockBodies(), budgetBodies(), cacheBodies()) {
		c := command(uint64(i+100), body)
		text, err := proto.Marshal(c)
		must(f, err)
		f.Add(text)
		c.UnixNano += 24 * hour // what was spent of it is back
		if r := c.GetReserveBlock(); r != nil {
			r.N += 100
		}
		if d := c.GetBudget(); d != nil {
			d.N, d.Spent = d.N+100, d.Spent+100
		}
		if c.GetReserveBlock() != nil || c.GetBudget() != nil {
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
			case "", codeConflict, codeNotFound, codeExists, codeInvalid, codeStale, codeFull, codePeriod, codeNoMember:
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

// FuzzBlocks: whatever owners say in whatever order, no replica panics or stops, what is left
// to grant and what is outstanding stay within the limit, and what is written is read back.
func FuzzBlocks(f *testing.F) {
	f.Add([]byte{0, 1, 1, 1, 20, 5, 0, 1, 1, 1, 1, 2, 90, 1, 20, 9})
	f.Add([]byte{4, 1, 1, 1, 200, 0, 0, 255, 5, 2, 2, 1, 50, 9, 60, 255, 6, 2, 2, 2, 128, 3, 7, 0})
	f.Add([]byte{0, 1, 1, 9, 100, 0, 0, 0, 8, 1, 1, 10, 10, 1, 200, 7, 0, 3, 9, 1, 1, 1, 1, 255})
	f.Fuzz(func(t *testing.T, data []byte) {
		b := newBank(t)
		limits := []limiter.Limit{hourly(100), daily(50), hourly(7), {Rate: limiter.Rate{Count: 1, Per: limiter.MaxSpan}, Burst: 1}}
		for ; len(data) >= 8; data = data[8:] {
			kind, owner, epoch, n := data[0], uint64(data[1]%4), uint64(data[2]), uint64(data[3])
			holding, debt := int64(int8(data[6]))<<(data[0]>>4*3), int64(data[6]&3)
			b.now += int64(data[7]) << (data[7] % 60)
			var err error
			if kind&1 != 0 {
				_, err = b.settle(Settle{Bucket: bucketOf("l"), Owner: owner, Epoch: epoch, N: n, Holding: holding, Debt: debt, Returned: int64(data[4]) << (data[5] % 50)})
			} else {
				l := limits[kind>>1&3]
				l.Revision = uint64(kind >> 3)
				_, err = b.reserve(Reserve{Bucket: bucketOf("l"), Limit: l, Owner: owner, Epoch: epoch, N: n, Want: int64(data[4]) << (data[5] % 50), Least: int64(data[5]), Holding: holding, Debt: debt})
			}
			bucket, ok := b.s.durables.find(bucketOf("l"))
			if !ok {
				continue
			}
			if level := bucket.limit.Level(&bucket.state, bucket.state.Newest()); err == nil && level > 0 && level > bucket.limit.Capacity()-bucket.outstanding() {
				t.Fatalf("%d are left and %d outstanding of %+v", level, bucket.outstanding(), bucket.limit)
			}
			if back := readState(t, snapshotOf(t, b.s)); back.Facts().Hash != b.s.Facts().Hash {
				t.Fatal("read back it is another state")
			}
		}
	})
}
