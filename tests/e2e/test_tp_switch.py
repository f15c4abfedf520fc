"""Training runs whose tails go on with more tensor parallelism, synchronous and pipelined: nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rhyme_openrlhf.telemetry.events import (
    EngineInterval,
    EngineStep,
    LayoutSwitched,
    Note,
    OffPolicyness,
    RolloutFinished,
    RunFinished,
    SampleMoved,
    WeightsChecked,
    WeightsLoaded,
)
from tests.e2e.runs import RUN_TIMEOUT_S, FinishedRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]


@pytest.mark.parametrize("caches", ["together", "turns"])
def test_tails_go_on_with_more_tensor_parallelism(train: Callable[..., FinishedRun], caches: str) -> None:
    run = train(
        "--vllm.num_engines", "2", "--tp_switch.enable", "--tp_switch.samples", "12", "--tp_switch.status_s", "0.05",
        "--move.news_s", "0.05", "--train.num_episodes", "1", "--cpu.kv_cache_mb", "32", "--tp_switch.kv_caches",
        caches,
    )  # fmt: skip
    assert ("only the layout that runs has its KV cache" in run.output) == (caches == "turns")
    assert run.code == 0, run.output
    assert "layouts: 2 engines of tensor parallelism 1" in run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    assert [event.samples for event in run.of(RolloutFinished)] == [16] * 2
    switches = run.of(LayoutSwitched)
    assert switches and all((event.from_tp, event.to_tp) == (1, 2) for event in switches)
    moves = run.of(SampleMoved)
    assert moves and {(event.destination_engine, event.cause) for event in moves} == {(2, "tp_switch")}
    # The tail's engine has the weights of every sync, and they are the policy's. Without KV cache it cannot be asked.
    assert {event.engine for event in run.of(WeightsLoaded)} == {0, 1, 2}
    assert {event.engine for event in run.of(WeightsChecked)} == ({0, 1, 2} if caches == "together" else {0, 1})
    assert all(event.max_difference < 0.01 for event in run.of(WeightsChecked))
    assert "switch" in {event.state for event in run.of(EngineInterval) if event.engine == 2}
    assert not [event for event in run.of(Note) if event.level == "warning"]


def test_tails_of_a_pipelined_run_too(train: Callable[..., FinishedRun]) -> None:
    run = train(
        "--vllm.num_engines", "2", "--tp_switch.enable", "--tp_switch.samples", "12", "--tp_switch.status_s", "0.05",
        "--move.news_s", "0.05", "--train.num_episodes", "3", "--cpu.kv_cache_mb", "32", "--train.async_enable",
        "--histopipe.enable", "--no-run.reproducible", "--latency.profile", "none",
    )  # fmt: skip
    assert run.code == 0, run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    assert [event.samples for event in run.of(RolloutFinished)] == [16] * 6
    switches = run.of(LayoutSwitched)
    assert switches and all((event.from_tp, event.to_tp) == (1, 2) for event in switches)
    # What ends while its move is prepared does not move, and where all of a switch do, there was none.
    moves = [event for event in run.of(SampleMoved) if event.cause == "tp_switch" and event.outcome == "moved"]
    assert {(event.step, event.destination_engine) for event in moves} == {(event.step, 2) for event in switches}
    # The tail's engine has the weights that the others generate with, and they are the policy's.
    loads = run.of(WeightsLoaded)
    taken = {event.version for event in loads if event.engine == 2}
    assert taken and taken <= {event.version for event in loads if event.engine != 2}
    assert all(event.max_difference < 0.01 for event in run.of(WeightsChecked))
    assert {age for event in run.of(OffPolicyness) for age in event.values} <= {0, 1}
    assert 2 in {event.engine for event in run.of(EngineStep)}
    assert not [event for event in run.of(Note) if event.level == "warning"]
