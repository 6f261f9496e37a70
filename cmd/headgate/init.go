package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"headgate/cluster/pki"
)

// initFlags are those of every command that works on the folder of headgate init.
type initFlags struct {
	dir  string
	json bool
}

func bindInit(c *cobra.Command) *initFlags {
	f := &initFlags{}
	c.Flags().StringVar(&f.dir, "out", "headgate-pki", "the folder: keep it off the nodes, and a copy of it safe")
	c.Flags().BoolVar(&f.json, "json", false, "print JSON")
	return f
}

// print says what was done and what comes next.
func (f *initFlags) print(w io.Writer, s pki.Step, err error) error {
	if err != nil {
		return usageError{err}
	}
	if f.json {
		return json.NewEncoder(w).Encode(map[string]any{"done": s.Done, "copy": s.Copy, "next": s.Next})
	}
	fmt.Fprintln(w, s.Done)
	for _, path := range s.Copy {
		fmt.Fprintf(w, "  %s/%s\n", strings.TrimRight(f.dir, "/"), path)
	}
	_, err = fmt.Fprintf(w, "next: %s\n", s.Next)
	return err
}

func initCommand() *cobra.Command {
	var name string
	var nodes []string
	c := &cobra.Command{
		Use: "init --cluster NAME --node NAME[=HOST,…]…", Short: "Make the certificates and keys by which the nodes of a cluster know each other", Args: exactly(0),
		Long: "Write a folder with an authority, a certificate for each node, a key for their gossip and an admin\n" +
			"token. No network is needed. Copy each node's own folder to it, and nothing else. HOST is a name or an\n" +
			"address at which people reach the node's admin API over TLS; nodes among themselves need none.",
		Example: "  headgate init --cluster west --node gw-1=10.0.0.1 --node gw-2=10.0.0.2 --node gw-3=10.0.0.3\n" +
			"  headgate init add-node gw-4=10.0.0.4",
	}
	f := bindInit(c)
	c.Flags().StringVar(&name, "cluster", "headgate", "name of the cluster, as in serve --cluster-name")
	c.Flags().StringArrayVar(&nodes, "node", nil, "a node, with the hosts of its certificate; once for each")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if len(nodes) == 0 {
			return usageError{errors.New("name the nodes: headgate init --node gw-1 --node gw-2 --node gw-3")}
		}
		o := pki.Options{ClusterName: name}
		for _, n := range nodes {
			o.Nodes = append(o.Nodes, nodeCert(n))
		}
		s, err := pki.Init(f.dir, o)
		return f.print(c.OutOrStdout(), s, err)
	}
	c.AddCommand(
		initVerb("add-node NAME[=HOST,…]", "Make the folder of a further node", "add-node gw-4=10.0.0.4", func(dir, arg string) (pki.Step, error) { return pki.AddNode(dir, nodeCert(arg)) }),
		initVerb("renew-node NAME", "Make a new key and certificate for a node; it takes them up while it runs", "renew-node gw-2", pki.RenewNode),
		initVerb("rotate-ca {add|use|drop}", "Replace the authority, one phase after the other, without a stop", "rotate-ca add",
			func(dir, arg string) (pki.Step, error) { return pki.RotateCA(dir, pki.Phase(arg)) }),
		initVerb("rotate-gossip-key {add|use|drop}", "Replace the key of the gossip, one phase after the other, without a stop", "rotate-gossip-key add",
			func(dir, arg string) (pki.Step, error) { return pki.RotateGossipKey(dir, pki.Phase(arg)) }),
	)
	return c
}

func initVerb(use, short, example string, do func(dir, arg string) (pki.Step, error)) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: exactly(1), Example: "  headgate init " + example}
	f := bindInit(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		s, err := do(f.dir, args[0])
		return f.print(c.OutOrStdout(), s, err)
	}
	return c
}

// nodeCert reads NAME[=HOST,…].
func nodeCert(s string) pki.NodeCert {
	name, hosts, given := strings.Cut(s, "=")
	n := pki.NodeCert{Name: name}
	if given {
		n.Hosts = strings.Split(hosts, ",")
	}
	return n
}
