// Package budget spends money that the ledger grants ahead, in blocks, so that a budget holds for a whole
// cluster and nearly every request is decided where it is. DESIGN.md has what is held, how a draw lives,
// and how it fails.
//
// A Manager is what a process uses. It is the shell round one account a budget, subject and period: pure
// arithmetic that takes time as an argument. The ledger is a function that draws.
//
// Amounts are nano-dollars. What is above MaxAmount counts as MaxAmount, what is below zero as zero.
package budget
