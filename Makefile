# Targets that CI runs are the ones that people run.
GO      ?= go
BIN     := bin/headgate
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
UPSTREAM ?=

.PHONY: run build test race fuzz sim system lint generate bench soak test-vllm

run: build ## a node before a simulated vLLM, or before UPSTREAM=http://…
	@$(BIN) demo $(if $(UPSTREAM),--upstream $(UPSTREAM))

build:
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags "-X main.version=$(VERSION)" -o $(BIN) ./cmd/headgate

test: ## everything that must hold; installs nothing
	$(GO) vet ./...
	$(GO) test -timeout 10m ./...

race: ## the rooms in which goroutines meet
	$(GO) test -race -timeout 15m ./lease ./proxy/... ./bench/fakevllm ./cmd/node

FUZZTIME ?= 20s
fuzz: ## every fuzz target for FUZZTIME each
	@set -e; for pkg in $$($(GO) list ./...); do \
		for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "$$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$pkg; \
		done; done

sim:
	@echo "nothing to simulate yet: the lease protocol brings the simulator"

system:
	@echo "no cluster to cut and kill yet; the tests with real processes run in make test"

generate:
	@echo "nothing is generated yet"
