"""The event-skipping engine against the token-by-token one, and what it must conserve."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.simulation.engine import Engine, Job, KvCacheTooSmall, Pace
from tests.simulation import kinds, reference

work = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 400)), min_size=1, max_size=12)


def plain(running: int, context: float, drafts: float) -> Pace:
    return Pace(round(drafts), 1.0)


def drained(engine: Engine) -> dict[int, float]:
    ended = {}
    while engine.next_change() < math.inf:
        for job in engine.change():
            assert job.sample not in ended
            ended[job.sample] = engine.now
    assert engine.idle
    return ended


@settings(deadline=None)
@given(work, st.integers(1, 8), st.integers(701, 3000), st.integers(16, 600))
def test_exact_against_token_by_token(
    lengths: list[tuple[int, int]], most_running: int, kv_tokens: int, step_tokens: int
) -> None:
    kind = kinds.kind(kv_tokens, most_running, step_tokens)
    engine = Engine(kind, plain)
    engine.give(kinds.jobs(lengths), 0.0)
    ended = drained(engine)
    wanted, seconds, preemptions = reference.run(kind, kinds.jobs(lengths))
    assert engine.now == pytest.approx(seconds, rel=1e-9)
    assert engine.counts.preemptions == preemptions
    assert ended == {sample: pytest.approx(at, rel=1e-9) for sample, at in wanted.items()}
    assert engine.counts.tokens == pytest.approx(sum(length for _, length in lengths))
    assert engine.counts.busy_seconds == pytest.approx(engine.now)


@settings(deadline=None)
@given(work, st.lists(st.floats(0.001, 0.3), max_size=30))
def test_looking_at_an_engine_changes_nothing(lengths: list[tuple[int, int]], pauses: list[float]) -> None:
    """`run_until` between the changes gives the same ends, and never passes the step that is going on."""
    kind = kinds.kind(1500, 6, 64)
    straight, stopped = Engine(kind, plain), Engine(kind, plain)
    for engine in (straight, stopped):
        engine.give(kinds.jobs(lengths), 0.0)
    wanted = drained(straight)
    ended: dict[int, float] = {}
    at = 0.0
    for pause in pauses:
        at += pause
        while stopped.next_change() <= at:
            ended |= {job.sample: stopped.now for job in stopped.change()}
        ended |= {job.sample: stopped.now for job in stopped.run_until(at)}
        assert stopped.idle or at <= stopped.now <= at + 0.1
    ended |= drained(stopped)
    assert ended == {sample: pytest.approx(time, rel=1e-9) for sample, time in wanted.items()}


@settings(deadline=None)
@given(work, st.lists(st.floats(0.001, 0.3), min_size=1, max_size=30))
def test_what_an_engine_says_of_all_samples_is_what_it_says_of_each(
    lengths: list[tuple[int, int]], pauses: list[float]
) -> None:
    engine = Engine(kinds.kind(1500, 6, 64), plain)
    engine.give(kinds.jobs(lengths), 0.0)
    at = 0.0
    for pause in pauses:
        at += pause
        while engine.next_change() <= at:
            engine.change()
        foreseen = engine.contexts_at(at)
        engine.run_until(at)
        items = engine.running.items()
        assert engine.prompts_at_work() == [
            (item.job.prompt, item.job.prompt_tokens, engine.generated(sample)) for sample, item in items
        ]
        by_one = [
            (round(item.job.prompt_tokens + engine.generated(sample)), item.job.tokens_per_step - 1, sample)
            for sample, item in items
        ]
        # The step may have been the last one of some, or the last before others.
        known = {sample for _, _, sample in foreseen}
        assert [row for row in foreseen if row[2] in engine.running] == [row for row in by_one if row[2] in known]


@settings(deadline=None)
@given(work, st.integers(0, 2**32), st.booleans())
def test_moves_lose_and_double_nothing(lengths: list[tuple[int, int]], seed: int, sent: bool) -> None:
    """Samples wander between two engines, their KV cache sent or computed again."""
    draw = random.Random(seed)
    engines = [Engine(kinds.kind(3000, 8, 128), plain) for _ in range(2)]
    engines[0].give(kinds.jobs(lengths), 0.0)
    ended: list[int] = []
    at = 0.0
    while not all(engine.idle for engine in engines):
        at += 0.2
        for engine in engines:
            while engine.next_change() <= at:
                ended += [job.sample for job in engine.change()]
            ended += [job.sample for job in engine.run_until(at)]
        source, target = draw.sample(engines, 2)
        if source.running:
            moved = source.take({draw.choice(sorted(source.running))})
            fits = moved[0].context <= target.free_tokens and target.load < 8
            for job in moved:
                job.computed = sent and fits
            target.give(moved, source.now)
    assert sorted(ended) == list(range(len(lengths)))
    assert sum(e.counts.tokens for e in engines) == pytest.approx(sum(length for _, length in lengths))


def test_speculation_takes_fewer_steps_for_the_same_tokens() -> None:
    engine = Engine(kinds.kind(), plain)
    engine.give([Job(i, i, 10, 300, tokens_per_step=3.0, drafts_per_step=4.0) for i in range(4)], 0.0)
    drained(engine)
    assert engine.counts.steps == 100 and engine.counts.drafts == 1600 and engine.counts.tokens == 1200


def test_a_pace_of_half_takes_twice_the_steps() -> None:
    engine = Engine(kinds.kind(), lambda running, context, drafts: Pace(0, 0.5))
    engine.give([Job(0, 0, 10, 300)], 0.0)
    drained(engine)
    assert engine.counts.steps == 600


def test_what_never_fits_is_said() -> None:
    engine = Engine(kinds.kind(kv_tokens=100), plain)
    engine.give([Job(0, 0, 50, 100)], 0.0)
    with pytest.raises(KvCacheTooSmall, match="outgrows a KV cache of 100 tokens"):
        drained(engine)
    engine = Engine(kinds.kind(kv_tokens=100), plain)
    engine.give([Job(0, 0, 150, 100)], 0.0)
    with pytest.raises(KvCacheTooSmall, match="does not fit"):
        drained(engine)


def test_waiting_samples_can_be_taken() -> None:
    engine = Engine(kinds.kind(most_running=2), plain)
    engine.give(kinds.jobs([(50, 100)] * 5, 1), 0.0)
    engine.change()
    assert sorted(engine.running) == [0, 1] and [job.sample for job in engine.waiting] == [2, 3, 4]
    taken = engine.take({1, 3, 4})
    assert [job.sample for job in taken] == [1, 3, 4] and [job.computed for job in taken] == [True, False, False]
    assert engine.load == 2 and sorted(drained(engine)) == [0, 2]
