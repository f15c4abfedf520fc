"""The pipeline under schedules of faults: the product's generator and controller over engines that follow their turns.

Each prompt group trains once, or the run ends with one sentence. Engines that live keep nothing.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm")

import ray

from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.engine_losses import UNREACHED_SECONDS
from rhyme_openrlhf.pipeline.engines import LOOK_SECONDS, MOST_ATTEMPTS
from tests.faults.schedule import Schedule, core_dead, of_task, unreachable
from tests.pipeline.recorded_run import Ref
from tests.pipeline.test_features_composed import ENGINES, EPOCHS, SAMPLES, Composed, Likely, Sizes, trained

SIZES = Sizes(10, 2, SAMPLES, 10)
ROWS = {f"{epoch}.{row}" for epoch in range(EPOCHS) for row in range(SIZES.prompts)}
KINDS = (
    "actor killed", "core killed", "answer lost", "not reached", "moved and lost", "weights late", "reward raises",
)  # fmt: skip


class RewardBroken(RuntimeError):
    """An error of a user's reward function."""


class Faulty(Composed):
    """Faults by a schedule; every call to an engine and every wait is an await point."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        super().__init__(random.Random(seed), Likely())
        self.schedule = schedule
        self.now = 0.0
        self.waits = -1
        self.cores: set[int] = set()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Have the controller's clock go by its waits, and calls to engines pass await points."""
        patch.setattr(time, "sleep", self.sleep)
        patch.setattr(time, "monotonic", lambda: self.now)
        patch.setattr(ray, "kill", self.kill)
        patch.setattr("tests.pipeline.recorded_run.RecordedRun._call", calls(self))
        patch.setattr("tests.pipeline.recorded_run.RecordedRun.may_end", may_end(self))
        patch.setattr("tests.pipeline.recorded_run.RecordedRun.advance", advance(self))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def kill(self, handle: Any) -> None:
        self.run.dead.add(self.run.generator.vllm_engines.index(handle))

    def may_wait(self) -> bool:
        return self.waits >= 0 or bool(self.cores - self.run.dead)

    def left(self) -> list[int]:
        return [n for n in range(ENGINES) if n not in self.run.dead | self.cores]

    def point(self, engine: int) -> str:
        """Pass an await point; return what happens to the call that is under way."""
        fault = self.schedule.next()
        spare = len(self.left()) > 1
        if fault == "actor killed" and spare:
            self.run.dead.add(engine)
        if fault == "core killed" and spare and engine not in self.run.dead:
            self.cores.add(engine)
        if fault == "weights late":
            self.waits = 3
        return fault

    def before(self) -> None:
        self.now += LOOK_SECONDS / 3
        self.point(self.chance.randrange(ENGINES))

    def fate(self, ref: Ref) -> Exception | None:
        match self.point(ref.engine):
            case "not reached" | "answer lost":
                return unreachable()
            case "moved and lost":
                return of_task(EngineLost("engine 1 is gone: it was killed"))
            case "reward raises":
                return RewardBroken("the reward function raised")
        return None


def calls(course: Faulty) -> Any:
    from tests.pipeline.recorded_run import RecordedRun

    own = RecordedRun._call

    def call(run: RecordedRun, engine: int, name: str, *given: Any, **named: Any) -> Ref:
        fault = course.point(engine) if name in ("extend_turn", "turn_report", "alive") else ""
        if fault == "not reached":
            return Ref(engine, lambda: throw(unreachable()))
        answer = own(run, engine, name, *given, **named)
        if name == "alive" and engine in course.cores:
            return Ref(-1, lambda: found(course, engine))
        # It is followed, and its answer does not arrive; that of a report is still to come.
        return Ref(engine, lambda: throw(unreachable())) if fault == "answer lost" and not answer.report else answer

    return call


def throw(error: Exception) -> Any:
    raise error


def found(course: Faulty, engine: int) -> Any:
    """Raise what tells of a dead core; from then on nothing of the engine counts."""
    course.run.dead.add(engine)
    raise core_dead()


def may_end(course: Faulty) -> Any:
    from tests.pipeline.recorded_run import RecordedRun

    own = RecordedRun.may_end
    # An engine whose core is dead and whose actor lives answers nothing.
    return lambda run, ref: ref.engine not in course.cores and own(run, ref)


def advance(course: Faulty) -> Any:
    from tests.pipeline.recorded_run import RecordedRun

    own = RecordedRun.advance

    def after(run: RecordedRun) -> None:
        course.waits -= 1
        if course.waits < 0:
            own(run)

    return after


def run(schedule: Schedule, seed: int) -> tuple[list[str], str]:
    """Return the rows that were trained, and the sentence with which the run ended, "" if it went on to its end."""
    course = Faulty(schedule, seed)
    with pytest.MonkeyPatch.context() as patch:
        course.patch(patch)
        try:
            found, error = trained(SIZES, course)
        except RewardBroken as ended:
            return [], str(ended)
    return [row for step in found for row in step.rows], error


def schedules(seeds: range) -> Counter[str]:
    """Run a schedule for each seed; return the faults that happened by kind."""
    found: Counter[str] = Counter()
    for seed in seeds:
        counted = Schedule()
        rows, error = run(counted, seed)
        assert not error and sorted(rows) == sorted(ROWS)
        schedule = Schedule.of(seed, counted.points, KINDS)
        try:
            rows, error = run(schedule, seed)
            assert sorted(rows) == sorted(ROWS) or (error and schedule.hit["reward raises"])
        except BaseException as failure:
            raise AssertionError(f"schedule {seed}: {schedule.faults}") from failure
        found += schedule.hit
    return found


def test_each_prompt_group_trains_once_or_the_run_ends_with_one_sentence() -> None:
    assert set(schedules(range(60))) == set(KINDS)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_each_prompt_group_trains_once_under_many_schedules() -> None:
    assert set(schedules(range(60, 3000))) == set(KINDS)


class Always(Faulty):
    """Each attempt at one prompt group fails with the same error, and nothing else does."""

    def __init__(self, error: Exception) -> None:
        super().__init__(Schedule(), 1)
        self.error, self.attempts = error, 0

    def fate(self, ref: Ref) -> Exception | None:
        if ref.label != "0.1":
            return None
        self.attempts += 1
        return self.error


@pytest.mark.parametrize("error", [unreachable(), of_task(EngineLost("engine 1 is gone: it was killed"))])
def test_a_prompt_group_that_fails_again_and_again_ends_the_run_in_one_sentence(error: Exception) -> None:
    """Before, the same work went to the same engine for ever."""
    course = Always(error)
    with pytest.MonkeyPatch.context() as patch:
        course.patch(patch)
        _, ended = trained(SIZES, course)
    assert f"prompt group 1 of step 1 was given to engines {MOST_ATTEMPTS} times" in ended
    assert course.attempts == MOST_ATTEMPTS


def test_an_engine_whose_core_dies_while_it_waits_for_weights_is_found_at_the_next_look() -> None:
    """Nothing fails of what it has: vLLM's calls are never answered, and its actor answers that its core is dead."""

    class Dies(Faulty):
        def before(self) -> None:
            self.now += LOOK_SECONDS / 3
            if self.run.sent:
                self.cores = {1}

    course = Dies(Schedule(), 3)
    with pytest.MonkeyPatch.context() as patch:
        course.patch(patch)
        found, error = trained(SIZES, course)
    assert not error and sorted(row for step in found for row in step.rows) == sorted(ROWS)


def test_an_engine_out_of_reach_for_good_is_killed_and_its_part_done_by_others() -> None:

    class Away(Faulty):
        def point(self, engine: int) -> str:
            return "not reached" if engine == 2 else ""

    course = Away(Schedule(), 3)
    with pytest.MonkeyPatch.context() as patch:
        course.patch(patch)
        found, error = trained(SIZES, course)
        assert course.now > UNREACHED_SECONDS
    assert course.run.dead == {2}
    assert not error and sorted(row for step in found for row in step.rows) == sorted(ROWS)
