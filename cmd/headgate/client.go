package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

// client talks to a node's admin API.
type client struct {
	url  string
	json bool
}

// adminFlags are those of every command that talks to a node.
func adminFlags(c *cobra.Command) *client {
	a := &client{}
	c.Flags().StringVar(&a.url, "admin", "http://127.0.0.1:8081", "the node's admin API; the token comes from HEADGATE_ADMIN_TOKEN")
	c.Flags().BoolVar(&a.json, "json", false, "print JSON")
	return a
}

// call sends body, if any, and returns the answer.
func (a *client) call(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	resp, err := a.open(ctx, method, path, body)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	return io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
}

// copy writes an answer of any length to w.
func (a *client) copy(ctx context.Context, path string, w io.Writer) error {
	resp, err := a.open(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	_, err = io.Copy(w, resp.Body)
	return err
}

// maxAnswer bounds an answer that is read whole, in bytes.
const maxAnswer = 64 << 20

// open sends body, if any, and returns an answer that is a good one. Errors are the
// node's own words.
func (a *client) open(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	token := os.Getenv("HEADGATE_ADMIN_TOKEN")
	if token == "" {
		return nil, usageError{errors.New("HEADGATE_ADMIN_TOKEN is not set; it is the token that the node was started with")}
	}
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(a.url, "/")+path, bytes.NewReader(body))
	if err != nil {
		return nil, usageError{err}
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no answer from the node: %w; is --admin right?", err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	var e struct{ Error struct{ Message string } }
	if json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&e) != nil || e.Error.Message == "" {
		e.Error.Message = fmt.Sprintf("status %d", resp.StatusCode)
	}
	err = errors.New(e.Error.Message)
	if resp.StatusCode == http.StatusBadRequest { // such as a policy that cannot be applied
		err = usageError{err}
	}
	return nil, err
}

// get prints an answer: as it came with --json, else as table makes it.
func show[T any](c *cobra.Command, a *client, method, path string, body []byte, table func(io.Writer, T)) error {
	raw, err := a.call(c.Context(), method, path, body)
	if err != nil {
		return err
	}
	if a.json {
		_, err = c.OutOrStdout().Write(raw)
		return err
	}
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		return fmt.Errorf("the node's answer can't be read: %w", err)
	}
	w := tabwriter.NewWriter(c.OutOrStdout(), 0, 4, 2, ' ', 0)
	table(w, v)
	return w.Flush()
}

func applyCommand() *cobra.Command {
	var file string
	var dry bool
	c := &cobra.Command{
		Use: "apply -f FILE", Short: "Validate a policy, show what it changes, and put it in force",
		Example: "  headgate apply -f policy.yaml --dry-run", Args: exactly(0),
	}
	a := adminFlags(c)
	c.Flags().StringVarP(&file, "file", "f", "", "policy file")
	c.Flags().BoolVar(&dry, "dry-run", false, "only show")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if file == "" {
			return usageError{errors.New("name the policy file: headgate apply -f policy.yaml")}
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return usageError{err}
		}
		path := "/admin/v1/policy"
		if dry {
			path += "?dry_run=true"
		}
		return show(c, a, http.MethodPut, path, text, func(w io.Writer, v admin.Applied) {
			for _, line := range v.Changes {
				fmt.Fprintln(w, line)
			}
			if v.DryRun {
				fmt.Fprintf(w, "%d changes; nothing was applied\n", len(v.Changes))
				return
			}
			fmt.Fprintf(w, "%d changes applied as revision %d\n", len(v.Changes), v.Revision)
		})
	}
	return c
}

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
			fmt.Fprintf(w, "policy\trevision %d from %s: %d tenants, %d keys, models %s\n", s.PolicyRevision, s.PolicySource, s.Tenants, s.Keys, strings.Join(s.Models, ", "))
			fmt.Fprintf(w, "buckets\t%d\n\nBACKEND\tSTATE\tIN FLIGHT\tSLOTS\tURL\tLAST ERROR\n", s.Buckets)
			for _, b := range s.Backends {
				fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\t%s\n", b.Endpoint, b.State, b.InFlight, b.Slots, b.URL, b.LastError)
			}
		})
	}
	return c
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
		body, err := json.Marshal(q)
		if err != nil {
			return err
		}
		return show(c, a, http.MethodPost, "/admin/v1/explain", body, printExplanation)
	}
	return c
}

func keysCommand() *cobra.Command {
	list := &cobra.Command{Use: "list", Short: "List the keys of a node's policy", Args: exactly(0)}
	a := adminFlags(list)
	list.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/keys", nil, func(w io.Writer, keys []admin.Key) {
			fmt.Fprintln(w, "ID\tTENANT\tSTATUS\tEXPIRES\tLAST USED\tNAME")
			for _, k := range keys {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", k.ID, k.Tenant, k.Status, k.Expires, k.LastUsed, k.Name)
			}
		})
	}
	return group("keys", "Make and list API keys", createKeyCommand(), list)
}

// group holds commands; a word that names none of them is a wrong call.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{Use: use, Short: short, RunE: func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usageError{fmt.Errorf("unknown command %q for %q", args[0], c.CommandPath())}
		}
		return c.Help()
	}}
	g.AddCommand(commands...)
	return g
}
