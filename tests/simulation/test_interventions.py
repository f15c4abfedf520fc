"""The incremental search for outliers, against a search over all engines."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rhyme_openrlhf.simulation.interventions import Interventions
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Features
from rhyme_openrlhf.simulation.workload import drawn
from tests.simulation.kinds import CLUSTER, PROFILES, SHAPE


@pytest.mark.parametrize("reallocation", [False, True])
def test_a_rank_groups_samples_are_found_wherever_they_went(
    reallocation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = Features(
        "pipeline", rank_groups=4, outliers=True, alpha=0.5, beta_floor=1.0, interval=0.3, cooldown=2,
        reallocation=reallocation,
    )  # fmt: skip
    run = Run(
        drawn(dataclasses.replace(SHAPE, within=0.6, stability=0.5), 12, 32, 4, 2, 5), CLUSTER, features, PROFILES
    )
    looks = away = 0
    of_rank_group = Interventions._of_rank_group

    def compared(self: Interventions, step: int, place: int, plan: Any, now: float) -> Any:
        nonlocal looks, away
        where, lengths = of_rank_group(self, step, place, plan, now)
        everywhere = {
            sample: slot
            for slot in run.slots
            if slot.step == step and not slot.beginning
            for sample, prompt in slot.engine.prompts_running()
            if sample >> 32 == step and plan.group_of[prompt] == place and sample not in slot.below
        }
        assert where == everywhere
        assert lengths == {sample: int(slot.engine.generated(sample)) for sample, slot in everywhere.items()}
        looks += 1
        away += sum(plan.rank_group_of[slot.place] != place for slot in where.values())
        return where, lengths

    monkeypatch.setattr(Interventions, "_of_rank_group", compared)
    result = run.go()
    assert looks > 20 and away > 0 and sum(result.moves.values()) > 10
    # Of steps that are complete nothing is kept.
    assert set(run.interventions._elsewhere) <= {len(run.workload.steps) - 1, len(run.workload.steps)}


def test_waiting_samples_are_reallocated_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin elsewhere, so the stage ends sooner."""
    load = drawn(dataclasses.replace(SHAPE, within=0.6, stability=0.5), 4, 16, 4, 2, 5)
    features = Features("sync", reallocation=True, cooldown=5, interval=0.3)
    few_seats = dataclasses.replace(CLUSTER, running=4)
    moved: list[bool] = []
    move = Interventions._move

    def noted(self: Interventions, source: Any, target: Any, samples: Any, cause: str) -> None:
        moved.extend(sample in source.engine.running for sample in samples)
        move(self, source, target, samples, cause)

    monkeypatch.setattr(Interventions, "_move", noted)
    result = Run(load, few_seats, features, PROFILES).go()
    assert moved.count(False) > 10 and moved.count(True) > 10
    assert sum(result.moves.values()) == len(moved)
    assert sum(step.samples for step in result.steps) == 4 * 16 * 4
    assert result.rollout_seconds < Run(load, few_seats, Features("sync"), PROFILES).go().rollout_seconds
