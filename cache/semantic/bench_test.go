package semantic

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"headgate/cache"
	"headgate/cache/threshold"
	"headgate/cache/vec"
)

// clustered makes vectors of 384 dimensions, of which some are near each other.
type clustered struct {
	rng     *rand.Rand
	centres [][]float32
}

func newClustered() *clustered {
	c := &clustered{rng: rand.New(rand.NewPCG(1, 1))}
	for range 500 {
		c.centres = append(c.centres, c.near(make([]float32, 384), 1))
	}
	return c
}

func (c *clustered) near(centre []float32, by float64) []float32 {
	v := make([]float32, len(centre))
	for i := range v {
		v[i] = centre[i] + float32(c.rng.NormFloat64()*by)
	}
	vec.Norm(v)
	return v
}

func (c *clustered) question(i int) *Question {
	text := fmt.Sprintf("How do I change the delivery address of my order after it was shipped to %c%c?", 'a'+i%26, 'a'+i/26%26)
	q := asks(text, c.near(c.centres[c.rng.IntN(len(c.centres))], 0.02))
	q.Policy = threshold.Policy{Mode: threshold.Learned, ErrorBound: 0.01, HitErrorBound: 0.02, Audit: 0.05}
	return q
}

// filled is a shard with a partition of 10,000.
func filled(b *testing.B) (*place1, []*Question) {
	p := newPlace1(b, func(c *shardConfig) { c.maxBytes, c.tenantBytes = 1<<30, 1<<30 })
	c := newClustered()
	for i := range 10_000 {
		q := c.question(i)
		q.Text += fmt.Sprint(i)
		if o := p.miss(q, answerTo(q, "an answer of some words, as they are")); o != kept {
			b.Fatal(o)
		}
	}
	var ask []*Question
	for i := range 1000 {
		ask = append(ask, c.question(i))
	}
	return p, ask
}

// BenchmarkFind is a look among 10,000 on the node that has them.
func BenchmarkFind(b *testing.B) {
	p, ask := filled(b)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		p.find(p.now, ask[i%len(ask)])
		i++
	}
	b.ReportMetric(float64(p.bytes)/10_000, "B/entry")
}

// BenchmarkAskOwner is likewise, on another node, over loopback.
func BenchmarkAskOwner(b *testing.B) {
	p, ask := filled(b)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	node := func(seed uint64, owner string) *Cache {
		c, err := New(Config{
			Ring: func(cache.Key) []string { return []string{owner} }, Peers: func() []string { return nil }, Valid: func(*cache.Entry) bool { return true },
			Client: func(a string) (grpc.ClientConnInterface, error) {
				return grpc.NewClient(a, grpc.WithTransportCredentials(insecure.NewCredentials()))
			},
			Now: func() int64 { return p.now }, Rand: rand.New(rand.NewPCG(seed, 1)), MaxBytes: 1 << 30,
		})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(c.Close)
		return c
	}
	owner, asker := node(1, ""), node(2, lis.Addr().String())
	owner.shard = p.shard
	conn, err := asker.cfg.Client(lis.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	asker.cfg.Client = func(string) (grpc.ClientConnInterface, error) { return conn, nil }
	server := grpc.NewServer()
	owner.Register(server)
	go func() { _ = server.Serve(lis) }()
	b.Cleanup(server.Stop)
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		if a := asker.Ask(context.Background(), ask[i%len(ask)]); a.Why == whyOut {
			b.Fatal(a.Why)
		}
		i++
	}
}
