package semantic

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	pb "headgate/cache/semantic/semanticpb"
	"headgate/cache/threshold"
)

// report is what a node knows of an entry of which somebody says that its answer is wrong.
type report struct {
	had     bool // the entry was here
	held    bool // there is something to count it by: that, or that it was served
	counted bool // here or by another node: no more
	scope   scopeKey
	policy  threshold.Policy // of what was served here
	cells   []threshold.Cell // of its last hits
}

// wrong evicts an entry of which somebody says that its answer is wrong. It does not come back by a move that was under way.
// Nothing is counted yet. served is what this node served of it, where the entry is gone; nil: nothing.
func (s *shard) wrong(id uint64, served *remembered) (r report, evicted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.reported.has[id]
	if known == nil {
		known = &report{}
		s.reported.add(id, known)
	}
	e := s.entries[id]
	switch {
	case e != nil:
		sc := e.p.scope
		sc.mu.Lock()
		known.policy = sc.policy
		sc.mu.Unlock()
		known.had, known.held, known.scope, known.cells = true, true, sc.key, slices.Clone(e.hits)
		s.drop(e, &s.counts.wrong)
	case served != nil && !known.held:
		known.held, known.scope, known.cells = true, served.scope, []threshold.Cell{served.cell}
		known.policy = served.policy
	}
	return *known, e != nil
}

// countWrong counts a report against its scope, if that was not done: once for the budget, and the last hits for the pool. It
// tells whether the report counts by now.
func (s *shard) countWrong(now int64, id uint64) bool {
	s.mu.Lock()
	known := s.reported.has[id]
	if known == nil || known.counted || !known.held {
		defer s.mu.Unlock()
		return known != nil && known.counted
	}
	sc := s.scopeOf(known.scope, &known.policy, now) // where another node owns the partition there may be none yet
	if sc == nil {
		s.mu.Unlock()
		return false
	}
	cells := known.cells
	known.counted, known.cells = true, nil
	s.mu.Unlock()
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.tally.reported++
	for _, c := range cells {
		sc.pool.Add(c, false)
	}
	sc.budget.Wrong() // also where no hit is remembered: it may have been another node's
	return true
}

// countedWrong notes that another node counted a report.
func (s *shard) countedWrong(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.reported.has[id]; known != nil {
		known.counted, known.cells = true, nil
	}
}

// wrong has this node's part of a report done.
func (c *Cache) wrong(id uint64) (report, bool) {
	var served *remembered
	if d, ok := c.recent.served(id); ok {
		served = &d
	}
	return c.shard.wrong(id, served)
}

// Report is what Wrong did.
type Report struct {
	Found           bool // an entry was evicted, or a decision that served it is remembered and did not count as wrong yet
	Evicted         int  // nodes that held it
	Unreached       int  // nodes that could not be asked
	Tenant, Surface string
}

// ErrID is an entry id that is none.
var ErrID = errors.New("semantic: an entry id is 16 hexadecimal digits, as X-Headgate-Cache-Entry has them")

// Wrong evicts an entry on every node, and counts against it that it was served: once, however often and wherever
// it is reported, as far as the nodes that are reached remember. An entry that went already counts by what a node remembers of its last
// hit. by is who says so, for the log. The error is ErrID.
func (c *Cache) Wrong(ctx context.Context, entryID, by string) (Report, error) {
	id, err := parseID(entryID)
	if err != nil {
		return Report{}, err
	}
	w := wrongRound{c: c, id: id, by: by}
	own, evicted := c.wrong(id)
	w.note(evicted, own.counted, own.held, holder{node: c.node, had: own.had, scope: own.scope})
	c.each(func(address string) {
		m, err := w.say(ctx, address, &pb.WrongRequest{})
		if err != nil {
			w.unreached(address, err)
			return
		}
		w.note(m.GetFound(), m.GetCounted(), m.GetHeld(), holder{
			address: address, node: m.GetNode(), had: m.GetHad(), scope: scopeKey{tenant: string(m.GetTenant()), surface: string(m.GetSurface())},
		})
	})
	if w.count(ctx) {
		c.shard.countedWrong(id)
		c.each(func(address string) { _, _ = w.say(ctx, address, &pb.WrongRequest{Counted: true}) }) // who does not hear may be told by who does
	}
	r := w.report
	c.cfg.Logger.Info("a semantic answer was reported as wrong", "entry", entryID, "by", by, "found", r.Found, "evicted", r.Evicted, "unreached", r.Unreached)
	return r, nil
}

// wrongRound is one report under way: first all nodes are asked who can count it, then one of them does.
type wrongRound struct {
	c  *Cache
	id uint64
	by string

	mu      sync.Mutex
	report  Report
	counted bool     // before
	holders []holder // that can count it
}

type holder struct {
	address string // "": this node
	node    uint64
	had     bool // the entry, and did not only serve it
	scope   scopeKey
}

// note takes what a node says.
func (w *wrongRound) note(evicted, counted, held bool, h holder) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counted = w.counted || counted
	if held {
		w.holders = append(w.holders, h)
	}
	if evicted {
		w.report.Evicted++
	}
}

func (w *wrongRound) unreached(address string, err error) {
	w.mu.Lock()
	w.report.Unreached++
	w.mu.Unlock()
	w.c.cfg.Logger.Warn("a wrong answer could not be reported to a node", "address", address, "entry", formatID(w.id), "error", err.Error())
}

// say says something of the entry to another node.
func (w *wrongRound) say(ctx context.Context, address string, m *pb.WrongRequest) (*pb.WrongResponse, error) {
	bounded, cancel := context.WithTimeout(ctx, wrongFor)
	defer cancel()
	conn, err := w.c.cfg.Client(address)
	if err != nil {
		return nil, err
	}
	m.Id, m.By = w.id, []byte(w.by)
	return pb.NewSemanticClient(conn).Wrong(bounded, m)
}

// count has one node count the report, unless one did: who had the entry rather than who only served it, and else the first by
// its number, so that two reports at a time choose the same. It tells whether it counts now, and did not before.
func (w *wrongRound) count(ctx context.Context) bool {
	slices.SortFunc(w.holders, func(a, b holder) int {
		if a.had != b.had {
			return map[bool]int{true: -1, false: 1}[a.had]
		}
		return cmp.Compare(a.node, b.node)
	})
	if len(w.holders) > 0 && (!w.counted || w.report.Evicted > 0) {
		w.report.Found, w.report.Tenant, w.report.Surface = true, w.holders[0].scope.tenant, w.holders[0].scope.surface
	}
	if w.counted {
		return w.report.Evicted > 0 // who had it has not heard
	}
	for _, h := range w.holders {
		if h.address == "" {
			if w.c.shard.countWrong(w.c.cfg.Now(), w.id) {
				return true
			}
			continue
		}
		m, err := w.say(ctx, h.address, &pb.WrongRequest{Count: true})
		if err == nil && m.GetCounted() {
			return true
		}
	}
	if len(w.holders) > 0 {
		w.c.cfg.Logger.Warn("a wrong answer is evicted and could not be counted", "entry", formatID(w.id))
	}
	return false
}
