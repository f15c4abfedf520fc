"""Decisions on which engine gives samples to which, and when."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.scheduling.engine_status import DecodeMean, EngineStatus, SampleStatus, learn
from rhyme_openrlhf.scheduling.reallocation import (
    Cooldown,
    EngineLoad,
    ReallocationPolicy,
    knee,
    reallocate,
    speculative_knee,
)
from tests.latency import formula

FREE = 10**9


def load(engine: int, samples: int, free: int = FREE, contexts: list[int] | None = None) -> EngineLoad:
    contexts = contexts or [100] * samples
    return EngineLoad(engine, tuple((c, 0.0, engine * 1000 + i) for i, c in enumerate(contexts)), free)


def most_moved(counts: list[int], threshold: int) -> int:
    """Equation 6's best value, by trying every pairing."""
    over = [count - threshold for count in counts if count > threshold]
    under = [threshold - count for count in counts if count < threshold]
    small, large = sorted((over, under), key=len)
    return max(
        (sum(map(min, small, chosen)) for chosen in itertools.permutations(large, len(small))),
        default=0,
    )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 25))
def test_the_objective_is_reached_within_the_constraints(counts: list[int], threshold: int) -> None:
    loads = [load(engine, count) for engine, count in enumerate(counts)]
    moves = reallocate(loads, threshold)
    after = list(counts)
    for move in moves:
        assert set(move.samples) <= {sample for _, _, sample in loads[move.source].running}
        after[move.source] -= len(move.samples)
        after[move.destination] += len(move.samples)
        assert after[move.source] >= threshold and after[move.destination] <= threshold
    taking_part = [engine for move in moves for engine in (move.source, move.destination)]
    assert len(set(taking_part)) == len(taking_part)
    assert sum(len(move.samples) for move in moves) == most_moved(counts, threshold)


@pytest.mark.parametrize("threshold", [6, 19])
def test_the_papers_example(threshold: int) -> None:
    """RLHFSpec, figure 5: 24 and 1 become 19 and 6. Both thresholds for which five samples move."""
    (move,) = reallocate([load(1, 24), load(2, 1)], threshold)
    assert (move.source, move.destination, len(move.samples)) == (1, 2, 5)


def test_shorter_contexts_go_first_then_fewer_accepted_tokens() -> None:
    running = tuple((c, a, i) for i, (c, a) in enumerate([(300, 1.0), (100, 2.0), (100, 1.0), (200, 0.0)]))
    (move,) = reallocate([EngineLoad(0, running, FREE), load(1, 0)], 1)
    assert move.samples == (2,)
    (move,) = reallocate([EngineLoad(0, running, FREE), load(1, 0)], 2)
    assert move.samples == (2, 1)


def test_a_destination_gets_no_more_than_it_has_room_for() -> None:
    (move,) = reallocate([load(0, 6, contexts=[50, 60, 70, 80, 90, 100]), load(1, 0, free=120)], 3)
    assert move.samples == (0, 1)
    assert reallocate([load(0, 6), load(1, 0, free=10)], 3) == []


def test_the_knee_of_a_roofline_is_its_corner() -> None:
    assert knee(lambda n: min(n, 12) * 80.0, 64) == 12
    assert knee(lambda n: n / (0.01 + 0.0 * n), 64) == 64
    # Steps of 10 ms + 1 ms a sample: the gain of one more has halved after 4 (0.41 * 10).
    assert knee(lambda n: n / (0.010 + 0.001 * n), 64) in (4, 5)


def test_a_staircase_has_its_knee_where_its_outline_has() -> None:
    """Rows are padded to 8: within a stair a sample is free, at its edge one costs; level from 32 on."""

    def throughput(samples: int) -> float:
        rows = -(-samples // 8) * 8
        return samples / max(1.0, rows / 32)

    assert knee(throughput, 64) == 32


def test_the_papers_measured_throughput_has_its_knee_at_one_of_the_two_thresholds() -> None:
    """Tokens/s at 1, 6, 19 and 24 samples (RLHFSpec 3.3), straight between them."""
    points = [(0, 0.0), (1, 103.0), (6, 765.0), (19, 1415.0), (24, 1453.0)]

    def throughput(samples: int) -> float:
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if x0 <= samples <= x1:
                return y0 + (y1 - y0) * (samples - x0) / (x1 - x0)
        raise AssertionError(samples)

    assert knee(throughput, 24) in (6, 19)


@pytest.mark.parametrize(("context", "tokens", "drafts"), [(700.0, 1.0, 0.0), (3100.4, 2.37, 6.125), (64.5, 1.5, 31.0)])
def test_the_knee_of_a_profile_is_that_of_its_steps_one_by_one(context: float, tokens: float, drafts: float) -> None:
    predictor = Predictor(StepModel(formula.profile()))

    def throughput(count: int) -> float:
        return count * tokens / predictor.step_seconds(count, round(count * context), round(count * drafts))

    for _ in range(2):
        assert speculative_knee(predictor.seconds_of, context, tokens, drafts, 96) == knee(throughput, 96)
        predictor.observe(16, 4096, 0, 0.02)


def test_decisions_are_a_cooldown_apart() -> None:
    cooldown = Cooldown(10)
    assert [step for step in range(35) if cooldown.due(step)] == [0, 10, 20, 30]
    with pytest.raises(ValueError, match="at least one step"):
        Cooldown(0)


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


def test_the_threshold_is_the_knee_or_what_was_given() -> None:
    full, empty = status(0, 24), status(1, 1)
    policy = ReallocationPolicy(0, 1)
    assert policy.decide([full, empty], numbers(full, empty)) == []
    policy = ReallocationPolicy(0, 1)
    policy.predictor = roofline(6)
    (order,) = policy.decide([full, empty], numbers(full, empty))
    assert (policy.threshold, order.source, order.destination, len(order.samples)) == (6, 0, 1, 5)
    (order,) = (given := ReallocationPolicy(19, 1)).decide([full, empty], numbers(full, empty))
    assert (given.threshold, len(order.samples)) == (19, 5)


def test_the_threshold_follows_what_steps_really_take() -> None:
    """Steps of many samples turn out slower than profiled: fewer of them are worth it."""
    policy = ReallocationPolicy(0, 1)
    policy.predictor = roofline(16)
    full, empty = status(0, 30), status(1, 1)
    policy.decide([full, empty], numbers(full, empty))
    before = policy.threshold
    for _ in range(60):
        for mean in (DecodeMean(20, 2000, 0, 0.045), DecodeMean(1, 1, 0, 0.01)):
            learn(policy.predictor, status(0, 30, decode=mean))
    later = status(0, 30, decode_steps=2000)
    policy.decide([later, empty], numbers(later, empty))
    assert before == 16 and policy.threshold < before


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


@given(st.lists(st.integers(0, 30), min_size=2, max_size=5), st.integers(1, 20))
def test_what_is_ordered_keeps_both_ends_at_the_threshold(counts: list[int], threshold: int) -> None:
    statuses = [status(engine, count) for engine, count in enumerate(counts)]
    after = list(counts)
    for order in ReallocationPolicy(threshold, 1).decide(statuses, numbers(*statuses)):
        after[order.source] -= len(order.samples)
        after[order.destination] += len(order.samples)
        assert after[order.source] >= threshold >= after[order.destination]
    assert sum(after) == sum(counts)
