package embed

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

// fakePost answers embeddings of three numbers that tell the text's length, and what it was asked beside the
// endpoint's checks.
type fakePost struct {
	mu      sync.Mutex
	batches [][]string
	formats []string
	checks  int
	answer  func(ctx context.Context, texts []string, format string) ([]byte, error) // nil: as it should be
}

func (f *fakePost) post(ctx context.Context, body []byte) ([]byte, error) {
	var request struct {
		Model  string
		Input  []string
		Format string `json:"encoding_format"`
	}
	if err := json.Unmarshal(body, &request); err != nil {
		return nil, err
	}
	f.mu.Lock()
	if isCheck(request.Input) {
		f.checks++
	} else {
		f.batches = append(f.batches, request.Input)
	}
	f.formats = append(f.formats, request.Format)
	f.mu.Unlock()
	if f.answer != nil {
		return f.answer(ctx, request.Input, request.Format)
	}
	return goodAnswer(request.Input, request.Format == "base64"), nil
}

func (f *fakePost) sizes() (sizes []int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, b := range f.batches {
		sizes = append(sizes, len(b))
	}
	return sizes
}

// asked is how many requests there were, checks among them.
func (f *fakePost) asked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.batches) + f.checks
}

// isCheck is whether texts are those of the endpoint's check, or of its half.
func isCheck(texts []string) bool {
	return !slices.ContainsFunc(texts, func(text string) bool { return text != unlikeOne && text != unlikeOther })
}

func fakeVector(text string) []float32 {
	if text == unlikeOther {
		return []float32{-float32(len(text)), 1, 2}
	}
	return []float32{float32(len(text)), 1, 2}
}

func goodAnswer(texts []string, packed bool) []byte {
	type item struct {
		Index     int `json:"index"`
		Embedding any `json:"embedding"`
	}
	var data []item
	for i, text := range texts {
		v := fakeVector(text)
		if packed {
			data = append(data, item{i, pack(v)})
		} else {
			data = append(data, item{i, v})
		}
	}
	slices.Reverse(data) // the order is the index's
	answer, err := json.Marshal(map[string]any{"object": "list", "data": data})
	if err != nil {
		panic(err)
	}
	return answer
}

func pack(v []float32) string {
	var raw []byte
	for _, x := range v {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
	}
	return base64.StdEncoding.EncodeToString(raw)
}

func endpoint(t *testing.T, config EndpointConfig) *Endpoint {
	t.Helper()
	config.Model, config.Version = "m", "m 1"
	e, err := NewEndpoint(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func checkVector(t *testing.T, text string, got []float32) {
	t.Helper()
	want := fakeVector(text)
	size := math.Sqrt(float64(want[0])*float64(want[0]) + 5)
	for i := range want {
		if len(got) != 3 || math.Abs(float64(got[i])-float64(want[i])/size) > 1e-6 {
			t.Fatalf("%q: %v, want %v of unit length", text, got, want)
		}
	}
}

func kindOf(err error) Kind {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Kind
	}
	return ""
}

func TestEndpointOverHTTP(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	fake := &fakePost{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.URL.Path != "/v1/embeddings" || r.Header.Get("Authorization") != "Bearer key" || r.Header.Get("Content-Type") != "application/json" {
			t.Errorf("asked %s with %v", r.URL, r.Header)
		}
		answer, _ := fake.post(r.Context(), body)
		_, _ = w.Write(answer)
	}))
	defer server.Close()
	client := server.Client()
	for _, base := range []string{server.URL, server.URL + "/v1", server.URL + "/v1/"} {
		post, err := HTTPPost(client, base, "key")
		if err != nil {
			t.Fatal(err)
		}
		e := endpoint(t, EndpointConfig{Post: post})
		vectors, err := e.Embed(t.Context(), []string{"one", "three"})
		if err != nil {
			t.Fatal(err)
		}
		checkVector(t, "one", vectors[0])
		checkVector(t, "three", vectors[1])
		if e.Dim() != 3 || e.Version() != "m 1" {
			t.Errorf("dim %d, version %q", e.Dim(), e.Version())
		}
		e.Close()
	}
	for _, base := range []string{"", "host:1", "ftp://host", "http://"} {
		if _, err := HTTPPost(client, base, ""); err == nil {
			t.Errorf("no error for %q", base)
		}
	}
}

func TestEndpointOverHTTPWhenThingsGoWrong(t *testing.T) {
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		want    Kind
	}{
		"503": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, Unavailable},
		"429": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(429) }, Unavailable},
		"404": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404) }, Refused},
		"redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}, Unavailable},
		"cut off": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, Unavailable},
		"huge": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(`{"data":[`))
			blank := []byte(strings.Repeat(" ", 1<<20))
			for range 9 {
				_, _ = w.Write(blank)
			}
		}, Malformed},
		"slow": {func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body) // else the server does not see that the client left
			<-r.Context().Done()
		}, Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
			server := httptest.NewServer(c.handler)
			defer server.Close()
			post, err := HTTPPost(server.Client(), server.URL, "")
			if err != nil {
				t.Fatal(err)
			}
			timeout := time.Minute
			if name == "slow" {
				timeout = 50 * time.Millisecond
			}
			e := endpoint(t, EndpointConfig{Post: post, Timeout: timeout})
			defer e.Close()
			if _, err := e.Embed(t.Context(), []string{"a"}); kindOf(err) != c.want {
				t.Errorf("%v, want one that is %s", err, c.want)
			}
		})
	}
}

func TestAnswersThatAreNone(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for name, answer := range map[string]string{
		"nothing":       ``,
		"not JSON":      `<html>`,
		"too few":       `{"data":[{"index":0,"embedding":[1,2,3]}]}`,
		"too many":      `{"data":[{"embedding":[1,2,3]},{"embedding":[1,2,3]},{"embedding":[1,2,3]}]}`,
		"twice":         `{"data":[{"index":0,"embedding":[1,2,3]},{"index":0,"embedding":[1,2,3]}]}`,
		"index":         `{"data":[{"index":0,"embedding":[1,2,3]},{"index":2,"embedding":[1,2,3]}]}`,
		"negative":      `{"data":[{"index":0,"embedding":[1,2,3]},{"index":-1,"embedding":[1,2,3]}]}`,
		"two lengths":   `{"data":[{"index":0,"embedding":[1,2,3]},{"index":1,"embedding":[1,2]}]}`,
		"empty":         `{"data":[{"index":0,"embedding":[]},{"index":1,"embedding":[]}]}`,
		"none":          `{"data":[{"index":0},{"index":1}]}`,
		"null":          `{"data":[{"index":0,"embedding":null},{"index":1,"embedding":null}]}`,
		"zero":          `{"data":[{"index":0,"embedding":[0,0,0]},{"index":1,"embedding":[1,2,3]}]}`,
		"beyond float":  `{"data":[{"index":0,"embedding":[1e39,0,0]},{"index":1,"embedding":[1,2,3]}]}`,
		"not a number":  `{"data":[{"index":0,"embedding":"` + pack([]float32{nan, 0, 1}) + `"},{"index":1,"embedding":[1,2,3]}]}`,
		"infinite":      `{"data":[{"index":0,"embedding":"` + pack([]float32{inf, 0, 1}) + `"},{"index":1,"embedding":[1,2,3]}]}`,
		"half a float":  `{"data":[{"index":0,"embedding":"AAAA"},{"index":1,"embedding":[1,2,3]}]}`,
		"not base64":    `{"data":[{"index":0,"embedding":"!"},{"index":1,"embedding":[1,2,3]}]}`,
		"other lengths": `{"data":[{"index":0,"embedding":[1,2]},{"index":1,"embedding":[1,2]}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			fake := &fakePost{answer: func(context.Context, []string, string) ([]byte, error) { return []byte(answer), nil }}
			e := endpoint(t, EndpointConfig{Post: fake.post, Dim: 3})
			if vectors, err := e.Embed(t.Context(), []string{"a", "b"}); kindOf(err) != Malformed {
				t.Errorf("%v, %v, want an error that is malformed", vectors, err)
			}
		})
	}
}

func TestTextsShareRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		fake := &fakePost{}
		fake.answer = func(_ context.Context, texts []string, _ string) ([]byte, error) {
			if !isCheck(texts) {
				<-release
			}
			return goodAnswer(texts, true), nil
		}
		e := endpoint(t, EndpointConfig{Post: fake.post})
		var callers sync.WaitGroup
		ask := func(texts ...string) {
			callers.Go(func() {
				vectors, err := e.Embed(t.Context(), texts)
				if err != nil {
					t.Error(err)
					return
				}
				for i, text := range texts {
					checkVector(t, text, vectors[i])
				}
			})
		}
		ask("first") // goes at once
		synctest.Wait()
		if got := fake.sizes(); !slices.Equal(got, []int{1}) {
			t.Fatalf("sent %v, want the first alone and at once", got)
		}
		for i := range 40 {
			ask(strings.Repeat("x", i+1))
		}
		synctest.Wait() // no time has passed: 32 are full, the rest gathers
		if got := fake.sizes(); !slices.Equal(got, []int{1, 32}) {
			t.Fatalf("sent %v, want a full batch", got)
		}
		time.Sleep(gatherFor)
		synctest.Wait()
		if got := fake.sizes(); !slices.Equal(got, []int{1, 32, 8}) {
			t.Fatalf("sent %v, want the rest after two milliseconds", got)
		}
		ask(make([]string, 70)...) // in several requests
		time.Sleep(gatherFor)
		synctest.Wait()
		if got := fake.sizes(); !slices.Equal(got, []int{1, 32, 8, 32, 32, 6}) {
			t.Fatalf("sent %v", got)
		}
		close(release)
		callers.Wait()
	})
}

func TestWhoLeavesTakesNobodyAlong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		fake := &fakePost{answer: func(ctx context.Context, texts []string, _ string) ([]byte, error) {
			select {
			case <-release:
				return goodAnswer(texts, true), nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}}
		e := endpoint(t, EndpointConfig{Post: fake.post})
		ctx, leave := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		callers.Go(func() { _, _ = e.Embed(t.Context(), []string{"holds the way"}) })
		synctest.Wait()
		callers.Go(func() {
			if _, err := e.Embed(ctx, []string{"leaves"}); !errors.Is(err, context.Canceled) {
				t.Errorf("who left got %v", err)
			}
		})
		callers.Go(func() {
			if _, err := e.Embed(t.Context(), []string{"stays"}); err != nil {
				t.Errorf("who stayed got %v", err)
			}
		})
		time.Sleep(gatherFor)
		leave()
		synctest.Wait()
		close(release)
		callers.Wait()
	})
}

func TestServerThatFailsRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dead := true
		fake := &fakePost{}
		fake.answer = func(ctx context.Context, texts []string, _ string) ([]byte, error) {
			if dead {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return goodAnswer(texts, true), nil
		}
		e := endpoint(t, EndpointConfig{Post: fake.post, Timeout: time.Second})
		ask := func(want Kind) {
			t.Helper()
			if _, err := e.Embed(t.Context(), []string{"a"}); kindOf(err) != want {
				t.Fatalf("after %d requests: %v, want one that is %q", fake.asked(), err, want)
			}
		}
		for range failuresToRest {
			ask(Unavailable)
		}
		ask(Resting)
		time.Sleep(restFirst)
		// Half open: one tries, and the others need not wait for what comes of it.
		var trial sync.WaitGroup
		trial.Go(func() { ask(Unavailable) })
		synctest.Wait()
		ask(Resting)
		trial.Wait()
		time.Sleep(restFirst)
		ask(Resting) // it rests twice as long
		time.Sleep(restFirst)
		dead = false
		ask("")
		ask("")
		if got := fake.asked(); got != failuresToRest+4 {
			t.Errorf("%d requests, want %d", got, failuresToRest+4)
		}
	})
}

func TestRestIsBounded(t *testing.T) {
	var b breaker
	now := time.Unix(0, 0)
	for range 100 {
		if !b.admit(now) {
			t.Fatal("not admitted after the rest")
		}
		rest := b.heard(now, false)
		if rest > restMost {
			t.Fatalf("rests for %s", rest)
		}
		now = now.Add(rest)
	}
	if b.rest != restMost {
		t.Errorf("rests for %s, want %s", b.rest, restMost)
	}
	if b.admit(now); b.heard(now, true) != 0 || b != (breaker{}) {
		t.Errorf("an answer left %+v", b)
	}
}

func TestOneTextDoesNotFailTheOthers(t *testing.T) {
	for name, status := range map[string]int{"413": 413, "400": 400, "422": 422} {
		t.Run(name, func(t *testing.T) {
			fake := &fakePost{answer: func(_ context.Context, texts []string, _ string) ([]byte, error) {
				if slices.Contains(texts, "poison") {
					return nil, fmt.Errorf("post: %w", &StatusError{status})
				}
				return goodAnswer(texts, true), nil
			}}
			e := endpoint(t, EndpointConfig{Post: fake.post})
			seats, err := e.board([]string{"good", "poison", "fine"})
			if err != nil {
				t.Fatal(err)
			}
			b := seats[0].batch
			<-b.done
			checkVector(t, "good", b.vectors[0])
			checkVector(t, "fine", b.vectors[2])
			_, err = e.Embed(t.Context(), []string{"good", "poison"})
			if status == 413 {
				if long, ok := errors.AsType[*TooLongError](err); !ok || long.Index != 1 {
					t.Errorf("%v, want that text 1 is too long", err)
				}
			} else if kindOf(err) != Refused {
				t.Errorf("%v, want that it is refused", err)
			}
			for range 2 * failuresToRest { // what a server thinks of a text says nothing of its health
				_, _ = e.Embed(t.Context(), []string{"poison"})
			}
			if _, err := e.Embed(t.Context(), []string{"good"}); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestPlainNumbersWhereBase64IsNotTaken(t *testing.T) {
	fake := &fakePost{}
	fake.answer = func(_ context.Context, texts []string, format string) ([]byte, error) {
		if format != "float" {
			return nil, &StatusError{400}
		}
		return goodAnswer(texts, false), nil
	}
	e := endpoint(t, EndpointConfig{Post: fake.post})
	for range 2 {
		vectors, err := e.Embed(t.Context(), []string{"a", "bb"})
		if err != nil {
			t.Fatal(err)
		}
		checkVector(t, "bb", vectors[1])
	}
	if want := []string{"base64", "float", "float", "float"}; !slices.Equal(fake.formats, want) {
		t.Errorf("asked for %v, want %v", fake.formats, want)
	}
}

func TestWhatIsNeverSent(t *testing.T) {
	fake := &fakePost{}
	e := endpoint(t, EndpointConfig{Post: fake.post, MaxBytes: 10})
	_, err := e.Embed(t.Context(), []string{"short", strings.Repeat("x", 11)})
	if long, ok := errors.AsType[*TooLongError](err); !ok || long.Index != 1 {
		t.Errorf("%v, want that text 1 is too long", err)
	}
	if _, err := e.Embed(t.Context(), make([]string, maxWaiting+1)); kindOf(err) != Overloaded {
		t.Errorf("%v, want that it is overloaded", err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.Embed(done, []string{"a"}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want that it was cancelled", err)
	}
	if vectors, err := e.Embed(t.Context(), nil); err != nil || len(vectors) != 0 {
		t.Errorf("%v, %v for nothing", vectors, err)
	}
	e.Close()
	if _, err := e.Embed(t.Context(), []string{"a"}); kindOf(err) != Unavailable {
		t.Errorf("%v after Close", err)
	}
	if len(fake.sizes()) != 0 {
		t.Errorf("sent %v", fake.batches)
	}
}

func TestCloseEndsWhatIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &fakePost{answer: func(ctx context.Context, _ []string, _ string) ([]byte, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}
		e := endpoint(t, EndpointConfig{Post: fake.post, Timeout: time.Hour})
		var callers sync.WaitGroup
		for range 100 * maxBatch / 10 {
			callers.Go(func() {
				if _, err := e.Embed(t.Context(), []string{"a"}); kindOf(err) != Unavailable {
					t.Errorf("%v, want that it is unavailable", err)
				}
			})
		}
		synctest.Wait()
		e.Close()
		callers.Wait()
		if e.waiting != 0 || e.sent != 0 || len(e.ready) != 0 {
			t.Errorf("%d texts wait, %d batches are under way, %d ready", e.waiting, e.sent, len(e.ready))
		}
	})
}

func TestEndpointConfigsThatCannotBe(t *testing.T) {
	post := func(context.Context, []byte) ([]byte, error) { return nil, nil }
	for _, c := range []EndpointConfig{
		{Version: "v", Post: post},
		{Model: "m", Post: post},
		{Model: "m", Version: "v"},
		{Model: "m", Version: "v", Post: post, Dim: maxDim + 1},
		{Model: "m", Version: "v", Post: post, Timeout: -1},
	} {
		if _, err := NewEndpoint(c); err == nil {
			t.Errorf("no error for %+v", c)
		}
	}
}

func FuzzParseAnswer(f *testing.F) {
	f.Add(goodAnswer([]string{"a", "bb"}, true), 2, 3)
	f.Add(goodAnswer([]string{"a"}, false), 1, 0)
	f.Add([]byte(`{"data":[{"embedding":[1e38,1e38]}]}`), 1, 2)
	f.Fuzz(func(t *testing.T, answer []byte, n, dim int) {
		n, dim = n&31, dim&1023
		vectors, err := parseAnswer(answer, n, dim)
		if err != nil {
			return
		}
		if len(vectors) != n {
			t.Fatalf("%d vectors for %d", len(vectors), n)
		}
		for _, v := range vectors {
			if dim != 0 && len(v) != dim || len(v) != len(vectors[0]) || check(v, len(v)) != nil {
				t.Fatalf("%v of %d", v, dim)
			}
		}
	})
}
