package main

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"headgate/cluster/ledger"
	"headgate/proxy"
)

// newKey is what keys create prints.
type newKey struct {
	Key    string `json:"key"` // the secret, shown once
	ID     string `json:"id"`
	Tenant string `json:"tenant"`
	Hash   string `json:"hash"`
}

func createKeyCommand() *cobra.Command {
	var k newKey
	var test, asJSON bool
	c := &cobra.Command{
		Use: "create", Short: "Make a key; print it once, with the lines that the policy needs", Args: exactly(0),
		Long:    "Make an API key. Only its hash goes into the policy: add the printed lines to its keys and\napply it. To revoke a key set revoked: true there; to rotate, add a second key first.",
		Example: "  headgate keys create --tenant acme --id acme-2",
		RunE: func(c *cobra.Command, _ []string) error {
			if k.Tenant == "" {
				return usageError{errors.New("name the tenant: headgate keys create --tenant NAME")}
			}
			if k.ID == "" {
				k.ID = k.Tenant + "-" + time.Now().UTC().Format("20060102-150405")
			}
			secret, hash, err := ledger.NewKey(rand.Reader, !test)
			if err != nil {
				return err
			}
			k.Key, k.Hash = secret, ledger.FormatHash(hash)
			if asJSON {
				return json.NewEncoder(c.OutOrStdout()).Encode(k)
			}
			_, err = fmt.Fprintf(c.OutOrStdout(), "key (shown once): %s\n\nkeys:\n  - {id: %q, tenant: %q, hash: %q}\n", k.Key, k.ID, k.Tenant, k.Hash)
			return err
		},
	}
	c.Flags().StringVar(&k.Tenant, "tenant", "", "tenant that the key belongs to")
	c.Flags().StringVar(&k.ID, "id", "", "id of the key (default: the tenant and the time)")
	c.Flags().BoolVar(&test, "test", false, "a test key (hg_test_…) instead of a live one")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// printExplanation says yes or no, and how each limit sees it.
func printExplanation(w io.Writer, e proxy.Explanation) {
	verdict := "admitted"
	if !e.Admitted {
		verdict = "refused by " + e.Refused
	}
	fmt.Fprintf(w, "%s: %d input and %d output tokens, $%s\n\nLIMIT\tSCOPE\tUNIT\tCOSTS\tLEFT\tVERDICT\n", verdict, e.Input, e.Output, ledger.NanoUSD(e.NanoUSD))
	for _, l := range e.Limits {
		v := "admits"
		switch {
		case l.Admitted:
		case l.Shadow:
			v = "would refuse (shadow)"
		case l.RetryAfterMS < 0:
			v = "refuses; waiting does not help"
		default:
			v = "refuses; again in " + (time.Duration(l.RetryAfterMS) * time.Millisecond).String()
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%s\n", l.Name, l.Scope, l.Unit, l.Cost, l.Remaining, v)
	}
}

// deltaText is the text of one chunk of a chat stream.
func deltaText(data string) (string, error) {
	var chunk struct {
		Error   *struct{ Message string }
		Choices []struct{ Delta struct{ Content string } }
	}
	if err := json.Unmarshal([]byte(data), &chunk); err != nil {
		return "", fmt.Errorf("a chunk of the stream can't be read: %w", err)
	}
	if chunk.Error != nil {
		return "", errors.New(chunk.Error.Message)
	}
	var text strings.Builder
	for _, c := range chunk.Choices {
		text.WriteString(c.Delta.Content)
	}
	return text.String(), nil
}
