package main

import (
	"embed"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"headgate/cluster/ledger"
)

//go:embed docs/*.md
var pages embed.FS

func docsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "docs [PAGE]", Short: "Print the documentation: without a page, the list of pages", Example: "  headgate docs\n  headgate docs capacity",
		RunE: func(c *cobra.Command, args []string) error {
			list, err := pages.ReadDir("docs")
			if err != nil {
				return err
			}
			names := make([]string, 0, len(list))
			for _, e := range list {
				names = append(names, strings.TrimSuffix(e.Name(), ".md"))
			}
			if len(args) == 0 {
				return listPages(c.OutOrStdout(), names)
			}
			text, err := pages.ReadFile("docs/" + args[0] + ".md")
			if err != nil || len(args) > 1 {
				page := strings.Join(args, " ")
				return usageError{fmt.Errorf("there is no page %q; the pages are %s%s", page, strings.Join(names, ", "), ledger.Hint(page, names))}
			}
			_, err = c.OutOrStdout().Write(text)
			return err
		},
	}
}

// listPages prints each page's name and title.
func listPages(w io.Writer, names []string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, name := range names {
		text, err := pages.ReadFile("docs/" + name + ".md")
		if err != nil {
			return err
		}
		title, _, _ := strings.Cut(string(text), "\n")
		fmt.Fprintf(t, "%s\t%s\n", name, strings.TrimPrefix(title, "# "))
	}
	return t.Flush()
}

func versionCommand() *cobra.Command {
	return &cobra.Command{Use: "version", Short: "Print the version", Args: exactly(0), Run: func(c *cobra.Command, _ []string) { fmt.Fprintln(c.OutOrStdout(), version) }}
}
