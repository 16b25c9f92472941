# Every target first sees to what it needs (tools/setup.sh), so each works alone on a new machine. `make help` lists them.

BUILD  := build
PYTHON ?= python3
JOBS   ?= $(shell nproc)
VENV   := $(CURDIR)/.venv

MAKEFLAGS += --no-print-directory
export PYTHON JOBS

# The first configuration of a build folder chooses its generator and compiler cache; a later one must not change them.
configure = cmake --log-level=NOTICE -S . -B $(1) $(if $(wildcard $(1)/CMakeCache.txt),,$(if $(shell command -v ninja),-G Ninja) \
  $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache) -DCMAKE_BUILD_TYPE=Release)

.PHONY: linnet demo test test-build check bench wheel package-check format lint sanitize sanitize-address sanitize-thread \
  clean distclean help

linnet: ## build the command, build/linnet (the default)
	@tools/setup.sh build
	@test -f $(BUILD)/build.ninja -o -f $(BUILD)/Makefile || $(call configure,$(BUILD)) -DLINNET_TESTS=OFF -DLINNET_TORCH=OFF
	@cmake --build $(BUILD) --target linnet_command linnet_c -j $(JOBS)

demo: linnet ## compare the mechanisms on attention inputs of a real transformer: a table and out/compare.html
	@mkdir -p out
	@$(BUILD)/linnet compare --html out/compare.html
	@echo "open $(CURDIR)/out/compare.html in a browser"

test: test-build ## build everything and run all tests, C++ and Python
	@tools/test.sh $(BUILD)

test-build:
	@tools/setup.sh test
	@$(call configure,$(BUILD)) -DLINNET_TESTS=ON -DLINNET_TORCH=ON -DLINNET_PYTHON=$(VENV)/bin/python
	@cmake --build $(BUILD) -j $(JOBS)

check: linnet ## check the kernels against the vector files and 1000 random cases
	@$(BUILD)/linnet check tests/vectors
	@$(BUILD)/linnet check --random 1000

bench: test-build ## measure the mechanisms beside PyTorch's own functions, with the machine's ceilings
	@PATH="$(VENV)/bin:$$PATH" $(BUILD)/linnet bench softmax linear --peers

wheel: ## build the Python package as dist/*.whl
	@tools/setup.sh test
	@rm -rf dist
	@CXX=$${CXX:-c++} $(if $(shell command -v ccache),CMAKE_CXX_COMPILER_LAUNCHER=ccache) CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(VENV)/bin/python -m pip wheel . --no-build-isolation --no-deps --disable-pip-version-check --wheel-dir dist

package-check: test-build ## use the installed C++ package and the wheel as a user would
	@LINNET_CUDA_IMAGES=$(CURDIR)/$(BUILD)/cuda $(MAKE) wheel
	@tools/package_check.sh $(BUILD)

format: ## format all C++ sources in place
	@tools/setup.sh lint
	@tools/lint.sh --fix-format

lint: ## check the format, and the sources with clang-tidy
	@tools/setup.sh lint
	@tools/lint.sh

sanitize: sanitize-address sanitize-thread ## run the C++ tests under the address, undefined and thread sanitizers

sanitize-address:
	@tools/setup.sh gtest
	@tools/sanitize.sh address,undefined $(BUILD)-asan

sanitize-thread:
	@tools/setup.sh gtest
	@tools/sanitize.sh thread $(BUILD)-tsan

clean: ## remove all that was built
	@rm -rf build build-* out dist

distclean: clean ## remove also the Python environment
	@rm -rf .venv

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
