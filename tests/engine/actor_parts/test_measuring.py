"""Orders to an engine that is measured, and the figures that become of its answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine.actor_parts import measuring
from rhyme_openrlhf.engine.actor_parts.measuring import REPEATS, Measuring
from rhyme_openrlhf.engine.calls import SchedulerDrafting, SchedulerTiming, WorkerCalls
from rhyme_openrlhf.latency.measure import StepShape
from rhyme_openrlhf.settings.config import RhymeSettings

LENGTH, BLOCK, BLOCKS, STEP_TOKENS = 200, 16, 40, 100
LAYOUT = {"layers": 4, "heads": 2, "block_size": BLOCK, "width": 64, "dtype": "float32"}


class Measured:
    """An engine, as far as measuring goes. Its clock begins at a quarter of a second; carrying takes half a one."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        from transformers import AutoConfig

        self.now, self.rhyme, self.index = 0.25, RhymeSettings(), 0
        model = SimpleNamespace(max_model_len=LENGTH, hf_config=AutoConfig.from_pretrained(embedded.MODEL))
        model.dtype = "torch.float32"
        scheduler = SimpleNamespace(max_num_seqs=8, max_num_scheduled_tokens=None, max_num_batched_tokens=STEP_TOKENS)
        config = SimpleNamespace(
            model_config=model,
            scheduler_config=scheduler,
            speculative_config=SimpleNamespace(num_speculative_tokens=32),
            cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=BLOCK),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        self.llm = SimpleNamespace(vllm_config=config)
        self.forced: list[int | None] = []
        self.carried: list[tuple[str, list[int]]] = []
        # Of (running, context, drafts, seconds).
        self.steps: list[tuple[int, int, int, float]] = []

    async def scheduler(self, method: Any, *arguments: Any) -> Any:
        if method is SchedulerTiming.force_drafts:
            self.forced += arguments
        return (
            self.steps
            if method is SchedulerTiming.take_steps
            else 64
            if method is SchedulerDrafting.row_limit
            else None
        )

    async def workers(self, method: Any, *arguments: Any) -> list[Any]:
        if method is WorkerCalls.rhyme_kv_layout:
            return [LAYOUT]
        if method is WorkerCalls.rhyme_hardware:
            return ["a machine"]
        self.now += 0.5
        self.carried.append((method.__name__, arguments[0]))
        return [""]


# A fill of the first row's context takes 2 x 8 x 100 / 100 steps more, for each draft token in eight twice as many.
@pytest.mark.parametrize(("drafts", "waiting"), [(0, 16), (7, 16), (8, 32), (31, 64)])
def test_samples_decode_until_the_last_ones_context_is_computed(
    drafts: int, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = Measured(), []

    async def generate_alike(llm: Any, count: int, context: int, tokens: int, extra: dict[str, Any]) -> None:
        asked.append((count, context, tokens, extra))

    monkeypatch.setattr(measuring.requests, "generate_alike", generate_alike)
    right = (8, 800, 8 * drafts, 0.01)
    engine.steps = [(7, 700, 7 * drafts, 0.02), *[right] * 3, (8, 800, 8 * drafts + 1, 0.03), *[right] * 30]
    found = asyncio.run(Measuring(engine).decode_steps(StepShape(8, 100, drafts), 20))  # type: ignore[arg-type]
    assert found == [right] * 20
    assert asked == [(8, 100, 2 + 20 + waiting, {})] and isinstance(asked[0][2], int)
    # The scheduler drafts by itself again.
    assert engine.forced == [drafts, None]


@pytest.mark.parametrize(("there", "carried"), [(BLOCKS, 13), (9, 8)])
def test_blocks_of_the_longest_context_are_carried_out_and_in(
    there: int, carried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more blocks than there are, without vLLM's null block (number 0)."""
    engine = Measured(there)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    measured = Measuring(engine)  # type: ignore[arg-type]
    bandwidth, said = asyncio.run(measured.kv_bandwidth())
    blocks = list(range(1, 1 + carried))
    orders = [("rhyme_export_kv", blocks), ("rhyme_import_kv", blocks)] * (1 + REPEATS)
    assert said == "" and engine.carried == orders
    assert bandwidth == carried * BLOCK * asyncio.run(measured.kv_bytes_per_token()) / 1.0
