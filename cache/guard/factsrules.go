package guard

import "slices"

// otherCode reports whether each side has a block of code that the other lacks, and the two
// are one but for a piece. Another way to write it is nothing that is stated.
func (f *Facts) otherCode(g *Facts) bool {
	for i := range f.blocks {
		a := &f.blocks[i]
		if g.hasBlock(a) {
			continue
		}
		for j := range g.blocks {
			b := &g.blocks[j]
			n := shared(a.pieces, b.pieces)
			if !f.hasBlock(b) && 2*n*5 >= (len(a.pieces)+len(b.pieces))*3 {
				return true
			}
		}
	}
	return false
}

func (f *Facts) hasBlock(b *block) bool {
	return slices.ContainsFunc(f.blocks, func(o block) bool { return o.text == b.text })
}

// otherFigure finds a figure of f that g lacks, where g has one in its place that f lacks.
func (f *Facts) otherFigure(g *Facts) Kind {
	backed := make([]bool, len(g.figures)) // of g, those that contradict nothing
	for j := range g.figures {
		backed[j] = g.figures[j].soft || f.supports(&g.figures[j])
	}
	for i := range f.figures {
		a := &f.figures[i]
		if a.soft || g.supports(a) {
			continue
		}
		for _, key := range a.keys {
			if key == 0 {
				continue
			}
			lone := f.lone(g, key)
			for _, j := range g.byKey[key] {
				b := &g.figures[j]
				if backed[j] {
					continue
				}
				if _, kind := a.same(b); kind != "" && placed(a, b, lone) {
					return kind
				}
			}
		}
	}
	return ""
}

// supports reports whether f has a figure equal to a.
func (f *Facts) supports(a *figure) bool {
	for _, key := range a.keys {
		if len(f.byKey[key]) == maxSameKey {
			return true // perhaps among those that were not kept
		}
		for _, j := range f.byKey[key] {
			if same, _ := a.same(&f.figures[j]); same {
				return true
			}
		}
	}
	return a.keys == [2]uint32{}
}

// lone reports whether each side has one figure of that key.
func (f *Facts) lone(g *Facts, key uint32) bool {
	return len(f.byKey[key]) == 1 && len(g.byKey[key]) == 1
}

// placed reports whether two figures stand for one thing: among the same words.
func placed(a, b *figure, lone bool) bool {
	n, least := shared(a.near, b.near), min(len(a.near), len(b.near))
	switch {
	case least == 0:
		return lone
	case least <= 2:
		return n >= 1
	case lone:
		return n >= 2 || n*3 >= least
	}
	return n >= 2 && n*2 >= least
}

// otherList finds two sentences of the same words that name other figures.
func (f *Facts) otherList(g *Facts) Kind {
	for i := range f.segments {
		s := &f.segments[i]
		j, ok := g.bySkeleton[s.skeleton]
		if !ok || j < 0 || f.bySkeleton[s.skeleton] < 0 || len(s.ids) == 0 && len(f.segments)+len(g.segments) > 2 {
			continue
		}
		u := &g.segments[j]
		a, b := f.figures[s.figures[0]:s.figures[1]], g.figures[u.figures[0]:u.figures[1]]
		if len(a) != len(b) {
			continue
		}
		for k := range a {
			if same, kind := a[k].same(&b[k]); !same && kind != "" && a[k].keys[0] == b[k].keys[0] && !a[k].soft && !b[k].soft {
				return kind
			}
		}
	}
	return ""
}

// otherSentence finds a sentence of g that says the opposite of one of f, where neither
// answer says both ("turn it off … turn it on again").
func (f *Facts) otherSentence(g *Facts) Kind {
	count := make([]uint8, max(len(f.segments), len(g.segments)))
	var buf []uint16
	for i := range f.segments {
		s := &f.segments[i]
		if len(s.ids) == 0 || s.polite || g.said[s.stated] {
			continue
		}
		var j int
		var kind Kind
		if j, kind, buf = f.nearest(g, s, count, buf); kind == "" {
			continue
		}
		u := &g.segments[j]
		if f.said[u.stated] {
			continue
		}
		var back Kind
		if _, back, buf = g.nearest(f, u, count, buf); back != "" {
			return kind
		}
	}
	return ""
}

// nearest finds the sentence of g that has most in common with s of f, and how it opposes
// s; "" where one that has as much does not. count is zeroes, and left so.
func (f *Facts) nearest(g *Facts, s *segment, count []uint8, touched []uint16) (at int, kind Kind, _ []uint16) {
	touched = touched[:0]
	for _, id := range s.ids {
		found := g.byWord[id]
		for _, j := range found.at[:found.n] {
			if count[j] == 0 {
				touched = append(touched, j)
			}
			count[j]++
		}
	}
	most := 0
	for _, j := range touched {
		u, n := &g.segments[j], int(count[j])
		count[j] = 0
		if n < most {
			continue
		}
		k := f.renamed(g, s, u, n)
		if k == "" {
			k = f.substituted(g, s, u)
		}
		if k == "" && !alike(s, u, n) {
			continue
		}
		if k == "" {
			k = f.opposed(g, s, u)
		}
		if n > most || k == "" {
			at, kind = int(j), k
		}
		most = n
	}
	return at, kind, touched
}

// alike reports whether two sentences that share n words speak of one thing.
func alike(s, u *segment, n int) bool {
	least := min(len(s.ids), len(u.ids))
	return n*4 >= least*3 && (n >= 2 || len(s.ids)+len(u.ids) <= 3)
}

// opposed reports whether two sentences that speak of one thing say the opposite of it.
func (f *Facts) opposed(g *Facts, s, u *segment) Kind {
	flips, kind := 0, Kind("")
	for _, p := range s.poles {
		q, ok := u.facing(p, s)
		if !ok {
			continue
		}
		switch {
		case s.takes != u.takes:
		case p.two:
			flips++
			if kind == "" {
				kind = p.kind
			}
		case p.kind == KindAntonym:
			return KindAntonym
		case !g.values[p.value] && !f.values[q.value] && p.denied == q.denied:
			return p.kind
		}
	}
	if s.takes != u.takes {
		return ""
	}
	if s.skeleton == u.skeleton && s.turned != u.turned && s.negations == u.negations {
		return KindAntonym // the same opposites, of other things
	}
	differ := (s.negations > 0) != (u.negations > 0)
	switch {
	case flips > 0 && !differ:
		return kind
	case flips == 0 && differ && s.turns == u.turns && (u.negations == 0 && shared(s.denied, u.affirmed) > 0 || s.negations == 0 && shared(u.denied, s.affirmed) > 0):
		return KindNegation
	}
	return ""
}

// renamed reports whether two sentences that share n words differ in names alone, each of
// which the other answer lacks.
func (f *Facts) renamed(g *Facts, s, u *segment, n int) Kind {
	a, b := len(s.ids)-n, len(u.ids)-n
	if n < 2 || a == 0 || b == 0 || a > 3 || b > 3 || max(a, b) > n || s.negations != u.negations {
		return ""
	}
	if f.onlyNames(s, g, a) && g.onlyNames(u, f, b) {
		return KindEntity
	}
	return ""
}

// substituted reports whether two sentences are one but for a word or two that are no
// synonyms, or a run of up to three in one place.
func (f *Facts) substituted(g *Facts, s, u *segment) Kind {
	a, b := f.text.tokens[s.from:s.to], g.text.tokens[u.from:u.to]
	if f.text.lang != g.text.lang || s.negations != u.negations || len(a) < 4 || len(b) < 4 || max(len(a), len(b))-min(len(a), len(b)) > 2 {
		return ""
	}
	i := 0
	for i < min(len(a), len(b)) && matches(&a[i], &b[i]) {
		i++
	}
	m, n := len(a), len(b)
	for m > i && n > i && matches(&a[m-1], &b[n-1]) {
		m, n = m-1, n-1
	}
	if m == i && n == i || len(a)-(m-i) < 3 {
		return ""
	}
	if m-i <= 3 && n-i <= 3 {
		switch {
		case m > i && n > i:
			return f.alien(g, int(s.from), int(u.from), a, b, i, m, n)
		case m > i && restricts(a[i:m]), n > i && restricts(b[i:n]):
			return KindModifier
		}
		return ""
	}
	if len(a) != len(b) {
		return ""
	}
	places, kind := 0, Kind("")
	for k := i; k < m; k++ {
		if matches(&a[k], &b[k]) {
			continue
		}
		if places++; places > 2 {
			return ""
		}
		if k := f.alien(g, int(s.from), int(u.from), a, b, k, k+1, k+1); k != "" {
			kind = k
		}
	}
	return kind
}

// alien reports whether what stands at i of two sentences, until m and n, are words with a
// sense that have nothing to do with each other.
func (f *Facts) alien(g *Facts, atA, atB int, a, b []token, i, m, n int) Kind {
	s, t := alien(a[i:m], b[i:n]), alien(b[i:n], a[i:m])
	if s == nil || t == nil || s.is(fLight) || t.is(fLight) || s.is(fVague) || t.is(fVague) {
		return ""
	}
	x := loaded()
	for k := i; k < max(m, n); k++ {
		if k < m && (a[k].flags&tNumber != 0 || negates(&a[k])) || k < n && (b[k].flags&tNumber != 0 || negates(&b[k])) {
			return "" // a figure's business, or a denial's
		}
		if k < m && f.text.monthAt(x, atA+k) > 0 || k < n && g.text.monthAt(x, atB+k) > 0 {
			return ""
		}
	}
	return KindSubstitute
}

// matches reports whether two tokens of one place say the same; articles do.
func matches(a, b *token) bool {
	return a.stem == b.stem || article(a.word) && article(b.word) || a.flags&b.flags&tNumber == 0 && related(a, b)
}

func article(w string) bool {
	return w == "a" || w == "an" || w == "the" || w == "your" || w == "our" || w == "my"
}

// restricts reports whether one of these words alone narrows what is said: "only",
// "international".
func restricts(words []token) bool {
	x := loaded()
	for i := range words {
		if words[i].lex == nil {
			continue
		}
		for _, v := range words[i].lex.vals {
			if g := &x.groups[v.group]; g.strict && !v.soft && (g.kind == KindAntonym || g.kind == KindQuantifier) {
				return true
			}
		}
	}
	return false
}

// onlyNames reports whether the n words of s that g lacks are all that it does not share,
// and names.
func (f *Facts) onlyNames(s *segment, g *Facts, n int) bool {
	for _, id := range s.ids {
		if _, ok := g.byWord[id]; ok {
			continue
		}
		if _, name := slices.BinarySearch(s.names, id); !name {
			return false
		}
		n--
	}
	return n == 0
}

// facing finds the pole of s that excludes p of the other, where neither sentence has both.
func (s *segment) facing(p pole, of *segment) (pole, bool) {
	var out pole
	found := false
	for _, q := range s.poles {
		if q.group != p.group {
			continue
		}
		if q.val == p.val || of.stands(q) {
			return pole{}, false
		}
		out, found = q, true
	}
	return out, found
}

func (s *segment) stands(q pole) bool {
	return slices.ContainsFunc(s.poles, func(p pole) bool { return p.value == q.value })
}
