//go:build !linux

package hnsw

import "time"

// threadCPU is the clock, where the system does not tell what a thread has used.
func threadCPU() time.Duration { return time.Duration(time.Now().UnixNano()) }

func processCPU() time.Duration { return threadCPU() }
