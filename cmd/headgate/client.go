package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"os"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"headgate/cluster/ledger"
	"headgate/proxy/admin"
)

// client talks to a node's admin API. It tries once: what may have been done is for people
// to look at.
type client struct {
	url, ca, tokenFile string
	json               bool
}

// adminFlags are those of every command that talks to a node.
func adminFlags(c *cobra.Command) *client {
	a := &client{}
	c.Flags().StringVar(&a.url, "admin", "http://127.0.0.1:8081", "the node's admin API; the token comes from HEADGATE_ADMIN_TOKEN")
	c.Flags().StringVar(&a.ca, "ca", "", "PEM file with the authority of the node's certificate, for https (default: the system's)")
	c.Flags().StringVar(&a.tokenFile, "token-file", "", "file with the admin token, instead of HEADGATE_ADMIN_TOKEN")
	c.Flags().BoolVar(&a.json, "json", false, "print JSON")
	return a
}

const (
	callTime  = 30 * time.Second // for an answer that is read whole
	maxAnswer = 64 << 20         // bytes of one
)

// call sends body, if any, and returns the answer.
func (a *client) call(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	resp, err := a.open(ctx, method, path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	return whole(resp)
}

// whole reads an answer to its end; the caller closes it.
func whole(resp *http.Response) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	switch {
	case err == nil:
		return raw, nil
	case resp.Request.Method != http.MethodGet:
		return nil, lost(err)
	}
	return nil, fmt.Errorf("the answer broke off: %w", err)
}

// lost is an answer to a change: the change is made, or not.
func lost(err error) error {
	return fmt.Errorf("the node's answer was lost: %w; what was asked for may or may not have been done, look with headgate audit", err)
}

// copy writes an answer of any length to w.
func (a *client) copy(ctx context.Context, path string, w io.Writer) error {
	resp, err := a.open(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	_, err = io.Copy(w, resp.Body)
	return err
}

// token finds the admin token.
func (a *client) token() (string, error) {
	if a.tokenFile != "" {
		text, err := os.ReadFile(a.tokenFile)
		if err != nil {
			return "", usageError{fmt.Errorf("--token-file: %w", err)}
		}
		if token := strings.TrimSpace(string(text)); token != "" {
			return token, nil
		}
		return "", usageError{fmt.Errorf("--token-file: %s is empty", a.tokenFile)}
	}
	if token := os.Getenv("HEADGATE_ADMIN_TOKEN"); token != "" {
		return token, nil
	}
	return "", usageError{errors.New("HEADGATE_ADMIN_TOKEN is not set; it is the token that the node was started with, or one of headgate tokens create")}
}

// http makes the client for the node's address.
func (a *client) http() (*http.Client, error) {
	t := &http.Transport{Proxy: nil, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12}, DisableKeepAlives: true}
	if a.ca != "" {
		pem, err := os.ReadFile(a.ca)
		if err != nil {
			return nil, usageError{fmt.Errorf("--ca: %w", err)}
		}
		t.TLSClientConfig.RootCAs = x509.NewCertPool()
		if !t.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem) {
			return nil, usageError{fmt.Errorf("--ca: %s holds no certificate", a.ca)}
		}
	}
	// A node redirects nobody; the token goes nowhere else.
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}, nil
}

// open sends body, if any, and returns an answer that is a good one. Errors are the
// node's own words.
func (a *client) open(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	token, err := a.token()
	if err != nil {
		return nil, err
	}
	if scheme, _, ok := strings.Cut(a.url, "://"); !ok {
		return nil, usageError{fmt.Errorf("--admin: %q has no scheme: write http://%s, or https:// where the node has a certificate", a.url, a.url)}
	} else if scheme != "http" && scheme != "https" {
		return nil, usageError{fmt.Errorf("--admin: %s is neither http nor https", scheme)}
	}
	hc, err := a.http()
	if err != nil {
		return nil, err
	}
	var sent atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { sent.Store(true) }})
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(a.url, "/")+path, body)
	if err != nil {
		return nil, usageError{fmt.Errorf("--admin: %w", err)}
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := hc.Do(req)
	if err != nil {
		return nil, noAnswer(method != http.MethodGet && sent.Load(), err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	return nil, refused(resp)
}

// noAnswer says what may be wrong when none came. asked: for a change.
func noAnswer(asked bool, err error) error {
	var authority x509.UnknownAuthorityError
	switch {
	case errors.As(err, &authority):
		return fmt.Errorf("the node's certificate is not trusted: %w; name the file of its authority with --ca", err)
	case errors.Is(err, http.ErrSchemeMismatch):
		return errors.New("what answers at --admin has no TLS: write http://, not https://")
	case asked:
		return lost(err)
	}
	return fmt.Errorf("no answer from the node: %w; is it running, and is --admin right?", err)
}

// What a wrong address answers: a TLS server of Go to one who speaks without, and a node's front door to
// an admin token.
const (
	plainToTLS            = "HTTP request to an HTTPS server"
	frontDoor  admin.Code = "invalid_api_key"
)

// refused makes an error of an answer.
func refused(resp *http.Response) error {
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswer)) // what came is shown
	var e struct {
		Error struct {
			Message string
			Code    admin.Code
		}
	}
	if json.Unmarshal(raw, &e) != nil || e.Error.Message == "" {
		if bytes.Contains(raw, []byte(plainToTLS)) {
			return errors.New("what answers at --admin has TLS: write https://, not http://")
		}
		line, _, _ := strings.Cut(strings.TrimSpace(string(raw)), "\n")
		return fmt.Errorf("status %d from what answers at --admin: %.200s", resp.StatusCode, line)
	}
	err := errors.New(e.Error.Message)
	switch {
	case e.Error.Code == frontDoor:
		return errors.New("what answers at --admin is the front door of a node: the admin API is at its --admin-listen, 127.0.0.1:8081 by default")
	case e.Error.Code == admin.NoQuorum:
		return fmt.Errorf("%w; headgate docs recover says what to do", err)
	case resp.StatusCode == http.StatusBadRequest: // such as a policy that cannot be applied
		return usageError{err}
	}
	return err
}

// show asks and prints the answer: as it came with --json, else as table makes it.
func show[T any](c *cobra.Command, a *client, method, path string, body []byte, table func(io.Writer, T)) error {
	raw, err := a.call(c.Context(), method, path, body)
	if err != nil {
		return err
	}
	return printAs(c, a, raw, table)
}

// send is show with a body of JSON.
func send[T any](c *cobra.Command, a *client, method, path string, body any, table func(io.Writer, T)) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return show(c, a, method, path, raw, table)
}

// printAs prints an answer of the node.
func printAs[T any](c *cobra.Command, a *client, raw []byte, table func(io.Writer, T)) error {
	if a.json {
		_, err := c.OutOrStdout().Write(raw)
		return err
	}
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		return fmt.Errorf("the node's answer can't be read: %w; is it of another version?", err)
	}
	return tabled(c.OutOrStdout(), func(w io.Writer) { table(w, v) })
}

// tabled writes lines with tabs as columns, in one piece: what reads only the first of them must
// not end this program.
func tabled(out io.Writer, lines func(io.Writer)) error {
	var text bytes.Buffer
	w := tabwriter.NewWriter(&text, 0, 4, 2, ' ', 0)
	lines(w)
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := out.Write(text.Bytes())
	return err
}

// said prints a line, and the warnings that came with what was done.
func said(format string, args ...any) func(io.Writer, admin.Done) {
	return func(w io.Writer, d admin.Done) {
		fmt.Fprintf(w, format+"\n", args...)
		warn(w, d.Warnings)
	}
}

func warn(w io.Writer, warnings []string) {
	for _, line := range warnings {
		fmt.Fprintf(w, "warning: %s\n", line)
	}
}

// moment is a time for people; "" for none.
func moment(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

// group holds commands; a word that names none of them is a wrong call.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{Use: use, Short: short, RunE: func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			names := make([]string, 0, len(commands))
			for _, c := range commands {
				names = append(names, c.Name())
			}
			hint := ledger.Hint(args[0], names)
			switch {
			case hint != "":
			case len(names) == 1:
				hint = fmt.Sprintf("; write %s %s %s", c.CommandPath(), names[0], args[0])
			default:
				hint = "; there are " + strings.Join(names, ", ")
			}
			return usageError{fmt.Errorf("unknown command %q for %q%s", args[0], c.CommandPath(), hint)}
		}
		return c.Help()
	}}
	g.AddCommand(commands...)
	return g
}
