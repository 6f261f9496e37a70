package ledger

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// A history of registers: each name is one, a kill switch whose reason is its value.
type (
	registerInput struct {
		name  string
		value string // "": read
	}
	registerOutput struct {
		value   string
		unknown bool // a write that may or may not have been done
	}
)

func registers() porcupine.Model {
	return porcupine.Model{
		Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
			byName := map[string][]porcupine.Operation{}
			for _, o := range history {
				name := o.Input.(registerInput).name
				byName[name] = append(byName[name], o)
			}
			var parts [][]porcupine.Operation
			for _, part := range byName {
				parts = append(parts, part)
			}
			return parts
		},
		Init: func() any { return "" },
		Step: func(state, input, output any) (bool, any) {
			in, out := input.(registerInput), output.(registerOutput)
			if in.value == "" {
				return out.value == state.(string), state
			}
			return true, in.value
		},
	}
}

// recorder keeps a history. It is safe for concurrent use.
type recorder struct {
	mu         sync.Mutex
	operations []porcupine.Operation
	clock      int64
	known      int // writes whose outcome is known
}

func (r *recorder) now() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.clock++
	return r.clock
}

func (r *recorder) add(client int, call int64, in registerInput, out registerOutput) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.clock++
	returned := r.clock
	if out.unknown {
		returned = 1 << 62 // it may take effect whenever, or never: then it is last, where nobody looks
	} else if in.value != "" {
		r.known++
	}
	r.operations = append(r.operations, porcupine.Operation{ClientId: client, Input: in, Output: out, Call: call, Return: returned})
}

// client writes and reads at one node until ctx ends: reads only behind a barrier.
func client(ctx context.Context, c *testCluster, id int, at *testNode, random *rand.Rand, r *recorder) {
	for n := 0; ctx.Err() == nil; n++ {
		name := fmt.Sprintf("r%d", random.IntN(4))
		l := c.reach(at.addr, at.id)
		if l == nil {
			pause(ctx, 20*time.Millisecond)
			continue
		}
		call := r.now()
		if random.IntN(2) == 0 {
			value := fmt.Sprintf("%d.%d", id, n)
			within, cancel := context.WithTimeout(ctx, time.Second)
			_, err := l.Propose(within, set(name, value))
			cancel()
			switch {
			case err == nil:
				r.add(id, call, registerInput{name, value}, registerOutput{})
			case !errors.Is(err, ErrNoLeader):
				r.add(id, call, registerInput{name, value}, registerOutput{unknown: true})
			}
		} else if l.Barrier(ctx) == nil {
			r.add(id, call, registerInput{name: name}, registerOutput{value: get(l.Facts(), name)})
		}
		pause(ctx, time.Duration(random.IntN(int(20*time.Millisecond))))
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// disturb kills, cuts off and brings back nodes, the leader more often than not, one at a
// time so that a majority stays.
func disturb(ctx context.Context, c *testCluster, nodes []*testNode, random *rand.Rand) (times int) {
	for ctx.Err() == nil {
		pause(ctx, time.Duration(random.IntN(int(2*time.Second))))
		victim := nodes[random.IntN(len(nodes))]
		for _, n := range nodes {
			if random.IntN(4) > 0 && n.ledger.IsLeader() {
				victim = n
			}
		}
		times++
		if random.IntN(2) == 0 {
			c.kill(victim)
			pause(ctx, time.Duration(random.IntN(int(2*time.Second))))
			c.start(victim)
		} else {
			c.isolate(victim, true)
			pause(ctx, time.Duration(random.IntN(int(2*time.Second))))
			c.isolate(victim, false)
		}
	}
	return times
}

func TestLinearizable(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := new(recorder)
			inBubble(t, func(c *Config) {
				c.Servers = nil // who votes is not the subject
				c.SnapshotThreshold, c.TrailingLogs, c.SnapshotInterval = 200, 50, time.Second
			}, func(t *testing.T, c *testCluster) {
				nodes := c.bootstrap(3)
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				var clients sync.WaitGroup
				for id := range 6 {
					clients.Go(func() { client(ctx, c, id, nodes[id%3], rand.New(rand.NewPCG(seed, uint64(id))), r) })
				}
				disturbed := disturb(ctx, c, nodes, rand.New(rand.NewPCG(seed, 1000)))
				clients.Wait()
				if disturbed < 5 || r.known < 200 {
					t.Errorf("%d disturbances and %d writes: too little was tried", disturbed, r.known)
				}
				c.settled()
			})
			if result := porcupine.CheckOperationsTimeout(registers(), r.operations, 20*time.Second); result != porcupine.Ok {
				t.Errorf("seed %d: %d operations are %v", seed, len(r.operations), result)
			}
		})
	}
}

// TestCheckerFindsAStaleRead shows that the model can fail.
func TestCheckerFindsAStaleRead(t *testing.T) {
	r := new(recorder)
	r.add(0, r.now(), registerInput{"x", "1"}, registerOutput{})
	r.add(0, r.now(), registerInput{"x", "2"}, registerOutput{})
	r.add(1, r.now(), registerInput{name: "x"}, registerOutput{value: "1"})
	if porcupine.CheckOperations(registers(), r.operations) {
		t.Error("a stale read passed for linearizable")
	}
}
