package lease

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"headgate/lease/leasepb"
)

// The bounds of the owner's side.
const (
	maxServed    = 4096 // streams of holders
	maxNames     = 8192 // of processes, remembered
	maxUnsaid    = 4096 // responses that wait for one stream; a holder that takes none is cut off
	maxDraws     = 64   // at once
	drawTimeout  = 5 * time.Second
	drawRetry    = 100 * time.Millisecond
	selfRounds   = 8       // messages to and fro in one exchange with the owner in this process
	maxHandPart  = 1 << 20 // bytes, and a bucket
	maxHands     = 8       // at once
	handTimeout  = 10 * time.Second
	handRetry    = 20 * time.Millisecond
	maxHandRetry = 500 * time.Millisecond
	idleTick     = time.Second // the longest that the owner waits for time to pass
)

// exchange says to the owner in this process what the holder has to say, with an ask or, if it has
// anything, without.
func (m *Manager) exchange(a *asking) {
	m.ownerMu.Lock()
	defer m.ownerMu.Unlock()
	m.exchangeLocked(a)
}

// exchangeLocked goes on while the owner wants something back at once: a recall; m.ownerMu is held.
func (m *Manager) exchangeLocked(a *asking) {
	l := m.self
	for round := 0; round < selfRounds && (l.wanted.Swap(false) || a != nil); round++ {
		var asks []Ask
		s := sending{at: m.cfg.Clock().Now}
		if a != nil {
			a.sent, asks, s.asks = s.at, []Ask{a.ask}, []*asking{a}
			a = nil
		}
		r := m.holder.Request(m.cfg.Self.Incarnation, asks)
		if r == nil {
			l.drop(s.asks)
			return
		}
		s.seq = r.Seq
		l.mu.Lock()
		l.sent = append(l.sent, s)
		l.mu.Unlock()
		m.handleLocked(r)
		if len(r.Reports) >= wireReports {
			l.wanted.Store(true)
		}
	}
}

// handle is handleLocked, and what that has the holder in this process say.
func (m *Manager) handle(r *Request) {
	m.ownerMu.Lock()
	defer m.ownerMu.Unlock()
	m.handleLocked(r)
	m.exchangeLocked(nil)
}

// handleLocked has the owner answer and sees its answers off; m.ownerMu is held.
func (m *Manager) handleLocked(r *Request) {
	m.routeLocked(m.owner.Handle(m.cfg.Clock(), r))
	m.afterLocked()
}

// routeLocked sends responses to whom they are for; m.ownerMu is held.
func (m *Manager) routeLocked(rs []*Response) {
	for _, r := range rs {
		if r.Holder == m.cfg.Self.Incarnation {
			m.self.heardOf(r)
			continue
		}
		m.mu.Lock()
		s := m.served[r.Holder]
		m.mu.Unlock()
		if s != nil { // else it is lost, as a message may be
			s.say(r)
		}
	}
}

// afterLocked looks what else the owner wants; m.ownerMu is held.
func (m *Manager) afterLocked() {
	at := m.cfg.Clock()
	m.drawAll(at)
	if next := m.owner.Next(); next < m.nextTick {
		m.nextTick = next
		signal(m.soon)
	}
}

func (m *Manager) drawElsewhere(at Instant) {
	for _, d := range m.owner.Draws(at) {
		k := drawKey{d.Bucket, d.N}
		if !m.draws[k] && len(m.draws) < maxDraws && m.run(func(ctx context.Context) { m.draw(ctx, k, d) }) {
			m.draws[k] = true
		}
	}
}

// drawKey names a draw.
type drawKey struct {
	bucket Bucket
	n      uint64
}

// draw has the ledger fill a durable bucket.
func (m *Manager) draw(ctx context.Context, k drawKey, d Draw) {
	ctx, cancel := context.WithTimeout(ctx, drawTimeout)
	defer cancel()
	drawn, err := m.cfg.Blocks.Draw(ctx, d)
	if err != nil {
		pause(ctx, drawRetry)
		drawn = Drawn{Bucket: d.Bucket, N: d.N, Err: true}
		m.log.Warn("a block of a durable limit was not drawn; it is tried again", "tenant", d.Key.Tenant, "limit", d.Key.Limit, "error", err)
	}
	m.ownerMu.Lock()
	defer m.ownerMu.Unlock()
	delete(m.draws, k)
	m.routeLocked(m.owner.Drawn(m.cfg.Clock(), drawn))
	m.afterLocked()
	m.exchangeLocked(nil)
}

// pause is over after d or with ctx.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// tick does what time brings to the owner, until ctx ends.
func (m *Manager) tick(ctx context.Context) {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.soon:
		case <-t.C:
		}
		m.ownerMu.Lock()
		at := m.cfg.Clock()
		if m.owner.Next() <= at.Now {
			m.routeLocked(m.owner.Tick(at))
		}
		owing := m.owner.Owing()
		m.owing.Store(&owing)
		m.nextTick = m.owner.Next()
		m.afterLocked()
		m.exchangeLocked(nil)
		wait := m.owner.Next() - at.Now
		m.ownerMu.Unlock()
		t.Reset(max(min(time.Duration(wait), idleTick), time.Millisecond))
	}
}

// served is a holder's stream, on the owner's side.
type served struct {
	wake chan struct{}
	cut  context.CancelFunc

	mu    sync.Mutex
	queue []*Response
}

func (s *served) say(r *Response) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) >= maxUnsaid {
		s.cut()
		return
	}
	s.queue = append(s.queue, r)
	signal(s.wake)
}

// take is all that waits, as far as a frame holds it.
func (s *served) take() []*Response {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := min(len(s.queue), frameMessages)
	out := s.queue[:n:n]
	if s.queue = s.queue[n:]; len(s.queue) > 0 {
		signal(s.wake)
	}
	return out
}

// Register adds the service that other processes ask, before the server serves.
func (m *Manager) Register(s *grpc.Server) { leasepb.RegisterLeaseServer(s, service{m: m}) }

// service answers the other processes.
type service struct {
	leasepb.UnimplementedLeaseServer
	m *Manager
}

// Session see lease.proto.
func (s service) Session(stream leasepb.Lease_SessionServer) error {
	m := s.m
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	holder := first.GetHolder()
	switch {
	case first.GetOwner() != m.cfg.Self.Incarnation:
		return status.Error(codes.FailedPrecondition, "the owner that was meant has been started anew since, or is another node")
	case holder == 0 || holder == m.cfg.Self.Incarnation:
		m.met.rejected.Inc()
		return status.Error(codes.InvalidArgument, "the first frame names no holder")
	}
	if _, err := m.speaksFor(stream.Context(), holder); err != nil {
		return err // before it ends the stream of whom it names
	}
	ctx, cut := context.WithCancel(stream.Context())
	defer cut()
	out := &served{wake: make(chan struct{}, 1), cut: cut}
	if !m.admit(holder, out) {
		return status.Error(codes.ResourceExhausted, "too many holders")
	}
	defer m.dismiss(holder, out)
	failed := make(chan error, 1)
	go func() { failed <- s.receive(stream, holder, first) }() // ends with the stream, which ends with this call
	for {
		select {
		case <-ctx.Done():
			return status.Error(codes.Aborted, "another stream of this holder, or too slow")
		case <-m.ended:
			return status.Error(codes.Unavailable, "the node is stopping")
		case err := <-failed:
			return err
		case <-out.wake:
		}
		f := &leasepb.Frame{}
		for _, r := range out.take() {
			f.Responses = append(f.Responses, responsePB(r))
		}
		if err := stream.Send(f); err != nil {
			return err
		}
	}
}

// receive takes a holder's requests. It returns nil when the holder has closed its side.
func (s service) receive(stream leasepb.Lease_SessionServer, holder uint64, f *leasepb.Frame) error {
	for known := false; ; {
		if !known { // it may have come before the view that has the process
			var err error
			if known, err = s.m.speaksFor(stream.Context(), holder); err != nil {
				return err
			}
		}
		for _, p := range f.GetRequests() {
			r, err := requestOf(p)
			switch {
			case err != nil:
				s.m.met.rejected.Inc()
				return status.Error(codes.InvalidArgument, err.Error())
			case r.Holder != holder || r.Owner != s.m.cfg.Self.Incarnation:
				s.m.met.rejected.Inc()
				return status.Error(codes.PermissionDenied, "a request in the name of another process")
			}
			s.m.handle(r)
		}
		var err error
		if f, err = stream.Recv(); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

// speaksFor refuses a call in the name of a process of another node than the one that it comes from. Not known: no
// view that this process saw has it.
func (m *Manager) speaksFor(ctx context.Context, incarnation uint64) (known bool, err error) {
	m.mu.Lock()
	name, known := m.names[incarnation]
	m.mu.Unlock()
	if m.cfg.Peer == nil || !known {
		return known, nil
	}
	if peer := m.cfg.Peer(ctx); peer != name {
		m.met.rejected.Inc()
		m.log.Warn("a node spoke in the name of another", "node", peer, "in_the_name_of", name)
		return true, status.Error(codes.PermissionDenied, "the certificate is that of node "+peer+", and the process is one of node "+name)
	}
	return true, nil
}

// admit makes a stream the one on which its holder is answered. An earlier one ends.
func (m *Manager) admit(holder uint64, s *served) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.served[holder]
	if before == nil && len(m.served) >= maxServed {
		return false
	}
	if before != nil {
		before.cut()
	}
	m.served[holder] = s
	return true
}

func (m *Manager) dismiss(holder uint64, s *served) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.served[holder] == s {
		delete(m.served, holder)
	}
}

// HandOff see lease.proto. By its head alone it is said whether a hand-off is of any use; only one that the owner
// waits for is read, one of each partition at a time and not for longer than its sender would wait.
func (s service) HandOff(stream leasepb.Lease_HandOffServer) error {
	m := s.m
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	h, err := handOffOf(first.GetHead())
	switch {
	case err != nil:
		m.met.rejected.Inc()
		return status.Error(codes.InvalidArgument, err.Error())
	case h.To != m.cfg.Self.Incarnation:
		return status.Error(codes.FailedPrecondition, "the receiver that was meant has been started anew since, or is another node")
	}
	if _, err := m.speaksFor(stream.Context(), h.From); err != nil {
		return err
	}
	m.mu.Lock()
	later := m.view == nil || m.view.Epoch < h.Epoch
	m.mu.Unlock()
	if later {
		return stream.SendAndClose(&leasepb.HandOffResponse{Later: true})
	}
	m.ownerMu.Lock()
	awaited, accepted := m.owner.Awaits(h), false
	if !awaited {
		accepted = m.owner.Accept(m.cfg.Clock(), h)
	}
	m.ownerMu.Unlock()
	if awaited {
		if err := m.readHandOff(stream, first, h); err != nil {
			return err
		}
		m.ownerMu.Lock()
		accepted = m.owner.Accept(m.cfg.Clock(), h)
		m.afterLocked()
		m.ownerMu.Unlock()
		m.announce()
	}
	m.met.handOff("received", accepted)
	return stream.SendAndClose(&leasepb.HandOffResponse{Accepted: accepted})
}

// readHandOff reads the buckets of a hand-off, in handTimeout at most.
func (m *Manager) readHandOff(stream leasepb.Lease_HandOffServer, first *leasepb.HandOffPart, h *Handoff) error {
	m.mu.Lock()
	taken := m.taking[h.Partition]
	m.taking[h.Partition] = true
	m.mu.Unlock()
	if taken {
		return status.Error(codes.Aborted, "another hand-off of this partition is being read")
	}
	defer func() {
		m.mu.Lock()
		delete(m.taking, h.Partition)
		m.mu.Unlock()
	}()
	read := make(chan error, 1)
	var buckets []HandedBucket
	go func() { // ends with the stream, which ends with this call
		var err error
		buckets, err = m.received(stream, first)
		read <- err
	}()
	t := time.NewTimer(handTimeout)
	defer t.Stop()
	select {
	case err := <-read:
		h.Buckets = buckets
		return err
	case <-t.C:
		return status.Error(codes.DeadlineExceeded, "the hand-off took too long")
	}
}

// received reads the buckets of a hand-off whole.
func (m *Manager) received(stream leasepb.Lease_HandOffServer, p *leasepb.HandOffPart) (buckets []HandedBucket, err error) {
	most := max(m.cfg.MaxBuckets, DefaultMaxBuckets) // its sender may be allowed more than this process
	for {
		for _, b := range p.GetBuckets() {
			hb, err := handedOf(b)
			if err != nil || len(buckets) >= most {
				m.met.rejected.Inc()
				return nil, status.Error(codes.InvalidArgument, fmt.Sprintf("bucket %d of a hand-off: %v", len(buckets), err))
			}
			buckets = append(buckets, hb)
		}
		if p.GetEnd() {
			if p.GetCount() != uint64(len(buckets)) {
				m.met.rejected.Inc()
				return nil, status.Error(codes.InvalidArgument, "a hand-off that says it has another number of buckets")
			}
			return buckets, nil
		}
		if p, err = stream.Recv(); err != nil {
			return nil, err // also io.EOF: it is torn
		}
	}
}

// handKey names a hand-off under way.
type handKey struct {
	partition uint32
	epoch     uint64
	to        uint64
}

// handOffs gives what this process owned to its next owners, until ctx ends.
func (m *Manager) handOffs(ctx context.Context) {
	slots := make(chan struct{}, maxHands)
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.moved:
		}
		m.ownerMu.Lock()
		ks := m.owner.heads()
		m.ownerMu.Unlock()
		for _, k := range ks {
			to, ok := m.member(k.to)
			if !ok || !m.begin(k) {
				continue
			}
			select {
			case <-ctx.Done():
				return
			case slots <- struct{}{}:
			}
			m.wg.Go(func() {
				defer func() { <-slots }()
				m.ownerMu.Lock()
				h := m.owner.handOffOf(m.cfg.Clock(), k)
				m.ownerMu.Unlock()
				if h != nil {
					m.handOver(ctx, h, to)
				}
				m.finish(k)
			})
		}
	}
}

// member of the newest view, another than this process.
func (m *Manager) member(incarnation uint64) (Member, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.view != nil && incarnation != m.cfg.Self.Incarnation {
		for _, to := range m.view.Members {
			if to.Incarnation == incarnation {
				return to, true
			}
		}
	}
	return Member{}, false
}

func (m *Manager) begin(k handKey) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.handing[k] {
		return false
	}
	m.handing[k] = true
	return true
}

func (m *Manager) finish(k handKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.handing, k)
	close(m.handed)
	m.handed = make(chan struct{})
}

// handOver sends one hand-off until it is acknowledged or its receiver is the owner no more. What the
// receiver finds wrong with it a repetition would not mend.
func (m *Manager) handOver(ctx context.Context, h *Handoff, to Member) {
	for wait := handRetry; ctx.Err() == nil; wait = min(2*wait, maxHandRetry) {
		resp, err := m.sendHandOff(ctx, h, to)
		m.mu.Lock()
		still := m.view.OwnerOf(h.Partition).Incarnation == h.To
		m.mu.Unlock()
		switch {
		case err == nil && resp.GetAccepted(), err == nil && !resp.GetLater() && still:
			m.handedOver(h, resp.GetAccepted())
			return
		case still && status.Code(err) == codes.InvalidArgument:
			m.log.Error("the next owner cannot read what it was handed: it starts the partition's buckets empty", "partition", h.Partition, "to", to.Name, "error", err)
			m.handedOver(h, false)
			return
		case !still:
			m.met.handOff("sent", false)
			signal(m.moved) // to the one who owns it now
			return
		}
		pause(ctx, wait)
	}
}

// handedOver forgets what is handed over, or never will be.
func (m *Manager) handedOver(h *Handoff, accepted bool) {
	m.ownerMu.Lock()
	m.owner.HandedOff(h.Partition, h.Epoch)
	m.ownerMu.Unlock()
	m.met.handOff("sent", accepted)
}

func (m *Manager) sendHandOff(ctx context.Context, h *Handoff, to Member) (*leasepb.HandOffResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, handTimeout)
	defer cancel()
	cc, err := m.cfg.Client(to.Address)
	if err != nil {
		return nil, err
	}
	stream, err := leasepb.NewLeaseClient(cc).HandOff(ctx)
	if err != nil {
		return nil, err
	}
	for part := range handParts(h) {
		if err := stream.Send(part); errors.Is(err, io.EOF) {
			break // the other side has answered already
		} else if err != nil {
			return nil, err
		}
	}
	return stream.CloseAndRecv()
}

// handParts are the parts of a hand-off, none much above maxHandPart.
func handParts(h *Handoff) iter.Seq[*leasepb.HandOffPart] {
	return func(yield func(*leasepb.HandOffPart) bool) {
		part, size := &leasepb.HandOffPart{Head: handOffHeadPB(h)}, 0
		for i := range h.Buckets {
			b := handedPB(&h.Buckets[i])
			part.Buckets = append(part.Buckets, b)
			if size += proto.Size(b); size < maxHandPart {
				continue
			}
			if !yield(part) {
				return
			}
			part, size = &leasepb.HandOffPart{}, 0
		}
		part.End, part.Count = true, uint64(len(h.Buckets))
		yield(part)
	}
}

// HandOver waits, after a Step to a view in which this process owns nothing, until all that it
// owned is handed over and acknowledged, or nobody is there to take it, or ctx ends.
func (m *Manager) HandOver(ctx context.Context) error {
	t := time.NewTicker(handRetry)
	defer t.Stop()
	for {
		m.mu.Lock()
		handed, under := m.handed, len(m.handing)
		m.mu.Unlock()
		open := under
		if under == 0 {
			if open = m.unhanded(); open == 0 {
				return nil
			}
			signal(m.moved)
		}
		select {
		case <-handed:
		case <-t.C:
		case <-ctx.Done():
			return fmt.Errorf("lease: %d or more partitions are not handed over; their next owners start them empty: %w", open, context.Cause(ctx))
		}
	}
}

// unhanded counts what is to be handed over to a process that is there.
func (m *Manager) unhanded() (open int) {
	m.ownerMu.Lock()
	ks := m.owner.heads()
	m.ownerMu.Unlock()
	for _, k := range ks {
		if _, ok := m.member(k.to); ok {
			open++
		}
	}
	return open
}

// Drain is for a process that leaves and has settled all that it took: it takes no more leases,
// returns those it has, and waits until their owners know, or ctx ends.
func (m *Manager) Drain(ctx context.Context) error {
	m.holder.Drain()
	t := time.NewTicker(handRetry)
	defer t.Stop()
	for {
		m.speak()
		if m.holder.Drained() {
			return nil
		}
		select {
		case <-m.heard:
		case <-t.C:
		case <-ctx.Done():
			return fmt.Errorf("lease: not all owners know what this node returned; they count it as spent: %w", context.Cause(ctx))
		}
	}
}
