"""The engines of all layouts, and what they take of the memory."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.layouts import (
    MB,
    PROCESS_MB,
    Asked,
    LayoutError,
    LayoutPlan,
    Model,
    Offer,
    Tail,
    check_nodes,
    memory_sentence,
    plan_layouts,
    plan_memory,
    with_caches,
)
from rhyme_openrlhf.settings.tp_switch import TOGETHER, TURNS

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


SMALL = Model(heads=8, kv_heads=2, weight_bytes=800 * MB)
LARGE = Model(heads=32, kv_heads=8, weight_bytes=16_000 * MB, longest_bytes=4000 * MB)
GB = 1024


def machine(free_mb: int) -> Offer:
    return Offer(free_mb * MB, f"{4 * free_mb:,} MB are free", "--cpu.kv_cache_mb")


def gpu(free_mb: int) -> Offer:
    return Offer(free_mb * MB, f"{free_mb:,} MB are for engines", "--tp_switch.aligned_kv_cache_mb", 4096, "raise it")


def test_memory_is_planned_for_each_device() -> None:
    shape = plan_layouts(4, 1, [4], SMALL)
    assert with_caches(shape, SMALL, Asked(100, 30), machine(4000)).tails == (Tail(1, 4, 30),)
    # Two KV heads on four ranks: each holds one, half of a token and not a quarter.
    plan = with_caches(shape, SMALL, Asked(100), machine(3500))
    assert plan == LayoutPlan(4, 1, (Tail(1, 4, 50),), 100)
    memory = plan_memory(plan, SMALL, machine(3500))
    assert [(share.weights, share.kv_cache) for share in memory.shares] == [(800 * MB, 100 * MB), (200 * MB, 50 * MB)]
    # A KV cache of nothing is none.
    assert with_caches(shape, SMALL, Asked(20), machine(3500)).tails[0].kv_mb == 16
    # Four actors with their cores, and one actor and core with four workers.
    assert sum(share.reserve for share in memory.shares) == 14 * PROCESS_MB * MB // 4
    assert memory.total == 3250 * MB
    said = memory_sentence(plan, SMALL, machine(3500))
    assert "4 engines of tensor parallelism 1 with 800 MB of weights and 100 MB of KV cache on each device" in said
    assert "1 of 4 with 200 MB and 50 MB, and 2,100 MB on each for their processes: 13,000 MB on 4 devices" in said
    assert said.endswith("14,000 MB are free")


def test_caches_that_do_not_fit_together_take_turns() -> None:
    shape = plan_layouts(4, 1, [4], SMALL)
    plan = with_caches(shape, SMALL, Asked(100), machine(3225))
    assert not plan.both_awake and plan.kv_sizes == (100, 50)
    assert plan_memory(plan, SMALL, machine(3225)).total == 3200 * MB
    assert memory_sentence(plan, SMALL, machine(3225)).endswith("only the layout that runs has its KV cache")
    assert not with_caches(shape, SMALL, Asked(100, caches=TURNS), machine(9000)).both_awake


def test_what_does_not_fit_is_refused_with_the_flag() -> None:
    shape = plan_layouts(4, 1, [4], SMALL)
    with pytest.raises(LayoutError, match="lower --cpu.kv_cache_mb and --tp_switch.kv_cache_mb to at most 50 MB each"):
        with_caches(shape, SMALL, Asked(100), machine(3150))
    with pytest.raises(LayoutError, match="by 25 MB together, or let --tp_switch.kv_caches be auto"):
        with_caches(shape, SMALL, Asked(100, caches=TOGETHER), machine(3225))
    with pytest.raises(LayoutError, match="weights and processes alone do not fit so often"):
        with_caches(shape, SMALL, Asked(100), machine(2500))
    with pytest.raises(LayoutError, match="alone do not fit so often, or raise it"):
        with_caches(plan_layouts(8, 1, [8], LARGE), LARGE, Asked(0), gpu(20 * GB))


def test_on_gpus_kv_caches_take_what_is_left() -> None:
    """Of 72 GB: 16 GB of weights and a quarter of it, 4 GB twice for vLLM; two parts in KV caches, 1 to 1/4."""
    shape = plan_layouts(8, 1, [4], LARGE)
    plan = with_caches(shape, LARGE, Asked(0), gpu(72 * GB))
    left = 72 * GB - 20_000 - 2 * 4096
    assert plan.both_awake and plan.kv_mb == pytest.approx(left / 1.25, abs=2)
    assert plan.tails[0].kv_mb == pytest.approx(left / 5, abs=2)
    # A tail that is to hold few samples leaves more.
    assert with_caches(shape, LARGE, Asked(0, 2000), gpu(72 * GB)).kv_mb == left - 2000
    # Where they take turns each has it all.
    turns = with_caches(shape, LARGE, Asked(0, caches=TURNS), gpu(72 * GB))
    assert (turns.kv_mb, turns.both_awake) == (left, False)


def test_where_the_longest_sample_would_not_fit_beside_the_other_cache_they_take_turns() -> None:
    """Left is 4,900 MB: both together would have 3,920 MB of the 4,000 that the longest sample needs."""
    free = 20_000 + 2 * 4096 + 4900
    shape = plan_layouts(8, 1, [4], LARGE)
    assert not with_caches(shape, LARGE, Asked(0), gpu(free)).both_awake
    assert with_caches(shape, LARGE, Asked(0), gpu(free + 200)).both_awake
    with pytest.raises(LayoutError, match=r"holds the longest sample \(4,000 MB\): lower --data.max_len"):
        with_caches(shape, LARGE, Asked(0), gpu(free - 1000))


@given(
    st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3, unique=True),
    st.integers(0, 60_000),
    st.integers(0, 20_000),
    st.sampled_from(["auto", TOGETHER, TURNS]),
    st.integers(10_000, 120_000),
)
def test_a_plan_fits_and_is_together_whenever_that_does(
    sizes: list[int], kv_mb: int, tail_kv_mb: int, caches: str, free: int
) -> None:
    shape, asked, offer = plan_layouts(8, 1, sizes, LARGE), Asked(kv_mb, tail_kv_mb, caches), gpu(free)
    try:
        plan = with_caches(shape, LARGE, asked, offer)
    except LayoutError as error:
        assert "\n" not in str(error) and "--tp_switch" in str(error)
        return
    memory = plan_memory(plan, LARGE, offer)
    assert memory.total <= offer.free
    assert kv_mb in (0, plan.kv_mb) and all(tail_kv_mb in (0, tail.kv_mb) for tail in plan.tails)
    for size, kv in zip(plan.sizes, plan.kv_sizes, strict=True):
        assert kv * size >= LARGE.longest_bytes // MB
        # As many tokens as an aligned engine, rounding up.
        assert tail_kv_mb or kv >= plan.kv_mb / size
    if caches == "auto" and not plan.both_awake and kv_mb:
        assert plan_memory(dataclasses.replace(plan, both_awake=True), LARGE, offer).total > offer.free
