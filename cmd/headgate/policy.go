package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

// applying is one call of headgate apply.
type applying struct {
	file     string
	rollback uint64
	expected uint64
	dry      bool

	node *client
}

func applyCommand() *cobra.Command {
	var q applying
	c := &cobra.Command{
		Use: "apply {-f FILE | --rollback REVISION}", Short: "Validate a policy, show what it changes, and put it in force on all nodes",
		Example: "  headgate apply -f policy.yaml --dry-run\n  headgate apply -f policy.yaml --expected 12\n  headgate apply --rollback 11",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 1 && q.file == "" {
				return usageError{fmt.Errorf("the policy file is a flag: headgate apply -f %s", args[0])}
			}
			return exactly(0)(c, args)
		},
	}
	q.node = adminFlags(c)
	c.Flags().StringVarP(&q.file, "file", "f", "", "policy file")
	c.Flags().BoolVar(&q.dry, "dry-run", false, "only show")
	c.Flags().Uint64Var(&q.rollback, "rollback", 0, "put this revision in force again, as a new one")
	c.Flags().Uint64Var(&q.expected, "expected", 0, "only if this revision is in force: what others applied meanwhile is not overwritten")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if (q.file == "") == (q.rollback == 0) {
			return usageError{errors.New("name the policy file: headgate apply -f policy.yaml, or a revision: headgate apply --rollback 11")}
		}
		v := url.Values{}
		if q.dry {
			v.Set("dry_run", "true")
		}
		var expected *uint64
		if c.Flags().Changed("expected") {
			expected = &q.expected
			v.Set("expected", strconv.FormatUint(q.expected, 10))
		}
		if q.rollback != 0 && !q.dry {
			return send(c, q.node, http.MethodPost, "/admin/v1/policy/rollback", admin.Rollback{Revision: q.rollback, Expected: expected}, printApplied)
		}
		text, err := q.text(c)
		if err != nil {
			return err
		}
		path := "/admin/v1/policy"
		if len(v) > 0 {
			path += "?" + v.Encode()
		}
		err = show(c, q.node, http.MethodPut, path, text, printApplied)
		if wrong, ok := errors.AsType[usageError](err); ok {
			return usageError{policyError(wrong)}
		}
		return err
	}
	return c
}

// text is the policy that is meant.
func (q *applying) text(c *cobra.Command) ([]byte, error) {
	if q.file == "" {
		return q.node.call(c.Context(), http.MethodGet, fmt.Sprintf("/admin/v1/policy?revision=%d", q.rollback), nil)
	}
	text, err := os.ReadFile(q.file)
	if err != nil {
		return nil, usageError{err}
	}
	return text, nil
}

func printApplied(w io.Writer, v admin.Applied) {
	for _, line := range v.Changes {
		fmt.Fprintln(w, line)
	}
	warn(w, v.Warnings)
	if v.DryRun {
		fmt.Fprintf(w, "%d changes; nothing was applied\n", len(v.Changes))
		return
	}
	fmt.Fprintf(w, "%d changes applied as revision %d\n", len(v.Changes), v.Revision)
}

func policyCommand() *cobra.Command {
	var revision uint64
	one := &cobra.Command{
		Use: "show", Short: "Print the policy in force, or an earlier one", Args: exactly(0),
		Example: "  headgate policy show --revision 11 >old.yaml",
	}
	a := adminFlags(one)
	one.Flags().Uint64Var(&revision, "revision", 0, "an earlier one (default: in force)")
	one.RunE = func(c *cobra.Command, _ []string) error {
		path := "/admin/v1/policy"
		if revision != 0 {
			path += fmt.Sprintf("?revision=%d", revision)
		}
		text, err := a.call(c.Context(), http.MethodGet, path, nil)
		if err != nil {
			return err
		}
		if a.json {
			return json.NewEncoder(c.OutOrStdout()).Encode(map[string]string{"policy": string(text)})
		}
		_, err = c.OutOrStdout().Write(text)
		return err
	}

	all := &cobra.Command{Use: "revisions", Short: "List the policies that were in force", Args: exactly(0), Example: "  headgate policy revisions"}
	b := adminFlags(all)
	all.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, b, http.MethodGet, "/admin/v1/policy/revisions", nil, func(w io.Writer, list []admin.PolicyRevision) {
			fmt.Fprintln(w, "REVISION\tAT\tBY\tNOTE")
			for _, r := range list {
				note := ""
				if r.RolledBackTo != 0 {
					note = fmt.Sprintf("as revision %d", r.RolledBackTo)
				}
				if r.InForce {
					note = joined(note, "in force")
				}
				fmt.Fprintf(w, "%d\t%s\t%s\t%s\n", r.Revision, moment(r.At), r.Actor, note)
			}
		})
	}
	return group("policy", "Look at the policies of the cluster", one, all)
}

// joined puts a comma between two texts, unless one is empty.
func joined(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + ", " + b
}
