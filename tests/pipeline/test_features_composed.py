"""Late, filtered, deferred and lost prompt groups, moved samples and a kill, together and in any order.

Each prompt trains once an epoch or is told as left out. Batches make whole updates, or the run ends and says so.
Nothing is stranded, rows stay whole and in order. A run that goes on from any step trains what is left.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from rhyme_openrlhf.cli import upstream as command_line
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.engine.checked_reward import RewardLateError
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.pipeline.batch import EXCHANGED, TAKEN_AHEAD, Batches
from rhyme_openrlhf.pipeline.controller import NoRewardError
from rhyme_openrlhf.pipeline.engines import MOST_ATTEMPTS, PlacingError
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.events import Note, RolloutFinished
from tests.examples import examples
from tests.pipeline.recorded_run import Loader, RandomOrder, RecordedRun, Ref, state_of, steps_of
from tests.training.made_up_ranks import Ranks

SAMPLES, EPOCHS, ENGINES = 2, 2, 3
LATE = "the reward function judge.py did not answer within 30 s"


class Epochs(Loader):
    """`prompts` rows an epoch, each with a label of its own; rows may have the same prompt."""

    def __init__(self, prompts: int, texts: int, epoch: int = 0, at: int = 0) -> None:
        super().__init__([("", "")] * prompts, at)
        self.texts, self.epoch = texts, epoch - 1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.rows = [(f"prompt {row % self.texts}", f"{self.epoch}.{row}") for row in range(len(self.rows))]
        return super().__iter__()


@dataclass(frozen=True)
class Sizes:
    prompts: int
    batch: int
    update: int
    texts: int


@dataclass(frozen=True)
class Likely:
    """Chances of each event, whenever it may happen."""

    late: float = 0.0
    filtered: float = 0.0
    long: float = 0.0
    moved: float = 0.0
    lost: float = 0.0


class Composed(RandomOrder):
    """Events at random; `late`: the rows that had no reward, `useless`: those that taught nothing."""

    def __init__(self, chance: random.Random, likely: Likely) -> None:
        super().__init__(chance)
        self.likely = likely
        self.late: list[str] = []
        self.useless: set[str] = set()
        self.lost: Counter[str] = Counter()

    def before(self) -> None:
        alive = set(range(ENGINES)) - self.run.dead
        if len(alive) > 1 and self.chance.random() < self.likely.lost:
            self.run.dead.add(self.chance.choice(sorted(alive)))

    def fate(self, ref: Ref) -> Exception | None:
        if self.chance.random() < self.likely.moved:
            self.lost[ref.label] += 1
            return EngineLost("engine 1 is gone: it was killed")
        if self.chance.random() < self.likely.late:
            self.late.append(ref.label)
            return RewardLateError(LATE)
        if self.chance.random() < self.likely.filtered:
            self.useless.add(ref.label)
        return None

    def too_long(self, step: Step) -> list[int]:
        return [place for place in step.owed() if self.chance.random() < self.likely.long]

    def samples_of(self, label: str, visit: int) -> list[dict[str, Any]]:
        """Return a prompt group of samples that know their number."""
        score = 1.0 if label in self.useless else 0.5
        return [
            {
                "prompt": label, "label": label, "observation_tokens": [5, 6, 7], "action_ranges": [(1, 3)],
                "rollout_log_probs": None, "reward": score, "scores": score, "extra_logs": {"number": number},
            }
            for number in range(SAMPLES)
        ]  # fmt: skip


@functools.cache
def parsed() -> Any:
    return command_line.parse([*arguments("unused"), "--train.async_enable", "--histopipe.enable"])


@dataclass(frozen=True)
class Trained:
    """A step that the trainer got: its rows, and what a checkpoint of it would hold."""

    step: int
    rows: list[str]
    episode: int
    at: int
    state: Any
    excluded: int


def trained(sizes: Sizes, course: Composed, after: Trained | None = None) -> tuple[list[Trained], str]:
    """Return what was trained, and on what error the run ended ("": none); `after`: it goes on."""
    args, likely = deepcopy(parsed()), course.likely
    args.rollout.batch_size, args.rollout.n_samples_per_prompt = sizes.batch, SAMPLES
    args.train.batch_size, args.train.num_episodes = sizes.update, EPOCHS
    args.algo.dynamic_filtering_enable, args.algo.dynamic_filtering_range = likely.filtered > 0, (0, 1)
    args.histopipe.defer = likely.long > 0
    episode, at = (after.episode, after.at) if after else (0, 0)
    if at == sizes.prompts:
        episode, at = episode + 1, 0
    loader = Epochs(sizes.prompts, sizes.texts, episode, at)
    run = RecordedRun(args, RhymeSettings.from_namespace(args), loader, course.samples_of, course, ENGINES)
    error = ""
    try:
        run.go(episode, 0, after.state if after else None)
    except (NoRewardError, PlacingError) as raised:
        error = str(raised)
    else:
        check_nothing_is_stranded(run)
    found = []
    batches = Batches(run.first + 1, SAMPLES, EXCHANGED if likely.long else TAKEN_AHEAD)
    for end, groups in steps_of(run.sent):
        for group in groups:
            batches.add(group)
        samples = batches.complete(end.step, end.prompts)
        assert [sample.info["number"].item() for sample in samples] == [*range(SAMPLES)] * end.prompts
        rows = [sample.labels[0] for sample in samples]
        assert all(rows[first] == rows[first + 1] for first in range(0, len(rows), SAMPLES))
        states = end.client_states
        at = states["data_loader_state_dict"]["at"]
        found.append(Trained(end.step, rows[::SAMPLES], states["episode"], at, state_of(end), end.excluded))
    check_told(run, course, found, error)
    return found, error


def check_nothing_is_stranded(run: RecordedRun) -> None:
    """Nothing is with engines that are there, and the controller keeps nothing, when a run has ended."""
    assert [ref for ref in run.pending if ref.engine not in run.dead] == []
    for engine, turns in enumerate(run.turns):
        assert engine in run.dead or (turns.over and not turns._waiting)
    controller = run.controller
    assert not (controller._flying or controller._late or controller._groups or controller._sent)


def check_told(run: RecordedRun, course: Composed, found: list[Trained], error: str) -> None:
    """Each row without a reward is named and counted."""
    texts = [event.text for event in run.events if isinstance(event, Note)]
    assert sum("is not trained on, because its reward did not come" in text for text in texts) == len(course.late)
    assert len(set(course.late)) == len(course.late)
    if not error and found:
        assert found[-1].excluded == len(course.late)


def check_sizes(sizes: Sizes, likely: Likely, found: list[Trained]) -> None:
    """Batches make whole updates where OpenRLHF's own do."""
    own = {min(sizes.batch, sizes.prompts), sizes.prompts % sizes.batch}
    for step in found:
        assert 0 < len(step.rows) <= sizes.batch
        if not likely.filtered and len(step.rows) not in own:
            assert len(step.rows) * SAMPLES % sizes.update == 0


SOME = st.sampled_from([0.0, 0.05, 0.3])


@settings(max_examples=examples(100), deadline=None)
@given(
    st.builds(Sizes, st.integers(1, 12), st.integers(1, 4), st.integers(1, 4).map(SAMPLES.__mul__), st.integers(1, 12)),
    # Both together are refused at the start (cli/preflight.py).
    st.builds(Likely, SOME, SOME, st.just(0.0), SOME, SOME) | st.builds(Likely, SOME, st.just(0.0), SOME, SOME, SOME),
    st.integers(0, 1 << 16),
    st.integers(0, 1 << 16),
)
def test_each_prompt_trains_once_or_is_told_as_left_out(sizes: Sizes, likely: Likely, seed: int, killed: int) -> None:
    course = Composed(random.Random(seed), likely)
    found, error = trained(sizes, course)
    check_sizes(sizes, likely, found)
    rows = {f"{epoch}.{row}" for epoch in range(EPOCHS) for row in range(sizes.prompts)}
    everything = Counter(row for step in found for row in step.rows)
    assert set(everything.values()) <= {1} and not set(course.late) & everything.keys()
    if error:
        given_up = f"was given to engines {MOST_ATTEMPTS} times" in error and max(course.lost.values()) == MOST_ATTEMPTS
        assert given_up or (course.late and ("does not divide" in error or "has got its rewards" in error))
    else:
        assert rows - everything.keys() <= {*course.late, *course.useless}
    if not found:
        return
    # Killed after any step: the run that goes on trains what is left of the epochs, and nothing twice.
    point = found[killed % len(found)]
    before = [row for step in found if step.step <= point.step for row in step.rows]
    later = Composed(random.Random(seed + 1), likely)
    after, error = trained(sizes, later, point)
    check_sizes(sizes, likely, after)
    both = Counter([*before, *(row for step in after for row in step.rows)])
    assert set(both.values()) <= {1}
    if not error:
        assert rows - both.keys() <= {*course.late, *course.useless, *later.late, *later.useless}


class Deaths(Composed):
    """All engines but `left` die at the moment at which a row fails; what follows from it meets engines that are gone.

    `how`: the row's reward is late, it teaches nothing, its sample was moved, or an engine dies that had it.
    """

    def __init__(self, how: str, left: int) -> None:
        super().__init__(random.Random(1), Likely(filtered=1e-9 * (how == "filtered")))
        self.how, self.left, self.died = how, left, False

    def fate(self, ref: Ref) -> Exception | None:
        if self.died or ref.label != "0.1":
            return None
        self.died = True
        self.run.dead |= {*range(ENGINES)} - {self.left}
        self.likely = replace(self.likely, **{self.how: 1.0})
        try:
            return super().fate(ref)
        finally:
            self.likely = replace(self.likely, **{self.how: 0.0})


@pytest.mark.parametrize("left", range(ENGINES))
@pytest.mark.parametrize("how", ["late", "filtered", "moved"])
def test_an_engine_that_has_died_unnoticed_gets_nothing_in_place_of_another(how: str, left: int) -> None:
    course = Deaths(how, left)
    found, error = trained(Sizes(14, 3, SAMPLES, 14), course)
    everything = {row for step in found for row in step.rows}
    left_out = set() if how == "moved" else {"0.1"}
    assert course.died and not error
    assert everything == {f"{epoch}.{row}" for epoch in range(EPOCHS) for row in range(14)} - left_out


class AlwaysLate(Composed):
    """Some rows never have a reward, in no epoch."""

    def __init__(self, seed: int, *rows: int) -> None:
        super().__init__(random.Random(seed), Likely())
        self.rows = rows

    def fate(self, ref: Ref) -> Exception | None:
        if int(ref.label.partition(".")[2]) not in self.rows:
            return None
        self.late.append(ref.label)
        return RewardLateError(LATE)


def sizes_of(found: list[Trained]) -> list[int]:
    return [len(step.rows) for step in found]


def notes_of(course: Composed, words: str) -> list[str]:
    return [event.text for event in course.run.events if isinstance(event, Note) and words in event.text]


def test_a_prompt_group_without_reward_gives_its_place_to_the_next_prompt() -> None:
    """Eight prompts in steps of two, of which the epoch's last lacks one; updates of one prompt group."""
    course = AlwaysLate(1, 1, 3)
    found, error = trained(Sizes(8, 2, SAMPLES, 8), course)
    assert error == "" and sizes_of(found) == [2, 2, 2] * EPOCHS
    assert {row for step in found for row in step.rows} == {f"{n}.{row}" for n in range(EPOCHS) for row in "024567"}
    # Those of the steps that it has: the one behind was found, too, but is not of them.
    assert [step.excluded for step in found] == [1, 2, 2, 3, 4, 4]
    notes = notes_of(course, "judge.py")
    assert len(notes) == 4 and all("another prompt takes its place" in text for text in notes)
    assert "(4 left out in this run)" in notes[-1]
    assert [event.samples for event in course.run.events if isinstance(event, RolloutFinished)] == [4, 4, 4] * EPOCHS


def test_a_batch_that_its_updates_do_not_divide_ends_the_run_in_one_sentence() -> None:
    """All prompts of the epoch are with the engines: nothing can take the place, and the last step lacks one."""
    course = AlwaysLate(1, 1)
    found, error = trained(Sizes(4, 2, 2 * SAMPLES, 4), course)
    assert sizes_of(found) == [2]
    assert error == (
        "step 2 has 2 samples, which --train.batch_size 4 does not divide: 1 prompt groups of the run had no reward in "
        "time, and the epoch has no others to take their places. Give rewards more time (--limits.reward_s) and resume "
        "with --ckpt.load_enable"
    )
    assert notes_of(course, "its epoch has no other prompt")


def test_a_smaller_last_step_is_openrlhfs_own() -> None:
    """Five prompts in steps of two: what --train.batch_size does not divide without any fault is no reason to end."""
    found, error = trained(Sizes(5, 2, 2 * SAMPLES, 5), AlwaysLate(3))
    assert error == "" and sizes_of(found) == [2, 2, 1] * EPOCHS


@pytest.mark.parametrize(("ranks", "micro_batch", "accumulation"), [(1, 8, 1), (2, 2, 2), (2, 1, 4), (1, 1, 8)])
def test_each_step_is_applied_in_itself_as_without_a_pipeline(ranks: int, micro_batch: int, accumulation: int) -> None:
    """26 prompts in steps of four, of which two never have a reward: each step is one update of its own samples."""
    found, error = trained(Sizes(26, 4, 4 * SAMPLES, 26), AlwaysLate(4, 1, 9))
    assert error == ""
    group = Ranks(ranks, micro_batch, accumulation)
    for step in found:
        group.train([1] * len(step.rows) * SAMPLES, name=step.step)
    # Six updates an epoch, as the loop without a pipeline makes of 24 prompts.
    assert len(found) == 6 * EPOCHS
    for engine in group.engines:
        assert engine.applied == [[step.step] * accumulation for step in found] and engine.waiting == []
