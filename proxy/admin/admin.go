// Package admin is the operator's side of a node: health, metrics and the admin API, on a
// listener of its own.
//
// Health and metrics are open to whoever reaches the listener; everything below
// /admin/v1 needs a bearer token, and each route the role that routes gives it. Answers
// are JSON; errors have the shape {"error": {"message": …, "code": …}}; for paths and
// methods that do not exist net/http answers in its own words.
//
// It holds no state and decides nothing: what it shows and does comes through Config. It
// checks what can be checked without the ledger: shapes, names of kinds and roles, spans
// of time. It leaves out the console.
package admin

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Bounds.
const (
	maxPolicy = 64 << 20 // bytes: a large policy
	maxAsk    = 1 << 16  // bytes of any other body
	maxBackup = 4 << 30  // bytes of a ledger's backup
	maxName   = 128      // bytes of what a node's own kill switch names
	maxReason = 1 << 10  // bytes of why

	// MaxAudit bounds the entries of one answer.
	MaxAudit = 10_000
	// MaxNodeFor bounds what one node decides alone, without a quorum.
	MaxNodeFor = 24 * time.Hour
	// MaxOverlap bounds how long a rotated key outlives its rotation.
	MaxOverlap = 90 * 24 * time.Hour

	restoreTime = 30 * time.Minute // a backup may come slowly
)

// Config is what the admin API needs of the node. All functions must be safe for
// concurrent use. A function that is nil answers 501. Errors may be *Error; others are
// 500. Functions that change something get who wants it, for the audit log; those that
// need a quorum and have none fail with NoQuorum and say what helps; where the outcome is
// not known they fail with Unknown.
type Config struct {
	// Token has the role admin and the name root; "": there is none.
	Token string
	// Authorize finds the holder of any other token. It must not take longer for a token
	// that is nearly right: look it up by its hash.
	Authorize func(token string) (Actor, bool)

	// Now is the cluster's time, by which what is asked for by its age is looked up; nil: the machine's.
	Now func() time.Time
	// Zone finds a time zone by its name; nil: the machine's database does.
	Zone func(name string) (*time.Location, error)

	Gatherer prometheus.Gatherer
	Ready    func() error // why the node should get no traffic; nil if it should
	Status   func() Status
	Tenants  func() []Tenant
	// Levels shows a tenant's buckets; NotFound: there is no such tenant. What could not be learned
	// of one it says in Away.
	Levels  func(ctx context.Context, tenant string) ([]Level, error)
	Explain func(context.Context, ExplainRequest) (any, error) // may ask the owners of buckets

	// PolicyText gives a revision, or with 0 what is in force.
	PolicyText      func(ctx context.Context, revision uint64) (PolicyText, error)
	PolicyRevisions func(context.Context) ([]PolicyRevision, error)
	// ApplyPolicy changes all or nothing; a wrong policy is Invalid, another revision in
	// force than expected a Conflict.
	ApplyPolicy func(context.Context, Actor, PolicyChange) (Applied, error)
	RollBack    func(context.Context, Actor, Rollback) (Applied, error)

	ListKeys  func(context.Context) ([]Key, error) // used last on any node
	CreateKey func(context.Context, Actor, NewKey) (CreatedKey, error)
	RotateKey func(context.Context, Actor, KeyRotation) (CreatedKey, error)
	RevokeKey func(ctx context.Context, by Actor, id string) (Done, error) // for ever

	Kills   func(context.Context) ([]Kill, error)
	SetKill func(context.Context, Actor, KillSwitch) (Done, error)
	Ladder  func(context.Context) ([]Rung, error) // every rung there is
	SetRung func(context.Context, Actor, RungChange) (Done, error)

	Backends func(context.Context) ([]BackendState, error)
	SetDrain func(context.Context, Actor, DrainChange) (Done, error)

	Members      func(context.Context) ([]Member, error)
	RemoveMember func(ctx context.Context, by Actor, name string) (Done, error)
	Audit        func(context.Context, AuditFilter) ([]AuditEntry, error) // the newest last
	Tokens       func(context.Context) ([]Token, error)
	CreateToken  func(context.Context, Actor, NewToken) (CreatedToken, error)
	RevokeToken  func(ctx context.Context, by Actor, name string) (Done, error)

	Ledger func(context.Context) (LedgerInfo, error)
	// Backup writes a consistent copy, of the leader's state or with stale of this node's.
	Backup func(ctx context.Context, by Actor, w io.Writer, stale bool) error
	// Restore replaces the ledger's content on all nodes; without force only an empty one's.
	Restore func(ctx context.Context, by Actor, r io.Reader, force bool) (Restored, error)

	// Budgets are a tenant's accounts, of all tenants where tenant is ""; NotFound: there is no
	// such tenant. Holders are the nodes that hold something of any, the gone ones first.
	Budgets       func(ctx context.Context, tenant string) ([]Budget, error)
	AdjustBudget  func(context.Context, Actor, BudgetAdjustment) (Adjusted, error)
	Holders       func(context.Context) ([]BudgetHolder, error)
	ReleaseBudget func(context.Context, Actor, BudgetRelease) (Released, error)
	// ExportUsage writes the usage log of all nodes, in the order of time or in sums; it says
	// whose part is missing. One that needs all of them fails with Incomplete, before it wrote
	// anything if it can.
	ExportUsage func(context.Context, io.Writer, UsageQuery) ([]Missing, error)
	TopUsage    func(context.Context, UsageTop) (UsageRows, error)

	// InvalidateCache ends kept answers on every node; NotFound: the policy has no such tenant or
	// surface. Generations are those that were ever raised. CacheStats and ExplainKey are of this
	// node; ExplainKey asks no model, charges nothing, and shows no answer.
	InvalidateCache  func(context.Context, Actor, CacheInvalidation) (CacheInvalidated, error)
	CacheGenerations func(context.Context) ([]CacheGeneration, error)
	CacheStats       func(context.Context) (CacheStats, error)
	ExplainKey       func(context.Context, CacheQuestion) (CacheExplanation, error)
	// WrongAnswer evicts an entry of the semantic cache on every node and counts it as wrong; NotFound: no node
	// knows it. CacheRecent is what this node's requests were told last.
	WrongAnswer func(context.Context, Actor, CacheWrong) (CacheWrongDone, error)
	CacheRecent func(context.Context) ([]CacheDecision, error)

	// This node's own, without a quorum; they expire.
	Override    func(context.Context) (*Override, error) // nil: none
	SetOverride func(context.Context, Actor, OverrideChange) (Done, error)
	NodeKills   func(context.Context) ([]Kill, error)
	SetNodeKill func(context.Context, Actor, KillSwitch) (Done, error)

	// What this node kept of requests. An export that fails before it wrote anything says so.
	ExportContent func(Actor, io.Writer, ContentFilter) error
	EraseContent  func(Actor, ContentFilter) (int, error)
}

// route is a call of the API and the least role that may make it.
type route struct {
	pattern string // below /admin/v1/
	role    Role
	handler http.Handler
}

// routes are all there are below /admin/v1/.
func (c Config) routes() []route {
	return []route{
		{"GET status", RoleRead, get(c.Status)},
		{"GET tenants", RoleRead, get(c.Tenants)},
		{"GET limits/{tenant}", RoleRead, http.HandlerFunc(c.getLimits)},
		{"POST explain", RoleRead, http.HandlerFunc(c.postExplain)},

		{"GET policy", RoleRead, http.HandlerFunc(c.getPolicy)},
		{"GET policy/revisions", RoleRead, list(c.PolicyRevisions)},
		{"PUT policy", RoleAdmin, change(c.ApplyPolicy, readPolicyChange)},
		{"POST policy/rollback", RoleAdmin, change(c.RollBack, readRollback)},

		{"GET keys", RoleRead, list(c.ListKeys)},
		{"POST keys", RoleAdmin, change(c.CreateKey, readNewKey)},
		{"POST keys/{id}/rotate", RoleAdmin, change(c.RotateKey, readRotation)},
		{"DELETE keys/{id}", RoleOperate, change(c.RevokeKey, pathValue("id"))},

		{"GET kill", RoleRead, list(c.Kills)},
		{"PUT kill/{kind}", RoleOperate, change(c.SetKill, readKill(true))},
		{"PUT kill/{kind}/{name...}", RoleOperate, change(c.SetKill, readKill(true))},
		{"DELETE kill/{kind}", RoleOperate, change(c.SetKill, readKill(false))},
		{"DELETE kill/{kind}/{name...}", RoleOperate, change(c.SetKill, readKill(false))},
		{"GET ladder", RoleRead, list(c.Ladder)},
		{"PUT ladder/{rung}", RoleOperate, change(c.SetRung, readRung)},
		{"GET backends", RoleRead, list(c.Backends)},
		{"PUT backends/{backend}/drain", RoleOperate, change(c.SetDrain, readDrain)},

		{"GET members", RoleRead, list(c.Members)},
		{"DELETE members/{name}", RoleAdmin, change(c.RemoveMember, pathValue("name"))},
		{"GET audit", RoleRead, http.HandlerFunc(c.getAudit)},
		{"GET tokens", RoleRead, list(c.Tokens)},
		{"POST tokens", RoleAdmin, change(c.CreateToken, readNewToken)},
		{"DELETE tokens/{name}", RoleAdmin, change(c.RevokeToken, pathValue("name"))},

		{"GET ledger", RoleRead, one(c.Ledger)},
		{"GET ledger/backup", RoleAdmin, http.HandlerFunc(c.getBackup)},
		{"POST ledger/restore", RoleAdmin, http.HandlerFunc(c.postRestore)},

		{"GET budgets", RoleRead, http.HandlerFunc(c.getBudgets)},
		{"GET budgets/{tenant}", RoleRead, http.HandlerFunc(c.getBudgets)},
		{"POST budgets/adjust", RoleAdmin, change(c.AdjustBudget, readAdjustment)}, // of all tenants
		{"POST budgets/{tenant}/adjust", RoleAdmin, change(c.AdjustBudget, readAdjustment)},
		{"GET holders", RoleRead, list(c.Holders)},
		{"POST budgets/release", RoleAdmin, change(c.ReleaseBudget, readRelease)},
		{"GET usage", RoleRead, http.HandlerFunc(c.getUsage)},
		{"GET usage/top", RoleRead, http.HandlerFunc(c.getTop)},

		{"POST cache/invalidate", RoleOperate, change(c.InvalidateCache, readInvalidation)},
		{"GET cache/generations", RoleRead, list(c.CacheGenerations)},
		{"GET cache/stats", RoleRead, http.HandlerFunc(c.getCacheStats)},
		{"POST cache/wrong", RoleOperate, change(c.WrongAnswer, readWrong)},
		{"GET cache/recent", RoleRead, list(c.CacheRecent)},
		{"POST cache/explain-key", RoleRead, http.HandlerFunc(c.postExplainKey)},

		{"GET node/override", RoleRead, one(c.Override)},
		{"PUT node/override", RoleOperate, change(c.SetOverride, readOverride)},
		{"DELETE node/override", RoleOperate, change(c.SetOverride, noOverride)},
		{"GET node/kill", RoleRead, list(c.NodeKills)},
		{"PUT node/kill/{kind}", RoleOperate, change(c.SetNodeKill, readNodeKill(true))},
		{"PUT node/kill/{kind}/{name...}", RoleOperate, change(c.SetNodeKill, readNodeKill(true))},
		{"DELETE node/kill/{kind}", RoleOperate, change(c.SetNodeKill, readNodeKill(false))},
		{"DELETE node/kill/{kind}/{name...}", RoleOperate, change(c.SetNodeKill, readNodeKill(false))},

		// What people wrote is more than a look at the machines.
		{"GET content", RoleAdmin, http.HandlerFunc(c.getContent)},
		{"DELETE content", RoleAdmin, http.HandlerFunc(c.deleteContent)},
	}
}

// Handler serves everything.
func Handler(c Config) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"status": "alive"})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := c.Ready(); err != nil {
			writeJSON(w, http.StatusServiceUnavailable, map[string]any{"error": map[string]any{"message": err.Error(), "code": "not_ready"}})
			return
		}
		writeJSON(w, http.StatusOK, map[string]string{"status": "ready"})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(c.Gatherer, promhttp.HandlerOpts{}))

	api := http.NewServeMux()
	for _, r := range c.routes() {
		api.Handle(below(r.pattern), c.authorized(r.role, r.handler))
	}
	// What does not exist is told only to those who may look.
	mux.Handle("/admin/v1/", gate(api, c.authorized(RoleRead, api)))
	return mux
}
