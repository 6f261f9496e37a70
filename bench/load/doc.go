// Package load sends requests to a model API at a set rate and measures what comes
// back.
//
// # Purpose
//
// It is an open-loop generator: a request arrives when its time has come, whether
// or not earlier ones were answered, so a slow server shows as latency instead of
// as a lower rate. Arrivals are evenly spaced or a Poisson process drawn from a
// seed. With rate 0 it keeps a fixed number of requests under way instead, which
// finds the throughput at saturation.
//
// # What is measured
//
// Latency counts from the moment a request was due, Service from the moment it was
// sent; the difference is Lag, the generator's own fault, to be looked at before
// the other figures are believed. Time to first byte counts from the send. Gap is
// the time between two reads of a stream that returned data: chunks that arrive
// together count as one read and are counted by their frames.
//
// # Bounds
//
// A run ends after Count arrivals or Duration, whichever is first, plus Timeout for
// the last answers. No more than MaxInFlight requests are under way: an arrival
// beyond that is dropped and counted. An answer is read up to MaxAnswer bytes. Only
// loopback addresses are accepted as a target.
//
// # Left out
//
// Distributed generation, HTTP/2, and think times.
package load
