// Command headgate is the front door of a self-hosted LLM fleet.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	benchcache "headgate/bench/cache"
	"headgate/bench/gateway"
	"headgate/cluster/ledger"
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
	if was, err := benchcache.Child(ctx); was { // the same of `bench cache`
		if err != nil {
			fmt.Fprintln(os.Stderr, "headgate:", err)
			os.Exit(exitFailed)
		}
		return
	}
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
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(serveCommand(), demoCommand(), doctorCommand(), initCommand(),
		applyCommand(), policyCommand(), keysCommand(), killCommand(), reviveCommand(), ladderCommand(), backendsCommand(), drainCommand(), undrainCommand(), tokensCommand(),
		statusCommand(), membersCommand(), limitsCommand(), explainCommand(), cacheCommand(), budgetsCommand(), usageCommand(), auditCommand(), contentCommand(),
		nodeCommand(), ledgerCommand(), benchCommand(), docsCommand(), versionCommand())
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	var config *node.ConfigError
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage) || errors.As(err, &config) || strings.HasPrefix(err.Error(), "unknown command"):
		fmt.Fprintln(os.Stderr, "headgate:", err)
		fmt.Fprintf(os.Stderr, "See %s.\n", see(c, err))
		return exitUsage
	}
	fmt.Fprintln(os.Stderr, "headgate:", err)
	return exitFailed
}

// usageError is a wrong call.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// policyError is a policy that is wrong, in the node's words.
type policyError struct{ error }

func (e policyError) Unwrap() error { return e.error }

// see is where people read how it is done right.
func see(c *cobra.Command, err error) string {
	var problems ledger.Problems
	var policy policyError
	if errors.As(err, &problems) || errors.As(err, &policy) {
		return "headgate docs policy"
	}
	return c.CommandPath() + " --help"
}

// flagError says what is wrong with a flag, and what may have been meant.
func flagError(c *cobra.Command, err error) error {
	var none *pflag.NotExistError
	var value *pflag.InvalidValueError
	switch {
	case errors.As(err, &value):
		return usageError{fmt.Errorf("--%s: %s", value.GetFlag().Name, wrongValue(value.GetValue(), value.Unwrap()))}
	case !errors.As(err, &none) || none.GetSpecifiedShortnames() != "":
		return usageError{err}
	}
	name := none.GetSpecifiedName()
	if arg := strings.ToUpper(name); slices.Contains(strings.FieldsFunc(c.Use, func(r rune) bool { return r < 'A' || r > 'Z' }), arg) {
		return usageError{fmt.Errorf("%w; %s is an argument, not a flag: %s", err, arg, c.UseLine())}
	}
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	if meant := ledger.Nearest(name, names); meant != "" {
		err = fmt.Errorf("%w; did you mean --%s?", err, meant)
	}
	return usageError{err}
}

// wrongValue says in words what strconv says of a value; other errors stay as they are.
func wrongValue(value string, err error) string {
	var number *strconv.NumError
	switch {
	case !errors.As(err, &number):
		return err.Error()
	case errors.Is(err, strconv.ErrRange):
		return fmt.Sprintf("%q is beyond what can be counted", value)
	case number.Func == "ParseBool":
		return fmt.Sprintf("%q is neither true nor false", value)
	}
	return fmt.Sprintf("%q is not a whole number", value)
}

// exactly is cobra.ExactArgs with our exit code.
func exactly(n int) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		switch {
		case len(args) != n && n == 0:
			return usageError{fmt.Errorf("%s takes no argument, not %q: %s", c.CommandPath(), args[0], c.Use)}
		case len(args) != n && n == 1:
			return usageError{fmt.Errorf("%s takes one argument, not %d: %s", c.CommandPath(), len(args), c.Use)}
		case len(args) != n:
			return usageError{fmt.Errorf("%s takes %d arguments, not %d: %s", c.CommandPath(), n, len(args), c.Use)}
		}
		if slices.Contains(args, "") {
			return usageError{fmt.Errorf("%s: an argument is empty: %s", c.CommandPath(), c.Use)}
		}
		return nil
	}
}

// Variables that are no flag's: secrets do not belong on a command line.
const (
	devKeyVariable = "HEADGATE_DEV_KEY"
	tokenVariable  = "HEADGATE_ADMIN_TOKEN"
	apiKeyVariable = "HEADGATE_API_KEY" // of commands that are clients of the front door
)

// variable is that of a flag.
func variable(flag string) string {
	return "HEADGATE_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// fromEnvironment sets the flags that the command line left out.
func fromEnvironment(fs *pflag.FlagSet) (err error) {
	fs.VisitAll(func(f *pflag.Flag) {
		name := variable(f.Name)
		if v, ok := os.LookupEnv(name); ok && !f.Changed && err == nil {
			if serr := fs.Set(f.Name, v); serr != nil {
				err = usageError{fmt.Errorf("%s: %s", name, wrongValue(v, serr))}
			}
		}
	})
	return err
}
