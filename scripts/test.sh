#!/usr/bin/env bash
# Everything that must pass before a change is kept: style, types, tests. Sets up first (once).
#
#   scripts/test.sh [PYTEST ARGUMENTS]      for example: scripts/test.sh -m "not engine and not e2e" tests/history
#
# Runs all of it even when an early part fails, so that one run shows everything; fails when anything failed.
# Two pytest processes share the tests (tests/side_by_side.py); `-n 0` runs them in one, for a debugger.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_cpu.sh --extras test,demo
# Activated, so that ninja is found by what the tests compile.
PATH=$PWD/.venv/bin:$PATH
# Hundreds of processes import our modules: compiled once, not in each.
unset PYTHONDONTWRITEBYTECODE

FAILED=()
run() {
    echo "test: $*"
    "$@" || FAILED+=("$*")
}

run ruff check .
run ruff format --check .
# Of the drafting core, where they are installed.
if command -v clang-format >/dev/null; then
    run clang-format --dry-run --Werror csrc/*.cpp csrc/*.h
fi
if command -v clang-tidy >/dev/null; then
    run clang-tidy --quiet csrc/*.cpp -- -std=c++20 -DRHYME_INSTRUCTION_SET='""' \
        -isystem "$(python -c 'import pybind11; print(pybind11.get_include())')" \
        -isystem "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')"
fi
# Beside the tests; what it prints comes after them.
TYPES=$(mktemp)
trap 'rm -f "$TYPES"' EXIT
mypy --pretty >"$TYPES" 2>&1 &
MYPY=$!
run python -m pytest -n 2 "$@"
echo "test: mypy --pretty"
wait "$MYPY" || FAILED+=("mypy --pretty")
cat "$TYPES"

if ((${#FAILED[@]})); then
    printf 'test: FAILED: %s\n' "${FAILED[@]}" >&2
    exit 1
fi
echo "test: all passed"
