.DEFAULT_GOAL := help
SHELL := bash
PYTHON ?= python3.11
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
ENGINE ?= emulated
PYTHON_PACKAGES := calibrator cli controlplane dataplane enginemodel evaluation localcluster servicekit simulator

.PHONY: help setup demo up down test test-unit test-contract test-integration test-real-vllm \
  test-compose lint fmt types imports protos protos-check bench bench-sim bench-peers load-tools litellm-check results results-simulator results-quick venv-vllm lock clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.steelyard ## Make the environment from the hashed lock

.venv/.steelyard: requirements/dev.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes -r requirements/dev.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

venv-vllm: ## Make the environment of real vLLM on CPU (2.7 GB, a minute or two)
	PYTHON=$(PYTHON) tools/make_vllm_env.sh

demo: setup ## Bring a cluster up, send mixed requests through each policy, print the table (ENGINE=vllm for real engines)
	@if [ "$(ENGINE)" != emulated ]; then $(MAKE) --no-print-directory venv-vllm; fi
	$(BIN)/steelyard demo --engine $(ENGINE)

up: setup ## Bring a cluster up on this machine until Ctrl-C
	@if [ "$(ENGINE)" != emulated ]; then $(MAKE) --no-print-directory venv-vllm; fi
	$(BIN)/steelyard up --engine $(ENGINE)

down: ## Take the compose cluster down with its volumes
	docker-compose down --volumes --remove-orphans

test: setup lint types imports protos-check ## Everything: linters, unit, contract, integration, real vLLM, compose where Docker answers
	$(MAKE) --no-print-directory venv-vllm
	tools/test_all.sh

test-unit: setup ## Pure parts
	$(PYTEST) tests/unit

test-contract: setup ## One suite for each implementation of a seam
	$(PYTEST) tests/contract -m 'not real_vllm'

test-integration: setup ## Real processes, gRPC and Redis, emulated engines
	$(PYTEST) tests/integration

test-real-vllm: setup venv-vllm ## Real vLLM and NIXL on CPU
	$(PYTEST) tests/real_vllm tests/contract -m real_vllm

test-compose: setup ## docker-compose.yml on a real Docker engine
	$(PYTEST) tests/compose

lint: setup ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: setup ## Mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## Types, strict
	$(BIN)/mypy $(foreach package,$(PYTHON_PACKAGES),-p $(package))

imports: setup ## Who may import whom
	$(BIN)/lint-imports

protos: setup ## Generate the code of protos/
	$(BIN)/python tools/gen_protos.py

protos-check: setup ## Fail where generated code is stale or a proto is out of style
	$(BIN)/python tools/gen_protos.py --check
	cd protos && ../$(BIN)/buf lint

bench: setup ## Measure decisions, relaying, refreshing and memory; print each with its aim
	$(BIN)/python -m benchmarks.run

bench-sim: setup ## Simulated requests per CPU-second by policy (VIDUR_PYTHON=python of an environment with vidur: beside it)
	$(BIN)/python -m benchmarks.bench_sim

bench-peers: setup ## Cost of a routed request beside vllm-router and smg, on the same mock engines
	$(BIN)/python -m benchmarks.bench_peers

load-tools: setup ## vllm bench serve, guidellm, aiperf, inference-perf against a gateway, beside the journal
	$(BIN)/python -m benchmarks.load_tools

litellm-check: setup ## LiteLLM's proxy in front of a gateway: answers, streams, usage, refusals, headers
	$(BIN)/python -m benchmarks.litellm_check

results: setup venv-vllm ## Measure docs/results.md on paced real engines: hours, resumable (PARTS="table2 saturation again others workloads emulated")
	tools/measure.sh $(PARTS)

results-simulator: setup ## Simulate docs/results-simulator.md and write its tables: an hour or two, resumable (PARTS="grid frontier" JOBS=2 COMPILED=1)
	tools/simulate.sh $(PARTS)

results-quick: setup venv-vllm ## A short version: gates, two policies on paced 1P2D, emulated engines beside, fidelity (6 min)
	rm -rf out/quick
	$(BIN)/steelyard evaluate measured-table2 --quick --backend paced --dilation 3 --seeds 1 --seconds 30 --json out/quick/paced.jsonl
	$(BIN)/steelyard evaluate measured-table2 --quick --backend emulated --dilation 1 --seeds 1 --seconds 30 --json out/quick/emulated.jsonl
	$(BIN)/steelyard evaluate fidelity out/quick/paced.seeds.jsonl --emulated out/quick/emulated.seeds.jsonl --dilation 3 --with-invalid
	$(BIN)/steelyard evaluate handoffs .run/paced --dilation 3

lock: ## Renew requirements/*.lock
	$(BIN)/python tools/lock.py

clean: ## Remove what was made
	rm -rf .venv .venv-vllm .run out dist .mypy_cache .ruff_cache .pytest_cache
