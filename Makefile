# Everything on a fresh clone: the first target that runs makes the virtual environment and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install vit zero pipeline elastic language gpu vit-1b papers docs test test-thorough test-newest check lint lines
help:
	@echo "make install   make .venv and install into it; then activate it: . .venv/bin/activate"
	@echo "make vit       train the ViT example on two ranks, one of them slowed, balancing on"
	@echo "make zero      train with ZeRO on two ranks, one of them slowed, with equal and with fitted batches"
	@echo "make pipeline  train in a pipeline on two ranks, one slowed, with equal and fitted stages; then replicas of three;"
	@echo "               then with a rank that becomes slow in mid-run, and the layers that leave it: runs/pipeline.png"
	@echo "make elastic   train on four nodes of this machine, of which one is killed and another joins"
	@echo "make language  train a GPT-2 on two ranks, one of them slowed, balancing on"
	@echo "make gpu       measure everything on a GPU, and write benchmarks/gpu/RESULTS.md"
	@echo "make vit-1b    a few iterations of SEMI's ViT-1B, slowed and balanced: 16 GB of memory, ten minutes"
	@echo "make papers    figures of the five papers, into docs/papers.md (DATA=folder of images: train/CLASS, test/CLASS)"
	@echo "make test      run all tests (about 10 minutes on 2 cores)"
	@echo "make check     lint and run the unit tests, before a commit (a few minutes)"
	@echo "make lint      ruff and mypy"
	@echo "make docs      run the commands of the documentation, and show there what they print"
	@echo "make lines     lines of Python beside their budgets"
	@echo "make test-newest  make .venv-newest with the newest torch and transformers, and run the tests that are for them"
	@echo "make test-thorough  run all tests, with many more random examples and all combinations of cases"

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --editable ".[examples,test,dev]"
	@touch $@

install: $(VENV)/.installed

vit: install
	$(BIN)/python examples/vit/train.py --balance auto --straggler 1:4

zero: install
	$(BIN)/python examples/zero/train.py

pipeline: install
	$(BIN)/python examples/pipeline/train.py
	$(BIN)/python examples/pipeline/train.py --nproc 3 --straggler 1:3,2:3 --way replicas --epochs 2 --micro-batch 4
	@mkdir -p runs
	$(BIN)/python examples/pipeline/follow.py --plot runs/pipeline.png

elastic: install
	@mkdir -p runs
	$(BIN)/python examples/elastic/demo.py --plot runs/elastic.png

language: install
	$(BIN)/python examples/language/train.py --balance auto --straggler 1:4

gpu: install
	$(BIN)/python -m benchmarks.gpu

vit-1b: install
	$(BIN)/python -m benchmarks.papers semi vit-1b

DATA ?= data/cifar10
papers: install
	$(BIN)/python -m benchmarks.papers --data-dir $(DATA)

# Two tests at a time, each with half of the cores. A process that has run its share takes over tests of the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test: install
	$(PYTEST)

test-thorough: install
	HYPOTHESIS_PROFILE=thorough $(PYTEST)

# A second environment without Colossal-AI's pins, and the tests that are the same there.
NEWEST := .venv-newest
NEWEST_TESTS := tests/unit $(addprefix tests/parallel/,layers cpu checkpoint profiling $(addsuffix .py,\
	$(addprefix balance/test_,checkpoints reports resharding seen_blocks work_times) \
	$(addprefix plugin/hybrid/test_,hybrid_plugin planned_run transformers_policy) \
	elastic/test_membership plugin/overlap/test_overlapped_optimizer plugin/unequal/test_unequal_replicas \
	plugin/zero/test_training_scripts))
# These train models of transformers with Colossal-AI's own forward passes, which version 5 cannot import.
NEWEST_WITHOUT := $(patsubst %,--ignore=tests/parallel/%.py,layers/test_language_models \
	layers/test_partial_gradients layers/test_torch_features)

$(NEWEST)/.installed: colossal_hetero/newest.txt
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-deps colossalai==0.5.0 --editable .
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --progress-bar off --requirement colossal_hetero/newest.txt \
		pytest pytest-timeout pytest-xdist hypothesis scikit-learn matplotlib build twine 'setuptools<82'
	@touch $@

test-newest: $(NEWEST)/.installed
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest --numprocesses 2 --dist worksteal $(NEWEST_TESTS) $(NEWEST_WITHOUT)

check: lint
	$(PYTEST) -m unit tests/unit

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy colossal_hetero

docs: install
	$(BIN)/python -m tools.code_blocks
	$(BIN)/python -m tools.long_description

lines: install
	@$(BIN)/python -m tools.count_lines
