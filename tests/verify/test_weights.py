"""Judging a run's weight checks: what did nothing, arrived in part or cannot be told is found."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.events import WeightsChecked
from rhyme_openrlhf.verify import weights
from rhyme_openrlhf.verify.bench import Prompt
from rhyme_openrlhf.verify.outcome import CheckSkipped, VerifyError
from rhyme_openrlhf.verify.weights import TOLERANCE, judge

VERSIONS = (1, 2, 3)
BF16, FP32 = "bfloat16", "float32"


def checks(**changes: float | None) -> list[WeightsChecked]:
    """Three syncs of two engines that all arrived; engine 1 at version 2 is changed."""
    good = [WeightsChecked(v, e, 0.01, 1.5, 1.5) for v in VERSIONS for e in (0, 1)]
    return [msgspec.structs.replace(c, **changes) if (c.version, c.engine) == (2, 1) else c for c in good]  # type: ignore[arg-type]


def test_what_arrived_is_fine() -> None:
    judged = judge(checks(), VERSIONS, 2, BF16)
    assert judged.problems == () and judged.checks == 6
    assert (judged.largest_difference, judged.least_moved, judged.least_policy_moved) == (0.01, 1.5, 1.5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_sync_that_did_nothing_is_found(dtype: str) -> None:
    """The engine keeps its weights: it does not move, and is as far away as the policy moved."""
    (problem,) = judge(checks(max_difference=1.5, moved=0.0), VERSIONS, 2, dtype).problems
    assert "engine 1, version 2: nothing was loaded" in problem


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_sync_that_did_nothing_is_found_however_little_the_policy_moved(dtype: str) -> None:
    """At the least movement that counts, an engine that kept its weights and scatters a little is still found."""
    moved = 2.01 * TOLERANCE[dtype]
    stuck = [WeightsChecked(v, 0, moved, 1e-6, moved) for v in VERSIONS]
    assert len(judge(stuck, VERSIONS, 1, dtype).problems) == 3


def test_a_sync_that_arrived_in_part_is_found() -> None:
    (problem,) = judge(checks(max_difference=0.7, moved=0.9), VERSIONS, 2, BF16).problems
    assert "engine 1, version 2: 0.7 away from the policy" in problem


def test_a_wild_engine_is_found_though_it_moved_far() -> None:
    assert judge(checks(max_difference=8.0, moved=9.0), VERSIONS, 2, BF16).problems


def test_a_large_movement_allows_more_than_the_tolerance() -> None:
    far = [WeightsChecked(v, 0, 2.0, 20.0, 20.0) for v in VERSIONS]
    assert judge(far, VERSIONS, 1, BF16).problems == ()


def test_fp32_is_held_to_more_than_bf16() -> None:
    near = [WeightsChecked(v, 0, 0.1, 0.2, 0.2) for v in VERSIONS]
    assert judge(near, VERSIONS, 1, FP32).problems


def test_a_policy_that_hardly_moved_proves_nothing() -> None:
    still = [WeightsChecked(v, 0, 0.01, 0.0, 0.01) for v in VERSIONS]
    (problem,) = judge(still, VERSIONS, 1, BF16).problems
    assert "too little to tell" in problem
    # One telling step is enough, and a step without movement beside it is none to blame.
    assert judge([*still[:2], WeightsChecked(3, 0, 0.01, 1.5, 1.5)], VERSIONS, 1, BF16).problems == ()


@pytest.mark.parametrize("changes", [{"max_difference": math.nan}, {"moved": None}, {"policy_moved": math.nan}])
def test_what_is_no_number_or_not_there_is_not_right(changes: dict[str, float | None]) -> None:
    judged = judge(checks(**{"max_difference": 0.4, **changes}), VERSIONS, 2, BF16)
    assert judged.problems


@pytest.mark.parametrize(
    "changes",
    [
        {"moved": math.nan},
        {"policy_moved": math.nan},
        # Movements without an end would allow any difference.
        {"moved": math.inf, "policy_moved": math.inf, "max_difference": 100.0},
        {"moved": math.inf},
    ],
)
def test_a_movement_that_is_not_finite_is_a_problem_however_near_the_engine_is(changes: dict[str, float]) -> None:
    (problem,) = judge(checks(**changes), VERSIONS, 2, BF16).problems
    assert problem.startswith("engine 1, version 2: ")


def test_a_check_that_is_missing_is_named() -> None:
    lacking = [check for check in checks() if (check.version, check.engine) != (3, 1)]
    (problem,) = judge(lacking, VERSIONS, 2, BF16).problems
    assert problem == "version 3 was not checked in engine 1"
    assert judge([], VERSIONS, 2, BF16).problems


# Stands for `rhyme train`: writes the record of a run of three steps and two engines, whose engine 1 moves by MOVED.
TRAINING = """
import sys
from pathlib import Path
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import RunFinished, WeightsChecked
run = Path(sys.argv[sys.argv.index("--run.dir") + 1])
run.mkdir()
(run.parent / "trained").mkdir()
with EventLog(run / "events.jsonl") as log:
    for version in (1, 2, 3):
        log.write(WeightsChecked(version, 0, 0.0001, 0.5, 0.5), "trainer")
        log.write(WeightsChecked(version, 1, 0.5 - MOVED, MOVED, 0.5), "trainer")
    log.write(RunFinished("STATUS", "the message", 1.0), "driver")
"""


@pytest.fixture
def bench(args: Any, tmp_path: Path) -> Any:
    """The check's bench, without engines."""
    inputs = SimpleNamespace(
        args=args, argv=("--ds.zero_stage", "2"), folder=tmp_path, settings=RhymeSettings(),
        prompts=tuple(Prompt(f"prompt {number}", (1, 2, 3)) for number in range(12)),
    )  # fmt: skip
    engines = SimpleNamespace(run_dtype=FP32, close=lambda: None)
    return SimpleNamespace(inputs=inputs, engines=engines, say=lambda text: None)


def training(monkeypatch: pytest.MonkeyPatch, program: str, **values: object) -> None:
    for name, value in values.items():
        program = program.replace(name, str(value))
    monkeypatch.setattr(weights, "TRAIN", (sys.executable, "-c", program))


@pytest.mark.usefixtures("starts_python")
def test_the_check_reads_the_record_of_the_run(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training(monkeypatch, TRAINING, MOVED=0.5, STATUS="succeeded")
    outcome = weights.run(bench)
    assert (outcome.result, outcome.why, outcome.proves) == ("ok", "", "weights-buffer")
    assert outcome.figures["checks"] == 6 and len(outcome.figures["checked"]) == 6
    # The prompts were handed over as the model gets them; the trained model is gone, the record is not.
    left = {path.name for path in (bench.inputs.folder / "weights").iterdir()}
    assert left == {"prompts.jsonl", "output.log", "run"}


@pytest.mark.usefixtures("starts_python")
def test_the_check_fails_with_the_engine_that_did_not_load(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training(monkeypatch, TRAINING, MOVED=0.0, STATUS="succeeded")
    outcome = weights.run(bench)
    assert outcome.result == "failed" and "engine 1, version 1: nothing was loaded" in outcome.why


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_the_check_fails_with_its_run(status: str, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training(monkeypatch, TRAINING, MOVED=0.5, STATUS=status)
    outcome = weights.run(bench)
    assert outcome.result == "failed" and outcome.why == "the training run failed: the message"


@pytest.mark.usefixtures("starts_python")
def test_a_run_that_did_not_start_says_what_it_printed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training(monkeypatch, "import sys; sys.exit('rhyme train: error: no such model')")
    outcome = weights.run(bench)
    assert outcome.result == "failed" and "the training run failed: rhyme train: error: no such model" in outcome.why


@pytest.mark.usefixtures("starts_python")
def test_a_run_that_does_not_end_is_ended(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "RUN_SECONDS", 1)
    monkeypatch.setattr(weights, "STOP_SECONDS", 1)
    # Deaf to Ctrl-C.
    training(monkeypatch, "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)")
    with pytest.raises(VerifyError, match="did not end within 1 s"):
        # Without an end, longer than any test may take.
        weights.run(bench)


def test_prompts_with_images_are_not_covered(bench: Any) -> None:
    bench.inputs.args.data.max_images_per_prompt = 1
    with pytest.raises(CheckSkipped, match="images"):
        weights.run(bench)
