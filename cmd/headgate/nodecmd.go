package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

// nodeCommand is what one node does alone, also where the cluster has no quorum.
func nodeCommand() *cobra.Command {
	return group("node", "What one node decides alone, without a quorum, for a while", overrideCommand(), nodeKillCommand(), nodeReviveCommand())
}

func overrideCommand() *cobra.Command {
	var mode, span string
	var clear bool
	c := &cobra.Command{
		Use: "override [--unavailable MODE --for TIME | --clear]", Short: "Say what this node does with limits whose owner is out of reach",
		Long: "Put one answer in the place of every limit's own `unavailable`, on this node only, for a while:\n\n" +
			"  local  a private bucket of the node's, with an equal share of the limit\n" +
			"  deny   refuse\n" +
			"  allow  admit without counting\n\n" +
			"Without flags the override in force is shown.",
		Example: "  headgate node override --unavailable local --for 15m\n  headgate node override --clear", Args: exactly(0),
	}
	a := adminFlags(c)
	c.Flags().StringVar(&mode, "unavailable", "", "allow, deny or local")
	c.Flags().StringVar(&span, "for", "", "how long, 24h at most")
	c.Flags().BoolVar(&clear, "clear", false, "end it now")
	c.RunE = func(c *cobra.Command, _ []string) error {
		const path = "/admin/v1/node/override"
		switch {
		case clear && (mode != "" || span != ""):
			return usageError{errors.New("--clear goes with no other flag")}
		case clear:
			return show(c, a, http.MethodDelete, path, nil, said("this node has no override"))
		case mode == "" && span == "":
			return show(c, a, http.MethodGet, path, nil, func(w io.Writer, o *admin.Override) {
				if o == nil {
					fmt.Fprintln(w, "this node has no override")
					return
				}
				fmt.Fprintf(w, "%s until %s, by %s\n", o.Unavailable, moment(o.Expires), o.Actor)
			})
		case mode == "" || span == "":
			return usageError{errors.New("say both: --unavailable deny --for 15m")}
		}
		return send(c, a, http.MethodPut, path, map[string]string{"unavailable": mode, "for": span}, said("this node answers %s for %s", mode, span))
	}
	return c
}

func nodeKillCommand() *cobra.Command {
	var span, reason string
	c := &cobra.Command{
		Use: "kill [global | {model|tenant|key} NAME]", Short: "Throw a kill switch of this node only, for a while",
		Long:    "As headgate kill, on one node and for 24h at most. It needs no quorum. Without arguments the node's\nown switches are listed.",
		Example: "  headgate node kill tenant acme --for 15m --reason 'cut off from the others'",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&span, "for", "", "how long, 24h at most")
	c.Flags().StringVar(&reason, "reason", "", "why, for the audit log; those who are refused are told")
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return show(c, a, http.MethodGet, "/admin/v1/node/kill", nil, printKills)
		}
		path, what, err := switchPath("/admin/v1/node/kill", args)
		if err != nil {
			return err
		}
		if span == "" {
			return usageError{errors.New("say how long: --for 15m")}
		}
		return send(c, a, http.MethodPut, path, map[string]string{"for": span, "reason": reason}, said("%s is killed on this node for %s", what, span))
	}
	return c
}

func nodeReviveCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "revive {global | {model|tenant|key} NAME}", Short: "Release a kill switch of this node only", Example: "  headgate node revive tenant acme",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		path, what, err := switchPath("/admin/v1/node/kill", args)
		if err != nil {
			return err
		}
		return show(c, a, http.MethodDelete, path, nil, said("%s is no longer killed on this node alone", what))
	}
	return c
}
