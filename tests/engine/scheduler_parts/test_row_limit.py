"""No step verifies more rows than memory was reserved for, in vLLM's real scheduler, whoever makes the drafts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from step_overhead import scheduler_of
from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.drafting.gain import GainMeter
from rhyme_openrlhf.engine.requests import PROMPT_KEY
from rhyme_openrlhf.engine.scheduler_parts import row_limit
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.settings.drafting import NGRAM, DraftingSettings, HistoSpecSettings

PROMPT, RESPONSE = [1, 2, 3], list(range(10, 60))
SAMPLES = [f"sample {number}" for number in range(4)]


def drafting_scheduler(source: str, rows: int) -> Any:
    """A scheduler without a planner and four samples, each of which has a long draft, on an engine of so many rows."""
    scheduler = scheduler_of("rules", 8, 512, DraftingSettings(source=source, tokens=32))
    scheduler._most_rows = rows
    scheduler.gain = GainMeter(0)
    if source != NGRAM:
        scheduler.drafter = HistoryDrafter(HistoSpecSettings(window_start=32))
        scheduler.drafter.install("p", build_index([Piece(PROMPT, RESPONSE, 1.0)]))
    for name in SAMPLES:
        add(scheduler, name, PROMPT)
    step(scheduler)
    return scheduler


def add(scheduler: Any, name: str, prompt: list[int], hasher: Any = None) -> None:
    parameters = SamplingParams(temperature=1, max_tokens=100, extra_args={PROMPT_KEY: "p"})
    parameters.update_from_generation_config({}, eos_token_id=None)
    scheduler.add_request(Request(name, prompt, parameters, None, block_hasher=hasher))


def step(scheduler: Any) -> Any:
    """One step, in which every sample samples the response's first token, and the drafts for the next one."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    places = {name: place for place, name in enumerate(names)}
    scheduler.update_from_output(output, ModelRunnerOutput(names, places, [[RESPONSE[0]] for _ in names]))
    scheduler.update_draft_token_ids(DraftTokenIds(names, [RESPONSE[1:33] for _ in names]))
    return output


@pytest.mark.parametrize("source", ["history", NGRAM])
def test_a_step_without_a_planner_keeps_to_the_rows(source: str) -> None:
    """Four samples have four rows, so of 4 + 2 rows two are for drafts: the finding's case, which got 128 tokens."""
    scheduler = drafting_scheduler(source, 6)
    assert [len(request.spec_token_ids) for request in scheduler.requests.values()] == [1, 1, 0, 0]
    drafted = scheduler.schedule().num_scheduled_tokens
    assert sum(drafted.values()) == 6


def test_measuring_keeps_to_the_rows() -> None:
    scheduler = drafting_scheduler("history", 4 * 8)
    scheduler.force_drafts(32)
    step(scheduler)
    assert [len(request.spec_token_ids) for request in scheduler.requests.values()] == [7] * 4


@pytest.mark.parametrize("source", ["history", NGRAM])
def test_a_sample_that_joins_adds_no_rows_that_nobody_proposed(source: str) -> None:
    """All but one token of its prompt are in the KV cache; vLLM pads its first step to 33 rows for a FULL graph."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    scheduler = drafting_scheduler(source, 512)
    cache = scheduler.vllm_config.cache_config
    hashing = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    init_none_hash(hashing)
    hasher = get_request_block_hasher(cache.block_size, hashing)
    prompt = list(range(cache.block_size + 1))
    add(scheduler, "first", prompt, hasher)
    step(scheduler)
    add(scheduler, "second", prompt, hasher)
    output = step(scheduler)
    assert output.num_scheduled_tokens["second"] == 1
    assert "second" not in output.scheduled_spec_decode_tokens


def engine(samples: int, drafts: int, largest: int | None, within_graphs: bool = True) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=samples),
        num_speculative_tokens=drafts,
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=largest),
        additional_config={row_limit.DRAFTING_KEY: {"within_graphs": within_graphs}},
    )


def test_rows_of_a_gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_limit.most_rows(engine(128, 32, 512)) is None
    monkeypatch.setattr(row_limit, "gpu_present", lambda: True)
    assert row_limit.most_rows(engine(128, 32, 512)) == 512
    # No more than all samples with whole drafts.
    assert row_limit.most_rows(engine(4, 32, 512)) == 4 * 33
    # A draft token for each of many, but none past the largest graph unless that is allowed.
    assert row_limit.most_rows(engine(400, 32, 512)) == 512
    assert row_limit.most_rows(engine(400, 32, 512, within_graphs=False)) == 800
    # Without graphs (--vllm.enforce_eager).
    assert row_limit.most_rows(engine(400, 32, 0)) == 800
