package cache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	pb "headgate/cache/cachepb"
)

const (
	turnedHit, turnedLead, turnedLive, turnedFailed, turnedPass, turnedBusy = int(TurnHit), int(TurnLead), int(TurnLive), int(TurnFailed), int(TurnPass), int(TurnBusy)
)

// TestThousandAskOnce: a thousand who want the same, on five nodes, ask the model once.
func TestThousandAskOnce(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 5), fillKey("q")
		c := newCrowd(w)
		for _, n := range w.nodes {
			c.join(n, 200, Ask{Key: k})
		}
		f := c.lead()
		synctest.Wait()
		if got := w.nodes[0].count("headgate_cache_waiters"); got < 199 {
			t.Errorf("%v wait on node 0", got)
		}
		time.Sleep(20 * time.Second)
		f.Store(answerFor(k))
		c.want(turnedLead, 1, turnedHit, 999)
		for _, n := range w.nodes {
			if h, ok := n.Look(k); !ok || h.Delta < 20*time.Second || h.Stamp != 1 {
				t.Errorf("node %d has not got it as it was filled: %v", n.index, h.Entry)
			}
		}
		c = newCrowd(w)
		c.join(w.nodes[3], 10, Ask{Key: k})
		c.want(turnedHit, 10)
	})
}

// TestThousandFollow: the same for those who take a stream; each reads all of it.
func TestThousandFollow(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 5), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[2], 1, Ask{Key: k, Live: true})
		f := c.lead()
		for _, n := range w.nodes {
			c.join(n, 100, Ask{Key: k, Live: true})
			c.join(n, 100, Ask{Key: k})
		}
		synctest.Wait()
		f.Begin("text/event-stream")
		var want []byte
		for i := range 500 {
			p := fmt.Appendf(nil, "data: %d\n\n", i)
			want = append(want, p...)
			f.Write(p)
			clear(p) // it was copied
			if i == 250 {
				synctest.Wait()
				for _, n := range w.nodes {
					c.join(n, 10, Ask{Key: k, Live: true})
				}
			}
		}
		synctest.Wait()
		f.Store(answerFor(k))
		c.want(turnedLead, 1, turnedLive, 550, turnedHit, 500)
		for _, turn := range c.got {
			if turn.Kind != TurnLive {
				continue
			}
			if got, err := readAll(turn.Live); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%d of %d bytes: %v", len(got), len(want), err)
			}
			if turn.Live.ContentType() != "text/event-stream" {
				t.Errorf("content type %q", turn.Live.ContentType())
			}
		}
	})
}

// TestLeaderDies without a byte sent: all the others are answered, after two calls at most.
func TestLeaderDies(t *testing.T) {
	for _, c := range []struct {
		name         string
		leader, dies int
		leadsAfter   int // by others, at most
	}{
		{"who is the owner", 0, 0, 1},
		{"who is not the owner", 2, 2, 1},
		{"not, but the owner", 2, 0, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			fillTest(t, func(t *testing.T) {
				w, k := newWorld(t, 5), fillKey("q")
				crowd := newCrowd(w)
				crowd.join(w.nodes[c.leader], 1, Ask{Key: k})
				first := crowd.lead()
				survivors := 0
				for _, n := range w.nodes {
					crowd.join(n, 200, Ask{Key: k, Live: n.index%2 == 0})
					if n.index != c.dies {
						survivors += 200
					}
				}
				time.Sleep(time.Second)
				w.nodes[c.dies].kill()
				if c.dies != c.leader {
					go func() {
						time.Sleep(10 * time.Second)
						first.Store(answerFor(k))
					}()
				}
				select {
				case turn := <-crowd.leads:
					time.Sleep(20 * time.Second)
					turn.Fill.Store(answerFor(k))
				case <-time.After(5 * time.Second):
					if c.dies == c.leader {
						t.Error("nobody leads")
					}
				}
				crowd.wg.Wait()
				if got := crowd.turns[TurnHit] + crowd.turns[TurnLead]; got != survivors+1 || crowd.turns[TurnLead] > 1+c.leadsAfter {
					t.Errorf("of %d: %v, %d errors", survivors, crowd.turns, crowd.errs)
				}
			})
		})
	}
}

// TestLeaderDiesHalfway: who reads its stream gets an error after what there was; who has not got a byte goes on.
func TestLeaderDiesHalfway(t *testing.T) {
	for _, leader := range []int{0, 2} {
		fillTest(t, func(t *testing.T) {
			w, k := newWorld(t, 4), fillKey("q")
			c := newCrowd(w)
			c.join(w.nodes[leader], 1, Ask{Key: k})
			f := c.lead()
			for _, i := range []int{1, 3} {
				c.join(w.nodes[i], 20, Ask{Key: k, Live: true})
				c.join(w.nodes[i], 20, Ask{Key: k})
			}
			synctest.Wait()
			f.Begin("text/event-stream")
			f.Write([]byte("half"))
			synctest.Wait()
			w.nodes[leader].kill()
			second := c.lead()
			synctest.Wait()
			c.join(w.nodes[1], 5, Ask{Key: k, Live: true}) // they follow the second
			synctest.Wait()
			second.Begin("text/event-stream")
			second.Write([]byte("whole"))
			synctest.Wait()
			second.Store(answerFor(k))
			c.want(turnedLead, 2, turnedLive, 45, turnedHit, 39)
			broken, whole := 0, 0
			for _, turn := range c.got {
				if turn.Kind != TurnLive {
					continue
				}
				switch got, err := readAll(turn.Live); {
				case errors.Is(err, ErrBroken) && string(got) == "half":
					broken++
				case err == nil && string(got) == "whole":
					whole++
				default:
					t.Errorf("%q, %v", got, err)
				}
			}
			if broken != 40 || whole != 5 {
				t.Errorf("%d broken, %d whole", broken, whole)
			}
		})
	}
}

// TestLeaderBreaks: the model's stream breaks off.
func TestLeaderBreaks(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		f := c.lead()
		c.join(w.nodes[1], 1, Ask{Key: k, Live: true})
		c.join(w.nodes[2], 1, Ask{Key: k, Live: true})
		c.join(w.nodes[2], 3, Ask{Key: k})
		synctest.Wait()
		f.Begin("text/event-stream")
		f.Write([]byte("half"))
		synctest.Wait()
		f.Broken()
		f.Store(answerFor(k)) // too late
		f.Write([]byte("more"))
		f.Begin("x")
		c.lead().Store(answerFor(k))
		c.want(turnedLead, 2, turnedLive, 2, turnedHit, 2)
		for _, turn := range c.got {
			if turn.Kind == TurnLive {
				if got, err := readAll(turn.Live); !errors.Is(err, ErrBroken) || string(got) != "half" {
					t.Errorf("%q, %v", got, err)
				}
			}
		}
		if got := w.nodes[0].count("headgate_cache_handovers_total", handBroken); got != 1 {
			t.Errorf("%v hand-overs", got)
		}
	})
}

// TestFollowersLeave: whoever waits no longer harms nobody, and the last one to go ends the flight.
func TestFollowersLeave(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		f := c.lead()
		ctx, leave := context.WithTimeout(context.Background(), 10*time.Second)
		defer leave()
		for _, n := range w.nodes {
			c.joinFor(ctx, n, Ask{Key: k})
			c.joinFor(ctx, n, Ask{Key: k, Live: true})
			c.join(n, 10, Ask{Key: k})
		}
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if c.errs != 6 {
			t.Errorf("%d left", c.errs)
		}
		f.Store(answerFor(k))
		c.want(turnedLead, 1, turnedHit, 30)
	})
}

// TestReadersLeave: a stream goes on for those who still read it.
func TestReadersLeave(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		f := c.lead()
		f.Begin("text/event-stream")
		f.Write([]byte("a"))
		c.join(w.nodes[2], 1, Ask{Key: k}) // keeps the node interested
		synctest.Wait()
		for round := range 2 { // the second time the stream comes from its beginning again
			c.join(w.nodes[2], 2, Ask{Key: k, Live: true})
			synctest.Wait()
			var readers []*Reader
			for _, turn := range c.got {
				if turn.Kind == TurnLive {
					readers = append(readers, turn.Live)
				}
			}
			c.got = nil
			if len(readers) != 2 {
				t.Fatalf("%d readers", len(readers))
			}
			readers[0].Close()
			readers[0].Close()
			f.Write([]byte("b"))
			synctest.Wait()
			p, err := readers[1].Next(context.Background())
			if err != nil || p[0] != 'a' {
				t.Errorf("%q, %v", p, err)
			}
			if round == 0 {
				readers[1].Close()
				f.Write([]byte("c")) // nobody reads it there
				synctest.Wait()
				continue
			}
			f.Store(answerFor(k))
			synctest.Wait()
			if rest, err := readAll(readers[1]); err != nil || string(p)+string(rest) != "abcb" {
				t.Errorf("%q, %v", rest, err)
			}
		}
	})
}

// TestClientLeaves: the call to the model goes on as long as somebody waits for it, on whatever node, and no longer.
func TestClientLeaves(t *testing.T) {
	for _, c := range []struct {
		name           string
		leader, waiter int
		live           bool
	}{
		{"waits at the owner", 1, 0, false},
		{"waits elsewhere", 1, 2, false},
		{"waits on the same node", 1, 1, false},
		{"waits elsewhere for the owner's", 0, 1, false},
		{"reads elsewhere", 1, 2, true},
		{"reads on the same node", 1, 1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			fillTest(t, func(t *testing.T) {
				w, k := newWorld(t, 3), fillKey("q")
				crowd := newCrowd(w)
				crowd.join(w.nodes[c.leader], 1, Ask{Key: k})
				f := crowd.lead()
				client, leave := context.WithCancel(context.WithValue(context.Background(), crowdKey{}, "v"))
				ctx, cancel := f.Context(client)
				defer cancel()
				if ctx.Value(crowdKey{}) != "v" {
					t.Error("the context lost its values")
				}
				waiting, give := context.WithCancel(context.Background())
				crowd.joinFor(waiting, w.nodes[c.waiter], Ask{Key: k, Live: c.live})
				synctest.Wait()
				var reader *Reader
				if c.live {
					f.Begin("text/event-stream")
					f.Write([]byte("a"))
					synctest.Wait()
					reader = crowd.got[1].Live
				}
				leave()
				time.Sleep(20 * time.Second)
				if ctx.Err() != nil {
					t.Error("the call ended though somebody waits")
				}
				give()
				if reader != nil {
					reader.Close()
				}
				synctest.Wait()
				if ctx.Err() == nil {
					t.Error("the call goes on though nobody waits")
				}
				f.Abandon(true)
			})
		})
	}
}

type crowdKey struct{}

// TestClientLeavesAlone: and where nobody ever waited it ends at once.
func TestClientLeavesAlone(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		f := c.lead()
		client, leave := context.WithCancel(context.Background())
		ctx, cancel := f.Context(client)
		defer cancel()
		synctest.Wait()
		leave()
		synctest.Wait()
		if ctx.Err() == nil {
			t.Error("the call goes on")
		}
		f.Abandon(true)
		c.join(w.nodes[0], 1, Ask{Key: k})
		c.lead().Store(answerFor(k))
		c.want(turnedLead, 2)
	})
}

// TestSlowLeader: after LeadFor without a byte the next may try too, and the first answer counts for all.
func TestSlowLeader(t *testing.T) {
	for _, firstWins := range []bool{true, false} {
		fillTest(t, func(t *testing.T) {
			w, k := newWorld(t, 3), fillKey("q")
			c := newCrowd(w)
			ask := Ask{Key: k, LeadFor: 10 * time.Second}
			c.join(w.nodes[1], 1, ask)
			slow := c.lead()
			c.join(w.nodes[1], 2, ask)
			c.join(w.nodes[2], 2, ask)
			time.Sleep(9 * time.Second)
			if len(c.leads) != 0 {
				t.Error("too early")
			}
			next := c.lead()
			if firstWins {
				slow.Store(answerFor(k))
				c.want(turnedLead, 2, turnedHit, 3)
				next.Abandon(true)
				return
			}
			next.Store(answerFor(k))
			c.want(turnedLead, 2, turnedHit, 3)
			slow.Begin("text/event-stream")
			slow.Write([]byte("late"))
			slow.Store(answerFor(k))
		})
	}
}

// TestSlowAlone: a single node's leader, too, is not waited for without end; and one that streams is not slow.
func TestSlowAlone(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 1), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[0], 3, Ask{Key: k})
		slow, next := c.lead(), c.lead()
		next.Begin("text/event-stream")
		next.Write([]byte("x"))
		time.Sleep(5 * time.Minute)
		if len(c.leads) != 0 {
			t.Error("a leader that streams is no slow one")
		}
		next.Store(answerFor(k))
		slow.Broken()
		c.want(turnedLead, 2, turnedHit, 1)
	})
}

// TestSecondStream: of two that lead the first to begin is followed; the other's answer ends the waiting all the same,
// and the stream goes on.
func TestSecondStream(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k, LeadFor: time.Second})
		one := c.lead()
		c.join(w.nodes[2], 1, Ask{Key: k})
		two := c.lead()
		c.join(w.nodes[0], 1, Ask{Key: k, Live: true})
		c.join(w.nodes[0], 1, Ask{Key: k})
		synctest.Wait()
		one.Begin("text/event-stream")
		one.Write([]byte("one"))
		synctest.Wait()
		two.Begin("text/event-stream")
		two.Write([]byte("two"))
		synctest.Wait()
		two.Store(answerFor(k))
		c.want(turnedLead, 2, turnedLive, 1, turnedHit, 1)
		one.Write([]byte(" and more"))
		one.Share(answerFor(k))
		for _, turn := range c.got {
			if turn.Kind == TurnLive {
				if got, err := readAll(turn.Live); err != nil || string(got) != "one and more" {
					t.Errorf("%q, %v", got, err)
				}
			}
		}
	})
}

// TestSlowLink: a stream goes on where its followers' node and its owner hear nothing of each other for a while; not
// for ever. Who leads has less time.
func TestSlowLink(t *testing.T) {
	for name, c := range map[string]struct {
		out  time.Duration
		link float64
	}{"slow": {followTTL - 2*time.Second, 0}, "lost": {followTTL + time.Second, 3}} {
		t.Run(name, func(t *testing.T) {
			fillTest(t, func(t *testing.T) {
				w, k := newWorld(t, 2), fillKey("q")
				crowd := newCrowd(w)
				crowd.join(w.nodes[0], 1, Ask{Key: k, Live: true})
				f := crowd.lead()
				f.Begin("text/event-stream")
				f.Write([]byte("a"))
				crowd.join(w.nodes[1], 3, Ask{Key: k, Live: true})
				time.Sleep(time.Second)
				w.net.Delay("n0", "n1", c.out)
				w.net.Delay("n1", "n0", c.out)
				time.Sleep(c.out + beatEvery)
				w.net.Heal()
				f.Write([]byte("b"))
				time.Sleep(2 * followTTL)
				f.Store(answerFor(k))
				crowd.want(turnedLead, 1, turnedLive, 3)
				for _, turn := range crowd.got {
					if turn.Kind != TurnLive {
						continue
					}
					if got, err := readAll(turn.Live); errors.Is(err, ErrBroken) != (c.link > 0) || err == nil && string(got) != "ab" {
						t.Errorf("%q, %v", got, err)
					}
					_, _ = turn.Live.Next(context.Background()) // it counts once
				}
				if got := w.nodes[1].count("headgate_cache_broken_total", "link"); got != c.link {
					t.Errorf("%v counted, want %v", got, c.link)
				}
			})
		})
	}
}

// TestPausedLeader: one that is not heard of loses its lock; it comes back, and its answer is as good as any.
func TestPausedLeader(t *testing.T) {
	for _, backFirst := range []bool{true, false} {
		fillTest(t, func(t *testing.T) {
			w, k := newWorld(t, 3), fillKey("q")
			c := newCrowd(w)
			c.join(w.nodes[2], 1, Ask{Key: k})
			paused := c.lead()
			c.join(w.nodes[1], 5, Ask{Key: k})
			synctest.Wait()
			w.net.Cut("n2", "n0", "n1")
			second := c.lead()
			if got := w.nodes[0].count("headgate_cache_handovers_total", handLost); got != 1 {
				t.Errorf("%v hand-overs", got)
			}
			w.net.Heal()
			time.Sleep(5 * time.Second)
			if backFirst {
				paused.Store(answerFor(k))
				second.Store(answerFor(k))
			} else {
				second.Store(answerFor(k))
				paused.Store(answerFor(k))
			}
			c.want(turnedLead, 2, turnedHit, 4)
			time.Sleep(time.Second)
			if !w.nodes[0].shelf.has(k) {
				t.Error("the owner has not got it")
			}
		})
	}
}

// TestFailedTwice: after the second error of the model all get it, and the next who come try anew.
func TestFailedTwice(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		for _, n := range w.nodes {
			c.join(n, 10, Ask{Key: k, Live: true})
		}
		synctest.Wait()
		c.lead().Failed(Failure{Status: 500, Body: []byte("one")})
		synctest.Wait()
		f := c.lead()
		f.Failed(Failure{Status: 429, ContentType: "application/json", Body: []byte("two")})
		f.Failed(Failure{Status: 500})
		c.want(turnedLead, 2, turnedFailed, 28)
		for _, turn := range c.got {
			if x := turn.Failed; turn.Kind == TurnFailed && (x.Status != 429 || string(x.Body) != "two" || x.ContentType != "application/json") {
				t.Errorf("%v", x)
			}
		}
		c.join(w.nodes[1], 1, Ask{Key: k})
		c.lead().Store(answerFor(k))
		c.want(turnedLead, 3, turnedFailed, 28)
	})
}

// TestFailedInStream: who followed saw the error pass.
func TestFailedInStream(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		f := c.lead()
		for _, n := range w.nodes {
			c.join(n, 1, Ask{Key: k, Live: true})
		}
		f.Begin("text/event-stream")
		f.Write([]byte("error"))
		synctest.Wait()
		f.Failed(Failure{Status: 500})
		c.want(turnedLead, 1, turnedLive, 3)
		for _, turn := range c.got {
			if turn.Kind == TurnLive {
				if got, err := readAll(turn.Live); err != nil || string(got) != "error" {
					t.Errorf("%q, %v", got, err)
				}
			}
		}
	})
}

// TestAbandoned: after two that came to nothing all pass; who was refused by limits of its own does not count.
func TestAbandoned(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		for _, n := range w.nodes {
			c.join(n, 4, Ask{Key: k})
		}
		synctest.Wait()
		for range 4 {
			c.lead().Abandon(false)
		}
		c.lead().Abandon(true)
		c.lead().Abandon(true)
		c.want(turnedLead, 6, turnedPass, 6)
	})
}

// TestAbandonedWithoutEnd: nor does one flight give leads without end.
func TestAbandonedWithoutEnd(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 20, Ask{Key: k})
		synctest.Wait()
		for range maxGiven {
			c.lead().Abandon(false)
		}
		c.want(turnedLead, maxGiven, turnedPass, 20-maxGiven)
	})
}

// TestUnshareable: all pass, also those who come within ten seconds, and nobody waits behind another.
func TestUnshareable(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		for _, n := range w.nodes {
			c.join(n, 3, Ask{Key: k, Live: true})
		}
		synctest.Wait()
		c.lead().Unshareable()
		c.want(turnedLead, 1, turnedPass, 8)
		time.Sleep(9 * time.Second)
		c.join(w.nodes[2], 2, Ask{Key: k})
		c.want(turnedLead, 1, turnedPass, 10)
		time.Sleep(2 * time.Second)
		c.join(w.nodes[2], 2, Ask{Key: k})
		synctest.Wait()
		c.lead().Store(answerFor(k))
		c.want(turnedLead, 2, turnedPass, 10, turnedHit, 1)
	})
}

// TestUnshareableStream: who followed has had all of it.
func TestUnshareableStream(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		f := c.lead()
		for _, n := range w.nodes {
			c.join(n, 1, Ask{Key: k, Live: true})
		}
		f.Begin("text/event-stream")
		f.Write([]byte("all"))
		synctest.Wait()
		f.Unshareable()
		c.want(turnedLead, 1, turnedLive, 3)
		for _, turn := range c.got {
			if turn.Kind == TurnLive {
				if got, err := readAll(turn.Live); err != nil || string(got) != "all" {
					t.Errorf("%q, %v", got, err)
				}
			}
		}
	})
}

// TestShared goes to those who wait, and is stored nowhere.
func TestShared(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		for _, n := range w.nodes {
			c.join(n, 3, Ask{Key: k, MaxEntry: 10}) // too small for what comes, which is as good as Share
		}
		synctest.Wait()
		c.lead().Store(answerFor(k))
		c.want(turnedLead, 1, turnedHit, 8)
		synctest.Wait()
		c.join(w.nodes[2], 2, Ask{Key: k})
		synctest.Wait()
		c.lead().Share(answerFor(k))
		c.want(turnedLead, 2, turnedHit, 9)
		for _, n := range w.nodes {
			if n.shelf.has(k) {
				t.Errorf("node %d stored it", n.index)
			}
		}
	})
}

// TestFound: what was found elsewhere goes to those who wait as what it is, and is stored nowhere.
func TestFound(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		for _, n := range w.nodes {
			c.join(n, 2, Ask{Key: k})
		}
		synctest.Wait()
		en := answerFor(k)
		en.Via, en.Similarity, en.Stamp, en.Age = "e7", 0.875, 3, time.Minute
		c.lead().Store(en)
		c.want(turnedLead, 1, turnedHit, 5)
		for _, turn := range c.got {
			if h := turn.Hit; turn.Kind == TurnHit && (h.Via != en.Via || h.Similarity != en.Similarity || h.Stamp != en.Stamp || h.Age < time.Minute) {
				t.Errorf("%+v", h)
			}
		}
		for _, n := range w.nodes {
			if n.shelf.has(k) {
				t.Errorf("node %d stored it", n.index)
			}
		}
	})
}

// TestTooLarge: a stream that nobody can be given any more.
func TestTooLarge(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		f := c.lead()
		for _, n := range w.nodes {
			c.join(n, 1, Ask{Key: k, Live: true})
			c.join(n, 1, Ask{Key: k})
		}
		synctest.Wait()
		f.Begin("text/event-stream")
		chunk := bytes.Repeat([]byte("x"), 1<<20)
		for range 9 {
			f.Write(chunk)
		}
		c.want(turnedLead, 1, turnedLive, 3, turnedPass, 3)
		for _, turn := range c.got {
			if turn.Kind == TurnLive {
				if got, err := readAll(turn.Live); !errors.Is(err, ErrBroken) || len(got) > maxFlight {
					t.Errorf("%d bytes, %v", len(got), err)
				}
			}
		}
		c.join(w.nodes[2], 2, Ask{Key: k, Live: true})
		c.want(turnedLead, 1, turnedLive, 3, turnedPass, 5)
		f.Store(answerFor(k)) // its answer is small enough
		time.Sleep(time.Second)
		c.join(w.nodes[2], 2, Ask{Key: k, Live: true})
		c.want(turnedLead, 1, turnedLive, 3, turnedPass, 5, turnedHit, 2)
	})
}

// TestRoomForStreams: what streams on their way take together is bounded, on each node; one that there is no room
// for ends for who follows it, and can be stored. What is over takes nothing.
func TestRoomForStreams(t *testing.T) {
	for _, c := range [][2]int{{0, 1}, {1, 1}, {2, 1}, {0, 0}} { // where there is no room: with the leader, the owner, who follows, both
		at, owner := c[0], c[1]
		t.Run(fmt.Sprint(at, owner), func(t *testing.T) {
			fillTest(t, func(t *testing.T) {
				w := newWorld(t, 3)
				w.setRing(owner)
				w.nodes[at].room.most = 2500
				var fills []*Fill
				var crowds []*crowd
				for i := range 3 {
					c := newCrowd(w)
					ask := Ask{Key: fillKey(fmt.Sprint(i)), Live: true}
					c.join(w.nodes[0], 1, ask)
					f := c.lead()
					f.Begin("text/event-stream")
					synctest.Wait()
					c.join(w.nodes[2], 2, ask)
					synctest.Wait()
					f.Write(make([]byte, 1000))
					synctest.Wait()
					fills, crowds = append(fills, f), append(crowds, c)
				}
				if got := w.nodes[at].count("headgate_cache_flying_bytes"); got != 2000 {
					t.Errorf("%v bytes fly", got)
				}
				for i, f := range fills {
					f.Store(answerFor(fillKey(fmt.Sprint(i))))
					crowds[i].want(turnedLead, 1, turnedLive, 2)
					for _, turn := range crowds[i].got {
						if turn.Kind != TurnLive {
							continue
						}
						if got, err := readAll(turn.Live); errors.Is(err, ErrBroken) != (i == 2) || err == nil && len(got) != 1000 {
							t.Errorf("stream %d: %d bytes, %v", i, len(got), err)
						}
					}
					if _, ok := w.nodes[0].Look(fillKey(fmt.Sprint(i))); !ok {
						t.Errorf("answer %d is not stored", i)
					}
				}
			})
		})
	}
}

// TestLargeEntry crosses in pieces, and one that no store takes is not given to others.
func TestLargeEntry(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		f := c.lead()
		c.joinBody(w.nodes[0], k, 3<<20)
		synctest.Wait()
		f.Store(&Entry{Body: bytes.Repeat([]byte("x"), 3<<20), Life: Life{TTL: time.Hour}, Tags: []string{"a", "b"}})
		c.wg.Wait()
		c.join(w.nodes[1], 1, Ask{Key: fillKey("r")})
		f = c.lead()
		c.join(w.nodes[0], 1, Ask{Key: fillKey("r")})
		synctest.Wait()
		f.Store(&Entry{Body: make([]byte, maxEntry+1)})
		c.want(turnedLead, 2, turnedPass, 1)
	})
}

// joinBody has a request wait for a body of that size.
func (c *crowd) joinBody(n *peerNode, k Key, size int) {
	c.wg.Go(func() {
		turn, err := n.Join(context.Background(), &Ask{Key: k})
		if err != nil || turn.Kind != TurnHit || len(turn.Hit.Body) != size || len(turn.Hit.Tags) != 2 {
			c.w.t.Errorf("%v, %v", turn.Kind, err)
		}
	})
}

// TestRefresh takes nothing that is stored, but what is on its way.
func TestRefresh(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		c.lead().Store(answerFor(k))
		synctest.Wait()
		c.join(w.nodes[2], 2, Ask{Key: k, Refresh: true})
		f := c.lead()
		c.join(w.nodes[0], 2, Ask{Key: k, Refresh: true})
		c.join(w.nodes[1], 1, Ask{Key: k})
		synctest.Wait()
		if c.turns[TurnHit] != 1 {
			t.Errorf("%v", c.turns)
		}
		f.Store(answerFor(k))
		c.want(turnedLead, 2, turnedHit, 4)
	})
}

// TestEarly never waits: one leads, the others have nothing to do, or get what another has refreshed.
func TestEarly(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		c.lead().Store(answerFor(k))
		time.Sleep(time.Minute)
		early := Ask{Key: k, Early: true, Age: time.Minute}
		c.join(w.nodes[1], 1, early)
		f := c.lead()
		for _, n := range w.nodes {
			c.join(n, 2, early)
		}
		c.want(turnedLead, 2, turnedBusy, 6)
		time.Sleep(time.Second)
		f.Store(answerFor(k))
		synctest.Wait()
		early.Age += time.Second
		c.join(w.nodes[2], 1, early) // the owner has a younger one
		c.want(turnedLead, 2, turnedBusy, 6, turnedHit, 1)
		if h, ok := w.nodes[2].Look(k); !ok || h.Age > 2*time.Second {
			t.Errorf("node 2 has one of %v", h.Age)
		}
		c.join(w.nodes[2], 1, Ask{Key: k, Refresh: true})
		f = c.lead()
		c.join(w.nodes[2], 1, early)
		c.want(turnedLead, 3, turnedBusy, 7, turnedHit, 1)
		f.Abandon(true)
	})
}

// TestFailedRefresh: a model that fails is not asked by every hit of what is stale. One that was not even asked
// may be by the next.
func TestFailedRefresh(t *testing.T) {
	for owner, name := range []string{"the owner's", "another node's"} {
		t.Run(name, func(t *testing.T) {
			fillTest(t, func(t *testing.T) {
				w, k := newWorld(t, 2), fillKey("q")
				n := w.nodes[owner]
				en := answerFor(k)
				en.Key, en.Stamp, en.Life = k, 1, Life{TTL: time.Minute, Stale: time.Hour}
				n.shelf.Put(en)
				time.Sleep(2 * time.Minute)
				refresh := func(end func(*Fill)) {
					t.Helper()
					h, ok := n.Look(k)
					if !ok || !h.Refresh {
						t.Fatalf("nobody is to refresh it: %v", ok)
					}
					turn, err := n.Join(n.ctx, &Ask{Key: k, Early: true, Age: h.Age})
					if err != nil || turn.Kind != TurnLead {
						t.Fatal(turn.Kind, err)
					}
					end(turn.Fill)
					synctest.Wait()
				}
				refresh((*Fill).Refused)
				for _, end := range []func(*Fill){
					func(f *Fill) { f.Failed(Failure{Status: 500}) }, func(f *Fill) { f.Abandon(true) }, func(f *Fill) { f.Abandon(false) }, (*Fill).Unshareable,
				} {
					refresh(end)
					time.Sleep(refreshPause - time.Millisecond)
					if h, ok := n.Look(k); !ok || h.Refresh {
						t.Errorf("it is asked again at once: %v", ok)
					}
					time.Sleep(2 * passFor) // what is unshareable is over by then
				}
				refresh((*Fill).Refused)
			})
		})
	}
}

// TestStale goes with the lead: it is what to serve where the model fails.
func TestStale(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		en := answerFor(k)
		en.Life = Life{TTL: time.Minute, Stale: time.Minute, StaleIfError: time.Hour}
		c.lead().Store(en)
		time.Sleep(80 * time.Second)
		c.join(w.nodes[0], 2, Ask{Key: k}) // one is to refresh it
		c.want(turnedLead, 1, turnedHit, 2)
		refresh := 0
		for _, turn := range c.got {
			if turn.Kind == TurnHit && !turn.Hit.Stale {
				t.Error("it is not stale")
			}
			if turn.Hit.Refresh {
				refresh++
			}
		}
		if refresh != 1 {
			t.Errorf("%d are to refresh it", refresh)
		}
		time.Sleep(time.Minute)
		c.join(w.nodes[2], 1, Ask{Key: k})
		f := c.lead()
		c.join(w.nodes[2], 1, Ask{Key: k})
		synctest.Wait()
		for _, turn := range c.got[1:] {
			if turn.Kind == TurnLead && (turn.Stale == nil || !turn.Stale.Stale || turn.Stale.Key != k) {
				t.Error("a lead without what may be served")
			}
		}
		f.Unshareable()
		c.want(turnedLead, 2, turnedHit, 2, turnedPass, 1)
	})
}

// TestOwnerOut: its successor stands in for it, then each node for itself.
func TestOwnerOut(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w := newWorld(t, 5)
		w.nodes[0].kill()
		for i, want := range []int{1, 3} { // leads, as 1 and 2 are out, too, the second time
			k := fillKey(fmt.Sprint(i))
			c := newCrowd(w)
			for _, n := range w.nodes[2:] {
				c.join(n, 10, Ask{Key: k})
			}
			for range want {
				f := c.lead()
				time.Sleep(5 * time.Second)
				go f.Store(answerFor(k))
			}
			c.want(turnedLead, want, turnedHit, 30-want)
			w.nodes[1].kill()
		}
		if got := w.nodes[4].count("headgate_cache_lockless_total"); got == 0 {
			t.Error("nothing is lockless")
		}
	})
}

// TestOwnerSilent: behind a cut there is no refusal, and it takes a second until the successor is asked.
func TestOwnerSilent(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 4), fillKey("q")
		w.net.Cut("n0", "n1", "n2", "n3")
		c, start := newCrowd(w), time.Now()
		for _, n := range w.nodes[1:] {
			c.join(n, 10, Ask{Key: k})
		}
		f := c.lead()
		if took := time.Since(start); took > 2*helloFor {
			t.Errorf("it took %v", took)
		}
		synctest.Wait()
		w.net.Heal()
		time.Sleep(10 * time.Second)
		f.Store(answerFor(k))
		c.want(turnedLead, 1, turnedHit, 29)
		time.Sleep(10 * time.Second)
		if !w.nodes[0].shelf.has(k) {
			t.Error("the owner did not get it when it was back")
		}
	})
}

// TestSaidTwice: an answer that the owner may not have heard is brought to the next.
func TestSaidTwice(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[2], 1, Ask{Key: k})
		f := c.lead()
		synctest.Wait()
		w.net.Cut("n2", "n0")
		f.Store(answerFor(k))
		time.Sleep(lockTTL + helloFor)
		synctest.Wait()
		if w.nodes[0].shelf.has(k) || !w.nodes[1].shelf.has(k) {
			t.Error("the successor has not got it")
		}
		c.join(w.nodes[1], 1, Ask{Key: k})
		c.want(turnedLead, 1, turnedHit, 1)
	})
}

// TestOwnerLeaves, in order, with a call under way elsewhere: its leader is known to the successor.
func TestOwnerLeaves(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 4), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[2], 1, Ask{Key: k})
		f := c.lead()
		c.join(w.nodes[3], 3, Ask{Key: k, Live: true})
		synctest.Wait()
		w.nodes[0].Exact.Close()
		time.Sleep(5 * time.Second)
		f.Begin("text/event-stream")
		f.Write([]byte("all"))
		synctest.Wait()
		f.Store(answerFor(k))
		for len(c.leads) > 0 {
			(<-c.leads).Fill.Store(answerFor(k))
		}
		c.wg.Wait()
		if c.turns[TurnLead] > 2 || len(c.got) != 4 {
			t.Errorf("%v", c.turns)
		}
		for _, turn := range c.got {
			if turn.Kind == TurnLive {
				if got, err := readAll(turn.Live); err != nil || string(got) != "all" {
					t.Errorf("%q, %v", got, err)
				}
			}
		}
		time.Sleep(time.Second)
		if !w.nodes[1].shelf.has(k) {
			t.Error("the successor has not got it")
		}
	})
}

// TestViewChanges in the middle of a flight: at most one more call, and the new owner gets the answer.
func TestViewChanges(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 4), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[2], 1, Ask{Key: k})
		one := c.lead()
		c.join(w.nodes[2], 3, Ask{Key: k})
		c.join(w.nodes[1], 3, Ask{Key: k})
		synctest.Wait()
		w.setRing(3)
		c.join(w.nodes[1], 1, Ask{Key: k}) // goes on with those of its node
		c.join(w.nodes[0], 3, Ask{Key: k})
		c.join(w.nodes[3], 3, Ask{Key: k})
		two := c.lead()
		one.Store(answerFor(k))
		synctest.Wait()
		if !w.nodes[3].shelf.has(k) {
			t.Error("the new owner has not got it")
		}
		two.Store(answerFor(k))
		c.want(turnedLead, 2, turnedHit, 12)
	})
}

// TestOwnersDisagree: two nodes that each take the other for the owner do not wait for each other.
func TestOwnersDisagree(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		w.nodes[0].cfg.Ring = func(Key) []string { return []string{w.nodes[1].host.Address(fillPort), ""} }
		w.nodes[1].cfg.Ring = func(Key) []string { return []string{w.nodes[0].host.Address(fillPort), ""} }
		c := newCrowd(w)
		for _, n := range w.nodes {
			c.join(n, 5, Ask{Key: k})
		}
		synctest.Wait()
		c.lead().Store(answerFor(k))
		c.lead().Store(answerFor(k))
		c.want(turnedLead, 2, turnedHit, 8)
	})
}

// TestInvalidated: what was invalidated while it was filled is given to nobody; the next asks anew.
func TestInvalidated(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[1], 1, Ask{Key: k})
		f := c.lead()
		for _, n := range w.nodes {
			c.join(n, 2, Ask{Key: k})
		}
		synctest.Wait()
		w.invalidate("doc")
		tagged := answerFor(k)
		tagged.Tags = []string{"doc"}
		f.Store(tagged)
		c.lead().Store(tagged)
		c.want(turnedLead, 2, turnedHit, 5)
		w.invalidate("doc")
		c.join(w.nodes[2], 1, Ask{Key: k})
		c.lead().Store(tagged)
		c.want(turnedLead, 3, turnedHit, 5)
	})
}

// TestEndsAtOnce: who asks this node after a lead of its own flight has ended has no part in it, though the
// end may still be on its way.
func TestEndsAtOnce(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(*Fill, *Entry)
		want TurnKind
	}{
		"stored":      {(*Fill).Store, TurnLead},
		"shared":      {(*Fill).Share, TurnLead},
		"unshareable": {func(f *Fill, _ *Entry) { f.Unshareable() }, TurnPass},
		"too large":   {func(f *Fill, _ *Entry) { f.Write(make([]byte, maxFlight+1)) }, TurnPass},
		"broken":      {func(f *Fill, _ *Entry) { f.Broken() }, TurnLead},
	} {
		t.Run(name, func(t *testing.T) {
			fillTest(t, func(t *testing.T) {
				n := newWorld(t, 2).nodes[0]
				for i := range 30 {
					k := fillKey(fmt.Sprint(i))
					first, err := n.Join(n.ctx, &Ask{Key: k, Live: true})
					if err != nil || first.Kind != TurnLead {
						t.Fatal(first.Kind, err)
					}
					first.Fill.Begin("text/event-stream")
					first.Fill.Write([]byte("x"))
					c.end(first.Fill, answerFor(k))
					second, err := n.Join(n.ctx, &Ask{Key: k, Live: true, Refresh: true})
					if err != nil || second.Kind != c.want {
						t.Fatalf("%d: turn %d, %v", i, second.Kind, err)
					}
					if second.Fill != nil {
						second.Fill.Store(answerFor(k))
					}
					first.Fill.Abandon(true)
				}
			})
		})
	}
}

// TestEndsForThoseBefore: who waits as a lead of this very node ends is answered by it, also where it says
// more before it hears of that.
func TestEndsForThoseBefore(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[0], 1, Ask{Key: k})
		f := c.lead()
		c.join(w.nodes[1], 5, Ask{Key: k})
		c.join(w.nodes[2], 5, Ask{Key: k})
		synctest.Wait()
		w.nodes[0].held(func() { // as if the last word were on its way
			w.nodes[0].referee.ending(k, f.token, true, false, wallNow())
		})
		c.join(w.nodes[1], 5, Ask{Key: k, Live: true})
		c.join(w.nodes[0], 1, Ask{Key: k, Refresh: true})
		synctest.Wait()
		if len(c.leads) == 0 {
			t.Error("it waits for what has ended")
		}
		after := c.lead()
		f.Store(answerFor(k))
		synctest.Wait()
		after.Store(answerFor(k))
		c.want(turnedLead, 2, turnedHit, 15)
	})
}

// TestEndsWithoutAnAnswer: those for whom a flight was over, and who then get nothing of it, ask anew.
func TestEndsWithoutAnAnswer(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[0], 1, Ask{Key: k})
		f := c.lead()
		c.join(w.nodes[1], 5, Ask{Key: k})
		synctest.Wait()
		w.nodes[0].held(func() { w.nodes[0].referee.ending(k, f.token, true, false, wallNow()) })
		f.Abandon(true)
		c.lead().Store(answerFor(k))
		c.want(turnedLead, 2, turnedHit, 4)
	})
}

// TestRefused: any number of requests that were refused before the model was asked may come before one that is not.
func TestRefused(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		c := newCrowd(w)
		for range 3 * maxGiven {
			c.join(w.nodes[0], 1, Ask{Key: k})
			c.join(w.nodes[1], 1, Ask{Key: k})
		}
		for range 4 * maxGiven {
			c.lead().Refused()
		}
		c.lead().Store(answerFor(k))
		c.want(turnedLead, 4*maxGiven+1, turnedHit, 2*maxGiven-1)
	})
}

// TestInvalidatedStream: who asks after a tag of the request was invalidated does not follow a stream that began
// before, on any node; who followed before has it to its end; and nobody gets it as an answer.
func TestInvalidatedStream(t *testing.T) {
	for _, late := range []bool{false, true} { // it begins after that
		for leader := range 3 {
			t.Run(fmt.Sprint(leader, late), func(t *testing.T) {
				fillTest(t, func(t *testing.T) { testInvalidatedStream(t, leader, late) })
			})
		}
	}
}

// TestInvalidatedWaits: who waits for the answer that a stream will come to does not wait for its end, nor is
// anything needed for that but time; and the next stream is followed in the place of the one before.
func TestInvalidatedWaits(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		ask := Ask{Key: k, Tenant: "acme", Tags: []string{"doc"}}
		c := newCrowd(w)
		c.join(w.nodes[1], 1, ask)
		f := c.lead()
		f.Begin("text/event-stream")
		c.join(w.nodes[1], 1, ask)
		synctest.Wait()
		w.invalidate("doc")
		time.Sleep(2 * beatEvery)
		if len(c.leads) == 0 {
			t.Error("it waits for what it will not get")
		}
		second := c.lead()
		second.Begin("text/event-stream")
		second.Write([]byte("new"))
		ask.Live = true
		c.join(w.nodes[1], 3, ask)
		synctest.Wait()
		second.Store(answerFor(k))
		f.Abandon(true)
		c.want(turnedLead, 2, turnedLive, 3)
		for _, turn := range c.got {
			if turn.Kind == TurnLive {
				if got, err := readAll(turn.Live); err != nil || string(got) != "new" {
					t.Errorf("%q, %v", got, err)
				}
			}
		}
		if got := w.nodes[0].count("headgate_cache_handovers_total", handInvalid); got != 1 {
			t.Errorf("%v handovers are counted", got)
		}
	})
}

// TestInvalidatedAfterTheOwnerDied: what a stream depends on is known to the successor, too.
func TestInvalidatedAfterTheOwnerDied(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		ask := Ask{Key: k, Live: true, Tenant: "acme", Tags: []string{"doc"}}
		c := newCrowd(w)
		c.join(w.nodes[1], 1, ask)
		f := c.lead()
		f.Begin("text/event-stream")
		f.Write([]byte("old"))
		synctest.Wait()
		w.nodes[0].kill()
		time.Sleep(time.Second)
		w.invalidate("doc")
		c.join(w.nodes[2], 1, ask)
		c.lead().Store(answerFor(k))
		f.Abandon(true)
		c.want(turnedLead, 2)
	})
}

func testInvalidatedStream(t *testing.T, leader int, late bool) {
	w, k := newWorld(t, 3), fillKey("q")
	ask := Ask{Key: k, Live: true, Tenant: "acme", Tags: []string{"doc"}}
	before, after := newCrowd(w), newCrowd(w)
	before.join(w.nodes[leader], 1, ask)
	f := before.lead()
	begin := func() {
		f.Begin("text/event-stream")
		f.Write([]byte("old "))
		synctest.Wait()
	}
	followers := 0
	if !late {
		begin()
		for _, n := range w.nodes {
			before.join(n, 2, ask)
		}
		followers = 6
		synctest.Wait()
	}
	w.invalidate("doc")
	for _, n := range w.nodes {
		after.join(n, 2, ask)
		asked := ask
		asked.Live = false
		after.join(n, 1, asked)
	}
	synctest.Wait()
	if late {
		begin()
	}
	second := after.lead() // while the first goes on
	second.Begin("text/event-stream")
	second.Write([]byte("new"))
	synctest.Wait()
	f.Write([]byte("end"))
	old := answerFor(k)
	old.Tenant, old.Tags = ask.Tenant, ask.Tags
	f.Store(old)
	synctest.Wait()
	fresh := answerFor(k)
	fresh.Tenant, fresh.Tags = ask.Tenant, ask.Tags
	second.Store(fresh)
	before.want(turnedLead, 1, turnedLive, followers)
	after.wg.Wait()
	if after.turns[TurnLead] != 1 || after.turns[TurnLive]+after.turns[TurnHit] != 8 || after.errs > 0 {
		t.Errorf("who came after: %v, %d errors", after.turns, after.errs)
	}
	for _, turn := range before.got {
		if turn.Kind != TurnLive {
			continue
		}
		if got, err := readAll(turn.Live); err != nil || string(got) != "old end" {
			t.Errorf("who came before has %q, %v", got, err)
		}
	}
	for _, turn := range after.got {
		switch turn.Kind {
		case TurnLive:
			if got, err := readAll(turn.Live); err != nil || string(got) != "new" {
				t.Errorf("who came after has %q, %v", got, err)
			}
		case TurnHit:
			if turn.Hit.Stamp != 2 {
				t.Errorf("who came after has an answer of before")
			}
		}
	}
}

// TestDeafOwner has not heard of an invalidation that the others have: they do not take its word.
func TestDeafOwner(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 3), fillKey("q")
		c := newCrowd(w)
		tagged := answerFor(k)
		tagged.Tags = []string{"doc"}
		c.join(w.nodes[0], 1, Ask{Key: k})
		c.lead().Store(tagged)
		synctest.Wait()
		w.nodes[0].deaf.Store(true)
		w.invalidate("doc")
		c.join(w.nodes[2], 4, Ask{Key: k})
		synctest.Wait() // who comes when the answer has just ended may ask anew: the owner is another node
		c.lead().Store(tagged)
		c.want(turnedLead, 2, turnedHit, 3)
	})
}

// TestClosed: who waits passes, and so does who comes later; a fill can still be ended.
func TestClosed(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[0], 3, Ask{Key: k})
		f := c.lead()
		client, leave := context.WithCancel(context.Background())
		ctx, cancel := f.Context(client)
		defer cancel()
		synctest.Wait()
		w.nodes[0].Exact.Close()
		c.join(w.nodes[0], 2, Ask{Key: k})
		c.want(turnedLead, 1, turnedPass, 4)
		if ctx.Err() != nil {
			t.Error("the leader's own client waits for it")
		}
		leave()
		synctest.Wait()
		if ctx.Err() == nil {
			t.Error("nobody waits for it")
		}
		f.Store(answerFor(k))
		w.nodes[0].Exact.Close()
		if err := w.nodes[0].Run(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

// TestMany: each owner is asked once, and what is put is there and here.
func TestMany(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w := newWorld(t, 4)
		order := func(k Key) []int { return []int{int(k[0]) % 4, int(k[0]+1) % 4} }
		w.ring.Store(&order)
		var keys []Key
		var put []Entry
		for i := range 200 {
			k := fillKey(fmt.Sprint(i))
			keys = append(keys, k)
			en := answerFor(k)
			en.Key, en.Stamp = k, 1
			if i%2 == 0 {
				put = append(put, *en)
			}
		}
		tagged := *answerFor(keys[1])
		tagged.Key, tagged.Tags = keys[1], []string{"doc"}
		w.invalidate("doc")
		w.nodes[0].PutMany(append(put, tagged))
		time.Sleep(time.Second)
		for _, n := range w.nodes[:3] {
			for i, h := range n.GetMany(context.Background(), keys) {
				if (h.Entry != nil) != (i%2 == 0) || h.Entry != nil && (h.Key != keys[i] || !bytes.Equal(h.Body, answerFor(keys[i]).Body)) {
					t.Errorf("node %d, %d: %v", n.index, i, h)
				}
			}
			if got := n.peers("get"); n.index > 0 && got != 3 {
				t.Errorf("node %d asked %d times", n.index, got)
			}
		}
		w.net.Cut("n3", "n0", "n1", "n2")
		start := time.Now()
		for i, h := range w.nodes[3].GetMany(context.Background(), keys) {
			if (h.Entry != nil) != (i%2 == 0 && int(keys[i][0])%4 == 3) {
				t.Errorf("%d: %v", i, h)
			}
		}
		if took := time.Since(start); took > manyFor {
			t.Errorf("it took %v", took)
		}
		w.nodes[3].PutMany(put)
		time.Sleep(time.Minute)
		if got := w.nodes[3].count("headgate_cache_unsent_total"); got == 0 {
			t.Error("entries that did not arrive are not counted")
		}
	})
}

// TestManyOfAnAge: many are found with their age, and whether they are stale; what is stale is not kept by
// another node, and whoever comes next is still the one to refresh it.
func TestManyOfAnAge(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w := newWorld(t, 2)
		owner, other := w.nodes[0], w.nodes[1]
		en := answerFor(fillKey("q"))
		en.Key, en.Stamp, en.Life = fillKey("q"), 1, Life{TTL: time.Hour, Stale: time.Hour}
		other.PutMany([]Entry{*en})
		time.Sleep(time.Minute)
		other.shelf.forget(en.Key)
		get := func(n *peerNode) Hit { return n.GetMany(context.Background(), []Key{en.Key})[0] }
		for _, tier := range []Tier{Owner, Local} { // the second time it is here
			if h := get(other); h.Entry == nil || h.Age.Round(time.Second) != time.Minute || h.Stale || h.Refresh || h.Tier != tier {
				t.Errorf("want a minute old, of tier %s: %+v", tier, h)
			}
		}
		other.shelf.forget(en.Key)
		time.Sleep(75 * time.Minute)
		for n, tier := range map[*peerNode]Tier{other: Owner, owner: Local} {
			for range 2 {
				if h := get(n); h.Entry == nil || h.Age.Round(time.Second) != 76*time.Minute || !h.Stale || h.Refresh || h.Tier != tier {
					t.Errorf("want it stale, of tier %s: %+v", tier, h)
				}
			}
		}
		if other.shelf.has(en.Key) {
			t.Error("another node keeps what is stale")
		}
		if h, ok := owner.Look(en.Key); !ok || !h.Refresh {
			t.Error("nobody is left to refresh it")
		}
	})
}

// peers counts calls of other nodes that came to their end.
func (n *peerNode) peers(call string) (count uint64) {
	families, _ := n.reg.Gather()
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "headgate_cache_peer_seconds" && m.GetLabel()[0].GetValue() == call {
				count += m.GetHistogram().GetSampleCount()
			}
		}
	}
	return count
}

// TestBadPeers: what no node would say ends its link, and harms no other.
func TestBadPeers(t *testing.T) {
	k, other := fillKey("q"), fillKey("other")
	ask := &pb.Up{Kind: pb.Up_ASK, Ask: &pb.Ask{Key: k[:]}, Waits: true}
	leads := &pb.Up{Kind: pb.Up_ASK, Ask: &pb.Ask{Key: k[:], Leads: []uint64{7}}}
	foreign, right := encodeEntry(answerFor(k), 0), encodeEntry(answerFor(k), 0)
	foreign.Key, right.Key = other[:], k[:]
	for name, ups := range map[string][]*pb.Up{
		"no ask":            {{Kind: pb.Up_WANTS}},
		"two asks":          {ask, ask},
		"a short key":       {{Kind: pb.Up_ASK, Ask: &pb.Ask{Key: []byte("short")}}},
		"a negative time":   {{Kind: pb.Up_ASK, Ask: &pb.Ask{Key: k[:], LeadFor: -1}}},
		"many leads":        {{Kind: pb.Up_ASK, Ask: &pb.Ask{Key: k[:], Leads: make([]uint64, 100)}}},
		"unknown":           {ask, {Kind: 99}},
		"more of nothing":   {ask, {Kind: pb.Up_MORE, Data: []byte("x")}},
		"a huge body":       {ask, {Kind: pb.Up_STORE, Token: 7, Entry: right, Rest: 1 << 60}},
		"an endless body":   {ask, {Kind: pb.Up_STORE, Token: 7, Entry: right, Rest: 3}, {Kind: pb.Up_MORE, Data: []byte("long")}},
		"half a body":       {ask, {Kind: pb.Up_STORE, Token: 7, Entry: right, Rest: 3}, {Kind: pb.Up_BROKEN, Token: 7}},
		"no entry":          {leads, {Kind: pb.Up_STORE, Token: 7}},
		"a foreign entry":   {leads, {Kind: pb.Up_STORE, Token: 7, Entry: foreign}},
		"no status":         {leads, {Kind: pb.Up_FAILED, Token: 7}},
		"about another":     {leads, {Kind: pb.Up_BEGIN, Token: 7, Entry: foreign}},
		"about nothing":     {leads, {Kind: pb.Up_BEGIN, Token: 7, Entry: &pb.Entry{Key: []byte("short")}}},
		"a long type":       {leads, {Kind: pb.Up_BEGIN, Token: 7, ContentType: make([]byte, 1<<16)}},
		"a negative length": {leads, {Kind: pb.Up_STORE, Token: 7, Entry: &pb.Entry{Key: k[:], Ttl: -1}}},
	} {
		t.Run(name, func(t *testing.T) {
			fillTest(t, func(t *testing.T) {
				w := newWorld(t, 2)
				c := newCrowd(w)
				if ups[0] != leads {
					c.join(w.nodes[0], 3, Ask{Key: k})
					synctest.Wait()
				}
				conn, err := w.nodes[1].client(w.nodes[0].host.Address(fillPort))
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				stream, err := pb.NewExactClient(conn).Join(ctx)
				for _, u := range ups {
					if err == nil {
						err = stream.Send(u)
					}
				}
				for err == nil {
					_, err = stream.Recv()
				}
				if status.Code(err) != codes.InvalidArgument {
					t.Errorf("it ended with %v", err)
				}
				if got := w.nodes[0].count("headgate_cache_malformed_total"); got != 1 {
					t.Errorf("%v counted", got)
				}
				if ups[0] == leads {
					c.join(w.nodes[0], 3, Ask{Key: k})
				}
				synctest.Wait()
				c.lead().Store(answerFor(k))
				c.want(turnedLead, 1, turnedHit, 2)
			})
		})
	}
}

// answers says the same to whoever joins.
type answers struct {
	pb.UnimplementedExactServer
	downs []*down
}

func (a *answers) Join(stream grpc.BidiStreamingServer[pb.Up, pb.Down]) error {
	for _, m := range encodeDowns(a.downs) {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return nil
}

// TestBadOwner: an owner that answers with the entry of another key is not heard any further. Nothing of the
// entry is served, or kept.
func TestBadOwner(t *testing.T) {
	k, other := fillKey("q"), fillKey("other")
	foreign := answerFor(other)
	foreign.Key = other
	hit := Hit{Entry: foreign}
	for name, d := range map[string]*down{
		"stored": {kind: downHit, hit: hit, stored: true, keep: true},
		"stream": {kind: downBegin, token: 7, about: &Entry{Key: other}},
		"live":   {kind: downHit, hit: hit},
		"lead":   {kind: downLead, token: 7, hit: hit},
		"failed": {kind: downFailed, failure: Failure{Status: 500}, hit: hit},
		"pass":   {kind: downPass, hit: hit},
	} {
		t.Run(name, func(t *testing.T) {
			fillTest(t, func(t *testing.T) {
				w := newWorld(t, 1)
				n, host := w.nodes[0], w.net.Host("bad")
				lis, err := host.Listen(fillPort)
				if err != nil {
					t.Fatal(err)
				}
				server := grpc.NewServer()
				pb.RegisterExactServer(server, &answers{downs: []*down{{kind: downBeat}, d}})
				go func() { _ = server.Serve(lis) }()
				defer server.Stop()
				n.cfg.Ring = func(Key) []string { return []string{host.Address(fillPort)} }
				c := newCrowd(w)
				c.join(n, 3, Ask{Key: k})
				select {
				case turn := <-c.leads:
					if turn.Stale != nil {
						t.Error("a foreign answer may be served where the model fails")
					}
					turn.Fill.Store(answerFor(k))
				case <-time.After(time.Minute):
					t.Error("nobody leads")
				}
				c.want(turnedLead, 1, turnedHit, 2)
				if n.shelf.has(other) {
					t.Error("the foreign answer is kept")
				}
				if n.count("headgate_cache_malformed_total") == 0 {
					t.Error("it is not counted")
				}
			})
		})
	}
}

// TestForgedLead: only who was given a lead can end it.
func TestForgedLead(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		c := newCrowd(w)
		c.join(w.nodes[0], 3, Ask{Key: k})
		f := c.lead()
		conn, _ := w.nodes[1].client(w.nodes[0].host.Address(fillPort))
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		stream, err := pb.NewExactClient(conn).Join(ctx)
		if err != nil {
			t.Fatal(err)
		}
		en := encodeEntry(answerFor(k), 0)
		en.Key, en.Body = k[:], []byte("forged")
		for _, u := range []*pb.Up{
			{Kind: pb.Up_ASK, Ask: &pb.Ask{Key: k[:]}, Waits: true},
			{Kind: pb.Up_BEGIN, Token: f.token},
			{Kind: pb.Up_DATA, Token: f.token, Data: []byte("forged")},
			{Kind: pb.Up_STORE, Token: f.token, Entry: en},
			{Kind: pb.Up_FAILED, Token: f.token, Status: 500},
		} {
			if err := stream.Send(u); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		f.Store(answerFor(k))
		c.want(turnedLead, 1, turnedHit, 2)
	})
}

// TestBadCalls: the other calls refuse nonsense, too.
func TestBadCalls(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		w, k := newWorld(t, 2), fillKey("q")
		conn, _ := w.nodes[1].client(w.nodes[0].host.Address(fillPort))
		client := pb.NewExactClient(conn)
		for _, keys := range [][][]byte{{[]byte("short")}, make([][]byte, maxMany+1)} {
			stream, err := client.Get(context.Background(), &pb.GetRequest{Keys: keys})
			if err == nil {
				_, err = stream.Recv()
			}
			if status.Code(err) != codes.InvalidArgument {
				t.Errorf("%v", err)
			}
		}
		for _, p := range []*pb.Piece{{Data: []byte("more")}, {Entry: &pb.Entry{Key: []byte("short")}}, {Entry: encodeEntry(&Entry{Key: k}, 0), Rest: 1 << 40}} {
			stream, err := client.Put(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			_ = stream.Send(p)
			if _, err = stream.CloseAndRecv(); status.Code(err) != codes.InvalidArgument {
				t.Errorf("%v", err)
			}
		}
	})
}

// TestConfig names what is missing.
func TestConfig(t *testing.T) {
	_, err := NewExact(Config{Store: &shelf{}})
	if err == nil || !strings.Contains(err.Error(), "Ring") {
		t.Error(err)
	}
	full := Config{
		Store: &shelf{}, Ring: func(Key) []string { return nil }, Client: (*peerNode)(nil).client, Valid: func(*Entry) bool { return true },
		Stamp: func() uint64 { return 0 }, Now: wallNow, Rand: rand.New(rand.NewPCG(1, 1)), MaxEntry: maxEntry + 1,
	}
	if _, err := NewExact(full); err == nil || !strings.Contains(err.Error(), "MaxEntry") {
		t.Error(err)
	}
}

// TestLooksWithoutTheLock: what is put between a look and the lock is looked for again, without it.
func TestLooksWithoutTheLock(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		e := newWorld(t, 1).nodes[0].Exact
		for found, wantLooks := range map[int]int{1: 1, 2: 2, maxLooks: maxLooks, 100: maxLooks} {
			looks := 0
			_, ok := e.lookThenLock(func() (Hit, bool) {
				if !e.mu.TryLock() {
					t.Fatal("the lock is held round a look")
				}
				e.mu.Unlock()
				looks++
				return Hit{}, looks == found
			}, func() bool {
				if e.mu.TryLock() {
					t.Fatal("it is not held where that decides")
				}
				return true
			})
			if ok != (found <= maxLooks) || looks != wantLooks || e.mu.TryLock() == !ok {
				t.Errorf("found at look %d: %v after %d", found, ok, looks)
			}
			e.mu.Unlock()
		}
	})
}

// TestWithStore: what is found at once in a real store, too.
func TestWithStore(t *testing.T) {
	fillTest(t, func(t *testing.T) {
		s, err := NewStore(StoreConfig{MaxBytes: 8 << 20, MaxEntry: 1 << 20, Now: wallNow, Rand: rand.New(rand.NewPCG(1, 2))})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		e, err := NewExact(Config{
			Store: s, Ring: func(Key) []string { return nil }, Client: (*peerNode)(nil).client, Valid: func(*Entry) bool { return true },
			Stamp: func() uint64 { return 5 }, Now: wallNow, Rand: rand.New(rand.NewPCG(1, 1)),
		})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		for i := range 200 {
			k := fillKey(fmt.Sprint(i))
			turn, err := e.Join(context.Background(), &Ask{Key: k})
			if err != nil || turn.Kind != TurnLead {
				t.Fatalf("%v, %v", turn.Kind, err)
			}
			turn.Fill.Store(answerFor(k))
			turn, err = e.Join(context.Background(), &Ask{Key: k})
			if err != nil || turn.Kind != TurnHit || turn.Hit.Tier != Local || turn.Hit.Stamp != 5 || !bytes.Equal(turn.Hit.Body, answerFor(k).Body) {
				t.Fatalf("%v, %v", turn, err)
			}
		}
	})
}

// BenchmarkLead is a request that nobody else wants anything of: one node, and another's key.
func BenchmarkLead(b *testing.B) {
	for _, remote := range []bool{false, true} {
		b.Run(fmt.Sprintf("remote=%v", remote), func(b *testing.B) {
			benchLead(b, remote)
		})
	}
}

func benchLead(b *testing.B, remote bool) {
	b.ReportAllocs()
	owner := benchExact(b, nil, nil)
	e := owner
	if remote {
		lis := bufconn.Listen(1 << 20)
		server := grpc.NewServer()
		owner.Register(server)
		go func() { _ = server.Serve(lis) }()
		conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return lis.Dial() }))
		if err != nil {
			b.Fatal(err)
		}
		defer server.Stop()
		defer conn.Close()
		e = benchExact(b, func(Key) []string { return []string{"x"} }, func(string) (grpc.ClientConnInterface, error) { return conn, nil })
	}
	var k Key
	for i := 0; b.Loop(); i++ {
		k[0], k[1], k[2] = byte(i), byte(i>>8), byte(i>>16)
		turn, err := e.Join(context.Background(), &Ask{Key: k, Refresh: true})
		if err != nil || turn.Kind != TurnLead {
			b.Fatal(turn.Kind, err)
		}
		turn.Fill.Share(&Entry{})
	}
	b.StopTimer()
	e.Close()
	owner.Close()
}

func benchExact(b *testing.B, ring func(Key) []string, client func(string) (grpc.ClientConnInterface, error)) *Exact {
	if ring == nil {
		ring = func(Key) []string { return nil }
		client = func(string) (grpc.ClientConnInterface, error) { return nil, net.ErrClosed }
	}
	s := &shelf{now: wallNow, valid: func(*Entry) bool { return true }, filled: map[Key]int64{}, what: map[Key]*Entry{}, claims: map[Key]int64{}}
	e, err := NewExact(Config{
		Store: s, Ring: ring, Client: client, Valid: func(*Entry) bool { return true },
		Stamp: func() uint64 { return 5 }, Now: wallNow, Rand: rand.New(rand.NewPCG(1, 1)),
	})
	if err != nil {
		b.Fatal(err)
	}
	return e
}
