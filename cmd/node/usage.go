package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"

	"headgate/cluster"
	"headgate/proxy/admin"
	"headgate/proxy/journal"
)

// Bounds of an answer about usage: what is kept in memory, and what is asked at once.
const (
	usageBatch   = 256 // records that come from a node in one piece
	usageAhead   = 2   // pieces of each node that wait to be merged
	usageAtOnce  = 4   // nodes that group at once, each up to journal.MaxGroups groups
	maxUsageWord = 256 // bytes of why a node did not answer
)

// usageSource is a node's usage log.
type usageSource struct {
	node    string
	problem string // why it can't be asked; "": it can
	read    func(ctx context.Context, q journal.Query, fn func(*journal.Usage) error) error
	group   func(ctx context.Context, q journal.Query, g *journal.Groups) error
}

// usageSources are the nodes that this one knows of, itself included. One that has left, or is
// dead, has its records on its disk only.
func usageSources(members []cluster.MemberStatus, own *journal.Log, dial func(address string) (usageSource, error)) []usageSource {
	out := make([]usageSource, 0, len(members))
	for _, m := range members {
		s := usageSource{node: m.Name}
		var err error
		switch {
		case m.Self:
			s.read = own.Read
			s.group = func(ctx context.Context, q journal.Query, g *journal.Groups) error { return own.Read(ctx, q, g.Add) }
		case m.Gossip == "left":
			err = errors.New("it has left; its records are on its disk")
		case m.Err != nil:
			err = fmt.Errorf("%w; its records are on its disk", m.Err)
		default:
			s, err = dial(m.Address)
			s.node = m.Name
		}
		if err != nil {
			s.problem = err.Error()
		}
		out = append(out, s)
	}
	return out
}

// usageSources are those of this node's cluster.
func (n *Node) usageSources(ctx context.Context) []usageSource {
	return usageSources(n.cluster.Members(ctx), n.money.journal, func(address string) (usageSource, error) {
		conn, err := n.cluster.Conn(address)
		return usageSource{
			read: func(ctx context.Context, q journal.Query, fn func(*journal.Usage) error) error {
				return journal.ReadFrom(ctx, conn, q, fn)
			},
			group: func(ctx context.Context, q journal.Query, g *journal.Groups) error {
				return journal.GroupFrom(ctx, conn, q, g)
			},
		}, err
	})
}

func (n *Node) exportUsage(ctx context.Context, w io.Writer, q admin.UsageQuery) ([]admin.Missing, error) {
	return exportUsage(ctx, n.usageSources(ctx), w, q)
}

func (n *Node) topUsage(ctx context.Context, q admin.UsageTop) (admin.UsageRows, error) {
	return topUsage(ctx, n.usageSources(ctx), q)
}

// ExportUsageDirs is the export of usage logs on this machine's disks, such as that of a node that is
// gone; it writes nothing there. A folder that can't be read is an error after the others were.
func ExportUsageDirs(ctx context.Context, dirs []string, logger *slog.Logger, w io.Writer, q admin.UsageQuery) ([]admin.Missing, error) {
	var sources []usageSource
	for _, dir := range dirs {
		read := func(ctx context.Context, q journal.Query, fn func(*journal.Usage) error) error {
			return journal.ReadDir(ctx, dir, logger, q, fn)
		}
		sources = append(sources, usageSource{node: dir, read: read, group: func(ctx context.Context, q journal.Query, g *journal.Groups) error { return read(ctx, q, g.Add) }})
	}
	return exportUsage(ctx, sources, w, q)
}

// exportUsage writes what all sources have: in the order of time as far as each of them is, or in
// sums, ordered by what they are of. Without Partial it ends at the first source that fails.
func exportUsage(ctx context.Context, sources []usageSource, w io.Writer, q admin.UsageQuery) ([]admin.Missing, error) {
	enc, err := journal.NewEncoder(w, string(q.Format), q.By)
	if err != nil {
		return nil, err
	}
	jq := journal.Query{From: q.From, Until: q.Until, Tenant: q.Tenant, Key: q.Key, User: q.User, Model: q.Model}
	var missing []admin.Missing
	if len(q.By) == 0 {
		missing, err = mergeUsage(ctx, sources, jq, q.Partial, enc.Usage)
	} else {
		var g *journal.Groups
		if g, missing, err = groupUsage(ctx, sources, jq, q.Partial, func() (*journal.Groups, error) { return journal.NewGroups(q.By, q.Location) }); err == nil {
			for _, r := range g.Rows() {
				if err = enc.Row(&r); err != nil {
					break
				}
			}
		}
	}
	if err == nil {
		err = enc.Flush()
	}
	return missing, err
}

// lacks makes an entry of a source that failed, or where all are needed an error.
func lacks(node string, err error, partial bool) (admin.Missing, error) {
	m := admin.Missing{Node: node, Error: err.Error()[:min(len(err.Error()), maxUsageWord)]}
	if partial {
		return m, nil
	}
	return m, admin.Errorf(admin.Incomplete, "the usage log of %s can't be read: %s; partial=true goes on without it", m.Node, m.Error)
}

// usageStream is a source that is being read; head is its next records.
type usageStream struct {
	node    string
	batches chan []journal.Usage // closed at the end, after err was set
	spare   chan []journal.Usage // used up, to be filled again
	err     error
	batch   []journal.Usage // that head is the rest of
	head    []journal.Usage
}

func newUsageStream(node string) *usageStream {
	return &usageStream{node: node, batches: make(chan []journal.Usage, usageAhead), spare: make(chan []journal.Usage, 1)}
}

// run reads a source to its end.
func (s *usageStream) run(ctx context.Context, source usageSource, q journal.Query) {
	defer close(s.batches)
	if source.problem != "" {
		s.err = errors.New(source.problem)
		return
	}
	batch := make([]journal.Usage, 0, usageBatch)
	send := func() error {
		select {
		case s.batches <- batch:
		case <-ctx.Done():
			return ctx.Err()
		}
		select {
		case batch = <-s.spare:
		default:
			batch = make([]journal.Usage, 0, usageBatch)
		}
		return nil
	}
	err := source.read(ctx, q, func(u *journal.Usage) error {
		c := *u
		c.Parts = nil // they are the reader's, and no export has them
		if batch = append(batch, c); len(batch) < cap(batch) {
			return nil
		}
		return send()
	})
	if len(batch) > 0 { // what came before it failed counts
		err = errors.Join(err, send())
	}
	s.err = err
}

// next waits for the stream's next record; false at its end.
func (s *usageStream) next(ctx context.Context) (bool, error) {
	if len(s.head) > 0 {
		return true, nil
	}
	if s.batch != nil {
		select {
		case s.spare <- s.batch[:0]:
		default:
		}
	}
	select {
	case batch, ok := <-s.batches:
		s.batch, s.head = batch, batch
		return ok, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// mergeUsage hands the records of all sources to fn, the earliest first. fn must not keep them.
func mergeUsage(ctx context.Context, sources []usageSource, q journal.Query, partial bool, fn func(*journal.Usage) error) (missing []admin.Missing, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	streams := make([]*usageStream, len(sources))
	for i, source := range sources {
		s := newUsageStream(source.node)
		streams[i] = s
		wg.Go(func() { s.run(ctx, source, q) })
	}
	for {
		var first *usageStream
		for i := 0; i < len(streams); {
			s := streams[i]
			more, err := s.next(ctx)
			switch {
			case err != nil:
				return nil, err
			case more:
				if first == nil || s.head[0].Time.Before(first.head[0].Time) {
					first = s
				}
				i++
				continue
			case s.err != nil && ctx.Err() == nil:
				m, err := lacks(s.node, s.err, partial)
				if err != nil {
					return nil, err
				}
				missing = append(missing, m)
			}
			streams = slices.Delete(streams, i, i+1)
		}
		if first == nil {
			return missing, ctx.Err()
		}
		if err := fn(&first.head[0]); err != nil {
			return nil, err
		}
		first.head = first.head[1:]
	}
}

// groupUsage adds up what all sources have; each does its own sums.
func groupUsage(ctx context.Context, sources []usageSource, q journal.Query, partial bool, fresh func() (*journal.Groups, error)) (*journal.Groups, []admin.Missing, error) {
	all, err := fresh()
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var (
		wg      sync.WaitGroup
		slots   = make(chan struct{}, usageAtOnce)
		mu      sync.Mutex
		missing []admin.Missing
		failed  error // why there is no answer
	)
	for _, source := range sources {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			g, err := sumsOf(ctx, source, q, fresh)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case failed != nil:
				return
			case errors.Is(err, journal.ErrTooManyGroups):
				failed = admin.Errorf(admin.Invalid, "by: %w", err)
			case err != nil && ctx.Err() != nil:
				failed = ctx.Err()
			case err != nil:
				var m admin.Missing
				m, failed = lacks(source.node, err, partial)
				missing = append(missing, m)
			default:
				failed = addRows(all, g)
			}
			if failed != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	slices.SortFunc(missing, func(a, b admin.Missing) int { return strings.Compare(a.Node, b.Node) })
	return all, missing, failed
}

// sumsOf one source.
func sumsOf(ctx context.Context, source usageSource, q journal.Query, fresh func() (*journal.Groups, error)) (*journal.Groups, error) {
	if source.problem != "" {
		return nil, errors.New(source.problem)
	}
	g, err := fresh()
	if err == nil {
		err = source.group(ctx, q, g)
	}
	return g, err
}

// addRows adds the rows of g to all.
func addRows(all, g *journal.Groups) error {
	for _, r := range g.Rows() {
		err := all.AddRow(&r)
		if errors.Is(err, journal.ErrTooManyGroups) {
			return admin.Errorf(admin.Invalid, "by: %w", err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// topUsage are the dearest groups, without the nodes that do not answer.
func topUsage(ctx context.Context, sources []usageSource, q admin.UsageTop) (admin.UsageRows, error) {
	jq := journal.Query{From: q.From, Until: q.Until, Tenant: q.Tenant}
	g, missing, err := groupUsage(ctx, sources, jq, true, func() (*journal.Groups, error) { return journal.NewGroups(q.By, q.Location) })
	if err != nil {
		return admin.UsageRows{}, err
	}
	rows := g.Rows()
	slices.SortStableFunc(rows, func(a, b journal.Row) int {
		return cmp.Or(cmp.Compare(b.Cost, a.Cost), cmp.Compare(b.Requests, a.Requests))
	})
	out := admin.UsageRows{Rows: []admin.UsageRow{}, Total: admin.UsageRow{By: map[string]string{}}, Missing: missing}
	for i, r := range rows {
		t := &out.Total
		t.Requests, t.Input, t.Output, t.Cost = plus(t.Requests, r.Requests), plus(t.Input, r.Input), plus(t.Output, r.Output), plus(t.Cost, admin.USD(r.Cost))
		if i >= q.Most {
			continue
		}
		row := admin.UsageRow{By: make(map[string]string, len(q.By)), Requests: r.Requests, Input: r.Input, Output: r.Output, Cost: admin.USD(r.Cost)}
		for j, name := range q.By {
			row.By[name] = r.Values[j]
		}
		out.Rows = append(out.Rows, row)
	}
	return out, nil
}

// plus adds what is not negative; what passes an int64 stays at its end.
func plus[T ~int64](a, b T) T {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
