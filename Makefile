# Verbena. `make` lists what can be made; `make demo` and `make test` are the two
# that a fresh machine needs. The work is done by scripts/, so that each step can
# also be run and read by itself.

SHELL     := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PREFIX    ?= /usr/local
FUZZTIME  ?= 30s
FUZZ      ?=
SOAKTIME  ?= 10m
BENCHARGS ?=
KERNELS   ?= stable,sid
RUN       ?=
WRITE     ?=
CUDAARGS  ?=

# See scripts/lib.sh: stamp version information only where git can read it.
ifneq ($(shell git rev-parse --is-inside-work-tree 2>/dev/null),true)
export GOFLAGS := $(GOFLAGS) -buildvcs=false
endif

.DEFAULT_GOAL := help
.PHONY: help setup build clib demo test lint fuzz bench bench-net netsim interop interop-bench hmm-tests cuda-test check-full soak profile clean install

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what building and testing need, where something is missing
	@scripts/setup.sh

build: ## build bin/verbena
	@go build -o bin/verbena ./cmd/verbena

clib: ## build the drop-in libibverbs into bin/lib
	@scripts/clib.sh

demo: ## show the device at work; needs nothing but Go
	@go run ./cmd/verbena demo

test: setup ## set up, lint, build and test everything
	@scripts/test.sh

lint: setup ## lint only: formatting, errors, who may import whom
	@scripts/lint.sh

fuzz: ## run each fuzz target for FUZZTIME (30s); FUZZ=word picks by name
	@FUZZTIME=$(FUZZTIME) scripts/fuzz.sh $(FUZZ)

bench: setup build clib ## measure speed, beside other software on this machine; BENCHARGS are passed on
	@go run ./internal/benchsuite $(BENCHARGS)

bench-net: setup build clib ## measure between network namespaces, over links that lose, delay and mark packets, beside TCP, as root; BENCHARGS are passed on
	@go run ./internal/benchsuite/netbench $(BENCHARGS)

netsim: ## simulate queue pairs at a bottleneck, beside a model of TCP cubic, in virtual time; SIMARGS are passed on
	@go run ./internal/netsim/run $(SIMARGS)

# The second part has the kernels that its tests name. It runs also if the first has failed; not with RUN, which chooses
# among the cases of the first.
interop: setup ## hold our packets, PCI verdicts and NVMe to the Linux kernel, all cases; KERNELS=stable,sid RUN=regexp, of packets only
	@failed=; \
	go run ./interop/rxe/runner -kernels '$(KERNELS)' -run '$(RUN)' || failed=1; \
	if [ -z '$(RUN)' ]; then \
	  CI=true VERBENA_FULL=1 go test -json -count=1 -p 1 -timeout 6h ./interop/p2p ./interop/nvme ./interop/nvmeof | go run ./internal/testsum -strict || failed=1; \
	fi; \
	[ -z "$$failed" ]

interop-bench: setup ## compare speeds with the kernel's own device, in one virtual machine
	@go run ./interop/rxe/runner -kernels sid -bench 5

hmm-tests: setup ## hold package hmm to Linux's own tests of HMM, as root; RUN=regexp, WRITE=1 renews docs/hmm-tests.md
	@go run ./interop/hmmtests/runner -run '$(RUN)' $(if $(WRITE),-write)

cuda-test: ## hold NCCL, PyTorch and others to GPU memory; needs an NVIDIA GPU, and bin from here or elsewhere; CUDAARGS are passed on
	@nvidia-smi -L >/dev/null 2>&1 || { echo 'cuda-test: needs a machine with an NVIDIA GPU and its driver; nvidia-smi finds none here' >&2; exit 1; }
	@if command -v go >/dev/null; then scripts/clib.sh && go build -o bin/verbena ./cmd/verbena && go test -tags cuda -c -o bin/gpu-cuda.test ./gpu/cuda; fi
	@python3 interop/cuda/run.py $(CUDAARGS)

check-full: setup ## like test, with the long matrices (up to an hour)
	@scripts/test.sh full

soak: ## run the soak tests for SOAKTIME (10m) under the race detector
	@grep -rqE --include='*_test.go' '^func TestSoak' . || { echo 'soak: no soak tests in the tree' >&2; exit 1; }
	@VERBENA_SOAK=$(SOAKTIME) go test -race -count=1 -run '^TestSoak' -timeout 0 ./...

profile: ## renew the profile that the compiler goes by (cmd/verbena/default.pgo)
	@scripts/profile.sh

clean: ## remove what was built here; the linter in .bin stays
	@rm -rf bin .logs .bin/testsum .bin/tmp.*

install: build clib ## install the command and the library under PREFIX (/usr/local); DESTDIR is honoured
	@install -D -m 755 bin/verbena $(DESTDIR)$(PREFIX)/bin/verbena
	@install -d $(DESTDIR)$(PREFIX)/lib/verbena $(DESTDIR)$(PREFIX)/include/verbena
	@cp -P bin/lib/*.so* $(DESTDIR)$(PREFIX)/lib/verbena/
	@install -m 755 bin/lib/verbena-watcher $(DESTDIR)$(PREFIX)/lib/verbena/
	@install -d $(DESTDIR)$(PREFIX)/lib/verbena/gpu
	@cp -P bin/lib/gpu/*.so* $(DESTDIR)$(PREFIX)/lib/verbena/gpu/
	@install -m 644 clib/include/verbena/*.h $(DESTDIR)$(PREFIX)/include/verbena/
