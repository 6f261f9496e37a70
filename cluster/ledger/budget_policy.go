package ledger

// Spike is a spend rate that is an event: more in a minute than Factor times the mean minute of the trailing hour.
type Spike struct {
	Factor Factor  `yaml:"factor"`          // absent: no spikes
	Floor  NanoUSD `yaml:"floor,omitempty"` // a minute that spends less is none
	Kill   bool    `yaml:"kill,omitempty"`  // it throws the tenant's kill switch
}
