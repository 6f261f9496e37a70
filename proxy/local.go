package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// serveModels lists the models that the key may use now, as the backends describe them.
func (x *exchange) serveModels() error {
	if err := x.admitRequest(); err != nil {
		return err
	}
	data := []json.RawMessage{}
	s := x.p.switches.Load()
	for _, name := range x.modelNames() {
		if m := x.snap.Models[name]; s.model(name, m) == nil {
			data = append(data, x.describe(m, name))
		}
	}
	return x.answerJSON(map[string]any{"object": "list", "data": data})
}

// serveModel describes one of them.
func (x *exchange) serveModel() error {
	m := x.mayUse(x.pathID)
	if m == nil {
		return x.chargeMalformed(errModel(x.pathID))
	}
	if e := x.killed(x.pathID, m); e != nil {
		return e
	}
	if err := x.admitRequest(); err != nil {
		return err
	}
	return x.answerJSON(x.describe(m, x.pathID))
}

// describe is the backend's own entry for a model under the name that clients use; a
// minimal one where no backend tells.
func (x *exchange) describe(m *Model, name string) json.RawMessage {
	ctx, cancel := context.WithTimeout(x.r.Context(), 2*time.Second)
	defer cancel()
	for _, b := range m.Backends {
		entries, err := x.p.cfg.Pool.Models(ctx, b)
		if err != nil {
			continue // the next one may know
		}
		for _, raw := range entries {
			var e struct {
				ID string `json:"id"`
			}
			if json.Unmarshal(raw, &e) == nil && e.ID == m.Upstream {
				return rename(raw, m.Upstream, name)
			}
		}
	}
	e := map[string]any{"id": name, "object": "model", "created": 0, "owned_by": "headgate"}
	if m.Context > 0 {
		e["max_model_len"] = m.Context
	}
	raw, err := json.Marshal(e)
	if err != nil { // only strings and integers went in
		panic(err)
	}
	return raw
}

// rename replaces the first string value that equals from, which is the entry's id.
func rename(raw json.RawMessage, from, to string) json.RawMessage {
	if from == to {
		return raw
	}
	old, err1 := json.Marshal(from)
	new, err2 := json.Marshal(to)
	if err1 != nil || err2 != nil {
		return raw
	}
	return bytes.Replace(raw, old, new, 1)
}

func (x *exchange) answerJSON(v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	x.settle(outcomeMalformed) // requests stay spent; the slot is free before the answer goes out
	x.stateHeaders()
	x.w.Header().Set("Content-Type", "application/json")
	x.w.Header().Set("Content-Length", strconv.Itoa(len(raw)))
	x.answer.status, x.answer.started = http.StatusOK, true
	x.w.WriteHeader(http.StatusOK)
	_, _ = x.w.Write(raw) // the client may be gone; nothing depends on it
	return nil
}

// serveResponse reads, cancels or deletes a stored response: only for the tenant that
// made it, at the backend that holds it.
func (x *exchange) serveResponse() error {
	o, ok := x.p.owners.get(x.pathID)
	if !ok || o.tenant != x.caller.Tenant {
		e := malformed(http.StatusNotFound, "response_id", "no response %q of this tenant", clip(x.pathID, 128))
		return x.chargeMalformed(e)
	}
	m := x.mayUse(o.model)
	if m == nil {
		return x.chargeMalformed(errModel(o.model))
	}
	x.model, x.only = m, o.endpoint
	if err := x.admitRequest(); err != nil {
		return err
	}
	return x.forward()
}

// owner is whose a stored response is, where it lies, and how many tokens it and all
// before it are: those that a request which goes on from it takes in again.
type owner struct {
	tenant, endpoint, model string
	tokens                  int64
	guessed                 bool // tokens are not the backend's word
}

// owners remembers the latest responses: two generations of at most ownersKept, of which
// the older is dropped when the newer is full. The zero value is ready.
type owners struct {
	mu         sync.Mutex
	young, old map[string]owner
}

const ownersKept = 1 << 16

// put records a response; one of another tenant's keeps its owner.
func (o *owners) put(id string, w owner) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if had, ok := o.young[id]; ok && had.tenant != w.tenant {
		return
	}
	if had, ok := o.old[id]; ok && had.tenant != w.tenant {
		return
	}
	if o.young == nil || len(o.young) >= ownersKept {
		o.young, o.old = map[string]owner{}, o.young
	}
	o.young[id] = w
}

func (o *owners) get(id string) (owner, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	w, ok := o.young[id]
	if !ok {
		w, ok = o.old[id]
	}
	return w, ok
}
