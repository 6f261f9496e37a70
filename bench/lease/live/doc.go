// Package live runs the cells of the lease benchmark in real time: InProcess with real lease.Managers over gRPC and TCP on loopback. It
// feeds them the very requests that the simulator feeds its nodes, and hands what it saw to the same judge, so that SideBySide shows
// whether the engines agree. A test says within which bounds they must.
//
// What is real differs from run to run: only the demand repeats with the seed.
package live
