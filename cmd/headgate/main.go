// Command headgate is the front door of a self-hosted LLM fleet.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"headgate/bench/gateway"
	"headgate/cmd/node"
)

// version is set by the build.
var version = "dev"

func main() {
	if was, err := gateway.Child(); was { // a process that `bench gateway` started to help it
		if err != nil {
			fmt.Fprintln(os.Stderr, "headgate:", err)
			os.Exit(exitFailed)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:]))
}

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2 // usage or configuration
)

func run(ctx context.Context, args []string) int {
	root := &cobra.Command{
		Use:   "headgate",
		Short: "The front door of a self-hosted LLM fleet: authenticates, meters and limits what reaches it",
		Long: "Headgate stands between your applications and vLLM. From the first minute no caller can take\n" +
			"more than its tokens, requests, slots or dollars a minute.\n\n" +
			"Every flag can also be given as HEADGATE_<FLAG>, such as HEADGATE_ADMIN_LISTEN.",
		SilenceUsage: true, SilenceErrors: true, Version: version,
		PersistentPreRunE: func(c *cobra.Command, _ []string) error { return fromEnvironment(c.Flags()) },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(serveCommand(), demoCommand(), doctorCommand(), initCommand(),
		applyCommand(), policyCommand(), keysCommand(), killCommand(), reviveCommand(), ladderCommand(), tokensCommand(),
		statusCommand(), membersCommand(), limitsCommand(), explainCommand(), budgetsCommand(), usageCommand(), auditCommand(), contentCommand(),
		nodeCommand(), ledgerCommand(), benchCommand(), docsCommand(), versionCommand())
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var config *node.ConfigError
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage) || errors.As(err, &config) || strings.HasPrefix(err.Error(), "unknown command"):
		fmt.Fprintln(os.Stderr, "headgate:", err)
		fmt.Fprintln(os.Stderr, "See headgate --help.")
		return exitUsage
	}
	fmt.Fprintln(os.Stderr, "headgate:", err)
	return exitFailed
}

// usageError is a wrong call.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// exactly is cobra.ExactArgs with our exit code.
func exactly(n int) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != n {
			return usageError{fmt.Errorf("%s takes %d arguments: %s", c.CommandPath(), n, c.Use)}
		}
		if slices.Contains(args, "") {
			return usageError{fmt.Errorf("%s: an argument is empty: %s", c.CommandPath(), c.Use)}
		}
		return nil
	}
}

// fromEnvironment sets the flags that the command line left out.
func fromEnvironment(fs *pflag.FlagSet) (err error) {
	fs.VisitAll(func(f *pflag.Flag) {
		name := "HEADGATE_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if v, ok := os.LookupEnv(name); ok && !f.Changed && err == nil {
			if serr := fs.Set(f.Name, v); serr != nil {
				err = usageError{fmt.Errorf("%s=%q: %w", name, v, serr)}
			}
		}
	})
	return err
}
