# gaiafs. "make help" lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

GO ?= go
BUILD := build
# The version of everything is in the file VERSION. Builds from a commit other than its tag add the commit to it.
RELEASE := $(shell cat VERSION)
VERSION ?= $(RELEASE)$(shell git describe --exact-match --tags --match v$(RELEASE) >/dev/null 2>&1 || git describe --always --dirty --exclude '*' 2>/dev/null | sed 's/^/+/')
NFPM := github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.36.0
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

# The version is set here, so that it also works if git does not trust the folder's owner.
export GOFLAGS := $(GOFLAGS) -buildvcs=false

# Time limit for the tests of one package. Only a hang reaches it: tests that wait for something have limits of their own,
# and beside other work a package takes many times as long as alone.
TEST_TIMEOUT ?= 60m
# Summarises test output. The whole output of failed packages is kept in build/test-output.
SUMMARY := $(GO) run ./internal/testsummary -keep $(BUILD)/test-output
# How long each fuzz target runs.
FUZZ_TIME ?= 20s
# Part of a plant's name: run only matching plants.
PLANT ?=
# Part of the name of an instance or mutant in spec: check only matching ones.
SPEC ?=
# Flags that are passed on to the programs.
DEMO_FLAGS ?=
BENCH_FLAGS ?=

# The C library: build/libgaiafs.so, header, pkg-config file and manual page.
include client/c/build.mk

# The page kernels for NVIDIA GPUs.
include gpubackend/cuda/build.mk

# The benchmarks on GPUs, and the bundle that brings them to a machine with GPUs.
include bench/gpu/build.mk

##@ The two targets for newcomers

.PHONY: demo
demo: setup-demo build ## Set everything up, build, and stitch a picture with a CPU and a GPU program at once
	$(BUILD)/gaiafs demo $(DEMO_FLAGS)

.PHONY: test
test: setup-test build ## Build, and run all tests
	$(GO) test -json -timeout $(TEST_TIMEOUT) ./... | $(SUMMARY)

# Everything but mounts, commands, clients and benchmarks.
QUICK = $(shell $(GO) list ./... | grep -vE '/gaiafs/(fs|cmd/.*|client/.*|bench.*|internal/(mounttest|plants|stress|testmount))$$$$')

.PHONY: test-quick
test-quick: ## Run a part of the tests that needs no mounts and installs nothing: some minutes
	$(GO) test -json -timeout $(TEST_TIMEOUT) $(QUICK) | $(SUMMARY)

##@ Building

.PHONY: build
build: $(BUILD)/gaiafs $(LIBGAIAFS) ## Build build/gaiafs and the C library

# Always run: Go knows best what has changed.
.PHONY: $(BUILD)/gaiafs
$(BUILD)/gaiafs:
	@mkdir -p $(BUILD)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o $@ ./cmd/gaiafs

.PHONY: wheel
wheel: ## Build a wheel of the Python package, with the C library, in build/wheel
	python3 -m pip wheel -q --no-deps -w $(BUILD)/wheel ./client/python

.PHONY: install
install: gaiafs-install libgaiafs-install ## Install gaiafs and the C library below PREFIX (/usr/local)

.PHONY: uninstall
uninstall: gaiafs-uninstall libgaiafs-uninstall ## Remove what make install installed

# mkdocs-material, and pandoc for the manual pages, in a separate environment.
DOCS_ENV := $(BUILD)/docs-env
$(DOCS_ENV)/made: Makefile
	python3 -m venv $(DOCS_ENV)
	$(DOCS_ENV)/bin/pip install -q mkdocs-material==9.6.20 pypandoc_binary==1.17
	touch $@

.PHONY: docs
docs: $(DOCS_ENV)/made ## Build the documentation as a site in build/site, and check all links
	$(DOCS_ENV)/bin/mkdocs build -q --strict

# The commands, with manual pages, completions, mount helper and service.
include packaging/build.mk

.PHONY: setup-demo
setup-demo: # Install what building and mounting need
	@.ci/setup demo

.PHONY: setup-test
setup-test: # Install what the tests need in addition
	@.ci/setup test

.PHONY: setup-spec
setup-spec: # Install Java and TLC
	@.ci/setup spec

.PHONY: clean
clean: ## Remove everything that was built
	rm -rf $(BUILD)

##@ Checks. None of these changes a source file.

.PHONY: check
check: check-format check-vet check-static check-imports check-tidy ## All checks below

.PHONY: check-format
check-format: ## List files that gofmt would change
	@wrong=$$(gofmt -l .); \
	if [ -n "$$wrong" ]; then printf 'not formatted, run gofmt -w on:\n%s\n' "$$wrong"; exit 1; fi

.PHONY: check-vet
check-vet: ## Run go vet, for each set of build tags
	$(GO) vet ./...
	$(GO) vet -tags invariants ./...
	$(GO) vet -tags slowtwin ./lrc

.PHONY: check-static
check-static: ## Run staticcheck
	$(GO) run $(STATICCHECK) ./...

.PHONY: check-imports
check-imports: ## Find imports that go the wrong way
	$(GO) test ./internal/arrows

.PHONY: check-tidy
check-tidy: ## Show what go mod tidy would change
	$(GO) mod tidy -diff

##@ More tests

.PHONY: python-test
python-test: setup-test ## Run the tests of the Python package, in build/python
	GAIAFS_REQUIRE_TOOLS=1 $(GO) test -count=1 -timeout $(TEST_TIMEOUT) -v ./client/python

# The versions with which the loaders in client/python/integrations were checked. To run, they need gigabytes of other packages.
ENGINES := vllm==0.33.0 sglang==0.5.23

.PHONY: test-engines
test-engines: setup-test ## Test the loaders for vLLM and SGLang with the real packages: downloads 400 MB
	@rm -rf $(BUILD)/engines
	$(BUILD)/python/bin/python -m pip install -q --no-deps --target $(BUILD)/engines $(ENGINES)
	$(BUILD)/python/bin/python -m pip install -q --no-deps --no-build-isolation --target $(BUILD)/engines \
		./client/python/integrations
	cd client/python && GAIAFS_ENGINES=$(abspath $(BUILD)/engines) PYTHONPATH=.:integrations \
		$(abspath $(BUILD))/python/bin/python -m pytest -q -p no:cacheprovider integrations/tests/real.py

# The oldest supported version, the first that merges experts, the one that ran on GPUs, and the newest.
TRANSFORMERS := 4.56.2 5.0.0 5.17.0 5.23.0

.PHONY: test-transformers
test-transformers: setup-test ## Test models on several versions of transformers: downloads 3 GB, most of it PyTorch
	python3 -m venv $(BUILD)/transformers/python
	$(BUILD)/transformers/python/bin/python -m pip install -q -r client/python/tests/requirements.txt torch accelerate
	for v in $(TRANSFORMERS); do $(BUILD)/transformers/python/bin/python -m pip install -q --upgrade \
		--target $(BUILD)/transformers/$$v transformers==$$v || exit 1; done
	GAIAFS_REQUIRE_TOOLS=1 $(GO) test -count=1 -timeout 30m -v ./client/python -run TestTransformers

.PHONY: test-race
test-race: ## Run all tests under the race detector, with invariants checked
	$(GO) test -json -race -tags invariants -timeout 30m ./... | $(SUMMARY)

# The rules and their execution: 4 minutes of processor time. Package fs is left out, because all of CI may take at most
# 15 minutes on 2 cores. test-race runs everything.
.PHONY: test-race-core
test-race-core: ## Test the rules and the page cache under the race detector, with invariants checked
	$(GO) test -json -race -tags invariants -timeout 30m ./lrc ./pagecache ./pagecache/cleanread ./pagecache/residency | $(SUMMARY)

.PHONY: test-twin
test-twin: ## Run random programs on the states of pages and on their slow twin, and compare every answer
	$(GO) test -tags slowtwin ./lrc -run 'Transcripts|Random|Rapid|AgainstPages|Aborted|FarApart' -steps=40000

.PHONY: test-gpu
test-gpu: build ## Run all tests on a machine with a GPU: a test that finds none fails
	GAIAFS_REQUIRE_GPU=1 $(GO) test -json -timeout $(TEST_TIMEOUT) ./... | $(SUMMARY)

.PHONY: test-plants
test-plants: ## Plant faults, one at a time, and check that the tests notice them: half an hour
	$(GO) test ./internal/plants -plants -timeout 0 -v -run 'TestPlantsAreNoticed/$(PLANT)'

.PHONY: spec
spec: setup-spec ## Check the rules of coherence with TLC, and that it refutes each mutant: minutes
	spec/check bounded "$(SPEC)"

.PHONY: spec-full
spec-full: setup-spec ## The same, as far as is practical, and 1,000 traces of random programs: hours
	spec/check full "$(SPEC)"
	spec/traces 1000

.PHONY: spec-traces
spec-traces: setup-spec build ## Let TLC judge what random programs saw on lrc and on mounts
	spec/traces 20

.PHONY: fuzz
fuzz: ## Run every fuzz target, for FUZZ_TIME each (20s)
	@for package in $$(grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n 1 dirname | sort -u); do \
		for target in $$(grep -h '^func Fuzz' $$package/*_test.go | sed 's/func \(Fuzz[A-Za-z0-9_]*\).*/\1/'); do \
			echo "$$package $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZ_TIME) $$package; \
		done; \
	done

.PHONY: bench
bench: build ## Compare with the alternatives, and print a table of ratios
	$(BUILD)/gaiafs bench $(BENCH_FLAGS)

.PHONY: help
help: ## Print this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { sub(/:.*/, "", $$1); printf "  make %-14s %s\n", $$1, $$2 }' Makefile packaging/build.mk bench/gpu/build.mk
