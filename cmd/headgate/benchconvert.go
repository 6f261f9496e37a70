package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	benchtrace "headgate/bench/trace"
)

// convertCommand makes traces of others ones that are replayed.
func convertCommand() *cobra.Command {
	return group("convert", "Turn a trace of requests into the CSV that is replayed: time,tenant,input_tokens,output_tokens",
		convertFrom(benchtrace.Azure, "[FILE]", "an Azure LLM inference trace", "zipf:20",
			"Read TIMESTAMP,ContextTokens,GeneratedTokens, as https://github.com/Azure/AzurePublicDataset has it. It names no\n"+
				"tenants, so each request is drawn one. Without FILE it is the sample that is built in: the first 4,000 requests\n"+
				"of the conversation service of 2023.",
			"  headgate bench convert azure AzureLLMInferenceTrace_conv.csv >trace.csv\n  headgate bench convert azure --tenants-by even:5 >trace.csv"),
		convertFrom(benchtrace.Mooncake, "[FILE]", "a trace of Mooncake", "zipf:20",
			"Read JSON lines of timestamp, input_length, output_length and hash_ids, as https://github.com/kvcache-ai/Mooncake\n"+
				"has it. It names no tenants; requests whose prompts begin alike, after what all have in common, belong together\n"+
				"and are drawn one tenant. Requests of one tick of its clock are parted over it. Without FILE it is the sample\n"+
				"that is built in: the first 3,000 requests of the conversation trace.",
			"  headgate bench convert mooncake conversation_trace.jsonl --tenants-by zipf:100:0.8 >trace.csv"),
		convertFrom(benchtrace.Usage, "FILE", "a usage log of Headgate", "file",
			"Read what headgate usage export prints, as CSV or JSON lines, each request a line. Requests that were refused\n"+
				"are not in it: what is replayed is what was let through. Those that the gateway's cache answered are in it.",
			"  headgate usage export --last 24h | headgate bench convert usage - >trace.csv"))
}

// convertFrom is the command for one format. by is how it is split into tenants where nobody says.
func convertFrom(format benchtrace.Format, arg, what, by, long, example string) *cobra.Command {
	var seed uint64
	var first time.Duration
	c := &cobra.Command{
		Use: string(format) + " " + arg, Short: "Convert " + what, Example: example,
		Long: "Convert " + what + " to CSV on stdout; what it is goes to stderr. FILE may be packed with gzip; - is stdin.\n\n" + long,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 && arg == "[FILE]" {
				return nil
			}
			return exactly(1)(c, args)
		},
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		split, err := benchtrace.ParseSplit(by, seed)
		if err != nil {
			return usageError{fmt.Errorf("--tenants-by: %w", err)}
		}
		if first < 0 {
			return usageError{fmt.Errorf("--first %v: it must be above 0, such as 1h", first)}
		}
		t, err := readTrace(c, format, args, benchtrace.Options{First: first})
		if err != nil {
			return usageError{err}
		}
		if t, err = t.By(split); err != nil {
			return usageError{fmt.Errorf("--tenants-by: %w", err)}
		}
		if err := t.Write(c.OutOrStdout()); err != nil {
			return err
		}
		fmt.Fprintf(c.ErrOrStderr(), "%s\ntenants: %s\n", t, t.Split)
		if t.Source != "" {
			fmt.Fprintf(c.ErrOrStderr(), "source: %s\n", t.Source)
		}
		return nil
	}
	f := c.Flags()
	f.StringVar(&by, "tenants-by", by, "whose requests are whose: file (as it names them), even:K or zipf:K[:SKEW] of K tenants")
	f.Uint64Var(&seed, "seed", 1, "draws the tenants")
	f.DurationVar(&first, "first", 0, "only what came within so long of the first request, such as 1h (default: all)")
	return c
}

// readTrace reads the file that is named, stdin, or the sample of the format.
func readTrace(c *cobra.Command, format benchtrace.Format, args []string, o benchtrace.Options) (*benchtrace.Trace, error) {
	switch {
	case len(args) == 0:
		return benchtrace.Load(string(format), format, o)
	case args[0] == "-":
		o.Name = "stdin"
		return benchtrace.Read(c.InOrStdin(), format, o)
	}
	return benchtrace.Open(args[0], format, o)
}
