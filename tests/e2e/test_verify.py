"""`rhyme verify` on the embedded model, as small as it gets; and with engines that do not load their weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rhyme_openrlhf.cli.demo import arguments
from tests.e2e.runs import SMALL, left_in_shared_memory

pytestmark = pytest.mark.timeout(900)

VERIFY_TIMEOUT_S = 840
# `rhyme` with its record elsewhere. (Not by XDG_CACHE_HOME: DeepSpeed would compile its operators again there.)
RHYME = """
import sys
from pathlib import Path
from rhyme_openrlhf.cli.main import main
from rhyme_openrlhf.verify import record
record.path = lambda: Path(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""
# `rhyme train` with lazy_engine.py in place of our engines.
LAZY = (sys.executable, "-c", "import sys, lazy_engine; sys.exit(lazy_engine.main(sys.argv[1:]))")


@pytest.fixture
def short_folder(starts_e2e: None) -> Iterator[Path]:
    """A folder for temporary files whose name leaves room for Ray's sockets (107 characters in all)."""
    with tempfile.TemporaryDirectory(prefix="rv-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def options(small_prompts: Path, folder: Path) -> list[str]:
    """The eight shortest prompts, one engine, two samples a prompt."""
    small = ["--data.prompt_dataset", str(small_prompts), *SMALL, "--vllm.num_engines", "1"]
    return [*arguments(str(folder / "ckpt")), *small, "--rollout.n_samples_per_prompt", "2", "--train.batch_size", "8"]


# Three minutes; its parts are tested in tests/verify, what it checks in tests/engine and tests/e2e.
@pytest.mark.slow
def test_everything_promised_holds_on_this_machine(small_prompts: Path, tmp_path: Path, short_folder: Path) -> None:
    before = left_in_shared_memory()
    done = subprocess.run(
        [sys.executable, "-c", RHYME, str(tmp_path / "verified.json"), "verify", "--json", "found.json",
         *options(small_prompts, tmp_path)],
        capture_output=True, text=True, timeout=VERIFY_TIMEOUT_S, cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(short_folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    checks = {check["check"]: check for check in found["checks"]}
    results = {name: check["result"] for name, check in checks.items()}
    assert results == dict.fromkeys(("installs", "weights", "greedy", "sampled", "memory"), "ok") | {
        "speed": "informative"
    }

    weights = checks["weights"]["figures"]
    # Of eight prompts, four a step, the three steps it wants are two epochs of two.
    assert weights["checks"] == 4 and weights["transport"] == "buffer"
    # fp32 on both sides; and the policy moved far enough for that to mean something.
    assert weights["largest_difference"] < 1e-3 and weights["least_policy_moved"] > 0.05
    assert all(history["drafted"] > 0 for history in checks["greedy"]["figures"]["histories"])
    assert all(trial["test"]["p_value"] > 1e-4 for trial in checks["sampled"]["figures"]["trials"])
    speed = checks["speed"]["figures"]
    assert speed["ratio_low"] <= speed["ratio"] <= speed["ratio_high"] and len(speed["rounds"]["plain"]) == 3
    assert speed["tokens_per_step"] > 1 and speed["acceptance_rate"] > 0.2

    # The record is the doctor's; nothing else is left behind.
    (entry,) = json.loads((tmp_path / "verified.json").read_text())["verified"]
    assert set(entry["proofs"]) == {"weights-buffer", "lossless-greedy", "lossless-sampled"}
    assert not list(short_folder.glob("rhyme-verify-*")) and not (tmp_path / "runs").exists()
    assert left_in_shared_memory() <= before


@pytest.mark.slow
def test_engines_that_do_not_load_are_found(
    starts_e2e: None, small_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rhyme_openrlhf.cli import verify
    from rhyme_openrlhf.verify import record, weights

    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(record, "path", lambda: tmp_path / "verified.json")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(weights, "TRAIN", LAZY)
    file = tmp_path / "found.json"
    assert verify.main(["--only", "weights", "--json", str(file), *options(small_prompts, tmp_path)]) == 1
    (check,) = json.loads(file.read_text())["checks"]
    assert check["result"] == "failed"
    assert "engine 0, version 1: nothing was loaded" in check["why"]
    assert check["figures"]["least_moved"] == 0 and check["figures"]["least_policy_moved"] > 0.05
