# The two commands that matter: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEV := .venv/.dev
# Bytecode is kept, whatever the environment says: without it pytest rewrites every test file anew in each process.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint unit test-all slow week hostile fuzz nat many lab-quick evidence models settings pictures proto \
  week-quick fuzz-quick wheels compose-test lock clean vllm-test gpu gpu-wheels older real real-figure readers record poison warm-up

demo: $(STAMP)
	$(BIN)/ftis-node demo

test: lint unit

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.budget

# One process more than two cores: daemons wait for one another a good part of the time.
unit: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

# All that is too long for `make test`: the page in a browser and the wheel in an empty environment, which are among the
# slow tests (so are hostile peers), a small grid of the lab, and a little of `make week`, as root, and of `make fuzz`.
# Properties are tried with new examples; `make test` draws the same each time.
test-all: export EXAMPLES := new
test-all: test slow lab-quick week-quick fuzz-quick

# Processes are started as a person starts them, where `make test` forks them from one that has imported torch.
slow: $(DEV)
	TESTS_START_PLAIN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

# Eight daemons, a guest and an observer: seven days in two hours, by shifted clocks. All are killed, cut off, put to sleep
# and moved; nothing may grow or be lost, and their pages are looked at in Chromium. As root, for each has a network
# namespace. What is found is in build/week. ARGS="--only text --seconds 300": less of it.
week: $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tensorboard]'
	$(BIN)/python -m tests.manual.week $(ARGS)

week-quick: $(DEV)
	@if [ "$$(id -u)" = 0 ]; then $(MAKE) week ARGS="--seconds 600"; \
	  else echo "the week is left out: network namespaces need root"; fi

# Every attack of tests/hostile against three daemons on loopback, one after another: ten minutes; those by packets once
# more in a text run among three tokenizers: five.
hostile: $(DEV)
	$(BIN)/python -m tests.hostile --seconds 600
	$(BIN)/python -m tests.hostile --mixed --rows 1,4,5,6,8,9,10,11,12,13,32,47 --seconds 300

# Ten minutes of coverage-guided fuzzing for each place where bytes from strangers become values.
fuzz: $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz all --seconds 600

fuzz-quick: $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz all --seconds 10

# What only a card can tell, in ten minutes (docs/performance.md, "On a GPU"); the same command goes on where it was.
# ARGS="--list", ARGS="--parts machine,tests"; without a card ARGS="--device cpu --small" shows that every part runs.
ARGS ?=
gpu: $(DEV)
	$(BIN)/python -m tests.manual.gpu $(ARGS)

# What `make gpu` needs beside torch, transformers and scipy, as wheels in build/gpu-wheels (57 MB, 18 without
# bitsandbytes): for a machine with a card and no package index. GPU_PYTHON is that machine's Python.
GPU_PYTHON ?= 3.12
GPU_WHEELS := accelerate aiohappyeyeballs aiohttp aiosignal annotated-doc annotated-types attrs base58 bitsandbytes cffi \
  click cryptography frozenlist hypothesis idna iniconfig liger-kernel markdown-it-py mdurl msgpack msgspec multidict packaging peft \
  pluggy propcache protobuf psutil pycparser pydantic pydantic_core Pygments pytest rich shellingham sortedcontainers \
  typer typing-inspection typing_extensions yarl
gpu-wheels: $(DEV)
	rm -rf build/gpu-wheels
	$(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt --no-deps --only-binary=:all: \
	  --python-version $(GPU_PYTHON) --implementation cp $(foreach n,_2_34 _2_28 _2_24 _2_17 2014 1,--platform \
	  manylinux$(n)_x86_64) -d build/gpu-wheels $(GPU_WHEELS)

# Three real models (MODELS=folder, else the hub's) beside plain transformers and peft; ARGS="--only coder-0.5b --parts text",
# ARGS="--dtype bfloat16" on a CPU with AMX. What was found is kept in build/real-suite.
real: $(DEV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} MODELS="$(MODELS)" $(BIN)/python -m tests.manual.real $(ARGS)

# What real models' groups look like to one another: ARGS="FOLDER FOLDER --rows 12", with --any-tokenizer as text. What was
# found is kept in build/readers.
readers: $(DEV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python -m tests.manual.readers $(ARGS)

# What a real model answers to a task's rows, sampled once for many trials of the lab: ARGS="FOLDER ROWS.jsonl --output FILE".
record: $(DEV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python -m tests.manual.record $(ARGS)

# A base model's first lessons, from written solutions: ARGS="FOLDER SOLUTIONS.jsonl --output FOLDER".
warm-up: $(DEV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python -m tests.manual.warm_up $(ARGS)

# A hostile partner's groups for a real model, and what a trained one repeats of them: ARGS="write …", ARGS="count …".
poison: $(DEV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python -m tests.manual.poison $(ARGS)

# The compute side with the oldest torch and transformers that it is tested with, in an environment of its own.
# PyPI's torch brings CUDA, 1.7 GB; TORCH_CPU_INDEX names an index with PyTorch's CPU wheels.
TORCH_CPU_INDEX ?=
COMPUTE_SIDE := bench_generate bench_step engine* fit generate lab_trial learner* models objective_* optimiser plan \
  policy_load ready room sampler score speed stepper tokenizer* without_hivemind worker
older: build/older/.installed
	OMP_NUM_THREADS=1 build/older/bin/python -m pytest -q -n 2 --dist loadfile -m "not slow" -p no:cacheprovider \
	  $(COMPUTE_SIDE:%=tests/test_%.py)

build/older/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/older
	grep -vE '^(torch|transformers|tokenizers|huggingface_hub|setuptools)==' constraints.txt > build/older/constraints.txt
	build/older/bin/python -m pip install --quiet --disable-pip-version-check -c build/older/constraints.txt \
	  $(TORCH_CPU_INDEX:%=--extra-index-url %) torch==2.11.0 transformers==5.17.0 -e '.[dev]'
	@touch $@

# Two daemons whose samples come of vLLM servers, on a CPU: ten minutes, and gigabytes for its environment in build/vllm.
vllm-test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.manual.vllm $(ARGS)

# A node behind a router that lets nobody in, with relays and without. As root.
nat: $(DEV)
	$(BIN)/python -m tests.manual.routers

# 32 real network processes beside what the simulated network says of the same nodes; ARGS="--nodes 8" for fewer.
many: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m ftis_node.lab.bench.many $(ARGS)

# A small grid of the lab, from the nodes to the report: every kind of cell, which shows that they run and no more.
lab-quick: $(DEV)
	rm -rf build/lab-quick
	$(BIN)/ftis-node lab run quick --out build/lab-quick
	$(BIN)/ftis-node lab report build/lab-quick

# Most of what README and the table of docs/evidence rest on, anew: it says how long, takes hours of CPU, and goes on where it was. Full
# reports in build/lab, short ones in docs/evidence; reports of other experiments there keep the values of the commit that they name.
EVIDENCE := objectives truncation expertise shares time-to-score tokenizers tokenizer-pairs confirmation horizontal-swarm \
  lora maxrl parity larger
evidence: $(DEV)
	@for name in $(EVIDENCE); do $(BIN)/ftis-node lab run $$name --dry-run; done | awk '{print} /^About/ {all += $$2} \
	  END {printf "In all about %.1f hours of one core, less what is in build/lab/cache.\n", all}'
	for name in $(EVIDENCE); do \
	  $(BIN)/ftis-node lab run $$name --out build/lab/$$name --cache build/lab/cache \
	    && $(BIN)/ftis-node lab report build/lab/$$name \
	    && $(BIN)/ftis-node lab report build/lab/$$name --to docs/evidence/$$name || exit 1; \
	done
	$(BIN)/python -m ftis_node.lab.reporting.index docs/evidence

# Rebuilds the built-in models from nothing (five minutes); the result is committed.
models: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m ftis_node.lab.warmup --out ftis_node/models

# docs/settings.md and the objectives of docs/method.md, from the classes; and the pictures of docs/img, from a real swarm (with chromium).
settings: $(DEV)
	$(BIN)/python -m tests.settings_page docs

# The figure of real models at the top of the evidence, from the trials that are kept beside the reports.
real-figure: $(DEV)
	$(BIN)/python -m tests.manual.real_figure

pictures: $(DEV)
	$(BIN)/python -m tests.manual.pictures

# Regenerates the RPC messages from proto/ftis.proto.
proto: $(DEV)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=ftis_node/swarm proto/ftis.proto

# deploy/compose.yaml on a real engine, which is started if none runs. BASE=debootstrap makes the base image here, and
# `make wheels` before it fetches the packages by this machine's pip: for where no registry can be reached (docs/deploy.md).
BASE ?= debian:bookworm-slim
compose-test: $(DEV)
	$(BIN)/python -m tests.manual.compose --base $(BASE)

# Everything that an image installs, for its build without a package index; EXTRAS=gpu for the extra `gpu` too.
EXTRAS ?=
wheels: $(DEV)
	rm -f deploy/wheels/*.whl
	$(BIN)/python deploy/requirements.py math $(EXTRAS) > deploy/wheels/requirements.txt
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check -c constraints.txt -w deploy/wheels \
	  -r deploy/wheels/requirements.txt

# constraints.txt, from the versions that .venv has; to have newer ones, empty it first, and `make clean`.
lock: $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,fuzz]'
	{ echo "# Exact versions that this project is tested with; used by the Makefile and the image. Made with: make lock"; \
	  { $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//'; \
	    grep '^liger-kernel==' constraints.txt; } | LC_ALL=C sort -f; } > build-lock  # not here: it brings Triton
	mv build-lock constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ftis-node needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.12"; exit 2; }
	@echo "Installing into .venv: 2 GB, more where PyTorch comes with CUDA; some minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[lab,math]'
	@touch $@

# What only tests and other work on the source need.
$(DEV): $(STAMP)
	@echo "Installing what tests need: some seconds, once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info
