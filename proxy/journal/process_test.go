package journal_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"headgate/proxy/journal"
)

// said is a line of a writing process: what it was told that the journal has.
type said struct {
	ID, Account  uint64
	Most, Actual int64
	Settled      bool
}

const writerFolder = "HEADGATE_JOURNAL_WRITER"

// account of a test's request.
func account(n uint64) journal.Account {
	return journal.Account{Tenant: "t", Budget: fmt.Sprint("b", n%3), Start: 1, End: 2}
}

func processConfig(dir string, incarnation uint64) journal.Config {
	return journal.Config{
		Dir: dir, Node: "a", Incarnation: incarnation, BootID: "boot", Segment: 64 << 10, SyncEvery: 5 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
}

// TestWriter is no test but the process that TestSIGKILL kills: it writes as fast as it can
// and says on its output what was acknowledged, after it was.
func TestWriter(t *testing.T) {
	dir := os.Getenv(writerFolder)
	if dir == "" {
		t.Skip("it is TestSIGKILL that starts it")
	}
	var incarnation uint64
	if _, err := fmt.Sscan(os.Getenv(writerFolder+"_INCARNATION"), &incarnation); err != nil {
		t.Fatal(err)
	}
	l, err := journal.Open(processConfig(dir, incarnation))
	if errors.Is(err, journal.ErrInUse) {
		fmt.Println("in use")
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	out := json.NewEncoder(os.Stdout)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for {
				r := journal.Reservation{Time: time.Now(), Tenant: "t", User: strings.Repeat("u", 100), Cost: 1000}
				n := uint64(time.Now().UnixNano())
				r.Parts = []journal.Part{{Account: account(n), Amount: 1000}}
				if err := l.Reserve(&r); err != nil {
					panic(err)
				}
				s := said{ID: r.ID, Account: n % 3, Most: 1000}
				mu.Lock()
				_ = out.Encode(s)
				mu.Unlock()
				if r.ID%7 == 0 {
					continue // it stays open
				}
				s.Actual, s.Settled = int64(r.ID%900)+1, true
				u := journal.Usage{ID: r.ID, Time: time.Now(), Tenant: "t", Cost: s.Actual, Outcome: "ok", Parts: []journal.Part{{Account: account(n), Amount: s.Actual}}}
				if err := l.Settle(&u); err != nil {
					panic(err)
				}
				mu.Lock()
				_ = out.Encode(s)
				mu.Unlock()
			}
		})
	}
	all.Wait()
}

// start runs a writer.
func start(t *testing.T, dir string, incarnation uint64) (*exec.Cmd, io.Reader) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestWriter$")
	cmd.Env = append(os.Environ(), writerFolder+"="+dir, fmt.Sprintf("%s_INCARNATION=%d", writerFolder, incarnation))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

// TestSIGKILL kills writing processes, and finds everything in the journal that they were told
// is there: what they settled, and what stood open, in full.
func TestSIGKILL(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "usage")
	for round := range uint64(6) {
		incarnation := round*10 + 1
		cmd, out := start(t, dir, incarnation)
		lines, most := map[uint64]said{}, 300*(int(round)+1)
		in := bufio.NewScanner(out)
		n := 0
		for in.Scan() {
			var s said
			if json.Unmarshal(in.Bytes(), &s) != nil {
				continue // cut by the kill
			}
			lines[s.ID] = s
			if n++; n == most {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = cmd.Wait() // it was killed
		if n < most {
			t.Fatalf("round %d: the writer ended by itself after %d lines", round, n)
		}
		checkKilled(t, dir, incarnation, lines)
	}
}

func checkKilled(t *testing.T, dir string, incarnation uint64, lines map[uint64]said) {
	t.Helper()
	l, err := journal.Open(processConfig(dir, incarnation+1))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(context.Background())
	sums := map[journal.Account]int64{}
	seen := map[uint64]bool{}
	err = l.Read(t.Context(), journal.Query{}, func(u *journal.Usage) error {
		if u.Incarnation != incarnation {
			return nil
		}
		if seen[u.ID] {
			t.Errorf("request %d stands there twice", u.ID)
		}
		seen[u.ID] = true
		sums[u.Parts[0].Account] += u.Parts[0].Amount
		s, ok := lines[u.ID]
		want := int64(1000)
		if u.Outcome == "ok" {
			want = int64(u.ID%900) + 1
		}
		if u.Cost != want || u.Parts[0].Amount != want || ok && s.Settled && u.Outcome != "ok" || ok && account(s.Account) != u.Parts[0].Account {
			t.Errorf("request %d was said to be %+v and stands there as %+v", u.ID, s, u)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for id := range lines {
		if !seen[id] {
			t.Errorf("request %d was acknowledged and is not there", id)
		}
	}
	if len(seen) > len(lines)+8 { // a writer's goroutine may have had one more, unsaid
		t.Errorf("%d requests stand there, acknowledged were %d", len(seen), len(lines))
	}
	for _, p := range l.Unclosed() {
		if p.Incarnation != incarnation {
			continue
		}
		for _, a := range p.Accounts {
			if a.Settled+a.Open != sums[a.Account] {
				t.Errorf("account %v: the books have %d and %d, the usage %d", a.Account, a.Settled, a.Open, sums[a.Account])
			}
			delete(sums, a.Account)
		}
		if err := l.Closed(incarnation); err != nil {
			t.Error(err)
		}
		if strings.Contains(p.Damaged, "machine") || strings.Contains(p.Damaged, "checksum") {
			t.Errorf("damaged: %s", p.Damaged)
		}
	}
	if len(sums) > 0 {
		t.Errorf("the books lack %v", sums)
	}
}

// TestTwoProcesses: a second process is refused, and changes nothing.
func TestTwoProcesses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "usage")
	l, err := journal.Open(processConfig(dir, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(context.Background())
	cmd, out := start(t, dir, 2)
	text, err := io.ReadAll(out)
	if err := errors.Join(err, cmd.Wait()); err != nil || !strings.Contains(string(text), "in use") {
		t.Fatalf("the second process said %q, %v", text, err)
	}
	if names, err := filepath.Glob(dir + "/*.hgu*"); err != nil || len(names) != 1 {
		t.Fatalf("files %v, %v", names, err)
	}
	if _, err := journal.Open(processConfig(dir, 3)); !errors.Is(err, journal.ErrInUse) {
		t.Fatalf("a second Log of this process: %v", err)
	}
}
