package ladder

// Trigger decides which automatic rungs are on for one model. It is a pure core: no clock, for one
// goroutine at a time. The zero value has no rungs.
type Trigger struct {
	rungs []Setting
	level int // how many are on
}

// Set takes the settings of the model's automatic rungs, in the ladder's order. What is on stays on
// as far as it and all below it are still there.
func (t *Trigger) Set(rungs []Setting) {}

// Step takes the pressure, NaN where it is not known, and says which rungs are on.
func (t *Trigger) Step(now int64, pressure float64) Set { return 0 }
