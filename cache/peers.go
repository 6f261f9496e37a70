package cache

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	pb "headgate/cache/cachepb"
)

// The bounds and times of links to owners.
const (
	lockTTL   = 2 * time.Second // a side of a link that says nothing for so long is lost, and with it its lead
	beatEvery = lockTTL / 4
	followTTL = 10 * time.Second // likewise of one by which a stream is followed, and nothing is led
	helloFor  = time.Second      // an owner's first word
	breakFor  = time.Second      // how long an address is passed over that did not say it
	maxOwners = 2                // addresses of a ring that are tried before a node does without a lock
	maxLinks  = 6                // links of a branch, one after the other, before its requests pass
	maxBroken = 4096
	maxPuts   = 32 // on their way to other nodes
	maxMany   = 4096
	manyFor   = 300 * time.Millisecond
	putFor    = 5 * time.Second
)

// asker is a branch's side of a link. First it is opened; then one goroutine sends, another receives.
type asker interface {
	open(first []*up) error
	send(batch []*up) error
	closeSend() error
	recv() (*down, error)
}

// answerer is a session's.
type answerer interface {
	send(batch []*down) error
	recv() (*up, error)
}

// link speaks for a branch until nobody there wants anything, to one owner after the other.
func (e *Exact) link(b *branch) {
	var tried []string
	var again bool
	address := ""
	for range maxLinks {
		address = e.next(b.id.key, tried)
		how := e.converse(b, address)
		e.mu.Lock()
		b.disconnect()
		stop := how.clean || b.done() && len(b.ended) == 0
		e.mu.Unlock()
		if stop || e.ctx.Err() != nil {
			break
		}
		if how.heard && !how.silent && !again {
			again = true // it may have done no more than to close the connection
			continue
		}
		tried = append(tried, address)
	}
	e.mu.Lock()
	b.finish(Turn{Kind: TurnPass}) // nobody is left, unless no link held or the Exact closes
	for _, f := range b.fills {
		f.others = false
	}
	b.restate()
	ended := b.ended
	e.mu.Unlock()
	e.bring(b.id.key, address, ended)
}

// next is where to go for a key: to its owner, or to the next that is not known not to answer, or else to
// this node's own flights, by which at least the requests of this node ask once.
func (e *Exact) next(k Key, tried []string) string {
	ring := e.cfg.Ring(k)
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, a := range ring[:min(len(ring), maxOwners)] {
		if a == "" {
			return ""
		}
		if !slices.Contains(tried, a) && e.cfg.Now() >= e.broken[a] {
			return a
		}
	}
	if len(ring) > 0 {
		e.met.lockless.Inc()
	}
	return ""
}

// judge remembers which addresses do not answer.
func (e *Exact) judge(address string, answers bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if answers {
		delete(e.broken, address)
		return
	}
	if len(e.broken) >= maxBroken {
		clear(e.broken)
	}
	e.broken[address] = e.cfg.Now() + int64(breakFor)
}

// ending is how a link ended.
type ending struct {
	clean  bool // the owner has taken all that was said
	heard  bool // it said something
	silent bool // and then nothing for too long
}

// conversation is a link while it lasts.
type conversation struct {
	e      *Exact
	b      *branch
	self   bool
	s      asker
	cancel context.CancelFunc
	ended  chan struct{} // closed when nothing can be received any more

	mu     sync.Mutex
	quiet  *time.Timer
	silent bool
	heard  bool
	last   int64 // when something was
	err    error // why nothing can
}

// converse keeps one link until it breaks, or is not needed any more.
func (e *Exact) converse(b *branch, address string) ending {
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	c := &conversation{e: e, b: b, self: address == "", cancel: cancel, ended: make(chan struct{})}
	began := e.cfg.Now()
	c.mu.Lock()
	c.quiet = time.AfterFunc(helloFor, c.overdue)
	c.mu.Unlock()
	defer c.quiet.Stop()
	if c.self {
		c.quiet.Stop()
		c.s = e.dialSelf(ctx)
	} else if s, err := e.dial(ctx, address, b.id.key); err != nil {
		e.judge(address, false)
		return ending{}
	} else {
		c.s = s
	}
	e.mu.Lock()
	b.connect()
	first := b.out
	b.out = nil
	e.mu.Unlock()
	if err := c.s.open(first); err != nil {
		e.judge(address, c.self)
		return ending{}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		c.listen(func() {
			if c.self {
				return
			}
			if c.hello() {
				e.met.peer("join", time.Duration(e.cfg.Now()-began))
			}
			c.quiet.Reset(lockTTL)
		})
	})
	closed := c.speak(ctx)
	cancel()
	wg.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.self {
		e.judge(address, c.heard && !c.silent)
	}
	return ending{clean: closed && errors.Is(c.err, io.EOF), heard: c.heard, silent: c.silent}
}

// hello notes that there was a word, and says whether it was the first.
func (c *conversation) hello() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := !c.heard
	c.heard, c.last = true, c.e.cfg.Now()
	return first
}

// overdue ends a link that nothing is heard by. Where requests follow a stream by it, and none leads, it has
// more time: a link that is lost costs each of them its answer, and nobody else waits for it.
func (c *conversation) overdue() {
	c.e.mu.Lock()
	follows := len(c.b.fills) == 0 && c.b.relay != nil && c.b.readers > 0
	c.e.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.heard && follows && c.e.cfg.Now()-c.last < int64(followTTL) {
		c.quiet.Reset(beatEvery)
		return
	}
	c.silent = true
	c.cancel()
}

// listen takes what the owner says.
func (c *conversation) listen(heard func()) {
	defer close(c.ended)
	defer c.cancel()
	for {
		d, err := c.s.recv()
		if err != nil {
			c.mu.Lock()
			c.err = err
			c.mu.Unlock()
			if errors.Is(err, errMalformed) {
				c.e.met.malformed.Inc()
			}
			return
		}
		heard()
		c.store(d)
		c.e.mu.Lock()
		c.b.receive(d, c.self)
		c.e.mu.Unlock()
	}
}

// store keeps what another node's store, or flight, answered with.
func (c *conversation) store(d *down) {
	e := c.e
	if d.kind != downHit || c.self || !d.keep || !e.cfg.Valid(d.hit.Entry) {
		return
	}
	e.cfg.Store.PutCopy(d.hit)
}

// speak says what the branch has to say, until nobody is left there and the owner has heard all of it. closed: so it
// ended.
func (c *conversation) speak(ctx context.Context) (closed bool) {
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	for {
		c.e.mu.Lock()
		out := c.b.out
		c.b.out = nil
		done := c.b.done()
		if done {
			c.b.retire()
		}
		c.e.mu.Unlock()
		if !closed && len(out) > 0 && c.s.send(out) != nil {
			return false
		}
		if done && !closed {
			closed = true
			if c.s.closeSend() != nil {
				return false
			}
		}
		select {
		case <-c.ended:
			return closed
		case <-ctx.Done():
			<-c.ended
			return closed
		case <-c.b.poke:
		case <-beat.C:
			if !closed && !c.self && c.s.send([]*up{{kind: upBeat}}) != nil {
				return false
			}
		}
	}
}

// dial opens a link to another node, about a key.
func (e *Exact) dial(ctx context.Context, address string, k Key) (asker, error) {
	conn, err := e.cfg.Client(address)
	if err != nil {
		return nil, err
	}
	stream, err := pb.NewExactClient(conn).Join(ctx)
	if err != nil {
		return nil, err
	}
	return &wireAsker{key: k, stream: stream, decoder: downDecoder{joiner: joiner{max: e.cfg.MaxEntry}}}, nil
}

// errMalformed is a message that no node would send.
var errMalformed = errors.New("cache: malformed message")

// wireAsker is a link to another node.
type wireAsker struct {
	key     Key
	stream  grpc.BidiStreamingClient[pb.Up, pb.Down]
	decoder downDecoder
}

// open waits until the owner says anything. Until then gRPC may begin the call anew, and holds a lock
// meanwhile that whoever sends would wait for, whatever becomes of the context.
func (w *wireAsker) open(first []*up) error {
	if err := w.send(first); err != nil {
		return err
	}
	_, err := w.stream.Header()
	return err
}

func (w *wireAsker) send(batch []*up) error {
	for _, m := range encodeUps(batch) {
		if err := w.stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (w *wireAsker) closeSend() error { return w.stream.CloseSend() }

func (w *wireAsker) recv() (*down, error) {
	for {
		m, err := w.stream.Recv()
		if err != nil {
			return nil, err
		}
		d, err := w.decoder.next(m)
		if err != nil {
			return nil, errors.Join(errMalformed, err)
		}
		switch {
		case d == nil:
		case d.hit.Entry != nil && d.hit.Key != w.key, d.about != nil && d.about.Key != w.key:
			return nil, errors.Join(errMalformed, errors.New("the entry of another key"))
		default:
			return d, nil
		}
	}
}

// selfLink is a link of a node to its own flights: what is said goes over as it is.
type selfLink struct {
	ctx  context.Context
	up   chan []*up
	down chan []*down
	ups  []*up
	dns  []*down
}

// dialSelf opens one.
func (e *Exact) dialSelf(ctx context.Context) asker {
	l := &selfLink{ctx: ctx, up: make(chan []*up, 4), down: make(chan []*down, 4)}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.start(func() {
		defer close(l.down)
		_ = e.serve(ctx, (*selfAnswerer)(l), true) // it ends as the context does
	}) {
		close(l.down)
	}
	return l
}

func (l *selfLink) open(first []*up) error { return l.send(first) }

func (l *selfLink) send(batch []*up) error {
	select {
	case l.up <- batch:
		return nil
	case <-l.ctx.Done():
		return l.ctx.Err()
	}
}

func (l *selfLink) closeSend() error {
	close(l.up)
	return nil
}

func (l *selfLink) recv() (*down, error) {
	for len(l.dns) == 0 {
		var ok bool
		select {
		case l.dns, ok = <-l.down:
			if !ok {
				return nil, io.EOF
			}
		case <-l.ctx.Done():
			return nil, l.ctx.Err()
		}
	}
	d := l.dns[0]
	l.dns = l.dns[1:]
	return d, nil
}

// selfAnswerer is its other end.
type selfAnswerer selfLink

func (l *selfAnswerer) send(batch []*down) error {
	select {
	case l.down <- batch:
		return nil
	case <-l.ctx.Done():
		return l.ctx.Err()
	}
}

func (l *selfAnswerer) recv() (*up, error) {
	for len(l.ups) == 0 {
		var ok bool
		select {
		case l.ups, ok = <-l.up:
			if !ok {
				return nil, io.EOF
			}
		case <-l.ctx.Done():
			return nil, l.ctx.Err()
		}
	}
	u := l.ups[0]
	l.ups = l.ups[1:]
	return u, nil
}

// bring gives a key's owner what was stored while another stood in for it.
func (e *Exact) bring(k Key, address string, ended []*up) {
	ring := e.cfg.Ring(k)
	if len(ring) == 0 || ring[0] == "" {
		return
	}
	for _, u := range ended {
		if u.kind == upStore && (u.late || address != ring[0]) {
			e.putAt(ring[0], []*Entry{u.entry})
		}
	}
}

// putAt stores entries at another node, in the background. Where too many are on their way they are dropped.
func (e *Exact) putAt(address string, many []*Entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case e.puts <- struct{}{}:
	default:
		e.met.unsent.Add(float64(len(many)))
		return
	}
	if e.cfg.Now() < e.broken[address] || !e.start(func() {
		defer func() { <-e.puts }()
		if err := e.send(address, many); err != nil {
			e.met.unsent.Add(float64(len(many)))
			e.cfg.Logger.Debug("entries did not reach their owner", "address", address, "error", err.Error())
		}
	}) {
		e.met.unsent.Add(float64(len(many)))
		<-e.puts
	}
}

func (e *Exact) send(address string, many []*Entry) error {
	ctx, cancel := context.WithTimeout(e.ctx, putFor)
	defer cancel()
	conn, err := e.cfg.Client(address)
	if err != nil {
		return err
	}
	began := e.cfg.Now()
	stream, err := pb.NewExactClient(conn).Put(ctx)
	if err != nil {
		return err
	}
	for _, en := range many {
		for _, p := range encodePieces(&Hit{Entry: en, Age: en.Age}, 0) {
			if stream.Send(p) != nil {
				_, err := stream.CloseAndRecv() // says why
				return err
			}
		}
	}
	if _, err = stream.CloseAndRecv(); err == nil {
		e.met.peer("put", time.Duration(e.cfg.Now()-began))
	}
	return err
}

// PutMany stores entries here and, in the background, at their owners. The caller sets Key, and Stamp as
// Config.Stamp read before the model was asked. Their lives get their jitter here. What is too large or
// invalid is left out.
func (e *Exact) PutMany(many []Entry) {
	to := map[string][]*Entry{}
	for i := range many {
		en := many[i]
		if int64(len(en.Body)) > e.cfg.MaxEntry || !e.cfg.Valid(&en) {
			continue
		}
		e.mu.Lock()
		en.Life = Jitter(en.Life, e.cfg.Rand)
		e.mu.Unlock()
		e.cfg.Store.Put(&en)
		if ring := e.cfg.Ring(en.Key); len(ring) > 0 && ring[0] != "" {
			to[ring[0]] = append(to[ring[0]], &en)
		}
	}
	for address, some := range to {
		e.putAt(address, some)
	}
}

// GetMany finds many entries, on this node and at their owners, each of whom is asked once, for 300 ms at most.
// The result has the length of keys, and no Entry where nothing was found. What is stale is there, and said to be;
// refreshing it is left to those who Look or Join.
func (e *Exact) GetMany(ctx context.Context, keys []Key) []Hit {
	found := make([]Hit, len(keys))
	ask := map[string][]int{}
	for i, k := range keys {
		if h, ok := e.cfg.Store.Read(k, e.cfg.Now()); ok {
			found[i] = h
			continue
		}
		if ring := e.cfg.Ring(k); len(ring) > 0 && ring[0] != "" && len(ask[ring[0]]) < maxMany {
			ask[ring[0]] = append(ask[ring[0]], i)
		}
	}
	if len(ask) == 0 {
		return found
	}
	ctx, cancel := context.WithTimeout(ctx, manyFor)
	defer cancel()
	var wg sync.WaitGroup
	for address, which := range ask {
		wg.Go(func() { e.fetch(ctx, address, keys, which, found) })
	}
	wg.Wait()
	return found
}

// fetch asks one owner for some of the keys, and sets found where it has them.
func (e *Exact) fetch(ctx context.Context, address string, keys []Key, which []int, found []Hit) {
	e.mu.Lock()
	broken := e.cfg.Now() < e.broken[address]
	e.mu.Unlock()
	if broken {
		return
	}
	conn, err := e.cfg.Client(address)
	if err != nil {
		return
	}
	in := &pb.GetRequest{}
	for _, i := range which {
		in.Keys = append(in.Keys, keys[i][:])
	}
	began := e.cfg.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewExactClient(conn).Get(ctx, in)
	if err != nil {
		return
	}
	decoder := pieceDecoder{joiner: joiner{max: e.cfg.MaxEntry}}
	for {
		m, err := stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				e.met.peer("get", time.Duration(e.cfg.Now()-began))
			}
			return
		}
		h, n, err := decoder.next(m)
		if err != nil || h.Entry != nil && (n >= len(which) || h.Key != keys[which[n]]) {
			e.met.malformed.Inc()
			return
		}
		if h.Entry != nil && e.cfg.Valid(h.Entry) {
			found[which[n]] = h
			e.cfg.Store.PutCopy(h)
		}
	}
}
