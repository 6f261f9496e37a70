package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"
)

const (
	maxFailedProbes = 2 // in a row take an endpoint down
	maxFailedDials  = 3 // in a row take an endpoint down
	maxBackoff      = 4 // doublings of the probe interval for an endpoint that stays down
	maxProbeBody    = 4 << 10
	// minProbeGap keeps a storm of broken answers from becoming a storm of probes.
	minProbeGap = 500 * time.Millisecond
)

// upLocked notes that e answered.
func (p *Pool) upLocked(e *endpoint) {
	was := e.v.state
	if !e.v.up(p.now()) {
		return
	}
	e.lastError = ""
	if !e.gone {
		p.cfg.Logger.Info("backend is up", "backend", e.id, "was", was.String())
	}
	p.changedLocked()
}

// downLocked takes e out of use.
func (p *Pool) downLocked(e *endpoint) {
	was := e.v.state
	if !e.v.down(p.now()) {
		return
	}
	if !e.gone {
		p.cfg.Logger.Warn("backend is down", "backend", e.id, "was", was.String(), "err", e.lastError)
	}
	p.lostLocked(e, p.inFlight)
	p.changedLocked()
}

// clip keeps what is shown and logged of an error short: it may quote an answer.
func clip(s string) string {
	const most = 200
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// probeSoon wakes e's probe loop; one waiting wake is enough.
func (e *endpoint) probeSoon() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// probeLoop probes e at once and then at the interval, more rarely while it is down.
func (p *Pool) probeLoop(ctx context.Context, b *backend, e *endpoint) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-e.wake:
		}
		began := p.now()
		err := p.probe(ctx, b, e)
		if ctx.Err() != nil {
			return
		}
		timer.Reset(p.probed(e, began, err))
		select { // whatever woke it meanwhile is answered by the next probe, not at once
		case <-ctx.Done():
			return
		case <-time.After(min(minProbeGap, p.cfg.HealthInterval)):
		}
	}
}

// probed notes the outcome of a probe and says how long to wait for the next. One that
// is late while answers come says that the server is busy, not that it is ill.
func (p *Pool) probed(e *endpoint, began int64, err error) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	if errors.Is(err, context.DeadlineExceeded) && e.heard.Load() > began {
		return p.cfg.HealthInterval
	}
	if err == nil {
		p.upLocked(e)
		e.lastError = ""
		if e.v.state == Down { // up and down too often: not yet
			return max(min(time.Duration(e.v.downUntil-now), p.cfg.HealthInterval), time.Millisecond)
		}
		return p.cfg.HealthInterval
	}
	e.v.failedProbes++
	e.lastError = clip(err.Error())
	if e.v.failedProbes < maxFailedProbes {
		return min(time.Second, p.cfg.HealthInterval) // settle the doubt soon
	}
	p.downLocked(e)
	return p.cfg.HealthInterval << min(e.v.failedProbes-maxFailedProbes, maxBackoff)
}

// probe asks e for its health; nil is a 2xx answer in time.
func (p *Pool) probe(ctx context.Context, b *backend, e *endpoint) error {
	p.mu.Lock()
	cfg := b.cfg
	p.mu.Unlock()
	path := cfg.HealthPath
	if path == "" {
		path = "/health"
	}
	_, err := p.get(ctx, b, cfg, b.url(e.host, path), maxProbeBody)
	return err
}

// get fetches url from b within the health timeout. More than limit bytes, or a
// status other than 2xx, is an error.
func (p *Pool) get(ctx context.Context, b *backend, cfg *Backend, url string, limit int64) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.HealthTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Host = b.base.Host
	setAuth(req.Header, cfg.Kind, *b.key.Load())
	resp, err := b.transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	switch {
	case resp.StatusCode < 200 || resp.StatusCode > 299:
		return nil, fmt.Errorf("GET %s: status %d", req.URL.Path, resp.StatusCode)
	case err != nil:
		return nil, fmt.Errorf("GET %s: %w", req.URL.Path, err)
	case int64(len(body)) > limit:
		return nil, fmt.Errorf("GET %s: the answer is longer than %d bytes", req.URL.Path, limit)
	}
	return body, nil
}

// watch follows a backend's DNS name, certificate files and key file.
func (p *Pool) watch(ctx context.Context, b *backend) {
	tick := time.NewTicker(p.cfg.ResolveInterval)
	defer tick.Stop()
	for {
		p.mu.Lock()
		cfg := b.cfg
		p.mu.Unlock()
		if cfg.dns() {
			p.resolve(ctx, b, cfg.Name)
		}
		if changed, err := b.transport.reload(); err != nil {
			p.cfg.Logger.Warn("changed certificate files cannot be used; the old ones stay", "backend", cfg.Name, "err", err.Error())
		} else if changed {
			p.cfg.Logger.Info("certificate files reloaded", "backend", cfg.Name)
		}
		if key, err := readKey(*cfg); err != nil {
			p.cfg.Logger.Warn("backend's key cannot be read; the last one stays", "backend", cfg.Name, "err", err.Error())
		} else if *key != *b.key.Load() {
			b.key.Store(key)
			p.cfg.Logger.Info("backend's key reloaded", "backend", cfg.Name)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// resolve makes b's endpoints the addresses that its name has now. A failed look-up
// and an empty answer leave them as they are: a name server in trouble must not take
// down model servers that are not.
func (p *Pool) resolve(ctx context.Context, b *backend, name string) {
	lookup, cancel := context.WithTimeout(ctx, p.cfg.HealthTimeout)
	addrs, err := p.cfg.Resolver.LookupNetIP(lookup, "ip", b.base.Hostname())
	cancel()
	if ctx.Err() != nil {
		return
	}
	if err != nil || len(addrs) == 0 {
		p.cfg.Logger.Warn("backend name does not resolve; its last addresses stay", "backend", name, "err", fmt.Sprint(err))
		return
	}
	hosts := hostsOf(addrs, b.base.Port())
	if len(hosts) > maxEndpoints {
		p.cfg.Logger.Warn("backend name has too many addresses; the rest are left out", "backend", name, "addresses", len(hosts), "used", maxEndpoints)
		hosts = hosts[:maxEndpoints]
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	if p.backends[name] != b {
		return // replaced meanwhile
	}
	kept, had, came := b.endpoints[:0:0], len(b.endpoints), false
	for _, e := range b.endpoints {
		if slices.Contains(hosts, e.host) {
			kept = append(kept, e)
			continue
		}
		p.retireEndpointLocked(e)
		p.cfg.Logger.Info("backend address is gone", "backend", e.id)
	}
	b.endpoints = kept
	for _, h := range hosts {
		if !slices.ContainsFunc(b.endpoints, func(e *endpoint) bool { return e.host == h }) {
			p.addEndpointLocked(b, name+"@"+h, h)
			came = true
		}
	}
	for _, e := range b.endpoints {
		p.startProbesLocked(e)
	}
	if came || len(kept) < had {
		p.changedLocked()
	}
}

// hostsOf gives address:port for each address once, in order.
func hostsOf(addrs []netip.Addr, port string) []string {
	hosts := make([]string, 0, len(addrs))
	for _, a := range addrs {
		hosts = append(hosts, net.JoinHostPort(a.Unmap().String(), port))
	}
	slices.Sort(hosts)
	return slices.Compact(hosts)
}
