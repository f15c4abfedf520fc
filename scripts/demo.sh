#!/usr/bin/env bash
# From a fresh checkout to the embedded demo with one command: set up (once), then `rhyme demo` with the arguments given.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_cpu.sh
exec .venv/bin/rhyme demo "$@"
