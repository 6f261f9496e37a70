// Package capacity learns how many slots of a backend are worth using.
//
// The policy's slots are the most (the lease holds that bound, whatever is learnt here); the learner moves a limit between
// that and a least, from the latency and the refusals of the cluster's own requests and from what vLLM says of itself. Why and
// how well: DESIGN.md.
package capacity
