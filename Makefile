# Everything a contributor runs. `make` alone lists it.

PYTHON ?= python3
DEVICE ?= auto
BIN := .venv/bin
LINT_TREE := build/lint
JOBS ?= 2
# The tests' models are tiny: a thread of each process computes faster than two that wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
# ISA=avx2 holds torch, vLLM and the native kernel down, as on a processor without AVX-512.
HELD := $(if $(filter avx2,$(ISA)),PYTHONPATH=$(CURDIR)/tests/support/without_avx512)
PYTEST := $(ONE_THREAD) $(HELD) $(BIN)/python -m pytest
NATIVE_TESTS := $(addprefix tests/,$(addprefix kernels/,test_kernels.py test_codebook.py test_native_planner.py) executor server vllm_plugin/test_dense_kernels.py e2e/test_models.py)
FAST := $(PYTEST) -m "not engine" -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test fast engine native arm check lint format docs models gpu bench-budget bench-gpu bench-papers bench-quality kernels-table clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv with vLLM for this machine (about 3 minutes; PYTHON=python3.12, DEVICE=cpu|cuda|auto)
	@$(PYTHON) tools/setup.py --device $(DEVICE)

demo: setup ## serve a small model under a byte budget and watch it
	@$(BIN)/python benchmarks/demo/demo.py

bench-budget: setup ## what a byte budget costs: vLLM and this plugin (20 minutes, 10 GB of disk, a quiet machine)
	@$(BIN)/python benchmarks/budget/budget.py

bench-papers: setup ## the tables, pictures and page of four papers, simulated (15 minutes of one core)
	@$(BIN)/python benchmarks/papers/papers.py

bench-quality: setup ## what precision costs in quality, and what the policy dymoe wins back (15 minutes of one core)
	@$(BIN)/python benchmarks/quality/quality.py

test: fast engine ## all tests (ISA=avx2: as on a processor without AVX-512)

fast: setup ## only the tests that start no vLLM engine
	$(FAST)

engine: setup ## only the tests that start one
	$(PYTEST) -m engine -n $(JOBS) --dist loadfile

native: setup ## only the tests that a processor's instructions can change (ISA=avx2: held down)
	$(PYTEST) $(NATIVE_TESTS) -n $(JOBS) --dist loadfile

arm: setup ## the native library compiles for ARM and with clang, too
	@$(BIN)/python -m pip install --quiet ziglang
	@mkdir -p build
	$(BIN)/python -m ziglang c++ -target aarch64-linux-gnu.2.28 -O3 -std=c++17 -shared -fPIC -fno-math-errno kernels/cpu/experts.cpp -o build/_cpu-aarch64.so

# mypy and import-linter look for vllm_dymoe.kernels inside vllm_dymoe, but its sources lie beside it
# (pyproject.toml, package-dir): they get a tree of links that looks like the installed package.
check: lint fast ## lint and the fast tests

lint: setup ## style, format, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(LINT_TREE) && mkdir -p $(LINT_TREE)
	@cp -rs $(CURDIR)/vllm_dymoe $(LINT_TREE)/ && cp -rs $(CURDIR)/kernels $(LINT_TREE)/vllm_dymoe/
	cd $(LINT_TREE) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p vllm_dymoe
	cd $(LINT_TREE) && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

format: setup ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## write the tables of README.md and docs/ that follow from the code
	$(BIN)/python tools/docs.py

models: setup ## try every architecture and format by hand, for the table of docs/models.md (an hour of two cores)
	@$(BIN)/python -m tests.e2e.by_hand

gpu: ## is it right on this GPU, and how fast? (10 minutes; PYTHON=one with torch and triton; nothing is installed)
	$(PYTHON) benchmarks/gpu/gpu.py

bench-gpu: ## measure the Triton kernels on a GPU (PYTHON=one with torch and triton; nothing is installed)
	$(PYTHON) benchmarks/gpu/gpu.py --parts kernels layers

kernels-table: setup ## compile the Triton kernels for three architectures with each Triton, without a GPU (an hour of two cores; goes on where it was)
	$(BIN)/python benchmarks/gpu/compile_table.py --jobs 2

clean: ## remove .venv and everything generated
	rm -rf .venv build dist *.egg-info tools/vllm-alias/build tools/vllm-alias/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
