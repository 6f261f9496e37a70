//go:build linux

package main_test

import "testing"

// TestAirGapped: the page that leads a newcomer from nothing to an answer, in a network that
// has nothing but loopback.
func TestAirGapped(t *testing.T) {
	heavy(t)
	if !inside(t, "bash", "curl") {
		return
	}
	sudo(t, "ip link set lo up")
	const page = "docs/air-gapped.md"
	var session []*fence
	for _, b := range fences(t, page) {
		if b.info == "sh" {
			session = append(session, b)
		}
	}
	if len(session) == 0 {
		t.Fatalf("%s has no commands", page)
	}
	runSession(t, page, session)
}
