//go:build race

package semantic

// raceEnabled tells whether the race detector is on.
const raceEnabled = true
