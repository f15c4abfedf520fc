"""A policy changed in `scheduling/` or `drafting/` changes the simulator: it has no copy of any decision."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rhyme_openrlhf
from rhyme_openrlhf.drafting import budget
from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.scheduling import outliers, rank_groups, reallocation, step_plan, tp_switch
from rhyme_openrlhf.scheduling.deferral import BatchLedger
from rhyme_openrlhf.scheduling.engine_shares import EngineShares
from rhyme_openrlhf.scheduling.move import RECOMPUTE
from rhyme_openrlhf.scheduling.move_costs import MoveCosts
from rhyme_openrlhf.scheduling.outliers import Destination
from rhyme_openrlhf.scheduling.reallocation import ReallocationPolicy
from rhyme_openrlhf.simulation import layout_changes, planner
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Features
from rhyme_openrlhf.simulation.workload import drawn
from tests.simulation.kinds import CLUSTER, PROFILES, SHAPE

PACKAGE = Path(rhyme_openrlhf.__file__).parent
PIPELINE = Features("pipeline", rank_groups=4, two_tier=True, outliers=True, interval=0.3)
DEFERRING = Features("pipeline", rank_groups=4, outliers=True, defer=True, interval=0.3)
SWITCHING = Features(switching="history")
MOVING = Features(reallocation=True, cooldown=5, interval=0.3)

LIVE_ROOMS = ("engine", "moves", "training", "pipeline", "run")
# Files of `scheduling/` that say how a live run does what was decided; a simulated run does it otherwise.
MACHINERY = ("move", "layouts", "turns")
# What engines report is an object in a live run, and an engine's own state in a simulated one.
ONLY_LIVE = {"DecodeMean", "EngineStatus", "SampleStatus", "Unfinished", "learn", "reported_speculation"}
# The same as the simulator has it; what leaves questions out whose answer is known; and a recommended setting.
ONLY_SIMULATED = (
    {"Decoding", "EngineLoad", "FirstLayouts", "UnfinishedSamples", "speculation"}
    | {"larger", "last_count", "throughput_by_samples"}
    | {"usual_rank_groups"}
)  # fmt: skip

# Where the simulator looks the decision up, the decision, another one in its place, and the features that ask for it.
CASES: list[tuple[Any, str, Callable[..., Any], Features]] = [
    (step_plan, "rank_groups", lambda *_: (), PIPELINE),
    (step_plan, "plan_shares", lambda *_: EngineShares((5, 1, 1, 1), (), None, 0.0, 0.0), PIPELINE),
    (step_plan, "equal_shares", lambda groups, *_: (5, 1, 1, 1), Features("pipeline", rank_groups=4)),
    (step_plan, "engines_by_group", lambda step, shares: rank_groups.engines_by_group(1, shares), PIPELINE),
    (step_plan, "assign", lambda lengths, loads: [0] * len(lengths), Features()),
    (outliers, "outliers", lambda *_: [], PIPELINE),
    (outliers, "destination", lambda *_: Destination("next_step", None), PIPELINE),
    (BatchLedger, "defer", lambda *_: False, DEFERRING),
    (outliers, "beta", lambda *_: 100.0, PIPELINE),
    (outliers, "last_count", lambda *_: 0, PIPELINE),
    (reallocation, "by_throughput", lambda *_: [], MOVING),
    (reallocation, "by_threshold", lambda *_: [], dataclasses.replace(MOVING, threshold=4)),
    (reallocation.Cooldown, "due", lambda *_: False, MOVING),
    (tp_switch, "decide", lambda *_: None, SWITCHING),
    (tp_switch, "decide", lambda *_: None, Features("pipeline", switching="maximum")),
    (reallocation, "by_throughput", lambda *_: [], Features("pipeline", reallocation=True, interval=0.3)),
    (ReallocationPolicy, "due", lambda *_: False, MOVING),
    (reallocation, "throughput_by_samples", lambda *_: np.zeros(9), MOVING),
    (MoveCosts, "cheaper", lambda *_: RECOMPUTE, SWITCHING),
    (MoveCosts, "choose", lambda *_: (RECOMPUTE, None), MOVING),
    (tp_switch.SwitchCost, "seconds", lambda *_: 1e9, SWITCHING),
    (tp_switch.SwitchCost, "learn", lambda *_: None, SWITCHING),
    (
        layout_changes,
        "in_turn",
        lambda lengths, _: [(at, 0) for at in range(len(lengths))],
        Features(switching="history"),
    ),
    (layout_changes, "first_layouts", lambda *_: None, Features(dispatch=True, switching="history")),
    (planner, "by_predicted_work", lambda *_: None, Features(dispatch=True)),
    (outliers.Growth, "beta", lambda *_: 100.0, PIPELINE),
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
    before = unchanged(features)
    monkeypatch.setattr(where, name, other)
    assert run(features) != before


def run(features: Features) -> Result:
    """Run lengths that history predicts badly: every policy has something to do."""
    load = drawn(dataclasses.replace(SHAPE, within=0.6, stability=0.5), 8, 32, 4, 2, 5)
    # A layout of two engines a node, and one of a single one.
    return Run(load, CLUSTER, features, {**PROFILES, 2: PROFILES[4]}).go()


# Several decisions are changed for the same features.
unchanged = functools.cache(run)


def trees(rooms: Iterable[str]) -> dict[str, ast.Module]:
    """Return the files of these rooms, by their path in the package."""
    paths = [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]
    return {path.relative_to(PACKAGE).as_posix(): syntax(path) for path in paths}


@functools.cache
def syntax(path: Path) -> ast.Module:
    """Return a file's syntax tree; several tests read the same files and change none."""
    return ast.parse(path.read_text(encoding="utf-8"))


def asked(files: Mapping[str, ast.Module]) -> set[str]:
    """Return the functions and classes of `scheduling/` that these files name, by import or as `module.name`."""
    found: set[str] = set()
    for tree in files.values():
        modules: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rhyme_openrlhf.scheduling"):
                names = {alias.name for alias in node.names}
                if node.module == "rhyme_openrlhf.scheduling":
                    modules |= names
                else:
                    found |= names
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                found.add(node.attr)
    return found & {name for tree in trees(["scheduling"]).values() for name in defined(tree)}


def defined(tree: ast.Module) -> set[str]:
    """Return the public functions and classes of a file."""
    found = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return {name for name in found if not name.startswith("_")}


def test_a_live_and_a_simulated_run_ask_the_same_rules() -> None:
    live, simulated = asked(trees(LIVE_ROOMS)), asked(trees(["simulation"]))
    machinery = {name for file in MACHINERY for name in defined(trees(["scheduling"])[f"scheduling/{file}.py"])}
    assert live - simulated - machinery == ONLY_LIVE
    assert simulated - live == ONLY_SIMULATED
    assert {"MoveCosts", "SwitchCost", "Growth", "decide", "ReallocationPolicy", "second_tier"} <= live & simulated


def test_the_scan_sees_every_way_to_a_rule() -> None:
    source = (
        "from rhyme_openrlhf.scheduling import tp_switch\nfrom rhyme_openrlhf.scheduling.outliers import beta\n"
        "tp_switch.decide()\ntp_switch.EACH_SECONDS\nbeta.decide\n"
    )
    assert asked({"a.py": ast.parse(source)}) == {"decide", "beta"}


def test_nothing_in_the_simulator_has_a_decisions_name() -> None:
    """No function or class of `simulation/` is called as one of `scheduling/` is."""
    rules, simulated = (
        {name for tree in trees([room]).values() for name in defined(tree)} for room in ("scheduling", "simulation")
    )
    assert rules & simulated == set()
    assert {"plan_shares", "decide", "by_throughput", "outliers", "assign"} <= rules


def formulas(files: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return the rooms in which each formula stands: arithmetic of three operators, or of two and a sum, any names."""
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp):
                inside = list(ast.walk(node))
                operators = sum(isinstance(one, ast.BinOp) for one in inside)
                if operators + any(isinstance(one, ast.GeneratorExp) for one in inside) >= 3:
                    found[_with_any_names(node)].add(file.split("/")[0])
    return found


def _with_any_names(formula: ast.BinOp) -> str:
    names: dict[str, str] = {}

    class Renamed(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Name:
            return ast.Name(names.setdefault(node.id, f"x{len(names)}"), node.ctx)

        def visit_Attribute(self, node: ast.Attribute) -> ast.Name:
            return ast.Name(names.setdefault(ast.unparse(node), f"x{len(names)}"), ast.Load())

    return ast.unparse(Renamed().visit(copy.deepcopy(formula)))


def test_no_formula_stands_in_two_rooms() -> None:
    found = formulas(trees(["scheduling", "simulation", *LIVE_ROOMS]))
    assert {formula: rooms for formula, rooms in found.items() if len(rooms) > 1} == {}


def test_a_formula_is_found_under_other_names() -> None:
    one = "gained = sum(mean.running * tokens for mean, tokens in steps) / decoding"
    other = "def f(those, count):\n    return sum(x.load * y for x, y in those) / count"
    assert list(formulas({"moves/a.py": ast.parse(one), "scheduling/b.py": ast.parse(other)}).values()) == [
        {"moves", "scheduling"}
    ]


def test_decisions_are_the_live_systems_own_objects() -> None:
    """What a run holds and asks is of `scheduling/`, and nothing in between has a say."""
    run = Run(drawn(SHAPE, 2, 4, 2, 1, 0), CLUSTER, MOVING, PROFILES)
    assert type(run.ledger) is BatchLedger and type(run.interventions._policy) is ReallocationPolicy
    assert run.interventions._policy.predictor is run.predictors[1]
