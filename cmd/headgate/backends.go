package main

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

func backendsCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "backends", Short: "Show the backends: health, slots in use, and who waits for them", Args: exactly(0), Example: "  headgate backends\n  headgate backends --json",
		Long: "Health is as the node sees it that is asked; slots and the queue are the cluster's. LIMIT is how\nmany of the slots may be in use now: fewer than SLOTS while they are learnt, or after a start.",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/backends", nil, printBackends)
	}
	return c
}

func printBackends(w io.Writer, list []admin.BackendState) {
	fmt.Fprintln(w, "BACKEND\tSTATE\tIN USE\tLIMIT\tSLOTS\tWAITING\tPLACES\tPRESSURE\tRATE\tLAST ERROR")
	for _, b := range list {
		queue := "-\t-\t-\t-\t-\t-" // without slots there is none, and nobody counts the requests of other nodes
		inUse := int64(b.InFlight)
		if b.Slots > 0 {
			inUse, queue = b.InUse, fmt.Sprintf("%d\t%d\t%d\t%d\t%.2f\t%.1f/s", b.Limit, b.Slots, b.Waiting, b.Places, b.Pressure, b.Rate)
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", b.Endpoint, backendState(b), inUse, queue, printable(b.LastError))
	}
}

// backendState is its health in a few words.
func backendState(b admin.BackendState) string {
	words := []string{b.State}
	add := func(ok bool, word string) {
		if ok {
			words = append(words, word)
		}
	}
	add(b.Drained, "drained")
	add(b.Leaving, "leaving")
	add(b.Breaker != "" && b.Breaker != "closed", "breaker "+strings.ReplaceAll(b.Breaker, "_", " "))
	add(b.Ejected, "ejected")
	add(b.PausedMS > 0, "paused "+(time.Duration(b.PausedMS)*time.Millisecond).Round(100*time.Millisecond).String())
	add(b.Share < 1, fmt.Sprintf("starting (%.0f %%)", 100*b.Share))
	add(b.Stale, "metrics stale")
	add(b.Overflow, "overflow")
	return strings.Join(words, ", ")
}

func drainCommand() *cobra.Command {
	var span, reason string
	c := &cobra.Command{
		Use: "drain BACKEND", Short: "Send a backend no new requests, on every node", Args: exactly(1),
		Long:    "What is in flight finishes; headgate backends shows when it has. BACKEND is a name of the\npolicy, or one endpoint of a dns:// backend as headgate backends lists them.",
		Example: "  headgate drain vllm-a --reason 'new weights'\n  headgate drain vllm-a --for 30m",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&span, "for", "", "how long, such as 30m (default: until headgate undrain)")
	c.Flags().StringVar(&reason, "reason", "", "why, for the audit log")
	c.RunE = func(c *cobra.Command, args []string) error {
		body := map[string]any{"on": true, "for": span, "reason": reason}
		return send(c, a, http.MethodPut, drainPath(args[0]), body, said("%s gets no new requests on any node; headgate undrain %s ends that", args[0], args[0]))
	}
	return c
}

func undrainCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{Use: "undrain BACKEND", Short: "Send a backend requests again", Args: exactly(1), Example: "  headgate undrain vllm-a"}
	a := adminFlags(c)
	c.Flags().StringVar(&reason, "reason", "", "why, for the audit log")
	c.RunE = func(c *cobra.Command, args []string) error {
		return send(c, a, http.MethodPut, drainPath(args[0]), map[string]any{"on": false, "reason": reason}, said("%s gets requests again", args[0]))
	}
	return c
}

func drainPath(backend string) string {
	return "/admin/v1/backends/" + url.PathEscape(backend) + "/drain"
}
