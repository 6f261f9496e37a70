// Package ledger holds what a cluster agrees on: who may use which model, at what price,
// within which limits; the keys; what is switched off; and who the members are.
//
// # Purpose
//
// The policy. ParsePolicy reads the operator's YAML strictly; Policy.Validate finds everything
// that cannot work, each with its path, its line and its remedy; Diff shows what a change
// changes; Policy.Index resolves keys. NewKey makes a key and its hash.
//
// The replicated truth. State applies commands (ledgerpb) and is the same on every replica;
// Facts and Keys are read by any goroutine; Capture and ReadState are its snapshots. Prepare,
// PrepareRollback and PrepareKeys check what is to be proposed, and state the rules of it.
//
// The replication. Ledger keeps a State by raft on disk and proposes commands from any node.
//
// # Invariants
//
//   - A policy that parsed has been validated: no other can be indexed or prepared.
//   - Money is an int64 of nano-dollars, read from decimal strings. No float touches it.
//   - Where money is limited every model has a price, or is free on purpose: an oversight is not a zero.
//   - Calendar is a function of the moment, and its zones are in the program: where a period ends is the same
//     on every node, and periods tile time.
//   - Only the SHA-256 of a key is ever kept. A secret appears in no error and no log, and of a
//     hash the audit log and differences show 12 digits.
//   - An Index never changes, but the keys that it resolves are the live ones. A new revision is a new Index; tenants of
//     one plan, one share of it (ramp × standing) and one step of its ramp have the same limits, by pointer.
//   - A Whole is numbered alike on every node, and higher with every policy put in force and every
//     step of a ramp, also where a restore brings an earlier revision back.
//   - The parts of a limit that all ranks of a Share hold add up to the limit.
//   - Input is bounded: maxPolicySize, maxMarks, maxNesting, maxFields, maxProblems of
//     maxMessage, limiter.MaxCharges limits on one request. Anchors and aliases are refused.
//     The YAML library sees no text before its shape was checked.
//   - What parsed can be indexed, at any time: limits are checked at every step of every
//     ramp and for every standing.
//   - State.Apply is a function of the log: no clock, no randomness, no order of a map. Time is the
//     proposer's, and never goes back. A command it does not know stops it.
//   - A command id among the last maxDone answers as it did and changes nothing.
//   - Facts never change; a key's record never changes, so that its pointer stands for the key as it is.
//   - Everything the state holds is bounded (state.go), and those bounds are part of its version.
//   - What can be spent of a durable limit at one instant, from the ledger and from all blocks, is
//     within the limit; the same number of an owner's command gives the same result.
//   - Of a budget's account, spent + outstanding ≤ amount after every command, but for what was spent beyond
//     what was granted, charged by hand, or granted before the amount was lowered.
//   - A generation of the caches that is raised has a number that was never in force, and Caches.Valid never
//     holds an answer for good that was asked for before one of its tags was invalidated, also where that was
//     forgotten, or undone by a restore.
//   - The hash of the state covers policy, keys, kill switches, rungs, tokens, blocks, budgets, generations and tags; not
//     the cluster's id, the view, the count of invalidations, the audit log or the remembered ids. So a backup has the same hash in another cluster.
//   - A damaged snapshot is refused whole, whatever bit of it was flipped.
//
// # Left out
//
// What caches hold: only what of it does not count any more is agreed on, and nothing of what semantic ones learn. Keys
// are never deleted: a revoked one must stay known as such. A setting that would do nothing where it stands is refused, or at
// least warned of: to accept it in silence would be a lie.
//
// # How it fails
//
// ParsePolicy and Prepare return Problems, all of them at once, and no policy. Apply gives a result with a code
// (Refusal) for what a known command cannot do, and an error, after which the replica must
// stop, only for ErrUnknownCommand and ErrDiverged. ReadState says which record is damaged (SnapshotError).
package ledger
