# prefixd: everything starts here. `make` alone prints what there is.
# Needs python3.11 or later with venv, make, and an index for pip; nothing else.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
DRAM ?= 512MiB
SOCKET ?= build/prefixd.sock
ONLY ?=
SEEDS ?= 200
PYTEST_ARGS ?=
SIDE_BY_SIDE := -n 2 --dist worksteal

# The environment is stamped with what it was made from, so that a changed pin
# or dependency installs again and nothing else does.
MADE_FROM := $(shell cat constraints.txt pyproject.toml | cksum | tr -d ' ')
STAMP := $(VENV)/made-from-$(MADE_FROM)
PROTOS := $(wildcard proto/prefixd/v1/*.proto)
GENERATED := proto/prefixd/v1/types_pb2.py
READY := $(STAMP) $(GENERATED)

# The release that the wire may not break; the last commit while there is none.
RELEASE := $(shell git describe --tags --abbrev=0 --match 'v*' 2>/dev/null)
GIT_DIR := $(shell git rev-parse --git-common-dir 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test crash-test lint proto bench serve clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: $(READY) ## two engine processes share one cache; exits 1 if a logit differs (6 min with the install)
	@$(PY) -m bench.demo

test: lint ## lint, then every test (10 min on 2 cores); PYTEST_ARGS=-n0 runs one at a time
	@$(PY) -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

crash-test: $(READY) ## the daemon killed SEEDS=200 times at random over its NVMe tier (3 min; 14 on busy cores)
	@PREFIXD_CRASH_SEEDS=$(SEEDS) $(PY) -m pytest $(SIDE_BY_SIDE) tests/crash/test_nvme_kills.py -k random $(PYTEST_ARGS)

lint: $(READY) ## ruff, mypy, import floors, buf (1 min)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache
	@$(VENV)/bin/buf lint proto
ifneq ($(GIT_DIR),)
	@$(VENV)/bin/buf breaking proto --against '$(GIT_DIR)#$(if $(RELEASE),tag=$(RELEASE),ref=HEAD),subdir=proto'
else
	@echo "not a git checkout: buf breaking has no release to compare with"
endif

proto: $(STAMP) ## generate the Python code of prefixd.v1 anew
	@$(PY) proto/generate.py

bench: $(READY) ## every benchmark against its limit, or ONLY=name (20 min)
	@missed=; for file in $(if $(ONLY),bench/$(ONLY).py,$(wildcard bench/[a-z]*.py)); do \
	    name=$$(basename $$file .py); echo "== bench.$$name"; \
	    $(PY) -m bench.$$name || missed="$$missed $$name"; done; \
	    test -z "$$missed" || { echo "limits missed in:$$missed" >&2; exit 1; }

serve: $(READY) ## run the daemon on SOCKET=build/prefixd.sock with DRAM=512MiB until Ctrl-C
	@mkdir -p $(dir $(SOCKET))
	@exec $(VENV)/bin/prefixd serve --socket $(SOCKET) --dram-size $(DRAM) --log-format console

clean: ## remove what was built and cached; the environment .venv stays
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@rm -f proto/prefixd/v1/*_pb2.py proto/prefixd/v1/*_pb2.pyi proto/prefixd/v1/*_pb2_grpc.py
	@find server client tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): constraints.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	    echo "$(PYTHON) is missing: on Debian, apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is older than 3.11: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make environments: on Debian, apt-get install python3-venv" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time takes 1 to 3 minutes)"
	@$(PY) -m pip install --quiet --disable-pip-version-check \
	    -c constraints.txt -e '.[server,transformers,dev]'
	@rm -f $(VENV)/made-from-*
	@touch $@

$(GENERATED): $(PROTOS) | $(STAMP)
	@$(PY) proto/generate.py

# Environments of their own, each in a file beside this one.
include $(wildcard *.mk)
