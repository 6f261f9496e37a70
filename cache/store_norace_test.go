//go:build !race

package cache

// storeRace says that the race detector is at work.
const storeRace = false
