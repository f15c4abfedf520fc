"""Seeded requests whose prompts do not fit one step: the CPU build's engine survives, and seeds hold (cpu_seeds.py)."""

from __future__ import annotations

from typing import Any

# 12 x 600 tokens: more than the 4,096 that the CPU build takes into one step by default.
PROMPTS = [[10 + (number + position) % 60 for position in range(600)] for number in range(12)]


def seeded(number: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=1.0, seed=1000 + number, max_tokens=16, ignore_eos=True)


def test_seeds_do_not_depend_on_how_prompts_are_cut(plain_engine: Any) -> None:
    limit = plain_engine.llm.vllm_config.scheduler_config.max_num_batched_tokens
    assert len(PROMPTS) * len(PROMPTS[0]) > limit, "the prompts must not fit one step, or nothing is tested"
    together = plain_engine.generate(PROMPTS, [seeded(number) for number in range(len(PROMPTS))])
    alone = [plain_engine.generate([PROMPTS[number]], [seeded(number)])[0] for number in range(len(PROMPTS))]
    assert [list(out.token_ids) for out in together] == [list(out.token_ids) for out in alone]
