package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

const (
	modelsTTL     = 10 * time.Second // of a good listing
	modelsErrTTL  = 2 * time.Second  // of a failure, so that a dead backend is not asked by every caller
	maxModelsBody = 1 << 20
	maxModels     = 1024 // entries used of one listing
)

// modelsCache holds a backend's last listing; whoever holds turn may fetch.
type modelsCache struct {
	turn    chan struct{} // one token
	until   time.Time
	entries []json.RawMessage
	err     error
}

func newModelsCache() modelsCache { return modelsCache{turn: make(chan struct{}, 1)} }

// Models gives the entries of the named backend's own GET /v1/models as they came,
// not older than ten seconds. One fetch at a time: other callers wait for it, or for
// their context. The slices are shared: do not change them.
func (p *Pool) Models(ctx context.Context, name string) ([]json.RawMessage, error) {
	p.mu.Lock()
	b := p.backends[name]
	p.mu.Unlock()
	if b == nil {
		return nil, fmt.Errorf("models of %q: %w", name, ErrNoBackend)
	}
	c := &b.models
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if time.Now().Before(c.until) {
		return c.entries, c.err
	}
	// The fetch outlives a caller that leaves: those behind it wait for its result.
	c.entries, c.err = p.fetchModels(context.WithoutCancel(ctx), b)
	c.until = time.Now().Add(modelsTTL)
	if c.err != nil {
		c.until = time.Now().Add(modelsErrTTL)
	}
	return c.entries, c.err
}

func (p *Pool) fetchModels(ctx context.Context, b *backend) ([]json.RawMessage, error) {
	p.mu.Lock()
	cfg := b.cfg
	host := ""
	for _, e := range b.endpoints {
		if e.v.state == Up || (e.v.state == Unknown && host == "") {
			host = e.host
		}
	}
	p.mu.Unlock()
	if host == "" {
		return nil, fmt.Errorf("models of %q: %w", cfg.Name, ErrNoBackend)
	}
	body, err := p.get(ctx, b, cfg, b.url(host, "/v1/models"), maxModelsBody)
	if err != nil {
		return nil, fmt.Errorf("models of %q: %w", cfg.Name, err)
	}
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("models of %q: %w", cfg.Name, err)
	}
	return list.Data[:min(len(list.Data), maxModels)], nil
}
