#!/usr/bin/env bash
# Everything that must pass before a change is kept: style, types, tests. Sets up first (once).
#
#   scripts/test.sh                          while you work: all but whole training runs (the main job's is there), the
#                                            longest of the control plane (LONGEST), clusters of several nodes or GPUs,
#                                            a few more that take long (RUNS), and what is marked slow
#   scripts/test.sh --runs                   before a merge, and in continuous integration: those too
#   scripts/test.sh --quick                  before each commit: the rooms without torch, the control plane and the command
#                                            line, as far as they start no engine, Ray, browser, PostgreSQL, service, other
#                                            Python process or listener on a port
#   scripts/test.sh --slow                   all of it, what is marked slow too
#   scripts/test.sh --changed [BASE]         the test files that a change since BASE (main) needs, by imports
#                                            (scripts/changed_tests.py)
#   scripts/test.sh PYTEST ARGUMENTS         these tests alone, for example: -m "not engine and not e2e" tests/history
#   scripts/test.sh --server newest|oldest   the control plane alone, without torch and vLLM, at the newest or at the
#                                            lowest versions that pyproject.toml allows
#   scripts/test.sh --vllm VERSION           what runs vLLM or knows its insides, on another CPU build of vLLM than the one
#                                            that OpenRLHF pins, for example 0.32.0
#
# What a test starts is known from its fixtures (tests/starts.py).
# Without arguments, with --runs and with --slow, the control plane's own tests run as `--server newest`, where pip finds
# newer releases than those that run beside vLLM; all others run in the environment of scripts/setup_cpu.sh.
# `--vllm VERSION` runs in `.venv-vllm-VERSION`, which scripts/setup_cpu.sh makes.
# Without arguments, with --runs, --slow, --server and --vllm, tests run in the order of their files. Otherwise, files
# without engines and Ray run in another order each time; `-p no:randomly` keeps the order there too.
# Runs everything even when an early part fails, so that one run shows all faults; fails when anything failed.
# Two pytest processes share the tests (tests/side_by_side.py), and without arguments, with --runs and --slow a third
# one has the control plane's; `-n 0` runs them in one, for a debugger.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Hundreds of processes import our modules: compiled once, not in each.
unset PYTHONDONTWRITEBYTECODE

FAILED=()
run() {
    echo "test: $*"
    "$@" || FAILED+=("$*")
}

finish() {
    if ((${#FAILED[@]})); then
        printf 'test: FAILED: %s\n' "${FAILED[@]}" >&2
        exit 1
    fi
    echo "test: all passed"
}

# The server extra in an environment of its own, and the tests that need nothing else.
server() { # newest|oldest [PROCESSES [PYTEST ARGUMENTS]]
    local venv=.venv-server-$1 options=(--upgrade --upgrade-strategy eager)
    if [[ $1 = oldest ]]; then
        python scripts/lowest_versions.py server >"$venv.txt"
        options=(-c "$venv.txt")
    fi
    [[ -x $venv/bin/python ]] || run python -m venv "$venv"
    # Built in the source tree, where a test of the wheel may be building it too (tests/conftest.py).
    run flock pyproject.toml "$venv/bin/python" -m pip install -q --disable-pip-version-check "${options[@]}" ".[server,test]"
    run "$venv/bin/python" -m pytest -n "${2-2}" -p no:randomly -m "server and not slow" "${@:3}" tests/api tests/webui tests/test_server_extra.py
}

# The same with one process, beside other tests; what it prints and what failed comes at `join_server`.
server_beside() { # [NICENESS [PYTEST ARGUMENTS]]
    SERVER_LOG=$(mktemp)
    (
        FAILED=()
        renice -n "${1-0}" $BASHPID >/dev/null
        server newest 1 "${@:2}"
        ((${#FAILED[@]} == 0))
    ) >"$SERVER_LOG" 2>&1 &
    SERVER=$!
}

join_server() {
    wait "$SERVER" || FAILED+=("the control plane's tests at its newest releases")
    cat "$SERVER_LOG"
}

# All engines (lossless drafts, moves, checks of `rhyme verify`), the CPU build's corrections, and what is read of vLLM's
# source, without training runs.
other_vllm() { # VERSION
    scripts/setup_cpu.sh --vllm "$1" --extras test
    PATH=$PWD/.venv-vllm-$1/bin:$PATH
    run python -m pytest -n 2 -p no:randomly -m "not slow and not e2e" tests/{engine,moves,platform,verify} \
        tests/benchmarks/test_gpu_arguments.py tests/training/test_layout_placement.py
}

if [[ ${1-} = --vllm ]]; then
    other_vllm "${2:?test: --vllm needs a version such as 0.32.0}"
    finish
    exit
fi

scripts/setup_cpu.sh --extras test,demo
# Activated, so that ninja is found by what the tests compile.
PATH=$PWD/.venv/bin:$PATH

if [[ ${1-} = --server ]]; then
    case ${2-} in
        newest | oldest) server "$2" ;;
        *) echo "test: --server takes newest or oldest, not '${2-}'" >&2 && exit 2 ;;
    esac
    finish
    exit
fi

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
# Types, and the words of docstrings, comments, messages, pages and documentation: beside the tests. What they print comes
# after them.
TYPES=$(mktemp) WORDS=$(mktemp)
trap 'rm -f "$TYPES" "$WORDS" ${SERVER_LOG:+"$SERVER_LOG"}' EXIT
mypy --pretty >"$TYPES" 2>&1 &
MYPY=$!
python scripts/check_words.py >"$WORDS" 2>&1 &
CHECK_WORDS=$!
# Rooms that import the training stack are left out, and the option skips files elsewhere that do. The folder is named as
# a whole: pytest's first process, which runs no test, would import the service for the conftest.py of tests/api.
QUICK=(--without-training-stack tests)
QUICK+=(--ignore=tests/{client,e2e,embedded,engine,kv,moves,pipeline,platform,run,training,upstream,weights})
STARTS_MUCH="engine or ray or e2e or browser or postgresql or service or python or listener"
case ${1-} in
    "")
        # Each takes a minute or more: faults of whole services, all operations of the API with made-up input, all orders in
        # which events may come, all pages in a browser.
        LONGEST=(tests/api/{faults/test_control_plane_faults,routes/test_openapi,ingest/test_store_batch}.py)
        LONGEST+=(tests/webui/pages/test_accessibility.py)
        server_beside 0 "${LONGEST[@]/#/--ignore=}"
        # A training run takes a minute or more, most of it its start. Half a minute to a minute take: engines that are
        # profiled, greedy output of vLLM's own methods (those of tests/engine/test_lossless.py stay), the conversion of a
        # real model, a service with a Ray of its own, and OpenRLHF's own tests.
        RUNS=(--ignore tests/verify/test_profile_engine.py --ignore tests/upstream/test_upstream_suites.py)
        RUNS+=(--deselect tests/cli/test_fetch_model.py::test_the_real_model_is_made_and_loads)
        RUNS+=(--deselect tests/cli/test_serve.py::test_local_starts_ray_and_stops_it_again)
        RUNS+=(--deselect tests/engine/test_arguments.py::test_greedy_output_is_the_same_whole_and_cut)
        for file in tests/e2e/test_*.py; do
            [[ $file = */test_main_job.py ]] || RUNS+=(--ignore "$file")
        done
        run python -m pytest -n 2 -p no:randomly -m "not slow and not server and not cluster" "${RUNS[@]}"
        join_server
        ;;
    --runs)
        # The runs decide how long all takes.
        server_beside 10
        run python -m pytest -n 2 -p no:randomly -m "not slow and not server"
        join_server
        ;;
    --slow)
        server_beside 10
        run python -m pytest -n 2 -p no:randomly -m "not server"
        join_server
        ;;
    --quick)
        # In memory where that is possible: a thousand stores would wait for the disk at each commit.
        [[ ! -w /dev/shm ]] || export PYTEST_DEBUG_TEMPROOT=/dev/shm
        run python -m pytest -n 2 --hypothesis-profile=quick -m "not slow and not ($STARTS_MUCH)" "${QUICK[@]}"
        ;;
    --changed)
        # Not in one line with mapfile: its failure must be seen.
        CHOSEN=$(python scripts/changed_tests.py "${@:2}")
        mapfile -t FILES <<<"$CHOSEN"
        [[ -z $CHOSEN ]] || run python -m pytest -n 2 "${FILES[@]}"
        ;;
    *) run python -m pytest -n 2 "$@" ;;
esac
echo "test: mypy --pretty"
wait "$MYPY" || FAILED+=("mypy --pretty")
cat "$TYPES"
echo "test: python scripts/check_words.py"
wait "$CHECK_WORDS" || FAILED+=("python scripts/check_words.py")
cat "$WORDS"
finish
