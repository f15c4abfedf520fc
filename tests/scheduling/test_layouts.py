"""Layouts over the same devices: which can be, and what they take."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.scheduling.layouts import (
    MB,
    PROCESS_MB,
    LayoutError,
    LayoutPlan,
    Model,
    check_memory,
    plan_layouts,
    plan_memory,
)

MODEL = Model(heads=8, kv_heads=2, weight_bytes=800 * MB)


def test_the_tail_covers_the_same_devices() -> None:
    assert plan_layouts(2, 1, 2, MODEL) == LayoutPlan(2, 1, 1, 2)
    plan = plan_layouts(8, 2, 8, MODEL)
    assert (plan.tail_engines, plan.devices) == (2, 16)
    assert plan.layouts() == {**dict.fromkeys(range(8), 0), 8: 1, 9: 1}


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
        plan_layouts(engines, size, tail, MODEL)
    with pytest.raises(LayoutError, match="3 key-value heads in no way"):
        plan_layouts(2, 1, 2, Model(6, 3, MB))


def test_memory_is_planned_for_each_device() -> None:
    assert plan_layouts(4, 1, 4, MODEL, 100, 30).tail_kv_mb == 30
    # Two KV heads on four ranks: each holds one, half of a token and not a quarter.
    plan = plan_layouts(4, 1, 4, MODEL, 100)
    memory = plan_memory(plan, MODEL, 100)
    assert (memory.weights, memory.tail_weights) == (800 * MB, 200 * MB)
    # Four actors with their cores, and one actor and core with four workers.
    assert memory.processes == 14 * PROCESS_MB * MB // 4
    assert memory.total == 1150 * MB + memory.processes == 3250 * MB
    said = check_memory(memory, plan, 14_000 * MB, "--cpu.kv_cache_mb")
    assert "4 engines of tensor parallelism 1 with 800 MB of weights and 100 MB of KV cache on each device" in said
    assert "1 of 4 with 200 MB and 50 MB, and 2,100 MB on each for their processes: 13,000 MB on 4 devices" in said
    assert said.endswith("14,000 MB are free")
    with pytest.raises(LayoutError, match="lower --cpu.kv_cache_mb and --tp_switch.kv_cache_mb by 25 MB together"):
        check_memory(memory, plan, 12_900 * MB, "--cpu.kv_cache_mb")
    with pytest.raises(LayoutError, match="weights and processes alone do not fit twice"):
        check_memory(memory, plan, 10_000 * MB, "--cpu.kv_cache_mb")
