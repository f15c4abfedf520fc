"""Check: trained weights reach every engine, at every sync.

Runs a real training run of the user's (verify/training_arguments.py) in a process of its own and reads its record.
Invariants:

- An engine that did not load is found, because it must move as the policy moves, not only agree with it.
- A run in which the policy moved too little to judge is no success.
- Every process that the check starts is ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import Event, RunFinished, WeightsChecked
from rhyme_openrlhf.verify.bench import Bench, need_text_prompts
from rhyme_openrlhf.verify.outcome import Outcome, VerifyError
from rhyme_openrlhf.verify.training_arguments import PROMPTS_PER_STEP, STEPS, WRITTEN, training_arguments

WHAT = "weights reach every engine after every step"
TRAIN = (sys.executable, "-m", "rhyme_openrlhf.cli.main", "train")
# The embedded model takes one to two minutes; a large one loads for many.
RUN_SECONDS = 1800
# From Ctrl-C to a closed record: the run waits for its recorder and ends Ray.
STOP_SECONDS = 90
# How far apart two right implementations are, by the engines' number format: sums in another order. Measured on the
# embedded model in fp32: below 1e-3. In 16 bits an improbable token's log-probability is good to some tenths.
TOLERANCE = {"float32": 5e-3, "float16": 0.1, "bfloat16": 0.25}
# After a sync an engine may be this share of its movement away from the policy, where that is above the tolerance. One
# stale expert or row makes a small share of a movement: in fp32, where rounding makes far less, it is found.
MOVEMENT_SHARE = {"float32": 0.01, "float16": 0.25, "bfloat16": 0.25}
# A policy that moved less than this many tolerances proves nothing: an engine that kept its weights would agree.
LEAST_MOVEMENT = 2.0
# What is shown of a run's output when it failed, and of many problems; the JSON has all.
SHOWN_LINES = 3
SHOWN_PROBLEMS = 2


@dataclass(frozen=True)
class Judgement:
    """Judgement of all syncs of a run: the largest difference, the smallest movements, and what is wrong with them."""

    checks: int
    largest_difference: float
    least_moved: float
    least_policy_moved: float
    problems: tuple[str, ...]


def proof(transport: str) -> str:
    """Name what this check proves for a run with that --weights.transport."""
    return f"weights-{transport}"


def judge(checks: Sequence[WeightsChecked], versions: Sequence[int], engines: int, dtype: str) -> Judgement:
    """Judge a run whose steps produced `versions`, in engines of a number format."""
    tolerance = TOLERANCE[dtype]
    problems = []
    done = {(check.version, check.engine) for check in checks}
    lacking = [(v, e) for v in versions for e in range(engines) if (v, e) not in done]
    if lacking:
        problems.append(f"version {lacking[0][0]} was not checked in engine {lacking[0][1]}")
    telling = 0
    for check in checks:
        where = f"engine {check.engine}, version {check.version}"
        moved, policy_moved = check.moved or 0.0, check.policy_moved or 0.0
        told = policy_moved > LEAST_MOVEMENT * tolerance
        telling += told
        allowed = max(tolerance, MOVEMENT_SHARE[dtype] * min(moved, policy_moved))
        if told and not moved:
            problems.append(f"{where}: nothing was loaded: the policy moved by {policy_moved:.2g}, the engine did not")
        # Written so that what is not a number is a problem too, and what is infinite allows nothing.
        elif not (math.isfinite(moved + policy_moved) and check.max_difference <= allowed):
            problems.append(
                f"{where}: {check.max_difference:.2g} away from the policy, which moved by {policy_moved:.2g} and the "
                f"engine by {moved:.2g}; allowed is {allowed:.2g}"
            )
    if checks and not telling:
        most = max(check.policy_moved or 0.0 for check in checks)
        problems.append(
            f"the policy moved by {most:.2g} at most, less than {LEAST_MOVEMENT * tolerance:g}: too little to tell "
            f"whether its weights arrive in {dtype}"
        )
    return Judgement(
        len(checks),
        max((check.max_difference for check in checks), default=float("nan")),
        min((check.moved or 0.0 for check in checks), default=float("nan")),
        min((check.policy_moved or 0.0 for check in checks), default=float("nan")),
        tuple(problems),
    )


def run(bench: Bench) -> Outcome:
    """Train for a few steps and judge every sync."""
    need_text_prompts(bench)
    inputs = bench.inputs
    # Two runs on one machine would share its GPUs.
    bench.engines.close()
    folder = inputs.folder / "weights"
    folder.mkdir()
    argv = _arguments(bench, folder)
    bench.say(f"a training run of {STEPS} steps on this command line's model and placement")
    events, message = _train(argv, folder)
    checks = [event for event in events if isinstance(event, WeightsChecked)]
    finished = [event for event in events if isinstance(event, RunFinished)]
    judged = judge(checks, range(1, STEPS + 1), inputs.args.vllm.num_engines, bench.engines.run_dtype)
    problems = list(judged.problems)
    if not finished or finished[-1].status != "succeeded":
        problems.insert(0, f"the training run failed: {finished[-1].message if finished else message}")
    engines = inputs.args.vllm.num_engines
    lines = [
        f"{judged.checks} checks ({STEPS} steps, {engines} engine{'s' if engines > 1 else ''}, "
        f"{inputs.settings.weight_transport} transport, {bench.engines.run_dtype})",
        f"engine to policy at most {judged.largest_difference:.2g}; a step moved the policy by at least "
        f"{judged.least_policy_moved:.2g}, the engines by at least {judged.least_moved:.2g}",
    ]
    figures = dataclasses.asdict(judged) | {
        "transport": inputs.settings.weight_transport,
        "tolerance": TOLERANCE[bench.engines.run_dtype],
        "command": argv,
        "checked": [msgspec.structs.asdict(check) for check in checks],
    }
    return Outcome(
        WHAT, "failed" if problems else "ok", _in_short(problems), lines, figures,
        proof(inputs.settings.weight_transport),
    )  # fmt: skip


def _in_short(problems: Sequence[str]) -> str:
    more = len(problems) - SHOWN_PROBLEMS
    return "; ".join(problems[:SHOWN_PROBLEMS]) + (f"; and {more} more like that" if more > 0 else "")


def _arguments(bench: Bench, folder: Path) -> list[str]:
    prompts = bench.inputs.prompts[: STEPS * PROMPTS_PER_STEP]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": prompt.text, "label": ""}) + "\n" for prompt in prompts))
    lengths = [len(prompt.tokens) for prompt in prompts]
    return training_arguments(bench.inputs.argv, bench.inputs.args, file, lengths, folder)


def _train(argv: Sequence[str], folder: Path) -> tuple[list[Event], str]:
    """Return the events of a training run, and the last lines it printed. Raises VerifyError when it does not end."""
    output = folder / "output.log"
    with output.open("w") as log:
        # In a session of its own, so that all its processes can be ended together, and the terminal's Ctrl-C is ours.
        process = subprocess.Popen([*TRAIN, *argv], stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise VerifyError(
                f"the training run did not end within {RUN_SECONDS} s (logs: {folder}/run/logs)"
            ) from None
        finally:
            _end(process)
            for name in WRITTEN:
                shutil.rmtree(folder / name, ignore_errors=True)
    record = folder / "run" / "events.jsonl"
    events = [recorded.event for recorded in read_events(record)] if record.exists() else []
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return events, " / ".join(lines[-SHOWN_LINES:]) or f"exit code {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that still runs: as Ctrl-C would, and, if that does not help, by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
