"""Decisions on which engine gives samples to which, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.scheduling.engine_status import DecodeMean, EngineStatus, SampleStatus, learn
from rhyme_openrlhf.scheduling.reallocation import (
    LEAST_GAIN,
    EngineLoad,
    ReallocationPolicy,
    by_threshold,
    by_throughput,
    throughput_by_samples,
)
from tests.latency import formula

FREE = 10**9


def load(engine: int, samples: int, free: int = FREE, contexts: list[int] | None = None) -> EngineLoad:
    contexts = contexts or [100] * samples
    return EngineLoad(engine, tuple((c, 0.0, engine * 1000 + i) for i, c in enumerate(contexts)), free)


@pytest.mark.parametrize("threshold", [6, 19])
def test_the_papers_example(threshold: int) -> None:
    """RLHFSpec, figure 5: 24 and 1 become 19 and 6. Both thresholds for which five samples move."""
    (move,) = by_threshold([load(1, 24), load(2, 1)], threshold)
    assert (move.source, move.destination, len(move.samples)) == (1, 2, 5)


def test_shorter_contexts_go_first_then_fewer_accepted_tokens() -> None:
    running = tuple((c, a, i) for i, (c, a) in enumerate([(300, 1.0), (100, 2.0), (100, 1.0), (200, 0.0)]))
    (move,) = by_threshold([EngineLoad(0, running, FREE), load(1, 0)], 1)
    assert move.samples == (2,)
    (move,) = by_threshold([EngineLoad(0, running, FREE), load(1, 0)], 2)
    assert move.samples == (2, 1)


def test_a_sample_that_cannot_be_moved_takes_no_others_place() -> None:
    running = ((10, 0.0, -1), (20, 0.0, -2), (100, 0.0, 7), (90, 0.0, 8))
    (move,) = by_threshold([EngineLoad(0, running, FREE), load(1, 0)], 2)
    assert move.samples == (8, 7)
    assert by_threshold([EngineLoad(0, running[:2], FREE), load(1, 0)], 1) == []


def printed(samples: int) -> float:
    """Tokens/s at 1, 6, 19 and 24 samples (RLHFSpec 3.3), straight between them."""
    points = [(0, 0.0), (1, 103.0), (6, 765.0), (19, 1415.0), (24, 1453.0)]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= samples <= x1:
            return y0 + (y1 - y0) * (samples - x0) / (x1 - x0)
    raise AssertionError(samples)


def curve(throughput: Callable[[int], float], most: int) -> np.ndarray:
    return np.array([throughput(count) for count in range(most + 1)])


def test_the_papers_example_by_throughput() -> None:
    """Of 24 and 1 samples at least the paper's five move: 1,556 tokens/s become more than 2,180."""
    (move,) = by_throughput([load(1, 24), load(2, 1)], curve(printed, 24))
    after = printed(24 - len(move.samples)) + printed(1 + len(move.samples))
    assert (move.source, move.destination) == (1, 2) and len(move.samples) >= 5 and after >= 2180


steps = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30)


@given(st.lists(st.integers(0, 40), max_size=7), steps)
def test_each_pair_gains_and_keeps_its_order(counts: list[int], rises: list[float]) -> None:
    throughput = np.concatenate([[0.0], np.cumsum(rises)])
    loads = [load(engine, count) for engine, count in enumerate(counts)]
    moves = by_throughput(loads, throughput)

    def speed(count: int) -> float:
        return float(throughput[min(count, len(throughput) - 1)])

    for move in moves:
        many, few, moved = counts[move.source], counts[move.destination], len(move.samples)
        assert set(move.samples) <= {sample for _, _, sample in loads[move.source].running}
        assert many - moved >= few + moved
        before, after = speed(many) + speed(few), speed(many - moved) + speed(few + moved)
        assert after >= (1 + LEAST_GAIN) * before
        best = max(speed(many - other) + speed(few + other) for other in range((many - few) // 2 + 1))
        assert after - before >= 0.95 * (best - before) - 1e-6
    taking_part = [engine for move in moves for engine in (move.source, move.destination)]
    assert len(set(taking_part)) == len(taking_part)


def test_by_throughput_too_a_destination_gets_no_more_than_it_has_room_for() -> None:
    (move,) = by_throughput([load(0, 20), load(1, 0, free=250)], curve(printed, 24))
    assert len(move.samples) == 2
    (move,) = by_throughput([load(0, 20), load(1, 0)._replace(free_seats=3)], curve(printed, 24))
    assert len(move.samples) == 3


@pytest.mark.parametrize(("context", "tokens", "drafts"), [(700.0, 1.0, 0.0), (3100.4, 2.37, 6.125), (64.5, 1.5, 31.0)])
def test_throughput_of_a_profile_is_that_of_its_steps_one_by_one(context: float, tokens: float, drafts: float) -> None:
    predictor = Predictor(StepModel(formula.profile()))

    def throughput(count: int) -> float:
        if not count:
            return 0.0
        return count * tokens / predictor.step_seconds(count, round(count * context), round(count * drafts))

    for _ in range(2):
        found = throughput_by_samples(predictor.seconds_of, context, tokens, drafts, 96)
        assert found == pytest.approx(curve(throughput, 96))
        predictor.observe(16, 4096, 0, 0.02)


def status(engine: int, samples: int, **changed: object) -> EngineStatus:
    there = tuple(SampleStatus(f"{engine * 100 + i}.0", 100) for i in range(samples))
    fields = {
        "free_tokens": 10**6, "free_seats": 64, "weight_version": 3, "open": True, "decode_steps": 1000,
        "step_tokens": 2048,
    }  # fmt: skip
    return EngineStatus(engine, there, **{**fields, **changed})  # type: ignore[arg-type]


def numbers(*statuses: EngineStatus) -> dict[str, int]:
    return {sample.place: int(sample.place.split(".")[0]) for one in statuses for sample in one.samples}


def roofline(corner: int, slope_s: float = 0.001) -> Predictor:
    """Steps of 10 ms up to `corner` samples, from there as long as the samples are many."""
    points = [
        StepPoint(n, context, 0, 0.01 + max(n - corner, 0) * 0.01 / corner, 0.0, 9)
        for n in (1, corner, 2 * corner, 4 * corner)
        for context in (0, 100_000)
    ]
    return Predictor(StepModel(Profile(Subject("m", "h", "float32", 1), "derived", tuple(points))))


def test_the_model_decides_unless_a_threshold_was_given() -> None:
    full, empty = status(0, 24), status(1, 1)
    policy = ReallocationPolicy(0, 1)
    assert policy.decide([full, empty], numbers(full, empty)) == []
    policy = ReallocationPolicy(0, 1)
    policy.predictor = roofline(6)
    (order,) = policy.decide([full, empty], numbers(full, empty))
    # Throughput is level from six samples on: five more make the emptier engine as fast as it can be.
    assert (order.source, order.destination, len(order.samples)) == (0, 1, 5)
    (order,) = ReallocationPolicy(19, 1).decide([full, empty], numbers(full, empty))
    assert len(order.samples) == 5
    (order,) = ReallocationPolicy(12, 1).decide([full, empty], numbers(full, empty))
    assert len(order.samples) == 11


def test_decisions_follow_what_steps_really_take() -> None:
    """Steps of many samples turn out slower than profiled: then more of them are better elsewhere."""
    policy = ReallocationPolicy(0, 1)
    policy.predictor = roofline(64)
    full, empty = status(0, 30), status(1, 4)
    # As profiled, throughput rises up to 64 samples: nothing is gained.
    assert policy.decide([full, empty], numbers(full, empty)) == []
    for _ in range(60):
        for mean in (DecodeMean(20, 2000, 0, 0.045), DecodeMean(1, 1, 0, 0.01)):
            learn(policy.predictor, status(0, 30, decode=mean))
    later = status(0, 30, decode_steps=2000)
    assert policy.decide([later, empty], numbers(later, empty))


def test_engines_that_load_weights_or_have_others_are_left_alone() -> None:
    full = status(0, 24)
    for other in (status(1, 1, open=False), status(1, 1, weight_version=4)):
        assert ReallocationPolicy(6, 1).decide([full, other], numbers(full, other)) == []


def test_no_more_goes_than_there_are_seats_and_nothing_that_is_moving() -> None:
    full, empty = status(0, 24), status(1, 1, free_seats=2)
    (order,) = ReallocationPolicy(6, 1).decide([full, empty], numbers(full, empty))
    assert len(order.samples) == 2
    assert ReallocationPolicy(6, 1).decide([full, empty], {}) == []


def test_decisions_are_a_cooldown_of_decode_steps_apart() -> None:
    policy = ReallocationPolicy(6, 32)
    full, empty = status(0, 24), status(1, 1)
    assert policy.decide([full, empty], numbers(full, empty))
    soon = status(0, 24, decode_steps=1031)
    assert policy.decide([soon, empty], numbers(soon, empty)) == []
    later = status(0, 24, decode_steps=1032)
    assert policy.decide([later, empty], numbers(later, empty))
    with pytest.raises(ValueError, match="at least one step"):
        ReallocationPolicy(6, 0)
