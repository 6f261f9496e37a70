package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
	"headgate/proxy/contentlog"
)

// contentCommand works on the prompts and answers that were kept: through a node, which
// also reaches what it has not written yet, or on a folder without one.
func contentCommand() *cobra.Command {
	return group("content", "Export or erase the prompts and answers that were kept",
		contentVerb("export", "Print those of a node as JSON lines", exportContent), contentVerb("erase", "Erase those of a node", eraseContent))
}

// contentCall is one call of either verb.
type contentCall struct {
	tenant, user, since, until, dir string

	node *client
}

func contentVerb(verb, short string, run func(*cobra.Command, *contentCall, contentlog.Filter) error) *cobra.Command {
	var q contentCall
	c := &cobra.Command{Use: verb, Short: short, Args: exactly(0), Example: "  headgate content " + verb + " --tenant acme --user u-17"}
	q.node = adminFlags(c)
	c.Flags().StringVar(&q.tenant, "tenant", "", "only this tenant's")
	c.Flags().StringVar(&q.user, "user", "", "only this user's; of every tenant unless --tenant is given")
	c.Flags().StringVar(&q.since, "since", "", "only from this date on")
	c.Flags().StringVar(&q.until, "until", "", "only before this date")
	c.Flags().StringVar(&q.dir, "dir", "", "work on this folder instead of asking a node")
	c.RunE = func(c *cobra.Command, _ []string) error {
		f := contentlog.Filter{Tenant: q.tenant, User: q.user}
		var err error
		if q.since != "" {
			if f.Since, err = admin.ParseTime(q.since); err != nil {
				return usageError{fmt.Errorf("--since: %w", err)}
			}
		}
		if q.until != "" {
			if f.Until, err = admin.ParseTime(q.until); err != nil {
				return usageError{fmt.Errorf("--until: %w", err)}
			}
		}
		return run(c, &q, f)
	}
	return c
}

// path of the admin API for this call.
func (q *contentCall) path() string {
	v := url.Values{}
	for name, value := range map[string]string{"tenant": q.tenant, "user": q.user, "since": q.since, "until": q.until} {
		if value != "" {
			v.Set(name, value)
		}
	}
	return "/admin/v1/content?" + v.Encode()
}

func exportContent(c *cobra.Command, q *contentCall, f contentlog.Filter) error {
	if q.dir != "" {
		_, err := contentlog.ExportDir(q.dir, c.OutOrStdout(), f)
		return err
	}
	return q.node.copy(c.Context(), q.path(), c.OutOrStdout())
}

func eraseContent(c *cobra.Command, q *contentCall, f contentlog.Filter) error {
	if q.tenant == "" && q.user == "" {
		return usageError{errors.New("name whose content to erase: --tenant, --user or both")}
	}
	var e admin.Erased
	if q.dir != "" {
		n, err := contentlog.EraseDir(q.dir, f)
		if err != nil {
			return err
		}
		e.Erased = n
	} else {
		raw, err := q.node.call(c.Context(), http.MethodDelete, q.path(), nil)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(raw, &e); err != nil {
			return err
		}
	}
	if q.node.json {
		return json.NewEncoder(c.OutOrStdout()).Encode(e)
	}
	_, err := fmt.Fprintf(c.OutOrStdout(), "%d requests erased\n", e.Erased)
	return err
}
