//go:build !linux

package cache

import "time"

// cpuTime is the processor time that a process has used: not known here.
func cpuTime(int) (time.Duration, error) { return 0, nil }

// ownCPU is what this process has used: not known here.
func ownCPU() time.Duration { return 0 }

// machineLoad is that of the last minute: not known here.
func machineLoad() string { return "unknown" }
