// Package upstream is the gateway's view of the model servers: which exist, which
// are alive, how much each has in flight, and the connections to them.
//
// # Purpose
//
// A [Pool] holds the policy's backends. A backend is one address (http://, https://)
// or a headless service (dns://), every address of which is an endpoint with a load
// count and a health of its own. [Pool.Acquire] picks the least loaded live endpoint
// among a model's backends and takes one of its slots; the [Slot] sends the request
// and gives the place back. [Pool.Run] probes health and re-resolves names.
//
// # Invariants
//
//   - An endpoint never has more slots out than its backend's Slots, also across a
//     policy change, a removal followed by a return, and a DNS flap.
//   - A slot is given back exactly once, however often Release is called.
//   - A request is offered for another attempt ([Retryable]) only if no byte of an
//     answer arrived and the backend cannot have received the request whole. What
//     may have been processed is never sent twice.
//   - No goroutine outlives Run; no map, queue, body or answer here grows without a
//     named bound.
//
// # Health
//
// unknown → up | down. An endpoint is up after one good probe or any answer below
// 500, down after two failed probes or three failed dials in a row. A down one
// gets no requests and is probed with a growing pause. An unknown one, which is how
// all begin, is used only when no live one has room, so that a gateway answers
// before its first probes return. A 5xx answer or a slow one does not take a backend
// down: breakers belong to a later capability, as do affinity and slow start.
//
// # Retries
//
// Whether a request reached the server is read from the connection, not from the
// error: connections count the bytes written to them, and a request is unsent
// while fewer bytes went out since it got the connection than its body has (or
// none, where the length is unknown). That covers refused and timed-out dials,
// TLS failures, keep-alive connections that the server had closed, and uploads that
// broke off; it excludes a reset after the whole request was written, which looks the
// same whether the server never saw it or died of it. Model servers built on
// uvicorn close idle connections after five seconds: [Config].IdleConnTimeout
// defaults below that, so that the gateway is the one to close.
//
// The transport's own replays are kept off requests with a body: it would repeat a
// POST that carries an Idempotency-Key header although model servers do not honour it.
//
// # How it fails
//
// With no live endpoint Acquire says [ErrNoBackend], with all full [ErrSaturated].
// A name that stops resolving keeps its last addresses; certificate files that
// cannot be read keep the last good ones; both are logged. Nothing blocks on a dead
// backend longer than the dial timeout.
package upstream
