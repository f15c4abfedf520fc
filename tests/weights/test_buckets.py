"""Cutting a model's weights into buckets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.weights.buckets import ALIGNMENT, Parameter, Segment, aligned, place, plan_buckets

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=60)


def parameters(nbytes: list[int]) -> list[Parameter]:
    return [Parameter(f"p{i}", (n,), "uint8", n) for i, n in enumerate(nbytes)]


@given(sizes, st.integers(1, 8000), st.integers(1, 9))
def test_every_parameter_is_in_exactly_one_bucket_and_none_overlap(
    nbytes: list[int], bucket_bytes: int, ranks: int
) -> None:
    buckets = plan_buckets(parameters(nbytes), bucket_bytes, ranks)
    names = [entry.parameter.name for bucket in buckets for entry in bucket.entries]
    assert names == [f"p{i}" for i in range(len(nbytes))]
    for bucket in buckets:
        assert 0 <= bucket.rank < ranks
        assert bucket.nbytes <= bucket_bytes or len(bucket.entries) == 1
        free = 0
        for entry in bucket.entries:
            assert entry.offset % ALIGNMENT == 0 and entry.offset >= free
            free = entry.offset + entry.parameter.nbytes
        assert free <= bucket.nbytes


@given(sizes, st.integers(64, 2000), st.integers(1, 9))
def test_ranks_carry_nearly_equal_loads(nbytes: list[int], bucket_bytes: int, ranks: int) -> None:
    buckets = plan_buckets(parameters(nbytes), bucket_bytes, ranks)
    loads = [sum(b.nbytes for b in buckets if b.rank == rank) for rank in range(ranks)]
    # A rank gets a bucket only when no other has less: it can be ahead by one bucket at most.
    assert max(loads) - min(loads) <= max(b.nbytes for b in buckets)


def test_a_segment_survives_its_plain_form() -> None:
    segment = Segment(4, "/dev/shm/x", (("a", "/dev/shm/y"),))
    assert Segment.from_plain(segment.to_plain()) == segment


def test_parameters_are_placed_one_after_the_other() -> None:
    assert place(parameters([10, 100, 1]), start=128)[1] == 128 + aligned(10) + aligned(100) + aligned(1)


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        plan_buckets([Parameter("a", (1,), "uint8", 1)] * 2, 10, 1)
    with pytest.raises(ValueError, match="at least one rank"):
        plan_buckets(parameters([1]), 10, 0)
