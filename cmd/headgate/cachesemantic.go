package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

func wrongCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "wrong ENTRY", Short: "Report that an answer served to a question in other words was wrong", Args: exactly(1),
		Long: "Report that an answer which the semantic cache served was wrong. Its entry goes on every node, and is\n" +
			"counted as a wrong hit of its surface: enough of them, and the surface serves exact answers only.\n" +
			"ENTRY is what X-Headgate-Cache-Entry of the answer says, and cache_entry of the request's log line.",
		Example: "  headgate cache wrong 8f14e45fceea167a",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		ask := struct {
			Entry string `json:"entry"`
		}{args[0]}
		return send(c, a, http.MethodPost, "/admin/v1/cache/wrong", ask, func(w io.Writer, done admin.CacheWrongDone) {
			gone := "it had ended before"
			if done.Evicted > 0 {
				gone = fmt.Sprintf("it was on %d nodes and is on none of them now", done.Evicted)
			}
			fmt.Fprintf(w, "entry %s of %s is counted as wrong; %s\n", printable(args[0]), generationOf(done.Tenant, done.Surface), gone)
			if done.Unreached > 0 {
				warn(w, []string{fmt.Sprintf("%d nodes could not be asked: report it again when they are back", done.Unreached)})
			}
		})
	}
	return c
}

func recentCommand() *cobra.Command {
	var served bool
	var surface string
	c := &cobra.Command{
		Use: "recent", Short: "Show what the semantic cache said of a node's latest requests, and why", Args: exactly(0),
		Long: "Show what the semantic cache said of the latest 1,000 requests of the node that is asked, the newest first:\n" +
			"how similar the nearest question was, by what that was measured, and which guards refused it. What people\n" +
			"asked is not shown, nor kept for it.\n\n" +
			"ACTION is serve; audit, where it would have been a hit and the model was asked to check; explore, where it\n" +
			"was none and the model's answer was compared, to learn; or miss. THRESHOLD is a similarity in mode static,\n" +
			"and a probability in learned and shadow, not to be compared with SIMILARITY. REFUSED BY are the guards that\n" +
			"refused the nearest question that any refused: where another got by them, SIMILARITY and ENTRY are of that.",
		Example: "  headgate cache recent\n  headgate cache recent --served --surface faq",
	}
	a := adminFlags(c)
	c.Flags().BoolVar(&served, "served", false, "only those that were answered")
	c.Flags().StringVar(&surface, "surface", "", "only those of this surface")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/cache/recent", nil, func(w io.Writer, list []admin.CacheDecision) {
			fmt.Fprintln(w, "TIME\tTENANT\tSURFACE\tACTION\tSIMILARITY\tTHRESHOLD\tENTRY\tREFUSED BY\tWHY\tREQUEST")
			found := surface == ""
			for i := range list {
				d := &list[i]
				if surface != "" && d.Surface != surface {
					continue
				}
				if found = true; !served || d.Action == "serve" {
					printDecision(w, d)
				}
			}
			if !found {
				fmt.Fprintf(c.ErrOrStderr(), "headgate: none of the latest %d decisions of this node is of surface %s; headgate cache stats lists the surfaces that it knows of\n", len(list), printable(surface))
			}
		})
	}
	return c
}

func printDecision(w io.Writer, d *admin.CacheDecision) {
	action := d.Action
	if d.Shadow {
		action += " (shadow)"
	}
	similarity, threshold := "-", "-"
	if d.Entry != "" {
		similarity = fmt.Sprintf("%.3f", d.Similarity)
	}
	if d.Threshold > 0 { // none was reached where guards had refused all
		threshold = fmt.Sprintf("%.3f", d.Threshold)
	}
	fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", d.Time.UTC().Format("15:04:05.000"), d.Tenant, d.Surface, action, similarity, threshold, d.Entry,
		strings.Join(d.Refused, ","), d.Why, d.Request)
}

// printSemantic tells what the semantic cache does, and how often it is wrong.
func printSemantic(w io.Writer, list []admin.CacheSemantic) {
	if len(list) == 0 {
		return
	}
	fmt.Fprintln(w, "\nTENANT\tSURFACE\tEMBEDDER\tQUESTIONS\tIN\tSERVED\tAUDITED\tEXPLORED\tMISSED\tSAME\tOTHER\tPROBES\tREPORTED\tWRONG OF HITS\tWRONG OF REQUESTS\tSTATE")
	for i := range list {
		s := &list[i]
		state := "serves"
		switch b := &s.Budget; {
		case s.Mode == "":
			state = "not in use any more"
		case s.Mode == "shadow":
			state = "shadow: serves nothing"
		case b.Blind:
			state = "exact only: too few audits found out anything"
		case b.Tripped:
			state = "exact only: its budget for wrong answers is exceeded"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n", s.Tenant, s.Surface, s.Embedder, s.Entries, byteSize(s.Bytes), s.Served, s.Audited, s.Explored, s.Missed,
			s.Same, s.Different, s.Probes, s.Reported, rate(s.Budget.Audited, s.Budget.PerHit), rate(s.Budget.Audited, s.Budget.PerRequest), state)
	}
}

// printCompared says whether a request is compared with questions in other words. Of one to which no answer is kept
// enough was said.
func printCompared(w io.Writer, of string, v *admin.CacheVerdict) {
	c := v.Semantic
	switch {
	case c == nil || !v.Cacheable:
	case !c.Compared:
		fmt.Fprintf(w, "%snot compared with other wordings: %s\n", of, printable(c.Why))
	default:
		how := c.Mode
		if c.Threshold > 0 {
			how += fmt.Sprintf(" from %g on", c.Threshold)
		}
		if c.Least > c.Threshold {
			how += fmt.Sprintf(", %g at least by its own header", c.Least)
		}
		fmt.Fprintf(w, "%scompared with other wordings: %s, by %s, partition %s\n", of, how, printable(c.Embedder), c.Partition)
	}
}

// printPair says what one of two requests would get of the other's answer.
func printPair(w io.Writer, p *admin.CachePair) {
	if p == nil {
		return
	}
	hit := map[string]string{"yes": "a hit", "no": "no hit"}[p.Hit]
	if hit == "" {
		hit = p.Hit + " a hit"
	}
	fmt.Fprintf(w, "one after the other: %s: %s\n", hit, printable(p.Why))
	if p.Similarity != nil {
		fmt.Fprintf(w, "similarity: %.3f\n", *p.Similarity)
	}
	for _, r := range p.Refused {
		fmt.Fprintf(w, "refused by guard %s%s\n", printable(r.Guard), words(&r))
	}
}

// words are what a guard goes by.
func words(r *admin.CacheRefusal) string {
	if r.First == "" && r.Second == "" {
		return ""
	}
	word := func(s string) string {
		if s == "" {
			return "nothing"
		}
		return printable(fmt.Sprintf("%q", s))
	}
	return ": " + word(r.First) + " in one, " + word(r.Second) + " in the other"
}

// rate is a share with its bounds, of so many that were looked at.
func rate(of int64, r admin.CacheRate) string {
	if of == 0 {
		return "not known"
	}
	return fmt.Sprintf("%.2f%% (%.2f–%.2f%%)", 100*r.Estimate, 100*r.Lower, 100*r.Upper)
}
