package main

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

// hashShown is how much of a hash people see.
const hashShown = 12

func membersCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "members", Short: "List the nodes of the cluster, as one of them sees them",
		Args:    exactly(0),
		Example: "  headgate members\n  headgate members remove gw-3",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/members", nil, printMembers)
	}

	remove := &cobra.Command{
		Use: "remove NAME", Short: "Force out a node that is dead and does not come back", Args: exactly(1),
		Long:    "Take a node out of the view and out of raft. A live node is refused: stop it, and it leaves by itself.",
		Example: "  headgate members remove gw-3",
	}
	b := adminFlags(remove)
	remove.RunE = func(c *cobra.Command, args []string) error {
		return show(c, b, http.MethodDelete, "/admin/v1/members/"+url.PathEscape(args[0]), nil, said("%s is out", args[0]))
	}
	c.AddCommand(remove)
	return c
}

func printMembers(w io.Writer, list []admin.Member) {
	fmt.Fprintln(w, "NODE\tGOSSIP\tRAFT\tIN VIEW\tPARTITIONS\tAPPLIED\tSTATE\tLEASE\tVERSION\tADDRESS\tNOTE")
	for _, m := range list {
		note := m.Error
		if m.Self {
			note = joined("this one", note)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\n", m.Name, m.Gossip, m.Raft, yes(m.InView), m.Partitions, m.AppliedIndex,
			short(m.StateHash), yes(m.ViewLease), m.Version, m.Address, note)
	}
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func short(hash string) string { return hash[:min(len(hash), hashShown)] }

func auditCommand() *cobra.Command {
	var limit int
	var q struct{ since, object, actor string }
	c := &cobra.Command{
		Use: "audit", Short: "Show who changed what, the newest last", Args: exactly(0),
		Example: "  headgate audit --limit 20 --since 2026-01-15\n  headgate audit --actor ops --json",
	}
	a := adminFlags(c)
	c.Flags().IntVar(&limit, "limit", 100, "the last so many")
	c.Flags().StringVar(&q.since, "since", "", "only from this day or moment on")
	c.Flags().StringVar(&q.object, "object", "", "only changes of this, or of what has it in its name")
	c.Flags().StringVar(&q.actor, "actor", "", "only by this token")
	c.RunE = func(c *cobra.Command, _ []string) error {
		v := url.Values{"limit": {strconv.Itoa(limit)}}
		for name, value := range map[string]string{"since": q.since, "object": q.object, "actor": q.actor} {
			if value != "" {
				v.Set(name, value)
			}
		}
		return show(c, a, http.MethodGet, "/admin/v1/audit?"+v.Encode(), nil, func(w io.Writer, list []admin.AuditEntry) {
			fmt.Fprintln(w, "AT\tBY\tACTION\tOBJECT\tBEFORE\tAFTER")
			for _, e := range list {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", moment(e.At), e.Actor, e.Action, printableLines(e.Object), printableLines(e.Before), printableLines(e.After))
			}
		})
	}
	return c
}
