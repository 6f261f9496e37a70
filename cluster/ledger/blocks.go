package ledger

import (
	"cmp"
	"math"
	"slices"
	"time"

	"headgate/cluster/ledger/ledgerpb"
	"headgate/limiter"
)

// Bounds of the durable limits' buckets.
const (
	// MaxDurable bounds the buckets. Those that are full and of which nothing is held are forgotten.
	MaxDurable = 1 << 18

	maxDurableBytes = 64 << 20 // of their names
	maxSubject      = 1_024    // bytes of a bucket's subject
	maxBucketName   = 2*maxID + 1 + len(spreadMark)
	maxBlocks       = 8  // of one bucket at once; there are two only while its place changes within an epoch
	sweepEach       = 2  // buckets that are looked at for one that is added
	sweepFull       = 64 // and where there is no room
)

// durable is a bucket of a durable limit: a level, of which owners hold blocks.
//
// After every command level + Σ outstanding ≤ capacity: what is held keeps the level down, and all
// that can be spent at one instant is within the limit.
type durable struct {
	key    limiter.Key
	limit  limiter.Limit
	state  limiter.State
	epoch  uint64  // the highest that named it
	blocks []block // by owner
	sum    [32]byte
}

// block is what one owner may still spend as far as the ledger knows. One of which nothing is
// outstanding stays, for its number.
type block struct {
	owner, epoch, n uint64
	outstanding     int64
	result          blockResult
}

// blockResult is what the n-th command of an owner gave.
type blockResult struct{ granted, retry, level, window int64 }

func (r blockResult) message(n uint64) *ledgerpb.BlockResult {
	return &ledgerpb.BlockResult{N: n, Granted: r.granted, RetryAfterNs: r.retry, Level: r.level, Window: r.window}
}

// draw is a ReserveBlock, or with a nil limit a SettleBlock.
type draw struct {
	key                                  limiter.Key
	limit                                *limiter.Limit
	owner, epoch, n                      uint64
	want, least, holding, returned, debt int64
}

// durables is the table of the buckets.
type durables = table[limiter.Key, *durable]

func newDurables() *durables { return newTable[limiter.Key, *durable](MaxDurable, maxDurableBytes) }

func (b *durable) name() limiter.Key { return b.key }
func (b *durable) size() int         { return keySize(&b.key) }

func keySize(k *limiter.Key) int { return len(k.Tenant) + len(k.Limit) + len(k.Subject) }

func limitOf(m *ledgerpb.Limit) (limiter.Limit, error) {
	if m.GetAlgorithm() > uint32(limiter.Semaphore) {
		return limiter.Limit{}, refuse(codeInvalid, "there is no algorithm %d", m.GetAlgorithm())
	}
	l := limiter.Limit{
		Algorithm: limiter.Algorithm(m.GetAlgorithm()), Rate: limiter.Rate{Count: m.GetCount(), Per: time.Duration(m.GetPerNs())},
		Burst: m.GetBurst(), Revision: m.GetRevision(), Parts: m.GetParts(),
	}
	if l.Algorithm != limiter.GCRA && l.Algorithm != limiter.FixedWindow {
		return l, refuse(codeInvalid, "%v has no blocks: they are of gcra and fixed_window", l.Algorithm)
	}
	if err := l.Validate(); err != nil {
		return l, refuse(codeInvalid, "it is no limit: %v", err)
	}
	return l, nil
}

func limitMessage(l *limiter.Limit) *ledgerpb.Limit {
	return &ledgerpb.Limit{
		Algorithm: uint32(l.Algorithm), Count: l.Rate.Count, PerNs: int64(l.Rate.Per), Burst: l.Burst, Revision: l.Revision, Parts: l.Parts,
	}
}

func checkBucket(k *limiter.Key) error {
	if k.Limit == "" || len(k.Limit) > maxBucketName || len(k.Tenant) > maxID || len(k.Subject) > maxSubject {
		return refuse(codeInvalid, "a bucket's limit has 1 to %d bytes, its tenant at most %d and its subject %d", maxBucketName, maxID, maxSubject)
	}
	return nil
}

func (s *State) reserveBlock(c *ledgerpb.ReserveBlock) (bool, error) {
	l, err := limitOf(c.GetSpec())
	if err != nil {
		return false, err
	}
	return s.draw(&draw{
		key: limiter.Key{Tenant: c.GetTenant(), Limit: c.GetLimit(), Subject: string(c.GetSubject())}, limit: &l,
		owner: c.GetOwner(), epoch: c.GetEpoch(), n: c.GetN(), want: c.GetWant(), least: c.GetLeast(), holding: c.GetHolding(), debt: c.GetDebt(),
	})
}

func (s *State) settleBlock(c *ledgerpb.SettleBlock) (bool, error) {
	return s.draw(&draw{
		key:   limiter.Key{Tenant: c.GetTenant(), Limit: c.GetLimit(), Subject: string(c.GetSubject())},
		owner: c.GetOwner(), epoch: c.GetEpoch(), n: c.GetN(), holding: c.GetHolding(), returned: c.GetReturned(), debt: c.GetDebt(),
	})
}

func (d *draw) check(view *View) error {
	if err := checkBucket(&d.key); err != nil {
		return err
	}
	for _, n := range [...]int64{d.want, d.least, d.holding, d.returned, d.debt} {
		if n < 0 || n > limiter.MaxUnits {
			return refuse(codeInvalid, "a block is of 0 to %d units, not of %d", int64(limiter.MaxUnits), n)
		}
	}
	if d.owner == 0 || d.n == 0 {
		return refuse(codeInvalid, "a block has an owner and a number, neither of them 0")
	}
	if view != nil && d.epoch > view.Epoch {
		return refuse(codeInvalid, "the view of epoch %d is in force, and there is none of %d", view.Epoch, d.epoch)
	}
	return nil
}

// draw applies a command about blocks. What it gave goes to s.block.
func (s *State) draw(d *draw) (changed bool, err error) {
	if err := d.check(s.work.View); err != nil {
		return false, err
	}
	now := max(0, s.stamp)
	old, known := s.durables.find(d.key)
	switch {
	case known:
		if done, err := s.said(old, d); done {
			return false, err
		}
	case d.limit == nil:
		return false, refuse(codeNotFound, "there is no bucket of the limit %q", d.key.Limit)
	default:
		if changed = s.sweep(now, sweepEach); !s.durables.room(keySize(&d.key)) {
			changed = s.sweep(now, sweepFull) || changed
		}
		if !s.durables.room(keySize(&d.key)) {
			return changed, refuse(codeFull, "%d buckets of durable limits are in use, which is the most", len(s.durables.at))
		}
		old = &durable{key: d.key, limit: *d.limit}
	}
	next := *old
	next.blocks = slices.Clone(old.blocks)
	i, turned, err := next.claim(now, d)
	if err != nil {
		return changed, err
	}
	next.serve(now, &next.blocks[i], turned, d)
	next.sum = s.enc.durable(&next)
	if known {
		s.hash.remove(old.sum)
		s.durables.put(&next)
	} else {
		s.durables.add(&next)
	}
	s.hash.add(next.sum)
	s.block = next.blocks[i].result.message(d.n)
	return true, nil
}

// said answers a command that was applied before, and one that others have overtaken.
func (s *State) said(b *durable, d *draw) (done bool, err error) {
	i, own := b.find(d.owner)
	switch {
	case own && d.n == b.blocks[i].n:
		s.block = b.blocks[i].result.message(d.n)
		return true, nil
	case own && d.n < b.blocks[i].n:
		s.block = &ledgerpb.BlockResult{N: b.blocks[i].n, Epoch: b.epoch}
		return true, refuse(codeStale, "command %d about the block is known already, of the same owner: this is %d", b.blocks[i].n, d.n)
	case d.epoch < b.epoch:
		s.block = &ledgerpb.BlockResult{Epoch: b.epoch}
		return true, refuse(codeStale, "the bucket is another's since epoch %d: this is of %d", b.epoch, d.epoch)
	}
	return false, nil
}

func (b *durable) find(owner uint64) (int, bool) {
	return slices.BinarySearchFunc(b.blocks, owner, func(k block, owner uint64) int { return cmp.Compare(k.owner, owner) })
}

func (b *durable) outstanding() (sum int64) {
	for i := range b.blocks {
		sum += b.blocks[i].outstanding
	}
	return sum
}

// window is the index of a fixed window that the bucket's time is in.
func (b *durable) window() int64 {
	if b.limit.Algorithm != limiter.FixedWindow {
		return 0
	}
	return b.state.Newest() / int64(b.limit.Rate.Per)
}

// advance brings the bucket to now. It says whether a window began, in which what is left of
// earlier ones cannot be spent.
func (b *durable) advance(now int64) (turned bool) {
	before := b.window()
	b.limit.Advance(&b.state, now, 0, 0)
	if turned = b.window() != before; turned {
		for i := range b.blocks {
			b.blocks[i].outstanding = 0
		}
	}
	b.limit.Advance(&b.state, now, 0, b.outstanding())
	return turned
}

// claim brings the bucket to now, under the newer limit, and into the command's epoch; it finds
// the owner's block, or makes one. turned: what is left of that block is of a window that is over.
func (b *durable) claim(now int64, d *draw) (i int, turned bool, err error) {
	turned = b.advance(now)
	if d.limit != nil && d.limit.Revision > b.limit.Revision {
		d.limit.Convert(&b.state, now, &b.limit)
		b.limit = *d.limit
	}
	if d.epoch > b.epoch { // what others held counts as spent
		b.blocks = slices.DeleteFunc(b.blocks, func(k block) bool { return k.owner != d.owner })
		b.epoch = d.epoch
	}
	i, own := b.find(d.owner)
	if own {
		return i, turned, nil
	}
	if len(b.blocks) >= maxBlocks {
		return 0, false, refuse(codeFull, "%d owners hold blocks of the bucket in epoch %d, which is the most", maxBlocks, b.epoch)
	}
	b.blocks = slices.Insert(b.blocks, i, block{owner: d.owner})
	return i, false, nil
}

// serve takes what an owner says of its block, and grants it another.
func (b *durable) serve(now int64, k *block, turned bool, d *draw) {
	held, returned := d.holding, d.returned
	if turned {
		held, returned = 0, 0
	}
	// What is held may be more than is known of: of a bucket that was restored, or handed over, or
	// refunded. It is believed, since that only lowers the level; what is returned is not.
	returned = min(returned, max(0, k.outstanding-held))
	k.outstanding, k.epoch, k.n = held, d.epoch, d.n
	b.limit.Credit(&b.state, now, returned, b.outstanding())
	b.limit.Debit(&b.state, now, d.debt)
	r := blockResult{window: b.window()}
	if want := max(d.want, d.least); want > 0 {
		least := max(d.least, 1)
		if level := b.limit.Level(&b.state, now); level >= least {
			r.granted = min(want, level)
			b.limit.Debit(&b.state, now, r.granted)
			k.outstanding += r.granted
		} else {
			r.retry = int64(b.limit.Until(&b.state, now, least, 0, 0)) // if what is held were spent now
		}
	}
	r.level = b.limit.Level(&b.state, now)
	k.result = r
}

// sweep looks at so many buckets for those that can be forgotten: full, and nothing of them held by
// anybody who is in the view. It says whether something was changed.
func (s *State) sweep(now int64, most int) (changed bool) {
	for range min(most, s.durables.queue.Len()) {
		e := s.durables.queue.Front()
		old := e.Value.(*durable)
		next := *old
		next.blocks = slices.Clone(old.blocks)
		next.advance(now)
		next.blocks = slices.DeleteFunc(next.blocks, func(k block) bool { return s.gone(&k) }) // spent as of now
		switch {
		case next.limit.Full(&next.state, now): // and so nothing of it outstanding
			s.hash.remove(old.sum)
			s.durables.remove(e)
			changed = true
			continue
		case len(next.blocks) < len(old.blocks):
			s.hash.remove(old.sum)
			next.sum = s.enc.durable(&next)
			s.hash.add(next.sum)
			e.Value = &next
			changed = true
		}
		s.durables.queue.MoveToBack(e)
	}
	return changed
}

// gone says of a block's owner that it is in the view no more. Nobody follows it before all that it
// lent has ended.
func (s *State) gone(k *block) bool { return !s.member(k.owner) }

// member says of an incarnation that it is in the view. While there is none, all are.
func (s *State) member(incarnation uint64) bool {
	v := s.work.View
	return v == nil || slices.ContainsFunc(v.Members, func(m Member) bool { return m.Incarnation == incarnation })
}

// message is the bucket as snapshots carry it.
func (b *durable) message() *ledgerpb.DurableBucket {
	m := &ledgerpb.DurableBucket{
		Tenant: b.key.Tenant, Limit: b.key.Limit, Subject: []byte(b.key.Subject), Spec: limitMessage(&b.limit),
		UnixNano: b.state.Newest(), State: b.saved(), Epoch: b.epoch,
	}
	for i := range b.blocks {
		k := &b.blocks[i]
		m.Blocks = append(m.Blocks, &ledgerpb.Block{Owner: k.owner, Epoch: k.epoch, Outstanding: k.outstanding, Result: k.result.message(k.n)})
	}
	return m
}

func (b *durable) saved() []byte {
	state := b.state.Clone()
	return b.limit.AppendState(nil, &state, state.Newest())
}

// durableOf is the inverse of message, for whatever bytes stand there.
func durableOf(m *ledgerpb.DurableBucket) (*durable, error) {
	b := &durable{key: limiter.Key{Tenant: m.GetTenant(), Limit: m.GetLimit(), Subject: string(m.GetSubject())}, epoch: m.GetEpoch()}
	if err := checkBucket(&b.key); err != nil {
		return nil, err
	}
	var err error
	if b.limit, err = limitOf(m.GetSpec()); err != nil {
		return nil, err
	}
	if m.GetUnixNano() < 0 {
		return nil, refuse(codeInvalid, "its time is before 1970")
	}
	if b.state, err = b.limit.RestoreState(m.GetState(), m.GetUnixNano(), m.GetUnixNano()); err != nil {
		return nil, err
	}
	if len(m.GetBlocks()) > maxBlocks {
		return nil, refuse(codeInvalid, "it has %d blocks, of %d at most", len(m.GetBlocks()), maxBlocks)
	}
	for i, k := range m.GetBlocks() {
		r := k.GetResult()
		if k.GetOutstanding() < 0 || k.GetOutstanding() > math.MaxInt64/maxBlocks || k.GetEpoch() > b.epoch || i > 0 && k.GetOwner() <= b.blocks[i-1].owner {
			return nil, refuse(codeInvalid, "its block %d cannot be", i)
		}
		b.blocks = append(b.blocks, block{
			owner: k.GetOwner(), epoch: k.GetEpoch(), n: r.GetN(), outstanding: k.GetOutstanding(),
			result: blockResult{r.GetGranted(), r.GetRetryAfterNs(), r.GetLevel(), r.GetWindow()},
		})
	}
	return b, nil
}

func (c *canon) durable(b *durable) [32]byte {
	c.entry("durable")
	c.str(b.key.Tenant)
	c.str(b.key.Limit)
	c.str(b.key.Subject)
	for _, n := range [...]int64{
		int64(b.limit.Algorithm), b.limit.Rate.Count, int64(b.limit.Rate.Per), b.limit.Burst, int64(b.limit.Parts), b.state.Newest(),
	} {
		c.num(uint64(n))
	}
	c.num(b.limit.Revision)
	c.str(string(b.saved()))
	c.num(b.epoch)
	c.num(uint64(len(b.blocks)))
	for i := range b.blocks {
		k := &b.blocks[i]
		for _, n := range [...]uint64{
			k.owner, k.epoch, k.n, uint64(k.outstanding), uint64(k.result.granted), uint64(k.result.retry), uint64(k.result.level), uint64(k.result.window),
		} {
			c.num(n)
		}
	}
	return c.sum()
}
