#!/usr/bin/env bash
# Brings the machine to the point where a make target can run, and does nothing when it already can.
#
#   tools/setup.sh build    a C++20 compiler, CMake and a build program
#   tools/setup.sh test     build, and GoogleTest, Python headers, and .venv with the packages of requirements-dev.txt
#   tools/setup.sh gtest    build, and GoogleTest
#   tools/setup.sh lint     build, and clang-format, clang-tidy, GoogleTest (tests are checked, too)
#   tools/setup.sh cache    build, and ccache: the wheel compiles the sources of the test build once more
#   tools/setup.sh browser  build, and Chromium: tests open the pages in it, and are skipped without it
#
# A missing system package is installed when this runs as root on a machine with apt-get; otherwise the one line that installs
# everything missing is printed. Python packages go into .venv inside the checkout and nowhere else.
# Exit codes: 0 ready, 2 wrong usage, 3 not possible here (the last lines say what is missing).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}

stop() {
  printf 'setup: %s\n' "$@" >&2
  exit 3
}

# Every check asks for the ability, not for a package, so that a compiler or Python from elsewhere serves as well.
has() { command -v "$1" >/dev/null 2>&1; }
has_cxx20() { echo '#include <concepts>' | "${CXX:-g++}" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1; }
has_gtest() { echo '#include <gtest/gtest.h>' | "${CXX:-g++}" -std=c++20 -E -x c++ - >/dev/null 2>&1; }
has_venv() { "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; }
# torch.compile builds small C++ modules against Python's headers.
has_python_headers() {
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' >/dev/null 2>&1
}

# Prints the Debian packages that stand for what is missing, one per line.
missing_packages() {
  has_cxx20 || echo g++
  has cmake || echo cmake
  has ninja || has make || echo make
  case $1 in
    test)
      has_gtest || echo libgtest-dev
      has "$python" || echo python3
      has_venv || echo python3-venv
      has_python_headers || echo python3-dev
      ;;
    gtest) has_gtest || echo libgtest-dev ;;
    cache) has ccache || echo ccache ;;
    browser) has chromium || echo chromium ;;
    lint)
      has clang-format || echo clang-format
      has clang-tidy || echo clang-tidy
      has_gtest || echo libgtest-dev
      ;;
  esac
}

system_packages() {
  local -a missing
  mapfile -t missing < <(missing_packages "$1")
  ((${#missing[@]})) || return 0
  local line="apt-get install -y --no-install-recommends ${missing[*]}"
  if ((EUID != 0)); then
    stop "missing: ${missing[*]}" "install with: sudo $line"
  fi
  if ! has apt-get; then
    stop "missing, by their Debian names: ${missing[*]}" "there is no apt-get here: install them with this system's package manager"
  fi
  echo "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # A new machine has no package lists yet; an outdated mirror still may have what is needed, so only the install must succeed.
  apt-get update -qq || true
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null </dev/null || stop "this failed: $line"
  mapfile -t missing < <(missing_packages "$1")
  ((${#missing[@]} == 0)) || stop "still missing after the installation: ${missing[*]} (is another ${python} or compiler first in PATH?)"
}

python_packages() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "$python is $("$python" -V 2>&1), but requirements-dev.txt needs Python 3.11 or newer" "choose one with: make test PYTHON=python3.12"
  # The stamp holds what the environment was made from; it is written last, so an interrupted installation starts over.
  local key stamp=.venv/linnet-stamp
  key=$(cat requirements-dev.txt <("$python" -c 'import sys; print(sys.version, sys.base_prefix)') | sha256sum | cut -d' ' -f1)
  if [[ -f $stamp && $(<"$stamp") == "$key" ]] && .venv/bin/python -c '' 2>/dev/null; then return 0; fi
  echo "setup: installing the packages of requirements-dev.txt into .venv (PyTorch is large: this can take minutes)"
  rm -f "$stamp"
  "$python" -m venv --clear .venv || stop "$python -m venv .venv failed"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt ||
    stop "pip could not install requirements-dev.txt (its own message stands above)"
  echo "$key" >"$stamp"
}

case ${1-} in
  build | gtest | lint | cache | browser) system_packages "$1" ;;
  test)
    system_packages test
    python_packages
    ;;
  *)
    echo "usage: tools/setup.sh build | test | gtest | lint | cache | browser" >&2
    exit 2
    ;;
esac
