package ledger

import (
	"net/http"
	"slices"
	"strings"
)

var stickyNames = []string{"user", "key", "request"}

// Route sends requests that match to models, as written; see Index.Routes for what it becomes.
type Route struct {
	Name   string   `yaml:"name"`
	Match  Match    `yaml:"match"`
	To     []Target `yaml:"to"`
	Sticky string   `yaml:"sticky,omitempty"` // whose requests all go to one of several: user | key | request; absent: user
}

// Match is what a request must be: all that is said. A list holds what any of it is enough.
type Match struct {
	Models   []string          `yaml:"models,omitempty"` // that are asked for: a model's own name stands for its aliases, too
	Surfaces []string          `yaml:"surfaces,omitempty"`
	Classes  []string          `yaml:"classes,omitempty"`
	Tenants  []string          `yaml:"tenants,omitempty"`
	Tier     *int              `yaml:"below_tier,omitempty"`    // of the plan
	Input    TokenRange        `yaml:"input_tokens,omitempty"`  // as estimated
	Output   TokenRange        `yaml:"output_tokens,omitempty"` // the cap of the request, or the model's default
	Headers  map[string]string `yaml:"headers,omitempty"`       // name and exact value
}

// TokenRange is a range of counts, both ends left out.
type TokenRange struct {
	Below *int64 `yaml:"below,omitempty"`
	Above *int64 `yaml:"above,omitempty"`
}

// Target is one of the models to which a route sends.
type Target struct {
	Model  string `yaml:"model"`
	Weight *int64 `yaml:"weight,omitempty"` // share of the requests, beside the others'; absent: 1
}

// ResolvedRoute is a route with its defaults in place. Nothing of it may be changed.
type ResolvedRoute struct {
	Name string
	// Models are the names by which a request may have asked for its model, aliases among them; nil: any.
	// So are Surfaces, Classes and Tenants.
	Models, Surfaces, Classes, Tenants []string
	BelowTier                          *int // of the caller's plan; nil: any
	// A request matches with InputAbove < input < InputBelow; nil: no bound. Output likewise.
	InputBelow, InputAbove, OutputBelow, OutputAbove *int64
	Headers                                          []HeaderMatch // all of them, by name
	To                                               []ResolvedTarget
	Sticky                                           string // user | key | request
}

// HeaderMatch is a header that a request must have.
type HeaderMatch struct{ Name, Value string } // Name is canonical

// ResolvedTarget is where a route sends Weight of the sum of all weights, which is above 0.
type ResolvedTarget struct {
	Model  string // its own name, never an alias
	Weight int64  // ≥ 0
}

func (r *Route) sticky() string {
	if r.Sticky == "" {
		return stickyNames[0]
	}
	return r.Sticky
}

// resolve compiles a route of a valid policy. models are by name and alias.
func (r *Route) resolve(models map[string]*Model) ResolvedRoute {
	m := &r.Match
	out := ResolvedRoute{
		Name: r.Name, Surfaces: m.Surfaces, Classes: m.Classes, Tenants: m.Tenants, BelowTier: m.Tier,
		InputBelow: m.Input.Below, InputAbove: m.Input.Above, OutputBelow: m.Output.Below, OutputAbove: m.Output.Above, Sticky: r.sticky(),
	}
	for _, n := range m.Models {
		out.Models = append(out.Models, n)
		if own := models[n]; own.Name == n {
			out.Models = append(out.Models, own.Aliases...)
		}
	}
	slices.Sort(out.Models)
	out.Models = slices.Compact(out.Models)
	for name, value := range m.Headers {
		out.Headers = append(out.Headers, HeaderMatch{http.CanonicalHeaderKey(name), value})
	}
	slices.SortFunc(out.Headers, func(a, b HeaderMatch) int { return strings.Compare(a.Name, b.Name) })
	for _, t := range r.To {
		out.To = append(out.To, ResolvedTarget{models[t.Model].Name, valueOr(t.Weight, 1)})
	}
	return out
}
