# What one does with this repository. `make` alone lists the targets.
# Needs make and a Python from 3.11 on; everything else is installed into .venv from the lock file.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The modules without I/O: their tests need no PostgreSQL and no socket, and take seconds.
UNIT := model errors config decision routes identity fingerprint wire project
UNIT_TESTS = $(wildcard $(UNIT:%=tests/test_%.py))

ROUNDS ?= 3
SECONDS_EACH ?= 5

.PHONY: help setup run demo test acceptance check format bench lock clean

help: ## list the targets
	@echo 'idempotency gateway'
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv, from the lock file

run: $(READY) ## start PostgreSQL, a sample ledger and the gateway; prove it; serve until Ctrl-C
	@$(BIN)/python -m gateway.demo.proof --stay

demo: $(READY) ## the same without staying: exit 0 only if the ledger holds one row per key
	@$(BIN)/python -m gateway.demo.proof

test: $(READY) ## all tests, with an embedded PostgreSQL or the one in GATEWAY_TEST_DSN
	@$(BIN)/python -m pytest -q $(TESTS)

acceptance: $(READY) ## the cases at full length: 200 rounds of 50, two minutes of each chaos
	@GATEWAY_TEST_ROUNDS=200 GATEWAY_TEST_CHAOS_SECONDS=120 $(BIN)/python -m pytest -q tests/cases

check: $(READY) ## format, lint, layers, types and the unit tests, in seconds
	@$(BIN)/ruff format --check --quiet . || { echo 'Some files are not formatted: run `make format`.'; exit 1; }
	@$(BIN)/ruff check --quiet --output-format=concise .
	@$(BIN)/lint-imports --no-logo > $(VENV)/layers.txt 2>&1 || { cat $(VENV)/layers.txt; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m pytest -q $(UNIT_TESTS)

format: $(READY) ## format the code and mend what the linter can
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench: $(READY) ## CPU per request beside a plain aiohttp proxy (ROUNDS=3 SECONDS_EACH=5; needs wrk and nginx)
	@$(BIN)/python -m bench --rounds $(ROUNDS) --seconds $(SECONDS_EACH) $(BENCH)

lock: $(READY) ## resolve the dependencies anew and write both lock files
	@rm -rf build/lock && $(BIN)/python -m venv build/lock && build/lock/bin/pip install --quiet pip-tools
	@for what in "requirements.lock --extra=embedded" "requirements-dev.lock --all-extras"; do \
		set -- $$what; echo "writing $$1"; \
		build/lock/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-annotate \
			--no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
			"$$2" --output-file "$$1" pyproject.toml; \
	done
	@rm -rf build/lock

clean: ## remove everything that the other targets made
	@rm -rf $(VENV) .demo .idempotency-gateway build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements-dev.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo 'This needs Python 3.11 or newer, and none was found.' \
		'Install it, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11'; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo '$(PYTHON) is missing or older than Python 3.11. Install one, or name it with PYTHON=...'; exit 1; }
	@test -x $(BIN)/python || { echo 'making .venv (once)'; "$(PYTHON)" -m venv $(VENV) > $(VENV).log 2>&1; } || { \
		cat $(VENV).log; rm -rf $(VENV) $(VENV).log; \
		echo 'No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv'; exit 1; }
	@rm -f $(VENV).log; echo 'installing what requirements-dev.lock names (once)'
	@export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1; { \
		$(BIN)/python -m pip install --quiet --requirement requirements-dev.lock && \
		$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .; \
		} > $(VENV)/pip.log 2>&1 || { cat $(VENV)/pip.log; \
		echo 'The packages could not be installed: see above. Only this step needs a network.'; exit 1; }
	@touch $@
