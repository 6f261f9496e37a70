package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"headgate/bench/fakevllm"
	"headgate/cmd/node"
)

func demoCommand() *cobra.Command {
	cfg := node.Defaults()
	c := &cobra.Command{
		Use:   "demo",
		Short: "Run a node before a simulated vLLM (or --upstream URL) and stream one answer through it",
		Args:  exactly(0),
		RunE: func(c *cobra.Command, _ []string) error {
			cfg.Dev, cfg.Version, cfg.Out = true, version, c.OutOrStdout()
			cfg.DevKey, cfg.AdminToken = os.Getenv("HEADGATE_DEV_KEY"), os.Getenv("HEADGATE_ADMIN_TOKEN")
			return demo(c.Context(), c.OutOrStdout(), cfg)
		},
	}
	c.Flags().StringVar(&cfg.Upstream, "upstream", "", "model server to stand in front of (default: a simulated one)")
	c.Flags().StringVar(&cfg.Listen, "listen", cfg.Listen, "address of the front door")
	c.Flags().StringVar(&cfg.AdminListen, "admin-listen", cfg.AdminListen, "address of the admin API")
	return c
}

// demo runs an upstream, a node and one request, then waits for ctx's end.
func demo(ctx context.Context, out io.Writer, cfg node.Config) error {
	dir, err := os.MkdirTemp("", "headgate-demo")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // a temporary folder left behind harms nobody
	cfg.DataDir = dir
	logFile, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return err
	}
	defer func() { _ = logFile.Close() }()
	cfg.Logger = slog.New(slog.NewJSONHandler(logFile, nil))
	if cfg.Upstream == "" {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		s, err := fakevllm.New(fakevllm.Config{Models: []string{"demo-model"}, TTFT: 150 * time.Millisecond, InterToken: 30 * time.Millisecond})
		if err != nil {
			return err
		}
		up := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second}
		go func() { _ = up.Serve(l) }() // ends with Close below
		defer func() { _ = up.Close() }()
		cfg.Upstream = "http://" + l.Addr().String()
		fmt.Fprintf(out, "simulated vLLM: %s\n", cfg.Upstream)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	failed := make(chan error, 1)
	err = serve(ctx, cfg, func(n *node.Node) {
		wg.Go(func() {
			if err := proof(ctx, out, n); err != nil {
				failed <- err
				fmt.Fprintf(out, "the request failed: %v (Ctrl-C stops)\n", err)
			}
		})
	})
	select {
	case perr := <-failed:
		return errors.Join(err, perr)
	default:
		return err
	}
}

// proof prints how to reach the node and streams one answer through it.
func proof(ctx context.Context, out io.Writer, n *node.Node) error {
	base := "http://" + n.Addr()
	if err := waitReady(ctx, "http://"+n.AdminAddr()+"/readyz"); err != nil {
		return err
	}
	model := n.Models()[0]
	body := fmt.Sprintf(`{"model": %q, "stream": true, "max_tokens": 24, "messages": [{"role": "user", "content": "Say hello."}]}`, model)
	fmt.Fprintf(out, "gateway:        %s/v1\nadmin API:      http://%s\nAPI key:        %s\n\nTry it:\n  curl -N %s/v1/chat/completions -H 'Authorization: Bearer %s' -H 'Content-Type: application/json' -d '%s'\n\nOne answer, streamed through it:\n",
		base, n.AdminAddr(), n.DevKey(), base, n.DevKey(), body)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+n.DevKey())
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := printAnswer(out, resp); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n\nTokens left this minute: %s of %s. Ctrl-C stops all.\n", resp.Header.Get("X-Ratelimit-Remaining-Tokens"), resp.Header.Get("X-Ratelimit-Limit-Tokens"))
	return nil
}

// printAnswer prints the text of a stream as it comes.
func printAnswer(out io.Writer, resp *http.Response) error {
	if resp.StatusCode != http.StatusOK {
		raw, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<16)) // what came is shown
		return fmt.Errorf("status %d: %s", resp.StatusCode, raw)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	done := false
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if done = done || data == "[DONE]"; !ok || data == "[DONE]" {
			continue
		}
		text, err := deltaText(data)
		if err != nil {
			return err
		}
		fmt.Fprint(out, text)
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if !done {
		return errors.New("the stream ended without [DONE]")
	}
	return nil
}

func waitReady(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return errors.New("the node did not become ready: is its upstream up?")
		case <-time.After(50 * time.Millisecond):
		}
	}
}
