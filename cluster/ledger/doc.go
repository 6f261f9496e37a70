// Package ledger holds what a cluster agrees on. So far that is the policy: who may use
// which model, at what price, within which limits.
//
// # Purpose
//
// ParsePolicy reads the operator's YAML strictly; Policy.Validate finds everything that
// cannot work, each with its path, its line and its remedy; Diff shows what a change
// changes; Policy.Index resolves keys. NewKey makes a key and its hash.
//
// # Invariants
//
//   - A policy that parsed has been validated: no other can be indexed or applied.
//   - Money is an int64 of nano-dollars, read from decimal strings. No float touches it.
//   - Only the SHA-256 of a key is ever kept. A secret appears in no error and no log.
//   - An Index never changes. A new revision is a new Index; tenants of one plan and
//     one share of it (ramp × standing) have the same limits, by pointer.
//   - Input is bounded: maxPolicySize, maxMarks, maxNesting, maxFields, maxProblems of
//     maxMessage, limiter.MaxCharges limits on one request. Anchors and aliases are refused.
//     The YAML library sees no text before its shape was checked.
//   - What parsed can be indexed, at any time: limits are checked at every step of every
//     ramp and for every standing.
//
// # Left out
//
// Budgets, caches and replication do not exist yet. A policy that names budgets or a
// surface's exact or semantic cache is refused: a setting that is accepted and does
// nothing would be a lie.
//
// # How it fails
//
// ParsePolicy returns Problems, all of them at once, and no policy. Nothing here does I/O.
package ledger
