package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"headgate/cluster/ledger"
	"headgate/cluster/ledger/ledgerpb"
	"headgate/proxy/admin"
	"headgate/proxy/upstream"
)

// backends are all endpoints, as this node sees them and as the queue's node last said.
func (n *Node) backends(context.Context) ([]admin.BackendState, error) { return n.backendStates(), nil }

func (n *Node) backendStates() []admin.BackendState {
	queued := n.admission.dispatch.State().Backends
	var out []admin.BackendState
	for _, b := range n.pool.Status() {
		a := admin.BackendState{
			Backend: b.Name, Endpoint: b.Endpoint, URL: b.URL, Kind: b.Kind.String(), Overflow: b.Overflow, State: b.State.String(), Breaker: b.Breaker.String(),
			Ejected: b.Ejected, Drained: b.Drained, Leaving: b.Draining, PausedMS: b.Paused.Milliseconds(), Share: b.Share, FirstByteMS: b.FirstByte.Milliseconds(),
			InFlight: b.InFlight, LastError: b.LastError, Slots: int64(b.Slots), Limit: int64(b.Slots),
		}
		if q, ok := queued[b.Endpoint]; ok && b.Slots > 0 {
			a.Limit, a.InUse, a.Stale, a.Waiting, a.Places = q.Limit, q.InUse, q.Stale, int64(q.Waiting), int64(q.Places)
			if a.Limit < 0 {
				a.Limit = a.Slots
			}
			a.Pressure, a.Rate, a.DrainMS, a.Desired = q.Pressure, q.Rate, q.Drain.Milliseconds(), q.Desired
		}
		out = append(out, a)
	}
	return out
}

// setDrain takes a backend, or one of its endpoints, out of use in the whole cluster, or gives it back.
func (n *Node) setDrain(ctx context.Context, by admin.Actor, c admin.DrainChange) (admin.Done, error) {
	name, _, one := strings.Cut(c.Backend, "@")
	_, drained := n.truth.Facts().Rungs.Lookup(ledger.DrainRung(c.Backend)) // one that is gone from the policy may be given back all the same
	if !n.hasBackend(name) && (c.On || !drained) {
		return admin.Done{}, n.noBackend(name)
	}
	if len(c.Backend) > ledger.MaxDrain {
		return admin.Done{}, admin.Errorf(admin.Invalid, "backend: a name of more than %d bytes can't be drained; drain the backend as a whole, or give it a shorter name", ledger.MaxDrain)
	}
	set := &ledgerpb.SetRung{Rung: ledger.DrainRung(c.Backend), On: c.On, Reason: c.Reason}
	if c.For > 0 {
		set.ExpiresUnixNano = time.Now().Add(c.For).UnixNano()
	}
	done, err := n.change(ctx, by, &ledgerpb.Command{Body: &ledgerpb.Command_SetRung{SetRung: set}})
	var refused *admin.Error
	switch {
	case !c.On && errors.As(err, &refused) && refused.Code == admin.NotFound:
		err = admin.Errorf(admin.NotFound, "%s is not drained; headgate backends shows what is", c.Backend)
	case err != nil || !c.On:
	case !one:
		done.Warnings = n.drainedOut(name)
	default:
		done.Warnings = n.unknownEndpoint(name, c.Backend)
	}
	return done, err
}

// maxEndpointsNamed bounds the endpoints that stand in a warning.
const maxEndpointsNamed = 9

// unknownEndpoint warns where a backend has no such endpoint as far as this node knows, and says which it has.
func (n *Node) unknownEndpoint(backend, endpoint string) (warnings []string) {
	warning := fmt.Sprintf("this node knows no endpoint %q now", endpoint)
	var there []string
	for _, b := range n.pool.Status() {
		switch {
		case b.Endpoint == endpoint:
			return nil
		case b.Name != backend:
		case b.Endpoint == backend:
			return []string{fmt.Sprintf("%s, and %s has one address: headgate drain %s drains it", warning, backend, backend)}
		case strings.HasPrefix(b.Endpoint, endpoint+":"): // the port was forgotten
			return []string{fmt.Sprintf("%s; it is drained should it come; did you mean %q?", warning, b.Endpoint)}
		default:
			there = append(there, b.Endpoint)
		}
	}
	warning += "; it is drained should it come"
	if more := len(there) - maxEndpointsNamed; more > 0 {
		there = append(there[:maxEndpointsNamed], fmt.Sprintf("%d more", more))
	}
	if len(there) > 0 {
		warning += "; there are " + strings.Join(there, ", ")
	}
	return []string{warning}
}

// auditEntry words an entry of the audit log for people: a drain is a rung to the ledger, and none to them.
func auditEntry(e *ledger.AuditEntry) admin.AuditEntry {
	out := admin.AuditEntry{Index: e.Index, At: e.Time, Actor: e.Actor, Action: e.Action, Object: e.Object, Before: e.Before, After: e.After}
	backend, ok := (&ledger.Rung{Name: e.Object}).Drains()
	switch {
	case !ok:
	case e.Action == "ladder.set":
		out.Action, out.Object = "backend.drain", backend
	case e.Action == "ladder.clear":
		out.Action, out.Object = "backend.undrain", backend
	}
	return out
}

// CheckBackends says which backends of a valid policy a node on this machine could not use, such as one whose key's
// file is not there. text is what p was read from. The error is a ledger.Problems, or says why nothing is known.
func CheckBackends(text []byte, p *ledger.Policy) error {
	pool, err := upstream.NewPool(upstream.Config{})
	if err != nil {
		return err
	}
	defer pool.Close()
	return checkBackends(pool, text, p)
}

// maxUnusable bounds the backends of which one error speaks.
const maxUnusable = 50

func checkBackends(pool *upstream.Pool, text []byte, p *ledger.Policy) error {
	all := backends(p)
	var problems ledger.Problems
	for i := range all {
		err := pool.Check(all[i : i+1])
		if err == nil || len(problems) >= maxUnusable {
			continue
		}
		field, message, ok := strings.Cut(strings.TrimPrefix(err.Error(), "backends[0]."), ": ")
		if !ok {
			return err
		}
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			message += "; every node needs it"
		}
		problems = append(problems, p.OfBackend(text, i, field, message))
	}
	if problems != nil {
		return problems
	}
	return pool.Check(all) // what is wrong with them together
}

func (n *Node) hasBackend(name string) bool {
	s := n.current()
	return slices.ContainsFunc(s.policyOrNone().Backends, func(b ledger.Backend) bool { return b.Name == name })
}

// noBackend says that the policy has none of that name, and which may have been meant.
func (n *Node) noBackend(name string) error {
	s := n.current()
	var names []string
	for _, b := range s.policyOrNone().Backends {
		names = append(names, b.Name)
	}
	if meant := ledger.Nearest(name, names); meant != "" {
		return admin.Errorf(admin.NotFound, "there is no backend %q in the policy; did you mean %q?", name, meant)
	}
	return admin.Errorf(admin.NotFound, "there is no backend %q in the policy; headgate backends lists them", name)
}

// drainedOut names the models that nobody serves any more, now that name is drained: the facts of this node may not say so yet.
func (n *Node) drainedOut(name string) (warnings []string) {
	drained := drains(n.truth.Facts(), time.Now())
	p := n.current()
	for _, m := range p.policyOrNone().Models {
		left := slices.ContainsFunc(m.Backends, func(b string) bool { return b != name && !slices.Contains(drained, b) })
		if slices.Contains(m.Backends, name) && !left {
			warnings = append(warnings, fmt.Sprintf("model %s has no other backend: its requests are refused as no_backend, or answered by its fallback", m.Name))
		}
	}
	return warnings
}
