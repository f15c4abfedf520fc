"""Dynamic filtering in the pipeline, on made-up engines: each prompt trains or is filtered out, once, also after a
resume from any step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from rhyme_openrlhf.pipeline.batch import TAKEN_AHEAD, Batches, PromptGroup
from rhyme_openrlhf.pipeline.step import PromptStream, Step
from rhyme_openrlhf.telemetry.events import Note
from rhyme_openrlhf.training.samples_generator import GeneratorState
from rhyme_openrlhf.training.trainer_async import GENERATOR
from tests.examples import examples
from tests.pipeline.made_up import SAMPLES, a_pipeline, by_chance


def epoch_of(prompts: list[str]) -> Iterator[Any]:
    """As a data loader gives them, from where it stands."""
    return iter([("source", [prompt], [f"label of {prompt}"], [None]) for prompt in prompts])


def drawn_from(stream: PromptStream, first: int, batch: int) -> Iterator[Step]:
    """As the generator draws the steps of one epoch; its data loader's state is the place."""
    step = first
    while not stream.exhausted:
        taken = stream.take(batch)
        if not taken.prompts:
            return
        step += 1
        states, state = {"at": stream.place}, GeneratorState(step)
        yield Step(step, 1, client_states=states, generator=state, stream=stream, drawn=stream.place, **vars(taken))


def trained_by(
    prompts: list[str], used: tuple[int, ...], first: int, batch: int, useless: set[str], seed: int
) -> tuple[list[tuple[list[str], int, GeneratorState, float]], list[Any]]:
    """Of each step: what it trained on, its data loader's place, the generator's state and its pass rate."""
    sent: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        by_chance(patch, seed)
        controller, generator, recorded = a_pipeline(sent.append, filters=True)
        generator.scores = {prompt: 1.0 if prompt in useless else 0.5 for prompt in prompts}
        controller.run(drawn_from(PromptStream(epoch_of(prompts), used), first, batch))
    batches, found = Batches(first + 1, SAMPLES, late=TAKEN_AHEAD), []
    for item in sent:
        if isinstance(item, PromptGroup):
            batches.add(item)
        else:
            batch_of = [sample.prompt for sample in batches.complete(item.step, item.prompts)][::SAMPLES]
            found.append((batch_of, item.client_states["at"], item.client_states[GENERATOR], item.pass_rate))
    return found, recorded


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 14), st.integers(1, 4), st.data(), st.integers(0, 1 << 16))
def test_every_prompt_trains_once_or_is_filtered_out_also_after_a_resume(
    count: int, batch: int, data: st.DataObject, seed: int
) -> None:
    prompts = [f"{number}" for number in range(count)]
    useless = data.draw(st.sets(st.sampled_from(prompts)))
    whole, recorded = trained_by(prompts, (), 0, batch, useless, seed)
    everything = [prompt for step, *_ in whole for prompt in step]
    assert len(set(everything)) == len(everything)
    # Where all that was left of the epoch is filtered out, one is trained on, so that there are weights of the step.
    kept = [event for event in recorded if isinstance(event, Note) and "although it is filtered out" in event.text]
    assert set(everything) >= set(prompts) - useless
    assert len(set(everything) & useless) == len(kept)
    if len(useless) < batch:
        # What one step lacks the next one can give, but for the epoch's last.
        assert all(len(step) == batch for step, *_ in whole[:-2])
    assert all(0 <= rate <= 100 for *_, rate in whole)

    at = data.draw(st.integers(0, len(whole) - 1))
    _, place, state, _ = whole[at]
    before = [prompt for step, *_ in whole[: at + 1] for prompt in step]
    after, _ = trained_by(prompts[place:], state.used, at + 1, batch, useless, seed + 1)
    resumed = [prompt for step, *_ in after for prompt in step]
    assert len(set(before) | set(resumed)) == len(before) + len(resumed)
    assert set(before) | set(resumed) >= set(prompts) - useless


def test_a_filtered_prompt_group_gives_its_place_to_the_next_prompt() -> None:
    """Each step has three prompts: two steps are with the engines and a third one is drawn when the first begins."""
    whole, _ = trained_by([f"{number}" for number in range(12)], (), 0, 3, {"1"}, seed=3)
    steps = [sorted(step, key=int) for step, *_ in whole]
    assert steps == [["0", "2", "9"], ["3", "4", "5"], ["6", "7", "8"], ["10", "11"]]
    assert [round(rate) for *_, rate in whole] == [75, 100, 100, 100]
    # Six prompts behind the first step's is the one it used.
    assert [state.used for _, _, state, _ in whole] == [(6,), (3,), (0,), ()]


def test_at_the_epochs_end_a_step_takes_what_the_next_has_first() -> None:
    whole, _ = trained_by([f"{number}" for number in range(6)], (), 0, 3, {"1"}, seed=3)
    (first, *_), (second, *_) = whole
    assert len(first) == 3 and len(second) == 2 and sorted(first + second) == ["0", "2", "3", "4", "5"]


def test_without_a_range_nothing_is_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chance(monkeypatch, 1)
    sent: list[Any] = []
    controller, generator, _ = a_pipeline(sent.append)
    generator.scores = {f"{number}": 1.0 for number in range(4)}
    controller.run(drawn_from(PromptStream(epoch_of(list(generator.scores))), 0, 2))
    assert sum(isinstance(item, PromptGroup) for item in sent) == 4
    assert {item.pass_rate for item in sent if not isinstance(item, PromptGroup)} == {None}
