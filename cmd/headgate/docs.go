package main

import (
	"embed"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

//go:embed docs/*.md
var pages embed.FS

func docsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "docs [PAGE]", Short: "Print the documentation: without a page, the list of pages",
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
				fmt.Fprintln(c.OutOrStdout(), strings.Join(names, "\n"))
				return nil
			}
			text, err := pages.ReadFile("docs/" + args[0] + ".md")
			if err != nil || len(args) > 1 {
				return usageError{fmt.Errorf("there is no page %q; the pages are %s", strings.Join(args, " "), strings.Join(names, ", "))}
			}
			_, err = c.OutOrStdout().Write(text)
			return err
		},
	}
}

func versionCommand() *cobra.Command {
	return &cobra.Command{Use: "version", Short: "Print the version", Args: exactly(0), Run: func(c *cobra.Command, _ []string) { fmt.Fprintln(c.OutOrStdout(), version) }}
}
