// Package lease grants quota ahead, so that a limit holds exactly for a whole cluster and nearly every
// decision is made where the request is. DESIGN.md has the protocol and why it holds.
//
// A Manager is what a process uses: it is an Owner of some buckets and a Holder of leases on any. Both
// are state machines without a clock or a socket, and are tried as such by package leasetest.
package lease
