"""Engines, schedulers and workers have every method of the call protocols, with the same parameters.

mypy sees a wrong call.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rhyme_openrlhf
from rhyme_openrlhf.engine import calls

pytest.importorskip("vllm")

PACKAGE = Path(rhyme_openrlhf.__file__).parent


def answering() -> dict[type, Any]:
    """Return, for each protocol, the class that answers."""
    from rhyme_openrlhf.engine.actor import RhymeRolloutActor
    from rhyme_openrlhf.engine.actor_parts.answers import Answers
    from rhyme_openrlhf.engine.actor_parts.devices import Devices
    from rhyme_openrlhf.engine.actor_parts.measuring import Measuring
    from rhyme_openrlhf.engine.actor_parts.moves import Moves
    from rhyme_openrlhf.engine.actor_parts.proving import Proving
    from rhyme_openrlhf.engine.actor_parts.turns import Turns
    from rhyme_openrlhf.engine.scheduler_parts import moves as scheduler_moves
    from rhyme_openrlhf.engine.scheduler_parts.clock import Timing
    from rhyme_openrlhf.engine.scheduler_parts.drafting import Drafting
    from rhyme_openrlhf.engine.scheduler_parts.meter import Meter
    from rhyme_openrlhf.engine.worker import WorkerExtension

    return {
        calls.SchedulerMeter: Meter,
        calls.SchedulerTiming: Timing,
        calls.SchedulerDrafting: Drafting,
        calls.SchedulerMoves: scheduler_moves.Moves,
        calls.WorkerCalls: WorkerExtension,
        calls.EngineCalls: RhymeRolloutActor,
        calls.MeasuringCalls: Measuring,
        calls.ProofCalls: Proving,
        calls.TurnCalls: Turns,
        calls.SampleCalls: Moves,
        calls.DeviceCalls: Devices,
        calls.AnswerCalls: Answers,
    }


PROTOCOLS = [value for value in vars(calls).values() if getattr(value, "__name__", "").endswith("Calls")]
PROTOCOLS += [value for name, value in vars(calls).items() if name.startswith("Scheduler")]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    # Ray adds a parameter of its own to OpenRLHF's actors.
    return [(one.name, one.kind, one.default) for one in found if not one.name.startswith("_ray")]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_a_class_answers_each_call_of_a_protocol(protocol: type) -> None:
    owner = answering()[protocol]
    assert calls.names(protocol)
    for name in calls.names(protocol):
        assert parameters(getattr(owner, name)) == parameters(getattr(protocol, name)), name


def test_no_call_names_its_method_by_a_string() -> None:
    by_string = re.compile(r"(call_scheduler|collective_rpc|call_workers|\bcall|_call)\(\s*[\"']")
    found = [
        f"{path.name}: {line.strip()}"
        for room in ("engine", "moves", "training", "pipeline", "weights", "verify")
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if by_string.search(line)
    ]
    assert found == []


CALLS = """
from rhyme_openrlhf.engine.calls import Caller, EnginePort, SampleCalls, SchedulerMoves, TurnCalls


async def ask(scheduler: Caller, port: EnginePort, handle: TurnCalls) -> None:
    await scheduler(SchedulerMoves.hold_room, "room", 8)
    await scheduler(SchedulerMoves.hold_room, "room", "8")
    await port.call(SampleCalls.hold_room, "room", 8)
    await port.call(SampleCalls.hold_room, "room", "8")
    handle.close_turn.remote(8)
    handle.close_turn.remote("8")
"""


@pytest.mark.usefixtures("starts_python")
def test_the_type_checker_sees_wrong_arguments(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "calls_engines.py"
    file.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=240, check=False)
    wrong = [line.split(":")[1] for line in done.stdout.splitlines() if "error:" in line]
    assert wrong == ["7", "9", "11"], done.stdout
