#!/usr/bin/env bash
# From a fresh checkout to the embedded demo with one command: set up (once), then `rhyme demo` with the arguments given.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The server extra is for `rhyme serve`, which docs/start/cpu.md goes on with.
scripts/setup_cpu.sh --extras server
exec .venv/bin/rhyme demo "$@"
