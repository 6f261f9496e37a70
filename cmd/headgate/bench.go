package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/cobra"

	benchcluster "headgate/bench/cluster"
	"headgate/bench/fakevllm"
	"headgate/bench/gateway"
	"headgate/bench/overload"
)

func benchCommand() *cobra.Command {
	return group("bench", "Measure, and simulate what is measured against", upstreamCommand(), gatewayCommand(), cacheBenchCommand(), clusterBenchCommand(), leaseCommand(), overloadCommand(), convertCommand())
}

// upstreamCommand serves the simulated vLLM.
func upstreamCommand() *cobra.Command {
	var cfg fakevllm.Config
	var listen, control, faults, metrics string
	c := &cobra.Command{
		Use: "upstream", Short: "Serve a simulated vLLM", Args: exactly(0),
		Example: "  headgate bench upstream --listen 127.0.0.1:8000 --ttft 200ms --inter-token 20ms --faults cut=0.01,503=0.02",
		RunE: func(c *cobra.Command, _ []string) error {
			var err error
			if cfg.Faults, err = fakevllm.ParseFaults(faults); err != nil {
				return usageError{err}
			}
			cfg.Metrics = fakevllm.Metrics(metrics)
			s, err := fakevllm.New(cfg)
			if err != nil {
				return usageError{err}
			}
			l, err := s.Listen(listen)
			if err != nil {
				return err
			}
			if control != "" {
				cl, err := net.Listen("tcp", control)
				if err != nil {
					return errors.Join(err, l.Close())
				}
				cs := &http.Server{Handler: s.Control(), ReadHeaderTimeout: 10 * time.Second}
				var wg sync.WaitGroup
				defer wg.Wait()
				defer func() { _ = cs.Close() }()  // nothing is lost by it
				wg.Go(func() { _ = cs.Serve(cl) }) // ends by the Close
				fmt.Fprintf(c.ErrOrStderr(), "steered on http://%s/fake/\n", cl.Addr())
			}
			fmt.Fprintf(c.ErrOrStderr(), "simulated vLLM on http://%s\n", l.Addr())
			return serveUntil(c.Context(), &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second}, l)
		},
	}
	f := c.Flags()
	f.StringVar(&listen, "listen", "127.0.0.1:8000", "address")
	f.Uint64Var(&cfg.Seed, "seed", 0, "decides every answer together with the request")
	f.StringSliceVar(&cfg.Models, "models", nil, "models served (default fake)")
	f.DurationVar(&cfg.TTFT, "ttft", 0, "time to the first token")
	f.DurationVar(&cfg.InterToken, "inter-token", 0, "time between tokens")
	f.IntVar(&cfg.Slots, "slots", 0, "requests running at once (default 256)")
	f.IntVar(&cfg.DefaultOutput, "default-output", 0, "tokens of an uncapped answer (default 16)")
	f.IntVar(&cfg.ContextLen, "context", 0, "tokens of prompt and answer together (default 131072)")
	f.Float64Var(&cfg.CachedFraction, "cached", 0, "share of each prompt reported as cached")
	f.DurationVar(&cfg.PromptToken, "prompt-token", 0, "time for each prompt token that is not cached")
	f.IntVar(&cfg.MaxWaiting, "max-waiting", 0, "requests waiting for a slot before the next is answered 429 (default unbounded)")
	f.IntVar(&cfg.Knee, "knee", 0, "requests running at full speed; more of them slow each other down (default none do)")
	f.Int64Var(&cfg.KVTokens, "kv-tokens", 0, "tokens that running requests hold together (default as many as fit)")
	f.IntVar(&cfg.PrefixBlocks, "prefix-blocks", 0, "blocks of 16 tokens in the prefix cache (default: none, see --cached)")
	f.StringVar(&metrics, "metrics", "", "how /metrics answers: new, old, none, frozen or hang (default new)")
	f.StringVar(&control, "control", "", "another address by which it is steered, which answers under every fault")
	f.StringVar(&faults, "faults", "", "faults and their probabilities, as in stall=0.01,cut=0.02,503=0.05")
	return c
}

// gatewayCommand measures this very binary against a proxy that does nothing.
func gatewayCommand() *cobra.Command {
	var cfg gateway.Config
	var out string
	var peers []string
	c := &cobra.Command{
		Use: "gateway", Short: "Measure what the gateway adds to a request, beside a bare reverse proxy and nginx", Args: exactly(0),
		Long: "Send chats and streams to a simulated vLLM directly, through the gateway, through Go's reverse proxy, through nginx where it is\n" +
			"installed, and through any peer that you have started: each arrives when it is due, whether or not earlier ones were answered.\n\n" +
			"A peer must pass what it gets on to the simulated vLLM, whose address --upstream says. It serves model \"fake\".",
		Example: "  headgate bench gateway --quick\n" +
			"  headgate bench gateway --out results --rounds 5 --each 4s\n" +
			"  headgate bench gateway --upstream 127.0.0.1:9100 --peer envoy=http://127.0.0.1:10000",
		RunE: func(c *cobra.Command, _ []string) error {
			for _, text := range peers {
				p, err := gateway.ParsePeer(text)
				if err != nil {
					return usageError{err}
				}
				cfg.Peers = append(cfg.Peers, p)
			}
			exe, err := os.Executable()
			if err != nil {
				return err
			}
			cfg.Self, cfg.Headgate, cfg.Log = []string{exe}, exe, c.ErrOrStderr()
			if err := cfg.Validate(); err != nil {
				return usageError{err}
			}
			report, err := gateway.Run(c.Context(), cfg)
			if err != nil {
				return err
			}
			if out != "" {
				if err := report.Write(out); err != nil {
					return err
				}
			}
			return report.WriteText(c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&out, "out", "", "folder for gateway.csv and gateway.txt")
	f.BoolVar(&cfg.Quick, "quick", false, "half a minute of it: whether it works, not how well")
	f.StringArrayVar(&peers, "peer", nil, "name=URL of another gateway to measure, on a loopback address; may be repeated")
	f.StringVar(&cfg.PeerKey, "peer-key", "", "bearer token that peers are sent (default: one of Headgate's form)")
	f.StringVar(&cfg.Upstream, "upstream", "", "address of the simulated vLLM, for peers to be pointed at (default: a free port)")
	f.StringVar(&cfg.Nginx, "nginx", "", `command of nginx (default: where it is found, else it is left out; "none" leaves it out)`)
	f.StringVar(&cfg.LiteLLM, "litellm", "", "command of LiteLLM's proxy, to measure it too")
	f.IntVar(&cfg.Rounds, "rounds", 0, "rounds of measurements (default 5)")
	f.DurationVar(&cfg.Each, "each", 0, "length of one measurement (default 4s)")
	f.Float64Var(&cfg.ChatRate, "chat-rate", 0, "chats a second (default 400)")
	f.Float64Var(&cfg.StreamRate, "stream-rate", 0, "streams of 300 chunks a second (default 15)")
	f.IntVar(&cfg.Parallel, "parallel", 0, "requests under way at saturation (default 32)")
	f.IntVar(&cfg.Held, "held", 0, "streams held open while memory is measured (default 500)")
	return c
}

// clusterBenchCommand measures a cluster of this very binary.
func clusterBenchCommand() *cobra.Command {
	var cfg benchcluster.Config
	var out string
	c := &cobra.Command{
		Use: "cluster", Short: "Kill the nodes of a cluster one after another, and measure what the others make of it", Args: exactly(0),
		Example: "  headgate bench cluster --nodes 3 --rounds 20 --out results\n  headgate bench cluster --quick",
		RunE: func(c *cobra.Command, _ []string) error {
			exe, err := os.Executable()
			if err != nil {
				return err
			}
			cfg.Headgate, cfg.Log = exe, c.ErrOrStderr()
			if out != "" { // beside the results, so that the disk is a real one
				cfg.Dir = filepath.Join(out, "tmp")
				defer func() { _ = os.Remove(cfg.Dir) }() // kept if something else is in it
			}
			if err := cfg.Validate(); err != nil {
				return usageError{err}
			}
			report, err := benchcluster.Run(c.Context(), cfg)
			if report == nil {
				return err
			}
			if out != "" {
				err = errors.Join(err, report.Write(out))
			}
			return errors.Join(err, report.WriteText(c.OutOrStdout()))
		},
	}
	f := c.Flags()
	f.StringVar(&out, "out", "", "folder for cluster.csv and cluster.txt")
	f.IntVar(&cfg.Nodes, "nodes", 0, "nodes of the cluster (default 3)")
	f.IntVar(&cfg.Rounds, "rounds", 0, "rounds of two kills, a kill switch and a revocation (default 20)")
	f.IntVar(&cfg.Starts, "starts", 0, "starts of a fresh cluster (default 5)")
	f.DurationVar(&cfg.Watch, "watch", 0, "how long leases are watched while nobody dies (default 1m)")
	f.Float64Var(&cfg.Rate, "rate", 0, "requests a second at each node (default 50)")
	f.DurationVar(&cfg.Each, "each", 0, "how long so many writers make changes (default 3s)")
	f.BoolVar(&cfg.Quick, "quick", false, "all of it, but short: whether it works, not how well")
	return c
}

// overloadCommand saturates a simulated vLLM through this very binary, and through what is there instead.
func overloadCommand() *cobra.Command {
	var cfg overload.Config
	var out string
	c := &cobra.Command{
		Use: "overload", Short: "Offer a model server several times what it can do, through the gateway, a bare proxy and nginx", Args: exactly(0),
		Example: "  headgate bench overload --out results\n  headgate bench overload --quick\n  headgate bench overload --only headgate,bare --surge 1m",
		RunE: func(c *cobra.Command, _ []string) error {
			exe, err := os.Executable()
			if err != nil {
				return err
			}
			cfg.Headgate, cfg.Log = exe, c.ErrOrStderr()
			if err := cfg.Validate(); err != nil {
				return usageError{err}
			}
			report, err := overload.Run(c.Context(), cfg)
			if err != nil {
				return err
			}
			if out != "" {
				if err := report.Write(out); err != nil {
					return err
				}
			}
			return report.WriteText(c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&out, "out", "", "folder for overload.csv, overload.txt and overload.svg")
	f.StringVar(&cfg.Nginx, "nginx", "", `command of nginx (default: where it is found, else it is left out; "none" leaves it out)`)
	f.StringSliceVar(&cfg.Only, "only", nil, "targets to measure: headgate, bare, nginx, nginx-max-conns (default all)")
	f.IntVar(&cfg.Slots, "slots", 0, "slots of the model server (default 32)")
	f.Float64SliceVar(&cfg.Loads, "loads", nil, "loads offered, in capacities, the surge last (0.8,1.2,2,5 where not given)")
	f.DurationVar(&cfg.Each, "each", 0, "length of a phase (default 20s)")
	f.DurationVar(&cfg.Surge, "surge", 0, "length of the surge through the gateway (default 5m)")
	f.DurationVar(&cfg.PeerSurge, "peer-surge", 0, "length of the surge through the others (default 1m)")
	f.DurationVar(&cfg.After, "after", 0, "how long recovery is watched (default 15s)")
	f.BoolVar(&cfg.Quick, "quick", false, "a minute of it: whether it works, not how well")
	return c
}

// serveUntil serves until ctx ends, then closes.
func serveUntil(ctx context.Context, s *http.Server, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
