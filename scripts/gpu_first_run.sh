#!/usr/bin/env bash
# The first half hour on a GPU: does it run, is it lossless, how fast is it? One JSON file and one table of everything.
#
#   scripts/gpu_first_run.sh [--only PART,PART] [--seconds N] [--out FILE] [--tiny] [-- options of rhyme train]
#
#   --only     some parts alone; results of several calls are merged into the same FILE (--help lists the parts)
#   --seconds  for all parts of this call; a part that cannot begin in time is left for the next call
#   --tiny     the smallest useful size of each part, as the tests run it
#   PYTHON=FILE  (environment) the Python that has the package; otherwise .venv/bin/python or python3
#
# Each part has its own time limit and ends alone: a failed part does not stop the next. Without a GPU, what is for GPUs
# alone is skipped.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON-} ]]; then
    PYTHON=python3
    [[ -x $ROOT/.venv/bin/python ]] && PYTHON=$ROOT/.venv/bin/python
fi
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" "$ROOT/scripts/gpu_first_run.py" "$@"
