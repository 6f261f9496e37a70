package cluster

import (
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"headgate/cluster/ledger"
)

// hangingLog is a log on a disk that may answer no more.
type hangingLog struct {
	raft.LogStore
	mu   sync.Mutex
	free chan struct{} // nil: it answers
}

func (l *hangingLog) hang() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.free = make(chan struct{})
}

func (l *hangingLog) goOn() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.free != nil {
		close(l.free)
		l.free = nil
	}
}

func (l *hangingLog) StoreLogs(logs []*raft.Log) error {
	l.mu.Lock()
	free := l.free
	l.mu.Unlock()
	if free != nil {
		<-free
	}
	return l.LogStore.StoreLogs(logs)
}

func (l *hangingLog) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }

// A leader whose disk hangs commits nothing, while raft's heartbeats alone would keep it the
// leader for ever.
func TestLeaderWithAHungDisk(t *testing.T) {
	inRealm(t, 1, func(r *realm) {
		logs := map[string]*hangingLog{}
		var nodes []*realNode
		for _, name := range []string{"a", "b", "c"} {
			nodes = append(nodes, r.start(name, func(c *Config) {
				c.Seams.Ledger = func(c *ledger.Config) {
					d := r.disks[name]
					logs[name] = &hangingLog{LogStore: d.log}
					c.Logs, c.Stable, c.Snapshots = logs[name], d.log, d.snapshots
				}
			}))
		}
		r.within(10*time.Second, "one view of three, and leases", func() bool { return agree(nodes, 3) })
		hung := leaderOf(nodes)
		log := logs[hung.cfg.Name]
		log.hang()
		defer log.goOn()
		rest := others(nodes, hung)
		r.within(5*time.Second, "another leads, and all have leases", func() bool {
			l := leaderOf(nodes)
			return l != nil && l != hung && agree(nodes, 3)
		})
		if hung.ledger.Health() == nil {
			t.Error("a disk that hangs is called healthy")
		}
		r.propose(rest[0], kill("meanwhile"))
		r.within(10*time.Second, "who cannot follow is no member", func() bool { return agree(rest, 2) })
		log.goOn()
		r.within(15*time.Second, "it comes back", func() bool { return agree(nodes, 3) })
		if hung.ledger.Health() != nil {
			t.Errorf("it goes on, and still: %v", hung.ledger.Health())
		}
		if _, ok := hung.Facts().Kills.Lookup(ledger.KillTenant, "meanwhile"); !ok {
			t.Error("it did not learn what was agreed on meanwhile")
		}
	})
}
