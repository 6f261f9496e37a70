package ledger

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"headgate/limiter"
)

func TestWallWatch(t *testing.T) {
	var w wallWatch
	var acted []int
	start := time.Unix(1e9, 0)
	for second := range 190 {
		off := second >= 5 && second != 120 // right for a moment
		if w.due(start.Add(time.Duration(second)*time.Second), off) {
			acted = append(acted, second)
		}
	}
	if len(acted) != 3 || acted[0] != 15 || acted[1] != 75 || acted[2] != 135 {
		t.Errorf("acted at %v", acted)
	}
}

// syncBuffer is a log that several nodes write.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// TestALeaderWithAWrongClockLetsAnotherLead, and says so; where it alone votes it says so.
func TestALeaderWithAWrongClockLetsAnotherLead(t *testing.T) {
	for name, nodes := range map[string]int{"of three": 3, "alone": 1} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			wrong, log := raft.ServerID(""), new(syncBuffer)
			inBubble(t, func(c *Config) {
				id := c.ServerID
				c.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelError}))
				c.WallOff = func() (time.Duration, bool) {
					mu.Lock()
					defer mu.Unlock()
					if id == wrong {
						return 26 * time.Hour, true
					}
					return 0, true
				}
			}, func(t *testing.T, c *testCluster) {
				c.bootstrap(nodes)
				first := c.leader()
				mu.Lock()
				wrong = first.id
				mu.Unlock()
				d := BudgetDraw{
					Key: BudgetKey{Key: limiter.Key{Tenant: "t", Limit: "l"}}, Terms: BudgetTerms{Amount: 100, Revision: 1, Name: "l"}, Holder: 1, N: 1, Want: 60, Need: 60,
				}
				time.Sleep(wallPatience - 2*wallEvery) // in the bubble
				if c.leader() != first || log.String() != "" {
					t.Fatalf("at once another leads: %s", log)
				}
				time.Sleep(5 * wallEvery)
				if said := log.String(); strings.Count(said, "wall clock is wrong") != 1 || !strings.Contains(said, "26h") {
					t.Errorf("said: %q", said)
				}
				switch got, err := first.ledger.DrawBudget(t.Context(), d); {
				case nodes == 1:
					if c.leader() != first || !errors.Is(err, ErrWallOff) {
						t.Errorf("alone, it gives %+v, %v", got, err)
					}
				case c.leader() == first || err != nil || got.Granted != 60:
					t.Errorf("%s leads after %s, and gives %+v, %v", c.leader().id, first.id, got, err)
				}
			})
		})
	}
}
