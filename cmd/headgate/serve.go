package main

import (
	"context"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"headgate/cmd/node"
	"headgate/proxy/admin"
)

func serveCommand() *cobra.Command {
	flags := node.Defaults()
	var file string
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run a node",
		Example: "  headgate serve --dev --upstream http://127.0.0.1:8000\n" +
			"  headgate serve --policy policy.yaml --data-dir /var/lib/headgate",
		Args: exactly(0),
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := nodeConfig(c.Flags(), file)
			if err != nil {
				return err
			}
			if cfg.Logger, err = cfg.NewLogger(os.Stderr); err != nil {
				return usageError{err}
			}
			if unknown := unknownVariables(c.Root(), os.Environ()); len(unknown) > 0 {
				cfg.Logger.Warn("variables that name no flag are ignored, unless the policy names them", "variables", unknown)
			}
			return serve(c.Context(), cfg, nil)
		},
	}
	c.Flags().StringVar(&file, "config", "", "file with the node's configuration; flags and environment go over it")
	bindNode(c.Flags(), &flags)
	return c
}

// ofKubernetes are variables that every pod beside a service called headgate has.
var ofKubernetes = regexp.MustCompile(`^HEADGATE(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP)(_[A-Z]+)?)?)$`)

// unknownVariables are those of the environment that look like a flag of some command, and are none: a
// slip, most often.
func unknownVariables(root *cobra.Command, environ []string) (out []string) {
	known := map[string]bool{devKeyVariable: true, tokenVariable: true, apiKeyVariable: true}
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) { known[variable(f.Name)] = true })
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(root)
	for _, e := range environ {
		name, _, _ := strings.Cut(e, "=")
		if strings.HasPrefix(name, "HEADGATE_") && !known[name] && !ofKubernetes.MatchString(name) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// bindNode makes the flags of a node's configuration; their defaults are what c holds.
func bindNode(fs *pflag.FlagSet, c *node.Config) {
	fs.StringVar(&c.Listen, "listen", c.Listen, "address of the front door")
	fs.StringVar(&c.AdminListen, "admin-listen", c.AdminListen, "address of health, metrics and the admin API")
	fs.StringVar(&c.ClusterListen, "cluster-listen", c.ClusterListen, "address of the gossip; gRPC takes the next port and raft the one after; port 0 takes any three")
	fs.StringVar(&c.ClusterAdvertise, "cluster-advertise", c.ClusterAdvertise, "HOST:PORT at which other nodes reach the gossip (default: as --cluster-listen)")
	fs.StringVar(&c.ClusterName, "cluster-name", c.ClusterName, "name of the cluster; nodes of other names are refused")
	fs.StringVar(&c.ClusterTLS, "cluster-tls", c.ClusterTLS, "folder that headgate init made for this node: certificates and gossip keys")
	fs.StringSliceVar(&c.Join, "join", c.Join, "HOST:PORT of the gossip of nodes to join; a DNS name may have many addresses")
	fs.IntVar(&c.BootstrapExpect, "bootstrap-expect", c.BootstrapExpect, "how many nodes found a new cluster together (default: 1 without --join, else none)")
	fs.BoolVar(&c.Insecure, "insecure", c.Insecure, "allow listening beyond loopback without TLS")
	fs.StringVar(&c.NodeID, "node-id", c.NodeID, "name of the node, unique in its cluster (default: the host's)")
	fs.StringVar(&c.DataDir, "data-dir", c.DataDir, "folder for what outlives a restart; each node needs its own")
	fs.StringVar(&c.Policy, "policy", c.Policy, "policy file for a new cluster; applied again on SIGHUP")
	fs.BoolVar(&c.Dev, "dev", c.Dev, "development: makes a key and an admin token where HEADGATE_DEV_KEY and HEADGATE_ADMIN_TOKEN give none")
	fs.StringVar(&c.Upstream, "upstream", c.Upstream, "with --dev and without a policy: the model server to stand in front of")
	fs.StringVar(&c.TLSCert, "tls-cert", c.TLSCert, "PEM file; read again when it changes")
	fs.StringVar(&c.TLSKey, "tls-key", c.TLSKey, "PEM file")
	fs.StringVar(&c.AdminTLSCert, "admin-tls-cert", c.AdminTLSCert, "PEM file for the admin API (default: beyond loopback the node's of --cluster-tls)")
	fs.StringVar(&c.AdminTLSKey, "admin-tls-key", c.AdminTLSKey, "PEM file")
	fs.StringSliceVar(&c.TrustedProxies, "trusted-proxies", c.TrustedProxies, "networks whose X-Forwarded-For and PROXY header are believed")
	fs.BoolVar(&c.ProxyProtocol, "proxy-protocol", c.ProxyProtocol, "trusted proxies send a PROXY header")
	fs.IntVar(&c.MaxConns, "max-conns", c.MaxConns, "connections at once (default 10000)")
	fs.IntVar(&c.MaxConnsPerIP, "max-conns-per-ip", c.MaxConnsPerIP, "connections of one address at once (default 1000)")
	fs.IntVar(&c.MaxBuckets, "max-buckets", c.MaxBuckets, "buckets kept at once (default 1048576)")
	fs.StringVar(&c.DecisionLog, "decision-log", c.DecisionLog, "file that gets a line for each decision on limits; for tests, it grows without bound")
	fs.IntVar(&c.CapacityStatus, "capacity-status", c.CapacityStatus, "what a refusal for want of capacity answers: 429 or, for balancers that go elsewhere then, 503 (default 429)")
	fs.IntVar(&c.BudgetStatus, "budget-status", c.BudgetStatus, "what an exhausted budget answers: 429 or, for clients that try every 429 again, 402 (default 429)")
	fs.Var((*span)(&c.UsageRetention), "usage-retention", "how long the usage log is kept, such as 90d (default 400d)")
	fs.Int64Var(&c.UsageMaxBytes, "usage-max-bytes", c.UsageMaxBytes, "size of the usage log beyond which the oldest of it goes (default 10 GiB)")
	fs.BoolVar(&c.UsageSync, "usage-sync", c.UsageSync, "let no request go on before its reservation is on the disk, so that a power cut takes none out of the usage log")
	fs.Int64Var(&c.SemanticMaxBytes, "semantic-max-bytes", c.SemanticMaxBytes, "memory for answers that serve other wordings (default 128 MiB)")
	fs.Int64Var(&c.CacheMaxBytes, "cache-max-bytes", c.CacheMaxBytes, "memory for kept answers (default 256 MiB)")
	fs.DurationVar((*time.Duration)(&c.DrainTimeout), "drain-timeout", time.Duration(c.DrainTimeout), "how long requests in flight may go on after a stop")
	fs.StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
}

// span is a flag of a length of time that may be in days.
type span node.Duration

// Set reads what admin.ParseSpan does; "" is 0.
func (s *span) Set(text string) error {
	var d time.Duration
	var err error
	if text != "" {
		d, err = admin.ParseSpan(text)
	}
	*s = span(d)
	return err
}

// String gives what Set reads; nothing for 0, so that it is no default to be shown.
func (s *span) String() string {
	if *s == 0 {
		return ""
	}
	return node.Duration(*s).String()
}

// Type is what usage calls it.
func (s *span) Type() string { return "duration" }

// nodeConfig puts the flags that were set over the file, and the file over the defaults.
func nodeConfig(set *pflag.FlagSet, file string) (node.Config, error) {
	cfg := node.Defaults()
	if file != "" {
		if err := cfg.ReadConfig(file); err != nil {
			return cfg, usageError{err}
		}
	}
	over := pflag.NewFlagSet("", pflag.ContinueOnError)
	bindNode(over, &cfg)
	var err error
	set.Visit(func(f *pflag.Flag) {
		if over.Lookup(f.Name) == nil || err != nil {
			return
		}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			err = over.Lookup(f.Name).Value.(pflag.SliceValue).Replace(list.GetSlice())
			return
		}
		err = over.Set(f.Name, f.Value.String())
	})
	cfg.Version, cfg.Out = version, os.Stderr
	cfg.DevKey, cfg.AdminToken = os.Getenv(devKeyVariable), os.Getenv(tokenVariable)
	return cfg, err
}

// serve runs a node until ctx ends. started, if given, is called once it listens.
func serve(ctx context.Context, cfg node.Config, started func(*node.Node)) error {
	if cfg.Logger == nil {
		var err error
		if cfg.Logger, err = cfg.NewLogger(os.Stderr); err != nil {
			return usageError{err}
		}
	}
	n, err := node.New(ctx, cfg)
	if err != nil {
		return err
	}
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	done := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for {
			select {
			case <-hup:
				if err := n.Reload(ctx); err != nil {
					cfg.Logger.Error("the policy was not read again; the old one stays", "error", err)
				}
			case <-done:
				return
			}
		}
	}()
	if started != nil {
		started(n)
	}
	err = n.Run(ctx)
	signal.Stop(hup)
	close(done)
	<-watched
	return err
}
