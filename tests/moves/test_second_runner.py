"""The tests of moves between real engines, on vLLM's second model runner, whose kernels Triton interprets here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rhyme_openrlhf.settings.drafting import V2_ASYNC
from tests.moves.engines import UNDRAFTED

pytest.importorskip("triton")

HERE = Path(__file__).parent
# Some hundred times as slow as compiled kernels.
LIMIT_S = 3000


# What runs there: every move; turns of the pipeline; engines of several ranks, and layouts that take turns; responses
# as they are trained, with stop strings, penalties and limits.
MOVES, TURNS, LAYOUTS = "test_moves.py", "test_moves_in_turns.py", "test_tensor_parallel_moves.py"
TRAINED = "../engine/test_drafts_in_training.py::test_greedy_responses_are_trained_alike_with_drafts_and_without"


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    ("runner", "file"),
    [(V2_ASYNC, MOVES), (UNDRAFTED, MOVES), (V2_ASYNC, TURNS), (V2_ASYNC, LAYOUTS), (V2_ASYNC, TRAINED)],
)
def test_what_moves_runs_on_the_second_runner(starts_engine: None, runner: str, file: str) -> None:
    # Each process of an engine is to interpret kernels, so each Python is prepared as it starts.
    paths = [str(HERE / "interpreted"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "RHYME_TEST_RUNNER": runner, "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-n", "0", "-p", "no:randomly"]
    done = subprocess.run(
        [*command, "--timeout", str(LIMIT_S), str(HERE / file)],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\b\d+ passed", done.stdout) and "skipped" not in done.stdout
