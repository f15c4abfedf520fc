"""The tests of moves between real engines, on vLLM's second model runner, whose kernels Triton interprets here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rhyme_openrlhf.settings.drafting import V2_ASYNC

pytest.importorskip("triton")

HERE = Path(__file__).parent
# Some hundred times as slow as compiled kernels.
LIMIT_S = 3000


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("runner", [V2_ASYNC, "undrafted"])
def test_samples_move_on_the_second_runner(starts_engine: None, runner: str) -> None:
    # Each process of an engine is to interpret kernels, so each Python is prepared as it starts.
    paths = [str(HERE / "interpreted"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "RHYME_TEST_RUNNER": runner, "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:randomly", "--timeout", str(LIMIT_S)]
    done = subprocess.run(
        [*command, str(HERE / "test_moves.py")], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\b\d\d passed", done.stdout)
