package embed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"headgate/cache/vec"
)

const (
	maxBatch      = 32                   // texts of a request to the server
	gatherFor     = 2 * time.Millisecond // how long a batch waits for more, while others are under way
	maxFlying     = 8                    // batches under way
	maxWaiting    = 1024                 // texts of all batches, under way and not
	maxAnswer     = 8 << 20              // bytes: 32 vectors of 8,192 numbers of 30 letters
	maxDim        = 8192
	defaultWindow = 2000 // bytes of a text: some 500 tokens of plain language

	// A server that failed so often in a row rests, for twice as long each time.
	failuresToRest = 5
	restFirst      = time.Second
	restMost       = 30 * time.Second
)

// EndpointConfig says how an Endpoint asks its server.
type EndpointConfig struct {
	// Model is the name in the request.
	Model string

	// Version is what Version says: whatever changes the vectors must change it.
	Version string

	// Dim is the length of the vectors; 0: that of the first answer, until eight in a row have
	// another. Whoever keeps vectors has to look at their length then.
	Dim int

	// Post sends the body of a request to /v1/embeddings and gives the body of an answer of 200.
	// For another status the error has a method Status() int (errors.As). It is called by up
	// to eight goroutines and must heed ctx. Its errors are logged: they have nothing of the body in them. HTTPPost makes one.
	Post func(ctx context.Context, body []byte) (answer []byte, err error)

	// Timeout bounds one request, and the check of the server before it; 0: two seconds.
	Timeout time.Duration

	// MaxBytes bounds a text: longer ones are a TooLongError before anybody is asked, as servers
	// cut silently what is beyond their model's window. 0: 2,000 bytes, for models of 512 tokens.
	MaxBytes int

	// Logger hears when the server begins to fail and to rest, of which kind and why, when it is back, and
	// when its vectors have another length; each once, and never a text. nil: nobody does.
	Logger *slog.Logger
}

// Validate says what is missing.
func (c *EndpointConfig) Validate() error {
	switch {
	case c.Model == "":
		return errors.New("embed endpoint: model is missing: name the model that the server is to use")
	case c.Version == "":
		return errors.New("embed endpoint: version is missing: it keeps the vectors of two models apart")
	case c.Post == nil:
		return errors.New("embed endpoint: post is missing")
	case c.Dim < 0 || c.Dim > maxDim:
		return fmt.Errorf("embed endpoint: dim is %d, want at most %d", c.Dim, maxDim)
	case c.Timeout < 0 || c.MaxBytes < 0:
		return errors.New("embed endpoint: timeout and max_bytes must not be negative")
	}
	return nil
}

// Endpoint embeds by asking a server that speaks OpenAI's /v1/embeddings.
//
// Texts of several callers go in one request: a text that comes while nothing is under
// way goes at once, others wait up to two milliseconds for company. A caller that leaves does
// not take the request of the others with it. A request that is refused is sent again
// text by text, so that one text cannot fail those it travelled with. Vectors are checked (as many as
// texts, of one length, finite) and made unit length. All vectors of a call have one length.
//
// Before a server is first believed, again after each rest, and when its vectors have another length than before, it
// embeds two sentences that have nothing in common, once for all who wait. As long as it has them alike,
// all is Malformed, and the server has failed.
//
// A server that fails five times in a row is left alone for a second, then for twice as long each
// time, up to 30 s; then one request tries whether it is back.
type Endpoint struct {
	config EndpointConfig
	ctx    context.Context // ended by Close: requests belong to nobody in particular
	cancel context.CancelFunc
	flying sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	gathering *batch // takes texts, and is not sent yet
	sent      int    // batches under way
	waiting   int    // texts of all batches
	ready     []*batch
	dim       int
	other     int // the length of the latest answers, where that is not dim
	others    int // how many of them, in a row
	encoding  encoding
	breaker   breaker
	cause     error // of the latest rest
	proven    bool  // the server stood its check
	proving   bool  // a batch under way began with the check: no other goes before its end

	told     condition // what the log knows of the server
	toldKind Kind      // why it rests
	toldAt   time.Time // when the log heard last that it fails
}

// batch is one request to the server, shared by whoever has texts in it.
type batch struct {
	texts   []string
	timer   *time.Timer
	done    chan struct{} // closed when vectors and errs are there
	vectors [][]float32
	errs    []error // one for each text; nil where it has a vector
}

// NewEndpoint gives an endpoint that has asked nobody yet.
func NewEndpoint(config EndpointConfig) (*Endpoint, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	if config.Timeout == 0 {
		config.Timeout = 2 * time.Second
	}
	if config.MaxBytes == 0 {
		config.MaxBytes = defaultWindow
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	e := &Endpoint{config: config, dim: config.Dim}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e, nil
}

// Version is the configured one.
func (e *Endpoint) Version() string { return e.config.Version }

// Dim is the length of the vectors, or 0 as long as neither configuration nor an answer has told it. It may
// change where it is not configured.
func (e *Endpoint) Dim() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.dim
}

// Concurrency is how many calls of Embed are worth having at a time: as many texts as travel.
func (e *Endpoint) Concurrency() int { return maxFlying * maxBatch }

// Close ends the requests under way and waits for them. Embed fails from then on.
func (e *Endpoint) Close() {
	e.mu.Lock()
	e.closed = true
	e.cancel()
	if b := e.gathering; b != nil {
		e.launch(b)
	}
	e.mu.Unlock()
	e.flying.Wait()
}

// Embed asks the server. See Embedder.
func (e *Endpoint) Embed(ctx context.Context, texts []string) ([][]float32, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for i, text := range texts {
		if len(text) > e.config.MaxBytes {
			return nil, &TooLongError{Index: i}
		}
	}
	seats, err := e.board(texts)
	if err != nil {
		return nil, err
	}
	return collect(ctx, seats)
}

// collect waits for the vectors of some texts.
func collect(ctx context.Context, seats []seat) ([][]float32, error) {
	vectors := make([][]float32, len(seats))
	for i, s := range seats {
		select {
		case <-s.batch.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if err := s.batch.errs[s.at]; err != nil {
			return nil, indexed(err, i)
		}
		vectors[i] = s.batch.vectors[s.at]
	}
	return ofOneLength(vectors)
}

// indexed is err, speaking of the text at i.
func indexed(err error, i int) error {
	if long, ok := errors.AsType[*TooLongError](err); ok {
		return &TooLongError{Index: i, Tokens: long.Tokens, Limit: long.Limit}
	}
	return err
}

// seat is where a text travels.
type seat struct {
	batch *batch
	at    int
}

// board gives each text a seat, all or none.
func (e *Endpoint) board(texts []string) ([]seat, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		return nil, &Error{Kind: Unavailable, Reason: "the endpoint is closed"}
	case e.breaker.resting(time.Now()):
		return nil, e.resting()
	case e.waiting+len(texts) > maxWaiting:
		return nil, &Error{Kind: Overloaded, Reason: fmt.Sprintf("%d texts wait for the server already", e.waiting)}
	}
	e.waiting += len(texts)
	seats := make([]seat, len(texts))
	for i, text := range texts {
		if e.gathering == nil {
			e.gathering = &batch{done: make(chan struct{})}
		}
		b := e.gathering
		seats[i] = seat{b, len(b.texts)}
		b.texts = append(b.texts, text)
		if len(b.texts) == maxBatch {
			e.launch(b)
		}
	}
	if b := e.gathering; b != nil && b.timer == nil {
		if e.sent == 0 {
			e.launch(b)
		} else {
			b.timer = time.AfterFunc(gatherFor, func() {
				e.mu.Lock()
				defer e.mu.Unlock()
				if e.gathering == b {
					e.launch(b)
				}
			})
		}
	}
	return seats, nil
}

// resting is the error of a text for which the server is not asked. e.mu is held.
func (e *Endpoint) resting() error {
	return &Error{Kind: Resting, Reason: "the server failed too often just now", Err: e.cause}
}

// launch sends a batch that was gathering, or has it wait for its turn. e.mu is held.
func (e *Endpoint) launch(b *batch) {
	e.gathering = nil
	if b.timer != nil {
		b.timer.Stop()
	}
	e.ready = append(e.ready, b)
	e.next()
}

// next sends what is ready as far as there is room. After a failure it tries with one batch
// at a time only, and while the server is checked with none. e.mu is held.
func (e *Endpoint) next() {
	for len(e.ready) > 0 && e.sent < maxFlying && !e.proving {
		b := e.ready[0]
		e.ready = e.ready[1:]
		if !e.closed && !e.breaker.admit(time.Now()) {
			e.land(b, failed(len(b.texts), e.resting()))
			continue
		}
		e.sent++
		prove := !e.proven
		e.proving = prove
		e.flying.Go(func() { e.fly(b, prove) })
	}
}

// land gives a batch to who waits for it. e.mu is held.
func (e *Endpoint) land(b *batch, r result) {
	b.vectors, b.errs = r.vectors, r.errs
	e.waiting -= len(b.texts)
	close(b.done)
}

// fly sends a batch, after a check of the server if that is due, and gives it to who waits for it.
func (e *Endpoint) fly(b *batch, prove bool) {
	ctx, cancel := context.WithTimeout(e.ctx, e.config.Timeout)
	defer cancel()
	var unproven error
	if prove {
		unproven = e.prove(ctx)
	}
	var r result
	if unproven != nil {
		r = failed(len(b.texts), unproven)
	} else {
		r = e.ask(ctx, b.texts)
	}

	e.mu.Lock()
	defer e.mu.Unlock()
	e.sent--
	if unproven != nil {
		e.proving = false
	}
	if !e.closed {
		now := time.Now()
		rest := e.breaker.heard(now, r.healthy)
		if rest > 0 {
			e.proven, e.cause = false, r.cause()
		}
		e.tell(now, r.cause(), rest)
	}
	e.land(b, r)
	e.next()
	if e.sent == 0 && e.gathering != nil {
		e.launch(e.gathering)
	}
}

// result is what came of the texts of one batch.
type result struct {
	vectors [][]float32
	errs    []error
	healthy bool // the server works, whatever it thinks of these texts
}

func failed(n int, err error) result {
	errs := make([]error, n)
	for i := range errs {
		errs[i] = err
	}
	return result{vectors: make([][]float32, n), errs: errs}
}

// cause is why the server is not healthy; nil where it is.
func (r *result) cause() error {
	if r.healthy {
		return nil
	}
	return r.errs[len(r.errs)-1] // what failed the server failed all texts from there on
}

// first is the first text's error that has one.
func (r *result) first() error {
	for _, err := range r.errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// ask sends texts together, and where that is refused one by one.
func (e *Endpoint) ask(ctx context.Context, texts []string) result {
	vectors, err := e.post(ctx, texts)
	if err == nil {
		return result{vectors: vectors, errs: make([]error, len(texts)), healthy: true}
	}
	if !ofTheText(err) || len(texts) == 1 {
		r := failed(len(texts), err)
		r.healthy = ofTheText(err)
		return r
	}
	all := failed(len(texts), err)
	all.healthy = true
	for i, text := range texts {
		one, err := e.post(ctx, []string{text})
		all.errs[i] = err
		if err != nil && !ofTheText(err) {
			all.healthy = false
			for j := i; j < len(texts); j++ {
				all.errs[j] = err
			}
			break
		}
		if err == nil {
			all.vectors[i] = one[0]
		}
	}
	return all
}

// post sends one request, in the encoding that the server takes.
func (e *Endpoint) post(ctx context.Context, texts []string) ([][]float32, error) {
	e.mu.Lock()
	with := e.encoding
	e.mu.Unlock()
	answer, err := e.send(ctx, texts, with)
	if with == base64Untried && err != nil && ofTheText(err) {
		if plain, again := e.send(ctx, texts, plainNumbers); again == nil {
			answer, err, with = plain, nil, plainNumbers
		}
	}
	if err != nil {
		return nil, err
	}
	vectors, err := parseAnswer(answer, len(texts), e.config.Dim)
	if err != nil {
		return nil, &Error{Kind: Malformed, Reason: "the server's answer", Err: err}
	}
	for _, v := range vectors {
		vec.Norm(v)
	}
	return vectors, e.learn(with, len(vectors[0]))
}

// send posts one body and says what kind of failure an error is.
func (e *Endpoint) send(ctx context.Context, texts []string, with encoding) ([]byte, error) {
	answer, err := e.config.Post(ctx, requestBody(e.config.Model, texts, with))
	if err == nil {
		if len(answer) > maxAnswer {
			return nil, &Error{Kind: Malformed, Reason: "an answer of more than 8 MiB"}
		}
		return answer, nil
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, &Error{Kind: Unavailable, Reason: "no answer in " + e.config.Timeout.String(), Err: err}
	}
	if status, ok := errors.AsType[interface {
		error
		Status() int
	}](err); ok {
		return nil, ofStatus(status.Status(), err)
	}
	return nil, &Error{Kind: Unavailable, Reason: "the server did not answer", Err: err}
}

func ofStatus(status int, err error) error {
	reason := fmt.Sprintf("the server answered %d", status)
	switch {
	case status == 413:
		return &TooLongError{}
	case status == 408 || status == 429 || status >= 500 || status < 400:
		return &Error{Kind: Unavailable, Reason: reason, Err: err}
	default:
		return &Error{Kind: Refused, Reason: reason, Err: err}
	}
}

// ofTheText is whether err may speak of the texts rather than of the server: another text may fare better.
func ofTheText(err error) bool {
	if _, ok := errors.AsType[*TooLongError](err); ok {
		return true
	}
	e, ok := errors.AsType[*Error](err)
	if !ok || e.Kind != Refused {
		return false
	}
	status, ok := errors.AsType[interface {
		error
		Status() int
	}](err)
	return ok && (status.Status() == 400 || status.Status() == 422)
}

// breaker leaves a failing server alone. The zero value trusts it. The endpoint's mutex guards it.
type breaker struct {
	failures int // in a row
	rest     time.Duration
	until    time.Time // of the rest; zero: none
	trying   bool      // after a rest one request is under way, to see
}

// resting is whether a text need not wait to be told that the server rests.
func (b *breaker) resting(now time.Time) bool {
	return !b.until.IsZero() && (b.trying || now.Before(b.until))
}

// admit is whether a request may go.
func (b *breaker) admit(now time.Time) bool {
	if b.resting(now) {
		return false
	}
	b.trying = !b.until.IsZero()
	return true
}

// heard takes what became of a request, and gives how long the server rests if that begins now.
func (b *breaker) heard(now time.Time, healthy bool) time.Duration {
	if healthy {
		*b = breaker{}
		return 0
	}
	b.failures++
	if b.failures < failuresToRest || !b.until.IsZero() && !b.trying {
		return 0 // one that went before the rest began
	}
	b.trying = false
	b.rest = min(max(2*b.rest, restFirst), restMost)
	b.until = now.Add(b.rest)
	return b.rest
}
