# The two commands that matter: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Bytecode is kept, whatever the environment says: without it pytest rewrites every test file anew in each process.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint unit test-all slow chaos soak kills hostile fuzz nat lab-quick evidence models settings pictures proto clean

demo: $(STAMP)
	$(BIN)/ftis-node demo

test: lint unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

# What is too long for `make test`.
test-all: test slow lab-quick

slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

# Eight daemons for ten minutes in which everything is killed, cut off and frozen; four for an hour in which nothing may
# grow. As root, for each daemon has a network namespace.
chaos soak: $(STAMP)
	$(BIN)/python -m tests.endurance $@

# A daemon that is killed with -9 two hundred times and has to go on each time: half an hour.
kills: $(STAMP)
	$(BIN)/python -m tests.kills

# Every attack of tests/hostile against three daemons on loopback, one after another: ten minutes.
hostile: $(STAMP)
	$(BIN)/python -m tests.hostile --seconds 600

# Ten minutes of coverage-guided fuzzing for each place where bytes from strangers become values.
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz all --seconds 600

# A node behind a router that lets nobody in, with relays and without. As root.
nat: $(STAMP)
	$(BIN)/python -m tests.routers

# A small grid of the lab, from the nodes to the report: every kind of cell, which shows that they run and no more.
lab-quick: $(STAMP)
	rm -rf build/lab-quick
	$(BIN)/ftis-node lab run quick --out build/lab-quick
	$(BIN)/ftis-node lab report build/lab-quick

# All experiments with built-in models, and their reports under docs/evidence: hours of CPU; goes on where it was.
EVIDENCE := objectives expertise lora threshold horizontal listener swarm-size asynchrony shares truncation bias \
  confirmation attacks attacks-horizontal attacks-many
evidence: $(STAMP)
	for name in $(EVIDENCE); do \
	  $(BIN)/ftis-node lab run $$name --out build/lab/$$name --cache build/lab/cache \
	    && $(BIN)/ftis-node lab report build/lab/$$name --to docs/evidence/$$name --small || exit 1; \
	done
	$(BIN)/python -m ftis_node.lab.reporting.index docs/evidence

# Rebuilds the built-in models from nothing (two minutes); the result is committed.
models: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m ftis_node.lab.warmup --out ftis_node/models

# docs/settings.md, from the class; and the pictures of docs/img, from a real swarm (with chromium).
settings: $(STAMP)
	$(BIN)/python -m ftis_node.reference docs/settings.md

pictures: $(STAMP)
	$(BIN)/python -m tests.pictures

# Regenerates the RPC messages from proto/ftis.proto.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=ftis_node/swarm proto/ftis.proto

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ftis-node needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info
