package node

import (
	"headgate/cluster/ledger"
	"headgate/proxy/ladder"
	"headgate/proxy/queue"
	"headgate/proxy/route"
)

// What a policy says of admission, in the rooms' words. It was validated when it was applied.

func queueConfig(ix *ledger.Index) queue.Config {
	c := &ix.Capacity
	return queue.Config{TargetWait: c.TargetWait, MaxBytes: c.MaxBytes, Weights: c.Weights}
}

func ladderConfig(ix *ledger.Index) ladder.Config {
	var c ladder.Config
	for _, l := range ix.Ladder {
		rung, err := ladder.ParseRung(l.Rung)
		if err != nil {
			continue // of a newer release
		}
		c.Settings = append(c.Settings, ladder.Setting{
			Rung: rung, At: l.At, OffAt: l.OffAt, For: l.For, AboveTokens: l.AboveTokens, MaxTokens: l.MaxTokens, Text: l.Text, FallbackURL: l.FallbackURL, Models: l.Models,
		})
	}
	for _, s := range ix.Capacity.Shed {
		shed := ladder.Shed{At: s.At, AboveTokens: s.AboveTokens}
		if s.BelowTier != nil {
			shed.BelowTier = *s.BelowTier
		}
		for class := ladder.Background; class <= ladder.BestEffort; class++ {
			if class.String() == s.Class {
				shed.Class = class
			}
		}
		c.Sheds = append(c.Sheds, shed)
	}
	for i := range ix.Models {
		c.Models = append(c.Models, ix.Models[i].Name)
	}
	return c
}

// routes are the policy's; nil: there are none.
func routes(ix *ledger.Index) *route.Table {
	if len(ix.Routes) == 0 {
		return nil
	}
	contexts := map[string]int64{}
	for i := range ix.Models {
		contexts[ix.Models[i].Name] = ix.Models[i].Context
	}
	rules := make([]route.Rule, 0, len(ix.Routes))
	for _, r := range ix.Routes {
		rule := route.Rule{Name: r.Name, Sticky: map[string]route.Sticky{"user": route.ByUser, "key": route.ByKey, "request": route.ByRequest}[r.Sticky], Match: route.Match{
			Models: r.Models, Surfaces: r.Surfaces, Tenants: r.Tenants, BelowTier: r.BelowTier,
			Input: route.Range{Below: r.InputBelow, Above: r.InputAbove}, Output: route.Range{Below: r.OutputBelow, Above: r.OutputAbove},
		}}
		for _, name := range r.Classes {
			for class := route.Interactive; class <= route.BestEffort; class++ {
				if class.String() == name {
					rule.Match.Classes = append(rule.Match.Classes, class)
				}
			}
		}
		for _, h := range r.Headers {
			rule.Match.Headers = append(rule.Match.Headers, route.Header{Name: h.Name, Value: h.Value})
		}
		for _, to := range r.To {
			rule.To = append(rule.To, route.Arm{Model: to.Model, Weight: to.Weight, Context: contexts[to.Model]})
		}
		rules = append(rules, rule)
	}
	t, err := route.New(rules)
	if err != nil {
		panic(err) // a valid policy's routes are a table
	}
	return t
}
