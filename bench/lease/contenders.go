package lease

import (
	"time"

	"headgate/lease"
)

// Policy is a way to keep a limit over many nodes.
type Policy struct {
	Name string
	make func(c *Cell) contender // the simulator's
}

// Headgate is the name of the policy that this is all about, asksEach of the one that is as exact as can be.
const (
	Headgate = "headgate"
	asksEach = "each request asks"
)

// ours is Headgate's protocol with a Sizer; nil: its own. Where something fails every node is an owner.
func ours(c *Cell, s lease.Sizer) contender {
	if c.plan() != nil {
		return &fleet{sizer: s}
	}
	return &cores{sizer: s}
}

// Policies are all that run in every cell, Headgate last.
func Policies() []Policy {
	block := func(size func(c *Cell) float64) func(c *Cell) contender {
		return func(c *Cell) contender { return &blocks{size: size(c)} }
	}
	counting := func(every time.Duration) func(*Cell) contender {
		return func(*Cell) contender { return &counted{every: int64(every)} }
	}
	return []Policy{
		{asksEach, func(*Cell) contender { return &direct{} }},
		{"rate/N", func(*Cell) contender { return &split{} }},
		{"blocks of 5 requests", block(func(c *Cell) float64 { return 5 * c.Mean })},
		{"blocks of 50 requests", block(func(c *Cell) float64 { return 50 * c.Mean })},
		{"blocks of burst/4N", block(func(c *Cell) float64 { return float64(c.Limit.Burst) / 4 / float64(c.Nodes) })},
		{"blocks of burst/N", block(func(c *Cell) float64 { return float64(c.Limit.Burst) / float64(c.Nodes) })},
		{"counted after 100ms", counting(100 * time.Millisecond)},
		{"counted after 250ms", counting(250 * time.Millisecond)},
		{"counted after 500ms", counting(500 * time.Millisecond)},
		{Headgate, func(c *Cell) contender { return ours(c, nil) }},
	}
}
