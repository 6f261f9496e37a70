package queue

import (
	"fmt"
	"testing"
	"time"
)

// slots is so many that any number of tickets has a place.
const slots = 1_000_000

// deep is a scheduler in which depth tickets of many tenants and all classes wait for full backends.
func deep(tb testing.TB, depth, backends int) (s *Scheduler, out *Output, t *Ticket, id *uint64) {
	tb.Helper()
	s, out, id = New(Config{Tickets: 1 << 20, MaxBytes: 1 << 40}), &Output{}, new(uint64)
	var list []Backend
	for i := range backends {
		list = append(list, Backend{ID: fmt.Sprint("backend-", i), Slots: slots, Limit: -1})
	}
	s.SetBackends(1, list, out)
	t = &Ticket{Node: 1, Work: 1000, Bytes: 4000, Patience: time.Minute}
	for _, b := range list {
		s.Used(1, 2, b.ID, b.Slots, out)
		t.Places = append(t.Places, Place{b.ID, 1})
	}
	names := tenantNames()
	for range depth {
		*id++
		t.ID, t.Tenant, t.Class = *id, names[*id%100], Class(*id%3)
		s.Join(int64(*id), t, out)
	}
	if s.Waiting() != depth || len(out.Drops) > 0 {
		tb.Fatalf("%d wait, %d dropped", s.Waiting(), len(out.Drops))
	}
	return s, out, t, id
}

// turn is what a request costs: a ticket comes, a slot becomes free, the ticket that is next gets it,
// starts and ends.
func turn(s *Scheduler, out *Output, t *Ticket, id *uint64, names []string) {
	*id++
	now := int64(*id) * 1000
	t.ID, t.Tenant, t.Class = *id, names[*id%100], Class(*id%3)
	out.Reset()
	s.Join(now, t, out)
	b := t.Places[*id%uint64(len(t.Places))].Backend
	s.Used(now, 2, b, slots-1, out)
	for _, g := range out.Grants {
		s.Started(now, g.Node, g.ID)
		s.Used(now, 2, b, slots, out)
		s.Used(now, 1, g.Backend, 0, out)
		s.Done(now, g.Backend, t.Class, t.Tenant, g.Cost, time.Second, true)
	}
	out.Reset()
	s.Expire(now, out)
}

func tenantNames() []string {
	names := make([]string, 100)
	for i := range names {
		names[i] = fmt.Sprint("tenant-", i)
	}
	return names
}

func BenchmarkJoinLeave(b *testing.B) {
	for _, backends := range []int{1, 2, 16} {
		for _, depth := range []int{100, 10_000} {
			b.Run(fmt.Sprintf("backends=%d/depth=%d", backends, depth), func(b *testing.B) {
				s, out, t, id := deep(b, depth, backends)
				names := tenantNames()
				b.ReportAllocs()
				for b.Loop() {
					*id++
					t.ID, t.Tenant, t.Class = *id, names[*id%100], Class(*id%3)
					s.Join(int64(*id), t, out)
					s.Leave(int64(*id), 1, *id-uint64(depth)/2, out)
					out.Reset()
				}
			})
		}
	}
}

func BenchmarkEnqueueDequeue(b *testing.B) {
	for _, backends := range []int{1, 2, 16} {
		for _, depth := range []int{100, 10_000} {
			b.Run(fmt.Sprintf("backends=%d/depth=%d", backends, depth), func(b *testing.B) {
				s, out, t, id := deep(b, depth, backends)
				names := tenantNames()
				b.ReportAllocs()
				for b.Loop() {
					turn(s, out, t, id, names)
				}
				b.StopTimer()
				if n := s.Waiting(); n != depth {
					b.Fatalf("%d wait", n)
				}
			})
		}
	}
}

func TestNothingIsAllocated(t *testing.T) {
	s, out, ticket, id := deep(t, 10_000, 2)
	names := tenantNames()
	for range 20_000 {
		turn(s, out, ticket, id, names)
	}
	if n := testing.AllocsPerRun(10_000, func() { turn(s, out, ticket, id, names) }); n > 0 {
		t.Errorf("%v allocations a request", n)
	}
	if n := s.Waiting(); n != 10_000 {
		t.Errorf("%d wait", n)
	}
}
