package admin

import "time"

// ContentFilter says which kept prompts and answers are meant; empty fields mean all.
type ContentFilter struct {
	Tenant, User string
	Since, Until time.Time // from Since on, before Until
}

// Erased is how many requests were erased from the content log.
type Erased struct {
	Erased int `json:"erased"`
}

// Status is a node at a glance.
type Status struct {
	Node           string         `json:"node"`
	Version        string         `json:"version"`
	UptimeSeconds  int64          `json:"uptime_seconds"`
	Ready          bool           `json:"ready"`
	NotReady       string         `json:"not_ready,omitempty"`
	Degraded       string         `json:"degraded,omitempty"` // what it does without, in words; "": nothing
	Listen         string         `json:"listen"`
	ClusterListen  string         `json:"cluster_listen"`
	Cluster        *ClusterStatus `json:"cluster,omitempty"`
	PolicyRevision uint64         `json:"policy_revision"`
	PolicySource   string         `json:"policy_source"`
	Tenants        int            `json:"tenants"`
	Keys           int            `json:"keys"`
	Models         []string       `json:"models"`
	Buckets        int            `json:"buckets"`
	Backends       []Backend      `json:"backends"`
}

// ClusterStatus is a node's place in its cluster, as the node sees it.
type ClusterStatus struct {
	Name        string    `json:"name"`
	ID          string    `json:"id"`          // hexadecimal; "" until it was founded
	Incarnation string    `json:"incarnation"` // of this process, hexadecimal
	Leader      string    `json:"leader"`      // node name; "": none known
	Epoch       uint64    `json:"epoch"`       // of the view that this node stepped to
	Members     []string  `json:"members"`     // of that view
	ViewLease   ViewLease `json:"view_lease"`
	Partitions  int       `json:"partitions"`           // of the view's, those that this node owns
	Waiting     int       `json:"partitions_waiting"`   // of these, those that it may not grant for yet
	Owing       []string  `json:"owing_roll,omitempty"` // members that have not told it for 3 s which slots they use, so that it lends none
}

// ViewLease is a node's right to grant.
type ViewLease struct {
	Held    bool  `json:"held"`
	UntilMS int64 `json:"until_ms"` // what is left of it, in milliseconds
}

// Backend is one endpoint.
type Backend struct {
	Name      string `json:"name"`
	Endpoint  string `json:"endpoint"`
	URL       string `json:"url"`
	State     string `json:"state"`
	Draining  bool   `json:"draining,omitempty"` // as BackendState.Leaving; what follows is as there
	InFlight  int    `json:"in_flight"`
	Slots     int    `json:"slots"` // 0: unbounded
	LastError string `json:"last_error,omitempty"`

	Breaker  string  `json:"breaker,omitempty"`
	Ejected  bool    `json:"ejected,omitempty"`
	Drained  bool    `json:"drained,omitempty"`
	PausedMS int64   `json:"paused_ms,omitempty"`
	Share    float64 `json:"share,omitempty"`
	Stale    bool    `json:"stale,omitempty"`
	Overflow bool    `json:"overflow,omitempty"`
}

// PolicyChange asks for a policy to be put in force.
type PolicyChange struct {
	Text     []byte
	DryRun   bool    // only say what it would change
	Expected *uint64 // the revision that must be in force; nil: any
}

// Rollback asks for an earlier policy to be put in force again, as a new revision.
type Rollback struct {
	Revision uint64  `json:"revision"`
	Expected *uint64 `json:"expected,omitempty"` // as in PolicyChange
}

// Applied is what a policy changed.
type Applied struct {
	Revision uint64   `json:"revision"` // in force afterwards
	DryRun   bool     `json:"dry_run,omitempty"`
	Changes  []string `json:"changes"`
	Warnings []string `json:"warnings,omitempty"`
}

// PolicyText is a policy as it was written.
type PolicyText struct {
	Revision uint64
	Text     []byte
}

// PolicyRevision is one policy that was in force.
type PolicyRevision struct {
	Revision     uint64    `json:"revision"`
	At           time.Time `json:"at,omitzero"`
	Actor        string    `json:"actor"`
	RolledBackTo uint64    `json:"rolled_back_to,omitempty"`
	InForce      bool      `json:"in_force,omitempty"`
}

// Done is a change that was made.
type Done struct {
	Index    uint64   `json:"index,omitempty"`    // of the ledger's entry; 0: of this node only
	Warnings []string `json:"warnings,omitempty"` // such as that the name is not (yet) in the policy
}

// Key is a key without its secret.
type Key struct {
	ID       string `json:"id"`
	Tenant   string `json:"tenant"`
	Name     string `json:"name,omitempty"`
	Status   string `json:"status"` // active | revoked | expired | suspended | killed
	Expires  string `json:"expires,omitempty"`
	Created  string `json:"created,omitempty"`
	LastUsed string `json:"last_used,omitempty"` // on any node
}

// NewKey asks for a key; what is absent is as in a policy.
type NewKey struct {
	Tenant     string    `json:"tenant"`
	ID         string    `json:"id,omitempty"` // "": made from tenant and time
	Name       string    `json:"name,omitempty"`
	User       string    `json:"user,omitempty"`
	Class      string    `json:"class,omitempty"`
	Expires    time.Time `json:"expires,omitzero"`
	Models     []string  `json:"models,omitempty"`
	Routes     []string  `json:"routes,omitempty"`
	Surfaces   []string  `json:"surfaces,omitempty"`
	AssertUser bool      `json:"assert_user,omitempty"`
	Test       bool      `json:"test,omitempty"` // hg_test_… instead of hg_live_…
}

// KeyRotation asks for a key in place of another, with the same rights.
type KeyRotation struct {
	ID      string        // the old one
	Overlap time.Duration // how long both are good; 0: the old one ends at once
}

// CreatedKey is a key with its secret: the only time that it is seen.
type CreatedKey struct {
	Key             string    `json:"key"` // the secret
	ID              string    `json:"id"`
	Tenant          string    `json:"tenant"`
	Hash            string    `json:"hash"` // as a policy writes it
	Expires         time.Time `json:"expires,omitzero"`
	Replaces        string    `json:"replaces,omitempty"`
	ReplacedExpires time.Time `json:"replaced_expires,omitzero"`
	Warnings        []string  `json:"warnings,omitempty"`
}

// Kill is a kill switch that is on.
type Kill struct {
	Kind    string    `json:"kind"`           // global | model | tenant | key
	Name    string    `json:"name,omitempty"` // "" for global
	Reason  string    `json:"reason,omitempty"`
	Actor   string    `json:"actor,omitempty"`
	At      time.Time `json:"at,omitzero"`
	Expires time.Time `json:"expires,omitzero"` // a node's own only
}

// KillSwitch asks for a kill switch to be thrown or released.
type KillSwitch struct {
	Kind   string
	Name   string // "" for global
	On     bool
	Reason string
	For    time.Duration // a node's own: how long, above 0 and at most MaxNodeFor; else 0
}

// Rung is a step of the degradation ladder.
type Rung struct {
	Rung    string    `json:"rung"`
	Effect  string    `json:"effect,omitempty"` // what it does, in a line
	On      bool      `json:"on"`               // by hand, in the whole cluster
	Models  []string  `json:"models,omitempty"` // for which it is on by itself, as this node sees it
	Reason  string    `json:"reason,omitempty"`
	Actor   string    `json:"actor,omitempty"`
	At      time.Time `json:"at,omitzero"`
	Expires time.Time `json:"expires,omitzero"`
}

// BackendState is one endpoint of a backend. What is of the whole cluster is the last word of the node that keeps the queue.
type BackendState struct {
	Backend  string `json:"backend"`
	Endpoint string `json:"endpoint"` // the backend's name, of a dns:// one with @ADDRESS:PORT
	URL      string `json:"url"`
	Kind     string `json:"kind"`
	Overflow bool   `json:"overflow,omitempty"` // used only where no other has room

	State       string  `json:"state"`                   // unknown | up | down, as this node sees it
	Breaker     string  `json:"breaker"`                 // closed | open | half_open, likewise
	Ejected     bool    `json:"ejected,omitempty"`       // its peers do much better
	Drained     bool    `json:"drained,omitempty"`       // by command
	Leaving     bool    `json:"leaving,omitempty"`       // gone from the policy or from DNS; requests in flight finish
	PausedMS    int64   `json:"paused_ms,omitempty"`     // for so long yet it asked to be left alone
	Share       float64 `json:"share"`                   // of its room, below 1 during a slow start
	FirstByteMS int64   `json:"first_byte_ms,omitempty"` // of streams, about; 0: unknown
	InFlight    int     `json:"in_flight"`               // of this node
	LastError   string  `json:"last_error,omitempty"`

	Slots    int64   `json:"slots"`             // 0: unbounded; then what follows says nothing
	Limit    int64   `json:"limit"`             // of them, that may be in use now
	InUse    int64   `json:"in_use"`            // by all nodes
	Stale    bool    `json:"stale,omitempty"`   // its metrics have stopped coming, so that it is taken to be full
	Waiting  int64   `json:"waiting"`           // requests that could go there
	Places   int64   `json:"places"`            // for those
	Pressure float64 `json:"pressure"`          // waiting of places, smoothed; 1 and more: requests are refused
	Rate     float64 `json:"requests_a_second"` // that it can do
	DrainMS  int64   `json:"queue_drain_ms"`    // that those who wait will take
	Desired  float64 `json:"desired"`           // how many such backends all that is offered would need
}

// DrainChange asks for a backend to get no new requests, or to get them again.
type DrainChange struct {
	Backend string // or one of its endpoints
	On      bool
	For     time.Duration // 0: until it is taken back
	Reason  string
}

// RungChange asks for a rung to be set.
type RungChange struct {
	Rung   string
	On     bool
	For    time.Duration // 0: until it is set again
	Reason string
}

// Member is a node as the answering node sees it; what it could not ask for is empty and
// Error says why.
type Member struct {
	Name          string `json:"name"`
	Incarnation   string `json:"incarnation,omitempty"` // hexadecimal
	Address       string `json:"address,omitempty"`     // HOST:PORT of its gossip
	Version       string `json:"version,omitempty"`
	Self          bool   `json:"self,omitempty"` // the answering node
	Gossip        string `json:"gossip"`         // alive | suspect | failed | left | unknown
	Raft          string `json:"raft"`           // leader | voter | non-voter | none
	InView        bool   `json:"in_view"`
	Partitions    int    `json:"partitions"` // owned in the view
	AppliedIndex  uint64 `json:"applied_index"`
	StateHash     string `json:"state_hash,omitempty"` // of its ledger at that index, hexadecimal
	LastContactMS int64  `json:"last_contact_ms"`      // since it heard of the leader; -1: never
	ViewLease     bool   `json:"view_lease"`
	Error         string `json:"error,omitempty"`
}

// AuditFilter picks entries of the audit log; empty fields mean all.
type AuditFilter struct {
	Limit  int // the last so many; 1 to MaxAudit
	Since  time.Time
	Object string // whole
	Actor  string // whole
}

// AuditEntry is one change: who did what to what.
type AuditEntry struct {
	Index  uint64    `json:"index"` // of the ledger's entry
	At     time.Time `json:"at"`
	Actor  string    `json:"actor"`
	Action string    `json:"action"` // such as policy.apply, key.revoke
	Object string    `json:"object"`
	Before string    `json:"before,omitempty"`
	After  string    `json:"after,omitempty"`
}

// Token is an admin token without its secret.
type Token struct {
	Name    string    `json:"name"`
	Role    Role      `json:"role"`
	Created time.Time `json:"created,omitzero"`
	Expires time.Time `json:"expires,omitzero"`
}

// NewToken asks for an admin token.
type NewToken struct {
	Name    string    `json:"name"`
	Role    Role      `json:"role"`
	Expires time.Time `json:"expires,omitzero"`
}

// CreatedToken is an admin token with its secret: the only time that it is seen.
type CreatedToken struct {
	Token   string    `json:"token"` // the secret
	Name    string    `json:"name"`
	Role    Role      `json:"role"`
	Expires time.Time `json:"expires,omitzero"`
}

// LedgerInfo is the ledger of the answering node.
type LedgerInfo struct {
	ClusterID      string         `json:"cluster_id"` // hexadecimal
	Index          uint64         `json:"index"`      // applied
	Term           uint64         `json:"term"`
	Leader         string         `json:"leader"` // "": none known
	Voters         []string       `json:"voters"`
	NonVoters      []string       `json:"non_voters,omitempty"`
	StateHash      string         `json:"state_hash"` // hexadecimal; the same on all nodes at one index
	PolicyRevision uint64         `json:"policy_revision"`
	Counts         map[string]int `json:"counts"` // what it holds: keys, kills, rungs, tokens, audit, revisions
}

// Restored is the ledger after a restore.
type Restored struct {
	StateHash string `json:"state_hash"` // hexadecimal
}

// Override is a node's own answer to limits whose owner is out of reach, instead of what
// each limit's `unavailable` says.
type Override struct {
	Unavailable string    `json:"unavailable"` // allow | deny | local
	Actor       string    `json:"actor,omitempty"`
	Expires     time.Time `json:"expires,omitzero"`
}

// OverrideChange asks for an override.
type OverrideChange struct {
	Unavailable string        // allow | deny | local; "" ends it
	For         time.Duration // above 0 and at most MaxNodeFor, but for the end
}

// Tenant is one tenant.
type Tenant struct {
	Name      string `json:"name"`
	Plan      string `json:"plan"`
	Keys      int    `json:"keys"`
	Suspended bool   `json:"suspended,omitempty"`
	Owner     string `json:"owner,omitempty"` // the member of the view that owns it
}

// Level is one bucket. Amounts are in the unit; nano-dollars for usd.
type Level struct {
	Limit    string `json:"limit"`
	Scope    string `json:"scope"`
	Unit     string `json:"unit"`
	Subject  string `json:"subject,omitempty"`
	Level    int64  `json:"level"` // what is left, with the owner and with those it lent to, as far as they said; negative in debt
	Capacity int64  `json:"capacity"`
	ResetMS  int64  `json:"reset_ms"` // until it is full; -1: not by waiting

	Owner       string    `json:"owner,omitempty"` // the node that owns it; "": none
	Away        string    `json:"away,omitempty"`  // what could not be learned and why, in words
	Unavailable string    `json:"unavailable"`     // what decides while the owner is out of reach: local | deny | allow
	Lendable    int64     `json:"lendable"`        // what the owner has left; negative in debt
	Debt        int64     `json:"debt"`            // by how much the owner is below zero
	Outstanding int64     `json:"outstanding"`     // what others may still spend, by the owner's count; of slots, those lent
	LentRate    float64   `json:"lent_rate"`       // the part of the rate that is lent, 0 to 1
	Holders     []Holding `json:"holders"`
}

// Holding is what one node has of a bucket.
type Holding struct {
	Node        string   `json:"node"`
	Outstanding int64    `json:"outstanding"`         // what it may still spend, by the owner's count; of slots, those lent
	InHand      *int64   `json:"in_hand"`             // what it says that it has left; null: it did not say
	InUse       int64    `json:"in_use,omitempty"`    // of slots
	LentRate    *float64 `json:"lent_rate,omitempty"` // the part of the rate that it has, 0 to 1
}

// ExplainRequest asks whether a request would be admitted now.
type ExplainRequest struct {
	Tenant string `json:"tenant"`
	Key    string `json:"key"` // the key's id; "" takes any of the tenant's
	User   string `json:"user"`
	Model  string `json:"model"`
	Input  int64  `json:"input_tokens"`
	Output int64  `json:"output_tokens"`
	// Class, Surface and Headers are what the client says with the request.
	Class   string            `json:"class,omitempty"`
	Surface string            `json:"surface,omitempty"`
	Headers map[string]string `json:"headers,omitempty"`
}
