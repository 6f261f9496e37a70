// Package gateway measures what Headgate costs on top of a proxy that does nothing.
//
// # Purpose
//
// One run starts an upstream ([fakevllm]), a bare [httputil.ReverseProxy], Headgate
// and, where they are installed, nginx and LiteLLM's proxy, each as a process of its
// own on loopback, and loads them in turn from this process, and with them the peers
// that the user has started. Figures are ratios and
// differences between two targets measured one after the other in the same round;
// what is reported is the median over the rounds, whose order rotates.
//
// # What is measured
//
//   - CPU a request: user and system time of the target's process, from /proc,
//     over the good answers.
//   - Added latency: the difference of the quantiles of both targets, counted from
//     the send; for streams to the first byte, between chunks and to the last.
//   - Allocations a request: those of the process, as Go counts them, of the bare
//     proxy and of Headgate, less what asking for them takes.
//   - Throughput at saturation, with a fixed number of requests under way.
//   - Memory a request: growth of the resident set while so many streams stand
//     open, less their bodies.
//
// Without a Headgate binary a second bare proxy takes its place: the benchmark then
// measures its own noise, and ratios should be near 1.
//
// # How it fails
//
// A target that does not start ends the run; nginx or LiteLLM that is missing or does
// not start is a note; a peer that does not answer ends it, too. A peer that drops
// arrivals is left out of that load from then on, with a note. Answers other than good ones are a note too, and no figure is
// computed from a measurement without good answers. All processes end with the run;
// the own ones also when this process dies, because their input then ends.
//
// # Left out
//
// Load from other machines, TLS, HTTP/2. CPU and memory need Linux's /proc.
package gateway
