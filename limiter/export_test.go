package limiter

// LogCap returns the room that a state's log takes up, in entries.
func LogCap(s *State) int { return cap(s.log.entries) }
