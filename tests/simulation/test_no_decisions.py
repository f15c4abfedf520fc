"""A policy changed in `scheduling/` or `drafting/` changes the simulator: it has no copy of any decision."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rhyme_openrlhf
from rhyme_openrlhf.drafting import budget
from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.scheduling import (
    dispatch,
    engine_shares,
    group_time,
    outliers,
    rank_groups,
    reallocation,
    reallocation_policy,
    step_plan,
    tp_switch,
)
from rhyme_openrlhf.scheduling.carriers import Carrier
from rhyme_openrlhf.scheduling.deferral import BatchLedger
from rhyme_openrlhf.scheduling.engine_shares import EngineShares
from rhyme_openrlhf.scheduling.outliers import Destination
from rhyme_openrlhf.scheduling.rank_groups import RankGroup
from rhyme_openrlhf.scheduling.reallocation_policy import ReallocationPolicy
from rhyme_openrlhf.simulation import interventions, layout_changes, planner, recorded_drafts, speculation_rates
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Features
from rhyme_openrlhf.simulation.workload import drawn
from tests.simulation.test_run import CLUSTER, PROFILES, SHAPE

PACKAGE = Path(rhyme_openrlhf.__file__).parent
PIPELINE = Features("pipeline", rank_groups=4, two_tier=True, outliers=True, interval=0.3)
DEFERRING = Features("pipeline", rank_groups=4, outliers=True, defer=True, interval=0.3)
MOVING = Features(reallocation=True, cooldown=5, interval=0.3)

# Where the simulator looks the decision up, the decision, another one in its place, and the features that ask for it.
CASES: list[tuple[Any, str, Callable[..., Any], Features]] = [
    (step_plan, "rank_groups", lambda histories, groups: (), PIPELINE),
    (planner, "plan_shares", lambda *_: EngineShares((5, 1, 1, 1), (), None, 0.0, 0.0), PIPELINE),
    (step_plan, "equal_shares", lambda groups, *_: (5, 1, 1, 1), Features("pipeline", rank_groups=4)),
    (step_plan, "engines_by_group", lambda step, shares: rank_groups.engines_by_group(1, shares), PIPELINE),
    (dispatch, "assign", lambda lengths, loads: [0] * len(lengths), Features()),
    (outliers, "outliers", lambda *_: [], PIPELINE),
    (outliers, "destination", lambda *_: Destination("next_step", None), PIPELINE),
    (BatchLedger, "defer", lambda *_: False, DEFERRING),
    (outliers, "beta", lambda *_: 100.0, PIPELINE),
    (outliers, "last_count", lambda *_: 0, PIPELINE),
    (reallocation_policy, "reallocate", lambda *_: [], MOVING),
    (reallocation, "knee", lambda *_: 1, MOVING),
    (reallocation.Cooldown, "due", lambda *_: False, MOVING),
    (tp_switch, "decide", lambda *_: None, Features(switching="history")),
    (tp_switch, "decide", lambda *_: None, Features("pipeline", switching="maximum")),
    (reallocation_policy, "reallocate", lambda *_: [], Features("pipeline", reallocation=True, interval=0.3)),
    (ReallocationPolicy, "due", lambda *_: False, MOVING),
    (reallocation, "speculative_knee", lambda *_: 1, MOVING),
    (layout_changes, "cheaper", lambda *_: Carrier("transfer", 9.0), Features(switching="history")),
    (interventions, "cheaper", lambda *_: Carrier("transfer", 9.0), MOVING),
    (SpeculationWindow, "record", lambda *_: None, Features(speculation="window")),
    (
        budget,
        "choose",
        lambda acceptance, lengths, seconds, running: budget.Budget(lengths * 0, 0, 0.0),
        Features(speculation="budget"),
    ),
]


@pytest.mark.parametrize(("where", "name", "other", "features"), CASES, ids=[case[1] for case in CASES])
def test_another_decision_is_another_run(
    where: Any, name: str, other: Callable[..., Any], features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lengths that history predicts badly: every policy has something to do.
    load = drawn(dataclasses.replace(SHAPE, within=0.6, stability=0.5), 8, 32, 4, 2, 5)
    before = Run(load, CLUSTER, features, PROFILES).go()
    monkeypatch.setattr(where, name, other)
    assert Run(load, CLUSTER, features, PROFILES).go() != before


def test_nothing_in_the_simulator_has_a_decisions_name() -> None:
    """No function or class of `simulation/` is called as one of `scheduling/` is."""

    def defined(room: str) -> set[str]:
        return {
            node.name
            for path in (PACKAGE / room).glob("*.py")
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        }

    assert defined("scheduling") & defined("simulation") == set()
    assert {"plan_shares", "decide", "reallocate", "outliers", "assign"} <= defined("scheduling")
    # They are found where the simulator looks them up.
    assert planner.plan_shares is engine_shares.plan_shares and planner.GroupTime is group_time.GroupTime
    assert speculation_rates.SpeculationWindow is SpeculationWindow and RankGroup is rank_groups.RankGroup
    assert recorded_drafts.SpeculationWindow is SpeculationWindow


def test_decisions_are_the_live_systems_own_objects() -> None:
    """What a run holds and asks is of `scheduling/`, and nothing in between has a say."""
    run = Run(drawn(SHAPE, 2, 4, 2, 1, 0), CLUSTER, MOVING, PROFILES)
    assert type(run.ledger) is BatchLedger and type(run.interventions._policy) is ReallocationPolicy
    assert run.interventions._policy.predictor is run.predictors[1]


def test_every_module_takes_its_decisions_from_the_live_systems() -> None:
    wanted = {
        "planner": {"plan_shares", "by_load", "by_rank", "usual_rank_groups"},
        "interventions": {"ReallocationPolicy", "cheaper", "outliers"},
        "layout_changes": {"assign", "cheaper", "tp_switch"},
        "run": {"BatchLedger", "training_turn"},
        "speculation_rates": {"SpeculationWindow", "budget"},
        "recorded_drafts": {"SpeculationWindow"},
        "recommendation": {"usual_rank_groups"},
    }
    for module, names in wanted.items():
        tree = ast.parse((PACKAGE / "simulation" / f"{module}.py").read_text(encoding="utf-8"))
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith(("rhyme_openrlhf.scheduling", "rhyme_openrlhf.drafting"))
            for alias in node.names
        }
        assert names <= imported, module
