// Package cluster measures what a cluster of real nodes does when one of them dies, and how
// soon it does what an operator says.
//
// # Purpose
//
// One run starts `headgate serve` several times on loopback, each node with its folder and
// ports, in front of a simulated upstream in this process; kills nodes with SIGKILL; and
// reports the median, the 95th percentile and the worst of every figure, each beside its aim.
//
// # What is measured
//
//   - View leases: how often one lapses while nobody dies, and in how many kills of a leader,
//     and of another, no survivor's did.
//   - Fail-over: from the SIGKILL of the leader to the next change that a survivor's admin API
//     accepts. It is sent once the process is gone, so the dead leader had no part in it.
//   - View change: from the SIGKILL of a node to the moment when every survivor sees another
//     owner of a tenant that was the node's, holds its lease in a newer view and has no
//     partition that waits. Detection and fence are in it.
//   - Kill switch and key revocation: from the answer of the node that was told to the first
//     refusal at the front door of the last node; 0 where that came before the answer. Nodes
//     are asked one request after another, each as soon as [pollEvery] has passed.
//   - Requests failed: open-loop load on every survivor from before the kill until after the
//     view change; whatever is not a whole 200 counts.
//   - Start: of a fresh cluster until every node is ready, and of a killed node.
//   - Changes through the admin API: latency and rate by the number of writers, at the leader
//     and at another node. bench/ledger has the ledger without the API.
//
// # How figures are judged
//
// An aim of a time is kept if the 95th percentile (nearest rank) keeps it; one of a count or a
// share, if the whole run does. A wait that finds no end within its bound counts as its bound
// and is noted.
//
// # How it fails
//
// A node that does not start, or a cluster that is not whole again after a kill, ends the run:
// Run then gives what it has measured so far together with the error. All processes end with
// the run, on Linux also when this process is killed.
//
// # Left out
//
// Networks that are cut or slow, clocks that are wrong, and several machines: all nodes share
// the processors and the disk with the generator, so figures are worse than on machines of
// their own. TLS between nodes.
package cluster
