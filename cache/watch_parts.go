package cache

import (
	"cmp"
	"hash/maphash"
	"slices"
	"strings"
	"unique"
)

// Bounds of the samples of keys.
const (
	sampleEvery    = 64      // misses
	maxSamples     = 8_192   // in all
	maxPairSamples = 16      // of one pair
	maxSampleParts = 64      // of one; the rest are one part
	maxSampleName  = 80      // bytes
	maxSampleBody  = 1 << 18 // bytes of a body that is looked at
	maxNamed       = 3       // parts of an alert
)

// The names of what is not kept apart in a sample.
const (
	sampleRest = "body (the rest)"
	sampleOdd  = "body (members of odd names)" // which may hold anything
)

// keySample is what the key of a request that missed was made of, without what was in it.
type keySample struct {
	at    int64
	parts []samplePart // never changed
}

type samplePart struct {
	name unique.Handle[string]
	hash uint64
}

// sampleKey takes the parts of c that count. It keeps nothing of c.
func sampleKey(seed maphash.Seed, c *Context) []samplePart {
	if c == nil || len(c.Body) > maxSampleBody {
		return nil
	}
	parts, err := c.Explain()
	if err != nil {
		return nil
	}
	out := make([]samplePart, 0, min(len(parts), maxSampleParts))
	for _, p := range parts {
		if !p.Counted {
			continue
		}
		name, hash := p.Name, maphash.String(seed, p.Name)^maphash.String(seed, p.Hash)
		switch odd := strings.HasPrefix(name, "body["); {
		case odd:
			name = sampleOdd
		case len(out) >= maxSampleParts-2: // a last one, and the odd ones
			name = sampleRest
		default:
			name = explainCutTo(name, maxSampleName)
		}
		h := unique.Make(name)
		if i := slices.IndexFunc(out, func(o samplePart) bool { return o.name == h }); i >= 0 {
			out[i].hash = out[i].hash*31 + hash
			continue
		}
		out = append(out, samplePart{h, hash})
	}
	return out
}

// explainCutTo cuts s to n bytes.
func explainCutTo(s string, n int) string {
	if len(s) <= n {
		return strings.Clone(s)
	}
	return strings.ToValidUTF8(s[:n-len("…")], "") + "…"
}

// sampled counts a miss and says whether it is the one to look at.
func (p *watched) sampled() bool {
	p.unsampled++
	if p.unsampled < sampleEvery {
		return false
	}
	p.unsampled = 0
	return true
}

// keepSample keeps s, and lets go of the oldest of p where there is no room.
func (w *Watch) keepSample(p *watched, s keySample) {
	switch {
	case p.gone:
		return
	case len(p.samples) < maxPairSamples && w.samples.Add(1) <= maxSamples:
		p.samples = append(p.samples, s)
		return
	case len(p.samples) < maxPairSamples:
		w.samples.Add(-1)
	}
	if len(p.samples) > 0 {
		p.oldest %= len(p.samples)
		p.samples[p.oldest] = s
		p.oldest++
	}
}

// dropSamples lets go of those that are too old.
func (w *Watch) dropSamples(p *watched, now int64) {
	n := len(p.samples)
	p.samples = slices.DeleteFunc(p.samples, func(s keySample) bool { return now-s.at > watchSpan })
	if len(p.samples) == n {
		return
	}
	w.samples.Add(int64(len(p.samples) - n))
	slices.SortFunc(p.samples, func(a, b keySample) int { return int(max(-1, min(1, a.at-b.at))) })
	if p.oldest = 0; len(p.samples) == 0 {
		p.samples = nil
	}
}

// differing names the parts in which samples differ that differ least, those that do so most often
// first: what makes a key of its own of a request that is otherwise as another. same says that
// most of the samples do not differ at all.
func differing(samples []keySample) (names []string, same bool) {
	type standing struct {
		part  samplePart // its hash is its place in the request
		often int
	}
	var list []standing
	var diff []samplePart
	pairs, equal, least := 0, 0, maxSampleParts*2
	for i := range samples {
		for j := range samples[:i] {
			pairs++
			diff = sampleDiff(diff[:0], samples[i].parts, samples[j].parts)
			switch n := len(diff); {
			case n == 0:
				equal++
				continue
			case n > least:
				continue
			case n < least:
				least, list = n, list[:0]
			}
			for _, d := range diff {
				k := slices.IndexFunc(list, func(s standing) bool { return s.part.name == d.name })
				if k < 0 {
					k, list = len(list), append(list, standing{part: d})
				}
				list[k].often++
			}
		}
	}
	if 2*equal > pairs {
		return nil, true
	}
	slices.SortFunc(list, func(a, b standing) int {
		return cmp.Or(cmp.Compare(b.often, a.often), cmp.Compare(a.part.hash, b.part.hash))
	})
	for _, s := range list {
		if len(names) < maxNamed && 2*s.often >= list[0].often {
			names = append(names, s.part.name.Value())
		}
	}
	return names, false
}

// sampleDiff appends the parts that are not the same in a and b, with their places for hashes.
func sampleDiff(diff, a, b []samplePart) []samplePart {
	find := func(in []samplePart, name unique.Handle[string]) int {
		return slices.IndexFunc(in, func(p samplePart) bool { return p.name == name })
	}
	for i, p := range a {
		if k := find(b, p.name); k < 0 || b[k].hash != p.hash {
			diff = append(diff, samplePart{p.name, uint64(i)})
		}
	}
	for i, p := range b {
		if find(a, p.name) < 0 {
			diff = append(diff, samplePart{p.name, uint64(i)})
		}
	}
	return diff
}
