// Package leasetest simulates the lease protocol: the real cores lease.Owner and lease.Holder of
// several processes in one seeded event loop, with clocks that drift, a network that delays, loses,
// repeats and reorders, and processes that pause, crash, restart, join and leave. What the cores do
// is judged by oracles that know nothing of how they do it (judge.go, ideal.go).
//
// Run plays a seed, Shrink finds the shortest schedule that still fails, and Search goes through
// every interleaving of a small world. DESIGN.md says what is modelled and what is not.
package leasetest
