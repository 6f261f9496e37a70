package cache

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"sync"
	"time"
)

// Bounds of what is watched of prompts.
const (
	maxTemplates   = 1_000   // counted apart
	maxPromptBody  = 1 << 20 // bytes of a body that is looked at
	lookAtFirst    = 32      // prompts of a template; then
	lookAtEvery    = 16      // one in so many
	promptRefs     = 4       // prompts that the next is compared with
	seenChunks     = 2_048   // of a template; a power of 2
	maxLooked      = 256     // prompts that a mean is of; then what is older counts half
	maxTold        = 1_024   // requests that a recent share is of, likewise
	templateLinger = int64(10 * time.Minute)
)

// What Lint goes by.
const (
	fewPrompts     = 20
	bytesPerToken  = 4 // by rule of thumb, for English in most vocabularies
	shortPrompt    = 1_024
	shortPrefix    = 0.1  // of the prompt
	muchRecurs     = 0.3  // of the prompt
	goodShare      = 0.25 // of the input tokens, by the provider's own word
	noShare        = 0.01
	longPrefix     = 1_024 // tokens, where the provider's minimum is not known
	unusedRequests = 100
)

// Prompt is a request that a model has answered. Note keeps nothing of it but copies of the names.
type Prompt struct {
	Tenant, Surface, Template, Model string
	Body                             []byte
	Input, Cached                    int64 // tokens, as the provider counted them
}

// FindingKind says in a word how a template does.
type FindingKind string

// The findings.
const (
	FindingFew      FindingKind = "few"           // prompts; nothing can be said
	FindingGood     FindingKind = "good"          // or nothing is known to be wrong
	FindingVarying  FindingKind = "varying_first" // what varies stands before what does not
	FindingTooShort FindingKind = "too_short"     // what all begin with is below the provider's minimum
	FindingUnused   FindingKind = "unused"        // it is long enough, and the provider reuses nothing
	FindingVaried   FindingKind = "varied"        // prompts have nothing in common
)

// Finding is how well the provider's prefix cache does, and could do, with one template on one model.
type Finding struct {
	Tenant, Surface, Template, Model string
	Requests, Input, Cached          int64   // since the start
	Share                            float64 // of the input tokens that were cached, since the start
	Prompt                           int64   // bytes of a mean prompt's text, of its first 64 KiB
	Prefix                           int64   // of them, what it has in common with one of the last, from its beginning on
	Kind                             FindingKind
	Text                             string // what to do, "" where nothing
}

// Prefixes watches what providers' prefix caches can do with the prompts of each template. It
// keeps no content: hashes of blocks under a secret that is nowhere else. Memory: at most 25 KiB
// for each of 1,000 templates. Safe for concurrent use; time is an argument, as that of Watch.
type Prefixes struct {
	seed maphash.Seed
	gear [256]uint64 // that chunks are cut by
	free sync.Pool   // of *promptScan

	mu        sync.Mutex
	templates map[prefixName]*prefixTemplate
}

type prefixName struct{ tenant, surface, template, model string }

// prefixTemplate is what is known of a template. Prefixes.mu is held round everything.
type prefixTemplate struct {
	last                    int64 // when it was used
	requests, input, cached int64
	recent                  struct{ requests, input, cached int64 }

	// Sums over prompts that were compared with earlier ones, in bytes.
	looked, prompt, prefix, recurred int64

	refs [promptRefs][]uint32 // the blocks of the last prompts
	next int                  // the oldest of refs
	seen []uint32             // chunks, each in the slot of its hash
}

// NewPrefixes makes one that has seen nothing.
func NewPrefixes() *Prefixes {
	p := &Prefixes{seed: maphash.MakeSeed(), templates: make(map[prefixName]*prefixTemplate)}
	for i := range p.gear {
		p.gear[i] = maphash.Bytes(p.seed, []byte{byte(i)})
	}
	p.free.New = func() any { return new(promptScan) }
	return p
}

// Note counts a request, and looks at one in 16, unless its body is longer than 1 MiB: that takes
// some milliseconds at most.
func (p *Prefixes) Note(r *Prompt, now int64) {
	name := prefixName{r.Tenant, r.Surface, r.Template, r.Model}
	if !p.count(name, r, now) {
		return
	}
	s, ok := p.free.Get().(*promptScan)
	if !ok {
		return // New makes no others
	}
	defer func() {
		s.forget()
		p.free.Put(s)
	}()
	if !s.scan(p, r.Body) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if t := p.templates[name]; t != nil {
		t.add(s)
	}
}

// count says whether the prompt is one to look at.
func (p *Prefixes) count(name prefixName, r *Prompt, now int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.templates[name]
	if t == nil {
		if len(p.templates) >= maxTemplates && !p.makeRoom(now) {
			return false
		}
		t = &prefixTemplate{}
		p.templates[prefixName{strings.Clone(name.tenant), strings.Clone(name.surface), strings.Clone(name.template), strings.Clone(name.model)}] = t
	}
	t.last = max(t.last, now)
	t.requests, t.input, t.cached = t.requests+1, t.input+r.Input, t.cached+r.Cached
	c := &t.recent
	if c.requests >= maxTold {
		c.requests, c.input, c.cached = c.requests/2, c.input/2, c.cached/2
	}
	c.requests, c.input, c.cached = c.requests+1, c.input+r.Input, c.cached+r.Cached
	return len(r.Body) <= maxPromptBody && (t.requests <= lookAtFirst || t.requests%lookAtEvery == 0)
}

// makeRoom forgets the template that was not used for longest, if that is long enough.
func (p *Prefixes) makeRoom(now int64) bool {
	var oldest prefixName
	var at int64
	found := false
	for name, t := range p.templates {
		if !found || t.last < at {
			oldest, at, found = name, t.last, true
		}
	}
	if !found || now-at < templateLinger {
		return false
	}
	delete(p.templates, oldest)
	return true
}

// add compares a prompt with the last ones, and makes it one of them.
func (t *prefixTemplate) add(s *promptScan) {
	if t.seen == nil {
		t.seen = make([]uint32, seenChunks)
	}
	same, recurred := 0, 0
	for _, ref := range t.refs {
		n := 0
		for n < len(ref) && n < len(s.blocks) && ref[n] == s.blocks[n] {
			n++
		}
		same = max(same, n)
	}
	for _, c := range s.chunks {
		slot := &t.seen[c.hash%seenChunks]
		if *slot == c.hash {
			recurred += int(c.length)
		}
		*slot = c.hash
	}
	if t.refs[0] != nil { // else there is nothing to compare with
		if t.looked >= maxLooked {
			t.looked, t.prompt, t.prefix, t.recurred = t.looked/2, t.prompt/2, t.prefix/2, t.recurred/2
		}
		t.looked++
		t.prompt += int64(s.size)
		t.prefix += int64(min(same*promptBlock, s.size))
		t.recurred += int64(recurred)
	}
	t.refs[t.next] = append(t.refs[t.next][:0], s.blocks...)
	t.next = (t.next + 1) % promptRefs
}

// Lint says of each template how it does, by tenant, surface, template and model. minimum is the
// least that a prefix must have for the model's provider to cache it, in tokens; 0 is not known.
func (p *Prefixes) Lint(minimum func(model string) int64) []Finding {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := make([]Finding, 0, len(p.templates))
	for name, t := range p.templates {
		f := Finding{
			Tenant: name.tenant, Surface: name.surface, Template: name.template, Model: name.model,
			Requests: t.requests, Input: t.input, Cached: t.cached, Share: shareOf(t.cached, t.input),
		}
		if t.looked > 0 {
			f.Prompt, f.Prefix = t.prompt/t.looked, t.prefix/t.looked
		}
		f.Kind, f.Text = t.lint(minimum(name.model))
		list = append(list, f)
	}
	slices.SortFunc(list, func(a, b Finding) int {
		return cmp.Or(strings.Compare(a.Tenant, b.Tenant), strings.Compare(a.Surface, b.Surface),
			strings.Compare(a.Template, b.Template), strings.Compare(a.Model, b.Model))
	})
	return list
}

// lint: least is the provider's minimum. What the provider says goes before what is estimated.
func (t *prefixTemplate) lint(least int64) (FindingKind, string) {
	if t.looked < fewPrompts {
		return FindingFew, ""
	}
	prompt, prefix := t.prompt/t.looked, t.prefix/t.looked
	tokens, stable := prompt/bytesPerToken, prefix/bytesPerToken
	begins, recurs := shareOf(t.prefix, t.prompt), shareOf(t.recurred, t.prompt)
	cached := shareOf(t.recent.cached, t.recent.input)
	switch {
	case cached >= goodShare:
		return FindingGood, ""
	case tokens < least:
		return FindingTooShort, fmt.Sprintf("prompts have about %d tokens, and the provider caches no prefix below %d (prefix_minimum): nothing is reused, whatever stands first. %s", tokens, least, byEstimate)
	case begins < shortPrefix && recurs >= muchRecurs && prompt >= shortPrompt:
		return FindingVarying, fmt.Sprintf("prompts have about %d tokens, and the first %d are what one has in common with another, though %.0f %% of the text comes again: "+
			"what varies stands first. Put it last (a date, a name, an id; after the instructions), so that the provider can reuse what does not vary. %s", tokens, stable, 100*recurs, byEstimate)
	case stable < least && prefix >= promptBlock:
		return FindingTooShort, fmt.Sprintf("prompts have about %d tokens, of which the first %d do not vary, and the provider caches no prefix below %d (prefix_minimum): "+
			"nothing is reused. Put more that does not vary first (examples, definitions), or do without. %s", tokens, stable, least, byEstimate)
	case stable >= max(least, longPrefix) && cached < noShare && t.recent.requests >= unusedRequests && t.recent.input > 0:
		return FindingUnused, fmt.Sprintf("the first %d tokens or so do not vary, and yet the provider says that it reuses nothing: "+
			"see whether its prefix cache is on, and whether one prompt's successors go to the same server. %s", stable, byEstimate)
	case begins < shortPrefix:
		return FindingVaried, "prompts have little in common: there is nothing to reuse"
	}
	return FindingGood, ""
}

// byEstimate ends texts that name tokens.
const byEstimate = "(Tokens are estimated: a quarter of the bytes.)"
