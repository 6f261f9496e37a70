package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
	"headgate/proxy/ladder"
)

// switchPath is where the API has a kill switch: args are a kind and, but for global, a name.
func switchPath(base string, args []string) (path, what string, err error) {
	switch {
	case len(args) == 1 && args[0] == "global":
		return base + "/global", "everything", nil
	case len(args) == 2 && args[0] != "global":
		return base + "/" + url.PathEscape(args[0]) + "/" + url.PathEscape(args[1]), strings.Join(args, " "), nil
	}
	return "", "", usageError{errors.New("say what: global, model NAME, tenant NAME or key ID")}
}

func killCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use: "kill [global | {model|tenant|key} NAME]", Short: "Refuse all requests of a model, tenant or key, or all there are, on every node",
		Long:    "Throw a kill switch: what it names is refused with 403 `killed` on every node, until headgate\nrevive. What is in flight finishes. Without arguments the switches that are on are listed.",
		Example: "  headgate kill tenant acme --reason 'key on a public page'\n  headgate kill global\n  headgate kill",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&reason, "reason", "", "why, for the audit log; those who are refused are told")
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return show(c, a, http.MethodGet, "/admin/v1/kill", nil, printKills)
		}
		path, what, err := switchPath("/admin/v1/kill", args)
		if err != nil {
			return err
		}
		return send(c, a, http.MethodPut, path, map[string]string{"reason": reason}, said("%s is killed on every node; headgate revive %s ends that", what, strings.Join(args, " ")))
	}
	return c
}

func reviveCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "revive {global | {model|tenant|key} NAME}", Short: "Release a kill switch", Example: "  headgate revive tenant acme",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		path, what, err := switchPath("/admin/v1/kill", args)
		if err != nil {
			return err
		}
		return show(c, a, http.MethodDelete, path, nil, said("%s is no longer killed", what))
	}
	return c
}

func printKills(w io.Writer, list []admin.Kill) {
	fmt.Fprintln(w, "KIND\tNAME\tSINCE\tUNTIL\tBY\tREASON")
	for _, k := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", k.Kind, k.Name, moment(k.At), moment(k.Expires), k.Actor, k.Reason)
	}
}

func ladderCommand() *cobra.Command {
	look := &cobra.Command{Use: "show", Short: "List the rungs and whether they are on", Args: exactly(0), Example: "  headgate ladder show"}
	a := adminFlags(look)
	look.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/ladder", nil, printRungs)
	}

	var span, reason string
	set := &cobra.Command{
		Use: "set RUNG {on|off}", Short: "Set a rung of the degradation ladder on every node", Args: exactly(2),
		Long:    "Set a rung of the degradation ladder on every node, whatever its trigger says:\n" + rungs(),
		Example: "  headgate ladder set shed_best_effort on --for 10m --reason 'two backends down'\n  headgate ladder set cut_max_tokens off",
	}
	b := adminFlags(set)
	set.Flags().StringVar(&span, "for", "", "how long, such as 10m (default: until it is set again)")
	set.Flags().StringVar(&reason, "reason", "", "why, for the audit log; those who are refused are told")
	set.RunE = func(c *cobra.Command, args []string) error {
		if args[1] != "on" && args[1] != "off" {
			return usageError{fmt.Errorf("%q is neither on nor off", args[1])}
		}
		body := map[string]any{"on": args[1] == "on", "for": span, "reason": reason}
		return send(c, b, http.MethodPut, "/admin/v1/ladder/"+url.PathEscape(args[0]), body, said("%s is %s on every node", args[0], args[1]))
	}
	g := group("ladder", "Look at the degradation ladder, and set it", look, set)
	here, unknown := adminFlags(g), g.RunE
	g.RunE = func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return unknown(c, args)
		}
		return show(c, here, http.MethodGet, "/admin/v1/ladder", nil, printRungs)
	}
	return g
}

// rungs lists what there is to set.
func rungs() string {
	var b strings.Builder
	for _, r := range ladder.Rungs() {
		fmt.Fprintf(&b, "\n  %-17s %s", r, r.Effect())
	}
	return b.String()
}

func printRungs(w io.Writer, list []admin.Rung) {
	fmt.Fprintln(w, "RUNG\tSTATE\tSINCE\tUNTIL\tBY\tREASON\tEFFECT")
	for _, r := range list {
		state := "off"
		switch {
		case r.On:
			state = "on"
		case len(r.Models) > 0:
			state = "by itself, for " + strings.Join(r.Models, ", ")
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Rung, state, moment(r.At), moment(r.Expires), r.Actor, r.Reason, r.Effect)
	}
}
