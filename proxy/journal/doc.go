// Package journal is a node's usage log and what its money is recovered from: every request
// is reserved here before the upstream is called, and settled after the answer. DESIGN.md
// beside this file has the format, and each rule of recovery with the trace it prevents.
//
// # Promises
//
//   - When Reserve returns nil the reservation is with the operating system: the process may
//     be killed. With Config.SyncEach it is on the disk. Otherwise the disk has it within
//     about Config.SyncEvery; a machine that goes down without a clean stop makes the
//     incarnation Damaged, whatever the disk holds.
//   - After a crash each reservation without a settled record counts in full, once.
//   - Nothing is invented: a record is believed only with a checksum over the process, the
//     segment and the offset it was written for.
//   - What cannot be read makes its incarnation Damaged, for as long as that one is not Closed.
//   - Opening is idempotent: a crash while it recovers changes nothing in the books.
//
// # What it leaves out
//
// The ledger: whoever owns the Log tells it what Unclosed says, and calls Closed afterwards.
// Content of requests is never recorded.
package journal
