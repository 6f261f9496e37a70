package ledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"headgate/cluster/ledger/ledgerpb"
	"headgate/limiter"
)

// blocksVersion is the least StateVersion that knows blocks.
const blocksVersion = 2

// ErrDurableFull says that a bucket of a durable limit has no room in the ledger; nothing was done.
var ErrDurableFull = errors.New("the ledger holds as many buckets of durable limits as it can: give fewer users or keys limits per hour or day of their own")

// StaleBlock is the error of a command that another has overtaken; nothing was done.
type StaleBlock struct {
	// N is the last of the owner's commands about the bucket or account that was applied. Its next must be higher: an
	// owner that meets this after the ledger was restored goes on from there. 0: the bucket is another's.
	N uint64
	// Spent is, of a budget's account, all that the holder spent as far as the ledger knows.
	Spent int64
	// Epoch is the highest that named the bucket.
	Epoch uint64
}

func (e *StaleBlock) Error() string {
	if e.N == 0 {
		return fmt.Sprintf("the bucket is another owner's since epoch %d", e.Epoch)
	}
	return fmt.Sprintf("command %d about the block was applied already", e.N)
}

// Reserve asks for a block of a durable limit's bucket, for its owner.
type Reserve struct {
	Bucket limiter.Key
	// Limit is the whole limit, a GCRA or a FixedWindow. Of several Revisions the highest binds, and is
	// kept: see Numbers.
	Limit limiter.Limit
	Owner uint64 // an incarnation; not 0
	Epoch uint64 // of the view that the owner has stepped to; one that is not committed yet is refused
	// N rises with each Reserve and Settle of this owner for this bucket, and is not 0. Take it from one
	// counter of the owner, so that it rises also where a bucket was forgotten. Whatever the outcome was,
	// the same Reserve with the same N may be sent again, and gives what it gave, or is not the last any more.
	N uint64
	// Want is how much it asks for: what there is of it, but nothing if that is less than Least. 0
	// reports only.
	Want, Least int64
	// Holding is all that the owner and its holders can still spend of earlier blocks; the rest
	// counts as spent. Of a fixed window it is that of the window of the last Reserved. Refunds
	// may fill it up to what was held and granted last; beyond that keep them for the next Reserve.
	Holding int64
	// Debt is what was spent beyond all blocks: it is charged, whatever the level.
	Debt int64
}

// Settle says what an owner still holds, and gives back what it neither spent nor holds.
type Settle struct {
	Bucket          limiter.Key
	Owner, Epoch, N uint64 // as in Reserve
	// What is missing of the last outstanding between Holding + Returned counts as spent.
	Holding, Returned, Debt int64
}

// Reserved is what came of either.
type Reserved struct {
	Granted int64
	// RetryAfter is, where nothing was granted, when Least would be at the earliest, by the ledger's time: if
	// nothing is held of the bucket, or all of it was spent now. limiter.Never where Least is above the limit.
	RetryAfter time.Duration
	Level      int64 // left in the ledger, rounded down; negative is debt
	// Window is the index since the Unix epoch of the fixed window that the block is of, by
	// the leader's clock; in no other may it be spent.
	Window int64
}

// ReserveBlock takes a block out of a bucket, through the leader, in one write with others that come
// meanwhile. Its errors are Propose's, *StaleBlock, ErrDurableFull, ErrWallOff, or a *Refusal for what is
// no block. ErrUnknownOutcome, ErrBusy and ErrNoLeader: try the same again.
func (l *Ledger) ReserveBlock(ctx context.Context, r Reserve) (Reserved, error) {
	return l.proposeBlock(ctx, &ledgerpb.Command{Body: &ledgerpb.Command_ReserveBlock{ReserveBlock: r.message()}})
}

// SettleBlock reports on a block without asking for another. A bucket that the ledger does not
// know is a *Refusal. Otherwise as ReserveBlock.
func (l *Ledger) SettleBlock(ctx context.Context, s Settle) (Reserved, error) {
	return l.proposeBlock(ctx, &ledgerpb.Command{Body: &ledgerpb.Command_SettleBlock{SettleBlock: s.message()}})
}

func (l *Ledger) proposeBlock(ctx context.Context, c *ledgerpb.Command) (Reserved, error) {
	c.Version, c.Actor = blocksVersion, "node "+string(l.config.ServerID)
	result, err := l.Propose(ctx, c)
	if err != nil {
		return Reserved{}, err
	}
	return reservedOf(result)
}

func reservedOf(result *ledgerpb.Result) (Reserved, error) {
	b := result.GetBlock()
	switch result.GetCode() {
	case "":
	case codeStale:
		return Reserved{}, &StaleBlock{N: b.GetN(), Epoch: b.GetEpoch()}
	case codeFull:
		return Reserved{}, fmt.Errorf("%w (%s)", ErrDurableFull, result.GetMessage())
	default:
		return Reserved{}, RefusalOf(result)
	}
	return Reserved{Granted: b.GetGranted(), RetryAfter: time.Duration(b.GetRetryAfterNs()), Level: b.GetLevel(), Window: b.GetWindow()}, nil
}

func (r *Reserve) message() *ledgerpb.ReserveBlock {
	return &ledgerpb.ReserveBlock{
		Tenant: r.Bucket.Tenant, Limit: r.Bucket.Limit, Subject: []byte(r.Bucket.Subject), Spec: limitMessage(&r.Limit),
		Owner: r.Owner, Epoch: r.Epoch, N: r.N, Want: r.Want, Least: r.Least, Holding: r.Holding, Debt: r.Debt,
	}
}

func (s *Settle) message() *ledgerpb.SettleBlock {
	return &ledgerpb.SettleBlock{
		Tenant: s.Bucket.Tenant, Limit: s.Bucket.Limit, Subject: []byte(s.Bucket.Subject),
		Owner: s.Owner, Epoch: s.Epoch, N: s.N, Holding: s.Holding, Returned: s.Returned, Debt: s.Debt,
	}
}
