package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

func tokensCommand() *cobra.Command {
	list := &cobra.Command{Use: "list", Short: "List the admin tokens, without their secrets", Args: exactly(0), Example: "  headgate tokens list"}
	a := adminFlags(list)
	list.RunE = func(c *cobra.Command, _ []string) error {
		return show(c, a, http.MethodGet, "/admin/v1/tokens", nil, func(w io.Writer, tokens []admin.Token) {
			fmt.Fprintln(w, "NAME\tROLE\tCREATED\tEXPIRES")
			for _, t := range tokens {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", t.Name, t.Role, moment(t.Created), moment(t.Expires))
			}
		})
	}

	revoke := &cobra.Command{Use: "revoke NAME", Short: "Refuse an admin token from now on", Args: exactly(1), Example: "  headgate tokens revoke ops"}
	b := adminFlags(revoke)
	revoke.RunE = func(c *cobra.Command, args []string) error {
		return show(c, b, http.MethodDelete, "/admin/v1/tokens/"+url.PathEscape(args[0]), nil, said("token %s is revoked", args[0]))
	}
	return group("tokens", "Make, list and revoke admin tokens", createTokenCommand(), list, revoke)
}

func createTokenCommand() *cobra.Command {
	var role, expires string
	c := &cobra.Command{
		Use: "create NAME", Short: "Make an admin token; its secret is printed once", Args: exactly(1),
		Long: "Make an admin token that is good on every node. Its name stands in the audit log.\n\n" +
			"  read     looks at everything but prompts and backups\n" +
			"  operate  also kills and revives, sets the ladder and a node's override, revokes keys, ends kept answers\n" +
			"  admin    also applies policies, makes keys and tokens, removes members, backs up and restores,\n" +
			"           exports and erases content",
		Example: "  headgate tokens create ops --role operate --expires 2027-01-01",
	}
	a := adminFlags(c)
	c.Flags().StringVar(&role, "role", "", "read, operate or admin")
	c.Flags().StringVar(&expires, "expires", "", "a day or a moment, such as 2027-01-01 (default: never)")
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		t := admin.NewToken{Name: args[0]}
		if role == "" {
			return usageError{errors.New("say what it may do: --role read, operate or admin")}
		}
		if err := t.Role.UnmarshalText([]byte(role)); err != nil {
			return usageError{fmt.Errorf("--role: %w", err)}
		}
		if t.Expires, err = expiry(expires); err != nil {
			return err
		}
		return send(c, a, http.MethodPost, "/admin/v1/tokens", t, func(w io.Writer, made admin.CreatedToken) {
			fmt.Fprintf(w, "token (shown once): %s\n%s with the role %s\n", made.Token, made.Name, made.Role)
		})
	}
	return c
}
