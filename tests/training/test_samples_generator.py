"""The prompts that a generator draws after a resume: upstream's generator and data loader, with samples made up."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from collections.abc import Iterator
from types import SimpleNamespace as NS
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from rhyme_openrlhf.engine.requests import VisitedPrompt
from rhyme_openrlhf.engine_losses import EngineLosses
from rhyme_openrlhf.prompt_keys import evaluation_key, owner, prompt_key
from rhyme_openrlhf.training import samples_generator
from rhyme_openrlhf.training.samples_generator import LOADER_FINISHED, RhymeSamplesGenerator, routed
from tests.examples import examples
from tests.training.prompt_loader import a_loader


class MadeUp(RhymeSamplesGenerator):
    """Answers every prompt at once with `n` samples that only say which prompt they are of."""

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **_: Any) -> list[Any]:
        return list(prompts)

    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, **_: Any) -> tuple[list[Any], int, bool]:
        from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch

        prompts, labels, images, exhausted = _collect_prompt_batch(dataloader_iter, num_prompts)
        rows = list(zip(prompts, labels, images, strict=True))
        # The first to finish is served first: upstream's buffer is in no order of the prompts.
        random.Random(len(rows)).shuffle(rows)
        samples = [
            NS(prompts=[prompt], labels=[label], images=[image])
            for prompt, label, image in rows
            for _ in range(self.args.rollout.n_samples_per_prompt)
        ]
        return samples, len(prompts), exhausted or not prompts


def a_generator(prompts: int, batch: int, ahead: int, seed: int, texts: int | None = None) -> MadeUp:
    """A new process's generator: upstream's data loader, seeded as an unseeded process would be, differently."""
    args = NS(
        rollout=NS(batch_size=batch, n_samples_per_prompt=2, vllm_generate_batch_size=ahead),
        vllm=NS(enable_sleep=False),
        algo=NS(dynamic_filtering_enable=False),
    )
    services = NS(settings=NS(run=NS(reproducible=True), outlives_engines=False), losses=EngineLosses())
    return MadeUp(NS(args=args), a_loader(prompts, seed, texts), None, None, [], services=services)


def training(generator: MadeUp, episode: int, episodes: int) -> Iterator[tuple[int, list[str], dict[str, Any]]]:
    """Upstream's loop over epochs and steps: each step's epoch, labels, and the states a checkpoint would hold."""
    for epoch in range(episode, episodes):
        while True:
            samples, _, _, exhausted = generator.generate_samples()
            if samples:
                loader = copy.deepcopy(generator.prompts_dataloader.state_dict())
                states = pickle.dumps({"episode": epoch, "loader": loader, "generator": generator.state()})
                yield epoch, sorted({sample.labels[0] for sample in samples}), pickle.loads(states)
            if exhausted:
                break


@settings(max_examples=examples(120), deadline=None)
@given(st.integers(1, 11), st.integers(1, 5), st.integers(1, 3), st.integers(1, 11), st.data())
def test_a_resumed_run_draws_what_was_not_trained_on(
    prompts: int, batch: int, times: int, texts: int, data: st.DataObject
) -> None:
    """Killed after any step of three epochs, also where samples were generated ahead, or the epoch just ended.

    Rows may have the same prompt, and other labels.
    """
    whole = list(training(a_generator(prompts, batch, batch * times, seed=1, texts=texts), 0, 3))
    drawn = [(epoch, names) for epoch, names, _ in whole]
    for epoch in range(3):
        of_epoch = [name for number, names in drawn if number == epoch for name in names]
        assert sorted(of_epoch) == sorted(f"label {number}" for number in range(prompts))
    killed = data.draw(st.integers(0, len(whole) - 1))
    _, _, states = whole[killed]
    resumed = a_generator(prompts, batch, batch * times, seed=2, texts=texts)
    # As our trainers do.
    if states["loader"][LOADER_FINISHED] and not states["generator"].pending:
        states["episode"] += 1
    resumed.restore(states["generator"])
    resumed.prompts_dataloader.load_state_dict(states["loader"])
    after = [(epoch, names) for epoch, names, _ in training(resumed, states["episode"], 3)]
    if times == 1:
        assert after == drawn[killed + 1 :]
    for epoch in range(3):
        before = [name for number, names in drawn[: killed + 1] if number == epoch for name in names]
        rest = [name for number, names in after if number == epoch for name in names]
        assert sorted(before + rest) == sorted(f"label {number}" for number in range(prompts)), (before, rest)


def test_every_visit_of_a_prompt_is_counted_whatever_engine_it_goes_to() -> None:
    generator = a_generator(4, 2, 2, seed=1)
    generator.step = 7
    first = [generator._visited(prompt) for prompt in ("a", "b", "a")]
    assert [(str(prompt), prompt.visit) for prompt in first] == [("a", 0), ("b", 0), ("a", 1)]
    resumed = a_generator(4, 2, 2, seed=2)
    resumed.restore(pickle.loads(pickle.dumps(generator.state())))
    assert (resumed.step, resumed._visited("a").visit, resumed._visited("c").visit) == (7, 2, 0)
    resumed._evaluating = True
    # Two rows of an evaluation with the same prompt have seeds of their own, the same ones in every evaluation.
    visits = [resumed._visited("a").visit for _ in range(2)]
    resumed._evaluated.clear()
    assert visits == [resumed._visited("a").visit for _ in range(2)] and visits[0] == -8 != visits[1]
    resumed._evaluating = False
    assert resumed._visited("a").visit == 3


@pytest.mark.parametrize(("groups", "chosen"), [(0, 0), (1, 2), (3, 5)])
def test_engines_are_told_which_samples_to_trace(groups: int, chosen: int) -> None:
    generator = a_generator(8, 4, 8, seed=1)
    told: list[list[str]] = []
    generator.vllm_engines = [NS(trace_prompts=NS(remote=told.append))] * 2
    generator.services.settings.telemetry = NS(sample_groups=groups)
    prompts = [f"prompt {number}" for number in range(5)]  # of two steps: batches are of four
    generator._choose_samples(prompts)
    assert [len(keys) for keys in told] == ([chosen] * 2 if groups else [])
    assert all(keys == told[0] and set(keys) <= {prompt_key(prompt) for prompt in prompts} for keys in told)


def test_engines_count_anew_when_a_rollout_begins_and_not_for_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = a_generator(8, 4, 4, seed=1)
    done: list[str] = []
    generator.vllm_engines = [NS(begin_rollout=NS(remote=lambda: done.append("begin")))] * 2
    services = NS(record=lambda *_: None, epoch_of=lambda _: 1, history_workers=[])
    generator.services = NS(**vars(generator.services), **vars(services))
    generator.services.settings.telemetry = NS(sample_groups=0)
    stage = NS(begin=lambda *_: None, start=lambda: None)
    monkeypatch.setattr(samples_generator, "RolloutWatch", lambda *_: stage)
    monkeypatch.setattr(SamplesGenerator, "_dispatch_prompts_to_vllm", lambda *_, **__: done.append("prompts"))
    generator._evaluating = True
    RhymeSamplesGenerator._dispatch_prompts_to_vllm(generator, ["a"], ["label"])
    generator._evaluating = False
    RhymeSamplesGenerator._dispatch_prompts_to_vllm(generator, ["a"], ["label"])
    # A prompt in the place of a filtered one is of the same rollout.
    RhymeSamplesGenerator._dispatch_prompts_to_vllm(generator, ["b"], ["label"])
    assert done == ["prompts", "begin", "begin", "prompts", "prompts"]


def test_an_evaluations_responses_are_kept_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt's goes to its worker, apart from training's; not in a reproducible run."""
    generator = a_generator(8, 4, 4, seed=1)
    generator.step = 5
    sent: list[tuple[Any, ...]] = []
    workers = [
        NS(record=NS(remote=lambda *args, of=number, **more: sent.append((of, *args, more)))) for number in (0, 1)
    ]
    services = NS(record=lambda *_: None, history_workers=workers)
    generator.services = NS(**vars(generator.services), **vars(services))
    generator.services.settings.histospec = NS(enable=True, prefix_max=16)
    watch = NS(begin=lambda *_: None, start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(samples_generator, "EvaluationWatch", lambda *_: watch)
    samples = [
        NS(prompts=[prompt], sequences=torch.tensor([[1, 2, 3, 4]]), action_mask=torch.tensor([[0, 1, 1]]), info={})
        for prompt in ("a", "b", "a")
    ]
    monkeypatch.setattr(SamplesGenerator, "generate_eval_samples", lambda *_, **__: samples)
    generator.services.settings.run.reproducible = False
    assert generator.generate_eval_samples() == samples
    found = {one.prompt_key: (of, step, one, more) for of, step, rollouts, more in sent for one in rollouts}
    assert set(found) == {evaluation_key(prompt_key(prompt)) for prompt in "ab"}
    for key, (of, step, one, more) in found.items():
        assert (of, step, more) == (owner(key, 2), 5, {"evaluation": True})
        assert [list(piece.tokens) for piece in one.pieces] == [[3, 4]] * len(one.lengths)
        assert {piece.reward for piece in one.pieces} == {0.0}
    sent.clear()
    generator.services.settings.run.reproducible = True
    generator.generate_eval_samples()
    assert sent == []


def test_a_visited_prompt_travels_as_it_is() -> None:
    prompt = pickle.loads(pickle.dumps(VisitedPrompt("text", 3)))
    assert isinstance(prompt, VisitedPrompt) and (prompt, prompt.visit) == ("text", 3)


def test_each_prompt_goes_where_it_was_chosen_to_whichever_engine_upstream_takes() -> None:
    sent: list[tuple[int, Any]] = []

    def engine(number: int) -> Any:
        return NS(
            generate_responses=NS(remote=lambda **sent_with: sent.append((number, sent_with["prompt"]))),
            get_num_unfinished_requests=NS(remote=lambda: number),
        )

    first, second = routed([engine(0), engine(1)], [1, 1, 0])
    assert second.get_num_unfinished_requests.remote() == 1
    for stand_in, prompt in ((first, "a"), (second, "b"), (first, "c")):
        stand_in.generate_responses.remote(prompt=prompt)
    assert sent == [(1, "a"), (1, "b"), (0, "c")]
    with pytest.raises(StopIteration):
        first.generate_responses.remote(prompt="d")


@pytest.mark.parametrize(
    ("first", "lengths", "at"),
    [
        ([1, 2, 0], [[5], [9], [5]], [1, 2, 0]),
        (None, [[5], [9], [5]], [0, 1, 0]),
        ([1, 2, 0], [[5], [], [5]], [0, 1, 0]),
    ],
    ids=["by the home", "alike", "no history"],
)
def test_prompts_begin_where_the_home_says(
    first: list[int] | None, lengths: list[list[int]], at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine 2 is a tail engine: otherwise no prompt goes there."""
    sent: list[int] = []
    home = NS(
        open=NS(remote=lambda: None),
        begin_step=NS(remote=lambda *_: None),
        first_engines=NS(remote=lambda *_: first),
        generate_responses=NS(remote=lambda engine, **_: sent.append(engine)),
        unfinished=NS(remote=lambda engine: 0),
    )
    monkeypatch.setattr(samples_generator.ray, "get", lambda result, timeout: result)
    monkeypatch.setattr(samples_generator, "engines_left", lambda engines: [0, 1, 2])
    monkeypatch.setattr(samples_generator, "prompt_engines_left", lambda engines, layouts: [0, 1])
    generator = a_generator(3, 3, 3, seed=1)
    generator._home, generator.vllm_engines = home, [NS()] * 3
    generator.services.layouts = None
    generator.services.settings.tp_switch = NS(enable=True)
    generator.services.settings.dispatch = NS(by_history=True)
    with generator._samples_at_home(["a", "b", "c"], lengths):
        # As upstream: to each engine in turn.
        for number in range(3):
            engines = generator.vllm_engines
            engines[number % len(engines)].generate_responses.remote(prompt="abc"[number])
    assert sent == at and len(generator.vllm_engines) == 3


def test_no_prompt_takes_a_tokenizer_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every actor that answers prompts gets the same one, before the first prompt."""
    # Upstream reads the attribute where it sends prompts, and nowhere else.
    assert inspect.getsource(SamplesGenerator).count("self.tokenizer") == 2
    assert "hf_tokenizer=self.tokenizer" in inspect.getsource(SamplesGenerator._dispatch_prompts_to_vllm)
    put: list[Any] = []
    monkeypatch.setattr(samples_generator.ray, "put", lambda value: put.append(value) or f"reference {len(put)}")
    monkeypatch.setattr(samples_generator.ray, "get", lambda refs, timeout: refs)
    monkeypatch.setattr("openrlhf.trainer.ppo_utils.samples_generator.ray", NS(get=lambda refs: refs))
    given: list[Any] = []
    sent: list[Any] = []
    engine = NS(
        take_tokenizer=NS(remote=given.append),
        get_num_unfinished_requests=NS(remote=lambda: 0),
        generate_responses=NS(remote=lambda **arguments: sent.append(arguments["hf_tokenizer"])),
    )
    generator = a_generator(3, 3, 3, seed=1)
    generator.args.algo.advantage = NS(is_correction_level="off")
    generator.services.settings.limits = NS(stage_s=1)
    generator._given_tokenizer = "a tokenizer"
    generator.vllm_engines, generator._home = [engine] * 2, NS(start_fronts=NS(remote=lambda: given.append("fronts")))
    generator.prepare()
    SamplesGenerator._dispatch_prompts_to_vllm(generator, ["a", "b"], ["A", "B"])
    assert put == ["a tokenizer"] and given == ["reference 1", "reference 1", "fronts"]
    assert sent == [None, None]
