"""Layouts over the same devices: which can be, and which engines are theirs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.layouts import LayoutError, LayoutPlan, Model, Tail, check_nodes, plan_layouts

MODEL = Model(heads=8, kv_heads=2, weight_bytes=0)


def test_the_tail_covers_the_same_devices() -> None:
    assert plan_layouts(2, 1, [2], MODEL) == LayoutPlan(2, 1, (Tail(1, 2),))
    plan = plan_layouts(8, 2, [8], MODEL)
    assert (plan.tails, plan.devices) == ((Tail(2, 8),), 16)
    assert plan.layouts() == {**dict.fromkeys(range(8), 0), 8: 1, 9: 1}


def test_several_tails_have_the_next_numbers_smaller_ones_first() -> None:
    plan = plan_layouts(8, 1, [8, 2, 4], MODEL)
    assert plan.sizes == (1, 2, 4, 8)
    assert [list(plan.numbers(layout)) for layout in range(4)] == [[*range(8)], [8, 9, 10, 11], [12, 13], [14]]


@given(st.integers(0, 3), st.sets(st.sampled_from([2, 4, 8])), st.integers(1, 4))
def test_every_layout_covers_every_device_once(size: int, more: set[int], engines: int) -> None:
    sizes = {2**size * factor for factor in more} - {2**size}
    model = Model(heads=64, kv_heads=64, weight_bytes=0)
    plan = plan_layouts(8 * engines, 2**size, sorted(sizes), model)
    layouts = plan.layouts()
    assert sorted(layouts) == list(range(len(layouts)))
    for layout, of in enumerate(plan.sizes):
        assert sum(found == layout for found in layouts.values()) * of == plan.devices


@pytest.mark.parametrize(
    ("engines", "size", "tail", "says"),
    [
        (1, 1, 2, "needs two devices"),
        (2, 2, 2, "is no more tensor parallelism than"),
        (3, 1, 2, "does not divide the 3 devices of 3 engines"),
        (3, 1, 3, "does not divide the model's 8 attention heads; possible: 2, 4, 8"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(engines: int, size: int, tail: int, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        plan_layouts(engines, size, [tail], MODEL)
    with pytest.raises(LayoutError, match="3 key-value heads in no way"):
        plan_layouts(2, 1, [2], Model(6, 3, 0))


def test_an_engine_is_on_one_node() -> None:
    check_nodes(["a", "a", "b", "b"], (1, 2))
    with pytest.raises(LayoutError, match="--tp_switch.size 4: .* engines of 4 on one node each .2 on one, 2 on one"):
        check_nodes(["a", "a", "b", "b"], (1, 2, 4))
    with pytest.raises(LayoutError, match="--tp_switch.size 2"):
        check_nodes(["a", "a", "a", "b"], (1, 2))
