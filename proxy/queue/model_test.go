package queue

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// model is the scheduler without any of its structures: a list of tickets and a table of what is in use. It
// follows what the scheduler puts out, and says where that breaks a rule.
type model struct {
	s        *Scheduler
	cfg      Config
	out      Output
	now      int64
	seq      int
	tickets  []*modelTicket
	backends []Backend
	used     map[modelUse]int64
	newcomer *modelTicket
}

type modelUse struct {
	node    uint64
	backend string
}

type modelTicket struct {
	Ticket
	seq      int
	arrived  int64
	deadline int64
	places   []string // those that are left
	costs    map[string]int64
	grant    *Grant
	at       int64 // of the grant
	missed   map[string]bool
}

func newModel(r *rapid.T) *model {
	cfg := Config{
		TargetWait: time.Duration(rapid.Int64Range(1, 40).Draw(r, "target")) * 100 * time.Millisecond,
		MaxBytes:   rapid.SampledFrom([]int64{20, 1 << 20}).Draw(r, "max_bytes"),
		Tickets:    rapid.SampledFrom([]int{6, 1000}).Draw(r, "tickets"),
		Rand:       rand.New(rand.NewPCG(1, 2)),
	}
	return &model{s: New(cfg), cfg: cfg, used: map[modelUse]int64{}, now: 1}
}

func (m *model) find(node, id uint64) *modelTicket {
	i := slices.IndexFunc(m.tickets, func(t *modelTicket) bool { return t.Node == node && t.ID == id })
	if i < 0 {
		return nil
	}
	return m.tickets[i]
}

func (m *model) remove(t *modelTicket) {
	m.tickets = slices.DeleteFunc(m.tickets, func(o *modelTicket) bool { return o == t })
}

func (m *model) backend(id string) *Backend {
	i := slices.IndexFunc(m.backends, func(b Backend) bool { return b.ID == id })
	if i < 0 {
		return nil
	}
	return &m.backends[i]
}

// taken is what is used and granted of a backend.
func (m *model) taken(id string) (n int64) {
	for u, k := range m.used {
		if u.backend == id {
			n += k
		}
	}
	for _, t := range m.tickets {
		if t.grant != nil && t.grant.Backend == id {
			n += t.grant.Cost
		}
	}
	return n
}

func capacityOf(b *Backend) int64 {
	if b.Limit < 0 {
		return max(b.Slots, 1)
	}
	return min(max(b.Slots, 1), max(b.Limit, 1))
}

func (m *model) fits(id string, cost int64) bool {
	b := m.backend(id)
	if b == nil {
		return false
	}
	taken := m.taken(id)
	return taken == 0 || taken+min(cost, max(b.Slots, 1)) <= capacityOf(b)
}

// absorb takes what came out, in any order of grants and drops: rules are checked against what was before.
func (m *model) absorb(r *rapid.T) {
	for _, d := range m.out.Drops {
		m.dropped(r, d)
	}
	for _, g := range m.out.Grants {
		m.granted(r, g)
	}
	m.out.Reset()
	m.newcomer = nil
	m.check(r)
}

func (m *model) granted(r *rapid.T, g Grant) {
	t := m.find(g.Node, g.ID)
	switch {
	case t == nil || t.grant != nil:
		r.Fatalf("grant to %d of %d, which does not wait", g.ID, g.Node)
	case m.now >= t.deadline:
		r.Fatalf("grant after the end of patience")
	case !slices.Contains(t.places, g.Backend):
		r.Fatalf("grant of %q, which is none of %v", g.Backend, t.places)
	case !m.fits(g.Backend, t.costs[g.Backend]):
		r.Fatalf("grant of %q, where %d are taken of %+v", g.Backend, m.taken(g.Backend), m.backend(g.Backend))
	case g.Cost != min(t.costs[g.Backend], max(m.backend(g.Backend).Slots, 1)):
		r.Fatalf("grant costs %d", g.Cost)
	}
	for _, o := range m.tickets {
		older := o.grant == nil && o.Tenant == t.Tenant && o.Class == t.Class && (o.arrived < t.arrived || o.arrived == t.arrived && o.seq < t.seq)
		if older && slices.Contains(o.places, g.Backend) && o.costs[g.Backend] == 1 && !o.missed[g.Backend] {
			r.Fatalf("%d of %d goes to %q before %d of %d of the same tenant", g.ID, g.Node, g.Backend, o.ID, o.Node)
		}
	}
	t.grant, t.at = &g, m.now
}

func (m *model) dropped(r *rapid.T, d Drop) {
	t := m.find(d.Node, d.ID)
	if t == nil {
		r.Fatalf("drop of %d of %d, which is not there", d.ID, d.Node)
	}
	if d.RetryAfter < minRetry || d.RetryAfter > maxRetry {
		r.Fatalf("retry after %v", d.RetryAfter)
	}
	switch d.Reason {
	case Expired:
		if t.deadline > m.now && (t.grant == nil || m.now-t.at < int64(GrantTimeout)) {
			r.Fatalf("expired %v too early", time.Duration(t.deadline-m.now))
		}
	case NoBackend:
		if len(t.places) > 0 {
			r.Fatalf("no backend, but %v", t.places)
		}
	case QueueFull:
		m.refused(r, t)
	case Evicted:
		m.evicted(r, t)
	}
	m.remove(t)
}

// refused: the first of its class always finds a place, but for the bounds of memory.
func (m *model) refused(r *rapid.T, t *modelTicket) {
	if t != m.newcomer {
		r.Fatalf("%d of %d is refused, which was there", t.ID, t.Node)
	}
	n, bytes := 0, int64(0)
	for _, o := range m.tickets {
		bytes += o.Bytes
		if o != t && o.Class == t.Class && o.grant == nil && slices.ContainsFunc(o.places, func(b string) bool { return slices.Contains(t.places, b) }) {
			n++
		}
	}
	if n == 0 && bytes <= m.cfg.MaxBytes && len(m.tickets) <= m.cfg.Tickets {
		r.Fatalf("refused, and nobody of its class waits")
	}
	if t.Waited > 0 && bytes <= m.cfg.MaxBytes && len(m.tickets) <= m.cfg.Tickets {
		r.Fatalf("refused, and it had waited")
	}
}

// evicted: whoever makes room for a ticket has more than its tenant, or is of a class with more for its weight.
func (m *model) evicted(r *rapid.T, t *modelTicket) {
	n := m.newcomer
	if n == nil || t == n || t.grant != nil {
		r.Fatalf("evicted for nobody")
	}
	var size [2]int64
	var count [2]int // at the newcomer's backend where they are most; of its own those that cannot be passed over
	at := map[string]*[2]int{}
	for _, id := range n.places {
		at[id] = &[2]int{}
	}
	var load [2]float64
	for _, o := range m.tickets {
		if o == n || o.grant != nil {
			continue
		}
		for i, k := range []*modelTicket{t, n} {
			if o.Class != k.Class {
				continue
			}
			load[i]++
			if o.Tenant == k.Tenant {
				for _, id := range o.places {
					if k := at[id]; k != nil && (i == 0 || o.costs[id] == 1 && !o.missed[id]) {
						k[i]++
						count[i] = max(count[i], k[i])
					}
				}
				size[i] += o.Bytes + ticketSize
			}
		}
	}
	weight := m.s.cfg.Weights
	if t.Class == n.Class && count[0] < count[1]+2 && size[0] < size[1]+n.Bytes+ticketSize {
		r.Fatalf("a tenant with %d (%d) is evicted from for one with %d (%d)", count[0], size[0], count[1], size[1])
	}
	if t.Class != n.Class && len(t.places) == len(n.places) && m.cfg.MaxBytes > 20 && m.cfg.Tickets > 6 &&
		len(m.backends) == 1 && load[0] > 1 && load[0]/float64(weight[t.Class]) < load[1]/float64(weight[n.Class]) {
		r.Fatalf("%v with %v is evicted from for %v with %v", t.Class, load[0], n.Class, load[1])
	}
}

// check holds what is true after every step.
func (m *model) check(r *rapid.T) {
	var waiting [Classes]int
	granted, bytes := 0, int64(0)
	for _, t := range m.tickets {
		bytes += t.Bytes
		if t.grant != nil {
			granted++
			continue
		}
		waiting[t.Class]++
		for _, id := range t.places {
			b := m.s.backends[id]
			if b == nil {
				r.Fatalf("%q is forgotten, and %d waits for it", id, t.ID)
			}
			idle := b.pauseUntil <= m.now && b.saver == nil && !t.missed[id] && t.costs[id] == 1
			if idle && m.fits(id, 1) {
				r.Fatalf("%d of %d waits, and %q has room", t.ID, t.Node, id)
			}
		}
	}
	st := m.s.Look(m.now)
	if st.WaitingByClass != waiting || st.Granted != granted || st.Bytes != bytes || st.Waiting != m.s.Waiting() {
		r.Fatalf("waiting %v granted %d bytes %d, not %+v", waiting, granted, bytes, st)
	}
	if bytes > m.cfg.MaxBytes || len(m.tickets) > m.cfg.Tickets {
		r.Fatalf("%d tickets with %d bytes", len(m.tickets), bytes)
	}
	for _, b := range st.Backends {
		var used int64
		for u, n := range m.used {
			if u.backend == b.ID {
				used += n
			}
		}
		n := 0
		for _, t := range m.tickets {
			if t.grant == nil && slices.Contains(t.places, b.ID) {
				n++
			}
		}
		if b.InUse != used || b.Waiting != n || b.Granted != m.taken(b.ID)-used || n > 0 && !b.Contended {
			r.Fatalf("%d in use, %d waiting, not %+v", used, n, b)
		}
		for _, f := range []float64{b.Pressure, b.Rate, b.Desired} {
			if math.IsNaN(f) || math.IsInf(f, 0) || f < 0 {
				r.Fatalf("%+v", b)
			}
		}
	}
	if err := sound(m.s); err != nil {
		r.Fatal(err)
	}
}

// sound walks all structures.
func sound(s *Scheduler) error {
	for _, b := range s.backends {
		n, load := 0, int64(0)
		for c := range b.classes {
			l := &b.classes[c]
			linked := 0
			for _, e := range l.order.entries {
				k := e.item
				if e.key != k.tag || k.n == 0 || k.idle || k.backend != b || s.accounts[accountKey{k.account.tenant, k.account.class}] != k.account {
					return fmt.Errorf("claim %+v at %q", k, b.id)
				}
				count := 0
				for p := k.ages.head; p != nil; p = p.links[0].next {
					if p.claim != k || p.backend != b || p.ticket.granted != nil || p.parked != 0 {
						return fmt.Errorf("place %+v at %q", p, b.id)
					}
					if q := p.links[0].next; q != nil && q.older(p) {
						return fmt.Errorf("%q: not by age", b.id)
					}
					count++
				}
				if count != k.n {
					return fmt.Errorf("%q: %d in a claim of %d", b.id, count, k.n)
				}
				linked += count
			}
			aged := 0
			for p := l.ages.head; p != nil; p = p.links[1].next {
				if q := p.links[1].next; q != nil && q.older(p) {
					return fmt.Errorf("%q: line not by age", b.id)
				}
				aged++
			}
			if aged != linked || l.biggest.len() != l.order.len() {
				return fmt.Errorf("%q: %d and %d linked", b.id, aged, linked)
			}
			parked := 0
			for _, p := range b.parked {
				if p.ticket.class == Class(c) {
					parked++
				}
			}
			if l.n != linked+parked {
				return fmt.Errorf("%q: %d in line, %d linked, %d parked", b.id, l.n, linked, parked)
			}
			n += l.n
			load += l.load
		}
		if b.n != n || b.load != load || b.dirty {
			return fmt.Errorf("%q: %d of %d, %d of %d, dirty %v", b.id, b.n, n, b.load, load, b.dirty)
		}
		if b.saver != nil && (b.saver.saving != b || b.saver.granted != nil || b.saver.account == nil) {
			return fmt.Errorf("%q saves for nobody", b.id)
		}
	}
	return nil
}

func (m *model) setBackends(r *rapid.T) {
	var list []Backend
	for i := range rapid.IntRange(1, 3).Draw(r, "backends") {
		list = append(list, Backend{
			ID: string(rune('a' + i)), Slots: rapid.Int64Range(0, 6).Draw(r, "slots"),
			Limit: rapid.Int64Range(-1, 6).Draw(r, "limit"), Overflow: i == 2,
		})
	}
	m.backends = list
	// A place is lost where its backend was named once.
	for _, t := range m.tickets {
		t.places = slices.DeleteFunc(t.places, func(id string) bool {
			b := m.s.backends[id]
			return t.grant == nil && m.backend(id) == nil && b != nil && b.known
		})
	}
	m.s.SetBackends(m.now, list, &m.out)
	m.absorb(r)
}

func (m *model) join(r *rapid.T) {
	m.seq++
	t := &modelTicket{seq: m.seq, costs: map[string]int64{}, missed: map[string]bool{}, Ticket: Ticket{
		Node: rapid.Uint64Range(1, 3).Draw(r, "node"), ID: uint64(m.seq), Tenant: rapid.SampledFrom([]string{"x", "y", "z"}).Draw(r, "tenant"),
		Class: Class(rapid.IntRange(0, 2).Draw(r, "class")), Work: rapid.Int64Range(0, 5000).Draw(r, "work"), Bytes: rapid.Int64Range(0, 12).Draw(r, "bytes"),
		Patience: time.Duration(rapid.Int64Range(-1, 20).Draw(r, "patience")) * 500 * time.Millisecond,
		Waited:   time.Duration(rapid.SampledFrom([]int64{0, 0, 0, 1, 3}).Draw(r, "waited")) * 100 * time.Millisecond,
	}}
	if t.Patience > 9*time.Second {
		t.Patience = math.MaxInt64
	}
	if rapid.IntRange(0, 9).Draw(r, "again") == 0 && len(m.tickets) > 0 {
		old := m.tickets[rapid.IntRange(0, len(m.tickets)-1).Draw(r, "which")]
		t.Node, t.ID = old.Node, old.ID
		m.remove(old)
	}
	for range rapid.IntRange(1, 3).Draw(r, "places") {
		p := Place{rapid.SampledFrom([]string{"a", "b", "c"}).Draw(r, "place"), rapid.SampledFrom([]int64{0, 1, 1, 1, 2, 4}).Draw(r, "cost")}
		t.Places = append(t.Places, p)
		if !slices.Contains(t.places, p.Backend) {
			t.places = append(t.places, p.Backend)
			t.costs[p.Backend] = max(p.Cost, 1)
		}
	}
	t.arrived, t.deadline = m.now-int64(t.Waited), later(m.now, int64(t.Patience))
	m.tickets = append(m.tickets, t)
	m.newcomer = t
	m.s.Join(m.now, &t.Ticket, &m.out)
	m.absorb(r)
}

// pick draws a ticket that is granted, or any.
func (m *model) pick(r *rapid.T, granted bool) *modelTicket {
	var list []*modelTicket
	for _, t := range m.tickets {
		if t.grant != nil || !granted {
			list = append(list, t)
		}
	}
	if len(list) == 0 {
		r.Skip("none")
	}
	return list[rapid.IntRange(0, len(list)-1).Draw(r, "ticket")]
}

func (m *model) started(r *rapid.T) {
	t := m.pick(r, true)
	m.remove(t)
	u := modelUse{t.Node, t.grant.Backend}
	m.used[u] += t.grant.Cost
	m.s.Started(m.now, t.Node, t.ID)
	m.s.Used(m.now, t.Node, t.grant.Backend, m.used[u], &m.out)
	m.absorb(r)
}

func (m *model) miss(r *rapid.T) {
	t := m.pick(r, true)
	t.missed[t.grant.Backend] = true
	t.grant = nil
	t.places = slices.DeleteFunc(t.places, func(id string) bool { b := m.s.backends[id]; return b == nil || b.closed })
	m.s.Miss(m.now, t.Node, t.ID, &m.out)
	m.absorb(r)
}

func (m *model) leave(r *rapid.T) {
	t := m.pick(r, false)
	m.remove(t)
	m.s.Leave(m.now, t.Node, t.ID, &m.out)
	m.s.Leave(m.now, t.Node, t.ID, &m.out)
	m.absorb(r)
}

// usedBy lets a node use more or less of a backend than before. Where it is plain whose turn it is, that one
// must get it.
func (m *model) usedBy(r *rapid.T) {
	u := modelUse{rapid.Uint64Range(0, 3).Draw(r, "node"), rapid.SampledFrom([]string{"a", "b", "c"}).Draw(r, "backend")}
	n := rapid.Int64Range(-1, 6).Draw(r, "n")
	if rapid.Bool().Draw(r, "less") {
		n = m.used[u] - 1
	}
	m.used[u] = max(n, 0)
	want := m.turn(u.backend)
	m.s.Used(m.now, u.node, u.backend, n, &m.out)
	if want != nil && (len(m.out.Grants) == 0 || m.out.Grants[0].Node != want.Node || m.out.Grants[0].ID != want.ID) {
		r.Fatalf("it is %d of %d that should go first, not %+v", want.ID, want.Node, m.out)
	}
	m.absorb(r)
}

// turn finds who is next at a backend by looking at every ticket: nil where there is no room, or passing
// over and saving up make it less than plain.
func (m *model) turn(id string) *modelTicket {
	b := m.s.backends[id]
	if b == nil || b.saver != nil || len(b.parked) > 0 || b.pauseUntil > m.now || !m.fits(id, 1) || len(m.s.dirty) > 0 {
		return nil
	}
	var list []*modelTicket
	for _, t := range m.tickets {
		if t.grant == nil && slices.Contains(t.places, id) {
			if t.costs[id] > 1 || t.deadline <= m.now {
				return nil
			}
			list = append(list, t)
		}
	}
	if len(list) == 0 {
		return nil
	}
	class := slices.MinFunc(list, func(x, y *modelTicket) int {
		return cmp.Or(cmp.Compare(b.classes[x.Class].tag, b.classes[y.Class].tag), cmp.Compare(x.Class, y.Class))
	}).Class
	list = slices.DeleteFunc(list, func(t *modelTicket) bool { return t.Class != class })
	byAge := func(x, y *modelTicket) int {
		return cmp.Or(cmp.Compare(x.arrived, y.arrived), cmp.Compare(m.s.tickets[ticketKey{x.Node, x.ID}].seq, m.s.tickets[ticketKey{y.Node, y.ID}].seq))
	}
	claim := func(t *modelTicket) *claim { return m.s.accounts[accountKey{t.Tenant, t.Class}].claims[b] }
	least := slices.MinFunc(list, func(x, y *modelTicket) int {
		return cmp.Or(cmp.Compare(claim(x).tag, claim(y).tag), cmp.Compare(claim(x).seq, claim(y).seq), byAge(x, y))
	})
	tenants, own := map[string]bool{}, 0
	for _, t := range list {
		tenants[t.Tenant] = true
		if t.Tenant == least.Tenant {
			own++
		}
	}
	part := float64(len(list)) / float64(len(tenants))
	t := slices.MinFunc(list, byAge)
	if age := m.now - t.arrived; age > int64(m.cfg.TargetWait)/8*ageEighths && float64(own) > part/2 || age > 2*int64(m.cfg.TargetWait) {
		return t
	}
	return least
}

func (m *model) done(r *rapid.T) {
	m.s.Done(m.now, rapid.SampledFrom([]string{"a", "b", "?"}).Draw(r, "backend"), Class(rapid.IntRange(0, 2).Draw(r, "class")),
		rapid.SampledFrom([]string{"x", "y", "?"}).Draw(r, "tenant"), rapid.Int64Range(0, 4).Draw(r, "cost"), time.Duration(rapid.Int64Range(-1, 1e10).Draw(r, "held")), rapid.Bool().Draw(r, "worked"))
	m.check(r)
}

func (m *model) gone(r *rapid.T) {
	node := rapid.Uint64Range(0, 3).Draw(r, "node")
	m.tickets = slices.DeleteFunc(m.tickets, func(t *modelTicket) bool { return t.Node == node })
	for u := range m.used {
		if u.node == node {
			delete(m.used, u)
		}
	}
	m.s.Gone(m.now, node, &m.out)
	m.absorb(r)
}

func (m *model) pass(r *rapid.T) {
	m.now += rapid.SampledFrom([]int64{0, 1e6, 1e7, 1e8, 1e9, 2e10}).Draw(r, "ns")
	next := m.s.Expire(m.now, &m.out)
	if next <= m.now {
		r.Fatalf("to be called %v ago", time.Duration(m.now-next))
	}
	m.absorb(r)
	for _, t := range m.tickets {
		if t.grant == nil && (t.deadline <= m.now || next > t.deadline) {
			r.Fatalf("%d waits after its patience", t.ID)
		}
	}
}

// end lets everybody go, and nothing may be left.
func (m *model) end(r *rapid.T) {
	for node := range uint64(4) {
		m.s.Gone(m.now, node, &m.out)
	}
	m.out.Reset() // what the others got meanwhile
	m.now += int64(time.Minute)
	m.s.Expire(m.now, &m.out)
	if len(m.out.Grants)+len(m.out.Drops) > 0 {
		r.Fatalf("%+v for nobody", m.out)
	}
	claims := 0
	for id, b := range m.s.backends {
		if m.backend(id) == nil {
			r.Fatalf("%q is left", id)
		}
		claims += b.idle.n
	}
	if len(m.s.tickets)+len(m.s.accounts)+len(m.s.nodes)+m.s.due.len()+m.s.wakes.len()+claims > 0 || m.s.bytes != 0 {
		r.Fatalf("left: %d tickets, %d accounts, %d nodes, %d due, %d wakes, %d claims", len(m.s.tickets), len(m.s.accounts), len(m.s.nodes), m.s.due.len(), m.s.wakes.len(), claims)
	}
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		m := newModel(r)
		m.setBackends(r)
		r.Repeat(map[string]func(*rapid.T){
			"join": m.join, "join2": m.join, "join3": m.join, "used": m.usedBy, "used2": m.usedBy, "started": m.started,
			"miss": m.miss, "leave": m.leave, "done": m.done, "pass": m.pass, "gone": m.gone, "backends": m.setBackends,
		})
		m.end(r)
	})
}
