package cache

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime/pprof"
	"strconv"
	"sync/atomic"
	"time"

	"headgate/bench/fakevllm"
	"headgate/cmd/node"
)

// envChild holds an order as JSON, in a process that is to carry it out.
const envChild = "HEADGATE_BENCH_CACHE"

// order is what a process of the benchmark's is told.
type order struct {
	Role string // upstream | bare | node

	// Of the upstream.
	TTFT time.Duration

	// Of the bare handler.
	Answers map[string]plainAnswer // by path

	// Of a node.
	Name, Dir, Policy, Key, Token string
	Join                          string // address of another's gossip; "": it is the first
	Profile                       string // file for a CPU profile of the node's life
}

// plainAnswer is what the bare handler writes.
type plainAnswer struct {
	ContentType string
	File        string
}

// Child turns this process into one of the benchmark's if [Run] has started it as one: it then carries out its order until
// the standard input or ctx ends, and reports true.
func Child(ctx context.Context) (bool, error) {
	text := os.Getenv(envChild)
	if text == "" {
		return false, nil
	}
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return true, fmt.Errorf("order: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // however it ends, the parent is done with us
		cancel()
	}()
	switch o.Role {
	case "upstream":
		h, err := upstream(&o)
		if err != nil {
			return true, err
		}
		return true, serve(ctx, h)
	case "bare":
		h, err := bareHandler(&o)
		if err != nil {
			return true, err
		}
		return true, serve(ctx, h)
	case "node":
		return true, runNode(ctx, &o)
	}
	return true, fmt.Errorf("unknown role %q", o.Role)
}

// serve answers on a port of its own, which it says on the standard output.
func serve(ctx context.Context, h http.Handler) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	fmt.Printf("listening %s\n", l.Addr())
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// askedPath tells how often the model was asked.
const askedPath = "/bench/asked"

// upstream is the simulated model, which counts.
func upstream(o *order) (http.Handler, error) {
	s, err := fakevllm.New(fakevllm.Config{Models: []string{model}, Slots: maxInFlight, LogSize: 64, RecordBody: -1, TTFT: o.TTFT})
	if err != nil {
		return nil, err
	}
	var asked atomic.Int64
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == askedPath {
			_, _ = io.WriteString(w, strconv.FormatInt(asked.Load(), 10)) // the reader finds out
			return
		}
		if r.Method == http.MethodPost {
			asked.Add(1)
		}
		s.Handler().ServeHTTP(w, r)
	}), nil
}

// bareHandler is what a hit is held against: it writes the same bytes, and does nothing else. It reads the request as
// net/http does by itself.
func bareHandler(o *order) (http.Handler, error) {
	mux := http.NewServeMux()
	for path, a := range o.Answers {
		body, err := os.ReadFile(a.File)
		if err != nil {
			return nil, err
		}
		length := strconv.Itoa(len(body))
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", a.ContentType)
			w.Header().Set("Content-Length", length)
			_, _ = w.Write(body) // the client may be gone
		})
	}
	return mux, nil
}

// runNode runs a node as headgate serve does, with limits that nobody reaches, those against floods from one address
// included: all the load comes from one.
func runNode(ctx context.Context, o *order) (err error) {
	c := node.Defaults()
	c.Listen, c.AdminListen, c.ClusterListen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	c.NodeID, c.DataDir, c.Policy, c.Dev, c.DevKey, c.AdminToken = o.Name, o.Dir, o.Policy, true, o.Key, o.Token
	c.Prefilter = node.PrefilterConfig{RequestsPerSecond: 1_000_000, RequestBurst: 1_000_000, ErrorsPerMinute: 60_000_000, ErrorBurst: 1_000_000}
	c.MaxConnsPerIP = 4 * maxInFlight
	c.DrainTimeout = node.Duration(time.Second)
	if o.Join != "" {
		c.Join = []string{o.Join}
	}
	if c.Logger, err = c.NewLogger(os.Stderr); err != nil {
		return err
	}
	if o.Profile != "" {
		f, err := os.Create(o.Profile)
		if err != nil {
			return err
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			return errors.Join(err, f.Close())
		}
		defer func() {
			pprof.StopCPUProfile()
			err = errors.Join(err, f.Close())
		}()
	}
	n, err := node.New(ctx, c)
	if err != nil {
		return err
	}
	fmt.Printf("listening %s %s\n", n.Addr(), n.AdminAddr())
	return n.Run(ctx)
}
