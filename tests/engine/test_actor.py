"""Our engine actor on a real engine: numbered weights, cache salt, pause, history. Without Ray: it is a plain class."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine import requests
from rhyme_openrlhf.engine.calls import SchedulerDrafting, SchedulerMeter
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.prompt_keys import prompt_key, round_key
from rhyme_openrlhf.telemetry.engine_events import SLOWEST
from tests.engine.actors import LONG, Actor, MadeUpWorker, an_actor, model_with, stored

# Longer than vLLM's KV block on CPU, so that a second request for it does find cached blocks.
PROMPT = list(range(10, 60)) * 6
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def actor(starts_engine: None) -> Iterator[Actor]:
    with an_actor() as found:
        yield found


def test_an_engine_has_the_size_that_was_asked_for(actor: Actor) -> None:
    scheduling = actor.raw.llm.vllm_config.scheduler_config
    assert (scheduling.max_num_seqs, scheduling.max_num_batched_tokens) == (100, 3000)
    # From the worker, where they are resolved.
    padded = actor.call(actor.raw.padded_rows())
    assert padded and list(padded) == sorted(set(padded))


def expected_scores(model: Any, tokens: list[int]) -> list[float]:
    from openrlhf.models.actor import Actor

    from rhyme_openrlhf.weights.publisher import fixed_sequence_log_probs

    actor = Actor(model)
    actor.packing_samples = False
    return fixed_sequence_log_probs(actor, tokens)


def sampling(**values: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0, "max_tokens": 8, "logprobs": 1} | values))


def until_running(actor: Actor) -> None:
    while not actor.raw.running:
        time.sleep(0.001)


def first_log_probability(output: Any) -> float:
    answer = output.outputs[0]
    return answer.logprobs[0][answer.token_ids[0]].logprob


def test_first_requests_are_of_the_start_and_counted_nowhere(actor: Actor) -> None:
    assert actor.had_requests
    assert (actor.counted.response_tokens, actor.counted.decode_steps, actor.counted.finished_samples) == (0, 0, 0)


def test_a_prompt_without_a_tokenizer_gets_the_engines_own(actor: Actor) -> None:
    from transformers import AutoTokenizer

    asked = {"label": "", "sampling_params": sampling(), "max_length": 768, "num_samples": 2}
    own = AutoTokenizer.from_pretrained(embedded.MODEL)
    expected = actor.call(actor.raw.generate_responses(prompt="a3b7=", hf_tokenizer=own, **asked))
    actor.raw.take_tokenizer(own)
    found = actor.call(actor.raw.generate_responses(prompt="a3b7=", hf_tokenizer=None, **asked))
    assert [one["observation_tokens"] for one in found] == [one["observation_tokens"] for one in expected]


def test_what_is_there_at_the_start_is_in_no_garbage_collection(actor: Actor) -> None:
    import torch

    # A collection goes through what it returns; half a second of that lay in a run's first stage.
    assert gc.is_tracked(torch) and gc.is_tracked(actor.raw.llm)
    assert not {id(torch), id(actor.raw.llm)} & set(map(id, gc.get_objects()))


def errors_after_loading(actor: Actor, folder: Path, versions: dict[int, float]) -> list[float]:
    """Load these versions (scales of the weights) in turn; how far each one's first log-probability is off."""
    import torch

    errors, seen = [], []
    for version, scale in versions.items():
        model = model_with(scale)
        actor.call(actor.raw.load_weights(stored(model, version, folder)))
        assert actor.raw.weight_version == version
        scores = actor.call(actor.raw.score(PROMPT[:40]))
        assert scores == pytest.approx(expected_scores(model, PROMPT[:40]), abs=TOLERANCE)
        with torch.no_grad():
            best = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, -1], dim=-1).max().item()
        # Twice: the second request finds the first one's blocks, which must be of this version.
        outputs = [actor.call(actor.raw.generate(list(PROMPT), sampling())) for _ in range(2)]
        assert outputs[-1].num_cached_tokens > 0
        errors.append(max(abs(first_log_probability(output) - best) for output in outputs))
        seen.append(round(best, 2))
    assert len(set(seen)) == len(versions)
    return errors


def test_each_version_is_loaded_and_no_cached_block_survives_it(actor: Actor, tmp_path: Path) -> None:
    assert max(errors_after_loading(actor, tmp_path, {1: 0.5, 2: 1.5, 3: 1.0})) < TOLERANCE


@pytest.mark.parametrize(
    ("salted", "resets", "first"), [(True, False, 4), (False, True, 6), (False, False, 8)], ids=str
)
def test_either_guard_alone_keeps_kv_blocks_apart_and_without_both_they_are_mixed(
    actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, salted: bool, resets: bool, first: int
) -> None:
    """The cache salt and the reset of the prefix cache guard one promise; the last case shows that it is seen."""

    async def no_reset() -> None:
        return None

    if not resets:
        monkeypatch.setattr(actor.raw.llm, "reset_prefix_cache", no_reset)
    if not salted:
        of_version = requests.prompt_of
        monkeypatch.setattr(requests, "prompt_of", lambda tokens, version, *rest: of_version(tokens, 0, *rest))
    errors = errors_after_loading(actor, tmp_path, {first: 0.5, first + 1: 1.5})
    assert (max(errors) < TOLERANCE) == (salted or resets)


def test_loading_under_running_samples_is_refused(actor: Actor, tmp_path: Path) -> None:
    from rhyme_openrlhf.engine_errors import WeightLoadError

    segment = stored(model_with(1.0), 9, tmp_path)
    running = actor.start(actor.raw.generate(list(PROMPT[:8]), sampling(max_tokens=LONG, ignore_eos=True)))
    until_running(actor)
    before = actor.raw.weight_version
    with pytest.raises(WeightLoadError, match=r"engine 0 was told to load weight version 9 while 1 samples run"):
        actor.call(actor.raw.load_weights(segment))
    assert len(running.result(120).outputs[0].token_ids) == LONG
    assert actor.raw.weight_version == before


def test_partial_rollout_goes_on_with_the_new_weights(actor: Actor, tmp_path: Path) -> None:
    """Paused, loaded, resumed: the sample's later tokens follow the new weights, on a recomputed KV cache."""
    import torch

    old, new = model_with(1.0), model_with(0.2)
    actor.call(actor.raw.load_weights(stored(old, 20, tmp_path)))
    parameters = sampling(temperature=1, seed=3, max_tokens=LONG, ignore_eos=True)
    running = actor.start(actor.raw.generate(list(PROMPT[:8]), parameters))
    until_running(actor)
    while max(actor.call(actor.raw.scheduler(SchedulerMeter.output_lengths)).values(), default=0) < 50:
        pass
    actor.call(actor.raw.pause_generation())
    actor.call(actor.raw.load_weights(stored(new, 21, tmp_path)))
    late = actor.start(actor.raw.generate(list(PROMPT[:8]), sampling()))
    actor.call(actor.raw.resume_generation())
    answer = running.result(120).outputs[0]
    late.result(60)

    tokens = PROMPT[:8] + list(answer.token_ids)
    log_probs = []
    for model in (old, new):
        with torch.no_grad():
            log_probs.append(torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1))
    follows = []
    for i, (token, at) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        position = len(tokens) - len(answer.token_ids) + i - 1
        differences = [abs(at[token].logprob - table[position, token].item()) for table in log_probs]
        assert min(differences) < TOLERANCE
        follows.append(differences[0] > differences[1])
    # Old weights up to the switch, new ones from there to the end, and each for a good part of the response.
    assert follows == sorted(follows)
    assert 50 <= follows.index(True) <= LONG - 50


def test_a_request_that_comes_while_weights_load_waits_for_them(actor: Actor, tmp_path: Path) -> None:
    actor.call(actor.raw.pause_generation())
    waiting = actor.start(actor.raw.generate(list(PROMPT[:8]), sampling()))
    actor.call(asyncio.sleep(0.3))
    assert not actor.raw.running and not waiting.done()
    model = model_with(0.7)
    actor.call(actor.raw.load_weights(stored(model, 30, tmp_path)))
    actor.call(actor.raw.resume_generation())
    import torch

    with torch.no_grad():
        best = torch.log_softmax(model(torch.tensor([PROMPT[:8]])).logits[0, -1], dim=-1).max().item()
    assert first_log_probability(waiting.result(60)) == pytest.approx(best, abs=TOLERANCE)


def test_what_ran_between_two_rollouts_is_in_no_rollouts_counts(actor: Actor) -> None:
    actor.call(actor.raw.generate(list(PROMPT[:8]), sampling(max_tokens=5, ignore_eos=True)))  # an evaluation's
    actor.call(actor.raw.begin_rollout())
    actor.call(actor.raw.generate(list(PROMPT[:8]), sampling(max_tokens=3, ignore_eos=True)))
    progress = actor.call(actor.raw.progress())
    report = actor.call(actor.raw.rollout_report(0.0, 0.0))
    for counted in (progress, report["counters"]):
        assert (counted["response_tokens"], counted["finished_samples"]) == (3, 1)


def test_an_engine_names_its_slowest_sample(actor: Actor) -> None:
    def begin(key: str, tokens: int) -> Any:
        parameters = sampling(max_tokens=tokens, ignore_eos=True)
        parameters.extra_args = {requests.PROMPT_KEY: key}
        return actor.start(actor.raw.generate(list(PROMPT[:8]), parameters))

    assert actor.call(actor.raw.progress())[SLOWEST] is None
    first = begin("first", LONG)
    while (actor.call(actor.raw.progress())[SLOWEST] or ("", 0))[1] < 2:
        assert not first.done()
    second = begin("second", LONG)
    prompt, tokens = actor.call(actor.raw.progress())[SLOWEST]
    assert prompt == "first" and 2 <= tokens <= LONG
    for response in (first, second):
        response.result(60)
    assert actor.call(actor.raw.progress())[SLOWEST] is None


def test_only_offered_scheduler_methods_can_be_called(actor: Actor) -> None:
    from rhyme_openrlhf.engine.patches import core_channel

    with pytest.raises(Exception, match="offers no method 'shutdown'"):
        actor.call(core_channel.call_scheduler(actor.raw.llm, "shutdown"))


def test_a_bad_index_is_refused_and_harms_nothing(actor: Actor, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    torn.write_bytes(b"RHYMEIDX" + bytes(100))
    assert "refused" in actor.call(actor.raw.scheduler(SchedulerDrafting.install_history, "key", str(torn)))
    assert "refused" in actor.call(
        actor.raw.scheduler(SchedulerDrafting.install_history, "key", str(tmp_path / "gone"))
    )
    assert actor.call(actor.raw.generate(list(PROMPT[:8]), sampling())).outputs[0].token_ids


class TwoTurns:
    """An agent with two rounds: its second prompt is the first answer and a question."""

    async def execute(
        self, prompt: str, label: str, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        tokens, answers = list(PROMPT[:40]), []
        for _ in range(2):
            output = await llm_engine.generate(tokens, sampling_params)
            answers.append(list(output.outputs[0].token_ids))
            tokens = tokens + answers[-1] + [7, 8, 9]
        return {"prompt": prompt, "reward": 1.0, "scores": 1.0, "answers": answers}


def test_each_round_of_a_conversation_is_drafted_from_its_own_history(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round's history is its answer; the first round's, and so nothing else, says the contrary."""
    monkeypatch.setattr(actor.raw, "executor", TwoTurns())
    run = dataclasses.replace(actor.raw.rhyme.run, reproducible=True)  # waits for each index
    monkeypatch.setattr(actor.raw, "rhyme", dataclasses.replace(actor.raw.rhyme, run=run))

    def answers() -> list[list[int]]:
        parameters = sampling(max_tokens=24, ignore_eos=True)
        (response,) = actor.call(actor.raw.generate_responses("p", "", parameters, 768, None, 1))
        return response["answers"]

    def accepted() -> float:
        return actor.call(actor.raw.totals()).accepted

    without = answers()
    key = prompt_key("p")
    context = [*PROMPT[:40], *without[0], 7, 8, 9][-16:]
    worker = MadeUpWorker({
        key: build_index([Piece(context, [3] * 24, 1.0)]),
        round_key(key, 1): build_index([Piece(context, without[1], 1.0)]),
    })  # fmt: skip
    monkeypatch.setattr(actor.raw.histories.feed, "_workers", [worker])
    before = accepted()
    assert answers() == without
    assert worker.asked == [key, round_key(key, 1)]
    assert accepted() - before >= 20
    assert actor.raw.histories.feed.take_problems() == []
    assert actor.raw.histories.feed._installed == set()
