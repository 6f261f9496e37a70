package semantic

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"headgate/cache/threshold"
)

// TestShardWithMany has goroutines do everything at once; the race detector and the books have the say.
func TestShardWithMany(t *testing.T) {
	p := newPlace1(t, func(c *shardConfig) { c.maxBytes, c.tenantBytes, c.maxPartitions = 2<<20, 200<<10, 8 })
	other := newPlace1(t, nil)
	texts := []string{"one", "One", "ONE", "one?", "oNe", "onE", "one!", "ONe"}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 5))
			for i := range 300 {
				now := p.now + int64(i)*int64(time.Second)
				tenant := fmt.Sprint("t", rng.IntN(3))
				q := &Question{
					Partition: keyOf(fmt.Sprint(tenant, rng.IntN(4))), Tenant: tenant, Surface: "s", Embedder: "e", Policy: static(0.9), Text: texts[rng.IntN(len(texts))],
					Vector: axis(float64(rng.IntN(40))),
				}
				q.Policy.Audit = 0.5
				f := p.find(now, q)
				if f.answer != nil && (f.answer.Tenant != tenant || string(f.answer.Body) != tenant) {
					t.Errorf("the answer of %s for %s", f.answer.Tenant, tenant)
				}
				l := &lesson{
					place: q.place(), once: rng.Uint64(), policy: q.Policy, id: f.id, similarity: f.similarity, action: f.decision.Action, cell: f.decision.Cell,
					label: Label{Known: true, Same: rng.IntN(2) == 0}, text: q.Text, vector: q.Vector, came: now,
				}
				if f.decision.Action != threshold.Serve {
					l.entry = answerTo(q, tenant)
					l.entry.Life.TTL = time.Duration(rng.IntN(100)) * time.Second
				}
				p.learn(now, l)
				switch rng.IntN(20) {
				case 0:
					p.sweep(now)
				case 1:
					p.wrong(f.id, nil)
					p.countWrong(p.now, f.id)
				case 2:
					p.shrink(t.Context())
				case 3:
					for _, part := range p.held() {
						batch := p.batch(part, now)
						for _, h := range batch {
							pol := p.policyOf(part.place.scope())
							other.insert(now, &part.place, &pol, &h.fresh, true)
						}
						p.release(batch)
					}
				case 4:
					p.surfaces()
				}
			}
		})
	}
	wg.Wait()
	if p.counts.movedOut == 0 || p.counts.expired == 0 || p.counts.wrong == 0 || len(other.entries) == 0 {
		t.Errorf("%+v, %d entries elsewhere", p.counts, len(other.entries))
	}
}
