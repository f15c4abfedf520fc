"""The layouts that nodes begin a step with."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.scheduling.first_layouts import FirstLayouts, _Step, first_layouts
from rhyme_openrlhf.scheduling.stage_course import Layout
from rhyme_openrlhf.scheduling.tp_switch import SwitchCost
from rhyme_openrlhf.simulation import engine_kinds
from rhyme_openrlhf.simulation.workload import PRESETS, drawn

SAMPLES = 4
ROOM = (10**9, 10**9)


def step_seconds(fixed: float, each: float) -> Layout:
    engines = 4 if fixed > 0.01 else 1
    return Layout(8 // engines, engines, lambda running, context, drafts: fixed + each * running)


# Few samples are quicker at the larger engines, many at the others.
LAYOUTS = (step_seconds(0.016, 0.0003), step_seconds(0.009, 0.0002))


def ask(
    lengths: list[tuple[int, ...]], nodes: int = 2, seats: int = 256, room: tuple[int, ...] = ROOM
) -> FirstLayouts | None:
    return first_layouts(nodes, LAYOUTS, lengths, SAMPLES, seats, room, lambda *_: 0.5)


# Three prompts of thirty-two are eight times as long as the others.
FEW_LONG = [(8000, 8100, 7900, 8000) if place % 11 == 3 else (900 + place, 950, 1000, 1100) for place in range(32)]


def test_the_longest_prompts_begin_at_a_larger_engine() -> None:
    found = ask(FEW_LONG)
    assert found is not None and found.layouts == (0, 1)
    assert {place for place, (node, _) in enumerate(found.engine_of) if node == 1} == {3, 14, 25}
    assert found.seconds < 0.95 * found.seconds_alike
    # The others are spread over the four engines of the node that begins as usual.
    rest = [engine for node, engine in found.engine_of if node == 0]
    assert [rest.count(engine) for engine in range(4)] in ([7, 7, 7, 8], [8, 7, 7, 7], [7, 8, 7, 7], [7, 7, 8, 7])


def test_single_long_responses_do_not_make_a_prompt_long() -> None:
    lucky = [(900, 950, 1000, 8000) if place in (5, 6) else of for place, of in enumerate(FEW_LONG)]
    found = ask(lucky)
    assert found is None or not {5, 6} & {place for place, (node, _) in enumerate(found.engine_of) if node == 1}


def test_a_larger_engine_gets_no_more_than_it_holds() -> None:
    """One prompt fewer, if three have no room: that is still quicker."""
    found = ask(FEW_LONG, room=(10**9, 2 * 32_000))
    assert found is not None
    first = {place for place, (node, _) in enumerate(found.engine_of) if node == 1}
    assert len(first) == 2 and first < {3, 14, 25}


@pytest.mark.parametrize("change", ["one node", "no history", "few seats", "no room"])
def test_where_there_is_no_plan(change: str) -> None:
    lengths = [(), *FEW_LONG[1:]] if change == "no history" else FEW_LONG
    nodes = 1 if change == "one node" else 2
    # 128 samples have seats on eight engines of 16; without the node that begins otherwise they have none.
    seats = 16 if change == "few seats" else 256
    room = (10**9, 30_000) if change == "no room" else ROOM
    assert ask(lengths, nodes, seats, room) is None
    assert ask([], nodes) is None


def test_equal_prompts_begin_alike() -> None:
    assert first_layouts(2, (LAYOUTS[0], LAYOUTS[0]), [(1000,) * 4] * 32, SAMPLES, 256, ROOM, lambda *_: 0.5) is None


@given(st.lists(st.lists(st.integers(1, 9000), min_size=1, max_size=5), min_size=1, max_size=24), st.integers(2, 4))
def test_a_plan_is_quicker_and_complete(lengths: list[list[int]], nodes: int) -> None:
    asked = [tuple(of_prompt) for of_prompt in lengths]
    found = ask(asked, nodes)
    if found is None:
        return
    assert found.seconds < found.seconds_alike and len(found.engine_of) == len(lengths)
    assert found.layouts[0] == 0 and 1 in found.layouts and len(found.layouts) == nodes
    assert {node for node in range(nodes) if found.layouts[node]} <= {node for node, _ in found.engine_of}
    assert all(0 <= engine < LAYOUTS[found.layouts[node]].engines for node, engine in found.engine_of)
    medians = {True: [], False: []}  # type: dict[bool, list[float]]
    for of_prompt, (node, _) in zip(lengths, found.engine_of, strict=True):
        ordered = sorted(of_prompt)
        middle = len(ordered) // 2
        medians[found.layouts[node] == 1].append((ordered[middle] + ordered[~middle]) / 2)
    assert min(medians[True]) >= max(medians[False], default=0)
    assert ask(asked, nodes) == found


def test_no_number_of_prompts_is_better() -> None:
    """With the longest of the nodes that begin as usual not the first one."""
    nodes, prompts, samples = 4, 60, 8
    by_size = engine_kinds.load(["pat-a40"])
    predictors = [Predictor(StepModel(by_size[size])) for size in (2, 8)]
    layouts = [
        Layout(size, 8 // size, of.step_seconds, seconds_of=of.seconds_of)
        for size, of in zip((2, 8), predictors, strict=True)
    ]
    cost = SwitchCost().between([TransferModel(by_size[size]) for size in (2, 8)])
    shape = dataclasses.replace(PRESETS["pat-deepscaler"], within=0.6)
    lengths = [one.lengths for one in drawn(shape, 1, prompts, samples, 1, 789439).steps[0].prompts]
    found = first_layouts(nodes, layouts, lengths, samples, 256, ROOM, cost)
    step = _Step(layouts, lengths, samples, cost)
    best = min(
        max(step.first(count, 1, large).seconds, step.rest(count, nodes - large).seconds())
        for large in (1, 2, 4)
        if large < nodes
        for count in range(large, prompts)
    )
    assert found is not None and found.seconds <= 1.001 * best
