# Tidegate's one-command tasks. `make` alone lists them. Everything they make stays inside this folder:
# .venv (the virtual environment) and .local (logs, generated files).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
# More arguments for the program that a target runs, e.g. make test ARGS='-k queue -x'
ARGS ?=
# The interpreter that makes the virtual environment; unset: the first one found that is new enough.
PYTHON ?=
PROTOS := $(wildcard protos/inference/v1/*.proto)
PROTOC = PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I.
# What pip freeze says and a lock must not: this project itself, and builds of one machine (torch==2.13.0+cpu).
FREEZE = pip freeze --exclude-editable --exclude tidegate | sed -E 's/\+[A-Za-z0-9.]+$$//' | LC_ALL=C sort -f
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c requirements.lock

.PHONY: help run demo bench-peers bench-modes test check format protos protos-check up down lock clean

help:  ## List what can be made
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 22

run: $(VENV)/.installed-run  ## Start redis, a worker and a gateway, show a first answer, stay up until Ctrl-C
	@exec $(BIN)/python -m launcher run $(ARGS)

demo: $(VENV)/.installed-run  ## Three tenants chat at once; a table closes it
	@exec $(BIN)/python -m launcher demo $(ARGS)

bench-peers: $(VENV)/.installed-dev  ## Our engine beside others, and behind its gateway, on the same work (ten minutes)
	$(BIN)/python -m bench.peers $(ARGS)

bench-modes: $(VENV)/.installed-dev  ## The five batching modes on the same requests, side by side (ten minutes)
	@exec $(BIN)/python -m bench modes $(ARGS)

test: $(VENV)/.installed-dev  ## Run all tests
	@exec $(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-dev protos-check  ## Formatting, lint, types, import rules, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: $(VENV)/.installed-dev  ## Format the code and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(VENV)/.installed-dev  ## Generate Python code from protos/
	$(PROTOC) --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

protos-check: $(VENV)/.installed-dev
	@rm -rf .local/protos && mkdir -p .local/protos
	@$(PROTOC) --python_out=.local/protos --grpc_python_out=.local/protos \
		--mypy_out=quiet:.local/protos --mypy_grpc_out=quiet:.local/protos $(PROTOS)
	@for made in .local/protos/protos/inference/v1/*; do \
		cmp -s "$$made" "$${made#.local/protos/}" || { \
			echo "$${made#.local/protos/} is not what its .proto generates; run: make protos" >&2; exit 1; }; \
	done
	@echo "generated protobuf code is up to date"

up:  ## Build the images and start the deployment with Docker compose
	docker compose up --build --detach --wait $(ARGS)

down:  ## Stop the deployment and remove what it stored
	docker compose down --volumes --remove-orphans $(ARGS)

lock:  ## Pin the newest versions that pyproject.toml allows, and regenerate code with them
	@$(find-python); rm -rf .local/lock && "$$python" -m venv .local/lock
	.local/lock/bin/python -m pip install --disable-pip-version-check -e '.[gateway,worker,local,bench,dev]'
	.local/lock/bin/python -m $(FREEZE) > requirements.lock.new
	{ sed -n '/^#/p' requirements.lock; cat requirements.lock.new; } > requirements.lock.next
	mv requirements.lock.next requirements.lock && rm -rf requirements.lock.new .local/lock
	$(MAKE) protos

clean:  ## Remove everything that was made here, the virtual environment too
	rm -rf $(VENV) .local build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up is redone only when what it depends on has changed.
$(VENV)/.installed-run: pyproject.toml requirements.lock | $(BIN)/python
	@echo "Installing Tidegate's dependencies into $(VENV) (the largest is PyTorch; this happens once)"
	$(INSTALL) -e '.[gateway,worker,local]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-run
	@echo "Installing what tests and checks need"
	$(INSTALL) -e '.[gateway,worker,local,bench,dev]'
	@touch $@

$(BIN)/python:
	@$(find-python); echo "Making a virtual environment in $(VENV) with $$("$$python" --version)"; "$$python" -m venv $(VENV)

# Sets the shell variable `python`, or says what is missing.
define find-python
python=; for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python); do \
	if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
done; \
if [ -z "$$python" ]; then \
	echo "Tidegate needs Python 3.11 or newer; looked for: $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python)." >&2; \
	echo "Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; \
fi; \
if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	echo "$$python has no venv module; install it (on Debian and Ubuntu the package python3-venv)." >&2; exit 1; \
fi
endef
