package main

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"headgate/cluster/ledger"
	"headgate/proxy"
	"headgate/proxy/admin"
)

func statusCommand() *cobra.Command {
	c := &cobra.Command{Use: "status", Short: "Show a node: readiness, policy, backends", Args: exactly(0)}
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
				fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\t%s\n", b.Endpoint, b.State, b.InFlight, b.Slots, b.URL, b.LastError)
			}
		})
	}
	return c
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
}

func limitsCommand() *cobra.Command {
	c := &cobra.Command{Use: "show TENANT", Short: "Show a tenant's buckets that are in use", Args: exactly(1)}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/limits/"+url.PathEscape(args[0]), nil, func(w io.Writer, levels []admin.Level) {
			fmt.Fprintln(w, "LIMIT\tSCOPE\tUNIT\tSUBJECT\tLEFT\tOF\tFULL IN")
			for _, l := range levels {
				full := "-"
				if l.ResetMS >= 0 {
					full = (time.Duration(l.ResetMS) * time.Millisecond).Round(100 * time.Millisecond).String()
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%s\n", l.Limit, l.Scope, l.Unit, l.Subject, l.Level, l.Capacity, full)
			}
		})
	}
	return group("limits", "Look at limits", c)
}

func explainCommand() *cobra.Command {
	var q admin.ExplainRequest
	c := &cobra.Command{
		Use: "explain", Short: "Say whether a request would be admitted now, and why", Args: exactly(0),
		Example: "  headgate explain --tenant acme --model llama-8b --input 1200 --output 300",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&q.Tenant, "tenant", "", "tenant of the key")
	c.Flags().StringVar(&q.Key, "key", "", "id of the key (default: any of the tenant's)")
	c.Flags().StringVar(&q.User, "user", "", "user")
	c.Flags().StringVar(&q.Model, "model", "", "model")
	c.Flags().Int64Var(&q.Input, "input", 0, "input tokens")
	c.Flags().Int64Var(&q.Output, "output", 0, "output tokens")
	c.RunE = func(c *cobra.Command, _ []string) error {
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
	if len(e.Rungs) > 0 {
		fmt.Fprintf(w, "the ladder: %s; it would be tried with model %s\n", strings.Join(e.Rungs, ", "), e.Model)
	}
	if e.Degraded {
		fmt.Fprintln(w, "this node is cut off from its cluster")
	}
	if e.Override != "" {
		fmt.Fprintf(w, "while this node is cut off its override says %s\n", e.Override)
	}
	fmt.Fprintln(w, "\nLIMIT\tSCOPE\tUNIT\tCOSTS\tLEFT\tVERDICT")
	for _, l := range e.Limits {
		left := strconv.FormatInt(l.Remaining, 10)
		if l.Instead != "" { // its bucket was not asked
			left = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\n", l.Name, l.Scope, l.Unit, l.Cost, left, limitVerdict(l))
	}
}

// limitVerdict is what one limit says.
func limitVerdict(l proxy.ExplainLimit) string {
	switch {
	case l.Instead == "allow":
		return "admits, uncounted (cut off)"
	case l.Admitted:
		return "admits"
	case l.Shadow:
		return "would refuse (shadow)"
	case l.Instead == "deny":
		return "refuses (cut off)"
	case l.Instead == "no_share":
		return "refuses: the share of this node is nothing"
	case l.RetryAfterMS < 0:
		return "refuses; waiting does not help"
	}
	return "refuses; again in " + (time.Duration(l.RetryAfterMS) * time.Millisecond).String()
}
