# make demo    from a fresh clone to a long prompt answered on the CPU
# make test    everything CI checks
# make venv    only the virtual environment, with what builds the package
# make triton  Triton's server from PyPI, and its gRPC client
# make test-gpu, sanitize-gpu    on a machine with a GPU: its CMake and CUDA toolkit, and PYTHON's torch and pytest
# make bench-gpu, bench-kernels, bench-context    there, the measurements in docs/results
#
# PYTHON=python3.12 VENV=.venv INSTALLER=auto|uv|pip PYTEST="-n 10" (of test-gpu, with pytest-xdist)
# PACKED=out/tensorrt-tests (what scripts/pack_tensorrt.sh --tests made, used on a GPU where it is there; none: PACKED=)

PYTHON ?= python3
VENV ?= .venv
INSTALLER ?= auto
PACKED ?= out/tensorrt-tests

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

bin := $(VENV)/bin
triton_venv := $(abspath $(VENV))-triton
done := $(VENV)/.done
install := bash scripts/install.sh $(VENV) $(INSTALLER)
editable := $(bin)/python -m pip install --quiet --no-deps --no-build-isolation --editable .

packaging := pyproject.toml CMakeLists.txt trtllm_shadowkv/names.py $(wildcard cmake/*)
native := $(shell find plugins -type f)

.PHONY: help venv demo triton test test-gpu sanitize-gpu bench-gpu bench-kernels bench-context check

help:
	@sed -n 's/^# \(make\|PYTHON\|PACKED\)/\1/p' Makefile

venv: $(done)/build

demo: $(done)/demo $(done)/installed
	$(bin)/python examples/passkey_demo.py

triton: $(done)/triton $(done)/triton-server

test: $(done)/test $(done)/demo $(done)/compiled $(done)/tensorrt $(done)/packed $(done)/triton $(done)/triton-server
	$(bin)/ruff check
	$(bin)/ruff format --check
	git ls-files -z -- '*.c' '*.cpp' '*.cu' '*.cuh' '*.h' | xargs -0 --no-run-if-empty $(bin)/clang-format --dry-run -Werror
	$(bin)/mypy --strict -p trtllm_shadowkv
	TRTLLM_SHADOWKV_TRITON=$(triton_venv) $(bin)/python -m pytest -q -n 2 --dist worksteal -m "not alone"
	$(bin)/python -m pytest -q -m alone

# The library for this machine's GPU alone, unless TRTLLM_SHADOWKV_LIBRARY names one.
gpu_library = $(or $(TRTLLM_SHADOWKV_LIBRARY),$(CURDIR)/out/gpu/plugins/libtrtllm_shadowkv.so)

# TensorRT and its headers: the packed folder's where it is there, else what the environment has.
packed := $(abspath $(PACKED))
ifneq ($(filter command environment,$(firstword $(origin PACKED))),)
ifneq ($(PACKED),)
ifeq ($(wildcard $(packed)/lib),)
    $(error PACKED=$(PACKED) has no lib: name a folder that scripts/pack_tensorrt.sh made)
endif
endif
endif
ifneq ($(and $(packed),$(wildcard $(packed)/lib)),)
    packed_lib := LD_LIBRARY_PATH='$(packed)/lib'$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}
    packed_site := PYTHONPATH='$(packed)/site'$${PYTHONPATH:+:$$PYTHONPATH}
    packed_header := $(wildcard $(packed)/include/NvInferRuntime.h)
    packed_include := $(if $(packed_header),TENSORRT_INCLUDE_DIR='$(packed)/include')
endif
gpu_environment = $(strip TRTLLM_SHADOWKV_LIBRARY=$(gpu_library) $(packed_lib) $(packed_site))
on_gpu = $(gpu_environment) $(PYTHON) -m

# Tests share the engines that they compile, also with those that want the GPU for themselves.
test_engines := $(CURDIR)/out/test-engines

test-gpu: $(gpu_library) | check
	rm -rf $(test_engines) && mkdir -p $(test_engines)
	TRTLLM_SHADOWKV_TEST_ENGINES=$(test_engines) $(on_gpu) pytest -q -rs -m "gpu and not alone" $(PYTEST)
	TRTLLM_SHADOWKV_TEST_ENGINES=$(test_engines) $(on_gpu) pytest -q -rs -m "gpu and alone"
	rm -rf $(test_engines)

# memcheck and racecheck watch our kernels alone; initcheck has to see who else writes memory. The first fault ends it.
sanitize = $(gpu_environment) compute-sanitizer --error-exitcode 9 --tool
reduced = $(PYTHON) -m pytest -q -p no:cacheprovider tests/plugins/gpu/test_reduced.py

sanitize-gpu: $(gpu_library) | check
	$(sanitize) memcheck --kernel-regex kns=trtllm_shadowkv $(reduced)
	$(sanitize) racecheck --kernel-regex kns=trtllm_shadowkv $(reduced)
	$(sanitize) initcheck $(reduced)

bench-gpu: $(gpu_library) | check
	$(on_gpu) trtllm_shadowkv.bench.engine --output docs/results/engine-h200.json

bench-kernels: $(gpu_library) | check
	$(on_gpu) trtllm_shadowkv.bench.kernels --output docs/results/kernels-h200.json

bench-context: $(gpu_library) | check
	$(on_gpu) trtllm_shadowkv.bench.context --output docs/results/context-h200.json

$(CURDIR)/out/gpu/plugins/libtrtllm_shadowkv.so: $(packaging) $(native) $(packed_header)
	$(packed_include) TRTLLM_SHADOWKV_CUDA=ON cmake -S . -B out/gpu -DPython_EXECUTABLE="$$(command -v $(PYTHON))" -DCMAKE_CUDA_ARCHITECTURES=native
	cmake --build out/gpu --parallel

# What would fail later in a way that says nothing.
check:
	@for folder in build runtime; do \
	    [ -d trtllm_shadowkv/$$folder ] || { \
	        echo "trtllm_shadowkv/$$folder is no folder: this checkout was made without symbolic links; use git clone -c core.symlinks=true, or unpack the archive with tar or unzip." >&2; \
	        exit 1; }; \
	done
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "$(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing or broken); expected Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; \
	    exit 1; }

# Each file in $(done) stands for a step that is finished; a step is repeated when what it reads has changed.
$(done)/venv: | check
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(done) && touch $@

$(done)/build: requirements/build.txt $(done)/venv
	$(install) -r $<
	@touch $@

$(done)/runtime: requirements/runtime.txt $(done)/build
	$(install) -r $<
	@touch $@

$(done)/demo: requirements/demo.txt $(done)/runtime
	$(install) --no-deps -r $<
	@touch $@

$(done)/test: requirements/test.txt $(done)/runtime
	$(install) -r $<
	@touch $@

$(done)/cuda: requirements/cuda.txt $(done)/runtime
	$(install) --no-deps -r $<
	@touch $@

$(done)/tensorrt: requirements/tensorrt.txt $(done)/runtime
	$(install) --no-deps -r $<
	@touch $@

$(done)/triton: requirements/triton.txt $(done)/runtime
	$(install) --no-deps -r $<
	@touch $@

# An environment of its own: the server's part of a Python model needs NumPy 1.26.
$(done)/triton-server: requirements/triton-server.txt $(done)/venv
	$(PYTHON) -m venv $(triton_venv)
	bash scripts/install.sh $(triton_venv) $(INSTALLER) --no-deps -r $<
	@touch $@

# TensorRT's libraries, 0.3 GB of a 1.1 GB archive, for the tests that drive the plugins' creators with them.
$(done)/packed: scripts/pack_tensorrt.sh $(done)/runtime
	@if command -v mvn > /dev/null; then bash scripts/pack_tensorrt.sh > /dev/null; else echo "no mvn: tests with TensorRT's own libraries are skipped"; fi
	@touch $@

$(done)/installed: $(packaging) $(native) $(done)/runtime
	$(editable)
	@touch $@

# The same with the CUDA library, for all architectures, warnings being errors.
$(done)/compiled: $(packaging) $(native) $(done)/cuda
	TRTLLM_SHADOWKV_CUDA=ON $(editable) -C cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON
	@touch $@ $(done)/installed
