package main

import (
	"cmp"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"headgate/cluster/ledger"
	"headgate/limiter"
	"headgate/proxy"
	"headgate/proxy/admin"
)

func statusCommand() *cobra.Command {
	c := &cobra.Command{Use: "status", Short: "Show a node: readiness, policy, backends", Args: exactly(0), Example: "  headgate status"}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/status", nil, func(w io.Writer, s admin.Status) {
			ready := "ready"
			if !s.Ready {
				ready = "not ready: " + s.NotReady
			}
			fmt.Fprintf(w, "node\t%s (%s), %s, up %s\n", s.Node, s.Version, ready, time.Duration(s.UptimeSeconds)*time.Second)
			printCluster(w, s.Cluster)
			if s.Degraded != "" {
				fmt.Fprintf(w, "degraded\t%s\n", s.Degraded)
			}
			fmt.Fprintf(w, "policy\trevision %d, %s: %d tenants, %d keys, models %s\n", s.PolicyRevision, s.PolicySource, s.Tenants, s.Keys, strings.Join(s.Models, ", "))
			fmt.Fprintf(w, "buckets\t%d\n\nBACKEND\tSTATE\tIN FLIGHT\tSLOTS\tURL\tLAST ERROR\n", s.Buckets)
			for _, b := range s.Backends {
				fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\t%s\n", b.Endpoint, backendStatus(b), b.InFlight, b.Slots, b.URL, b.LastError)
			}
		})
	}
	return c
}

// backendStatus is a backend's health in the words of headgate backends. A node of an earlier release tells only its state.
func backendStatus(b admin.Backend) string {
	return backendState(admin.BackendState{
		State: b.State, Leaving: b.Draining, Breaker: b.Breaker, Ejected: b.Ejected, Drained: b.Drained, PausedMS: b.PausedMS,
		Share: cmp.Or(b.Share, 1), Stale: b.Stale, Overflow: b.Overflow,
	})
}

// printCluster says where a node stands in its cluster, if it has one.
func printCluster(w io.Writer, s *admin.ClusterStatus) {
	if s == nil {
		return
	}
	id, leader, lease := short(s.ID), s.Leader, "not held"
	if id == "" {
		id = "not founded yet"
	}
	if leader == "" {
		leader = "none known"
	}
	if s.ViewLease.Held {
		lease = fmt.Sprintf("held, %d ms left", s.ViewLease.UntilMS)
	}
	fmt.Fprintf(w, "cluster\t%s (%s), leader %s\nview\tepoch %d: %s; lease %s\n", s.Name, id, leader, s.Epoch, strings.Join(s.Members, ", "), lease)
	fmt.Fprintf(w, "partitions\t%d owned, %d of them waiting\n", s.Partitions, s.Waiting)
	if len(s.Owing) > 0 {
		fmt.Fprintf(w, "slots\tsome are not lent until it is known what %s has in use\n", strings.Join(s.Owing, ", "))
	}
}

// subjectParts are apart by it in a bucket's subject.
const subjectParts = "\x1f"

// printable is a name that clients may have chosen, for a terminal.
func printable(subject string) string {
	parts := strings.Split(subject, subjectParts)
	for i, p := range parts {
		if strings.ContainsFunc(p, func(r rune) bool { return !unicode.IsPrint(r) }) {
			parts[i] = strconv.Quote(p)
		}
	}
	return strings.Join(parts, " / ")
}

// printableLines is a text of several lines, for a terminal: what would steer it is taken out.
func printableLines(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && unicode.IsControl(r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

func limitsCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "show TENANT", Short: "Show a tenant's buckets that are in use, and who holds what of them", Args: exactly(1),
		Example: "  headgate limits show acme\n  headgate limits show acme --json",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/limits/"+url.PathEscape(args[0]), nil, func(w io.Writer, levels []admin.Level) {
			fmt.Fprintln(w, "LIMIT\tSCOPE\tUNIT\tSUBJECT\tLEFT\tOF\tFULL IN\tOWNER\tRATE LENT\tHELD BY")
			for _, l := range levels {
				full := "-"
				if l.ResetMS >= 0 {
					full = (time.Duration(l.ResetMS) * time.Millisecond).Round(100 * time.Millisecond).String()
				}
				left := strconv.FormatInt(l.Level, 10)
				if l.Debt > 0 && l.Level >= 0 { // it is owed while some of it lies elsewhere
					left += fmt.Sprintf(" (debt %d)", l.Debt)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n", l.Limit, l.Scope, l.Unit, printable(l.Subject), left, l.Capacity, full, l.Owner, percent(l.LentRate), holders(&l))
			}
		})
	}
	return group("limits", "Look at limits", c)
}

// percent of a whole; nothing for none.
func percent(part float64) string {
	if part == 0 {
		return ""
	}
	return fmt.Sprintf("%.3g%%", 100*part)
}

// holders are who holds what of a bucket, and what is not known of that.
func holders(l *admin.Level) string {
	var out []string
	for _, h := range l.Holders {
		text := fmt.Sprintf("%s up to %d", h.Node, h.Outstanding)
		if h.InHand != nil {
			text = fmt.Sprintf("%s %d", h.Node, *h.InHand)
		}
		switch {
		case l.Unit == proxy.Concurrency.String():
			text = fmt.Sprintf("%s %d (%d in use)", h.Node, h.Outstanding, h.InUse)
		case h.LentRate != nil:
			text += " (" + cmp.Or(percent(*h.LentRate), "0%") + ")"
		}
		out = append(out, text)
	}
	if l.Away != "" {
		out = append(out, l.Away)
	}
	return strings.Join(out, ", ")
}

func explainCommand() *cobra.Command {
	var q admin.ExplainRequest
	c := &cobra.Command{
		Use: "explain", Short: "Say whether a request would be admitted now, and why", Args: exactly(0),
		Long: "Say whether a request would be admitted now, and why: how each limit and budget sees it, which model\n" +
			"a route sends it to, which rungs of the ladder and cut-offs would meet it, and which backends it may\n" +
			"go to, with their queues. Nothing is charged.",
		Example: "  headgate explain --tenant acme --model llama-8b --input 1200 --output 300\n" +
			"  headgate explain --tenant acme --model llama-8b --class background --header 'X-Team: search'",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&q.Tenant, "tenant", "", "tenant of the key")
	c.Flags().StringVar(&q.Key, "key", "", "id of the key (default: any of the tenant's)")
	c.Flags().StringVar(&q.User, "user", "", "user")
	c.Flags().StringVar(&q.Model, "model", "", "model")
	c.Flags().Int64Var(&q.Input, "input", 0, "input tokens, exactly: of a real request strict budgets reserve one for each byte")
	c.Flags().Int64Var(&q.Output, "output", 0, "output tokens")
	c.Flags().StringVar(&q.Class, "class", "", "what X-Headgate-Class would say: interactive, background or best_effort (default: the key's)")
	c.Flags().StringVar(&q.Surface, "surface", "", "what X-Headgate-Surface would say")
	headers := c.Flags().StringArray("header", nil, "a header of the request that a route may go by, as in 'X-Team: search'; again for more")
	c.RunE = func(c *cobra.Command, _ []string) error {
		q.Headers = map[string]string{}
		for _, h := range *headers {
			name, value, ok := strings.Cut(h, ":")
			if name = strings.TrimSpace(name); !ok || name == "" {
				return usageError{fmt.Errorf("--header %q is no header; write 'Name: value'", h)}
			}
			q.Headers[name] = strings.TrimSpace(value)
		}
		return send(c, a, http.MethodPost, "/admin/v1/explain", q, printExplanation)
	}
	return c
}

// printExplanation says yes or no, and how each limit sees it.
func printExplanation(w io.Writer, e proxy.Explanation) {
	verdict := "admitted"
	if !e.Admitted {
		verdict = "refused by " + e.Refused
	}
	fmt.Fprintf(w, "%s: %d input and %d output tokens, $%s\n", verdict, e.Input, e.Output, ledger.NanoUSD(e.NanoUSD))
	if e.Reason != "" {
		fmt.Fprintln(w, e.Reason)
	}
	if e.Route != "" {
		fmt.Fprintf(w, "route %s: %s\n", e.Route, e.Routed)
	}
	if len(e.Rungs) > 0 {
		fmt.Fprintf(w, "the ladder: %s; it would be tried with model %s\n", strings.Join(e.Rungs, ", "), e.Model)
	}
	if e.Shedding != "" {
		fmt.Fprintf(w, "refused now: %s\n", e.Shedding)
	}
	bounded := slices.ContainsFunc(e.Places, func(p proxy.ExplainPlace) bool { return p.Cost > 0 }) // else there is no queue
	for _, line := range e.Policy {
		if bounded {
			fmt.Fprintf(w, "policy: %s\n", line)
		}
	}
	if e.Degraded {
		fmt.Fprintln(w, "owners of limits are out of this node's reach")
	}
	if e.Override != "" {
		fmt.Fprintf(w, "where an owner is out of reach this node's override says %s\n", e.Override)
	}
	fmt.Fprintln(w, "\nLIMIT\tSCOPE\tUNIT\tCOSTS\tLEFT\tVERDICT\tDECIDED BY")
	for _, l := range e.Limits {
		left := strconv.FormatInt(l.Remaining, 10)
		if l.NoShare || l.By == limiter.ByAllow.String() || l.By == limiter.ByDeny.String() { // no bucket was asked
			left = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\t%s\n", l.Name, l.Scope, l.Unit, l.Cost, left, limitVerdict(l), decider(l))
	}
	if bounded {
		printPlaces(w, e.Places)
	}
	if len(e.Budgets) == 0 {
		return
	}
	fmt.Fprintln(w, "\nBUDGET\tSCOPE\tMODE\tCOSTS\tLEFT\tOF\tENDS\tVERDICT")
	for _, b := range e.Budgets {
		mode, left, ends := "normal", "?", ""
		if b.Strict {
			mode = "strict"
		}
		if b.UsedPercent >= 0 {
			left = "$" + ledger.NanoUSD(b.Left).String()
		}
		if b.Ends != nil {
			ends = moment(*b.Ends)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t$%s\t%s\t$%s\t%s\t%s\n", b.Name, b.Scope, mode, ledger.NanoUSD(b.Cost), left, ledger.NanoUSD(b.Amount), ends, budgetVerdict(b))
	}
	if e.Template > 0 {
		fmt.Fprintf(w, "\nstrict: with %d tokens for the chat template; of a request each byte of input is taken for a token, so that it may cost more\n", e.Template)
	}
}

// printPlaces says where the request may go, best first.
func printPlaces(w io.Writer, places []proxy.ExplainPlace) {
	fmt.Fprintln(w, "\nPLACE\tCOSTS\tIN USE\tLIMIT\tWAITING\tPLACES\tPRESSURE")
	for _, p := range places {
		name, queue := p.Backend, "-\t-\t-\t-"
		if p.Overflow {
			name += " (overflow)"
		}
		cost := "-"
		if p.Cost > 0 {
			cost, queue = fmt.Sprintf("%d slots", p.Cost), fmt.Sprintf("%d\t%d\t%d\t%.2f", p.Limit, p.Waiting, p.Places, p.Pressure)
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\n", name, cost, p.InUse, queue)
	}
}

// budgetVerdict is what one budget says.
func budgetVerdict(b proxy.ExplainBudget) string {
	switch {
	case !b.Admitted:
		return "refuses"
	case b.UsedPercent < 0:
		return "admits if the ledger does: this node knows nothing of it"
	case b.Least < b.Cost && b.Left < b.Cost:
		return "admits, with a shorter answer"
	}
	return "admits"
}

// decider is who would decide by a limit, and why.
func decider(l proxy.ExplainLimit) string {
	owner := cmp.Or(l.Owner, "its owner")
	switch {
	case l.By == limiter.ByLease.String():
		return fmt.Sprintf("this node, which holds %d", l.Held)
	case l.By == limiter.ByOwner.String():
		return joined(owner+", which owns it", held(l))
	case l.By == limiter.ByRefusal.String():
		return "this node, as " + owner + " said"
	case l.NoShare, l.By == limiter.ByPrivate.String(), l.By == limiter.ByDeny.String() && l.RetryAfterMS > 0:
		return joined("this node's private bucket", l.Away)
	}
	return joined("unavailable: "+l.By, l.Away)
}

// held is what this node holds of a limit that it does not decide by.
func held(l proxy.ExplainLimit) string {
	if l.Held == 0 {
		return ""
	}
	return fmt.Sprintf("this node holds %d", l.Held)
}

// limitVerdict is what one limit says.
func limitVerdict(l proxy.ExplainLimit) string {
	switch {
	case l.Admitted && l.By == limiter.ByAllow.String():
		return "admits, uncounted"
	case l.Admitted:
		return "admits"
	case l.Shadow:
		return "would refuse (shadow)"
	case l.NoShare:
		return "refuses: the share of this node is nothing"
	case l.By == limiter.ByDeny.String() && l.RetryAfterMS == 0:
		return "refuses until its owner is back"
	case l.RetryAfterMS < 0:
		return "refuses; waiting does not help"
	}
	return "refuses; again in " + (time.Duration(l.RetryAfterMS) * time.Millisecond).String()
}
