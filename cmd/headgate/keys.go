package main

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"headgate/cluster/ledger"
	"headgate/proxy/admin"
)

func keysCommand() *cobra.Command {
	list := &cobra.Command{Use: "list", Short: "List the keys, without their secrets", Args: exactly(0), Example: "  headgate keys list"}
	a := adminFlags(list)
	list.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/keys", nil, func(w io.Writer, keys []admin.Key) {
			fmt.Fprintln(w, "ID\tTENANT\tSTATUS\tEXPIRES\tLAST USED\tNAME")
			for _, k := range keys {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", k.ID, k.Tenant, k.Status, k.Expires, k.LastUsed, k.Name)
			}
		})
	}
	return group("keys", "Make, rotate, revoke and list API keys", createKeyCommand(), rotateKeyCommand(), revokeKeyCommand(), list)
}

func createKeyCommand() *cobra.Command {
	var k admin.NewKey
	var expires string
	var offline bool
	c := &cobra.Command{
		Use: "create", Short: "Make a key; its secret is printed once", Args: exactly(0),
		Long: "Make an API key. It is good on every node as soon as this returns; the cluster keeps only its hash.\n\n" +
			"With --offline no node is asked: the lines for the `keys` of a policy file are printed with it.",
		Example: "  headgate keys create --tenant acme --id acme-2 --models llama-8b --expires 2027-01-01\n  headgate keys create --tenant acme --offline",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&k.Tenant, "tenant", "", "tenant that the key belongs to")
	c.Flags().StringVar(&k.ID, "id", "", "id of the key (default: the tenant and the time)")
	c.Flags().StringVar(&k.Name, "name", "", "name for people")
	c.Flags().StringVar(&k.User, "user", "", "all its requests are this user's")
	c.Flags().StringVar(&k.Class, "class", "", "interactive, background or best_effort (default: the tenant's)")
	c.Flags().StringVar(&expires, "expires", "", "a day or a moment, such as 2027-01-01 (default: never)")
	c.Flags().StringSliceVar(&k.Models, "models", nil, "models that it may use (default: all)")
	c.Flags().StringSliceVar(&k.Routes, "routes", nil, "routes that it may use (default: all)")
	c.Flags().StringSliceVar(&k.Surfaces, "surfaces", nil, "surfaces that it may name (default: none)")
	c.Flags().BoolVar(&k.AssertUser, "assert-user", false, "its clients may name their user")
	c.Flags().BoolVar(&k.Test, "test", false, "a test key (hg_test_…) instead of a live one")
	c.Flags().BoolVar(&offline, "offline", false, "ask no node; print the lines for a policy file")
	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		if k.Tenant == "" {
			return usageError{errors.New("name the tenant: headgate keys create --tenant NAME")}
		}
		if k.Expires, err = expiry(expires); err != nil {
			return err
		}
		if offline {
			return offlineKey(c.OutOrStdout(), k, a.json)
		}
		return send(c, a, http.MethodPost, "/admin/v1/keys", k, printCreatedKey)
	}
	return c
}

// expiry reads a flag of that name.
func expiry(s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	t, err := admin.ParseTime(s)
	if err != nil {
		return t, usageError{fmt.Errorf("--expires: %w", err)}
	}
	return t, nil
}

func printCreatedKey(w io.Writer, k admin.CreatedKey) {
	fmt.Fprintf(w, "key (shown once): %s\nid %s of tenant %s, ", k.Key, k.ID, k.Tenant)
	if k.Expires.IsZero() {
		fmt.Fprintln(w, "for ever")
	} else {
		fmt.Fprintf(w, "until %s\n", moment(k.Expires))
	}
	if k.Replaces != "" {
		fmt.Fprintf(w, "%s is good until %s\n", k.Replaces, moment(k.ReplacedExpires))
	}
	warn(w, k.Warnings)
}

// offlineKey makes a key here and prints it with the lines that a policy needs.
func offlineKey(w io.Writer, k admin.NewKey, asJSON bool) error {
	secret, hash, err := ledger.NewKey(rand.Reader, !k.Test)
	if err != nil {
		return err
	}
	if k.ID == "" {
		k.ID = k.Tenant + "-" + time.Now().UTC().Format("20060102-150405")
	}
	made := admin.CreatedKey{Key: secret, ID: k.ID, Tenant: k.Tenant, Hash: ledger.FormatHash(hash), Expires: k.Expires}
	if asJSON {
		return json.NewEncoder(w).Encode(made)
	}
	fields := []string{fmt.Sprintf("id: %q", k.ID), fmt.Sprintf("tenant: %q", k.Tenant), fmt.Sprintf("hash: %q", made.Hash)}
	for _, f := range [...]struct{ name, value string }{{"name", k.Name}, {"user", k.User}, {"class", k.Class}} {
		if f.value != "" {
			fields = append(fields, fmt.Sprintf("%s: %q", f.name, f.value))
		}
	}
	if !k.Expires.IsZero() {
		fields = append(fields, "expires: "+moment(k.Expires))
	}
	for _, f := range [...]struct {
		name   string
		values []string
	}{{"models", k.Models}, {"routes", k.Routes}, {"surfaces", k.Surfaces}} {
		if len(f.values) > 0 {
			fields = append(fields, fmt.Sprintf("%s: [%s]", f.name, quoted(f.values)))
		}
	}
	if k.AssertUser {
		fields = append(fields, "assert_user: true")
	}
	_, err = fmt.Fprintf(w, "key (shown once): %s\n\nkeys:\n  - {%s}\n", secret, strings.Join(fields, ", "))
	return err
}

func quoted(list []string) string {
	out := make([]string, 0, len(list))
	for _, s := range list {
		out = append(out, fmt.Sprintf("%q", s))
	}
	return strings.Join(out, ", ")
}

func rotateKeyCommand() *cobra.Command {
	var overlap string
	c := &cobra.Command{
		Use: "rotate ID", Short: "Make a key with the same rights in place of one, which ends after a while", Args: exactly(1),
		Example: "  headgate keys rotate acme-1 --overlap 7d",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&overlap, "overlap", "24h", "how long both are good; 0s ends the old one at once")
	c.RunE = func(c *cobra.Command, args []string) error {
		if _, err := admin.ParseSpan(overlap); err != nil {
			return usageError{fmt.Errorf("--overlap: %w", err)}
		}
		return send(c, a, http.MethodPost, "/admin/v1/keys/"+url.PathEscape(args[0])+"/rotate", map[string]string{"overlap": overlap}, printCreatedKey)
	}
	return c
}

func revokeKeyCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "revoke ID", Short: "Refuse a key, for ever", Args: exactly(1),
		Example: "  headgate keys revoke acme-1",
	}
	a := adminFlags(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return show(c, a, http.MethodDelete, "/admin/v1/keys/"+url.PathEscape(args[0]), nil, said("key %s is revoked, for ever", args[0]))
	}
	return c
}
