"""The real engine: a step is of the shape that was asked for, and a prefill computes its prompt."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rhyme_openrlhf.engine.port import MeasuredEngine
from rhyme_openrlhf.latency.measure import OWN_STEPS, PrefillShape, StepShape

STEPS = 8


@pytest.fixture(scope="module")
def engine(starts_engine: None, starts_ray: None) -> Iterator[MeasuredEngine]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from rhyme_openrlhf.cli import demo, upstream
    from rhyme_openrlhf.platform import gpu_present, run_has_gpus, shims
    from rhyme_openrlhf.settings.config import RhymeSettings

    if not gpu_present():
        shims.install()

    from rhyme_openrlhf.engine.factory import parts_of_measured
    from rhyme_openrlhf.platform.cpu_arguments import adapt_arguments
    from rhyme_openrlhf.verify.engines import EnginePool

    args = upstream.parse(demo.arguments("unused"))
    on_gpus = run_has_gpus()
    if not on_gpus:
        adapt_arguments(args)
    pool = EnginePool(args, RhymeSettings.from_namespace(args), on_gpus, parts=parts_of_measured)
    try:
        # With another one that does the same, as `rhyme profile --beside 1`.
        measured, other = pool.several(2)
        yield MeasuredEngine(measured, 120, [other])
    finally:
        pool.close()


@pytest.mark.parametrize("shape", [StepShape(1, 64, 0), StepShape(4, 128, 3), StepShape(3, 300, 7)], ids=str)
def test_steps_have_the_shape_that_was_asked_for(engine: MeasuredEngine, shape: StepShape) -> None:
    steps = engine.decode_steps(shape, STEPS)
    # Of the measured engine, while the other one makes steps too.
    assert len(steps) >= STEPS
    for running, context, drafts, seconds in steps:
        assert running == shape.running
        assert drafts == shape.running * shape.drafts_each
        # Each sample has its prompt and what it grew by: at least a token a step, at most its drafts more.
        grown = context - shape.running * shape.context_each
        assert 0 <= grown <= shape.running * (OWN_STEPS * STEPS + 2) * (1 + shape.drafts_each)
        assert 0 < seconds < 60


def test_longer_prompts_take_longer(engine: MeasuredEngine) -> None:
    limits = engine.limits()
    assert limits.kv_cache_tokens > limits.length
    engine.prefill(PrefillShape(1, 32))
    short = min(engine.prefill(PrefillShape(1, 32)) for _ in range(3))
    long = min(engine.prefill(PrefillShape(8, 500)) for _ in range(3))
    # 4,000 tokens against 32: it was computed, not filled.
    assert long > 2 * short


def test_carrying_is_measured_and_leaves_the_engine_as_it_was(engine: MeasuredEngine) -> None:
    bandwidth, reason = engine.kv_bandwidth()
    assert reason == "" and 1e6 < bandwidth < 1e12
    seconds, reason = engine.weight_load()
    assert reason == "" and 0 < seconds < 60
    assert len(engine.decode_steps(StepShape(2, 64, 1), STEPS)) >= STEPS // 2


def test_padding_ascends(engine: MeasuredEngine) -> None:
    sizes = engine.padded_rows()
    assert list(sizes) == sorted(set(sizes)) and sizes
