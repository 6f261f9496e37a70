//go:build !race

package threshold

const underRace = false
