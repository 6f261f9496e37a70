package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"headgate/cluster/ledger"
	"headgate/lease/budget"
	"headgate/proxy/journal"
)

const nodes = 3

// world is a cluster in one process: ledgers over TCP on loopback, each with its files, and a journal beside each.
type world struct {
	nodes [nodes]*node
	began time.Time
	named uint64 // of holders, so that none comes twice
}

type node struct {
	id        raft.ServerID
	transport *raft.NetworkTransport
	ledger    *ledger.Ledger
	journal   *journal.Log
	purse     atomic.Pointer[budget.Manager] // of the measurement under way
}

func openWorld(ctx context.Context, dir string) (*world, error) {
	w := &world{began: time.Now()}
	var servers []raft.Server
	for i := range w.nodes {
		n := &node{id: raft.ServerID(fmt.Sprintf("n%d.a", i))}
		w.nodes[i] = n
		if err := n.open(filepath.Join(dir, string(n.id)), uint64(i+1), w); err != nil {
			return nil, errors.Join(err, w.close())
		}
		servers = append(servers, raft.Server{ID: n.id, Address: n.transport.LocalAddr()})
	}
	if err := w.nodes[0].ledger.Bootstrap(servers); err != nil {
		return nil, errors.Join(err, w.close())
	}
	if err := w.awaitLeader(ctx); err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

func (n *node) open(dir string, incarnation uint64, w *world) error {
	var err error
	if n.transport, err = raft.NewTCPTransportWithLogger("127.0.0.1:0", nil, nodes, time.Second, hclog.NewNullLogger()); err != nil {
		return err
	}
	quiet := slog.New(slog.DiscardHandler)
	n.journal, err = journal.Open(journal.Config{
		Dir: filepath.Join(dir, "usage"), Node: string(n.id), Incarnation: incarnation, BootID: "bench", Logger: quiet,
	})
	if err != nil {
		return err
	}
	n.ledger, err = ledger.Open(ledger.Config{
		ServerID: n.id, Address: n.transport.LocalAddr(), Transport: n.transport, Peer: w, Logger: quiet, Dir: dir,
		Recalled: func(k ledger.BudgetKey) {
			if p := n.purse.Load(); p != nil {
				p.Recall(budget.Key(k))
			}
		},
	})
	return err
}

// startBound bounds the election, stopBound the end of a node and of what it has drawn.
const (
	startBound = 30 * time.Second
	stopBound  = 30 * time.Second
)

func (w *world) awaitLeader(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		for _, n := range w.nodes {
			if n.ledger.Barrier(ctx) == nil {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("no node leads: %w", context.Cause(ctx))
		}
	}
}

// leader is the node that leads, or thought so last.
func (w *world) leader() *node {
	for _, n := range w.nodes {
		if n.ledger.IsLeader() {
			return n
		}
	}
	return w.nodes[0]
}

func (w *world) close() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), stopBound)
	defer cancel()
	for _, n := range w.nodes {
		if n != nil && n.ledger != nil {
			err = errors.Join(err, n.ledger.Close(ctx))
		}
	}
	for _, n := range w.nodes {
		if n != nil && n.transport != nil {
			err = errors.Join(err, n.transport.Close())
			n.transport.CloseStreams() // what lies idle in its pool
		}
		if n != nil && n.journal != nil {
			err = errors.Join(err, n.journal.Close(ctx))
		}
	}
	return err
}

// Propose stands for the RPC between nodes, without its network.
func (w *world) Propose(ctx context.Context, leader raft.ServerID, _ raft.ServerAddress, command []byte) ([]byte, bool, bool, error) {
	for _, n := range w.nodes {
		if n.id != leader {
			continue
		}
		result, _, unknown, err := n.ledger.ProposeLocal(ctx, command)
		if errors.Is(err, ledger.ErrNotLeader) {
			return nil, true, false, nil
		}
		return result, false, unknown, err
	}
	return nil, true, false, nil
}

// purses are what each node spends from in one measurement: fresh ones, so that none finds what another left.
type purses struct {
	w       *world
	each    [nodes]*budget.Manager
	budget  string
	draws   atomic.Int64
	stop    context.CancelFunc
	running sync.WaitGroup
}

// few is how many requests a purse believes that a budget pays for, so that it draws nothing ahead.
const few = 8

// open gives each node a purse. direct: it draws as at a budget's end, what those who wait lack and nothing ahead.
func (w *world) open(ctx context.Context, direct bool) (*purses, error) {
	p := &purses{w: w, budget: fmt.Sprintf("user-month/%d", w.named)}
	ctx, p.stop = context.WithCancel(ctx)
	for i, n := range w.nodes {
		w.named++
		draw := func(ctx context.Context, d budget.Draw) (budget.Drawn, error) {
			p.draws.Add(1)
			if direct {
				d.Want = min(d.Want, d.Need)
			}
			r, err := n.draw(ctx, d)
			if direct {
				r.Amount = few * cost
			}
			return r, err
		}
		m, err := budget.New(budget.Config{
			Holder: w.named + nodes, Draw: draw,
			Clock: func() (mono, wall int64) { return int64(time.Since(w.began)), time.Now().UnixNano() },
		})
		if err != nil {
			p.stop()
			return nil, err
		}
		p.each[i] = m
		n.purse.Store(m)
	}
	for _, m := range p.each {
		p.running.Go(func() { m.Run(ctx) })
	}
	return p, nil
}

// close says the last word on all that was spent.
func (p *purses) close(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, stopBound)
	defer cancel()
	for i, m := range p.each {
		p.w.nodes[i].purse.Store(nil)
		err = errors.Join(err, m.Drain(ctx))
	}
	p.stop()
	p.running.Wait()
	return err
}

// draw is what a node does for its budgets, see cmd/node.
func (n *node) draw(ctx context.Context, d budget.Draw) (budget.Drawn, error) {
	r, err := n.ledger.DrawBudget(ctx, ledger.BudgetDraw{
		Key: ledger.BudgetKey(d.Key), Holder: d.Holder, N: d.N, Spent: d.Spent, Holding: d.Holding, Want: d.Want, Need: d.Need, Least: d.Least, Final: d.Final,
		Terms: ledger.BudgetTerms{Amount: d.Terms.Amount, Revision: d.Terms.Revision, Alerts: d.Terms.Alerts, Name: d.Terms.Name},
	})
	out := budget.Drawn{
		N: r.N, Granted: r.Granted, Spent: r.Spent, Amount: r.Amount, Others: r.Others, Free: r.Free, Now: r.Time.UnixNano(), Closed: r.Closed,
	}
	if stale, ok := errors.AsType[*ledger.StaleBlock](err); ok {
		return out, &budget.StaleError{N: stale.N, Spent: stale.Spent}
	}
	if errors.Is(err, ledger.ErrNoBudget) {
		return out, budget.ErrNoAccount
	}
	return out, err
}
