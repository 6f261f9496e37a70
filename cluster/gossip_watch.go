package cluster

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// run watches this node's successors, looks into doubts, and keeps trying to join whoever
// is missing.
func (g *Gossip) run() {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	last := time.Now()
	for {
		select {
		case <-g.ctx.Done():
			return
		case h := <-g.hints:
			g.lookInto(h)
		case r := <-g.rivals:
			g.compare(r)
		case <-tick.C:
			g.heed(time.Since(last))
			last = time.Now()
			g.watch(time.Now())
			g.rejoin(time.Now())
			g.refresh(time.Now())
		}
	}
}

// heed notes that this process got no processor for a while: then it is not the others that
// are silent, and looks without an answer count for less.
func (g *Gossip) heed(sinceTick time.Duration) {
	if sinceTick < lateTick {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.lateAt = time.Now()
}

// patience is how many looks in a row must go without an answer; g.mu is held.
func (g *Gossip) patience(now time.Time) int {
	if !g.lateAt.IsZero() && now.Sub(g.lateAt) < lateFor {
		return looksWhenLate
	}
	return looksToFail
}

// refresh spreads what this node says of itself when that has changed.
func (g *Gossip) refresh(now time.Time) {
	if now.Sub(g.described) < describeEvery {
		return
	}
	g.described = now
	if !g.describe() {
		return
	}
	g.done.Go(func() {
		if err := g.list.UpdateNode(time.Second); err != nil {
			g.say("spread", func() { g.log.Warn("what changed of this node was not spread yet", "error", err.Error()) })
		}
	})
}

// watch pings those of its successors by name that have not answered for a while: each
// member so has watchWidth watchers, however many there are, and one that sees a port
// refuse tells all others. It also looks again at those that only memberlist has given up,
// and forgets the long gone.
func (g *Gossip) watch(now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.successors() {
		if m.looking || now.Sub(m.acked) < watchEvery || now.Sub(m.pinged) < watchEvery {
			continue
		}
		m.pinged = now
		g.start(m, true)
	}
	for name, m := range g.members {
		switch {
		case m.Status != PeerAlive && !m.listed && now.Sub(m.Since) > forgetAfter:
			delete(g.members, name)
		case m.Status == PeerAlive && !m.listed && !m.looking && now.Sub(m.looked) >= lookAgain:
			g.start(m, false)
		}
	}
}

// successors are the members that this node watches; g.mu is held.
func (g *Gossip) successors() []*member {
	var alive []*member
	for _, m := range g.members {
		if m.Status == PeerAlive {
			alive = append(alive, m)
		}
	}
	slices.SortFunc(alive, func(a, b *member) int { return strings.Compare(a.Name, b.Name) })
	at, _ := slices.BinarySearchFunc(alive, g.cfg.Name, func(m *member, name string) int { return strings.Compare(m.Name, name) })
	next := slices.Concat(alive[at:], alive[:at])
	return next[:min(len(next), watchWidth)]
}

// lookInto has a doubted member looked at.
func (g *Gossip) lookInto(h hint) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m := g.members[h.name]
	if m == nil || m.looking || m.Status != PeerAlive || h.incarnation != 0 && h.incarnation != m.Incarnation {
		return
	}
	g.start(m, false)
}

// start begins a ping or a look of its own goroutine; g.mu is held, the member idle.
func (g *Gossip) start(m *member, pingFirst bool) {
	m.looking, m.looked = true, time.Now()
	at := m.Peer
	g.done.Go(func() {
		if pingFirst && g.ping(at) {
			g.looked(at, verdict{alive: true})
			return
		}
		g.looked(at, g.look(at, pingFirst))
	})
}

// verdict is what a look found: neither alive nor gone is no answer.
type verdict struct {
	alive   bool
	gone    bool // nobody, or another process, listens there
	limping bool // it answers pings only
}

func (g *Gossip) look(at Peer, pinged bool) verdict {
	ctx, cancel := context.WithTimeout(g.ctx, lookTimeout)
	defer cancel()
	who, err := g.ask(ctx, at.GRPCAddress())
	switch {
	case err == nil && (who == Identity{} || who.Name == at.Name && who.Incarnation == at.Incarnation):
		return verdict{alive: true}
	case err == nil:
		return verdict{gone: true}
	case !refused(err):
		return verdict{}
	case !pinged && g.ping(at):
		return verdict{limping: true}
	}
	return verdict{gone: true}
}

// ask says who answers at a gRPC address; the zero Identity where it can only tell that
// somebody listens. An error that refused tells that nobody does.
func (g *Gossip) ask(ctx context.Context, address string) (Identity, error) {
	conn, err := g.cfg.Dial(ctx, address)
	if err != nil {
		return Identity{}, err
	}
	_ = conn.Close()
	if g.cfg.Identify == nil {
		return Identity{}, nil
	}
	return g.cfg.Identify(ctx, address)
}

func (g *Gossip) ping(at Peer) bool {
	address, err := net.ResolveUDPAddr("udp", at.Address)
	if err != nil {
		return false
	}
	_, err = g.list.Ping(at.Name, address)
	return err == nil
}

// looked takes what a look at a member found.
func (g *Gossip) looked(at Peer, v verdict) {
	tellOthers := false
	g.mu.Lock()
	if m := g.members[at.Name]; m != nil && m.Incarnation == at.Incarnation {
		now := time.Now()
		m.looking = false
		switch {
		case m.Status == PeerLeft:
		case v.alive:
			m.acked, m.Suspected, m.misses = now, false, 0
			m.become(PeerAlive, now)
		case v.gone || !m.listed && m.misses+1 >= g.patience(now):
			tellOthers = v.gone && m.Status == PeerAlive
			m.Suspected = false
			m.become(PeerFailed, now)
		default:
			m.Suspected = true
			m.misses++
			if v.limping {
				m.acked, m.misses = now, 0
			}
		}
	}
	g.mu.Unlock()
	if tellOthers {
		g.queue.QueueBroadcast(broadcast(userMessage(messageDoubt, at.Name, at.Incarnation)))
	}
}

// broadcast is a message that gossip repeats a few times; none replaces another.
type broadcast []byte

func (b broadcast) Invalidates(memberlist.Broadcast) bool { return false }
func (b broadcast) Message() []byte                       { return b }
func (b broadcast) Finished()                             {}

// compare decides between a member and a process seen under its name at another address:
// the old one's process is asked, then the new one's. memberlist alone would keep the
// newcomer out until its own suspicion has run off.
func (g *Gossip) compare(r rival) {
	meta, err := decodeMeta(r.meta)
	g.mu.Lock()
	defer g.mu.Unlock()
	m := g.members[r.name]
	if err != nil || m == nil || m.looking || m.Incarnation == meta.Incarnation {
		return
	}
	m.looking, m.looked = true, time.Now()
	old := m.Peer
	g.done.Go(func() {
		v := g.look(old, false)
		if v.gone {
			v.gone = g.proves(r, meta)
		}
		g.looked(old, v)
		if v.gone {
			g.succeed(old, r, meta)
			return
		}
		g.say("conflict "+r.name+" "+r.address, func() {
			g.log.Warn("a second process uses the name of a member", "node", r.name, "address", old.Address, "second_address", r.address,
				"remedy", "give each node a --node-id of its own")
		})
	})
}

// proves asks a newcomer who it is.
func (g *Gossip) proves(r rival, meta nodeMeta) bool {
	ctx, cancel := context.WithTimeout(g.ctx, lookTimeout)
	defer cancel()
	who, err := g.ask(ctx, addToPort(r.address, GRPCPortOffset))
	return err == nil && (who == Identity{} || who.Name == r.name && who.Incarnation == meta.Incarnation)
}

// succeed puts a newcomer in the place of the process that is gone.
func (g *Gossip) succeed(old Peer, r rival, meta nodeMeta) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m := g.members[old.Name]
	if m == nil || m.Incarnation != old.Incarnation {
		return
	}
	now := time.Now()
	next := &member{Peer: Peer{Name: r.name, Incarnation: meta.Incarnation, Since: now}, acked: now, looked: now}
	next.adopt(meta, r.address)
	g.members[r.name] = next
}

// Join contacts the seeds until one answers. ErrNameTaken is fatal; ErrNotJoined, once ctx
// ends, is not: gossip keeps trying by itself, every two seconds while a seed or a failed
// member is missing, so that a healed partition heals here, too. Without seeds it returns
// at once. Call it once.
func (g *Gossip) Join(ctx context.Context) error {
	defer func() {
		g.mu.Lock()
		g.joining = false
		g.mu.Unlock()
	}()
	if len(g.cfg.Seeds) == 0 {
		g.mu.Lock()
		g.settled = true
		g.mu.Unlock()
		return nil
	}
	for {
		joined, err := g.joinRound(ctx)
		if err != nil || joined {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (--join %s)", ErrNotJoined, strings.Join(g.cfg.Seeds, ","))
		case <-g.ctx.Done():
			return fmt.Errorf("%w: gossip was closed", ErrNotJoined)
		case <-time.After(pushEvery):
		}
	}
}

// rejoin starts a round of joins when one is due.
func (g *Gossip) rejoin(now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	every := rejoinEvery
	if now.Before(g.pushUntil) {
		every = pushEvery
	}
	if g.joining || g.meta.Leaving || now.Sub(g.joinedAt) < every {
		return
	}
	g.joining = true
	g.done.Go(func() {
		_, err := g.joinRound(g.ctx)
		g.mu.Lock()
		g.joining = false
		g.mu.Unlock()
		if err != nil {
			select {
			case g.fatal <- err:
			default:
			}
		}
	})
}

// joinRound exchanges states with those who are missing. It says whether anybody answered;
// the error is ErrNameTaken or nil.
func (g *Gossip) joinRound(ctx context.Context) (joined bool, err error) {
	seeds := g.resolve(ctx)
	g.mu.Lock()
	g.joinedAt = time.Now()
	conflicts := g.conflicts
	wanted := g.missing(seeds)
	g.mu.Unlock()
	if len(wanted) == 0 {
		return true, nil
	}
	var (
		mu      sync.Mutex
		reasons []string
		round   sync.WaitGroup
		slots   = make(chan struct{}, maxRejoinsAtOne)
	)
	for _, address := range wanted {
		round.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if g.ctx.Err() != nil {
				return
			}
			_, err := g.list.Join([]string{address})
			mu.Lock()
			defer mu.Unlock()
			joined = joined || err == nil
			if err != nil {
				reasons = append(reasons, address+": "+reason(err))
			}
		})
	}
	round.Wait()
	g.mu.Lock()
	contested, rival := g.conflicts != conflicts, g.rival
	g.mu.Unlock()
	if contested {
		if err := g.defend(rival); err != nil {
			return joined, err
		}
	}
	g.concluded(joined, contested, reasons)
	return joined, nil
}

// resolve gives the addresses of the seeds, of all that a name stands for.
func (g *Gossip) resolve(ctx context.Context) (addresses []string) {
	ctx, cancel := context.WithTimeout(ctx, streamTimeout)
	defer cancel()
	g.mu.Lock()
	seeds := slices.Concat(g.cfg.Seeds, g.extra)
	g.mu.Unlock()
	for _, seed := range seeds {
		host, port, err := net.SplitHostPort(seed)
		if err != nil {
			host, port = seed, strconv.Itoa(defaultGossipPort)
		}
		if net.ParseIP(host) != nil {
			addresses = append(addresses, net.JoinHostPort(host, port))
			continue
		}
		found, err := net.DefaultResolver.LookupHost(ctx, host)
		if err != nil {
			g.say("resolve "+host, func() {
				g.log.Warn("the name of a seed does not resolve", "seed", seed, "error", err.Error(), "remedy", "check --join and the name server")
			})
		}
		for _, ip := range found {
			addresses = append(addresses, net.JoinHostPort(ip, port))
		}
	}
	return addresses
}

const defaultGossipPort = 7946

// missing are the addresses to join now: seeds and failed members that are not listed, and
// everybody while they hold our name elsewhere; g.mu is held.
func (g *Gossip) missing(seeds []string) []string {
	everybody := time.Now().Before(g.pushUntil)
	have := map[string]bool{g.self.Address: true}
	wanted := slices.Clone(seeds)
	for _, m := range g.members {
		if m.Status == PeerLeft {
			continue
		}
		if m.listed && m.Status == PeerAlive && !everybody {
			have[m.Address] = true
		} else {
			wanted = append(wanted, m.Address)
		}
	}
	slices.Sort(wanted)
	wanted = slices.DeleteFunc(slices.Compact(wanted), func(a string) bool { return have[a] })
	if len(wanted) > maxRejoins {
		// Each gets its turn.
		g.round++
		at := g.round * maxRejoins % len(wanted)
		wanted = slices.Concat(wanted[at:], wanted[:at])[:maxRejoins]
	}
	return wanted
}

// defend asks the process that others know under our name. If it is dead they will find so,
// and until then are told of our address; if it lives, the one that started second must go.
func (g *Gossip) defend(address string) error {
	ctx, cancel := context.WithTimeout(g.ctx, lookTimeout)
	defer cancel()
	who, err := g.ask(ctx, addToPort(address, GRPCPortOffset))
	lives := err == nil && (who == Identity{} || who.Name == g.cfg.Name && who.Incarnation != g.cfg.Incarnation)
	g.mu.Lock()
	settled := g.settled
	if !lives {
		g.pushUntil = time.Now().Add(pushFor)
	}
	g.mu.Unlock()
	switch {
	case !lives:
		return nil
	case !settled:
		return fmt.Errorf("%w: %q answers at %s: give this node a --node-id of its own, or stop the other", ErrNameTaken, g.cfg.Name, address)
	}
	g.say("taken "+address, func() {
		g.log.Error("a second process started under this node's name", "node", g.cfg.Name, "second_address", address, "remedy", "give each node a --node-id of its own")
	})
	return nil
}

// concluded keeps what a round of joins came to and says it where it matters: once when no
// seed answers, once when one does again.
func (g *Gossip) concluded(joined, contested bool, reasons []string) {
	g.mu.Lock()
	alone := !joined && !slices.ContainsFunc(slices.Collect(maps.Values(g.members)), func(m *member) bool { return m.Status == PeerAlive })
	changed := alone != g.lonely
	g.lonely = alone
	if joined && !contested {
		g.settled, g.pushUntil = true, time.Time{}
	}
	g.mu.Unlock()
	seeds := strings.Join(g.cfg.Seeds, ",")
	switch {
	case changed && alone:
		g.log.Warn("no other node answers; this one keeps trying", "join", seeds, "reasons", strings.Join(reasons, "; "), "remedy", "check --join, and that the other nodes run")
	case changed && len(g.cfg.Seeds) > 0:
		g.log.Info("joined the gossip", "join", seeds)
	}
}

// reason makes one clear line of what memberlist says of a failed join.
func reason(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	switch {
	case wrongKey(text):
		return "its gossip keys are others (copy the same gossip.keys to all nodes)"
	case strings.HasSuffix(text, "EOF") || strings.Contains(text, "reset by peer") || strings.Contains(text, "broken pipe"):
		return "it closed the connection: it may be of another cluster (--cluster-name), or have other gossip keys"
	}
	if _, after, ok := strings.Cut(text, "* "); ok {
		return after
	}
	return text
}
