package semantic

import (
	"context"
	"log/slog"
	"sync"

	"headgate/cache/threshold"
)

// MaxRecent is how many decisions are remembered.
const MaxRecent = 1000

// Decision is one that was taken for a request of this node. It has no content.
type Decision struct {
	At                         int64 // Config.Now
	Request                    string
	Tenant, Surface            string
	Entry                      string
	Action                     string // miss, explore, audit, serve
	Shadow                     bool
	Similarity, Threshold, Tau float64
	Refused                    []string // kinds of guards
	Why                        string
	Owner                      string // address of the node that decided; "": this one
}

// remembered is a Decision with what it takes to count against it.
type remembered struct {
	Decision
	id     uint64
	scope  scopeKey
	policy threshold.Policy
	cell   threshold.Cell
}

// recent is a ring of the last decisions. Its zero value is empty.
type recent struct {
	mu   sync.Mutex
	ring []remembered
	at   int
}

func (r *recent) add(d remembered) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ring) < MaxRecent {
		r.ring = append(r.ring, d)
		return
	}
	r.ring[r.at] = d
	r.at = (r.at + 1) % MaxRecent
}

// served is the last decision that served an entry. None of its decisions is found by it again.
func (r *recent) served(id uint64) (last remembered, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range len(r.ring) {
		d := &r.ring[(r.at+len(r.ring)-1-i)%len(r.ring)]
		if d.id != id {
			continue
		}
		if d.id = 0; !ok && d.Action == threshold.Serve.String() {
			last, ok = *d, true
		}
	}
	return last, ok
}

// Recent is the last MaxRecent decisions, the newest first.
func (c *Cache) Recent() []Decision {
	r := &c.recent
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]Decision, 0, len(r.ring))
	for i := range len(r.ring) {
		out = append(out, r.ring[(r.at+len(r.ring)-1-i)%len(r.ring)].Decision)
	}
	return out
}

// note counts, remembers and logs a decision. What was asked is in neither.
func (c *Cache) note(ctx context.Context, q *Question, a *Answer) {
	c.met.decided(a)
	d := Decision{
		At: c.cfg.Now(), Request: q.Request, Tenant: q.Tenant, Surface: q.Surface, Entry: a.EntryID, Action: a.Action.String(), Shadow: a.Shadow,
		Similarity: a.Similarity, Threshold: a.Threshold, Tau: a.Tau, Why: a.Why, Owner: a.Owner,
	}
	for _, r := range a.Refused {
		d.Refused = append(d.Refused, string(r.Kind))
	}
	c.recent.add(remembered{Decision: d, id: a.id, scope: scopeKey{q.Tenant, q.Surface, q.Embedder}, policy: q.Policy, cell: a.cell})
	level := slog.LevelInfo
	if a.Action == threshold.Miss {
		level = slog.LevelDebug
	}
	c.cfg.Logger.LogAttrs(ctx, level, "semantic decision",
		slog.String("request", d.Request), slog.String("tenant", d.Tenant), slog.String("surface", d.Surface), slog.String("entry", d.Entry),
		slog.String("action", d.Action), slog.Bool("shadow", d.Shadow), slog.Float64("similarity", d.Similarity), slog.Float64("threshold", d.Threshold),
		slog.Float64("tau", d.Tau), slog.Float64("confidence", a.Confidence), slog.Any("refused", d.Refused), slog.String("why", d.Why), slog.String("owner", d.Owner))
}
