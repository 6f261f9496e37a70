package capacity

// Sample is one reading of a vLLM's /metrics, summed over the models and engines that it serves. What the text did not say is
// unknown, which is never zero: each figure has its own Has.
type Sample struct {
	// Waiting and Running are requests: in vLLM's own queue, and in its batch.
	Waiting, Running       int64
	HasWaiting, HasRunning bool

	// KVUsage is the share of the KV cache's blocks in use, 0 to 1; of several engines, the fullest's.
	KVUsage float64
	HasKV   bool

	// Preemptions counts, since the process began, the requests that lost their KV blocks and start over.
	Preemptions    int64
	HasPreemptions bool
}

// Known reports whether the text held any of the figures.
func (s *Sample) Known() bool { return s.HasWaiting || s.HasRunning || s.HasKV || s.HasPreemptions }
