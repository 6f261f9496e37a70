package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"headgate/proxy/admin"
)

// Bounds of filling the cache ahead.
const (
	maxWarmers  = 64
	maxWarmWait = 5 * time.Minute  // that a refusal may ask for
	maxWarmTry  = 20               // times that one request is sent
	warmTime    = 15 * time.Minute // for an answer
	warmTold    = 5 * time.Second  // between two words of how far it is
	maxWarmSaid = 1000             // problems that are told one by one
)

// warmed is what came of requests.
type warmed struct {
	Requests     int           `json:"requests"`
	Kept         int           `json:"kept"`          // answered from the cache
	Asked        int           `json:"asked"`         // answered by the model, and kept unless the answer forbids it
	NotCacheable int           `json:"not_cacheable"` // answered by the model, and never kept
	Failed       int           `json:"failed"`
	Waits        int           `json:"waits"`    // refusals that were sat out
	Problems     []warmProblem `json:"problems"` // of requests that failed or are not cacheable, the first of them
}

// warmProblem is what is wrong with a line of a file.
type warmProblem struct {
	Line int    `json:"line"`
	Says string `json:"says"`
}

// warming sends requests of a file to a node's front door.
type warming struct {
	url, key string
	http     *http.Client
	or       savedRequest // what flags say, where a line does not
	refresh  bool

	mu       sync.Mutex
	done     warmed
	answered bool      // by a front door
	notYet   time.Time // a refusal asked to wait until then; it is meant for all
}

func warmCommand() *cobra.Command {
	var w warming
	var file, ca string
	var warmers int
	var asJSON bool
	c := &cobra.Command{
		Use: "warm -f FILE", Short: "Fill the cache ahead with the answers to requests in a file", Args: exactly(0),
		Long: "Send requests to a node's front door, at class best_effort, so that those who ask the same later get\n" +
			"what is kept. They are paid as any others are, by the key in HEADGATE_API_KEY, and wait where they are\n" +
			"refused for a while. The exit code is 1 if any failed.\n\n" +
			"Each line of the file is a request's body, or an object with body, and path, headers, user and surface\n" +
			"as need be:\n\n" +
			"  {\"model\": \"llama-8b\", \"temperature\": 0, \"messages\": [{\"role\": \"user\", \"content\": \"Where is my parcel?\"}]}\n" +
			"  {\"headers\": {\"X-Headgate-Cache-Tags\": \"doc-7\"}, \"body\": {\"model\": \"llama-8b\", …}}\n\n" +
			"What counts for the key must be as in the requests to come: see headgate cache explain-key. - is the\nstandard input. Streams are asked for whole: that makes no other key. No request takes the answer of a\nquestion in other words: each gets its own, which may serve others later.",
		Example: "  export HEADGATE_API_KEY=hg_live_…\n  headgate cache warm -f requests.jsonl --surface faq\n" +
			"  headgate cache warm -f requests.jsonl --surface faq --refresh --concurrency 2",
	}
	c.Flags().StringVarP(&file, "file", "f", "", "file with a request a line")
	c.Flags().StringVar(&w.url, "url", "http://127.0.0.1:8080", "a node's front door; the key comes from HEADGATE_API_KEY")
	c.Flags().StringVar(&ca, "ca", "", "PEM file with the authority of the node's certificate, for https (default: the system's)")
	c.Flags().IntVar(&warmers, "concurrency", 4, "requests at a time")
	c.Flags().BoolVar(&w.refresh, "refresh", false, "ask the model also for what is kept already")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	savedFlags(c, &w.or, "of lines that name none (default: the key's")
	c.RunE = func(c *cobra.Command, _ []string) error {
		w.key = os.Getenv(apiKeyVariable)
		switch {
		case file == "":
			return usageError{errors.New("name the file with the requests: headgate cache warm -f requests.jsonl")}
		case w.key == "":
			return usageError{errors.New(apiKeyVariable + " is not set; it is the key that the requests come with, one of headgate keys create")}
		case warmers < 1 || warmers > maxWarmers:
			return usageError{fmt.Errorf("--concurrency: %d is not between 1 and %d", warmers, maxWarmers)}
		case !strings.HasPrefix(w.url, "http://") && !strings.HasPrefix(w.url, "https://"):
			return usageError{fmt.Errorf("--url: %q has no scheme: write http://HOST:PORT, or https:// where the node has a certificate", w.url)}
		}
		w.url = strings.TrimSuffix(strings.TrimRight(w.url, "/"), "/v1") // the base URL of clients has it
		in := c.InOrStdin()
		if file != "-" {
			f, err := os.Open(file)
			if err != nil {
				return usageError{fmt.Errorf("--file: %w", err)}
			}
			defer func() { _ = f.Close() }()
			in = f
		}
		if err := w.connect(ca, warmers); err != nil {
			return err
		}
		done := w.tell(c.ErrOrStderr())
		err := w.run(c.Context(), in, warmers)
		done()
		return errors.Join(w.print(c.OutOrStdout(), c.ErrOrStderr(), asJSON), err)
	}
	return c
}

// connect makes the client, which keeps as many connections as there are requests at a time.
func (w *warming) connect(ca string, warmers int) (err error) {
	if w.http, err = (&client{ca: ca}).http(); err != nil {
		return err
	}
	if t, ok := w.http.Transport.(*http.Transport); ok {
		t.DisableKeepAlives, t.MaxIdleConnsPerHost = false, warmers
	}
	w.http.Timeout = warmTime
	return nil
}

// tell says every few seconds how far it is, until the function that it returns is called.
func (w *warming) tell(errs io.Writer) (done func()) {
	end := make(chan struct{})
	var telling sync.WaitGroup
	telling.Go(func() {
		t := time.NewTicker(warmTold)
		defer t.Stop()
		for {
			select {
			case <-end:
				return
			case <-t.C:
			}
			w.mu.Lock()
			waits := ""
			if wait := time.Until(w.notYet); wait > 0 {
				waits = fmt.Sprintf(", refused for %s more", wait.Round(time.Second))
			}
			fmt.Fprintf(errs, "headgate: %d requests so far, %d failed%s\n", w.done.Requests, w.done.Failed, waits)
			w.mu.Unlock()
		}
	})
	return func() {
		close(end)
		telling.Wait()
	}
}

// numbered is a line of a file.
type numbered struct {
	n    int
	text []byte
}

// run sends all there is in the file. Its error says what failed, if anything did.
func (w *warming) run(ctx context.Context, in io.Reader, warmers int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer w.http.CloseIdleConnections()
	requests := make(chan numbered)
	var working sync.WaitGroup
	for range warmers {
		working.Go(func() {
			for r := range requests {
				if err := w.one(ctx, r); err != nil {
					cancel(err)
				}
			}
		})
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 0, 64<<10), maxSaved)
	for n := 1; ctx.Err() == nil && lines.Scan(); n++ {
		if text := bytes.TrimSpace(lines.Bytes()); len(text) > 0 {
			select {
			case requests <- numbered{n, bytes.Clone(text)}:
			case <-ctx.Done():
			}
		}
	}
	close(requests)
	working.Wait()
	err := lines.Err()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("stopped before the end: %w", context.Cause(ctx))
	case errors.Is(err, bufio.ErrTooLong):
		return fmt.Errorf("stopped before the end: a line is longer than %s", byteSize(maxSaved))
	case err != nil:
		return fmt.Errorf("stopped before the end: %w", err)
	case w.done.Failed > 0:
		return fmt.Errorf("%d of %d requests failed", w.done.Failed, w.done.Requests)
	}
	return nil
}

// one sends a request until it is answered, and counts what came of it. It fails where all others
// would.
func (w *warming) one(ctx context.Context, r numbered) error {
	s, err := readSaved(r.text)
	s.User, s.Surface = cmp.Or(s.User, w.or.User), cmp.Or(s.Surface, w.or.Surface)
	if err == nil {
		s.Body, err = unstreamed(s.Body)
	}
	if err != nil {
		w.failed(r.n, err)
		return nil
	}
	for try := 1; ; try++ {
		if err := w.await(ctx); err != nil {
			return nil // run says why
		}
		req, err := w.request(ctx, &s)
		if err != nil {
			w.failed(r.n, err)
			return nil
		}
		a, err := w.send(req)
		switch {
		case ctx.Err() != nil:
			return nil
		case unreachable(err) && !w.met():
			return fmt.Errorf("nobody answers at --url %s: %w", w.url, err)
		case err != nil:
			w.failed(r.n, err)
		case a.foreign:
			return fmt.Errorf("what answers at --url %s is no front door of a node (status %d: %s)", w.url, a.status, a.says)
		case a.status == http.StatusOK:
			w.count(r.n, a.cache)
		case a.status == http.StatusUnauthorized:
			return fmt.Errorf("the key in %s is not good there: %s", apiKeyVariable, a.says)
		case a.wait > 0 && a.wait <= maxWarmWait && try < maxWarmTry:
			w.postpone(a.wait)
			continue
		default:
			w.failed(r.n, fmt.Errorf("status %d: %s", a.status, a.says))
		}
		return nil
	}
}

// unstreamed asks for the whole of an answer: only then does a status tell whether it is one.
func unstreamed(body json.RawMessage) (json.RawMessage, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil {
		return nil, err
	}
	if _, ok := members["stream"]; !ok {
		return body, nil
	}
	delete(members, "stream")
	delete(members, "stream_options")
	return json.Marshal(members)
}

// frontAnswer is what the front door said, without the answer itself.
type frontAnswer struct {
	status int
	cache  string        // what the cache did
	wait   time.Duration // to be waited before another try; 0: it would be in vain
	says   string        // of an error

	foreign bool // no node said that
}

// request makes one of a line.
func (w *warming) request(ctx context.Context, s *savedRequest) (*http.Request, error) {
	path := s.Path
	if path == "" {
		path = admin.DefaultCachePath
	}
	if !strings.HasPrefix(path, "/") {
		return nil, fmt.Errorf("path %q does not begin with /", path)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url+path, bytes.NewReader(s.Body))
	if err != nil {
		return nil, err
	}
	for name, values := range s.Headers {
		for _, v := range values {
			req.Header.Add(name, v)
		}
	}
	own := map[string]string{"Authorization": "Bearer " + w.key, "Content-Type": "application/json", "X-Headgate-Class": "best_effort", "X-Headgate-Similarity": "1"} // an answer of its own, not another question's
	if s.User != "" {
		own["X-Headgate-User"] = s.User
	}
	if s.Surface != "" {
		own["X-Headgate-Surface"] = s.Surface
	}
	if w.refresh {
		own["X-Headgate-Cache"] = "refresh"
	}
	for name, v := range own {
		req.Header.Set(name, v)
	}
	return req, nil
}

// unreachable says of an error that it would be the same with any other request.
func unreachable(err error) bool {
	_, network := errors.AsType[*net.OpError](err)
	_, certificate := errors.AsType[*tls.CertificateVerificationError](err)
	return network || certificate || errors.Is(err, http.ErrSchemeMismatch)
}

// send asks once.
func (w *warming) send(req *http.Request) (a frontAnswer, err error) {
	resp, err := w.http.Do(req)
	if err != nil {
		return a, err
	}
	defer func() { _ = resp.Body.Close() }()
	a = frontAnswer{status: resp.StatusCode, cache: resp.Header.Get("X-Headgate-Cache")}
	node := resp.Header.Get("X-Headgate-Node") != ""
	switch a.status { // the others may be a proxy's on the way
	case http.StatusOK, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusMovedPermanently, http.StatusFound:
		a.foreign = !node
	}
	if node {
		w.meet()
	}
	if a.status == http.StatusOK {
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			return a, fmt.Errorf("the answer broke off: %w", err)
		}
		return a, nil
	}
	return a, a.refusal(resp)
}

// refusal reads why, and whether it is worth a wait.
func (a *frontAnswer) refusal(resp *http.Response) error {
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("the answer broke off: %w", err)
	}
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(raw, &e) == nil && e.Error.Message != "" {
		a.says = e.Error.Message
	} else {
		a.says, _, _ = strings.Cut(fmt.Sprintf("%.200s", strings.TrimSpace(string(raw))), "\n")
	}
	if seconds, err := strconv.ParseInt(resp.Header.Get("Retry-After"), 10, 32); err == nil && seconds > 0 {
		a.wait = time.Duration(seconds) * time.Second
	}
	return nil
}

// await returns when no refusal asks to wait any longer; an error says that ctx ended.
func (w *warming) await(ctx context.Context) error {
	for {
		w.mu.Lock()
		wait := time.Until(w.notYet)
		w.mu.Unlock()
		if wait <= 0 {
			return ctx.Err()
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
	}
}

// postpone has all wait.
func (w *warming) postpone(wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done.Waits++
	if until := time.Now().Add(wait); until.After(w.notYet) {
		w.notYet = until
	}
}

// met says whether a front door has answered, meet that one has.
func (w *warming) met() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.answered
}

func (w *warming) meet() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answered = true
}

// count an answer by what the cache did.
func (w *warming) count(line int, cache string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done.Requests++
	switch cache {
	case "exact", "stale", "live":
		w.done.Kept++
	case "miss", "partial":
		w.done.Asked++
	case "":
		w.done.NotCacheable++
		w.problem(line, "not cacheable: it is of no surface, or of one without a cache")
	default:
		w.done.NotCacheable++
		w.problem(line, "not cacheable: headgate cache explain-key says why")
	}
}

// failed counts a request, and says why.
func (w *warming) failed(line int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done.Requests++
	w.done.Failed++
	w.problem(line, err.Error())
}

// problem is noted, under mu.
func (w *warming) problem(line int, says string) {
	if len(w.done.Problems) < maxWarmSaid {
		w.done.Problems = append(w.done.Problems, warmProblem{line, says})
	}
}

// print what came of it, and on errs what is wrong with which line.
func (w *warming) print(out, errs io.Writer, asJSON bool) error {
	d := &w.done
	slices.SortFunc(d.Problems, func(a, b warmProblem) int { return cmp.Compare(a.Line, b.Line) })
	if asJSON {
		d.Problems = append([]warmProblem{}, d.Problems...) // none is [], not null
		return json.NewEncoder(out).Encode(d)
	}
	for _, p := range d.Problems {
		fmt.Fprintf(errs, "headgate: line %d: %s\n", p.Line, p.Says)
	}
	if more := d.Failed + d.NotCacheable - len(d.Problems); more > 0 {
		fmt.Fprintf(errs, "headgate: and %d more\n", more)
	}
	_, err := fmt.Fprintf(out, "%d requests: %d kept already, %d asked of the model, %d asked but not cacheable, %d failed; %d waits\n", d.Requests, d.Kept, d.Asked, d.NotCacheable, d.Failed, d.Waits)
	return err
}
