package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"headgate/cluster/ledger"
	"headgate/proxy/admin"
)

// transferTime bounds a backup and a restore on their way.
const transferTime = 30 * time.Minute

func ledgerCommand() *cobra.Command {
	return group("ledger", "Look at what the cluster agreed on, keep it, and bring it back", inspectCommand(), backupCommand(), restoreCommand(), recoverCommand())
}

func inspectCommand() *cobra.Command {
	var dir, file string
	c := &cobra.Command{
		Use: "inspect [--data-dir DIR | --file FILE]", Short: "Show the ledger of a node, of a stopped node's data folder, or of a backup", Args: exactly(0),
		Example: "  headgate ledger inspect\n  headgate ledger inspect --data-dir /var/lib/headgate\n  headgate ledger inspect --file headgate.backup",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&dir, "data-dir", "", "data folder of a node that is stopped")
	c.Flags().StringVar(&file, "file", "", "a backup; it is read to its end, so that damage shows")
	c.RunE = func(c *cobra.Command, _ []string) error {
		switch {
		case dir != "" && file != "":
			return usageError{errors.New("--data-dir and --file exclude each other")}
		case dir != "":
			report, err := ledger.Inspect(dir, toStderr())
			if errors.Is(err, ledger.ErrNoLedger) {
				return err
			}
			return errors.Join(printReport(c.OutOrStdout(), report, a.json), err)
		case file != "":
			report, err := ledger.InspectFile(file)
			if err != nil {
				return err
			}
			return printReport(c.OutOrStdout(), report, a.json)
		}
		return show(c, a, http.MethodGet, "/admin/v1/ledger", nil, printLedger)
	}
	return c
}

func printLedger(w io.Writer, l admin.LedgerInfo) {
	fmt.Fprintf(w, "cluster\t%s\nindex\t%d\nterm\t%d\n", l.ClusterID, l.Index, l.Term)
	fmt.Fprintf(w, "leader\t%s\nvoters\t%s\n", l.Leader, strings.Join(l.Voters, ", "))
	if len(l.NonVoters) > 0 {
		fmt.Fprintf(w, "non-voters\t%s\n", strings.Join(l.NonVoters, ", "))
	}
	fmt.Fprintf(w, "state\t%s\npolicy\trevision %d\n", l.StateHash, l.PolicyRevision)
	for _, name := range slices.Sorted(maps.Keys(l.Counts)) {
		fmt.Fprintf(w, "%s\t%d\n", name, l.Counts[name])
	}
}

func backupCommand() *cobra.Command {
	var out string
	var stale bool
	c := &cobra.Command{
		Use: "backup -o FILE", Short: "Keep a copy of the ledger in a file", Args: exactly(0),
		Long:    "Write a consistent copy of the ledger, as the leader has it, to a file. The file is there whole or\nnot at all. It holds hashes of keys and tokens and every policy: keep it like a password file.",
		Example: "  headgate ledger backup -o headgate.backup",
	}
	a := adminFlags(c)
	c.Flags().StringVarP(&out, "output", "o", "", "file to write; one that exists is replaced")
	c.Flags().BoolVar(&stale, "stale", false, "what this node has, without asking the leader: where there is no quorum")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if out == "" {
			return usageError{errors.New("name the file: headgate ledger backup -o headgate.backup")}
		}
		path := "/admin/v1/ledger/backup"
		if stale {
			path += "?stale=true"
		}
		ctx, cancel := context.WithTimeout(c.Context(), transferTime)
		defer cancel()
		n, err := writeWhole(out, func(w io.Writer) error { return a.copy(ctx, path, w) })
		if err != nil {
			return err
		}
		if a.json {
			return json.NewEncoder(c.OutOrStdout()).Encode(map[string]any{"file": out, "bytes": n})
		}
		_, err = fmt.Fprintf(c.OutOrStdout(), "%d bytes in %s\n", n, out)
		return err
	}
	return c
}

// writeWhole makes a file of what fill writes: whole, or not at all.
func writeWhole(name string, fill func(io.Writer) error) (int64, error) {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.Remove(f.Name()) }() // gone already if all went well
	err = fill(f)
	if err == nil {
		err = f.Sync()
	}
	info, serr := f.Stat()
	if err = errors.Join(err, serr, f.Close()); err != nil {
		return 0, err
	}
	return info.Size(), os.Rename(f.Name(), name)
}

func restoreCommand() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "restore FILE", Short: "Replace the ledger on all nodes by a backup", Args: exactly(1),
		Long:    "Put a backup in the place of what the cluster agreed on: policies, keys, kill switches, tokens and\nthe audit log. What was changed since the backup is gone. Without --force only an empty ledger is\nreplaced.",
		Example: "  headgate ledger restore headgate.backup --force",
	}
	a := adminFlags(c)
	c.Flags().BoolVar(&force, "force", false, "also where the ledger is not empty")
	c.RunE = func(c *cobra.Command, args []string) error {
		if _, err := ledger.InspectFile(args[0]); err != nil { // before anything is replaced by it
			return usageError{err}
		}
		f, err := os.Open(args[0])
		if err != nil {
			return usageError{err}
		}
		defer func() { _ = f.Close() }()
		path := "/admin/v1/ledger/restore"
		if force {
			path += "?force=true"
		}
		ctx, cancel := context.WithTimeout(c.Context(), transferTime)
		defer cancel()
		resp, err := a.open(ctx, http.MethodPost, path, f)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		raw, err := whole(resp)
		if err != nil {
			return err
		}
		return printAs(c, a, raw, func(w io.Writer, r admin.Restored) {
			fmt.Fprintf(w, "restored from %s\tstate %s\n", args[0], short(r.StateHash))
		})
	}
	return c
}
