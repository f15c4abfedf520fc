"""What is decided on engines' reports: which of them count, and where the threshold comes from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.scheduling.engine_status import DecodeMean, EngineStatus, SampleStatus, learn
from rhyme_openrlhf.scheduling.reallocation_policy import ReallocationPolicy


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
