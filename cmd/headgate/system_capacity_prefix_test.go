package main_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"headgate/bench/fakevllm"
)

// TestSystemCapacityPrefixes: the turns of conversations come by whichever of three gateways, and most of what they bring is in the
// prefix cache of the server where they go; without affinity it seldom is.
func TestSystemCapacityPrefixes(t *testing.T) {
	heavy(t)
	share := map[string]float64{}
	for _, by := range []string{"none", "prefix"} {
		t.Run(by, func(t *testing.T) { share[by] = cachedShare(t, by) })
	}
	if share["prefix"] < 0.7 || share["prefix"] < 1.5*share["none"] {
		t.Errorf("with affinity %.3f of the input was cached, without %.3f", share["prefix"], share["none"])
	}
}

// cachedShare is the part of the input that model servers had in their prefix caches.
func cachedShare(t *testing.T, affinity string) float64 {
	var servers []*modelServer
	for range 4 {
		servers = append(servers, newModelServer(t, fakevllm.Config{Slots: 64, TTFT: 10 * time.Millisecond, PrefixBlocks: 8000}))
	}
	g := newGroup(t, 3, strings.Replace(boundedPolicy(16, "", servers...), "{name: m,", "{name: m, affinity: "+affinity+",", 1))
	g.up()
	var all sync.WaitGroup
	for c := range 32 {
		all.Go(func() {
			for i := range 3 {
				converse(t, g, 3*c+i)
			}
		})
	}
	all.Wait()
	var cached float64
	for _, m := range g.members {
		cached += g.metric(m, "headgate_tokens_total", `kind="cached_input"`)
	}
	var most, sum, input int64
	for _, s := range servers {
		st := s.Stats()
		most, sum, input = max(most, st.Requests), sum+st.Requests, input+st.PromptTokens
	}
	t.Logf("affinity %s: %.3f of %d input tokens were cached; the busiest of %d servers had %.2f of the mean", affinity, cached/float64(input), input, len(servers), float64(most)*float64(len(servers))/float64(sum))
	return cached / float64(input)
}

// converse has a conversation of eight turns, each by another gateway, which shares its system prompt with others.
func converse(t *testing.T, g *group, c int) {
	r := rand.New(rand.NewPCG(7, uint64(c)))
	text := func() string {
		var b strings.Builder
		for b.Len() < 1000 {
			fmt.Fprintf(&b, "%x ", r.Uint64())
		}
		return b.String()
	}
	messages := fmt.Sprintf(`{"role": "system", "content": "app %d %s"}`, c%8, strings.Repeat("be kind and brief. ", 60))
	for range 8 {
		messages += fmt.Sprintf(`, {"role": "user", "content": "%s"}`, text())
		e := g.stream(t.Context(), g.members[r.IntN(len(g.members))], `{"model": "m", "max_tokens": 2, "messages": [`+messages+`]}`)
		if !e.whole {
			t.Errorf("%+v", e)
			return
		}
		messages += fmt.Sprintf(`, {"role": "assistant", "content": "%s"}`, text())
	}
}
