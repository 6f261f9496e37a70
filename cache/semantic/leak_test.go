package semantic

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"

	"headgate/cache"
	"headgate/cache/threshold"
)

// TestLeakHunt has people of several tenants ask the same thing of themselves, with prompts, conversations, templates, models and generations that
// differ. An answer is never another's, whatever the policy thinks of its similarity. HEADGATE_LEAK_STEPS sets how many steps are taken.
func TestLeakHunt(t *testing.T) {
	steps := 5000
	if many := os.Getenv("HEADGATE_LEAK_STEPS"); many != "" {
		n, err := strconv.Atoi(many)
		if err != nil || n < 1 {
			t.Fatalf("HEADGATE_LEAK_STEPS is %q; use a number above 0", many)
		}
		steps = n
	}
	now, rng := int64(1e18), rand.New(rand.NewPCG(3, 3))
	c, err := New(Config{
		Ring: func(cache.Key) []string { return nil }, Client: func(string) (grpc.ClientConnInterface, error) { return nil, errBroken },
		Peers: func() []string { return nil }, Valid: func(*cache.Entry) bool { return true }, Now: func() int64 { return now }, Rand: rand.New(rand.NewPCG(1, 2)),
		MaxBytes: 8 << 20, InsertsPerSecond: 1e6,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	hits := 0
	for range steps {
		if rng.IntN(50) == 0 {
			now += int64(time.Minute)
			c.shard.sweep(now)
		}
		q, identity := leakQuestion(t, rng)
		a := c.Ask(context.Background(), q)
		if a.Entry != nil && string(a.Entry.Body) != identity {
			t.Fatalf("a foreign answer:\n%s was asked\n%s was answered", identity, a.Entry.Body)
		}
		if a.Action == threshold.Serve {
			hits++
			continue
		}
		e := answerTo(q, identity)
		e.Life.TTL = 10 * time.Minute
		c.Learn(context.Background(), q, &a, Label{Known: a.Entry != nil, Same: rng.IntN(2) == 0}, e)
		l := <-c.queue.jobs
		c.queue.bytes.Add(-l.bytes())
		c.shard.learn(now, l)
	}
	if hits < steps/10 {
		t.Errorf("%d hits in %d steps: nothing was hunted", hits, steps)
	}
}

// leakQuestion is somebody's, and all that its answer depends on, as a person would say it.
func leakQuestion(t *testing.T, rng *rand.Rand) (*Question, string) {
	t.Helper()
	any2 := func(of string) string {
		if rng.IntN(6) > 0 {
			return of + "0"
		}
		return of + "1"
	}
	ctx := &cache.Context{
		Tenant: any2("tenant"), User: any2("user"), Claimed: any2("claimed"), Surface: any2("surface"), Template: any2("template"), Model: "m", ModelVersion: any2("version"),
		Backends: []string{"b"}, Generations: [4]uint64{0, 0, 0, uint64(rng.IntN(2))}, Path: "/v1/chat/completions", Header: []string{"X-A: " + any2("header")},
	}
	system, turn, temperature, embedder := any2("system"), any2("turn"), rng.IntN(2), any2("embedder")
	text := []string{"What's my account balance?", "what's my account balance", "WHAT'S MY ACCOUNT BALANCE"}[rng.IntN(3)]
	ctx.Body = fmt.Appendf(nil, `{"model":"m","temperature":%d,"messages":[{"role":"system","content":%q},{"role":"user","content":%q},{"role":"assistant","content":"ok"},{"role":"user","content":%q}]}`,
		temperature, system, turn, text)
	k, asked, ok, err := ctx.Partition(embedder)
	if err != nil || !ok || asked != text {
		t.Fatalf("%q: %v, %v", asked, ok, err)
	}
	q := question(text, func(q *Question) {
		q.Partition, q.Tenant, q.Surface, q.Embedder = k, ctx.Tenant, ctx.Surface, embedder
		q.Policy = []threshold.Policy{static(0.5), {Mode: threshold.Learned, ErrorBound: 0.2, HitErrorBound: 0.5}, {ErrorBound: 0.2, HitErrorBound: 0.5}}[min(rng.IntN(8), 2)]
		if rng.IntN(2) == 0 {
			q.Policy = static(0.5)
		}
	})
	return q, fmt.Sprint(ctx.Tenant, ctx.User, ctx.Claimed, ctx.Surface, ctx.Template, ctx.ModelVersion, ctx.Generations, ctx.Header, system, turn, temperature, embedder)
}
