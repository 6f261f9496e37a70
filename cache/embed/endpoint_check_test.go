package embed

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headgate/cache/embed/embedtest"
)

// numbers answers with vectors of dim numbers, which differ from text to text; or, same, which do not.
func numbers(texts []string, dim int, same bool) []byte {
	type item struct {
		Index     int       `json:"index"`
		Embedding []float32 `json:"embedding"`
	}
	var data []item
	for i, text := range texts {
		v := make([]float32, dim)
		v[0] = 1
		if !same {
			v[1+len(text)%(dim-1)] = 2
		}
		data = append(data, item{i, v})
	}
	answer, err := json.Marshal(map[string]any{"data": data})
	if err != nil {
		panic(err)
	}
	return answer
}

// sage is a server that can change, and the log of the endpoint before it.
type sage struct {
	t    *testing.T
	e    *Endpoint
	fake *fakePost

	mu   sync.Mutex
	dim  int
	same bool
	err  error // instead of an answer
	says string

	log bytes.Buffer // written under the endpoint's mutex
}

const secret = "my salary is 4321"

func newSage(t *testing.T, config EndpointConfig) *sage {
	t.Helper()
	s := &sage{t: t, fake: &fakePost{}, dim: 8}
	s.fake.answer = func(_ context.Context, texts []string, _ string) ([]byte, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		switch {
		case s.err != nil:
			return nil, s.err
		case s.says != "":
			return []byte(s.says), nil
		}
		return numbers(texts, s.dim, s.same), nil
	}
	config.Post, config.Logger = s.fake.post, slog.New(slog.NewTextHandler(&s.log, nil))
	s.e = endpoint(t, config)
	return s
}

func (s *sage) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *sage) ask() Kind {
	s.t.Helper()
	vectors, err := s.e.Embed(s.t.Context(), []string{secret, secret + "2"})
	if err == nil && len(vectors[0]) != s.e.Dim() {
		s.t.Errorf("a vector of %d numbers, and Dim says %d", len(vectors[0]), s.e.Dim())
	}
	return kindOf(err)
}

func (s *sage) want(why string, want Kind) {
	s.t.Helper()
	if got := s.ask(); got != want {
		s.t.Fatalf("%s: %q, want %q", why, got, want)
	}
}

// until asks once in each rest until an answer comes.
func (s *sage) until(why string) (asked int) {
	s.t.Helper()
	for s.ask() != "" {
		if asked++; asked > 100 {
			s.t.Fatalf("%s: no answer", why)
		}
		time.Sleep(restFirst)
	}
	return asked
}

// lines are the messages of the log since the last look, with the kind where there is one.
func (s *sage) lines() (lines []string) {
	s.t.Helper()
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	all := s.log.String()
	s.log.Reset()
	if strings.Contains(all, "salary") || strings.Contains(all, "4321") {
		s.t.Errorf("the log has a text in it: %s", all)
	}
	for line := range strings.Lines(all) {
		if !strings.Contains(line, "level=WARN") || !strings.Contains(line, "model=m") {
			s.t.Errorf("logged %s", line)
		}
		_, rest, _ := strings.Cut(line, `msg="the embedding server `)
		message, fields, _ := strings.Cut(rest, `"`)
		if _, kind, ok := strings.Cut(fields, "kind="); ok {
			message += " " + strings.Fields(kind)[0]
			if !strings.Contains(fields, "reason=") {
				s.t.Errorf("no reason: %s", line)
			}
		}
		lines = append(lines, message)
	}
	return lines
}

func (s *sage) logged(why string, want ...string) {
	s.t.Helper()
	if got := s.lines(); !slices.Equal(got, want) {
		s.t.Errorf("%s: logged %q, want %q", why, got, want)
	}
}

func TestAnotherLengthIsLearntAfterAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSage(t, EndpointConfig{})
		s.want("the first", "")
		s.set(func() { s.dim = 16 })
		for range lengthsToLearn - 4 {
			s.want("another length", Malformed)
		}
		s.set(func() { s.dim = 8 })
		s.want("the old one", "")
		s.set(func() { s.dim = 16 })
		asked := s.until("after the old one again")
		if asked < lengthsToLearn || s.e.Dim() != 16 || s.fake.asked() < 2*lengthsToLearn-4 {
			t.Errorf("learnt %d numbers after %d tries", s.e.Dim(), asked)
		}
		for range 3 * lengthsToLearn {
			s.want("from then on", "")
		}
		s.set(func() { s.dim = 8 })
		s.until("back")
		if s.e.Dim() != 8 {
			t.Errorf("%d numbers", s.e.Dim())
		}
		got := s.lines()
		if !slices.Contains(got, "gives vectors of another length from now on") {
			t.Errorf("logged %q", got)
		}
	})
}

// TestWhatIsLearntWithALength: the eighth in a row, and then the server is checked, without a rest before.
func TestWhatIsLearntWithALength(t *testing.T) {
	s := newSage(t, EndpointConfig{})
	s.want("the first", "")
	s.e.breaker = breaker{failures: failuresToRest, rest: restMost, until: time.Now().Add(restMost)}
	for i := range lengthsToLearn {
		if s.e.Dim() != 8 || !s.e.proven || s.e.breaker == (breaker{}) {
			t.Fatalf("learnt after %d", i)
		}
		if err := s.e.learn(base64Taken, 16); kindOf(err) != Malformed {
			t.Fatalf("%v of answer %d", err, i)
		}
	}
	if s.e.Dim() != 16 || s.e.proven || s.e.breaker != (breaker{}) {
		t.Errorf("%d numbers, proven %v, %+v", s.e.Dim(), s.e.proven, s.e.breaker)
	}
	s.set(func() { s.dim = 16 })
	s.want("checked", "")
	if s.fake.checks != 2 {
		t.Errorf("%d checks", s.fake.checks)
	}
}

func TestALengthThatIsConfiguredStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSage(t, EndpointConfig{Dim: 8})
		s.set(func() { s.dim = 16 })
		for range 4 * lengthsToLearn {
			if kind := s.ask(); kind != Malformed && kind != Resting {
				t.Fatalf("%q", kind)
			}
			time.Sleep(restMost)
		}
		if s.e.Dim() != 8 {
			t.Errorf("%d numbers", s.e.Dim())
		}
		s.set(func() { s.dim = 8 })
		s.want("as configured", "")
	})
}

// TestLengthsThatTakeTurnsAreNotLearnt: two servers behind one name. What comes is of one length.
func TestLengthsThatTakeTurnsAreNotLearnt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSage(t, EndpointConfig{})
		s.want("the first", "")
		for i := range 10 * lengthsToLearn {
			s.set(func() { s.dim = 16 + i%2 })
			if kind := s.ask(); kind == "" {
				t.Fatal("an answer of no length that is known")
			}
			time.Sleep(restMost)
		}
		if s.e.Dim() != 8 {
			t.Errorf("%d numbers", s.e.Dim())
		}
	})
}

// TestOneCallHasVectorsOfOneLength: the length was learnt anew between two requests of one call.
func TestOneCallHasVectorsOfOneLength(t *testing.T) {
	b := &batch{texts: []string{"a", "b"}, vectors: [][]float32{{1, 0}, {1, 0, 0}}, errs: make([]error, 2), done: make(chan struct{})}
	close(b.done)
	if v, err := collect(t.Context(), []seat{{b, 0}, {b, 1}}); kindOf(err) != Malformed {
		t.Errorf("%v, %v", v, err)
	}
	if v, err := collect(t.Context(), []seat{{b, 1}, {b, 1}}); err != nil || len(v[1]) != 3 {
		t.Errorf("%v, %v", v, err)
	}
}

func TestServerThatTellsNoTextsApartIsNotBelieved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSage(t, EndpointConfig{})
		s.set(func() { s.same = true })
		for range failuresToRest {
			s.want("all texts alike", Malformed)
		}
		for range 10 {
			s.want("it rests", Resting)
		}
		if n := s.fake.asked(); n != failuresToRest || len(s.fake.sizes()) != 0 {
			t.Errorf("asked %d times, and for texts %v", n, s.fake.sizes())
		}
		s.logged("alike", "fails malformed", "rests malformed")
		for range 10 {
			time.Sleep(restMost)
			s.want("alike still", Malformed)
		}
		s.set(func() { s.same = false })
		time.Sleep(restMost)
		s.want("no more", "")
		s.logged("no more", "is back")
		before := s.fake.checks
		for range 10 {
			s.want("from then on", "")
		}
		if s.fake.checks != before {
			t.Errorf("checked %d times without need", s.fake.checks-before)
		}
	})
}

// TestServerIsCheckedWhenItIsBack: what came back may be another model; and what has another length is one.
func TestServerIsCheckedWhenItIsBack(t *testing.T) {
	for name, change := range map[string]func(*sage){
		"after a rest":    func(s *sage) { s.err = &StatusError{503} },
		"another length":  func(s *sage) { s.dim = 16; s.same = true },
		"none of the two": func(s *sage) { s.says = "{" },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSage(t, EndpointConfig{})
				s.want("the first", "")
				s.set(func() { change(s) })
				for range 4 * lengthsToLearn {
					if s.ask() == "" {
						t.Fatal("believed")
					}
					time.Sleep(restMost)
				}
				s.set(func() { s.err, s.says, s.same = nil, "", true })
				for range 4 * lengthsToLearn {
					if s.ask() == "" {
						t.Fatal("believed without a check")
					}
					time.Sleep(restMost)
				}
				s.set(func() { s.same = false })
				s.want("in order again", "")
			})
		})
	}
}

// TestOneChecksForAll: who comes while a server is checked waits for that, and is answered.
func TestOneChecksForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		fake := &fakePost{}
		fake.answer = func(_ context.Context, texts []string, _ string) ([]byte, error) {
			<-release
			return goodAnswer(texts, true), nil
		}
		e := endpoint(t, EndpointConfig{Post: fake.post})
		var callers sync.WaitGroup
		for range 3 * maxFlying * maxBatch / 4 {
			callers.Go(func() {
				if _, err := e.Embed(t.Context(), []string{"a"}); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(gatherFor)
		synctest.Wait()
		if n := fake.asked(); n != 1 || fake.checks != 1 {
			t.Errorf("asked %d times, checked %d", n, fake.checks)
		}
		release <- struct{}{}
		synctest.Wait()
		if n := len(fake.sizes()); n < 6 {
			t.Errorf("%d requests at a time after the check", n)
		}
		close(release)
		callers.Wait()
		if fake.checks != 1 {
			t.Errorf("checked %d times", fake.checks)
		}
	})
}

// TestRefusedCheckIsNotOfTheTexts: a server that takes not even the two sentences fails; the callers' texts are not too long.
func TestRefusedCheckIsNotOfTheTexts(t *testing.T) {
	for _, status := range []int{400, 413, 422} {
		synctest.Test(t, func(t *testing.T) {
			s := newSage(t, EndpointConfig{})
			s.set(func() { s.err = &StatusError{status} })
			for range failuresToRest {
				s.want(fmt.Sprint(status), Refused)
			}
			s.want("afterwards", Resting)
			if _, err := s.e.Embed(t.Context(), []string{"a"}); !strings.Contains(err.Error(), "refused") || ofTheText(err) {
				t.Errorf("it rests, and why is not said: %v", err)
			}
		})
	}
}

func TestServerThatHashesWordsPasses(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var in struct{ Input []string }
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			t.Error(err)
		}
		type item struct {
			Index     int       `json:"index"`
			Embedding []float32 `json:"embedding"`
		}
		var data []item
		for i, text := range in.Input {
			data = append(data, item{i, embedtest.Vector(text)})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"data": data})
	}))
	defer server.Close()
	post, err := HTTPPost(server.Client(), server.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := endpoint(t, EndpointConfig{Post: post, Timeout: time.Minute}).Embed(t.Context(), []string{"some words"}); err != nil {
		t.Error(err)
	}
}

func TestStatesOfTheServerAreLoggedOnce(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*sage)
		kind   string
	}{
		"500":     {func(s *sage) { s.err = fmt.Errorf("backend b: %w", &StatusError{500}) }, "unavailable"},
		"429":     {func(s *sage) { s.err = &StatusError{429} }, "unavailable"},
		"404":     {func(s *sage) { s.err = &StatusError{404} }, "refused"},
		"hangs":   {func(s *sage) { s.err = context.DeadlineExceeded }, "unavailable"},
		"lengths": {func(s *sage) { s.dim = 16 }, "malformed"},
		"garbage": {func(s *sage) { s.says = `"` + secret }, "malformed"},
		"echo":    {func(s *sage) { s.says = `{"data":"` + secret + `"}` }, "malformed"},
		"number":  {func(s *sage) { s.says = `{"data":[{"embedding":[4321e4321]}]}` }, "malformed"},
		"key":     {func(s *sage) { s.says = `{"data":[{"embedding":{"` + secret + `":1}}]}` }, "malformed"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSage(t, EndpointConfig{Dim: 8})
				s.want("the first", "")
				s.logged("in order")
				s.set(func() { c.change(s) })
				s.ask()
				s.logged("the first failure", "fails "+c.kind)
				for range failuresToRest - 2 {
					s.ask()
				}
				s.logged("more of them")
				s.ask()
				s.logged("the last", "rests "+c.kind)
				for range 20 {
					s.ask()
					time.Sleep(restMost)
				}
				s.logged("longer and longer")
				s.set(func() { s.dim, s.err, s.says = 8, nil, "" })
				s.want("in order again", "")
				s.logged("in order again", "is back")
				s.want("and again", "")
				s.logged("and again")
			})
		})
	}
}

// TestLogIsBounded: a server that fails every other time is told of once a minute, and what it rests for anew when that is something else.
func TestLogIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSage(t, EndpointConfig{})
		for i := range 1000 {
			s.set(func() {
				if s.err = nil; i%2 == 1 {
					s.err = &StatusError{429}
				}
			})
			s.ask()
		}
		s.logged("every other time", "fails unavailable", "is back")
		time.Sleep(failsEvery)
		s.set(func() { s.err = &StatusError{429} })
		s.ask()
		s.logged("a minute later", "fails unavailable")
		for range 2 * failuresToRest {
			s.ask()
		}
		s.logged("at length", "rests unavailable")
		s.set(func() { s.err = &StatusError{404} })
		for range 10 {
			time.Sleep(restMost)
			s.ask()
		}
		s.logged("for another reason", "rests refused")
	})
}
