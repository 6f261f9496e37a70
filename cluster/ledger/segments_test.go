package ledger

import (
	"testing"

	"github.com/hashicorp/raft"
)

// A follower cuts off what an earlier leader wrote and no majority took.
func TestALogWhoseTailWasCutOffOpensAgain(t *testing.T) {
	dir := t.TempDir()
	s := openTestStore(t, dir, nil)
	steps := [...]struct{ from, to, cutFrom uint64 }{{1, 10, 8}, {8, 20, 15}, {15, 15, 15}, {15, 16, 3}, {3, 9, 9}}
	for _, step := range steps {
		if err := s.StoreLogs(entries(step.from, step.to, 300)); err != nil {
			t.Fatal(err)
		}
		if err := s.DeleteRange(step.cutFrom, step.to); err != nil {
			t.Fatal(err)
		}
		if err := s.close(); err != nil {
			t.Fatal(err)
		}
		s = openTestStore(t, dir, nil)
		for i := uint64(1); i < step.cutFrom; i++ {
			var entry raft.Log
			if err := s.GetLog(i, &entry); err != nil || len(entry.Data) != 300 || entry.Data[0] != byte(i) {
				t.Fatalf("after %+v and a restart entry %d is %d bytes, error %v", step, i, len(entry.Data), err)
			}
		}
		if last, _ := s.LastIndex(); last != step.cutFrom-1 {
			t.Fatalf("after %+v and a restart the last entry is %d", step, last)
		}
	}
}
