package fakevllm

import (
	"container/list"
	"sync"

	"github.com/go-json-experiment/json/jsontext"
)

// prefixCache remembers which blocks of prompts were seen, each together with all
// that came before it in its prompt, as vLLM's automatic prefix caching does.
type prefixCache struct {
	most, block int // blocks; bytes in one

	mu   sync.Mutex
	at   map[uint64]*list.Element
	used list.List // of uint64, the most recent first
}

func newPrefixCache(blocks, tokens int) *prefixCache {
	if blocks == 0 {
		return nil
	}
	return &prefixCache{most: blocks, block: tokens * bytesPerToken, at: map[uint64]*list.Element{}}
}

// see returns how many leading bytes of a prompt were seen after the same salt, in
// whole blocks, and remembers all of its blocks.
func (p *prefixCache) see(salt uint64, prompt []byte) (known int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h, all := mix(salt), true
	for n := p.block; n <= len(prompt); n += p.block {
		h = mix(hashBytes(h, prompt[n-p.block:n]))
		e, ok := p.at[h]
		if ok {
			p.used.MoveToFront(e)
			if all {
				known = n
			}
			continue
		}
		all = false
		if p.used.Len() >= p.most {
			if old, ok := p.used.Remove(p.used.Back()).(uint64); ok {
				delete(p.at, old)
			}
		}
		p.at[h] = p.used.PushFront(h)
	}
	return known
}

// cachedOf is how many of a prompt's tokens the prefix cache holds. The first part
// is what conversations add to, the others (tools, the system's text) stand before
// it. At least one token is always computed.
func (p *prefixCache) cachedOf(parts []jsontext.Value, tokens int64) int64 {
	if len(parts) == 0 || tokens == 0 {
		return 0
	}
	var salt uint64
	for _, v := range parts[1:] {
		salt = mix(hashBytes(salt, v))
	}
	known := p.see(salt, parts[0])
	return min(int64(known)*tokens/int64(max(len(parts[0]), 1)), tokens-1)
}
