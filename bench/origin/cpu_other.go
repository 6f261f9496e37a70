//go:build !unix

package origin

import "time"

// ProcessorTime is not known here.
func ProcessorTime() time.Duration { return 0 }
