# Every target first sees to what it needs (tools/setup.sh), so each works alone on a new machine. `make help` lists them.

BUILD  := build
PYTHON ?= python3
JOBS   ?= $(shell nproc)
VENV   := $(CURDIR)/.venv

MAKEFLAGS += --no-print-directory
export PYTHON JOBS
# A compiler cache knows a source by its place below the checkout: a second clone compiles nothing twice.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := true

# The first configuration of a build folder chooses its generator and compiler cache; a later one must not change them.
configure = cmake --log-level=NOTICE -S . -B $(1) $(if $(wildcard $(1)/CMakeCache.txt),,$(if $(shell command -v ninja),-G Ninja) \
  $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache) -DCMAKE_BUILD_TYPE=Release)

# CUDA kernels: for tests wherever there is an nvcc, for the command only where there is a GPU, too. CUDA=1 and CUDA=0 decide.
CUDA ?= $(if $(wildcard /dev/nvidia0),,0)
cuda = $(if $(1),-DLINNET_CUDA=$(if $(filter 0,$(1)),OFF,ON),-ULINNET_CUDA)

# Targets whose time is kept for `make help`.
TIMED := linnet demo test check bench wheel package-check lint sanitize
.PHONY: $(TIMED) $(TIMED:%=do-%) test-build format sanitize-address sanitize-thread clean distclean help

linnet: ## build the command and liblinnet.so for this machine alone, in build/: its widest instruction set, CUDA if it has a GPU (the default)
demo: ## build that, compare the mechanisms on attention inputs of a real transformer (out/compare.html), ask a small model, convert it and ask again (out/converted/report.html), let four layers learn to recall (out/mqar.html)
test: ## build everything (all instruction sets, CUDA if there is an nvcc, the torch operators, the C++ tests), then run all tests
check: ## build the command, then check the kernels against the vector files and 1000 random cases
bench: ## build everything, then measure mechanisms beside PyTorch's own functions, with the machine's ceilings
wheel: ## build the Python package as dist/*.whl, with all instruction sets, and CUDA if there is an nvcc
package-check: ## build everything and the wheel, then use the installed C++ package and the wheel as a user would
lint: ## check the format, and the sources with clang-tidy; builds nothing
sanitize: ## build the C++ tests twice more and run them under the address, undefined and thread sanitizers (SUITES=few: what CI runs of them)

$(TIMED):
	@tools/timed.sh $@ $(MAKE) do-$@

# A folder that is configured already keeps what it builds: `make test` widens it, `make demo` never narrows it.
do-linnet:
	@tools/setup.sh build
	@test -f $(BUILD)/build.ninja -o -f $(BUILD)/Makefile || \
	  $(call configure,$(BUILD)) -DLINNET_TESTS=OFF -DLINNET_TORCH=OFF -DLINNET_ISAS=native $(call cuda,$(CUDA))
	@cmake --build $(BUILD) --target linnet_command -j $(JOBS)

do-demo: do-linnet
	@tools/demo.sh $(BUILD)

do-test: test-build
	@tools/test.sh $(BUILD)

test-build:
	@tools/setup.sh test
	@$(call configure,$(BUILD)) -DLINNET_TESTS=ON -DLINNET_TORCH=ON -DLINNET_PYTHON=$(VENV)/bin/python -DLINNET_ISAS=all \
	  $(call cuda,$(if $(filter file,$(origin CUDA)),,$(CUDA)))
	@cmake --build $(BUILD) -j $(JOBS)

do-check: do-linnet
	@$(BUILD)/linnet check tests/vectors
	@$(BUILD)/linnet check --random 1000

do-bench: test-build
	@PATH="$(VENV)/bin:$$PATH" $(BUILD)/linnet bench softmax linear --peers

do-wheel:
	@tools/setup.sh test
	@rm -rf dist
	@CXX=$${CXX:-c++} $(if $(shell command -v ccache),CMAKE_CXX_COMPILER_LAUNCHER=ccache) CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(VENV)/bin/python -m pip wheel . --no-build-isolation --no-deps --disable-pip-version-check --wheel-dir dist

do-package-check: test-build
	@LINNET_CUDA_IMAGES=$(CURDIR)/$(BUILD)/cuda $(MAKE) do-wheel
	@tools/package_check.sh $(BUILD)

format: ## format all C++ sources in place
	@tools/setup.sh lint
	@tools/lint.sh --fix-format

do-lint:
	@tools/setup.sh lint
	@tools/lint.sh

do-sanitize: sanitize-address sanitize-thread

sanitize-address:
	@tools/setup.sh gtest
	@tools/sanitize.sh address,undefined $(BUILD)-asan '$(SUITES)'

sanitize-thread:
	@tools/setup.sh gtest
	@tools/sanitize.sh thread $(BUILD)-tsan '$(SUITES)'

clean: ## remove all that was built
	@rm -rf build build-* out dist

distclean: clean ## remove also the Python environment
	@rm -rf .venv

help: ## this list
	@tools/timed.sh --help Makefile
