package main

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hashicorp/raft"
	"github.com/spf13/cobra"

	"headgate/cluster"
	"headgate/cluster/ledger"
)

// toStderr logs what goes wrong on the way.
func toStderr() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// offlineReport is a ledger.Report for programs.
type offlineReport struct {
	Path         string            `json:"path"`
	Term         uint64            `json:"term,omitempty"`
	FirstIndex   uint64            `json:"first_index,omitempty"`
	LastIndex    uint64            `json:"last_index,omitempty"`
	LastTerm     uint64            `json:"last_term,omitempty"`
	Members      []offlineMember   `json:"members,omitempty"`
	Snapshots    []offlineSnapshot `json:"snapshots,omitempty"`
	AppliedIndex uint64            `json:"applied_index"`
	ClusterID    string            `json:"cluster_id"`
	Epoch        uint64            `json:"epoch"`
	Revision     uint64            `json:"policy_revision"`
	Keys         int               `json:"keys"`
	Kills        int               `json:"kills"`
	Rungs        int               `json:"rungs"`
	Tokens       int               `json:"tokens"`
	Budgets      int               `json:"budgets"` // accounts
	StateHash    string            `json:"state_hash"`
}

type offlineMember struct {
	ID       string `json:"id"`
	Address  string `json:"address"` // of its raft
	Suffrage string `json:"suffrage"`
}

type offlineSnapshot struct {
	ID    string `json:"id"`
	Index uint64 `json:"index"`
	Bytes int64  `json:"bytes"`
	Error string `json:"error,omitempty"`
}

func reportOf(r ledger.Report) offlineReport {
	out := offlineReport{
		Path: r.Path, Term: r.Term, FirstIndex: r.FirstIndex, LastIndex: r.LastIndex, LastTerm: r.LastTerm, AppliedIndex: r.AppliedIndex,
		ClusterID: hex.EncodeToString(r.ClusterID), Epoch: r.Epoch, Revision: r.Revision,
		Keys: r.Keys, Kills: r.Kills, Rungs: r.Rungs, Tokens: r.Tokens, Budgets: r.Budgets, StateHash: hex.EncodeToString(r.Hash[:]),
	}
	for _, m := range r.Members {
		out.Members = append(out.Members, offlineMember{string(m.ID), string(m.Address), m.Suffrage.String()})
	}
	for _, s := range r.Snapshots {
		out.Snapshots = append(out.Snapshots, offlineSnapshot{s.ID, s.Index, s.Size, s.Err})
	}
	return out
}

func printReport(out io.Writer, r ledger.Report, asJSON bool) error {
	v := reportOf(r)
	if asJSON {
		return json.NewEncoder(out).Encode(v)
	}
	return tabled(out, func(w io.Writer) {
		fmt.Fprintf(w, "from\t%s\ncluster\t%s\n", v.Path, v.ClusterID)
		if v.Term != 0 {
			fmt.Fprintf(w, "log\tindex %d to %d, term %d\n", v.FirstIndex, v.LastIndex, v.Term)
		}
		for _, m := range v.Members {
			fmt.Fprintf(w, "member\t%s at %s (%s)\n", m.ID, m.Address, m.Suffrage)
		}
		for _, s := range v.Snapshots {
			fmt.Fprintf(w, "snapshot\tindex %d, %d bytes %s\n", s.Index, s.Bytes, s.Error)
		}
		fmt.Fprintf(w, "applied\t%d\nstate\t%s\nepoch\t%d\npolicy\trevision %d\nkeys\t%d\nkills\t%d\nrungs\t%d\ntokens\t%d\nbudgets\t%d\n",
			v.AppliedIndex, v.StateHash, v.Epoch, v.Revision, v.Keys, v.Kills, v.Rungs, v.Tokens, v.Budgets)
	})
}

func recoverCommand() *cobra.Command {
	var dir, address string
	var asJSON bool
	c := &cobra.Command{
		Use: "recover --data-dir DIR", Short: "Start anew from one stopped node, where most voters are lost for good", Args: exactly(0),
		Long: "Make a stopped node the only voter of a new cluster that keeps what its data folder holds. Run it on\n" +
			"ONE node, the one with the highest applied index (headgate ledger inspect --data-dir DIR), and only\n" +
			"when most of the voters will never come back. What only the lost nodes knew is gone. All other nodes\n" +
			"start again with an empty data folder. See headgate docs recover.",
		Example: "  headgate ledger recover --data-dir /var/lib/headgate",
	}
	c.Flags().StringVar(&dir, "data-dir", "", "data folder of the node")
	c.Flags().StringVar(&address, "address", "", "HOST:PORT of the node's raft (default: as its ledger knows it)")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if dir == "" {
			return usageError{errors.New("name the data folder: headgate ledger recover --data-dir /var/lib/headgate")}
		}
		self, err := storedServer(dir, address)
		if err != nil {
			return err
		}
		report, err := ledger.Recover(dir, self, toStderr())
		if err != nil {
			return err
		}
		if err := printReport(c.OutOrStdout(), report, asJSON); err != nil || asJSON {
			return err
		}
		_, err = fmt.Fprintf(c.OutOrStdout(), "\n%s is the only voter of a new cluster; start it, then the others with empty data folders\n", self.ID)
		return err
	}
	return c
}

// storedServer says who the node of a data folder is in raft.
func storedServer(dir, address string) (raft.Server, error) {
	self := raft.Server{Address: raft.ServerAddress(address)}
	raw, err := os.ReadFile(filepath.Join(dir, "node-id"))
	if errors.Is(err, fs.ErrNotExist) {
		return self, usageError{fmt.Errorf("%s is not the data folder of a node: it has no node-id", dir)}
	}
	if err != nil {
		return self, err
	}
	self.ID = raft.ServerID(strings.TrimSpace(string(raw)))
	if cluster.ServerIDName(string(self.ID)) == "" {
		return self, fmt.Errorf("%s holds %.40q, which names no node", filepath.Join(dir, "node-id"), self.ID)
	}
	if address != "" {
		return self, nil
	}
	report, err := ledger.Inspect(dir, toStderr())
	if err != nil {
		return self, err
	}
	i := slices.IndexFunc(report.Members, func(m raft.Server) bool { return m.ID == self.ID })
	if i < 0 {
		return self, usageError{fmt.Errorf("the ledger does not know %s; say where its raft listens: --address HOST:PORT", self.ID)}
	}
	self.Address = report.Members[i].Address
	return self, nil
}
