"""Sources of drafts in vLLM's real scheduler: a new one, and what keeps all of them within a step.

No step verifies more rows than memory was reserved for, and a batch that is too large for drafts gets none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from step_overhead import scheduler_of
from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.drafting.gain import FEWEST, INTERVAL_STEPS, GainMeter
from rhyme_openrlhf.drafting.source import Proposals
from rhyme_openrlhf.engine import scheduler as scheduler_module
from rhyme_openrlhf.engine.requests import PROMPT_KEY, TRACE
from rhyme_openrlhf.engine.scheduler_parts import drafting as drafting_part
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.latency.profile import StepPoint, to_text
from rhyme_openrlhf.settings.drafting import NGRAM, SOURCES, DraftingSettings, HistoSpecSettings
from tests.latency import formula

PROMPT, RESPONSE = [1, 2, 3], list(range(10, 60))
# Steps from one interval of the gain to the next.
PERIOD = INTERVAL_STEPS * 10
SAMPLES = [f"sample {number}" for number in range(4)]


def drafting_scheduler(source: str, rows: int) -> Any:
    """A scheduler without a planner, and four samples with long drafts, on an engine of `rows` rows."""
    scheduler = scheduler_of("rules", 8, 512, DraftingSettings(source=source, tokens=32))
    drafting = scheduler.drafting
    drafting._most_rows = rows
    if source != NGRAM:
        drafting.use(HistoryDrafter(HistoSpecSettings(window_start=32)))
        drafting.source.install("p", build_index([Piece(PROMPT, RESPONSE, 1.0)]))
    drafting.gain = GainMeter(0)
    for name in SAMPLES:
        add(scheduler, name, PROMPT)
    step(scheduler)
    return scheduler


def add(scheduler: Any, name: str, prompt: list[int], hasher: Any = None) -> None:
    parameters = SamplingParams(temperature=1, max_tokens=100, extra_args={PROMPT_KEY: "p"})
    parameters.update_from_generation_config({}, eos_token_id=None)
    scheduler.add_request(Request(name, prompt, parameters, None, block_hasher=hasher))


def block_hasher(scheduler: Any) -> Any:
    """What the engine core gives requests whose KV blocks may be found by others."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    cache = scheduler.vllm_config.cache_config
    hashing = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    init_none_hash(hashing)
    return get_request_block_hasher(cache.block_size, hashing)


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
    scheduler.timing.force_drafts(32)
    step(scheduler)
    assert [len(request.spec_token_ids) for request in scheduler.requests.values()] == [7] * 4


@pytest.mark.parametrize("source", ["history", NGRAM])
def test_a_sample_that_joins_adds_no_rows_that_nobody_proposed(source: str) -> None:
    """All but one token of its prompt are in the KV cache; vLLM pads its first step to 33 rows for a FULL graph."""
    scheduler = drafting_scheduler(source, 512)
    hasher = block_hasher(scheduler)
    prompt = list(range(scheduler.vllm_config.cache_config.block_size + 1))
    add(scheduler, "first", prompt, hasher)
    step(scheduler)
    add(scheduler, "second", prompt, hasher)
    output = step(scheduler)
    assert output.num_scheduled_tokens["second"] == 1
    assert "second" not in output.scheduled_spec_decode_tokens


def test_room_ends_with_a_samples_own_blocks_where_free_ones_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the longest drafts of all takes two blocks more of each, and those that the drafts fill."""
    scheduler = drafting_scheduler("history", 512)
    requests, block = list(scheduler.requests.values()), scheduler.block_size
    each = scheduler.drafting._decode_tokens() // len(requests) - 1
    enough = len(requests) * (2 + each // block)
    for free, room in ((enough, each), (enough - 1, block - requests[0].num_computed_tokens - 1)):
        monkeypatch.setattr(scheduler.kv_cache_manager.block_pool, "get_num_free_blocks", lambda free=free: free)
        for request in requests:
            request.spec_token_ids = [-1] * (each + 10)
        scheduler.drafting.keep_room(requests)
        assert [len(request.spec_token_ids) for request in requests] == [room] * len(requests)


class Again(Proposals):
    """A source of its own: each sample's last token, twice."""

    def __init__(self, *_: Any) -> None:
        super().__init__("again", 2)
        self._last: dict[str, int] = {}

    def append(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        super().append(requests, tokens)
        self._last |= {name: new[-1] for name, new in zip(requests, tokens, strict=True) if new}

    def propose(self, requests: Sequence[str]) -> list[list[int]]:
        return [[self._last[name]] * 2 for name in requests]


class Run:
    """Samples that draft by `Again`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
        monkeypatch.setitem(drafting_part.SOURCES, "history", Again)
        self.scheduler = scheduler_of("rules", samples, 4096, DraftingSettings(probe_share=0.1))
        self.steps, hasher = 0, block_hasher(self.scheduler)
        for number in range(samples):
            parameters = SamplingParams(max_tokens=4000, extra_args={TRACE: f"trace {number}"})
            parameters.update_from_generation_config({}, eos_token_id=None)
            self.scheduler.add_request(Request(str(number), PROMPT, parameters, None, block_hasher=hasher))

    def step(self, accepted: int) -> int:
        """Run a step that accepts `accepted` tokens of each draft; return the draft tokens that it verified."""
        output = self.scheduler.schedule()
        drafts = output.scheduled_spec_decode_tokens
        self.steps += 1
        new = [[*drafts.get(name, [])[:accepted], self.steps] for name in output.num_scheduled_tokens]
        names = list(output.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, places, new))
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[] for _ in names]))
        return sum(map(len, drafts.values()))


def test_a_source_is_a_class_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 2)
    assert [run.step(2) for _ in range(3)] == [0, 4, 4]
    counted = run.scheduler.calls["read_counters"]()
    assert (counted["drafts"], counted["drafted"], counted["accepted"], counted["accepted_own"]) == (4, 8, 8, 0)
    run.scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    assert run.scheduler.calls["take_traces"](["trace 0"]) == [
        {"drafted": 4, "spans": [(1, 3, "again"), (4, 6, "again")]}
    ]


def test_every_source_of_the_settings_is_there() -> None:
    assert set(drafting_part.SOURCES) == set(SOURCES)


@pytest.mark.parametrize(("samples", "drafted"), [(64, 0), (1, 2)])
def test_a_batch_that_is_too_large_by_the_profile_gets_no_drafts(
    monkeypatch: pytest.MonkeyPatch, samples: int, drafted: int
) -> None:
    """RhymeRL, section 5.4. A row costs a tenth of what a step of few samples does, which two tokens are worth."""
    run = Run(monkeypatch, samples)
    points = tuple(
        StepPoint(b, b * each, b * d, 0.010 + 0.001 * (b + b * d), 0.0, 9)
        for b in (1, 64)
        for each in (16, 1024)
        for d in (0, 1, 31)
    )
    assert run.scheduler.calls["install_profile"](to_text(formula.profile(steps=points, padded_rows=()))) == ""
    run.step(0)
    assert run.step(0) == drafted


def test_the_gain_is_estimated_by_the_profile_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = Run(monkeypatch, 1), 0.0
    for module in (scheduler_module, drafting_part):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    points = tuple(
        StepPoint(b, b * each, b * d, 0.010 + 0.001 * (b + b * d), 0.0, 9)
        for b in (1, 64)
        for each in (16, 1024)
        for d in (0, 1, 31)
    )
    assert run.scheduler.calls["install_profile"](to_text(formula.profile(steps=points, padded_rows=()))) == ""
    for _ in range(PERIOD):
        now += 0.010 + 0.001 * (1 + run.step(2))
    gain = run.scheduler.calls["read_gain"]()
    # Steps of 13 ms give three tokens, for which three steps of 11 ms would be needed.
    assert gain["intervals"] == 0 and gain["estimate"] == pytest.approx(3 * 0.011 / 0.013, rel=0.05)


def test_a_batch_that_is_too_large_as_measured_gets_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without a profile: what the run measures of itself says it, and says when drafts pay again."""
    run, now = Run(monkeypatch, 16), 0.0
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(perf_counter=lambda: now))

    def drafted(steps: int, samples: int, accepted: int) -> int:
        """Run `steps` steps; return the draft tokens of the last period of the gain's intervals."""
        nonlocal now
        found = []
        for _ in range(steps):
            found.append(run.step(accepted))
            now += 0.010 + 0.001 * (samples + found[-1])
        return sum(found[-PERIOD:])

    assert drafted(PERIOD, 16, 0) == (PERIOD - INTERVAL_STEPS) * 2 * 16 - 2 * 16
    drafted(FEWEST * PERIOD, 16, 0)
    # But for the steps that measure.
    assert drafted(PERIOD, 16, 0) == INTERVAL_STEPS * 2 * 16
    (said,) = run.scheduler.calls["take_sentences"]()
    assert said.startswith("drafting is switched off")
    run.scheduler.finish_requests([str(number) for number in range(1, 16)], RequestStatus.FINISHED_ABORTED)
    drafted((FEWEST + 2) * PERIOD, 1, 2)
    assert drafted(PERIOD, 1, 2) == (PERIOD - INTERVAL_STEPS) * 2
