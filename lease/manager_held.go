package lease

import "headgate/limiter"

// TakeHeld charges all of cs if the leases in hand cover all of it, and otherwise nothing: it asks nobody, and waits for
// nothing. Where it says true, the charges are held as after Take; ds[i] is what decided cs[i].
func (m *Manager) TakeHeld(cs []limiter.Charge, ds []limiter.Decision) bool {
	refused, missing := m.holder.Take(cs, ds)
	if refused != -1 {
		return false
	}
	if missing != 0 {
		if held := (1<<len(cs) - 1) &^ missing; held != 0 {
			m.holder.Cancel(cs, held)
		}
		return false
	}
	return true
}

// Yield gives the slots of a bucket that this process's lease has, and that are not in use, to their owner at once: others
// wait for them. Else they would stay here until the owner calls them back, and it does not know who of several
// holders has free ones. It asks nobody, and waits for nothing.
func (m *Manager) Yield(key *limiter.Key) { m.holder.Yield(key) }
