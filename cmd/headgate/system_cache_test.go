//go:build linux

package main_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The tests of the cache as a whole cluster has it: five processes before a model server that counts how
// often it was asked what, and answers when it is told to.

// quizzed is that server. A question is the text of the last message. Streams send their first half before
// they wait.
type quizzed struct {
	url string

	mu    sync.Mutex
	asked map[string]int
	left  map[string]int // by whoever asked, without an answer
	held  map[string]chan struct{}
}

func newQuizzed(t *testing.T) *quizzed {
	t.Helper()
	q := &quizzed{asked: map[string]int{}, left: map[string]int{}, held: map[string]chan struct{}{}}
	srv := httptest.NewServer(q)
	q.url = srv.URL
	t.Cleanup(func() {
		for name := range q.held {
			q.answer(name)
		}
		srv.Close()
	})
	return q
}

// hold keeps a question without its answer until answer.
func (q *quizzed) hold(question string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.held[question] = make(chan struct{})
}

func (q *quizzed) answer(question string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if held := q.held[question]; held != nil {
		close(held)
		q.held[question] = nil
	}
}

// times is how often a question was asked.
func (q *quizzed) times(question string) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.asked[question]
}

func (q *quizzed) begin(question string) (n int, held <-chan struct{}) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.asked[question]++
	return q.asked[question], q.held[question]
}

const (
	quizzedChunk = `data: {"id":"c-%d","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":%s,"finish_reason":%s}]}` + "\n\n"
	quizzedUsage = `"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}`
)

// ServeHTTP answers with the question and how often it was asked.
func (q *quizzed) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Stream   bool
		Messages []struct{ Content string }
	}
	if r.Method != http.MethodPost || json.NewDecoder(r.Body).Decode(&in) != nil || len(in.Messages) == 0 {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
		return
	}
	question := in.Messages[len(in.Messages)-1].Content
	n, held := q.begin(question)
	half := func(text string, last bool) {
		if in.Stream {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = fmt.Fprintf(w, quizzedChunk, n, `{"role":"assistant","content":`+text+`}`, "null")
			if last {
				_, _ = fmt.Fprintf(w, quizzedChunk, n, `{}`, `"stop"`)
				_, _ = io.WriteString(w, fmt.Sprintf(`data: {"id":"c-%d","object":"chat.completion.chunk","created":1,"model":"m","choices":[],%s}`, n, quizzedUsage)+"\n\ndata: [DONE]\n\n")
			}
			_ = http.NewResponseController(w).Flush() // or the client is gone
		}
	}
	half(`"answer "`, false)
	if held != nil {
		select {
		case <-held:
		case <-r.Context().Done():
			q.mu.Lock()
			q.left[question]++
			q.mu.Unlock()
			return
		}
	}
	if half(fmt.Sprintf(`"%d"`, n), true); in.Stream {
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintf(w, `{"id":"c-%d","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"answer %d"},"finish_reason":"stop"}],%s}`, n, n, quizzedUsage)
}

// quiz is a cluster before such a server.
type quiz struct {
	*group
	up     *quizzed
	client *http.Client
}

func newQuiz(t *testing.T, n int) *quiz {
	t.Helper()
	q := &quiz{up: newQuizzed(t), client: &http.Client{Timeout: patience, Transport: &http.Transport{MaxIdleConnsPerHost: 1000}}}
	t.Cleanup(q.client.CloseIdleConnections)
	q.group = newGroup(t, n, fmt.Sprintf(`version: 1
backends: [{name: b, url: %q, slots: 5000}]
models: [{name: m, backends: [b]}]
surfaces:
  - {name: faq, share: tenant, exact: {ttl: 1h}}
  - {name: wiki, share: tenant, exact: {ttl: 1h}}
plans:
  - name: p
    limits: [{name: requests, scope: key, unit: requests, rate: 1000000000/min, unavailable: allow}]
tenants: [{name: dev, plan: p}]
`, q.up.url))
	q.group.up()
	return q
}

// asking is a request of the quiz.
type asking struct {
	question string
	stream   bool
	header   map[string]string // beside the surface
}

// told is its answer; err is of the connection, or of a body that broke off.
type told struct {
	code  int
	cache string
	text  string
	err   error
}

// send begins a request.
func (q *quiz) send(ctx context.Context, m *member, a asking) (*http.Response, error) {
	body := fmt.Sprintf(`{"model":"m","temperature":0,"stream":%t,"messages":[{"role":"user","content":%q}]}`, a.stream, a.question)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.front+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+cliKey)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Headgate-Surface", "faq")
	for name, value := range a.header {
		req.Header.Set(name, value)
	}
	return q.client.Do(req)
}

// ask waits for an answer. It may be used from any goroutine.
func (q *quiz) ask(m *member, a asking) (w told) {
	res, err := q.send(context.Background(), m, a)
	if err != nil {
		return told{err: err}
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	return told{res.StatusCode, res.Header.Get("X-Headgate-Cache"), string(text), err}
}

// crowd asks the same n times, spread over some members.
type crowd struct {
	all  sync.WaitGroup
	told []told
}

func (q *quiz) crowd(n int, a asking, members []*member) *crowd {
	c := &crowd{told: make([]told, n)}
	for i := range n {
		c.all.Go(func() { c.told[i] = q.ask(members[i%len(members)], a) })
	}
	return c
}

// waiting blocks until so many requests wait at members for another's answer.
func (q *quiz) waiting(n int, members ...*member) {
	q.t.Helper()
	eventually(q.t, fmt.Sprintf("%d requests to wait", n), func() bool {
		sum := 0.0
		for _, m := range members {
			sum += total(q.t, m, "headgate_cache_waiters", "")
		}
		return sum == float64(n)
	})
}

// asked blocks until the model was asked so often.
func (q *quiz) asked(question string, n int) {
	q.t.Helper()
	eventually(q.t, fmt.Sprintf("%q to be asked %d times", question, n), func() bool { return q.up.times(question) >= n })
}

// answered waits for a crowd and demands that all of it got an answer of the model's, and how often that was
// asked.
func (q *quiz) answered(question string, c *crowd, most int) {
	q.t.Helper()
	c.all.Wait()
	words := map[string]int{}
	for _, w := range c.told {
		if w.code != http.StatusOK || w.err != nil || !strings.Contains(w.text, "answer ") || strings.Contains(w.text, `"error"`) {
			words[fmt.Sprintf("status %d, error %v: %s", w.code, w.err, tail(w.text, 300))]++
		}
	}
	if len(words) > 0 {
		q.t.Errorf("%s: not all of %d were answered: %v", question, len(c.told), words)
	}
	tiers := map[string]int{}
	for _, w := range c.told {
		tiers[w.cache]++
	}
	n := q.up.times(question)
	q.t.Logf("%s: %d requests, %d calls of the model, cache %v", question, len(c.told), n, tiers)
	if n > most {
		q.t.Errorf("%s: the model was asked %d times, want at most %d", question, n, most)
	}
}

// leadAt has a request lead at a member whose key it owns, or does not. It is held.
func (q *quiz) leadAt(m *member, owns bool, a asking) (question string, leader *crowd) {
	q.t.Helper()
	for i := range 200 {
		b := a
		b.question = fmt.Sprintf("%s %d", a.question, i)
		joins := func() float64 { return total(q.t, m, "headgate_cache_peer_seconds_count", `call="join"`) }
		before := joins()
		q.up.hold(b.question)
		c := q.crowd(1, b, []*member{m})
		q.asked(b.question, 1)
		if (joins() == before) == owns {
			return b.question, c
		}
		q.up.answer(b.question)
		c.all.Wait()
	}
	q.t.Fatal("no key of 200 has that owner")
	return "", nil
}

// TestSystemCache is one life of a cluster, in which nodes die.
func TestSystemCache(t *testing.T) {
	heavy(t)
	q := newQuiz(t, 5)
	q.oneCall()
	q.streamsShared()
	q.leaderLeaves()
	q.generationEnds()
	q.tagEnds()
	q.killedLeader(q.members[4], false)
	q.awaitView(q.members[:4]...)
	q.killedLeader(q.members[3], true)
}

// oneCall: a thousand ask the same at once, of five nodes, and the model is asked once.
func (q *quiz) oneCall() {
	q.t.Helper()
	a := asking{question: "one call"}
	q.up.hold(a.question)
	c := q.crowd(1000, a, q.members)
	q.waiting(999, q.members...)
	q.up.answer(a.question)
	q.answered(a.question, c, 1)
}

// streamsShared: the same where half of them want a stream, after it has begun.
func (q *quiz) streamsShared() {
	q.t.Helper()
	a := asking{question: "shared stream", stream: true}
	q.up.hold(a.question)
	leader := q.crowd(1, a, q.members[:1])
	q.asked(a.question, 1)
	streams := q.crowd(100, a, q.members)
	a.stream = false
	whole := q.crowd(100, a, q.members)
	q.waiting(100, q.members...)
	q.up.answer(a.question)
	for _, c := range []*crowd{leader, streams, whole} {
		q.answered(a.question, c, 1)
	}
}

// leaderLeaves: whoever asked first goes in the middle of the stream; those who follow get all of it.
func (q *quiz) leaderLeaves() {
	q.t.Helper()
	a := asking{question: "the leader leaves", stream: true}
	q.up.hold(a.question)
	ctx, cancel := context.WithCancel(q.t.Context())
	defer cancel()
	res, err := q.send(ctx, q.members[0], a)
	if err != nil {
		q.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if _, err := io.ReadFull(res.Body, make([]byte, 10)); err != nil {
		q.t.Fatal(err)
	}
	followers := q.follow(20, a, q.members)
	cancel()
	if _, err := io.ReadAll(res.Body); !errors.Is(err, context.Canceled) {
		q.t.Errorf("the leader's client read on: %v", err)
	}
	q.up.answer(a.question)
	for _, f := range followers {
		if text, err := f.rest(); err != nil || !strings.HasSuffix(strings.TrimSpace(text), "data: [DONE]") || !strings.Contains(text, `"1"`) {
			q.t.Errorf("a follower got %q, error %v", text, err)
		}
	}
	if n := q.up.times(a.question); n != 1 {
		q.t.Errorf("the model was asked %d times", n)
	}
}

// follower reads the stream of another's request.
type follower struct {
	res   *http.Response
	began string
}

// follow begins n of them, each of which has its first half.
func (q *quiz) follow(n int, a asking, members []*member) (out []*follower) {
	q.t.Helper()
	for i := range n {
		res, err := q.send(q.t.Context(), members[i%len(members)], a)
		if err != nil {
			q.t.Fatal(err)
		}
		f := &follower{res: res}
		if cache := res.Header.Get("X-Headgate-Cache"); res.StatusCode != http.StatusOK || cache != "live" {
			q.t.Errorf("a follower got status %d, cache %q", res.StatusCode, cache)
		}
		for b := make([]byte, 1); !strings.Contains(f.began, "answer "); {
			if _, err := res.Body.Read(b); err != nil {
				q.t.Fatalf("%v after %q", err, f.began)
			}
			f.began += string(b)
		}
		out = append(out, f)
	}
	return out
}

// rest is the whole stream.
func (f *follower) rest() (string, error) {
	defer func() { _ = f.res.Body.Close() }()
	text, err := io.ReadAll(f.res.Body)
	return f.began + string(text), err
}

// kept has every node hold the answer, and says which it is.
func (q *quiz) kept(a asking) string {
	q.t.Helper()
	var text string
	for _, m := range q.members {
		eventually(q.t, "a kept answer at "+m.name, func() bool {
			w := q.ask(m, a)
			if w.code != http.StatusOK {
				q.t.Fatalf("%d %s %v", w.code, w.text, w.err)
			}
			text = w.text
			return w.cache == "exact"
		})
	}
	return text
}

// gone ends kept answers and waits until no node has one, while all are asked all the time. It logs how
// long that took.
func (q *quiz) gone(what string, a asking, in map[string]any) {
	q.t.Helper()
	a.header = maps.Clone(a.header)
	if a.header == nil {
		a.header = map[string]string{}
	}
	a.header["X-Headgate-Cache"] = "only"
	longest := make([]time.Duration, len(q.members))
	began := time.Now()
	var asked sync.WaitGroup
	for i, m := range q.members {
		asked.Go(func() {
			eventually(q.t, m.name+" to have it no more", func() bool {
				w := q.ask(m, a)
				if w.err != nil || w.code != http.StatusOK && w.code != http.StatusGatewayTimeout {
					q.t.Errorf("%s: %d %s %v", m.name, w.code, w.text, w.err)
					return true
				}
				longest[i] = time.Since(began)
				return w.code == http.StatusGatewayTimeout
			})
		})
	}
	if code, apiErr, err := q.call(q.members[1], http.MethodPost, "cache/invalidate", in, nil); code != http.StatusOK {
		q.t.Errorf("%d %s %v", code, apiErr, err)
	}
	acknowledged := time.Since(began)
	asked.Wait()
	took := slices.Max(longest)
	q.t.Logf("%s: no node had it %v after the command was sent, %v after it was acknowledged", what, took.Round(time.Millisecond), (took - acknowledged).Round(time.Millisecond))
}

// generationEnds: all that a surface keeps, on all nodes, and it comes back.
func (q *quiz) generationEnds() {
	q.t.Helper()
	a, other := asking{question: "a generation"}, asking{question: "a generation", header: map[string]string{"X-Headgate-Surface": "wiki"}}
	before, untouched := q.kept(a), q.kept(other)
	q.gone("a generation", a, map[string]any{"tenant": "dev", "surface": "faq"})
	if now := q.kept(a); now == before {
		q.t.Errorf("after its generation ended the answer is still %s", now)
	}
	if now := q.kept(other); now != untouched {
		q.t.Errorf("the answer of another surface is %s, was %s", now, untouched)
	}
	if code, apiErr, err := q.call(q.members[2], http.MethodPost, "cache/invalidate", map[string]any{"tenant": "dev", "surface": "faq", "generation": 1}, nil); code != http.StatusOK {
		q.t.Errorf("%d %s %v", code, apiErr, err)
	}
	q.awaitSame(q.members...)
	if now := q.kept(a); now != before {
		q.t.Errorf("after its generation came back the answer is %s, was %s", now, before)
	}
}

// tagEnds: those with a tag, on all nodes, and no others.
func (q *quiz) tagEnds() {
	q.t.Helper()
	a := asking{question: "a tag", header: map[string]string{"X-Headgate-Cache-Tags": "doc-1, doc-3"}}
	other := asking{question: "another tag", header: map[string]string{"X-Headgate-Cache-Tags": "doc-2"}}
	before, untouched := q.kept(a), q.kept(other)
	q.gone("a tag", a, map[string]any{"tenant": "dev", "tags": []string{"doc-1"}})
	if now := q.kept(a); now == before {
		q.t.Errorf("after its tag ended the answer is still %s", now)
	}
	if now := q.kept(other); now != untouched {
		q.t.Errorf("the answer with another tag is %s, was %s", now, untouched)
	}
}

// killedLeader: the node that asks the model for a thousand who wait at others dies before a byte came. All
// are answered, by one more call. Those who follow a stream of its that had begun are told.
func (q *quiz) killedLeader(m *member, owns bool) {
	q.t.Helper()
	var rest []*member
	for _, o := range q.members {
		if o != m && o.serving.Load() {
			rest = append(rest, o)
		}
	}
	half := asking{question: fmt.Sprintf("half of %s's", m.name), stream: true}
	q.up.hold(half.question)
	halfLeader := q.crowd(1, half, []*member{m})
	q.asked(half.question, 1)
	followers := q.follow(6, half, rest)

	question, leader := q.leadAt(m, owns, asking{question: fmt.Sprintf("%s leads and owns (%t)", m.name, owns)})
	c := q.crowd(1000, asking{question: question}, rest)
	q.waiting(1000, rest...)
	m.end(syscall.SIGKILL)
	q.asked(question, 2)
	q.up.answer(question)
	q.answered(question, c, 2)

	for _, f := range followers {
		text, err := f.rest()
		if err != nil || !strings.Contains(text, `data: {"error":`) || strings.Contains(text, "[DONE]") {
			q.t.Errorf("a follower of the half stream got %q, error %v", text, err)
		}
	}
	q.up.answer(half.question)
	for _, c := range []*crowd{leader, halfLeader} { // their node is dead
		if c.all.Wait(); c.told[0].err == nil {
			q.t.Errorf("the leader's client was told %+v", c.told[0])
		}
	}
}
