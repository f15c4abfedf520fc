"""Counters add up, and every figure has the architecture page's definition."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.telemetry import metrics
from rhyme_openrlhf.telemetry.events import EngineInterval
from rhyme_openrlhf.telemetry.metrics import COUNTER_NAMES, CountersError, EngineCounters

counts = st.integers(0, 10**9)
# Multiples of 1/8 below 2**20 add without rounding, so that the algebra is exact.
seconds = st.integers(0, 2**20).map(lambda eighths: eighths / 8)
counters = st.builds(EngineCounters, **{name: seconds if name == "busy_seconds" else counts for name in COUNTER_NAMES})


@given(counters, counters, counters)
def test_counters_form_a_commutative_group(a: EngineCounters, b: EngineCounters, c: EngineCounters) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + EngineCounters() == a
    assert (a + b) - b == a


@given(counters)
def test_counters_survive_their_dictionary(a: EngineCounters) -> None:
    assert EngineCounters.from_dict(a.to_dict()) == a
    assert EngineCounters.from_dict(a.to_dict() | {"counter_of_a_newer_writer": 1}) == a


@pytest.mark.parametrize("value", ["1", None, True, 1.5])
def test_a_count_must_be_an_integer(value: object) -> None:
    with pytest.raises(CountersError, match="drafted") as caught:
        EngineCounters.from_dict(EngineCounters().to_dict() | {"drafted": value})
    assert caught.value.field == "drafted"


@pytest.mark.parametrize("value", ["1", None, True, float("nan"), float("inf"), 10**400])
def test_busy_seconds_must_be_a_finite_number(value: object) -> None:
    with pytest.raises(CountersError, match="busy_seconds"):
        EngineCounters.from_dict(EngineCounters().to_dict() | {"busy_seconds": value})


def test_a_missing_counter_is_named() -> None:
    values = EngineCounters().to_dict()
    del values["sample_steps"]
    with pytest.raises(CountersError, match="'sample_steps' is missing"):
        EngineCounters.from_dict(values)


def test_figures_of_a_small_example() -> None:
    # Two samples, three decode steps, the second sample done after two: 5 sample steps. Each sample's first token came
    # from its prefill. Of 8 draft tokens 3 were accepted, so the decode steps emitted 5 + 3 tokens.
    example = EngineCounters(
        response_tokens=10,
        decode_tokens=8,
        decode_steps=3,
        sample_steps=5,
        prompt_tokens=40,
        drafts=4,
        drafted=8,
        accepted=3,
        busy_seconds=0.06,
        finished_samples=2,
    )
    assert metrics.speculation_rate(example) == 3 / 10
    assert metrics.acceptance_rate(example) == 3 / 8
    assert metrics.tokens_per_step(example) == 8 / 5
    assert metrics.decode_step_ms(example) == pytest.approx(20.0)
    assert metrics.tokens_per_second(10, 0.5) == 20.0


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_without_speculation_tokens_per_step_is_one(lengths: list[int]) -> None:
    # A sample of n tokens takes its prefill and n - 1 decode steps, each of which gives it one token.
    decoded = sum(lengths) - len(lengths)
    plain = EngineCounters(response_tokens=sum(lengths), decode_tokens=decoded, sample_steps=decoded)
    assert metrics.tokens_per_step(plain) == (1.0 if decoded else None)
    assert metrics.speculation_rate(plain) == 0.0
    assert metrics.acceptance_rate(plain) is None


def test_figures_of_nothing_do_not_exist() -> None:
    nothing = EngineCounters()
    assert metrics.speculation_rate(nothing) is None
    assert metrics.acceptance_rate(nothing) is None
    assert metrics.tokens_per_step(nothing) is None
    assert metrics.decode_step_ms(nothing) is None
    assert metrics.tokens_per_second(0, 0.0) is None
    assert metrics.bubble_fraction([], 0, 1.0) is None
    assert metrics.bubble_fraction([], 2, 0.0) is None


def test_bubbles_are_all_time_in_which_an_engine_runs_nothing() -> None:
    intervals = [
        EngineInterval(engine=0, state="sync", start=0.0, end=1.0, step=1),
        EngineInterval(engine=0, state="generate", start=1.0, end=8.0, step=1),
        EngineInterval(engine=0, state="idle", start=8.0, end=10.0, step=1, cause="tail"),
        EngineInterval(engine=1, state="idle", start=0.0, end=0.5, step=1, cause="weights"),
        EngineInterval(engine=1, state="generate", start=0.5, end=9.0, step=1),
        EngineInterval(engine=1, state="switch", start=9.0, end=9.25, step=1),
        EngineInterval(engine=1, state="idle", start=9.25, end=9.5, step=1),
        EngineInterval(engine=1, state="idle", start=9.5, end=10.0, step=1, cause="tail"),
    ]
    assert metrics.bubble_seconds(intervals) == {
        "sync": 1.0,
        "tail": 2.5,
        "weights": 0.5,
        "switch": 0.25,
        metrics.UNEXPLAINED: 0.25,
    }
    assert metrics.bubble_fraction(intervals, engines=2, rollout_seconds=10.0) == 4.5 / 20


def test_engines_that_always_generate_have_no_bubbles() -> None:
    intervals = [EngineInterval(engine=0, state="generate", start=0.0, end=3.0, step=1)]
    assert metrics.bubble_fraction(intervals, engines=1, rollout_seconds=3.0) == 0.0


def test_the_sources_shares_add_up_to_the_speculation_rate() -> None:
    counters = EngineCounters(
        response_tokens=100, accepted=60, accepted_siblings=10, accepted_own=20, accepted_shared=5
    )
    parts = (metrics.history_share, metrics.siblings_share, metrics.own_share, metrics.shared_share)
    assert [part(counters) for part in parts] == [0.25, 0.1, 0.2, 0.05]
    assert metrics.own_share(EngineCounters()) is None


def test_counters_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineCounters().accepted = 1  # type: ignore[misc]
