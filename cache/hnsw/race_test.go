//go:build race

package hnsw

const raceEnabled = true // sync.Pool drops things at random
