// Package lease measures how exactly leases keep a limit that many nodes share, and what that costs in
// messages, beside the ways in which gateways do it today: see Run. Time is virtual and nothing is
// random but by seed, so that a run repeats to the digit. Its tests measure the speed of a decision.
package lease
