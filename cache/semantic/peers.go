package semantic

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/cache"
	pb "headgate/cache/semantic/semanticpb"
	"headgate/cache/threshold"
)

// The bounds and times of what is said to other nodes.
const (
	findFor  = 250 * time.Millisecond
	learnFor = 5 * time.Second
	tellFor  = 2 * time.Second
	wrongFor = 2 * time.Second
	breakFor = time.Second // how long an address is passed over that did not answer

	maxBroken    = 4096
	maxLessons   = 1024     // that wait
	lessonBytes  = 32 << 20 // of them
	learners     = 2
	maxPeers     = 1024
	peersAtOnce  = 16
	tellEvery    = 10 * time.Second
	tellAllEvery = 30 // times: then also of scopes that nobody asked
	sweepEvery   = time.Second
	shrinkEvery  = 5 * time.Second
	tellBytes    = 4 << 20 // of sketches in one message
)

// owner is the address of a partition's owner; "" is this node.
func (c *Cache) owner(k cache.Key) string {
	if ring := c.cfg.Ring(k); len(ring) > 0 {
		return ring[0]
	}
	return ""
}

// broken says whether an address is passed over.
func (c *Cache) broken(address string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cfg.Now() < c.breaks[address]
}

// judge remembers which addresses do not answer.
func (c *Cache) judge(address string, answers bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if answers {
		delete(c.breaks, address)
		return
	}
	if len(c.breaks) >= maxBroken {
		clear(c.breaks)
	}
	c.breaks[address] = c.cfg.Now() + int64(breakFor)
}

// answered tells from an error whether the other side is there: it refused, or does not know the call.
func answered(err error) bool {
	switch status.Code(err) {
	case codes.OK, codes.InvalidArgument, codes.Unimplemented, codes.FailedPrecondition, codes.ResourceExhausted:
		return true
	}
	return false
}

// client is a connection to an address that is not passed over.
func (c *Cache) client(address string) (pb.SemanticClient, error) {
	if c.broken(address) {
		return nil, errBroken
	}
	conn, err := c.cfg.Client(address)
	if err != nil {
		c.judge(address, false)
		return nil, err
	}
	return pb.NewSemanticClient(conn), nil
}

var errBroken = errors.New("semantic: the node did not answer a moment ago")

// The reasons for misses that are the way's, constant for logs.
const (
	whyBroken    = "the owner did not answer a moment ago"
	whyOut       = "the owner did not answer"
	whyMalformed = "the owner's answer was malformed"
	whyInvalid   = "the answer was invalidated"
	whyUnfit     = "such a question is not compared"
	whyClosed    = "the node is closing"
)

// there asks another node.
func (c *Cache) there(ctx context.Context, address string, q *Question) Answer {
	cl, err := c.client(address)
	if err != nil {
		return Answer{Why: whyBroken, Owner: address}
	}
	bounded, cancel := context.WithTimeout(ctx, findFor)
	defer cancel()
	m, err := cl.Find(bounded, encodeQuestion(q))
	if err != nil {
		if ctx.Err() == nil { // else it was the caller who had no time
			c.judge(address, answered(err))
		}
		return Answer{Why: whyOut, Owner: address}
	}
	c.judge(address, true)
	a, err := decodeAnswer(m, q)
	switch {
	case err != nil:
		c.met.malformed.Inc()
		c.cfg.Logger.Warn("a semantic answer of another node was refused", "address", address, "error", err.Error())
		return Answer{Why: whyMalformed, Owner: address}
	case a.Action == threshold.Serve && (q.Least >= 1 || a.Similarity < q.Least || a.Shadow || q.Policy.Mode == threshold.Shadow):
		c.met.malformed.Inc()
		return Answer{Why: whyMalformed, Owner: address}
	case a.Entry != nil && !c.cfg.Valid(a.Entry): // this node may have heard what the owner has not
		return Answer{Why: whyInvalid, Owner: address}
	}
	a.Owner = address
	return a
}

// Learn takes the model's answer to q, to which a was what Ask said, and what comparing it with a's found. It is kept (entry,
// unless nil; its Age counts from the fill, its Life.TTL is how long) where it is another answer than the candidate's, or
// there was none; it takes the place of one to the same words. An Answer is learnt from once. It does not wait; where too much is under way, or the text, the
// body or the vector are out of bounds, it is dropped. q, a and entry must not be changed afterwards.
func (c *Cache) Learn(_ context.Context, q *Question, a *Answer, l Label, entry *cache.Entry) {
	job := &lesson{
		place: q.place(), once: cmp.Or(a.once, c.draw()), policy: q.Policy, id: a.id, similarity: a.Similarity, action: a.Action, cell: a.cell, label: l,
		entry: entry, text: q.Text, vector: q.Vector, came: c.cfg.Now(),
	}
	if entry == nil && (a.id == 0 || a.Action == threshold.Miss) { // an unknown label counts: an audit found out nothing
		return
	}
	if entry != nil && (entry.Tenant != q.Tenant || entry.Surface != q.Surface) {
		job.entry = nil // never: the caller confused two requests
	}
	if q.check() != nil || job.check() != nil {
		c.met.dropped("unfit")
		return
	}
	c.queue.push(c, job)
}

// queue is lessons that wait for their way to the owner.
type queue struct {
	bytes atomic.Int64
	jobs  chan *lesson
}

func (l *lesson) bytes() int64 {
	n := int64(len(l.text)) + 4*int64(len(l.vector)+len(l.label.AnswerVector)) + 512
	if l.entry != nil {
		n += int64(len(l.entry.Body))
	}
	return n
}

func (x *queue) push(c *Cache, l *lesson) {
	n := l.bytes()
	if x.bytes.Add(n) > lessonBytes {
		x.bytes.Add(-n)
		c.met.dropped("busy")
		return
	}
	select {
	case x.jobs <- l:
	default:
		x.bytes.Add(-n)
		c.met.dropped("busy")
	}
}

// learnAll brings lessons to where they belong until ctx ends.
func (c *Cache) learnAll(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case l := <-c.queue.jobs:
			c.teach(ctx, l)
			c.queue.bytes.Add(-l.bytes())
		}
	}
}

func (c *Cache) teach(ctx context.Context, l *lesson) {
	c.met.label(l)
	address := c.owner(l.place.key)
	if address == "" {
		c.shard.learn(c.cfg.Now(), l)
		return
	}
	cl, err := c.client(address)
	if err == nil {
		bounded, cancel := context.WithTimeout(ctx, learnFor)
		defer cancel()
		if _, err = cl.Learn(bounded, l.encode(c.cfg.Now())); err == nil || ctx.Err() == nil {
			c.judge(address, answered(err))
		}
	}
	if err != nil {
		c.met.dropped("unsent")
		c.cfg.Logger.Debug("what was learnt did not reach its owner", "address", address, "error", err.Error())
	}
}

// each calls f for every other node, some at a time, and waits.
func (c *Cache) each(f func(address string)) {
	peers := c.cfg.Peers()
	var wg sync.WaitGroup
	places := make(chan struct{}, peersAtOnce)
	for _, address := range peers[:min(len(peers), maxPeers)] {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			f(address)
		})
	}
	wg.Wait()
}

// tellAll tells the other nodes what this one has counted, until ctx ends.
func (c *Cache) tellAll(ctx context.Context) {
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c.tell(ctx, n%tellAllEvery == 0)
	}
}

// tell tells them once: of what was asked since the last two times; of all, where that is so or a node has not heard of all.
func (c *Cache) tell(ctx context.Context, all bool) {
	everything := sync.OnceValue(func() []*pb.TellRequest { return c.shard.sketches(0, c.node) })
	some := sync.OnceValue(func() []*pb.TellRequest { return c.shard.sketches(c.cfg.Now()-2*int64(tellEvery), c.node) })
	c.each(func(address string) {
		whole := all || !c.hasHeard(address)
		messages := some
		if whole {
			messages = everything
		}
		for _, m := range messages() {
			if !c.tellOne(ctx, address, m) {
				c.heard(address, false)
				return
			}
		}
		if whole {
			c.heard(address, true)
		}
	})
}

// tellOne tells whether it was heard.
func (c *Cache) tellOne(ctx context.Context, address string, m *pb.TellRequest) bool {
	cl, err := c.client(address)
	if err != nil {
		return false
	}
	bounded, cancel := context.WithTimeout(ctx, tellFor)
	defer cancel()
	_, err = cl.Tell(bounded, m)
	if ctx.Err() == nil {
		c.judge(address, answered(err))
	}
	if err != nil {
		c.cfg.Logger.Debug("a node did not hear what was counted", "address", address, "error", err.Error())
	}
	return err == nil
}

func (c *Cache) hasHeard(address string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.told[address]
}

func (c *Cache) heard(address string, all bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.told) >= maxBroken {
		clear(c.told)
	}
	c.told[address] = all
}

// sketches are messages of what was counted in scopes that somebody asked since.
func (s *shard) sketches(since int64, node uint64) (out []*pb.TellRequest) {
	s.mu.Lock()
	var scopes []*scope
	for _, sc := range s.scopes {
		if sc.asked >= since {
			scopes = append(scopes, sc)
		}
	}
	s.mu.Unlock()
	var m *pb.TellRequest
	size := 0
	for _, sc := range scopes {
		k := &pb.Sketch{Tenant: []byte(sc.key.tenant), Surface: []byte(sc.key.surface), Embedder: []byte(sc.key.embedder), Pool: sc.pool.Own(), Budget: sc.budget.Own()}
		pol := s.policyOf(sc.key)
		k.Policy = encodePolicy(&pol)
		if m == nil || size > tellBytes || len(m.GetSketches()) == maxTold {
			m, size = &pb.TellRequest{Node: node}, 0
			out = append(out, m)
		}
		m.Sketches = append(m.Sketches, k)
		size += len(k.GetPool()) + len(k.GetBudget())
	}
	return out
}

// hear takes over what another node has counted, in the place of what it told before. The policy is for a scope that nobody
// asked here: a budget without bounds would be exceeded by the first wrong answer.
func (s *shard) hear(now int64, node uint64, k scopeKey, pol *threshold.Policy, pool, budget []byte) error {
	s.mu.Lock()
	sc := s.scopes[k]
	if sc == nil { // else what it tells is no question: a scope is not kept for it
		sc = s.scopeOf(k, pol, now)
	}
	if sc == nil {
		s.mu.Unlock()
		return nil
	}
	peer := formatID(node)
	if _, knows := sc.tellers[peer]; !knows && len(sc.tellers) >= threshold.MaxPeers {
		oldest := peer
		for p, at := range sc.tellers {
			if oldest == peer || at < sc.tellers[oldest] {
				oldest = p
			}
		}
		sc.silence(oldest)
	}
	sc.tellers[peer] = now
	s.mu.Unlock()
	if err := errors.Join(sc.pool.Hear(peer, pool), sc.budget.Hear(peer, budget)); err != nil {
		return fmt.Errorf("sketch: %w", err)
	}
	s.mu.Lock()
	full := s.scopes[k] == sc
	if full {
		s.weigh(sc)
		if full = s.crowded(sc.tenant, 0) || s.bytes > s.cfg.maxBytes || sc.tenant.bytes > s.cfg.tenantBytes; full {
			s.trim()
			s.makeRoom(sc.tenant)
		}
	}
	s.mu.Unlock()
	if full {
		s.tidy()
	}
	return nil
}
