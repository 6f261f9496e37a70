# Targets that CI runs are the ones that people run.
GO      ?= go
BIN     := bin/headgate
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
UPSTREAM ?=

.PHONY: run build test race fuzz sim system lint generate bench bench-full soak test-vllm

NODES ?= 3
run: build ## NODES nodes before a simulated vLLM, or before UPSTREAM=http://…
	@$(BIN) demo --nodes $(NODES) $(if $(UPSTREAM),--upstream $(UPSTREAM))

build:
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags "-X main.version=$(VERSION)" -o $(BIN) ./cmd/headgate

test: ## everything that must hold; installs nothing
	$(GO) vet ./...
	$(GO) test -timeout 10m ./...

race: ## the rooms in which goroutines meet
	$(GO) test -race -timeout 15m ./lease/... ./cluster/... ./cache/... ./proxy/... ./bench/fakevllm ./cmd/node

FUZZTIME ?= 20s
fuzz: ## every fuzz target for FUZZTIME each
	@set -e; for pkg in $$($(GO) list ./...); do \
		for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "$$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$pkg; \
		done; done

SEEDS ?= 100000
MONEY_SEEDS ?= 10000
FILL_SEEDS ?= 10000
sim: ## the simulations of view leases and of leases over SEEDS seeds, of money over MONEY_SEEDS, of the cache over FILL_SEEDS; HEADGATE_SIM_SEED=N, HEADGATE_MONEY_SEED=N or HEADGATE_FILL_SEED=N replays one
	HEADGATE_SIM_SEEDS=$(SEEDS) $(GO) test -count=1 -timeout 3h -run '^TestSimulation' -v ./cluster
	HEADGATE_SIM_SEEDS=$(SEEDS) $(GO) test -count=1 -timeout 3h -run '^TestSimulation$$' -v ./lease/leasetest
	HEADGATE_MONEY_SEEDS=$(MONEY_SEEDS) $(GO) test -count=1 -timeout 3h -run '^TestMoneySimulation' -v ./cmd/node
	HEADGATE_FILL_SEEDS=$(FILL_SEEDS) $(GO) test -count=1 -timeout 3h -run '^TestFillSimulation$$' -v ./cache
	HEADGATE_SEARCH_MESSAGES=8 HEADGATE_SEARCH_SETTLES=0 HEADGATE_SEARCH_REPEATS=0 $(GO) test -count=1 -timeout 3h -run '^TestSmallWorld$$' -v ./lease/leasetest

SYSTEM ?= KillAny|Writers|Partitions|GrowAndShrink|RollingRestart|Twins|Strangers|JoinNobody|Damaged|ManyKeys|AirGapped|Lease|NeverNine|DayLimit|OneLimit|Hammered|JoinReadmits|Replacing|OwnerOut|MessagesDo|Excess|StrictBudget|BudgetsWithout|BudgetsOf|SystemSlots|SystemBackends|SystemThousand|SystemCapacity|SystemCache|SystemSemantic|SystemUsage|SystemRelease
system: ## clusters of processes: killed, restarted, grown; as root also cut apart, in networks of their own
	HEADGATE_SYSTEM=1 $(GO) test -count=1 -timeout 15m -v -run '^Test($(SYSTEM))' ./cmd/headgate

generate: ## the protobuf code; needs protoc 3.21 or later
	GOBIN=$(CURDIR)/.cache/bin $(GO) install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
	GOBIN=$(CURDIR)/.cache/bin $(GO) install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.0
	PATH=$(CURDIR)/.cache/bin:$$PATH protoc --go_out=. --go_opt=module=headgate --go-grpc_out=. --go-grpc_opt=module=headgate \
		cluster/ledger/ledgerpb/ledger.proto cluster/clusterpb/cluster.proto lease/leasepb/lease.proto \
		proxy/journal/journalpb/journal.proto cache/cachepb/cache.proto cache/semantic/semanticpb/semantic.proto \
		proxy/dispatch/dispatchpb/dispatch.proto
	cp "$$($(GO) env GOROOT)/lib/time/zoneinfo.zip" cluster/ledger/zoneinfo.zip
	cd cache/vec/gen && $(GO) run . -out ../kernels_amd64.s -stubs ../kernels_amd64.go -pkg vec

SOAK ?= 10m
soak: ## faults, aborts and nonsense for SOAK, then nodes killed and a fleet overloaded for as long each, then MONEY_SEEDS and SEEDS of the simulations, then a million steps of the hunt for leaks; nothing may be left behind, or lost
	HEADGATE_SOAK=$(SOAK) $(GO) test -count=1 -timeout 30m -run '^TestSoak$$' -v ./cmd/node
	HEADGATE_SYSTEM=1 HEADGATE_SOAK=$(SOAK) $(GO) test -count=1 -timeout 60m -run '^TestKillAny' -v ./cmd/headgate
	HEADGATE_SYSTEM=1 HEADGATE_SOAK=$(SOAK) $(GO) test -count=1 -timeout 60m -run '^TestLeasesSoak$$' -v ./cmd/headgate
	HEADGATE_SYSTEM=1 HEADGATE_SOAK=$(SOAK) $(GO) test -count=1 -timeout 60m -run '^TestSystemCapacityOverload$$' -v ./cmd/headgate
	HEADGATE_MONEY_SEEDS=$(MONEY_SEEDS) $(GO) test -count=1 -timeout 3h -run '^TestMoneySimulation' -v ./cmd/node
	HEADGATE_SIM_SEEDS=$(SEEDS) $(GO) test -count=1 -timeout 3h -run '^TestSimulation$$' -v ./lease/leasetest
	HEADGATE_LEAK_STEPS=1000000 $(GO) test -count=1 -timeout 1h -run 'Leak' -v ./cache ./cache/semantic ./proxy ./cmd/node
	HEADGATE_HNSW_OPS=1000000 $(GO) test -race -count=1 -timeout 1h -run '^TestRandomOps$$' -v ./cache/hnsw

LINT ?= v2.15.0
lint: ## golangci-lint, built once into .cache
	@test -x .cache/golangci-lint || GOBIN=$(CURDIR)/.cache $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT)
	.cache/golangci-lint run ./...

bench: build ## speed and memory, as ratios against peers in the same run, bounded for twenty minutes on two cores; results in bench/results; TRACE=FILE replays conversations to prefix caches
	$(go-benchmarks)
	$(GO) run ./bench/money -rounds 2 -out bench/results
	$(BIN) bench cache --rounds 3 --each 1s --seeds 5 --builds 1 --out bench/results
	$(BIN) bench lease --quick --out bench/results
	$(BIN) bench gateway --rounds 3 --each 1s --out bench/results $(if $(LITELLM),--litellm $(LITELLM))
	$(BIN) bench cluster --quick --out bench/results
	$(BIN) bench overload --quick --out bench/results
	$(if $(TRACE),$(GO) run ./bench/affinity -trace $(TRACE) -out bench/results)

bench-full: COUNT := 5
bench-full: BENCHTIME := 1s
bench-full: build ## the same at length, and the large cells: unattended, an hour and more
	$(go-benchmarks)
	$(GO) run ./bench/money -out bench/results
	$(BIN) bench cache --out bench/results
	$(BIN) bench cache --only vectors --vectors 100000 --builds 1 --rounds 3 --out bench/results
	$(BIN) bench cache --only vectors --of-questions --builds 1 --rounds 3 --out bench/results
	$(BIN) bench lease --out bench/results
	$(BIN) bench lease --large --out bench/results/large
	$(BIN) bench gateway --out bench/results $(if $(LITELLM),--litellm $(LITELLM))
	$(BIN) bench cluster --out bench/results
	$(BIN) bench overload --out bench/results
	$(if $(TRACE),$(GO) run ./bench/affinity -trace $(TRACE) -out bench/results)

COUNT     ?= 3
BENCHTIME ?= 0.3s
define go-benchmarks
	$(call benchmarks,decision,./bench/lease ./proxy/openai,^Benchmark(Decision|Memory|Stream|Scanner|Meter)$$)
	$(call benchmarks,lease-speed,./bench/lease,^Benchmark(Leased|Asked|Redis|KeepAlive|Tenants)$$)
	$(call benchmarks,ring,./cluster,^Benchmark(RingLookup|NewRing|MayGrant)$$)
	$(call benchmarks,ledger,./cluster/ledger ./bench/ledger,.)
	$(call benchmarks,embed,./cache/embed,^BenchmarkEmbed)
	$(call benchmarks,semantic-lookup,./cache/semantic,.)
	$(call benchmarks,admission,./proxy/queue ./proxy/dispatch ./proxy/upstream ./proxy/affinity ./proxy/route,.)
endef

# benchmarks RESULT,PACKAGES,PATTERN: COUNT runs of Go benchmarks into bench/results/RESULT.txt
define benchmarks
@mkdir -p bench/results
@echo "commit $$(git rev-parse HEAD), $$(date -u +%Y-%m-%d), $$(nproc) cores, load $$(cut -d' ' -f1 /proc/loadavg)" >bench/results/$(1).txt
$(GO) test -run '^$$' -bench '$(3)' -benchmem -count $(COUNT) -benchtime $(BENCHTIME) -timeout 60m $(2) >>bench/results/$(1).txt || { tail -20 bench/results/$(1).txt; exit 1; }
@cat bench/results/$(1).txt
endef

test-vllm: ## the client libraries against a real vLLM on the CPU: needs 6 GB and some ten minutes
	cmd/headgate/testdata/vllm/with-vllm $(GO) test -count=1 -v -run '^TestVLLM$$' ./cmd/headgate
