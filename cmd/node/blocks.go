package node

import (
	"context"
	"errors"
	"time"

	"headgate/cluster/ledger"
	"headgate/lease"
)

// blocks draws what the owner of a durable limit lends from the ledger.
type blocks struct{ n *Node }

// drawAgain is when an owner asks anew whom the ledger had nothing to say to.
const drawAgain = time.Second

// Draw see lease.Blocks. Not known: the same has to be tried again.
func (b blocks) Draw(ctx context.Context, d lease.Draw) (lease.Drawn, error) {
	out := lease.Drawn{Bucket: d.Bucket, N: d.N}
	r, err := b.ask(ctx, &d)
	var stale *ledger.StaleBlock
	var refusal *ledger.Refusal
	switch {
	case err == nil:
		out.Granted, out.RetryAfter, out.Level, out.Window = r.Granted, int64(r.RetryAfter), r.Level, r.Window
	case errors.As(err, &stale) && stale.N > 0:
		out.Stale = stale.N
	case stale != nil, errors.As(err, &refusal), errors.Is(err, ledger.ErrDurableFull):
		// It would be the same again: the next draw may do better.
		b.n.log.Warn("the ledger gave no block of a durable limit", "tenant", d.Key.Tenant, "limit", d.Key.Limit, "error", err)
		out.RetryAfter = int64(drawAgain)
	default:
		out.Err = true
		return out, err
	}
	return out, nil
}

// ask reserves a block, or gives one back that nobody uses.
func (b blocks) ask(ctx context.Context, d *lease.Draw) (ledger.Reserved, error) {
	l := b.n.cluster.Ledger()
	if d.Want == 0 {
		return l.SettleBlock(ctx, ledger.Settle{
			Bucket: d.Key, Owner: b.n.self, Epoch: d.Epoch, N: d.N, Holding: d.Holding, Returned: d.Returned, Debt: d.Debt,
		})
	}
	return l.ReserveBlock(ctx, ledger.Reserve{
		Bucket: d.Key, Limit: d.Limit, Owner: b.n.self, Epoch: d.Epoch, N: d.N, Want: d.Want, Least: d.Least, Holding: d.Holding, Debt: d.Debt,
	})
}
