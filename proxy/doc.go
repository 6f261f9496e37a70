// Package proxy is the HTTP front door: it carries a request from its key to its settled
// answer. The pipeline is (*exchange).serve, on one screen.
//
// # Purpose
//
//	prefilter     a flooding or failing address or key is refused before anything is parsed
//	authenticate  key hash → Caller, from the snapshot; what a client says of itself counts as far as its key allows
//	killed        a thrown kill switch refuses: global, tenant, key; the model once it is known
//	matchRoute    a path that is not in the table is refused: no way around the meter, none to a backend's management
//	meter         one reading of the body (openai.Meter): model, caps, size; the body itself is never parsed again
//	resolve       alias → model → the one that the policy's routes choose, then its fallbacks; before it, where the
//	              ladder says so. What fits into no context is refused
//	consider      whether an answer may be kept; its key; what is kept on this node
//	shed          what is given up for the others, by cost, tier and class; what is kept here is served all the same
//	admit         every limit of the caller in one step, all or nothing, after waiting where a limit says so;
//	              then the budgets, all or nothing: a refusal gives the limits back
//	turn          where an answer may be kept, admit comes in two steps: first requests and slots, then the cache
//	              is asked, and only for a model's answer the rest
//	place         a place at a backend, from the cluster's queue where it is bounded (proxy/dispatch, proxy/queue)
//	forward       the request; another backend if that one cannot have received it, or is lost before it began to answer
//	relay         bytes through as they came, usage read on the way
//	settle        the actual against the estimate, before the last byte leaves
//
// A policy revision is a Snapshot. A request keeps the one that it started with, so that
// it settles in the buckets that it reserved in. Switches are not of a revision: they are
// read where they decide, so that one thrown while a body comes or a limit is waited for
// still binds. Neither cuts what has begun.
//
// # Invariants
//
//   - A reservation ends exactly once. settle is idempotent and finish, which runs whatever
//     happens, a panic too, settles what nobody else did. So does a bill, at the same moment.
//   - What a strict budget is charged is never below what the backend took, and what is
//     reserved of it never below what is charged: see bounds, and its proof in
//     TestStrictIsNeverPassed. All else that concerns money refuses on an error.
//   - Slots are free and levels settled before the last byte of an answer is written:
//     before the terminal event of a stream, before the last piece of a body.
//   - What was not admitted has charged nothing, except that a malformed request costs its
//     `requests` units, so that a client stuck on it is slowed.
//   - Whose answer it is decides the key of a kept one: cacheContext has all that a request is passed on
//     with and that may change its answer, and who it is for unless the surface shares. uncacheable
//     names what depends on more than that.
//   - A fill ends exactly once: stored, shared, failed, broken or given up. It is stored before its
//     own client can know that the answer is whole, and its call goes on without that client as long as
//     others wait; a client that reads slowly holds up none of them (detached).
//   - An answer to a question that means the same is looked for by who leads, after all that is kept of this
//     very question, and goes to those who wait as what it is: it is never kept as an answer to theirs.
//   - Nobody is sent to a backend after its patience is over, and who leaves the queue leaves no hole in it.
//   - An answer that has begun is nobody else's to give: only before its first byte is a request sent again, within
//     the pool's retry budget, and only where an answer leaves nothing behind but itself (repeatable).
//   - A refusal for want of capacity says over_capacity, why (X-Headgate-Dropped), and when to come again; it costs
//     nothing, and is never told as quota.
//   - Nothing is cut in the middle for quota. What an answer takes beyond its estimate is debt.
//   - Bytes that nobody had a reason to touch pass untouched. Touched are the model's name
//     where it is an alias, include_usage of a stream, and the one chunk that it adds; under
//     a strict budget the cap of the answer.
//   - Whatever grows has a bound: defaultMaxBody, maxAttempts, maxHolds, maxFallbacks, maxWaiters,
//     ownersKept, callersPerShard, maxTenantLabels, holdBody, openai.MaxFrame, maxAnswerHeld,
//     maxRefreshes, maxSemantic, maxEmbeddings, maxCacheTags, maxEntryTags.
//   - No prompt, answer or key is ever in a log line or a metric.
//
// # What a request is charged
//
// The estimate is the input by the bytes per token that the tenant's own requests to the
// model have taught, and for the answer the
// smallest of its cap, of what the context leaves, and of the 90th percentile of this
// key's last answers from the model once there are lengthsNeeded; the model's default only
// where there is neither cap nor history. (The smallest of all three, default included,
// would let fifty requests with a cap of 500 through a balance for ten as soon as the
// default is small.)
//
//	how it ended                                     tokens and dollars          requests
//	answered, usage reported and plausible           usage                       spent
//	stream without usage, cut, or left by its client input as estimated, deltas  spent
//	JSON answer without usage                        as reserved                 spent
//	client gone or timed out before the answer       as reserved                 spent
//	error from the backend, or none reachable after trying  nothing              spent
//	lost by backends that died before they answered, or gave none  nothing; the one that answers counts  spent once
//	no backend up, shed, or dropped by the queue     nothing                     given back
//	refused by a limit, a switch or a rung           nothing                     nothing
//	answered by the cache                            nothing                     spent
//
// Where the plan says `cached: metered`, an answer of the cache is reserved and charged like the
// model's. Whoever waits for another request's answer is answered by the cache. A refresh in the
// background is a request of its own, of the same caller and of class best_effort.
//
// A timeout is the longest silence: before the first byte, the wait for a place included, and between any two.
// A backend of the fleet that dies before it answered has taken nothing that anybody is billed for; what a provider
// may have begun is never sent to another.
//
// # What money is charged
//
// Every request that runs a model has a Bill, budgeted or not; Money keeps the budgets and
// writes the usage log. A free model asks no budget. The answering model's price counts, once,
// however many backends were tried; a model that was fallen back from has its bill cancelled.
//
// A normal budget reserves the estimate and is charged as the table says. A strict one reserves
// the upper bound, the cap of the answer included, and writes that cap into the request. Is
// less granted, the cap is what is affordable, down to one token (or min_tokens, or what
// Anthropic's thinking needs), and X-Headgate-Degraded says so. It gets back only what the
// backend itself has said it did not use, or what the stream shows that it did not:
//
//	how it ended                                     a strict budget is charged
//	answered to its end, usage reported and plausible  usage
//	the backend answers with an error status         nothing
//	no backend can have received it                  nothing
//	refused                                          nothing
//	a stream that is cut, left, without usage, or fails inside  what was seen of it bounds it: see exchange.seen
//	all else: no stream, not all of it seen, timed out, reset, a panic  what was reserved
//
// That is one figure for all budgets of a request, the usage log and the spend metric; limits
// in dollars go by the table above.
//
// # What it leaves out
//
// Whose a stored response is (owners) is known to this process only and forgotten when it
// ends; the response is then not found.
//
// # How it fails
//
// Before the first Apply every route answers not_ready. A limit whose owner is out of reach is
// decided by its Unavailable mode, or by the operator's override: Limits knows when, a charge
// says how. The answers that it touched, the metrics and an Explanation say so, Config.Degraded
// tells the gauge and the log; streams go on. Under Local the node's private share of the limit
// decides, and refuses where that is nothing.
//
// Where Money cannot decide, a request with budgets is answered billing_unavailable; what to
// do without any is Money's to say. A Settle that panics is not tried again: what was reserved
// stays so.
//
// Errors become HTTP in errors.go and nowhere else. Before the first byte an error is an
// answer of its own; after it a stream gets an error event, any other answer a closed
// connection. A panic is a 500 with the request's id, a stack in the log, and a settled
// reservation.
package proxy
