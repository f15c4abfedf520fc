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
