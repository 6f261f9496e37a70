// Package upstream is the gateway's view of the model servers: which exist, which are alive
// and well, how much each has in flight, and the connections to them.
//
// # Purpose
//
// A [Pool] holds the policy's backends. A backend is one address (http://, https://) or a
// headless service (dns://), every address of which is an endpoint with a load count and a
// health of its own. [Pool.Candidates] says which of a model's endpoints may take a request
// now, best first; [Pool.Hold] counts it in at the one that was chosen, with the cluster's
// lease on a slot where the endpoint has bounded ones; the [Slot] sends the request, reads
// what the answer says of the endpoint, and gives the place back. [Pool.Run] probes health,
// re-resolves names, reads changed keys and judges outliers.
//
// # Invariants
//
//   - An endpoint that is down, drained, ejected, paused or behind an open breaker gets no
//     request; one that is half open gets one at a time.
//   - A slot, and the lease with it, is given back exactly once, however often Release is
//     called, also across a policy change and a DNS flap.
//   - A request is offered for another attempt only before a byte of its answer's body
//     arrived: as [Retryable] if the backend cannot have received it whole, as [Replayable]
//     if it may have, and brought nothing. Whether the second kind may be done twice is
//     the caller's to say; [Pool.MayRetry] bounds both. No request is ever sent to two at once.
//   - Of a model's endpoints at most half are ejected, and never the last that takes
//     requests.
//   - No pause is longer than a minute.
//   - No goroutine outlives Run; no map, queue, body or answer here grows without a
//     named bound.
//
// # Health
//
// unknown → up | down. An endpoint is up after one good probe or any answer below 500, down
// after two failed probes or three failed dials in a row. A down one gets no requests and
// is probed with a growing pause. An unknown one, which is how those that are probed begin,
// comes after all that are up, so that a gateway answers before its first probes return. A
// probe that is late while answers bring bytes counts for nothing: vLLM's /health is slow
// under load. Commercial kinds are not probed and count as up.
//
// # Breakers
//
// Health is what a server says of itself; a breaker is what its answers say. Failures are
// dials, resets, answers that are no HTTP, 502, 503, 504, broken-off bodies, timeouts of
// the policy's first_byte and idle, what [Slot.Fail] reports, and a caller's own timeout of
// ten seconds or more during which nobody got a byte. Plain 500s count half, since the
// request may be at fault; what the client left, and any 4xx, count for nothing. Five in a
// row, or half of twenty within ten seconds, open the breaker. After five seconds one
// request may try; the first byte of a good answer closes it, a failure doubles the pause.
//
// The pauses of breakers, ejections and of coming up again share one count of how often an
// endpoint failed soon after it had come back, of which each calm minute forgives one: one
// that flaps each second is tried ever more rarely, and one crash with fifty requests in
// flight counts once. Where requests come and no other endpoint takes them, it is looked
// after each five seconds all the same: rarely is for where there is something better.
//
// # Outliers
//
// Once a second endpoints that serve the same model are compared. One whose streams wait
// more than twice the peers' median for their first byte gets less; one that three times in
// a row is above five times the median, or fails four times as often as they do and a fifth
// at the least, is ejected, for ten seconds at first. Medians of sixteen, since a mean
// takes a few long prompts for an ill server. An endpoint that brings no byte to anybody
// while streams wait is taken to be as slow as that silence: five seconds where six or more
// wait, up to thirty where one does. Where all are slow, none is an outlier.
//
// # Coming back
//
// After each of these an endpoint starts slowly: a tenth of its room, and all of it after
// ten seconds; so does an address that DNS adds to others. The room of a bounded endpoint
// is the cluster's: [Pool.Share] says which part of it may be given out. Of an unbounded
// one each gateway uses its part of a nominal size.
//
// A 429 or 503 with Retry-After pauses the endpoint for as long, at most a minute; requests
// on their way go on.
//
// # Retries
//
// Whether a request reached the server is read from the connection, not from the error:
// connections count the bytes written to them, and a request is unsent while fewer bytes
// went out since it got the connection than its body has (or none, where the length is
// unknown). That covers refused and timed-out dials, TLS failures, keep-alive connections
// that the server had closed, and uploads that broke off; it excludes a reset after the
// whole request was written, which looks the same whether the server never saw it or died
// of it. Model servers built on uvicorn close idle connections after five seconds:
// [Config].IdleConnTimeout defaults below that, so that the gateway is the one to close.
//
// What was sent whole is Replayable if its endpoint is of the fleet's own, not a provider
// that bills it, and reset it, kept silent beyond first_byte, or was lost: went down, was
// ejected, or failed five times in a row. vLLM sends a stream's header before the first
// token, so that the first byte of the body is what counts. A request that is
// [Slot.Movable] does not wait for an endpoint that is lost.
//
// The transport's own replays are kept off requests with a body: it would repeat a POST
// that carries an Idempotency-Key header although model servers do not honour it.
//
// # What it leaves out
//
// Which bounded slot is free in the cluster, and whose turn it is (proxy/dispatch); what a
// backend can bear (proxy/capacity); which candidate has the prefix in its cache
// (proxy/affinity). Hedging: a second request to be on the safe side is load when there is
// least room for it. Judging by what others' gateways saw: each goes by its own answers.
//
// # How it fails
//
// With no live endpoint Candidates says [ErrNoBackend]; where the live ones asked to be
// left alone, start slowly, or have a request out that shows whether the breaker may close,
// [PausedError]. [Pool.Changed] tells those who wait. A name
// that stops resolving keeps its last addresses; certificate and key files that cannot be
// read keep the last good ones; both are logged. Nothing blocks on a dead backend longer
// than the dial timeout.
package upstream
