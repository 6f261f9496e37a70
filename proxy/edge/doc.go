// Package edge is everything between the socket and the handler: what it costs an
// attacker's neighbours that he is there.
//
// # Purpose
//
// [Listen] caps connections, in all and per client address, reads the PROXY protocol
// from trusted peers only and serves TLS. [NewServer] speaks HTTP/1.1, h2c and h2 with
// bounded headers and guards every handler: a header or body that trickles, and a
// client that stops reading, are cut off. [Bodies] reads request bodies, bounded
// before and while they arrive. [Prefilter] refuses a flooding or failing address or
// key before anything of its request is looked at. [Drain] ends it all gently.
//
// # Invariants
//
//   - No wait on a client is unbounded: the TLS handshake, the PROXY header and the
//     request header have ReadHeaderTimeout, a body has BodyGrace plus its size at
//     BodyMinRate, a write has WriteStall, an idle connection IdleTimeout. That holds for
//     bodies no handler reads, too: the server waits for their end before it answers.
//   - Memory before the handler is bounded by MaxConns × MaxHeaderBytes; a body's buffer
//     grows with what arrived, never with what was announced.
//   - No address is believed that an untrusted peer wrote.
//   - A request that came in chunks closes its HTTP/1 connection. RFC 9112 §6.1 demands
//     that of one with both Transfer-Encoding and Content-Length, which net/http reads by
//     the former without a trace of the latter; whoever split the stream differently in
//     front of us gets no second request out of the difference.
//
// # What is left out
//
// Authentication and every limit that is the caller's own: those are the pipeline's.
// The Forwarded header (RFC 7239) is not read.
//
// # How it fails
//
// Beyond a cap a connection is accepted and closed at once, so that a load balancer
// sees it and the backlog does not fill; the log says so, at most every ten seconds.
// Certificate files that cannot be read leave the last good ones in use. The
// pre-filter forgets rather than refuses when its table is full (see [Prefilter]).
package edge
