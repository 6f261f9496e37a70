// Package limiter decides whether a cost conforms to a limit. It is pure
// arithmetic: time is an argument, a bucket's State is a plain value of 40
// bytes whose zero value is a full bucket, and nothing here starts a goroutine,
// reads a clock or takes a lock. Package lease keeps the buckets and the locks.
//
// Five algorithms stand behind one shape: GCRA (the default), fixed window,
// sliding-window counter, sliding-window log, and semaphore. A charge has two
// phases: Take charges an estimate if it conforms, Adjust replaces it by what
// was used.
//
// # What holds
//
//   - Exact. Nothing is rounded between calls: products have 128 bits, and a
//     GCRA keeps the fraction of a nanosecond that its rate calls for. From one
//     unit a day to 10^9 a second, and beyond (dollars are counted in nano-
//     dollars, several to a nanosecond), a thousand small charges leave what
//     one large one leaves.
//   - Conformance. In any span w a GCRA admits at most burst + rate·w, where
//     admitted is what was taken less what was refunded; from full exactly
//     burst at once. A fixed window admits at most its count in each window, a
//     log in every span of one period. The sliding counter approximates the
//     log.
//   - A refusal changes nothing, and its RetryAfter is true to the nanosecond.
//   - A refund never raises a level above capacity, and no cost ever raises a
//     level: negative ones count as 0.
//   - Debt is paid. A bucket below zero admits nothing but zero costs until it
//     is back, under every algorithm: a window or a log carries what exceeds
//     its count on into the next.
//   - A changed limit keeps what was spent.
//
// # How it fails
//
// Validate refuses what the arithmetic cannot hold, with bounds far outside
// use. Beyond them values saturate where the doc comment says so; nothing
// overflows. A method given a Limit that Validate refuses may panic.
//
// # What is left out
//
// Waiting, time-outs, storage, and every notion of who is asking.
package limiter
