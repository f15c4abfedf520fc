"""Rewards that do not come, filtered prompts, deferral, lost engines and moved samples, together, on made-up engines.

Each prompt trains once an epoch, unless it is filtered out or has no reward. Each batch makes whole updates, or the run
ends and says so. A run that goes on from any step trains what is left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace as NS
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from rhyme_openrlhf.engine.checked_reward import RewardLateError
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.pipeline import controller as pipeline
from rhyme_openrlhf.pipeline import engines as pipeline_engines
from rhyme_openrlhf.pipeline.batch import EXCHANGED, TAKEN_AHEAD, Batches, PromptGroup, StepEnd
from rhyme_openrlhf.pipeline.controller import NoRewardError
from rhyme_openrlhf.pipeline.generator import PipelineSamplesGenerator
from rhyme_openrlhf.pipeline.outlier_watch import Outlier
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.telemetry.events import Note, RolloutFinished
from rhyme_openrlhf.training.samples_generator import GeneratorState
from rhyme_openrlhf.training.trainer_async import GENERATOR
from tests.examples import examples
from tests.pipeline.made_up import SAMPLES, Gone, a_pipeline, by_chance
from tests.training.made_up_ranks import Ranks

EPOCHS = 2
LATE = "the reward function judge.py did not answer within 30 s"


class Loader:
    """An epoch's rows in order, from `at` on the first time; as upstream's, one at a time, with a state."""

    def __init__(self, prompts: int, at: int) -> None:
        self.prompts, self.begin, self.at = prompts, at, at

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin = self.begin, 0
        while self.at < self.prompts:
            self.at += 1
            yield ["source"], [f"{self.at - 1}"], [f"label of {self.at - 1}"], [None]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}


@dataclass(frozen=True)
class Faults:
    late: frozenset[str] = frozenset()
    filtered: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()
    defer: bool = False
    lost_at: int = -1


@dataclass(frozen=True)
class Trained:
    """A step that the trainer got: its prompts, and what a checkpoint of it would hold."""

    step: int
    epoch: int
    prompts: list[str]
    at: int
    state: GeneratorState
    excluded: int


def run(
    prompts: int, batch: int, train_batch: int, faults: Faults, seed: int, after: Trained | None = None
) -> tuple[list[Trained], str, list[Any]]:
    """Return what was trained, on what error the run ended ("": none), and what was recorded; `after`: it goes on."""
    sent: list[Any] = []
    chance = random.Random(seed)
    drawing: Any = PipelineSamplesGenerator.__new__(PipelineSamplesGenerator)
    drawing.args = NS(
        rollout=NS(batch_size=batch, n_samples_per_prompt=SAMPLES),
        train=NS(num_episodes=EPOCHS, batch_size=train_batch),
    )
    drawing._visits, drawing.step = Counter(), 0
    drawing.prompts_dataloader = Loader(prompts, after.at if after else 0)
    if after:
        drawing.step, drawing._deferred, drawing._used = after.step, after.state.deferred, after.state.used
    ended = after is not None and after.at == prompts
    first = 0 if after is None else after.epoch - 1 + ended
    if ended:
        drawing.prompts_dataloader.begin = 0

    def find(step: Step) -> list[Outlier]:
        return [Outlier(place, 0, -1, 99) for place in step.owed() if chance.random() < 0.4]

    def leave_out(engines: list[Any], services: Any) -> None:
        if 1 in generator.gone:
            engines[1] = Gone(1, "it was killed")

    with pytest.MonkeyPatch.context() as patch:
        by_chance(patch, seed)
        patch.setattr(pipeline, "OutlierWatch", lambda *_: NS(find=find, look_seconds=1.0))
        patch.setattr(pipeline_engines, "leave_out", leave_out)
        controller, generator, recorded = a_pipeline(
            sent.append,
            defer=faults.defer,
            filters=bool(faults.filtered),
            train_batch=train_batch,
            prompts=prompts,
            batch=batch,
        )
        generator.scores = {f"{row}": 1.0 if f"{row}" in faults.filtered else 0.5 for row in range(prompts)}
        generator.failing = {row: [RewardLateError(LATE)] * 99 for row in faults.late}
        for row in faults.moved:
            generator.failing.setdefault(row, []).insert(0, EngineLost(1, "it was killed"))
        handed = generator.hand

        def hand(step: Step, *more: Any) -> None:
            if step.number - drawing.step + 2 >= faults.lost_at >= 0:
                generator.gone.add(1)
            handed(step, *more)

        patch.setattr(generator, "hand", hand)
        error = ""
        try:
            controller.run(drawing.draw(first, 0))
        except NoRewardError as raised:
            error = str(raised)
    batches: Batches | None = None
    found = []
    for item in sent:
        if isinstance(item, PromptGroup):
            batches = batches or Batches(item.trained_in, SAMPLES, EXCHANGED if faults.defer else TAKEN_AHEAD)
            batches.add(item)
        elif isinstance(item, StepEnd):
            assert batches is not None
            rows = [sample.prompt for sample in batches.complete(item.step, item.prompts)][::SAMPLES]
            states = item.client_states
            at, state = states["data_loader_state_dict"]["at"], states[GENERATOR]
            found.append(Trained(item.step, states["episode"] + 1, rows, at, state, item.excluded))
    return found, error, recorded


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.data(), st.integers(0, 1 << 16))
def test_whatever_is_lost_each_prompt_trains_once_and_batches_divide_or_the_run_says_so(
    prompts: int, batch: int, updates: int, data: st.DataObject, seed: int
) -> None:
    rows = [f"{row}" for row in range(prompts)]
    some = st.frozensets(st.sampled_from(rows), max_size=3)
    late, filtered, moved = data.draw(some), data.draw(some), data.draw(some)
    defer = not filtered and data.draw(st.booleans())
    faults = Faults(late, filtered - late, moved, defer, data.draw(st.integers(-1, 3)))
    train_batch = updates * SAMPLES
    whole, error, recorded = run(prompts, batch, train_batch, faults, seed)
    for step in whole:
        samples = len(step.prompts) * SAMPLES
        # OpenRLHF's own steps need not divide: an epoch's last one, and where prompts are filtered out.
        if not faults.filtered and len(step.prompts) not in (min(batch, prompts), prompts % batch):
            assert samples % train_batch == 0
        assert not late & set(step.prompts)
    if error:
        assert late and ("does not divide" in error or "has got its rewards" in error)
    else:
        kept = sum(isinstance(event, Note) and "although it is filtered out" in event.text for event in recorded)
        useless = 0
        for epoch in range(1, EPOCHS + 1):
            trained = [row for step in whole if step.epoch == epoch for row in step.prompts]
            assert len(trained) == len(set(trained))
            assert set(rows) - late - faults.filtered <= set(trained)
            useless += len(faults.filtered & set(trained))
        assert useless == kept and whole[-1].excluded == EPOCHS * len(late)
    if not whole:
        return
    point = data.draw(st.sampled_from(whole))
    before = [row for step in whole if step.epoch == point.epoch and step.step <= point.step for row in step.prompts]
    after, error, _ = run(prompts, batch, train_batch, faults, seed + 1, point)
    if not error:
        rest = [row for step in after if step.epoch == point.epoch for row in step.prompts]
        assert len(set(before) | set(rest)) == len(before) + len(rest)
        assert set(rows) - late - faults.filtered <= {*before, *rest}


def sizes_of(found: list[Trained]) -> list[int]:
    return [len(step.prompts) for step in found]


def test_a_prompt_group_without_reward_gives_its_place_to_the_next_prompt() -> None:
    """Eight prompts in steps of two, of which the epoch's last lacks one; updates of one prompt group."""
    found, error, recorded = run(8, 2, SAMPLES, Faults(frozenset("13")), seed=1)
    assert error == "" and sizes_of(found) == [2, 2, 2] * EPOCHS
    assert {row for step in found for row in step.prompts} == set("024567")
    # Those of the steps that it has: the one behind was found, too, but is not of them.
    assert [step.excluded for step in found] == [1, 2, 2, 3, 4, 4]
    notes = [event.text for event in recorded if isinstance(event, Note) and "judge.py" in event.text]
    assert len(notes) == 4 and all("another prompt takes its place" in text for text in notes)
    assert "(4 left out in this run)" in notes[-1]
    assert [event.samples for event in recorded if isinstance(event, RolloutFinished)] == [4, 4, 4] * EPOCHS


def test_a_batch_that_its_updates_do_not_divide_ends_the_run_in_one_sentence() -> None:
    """All prompts of the epoch are with the engines: nothing can take the place, and the last step lacks one."""
    found, error, recorded = run(4, 2, 2 * SAMPLES, Faults(frozenset("1")), seed=2)
    assert sizes_of(found) == [2]
    assert error == (
        "step 2 has 2 samples, which --train.batch_size 4 does not divide: 1 prompt groups of the run had no reward in "
        "time, and the epoch has no others to take their places. Give rewards more time (--limits.reward_s) and resume "
        "with --ckpt.load_enable"
    )
    assert any("its epoch has no other prompt" in event.text for event in recorded if isinstance(event, Note))


def test_a_smaller_last_step_is_openrlhfs_own() -> None:
    """Five prompts in steps of two: what --train.batch_size does not divide without any fault is no reason to end."""
    found, error, _ = run(5, 2, 2 * SAMPLES, Faults(), seed=3)
    assert error == "" and sizes_of(found) == [2, 2, 1] * EPOCHS


@pytest.mark.parametrize(("ranks", "micro_batch", "accumulation"), [(1, 8, 1), (2, 2, 2), (2, 1, 4), (1, 1, 8)])
def test_each_step_is_applied_in_itself_as_without_a_pipeline(ranks: int, micro_batch: int, accumulation: int) -> None:
    """26 prompts in steps of four, of which two never have a reward: each step is one update of its own samples."""
    found, error, _ = run(26, 4, 4 * SAMPLES, Faults(frozenset({"1", "9"})), seed=4)
    assert error == ""
    group = Ranks(ranks, micro_batch, accumulation)
    for step in found:
        group.train([1] * len(step.prompts) * SAMPLES, name=step.step)
    # Six updates an epoch, as the loop without a pipeline makes of 24 prompts.
    assert len(found) == 6 * EPOCHS
    for engine in group.engines:
        assert engine.applied == [[step.step] * accumulation for step in found] and engine.waiting == []
