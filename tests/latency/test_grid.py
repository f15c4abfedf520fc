"""The points to measure fit into the engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.grid import Limits, prefill_shapes, step_shapes

limits = st.builds(
    Limits,
    running=st.integers(1, 1024),
    length=st.integers(256, 131_072),
    kv_cache_tokens=st.integers(1000, 1 << 21),
    step_tokens=st.integers(512, 16_384),
    drafts_each=st.integers(0, 128),
    verified_rows=st.none() | st.integers(2, 2048),
)


@given(limits, st.integers(5, 60))
def test_every_point_fits_to_its_last_step(room: Limits, steps: int) -> None:
    shapes = step_shapes(room, steps)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        longest = shape.context_each + steps * (1 + shape.drafts_each)
        assert longest < room.length
        assert shape.running * longest < room.kv_cache_tokens
        assert shape.running * (1 + shape.drafts_each) < room.step_tokens
        assert shape.running <= room.running
        assert shape.drafts_each <= room.drafts_each
        rows = shape.running * (1 + shape.drafts_each)
        assert not shape.drafts_each or room.verified_rows is None or rows <= room.verified_rows


@given(limits)
def test_every_prefill_fits(room: Limits) -> None:
    for shape in prefill_shapes(room):
        assert shape.length < room.length
        assert shape.sequences * shape.length < room.kv_cache_tokens


def test_what_fills_the_kv_cache_exactly_is_measured() -> None:
    """One token is generated beside each prefill."""
    (shape,) = [shape for shape in prefill_shapes(Limits(1, 4096, 129, 2048, 0)) if shape.length == 128]
    assert shape.sequences == 1
    assert all(shape.length < 128 for shape in prefill_shapes(Limits(1, 4096, 128, 2048, 0)))


def test_each_number_of_samples_has_a_plain_step_and_short_contexts_are_denser() -> None:
    shapes = step_shapes(Limits(64, 8192, 100_000, 2048, 32), 12)
    for running in (1, 2, 4, 8, 16, 32, 64):
        plain = [shape.context_each for shape in shapes if shape.running == running and not shape.drafts_each]
        assert plain and sum(context < 512 for context in plain) >= min(3, len(plain))


def test_what_a_drafter_proposes_for_every_sample_is_measured() -> None:
    for tokens, measured in ((4, {0, 1, 4}), (8, {0, 1, 3, 8}), (12, {0, 1, 3, 7, 12}), (32, {0, 1, 3, 7, 15, 31})):
        assert {shape.drafts_each for shape in step_shapes(Limits(8, 8192, 100_000, 2048, tokens), 12)} == measured
