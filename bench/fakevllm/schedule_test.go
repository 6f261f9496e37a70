package fakevllm

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestSlotTimeAndTimeline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{Slots: 2, TTFT: 250 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		for range 4 {
			go func() {
				direct(t.Context(), s, `"n":1`)
				done <- struct{}{}
			}()
		}
		for range 4 {
			<-done
		}
		st, line := s.Stats(), s.Timeline()
		if st.SlotTime != time.Second || st.PeakRunning != 2 || st.PeakWaiting != 2 || st.Waiting != 0 || st.Running != 0 {
			t.Errorf("%+v", st)
		}
		if len(line) != 5 {
			t.Fatalf("timeline %+v", line)
		}
		var sum time.Duration
		for i, w := range line {
			sum += w.SlotTime
			if w.Mean() != 2 || w.PeakRunning != 2 || (w.PeakWaiting > 0) != (i < 3) {
				t.Errorf("window %d: %+v", i, w)
			}
		}
		if sum != st.SlotTime {
			t.Errorf("the windows hold %v of %v", sum, st.SlotTime)
		}
		log := s.Log()
		if r := log[3]; r.Started.Sub(r.Time) != 250*time.Millisecond || r.Ended.Sub(r.Started) != 250*time.Millisecond {
			t.Errorf("record %+v", r)
		}
	})
}

func TestTheTimelineIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{TTFT: 2 * maxWindows * windowLength})
		if err != nil {
			t.Fatal(err)
		}
		direct(t.Context(), s, `"n":1`)
		line := s.Timeline()
		if len(line) > maxWindows || !line[len(line)-1].At.Before(time.Now()) || line[0].At.Before(time.Now().Add(-(maxWindows+1)*windowLength)) {
			t.Errorf("%d windows from %v", len(line), line[0].At)
		}
		for i := 1; i < len(line); i++ {
			if line[i].At.Sub(line[i-1].At) != windowLength {
				t.Fatalf("windows %d and %d are %v apart", i-1, i, line[i].At.Sub(line[i-1].At))
			}
		}
		if got := s.Stats().SlotTime; got != 2*maxWindows*windowLength {
			t.Errorf("slot-time %v", got)
		}
	})
}

// What does not fit the cache waits and holds up what came later, but an idle server
// takes anything; one that leaves lets those behind it go on.
func TestTheCacheOfKeysBoundsWhatRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{KVTokens: 100, TTFT: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		begin := func(ctx context.Context, out int) {
			go direct(ctx, s, fmt.Sprintf(`"max_tokens":%d`, out))
			synctest.Wait()
		}
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		begin(t.Context(), 50)
		begin(ctx, 80)
		begin(t.Context(), 10)
		if st := s.Stats(); st.Running != 1 || st.Waiting != 2 {
			t.Fatalf("running %d, waiting %d", st.Running, st.Waiting)
		}
		leave()
		synctest.Wait()
		if st := s.Stats(); st.Running != 2 || st.Waiting != 0 {
			t.Errorf("running %d, waiting %d after the one that did not fit had left", st.Running, st.Waiting)
		}
		time.Sleep(2 * time.Second) // virtual
		begin(t.Context(), 500)
		if st := s.Stats(); st.Running != 1 {
			t.Errorf("an idle server makes a request wait: %+v", st)
		}
		time.Sleep(2 * time.Second)
		if st := s.Stats(); st.Outcomes[OK] != 3 || st.Outcomes[Aborted] != 1 || st.InFlight != 0 || s.kv != 0 {
			t.Errorf("in the end %+v, %d tokens", st, s.kv)
		}
	})
}

// Whoever leaves the queue is out of it, also while nobody can be let in.
func TestThoseWhoLeaveTheQueueGetNoSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{Slots: 1, TTFT: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		go direct(t.Context(), s, `"n":1`)
		synctest.Wait()
		ctx, leave := context.WithCancel(t.Context())
		for range 3 {
			go direct(ctx, s, `"n":1`)
		}
		synctest.Wait()
		go direct(t.Context(), s, `"n":1`)
		synctest.Wait()
		leave()
		synctest.Wait()
		if st := s.Stats(); st.Running != 1 || st.Waiting != 1 {
			t.Errorf("running %d, waiting %d", st.Running, st.Waiting)
		}
		time.Sleep(3 * time.Second) // virtual
		if st := s.Stats(); st.Running != 0 || st.Outcomes[OK] != 2 || st.Outcomes[Aborted] != 3 || s.queue.Len() != 0 {
			t.Errorf("in the end %+v", st)
		}
	})
}

func TestWastedTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{InterToken: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 4500*time.Millisecond)
		defer cancel()
		direct(ctx, s, `"stream":true`)
		direct(t.Context(), s, `"max_tokens":3`)
		if st := s.Stats(); st.WastedTokens != 5 || st.OutputTokens != 8 {
			t.Errorf("%d wasted of %d", st.WastedTokens, st.OutputTokens)
		}
	})
}

func TestPrefixesAreCached(t *testing.T) {
	s, url := start(t, Config{PrefixBlocks: 64, BlockTokens: 4})
	turn := func(n int) string {
		var sb strings.Builder
		for i := range n {
			fmt.Fprintf(&sb, `,{"role":"user","content":"turn %d of a conversation that goes on"}`, i)
		}
		return `{"model":"fake","messages":[{"role":"system","content":"You answer briefly."}` + sb.String() + `]}`
	}
	cached := func(body string) (cached, prompt int64) {
		post(t, url+"/v1/chat/completions", body)
		log := s.Log()
		r := log[len(log)-1]
		return r.CachedTokens, r.PromptTokens
	}
	if c, _ := cached(turn(3)); c != 0 {
		t.Errorf("%d of a first prompt cached", c)
	}
	if c, p := cached(turn(3)); c != p-1 && c < p*9/10 {
		t.Errorf("%d of %d of a repeated prompt cached", c, p)
	}
	if c, p := cached(turn(4)); c < p/2 || c >= p {
		t.Errorf("%d of %d cached of a conversation that went on", c, p)
	}
	if c, _ := cached(strings.Replace(turn(3), "You", "They", 1)); c > 8 {
		t.Errorf("%d cached of another prompt", c)
	}
	if c, _ := cached(strings.Replace(turn(3), `"messages"`, `"tools":[{"type":"function","function":{"name":"f"}}],"messages"`, 1)); c != 0 {
		t.Errorf("%d cached behind other tools", c)
	}
	for i := range 20 { // push all of it out
		cached(`{"model":"fake","messages":[{"role":"user","content":"` + strings.Repeat(fmt.Sprint("filler ", i), 10) + `"}]}`)
	}
	if c, _ := cached(turn(3)); c != 0 || len(s.prefix.at) > 64 || s.prefix.used.Len() != len(s.prefix.at) {
		t.Errorf("%d cached after all was pushed out of %d blocks", c, len(s.prefix.at))
	}
}
